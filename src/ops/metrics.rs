//! Every metric, declared once. A metric's help text is its documentation: docs/metrics.md is made of them.
//!
//! Labels have bounded values: names from the config, words from our own enums, status codes.

pub mod calls;
pub mod node;
#[cfg(test)]
mod reference;
pub mod slo;
mod tally;
pub mod upstreams;

use prometheus::proto::MetricFamily;
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
    core::Collector,
};
use prometheus::{Gauge, GaugeVec, Histogram, IntCounter};

use crate::clock;
use calls::CallMetrics;
use node::{Follower, NodeMetrics};
use slo::RecordMetrics;
use tally::Tally;
use upstreams::UpstreamMetrics;

/// Seconds, from a tenth of a millisecond to ten minutes.
const SECONDS: [f64; 20] = [
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0, 180.0, 600.0,
];

/// The process's metrics.
pub struct Metrics {
    registry: Registry,
    tally: Tally,
    /// Finished calls, by surface and status.
    pub requests: IntCounterVec,
    /// How long calls took.
    pub request_seconds: HistogramVec,
    /// From the call's arrival to its first attempt, body read included.
    pub before_attempt_seconds: Histogram,
    /// Our own time in a call.
    pub own_seconds: Histogram,
    /// Requests that we answered with an error ourselves, by its code.
    pub rejections: IntCounterVec,
    /// Attempts at upstreams, by endpoint and how they ended.
    pub attempts: IntCounterVec,
    /// From request sent to the first meaningful event.
    pub first_event_seconds: HistogramVec,
    /// What an endpoint's health makes of its weight.
    pub endpoint_factor: GaugeVec,
    /// Whether an endpoint is left alone: its breaker is open, or it rests.
    pub endpoint_refused: IntGaugeVec,
    /// Calls in flight.
    pub in_flight: IntGauge,
    /// Holds that are open.
    pub holds_open: IntGauge,
    /// Holds refused, by reason.
    pub holds_denied: IntCounterVec,
    /// Nano-dollars charged.
    pub charged_nano: IntCounter,
    /// Nano-dollars of cost that neither hold nor balance could pay.
    pub shortfall_nano: IntCounter,
    /// Model tokens charged for, by model and direction.
    pub tokens: IntCounterVec,
    /// Calls charged by our own count.
    pub estimated: IntCounter,
    /// Bytes of request bodies in memory.
    pub body_bytes: IntGauge,
    /// Settled calls that the ledger does not have yet.
    pub journal_unposted: IntGauge,
    /// Whether new calls are wanted (1) or not (0).
    pub ready: IntGauge,
    /// Connections of callers.
    pub connections: IntGauge,
    /// Connections of callers that were not let in or were ended by us, by reason.
    pub connections_refused: IntCounterVec,
    /// How models do, as the status page says it.
    pub status: IntGaugeVec,
    /// Incidents of the status page that are open.
    pub incidents_open: IntGauge,
    /// Since when its counters count, in milliseconds since 1970.
    pub started_ms: i64,
    /// The config of the running process.
    pub config: ConfigMetrics,
    /// What callers were promised and got, and the records of it.
    pub records: RecordMetrics,
    /// What one call leaves behind.
    pub calls: CallMetrics,
    /// How upstreams stand.
    pub upstreams: UpstreamMetrics,
    /// The process itself.
    pub node: NodeMetrics,
    /// Probes, periodic jobs, and who is told.
    pub watch: WatchMetrics,
}

/// What a node of a fleet sees of the servers that it shares. The node makes them; one that is alone has none.
pub struct FleetMetrics {
    registry: Registry,
    /// Shards that no call is sent to.
    pub redis_refused: IntGauge,
    /// How long Redis took for what calls need.
    pub redis_seconds: HistogramVec,
    /// Verbs on pools of another incarnation of Redis.
    pub redis_stale: IntCounter,
    /// Refills that calls waited for, by result.
    pub refills: IntCounterVec,
    /// This node's own money.
    pub local_nano: IntGauge,
    /// Epochs that this node reports on.
    pub frozen_pools: IntGauge,
    /// Ended holds in Redis that nobody has acknowledged.
    pub outbox: IntGauge,
    /// Charges on pools that the ledger does not have.
    pub unbooked_nano: IntGauge,
    /// Whether the ledger answers.
    pub ledger_reachable: IntGauge,
    /// Since the ledger was last told that this node lives.
    pub heartbeat_age: Gauge,
    /// How long the oldest ended hold waits in Redis.
    pub outbox_oldest: Gauge,
    /// Pools on which Redis and the ledger differ.
    pub drifts: IntGauge,
    /// Nodes that are neither over nor heard of.
    pub boots_silent: IntGauge,
    written_off_nano: Follower,
}

