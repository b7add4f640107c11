//! Messages in Anthropic's dialect keep every promise that chat completions do.

use serde_json::{Value, json};
use tollgate::mock::{Mock, Script};

use super::support::{Call, Gateway, KEY, Setup, message_text_of, script, stream_request, upstream};

/// A request for a streamed message.
fn stream() -> String {
    r#"{"model":"claude-a","max_tokens":1024,"stream":true,"messages":[{"role":"user","content":"hi"}]}"#
        .to_owned()
}

/// A request for a whole message.
fn whole() -> String {
    stream().replace("\"stream\":true,", "")
}

/// A call as Anthropic's SDKs make it: no `authorization`, a versioned API.
fn ask(body: impl Into<Vec<u8>>) -> Call {
    Call::post(body)
        .path("/v1/messages")
        .without("authorization")
        .header("x-api-key", KEY)
        .header("anthropic-version", "2023-06-01")
}

/// An upstream of this dialect, from the rest of its script.
async fn claude(json: &str) -> Mock {
    let mut script: Value = serde_json::from_str(json).unwrap();
    script["dialect"] = "anthropic".into();
    upstream(serde_json::from_value(script).unwrap()).await
}

async fn one(json: &str) -> (Mock, Gateway) {
    let only = claude(json).await;
    let gateway = Setup::new(&[only.address()]).dialect("anthropic").providers("idle: 700ms").start();
    (only, gateway)
}

async fn two(first: &str) -> (Mock, Mock, Gateway) {
    let first = claude(first).await;
    let second = claude("{}").await;
    let gateway = Setup::new(&[first.address(), second.address()]).dialect("anthropic").start();
    (first, second, gateway)
}

/// Every error has Anthropic's shape, our code beside its type, and the id of its request.
fn assert_error(answer: &super::support::Answer, status: u16, kind: &str, code: &str) {
    let found = answer.json();
    assert_eq!(
        (answer.status, &found["type"], &found["error"]["type"], &found["error"]["code"]),
        (status, &json!("error"), &json!(kind), &json!(code)),
        "{found}"
    );
    assert!(!found["error"]["message"].as_str().unwrap().is_empty());
    assert_eq!(found["request_id"].as_str(), answer.header("x-request-id"));
    assert_eq!(found["request_id"].as_str(), answer.header("request-id"));
}

const OVERLOADED: &str =
    r#"{\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"secret words\"}}"#;

