//! The caller: one request on a raw socket, its answer read piece by piece, and what the caller does
//! meanwhile.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::case::{Action, BodyGen, Client, Framing, Headers};
use super::sse::{self, Reader};
use super::upstream::body_bytes;
use super::{h2wire, wire};

/// How long an answer may take before the caller gives up.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a connection with raw bytes on it may be silent before it is left.
const RAW_SILENCE: Duration = Duration::from_secs(2);
/// How long a caller that does not read stays.
const UNREAD: Duration = Duration::from_secs(10);
/// A chunk of a request body that is sent in chunks.
const CHUNK_BYTES: usize = 60_007;

/// A request, ready to go out.
#[derive(Clone, Debug, Default)]
pub struct Sent {
    pub method: String,
    pub path: String,
    pub headers: Headers,
    pub body: Vec<u8>,
    raw: Option<Vec<u8>>,
    chunked: bool,
    h2: bool,
    dribble: Option<usize>,
    wait_100: Option<Duration>,
    actions: Vec<Action>,
    /// The process that `signal:gateway:…` is for.
    pub gateway_pid: u32,
}

/// What came of a call.
#[derive(Clone, Debug)]
pub struct Exchange {
    pub began: Instant,
    pub ended: Instant,
    pub status: Option<u16>,
    pub headers: Headers,
    /// The body without its framing.
    pub body: Vec<u8>,
    pub interim: Vec<(u16, Instant)>,
    /// Statuses of all answers on a connection with raw bytes.
    pub responses: Vec<u16>,
    pub reader: Reader,
    pub first_event: Option<Instant>,
    /// The body ended as its framing says.
    pub complete: bool,
    pub chunked: bool,
    /// The gateway closed the connection.
    pub closed: bool,
    /// When the caller closed or reset it.
    pub acted_at: Option<Instant>,
    pub error: Option<String>,
    text: String,
    fired: Vec<usize>,
}

impl Sent {
    /// The request that a case's client sends.
    pub fn of(client: &Client) -> Result<Self, String> {
        let decode = |text: &String| {
            base64::engine::general_purpose::STANDARD.decode(text).map_err(|e| format!("base64: {e}"))
        };
        let raw = match (&client.raw_b64, &client.raw) {
            (Some(text), _) => Some(decode(text)?),
            (None, text) => text.clone().map(String::into_bytes),
        };
        let body = match (&client.body_gen, &client.body_b64, &client.body) {
            (Some(made), _, body) => generated(made, body.as_ref().map(|body| body.get()))?,
            (None, Some(text), _) => decode(text)?,
            (None, None, Some(body)) => body_bytes(body.get()),
            (None, None, None) => vec![],
        };
        let chunked = match client.framing {
            None | Some(Framing::Length) => false,
            Some(Framing::Chunked) => true,
            Some(other) => return Err(format!("client framing {other:?} is not known")),
        };
        let h2 = match client.proto.as_deref() {
            None | Some("h1") => false,
            Some("h2") => true,
            Some(other) => return Err(format!("client proto {other} is not known")),
        };
        for action in &client.actions {
            if !is_known(&action.action) {
                return Err(format!("client action `{}` is not known", action.action));
            }
        }
        Ok(Self {
            method: client.method().to_owned(),
            path: client.path().to_owned(),
            headers: client.headers.clone(),
            body,
            raw,
            chunked,
            h2,
            dribble: client.dribble,
            wait_100: client.wait_100_ms.map(Duration::from_millis),
            actions: client.actions.clone(),
            gateway_pid: 0,
        })
    }

    /// A request without a body.
    pub fn new(method: &str, path: &str) -> Self {
        Self { method: method.to_owned(), path: path.to_owned(), ..Self::default() }
    }

    /// The body as text, for reading what was asked.
    pub fn body_text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn is_h2(&self) -> bool {
        self.h2
    }

    fn is_raw(&self) -> bool {
        self.raw.is_some()
    }

