//! A connection of HTTP/1.1 to an upstream on which a request goes out in one piece.
//!
//! Pingora flushes behind a request's head, and again behind its body. The first flush only waits for the second: an
//! upstream then wakes up once for a request, and we write once.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::tls::SslDigest;
use pingora::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::unsent::Unsent;

/// The connection, which keeps back what was flushed once.
pub(super) struct Corked {
    wire: Stream,
    unsent: Unsent,
    /// The head was flushed, its body not yet.
    is_flushed: bool,
}

impl Corked {
    pub(super) fn new(wire: Stream) -> Self {
        Self { wire, unsent: Unsent::default(), is_flushed: false }
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_flushed = false;
        ready!(self.unsent.poll_send(&mut self.wire, cx))?;
        Pin::new(&mut self.wire).poll_flush(cx)
    }
}

impl AsyncRead for Corked {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let corked = self.get_mut();
        if !corked.unsent.is_empty() {
            // Whoever reads waits for an answer to all of it.
            ready!(corked.poll_send(cx))?;
        }
        Pin::new(&mut corked.wire).poll_read(cx, buf)
    }
}

impl AsyncWrite for Corked {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let corked = self.get_mut();
        if ready!(corked.unsent.poll_room(&mut corked.wire, cx, buf.len()))? {
            corked.unsent.put(buf);
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut corked.wire).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let corked = self.get_mut();
        if !corked.is_flushed && !corked.unsent.is_empty() {
            corked.is_flushed = true;
            return Poll::Ready(Ok(()));
        }
        corked.poll_send(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let corked = self.get_mut();
        ready!(corked.poll_send(cx))?;
        Pin::new(&mut corked.wire).poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for Corked {
    async fn shutdown(&mut self) {
        self.wire.shutdown().await;
    }
}

impl UniqueID for Corked {
    fn id(&self) -> UniqueIDType {
        self.wire.id()
    }
}

impl Ssl for Corked {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.wire.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.wire.selected_alpn_proto()
    }
}

impl GetTimingDigest for Corked {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.wire.get_timing_digest()
    }

    fn get_read_pending_time(&self) -> Duration {
        self.wire.get_read_pending_time()
    }

    fn get_write_pending_time(&self) -> Duration {
        self.wire.get_write_pending_time()
    }
}

impl GetProxyDigest for Corked {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.wire.get_proxy_digest()
    }
}

impl GetSocketDigest for Corked {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.wire.get_socket_digest()
    }
}

impl Peek for Corked {}

impl fmt::Debug for Corked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Corked").field("wire", &self.wire).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use pingora::protocols::l4::stream::Stream as Socket;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    async fn pair() -> (Corked, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (other, _) = listener.accept().await.unwrap();
        (Corked::new(Box::new(Socket::from(socket))), other)
    }

    /// What comes first, in one piece.
    async fn comes(other: &mut TcpStream) -> String {
        let mut bytes = [0; 64];
        let count = other.read(&mut bytes).await.unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    }

    #[tokio::test]
    async fn a_request_goes_out_in_one_piece_and_so_does_the_next() {
        let (mut corked, mut other) = pair().await;
        for _ in 0..2 {
            corked.write_all(b"head ").await.unwrap();
            corked.flush().await.unwrap();
            assert!(other.try_read(&mut [0; 1]).is_err(), "nothing yet");
            corked.write_all(b"body").await.unwrap();
            corked.flush().await.unwrap();
            assert_eq!(comes(&mut other).await, "head body");
        }
    }

    #[tokio::test]
    async fn a_head_without_a_body_goes_out_when_an_answer_is_waited_for() {
        let (mut corked, mut other) = pair().await;
        corked.write_all(b"head").await.unwrap();
        corked.flush().await.unwrap();
        let mut answer = [0; 6];
        let answered = async {
            assert_eq!(comes(&mut other).await, "head");
            other.write_all(b"answer").await.unwrap();
        };
        tokio::join!(answered, async { corked.read_exact(&mut answer).await.unwrap() });
        assert_eq!(&answer, b"answer");
    }

    #[tokio::test]
    async fn what_is_large_does_not_wait() {
        let (mut corked, mut other) = pair().await;
        let body = vec![b'x'; 100_000];
        corked.write_all(b"head").await.unwrap();
        let mut read = vec![0; 100_004];
        let (written, read_all) = tokio::join!(corked.write_all(&body), other.read_exact(&mut read));
        assert_eq!((written.is_ok(), read_all.unwrap()), (true, 100_004));
        assert!(read.starts_with(b"headxx"));
    }
}
