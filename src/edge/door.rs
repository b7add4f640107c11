//! The door: a socket that Pingora has accepted, on its way to the proxy.
//!
//! One way for all listeners: count it, hear whose it is, count it for its caller, shake hands or find
//! out the protocol, hand it to Pingora as a [`Line`]. All of it, with the first request's head behind
//! it, has one `bounds.head_timeout`.
//!
//! HTTP/2 without TLS is found out here too, by bytes that are put back: Pingora's own look at the
//! preface (`HttpServerOptions::h2c`) waits for 24 bytes without a limit, for callers of HTTP/1.1 too.
//!
//! The listeners belong to Pingora's `Service` as plain TCP, TLS or not. So its upgrade hands over all
//! of them under their addresses, and a certificate's change needs no new listener.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use pingora::apps::{HttpServerApp, ServerApp};
use pingora::protocols::l4::socket::SocketAddr as PingoraAddr;
use pingora::protocols::l4::stream::Stream as Socket;
use pingora::protocols::{ALPN, GetSocketDigest as _, IO, SocketDigest, Ssl as _, Stream};
use pingora::server::ShutdownWatch;
use tokio::io::AsyncReadExt as _;
use tokio::sync::watch;

use super::connections::Counted;
use super::line::{Instead, Line, Refusal};
use super::proxy_protocol::{self, Said};
use super::{Connection, Connections, Refused, Tls, requests};
use crate::clock;
use crate::config::checked::{Bounds, ProxyProtocol};
use crate::ops::Metrics;

/// How every connection of HTTP/2 begins (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Pingora counts the wait for a further request in whole seconds.
const KEEPALIVE_MIN: Duration = Duration::from_secs(1);

/// Lets connections in, to an app that speaks HTTP.
pub struct Door<A> {
    pub app: Arc<A>,
    pub listeners: Vec<Listener>,
    pub connections: Arc<Connections>,
    pub metrics: Arc<Metrics>,
    /// A connection keeps those that it began with.
    pub bounds: Arc<ArcSwap<Bounds>>,
    /// What is said to who speaks no HTTP/1.1.
    pub refusal: Refusal,
    /// Turns true when no request is waited for any more.
    pub closing: watch::Sender<bool>,
}

/// One of the addresses at which callers connect.
pub struct Listener {
    pub address: SocketAddr,
    pub tls: Option<Arc<Tls>>,
    pub h2c: bool,
    pub proxy_protocol: Option<ProxyProtocol>,
}

#[async_trait]
impl<A: HttpServerApp + Send + Sync + 'static> ServerApp for Door<A>
where
    Self: Send + Sync,
{
    /// Lets a connection in; its life is a task of its own. Pingora's has room for a handshake of TLS, and would
    /// keep 17 KiB for it as long as the connection lives.
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        match self.open(stream).await {
            Ok(line) => begin(live(Arc::clone(self), Box::new(line), shutdown.clone())),
            Err(why) => {
                self.metrics.connections_refused.with_label_values(&[why.word()]).inc();
                tracing::debug!(why = why.word(), "a connection was not let in");
            }
        }
        None
    }

    async fn cleanup(&self) {
        self.closing.send_replace(true);
        self.app.http_cleanup().await;
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the drain waits for calls, not for connections; neither do Pingora's tasks"
)]
fn begin(life: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(life));
}

/// A connection's life, after it was let in. Like Pingora's own it ends by itself or with the runtime; what is
/// under way in it is known to the drain.
async fn live<A>(door: Arc<Door<A>>, line: Box<Line>, shutdown: ShutdownWatch)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let connection = Arc::clone(&line.connection);
    let (end, ends) = watch::channel(false);
    let serve = async {
        if connection.http2 {
            door.app.process_new(line, &ends).await;
            return;
        }
        // As long as the gateway lets a connection live on after a request.
        let keepalive = || door.bounds.load().keepalive.max(KEEPALIVE_MIN);
        requests::serve(&door.app, line, &ends, door.closing.subscribe(), keepalive).await;
    };
    tokio::select! {
        () = serve => {}
        () = tell(end, shutdown, &connection) => {}
    }
}

/// Tells a connection to end in peace when the server does, or when its requests are used up. It then
/// ends by itself; this never does.
async fn tell(end: watch::Sender<bool>, mut shutdown: ShutdownWatch, connection: &Connection) {
    tokio::select! {
        _gone = shutdown.wait_for(|over| *over) => {}
        () = connection.worn_out.notified() => {}
    }
    end.send_replace(true);
    std::future::pending::<()>().await;
}

