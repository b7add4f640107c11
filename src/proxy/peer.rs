//! Whom to ask now, and what follows when it fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::answer::{Answer, Rules};
use filters::attempt::NextAttempt;
use filters::dialect::Shape;
use filters::exhausted::{Tried, verdict};
use filters::hold;
use filters::ids::EndpointId;
use filters::meter::Ceiling;
use filters::upstream::board::{Ask, Outcome, Route};
use filters::upstream::failure::{Failure, Timer};
use filters::upstream::watchdog::Form;
use filters::verdict::{Rejection, UpstreamError};
use pingora::protocols::http::ServerSession;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorType};
use rand_core::RngCore;

use super::choices::Choice;
use super::ctx::{Call, Ctx, Current, unknown};
use super::decision::Decision;
use super::exchange::Exchange;
use super::gate::{Alone, Attempt, Bill, Limits};
use super::gateway::Gateway;
use super::unseen::{Unseen, failure_of};
use crate::pool::peer::{Via, peer};
use crate::pool::upstreams::{Asked, Leg};
use crate::{clock, entropy};

/// The plan is at its end.
const EXHAUSTED: ErrorType = ErrorType::new("no further attempt");

impl Gateway {
    /// The next candidate's connection. Everything of the attempt is set up here.
    pub(super) async fn next_peer(
        &self,
        session: &mut ServerSession,
        ctx: &mut Ctx,
    ) -> pingora::Result<Box<HttpPeer>> {
        let request_id = ctx.request_id.clone();
        let arrived = ctx.arrived;
        loop {
            let now = clock::now();
            let call = ctx.call()?;
            if self.drain.is_cut() {
                return Error::e_explain(EXHAUSTED, "the process leaves");
            }
            let (id, share, last) = match call.planner.next_attempt(now) {
                NextAttempt::Try { endpoint, share, last } => (endpoint, share, last),
                NextAttempt::WaitUntil(at) => {
                    let pause = tokio::time::sleep_until(at.into());
                    Exchange::new(session, &mut call.gate, self.drain.cuts()).beside(pause).await?;
                    continue;
                }
                NextAttempt::Stop(_) => {
                    return Error::e_explain(EXHAUSTED, "every candidate had its try, or time is up");
                }
            };
            let via = call.unseen.as_ref().map_or(Via::Pool, |(_, via)| *via);
            let leg = match ask(call, id, last) {
                Asked::Go(leg) => leg,
                Asked::Refused(until) => {
                    call.planner.refused(now, until);
                    go_further(call, now);
                    call.decided(&self.recorder, &request_id, now, &refused(id, "breaker", true));
                    continue;
                }
                Asked::BudgetSpent => {
                    call.planner.refused(now, None);
                    call.decided(&self.recorder, &request_id, now, &refused(id, "retry_budget", false));
                    return Error::e_explain(
                        EXHAUSTED,
                        "all calls together have made too many extra attempts",
                    );
                }
            };
            if call.first_attempt.is_none() {
                call.first_attempt = Some(now);
                self.metrics.before_attempt_seconds.observe((now - arrived).as_secs_f64());
            }
            call.current = Some(Current { endpoint: id, began: now, credential: None });
            let addresses = call.addresses(id)?;
            let connect = call.endpoint(id)?.provider.timers.connect.min(share);
            let address = tokio::time::timeout(connect, addresses.next()).await;
            let attempt = attempt(call, id, share, leg, &request_id)?;
            call.gate.begin(attempt);
            if let Ok(Some(address)) = address {
                return Ok(peer(&call.endpoint(id)?.provider, address, via, connect));
            }
            let failure = if address.is_err() { Failure::Timeout(Timer::Connect) } else { Failure::Connect };
            let tried = Tried { failure, error: UpstreamError::default(), retry_after: None };
            if !self.failed(ctx, tried)? {
                return Error::e_explain(EXHAUSTED, "the name of the last candidate cannot be resolved");
            }
        }
    }

