//! The running gateway: Pingora's services around a booted store.

use std::collections::HashSet;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use async_trait::async_trait;
use pingora::server::configuration::ServerConf;
use pingora::server::{RunArgs, Server, ShutdownWatch};
use pingora::services::background::{BackgroundService, background_service};
use pingora::services::listening::Service;
use pingora_proxy::http_proxy;

use crate::admin::{self, Admin};
use crate::books::{self, Books};
use crate::boot::{self, ledger_file};
use crate::config::Config;
use crate::drain::{Drain, Watch};
use crate::front::{Entrance, Front, Patient};
use crate::handover::{self, Estate, Inheritance, Sockets};
use crate::journal::Journal;
use crate::ledger::Sqlite;
use crate::ops::Metrics;
use crate::ops::notify::Notify;
use crate::pool::{Pool, Snapshot};
use crate::proxy::{Bodies, Gateway};
use crate::reload::{Fixed, Live, Reloader, Source};
use crate::store::{Embedded, Holds};
use crate::succession;

/// How often holds of dropped requests are settled.
const SWEEP: Duration = Duration::from_millis(10);
/// How often the addresses of endpoints are looked up.
const LOOKUP: Duration = Duration::from_secs(30);
/// How often the boots before this one are looked after, as long as there are any.
const LOOK_BACK: Duration = Duration::from_millis(500);
/// Pingora's grace time, longer than the longest drain that a config may ask for.
const GRACE_SECONDS: u64 = 8 * 86_400;
/// The most that `routing.attempts_max` may be.
const ATTEMPTS_MAX: usize = 5;

/// How a process has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Every call came to its end.
    Drained,
    /// So many calls were cut when the drain's time was over.
    Cut(usize),
}

/// Serves until a signal says otherwise. Reads the config anew from `source` when asked to. `upgrade`: takes
/// over from the process that serves now, when that one gets SIGQUIT.
///
/// # Errors
/// When the store cannot start or an address cannot be bound.
pub fn run(config: Config, source: Source, upgrade: bool) -> anyhow::Result<Left> {
    serve(config, Some(source), upgrade, Arc::new(Drain::default()), |store| store)
}

/// Serves until a signal or `drain_state` says otherwise, with a store that was wrapped: for tests
/// that make it fail, and for embedders.
///
/// # Errors
/// When the store cannot start or an address cannot be bound.
pub fn run_with(
    config: Config,
    drain_state: Arc<Drain>,
    wrap: impl FnOnce(Arc<dyn Holds>) -> Arc<dyn Holds>,
) -> anyhow::Result<Left> {
    serve(config, None, false, drain_state, wrap)
}

