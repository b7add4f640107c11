//! The models that may serve a call: the asked one, and those that the caller accepts instead.
//!
//! **Never a model that the caller did not name.** Each is bounded by its own limits and priced by its own
//! list; the hold is for the dearest of them, since nobody knows yet who will serve. Whoever serves is who is
//! billed, whose name the answer shows, and whose limits per minute count; the others give back what was
//! set aside.

use std::sync::Arc;

use bytes::Bytes;
use filters::dialect::Dialect;
use filters::facts::Facts;
use filters::hold::{self, Bound};
use filters::ids::{EndpointId, ModelId};
use filters::money::{Amount, CostError};
use filters::upstream::board::Plan;
use filters::verdict::{Reason, Rejection};

use super::surface;
use crate::config::checked::{Model, Tokenizer};
use crate::pool::Snapshot;
use crate::pool::keys::Principal;

/// The largest body whose tokens are counted, in bytes: about a tenth of a second of one core.
const COUNT_BYTES_MAX: usize = 1 << 20;

/// A model that may serve, and the most that the call may use there.
#[derive(Clone)]
pub(super) struct Choice {
    pub(super) model: Arc<Model>,
    /// As the board knows it.
    pub(super) id: ModelId,
    pub(super) bound: Bound,
}

/// All of them, in the caller's order; never empty.
#[derive(Clone)]
pub(super) struct Choices(Vec<Choice>);

impl Choices {
    /// Every model that the request names.
    ///
    /// # Errors
    /// For the first that there is not, that this key may not use, or that is not served here.
    pub(super) fn named(
        snapshot: &Snapshot,
        principal: &Principal,
        dialect: Dialect,
        facts: &Facts,
    ) -> Result<Self, Rejection> {
        let mut choices: Vec<Choice> = vec![];
        for name in facts.preferences.named(&facts.model) {
            let param = if name == facts.model { "model" } else { "models" };
            let model = find_model(snapshot, principal, dialect, name, param)?;
            // An alias may have named it before.
            if choices.iter().any(|known| known.model.name == model.name) {
                continue;
            }
            let id =
                snapshot.upstreams.model(&model.name, dialect).ok_or_else(|| not_here(dialect, param))?;
            let bound = hold::bound(facts, &model.limits, principal.default_output_tokens);
            choices.push(Choice { model, id, bound });
        }
        Ok(Self(choices))
    }

    /// Only those that a plan may get to.
    pub(super) fn within(mut self, plan: &Plan) -> Self {
        let planned = |id: ModelId| plan.order.iter().chain(&plan.fall_backs).any(|route| route.model == id);
        self.0.retain(|choice| planned(choice.id));
        self
    }

    /// As the board knows them.
    pub(super) fn ids(&self) -> Vec<ModelId> {
        self.0.iter().map(|choice| choice.id).collect()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.0.iter().map(|choice| choice.model.name.clone()).collect()
    }

    /// The one that is asked first.
    pub(super) fn first(&self) -> Option<&Choice> {
        self.0.first()
    }

    /// The one whose route an endpoint is.
    pub(super) fn of(&self, endpoint: EndpointId) -> Option<&Choice> {
        self.0.iter().find(|choice| choice.model.routes.contains(&endpoint))
    }

    /// The hold: for the dearest of them.
    ///
    /// # Errors
    /// [`CostError`] when it is more than an amount can hold.
    pub(super) fn amount(&self, facts: &Facts) -> Result<Amount, CostError> {
        let amounts = self.0.iter().map(|Choice { model, bound, .. }| {
            hold::amount(bound, model.price.reachable(bound.input, facts.tier))
        });
        amounts.into_iter().try_fold(Amount::ZERO, |most, amount| Ok(most.max(amount?)))
    }

    /// The most output of any of them, in tokens.
    pub(super) fn output_max(&self) -> u64 {
        self.0.iter().map(|choice| choice.bound.output).max().unwrap_or_default()
    }

    /// With the tokens counted, where a model says how and the body is not too large.
    pub(super) async fn counted(&self, facts: &Facts, body: &Bytes) -> Self {
        if facts.input.beyond_body || body.len() > COUNT_BYTES_MAX {
            return self.clone();
        }
        let mut counted = self.clone();
        for choice in &mut counted.0 {
            let Some(tokenizer) = choice.model.tokenizer else { continue };
            if let Some(tokens) = count(tokenizer, body.clone()).await {
                choice.bound = hold::counted(&choice.bound, tokens, facts, &choice.model.limits);
            }
        }
        counted
    }

    /// With as much output as `money` carries, but not less than `least` tokens a choice; `None` where one of
    /// them is too dear even so.
    pub(super) fn clamped(&self, facts: &Facts, money: Amount, least: u64) -> Option<Self> {
        let clamped = self.0.iter().map(|choice| {
            let bound = hold::clamped(&choice.bound, facts, &choice.model.price, money, least)?;
            Some(Choice { bound, ..choice.clone() })
        });
        clamped.collect::<Option<_>>().map(Self)
    }
}

/// Counts off the threads that serve.
async fn count(tokenizer: Tokenizer, body: Bytes) -> Option<u64> {
    let counting = tokio::task::spawn_blocking(move || {
        let text = std::str::from_utf8(&body).unwrap_or_default();
        match tokenizer {
            Tokenizer::O200k => bpe_openai::o200k_base().count(text),
            Tokenizer::Cl100k => bpe_openai::cl100k_base().count(text),
        }
    });
    match counting.await {
        Ok(tokens) => Some(u64::try_from(tokens).unwrap_or(u64::MAX)),
        Err(error) => {
            tracing::error!(%error, "tokens could not be counted");
            None
        }
    }
}

/// The model of that name or alias, if this key may use it and somebody serves it in this dialect. `param`:
/// the field that named it.
pub(super) fn find_model(
    snapshot: &Snapshot,
    principal: &Principal,
    dialect: Dialect,
    name: &str,
    param: &'static str,
) -> Result<Arc<Model>, Rejection> {
    let model = snapshot.catalogue.model(name).ok_or_else(|| {
        let message = "There is no such model. `GET /v1/models` lists those that there are.";
        Rejection::new(Reason::ModelNotFound, message).param(param)
    })?;
    if !principal.may_use(name) && !principal.may_use(&model.name) {
        let message = "This key may not use that model. `GET /v1/models` lists those that it may.";
        return Err(Rejection::new(Reason::ModelNotAllowed, message).param(param));
    }
    if !snapshot.catalogue.speaks(model, dialect) {
        return Err(not_here(dialect, param));
    }
    Ok(Arc::clone(model))
}

fn not_here(dialect: Dialect, param: &'static str) -> Rejection {
    let here = surface::path_of(dialect);
    let message =
        format!("That model is not served at `POST {here}`: none of its upstreams speaks that dialect.");
    Rejection::new(Reason::ModelNotFound, message).param(param)
}
