//! When an endpoint is refused, and how it comes back.
//!
//! **Closed admits, open refuses, half-open probes.** Two rules open a breaker, because neither sees
//! what the other does:
//!
//! - *Five failures in a row.* A dead endpoint is found after five calls, whatever its past hour was like.
//! - *More than half of at least ten calls in a minute.* An endpoint that answers every other call never
//!   fails five times in a row. Ten calls, since without a minimum the first error of a quiet minute
//!   is 100 %. This rule never refuses the **last route** of a model: an endpoint that serves 40 % of
//!   its calls is better than none. Its weight has fallen already. (Five in a row may refuse the last
//!   one; [`super::last_resort`] then decides who may still try.)
//!
//! The window is sixty one-second buckets and not a decaying average, so that the rule can be told to an
//! operator, and so that the script which shares it over a fleet counts the same thing.
//!
//! It stays open for 10 s, doubling with every opening up to 5 min, jittered by ±20 % lest a fleet's probes
//! march in step; five minutes closed take one doubling back. Then it is half-open: **one** call at a
//! time goes through, on a lease that ends with its watchdog, so that a probe which hangs or whose caller
//! vanished cannot keep the endpoint out for good. Three successes close it, with a fresh window (the old
//! failures would open it again at once); one failure opens it, doubled.
//!
//! Five minutes are long when the endpoint is well after one. Where it has a free active check, a check that
//! passes ends the open time: half-open at once. If the probe then fails, the check did not see what is
//! wrong, or it flaps: the next passed check counts after half a minute. So a check that is blind costs
//! two failed probes a minute, and an endpoint that flaps is not lost for five.
//!
//! Calls carry the *epoch* in which they began. What began before the last change proves nothing about
//! the endpoint of today: a slow success from before the opening does not close it.
//! A watchdog's trip on a reused connection counts half in the row, as the connection may be to blame.
//!
//! In a fleet a breaker is **tied** to those of the other nodes ([`super::fleet`]) from the moment that the fleet
//! has opened it until it is closed: then only the node with the fleet's claim probes. What a node opens by
//! what it alone has seen stays its own matter, and when the fleet cannot be heard all are untied.
//!
//! Deliberately absent: 429, caller faults and callers who left. They are neutral and touch nothing but
//! the lease they end.

use std::time::{Duration, Instant};

use rand_core::RngCore;

use crate::upstream::backoff::fraction;
use crate::upstream::fleet::{Ask, Claim};

/// A hard failure in the row; a soft one counts half.
pub(crate) const HARD: u32 = 2;
pub(crate) const SOFT: u32 = 1;
/// Five failures in a row.
const ROW_MAX: u32 = 5 * HARD;
const WINDOW_SECONDS: u64 = 60;
/// Fewer calls say nothing about a rate.
const CALLS_MIN: u32 = 10;
const OPEN_MIN: Duration = Duration::from_secs(10);
const OPEN_MAX: Duration = Duration::from_secs(300);
const JITTER: f64 = 0.2;
/// So long closed takes one doubling back.
const FORGIVE: Duration = Duration::from_secs(300);
/// So long a check is doubted whose probe has failed.
const DOUBT: Duration = Duration::from_secs(30);
/// Successful probes that close it.
const PROBES: u32 = 3;
/// A call that may not probe for want of a claim looks again so soon.
const CLAIM_POLL: Duration = Duration::from_millis(250);

/// One endpoint's breaker.
#[derive(Clone, Debug)]
pub struct Breaker {
    state: State,
    epoch: u64,
    /// Openings that are not forgiven yet.
    openings: u32,
    /// Since when the next one is being forgiven.
    forgive_from: Instant,
    row: u32,
    window: Window,
    /// Whether a passed check ends an open time.
    checks: Checks,
    /// Until when a call that had no other route may be under way although it is open.
    resort: Option<Instant>,
    /// Whether it is the fleet's, and then whether this node may probe.
    tie: Option<Claim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open { until: Instant },
    HalfOpen { successes: u32, lease: Option<Instant> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checks {
    Believed,
    /// One has ended an open time; the probe will tell.
    OnProof,
    /// The probe failed: not before this moment.
    Disproved(Instant),
}

/// What the breaker says to a call that asks now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Go.
    Closed,
    /// Go, as the one probe.
    Probe,
    /// Not before this moment.
    Refused(Instant),
}

/// One admitted call, to be given back with its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    epoch: u64,
    probe: bool,
}

