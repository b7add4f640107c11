//! How much may a key, an account, or an account with one model ask for?
//!
//! Four kinds of limit, each a counter of its own: requests and tokens per minute, calls at once, and
//! money per day or month. All scopes are looked at first and taken afterwards, so that a refused call
//! has taken nothing; whoever calls holds one lock around both.
//!
//! Tokens and money are reserved at their bound and corrected when the call ends. A minute is any sixty
//! seconds: see [`window`]. A budget's window is the one in which the call was admitted, whenever it
//! ends.
//!
//! Deliberately absent: bursts above the limit. What is written in the config is what can happen.

pub mod abandoned;
pub mod budget;
pub mod window;

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::money::Amount;
use budget::{Budget, Period, Zone};
use window::Window;

/// What one scope may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests in any sixty seconds.
    pub requests_per_minute: Option<u64>,
    /// Tokens in any sixty seconds, input and output together.
    pub tokens_per_minute: Option<u64>,
    /// Calls at the same time.
    pub concurrency: Option<u64>,
    /// Money per calendar window.
    pub budgets: Vec<Budget>,
}

/// The limits that a call has to fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scopes {
    /// Of its key.
    pub key: Limits,
    /// Of all keys of its account.
    pub account: Limits,
    /// Of all keys of its account, by model.
    pub models: HashMap<String, Limits>,
}

/// What one scope has done.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    requests: Window,
    tokens: Window,
    running: u64,
    /// Calls that the process before this one still runs.
    elsewhere: u64,
    spent: Vec<Spent>,
}

/// Money spent or reserved in one window of one budget.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Spent {
    period: Period,
    begins_ms: i64,
    /// Where and until when that is its window: a calendar is not asked again before. `None`: it was not asked yet.
    found: Option<(Zone, i64)>,
    amount: Amount,
    /// In the process before this one.
    elsewhere: Amount,
    /// The budget has just come: what was spent before it did is in the books alone.
    fresh: bool,
}

/// What one scope has done, on its way to the process that takes over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedCounters {
    /// Requests, by the milliseconds that have passed since.
    requests: Vec<(u64, u64)>,
    /// Tokens, by the milliseconds that have passed since.
    tokens: Vec<(u64, u64)>,
    /// Calls that run.
    running: u64,
    /// Nano-dollars of each budget, behind its period and the beginning of its window.
    spent: Vec<(Period, i64, i64)>,
}

/// What a call would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// Tokens, at their bound.
    pub tokens: u64,
    /// Money, at its bound.
    pub amount: Amount,
}

/// Now, as counters see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds of a clock that never steps back.
    pub ms: u64,
    /// Milliseconds since 1970, for calendar windows.
    pub unix_ms: i64,
}

impl Now {
    /// Whole seconds of the clock that never steps back.
    #[must_use]
    pub const fn second(&self) -> u64 {
        self.ms / 1000
    }
}

/// What a call took; needed to correct it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    at_ms: u64,
    tokens: u64,
    amount: Amount,
    windows: Vec<(Period, i64)>,
}

/// Which limit refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Requests per minute.
    Requests,
    /// Tokens per minute.
    Tokens,
    /// Calls at the same time.
    Concurrency,
    /// Money in a window.
    Budget,
}

/// A call that is over a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// Which one.
    pub kind: Kind,
    /// When the same call would fit, nothing else happening.
    pub retry_after: Duration,
}

/// How a per-minute limit stands; for response headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The limit.
    pub limit: u64,
    /// What is left of it.
    pub remaining: u64,
    /// Seconds until all of it is there again.
    pub reset_seconds: u64,
}

impl Kind {
    /// Its word in messages and metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Requests => "requests_per_minute",
            Self::Tokens => "tokens_per_minute",
            Self::Concurrency => "concurrency",
            Self::Budget => "budget",
        }
    }
}

impl Limits {
    /// Nothing is limited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// A call that wants more tokens than a minute has is let in alone, with the whole minute.
    fn tokens_of(&self, want: &Want) -> u64 {
        self.tokens_per_minute.map_or(want.tokens, |limit| want.tokens.min(limit))
    }
}

impl Spent {
    fn sum(&self) -> Amount {
        self.amount.checked_add(self.elsewhere).unwrap_or(Amount::MAX)
    }

