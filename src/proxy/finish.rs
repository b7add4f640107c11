//! Rooms 8 and 9: settle once, record, say one line.

use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::answer::Ended;
use filters::money::Amount;
use filters::slo::judge::{self as slo, Ending, FirstEvent, judge};
use filters::upstream::board::Outcome;
use pingora::protocols::http::ServerSession;

use super::ctx::{Call, Ctx, Stage};
use super::decision::{Decision, millis};
use super::gate::Receipt;
use super::gateway::Gateway;
use super::measure::{End, how};
use crate::clock::{self, Moment};
use crate::record::recorder::{self, Decided};

/// The status of a call whose caller left, as nginx logs it. Nobody receives it.
const CALLER_LEFT: u16 = 499;
/// A shorter stream tells nothing of an endpoint's speed.
const SPEED_TOLD_AFTER_MS: u128 = 200;

impl Gateway {
    /// The last room of every request.
    pub(super) async fn finish(&self, session: &ServerSession, ctx: &mut Ctx) {
        let stage = std::mem::replace(&mut ctx.stage, Stage::Finished);
        let (call, receipt) = match stage {
            Stage::Admitted(mut call) => {
                let receipt = call.gate.settle().await;
                (Some(call), receipt)
            }
            Stage::Arrived | Stage::Finished => (None, Receipt::default()),
        };
        let sent = session.response_written().map(|head| head.status.as_u16());
        let ended = call.as_ref().map_or(Ended::Not, |call| call.gate.ended());
        let left = call.as_ref().is_some_and(|call| call.gate.caller_has_left());
        let status = if left && ended != Ended::Properly { CALLER_LEFT } else { sent.unwrap_or(CALLER_LEFT) };
        let mut call = call;
        let mut decided = None;
        let mut at = clock::moment();
        if let Some(call) = &mut call {
            decided = record_attempt(ctx, call, &ended, &receipt, at);
            self.record_shortfall(call, receipt.settlement.shortfall);
        }
        if let Some(first) = ctx.keyed.take() {
            let answer = call.as_ref().and_then(|call| call.gate.kept());
            self.end_keyed(first, answer, receipt.settlement.charged().is_positive()).await;
            at = clock::moment();
        }
        let Moment { instant: now, unix_ms } = at;
        if let Some(code) = ctx.replied.filter(|code| *code != "ok") {
            self.metrics.rejections.with_label_values(&[code]).inc();
        }
        let took = now.saturating_duration_since(ctx.arrived);
        let judged = self.judge(ctx, call.as_deref(), &receipt, (status, &ended), (took, unix_ms));
        self.recorder.call(&ctx.request_id, decided, judged);
        let code = code_of(ctx, status, &ended);
        let own = call.as_ref().and_then(|call| own_time(ctx, call, now));
        let end = End { status, code, ended: &ended, own, now };
        self.measure(ctx, call.as_deref(), &receipt, &end);
        self.hand_in(ctx, call.as_deref(), &receipt, &end);
        access_line(ctx, call.as_deref(), &receipt, status, millis(took), code);
    }

    /// Was it as good as was promised?
    fn judge(
        &self,
        ctx: &Ctx,
        call: Option<&Call>,
        receipt: &Receipt,
        (status, ended): (u16, &Ended),
        (took, unix_ms): (Duration, i64),
    ) -> Option<recorder::Ended> {
        if !ctx.is_call || (call.is_none() && ctx.refused.is_none()) {
            return None; // Nothing was to be answered by an upstream, or it was answered before.
        }
        let judged = judge(&Ending {
            status,
            error: ctx.refused.map(|(reason, _)| reason),
            of_upstreams: ctx.refused.is_some_and(|(_, of_upstreams)| of_upstreams),
            answer: match ended {
                Ended::Properly => slo::Answer::Whole,
                Ended::Broken(failure) => slo::Answer::Cut(failure.word()),
                Ended::Not => slo::Answer::Not,
            },
            last_failure: call.and_then(|call| call.last_failed).map(|(_, reason)| reason),
            first_event: call.and_then(|call| self.first_event(ctx, call, receipt)),
        });
        Some(recorder::Ended {
            began_ms: unix_ms.saturating_sub(i64::try_from(took.as_millis()).unwrap_or_default()),
            model: ctx.model.clone(),
            snapshot: call.map(|call| Arc::clone(&call.snapshot)),
            serving: call.and_then(|call| call.current).map(|current| current.endpoint),
            last_failed: call.and_then(|call| call.last_failed).map(|(endpoint, _)| endpoint),
            judged,
        })
    }

