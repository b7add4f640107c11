//! From a checked config to a running store: what happens before a port is bound.
//!
//! Earlier boots that died are replayed first, so that their money is free again; then this boot
//! begins, accounts and keys of the `bootstrap:` block are made, and all free money is leased to it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use filters::ids::AccountId;
use filters::meter::Used;
use filters::money::{Amount, settle};

use crate::config::checked::{self, Account, Config, Store};
use crate::fleet;
use crate::journal::{self, Hold, Journal, Posting, Replayed, Settled, Threads};
use crate::ledger::port::{LedgerError, Movement, NewKey, Scope, What};
use crate::ledger::worker::{self, Finished};
use crate::ledger::{Ledger, Postgres, Sqlite};
use crate::pool::keys::{KeyTable, Principal, digest, hint};
use crate::store::redis::RedisError;
use crate::store::{self, Embedded, Holds};
use crate::{clock, entropy};

/// How long a node waits for Redis before it serves without.
const REDIS_PATIENCE: Duration = Duration::from_secs(5);
/// Settled calls that may wait between journal and ledger before the journal keeps them itself.
const POSTINGS_MAX: usize = 1 << 12;

/// A store that runs.
pub struct Booted {
    /// What this process alone has leased.
    pub store: Arc<Embedded>,
    /// Where calls are admitted: that, or pools of all nodes with that behind them.
    pub holds: Arc<dyn Holds>,
    pub journal: Journal,
    pub keys: KeyTable,
    pub boot: i64,
    /// For questions; taken by whoever asks them.
    pub reader: Option<Box<dyn Ledger>>,
    pub fleet: Option<Arc<fleet::Node>>,
    /// How far the ledger is behind the journal.
    pub progress: Arc<worker::Progress>,
    threads: Threads,
    ledger: JoinHandle<Finished>,
    locks: Locks,
}

/// What keeps other processes out of a data folder. Both are locks on open files, which end with the last
/// process that has the file open: one that is passed on is free at no moment in between.
#[derive(Debug, Default)]
pub struct Locks {
    /// Held by the process that serves, from before it looks for dead boots.
    pub owner: Option<File>,
    /// Held from the look for dead boots to the lease; by an heir until it has the owner's.
    pub start: Option<File>,
}

/// Makes the data folder, for its owner alone: balances and names of keys are in it. One that exists keeps its
/// mode, which is the operator's choice.
///
/// # Errors
/// When it cannot be made.
pub fn make_folder(data: &Path) -> anyhow::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(data);
    made.with_context(|| format!("cannot make the folder {}", data.display()))
}

/// The ledger's file in a data folder.
#[must_use]
pub fn ledger_file(data: &Path) -> PathBuf {
    data.join("ledger.db")
}

/// Starts the embedded store.
///
/// `upgrade`: another process may serve from the folder, which will hand over.
///
/// # Errors
/// When files cannot be made, read or written, an earlier journal is damaged, or another process
/// serves from the same folder.
pub fn start(config: &Config, upgrade: bool) -> anyhow::Result<Booted> {
    let data = &config.data;
    make_folder(data)?;
    let mut locks = Locks::default();
    let field = match &config.store {
        Store::Embedded => "store.embedded.path",
        Store::Fleet(_) => "store.path",
    };
    match own(data)? {
        Some(owner) => locks.owner = Some(owner),
        None if upgrade => {}
        None => anyhow::bail!(
            "{field}: another gateway serves from {}; stop it first, start this one with --upgrade to take over \
             from it, or give this one a folder of its own",
            data.display()
        ),
    }
    locks.start = Some(start_lock(data)?.context("another gateway is just starting from the same folder")?);
    let mut booted = match &config.store {
        Store::Embedded => alone(config, locks)?,
        Store::Fleet(servers) => in_fleet(config, servers, locks)?,
    };
    if booted.locks.owner.is_some() {
        booted.locks.start = None;
    }
    Ok(booted)
}

/// With all free money, and nobody beside us.
fn alone(config: &Config, locks: Locks) -> anyhow::Result<Booted> {
    let file = ledger_file(&config.data);
    let mut ledger = Sqlite::open(&file).context("cannot open the ledger")?;
    let journals = config.data.join("journal");
    recover(&mut ledger, &journals, true)?;
    let boot = ledger.begin_boot(clock::unix_ms())?;
    for account in &config.accounts {
        bootstrap(&mut ledger, account)?;
    }
    ledger.snapshot(clock::unix_ms())?;
    let begun = begin(boot, &journals)?;
    let (number, records) = ledger.key_base()?;
    let keys = KeyTable::numbered(number, records, clock::unix_ms());
    // Only now: a lease without a journal beside it would be nobody's.
    let leases = ledger.lease_all(begun.boot)?;
    let store = Arc::new(Embedded::new(leases, begun.journal.clone(), config.bounds.open_holds_max));
    restore_budgets(&mut ledger, &store, keys.iter())?;
    // A connection of its own: the ledger's thread keeps the one that it posts by.
    let reader = Box::new(Sqlite::open(&file).context("cannot open the ledger")?);
    let holds: Arc<dyn Holds> = Arc::<Embedded>::clone(&store);
    begun.with(keys, store, holds, (Box::new(ledger), reader), None, locks)
}

