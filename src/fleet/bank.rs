//! Money on its way between the ledger and where it is spent.
//!
//! Pools are filled ahead of need (see `demand`). A smaller tranche is leased to this node alone for accounts that call
//! here, for when Redis is away. It goes back when they have stopped, and at once when another node is short of it:
//! out of memory first, then back to the ledger, then free for all. Who asks for it waits until every node that has some
//! has answered. Only then is it true that an account has no more; otherwise nobody can tell, and its caller may come
//! back.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use filters::ids::AccountId;
use filters::money::Amount;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::demand::Demand;
use super::epochs::Epochs;
use super::{BEAT, CALLS_WAIT_MAX, Servers, every};
use crate::journal::Pool;
use crate::ledger::port::Scope as Spent;
use crate::ledger::postgres::{Leased, Postgres, Wanted};
use crate::ledger::{Ledger as _, LedgerError};
use crate::ops::heartbeat;
use crate::store::fleet::{self, Refill};
use crate::store::redis::{AMOUNT_MAX, News, PoolState, RedisError, Scope, UnknownBudget, shard_of};
use crate::store::{Embedded, Holds as _};
use crate::{clock, entropy};

/// Pools that may wait to be filled; one that finds no place is low again at its next hold.
const FILLS_MAX: usize = 4096;
/// How long other nodes may take to give back what was asked of them.
const GIVING: Duration = Duration::from_secs(1);
/// How often a pool that cannot be recalled is tried again, and the pause before it.
const RECALLS_MAX: usize = 10;
const RECALL_AGAIN: Duration = Duration::from_millis(200);
/// The longest that a call waits for its pool to be filled.
const REFILL_MAX: Duration = Duration::from_secs(3);
/// How often a pool that may be idle is looked at; one that stood still in between is idle.
const IDLE_LOOK: Duration = Duration::from_secs(300);
/// News that may wait.
const NEWS_MAX: usize = 1024;
/// A node's own tranche is no more than this part of what is free.
const LOCAL_PART: i64 = 16;

pub(super) struct Bank {
    servers: Servers,
    boot: i64,
    local: Arc<Embedded>,
    demand: Demand,
    epochs: OnceLock<Arc<Epochs>>,
    fills: mpsc::Sender<(AccountId, Amount)>,
    wants: mpsc::Sender<Want>,
    /// By account: one filling at a time, and how many there were.
    turns: Mutex<HashMap<AccountId, Arc<Turn>>>,
    /// Nodes that have given back what was asked under a number.
    given: broadcast::Sender<Given>,
    /// Held while this node's own money goes out or back: who asks for it must not meet money on its way.
    tranches: tokio::sync::Mutex<()>,
    own: Arc<Mutex<HashMap<AccountId, Own>>>,
    /// Pools for which something is leased that may not be in Redis yet, and how often that came to be.
    uninstalled: Mutex<HashMap<AccountId, u64>>,
}

/// This node's own tranche of an account, by sums that only grow: an answer of the ledger that is lost loses no money.
#[derive(Clone, Copy, Default)]
struct Own {
    /// All that ever came into memory, by the ledger's total.
    granted: Amount,
    /// All that was ever taken out of memory again, to go back.
    taken: Amount,
    /// What of it the ledger is known to have.
    returned: Amount,
}

/// A boot has answered the asking of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Given {
    number: u64,
    boot: i64,
}

/// A pool of an account that does not call here any more.
struct Idle {
    look: Instant,
    /// As it was at the last look.
    state: Option<PoolState>,
}

/// Who fills an account's pool.
#[derive(Default)]
struct Turn {
    lock: tokio::sync::Mutex<()>,
    /// How often it was filled.
    filled: AtomicU64,
    /// The same of this node's own tranche.
    here: tokio::sync::Mutex<()>,
    filled_here: AtomicU64,
}

/// A call's pool is empty.
struct Want {
    account: AccountId,
    need: Amount,
    answer: oneshot::Sender<Refill>,
}

/// Pools that are low, and those that are empty.
pub(super) struct Fills {
    low: mpsc::Receiver<(AccountId, Amount)>,
    empty: mpsc::Receiver<Want>,
}

