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
    /// Our own time in it, where it is known.
    pub(super) own: Option<Duration>,
    pub(super) now: Instant,
}

/// What nearly all served calls have.
const OK: u16 = 200;

impl Gateway {
    /// Counts a request that is over.
    pub(super) fn measure(&self, ctx: &Ctx, call: Option<&Call>, receipt: &Receipt, end: &End<'_>) {
        let answering = call.and_then(|call| Some((call, self.answering(ctx, call)?)));
        if answering.is_none() || end.status != OK {
            let mut digits = itoa::Buffer::new();
            let labels = [ctx.surface, digits.format(end.status)];
            self.metrics.requests.with_label_values(&labels).inc();
        }
        match answering {
            Some((call, (current, counters))) => {
                let answered = answered(ctx, call, current, receipt, end);
                if !answered.is_whole {
                    self.measure_attempt(call, end);
                }
                self.metrics.answered(counters, answered);
            }
            None => self.measure_unanswered(ctx, call, receipt, end),
        }
    }

    /// The attempt whose answer is the caller's, and what its route counts.
    fn answering(&self, ctx: &Ctx, call: &Call) -> Option<(Current, Arc<Counters>)> {
        let current = call.current.filter(|_| call.gate.is_committed())?;
        let route = Route { model: call.choices.of(current.endpoint)?.id, endpoint: current.endpoint };
        let labels = call.labels(Some(current.endpoint))?;
        Some((current, call.snapshot.counted.of(route, || self.metrics.of(ctx.surface, labels))))
    }

    /// The attempt that was under way at the end, unless its answer was whole.
    fn measure_attempt(&self, call: &Call, end: &End<'_>) {
        let endpoint = call.current.and_then(|current| call.endpoint(current.endpoint).ok());
        if let Some(endpoint) = endpoint {
            let labels = [endpoint.name.as_str(), how(end.ended).0];
            self.metrics.attempts.with_label_values(&labels).inc();
        }
    }

    fn measure_unanswered(&self, ctx: &Ctx, call: Option<&Call>, receipt: &Receipt, end: &End<'_>) {
        let took = end.now.saturating_duration_since(ctx.arrived);
        self.metrics.request_seconds.with_label_values(&[ctx.surface]).observe(took.as_secs_f64());
        if let Some(own) = end.own {
            self.metrics.own_seconds.observe(own.as_secs_f64());
        }
        let Some(call) = call else { return };
        self.measure_attempt(call, end);
        let (model, usage, charged) = (call.model_name(), &receipt.used.usage, charged(receipt));
        self.metrics.tokens.with_label_values(&[model, "input"]).inc_by(usage.prompt());
        self.metrics.tokens.with_label_values(&[model, "output"]).inc_by(usage.output);
        self.metrics.charged_nano.inc_by(charged);
        self.metrics.estimated.inc_by(u64::from(receipt.used.estimated));
        self.metrics.calls.holds_ended(u64::from(charged > 0), u64::from(charged == 0), released(receipt));
        if let Some(labels) = call.labels(None) {
            self.metrics.calls.call_failed(labels, end.code, took);
        }
    }
}

fn charged(receipt: &Receipt) -> u64 {
    u64::try_from(receipt.settlement.charged().nano()).unwrap_or_default()
}

fn released(receipt: &Receipt) -> u64 {
    u64::try_from(receipt.settlement.released.nano()).unwrap_or_default()
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
        own: end.own,
        input_tokens: receipt.used.usage.prompt(),
        output_tokens: receipt.used.usage.output,
        charged_nano: charged(receipt),
        released_nano: released(receipt),
        estimated: receipt.used.estimated,
        is_ok: end.status == OK,
        is_whole: *end.ended == Ended::Properly,
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
