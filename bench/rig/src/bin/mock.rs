//! Mock LLM upstream: OpenAI chat completions, Anthropic messages, model list.
//!
//! `mock [--threads N] [--tls FOLDER] PORT[+TLS][:SPEC]...` listens on 127.0.0.1. SPEC is
//! `key=value,...` (see [`Spec::set`]). A port's spec can be replaced while
//! it runs with `PUT /_mock?SPEC` (which also zeroes its counters), and for
//! one request with the header `x-mock: SPEC` or the query `?mock=SPEC`.
//! `GET /_mock` shows the port's counters, `GET /_mock/times` when its latest requests came and its latest faults
//! were answered, in nanoseconds of the system's clock. With `--tls FOLDER` a PORT may
//! be PLAIN+TLS: the second one speaks HTTP/2 over TLS, and is the same port otherwise.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rig::mono_ns;
use rig::wire::{Api, Reply};
use serde::Deserialize;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_rustls::TlsAcceptor;

/// How a port, or one request, is answered.
#[derive(Clone, Debug)]
struct Spec {
    /// Before the response headers.
    ttfb: Duration,
    /// Between the headers and the first chunk.
    first: Duration,
    /// Between chunks.
    gap: Duration,
    chunks: u32,
    /// Bytes of text in a chunk, or in a non-streamed answer.
    size: usize,
    fault: Fault,
    /// Share of requests that the fault hits.
    rate: f64,
    /// Chunks sent before a mid-stream fault.
    after: u32,
    retry_after: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// An error status, with `Retry-After`.
    Status(u16),
    /// Accept and read the request, never answer.
    Hang,
    /// Go silent after `after` chunks (0: right after the headers).
    Stall,
    /// TCP reset after `after` chunks.
    Reset,
    /// Orderly close after `after` chunks, without the last chunk.
    Truncate,
    /// A 200 whose first event is an error.
    SseError,
}

impl Default for Spec {
    fn default() -> Self {
        Spec {
            ttfb: Duration::ZERO,
            first: Duration::ZERO,
            gap: Duration::ZERO,
            chunks: 10,
            size: 700,
            fault: Fault::None,
            rate: 1.0,
            after: 3,
            retry_after: 1,
        }
    }
}

impl Spec {
    /// Applies `key=value` pairs separated by commas (or `&`, for queries).
    fn set(mut self, text: &str) -> Result<Self, String> {
        for pair in text.split([',', '&']).filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or(format!("{pair}: no value"))?;
            let num = || value.parse::<f64>().map_err(|_| format!("{pair}: not a number"));
            let ms = || num().map(|n| Duration::from_secs_f64(n.max(0.0) / 1000.0));
            match key {
                "ttfb" => self.ttfb = ms()?,
                "first" => self.first = ms()?,
                "gap" => self.gap = ms()?,
                "chunks" => self.chunks = num()? as u32,
                "size" => self.size = num()? as usize,
                "rate" => self.rate = num()?,
                "after" => self.after = num()? as u32,
                "retry_after" => self.retry_after = num()? as u32,
                "fault" => {
                    self.fault = match value {
                        "none" => Fault::None,
                        "hang" => Fault::Hang,
                        "stall" => Fault::Stall,
                        "reset" => Fault::Reset,
                        "truncate" => Fault::Truncate,
                        "sse-error" => Fault::SseError,
                        _ => match num()? as u16 {
                            code @ 400..=599 => Fault::Status(code),
                            _ => return Err(format!("{pair}: no such fault")),
                        },
                    }
                }
                _ => return Err(format!("{key}: no such key")),
            }
        }
        Ok(self)
    }
}

struct Port {
    spec: RwLock<Arc<Spec>>,
    conns: AtomicU64,
    requests: AtomicU64,
    faults: AtomicU64,
    /// Answers that the peer gave up on before they were complete.
    cancelled: AtomicU64,
    came: Mutex<VecDeque<u64>>,
    faulted: Mutex<VecDeque<u64>>,
}

/// Times of a port that are kept.
const TIMES_MAX: usize = 4096;

fn note(times: &Mutex<VecDeque<u64>>) {
    let mut times = times.lock().unwrap();
    if times.len() == TIMES_MAX {
        times.pop_front();
    }
    times.push_back(mono_ns());
}

