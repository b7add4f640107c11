//! Incidents of the status page: `POST /incidents` with a verb.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use serde_json::Value;

use super::{Admin, Refused, authorize};
use crate::ledger::LedgerError;
use crate::record::RecordError;
use crate::record::incidents::{Verb, VerbError};
use crate::status::incident_as_json;

pub(super) async fn incidents(
    State(admin): State<Admin>,
    headers: HeaderMap,
    Json(verb): Json<Verb>,
) -> Result<Json<Value>, Refused> {
    authorize(&admin, &headers)?;
    let watch = Arc::clone(&admin.status);
    let done = tokio::task::spawn_blocking(move || watch.incident(verb)).await;
    match done {
        Ok(Ok(found)) => Ok(Json(found.iter().map(incident_as_json).collect())),
        Ok(Err(VerbError::Record(RecordError::Fleet(error @ LedgerError::Unreachable(_))))) => {
            let why = format!("{error}. Calls go on; incidents are read-only until it answers");
            Err((StatusCode::SERVICE_UNAVAILABLE, why))
        }
        Ok(Err(error @ VerbError::Bad(_))) => Err((StatusCode::UNPROCESSABLE_ENTITY, error.to_string())),
        Ok(Err(error @ VerbError::Record(_))) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
        Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}