    fn head(&self) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.path).into_bytes();
        if self.headers.find("host").is_none() {
            head.extend_from_slice(b"host: gw\r\n");
        }
        for (name, value) in &self.headers.0 {
            head.extend_from_slice(name.as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(&latin(value));
            head.extend_from_slice(b"\r\n");
        }
        let framed = ["content-length", "transfer-encoding"].iter().any(|n| self.headers.find(n).is_some());
        if self.chunked {
            head.extend_from_slice(b"transfer-encoding: chunked\r\n");
        } else if !framed && (self.method != "GET" || !self.body.is_empty()) {
            head.extend_from_slice(format!("content-length: {}\r\n", self.body.len()).as_bytes());
        }
        head.extend_from_slice(b"\r\n");
        head
    }

    fn framed_body(&self) -> Vec<u8> {
        if !self.chunked {
            return self.body.clone();
        }
        let mut bytes = vec![];
        for piece in self.body.chunks(CHUNK_BYTES) {
            bytes.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            bytes.extend_from_slice(piece);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"0\r\n\r\n");
        bytes
    }

    /// Sends it and reads what comes.
    pub async fn call(&self, to: SocketAddr) -> Exchange {
        let mut exchange = Exchange::begun();
        let stream = match TcpStream::connect(to).await {
            Ok(stream) => stream,
            Err(error) => {
                exchange.error = Some(format!("no connection: {error}"));
                return exchange;
            }
        };
        let _plain = stream.set_nodelay(true);
        let outcome = if self.h2 {
            let call = h2wire::call(&mut exchange, stream, self);
            tokio::time::timeout(PATIENCE, call)
                .await
                .unwrap_or_else(|_| Err("no end of the answer".to_owned()))
        } else {
            self.call_h1(&mut exchange, stream).await
        };
        exchange.error = outcome.err();
        exchange.ended = Instant::now();
        exchange
    }

    async fn call_h1(&self, exchange: &mut Exchange, mut stream: TcpStream) -> Result<(), String> {
        let go = Notify::new();
        let left = {
            let (mut reading, mut writing) = stream.split();
            let write = async {
                if let Some(raw) = &self.raw {
                    return writing.write_all(raw).await;
                }
                if let Some(wait) = self.wait_100 {
                    writing.write_all(&self.head()).await?;
                    let _waited = tokio::time::timeout(wait, go.notified()).await;
                    return writing.write_all(&self.framed_body()).await;
                }
                let mut bytes = self.head();
                bytes.extend_from_slice(&self.framed_body());
                for piece in bytes.chunks(self.dribble.unwrap_or(bytes.len()).max(1)) {
                    writing.write_all(piece).await?;
                    if self.dribble.is_some() {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
                Ok(())
            };
            let read = self.read(exchange, &mut reading, &go);
            tokio::pin!(read);
            tokio::pin!(write);
            let mut written = false;
            loop {
                tokio::select! {
                    left = &mut read => break left?,
                    // A gateway that answers early may stop reading: that is for the answer to tell.
                    _ = &mut write, if !written => written = true,
                }
            }
        };
        match left.as_deref() {
            Some("reset" | "rst") => {
                let _reset = stream.set_zero_linger();
                exchange.acted_at = Some(Instant::now());
            }
            Some("never_read") => {
                exchange.acted_at = Some(Instant::now());
                tokio::time::sleep(UNREAD).await;
            }
            Some(_) => exchange.acted_at = Some(Instant::now()),
            None => {}
        }
        Ok(())
    }

    /// Reads until the answer is over or the caller goes; answers how it goes.
    async fn read(
        &self,
        exchange: &mut Exchange,
        reading: &mut tokio::net::tcp::ReadHalf<'_>,
        go: &Notify,
    ) -> Result<Option<String>, String> {
        let mut answer = Answer::default();
        let mut buffer = vec![0; 64 << 10];
        loop {
            if let Some(action) = exchange.due(self) {
                return Ok(Some(action));
            }
            let patience = if self.is_raw() { RAW_SILENCE } else { PATIENCE };
            let wait = exchange.next_action(self).map_or(patience, |until| until.min(patience));
            let Ok(read) = tokio::time::timeout(wait, reading.read(&mut buffer)).await else {
                if wait < patience {
                    continue;
                }
                let silent = !self.is_raw() || exchange.responses.is_empty();
                return if silent { Err("no end of the answer".to_owned()) } else { Ok(None) };
            };
            let Ok(count @ 1..) = read else {
                exchange.closed = true;
                if answer.until_close() {
                    exchange.complete = true;
                }
                return Ok(None);
            };
            answer.buffer.extend_from_slice(&buffer[..count]);
            if answer.advance(exchange, self.method == "HEAD", go)? && !self.is_raw() {
                return Ok(None);
            }
        }
    }
}

/// The framing of an answer that is being read.
#[derive(Default)]
struct Answer {
    buffer: Vec<u8>,
    body: Option<Body>,
}

enum Body {
    Chunked(Box<wire::Chunks>),
    Length(usize),
    Close,
}

impl Answer {
    fn until_close(&self) -> bool {
        matches!(self.body, Some(Body::Close))
    }

    /// Uses up what has come; whether the answer is complete.
    fn advance(&mut self, exchange: &mut Exchange, headless: bool, go: &Notify) -> Result<bool, String> {
        let mut complete = false;
        loop {
            let Some(body) = &mut self.body else {
                let Some((status, headers, length)) = wire::response_head(&self.buffer)? else {
                    return Ok(complete);
                };
                self.buffer.drain(..length);
                if status < 200 {
                    exchange.interim.push((status, Instant::now()));
                    go.notify_one();
                    continue;
                }
                go.notify_one();
                exchange.responses.push(status);
                let first = exchange.responses.len() == 1;
                self.body = Some(body_of(status, &headers, headless));
                if first {
                    exchange.chunked = matches!(self.body, Some(Body::Chunked(_)));
                    exchange.status = Some(status);
                    exchange.headers = headers;
                }
                continue;
            };
            let (piece, ended) = match body {
                Body::Chunked(chunks) => {
                    chunks.feed(&std::mem::take(&mut self.buffer));
                    if chunks.broken() {
                        return Err("the chunks of the answer are broken".to_owned());
                    }
                    let piece = std::mem::take(&mut chunks.body);
                    if chunks.ended() {
                        self.buffer = chunks.behind().to_vec();
                    }
                    (piece, chunks.ended())
                }
                Body::Length(left) => {
                    let take = (*left).min(self.buffer.len());
                    *left -= take;
                    (self.buffer.drain(..take).collect(), *left == 0)
                }
                Body::Close => (std::mem::take(&mut self.buffer), false),
            };
            if exchange.responses.len() == 1 {
                exchange.take_body(&piece);
                exchange.complete |= ended;
            }
            if !ended {
                return Ok(complete);
            }
            self.body = None;
            complete = true;
            if self.buffer.is_empty() {
                return Ok(complete);
            }
        }
    }
}

fn body_of(status: u16, headers: &Headers, headless: bool) -> Body {
    if headless || status == 204 || status == 304 {
        return Body::Length(0);
    }
    if headers.find("transfer-encoding").is_some_and(|value| value.contains("chunked")) {
        return Body::Chunked(Box::default());
    }
    headers.find("content-length").and_then(|value| value.parse().ok()).map_or(Body::Close, Body::Length)
}

impl Exchange {
    fn begun() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            ended: now,
            status: None,
            headers: Headers::default(),
            body: vec![],
            interim: vec![],
            responses: vec![],
            reader: Reader::default(),
            first_event: None,
            complete: false,
            chunked: false,
            closed: false,
            acted_at: None,
            error: None,
            text: String::new(),
            fired: vec![],
        }
    }

    pub fn took(&self) -> Duration {
        self.ended - self.began
    }

    /// The caller did not get the end of its answer.
    pub fn aborted(&self) -> bool {
        !self.complete
    }

    fn is_stream(&self) -> bool {
        self.headers.find("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"))
    }

    /// The text that a conforming reader collects.
    pub fn text(&self) -> String {
        if self.is_stream() { self.text.clone() } else { sse::text_of_whole(&self.body) }
    }

    pub fn tool_calls(&self) -> Value {
        let whole: &[u8] = if self.is_stream() { b"" } else { &self.body };
        sse::tool_calls(&self.reader.events, whole)
    }

    pub fn body_text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(super) fn take_body(&mut self, piece: &[u8]) {
        self.body.extend_from_slice(piece);
        if !self.is_stream() {
            return;
        }
        let before = self.reader.events.len();
        self.reader.feed(piece);
        if let Some(new) = self.reader.events.get(before..).filter(|new| !new.is_empty()) {
            self.first_event.get_or_insert_with(Instant::now);
            self.text.push_str(&sse::text_of_events(new));
        }
    }

    /// What is to be done now. Signals are sent; a way to leave is answered.
    pub(super) fn due(&mut self, sent: &Sent) -> Option<String> {
        for (index, action) in sent.actions.iter().enumerate() {
            if self.fired.contains(&index) || !self.has_come(action) {
                continue;
            }
            self.fired.push(index);
            if let Some(signal) = action.action.strip_prefix("signal:gateway:") {
                signal_process(sent.gateway_pid, signal);
            } else {
                return Some(action.action.clone());
            }
        }
        None
    }

    fn has_come(&self, action: &Action) -> bool {
        let Action { after_text, after_events, after_contains, at_ms, action: _ } = action;
        let text = after_text.as_ref().is_none_or(|text| self.text().contains(text.as_str()));
        let events = after_events.is_none_or(|count| self.reader.events.len() >= count);
        let contains = after_contains.as_ref().is_none_or(|part| self.body_text().contains(part.as_str()));
        let time = at_ms.is_none_or(|ms| self.began.elapsed() >= Duration::from_millis(ms));
        text && events && contains && time
    }

    /// How long until an action's time.
    fn next_action(&self, sent: &Sent) -> Option<Duration> {
        let open = sent.actions.iter().enumerate().filter(|(index, _)| !self.fired.contains(index));
        let times = open.filter_map(|(_, action)| Some(Duration::from_millis(action.at_ms?)));
        let elapsed = self.began.elapsed();
        times.map(|at| at.saturating_sub(elapsed) + Duration::from_millis(1)).min()
    }
}

