//! Spans of calls at a collector, as it reads them from the wire; and a collector that hangs.

use std::net::SocketAddr;

use filters::trace::{Share, TraceId};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;
use tollgate::mock::Mock;

use super::support::collector::{self, Collector};
use super::support::{Call, Setup, script, stream_request, upstream, whole_request};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
/// What was dropped, as `/metrics` has it.
const DROPPED: &str = "tollgate_telemetry_dropped_total{signal=\"traces\"}";

/// Every call is traced.
fn setup(mocks: &[Mock], collector: SocketAddr) -> Setup {
    sampled(mocks, collector, "sample: 1")
}

fn sampled(mocks: &[Mock], collector: SocketAddr, which: &str) -> Setup {
    let addresses: Vec<SocketAddr> = mocks.iter().map(Mock::address).collect();
    Setup::new(&addresses).with(&format!("telemetry: {{ otlp: \"http://{collector}\", {which} }}"))
}

/// A call whose caller says whether it is sampled.
fn said(sampled: bool) -> Call {
    let flags = u8::from(sampled);
    Call::post(whole_request()).header("traceparent", &format!("00-{TRACE}-00f067aa0ba902b7-{flags:02}"))
}

fn attribute(span: &Span, key: &str) -> String {
    collector::attribute(&span.attributes, key)
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
    let spans = collector.wait_for_spans(3).await;
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
    assert_eq!(gateway.metric(DROPPED).await, 0);
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
    let spans = collector.wait_for_spans(2).await;
    assert!(spans.iter().all(|span| span.trace_id != u128::from_str_radix(TRACE, 16).unwrap().to_be_bytes()));
    assert_eq!(attribute(&spans[0], "tollgate.request_id"), "no-false");
    assert!(spans[0].parent_span_id.is_empty());
}

#[tokio::test]
async fn a_share_is_kept_by_the_ids_of_traces_and_its_callers_word_counts_before_it() {
    let collector = Collector::start().await;
    let mocks = [upstream(script("{}")).await];
    let gateway = sampled(&mocks, collector.address, "sample: \"0.5\"").balance("100").start();
    for _ in 0..40 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
        assert_eq!(said(false).send(gateway.http).await.status, 200);
    }
    // Calls are sent in their order: with this one's spans all are there.
    assert_eq!(said(true).send(gateway.http).await.status, 200);
    let by_caller = |span: &Span| attribute(span, "tollgate.kept_by") == "caller";
    let last = || Some(collector.spans()).filter(|spans| spans.iter().any(by_caller));
    let mut spans = collector.wait_for("the last call", last).await;
    spans.retain(|span| !attribute(span, "tollgate.kept_by").is_empty());
    let (caller, share): (Vec<Span>, Vec<Span>) = spans.into_iter().partition(by_caller);
    assert_eq!(caller.len(), 1, "none of those that are not sampled");
    assert!((1..40).contains(&share.len()), "{} of 40", share.len());
    let half = Share::of_millionths(500_000).unwrap();
    for span in share {
        assert_eq!(attribute(&span, "tollgate.kept_by"), "share");
        let id = u128::from_be_bytes(span.trace_id.try_into().unwrap());
        assert!(half.keeps(TraceId(id.try_into().unwrap())), "{id:032x}");
    }
}

#[tokio::test]
async fn a_call_that_failed_is_kept_whatever_the_share_unless_it_or_its_caller_says_no() {
    let failing = || Call::post(whole_request());
    for (which, first, kept) in [
        ("sample: 0", failing(), true),
        ("sample: 0", said(false), false),
        ("sample: 0, sample_failed: false", failing(), false),
    ] {
        let collector = Collector::start().await;
        let dead = r#"{"fault":{"kind":"status","code":503}}"#;
        let mocks = [upstream(script(dead)).await, upstream(script("{}")).await];
        let gateway = sampled(&mocks, collector.address, which).balance("100").start();
        assert_eq!(first.header("x-request-id", "failed").send(gateway.http).await.status, 200);
        mocks[0].set_script(script("{}"));
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
        // Refused by us, for a fault of its caller's.
        assert_eq!(Call::post("{").send(gateway.http).await.status, 400);
        // Calls are sent in their order: with this one's spans all are there.
        assert_eq!(said(true).header("x-request-id", "last").send(gateway.http).await.status, 200);
        let spans = collector.wait_for_spans(if kept { 5 } else { 2 }).await;
        let told: Vec<[String; 3]> = spans
            .iter()
            .map(|it| {
                ["request_id", "kept_by", "outcome"].map(|key| attribute(it, &format!("tollgate.{key}")))
            })
            .collect();
        let failed = [["failed", "failed", ""], ["", "", "failed"], ["", "", "served"]];
        let last = [["last", "caller", ""], ["", "", "served"]];
        let wanted: Vec<_> = failed.into_iter().filter(|_| kept).chain(last).collect();
        assert_eq!(told, wanted, "{which}");
    }
}

#[tokio::test]
async fn nothing_of_keys_and_prompts_is_in_a_span() {
    let collector = Collector::start().await;
    let mocks = [upstream(script("{}")).await];
    let gateway = setup(&mocks, collector.address).start();
    let prompt = r#"{"model":"gpt-a","messages":[{"role":"user","content":"a-secret-prompt"}]}"#;
    assert_eq!(Call::post(prompt).send(gateway.http).await.status, 200);
    collector.wait_for_spans(2).await;
    let bytes: Vec<u8> = collector.messages().into_iter().flat_map(|message| message.body).collect();
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
    gateway.wait_for_metric_that(DROPPED, |dropped| dropped > 0).await;
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
    collector.wait_for_spans(2).await;
}

#[tokio::test]
async fn a_collector_that_asks_for_time_gets_it_and_loses_nothing_and_one_that_just_refuses_does() {
    let collector = Collector::start().await;
    collector.answer(
        "/v1/traces",
        &["429 Too Many Requests\r\nretry-after: 1", "503 Service Unavailable\r\nretry-after: 1"],
    );
    let mocks = [upstream(script("{}")).await];
    let gateway = setup(&mocks, collector.address).balance("10").start();
    for _ in 0..3 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    }
    let spans = collector.wait_for_spans(6).await;
    assert_eq!((spans.len(), gateway.metric(DROPPED).await), (6, 0), "three calls, each once");
    gateway.wait_for_log("the collector takes spans again");

    collector.answer("/v1/traces", &["503 Service Unavailable"]);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.wait_for_metric(DROPPED, 1).await;
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(collector.wait_for_spans(8).await.len(), 8, "the next is taken");
}
