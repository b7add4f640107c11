//! Holds in memory, over a lease of the ledger, with the journal as their memory.
//!
//! An account's pool is what the ledger has leased to this process: `available + held`. A hold is
//! one compare-and-subtract under the pool's lock, together with all limits of its key, its account and
//! its model. Only charged money leaves the pool, and the ledger books it later from the journal: a
//! crash in between is repaired by replay.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use async_trait::async_trait;
use crossbeam_queue::ArrayQueue;
use filters::ids::{AccountId, KeyDigest};
use filters::limit::abandoned::Hour;
use filters::limit::{Counters, Now, Permit, Standing, Want};
use filters::money::{Amount, Settlement, settle};

use super::port::{Abandon, Admit, Charge, Deny, Holds, Ticket};
use crate::clock;
use crate::journal::{Hold, Journal, OpenHold, Settled};
use crate::pool::keys::Scopes;

/// Settled calls that the ledger may lag behind before admission stops.
const UNPOSTED_MAX: u64 = 100_000;

/// The embedded store.
pub struct Embedded {
    inner: Arc<Inner>,
}

struct Inner {
    began: Instant,
    pools: RwLock<HashMap<AccountId, Arc<Mutex<Pool>>>>,
    journal: Journal,
    open: AtomicUsize,
    open_max: usize,
    /// Holds whose request was dropped. Each open hold can stand in it once, so it never overflows.
    abandoned: ArrayQueue<Arc<OpenHold>>,
}

/// One account's money and limits in this process.
#[derive(Debug, Default)]
struct Pool {
    available: Amount,
    held: Amount,
    account: Counters,
    keys: HashMap<KeyDigest, KeyState>,
    models: HashMap<String, Counters>,
    /// What open holds took of the limits.
    permits: HashMap<u128, Taken>,
}

#[derive(Debug, Default)]
struct KeyState {
    counters: Counters,
    hour: Hour,
}

/// What one hold took of the limits of its scopes.
#[derive(Debug)]
struct Taken {
    key: Permit,
    account: Permit,
    model: Option<Permit>,
}

impl Embedded {
    /// A store over what the ledger has leased to this process. At most `open_max` holds are open.
    #[must_use]
    pub fn new(leases: Vec<(AccountId, Amount)>, journal: Journal, open_max: usize) -> Self {
        let inner = Inner {
            began: clock::now(),
            pools: RwLock::default(),
            journal,
            open: AtomicUsize::new(0),
            open_max,
            abandoned: ArrayQueue::new(open_max.max(1)),
        };
        let store = Self { inner: Arc::new(inner) };
        store.grant(leases);
        store
    }

    /// More money has been leased to this process.
    pub fn grant(&self, leases: Vec<(AccountId, Amount)>) {
        let mut pools = self.inner.pools.write().unwrap_or_else(PoisonError::into_inner);
        for (account, amount) in leases {
            let pool = pools.entry(account).or_default();
            let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
            pool.available = pool.available.checked_add(amount).unwrap_or(Amount::MAX);
        }
    }

    /// Takes free money out of an account's pool, for money that leaves the account.
    ///
    /// # Errors
    /// What is free, when that is less.
    pub fn withdraw(&self, account: AccountId, amount: Amount) -> Result<(), Amount> {
        let taken = self.inner.with_pool(account, |pool| {
            let rest = pool.available.checked_sub(amount).filter(|rest| *rest >= Amount::ZERO);
            pool.available = rest.ok_or(pool.available)?;
            Ok(())
        });
        taken.unwrap_or(Err(Amount::ZERO))
    }