fn serve(
    config: Config,
    source: Option<Source>,
    upgrade: bool,
    drain_state: Arc<Drain>,
    wrap: impl FnOnce(Arc<dyn Holds>) -> Arc<dyn Holds>,
) -> anyhow::Result<Left> {
    let mut booted = boot::start(&config, upgrade)?;
    let fixed = Fixed::of(&config);
    let Config { listen, bounds, routing, drain, catalogue, data, .. } = config;
    drain_state.set_times(drain);
    let Inheritance { owner, mut sockets, line } = match booted.locks().owner.take() {
        Some(owner) => Inheritance { owner, sockets: Sockets::default(), line: None },
        None => handover::wait(&data)?,
    };
    let admin_socket = sockets.get("listen.admin", listen.admin)?;
    let http_socket = sockets.get("listen.http", listen.http)?;
    sockets.keep(&[listen.admin, listen.http]);

    let keys = std::mem::take(&mut booted.keys);
    let pool = Arc::new(Pool::new(Snapshot::new(catalogue, routing), keys));
    // A connection of its own: the ledger's thread keeps the one that it posts by.
    let reader = Sqlite::open(&ledger_file(&data)).context("cannot open the ledger")?;
    let live = books::Live::new(Arc::clone(&booted.store), Arc::clone(&pool), booted.boot);
    let books = Arc::new(Books::new(reader, Some(live)));
    let metrics = Arc::new(Metrics::new().context("metrics")?);
    let notify = Arc::new(Notify::from_env(upgrade));
    let gateway = Gateway {
        pool: Arc::clone(&pool),
        holds: wrap(Arc::<Embedded>::clone(&booted.store)),
        bodies: Bodies::new(bounds.bodies_bytes_max),
        bounds: Arc::new(ArcSwap::from_pointee(bounds)),
        books: Arc::clone(&books),
        keyed: Arc::default(),
        metrics,
        drain: Arc::clone(&drain_state),
    };
    let may_start_heirs = source.is_some();
    let reloader = source
        .map(|source| Arc::new(Reloader::new(source, fixed, follow(&gateway, &notify, status(listen.http)))));
    let serving = Arc::new(AtomicBool::new(false));
    let started = Arc::new(AtomicBool::new(false));
    let keeper = Keeper {
        store: Arc::clone(&booted.store),
        pool,
        http: listen.http,
        started: Arc::clone(&started),
        serving: Arc::clone(&serving),
        notify: Arc::clone(&notify),
        reloader: reloader.clone(),
        books: Arc::clone(&books),
        data: data.clone(),
    };
    let token = admin::token(&data, line.is_some()).context("cannot write the admin token")?;
    let (owner, orderly) = succession::come_into(owner, line, &data, &booted.store)?;
    // What was before us is looked after while we serve, by whoever has the lock.
    booted.locks().start = None;
    if upgrade {
        succession::settle_in(&owner, &books, &data, orderly);
    }
    let estate = Arc::new(Estate::new(&data, owner, sockets));
    let admin = tell(&gateway, booted.journal.clone(), serving, token, reloader);

    let entrance =
        Entrance { sockets: vec![(listen.http, http_socket)], notify: Arc::clone(&notify), started };
    let server =
        assemble(listen.threads, gateway, entrance, AdminService { admin, listener: admin_socket }, keeper);
    let drain = Arc::clone(&drain_state);
    run_apart(server, Watch { drain, notify, estate: Arc::clone(&estate), may_start_heirs })?;
    drain_state.wait_for_the_end();
    let cut = match estate.let_go() {
        Some(heir) => succession::leave_to(heir, &drain_state, &books, &booted.store),
        None => drain_state.wait(|| {}),
    };
    booted.stop();
    tracing::info!(cut, "left");
    Ok(if cut == 0 { Left::Drained } else { Left::Cut(cut) })
}

/// In a thread of its own: Pingora would sleep through its grace time when nothing is left to do.
fn run_apart(server: Server, watch: Watch) -> anyhow::Result<()> {
    let ended = Arc::clone(&watch.drain);
    let run = move || {
        server.run(RunArgs { shutdown_signal: Box::new(watch) });
        ended.over();
    };
    std::thread::Builder::new()
        .name("pingora".to_owned())
        .spawn(run)
        .context("cannot start Pingora's thread")?;
    Ok(())
}

/// Pingora's services around all that.
fn assemble(
    threads: usize,
    gateway: Gateway,
    entrance: Entrance,
    admin: AdminService,
    keeper: Keeper,
) -> Server {
    let mut server = Server::new_with_opt_and_conf(None, server_conf(threads));
    server.bootstrap();
    let drain = Arc::clone(&gateway.drain);
    let app = Patient { app: Arc::new(http_proxy(&server.configuration, gateway)), drain };
    let mut service = Service::new("gateway".to_owned(), app);
    for (address, _) in &entrance.sockets {
        service.add_tcp(&address.to_string());
    }
    server.add_service(Front { service, entrance });
    server.add_service(background_service("admin", admin));
    server.add_service(background_service("keeper", keeper));
    server
}

/// What follows a config that is read anew.
fn follow(gateway: &Gateway, notify: &Arc<Notify>, status: String) -> Live {
    Live {
        pool: Arc::clone(&gateway.pool),
        books: Arc::clone(&gateway.books),
        bounds: Arc::clone(&gateway.bounds),
        bodies: Arc::clone(&gateway.bodies),
        drain: Arc::clone(&gateway.drain),
        metrics: Arc::clone(&gateway.metrics),
        notify: Arc::clone(notify),
        status,
    }
}

/// What the admin port tells about.
fn tell(
    gateway: &Gateway,
    journal: Journal,
    serving: Arc<AtomicBool>,
    token: Arc<str>,
    reloader: Option<Arc<Reloader>>,
) -> Admin {
    Admin {
        metrics: Arc::clone(&gateway.metrics),
        drain: Arc::clone(&gateway.drain),
        pool: Arc::clone(&gateway.pool),
        holds: Arc::clone(&gateway.holds),
        journal,
        serving,
        bodies: Arc::clone(&gateway.bodies),
        books: Arc::clone(&gateway.books),
        token,
        reloader,
    }
}

fn status(http: SocketAddr) -> String {
    format!("serving on {http}")
}

