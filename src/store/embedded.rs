//! Holds in memory, over a lease of the ledger, with the journal as their memory.
//!
//! An account's purse is what the ledger has leased to this process. A hold is one compare-and-subtract
//! under the purse's lock, together with all limits of its key, its account and its model. Only charged
//! money leaves the purse, and the ledger books it later from the journal: a crash in between is repaired
//! by replay.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use crossbeam_queue::SegQueue;
use filters::ids::{AccountId, KeyDigest};
use filters::limit::{Now, Scopes, Want};
use filters::money::{Amount, Settlement, settle};
use filters::purse::{Carried, EndHold, Purse, Refused, Reserve, SpentSince, Standings};

use super::port::{Abandon, Admit, Charge, Deny, Holds, Ticket};
use crate::clock;
use crate::journal::{Hold, Journal, OpenHold, Settled};

/// Settled calls that the ledger may lag behind before admission stops.
const UNPOSTED_MAX: u64 = 100_000;

/// The time at which a process begins, for counters of what was before: more than the longest of them.
const PAST: Duration = Duration::from_secs(3600);

/// The embedded store.
pub struct Embedded {
    inner: Arc<Inner>,
}

struct Inner {
    began: Instant,
    purses: RwLock<HashMap<AccountId, Arc<Mutex<Purse>>>>,
    journal: Journal,
    open: AtomicUsize,
    open_max: usize,
    /// The folder has a new owner: what is free here goes back to the ledger.
    handed_over: AtomicBool,
    /// Holds whose request was dropped. Each open hold can stand in it once, so there are at most `open_max`.
    abandoned: SegQueue<Arc<OpenHold>>,
}

impl Embedded {
    /// A store over what the ledger has leased to this process. At most `open_max` holds are open.
    #[must_use]
    pub fn new(leases: Vec<(AccountId, Amount)>, journal: Journal, open_max: usize) -> Self {
        let inner = Inner {
            began: clock::now(),
            purses: RwLock::default(),
            journal,
            open: AtomicUsize::new(0),
            open_max,
            handed_over: AtomicBool::new(false),
            abandoned: SegQueue::new(),
        };
        let store = Self { inner: Arc::new(inner) };
        store.grant(leases);
        store
    }

    /// More money has been leased to this process.
    pub fn grant(&self, leases: Vec<(AccountId, Amount)>) {
        let mut purses = self.inner.purses.write().unwrap_or_else(PoisonError::into_inner);
        for (account, amount) in leases {
            let purse = purses.entry(account).or_default();
            purse.lock().unwrap_or_else(PoisonError::into_inner).grant(amount);
        }
    }

    /// Takes free money out of an account's pool, for money that leaves the account.
    ///
    /// # Errors
    /// What is free, when that is less.
    pub fn withdraw(&self, account: AccountId, amount: Amount) -> Result<(), Amount> {
        self.inner.with_purse(account, |purse| purse.withdraw(amount)).unwrap_or(Err(Amount::ZERO))
    }

    /// Takes what is free out of all pools, for a process that takes over; `half`: only half of it, since calls
    /// are still arriving here. Whoever finds no money from now on is to come back, to the other process.
    #[must_use]
    pub fn take_free(&self, half: bool) -> Vec<(AccountId, Amount)> {
        self.inner.handed_over.store(true, Ordering::Release);
        let purses = self.inner.purses.read().unwrap_or_else(PoisonError::into_inner);
        let take = |(account, purse): (&AccountId, &Arc<Mutex<Purse>>)| {
            let mut purse = purse.lock().unwrap_or_else(PoisonError::into_inner);
            let free = purse.available();
            let part = if half { Amount::from_nano(free.nano() / 2) } else { free };
            purse.withdraw(part).ok()?;
            part.is_positive().then_some((*account, part))
        };
        purses.iter().filter_map(take).collect()
    }

    /// What is free in all purses together.
    #[must_use]
    pub fn free(&self) -> Amount {
        let purses = self.inner.purses.read().unwrap_or_else(PoisonError::into_inner);
        let free =
            purses.values().map(|purse| purse.lock().unwrap_or_else(PoisonError::into_inner).available());
        free.fold(Amount::ZERO, |sum, free| sum.checked_add(free).unwrap_or(Amount::MAX))
    }

    /// What running calls hold of all purses together.
    #[must_use]
    pub fn held(&self) -> Amount {
        let purses = self.inner.purses.read().unwrap_or_else(PoisonError::into_inner);
        let held = purses.values().map(|purse| purse.lock().unwrap_or_else(PoisonError::into_inner).held());
        held.fold(Amount::ZERO, |sum, held| sum.checked_add(held).unwrap_or(Amount::MAX))
    }

