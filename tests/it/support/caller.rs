//! A caller on a raw socket, so that a test sees every byte and when it came.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::KEY;

/// How long a read may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// A request to send.
pub struct Call {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    chunked: bool,
}

/// A connection with an answer under way.
pub struct Caller {
    stream: TcpStream,
    buffer: Vec<u8>,
    interim: usize,
}

/// An answer, whole.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The pieces as they came, each with its time.
    pub pieces: Vec<(Instant, Vec<u8>)>,
    /// The body ended as its framing says.
    pub clean: bool,
    /// Interim answers (1xx) that came before it.
    pub interim: usize,
}

/// The head of an answer.
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl Call {
    pub fn post(body: impl Into<Vec<u8>>) -> Self {
        Self {
            method: "POST".to_owned(),
            path: "/v1/chat/completions".to_owned(),
            headers: vec![
                ("authorization".to_owned(), format!("Bearer {KEY}")),
                ("content-type".to_owned(), "application/json".to_owned()),
            ],
            body: body.into(),
            chunked: false,
        }
    }

    pub fn get(path: &str) -> Self {
        let call = Self::post("");
        Self { method: "GET".to_owned(), path: path.to_owned(), ..call }
    }

    pub fn path(mut self, path: &str) -> Self {
        path.clone_into(&mut self.path);
        self
    }

    /// Replaces or adds a header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Leaves a header out.
    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self
    }

    /// Sends the body in chunks of odd sizes instead of announcing its length.
    pub fn chunked(mut self) -> Self {
        self.chunked = true;
        self
    }

    fn head(&self) -> String {
        let mut head = format!("{} {} HTTP/1.1\r\nhost: gateway\r\n", self.method, self.path);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if self.chunked {
            head.push_str("transfer-encoding: chunked\r\n");
        } else if self.method == "POST" {
            head.push_str(&format!("content-length: {}\r\n", self.body.len()));
        }
        head + "\r\n"
    }

    /// Sends it on a connection of its own; the answer is still to be read.
    pub async fn begin(self, to: SocketAddr) -> Caller {
        let mut caller = Caller::connect(to).await;
        caller.send(&self).await;
        caller
    }

    /// Sends it and reads the whole answer.
    pub async fn send(self, to: SocketAddr) -> Answer {
        self.begin(to).await.answer().await
    }
}

impl Caller {
    pub async fn connect(to: SocketAddr) -> Self {
        Self::try_connect(to).await.expect("a connection")
    }

    /// A connection, unless nobody listens.
    pub async fn try_connect(to: SocketAddr) -> Option<Self> {
        let stream = TcpStream::connect(to).await.ok()?;
        stream.set_nodelay(true).ok()?;
        Some(Self { stream, buffer: vec![], interim: 0 })
    }

    /// A connection from another address of this machine.
    pub async fn connect_from(from: Ipv4Addr, to: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind((from, 0).into()).expect("an address of the loopback");
        let stream = socket.connect(to).await.expect("a connection");
        stream.set_nodelay(true).expect("a socket");
        Self { stream, buffer: vec![], interim: 0 }
    }