impl Port {
    fn counters(&self) -> [(&'static str, &AtomicU64); 4] {
        [
            ("conns", &self.conns),
            ("requests", &self.requests),
            ("faults", &self.faults),
            ("cancelled", &self.cancelled),
        ]
    }

    /// Whether the n-th request is one that the fault hits. A hash of the
    /// counter, so that a run can be repeated exactly.
    fn hit(&self, n: u64, rate: f64) -> bool {
        let x = (n.wrapping_add(1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (((x ^ (x >> 27)) >> 11) as f64 / (1u64 << 53) as f64) < rate
    }
}

/// Counts an answer as cancelled when dropped before [`Pending::done`].
struct Pending(Arc<Port>, bool);

impl Pending {
    fn done(&mut self) {
        self.1 = true;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.1 {
            self.0.cancelled.fetch_add(1, Relaxed);
        }
    }
}

/// The parts of a request that the answer depends on. The model is echoed:
/// some gateways price an answer by the model it names.
#[derive(Deserialize, Default)]
struct Ask {
    #[serde(default)]
    model: String,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    stream_options: StreamOptions,
}

#[derive(Deserialize, Default)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

impl Ask {
    fn parse(body: &[u8]) -> Self {
        if body.len() <= 64 << 10 {
            let mut ask: Ask = serde_json::from_slice(body).unwrap_or_default();
            if ask.model.is_empty() || ask.model.contains(['"', '\\']) {
                ask.model = MODEL.into();
            }
            return ask;
        }
        // A large body is searched near its ends only: the mock must stay cheap.
        let ends = [&body[..4096], &body[body.len() - 4096..]];
        let has = |key: &[u8]| {
            ends.iter().any(|end| {
                let mut at = end.windows(key.len()).enumerate().filter(|(_, w)| *w == key);
                at.any(|(i, _)| end[i + key.len()..].trim_ascii_start().starts_with(b"true"))
            })
        };
        Ask {
            model: MODEL.into(),
            stream: has(b"\"stream\":"),
            stream_options: StreamOptions { include_usage: has(b"\"include_usage\":") },
        }
    }
}

const MODEL: &str = "gpt-4o-mini";

/// hyper drops what it has not written when a body fails, so a fault waits
/// this long for the bytes before it to leave.
const FLUSH: Duration = Duration::from_millis(5);

/// A streamed answer: `chunks` events, then the closing events.
struct Sse {
    reply: Reply,
    spec: Arc<Spec>,
    fault: Fault,
    sent: u32,
    timer: Pin<Box<Sleep>>,
    socket: Arc<std::net::TcpStream>,
    pending: Pending,
}

impl Sse {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.sent > self.spec.chunks {
            return Poll::Ready(None);
        }
        let faulty = self.fault != Fault::None;
        if self.sent < self.spec.chunks || faulty {
            // tokio's timer rounds up to whole milliseconds: a due chunk must not ask it.
            if self.timer.deadline() > Instant::now() {
                ready!(self.timer.as_mut().poll(cx));
            }
            let gap = if faulty { self.spec.gap.max(FLUSH) } else { self.spec.gap };
            let next = self.timer.deadline() + gap;
            self.timer.as_mut().reset(next);
        }
        if faulty && self.sent == self.spec.after {
            if self.fault == Fault::Stall {
                return Poll::Pending;
            }
            self.pending.done();
            if self.fault == Fault::Reset {
                let _ = socket2::SockRef::from(&*self.socket).set_linger(Some(Duration::ZERO));
            }
            return Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into())));
        }
        let more = self.sent < self.spec.chunks;
        let text = if more { self.reply.chunk(self.sent == 0) } else { self.reply.closing() };
        self.sent += 1;
        if self.sent > self.spec.chunks {
            self.pending.done();
        }
        Poll::Ready(Some(Ok(text.into())))
    }
}

