//! Connections of HTTP/1.1 that wait for their next request, on one thread.
//!
//! Pingora's own pool gives each of them a task that watches over it: made, woken and ended with every call. Here nobody
//! watches: whether a connection still stands is looked up when it is wanted, and now and then for all of them.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::time::Instant;

use futures::FutureExt as _;
use pingora::protocols::Stream;
use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::task::unconstrained;

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
        let read = poll_fn(|cx| Pin::new(&mut self.stream).poll_read(cx, &mut buf));
        // A task that has had its share of a turn would be told that nothing came.
        now < self.until && unconstrained(read).now_or_never().is_none()
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

    /// Lets one wait. Where there are too many, the one that would have been closed first is.
    pub(super) fn put(&mut self, peer: u64, stream: Stream, until: Instant) {
        if self.all >= self.all_max {
            self.make_room();
        }
        self.all += 1;
        self.by_peer.entry(peer).or_default().push(Waiting { stream, until });
    }

    /// Of those of one peer the first has waited longest.
    fn make_room(&mut self) {
        let waiting = self.by_peer.values_mut().filter(|waiting| !waiting.is_empty());
        if let Some(oldest) = waiting.min_by_key(|waiting| waiting.first().map(|first| first.until)) {
            drop(oldest.remove(0));
            self.all -= 1;
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
    async fn no_more_are_kept_than_may_be_and_the_oldest_goes_first() {
        let (now, mut idle) = (clock::now(), Idle::new(2));
        let (first, mut one) = pair().await;
        let (second, _two) = pair().await;
        let (third, _three) = pair().await;
        idle.put(1, first, now + SECOND);
        idle.put(1, second, now + 2 * SECOND);
        idle.put(2, third, now + 3 * SECOND);
        let end = tokio::io::AsyncReadExt::read(&mut one, &mut [0; 1]).await.unwrap();
        assert_eq!((end, idle.all), (0, 2), "it was closed");
        assert!(idle.take(2, now).is_some() && idle.take(1, now).is_some() && idle.take(1, now).is_none());
    }

    #[tokio::test]
    async fn however_many_have_gone_bad_at_once_none_is_taken_for_a_good_one() {
        const MANY: usize = 300;
        let (now, mut idle) = (clock::now(), Idle::new(MANY));
        let mut others = vec![];
        for _ in 0..MANY {
            let (stream, mut other) = pair().await;
            other.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").await.unwrap();
            idle.put(1, stream, now + SECOND);
            others.push(other);
        }
        tokio::task::yield_now().await;
        // In one turn of one task.
        assert!(idle.take(1, now).is_none());
    }
}
