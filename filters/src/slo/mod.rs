//! What callers are promised, and how much of it is used up.
//!
//! [`judge`] says of a call that ended whether it was good or bad, and whose doing it was; [`month`] says how long a
//! month is; [`burn`] adds minutes up to what a month has left. `docs/slo.md` says the same for operators.
//!
//! Deliberately absent: floats (a burn rate is in thousandths), and the names of things (they come as whatever the
//! caller counts by).

pub mod burn;
pub mod judge;
pub mod month;

/// The length of a minute, in milliseconds.
pub const MINUTE_MS: i64 = 60_000;
/// The length of an hour, in milliseconds.
pub const HOUR_MS: i64 = 3_600_000;
/// The length of a day, in milliseconds.
pub const DAY_MS: i64 = 86_400_000;

/// The start of the minute, hour or day (`span_ms`) that a time is in, all in milliseconds since 1970.
#[must_use]
pub const fn start_of(at_ms: i64, span_ms: i64) -> i64 {
    at_ms - at_ms.rem_euclid(span_ms)
}

/// How many of a million calls may be bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance(u32);

impl Allowance {
    /// From the share that has to be good, in ten-thousandths of a percent: 999 500 for 99.95 %. `None`: not between 50 %
    /// and 99.9999 %; a promise of everything has no budget, and less than half is none.
    #[must_use]
    pub const fn of_objective(good_per_million: u32) -> Option<Self> {
        if good_per_million < 500_000 || good_per_million > 999_999 {
            return None;
        }
        Some(Self(1_000_000 - good_per_million))
    }

    /// Bad calls of a million.
    #[must_use]
    pub const fn per_million(self) -> u32 {
        self.0
    }

    /// Good calls of a million.
    #[must_use]
    pub const fn objective_per_million(self) -> u32 {
        1_000_000 - self.0
    }

    /// The time that may be burnt in a span, in microseconds; the span in milliseconds, nothing for one below zero.
    #[must_use]
    pub fn budget_us(self, span_ms: i64) -> u64 {
        let ms = u64::try_from(span_ms).unwrap_or_default();
        // A thousandth of a million: microseconds of a span in milliseconds.
        u64::try_from(u128::from(ms) * u128::from(self.0) / 1000).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_and_a_half_nines_of_thirty_days_are_twenty_one_minutes_and_thirty_six_seconds() {
        let allowance = Allowance::of_objective(999_500).unwrap();
        assert_eq!(allowance.budget_us(30 * DAY_MS), (21 * 60 + 36) * 1_000_000);
    }

    #[test]
    fn an_objective_leaves_something_to_burn_and_promises_something() {
        for nothing in [0, 499_999, 1_000_000, u32::MAX] {
            assert_eq!(Allowance::of_objective(nothing), None, "{nothing}");
        }
        assert_eq!(Allowance::of_objective(999_999).unwrap().per_million(), 1);
    }

    #[test]
    fn a_time_before_1970_is_in_a_minute_too() {
        assert_eq!(start_of(-1, MINUTE_MS), -MINUTE_MS);
        assert_eq!(start_of(MINUTE_MS, MINUTE_MS), MINUTE_MS);
    }
}