fn is_known(action: &str) -> bool {
    ["close", "fin", "reset", "rst", "never_read"].contains(&action)
        || action.starts_with("signal:gateway:")
        || action.strip_prefix("h2_rst:").is_some_and(|code| super::upstream::h2_reason(code).is_some())
}

/// Sends a signal by its name.
pub fn signal_process(pid: u32, signal: &str) {
    let _sent = std::process::Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
}

/// Bytes of a header value: one each where every character has one.
fn latin(text: &str) -> Vec<u8> {
    let one: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
    one.unwrap_or_else(|| text.as_bytes().to_vec())
}

fn generated(made: &BodyGen, body: Option<&str>) -> Result<Vec<u8>, String> {
    let BodyGen { json_path, repeat, raw, nest, prefix, suffix, count } = made;
    let filling = match (repeat, nest) {
        (Some(text), None) => format!("{prefix}{}{suffix}", text.repeat(*count)),
        (None, Some(opener)) => {
            let (inner, closer) = match opener.chars().find(|c| "[{".contains(*c)) {
                Some('[') if opener.as_str() == "[" => ("", "]"),
                Some('[') => ("0", "]"),
                Some('{') => ("0", "}"),
                _ => return Err(format!("body_gen: `{opener}` nests nothing")),
            };
            let closers: String = opener
                .chars()
                .filter(|c| "[{".contains(*c))
                .rev()
                .map(|c| if c == '[' { ']' } else { '}' })
                .collect();
            let closers = if closers.is_empty() { closer.to_owned() } else { closers };
            format!("{prefix}{}{inner}{}{suffix}", opener.repeat(*count), closers.repeat(*count))
        }
        _ => return Err("body_gen needs either `repeat` or `nest`".to_owned()),
    };
    match (raw, json_path) {
        (Some(raw), None) => Ok(raw.replacen("%s", &filling, 1).into_bytes()),
        (None, Some(path)) => {
            let mut body: Value = serde_json::from_str(body.unwrap_or("{}")).map_err(|e| e.to_string())?;
            let value = if nest.is_some() {
                return Err("body_gen: `nest` needs `raw`".to_owned());
            } else {
                Value::from(filling)
            };
            fill(&mut body, path, value)?;
            Ok(body.to_string().into_bytes())
        }
        _ => Err("body_gen needs either `raw` or `json_path`".to_owned()),
    }
}

