//! What an operator sees: metrics, logs, health, alarms.

#[cfg(feature = "count-allocations")]
pub mod allocations;
mod call_lines;
mod lines;
pub mod log;
pub mod metrics;
pub mod notify;
pub mod otlp;
pub mod tracker;

pub use metrics::Metrics;
