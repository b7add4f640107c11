//! What is burnt of a month's budget, by whom and when.
//!
//! The budget is time: 0.05 % of a month of thirty days are 21 minutes and 36 seconds. Every minute in which calls
//! began burns as much of it as its share of bad calls: all of them bad, sixty seconds; one of ten, six. A minute
//! without calls burns nothing, and so does one that nobody has a record of. Calls cannot be the measure, since nobody
//! knows in the middle of a month how many it will have; and a minute of outage at noon is a minute, as one at night.
//!
//! What a minute burns is split among its bad calls alike, by whatever they have in common, so that the parts by cause,
//! by upstream, by region and by model each sum up to the whole exactly: each is rounded down at the finest grain, to a
//! microsecond. Minutes may come in any order; a minute comes once, with all that is known of it.

use std::collections::BTreeMap;

use super::{Allowance, MINUTE_MS};

/// The length of a minute, in microseconds.
const MINUTE_US: u64 = 60_000_000;
/// How many of the worst minutes are named.
pub const WORST_MAX: usize = 10;

/// Calls of one minute that have everything in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice<N> {
    /// What was asked for.
    pub model: N,
    /// Who served, or was to blame.
    pub upstream: N,
    /// Where that is.
    pub region: N,
    /// Why they were bad, where they were.
    pub cause: N,
    /// How many were good.
    pub good: u64,
    /// How many were bad.
    pub bad: u64,
}

/// Good and bad calls, and the time that the bad ones burnt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// How many were good.
    pub good: u64,
    /// How many were bad.
    pub bad: u64,
    /// Microseconds of the budget.
    pub burnt_us: u64,
}

impl Part {
    fn add(&mut self, good: u64, bad: u64, burnt_us: u64) {
        self.good = self.good.saturating_add(good);
        self.bad = self.bad.saturating_add(bad);
        self.burnt_us = self.burnt_us.saturating_add(burnt_us);
    }

    /// Good calls of a million; of no calls at all, all.
    #[must_use]
    pub fn good_per_million(&self) -> u32 {
        let all = u128::from(self.good) + u128::from(self.bad);
        let share = (u128::from(self.good) * 1_000_000).checked_div(all).unwrap_or(1_000_000);
        u32::try_from(share).unwrap_or(1_000_000)
    }
}

/// A minute that burnt something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Minute<N> {
    /// When it began, in milliseconds since 1970.
    pub start_ms: i64,
    /// What was in it.
    pub part: Part,
    /// Most of it was because of this.
    pub cause: N,
    /// And of this upstream.
    pub upstream: N,
}

/// A time in which burning is added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Inclusive, in milliseconds since 1970.
    pub from_ms: i64,
    /// Exclusive.
    pub to_ms: i64,
    /// What was in it.
    pub part: Part,
}

impl Window {
    /// An empty one.
    #[must_use]
    pub fn new(from_ms: i64, to_ms: i64) -> Self {
        Self { from_ms, to_ms, part: Part::default() }
    }

    fn has(&self, start_ms: i64) -> bool {
        (self.from_ms..self.to_ms).contains(&start_ms)
    }

    /// How fast the budget burns, in thousandths: at 1000 it would be used up when its month is over.
    #[must_use]
    pub fn rate_milli(&self, allowance: Allowance) -> u64 {
        let budget = allowance.budget_us(self.to_ms.saturating_sub(self.from_ms));
        (u128::from(self.part.burnt_us) * 1000)
            .checked_div(u128::from(budget))
            .map_or(0, |rate| u64::try_from(rate).unwrap_or(u64::MAX))
    }
}

/// What one objective has burnt.
#[derive(Clone, Debug)]
pub struct Burn<N> {
    /// The month, or whatever time is asked for.
    pub whole: Window,
    /// Times that are looked at beside it, such as the last hour.
    pub windows: Vec<Window>,
    /// By what made calls bad.
    pub by_cause: BTreeMap<N, Part>,
    /// By who served or was to blame.
    pub by_upstream: BTreeMap<N, Part>,
    /// By where that is.
    pub by_region: BTreeMap<N, Part>,
    /// By what was asked for.
    pub by_model: BTreeMap<N, Part>,
    /// Those that burnt most, the worst first, at most [`WORST_MAX`].
    pub worst: Vec<Minute<N>>,
    /// Minutes with calls.
    pub minutes: u64,
    /// Minutes with bad calls.
    pub bad_minutes: u64,
}

impl<N: Copy + Ord> Burn<N> {
    /// Nothing yet, of a time and of others that are looked at beside it.
    #[must_use]
    pub const fn new(whole: Window, windows: Vec<Window>) -> Self {
        Self {
            whole,
            windows,
            by_cause: BTreeMap::new(),
            by_upstream: BTreeMap::new(),
            by_region: BTreeMap::new(),
            by_model: BTreeMap::new(),
            worst: vec![],
            minutes: 0,
            bad_minutes: 0,
        }
    }