/// Sets the value at a path such as `$.messages[0].content`, making what is missing on the way.
fn fill(body: &mut Value, path: &str, value: Value) -> Result<(), String> {
    let mut at = body;
    for part in path_parts(path) {
        at = if let Ok(index) = part.parse::<usize>() {
            if at.is_null() {
                *at = Value::Array(vec![]);
            }
            let items = at.as_array_mut().ok_or_else(|| format!("{path}: no array at {part}"))?;
            while items.len() <= index {
                items.push(serde_json::json!({ "role": "user" }));
            }
            &mut items[index]
        } else {
            if at.is_null() {
                *at = Value::Object(serde_json::Map::new());
            }
            let members = at.as_object_mut().ok_or_else(|| format!("{path}: no object at {part}"))?;
            members.entry(part).or_insert(Value::Null)
        };
    }
    *at = value;
    Ok(())
}

/// The parts of a path such as `$.a.b[0].c`.
pub fn path_parts(path: &str) -> Vec<String> {
    let path = path.strip_prefix("$.").or_else(|| path.strip_prefix('$')).unwrap_or(path);
    let parts = path.split(['.', '[']).map(|part| part.trim_end_matches(']').to_owned());
    parts.filter(|part| !part.is_empty()).collect()
}

/// The value at a path, or `null`.
pub fn value_at(value: &Value, path: &str) -> Value {
    let parts = path_parts(path);
    let step = |at: &Value, part: &String| match part.parse::<usize>() {
        Ok(index) if at.is_array() => at.get(index).cloned().unwrap_or_default(),
        _ => at.get(part).cloned().unwrap_or_default(),
    };
    parts.iter().fold(value.clone(), |at, part| step(&at, part))
}
