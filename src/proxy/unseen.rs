//! Which failures on the wire mean that nobody worked on the request, and what all the others mean.

use filters::upstream::failure::{Failure, Timer};
use pingora::{Error, ErrorType, RetryType};

/// What it says where a head broke off, before the number of bytes.
const BYTES_READ: &str = "bytes already read: ";
/// What Pingora says where a stream of HTTP/2 ended while the request's body waited for room in its window.
const STREAM_ENDED_INSIDE: &str = "cannot reserve capacity";

/// A request that its upstream did not work on, and what may carry it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unseen {
    /// The connection was dead or is being closed: a new one.
    Dead,
    /// The connection lives, but did not want this stream, or no stream of HTTP/2 at all.
    Refused,
}

impl Unseen {
    /// Its word in the decision log.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Dead => "stale_connection",
            Self::Refused => "stream_refused",
        }
    }
}

/// Whether a request that got no byte of a response can be sent again as if it never had been.
///
/// HTTP/1.1: "closed before a response" on a pooled connection, which Pingora marks as worth a repeat there
/// only; where the request could not even be written whole, it tells that instead. HTTP/2: RFC 9113 section 8.7
/// vouches for streams that were refused and for those above the last one that a GOAWAY names. Every other reset
/// may have come in the middle of the work, unless the request was not even whole: then Pingora does not tell why
/// the stream ended, and nobody can have worked on half a body. `may_be_one`: the provider may be spoken to in HTTP/1.1.
pub(super) fn unseen(error: &Error, reused: bool, may_be_one: bool) -> Option<Unseen> {
    if *error.etype() == ErrorType::H2Downgrade {
        return may_be_one.then_some(Unseen::Refused);
    }
    let closed = error.retry == RetryType::ReusedOnly && !is_inside_head(error);
    let unwritten = *error.etype() == ErrorType::WriteError;
    let Some(cause) = error.root_cause().downcast_ref::<h2::Error>() else {
        let ended_inside =
            error.context.as_ref().is_some_and(|context| context.as_str() == STREAM_ENDED_INSIDE);
        return (ended_inside || (reused && (closed || unwritten))).then_some(Unseen::Dead);
    };
    // The crate tells of a GOAWAY only to streams above its last one; others run on.
    if cause.is_remote() && cause.is_go_away() {
        return Some(Unseen::Dead);
    }
    if cause.is_remote() && cause.is_reset() && cause.reason() == Some(h2::Reason::REFUSED_STREAM) {
        return Some(Unseen::Refused);
    }
    (unwritten || (reused && closed)).then_some(Unseen::Dead)
}

/// Whether a part of a head had come. Pingora counts its bytes in its words alone.
fn is_inside_head(error: &Error) -> bool {
    let words = error.context.as_ref().map_or("", |context| context.as_str());
    words.split_once(BYTES_READ).is_some_and(|(_, count)| count != "0")
}

/// The same, of an attempt that did not get as far as to send: a pooled connection gave no stream.
pub(super) fn unsent(error: &Error) -> Option<Unseen> {
    (*error.etype() == ErrorType::H2Error).then_some(Unseen::Dead)
}

/// What an error of Pingora's on the way to or from an upstream means.
pub(crate) fn failure_of(error: &Error) -> Failure {
    match error.etype() {
        ErrorType::ConnectTimedout | ErrorType::TLSHandshakeTimedout => Failure::Timeout(Timer::Connect),
        ErrorType::ConnectRefused
        | ErrorType::ConnectNoRoute
        | ErrorType::ConnectError
        | ErrorType::ConnectProxyFailure
        | ErrorType::TLSWantX509Lookup
        | ErrorType::TLSHandshakeFailure
        | ErrorType::InvalidCert
        | ErrorType::HandshakeError
        | ErrorType::BindError
        | ErrorType::SocketError => Failure::Connect,
        _ => Failure::Broken,
    }
}
