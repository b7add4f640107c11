//! The running gateway: Pingora's services around a booted store.

use std::collections::{HashMap, HashSet};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_trait::async_trait;
use pingora::apps::HttpServerOptions;
use pingora::listeners::{L4BufferSettings, ListenerConfig};
use pingora::protocols::http::v2::server::{H2Options, default_h2_options};
use pingora::server::configuration::ServerConf;
use pingora::server::{RunArgs, Server, ShutdownWatch};
use pingora::services::background::{BackgroundService, background_service};
use pingora::services::listening::Service;
use pingora_proxy::{HttpProxy, http_proxy};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::admin::{self, Admin};
use crate::books::{self, Books};
use crate::boot::{self, ledger_file};
use crate::clock;
use crate::config::Config;
use crate::config::checked::{Bounds, Listen, Listener};
use crate::drain::{Drain, Watch};
use crate::edge::{self, Connections, Door, Tls};
use crate::ledger::Sqlite;
use crate::ops::Metrics;
use crate::pool::{Pool, Snapshot};
use crate::proxy::{self, Bodies, Gateway, Warmer};
use crate::store::{Embedded, Holds};

/// How often holds of dropped requests are settled. Every admission does it too, so no money is missed meanwhile.
const SWEEP: Duration = Duration::from_millis(50);
/// How often the addresses of endpoints are looked up.
const LOOKUP: Duration = Duration::from_secs(30);
/// How often a node that reaches nobody tries again.
const REACH_OUT: Duration = Duration::from_secs(1);
/// How often to look whether a check is due.
const CHECK_LOOK: Duration = Duration::from_millis(500);
/// How often files with credentials are read.
const REREAD: Duration = Duration::from_secs(1);
/// How often it is looked whether certificates have changed.
const LOOK_AT_CERTIFICATES: Duration = Duration::from_secs(1);
/// Between a caller's socket and its reader, which has a buffer of its own: enough for what the door looks at.
/// Pingora's default of 64 KiB is most of what an idle connection costs.
const READ_BUFFER_BYTES: usize = 4 << 10;
/// The head of an answer and a small body behind it go out in one write; Pingora's default is 1460.
const WRITE_BUFFER_BYTES: usize = 4 << 10;
/// Open files that the process needs beside connections and their upstreams'.
const OTHER_FILES: u64 = 256;
/// What a caller may send on one stream of HTTP/2 before we have read it: uploads do not wait for us on a
/// path of 100 ms until they are faster than 10 MB/s.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// And on all streams of a connection; no caller can make us keep more.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// By how many seconds Pingora's grace time is longer than the longest drain.
const GRACE_MORE: u64 = 60;

/// Serves until a signal says otherwise.
///
/// # Errors
/// When the store cannot start or an address cannot be bound.
pub fn run(config: Config) -> anyhow::Result<()> {
    run_with(config, Arc::new(Drain::default()), |store| store)
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
) -> anyhow::Result<()> {
    let listeners = open_files(&config.listen)?;
    let mut booted = boot::start(&config)?;
    let Config { listen, bounds, routing, drain, catalogue, data, .. } = config;
    let admin_listener = TcpListener::bind(listen.admin)
        .with_context(|| format!("cannot bind listen.admin {}", listen.admin))?;
    // Pingora binds later and would panic: find out now.
    for Listener { field, address, .. } in &listen.callers {
        drop(TcpListener::bind(address).with_context(|| format!("cannot bind {field} {address}"))?);
    }
    let certificates: Vec<_> = listeners.iter().filter_map(|listener| listener.tls.clone()).collect();
    let first = listen.callers.first().map(|listener| listener.address).context("listen: nobody can call")?;
    raise_files_max(bounds.connections_max);

    let keys = std::mem::take(&mut booted.keys);
    let pool = Arc::new(Pool::new(Snapshot::new(catalogue, routing).context("providers")?, keys));
    // A connection of its own: the ledger's thread keeps the one that it posts by.
    let reader = Sqlite::open(&ledger_file(&data)).context("cannot open the ledger")?;
    let books = Arc::new(Books::new(
        reader,
        Some(books::Live { store: Arc::clone(&booted.store), pool: Arc::clone(&pool), boot: booted.boot }),
    ));
    let metrics = Arc::new(Metrics::new().context("metrics")?);
    let holds = wrap(Arc::<Embedded>::clone(&booted.store));

    let warmer = Arc::new(Warmer::default());
    let gateway = Gateway {
        pool: Arc::clone(&pool),
        holds: Arc::clone(&holds),
        bodies: Bodies::new(bounds.bodies_bytes_max),
        bounds,
        books: Arc::clone(&books),
        keyed: Arc::default(),
        warmer: Arc::clone(&warmer),
        metrics: Arc::clone(&metrics),
        drain: Arc::clone(&drain_state),
    };
    let serving = Arc::new(AtomicBool::new(false));
    let admin = Admin {
        metrics,
        drain: Arc::clone(&drain_state),
        pool: Arc::clone(&pool),
        holds,
        journal: booted.journal.clone(),
        serving: Arc::clone(&serving),
        bodies: Arc::clone(&gateway.bodies),
        books: Arc::clone(&books),
        token: admin::token(&data).context("cannot write the admin token")?,
    };

    let mut server =
        Server::new_with_opt_and_conf(None, server_conf(listen.threads, routing.attempts_max, drain.max));
    server.bootstrap();
    server.add_service(listening(&listen, door(&server.configuration, gateway, listeners)));
    admin_listener.set_nonblocking(true)?;
    server.add_service(background_service("admin", AdminService { admin, listener: admin_listener }));
    let warm_pool = Arc::clone(&pool);
    let keeper = Keeper { store: Arc::clone(&booted.store), pool, first, certificates, serving };
    server.add_service(background_service("keeper", keeper));
    let warm = Warm { warmer, pool: warm_pool, drain: Arc::clone(&drain_state) };
    server.add_service(background_service("warmer", warm));
    let watch = Watch { drain: Arc::clone(&drain_state), pre: drain.pre };
    let ended = Arc::clone(&drain_state);
    let served = std::thread::Builder::new().name("pingora".to_owned()).spawn(move || {
        server.run(RunArgs { shutdown_signal: Box::new(watch) });
        ended.over();
    });
    served.context("cannot start Pingora's thread")?;
    drain_state.wait(drain.max);
    booted.stop();
    tracing::info!("left");
    Ok(())
}

