//! Money on its way between the ledger and where it is spent.
//!
//! Pools are filled ahead of need (see `demand`). A smaller tranche is leased to this node alone for accounts that call
//! here, for when Redis is away. It goes back when they have stopped, and at once when another node is short of it:
//! out of memory first, then back to the ledger, then free for all.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use filters::ids::AccountId;
use filters::money::Amount;
use tokio::sync::mpsc;

use super::demand::Demand;
use super::epochs::Epochs;
use super::{BEAT, CALLS_WAIT_MAX, Servers, every};
use crate::journal::Pool;
use crate::ledger::port::Scope as Spent;
use crate::ledger::postgres::{Leased, Postgres, Wanted};
use crate::ledger::{Ledger as _, LedgerError};
use crate::store::fleet::{self, Refill};
use crate::store::redis::{AMOUNT_MAX, News, RedisError, Scope, UnknownBudget, shard_of};
use crate::store::{Embedded, Holds as _};

/// Pools that may wait to be filled; one that finds no place is low again at its next hold.
const FILLS_MAX: usize = 4096;
/// Between two looks whether other nodes have given back what was asked of them.
const GIVING: Duration = Duration::from_millis(50);
/// The most of these looks.
const GIVING_LOOKS: u32 = 8;
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
    /// By account: one filling at a time, and how many there were.
    turns: Mutex<HashMap<AccountId, Arc<Turn>>>,
    own: Arc<Mutex<HashMap<AccountId, Own>>>,
    /// Pools for which something is leased that may not be in Redis yet, and how often that came to be.
    uninstalled: Arc<Mutex<HashMap<AccountId, u64>>>,
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

/// Pools that are low.
pub(super) type Fills = mpsc::Receiver<(AccountId, Amount)>;

impl Bank {
    pub(super) fn new(servers: Servers, boot: i64, local: Arc<Embedded>) -> (Self, Fills) {
        let (fills, low) = mpsc::channel(FILLS_MAX);
        let bank = Self {
            servers,
            boot,
            local,
            demand: Demand::default(),
            epochs: OnceLock::new(),
            fills,
            turns: Mutex::default(),
            own: Arc::default(),
            uninstalled: Arc::default(),
        };
        (bank, low)
    }

    pub(super) fn set_epochs(&self, epochs: Arc<Epochs>) {
        let _twice = self.epochs.set(epochs);
    }

    /// Fills pools that are low.
    pub(super) async fn fill(self: Arc<Self>, mut low: Fills) {
        while let Some((account, target)) = low.recv().await {
            if let Err(error) =
                self.lease(account, Wanted { least: Amount::from_nano(1), most: target }).await
            {
                tracing::debug!(%error, %account, "a pool that is low cannot be filled");
            }
            self.demand.filled(account);
        }
    }

