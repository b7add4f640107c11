//! What every periodic job says of itself: that it begins, that it is done, that it failed.
//!
//! There is one list of jobs in a process, and whoever does something periodically puts itself on it, as whoever has
//! something to say writes a log line. Saying so is a store into an atomic number and nothing else, since some jobs run
//! twenty times a second; only a failure also keeps its words. What follows from it (pings, alarms, metrics, records) is
//! looked up by others ([`super::ping`], [`crate::notice::watch`]): no job waits for any of it.

use std::fmt::Display;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use filters::heartbeat::Seen;

use crate::clock;

/// As many jobs as a process may have.
const JOBS_MAX: usize = 64;
/// What is kept of a failure's words, in characters.
const FAILURE_CHARS_MAX: usize = 200;

static JOBS: Mutex<Vec<Arc<Job>>> = Mutex::new(Vec::new());

/// One periodic job. Times are milliseconds since 1970, 0 for never.
#[derive(Debug)]
pub struct Job {
    /// As pings, metrics and pages name it.
    pub name: &'static str,
    period_ms: i64,
    known_ms: i64,
    started_ms: AtomicI64,
    succeeded_ms: AtomicI64,
    failed_ms: AtomicI64,
    failures: AtomicU64,
    failure: Mutex<String>,
}

/// Puts a job on the list. Of two with one name the latter counts: a process has one of each.
pub fn job(name: &'static str, period: Duration) -> Arc<Job> {
    let job = Arc::new(Job {
        name,
        period_ms: i64::try_from(period.as_millis()).unwrap_or(i64::MAX),
        known_ms: clock::unix_ms(),
        started_ms: AtomicI64::new(0),
        succeeded_ms: AtomicI64::new(0),
        failed_ms: AtomicI64::new(0),
        failures: AtomicU64::new(0),
        failure: Mutex::default(),
    });
    let mut jobs = jobs();
    jobs.retain(|known| known.name != name);
    if jobs.len() < JOBS_MAX {
        jobs.push(Arc::clone(&job));
    }
    job
}

/// All jobs of this process.
#[must_use]
pub fn all() -> Vec<Arc<Job>> {
    jobs().clone()
}

fn jobs() -> MutexGuard<'static, Vec<Arc<Job>>> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// It begins now.
    pub fn begins(&self) {
        self.started_ms.store(clock::unix_ms(), Ordering::Relaxed);
    }

    /// It is done.
    pub fn done(&self) {
        self.succeeded_ms.store(clock::unix_ms(), Ordering::Relaxed);
    }

    /// It failed. The words must hold no secret: people read them.
    pub fn failed(&self, why: impl Display) {
        let why: String = why.to_string().chars().take(FAILURE_CHARS_MAX).collect();
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = why;
        self.failures.fetch_add(1, Ordering::Relaxed);
        // Never at the instant of a success before it: the latter of two counts.
        let now = clock::unix_ms().max(self.succeeded_ms.load(Ordering::Relaxed).saturating_add(1));
        self.failed_ms.store(now, Ordering::Relaxed);
    }

    /// Done or failed, as the result says.
    pub fn ended<T, E: Display>(&self, result: &Result<T, E>) {
        match result {
            Ok(_) => self.done(),
            Err(error) => self.failed(error),
        }
    }

    /// The same of what was done on a thread of its own.
    pub fn joined<T, E: Display, B: Display>(&self, result: &Result<Result<T, E>, B>) {
        match result {
            Ok(result) => self.ended(result),
            Err(broken) => self.failed(broken),
        }
    }

    /// There is nothing to do any more, and that is as it should be.
    pub fn is_over(&self) {
        jobs().retain(|known| known.name != self.name);
    }

    /// How it does.
    #[must_use]
    pub fn seen(&self) -> Seen {
        Seen {
            period_ms: self.period_ms,
            known_ms: self.known_ms,
            started_ms: self.started_ms.load(Ordering::Relaxed),
            succeeded_ms: self.succeeded_ms.load(Ordering::Relaxed),
            failed_ms: self.failed_ms.load(Ordering::Relaxed),
        }
    }

    /// Why it last failed; empty for never.
    #[must_use]
    pub fn failure(&self) -> String {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often it failed.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latter_of_two_ends_counts_and_a_job_that_is_over_is_nobodys() {
        let job = job("a_test_of_heartbeats", Duration::from_secs(1));
        job.begins();
        job.done();
        assert!(!job.seen().has_failed());
        job.failed("x".repeat(9999));
        assert!(job.seen().has_failed() && job.failure().len() == FAILURE_CHARS_MAX && job.failures() == 1);
        assert!(all().iter().any(|known| known.name == job.name));
        job.is_over();
        assert!(all().iter().all(|known| known.name != job.name));
    }
}