impl Bank {
    pub(super) fn new(servers: Servers, boot: i64, local: Arc<Embedded>) -> (Self, Fills) {
        let (fills, low) = mpsc::channel(FILLS_MAX);
        let (wants, empty) = mpsc::channel(FILLS_MAX);
        let bank = Self {
            servers,
            boot,
            local,
            demand: Demand::default(),
            epochs: OnceLock::new(),
            fills,
            wants,
            turns: Mutex::default(),
            given: broadcast::Sender::new(NEWS_MAX),
            tranches: tokio::sync::Mutex::default(),
            own: Arc::default(),
            uninstalled: Mutex::default(),
        };
        (bank, Fills { low, empty })
    }

    pub(super) fn set_epochs(&self, epochs: Arc<Epochs>) {
        let _twice = self.epochs.set(epochs);
    }

    /// Fills pools.
    pub(super) async fn fill(self: Arc<Self>, fills: Fills) {
        let Fills { low, empty } = fills;
        tokio::join!(Arc::clone(&self).fill_low(low), self.fill_empty(empty));
    }

    async fn fill_low(self: Arc<Self>, mut low: mpsc::Receiver<(AccountId, Amount)>) {
        while let Some((account, target)) = low.recv().await {
            if let Err(error) =
                self.lease(account, Wanted { least: Amount::from_nano(1), most: target }).await
            {
                tracing::debug!(%error, %account, "a pool that is low cannot be filled");
            }
            self.demand.filled(account);
        }
    }

    /// On tasks of their own: a call that leaves, or waits no longer, takes none of it with it, and others have the
    /// benefit.
    async fn fill_empty(self: Arc<Self>, mut empty: mpsc::Receiver<Want>) {
        while let Some(Want { account, need, answer }) = empty.recv().await {
            let bank = Arc::clone(&self);
            self.servers.runtime.spawn(async move {
                let came = Box::pin(bank.refill_in_turn(account, need, &answer)).await;
                let _gone = answer.send(came);
            });
        }
    }

    /// Leases to the account's pool and installs all of it, also what somebody else has leased and could not install.
    /// What is there by now, and whether anything was added.
    async fn lease(&self, account: AccountId, want: Wanted) -> Result<(Leased, bool), LeaseError> {
        let pool = self.pool_of(account);
        let before = lock(&self.uninstalled).get(&account).copied();
        let leased = async {
            let leased = self.servers.ask(move |ledger| ledger.lease_pool(account, pool, want)).await?;
            let installed = self.servers.redis.install(account, pool, leased.total).await?;
            Ok((leased, leased.added.is_positive() || installed.added.is_positive()))
        };
        let leased: Result<(Leased, bool), LeaseError> = leased.await;
        let mut uninstalled = lock(&self.uninstalled);
        match &leased {
            // One that failed meanwhile may have leased more than this one knows.
            Ok(_) if uninstalled.get(&account).copied() == before => {
                uninstalled.remove(&account);
            }
            Ok(_) => {}
            // Whoever leases next installs it, and this node does so soon.
            Err(_) => *uninstalled.entry(account).or_default() += 1,
        }
        leased
    }

    /// Installs what may have been leased and not installed.
    async fn install_rest(&self) {
        let uninstalled: Vec<AccountId> = lock(&self.uninstalled).keys().copied().collect();
        for account in uninstalled {
            let nothing = Wanted { least: Amount::ZERO, most: Amount::ZERO };
            if let Err(LeaseError::Ledger(LedgerError::Stale | LedgerError::NoAccount(_))) =
                self.lease(account, nothing).await
            {
                // Its pool is of an epoch that is over: what nobody claims of it is free again.
                lock(&self.uninstalled).remove(&account);
            }
        }
    }

    fn pool_of(&self, account: AccountId) -> Pool {
        let shard = shard_of(account);
        Pool { shard, epoch: self.epochs.get().map_or(0, |epochs| epochs.of(shard)) }
    }

    fn turn(&self, account: AccountId) -> Arc<Turn> {
        let mut turns = lock(&self.turns);
        Arc::clone(turns.entry(account).or_default())
    }

