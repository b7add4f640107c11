//! Holds in pools that all nodes share, with this node's journal as their memory.
//!
//! A call costs one round trip to Redis before it is forwarded; what follows its end is not waited for, because the
//! journal has it by then. When Redis is away or slow, calls go on with money that this node alone has leased
//! ([`Embedded`]), under limits of this node alone. Who finds none of it there waits a moment, since a Redis that
//! restarts or fails over is soon back, and is then told to come back; never that there is no money: nobody knows that
//! then.
//!
//! An admission whose answer is lost may have happened. Its id is given up, for good, and voided as soon as Redis
//! answers; the call goes on under a new one.
//!
//! What this node may still spend of a pool whose Redis is gone is known here ([`Fleet::claims`]): every hold that is
//! in it or may come into it, and every charge on it that is not booked yet. First nothing begins in an epoch any
//! more, then its claims are told: see docs/model-check.md.

mod ends;
mod wait;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use crossbeam_queue::SegQueue;
use filters::ids::{AccountId, HoldId, KeyDigest};
use filters::limit::abandoned::Hour;
use filters::money::{Amount, Settlement, settle};
use tokio::sync::mpsc;

use super::embedded::Embedded;
use super::port::{Abandon, Admit, Charge, Deny, Holds, Ticket};
use super::redis::{Admission, Ended, Redis, RedisDeny, SHARDS, Touch, UnknownBudget, shard_of};
use crate::journal::{Hold, Journal, OpenHold, Pool, Settled};
use crate::ops::metrics::FleetMetrics;
use crate::{clock, entropy};

pub use ends::Ends;

use ends::End;
use wait::{Outage, Wait};

/// The most times that one admission is sent: it may meet a new epoch, a budget that is not known, and pools that others
/// have emptied again before its turn.
const TRIES_MAX: usize = 16;
/// The most times that one admission asks for money of this node's own: other calls may take it each time.
const TRIES_HERE_MAX: usize = 4;
/// Charges that may wait for the ledger before admission stops: about half a gigabyte of memory.
const UNBOOKED_MAX: u64 = 1_000_000;
/// Admissions without an answer that wait to be voided: a breaker opens after the first of them.
const VOIDS_MAX: usize = 4096;
/// Ends that wait to be acknowledged, at most: those beyond stay in the outbox until somebody reads them there.
const ACKNOWLEDGE_MAX: usize = 1 << 18;
const SECONDS_PER_HOUR: u64 = 3600;

/// Who gets money for pools, and knows their epochs.
#[async_trait]
pub trait Bank: Send + Sync {
    /// The pool of an account is short of `need`. Answers what came of it.
    async fn refill(&self, account: AccountId, need: Amount) -> Refill;

    /// Redis does not help, and this node's own money of an account is short of `need`. Answers what came of it.
    async fn refill_here(&self, account: AccountId, need: Amount) -> Refill;

    /// A hold was placed, and so much is left in its pool. Must not wait.
    fn spent(&self, account: AccountId, amount: Amount, available: Amount);

    /// Money of this node's own was spent, or wanted and not there. Must not wait.
    fn spent_here(&self, account: AccountId, amount: Amount);

    /// Another process answers for the shard. Resolves when its epoch is known, or cannot be. Whether it is.
    async fn renew(&self, shard: u16) -> bool;

    /// Tells Redis what was spent in windows of budgets that it does not know. Whether it could.
    async fn restore(&self, account: AccountId, unknown: &[UnknownBudget]) -> bool;
}

/// What came of a refill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refill {
    /// There is more in the pool now.
    More,
    /// The account has no more than this, in all places together.
    Nothing {
        /// What its caller may be told.
        available: Amount,
    },
    /// Nobody can tell.
    Unknown,
}

/// The store of one node.
pub struct Fleet {
    inner: Arc<Inner>,
}

/// What a node's store works with.
pub struct Parts {
    pub redis: Redis,
    /// What this node alone has leased.
    pub local: Arc<Embedded>,
    pub journal: Journal,
    pub bank: Arc<dyn Bank>,
    pub metrics: Arc<FleetMetrics>,
    pub boot: i64,
    /// A hold that nobody has touched for so long counts in no limit any more, and is looked at by whoever is left.
    pub slot_lease: Duration,
}

