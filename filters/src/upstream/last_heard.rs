//! What was last heard of an endpoint, however long ago: for people, who want to know of one that nobody asks.
//!
//! Weight and breaker say where calls go, and neither says whether an endpoint lives. A weight comes back by itself. A
//! breaker opens at the fifth failure in a row, and an endpoint that fell behind its neighbour at its first is not asked
//! again where nobody explores: it looks well a quarter of an hour later, and is dead.
//!
//! So its latest failure is remembered until it answers: a call or a probe, nothing else. Time changes nothing here. From
//! the third in a row on it is **certain**; one or two may be a bad moment, and tell something only where calls pass the
//! endpoint by since ([`super::board`] knows). A failure that may have been the reused connection's alone counts half, as
//! in the breaker.
//!
//! Deliberately absent: any part in routing.

use std::time::Instant;

use crate::upstream::breaker::HARD;

/// From so many on failures are certain, in units of [`HARD`] and [`crate::upstream::breaker::SOFT`].
const ROW_MIN: u32 = 3 * HARD;

/// Of one endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastHeard {
    answered: Option<Instant>,
    failed: Option<Instant>,
    row: u32,
}

impl LastHeard {
    /// It answered, a call or a probe.
    pub const fn answer(&mut self, now: Instant) {
        *self = Self { answered: Some(now), failed: None, row: 0 };
    }

    /// A call failed for which it is to blame, by so many units.
    pub const fn failure(&mut self, now: Instant, units: u32) {
        self.failed = Some(now);
        self.row = self.row.saturating_add(units);
    }

    /// When it last answered.
    #[must_use]
    pub const fn answered(&self) -> Option<Instant> {
        self.answered
    }

    /// When it last failed, if it has not answered since.
    #[must_use]
    pub const fn failed(&self) -> Option<Instant> {
        self.failed
    }

    /// Whether it has failed so often since it last answered that it was no bad moment.
    #[must_use]
    pub const fn is_certain(&self) -> bool {
        self.row >= ROW_MIN
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::upstream::breaker::SOFT;

    #[test]
    fn failures_are_remembered_until_an_answer_and_certain_from_the_third_on() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut heard = LastHeard::default();
        for second in 1..=4 {
            heard.failure(at(second), HARD);
            assert_eq!((heard.answered(), heard.failed()), (None, Some(at(second))));
            assert_eq!(heard.is_certain(), second >= 3);
        }
        heard.answer(at(5));
        assert_eq!((heard.answered(), heard.failed(), heard.is_certain()), (Some(at(5)), None, false));
        heard.failure(at(6), HARD);
        assert_eq!((heard.failed(), heard.is_certain()), (Some(at(6)), false), "the first of a new row");
    }

    #[test]
    fn what_may_have_been_the_connection_counts_half() {
        let now = Instant::now();
        let mut heard = LastHeard::default();
        (0..5).for_each(|_| heard.failure(now, SOFT));
        assert!(!heard.is_certain());
        heard.failure(now, SOFT);
        assert!(heard.is_certain());
    }
}
