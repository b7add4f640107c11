//! What was written to a connection and waits there for more: a head, and a small body behind it, go out in one write
//! and in one record of TLS.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use tokio::io::AsyncWrite;

/// More than this does not wait, in bytes.
const BYTES_MAX: usize = 4 << 10;

/// Bytes that wait. Its buffer is there only while it holds something: most connections of most hours are idle.
#[derive(Debug, Default)]
pub(crate) struct Unsent(BytesMut);

impl Unsent {
    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Makes room for so many bytes more. Whether they shall wait here: else they are too many.
    pub(crate) fn poll_room<W: AsyncWrite + Unpin>(
        &mut self,
        wire: &mut W,
        cx: &mut Context<'_>,
        more: usize,
    ) -> Poll<io::Result<bool>> {
        if self.0.len() + more > BYTES_MAX {
            ready!(self.poll_send(wire, cx))?;
        }
        let waits = more < BYTES_MAX;
        if waits && self.0.capacity() == 0 {
            self.0.reserve(BYTES_MAX);
        }
        Poll::Ready(Ok(waits))
    }

    /// Lets bytes wait for which there is room.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Writes what waits, and gives its buffer back.
    pub(crate) fn poll_send<W: AsyncWrite + Unpin>(
        &mut self,
        wire: &mut W,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.0.is_empty() {
            match ready!(Pin::new(&mut *wire).poll_write(cx, &self.0))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.0.advance(written),
            }
        }
        self.0 = BytesMut::new();
        Poll::Ready(Ok(()))
    }
}
