//! Months of the calendar, in UTC: a report of one is the same wherever it is read.

use std::fmt;
use std::str::FromStr;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _};

/// A month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Month {
    /// Its first day.
    first: Date,
}

/// A text that names no month.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no month such as 2026-11")]
pub struct NoMonth(String);

impl Month {
    /// The month that a time in milliseconds since 1970 is in. `None`: beyond the year 9999.
    #[must_use]
    pub fn of(at_ms: i64) -> Option<Self> {
        let date = TimeZone::UTC.to_datetime(Timestamp::from_millisecond(at_ms).ok()?).date();
        Some(Self { first: date.first_of_month() })
    }

    /// When it begins, in milliseconds since 1970.
    #[must_use]
    pub fn start_ms(self) -> i64 {
        start_of(self.first)
    }

    /// When the next one begins.
    #[must_use]
    pub fn end_ms(self) -> i64 {
        start_of(self.first.saturating_add(1.month()))
    }

    /// How long it is.
    #[must_use]
    pub fn span_ms(self) -> i64 {
        self.end_ms() - self.start_ms()
    }
}

fn start_of(date: Date) -> i64 {
    TimeZone::UTC.to_timestamp(date.at(0, 0, 0, 0)).map_or(i64::MAX, Timestamp::as_millisecond)
}

impl FromStr for Month {
    type Err = NoMonth;

    fn from_str(text: &str) -> Result<Self, NoMonth> {
        let no_month = || NoMonth(text.to_owned());
        let (year, month) = text.split_once('-').ok_or_else(no_month)?;
        let is_number = |part: &str, digits| part.len() == digits && part.bytes().all(|b| b.is_ascii_digit());
        if !is_number(year, 4) || !is_number(month, 2) {
            return Err(no_month());
        }
        let (year, month) = (year.parse().map_err(|_| no_month())?, month.parse().map_err(|_| no_month())?);
        Date::new(year, month, 1).map(|first| Self { first }).map_err(|_| no_month())
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.first.year(), self.first.month())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::slo::DAY_MS;

    #[test]
    fn months_have_their_own_lengths() {
        for (month, days) in [("2026-11", 30), ("2026-12", 31), ("2026-02", 28), ("2028-02", 29)] {
            assert_eq!(month.parse::<Month>().unwrap().span_ms(), days * DAY_MS, "{month}");
        }
    }

    #[test]
    fn what_is_no_month_is_refused_by_its_name() {
        for text in ["", "2026", "2026-13", "2026-00", "26-01", "2026-1", "2026-11-01", "-026-11", "+026-11"]
        {
            assert_eq!(text.parse::<Month>(), Err(NoMonth(text.to_owned())));
        }
    }

    proptest! {
        /// Every instant is in one month: the one that it reads as.
        #[test]
        fn months_follow_each_other_without_a_gap(at_ms in 0_i64..4_102_444_800_000) {
            let month = Month::of(at_ms).unwrap();
            prop_assert!((month.start_ms()..month.end_ms()).contains(&at_ms));
            prop_assert_eq!(Month::of(month.end_ms() - 1), Some(month));
            prop_assert_eq!(Month::of(month.end_ms()).unwrap().start_ms(), month.end_ms());
            prop_assert_eq!(month.to_string().parse::<Month>(), Ok(month));
        }
    }
}