/// The door, at every address of the config.
fn listening(listen: &Listen, door: Door<HttpProxy<Gateway>>) -> Service<Door<HttpProxy<Gateway>>> {
    let mut service = Service::new("gateway".to_owned(), door);
    for listener in &listen.callers {
        let buffers = L4BufferSettings::default().read(READ_BUFFER_BYTES).write(WRITE_BUFFER_BYTES);
        service.add_listener(ListenerConfig::tcp(listener.address.to_string()).l4_buffer(buffers));
    }
    service
}

/// The door, and behind it Pingora's proxy.
fn door(
    conf: &Arc<ServerConf>,
    gateway: Gateway,
    listeners: Vec<edge::Listener>,
) -> Door<HttpProxy<Gateway>> {
    let metrics = Arc::clone(&gateway.metrics);
    let bounds = &gateway.bounds;
    let (head_timeout, write_timeout) = (bounds.head_timeout, bounds.write_timeout);
    let requests_max = bounds.requests_per_connection_max;
    let per_address_max = bounds.connections_per_address_max;
    let connections = Connections::new(bounds.connections_max, per_address_max, metrics.connections.clone());
    let mut options = HttpServerOptions::default();
    options.h2_idle_timeout = Some(bounds.keepalive);
    // Not to serve it: our own door refuses it, in words that callers read.
    options.allow_connect_method_proxying = true;
    let http2 = http2(bounds);
    let mut proxy = http_proxy(conf, gateway);
    proxy.server_options = Some(options);
    proxy.h2_options = Some(http2);
    Door {
        app: Arc::new(proxy),
        listeners,
        connections,
        metrics,
        head_timeout,
        write_timeout,
        requests_max,
        refusal: proxy::unreadable,
    }
}

/// What callers of HTTP/2 may do. The rest of its bounds are the crate `h2`'s: 20 streams that were reset before
/// we saw them, 1024 errors of ours, as many CONTINUATION frames as the header list needs.
fn http2(bounds: &Bounds) -> H2Options {
    let mut options = default_h2_options();
    // Above it h2 answers a bare 431 by itself; our own bound, with its words, is half of it.
    let list_max = u32::try_from(bounds.head_bytes_max.saturating_mul(2)).unwrap_or(u32::MAX);
    options
        .max_header_list_size(list_max)
        .max_concurrent_streams(bounds.http2_streams_max)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    options
}

/// Reads what listeners need before they are bound.
fn open_files(listen: &Listen) -> anyhow::Result<Vec<edge::Listener>> {
    let open = |listener: &Listener| {
        let Listener { field: _, address, tls, h2c, proxy_protocol } = listener.clone();
        let tls = tls.map(|files| Tls::load(&files)).transpose()?.map(Arc::new);
        Ok(edge::Listener { address, tls, h2c, proxy_protocol })
    };
    listen.callers.iter().map(open).collect()
}

/// Lets the process open as many files as the connections need, as far as the system allows: the usual 1024 are
/// a limit for programs that use `select`.
fn raise_files_max(connections_max: usize) {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
    // A connection of a caller, and one to an upstream.
    let wanted =
        u64::try_from(connections_max).unwrap_or(u64::MAX).saturating_mul(2).saturating_add(OTHER_FILES);
    let files_max = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if files_max < wanted {
        tracing::warn!(
            files_max,
            wanted,
            "the process may open fewer files than bounds.connections_max needs: raise the limit (`ulimit -Hn`, or LimitNOFILE in systemd)"
        );
    }
}

