//! Load generator: closed loop, fixed rate, SSE streams, one by one.
//!
//! `load MODE --port P [options]`, loopback only; prints one JSON object.
//! Modes: `closed` (--conns, --secs), `rate` (--rate, --conns, --secs),
//! `sse` (--streams, --ramp-ms), `seq` (--count, --conns, --pause-ms).
//! `--keys N` takes turns through the keys `sk-bench-0` to `sk-bench-N-1`; `--models-each PREFIX` (with `seq`)
//! asks for another model with every request: a warm-up for `--model` first, then `PREFIX0`, `PREFIX1`, ...
//! `--tls FOLDER` speaks HTTP/2 over TLS, eight callers on a connection.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Request, Response, body::Incoming};
use hyper_util::rt::{TokioIo, TokioTimer};
use rig::{mono_ns, take_stamps};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::{sleep, sleep_until, timeout};
use tokio_rustls::TlsConnector;

/// Callers that share a connection of HTTP/2.
const CALLERS_PER_CONNECTION: u64 = 8;

enum Sender {
    H1(http1::SendRequest<Full<Bytes>>),
    H2(http2::SendRequest<Full<Bytes>>),
}

/// hyper's tasks of HTTP/2 run where the load does.
#[derive(Clone)]
struct Here;

impl<F: Future<Output: 'static> + 'static> hyper::rt::Executor<F> for Here {
    fn execute(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}

struct Opts {
    mode: String,
    args: BTreeMap<String, String>,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Bytes,
    keys: u64,
    turn: Cell<u64>,
    tls: Option<TlsConnector>,
    connected: Cell<u64>,
    shared: Vec<Mutex<Option<http2::SendRequest<Full<Bytes>>>>>,
}

impl Opts {
    fn parse() -> Result<Self, String> {
        let mut it = std::env::args().skip(1);
        let mode = it.next().ok_or("usage: load closed|rate|sse|seq --port P ...")?;
        let (mut args, mut headers) = (BTreeMap::new(), Vec::new());
        while let Some(key) = it.next() {
            let key = key.strip_prefix("--").ok_or(format!("{key}: not an option"))?.to_string();
            let value = it.next().ok_or(format!("--{key}: no value"))?;
            if key == "header" {
                let (n, v) = value.split_once(':').ok_or(format!("{value}: not a header"))?;
                let name = n.trim().parse().map_err(|_| format!("{n}: bad header name"))?;
                headers.push((name, v.trim().parse().map_err(|_| format!("{v}: bad header value"))?));
            } else {
                args.insert(key, value);
            }
        }
        let tls = args.get("tls").map(|folder| rig::tls::connector(folder.as_ref()).map_err(|e| e.to_string()));
        let (body, turn, connected, tls) = (Bytes::new(), Cell::new(0), Cell::new(0), tls.transpose()?);
        let mut o = Opts { mode, args, headers, body, keys: 0, turn, tls, connected, shared: vec![] };
        let callers = o.num("conns", 1.0).max(o.num("streams", 1.0)) as u64;
        o.shared = (0..callers.div_ceil(CALLERS_PER_CONNECTION)).map(|_| Mutex::default()).collect();
        o.body = o.make_body(o.text("model", "gpt-4o-mini"));
        o.keys = o.num("keys", 0.0) as u64;
        Ok(o)
    }

    fn text<'a>(&'a self, key: &str, default: &'a str) -> &'a str {
        self.args.get(key).map_or(default, |v| v)
    }