struct Inner {
    redis: Redis,
    local: Arc<Embedded>,
    journal: Journal,
    bank: Arc<dyn Bank>,
    metrics: Arc<FleetMetrics>,
    boot: i64,
    state: Mutex<State>,
    /// Holds in pools.
    open: AtomicUsize,
    open_max: usize,
    /// Holds whose request was dropped. Each open hold can stand in it once, so there are at most `open_max`.
    abandoned: SegQueue<Arc<OpenHold>>,
    ending: mpsc::Sender<End>,
    /// Ends that Redis does not have yet.
    unended: AtomicUsize,
    /// The ledger has given this boot up: its money is somebody else's.
    given_up: AtomicBool,
    outage: Outage,
    /// The ledger knows this boot.
    registered: AtomicBool,
    slot_lease: Duration,
}

#[derive(Default)]
struct State {
    /// By shard; 0: not known.
    epochs: Vec<i64>,
    /// Holds that may be in a pool: asked for, or placed.
    holds: HashMap<u128, InPool>,
    /// Charges that are not known to be booked.
    unbooked: HashMap<u128, Unbooked>,
    /// Ends that the ledger has, and Redis has not been told so.
    booked: HashMap<Pool, Vec<u128>>,
    /// How many these are.
    to_acknowledge: usize,
    /// How calls that were left early stand in this hour, by key.
    hours: HashMap<KeyDigest, Hour>,
    /// Which hour that is, since 1970.
    hour: u64,
}

struct Unbooked {
    pool: Pool,
    account: AccountId,
    charged: Amount,
}

struct InPool {
    pool: Pool,
    account: AccountId,
    amount: Amount,
    /// Once it is placed.
    placed: Option<Arc<OpenHold>>,
}

/// What is left of pools whose Redis is gone.
pub type Claims = Vec<(AccountId, Amount)>;

/// How an attempt in a pool ended.
enum Tried {
    Placed(Ticket),
    Denied(Deny),
    /// Redis does not help: with money of this node.
    Elsewhere,
}

impl Fleet {
    /// A store in pools, with this node's own money beside them. At most `open_max` holds are open. Its ends go out as long as
    /// [`Ends::run`] does.
    #[must_use]
    pub fn new(parts: Parts, open_max: usize) -> (Self, Ends) {
        let Parts { redis, local, journal, bank, metrics, boot, slot_lease } = parts;
        let (ending, ends) = mpsc::channel(open_max.saturating_add(VOIDS_MAX));
        let state = State { epochs: vec![0; usize::from(SHARDS)], ..State::default() };
        let inner = Arc::new(Inner {
            redis,
            local,
            journal,
            bank,
            metrics,
            boot,
            state: Mutex::new(state),
            open: AtomicUsize::new(0),
            open_max,
            abandoned: SegQueue::new(),
            ending,
            unended: AtomicUsize::new(0),
            given_up: AtomicBool::new(false),
            outage: Outage::default(),
            registered: AtomicBool::new(false),
            slot_lease,
        });
        (Self { inner: Arc::clone(&inner) }, Ends { inner, ends })
    }

    /// From now on nothing begins in an earlier epoch of this shard.
    pub fn set_epoch(&self, shard: u16, epoch: i64) {
        let mut state = self.inner.lock();
        if let Some(known) = state.epochs.get_mut(usize::from(shard)) {
            *known = (*known).max(epoch);
        }
    }

    /// The shard's epoch as this node knows it; 0: not at all.
    #[must_use]
    pub fn epoch(&self, shard: u16) -> i64 {
        self.inner.lock().epoch(shard)
    }

    /// What this node may still spend of each of these pools: holds that it forwards or may yet forward, and charges
    /// that are not known to be booked. Nothing begins in them any more, or they are not in the answer.
    #[must_use]
    pub fn claims(&self, pools: &[Pool]) -> Vec<(Pool, Claims)> {
        let state = self.inner.lock();
        let over = pools.iter().filter(|pool| pool.epoch < state.epoch(pool.shard));
        let mut sums: HashMap<Pool, HashMap<AccountId, Amount>> =
            over.map(|pool| (*pool, HashMap::new())).collect();
        let held = state.holds.values().map(|hold| (hold.pool, hold.account, hold.amount));
        let charged = state.unbooked.values().map(|end| (end.pool, end.account, end.charged));
        for (pool, account, amount) in held.chain(charged) {
            if let Some(accounts) = sums.get_mut(&pool) {
                let sum = accounts.entry(account).or_default();
                *sum = sum.checked_add(amount).unwrap_or(Amount::MAX);
            }
        }
        sums.into_iter().map(|(pool, accounts)| (pool, accounts.into_iter().collect())).collect()
    }