    /// Sends a request. A gateway that answers early may stop reading: that is no fault of a test.
    pub async fn send(&mut self, call: &Call) {
        let mut wire = call.head().into_bytes();
        if call.chunked {
            for (index, piece) in call.body.chunks(60_007).enumerate() {
                let extension = if index % 2 == 0 { "" } else { ";x=y" };
                wire.extend_from_slice(format!("{:x}{extension}\r\n", piece.len()).as_bytes());
                wire.extend_from_slice(piece);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\n\r\n");
        } else {
            wire.extend_from_slice(&call.body);
        }
        let _early = self.stream.write_all(&wire).await;
    }

    /// Sends bytes as they are.
    pub async fn send_raw(&mut self, bytes: &[u8]) {
        let _early = self.stream.write_all(bytes).await;
    }

    async fn more(&mut self) -> bool {
        let mut piece = vec![0; 64 << 10];
        let read = tokio::time::timeout(PATIENCE, self.stream.read(&mut piece)).await;
        match read.expect("the answer never came") {
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&piece[..count]);
                true
            }
        }
    }

    /// Whether bytes of an answer come soon; for callers that are either refused at once or hang.
    pub async fn answered_soon(&mut self) -> bool {
        let mut piece = vec![0; 64 << 10];
        let soon = tokio::time::timeout(Duration::from_millis(300), self.stream.read(&mut piece)).await;
        match soon {
            Ok(Ok(count)) => {
                self.buffer.extend_from_slice(&piece[..count]);
                count > 0
            }
            _ => false,
        }
    }

    /// Says that nothing more will be sent.
    pub async fn finish_sending(&mut self) {
        let _early = self.stream.shutdown().await;
    }

    /// Waits for an interim answer.
    pub async fn read_interim(&mut self, status: u16) {
        let line = format!("HTTP/1.1 {status} ");
        loop {
            if let Some(end) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
                assert!(head.starts_with(line.as_bytes()), "{}", String::from_utf8_lossy(&head));
                return;
            }
            assert!(self.more().await, "the connection closed before {status}");
        }
    }

    /// Reads everything until the gateway closes.
    pub async fn rest(mut self) -> Vec<u8> {
        while self.more().await {}
        self.buffer
    }

    /// The head, after any interim ones. `None`: the connection closed before it.
    pub async fn try_head(&mut self) -> Option<Head> {
        loop {
            let end = loop {
                if let Some(end) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                    break end;
                }
                if !self.more().await {
                    return None;
                }
            };
            let text = String::from_utf8(self.buffer[..end].to_vec()).expect("a head in ASCII");
            self.buffer.drain(..end + 4);
            let mut lines = text.split("\r\n");
            let status = lines.next().and_then(|l| l.split(' ').nth(1)?.parse().ok()).expect("a status");
            if (100..200).contains(&status) {
                self.interim += 1;
                continue;
            }
            let headers = lines
                .filter_map(|line| line.split_once(": "))
                .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
                .collect();
            return Some(Head { status, headers });
        }
    }

    pub async fn head(&mut self) -> Head {
        self.try_head().await.expect("an answer")
    }

    /// The next chunk of a chunked body; `None` at its end, `Err` when the connection ends inside.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>, ()> {
        loop {
            if let Some(line) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                let size = std::str::from_utf8(&self.buffer[..line]).expect("a size");
                let size = usize::from_str_radix(size, 16).expect("a size in hex");
                let whole = line + 2 + size + 2;
                if self.buffer.len() >= whole {
                    let chunk = self.buffer[line + 2..line + 2 + size].to_vec();
                    self.buffer.drain(..whole);
                    return Ok((size > 0).then_some(chunk));
                }
            }
            if !self.more().await {
                return Err(());
            }
        }
    }

    /// Reads until the body contains `text`; answers what came.
    pub async fn read_until(&mut self, text: &str) -> String {
        let mut all = String::new();
        while !all.contains(text) {
            let chunk = self.chunk().await.expect("more").expect("more");
            all.push_str(&String::from_utf8_lossy(&chunk));
        }
        all
    }

    /// Reads the whole answer.
    pub async fn answer(mut self) -> Answer {
        self.next_answer().await
    }

    /// Reads an answer and keeps the connection.
    pub async fn next_answer(&mut self) -> Answer {
        self.try_next_answer().await.expect("an answer")
    }

    /// The same; `None`: the connection closed before it.
    pub async fn try_next_answer(&mut self) -> Option<Answer> {
        let head = self.try_head().await?;
        Some(self.body(head).await)
    }

    /// Reads what follows a head.
    pub async fn body(&mut self, head: Head) -> Answer {
        let mut answer = Answer {
            status: head.status,
            headers: head.headers,
            body: vec![],
            pieces: vec![],
            clean: true,
            interim: std::mem::take(&mut self.interim),
        };
        if let Some(length) = answer.header("content-length").and_then(|l| l.parse::<usize>().ok()) {
            while self.buffer.len() < length {
                if !self.more().await {
                    answer.clean = false;
                    break;
                }
            }
            let length = length.min(self.buffer.len());
            answer.body = self.buffer.drain(..length).collect();
            return answer;
        }
        if answer.header("transfer-encoding").is_none() {
            while self.more().await {}
            answer.body = std::mem::take(&mut self.buffer);
            return answer;
        }
        loop {
            match self.chunk().await {
                Ok(Some(chunk)) => {
                    answer.body.extend_from_slice(&chunk);
                    answer.pieces.push((Instant::now(), chunk));
                }
                Ok(None) => return answer,
                Err(()) => {
                    answer.clean = false;
                    return answer;
                }
            }
        }
    }

    /// Leaves as an impatient caller does: with a reset.
    pub fn reset(self) {
        self.stream.set_zero_linger().expect("linger");
    }
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The `code` of an error.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}
