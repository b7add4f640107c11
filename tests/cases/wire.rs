//! HTTP/1.1 as bytes: heads, chunks, and an answer read piece by piece with the time of each.

use super::case::Headers;

/// The head of a request.
pub struct RequestHead {
    pub path: String,
    pub headers: Headers,
    pub raw: Vec<u8>,
}

/// A request's head, once it is all there.
pub fn request_head(bytes: &[u8]) -> Option<RequestHead> {
    let mut fields = [httparse::EMPTY_HEADER; 128];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => Some(RequestHead {
            path: request.path.unwrap_or_default().to_owned(),
            headers: headers_of(request.headers),
            raw: bytes.get(..length)?.to_vec(),
        }),
        Ok(httparse::Status::Partial) | Err(_) => None,
    }
}

fn headers_of(fields: &[httparse::Header<'_>]) -> Headers {
    let field = |f: &httparse::Header<'_>| (f.name.to_owned(), String::from_utf8_lossy(f.value).into_owned());
    Headers(fields.iter().map(field).collect())
}

/// The head of an answer and its length, once it is all there. `Err`: it is none.
pub fn response_head(bytes: &[u8]) -> Result<Option<(u16, Headers, usize)>, String> {
    let mut fields = [httparse::EMPTY_HEADER; 128];
    let mut response = httparse::Response::new(&mut fields);
    match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => {
            Ok(Some((response.code.unwrap_or(0), headers_of(response.headers), length)))
        }
        Ok(httparse::Status::Partial) => Ok(None),
        Err(error) => Err(format!("no HTTP answer: {error}")),
    }
}

/// A chunked body, read as it comes.
#[derive(Clone, Debug, Default)]
pub struct Chunks {
    pub body: Vec<u8>,
    /// Bytes of the coded body that were used up.
    pub consumed: usize,
    rest: Vec<u8>,
    state: ChunkState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ChunkState {
    #[default]
    Size,
    Data(usize),
    DataEnd,
    Trailers,
    Ended,
    Broken,
}

impl Chunks {
    pub fn ended(&self) -> bool {
        self.state == ChunkState::Ended
    }

    pub fn broken(&self) -> bool {
        self.state == ChunkState::Broken
    }

    /// Bytes behind the end.
    pub fn behind(&self) -> &[u8] {
        &self.rest
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        let mut at = 0;
        loop {
            let rest = &self.rest[at..];
            let step = match self.state {
                ChunkState::Size => line(rest).map(|(text, length)| {
                    let digits = text.split(';').next().unwrap_or_default().trim();
                    self.state = match usize::from_str_radix(digits, 16) {
                        Ok(0) => ChunkState::Trailers,
                        Ok(size) => ChunkState::Data(size),
                        Err(_) => ChunkState::Broken,
                    };
                    length
                }),
                ChunkState::Data(size) => {
                    let take = size.min(rest.len());
                    self.body.extend_from_slice(&rest[..take]);
                    self.state =
                        if take == size { ChunkState::DataEnd } else { ChunkState::Data(size - take) };
                    (take > 0).then_some(take)
                }
                ChunkState::DataEnd => line(rest).map(|(text, length)| {
                    self.state = if text.is_empty() { ChunkState::Size } else { ChunkState::Broken };
                    length
                }),
                ChunkState::Trailers => line(rest).map(|(text, length)| {
                    if text.is_empty() {
                        self.state = ChunkState::Ended;
                    }
                    length
                }),
                ChunkState::Ended | ChunkState::Broken => None,
            };
            match step {
                Some(length) => at += length,
                None => break,
            }
        }
        self.rest.drain(..at);
        self.consumed += at;
    }
}

/// A line without its end, and its length with it.
fn line(bytes: &[u8]) -> Option<(String, usize)> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let text = bytes.get(..end)?;
    let text = text.strip_suffix(b"\r").unwrap_or(text);
    Some((String::from_utf8_lossy(text).into_owned(), end + 1))
}
