//! Money per day or month, in a time zone.
//!
//! Windows are instants: a day is from midnight to midnight *there*, so that it has 23 or 25 hours when
//! the clocks change.

use std::fmt;

use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _};
use serde::{Deserialize, Serialize};

use crate::money::Amount;

/// A cap on what may be spent in each window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// How long a window is.
    pub period: Period,
    /// The cap.
    pub amount: Amount,
    /// Where midnight is.
    pub zone: Zone,
}

/// How long a window is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Period {
    /// From midnight to midnight.
    Day,
    /// From the first to the first.
    Month,
}

/// A time zone of the IANA database, which is compiled in.
#[derive(Clone, PartialEq, Eq)]
pub struct Zone {
    zone: TimeZone,
    name: String,
}

impl Zone {
    /// The zone of that name, such as `Europe/Berlin`.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        let zone = TimeZone::get(name).ok()?;
        Some(Self { zone, name: name.to_owned() })
    }

    /// Coordinated universal time.
    #[must_use]
    pub fn utc() -> Self {
        Self { zone: TimeZone::UTC, name: "UTC".to_owned() }
    }

    /// Whether both have one name: then they are one zone.
    pub(super) fn is_named_as(&self, other: &Self) -> bool {
        self.name == other.name
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Budget {
    /// Begin and end of the window that an instant is in, in milliseconds since 1970. Instants that no
    /// calendar reaches are in a window without end.
    #[must_use]
    pub fn window(&self, unix_ms: i64) -> (i64, i64) {
        self.find(unix_ms).unwrap_or((i64::MIN, i64::MAX))
    }

    fn find(&self, unix_ms: i64) -> Option<(i64, i64)> {
        let there = Timestamp::from_millisecond(unix_ms).ok()?.to_zoned_datetime(self.zone.zone.clone());
        let day = there.start_of_day().ok()?;
        let (begin, next) = match self.period {
            Period::Day => (day.clone(), day.checked_add(1.day()).ok()?),
            Period::Month => {
                let first = there.first_of_month().ok()?.start_of_day().ok()?;
                (first.clone(), first.checked_add(1.month()).ok()?)
            }
        };
        // Where a clock change swallows midnight, the day begins later.
        let end = next.start_of_day().ok()?;
        Some((begin.timestamp().as_millisecond(), end.timestamp().as_millisecond()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn budget(period: Period, zone: &str) -> Budget {
        Budget { period, amount: Amount::ZERO, zone: Zone::find(zone).unwrap() }
    }

    fn ms(text: &str) -> i64 {
        text.parse::<Timestamp>().unwrap().as_millisecond()
    }

    #[test]
    fn a_day_begins_at_midnight_there() {
        let tokyo = budget(Period::Day, "Asia/Tokyo");
        let (begin, end) = tokyo.window(ms("2026-11-30T14:59:59Z"));
        assert_eq!(end, ms("2026-11-30T15:00:00Z"));
        assert_eq!(begin, ms("2026-11-29T15:00:00Z"));
        assert_eq!(tokyo.window(end).0, end);
    }

    #[test]
    fn a_day_has_23_or_25_hours_when_the_clocks_change() {
        let berlin = budget(Period::Day, "Europe/Berlin");
        let hours = |text| {
            let (begin, end) = berlin.window(ms(text));
            (end - begin) / 3_600_000
        };
        assert_eq!(hours("2026-03-29T10:00:00Z"), 23);
        assert_eq!(hours("2026-10-25T10:00:00Z"), 25);
        assert_eq!(hours("2026-06-01T10:00:00Z"), 24);
    }

    #[test]
    fn a_month_is_from_the_first_to_the_first() {
        let (begin, end) = budget(Period::Month, "UTC").window(ms("2028-02-15T00:00:00Z"));
        assert_eq!((begin, end), (ms("2028-02-01T00:00:00Z"), ms("2028-03-01T00:00:00Z")));
    }

    #[test]
    fn an_unknown_zone_is_none() {
        assert!(Zone::find("Mars/Olympus").is_none());
    }

    proptest! {
        #[test]
        fn every_instant_is_in_its_window_and_windows_touch(
            unix_ms in 0_i64..4_000_000_000_000, month: bool,
            zone in prop::sample::select(vec!["UTC", "Asia/Tokyo", "Europe/Berlin", "America/Sao_Paulo", "Africa/Cairo"]),
        ) {
            let period = if month { Period::Month } else { Period::Day };
            let budget = budget(period, zone);
            let (begin, end) = budget.window(unix_ms);
            prop_assert!(begin <= unix_ms && unix_ms < end);
            prop_assert_eq!(budget.window(end).0, end);
            prop_assert_eq!(budget.window(begin - 1).1, begin);
        }

        #[test]
        fn no_instant_panics(unix_ms: i64) {
            let (begin, end) = budget(Period::Day, "Asia/Tokyo").window(unix_ms);
            prop_assert!(begin < end);
        }
    }
}