    /// What was spent in the windows of budgets before this process began.
    pub fn restore_budgets(
        &self,
        account: AccountId,
        key: KeyDigest,
        scopes: &Scopes,
        spent: &dyn Fn(Option<KeyDigest>, Option<&str>, i64) -> Amount,
    ) {
        let now = self.inner.now();
        self.inner.with_pool(account, |pool| {
            pool.account.restore(now, &scopes.account, |since| spent(None, None, since));
            let state = pool.keys.entry(key).or_default();
            state.counters.restore(now, &scopes.key, |since| spent(Some(key), None, since));
            for (model, limits) in &scopes.models {
                let counters = pool.models.entry(model.clone()).or_default();
                counters.restore(now, limits, |since| spent(None, Some(model), since));
            }
        });
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
            model: admit.model,
            key: admit.key.0,
            price_version: admit.price_version,
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
            tracing::error!(%error, hold = %ticket.id(), "a charge waits for the disk");
        }
        settlement
    }

    fn available(&self, account: AccountId) -> Amount {
        self.inner.with_pool(account, |pool| pool.available).unwrap_or_default()
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
        let second = clock::now().saturating_duration_since(self.began).as_secs();
        Now { second, unix_ms: clock::unix_ms() }
    }

    fn with_pool<T>(&self, account: AccountId, change: impl FnOnce(&mut Pool) -> T) -> Option<T> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        let pool = pools.get(&account).cloned()?;
        drop(pools);
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        Some(change(&mut pool))
    }

    fn take_place(&self) -> bool {
        let more = |open| (open < self.open_max).then_some(open + 1);
        self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Limits and money in one step: all of it, or nothing.
    fn reserve(&self, admit: &Admit) -> Result<(Option<Standing>, Option<Standing>), Deny> {
        let now = self.now();
        self.with_pool(admit.account, |pool| pool.reserve(now, admit))
            .unwrap_or(Err(Deny::Funds { available: Amount::ZERO }))
    }

    /// The one exit of a hold: moves its money and says what was charged.
    fn close(&self, hold: &OpenHold, charge: &Charge) -> Settled {
        let now = self.now();
        let (settlement, abandoned) = self
            .with_pool(hold.account(), |pool| pool.close(now, hold, charge))
            .unwrap_or_else(|| (settle(hold.amount(), charge.cost, Amount::ZERO), Amount::ZERO));
        self.open.fetch_sub(1, Ordering::AcqRel);
        Settled {
            id: hold.hold.id,
            account: hold.hold.account,
            request: hold.hold.request.clone(),
            model: hold.hold.model.clone(),
            endpoint: charge.endpoint.clone(),
            attempts: charge.attempts,
            parts: Settled::parts_of(&settlement),
            provider_cost: charge.provider_cost.nano(),
            abandoned: abandoned.nano(),
            key: hold.hold.key,
            held_ms: hold.hold.at_ms,
            price_version: hold.hold.price_version,
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
            let settled = self.close(&hold, &Charge { cost, used, ..Charge::default() });
            self.journal.settle_unattended(settled);
        }
    }
}

impl Pool {
    fn reserve(&mut self, now: Now, admit: &Admit) -> Result<(Option<Standing>, Option<Standing>), Deny> {
        let want = Want { tokens: admit.tokens, amount: admit.amount };
        let limited = |scope| move |over| Deny::Limited { scope, over };
        let Scopes { key, account, models } = admit.scopes.as_ref();
        let key_state = self.keys.entry(admit.key).or_default();
        key_state.counters.check(now, key, &want).map_err(limited("key"))?;
        self.account.check(now, account, &want).map_err(limited("account"))?;
        let model = models.get(&admit.model);
        if let Some(limits) = model {
            let counters = self.models.entry(admit.model.clone()).or_default();
            counters.check(now, limits, &want).map_err(limited("account and model"))?;
        }

        let refuse = Deny::Funds { available: self.available };
        let (rest, held) = self
            .available
            .checked_sub(admit.amount)
            .filter(|rest| *rest >= Amount::ZERO)
            .zip(self.held.checked_add(admit.amount))
            .ok_or(refuse)?;
        (self.available, self.held) = (rest, held);

        // Everything fits: take it.
        let taken = Taken {
            key: key_state.counters.take(now, key, &want),
            account: self.account.take(now, account, &want),
            model: model
                .map(|limits| self.models.entry(admit.model.clone()).or_default().take(now, limits, &want)),
        };
        self.permits.insert(admit.hold.0, taken);
        let key_standing = key_state.counters.standing(now, key);
        Ok(tighter(key_standing, self.account.standing(now, account)))
    }

    fn close(&mut self, now: Now, hold: &OpenHold, charge: &Charge) -> (Settlement, Amount) {
        let held = hold.amount();
        let key = KeyDigest(hold.hold.key);
        let state = self.keys.entry(key).or_default();
        let mut cost = charge.cost;
        let mut abandoned = Amount::ZERO;
        if let Some(left) = charge.abandoned {
            if state.hour.forgive(now.second, left.provider_cost, left.allowance) {
                abandoned = left.provider_cost;
            } else {
                cost = left.cost;
            }
        }
        let settlement = settle(held, cost, self.available);
        self.held = self.held.less(held);
        let back = self.available.less(settlement.excess).checked_add(settlement.released);
        self.available = back.unwrap_or(Amount::MAX);
        let charged = settlement.charged();
        state.hour.spend(now.second, charged);
        if let Some(taken) = self.permits.remove(&hold.hold.id) {
            let usage = &charge.used.usage;
            let tokens = usage.prompt().saturating_add(usage.output);
            state.counters.end(&taken.key, tokens, charged);
            self.account.end(&taken.account, tokens, charged);
            if let (Some(permit), Some(counters)) = (taken.model, self.models.get_mut(&hold.hold.model)) {
                counters.end(&permit, tokens, charged);
            }
        }
        (settlement, abandoned)
    }
}

/// Of two standings the one with less left.
fn tighter(
    a: (Option<Standing>, Option<Standing>),
    b: (Option<Standing>, Option<Standing>),
) -> (Option<Standing>, Option<Standing>) {
    let pick = |a: Option<Standing>, b: Option<Standing>| a.into_iter().chain(b).min_by_key(|s| s.remaining);
    (pick(a.0, b.0), pick(a.1, b.1))
}

impl Abandon for Inner {
    fn abandon(&self, hold: &Arc<OpenHold>) {
        // Its place is free: every open hold has one.
        let _full = self.abandoned.push(Arc::clone(hold));
    }
}
