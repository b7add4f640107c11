//! A request's body reaches every candidate whole, whatever its size and framing.

use super::support::{Call, Gateway, KEY, Setup, script, upstream};
use tollgate::mock::{Mock, Script};

async fn failing_over() -> (Mock, Mock, Gateway) {
    let first = upstream(script(r#"{"fault":{"kind":"status","code":500}}"#)).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[first.address(), second.address()]).balance("1000.00").start();
    (first, second, gateway)
}

/// A request of about `bytes`, with text that would show any cut, shift or repetition.
fn large_request(bytes: usize) -> String {
    let words: String = (0..bytes / 8).map(|n| format!("{n:07} ")).collect();
    format!(
        r#"{{"model":"gpt-a","max_tokens":5,"messages":[{{"role":"user","content":"{words}"}}],"x":1.50}}"#
    )
}

#[tokio::test]
async fn bodies_of_every_size_reach_the_second_candidate_equal_but_for_the_edits() {
    for bytes in [0, 60 << 10, (64 << 10) + 1, 300 << 10, 20 << 20] {
        for chunked in [false, true] {
            let (first, second, gateway) = failing_over().await;
            let request = large_request(bytes);
            let call = Call::post(request.clone());
            let call = if chunked { call.chunked() } else { call };
            let answer = call.send(gateway.http).await;
            assert_eq!(answer.status, 200, "{bytes} chunked={chunked}: {}", answer.text());
            // The one edit: the upstream's own name of the model.
            let expected = request.replace("\"gpt-a\"", "\"up-a\"");
            for upstream in [&first, &second] {
                let seen = upstream.requests();
                assert_eq!(seen.len(), 1);
                assert!(seen[0].body == expected.as_bytes(), "{bytes} chunked={chunked}: the body changed");
                assert_eq!(seen[0].header("content-length"), Some(expected.len().to_string().as_str()));
                assert_eq!(seen[0].header("transfer-encoding"), None);
            }
        }
    }
}

#[tokio::test]
async fn the_memory_of_a_body_is_given_back_at_the_commit() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_after_pieces","pieces":1}}"#)).await;
    let gateway = Setup::new(&[only.address()]).balance("1000.00").start();
    let request = large_request(2 << 20).replace("\"max_tokens\"", "\"stream\":true,\"max_tokens\"");
    let mut caller = Call::post(request).begin(gateway.http).await;
    caller.head().await;
    caller.read_until("Hello").await;
    gateway.wait_for_metric("tollgate_request_body_bytes", 0).await;
    assert_eq!(gateway.metric("tollgate_holds_open").await, 1, "the stream is still open");
}

#[tokio::test]
async fn a_body_above_the_bound_is_a_readable_413() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).with("bounds: { body_max: 100KiB }").start();
    for chunked in [false, true] {
        let call = Call::post(large_request(3 << 20));
        let call = if chunked { call.chunked() } else { call };
        let answer = call.send(gateway.http).await;
        assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"), "chunked={chunked}");
    }
    assert!(only.requests().is_empty());
    gateway.wait_for_metric("tollgate_request_body_bytes", 0).await;
}

#[tokio::test]
async fn all_bodies_together_are_bounded() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let gateway = Setup::new(&[only.address()])
        .balance("1000.00")
        .with("bounds: { body_max: 1MiB, bodies_bytes_max: 1536KiB }")
        .start();
    let first = Call::post(large_request(900 << 10)).begin(gateway.http).await;
    only.wait_for_requests(1).await;
    let refused = Call::post(large_request(900 << 10)).send(gateway.http).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "overloaded"));
    assert!(refused.header("retry-after").is_some());
    first.reset();
    gateway.wait_for_metric("tollgate_request_body_bytes", 0).await;
}

#[tokio::test]
async fn a_caller_that_waits_for_100_continue_gets_it_and_only_with_a_good_key() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let body = large_request(0);
    let head = |key: &str| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {key}\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
    };
    let mut caller = super::support::Caller::connect(gateway.http).await;
    caller.send_raw(head(KEY).as_bytes()).await;
    caller.read_interim(100).await;
    caller.send_raw(body.as_bytes()).await;
    assert_eq!(caller.next_answer().await.status, 200);

    let mut stranger = super::support::Caller::connect(gateway.http).await;
    stranger.send_raw(head("sk-unknown-key").as_bytes()).await;
    let answer = stranger.next_answer().await;
    assert_eq!((answer.status, answer.interim), (401, 0), "no 100 for a stranger");
}

#[tokio::test]
async fn a_coded_body_is_refused_by_name() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let answer = Call::post("\u{1f}x").header("content-encoding", "gzip").send(gateway.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (415, "unsupported_encoding"));
}