    /// An attempt failed at its connection or on its way: whether another one follows.
    pub(super) fn goes_on(
        &self,
        ctx: &mut Ctx,
        error: &Error,
        unseen: Option<Unseen>,
    ) -> pingora::Result<bool> {
        let request_id = ctx.request_id.clone();
        let call = ctx.call()?;
        if call.gate.is_committed() || call.gate.is_forsaken() {
            return Ok(false);
        }
        let known = call.gate.take_failure();
        let unseen = unseen.filter(|_| known.is_none() && !call.gate.is_heard());
        if let Some(unseen) = unseen
            && call.planner.resend()
        {
            let via = match unseen {
                Unseen::Dead => Via::New(entropy::with_rng(RngCore::next_u64)),
                Unseen::Refused => Via::Pool,
            };
            call.unseen = call.gate.take_leg().map(|(leg, ..)| (leg, via));
            if let Some(Current { endpoint, began, .. }) = call.current {
                let now = clock::now();
                let decision = Decision {
                    candidate: endpoint,
                    outcome: "resent",
                    reason: unseen.word(),
                    elapsed: now - began,
                    goes_on: true,
                };
                call.decided(&self.recorder, &request_id, now, &decision);
            }
            return Ok(true);
        }
        // A credential was replaced while the attempt with its predecessor was under way.
        if let (Some(tried), Some(current)) = (&known, call.current)
            && call.is_about_an_earlier_credential(&current, &tried.failure)?
            && call.planner.resend()
        {
            call.unseen = call.gate.take_leg().map(|(leg, ..)| (leg, Via::Pool));
            return Ok(true);
        }
        let tried = known.unwrap_or_else(|| Tried {
            failure: failure_of(error),
            error: UpstreamError::default(),
            retry_after: None,
        });
        self.failed(ctx, tried)
    }

    /// Records a failed attempt; answers whether there is a next one.
    fn failed(&self, ctx: &mut Ctx, tried: Tried) -> pingora::Result<bool> {
        let now = clock::now();
        let request_id = ctx.request_id.clone();
        let is_traced = ctx.trace.is_some();
        let call = ctx.call()?;
        let Some(current) = call.current.take() else { return Ok(false) };
        let is_outdated = call.is_about_an_earlier_credential(&current, &tried.failure)?;
        let not_before = call.gate.take_leg().and_then(|(leg, timing, reused)| {
            let (failure, wait) = (tried.failure.clone(), tried.retry_after);
            // The caller did not leave, but as little was learnt about what would be used now.
            let outcome = if is_outdated {
                Outcome::CallerLeft
            } else {
                Outcome::Failed { failure, wait, timing, reused }
            };
            leg.ended(outcome)
        });
        entropy::with_rng(|rng| call.planner.failed(now, &tried.failure, not_before, rng));
        let endpoint = call.endpoint(current.endpoint)?;
        let mut tried = tried;
        // Some providers name another key of the account than the one that was sent.
        for credential in &endpoint.provider.credentials {
            credential.mask(&mut tried.error);
        }
        let reason = tried.failure.word();
        self.metrics.attempts.with_label_values(&[endpoint.name.as_str(), reason]).inc();
        if let Some(labels) = call.labels(Some(current.endpoint)) {
            self.metrics.calls.attempt_failed(labels, reason, now - current.began);
        }
        let next = tried.failure.fails_over() && call.planner.has_next(now) && !self.drain.is_cut();
        let elapsed = now - current.began;
        let decision =
            Decision { candidate: current.endpoint, outcome: "failed", reason, elapsed, goes_on: next };
        call.decided(&self.recorder, &request_id, now, &decision);
        call.last_failed = Some((current.endpoint, reason));
        let span = is_traced.then(|| call.span_of(&current, "failed", reason, now)).flatten();
        call.tried.push(tried);
        if let Some((trace, span)) = ctx.trace.as_mut().zip(span) {
            trace.attempted(span);
        }
        Ok(next)
    }

    /// What the caller is told when nobody served.
    pub(super) fn give_up(&self, ctx: &mut Ctx) -> pingora::Result<Rejection> {
        let now = clock::now();
        let call = ctx.call()?;
        // Time ran out before the first attempt, or the plan was cut short by it.
        let out_of_time = call.planner.remaining(now).is_zero() && call.tried.is_empty();
        if out_of_time {
            call.tried.push(Tried {
                failure: Failure::Timeout(Timer::Share),
                error: UpstreamError::default(),
                retry_after: None,
            });
        }
        Ok(verdict(&call.tried))
    }
}

