//! Whom to try next, and until when.
//!
//! The planner owns the count: Pingora's retry loop only asks. It answers with a candidate and the
//! time it may take, with a moment to wait for, or with the end. It never plans past the deadline,
//! never after the commit, and never more than `attempts_max` tries.
//!
//! Another candidate is tried at once. When all had their try, those come *again* whose failure a pause
//! may mend ([`Failure::is_transient`]), each after its backoff and never before its Retry-After, the
//! soonest first. A candidate that the breaker refused at the last moment (its one probe is under way)
//! waits in the same line: it was not tried. All waiting of a request together is at most 30 s; what
//! would need more is not waited for, because by then the caller's own patience is the better judge.
//!
//! Deliberately absent: the retry budget of all requests together. The board asks it at each `begin`.

use std::time::{Duration, Instant};

use rand_core::RngCore;

use crate::ids::EndpointId;
use crate::upstream::backoff;
use crate::upstream::deadline::Deadline;
use crate::upstream::failure::Failure;

/// The longest that a request waits in all.
pub const WAITING_MAX: Duration = Duration::from_secs(30);
/// A refused candidate is not asked again sooner.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAttempt {
    /// Send the request there.
    Try {
        /// The endpoint.
        endpoint: EndpointId,
        /// How long until it must have committed.
        share: Duration,
        /// Nobody is left behind it: no watchdog may cut it, only its share.
        last: bool,
    },
    /// Ask again at this moment.
    WaitUntil(Instant),
    /// It is over.
    Stop(StopReason),
}

/// Why there is no further attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The answer belongs to the caller already.
    Committed,
    /// Every candidate had its try, and none is worth another.
    Exhausted,
    /// As many tries as are allowed were made.
    AttemptsMax,
    /// No time is left for another.
    Deadline,
}

/// Whether the attempt under way was sent before, unseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resend {
    Unused,
    /// The next try is it.
    Due,
    Used,
}

/// The plan of one request.
#[derive(Debug)]
pub struct Planner {
    order: Vec<EndpointId>,
    next: usize,
    /// For endpoints that share a place with another: the first of it.
    places: Vec<(EndpointId, EndpointId)>,
    /// Who may come again, and when. At most one entry per candidate.
    again: Vec<Again>,
    current: Option<Again>,
    made: u32,
    attempts_max: u32,
    deadline: Deadline,
    committed: bool,
    resend: Resend,
    waited: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Again {
    endpoint: EndpointId,
    at: Instant,
    failures: u32,
    /// The wait for it is counted already.
    waited_for: bool,
}

impl Planner {
    /// A plan to try `order`, at most `attempts_max` of it, until `deadline`.
    #[must_use]
    pub fn new(order: Vec<EndpointId>, attempts_max: u32, deadline: Deadline) -> Self {
        Self {
            order,
            next: 0,
            places: vec![],
            again: vec![],
            current: None,
            made: 0,
            attempts_max,
            deadline,
            committed: false,
            resend: Resend::Unused,
            waited: Duration::ZERO,
        }
    }

    /// Candidates that the breaker refuses, for the case that everybody else fails: they stand in line
    /// behind the order, take nothing from its shares, and leave its last one without a watchdog.
    #[must_use]
    pub fn falling_back_on(mut self, now: Instant, refused: Vec<EndpointId>) -> Self {
        let line = |endpoint| Again { endpoint, at: now, failures: 0, waited_for: false };
        self.again.extend(refused.into_iter().map(line));
        self
    }

    /// Which endpoints are at one place, told apart by their credentials alone: `place` names the first of it. Together
    /// they have one share of the time, and when the place fails for one, the others stand back behind everybody else.
    #[must_use]
    pub fn in_places(mut self, place: impl Fn(EndpointId) -> EndpointId) -> Self {
        let known = self.order.iter().chain(self.again.iter().map(|again| &again.endpoint));
        let shared =
            known.map(|endpoint| (*endpoint, place(*endpoint))).filter(|(endpoint, place)| endpoint != place);
        self.places = shared.collect();
        self
    }

    /// Everybody that it was made of, tried or not.
    #[must_use]
    pub fn known(&self) -> Vec<EndpointId> {
        let current = self.current.iter().chain(&self.again).map(|again| again.endpoint);
        self.order.iter().copied().chain(current).collect()
    }

