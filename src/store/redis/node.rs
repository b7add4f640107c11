//! One server: its connections, its breaker, and the verbs it has taken in.
//!
//! A request never connects and never waits for longer than one command may take. The breaker opens after a
//! command that timed out or lost its connection, and refuses at once from then on; [`Node::mend`], off the
//! request path, connects, loads the verbs, asks for a `PING` and closes it. A server that has not answered yet
//! counts as open.
//!
//! Requests have connections of their own, one for each thread that serves (see `links`), beside one for everything else:
//! what reads much at once must not stand before a request's command.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, ServerErrorKind, Value};
use tokio::sync::{Mutex, Notify};

use super::RedisError;
use super::library::{Dialect, Library};
use super::links::{Links, Mine, Owner};
use super::words::Words;

/// Off the request path a server may take its time: connections, probes, outbox.
const PATIENCE: Duration = Duration::from_secs(2);
/// Commands that wait for one connection.
const QUEUE_MAX: usize = 4096;

/// Which connection a command takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// A request waits for it.
    Request,
    /// Nobody does.
    Background,
}

/// Host and port.
pub(super) type Address = (String, u16);

pub(super) struct Node {
    pub(super) address: Address,
    client: Client,
    library: Arc<Library>,
    timeout: Duration,
    links: Links,
    background: ArcSwapOption<MultiplexedConnection>,
    open: AtomicBool,
    scripts: AtomicBool,
    /// How often the verbs were taken in again: all that miss them at once wait for one who does it.
    loaded: AtomicU64,
    loading: Mutex<()>,
    mending: Mutex<()>,
    /// Wakes who mends.
    tripped: Arc<Notify>,
}

/// What came of a command, where the caller may do something about it.
#[derive(Debug)]
pub(super) enum Fault {
    /// Another server has the key: for good, or for this once.
    Moved(Address),
    Ask(Address),
    /// The verbs are not there.
    NoLibrary,
    Other(RedisError),
}

impl From<RedisError> for Fault {
    fn from(error: RedisError) -> Self {
        Self::Other(error)
    }
}

impl Node {
    pub(super) fn new(
        address: Address,
        client: Client,
        library: Arc<Library>,
        timeout: Duration,
        tripped: Arc<Notify>,
    ) -> Self {
        Self {
            address,
            client,
            library,
            timeout,
            links: Links::new(),
            background: ArcSwapOption::empty(),
            open: AtomicBool::new(true),
            scripts: AtomicBool::new(false),
            loaded: AtomicU64::new(0),
            loading: Mutex::new(()),
            mending: Mutex::new(()),
            tripped,
        }
    }

    /// Whether its breaker refuses.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn dialect(&self) -> Dialect {
        if self.scripts.load(Ordering::Acquire) { Dialect::Scripts } else { Dialect::Functions }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Sends one command, if the breaker lets it.
    pub(super) async fn send(self: &Arc<Self>, lane: Lane, cmd: &Cmd, asking: bool) -> Result<Value, Fault> {
        if self.is_open() {
            return Err(RedisError::Open.into());
        }
        let mut link = self.link(lane).ok_or(RedisError::Open)?;
        let answer = if asking {
            let mut both = redis::pipe();
            both.cmd("ASKING").ignore().add_command(cmd.clone());
            both.query_async::<(Value,)>(&mut link).await.map(|(value,)| value)
        } else {
            cmd.query_async::<Value>(&mut link).await
        };
        answer.map_err(|error| self.fault(&error))
    }

    /// Calls a verb; takes it in again where a flush has thrown it away, since nothing ran then.
    pub(super) async fn call(
        self: &Arc<Self>,
        lane: Lane,
        verb: &str,
        key: &str,
        words: &Words,
        asking: bool,
    ) -> Result<Value, Fault> {
        let loaded = self.loaded.load(Ordering::Acquire);
        let cmd = self.library.call(self.dialect(), verb, key, words);
        match self.send(lane, &cmd, asking).await {
            Err(Fault::NoLibrary) => {
                self.load_again(lane, loaded).await?;
                let cmd = self.library.call(self.dialect(), verb, key, words);
                self.send(lane, &cmd, asking).await
            }
            answered => answered,
        }
    }

