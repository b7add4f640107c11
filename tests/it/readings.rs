//! All metrics at a collector, as it reads them from the wire: what `/metrics` has, whatever becomes of the collector.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{AggregationTemporality, Metric, NumberDataPoint};
use regex::Regex;

use super::support::collector::{Collector, Reading, attribute};
use super::support::gateway::free_address;
use super::support::tls::{Authority, TlsUpstream, Wants};
use super::support::{Call, Gateway, Setup, script, stream_request, upstream, whole_request};

/// What was dropped, as `/metrics` has it.
const DROPPED: &str = "tollgate_telemetry_dropped_total{signal=\"metrics\"}";
const DEAD: &str = r#"{"fault":{"kind":"status","code":503}}"#;

/// Samples as Prometheus has them: a name with its labels, and a value.
type Samples = BTreeMap<String, f64>;

fn setup(upstreams: &[SocketAddr], collector: SocketAddr, more: &str) -> Setup {
    Setup::new(upstreams).with(&format!("telemetry: {{ otlp: \"http://{collector}\"{more} }}"))
}

/// What `/metrics` shows.
async fn page(gateway: &Gateway) -> Samples {
    let label = Regex::new(r#"([a-z_]+)="([^"]*)""#).unwrap();
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = label.captures_iter(labels).map(|it| (it[1].to_owned(), it[2].to_owned())).collect();
        (series_of(name, labels), value.parse().unwrap())
    };
    let text = gateway.admin_page("/metrics").await.text();
    text.lines().filter(|line| !line.starts_with('#')).map(sample).collect()
}

/// A label without a value is none.
fn series_of(name: &str, labels: BTreeMap<String, String>) -> String {
    let labels = labels.into_iter().filter(|(_, value)| !value.is_empty());
    let labels: Vec<String> = labels.map(|(name, value)| format!("{name}={value}")).collect();
    format!("{name} {}", labels.join(","))
}

/// The same of a reading, with the names that Prometheus makes of OpenTelemetry's.
fn samples(reading: &Reading) -> Samples {
    let mut all = Samples::new();
    for metric in &reading.metrics {
        let name = metric.name.replace('.', "_");
        let name =
            if metric.name.starts_with("gen_ai.") && metric.unit == "s" { name + "_seconds" } else { name };
        let labels = |attributes: &[opentelemetry_proto::tonic::common::v1::KeyValue]| -> BTreeMap<_, _> {
            let label = |key: &str| (key.replace('.', "_"), attribute(attributes, key));
            attributes.iter().map(|it| label(&it.key)).collect()
        };
        let mut put = |name: &str, labels, value| {
            assert_eq!(all.insert(series_of(name, labels), value), None, "{name} is there twice");
        };
        for point in points(metric) {
            put(&name, labels(&point.attributes), number(point));
        }
        if let Some(Data::Histogram(histogram)) = &metric.data {
            for point in &histogram.data_points {
                let mut below = 0;
                let bounds = point.explicit_bounds.iter().map(|bound| format!("{bound}"));
                for (bound, count) in bounds.chain(["+Inf".to_owned()]).zip(&point.bucket_counts) {
                    below += count;
                    let mut labels = labels(&point.attributes);
                    labels.insert("le".to_owned(), bound);
                    put(&format!("{name}_bucket"), labels, f64::from(u32::try_from(below).unwrap()));
                }
                assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                assert_eq!(below, point.count);
                put(
                    &format!("{name}_count"),
                    labels(&point.attributes),
                    f64::from(u32::try_from(below).unwrap()),
                );
                put(&format!("{name}_sum"), labels(&point.attributes), point.sum.unwrap());
            }
        }
    }
    all
}

fn points(metric: &Metric) -> &[NumberDataPoint] {
    match &metric.data {
        Some(Data::Gauge(gauge)) => &gauge.data_points,
        Some(Data::Sum(sum)) => &sum.data_points,
        _ => &[],
    }
}

fn number(point: &NumberDataPoint) -> f64 {
    match point.value {
        Some(Value::AsDouble(value)) => value,
        _ => panic!("{point:?}"),
    }
}

/// The one value of a metric without labels.
fn value(reading: &Reading, name: &str) -> f64 {
    let metric = reading.metrics.iter().find(|metric| metric.name == name);
    number(&points(metric.unwrap_or_else(|| panic!("no {name}")))[0])
}

