//! The dashboards: whether Grafana can read them, and whether each of their queries answers something.

use std::collections::BTreeSet;

use serde_json::Value;

use super::server::{Server, repository};
use crate::support::{Call, Setup, script, stream_request, upstream, whole_request};

const DASHBOARDS: [&str; 4] = ["overview", "upstreams", "money", "slo"];

/// Panels that are empty on a single node that is well, and why.
const EMPTY: [(&str, &str); 18] = [
    ("Over a limit", "no limit is set"),
    ("Certificates", "no listener has one"),
    ("Failures", "nobody fails"),
    ("Throttled", "nobody answers 429"),
    ("First events against the day before", "there is no day before"),
    ("Probes", "probes are off"),
    ("Bad events by cause", "there are none"),
    ("What burnt it in this range", "nothing did"),
    ("Since the last success", "no periodic job has reported"),
    ("Records dropped", "recording is off"),
    ("Lost", "a fleet's alone, in part"),
    ("Settled calls that the ledger does not have", "a fleet's alone, in part"),
    ("How long the oldest waits", "a fleet's alone, in part"),
    ("Charged on pools, not booked", "a fleet's alone"),
    ("Ledger reachable", "a fleet's alone"),
    ("Redis", "a fleet's alone"),
    ("Shards without Redis", "a fleet's alone"),
    ("Refills that calls waited for", "a fleet's alone"),
];
/// More of them.
const EMPTY_TOO: [(&str, &str); 5] = [
    ("Drift, frozen pools, silent nodes", "a fleet's alone"),
    ("This node's tranches", "a fleet's alone"),
    ("Connections refused", "none is"),
    ("Holds denied", "none is"),
    ("Annotation: Configs", "none changed a moment ago"),
];

/// A query of a dashboard.
struct Query {
    panel: String,
    expr: String,
}

#[test]
fn grafana_can_read_every_dashboard() {
    let mut uids = BTreeSet::new();
    for name in DASHBOARDS {
        let dashboard = read(name);
        let text = |key: &str| dashboard[key].as_str().unwrap_or_default().to_owned();
        assert!(uids.insert(text("uid")) && text("title").starts_with("Tollgate"), "{name}");
        assert_eq!(dashboard["schemaVersion"], 39, "{name}");
        let variables: Vec<&str> = dashboard["templating"]["list"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| it["name"].as_str().unwrap())
            .collect();
        assert_eq!(variables, ["datasource", "job", "instance"], "{name}");
        let panels = dashboard["panels"].as_array().unwrap();
        let mut ids = BTreeSet::new();
        let mut taken: BTreeSet<(u64, u64)> = BTreeSet::new();
        for panel in panels {
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{name}: {}", panel["title"]);
            let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            assert!(at("x") + at("w") <= 24, "{name}: {} is too wide", panel["title"]);
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    assert!(taken.insert((x, y)), "{name}: {} lies on another panel", panel["title"]);
                }
            }
            check_panel(name, panel);
        }
    }
}

fn check_panel(name: &str, panel: &Value) {
    let kind = panel["type"].as_str().unwrap();
    if kind == "row" {
        return;
    }
    assert!(["timeseries", "stat", "state-timeline", "table"].contains(&kind), "{name}: {kind}");
    assert!(panel["description"].as_str().is_some_and(|text| !text.is_empty()), "{name}: {}", panel["title"]);
    assert_eq!(panel["datasource"]["uid"], "${datasource}", "{name}: {}", panel["title"]);
    let targets = panel["targets"].as_array().unwrap();
    let references: BTreeSet<&str> = targets.iter().map(|target| target["refId"].as_str().unwrap()).collect();
    assert!(!targets.is_empty() && references.len() == targets.len(), "{name}: {}", panel["title"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_of_every_dashboard_answers_something() {
    let mock = upstream(script("{}")).await;
    let gateway = Setup::new(&[mock.address()]).balance("1000").log("warn,tollgate=info").start();
    let prometheus = Server::start(gateway.admin).await;
    // A counter that is new shows a rate once it has grown between two looks.
    let seen = "sum(rate(tollgate_requests_total[5s])) > 0 and on () tollgate:slo_budget_left:ratio == 1 \
                and on () sum(rate(gen_ai_server_time_per_output_token_seconds_count[5s])) > 0";
    while prometheus.query(seen).await.unwrap().is_empty() {
        let calls = [stream_request(), whole_request(), "{".to_owned()]
            .map(|body| Call::post(body).send(gateway.http));
        futures::future::join_all(calls).await;
    }
    let mut empty = BTreeSet::new();
    for Query { panel, expr } in DASHBOARDS.iter().flat_map(|name| queries(&read(name))) {
        let samples = prometheus.query(&filled_in(&expr)).await.unwrap();
        if samples.is_empty() {
            empty.insert(panel);
        }
    }
    let known: BTreeSet<&str> = EMPTY.iter().chain(&EMPTY_TOO).map(|(panel, _)| *panel).collect();
    let unknown: Vec<&String> = empty.iter().filter(|panel| !known.contains(panel.as_str())).collect();
    assert!(unknown.is_empty(), "these answer nothing: {unknown:?}");
    let full: Vec<&&str> = known.iter().filter(|panel| !empty.contains(**panel)).collect();
    println!("known to be empty, and not: {full:?}");
}

/// What Grafana would put in.
fn filled_in(expr: &str) -> String {
    expr.replace("$__rate_interval", "5s")
        .replace("$__range", "1m")
        .replace("$job", "tollgate")
        .replace("$instance", ".*")
}

fn queries(dashboard: &Value) -> Vec<Query> {
    let panels = dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().into_iter().flatten();
        targets.map(move |target| (title.to_owned(), &target["expr"]))
    });
    let annotations = dashboard["annotations"]["list"].as_array().unwrap().iter();
    let annotations =
        annotations.map(|it| (format!("Annotation: {}", it["name"].as_str().unwrap()), &it["expr"]));
    let all = panels.chain(annotations).filter(|(panel, _)| panel != "Annotation: Alerts");
    all.map(|(panel, expr)| Query { panel, expr: expr.as_str().unwrap().to_owned() }).collect()
}

fn read(name: &str) -> Value {
    serde_json::from_str(&repository(&format!("conf/grafana/{name}.json"))).unwrap()
}
