//! Who fails or is over its limit is left alone, and callers do not notice.

use super::support::{Call, Setup, script, stream_request, upstream, whole_request};
use tollgate::mock::Script;

#[tokio::test]
async fn an_endpoint_that_goes_on_failing_is_left_alone() {
    let first = upstream(script(r#"{"fault":{"kind":"status","code":503}}"#)).await;
    let second = upstream(Script::default()).await;
    // At weights so far apart the failing one stays first until its breaker opens.
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    while gateway.endpoint_metric("tollgate_endpoint_refused", "u0/up-a").await < 1.0 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
        second.set_script(script(r#"{"fault":{"kind":"status","code":503}}"#));
        let last_resort = Call::post(whole_request()).send(gateway.http).await.status;
        assert_eq!(last_resort, 502, "both fail");
        second.set_script(Script::default());
        assert!(first.requests().len() < 30, "it is asked for ever:\n{}", gateway.log());
    }
    assert!(gateway.log().contains("an endpoint fails: it is not asked for a while"));
    let asked = first.requests().len();
    for _ in 0..20 {
        assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    }
    assert_eq!(first.requests().len(), asked, "while its breaker is open nobody asks it");
}

#[tokio::test]
async fn a_rate_limited_credential_rests_for_as_long_as_its_provider_says() {
    let limited = r#"{"fault":{"kind":"status","code":429,"retry_after":"60"}}"#;
    let (first, second) = (upstream(script(limited)).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    for _ in 0..5 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    }
    assert_eq!((first.requests().len(), second.requests().len()), (1, 5));
}

#[tokio::test]
async fn a_credential_that_is_refused_rests_and_somebody_is_told() {
    let refused = r#"{"fault":{"kind":"status","code":401}}"#;
    let (first, second) = (upstream(script(refused)).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    for _ in 0..5 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    }
    assert_eq!((first.requests().len(), second.requests().len()), (1, 5));
    assert!(gateway.log().contains("refuses our credential"));
}

#[tokio::test]
async fn when_all_rest_the_caller_learns_when_to_come_back_and_nothing_is_held() {
    let limited = r#"{"fault":{"kind":"status","code":429,"retry_after":"90"}}"#;
    let (first, second) = (upstream(script(limited)).await, upstream(script(limited)).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    let tried = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!(tried.status, 429);
    let refused = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "rate_limit_exceeded"));
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((60..=90).contains(&wait), "{wait}");
    assert_eq!((first.requests().len(), second.requests().len()), (1, 1));
    assert_eq!(gateway.account("alpha", 1).calls, 1, "the second call was never held");
}

#[tokio::test]
async fn a_hiccup_of_the_only_route_does_not_reach_the_caller() {
    for fault in [r#"{"kind":"status","code":503}"#, r#"{"kind":"reset_before_head"}"#] {
        let only = upstream(script(&format!(r#"{{"fault":{fault},"fault_count":1}}"#))).await;
        let gateway = Setup::new(&[only.address()]).start();
        let answer = Call::post(stream_request()).send(gateway.http).await;
        assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")), "{fault}");
        assert_eq!(gateway.spent(1), 75_000);
    }
}

#[tokio::test]
async fn two_dead_upstreams_of_three_reach_no_caller() {
    let dead = [
        upstream(script(r#"{"fault":{"kind":"hang_after_head"}}"#)).await,
        upstream(script(r#"{"fault":{"kind":"reset_before_head"}}"#)).await,
    ];
    let third = upstream(Script::default()).await;
    let gateway = Setup::new(&[dead[0].address(), dead[1].address(), third.address()]).start();
    let answers =
        futures::future::join_all((0..40).map(|_| Call::post(stream_request()).send(gateway.http))).await;
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.text().contains("[DONE]")));
    assert_eq!(gateway.spent(40), 40 * 75_000);
}

#[tokio::test]
async fn a_caller_that_leaves_during_a_pause_ends_the_call() {
    let busy = r#"{"fault":{"kind":"status","code":503,"retry_after":"4"}}"#;
    let only = upstream(script(busy)).await;
    let gateway = Setup::new(&[only.address()]).start();
    let caller = Call::post(whole_request()).begin(gateway.http).await;
    only.wait_for_requests(1).await;
    gateway.wait_for_log("outcome=\"failed\"");
    caller.reset();
    gateway.wait_until_settled().await;
    assert_eq!(only.requests().len(), 1, "nobody waits for the second try any more");
    assert_eq!(gateway.spent(1), 0);
}

#[tokio::test]
async fn a_route_that_always_refuses_never_uses_up_the_others() {
    // 403 blames nobody, so every call begins with it: more extra attempts than the budget has.
    let first = upstream(script(r#"{"fault":{"kind":"status","code":403}}"#)).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[first.address(), second.address()]).balance("10").start();
    for call in 0..180 {
        let answer = Call::post(whole_request()).send(gateway.http).await;
        assert_eq!(answer.status, 200, "call {call}: {}", answer.text());
    }
    assert_eq!((first.requests().len(), second.requests().len()), (180, 180));
}

#[tokio::test]
async fn a_call_that_waits_for_the_only_route_goes_on_when_another_is_back() {
    let first = upstream(script(r#"{"fault":{"kind":"status","code":503}}"#)).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    while gateway.endpoint_metric("tollgate_endpoint_refused", "u0/up-a").await < 1.0 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
        second.set_script(script(r#"{"fault":{"kind":"status","code":503}}"#));
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 502, "both fail");
        second.set_script(Script::default());
    }
    second.set_script(script(r#"{"fault":{"kind":"hang_before_head"}}"#));
    let asked = second.requests().len();
    let lonely = Call::post(stream_request()).begin(gateway.http).await;
    second.wait_for_requests(asked + 1).await;
    first.set_script(Script::default());
    while gateway.endpoint_metric("tollgate_endpoint_refused", "u0/up-a").await > 0.0 {
        tokio::task::yield_now().await;
    }
    // Half-open: three probes that succeed close its breaker.
    for _ in 0..3 {
        assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    }
    let answer = lonely.answer().await;
    assert_eq!(
        (answer.status, answer.header("x-tollgate-upstream")),
        (200, Some("u0/up-a")),
        "{}",
        gateway.log()
    );
}

#[tokio::test]
async fn a_node_that_reaches_nobody_is_not_ready_and_comes_back_by_itself() {
    let (first, second) = (upstream(Script::default()).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    let reachable = first.address();
    first.stop();
    second.stop();
    let ready = async || gateway.admin_page("/readyz").await.status;
    assert_eq!(ready().await, 200);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 502);
    assert_eq!(ready().await, 503, "{}", gateway.admin_page("/readyz").await.text());
    let listener = tokio::net::TcpListener::bind(reachable).await.unwrap();
    let _back = tollgate::mock::Mock::start(listener, Script::default()).await.unwrap();
    gateway.wait_for_log("can be reached from this node again");
    assert_eq!(ready().await, 200);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200, "nobody was blamed");
}
