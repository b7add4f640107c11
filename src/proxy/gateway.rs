//! What all of a process' requests share.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::bodies::Bodies;
use super::keyed::KeyedCalls;
use crate::books::Books;
use crate::config::checked::Bounds;
use crate::drain::Drain;
use crate::ops::Metrics;
use crate::ops::otlp::Telemetry;
use crate::pool::Pool;
use crate::record::recorder::Recorder;
use crate::status::StatusPage;
use crate::store::Holds;

/// The gateway: its rooms are the files beside this one.
#[derive(Clone)]
pub struct Gateway {
    pub pool: Arc<Pool>,
    pub holds: Arc<dyn Holds>,
    pub bounds: Arc<ArcSwap<Bounds>>,
    pub bodies: Arc<Bodies>,
    pub metrics: Arc<Metrics>,
    pub drain: Arc<Drain>,
    pub books: Arc<Books>,
    pub keyed: Arc<KeyedCalls>,
    pub recorder: Arc<Recorder>,
    /// `None`: nobody collects spans.
    pub telemetry: Option<Telemetry>,
    pub status: Arc<StatusPage>,
}
