//! The fleet's ledger: Postgres, shared by all nodes.
//!
//! Every method blocks, like the port's: call it from a thread that may. Nothing here is on the request path, and
//! nothing waits for long: a server that cannot be reached is [`LedgerError::Unreachable`] within seconds, so that a
//! caller can go on with what it has leased. Whatever was done without an answer may be asked for again: bookings are
//! known by their hold, movements by their reference, leases by totals that only grow.
//!
//! The server has to keep what it committed, also when it fails over: `synchronous_commit` must not be off, and a
//! standby that may become the primary has to be a synchronous one.

mod audit;
mod books;
mod epochs;
mod forget;
mod keys;
mod leases;
mod migrate;
mod patience;
mod post;
mod reaped;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use deadpool_postgres::{
    Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime, Transaction,
};
use filters::money::Amount;
use pingora::tls::{ClientConfig, RootCertStore, load_ca_file_into_store};
use tokio_postgres::config::{SslMode, TargetSessionAttrs};
use tokio_postgres::error::SqlState;
use tokio_postgres::{IsolationLevel, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;

use self::patience::Patience;
use super::port::{LedgerError, said};
use crate::config::checked;

pub use audit::{Drift, Parts, PoolSeen, Where};
pub use epochs::{Advanced, BootState, Claim, Epoch, LiveBoot};
pub use forget::Forgotten;
pub use leases::{Leased, Scattered, Wanted};
pub use migrate::Migrated;
pub use reaped::Reaped;

/// How long a connection may take to stand, and a caller may wait for one.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// How long one verb may take. The server gives up before we do, so that a verb that failed is one that is not done.
const VERB_MAX: Duration = Duration::from_secs(20);
/// How long the server works on one statement, in milliseconds; and how long it waits for a lock.
const STATEMENT_MS_MAX: u32 = 15_000;
const LOCK_MS_MAX: u32 = 5_000;
/// Why a verb was cut short.
const LEAVES: &str = "the process leaves, and it does not answer";
/// How long an audit may take.
const AUDIT_MAX: Duration = Duration::from_secs(3600);

/// A ledger in Postgres. Clones share its connections.
#[derive(Clone)]
pub struct Postgres {
    inner: Arc<Inner>,
    /// `None`: its verbs take what they take, also when the process leaves.
    patience: Option<Arc<Patience>>,
}

struct Inner {
    pool: Pool,
    /// Nano-dollars that were written off since the process began.
    written_off_nano: AtomicU64,
    /// Of its own, so that a caller's thread may block whatever it runs on. Taken when it is dropped.
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A runtime that is dropped where async code runs would panic.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Postgres {
    /// Prepares to connect. Nothing is asked of the server yet: a node starts without it.
    ///
    /// # Errors
    /// When the URL or the `ca_file` makes no sense.
    pub fn new(config: &checked::Postgres) -> anyhow::Result<Self> {
        let checked::Postgres { url, ca_file, connections_max } = config;
        // Its error would show the URL, which has a password in it.
        let mut server: tokio_postgres::Config =
            url.expose().parse().ok().context("store.postgres.url: this is no URL of a Postgres database")?;
        let asked = server.get_options().unwrap_or_default();
        let options = format!(
            "{asked} -c statement_timeout={STATEMENT_MS_MAX} -c lock_timeout={LOCK_MS_MAX} \
             -c idle_in_transaction_session_timeout={STATEMENT_MS_MAX} \
             -c default_transaction_isolation=read\\ committed"
        );
        server.options(options.trim_start());
        server.application_name("tollgate");
        // A standby's epochs may be old ones.
        server.target_session_attrs(TargetSessionAttrs::ReadWrite);
        server
            .connect_timeout(CONNECT_MAX)
            .keepalives_idle(Duration::from_secs(10))
            .tcp_user_timeout(VERB_MAX);
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = if let Some(file) = ca_file {
            server.ssl_mode(SslMode::Require);
            Manager::from_config(server, MakeRustlsConnect::new(tls(file)?), recycling)
        } else {
            let wants_tls = url.expose().contains("sslmode=require");
            anyhow::ensure!(!wants_tls, "store.postgres.url: `sslmode=require` needs a `ca_file` beside it");
            server.ssl_mode(SslMode::Disable);
            Manager::from_config(server, NoTls, recycling)
        };
        let pool = Pool::builder(manager)
            .max_size(*connections_max)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(CONNECT_MAX))
            .create_timeout(Some(CONNECT_MAX))
            .recycle_timeout(Some(CONNECT_MAX))
            .build()
            .context("cannot make a pool of connections")?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("postgres")
            .enable_all()
            .build()
            .context("cannot start a runtime for Postgres")?;
        let written_off_nano = AtomicU64::new(0);
        let inner = Inner { pool, written_off_nano, runtime: Some(runtime) };
        Ok(Self { inner: Arc::new(inner), patience: None })
    }

    /// The same, for what is no money: verbs of it and its clones end when [`Self::end_at`] says so.
    #[must_use]
    pub fn for_people(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), patience: Some(Arc::new(Patience::new())) }
    }

    /// The process leaves: what was made by [`Self::for_people`] is over by then, and every verb after it fails at once.
    pub fn end_at(&self, at: Instant) {
        if let Some(patience) = &self.patience {
            patience.end_at(at);
        }
    }

    /// Returns when verbs are to be over; never for money.
    async fn over(&self) {
        match &self.patience {
            Some(patience) => patience.over().await,
            None => std::future::pending().await,
        }
    }

    /// What this process has written off since it began, in nano-dollars.
    #[must_use]
    pub fn written_off(&self) -> u64 {
        self.inner.written_off_nano.load(Ordering::Relaxed)
    }

    fn count_written_off(&self, amount: Amount) {
        let nano = u64::try_from(amount.nano()).unwrap_or_default();
        self.inner.written_off_nano.fetch_add(nano, Ordering::Relaxed);
    }

    /// Runs `work` on a connection.
    fn on_connection<T>(
        &self,
        at_most: Duration,
        work: impl AsyncFnOnce(&mut Object) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        let Some(runtime) = &self.inner.runtime else {
            return Err(LedgerError::Unreachable("it is closed".to_owned()));
        };
        let done = async {
            let mut connection = tokio::select! {
                got = self.inner.pool.get() => got.map_err(unreachable)?,
                () = self.over() => return Err(LedgerError::Unreachable(LEAVES.to_owned())),
            };
            let done = tokio::select! {
                done = tokio::time::timeout(at_most, work(&mut connection)) => {
                    done.map_err(|_| format!("no answer in {at_most:?}"))
                }
                () = self.over() => Err(LEAVES.to_owned()),
            };
            match done {
                Ok(done) => done.map_err(|error| sorted(error, &connection)),
                Err(why) => {
                    // Nobody knows what it is at: it is closed, not put back.
                    drop(Object::take(connection));
                    Err(LedgerError::Unreachable(why))
                }
            }
        };
        runtime.block_on(Box::pin(done))
    }

    /// Runs `work` in a transaction, which is committed when it succeeds. Statements see what others have committed,
    /// so whatever is decided by a row is decided under its lock.
    pub(crate) fn within<T>(
        &self,
        work: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        self.on_connection(VERB_MAX, async |connection| {
            let transaction = connection.transaction().await?;
            let done = work(&transaction).await?;
            transaction.commit().await?;
            Ok(done)
        })
    }

    /// Runs `work` in a transaction that may wait and work for as long as it takes.
    fn at_length<T>(
        &self,
        work: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        self.on_connection(AUDIT_MAX, async |connection| {
            let transaction = connection.transaction().await?;
            transaction.batch_execute("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0").await?;
            let done = work(&transaction).await?;
            transaction.commit().await?;
            Ok(done)
        })
    }

    /// Runs `work` on one snapshot of everything, for as long as it takes.
    fn on_snapshot<T>(
        &self,
        work: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        self.on_connection(AUDIT_MAX, async |connection| {
            let transaction = connection.build_transaction().isolation_level(IsolationLevel::RepeatableRead);
            let transaction = transaction.read_only(true).start().await?;
            transaction.batch_execute("SET LOCAL statement_timeout = 0").await?;
            let done = work(&transaction).await?;
            transaction.rollback().await?;
            Ok(done)
        })
    }
}

