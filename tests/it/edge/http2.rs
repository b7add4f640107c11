//! Callers of HTTP/2: served as others are, and bounded where the protocol lets them take more.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use h2::Reason;
use http::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;

use super::bounds::{Endless, impatient};
use super::{END, Http2, PATIENCE, ask, connect, read_answer, rest, wire};
use crate::support::gateway::free_address;
use crate::support::{Gateway, KEY, Setup, script, stream_request, text_of, upstream, whole_request};
use tollgate::mock::{Mock, Script};

/// A gateway with an internal listener.
fn inside(setup: Setup) -> (Gateway, SocketAddr) {
    let internal = free_address();
    let listen = format!("internal: {{ address: \"{internal}\", h2c: true }}");
    (setup.listen(&listen).start(), internal)
}

async fn healthy(bounds: &str) -> (Mock, Gateway, SocketAddr) {
    let only = upstream(Script::default()).await;
    let setup = Setup::new(&[only.address()]).balance("1000.00").with(&format!("bounds: {{ {bounds} }}"));
    let (gateway, internal) = inside(setup);
    (only, gateway, internal)
}

#[tokio::test]
async fn an_internal_listener_speaks_both_protocols_and_hangs_for_neither() {
    let (_upstream, gateway, internal) = healthy("head_timeout: 500ms").await;
    let mut caller = Http2::connect(internal).await;
    let answer = caller.call(Http2::chat(), stream_request()).await.unwrap();
    assert_eq!((answer.status, text_of(&answer.body).as_str()), (200, "Hello, world!"));
    assert!(answer.headers.contains_key("x-request-id"));
    let mut plain = connect(internal).await;
    assert!(ask(&mut plain, &wire(&stream_request()), END).await.contains("[DONE]"));
    // Silence, half a preface, a preface and no more.
    for begin in ["", "PRI * HTTP/2.0\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut silent = connect(internal).await;
        silent.write_all(begin.as_bytes()).await.unwrap();
        rest(&mut silent).await;
    }
    gateway.wait_for_refused("too_slow", 3).await;
    // It has served, so it may be idle.
    let answer = caller.call(Http2::chat(), stream_request()).await.unwrap();
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn an_idle_connection_is_closed() {
    let (_upstream, _gateway, internal) = healthy("keepalive: 1s").await;
    let mut caller = Http2::connect(internal).await;
    assert_eq!(caller.call(Http2::chat(), whole_request()).await.unwrap().status, 200);
    let ended = tokio::time::timeout(PATIENCE, &mut caller.connection).await;
    assert!(ended.is_ok(), "it is kept for ever");
}

#[tokio::test]
async fn an_early_refusal_arrives_while_the_caller_still_uploads() {
    let (only, _gateway, internal) = healthy("body_max: 100KiB").await;
    let upload = Bytes::from(vec![b'x'; 8 << 20]);
    let announced =
        |request: http::request::Builder| request.header("content-length", upload.len()).body(()).unwrap();
    let chat = "/v1/chat/completions";
    let keyless = Http2::request(Method::POST, chat);
    let mut wrong = announced(keyless);
    wrong.headers_mut().insert("authorization", "Bearer sk-nobody".parse().unwrap());
    let requests = [
        (announced(Http2::request(Method::POST, chat)), 413, "body_too_large"),
        (Http2::chat(), 413, "body_too_large"),
        // HTTP/2 has no 100 here: some send anyway.
        (
            announced(Http2::request(Method::POST, chat).header("expect", "100-continue")),
            413,
            "body_too_large",
        ),
        (wrong, 401, "invalid_api_key"),
        (announced(Http2::request(Method::POST, "/v1/nothing")), 404, "unknown_path"),
    ];
    let mut caller = Http2::connect(internal).await;
    for (request, status, code) in requests {
        // `call` sends all of it, and fails when the stream is reset before.
        let answer = caller.call(request, upload.clone()).await.unwrap();
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{}", answer.body);
    }
    assert!(only.requests().is_empty());
    let answer = caller.call(Http2::chat(), whole_request()).await.unwrap();
    assert_eq!(answer.status, 200, "the connection is as good as before");
}

#[tokio::test]
async fn a_refusal_for_the_balance_arrives_too() {
    let only = upstream(Script::default()).await;
    let setup = Setup::new(&[only.address()]).balance("0.000001");
    let (_gateway, internal) = inside(setup);
    let words = "word ".repeat(1 << 20);
    let request = format!(r#"{{"model":"gpt-a","messages":[{{"role":"user","content":"{words}"}}]}}"#);
    let answer = Http2::connect(internal).await.call(Http2::chat(), request).await.unwrap();
    assert!([400, 402].contains(&answer.status), "{}", answer.body);
    let answer = Http2::connect(internal).await.call(Http2::chat(), whole_request()).await.unwrap();
    assert_eq!((answer.status, answer.code().as_str()), (402, "insufficient_balance"));
}

#[tokio::test]
async fn a_large_upload_reaches_the_upstream_whole() {
    let (only, _gateway, internal) = healthy("body_max: 32MiB").await;
    let words = "word ".repeat(4 << 20);
    let request = format!(
        r#"{{"model":"gpt-a","max_tokens":5,"messages":[{{"role":"user","content":"hi"}}],"x":"{words}"}}"#
    );
    let answer = Http2::connect(internal).await.call(Http2::chat(), request.clone()).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let expected = request.replace("\"gpt-a\"", "\"up-a\"");
    assert!(only.requests()[0].body == expected.as_bytes(), "the body changed");
}

#[tokio::test]
async fn a_body_that_does_not_come_is_a_408() {
    let (only, gateway, internal) = healthy("body_timeout: 300ms").await;
    let caller = Http2::connect(internal).await;
    let mut send = caller.send.clone().ready().await.unwrap();
    let (answer, mut stream) = send.send_request(Http2::chat(), false).unwrap();
    stream.send_data(Bytes::from_static(b"{\"model\":"), false).unwrap();
    let answer = tokio::time::timeout(PATIENCE, read_answer(answer)).await.expect("no answer").unwrap();
    assert_eq!((answer.status, answer.code().as_str()), (408, "body_timeout"));
    assert!(only.requests().is_empty());
    gateway.wait_for_metric("tollgate_in_flight", 0).await;
}

#[tokio::test]
async fn a_head_above_the_bound_is_a_431_and_connect_a_405() {
    let (_upstream, _gateway, internal) = healthy("head_max: 16KiB").await;
    let mut caller = Http2::connect(internal).await;
    let filled = |bytes: usize| {
        Http2::request(Method::POST, "/v1/messages").header("x-filler", "x".repeat(bytes)).body(()).unwrap()
    };
    let answer = caller.call(filled(20 << 10), whole_request()).await.unwrap();
    assert_eq!((answer.status, answer.code().as_str()), (431, "head_too_large"));
    assert!(answer.body.starts_with("{\"type\":\"error\"") || answer.body.contains("\"type\":\"error\""));
    // Twice the bound is not even taken in: h2 says it without words.
    let answer = caller.call(filled(60 << 10), whole_request()).await;
    assert!(answer.as_ref().map_or(true, |answer| answer.status == 431), "{answer:?}");
    let tunnel =
        http::Request::builder().method(Method::CONNECT).uri("upstream.example:443").body(()).unwrap();
    let answer = Http2::connect(internal).await.call(tunnel, "").await.unwrap();
    assert_eq!((answer.status, answer.code().as_str()), (405, "method_not_allowed"));
}

#[tokio::test]
async fn a_connection_ends_in_peace_after_its_requests() {
    let (_upstream, _gateway, internal) = healthy("requests_per_connection_max: 3").await;
    let mut caller = Http2::connect(internal).await;
    for _ in 0..3 {
        assert_eq!(caller.call(Http2::chat(), whole_request()).await.unwrap().status, 200);
    }
    let ended = tokio::time::timeout(PATIENCE, &mut caller.connection).await.expect("it goes on").unwrap();
    assert!(ended.is_ok_and(|()| true), "GOAWAY without an error");
}

#[tokio::test]
async fn a_caller_who_gives_no_window_is_cut_and_pins_neither_upstream_nor_hold() {
    let mut endless = Endless::start().await;
    let (gateway, internal) = inside(impatient(&endless));
    let mut caller = Http2::connect(internal).await;
    let answer = caller.begin(Http2::chat(), stream_request()).await.unwrap();
    let answer = answer.await.unwrap();
    assert_eq!(answer.status(), 200);
    // Its body is not read, so the window stays used up.
    endless.wait_for_closed(1).await;
    gateway.wait_until_settled().await;
    assert_eq!(gateway.account("alpha", 1).calls, 1);
    assert!(gateway.ledger_is_right());
    // It held the window of the whole connection.
    drop(answer);
    let other = caller.call(Http2::request(Method::GET, "/v1/models").body(()).unwrap(), "").await;
    assert_eq!(other.unwrap().status, 200, "its other streams go on");
}

#[tokio::test]
async fn a_caller_who_stops_reading_the_connection_is_cut() {
    let mut endless = Endless::start().await;
    let (gateway, internal) = inside(impatient(&endless));
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(1 << 30).initial_connection_window_size(1 << 30);
    let (send, mut connection) = builder.handshake::<_, Bytes>(connect(internal).await).await.unwrap();
    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let task = tokio::spawn(async move {
        tokio::select! {
            _ = &mut connection => {}
            () = stopped.notified() => {}
        }
        // Open, and never read again.
        std::future::pending::<()>().await;
    });
    let mut send = send.ready().await.unwrap();
    let (answer, mut stream) = send.send_request(Http2::chat(), false).unwrap();
    stream.send_data(stream_request().into(), true).unwrap();
    assert_eq!(answer.await.unwrap().status(), 200);
    stop.notify_one();
    endless.wait_for_closed(1).await;
    gateway.wait_until_settled().await;
    gateway.wait_for_metric("tollgate_connections", 0).await;
    assert!(gateway.ledger_is_right());
    task.abort();
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// A string of HPACK, without Huffman's code.
fn text(text: &str) -> Vec<u8> {
    assert!(text.len() < 127);
    [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
}

/// The head of a call, in HPACK.
fn head() -> Vec<u8> {
    // POST, http, :path, :authority, authorization (23 in the static table).
    let mut head = vec![0x83, 0x86];
    head.extend([&[0x04][..], &text("/v1/chat/completions")].concat());
    head.extend([&[0x01][..], &text("gateway")].concat());
    head.extend([&[0x0f, 0x08][..], &text(&format!("Bearer {KEY}"))].concat());
    head
}

/// A connection on which a test writes frames of its own.
async fn raw(to: SocketAddr) -> tokio::net::TcpStream {
    let mut stream = connect(to).await;
    let begin = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &frame(SETTINGS, 0, 0, &[])].concat();
    stream.write_all(&begin).await.unwrap();
    stream
}

/// Sends these again and again until the other side has had enough; answers why it says that it has.
async fn attack(mut stream: tokio::net::TcpStream, mut next: impl FnMut() -> Option<Vec<u8>>) -> Option<u32> {
    let (mut read, mut write) = stream.split();
    let sending = async {
        while let Some(bytes) = next() {
            if write.write_all(&bytes).await.is_err() {
                break;
            }
        }
        std::future::pending::<()>().await;
    };
    let mut said = vec![];
    let reading = async {
        let mut piece = vec![0; 64 << 10];
        while let Ok(count @ 1..) = read.read(&mut piece).await {
            said.extend_from_slice(&piece[..count]);
        }
    };
    tokio::select! {
        read = tokio::time::timeout(PATIENCE, reading) => read.expect("it goes on for ever"),
        () = sending => unreachable!(),
    }
    let mut rest = said.as_slice();
    let mut reason = None;
    while let [a, b, c, kind, _, _, _, _, _, more @ ..] = rest {
        let length = usize::try_from(u32::from_be_bytes([0, *a, *b, *c])).unwrap();
        if let (GOAWAY, Some([_, _, _, _, code @ ..])) = (*kind, more.get(..8.min(length))) {
            reason = <[u8; 4]>::try_from(code).ok().map(u32::from_be_bytes);
        }
        rest = more.get(length..).unwrap_or_default();
    }
    reason
}

#[tokio::test]
async fn rapid_resets_end_their_connection_and_touch_neither_money_nor_upstreams() {
    const PAIRS: u32 = 50_000;
    let (only, gateway, internal) = healthy("head_timeout: 15s").await;
    let mut streams = (0..PAIRS).map(|n| 2 * n + 1);
    let reason = attack(raw(internal).await, || {
        // Many in one write, as an attacker would.
        let pairs = streams.by_ref().take(500);
        let burst: Vec<u8> = pairs
            .flat_map(|id| {
                [frame(HEADERS, END_HEADERS, id, &head()), frame(RST_STREAM, 0, id, &CANCEL)].concat()
            })
            .collect();
        (!burst.is_empty()).then_some(burst)
    });
    let reason = reason.await;
    assert!(reason.is_none_or(|code| Reason::from(code) == Reason::ENHANCE_YOUR_CALM), "{reason:?}");
    assert!(streams.next().is_some(), "it was stopped before its end");
    assert!(only.requests().is_empty());
    let answer = Http2::connect(internal).await.call(Http2::chat(), whole_request()).await.unwrap();
    assert_eq!(answer.status, 200);
    gateway.wait_for_metric("tollgate_in_flight", 0).await;
    assert_eq!(gateway.metric("tollgate_holds_open").await, 0);
}

#[tokio::test]
async fn a_head_without_an_end_is_bounded_whatever_its_pieces() {
    let (_upstream, gateway, internal) = healthy("head_timeout: 60s").await;
    let (before, _) = gateway.footprint();
    // Literals that are not kept: 0x10, a name of one byte, a value.
    let filled: Vec<u8> = [&[0x10, 1, b'x', 0x7f, 0x80 | 0x01, 0x76][..], &[b'x'; 15_000]].concat();
    for piece in [filled, vec![0x10, 1, b'x', 1, b'y'], vec![]] {
        let mut stream = raw(internal).await;
        stream.write_all(&frame(HEADERS, 0, 1, &head())).await.unwrap();
        let mut sent = 0;
        let mut frames = 0;
        attack(stream, || {
            sent += piece.len();
            frames += 1;
            (sent < 64 << 20 && frames < 1_000_000).then(|| frame(CONTINUATION, 0, 1, &piece))
        })
        .await;
        assert!(sent < 64 << 20 && frames < 1_000_000, "it was stopped before its end");
    }
    let answer = Http2::connect(internal).await.call(Http2::chat(), whole_request()).await.unwrap();
    assert_eq!(answer.status, 200);
    let (after, _) = gateway.footprint();
    assert!(after < before + (32 << 10), "{before} KiB before, {after} KiB after");
}

#[tokio::test]
async fn a_thousand_streams_on_ten_connections_are_all_served() {
    let slow = upstream(script(r#"{"delay_first_event_ms":200}"#)).await;
    let setup = Setup::new(&[slow.address()])
        .providers("first_byte: 15s, first_event: 15s, idle: 15s")
        .balance("1000.00");
    let (gateway, internal) = inside(setup);
    let mut callers = vec![];
    let mut answers = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let mut caller = Http2::connect(internal).await;
        for _ in 0..100 {
            let answer = caller.begin(Http2::chat(), stream_request()).await.unwrap();
            answers.spawn(read_answer(answer));
        }
        callers.push(caller);
    }
    while let Some(answer) = answers.join_next().await {
        let answer = answer.unwrap().unwrap();
        assert_eq!(
            (answer.status, text_of(&answer.body).as_str()),
            (200, "Hello, world!"),
            "{}",
            answer.body
        );
    }
    let row = gateway.account("alpha", 1_000);
    assert_eq!(row.balance_nano, 1_000_000_000_000 - 1_000 * 75_000, "each is charged once");
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn five_thousand_cancelled_streams_leave_nothing_behind() {
    let hanging = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let setup = Setup::new(&[hanging.address()])
        .providers("first_byte: 60s, first_event: 60s, idle: 60s")
        .balance("1000.00");
    let (gateway, internal) = inside(setup);
    let mut callers = vec![];
    for _ in 0..5 {
        callers.push(Http2::connect(internal).await);
    }
    let mut before = (0, 0);
    for round in 0..20 {
        let mut answers = vec![];
        for caller in &mut callers {
            for _ in 0..50 {
                answers.push(caller.begin(Http2::chat(), stream_request()).await.unwrap());
            }
        }
        hanging.wait_for_requests((round + 1) * 250).await;
        drop(answers);
        gateway.wait_for_metric("tollgate_in_flight", 0).await;
        if round == 3 {
            // Buffers and pools have the size by now that this load needs.
            before = gateway.footprint();
        }
    }
    gateway.wait_until_settled().await;
    let after = gateway.footprint();
    assert!(after.0 < before.0 + (24 << 10), "KiB, files: {before:?} before, {after:?} after");
    assert!(after.1 < before.1 + 50, "KiB, files: {before:?} before, {after:?} after");
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_drain_says_goaway_and_lets_streams_end() {
    let slow = upstream(script(r#"{"delay_chunk_ms":100}"#)).await;
    let (mut gateway, internal) = inside(Setup::new(&[slow.address()]));
    let mut caller = Http2::connect(internal).await;
    let answer = caller.begin(Http2::chat(), stream_request()).await.unwrap();
    let answer = answer.await.unwrap();
    gateway.signal("-TERM");
    gateway.wait_for_log("leaving");
    let mut body = answer.into_body();
    let mut text = String::new();
    while let Some(piece) = body.data().await {
        text.push_str(&String::from_utf8_lossy(&piece.expect("its stream goes on")));
    }
    assert_eq!(text_of(&text), "Hello, world!");
    let ended = tokio::time::timeout(PATIENCE, &mut caller.connection).await.expect("it goes on").unwrap();
    ended.expect("it ends in peace");
    assert!(gateway.wait().success());
}

/// Calls over HTTP/2, four at once on a connection, as long as that lasts; answers how many were answered and how
/// many were given back untouched.
async fn keep_calling(to: SocketAddr, over: Arc<AtomicBool>) -> (i64, i64) {
    let (mut answered, mut given_back) = (0, 0);
    while !over.load(Ordering::Acquire) {
        let mut caller = Http2::connect(to).await;
        let mut goes_on = true;
        while goes_on && !over.load(Ordering::Acquire) {
            let mut answers = vec![];
            for _ in 0..4 {
                match caller.begin(Http2::chat(), stream_request()).await {
                    Ok(answer) => answers.push(answer),
                    Err(error) => {
                        assert!(error.is_go_away() && error.reason() == Some(Reason::NO_ERROR), "{error:?}");
                        goes_on = false;
                    }
                }
            }
            for answer in answers {
                match read_answer(answer).await {
                    Ok(answer) => {
                        assert_eq!((answer.status, text_of(&answer.body).as_str()), (200, "Hello, world!"));
                        answered += 1;
                    }
                    // Above the last stream that was seen: to be sent again (RFC 9113 section 6.8).
                    Err(error) => {
                        assert!(error.is_go_away() && error.reason() == Some(Reason::NO_ERROR), "{error:?}");
                        (goes_on, given_back) = (false, given_back + 1);
                    }
                }
            }
        }
    }
    (answered, given_back)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrades_under_load_fail_no_call_of_http2() {
    let only = upstream(script(r#"{"delay_chunk_ms":5}"#)).await;
    let (mut gateway, internal) = inside(Setup::new(&[only.address()]).balance("1000"));
    let over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..3).map(|_| tokio::spawn(keep_calling(internal, Arc::clone(&over)))).collect();
    for _ in 0..3 {
        only.wait_for_requests(only.requests().len() + 50).await;
        let new = gateway.successor();
        gateway.signal("-QUIT");
        new.wait_for_log("serving on");
        assert!(gateway.wait().success(), "the old process drained:\n{}", gateway.log());
        gateway = new;
    }
    only.wait_for_requests(only.requests().len() + 50).await;
    over.store(true, Ordering::Release);
    let (mut answered, mut given_back) = (0, 0);
    for caller in callers {
        let (more, back) = caller.await.expect("no call fails");
        (answered, given_back) = (answered + more, given_back + back);
    }
    gateway.wait_until_settled().await;
    println!("3 upgrades, {answered} calls of HTTP/2, {given_back} given back untouched");
    let account = gateway.account("alpha", answered);
    assert_eq!((account.calls, account.balance_nano), (answered, 1_000_000_000_000 - 75_000 * answered));
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_hundred_streams_of_one_connection_go_on_to_the_next_candidate_or_leave() {
    let first = upstream(script(
        r#"{"fault":{"kind":"error_event","pieces":0,"body":"{\"error\":{\"code\":503}}"}}"#,
    ))
    .await;
    let second = upstream(script(r#"{"delay_first_event_ms":300}"#)).await;
    let setup = Setup::new(&[first.address(), second.address()])
        .providers("first_byte: 15s, first_event: 15s, idle: 15s")
        .balance("1000.00");
    let (gateway, internal) = inside(setup);
    let mut caller = Http2::connect(internal).await;
    let mut answers = vec![];
    for n in 0..100 {
        let body = if n % 2 == 0 { stream_request() } else { whole_request() };
        answers.push(caller.begin(Http2::chat(), body).await.unwrap());
    }
    second.wait_for_requests(100).await;
    let stay = answers.split_off(30);
    drop(answers);
    for answer in stay {
        let answer = read_answer(answer).await.unwrap();
        assert_eq!((answer.status, answer.body.contains("world")), (200, true), "{}", answer.body);
    }
    gateway.wait_until_settled().await;
    let row = gateway.account("alpha", 100);
    assert_eq!(row.balance_nano, 1_000_000_000_000 - 70 * 75_000, "who left before the answer pays nothing");
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn trailers_and_expectations_of_a_large_upload_change_nothing() {
    let only = upstream(Script::default()).await;
    let setup =
        Setup::new(&[only.address()]).balance("1000.00").providers("first_byte: 20s, first_event: 20s");
    let (gateway, internal) = inside(setup);
    let mut caller = Http2::connect(internal).await;
    let mut body = Bytes::from(whole_request().replace("hi", &"x".repeat(8 << 20)));
    let mut send = caller.send.clone().ready().await.unwrap();
    let request =
        Http2::request(Method::POST, "/v1/chat/completions").header("expect", "100-continue").body(());
    let (answer, mut stream) = send.send_request(request.unwrap(), false).unwrap();
    stream.reserve_capacity(body.len());
    while !body.is_empty() {
        let room = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await.unwrap().unwrap();
        stream.send_data(body.split_to(room.min(body.len())), false).unwrap();
    }
    let mut trailers = http::HeaderMap::new();
    trailers.insert("content-length", "1".parse().unwrap());
    trailers.insert("authorization", "Bearer other".parse().unwrap());
    stream.send_trailers(trailers).unwrap();
    let answer = tokio::time::timeout(PATIENCE, read_answer(answer)).await.unwrap().unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let sent = &only.requests()[0];
    assert_eq!((sent.header("expect"), sent.header("trailer")), (None, None));
    assert!(sent.body.len() > 8 << 20);
    assert!(caller.call(Http2::chat(), whole_request()).await.is_ok(), "the connection goes on");
    assert_eq!(gateway.spent(2), 1_000_000_000 - (1_000_000_000_000 - 150_000));
}
