//! Calls that wait for a Redis that has just gone: one that restarts or fails over is soon back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;

/// How long a call waits for a Redis that has just gone, before it is told to come back.
const PATIENCE: Duration = Duration::from_secs(2);
/// A Redis that is away for longer is not waited for.
const NEW: Duration = Duration::from_secs(5);
/// Calls that wait for it at once.
const WAITING_MAX: usize = 1024;
/// The first pause of such a call; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(25);

/// Whether pools can be asked, as calls have found.
#[derive(Default)]
pub(super) struct Outage {
    /// Since when no call has found money in a pool that could be asked.
    since: Mutex<Option<Instant>>,
    /// Calls that wait for that to be over.
    waiting: AtomicUsize,
}

impl Outage {
    /// A call was placed in a pool.
    pub(super) fn is_over(&self) {
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether it has lasted for so long that nobody waits for its end any more; begins with the first question.
    fn is_long(&self) -> bool {
        let now = clock::now();
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        now.saturating_duration_since(*since.get_or_insert(now)) > NEW
    }
}

/// How long one call waits for a Redis that has just gone.
pub(super) struct Wait<'a> {
    outage: &'a Outage,
    end: Option<Instant>,
    pause: Duration,
}

impl<'a> Wait<'a> {
    pub(super) fn new(outage: &'a Outage) -> Self {
        Self { outage, end: None, pause: PAUSE }
    }

    /// Waits a little; whether the call should try again.
    pub(super) async fn again(&mut self) -> bool {
        let now = clock::now();
        if self.end.is_none() {
            let room = |waiting| (waiting < WAITING_MAX).then_some(waiting + 1);
            if self.outage.is_long()
                || self.outage.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).is_err()
            {
                return false;
            }
        }
        let end = *self.end.get_or_insert(now + PATIENCE);
        if now >= end {
            return false;
        }
        tokio::time::sleep(self.pause).await;
        self.pause *= 2;
        true
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if self.end.is_some() {
            self.outage.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