/// How a call ended, to the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The endpoint did well.
    Success,
    /// It did not.
    Failure,
    /// It did not, or the reused connection did not.
    SoftFailure,
    /// This says nothing about the endpoint.
    Neutral,
}

/// Whether another route of the model admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// At least one does.
    Admit,
    /// This is the last one.
    None,
}

/// How many calls without another route may be under way at an endpoint that refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crowd {
    /// One.
    One,
    /// As many as the gate of the model lets through.
    AsTheGateSays,
}

/// What an outcome changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// It refuses until then.
    Opened(Instant),
    /// It admits again.
    Closed,
}

impl Breaker {
    /// A closed one.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            state: State::Closed,
            epoch: 0,
            openings: 0,
            forgive_from: now,
            row: 0,
            window: Window::new(now),
            resort: None,
            checks: Checks::Believed,
            tie: None,
        }
    }

    /// What a call would be told now.
    #[must_use]
    pub fn admission(&self, now: Instant) -> Admission {
        match self.state {
            State::Closed => Admission::Closed,
            State::Open { until } if now < until => Admission::Refused(until),
            State::HalfOpen { lease: Some(end), .. } if now < end => Admission::Refused(end),
            State::Open { .. } | State::HalfOpen { .. } => match self.tie {
                Some(claim) if !claim.is_good(now) => Admission::Refused(now + CLAIM_POLL),
                Some(_) | None => Admission::Probe,
            },
        }
    }

    /// Whether the outcome of a call with this permit counts.
    #[must_use]
    pub const fn counts(&self, permit: Permit) -> bool {
        permit.epoch == self.epoch
    }

    /// The fleet refuses it for so long. Calls under way prove nothing any more.
    pub fn hear_open(&mut self, now: Instant, remaining: Duration, openings: u32) -> Change {
        if self.checks == Checks::OnProof {
            self.checks = Checks::Disproved(now + DOUBT);
        }
        let until = now + remaining.min(OPEN_MAX);
        let news = !matches!(self.state, State::Open { .. });
        if news {
            self.epoch += 1;
        }
        self.state = State::Open { until };
        self.openings = openings;
        self.tie = Some(Claim::default());
        if news { Change::Opened(until) } else { Change::None }
    }

    /// The fleet has not closed it yet; so many probes have succeeded. One that is closed here has good reasons.
    pub fn hear_probed(&mut self, successes: u32) {
        match &mut self.state {
            State::Closed => return,
            State::Open { .. } if successes == 0 => {}
            State::Open { .. } => self.state = State::HalfOpen { successes, lease: None },
            State::HalfOpen { successes: own, .. } => *own = successes.max(*own),
        }
        self.tie.get_or_insert_default();
    }

    /// The fleet has closed it.
    pub fn hear_closed(&mut self, now: Instant) -> Change {
        match self.state {
            State::Closed => Change::None,
            State::Open { .. } | State::HalfOpen { .. } => self.close(now),
        }
    }

    /// The fleet cannot be heard, or knows nothing of it.
    pub const fn untie(&mut self) {
        self.tie = None;
    }

    /// Whether the fleet has opened it.
    #[must_use]
    pub const fn is_tied(&self) -> bool {
        self.tie.is_some()
    }

    /// This node may probe until then, or may not.
    pub const fn claimed(&mut self, until: Option<Instant>) {
        if let Some(claim) = &mut self.tie {
            claim.granted(until);
        }
    }

    /// What to ask of the fleet. `has_traffic`: somebody may come who could probe.
    pub fn ask(&mut self, now: Instant, has_traffic: bool) -> Option<Ask> {
        let (used, wanted) = match self.state {
            State::HalfOpen { lease, .. } => (lease, has_traffic),
            State::Open { until } => (None, has_traffic && until <= now),
            State::Closed => (None, false),
        };
        self.tie.as_mut()?.ask(now, used, wanted)
    }

    /// Admits a call, or refuses it until a moment. `lease_end` is when its watchdog would end it.
    ///
    /// # Errors
    /// The moment before which it is no use to ask again.
    pub fn begin(&mut self, now: Instant, lease_end: Instant) -> Result<Permit, Instant> {
        match self.admission(now) {
            Admission::Closed => Ok(Permit { epoch: self.epoch, probe: false }),
            Admission::Probe => Ok(self.probe(lease_end)),
            Admission::Refused(until) => Err(until),
        }
    }

    /// Admits a call although the breaker refuses, because it has no other route. `crowd`: whether more
    /// than one at a time may.
    ///
    /// # Errors
    /// The moment at which the one that is under way ends at the latest.
    pub fn begin_anyway(
        &mut self,
        now: Instant,
        lease_end: Instant,
        crowd: Crowd,
    ) -> Result<Permit, Instant> {
        let alone = crowd == Crowd::One;
        match self.state {
            State::Closed => Ok(Permit { epoch: self.epoch, probe: false }),
            // While it is open such a call changes nothing yet: only its success will.
            State::Open { until } if now < until => match self.resort.filter(|end| alone && *end > now) {
                Some(end) => Err(end),
                None => {
                    self.resort = Some(lease_end);
                    Ok(Permit { epoch: self.epoch, probe: true })
                }
            },
            State::HalfOpen { lease: Some(end), .. } if alone && now < end => Err(end),
            State::Open { .. } | State::HalfOpen { .. } => Ok(self.probe(lease_end)),
        }
    }

    /// Takes a call's outcome.
    pub fn end(
        &mut self,
        now: Instant,
        permit: Permit,
        verdict: Verdict,
        others: Others,
        rng: &mut impl RngCore,
    ) -> Change {
        if permit.epoch != self.epoch {
            return Change::None;
        }
        if permit.probe {
            self.resort = None;
        }
        match self.state {
            State::Closed => self.end_closed(now, verdict, others, rng),
            State::Open { .. } => match verdict {
                Verdict::Success if permit.probe => {
                    self.state = State::HalfOpen { successes: 0, lease: None };
                    self.end_probe(now, verdict, rng)
                }
                // A last resort that failed is no reason to wait longer: it was told to try.
                Verdict::Success | Verdict::Failure | Verdict::SoftFailure | Verdict::Neutral => Change::None,
            },
            State::HalfOpen { .. } => self.end_probe(now, verdict, rng),
        }
    }

    /// The probe's first event is in: it is as good as served, and the next may go.
    pub fn probe_answered(&mut self, now: Instant, permit: Permit, rng: &mut impl RngCore) -> Change {
        if permit.probe { self.end(now, permit, Verdict::Success, Others::Admit, rng) } else { Change::None }
    }

    /// An active check of the endpoint has passed.
    pub fn check_passed(&mut self, now: Instant) {
        if let State::Open { until } = self.state
            && now < until
            && match self.checks {
                Checks::Believed | Checks::OnProof => true,
                Checks::Disproved(until) => now >= until,
            }
        {
            self.state = State::Open { until: now };
            self.checks = Checks::OnProof;
        }
    }

    /// Openings in a row that are not forgiven: each doubles the time that it stays open.
    #[must_use]
    pub const fn openings(&self) -> u32 {
        self.openings
    }

    fn end_closed(
        &mut self,
        now: Instant,
        verdict: Verdict,
        others: Others,
        rng: &mut impl RngCore,
    ) -> Change {
        let weight = match verdict {
            Verdict::Neutral => return Change::None,
            Verdict::Success => {
                self.row = 0;
                self.window.record(now, true);
                return Change::None;
            }
            Verdict::Failure => HARD,
            Verdict::SoftFailure => SOFT,
        };
        self.row = self.row.saturating_add(weight);
        self.window.record(now, false);
        let (good, bad) = self.window.sum(now);
        let rate = good + bad >= CALLS_MIN && bad * 2 > good + bad && others == Others::Admit;
        if self.row >= ROW_MAX || rate { self.open(now, rng) } else { Change::None }
    }

    fn end_probe(&mut self, now: Instant, verdict: Verdict, rng: &mut impl RngCore) -> Change {
        let State::HalfOpen { successes, .. } = self.state else { return Change::None };
        match verdict {
            Verdict::Neutral => {
                self.state = State::HalfOpen { successes, lease: None };
                Change::None
            }
            Verdict::Failure | Verdict::SoftFailure => self.open(now, rng),
            Verdict::Success if successes + 1 >= PROBES => self.close(now),
            Verdict::Success => {
                self.state = State::HalfOpen { successes: successes + 1, lease: None };
                Change::None
            }
        }
    }

    fn close(&mut self, now: Instant) -> Change {
        self.state = State::Closed;
        self.epoch += 1;
        self.row = 0;
        self.window = Window::new(now);
        self.forgive_from = now;
        self.checks = Checks::Believed;
        self.tie = None;
        Change::Closed
    }

    fn open(&mut self, now: Instant, rng: &mut impl RngCore) -> Change {
        if self.state == State::Closed {
            let healthy = now.saturating_duration_since(self.forgive_from).as_secs() / FORGIVE.as_secs();
            self.openings = self.openings.saturating_sub(u32::try_from(healthy).unwrap_or(u32::MAX));
        }
        if self.checks == Checks::OnProof {
            self.checks = Checks::Disproved(now + DOUBT);
        }
        let doubled = OPEN_MIN.saturating_mul(1 << self.openings.min(5)).min(OPEN_MAX);
        self.openings = self.openings.saturating_add(1);
        let jitter = 1.0 + JITTER * (2.0 * fraction(rng) - 1.0);
        let until = now + doubled.mul_f64(jitter).min(OPEN_MAX);
        self.state = State::Open { until };
        self.epoch += 1;
        Change::Opened(until)
    }

    fn probe(&mut self, lease_end: Instant) -> Permit {
        let successes = match self.state {
            State::HalfOpen { successes, .. } => successes,
            State::Open { .. } | State::Closed => 0,
        };
        self.state = State::HalfOpen { successes, lease: Some(lease_end) };
        Permit { epoch: self.epoch, probe: true }
    }
}