/// What became of the config file.
pub struct ConfigMetrics {
    /// Readings of the file in the running process, by result.
    pub reloads: IntCounterVec,
    /// Whether the file as it stands was refused.
    pub refused: IntGauge,
    /// Fields of the file that count only after a restart.
    needs_restart: IntGauge,
    /// When a config was last taken over.
    applied: Gauge,
    /// The config that serves.
    version: IntGaugeVec,
    /// The catalogue of the fleet that serves.
    pub catalogue: IntGauge,
}

/// What the gateway finds out by itself, and whether it can tell somebody.
pub struct WatchMetrics {
    /// Whether a route was well when it was last asked.
    pub probe_success: IntGaugeVec,
    /// How long that took.
    pub probe_seconds: GaugeVec,
    /// Nano-dollars that probes cost.
    pub probe_cost_nano: IntCounter,
    /// Whether the day's allowance holds probes back.
    pub probes_held_back: IntGauge,
    /// When a periodic job was last done.
    pub job_last_success: GaugeVec,
    /// How often it is to be done.
    pub job_period: GaugeVec,
    /// How often it failed.
    pub job_failures: IntCounterVec,
    /// Whether it is late.
    pub job_late: IntGaugeVec,
    /// Notifications, by what became of them.
    pub notifications: IntCounterVec,
}

impl WatchMetrics {
    fn new(r: &Registry) -> prometheus::Result<Self> {
        let route = ["model", "endpoint"];
        Ok(Self {
            probe_success: gauges(
                r,
                "probe_success",
                "1 where the latest probe of a route was answered.",
                &route,
            )?,
            probe_seconds: decimals(
                r,
                "probe_seconds",
                "How long the latest probe of a route took.",
                &route,
            )?,
            probe_cost_nano: counter(
                r,
                "probe_cost_nano_dollars_total",
                "Nano-dollars that probes cost at providers; a route without a cost counts at its model's price.",
            )?,
            probes_held_back: gauge(
                r,
                "probes_held_back",
                "1 while no probe is sent because probes.cost_max_per_day is used up.",
            )?,
            job_last_success: decimals(
                r,
                "job_last_success_unix_seconds",
                "When a periodic job of this process was last done; 0 for never.",
                &["task"],
            )?,
            job_period: decimals(
                r,
                "job_period_seconds",
                "How often a periodic job is to be done.",
                &["task"],
            )?,
            job_failures: counters(
                r,
                "job_failures_total",
                "How often a periodic job has failed.",
                &["task"],
            )?,
            job_late: gauges(
                r,
                "job_late",
                "1 while a periodic job is late (heartbeats.late_after).",
                &["task"],
            )?,
            notifications: counters(
                r,
                "notifications_total",
                "Notifications by what became of them: `sent`, `retried`, or `dropped` (no room, or nobody took it for hours).",
                &["result"],
            )?,
        })
    }
}

/// Now, as everybody may see.
fn started(r: &Registry) -> prometheus::Result<i64> {
    let (gauge, now_ms) =
        (Gauge::new("tollgate_started_unix_seconds", "When the process started.")?, clock::unix_ms());
    gauge.set(seconds(now_ms));
    register(r, gauge)?;
    Ok(now_ms)
}

#[expect(clippy::cast_precision_loss, reason = "a time in milliseconds has 41 bits")]
fn seconds(unix_ms: i64) -> f64 {
    unix_ms as f64 / 1000.0
}

fn config_applied() -> Opts {
    Opts::new("tollgate_config_applied_unix_seconds", "When a config was last taken over.")
}

fn config_version() -> Opts {
    let help = "1 for the config that serves, by the first digits of its text's SHA-256.";
    Opts::new("tollgate_config_version", help)
}

fn endpoint_factor() -> Opts {
    Opts::new("tollgate_endpoint_factor", "What health makes of an endpoint's weight: 1 is all of it.")
}

fn endpoint_refused() -> Opts {
    let help = "1 while an endpoint is left alone: its breaker is open, or it rests.";
    Opts::new("tollgate_endpoint_refused", help)
}

fn status() -> Opts {
    let help = "How a model does, as the status page says it: 0 operational, 1 degraded, 2 partly down, 3 down. \
                Models of which nothing is known have none.";
    Opts::new("tollgate_status", help)
}