/// As one node of many. A node whose ledger does not answer starts with what it has kept, serves what is free, and is
/// told of in the ledger as soon as that answers: until then it is leased nothing, so it can spend nothing.
fn in_fleet(config: &Config, servers: &checked::Fleet, locks: Locks) -> anyhow::Result<Booted> {
    let (servers, runtime) = fleet::connect(servers)?;
    // One that cannot be asked now is looked at when it is taken into use.
    if let Err(error @ RedisError::Unfit(_)) = runtime.block_on(servers.check_redis()) {
        anyhow::bail!("store.redis: {error}");
    }
    let ledger = servers.ledger.clone();
    let journals = config.data.join("journal");
    let boot = entropy::boot();
    let registration = Registration { boot, accounts: config.accounts.clone(), journals: journals.clone() };
    let is_registered = match registration.register(&ledger) {
        Ok(()) => true,
        Err(error) if is_unreachable(&error) => {
            tracing::error!(
                "{error:#}: this node serves what is free, with the keys and the catalogue of its last run"
            );
            false
        }
        Err(error) => return Err(error),
    };
    let keys = fleet::keys::first(&ledger, &config.data).context("store.postgres")?;
    let begun = begin(boot, &journals)?;
    let open_max = config.bounds.open_holds_max;
    let store = Arc::new(Embedded::new(vec![], begun.journal.clone(), open_max));
    let local = Arc::clone(&store);
    let later = (!is_registered).then_some(registration);
    let node = fleet::Node::start(servers, runtime, boot, local, begun.journal.clone(), open_max, later);
    if is_registered && !node.wait_for_redis(REDIS_PATIENCE) {
        tracing::warn!("redis does not answer: calls go on with what this node has of its own until it does");
    }
    let holds: Arc<dyn Holds> = Arc::<store::fleet::Fleet>::clone(&node.store);
    let reader = Box::new(ledger.clone());
    begun.with(keys, store, holds, (Box::new(ledger), reader), Some(Arc::new(node)), locks)
}

/// What a fleet's ledger has to know before a node may spend.
#[derive(Clone)]
pub struct Registration {
    boot: i64,
    accounts: Vec<Account>,
    journals: PathBuf,
}

impl Registration {
    /// Books what dead boots of this folder left, makes this one known, and what the config wants to be there. May be
    /// done again at any point. Blocks.
    ///
    /// # Errors
    /// When the ledger does not answer or has another schema, or a journal is damaged.
    pub fn register(&self, ledger: &Postgres) -> anyhow::Result<()> {
        ledger.check_version().context("store.postgres")?;
        let mut ledger = ledger.clone();
        // One before this may have died before the ledger knew it.
        for dead in
            journal::dead_boots(&self.journals).context("cannot read the journals of earlier boots")?
        {
            ledger.begin_boot_as(dead.boot, clock::unix_ms())?;
        }
        recover(&mut ledger, &self.journals, false)?;
        ledger.begin_boot_as(self.boot, clock::unix_ms())?;
        for account in &self.accounts {
            bootstrap(&mut ledger, account)?;
        }
        Ok(())
    }
}

/// Whether it is only a matter of time.
#[must_use]
pub fn is_unreachable(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<LedgerError>(), Some(LedgerError::Unreachable(_)))
}

/// A boot that has begun: nothing is leased to it yet.
struct Begun {
    boot: i64,
    journal: Journal,
    threads: Threads,
    postings: mpsc::Receiver<Posting>,
}

/// Begins the journal of a boot.
fn begin(boot: i64, journals: &Path) -> anyhow::Result<Begun> {
    let (postings, received) = mpsc::sync_channel(POSTINGS_MAX);
    let (journal, threads) = Journal::start(journals, boot, postings).context("cannot start the journal")?;
    Ok(Begun { boot, journal, threads, postings: received })
}

