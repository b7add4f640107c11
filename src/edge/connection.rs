//! What a request may know of its connection, and what the connection must know of its requests.
//!
//! Pingora carries it from the stream to each session in the digest that it keeps of a connection, in
//! the one place there that is open to others: the proxy's (`ProxyDigest::user_data`).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pingora::http::ResponseHeader;
use pingora::protocols::Digest;
use pingora::protocols::raw_connect::ProxyDigest;
use tokio::sync::Notify;

/// One connection of a caller.
#[derive(Debug)]
pub struct Connection {
    /// Whose it is: its own address, or what a trusted load balancer said.
    pub caller: SocketAddr,
    pub(super) http2: bool,
    head_timeout: Duration,
    phase: Mutex<Phase>,
    requests: AtomicU32,
    requests_max: u32,
    /// Its requests are used up.
    pub(super) worn_out: Notify,
    /// More follows at once: what is flushed waits for it.
    holds_flush: AtomicBool,
}

/// What is expected of the caller.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// A head is under way, until then at the latest.
    Head(Instant),
    /// A request is served; its own limits hold.
    Serving,
    /// Nothing, until the first byte of a further request.
    Idle,
}

impl Connection {
    /// One whose first head has to be there at `until`.
    pub(super) fn new(
        caller: SocketAddr,
        http2: bool,
        until: Instant,
        head_timeout: Duration,
        requests_max: u32,
    ) -> Self {
        Self {
            caller,
            http2,
            head_timeout,
            phase: Mutex::new(Phase::Head(until)),
            requests: AtomicU32::new(0),
            requests_max,
            worn_out: Notify::new(),
            holds_flush: AtomicBool::new(false),
        }
    }

    /// The connection that a session is on.
    #[must_use]
    pub fn of(digest: Option<&Digest>) -> Option<Arc<Self>> {
        let carried = digest?.proxy_digest.as_ref()?.user_data.as_ref()?;
        carried.downcast_ref::<Arc<Self>>().cloned()
    }

    /// What Pingora carries to [`Connection::of`].
    pub(super) fn digest(self: &Arc<Self>) -> pingora::Result<ProxyDigest> {
        let head = ResponseHeader::build(200, Some(0))?;
        Ok(ProxyDigest::new(Box::new(head), Some(Box::new(Arc::clone(self)))))
    }

    /// A request's head is here. Whether another one may follow it.
    pub fn request_began(&self) -> bool {
        self.enter(Phase::Serving);
        let requests = self.requests.fetch_add(1, Ordering::AcqRel).saturating_add(1);
        if requests == self.requests_max {
            self.worn_out.notify_one();
        }
        requests < self.requests_max
    }

    /// A further request has begun, in the same bytes as the last one.
    pub(super) fn head_has_begun(&self, now: Instant) {
        self.enter(Phase::Head(now + self.head_timeout));
    }

    /// A request has been answered. With HTTP/2 others may be under way: no phase follows.
    pub fn request_ended(&self) {
        if !self.http2 {
            self.enter(Phase::Idle);
        }
    }

    /// Whether what is flushed from now on waits, since more follows at once. Streams of HTTP/2 share a connection: theirs
    /// never waits.
    pub fn hold_flush(&self, holds: bool) {
        self.holds_flush.store(holds && !self.http2, Ordering::Relaxed);
    }

    /// Whether it does.
    pub(super) fn holds_flush(&self) -> bool {
        self.holds_flush.load(Ordering::Relaxed)
    }

    /// Bytes came: between two requests they begin a head. Whether they did.
    pub(super) fn bytes_came(&self, now: Instant) -> bool {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let begins = matches!(*phase, Phase::Idle);
        if begins {
            *phase = Phase::Head(now + self.head_timeout);
        }
        begins
    }

    /// Until when a head has to be here, if one is under way.
    pub(super) fn head_until(&self) -> Option<Instant> {
        match *self.phase.lock().unwrap_or_else(PoisonError::into_inner) {
            Phase::Head(until) => Some(until),
            Phase::Serving | Phase::Idle => None,
        }
    }

    fn enter(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(http2: bool, now: Instant) -> Connection {
        let caller = "192.0.2.1:1".parse().unwrap();
        Connection::new(caller, http2, now + Duration::from_secs(5), Duration::from_secs(10), 2)
    }

    #[test]
    fn a_heads_clock_runs_from_its_first_byte_and_only_until_its_request_begins() {
        let now = crate::clock::now();
        let connection = connection(false, now);
        assert_eq!(connection.head_until(), Some(now + Duration::from_secs(5)), "the first: from the start");
        connection.request_began();
        assert!(!connection.bytes_came(now), "that was a body");
        assert_eq!(connection.head_until(), None);
        connection.request_ended();
        assert_eq!(connection.head_until(), None, "idle");
        let first_byte = now + Duration::from_secs(60);
        assert!(connection.bytes_came(first_byte));
        assert!(!connection.bytes_came(first_byte + Duration::from_secs(9)));
        assert_eq!(
            connection.head_until(),
            Some(first_byte + Duration::from_secs(10)),
            "trickling gains nothing"
        );
    }

    #[test]
    fn requests_of_http2_overlap_so_that_none_ends_a_phase() {
        let connection = connection(true, crate::clock::now());
        connection.request_began();
        connection.request_ended();
        assert!(!connection.bytes_came(crate::clock::now()));
        assert_eq!(connection.head_until(), None);
    }

    #[tokio::test]
    async fn a_connection_is_worn_out_by_its_last_request() {
        let connection = connection(true, crate::clock::now());
        assert!(connection.request_began());
        assert!(futures::FutureExt::now_or_never(connection.worn_out.notified()).is_none());
        assert!(!connection.request_began());
        assert!(futures::FutureExt::now_or_never(connection.worn_out.notified()).is_some());
    }
}
