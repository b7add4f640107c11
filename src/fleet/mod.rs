//! What makes one node of a fleet: the tasks between Redis, Postgres and this node's own store.
//!
//! Nothing here is on a call's path but `bank`'s answers to the few that find their pool empty. Each task is a
//! loop that looks, does and waits; one that fails says so once and tries again, and none waits for another.
//!
//! The rules that keep money exact are those of docs/model-check.md: `epochs` (who may spend under which number),
//! `frozen` (what a lost Redis still owes), `reaper` (holds of nodes that are gone), `bank` (tranches).

mod bank;
pub mod catalogue;
mod demand;
mod epochs;
mod frozen;
pub mod health;
mod kept;
pub mod keys;
mod outbox;
mod reach;
mod reaper;
pub mod reconcile;
pub mod turn;

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use filters::ids::AccountId;
use filters::money::Amount;
use prometheus::proto::MetricFamily;
use tokio::runtime::{Handle, Runtime};
use tokio::time::MissedTickBehavior;

use crate::books::Fleet;
use crate::boot::Registration;
use crate::clock;
use crate::config::{checked, parse_catalogue};
use crate::journal::Journal;
use crate::ledger::postgres::Postgres;
use crate::ledger::{Ledger as _, LedgerError};
use crate::ops::heartbeat;
use crate::ops::metrics::FleetMetrics;
use crate::pool::Pool;
use crate::reload::{Reloader, variable};
use crate::store::redis::{Redis, RedisError, SHARDS, Warning, shard_of};
use crate::store::{Embedded, Holds as _, fleet};

use bank::Bank;
use catalogue::{Catalogues, Published};
use epochs::Epochs;
use health::Health;
use keys::Keys;
use reach::Reach;

/// How often Redis is told which calls run, and the ledger that this node lives.
const BEAT: Duration = Duration::from_secs(1);
/// How long the ledger may be silent before nobody waits for it any more.
const SILENCE: Duration = Duration::from_secs(3);
/// How often the ledger's partitions are made ahead and its balances written down; both do nothing twice a day.
const HOUSEKEEPING: Duration = Duration::from_secs(3600);
/// How long the process that leaves waits for Redis to take the last ends. The journal and the ledger have them.
const LAST_ENDS: Duration = Duration::from_secs(2);
/// How long a call waits for the ledger, where it has to ask at all.
const CALLS_WAIT_MAX: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(10);
/// How often it is looked whether other nodes are heard of, and after which silence one counts as gone.
const ROLL_CALL: Duration = Duration::from_secs(15);
const SILENT_AFTER: Duration = Duration::from_secs(60);

/// The servers that a node shares with others.
#[derive(Clone)]
pub struct Servers {
    pub redis: Redis,
    pub ledger: Postgres,
    pub metrics: Arc<FleetMetrics>,
    prefix: String,
    slot_lease: Duration,
    runtime: Handle,
    reach: Arc<Reach>,
}

/// The parts of a running node.
pub struct Node {
    pub servers: Servers,
    pub store: Arc<fleet::Fleet>,
    local: Arc<Embedded>,
    bank: Arc<Bank>,
    epochs: Arc<Epochs>,
    keys: OnceLock<Arc<Keys>>,
    /// `None` once it has stopped.
    runtime: Mutex<Option<Runtime>>,
}

impl Servers {
    /// Asks the ledger, on a thread that may wait.
    async fn ask<T: Send + 'static>(
        &self,
        what: impl FnOnce(&Postgres) -> Result<T, LedgerError> + Send + 'static,
    ) -> Result<T, LedgerError> {
        let ledger = self.ledger.clone();
        let asked = self.runtime.spawn_blocking(move || what(&ledger)).await;
        let answer = asked.unwrap_or_else(|error| Err(LedgerError::Unreachable(error.to_string())));
        if matches!(answer, Err(LedgerError::Unreachable(_))) {
            self.reach.pause();
        }
        answer
    }

    /// Does what a call waits for: not for long, and not at all when the ledger has just been away. Whatever was begun
    /// goes on to its end, so that nothing is left half done.
    async fn soon<T: Send + 'static, E: From<LedgerError> + Send + 'static>(
        &self,
        what: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, E> {
        if self.reach.is_paused() {
            return Err(LedgerError::Unreachable("it was away a moment ago".to_owned()).into());
        }
        let broken = match tokio::time::timeout(CALLS_WAIT_MAX, self.runtime.spawn(what)).await {
            Ok(Ok(answer)) => return answer,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer in {CALLS_WAIT_MAX:?}"),
        };
        self.reach.pause();
        Err(LedgerError::Unreachable(broken).into())
    }

    /// Looks whether Redis may be trusted with money, and says what an operator should know of it.
    ///
    /// # Errors
    /// [`RedisError::Unfit`] for a server that must not be used; others for one that cannot be asked now.
    pub(crate) async fn check_redis(&self) -> Result<(), RedisError> {
        for Warning(warning) in self.redis.check().await? {
            tracing::warn!("store.redis: {warning}");
        }
        Ok(())
    }

    /// A channel that all nodes of this fleet hear.
    fn channel(&self, name: &str) -> String {
        format!("{}:{name}", self.prefix)
    }
}