    /// Looks whether the connections are still there; opens the breaker if those are not that all share. A server that
    /// is slow is left to the requests, which have a measure for it.
    pub(super) async fn probe(&self) -> bool {
        let mut slow = false;
        for link in [self.background(), self.links.shared()] {
            let Some(mut link) = link else { return false };
            match redis::cmd("PING").query_async::<Value>(&mut link).await {
                Ok(_) => {}
                Err(error) if error.is_timeout() => slow = true,
                Err(error) => {
                    let _opened = self.fault(&error);
                    return false;
                }
            }
        }
        if !slow {
            self.sort_out().await;
        }
        true
    }

    /// Gives up the threads' connections that do not answer although the server does: they broke or went silent, or
    /// their thread has ended. A command would wait its whole time on such a one, and open the breaker, again and again.
    async fn sort_out(&self) {
        let asked = self.links.owned().into_iter().map(async |(owner, mut link)| {
            if redis::cmd("PING").query_async::<Value>(&mut link).await.is_err() {
                self.links.lose(owner);
            }
        });
        futures::future::join_all(asked).await;
    }

    /// Asks whether the server is there, connects where needed, and closes the breaker if it answers.
    pub(super) async fn mend(&self) -> Result<(), RedisError> {
        let _one_at_a_time = self.mending.lock().await;
        if !self.is_open() {
            return Ok(());
        }
        let mended = self.try_mend().await;
        if mended.is_err() {
            // What hangs or is lost is not asked again.
            self.links.clear();
            self.background.store(None);
        } else {
            self.open.store(false, Ordering::Release);
        }
        mended
    }

    /// The same, for as long as a command of this lane may take.
    ///
    /// # Errors
    /// [`RedisError::Moving`] when that was not enough; others as [`Self::mend`].
    pub(super) async fn mend_for(&self, lane: Lane) -> Result<(), RedisError> {
        let at_most = match lane {
            Lane::Request => self.timeout,
            Lane::Background => PATIENCE,
        };
        let (host, port) = &self.address;
        tokio::time::timeout(at_most, Box::pin(self.mend())).await.unwrap_or_else(|_| {
            Err(RedisError::Moving(format!("to {host}:{port}, which is not connected yet")))
        })
    }

    async fn try_mend(&self) -> Result<(), RedisError> {
        let error = |error: &redis::RedisError| read(error).into_error();
        let mut fresh = None;
        if self.background.load().is_none() {
            let link = self.connect(PATIENCE).await.map_err(|e| error(&e))?;
            fresh = Some(link.clone());
            self.background.store(Some(Arc::new(link)));
        }
        if self.links.shared().is_none() {
            self.links.share(self.connect(self.timeout).await.map_err(|e| error(&e))?);
            fresh = self.background();
        }
        if let Some(mut link) = fresh {
            let info: String =
                redis::cmd("INFO").arg("replication").query_async(&mut link).await.map_err(|e| error(&e))?;
            if !info.lines().any(|line| line.trim() == "role:master") {
                return Err(RedisError::NotThere("the server is a replica".to_owned()));
            }
            self.load(&mut link).await.map_err(|e| error(&e))?;
        }
        for link in [self.background(), self.links.shared()] {
            let mut link = link.ok_or(RedisError::Open)?;
            redis::cmd("PING").query_async::<Value>(&mut link).await.map_err(|e| error(&e))?;
        }
        self.sort_out().await;
        Ok(())
    }

