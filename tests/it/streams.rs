//! Streams are live, end cleanly, and stop when nobody listens.

use std::time::{Duration, Instant};

use super::support::{Call, Gateway, Setup, script, stream_request, text_of, upstream, whole_request};
use tollgate::mock::{Mock, Script};

async fn one(json: &str) -> (Mock, Gateway) {
    let only = upstream(script(json)).await;
    let gateway = Setup::new(&[only.address()]).providers("idle: 700ms").start();
    (only, gateway)
}

#[tokio::test]
async fn each_event_reaches_the_caller_before_the_next_is_produced() {
    let (upstream, gateway) = one(r#"{"text":["a","b","c","d","e"],"delay_chunk_ms":60}"#).await;
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!(text_of(&answer.text()), "abcde");
    let sent = upstream.requests()[0].sent.clone();
    // Writes: head, role, a … e, finish, end. A piece must be here before the one behind it was sent.
    for (index, letter) in ["a", "b", "c", "d"].iter().enumerate() {
        let (came, _) = answer
            .pieces
            .iter()
            .find(|(_, piece)| String::from_utf8_lossy(piece).contains(&format!("\"content\":\"{letter}\"")))
            .unwrap();
        let next = sent[index + 3];
        assert!(*came < next, "`{letter}` came {:?} after the next was sent", came.duration_since(next));
    }
}

#[tokio::test]
async fn the_stream_is_said_to_be_one() {
    let (_upstream, gateway) = one("{}").await;
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    assert_eq!(answer.header("cache-control"), Some("no-cache"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    assert_eq!(answer.header("content-length"), None);
}

#[tokio::test]
async fn usage_is_asked_upstream_and_shown_only_to_those_who_asked() {
    let (upstream, gateway) = one("{}").await;
    let plain = Call::post(stream_request()).send(gateway.http).await.text();
    assert!(!plain.contains("usage") && !plain.contains("\"choices\":[]"), "{plain}");
    assert!(plain.ends_with("data: [DONE]\n\n"));
    let asked = stream_request()
        .replace("\"stream\":true", "\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    let shown = Call::post(asked).send(gateway.http).await.text();
    assert!(shown.contains("\"total_tokens\":15"), "{shown}");
    for seen in upstream.requests() {
        let body: serde_json::Value = serde_json::from_slice(&seen.body).unwrap();
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert_eq!(body["max_completion_tokens"], 1000, "our bound is written upstream");
    }
    assert_eq!(gateway.spent(2), 150_000);
}

#[tokio::test]
async fn any_cutting_of_the_bytes_gives_the_same_answer() {
    let (_upstream, whole) = one("{}").await;
    let expected = Call::post(stream_request()).send(whole.http).await.text();
    for size in [1, 7, 4096] {
        let (_upstream, gateway) = one(&format!(r#"{{"bytes_per_write":{size}}}"#)).await;
        let answer = Call::post(stream_request()).send(gateway.http).await;
        assert_eq!(answer.text(), expected, "{size} bytes a write");
        assert_eq!(gateway.spent(1), 75_000);
    }
}

#[tokio::test]
async fn an_upstream_that_breaks_off_ends_the_stream_with_an_error_event() {
    for fault in [
        r#"{"fault":{"kind":"reset_after_pieces","pieces":2}}"#,
        r#"{"fault":{"kind":"cut_after_pieces","pieces":2}}"#,
        r#"{"fault":{"kind":"end_after_pieces","pieces":2}}"#,
        r#"{"fault":{"kind":"hang_after_pieces","pieces":2}}"#,
        r#"{"fault":{"kind":"error_event","pieces":2,"body":"{\"error\":{\"message\":\"secret words\"}}"}}"#,
    ] {
        let (upstream, gateway) = one(fault).await;
        let answer = Call::post(stream_request()).send(gateway.http).await;
        let text = answer.text();
        assert_eq!((answer.status, text_of(&text).as_str()), (200, "Hello, "), "{fault}: {text}");
        assert!(answer.clean, "{fault}: the body ends as its framing says");
        assert!(text.contains("\"error\"") && !text.contains("[DONE]"), "{fault}: {text}");
        assert!(!text.contains("secret words"), "{fault}");
        for event in text.split("\n\n").filter(|e| !e.is_empty()) {
            let data = event.trim_start_matches("data: ");
            assert!(serde_json::from_str::<serde_json::Value>(data).is_ok(), "{fault}: {event}");
        }
        assert_eq!(upstream.requests().len(), 1, "{fault}: no failover after the commit");
        gateway.wait_until_settled().await;
        // Prompt "hi" (1 + 4 tokens by our count) and "Hello, " (2 tokens).
        assert_eq!(gateway.spent(1), 5 * 2_500 + 2 * 10_000, "{fault}: what was produced is charged");
        assert!(gateway.statement("alpha")[0].estimated);
    }
}

#[tokio::test]
async fn a_whole_answer_that_breaks_off_late_breaks_the_connection() {
    let text = "x".repeat(300 << 10);
    let (_upstream, gateway) =
        one(&format!(r#"{{"text":["{text}","{text}"],"fault":{{"kind":"cut_after_pieces","pieces":1}}}}"#))
            .await;
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert!(!answer.clean, "a caller must not take half an answer for a whole one");
    gateway.wait_until_settled().await;
}

#[tokio::test]
async fn a_long_whole_answer_passes_and_is_charged_by_its_usage() {
    let text = "word ".repeat(60 << 10);
    let (_upstream, gateway) = one(&format!(r#"{{"text":["{text}"]}}"#)).await;
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.clean), (200, true));
    assert_eq!(answer.json()["choices"][0]["message"]["content"], text);
    assert_eq!(answer.json()["model"], "gpt-a");
    assert_eq!(gateway.spent(1), 75_000);
}

#[tokio::test]
async fn a_whole_answer_says_its_cost() {
    let (_upstream, gateway) = one("{}").await;
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!(answer.header("x-tollgate-cost-nano"), Some("75000"));
    assert_eq!(answer.json()["usage"]["total_tokens"], 15, "a whole answer keeps its usage");
}

#[tokio::test]
async fn a_caller_that_leaves_stops_the_upstream_and_pays_for_what_was_produced() {
    for reset in [true, false] {
        let (upstream, gateway) = one(r#"{"fault":{"kind":"hang_after_pieces","pieces":2}}"#).await;
        let mut caller = Call::post(stream_request()).begin(gateway.http).await;
        caller.head().await;
        caller.read_until(", ").await;
        let left = Instant::now();
        if reset {
            caller.reset();
        } else {
            drop(caller);
        }
        upstream.wait_for_disconnects(1).await;
        // The upstream's own idle limit is 700 ms: it was the caller's leaving that stopped it.
        println!("upstream stopped {:?} after the caller left", left.elapsed());
        gateway.wait_until_settled().await;
        assert_eq!(gateway.spent(1), 5 * 2_500 + 2 * 10_000);
        gateway.wait_for_log("status=499");
        gateway.wait_for_metric("tollgate_in_flight", 0).await;
    }
}

#[tokio::test]
async fn a_caller_that_leaves_before_the_answer_pays_nothing() {
    let (upstream, gateway) = one(r#"{"fault":{"kind":"hang_after_head"}}"#).await;
    let caller = Call::post(stream_request()).begin(gateway.http).await;
    upstream.wait_for_requests(1).await;
    caller.reset();
    upstream.wait_for_disconnects(1).await;
    gateway.wait_until_settled().await;
    assert_eq!(gateway.spent(1), 0);
}

#[tokio::test]
async fn silence_is_answered_by_the_next_candidate_at_once() {
    let silent = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[silent.address(), second.address()])
        .providers("first_byte: 100ms, first_event: 5s")
        .start();
    let mut added = vec![];
    for _ in 0..3 {
        let began = Instant::now();
        let mut caller = Call::post(stream_request()).begin(gateway.http).await;
        assert_eq!(caller.head().await.status, 200);
        added.push(began.elapsed().saturating_sub(Duration::from_millis(100)));
        caller.read_until("[DONE]").await;
    }
    // Reported, not asserted: the machine is shared. The first call is the one that failed over.
    println!("the next candidate's first byte came {:?} after first_byte (100 ms) ran out", added[0]);
    assert_eq!(silent.requests().len() + second.requests().len(), 3 + silent.requests().len());
}

#[tokio::test]
async fn a_late_answer_of_an_abandoned_attempt_reaches_nobody() {
    let late = upstream(script(r#"{"text":["LATE"],"delay_head_ms":500}"#)).await;
    let second = upstream(script(r#"{"delay_chunk_ms":150}"#)).await;
    let gateway = Setup::new(&[late.address(), second.address()]).start();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!(text_of(&answer.text()), "Hello, world!");
    assert!(!answer.text().contains("LATE"));
    assert_eq!(gateway.spent(1), 75_000);
}

#[tokio::test]
async fn a_slow_body_is_not_mistaken_for_a_silent_upstream() {
    // 8 MiB take longer to be sent than `first_byte` allows for the answer.
    let first = upstream(Script::default()).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[first.address(), second.address()])
        .providers("first_byte: 40ms, first_event: 5s")
        .balance("1000.00")
        .start();
    let words = "word ".repeat((8 << 20) / 5);
    let request =
        format!(r#"{{"model":"gpt-a","max_tokens":5,"messages":[{{"role":"user","content":"{words}"}}]}}"#);
    let answer = Call::post(request).send(gateway.http).await;
    assert_eq!(answer.status, 200);
}
