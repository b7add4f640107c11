//! The stream that Pingora reads a caller's requests from: the socket or its TLS, with two clocks.
//!
//! - **A head's clock**: Pingora bounds each read, not the sum, so a trickled head would live for ever;
//!   with HTTP/2 it does not even bound the wait for the preface. When `bounds.head_timeout` has passed
//!   and no request has begun, a read fails, and Pingora closes.
//! - **A write's clock**: Pingora bounds the write of a body, but not of a head, nor what HTTP/2 still
//!   has to send when all its streams are done. When something could not be written for
//!   `bounds.write_timeout`, the write fails, and with it all that waits behind it.
//!
//! Two buffers too, which are there only while they hold something, since most connections of most hours are
//! idle: what came before Pingora was asked to read it ([`Line::stirs`]), and what waits for a flush.
//!
//! And one answer: to what it cannot read as HTTP/1.1, Pingora says a bare 400 by itself. Nothing has
//! been handed to us then, so whatever it writes is replaced by an error as callers know it.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::{Buf as _, Bytes};
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::tls::SslDigest;
use pingora::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType,
};
use prometheus::IntCounterVec;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::Sleep;

use super::connections::Counted;
use super::{Connection, Refused};
use crate::clock;
use crate::unsent::Unsent;

/// What is kept of a head, to tell its dialect when it is none.
const START_BYTES_MAX: usize = 64;
/// What is read of a request before it is Pingora's: most heads, and as much as Pingora reads at once.
const AHEAD_BYTES_MAX: usize = 4 << 10;

/// What is said instead of Pingora's bare 400, by how the head began.
pub(super) type Refusal = fn(&[u8]) -> Bytes;

/// A caller's connection.
pub(super) struct Line {
    pub(super) inner: Stream,
    pub(super) connection: Arc<Connection>,
    pub(super) proxy: Arc<ProxyDigest>,
    pub(super) socket: Arc<SocketDigest>,
    pub(super) write_timeout: Duration,
    pub(super) refusal: Refusal,
    pub(super) refused: IntCounterVec,
    pub(super) head_clock: Option<Pin<Box<Sleep>>>,
    pub(super) write_clock: Option<Pin<Box<Sleep>>>,
    pub(super) start: Vec<u8>,
    pub(super) instead: Instead,
    /// Came, and was not read yet.
    pub(super) ahead: Bytes,
    /// Was written, and not sent yet.
    pub(super) unsent: Unsent,
    /// Goes with the socket.
    pub(super) _counted: Counted,
}

/// What is written instead of Pingora's own words.
#[derive(Debug, Default)]
pub(super) enum Instead {
    /// Pingora's words, since they are ours.
    #[default]
    Nothing,
    /// This, of which so much is still to be written.
    This(Bytes),
}

impl Line {
    /// Waits until the caller sends something, and keeps it for the next read. `false`: nothing comes any more.
    pub(super) async fn stirs(&mut self) -> bool {
        std::future::poll_fn(|cx| {
            let mut space = [MaybeUninit::uninit(); AHEAD_BYTES_MAX];
            let mut buf = ReadBuf::uninit(&mut space);
            let read = ready!(Pin::new(&mut *self).poll_read(cx, &mut buf));
            self.ahead = Bytes::copy_from_slice(buf.filled());
            Poll::Ready(read.is_ok() && !self.ahead.is_empty())
        })
        .await
    }

    /// Whether a clock that is wanted until `until` has run out; else it wakes us when it does.
    fn has_run_out(clock: &mut Option<Pin<Box<Sleep>>>, until: Instant, cx: &mut Context<'_>) -> bool {
        let until = tokio::time::Instant::from_std(until);
        let clock = clock.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if clock.deadline() != until {
            clock.as_mut().reset(until);
        }
        clock.as_mut().poll(cx).is_ready()
    }

    fn end(&self, why: Refused) -> io::Error {
        self.refused.with_label_values(&[why.word()]).inc();
        io::Error::new(io::ErrorKind::TimedOut, why.word())
    }

