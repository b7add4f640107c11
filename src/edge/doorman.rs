//! The doorman: accepts callers' connections, and gives each to one of the threads that serve.
//!
//! A connection stays on its thread, and with it its calls, the connections that they take to upstreams, and
//! the tasks that watch over those while they are idle. Were these shared, as by the threads of one service of
//! Pingora's, every call would wait for another thread to let go of its connection, and Pingora would lose one in
//! fifty of them on the way (docs/performance.md).
//!
//! The thread with the fewest connections gets the next one, the first among equals. So a few callers use a few
//! threads, and the connections that were opened for each other; many are spread evenly.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pingora::server::ShutdownWatch;
use rustix::net::listen;
use tokio::sync::mpsc;

use super::connections::Counted;
use super::{Connections, Refused};
use crate::ops::Metrics;

/// Connections that may wait to be accepted; the kernel takes `net.core.somaxconn` where that is less.
const WAITING_MAX: i32 = 65_535;
/// Accepted connections that a thread may have before it. One that is so far behind has more than its share already,
/// and gets no more while another one has room.
const ARRIVALS_MAX: usize = 1024;
/// Connections that are still taken when the sockets close. More come faster than they are taken.
const LATE_MAX: usize = 4096;
/// After an accept that failed for want of files or memory.
const PAUSE: Duration = Duration::from_secs(1);

/// Stands at the sockets that callers connect to.
pub struct Doorman {
    pub sockets: Vec<TcpListener>,
    pub seats: Vec<Seat>,
    pub connections: Arc<Connections>,
    pub metrics: Arc<Metrics>,
}

/// The way to one of the threads that serve.
#[derive(Debug)]
pub struct Seat {
    arrivals: mpsc::Sender<Arrival>,
    /// How many connections its thread has.
    taken: Arc<AtomicUsize>,
}

/// What comes by a [`Seat`].
pub type Arrivals = mpsc::Receiver<Arrival>;

/// A connection that was accepted, and nothing else yet.
#[derive(Debug)]
pub struct Arrival {
    pub(super) socket: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) counted: Counted,
}

impl Seat {
    /// A way, and its end.
    #[must_use]
    pub fn new() -> (Self, Arrivals) {
        let (arrivals, end) = mpsc::channel(ARRIVALS_MAX);
        (Self { arrivals, taken: Arc::default() }, end)
    }
}

impl Doorman {
    /// Lets connections in until the server is to end, or has gone.
    pub async fn run(mut self, shutdown: ShutdownWatch) {
        let sockets = std::mem::take(&mut self.sockets);
        let accept = sockets.into_iter().map(|socket| self.stand_at(socket, shutdown.clone()));
        futures::future::join_all(accept).await;
    }

    async fn stand_at(&self, socket: TcpListener, mut shutdown: ShutdownWatch) {
        let socket = match watched(socket) {
            Ok(socket) => socket,
            Err(error) => return tracing::error!(%error, "callers' connections cannot be accepted"),
        };
        tokio::select! {
            _never = self.accept_at(&socket) => {}
            _over = shutdown.wait_for(|over| *over) => {}
        }
        // Who waits now was told by the kernel that he is connected: when the socket closes, he would be cut off.
        let Ok(socket) = socket.into_std() else { return };
        for _ in 0..LATE_MAX {
            let accepted = socket.accept();
            match accepted.and_then(|(one, from)| one.set_nonblocking(true).map(|()| (one, from))) {
                Ok((accepted, from)) => self.seat(accepted, from),
                Err(error) if is_of_the_connection(error.kind()) => {}
                Err(_) => break,
            }
        }
    }