    /// Charges on pools that are not known to be booked.
    #[must_use]
    pub fn unbooked(&self) -> Amount {
        let state = self.inner.lock();
        state
            .unbooked
            .values()
            .fold(Amount::ZERO, |sum, one| sum.checked_add(one.charged).unwrap_or(Amount::MAX))
    }

    /// The ledger has these.
    pub fn booked(&self, batch: &[Settled]) {
        let mut state = self.inner.lock();
        for settled in batch {
            if let Some(unbooked) = state.unbooked.remove(&settled.id)
                && state.to_acknowledge < ACKNOWLEDGE_MAX
            {
                state.to_acknowledge += 1;
                state.booked.entry(unbooked.pool).or_default().push(settled.id);
            }
        }
    }

    /// Says to Redis which ends the ledger has: nobody else has to look at them. Never more than one command for 128.
    pub async fn acknowledge_all(&self) {
        let booked = {
            let mut state = self.inner.lock();
            state.to_acknowledge = 0;
            std::mem::take(&mut state.booked)
        };
        for (pool, holds) in booked {
            if let Err(error) = self.inner.redis.booked(pool, &holds).await {
                tracing::debug!(%error, shard = pool.shard, "ends that are booked stay in the outbox for a while");
            }
        }
    }

    /// Of these holds those that this node neither serves nor has an end of that waits to be booked.
    #[must_use]
    pub fn not_ours(&self, holds: Vec<HoldId>) -> Vec<HoldId> {
        let state = self.inner.lock();
        let is_ours =
            |hold: &HoldId| state.holds.contains_key(&hold.0) || state.unbooked.contains_key(&hold.0);
        holds.into_iter().filter(|hold| !is_ours(hold)).collect()
    }

    /// The boot is over, or an operator said that it is lost: nothing is admitted any more.
    pub fn give_up(&self) {
        self.inner.given_up.store(true, Ordering::Release);
    }

    /// Whether the ledger knows this boot: before that nothing is leased to it, and no epoch is told.
    pub fn set_registered(&self, registered: bool) {
        self.inner.registered.store(registered, Ordering::Release);
    }

    /// Whether the ledger knows this boot.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.inner.registered.load(Ordering::Acquire)
    }

    /// Says to Redis which calls still run, and what they have cost. Never more than one command for 128 of them.
    pub async fn touch_all(&self) {
        let mut pools: HashMap<Pool, Vec<Touch>> = HashMap::new();
        for hold in self.inner.lock().holds.values() {
            if let Some(placed) = &hold.placed {
                let touch = Touch { hold: placed.id(), cost: placed.cost_so_far() };
                pools.entry(hold.pool).or_default().push(touch);
            }
        }
        for (pool, touches) in pools {
            match self.inner.redis.touch(pool, &touches, self.inner.slot_lease).await {
                Ok(closed) => {
                    for hold in closed {
                        // Its end may be on its way. One that was ended by others is charged late, at its own end.
                        tracing::debug!(%hold, "a hold that still runs here has ended in redis");
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, shard = pool.shard, "redis cannot be told which calls run");
                }
            }
        }
    }

    /// Settles the holds of requests that were dropped, in pools and here.
    pub fn sweep(&self) {
        self.inner.local.sweep();
        self.inner.sweep();
    }

    /// Whether Redis has every end.
    #[must_use]
    pub fn has_told_all(&self) -> bool {
        self.inner.unended.load(Ordering::Acquire) == 0
    }
}

#[async_trait]
impl Holds for Fleet {
    async fn admit(&self, admit: Admit) -> Result<Ticket, Deny> {
        let inner = &self.inner;
        inner.sweep();
        if !inner.journal.is_writable() || inner.given_up.load(Ordering::Acquire) {
            return Err(Deny::Unavailable);
        }
        if inner.journal.unposted() > UNBOOKED_MAX {
            return Err(Deny::Overloaded);
        }
        let mut wait = Wait::new(&inner.outage);
        loop {
            match inner.admit_somewhere(&admit).await {
                // Nobody can tell, and nothing is here: a Redis that restarts is back in a moment.
                Err(Deny::Unavailable) if inner.journal.is_writable() && wait.again().await => {}
                admitted => return admitted,
            }
        }
    }

    fn touch(&self, ticket: &Ticket, cost: Amount) {
        self.inner.journal.progress(&ticket.hold, cost);
    }

