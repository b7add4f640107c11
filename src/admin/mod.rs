//! The admin port: health, metrics, and the books.
//!
//! Health and metrics need no authentication, so the port belongs on no public address. The books need
//! the token that each start writes into the data folder, readable by the gateway's user alone: a page
//! in somebody's browser or another user of the machine must not be able to move money.

pub mod explain;
mod incidents;
mod observe;
pub mod records;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use axum::extract::State;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use subtle::ConstantTimeEq as _;

use crate::books::{Books, BooksError, Verb};
use crate::config::checked::Bounds;
use crate::drain::Drain;
use crate::edge::Tls;
use crate::fleet::Node;
use crate::journal::Journal;
use crate::ledger::LedgerError;
use crate::ledger::worker::Progress;
use crate::ops::Metrics;
use crate::ops::metrics::render;
use crate::pool::Pool;
use crate::proxy::Bodies;
use crate::record::recorder::Recorder;
use crate::reload::{Outcome, Reloader};
use crate::status::Watch;
use crate::store::{Embedded, Holds};

/// What the port tells about.
#[derive(Clone)]
pub struct Admin {
    pub metrics: Arc<Metrics>,
    pub drain: Arc<Drain>,
    pub pool: Arc<Pool>,
    pub holds: Arc<dyn Holds>,
    pub journal: Journal,
    /// The public port really accepts connections.
    pub serving: Arc<AtomicBool>,
    pub bodies: Arc<Bodies>,
    pub books: Arc<Books>,
    /// Whoever does something with the books has to know it.
    pub token: Arc<str>,
    /// `None`: there is no config file.
    pub reloader: Option<Arc<Reloader>>,
    /// `None`: there are no other nodes.
    pub fleet: Option<Arc<Node>>,
    /// What happened.
    pub recorder: Arc<Recorder>,
    /// What this process alone has leased.
    pub store: Arc<Embedded>,
    /// How far the ledger is behind the journal.
    pub progress: Arc<Progress>,
    pub bounds: Arc<ArcSwap<Bounds>>,
    /// What listeners show, by their field.
    pub certificates: Vec<(&'static str, Arc<Tls>)>,
    pub data: PathBuf,
    pub status: Arc<Watch>,
}

/// Why something was not done.
type Refused = (StatusCode, String);

/// The routes.
pub fn router(admin: Admin) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/books", post(books))
        .route("/explain", post(explain::explain))
        .route("/reload", post(reload))
        .route("/failovers", get(records::failovers))
        .route("/slo", get(records::slo))
        .route("/slo/report", get(records::report))
        .route("/incidents", post(incidents::incidents))
        .with_state(admin)
}

async fn readyz(State(admin): State<Admin>) -> impl IntoResponse {
    match admin.unready() {
        None => (StatusCode::OK, format!("ready\n{}", admin.notices())),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
    }
}

async fn books(
    State(admin): State<Admin>,
    headers: HeaderMap,
    Json(verb): Json<Verb>,
) -> Result<Json<serde_json::Value>, Refused> {
    authorize(&admin, &headers)?;
    let books = Arc::clone(&admin.books);
    let done = tokio::task::spawn_blocking(move || books.perform(verb)).await;
    match done {
        Ok(Ok(value)) => Ok(Json(value)),
        Ok(Err(error @ BooksError::Ledger(LedgerError::Unreachable(_)))) => {
            let why = format!("{error}. Calls go on; the books are read-only until it answers");
            Err((StatusCode::SERVICE_UNAVAILABLE, why))
        }
        Ok(Err(error)) => Err((StatusCode::UNPROCESSABLE_ENTITY, error.to_string())),
        Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// Reads the config file and says what came of it.
async fn reload(
    State(admin): State<Admin>,
    headers: HeaderMap,
) -> Result<(StatusCode, Json<Outcome>), Refused> {
    authorize(&admin, &headers)?;
    let Some(reloader) = admin.reloader else {
        return Err((StatusCode::CONFLICT, "this gateway was started without a config file".to_owned()));
    };
    match tokio::task::spawn_blocking(move || reloader.reload("POST /reload")).await {
        Ok(outcome @ Outcome::Applied { .. }) => Ok((StatusCode::OK, Json(outcome))),
        Ok(outcome @ Outcome::Refused { .. }) => Ok((StatusCode::UNPROCESSABLE_ENTITY, Json(outcome))),
        Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

fn authorize(admin: &Admin, headers: &HeaderMap) -> Result<(), Refused> {
    let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
    let wanted = format!("Bearer {}", admin.token);
    if given.ct_eq(wanted.as_bytes()).into() {
        Ok(())
    } else {
        Err((StatusCode::UNAUTHORIZED, "the admin token is missing or not the current one".to_owned()))
    }
}

/// Where the admin token of a data folder is.
#[must_use]
pub fn token_file(data: &Path) -> PathBuf {
    data.join("admin.token")
}

/// Makes this start's admin token and writes it for the command line to read. One that `takes_over` keeps the
/// token that there is: it is good for both processes, at any moment.
///
/// # Errors
/// When the file cannot be written.
pub fn token(data: &Path, takes_over: bool) -> std::io::Result<Arc<str>> {
    let file = token_file(data);
    if takes_over && let Ok(token) = std::fs::read_to_string(&file) {
        return Ok(token.into());
    }
    let token = crate::books::fresh_key()?;
    // A new file each time: the mode counts only when a file is made.
    match std::fs::remove_file(&file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file)?;
    out.write_all(token.as_bytes())?;
    Ok(token.into())
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    let text = render(&admin.gather());
    #[cfg(feature = "count-allocations")]
    let text = text + &crate::ops::allocations::render();
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}

impl Admin {
    fn unready(&self) -> Option<&'static str> {
        if !self.drain.is_ready() {
            return Some("the process is leaving");
        }
        if !self.serving.load(Ordering::Acquire) {
            return Some("the public port is not open yet");
        }
        if self.pool.load().upstreams.is_cut_off() {
            return Some("no upstream can be reached from this node");
        }
        self.holds.trouble()
    }

    /// What is not as it should be, a line each, although calls are wanted.
    fn notices(&self) -> String {
        let notices = self.fleet.iter().flat_map(|fleet| fleet.notices());
        notices.map(|notice| format!("notice: {notice}\n")).collect()
    }
}