impl Metrics {
    /// Registers everything.
    ///
    /// # Errors
    /// When a name is declared twice; a fault of ours that a test would show.
    #[expect(clippy::too_many_lines, reason = "a list of declarations")]
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let r = &registry;
        Ok(Self {
            requests: counters(r, "requests_total", "Finished calls.", &["surface", "status"])?,
            request_seconds: histograms(r, "request_seconds", "How long calls took.", &["surface"])?,
            before_attempt_seconds: histogram(
                r,
                "before_attempt_seconds",
                "From a call's arrival to its first attempt, reading its body included.",
            )?,
            tally: Tally::default(),
            own_seconds: histogram(
                r,
                "own_seconds",
                "Our own time in a call: from its body read to its first attempt, and from the upstream's \
                         last bytes to its end.",
            )?,
            rejections: counters(
                r,
                "rejections_total",
                "Requests that were answered with an error of ours, by its code.",
                &["code"],
            )?,
            attempts: counters(
                r,
                "attempts_total",
                "Attempts at upstreams, by how they ended.",
                &["endpoint", "outcome"],
            )?,
            first_event_seconds: histograms(
                r,
                "first_event_seconds",
                "From request sent to the first meaningful event.",
                &["endpoint"],
            )?,
            endpoint_factor: register(r, GaugeVec::new(endpoint_factor(), &["endpoint"])?)?,
            endpoint_refused: register(r, IntGaugeVec::new(endpoint_refused(), &["endpoint"])?)?,
            in_flight: gauge(r, "in_flight", "Calls in flight.")?,
            holds_open: gauge(r, "holds_open", "Holds that are open.")?,
            holds_denied: counters(r, "holds_denied_total", "Holds that were refused.", &["reason"])?,
            charged_nano: counter(r, "charged_nano_dollars_total", "Nano-dollars charged.")?,
            shortfall_nano: counter(
                r,
                "shortfall_nano_dollars_total",
                "Nano-dollars of cost that neither hold nor balance could pay: a provider broke its bound.",
            )?,
            tokens: counters(r, "tokens_total", "Model tokens charged for.", &["model", "direction"])?,
            estimated: counter(
                r,
                "estimated_total",
                "Calls charged by our own count for want of a believable report.",
            )?,
            body_bytes: gauge(r, "request_body_bytes", "Bytes of request bodies in memory.")?,
            journal_unposted: gauge(
                r,
                "journal_unposted",
                "Settled calls that the ledger does not have yet.",
            )?,
            ready: gauge(r, "ready", "Whether new calls are wanted.")?,
            connections: gauge(r, "connections", "Connections of callers.")?,
            connections_refused: counters(
                r,
                "connections_refused_total",
                "Connections of callers that were not let in or were ended by us.",
                &["reason"],
            )?,
            status: register(r, IntGaugeVec::new(status(), &["model"])?)?,
            incidents_open: gauge(r, "incidents_open", "Incidents of the status page that are open.")?,
            started_ms: started(r)?,
            config: ConfigMetrics::new(r)?,
            records: RecordMetrics::new(r)?,
            calls: CallMetrics::new(r)?,
            upstreams: UpstreamMetrics::new(r)?,
            node: NodeMetrics::new(r)?,
            watch: WatchMetrics::new(r)?,
            registry,
        })
    }

    /// Gauges of endpoints are made anew at the next reading: some may have gone with their config.
    pub fn forget_endpoints(&self) {
        self.endpoint_factor.reset();
        self.endpoint_refused.reset();
        self.upstreams.forget();
    }

    /// Everything that was counted so far.
    #[must_use]
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.count_answered();
        self.registry.gather()
    }
}

/// What was gathered, in Prometheus' text format.
#[must_use]
pub fn render(families: &[MetricFamily]) -> String {
    let mut out = vec![];
    // Writing to memory fails only on a metric without samples, which then is left out.
    let _incomplete = TextEncoder::new().encode(families, &mut out);
    String::from_utf8(out).unwrap_or_default()
}

impl FleetMetrics {
    /// Registers everything.
    ///
    /// # Errors
    /// When a name is declared twice; a fault of ours that a test would show.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let r = &registry;
        let heartbeat_age = "Since the ledger was last told that this node lives.";
        let outbox_oldest =
            "How long the oldest ended hold waits in Redis that nobody has acknowledged; 0 when none waits.";
        Ok(Self {
            redis_refused: gauge(
                r,
                "redis_shards_refused",
                "Shards, of 256, that no call is sent to: the breaker of their Redis is open.",
            )?,
            redis_seconds: histograms(r, "redis_seconds", "How long Redis took to answer.", &["verb"])?,
            redis_stale: counter(
                r,
                "redis_stale_total",
                "Verbs that Redis refused since another process answers, or it has lost its memory.",
            )?,
            refills: counters(
                r,
                "refills_total",
                "Refills of pools that calls waited for: `more`, `nothing`, or `unknown` when nobody could tell.",
                &["result"],
            )?,
            local_nano: gauge(
                r,
                "local_tranche_nano_dollars",
                "Nano-dollars that this node alone may spend, for when Redis is away.",
            )?,
            frozen_pools: gauge(
                r,
                "frozen_pools",
                "Shards' epochs whose Redis is gone and whose money is not all free again.",
            )?,
            outbox: gauge(r, "outbox_length", "Ended holds in Redis that nobody has acknowledged yet.")?,
            unbooked_nano: gauge(
                r,
                "unbooked_nano_dollars",
                "Nano-dollars that were charged on pools and are not known to be booked.",
            )?,
            ledger_reachable: gauge(
                r,
                "ledger_reachable",
                "Whether the ledger answers. While it does not, calls go on and the books are read-only.",
            )?,
            heartbeat_age: register(r, Gauge::new("tollgate_heartbeat_age_seconds", heartbeat_age)?)?,
            outbox_oldest: register(r, Gauge::new("tollgate_outbox_oldest_seconds", outbox_oldest)?)?,
            drifts: gauge(
                r,
                "reconcile_drifts",
                "Pools on which Redis and the ledger differed at the last two looks, with nothing on its way.",
            )?,
            boots_silent: gauge(
                r,
                "boots_silent",
                "Nodes that have not ended and have not been heard of for a minute: their money is parked.",
            )?,
            written_off_nano: Follower::new(counter(
                r,
                "written_off_nano_dollars_total",
                "Nano-dollars of use that no money was left for when it was booked, after a node or a Redis was lost.",
            )?),
            registry,
        })
    }

    /// What this process has written off by now, in nano-dollars.
    pub fn written_off(&self, total: u64) {
        self.written_off_nano.catch_up(total);
    }

    /// As [`Metrics::gather`].
    #[must_use]
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }
}