    /// Whether another process takes over: nothing is leased for this one any more.
    #[must_use]
    pub fn is_handed_over(&self) -> bool {
        self.inner.handed_over.load(Ordering::Acquire)
    }

    /// How limits stand, for a process that takes over; `of` these accounts, or of all.
    #[must_use]
    pub fn carried(&self, of: Option<&HashSet<AccountId>>) -> Vec<(AccountId, Carried)> {
        let now = self.inner.now();
        let purses = self.inner.purses.read().unwrap_or_else(PoisonError::into_inner);
        let wanted = purses.iter().filter(|(account, _)| of.is_none_or(|of| of.contains(account)));
        let carried = wanted.map(|(account, purse)| {
            (*account, purse.lock().unwrap_or_else(PoisonError::into_inner).carried(now))
        });
        carried.collect()
    }

    /// Accounts with calls in flight.
    #[must_use]
    pub fn busy(&self) -> HashSet<AccountId> {
        let purses = self.inner.purses.read().unwrap_or_else(PoisonError::into_inner);
        let busy = purses
            .iter()
            .filter(|(_, purse)| purse.lock().unwrap_or_else(PoisonError::into_inner).has_open_holds());
        busy.map(|(account, _)| *account).collect()
    }

    /// Takes over how limits stand in the process before.
    pub fn adopt(&self, limits: &[(AccountId, Carried)]) {
        let now = self.inner.now();
        // An account without free money has no purse yet.
        self.grant(limits.iter().map(|(account, _)| (*account, Amount::ZERO)).collect());
        for (account, carried) in limits {
            self.inner.with_purse(*account, |purse| purse.adopt(now, carried));
        }
    }

    /// What still runs in the process before, and what it has spent by now.
    pub fn stand_elsewhere(&self, limits: &[(AccountId, Carried)]) {
        for (account, carried) in limits {
            self.inner.with_purse(*account, |purse| purse.stand_elsewhere(carried));
        }
    }

    /// The process before has gone.
    pub fn nothing_runs_elsewhere(&self) {
        let purses = self.inner.purses.read().unwrap_or_else(PoisonError::into_inner);
        for purse in purses.values() {
            purse.lock().unwrap_or_else(PoisonError::into_inner).nothing_runs_elsewhere();
        }
    }

    /// What was spent in the windows of budgets before this process began.
    pub fn restore_budgets(
        &self,
        account: AccountId,
        key: KeyDigest,
        scopes: &Scopes,
        spent: &SpentSince<'_>,
    ) {
        let now = self.inner.now();
        // An account without free money has no purse yet.
        self.grant(vec![(account, Amount::ZERO)]);
        self.inner.with_purse(account, |purse| purse.restore(now, key, scopes, spent));
    }

    /// Settles the holds of requests that were dropped. Call it often, from anywhere that may
    /// allocate and lock; the sweeper does so all the time.
    pub fn sweep(&self) {
        self.inner.sweep();
    }
}

#[async_trait]
impl Holds for Embedded {
    async fn admit(&self, admit: Admit) -> Result<Ticket, Deny> {
        let inner = &self.inner;
        inner.sweep();
        if !inner.journal.is_writable() {
            return Err(Deny::Unavailable);
        }
        if inner.journal.unposted() > UNPOSTED_MAX || !inner.take_place() {
            return Err(Deny::Overloaded);
        }
        let standing = match inner.reserve(&admit) {
            Ok(standing) => standing,
            Err(deny) => {
                inner.open.fetch_sub(1, Ordering::AcqRel);
                return Err(deny);
            }
        };
        let hold = Hold {
            id: admit.hold.0,
            account: admit.account.0,
            amount: admit.amount.nano(),
            at_ms: clock::unix_ms(),
            request: admit.request,
            model: admit.models.into_iter().next().unwrap_or_default(),
            key: admit.key.0,
            price_version: admit.price_version,
            pool: None,
        };
        let hold = Arc::new(OpenHold::new(hold));
        // From here on a dropped ticket gives everything back, also while the record is written.
        let abandon: Arc<dyn Abandon> = Arc::<Inner>::clone(inner);
        let mut ticket = Ticket { standing, hold: Arc::clone(&hold), on_drop: Some(abandon) };
        if inner.journal.hold(Arc::clone(&hold)).await.is_err() {
            ticket.on_drop = None;
            inner.close(&hold, &Charge::default());
            return Err(Deny::Unavailable);
        }
        Ok(ticket)
    }

