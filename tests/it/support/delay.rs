//! A longer way: a relay that hands every byte on after a fixed time, in both directions.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Pieces that may be on their way in one direction of a connection.
const UNDER_WAY_MAX: usize = 4_096;

/// A relay; it stops when dropped.
pub struct Delay {
    pub address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Delay {
    /// Before `to`; every byte takes `one_way` longer.
    pub async fn start(to: SocketAddr, one_way: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(relay(near, to, one_way));
            }
        });
        Self { address, task }
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn relay(near: TcpStream, to: SocketAddr, one_way: Duration) {
    // A handshake takes its round trip too.
    tokio::time::sleep(one_way * 2).await;
    let Ok(far) = TcpStream::connect(to).await else { return };
    for stream in [&near, &far] {
        stream.set_nodelay(true).expect("no delay");
    }
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    tokio::join!(pass(near_in, far_out, one_way), pass(far_in, near_out, one_way));
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, after: Duration) {
    let (sender, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(UNDER_WAY_MAX);
    let read = async move {
        let mut piece = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut piece).await {
            if sender.send((Instant::now() + after, piece[..count].to_vec())).await.is_err() {
                break;
            }
        }
    };
    let write = async move {
        while let Some((due, piece)) = pieces.recv().await {
            tokio::time::sleep_until(due).await;
            if to.write_all(&piece).await.is_err() {
                break;
            }
        }
        let _closed = to.shutdown().await;
    };
    tokio::join!(read, write);
}
