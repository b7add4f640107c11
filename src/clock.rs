//! The only place that asks the time.

#![expect(clippy::disallowed_methods, reason = "this is where the clock lives")]

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Now, for measuring. Tokio's clock, so that a test may pause it.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// A moment on both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// For measuring.
    pub instant: Instant,
    /// For records that outlive the process, as [`unix_ms`].
    pub unix_ms: i64,
}

/// Now, on both clocks.
#[must_use]
pub fn moment() -> Moment {
    Moment { instant: now(), unix_ms: unix_ms() }
}

/// Now, for records that outlive the process: milliseconds since 1970, never below zero.
#[must_use]
pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The same in microseconds, for lines.
#[must_use]
pub fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// The kernel's `CLOCK_MONOTONIC` in microseconds, which systemd wants to be told.
#[must_use]
pub fn monotonic_usec() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.saturating_mul(1_000_000).saturating_add(now.tv_nsec / 1000)
}