    /// Whether it is known to be of this budget's window by now.
    fn is_of(&self, budget: &Budget, now: Now) -> bool {
        let current = |(zone, ends_ms): &(Zone, i64)| {
            zone.is_named_as(&budget.zone) && (self.begins_ms..*ends_ms).contains(&now.unix_ms)
        };
        self.period == budget.period && self.found.as_ref().is_some_and(current)
    }
}

impl Counters {
    /// Whether a call fits. Takes nothing.
    ///
    /// # Errors
    /// [`Over`], for the first limit that it is over.
    pub fn check(&mut self, now: Now, limits: &Limits, want: &Want) -> Result<(), Over> {
        let over = |kind, ms| Err(Over { kind, retry_after: Duration::from_millis(ms) });
        if let Some(limit) = limits.requests_per_minute
            && let Some(wait) = self.requests.wait(now.ms, limit, 1)
        {
            return over(Kind::Requests, wait);
        }
        if let Some(limit) = limits.tokens_per_minute
            && let Some(wait) = self.tokens.wait(now.ms, limit, limits.tokens_of(want))
        {
            return over(Kind::Tokens, wait);
        }
        if limits.concurrency.is_some_and(|limit| self.running.saturating_add(self.elsewhere) >= limit) {
            return over(Kind::Concurrency, 1000);
        }
        self.roll_budgets(now, limits);
        for (budget, spent) in limits.budgets.iter().zip(&self.spent) {
            let fits = spent.sum().checked_add(want.amount).is_some_and(|sum| sum <= budget.amount);
            if !fits {
                let ends_ms = budget.window(now.unix_ms).1;
                let wait = u64::try_from(ends_ms.saturating_sub(now.unix_ms)).unwrap_or_default();
                return over(Kind::Budget, wait);
            }
        }
        Ok(())
    }

    /// Takes what a call wants that was checked just now, with the same limits: so budgets are in their windows.
    pub fn take(&mut self, now: Now, limits: &Limits, want: &Want) -> Permit {
        let tokens = limits.tokens_of(want);
        self.requests.add(now.ms, 1);
        self.tokens.add(now.ms, tokens);
        self.running = self.running.saturating_add(1);
        for spent in &mut self.spent {
            spent.amount = spent.amount.checked_add(want.amount).unwrap_or(Amount::MAX);
        }
        let windows = self.spent.iter().map(|s| (s.period, s.begins_ms)).collect();
        Permit { at_ms: now.ms, tokens, amount: want.amount, windows }
    }

    /// Ends a call: what it took at its bound becomes what it used.
    pub fn end(&mut self, permit: &Permit, used_tokens: u64, charged: Amount) {
        self.running = self.running.saturating_sub(1);
        self.tokens.correct(permit.at_ms, permit.tokens, used_tokens);
        for spent in &mut self.spent {
            // A window that is over already, or came later, has no use for the correction.
            if permit.windows.contains(&(spent.period, spent.begins_ms)) {
                let rest = spent.amount.less(permit.amount);
                spent.amount = rest.checked_add(charged).unwrap_or(Amount::MAX);
            }
        }
    }

    /// What was spent in the current windows of budgets before they came: with this process, or with other
    /// limits. Of those that were there `spent` is not asked.
    pub fn restore(&mut self, now: Now, limits: &Limits, spent: impl Fn(i64) -> Amount) {
        self.roll_budgets(now, limits);
        for window in self.spent.iter_mut().filter(|window| window.fresh) {
            let before = spent(window.begins_ms);
            window.amount = window.amount.checked_add(before).unwrap_or(Amount::MAX);
            window.fresh = false;
        }
    }

    /// What the process that takes over has to know.
    #[must_use]
    pub fn carried(&mut self, now: Now) -> CarriedCounters {
        CarriedCounters {
            requests: self.requests.by_age(now.ms),
            tokens: self.tokens.by_age(now.ms),
            running: self.running,
            spent: self.spent.iter().map(|s| (s.period, s.begins_ms, s.sum().nano())).collect(),
        }
    }

