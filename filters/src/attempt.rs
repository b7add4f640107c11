//! Whom to try next, and until when.
//!
//! The planner owns the count: Pingora's retry loop only asks. It answers with a candidate and the
//! time it may take, or with the end. It never plans past the deadline, never after the commit,
//! and never more than `attempts_max` tries.
//!
//! Deliberately absent: waiting. Another candidate is tried at once; trying the same one again
//! after a pause is the backoff's business.

use std::time::{Duration, Instant};

use crate::ids::EndpointId;
use crate::upstream::deadline::Deadline;

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
    /// It is over.
    Stop(StopReason),
}

/// Why there is no further attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The answer belongs to the caller already.
    Committed,
    /// Every candidate had its try.
    Exhausted,
    /// As many tries as are allowed were made.
    AttemptsMax,
    /// No time is left for another.
    Deadline,
}

/// The plan of one request.
#[derive(Debug)]
pub struct Planner {
    order: Vec<EndpointId>,
    next: usize,
    made: u32,
    attempts_max: u32,
    deadline: Deadline,
    committed: bool,
    resend_used: bool,
}

impl Planner {
    /// A plan to try `order`, at most `attempts_max` of it, until `deadline`.
    #[must_use]
    pub fn new(order: Vec<EndpointId>, attempts_max: u32, deadline: Deadline) -> Self {
        Self { order, next: 0, made: 0, attempts_max, deadline, committed: false, resend_used: false }
    }

    /// The next attempt. Counts it as made.
    pub fn next_attempt(&mut self, now: Instant) -> NextAttempt {
        if self.committed {
            return NextAttempt::Stop(StopReason::Committed);
        }
        let Some(endpoint) = self.order.get(self.next).copied() else {
            return NextAttempt::Stop(StopReason::Exhausted);
        };
        if self.made >= self.attempts_max {
            return NextAttempt::Stop(StopReason::AttemptsMax);
        }
        let left = self.left();
        let share = self.deadline.share(now, left);
        if share.is_zero() {
            return NextAttempt::Stop(StopReason::Deadline);
        }
        self.next += 1;
        self.made += 1;
        NextAttempt::Try { endpoint, share, last: left == 1 }
    }

    /// Whether there would be a next attempt now.
    #[must_use]
    pub fn has_next(&self, now: Instant) -> bool {
        !self.committed && self.left() > 0 && !self.deadline.share(now, self.left()).is_zero()
    }

    /// A pooled connection turned out dead before any response byte: the request was not seen, so
    /// the same candidate gets it again at once. It is no attempt, and it happens once per request.
    /// Answers whether it may.
    pub fn resend(&mut self) -> bool {
        let may = !self.committed && !self.resend_used && self.made > 0;
        if may {
            self.resend_used = true;
            self.next -= 1;
            self.made -= 1;
        }
        may
    }

    /// From here on the answer is the caller's.
    pub fn commit(&mut self) {
        self.committed = true;
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

    fn left(&self) -> u32 {
        let candidates = u32::try_from(self.order.len().saturating_sub(self.next)).unwrap_or(u32::MAX);
        candidates.min(self.attempts_max.saturating_sub(self.made))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn planner(candidates: usize, attempts_max: u32, now: Instant, whole: Duration) -> Planner {
        let order = (0..candidates).map(EndpointId).collect();
        Planner::new(order, attempts_max, Deadline::new(now, whole))
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

    proptest! {
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
