//! Upstreams that play a script on raw sockets and remember what they were asked.
//!
//! A script is cut at its `on` steps; the n-th request, on whichever connection it comes, gets the
//! n-th piece. A request behind the last piece is answered 599 and fails the case. HTTP/2 with prior
//! knowledge is told by its first bytes and played in `h2wire`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::case::{Absence, Framing, Headers, Step, Upstream};
use super::{h2wire, wire};

/// One write of a dribble; many small ones would be one read without it.
const DRIBBLE_GAP: Duration = Duration::from_micros(50);

/// A running upstream.
pub struct Scripted {
    pub name: String,
    pub address: SocketAddr,
    pub absence: Option<Absence>,
    pieces: Vec<Piece>,
    repeat: bool,
    state: Mutex<State>,
    tasks: Mutex<Vec<AbortHandle>>,
}

/// What one request is answered with.
#[derive(Clone, Debug)]
pub struct Piece {
    pub trigger: Trigger,
    pub steps: Vec<Act>,
}

/// What a piece waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// One whole request.
    Request,
    /// The head of one.
    Head,
    /// Its first bytes, which stay unread.
    Unread,
}

/// A checked step.
#[derive(Clone, Debug)]
pub struct Act {
    pub delay: Duration,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    Head(ResponseHead),
    /// One write, or many small ones.
    Bytes {
        bytes: Vec<u8>,
        dribble: Option<usize>,
        gap: Duration,
    },
    /// The proper end of the message.
    End(Headers),
    /// FIN.
    Close,
    /// RST.
    Reset,
    /// Silence until the other side goes.
    Hang,
    /// HTTP/2: `RST_STREAM`.
    H2Reset(h2::Reason),
    /// HTTP/2: `GOAWAY`, then nothing more on the connection.
    H2GoAway {
        last_stream_id: u32,
        reason: h2::Reason,
    },
}

#[derive(Clone, Debug)]
pub struct ResponseHead {
    pub status: u16,
    pub reason: String,
    pub headers: Headers,
    pub framing: Option<Framing>,
}

/// How requests are answered now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By the script.
    Script,
    /// With this error status: the case is being set up.
    Failing(u16),
    /// With a good whole answer: the case is over and something is asked about it.
    Good,
    /// Never.
    Hanging,
    /// It was asked before the case began.
    Forgotten,
}

/// A request that came.
#[derive(Clone, Debug)]
pub struct Asked {
    pub upstream: String,
    pub mode: Mode,
    pub connection: usize,
    /// Not the first on its connection.
    pub reused: bool,
    pub path: String,
    pub headers: Headers,
    pub body: Vec<u8>,
    /// All bytes, as they came; for HTTP/2 put together from its frames.
    pub raw: Vec<u8>,
    /// When it was there.
    pub at: Instant,
    /// A byte of an answer was sent.
    pub answered: bool,
    /// Refused in a way that promises that it was not looked at.
    pub unprocessed: bool,
    /// When the gateway gave it up.
    pub left_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Connection {
    closed_by_peer: Option<Instant>,
    closed_by_us: bool,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    next: usize,
    asked: Vec<Asked>,
    overrun: usize,
    connections: Vec<Connection>,
    spoke_h1: bool,
}

/// How the connection goes on behind a piece.
enum Then {
    NextRequest,
    Gone,
}

impl Scripted {
    /// Starts it.
    pub async fn start(upstream: &Upstream, repeat: bool) -> Result<Arc<Self>, String> {
        let pieces = pieces(&upstream.script).map_err(|e| format!("upstream {}: {e}", upstream.name))?;
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(|e| e.to_string())?;
        let address = listener.local_addr().map_err(|e| e.to_string())?;
        let state = State {
            mode: Mode::Script,
            next: 0,
            asked: vec![],
            overrun: 0,
            connections: vec![],
            spoke_h1: false,
        };
        let scripted = Arc::new(Self {
            name: upstream.name.clone(),
            address,
            absence: upstream.absence,
            pieces,
            repeat,
            state: Mutex::new(state),
            tasks: Mutex::default(),
        });
        if upstream.absence != Some(Absence::Refused) {
            let accepting = tokio::spawn(Arc::clone(&scripted).accept(listener));
            scripted.keep(accepting.abort_handle());
        }
        Ok(scripted)
    }

