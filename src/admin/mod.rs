//! The admin port: health and metrics. No authentication, so never on a public address.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;

use crate::drain::Drain;
use crate::ops::Metrics;
use crate::pool::Pool;
use crate::proxy::Bodies;
use crate::store::Holds;
use crate::{clock, journal::Journal};

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
}

/// The routes.
pub fn router(admin: Admin) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(admin)
}

async fn readyz(State(admin): State<Admin>) -> impl IntoResponse {
    match admin.unready() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
    }
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    admin.observe();
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], admin.metrics.render())
}

impl Admin {
    fn unready(&self) -> Option<&'static str> {
        if !self.drain.is_ready() {
            return Some("the process is leaving");
        }
        if !self.serving.load(Ordering::Acquire) {
            return Some("the public port is not open yet");
        }
        self.holds.trouble()
    }

    /// Brings gauges that are read rather than counted up to date.
    fn observe(&self) {
        let whole = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.metrics.in_flight.set(whole(self.drain.in_flight()));
        self.metrics.holds_open.set(whole(self.holds.open_holds()));
        self.metrics.body_bytes.set(whole(self.bodies.bytes()));
        self.metrics.journal_unposted.set(i64::try_from(self.journal.unposted()).unwrap_or(i64::MAX));
        self.metrics.ready.set(i64::from(self.unready().is_none()));
        let snapshot = self.pool.load();
        let now = clock::now();
        for (endpoint, live) in snapshot.catalogue.endpoints.iter().zip(&snapshot.live) {
            self.metrics.endpoint_factor.with_label_values(&[&endpoint.name]).set(live.factor(now));
        }
    }
}
