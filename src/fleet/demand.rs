//! How much money an account needs ahead of its calls on this node.
//!
//! A pool is filled when it runs low after a hold, not when a call finds it empty: so only the first call of an account
//! waits for the ledger, and one that takes the last of it. A caller without money is asked about once a second and
//! account, however often it comes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use filters::ids::AccountId;
use filters::money::Amount;

use crate::clock;

/// How long an account that has nothing more is not asked about again.
const POOR: Duration = Duration::from_secs(1);
/// How long an account of which nobody can tell is not asked about again.
const UNSURE: Duration = Duration::from_millis(250);
/// A pool is filled with what its account holds here in so long.
const AHEAD: Duration = Duration::from_secs(60);
/// And with so many times its largest hold of late.
const HOLDS_AHEAD: i64 = 8;
/// Below this part of what it was filled to, a pool is filled again.
const LOW_PART: i64 = 2;
/// How long a node keeps no tranche of an account whose money others were short of.
const SHORT: Duration = Duration::from_secs(10);
/// How long an account's spending is remembered.
const WINDOW: Duration = Duration::from_secs(30);
/// After so long without a call an account's money goes back to where all can have it.
const IDLE: Duration = Duration::from_secs(60);

/// What an account does on this node.
#[derive(Debug, Default)]
pub(super) struct Demand {
    accounts: Mutex<HashMap<AccountId, Seen>>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    last: Instant,
    /// Held since `since`.
    sum: Amount,
    since: Instant,
    /// In the window before it.
    before: Amount,
    largest: Amount,
    poor: Option<(Instant, Amount)>,
    /// Until then nobody can tell what it has.
    unsure: Option<Instant>,
    filling: bool,
    /// Until then this node keeps none of its own: others were short of it.
    no_tranche: Option<Instant>,
}

/// An account that calls here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) account: AccountId,
    /// What this node should have for it when Redis is away.
    pub(super) local: Amount,
}

impl Demand {
    /// A hold was placed, and so much is left in the pool. Answers how much the pool should be filled up to, if it is
    /// low and nobody fills it already.
    pub(super) fn spent(&self, account: AccountId, amount: Amount, available: Amount) -> Option<Amount> {
        let now = clock::now();
        let mut accounts = self.lock();
        let seen = accounts.entry(account).or_insert_with(|| Seen::new(now));
        seen.note(now, amount);
        let target = seen.target();
        let low = available.nano() < target.nano() / LOW_PART;
        (low && !seen.filling && seen.poor.is_none_or(|(until, _)| until <= now)).then(|| {
            seen.filling = true;
            target
        })
    }

    /// Money of this node's own was spent, or wanted.
    pub(super) fn spent_here(&self, account: AccountId, amount: Amount) {
        let now = clock::now();
        self.lock().entry(account).or_insert_with(|| Seen::new(now)).note(now, amount);
    }

    /// What a call that found too little wants: that, and what is usual beside it.
    pub(super) fn wanted(&self, account: AccountId, need: Amount) -> Amount {
        let now = clock::now();
        let mut accounts = self.lock();
        let seen = accounts.entry(account).or_insert_with(|| Seen::new(now));
        seen.note(now, need);
        seen.target().max(need)
    }

    /// The same, of this node's own.
    pub(super) fn wanted_here(&self, account: AccountId, need: Amount) -> Amount {
        self.lock().get(&account).map_or(need, |seen| seen.local().max(need))
    }

    /// The account's pool has been filled, or could not be.
    pub(super) fn filled(&self, account: AccountId) {
        if let Some(seen) = self.lock().get_mut(&account) {
            seen.filling = false;
        }
    }

    /// The account has no more than `available`.
    pub(super) fn is_poor(&self, account: AccountId, available: Amount) {
        if let Some(seen) = self.lock().get_mut(&account) {
            seen.poor = Some((clock::now() + POOR, available));
        }
    }

    /// What an account was said to have a moment ago, where it was too little.
    pub(super) fn poor(&self, account: AccountId) -> Option<Amount> {
        let now = clock::now();
        self.lock().get(&account)?.poor.filter(|(until, _)| now < *until).map(|(_, available)| available)
    }

    /// Nobody can tell what the account has.
    pub(super) fn is_unsure(&self, account: AccountId) {
        if let Some(seen) = self.lock().get_mut(&account) {
            seen.unsure = Some(clock::now() + UNSURE);
        }
    }

    /// Whether that was so a moment ago.
    pub(super) fn unsure(&self, account: AccountId) -> bool {
        let now = clock::now();
        self.lock().get(&account).is_some_and(|seen| seen.unsure.is_some_and(|until| now < until))
    }