/// Servers of a config, and a runtime of their own: it outlives Pingora's, so that the last ends go out.
///
/// # Errors
/// When a URL or a file of certificates makes no sense.
pub fn connect(config: &checked::Fleet) -> anyhow::Result<(Servers, Runtime)> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("fleet")
        .enable_all()
        .build()
        .context("cannot start a runtime for the fleet")?;
    let servers = Servers {
        redis: Redis::new(&config.redis)?,
        ledger: Postgres::new(&config.postgres)?,
        metrics: Arc::new(FleetMetrics::new()?),
        prefix: config.redis.prefix.clone(),
        slot_lease: config.slot_lease,
        runtime: runtime.handle().clone(),
        reach: Arc::new(Reach::new()),
    };
    Ok((servers, runtime))
}

impl Node {
    /// Starts a node's store and its tasks, for a boot whose journal is there already. `later`: the ledger does not know
    /// it yet.
    #[must_use]
    pub fn start(
        servers: Servers,
        runtime: Runtime,
        boot: i64,
        local: Arc<Embedded>,
        journal: Journal,
        open_max: usize,
        later: Option<Registration>,
    ) -> Self {
        let (bank, low) = Bank::new(servers.clone(), boot, Arc::clone(&local));
        let bank = Arc::new(bank);
        let as_bank: Arc<dyn fleet::Bank> = Arc::<Bank>::clone(&bank);
        let parts = fleet::Parts {
            redis: servers.redis.clone(),
            local: Arc::clone(&local),
            journal,
            bank: as_bank,
            metrics: Arc::clone(&servers.metrics),
            boot,
            slot_lease: servers.slot_lease,
        };
        let (store, ends) = fleet::Fleet::new(parts, open_max);
        let store = Arc::new(store);
        let epochs = Arc::new(Epochs::new(servers.clone(), boot, Arc::clone(&store)));
        bank.set_epochs(Arc::clone(&epochs));
        let redis = servers.redis.clone();
        runtime.spawn(async move { redis.keep().await });
        runtime.spawn(ends.run());
        let tasks = Tasks {
            servers: servers.clone(),
            store: Arc::clone(&store),
            bank: Arc::clone(&bank),
            epochs: Arc::clone(&epochs),
            boot,
        };
        store.set_registered(later.is_none());
        if later.is_some() {
            servers.reach.is_silent("it has not answered since the start".to_owned());
        }
        runtime.spawn(tasks.start(later, low));
        Self {
            servers,
            store,
            local,
            bank,
            epochs,
            keys: OnceLock::new(),
            runtime: Mutex::new(Some(runtime)),
        }
    }

    /// Shares keys, and what is seen of upstreams, with the other nodes. `folder` keeps what a cold start needs.
    pub fn share(&self, pool: &Arc<Pool>, folder: &Path) {
        let Servers { redis, ledger, runtime, .. } = &self.servers;
        let (pool, folder) = (Arc::clone(pool), folder.to_owned());
        let keys = Arc::new(Keys::new(redis.clone(), ledger.clone(), Arc::clone(&pool), folder));
        let health = Health::new(redis.clone(), pool);
        let followed = Arc::clone(self.keys.get_or_init(|| keys));
        runtime.spawn(async move { followed.run().await });
        runtime.spawn(async move { health.run().await });
    }

    /// What an operator should know although calls are served.
    #[must_use]
    pub fn notices(&self) -> Vec<String> {
        let mut notices = vec![];
        if let Some(why) = self.servers.reach.why_not() {
            notices.push(format!(
                "the ledger does not answer ({why}): calls go on with what is leased, the books are read-only"
            ));
        }
        let refused = self.refused_shards();
        if refused > 0 {
            notices.push(format!(
                "redis does not answer for {refused} of {SHARDS} shards: their accounts are served with money of this node"
            ));
        }
        notices
    }

    /// The fleet's ledger, for what is no money.
    #[must_use]
    pub fn ledger(&self) -> Postgres {
        self.servers.ledger.clone()
    }

