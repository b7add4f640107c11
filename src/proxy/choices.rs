//! The models that may serve a call: the asked one, and those that the caller accepts instead.
//!
//! **Never a model that the caller did not name.** Each is bounded by its own limits and priced by its own
//! list; the hold is for the dearest of them, since nobody knows yet who will serve. Whoever serves is who is
//! billed, whose name the answer shows, and whose limits per minute count; the others give back what was
//! set aside.

use std::sync::Arc;

use bytes::Bytes;
use filters::dialect::Operation;
use filters::facts::Facts;
use filters::hold::{self, Bound};
use filters::ids::{EndpointId, ModelId};
use filters::money::{Amount, CostError};
use filters::upstream::board::Plan;
use filters::verdict::{Reason, Rejection};

use super::surface;
use crate::config::checked::{Catalogue, Model, Tokenizer};
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
pub(super) struct Choices {
    operation: Operation,
    all: Vec<Choice>,
}

impl Choices {
    /// Every model that the request names.
    ///
    /// # Errors
    /// For the first that there is not, that this key may not use, or that is not served here.
    pub(super) fn named(
        snapshot: &Snapshot,
        principal: &Principal,
        operation: Operation,
        facts: &Facts,
    ) -> Result<Self, Rejection> {
        let mut all: Vec<Choice> = vec![];
        for name in facts.preferences.named(&facts.model) {
            let param = if name == facts.model { "model" } else { "models" };
            let model = find_model(snapshot, principal, name, param)?;
            // An alias may have named it before.
            if all.iter().any(|known| known.model.name == model.name) {
                continue;
            }
            let served = snapshot.upstreams.model(&model.name, operation);
            let id = served.ok_or_else(|| not_here(&snapshot.catalogue, &model, operation, param))?;
            check_priced(facts, &model)?;
            let bound = hold::bound(facts, &model.limits, principal.terms.default_output_tokens);
            all.push(Choice { model, id, bound });
        }
        Ok(Self { operation, all })
    }

    /// Only those that a plan may get to.
    pub(super) fn within(mut self, plan: &Plan) -> Self {
        let planned = |id: ModelId| plan.order.iter().chain(&plan.fall_backs).any(|route| route.model == id);
        self.all.retain(|choice| planned(choice.id));
        self
    }

    /// As the board knows them.
    pub(super) fn ids(&self) -> Vec<ModelId> {
        self.all.iter().map(|choice| choice.id).collect()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.all.iter().map(|choice| choice.model.name.clone()).collect()
    }

    /// The one that is asked first.
    pub(super) fn first(&self) -> Option<&Choice> {
        self.all.first()
    }

    /// The one whose route an endpoint is.
    pub(super) fn of(&self, endpoint: EndpointId) -> Option<&Choice> {
        // Of a call that names one model every route is that one's, and there may be a thousand.
        match self.all.as_slice() {
            [only] => Some(only),
            all => all.iter().find(|choice| choice.model.routes.contains(&endpoint)),
        }
    }

    /// The hold: for the dearest of them.
    ///
    /// # Errors
    /// [`CostError`] when it is more than an amount can hold.
    pub(super) fn amount(&self, facts: &Facts) -> Result<Amount, CostError> {
        if self.operation.is_free() {
            return Ok(Amount::ZERO); // A hold of nothing: the limits and the books know the call all the same.
        }
        let amounts = self.all.iter().map(|Choice { model, bound, .. }| {
            hold::amount(bound, model.price.reachable(bound.input, facts.tier))
        });
        amounts.into_iter().try_fold(Amount::ZERO, |most, amount| Ok(most.max(amount?)))
    }

    /// What limits per minute count before the answer: `input`, and the most output of any of them.
    pub(super) fn tokens(&self, input: u64) -> u64 {
        if self.operation.is_free() {
            return 0;
        }
        input.saturating_add(self.all.iter().map(|choice| choice.bound.output).max().unwrap_or_default())
    }

    /// With the tokens counted, where a model says how and the body is not too large.
    pub(super) async fn counted(&self, facts: &Facts, body: &Bytes) -> Self {
        if facts.input.beyond_body || body.len() > COUNT_BYTES_MAX {
            return self.clone();
        }
        let mut counted = self.clone();
        for choice in &mut counted.all {
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
        let clamped = self.all.iter().map(|choice| {
            let bound = hold::clamped(&choice.bound, facts, &choice.model.price, money, least)?;
            Some(Choice { bound, ..choice.clone() })
        });
        let all = clamped.collect::<Option<_>>()?;
        Some(Self { operation: self.operation, all })
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

/// Whether everything that the request asks for has a price there, or may do without one.
fn check_priced(facts: &Facts, model: &Model) -> Result<(), Rejection> {
    let Some(asked) = hold::unpriced(facts, &model.price, &model.unpriced) else { return Ok(()) };
    let message = format!(
        "`{}` asks for something that costs more than its tokens and has no price for this model ({}). \
         Leave it out.",
        asked.field,
        asked.extra.word()
    );
    Err(Rejection::new(Reason::InvalidValue, message).param(asked.field))
}

/// The model of that name or alias, if this key may use it. `param`: the field that named it.
pub(super) fn find_model(
    snapshot: &Snapshot,
    principal: &Principal,
    name: &str,
    param: &'static str,
) -> Result<Arc<Model>, Rejection> {
    let Some(model) = snapshot.catalogue.model(name) else {
        let message = "There is no such model. `GET /v1/models` lists those that there are.";
        return Err(not_found(message, param));
    };
    if !principal.may_use(name) && !principal.may_use(&model.name) {
        let message = "This key may not use that model. `GET /v1/models` lists those that it may.";
        return Err(Rejection::new(Reason::ModelNotAllowed, message).param(param));
    }
    Ok(Arc::clone(model))
}

/// Nobody serves the model so: the caller is told where it is served.
fn not_here(catalogue: &Catalogue, model: &Model, operation: Operation, param: &'static str) -> Rejection {
    let served = Operation::ALL.into_iter().filter(|other| catalogue.serves(model, *other));
    let paths: Vec<String> = served.map(|other| format!("`{}`", surface::path_of(other))).collect();
    let (here, paths) = (surface::path_of(operation), paths.join(", "));
    not_found(format!("That model is not served at `{here}`. It is served at {paths}."), param)
}

pub(super) fn not_found(message: impl Into<String>, param: &'static str) -> Rejection {
    Rejection::new(Reason::ModelNotFound, message).param(param)
}