    /// When a stream's first event came, and when it should have.
    fn first_event(&self, ctx: &Ctx, call: &Call, receipt: &Receipt) -> Option<FirstEvent> {
        let (read_at, current) = (ctx.read_at?, call.current?);
        let at = call.gate.reached().1.filter(|_| call.facts.stream)?;
        let model = &call.choice(current.endpoint).ok()?.model;
        let prompt = match receipt.used.usage.prompt() {
            0 => call.own_input,
            told => told,
        };
        Some(FirstEvent {
            after: at.saturating_duration_since(read_at),
            before_attempt: current.began.saturating_duration_since(read_at),
            limit: self.recorder.slo.first_event.of(model.reasoning, prompt),
        })
    }

    fn record_shortfall(&self, call: &Call, shortfall: Amount) {
        if shortfall.is_positive() {
            self.metrics.shortfall_nano.inc_by(u64::try_from(shortfall.nano()).unwrap_or_default());
            let endpoint = call.current.and_then(|current| call.endpoint(current.endpoint).ok());
            let endpoint = endpoint.map_or("", |endpoint| endpoint.name.as_str());
            tracing::error!(breach = "shortfall", shortfall = %shortfall, model = call.model_name(), endpoint, "a call cost more than its hold and the balance");
        }
    }
}

/// The attempt that served, or was cut: its health, its decision line. What is to be kept of it.
fn record_attempt(
    ctx: &Ctx,
    call: &mut Call,
    ended: &Ended,
    receipt: &Receipt,
    now: Moment,
) -> Option<Decided> {
    if let Some((leg, timing, reused)) = call.gate.take_leg() {
        leg.ended(match ended {
            Ended::Properly => {
                let streamed = call.gate.streamed_for();
                Outcome::Served { tokens_per_second: speed(receipt.used.usage.output, streamed) }
            }
            Ended::Broken(failure) => {
                Outcome::Failed { failure: failure.clone(), wait: None, timing, reused }
            }
            // That says nothing of the endpoint.
            Ended::Not => Outcome::CallerLeft,
        });
    }
    if let Some(pass) = call.pass.take() {
        call.snapshot.upstreams.finish(pass);
    }
    let current = call.current?;
    let (outcome, reason) = how(ended);
    let elapsed = now.instant.saturating_duration_since(current.began);
    let decision = Decision { candidate: current.endpoint, outcome, reason, elapsed, goes_on: false };
    call.decide(&ctx.request_id, now, &decision)
}

/// What a call took us, neither its caller nor its upstreams: before the first attempt, and after the last bytes. A
/// caller who does not read keeps the last part open; that is no time of ours, and cannot be told apart.
fn own_time(ctx: &Ctx, call: &Call, now: Instant) -> Option<Duration> {
    let before = call.first_attempt?.saturating_duration_since(ctx.read_at?);
    Some(before + now.saturating_duration_since(call.gate.last_piece()))
}

/// Output tokens per second, where the stream was long enough to tell.
fn speed(tokens: u64, streamed: Duration) -> Option<u64> {
    let millis = streamed.as_millis();
    (millis >= SPEED_TOLD_AFTER_MS).then_some(())?;
    u64::try_from(u128::from(tokens) * 1000 / millis).ok()
}

/// How a call ended, in a word.
fn code_of(ctx: &Ctx, status: u16, ended: &Ended) -> &'static str {
    match (ctx.replied, ended) {
        (Some(code), _) => code,
        (None, Ended::Broken(failure)) => failure.word(),
        (None, _) if status == CALLER_LEFT => "caller_left",
        (None, _) => "ok",
    }
}

/// One line a call, always with the same fields.
fn access_line(ctx: &Ctx, call: Option<&Call>, receipt: &Receipt, status: u16, took_ms: u64, code: &str) {
    let endpoint = call.and_then(|call| call.endpoint(call.current?.endpoint).ok());
    let usage = &receipt.used.usage;
    tracing::info!(
        target: "access",
        request_id = ctx.request_id,
        caller = ctx.connection.as_ref().map(|c| display(c.caller.ip())),
        surface = ctx.surface,
        account = ctx.principal.as_ref().map_or("", |p| p.account_name.as_str()),
        model = call.map_or("", Call::model_name),
        upstream = endpoint.map_or("", |endpoint| endpoint.name.as_str()),
        region = endpoint.map_or("", |endpoint| endpoint.provider.region.as_str()),
        attempts = call.map_or(0, |c| c.planner.made()),
        stream = call.is_some_and(|c| c.facts.stream),
        status,
        code,
        prompt_tokens = usage.prompt(),
        completion_tokens = usage.output,
        cost_nano = receipt.settlement.charged().nano(),
        estimated = receipt.used.estimated,
        first_event_ms = call.and_then(|c| c.gate.first_event()).map_or(0, millis),
        took_ms,
    );
}