enum Answer {
    Whole(Bytes),
    /// A body cut short: what is sent, the length announced, the wait between
    /// the last byte and the close.
    Cut(Bytes, u64, Pin<Box<Sleep>>),
    Stream(Box<Sse>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let next = match &mut *self {
            Answer::Whole(b) if b.is_empty() => None,
            Answer::Whole(b) => Some(Ok(std::mem::take(b))),
            Answer::Cut(b, _, wait) if b.is_empty() => {
                ready!(wait.as_mut().poll(cx));
                Some(Err(io::ErrorKind::UnexpectedEof.into()))
            }
            Answer::Cut(b, ..) => Some(Ok(std::mem::take(b))),
            Answer::Stream(s) => ready!(s.poll(cx)),
        };
        Poll::Ready(next.map(|r| r.map(Frame::data)))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Answer::Whole(b) => SizeHint::with_exact(b.len() as u64),
            Answer::Cut(_, n, _) => SizeHint::with_exact(*n),
            Answer::Stream(_) => SizeHint::default(),
        }
    }
}

fn reply(status: u16, kind: &'static str, body: Answer) -> Response<Answer> {
    let mut r = Response::new(body);
    *r.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    r.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    r
}

fn json(status: u16, text: impl Into<Bytes>) -> Response<Answer> {
    reply(status, "application/json", Answer::Whole(text.into()))
}

fn control(req: &Request<Incoming>, port: &Port) -> Response<Answer> {
    if req.method() == Method::PUT {
        match Spec::default().set(req.uri().query().unwrap_or("")) {
            Ok(spec) => *port.spec.write().unwrap() = Arc::new(spec),
            Err(e) => return json(400, e),
        }
        port.counters().iter().for_each(|(_, c)| c.store(0, Relaxed));
        port.came.lock().unwrap().clear();
        port.faulted.lock().unwrap().clear();
    }
    if req.uri().path().ends_with("/times") {
        let (came, faulted) = (port.came.lock().unwrap(), port.faulted.lock().unwrap());
        return json(200, format!("{{\"came\":{came:?},\"faulted\":{faulted:?}}}"));
    }
    let all: Vec<_> = port.counters().iter().map(|(k, c)| format!("\"{k}\":{}", c.load(Relaxed))).collect();
    json(200, format!("{{{}}}", all.join(",")))
}