    fn touch(&self, ticket: &Ticket, cost: Amount) {
        self.inner.journal.progress(&ticket.hold, cost);
    }

    async fn settle(&self, mut ticket: Ticket, charge: Charge) -> Settlement {
        ticket.on_drop = None;
        let settled = self.inner.close(&ticket.hold, &charge);
        let settlement = settled.settlement();
        // A disk that refuses it has closed admission already; the record is kept and written later.
        if let Err(error) = self.inner.journal.settle(settled).await {
            tracing::error!(breach = "charge_waits", %error, hold = %ticket.id(), "a charge waits for the disk");
        }
        settlement
    }

    fn available(&self, account: AccountId) -> Amount {
        self.inner.with_purse(account, |purse| purse.available()).unwrap_or_default()
    }

    fn open_holds(&self) -> usize {
        self.inner.open.load(Ordering::Acquire)
    }

    fn trouble(&self) -> Option<&'static str> {
        if !self.inner.journal.is_writable() {
            return Some("the journal cannot be written");
        }
        (self.inner.journal.unposted() > UNPOSTED_MAX).then_some("the ledger lags too far behind")
    }
}

impl Inner {
    fn now(&self) -> Now {
        // Not from zero: what a process before this one did lies in the past.
        let since = clock::now().saturating_duration_since(self.began).saturating_add(PAST);
        Now { ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX), unix_ms: clock::unix_ms() }
    }

    fn with_purse<T>(&self, account: AccountId, change: impl FnOnce(&mut Purse) -> T) -> Option<T> {
        let purses = self.purses.read().unwrap_or_else(PoisonError::into_inner);
        let purse = purses.get(&account).cloned()?;
        drop(purses);
        let mut purse = purse.lock().unwrap_or_else(PoisonError::into_inner);
        Some(change(&mut purse))
    }

    fn take_place(&self) -> bool {
        let more = |open| (open < self.open_max).then_some(open + 1);
        self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Limits and money in one step: all of it, or nothing.
    fn reserve(&self, admit: &Admit) -> Result<Standings, Deny> {
        let reserve = Reserve {
            hold: admit.hold,
            key: admit.key,
            models: &admit.models,
            scopes: &admit.scopes,
            want: Want { tokens: admit.tokens, amount: admit.amount },
        };
        let now = self.now();
        match self.with_purse(admit.account, |purse| purse.reserve(now, &reserve)) {
            Some(Ok(standing)) => Ok(standing),
            // The money is with the process that took over: a caller who comes back finds it there.
            Some(Err(Refused::Funds { .. })) if self.handed_over.load(Ordering::Acquire) => {
                Err(Deny::Overloaded)
            }
            Some(Err(Refused::Funds { available })) => Err(Deny::Funds { available }),
            Some(Err(Refused::Limited { scope, over })) => Err(Deny::Limited { scope, over }),
            // Nothing is leased for an account without money. What is free needs a purse for its limits alone.
            None if admit.amount == Amount::ZERO => {
                self.purses.write().unwrap_or_else(PoisonError::into_inner).entry(admit.account).or_default();
                self.reserve(admit)
            }
            None => Err(Deny::Funds { available: Amount::ZERO }),
        }
    }

    /// The one exit of a hold: moves its money and says what was charged.
    fn close(&self, hold: &OpenHold, charge: &Charge) -> Settled {
        let now = self.now();
        let usage = &charge.used.usage;
        let model = charge.model(&hold.hold);
        let end = EndHold {
            hold: hold.id(),
            held: hold.amount(),
            key: KeyDigest(hold.hold.key),
            model,
            cost: charge.cost,
            tokens: usage.prompt().saturating_add(usage.output),
            left: charge.left,
        };
        let (settlement, abandoned) = self
            .with_purse(hold.account(), |purse| purse.end(now, &end))
            .unwrap_or_else(|| (settle(hold.amount(), charge.cost, Amount::ZERO), Amount::ZERO));
        self.open.fetch_sub(1, Ordering::AcqRel);
        charge.record(&hold.hold, &settlement, abandoned)
    }

    fn sweep(&self) {
        while let Some(hold) = self.abandoned.pop() {
            let cost = hold.cost_so_far();
            let used = filters::meter::Used { estimated: true, ..Default::default() };
            let settled = self.close(&hold, &Charge { cost, used, ..Charge::default() });
            self.journal.settle_unattended(settled);
        }
    }
}

impl Abandon for Inner {
    fn abandon(&self, hold: &Arc<OpenHold>) {
        self.abandoned.push(Arc::clone(hold));
    }
}
