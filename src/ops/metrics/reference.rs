//! docs/metrics.md, made of the help texts: this test fails where it is not what they say, and writes it anew when it is
//! run with `TOLLGATE_WRITE_DOCS=1`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use filters::dialect::{Dialect, Operation};
use filters::limit::Kind;
use filters::slo::judge::{Blame, By, Judged, Verdict};
use filters::upstream::board::{BreakerState, Glance};
use filters::upstream::watchdog::{Form, Limits};
use prometheus::Registry;
use prometheus::proto::{MetricFamily, MetricType};

use super::calls::Labels;
use super::upstreams::RouteLabels;
use super::{FleetMetrics, Metrics};
use crate::clock;

const HEAD: &str = "# Metrics

Made from the help texts in the source by a test: change it there (`src/ops/metrics`), then run
`TOLLGATE_WRITE_DOCS=1 cargo test --lib metrics::reference`.

Every node has them at `listen.admin`, path `/metrics`. A counter ends in `_total` and starts at 0 with the process; of a
histogram Prometheus sees `_bucket`, `_sum` and `_count`. Labels have bounded values: names from the config, words of our
own, status codes; never anything that a caller wrote. [conf/prometheus](../conf/prometheus) has the rules that read them,
[conf/grafana](../conf/grafana) the dashboards, [operating.md](operating.md#metrics-and-alerts) how to set both up.

`gen_ai_*` are the names of OpenTelemetry's semantic conventions for generative AI, of which `gen_ai_client_*` is what we
ask of providers and `gen_ai_server_*` what callers get from us; in `gen_ai_provider_name` is the dialect, as they want it.
";

#[test]
fn the_reference_is_what_the_help_texts_say() {
    let metrics = Metrics::new().unwrap();
    let fleet = FleetMetrics::new().unwrap();
    touch(&metrics, &fleet);
    let text = [
        HEAD,
        "\n## Of every node\n\n",
        &table(&metrics.registry),
        "\n## Of a node of a fleet\n\n",
        &table(&fleet.registry),
    ]
    .concat();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    if std::env::var_os("TOLLGATE_WRITE_DOCS").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap_or_default(), text, "see the head of docs/metrics.md");
}

#[test]
fn every_name_and_label_has_the_shape_that_prometheus_wants() {
    let metrics = Metrics::new().unwrap();
    touch(&metrics, &FleetMetrics::new().unwrap());
    for family in metrics.registry.gather() {
        let name = family.name();
        assert!(name.starts_with("tollgate_") || name.starts_with("gen_ai_"), "{name}");
        assert_eq!(family.get_field_type() == MetricType::COUNTER, name.ends_with("_total"), "{name}");
        assert!(family.help().ends_with('.'), "{name}: {}", family.help());
        assert!(!labels(&family).iter().any(|label| label == "job" || label == "instance"), "{name}");
    }
}

/// A vector without a value shows nothing: everything gets one.
fn touch(metrics: &Metrics, fleet: &FleetMetrics) {
    metrics.requests.with_label_values(&["", ""]).inc();
    for histogram in [&metrics.request_seconds, &metrics.first_event_seconds, &fleet.redis_seconds] {
        histogram.with_label_values(&[""]).observe(0.0);
    }
    for one in [&metrics.rejections, &metrics.holds_denied, &metrics.connections_refused, &fleet.refills] {
        one.with_label_values(&[""]).inc();
    }
    for two in [&metrics.attempts, &metrics.tokens] {
        two.with_label_values(&["", ""]).inc();
    }
    metrics.endpoint_factor.with_label_values(&[""]).set(0.0);
    metrics.endpoint_refused.with_label_values(&[""]).set(0);
    metrics.config.reloads.with_label_values(&[""]).inc();
    metrics.config.taken_over("", 0);
    let labels = Labels { endpoint: "", operation: Operation::Chat, dialect: Dialect::OpenAi, model: "" };
    let _made = metrics.of("chat", labels);
    metrics.calls.over_limit("", Kind::Requests);
    metrics.calls.holds_ended(1, 1, 0);
    let bad = Some(Verdict::Bad(Blame { cause: "", by: By::Ours }));
    metrics.records.judged(Judged { availability: bad, latency: bad });
    metrics.records.dropped.with_label_values(&[""]).inc();
    metrics.upstreams.is_of("", "", "");
    let glance = Glance {
        weight: 1,
        factor: 1.0,
        breaker: BreakerState::Closed,
        rests: false,
        credential_refused: false,
        answered: None,
        failed: None,
    };
    metrics.upstreams.stands("", &glance, (clock::now(), Duration::ZERO));
    let route = RouteLabels { model: "", operation: "", endpoint: "" };
    metrics.upstreams.watched(route, Form::Stream, Limits { head: Duration::ZERO, event: Duration::ZERO });
    metrics.node.certificate_expires.with_label_values(&[""]).set(0.0);
    metrics.watch.probe_success.with_label_values(&["", ""]).set(0);
    metrics.watch.probe_seconds.with_label_values(&["", ""]).set(0.0);
    for one in [&metrics.watch.job_last_success, &metrics.watch.job_period] {
        one.with_label_values(&[""]).set(0.0);
    }
    metrics.watch.job_late.with_label_values(&[""]).set(0);
    metrics.watch.job_failures.with_label_values(&[""]).inc();
    metrics.watch.notifications.with_label_values(&[""]).inc();
    metrics.status.with_label_values(&[""]).set(0);
}

fn table(registry: &Registry) -> String {
    let rows: BTreeMap<String, String> =
        registry.gather().iter().map(|family| (family.name().to_owned(), row(family))).collect();
    let mut text = "| name | type | labels | |\n| --- | --- | --- | --- |\n".to_owned();
    rows.values().for_each(|row| text.push_str(row));
    text
}

fn row(family: &MetricFamily) -> String {
    let kind = match family.get_field_type() {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        MetricType::SUMMARY | MetricType::UNTYPED => "?",
    };
    let labels: Vec<String> = labels(family).iter().map(|label| format!("`{label}`")).collect();
    let mut text = String::new();
    writeln!(text, "| `{}` | {kind} | {} | {} |", family.name(), labels.join(", "), family.help()).unwrap();
    text
}

fn labels(family: &MetricFamily) -> Vec<String> {
    let first = family.get_metric().first();
    first
        .map(|metric| metric.get_label().iter().map(|label| label.name().to_owned()).collect())
        .unwrap_or_default()
}