impl Begun {
    /// The ledger that posts and the one that is asked; the node, where there are others.
    fn with(
        self,
        keys: KeyTable,
        store: Arc<Embedded>,
        holds: Arc<dyn Holds>,
        (poster, reader): (Box<dyn Ledger>, Box<dyn Ledger>),
        fleet: Option<Arc<fleet::Node>>,
        locks: Locks,
    ) -> anyhow::Result<Booted> {
        let Self { boot, journal, threads, postings } = self;
        let pools = fleet.as_ref().map(|node| Arc::clone(&node.store));
        let booked = move |batch: &[Settled]| {
            if let Some(pools) = &pools {
                pools.booked(batch);
            }
        };
        let progress = Arc::<worker::Progress>::default();
        let ledger = worker::start(poster, boot, postings, journal.clone(), Arc::clone(&progress), booked)
            .context("cannot start the ledger")?;
        let reader = Some(reader);
        Ok(Booted { store, holds, journal, keys, boot, reader, fleet, progress, threads, ledger, locks })
    }
}

impl Booted {
    /// What keeps other processes out.
    pub fn locks(&mut self) -> &mut Locks {
        &mut self.locks
    }

    /// Settles what was dropped, writes and books everything, and gives the lease back. What cannot
    /// be booked now, or is still open, is left to the next start: a boot ends with nothing in doubt.
    pub fn stop(self) {
        self.store.sweep();
        if let Some(node) = &self.fleet {
            node.stop();
        }
        // The store's and the caller's handles keep no thread alive: only the writer feeds the ledger.
        let stopped = self.threads.stop();
        let Ok((mut ledger, all_booked)) = self.ledger.join() else {
            tracing::error!("the ledger's thread broke; the next start replays its journal");
            return;
        };
        if !(all_booked && stopped.is_complete()) {
            tracing::warn!(
                boot = self.boot,
                "something is still in doubt; the next start replays the journal"
            );
            return;
        }
        match ledger.end_boot(self.boot) {
            Ok(()) => stopped.forget(),
            Err(error) => {
                tracing::error!(%error, "the lease could not be given back; the next start does it");
            }
        }
    }
}

/// Makes this process the only one that serves from `data`; `None`: another one does.
///
/// # Errors
/// When the lock's file cannot be opened or locked.
pub fn own(data: &Path) -> anyhow::Result<Option<File>> {
    let owner = lock(&data.join("owner.lock"))?;
    owner.as_ref().map_or(Ok(()), sign)?;
    Ok(owner)
}

/// Writes down who owns the folder, for whoever wants to send a signal.
///
/// # Errors
/// When the file cannot be written.
pub fn sign(owner: &File) -> anyhow::Result<()> {
    let pid = format!("{}\n", std::process::id());
    owner.set_len(0).and_then(|()| owner.write_all_at(pid.as_bytes(), 0)).context("cannot write owner.lock")
}

/// Makes this process the only one that starts, or looks for dead boots, in `data`; `None`: another one does.
///
/// # Errors
/// When the lock's file cannot be opened or locked.
pub fn start_lock(data: &Path) -> anyhow::Result<Option<File>> {
    lock(&data.join("start.lock"))
}

