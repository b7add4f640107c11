//! One attempt on the wire: what an upstream and a caller may do in the middle of it.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::support::interim::{INTERIM, answer_each};
use super::support::tls::serve_h2_until;
use super::support::{Call, Caller, Setup, script, stream_request, upstream, whole_request};
use tollgate::mock::Script;

/// Than the 2 s that a stream may run.
const MUCH_LONGER: Duration = Duration::from_secs(60);
/// Patience for a TLS handshake on a busy machine.
const TIMERS: &str = "connect: 10s, first_byte: 10s, first_event: 10s";

#[tokio::test]
async fn a_call_that_nobody_serves_leaves_its_callers_connection_open() {
    let only = upstream(script(r#"{"fault":{"kind":"status","code":503}}"#)).await;
    let gateway = Setup::new(&[only.address()]).start();
    let mut caller = Caller::connect(gateway.http).await;
    for request in [whole_request(), stream_request(), whole_request()] {
        caller.send(&Call::post(request)).await;
        let answer = caller.next_answer().await;
        // From a few failures on it is not even asked.
        assert!([502, 503].contains(&answer.status), "{}", answer.text());
        assert_eq!(answer.header("connection"), Some("keep-alive"));
    }
    gateway.wait_until_settled().await;
}

#[tokio::test]
async fn an_upstream_that_changes_the_protocol_unasked_has_failed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let said =
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n{\"id\":1}";
            let _gone = stream.write_all(said).await;
            let _end = stream.read(&mut [0; 1 << 16]).await;
        }
    });
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[address, second.address()]).start();
    let answer = Call::post(whole_request()).send(gateway.http).await;
    let told = (answer.status, answer.header("x-tollgate-attempts"));
    assert_eq!(told, (200, Some("2")), "{}", gateway.log());
}

#[tokio::test]
async fn a_caller_who_leaves_while_a_connection_is_made_ends_it_and_pays_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let setup = Setup::new(&[listener.local_addr().unwrap()]).tls(0).providers(TIMERS);
    let gateway = setup.start();
    let caller = Call::post(stream_request()).begin(gateway.http).await;
    let (mut handshake, _) = listener.accept().await.unwrap();
    let mut hello = vec![0; 1 << 16];
    assert!(handshake.read(&mut hello).await.unwrap() > 0);
    drop(caller);
    assert_eq!(handshake.read(&mut hello).await.unwrap(), 0, "the handshake is given up");
    gateway.wait_until_settled().await;
    assert_eq!(gateway.spent(1), 0);
}

#[tokio::test]
async fn over_http2_an_answer_may_come_before_its_request_has_been_read() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // Nothing of a body is read: it does not fit into the stream's window.
            tokio::spawn(serve_h2_until(stream, 9));
        }
    });
    let gateway = Setup::new(&[address]).providers(TIMERS).provider(0, "http: h2c").start();
    let long = format!(
        r#"{{"model":"gpt-a","messages":[{{"role":"user","content":"{}"}}]}}"#,
        "long ".repeat(100_000)
    );
    for _ in 0..2 {
        let answer = Call::post(long.clone()).send(gateway.http).await;
        assert_eq!(
            (answer.status, answer.header("x-tollgate-attempts")),
            (200, Some("1")),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn an_upstream_that_never_stops_is_stopped_by_the_clock() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || flood(&listener.into_std().unwrap()));
    let gateway = Setup::new(&[address]).routing("stream_max: 2s").start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    assert_eq!(caller.head().await.status, 200);
    let mut last = vec![];
    let all = async {
        while let Ok(Some(chunk)) = caller.chunk().await {
            last = chunk;
        }
    };
    tokio::time::timeout(MUCH_LONGER, all).await.expect("the stream never ended");
    let last = String::from_utf8_lossy(&last);
    assert!(last.contains("\"error\""), "{last}\n{}", gateway.log());
    gateway.wait_until_settled().await;
}

#[tokio::test]
async fn heads_that_never_lead_to_an_answer_end_with_the_share() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || pour(&listener.into_std().unwrap(), b"", &INTERIM.repeat(50)));
    let second = upstream(Script::default()).await;
    let setup = Setup::new(&[address, second.address()]).routing("deadline: 4s").threads(1);
    let gateway = setup.start();
    // So large that it takes several looks to see that it was sent.
    let long =
        format!(r#"{{"model":"gpt-a","messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(200_000));
    let answer = Call::post(long).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")), "{}", gateway.log());
}

#[tokio::test]
async fn a_request_that_its_upstream_has_read_is_not_sent_again_for_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // Each connection carries one call, and breaks off inside the answer to the next.
    tokio::spawn(answer_each(listener, INTERIM, true));
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[address, second.address()]).threads(1).start();
    let mut caller = Caller::connect(gateway.http).await;
    for attempts in ["1", "2"] {
        caller.send(&Call::post(whole_request())).await;
        let answer = caller.next_answer().await;
        let told = (answer.status, answer.header("x-tollgate-attempts"));
        assert_eq!(told, (200, Some(attempts)), "{}", gateway.log());
    }
}

/// Answers one request with events for as long as somebody takes them.
fn flood(listener: &std::net::TcpListener) {
    let event = r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"up-a","choices":[{"index":0,"delta":{"content":"more"},"finish_reason":null}]}"#;
    let event = format!("{event}\n\n");
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    pour(listener, head.as_bytes(), chunk.repeat(50).as_bytes());
}

/// Takes one connection, and writes for as long as somebody reads.
fn pour(listener: &std::net::TcpListener, first: &[u8], then: &[u8]) {
    use std::io::{Read as _, Write as _};
    listener.set_nonblocking(false).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let _request = stream.read(&mut [0; 1 << 16]).unwrap();
    let mut next = stream.write_all(first);
    while next.is_ok() {
        next = stream.write_all(then);
    }
}
