//! The decision log: a line for everything that was decided about a candidate of a call.
//!
//! Whoever wants to know why a call went where it went reads its lines in order, by `request_id`. Every line
//! has the same fields; `outcome` is what became of the candidate:
//!
//! | outcome | |
//! | --- | --- |
//! | `served` | its answer reached its end |
//! | `cut` | its answer had begun and broke off; `reason` says why |
//! | `left` | the caller left |
//! | `failed` | the attempt failed before anything of it was seen; `reason` says why |
//! | `resent` | its pooled connection was dead, the request goes out again; this was no attempt |
//! | `refused` | it was not asked: `breaker` (its one probe is under way) or `retry_budget` |
//!
//! `next` names the candidate that is asked next, or says `wait` (a pause comes first) or `stop`.

use std::time::{Duration, Instant};

use filters::attempt::NextAttempt;
use filters::ids::EndpointId;

use super::ctx::Call;

/// What was decided about a candidate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision<'a> {
    pub(super) candidate: EndpointId,
    pub(super) outcome: &'static str,
    pub(super) reason: &'a str,
    /// Since the attempt began.
    pub(super) elapsed: Duration,
    /// Whether another candidate may follow at all.
    pub(super) goes_on: bool,
}

impl Call {
    /// Writes the line.
    pub(super) fn decided(&self, request_id: &str, now: Instant, decision: &Decision<'_>) {
        let Decision { candidate, outcome, reason, elapsed, goes_on } = *decision;
        let Ok(endpoint) = self.endpoint(candidate) else { return };
        let model = self.choices.of(candidate).map_or("", |choice| choice.model.name.as_str());
        let next = if goes_on { self.next_word(now) } else { "stop" };
        tracing::info!(
            target: "decision",
            request_id,
            model,
            candidate = endpoint.name,
            region = endpoint.provider.region,
            attempt = self.planner.made(),
            reason,
            elapsed_ms = millis(elapsed),
            budget_left_ms = millis(self.planner.remaining(now)),
            outcome,
            next,
        );
    }

    fn next_word(&self, now: Instant) -> &str {
        match self.planner.preview(now) {
            NextAttempt::Try { endpoint, .. } => self.endpoint(endpoint).map_or("", |e| e.name.as_str()),
            NextAttempt::WaitUntil(_) => "wait",
            NextAttempt::Stop(_) => "stop",
        }
    }
}

/// Whole milliseconds, for logs.
pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
