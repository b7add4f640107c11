//! The public service, with what Pingora's own lacks.
//!
//! A heartbeat on the proxy's own threads: each of Pingora's services has a runtime of its own, so that an
//! answering admin port says nothing of calls. While the proxy's threads turn, a service manager that
//! asked for it (`WATCHDOG_USEC`) is told so; when they are stuck it is not, and restarts us.
//!
//! Listening sockets that were bound before, or handed over by another process; every one of them is a door of
//! [`edge`], with what HTTP/2 may do there.
//!
//! Patience when another process takes over: Pingora would drop every connection that has not sent its
//! request yet at the moment when it stops accepting, also one that came a microsecond before.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::IntoRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use pingora::apps::{HttpServerOptions, ServerApp};
use pingora::listeners::{L4BufferSettings, ListenerConfig};
use pingora::protocols::Stream;
use pingora::protocols::http::v2::server::{H2Options, default_h2_options};
use pingora::server::configuration::ServerConf;
use pingora::server::{ListenFds, ShutdownWatch};
use pingora::services::listening::Service;
use pingora_proxy::{HttpProxy, http_proxy};
use tokio::sync::watch;

use crate::config::checked::Bounds;
use crate::drain::Drain;
use crate::edge::{self, Connections, Door};
use crate::ops::notify::Notify;
use crate::proxy::{self, Gateway};

/// Between a caller's socket and its reader, for the few bytes that the door looks at one by one; whoever reads
/// more at once reads past it. Pingora's default of 64 KiB is most of what an idle connection costs.
const READ_BUFFER_BYTES: usize = 256;
/// What is written waits in our own buffer, which is there only as long as it does (`edge::line`).
const WRITE_BUFFER_BYTES: usize = 0;
/// What a caller may send on one stream of HTTP/2 before we have read it: uploads do not wait for us on a
/// path of 100 ms until they are faster than 10 MB/s.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// And on all streams of a connection; no caller can make us keep more.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// A service of Pingora's that has a heartbeat and listens on sockets that are there already.
pub struct Front<S> {
    pub service: S,
    pub entrance: Entrance,
}

/// Where callers come in.
pub struct Entrance {
    /// By the addresses that the service listens at; they go to Pingora when it starts.
    pub sockets: Vec<(SocketAddr, TcpListener)>,
    pub notify: Arc<Notify>,
    /// Turns true when it accepts.
    pub started: Arc<AtomicBool>,
}

/// An application of Pingora's that lets connections linger.
pub struct Patient<A> {
    pub app: Arc<A>,
    pub drain: Arc<Drain>,
}

#[async_trait]
impl<A: ServerApp + Send + Sync + 'static> ServerApp for Patient<A> {
    async fn process_new(self: &Arc<Self>, session: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        self.app.process_new(session, shutdown).await
    }

    /// Called when nothing is accepted any more.
    async fn cleanup(&self) {
        self.drain.linger().await;
        self.app.cleanup().await;
        self.drain.be_quiet();
    }
}

#[async_trait]
impl<S: pingora::services::Service> pingora::services::Service for Front<S> {
    async fn start_service(
        &mut self,
        fds: Option<ListenFds>,
        shutdown: ShutdownWatch,
        listeners_per_fd: usize,
    ) {
        let Entrance { sockets, notify, started } = &mut self.entrance;
        if let Some(fds) = &fds {
            for (address, socket) in sockets.drain(..) {
                fds.lock().add(address.to_string(), socket.into_raw_fd());
            }
        }
        started.store(true, Ordering::Release);
        // The heart beats until the runtime ends: calls go on after the listeners have closed.
        let serve = self.service.start_service(fds, shutdown, listeners_per_fd);
        futures::future::join(serve, beat(notify)).await;
    }

    fn name(&self) -> &str {
        self.service.name()
    }

    fn threads(&self) -> Option<usize> {
        self.service.threads()
    }

    fn listen_addresses(&self) -> Option<Vec<String>> {
        self.service.listen_addresses()
    }
}

/// The public service: a door at every socket of the entrance, and Pingora's proxy behind them.
#[must_use]
pub fn service(
    conf: &Arc<ServerConf>,
    gateway: Gateway,
    listeners: Vec<edge::Listener>,
    entrance: Entrance,
) -> Front<Service<Patient<Door<HttpProxy<Gateway>>>>> {
    let drain = Arc::clone(&gateway.drain);
    let app = Patient { app: Arc::new(door(conf, gateway, listeners)), drain };
    let mut service = Service::new("gateway".to_owned(), app);
    for (address, _) in &entrance.sockets {
        let buffers = L4BufferSettings::default().read(READ_BUFFER_BYTES).write(WRITE_BUFFER_BYTES);
        service.add_listener(ListenerConfig::tcp(address.to_string()).l4_buffer(buffers));
    }
    Front { service, entrance }
}

/// The door, and behind it Pingora's proxy.
fn door(
    conf: &Arc<ServerConf>,
    gateway: Gateway,
    listeners: Vec<edge::Listener>,
) -> Door<HttpProxy<Gateway>> {
    let metrics = Arc::clone(&gateway.metrics);
    let live_bounds = Arc::clone(&gateway.bounds);
    let bounds = live_bounds.load_full();
    let per_address_max = bounds.connections_per_address_max;
    let connections = Connections::new(bounds.connections_max, per_address_max, metrics.connections.clone());
    let mut options = HttpServerOptions::default();
    options.h2_idle_timeout = Some(bounds.keepalive);
    // Not to serve it: our own door refuses it, in words that callers read.
    options.allow_connect_method_proxying = true;
    let http2 = http2(&bounds);
    let mut proxy = http_proxy(conf, gateway);
    proxy.server_options = Some(options);
    proxy.h2_options = Some(http2);
    Door {
        app: Arc::new(proxy),
        listeners,
        connections,
        metrics,
        bounds: live_bounds,
        refusal: proxy::unreadable,
        closing: watch::Sender::new(false),
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

async fn beat(notify: &Notify) {
    let Some(every) = notify.heartbeat() else { return };
    let mut tick = tokio::time::interval(every);
    loop {
        tick.tick().await;
        notify.alive();
    }
}
