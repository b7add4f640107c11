//! The config is read anew in a running process, and no caller notices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::support::{Call, Caller, Gateway, Setup, script, stream_request, upstream, whole_request};
use tollgate::mock::{Mock, Script};

const RELOADS: usize = 200;
const TAKEN_OVER: &str = "the config is read anew and serves";

async fn running() -> (Mock, Gateway) {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    (only, gateway)
}

#[tokio::test]
async fn a_running_call_keeps_its_price_and_the_next_one_has_the_new() {
    let slow = upstream(script(r#"{"delay_chunk_ms":400}"#)).await;
    let gateway = Setup::new(&[slow.address()]).start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    let dear = gateway.config().replace(r#"input: "2.5", output: "10""#, r#"input: "25", output: "100""#);
    gateway.write_config(&dear);
    gateway.signal("-HUP");
    gateway.wait_for_log(TAKEN_OVER);
    assert!(!gateway.log().contains("status=200"), "the call still runs when the price changes");
    let mut text = String::new();
    while let Some(chunk) = caller.chunk().await.expect("the stream goes on") {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.contains("[DONE]"));
    assert_eq!(gateway.spent(1), 75_000);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(gateway.spent(2), 75_000 + 750_000);
}

#[tokio::test]
async fn a_file_with_faults_is_refused_with_all_of_them_and_the_old_config_serves() {
    let (_upstream, gateway) = running().await;
    let good = gateway.config();
    gateway.write_config(&good.replace("weight: 100", "wait: 100").replace("context:", "contest:"));
    let refused = gateway.reload().await;
    assert_eq!(refused.status, 422);
    let outcome = refused.json();
    assert_eq!(outcome["result"], "refused");
    let faults = outcome["faults"].as_array().unwrap();
    assert!(faults.len() >= 2 && faults.iter().all(|fault| fault["line"].as_u64() > Some(0)), "{outcome}");
    gateway.signal("-HUP");
    gateway.wait_for_log("why=\"SIGHUP\"");
    assert!(gateway.log().contains("the config file is refused") && gateway.log().contains("routes[0].wait"));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(gateway.metric("tollgate_config_refused").await, 1);
    gateway.write_config(&good);
    let applied = gateway.reload().await;
    assert_eq!((applied.status, &applied.json()["version"]), (200, &outcome["version"]), "as at the start");
    assert_eq!(gateway.metric("tollgate_config_refused").await, 0);
    assert_eq!(gateway.metric("tollgate_config_reloads_total{result=\"applied\"}").await, 1);
    assert_eq!(gateway.metric("tollgate_config_reloads_total{result=\"refused\"}").await, 2);
}

#[tokio::test]
async fn a_reload_needs_the_token() {
    let (_upstream, gateway) = running().await;
    let call = Call::post("").path("/reload").header("authorization", "Bearer guess");
    assert_eq!(call.send(gateway.admin).await.status, 401);
}

#[tokio::test]
async fn a_changed_file_is_taken_over_without_being_told() {
    let (_upstream, gateway) = running().await;
    let listed = async || Call::get("/v1/models").send(gateway.http).await.text();
    gateway.write_config(&gateway.config().replace("  gpt-a:", "  gpt-by-rename:"));
    gateway.wait_for_log("why=\"the file has changed\"");
    assert!(listed().await.contains("gpt-by-rename"));
    // In place, as `cat > file` does.
    let file = gateway.folder().join("tollgate.yaml");
    std::fs::write(&file, gateway.config().replace("gpt-by-rename:", "gpt-in-place:")).unwrap();
    let told = || gateway.log().matches(TAKEN_OVER).count();
    while told() < 2 {
        tokio::task::yield_now().await;
    }
    assert!(listed().await.contains("gpt-in-place"));
}

#[tokio::test]
async fn accounts_and_keys_that_come_are_made_and_those_that_go_stay() {
    let (_upstream, gateway) = running().await;
    let beta = "    beta: { balance: \"1.00\", keys: [ { key: sk-test-beta, models: [] } ] }\n";
    let gamma =
        "    gamma: { balance: \"0.50\", keys: [ { key: sk-test-gamma, default_output_tokens: 100 } ] }\n";
    let old = gateway.config();
    gateway.write_config(&old.replace(beta, gamma));
    assert_eq!(gateway.reload().await.status, 200);
    let status = async |key: &str, call: Call| {
        call.header("authorization", &format!("Bearer {key}")).send(gateway.http).await.status
    };
    assert_eq!(status("sk-test-gamma", Call::post(whole_request())).await, 200);
    assert_eq!(
        status("sk-test-beta", Call::get("/v1/credits")).await,
        200,
        "beta is not in the file any more"
    );
    assert_eq!(gateway.reload().await.status, 200, "the balance of the file is booked once");
    assert_eq!(gateway.account("gamma", 1).balance_nano, 500_000_000 - 75_000);
    let taken = old.replace("sk-test-beta", "sk-test-gamma");
    gateway.write_config(&taken);
    let refused = gateway.reload().await;
    assert_eq!(refused.status, 422, "a key belongs to one account");
    assert!(refused.text().contains("another account"), "{}", refused.text());
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn limits_and_bounds_of_a_reload_count_and_what_needs_a_restart_is_named() {
    let (_upstream, gateway) = running().await;
    let yaml = gateway.config();
    let yaml = yaml
        .replace(&gateway.http.to_string(), "127.0.0.1:1")
        .replace("threads: 2", "threads: 3")
        .replace("providers:\n", "bounds: { body_max: 100, open_holds_max: 9 }\nproviders:\n")
        .replace("key: sk-test-alpha,", "key: sk-test-alpha, limits: { rpm: 1 },");
    gateway.write_config(&yaml);
    let outcome = gateway.reload().await.json();
    let named = serde_json::json!(["listen.http", "listen.threads", "bounds.open_holds_max"]);
    assert_eq!((&outcome["result"], &outcome["needs_restart"]), (&"applied".into(), &named));
    assert_eq!(gateway.metric("tollgate_config_needs_restart").await, 3);
    let large = whole_request().replace("hi", &"x".repeat(100));
    assert_eq!(Call::post(large).send(gateway.http).await.status, 413, "the old address, the new bound");
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 429);
}

#[tokio::test]
async fn what_a_connection_may_take_follows_a_reload_for_new_ones() {
    let (_upstream, gateway) = running().await;
    let more =
        "bounds: { head_timeout: 300ms, write_timeout: 5s, requests_per_connection_max: 1, keepalive: 9s }";
    gateway.write_config(&gateway.config().replace("providers:\n", &format!("{more}\nproviders:\n")));
    let outcome = gateway.reload().await.json();
    assert_eq!(outcome["needs_restart"], serde_json::json!(["bounds.keepalive over HTTP/2"]));
    assert_eq!(Caller::connect(gateway.http).await.rest().await, b"", "closed in silence");
    gateway.wait_for_refused("too_slow", 1).await;
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
}

#[tokio::test]
async fn a_budget_that_a_reload_brings_counts_what_was_spent_before() {
    let only = upstream(Script::default()).await;
    // A hold is exactly a cent, and a call costs five thousandths of it.
    let gateway = Setup::new(&[only.address()]).model("price: { input: \"0\", output: \"10\" }").start();
    let status = async || Call::post(whole_request()).send(gateway.http).await.status;
    let plain = gateway.config();
    let limited = async |limits: &str| {
        gateway.write_config(
            &plain.replace("sk-test-alpha,", &format!("sk-test-alpha, limits: {{ {limits} }},")),
        );
        assert_eq!(gateway.reload().await.status, 200);
    };
    limited("budget_month: \"0.01\"").await;
    assert_eq!(status().await, 200, "nothing is spent yet");
    gateway.account("alpha", 1);
    limited("rpm: 100").await;
    limited("budget_day: \"0.01\"").await;
    assert_eq!(status().await, 429, "a part of the cent is spent");
    limited("budget_day: \"0.02\", budget_month: \"0.01\"").await;
    assert_eq!(status().await, 429, "of the month's as well");
    limited("budget_day: \"0.02\", budget_month: \"0.02\"").await;
    assert_eq!(status().await, 200);
}

#[tokio::test]
async fn what_is_known_of_upstreams_outlives_a_reload() {
    let limited = r#"{"fault":{"kind":"status","code":429,"retry_after":"60"}}"#;
    let (first, second) = (upstream(script(limited)).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.write_config(&gateway.config().replace("weight: 100", "weight: 101"));
    assert_eq!(gateway.reload().await.status, 200);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!((first.requests().len(), second.requests().len()), (1, 2), "the first one still rests");
    assert!(gateway.endpoint_metric("tollgate_endpoint_refused", "u0/up-a").await > 0.5);
}

#[tokio::test]
async fn two_hundred_reloads_under_load_fail_no_call_and_drop_no_connection() {
    let (first, second) = (upstream(Script::default()).await, upstream(Script::default()).await);
    let gateway =
        Setup::new(&[first.address(), second.address()]).balance("1000").log("warn,tollgate=info").start();
    let over = Arc::new(AtomicBool::new(false));
    let calls = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..6)
        .map(|number| {
            let (over, calls, to) = (Arc::clone(&over), Arc::clone(&calls), gateway.http);
            tokio::spawn(async move {
                // One connection for all calls: a dropped one ends the test.
                let mut caller = Caller::connect(to).await;
                while !over.load(Ordering::Acquire) {
                    let body = if number % 2 == 0 { stream_request() } else { whole_request() };
                    caller.send(&Call::post(body)).await;
                    let answer = caller.next_answer().await;
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    assert!(answer.clean && (number % 2 == 1 || answer.text().contains("[DONE]")));
                    calls.fetch_add(1, Ordering::AcqRel);
                }
            })
        })
        .collect();
    let good = gateway.config();
    for round in 0..RELOADS {
        let broken = round % 10 == 9;
        // Every reload finds calls in flight that began before it.
        let before = calls.load(Ordering::Acquire);
        gateway.write_config(&if broken {
            good.replace("routes:", "roads:")
        } else if round % 2 == 0 {
            // Endpoints change their places, and one goes.
            good.replace("weight: 99", &format!("weight: {}", 101 + round))
        } else {
            good.lines().filter(|line| !line.contains("provider: u0")).collect::<Vec<_>>().join("\n")
        });
        let outcome = gateway.reload().await;
        assert_eq!(outcome.status, if broken { 422 } else { 200 }, "round {round}: {}", outcome.text());
        while calls.load(Ordering::Acquire) == before {
            assert!(callers.iter().all(|caller| !caller.is_finished()), "a caller has failed");
            tokio::task::yield_now().await;
        }
    }
    over.store(true, Ordering::Release);
    for caller in callers {
        caller.await.expect("no call fails");
    }
    gateway.wait_until_settled().await;
    let calls = calls.load(Ordering::Acquire);
    assert!(calls >= RELOADS, "{calls} calls");
    assert_eq!(
        gateway.account("alpha", i64::try_from(calls).unwrap()).balance_nano,
        1_000_000_000_000 - 75_000 * i64::try_from(calls).unwrap()
    );
    assert!(gateway.ledger_is_right());
    println!("{RELOADS} reloads under {calls} calls");
}
