//! Metrics as the collector reads them.
//!
//! `tollgate_*` keep their names, so that rules and dashboards fit whichever way they came; those of OpenTelemetry's
//! conventions get their own names back, which Prometheus cannot write. Counters and histograms are sums since the start of
//! the process. A label without a value is none.

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum,
};
use prometheus::proto::{self, MetricFamily, MetricType};
use prost::Message as _;

use super::Origin;
use super::wire::{resource, scope, text};

/// Points of one message. A histogram's has some 600 bytes.
const POINTS_MAX: usize = 1000;
/// What the conventions call them, in the order of `ops/metrics/calls.rs`; and in which unit they are.
const NAMES: [(&str, &str, &str); 5] = [
    ("gen_ai_client_token_usage", "gen_ai.client.token.usage", "{token}"),
    ("gen_ai_client_operation_duration_seconds", "gen_ai.client.operation.duration", "s"),
    ("gen_ai_server_request_duration_seconds", "gen_ai.server.request.duration", "s"),
    ("gen_ai_server_time_to_first_token_seconds", "gen_ai.server.time_to_first_token", "s"),
    ("gen_ai_server_time_per_output_token_seconds", "gen_ai.server.time_per_output_token", "s"),
];
/// The same of labels, with what stands beside them.
const LABELS: [(&str, &str); 5] = [
    ("gen_ai_operation_name", "gen_ai.operation.name"),
    ("gen_ai_provider_name", "gen_ai.provider.name"),
    ("gen_ai_request_model", "gen_ai.request.model"),
    ("gen_ai_token_type", "gen_ai.token.type"),
    ("error_type", "error.type"),
];

/// When counters began, and when they were read, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) since: u64,
    pub(super) at: u64,
}

/// What was gathered, in messages of at most [`POINTS_MAX`] points, each made when it is asked for.
pub(super) fn messages<'a>(
    origin: &'a Origin,
    families: &'a [MetricFamily],
    times: Times,
) -> impl Iterator<Item = Vec<u8>> + 'a {
    let pieces =
        |family: &'a MetricFamily| family.get_metric().chunks(POINTS_MAX).map(move |points| (family, points));
    let mut pieces = families.iter().flat_map(pieces).peekable();
    std::iter::from_fn(move || {
        let (mut metrics, mut room) = (vec![], POINTS_MAX);
        while let Some((family, points)) = pieces.next_if(|(_, points)| points.len() <= room) {
            room -= points.len();
            metrics.extend(metric(family, points, times));
        }
        (!metrics.is_empty()).then(|| message(origin, metrics))
    })
}

fn message(origin: &Origin, metrics: Vec<Metric>) -> Vec<u8> {
    let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, ..ScopeMetrics::default() }];
    let resource = Some(resource(origin));
    let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
    ExportMetricsServiceRequest { resource_metrics }.encode_to_vec()
}

/// Some points of a family. `None`: of a kind that we have none of.
fn metric(family: &MetricFamily, points: &[proto::Metric], times: Times) -> Option<Metric> {
    let cumulative = AggregationTemporality::Cumulative.into();
    let data = match family.get_field_type() {
        MetricType::COUNTER => {
            let point =
                |point: &proto::Metric| number(point, point.get_counter().get_value(), times.since, times);
            let data_points = points.iter().map(point).collect();
            Data::Sum(Sum { data_points, aggregation_temporality: cumulative, is_monotonic: true })
        }
        MetricType::GAUGE => {
            let point = |point: &proto::Metric| number(point, point.get_gauge().get_value(), 0, times);
            Data::Gauge(Gauge { data_points: points.iter().map(point).collect() })
        }
        MetricType::HISTOGRAM => {
            let data_points = points.iter().map(|point| histogram(point, times)).collect();
            Data::Histogram(Histogram { data_points, aggregation_temporality: cumulative })
        }
        MetricType::SUMMARY | MetricType::UNTYPED => return None,
    };
    let (name, unit) = name_and_unit(family.name());
    Some(Metric {
        name: name.to_owned(),
        description: family.help().to_owned(),
        unit: unit.to_owned(),
        data: Some(data),
        ..Metric::default()
    })
}

