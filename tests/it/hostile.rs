//! An upstream that breaks the rules of HTTP or of its dialect costs nobody a byte or a nano-dollar.
//!
//! The scripted provider of `tollgate mock` keeps the rules wherever its script does not say
//! otherwise. This one has no rules: it writes the bytes that a test gives it.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::support::{
    Call, Gateway, KEY, Setup, message_text_of, stream_request, text_of, upstream, whole_request,
};
use tollgate::mock::Script;

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(20);

/// What an upstream does once it has read a whole request.
#[derive(Clone)]
enum Act {
    /// Writes these bytes and waits for the next request on the connection.
    Say(String),
    /// Writes the first, waits for [`Raw::go_on`], writes the second.
    SayAndOn(String, String),
    /// Closes without a byte.
    Close,
    /// Closes without a byte on the first request that comes on a used connection, and says this else.
    CloseOnceReused(String),
}

/// An upstream that answers its requests with these acts in their order, the last one again and again.
struct Raw {
    address: SocketAddr,
    /// The connection, by its number, of each request that was read to its end.
    requests: Arc<Mutex<Vec<usize>>>,
    /// How many connections the gateway has closed.
    closed: watch::Receiver<usize>,
    on: Arc<Semaphore>,
    task: JoinHandle<()>,
}

impl Raw {
    async fn start(acts: impl Into<Vec<Act>>) -> Self {
        let acts: Vec<Act> = acts.into();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let requests = Arc::new(Mutex::new(vec![]));
        let (ended, closed) = watch::channel(0);
        let ended = Arc::new(ended);
        let on = Arc::new(Semaphore::new(0));
        let (seen, go) = (Arc::clone(&requests), Arc::clone(&on));
        let task = tokio::spawn(async move {
            // Its connections end with it.
            let mut connections = JoinSet::new();
            for number in 0.. {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (acts, seen) = (acts.clone(), Arc::clone(&seen));
                let (ended, go) = (Arc::clone(&ended), Arc::clone(&go));
                connections.spawn(async move {
                    if serve(stream, number, &acts, &seen, &go).await.is_none() {
                        ended.send_modify(|count| *count += 1);
                    }
                });
            }
        });
        Self { address, requests, closed, on, task }
    }

    fn requests(&self) -> Vec<usize> {
        self.requests.lock().unwrap().clone()
    }

    fn go_on(&self) {
        self.on.add_permits(1);
    }

