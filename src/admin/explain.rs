//! What would happen to a request: `POST /explain` with its body. Sends nothing, takes nothing.

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use filters::dialect::Operation;
use filters::explain::HoldLines;
use filters::upstream::board::Ask;
use filters::upstream::watchdog::Form;
use filters::{hold, meter};
use serde::{Deserialize, Serialize};

use super::{Admin, Refused, authorize};

/// How the request is meant.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Asked {
    /// The word of its operation; chat completions where there is none.
    pub surface: Option<String>,
    /// The key's own default of output tokens, where it has one.
    pub default_output_tokens: Option<u64>,
}

pub(super) async fn explain(
    State(admin): State<Admin>,
    Query(asked): Query<Asked>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<String, Refused> {
    authorize(&admin, &headers)?;
    let refused = |message: String| (StatusCode::UNPROCESSABLE_ENTITY, message);
    let operation = match &asked.surface {
        None => Operation::Chat,
        Some(word) => Operation::ALL
            .into_iter()
            .find(|operation| operation.word() == word)
            .ok_or_else(|| refused(format!("there is no surface `{word}`")))?,
    };
    let facts = operation.read(&body).map_err(|rejection| refused(rejection.message))?;
    let snapshot = admin.pool.load();
    let mut ids = vec![];
    let mut dearest: Option<HoldLines> = None;
    for name in facts.preferences.named(&facts.model) {
        let model = snapshot.catalogue.model(name);
        let model = model.ok_or_else(|| refused(format!("there is no model `{name}`")))?;
        let id = snapshot.upstreams.model(&model.name, operation);
        let not_served = || refused(format!("no route of `{name}` serves {}", operation.word()));
        ids.push(id.ok_or_else(not_served)?);
        if operation.is_free() {
            continue;
        }
        let bound = hold::bound(&facts, &model.limits, asked.default_output_tokens);
        let cards = model.price.reachable(bound.input, facts.tier);
        let lines = HoldLines::new(&bound, cards).map_err(|error| refused(error.to_string()))?;
        let amount = |lines: &Option<HoldLines>| lines.as_ref().map(|lines| lines.amount);
        if amount(&lines) > amount(&dearest) {
            dearest = lines;
        }
    }
    let form = if facts.stream { Form::Stream } else { Form::Whole };
    let form_at = |id| match snapshot.endpoint(id) {
        Ok(endpoint) if endpoint.manners.folds(&facts) => Form::Stream,
        _ => form,
    };
    let ask = Ask {
        models: &ids,
        form,
        prompt_tokens: meter::own_input(&facts.input),
        preferences: &facts.preferences,
    };
    Ok(snapshot.upstreams.explain(&ask, form_at, dearest).to_string())
}