/// `since`: 0 for what has no beginning.
fn number(point: &proto::Metric, value: f64, since: u64, times: Times) -> NumberDataPoint {
    NumberDataPoint {
        attributes: attributes(point),
        start_time_unix_nano: since,
        time_unix_nano: times.at,
        value: Some(Value::AsDouble(value)),
        ..NumberDataPoint::default()
    }
}

/// Prometheus counts up to each bound, OpenTelemetry between two of them, and what is above the last one.
fn histogram(point: &proto::Metric, times: Times) -> HistogramDataPoint {
    let of = point.get_histogram();
    let bounds = of.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
    let (mut explicit_bounds, mut bucket_counts, mut below) = (vec![], vec![], 0);
    for bucket in bounds {
        explicit_bounds.push(bucket.upper_bound());
        bucket_counts.push(bucket.cumulative_count().saturating_sub(below));
        below = bucket.cumulative_count();
    }
    bucket_counts.push(of.get_sample_count().saturating_sub(below));
    HistogramDataPoint {
        attributes: attributes(point),
        start_time_unix_nano: times.since,
        time_unix_nano: times.at,
        count: of.get_sample_count(),
        sum: Some(of.get_sample_sum()),
        bucket_counts,
        explicit_bounds,
        ..HistogramDataPoint::default()
    }
}

fn attributes(point: &proto::Metric) -> Vec<KeyValue> {
    let told = point.get_label().iter().filter(|label| !label.value().is_empty());
    let name_of = |name| LABELS.iter().find(|(ours, _)| *ours == name).map_or(name, |(_, theirs)| *theirs);
    told.map(|label| text(name_of(label.name()), label.value())).collect()
}

fn name_and_unit(name: &str) -> (&str, &'static str) {
    if let Some((_, theirs, unit)) = NAMES.iter().find(|(ours, _, _)| *ours == name) {
        return (*theirs, *unit);
    }
    match name.trim_end_matches("_total") {
        spans if spans.ends_with("_seconds") => (name, "s"),
        sizes if sizes.ends_with("_bytes") => (name, "By"),
        _ => (name, ""),
    }
}

/// Milliseconds since 1970 in nanoseconds.
pub(super) fn unix_nano(unix_ms: i64) -> u64 {
    u64::try_from(unix_ms).unwrap_or_default().saturating_mul(1_000_000)
}

