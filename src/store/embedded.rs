//! Holds in memory, over a lease of the ledger, with the journal as their memory.
//!
//! An account's pool is what the ledger has leased to this process: `available + held`. A hold is
//! one compare-and-subtract under the pool's lock. Only charged money leaves the pool, and the
//! ledger books it later from the journal: a crash in between is repaired by replay.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use async_trait::async_trait;
use crossbeam_queue::ArrayQueue;
use filters::ids::AccountId;
use filters::money::{Amount, Settlement, settle};

use super::port::{Abandon, Admit, Charge, Deny, Holds, Ticket};
use crate::clock;
use crate::journal::{Hold, Journal, OpenHold, Settled};

/// Settled calls that the ledger may lag behind before admission stops.
const UNPOSTED_MAX: u64 = 100_000;

/// The embedded store.
pub struct Embedded {
    inner: Arc<Inner>,
}

struct Inner {
    pools: RwLock<HashMap<AccountId, Arc<Mutex<Pool>>>>,
    journal: Journal,
    open: AtomicUsize,
    open_max: usize,
    /// Holds whose request was dropped. Each open hold can stand in it once, so it never overflows.
    abandoned: ArrayQueue<Arc<OpenHold>>,
}

/// One account's money in this process.
#[derive(Debug, Default)]
struct Pool {
    available: Amount,
    held: Amount,
}

impl Embedded {
    /// A store over what the ledger has leased to this process. At most `open_max` holds are open.
    #[must_use]
    pub fn new(leases: Vec<(AccountId, Amount)>, journal: Journal, open_max: usize) -> Self {
        let pool =
            |(account, available)| (account, Arc::new(Mutex::new(Pool { available, held: Amount::ZERO })));
        let inner = Inner {
            pools: RwLock::new(leases.into_iter().map(pool).collect()),
            journal,
            open: AtomicUsize::new(0),
            open_max,
            abandoned: ArrayQueue::new(open_max.max(1)),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Settles the holds of requests that were dropped. Call it often, from anywhere that may
    /// allocate and lock; the sweeper does so every few milliseconds.
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
        if let Err(deny) = inner.reserve(admit.account, admit.amount) {
            inner.open.fetch_sub(1, Ordering::AcqRel);
            return Err(deny);
        }
        let hold = Hold {
            id: admit.hold.0,
            account: admit.account.0,
            amount: admit.amount.nano(),
            at_ms: clock::unix_ms(),
            request: admit.request,
            model: admit.model,
        };
        let hold = Arc::new(OpenHold::new(hold));
        // From here on a dropped ticket gives the money back, also while the record is written.
        let abandon: Arc<dyn Abandon> = Arc::<Inner>::clone(inner);
        let mut ticket = Ticket { hold: Arc::clone(&hold), on_drop: Some(abandon) };
        if inner.journal.hold(hold).await.is_err() {
            ticket.on_drop = None;
            inner.give_back(admit.account, admit.amount);
            return Err(Deny::Unavailable);
        }
        Ok(ticket)
    }

    fn touch(&self, ticket: &Ticket, cost: Amount) {
        self.inner.journal.progress(&ticket.hold, cost);
    }

    async fn settle(&self, mut ticket: Ticket, charge: Charge) -> Settlement {
        ticket.on_drop = None;
        let settled = self.inner.close(&ticket.hold, charge);
        let settlement = settled.settlement();
        // A disk that refuses it has closed admission already; the record is kept and written later.
        if let Err(error) = self.inner.journal.settle(settled).await {
            tracing::error!(%error, hold = %ticket.id(), "a charge waits for the disk");
        }
        settlement
    }

    fn available(&self, account: AccountId) -> Amount {
        let pool = self.inner.pool(account);
        pool.map_or(Amount::ZERO, |pool| pool.lock().unwrap_or_else(PoisonError::into_inner).available)
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
    fn pool(&self, account: AccountId) -> Option<Arc<Mutex<Pool>>> {
        self.pools.read().unwrap_or_else(PoisonError::into_inner).get(&account).cloned()
    }

    fn with_pool<T>(&self, account: AccountId, change: impl FnOnce(&mut Pool) -> T) -> Option<T> {
        let pool = self.pool(account)?;
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        Some(change(&mut pool))
    }

    fn take_place(&self) -> bool {
        let more = |open| (open < self.open_max).then_some(open + 1);
        self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    fn reserve(&self, account: AccountId, amount: Amount) -> Result<(), Deny> {
        let none = Deny::Funds { available: Amount::ZERO };
        self.with_pool(account, |pool| {
            let refuse = Deny::Funds { available: pool.available };
            let (rest, held) = pool
                .available
                .checked_sub(amount)
                .filter(|rest| *rest >= Amount::ZERO)
                .zip(pool.held.checked_add(amount))
                .ok_or(refuse)?;
            pool.available = rest;
            pool.held = held;
            Ok(())
        })
        .unwrap_or(Err(none))
    }

    fn give_back(&self, account: AccountId, amount: Amount) {
        self.with_pool(account, |pool| pool.end(amount, amount));
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// The one exit of a hold: moves its money and says what was charged.
    fn close(&self, hold: &OpenHold, charge: Charge) -> Settled {
        let held = hold.amount();
        let settlement = self
            .with_pool(hold.account(), |pool| {
                let settlement = settle(held, charge.cost, pool.available);
                pool.end(held, settlement.released);
                pool.available = pool.available.less(settlement.excess);
                settlement
            })
            .unwrap_or_else(|| settle(held, charge.cost, Amount::ZERO));
        self.open.fetch_sub(1, Ordering::AcqRel);
        Settled {
            id: hold.hold.id,
            account: hold.hold.account,
            request: hold.hold.request.clone(),
            model: hold.hold.model.clone(),
            endpoint: charge.endpoint,
            attempts: charge.attempts,
            parts: Settled::parts_of(&settlement),
            provider_cost: charge.provider_cost.nano(),
            tokens: Settled::tokens_of(&charge.used.usage),
            estimated: charge.used.estimated,
            anomaly: charge.used.anomaly,
            at_ms: clock::unix_ms(),
        }
    }

    fn sweep(&self) {
        while let Some(hold) = self.abandoned.pop() {
            let cost = hold.cost_so_far();
            let used = filters::meter::Used { estimated: true, ..Default::default() };
            let settled = self.close(&hold, Charge { cost, used, ..Charge::default() });
            self.journal.settle_unattended(settled);
        }
    }
}

impl Pool {
    /// A hold of `held` is over; `back` of it is free again.
    fn end(&mut self, held: Amount, back: Amount) {
        self.held = self.held.less(held);
        self.available = self.available.checked_add(back).unwrap_or(Amount::MAX);
    }
}

impl Abandon for Inner {
    fn abandon(&self, hold: &Arc<OpenHold>) {
        // Its place is free: every open hold has one.
        let _full = self.abandoned.push(Arc::clone(hold));
    }
}