fn lock(path: &Path) -> anyhow::Result<Option<File>> {
    let lock = File::options().create(true).truncate(false).write(true).open(path);
    let lock = lock.with_context(|| format!("cannot open {}", path.display()))?;
    match lock.try_lock() {
        Ok(()) => Ok(Some(lock)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

/// Books what dead boots of this machine left, and frees what they had leased. `alone`: there are no others.
///
/// # Errors
/// When a journal is damaged, or the books cannot be written.
pub fn recover(ledger: &mut dyn Ledger, journals: &Path, alone: bool) -> anyhow::Result<()> {
    let dead = journal::dead_boots(journals).context("cannot read the journals of earlier boots")?;
    for dead in dead {
        let boot = dead.boot;
        let replayed = dead.replay().context("cannot replay the journal of an earlier boot")?;
        let (settled, orphans) = (replayed.settled.len(), replayed.orphans.len());
        book(ledger, boot, replayed)?;
        dead.forget().context("cannot delete a replayed journal")?;
        tracing::info!(boot, settled, orphans, "an earlier boot did not end; its calls are booked now");
    }
    // A process that died before its journal began has spent nothing. In a fleet others' journals are elsewhere.
    let open = if alone { ledger.open_boots()? } else { vec![] };
    for boot in open {
        if !journal::folder(journals, boot).exists() {
            ledger.end_boot(boot)?;
        }
    }
    Ok(())
}

/// Books what a dead boot's journal says, and ends the boot. May be begun again at any point.
///
/// # Errors
/// [`LedgerError`] when the books cannot be written.
pub fn book(ledger: &mut dyn Ledger, boot: i64, replayed: Replayed) -> Result<(), LedgerError> {
    ledger.post(boot, &replayed.settled)?;
    let ends = end_orphans(ledger.leases(boot)?, replayed.orphans);
    ledger.post(boot, &ends)?;
    ledger.end_boot(boot)
}

/// Settles holds that never ended at what they had cost by their last progress record.
fn end_orphans(leases: Vec<(AccountId, Amount)>, orphans: Vec<(Hold, i64)>) -> Vec<Settled> {
    let mut free: HashMap<i64, Amount> = leases.into_iter().map(|(id, amount)| (id.0, amount)).collect();
    for (hold, _) in orphans.iter().filter(|(hold, _)| hold.pool.is_none()) {
        let free = free.entry(hold.account).or_default();
        *free = free.less(Amount::from_nano(hold.amount));
    }
    let end = |(hold, cost): (Hold, i64)| {
        // What is free in a pool is not known here: it is other nodes' too.
        let mut elsewhere = Amount::ZERO;
        let free = if hold.pool.is_some() { &mut elsewhere } else { free.entry(hold.account).or_default() };
        let settlement = settle(Amount::from_nano(hold.amount), Amount::from_nano(cost), *free);
        *free = free.less(settlement.excess).checked_add(settlement.released).unwrap_or(Amount::MAX);
        Settled {
            id: hold.id,
            account: hold.account,
            request: hold.request,
            model: hold.model,
            endpoint: String::new(),
            attempts: 0,
            parts: Settled::parts_of(&settlement),
            provider_cost: 0,
            abandoned: 0,
            key: hold.key,
            held_ms: hold.at_ms,
            price_version: hold.price_version,
            tokens: Settled::tokens_of(&Used::default().usage),
            estimated: true,
            anomaly: false,
            at_ms: clock::unix_ms(),
            pool: hold.pool,
        }
    };
    orphans.into_iter().map(end).collect()
}

/// Makes an account of the config and its keys, or brings their settings up to date.
///
/// # Errors
/// [`LedgerError`] when a key belongs to another account, or the books cannot be written.
pub fn bootstrap(ledger: &mut dyn Ledger, account: &Account) -> Result<(), LedgerError> {
    let now_ms = clock::unix_ms();
    let id = ledger.ensure_account(&account.name, Some(&account.settings), now_ms)?;
    if account.balance.is_positive() {
        let reference = format!("bootstrap:{}", account.name);
        let booked = ledger.transfer(&Movement {
            account: id,
            what: What::TopUp,
            amount: account.balance,
            reference: &reference,
            reason: "bootstrap",
            now_ms,
            boot: None,
        });
        match booked {
            // Booked once; what the config says of it since then does not count.
            Ok(_) | Err(LedgerError::ReferenceTaken(_)) => {}
            Err(error) => return Err(error),
        }
    }
    for key in &account.keys {
        let secret = key.secret.expose();
        ledger.ensure_key(&NewKey {
            digest: digest(secret),
            account: id,
            account_name: &account.name,
            hint: &hint(secret),
            settings: &key.settings,
            expires_ms: None,
            now_ms,
        })?;
    }
    Ok(())
}

/// Budgets outlive a process, and may come while it runs: what was spent in their windows is in the books.
///
/// # Errors
/// [`LedgerError`] when the books cannot be read.
pub fn restore_budgets(
    ledger: &mut dyn Ledger,
    store: &Embedded,
    keys: impl Iterator<Item = Principal>,
) -> Result<(), LedgerError> {
    let ledger = RefCell::new(ledger);
    let mut failed = None;
    for principal in keys {
        let account = principal.account;
        let broken = RefCell::new(None);
        store.restore_budgets(account, principal.digest, &principal.terms.scopes, &|key, model, since_ms| {
            let scope = Scope { account, key, model };
            ledger.borrow_mut().spent(&scope, since_ms).unwrap_or_else(|error| {
                broken.replace(Some(error));
                Amount::ZERO
            })
        });
        failed = failed.or_else(|| broken.into_inner());
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn mode(folder: &Path) -> u32 {
        fs::metadata(folder).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_data_folder_is_made_for_its_owner_alone_and_one_that_exists_keeps_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let data = root.path().join("lib/tollgate");
        make_folder(&data).unwrap();
        assert_eq!(mode(&data), 0o700);
        fs::set_permissions(&data, fs::Permissions::from_mode(0o750)).unwrap();
        make_folder(&data).unwrap();
        assert_eq!(mode(&data), 0o750);
    }
}