#[cfg(test)]
mod tests {
    use prometheus::core::Collector as _;
    use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, Opts};

    use super::*;

    const TIMES: Times = Times { since: 5, at: 9 };

    fn origin() -> Origin {
        Origin { instance: "one".to_owned(), node: "host:1".to_owned() }
    }

    fn sent(families: &[MetricFamily]) -> Vec<Vec<Metric>> {
        let metrics = |message: Vec<u8>| {
            let message = ExportMetricsServiceRequest::decode(message.as_slice()).unwrap();
            let [of] = message.resource_metrics.try_into().unwrap();
            let [of] = of.scope_metrics.try_into().unwrap();
            of.metrics
        };
        messages(&origin(), families, TIMES).map(metrics).collect()
    }

    #[test]
    fn a_counter_is_a_sum_since_the_start_and_a_gauge_has_none() {
        let counter = IntCounterVec::new(Opts::new("tollgate_x_total", "X."), &["a", "b"]).unwrap();
        counter.with_label_values(&["1", ""]).inc_by(7);
        let gauge = GaugeVec::new(Opts::new("tollgate_y_seconds", "Y."), &["a"]).unwrap();
        gauge.with_label_values(&["1"]).set(0.5);
        let [metrics] = sent(&[counter.collect(), gauge.collect()].concat()).try_into().unwrap();
        let [x, y] = metrics.try_into().unwrap();
        assert_eq!(
            (x.name.as_str(), x.description.as_str(), x.unit.as_str()),
            ("tollgate_x_total", "X.", "")
        );
        let Some(Data::Sum(sum)) = x.data else { panic!("{:?}", x.data) };
        assert!(sum.is_monotonic && sum.aggregation_temporality() == AggregationTemporality::Cumulative);
        let [point] = sum.data_points.try_into().unwrap();
        assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (5, 9));
        assert_eq!(point.value, Some(Value::AsDouble(7.0)));
        assert_eq!(point.attributes, [text("a", "1")], "a label without a value is none");
        assert_eq!(y.unit, "s");
        let Some(Data::Gauge(gauge)) = y.data else { panic!("{:?}", y.data) };
        let [point] = gauge.data_points.try_into().unwrap();
        assert_eq!((point.start_time_unix_nano, point.value), (0, Some(Value::AsDouble(0.5))));
    }

    #[test]
    fn a_histogram_counts_between_its_bounds_and_above_them() {
        let opts = HistogramOpts::new("gen_ai_client_token_usage", "T.").buckets(vec![1.0, 2.0, 4.0]);
        let histogram = HistogramVec::new(opts, &["gen_ai_token_type"]).unwrap();
        for value in [0.5, 1.0, 3.0, 9.0, 9.0] {
            histogram.with_label_values(&["input"]).observe(value);
        }
        let [[metric]] = <[Vec<Metric>; 1]>::try_from(sent(&histogram.collect()))
            .unwrap()
            .map(|metrics| <[Metric; 1]>::try_from(metrics).unwrap());
        assert_eq!((metric.name.as_str(), metric.unit.as_str()), ("gen_ai.client.token.usage", "{token}"));
        let Some(Data::Histogram(histogram)) = metric.data else { panic!("{:?}", metric.data) };
        let [point] = histogram.data_points.try_into().unwrap();
        assert_eq!(
            (point.explicit_bounds.as_slice(), point.bucket_counts.as_slice()),
            ([1.0, 2.0, 4.0].as_slice(), [2, 0, 1, 2].as_slice())
        );
        assert_eq!((point.count, point.sum, point.start_time_unix_nano), (5, Some(22.5), 5));
        assert_eq!(point.attributes, [text("gen_ai.token.type", "input")]);
    }

    #[test]
    fn a_reading_of_many_points_is_sent_in_pieces_and_every_point_once() {
        let family = |name: &str, points: usize| {
            let gauge = GaugeVec::new(Opts::new(name, "G."), &["n"]).unwrap();
            (0..points).for_each(|n| gauge.with_label_values(&[&n.to_string()]).set(1.0));
            gauge.collect()
        };
        let all = [family("a", 999), family("b", 2), family("c", 2_500), vec![], family("d", 1)].concat();
        let points = |metric: &Metric| match &metric.data {
            Some(Data::Gauge(gauge)) => (metric.name.clone(), gauge.data_points.len()),
            data => panic!("{data:?}"),
        };
        let found: Vec<Vec<(String, usize)>> =
            sent(&all).iter().map(|metrics| metrics.iter().map(points).collect()).collect();
        let of = |name: &str, points| (name.to_owned(), points);
        let expected = [
            vec![of("a", 999)],
            vec![of("b", 2)],
            vec![of("c", 1000)],
            vec![of("c", 1000)],
            vec![of("c", 500), of("d", 1)],
        ];
        assert_eq!(found, expected);
        assert_eq!(sent(&[]), [[]; 0]);
    }

    #[test]
    fn every_name_of_the_conventions_is_translated() {
        let reference = include_str!("../../../docs/metrics.md");
        let names = reference.lines().filter_map(|row| row.strip_prefix("| `")?.split('`').next());
        let theirs: Vec<&str> = names.filter(|name| name.starts_with("gen_ai_")).collect();
        assert_eq!(theirs.len(), NAMES.len());
        assert!(theirs.iter().all(|name| name_and_unit(name).0.starts_with("gen_ai.")), "{theirs:?}");
    }
}
