//! HTTP/1.1 over one TCP connection: whole requests in, scripted steps out.
//!
//! Written by hand because a real server library will not do what providers do on a bad day:
//! reset, cut a body short, write half an event. The same connection reads and writes, so that
//! a peer that leaves is noticed while the mock waits or hangs, not at the next write.
//!
//! A peer that closes only its sending half counts as gone: no client of a provider does that
//! and stays. While an answer is under way up to `HEAD_BYTES_MAX` of the next requests are read
//! ahead; beyond that the mock stops reading and so, for that answer, stops noticing.
//!
//! Bounds: 64 KiB and 128 fields of head (what common servers grant), 64 MiB of body (more than
//! any provider takes), answered 431 and 413. Such a refusal closes without draining, so a peer
//! that is still sending may see a reset. Deliberately absent: TLS, HTTP/2, idle timeouts.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::ReadHalf;

use super::answer::{Answer, Ending, Step};

const HEAD_BYTES_MAX: usize = 64 << 10;
const HEAD_FIELDS_MAX: usize = 128;
const BODY_BYTES_MAX: usize = 64 << 20;
const CHUNK_LINE_BYTES_MAX: usize = 4 << 10;

pub(super) struct Wire {
    stream: TcpStream,
    /// Read and not yet understood.
    buffer: BytesMut,
}

pub(super) struct Request {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Bytes,
    /// The peer wants no further answer on this connection.
    pub is_last: bool,
}

/// Why no request came off the wire.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// The peer left, between requests or inside one.
    Gone,
    Nonsense,
    HeadTooLarge,
    BodyTooLarge,
    Version,
}

impl Unread {
    /// Nobody is left to answer when the peer has gone.
    pub(super) fn status(&self) -> Option<u16> {
        match self {
            Self::Gone => None,
            Self::Nonsense => Some(400),
            Self::HeadTooLarge => Some(431),
            Self::BodyTooLarge => Some(413),
            Self::Version => Some(505),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Played {
    Complete,
    /// The script ended the connection.
    Ended,
    PeerGone,
}

impl Wire {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: BytesMut::new() })
    }

    pub(super) async fn read_request(&mut self) -> Result<Request, Unread> {
        let head = loop {
            match Head::parse(&self.buffer)? {
                Some(head) => break head,
                None if self.buffer.len() >= HEAD_BYTES_MAX => return Err(Unread::HeadTooLarge),
                None => self.read_more().await?,
            }
        };
        self.buffer.advance(head.bytes);
        let framing = head.framing()?;
        if head.expects_continue() && framing != Framing::Length(0) {
            let go_on = self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await;
            go_on.map_err(|_| Unread::Gone)?;
        }
        let body = match framing {
            Framing::Length(length) => self.read_exactly(length).await?,
            Framing::Chunked => self.read_chunked().await?,
        };
        let is_last = head
            .values("connection")
            .flat_map(|value| value.split(','))
            .any(|option| option.trim().eq_ignore_ascii_case("close"));
        let Head { method, path, headers, bytes: _ } = head;
        Ok(Request { method, path, headers, body, is_last })
    }

    /// Calls `on_write` as each write is made.
    pub(super) async fn play(&mut self, answer: Answer, mut on_write: impl FnMut()) -> Played {
        let Answer { steps, ending } = answer;
        let (mut reader, mut writer) = self.stream.split();
        let play = async {
            for step in steps {
                match step {
                    Step::Wait(wait) if wait.is_zero() => {}
                    Step::Wait(wait) => tokio::time::sleep(wait).await,
                    Step::Write(bytes) if bytes.is_empty() => {}
                    Step::Write(bytes) => {
                        on_write();
                        writer.write_all(&bytes).await?;
                    }
                }
            }
            match ending {
                Ending::Hang => std::future::pending().await,
                Ending::Complete | Ending::Close | Ending::Reset => io::Result::Ok(()),
            }
        };
        let played = tokio::select! {
            biased;
            () = peer_gone(&mut reader, &mut self.buffer) => return Played::PeerGone,
            played = play => played,
        };
        match (played, ending) {
            (Err(_), _) => Played::PeerGone,
            (Ok(()), Ending::Complete) => Played::Complete,
            (Ok(()), Ending::Hang | Ending::Close | Ending::Reset) => self.end(ending).await,
        }
    }

    /// A failure to end a connection means that it has ended.
    async fn end(&mut self, ending: Ending) -> Played {
        let _already_gone = match ending {
            // With no time to linger, the close on drop is an RST.
            Ending::Reset => self.stream.set_zero_linger(),
            Ending::Complete | Ending::Hang | Ending::Close => self.stream.shutdown().await,
        };
        Played::Ended
    }

