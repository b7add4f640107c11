//! The running gateway: Pingora's services around a booted store.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use async_trait::async_trait;
use pingora::server::configuration::ServerConf;
use pingora::server::{RunArgs, Server, ShutdownWatch};
use pingora::services::background::{BackgroundService, background_service};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::admin::{self, Admin};
use crate::books::{self, Books};
use crate::boot::{self, Booted};
use crate::config::Config;
use crate::config::checked::{Listen, Listener, OTHER_FILES};
use crate::drain::{Drain, Early, Watch};
use crate::edge::{self, Tls};
use crate::fleet::catalogue::Published;
use crate::front::{self, Entrance};
use crate::handover::{self, Estate, Inheritance, Sockets};
use crate::keeper::{self, Keeper};
use crate::ops::Metrics;
use crate::ops::notify::Notify;
use crate::ops::otlp::Exporter;
use crate::ops::tracker::node_name;
use crate::pool::{Pool, Snapshot};
use crate::proxy::{Bodies, Gateway};
use crate::record::recorder::Recorder;
use crate::record::{Home, Records};
use crate::reload::{Fixed, Live, Reloader, Source};
use crate::status::{self, StatusPage};
use crate::store::Holds;
use crate::{succession, watching};

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
    let early = Early::outlive_signals().context("signals cannot be handled")?;
    let how = How { source: Some(source), upgrade, early: Some(early) };
    serve(config, how, Arc::new(Drain::default()), |store| store)
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
    serve(config, How::default(), drain_state, wrap)
}

/// How it was started. By another program: with none of it.
#[derive(Default)]
struct How {
    /// The config is read anew from there.
    source: Option<Source>,
    /// It takes over from the process that serves now.
    upgrade: bool,
    early: Option<Early>,
}