fn server_conf(threads: usize, attempts_max: u32, drain_max: Duration) -> ServerConf {
    ServerConf {
        threads,
        // One thread has nobody to steal from, and does without the locks for it.
        work_stealing: threads > 1,
        // The planner counts; this only has to be larger. Every attempt may be sent twice.
        max_retries: 2 * usize::try_from(attempts_max).unwrap_or(5) + 2,
        // The drain is ours (see `drain`) and ends earlier than this.
        grace_period_seconds: Some(drain_max.as_secs() + GRACE_MORE),
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
        let serve = axum::serve(listener, admin::router(self.admin.clone()));
        if let Err(error) = serve.await {
            tracing::error!(%error, "the admin port broke");
        }
    }
}

/// Opens connections ahead of need.
struct Warm {
    warmer: Arc<Warmer>,
    pool: Arc<Pool>,
    drain: Arc<Drain>,
}

#[async_trait]
impl BackgroundService for Warm {
    async fn start(&self, _shutdown: ShutdownWatch) {
        Arc::clone(&self.warmer).run(Arc::clone(&self.pool), Arc::clone(&self.drain)).await;
    }
}

/// Periodic work off the request path.
struct Keeper {
    store: Arc<Embedded>,
    pool: Arc<Pool>,
    /// Where callers connect.
    first: SocketAddr,
    certificates: Vec<Arc<Tls>>,
    serving: Arc<AtomicBool>,
}

#[async_trait]
impl BackgroundService for Keeper {
    /// Goes on while the process drains: dropped holds still have to be settled.
    async fn start(&self, _shutdown: ShutdownWatch) {
        tokio::select! {
            () = self.sweep() => {}
            () = self.look_up() => {}
            () = self.reach_out() => {}
            () = self.reread_credentials() => {}
            () = self.check() => {}
            () = self.announce() => {}
            () = self.renew() => {}
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

    /// Shows a certificate that was renewed.
    async fn renew(&self) {
        let mut tick = tokio::time::interval(LOOK_AT_CERTIFICATES);
        loop {
            tick.tick().await;
            for certificate in &self.certificates {
                certificate.look_again();
            }
        }
    }

    /// Says once that a name cannot be looked up, and once that it can be again.
    async fn look_up(&self) {
        let mut unknown: HashSet<String> = HashSet::new();
        let mut tick = tokio::time::interval(LOOKUP);
        loop {
            tick.tick().await;
            let snapshot = self.pool.load();
            for (provider, addresses) in snapshot.providers() {
                let name = &provider.name;
                match addresses.refresh().await {
                    Ok(()) if unknown.remove(name) => {
                        tracing::info!(provider = name, "the address of a provider is known again");
                    }
                    Ok(()) => {}
                    Err(error) if unknown.insert(name.clone()) => {
                        tracing::warn!(%error, provider = name, "the address of a provider cannot be looked up");
                    }
                    Err(_) => {}
                }
            }
        }
    }

    /// While this node is cut off, tries whether it still is.
    async fn reach_out(&self) {
        let mut tick = tokio::time::interval(REACH_OUT);
        loop {
            tick.tick().await;
            let snapshot = self.pool.load();
            if snapshot.upstreams.is_cut_off() && snapshot.reach_somebody().await {
                tracing::info!("upstreams can be reached from this node again");
            }
        }
    }

    /// Asks providers whether they are well, where the config says how. Each is asked by itself: one that hangs
    /// keeps none of the others waiting, and is not asked again meanwhile.
    async fn check(&self) {
        let mut due: HashMap<String, Instant> = HashMap::new();
        let mut under_way: JoinSet<(String, bool)> = JoinSet::new();
        let mut asked: HashSet<String> = HashSet::new();
        let mut tick = tokio::time::interval(CHECK_LOOK);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                Some(ended) = under_way.join_next() => {
                    let Ok((provider, passed)) = ended else { continue };
                    if passed {
                        self.pool.load().check_passed(&provider);
                    }
                    asked.remove(&provider);
                }
            }
            let snapshot = self.pool.load();
            for (provider, addresses) in snapshot.providers() {
                let Some(check) = &provider.check else { continue };
                let now = clock::now();
                let is_due = due.get(&provider.name).is_none_or(|at| *at <= now);
                if is_due && asked.insert(provider.name.clone()) {
                    due.insert(provider.name.clone(), now + check.every);
                    let (name, addresses) = (provider.name.clone(), Arc::clone(addresses));
                    under_way.spawn(async move { (name, addresses.check().await) });
                }
            }
        }
    }

    /// Takes credentials from their files when those change.
    async fn reread_credentials(&self) {
        let mut tick = tokio::time::interval(REREAD);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let snapshot = self.pool.load();
            // A file on a network's disk may take its time: nobody else waits for it.
            let reading = tokio::task::spawn_blocking(move || snapshot.reread_credentials());
            if let Err(error) = reading.await {
                tracing::error!(%error, "credentials could not be read again");
            }
        }
    }

    /// Says that we serve when a connection to our own port really stands; then waits for ever.
    async fn announce(&self) {
        while tokio::net::TcpStream::connect(self.first).await.is_err() {
            tokio::time::sleep(SWEEP).await;
        }
        self.serving.store(true, Ordering::Release);
        tracing::info!(http = %self.first, "serving");
        std::future::pending::<()>().await;
    }
}