    /// Takes over what the process before did, and what it knows of those before it.
    pub fn adopt(&mut self, now: Now, carried: &CarriedCounters) {
        for (window, past) in [(&mut self.requests, &carried.requests), (&mut self.tokens, &carried.tokens)] {
            past.iter().for_each(|(age, amount)| window.add_past(now.ms, *age, *amount));
        }
        self.elsewhere = carried.running;
        // Its figures contain all that the books had when this process began. A budget of another window, or
        // of none any more, is put right by the next check.
        let of = |(period, begins_ms, nano): &(Period, i64, i64)| Spent {
            period: *period,
            begins_ms: *begins_ms,
            found: None,
            amount: Amount::ZERO,
            elsewhere: Amount::from_nano(*nano),
            fresh: false,
        };
        self.spent = carried.spent.iter().map(of).collect();
    }

    /// What still runs in the process before, and what it has spent by now.
    pub fn stand_elsewhere(&mut self, carried: &CarriedCounters) {
        self.elsewhere = carried.running;
        for (period, begins_ms, nano) in &carried.spent {
            let mut windows = self.spent.iter_mut();
            if let Some(spent) = windows.find(|s| (s.period, s.begins_ms) == (*period, *begins_ms)) {
                spent.elsewhere = Amount::from_nano(*nano);
            }
        }
    }

    /// The process before has gone.
    pub fn nothing_runs_elsewhere(&mut self) {
        self.elsewhere = 0;
    }

    /// How requests and tokens per minute stand.
    #[must_use]
    pub fn standing(&mut self, now: Now, limits: &Limits) -> (Option<Standing>, Option<Standing>) {
        let requests = limits.requests_per_minute.map(|limit| self.requests.standing(now.ms, limit));
        let tokens = limits.tokens_per_minute.map(|limit| self.tokens.standing(now.ms, limit));
        (requests, tokens)
    }

