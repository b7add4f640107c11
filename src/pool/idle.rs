//! Connections of HTTP/1.1 that wait for their next request, on one thread.
//!
//! Pingora's own pool gives each of them a task that watches over it: made, woken and ended with every call. Here nobody
//! watches: whether a connection still stands is looked up when it is wanted, and now and then for all of them.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use pingora::protocols::Stream;
use tokio::io::{AsyncRead as _, ReadBuf};

/// The connections, by the hash of their peer.
#[derive(Debug)]
pub(super) struct Idle {
    all_max: usize,
    all: usize,
    by_peer: HashMap<u64, Vec<Waiting>>,
}

/// One of them.
#[derive(Debug)]
struct Waiting {
    stream: Stream,
    until: Instant,
}

impl Waiting {
    /// Whether it can carry a request: its time is not over, and nothing has come on it, not even its end.
    fn is_well(&mut self, now: Instant) -> bool {
        let mut byte = [0; 1];
        let mut buf = ReadBuf::new(&mut byte);
        let mut nobody = Context::from_waker(Waker::noop());
        now < self.until
            && matches!(Pin::new(&mut self.stream).poll_read(&mut nobody, &mut buf), Poll::Pending)
    }
}

impl Idle {
    /// Keeps so many at most.
    pub(super) fn new(all_max: usize) -> Self {
        Self { all_max, all: 0, by_peer: HashMap::new() }
    }

    /// The one that was used last: it is the likeliest to stand.
    pub(super) fn take(&mut self, peer: u64, now: Instant) -> Option<Stream> {
        let waiting = self.by_peer.get_mut(&peer)?;
        while let Some(mut last) = waiting.pop() {
            self.all -= 1;
            if last.is_well(now) {
                return Some(last.stream);
            }
        }
        None
    }

    /// Lets one wait. Where there are too many, it is closed.
    pub(super) fn put(&mut self, peer: u64, stream: Stream, until: Instant) {
        if self.all < self.all_max {
            self.all += 1;
            self.by_peer.entry(peer).or_default().push(Waiting { stream, until });
        }
    }

    /// Closes those whose time is over, or whose other side has closed.
    pub(super) fn sweep(&mut self, now: Instant) {
        self.by_peer.retain(|_, waiting| {
            waiting.retain_mut(|one| one.is_well(now));
            !waiting.is_empty()
        });
        self.all = self.by_peer.values().map(Vec::len).sum();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pingora::protocols::l4::stream::Stream as Socket;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::clock;

    const SECOND: Duration = Duration::from_secs(1);

    async fn pair() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (other, _) = listener.accept().await.unwrap();
        (Box::new(Socket::from(socket)), other)
    }

    #[tokio::test]
    async fn the_one_that_was_used_last_comes_first_and_only_to_its_own_peer() {
        let (now, mut idle) = (clock::now(), Idle::new(9));
        let (first, _one) = pair().await;
        let (second, _two) = pair().await;
        let ids = (first.id(), second.id());
        idle.put(7, first, now + SECOND);
        idle.put(7, second, now + SECOND);
        assert!(idle.take(8, now).is_none());
        let taken = [idle.take(7, now).unwrap().id(), idle.take(7, now).unwrap().id()];
        assert_eq!(taken, [ids.1, ids.0]);
        assert!(idle.take(7, now).is_none() && idle.all == 0);
    }

    #[tokio::test]
    async fn one_is_not_given_out_when_its_time_is_over_nor_when_something_came_on_it() {
        let (now, mut idle) = (clock::now(), Idle::new(9));
        for sweeps in [false, true] {
            let (old, _here) = pair().await;
            let (closed, gone) = pair().await;
            let (chatty, mut other) = pair().await;
            idle.put(1, old, now);
            idle.put(2, closed, now + SECOND);
            drop(gone);
            other.write_all(b"!").await.unwrap();
            idle.put(3, chatty, now + SECOND);
            // The runtime has to hear of both.
            tokio::task::yield_now().await;
            if sweeps {
                idle.sweep(now);
                assert!(idle.all == 0 && idle.by_peer.is_empty());
            }
            assert!([1, 2, 3].into_iter().all(|peer| idle.take(peer, now).is_none()));
        }
    }

    #[tokio::test]
    async fn no_more_are_kept_than_may_be() {
        let (now, mut idle) = (clock::now(), Idle::new(1));
        let (first, _one) = pair().await;
        let (second, mut two) = pair().await;
        idle.put(1, first, now + SECOND);
        idle.put(2, second, now + SECOND);
        assert!(idle.take(2, now).is_none());
        let end = tokio::io::AsyncReadExt::read(&mut two, &mut [0; 1]).await.unwrap();
        assert_eq!((end, idle.all), (0, 1), "it was closed");
        idle.sweep(now);
        assert!(idle.take(1, now).is_some());
    }
}
