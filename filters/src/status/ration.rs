//! How much of the status page a node gives away.
//!
//! Everybody may ask for the page, with forty bytes, and gets a hundred times as many: a flood of such requests costs no
//! query and hardly any computing, but it would fill the line that calls need. So bytes of the page are rationed: up to
//! [`AHEAD`] of a ration may be given away at once, then only as fast as it comes in. What costs no bytes (a 304, an answer
//! to HEAD) is never refused.
//!
//! Deliberately absent: whose request it is. Addresses are for whoever floods to choose, and their connections are counted
//! already; what is left to protect is the line, and that is the node's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A node that was not asked for so long may give away all of it at once: a crowd comes when something is wrong.
pub const AHEAD: Duration = Duration::from_secs(10);

/// What is left, for many threads at once.
#[derive(Debug)]
pub struct Ration {
    began: Instant,
    /// In microseconds since then: everything that was given away has come in by this time.
    settled_us: AtomicU64,
}

impl Ration {
    /// A whole one.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self { began: now, settled_us: AtomicU64::new(0) }
    }

    /// Takes so many bytes, where `per_second` come in. Whoever finds something left gets all that they ask for, so that a
    /// page larger than the ration is served too, now and then.
    ///
    /// # Errors
    /// When nothing is left: the time after which there is.
    pub fn take(&self, now: Instant, bytes: usize, per_second: u64) -> Result<(), Duration> {
        let now_us = micros(now.saturating_duration_since(self.began));
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let cost_us = bytes.saturating_mul(1_000_000) / per_second.max(1);
        let owed = |settled_us: u64| settled_us.saturating_sub(now_us);
        let taken = self.settled_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |settled_us| {
            let is_left = cost_us == 0 || owed(settled_us) < micros(AHEAD);
            is_left.then(|| settled_us.max(now_us).saturating_add(cost_us))
        });
        let wait = |settled_us| Duration::from_micros(owed(settled_us).saturating_sub(micros(AHEAD)).max(1));
        taken.map(|_| ()).map_err(wait)
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_crowd_is_served_at_once_and_a_flood_as_fast_as_the_ration_comes_in() {
        let began = Instant::now();
        let ration = Ration::new(began);
        let served = |at: Instant| (0..1_000).filter(|_| ration.take(at, 100, 1_000).is_ok()).count();
        assert_eq!(served(began), 100, "ten seconds of it");
        assert_eq!(served(began + SECOND), 10);
        assert_eq!(served(began + 3 * SECOND), 20);
        assert_eq!(served(began + 1_000 * SECOND), 100, "no more than that is ever kept");
    }

    #[test]
    fn who_is_refused_is_told_when_to_come_back_and_what_costs_nothing_is_never_refused() {
        let began = Instant::now();
        let ration = Ration::new(began);
        assert_eq!(ration.take(began, 50_000, 1_000), Ok(()), "more than the ration, and all of it");
        let wait = ration.take(began, 1, 1_000).unwrap_err();
        assert_eq!(wait, 40 * SECOND);
        assert_eq!(ration.take(began, 0, 1_000), Ok(()));
        assert!(ration.take(began + wait, 1, 1_000).is_err(), "a moment later");
        assert_eq!(ration.take(began + wait + Duration::from_millis(1), 1, 1_000), Ok(()));
    }

    proptest! {
        #[test]
        fn never_more_is_given_away_than_came_in_and_one_answer(
            asked in proptest::collection::vec((0_u64..2_000, 0_usize..5_000), 1..200),
        ) {
            let (began, per_second) = (Instant::now(), 1_000);
            let ration = Ration::new(began);
            let (mut at, mut given, mut largest) = (began, 0, 0);
            for (pause_ms, bytes) in asked {
                at += Duration::from_millis(pause_ms);
                largest = largest.max(bytes);
                if ration.take(at, bytes, per_second).is_ok() {
                    given += bytes;
                }
                let came_in = (at - began + AHEAD).as_millis() as usize;
                prop_assert!(given <= came_in + largest, "{given} of {came_in}");
            }
        }
    }
}