    fn roll_budgets(&mut self, now: Now, limits: &Limits) {
        let same = self.spent.len() == limits.budgets.len();
        let mut pairs = self.spent.iter().zip(&limits.budgets);
        if same && pairs.all(|(spent, budget)| spent.is_of(budget, now)) {
            return;
        }
        let known = std::mem::take(&mut self.spent);
        let of = |budget: &Budget| {
            let (period, (begins_ms, ends_ms)) = (budget.period, budget.window(now.unix_ms));
            let found = Some((budget.zone.clone(), ends_ms));
            match known.iter().find(|spent| spent.period == period) {
                Some(spent) if spent.begins_ms == begins_ms => Spent { found, ..spent.clone() },
                // Nothing was spent yet in a window that has just begun.
                known => {
                    let (amount, elsewhere, fresh) = (Amount::ZERO, Amount::ZERO, known.is_none());
                    Spent { period, begins_ms, found, amount, elsewhere, fresh }
                }
            }
        };
        self.spent = limits.budgets.iter().map(of).collect();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(second: u64) -> Now {
        Now { ms: second * 1000, unix_ms: i64::try_from(second).unwrap() * 1000 }
    }

    fn want(tokens: u64, nano: i64) -> Want {
        Want { tokens, amount: Amount::from_nano(nano) }
    }

    /// Checks and takes.
    fn admit(counters: &mut Counters, now: Now, limits: &Limits, want: &Want) -> Result<Permit, Over> {
        counters.check(now, limits, want)?;
        Ok(counters.take(now, limits, want))
    }

    #[test]
    fn a_budget_that_comes_asks_the_books_and_one_that_was_there_goes_on() {
        let budget = |period| Budget { period, amount: Amount::from_nano(100), zone: Zone::utc() };
        let month = Limits { budgets: vec![budget(Period::Month)], ..Limits::default() };
        let both = Limits { budgets: vec![budget(Period::Day), budget(Period::Month)], ..Limits::default() };
        let now = at(20 * 86_400);
        let mut counters = Counters::default();
        counters.restore(now, &month, |_| Amount::from_nano(30));
        let running = admit(&mut counters, now, &month, &want(0, 50)).unwrap();
        counters.restore(now, &both, |_| Amount::from_nano(7));
        let left = |counters: &mut Counters| {
            (0..=100).rev().find(|nano| counters.check(now, &both, &want(0, *nano)).is_ok())
        };
        assert_eq!(left(&mut counters), Some(20), "the month: 30 from the books, 50 reserved");
        counters.end(&running, 0, Amount::from_nano(10));
        assert_eq!(left(&mut counters), Some(60), "the end is found at another place");
        counters.restore(now, &both, |_| Amount::MAX);
        assert_eq!(left(&mut counters), Some(60), "what is known is not asked for again");
        let day = Limits { budgets: vec![budget(Period::Day)], ..Limits::default() };
        let left_of_day = (0..=100).rev().find(|nano| counters.check(now, &day, &want(0, *nano)).is_ok());
        assert_eq!(left_of_day, Some(93));
    }

    #[test]
    fn who_takes_over_counts_what_the_one_before_did_and_still_does() {
        let day = Budget { period: Period::Day, amount: Amount::from_nano(100), zone: Zone::utc() };
        let limits = Limits {
            requests_per_minute: Some(3),
            tokens_per_minute: Some(100),
            concurrency: Some(2),
            budgets: vec![day],
        };
        let mut old = Counters::default();
        let done = admit(&mut old, at(1000), &limits, &want(10, 30)).unwrap();
        old.end(&done, 10, Amount::from_nano(20));
        let running = admit(&mut old, at(1030), &limits, &want(40, 50)).unwrap();
        let mut new = Counters::default();
        // Each process has a clock of its own; ages are what both understand.
        let kind = |new: &mut Counters, second, tokens, nano| {
            new.check(at(second), &limits, &want(tokens, nano)).map_err(|over| over.kind)
        };
        new.adopt(at(5000), &old.carried(at(1030)));
        assert_eq!(kind(&mut new, 5000, 51, 1), Err(Kind::Tokens));
        assert_eq!(kind(&mut new, 5000, 50, 31), Err(Kind::Budget));
        let taken = admit(&mut new, at(5000), &limits, &want(50, 30)).unwrap();
        assert_eq!(kind(&mut new, 5000, 0, 0), Err(Kind::Requests));
        assert_eq!(kind(&mut new, 5031, 0, 0), Err(Kind::Concurrency), "the first request is a minute old");
        // What runs over there ends cheaper than it could have.
        old.end(&running, 40, Amount::from_nano(1));
        new.stand_elsewhere(&old.carried(at(1061)));
        assert_eq!(kind(&mut new, 5031, 0, 49), Ok(()));
        assert_eq!(kind(&mut new, 5031, 0, 50), Err(Kind::Budget));
        new.end(&taken, 50, Amount::ZERO);
        new.nothing_runs_elsewhere();
        assert_eq!(kind(&mut new, 5031, 0, 79), Ok(()), "what it spent stays spent");
        assert_eq!(kind(&mut new, 5031, 0, 80), Err(Kind::Budget));
    }

    #[test]
    fn requests_are_counted_in_any_sixty_seconds() {
        let limits = Limits { requests_per_minute: Some(4), ..Limits::default() };
        let mut counters = Counters::default();
        for second in [58, 58, 59, 59] {
            admit(&mut counters, at(second), &limits, &want(0, 0)).unwrap();
        }
        let over = admit(&mut counters, at(60), &limits, &want(0, 0)).unwrap_err();
        assert_eq!((over.kind, over.retry_after), (Kind::Requests, Duration::from_secs(58)));
        assert!(admit(&mut counters, at(118), &limits, &want(0, 0)).is_ok());
    }

    #[test]
    fn tokens_are_reserved_and_corrected() {
        let limits = Limits { tokens_per_minute: Some(1000), ..Limits::default() };
        let mut counters = Counters::default();
        for round in 0..5 {
            let permit = admit(&mut counters, at(round), &limits, &want(905, 0)).unwrap();
            let parallel = admit(&mut counters, at(round), &limits, &want(905, 0)).unwrap_err();
            assert_eq!(parallel.kind, Kind::Tokens);
            counters.end(&permit, 15, Amount::ZERO);
        }
        assert_eq!(counters.standing(at(5), &limits).1.unwrap().remaining, 1000 - 75);
    }

    #[test]
    fn a_call_larger_than_a_minute_is_let_in_alone() {
        let limits = Limits { tokens_per_minute: Some(100), ..Limits::default() };
        let mut counters = Counters::default();
        assert!(admit(&mut counters, at(0), &limits, &want(5000, 0)).is_ok());
        assert!(admit(&mut counters, at(1), &limits, &want(1, 0)).is_err());
    }

    #[test]
    fn slots_come_back_when_calls_end() {
        let limits = Limits { concurrency: Some(2), ..Limits::default() };
        let mut counters = Counters::default();
        let first = admit(&mut counters, at(0), &limits, &want(0, 0)).unwrap();
        let _second = admit(&mut counters, at(0), &limits, &want(0, 0)).unwrap();
        assert_eq!(admit(&mut counters, at(0), &limits, &want(0, 0)).unwrap_err().kind, Kind::Concurrency);
        counters.end(&first, 0, Amount::ZERO);
        assert!(admit(&mut counters, at(0), &limits, &want(0, 0)).is_ok());
    }

    #[test]
    fn a_budget_is_charged_in_the_window_of_the_admission() {
        let day = Budget { period: Period::Day, amount: Amount::from_nano(100), zone: Zone::utc() };
        let limits = Limits { budgets: vec![day], ..Limits::default() };
        let mut counters = Counters::default();
        let before_midnight = at(86_399);
        let permit = admit(&mut counters, before_midnight, &limits, &want(0, 80)).unwrap();
        assert_eq!(
            admit(&mut counters, before_midnight, &limits, &want(0, 30)).unwrap_err().kind,
            Kind::Budget
        );
        let after = at(86_401);
        assert!(counters.check(after, &limits, &want(0, 100)).is_ok(), "a new day");
        counters.end(&permit, 0, Amount::from_nano(80));
        assert!(counters.check(after, &limits, &want(0, 100)).is_ok(), "yesterday's call is yesterday's");
    }

    #[test]
    fn a_restart_knows_what_was_spent() {
        let day = Budget { period: Period::Day, amount: Amount::from_nano(100), zone: Zone::utc() };
        let limits = Limits { budgets: vec![day], ..Limits::default() };
        let mut counters = Counters::default();
        counters.restore(at(90_000), &limits, |begins_ms| {
            assert_eq!(begins_ms, 86_400_000);
            Amount::from_nano(95)
        });
        assert!(counters.check(at(90_000), &limits, &want(0, 5)).is_ok());
        assert!(counters.check(at(90_000), &limits, &want(0, 6)).is_err());
    }

    proptest! {
        #[test]
        fn never_more_than_the_limit_in_any_sixty_seconds(
            limit in 1_u64..20, waits in prop::collection::vec(0_u64..30_000, 1..200),
        ) {
            let at = |ms: u64| Now { ms, unix_ms: 0 };
            let limits = Limits { requests_per_minute: Some(limit), ..Limits::default() };
            let mut counters = Counters::default();
            let (mut ms, mut admitted) = (0, vec![]);
            for wait in waits {
                ms += wait;
                match admit(&mut counters, at(ms), &limits, &want(0, 0)) {
                    Ok(_) => admitted.push(ms),
                    Err(over) => {
                        // After the wait that it names it fits, and that is never more than a minute.
                        prop_assert!(over.retry_after <= Duration::from_secs(60));
                        let later = at(ms + u64::try_from(over.retry_after.as_millis()).unwrap());
                        prop_assert!(counters.clone().check(later, &limits, &want(0, 0)).is_ok());
                    }
                }
            }
            for begin in &admitted {
                let inside = admitted.iter().filter(|s| (*begin..begin + 60_000).contains(*s)).count();
                prop_assert!(inside as u64 <= limit);
            }
        }

        #[test]
        fn every_slot_and_reservation_comes_back(
            calls in prop::collection::vec((0_u64..3, 0_u64..500, 0_u64..600, 0_i64..50), 1..60),
        ) {
            let limits = Limits { concurrency: Some(5), tokens_per_minute: Some(2_000), ..Limits::default() };
            let mut counters = Counters::default();
            let (mut open, mut second, mut used) = (vec![], 0, 0);
            for (wait, tokens, real, _) in calls {
                second += wait;
                match admit(&mut counters, at(second), &limits, &want(tokens, 0)) {
                    Ok(permit) => open.push((permit, real)),
                    Err(_) => if let Some((permit, real)) = open.pop() {
                        counters.end(&permit, real, Amount::ZERO);
                    },
                }
            }
            for (permit, real) in open.drain(..) {
                counters.end(&permit, real, Amount::ZERO);
                used += real;
            }
            prop_assert_eq!(counters.running, 0);
            let left = counters.standing(at(second + 61), &limits).1.unwrap();
            prop_assert_eq!(left.remaining, 2_000, "a minute later all is there, whatever {} were used", used);
        }
    }
}
