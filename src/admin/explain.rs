//! What would happen to a request: `POST /explain` with its body. Sends nothing, takes nothing.

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use filters::dialect::Dialect;
use filters::explain::HoldLines;
use filters::upstream::board::Ask;
use filters::upstream::watchdog::Form;
use filters::{hold, meter};
use serde::{Deserialize, Serialize};

use super::{Admin, Refused, authorize};

/// How the request is meant.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Asked {
    /// It speaks Anthropic's dialect, not `OpenAI`'s.
    #[serde(default)]
    pub anthropic: bool,
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
    let dialect = if asked.anthropic { Dialect::Anthropic } else { Dialect::OpenAi };
    let facts = dialect.read(&body).map_err(|rejection| refused(rejection.message))?;
    let snapshot = admin.pool.load();
    let mut ids = vec![];
    let mut dearest: Option<HoldLines> = None;
    for name in facts.preferences.named(&facts.model) {
        let model = snapshot.catalogue.model(name);
        let model = model.ok_or_else(|| refused(format!("there is no model `{name}`")))?;
        let id = snapshot.upstreams.model(&model.name, dialect);
        ids.push(id.ok_or_else(|| refused(format!("no route of `{name}` speaks that dialect")))?);
        let bound = hold::bound(&facts, &model.limits, asked.default_output_tokens);
        let cards = model.price.reachable(bound.input, facts.tier);
        let lines = HoldLines::new(&bound, cards).map_err(|error| refused(error.to_string()))?;
        let amount = |lines: &Option<HoldLines>| lines.as_ref().map(|lines| lines.amount);
        if amount(&lines) > amount(&dearest) {
            dearest = lines;
        }
    }
    let input = &facts.input;
    let ask = Ask {
        models: &ids,
        form: if facts.stream { Form::Stream } else { Form::Whole },
        prompt_tokens: meter::own_input(input.text_bytes, input.messages, input.inline_images),
        preferences: &facts.preferences,
    };
    Ok(snapshot.upstreams.explain(&ask, dearest).to_string())
}
