//! A longer way: `relay LISTEN_PORT TO_PORT ONE_WAY_MS` hands every byte on after that time, in both directions, and lets
//! a connection begin only after a round trip. Timers have whole milliseconds and round up: never less, one more at most.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

/// Pieces on their way in one direction of a connection.
const UNDER_WAY_MAX: usize = 4096;
const PIECE_BYTES: usize = 64 << 10;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers = std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<Vec<u16>, _>>()?;
    let [listen, to, one_way_ms] = numbers[..] else {
        return Err("usage: relay LISTEN_PORT TO_PORT ONE_WAY_MS".into());
    };
    let one_way = Duration::from_millis(one_way_ms.into());
    let listener = TcpListener::bind(("127.0.0.1", listen)).await?;
    loop {
        let (near, _) = listener.accept().await?;
        tokio::spawn(relay(near, to, one_way));
    }
}

async fn relay(near: TcpStream, to: u16, one_way: Duration) {
    sleep(one_way * 2).await;
    let Ok(far) = TcpStream::connect(("127.0.0.1", to)).await else { return };
    for stream in [&near, &far] {
        let _ = stream.set_nodelay(true);
    }
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    tokio::join!(pass(near_in, far_out, one_way), pass(far_in, near_out, one_way));
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, after: Duration) {
    let (sender, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(UNDER_WAY_MAX);
    let read = async move {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = from.read(&mut piece).await {
            if sender.send((Instant::now() + after, piece[..count].to_vec())).await.is_err() {
                break;
            }
        }
    };
    let write = async move {
        while let Some((due, piece)) = pieces.recv().await {
            sleep_until(due).await;
            if to.write_all(&piece).await.is_err() {
                break;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(read, write);
}