    async fn read_more(&mut self) -> Result<(), Unread> {
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(0) | Err(_) => Err(Unread::Gone),
            Ok(_) => Ok(()),
        }
    }

    async fn read_exactly(&mut self, length: usize) -> Result<Bytes, Unread> {
        while self.buffer.len() < length {
            self.read_more().await?;
        }
        Ok(self.buffer.split_to(length).freeze())
    }

    async fn read_chunked(&mut self) -> Result<Bytes, Unread> {
        let mut body = BytesMut::new();
        loop {
            let size = self.read_chunk_size().await?;
            if size == 0 {
                self.read_trailers().await?;
                return Ok(body.freeze());
            }
            if size > BODY_BYTES_MAX.saturating_sub(body.len()) {
                return Err(Unread::BodyTooLarge);
            }
            body.extend_from_slice(&self.read_exactly(size).await?);
            if self.read_exactly(2).await? != "\r\n" {
                return Err(Unread::Nonsense);
            }
        }
    }

    async fn read_chunk_size(&mut self) -> Result<usize, Unread> {
        loop {
            match httparse::parse_chunk_size(&self.buffer) {
                Ok(httparse::Status::Complete((line, size))) => {
                    self.buffer.advance(line);
                    return usize::try_from(size).map_err(|_| Unread::BodyTooLarge);
                }
                Ok(httparse::Status::Partial) if self.buffer.len() < CHUNK_LINE_BYTES_MAX => {
                    self.read_more().await?;
                }
                Ok(httparse::Status::Partial) | Err(_) => return Err(Unread::Nonsense),
            }
        }
    }

    /// Read and forgotten.
    async fn read_trailers(&mut self) -> Result<(), Unread> {
        loop {
            let mut fields = [httparse::EMPTY_HEADER; HEAD_FIELDS_MAX];
            match httparse::parse_headers(&self.buffer, &mut fields) {
                Ok(httparse::Status::Complete((bytes, _))) => {
                    self.buffer.advance(bytes);
                    return Ok(());
                }
                Ok(httparse::Status::Partial) if self.buffer.len() < HEAD_BYTES_MAX => {
                    self.read_more().await?;
                }
                Ok(httparse::Status::Partial) => return Err(Unread::HeadTooLarge),
                Err(_) => return Err(Unread::Nonsense),
            }
        }
    }
}

/// Resolves when the peer has left. What it sends meanwhile is kept for the next request.
async fn peer_gone(reader: &mut ReadHalf<'_>, buffer: &mut BytesMut) {
    while buffer.len() < HEAD_BYTES_MAX {
        match reader.read_buf(buffer).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
    std::future::pending::<()>().await;
}

struct Head {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Framing {
    Length(usize),
    Chunked,
}

impl Head {
    /// `None` while the head is incomplete.
    fn parse(buffer: &[u8]) -> Result<Option<Self>, Unread> {
        let mut fields = [httparse::EMPTY_HEADER; HEAD_FIELDS_MAX];
        let mut request = httparse::Request::new(&mut fields);
        let bytes = match request.parse(buffer) {
            Ok(httparse::Status::Complete(bytes)) if bytes > HEAD_BYTES_MAX => {
                return Err(Unread::HeadTooLarge);
            }
            Ok(httparse::Status::Complete(bytes)) => bytes,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err(Unread::HeadTooLarge),
            Err(httparse::Error::Version) => return Err(Unread::Version),
            Err(_) => return Err(Unread::Nonsense),
        };
        if request.version != Some(1) {
            return Err(Unread::Version);
        }
        let pair = |field: &httparse::Header<'_>| {
            (field.name.to_owned(), String::from_utf8_lossy(field.value).into_owned())
        };
        Ok(Some(Self {
            method: request.method.unwrap_or_default().to_owned(),
            path: request.path.unwrap_or_default().to_owned(),
            headers: request.headers.iter().map(pair).collect(),
            bytes,
        }))
    }

    fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.headers
            .iter()
            .filter(move |(other, _)| other.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    /// Strict where leniency is how requests are smuggled (RFC 9112, 6.3): one framing, told once.
    fn framing(&self) -> Result<Framing, Unread> {
        let lengths: Vec<&str> = self.values("content-length").collect();
        let codings: Vec<&str> = self.values("transfer-encoding").collect();
        match (lengths.as_slice(), codings.as_slice()) {
            ([], []) => Ok(Framing::Length(0)),
            ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked),
            ([digits], []) if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                let length = digits.parse().ok().filter(|length| *length <= BODY_BYTES_MAX);
                length.map(Framing::Length).ok_or(Unread::BodyTooLarge)
            }
            _ => Err(Unread::Nonsense),
        }
    }

    fn expects_continue(&self) -> bool {
        self.values("expect").any(|value| value.eq_ignore_ascii_case("100-continue"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framing(fields: &str) -> Result<Framing, Unread> {
        let head = format!("POST / HTTP/1.1\r\n{fields}\r\n");
        Head::parse(head.as_bytes()).unwrap().unwrap().framing()
    }

    #[test]
    fn a_body_has_one_framing_told_once() {
        assert_eq!(framing("content-length: 12\r\n"), Ok(Framing::Length(12)));
        assert_eq!(framing("transfer-encoding: Chunked\r\n"), Ok(Framing::Chunked));
        assert_eq!(framing(""), Ok(Framing::Length(0)));
        assert_eq!(framing("content-length: +1\r\n"), Err(Unread::Nonsense));
        assert_eq!(framing("content-length: 1\r\ncontent-length: 1\r\n"), Err(Unread::Nonsense));
        assert_eq!(framing("content-length: 1\r\ntransfer-encoding: chunked\r\n"), Err(Unread::Nonsense));
        assert_eq!(framing("content-length: 99999999999999999999\r\n"), Err(Unread::BodyTooLarge));
    }

    #[test]
    fn a_head_is_partial_until_its_blank_line() {
        assert!(Head::parse(b"GET / HTTP/1.1\r\nhost: a\r\n").unwrap().is_none());
        assert_eq!(Head::parse(b"GET / HTTP/1.0\r\n\r\n").err(), Some(Unread::Version));
        assert_eq!(Head::parse(b"\x16\x03\x01\x02\x00").err(), Some(Unread::Nonsense));
    }
}