    /// Goes on with others behind those it was made of, and falls back on `refused` behind them; one of its own was
    /// refused, so that its attempts may get beyond them. `place`: as for [`Self::in_places`].
    pub fn goes_on(
        &mut self,
        now: Instant,
        order: &[EndpointId],
        refused: &[EndpointId],
        place: impl Fn(EndpointId) -> EndpointId,
    ) {
        self.order.extend(order);
        let line =
            |endpoint: &EndpointId| Again { endpoint: *endpoint, at: now, failures: 0, waited_for: false };
        self.again.extend(refused.iter().map(line));
        let placed = order.iter().chain(refused).map(|endpoint| (*endpoint, place(*endpoint)));
        self.places.extend(placed.filter(|(endpoint, place)| endpoint != place));
    }

    /// The next attempt. Counts it as made, or the wait as waited.
    pub fn next_attempt(&mut self, now: Instant) -> NextAttempt {
        let next = self.peek(now);
        match next {
            NextAttempt::Try { endpoint, .. } => {
                self.made += 1;
                self.resend = if self.resend == Resend::Due { Resend::Used } else { Resend::Unused };
                self.current = Some(self.take(now, endpoint));
            }
            NextAttempt::WaitUntil(at) => {
                if let Some(again) = self.soonest_mut()
                    && !again.waited_for
                {
                    again.waited_for = true;
                    self.waited += at.saturating_duration_since(now);
                }
            }
            NextAttempt::Stop(_) => {}
        }
        next
    }

    /// What [`Self::next_attempt`] would answer, counting nothing.
    #[must_use]
    pub fn preview(&self, now: Instant) -> NextAttempt {
        self.peek(now)
    }

    /// Whether there would be a next attempt, now or after a wait.
    #[must_use]
    pub fn has_next(&self, now: Instant) -> bool {
        match self.peek(now) {
            NextAttempt::Try { .. } | NextAttempt::WaitUntil(_) => true,
            NextAttempt::Stop(_) => false,
        }
    }

    /// The attempt failed. Whoever does not say so never sees the same endpoint again.
    /// `not_before`: when its rest is over, where it has one.
    pub fn failed(
        &mut self,
        now: Instant,
        failure: &Failure,
        not_before: Option<Instant>,
        rng: &mut impl RngCore,
    ) {
        let Some(tried) = self.current.take() else { return };
        if failure.blames_endpoint() {
            self.stand_back(tried.endpoint);
        }
        if failure.is_transient() {
            let failures = tried.failures + 1;
            let at = backoff::again_at(now, failures, not_before, rng);
            self.again.push(Again { at, failures, waited_for: false, ..tried });
        }
    }

    /// The candidate just planned was refused before anything was sent: it was no attempt. It may be asked
    /// again at `until`, if that is worth a wait.
    pub fn refused(&mut self, now: Instant, until: Option<Instant>) {
        let Some(refused) = self.current.take() else { return };
        self.made = self.made.saturating_sub(1);
        let Some(until) = until else { return };
        let at = until.max(now + REFUSED_PAUSE);
        self.again.push(Again { at, waited_for: false, ..refused });
    }

    /// The upstream did not work on the request (a pooled connection turned out dead, a stream of HTTP/2 was
    /// refused): the same candidate gets it again at once. It is no attempt, and it happens once in each: what
    /// happens twice in a row, the second time over a new connection, is the candidate's own doing. Answers
    /// whether it may.
    pub fn resend(&mut self) -> bool {
        let may = !self.committed && self.resend == Resend::Unused && self.made > 0;
        let Some(tried) = self.current.filter(|_| may) else { return false };
        self.current = None;
        self.resend = Resend::Due;
        self.made -= 1;
        self.next = self.next.saturating_sub(1);
        // Its place in the order is where the next try comes from, whether it was there or in line again.
        match self.order.get_mut(self.next) {
            Some(place) if *place == tried.endpoint => {}
            _ => {
                self.next += 1;
                self.again.insert(0, tried);
            }
        }
        true
    }

    /// From here on the answer is the caller's.
    pub fn commit(&mut self) {
        self.committed = true;
    }

    /// Who stands behind the order and was not tried: refused when the plan was made, or at the last moment.
    #[must_use]
    pub fn untried_fall_backs(&self) -> Vec<EndpointId> {
        self.again.iter().filter(|again| again.failures == 0).map(|again| again.endpoint).collect()
    }