    /// The account may have more now.
    pub(super) fn forget_poor(&self, account: AccountId) {
        if let Some(seen) = self.lock().get_mut(&account) {
            (seen.poor, seen.unsure) = (None, None);
        }
    }

    /// Others are short of this account's money.
    pub(super) fn no_tranche(&self, account: AccountId) {
        if let Some(seen) = self.lock().get_mut(&account) {
            seen.no_tranche = Some(clock::now() + SHORT);
        }
    }

    /// Whether others were short of this account's money a moment ago.
    pub(super) fn is_short(&self, account: AccountId) -> bool {
        let now = clock::now();
        self.lock().get(&account).is_some_and(|seen| seen.no_tranche.is_some_and(|until| now < until))
    }

    /// The accounts that call here; and those that have stopped, which are forgotten.
    pub(super) fn round(&self) -> (Vec<Caller>, Vec<AccountId>) {
        let now = clock::now();
        let mut accounts = self.lock();
        let stopped: Vec<AccountId> = accounts
            .iter()
            .filter(|(_, seen)| now.saturating_duration_since(seen.last) > IDLE)
            .map(|(account, _)| *account)
            .collect();
        for account in &stopped {
            accounts.remove(account);
        }
        let keep = accounts.iter().filter(|(_, seen)| seen.no_tranche.is_none_or(|until| until <= now));
        let callers = keep.map(|(account, seen)| Caller { account: *account, local: seen.local() });
        (callers.collect(), stopped)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<AccountId, Seen>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    fn new(now: Instant) -> Self {
        Self {
            last: now,
            sum: Amount::ZERO,
            since: now,
            before: Amount::ZERO,
            largest: Amount::ZERO,
            poor: None,
            unsure: None,
            filling: false,
            no_tranche: None,
        }
    }

    fn note(&mut self, now: Instant, amount: Amount) {
        let age = now.saturating_duration_since(self.since);
        if age > WINDOW {
            self.before = if age > 2 * WINDOW { Amount::ZERO } else { self.sum };
            self.sum = Amount::ZERO;
            self.since = now;
            // Yesterday's one large call does not park money for ever.
            self.largest = Amount::from_nano(self.largest.nano() / 2);
        }
        self.last = now;
        self.sum = self.sum.checked_add(amount).unwrap_or(Amount::MAX);
        self.largest = self.largest.max(amount);
    }

    /// What is usual in [`AHEAD`], and room for some of the largest holds.
    fn target(&self) -> Amount {
        let usual = self.before.max(self.sum).nano();
        let ahead = usual.saturating_mul(times(AHEAD, WINDOW));
        Amount::from_nano(ahead.max(self.largest.nano().saturating_mul(HOLDS_AHEAD)))
    }

    /// What carries this node's calls over the seconds that a Redis needs to come back.
    fn local(&self) -> Amount {
        let usual = self.before.max(self.sum).nano();
        Amount::from_nano((usual / 2).max(self.largest.nano().saturating_mul(2)))
    }
}

fn times(long: Duration, short: Duration) -> i64 {
    i64::try_from(long.as_millis() / short.as_millis().max(1)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: AccountId = AccountId(1000);

    fn nano(n: i64) -> Amount {
        Amount::from_nano(n)
    }

    #[test]
    fn a_pool_is_filled_once_when_it_runs_low_and_not_for_who_has_nothing() {
        let demand = Demand::default();
        let target = demand.spent(A, nano(100), nano(0)).unwrap();
        assert_eq!(target, nano(800), "room for some of the largest holds");
        assert_eq!(demand.spent(A, nano(100), nano(0)), None, "somebody fills it already");
        demand.filled(A);
        assert_eq!(demand.spent(A, nano(100), nano(700)), None, "there is enough");
        demand.is_poor(A, nano(7));
        assert_eq!((demand.poor(A), demand.spent(A, nano(100), nano(0))), (Some(nano(7)), None));
        demand.forget_poor(A);
        assert_eq!(demand.poor(A), None);
        assert!(demand.spent(A, nano(100), nano(0)).is_some());
    }

    #[test]
    fn who_spends_more_gets_more_ahead() {
        let demand = Demand::default();
        for _ in 0..1000 {
            demand.spent_here(A, nano(100));
        }
        assert_eq!(demand.wanted(A, nano(100)), nano(200_200));
        assert_eq!(demand.wanted(A, nano(1_000_000)), nano(8_000_000));
        let (callers, stopped) = demand.round();
        assert_eq!((callers.len(), stopped.len()), (1, 0));
        assert_eq!(callers[0].local, nano(2_000_000));
    }
}