/// A candidate that was not asked.
fn refused(candidate: EndpointId, reason: &'static str, goes_on: bool) -> Decision {
    Decision { candidate, outcome: "refused", reason, elapsed: Duration::ZERO, goes_on }
}

/// May this one be asked now? One that is sent again, since nobody saw it, was asked already.
fn ask(call: &mut Call, endpoint: EndpointId, last: bool) -> Asked {
    if let Some((leg, _)) = call.unseen.take() {
        return Asked::Go(leg);
    }
    let Some(model) = call.choices.of(endpoint).map(|choice| choice.id) else { return Asked::Refused(None) };
    let route = Route { model, endpoint };
    let form = if call.asks_for_stream(endpoint) { Form::Stream } else { Form::Whole };
    match &mut call.pass {
        Some(pass) => call.snapshot.upstreams.begin(pass, route, form, last),
        None => Asked::Refused(None),
    }
}

/// A plan names as many as its attempts get to. One of them refuses by now: the others come behind them.
fn go_further(call: &mut Call, now: Instant) {
    let Some(pass) = &mut call.pass else { return };
    let ask = Ask {
        models: &call.choices.ids(),
        form: if call.facts.stream { Form::Stream } else { Form::Whole },
        prompt_tokens: call.own_input,
        preferences: &call.facts.preferences,
    };
    let further = call.snapshot.upstreams.further(&ask, pass, &call.planner.known());
    let ids = |routes: &[Route]| routes.iter().map(|route| route.endpoint).collect::<Vec<_>>();
    let place = |id| call.snapshot.place(id);
    call.planner.goes_on(now, &ids(&further.order), &ids(&further.fall_backs), place);
}

fn attempt(
    call: &mut Call,
    id: EndpointId,
    share: Duration,
    leg: Leg,
    request_id: &str,
) -> pingora::Result<Attempt> {
    let now = clock::now();
    let alone = alone(call, &leg);
    let endpoint = call.snapshot.endpoint(id)?;
    let timers = endpoint.provider.timers;
    let Choice { model, bound, .. } = call.choices.of(id).ok_or_else(unknown)?;
    let bill = Bill {
        model: Arc::clone(model),
        tier: call.facts.tier,
        provider_cost: endpoint.cost,
        own_input: call.own_input,
        ceiling: Ceiling { context: hold::most_read(&call.facts, &model.limits), output: bound.output },
        free: call.operation.is_free(),
        abandoned_max: call.abandoned_max,
        endpoint: endpoint.name.clone(),
        attempts: call.planner.made(),
    };
    let source = call.gate.source();
    let edits = call.operation.edits(&source, &call.facts, bound, &endpoint.manners);
    let fold = endpoint.manners.folds(&call.facts);
    let shape = Shape { fold, ..Shape::new(&call.facts, &model.name, request_id) };
    Ok(Attempt {
        body: call.gate.edited(edits),
        answer: Answer::new(call.operation, shape, Rules::of(call.operation, source.len()))
            .classed_by(Arc::clone(&endpoint.provider.classify)),
        limits: Limits {
            first_byte: leg.first_byte,
            first_event: leg.first_event,
            share_until: now + share,
            idle: timers.idle,
            stream_until: now + call.snapshot.routing.stream_max,
        },
        bill,
        alone,
        leg: Some(leg),
        request_id: request_id.to_owned(),
        stream: call.facts.stream,
        clamped: bound.lowered,
    })
}

/// The last candidate, where others are only refused for now.
fn alone(call: &Call, leg: &Leg) -> Option<Alone> {
    let has_watchdog = leg.first_byte.is_some() || leg.first_event.is_some();
    let refused = call.planner.untried_fall_backs();
    (!has_watchdog && !refused.is_empty()).then(|| Alone { limits: leg.limits(), refused, look: None })
}
