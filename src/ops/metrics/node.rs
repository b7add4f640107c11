//! The process itself: what it was built from, what it has leased, how much room it has.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::{counter, counters, gauge, register};

/// Gauges of the process.
pub struct NodeMetrics {
    /// Whether it is on its way out.
    pub leaving: IntGauge,
    /// Whether it reaches none of its upstreams.
    pub cut_off: IntGauge,
    /// The most connections of callers.
    pub connections_max: IntGauge,
    /// The most bytes of request bodies.
    pub body_bytes_max: IntGauge,
    /// Nano-dollars leased to this process that no call holds.
    pub free_nano: IntGauge,
    /// Nano-dollars leased to this process that calls hold.
    pub held_nano: IntGauge,
    /// Whether the journal can be written.
    pub journal_writable: IntGauge,
    /// How long the oldest settled call waits for the ledger.
    pub journal_oldest_seconds: Gauge,
    /// The room in the data folder.
    pub disk_free_bytes: IntGauge,
    pub disk_bytes: IntGauge,
    /// When certificates end.
    pub certificate_expires: GaugeVec,
    /// What no collector has taken, by signal.
    pub telemetry_dropped: IntCounterVec,
    abandoned_nano: Follower,
    provider_cost_nano: Follower,
}

/// Each signal has its count from the start: whoever watches sees the first of them.
fn telemetry_dropped(r: &Registry) -> prometheus::Result<IntCounterVec> {
    let dropped = counters(
        r,
        "telemetry_dropped_total",
        "What the collector did not take in time: calls whose spans are lost (`traces`), and readings of all metrics \
         (`metrics`), of which the next has every counter again.",
        &["signal"],
    )?;
    for signal in ["traces", "metrics"] {
        let _there = dropped.with_label_values(&[signal]);
    }
    Ok(dropped)
}

/// A counter of what is counted elsewhere. Several may read at once: nothing is counted twice.
pub(super) struct Follower {
    counter: IntCounter,
    seen: AtomicU64,
}

impl NodeMetrics {
    pub(super) fn new(r: &Registry) -> prometheus::Result<Self> {
        let build = Opts::new("tollgate_build_info", "Always 1: the version of the binary.");
        let build = register(r, IntGaugeVec::new(build, &["version"])?)?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let expires = Opts::new(
            "tollgate_certificate_expires_unix_seconds",
            "When the certificate ends that a listener shows to callers.",
        );
        let oldest =
            "How long the oldest settled call waits that the ledger does not have; 0 when none waits.";
        Ok(Self {
            leaving: gauge(
                r,
                "leaving",
                "1 while the process is on its way out: it is not ready on purpose.",
            )?,
            cut_off: gauge(
                r,
                "cut_off",
                "1 while this node reaches none of its upstreams: its own network fails.",
            )?,
            connections_max: gauge(r, "connections_max", "The most connections of callers that are let in.")?,
            body_bytes_max: gauge(
                r,
                "request_body_bytes_max",
                "The most bytes of request bodies in memory; beyond it calls are turned away.",
            )?,
            free_nano: gauge(
                r,
                "free_nano_dollars",
                "Nano-dollars that are leased to this process alone and that no call holds.",
            )?,
            held_nano: gauge(
                r,
                "held_nano_dollars",
                "Nano-dollars that are leased to this process alone and that running calls hold.",
            )?,
            journal_writable: gauge(
                r,
                "journal_writable",
                "0 while the journal cannot be written: no call is taken.",
            )?,
            journal_oldest_seconds: register(r, Gauge::new("tollgate_journal_oldest_seconds", oldest)?)?,
            disk_free_bytes: gauge(r, "disk_free_bytes", "Bytes left where the data folder is.")?,
            disk_bytes: gauge(r, "disk_bytes", "The size of the disk where the data folder is.")?,
            certificate_expires: register(r, GaugeVec::new(expires, &["listener"])?)?,
            telemetry_dropped: telemetry_dropped(r)?,
            abandoned_nano: Follower::new(counter(
                r,
                "abandoned_nano_dollars_total",
                "Nano-dollars that calls cost us at providers and nobody was charged for: their callers left early, or an \
                 attempt broke off. Of calls that this process has booked.",
            )?),
            provider_cost_nano: Follower::new(counter(
                r,
                "provider_cost_nano_dollars_total",
                "Nano-dollars that calls cost us at providers, as the prices in the config say. Of calls that this process \
                 has booked.",
            )?),
        })
    }

    /// What the process has booked by now, in nano-dollars.
    pub fn booked(&self, abandoned: u64, provider_cost: u64) {
        self.abandoned_nano.catch_up(abandoned);
        self.provider_cost_nano.catch_up(provider_cost);
    }
}

impl Follower {
    pub(super) const fn new(counter: IntCounter) -> Self {
        Self { counter, seen: AtomicU64::new(0) }
    }

    /// It is so much by now.
    pub(super) fn catch_up(&self, total: u64) {
        let before = self.seen.fetch_max(total, Ordering::Relaxed);
        self.counter.inc_by(total.saturating_sub(before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_reads_at_the_same_time_counts_nothing_twice() {
        let follower = Follower::new(IntCounter::new("followed", "Followed.").unwrap());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..=10_000).for_each(|total| follower.catch_up(total)));
            }
        });
        assert_eq!(follower.counter.get(), 10_000);
        follower.catch_up(9_999);
        assert_eq!(follower.counter.get(), 10_000, "a counter never falls");
    }
}
