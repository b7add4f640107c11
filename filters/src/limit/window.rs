//! A sum over any sixty seconds, in bounded memory.
//!
//! One bucket for each second in which something happened: as many as a minute has, and one more. A bucket counts as a whole
//! until sixty seconds after its *latest* event: so the sum never lets more through than the limit in *any* sixty seconds, and
//! nobody is ever told to wait longer than sixty. The price is that an event counts for up to a second longer.
//!
//! Seconds without an event take no room: of a million keys most are quiet, and each has two of these sums.

use std::collections::VecDeque;

use super::Standing;

/// How long an event counts, in milliseconds.
const SPAN_MS: u64 = 60_000;

/// A sliding sum.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// By their second, the oldest first, since sixty seconds at most: 61.
    buckets: VecDeque<Bucket>,
    /// Of all buckets.
    sum: u64,
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
        self.add_at(now_ms, amount);
    }

    /// Replaces what was reserved at `then_ms` by what was used; forgotten once that second is.
    pub fn correct(&mut self, then_ms: u64, reserved: u64, used: u64) {
        let Ok(at) = self.find(then_ms / 1000) else { return };
        let Some(bucket) = self.buckets.get_mut(at) else { return };
        let amount = bucket.amount.saturating_sub(reserved).saturating_add(used);
        self.sum = self.sum.saturating_sub(bucket.amount).saturating_add(amount);
        bucket.amount = amount;
    }

    /// How many milliseconds until `more` fits below `limit`; `None`: it fits now.
    pub fn wait(&mut self, now_ms: u64, limit: u64, more: u64) -> Option<u64> {
        let now_ms = self.reach(now_ms);
        let mut sum = self.sum;
        if sum.saturating_add(more) <= limit {
            return None;
        }
        // Each bucket that leaves makes room, the oldest first.
        for leaving in self.buckets.iter().filter(|bucket| bucket.amount > 0) {
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
        let last = self.buckets.iter().rev().find(|bucket| bucket.amount > 0).map(Bucket::ends_ms);
        let reset_seconds = last.map_or(0, |ends| ends.saturating_sub(now_ms).div_ceil(1000));
        Standing { limit, remaining: limit.saturating_sub(self.sum), reset_seconds }
    }

    /// What counts, by the milliseconds that have passed since.
    #[must_use]
    pub fn by_age(&mut self, now_ms: u64) -> Vec<(u64, u64)> {
        let now_ms = self.reach(now_ms);
        let counting = self.buckets.iter().filter(|bucket| bucket.amount > 0);
        counting.map(|bucket| (now_ms.saturating_sub(bucket.last_ms), bucket.amount)).collect()
    }

    /// Adds what was added so many milliseconds ago, elsewhere.
    pub fn add_past(&mut self, now_ms: u64, age_ms: u64, amount: u64) {
        let now_ms = self.reach(now_ms);
        if let Some(then_ms) = now_ms.checked_sub(age_ms).filter(|_| age_ms < SPAN_MS) {
            self.add_at(then_ms, amount);
        }
    }

    fn add_at(&mut self, ms: u64, amount: u64) {
        let second = ms / 1000;
        let at = self.find(second).unwrap_or_else(|at| {
            self.buckets.insert(at, Bucket { second, amount: 0, last_ms: ms });
            at
        });
        let Some(bucket) = self.buckets.get_mut(at) else { return };
        bucket.amount = bucket.amount.saturating_add(amount);
        bucket.last_ms = bucket.last_ms.max(ms);
        self.sum = self.sum.saturating_add(amount);
    }

    /// Lets time come so far, and forgets what does not count by then.
    fn reach(&mut self, now_ms: u64) -> u64 {
        self.now_ms = self.now_ms.max(now_ms);
        while let Some(old) = self.buckets.front().copied().filter(|bucket| bucket.ends_ms() <= self.now_ms) {
            self.buckets.pop_front();
            self.sum = self.sum.saturating_sub(old.amount);
        }
        self.now_ms
    }

    /// Where the bucket of a second is, or would be. Mostly it is the last one.
    fn find(&self, second: u64) -> Result<usize, usize> {
        match self.buckets.back() {
            Some(last) if last.second == second => Ok(self.buckets.len() - 1),
            Some(last) if last.second < second => Err(self.buckets.len()),
            Some(_) | None => self.buckets.binary_search_by_key(&second, |bucket| bucket.second),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Every second that ever was.
    #[derive(Default)]
    struct Plain {
        seconds: BTreeMap<u64, (u64, u64)>,
        now_ms: u64,
    }

    impl Plain {
        fn add(&mut self, ms: u64, amount: u64) {
            let now_ms = self.now_ms;
            let known = self.seconds.get(&(ms / 1000)).filter(|(_, last_ms)| last_ms + SPAN_MS > now_ms);
            let (sum, last_ms) = known.copied().unwrap_or_default();
            self.seconds.insert(ms / 1000, (sum + amount, ms.max(last_ms)));
        }

        fn counting(&self) -> Vec<(u64, u64)> {
            let all = self.seconds.values().copied();
            all.filter(|(amount, last_ms)| *amount > 0 && last_ms + SPAN_MS > self.now_ms).collect()
        }

        fn wait(&self, limit: u64, more: u64) -> Option<u64> {
            let mut sum: u64 = self.counting().iter().map(|(amount, _)| amount).sum();
            if sum + more <= limit {
                return None;
            }
            for (amount, last_ms) in self.counting() {
                sum -= amount;
                if sum + more <= limit {
                    return Some((last_ms + SPAN_MS - self.now_ms).max(1));
                }
            }
            Some(SPAN_MS)
        }
    }

    proptest! {
        #[test]
        fn a_window_counts_what_a_list_of_all_seconds_counts(
            steps in prop::collection::vec((0_u64..30_000, 0_u8..5, 0_u64..50, 0_u64..70_000), 1..200), slow: bool,
        ) {
            let (mut window, mut plain) = (Window::default(), Plain::default());
            let mut now_ms = 1 << 30;
            let mut taken: Vec<(u64, u64)> = vec![];
            for (wait_ms, what, amount, age_ms) in steps {
                now_ms += if slow { wait_ms } else { wait_ms / 20 };
                plain.now_ms = now_ms;
                match what {
                    0 if age_ms < SPAN_MS => {
                        window.add_past(now_ms, age_ms, amount);
                        plain.add(now_ms - age_ms, amount);
                    }
                    1 => {
                        if let Some((then_ms, reserved)) = taken.pop() {
                            window.correct(then_ms, reserved, amount);
                            let known = plain.seconds.get_mut(&(then_ms / 1000));
                            let known = known.filter(|(_, last_ms)| last_ms + SPAN_MS > now_ms);
                            known.into_iter().for_each(|(sum, _)| *sum = *sum - reserved + amount);
                        }
                    }
                    _ => {
                        window.add(now_ms, amount);
                        plain.add(now_ms, amount);
                        taken.push((now_ms, amount));
                    }
                }
                let counting = plain.counting();
                let sum: u64 = counting.iter().map(|(amount, _)| amount).sum();
                let reset = counting.last().map_or(0, |(_, last_ms)| (last_ms + SPAN_MS - now_ms).div_ceil(1000));
                let standing = Standing { limit: 400, remaining: 400_u64.saturating_sub(sum), reset_seconds: reset };
                prop_assert_eq!(window.standing(now_ms, 400), standing);
                prop_assert_eq!(window.wait(now_ms, 300, amount), plain.wait(300, amount));
                prop_assert_eq!(window.wait(now_ms, 10, amount), plain.wait(10, amount));
                let ages: Vec<(u64, u64)> = counting.iter().map(|(amount, last_ms)| (now_ms - last_ms, *amount)).collect();
                prop_assert_eq!(window.by_age(now_ms), ages);
                prop_assert!(window.buckets.len() <= 61);
            }
        }
    }
}
