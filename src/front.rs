//! The public service: as many of Pingora's services as there are threads that serve, of one thread each.
//!
//! Each has a door of [`edge`] and the gateway behind it, with connections to upstreams of its own, and whoever keeps
//! some of them warm; the first has the doorman too, who gives connections to all of them (`edge/doorman` says why).
//!
//! A heartbeat on these threads: each of Pingora's services has a runtime of its own, so that an
//! answering admin port says nothing of calls. While all of them turn, a service manager that
//! asked for it (`WATCHDOG_USEC`) is told so; when one is stuck it is not, and restarts us.
//!
//! Patience at the end: Pingora would drop every connection that has not sent its request yet at the moment when it
//! stops accepting, also one that came a microsecond before.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use pingora::apps::HttpServerOptions;
use pingora::connectors::ConnectorOptions;
use pingora::protocols::http::v2::server::{H2Options, default_h2_options};
use pingora::server::configuration::ServerConf;
use pingora::server::{ListenFds, ShutdownWatch};
use pingora::services::Service;
use tokio::sync::watch;

use crate::config::checked::Bounds;
use crate::edge::{self, Arrivals, Connections, Door, Doorman, Seat};
use crate::ops::notify::Notify;
use crate::pool::wire::Wires;
use crate::proxy::{self, App, Gateway, Warmer};

/// What a caller may send on one stream of HTTP/2 before we have read it: uploads do not wait for us on a
/// path of 100 ms until they are faster than 10 MB/s.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// And on all streams of a connection; no caller can make us keep more.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// Where callers come in.
pub struct Entrance {
    pub sockets: Vec<TcpListener>,
    pub listeners: Vec<edge::Listener>,
    pub notify: Arc<Notify>,
    /// Turns true when connections are accepted.
    pub started: Arc<AtomicBool>,
}

/// A thread that serves.
pub struct Front {
    conf: Arc<ServerConf>,
    gateway: Gateway,
    listeners: Arc<[edge::Listener]>,
    /// Taken by the start.
    arrivals: Option<Arrivals>,
    /// Of the first alone; taken by the start.
    doorman: Option<Doorman>,
    index: usize,
    connections: Arc<Connections>,
    crew: Arc<Crew>,
}

/// What the threads know of each other.
struct Crew {
    notify: Arc<Notify>,
    started: Arc<AtomicBool>,
    /// Which of them have turned since the last heartbeat.
    turned: Vec<AtomicBool>,
    /// How many still have connections that may send a request.
    open: AtomicUsize,
}

/// The public service on so many threads.
#[must_use]
pub fn services(conf: &Arc<ServerConf>, threads: usize, gateway: &Gateway, entrance: Entrance) -> Vec<Front> {
    let Entrance { sockets, listeners, notify, started } = entrance;
    let bounds = gateway.bounds.load_full();
    let metrics = Arc::clone(&gateway.metrics);
    let per_address_max = bounds.connections_per_address_max;
    let connections = Connections::new(bounds.connections_max, per_address_max, metrics.connections.clone());
    let listeners: Arc<[edge::Listener]> = listeners.into();
    let turned = (0..threads).map(|_| AtomicBool::new(false)).collect();
    let crew = Arc::new(Crew { notify, started, turned, open: AtomicUsize::new(threads) });
    let (seats, ends): (Vec<Seat>, Vec<Arrivals>) = (0..threads).map(|_| Seat::new()).unzip();
    let mut doorman = Some(Doorman { sockets, seats, connections: Arc::clone(&connections), metrics });
    let front = |(index, arrivals)| Front {
        conf: Arc::clone(conf),
        gateway: gateway.clone(),
        listeners: Arc::clone(&listeners),
        arrivals: Some(arrivals),
        doorman: doorman.take(),
        index,
        connections: Arc::clone(&connections),
        crew: Arc::clone(&crew),
    };
    ends.into_iter().enumerate().map(front).collect()
}

#[async_trait]
impl Service for Front {
    async fn start_service(&mut self, _fds: Option<ListenFds>, shutdown: ShutdownWatch, _per_fd: usize) {
        let Some(arrivals) = self.arrivals.take() else { return };
        // Made here, by each thread for itself: it reads what certificates the system trusts.
        let door = Arc::new(door(&self.conf, self.gateway.clone(), Arc::clone(&self.listeners)));
        let Gateway { pool, drain, .. } = &self.gateway;
        let warmer = Warmer::new(Arc::clone(&door.app.wires), Arc::clone(pool), Arc::clone(drain));
        let doorman = self.doorman.take();
        // The heart beats until the runtime ends: calls go on after the sockets have closed.
        futures::join!(
            self.serve(&door, arrivals, doorman, shutdown),
            warmer.run(),
            self.crew.beat(self.index)
        );
    }

    fn name(&self) -> &'static str {
        "gateway"
    }

    fn threads(&self) -> Option<usize> {
        Some(1)
    }
}

impl Front {
    /// Lets in who arrives, until nobody may any more.
    async fn serve(
        &self,
        door: &Arc<Door<App>>,
        mut arrivals: Arrivals,
        doorman: Option<Doorman>,
        shutdown: ShutdownWatch,
    ) {
        let accept = async {
            if let Some(doorman) = doorman {
                self.crew.started.store(true, Ordering::Release);
                doorman.run(shutdown.clone()).await;
            }
        };
        let let_in = async {
            while let Some(arrival) = arrivals.recv().await {
                door.let_in(arrival, &shutdown);
            }
        };
        futures::join!(accept, let_in);
        self.gateway.drain.linger(|| self.connections.count()).await;
        door.close();
        if self.crew.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.gateway.drain.be_quiet();
        }
    }
}

impl Crew {
    /// Says that all threads turn, as often as somebody wants to hear it.
    async fn beat(&self, index: usize) {
        let (Some(every), Some(own)) = (self.notify.heartbeat(), self.turned.get(index)) else { return };
        let mut tick = tokio::time::interval(every);
        loop {
            tick.tick().await;
            own.store(true, Ordering::Release);
            if self.turned.iter().all(|turned| turned.load(Ordering::Acquire)) {
                self.turned.iter().for_each(|turned| turned.store(false, Ordering::Release));
                self.notify.alive();
            }
        }
    }
}

/// The door, and behind it the gateway with connections to upstreams of its own.
fn door(conf: &ServerConf, gateway: Gateway, listeners: Arc<[edge::Listener]>) -> Door<App> {
    let metrics = Arc::clone(&gateway.metrics);
    let live_bounds = Arc::clone(&gateway.bounds);
    let bounds = live_bounds.load_full();
    let mut options = HttpServerOptions::default();
    options.h2_idle_timeout = Some(bounds.keepalive);
    // Not to serve it: our own door refuses it, in words that callers read.
    options.allow_connect_method_proxying = true;
    let closing = watch::Sender::new(false);
    let app = App {
        gateway,
        wires: Arc::new(Wires::new(ConnectorOptions::from_server_conf(conf))),
        options,
        http2: http2(&bounds),
        closing: closing.clone(),
    };
    Door { app: Arc::new(app), listeners, metrics, bounds: live_bounds, refusal: proxy::unreadable, closing }
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
