//! No failure of one upstream reaches a caller while another lives.

use super::support::{Call, Gateway, Setup, script, stream_request, text_of, upstream, whole_request};
use tollgate::mock::{Mock, Script};

async fn two(first: &str) -> (Mock, Mock, Gateway) {
    let first = upstream(script(first)).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    (first, second, gateway)
}

/// Faults that must never reach a caller, as scripts of the first upstream.
const FAULTS: [&str; 20] = [
    r#"{"fault":{"kind":"status","code":408}}"#,
    r#"{"fault":{"kind":"status","code":429,"retry_after":"7"}}"#,
    r#"{"fault":{"kind":"status","code":500}}"#,
    r#"{"fault":{"kind":"status","code":502,"body":"<html>bad gateway</html>"}}"#,
    r#"{"fault":{"kind":"status","code":503}}"#,
    r#"{"fault":{"kind":"status","code":504}}"#,
    r#"{"fault":{"kind":"status","code":529}}"#,
    r#"{"fault":{"kind":"status","code":401,"body":"{\"error\":{\"message\":\"Incorrect API key provided: prov-key-u0\"}}"}}"#,
    r#"{"fault":{"kind":"status","code":402}}"#,
    r#"{"fault":{"kind":"status","code":403,"body":"{\"error\":{\"code\":\"insufficient_quota\"}}"}}"#,
    r#"{"fault":{"kind":"status","code":302}}"#,
    r#"{"fault":{"kind":"hang_before_head"}}"#,
    r#"{"fault":{"kind":"hang_after_head"}}"#,
    r#"{"fault":{"kind":"reset_before_head"}}"#,
    r#"{"fault":{"kind":"close_before_head"}}"#,
    r#"{"fault":{"kind":"reset_after_head"}}"#,
    r#"{"fault":{"kind":"error_event","pieces":0,"body":"{\"error\":{\"message\":\"upstream busy\",\"type\":\"overloaded_error\"}}"}}"#,
    r#"{"fault":{"kind":"empty"}}"#,
    r#"{"fault":{"kind":"html"}}"#,
    r#"{"fault":{"kind":"garbage"}}"#,
];

#[tokio::test]
async fn every_kind_of_failure_before_the_answer_goes_to_the_next_candidate() {
    for fault in FAULTS {
        let (first, second, gateway) = two(fault).await;
        for (request, stream) in [(stream_request(), true), (whole_request(), false)] {
            let before = first.requests().len() + second.requests().len();
            let answer = Call::post(request).send(gateway.http).await;
            assert_eq!(answer.status, 200, "{fault}: {}", answer.text());
            let text = answer.text();
            assert!(!text.contains("error") && !text.contains("busy") && answer.clean, "{fault}: {text}");
            if stream {
                assert_eq!(text_of(&text), "Hello, world!", "{fault}");
            } else {
                assert_eq!(answer.json()["choices"][0]["message"]["content"], "Hello, world!", "{fault}");
            }
            assert_eq!(answer.header("x-tollgate-upstream"), Some("u1/up-a"), "{fault}");
            let tried = first.requests().len() + second.requests().len() - before;
            assert!(tried <= 2, "{fault}: {tried} requests for one call");
        }
        assert_eq!(gateway.spent(2), 150_000, "{fault}: each call is charged once");
        assert!(gateway.ledger_is_right(), "{fault}");
    }
}

#[tokio::test]
async fn a_candidate_that_cannot_be_reached_is_passed_over() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[closed, second.address()]).start();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")));
    gateway.wait_for_log("reason=\"connect\"");
}