    /// Ends all that it does.
    pub fn stop(&self) {
        for task in self.tasks.lock().expect("tasks").drain(..) {
            task.abort();
        }
    }

    pub fn set_mode(&self, mode: Mode) {
        self.state().mode = mode;
    }

    /// Begins again, as if nothing had been asked; connections stay.
    pub fn forget(&self) {
        let mut state = self.state();
        (state.next, state.overrun) = (0, 0);
        // Indices of requests under way stay good.
        state.asked.iter_mut().for_each(|asked| asked.mode = Mode::Forgotten);
    }

    /// The requests that the script was played for.
    pub fn asked(&self) -> Vec<Asked> {
        self.state().asked.iter().filter(|asked| asked.mode == Mode::Script).cloned().collect()
    }

    /// The requests that came in another mode.
    pub fn asked_in(&self, mode: Mode) -> usize {
        self.state().asked.iter().filter(|asked| asked.mode == mode).count()
    }

    /// Requests behind the script's end.
    pub fn overrun(&self) -> usize {
        self.state().overrun
    }

    /// Connections that nobody has closed.
    pub fn open_connections(&self) -> usize {
        let open = |c: &&Connection| c.closed_by_peer.is_none() && !c.closed_by_us;
        self.state().connections.iter().filter(open).count()
    }

    /// The script is for HTTP/2, but was asked in HTTP/1.1.
    pub fn missed_h2(&self, script: &[Step]) -> bool {
        wants_h2(script) && self.state().spoke_h1
    }

    pub(super) fn state_of<T>(&self, index: usize, change: impl FnOnce(&mut Asked) -> T) -> Option<T> {
        self.state().asked.get_mut(index).map(change)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("an upstream's state")
    }

    pub(super) fn keep(&self, task: AbortHandle) {
        self.tasks.lock().expect("tasks").push(task);
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) {
        while let Ok((stream, _)) = listener.accept().await {
            if self.absence.is_some() {
                continue; // Closed at once: no TLS will come of it.
            }
            let _plain = stream.set_nodelay(true);
            let connection = {
                let mut state = self.state();
                state.connections.push(Connection::default());
                state.connections.len() - 1
            };
            let serving = tokio::spawn(Arc::clone(&self).serve(stream, connection));
            self.keep(serving.abort_handle());
        }
    }

    async fn serve(self: Arc<Self>, stream: TcpStream, connection: usize) {
        let mut first = [0; 3];
        if matches!(stream.peek(&mut first).await, Ok(3)) && &first == b"PRI" {
            h2wire::serve(&self, stream, connection).await;
        } else {
            self.serve_h1(stream, connection).await;
        }
        let mut state = self.state();
        let ended = &mut state.connections[connection];
        ended.closed_by_us = ended.closed_by_peer.is_none();
    }

    async fn serve_h1(&self, stream: TcpStream, connection: usize) {
        let mut line = Line { stream, buffer: vec![] };
        let mut reused = false;
        loop {
            if self.next_trigger() == Some(Trigger::Unread) {
                if !line.has_bytes().await {
                    return self.left(connection, None);
                }
                let asked = Asked { unprocessed: true, ..self.blank(connection, reused) };
                let (index, piece) = self.take(asked);
                match self.play(&mut line, piece, index, connection).await {
                    Then::NextRequest => continue,
                    Then::Gone => return,
                }
            }
            let Some(head) = line.head().await else { return self.left(connection, None) };
            self.state().spoke_h1 = true;
            let mut raw = head.raw.clone();
            let body = if self.next_trigger() == Some(Trigger::Head) {
                vec![]
            } else {
                let Some((body, bytes)) = line.body(&head).await else { return self.left(connection, None) };
                raw.extend_from_slice(&bytes);
                body
            };
            let asked =
                Asked { path: head.path, headers: head.headers, body, raw, ..self.blank(connection, reused) };
            let (index, piece) = self.take(asked);
            match self.play(&mut line, piece, index, connection).await {
                Then::NextRequest => reused = true,
                Then::Gone => return,
            }
        }
    }

