//! What calls and states look like at `/metrics`.

use tollgate::mock::Mock;

use super::support::{Call, Gateway, Setup, script, stream_request, upstream, whole_request};

const DEAD: &str = r#"{"fault":{"kind":"status","code":503}}"#;

/// The value of a sample by its whole name with labels, in the order of the page; 0 where there is none.
async fn sample(gateway: &Gateway, name: &str) -> f64 {
    let page = gateway.admin_page("/metrics").await.text();
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()).unwrap_or(0.0)
}

#[tokio::test]
async fn a_served_call_is_counted_once_in_every_place() {
    let mock = upstream(script("{}")).await;
    let gateway = Setup::new(&[mock.address()]).start();
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    // Its access line is the last that is done for a call.
    gateway.wait_for_log(" access: ");
    let of = r#"gen_ai_operation_name="chat",gen_ai_provider_name="openai",gen_ai_request_model="gpt-a""#;
    for name in [
        r#"tollgate_commits_total{endpoint="u0/up-a"}"#.to_owned(),
        r#"tollgate_first_byte_seconds_count{endpoint="u0/up-a"}"#.to_owned(),
        "tollgate_holds_placed_total".to_owned(),
        r#"tollgate_holds_ended_total{end="captured"}"#.to_owned(),
        r#"tollgate_slo_events_total{objective="availability",outcome="good"}"#.to_owned(),
        r#"tollgate_slo_events_total{objective="latency",outcome="good"}"#.to_owned(),
        format!("gen_ai_server_request_duration_seconds_count{{error_type=\"\",{of}}}"),
        format!("gen_ai_client_operation_duration_seconds_count{{error_type=\"\",{of}}}"),
        format!("gen_ai_server_time_to_first_token_seconds_count{{{of}}}"),
        format!("gen_ai_client_token_usage_count{{{of},gen_ai_token_type=\"input\"}}"),
        format!("gen_ai_client_token_usage_count{{{of},gen_ai_token_type=\"output\"}}"),
    ] {
        assert_eq!(sample(&gateway, &name).await, 1.0, "{name}");
    }
    let charged = gateway.metric("tollgate_charged_nano_dollars_total").await;
    let released = gateway.metric("tollgate_released_nano_dollars_total").await;
    assert!(charged > 0 && released > charged, "{charged} of a hold that was {released} larger");
    gateway.wait_for_metric_that("tollgate_provider_cost_nano_dollars_total", |cost| cost > 0).await;
    assert_eq!(sample(&gateway, "tollgate_held_nano_dollars").await, 0.0);
    let free = gateway.metric("tollgate_free_nano_dollars").await;
    assert_eq!(free, 2_000_000_000 - charged, "two accounts of a dollar each");
}

