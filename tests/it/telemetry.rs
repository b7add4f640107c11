//! Spans of calls at a collector, as it reads them from the wire; and a collector that hangs.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tollgate::mock::Mock;

use super::support::{Call, Setup, script, stream_request, upstream, whole_request};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// A stand-in that takes what it is sent.
struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    /// All bytes of all messages, for what must not be in them.
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (spans, bytes) = (Arc::<Mutex<Vec<Span>>>::default(), Arc::<Mutex<Vec<u8>>>::default());
        let (seen, raw) = (Arc::clone(&spans), Arc::clone(&bytes));
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(take(socket, Arc::clone(&seen), Arc::clone(&raw)));
            }
        });
        Self { address, spans, bytes }
    }

    /// Waits until so many spans have come.
    async fn wait_for(&self, count: usize) -> Vec<Span> {
        let began = Instant::now();
        loop {
            let spans = self.spans.lock().unwrap().clone();
            if spans.len() >= count {
                return spans;
            }
            assert!(began.elapsed() < PATIENCE, "{} spans instead of {count}", spans.len());
            tokio::task::yield_now().await;
        }
    }
}

/// Messages on one connection.
async fn take(mut socket: TcpStream, spans: Arc<Mutex<Vec<Span>>>, raw: Arc<Mutex<Vec<u8>>>) {
    let mut got: Vec<u8> = vec![];
    loop {
        let Some(head) = got.windows(4).position(|window| window == b"\r\n\r\n") else {
            if socket.read_buf(&mut got).await.unwrap_or(0) == 0 {
                return;
            }
            continue;
        };
        let text = String::from_utf8_lossy(&got[..head]).to_lowercase();
        assert!(
            text.starts_with("post /v1/traces ") && text.contains("content-type: application/x-protobuf"),
            "{text}"
        );
        let length = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .unwrap()
            .parse::<usize>()
            .unwrap();
        while got.len() < head + 4 + length {
            assert!(socket.read_buf(&mut got).await.unwrap() > 0, "a message breaks off");
        }
        let body: Vec<u8> = got.drain(..head + 4 + length).skip(head + 4).collect();
        let message = ExportTraceServiceRequest::decode(body.as_slice()).expect("a message of OTLP");
        let of = |message: ExportTraceServiceRequest| {
            message.resource_spans.into_iter().flat_map(|it| it.scope_spans).flat_map(|it| it.spans)
        };
        spans.lock().unwrap().extend(of(message));
        raw.lock().unwrap().extend(body);
        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    }
}

fn setup(mocks: &[Mock], collector: SocketAddr) -> Setup {
    let addresses: Vec<SocketAddr> = mocks.iter().map(Mock::address).collect();
    Setup::new(&addresses).with(&format!("telemetry: {{ otlp: \"http://{collector}\" }}"))
}

fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|it| it.key == key).and_then(|it| it.value.clone()?.value);
    match found {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

#[tokio::test]
async fn a_call_is_a_span_under_its_callers_with_one_for_each_attempt() {
    let collector = Collector::start().await;
    let dead = r#"{"fault":{"kind":"status","code":503}}"#;
    let mocks = [upstream(script(dead)).await, upstream(script("{}")).await];
    let gateway = setup(&mocks, collector.address).start();
    let traceparent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let answer = Call::post(whole_request()).header("traceparent", &traceparent).send(gateway.http).await;
    assert_eq!(answer.status, 200);
    let spans = collector.wait_for(3).await;
    let [call, failed, served] = spans.as_slice() else { panic!("{spans:?}") };
    let trace = u128::from_str_radix(TRACE, 16).unwrap().to_be_bytes();
    assert!(spans.iter().all(|span| span.trace_id == trace), "the caller's trace");
    assert_eq!(call.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
    assert_eq!(call.name, "chat gpt-a");
    assert!(attribute(call, "gen_ai.usage.output_tokens").parse::<u64>().unwrap() > 0);
    assert_eq!(attribute(call, "tollgate.attempts"), "2");
    for (attempt, endpoint, outcome) in [(failed, "u0/up-a", "failed"), (served, "u1/up-a", "served")] {
        assert_eq!(attempt.parent_span_id, call.span_id);
        assert_eq!(attribute(attempt, "tollgate.endpoint"), endpoint);
        assert_eq!(attribute(attempt, "tollgate.outcome"), outcome);
        assert!(call.start_time_unix_nano <= attempt.start_time_unix_nano);
        assert!(attempt.start_time_unix_nano <= attempt.end_time_unix_nano);
        assert!(attempt.end_time_unix_nano <= call.end_time_unix_nano);
    }
    assert_eq!(attribute(failed, "error.type"), "status_5xx");
    assert_eq!((failed.status.as_ref().map(|it| it.code), served.status.as_ref()), (Some(2), None));
    assert_eq!(gateway.metric("tollgate_telemetry_dropped_total").await, 0);
}

#[tokio::test]
async fn a_traceparent_that_makes_no_sense_is_none_and_one_that_says_no_is_heeded() {
    let collector = Collector::start().await;
    let mocks = [upstream(script("{}")).await];
    let gateway = setup(&mocks, collector.address).start();
    for (said, no) in [(format!("00-{TRACE}-00f067aa0ba902b7-00"), true), ("00-0-0-01".to_owned(), false)] {
        let call = Call::post(stream_request())
            .header("traceparent", &said)
            .header("x-request-id", &format!("no-{no}"));
        assert_eq!(call.send(gateway.http).await.status, 200);
    }
    let spans = collector.wait_for(2).await;
    assert!(spans.iter().all(|span| span.trace_id != u128::from_str_radix(TRACE, 16).unwrap().to_be_bytes()));
    assert_eq!(attribute(&spans[0], "tollgate.request_id"), "no-false");
    assert!(spans[0].parent_span_id.is_empty());
}

#[tokio::test]
async fn nothing_of_keys_and_prompts_is_in_a_span() {
    let collector = Collector::start().await;
    let mocks = [upstream(script("{}")).await];
    let gateway = setup(&mocks, collector.address).start();
    let prompt = r#"{"model":"gpt-a","messages":[{"role":"user","content":"a-secret-prompt"}]}"#;
    assert_eq!(Call::post(prompt).send(gateway.http).await.status, 200);
    collector.wait_for(2).await;
    let bytes = collector.bytes.lock().unwrap().clone();
    let text = String::from_utf8_lossy(&bytes);
    for secret in ["a-secret-prompt", "sk-test", "prov-key"] {
        assert!(!text.contains(secret), "{secret} is in a span");
    }
    assert!(text.contains("gpt-a"));
}

#[tokio::test]
async fn a_collector_that_hangs_holds_up_no_call_and_its_spans_are_dropped_and_counted() {
    // It takes connections, by the kernel, and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mocks = [upstream(script("{}")).await];
    let mut gateway = setup(&mocks, silent.local_addr().unwrap()).balance("100").start();
    for _ in 0..50 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    }
    gateway.wait_for_metric_that("tollgate_telemetry_dropped_total", |dropped| dropped > 0).await;
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.signal("-TERM");
    assert!(gateway.wait().success(), "it leaves all the same");
}

#[tokio::test]
async fn what_waits_is_sent_when_the_process_leaves() {
    let collector = Collector::start().await;
    let mocks = [upstream(script("{}")).await];
    let mut gateway = setup(&mocks, collector.address).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    collector.wait_for(2).await;
}