fn tls(ca_file: &Path) -> anyhow::Result<ClientConfig> {
    pingora::tls::install_default_crypto_provider();
    let name = ca_file.display();
    std::fs::read(ca_file).with_context(|| format!("store.postgres.ca_file: cannot read {name}"))?;
    let path = ca_file.to_str().with_context(|| format!("store.postgres.ca_file: {name} is no UTF-8"))?;
    let mut roots = RootCertStore::empty();
    load_ca_file_into_store(path, &mut roots)
        .ok()
        .with_context(|| format!("store.postgres.ca_file: {name} is no PEM file"))?;
    anyhow::ensure!(!roots.is_empty(), "store.postgres.ca_file: {name} has no certificate in PEM");
    Ok(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

fn unreachable(error: PoolError) -> LedgerError {
    match error {
        PoolError::Timeout(_) => LedgerError::Unreachable(format!("no connection in {CONNECT_MAX:?}")),
        PoolError::Backend(error) => LedgerError::Unreachable(said(&error)),
        other => LedgerError::Unreachable(other.to_string()),
    }
}

/// A connection that breaks, or a server that goes down, is not the statement's fault.
fn sorted(error: LedgerError, connection: &Object) -> LedgerError {
    const DOWN: [SqlState; 4] = [
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
        SqlState::READ_ONLY_SQL_TRANSACTION,
    ];
    match error {
        LedgerError::Postgres(error)
            if connection.is_closed()
                || error.is_closed()
                || error.code().is_none_or(|code| DOWN.contains(code)) && error.as_db_error().is_none()
                || error.code().is_some_and(|code| DOWN.contains(code)) =>
        {
            LedgerError::Unreachable(said(&error))
        }
        other => other,
    }
}

/// A shard as it is stored.
fn small(shard: u16) -> i16 {
    i16::try_from(shard).unwrap_or(i16::MAX)
}

/// A shard as it is named.
fn shard(stored: i16) -> u16 {
    u16::try_from(stored).unwrap_or_default()
}

/// How many, as it is stored.
fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