impl Permit {
    /// Whether this call probes a half-open endpoint.
    #[must_use]
    pub const fn is_probe(self) -> bool {
        self.probe
    }
}

/// Calls of the last minute, by the second in which they ended.
#[derive(Clone, Debug)]
struct Window {
    origin: Instant,
    buckets: [Bucket; 60],
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    second: u64,
    good: u32,
    bad: u32,
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { origin: now, buckets: [Bucket::default(); 60] }
    }

    fn record(&mut self, now: Instant, success: bool) {
        let second = self.second(now);
        let slot = usize::try_from(second % WINDOW_SECONDS).unwrap_or_default();
        let Some(bucket) = self.buckets.get_mut(slot) else { return };
        if bucket.second != second {
            *bucket = Bucket { second, ..Bucket::default() };
        }
        let count = if success { &mut bucket.good } else { &mut bucket.bad };
        *count = count.saturating_add(1);
    }

    fn sum(&self, now: Instant) -> (u32, u32) {
        let second = self.second(now);
        let recent = self.buckets.iter().filter(|b| b.second + WINDOW_SECONDS > second);
        recent.fold((0, 0), |(good, bad), b| (good + b.good, bad + b.bad))
    }

    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.origin).as_secs()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_core::SeedableRng;
    use rand_pcg::Pcg64Mcg;

    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    struct Played {
        breaker: Breaker,
        now: Instant,
        rng: Pcg64Mcg,
    }

    impl Played {
        fn new() -> Self {
            let now = Instant::now();
            Self { breaker: Breaker::new(now), now, rng: Pcg64Mcg::seed_from_u64(1) }
        }

        fn wait(&mut self, ms: u64) {
            self.now += Duration::from_millis(ms);
        }

        fn begin(&mut self) -> Result<Permit, Instant> {
            self.breaker.begin(self.now, self.now + LEASE)
        }

        fn anyway(&mut self, crowd: Crowd) -> Result<Permit, Instant> {
            self.breaker.begin_anyway(self.now, self.now + LEASE, crowd)
        }

        fn end(&mut self, permit: Permit, verdict: Verdict) -> Change {
            self.breaker.end(self.now, permit, verdict, Others::Admit, &mut self.rng)
        }

        fn call(&mut self, verdict: Verdict) -> Change {
            let permit = self.begin().expect("admitted");
            self.end(permit, verdict)
        }

        /// Opens it; answers for how long.
        fn open(&mut self) -> Duration {
            for _ in 0..20 {
                if let Change::Opened(until) = self.call(Verdict::Failure) {
                    return until - self.now;
                }
            }
            panic!("it opens");
        }

        fn close(&mut self) {
            self.wait(400_000);
            (0..2).for_each(|_| assert_eq!(self.call(Verdict::Success), Change::None));
            assert_eq!(self.call(Verdict::Success), Change::Closed);
        }
    }

    #[test]
    fn five_failures_in_a_row_open_it() {
        let mut played = Played::new();
        (0..100).for_each(|_| assert_eq!(played.call(Verdict::Success), Change::None));
        (0..4).for_each(|_| assert_eq!(played.call(Verdict::Failure), Change::None));
        played.call(Verdict::Success);
        (0..4).for_each(|_| assert_eq!(played.call(Verdict::Failure), Change::None));
        assert!(matches!(played.call(Verdict::Failure), Change::Opened(_)));
        assert!(played.begin().is_err());
    }

    #[test]
    fn more_than_half_of_ten_calls_open_it_but_not_the_first_of_a_quiet_minute() {
        let mut played = Played::new();
        assert_eq!(played.call(Verdict::Failure), Change::None);
        for _ in 0..4 {
            assert_eq!(played.call(Verdict::Success), Change::None);
            assert_eq!(played.call(Verdict::Failure), Change::None);
        }
        assert!(matches!(played.call(Verdict::Failure), Change::Opened(_)), "six of ten");
    }

    #[test]
    fn half_of_them_is_not_more_than_half() {
        let mut played = Played::new();
        for _ in 0..100 {
            played.call(Verdict::Success);
            assert_eq!(played.call(Verdict::Failure), Change::None);
        }
    }

    #[test]
    fn failures_older_than_a_minute_do_not_count() {
        let mut played = Played::new();
        for n in 0..60 {
            let verdict = if n % 3 == 0 { Verdict::Success } else { Verdict::Failure };
            assert_eq!(played.call(verdict), Change::None, "two of three, but seven a minute");
            played.wait(9_000);
        }
    }

    #[test]
    fn the_rate_never_refuses_the_last_route_but_five_in_a_row_do() {
        let mut played = Played::new();
        let mut change = Change::None;
        for n in 0..60 {
            let permit = played.begin().unwrap();
            let verdict = if n % 4 == 0 { Verdict::Success } else { Verdict::Failure };
            change = played.breaker.end(played.now, permit, verdict, Others::None, &mut played.rng);
            assert_eq!(change, Change::None);
        }
        for _ in 0..5 {
            let permit = played.begin().unwrap();
            change = played.breaker.end(played.now, permit, Verdict::Failure, Others::None, &mut played.rng);
            if change != Change::None {
                break;
            }
        }
        assert!(matches!(change, Change::Opened(_)));
    }

    #[test]
    fn it_stays_open_for_ten_seconds_doubling_to_five_minutes() {
        let mut played = Played::new();
        for doubling in 0..9 {
            let open = played.open().as_secs_f64();
            let meant = (10.0 * f64::from(1 << doubling.min(8))).min(300.0);
            assert!((meant * 0.8 - 0.001..=(meant * 1.2).min(300.0)).contains(&open), "{doubling}: {open}");
            played.wait(400_000);
            // Half-open now: one failed probe opens it again.
        }
    }

    #[test]
    fn five_healthy_minutes_take_one_doubling_back() {
        let mut played = Played::new();
        played.open();
        played.wait(400_000);
        played.open();
        played.close();
        played.wait(310_000);
        let open = played.open().as_secs_f64();
        assert!((16.0..=24.0).contains(&open), "one of two is forgiven: {open}");
    }

    #[test]
    fn half_open_lets_one_probe_through_and_its_lease_ends_with_its_watchdog() {
        let mut played = Played::new();
        played.open();
        played.wait(400_000);
        assert_eq!(played.breaker.admission(played.now), Admission::Probe);
        let hung = played.begin().unwrap();
        assert!(hung.is_probe());
        assert_eq!(played.begin(), Err(played.now + LEASE));
        played.wait(5_000);
        let second = played.begin().expect("the lease has ended");
        assert_eq!(played.end(second, Verdict::Success), Change::None);
        assert_eq!(played.end(hung, Verdict::Success), Change::None, "late, but a success of now");
        assert_eq!(played.call(Verdict::Success), Change::Closed);
    }

    #[test]
    fn three_successes_close_it_with_a_fresh_window() {
        let mut played = Played::new();
        played.open();
        played.close();
        (0..4).for_each(|_| assert_eq!(played.call(Verdict::Failure), Change::None));
    }

    #[test]
    fn one_failed_probe_opens_it_doubled() {
        let mut played = Played::new();
        let first = played.open();
        played.wait(400_000);
        let Change::Opened(until) = played.call(Verdict::Failure) else { panic!("opens") };
        assert!(until - played.now > first);
    }

    #[test]
    fn successes_of_calls_begun_before_the_opening_do_not_close_it() {
        let mut played = Played::new();
        let early: Vec<_> = (0..5).map(|_| played.begin().unwrap()).collect();
        played.open();
        early.iter().for_each(|p| assert_eq!(played.end(*p, Verdict::Success), Change::None));
        assert!(played.begin().is_err());
        played.wait(400_000);
        early.iter().for_each(|p| assert_eq!(played.end(*p, Verdict::Success), Change::None));
        assert_eq!(played.call(Verdict::Success), Change::None, "the first of three");
        early.iter().for_each(|p| assert_eq!(played.end(*p, Verdict::Failure), Change::None));
        assert!(played.begin().is_ok(), "nor do their failures open it");
    }

    #[test]
    fn neutral_outcomes_touch_nothing() {
        let mut played = Played::new();
        (0..4).for_each(|_| assert_eq!(played.call(Verdict::Failure), Change::None));
        (0..50).for_each(|_| assert_eq!(played.call(Verdict::Neutral), Change::None));
        assert!(matches!(played.call(Verdict::Failure), Change::Opened(_)), "the row was not broken");
        played.wait(400_000);
        assert_eq!(played.call(Verdict::Neutral), Change::None);
        assert_eq!(played.breaker.admission(played.now), Admission::Probe, "the lease is free again");
    }

    #[test]
    fn a_trip_on_a_reused_connection_counts_half_in_the_row() {
        let mut played = Played::new();
        let mut soft = 0;
        while played.call(Verdict::SoftFailure) == Change::None {
            soft += 1;
        }
        assert_eq!(soft + 1, 10);
    }

    #[test]
    fn a_passed_check_ends_the_open_time_and_is_doubted_when_its_probe_fails() {
        let mut played = Played::new();
        played.open();
        played.breaker.check_passed(played.now);
        assert_eq!(played.breaker.admission(played.now), Admission::Probe);
        played.call(Verdict::Failure);
        played.breaker.check_passed(played.now);
        assert!(played.begin().is_err(), "the check does not see what is wrong");
        played.wait(30_000);
        played.breaker.check_passed(played.now);
        assert_eq!(played.breaker.admission(played.now), Admission::Probe, "half a minute later it counts");
        played.close();
        played.open();
        played.breaker.check_passed(played.now);
        assert!(played.begin().is_ok(), "a breaker that has closed believes anew");
    }

    #[test]
    fn a_last_resort_that_fails_neither_prolongs_nor_doubles() {
        let mut played = Played::new();
        played.open();
        let Admission::Refused(until) = played.breaker.admission(played.now) else { panic!("open") };
        for _ in 0..30 {
            let permit = played.anyway(Crowd::One).unwrap();
            assert!(played.anyway(Crowd::One).is_err(), "one at a time");
            assert_eq!(played.end(permit, Verdict::Failure), Change::None);
        }
        assert_eq!(played.breaker.admission(played.now), Admission::Refused(until));
        let permit = played.anyway(Crowd::One).unwrap();
        assert!(played.anyway(Crowd::AsTheGateSays).is_ok());
        assert_eq!(played.end(permit, Verdict::Success), Change::None);
        assert_eq!(played.breaker.admission(played.now), Admission::Probe, "its success counts");
    }

    proptest! {
        #[test]
        fn never_more_than_one_probe_at_a_time_and_never_open_longer_than_five_minutes(
            steps in prop::collection::vec((0_u64..30_000, 0_u8..5), 1..200), seed: u64,
        ) {
            let mut played = Played::new();
            played.rng = Pcg64Mcg::seed_from_u64(seed);
            let mut out: Vec<(Permit, Instant)> = vec![];
            for (wait, what) in steps {
                played.wait(wait);
                let now = played.now;
                if let Ok(permit) = played.begin() {
                    let others = out.iter().filter(|(p, end)| p.is_probe() && *p == permit && *end > now);
                    prop_assert!(!permit.is_probe() || others.count() == 0);
                    out.push((permit, now + LEASE));
                }
                let verdict = match what {
                    0 => Verdict::Success,
                    1 => Verdict::SoftFailure,
                    2 => Verdict::Neutral,
                    3 => continue,
                    _ => Verdict::Failure,
                };
                if let Some((permit, _)) = out.pop()
                    && let Change::Opened(until) = played.end(permit, verdict)
                {
                    let open = until - now;
                    prop_assert!(open >= Duration::from_secs(8) && open <= OPEN_MAX);
                }
            }
            played.wait(300_001);
            prop_assert!(
                !matches!(played.breaker.admission(played.now), Admission::Refused(_)),
                "it lets somebody in sooner or later"
            );
        }
    }
}