#[tokio::test]
async fn two_dead_upstreams_of_three_are_not_noticed() {
    let dead = [
        upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await,
        upstream(script(r#"{"fault":{"kind":"reset_after_head"}}"#)).await,
    ];
    let alive = upstream(Script::default()).await;
    let gateway = Setup::new(&[dead[0].address(), dead[1].address(), alive.address()]).start();
    for _ in 0..6 {
        let answer = Call::post(stream_request()).send(gateway.http).await;
        assert_eq!((answer.status, text_of(&answer.text()).as_str()), (200, "Hello, world!"));
    }
    assert!(dead[0].requests().len() <= 3, "a dead route is soon asked last");
}

#[tokio::test]
async fn a_fault_of_the_request_passes_once_and_unchanged_in_meaning() {
    for status in [400, 404, 409, 413, 415, 422] {
        let body = r#"{\"error\":{\"message\":\"too long, key sk-abcdefghijkl\",\"type\":\"invalid_request_error\",\"param\":\"messages\",\"code\":\"context_length_exceeded\"}}"#;
        let fault = format!(r#"{{"fault":{{"kind":"status","code":{status},"body":"{body}"}}}}"#);
        let (first, second, gateway) = two(&fault).await;
        for request in [stream_request(), whole_request()] {
            let answer = Call::post(request).send(gateway.http).await;
            assert_eq!((answer.status, answer.code().as_str()), (status, "context_length_exceeded"));
            assert_eq!(answer.json()["error"]["param"], "messages");
            assert!(!answer.text().contains("sk-abcdefghijkl"), "credentials are masked");
            assert_eq!(answer.header("x-should-retry"), Some("false"));
        }
        assert_eq!((first.requests().len(), second.requests().len()), (2, 0));
        assert_eq!(gateway.spent(2), 0, "nothing is charged");
    }
}

#[tokio::test]
async fn a_callers_fault_as_first_event_becomes_a_plain_400() {
    let (_first, second, gateway) = two(
        r#"{"fault":{"kind":"error_event","pieces":0,"body":"{\"error\":{\"message\":\"too long\",\"type\":\"invalid_request_error\"}}"}}"#,
    )
    .await;
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("content-type")), (400, Some("application/json")));
    assert_eq!(second.requests().len(), 0);
}

#[tokio::test]
async fn when_everyone_is_busy_the_caller_hears_the_soonest_end() {
    let first = upstream(script(r#"{"fault":{"kind":"status","code":429,"retry_after":"20"}}"#)).await;
    let second = upstream(script(r#"{"fault":{"kind":"status","code":429,"retry_after":"7"}}"#)).await;
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("7")));
    assert_eq!(answer.code(), "rate_limit_exceeded");
    assert_eq!(gateway.spent(1), 0);
}

#[tokio::test]
async fn the_last_failure_gives_the_status() {
    for (fault, status, code) in [
        (r#"{"fault":{"kind":"status","code":500}}"#, 502, "upstream_failed"),
        (r#"{"fault":{"kind":"status","code":302}}"#, 502, "upstream_failed"),
        (r#"{"fault":{"kind":"status","code":401}}"#, 502, "upstream_credential"),
        (r#"{"fault":{"kind":"html"}}"#, 502, "upstream_failed"),
    ] {
        let only = upstream(script(fault)).await;
        let gateway = Setup::new(&[only.address()]).start();
        let answer = Call::post(whole_request()).send(gateway.http).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{fault}");
        assert!(!answer.text().contains("prov-key"));
        assert_eq!(gateway.spent(1), 0);
    }
}

#[tokio::test]
async fn the_only_candidate_has_no_watchdog_but_its_share_of_the_deadline() {
    let slow = upstream(script(r#"{"delay_first_event_ms":900}"#)).await;
    let gateway = Setup::new(&[slow.address()]).start();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!(answer.status, 200, "slower than first_event, yet nobody else could serve");
    let hung = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let gateway = Setup::new(&[hung.address()]).routing("deadline: 900ms").start();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "upstream_timeout"));
}

#[tokio::test]
async fn attempts_are_bounded_and_every_one_leaves_a_decision() {
    let busy = r#"{"fault":{"kind":"status","code":503}}"#;
    let mut upstreams = vec![];
    for _ in 0..7 {
        upstreams.push(upstream(script(busy)).await);
    }
    let addresses: Vec<_> = upstreams.iter().map(Mock::address).collect();
    let gateway = Setup::new(&addresses).start();
    let answer = Call::post(stream_request()).header("x-request-id", "probe-1").send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (502, Some("5")));
    assert_eq!(upstreams.iter().map(|u| u.requests().len()).sum::<usize>(), 5);
    gateway.wait_for_log("INFO access");
    let log = gateway.log();
    let lines: Vec<_> = log.lines().filter(|l| l.contains("decision") && l.contains("probe-1")).collect();
    assert_eq!(lines.len(), 5, "{log}");
    for field in [
        "candidate=",
        "region=",
        "reason=\"status_5xx\"",
        "elapsed_ms=",
        "budget_left_ms=",
        "outcome=",
        "next=",
    ] {
        assert!(lines.iter().all(|line| line.contains(field)), "{field} in {lines:?}");
    }
    assert!(lines[4].contains("next=\"stop\"") && lines[3].contains("next=\"u4/up-a\""));
}

#[tokio::test]
async fn a_failing_route_is_asked_last_and_the_healthy_one_first() {
    let (first, second, gateway) = two(r#"{"fault":{"kind":"status","code":500}}"#).await;
    for _ in 0..10 {
        Call::post(stream_request()).send(gateway.http).await;
    }
    assert!(first.requests().len() <= 3, "weights decay within three failures: {}", first.requests().len());
    assert_eq!(second.requests().len(), 10);
}

#[tokio::test]
async fn a_pooled_connection_that_died_is_repeated_without_penalty() {
    let only = upstream(Script::default()).await;
    let address = only.address();
    let gateway = Setup::new(&[address]).start();
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    // The upstream restarts: its side of the pooled connection is gone.
    only.stop();
    let listener = loop {
        // The old listener may take a moment to let go of its port.
        match tokio::net::TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    let _again = Mock::start(listener, Script::default()).await.unwrap();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("1")));
}

#[tokio::test]
async fn an_operators_rule_says_what_an_error_means() {
    let overloaded = r#"{"fault":{"kind":"status","code":400,"body":"{\"error\":{\"message\":\"The Model is Overloaded\"}}"}}"#;
    let (first, second) = (upstream(script(overloaded)).await, upstream(Script::default()).await);
    let plain = Setup::new(&[first.address(), second.address()]).start();
    assert_eq!(Call::post(whole_request()).send(plain.http).await.status, 400);
    let rules = "classify: [ { status: 400, body_contains: model is overloaded, treat_as: transient } ]";
    let told = Setup::new(&[first.address(), second.address()]).providers(rules).start();
    let answer = Call::post(whole_request()).send(told.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")));
}

#[tokio::test]
async fn a_whole_answer_that_says_nothing_is_none() {
    let empty = r#"{"fault":{"kind":"end_after_pieces","pieces":0}}"#;
    let (first, second) = (upstream(script(empty)).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")), "{}", answer.text());
    assert_eq!(gateway.spent(1), 75_000);
}
