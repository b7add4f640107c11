//! A call's spans, for whoever collects them: nothing is made where nobody does.

use std::sync::Arc;
use std::time::Instant;

use filters::answer::Ended;

use super::ctx::{Call, Ctx, Current};
use super::gate::Receipt;
use super::gateway::Gateway;
use super::measure::{End, how};
use crate::ops::metrics::calls::{operation_name, provider_name};
use crate::ops::otlp::{AttemptSpan, CallSpan};

impl Gateway {
    /// The call is over: its spans go out where they are kept, with the attempt that served or was cut.
    pub(super) fn hand_in(&self, ctx: &mut Ctx, call: Option<&Call>, receipt: &Receipt, end: &End<'_>) {
        let Some((telemetry, mut trace)) = self.telemetry.as_ref().zip(ctx.trace.take()) else { return };
        if !trace.is_kept(end.status >= 500 || matches!(end.ended, Ended::Broken(_))) {
            return;
        }
        let current = call.and_then(|call| Some((call, call.current?)));
        let (outcome, reason) = how(end.ended);
        if let Some(span) =
            current.and_then(|(call, current)| call.span_of(&current, outcome, reason, end.now))
        {
            trace.attempted(span);
        }
        let endpoint = current.map(|(_, current)| current.endpoint);
        let labels = call.and_then(|call| call.labels(endpoint));
        let choice = call
            .and_then(|call| endpoint.and_then(|id| call.choices.of(id)).or_else(|| call.choices.first()));
        let first_event = call.and_then(|call| call.gate.reached().1);
        let span = CallSpan {
            request_id: ctx.request_id.clone(),
            surface: ctx.surface,
            operation: labels.map_or(ctx.surface, |labels| operation_name(labels.operation)),
            provider: provider_name(labels.map_or(ctx.dialect, |labels| labels.dialect)),
            model: choice.map(|choice| Arc::clone(&choice.model)),
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
            endpoint: endpoint.name.clone(),
            provider: Arc::clone(&endpoint.provider),
            outcome,
            reason,
            began: current.began,
            ended: now,
        })
    }
}
