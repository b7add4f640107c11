//! How long to wait before the *same* endpoint is asked again.
//!
//! Another candidate is asked at once. The same one gets time: exponentially more with every try,
//! and "full jitter", which means anything from nothing to that bound: of the known schemes it spreads
//! a crowd of callers best, and a call that is lucky waits least. Never before the endpoint's own
//! Retry-After. 200 ms doubled four times is 3.2 s, so five attempts stay far below the 30 s that a
//! request may wait in all.

use std::time::{Duration, Instant};

use rand_core::RngCore;

const BASE: Duration = Duration::from_millis(200);
const MAX: Duration = Duration::from_secs(8);

/// When an endpoint that has failed `failures` times for this request may be asked again.
#[must_use]
pub fn again_at(now: Instant, failures: u32, not_before: Option<Instant>, rng: &mut impl RngCore) -> Instant {
    let bound = BASE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX);
    let at = now + bound.mul_f64(fraction(rng));
    not_before.map_or(at, |rest_end| at.max(rest_end))
}

/// A number from 0 to just below 1.
pub fn fraction(rng: &mut impl RngCore) -> f64 {
    f64::from(rng.next_u32()) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_core::SeedableRng;
    use rand_pcg::Pcg64Mcg;

    use super::*;

    #[test]
    fn the_bound_doubles_and_the_jitter_is_full() {
        let now = Instant::now();
        let mut rng = Pcg64Mcg::seed_from_u64(1);
        for (failures, bound_ms) in [(1, 200), (2, 400), (3, 800), (9, 8_000), (u32::MAX, 8_000)] {
            let bound = Duration::from_millis(bound_ms);
            let waits: Vec<_> = (0..500).map(|_| again_at(now, failures, None, &mut rng) - now).collect();
            assert!(waits.iter().all(|w| *w <= bound));
            assert!(waits.iter().any(|w| *w > bound * 9 / 10) && waits.iter().any(|w| *w < bound / 10));
        }
    }

    proptest! {
        #[test]
        fn never_before_its_retry_after(failures: u32, rest_ms in 0_u64..600_000, seed: u64) {
            let now = Instant::now();
            let rest_end = now + Duration::from_millis(rest_ms);
            let mut rng = Pcg64Mcg::seed_from_u64(seed);
            let at = again_at(now, failures, Some(rest_end), &mut rng);
            prop_assert!(at >= rest_end && at >= now && at <= rest_end.max(now + MAX));
        }

        #[test]
        fn a_fraction_is_below_one(seed: u64) {
            let mut rng = Pcg64Mcg::seed_from_u64(seed);
            prop_assert!((0.0..1.0).contains(&fraction(&mut rng)));
        }
    }
}