/// When its counters began, which is the same for all of them.
fn since(reading: &Reading) -> u64 {
    let mut starts = vec![];
    for metric in &reading.metrics {
        match &metric.data {
            Some(Data::Sum(sum)) => {
                assert!(sum.is_monotonic && metric.name.ends_with("_total"), "{}", metric.name);
                assert_eq!(sum.aggregation_temporality(), AggregationTemporality::Cumulative);
                starts.extend(sum.data_points.iter().map(|it| (it.start_time_unix_nano, it.time_unix_nano)));
            }
            Some(Data::Histogram(histogram)) => {
                assert_eq!(histogram.aggregation_temporality(), AggregationTemporality::Cumulative);
                let points = histogram.data_points.iter();
                starts.extend(points.map(|it| (it.start_time_unix_nano, it.time_unix_nano)));
            }
            _ => {}
        }
    }
    let (since, at) = starts[0];
    assert!(starts.iter().all(|it| *it == (since, at)) && since <= at, "{starts:?}");
    since
}

#[tokio::test]
async fn a_reading_has_every_sample_of_the_page_under_the_names_of_opentelemetry() {
    let collector = Collector::start().await;
    let mocks = [upstream(script(DEAD)).await, upstream(script("{}")).await];
    let addresses = [mocks[0].address(), mocks[1].address()];
    let gateway = setup(&addresses, collector.address, ", metrics_every: 1s").start();
    for call in [stream_request(), whole_request()] {
        assert_eq!(Call::post(call).send(gateway.http).await.status, 200);
    }
    gateway.wait_until_settled().await;
    let before = page(&gateway).await;
    let reading = collector.next_reading().await;
    let after = page(&gateway).await;
    let sent = samples(&reading);
    let steady: Vec<_> = before.iter().filter(|(series, value)| after.get(*series) == Some(*value)).collect();
    assert!(
        steady.len() > 300 && steady.len() * 10 > before.len() * 9,
        "{} of {}",
        steady.len(),
        before.len()
    );
    for (series, value) in steady {
        assert_eq!(sent.get(series), Some(value), "{series}");
    }
    for series in sent.keys() {
        assert!(after.contains_key(series), "{series} is not on the page");
    }
    let of = "gen_ai.client.operation.duration";
    let metric = reading.metrics.iter().find(|metric| metric.name == of).unwrap();
    let Some(Data::Histogram(histogram)) = &metric.data else { panic!("{metric:?}") };
    let errors: Vec<String> =
        histogram.data_points.iter().map(|it| attribute(&it.attributes, "error.type")).collect();
    assert_eq!((metric.unit.as_str(), errors), ("s", vec![String::new(), "status_5xx".to_owned()]));

    let resource = |key: &str| attribute(&reading.resource.attributes, key);
    assert_eq!(resource("service.name"), "tollgate");
    assert_eq!(resource("service.version"), env!("CARGO_PKG_VERSION"));
    assert!(resource("tollgate.node").ends_with(&format!(":{}", gateway.admin.port())));
    assert_eq!(resource("service.instance.id").len(), 36);
    let started = value(&reading, "tollgate_started_unix_seconds") * 1e9;
    #[expect(clippy::cast_precision_loss, reason = "a microsecond more or less")]
    let since = since(&reading) as f64;
    assert!((since - started).abs() < 1e6, "{since} {started}");
    assert_eq!(gateway.metric(DROPPED).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_leaves_sends_what_it_has_and_the_next_one_begins_anew() {
    let collector = Collector::start().await;
    let mock = upstream(script("{}")).await;
    let mut gateway = setup(&[mock.address()], collector.address, ", metrics_every: 1h").start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    let [first] = <[Reading; 1]>::try_from(collector.readings()).unwrap();
    assert_eq!(value(&first, "tollgate_holds_placed_total"), 1.0);
    let mut next = gateway.again();
    next.signal("-TERM");
    assert!(next.wait().success());
    let [_, second] = <[Reading; 2]>::try_from(collector.readings()).unwrap();
    assert_eq!(value(&second, "tollgate_holds_placed_total"), 0.0);
    assert!(since(&first) < since(&second), "a counter that fell says since when it counts");
    let instance = |reading: &Reading| attribute(&reading.resource.attributes, "service.instance.id");
    assert_ne!(instance(&first), instance(&second));
}

#[tokio::test]
async fn a_hosted_collector_is_asked_over_tls_with_its_headers_and_nobody_else_sees_them() {
    let collector = Collector::start().await;
    let authority = Authority::new();
    let wants = || Wants { alpn: &[], ..Wants::default() };
    let tls = TlsUpstream::start(&authority, wants(), collector.address).await;
    let mock = upstream(script("{}")).await;
    let block = format!(
        "telemetry: {{ otlp: \"https://{}/\", ca_file: \"{}\", metrics_every: 1s, sample: 1, \
         headers: {{ authorization: \"Bearer ${{OTLP_TOKEN}}\", x-scope-orgid: tenant }} }}",
        tls.address,
        authority.ca_file().display()
    );
    let gateway = Setup::new(&[mock.address()]).with(&block).env("OTLP_TOKEN", "a-hidden-token").start();
    let prompt = r#"{"model":"gpt-a","messages":[{"role":"user","content":"a-secret-prompt"}]}"#;
    assert_eq!(Call::post(prompt).send(gateway.http).await.status, 200);
    collector.wait_for_spans(2).await;
    let reading = collector.next_reading().await;
    assert_eq!(value(&reading, "tollgate_holds_placed_total"), 1.0);
    for message in collector.messages() {
        for header in ["authorization: bearer a-hidden-token", "x-scope-orgid: tenant"] {
            assert!(message.head.lines().any(|line| line == header), "{}", message.head);
        }
        let body = String::from_utf8_lossy(&message.body).into_owned();
        for secret in ["a-secret-prompt", "sk-test", "prov-key", "a-hidden-token"] {
            assert!(!body.contains(secret), "{secret} is in a message");
        }
    }
    let shown = gateway.log() + &gateway.admin_page("/metrics").await.text();
    assert!(!shown.contains("a-hidden-token") && !shown.contains(&tls.address.to_string()), "{shown}");

    // Another authority: nobody is told the token.
    let stranger = TlsUpstream::start(&Authority::new(), wants(), collector.address).await;
    let known = collector.messages().len();
    let block = block.replace(&tls.address.to_string(), &stranger.address.to_string());
    drop(gateway);
    let gateway = Setup::new(&[mock.address()]).with(&block).env("OTLP_TOKEN", "a-hidden-token").start();
    gateway.wait_for_metric_that(DROPPED, |dropped| dropped > 0).await;
    assert_eq!(collector.messages().len(), known);
}

#[tokio::test]
async fn a_collector_that_comes_up_later_gets_every_count_and_one_that_refuses_loses_only_readings() {
    let address = free_address();
    let mock = upstream(script("{}")).await;
    let gateway = setup(&[mock.address()], address, ", metrics_every: 1s").start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.wait_for_metric_that(DROPPED, |dropped| dropped > 0).await;
    gateway.wait_for_log("the collector does not take metrics");
    let job = "tollgate_job_failures_total{task=\"metrics_export\"}";
    gateway.wait_for_metric_that(job, |failures| failures > 0).await;
    let collector = Collector::start_at(address).await;
    let reading = collector.next_reading().await;
    assert_eq!(value(&reading, "tollgate_holds_placed_total"), 1.0);
    gateway.wait_for_log("the collector takes metrics again");

    let dropped = gateway.metric(DROPPED).await;
    collector.answer(
        "/v1/metrics",
        &["429 Too Many Requests\r\nretry-after: 1", "503 Service Unavailable", "404 Not Found"],
    );
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.wait_for_metric(DROPPED, dropped + 3).await;
    let reading = collector.next_reading().await;
    assert_eq!(value(&reading, "tollgate_holds_placed_total"), 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn either_signal_can_be_left_out() {
    let collector = Collector::start().await;
    let mock = upstream(script("{}")).await;
    let setup = |more| setup(&[mock.address()], collector.address, more);
    let mut gateway = setup(", traces: false").start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    assert_eq!((collector.spans().len(), collector.readings().len()), (0, 1));
    let mut gateway = setup(", metrics: false, sample: 1").start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    assert_eq!((collector.spans().len(), collector.readings().len()), (2, 1));
}
