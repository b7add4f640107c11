//! An outage, as the alerts see it: the right ones fire, and only those.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::task::JoinHandle;
use tollgate::mock::Mock;

use super::server::Server;
use crate::support::{Call, Setup, script, stream_request, upstream};

/// Calls a second.
const RATE: u32 = 40;
/// The first one is asked first as long as it is asked at all: nothing explores in a test.
const REQUEST: &str = r#"{"model":"gpt-a","stream":true,"provider":{"order":["u0","u1"]},
    "messages":[{"role":"user","content":"hi"}]}"#;
const DEAD: &str = r#"{"fault":{"kind":"status","code":503}}"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_alerts_of_an_outage_fire_and_no_others() {
    let mocks = [upstream(script("{}")).await, upstream(script("{}")).await];
    let gateway =
        Setup::new(&mocks.each_ref().map(Mock::address)).balance("1000").log("warn,tollgate=info").start();
    let load = Load::on(gateway.http);
    let prometheus = Server::start(gateway.admin).await;

    let enough = r#"tollgate:slo_bad:ratio_rate1h{objective="availability"} == 0 and on () sum(tollgate_slo_events_total) > 200"#;
    prometheus.wait_for(enough).await;
    assert_eq!(prometheus.firing().await, Vec::<String>::new(), "all is well");

    // The other one serves: callers see nothing, and nobody is told of errors.
    mocks[0].set_script(script(DEAD));
    let one = prometheus.wait_until_firing(&["RegionDown r0", "UpstreamDown u0/up-a"]).await;

    mocks[1].set_script(script(DEAD));
    let all = [
        "AvailabilityBudgetBurnsFast availability",
        "AvailabilityBudgetBurnsSlowly availability",
        "RegionDown r0",
        "RegionDown r1",
        "UpstreamDown u0/up-a",
        "UpstreamDown u1/up-a",
    ];
    let both = prometheus.wait_until_firing(&all).await;
    println!("one upstream dead: {one:?}; both: {both:?} (with time sixty times as fast)");
    for said in prometheus.annotations().await {
        let summary = said["summary"].as_str().unwrap();
        assert!(
            !summary.contains("error expanding")
                && !summary.contains("{{")
                && !summary.contains("<no value>"),
            "{summary}"
        );
        assert!(said["runbook_url"].as_str().unwrap().starts_with("docs/runbooks/"), "{said}");
    }
    drop(load);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_that_fell_behind_and_gets_no_calls_is_told_of_until_it_answers() {
    let mocks = [upstream(script("{}")).await, upstream(script("{}")).await];
    let gateway =
        Setup::new(&mocks.each_ref().map(Mock::address)).balance("1000").log("warn,tollgate=info").start();
    let prometheus = Server::start(gateway.admin).await;
    let ask = async |body: &str| {
        let answer = Call::post(body).send(gateway.http).await;
        assert_eq!(answer.status, 200);
        answer.header("x-tollgate-upstream").map(str::to_owned).expect("who answered")
    };
    prometheus
        .wait_for(r#"tollgate_endpoint_factor == 1 unless on () ALERTS{alertname="NodeNotScraped"}"#)
        .await;
    assert_eq!(prometheus.firing().await, Vec::<String>::new(), "whom nobody asks is not down");

    // Nothing explores, so from its first failure on it stands behind, and its breaker never opens.
    mocks[0].set_script(script(DEAD));
    for _ in 0..20 {
        assert_eq!(ask(&stream_request()).await, "u1/up-a");
    }
    assert_eq!(mocks[0].requests().len(), 1, "it is not asked any more");
    prometheus.wait_until_firing(&["UpstreamDown u0/up-a"]).await;
    let looks_well = r#"tollgate_endpoint_breaker{endpoint="u0/up-a",state="closed"} == 1 and on (endpoint) tollgate_endpoint_factor > 0.1"#;
    assert!(!prometheus.query(looks_well).await.unwrap().is_empty(), "its breaker says nothing");

    mocks[0].set_script(script("{}"));
    let first = REQUEST.replace(r#""order":["u0","u1"]"#, r#""only":["u0"]"#);
    assert_eq!(ask(&first).await, "u0/up-a");
    prometheus.wait_for(r#"absent(ALERTS{alertname="UpstreamDown"})"#).await;
    assert_eq!(prometheus.firing().await, Vec::<String>::new());
}

/// Callers at an even pace, whatever becomes of them.
struct Load {
    calls: JoinHandle<()>,
}

impl Load {
    fn on(gateway: SocketAddr) -> Self {
        let calls = tokio::spawn(async move {
            let mut pace = tokio::time::interval(Duration::from_secs(1) / RATE);
            loop {
                pace.tick().await;
                tokio::spawn(Call::post(REQUEST).send(gateway));
            }
        });
        Self { calls }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.calls.abort();
    }
}
