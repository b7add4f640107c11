//! What an operator sees: metrics, logs, health, alarms.

#[cfg(feature = "count-allocations")]
pub mod allocations;
mod call_lines;
pub mod heartbeat;
mod lines;
pub mod log;
pub mod metrics;
pub mod notify;
pub mod otlp;
pub mod outside;
pub mod ping;
pub mod tracker;

pub use metrics::Metrics;