    async fn connect(&self, timeout: Duration) -> redis::RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(timeout))
            .set_pipeline_buffer_size(QUEUE_MAX);
        Box::pin(self.client.get_multiplexed_async_connection_with_config(&config)).await
    }

    /// Takes the verbs in again, unless somebody has since a look at `loaded`.
    async fn load_again(self: &Arc<Self>, lane: Lane, loaded: u64) -> Result<(), Fault> {
        let _one_at_a_time = self.loading.lock().await;
        if self.loaded.load(Ordering::Acquire) != loaded {
            return Ok(());
        }
        let mut link = self.link(lane).ok_or(RedisError::Open)?;
        self.load(&mut link).await.map_err(|error| self.fault(&error))?;
        self.loaded.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Takes the verbs in, as functions where they are allowed.
    async fn load(&self, link: &mut MultiplexedConnection) -> redis::RedisResult<()> {
        match self.library.load_functions().query_async::<Value>(link).await {
            Ok(_) => self.scripts.store(false, Ordering::Release),
            Err(error) if error.detail().is_some_and(|text| text.contains("already exists")) => {
                self.scripts.store(false, Ordering::Release);
            }
            Err(error) if refuses_functions(&error) => {
                for cmd in self.library.load_scripts() {
                    cmd.query_async::<Value>(link).await?;
                }
                self.scripts.store(true, Ordering::Release);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn background(&self) -> Option<MultiplexedConnection> {
        self.background.load().as_deref().cloned()
    }

    /// The connection to take.
    fn link(self: &Arc<Self>, lane: Lane) -> Option<MultiplexedConnection> {
        if lane == Lane::Background {
            return self.background();
        }
        match self.links.mine() {
            Mine::Ready(link) => Some(link),
            Mine::None => None,
            Mine::Wanting(me, link) => {
                let making = Making { node: Arc::clone(self), owner: me };
                #[expect(
                    clippy::disallowed_methods,
                    reason = "it ends by itself, since every step has its time, or with the runtime that would drive it"
                )]
                drop(tokio::spawn(making.run()));
                Some(link)
            }
        }
    }

    /// Reads an error, and opens the breaker where it says so.
    fn fault(&self, error: &redis::RedisError) -> Fault {
        let fault = read(error);
        match &fault {
            Fault::Other(RedisError::Lost) => {
                self.links.clear();
                self.background.store(None);
                self.trip();
            }
            Fault::Other(RedisError::TimedOut | RedisError::NotThere(_)) => self.trip(),
            Fault::Moved(_) | Fault::Ask(_) | Fault::NoLibrary | Fault::Other(_) => {}
        }
        fault
    }

    fn trip(&self) {
        self.open.store(true, Ordering::Release);
        self.tripped.notify_one();
    }
}

/// Makes a thread's own connection, on the runtime that will drive it.
struct Making {
    node: Arc<Node>,
    owner: Owner,
}

impl Making {
    async fn run(self) {
        match self.node.connect(self.node.timeout).await {
            Ok(link) => self.node.links.made(self.owner, link),
            Err(error) => {
                tracing::debug!(%error, "a thread goes on with the connection to redis that all share");
                tokio::time::sleep(PATIENCE).await;
            }
        }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        self.node.links.may_make(self.owner);
    }
}

impl Fault {
    pub(super) fn into_error(self) -> RedisError {
        match self {
            Self::Moved(_) | Self::Ask(_) => RedisError::Moving("the key has moved".to_owned()),
            Self::NoLibrary => RedisError::Refused("the verbs are not there".to_owned()),
            Self::Other(error) => error,
        }
    }
}

/// The command is unknown here, or this user may not give it.
fn refuses_functions(error: &redis::RedisError) -> bool {
    let text = error.detail().unwrap_or_default();
    error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm)
        || text.contains("unknown command")
        || text.contains("command is disabled")
        || text.contains("not allowed")
}

fn read(error: &redis::RedisError) -> Fault {
    let text = || error.to_string();
    let target = || {
        let (address, _slot) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        Some((host.to_owned(), port.parse().ok()?))
    };
    let other = match error.kind() {
        ErrorKind::Server(kind) => match kind {
            ServerErrorKind::Moved => match target() {
                Some(address) => return Fault::Moved(address),
                None => RedisError::Moving(text()),
            },
            ServerErrorKind::Ask => match target() {
                Some(address) => return Fault::Ask(address),
                None => RedisError::Moving(text()),
            },
            ServerErrorKind::NoScript => return Fault::NoLibrary,
            ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown | ServerErrorKind::BusyLoading => {
                RedisError::NotThere(text())
            }
            ServerErrorKind::ClusterDown | ServerErrorKind::TryAgain => RedisError::Moving(text()),
            _ if error.detail().is_some_and(|text| text.contains("Function not found")) => {
                return Fault::NoLibrary;
            }
            _ => RedisError::Refused(text()),
        },
        _ if error.is_timeout() => RedisError::TimedOut,
        ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => RedisError::Refused(text()),
        _ if error.is_io_error() || error.is_unrecoverable_error() => RedisError::Lost,
        _ => RedisError::Refused(text()),
    };
    Fault::Other(other)
}