    /// Passes on how a write went, unless it has waited too long.
    fn bounded<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.write_clock = None;
            return written;
        }
        let until = match &self.write_clock {
            Some(clock) => clock.deadline().into_std(),
            None => clock::now() + self.write_timeout,
        };
        if Self::has_run_out(&mut self.write_clock, until, cx) {
            return Poll::Ready(Err(self.end(Refused::NotReading)));
        }
        Poll::Pending
    }

    /// Whether Pingora answers before there was a request.
    fn is_pingoras(&self) -> bool {
        !self.connection.http2 && self.connection.head_until().is_some()
    }

    /// Takes Pingora's words for written; ours go out when it flushes.
    fn replace(&mut self) {
        if matches!(self.instead, Instead::Nothing) {
            self.refused.with_label_values(&[Refused::Unreadable.word()]).inc();
            self.instead = Instead::This((self.refusal)(&self.start));
        }
    }

    /// Writes all that is not sent yet, first what waits and then what is said instead.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.unsent.poll_send(&mut self.inner, cx))?;
        self.poll_instead(cx)
    }

    /// Writes what is said instead.
    fn poll_instead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Instead::This(rest) = &mut self.instead
            && !rest.is_empty()
        {
            match Pin::new(&mut self.inner).poll_write(cx, rest) {
                Poll::Ready(Ok(written)) => rest.advance(written),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Line {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let line = self.get_mut();
        if !line.ahead.is_empty() {
            let count = line.ahead.len().min(buf.remaining());
            buf.put_slice(&line.ahead.split_to(count));
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut line.inner).poll_read(cx, buf);
        if read.is_ready() {
            let came = buf.filled().get(before..).unwrap_or_default();
            if !came.is_empty() && line.connection.bytes_came(clock::now()) {
                line.start.clear();
            }
            if line.connection.head_until().is_some() {
                let room = START_BYTES_MAX.saturating_sub(line.start.len());
                line.start.extend(came.iter().take(room));
            }
            return read;
        }
        if let Some(until) = line.connection.head_until()
            && Self::has_run_out(&mut line.head_clock, until, cx)
        {
            return Poll::Ready(Err(line.end(Refused::TooSlow)));
        }
        Poll::Pending
    }
}

impl AsyncWrite for Line {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let line = self.get_mut();
        if line.is_pingoras() {
            line.replace();
            return Poll::Ready(Ok(buf.len()));
        }
        let written = match line.unsent.poll_room(&mut line.inner, cx, buf.len()) {
            Poll::Ready(Ok(true)) => {
                line.unsent.put(buf);
                Poll::Ready(Ok(buf.len()))
            }
            Poll::Ready(Ok(false)) => Pin::new(&mut line.inner).poll_write(cx, buf),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        };
        line.bounded(written, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let line = self.get_mut();
        let bytes = bufs.iter().map(|buf| buf.len()).sum();
        if line.is_pingoras() {
            line.replace();
            return Poll::Ready(Ok(bytes));
        }
        let written = match line.unsent.poll_room(&mut line.inner, cx, bytes) {
            Poll::Ready(Ok(true)) => {
                bufs.iter().for_each(|buf| line.unsent.put(buf));
                Poll::Ready(Ok(bytes))
            }
            Poll::Ready(Ok(false)) => Pin::new(&mut line.inner).poll_write_vectored(cx, bufs),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        };
        line.bounded(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let line = self.get_mut();
        if line.connection.holds_flush() {
            return Poll::Ready(Ok(()));
        }
        let flushed = match line.poll_rest(cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut line.inner).poll_flush(cx),
            other => other,
        };
        line.bounded(flushed, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let line = self.get_mut();
        let closed = match line.poll_rest(cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut line.inner).poll_shutdown(cx),
            other => other,
        };
        line.bounded(closed, cx)
    }
}

#[async_trait]
impl Shutdown for Line {
    async fn shutdown(&mut self) {
        // The stream's own way knows no clock.
        let _gone_already = <Self as AsyncWriteExt>::shutdown(self).await;
    }
}

impl UniqueID for Line {
    fn id(&self) -> UniqueIDType {
        self.inner.id()
    }
}

impl Ssl for Line {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.inner.get_ssl_digest()
    }

    /// What was agreed on with TLS, or found out without it.
    fn selected_alpn_proto(&self) -> Option<ALPN> {
        Some(if self.connection.http2 { ALPN::H2 } else { ALPN::H1 })
    }
}

impl GetTimingDigest for Line {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner.get_timing_digest()
    }

    fn get_read_pending_time(&self) -> Duration {
        self.inner.get_read_pending_time()
    }

    fn get_write_pending_time(&self) -> Duration {
        self.inner.get_write_pending_time()
    }
}

impl GetProxyDigest for Line {
    /// The way of [`Connection::of`].
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        Some(Arc::clone(&self.proxy))
    }
}

impl GetSocketDigest for Line {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        Some(Arc::clone(&self.socket))
    }
}

/// Nobody needs to: the door has looked.
impl Peek for Line {}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("connection", &self.connection).finish_non_exhaustive()
    }
}
