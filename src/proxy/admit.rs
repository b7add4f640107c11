//! Rooms 2 to 4: what is wanted, who could serve it, is there room and money for it?
//!
//! The input is bounded by its bytes first. Only when that does not fit the balance are the tokens
//! counted, off the request's thread, and only then is a key that allows it given less output.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use filters::attempt::Planner;
use filters::dialect::Operation;
use filters::facts::Facts;
use filters::limit::{Kind, Over};
use filters::meter;
use filters::money::{Amount, CostError};
use filters::preferences::Dropped;
use filters::upstream::board::{Ask, Found, Plan, Route};
use filters::upstream::deadline::Deadline;
use filters::upstream::watchdog::Form;
use filters::verdict::{Reason, Rejection};

use super::bodies::Reserved;
use super::choices::Choices;
use super::ctx::{Call, Ctx};
use super::gate::{Gate, Source};
use super::gateway::Gateway;
use crate::pool::Snapshot;
use crate::pool::keys::Principal;
use crate::store::{Admit, Deny, Ticket};
use crate::{clock, entropy};

/// When a caller should come back after we were full.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);
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
        ctx: &mut Ctx,
        operation: Operation,
        snapshot: Arc<Snapshot>,
        principal: Arc<Principal>,
        body: Body,
    ) -> Result<Box<Call>, Rejection> {
        let facts = read(operation, &body.bytes).await?;
        let named = Choices::named(&snapshot, &principal, operation, &facts)?;
        ctx.model = named.first().map(|choice| Arc::clone(&choice.model));
        let wish = Wish { ctx, operation, principal: &principal, facts: &facts };
        let plan = wish.plan(&snapshot, &named).await?;
        let (ticket, choices) = match self.hold(&wish, named.within(&plan), &body.bytes).await {
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
            .in_places(|id| snapshot.place(id));
        let gate = Gate::new(Arc::clone(&self.holds), ticket, Source::new(body.bytes, body.reserved));
        Ok(Box::new(Call {
            operation,
            own_input: wish.own_input(),
            snapshot,
            choices,
            facts,
            planner,
            pass: Some(plan.pass),
            unseen: None,
            tried: vec![],
            last_failed: None,
            current: None,
            gate,
            first_attempt: None,
            abandoned_max: principal.terms.abandoned_max,
        }))
    }

    async fn hold(
        &self,
        wish: &Wish<'_>,
        choices: Choices,
        body: &Bytes,
    ) -> Result<(Ticket, Choices), Rejection> {
        let needed = choices.amount(wish.facts).map_err(too_dear)?;
        let denied = match self.place(wish, &choices, needed).await {
            Ok(ticket) => return Ok((ticket, choices)),
            Err(deny) => deny,
        };
        let Deny::Funds { available } = denied else { return Err(self.denied(wish, denied, needed)) };
        let choices = choices.counted(wish.facts, body).await;
        let counted = choices.amount(wish.facts).map_err(too_dear)?;
        if counted < needed
            && let Ok(ticket) = self.place(wish, &choices, counted).await
        {
            return Ok((ticket, choices));
        }
        // Never more than half of what is there: one call must not take all of it.
        let half = Amount::from_nano(available.nano() / 2);
        let least = wish.principal.terms.clamp_min;
        if let Some(choices) = least.and_then(|least| choices.clamped(wish.facts, half, least)) {
            let amount = choices.amount(wish.facts).map_err(too_dear)?;
            let placed = self.place(wish, &choices, amount).await;
            return placed.map(|ticket| (ticket, choices)).map_err(|deny| self.denied(wish, deny, amount));
        }
        Err(self.denied(wish, Deny::Funds { available }, counted))
    }

    /// Every try is a hold of its own: an id never comes twice.
    async fn place(&self, wish: &Wish<'_>, choices: &Choices, amount: Amount) -> Result<Ticket, Deny> {
        let admit = Admit {
            hold: entropy::hold_id(),
            account: wish.principal.account,
            amount,
            request: wish.ctx.request_id.clone(),
            models: choices.names(),
            key: wish.principal.digest,
            price_version: choices.first().map_or(0, |choice| choice.model.price.version),
            // The bound in bytes would use up a minute's tokens with prompts that are a quarter of it.
            tokens: choices.tokens(wish.own_input()),
            scopes: Arc::clone(&wish.principal.terms.scopes),
        };
        let placed = self.holds.admit(admit).await;
        if placed.is_ok() {
            self.metrics.calls.hold_placed();
        }
        placed
    }

    fn denied(&self, wish: &Wish<'_>, deny: Deny, needed: Amount) -> Rejection {
        let (word, rejection) = match deny {
            Deny::Funds { available } => ("funds", short_of(needed, available, wish.operation)),
            Deny::Limited { scope, over } => {
                self.metrics.calls.over_limit(scope, over.kind);
                (over.kind.word(), limited(scope, over))
            }
            Deny::Revoked => ("revoked", Rejection::new(Reason::InvalidKey, "The key has been revoked.")),
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
async fn read(operation: Operation, body: &Bytes) -> Result<Facts, Rejection> {
    if body.len() <= READ_AT_ONCE_BYTES {
        return operation.read(body);
    }
    let body = body.clone();
    tokio::task::spawn_blocking(move || operation.read(&body)).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a body could not be read");
        Err(Rejection::new(Reason::Internal, "Something broke in the gateway."))
    })
}

/// What a hold is sized by.
struct Wish<'a> {
    ctx: &'a Ctx,
    operation: Operation,
    principal: &'a Principal,
    facts: &'a Facts,
}

impl Wish<'_> {
    /// Room 3: whom to ask, or why nobody can be asked.
    async fn plan(&self, snapshot: &Snapshot, named: &Choices) -> Result<Plan, Rejection> {
        let ask = Ask {
            models: &named.ids(),
            form: if self.facts.stream { Form::Stream } else { Form::Whole },
            prompt_tokens: self.own_input(),
            preferences: &self.facts.preferences,
        };
        match snapshot.upstreams.candidates_of_fleet(&ask).await {
            Found::Plan(plan) => Ok(plan),
            Found::AllRefused { soonest, rate_limited, gate: _ } => {
                let wait = soonest.saturating_duration_since(clock::now()).max(FULL_RETRY_AFTER);
                let (reason, message) = if rate_limited {
                    (Reason::RateLimited, "Every upstream of this model is over its rate limit.")
                } else {
                    (Reason::NoUpstream, "No upstream of this model can be asked right now.")
                };
                Err(Rejection::new(reason, message).retry_after(wait).of_upstreams())
            }
            Found::NoneFits(dropped) => Err(none_fits(&dropped)),
        }
    }

    fn own_input(&self) -> u64 {
        meter::own_input(&self.facts.input)
    }
}

/// The caller's own preferences leave nobody: asking again would not help.
fn none_fits(dropped: &[(Route, Dropped)]) -> Rejection {
    let mut words: Vec<String> = dropped.iter().map(|(_, why)| format!("`{}`", why.word())).collect();
    words.sort_unstable();
    words.dedup();
    let message = format!("No route of this model fits the request's preferences: {}.", words.join(", "));
    Rejection::new(Reason::InvalidValue, message).param("provider")
}

fn short_of(needed: Amount, available: Amount, operation: Operation) -> Rejection {
    let less = match operation.output_field() {
        Some(field) => format!("ask for fewer output tokens (`{field}`)"),
        None => "send less".to_owned(),
    };
    let message = format!(
        "The balance cannot carry this call: it may cost up to {needed}, {available} is available. \
         Top up, or {less}."
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
