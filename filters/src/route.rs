//! Which candidates for a model, in which order.
//!
//! The order is by decayed weight, highest first; equals are shuffled, so that two routes of the
//! same weight share the traffic. Deliberately absent: spreading by weight. A standby with a lower
//! weight gets its calls by failover, which keeps prompt caches at providers warm.

use rand_core::RngCore;

use crate::ids::EndpointId;

/// A route that may serve the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Its configured weight times its health factor.
    pub weight: f64,
}

/// Puts the candidates in the order in which they are tried.
pub fn order(candidates: &mut [Candidate], rng: &mut impl RngCore) {
    // Fisher-Yates first: the stable sort then keeps equals in their shuffled order.
    for last in (1..candidates.len()).rev() {
        let range = u64::try_from(last).unwrap_or(u64::MAX).saturating_add(1);
        let pick = usize::try_from(rng.next_u64() % range).unwrap_or(last);
        candidates.swap(last, pick);
    }
    candidates.sort_by(|a, b| b.weight.total_cmp(&a.weight));
}

#[cfg(test)]
mod tests {
    use rand_core::SeedableRng;
    use rand_pcg::Pcg64Mcg;

    use super::*;

    fn candidates(weights: &[f64]) -> Vec<Candidate> {
        weights
            .iter()
            .enumerate()
            .map(|(n, weight)| Candidate { endpoint: EndpointId(n), weight: *weight })
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
}