fn server_conf(threads: usize) -> ServerConf {
    ServerConf {
        threads,
        // The planner counts; this only has to be larger. One more for a re-sent request.
        max_retries: ATTEMPTS_MAX + 2,
        // The drain is ours (see `drain`) and ends earlier than this.
        grace_period_seconds: Some(GRACE_SECONDS),
        graceful_shutdown_timeout_seconds: Some(0),
        upstream_keepalive_pool_size: 512,
        ..ServerConf::default()
    }
}

struct AdminService {
    admin: Admin,
    listener: TcpListener,
}

#[async_trait]
impl BackgroundService for AdminService {
    /// Goes on while the process drains: who watches it wants to know how far it is.
    async fn start(&self, _shutdown: ShutdownWatch) {
        let listener = self.listener.try_clone().and_then(tokio::net::TcpListener::from_std);
        let listener = match listener {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "the admin port cannot be served");
                return;
            }
        };
        // Goes on while the process drains, unless another one answers on the port.
        let mut handing = self.admin.drain.handing();
        let handed = async move {
            let _ended = handing.wait_for(|handing| *handing).await;
        };
        let serve = axum::serve(listener, admin::router(self.admin.clone())).with_graceful_shutdown(handed);
        if let Err(error) = serve.await {
            tracing::error!(%error, "the admin port broke");
        }
    }
}

/// Periodic work off the request path.
struct Keeper {
    store: Arc<Embedded>,
    pool: Arc<Pool>,
    http: SocketAddr,
    started: Arc<AtomicBool>,
    serving: Arc<AtomicBool>,
    notify: Arc<Notify>,
    reloader: Option<Arc<Reloader>>,
    books: Arc<Books>,
    data: PathBuf,
}

#[async_trait]
impl BackgroundService for Keeper {
    /// Goes on while the process drains: dropped holds still have to be settled.
    async fn start(&self, _shutdown: ShutdownWatch) {
        tokio::select! {
            () = self.sweep() => {}
            () = self.look_up() => {}
            () = self.announce() => {}
            () = self.reload() => {}
            () = self.look_back() => {}
        }
    }
}

impl Keeper {
    async fn sweep(&self) {
        let mut tick = tokio::time::interval(SWEEP);
        loop {
            tick.tick().await;
            self.store.sweep();
        }
    }

    /// Says once that a name cannot be looked up, and once that it can be again.
    async fn look_up(&self) {
        let mut unknown: HashSet<String> = HashSet::new();
        let mut tick = tokio::time::interval(LOOKUP);
        loop {
            tick.tick().await;
            let snapshot = self.pool.load();
            for (endpoint, addresses) in snapshot.catalogue.endpoints.iter().zip(&snapshot.addresses) {
                let name = &endpoint.name;
                match addresses.refresh().await {
                    Ok(()) if unknown.remove(name) => {
                        tracing::info!(endpoint = name, "the address of an endpoint is known again");
                    }
                    Ok(()) => {}
                    Err(error) if unknown.insert(name.clone()) => {
                        tracing::warn!(%error, endpoint = name, "the address of an endpoint cannot be looked up");
                    }
                    Err(_) => {}
                }
            }
        }
    }

    /// Leases what processes before this one give back, and books what they leave, until none is there.
    async fn look_back(&self) {
        let mut tick = tokio::time::interval(LOOK_BACK);
        let (mut others, mut looks) = (true, 0_u64);
        while others {
            tick.tick().await;
            let (books, data) = (Arc::clone(&self.books), self.data.clone());
            match tokio::task::spawn_blocking(move || books.look_after_predecessors(&data)).await {
                Ok(Ok(still)) => others = still,
                Ok(Err(error)) => tracing::error!("boots before this one cannot be looked after: {error:#}"),
                Err(error) => tracing::error!(%error, "looking after boots before this one broke"),
            }
            looks += 1;
        }
        if looks > 1 {
            tracing::info!("no process before this one is left");
        }
        std::future::pending::<()>().await;
    }

    async fn reload(&self) {
        match &self.reloader {
            Some(reloader) => Arc::clone(reloader).watch().await,
            None => std::future::pending().await,
        }
    }

    /// Says that we serve when a connection to our own port really stands; then waits for ever.
    async fn announce(&self) {
        while !self.started.load(Ordering::Acquire)
            || tokio::net::TcpStream::connect(self.http).await.is_err()
        {
            tokio::time::sleep(SWEEP).await;
        }
        self.serving.store(true, Ordering::Release);
        self.notify.ready(&status(self.http));
        tracing::info!("{}", status(self.http));
        std::future::pending::<()>().await;
    }
}
