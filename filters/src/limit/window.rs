//! A sum over any sixty seconds, in constant memory.
//!
//! One bucket a second, and one more than a minute has: two events less than sixty seconds apart always
//! fall into 61 neighbouring buckets, so the sum never lets more through than the limit in *any* sixty
//! seconds. The price is that an event counts for up to a second longer.

use super::Standing;

/// One more than the seconds of a minute.
const BUCKETS: u64 = 61;
const LENGTH: usize = 61;

/// A sliding sum.
#[derive(Clone, Debug)]
pub struct Window {
    buckets: [u64; LENGTH],
    /// The second of the newest bucket.
    newest: u64,
}

impl Default for Window {
    fn default() -> Self {
        Self { buckets: [0; LENGTH], newest: 0 }
    }
}

impl Window {
    /// Adds to the bucket of `second`.
    pub fn add(&mut self, second: u64, amount: u64) {
        self.roll(second);
        let bucket = self.bucket(self.newest.max(second));
        *bucket = bucket.saturating_add(amount);
    }

    /// Replaces what was reserved in `second` by what was used; forgotten once that second is.
    pub fn correct(&mut self, second: u64, reserved: u64, used: u64) {
        if second.saturating_add(BUCKETS) > self.newest && second <= self.newest {
            let bucket = self.bucket(second);
            *bucket = bucket.saturating_sub(reserved).saturating_add(used);
        }
    }

    /// How many seconds until `more` fits below `limit`; `None`: it fits now.
    pub fn wait(&mut self, second: u64, limit: u64, more: u64) -> Option<u64> {
        self.roll(second);
        let mut sum = self.sum();
        if sum.saturating_add(more) <= limit {
            return None;
        }
        // Oldest first: each bucket that leaves makes room.
        let oldest = self.newest.saturating_sub(BUCKETS - 1);
        for leaving in oldest..=self.newest {
            sum = sum.saturating_sub(*self.bucket(leaving));
            if sum.saturating_add(more) <= limit {
                return Some((leaving + BUCKETS).saturating_sub(self.newest));
            }
        }
        Some(BUCKETS)
    }

    /// How a limit stands.
    pub fn standing(&mut self, second: u64, limit: u64) -> Standing {
        self.roll(second);
        let oldest = self.newest.saturating_sub(BUCKETS - 1);
        let last_used = (oldest..=self.newest).rev().find(|s| *self.bucket(*s) > 0);
        let reset_seconds = last_used.map_or(0, |last| (last + BUCKETS).saturating_sub(self.newest));
        Standing { limit, remaining: limit.saturating_sub(self.sum()), reset_seconds }
    }

    /// What was added, by the seconds that have passed since.
    #[must_use]
    pub fn by_age(&mut self, second: u64) -> Vec<(u64, u64)> {
        self.roll(second);
        let ages = 0..BUCKETS.min(self.newest.saturating_add(1));
        let of = |age| (age, *self.bucket(self.newest.saturating_sub(age)));
        ages.map(of).filter(|(_, amount)| *amount > 0).collect()
    }

    /// Adds what was added so many seconds ago, elsewhere.
    pub fn add_past(&mut self, second: u64, age: u64, amount: u64) {
        self.roll(second);
        if age < BUCKETS && age <= self.newest {
            let bucket = self.bucket(self.newest - age);
            *bucket = bucket.saturating_add(amount);
        }
    }

    fn sum(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, bucket| sum.saturating_add(*bucket))
    }

    /// Empties the buckets of seconds that have passed. A clock that steps back changes nothing.
    fn roll(&mut self, second: u64) {
        let passed = second.saturating_sub(self.newest);
        if passed >= BUCKETS {
            self.buckets = [0; LENGTH];
        } else {
            for gone in self.newest + 1..=self.newest + passed {
                *self.bucket(gone) = 0;
            }
        }
        self.newest = self.newest.max(second);
    }

    #[expect(clippy::indexing_slicing, reason = "a remainder of 61 lies inside 61 buckets")]
    fn bucket(&mut self, second: u64) -> &mut u64 {
        let index = usize::try_from(second % BUCKETS).unwrap_or_default();
        &mut self.buckets[index]
    }
}