    async fn settle(&self, mut ticket: Ticket, charge: Charge) -> Settlement {
        let inner = &self.inner;
        if ticket.hold.hold.pool.is_none() {
            return inner.local.settle(ticket, charge).await;
        }
        let hold = Arc::clone(&ticket.hold);
        let mut settled = inner.price(&hold, &charge);
        let Settlement { captured, shortfall, .. } = settled.settlement();
        let mut is_told = false;
        if shortfall.is_positive() {
            // Whoever drops this while Redis is asked leaves the ticket, which ends the hold at all that is known.
            let cost = captured.checked_add(shortfall).unwrap_or(Amount::MAX);
            inner.journal.progress(&hold, cost);
            is_told = inner.take_excess(&mut settled).await;
        }
        ticket.on_drop = None;
        let settled = inner.close(&hold, settled);
        let settlement = settled.settlement();
        if let Err(error) = inner.journal.settle(settled.as_ref().clone()).await {
            tracing::error!(breach = "charge_waits", %error, hold = %hold.id(), "a charge waits for the disk");
        }
        // Not told when this is dropped before it: then the reaper finds the hold, and the ledger its end.
        if !is_told {
            inner.end(End::Settled(settled, inner.pool_of(&hold)));
        }
        settlement
    }

    fn available(&self, account: AccountId) -> Amount {
        self.inner.local.available(account)
    }

    fn open_holds(&self) -> usize {
        self.inner.open.load(Ordering::Acquire) + self.inner.local.open_holds()
    }

    fn trouble(&self) -> Option<&'static str> {
        let inner = &self.inner;
        if !inner.journal.is_writable() {
            return Some("the journal cannot be written");
        }
        if inner.given_up.load(Ordering::Acquire) {
            return Some("the ledger has given this node's boot up: it has to be started anew");
        }
        if !inner.registered.load(Ordering::Acquire) {
            return Some("the ledger has not answered since the start: only what is free is served");
        }
        (inner.journal.unposted() > UNBOOKED_MAX).then_some("the ledger lags too far behind")
    }
}

impl State {
    fn epoch(&self, shard: u16) -> i64 {
        self.epochs.get(usize::from(shard)).copied().unwrap_or_default()
    }

