//! Connections to upstreams, and a session on one of them, whichever HTTP it speaks.

use std::os::fd::RawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::header::CONTENT_LENGTH;
use http::{StatusCode, Version};
use pingora::connectors::ConnectorOptions;
use pingora::connectors::http::Connector;
use pingora::protocols::UniqueID as _;
use pingora::protocols::http::HttpTask;
use pingora::protocols::http::client::HttpSession;
use pingora::protocols::http::v1::client::HttpSession as OneSession;
use pingora::protocols::http::v2::client::Http2Session;
use pingora::upstreams::peer::{HttpPeer, Peer as _};
use pingora::{Error, ErrorType, Result};

use super::cork::Corked;
use super::idle::Idle;
use super::peer::{UNFOUND_IDLE, UPSTREAM_IDLE};
use crate::clock;

/// The connections of one thread. Those of HTTP/2 wait for their next request in Pingora's pool, others in ours.
pub struct Wires {
    connector: Connector,
    /// Locked for a moment, and by this thread alone.
    idle: Mutex<Idle>,
}

impl Wires {
    /// None yet.
    #[must_use]
    pub fn new(options: ConnectorOptions) -> Self {
        let idle = Mutex::new(Idle::new(options.keepalive_pool_size));
        Self { connector: Connector::new(Some(options)), idle }
    }

    /// A session on a connection that waits, or on a new one.
    ///
    /// # Errors
    /// Where none can be had.
    pub async fn open(&self, peer: Box<HttpPeer>) -> Result<Wire> {
        let hash = peer.reuse_hash();
        let ours = Back::Ours { peer: hash, idle: peer.idle_timeout().unwrap_or(UPSTREAM_IDLE) };
        let waiting = self.idle().take(hash, clock::now());
        if let Some(stream) = waiting {
            let session = HttpSession::H1(OneSession::new_with_options(stream, &*peer));
            return Ok(Wire { session, reused: true, back: ours });
        }
        // Boxed: it has room for a handshake of TLS, which a call would keep as long as it runs.
        Box::pin(async move {
            let (session, reused) = self.connector.get_http_session(&*peer).await?;
            Ok(match session {
                HttpSession::H1(new) => {
                    let stream = Box::new(Corked::new(new.into_inner()));
                    let session = HttpSession::H1(OneSession::new_with_options(stream, &*peer));
                    Wire { session, reused, back: ours }
                }
                two => Wire { session: two, reused, back: Back::Pingoras(peer) },
            })
        })
        .await
    }

    /// Gives a session back. `is_sound`: its request went out whole and its answer came in whole, so that its connection
    /// can carry another one. A stream of HTTP/2 has to be given back in any case, or keeps its connection for ever.
    pub async fn give_back(&self, wire: Wire, is_sound: bool) {
        match (wire.session, wire.back) {
            (HttpSession::H1(mut one), Back::Ours { peer, idle }) => {
                one.respect_keepalive();
                // Nobody would find one that was made for a single request.
                let is_wanted = is_sound && idle > UNFOUND_IDLE;
                if is_wanted && one.will_keepalive() && one.is_body_done() {
                    self.idle().put(peer, one.into_inner(), clock::now() + idle);
                }
            }
            (two, Back::Pingoras(peer)) => {
                Box::pin(self.connector.release_http_session(two, &*peer, peer.idle_timeout())).await;
            }
            (HttpSession::H2(_) | HttpSession::Custom(()), Back::Ours { .. }) => {}
        }
    }

    /// Closes connections that have waited long enough, or that the other side has closed.
    pub fn sweep(&self) {
        self.idle().sweep(clock::now());
    }

    /// The provider behind a session of HTTP/2 is to be spoken to in HTTP/1.1 from now on.
    pub fn prefer_one(&self, wire: &Wire) {
        if let Back::Pingoras(peer) = &wire.back {
            self.connector.prefer_h1(&**peer);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session with an upstream, which knows where its connection goes behind it.
pub struct Wire {
    pub session: HttpSession,
    /// Its connection has carried requests before.
    pub reused: bool,
    back: Back,
}

/// Where a connection waits for its next request.
enum Back {
    /// With ours, under the hash of its peer, for so long.
    Ours {
        peer: u64,
        idle: Duration,
    },
    Pingoras(Box<HttpPeer>),
}

impl Wire {
    /// The version that it speaks.
    #[must_use]
    pub fn version(&self) -> Version {
        version(&self.session)
    }

    /// Its connection's socket.
    #[must_use]
    pub fn socket(&self) -> RawFd {
        match &self.session {
            HttpSession::H1(one) => one.id(),
            HttpSession::H2(two) => two.fd(),
            // Nobody makes such a session; no socket has this number.
            HttpSession::Custom(()) => -1,
        }
    }
}

/// The version that a session speaks.
#[must_use]
pub fn version(upstream: &HttpSession) -> Version {
    if upstream.as_http2().is_some() { Version::HTTP_2 } else { Version::HTTP_11 }
}

/// The next piece of an answer: its head, or an interim one before it, some of its body, or that it is over. May be
/// dropped at any time and asked for again.
///
/// # Errors
/// Where the connection or the stream breaks off, or what comes is no answer: another protocol, which nobody asks for.
pub async fn next_piece(upstream: &mut HttpSession) -> Result<HttpTask> {
    let piece = match upstream {
        HttpSession::H1(one) => one.read_response_task().await?,
        HttpSession::H2(two) if two.response_header().is_none() => head(two).await?,
        HttpSession::H2(two) => body(two).await?,
        HttpSession::Custom(()) => HttpTask::Done,
    };
    match &piece {
        HttpTask::Header(head, _) if head.status == StatusCode::SWITCHING_PROTOCOLS => {
            Error::e_explain(ErrorType::InvalidHTTPHeader, "nobody asked for another protocol")
        }
        _ => Ok(piece),
    }
}

/// The same without interim heads.
///
/// # Errors
/// As [`next_piece`].
pub async fn next_final_piece(upstream: &mut HttpSession) -> Result<HttpTask> {
    loop {
        match next_piece(upstream).await? {
            HttpTask::Header(head, _) if head.status.is_informational() => {}
            piece => return Ok(piece),
        }
    }
}

async fn head(upstream: &mut Http2Session) -> Result<HttpTask> {
    upstream.read_response_header().await?;
    let Some(head) = upstream.response_header().cloned() else { return Ok(HttpTask::Done) };
    // If the stream has failed behind it, the next piece says so.
    let ends = upstream.check_response_end_or_error().unwrap_or(false);
    // The crate h2 looks at lengths only where there are frames of data (RFC 9113 §8.1.1).
    let has_body = !matches!(head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let length = head.headers.get(CONTENT_LENGTH).filter(|_| ends && has_body);
    if length.is_some_and(|length| length.as_bytes().iter().any(|digit| *digit != b'0')) {
        return Error::e_explain(ErrorType::H2Error, "a length is announced, and no body follows");
    }
    Ok(HttpTask::Header(Box::new(head), ends))
}

async fn body(upstream: &mut Http2Session) -> Result<HttpTask> {
    while let Some(bytes) = upstream.read_response_body().await? {
        let ends = upstream.check_response_end_or_error()?;
        if ends || !bytes.is_empty() {
            return Ok(HttpTask::Body(Some(bytes), ends));
        }
    }
    upstream.read_trailers().await?;
    Ok(HttpTask::Done)
}