    /// Asks all nodes to keep no money of an account on their own, waits for those that have some, and gives back what
    /// is here. Whether all that nobody has set aside is free by now.
    async fn ask_back(&self, account: AccountId) -> bool {
        self.give_back(account).await;
        let scattered = match self.servers.ask(move |ledger| ledger.scattered(account)).await {
            Ok(scattered) => scattered,
            Err(error) => {
                tracing::debug!(%error, %account, "nobody knows where an account's money is");
                return false;
            }
        };
        let mut asked: HashSet<i64> = scattered.boots.into_iter().filter(|boot| *boot != self.boot).collect();
        let mut given = self.given.subscribe();
        #[expect(clippy::cast_possible_truncation, reason = "the random half of an id")]
        let number = entropy::hold_id().0 as u64;
        if let Err(error) = self.say("recall", &format!("{account} {number}")).await {
            tracing::debug!(%error, "other nodes cannot be asked for an account's money");
            return false;
        }
        let all = async {
            while !asked.is_empty() {
                match given.recv().await {
                    Ok(given) if given.number == number => {
                        asked.remove(&given.boot);
                    }
                    Ok(_) => {}
                    // Some answers are lost: whether all have come is not known.
                    Err(_) => return false,
                }
            }
            true
        };
        tokio::time::timeout(GIVING, all).await.unwrap_or(false) && !scattered.frozen
    }

    async fn say(&self, channel: &str, text: &str) -> Result<(), RedisError> {
        self.servers.redis.publish(&self.servers.channel(channel), text.as_bytes()).await
    }

    /// Gives back what this node has of an account: out of memory first.
    async fn give_back(&self, account: AccountId) {
        self.demand.no_tranche(account);
        let _alone = self.tranches.lock().await;
        let free = self.local.available(account);
        if free.is_positive() && self.local.withdraw(account, free).is_ok() {
            let mut own = lock(&self.own);
            let own = own.entry(account).or_default();
            own.taken = own.taken.checked_add(free).unwrap_or(Amount::MAX);
        }
        self.tell_returned(account).await;
    }

    /// Tells the ledger what is out of memory and may not be back yet; it may be told twice.
    async fn tell_returned(&self, account: AccountId) {
        let taken = match lock(&self.own).get(&account) {
            Some(own) if own.returned < own.taken => own.taken,
            _ => return,
        };
        let boot = self.boot;
        match self.servers.ask(move |ledger| ledger.return_local(account, boot, taken)).await {
            Ok(_) | Err(LedgerError::Stale) => {
                if let Some(own) = lock(&self.own).get_mut(&account) {
                    own.returned = own.returned.max(taken);
                }
            }
            Err(error) => {
                tracing::debug!(%error, %account, "money of this node waits to be given back");
            }
        }
    }

    /// Brings an account's money back to the ledger, from every place where nobody has set it aside.
    pub(super) async fn recall(&self, account: AccountId) {
        self.ask_back(account).await;
        for _ in 0..RECALLS_MAX {
            match self.recall_pool(account).await {
                Ok(()) => return,
                // A breaker may be open for a moment; whoever asks for a refund can wait for that.
                Err(error) => {
                    tracing::warn!(%error, %account, "an account's pool cannot be recalled; the next recall tells what this one took");
                }
            }
            tokio::time::sleep(RECALL_AGAIN).await;
        }
    }

    async fn recall_pool(&self, account: AccountId) -> Result<(), LeaseError> {
        // Also what was leased and never came there.
        let nothing = Wanted { least: Amount::ZERO, most: Amount::ZERO };
        self.lease(account, nothing).await?;
        let pool = self.pool_of(account);
        let in_all = self.servers.redis.recall(account, pool, AMOUNT_MAX).await?.in_all;
        if in_all.is_positive() {
            self.servers.ask(move |ledger| ledger.return_pool(account, pool, in_all)).await?;
        }
        Ok(())
    }

