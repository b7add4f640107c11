//! What an operator sees: metrics, logs, health.

mod lines;
pub mod log;
pub mod metrics;
pub mod notify;

pub use metrics::Metrics;