async fn serve(
    req: Request<Incoming>,
    port: Arc<Port>,
    socket: Arc<std::net::TcpStream>,
) -> Response<Answer> {
    let api = match (req.method(), req.uri().path()) {
        (_, "/_mock" | "/_mock/times") => return control(&req, &port),
        (&Method::POST, p) if p.ends_with("/chat/completions") => Api::OpenAi,
        (&Method::POST, p) if p.ends_with("/messages") => Api::Anthropic,
        (&Method::GET, p) if p.ends_with("/models") => {
            return json(
                200,
                r#"{"object":"list","data":[{"id":"gpt-4o-mini","object":"model","created":1700000000,"owned_by":"mock"},{"id":"claude-sonnet-4-5","object":"model","created":1700000000,"owned_by":"mock"}]}"#,
            );
        }
        (&Method::GET, "/" | "/health") => return json(200, r#"{"status":"ok"}"#),
        _ => {
            return json(404, r#"{"error":{"message":"no such path","type":"invalid_request_error"}}"#);
        }
    };

    let mut spec = port.spec.read().unwrap().clone();
    let header = req.headers().get("x-mock").and_then(|v| v.to_str().ok());
    let query = req.uri().query().and_then(|q| q.split('&').find_map(|p| p.strip_prefix("mock=")));
    if let Some(text) = header.or(query) {
        match Spec::clone(&spec).set(text) {
            Ok(s) => spec = Arc::new(s),
            Err(e) => return json(400, e),
        }
    }

    let n = port.requests.fetch_add(1, Relaxed);
    note(&port.came);
    let mut pending = Pending(port.clone(), false);
    let Ok(body) = req.into_body().collect().await else {
        return json(400, r#"{"error":{"message":"body cut short","type":"invalid_request_error"}}"#);
    };
    let body = body.to_bytes();
    let ask = Ask::parse(&body);
    let text = Reply {
        api,
        model: ask.model,
        size: spec.size,
        prompt_tokens: body.len() / 4,
        tokens: spec.chunks as usize,
        usage: ask.stream_options.include_usage,
    };
    let fault = if spec.fault != Fault::None && port.hit(n, spec.rate) {
        port.faults.fetch_add(1, Relaxed);
        spec.fault
    } else {
        Fault::None
    };

    if !spec.ttfb.is_zero() {
        sleep(spec.ttfb).await;
    }
    if fault != Fault::None {
        note(&port.faulted);
    }
    match fault {
        Fault::Hang => std::future::pending().await,
        Fault::Status(code) => {
            pending.done();
            let mut r = json(code, api.error(code));
            r.headers_mut().insert(RETRY_AFTER, spec.retry_after.into());
            r
        }
        Fault::SseError if ask.stream => {
            pending.done();
            reply(200, "text/event-stream", Answer::Whole(api.error_event().into()))
        }
        _ if ask.stream => {
            // A fault before the first chunk still sends the headers.
            let first = if fault == Fault::None { spec.first } else { spec.first.max(FLUSH) };
            let timer = Box::pin(sleep_until(Instant::now() + first));
            let sse = Sse { reply: text, spec, fault, sent: 0, timer, socket, pending };
            reply(200, "text/event-stream", Answer::Stream(Box::new(sse)))
        }
        Fault::Stall => std::future::pending().await,
        Fault::SseError => {
            pending.done();
            json(500, api.error(500))
        }
        _ => {
            pending.done();
            let text = Bytes::from(text.whole());
            if fault == Fault::None {
                return json(200, text);
            }
            if fault == Fault::Reset {
                let _ = socket2::SockRef::from(&*socket).set_linger(Some(Duration::ZERO));
            }
            let half = text.slice(..text.len() / 2);
            reply(200, "application/json", Answer::Cut(half, text.len() as u64, Box::pin(sleep(FLUSH))))
        }
    }
}

fn listener(port: u16) -> io::Result<std::net::TcpListener> {
    let s = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    s.set_reuse_address(true)?;
    s.set_reuse_port(true)?;
    s.set_nonblocking(true)?;
    s.bind(&SocketAddr::from(([127, 0, 0, 1], port)).into())?;
    s.listen(4096)?;
    Ok(s.into())
}

async fn accept(number: u16, port: Arc<Port>, tls: Option<TlsAcceptor>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener(number)?)?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        port.conns.fetch_add(1, Relaxed);
        // A second handle on the socket, to turn a close into a reset.
        let stream = stream.into_std()?;
        let socket = Arc::new(stream.try_clone()?);
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let (port, tls) = (port.clone(), tls.clone());
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |req| {
                let answer = serve(req, port.clone(), socket.clone());
                async move { Ok::<_, Infallible>(answer.await) }
            });
            if let Some(tls) = tls {
                let Ok(stream) = tls.accept(stream).await else { return };
                let mut http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                http.timer(TokioTimer::new()).max_concurrent_streams(1024);
                let _ = http.serve_connection(TokioIo::new(stream), service).await;
                return;
            }
            let mut http = hyper::server::conn::http1::Builder::new();
            let _ = http.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut threads = 1;
    let mut ports = Vec::new();
    let mut tls = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        if arg == "--threads" {
            threads = args.next().ok_or("--threads: no number")?.parse()?;
            continue;
        }
        if arg == "--tls" {
            tls = Some(rig::tls::acceptor(args.next().ok_or("--tls: no folder")?.as_ref())?);
            continue;
        }
        let (number, spec) = arg.split_once(':').unwrap_or((&arg, ""));
        let (number, secure) = number.split_once('+').map_or((number, None), |(a, b)| (a, Some(b)));
        let port = Port {
            spec: RwLock::new(Arc::new(Spec::default().set(spec)?)),
            conns: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            came: Mutex::default(),
            faulted: Mutex::default(),
        };
        let port = Arc::new(port);
        ports.push((number.parse::<u16>()?, port.clone(), None));
        if let Some(secure) = secure {
            ports.push((secure.parse()?, port, Some(tls.clone().ok_or("+TLS without --tls")?)));
        }
    }
    if ports.is_empty() {
        return Err("usage: mock [--threads N] [--tls FOLDER] PORT[+TLS][:SPEC]...".into());
    }
    let ports = Arc::new(ports);
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            let ports = ports.clone();
            std::thread::spawn(move || -> io::Result<()> {
                let rt = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                rt.block_on(async {
                    let all: Vec<_> =
                        ports.iter().map(|(n, p, tls)| tokio::spawn(accept(*n, p.clone(), tls.clone()))).collect();
                    for task in all {
                        task.await.map_err(io::Error::other)??;
                    }
                    Ok(())
                })
            })
        })
        .collect();
    for w in workers {
        w.join().map_err(|_| "worker panicked")??;
    }
    Ok(())
}
