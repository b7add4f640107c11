//! Errors take the caller's dialect, name the field and the way out, and cost nothing.

use filters::dialect::anthropic;
use filters::verdict::Reason;

use super::support::{Call, Setup, stream_request, upstream, whole_request};
use tollgate::mock::Script;

#[tokio::test]
async fn bad_requests_are_refused_before_anything_is_held_or_sent() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let with = |field: &str| whole_request().replace("\"messages\"", &format!("{field},\"messages\""));
    let deep = format!(r#"{{"model":"gpt-a","messages":[],"x":{}}}"#, "[".repeat(100_000));
    for (body, status, code) in [
        (String::new(), 400, "invalid_json"),
        ("[]".to_owned(), 400, "invalid_json"),
        ("{\"model\":\"gpt-a\"} }".to_owned(), 400, "invalid_json"),
        (deep, 400, "invalid_json"),
        ("{}".to_owned(), 400, "missing_field"),
        (with("\"n\":-1"), 400, "invalid_value"),
        (with("\"max_tokens\":1e30"), 400, "invalid_value"),
        (with("\"stream\":1"), 400, "invalid_value"),
        (with("\"model\":\"other\""), 400, "duplicate_field"),
        (whole_request().replace("gpt-a", " gpt-a "), 404, "model_not_found"),
        (whole_request().replace("gpt-a", "GPT-A"), 404, "model_not_found"),
    ] {
        let answer = Call::post(body.clone()).send(gateway.http).await;
        let start: String = body.chars().take(80).collect();
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{start}");
        let error = &answer.json()["error"];
        assert!(!error["message"].as_str().unwrap().is_empty() && error.get("param").is_some(), "{start}");
        assert_eq!(answer.header("x-should-retry"), Some("false"), "{start}");
        assert!(answer.header("x-request-id").is_some());
    }
    for (call, status) in [
        (Call::post(stream_request()).path("/v1/nothing"), 404),
        (Call::get("/v1/chat/completions"), 405),
        (Call::post("").path("/v1/models"), 405),
    ] {
        let answer = call.send(gateway.http).await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.header("allow").is_some(), status == 405);
    }
    assert!(only.requests().is_empty());
    assert_eq!(gateway.account("alpha", 0).calls, 0, "no hold was placed");
}

#[tokio::test]
async fn an_empty_purse_is_told_what_is_needed_and_what_is_there() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).balance("0.001").start();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (402, "insufficient_balance"));
    assert!(
        answer.text().contains("$0.001") && answer.text().contains("max_completion_tokens"),
        "{}",
        answer.text()
    );
    assert!(only.requests().is_empty());
    let small = stream_request().replace("\"stream\"", "\"max_tokens\":10,\"stream\"");
    assert_eq!(Call::post(small).send(gateway.http).await.status, 200, "what fits is served");
}

/// The table in the docs is the enum in the code.
#[test]
fn the_docs_list_every_error() {
    let docs = include_str!("../../docs/errors.md");
    for reason in Reason::ALL {
        let kind = anthropic::error::kind(reason);
        let row = format!("| {} | `{}` | `{kind}` |", reason.status(), reason.code());
        assert!(docs.contains(&row), "docs/errors.md lacks a row that begins with {row}");
    }
    let rows = docs.lines().filter(|line| line.starts_with("| ") && line.contains("` |")).count();
    assert_eq!(rows, Reason::ALL.len(), "docs/errors.md has rows for errors that are none");
}
