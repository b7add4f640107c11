//! What is asked of the records over the admin port, with the token: `GET /failovers`, `GET /slo`, `GET /slo/report`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use filters::slo::month::Month;
use serde::{Deserialize, Serialize};

use super::{Admin, Refused, authorize};
use crate::clock;
use crate::config::records::Slo;
use crate::record::attempts::{Attempt, By, Group, Which};
use crate::record::recorder::Recorder;
use crate::record::report::Report;
use crate::record::{RecordError, Records};

/// Rows, or groups, where nothing is said.
pub const ROWS_DEFAULT: u32 = 50;
/// The most that are told at once.
pub const ROWS_MAX: u32 = 10_000;

/// Which failovers are asked for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// All that was decided about this call, and nothing else.
    pub request: Option<String>,
    /// Of this reason alone.
    pub reason: Option<String>,
    /// Counted by this.
    pub by: Option<By>,
    /// How far back, as `90m`. Default 1h.
    pub since: Option<String>,
    /// At most so many. Default 50.
    pub limit: Option<u32>,
}

/// Which month is asked for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskedMonth {
    /// As `2026-11`. Default: this one.
    pub month: Option<String>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Failovers {
    Attempts(Vec<Attempt>),
    Groups(Vec<Group>),
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It makes no sense.
    #[error("{0}")]
    Unclear(String),
    /// The records cannot be read.
    #[error(transparent)]
    Records(#[from] RecordError),
}

impl Asked {
    /// Asks it of records.
    ///
    /// # Errors
    /// [`AskError`] for a span that is none, or when the records cannot be read.
    pub fn of(&self, records: &Records, now_ms: i64) -> Result<Failovers, AskError> {
        if let Some(request) = &self.request {
            return Ok(Failovers::Attempts(records.attempts_of(request)?));
        }
        let since = self.since.as_deref().unwrap_or("1h");
        let span = humantime::parse_duration(since).map_err(|error| {
            AskError::Unclear(format!("since: `{since}` is no time such as 90m ({error})"))
        })?;
        let ago = i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
        let which = Which {
            reason: self.reason.clone(),
            from_ms: now_ms.saturating_sub(ago),
            limit: self.limit.unwrap_or(ROWS_DEFAULT).min(ROWS_MAX),
        };
        Ok(match self.by {
            Some(by) => Failovers::Groups(records.failovers_by(by, &which)?),
            None => Failovers::Attempts(records.failovers(&which)?),
        })
    }
}

impl AskedMonth {
    /// Asks it of records.
    ///
    /// # Errors
    /// [`AskError`] for a month that is none, or when the records cannot be read.
    pub fn of(&self, records: &Records, slo: &Slo, now_ms: i64) -> Result<Report, AskError> {
        let unclear = |why: String| AskError::Unclear(format!("month: {why}"));
        let month = match &self.month {
            Some(text) => text.parse::<Month>().map_err(|error| unclear(error.to_string()))?,
            None => {
                Month::of(now_ms).ok_or_else(|| unclear("the clock is beyond the year 9999".to_owned()))?
            }
        };
        Ok(records.slo(slo, month, now_ms)?)
    }
}

/// `GET /failovers`.
pub(super) async fn failovers(
    State(admin): State<Admin>,
    headers: HeaderMap,
    Query(asked): Query<Asked>,
) -> Result<Json<Failovers>, Refused> {
    authorize(&admin, &headers)?;
    on(&admin.recorder, move |records, _| asked.of(records, clock::unix_ms())).await.map(Json)
}

/// `GET /slo`.
pub(super) async fn slo(
    State(admin): State<Admin>,
    headers: HeaderMap,
    Query(asked): Query<AskedMonth>,
) -> Result<Json<Report>, Refused> {
    authorize(&admin, &headers)?;
    on(&admin.recorder, move |records, slo| asked.of(records, slo, clock::unix_ms())).await.map(Json)
}

/// `GET /slo/report`: the same for people, in Markdown.
pub(super) async fn report(
    State(admin): State<Admin>,
    headers: HeaderMap,
    Query(asked): Query<AskedMonth>,
) -> Result<impl IntoResponse, Refused> {
    authorize(&admin, &headers)?;
    let report = on(&admin.recorder, move |records, slo| asked.of(records, slo, clock::unix_ms())).await?;
    Ok(([(CONTENT_TYPE, "text/markdown; charset=utf-8")], report.markdown()))
}

/// Asks the records, on a thread that may wait.
async fn on<T: Send + 'static>(
    recorder: &Arc<Recorder>,
    ask: impl FnOnce(&Records, &Slo) -> Result<T, AskError> + Send + 'static,
) -> Result<T, Refused> {
    let recorder = Arc::clone(recorder);
    let asked = tokio::task::spawn_blocking(move || {
        let records = recorder.home.open_for_reading()?;
        ask(&records, &recorder.slo)
    });
    match asked.await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error @ AskError::Unclear(_))) => Err((StatusCode::BAD_REQUEST, error.to_string())),
        Ok(Err(error @ AskError::Records(_))) => Err((StatusCode::SERVICE_UNAVAILABLE, error.to_string())),
        Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}
