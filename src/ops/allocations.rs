//! How often the process has asked for memory; only in a build that counts (`--features count-allocations`), for
//! `scripts/bench`. The binary's allocator counts here, and the admin port shows it.

use std::sync::atomic::{AtomicU64, Ordering};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts one request for so many bytes. Called by the allocator itself: it must not allocate.
pub fn count(bytes: usize) {
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// What was counted, in Prometheus' text format.
#[must_use]
pub fn render() -> String {
    let (allocations, bytes) = (ALLOCATIONS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
    format!("tollgate_allocations_total {allocations}\ntollgate_allocated_bytes_total {bytes}\n")
}