    /// A request of which nothing is known yet.
    pub(super) fn blank(&self, connection: usize, reused: bool) -> Asked {
        Asked {
            upstream: self.name.clone(),
            mode: self.state().mode,
            connection,
            reused,
            path: String::new(),
            headers: Headers::default(),
            body: vec![],
            raw: vec![],
            at: Instant::now(),
            answered: false,
            unprocessed: false,
            left_at: None,
        }
    }

    fn next_trigger(&self) -> Option<Trigger> {
        let state = self.state();
        if state.mode != Mode::Script {
            return None;
        }
        self.piece(state.next).map(|piece| piece.trigger)
    }

    fn piece(&self, number: usize) -> Option<&Piece> {
        let index = if self.repeat { number.checked_rem(self.pieces.len())? } else { number };
        self.pieces.get(index)
    }

    /// Remembers a request; answers what it gets.
    pub(super) fn take(&self, asked: Asked) -> (usize, Piece) {
        let mut state = self.state();
        let piece = match asked.mode {
            Mode::Failing(status) => whole(status, "application/json", &failing_body(status)),
            Mode::Good => whole(200, "application/json", &good_body(&asked.path)),
            Mode::Hanging => hanging(),
            Mode::Script | Mode::Forgotten => {
                let number = state.next;
                state.next += 1;
                if let Some(piece) = self.piece(number) {
                    piece.clone()
                } else {
                    state.overrun += 1;
                    whole(599, "application/json", r#"{"error":{"message":"the script is at its end"}}"#)
                }
            }
        };
        state.asked.push(asked);
        (state.asked.len() - 1, piece)
    }

    /// The gateway has closed the connection.
    pub(super) fn left(&self, connection: usize, index: Option<usize>) {
        let now = Instant::now();
        let mut state = self.state();
        state.connections[connection].closed_by_peer.get_or_insert(now);
        if let Some(asked) = index.and_then(|index| state.asked.get_mut(index)) {
            asked.left_at.get_or_insert(now);
        }
    }

    async fn play(&self, line: &mut Line, piece: Piece, index: usize, connection: usize) -> Then {
        let mut framing = None;
        for act in piece.steps {
            let silent = matches!(act.what, What::Hang);
            let wait = if silent { Duration::from_secs(3600) } else { act.delay };
            if !wait.is_zero() && !line.pause(wait).await {
                self.left(connection, Some(index));
                return Then::Gone;
            }
            let sent = match act.what {
                What::Head(head) => {
                    framing = head.framing;
                    line.write(&head_bytes(&head)).await
                }
                What::Bytes { bytes, dribble, gap } => {
                    let chunked = framing == Some(Framing::Chunked);
                    line.write_pieces(&bytes, dribble, gap, chunked).await
                }
                What::End(trailers) => match framing {
                    Some(Framing::Chunked) => line.write(&last_chunk(&trailers)).await,
                    Some(Framing::Length) | None => true,
                    Some(Framing::Close | Framing::Raw) => return Then::Gone,
                },
                What::Close | What::Hang => return Then::Gone,
                What::Reset => {
                    let _gone = line.stream.set_zero_linger();
                    return Then::Gone;
                }
                What::H2Reset(_) | What::H2GoAway { .. } => return Then::Gone,
            };
            if !sent {
                self.left(connection, Some(index));
                return Then::Gone;
            }
            self.state_of(index, |asked| asked.answered = true);
        }
        if framing == Some(Framing::Close) { Then::Gone } else { Then::NextRequest }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A connection, with what was read ahead.
struct Line {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Line {
    /// Waits for bytes without reading them.
    async fn has_bytes(&self) -> bool {
        !self.buffer.is_empty() || matches!(self.stream.peek(&mut [0]).await, Ok(1..))
    }

    /// Reads what is there. `false`: the other side has closed.
    async fn more(&mut self) -> bool {
        loop {
            if self.stream.readable().await.is_err() {
                return false;
            }
            let mut piece = [0; 64 << 10];
            match self.stream.try_read(&mut piece) {
                Ok(0) => return false,
                Ok(count) => {
                    self.buffer.extend_from_slice(&piece[..count]);
                    return true;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
    }

    /// Waits. `false`: the other side closed meanwhile.
    async fn pause(&mut self, wait: Duration) -> bool {
        let over = tokio::time::sleep(wait);
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = &mut over => return true,
                there = self.more() => if !there { return false },
            }
        }
    }

    async fn head(&mut self) -> Option<wire::RequestHead> {
        loop {
            if let Some(head) = wire::request_head(&self.buffer) {
                self.buffer.drain(..head.raw.len());
                return Some(head);
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// The body, and the bytes that it came in.
    async fn body(&mut self, head: &wire::RequestHead) -> Option<(Vec<u8>, Vec<u8>)> {
        let chunked = head.headers.find("transfer-encoding").is_some_and(|v| v.contains("chunked"));
        let length = head.headers.find("content-length").and_then(|v| v.parse::<usize>().ok()).unwrap_or(0);
        loop {
            let taken = if chunked {
                let mut chunks = wire::Chunks::default();
                chunks.feed(&self.buffer);
                chunks.ended().then(|| (chunks.body.clone(), chunks.consumed))
            } else {
                self.buffer.get(..length).map(|body| (body.to_vec(), length))
            };
            if let Some((body, count)) = taken {
                return Some((body, self.buffer.drain(..count).collect()));
            }
            if !self.more().await {
                return None;
            }
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).await.is_ok()
    }

    async fn write_pieces(
        &mut self,
        bytes: &[u8],
        dribble: Option<usize>,
        gap: Duration,
        chunked: bool,
    ) -> bool {
        if bytes.is_empty() {
            return true;
        }
        for (index, piece) in bytes.chunks(dribble.unwrap_or(bytes.len()).max(1)).enumerate() {
            if index > 0 {
                tokio::time::sleep(gap.max(DRIBBLE_GAP)).await;
            }
            let sent = if chunked {
                let mut chunk = format!("{:x}\r\n", piece.len()).into_bytes();
                chunk.extend_from_slice(piece);
                chunk.extend_from_slice(b"\r\n");
                self.write(&chunk).await
            } else {
                self.write(piece).await
            };
            if !sent {
                return false;
            }
        }
        true
    }
}

/// Whether a script is for HTTP/2.
pub fn wants_h2(script: &[Step]) -> bool {
    script.iter().any(|step| {
        step.proto.as_deref() == Some("h2") || step.action.as_ref().is_some_and(|a| a.starts_with("h2_"))
    })
}

/// Cuts a script at its `on` steps and checks every step.
fn pieces(script: &[Step]) -> Result<Vec<Piece>, String> {
    let mut pieces: Vec<Piece> = vec![];
    for (index, step) in script.iter().enumerate() {
        if let Some(on) = &step.on {
            let head = step.head || step.part.as_deref() == Some("head");
            let trigger = match on.as_str() {
                "request" if head => Trigger::Head,
                "request" => Trigger::Request,
                "head" | "request_head" | "request head" => Trigger::Head,
                "unread" => Trigger::Unread,
                other => return Err(format!("`on: {other}` is not known")),
            };
            match step.proto.as_deref() {
                None | Some("h1" | "h2") => {}
                Some(other) => return Err(format!("`proto: {other}` is not known")),
            }
            pieces.push(Piece { trigger, steps: vec![] });
        }
        let steps = acts(step, script.get(index + 1..).unwrap_or_default())?;
        if steps.is_empty() {
            continue;
        }
        match pieces.last_mut() {
            Some(piece) => piece.steps.extend(steps),
            None => return Err("a script begins with an `on` step".to_owned()),
        }
    }
    Ok(pieces)
}

fn acts(step: &Step, rest: &[Step]) -> Result<Vec<Act>, String> {
    let mut acts = vec![];
    let mut delay = Duration::from_millis(step.delay_ms);
    let mut act = |what| acts.push(Act { delay: std::mem::take(&mut delay), what });
    let bytes = step_bytes(step)?;
    let whole = step.status.is_some() && (step.body.is_some() || bytes.is_some());
    if let Some(status) = step.status {
        let bodiless = status < 200 || status == 204 || status == 304;
        let framing = step.framing.or(if bodiless { None } else { Some(Framing::Chunked) });
        let mut headers = step.headers.clone();
        if framing == Some(Framing::Length) && headers.find("content-length").is_none() {
            let length = if whole { bytes.as_ref().map_or(0, Vec::len) } else { bytes_ahead(rest)? };
            headers.set("content-length", &length.to_string());
        }
        if framing == Some(Framing::Chunked) && headers.find("transfer-encoding").is_none() {
            headers.set("transfer-encoding", "chunked");
        }
        let reason = step.reason.clone().unwrap_or_else(|| reason_of(status));
        act(What::Head(ResponseHead { status, reason, headers, framing }));
    }
    if let Some(bytes) = bytes {
        act(What::Bytes { bytes, dribble: step.dribble, gap: Duration::from_millis(step.dribble_ms) });
        if whole && step.framing != Some(Framing::Raw) {
            act(What::End(step.trailers.clone()));
        }
    }
    if let Some(action) = &step.action {
        act(action_of(action, step)?);
    }
    Ok(acts)
}

fn action_of(action: &str, step: &Step) -> Result<What, String> {
    let unknown = || format!("`action: {action}` is not known");
    Ok(match action {
        "end" => What::End(step.trailers.clone()),
        "close" | "fin" => What::Close,
        "reset" | "rst" => What::Reset,
        "hang" => What::Hang,
        h2 => {
            let (kind, rest) = h2.split_once(':').unwrap_or((h2, ""));
            match kind {
                "h2_rst" => What::H2Reset(h2_reason(rest).ok_or_else(unknown)?),
                "h2_goaway" => {
                    let mut last_stream_id = 0;
                    let mut reason = h2::Reason::NO_ERROR;
                    for part in rest.split([',', ':']).map(str::trim).filter(|part| !part.is_empty()) {
                        if let Some(id) = part.strip_prefix("last_stream_id=") {
                            last_stream_id = id.parse().map_err(|_| unknown())?;
                        } else {
                            reason = h2_reason(part).ok_or_else(unknown)?;
                        }
                    }
                    What::H2GoAway { last_stream_id, reason }
                }
                _ => return Err(unknown()),
            }
        }
    })
}

/// The names of RFC 9113, section 7.
pub fn h2_reason(name: &str) -> Option<h2::Reason> {
    Some(match name {
        "NO_ERROR" => h2::Reason::NO_ERROR,
        "PROTOCOL_ERROR" => h2::Reason::PROTOCOL_ERROR,
        "INTERNAL_ERROR" => h2::Reason::INTERNAL_ERROR,
        "FLOW_CONTROL_ERROR" => h2::Reason::FLOW_CONTROL_ERROR,
        "SETTINGS_TIMEOUT" => h2::Reason::SETTINGS_TIMEOUT,
        "STREAM_CLOSED" => h2::Reason::STREAM_CLOSED,
        "FRAME_SIZE_ERROR" => h2::Reason::FRAME_SIZE_ERROR,
        "REFUSED_STREAM" => h2::Reason::REFUSED_STREAM,
        "CANCEL" => h2::Reason::CANCEL,
        "COMPRESSION_ERROR" => h2::Reason::COMPRESSION_ERROR,
        "CONNECT_ERROR" => h2::Reason::CONNECT_ERROR,
        "ENHANCE_YOUR_CALM" => h2::Reason::ENHANCE_YOUR_CALM,
        "INADEQUATE_SECURITY" => h2::Reason::INADEQUATE_SECURITY,
        "HTTP_1_1_REQUIRED" => h2::Reason::HTTP_1_1_REQUIRED,
        _ => return None,
    })
}

/// The bytes of a step, whichever field they stand in.
pub fn step_bytes(step: &Step) -> Result<Option<Vec<u8>>, String> {
    if let Some(body) = &step.body {
        return Ok(Some(body_bytes(body.get())));
    }
    if let Some(text) = &step.bytes {
        return Ok(Some(text.clone().into_bytes()));
    }
    if let Some(text) = &step.bytes_b64 {
        return base64::engine::general_purpose::STANDARD.decode(text).map(Some).map_err(|e| e.to_string());
    }
    Ok(step
        .bytes_gen
        .as_ref()
        .map(|made| format!("{}{}{}", made.prefix, made.repeat.repeat(made.count), made.suffix).into_bytes()))
}

/// JSON as it is written; text and `{"__raw__": …}` as the bytes that they stand for.
pub fn body_bytes(text: &str) -> Vec<u8> {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::String(text)) => text.into_bytes(),
        Ok(Value::Object(members)) if members.len() == 1 && members.contains_key("__raw__") => {
            members.get("__raw__").and_then(Value::as_str).unwrap_or_default().as_bytes().to_vec()
        }
        _ => text.as_bytes().to_vec(),
    }
}

/// How many bytes the following steps send before the message ends.
fn bytes_ahead(rest: &[Step]) -> Result<usize, String> {
    let mut sum = 0;
    for step in rest {
        if step.on.is_some() || step.status.is_some() {
            break;
        }
        sum += step_bytes(step)?.map_or(0, |bytes| bytes.len());
        if step.action.is_some() {
            break;
        }
    }
    Ok(sum)
}

fn head_bytes(head: &ResponseHead) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {} {}\r\n", head.status, head.reason);
    for (name, value) in &head.headers.0 {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    (text + "\r\n").into_bytes()
}

fn last_chunk(trailers: &Headers) -> Vec<u8> {
    let fields: String = trailers.0.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("0\r\n{fields}\r\n").into_bytes()
}

fn reason_of(status: u16) -> String {
    let known = http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    known.unwrap_or("Unknown").to_owned()
}

fn whole(status: u16, kind: &str, body: &str) -> Piece {
    let mut headers = Headers(vec![("content-type".to_owned(), kind.to_owned())]);
    headers.set("content-length", &body.len().to_string());
    let head = ResponseHead { status, reason: reason_of(status), headers, framing: Some(Framing::Length) };
    let act = |what| Act { delay: Duration::ZERO, what };
    let bytes = What::Bytes { bytes: body.as_bytes().to_vec(), dribble: None, gap: Duration::ZERO };
    Piece {
        trigger: Trigger::Request,
        steps: vec![act(What::Head(head)), act(bytes), act(What::End(Headers::default()))],
    }
}

fn hanging() -> Piece {
    Piece { trigger: Trigger::Request, steps: vec![Act { delay: Duration::ZERO, what: What::Hang }] }
}

fn failing_body(status: u16) -> String {
    // A 403 of the type `server_error` would be taken for the endpoint's trouble.
    let kind = if status < 500 { "permission_error" } else { "server_error" };
    format!(r#"{{"error":{{"message":"set up to fail","type":"{kind}","param":null,"code":{status}}}}}"#)
}

/// A whole answer of the surface that was asked.
fn good_body(path: &str) -> String {
    if path.ends_with("/messages") {
        r#"{"id":"m1","type":"message","role":"assistant","model":"up-c","content":[{"type":"text","text":"Hello"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":10,"output_tokens":5}}"#
    } else if path.ends_with("/embeddings") {
        r#"{"object":"list","model":"e","data":[{"object":"embedding","index":0,"embedding":[0.1]}],"usage":{"prompt_tokens":8,"total_tokens":8}}"#
    } else {
        r#"{"id":"cc-1","object":"chat.completion","created":1,"model":"up-a","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15}}"#
    }
    .to_owned()
}

/// All upstreams of a run, by name.
pub type Upstreams = BTreeMap<String, Arc<Scripted>>;