    /// Everything that this node sees of its servers.
    #[must_use]
    pub fn gather(&self) -> Vec<MetricFamily> {
        let metrics = &self.servers.metrics;
        metrics.redis_refused.set(self.refused_shards());
        metrics.local_nano.set(self.local.free().nano());
        metrics.unbooked_nano.set(self.store.unbooked().nano());
        metrics.ledger_reachable.set(i64::from(self.servers.reach.why_not().is_none()));
        metrics.heartbeat_age.set(self.servers.reach.age().as_secs_f64());
        metrics.written_off(self.servers.ledger.written_off());
        metrics.gather()
    }

    /// Shards that no call is sent to now.
    #[must_use]
    pub fn refused_shards(&self) -> i64 {
        let refused = (0..SHARDS).filter(|shard| self.servers.redis.is_shard_open(*shard));
        i64::try_from(refused.count()).unwrap_or_default()
    }

    /// The catalogue to begin with, for a node whose file names none: the published one, or where that cannot be used
    /// here the last good one. Blocks.
    ///
    /// # Errors
    /// When neither can be used.
    pub fn first_catalogue(
        &self,
        folder: &Path,
        timers: checked::Timers,
    ) -> anyhow::Result<(Published, checked::Catalogue)> {
        let published = catalogue::first(&self.servers.ledger, folder).context("the catalogue")?;
        if published.version == 0 {
            tracing::warn!("no catalogue was published: see `tollgate catalogue publish`");
            return Ok((published, checked::Catalogue::default()));
        }
        match parse_catalogue(&published.text, timers, variable) {
            Ok(parsed) => {
                catalogue::keep(folder, &published);
                Ok((published, parsed))
            }
            Err(faults) => {
                let Some(kept) = catalogue::kept_catalogue(folder) else { return Err(faults.into()) };
                let lines = faults.to_string().replace('\n', "; ");
                tracing::error!(faults = lines, "the fleet's catalogue is refused: the last good one serves");
                let parsed = parse_catalogue(&kept.text, timers, variable)?;
                Ok((kept, parsed))
            }
        }
    }

    /// Takes over what is published from now on, as long as the config file names no catalogue.
    pub fn follow_catalogue(&self, reloader: &Arc<Reloader>, folder: &Path) {
        let Servers { redis, ledger, runtime, .. } = &self.servers;
        let (redis, ledger) = (redis.clone(), ledger.clone());
        let catalogues = Catalogues::new(redis, ledger, Arc::clone(reloader), folder.to_owned());
        runtime.spawn(async move { catalogues.run().await });
    }

    /// Waits until Redis is ready to spend, at most so long: calls before that would go on this node's own money.
    pub fn wait_for_redis(&self, at_most: Duration) -> bool {
        self.servers.runtime.block_on(self.epochs.wait_for_all(at_most))
    }

    /// Lets the last ends go out to Redis, and ends the tasks. The journal and the ledger have them anyway.
    pub fn stop(&self) {
        let runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(runtime) = runtime else { return };
        self.store.sweep();
        let end = clock::now() + LAST_ENDS;
        while !self.store.has_told_all() && clock::now() < end {
            std::thread::sleep(LOOK);
        }
        runtime.shutdown_background();
    }
}

impl Fleet for Node {
    fn recall(&self, account: AccountId) {
        self.servers.runtime.block_on(self.bank.recall(account));
    }

    fn keys_changed(&self) {
        let Some(keys) = self.keys.get() else { return };
        if let Err(error) = self.servers.runtime.block_on(keys.changed()) {
            tracing::warn!(%error, "other nodes hear of changed keys when redis is back");
        }
    }

    fn balance_changed(&self, account: AccountId) {
        self.servers.runtime.block_on(self.bank.has_more(account));
    }

    fn why_read_only(&self) -> Option<String> {
        self.servers.reach.why_not()
    }

    fn available(&self, account: AccountId) -> Amount {
        let here = self.local.available(account);
        let shard = shard_of(account);
        let pool = crate::journal::Pool { shard, epoch: self.epochs.of(shard) };
        let elsewhere = async {
            let free = self.servers.ask(move |ledger| ledger.free(account)).await.unwrap_or_default();
            let pool = self.servers.redis.pool(account, pool).await.map(|pool| pool.available);
            free.checked_add(pool.unwrap_or_default()).unwrap_or(Amount::MAX)
        };
        self.servers.runtime.block_on(elsewhere).checked_add(here).unwrap_or(Amount::MAX)
    }
}

/// What the tasks of a node work on.
struct Tasks {
    servers: Servers,
    store: Arc<fleet::Fleet>,
    bank: Arc<Bank>,
    epochs: Arc<Epochs>,
    boot: i64,
}

