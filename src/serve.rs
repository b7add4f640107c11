//! The running gateway: Pingora's services around a booted store.

use std::collections::{HashMap, HashSet};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_trait::async_trait;
use pingora::server::configuration::ServerConf;
use pingora::server::{RunArgs, Server, ShutdownWatch};
use pingora::services::background::{BackgroundService, background_service};
use pingora_proxy::ProxyServiceBuilder;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::admin::{self, Admin};
use crate::books::{self, Books};
use crate::boot::{self, ledger_file};
use crate::clock;
use crate::config::Config;
use crate::drain::{Drain, Watch};
use crate::ledger::Sqlite;
use crate::ops::Metrics;
use crate::pool::{Pool, Snapshot};
use crate::proxy::{Bodies, Gateway, Warmer};
use crate::store::{Embedded, Holds};

/// How often holds of dropped requests are settled.
const SWEEP: Duration = Duration::from_millis(10);
/// How often the addresses of endpoints are looked up.
const LOOKUP: Duration = Duration::from_secs(30);
/// How often a node that reaches nobody tries again.
const REACH_OUT: Duration = Duration::from_secs(1);
/// How often to look whether a check is due.
const CHECK_LOOK: Duration = Duration::from_millis(500);
/// How often files with credentials are read.
const REREAD: Duration = Duration::from_secs(1);
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
    let mut booted = boot::start(&config)?;
    let Config { listen, bounds, routing, drain, catalogue, data, .. } = config;
    let admin_listener = TcpListener::bind(listen.admin)
        .with_context(|| format!("cannot bind listen.admin {}", listen.admin))?;
    // Pingora binds later and would panic: find out now.
    drop(TcpListener::bind(listen.http).with_context(|| format!("cannot bind listen.http {}", listen.http))?);

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
    let mut proxy = ProxyServiceBuilder::new(&server.configuration, gateway).name("gateway").build();
    proxy.add_tcp(&listen.http.to_string());
    server.add_service(proxy);
    admin_listener.set_nonblocking(true)?;
    server.add_service(background_service("admin", AdminService { admin, listener: admin_listener }));
    let warm_pool = Arc::clone(&pool);
    let keeper = Keeper { store: Arc::clone(&booted.store), pool, http: listen.http, serving };
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

fn server_conf(threads: usize, attempts_max: u32, drain_max: Duration) -> ServerConf {
    ServerConf {
        threads,
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
    http: SocketAddr,
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
        while tokio::net::TcpStream::connect(self.http).await.is_err() {
            tokio::time::sleep(SWEEP).await;
        }
        self.serving.store(true, Ordering::Release);
        tracing::info!(http = %self.http, "serving");
        std::future::pending::<()>().await;
    }
}
