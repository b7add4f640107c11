//! How much of a request's time one candidate may use.
//!
//! `deadline` bounds the time to the commit. A candidate's share is what remains, less a reserve,
//! divided by the candidates left. The reserve is a sixth of the whole: with 540 s and three
//! candidates each gets 150 s, and the last one never eats what the answer itself needs.

use std::time::{Duration, Instant};

/// Which part of the whole is kept back.
const RESERVE_PART: u32 = 6;

/// When a request must have committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    end: Instant,
    reserve: Duration,
}

impl Deadline {
    /// A deadline `whole` from `now`.
    #[must_use]
    pub fn new(now: Instant, whole: Duration) -> Self {
        Self { end: now + whole, reserve: whole / RESERVE_PART }
    }

    /// What is left of it.
    #[must_use]
    pub fn remaining(&self, now: Instant) -> Duration {
        self.end.saturating_duration_since(now)
    }

    /// How long a candidate may take that has `left - 1` others behind it. Zero when time is up.
    #[must_use]
    pub fn share(&self, now: Instant, left: u32) -> Duration {
        self.remaining(now).saturating_sub(self.reserve) / left.max(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn three_candidates_get_150_seconds_each_of_540() {
        let start = Instant::now();
        let deadline = Deadline::new(start, Duration::from_secs(540));
        let after = |s| start + Duration::from_secs(s);
        assert_eq!(deadline.share(start, 3), Duration::from_secs(150));
        assert_eq!(deadline.share(after(150), 2), Duration::from_secs(150));
        assert_eq!(deadline.share(after(300), 1), Duration::from_secs(150));
        assert_eq!(deadline.share(after(450), 1), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn shares_never_reach_past_the_deadline(
            whole in 1_u64..100_000, spent in 0_u64..200_000, left in 0_u32..9,
        ) {
            let start = Instant::now();
            let deadline = Deadline::new(start, Duration::from_millis(whole));
            let now = start + Duration::from_millis(spent);
            let share = deadline.share(now, left);
            prop_assert!(share * left.max(1) <= deadline.remaining(now));
        }
    }
}
