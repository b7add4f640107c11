//! Nobody takes more than their part: connections, slow heads and bodies, callers who do not read.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::{END, ask, connect, rest, wire};
use crate::support::{
    Call, Caller, Gateway, KEY, Setup, script, stream_request, text_of, upstream, whole_request,
};
use tollgate::mock::{Mock, Script};

async fn bounded(bounds: &str) -> (Mock, Gateway) {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).with(&format!("bounds: {{ {bounds} }}")).start();
    (only, gateway)
}

/// Whether a connection that was just made is served.
async fn is_served(to: SocketAddr) -> Option<TcpStream> {
    let mut stream = connect(to).await;
    ask(&mut stream, &wire(&stream_request()), END).await.contains("[DONE]").then_some(stream)
}

/// Until a connection to it is served: one that closed may not be counted out yet.
async fn wait_until_served(to: SocketAddr) -> TcpStream {
    let began = std::time::Instant::now();
    loop {
        if let Some(stream) = is_served(to).await {
            return stream;
        }
        assert!(began.elapsed() < super::PATIENCE, "never served again");
    }
}

#[tokio::test]
async fn connections_of_one_address_are_bounded_until_one_closes() {
    let (_upstream, gateway) = bounded("connections_per_address_max: 3").await;
    let mut held = vec![];
    for _ in 0..3 {
        held.push(wait_until_served(gateway.http).await);
    }
    assert!(is_served(gateway.http).await.is_none(), "the fourth");
    let elsewhere = TcpSocket::new_v4().unwrap();
    elsewhere.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut elsewhere = elsewhere.connect(gateway.http).await.unwrap();
    assert!(ask(&mut elsewhere, &wire(&stream_request()), END).await.contains("[DONE]"));
    held.pop();
    held.push(wait_until_served(gateway.http).await);
    assert!(gateway.refused("address_taken").await >= 1);
}

#[tokio::test]
async fn all_connections_together_are_bounded_until_one_closes() {
    let (_upstream, gateway) = bounded("connections_max: 4, connections_per_address_max: 4").await;
    let mut held = vec![];
    for _ in 0..4 {
        held.push(wait_until_served(gateway.http).await);
    }
    assert!(is_served(gateway.http).await.is_none());
    held.clear();
    wait_until_served(gateway.http).await;
    gateway.wait_for_metric("tollgate_connections", 0).await;
}

#[tokio::test]
async fn two_thousand_idle_connections_are_held_and_others_are_served() {
    allow_files(5_000);
    let (_upstream, gateway) = bounded("head_timeout: 60s").await;
    let mut idle = vec![];
    for _ in 0..2_000 {
        idle.push(connect(gateway.http).await);
    }
    gateway.wait_for_metric("tollgate_connections", 2_000).await;
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, text_of(&answer.text()).as_str()), (200, "Hello, world!"));
    drop(idle);
    gateway.wait_for_metric("tollgate_connections", 0).await;
}

/// Connections that have been asked once and wait.
async fn idle(gateway: &Gateway, count: usize) -> Vec<Caller> {
    let models = Call::get("/v1/models");
    let mut idle = vec![];
    for _ in 0..count {
        let mut caller = Caller::connect(gateway.http).await;
        caller.send(&models).await;
        assert_eq!(caller.next_answer().await.status, 200);
        idle.push(caller);
    }
    idle
}