    /// Keeps this node's own tranches: for accounts that call here, and no longer.
    pub(super) async fn keep_tranches(self: Arc<Self>) {
        let job = heartbeat::job("tranches", BEAT);
        let mut tick = every(BEAT);
        let mut idle: HashMap<AccountId, Idle> = HashMap::new();
        loop {
            tick.tick().await;
            job.begins();
            let (callers, stopped) = self.demand.round();
            for caller in &callers {
                idle.remove(&caller.account);
            }
            self.install_rest().await;
            for account in self.unreturned() {
                self.tell_returned(account).await;
            }
            for account in stopped {
                self.give_back(account).await;
                lock(&self.turns).remove(&account);
                idle.insert(account, Idle { look: clock::now() + IDLE_LOOK, state: None });
            }
            self.return_idle(&mut idle).await;
            for caller in callers {
                if self.local.is_handed_over() {
                    break;
                }
                let have = self.local.available(caller.account);
                if have.nano() < caller.local.nano() / 2 {
                    self.lease_local(caller.account, caller.local.less(have)).await;
                }
            }
            job.done();
        }
    }

    /// Brings back what is in pools that nobody has used between two looks: no other node either.
    async fn return_idle(&self, idle: &mut HashMap<AccountId, Idle>) {
        let now = clock::now();
        let due: Vec<AccountId> =
            idle.iter().filter(|(_, pool)| pool.look <= now).map(|(account, _)| *account).collect();
        for account in due {
            let before = idle.get(&account).and_then(|pool| pool.state);
            let again = |state| Idle { look: now + IDLE_LOOK, state };
            let state = match self.servers.redis.pool(account, self.pool_of(account)).await {
                Ok(state) if state.installed.is_positive() => state,
                // Another Redis answers, which has nothing of it.
                Ok(_) | Err(RedisError::Stale(_)) => {
                    idle.remove(&account);
                    continue;
                }
                Err(_) => {
                    idle.insert(account, again(before));
                    continue;
                }
            };
            if before != Some(state) || state.held.is_positive() {
                idle.insert(account, again(Some(state)));
                continue;
            }
            if let Err(error) = self.recall_pool(account).await {
                tracing::debug!(%error, %account, "an idle pool cannot be recalled");
            }
            idle.remove(&account);
        }
    }

    /// Accounts whose money is out of memory and not known to be back.
    fn unreturned(&self) -> Vec<AccountId> {
        let own = lock(&self.own);
        let waits = own.iter().filter(|(_, own)| own.returned < own.taken);
        waits.map(|(account, _)| *account).collect()
    }

