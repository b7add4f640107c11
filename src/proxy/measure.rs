//! What a finished call is counted as, in one place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::answer::Ended;
use filters::ids::EndpointId;
use filters::upstream::board::Route;

use super::ctx::{Call, Ctx, Current};
use super::gate::Receipt;
use super::gateway::Gateway;
use crate::ops::metrics::calls::{Answered, Counters, Labels};

/// How a call ended for its caller.
pub(super) struct End<'a> {
    pub(super) status: u16,
    /// `ok`, or why not.
    pub(super) code: &'static str,
    pub(super) ended: &'a Ended,
    pub(super) now: Instant,
}

/// What nearly all served calls have.
const OK: u16 = 200;

impl Gateway {
    /// Counts a request that is over.
    pub(super) fn measure(&self, ctx: &Ctx, call: Option<&Call>, receipt: &Receipt, end: &End<'_>) {
        let answering = call.and_then(|call| self.answering(ctx, call));
        match &answering {
            Some((_, counters)) if end.status == OK => counters.requests.inc(),
            _ => {
                let mut digits = itoa::Buffer::new();
                let labels = [ctx.surface, digits.format(end.status)];
                self.metrics.requests.with_label_values(&labels).inc();
            }
        }
        let took = end.now.saturating_duration_since(ctx.arrived);
        if let Some(call) = call {
            let released = u64::try_from(receipt.settlement.released.nano()).unwrap_or_default();
            self.metrics.calls.hold_ended(receipt.settlement.charged().is_positive(), released);
            self.measure_attempt(call, answering.as_ref().map(|(_, counters)| counters), end);
        }
        match (call, answering) {
            (Some(call), Some((current, counters))) => {
                counters.answered(&answered(ctx, call, current, receipt, end));
            }
            (call, _) => {
                self.metrics.request_seconds.with_label_values(&[ctx.surface]).observe(took.as_secs_f64());
                if let Some(call) = call {
                    self.measure_unanswered(call, receipt, end.code, took);
                }
            }
        }
    }

    /// The attempt whose answer is the caller's, and what its route counts.
    fn answering(&self, ctx: &Ctx, call: &Call) -> Option<(Current, Arc<Counters>)> {
        let current = call.current.filter(|_| call.gate.is_committed())?;
        let route = Route { model: call.choices.of(current.endpoint)?.id, endpoint: current.endpoint };
        let labels = call.labels(Some(current.endpoint))?;
        Some((current, call.snapshot.counted.of(route, || self.metrics.of(ctx.surface, labels))))
    }

    /// The attempt that was under way at the end.
    fn measure_attempt(&self, call: &Call, counters: Option<&Arc<Counters>>, end: &End<'_>) {
        match (counters, end.ended) {
            (Some(counters), Ended::Properly) => counters.served.inc(),
            (_, ended) => {
                let endpoint = call.current.and_then(|current| call.endpoint(current.endpoint).ok());
                if let Some(endpoint) = endpoint {
                    let labels = [endpoint.name.as_str(), how(ended).0];
                    self.metrics.attempts.with_label_values(&labels).inc();
                }
            }
        }
    }

    fn measure_unanswered(&self, call: &Call, receipt: &Receipt, code: &str, took: Duration) {
        let (model, usage) = (call.model_name(), &receipt.used.usage);
        self.metrics.tokens.with_label_values(&[model, "input"]).inc_by(usage.prompt());
        self.metrics.tokens.with_label_values(&[model, "output"]).inc_by(usage.output);
        if let Some(labels) = call.labels(None) {
            self.metrics.calls.call_failed(labels, code, took);
        }
    }
}

fn answered(ctx: &Ctx, call: &Call, current: Current, receipt: &Receipt, end: &End<'_>) -> Answered {
    let (first_byte, first_event) = call.gate.reached();
    Answered {
        first_byte,
        first_event: call.gate.first_event(),
        first_token: first_event.map(|at| at.saturating_duration_since(ctx.arrived)),
        streamed: call.gate.streamed_for(),
        attempt: end.now.saturating_duration_since(current.began),
        call: end.now.saturating_duration_since(ctx.arrived),
        input_tokens: receipt.used.usage.prompt(),
        output_tokens: receipt.used.usage.output,
    }
}

/// How an attempt ended, and why.
pub(super) const fn how(ended: &Ended) -> (&'static str, &'static str) {
    match ended {
        Ended::Properly => ("served", "ok"),
        Ended::Broken(failure) => ("cut", failure.word()),
        Ended::Not => ("left", "caller_left"),
    }
}

impl Call {
    /// The labels of an endpoint, or of the asked model where no attempt stands.
    pub(super) fn labels(&self, endpoint: Option<EndpointId>) -> Option<Labels<'_>> {
        let model =
            endpoint.and_then(|endpoint| self.choices.of(endpoint)).or_else(|| self.choices.first())?;
        let named = endpoint.and_then(|endpoint| self.endpoint(endpoint).ok());
        Some(Labels {
            endpoint: named.map_or("", |endpoint| endpoint.name.as_str()),
            operation: self.operation,
            dialect: named.map_or_else(|| self.operation.dialect(), |endpoint| endpoint.provider.dialect),
            model: model.model.name.as_str(),
        })
    }
}