#[tokio::test]
async fn a_failover_is_two_attempts_and_one_good_event() {
    let mocks = [upstream(script(DEAD)).await, upstream(script("{}")).await];
    let gateway = Setup::new(&mocks.each_ref().map(Mock::address)).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.wait_until_settled().await;
    let of = r#"gen_ai_operation_name="chat",gen_ai_provider_name="openai",gen_ai_request_model="gpt-a""#;
    for (name, value) in [
        (format!("gen_ai_client_operation_duration_seconds_count{{error_type=\"status_5xx\",{of}}}"), 1.0),
        (format!("gen_ai_client_operation_duration_seconds_count{{error_type=\"\",{of}}}"), 1.0),
        (r#"tollgate_commits_total{endpoint="u1/up-a"}"#.to_owned(), 1.0),
        (r#"tollgate_commits_total{endpoint="u0/up-a"}"#.to_owned(), 0.0),
        (r#"tollgate_slo_events_total{objective="availability",outcome="good"}"#.to_owned(), 1.0),
        (r#"tollgate_slo_events_total{objective="availability",outcome="bad"}"#.to_owned(), 0.0),
    ] {
        assert_eq!(sample(&gateway, &name).await, value, "{name}");
    }
}

#[tokio::test]
async fn an_error_of_ours_is_a_bad_event_with_its_cause_and_a_callers_fault_is_none() {
    let mock = upstream(script(DEAD)).await;
    let gateway = Setup::new(&[mock.address()]).start();
    assert_eq!(Call::post("{").send(gateway.http).await.status, 400);
    let events = r#"tollgate_slo_events_total{objective="availability",outcome="bad"}"#;
    assert_eq!(sample(&gateway, events).await, 0.0);
    let failed = Call::post(whole_request()).send(gateway.http).await;
    assert!(failed.status >= 500, "{}", failed.status);
    gateway.wait_until_settled().await;
    assert_eq!(sample(&gateway, events).await, 1.0);
    let cause = r#"tollgate_slo_bad_total{cause="status_5xx",objective="availability"}"#;
    assert_eq!(sample(&gateway, cause).await, 1.0, "what the last attempt failed by");
    assert_eq!(sample(&gateway, r#"tollgate_holds_ended_total{end="released"}"#).await, 1.0);
}

#[tokio::test]
async fn a_limit_is_counted_by_whose_and_which() {
    let mock = upstream(script("{}")).await;
    let gateway = Setup::new(&[mock.address()]).key("limits: { rpm: 1 }").start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 429);
    let name = r#"tollgate_limited_total{kind="requests_per_minute",scope="key"}"#;
    assert_eq!(sample(&gateway, name).await, 1.0);
}

#[tokio::test]
async fn an_endpoint_shows_its_breaker_its_rests_its_credential_and_its_watchdogs() {
    let refused = r#"{"fault":{"kind":"status","code":401}}"#;
    let mocks = [upstream(script(DEAD)).await, upstream(script(refused)).await, upstream(script("{}")).await];
    let gateway = Setup::new(&mocks.each_ref().map(Mock::address)).start();
    let state = |endpoint: &str, state: &str| {
        format!("tollgate_endpoint_breaker{{endpoint=\"{endpoint}/up-a\",state=\"{state}\"}}")
    };
    assert_eq!(sample(&gateway, &state("u0", "closed")).await, 1.0);
    let mut calls = 0;
    while sample(&gateway, &state("u0", "open")).await < 1.0 {
        // One that fails is asked last, unless a caller wants it first.
        let ordered = r#"{"model":"gpt-a","provider":{"order":["u0","u1"]},"messages":[{"role":"user","content":"hi"}]}"#;
        assert_eq!(Call::post(ordered).send(gateway.http).await.status, 200);
        calls += 1;
        assert!(calls < 200, "it never opens");
    }
    assert_eq!(sample(&gateway, &state("u0", "closed")).await, 0.0);
    assert_eq!(gateway.endpoint_metric("tollgate_endpoint_credential_refused", "u1/up-a").await, 1.0);
    assert_eq!(gateway.endpoint_metric("tollgate_endpoint_rests", "u1/up-a").await, 1.0);
    assert_eq!(gateway.endpoint_metric("tollgate_endpoint_rests", "u2/up-a").await, 0.0);
    assert_eq!(gateway.endpoint_metric("tollgate_endpoint_weight", "u2/up-a").await, 98.0);
    let watchdog = r#"tollgate_watchdog_seconds{endpoint="u2/up-a",form="whole",model="gpt-a",operation="chat",timer="first_event"}"#;
    assert_eq!(sample(&gateway, watchdog).await, 0.6, "as it is configured");
    let info = r#"tollgate_endpoint_info{endpoint="u2/up-a",provider="u2",region="r2"}"#;
    assert_eq!(sample(&gateway, info).await, 1.0);
}

#[tokio::test]
async fn the_process_shows_its_bounds_its_disk_and_what_it_is() {
    let mock = upstream(script("{}")).await;
    let gateway = Setup::new(&[mock.address()]).with("bounds: { connections_max: 77 }").start();
    assert_eq!(gateway.metric("tollgate_connections_max").await, 77);
    assert_eq!(gateway.metric("tollgate_journal_writable").await, 1);
    assert_eq!(gateway.metric("tollgate_leaving").await, 0);
    let (free, size) =
        (gateway.metric("tollgate_disk_free_bytes").await, gateway.metric("tollgate_disk_bytes").await);
    assert!(0 < free && free < size, "{free} of {size}");
    let build = format!("tollgate_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    assert_eq!(sample(&gateway, &build).await, 1.0);
}
