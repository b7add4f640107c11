//! Which candidates for a model, in which order.
//!
//! The order is by decayed weight, highest first; equals are shuffled, so that two routes of the
//! same weight share the traffic. A standby with a lower weight gets its calls by failover, which keeps
//! prompt caches at providers warm. Whoever would rather spread the load says `weighted_random`: the
//! first place then falls to each in proportion to its weight.
//!
//! A standby that nobody calls is a standby of which nobody knows whether it lives. So 1 % of the calls
//! **explore**: they begin with a standby, and so does at least one call per 30 s while the model has
//! traffic. That keeps weights, sketches and connections warm; and a call that finds it dead fails over.
//!
//! A **preferred** route that failures pushed down needs more than that to come back in time, or to be found
//! dead for good: a fifth of the calls, at most one a second, begin with it. Dead, it fails its five in a
//! row within seconds and its breaker opens; alive, it has proved so within half a minute.
//!
//! An endpoint that **starts slowly** takes part in a share of the calls and stands behind everyone in the
//! others: in a strict order a tenth of a weight would be all or nothing.

use std::time::{Duration, Instant};

use rand_core::RngCore;

use crate::ids::EndpointId;
use crate::upstream::backoff::fraction;

/// The part of a model's calls that explore.
const EXPLORE_PART: f64 = 0.01;
/// At least one call explores in this time.
const EXPLORE_EVERY: Duration = Duration::from_secs(30);
/// The part of the calls that try a preferred route which lost its place.
const RETURN_PART: f64 = 0.2;
/// And not more often than this.
const RETURN_EVERY: Duration = Duration::from_secs(1);
/// What is left of a weight in a call in which an endpoint stands back.
const STAND_BACK: f64 = 0.001;

/// How an order is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// The heaviest first.
    #[default]
    Weight,
    /// At random, in proportion to the weights.
    WeightedRandom,
}

/// A route that may serve the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Its configured weight times its health factor.
    pub weight: f64,
    /// Where whoever made the list keeps more of it.
    pub lane: usize,
}

/// Puts the candidates in the order in which they are tried.
pub fn order(candidates: &mut [Candidate], rng: &mut impl RngCore) {
    // Fisher-Yates first: the stable sort then keeps equals in their shuffled order.
    for last in (1..candidates.len()).rev() {
        candidates.swap(last, below(last + 1, rng));
    }
    candidates.sort_by(|a, b| b.weight.total_cmp(&a.weight));
}

/// Puts the candidates in an order in which each comes first in proportion to its weight.
pub fn spread(candidates: &mut [Candidate], rng: &mut impl RngCore) {
    // The first of several alarms that ring at rates w rings at w / sum of all: exponential keys.
    let mut keyed: Vec<(f64, Candidate)> = candidates
        .iter()
        .map(|candidate| {
            let rate = if candidate.weight > 0.0 { candidate.weight } else { f64::MIN_POSITIVE };
            (-(1.0 - fraction(rng)).ln() / rate, *candidate)
        })
        .collect();
    keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (place, (_, candidate)) in candidates.iter_mut().zip(keyed) {
        *place = candidate;
    }
}

/// The weight for this one call of an endpoint that has a share of the calls.
#[must_use]
pub fn weight_in_share(weight: f64, share: f64, rng: &mut impl RngCore) -> f64 {
    if share >= 1.0 || fraction(rng) < share { weight } else { weight * STAND_BACK }
}

/// A whole number below this one, which is not 0.
#[must_use]
pub fn below(number: usize, rng: &mut impl RngCore) -> usize {
    let range = u64::try_from(number).unwrap_or(u64::MAX).max(1);
    usize::try_from(rng.next_u64() % range).unwrap_or_default()
}

/// Which calls of one model explore.
#[derive(Clone, Copy, Debug, Default)]
pub struct Explorer {
    last: Option<Instant>,
    last_return: Option<Instant>,
}

impl Explorer {
    /// Whether the call that comes now should begin with a standby.
    pub fn is_due(&mut self, now: Instant, rng: &mut impl RngCore) -> bool {
        let last = *self.last.get_or_insert(now);
        let due = fraction(rng) < EXPLORE_PART || now.saturating_duration_since(last) >= EXPLORE_EVERY;
        if due {
            self.last = Some(now);
        }
        due
    }

    /// Whether it is long enough ago that a call has tried a preferred route that lost its place.
    #[must_use]
    pub fn may_return(&self, now: Instant) -> bool {
        self.last_return.is_none_or(|last| now.saturating_duration_since(last) >= RETURN_EVERY)
    }

    /// Whether the call that comes now should try one.
    pub fn return_is_due(&mut self, now: Instant, rng: &mut impl RngCore) -> bool {
        let due = self.may_return(now) && fraction(rng) < RETURN_PART;
        if due {
            self.last_return = Some(now);
        }
        due
    }
}

