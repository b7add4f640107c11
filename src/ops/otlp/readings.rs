//! All metrics, read now and then as `/metrics` reads them, and sent.
//!
//! A reading is sent in messages of a bounded size, one after the other. One that the collector does not take ends there and
//! is dropped: nothing is kept for later, since the next reading has every counter again. What it lacks then is the time
//! between.

use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use prometheus::IntCounter;
use prometheus::proto::MetricFamily;
use prost::Message as _;

use super::collector::{Collector, Refused};
use super::points::{Times, messages, unix_nano};
use super::{LAST_PATIENCE, Origin, PATIENCE};
use crate::clock;
use crate::ops::Metrics;
use crate::ops::heartbeat::{self, Job};

/// How long the messages of a reading may take together.
const READING_MAX: Duration = Duration::from_secs(10);

/// Reads and sends.
pub(super) struct Readings {
    collector: Collector,
    origin: Arc<Origin>,
    every: Duration,
    /// Since when counters count, in nanoseconds since 1970.
    since: u64,
    gather: Box<dyn Fn() -> Vec<MetricFamily> + Send>,
    dropped: IntCounter,
    job: Arc<Job>,
    /// Said already.
    fails: bool,
}

/// Why a reading was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Dropped {
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("it took too long for all of it")]
    Late,
    #[error("it took only a part of it")]
    InPart,
}

impl Readings {
    pub(super) fn new(
        collector: Collector,
        origin: Arc<Origin>,
        every: Duration,
        metrics: &Metrics,
        gather: Box<dyn Fn() -> Vec<MetricFamily> + Send>,
    ) -> Self {
        Self {
            collector,
            origin,
            every,
            since: unix_nano(metrics.started_ms),
            gather,
            dropped: metrics.node.telemetry_dropped.with_label_values(&["metrics"]),
            job: heartbeat::job("metrics_export", every),
            fails: false,
        }
    }

    /// Goes on until `stop` is closed, and sends a last reading then.
    pub(super) fn run(mut self, stop: &Receiver<()>) {
        let mut due = clock::now() + self.every;
        while let Err(RecvTimeoutError::Timeout) =
            stop.recv_timeout(due.saturating_duration_since(clock::now()))
        {
            let began = clock::now();
            self.job.begins();
            let sent = self.send(PATIENCE, began + READING_MAX);
            self.job.ended(&sent);
            due = began + self.every;
            if let Err(Dropped::Refused(Refused { after: Some(after), .. })) = sent {
                due = due.max(clock::now() + after);
            }
        }
        let _told: Result<(), Dropped> = self.send(LAST_PATIENCE, clock::now() + LAST_PATIENCE);
        self.job.is_over();
    }

    fn send(&mut self, patience: Duration, end: Instant) -> Result<(), Dropped> {
        let times = Times { since: self.since, at: unix_nano(clock::unix_ms()).max(self.since) };
        let families = (self.gather)();
        let sent = messages(&self.origin, &families, times).try_for_each(|message| {
            let left = end.saturating_duration_since(clock::now());
            if left.is_zero() {
                return Err(Dropped::Late);
            }
            let said = self.collector.post("metrics", &message, patience.min(left))?;
            if is_whole(&said) { Ok(()) } else { Err(Dropped::InPart) }
        });
        match &sent {
            Ok(()) => {
                if mem::take(&mut self.fails) {
                    tracing::info!("the collector takes metrics again");
                }
            }
            Err(error) => {
                self.dropped.inc();
                if !mem::replace(&mut self.fails, true) {
                    tracing::warn!(%error, "the collector does not take metrics: a reading is dropped");
                }
            }
        }
        sent
    }
}

/// Whether every point was taken. Who answers in other words than the protocol's has not said that one was not.
fn is_whole(said: &[u8]) -> bool {
    let said = ExportMetricsServiceResponse::decode(said).unwrap_or_default();
    said.partial_success.is_none_or(|part| part.rejected_data_points == 0)
}
