//! How many extra attempts all requests together may make.
//!
//! One request may try five times. A thousand requests that all do so turn an outage into five times
//! the load on what is left. So extra attempts (every one after a request's first) are at most 20 % of
//! the first ones of the last 10 s; with little traffic, where a fifth of nothing would forbid every
//! failover, 10 a second are always free. Both figures are Finagle's, which has run on them for years.
//!
//! Deliberately absent: fairness between models. One node's outage is rare and short; a budget per
//! model would have to be ten times as tight to stop the same storm.

use std::time::Instant;

const WINDOW_SECONDS: u64 = 10;
const EXTRA_PERCENT: u64 = 20;
/// Free in any 10 s: 10 a second.
const EXTRA_MIN: u64 = 100;

/// The budget of one node.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    origin: Instant,
    buckets: [Bucket; 10],
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    second: u64,
    first: u64,
    extra: u64,
}

impl RetryBudget {
    /// A fresh one.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { origin: now, buckets: [Bucket::default(); 10] }
    }

    /// A request makes its first attempt.
    pub fn deposit(&mut self, now: Instant) {
        if let Some(bucket) = self.bucket(now) {
            bucket.first += 1;
        }
    }

    /// A request wants another attempt. Answers whether it may; then it is counted.
    pub fn withdraw(&mut self, now: Instant) -> bool {
        let (first, extra) = self.sum(now);
        let may = extra < (first * EXTRA_PERCENT / 100).max(EXTRA_MIN);
        if let (true, Some(bucket)) = (may, self.bucket(now)) {
            bucket.extra += 1;
        }
        may
    }

    fn sum(&self, now: Instant) -> (u64, u64) {
        let second = self.second(now);
        let recent = self.buckets.iter().filter(|b| b.second + WINDOW_SECONDS > second);
        recent.fold((0, 0), |(first, extra), b| (first + b.first, extra + b.extra))
    }

    fn bucket(&mut self, now: Instant) -> Option<&mut Bucket> {
        let second = self.second(now);
        let slot = usize::try_from(second % WINDOW_SECONDS).ok()?;
        let bucket = self.buckets.get_mut(slot)?;
        if bucket.second != second {
            *bucket = Bucket { second, ..Bucket::default() };
        }
        Some(bucket)
    }

    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.origin).as_secs()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ten_a_second_are_always_free() {
        let now = Instant::now();
        let mut budget = RetryBudget::new(now);
        let granted = (0..1_000).filter(|_| budget.withdraw(now)).count();
        assert_eq!(granted, 100);
        assert!(budget.withdraw(now + Duration::from_secs(10)), "ten seconds later they are free again");
    }

    #[test]
    fn a_busy_node_may_add_a_fifth() {
        let now = Instant::now();
        let mut budget = RetryBudget::new(now);
        (0..10_000).for_each(|_| budget.deposit(now));
        assert_eq!((0..10_000).filter(|_| budget.withdraw(now)).count(), 2_000);
    }

    proptest! {
        #[test]
        fn extra_attempts_never_exceed_a_fifth_or_ten_a_second(
            steps in prop::collection::vec((0_u64..2_000, any::<bool>()), 0..2_000),
        ) {
            let start = Instant::now();
            let mut budget = RetryBudget::new(start);
            let (mut now, mut first, mut granted) = (start, vec![], vec![]);
            for (wait_ms, extra) in steps {
                now += Duration::from_millis(wait_ms / 100);
                if !extra {
                    budget.deposit(now);
                    first.push(now);
                } else if budget.withdraw(now) {
                    granted.push(now);
                    let within = |all: &[Instant]| {
                        all.iter().filter(|t| now - **t < Duration::from_secs(9)).count()
                    };
                    prop_assert!(within(&granted) <= (first.len() / 5).max(100));
                }
            }
        }
    }
}
