//! Brings gauges up to date that are read rather than counted, whenever somebody asks for the metrics.

use std::time::Duration;

use filters::upstream::watchdog::Form;
use prometheus::proto::MetricFamily;

use super::Admin;
use crate::clock;
use crate::ops::metrics::upstreams::RouteLabels;

impl Admin {
    /// Everything that is measured, as it is now: for `/metrics`, and for a collector.
    #[must_use]
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.observe();
        let mut families = self.metrics.gather();
        families.extend(self.fleet.iter().flat_map(|fleet| fleet.gather()));
        families
    }

    fn observe(&self) {
        let metrics = &self.metrics;
        metrics.in_flight.set(whole(self.drain.in_flight()));
        metrics.holds_open.set(whole(self.holds.open_holds()));
        metrics.body_bytes.set(whole(self.bodies.bytes()));
        metrics.journal_unposted.set(i64::try_from(self.journal.unposted()).unwrap_or(i64::MAX));
        metrics.ready.set(i64::from(self.unready().is_none()));
        self.observe_node();
        self.observe_upstreams();
    }

    fn observe_node(&self) {
        let (node, bounds) = (&self.metrics.node, self.bounds.load());
        node.leaving.set(i64::from(!self.drain.is_ready()));
        node.cut_off.set(i64::from(self.pool.load().upstreams.is_cut_off()));
        node.connections_max.set(whole(bounds.connections_max));
        node.body_bytes_max.set(whole(bounds.bodies_bytes_max));
        node.free_nano.set(self.store.free().nano());
        node.held_nano.set(self.store.held().nano());
        node.journal_writable.set(i64::from(self.journal.is_writable()));
        node.journal_oldest_seconds.set(self.progress.lag().as_secs_f64());
        let (abandoned, provider_cost) = self.progress.booked();
        node.booked(abandoned, provider_cost);
        // A disk that cannot be asked keeps its last figures: the journal will say what is wrong with it.
        if let Ok(disk) = rustix::fs::statvfs(&self.data) {
            let bytes = |blocks: u64| i64::try_from(blocks.saturating_mul(disk.f_frsize)).unwrap_or(i64::MAX);
            node.disk_free_bytes.set(bytes(disk.f_bavail));
            node.disk_bytes.set(bytes(disk.f_blocks));
        }
        for (listener, certificate) in &self.certificates {
            if let Some(at) = certificate.expires().and_then(|at| u64::try_from(at).ok()) {
                let at = Duration::from_secs(at).as_secs_f64();
                node.certificate_expires.with_label_values(&[*listener]).set(at);
            }
        }
    }

    fn observe_upstreams(&self) {
        let (metrics, snapshot) = (&self.metrics, self.pool.load());
        for endpoint in &snapshot.catalogue.endpoints {
            let provider = &endpoint.provider;
            metrics.upstreams.is_of(&endpoint.name, &provider.name, &provider.region);
        }
        let unix = Duration::from_millis(u64::try_from(clock::unix_ms()).unwrap_or_default());
        let now = (clock::now(), unix);
        for (name, glance) in snapshot.upstreams.glances() {
            metrics.endpoint_factor.with_label_values(&[name]).set(glance.factor);
            metrics.endpoint_refused.with_label_values(&[name]).set(i64::from(!glance.admits()));
            metrics.upstreams.stands(name, &glance, now);
        }
        for form in [Form::Stream, Form::Whole] {
            for watched in snapshot.upstreams.watchdogs(form) {
                let (model, endpoint) = (watched.model.as_str(), watched.endpoint.as_str());
                let route = RouteLabels { model, operation: watched.operation.word(), endpoint };
                metrics.upstreams.watched(route, form, watched.limits);
            }
        }
    }
}

fn whole(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