#[tokio::test]
async fn memory_and_files_of_connections_and_calls_go_back_when_they_have_gone() {
    const IDLE: usize = 2_000;
    const CALLS: usize = 500;
    allow_files(5_000);
    let hanging = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let setup = Setup::new(&[hanging.address()])
        .providers("first_byte: 60s, first_event: 60s, idle: 60s")
        .balance("1000.00");
    let gateway = setup.start();
    let calls = async |count: usize, seen: usize| {
        let mut callers = vec![];
        for _ in 0..count {
            callers.push(Call::post(stream_request()).begin(gateway.http).await);
        }
        hanging.wait_for_requests(seen + count).await;
        callers
    };
    drop((idle(&gateway, 100).await, calls(50, 0).await));
    gateway.wait_for_metric("tollgate_connections", 0).await;
    let before = gateway.footprint();

    let held = idle(&gateway, IDLE).await;
    let each = gateway.footprint().0.saturating_sub(before.0) / IDLE as u64;
    assert!(each < 16, "an idle connection takes {each} KiB");
    drop((held, calls(CALLS, 50).await));
    gateway.wait_for_metric("tollgate_connections", 0).await;
    // Nobody calls any more: it goes by itself.
    let began = std::time::Instant::now();
    loop {
        let after = gateway.footprint();
        if after.0 < before.0 + (12 << 10) && after.1 <= before.1 {
            break;
        }
        assert!(began.elapsed() < super::PATIENCE, "KiB, files: {before:?} before, {after:?} after");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Lets this process open as many files.
fn allow_files(count: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < count) {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    }
}

/// Sends a byte now and then until the other side closes; answers what it said.
async fn trickle(stream: TcpStream, bytes: &str) -> String {
    let (mut read, mut write) = stream.into_split();
    let bytes = bytes.to_owned();
    let sending = async move {
        for byte in bytes.bytes().cycle() {
            if write.write_all(&[byte]).await.is_err() {
                break;
            }
            // The pace of the attack.
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        said = rest(&mut read) => said,
        () = sending => unreachable!(),
    }
}

#[tokio::test]
async fn a_trickled_head_is_cut_on_a_new_and_on_a_kept_connection() {
    let (_upstream, gateway) = bounded("head_timeout: 500ms").await;
    assert_eq!(trickle(connect(gateway.http).await, "x").await, "");
    let mut kept = connect(gateway.http).await;
    assert!(ask(&mut kept, &wire(&stream_request()), END).await.contains("[DONE]"));
    assert_eq!(trickle(kept, "x").await, "");
    let mut silent = connect(gateway.http).await;
    assert_eq!(rest(&mut silent).await, "");
    gateway.wait_for_refused("too_slow", 3).await;
}

#[tokio::test]
async fn the_clock_of_heads_runs_for_nothing_else() {
    let slow = upstream(script(r#"{"delay_chunk_ms":200}"#)).await;
    let gateway = Setup::new(&[slow.address()])
        .providers("first_byte: 15s, first_event: 15s, idle: 15s")
        .with("bounds: { head_timeout: 300ms }")
        .start();
    let mut caller = Caller::connect(gateway.http).await;
    let body = whole_request();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    caller.send_raw(head.as_bytes()).await;
    // As long as the head's limit, twice.
    for _ in 0..2 {
        let mut silent = connect(gateway.http).await;
        rest(&mut silent).await;
    }
    caller.send_raw(body.as_bytes()).await;
    assert_eq!(caller.next_answer().await.status, 200, "a slow body");
    let mut silent = connect(gateway.http).await;
    rest(&mut silent).await;
    caller.send(&Call::post(stream_request())).await;
    let answer = caller.next_answer().await;
    assert_eq!(text_of(&answer.text()), "Hello, world!", "a slow answer, on a connection that was idle");
}

#[tokio::test]
async fn a_body_that_does_not_come_is_a_408() {
    let (only, gateway) = bounded("body_timeout: 300ms").await;
    for framing in ["content-length: 1000", "transfer-encoding: chunked"] {
        let mut stream = connect(gateway.http).await;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n{framing}\r\n\r\n"
        );
        let answer = ask(&mut stream, &head, "body_timeout").await;
        assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("\"body_timeout\""), "{answer}");
    }
    assert!(only.requests().is_empty());
}

#[tokio::test]
async fn a_connection_ends_in_peace_after_its_requests() {
    let (_upstream, gateway) = bounded("requests_per_connection_max: 2").await;
    let mut caller = Caller::connect(gateway.http).await;
    for expected in ["keep-alive", "close"] {
        caller.send(&Call::post(whole_request())).await;
        let answer = caller.next_answer().await;
        assert_eq!((answer.status, answer.header("connection")), (200, Some(expected)));
    }
    assert!(caller.rest().await.is_empty());
}

#[tokio::test]
async fn half_a_head_behind_a_request_has_a_heads_time() {
    let (_upstream, gateway) = bounded("head_timeout: 300ms, keepalive: 300s").await;
    let mut caller = Caller::connect(gateway.http).await;
    let both = [wire(&whole_request()), "GET /v1/models HTT".to_owned()].concat();
    caller.send_raw(both.as_bytes()).await;
    assert_eq!(caller.next_answer().await.status, 200);
    assert!(caller.rest().await.is_empty(), "it closes");
}

#[tokio::test]
async fn what_cannot_be_read_as_http_is_refused_in_json_of_the_callers_dialect() {
    let (_upstream, gateway) = bounded("head_timeout: 15s").await;
    let many: String = (0..300).map(|n| format!("x-{n}: 1\r\n")).collect();
    let chat = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n{many}\r\n");
    let messages = format!("POST /v1/messages?beta=true HTTP/1.1\r\nhost: g\r\n{many}\r\n");
    let openai = "\"type\":\"invalid_request_error\"";
    let anthropic = "\"type\":\"error\"";
    for (request, expected, other) in [
        (chat.as_str(), openai, anthropic),
        (messages.as_str(), anthropic, "never"),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", openai, anthropic),
        ("GET / HTTP/1.1\r\nbad header\r\n\r\n", openai, anthropic),
    ] {
        let mut stream = connect(gateway.http).await;
        stream.write_all(request.as_bytes()).await.unwrap();
        let answer = rest(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("\"invalid_request\""), "{answer}");
        assert!(answer.contains(expected) && !answer.contains(other), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
    // On a connection that has served already, too.
    let mut kept = connect(gateway.http).await;
    assert!(ask(&mut kept, &wire(&stream_request()), END).await.contains("[DONE]"));
    let answer = ask(&mut kept, &chat, "never").await;
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("\"invalid_request\""), "{answer}");
    gateway.wait_for_refused("unreadable", 5).await;
}

#[tokio::test]
async fn a_head_above_the_bound_is_a_431_in_the_callers_dialect() {
    let (only, gateway) = bounded("head_max: 8KiB").await;
    for (path, shape) in [("/v1/chat/completions", "{\"error\":"), ("/v1/messages", "\"type\":\"error\"")] {
        let call = Call::post(whole_request()).path(path).header("x-filler", &"x".repeat(9 << 10));
        let answer = call.send(gateway.http).await;
        assert_eq!((answer.status, answer.code().as_str()), (431, "head_too_large"));
        assert!(answer.text().contains(shape), "{}", answer.text());
    }
    assert!(only.requests().is_empty());
}

#[tokio::test]
async fn connect_is_refused_and_an_upgrade_is_not_made() {
    let (only, gateway) = bounded("head_timeout: 15s").await;
    let mut stream = connect(gateway.http).await;
    let tunnel =
        "CONNECT upstream.example:443 HTTP/1.1\r\nhost: upstream.example:443\r\n\r\nGET / HTTP/1.1\r\n\r\n";
    stream.write_all(tunnel.as_bytes()).await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 405 ") && answer.contains("method_not_allowed"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "what follows is no request: {answer}");
    for protocol in ["websocket", "h2c"] {
        let call = Call::post(stream_request()).header("connection", "upgrade").header("upgrade", protocol);
        let answer = call.send(gateway.http).await;
        assert_eq!((answer.status, text_of(&answer.text()).as_str()), (200, "Hello, world!"), "{protocol}");
    }
    assert!(only.requests().iter().all(|seen| seen.header("upgrade").is_none()));
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_their_order_on_one_connection() {
    let (only, gateway) = bounded("head_timeout: 500ms").await;
    let mut caller = Caller::connect(gateway.http).await;
    let several = [wire(&stream_request()), wire(&whole_request()), wire(&stream_request())].concat();
    caller.send_raw(several.as_bytes()).await;
    for expected in ["text/event-stream", "application/json", "text/event-stream"] {
        let answer = caller.next_answer().await;
        let kind = answer.header("content-type").unwrap_or_default();
        assert!(answer.status == 200 && kind.starts_with(expected), "{kind}");
    }
    assert_eq!(only.requests().len(), 3);
    assert_eq!(gateway.spent(3), 3 * 75_000);
}

#[tokio::test]
async fn a_caller_that_waits_for_a_100_gets_it_or_the_refusal_and_keeps_its_connection() {
    let (_upstream, gateway) = bounded("body_max: 100KiB").await;
    let mut caller = Caller::connect(gateway.http).await;
    let body = whole_request();
    let head = |length: usize| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    for _ in 0..2 {
        caller.send_raw(head(body.len()).as_bytes()).await;
        caller.read_interim(100).await;
        caller.send_raw(body.as_bytes()).await;
        assert_eq!(caller.next_answer().await.status, 200);
    }
    caller.send_raw(head(10 << 20).as_bytes()).await;
    let answer = caller.next_answer().await;
    assert_eq!((answer.status, answer.code().as_str(), answer.interim), (413, "body_too_large", 0));
}

/// An upstream whose streams never end; it tells how many of its connections were closed.
pub(super) struct Endless {
    pub(super) address: SocketAddr,
    closed: watch::Receiver<usize>,
    task: JoinHandle<()>,
}

impl Endless {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (ended, closed) = watch::channel(0);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let ended = ended.clone();
                connections.spawn(async move {
                    flood(stream).await;
                    ended.send_modify(|count| *count += 1);
                });
            }
        });
        Self { address, closed, task }
    }

    pub(super) async fn wait_for_closed(&mut self, count: usize) {
        let closed = self.closed.wait_for(|seen| *seen >= count);
        tokio::time::timeout(super::PATIENCE, closed).await.expect("it is never left").unwrap();
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Streams until nobody takes it.
async fn flood(mut stream: TcpStream) {
    let mut request = [0; 4096];
    let _begun = stream.read(&mut request).await;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let word = "word ".repeat(800);
    let event = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{word}\"}}}}]}}\n\n");
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    if stream.write_all(head.as_bytes()).await.is_ok() {
        while stream.write_all(chunk.as_bytes()).await.is_ok() {}
    }
}

/// A gateway before it whose callers have to read.
pub(super) fn impatient(upstream: &Endless) -> Setup {
    Setup::new(&[upstream.address])
        .providers("first_byte: 15s, first_event: 15s, idle: 15s")
        .balance("1000.00")
        .with("bounds: { write_timeout: 500ms }")
}

#[tokio::test]
async fn a_caller_who_never_reads_is_cut_and_pins_neither_upstream_nor_hold() {
    let mut endless = Endless::start().await;
    let gateway = impatient(&endless).start();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(gateway.http).await.unwrap();
    stream.write_all(wire(&stream_request()).as_bytes()).await.unwrap();
    let mut little = [0; 64];
    stream.read_exact(&mut little).await.unwrap();
    assert!(little.starts_with(b"HTTP/1.1 200 "));
    endless.wait_for_closed(1).await;
    gateway.wait_until_settled().await;
    gateway.wait_for_metric("tollgate_connections", 0).await;
    let line = &gateway.account("alpha", 1);
    assert!(line.balance_nano < 1_000_000_000_000, "what was used is charged");
    assert!(gateway.ledger_is_right());
}
