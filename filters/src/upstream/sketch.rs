//! How long things took: a histogram of fixed size, and a window of a few of them.
//!
//! Sixteen buckets to an octave bound the error of a quantile by 1/16, which is far below the factor
//! of 1.5 that the watchdog puts on top. Values below 16 have a bucket each. 320 buckets reach to
//! 2²³ ms (2.3 hours); what is longer counts as that. A quantile is the *upper* edge of its bucket:
//! a limit made from it must not cut the very call that it was learnt from.
//!
//! A [`Window`] keeps about the last thousand samples in six slices. A slice ends when it is 10 s old
//! *and* holds a sixth of a thousand, so a busy route forgets within a minute or so; or when it is five
//! minutes old, so a quiet one forgets within half an hour. Without the count a route with one call
//! a second would never know its p99; without the age it would believe last week's.
//!
//! Deliberately absent: allocation after creation, floating point, and decay by weights: two sketches
//! merge by addition, here and, one day, over the nodes of a fleet.

use std::time::{Duration, Instant};

/// Buckets to an octave, as a power of two.
const SUB_BITS: u32 = 4;
const SUB: u64 = 1 << SUB_BITS;
/// The same as a length: buckets are looked for by the octave.
const OCTAVE: usize = 1 << SUB_BITS;
const BUCKETS: usize = 320;
/// The largest value that has a bucket of its own.
const VALUE_MAX: u64 = (1 << 23) - 1;

const SLICES: usize = 6;
/// A slice is at least this old when the next begins.
const SLICE_AGE_MIN: Duration = Duration::from_secs(10);
/// And at most this old.
const SLICE_AGE_MAX: Duration = Duration::from_secs(300);
/// Samples that fill a slice: six of them are about a thousand.
const SLICE_SAMPLES: u64 = 167;

/// A histogram of whole numbers, mostly milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sketch {
    counts: [u32; BUCKETS],
    total: u64,
}

impl Default for Sketch {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], total: 0 }
    }
}

impl Sketch {
    /// Counts one value.
    pub fn record(&mut self, value: u64) {
        if let Some(count) = self.counts.get_mut(bucket_of(value)) {
            *count = count.saturating_add(1);
            self.total = self.total.saturating_add(1);
        }
    }

    /// Adds what another has counted.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.total = self.total.saturating_add(other.total);
    }

    /// Takes out what another has counted, which is in it.
    pub fn take_out(&mut self, other: &Self) {
        for (count, less) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_sub(*less);
        }
        self.total = self.total.saturating_sub(other.total);
    }

    /// How many values it has counted.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.total
    }

    /// The value that `per_mille` of all values do not exceed, up to the width of a bucket. `None` when
    /// it is empty.
    #[must_use]
    pub fn quantile(&self, per_mille: u64) -> Option<u64> {
        let rank = self.total.saturating_mul(per_mille.min(1000)).div_ceil(1000).max(1);
        let mut seen = 0_u64;
        for (octave, counts) in self.counts.chunks(OCTAVE).enumerate() {
            let sum = counts.iter().map(|count| u64::from(*count)).sum::<u64>();
            if seen.saturating_add(sum) < rank {
                seen = seen.saturating_add(sum);
                continue;
            }
            for (bucket, count) in counts.iter().enumerate() {
                seen = seen.saturating_add(u64::from(*count));
                if seen >= rank {
                    return Some(upper_edge(octave * OCTAVE + bucket));
                }
            }
        }
        None
    }
}

fn bucket_of(value: u64) -> usize {
    let value = value.min(VALUE_MAX);
    let bucket = if value < SUB {
        value
    } else {
        let shift = u64::from(value.ilog2() - SUB_BITS);
        (shift + 1) * SUB + ((value >> shift) - SUB)
    };
    usize::try_from(bucket).unwrap_or(BUCKETS - 1)
}

/// The largest value of a bucket.
fn upper_edge(bucket: usize) -> u64 {
    let bucket = u64::try_from(bucket).unwrap_or_default();
    if bucket < SUB {
        return bucket;
    }
    let shift = bucket / SUB - 1;
    let first = (bucket % SUB + SUB) << shift;
    first + (1 << shift) - 1
}

/// About the last thousand values.
#[derive(Clone, Debug)]
pub struct Window {
    slices: [Sketch; SLICES],
    /// All slices as one. It is asked for far more often than a slice ends.
    all: Sketch,
    current: usize,
    began: Instant,
}

