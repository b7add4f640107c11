//! The door: a socket that was accepted, on its way to the proxy.
//!
//! One way for all listeners: hear whose it is, count it for its caller, shake hands or find
//! out the protocol, hand it to Pingora as a [`Line`]. All of it, with the first request's head behind
//! it, has one `bounds.head_timeout`.
//!
//! HTTP/2 without TLS is found out here too, by bytes that are put back: Pingora's own look at the
//! preface (`HttpServerOptions::h2c`) waits for 24 bytes without a limit, for callers of HTTP/1.1 too.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use bytes::Bytes;
use pingora::apps::{HttpServerApp, ServerApp as _};
use pingora::protocols::l4::socket::SocketAddr as PingoraAddr;
use pingora::protocols::l4::stream::Stream as Socket;
use pingora::protocols::{ALPN, IO, SocketDigest, Ssl as _, Stream};
use pingora::server::ShutdownWatch;
use tokio::io::{AsyncReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::doorman::Arrival;
use super::line::{Instead, Line, Refusal};
use super::proxy_protocol::{self, Said};
use super::{Connection, Refused, Tls, requests};
use crate::clock;
use crate::config::checked::{Bounds, ProxyProtocol};
use crate::ops::Metrics;
use crate::unsent::Unsent;

/// How every connection of HTTP/2 begins (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What is read at once while the door looks at bytes one by one.
const LOOK_BYTES: usize = 256;

/// Pingora counts the wait for a further request in whole seconds.
const KEEPALIVE_MIN: Duration = Duration::from_secs(1);

/// Lets connections in, to an app that speaks HTTP.
pub struct Door<A> {
    pub app: Arc<A>,
    pub listeners: Arc<[Listener]>,
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

impl<A: HttpServerApp + Send + Sync + 'static> Door<A> {
    /// Lets a connection in; from then on it lives by itself, on this thread.
    pub fn let_in(self: &Arc<Self>, arrival: Arrival, shutdown: &ShutdownWatch) {
        begin(arrive(Arc::clone(self), arrival, shutdown.clone()));
    }

    /// Closes connections that wait for a request.
    pub fn close(&self) {
        self.closing.send_replace(true);
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the drain waits for calls, not for connections; neither do Pingora's tasks"
)]
fn begin(life: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(life));
}

/// A connection's way in. Its life is a task of its own: this one has room for a handshake of TLS, 17 KiB that would be
/// kept as long as the connection lives.
async fn arrive<A>(door: Arc<Door<A>>, arrival: Arrival, shutdown: ShutdownWatch)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    match door.open(arrival).await {
        Ok(line) => begin(live(door, Box::new(line), shutdown)),
        Err(why) => {
            door.metrics.connections_refused.with_label_values(&[why.word()]).inc();
            tracing::debug!(why = why.word(), "a connection was not let in");
        }
    }
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
    async fn open(&self, arrival: Arrival) -> Result<Line, Refused> {
        let bounds = self.bounds.load_full();
        let until = clock::now() + bounds.head_timeout;
        let opened = self.step_by_step(arrival, until, &bounds);
        match tokio::time::timeout_at(until.into(), opened).await {
            Ok(opened) => opened,
            Err(_) => Err(Refused::TooSlow),
        }
    }

    async fn step_by_step(&self, arrival: Arrival, until: Instant, bounds: &Bounds) -> Result<Line, Refused> {
        let Arrival { socket, from, counted } = arrival;
        let (mut socket, local) = taken_up(socket).map_err(|_| Refused::Left)?;
        let listener = self.listener(local).ok_or(Refused::Left)?;
        let caller = match &listener.proxy_protocol {
            Some(rule) => whose(rule, &mut socket, from).await?,
            None => from,
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
            unsent: Unsent::default(),
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

/// The socket on this thread, as Pingora takes one, and the address it was accepted at.
fn taken_up(socket: std::net::TcpStream) -> io::Result<(Socket, SocketAddr)> {
    socket.set_nodelay(true)?;
    let local = socket.local_addr()?;
    Ok((TcpStream::from_std(socket)?.into(), local))
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
    let (said, ahead) = {
        let mut reader = BufReader::with_capacity(LOOK_BYTES, &mut *socket);
        (proxy_protocol::read(&mut reader).await?, reader.buffer().to_vec())
    };
    match said {
        Said::Nothing(_) if rule.required => Err(Refused::ProxyProtocol),
        Said::Nothing(read) => {
            socket.rewind(&[read, ahead].concat());
            Ok(own)
        }
        Said::Caller(caller) => {
            socket.rewind(&ahead);
            Ok(caller)
        }
        Said::Own => {
            socket.rewind(&ahead);
            Ok(own)
        }
    }
}

/// Whether a caller begins with HTTP/2. Takes nothing.
async fn begins_with_preface(socket: &mut Socket) -> Result<bool, Refused> {
    let mut read = Vec::with_capacity(PREFACE.len());
    let mut reader = BufReader::with_capacity(LOOK_BYTES, &mut *socket);
    while PREFACE.starts_with(&read) && read.len() < PREFACE.len() {
        read.push(reader.read_u8().await.map_err(|_| Refused::Left)?);
    }
    let is_preface = read == PREFACE;
    read.extend_from_slice(reader.buffer());
    socket.rewind(&read);
    Ok(is_preface)
}