    /// Attempts made so far.
    #[must_use]
    pub fn made(&self) -> u32 {
        self.made
    }

    /// What is left of the time to the commit.
    #[must_use]
    pub fn remaining(&self, now: Instant) -> Duration {
        self.deadline.remaining(now)
    }

    /// How long it has waited so far, waits that were planned included.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }

    fn peek(&self, now: Instant) -> NextAttempt {
        if self.committed {
            return NextAttempt::Stop(StopReason::Committed);
        }
        let fresh = self.order.get(self.next).copied();
        let soonest = self.soonest().copied();
        let (endpoint, at) = match (fresh, soonest) {
            (Some(endpoint), _) => (endpoint, now),
            (None, Some(again)) => (again.endpoint, again.at),
            (None, None) => return NextAttempt::Stop(StopReason::Exhausted),
        };
        if self.made >= self.attempts_max {
            return NextAttempt::Stop(StopReason::AttemptsMax);
        }
        let wait = at.saturating_duration_since(now);
        let counted = soonest.is_some_and(|again| again.waited_for);
        if !wait.is_zero() && !counted && self.waited + wait > WAITING_MAX {
            return NextAttempt::Stop(StopReason::Exhausted);
        }
        let left = self.left();
        let share = self.deadline.share(now.max(at), left);
        if share.is_zero() {
            return NextAttempt::Stop(StopReason::Deadline);
        }
        if !wait.is_zero() {
            return NextAttempt::WaitUntil(at);
        }
        NextAttempt::Try { endpoint, share, last: left == 1 }
    }

    /// Takes the candidate off the line that it stands in.
    fn take(&mut self, now: Instant, endpoint: EndpointId) -> Again {
        let first = Again { endpoint, at: now, failures: 0, waited_for: false };
        if self.order.get(self.next) == Some(&endpoint) {
            self.next += 1;
            return first;
        }
        match self.again.iter().position(|again| again.endpoint == endpoint) {
            Some(place) => self.again.remove(place),
            None => first,
        }
    }

    fn soonest(&self) -> Option<&Again> {
        self.again.iter().min_by_key(|again| again.at)
    }

    fn soonest_mut(&mut self) -> Option<&mut Again> {
        self.again.iter_mut().min_by_key(|again| again.at)
    }

    fn place(&self, endpoint: EndpointId) -> EndpointId {
        self.places.iter().find(|(known, _)| *known == endpoint).map_or(endpoint, |(_, place)| *place)
    }

    /// A server that failed will most likely fail with its other credentials too; but not surely, some errors of
    /// the 5xx kind are about an account. So they come last and are not left out.
    fn stand_back(&mut self, failed: EndpointId) {
        let place = self.place(failed);
        let fresh = self.order.split_off(self.next.min(self.order.len()));
        let (neighbours, others): (Vec<_>, Vec<_>) =
            fresh.into_iter().partition(|endpoint| self.place(*endpoint) == place);
        self.order.extend(others);
        self.order.extend(neighbours);
    }

