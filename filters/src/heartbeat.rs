//! Periodic jobs: when one is late, and what a watching service is told of it.
//!
//! A job says when it begins, when it is done and when it failed; that is all it does. A job is **late** when it was
//! not done within its period and [`Rule::grace_ms`] more: a missed beat is known within five minutes, whatever the
//! period. A job that fails again and again is late too, since it is not done.
//!
//! Pings follow Healthchecks' ways: `/start`, success or `/fail`, in this order. A job that runs twenty times a second
//! is told of once in [`Rule::spacing_ms`]; a change from well to failed, or back, is told at once.

/// What is known of a job. Times are milliseconds since 1970, 0 for never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// How often it is to be done, in milliseconds.
    pub period_ms: i64,
    /// Since when it is known.
    pub known_ms: i64,
    /// When it last began.
    pub started_ms: i64,
    /// When it was last done.
    pub succeeded_ms: i64,
    /// When it last failed.
    pub failed_ms: i64,
}

/// What is demanded of jobs, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// How much later than its period it may be done.
    pub grace_ms: i64,
    /// The time between two rounds of pings of one job, where nothing changes.
    pub spacing_ms: i64,
}

impl Seen {
    /// Whether it was not done when it should have been.
    #[must_use]
    pub fn is_late(&self, now_ms: i64, rule: Rule) -> bool {
        let last = self.succeeded_ms.max(self.known_ms);
        now_ms.saturating_sub(last) > self.period_ms.saturating_add(rule.grace_ms)
    }

    /// When it last ended, however that was.
    const fn ended_ms(&self) -> i64 {
        if self.succeeded_ms > self.failed_ms { self.succeeded_ms } else { self.failed_ms }
    }

    /// Whether its last end was a failure.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        self.failed_ms > self.succeeded_ms
    }
}

/// One ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ping {
    /// It has begun.
    Start,
    /// It is done.
    Success,
    /// It failed.
    Fail,
}

impl Ping {
    /// What is put behind the job's URL.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Start => "/start",
            Self::Success => "",
            Self::Fail => "/fail",
        }
    }
}

/// What a watching service was told of one job.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pinged {
    /// The end that was told last.
    ended_ms: i64,
    /// A start was told whose end was not.
    is_open: bool,
    has_failed: bool,
    next_ms: i64,
}

impl Pinged {
    /// What to tell now, in this order.
    pub fn due(&mut self, now_ms: i64, seen: &Seen, rule: Rule) -> Vec<Ping> {
        let ended = seen.ended_ms();
        let changes = seen.has_failed() != self.has_failed;
        if ended > self.ended_ms && (changes || now_ms >= self.next_ms) {
            let end = if seen.has_failed() { Ping::Fail } else { Ping::Success };
            let begun = std::mem::replace(&mut self.is_open, false);
            self.ended_ms = ended;
            self.has_failed = seen.has_failed();
            self.next_ms = now_ms.saturating_add(rule.spacing_ms);
            return if begun { vec![end] } else { vec![Ping::Start, end] };
        }
        // It runs now: what takes long is seen to have begun.
        let runs = seen.started_ms > ended && seen.started_ms > self.ended_ms;
        if runs && !self.is_open && now_ms >= self.next_ms {
            self.is_open = true;
            return vec![Ping::Start];
        }
        vec![]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULE: Rule = Rule { grace_ms: 270_000, spacing_ms: 60_000 };

    #[test]
    fn a_missed_beat_is_known_within_five_minutes_whatever_the_period() {
        for period_ms in [50, 1_000, 90_000, 86_400_000] {
            let seen = Seen { period_ms, known_ms: 1, succeeded_ms: 1_000, ..Seen::default() };
            let missed = 1_000 + period_ms;
            assert!(!seen.is_late(missed + 1, RULE));
            assert!(seen.is_late(missed + 290_000, RULE), "{period_ms}");
        }
    }

    #[test]
    fn what_was_never_done_is_late_from_when_it_was_known_and_a_failure_is_no_success() {
        let seen = Seen { period_ms: 1_000, known_ms: 5_000, ..Seen::default() };
        assert!(!seen.is_late(270_000, RULE) && seen.is_late(280_000, RULE));
        assert!(Seen { failed_ms: 279_000, ..seen }.is_late(280_000, RULE));
        assert!(!Seen { succeeded_ms: 279_000, ..seen }.is_late(280_000, RULE));
    }

    #[test]
    fn a_start_comes_before_its_end_and_a_change_is_told_at_once() {
        let mut pinged = Pinged::default();
        let mut seen = Seen { started_ms: 10, ..Seen::default() };
        assert_eq!(pinged.due(11, &seen, RULE), [Ping::Start]);
        assert_eq!(pinged.due(12, &seen, RULE), []);
        seen.succeeded_ms = 20;
        assert_eq!(pinged.due(21, &seen, RULE), [Ping::Success]);
        (seen.started_ms, seen.succeeded_ms) = (30, 31);
        assert_eq!(pinged.due(32, &seen, RULE), [], "within a minute");
        seen.failed_ms = 40;
        assert_eq!(pinged.due(41, &seen, RULE), [Ping::Start, Ping::Fail]);
        seen.succeeded_ms = 50;
        assert_eq!(pinged.due(51, &seen, RULE), [Ping::Start, Ping::Success]);
        seen.succeeded_ms = 60;
        assert_eq!(pinged.due(60_052, &seen, RULE), [Ping::Start, Ping::Success]);
    }

    proptest! {
        #[test]
        fn no_end_without_its_start_and_none_twice(
            runs in prop::collection::vec((1_i64..40_000, 0_i64..40_000, any::<bool>(), any::<bool>()), 1..60),
        ) {
            let (mut pinged, mut seen, mut now) = (Pinged::default(), Seen::default(), 1);
            let (mut told, mut ends) = (vec![], 0);
            for (pause, takes, fails, look) in runs {
                now += pause;
                seen.started_ms = now;
                if look {
                    told.extend(pinged.due(now, &seen, RULE));
                }
                now += takes + 1;
                *(if fails { &mut seen.failed_ms } else { &mut seen.succeeded_ms }) = now;
                ends += 1;
                told.extend(pinged.due(now, &seen, RULE));
            }
            let starts = told.iter().filter(|ping| **ping == Ping::Start).count();
            prop_assert!(told.len() - starts <= ends && starts <= ends);
            for pair in told.windows(2) {
                prop_assert!((pair[0] == Ping::Start) != (pair[1] == Ping::Start), "{told:?}");
            }
            prop_assert!(told.first().is_none_or(|first| *first == Ping::Start));
        }
    }
}
