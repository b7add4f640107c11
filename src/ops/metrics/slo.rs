//! Metrics of what callers were promised, and of the records of it. Every call counts, so its counters are found once.

use filters::slo::judge::{Judged, Verdict};
use prometheus::{IntCounter, IntCounterVec, IntGauge, Registry};

use super::{counter, counters, gauge};

/// Good and bad calls, as docs/slo.md has them.
struct SloMetrics {
    availability: Outcomes,
    latency: Outcomes,
    bad: IntCounterVec,
}

struct Outcomes {
    objective: &'static str,
    good: IntCounter,
    bad: IntCounter,
}

/// Records that are kept beside the books.
pub struct RecordMetrics {
    slo: SloMetrics,
    /// Attempts that were written.
    pub written: IntCounter,
    /// Records that nobody will find, by where they were lost.
    pub dropped: IntCounterVec,
    /// Attempts that wait to be written.
    pub waiting: IntGauge,
}

impl SloMetrics {
    fn new(r: &Registry) -> prometheus::Result<Self> {
        let events = counters(
            r,
            "slo_events_total",
            "Calls that count for an objective, availability or latency, good and bad; docs/slo.md says which.",
            &["objective", "outcome"],
        )?;
        let outcomes = |objective| Outcomes {
            objective,
            good: events.with_label_values(&[objective, "good"]),
            bad: events.with_label_values(&[objective, "bad"]),
        };
        Ok(Self {
            availability: outcomes("availability"),
            latency: outcomes("latency"),
            bad: counters(
                r,
                "slo_bad_total",
                "Calls that were bad for an objective, by cause: the last failure of an upstream, `slow`, or the code \
                 of an error of ours.",
                &["objective", "cause"],
            )?,
        })
    }

    fn count(&self, availability: Option<Verdict>, latency: Option<Verdict>) {
        for (outcomes, verdict) in [(&self.availability, availability), (&self.latency, latency)] {
            match verdict {
                None => {}
                Some(Verdict::Good) => outcomes.good.inc(),
                Some(Verdict::Bad(blame)) => {
                    outcomes.bad.inc();
                    self.bad.with_label_values(&[outcomes.objective, blame.cause]).inc();
                }
            }
        }
    }
}

impl RecordMetrics {
    pub(super) fn new(r: &Registry) -> prometheus::Result<Self> {
        Ok(Self {
            slo: SloMetrics::new(r)?,
            written: counter(r, "records_written_total", "Attempts that were written to the decision log.")?,
            dropped: counters(
                r,
                "records_dropped_total",
                "Records that are lost: `queue` was full, `attempts` or `sums` waited too long for their database, or \
                 it `refused` them.",
                &["reason"],
            )?,
            waiting: gauge(r, "records_waiting", "Attempts that wait to be written to the decision log.")?,
        })
    }

    /// Counts a call for what was promised.
    pub fn judged(&self, judged: Judged) {
        let Judged { availability, latency } = judged;
        self.slo.count(availability, latency);
    }
}