    fn num(&self, key: &str, default: f64) -> f64 {
        self.args
            .get(key)
            .map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("--{key} {v}: not a number")))
    }

    fn make_body(&self, model: &str) -> Bytes {
        let size = self.num("body-bytes", 1024.0) as usize;
        let mut body = json!({
            "model": model,
            "messages": [{"role": "user", "content": ""}],
            "max_tokens": 1024,
        });
        if self.mode == "sse" || self.args.contains_key("stream") {
            body["stream"] = true.into();
            if !self.text("path", "").ends_with("/messages") {
                body["stream_options"] = json!({"include_usage": true});
            }
        }
        let fill = size.saturating_sub(body.to_string().len());
        body["messages"][0]["content"] = "lorem ipsum ".repeat(fill / 12 + 1)[..fill].into();
        body.to_string().into()
    }

    fn request(&self, body: &Bytes) -> Request<Full<Bytes>> {
        let key = match self.keys {
            0 => "Bearer sk-bench".to_string(),
            n => format!("Bearer sk-bench-{}", self.turn.replace(self.turn.get() + 1) % n),
        };
        let path = self.text("path", "/v1/chat/completions");
        let host = format!("localhost:{}", self.text("port", ""));
        let request = match self.tls {
            Some(_) => Request::post(format!("https://{host}{path}")),
            None => Request::post(path).header("host", host),
        };
        let mut r = request
            .header("content-type", "application/json")
            .header("authorization", key)
            .body(Full::new(body.clone()))
            .expect("request");
        for (n, v) in &self.headers {
            r.headers_mut().insert(n, v.clone());
        }
        r
    }

    async fn connect(&self) -> Result<Sender, String> {
        let Some(tls) = &self.tls else {
            let made = http1::handshake(TokioIo::new(self.tcp().await?)).await;
            let (sender, conn) = made.map_err(|e| format!("handshake: {e}"))?;
            tokio::task::spawn_local(conn);
            return Ok(Sender::H1(sender));
        };
        let turn = self.connected.replace(self.connected.get() + 1);
        let mut shared = self.shared[turn as usize % self.shared.len()].lock().await;
        if let Some(open) = shared.as_ref().filter(|open| !open.is_closed()) {
            return Ok(Sender::H2(open.clone()));
        }
        let name = "localhost".try_into().expect("a name");
        let stream = tls.connect(name, self.tcp().await?).await.map_err(|e| format!("tls: {e}"))?;
        let mut http = http2::Builder::new(Here);
        let made = http.timer(TokioTimer::new()).handshake(TokioIo::new(stream)).await;
        let (sender, conn) = made.map_err(|e| format!("handshake: {e}"))?;
        tokio::task::spawn_local(conn);
        *shared = Some(sender.clone());
        Ok(Sender::H2(sender))
    }

    async fn tcp(&self) -> Result<TcpStream, String> {
        let port = self.num("port", 0.0) as u16;
        let tcp = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await;
        let tcp = tcp.map_err(|e| format!("connect: {}", e.kind()))?;
        tcp.set_nodelay(true).map_err(|e| e.to_string())?;
        Ok(tcp)
    }

    /// Sends one request on a kept connection, opening it if need be.
    async fn send(&self, conn: &mut Option<Sender>) -> Result<Response<Incoming>, String> {
        self.send_body(conn, &self.body).await
    }

    async fn send_body(&self, conn: &mut Option<Sender>, body: &Bytes) -> Result<Response<Incoming>, String> {
        let closed = conn.as_ref().is_none_or(|c| match c {
            Sender::H1(sender) => sender.is_closed(),
            Sender::H2(sender) => sender.is_closed(),
        });
        if closed {
            *conn = Some(self.connect().await?);
        }
        let request = self.request(body);
        let answer = match conn.as_mut().expect("just set") {
            Sender::H1(sender) => {
                sender.ready().await.map_err(|e| format!("ready: {e}"))?;
                sender.send_request(request).await
            }
            Sender::H2(sender) => {
                sender.ready().await.map_err(|e| format!("ready: {e}"))?;
                sender.send_request(request).await
            }
        };
        answer.map_err(|e| format!("send: {e}"))
    }
}

/// What a run adds up; shared by its tasks, all on one thread.
#[derive(Default)]
struct Tally {
    ok: u64,
    bytes: u64,
    errors: BTreeMap<String, u64>,
    latency: Vec<u64>,
    ttfb: Vec<u64>,
    delay: Vec<u64>,
}

impl Tally {
    fn record(&mut self, result: Result<(), String>, start: Instant) {
        match result {
            Ok(()) => {
                self.ok += 1;
                self.latency.push(start.elapsed().as_nanos() as u64);
            }
            Err(e) => self.error(e),
        }
    }

    fn error(&mut self, text: String) {
        *self.errors.entry(text).or_default() += 1;
    }
}

/// Percentiles, in microseconds.
fn spread(mut ns: Vec<u64>) -> Value {
    if ns.is_empty() {
        return Value::Null;
    }
    ns.sort_unstable();
    let at = |q: f64| (ns[((ns.len() - 1) as f64 * q).round() as usize] / 100) as f64 / 10.0;
    let mean = ns.iter().sum::<u64>() / ns.len() as u64;
    json!({"n": ns.len(), "min": at(0.0), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999), "max": at(1.0), "mean": mean as f64 / 1000.0})
}

