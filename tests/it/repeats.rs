//! A repeat under the same idempotency key gets the first answer and is never charged.

use super::support::{Call, Setup, script, stream_request, upstream, whole_request};
use tollgate::mock::Script;

#[tokio::test]
async fn a_repeat_gets_the_first_answer_also_after_a_restart() {
    let only = upstream(Script::default()).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    let call = || Call::post(whole_request()).header("idempotency-key", "k-1");
    let first = call().send(gateway.http).await;
    let second = call().send(gateway.http).await;
    assert_eq!((first.status, second.status, first.body == second.body), (200, 200, true));
    gateway = gateway.kill_and_restart();
    assert_eq!(call().send(gateway.http).await.body, first.body);
    assert_eq!((only.requests().len(), gateway.spent(1)), (1, 75_000));
    let other_body = Call::post(stream_request()).header("idempotency-key", "k-1").send(gateway.http).await;
    assert_eq!((other_body.status, other_body.code().as_str()), (422, "idempotency_mismatch"));
    let other_account = call().header("authorization", "Bearer sk-test-beta").send(gateway.http).await;
    assert_eq!(other_account.status, 403, "keys are apart by account");
}

#[tokio::test]
async fn a_call_runs_on_when_its_caller_leaves_and_a_repeat_joins_it() {
    let only = upstream(script(r#"{"delay_head_ms":400}"#)).await;
    let gateway = Setup::new(&[only.address()]).start();
    let call = || Call::post(whole_request()).header("idempotency-key", "k-1");
    let impatient = call().begin(gateway.http).await;
    only.wait_for_requests(1).await;
    impatient.reset();
    let repeat = call().send(gateway.http).await;
    assert_eq!(
        (repeat.status, repeat.json()["choices"][0]["message"]["content"].as_str()),
        (200, Some("Hello, world!"))
    );
    assert_eq!((only.requests().len(), gateway.spent(1)), (1, 75_000));
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_streams_repeat_is_told_where_its_cost_is() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let call =
        || Call::post(stream_request()).header("idempotency-key", "k-1").header("x-request-id", "first-1");
    assert_eq!(call().send(gateway.http).await.status, 200);
    let repeat = call().send(gateway.http).await;
    assert_eq!((repeat.status, repeat.code().as_str()), (409, "idempotency_conflict"));
    assert!(repeat.text().contains("/v1/generation?id=first-1"), "{}", repeat.text());
    assert_eq!(gateway.spent(1), 75_000);
}

#[tokio::test]
async fn a_call_that_failed_may_be_tried_again_under_its_key() {
    let only = upstream(script(r#"{"fault":{"kind":"status","code":500},"fault_count":1}"#)).await;
    let gateway = Setup::new(&[only.address()]).routing("attempts_max: 1").start();
    let call = || Call::post(whole_request()).header("idempotency-key", "k-1");
    assert_eq!(call().send(gateway.http).await.status, 502);
    assert_eq!(call().send(gateway.http).await.status, 200);
    assert_eq!(gateway.spent(2), 75_000);
}

#[tokio::test]
async fn many_at_once_under_one_key_are_one_call() {
    let only = upstream(script(r#"{"delay_head_ms":200}"#)).await;
    let gateway = Setup::new(&[only.address()]).start();
    let call = || Call::post(whole_request()).header("idempotency-key", "k-1").send(gateway.http);
    let answers = futures::future::join_all((0..10).map(|_| call())).await;
    assert!(answers.iter().all(|a| a.status == 200 && a.body == answers[0].body));
    assert_eq!((only.requests().len(), gateway.spent(1)), (1, 75_000));
}

#[tokio::test]
async fn a_malformed_key_is_refused_by_name() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let long = "x".repeat(300);
    let answer = Call::post(whole_request()).header("idempotency-key", &long).send(gateway.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_request"));
}