    async fn lease_local(&self, account: AccountId, want: Amount) {
        let _alone = self.tranches.lock().await;
        // Somebody may have asked for it since.
        if self.demand.is_short(account) {
            return;
        }
        let boot = self.boot;
        let leased = self
            .servers
            .ask(move |ledger| {
                // What is too small to split stays whole: the pool needs it more.
                let free = ledger.free(account)?;
                let most = Amount::from_nano(want.nano().min(free.nano() / LOCAL_PART));
                if !most.is_positive() {
                    return Ok(None);
                }
                let wanted = Wanted { least: Amount::from_nano(1), most };
                ledger.lease_local(account, boot, wanted).map(Some)
            })
            .await;
        match leased {
            Ok(Some(leased)) => take_in(&self.own, &self.local, account, leased.total),
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, %account, "no money of its own for this node"),
        }
    }

    /// Leases what a call needs that Redis cannot serve now.
    async fn refill_here_now(&self, account: AccountId, need: Amount) -> Refill {
        if self.local.is_handed_over() {
            return Refill::Unknown;
        }
        let boot = self.boot;
        let wanted = Wanted { least: need, most: self.demand.wanted_here(account, need) };
        let (servers, own, local) = (self.servers.clone(), Arc::clone(&self.own), Arc::clone(&self.local));
        let lease = async move {
            let leased = servers.ask(move |ledger| ledger.lease_local(account, boot, wanted)).await?;
            take_in(&own, &local, account, leased.total);
            Ok::<Leased, LedgerError>(leased)
        };
        match self.servers.soon(Box::pin(lease)).await {
            Ok(leased) if leased.added.is_positive() || self.local.available(account) >= need => Refill::More,
            Ok(leased) => Refill::Nothing { available: leased.free_left },
            Err(error) => {
                tracing::debug!(%error, %account, "no money of its own for this node");
                Refill::Unknown
            }
        }
    }

    /// Hears other nodes: gives back what they are short of, and says so.
    pub(super) async fn hear(self: Arc<Self>) {
        let (news, mut heard) = mpsc::channel(NEWS_MAX);
        let channels = ["recall", "given", "richer"].map(|name| self.servers.channel(name));
        let [_, given, richer] = &channels;
        let redis = self.servers.redis.clone();
        let listen = redis.listen(&channels, news);
        let answer = async {
            while let Some(news) = heard.recv().await {
                let News::Message { channel, payload } = news else { continue };
                let Some((first, number)) = pair(&payload) else { continue };
                if channel == *given {
                    // Nobody may be asking.
                    let _nobody = self.given.send(Given { number, boot: first });
                    continue;
                }
                if channel == *richer {
                    self.demand.forget_poor(AccountId(first));
                    continue;
                }
                self.give_back(AccountId(first)).await;
                if let Err(error) = self.say("given", &format!("{} {number}", self.boot)).await {
                    tracing::debug!(%error, "a node that asked for money is not told that it is back");
                }
            }
        };
        tokio::join!(listen, answer);
    }

    /// Finds out a shard's epoch, as far as a call may wait for it; whoever finds out goes on.
    async fn renew_soon(&self, epochs: &Arc<Epochs>, shard: u16) -> bool {
        let epochs = Arc::clone(epochs);
        let found = self.servers.runtime.spawn(async move { epochs.renew(&[shard]).await });
        matches!(tokio::time::timeout(CALLS_WAIT_MAX, found).await, Ok(Ok(true)))
    }

    /// An account may have more than before: no node remembers that it had nothing.
    pub(super) async fn has_more(&self, account: AccountId) {
        self.demand.forget_poor(account);
        if let Err(error) = self.say("richer", &format!("{account} 0")).await {
            tracing::debug!(%error, %account, "other nodes find out within a second that an account has more");
        }
    }

    async fn refill_now(&self, account: AccountId, need: Amount) -> Refill {
        let want = Wanted { least: need, most: self.demand.wanted(account, need) };
        let mut all_is_free = false;
        for is_last in [false, true] {
            let (leased, more) = match self.lease(account, want).await {
                Ok(leased) => leased,
                Err(LeaseError::Ledger(LedgerError::Stale) | LeaseError::Redis(RedisError::Stale(_))) => {
                    let renewed = match self.epochs.get() {
                        Some(epochs) => epochs.renew(&[shard_of(account)]).await,
                        None => false,
                    };
                    return if renewed { Refill::More } else { Refill::Unknown };
                }
                Err(LeaseError::Ledger(LedgerError::NoAccount(_))) => {
                    return Refill::Nothing { available: Amount::ZERO };
                }
                Err(error) => {
                    tracing::debug!(%error, %account, "an empty pool cannot be filled");
                    return Refill::Unknown;
                }
            };
            if more || self.has(account, need).await {
                return Refill::More;
            }
            if is_last || !leased.elsewhere.is_positive() {
                return if all_is_free || !leased.elsewhere.is_positive() {
                    Refill::Nothing { available: leased.free_left }
                } else {
                    Refill::Unknown
                };
            }
            all_is_free = self.ask_back(account).await;
        }
        Refill::Unknown
    }

    /// Whether others have filled the pool meanwhile.
    async fn has(&self, account: AccountId, need: Amount) -> bool {
        let pool = self.servers.redis.pool(account, self.pool_of(account)).await;
        pool.is_ok_and(|pool| pool.available >= need)
    }

    /// What is known without asking; `None`: it is to be asked.
    fn known(&self, account: AccountId) -> Option<Refill> {
        if self.servers.reach.why_not().is_some() || self.demand.unsure(account) {
            return Some(Refill::Unknown);
        }
        self.demand.poor(account).map(|available| Refill::Nothing { available })
    }

    async fn refill_in_turn(
        &self,
        account: AccountId,
        need: Amount,
        answer: &oneshot::Sender<Refill>,
    ) -> Refill {
        let turn = self.turn(account);
        let before = turn.filled.load(Ordering::Acquire);
        let _mine = turn.lock.lock().await;
        // Somebody filled it, or found nothing, while this one waited for its turn.
        if turn.filled.load(Ordering::Acquire) != before {
            return Refill::More;
        }
        if let Some(known) = self.known(account) {
            return known;
        }
        if answer.is_closed() {
            return Refill::Unknown;
        }
        let came = Box::pin(self.refill_now(account, need)).await;
        match came {
            Refill::More => {
                turn.filled.fetch_add(1, Ordering::AcqRel);
            }
            Refill::Nothing { available } => self.demand.is_poor(account, available),
            Refill::Unknown => self.demand.is_unsure(account),
        }
        came
    }
}

