//! A wire that a test can bend: a relay that can be slow, hold everything back, cut, or lead elsewhere.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A relay; it stops when dropped.
pub struct Link {
    pub address: SocketAddr,
    way: watch::Sender<Way>,
    task: tokio::task::JoinHandle<()>,
}

/// How bytes fare on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    to: SocketAddr,
    delay: Duration,
    /// What is sent waits, and arrives when the link is good again, as with a network that loses packets.
    silent: bool,
    /// Connections of an earlier number are cut.
    cuts: u64,
    /// Connections so far.
    count: u64,
    /// From which connection on, up to which, nothing gets through any more.
    lost: (u64, u64),
}

impl Link {
    /// A good one.
    pub async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let way = Way { to, delay: Duration::ZERO, silent: false, cuts: 0, count: 0, lost: (0, 0) };
        let way = watch::Sender::new(way);
        let ways = way.clone();
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let number = ways.borrow().count;
                ways.send_modify(|way| way.count += 1);
                tokio::spawn(relay(near, number, ways.subscribe()));
            }
        });
        Self { address, way, task }
    }

    /// Good again, and what was held back arrives.
    pub fn heal(&self) {
        self.way.send_modify(|way| (way.delay, way.silent) = (Duration::ZERO, false));
    }

    /// Every piece takes so much longer, in both directions.
    pub fn slow(&self, delay: Duration) {
        self.way.send_modify(|way| way.delay = delay);
    }

    /// Nothing gets through, and nobody is told.
    pub fn silence(&self) {
        self.way.send_modify(|way| way.silent = true);
    }

    /// Connections so far.
    pub fn count(&self) -> u64 {
        self.way.borrow().count
    }

    /// Nothing gets through those that were made since there were so many, and nobody is told; others are good.
    pub fn lose_since(&self, count: u64) {
        self.way.send_modify(|way| way.lost = (count, way.count));
    }

    /// Ends all connections; what was held back is lost.
    pub fn cut(&self) {
        self.way.send_modify(|way| way.cuts += 1);
    }

    /// Ends all connections; those that follow go there.
    pub fn lead_to(&self, to: SocketAddr) {
        self.way.send_modify(|way| (way.to, way.cuts) = (to, way.cuts + 1));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Way {
    fn lets_through(&self, number: u64) -> bool {
        let (first, end) = self.lost;
        !self.silent && !(first..end).contains(&number)
    }
}

async fn relay(near: TcpStream, number: u64, mut ways: watch::Receiver<Way>) {
    let Way { to, cuts, .. } = *ways.borrow_and_update();
    let mut over = ways.clone();
    let both = async {
        if ways.wait_for(|way| way.lets_through(number)).await.is_err() {
            return;
        }
        let Ok(far) = TcpStream::connect(to).await else { return };
        for stream in [&near, &far] {
            stream.set_nodelay(true).expect("no delay");
        }
        let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
        let forth = pass(near_in, far_out, number, ways.clone());
        tokio::join!(forth, pass(far_in, near_out, number, ways.clone()));
    };
    tokio::select! {
        () = both => {}
        _ = over.wait_for(|way| way.cuts != cuts) => {}
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, number: u64, mut ways: watch::Receiver<Way>) {
    let mut piece = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut piece).await {
        let Ok(delay) = ways.wait_for(|way| way.lets_through(number)).await.map(|way| way.delay) else {
            break;
        };
        tokio::time::sleep(delay).await;
        if to.write_all(&piece[..count]).await.is_err() {
            break;
        }
    }
    let _closed = to.shutdown().await;
}
