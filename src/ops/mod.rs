//! What an operator sees: metrics, logs, health.

pub mod log;
pub mod metrics;
pub mod notify;

pub use metrics::Metrics;