#[async_trait]
impl fleet::Bank for Bank {
    async fn refill(&self, account: AccountId, need: Amount) -> Refill {
        let came = match self.known(account) {
            Some(known) => known,
            None => {
                let (answer, answered) = oneshot::channel();
                match self.wants.try_send(Want { account, need, answer }) {
                    Ok(()) => match tokio::time::timeout(REFILL_MAX, answered).await {
                        Ok(Ok(came)) => came,
                        Ok(Err(_)) | Err(_) => Refill::Unknown,
                    },
                    Err(_) => Refill::Unknown,
                }
            }
        };
        let word = match came {
            Refill::More => "more",
            Refill::Nothing { .. } => "nothing",
            Refill::Unknown => "unknown",
        };
        self.servers.metrics.refills.with_label_values(&[word]).inc();
        came
    }

    async fn refill_here(&self, account: AccountId, need: Amount) -> Refill {
        let turn = self.turn(account);
        let before = turn.filled_here.load(Ordering::Acquire);
        let _mine = turn.here.lock().await;
        // Somebody has while this one waited for its turn.
        if turn.filled_here.load(Ordering::Acquire) != before {
            return Refill::More;
        }
        let came = Box::pin(self.refill_here_now(account, need)).await;
        if came == Refill::More {
            turn.filled_here.fetch_add(1, Ordering::AcqRel);
        }
        came
    }

    fn spent(&self, account: AccountId, amount: Amount, available: Amount) {
        if let Some(target) = self.demand.spent(account, amount, available)
            && self.fills.try_send((account, target)).is_err()
        {
            self.demand.filled(account);
        }
    }

    fn spent_here(&self, account: AccountId, amount: Amount) {
        self.demand.spent_here(account, amount);
    }

    async fn renew(&self, shard: u16) -> bool {
        match self.epochs.get() {
            Some(epochs) => self.renew_soon(epochs, shard).await,
            None => false,
        }
    }

    async fn restore(&self, account: AccountId, unknown: &[UnknownBudget]) -> bool {
        for budget in unknown {
            let (scope, since) = (budget.scope.clone(), budget.begins_ms);
            let servers = self.servers.clone();
            let look = move |ledger: &Postgres| {
                let (key, model) = match &scope {
                    Scope::Key(key) => (Some(*key), None),
                    Scope::Account => (None, None),
                    Scope::Model(model) => (None, Some(model.as_str())),
                };
                ledger.clone().spent(&Spent { account, key, model }, since)
            };
            let spent = match self.servers.soon(async move { servers.ask(look).await }).await {
                Ok(spent) => spent,
                Err(error) => {
                    tracing::warn!(%error, %account, "what was spent of a budget cannot be looked up");
                    return false;
                }
            };
            if let Err(error) = self.servers.redis.restore_budget(account, budget, spent).await {
                tracing::debug!(%error, %account, "a budget cannot be restored");
                return false;
            }
        }
        true
    }
}

/// Takes in what the ledger has leased to this node by now, whoever asked for it.
fn take_in(own: &Mutex<HashMap<AccountId, Own>>, local: &Embedded, account: AccountId, total: Amount) {
    let new = {
        let mut own = lock(own);
        let own = own.entry(account).or_default();
        let new = total.less(own.granted).max(Amount::ZERO);
        own.granted = own.granted.max(total);
        new
    };
    if new.is_positive() {
        local.grant(vec![(account, new)]);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two numbers, as they travel.
fn pair(payload: &[u8]) -> Option<(i64, u64)> {
    let (first, second) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    Some((first.parse().ok()?, second.parse().ok()?))
}

/// Why a pool was not filled.
#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Redis(#[from] RedisError),
}