/// One request, read to its end. `Ok` when the status is 2xx.
async fn exchange(o: &Opts, conn: &mut Option<Sender>, t: &RefCell<Tally>) -> Result<(), String> {
    let result = async {
        let mut response = o.send(conn).await?;
        let status = response.status();
        let mut bytes = 0;
        while let Some(frame) = response.body_mut().frame().await {
            bytes += frame.map_err(|e| format!("body: {e}"))?.data_ref().map_or(0, |d| d.len()) as u64;
        }
        t.borrow_mut().bytes += bytes;
        if status.is_success() { Ok(()) } else { Err(format!("status {}", status.as_u16())) }
    };
    let out = timeout(Duration::from_secs(20), result).await.unwrap_or_else(|_| Err("client timeout".into()));
    if out.as_ref().is_err_and(|e| !e.starts_with("status")) {
        *conn = None;
    }
    out
}

async fn closed(o: Rc<Opts>, t: Rc<RefCell<Tally>>) {
    let end = Instant::now() + Duration::from_secs_f64(o.num("secs", 5.0));
    let mut conn = None;
    while Instant::now() < end {
        let start = Instant::now();
        let result = exchange(&o, &mut conn, &t).await;
        t.borrow_mut().record(result, start);
        if conn.is_none() {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Takes the next due send time until none is left. A sender that is late
/// because the proxy kept it busy counts the wait; a late timer does not.
async fn rate(o: Rc<Opts>, t: Rc<RefCell<Tally>>, next: Rc<RefCell<u64>>, begin: Instant) {
    let per_sec = o.num("rate", 500.0);
    let total = (per_sec * o.num("secs", 5.0)) as u64;
    let limit = Duration::from_secs_f64(o.num("secs", 5.0) + 2.0);
    let mut conn = o.connect().await.ok();
    loop {
        let i = next.replace_with(|n| *n + 1);
        // A proxy that cannot keep up is not given for ever to drain the backlog.
        if i >= total || begin.elapsed() > limit {
            return;
        }
        let due = begin + Duration::from_secs_f64(i as f64 / per_sec);
        let start = if Instant::now() < due {
            sleep_until(due.into()).await;
            Instant::now()
        } else {
            due
        };
        let result = exchange(&o, &mut conn, &t).await;
        t.borrow_mut().record(result, start);
    }
}

/// Reads one stream to its end: `Ok` when the closing event came.
async fn stream(o: &Opts, conn: &mut Option<Sender>, t: &RefCell<Tally>) -> Result<(), String> {
    let start = Instant::now();
    let mut response = o.send(conn).await?;
    if !response.status().is_success() {
        return Err(format!("status {}", response.status().as_u16()));
    }
    let (mut rest, mut stamps, mut first, mut done, mut bad) = (Vec::new(), Vec::new(), true, false, false);
    while let Some(frame) = response.body_mut().frame().await {
        let frame = frame.map_err(|e| format!("body: {e}"))?;
        let now = mono_ns();
        let Some(data) = frame.data_ref() else { continue };
        let mut t = t.borrow_mut();
        t.bytes += data.len() as u64;
        if std::mem::take(&mut first) {
            t.ttfb.push(start.elapsed().as_nanos() as u64);
        }
        rest.extend_from_slice(data);
        let has = |text: &[u8]| rest.windows(text.len()).any(|w| w == text);
        done |= has(b"[DONE]") || has(b"message_stop");
        bad |= has(b"\"error\"");
        let used = take_stamps(&rest, &mut stamps);
        // Keep enough of the tail for a closing event cut in two.
        rest.drain(..used.min(rest.len().saturating_sub(16)));
        t.delay.extend(stamps.drain(..).map(|s| now.saturating_sub(s)));
    }
    match (done, bad) {
        (true, false) => Ok(()),
        (_, true) => Err("error event".into()),
        (false, false) => Err("no closing event".into()),
    }
}

async fn sse(o: Rc<Opts>, t: Rc<RefCell<Tally>>, i: u64, begin: Instant) {
    let ramp = o.num("ramp-ms", 1000.0) / 1000.0 / o.num("streams", 1.0);
    sleep_until((begin + Duration::from_secs_f64(ramp * i as f64)).into()).await;
    let limit = Duration::from_secs_f64(o.num("limit-secs", 60.0));
    // Connected first: the time to first byte is that of the request alone.
    let mut conn = o.connect().await.ok();
    let result =
        timeout(limit, stream(&o, &mut conn, &t)).await.unwrap_or_else(|_| Err("client timeout".into()));
    match result {
        Ok(()) => t.borrow_mut().ok += 1,
        Err(e) => t.borrow_mut().error(e),
    }
}

/// Requests one after another on `conns` connections, each shown on its own:
/// milliseconds to the first byte and to the end, and how it ended.
async fn seq(o: Rc<Opts>, t: Rc<RefCell<Tally>>, rows: Rc<RefCell<Vec<Value>>>, count: u64) {
    let mut conn = None;
    let limit = Duration::from_secs_f64(o.num("limit-secs", 20.0));
    let each = o.args.get("models-each");
    if each.is_some() {
        let _warm = exchange(&o, &mut conn, &t).await;
    }
    for i in 0..count {
        let body = each.map_or(o.body.clone(), |prefix| o.make_body(&format!("{prefix}{i}")));
        if i > 0 {
            sleep(Duration::from_secs_f64(o.num("pause-ms", 0.0) / 1000.0)).await;
        }
        let start = Instant::now();
        let (mut head, mut first, mut status) = (None, None, 0);
        let ms = |d: Duration| (d.as_secs_f64() * 1e5).round() / 100.0;
        let run = async {
            let mut response = o.send_body(&mut conn, &body).await?;
            head = Some(ms(start.elapsed()));
            status = response.status().as_u16();
            let mut text = Vec::new();
            while let Some(frame) = response.body_mut().frame().await {
                let frame = frame.map_err(|e| format!("body: {e}"))?;
                first.get_or_insert(ms(start.elapsed()));
                text.extend_from_slice(frame.data_ref().map_or(&[][..], |d| d));
            }
            let has = |p: &[u8]| text.windows(p.len()).any(|w| w == p);
            if status >= 300 {
                return Err(format!("status {status}"));
            }
            if has(b"\"error\"") {
                return Err("error event".to_string());
            }
            if o.args.contains_key("stream") && !has(b"[DONE]") && !has(b"message_stop") {
                return Err("no closing event".to_string());
            }
            Ok(())
        };
        let result = timeout(limit, run).await.unwrap_or_else(|_| Err("client timeout".into()));
        let end = start.elapsed();
        rows.borrow_mut().push(json!({"status": status, "head_ms": head, "first_ms": first, "end_ms": ms(end), "error": result.as_ref().err()}));
        let mut t = t.borrow_mut();
        match result {
            Ok(()) => {
                t.ok += 1;
                t.latency.push(end.as_nanos() as u64);
            }
            Err(e) => {
                t.error(e);
                conn = None;
            }
        }
    }
}

fn main() {
    let o = Rc::new(Opts::parse().unwrap_or_else(|e| {
        eprintln!("{e}");
        std::process::exit(2)
    }));
    let rt = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let tally = Rc::new(RefCell::new(Tally::default()));
    let rows = Rc::new(RefCell::new(Vec::new()));
    let next = Rc::new(RefCell::new(0));
    let begin = Instant::now();
    tokio::task::LocalSet::new().block_on(&rt, async {
        let conns = o.num("conns", 1.0) as u64;
        let (n, mode) = (if o.mode == "sse" { o.num("streams", 1.0) as u64 } else { conns }, o.mode.clone());
        let tasks: Vec<_> = (0..n)
            .map(|i| {
                let (o, t) = (o.clone(), tally.clone());
                match mode.as_str() {
                    "closed" => tokio::task::spawn_local(closed(o, t)),
                    "rate" => tokio::task::spawn_local(rate(o, t, next.clone(), begin)),
                    "sse" => tokio::task::spawn_local(sse(o, t, i, begin)),
                    "seq" => {
                        let count = o.num("count", 10.0) as u64 / conns;
                        tokio::task::spawn_local(seq(o, t, rows.clone(), count))
                    }
                    other => panic!("{other}: no such mode"),
                }
            })
            .collect();
        for task in tasks {
            task.await.expect("task");
        }
    });
    let secs = begin.elapsed().as_secs_f64();
    let t = tally.take();
    let failed: u64 = t.errors.values().sum();
    let out = json!({
        "mode": o.mode, "secs": secs, "ok": t.ok, "failed": failed, "errors": t.errors, "bytes": t.bytes,
        "per_sec": t.ok as f64 / secs, "latency_us": spread(t.latency), "ttfb_us": spread(t.ttfb), "chunk_us": spread(t.delay),
        "rows": if rows.borrow().len() <= 64 { json!(rows.take()) } else { Value::Null },
    });
    println!("{out}");
}
