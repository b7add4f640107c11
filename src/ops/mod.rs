//! What an operator sees: metrics, logs, health.

pub mod log;
pub mod metrics;

pub use metrics::Metrics;
