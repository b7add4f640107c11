//! What callers want of the routing happens, and nothing that they did not ask for.

use serde_json::{Value, json};
use tollgate::mock::{Mock, Script};

use super::support::{Answer, Call, Gateway, Setup, script, upstream, whole_request};

const DEAD: &str = r#"{"fault":{"kind":"status","code":503}}"#;

/// A whole call of `model` with further fields.
fn asking(model: &str, more: &Value) -> Call {
    let mut body = json!({ "model": model, "messages": [{ "role": "user", "content": "hi" }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Call::post(body.to_string())
}

async fn ask(gateway: &Gateway, model: &str, more: &Value) -> Answer {
    asking(model, more).send(gateway.http).await
}

/// `gpt-a` at u0 and u1, `gpt-b` at u2.
async fn two_models(setup: impl FnOnce(Setup) -> Setup) -> (Gateway, [Mock; 3]) {
    let mocks =
        [upstream(script(DEAD)).await, upstream(script(DEAD)).await, upstream(Script::default()).await];
    let addresses = mocks.each_ref().map(Mock::address);
    (setup(Setup::new(&addresses).other_model("sort: weight")).start(), mocks)
}

#[tokio::test]
async fn a_model_that_the_caller_accepts_serves_when_the_asked_one_cannot_and_is_what_is_charged() {
    let (gateway, mocks) = two_models(|setup| setup).await;
    let answer =
        ask(&gateway, "gpt-a", &json!({ "models": ["gpt-b"], "provider": {}, "max_tokens": 7 })).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let said: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(said["model"], "gpt-b", "the answer says who served");
    assert_eq!(answer.header("x-tollgate-attempts"), Some("3"));
    let seen: Value = serde_json::from_slice(&mocks[2].requests()[0].body).unwrap();
    assert_eq!(seen["model"], "up-b");
    assert!(seen.get("models").is_none() && seen.get("provider").is_none(), "{seen}");
    let (input, output) = (&said["usage"]["prompt_tokens"], &said["usage"]["completion_tokens"]);
    let cost = input.as_i64().unwrap() * 5_000 + output.as_i64().unwrap() * 20_000;
    assert_eq!(gateway.spent(1), cost, "at the price of the model that served");
    let generation = Call::get("/v1/credits").send(gateway.http).await;
    assert_eq!(generation.status, 200);
    let line = gateway.statement("alpha").into_iter().find(|line| line.model == "gpt-b");
    assert!(line.is_some(), "the books name it");
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_model_that_the_caller_did_not_name_is_never_used() {
    let (gateway, mocks) = two_models(|setup| setup).await;
    let answer = ask(&gateway, "gpt-a", &json!({})).await;
    assert_eq!(answer.status, 502);
    assert!(mocks[2].requests().is_empty());
    assert_eq!(gateway.spent(1), 0);
}

#[tokio::test]
async fn the_hold_is_for_the_dearest_model_that_may_serve() {
    // 1000 output tokens cost 0.01 USD as gpt-a and 0.02 as gpt-b.
    let (gateway, _mocks) = two_models(|setup| setup.balance("0.015")).await;
    let both = ask(&gateway, "gpt-a", &json!({ "models": ["gpt-b"], "max_tokens": 1000 })).await;
    assert_eq!((both.status, both.code().as_str()), (402, "insufficient_balance"));
    let one = ask(&gateway, "gpt-a", &json!({ "max_tokens": 1000 })).await;
    assert_eq!(one.status, 502, "gpt-a alone is affordable, and down");
}

#[tokio::test]
async fn every_named_model_has_to_be_there_and_allowed() {
    let (gateway, mocks) = two_models(|setup| setup.key("models: [ gpt-a ]")).await;
    let unknown = ask(&gateway, "gpt-a", &json!({ "models": ["gpt-z"] })).await;
    assert_eq!((unknown.status, unknown.code().as_str()), (404, "model_not_found"));
    assert!(unknown.text().contains("\"param\":\"models\""), "{}", unknown.text());
    let forbidden = ask(&gateway, "gpt-a", &json!({ "models": ["gpt-b"] })).await;
    assert_eq!(forbidden.status, 403);
    assert!(mocks.iter().all(|mock| mock.requests().is_empty()));
}

#[tokio::test]
async fn a_limit_of_a_model_counts_for_those_who_get_there_by_another_name() {
    let limits = "model_limits: { gpt-b: { rpm: 1 } }";
    let (gateway, _mocks) = two_models(|setup| setup.account(limits)).await;
    let fallback = json!({ "models": ["gpt-b"] });
    assert_eq!(ask(&gateway, "gpt-a", &fallback).await.status, 200);
    assert_eq!(ask(&gateway, "gpt-b", &json!({})).await.status, 429);
    assert_eq!(ask(&gateway, "gpt-a", &fallback).await.status, 429);
}

#[tokio::test]
async fn providers_are_taken_left_out_and_put_in_order_as_the_caller_says() {
    let mocks = [
        upstream(Script::default()).await,
        upstream(Script::default()).await,
        upstream(Script::default()).await,
    ];
    let gateway = Setup::new(&mocks.each_ref().map(Mock::address)).start();
    for (provider, expected) in [
        (json!({}), "u0/up-a"),
        (json!({ "order": ["u2", "u1"] }), "u2/up-a"),
        (json!({ "only": ["U1"] }), "u1/up-a"),
        (json!({ "ignore": ["u0"] }), "u1/up-a"),
        (json!({ "ignore": ["u0", "u1"], "sort": "price" }), "u2/up-a"),
        (json!({ "max_price": { "prompt": "2.5", "completion": 10 } }), "u0/up-a"),
        (json!({ "order": ["u1"], "allow_fallbacks": false }), "u1/up-a"),
    ] {
        let answer = ask(&gateway, "gpt-a", &json!({ "provider": provider })).await;
        assert_eq!(answer.header("x-tollgate-upstream"), Some(expected), "{provider}");
    }
    for (provider, word) in [
        (json!({ "only": ["nobody"] }), "provider.only"),
        (json!({ "max_price": { "prompt": "2.4" } }), "provider.max_price"),
        (json!({ "data_collection": "deny" }), "data_collection"),
        (json!({ "sort": "luck" }), "provider.sort"),
    ] {
        let answer = ask(&gateway, "gpt-a", &json!({ "provider": provider })).await;
        assert_eq!(answer.status, 400, "{provider}");
        assert!(
            answer.text().contains(word) && answer.text().contains("\"param\":\"provider\""),
            "{provider}"
        );
    }
}

#[tokio::test]
async fn without_fallbacks_the_first_failure_is_the_answer() {
    let strict = json!({ "provider": { "allow_fallbacks": false } });
    let pinned = json!({ "provider": { "order": ["u0"], "allow_fallbacks": false } });
    for more in [&strict, &pinned] {
        let mocks = [upstream(script(DEAD)).await, upstream(Script::default()).await];
        let gateway = Setup::new(&mocks.each_ref().map(Mock::address)).start();
        assert_eq!(ask(&gateway, "gpt-a", more).await.status, 502, "{more}");
        assert!(mocks[1].requests().is_empty());
        assert_eq!(ask(&gateway, "gpt-a", &json!({})).await.status, 200);
    }
}

#[tokio::test]
async fn without_fallbacks_our_other_credential_is_still_no_other_provider() {
    let busy = upstream(script(r#"{"fault":{"kind":"status","code":429},"fault_count":1}"#)).await;
    let other = upstream(Script::default()).await;
    let setup = Setup::new(&[busy.address(), other.address()]).provider(0, "credentials: [k-one, k-two]");
    let gateway = setup.start();
    let answer = ask(&gateway, "gpt-a", &json!({ "provider": { "allow_fallbacks": false } })).await;
    assert_eq!((answer.status, answer.header("x-tollgate-upstream")), (200, Some("u0/up-a#2")));
    assert!(other.requests().is_empty());
}

#[tokio::test]
async fn a_caller_who_wants_a_dead_provider_alone_keeps_nobody_else_waiting() {
    let dead = upstream(script(DEAD)).await;
    let well = upstream(script(r#"{"delay_head_ms":100}"#)).await;
    let gateway = Setup::new(&[dead.address(), well.address()]).start();
    while gateway.endpoint_metric("tollgate_endpoint_refused", "u0/up-a").await < 1.0 {
        assert_eq!(ask(&gateway, "gpt-a", &json!({ "provider": { "order": ["u0"] } })).await.status, 200);
    }
    dead.set_script(script(r#"{"fault":{"kind":"hang_before_head"}}"#));
    let pinned = asking("gpt-a", &json!({ "provider": { "only": ["u0"] } }));
    let refused = pinned.send(gateway.http).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "no_upstream"));
    assert!(refused.header("retry-after").is_some());
    let others = (0..4).map(|_| Call::post(whole_request()).send(gateway.http));
    let answers = futures::future::join_all(others).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "{:?}", answers[0].text());
}

#[tokio::test]
async fn an_alias_stands_for_its_model() {
    let mock = upstream(Script::default()).await;
    let gateway = Setup::new(&[mock.address()])
        .with("aliases: { newest: gpt-latest, gpt-latest: gpt-a }")
        .key("models: [ gpt-a ]")
        .start();
    let answer = ask(&gateway, "newest", &json!({ "models": ["gpt-a"] })).await;
    let said: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((answer.status, &said["model"]), (200, &json!("gpt-a")));
    let listed = Call::get("/v1/models").send(gateway.http).await.text();
    assert!(
        ["newest", "gpt-latest", "gpt-a"].iter().all(|name| listed.contains(&format!("\"{name}\""))),
        "{listed}"
    );
    assert_eq!(Call::get("/v1/models/newest").send(gateway.http).await.status, 200);
}
