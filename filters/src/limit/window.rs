//! A sum over any sixty seconds, in constant memory.
//!
//! One bucket a second, and one more than a minute has. A bucket counts as a whole until sixty seconds after its
//! *latest* event: so the sum never lets more through than the limit in *any* sixty seconds, and nobody is
//! ever told to wait longer than sixty. The price is that an event counts for up to a second longer.

use super::Standing;

/// How long an event counts, in milliseconds.
const SPAN_MS: u64 = 60_000;
/// Events within the span fall into so many neighbouring seconds at most.
const BUCKETS: u64 = 61;
const LENGTH: usize = 61;

/// A sliding sum.
#[derive(Clone, Debug)]
pub struct Window {
    buckets: [Bucket; LENGTH],
    /// The latest time that was seen, in milliseconds.
    now_ms: u64,
}

/// The events of one second.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    second: u64,
    amount: u64,
    /// Of its latest event.
    last_ms: u64,
}

impl Default for Window {
    fn default() -> Self {
        Self { buckets: [Bucket::default(); LENGTH], now_ms: 0 }
    }
}

impl Bucket {
    /// When it stops to count.
    const fn ends_ms(&self) -> u64 {
        self.last_ms.saturating_add(SPAN_MS)
    }
}

impl Window {
    /// Adds what happens now. A clock that steps back stands still.
    pub fn add(&mut self, now_ms: u64, amount: u64) {
        let now_ms = self.reach(now_ms);
        let second = now_ms / 1000;
        let bucket = self.bucket(second);
        if bucket.second != second {
            *bucket = Bucket { second, ..Bucket::default() };
        }
        bucket.amount = bucket.amount.saturating_add(amount);
        bucket.last_ms = now_ms;
    }

    /// Replaces what was reserved at `then_ms` by what was used; forgotten once that second is.
    pub fn correct(&mut self, then_ms: u64, reserved: u64, used: u64) {
        let second = then_ms / 1000;
        let bucket = self.bucket(second);
        if bucket.second == second {
            bucket.amount = bucket.amount.saturating_sub(reserved).saturating_add(used);
        }
    }

    /// How many milliseconds until `more` fits below `limit`; `None`: it fits now.
    pub fn wait(&mut self, now_ms: u64, limit: u64, more: u64) -> Option<u64> {
        let now_ms = self.reach(now_ms);
        let mut sum = self.sum(now_ms);
        if sum.saturating_add(more) <= limit {
            return None;
        }
        // Each bucket that leaves makes room, the oldest first.
        let mut leaving: Vec<Bucket> = self.counting(now_ms).collect();
        leaving.sort_unstable_by_key(Bucket::ends_ms);
        for leaving in &leaving {
            sum = sum.saturating_sub(leaving.amount);
            if sum.saturating_add(more) <= limit {
                return Some(leaving.ends_ms().saturating_sub(now_ms).max(1));
            }
        }
        Some(SPAN_MS)
    }

    /// How a limit stands.
    pub fn standing(&mut self, now_ms: u64, limit: u64) -> Standing {
        let now_ms = self.reach(now_ms);
        let sum = self.sum(now_ms);
        let last = self.counting(now_ms).map(|bucket| bucket.ends_ms()).max();
        let reset_seconds = last.map_or(0, |ends| ends.saturating_sub(now_ms).div_ceil(1000));
        Standing { limit, remaining: limit.saturating_sub(sum), reset_seconds }
    }

    /// What counts, by the milliseconds that have passed since.
    #[must_use]
    pub fn by_age(&mut self, now_ms: u64) -> Vec<(u64, u64)> {
        let now_ms = self.reach(now_ms);
        self.counting(now_ms).map(|bucket| (now_ms.saturating_sub(bucket.last_ms), bucket.amount)).collect()
    }

    /// Adds what was added so many milliseconds ago, elsewhere.
    pub fn add_past(&mut self, now_ms: u64, age_ms: u64, amount: u64) {
        let now_ms = self.reach(now_ms);
        let Some(then_ms) = now_ms.checked_sub(age_ms).filter(|_| age_ms < SPAN_MS) else { return };
        let second = then_ms / 1000;
        let bucket = self.bucket(second);
        if bucket.second != second {
            *bucket = Bucket { second, ..Bucket::default() };
        }
        bucket.amount = bucket.amount.saturating_add(amount);
        bucket.last_ms = bucket.last_ms.max(then_ms);
    }

    fn reach(&mut self, now_ms: u64) -> u64 {
        self.now_ms = self.now_ms.max(now_ms);
        self.now_ms
    }

    fn sum(&self, now_ms: u64) -> u64 {
        self.counting(now_ms).fold(0, |sum: u64, bucket| sum.saturating_add(bucket.amount))
    }

    fn counting(&self, now_ms: u64) -> impl Iterator<Item = Bucket> {
        let counts = move |bucket: &&Bucket| bucket.amount > 0 && bucket.ends_ms() > now_ms;
        self.buckets.iter().filter(counts).copied()
    }

    #[expect(clippy::indexing_slicing, reason = "a remainder of 61 lies inside 61 buckets")]
    fn bucket(&mut self, second: u64) -> &mut Bucket {
        let index = usize::try_from(second % BUCKETS).unwrap_or_default();
        &mut self.buckets[index]
    }
}
