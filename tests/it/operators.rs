//! Operators: accounts, money and keys, beside a running gateway and without one.

use super::support::{Call, Gateway, Setup, script, stream_request, upstream, whole_request};
use serde_json::Value;
use tollgate::mock::{Mock, Script};

async fn running() -> (Mock, Gateway) {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    (only, gateway)
}

fn json(gateway: &Gateway, args: &[&str]) -> Value {
    serde_json::from_str(&gateway.command(args)).unwrap()
}

#[tokio::test]
async fn a_new_account_with_a_new_key_is_served_at_once() {
    let (_upstream, gateway) = running().await;
    gateway.command(&["accounts", "create", "gamma", "--rpm", "100"]);
    let made = json(&gateway, &["keys", "create", "gamma", "--name", "ci", "--json"]);
    let key = format!("Bearer {}", made["key"].as_str().unwrap());
    let call = || Call::post(whole_request()).header("authorization", &key);
    assert_eq!(call().send(gateway.http).await.status, 402, "no money yet");
    let top_up = ["accounts", "top-up", "gamma", "0.5", "--reference", "invoice-1"];
    assert!(gateway.command(&top_up).contains("Booked."));
    assert!(gateway.command(&top_up).contains("already"), "once per reference");
    assert_eq!(call().send(gateway.http).await.status, 200);
    assert_eq!(gateway.account("gamma", 1).balance_nano, 500_000_000 - 75_000);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_revoked_key_is_dead_at_once_and_a_rotated_one_overlaps() {
    let (_upstream, gateway) = running().await;
    let made = json(&gateway, &["keys", "create", "alpha", "--json"]);
    let first = made["key"].as_str().unwrap().to_owned();
    let rotated = json(&gateway, &["keys", "rotate", &first, "--overlap", "1h", "--json"]);
    let second = rotated["key"].as_str().unwrap().to_owned();
    let status = async |key: &str| {
        let call = Call::get("/v1/models").header("authorization", &format!("Bearer {key}"));
        call.send(gateway.http).await.status
    };
    assert_eq!((status(&first).await, status(&second).await), (200, 200));
    let list = json(&gateway, &["keys", "list", "alpha", "--json"]);
    assert!(!list.to_string().contains(&first), "keys are shown once");
    gateway.command(&["keys", "revoke", &second]);
    assert_eq!((status(&first).await, status(&second).await), (200, 401));
    let ended = json(&gateway, &["keys", "rotate", &first, "--overlap", "0s", "--json"]);
    assert_eq!((status(&first).await, status(ended["key"].as_str().unwrap()).await), (401, 200));
}

#[tokio::test]
async fn a_reference_that_was_used_for_something_else_is_refused_and_moves_nothing() {
    let (_upstream, gateway) = running().await;
    gateway.command(&["accounts", "create", "gamma"]);
    gateway.command(&["accounts", "top-up", "gamma", "1", "--reference", "invoice-1"]);
    gateway.command(&["accounts", "refund", "gamma", "0.25", "--reference", "ticket-1"]);
    for args in [
        ["accounts", "top-up", "alpha", "1", "--reference", "invoice-1"],
        ["accounts", "top-up", "gamma", "2", "--reference", "invoice-1"],
        ["accounts", "refund", "gamma", "0.5", "--reference", "ticket-1"],
    ] {
        let refused = gateway.try_command(&args).unwrap_err();
        assert!(refused.contains("was used for another account or amount already"), "{args:?}: {refused}");
    }
    assert_eq!(gateway.account("gamma", 0).balance_nano, 750_000_000);
    gateway.command(&["accounts", "refund", "gamma", "0.75", "--reference", "ticket-2"]);
    assert_eq!(
        gateway.account("gamma", 0).balance_nano,
        0,
        "what was refused is still there to be given back"
    );
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn the_numbers_of_a_statement_stand_in_columns() {
    let (_upstream, gateway) = running().await;
    Call::post(whole_request()).send(gateway.http).await;
    gateway.account("alpha", 1);
    let text = gateway.command(&["accounts", "statement", "alpha"]);
    let mut lines = text.lines();
    let (head, call) = (lines.next().unwrap(), lines.next().unwrap());
    for (title, number) in [(" PROMPT", "10"), (" OUTPUT", "5")] {
        let end = head.find(title).unwrap() + title.len();
        assert!(call.get(..end).unwrap().ends_with(&format!(" {number}")), "{title} in\n{text}");
    }
}

#[tokio::test]
async fn money_that_is_set_aside_cannot_be_given_back() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let gateway = Setup::new(&[only.address()]).balance("0.02").start();
    let request = stream_request().replace("\"stream\"", "\"max_tokens\":1000,\"stream\"");
    let caller = Call::post(request).begin(gateway.http).await;
    only.wait_for_requests(1).await;
    let refused = gateway.try_command(&["accounts", "refund", "alpha", "0.02", "--reference", "r1"]);
    assert!(refused.unwrap_err().contains("is free"));
    gateway.command(&["accounts", "refund", "alpha", "0.005", "--reference", "r1"]);
    caller.reset();
    gateway.wait_until_settled().await;
    assert_eq!(gateway.account("alpha", 1).balance_nano, 15_000_000);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn the_books_need_the_token_of_the_data_folder() {
    let (_upstream, gateway) = running().await;
    let verb = r#"{"verb":"accounts","name":null}"#;
    let ask = |token: &str| {
        let call = Call::post(verb).path("/books").header("authorization", &format!("Bearer {token}"));
        call.send(gateway.admin)
    };
    assert_eq!(ask("guess").await.status, 401);
    let file = gateway.folder().join("data/admin.token");
    let token = std::fs::read_to_string(&file).unwrap();
    assert_eq!(ask(&token).await.status, 200);
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn without_a_running_gateway_the_file_is_changed_itself() {
    let (_upstream, mut gateway) = running().await;
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    gateway.command(&["accounts", "top-up", "alpha", "1", "--reference", "offline"]);
    gateway.command(&["accounts", "debit", "alpha", "0.25", "--reference", "fix", "--reason", "typo"]);
    assert_eq!(gateway.account("alpha", 0).balance_nano, 1_750_000_000);
    assert!(gateway.command(&["accounts", "statement", "alpha"]).contains("typo"));
    assert!(gateway.command(&["ledger", "verify"]).contains("The books are right"));
    let bad = gateway.try_command(&["accounts", "top-up", "nobody", "1", "--reference", "x"]);
    assert!(bad.unwrap_err().contains("there is no account `nobody`"));
}

#[tokio::test]
async fn a_caller_sees_their_credits_and_their_calls() {
    let (_upstream, gateway) = running().await;
    Call::post(whole_request()).header("x-request-id", "my-call").send(gateway.http).await;
    let found = Call::get("/v1/generation?id=my-call").send(gateway.http).await.json();
    assert_eq!(found["data"]["cost_nano"], 75_000);
    assert_eq!((&found["data"]["upstream"], &found["data"]["attempts"]), (&"u0/up-a".into(), &1.into()));
    let by_id = format!("/v1/generation?id={}", found["data"]["id"].as_str().unwrap());
    assert_eq!(Call::get(&by_id).send(gateway.http).await.json(), found);
    let escaped = Call::get("/v1/generation?id=my%2Dcall").send(gateway.http).await.json();
    assert_eq!(escaped, found, "as clients escape it");
    let credits = Call::get("/v1/credits").send(gateway.http).await.json();
    assert_eq!(credits["data"]["balance_nano"], 999_925_000);
    assert_eq!(credits["data"]["total_credits"], 1.0);
    let other = Call::get("/v1/generation?id=my-call").header("authorization", "Bearer sk-test-beta");
    let refused = other.send(gateway.http).await;
    assert_eq!((refused.status, refused.code().as_str()), (404, "generation_not_found"));
}

#[tokio::test]
async fn explain_says_who_would_be_asked_and_what_would_be_held() {
    let limited = r#"{"fault":{"kind":"status","code":429,"retry_after":"60"}}"#;
    let (first, second) = (upstream(script(limited)).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    std::fs::write(gateway.folder().join("request.json"), stream_request()).unwrap();
    let text = gateway.command(&["explain", "request.json", "--default-output-tokens", "1000"]);
    let place = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part} in\n{text}"));
    assert!(place("gpt-a via u1/up-a") < place("gpt-a via u0/up-a: "), "who rests stands last:\n{text}");
    assert!(text.contains("rests for ") && text.contains("its rate limit"), "{text}");
    assert!(text.contains("output  1000 tokens x 10000000 pico-dollars"), "{text}");
    assert_eq!((first.requests().len(), second.requests().len()), (1, 1), "nothing is sent");
    let flags = ["explain", "--model", "gpt-a", "--stream", "--max-tokens", "500", "--prompt-bytes", "100"];
    let sketched = gateway.command(&flags);
    assert!(sketched.contains("output  500 tokens x 10000000 pico-dollars"), "{sketched}");
    let wrong = gateway.try_command(&["explain", "tollgate.yaml"]).unwrap_err();
    assert!(wrong.contains("cannot be read"), "{wrong}");
}
