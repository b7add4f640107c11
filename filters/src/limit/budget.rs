//! Money per day or month, in a time zone.
//!
//! Windows are instants: a day is from midnight to midnight *there*, so that it has 23 or 25 hours when
//! the clocks change.

use std::cell::RefCell;
use std::fmt;

use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _};
use serde::{Deserialize, Serialize};

use crate::money::Amount;

/// Windows that a thread remembers: the last one of each period and zone. Of more the one found first makes room.
const SEEN_MAX: usize = 8;

thread_local! {
    /// Most instants are in the window that the one before was in, and a calendar takes its time to say which.
    static SEEN: RefCell<Vec<Seen>> = const { RefCell::new(Vec::new()) };
}

/// A window that was found. It is that of every instant in it, for good: zones are compiled in.
struct Seen {
    period: Period,
    zone: Zone,
    windows: Windows,
}

/// A window, and when the one before begins; in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// When the window before begins.
    pub before_ms: i64,
    /// When this one begins.
    pub begins_ms: i64,
    /// When it ends: the first instant that is not in it.
    pub ends_ms: i64,
}

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
        let Windows { begins_ms, ends_ms, .. } = self.windows(unix_ms);
        (begins_ms, ends_ms)
    }

    /// The same, and when the window before it begins.
    #[must_use]
    pub fn windows(&self, unix_ms: i64) -> Windows {
        SEEN.with_borrow_mut(|seen| {
            let of_these = |seen: &Seen| seen.period == self.period && seen.zone.is_named_as(&self.zone);
            let place = seen.iter().position(of_these);
            if let Some(seen) = place.and_then(|place| seen.get(place))
                && (seen.windows.begins_ms..seen.windows.ends_ms).contains(&unix_ms)
            {
                return seen.windows;
            }
            let (windows, is_found) = self.look_up(unix_ms);
            if is_found {
                if place.is_some() || seen.len() == SEEN_MAX {
                    let _replaced = seen.remove(place.unwrap_or_default());
                }
                seen.push(Seen { period: self.period, zone: self.zone.clone(), windows });
            }
            windows
        })
    }

    /// As the calendar says, and whether it reaches so far.
    fn look_up(&self, unix_ms: i64) -> (Windows, bool) {
        let endless = (i64::MIN, i64::MAX);
        let found = self.find(unix_ms);
        let (begins_ms, ends_ms) = found.unwrap_or(endless);
        let before_ms = self.find(begins_ms.saturating_sub(1)).unwrap_or(endless).0;
        (Windows { before_ms, begins_ms, ends_ms }, found.is_some())
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
    fn an_instant_that_no_calendar_reaches_is_not_remembered() {
        let utc = budget(Period::Day, "UTC");
        let endless = Windows { before_ms: i64::MIN, begins_ms: i64::MIN, ends_ms: i64::MAX };
        assert_eq!(utc.windows(i64::MAX), endless);
        assert_eq!(
            utc.windows(86_400_000),
            Windows { before_ms: 0, begins_ms: 86_400_000, ends_ms: 2 * 86_400_000 }
        );
        assert_eq!(utc.windows(i64::MIN), endless);
    }

    #[test]
    fn a_thread_remembers_no_more_windows_than_it_may() {
        for zone in ["UTC", "Asia/Tokyo", "Europe/Berlin", "Africa/Cairo", "America/Havana"] {
            for period in [Period::Day, Period::Month] {
                let _window = budget(period, zone).windows(0);
            }
        }
        assert_eq!(SEEN.with_borrow(Vec::len), SEEN_MAX);
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
        fn what_is_remembered_is_what_the_calendar_says(
            // From 2015 to 2040, all over the place and close to each other, in more zones than are remembered.
            asked in prop::collection::vec(
                (1_420_000_000_000_i64..2_208_000_000_000, -100_000_000_i64..100_000_000, any::<bool>(), prop::sample::select(vec![
                    "UTC", "Asia/Tokyo", "Europe/Berlin", "America/Sao_Paulo", "Africa/Cairo", "America/Havana",
                    "Atlantic/Azores", "Australia/Lord_Howe", "America/Nuuk", "Asia/Beirut", "Pacific/Apia",
                ])),
                1..40,
            ),
        ) {
            for (unix_ms, apart_ms, month, zone) in asked {
                let budget = budget(if month { Period::Month } else { Period::Day }, zone);
                for at in [unix_ms, unix_ms + apart_ms, unix_ms, unix_ms + 1] {
                    let (begins_ms, ends_ms) = budget.find(at).unwrap();
                    let before_ms = budget.find(begins_ms - 1).unwrap().0;
                    prop_assert_eq!(budget.windows(at), Windows { before_ms, begins_ms, ends_ms });
                    for edge in [before_ms, begins_ms - 1, begins_ms, ends_ms - 1, ends_ms] {
                        prop_assert_eq!(budget.window(edge), budget.find(edge).unwrap());
                    }
                }
            }
        }

        #[test]
        fn no_instant_panics(unix_ms: i64) {
            let (begin, end) = budget(Period::Day, "Asia/Tokyo").window(unix_ms);
            prop_assert!(begin < end);
        }
    }
}
