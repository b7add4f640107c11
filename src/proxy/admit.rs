//! Rooms 2 to 4: what is wanted, who could serve it, is there room and money for it?
//!
//! The input is bounded by its bytes first. Only when that does not fit the balance are the tokens
//! counted, off the request's thread, and only then is a key that allows it given less output.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use filters::attempt::Planner;
use filters::dialect::Dialect;
use filters::facts::Facts;
use filters::hold::{self, Bound};
use filters::ids::ModelId;
use filters::limit::{Kind, Over};
use filters::meter;
use filters::money::{Amount, CostError};
use filters::upstream::board::{Found, Plan, Route};
use filters::upstream::deadline::Deadline;
use filters::upstream::watchdog::Form;
use filters::verdict::{Reason, Rejection};

use super::bodies::Reserved;
use super::ctx::{Call, Ctx};
use super::gate::{Gate, Source};
use super::gateway::Gateway;
use super::surface;
use crate::config::checked::{Model, Tokenizer};
use crate::pool::Snapshot;
use crate::pool::keys::Principal;
use crate::store::{Admit, Deny, Ticket};
use crate::{clock, entropy};

/// When a caller should come back after we were full.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);
/// The largest body whose tokens are counted, in bytes: about a tenth of a second of one core.
const COUNT_BYTES_MAX: usize = 1 << 20;
/// A larger body is read off the threads that serve; this one takes about a millisecond.
const READ_AT_ONCE_BYTES: usize = 256 << 10;

/// A body, and its place in memory.
pub(super) struct Body {
    pub(super) bytes: Bytes,
    pub(super) reserved: Reserved,
}

impl Gateway {
    /// Turns a request into an admitted call.
    pub(super) async fn admit(
        &self,
        ctx: &Ctx,
        snapshot: Arc<Snapshot>,
        principal: Arc<Principal>,
        body: Body,
    ) -> Result<Call, Rejection> {
        let facts = read(ctx.dialect, &body.bytes).await?;
        let model = find_model(&snapshot, &principal, ctx.dialect, &facts.model)?;
        let wish = Wish { ctx, principal: &principal, model: &model, facts: &facts };
        let plan = wish.candidates(&snapshot)?;
        let (ticket, bound) = match self.hold(&wish, &body.bytes).await {
            Ok(held) => held,
            Err(rejection) => {
                snapshot.upstreams.finish(plan.pass);
                return Err(rejection);
            }
        };
        let now = clock::now();
        let ids = |routes: &[Route]| routes.iter().map(|route| route.endpoint).collect();
        let deadline = Deadline::new(now, snapshot.routing.deadline);
        let planner = Planner::new(ids(&plan.order), snapshot.routing.attempts_max, deadline)
            .falling_back_on(now, ids(&plan.fall_backs))
            .in_places(|id| snapshot.catalogue.endpoints.get(id.0).map_or(id, |endpoint| endpoint.place));
        let gate = Gate::new(Arc::clone(&self.holds), ticket, Source::new(body.bytes, body.reserved));
        Ok(Call {
            own_input: wish.own_input(),
            snapshot,
            model,
            facts,
            bound,
            planner,
            routed: plan.order.first().map_or(ModelId(0), |route| route.model),
            pass: Some(plan.pass),
            unseen: None,
            tried: vec![],
            current: None,
            gate,
            first_attempt: None,
            abandoned_max: principal.abandoned_max,
        })
    }

    async fn hold(&self, wish: &Wish<'_>, body: &Bytes) -> Result<(Ticket, Bound), Rejection> {
        let bound = hold::bound(wish.facts, &wish.model.limits, wish.principal.default_output_tokens);
        let needed = wish.amount(&bound).map_err(too_dear)?;
        let denied = match self.place(wish, &bound, needed).await {
            Ok(ticket) => return Ok((ticket, bound)),
            Err(deny) => deny,
        };
        let Deny::Funds { available } = denied else { return Err(self.denied(wish, denied, needed)) };
        let bound = count(wish, &bound, body).await;
        let counted = wish.amount(&bound).map_err(too_dear)?;
        if counted < needed
            && let Ok(ticket) = self.place(wish, &bound, counted).await
        {
            return Ok((ticket, bound));
        }
        // Never more than half of what is there: one call must not take all of it.
        let half = Amount::from_nano(available.nano() / 2);
        let clamped = wish
            .principal
            .clamp_min
            .and_then(|least| hold::clamped(&bound, wish.facts, &wish.model.price, half, least));
        if let Some(bound) = clamped {
            let amount = wish.amount(&bound).map_err(too_dear)?;
            let placed = self.place(wish, &bound, amount).await;
            return placed.map(|ticket| (ticket, bound)).map_err(|deny| self.denied(wish, deny, amount));
        }
        Err(self.denied(wish, Deny::Funds { available }, counted))
    }

    /// Every try is a hold of its own: an id never comes twice.
    async fn place(&self, wish: &Wish<'_>, bound: &Bound, amount: Amount) -> Result<Ticket, Deny> {
        let admit = Admit {
            hold: entropy::hold_id(),
            account: wish.principal.account,
            amount,
            request: wish.ctx.request_id.clone(),
            model: wish.model.name.clone(),
            key: wish.principal.digest,
            price_version: wish.model.price.version,
            // The bound in bytes would use up a minute's tokens with prompts that are a quarter of it.
            tokens: wish.own_input().saturating_add(bound.output),
            scopes: Arc::clone(&wish.principal.scopes),
        };
        self.holds.admit(admit).await
    }

