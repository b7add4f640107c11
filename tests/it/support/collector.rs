//! A stand-in for an OpenTelemetry collector: it decodes what it is sent, and answers as it is scripted to.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);
const TAKEN: &str = "200 OK";

/// It takes what it is sent.
pub struct Collector {
    pub address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    messages: Vec<Message>,
    /// Of a path, what is answered next instead of [`TAKEN`]: a status line's end, and headers.
    script: Vec<(String, VecDeque<String>)>,
}

/// One message, and what was answered.
#[derive(Clone, Debug)]
pub struct Message {
    /// In small letters.
    pub head: String,
    pub body: Vec<u8>,
    pub answer: String,
}

/// All metrics of one message, and whose they are.
#[derive(Clone, Debug)]
pub struct Reading {
    pub resource: Resource,
    pub metrics: Vec<Metric>,
}

impl Collector {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    /// One that comes up at an address where nobody was.
    pub async fn start_at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Seen>>::default();
        let sink = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(take(socket, Arc::clone(&sink)));
            }
        });
        Self { address, seen }
    }

    /// Answers the next messages to `path` with these, one after the other.
    pub fn answer(&self, path: &str, answers: &[&str]) {
        let answers = answers.iter().map(|answer| (*answer).to_owned()).collect();
        self.seen.lock().unwrap().script.push((path.to_owned(), answers));
    }

    /// Every message so far.
    pub fn messages(&self) -> Vec<Message> {
        self.seen.lock().unwrap().messages.clone()
    }

    /// The spans that were taken so far.
    pub fn spans(&self) -> Vec<Span> {
        let of = |message: Message| {
            let decoded = ExportTraceServiceRequest::decode(message.body.as_slice()).expect("spans of OTLP");
            let scopes = decoded.resource_spans.into_iter().flat_map(|it| it.scope_spans);
            scopes.flat_map(|it| it.spans).collect::<Vec<_>>()
        };
        self.taken("/v1/traces").into_iter().flat_map(of).collect()
    }

    /// The metrics that were taken so far, message by message.
    pub fn readings(&self) -> Vec<Reading> {
        let of = |message: Message| {
            let decoded =
                ExportMetricsServiceRequest::decode(message.body.as_slice()).expect("metrics of OTLP");
            let [of] = decoded.resource_metrics.try_into().expect("of one process");
            let metrics = of.scope_metrics.into_iter().flat_map(|it| it.metrics).collect();
            Reading { resource: of.resource.unwrap_or_default(), metrics }
        };
        self.taken("/v1/metrics").into_iter().map(of).collect()
    }

    fn taken(&self, path: &str) -> Vec<Message> {
        let start = format!("post {path} ");
        let is_taken =
            |message: &Message| message.head.starts_with(&start) && message.answer.starts_with("200");
        self.messages().into_iter().filter(is_taken).collect()
    }

    /// Waits until so many spans have come.
    pub async fn wait_for_spans(&self, count: usize) -> Vec<Span> {
        self.wait_for("enough spans", || Some(self.spans()).filter(|spans| spans.len() >= count)).await
    }

    /// Waits for a reading that begins after now.
    pub async fn next_reading(&self) -> Reading {
        let known = self.readings().len();
        // One may be on its way that was gathered before.
        self.wait_for("a reading", || self.readings().get(known + 1).cloned()).await
    }

    /// Waits until something is there.
    pub async fn wait_for<T>(&self, what: &str, look: impl Fn() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            let messages = self.messages();
            let heads: Vec<_> = messages.iter().map(|message| (&message.head, &message.answer)).collect();
            assert!(began.elapsed() < PATIENCE, "{what} never came: {heads:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The text or the number of an attribute; empty where it is not there.
pub fn attribute(attributes: &[KeyValue], key: &str) -> String {
    match attributes.iter().find(|it| it.key == key).and_then(|it| it.value.clone()?.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

/// Messages on one connection.
async fn take(mut socket: TcpStream, seen: Arc<Mutex<Seen>>) {
    let mut got: Vec<u8> = vec![];
    loop {
        let Some(end) = got.windows(4).position(|window| window == b"\r\n\r\n") else {
            if socket.read_buf(&mut got).await.unwrap_or(0) == 0 {
                return;
            }
            continue;
        };
        let head = String::from_utf8_lossy(&got[..end]).to_lowercase();
        assert!(head.contains("content-type: application/x-protobuf"), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let whole = end + 4 + length.parse::<usize>().unwrap();
        while got.len() < whole {
            if socket.read_buf(&mut got).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let body: Vec<u8> = got.drain(..whole).skip(end + 4).collect();
        let answer = {
            let mut seen = seen.lock().unwrap();
            let mut scripts = seen.script.iter_mut();
            let script =
                scripts.find(|(path, left)| head.starts_with(&format!("post {path} ")) && !left.is_empty());
            let answer = script.and_then(|(_, left)| left.pop_front()).unwrap_or_else(|| TAKEN.to_owned());
            seen.messages.push(Message { head, body, answer: answer.clone() });
            answer
        };
        let reply = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n");
        if socket.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}