    /// Adds a minute, which comes once. `start_ms` is rounded down to a minute.
    pub fn add(&mut self, start_ms: i64, slices: &[Slice<N>]) {
        let start_ms = super::start_of(start_ms, MINUTE_MS);
        let calls = |slice: &Slice<N>| slice.good.saturating_add(slice.bad);
        let all = slices.iter().fold(0, |sum: u64, slice| sum.saturating_add(calls(slice)));
        if all == 0 {
            return;
        }
        let is_in = self.whole.has(start_ms);
        let (mut sum, mut worst): (Part, Option<(u64, N, N)>) = (Part::default(), None);
        for slice in slices {
            let Slice { model, upstream, region, cause, good, bad } = *slice;
            let burnt_us = share(MINUTE_US, bad, all);
            sum.add(good, bad, burnt_us);
            if bad > 0 && worst.is_none_or(|(most, ..)| bad > most) {
                worst = Some((bad, cause, upstream));
            }
            if is_in {
                self.by_upstream.entry(upstream).or_default().add(good, bad, burnt_us);
                self.by_region.entry(region).or_default().add(good, bad, burnt_us);
                self.by_model.entry(model).or_default().add(good, bad, burnt_us);
                if bad > 0 {
                    self.by_cause.entry(cause).or_default().add(0, bad, burnt_us);
                }
            }
        }
        for window in self.windows.iter_mut().filter(|window| window.has(start_ms)) {
            window.part.add(sum.good, sum.bad, sum.burnt_us);
        }
        if is_in {
            self.whole.part.add(sum.good, sum.bad, sum.burnt_us);
            self.minutes += 1;
            if let Some((_, cause, upstream)) = worst {
                self.bad_minutes += 1;
                self.remember(Minute { start_ms, part: sum, cause, upstream });
            }
        }
    }

    fn remember(&mut self, minute: Minute<N>) {
        // Of two that burnt alike the one with more bad calls is the worse, then the earlier one.
        let rank = |it: &Minute<N>| (it.part.burnt_us, it.part.bad, std::cmp::Reverse(it.start_ms));
        let at = self.worst.partition_point(|known| rank(known) > rank(&minute));
        if at < WORST_MAX {
            self.worst.insert(at, minute);
            self.worst.truncate(WORST_MAX);
        }
    }

    /// What is left of the budget, in microseconds: below zero when more is burnt than there was.
    #[must_use]
    pub fn left_us(&self, allowance: Allowance) -> i64 {
        let budget = allowance.budget_us(self.whole.to_ms.saturating_sub(self.whole.from_ms));
        let signed = |us: u64| i64::try_from(us).unwrap_or(i64::MAX);
        signed(budget).saturating_sub(signed(self.whole.part.burnt_us))
    }
}