    fn denied(&self, wish: &Wish<'_>, deny: Deny, needed: Amount) -> Rejection {
        let (word, rejection) = match deny {
            Deny::Funds { available } => ("funds", short_of(needed, available, wish.ctx.dialect)),
            Deny::Limited { scope, over } => (over.kind.word(), limited(scope, over)),
            Deny::Overloaded => {
                let message = "Too many calls are in flight. Come back in a moment.";
                ("overloaded", Rejection::new(Reason::Overloaded, message).retry_after(FULL_RETRY_AFTER))
            }
            Deny::Unavailable => {
                let message = "Calls cannot be recorded right now, so none is taken.";
                (
                    "unavailable",
                    Rejection::new(Reason::StoreUnavailable, message).retry_after(FULL_RETRY_AFTER),
                )
            }
        };
        self.metrics.holds_denied.with_label_values(&[word]).inc();
        rejection
    }
}

/// What the body asks for; a large one is read where others need not wait for it.
async fn read(dialect: Dialect, body: &Bytes) -> Result<Facts, Rejection> {
    if body.len() <= READ_AT_ONCE_BYTES {
        return dialect.read(body);
    }
    let body = body.clone();
    tokio::task::spawn_blocking(move || dialect.read(&body)).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a body could not be read");
        Err(Rejection::new(Reason::Internal, "Something broke in the gateway."))
    })
}

/// What a hold is sized by.
struct Wish<'a> {
    ctx: &'a Ctx,
    principal: &'a Principal,
    model: &'a Arc<Model>,
    facts: &'a Facts,
}

impl Wish<'_> {
    fn amount(&self, bound: &Bound) -> Result<Amount, CostError> {
        hold::amount(bound, self.model.price.reachable(bound.input, self.facts.tier))
    }

    /// Room 3: whom to ask, or why nobody can be asked.
    fn candidates(&self, snapshot: &Snapshot) -> Result<Plan, Rejection> {
        let form = if self.facts.stream { Form::Stream } else { Form::Whole };
        let upstreams = &snapshot.upstreams;
        match upstreams.candidates(&self.model.name, self.ctx.dialect, form, self.own_input()) {
            Found::Plan(plan) => Ok(plan),
            Found::AllRefused { soonest, rate_limited } => {
                let wait = soonest.saturating_duration_since(clock::now()).max(FULL_RETRY_AFTER);
                let (reason, message) = if rate_limited {
                    (Reason::RateLimited, "Every upstream of this model is over its rate limit.")
                } else {
                    (Reason::NoUpstream, "No upstream of this model can be asked right now.")
                };
                Err(Rejection::new(reason, message).retry_after(wait))
            }
            Found::NoneFits(_) => {
                Err(Rejection::new(Reason::NoUpstream, "No upstream of this model fits the request."))
            }
        }
    }

    fn own_input(&self) -> u64 {
        let input = &self.facts.input;
        meter::own_input(input.text_bytes, input.messages, input.inline_images)
    }
}

/// The bound with its tokens counted, where the model says how and the body is not too large.
async fn count(wish: &Wish<'_>, bound: &Bound, body: &Bytes) -> Bound {
    let Some(tokenizer) = wish.model.tokenizer else { return *bound };
    if wish.facts.input.beyond_body || body.len() > COUNT_BYTES_MAX {
        return *bound;
    }
    let body = body.clone();
    let counting = tokio::task::spawn_blocking(move || {
        let text = std::str::from_utf8(&body).unwrap_or_default();
        match tokenizer {
            Tokenizer::O200k => bpe_openai::o200k_base().count(text),
            Tokenizer::Cl100k => bpe_openai::cl100k_base().count(text),
        }
    });
    match counting.await {
        Ok(tokens) => {
            let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
            hold::counted(bound, tokens, wish.facts, &wish.model.limits)
        }
        Err(error) => {
            tracing::error!(%error, "tokens could not be counted");
            *bound
        }
    }
}

fn short_of(needed: Amount, available: Amount, dialect: Dialect) -> Rejection {
    let message = format!(
        "The balance cannot carry this call: it may cost up to {needed}, {available} is available. \
         Top up, or ask for fewer output tokens (`{}`).",
        dialect.output_field()
    );
    Rejection::new(Reason::InsufficientBalance, message)
}

fn limited(scope: &str, over: Over) -> Rejection {
    let what = match over.kind {
        Kind::Requests => "requests per minute",
        Kind::Tokens => "tokens per minute",
        Kind::Concurrency => "calls at the same time",
        Kind::Budget => "spending in this day or month",
    };
    let message = format!("Over the limit of this {scope}: {what}.");
    Rejection::new(Reason::RateLimited, message).retry_after(over.retry_after)
}

fn too_dear(_: CostError) -> Rejection {
    let message = "The call could cost more than can be held. Ask for fewer output tokens.";
    Rejection::new(Reason::InvalidValue, message)
}

/// The model of that name, if this key may use it and somebody serves it in this dialect.
pub(super) fn find_model(
    snapshot: &Snapshot,
    principal: &Principal,
    dialect: Dialect,
    name: &str,
) -> Result<Arc<Model>, Rejection> {
    let missing = |message| Rejection::new(Reason::ModelNotFound, message).param("model");
    let model = snapshot.catalogue.models.get(name).ok_or_else(|| {
        missing("There is no such model. `GET /v1/models` lists those that there are.".to_owned())
    })?;
    if !principal.may_use(name) {
        let message = "This key may not use that model. `GET /v1/models` lists those that it may.";
        return Err(Rejection::new(Reason::ModelNotAllowed, message).param("model"));
    }
    if !snapshot.catalogue.speaks(model, dialect) {
        let here = surface::path_of(dialect);
        let message =
            format!("That model is not served at `POST {here}`: none of its upstreams speaks that dialect.");
        return Err(missing(message));
    }
    Ok(Arc::clone(model))
}