    async fn accept_at(&self, socket: &tokio::net::TcpListener) -> Infallible {
        loop {
            // Taken off this thread again: it may be another one's.
            match socket.accept().await.and_then(|(accepted, from)| Ok((accepted.into_std()?, from))) {
                Ok((accepted, from)) => self.seat(accepted, from),
                Err(error) if is_of_the_connection(error.kind()) => {}
                Err(error) => {
                    tracing::error!(%error, "a caller's connection cannot be accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// Sends a connection to the thread that has the fewest. Without a word to the caller where there is no room.
    fn seat(&self, socket: TcpStream, from: SocketAddr) {
        if let Err(why) = self.try_seat(socket, from) {
            self.metrics.connections_refused.with_label_values(&[why.word()]).inc();
            tracing::debug!(why = why.word(), "a connection was not let in");
        }
    }

    fn try_seat(&self, socket: TcpStream, from: SocketAddr) -> Result<(), Refused> {
        let seat = self.seats.iter().min_by_key(|seat| seat.taken.load(Ordering::Relaxed));
        let seat = seat.ok_or(Refused::AllTaken)?;
        let counted = self.connections.enter(&seat.taken)?;
        seat.arrivals.try_send(Arrival { socket, from, counted }).map_err(|_| Refused::AllTaken)
    }
}

fn watched(socket: TcpListener) -> io::Result<tokio::net::TcpListener> {
    listen(&socket, WAITING_MAX)?;
    tokio::net::TcpListener::from_std(socket)
}

/// Whether the error is not ours but the connection's: accept(2) passes on what happened to it in the queue.
fn is_of_the_connection(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{
        ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, Interrupted, NetworkDown,
        NetworkUnreachable, TimedOut,
    };
    matches!(
        kind,
        ConnectionAborted
            | ConnectionRefused
            | ConnectionReset
            | HostUnreachable
            | Interrupted
            | NetworkDown
            | NetworkUnreachable
            | TimedOut
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_thread_with_the_fewest_gets_the_next_one_and_the_first_among_equals() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let (seats, mut ends): (Vec<_>, Vec<_>) = (0..3).map(|_| Seat::new()).unzip();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let address = socket.local_addr().unwrap();
        let connections = Connections::new(4, 4, metrics.connections.clone());
        let doorman = Doorman { sockets: vec![socket], seats, connections, metrics: Arc::clone(&metrics) };
        let (over, watch) = tokio::sync::watch::channel(false);
        let mut stands = tokio::task::JoinSet::new();
        stands.spawn(doorman.run(watch));
        let mut callers = vec![];
        let mut arrived = vec![];
        for expected in [0, 1, 2, 0] {
            callers.push(TcpStream::connect(address).unwrap());
            arrived.push(ends[expected].recv().await.unwrap());
        }
        // One more than there may be is closed; the place of one that has left is taken first.
        let mut fifth = TcpStream::connect(address).unwrap();
        let read = tokio::task::spawn_blocking(move || io::Read::read(&mut fifth, &mut [0; 1]));
        assert_eq!(read.await.unwrap().unwrap(), 0);
        assert_eq!(metrics.connections_refused.with_label_values(&["all_taken"]).get(), 1);
        drop(arrived.remove(1));
        callers.push(TcpStream::connect(address).unwrap());
        let last = ends[1].recv().await.unwrap();
        assert_eq!(last.from, callers.last().unwrap().local_addr().unwrap());
        over.send(true).unwrap();
        stands.join_next().await.unwrap().unwrap();
        assert!(TcpStream::connect(address).is_err(), "the socket has gone with the doorman");
    }

    #[tokio::test]
    async fn who_waits_when_the_server_ends_is_still_let_in() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let (seat, mut end) = Seat::new();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let address = socket.local_addr().unwrap();
        let connections = Connections::new(100, 100, metrics.connections.clone());
        let doorman = Doorman { sockets: vec![socket], seats: vec![seat], connections, metrics };
        let callers: Vec<_> = (0..10).map(|_| TcpStream::connect(address).unwrap()).collect();
        let (_over, watch) = tokio::sync::watch::channel(true);
        doorman.run(watch).await;
        let mut let_in = vec![];
        while let Some(arrival) = end.recv().await {
            let_in.push(arrival.from);
            let nothing = io::Read::read(&mut &arrival.socket, &mut [0; 1]);
            assert_eq!(nothing.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        assert_eq!(let_in, callers.iter().map(|c| c.local_addr().unwrap()).collect::<Vec<_>>());
        assert!(TcpStream::connect(address).is_err());
    }
}