/// `part` of `all`, of an amount, rounded down.
fn share(amount: u64, part: u64, all: u64) -> u64 {
    (u128::from(amount) * u128::from(part))
        .checked_div(u128::from(all))
        .map_or(0, |share| u64::try_from(share).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::slo::{DAY_MS, HOUR_MS};

    const ALLOWANCE: u32 = 999_500;

    fn allowance() -> Allowance {
        Allowance::of_objective(ALLOWANCE).unwrap()
    }

    fn slice(cause: u8, good: u64, bad: u64) -> Slice<u8> {
        Slice { model: 0, upstream: 1, region: 2, cause, good, bad }
    }

    fn month() -> Burn<u8> {
        let hour = Window::new(30 * DAY_MS - HOUR_MS, 30 * DAY_MS);
        Burn::new(Window::new(0, 30 * DAY_MS), vec![hour])
    }

    #[test]
    fn a_minute_without_calls_burns_nothing() {
        let mut burn = month();
        burn.add(0, &[]);
        burn.add(MINUTE_MS, &[slice(0, 0, 0)]);
        assert_eq!((burn.minutes, burn.bad_minutes, burn.whole.part), (0, 0, Part::default()));
        assert_eq!(burn.left_us(allowance()), 1_296_000_000);
        assert_eq!(burn.whole.part.good_per_million(), 1_000_000);
    }

    #[test]
    fn a_minute_burns_its_share_of_bad_calls_however_many_there_were() {
        let mut burn = month();
        burn.add(0, &[slice(1, 0, 3)]);
        burn.add(MINUTE_MS, &[slice(0, 90, 0), slice(1, 0, 10)]);
        burn.add(2 * MINUTE_MS, &[slice(0, 1_000_000, 0)]);
        assert_eq!(burn.whole.part, Part { good: 1_000_090, bad: 13, burnt_us: 66_000_000 });
        assert_eq!((burn.minutes, burn.bad_minutes), (3, 2));
        assert_eq!(burn.worst.iter().map(|it| it.start_ms).collect::<Vec<_>>(), [0, MINUTE_MS]);
    }

    #[test]
    fn a_budget_is_gone_after_its_minutes_of_outage_and_not_before() {
        let mut burn = month();
        for minute in 0..21 {
            burn.add(minute * MINUTE_MS, &[slice(1, 0, 7)]);
        }
        assert_eq!(burn.left_us(allowance()), 36_000_000);
        burn.add(21 * MINUTE_MS, &[slice(1, 0, 7)]);
        assert_eq!(burn.left_us(allowance()), -24_000_000);
    }

    #[test]
    fn an_hour_of_one_bad_call_in_two_thousand_burns_at_a_rate_of_one() {
        let mut burn = month();
        for minute in 0..60 {
            burn.add(30 * DAY_MS - HOUR_MS + minute * MINUTE_MS, &[slice(0, 1999, 0), slice(1, 0, 1)]);
        }
        assert_eq!(burn.windows[0].rate_milli(allowance()), 1000);
    }

    #[test]
    fn what_is_before_the_month_counts_for_a_window_that_reaches_back_and_not_for_the_month() {
        let mut burn = Burn::new(Window::new(DAY_MS, 31 * DAY_MS), vec![Window::new(0, 2 * DAY_MS)]);
        burn.add(DAY_MS - MINUTE_MS, &[slice(1, 0, 1)]);
        assert_eq!((burn.whole.part, burn.by_cause.len()), (Part::default(), 0));
        assert_eq!(burn.windows[0].part.burnt_us, MINUTE_US);
        burn.add(DAY_MS, &[slice(1, 0, 1)]);
        burn.add(31 * DAY_MS, &[slice(1, 0, 1)]);
        assert_eq!(burn.whole.part.burnt_us, MINUTE_US, "the next month's first minute is not this one's");
    }

    #[test]
    fn the_worst_minutes_are_few_and_in_order() {
        let mut burn = month();
        for minute in 0..30_i64 {
            let bad = minute.unsigned_abs();
            burn.add(minute * MINUTE_MS, &[slice(0, 100 - bad, 0), slice(1, 0, bad)]);
        }
        let worst: Vec<u64> = burn.worst.iter().map(|it| it.part.bad).collect();
        assert_eq!(worst, (20..30).rev().collect::<Vec<_>>());
    }

    fn slices() -> impl Strategy<Value = Vec<Slice<u8>>> {
        let one = (0_u8..3, 0_u8..3, 0_u8..2, 0_u8..4, 0_u64..1_000_000, 0_u64..1_000_000);
        let slice =
            |(model, upstream, region, cause, good, bad)| Slice { model, upstream, region, cause, good, bad };
        proptest::collection::vec(one.prop_map(slice), 0..8)
    }

    proptest! {
        /// Every way of splitting sums up to the whole, and no minute burns more than a minute.
        #[test]
        fn parts_sum_up_to_the_whole(minutes in proptest::collection::vec(slices(), 0..40)) {
            let mut burn = month();
            for (at, slices) in (0_i64..).zip(&minutes) {
                burn.add(at * MINUTE_MS, slices);
            }
            let whole = burn.whole.part;
            for parts in [&burn.by_cause, &burn.by_upstream, &burn.by_region, &burn.by_model] {
                prop_assert_eq!(parts.values().map(|it| it.burnt_us).sum::<u64>(), whole.burnt_us);
                prop_assert_eq!(parts.values().map(|it| it.bad).sum::<u64>(), whole.bad);
            }
            for parts in [&burn.by_upstream, &burn.by_region, &burn.by_model] {
                prop_assert_eq!(parts.values().map(|it| it.good).sum::<u64>(), whole.good);
            }
            prop_assert!(whole.burnt_us <= burn.minutes * MINUTE_US);
            prop_assert!(burn.bad_minutes <= burn.minutes);
            let budget = i64::try_from(allowance().budget_us(30 * DAY_MS)).unwrap();
            prop_assert_eq!(burn.left_us(allowance()), budget - i64::try_from(whole.burnt_us).unwrap());
        }

        /// The order in which minutes come does not matter.
        #[test]
        fn minutes_may_come_in_any_order(
            minutes in proptest::collection::vec(slices(), 0..20),
            turn in 0_usize..20,
        ) {
            let numbered: Vec<_> = (0_i64..).zip(&minutes).collect();
            let mut turned = numbered.clone();
            turned.rotate_left(turn % numbered.len().max(1));
            let of = |minutes: &[(i64, &Vec<Slice<u8>>)]| {
                let mut burn = month();
                for (at, slices) in minutes {
                    burn.add(at * MINUTE_MS, slices);
                }
                burn
            };
            let (one, other) = (of(&numbered), of(&turned));
            prop_assert_eq!(one.whole, other.whole);
            prop_assert_eq!(one.worst, other.worst);
            prop_assert_eq!(one.by_cause, other.by_cause);
        }

        /// More bad calls in place of good ones never burn less.
        #[test]
        fn worse_burns_more(good in 0_u64..1000, bad in 0_u64..1000) {
            let burnt = |good, bad| {
                let mut burn = month();
                burn.add(0, &[slice(0, good, 0), slice(1, 0, bad)]);
                burn.whole.part.burnt_us
            };
            prop_assert!(burnt(good, bad + 1) >= burnt(good + 1, bad));
        }
    }
}
