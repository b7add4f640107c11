//! A call's spans, for whoever collects them: nothing is made where nobody does.

use std::time::Instant;

use filters::answer::Ended;

use super::ctx::{Call, Ctx, Current};
use super::gate::Receipt;
use super::gateway::Gateway;
use super::measure::End;
use crate::ops::metrics::calls::{operation_name, provider_name};
use crate::ops::otlp::{AttemptSpan, CallSpan};

impl Gateway {
    /// The call is over: its spans go out, with the attempt that served or was cut.
    pub(super) fn hand_in(&self, ctx: &mut Ctx, call: Option<&Call>, receipt: &Receipt, end: &End<'_>) {
        let Some((telemetry, mut trace)) = self.telemetry.as_ref().zip(ctx.trace.take()) else { return };
        if let Some((call, current)) = call.and_then(|call| Some((call, call.current?))) {
            let (outcome, reason) = match end.ended {
                Ended::Properly => ("served", "ok"),
                Ended::Broken(failure) => ("cut", failure.word()),
                Ended::Not => ("left", "caller_left"),
            };
            if let Some(span) = call.span_of(&current, outcome, reason, end.now) {
                trace.attempted(span);
            }
        }
        let labels = call.and_then(|call| call.labels(call.current.map(|current| current.endpoint)));
        let first_event = call.and_then(|call| call.gate.reached().1);
        let span = CallSpan {
            request_id: ctx.request_id.clone(),
            surface: ctx.surface,
            operation: labels.map_or(ctx.surface, |labels| operation_name(labels.operation)),
            provider: provider_name(labels.map_or(ctx.dialect, |labels| labels.dialect)),
            model: labels.map_or("", |labels| labels.model).to_owned(),
            status: end.status,
            code: end.code,
            input_tokens: receipt.used.usage.prompt(),
            output_tokens: receipt.used.usage.output,
            first_token: first_event.map(|at| at.saturating_duration_since(ctx.arrived)),
        };
        telemetry.end(trace, span, ctx.arrived, end.now);
    }
}

impl Call {
    /// The span of an attempt.
    pub(super) fn span_of(
        &self,
        current: &Current,
        outcome: &'static str,
        reason: &'static str,
        now: Instant,
    ) -> Option<AttemptSpan> {
        let endpoint = self.endpoint(current.endpoint).ok()?;
        Some(AttemptSpan {
            span: [0; 8],
            endpoint: endpoint.name.clone(),
            region: endpoint.provider.region.clone(),
            provider: provider_name(endpoint.provider.dialect),
            outcome,
            reason,
            began: current.began,
            ended: now,
        })
    }
}