impl Tasks {
    /// Starts them, once the ledger knows the boot: what nobody has registered is told nothing and given nothing.
    async fn start(self, later: Option<Registration>, low: bank::Fills) {
        let Self { servers, store, bank, epochs, boot } = self;
        let runtime = servers.runtime.clone();
        if let Some(registration) = later {
            register(&servers, &registration).await;
            store.set_registered(true);
        }
        runtime.spawn(Arc::clone(&epochs).follow());
        runtime.spawn(beat(servers.clone(), Arc::clone(&store), boot));
        runtime.spawn(touch(Arc::clone(&store)));
        runtime.spawn(frozen::report(servers.clone(), Arc::clone(&store), Arc::clone(&epochs), boot));
        runtime.spawn(reaper::reap(servers.clone(), store, epochs, boot));
        runtime.spawn(outbox::post(servers.clone(), boot));
        runtime.spawn(keep_house(servers.clone()));
        runtime.spawn(call_the_roll(servers.clone()));
        runtime.spawn(reconcile::watch(servers));
        runtime.spawn(Arc::clone(&bank).fill(low));
        runtime.spawn(Arc::clone(&bank).keep_tranches());
        runtime.spawn(bank.hear());
    }
}

/// Tells the ledger of a boot that began without it.
async fn register(servers: &Servers, registration: &Registration) {
    let mut tick = every(BEAT);
    let mut told = String::new();
    loop {
        tick.tick().await;
        let (registration, ledger) = (registration.clone(), servers.ledger.clone());
        let done = servers.runtime.spawn_blocking(move || registration.register(&ledger)).await;
        match done {
            Ok(Ok(())) => {
                servers.reach.answered();
                tracing::info!("the ledger answers: this node serves everything from now on");
                return;
            }
            Ok(Err(error)) => {
                let said = format!("{error:#}");
                servers.reach.is_silent(said.clone());
                if said != told {
                    tracing::warn!("this node cannot be made known to the ledger yet: {said}");
                    told = said;
                }
            }
            Err(error) => tracing::error!(%error, "making this node known to the ledger broke"),
        }
    }
}

/// Says that this node lives, until the ledger says that it does not.
async fn beat(servers: Servers, store: Arc<fleet::Fleet>, boot: i64) {
    let job = heartbeat::job("ledger_beat", BEAT);
    let mut tick = every(BEAT);
    loop {
        tick.tick().await;
        job.begins();
        let beaten = servers.ask(move |ledger| ledger.heartbeat(boot, clock::unix_ms()));
        match tokio::time::timeout(SILENCE, beaten).await {
            Ok(Ok(())) => {
                servers.reach.answered();
                job.done();
            }
            Ok(Err(LedgerError::BootOver(boot))) => {
                tracing::error!(
                    breach = "given_up",
                    boot,
                    "the ledger has given this node up: nothing is admitted any more; start it anew"
                );
                store.give_up();
                return;
            }
            Ok(Err(error)) => {
                job.failed(&error);
                servers.reach.is_silent(error.to_string());
            }
            Err(_) => {
                job.failed("the ledger does not answer in time");
                servers.reach.is_silent(format!("no answer in {SILENCE:?}"));
            }
        }
    }
}

async fn touch(store: Arc<fleet::Fleet>) {
    let job = heartbeat::job("touch", BEAT);
    let mut tick = every(BEAT);
    loop {
        tick.tick().await;
        store.sweep();
        store.touch_all().await;
        store.acknowledge_all().await;
        job.done();
    }
}

async fn keep_house(servers: Servers) {
    let job = heartbeat::job("partitions", HOUSEKEEPING);
    let mut tick = every(HOUSEKEEPING);
    loop {
        tick.tick().await;
        job.begins();
        let now_ms = clock::unix_ms();
        let kept = servers.ask(move |ledger| {
            ledger.partitions_ahead(now_ms)?;
            ledger.clone().snapshot(now_ms)
        });
        let kept = kept.await;
        job.ended(&kept);
        if let Err(error) = kept {
            tracing::warn!(%error, "the ledger's partitions cannot be made ahead");
        }
    }
}

/// Counts nodes that have neither ended nor been heard of.
async fn call_the_roll(servers: Servers) {
    let mut tick = every(ROLL_CALL);
    loop {
        tick.tick().await;
        let Ok(boots) = servers.ask(Postgres::live_boots).await else { continue };
        let silent_since = clock::unix_ms() - i64::try_from(SILENT_AFTER.as_millis()).unwrap_or(i64::MAX);
        let silent = boots.iter().filter(|boot| boot.beat_ms < silent_since).count();
        servers.metrics.boots_silent.set(i64::try_from(silent).unwrap_or(i64::MAX));
    }
}

/// A clock that does not hurry after it has been late.
fn every(span: Duration) -> tokio::time::Interval {
    let mut tick = tokio::time::interval(span);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick
}