impl ConfigMetrics {
    fn new(r: &Registry) -> prometheus::Result<Self> {
        Ok(Self {
            reloads: counters(
                r,
                "config_reloads_total",
                "Readings of the config file in the running process.",
                &["result"],
            )?,
            refused: gauge(
                r,
                "config_refused",
                "1 while the config file or the fleet's catalogue has faults and an older one serves.",
            )?,
            needs_restart: gauge(
                r,
                "config_needs_restart",
                "Fields of the config file that count only after a restart.",
            )?,
            applied: register(r, Gauge::with_opts(config_applied())?)?,
            version: register(r, IntGaugeVec::new(config_version(), &["version"])?)?,
            catalogue: gauge(
                r,
                "config_catalogue_version",
                "The version of the fleet's catalogue that serves; 0 where the config file names its own, or none was \
                 published.",
            )?,
        })
    }

    /// A config was taken over.
    pub fn taken_over(&self, version: &str, needs_restart: usize) {
        self.refused.set(0);
        self.needs_restart.set(i64::try_from(needs_restart).unwrap_or(i64::MAX));
        self.applied.set(seconds(clock::unix_ms()));
        self.version.reset();
        self.version.with_label_values(&[version]).set(1);
    }
}

fn register<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> prometheus::Result<C> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

pub(super) fn counters(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> prometheus::Result<IntCounterVec> {
    register(registry, IntCounterVec::new(Opts::new(format!("tollgate_{name}"), help), labels)?)
}

fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntGaugeVec> {
    register(registry, IntGaugeVec::new(Opts::new(format!("tollgate_{name}"), help), labels)?)
}

fn decimals(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
    register(registry, GaugeVec::new(Opts::new(format!("tollgate_{name}"), help), labels)?)
}

pub(super) fn counter(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntCounter> {
    register(registry, IntCounter::new(format!("tollgate_{name}"), help)?)
}

pub(super) fn gauge(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntGauge> {
    register(registry, IntGauge::new(format!("tollgate_{name}"), help)?)
}

fn histogram(registry: &Registry, name: &str, help: &str) -> prometheus::Result<Histogram> {
    let opts = HistogramOpts::new(format!("tollgate_{name}"), help).buckets(SECONDS.to_vec());
    register(registry, Histogram::with_opts(opts)?)
}

fn histograms(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> prometheus::Result<HistogramVec> {
    let opts = HistogramOpts::new(format!("tollgate_{name}"), help).buckets(SECONDS.to_vec());
    register(registry, HistogramVec::new(opts, labels)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_registers_and_has_help() {
        let metrics = Metrics::new().unwrap();
        metrics.requests.with_label_values(&["chat", "200"]).inc();
        let text = render(&metrics.gather());
        assert!(text.contains("tollgate_requests_total{status=\"200\",surface=\"chat\"} 1"));
        assert!(text.lines().filter(|l| l.starts_with("# HELP")).count() > 5);
        let started = seconds(metrics.started_ms).to_string();
        assert!(text.contains(&format!("\ntollgate_started_unix_seconds {started}\n")), "{started}: {text}");
        let fleet = render(&FleetMetrics::new().unwrap().gather());
        let names = |text: &str| -> Vec<String> {
            text.lines()
                .filter_map(|l| Some(l.strip_prefix("# HELP ")?.split(' ').next()?.to_owned()))
                .collect()
        };
        let all = names(&text);
        assert!(names(&fleet).iter().all(|name| !all.contains(name)), "a page has each name once");
    }
}