    /// What was in another hour counts no more, so that keys that do not come again take no memory.
    fn begin_hour(&mut self, hour: u64) {
        if self.hour != hour {
            self.hour = hour;
            self.hours.clear();
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_place(&self) -> bool {
        let more = |open| (open < self.open_max).then_some(open + 1);
        self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    fn leave_place(&self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// In a pool, or with money of this node's own.
    async fn admit_somewhere(self: &Arc<Self>, admit: &Admit) -> Result<Ticket, Deny> {
        if !self.take_place() {
            return Err(Deny::Overloaded);
        }
        match Box::pin(self.admit_in_pool(admit)).await {
            Tried::Placed(ticket) => {
                self.outage.is_over();
                return Ok(ticket);
            }
            Tried::Denied(deny) => {
                self.leave_place();
                return Err(deny);
            }
            Tried::Elsewhere => self.leave_place(),
        }
        Box::pin(self.admit_here(admit)).await
    }

    /// With money of this node's own, and with what the ledger has where that is too little.
    async fn admit_here(&self, admit: &Admit) -> Result<Ticket, Deny> {
        let (account, amount) = (admit.account, admit.amount);
        for _ in 0..TRIES_HERE_MAX {
            // The id may be in Redis by now.
            let placed = self.local.admit(Admit { hold: entropy::hold_id(), ..admit.clone() }).await;
            match placed {
                Ok(_) => self.bank.spent_here(account, amount),
                Err(Deny::Funds { .. }) => match self.bank.refill_here(account, amount).await {
                    Refill::More => continue,
                    // Others may have it.
                    Refill::Nothing { .. } | Refill::Unknown => return Err(Deny::Unavailable),
                },
                Err(_) => {}
            }
            return placed;
        }
        Err(Deny::Unavailable)
    }

    async fn admit_in_pool(self: &Arc<Self>, admit: &Admit) -> Tried {
        let shard = shard_of(admit.account);
        for _ in 0..TRIES_MAX {
            // Each is a hold of its own. Redis may have placed the one before without being heard, and is told so by a void
            // that may arrive only after this: an id never comes twice.
            let id = entropy::hold_id();
            let Some(pool) = self.begin(id, admit, shard) else {
                if !self.redis.is_shard_open(shard) && self.bank.renew(shard).await {
                    continue;
                }
                return Tried::Elsewhere;
            };
            let asked = Asked { inner: self, id, account: admit.account, pool, answered: false };
            let hold = hold_of(id, admit, pool);
            let admission = Admission {
                hold: &hold,
                pool,
                boot: self.boot,
                models: &admit.models,
                scopes: &admit.scopes,
                tokens: admit.tokens,
                lifetime: self.slot_lease,
            };
            let asked_at = clock::now();
            let answer = self.redis.admit(&admission).await;
            self.took("admit", asked_at);
            match answer {
                Ok(admitted) => {
                    self.bank.spent(admit.account, admit.amount, admitted.available);
                    return self.write_down(asked, hold, admitted.standings).await;
                }
                // Dropped, so it is voided.
                Err(RedisDeny::TimedOut) => return Tried::Elsewhere,
                Err(deny) => {
                    asked.denied();
                    if let Some(tried) = self.give_in(admit, shard, deny).await {
                        return tried;
                    }
                }
            }
        }
        // The money was taken by others each time before this call came back for it.
        Tried::Denied(Deny::Overloaded)
    }

    /// What a denial means for the call; `None`: it is to ask again.
    async fn give_in(&self, admit: &Admit, shard: u16, deny: RedisDeny) -> Option<Tried> {
        let again = match deny {
            RedisDeny::Funds { available } => match self.bank.refill(admit.account, admit.amount).await {
                Refill::More => true,
                Refill::Nothing { available: everywhere } => {
                    let available = available.max(everywhere);
                    return Some(Tried::Denied(Deny::Funds { available }));
                }
                Refill::Unknown => false,
            },
            RedisDeny::Stale(_) => {
                self.metrics.redis_stale.inc();
                self.bank.renew(shard).await
            }
            RedisDeny::BudgetUnknown(unknown) => {
                if !self.bank.restore(admit.account, &unknown).await {
                    return Some(Tried::Denied(Deny::Unavailable));
                }
                true
            }
            RedisDeny::Limited { scope, over } => {
                return Some(Tried::Denied(Deny::Limited { scope, over }));
            }
            RedisDeny::Revoked => return Some(Tried::Denied(Deny::Revoked)),
            RedisDeny::Closed => true,
            RedisDeny::TimedOut => false,
            RedisDeny::Unavailable(error) => {
                tracing::debug!(%error, "a hold could not be placed in redis");
                false
            }
        };
        (!again).then_some(Tried::Elsewhere)
    }

    /// Notes that a hold may be in a pool soon; `None`: nobody knows the pool.
    fn begin(&self, id: HoldId, admit: &Admit, shard: u16) -> Option<Pool> {
        let mut state = self.lock();
        let epoch = state.epoch(shard);
        if epoch == 0 {
            return None;
        }
        let pool = Pool { shard, epoch };
        let hold = InPool { pool, account: admit.account, amount: admit.amount, placed: None };
        state.holds.insert(id.0, hold);
        Some(pool)
    }

    /// The hold is placed: now the journal. Whoever drops this on the way gives the hold back.
    async fn write_down(
        self: &Arc<Self>,
        mut asked: Asked<'_>,
        hold: Hold,
        standing: filters::purse::Standings,
    ) -> Tried {
        let hold = Arc::new(OpenHold::new(hold));
        asked.answered = true;
        if let Some(known) = self.lock().holds.get_mut(&hold.hold.id) {
            known.placed = Some(Arc::clone(&hold));
        }
        let abandon: Arc<dyn Abandon> = Arc::<Self>::clone(self);
        let mut ticket = Ticket { standing, hold: Arc::clone(&hold), on_drop: Some(abandon) };
        if self.journal.hold(Arc::clone(&hold)).await.is_err() {
            ticket.on_drop = None;
            self.lock().holds.remove(&hold.hold.id);
            self.end(End::Void(hold.account(), hold.id(), asked.pool));
            return Tried::Denied(Deny::Unavailable);
        }
        Tried::Placed(ticket)
    }

    /// What the call is charged, as far as its hold reaches.
    fn price(&self, hold: &OpenHold, charge: &Charge) -> Settled {
        let (mut cost, mut abandoned) = (charge.cost, Amount::ZERO);
        let second = u64::try_from(clock::unix_ms() / 1000).unwrap_or_default();
        let mut state = self.lock();
        state.begin_hour(second / SECONDS_PER_HOUR);
        if let Some(left) = charge.left {
            let hour = state.hours.entry(KeyDigest(hold.hold.key)).or_default();
            if hour.forgive(second, left.provider_cost, left.allowance) {
                abandoned = left.provider_cost;
            } else {
                cost = left.cost;
            }
        }
        if cost.is_positive() {
            state.hours.entry(KeyDigest(hold.hold.key)).or_default().spend(second, cost);
        }
        drop(state);
        charge.record(&hold.hold, &settle(hold.amount(), cost, Amount::ZERO), abandoned)
    }

    /// The call cost more than its hold: whatever the pool has of it is taken, before anybody writes that down. When
    /// Redis does not answer, it is a shortfall. Whether Redis knows the end now.
    async fn take_excess(&self, settled: &mut Settled) -> bool {
        let Some(pool) = settled.pool else { return false };
        let told = self.redis.settle(pool, settled).await;
        let is_told = told.is_ok();
        match told {
            Ok(Ended::Now(parts) | Ended::Before(parts)) if parts.held == settled.settlement().held => {
                settled.parts = Settled::parts_of(&parts);
            }
            Ok(Ended::Now(_) | Ended::Before(_) | Ended::Reaped | Ended::Unknown) => {}
            Err(error) => {
                tracing::warn!(%error, "what a call cost above its hold is not taken: redis is away");
            }
        }
        is_told
    }

    /// From the open holds to the charges that are not booked, with nothing in between.
    fn close(&self, hold: &OpenHold, settled: Settled) -> Arc<Settled> {
        let mut state = self.lock();
        state.holds.remove(&hold.hold.id);
        let charged = settled.settlement().charged();
        if let Some(pool) = settled.pool {
            state.unbooked.insert(settled.id, Unbooked { pool, account: settled.account(), charged });
        }
        drop(state);
        self.leave_place();
        Arc::new(settled)
    }

    fn took(&self, verb: &str, since: Instant) {
        let took = clock::now().saturating_duration_since(since);
        self.metrics.redis_seconds.with_label_values(&[verb]).observe(took.as_secs_f64());
    }

    fn pool_of(&self, hold: &OpenHold) -> Pool {
        hold.hold.pool.unwrap_or_else(|| Pool { shard: shard_of(hold.account()), epoch: 0 })
    }

    /// Tells Redis of an end; it counts as not told until it has it.
    fn end(self: &Arc<Self>, end: End) {
        self.unended.fetch_add(1, Ordering::AcqRel);
        ends::tell_from_here(self, end);
    }

    fn queue(&self, end: End) {
        if let Err(error) = self.ending.try_send(end) {
            // The journal and the ledger know. Its money is set aside in Redis until this boot is over.
            self.unended.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%error, "redis is not told of the end of a hold");
        }
    }

    fn sweep(self: &Arc<Self>) {
        while let Some(hold) = self.abandoned.pop() {
            let used = filters::meter::Used { estimated: true, ..Default::default() };
            let settled = self.price(&hold, &Charge { cost: hold.cost_so_far(), used, ..Charge::default() });
            let settled = self.close(&hold, settled);
            self.journal.settle_unattended(settled.as_ref().clone());
            self.end(End::Settled(settled, self.pool_of(&hold)));
        }
    }
}

impl Abandon for Inner {
    fn abandon(&self, hold: &Arc<OpenHold>) {
        self.abandoned.push(Arc::clone(hold));
    }
}

/// An admission that was sent. Whoever drops it before it is answered will never use an answer: it is voided.
struct Asked<'a> {
    inner: &'a Arc<Inner>,
    id: HoldId,
    account: AccountId,
    pool: Pool,
    answered: bool,
}

impl Asked<'_> {
    /// It was not placed.
    fn denied(mut self) {
        self.answered = true;
        self.inner.lock().holds.remove(&self.id.0);
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.inner.lock().holds.remove(&self.id.0);
            self.inner.end(End::Void(self.account, self.id, self.pool));
        }
    }
}

fn hold_of(id: HoldId, admit: &Admit, pool: Pool) -> Hold {
    Hold {
        id: id.0,
        account: admit.account.0,
        amount: admit.amount.nano(),
        at_ms: clock::unix_ms(),
        request: admit.request.clone(),
        model: admit.models.first().cloned().unwrap_or_default(),
        key: admit.key.0,
        price_version: admit.price_version,
        pool: Some(pool),
    }
}