/// Puts the one at `place` before all others, which keep their order.
pub fn begin_with<T>(candidates: &mut [T], place: usize) {
    if let Some(head) = candidates.get_mut(..=place) {
        head.rotate_right(1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_core::SeedableRng;
    use rand_pcg::Pcg64Mcg;

    use super::*;

    fn candidates(weights: &[f64]) -> Vec<Candidate> {
        weights
            .iter()
            .enumerate()
            .map(|(n, weight)| Candidate { endpoint: EndpointId(n), weight: *weight, lane: n })
            .collect()
    }

    #[test]
    fn the_heaviest_is_tried_first() {
        let mut rng = Pcg64Mcg::seed_from_u64(1);
        let mut some = candidates(&[1.0, 100.0, 60.0]);
        order(&mut some, &mut rng);
        assert_eq!(some.iter().map(|c| c.endpoint.0).collect::<Vec<_>>(), [1, 2, 0]);
    }

    #[test]
    fn equals_share_the_first_place() {
        let mut rng = Pcg64Mcg::seed_from_u64(2);
        let mut first = [0_u32; 3];
        for _ in 0..3000 {
            let mut some = candidates(&[5.0, 5.0, 5.0]);
            order(&mut some, &mut rng);
            first[some[0].endpoint.0] += 1;
        }
        assert!(first.iter().all(|n| (850..1150).contains(n)), "{first:?}");
    }

    #[test]
    fn the_same_seed_gives_the_same_order() {
        let run = || {
            let mut rng = Pcg64Mcg::seed_from_u64(3);
            let mut some = candidates(&[1.0; 8]);
            order(&mut some, &mut rng);
            some
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn weighted_random_gives_the_first_place_in_proportion_to_the_weight() {
        let mut rng = Pcg64Mcg::seed_from_u64(4);
        let mut first = [0_u32; 3];
        for _ in 0..10_000 {
            let mut some = candidates(&[70.0, 20.0, 10.0]);
            spread(&mut some, &mut rng);
            first[some[0].endpoint.0] += 1;
        }
        let near = |n: u32, meant: u32| n.abs_diff(meant) < 300;
        assert!(near(first[0], 7_000) && near(first[1], 2_000) && near(first[2], 1_000), "{first:?}");
    }

    #[test]
    fn one_call_in_a_hundred_explores() {
        let now = Instant::now();
        let mut rng = Pcg64Mcg::seed_from_u64(5);
        let mut explorer = Explorer::default();
        let due = (0..100_000).filter(|_| explorer.is_due(now, &mut rng)).count();
        assert!((800..1200).contains(&due), "{due}");
    }

    #[test]
    fn a_route_that_lost_its_place_is_tried_at_most_once_a_second() {
        let start = Instant::now();
        let mut rng = Pcg64Mcg::seed_from_u64(8);
        let mut explorer = Explorer::default();
        let due =
            (0..10_000).filter(|n| explorer.return_is_due(start + Duration::from_millis(10 * n), &mut rng));
        let due = due.count();
        assert!((90..=100).contains(&due), "{due} in 100 s");
    }

    #[test]
    fn at_least_one_call_in_thirty_seconds_explores() {
        let start = Instant::now();
        let mut rng = Pcg64Mcg::seed_from_u64(6);
        let mut explorer = Explorer::default();
        let mut last = start;
        for n in 0..2_000 {
            let now = start + Duration::from_secs(n);
            if explorer.is_due(now, &mut rng) {
                last = now;
            }
            assert!(now - last < EXPLORE_EVERY);
        }
    }

    #[test]
    fn an_exploring_order_begins_with_the_standby_and_keeps_the_rest() {
        let mut some = candidates(&[5.0, 4.0, 3.0, 2.0]);
        begin_with(&mut some, 2);
        assert_eq!(some.iter().map(|c| c.endpoint.0).collect::<Vec<_>>(), [2, 0, 1, 3]);
        begin_with(&mut some, 9);
        assert_eq!(some[0].endpoint.0, 2, "a place that is none changes nothing");
    }

    #[test]
    fn a_slow_starter_comes_first_in_its_share_of_the_calls() {
        let mut rng = Pcg64Mcg::seed_from_u64(7);
        let full = (0..10_000).filter(|_| weight_in_share(100.0, 0.1, &mut rng) > 1.0).count();
        assert!((850..1150).contains(&full), "{full}");
        assert!((weight_in_share(7.0, 1.0, &mut rng) - 7.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn every_order_holds_every_candidate_once(
            weights in prop::collection::vec(prop_oneof![Just(0.0), 0.0..1e9_f64], 0..12), seed: u64, place: usize,
        ) {
            let mut rng = Pcg64Mcg::seed_from_u64(seed);
            for way in 0..3 {
                let mut some = candidates(&weights);
                match way {
                    0 => order(&mut some, &mut rng),
                    1 => spread(&mut some, &mut rng),
                    _ => begin_with(&mut some, place % 13),
                }
                let mut seen: Vec<_> = some.iter().map(|c| c.endpoint.0).collect();
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..weights.len()).collect::<Vec<_>>());
            }
        }
    }
}