    /// Leases to the account's pool and installs it; what is there by now.
    async fn lease(&self, account: AccountId, want: Wanted) -> Result<Leased, LeaseError> {
        let shard = shard_of(account);
        let epoch = self.epochs.get().map_or(0, |epochs| epochs.of(shard));
        let pool = Pool { shard, epoch };
        let (servers, uninstalled) = (self.servers.clone(), Arc::clone(&self.uninstalled));
        let before = lock(&uninstalled).get(&account).copied();
        let lease = async move {
            let leased = async {
                let leased = servers.ask(move |ledger| ledger.lease_pool(account, pool, want)).await?;
                servers.redis.install(account, pool, leased.total).await?;
                Ok(leased)
            };
            let leased: Result<Leased, LeaseError> = leased.await;
            let mut uninstalled = lock(&uninstalled);
            match leased {
                // One that failed meanwhile may have leased more than this one knows.
                Ok(_) if uninstalled.get(&account).copied() == before => {
                    uninstalled.remove(&account);
                }
                Ok(_) => {}
                // Whoever leases next installs it, and this node does so soon.
                Err(_) => *uninstalled.entry(account).or_default() += 1,
            }
            leased
        };
        self.servers.soon(Box::pin(lease)).await
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

    fn turn(&self, account: AccountId) -> Arc<Turn> {
        let mut turns = lock(&self.turns);
        Arc::clone(turns.entry(account).or_default())
    }

    /// Asks all nodes to give an account's money back, and gives back what is here.
    async fn ask_back(&self, account: AccountId) {
        let channel = self.servers.channel("recall");
        if let Err(error) = self.servers.redis.publish(&channel, account.to_string().as_bytes()).await {
            tracing::debug!(%error, "other nodes cannot be asked for an account's money");
        }
        self.give_back(account).await;
    }

    /// Gives back what this node has of an account: out of memory first.
    async fn give_back(&self, account: AccountId) {
        self.demand.no_tranche(account);
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
        let shard = shard_of(account);
        let Some(epoch) = self.epochs.get().map(|epochs| epochs.of(shard)) else { return };
        let pool = Pool { shard, epoch };
        // What was leased and never installed, since a node died in between, is recalled with the rest.
        let nothing = Wanted { least: Amount::ZERO, most: Amount::ZERO };
        if let Err(error) = self.lease(account, nothing).await {
            tracing::debug!(%error, %account, "an account's pool cannot be installed");
        }
        match self.servers.redis.recall(account, pool, AMOUNT_MAX).await {
            Ok(recalled) => {
                let in_all = recalled.in_all;
                if in_all.is_positive()
                    && let Err(error) =
                        self.servers.ask(move |ledger| ledger.return_pool(account, pool, in_all)).await
                {
                    tracing::warn!(%error, %account, "money that was recalled waits for the next recall");
                }
            }
            Err(error) => tracing::debug!(%error, %account, "an account's pool cannot be recalled"),
        }
        tokio::time::sleep(GIVING * 2).await;
    }

    /// Keeps this node's own tranches: for accounts that call here, and no longer.
    pub(super) async fn keep_tranches(self: Arc<Self>) {
        let mut tick = every(BEAT);
        loop {
            tick.tick().await;
            let (callers, stopped) = self.demand.round();
            self.install_rest().await;
            for account in self.unreturned() {
                self.tell_returned(account).await;
            }
            for account in stopped {
                self.give_back(account).await;
                lock(&self.turns).remove(&account);
            }
            for caller in callers {
                let have = self.local.available(caller.account);
                if have.nano() < caller.local.nano() / 2 {
                    self.lease_local(caller.account, caller.local.less(have)).await;
                }
            }
        }
    }

    /// Accounts whose money is out of memory and not known to be back.
    fn unreturned(&self) -> Vec<AccountId> {
        let own = lock(&self.own);
        let waits = own.iter().filter(|(_, own)| own.returned < own.taken);
        waits.map(|(account, _)| *account).collect()
    }

    async fn lease_local(&self, account: AccountId, want: Amount) {
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

    /// Gives back what other nodes are short of.
    pub(super) async fn hear(self: Arc<Self>) {
        let (news, mut heard) = mpsc::channel(NEWS_MAX);
        let channels = [self.servers.channel("recall")];
        let redis = self.servers.redis.clone();
        let listen = redis.listen(&channels, news);
        let answer = async {
            while let Some(news) = heard.recv().await {
                let News::Message { payload, .. } = news else { continue };
                let account = std::str::from_utf8(&payload).ok().and_then(|text| text.parse().ok());
                if let Some(account) = account {
                    self.give_back(AccountId(account)).await;
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

    /// An account may have more than before.
    pub(super) fn forget_poor(&self, account: AccountId) {
        self.demand.forget_poor(account);
    }

    async fn refill_now(&self, account: AccountId, need: Amount) -> Refill {
        let want = Wanted { least: need, most: self.demand.wanted(account, need) };
        let mut looks = 0;
        loop {
            let leased = match self.lease(account, want).await {
                Ok(leased) => leased,
                Err(LeaseError::Ledger(LedgerError::Stale) | LeaseError::Redis(RedisError::Stale(_))) => {
                    let renewed = match self.epochs.get() {
                        Some(epochs) => self.renew_soon(epochs, shard_of(account)).await,
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
            if leased.added.is_positive() {
                return Refill::More;
            }
            if !leased.elsewhere.is_positive() || looks == GIVING_LOOKS {
                self.demand.is_poor(account, leased.free_left);
                return Refill::Nothing { available: leased.free_left };
            }
            if looks == 0 {
                self.ask_back(account).await;
            }
            looks += 1;
            tokio::time::sleep(GIVING).await;
        }
    }
}

#[async_trait]
impl fleet::Bank for Bank {
    async fn refill(&self, account: AccountId, need: Amount) -> Refill {
        if let Some(available) = self.demand.poor(account) {
            return Refill::Nothing { available };
        }
        let turn = self.turn(account);
        let before = turn.filled.load(Ordering::Acquire);
        let _mine = turn.lock.lock().await;
        // Somebody filled it, or found nothing, while this one waited for its turn.
        if turn.filled.load(Ordering::Acquire) != before {
            return Refill::More;
        }
        if let Some(available) = self.demand.poor(account) {
            return Refill::Nothing { available };
        }
        let came = Box::pin(self.refill_now(account, need)).await;
        if came == Refill::More {
            turn.filled.fetch_add(1, Ordering::AcqRel);
        }
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

/// Why a pool was not filled.
#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Redis(#[from] RedisError),
}