#[tokio::test]
async fn a_stream_passes_as_it_came_but_for_the_models_name() {
    let (upstream, gateway) = one(r#"{"model":"up-c"}"#).await;
    let answer = ask(stream()).send(gateway.http).await;
    let text = answer.text();
    assert_eq!((answer.status, message_text_of(&text).as_str()), (200, "Hello, world!"));
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let delta = "content_block_delta";
    assert_eq!(
        names,
        [
            "message_start",
            "content_block_start",
            delta,
            delta,
            delta,
            delta,
            "content_block_stop",
            "message_delta",
            "message_stop"
        ],
        "a ping is dropped while the message is held"
    );
    assert!(text.contains(r#""model":"claude-a""#) && !text.contains("up-c"), "{text}");
    assert!(text.contains(r#""usage":{"output_tokens":5}"#), "usage is always there");
    let seen = upstream.requests();
    assert_eq!(seen[0].path, "/v1/messages");
    assert_eq!(String::from_utf8_lossy(&seen[0].body), stream().replace("claude-a", "up-c"));
    // The early output of one token and the last one of five are not added.
    assert_eq!(gateway.spent(1), 10 * 3_000 + 5 * 15_000);
}

#[tokio::test]
async fn any_cutting_of_the_bytes_gives_the_same_message() {
    let (_upstream, gateway) = one("{}").await;
    let expected = ask(stream()).send(gateway.http).await.text();
    for size in [1, 7, 4096] {
        let (_upstream, gateway) = one(&format!(r#"{{"bytes_per_write":{size}}}"#)).await;
        assert_eq!(ask(stream()).send(gateway.http).await.text(), expected, "{size} bytes a write");
        assert_eq!(gateway.spent(1), 105_000);
    }
}

#[tokio::test]
async fn a_whole_message_says_its_cost() {
    let (_upstream, gateway) = one(r#"{"model":"up-c"}"#).await;
    let answer = ask(whole()).send(gateway.http).await;
    let message = answer.json();
    assert_eq!((answer.status, &message["content"][0]["text"]), (200, &json!("Hello, world!")));
    assert_eq!((&message["model"], &message["usage"]["input_tokens"]), (&json!("claude-a"), &json!(10)));
    assert_eq!(answer.header("x-tollgate-cost-nano"), Some("105000"));
    assert_eq!(gateway.spent(1), 105_000);
}

#[tokio::test]
async fn cached_and_written_tokens_are_charged_at_their_prices() {
    let usage = r#"{"usage":{"prompt":6012,"completion":50,"cached":5000,"written":1000,"written_1h":600}}"#;
    let cost = 12 * 3_000 + 5_000 * 300 + 400 * 3_750 + 600 * 6_000 + 50 * 15_000;
    for request in [stream(), whole()] {
        let (_upstream, gateway) = one(usage).await;
        assert_eq!(ask(request).send(gateway.http).await.status, 200);
        assert_eq!(gateway.spent(1), cost);
        let line = &gateway.statement("alpha")[0];
        assert_eq!((line.prompt_tokens, line.completion_tokens, line.estimated), (6_012, 50, false));
    }
}

#[tokio::test]
async fn the_tier_that_served_is_charged_in_both_dialects() {
    let tiers = |base: &str, priority: &str| {
        format!(
            "price: {{ input: \"{base}\", output: \"15\", service_tiers: {{ priority: {{ input: \"{priority}\", output: \"30\" }} }} }}"
        )
    };
    for (served, nano) in [("standard", 10 * 3_000 + 5 * 15_000), ("priority", 10 * 6_000 + 5 * 30_000)] {
        for request in [stream(), whole()] {
            let only = claude(&json!({ "service_tier": served }).to_string()).await;
            let gateway = Setup::new(&[only.address()]).dialect("anthropic").model(&tiers("3", "6")).start();
            assert_eq!(ask(request).send(gateway.http).await.status, 200);
            assert_eq!(gateway.spent(1), nano, "{served}");
        }
    }
    // Priority was asked for, and the standard tier served.
    for (served, nano) in [("default", 105_000), ("priority", 210_000)] {
        let only = upstream(script(&json!({ "service_tier": served }).to_string())).await;
        let gateway = Setup::new(&[only.address()]).model(&tiers("3", "6")).start();
        let asked = stream_request().replace("\"stream\"", "\"service_tier\":\"priority\",\"stream\"");
        assert_eq!(Call::post(asked).send(gateway.http).await.status, 200);
        assert_eq!(gateway.spent(1), nano, "{served}");
    }
}

#[tokio::test]
async fn every_kind_of_failure_before_the_message_goes_to_the_next_candidate() {
    let opened = format!(r#"{{"fault":{{"kind":"error_event","pieces":0,"body":"{OVERLOADED}"}}}}"#);
    let at_once =
        format!(r#"{{"openers":false,"fault":{{"kind":"error_event","pieces":0,"body":"{OVERLOADED}"}}}}"#);
    for fault in [
        opened.as_str(),
        &at_once,
        r#"{"fault":{"kind":"status","code":529}}"#,
        r#"{"fault":{"kind":"status","code":429}}"#,
        r#"{"fault":{"kind":"status","code":500}}"#,
        r#"{"fault":{"kind":"status","code":401}}"#,
        r#"{"fault":{"kind":"status","code":400,"body":"{\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"Your credit balance is too low\"}}"}}"#,
        r#"{"fault":{"kind":"hang_after_head"}}"#,
        r#"{"fault":{"kind":"end_after_pieces","pieces":0}}"#,
        r#"{"fault":{"kind":"html"}}"#,
    ] {
        let (first, second, gateway) = two(fault).await;
        let answer = ask(stream()).send(gateway.http).await;
        let text = answer.text();
        assert_eq!(
            (answer.status, message_text_of(&text).as_str()),
            (200, "Hello, world!"),
            "{fault}: {text}"
        );
        assert_eq!(text.matches("event: message_start").count(), 1, "{fault}");
        assert!(!text.contains("error"), "{fault}: {text}");
        assert_eq!(answer.header("x-tollgate-attempts"), Some("2"), "{fault}");
        assert_eq!((first.requests().len(), second.requests().len()), (1, 1), "{fault}");
        assert_eq!(gateway.spent(1), 105_000, "{fault}");
    }
}

#[tokio::test]
async fn an_overload_after_content_is_said_in_the_stream_and_the_produced_is_charged() {
    let fault = format!(r#"{{"fault":{{"kind":"error_event","pieces":1,"body":"{OVERLOADED}"}}}}"#);
    let (first, second, gateway) = two(&fault).await;
    let answer = ask(stream()).send(gateway.http).await;
    let text = answer.text();
    assert_eq!((answer.status, message_text_of(&text).as_str()), (200, "Hello"), "{text}");
    assert!(answer.clean && !text.contains("message_stop") && !text.contains("secret words"), "{text}");
    let data = text.split("event: error\ndata: ").nth(1).unwrap();
    let error: Value = serde_json::from_str(data.trim()).unwrap();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("overloaded_error")));
    assert_eq!(error["request_id"].as_str(), answer.header("x-request-id"));
    assert_eq!((first.requests().len(), second.requests().len()), (1, 0), "no failover after the commit");
    gateway.wait_until_settled().await;
    // The prompt as it was reported at the start, and "Hello" by our own count.
    assert_eq!(gateway.spent(1), 10 * 3_000 + 2 * 15_000);
    gateway.wait_for_log("reason=\"status_5xx\"");
}

#[tokio::test]
async fn a_message_that_breaks_off_is_charged_the_larger_of_two_counts() {
    // The start says one token, 75 pieces of ten bytes come, then the upstream is gone.
    let words = vec!["word word "; 80];
    let usage = json!({ "prompt": 5_320, "completion": 99, "cached": 5_000, "written": 300 });
    for kind in ["cut_after_pieces", "hang_after_pieces", "end_after_pieces"] {
        let fault = json!({ "kind": kind, "pieces": 75 });
        let (_upstream, gateway) =
            one(&json!({ "text": words, "usage": usage, "fault": fault }).to_string()).await;
        let answer = ask(stream()).send(gateway.http).await;
        let text = answer.text();
        assert!(text.contains("event: error\n") && !text.contains("message_stop"), "{kind}: {text}");
        gateway.wait_until_settled().await;
        let prompt = 20 * 3_000 + 5_000 * 300 + 300 * 3_750;
        assert_eq!(gateway.spent(1), prompt + 188 * 15_000, "{kind}");
        assert!(gateway.statement("alpha")[0].estimated, "{kind}");
    }
}

#[tokio::test]
async fn a_finish_is_an_end_even_without_its_stop() {
    let (_upstream, gateway) = one(r#"{"done":false}"#).await;
    let text = ask(stream()).send(gateway.http).await.text();
    assert!(!text.contains("event: error"), "{text}");
    assert_eq!(gateway.spent(1), 105_000);
    let (_upstream, gateway) = one(r#"{"done":false,"finish":false}"#).await;
    let text = ask(stream()).send(gateway.http).await.text();
    assert!(text.contains("event: error\n"), "{text}");
}

#[tokio::test]
async fn a_caller_that_leaves_pays_the_prompt_with_its_cache_and_what_was_produced() {
    let (upstream, gateway) = one(
        r#"{"usage":{"prompt":5320,"completion":99,"cached":5000,"written":300},"fault":{"kind":"hang_after_pieces","pieces":2}}"#,
    )
    .await;
    let mut caller = ask(stream()).begin(gateway.http).await;
    caller.head().await;
    caller.read_until("\", \"").await;
    caller.reset();
    upstream.wait_for_disconnects(1).await;
    gateway.wait_until_settled().await;
    // "Hello, " is two tokens by our count, more than the one that the start reported.
    assert_eq!(gateway.spent(1), 20 * 3_000 + 5_000 * 300 + 300 * 3_750 + 2 * 15_000);
    assert_eq!(gateway.statement("alpha")[0].prompt_tokens, 5_320);
    gateway.wait_for_log("status=499");
}

#[tokio::test]
async fn the_upstream_gets_our_credential_and_the_callers_version_and_betas() {
    let (upstream, gateway) = one("{}").await;
    let call = || Call::post(whole()).path("/v1/messages").header("x-api-key", "sk-ant-api03-foreign");
    call().send(gateway.http).await;
    call()
        .header("anthropic-version", "2025-01-01")
        .header("anthropic-beta", "one-2025, two-2025")
        .send(gateway.http)
        .await;
    let insane = "x".repeat(2_000);
    call().header("anthropic-version", &insane).header("anthropic-beta", &insane).send(gateway.http).await;
    let seen = upstream.requests();
    let passed: Vec<_> =
        seen.iter().map(|r| (r.header("anthropic-version"), r.header("anthropic-beta"))).collect();
    let default = Some("2023-06-01");
    assert_eq!(passed, [(default, None), (Some("2025-01-01"), Some("one-2025, two-2025")), (default, None)]);
    for request in &seen {
        let raw = format!("{:?}", request.headers);
        assert_eq!(
            (request.header("x-api-key"), request.header("authorization")),
            (Some("prov-key-u0"), None)
        );
        assert!(!raw.contains("foreign") && !raw.contains(KEY), "{raw}");
    }
    assert_eq!(gateway.spent(3), 3 * 105_000, "the valid key decides, wherever it stands");
    let two = ask(whole()).header("authorization", "Bearer sk-test-beta").send(gateway.http).await;
    assert_error(&two, 401, "authentication_error", "invalid_api_key");
}

#[tokio::test]
async fn errors_have_the_shape_of_the_dialect_on_every_path() {
    let (upstream, gateway) = one("{}").await;
    let with = |field: &str| whole().replace("\"messages\"", &format!("{field},\"messages\""));
    for (body, status, kind, code) in [
        (String::new(), 400, "invalid_request_error", "invalid_json"),
        (whole().replace("max_tokens", "x"), 400, "invalid_request_error", "missing_field"),
        (with("\"stream\":1"), 400, "invalid_request_error", "invalid_value"),
        (with("\"model\":\"other\""), 400, "invalid_request_error", "duplicate_field"),
        (whole().replace("claude-a", "nope"), 404, "not_found_error", "model_not_found"),
        (whole().replace("1024", "900000"), 402, "billing_error", "insufficient_balance"),
    ] {
        let answer = ask(body).send(gateway.http).await;
        assert_error(&answer, status, kind, code);
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }
    let poor = ask(whole().replace("1024", "900000")).send(gateway.http).await.text();
    assert!(poor.contains("`max_tokens`") && !poor.contains("max_completion_tokens"), "{poor}");
    let wrong = ask(whole()).header("x-api-key", "sk-unknown").send(gateway.http).await;
    assert_error(&wrong, 401, "authentication_error", "invalid_api_key");
    let forbidden = ask(whole()).header("x-api-key", "sk-test-beta").send(gateway.http).await;
    assert_error(&forbidden, 403, "permission_error", "model_not_allowed");
    let get = Call::get("/v1/messages").send(gateway.http).await;
    assert_error(&get, 405, "invalid_request_error", "method_not_allowed");
    let nothing = ask(whole()).path("/v1/messages/batches").send(gateway.http).await;
    assert_error(&nothing, 404, "not_found_error", "unknown_path");
    let coded = ask("\u{1f}x").header("content-encoding", "gzip").send(gateway.http).await;
    assert_error(&coded, 415, "invalid_request_error", "unsupported_encoding");
    assert!(upstream.requests().is_empty());
    assert_eq!(gateway.account("alpha", 0).calls, 0, "no hold was placed");
}

#[tokio::test]
async fn when_nobody_serves_the_last_failure_gives_the_error() {
    for (fault, status, kind, code) in [
        (r#"{"fault":{"kind":"status","code":529}}"#, 502, "api_error", "upstream_failed"),
        (r#"{"fault":{"kind":"status","code":401}}"#, 502, "api_error", "upstream_credential"),
        (r#"{"fault":{"kind":"status","code":429}}"#, 429, "rate_limit_error", "rate_limit_exceeded"),
        (r#"{"fault":{"kind":"status","code":413}}"#, 413, "request_too_large", "upstream_refused"),
        (
            r#"{"fault":{"kind":"error_event","pieces":0,"body":"{\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"too long\"}}"}}"#,
            400,
            "invalid_request_error",
            "upstream_refused",
        ),
    ] {
        let (_upstream, gateway) = one(fault).await;
        let answer = ask(stream()).send(gateway.http).await;
        assert_error(&answer, status, kind, code);
        assert_eq!(gateway.spent(1), 0, "{fault}");
    }
    let hung = claude(r#"{"fault":{"kind":"hang_before_head"}}"#).await;
    let gateway = Setup::new(&[hung.address()]).dialect("anthropic").routing("deadline: 600ms").start();
    let answer = ask(stream()).send(gateway.http).await;
    assert_error(&answer, 504, "timeout_error", "upstream_timeout");
}

#[tokio::test]
async fn a_model_is_served_only_in_the_dialects_of_its_routes() {
    let (claude, gateway) = one("{}").await;
    let crossed = Call::post(stream_request().replace("gpt-a", "claude-a")).send(gateway.http).await;
    assert_eq!((crossed.status, crossed.code().as_str()), (404, "model_not_found"));
    assert!(crossed.text().contains("/v1/chat/completions"), "{}", crossed.text());
    assert!(claude.requests().is_empty());
    let openai = upstream(Script::default()).await;
    let gateway = Setup::new(&[openai.address()]).start();
    let crossed = ask(stream().replace("claude-a", "gpt-a")).send(gateway.http).await;
    assert_error(&crossed, 404, "not_found_error", "model_not_found");
    assert!(crossed.text().contains("/v1/messages"), "{}", crossed.text());
    assert!(openai.requests().is_empty());
}

#[tokio::test]
async fn a_model_of_both_dialects_sends_each_caller_to_its_own() {
    let claude = claude("{}").await;
    let openai = upstream(script("{}")).await;
    let setup = Setup::new(&[claude.address(), openai.address()]).dialect("anthropic");
    let gateway = setup.mixed().start();
    for _ in 0..3 {
        assert_eq!(ask(stream()).send(gateway.http).await.status, 200);
        let chat = Call::post(stream_request().replace("gpt-a", "claude-a"));
        assert_eq!(chat.send(gateway.http).await.status, 200);
    }
    assert!(claude.requests().iter().all(|seen| seen.path == "/v1/messages"));
    assert!(openai.requests().iter().all(|seen| seen.path == "/v1/chat/completions"));
    assert_eq!((claude.requests().len(), openai.requests().len()), (3, 3));
}

#[tokio::test]
async fn models_are_listed_in_the_shape_of_the_dialect() {
    let (_upstream, gateway) = one("{}").await;
    let versioned = |path: &str| Call::get(path).header("anthropic-version", "2023-06-01");
    let list = versioned("/v1/models").send(gateway.http).await.json();
    assert_eq!((&list["data"][0]["id"], &list["data"][0]["type"]), (&json!("claude-a"), &json!("model")));
    assert_eq!((&list["has_more"], &list["first_id"]), (&json!(false), &json!("claude-a")));
    let card = versioned("/v1/models/claude-a").send(gateway.http).await.json();
    assert_eq!(card["display_name"], "claude-a");
    let missing = versioned("/v1/models/nope").send(gateway.http).await;
    assert_error(&missing, 404, "not_found_error", "model_not_found");
    let chat = Call::get("/v1/models").send(gateway.http).await.json();
    assert_eq!(chat["data"], json!([]), "nothing here speaks the other dialect");
}
