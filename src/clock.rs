//! The only place that asks the time.

#![expect(clippy::disallowed_methods, reason = "this is where the clock lives")]

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Now, for measuring. Tokio's clock, so that a test may pause it.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Now, for records that outlive the process: milliseconds since 1970, never below zero.
#[must_use]
pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
