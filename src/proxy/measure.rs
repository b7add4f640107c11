//! What a finished call is counted as, in one place.

use std::time::Instant;

use filters::answer::Ended;
use filters::ids::EndpointId;
use filters::upstream::board::Route;

use super::ctx::{Call, Ctx};
use super::gate::Receipt;
use super::gateway::Gateway;
use crate::ops::metrics::calls::{Answered, Labels};

/// How a call ended for its caller.
pub(super) struct End<'a> {
    pub(super) status: u16,
    /// `ok`, or why not.
    pub(super) code: &'static str,
    pub(super) ended: &'a Ended,
    pub(super) now: Instant,
}

impl Gateway {
    /// Counts a call that is over.
    pub(super) fn measure(&self, ctx: &Ctx, call: Option<&Call>, receipt: &Receipt, end: &End<'_>) {
        if let Some(call) = call {
            let released = u64::try_from(receipt.settlement.released.nano()).unwrap_or_default();
            self.metrics.calls.hold_ended(receipt.settlement.charged().is_positive(), released);
            self.measure_answer(ctx, call, receipt, end);
        }
    }

    fn measure_answer(&self, ctx: &Ctx, call: &Call, receipt: &Receipt, end: &End<'_>) {
        let took = end.now.saturating_duration_since(ctx.arrived);
        let Some(current) = call.current.filter(|_| call.gate.is_committed()) else {
            if let Some(labels) = call.labels(None) {
                self.metrics.calls.call_failed(labels, end.code, took);
            }
            return;
        };
        let Some((route, labels)) = call.route(current.endpoint).zip(call.labels(Some(current.endpoint)))
        else {
            return;
        };
        let (first_byte, first_event) = call.gate.reached();
        let counters = call.snapshot.counted.of(route, || self.metrics.calls.of(labels));
        counters.answered(&Answered {
            first_byte,
            first_token: first_event.map(|at| at.saturating_duration_since(ctx.arrived)),
            streamed: call.gate.streamed_for(),
            attempt: end.now.saturating_duration_since(current.began),
            call: took,
            input_tokens: receipt.used.usage.prompt(),
            output_tokens: receipt.used.usage.output,
        });
    }
}

impl Call {
    fn route(&self, endpoint: EndpointId) -> Option<Route> {
        Some(Route { model: self.choices.of(endpoint)?.id, endpoint })
    }

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