    async fn wait_for_closed(&mut self, count: usize, after: &str) {
        let waited = tokio::time::timeout(PATIENCE, self.closed.wait_for(|closed| *closed >= count)).await;
        waited.unwrap_or_else(|_| panic!("the gateway keeps the connection after {after:?}")).unwrap();
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves one connection until it closes it itself, or (`None`) the gateway does.
async fn serve(
    mut stream: TcpStream,
    number: usize,
    acts: &[Act],
    seen: &Mutex<Vec<usize>>,
    go: &Semaphore,
) -> Option<()> {
    loop {
        read_request(&mut stream).await?;
        let (index, reused) = {
            let mut seen = seen.lock().unwrap();
            let reused = seen.contains(&number) && !has_reused(&seen);
            seen.push(number);
            (seen.len() - 1, reused)
        };
        match acts.get(index).or_else(|| acts.last())? {
            Act::Say(bytes) => stream.write_all(bytes.as_bytes()).await.ok()?,
            Act::SayAndOn(bytes, more) => {
                stream.write_all(bytes.as_bytes()).await.ok()?;
                go.acquire().await.ok()?.forget();
                stream.write_all(more.as_bytes()).await.ok()?;
            }
            Act::CloseOnceReused(_) if reused => return Some(()),
            Act::CloseOnceReused(bytes) => stream.write_all(bytes.as_bytes()).await.ok()?,
            Act::Close => return Some(()),
        }
    }
}

/// Whether any connection has had more than one request.
fn has_reused(requests: &[usize]) -> bool {
    let connections: HashSet<_> = requests.iter().collect();
    connections.len() < requests.len()
}

/// Reads a whole request: the gateway always announces the length of its body.
async fn read_request(stream: &mut TcpStream) -> Option<()> {
    let mut request = vec![];
    loop {
        let read = stream.read_buf(&mut request).await.ok()?;
        if read == 0 {
            return None;
        }
        let text = String::from_utf8_lossy(&request).to_ascii_lowercase();
        let Some((head, _)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.and_then(|l| l.trim().parse().ok()).expect("a content-length");
        if request.len() >= head.len() + 4 + length {
            return Some(());
        }
    }
}

/// One chunk of a chunked body.
fn chunk(data: &str) -> String {
    format!("{:x}\r\n{data}\r\n", data.len())
}

/// The head of a stream and its first chunks, without an end.
fn stream_of(events: &[String]) -> String {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    events.iter().fold(head.to_owned(), |stream, event| stream + &chunk(event))
}

/// A whole response of known length.
fn response(status: u16, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// An event of a chat completion that says `text`.
fn says(text: &str) -> String {
    format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
    )
}

/// An event that reports so many tokens.
fn reports(prompt: u64, completion: u64) -> String {
    format!(
        "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion}}}}}\n\n"
    )
}

const STOP: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";
/// What a chunked body ends with.
const LAST: &str = "0\r\n\r\n";

/// A stream as it should be, that used 10 and 5 tokens: 75,000 nano-dollars.
fn good_stream() -> String {
    stream_of(&[says("Hello"), STOP.to_owned(), reports(10, 5), DONE.to_owned()]) + LAST
}

/// A whole answer as it should be, at the same price.
fn good_whole() -> String {
    let body = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;
    response(200, body)
}

fn gateway(upstreams: &[SocketAddr]) -> Gateway {
    // No watchdog takes part in these tests: what the upstream does decides, not how long it takes.
    Setup::new(upstreams).providers("first_byte: 15s, first_event: 15s, idle: 15s").start()
}

#[tokio::test]
async fn a_pooled_connection_that_closes_on_its_next_request_costs_the_caller_nothing() {
    for (request, good) in [(stream_request(), good_stream()), (whole_request(), good_whole())] {
        let only = Raw::start([Act::CloseOnceReused(good)]).await;
        let gateway = gateway(&[only.address]);
        let mut calls = 0;
        // A caller may be back before its connection is in the pool: then the next call uses it.
        while !has_reused(&only.requests()) {
            let answer = Call::post(request.clone()).send(gateway.http).await;
            assert_eq!((answer.status, answer.clean), (200, true), "{}", answer.text());
            assert!(answer.text().contains("Hello") && !answer.text().contains("error"), "{}", answer.text());
            assert_eq!(answer.header("x-tollgate-attempts"), Some("1"), "it was no attempt");
            calls += 1;
        }
        assert_eq!(only.requests().len(), calls + 1, "it was sent again, once");
        let calls = i64::try_from(calls).unwrap();
        assert_eq!(gateway.spent(calls), calls * 75_000, "each call is charged once");
        assert!(gateway.ledger_is_right());
    }
}

#[tokio::test]
async fn an_upstream_that_closes_on_every_request_is_left_for_the_next_one() {
    let first = Raw::start([Act::Say(good_stream()), Act::Close]).await;
    let second = upstream(Script::default()).await;
    let gateway = gateway(&[first.address, second.address()]);
    // The order is drawn by weight: whoever comes first to the bad one, nobody notices.
    for _ in 0..6 {
        let answer = Call::post(stream_request()).send(gateway.http).await;
        let text = text_of(&answer.text());
        assert_eq!((answer.status, text.starts_with("Hello")), (200, true), "{}", answer.text());
    }
    assert_eq!(gateway.spent(6), 6 * 75_000, "each call is charged once");
    assert!(gateway.ledger_is_right());
}

/// What no chunk is. (An empty line where a length belongs is read as the end of the body by httparse,
/// and so by Pingora: such a stream ends with an error event too, but its connection is kept.)
const BAD_CHUNKS: [&str; 5] = [
    "zz\r\nxxxx\r\n",
    "-5\r\nhello\r\n",
    // Longer than it says.
    "2\r\nhello\r\n",
    // A length that does not fit.
    "fffffffffffffffff\r\nhello\r\n",
    "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
];

#[tokio::test]
async fn a_malformed_chunk_ends_the_stream_with_an_error_event_and_its_connection() {
    for bad in BAD_CHUNKS {
        // "Hello, " are two tokens by our own count.
        let broken = stream_of(&[says("Hello, ")]);
        let mut only = Raw::start([Act::SayAndOn(broken, bad.to_owned()), Act::Say(good_stream())]).await;
        let gateway = gateway(&[only.address]);
        let mut caller = Call::post(stream_request()).begin(gateway.http).await;
        assert_eq!(caller.head().await.status, 200);
        caller.read_until("Hello, ").await;
        only.go_on();
        let mut rest = String::new();
        while let Some(piece) = caller.chunk().await.expect("the body ends as its framing says") {
            rest.push_str(&String::from_utf8_lossy(&piece));
        }
        let event = rest.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n"));
        let event: serde_json::Value = serde_json::from_str(event.expect("one event"))
            .unwrap_or_else(|e| panic!("{bad:?}: {e}: {rest}"));
        assert_eq!(event["error"]["code"], "upstream_failed", "{bad:?}: {rest}");
        assert_eq!(gateway.spent(1), 5 * 2_500 + 2 * 10_000, "{bad:?}: what was delivered is charged");
        assert!(gateway.statement("alpha")[0].estimated, "{bad:?}");
        only.wait_for_closed(1, bad).await;
        let next = Call::post(stream_request()).send(gateway.http).await;
        assert_eq!((next.status, text_of(&next.text()).as_str()), (200, "Hello"), "{bad:?}");
        assert_eq!(only.requests(), [0, 1], "{bad:?}: the connection is not used again");
        assert_eq!(gateway.spent(2), 32_500 + 75_000, "{bad:?}");
        assert!(gateway.ledger_is_right(), "{bad:?}");
    }
}

#[tokio::test]
async fn a_malformed_chunk_ends_a_message_with_an_error_event_of_its_dialect() {
    let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"up-c\",\"content\":[],\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n";
    let word = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello, \"}}\n\n";
    let broken = stream_of(&[start.to_owned(), word.to_owned()]) + "zz\r\n";
    let mut only = Raw::start([Act::Say(broken)]).await;
    let gateway = Setup::new(&[only.address]).dialect("anthropic").providers("idle: 15s").start();
    let request =
        r#"{"model":"claude-a","max_tokens":64,"stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
    let call = Call::post(request).path("/v1/messages").without("authorization").header("x-api-key", KEY);
    let answer = call.header("anthropic-version", "2023-06-01").send(gateway.http).await;
    let text = answer.text();
    assert_eq!((answer.status, answer.clean, message_text_of(&text).as_str()), (200, true, "Hello, "));
    let (_, event) = text.rsplit_once("event: error\ndata: ").unwrap_or_else(|| panic!("{text}"));
    let event: serde_json::Value = serde_json::from_str(event.trim_end()).unwrap();
    assert_eq!((&event["type"], &event["error"]["type"]), (&"error".into(), &"api_error".into()), "{event}");
    assert_eq!(gateway.spent(1), 10 * 3_000 + 2 * 15_000, "its report of the prompt, our count of the text");
    only.wait_for_closed(1, "zz").await;
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_refusal_whose_body_never_comes_reaches_the_caller_by_its_head() {
    for status in [400, 404, 413, 422] {
        let acts = [
            "content-length: 100\r\n\r\n",
            "content-length: 100\r\n\r\n{\"error\":{\"mess",
            "transfer-encoding: chunked\r\n\r\n",
            "transfer-encoding: chunked\r\n\r\n20\r\n{\"error\":",
        ]
        .map(|rest| Act::Say(format!("HTTP/1.1 {status} No\r\ncontent-type: application/json\r\n{rest}")));
        let mut only = Raw::start(acts).await;
        let gateway = gateway(&[only.address]);
        let mut callers = vec![];
        for request in [stream_request(), whole_request(), stream_request(), whole_request()] {
            callers.push(Call::post(request).begin(gateway.http).await);
        }
        for caller in callers {
            let answer = caller.answer().await;
            assert_eq!(answer.status, status, "{}", answer.text());
            assert_eq!(answer.code(), "upstream_refused", "{}", answer.text());
            assert_eq!(answer.header("x-should-retry"), Some("false"));
        }
        assert_eq!(gateway.spent(4), 0, "{status}: nothing is charged");
        assert_eq!(only.requests().len(), 4, "nobody is asked twice");
        only.wait_for_closed(4, "a body that does not come").await;
        assert!(gateway.ledger_is_right());
    }
}

#[tokio::test]
async fn a_failure_whose_body_never_comes_goes_to_the_next_candidate_by_its_head() {
    let head = "HTTP/1.1 503 No\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n";
    let first = Raw::start([Act::Say(head.to_owned())]).await;
    let second = upstream(Script::default()).await;
    let gateway = gateway(&[first.address, second.address()]);
    // The order is drawn by weight: until the bad one has been asked.
    let mut calls = 0;
    while first.requests().is_empty() {
        assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
        calls += 1;
    }
    gateway.wait_for_log("reason=\"status_5xx\"");
    assert_eq!(gateway.spent(calls), calls * 75_000);
}

#[tokio::test]
async fn what_follows_the_terminal_event_is_neither_shown_nor_charged() {
    let late = says("LATE LATE LATE LATE LATE LATE LATE") + &reports(99, 9_999) + DONE;
    for (told, cost) in [(reports(10, 5), 75_000), (String::new(), 5 * 2_500 + 2 * 10_000)] {
        let begin = [says("Hello, "), STOP.to_owned(), told, DONE.to_owned()];
        let begin: Vec<_> = begin.into_iter().filter(|event| !event.is_empty()).collect();
        let together = begin.concat() + &late;
        for act in [
            // In the chunk of the terminal event, in one behind it, and once the caller has seen it.
            Act::Say(stream_of(&[together]) + LAST),
            Act::Say(stream_of(&begin) + &chunk(&late) + LAST),
            Act::SayAndOn(stream_of(&begin), chunk(&late) + LAST),
            // An end that is none.
            Act::SayAndOn(stream_of(&begin), chunk(&late) + "zz\r\n"),
        ] {
            let only = Raw::start([act]).await;
            let gateway = gateway(&[only.address]);
            let asked = stream_request()
                .replace("\"stream\":true", "\"stream\":true,\"stream_options\":{\"include_usage\":true}");
            let mut caller = Call::post(asked).begin(gateway.http).await;
            assert_eq!(caller.head().await.status, 200);
            let mut text = caller.read_until("[DONE]\n\n").await;
            only.go_on();
            while let Some(piece) = caller.chunk().await.expect("a clean end") {
                text.push_str(&String::from_utf8_lossy(&piece));
            }
            assert_eq!(text_of(&text), "Hello, ", "{text}");
            assert!(text.ends_with(DONE) && text.matches("[DONE]").count() == 1, "{text}");
            assert!(!text.contains("9999") && !text.contains("error"), "{text}");
            assert_eq!(gateway.spent(1), cost, "{text}");
            assert!(gateway.ledger_is_right());
        }
    }
}

/// Keys that an upstream may repeat to us: our own credential there, and such as others use.
const KEYS: [&str; 5] = [
    "prov-key-u0",
    "sk-proj-abcdefghijklmnop",
    "AIzaSyA1234567890abcdefghij",
    "gsk_abcdefghijklmnop1234",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
];

#[tokio::test]
async fn keys_in_an_upstreams_words_are_masked_wherever_they_stand() {
    for key in KEYS {
        let usual = "invalid_request_error";
        let bodies = [
            (format!("Wrong key: {key}."), usual, "bad_key", "key"),
            (format!("api_key={key}&model=x is no address"), usual, "bad_key", "key"),
            (format!("{{\\\"authorization\\\":\\\"Bearer {key}\\\"}}"), usual, "bad_key", "key"),
            ("Bad.".to_owned(), usual, key, "messages"),
            ("Bad.".to_owned(), usual, "bad", key),
            ("Bad.".to_owned(), key, "bad", "messages"),
        ]
        .map(|(message, kind, code, param)| {
            format!(
                r#"{{"error":{{"message":"{message}","type":"{kind}","code":"{code}","param":"{param}"}}}}"#
            )
        });
        let acts: Vec<_> = bodies.iter().map(|body| Act::Say(response(422, body))).collect();
        let only = Raw::start(acts).await;
        let gateway = gateway(&[only.address]);
        for body in &bodies {
            let answer = Call::post(whole_request()).send(gateway.http).await;
            let text = answer.text();
            assert_eq!(answer.status, 422, "{body}: {text}");
            assert!(text.contains("[masked]") && !text.contains(key), "{body}: {text}");
            assert!(!answer.headers.iter().any(|(_, value)| value.contains(key)), "{:?}", answer.headers);
        }
        assert_eq!(gateway.spent(6), 0);
        assert!(!gateway.log().contains(key), "no key in the log");
    }
}

#[tokio::test]
async fn keys_in_the_error_that_ends_a_stream_are_masked() {
    for key in KEYS {
        let error = format!(
            "data: {{\"error\":{{\"message\":\"{key}\",\"type\":\"{key}\",\"code\":\"{key}\",\"param\":\"{key}\"}}}}\n\n"
        );
        let only = Raw::start([Act::Say(stream_of(&[says("Hello, "), error]) + LAST)]).await;
        let gateway = gateway(&[only.address]);
        let answer = Call::post(stream_request()).send(gateway.http).await;
        let text = answer.text();
        assert_eq!((answer.status, answer.clean, text_of(&text).as_str()), (200, true, "Hello, "), "{text}");
        assert!(text.contains("\"error\"") && !text.contains(key), "{text}");
    }
}

#[tokio::test]
async fn a_redirect_leads_nowhere() {
    for status in [301, 302, 303, 307, 308] {
        let elsewhere = Raw::start([Act::Say(good_whole())]).await;
        let location = format!("http://{}/v1/chat/completions", elsewhere.address);
        let redirect = format!(
            "HTTP/1.1 {status} Moved\r\nlocation: {location}\r\nrefresh: 0; url={location}\r\ncontent-length: 0\r\n\r\n"
        );
        let only = Raw::start([Act::Say(redirect)]).await;
        let gateway = Setup::new(&[only.address]).routing("attempts_max: 1").start();
        for request in [stream_request(), whole_request()] {
            let answer = Call::post(request).send(gateway.http).await;
            assert_eq!((answer.status, answer.code().as_str()), (502, "upstream_failed"), "{status}");
            assert_eq!(answer.header("location"), None, "{status}: the caller is not sent there either");
        }
        assert_eq!(only.requests().len(), 2, "{status}");
        assert!(elsewhere.requests().is_empty(), "{status}: nobody followed it");
        assert_eq!(gateway.spent(2), 0, "{status}");
    }
}
