//! Whether the ledger answers, as this node last saw it.
//!
//! The heartbeat finds out, once a second, also about a server that takes connections and says nothing. While it does
//! not answer nobody waits for it: calls go on with what is leased, and the books are read-only, which they say at once.
//! Between two beats whoever asked in vain keeps the calls behind it from asking too.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;

/// After somebody asked in vain, calls do not ask for so long.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Reach {
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    answered: Instant,
    /// Why it cannot be asked, if so.
    why: Option<String>,
    /// Calls do not ask before this.
    paused: Option<Instant>,
}

impl Reach {
    /// Of a ledger that has just answered.
    pub(super) fn new() -> Self {
        Self { seen: Mutex::new(Seen { answered: clock::now(), why: None, paused: None }) }
    }

    pub(super) fn answered(&self) {
        let mut seen = self.lock();
        seen.answered = clock::now();
        if seen.why.take().is_some() {
            tracing::info!("the ledger answers again: the books are open");
        }
    }

    /// It did not; says so once.
    pub(super) fn is_silent(&self, why: String) {
        let mut seen = self.lock();
        if seen.why.is_none() {
            tracing::error!(
                why,
                "the ledger does not answer: calls go on with what is leased, and the books are read-only"
            );
        }
        seen.why = Some(why);
    }

    /// Somebody asked in vain. Whether it is away the next heartbeat tells.
    pub(super) fn pause(&self) {
        self.lock().paused = Some(clock::now() + PAUSE);
    }

    /// Whether a call may wait for it.
    pub(super) fn is_paused(&self) -> bool {
        self.lock().paused.is_some_and(|until| clock::now() < until)
    }

    /// Why it cannot be asked now.
    pub(super) fn why_not(&self) -> Option<String> {
        self.lock().why.clone()
    }

    /// Since it last answered.
    pub(super) fn age(&self) -> Duration {
        clock::now().saturating_duration_since(self.lock().answered)
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_is_away_from_its_first_silence_to_its_next_answer() {
        let reach = Reach::new();
        assert_eq!(reach.why_not(), None);
        reach.is_silent("a".to_owned());
        reach.is_silent("b".to_owned());
        assert_eq!(reach.why_not().as_deref(), Some("b"));
        reach.answered();
        assert_eq!(reach.why_not(), None);
    }
}
