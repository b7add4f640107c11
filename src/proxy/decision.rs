//! The decision log: a line for everything that was decided about a candidate of a call.
//!
//! Whoever wants to know why a call went where it went reads its lines in order, by `request_id`. Of a call that its
//! first candidate served the access line says all there is: its decision line is of level DEBUG. Every line has the
//! same fields; `outcome` is what became of the candidate:
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
//! They are kept too, for `tollgate failovers`: see `src/record`.
//!
//! `next` names the candidate that is asked next, or says `wait` (a pause comes first) or `stop`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::attempt::NextAttempt;
use filters::ids::EndpointId;

use super::ctx::Call;
use crate::clock::{self, Moment};
use crate::record::recorder::{Decided, Next, Recorder};

/// What was decided about a candidate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    pub(super) candidate: EndpointId,
    pub(super) outcome: &'static str,
    pub(super) reason: &'static str,
    /// Since the attempt began.
    pub(super) elapsed: Duration,
    /// Whether another candidate may follow at all.
    pub(super) goes_on: bool,
}

impl Call {
    /// Writes the line, and keeps it.
    pub(super) fn decided(&self, recorder: &Recorder, request_id: &str, now: Instant, decision: &Decision) {
        let now = Moment { instant: now, unix_ms: clock::unix_ms() };
        if let Some(decided) = self.decide(request_id, now, decision) {
            recorder.decided(request_id, decided);
        }
    }

    /// Writes the line. What is to be kept of it; nothing of a candidate that there is not.
    pub(super) fn decide(&self, request_id: &str, now: Moment, decision: &Decision) -> Option<Decided> {
        let Decision { candidate, outcome, reason, elapsed, goes_on } = *decision;
        let endpoint = self.endpoint(candidate).ok()?;
        let decided = Decided {
            at_ms: now.unix_ms,
            snapshot: Arc::clone(&self.snapshot),
            candidate,
            attempt: self.planner.made(),
            reason,
            elapsed,
            budget_left: self.planner.remaining(now.instant),
            outcome,
            next: if goes_on { self.next(now.instant) } else { Next::Stop },
        };
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    target: "decision",
                    request_id,
                    model = self.choices.of(candidate).map_or("", |choice| choice.model.name.as_str()),
                    candidate = endpoint.name,
                    region = endpoint.provider.region,
                    attempt = decided.attempt,
                    reason,
                    elapsed_ms = millis(elapsed),
                    budget_left_ms = millis(decided.budget_left),
                    outcome,
                    next = self.next_word(decided.next),
                )
            };
        }
        if decided.is_first_served() {
            line!(debug);
        } else {
            line!(info);
        }
        Some(decided)
    }

    fn next(&self, now: Instant) -> Next {
        match self.planner.preview(now) {
            NextAttempt::Try { endpoint, .. } => Next::Candidate(endpoint),
            NextAttempt::WaitUntil(_) => Next::Wait,
            NextAttempt::Stop(_) => Next::Stop,
        }
    }

    fn next_word(&self, next: Next) -> &str {
        match next {
            Next::Candidate(endpoint) => self.endpoint(endpoint).map_or("", |e| e.name.as_str()),
            Next::Wait => "wait",
            Next::Stop => "stop",
        }
    }
}

/// Whole milliseconds, for logs.
pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