impl<A> Door<A> {
    async fn open(&self, stream: Stream) -> Result<Line, Refused> {
        let bounds = self.bounds.load_full();
        let until = clock::now() + bounds.head_timeout;
        let counted = self.connections.enter()?;
        let socket = stream.into_any().downcast::<Socket>().map_err(|_| Refused::Left)?;
        let opened = self.step_by_step(counted, *socket, until, &bounds);
        match tokio::time::timeout_at(until.into(), opened).await {
            Ok(opened) => opened,
            Err(_) => Err(Refused::TooSlow),
        }
    }

    async fn step_by_step(
        &self,
        counted: Counted,
        mut socket: Socket,
        until: Instant,
        bounds: &Bounds,
    ) -> Result<Line, Refused> {
        let (own, local) = addresses(&socket).ok_or(Refused::Left)?;
        let listener = self.listener(local).ok_or(Refused::Left)?;
        let caller = match &listener.proxy_protocol {
            Some(rule) => whose(rule, &mut socket, own).await?,
            None => own,
        };
        let caller = SocketAddr::new(caller.ip().to_canonical(), caller.port());
        let counted = counted.from(caller.ip())?;
        let (inner, http2): (Stream, bool) = match &listener.tls {
            Some(tls) => {
                let stream = tls.accept(socket).await.map_err(|_| Refused::Tls)?;
                let http2 = matches!(stream.selected_alpn_proto(), Some(ALPN::H2));
                (Box::new(stream), http2)
            }
            None => {
                let http2 = listener.h2c && begins_with_preface(&mut socket).await?;
                (Box::new(socket), http2)
            }
        };
        let requests_max = bounds.requests_per_connection_max;
        let connection = Arc::new(Connection::new(caller, http2, until, bounds.head_timeout, requests_max));
        Ok(Line {
            proxy: Arc::new(connection.digest().map_err(|_| Refused::Left)?),
            socket: Arc::new(digest(inner.as_ref(), caller)),
            inner,
            connection,
            write_timeout: bounds.write_timeout,
            refusal: self.refusal,
            refused: self.metrics.connections_refused.clone(),
            head_clock: None,
            write_clock: None,
            start: vec![],
            instead: Instead::Nothing,
            ahead: Bytes::new(),
            unsent: BytesMut::new(),
            _counted: counted,
        })
    }

    /// The listener that a connection to `local` came by: exactly there, or by its port.
    fn listener(&self, local: SocketAddr) -> Option<&Listener> {
        let of_port = |listener: &&Listener| [local.port(), 0].contains(&listener.address.port());
        let exactly = |listener: &&Listener| {
            of_port(listener) && listener.address.ip().to_canonical() == local.ip().to_canonical()
        };
        self.listeners.iter().find(exactly).or_else(|| self.listeners.iter().find(of_port))
    }
}

/// The two ends of a socket: the other's and ours.
fn addresses(socket: &Socket) -> Option<(SocketAddr, SocketAddr)> {
    let digest = socket.get_socket_digest()?;
    let inet = |address: Option<&PingoraAddr>| address.and_then(PingoraAddr::as_inet).copied();
    Some((inet(digest.peer_addr())?, inet(digest.local_addr())?))
}

/// What Pingora knows of the socket, with the caller's address in place of the load balancer's.
fn digest(stream: &dyn IO, caller: SocketAddr) -> SocketDigest {
    let digest = SocketDigest::from_raw_fd(stream.id());
    // It is new: nobody has asked it yet.
    let _kept = digest.peer_addr.set(Some(PingoraAddr::Inet(caller)));
    digest
}

/// Whose connection it is, where a load balancer may say so.
async fn whose(rule: &ProxyProtocol, socket: &mut Socket, own: SocketAddr) -> Result<SocketAddr, Refused> {
    if !proxy_protocol::is_trusted(rule, own.ip()) {
        return if rule.required { Err(Refused::ProxyProtocol) } else { Ok(own) };
    }
    match proxy_protocol::read(socket).await? {
        Said::Caller(caller) => Ok(caller),
        Said::Own => Ok(own),
        Said::Nothing(_) if rule.required => Err(Refused::ProxyProtocol),
        Said::Nothing(read) => {
            socket.rewind(&read);
            Ok(own)
        }
    }
}

/// Whether a caller begins with HTTP/2. Takes nothing.
async fn begins_with_preface(socket: &mut Socket) -> Result<bool, Refused> {
    let mut read = Vec::with_capacity(PREFACE.len());
    while PREFACE.starts_with(&read) && read.len() < PREFACE.len() {
        read.push(socket.read_u8().await.map_err(|_| Refused::Left)?);
    }
    socket.rewind(&read);
    Ok(read == PREFACE)
}