#[expect(clippy::too_many_lines, reason = "one part after the other, each from those before it")]
fn serve(
    config: Config,
    how: How,
    drain_state: Arc<Drain>,
    wrap: impl FnOnce(Arc<dyn Holds>) -> Arc<dyn Holds>,
) -> anyhow::Result<Left> {
    let How { source, upgrade, early } = how;
    let listeners = open_files(&config.listen)?;
    let mut booted = boot::start(&config, upgrade)?;
    let fixed = Fixed::of(&config);
    let (keep, slo) = (config.keep, config.slo);
    let page = StatusPage::new(config.status.clone());
    let Config {
        listen,
        bounds,
        routing,
        drain,
        timers,
        catalogue,
        catalogue_of_fleet,
        data,
        collector,
        watching,
        ..
    } = config;
    let (published, catalogue) = match booted.fleet.as_ref().filter(|_| catalogue_of_fleet) {
        Some(node) => node.first_catalogue(&data, timers).map(|(found, parsed)| (Some(found), parsed))?,
        None => (None, catalogue),
    };
    drain_state.set_times(drain);
    let Inheritance { owner, mut sockets, line } = match booted.locks().owner.take() {
        Some(owner) => Inheritance { owner, sockets: Sockets::default(), line: None },
        None => handover::wait(&data)?,
    };
    let admin_socket = sockets.get("listen.admin", listen.admin)?;
    let doors = sockets.open(&listen)?;
    let first = listen.callers.first().map(|listener| listener.address).context("listen: nobody can call")?;
    raise_files_max(bounds.connections_max);

    let keys = std::mem::take(&mut booted.keys);
    let pool = Arc::new(Pool::new(Snapshot::new(catalogue, routing).context("providers")?, keys));
    let books = open_books(&mut booted, &pool, &data)?;
    let metrics = Arc::new(Metrics::new().context("metrics")?);
    let notify = Arc::new(Notify::from_env(upgrade));
    let home = home(&booted, &data);
    let recorder = Recorder::start(home.clone(), keep, slo, Arc::clone(&metrics))?;
    let node = node_name(listen.admin.port());
    let mut exporter = collector.map(|to| Exporter::new(to, node, Arc::clone(&metrics)));
    let telemetry = exporter.as_mut().map(Exporter::send_spans).transpose().context("telemetry")?.flatten();
    let gateway = Gateway {
        pool: Arc::clone(&pool),
        holds: wrap(Arc::clone(&booted.holds)),
        bodies: Bodies::new(bounds.bodies_bytes_max),
        bounds: Arc::new(ArcSwap::from_pointee(bounds)),
        books: Arc::clone(&books),
        keyed: Arc::default(),
        status: Arc::new(page),
        metrics,
        drain: Arc::clone(&drain_state),
        recorder: Arc::clone(&recorder),
        telemetry,
    };
    let records = Arc::new(open_records(&home)?);
    let certificates = listen.callers.iter().filter_map(|it| Some(it.tls.as_ref()?.cert.clone())).collect();
    let watch = watching::Watch::new(watching, &gateway, &booted, records, listen.admin.port(), certificates);
    let may_start_heirs = source.is_some();
    let live = follow(&gateway, &notify, keeper::status(first));
    let reloader =
        source.map(|source| read_anew(Reloader::new(source, timers, fixed, live), published, &booted, &data));
    let [serving, started] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let fields = listen.callers.iter().map(|listener| listener.field).zip(&listeners);
    let certificates: Vec<(&'static str, Arc<Tls>)> =
        fields.filter_map(|(field, listener)| Some((field, listener.tls.clone()?))).collect();
    let keeper = Keeper {
        store: Arc::clone(&booted.store),
        pool: Arc::clone(&pool),
        first,
        certificates: certificates.iter().map(|(_, certificate)| Arc::clone(certificate)).collect(),
        started: Arc::clone(&started),
        serving: Arc::clone(&serving),
        notify: Arc::clone(&notify),
        reloader: reloader.clone(),
        books: Arc::clone(&books),
        data: data.clone(),
        took_over: upgrade,
    };
    let token = admin::token(&data, line.is_some()).context("cannot write the admin token")?;
    let (owner, orderly) = succession::come_into(owner, line, &data, &booted.store)?;
    // What was before us is looked after while we serve, by whoever has the lock.
    booted.locks().start = None;
    if upgrade {
        succession::settle_in(&owner, &books, &data, orderly);
    }
    let estate = Arc::new(Estate::new(&data, owner, sockets));
    let status = watch_status(&gateway, &booted);
    let shown = Shown { serving, token, certificates, data, status: Arc::clone(&status) };
    let admin = tell(&gateway, &booted, shown, reloader);
    if let Some(exporter) = &mut exporter {
        let admin = admin.clone();
        exporter.send_metrics(move || admin.gather()).context("telemetry")?;
    }

    let entrance = Entrance { sockets: doors, listeners, notify: Arc::clone(&notify), started };
    let mut server = server(listen.threads, &gateway, entrance);
    add_background(&mut server, AdminService { admin, listener: admin_socket }, keeper, status);
    server.add_service(background_service("watch", watch));
    let drain = Arc::clone(&drain_state);
    let early = Mutex::new(early);
    run_apart(server, Watch { drain, notify, estate: Arc::clone(&estate), may_start_heirs, early })?;
    let left = run_to_the_end(booted, &drain_state, &estate, &books, &recorder);
    if let Some(exporter) = exporter {
        exporter.stop();
    }
    Ok(left)
}

/// The books of a running gateway, and what follows them on other nodes.
fn open_books(booted: &mut Booted, pool: &Arc<Pool>, data: &Path) -> anyhow::Result<Arc<Books>> {
    if let Some(node) = &booted.fleet {
        node.share(pool, data);
    }
    let reader = booted.reader.take().context("the ledger cannot be asked")?;
    let others = booted.fleet.clone().map(|node| -> Arc<dyn books::Fleet> { node });
    let live = books::Live::new(Arc::clone(&booted.store), Arc::clone(pool), booted.boot, others);
    Ok(Arc::new(Books::new(reader, Some(live))))
}

/// Whoever reads the config anew, and takes over what the fleet publishes.
fn read_anew(
    reloader: Reloader,
    published: Option<Published>,
    booted: &Booted,
    data: &Path,
) -> Arc<Reloader> {
    let reloader = Arc::new(match published {
        Some(published) => reloader.with_catalogue(published),
        None => reloader,
    });
    if let Some(node) = &booted.fleet {
        node.follow_catalogue(&reloader, data);
    }
    reloader
}

/// Pingora, with the public service.
fn server(threads: usize, gateway: &Gateway, entrance: Entrance) -> Server {
    let mut server = Server::new_with_opt_and_conf(None, server_conf());
    server.bootstrap();
    for front in front::services(&server.configuration, threads, gateway, entrance) {
        server.add_service(front);
    }
    server
}

/// What runs beside the public service.
fn add_background(server: &mut Server, admin: AdminService, keeper: Keeper, watch: Arc<status::Watch>) {
    server.add_service(background_service("admin", admin));
    server.add_service(background_service("keeper", keeper));
    server.add_service(background_service("status", StatusService(watch)));
}

/// Whoever makes the status page.
fn watch_status(gateway: &Gateway, booted: &Booted) -> Arc<status::Watch> {
    Arc::new(status::Watch {
        page: Arc::clone(&gateway.status),
        pool: Arc::clone(&gateway.pool),
        home: gateway.recorder.home.clone(),
        fleet: booted.fleet.clone().map(|node| -> Arc<dyn books::Fleet> { node }),
        metrics: Arc::clone(&gateway.metrics),
        goal: gateway.recorder.slo.availability,
        seen: status::Seen::default(),
    })
}

/// Waits until the process may leave, hands over what is to be handed over, and closes the books.
fn run_to_the_end(
    booted: Booted,
    drain: &Drain,
    estate: &Estate,
    books: &Arc<Books>,
    recorder: &Recorder,
) -> Left {
    drain.wait_for_the_end();
    let cut = match estate.let_go() {
        Some(heir) => succession::leave_to(heir, drain, books, &booted.store),
        None => {
            // A request may be on its way that is not in flight yet.
            drain.wait_for_quiet();
            drain.wait(|| {})
        }
    };
    recorder.stop();
    booted.stop();
    tracing::info!(cut, "left");
    if cut == 0 { Left::Drained } else { Left::Cut(cut) }
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

/// What follows a config that is read anew.
fn follow(gateway: &Gateway, notify: &Arc<Notify>, status: String) -> Live {
    Live {
        pool: Arc::clone(&gateway.pool),
        books: Arc::clone(&gateway.books),
        bounds: Arc::clone(&gateway.bounds),
        bodies: Arc::clone(&gateway.bodies),
        drain: Arc::clone(&gateway.drain),
        metrics: Arc::clone(&gateway.metrics),
        status_page: Arc::clone(&gateway.status),
        notify: Arc::clone(notify),
        status,
    }
}

/// What only the admin port has to know.
struct Shown {
    serving: Arc<AtomicBool>,
    token: Arc<str>,
    certificates: Vec<(&'static str, Arc<Tls>)>,
    data: PathBuf,
    status: Arc<status::Watch>,
}

/// What the admin port tells about.
fn tell(gateway: &Gateway, booted: &Booted, shown: Shown, reloader: Option<Arc<Reloader>>) -> Admin {
    let Shown { serving, token, certificates, data, status } = shown;
    Admin {
        metrics: Arc::clone(&gateway.metrics),
        drain: Arc::clone(&gateway.drain),
        pool: Arc::clone(&gateway.pool),
        holds: Arc::clone(&gateway.holds),
        journal: booted.journal.clone(),
        serving,
        bodies: Arc::clone(&gateway.bodies),
        books: Arc::clone(&gateway.books),
        token,
        reloader,
        fleet: booted.fleet.clone(),
        recorder: Arc::clone(&gateway.recorder),
        store: Arc::clone(&booted.store),
        progress: Arc::clone(&booted.progress),
        bounds: Arc::clone(&gateway.bounds),
        certificates,
        data,
        status,
    }
}

/// For what is kept of probes and jobs. Nobody serves the worse for want of it.
fn open_records(home: &Home) -> anyhow::Result<Records> {
    home.open().or_else(|error| {
        tracing::error!(%error, "what comes of probes and jobs is not kept: records.db cannot be opened");
        Records::in_memory().context("records")
    })
}

/// Where records are: beside the ledger.
fn home(booted: &Booted, data: &Path) -> Home {
    match &booted.fleet {
        Some(node) => Home::Fleet(node.ledger().for_people()),
        None => Home::Folder(data.to_owned()),
    }
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

fn server_conf() -> ServerConf {
    ServerConf {
        // Of each service; the public one is many of them (see `front`).
        threads: 1,
        work_stealing: false,
        // The planner counts; this only has to be larger. Every attempt may be sent twice.
        max_retries: 2 * ATTEMPTS_MAX + 2,
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

/// Makes the status page, as long as anybody may ask for it.
struct StatusService(Arc<status::Watch>);

#[async_trait]
impl BackgroundService for StatusService {
    async fn start(&self, _shutdown: ShutdownWatch) {
        Arc::clone(&self.0).run().await;
    }
}
