//! The bars of past days.
//!
//! A day is as good as its calls: the share of them that callers got what they asked for, or their own fault. A day
//! without calls has no bar of its own: it is grey, neither good nor bad. Shares are whole numbers, rounded down, so that
//! a day with one bad call in a million is never shown as 100 %.

use super::Level;

/// Milliseconds of a day. Days are UTC's.
const DAY_MS: i64 = 86_400_000;
/// Bars of a page.
pub const DAYS: i64 = 90;
/// Hundred-thousandths of calls: the unit of shares here.
pub const WHOLE: u32 = 100_000;
/// At least so many good calls of a hundred thousand, and a day was operational.
const OPERATIONAL: u32 = 99_900;
/// And degraded.
const DEGRADED: u32 = 99_000;
/// And partly down; below it, down.
const PARTLY: u32 = 90_000;

/// What was counted in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// What went as it should.
    pub good: u64,
    /// What did not.
    pub bad: u64,
}

impl Counted {
    /// Both together.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { good: self.good.saturating_add(other.good), bad: self.bad.saturating_add(other.bad) }
    }

    /// The good ones of a hundred thousand, rounded down; `None`: there is nothing to tell.
    #[must_use]
    pub fn share(self) -> Option<u32> {
        let all = u128::from(self.good) + u128::from(self.bad);
        let share = (u128::from(self.good) * u128::from(WHOLE)).checked_div(all)?;
        u32::try_from(share).ok()
    }

    /// The colour of its bar.
    #[must_use]
    pub fn level(self) -> Option<Level> {
        Some(match self.share()? {
            OPERATIONAL.. => Level::Operational,
            DEGRADED.. => Level::Degraded,
            PARTLY.. => Level::Partly,
            _ => Level::Down,
        })
    }
}

/// The number of a day since 1970.
#[must_use]
pub const fn day_of(unix_ms: i64) -> i64 {
    unix_ms.div_euclid(DAY_MS)
}

/// When a day begins, in milliseconds since 1970.
#[must_use]
pub const fn begin_ms(day: i64) -> i64 {
    day.saturating_mul(DAY_MS)
}

/// The bars of the [`DAYS`] days that end with `today`, the oldest first. What lies outside is left out.
#[must_use]
pub fn bars(today: i64, counted: impl IntoIterator<Item = (i64, Counted)>) -> Vec<(i64, Counted)> {
    let first = today.saturating_sub(DAYS - 1);
    let mut bars: Vec<(i64, Counted)> = (first..=today).map(|day| (day, Counted::default())).collect();
    for (day, found) in counted {
        let at = usize::try_from(day.saturating_sub(first)).ok();
        if let Some((_, bar)) = at.and_then(|at| bars.get_mut(at)) {
            *bar = bar.and(found);
        }
    }
    bars
}

/// What all of them make together.
#[must_use]
pub fn together(bars: &[(i64, Counted)]) -> Counted {
    bars.iter().fold(Counted::default(), |sum, (_, bar)| sum.and(*bar))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_day_is_as_good_as_its_calls() {
        let level = |good, bad| Counted { good, bad }.level();
        assert_eq!(level(0, 0), None);
        assert_eq!(level(999, 1), Some(Level::Operational));
        assert_eq!(level(998, 2), Some(Level::Degraded));
        assert_eq!(level(98, 2), Some(Level::Partly));
        assert_eq!(level(8, 2), Some(Level::Down));
    }

    #[test]
    fn ninety_bars_end_with_today_and_what_lies_outside_is_left_out() {
        let one = Counted { good: 1, bad: 0 };
        let bars = bars(1_000, [(910, one), (911, one), (1_000, one), (1_000, one), (1_001, one)]);
        assert_eq!(bars.len(), 90);
        assert_eq!(bars.first(), Some(&(911, one)));
        assert_eq!(bars.last(), Some(&(1_000, Counted { good: 2, bad: 0 })));
        assert_eq!(together(&bars), Counted { good: 3, bad: 0 });
    }

    #[test]
    fn a_day_begins_at_midnight_also_before_1970() {
        assert_eq!((day_of(0), day_of(DAY_MS - 1), day_of(DAY_MS), day_of(-1)), (0, 0, 1, -1));
        assert_eq!(begin_ms(day_of(1_700_000_000_000)), 1_699_920_000_000);
    }

    proptest! {
        #[test]
        fn only_a_day_without_a_bad_call_is_whole(good: u64, bad: u64) {
            let share = Counted { good, bad }.share();
            prop_assert_eq!(share == Some(WHOLE), bad == 0 && good > 0);
            prop_assert_eq!(share.is_none(), good == 0 && bad == 0);
        }
    }
}
