//! What a gateway keeps of its calls, also when it is killed, and how it tells of it.

use serde_json::Value;

use super::super::support::{Call, Caller, Gateway, Setup, script, stream_request, upstream, whole_request};
use super::{records, sums, told, until};
use tollgate::mock::Script;

/// The sums of all minutes, once so many calls are in them.
fn minutes(gateway: &Gateway, calls: u64) -> (u64, u64, u64) {
    let records = records(gateway.folder());
    until(|| sums(&records.minutes(None, 0, i64::MAX).unwrap()), |(good, bad, _)| good + bad >= calls)
}

/// A page of the admin port, with the token.
async fn asked(gateway: &Gateway, path: &str) -> super::super::support::Answer {
    let token = std::fs::read_to_string(gateway.folder().join("data/admin.token")).unwrap();
    Call::get(path).header("authorization", &format!("Bearer {token}")).send(gateway.admin).await
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A counter of `tollgate_slo_events_total`.
async fn events(gateway: &Gateway, objective: &str, outcome: &str) -> u64 {
    let start = format!("tollgate_slo_events_total{{objective=\"{objective}\",outcome=\"{outcome}\"}} ");
    let text = gateway.admin_page("/metrics").await.text();
    text.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok()).unwrap_or_default()
}

#[tokio::test]
async fn every_attempt_of_a_call_is_told_in_order() {
    let first = upstream(script(r#"{"fault":{"kind":"status","code":503},"fault_count":1}"#)).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")));
    let id = answer.header("x-request-id").unwrap().to_owned();
    let own = Call::post(whole_request()).header("x-request-id", "my-own").send(gateway.http).await;
    assert_eq!(own.status, 200);
    assert_eq!(minutes(&gateway, 2), (2, 0, 0));

    let records = records(gateway.folder());
    let attempts = until(|| records.attempts_of(&id).unwrap(), |it| it.len() == 2);
    assert_eq!(
        told(&attempts),
        ["1 u0/up-a r0 failed status_5xx -> u1/up-a", "2 u1/up-a r1 served ok -> stop"]
    );
    assert!(attempts.iter().all(|it| it.model == "gpt-a" && it.budget_left_ms > 0 && it.elapsed_ms >= 0));
    assert_eq!(records.attempts_of("my-own").unwrap().len(), 1, "a caller's own id, served at once");

    let table = gateway.command(&["failovers", "--request", &id]);
    assert!(table.lines().count() == 3 && table.contains("status_5xx"), "{table}");
    let by_reason = json(&gateway.command(&["failovers", "--by", "reason", "--json"]));
    assert_eq!(
        (by_reason[0]["key"].as_str(), by_reason[0]["failovers"].as_u64()),
        (Some("status_5xx"), Some(1))
    );
    let by_upstream =
        gateway.command(&["failovers", "--reason", "status_5xx", "--by", "upstream", "--since", "1h"]);
    assert!(by_upstream.contains("u0/up-a") && !by_upstream.contains("u1/up-a"), "{by_upstream}");
    assert_eq!(gateway.command(&["failovers", "--reason", "idle"]).trim(), "Nothing was found.");

    let path = format!("/failovers?request={id}");
    assert_eq!(gateway.admin_page(&path).await.status, 401, "only with the token");
    assert_eq!(json(&asked(&gateway, &path).await.text()).as_array().unwrap().len(), 2);
    let groups = json(&asked(&gateway, "/failovers?by=region&since=2h").await.text());
    assert_eq!(groups[0]["key"], "r0");
    assert_eq!(asked(&gateway, "/failovers?since=soon").await.status, 400);
}

#[tokio::test]
async fn good_and_bad_calls_are_counted_by_whose_doing_they_were() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).routing("attempts_max: 1").start();
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    // The caller's own doing: nothing of it counts.
    assert_eq!(Call::post("{").send(gateway.http).await.status, 400);
    assert_eq!(Call::get("/v1/models").send(gateway.http).await.status, 200);
    only.set_script(script(r#"{"fault":{"kind":"status","code":422}}"#));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 422);
    // Not its doing.
    only.set_script(script(r#"{"fault":{"kind":"status","code":500}}"#));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 502);
    only.set_script(script(r#"{"fault":{"kind":"status","code":429}}"#));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 429);
    assert_eq!(minutes(&gateway, 3), (1, 2, 0));
    assert_eq!(
        (events(&gateway, "availability", "good").await, events(&gateway, "availability", "bad").await),
        (1, 2)
    );
    assert_eq!((events(&gateway, "latency", "good").await, events(&gateway, "latency", "bad").await), (1, 0));

    let slo = json(&gateway.command(&["slo", "--json"]));
    let availability = &slo["objectives"][0];
    let mut causes: Vec<_> =
        availability["by_cause"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    causes.sort_unstable();
    assert_eq!(causes, ["status_429", "status_5xx"], "{slo}");
    assert_eq!(availability["by_upstream"][0]["name"], "u0/up-a");
    assert_eq!(availability["worst_minutes"][0]["bad"].as_u64().map(|bad| bad > 0), Some(true));
    assert_eq!(json(&asked(&gateway, "/slo").await.text())["objectives"][0]["bad"], 2);
    assert_eq!(gateway.admin_page("/slo").await.status, 401);
    assert_eq!(asked(&gateway, "/slo?month=soon").await.status, 400);
    let report = asked(&gateway, "/slo/report").await.text();
    assert!(report.contains("| cause | bad calls | burnt |") && report.contains("status_429"), "{report}");
    let text = gateway.command(&["slo"]);
    assert!(text.contains("availability: 99.95 % promised") && text.contains("burn rate"), "{text}");
}

#[tokio::test]
async fn a_route_that_cannot_be_asked_is_bad_for_its_model() {
    let only = upstream(script(r#"{"fault":{"kind":"status","code":429,"retry_after":"60"}}"#)).await;
    let gateway = Setup::new(&[only.address()]).start();
    for _ in 0..2 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 429);
    }
    assert_eq!(minutes(&gateway, 2), (0, 2, 0));
    let tallies = records(gateway.folder()).days(Some("gpt-a"), 0, i64::MAX).unwrap();
    assert_eq!(sums(&tallies), (0, 2, 0), "the second one was never sent, and is this model's all the same");
}

#[tokio::test]
async fn a_first_event_after_its_limit_is_late_and_whole_answers_have_none() {
    let only = upstream(script(r#"{"delay_first_event_ms":60}"#)).await;
    let gateway = Setup::new(&[only.address()]).with("slo: { first_event: 20ms }").start();
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(minutes(&gateway, 2), (2, 0, 1));
    let slo = json(&gateway.command(&["slo", "--json"]));
    let latency = &slo["objectives"][1];
    assert_eq!((&latency["bad"], &latency["good"]), (&1.into(), &0.into()), "{slo}");
    assert_eq!(latency["by_cause"][0]["name"], "slow");
}

#[tokio::test]
async fn an_answer_that_broke_off_is_bad_and_one_that_was_left_says_nothing() {
    let only =
        upstream(script(r#"{"fault":{"kind":"cut_after_pieces","pieces":2},"delay_chunk_ms":1}"#)).await;
    let gateway = Setup::new(&[only.address()]).start();
    Call::post(stream_request()).send(gateway.http).await;
    assert_eq!(minutes(&gateway, 1), (0, 1, 0));
    only.set_script(script(r#"{"delay_chunk_ms":200}"#));
    let mut caller = Caller::connect(gateway.http).await;
    caller.send(&Call::post(stream_request())).await;
    caller.try_head().await.expect("it begins");
    caller.reset();
    gateway.wait_for_log("outcome=\"left\"");
    gateway.wait_until_settled().await;
    only.set_script(Script::default());
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    assert_eq!(minutes(&gateway, 2), (1, 1, 0));
}

#[tokio::test]
async fn a_kill_takes_nothing_that_was_written_and_a_start_goes_on() {
    let only = upstream(Script::default()).await;
    let mut gateway = Setup::new(&[only.address()]).balance("100").start();
    let mut calls = 0;
    for life in 1..=3 {
        for _ in 0..5 {
            assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
            calls += 1;
        }
        assert_eq!(minutes(&gateway, calls), (calls, 0, 0), "life {life}");
        gateway = gateway.kill_and_restart();
        assert_eq!(minutes(&gateway, calls), (calls, 0, 0), "after the kill of life {life}");
    }
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    // One that leaves in peace writes all it has, and is read when nobody serves.
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    let slo = json(&gateway.command(&["slo", "--json"]));
    assert_eq!(slo["objectives"][0]["good"], calls + 1);
}

#[tokio::test]
async fn two_processes_that_hand_over_keep_one_record() {
    let only = upstream(Script::default()).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    let heir = gateway.successor();
    gateway.signal("-QUIT");
    assert!(gateway.wait().success());
    assert_eq!(Call::post(whole_request()).send(heir.http).await.status, 200);
    assert_eq!(minutes(&heir, 2), (2, 0, 0));
}