    /// How many places may still be tried, those that come again included only when nobody else is left: an
    /// untried one must not lose its watchdog's absence, nor its share, to a second try of another.
    fn left(&self) -> u32 {
        let fresh = self.order.get(self.next..).unwrap_or_default();
        let again: Vec<EndpointId>;
        let candidates = if fresh.is_empty() {
            again = self.again.iter().map(|again| again.endpoint).collect();
            &again
        } else {
            fresh
        };
        // More than may still be made are not counted: a model may have a thousand routes.
        let left_max = self.attempts_max.saturating_sub(self.made);
        let mut places: Vec<EndpointId> = vec![];
        for place in candidates.iter().map(|endpoint| self.place(*endpoint)) {
            if places.len() >= usize::try_from(left_max).unwrap_or(usize::MAX) {
                break;
            }
            if !places.contains(&place) {
                places.push(place);
            }
        }
        u32::try_from(places.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_core::SeedableRng;
    use rand_pcg::Pcg64Mcg;

    use super::*;

    fn planner(candidates: usize, attempts_max: u32, now: Instant, whole: Duration) -> Planner {
        let order = (0..candidates).map(EndpointId).collect();
        Planner::new(order, attempts_max, Deadline::new(now, whole))
    }

    #[test]
    fn a_plan_that_goes_on_tries_the_others_and_its_last_one_is_last_no_more() {
        let now = Instant::now();
        let mut rng = Pcg64Mcg::seed_from_u64(1);
        let mut plan = planner(2, 5, now, Duration::from_secs(60));
        let next = |plan: &mut Planner| match plan.next_attempt(now) {
            NextAttempt::Try { endpoint, last, .. } => (endpoint.0, last),
            other @ (NextAttempt::WaitUntil(_) | NextAttempt::Stop(_)) => panic!("{other:?}"),
        };
        assert_eq!(next(&mut plan), (0, false));
        plan.refused(now, None);
        assert_eq!(plan.known(), [EndpointId(0), EndpointId(1)]);
        plan.goes_on(now, &[2, 3, 4].map(EndpointId), &[EndpointId(5)], |id| {
            if id.0 == 3 { EndpointId(2) } else { id }
        });
        assert_eq!(next(&mut plan), (1, false), "others are behind it");
        plan.failed(now, &Failure::Status(500), None, &mut rng);
        assert_eq!(next(&mut plan), (2, false));
        plan.failed(now, &Failure::Status(500), None, &mut rng);
        assert_eq!(next(&mut plan), (4, false), "another place before the same one");
        plan.failed(now, &Failure::Status(500), None, &mut rng);
        assert_eq!(next(&mut plan), (3, true));
        plan.refused(now, None);
        assert_eq!(next(&mut plan).0, 5, "and who is refused at the end");
    }

    #[test]
    fn candidates_are_tried_in_order_and_the_last_is_said_to_be_last() {
        let now = Instant::now();
        let mut plan = planner(2, 5, now, Duration::from_secs(60));
        let first = plan.next_attempt(now);
        assert_eq!(
            first,
            NextAttempt::Try { endpoint: EndpointId(0), share: Duration::from_secs(25), last: false }
        );
        assert!(matches!(plan.next_attempt(now), NextAttempt::Try { last: true, .. }));
        assert_eq!(plan.next_attempt(now), NextAttempt::Stop(StopReason::Exhausted));
    }

    #[test]
    fn the_last_allowed_attempt_is_the_last_one_too() {
        let now = Instant::now();
        let mut plan = planner(9, 1, now, Duration::from_secs(60));
        assert!(matches!(plan.next_attempt(now), NextAttempt::Try { last: true, .. }));
        assert_eq!(plan.next_attempt(now), NextAttempt::Stop(StopReason::AttemptsMax));
    }

    #[test]
    fn nothing_is_tried_after_the_commit() {
        let now = Instant::now();
        let mut plan = planner(3, 5, now, Duration::from_secs(60));
        plan.next_attempt(now);
        plan.commit();
        assert!(!plan.has_next(now) && !plan.resend());
        assert_eq!(plan.next_attempt(now), NextAttempt::Stop(StopReason::Committed));
    }

    #[test]
    fn a_dead_pooled_connection_is_re_sent_once_and_counts_for_nothing() {
        let now = Instant::now();
        let mut plan = planner(1, 1, now, Duration::from_secs(60));
        plan.next_attempt(now);
        assert!(plan.resend());
        assert!(matches!(plan.next_attempt(now), NextAttempt::Try { endpoint: EndpointId(0), .. }));
        assert!(!plan.resend());
        assert_eq!(plan.made(), 1);
    }

    #[test]
    fn every_candidate_may_have_a_dead_pooled_connection() {
        let now = Instant::now();
        let mut plan = planner(2, 5, now, Duration::from_secs(60));
        for candidate in [EndpointId(0), EndpointId(1)] {
            plan.next_attempt(now);
            assert!(plan.resend());
            assert!(
                matches!(plan.next_attempt(now), NextAttempt::Try { endpoint, .. } if endpoint == candidate)
            );
            assert!(!plan.resend(), "once in an attempt");
            plan.failed(now, &Failure::Broken, None, &mut rng());
        }
        assert_eq!(plan.made(), 2);
    }

    #[test]
    fn credentials_of_one_place_share_its_time_and_stand_back_when_it_fails() {
        let now = Instant::now();
        let plan = || {
            let same = |endpoint| if endpoint == EndpointId(1) { EndpointId(0) } else { endpoint };
            planner(3, 5, now, Duration::from_secs(60)).in_places(same)
        };
        for (failure, then) in [
            (Failure::Status(429), [1, 2]),
            (Failure::Credential(401), [1, 2]),
            (Failure::Status(500), [2, 1]),
        ] {
            let mut plan = plan();
            let share = Duration::from_secs(25);
            let first = NextAttempt::Try { endpoint: EndpointId(0), share, last: false };
            assert_eq!(plan.next_attempt(now), first, "two places, not three");
            plan.failed(now, &failure, None, &mut rng());
            for expected in then {
                let NextAttempt::Try { endpoint, .. } = plan.next_attempt(now) else { panic!("{failure:?}") };
                assert_eq!(endpoint, EndpointId(expected), "{failure:?}");
                plan.failed(now, &Failure::Status(429), None, &mut rng());
            }
        }
    }

    fn rng() -> Pcg64Mcg {
        Pcg64Mcg::seed_from_u64(1)
    }

    #[test]
    fn when_all_had_their_try_the_transient_ones_come_again_after_a_pause() {
        let now = Instant::now();
        let mut plan = planner(2, 5, now, Duration::from_secs(60));
        plan.next_attempt(now);
        plan.failed(now, &Failure::Status(503), None, &mut rng());
        assert!(
            matches!(plan.next_attempt(now), NextAttempt::Try { endpoint: EndpointId(1), .. }),
            "at once"
        );
        plan.failed(now, &Failure::Status(429), None, &mut rng());
        let NextAttempt::WaitUntil(at) = plan.next_attempt(now) else { panic!("waits") };
        assert!(at <= now + Duration::from_millis(200));
        assert_eq!(plan.next_attempt(now), NextAttempt::WaitUntil(at), "asking twice waits once");
        assert_eq!(plan.waited(), at - now);
        assert!(matches!(
            plan.next_attempt(at),
            NextAttempt::Try { endpoint: EndpointId(0), last: true, .. }
        ));
        plan.failed(at, &Failure::Credential(401), None, &mut rng());
        assert_eq!(plan.next_attempt(at), NextAttempt::Stop(StopReason::Exhausted));
    }

    #[test]
    fn whoever_does_not_tell_of_failures_gets_every_candidate_once() {
        let now = Instant::now();
        let mut plan = planner(1, 5, now, Duration::from_secs(60));
        plan.next_attempt(now);
        assert!(!plan.has_next(now));
    }

    #[test]
    fn a_rest_that_ends_too_late_is_not_waited_for() {
        let now = Instant::now();
        for (rest, waits) in [(29, true), (31, false)] {
            let mut plan = planner(1, 5, now, Duration::from_secs(600));
            plan.next_attempt(now);
            plan.failed(now, &Failure::Status(503), Some(now + Duration::from_secs(rest)), &mut rng());
            assert_eq!(plan.has_next(now), waits, "{rest}");
        }
        let mut plan = planner(1, 5, now, Duration::from_secs(10));
        plan.next_attempt(now);
        plan.failed(now, &Failure::Status(503), Some(now + Duration::from_secs(20)), &mut rng());
        assert_eq!(plan.next_attempt(now), NextAttempt::Stop(StopReason::Deadline));
    }

    #[test]
    fn a_refused_candidate_was_no_attempt_and_is_asked_again_last() {
        let now = Instant::now();
        let mut plan = planner(2, 2, now, Duration::from_secs(60));
        plan.next_attempt(now);
        plan.refused(now, Some(now + Duration::from_secs(2)));
        assert_eq!(plan.made(), 0);
        assert!(matches!(plan.next_attempt(now), NextAttempt::Try { endpoint: EndpointId(1), .. }));
        plan.failed(now, &Failure::Status(429), None, &mut rng());
        assert_eq!(plan.next_attempt(now), NextAttempt::WaitUntil(now + Duration::from_secs(2)));
    }

    #[test]
    fn refused_routes_are_fallen_back_on_last_and_cost_the_others_nothing() {
        let now = Instant::now();
        let mut plan = planner(1, 5, now, Duration::from_secs(60)).falling_back_on(now, vec![EndpointId(7)]);
        let first = NextAttempt::Try { endpoint: EndpointId(0), share: Duration::from_secs(50), last: true };
        assert_eq!(plan.next_attempt(now), first);
        plan.failed(now, &Failure::Connect, None, &mut rng());
        assert!(matches!(plan.next_attempt(now), NextAttempt::Try { endpoint: EndpointId(7), .. }));
        plan.refused(now, None);
        assert!(matches!(plan.next_attempt(now), NextAttempt::WaitUntil(_)), "back to the first");
    }

    #[test]
    fn a_dead_pooled_connection_of_a_second_try_is_re_sent_too() {
        let now = Instant::now();
        let mut plan = planner(1, 2, now, Duration::from_secs(60));
        plan.next_attempt(now);
        plan.failed(now, &Failure::Broken, None, &mut rng());
        let NextAttempt::WaitUntil(at) = plan.next_attempt(now) else { panic!("waits") };
        plan.next_attempt(at);
        assert!(plan.resend());
        assert!(matches!(plan.next_attempt(at), NextAttempt::Try { endpoint: EndpointId(0), .. }));
        assert_eq!(plan.made(), 2);
    }

    proptest! {
        #[test]
        fn waits_at_most_thirty_seconds_and_never_comes_before_a_retry_after(
            candidates in 1_usize..6, attempts_max in 1_u32..7, whole_ms in 1_u64..600_000, seed: u64,
            steps in prop::collection::vec((0_u64..10_000, prop::option::of(0_u64..40_000), 0_u8..6), 1..60),
        ) {
            let start = Instant::now();
            let mut rng = Pcg64Mcg::seed_from_u64(seed);
            let whole = Duration::from_millis(whole_ms);
            let mut plan = planner(candidates, attempts_max, start, whole);
            let mut not_before = vec![start; candidates];
            let (mut now, mut tries, mut waited) = (start, 0, Duration::ZERO);
            for (took_ms, rest_ms, what) in steps {
                let expected = plan.has_next(now);
                match plan.next_attempt(now) {
                    NextAttempt::Try { endpoint, share, last } => {
                        prop_assert!(expected && now + share <= start + whole);
                        prop_assert!(now >= not_before[endpoint.0], "before its Retry-After");
                        prop_assert!(last || plan.left() > 0, "the last one is told so");
                        now += Duration::from_millis(took_ms).min(share);
                        let rest = rest_ms.map(|ms| now + Duration::from_millis(ms));
                        if what == 0 {
                            let until = rest.unwrap_or(now);
                            plan.refused(now, Some(until));
                            not_before[endpoint.0] = until;
                            continue;
                        }
                        tries += 1;
                        let failure = [Failure::Status(503), Failure::Status(429), Failure::Connect]
                            [usize::from(what) % 3].clone();
                        plan.failed(now, &failure, rest, &mut rng);
                        not_before[endpoint.0] = rest.unwrap_or(now);
                    }
                    NextAttempt::WaitUntil(at) => {
                        prop_assert!(expected && at > now && at < start + whole);
                        waited += at - now;
                        now = at;
                    }
                    NextAttempt::Stop(_) => { prop_assert!(!expected); break; }
                }
                prop_assert!(tries <= attempts_max && waited <= WAITING_MAX && plan.again.len() <= candidates);
            }
        }

        #[test]
        fn never_past_the_deadline_never_above_the_cap(
            candidates in 0_usize..12, attempts_max in 0_u32..7, whole_ms in 1_u64..600_000,
            steps in prop::collection::vec((0_u64..200_000, 0_u8..8), 0..20),
        ) {
            let start = Instant::now();
            let whole = Duration::from_millis(whole_ms);
            let mut plan = planner(candidates, attempts_max, start, whole);
            let (mut now, mut tries, mut committed) = (start, 0_u32, false);
            for (wait, what) in steps {
                now += Duration::from_millis(wait);
                match what {
                    0 => { plan.commit(); committed = true; }
                    1 => if plan.resend() { tries -= 1; },
                    _ => {
                        let expected = plan.has_next(now);
                        if let NextAttempt::Try { share, .. } = plan.next_attempt(now) {
                            prop_assert!(expected && !committed);
                            prop_assert!(now + share <= start + whole);
                            tries += 1;
                        } else {
                            prop_assert!(!expected);
                        }
                    }
                }
                prop_assert!(tries <= attempts_max);
            }
        }
    }
}