impl Window {
    /// An empty one.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        let slices = std::array::from_fn(|_| Sketch::default());
        Self { slices, all: Sketch::default(), current: 0, began: now }
    }

    /// Counts one value. Answers what was forgotten first.
    pub fn record(&mut self, now: Instant, value: u64) -> Option<Sketch> {
        let forgotten = self.forget(now);
        if let Some(slice) = self.slices.get_mut(self.current) {
            slice.record(value);
            self.all.record(value);
        }
        forgotten
    }

    /// All slices as one.
    #[must_use]
    pub const fn all(&self) -> &Sketch {
        &self.all
    }

    /// Forgets what is too old, and answers it.
    pub fn forget(&mut self, now: Instant) -> Option<Sketch> {
        let mut forgotten: Option<Sketch> = None;
        // After a long silence several slices are due at once; six empty the whole window.
        for _ in 0..SLICES {
            let age = now.saturating_duration_since(self.began);
            let full = self.slices.get(self.current).is_some_and(|s| s.count() >= SLICE_SAMPLES);
            if !(age >= SLICE_AGE_MAX || (full && age >= SLICE_AGE_MIN)) {
                return forgotten;
            }
            self.current = (self.current + 1) % SLICES;
            if let Some(slice) = self.slices.get_mut(self.current).filter(|slice| slice.count() > 0) {
                self.all.take_out(slice);
                forgotten.get_or_insert_default().merge(slice);
                *slice = Sketch::default();
            }
            self.began = if age >= SLICE_AGE_MAX { self.began + SLICE_AGE_MAX } else { now };
        }
        self.began = self.began.max(now - SLICE_AGE_MAX.min(now.saturating_duration_since(self.began)));
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(window: &mut Window, now: Instant) -> u64 {
        window.forget(now);
        window.all().count()
    }

    #[test]
    fn every_bucket_begins_behind_the_one_before() {
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(upper_edge(bucket)), bucket, "{bucket}");
            if bucket + 1 < BUCKETS {
                assert_eq!(bucket_of(upper_edge(bucket) + 1), bucket + 1, "{bucket}");
            }
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn an_empty_sketch_has_no_quantile() {
        assert_eq!(Sketch::default().quantile(990), None);
    }

    #[test]
    fn a_busy_window_forgets_within_a_minute_or_so_and_a_quiet_one_within_half_an_hour() {
        let start = Instant::now();
        let mut busy = Window::new(start);
        let mut now = start;
        for _ in 0..100 * 70 {
            busy.record(now, 10);
            now += Duration::from_millis(10);
        }
        let left = kept(&mut busy, now);
        assert!((5_000..=6_001).contains(&left), "{left}");
        let mut quiet = Window::new(start);
        quiet.record(start, 10);
        assert_eq!(kept(&mut quiet, start + Duration::from_secs(1_400)), 1);
        assert_eq!(kept(&mut quiet, start + Duration::from_secs(1_900)), 0);
        quiet.record(start + Duration::from_secs(90_000), 10);
        assert_eq!(kept(&mut quiet, start + Duration::from_secs(90_000)), 1);
    }

    #[test]
    fn a_route_with_a_call_every_five_seconds_still_knows_fifty_of_them() {
        let start = Instant::now();
        let mut window = Window::new(start);
        for n in 0..400 {
            window.record(start + Duration::from_secs(5 * n), 10);
        }
        assert!(kept(&mut window, start + Duration::from_secs(2_000)) >= 300);
    }

    proptest! {
        #[test]
        fn a_quantile_is_never_below_the_truth_and_at_most_a_sixteenth_above(
            mut values in prop::collection::vec(0_u64..VALUE_MAX, 1..300), per_mille in 1_u64..=1000,
        ) {
            let mut sketch = Sketch::default();
            values.iter().for_each(|v| sketch.record(*v));
            values.sort_unstable();
            let rank = usize::try_from((values.len() as u64 * per_mille).div_ceil(1000).max(1)).unwrap();
            let truth = values[rank - 1];
            let found = sketch.quantile(per_mille).unwrap();
            prop_assert!(found >= truth && found <= truth + truth / 16 + 1, "{} for {}", found, truth);
        }

        #[test]
        fn merging_is_the_same_as_counting_together(
            a in prop::collection::vec(any::<u64>(), 0..99), b in prop::collection::vec(any::<u64>(), 0..99),
        ) {
            let count = |values: &[u64]| {
                let mut sketch = Sketch::default();
                values.iter().for_each(|v| sketch.record(*v));
                sketch
            };
            let mut merged = count(&a);
            merged.merge(&count(&b));
            prop_assert_eq!(merged, count(&[a, b].concat()));
        }

        #[test]
        fn a_window_never_forgets_what_is_just_in(
            steps in prop::collection::vec((0_u64..400_000, 0_u64..100_000), 1..100),
        ) {
            let mut now = Instant::now();
            let mut window = Window::new(now);
            for (wait_ms, value) in steps {
                now += Duration::from_millis(wait_ms);
                window.record(now, value);
                let mut sum = Sketch::default();
                window.slices.iter().for_each(|slice| sum.merge(slice));
                prop_assert_eq!(&sum, window.all());
                prop_assert!(kept(&mut window, now) >= 1);
            }
        }
    }
}
