//! The routes of one place as one candidate: its weight counts once, however many credentials there are.

use rand_core::RngCore;

use super::{Board, Stand};
use crate::ids::EndpointId;
use crate::route;
use crate::upstream::breaker::Admission;
use crate::upstream::rest::Standing;

/// A weight of a credential whose trial another call is.
pub(super) const ON_TRIAL: f64 = 0.001;

/// Routes of one place that may be asked, as one call sees them.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    pub(super) place: EndpointId,
    first: EndpointId,
    others: Vec<EndpointId>,
    /// The configured weight.
    pub(super) configured: u32,
    /// What of it counts in this call.
    pub(super) weight: f64,
    factor: f64,
    share: f64,
    /// Its breaker is half-open.
    pub(super) is_probe: bool,
    /// Its failures weigh on it.
    pub(super) has_lost_weight: bool,
    /// Its credential is, by another call.
    pub(super) is_on_trial: bool,
}

impl Lane {
    /// A route that begins a lane.
    fn begin(place: EndpointId, stand: &Stand) -> Self {
        Self {
            place,
            first: stand.route.endpoint,
            others: vec![],
            configured: stand.weight,
            weight: 0.0,
            factor: stand.factor,
            share: stand.share,
            is_probe: stand.breaker == Admission::Probe,
            has_lost_weight: stand.has_lost_weight,
            is_on_trial: stand.rest == Standing::OnTrial,
        }
    }

    /// A place that nothing weighs on, with all its routes.
    pub(super) fn plain(place: EndpointId, routes: &[EndpointId], configured: u32) -> Option<Self> {
        let (first, others) = routes.split_first()?;
        Some(Self {
            place,
            first: *first,
            others: others.to_vec(),
            configured,
            weight: f64::from(configured),
            factor: 1.0,
            share: 1.0,
            is_probe: false,
            has_lost_weight: false,
            is_on_trial: false,
        })
    }

    /// Its endpoints, in the order in which they are asked.
    pub(super) fn routes(&self) -> impl Iterator<Item = EndpointId> {
        std::iter::once(self.first).chain(self.others.iter().copied())
    }

    /// Puts the first behind this one in front, and those before it at the end.
    fn begin_behind(&mut self, last: EndpointId) {
        let mut all: Vec<EndpointId> = self.routes().collect();
        let next = all.iter().position(|endpoint| *endpoint > last);
        all.rotate_left(next.unwrap_or(0));
        self.first = all.remove(0);
        self.others = all;
    }

    /// Settles what it weighs in this call.
    fn weigh(&mut self, rng: &mut impl RngCore) {
        let trial = if self.is_on_trial { ON_TRIAL } else { 1.0 };
        let weight = f64::from(self.configured) * self.factor * trial;
        self.weight = route::weight_in_share(weight, self.share, rng);
    }
}

impl Board {
    /// Takes a route that may be asked into the lane of its place that is `open`. One that is on trial stands alone: behind
    /// everybody else is not behind its neighbours.
    pub(super) fn join(&self, lanes: &mut Vec<Lane>, open: &mut Option<usize>, stand: &Stand) {
        let is_on_trial = stand.rest == Standing::OnTrial;
        match open.filter(|_| !is_on_trial).and_then(|at| lanes.get_mut(at)) {
            Some(lane) => lane.others.push(stand.route.endpoint),
            None => {
                if !is_on_trial {
                    *open = Some(lanes.len());
                }
                lanes.push(Lane::begin(self.place(stand.route.endpoint), stand));
            }
        }
    }

    /// The credentials of each lane take turns, and its weight is settled for this call.
    pub(super) fn set_off(&self, lanes: &mut [Lane], rng: &mut impl RngCore) {
        for lane in lanes {
            self.take_turn(lane);
            lane.weigh(rng);
        }
    }

    /// Begins with the credential behind the one that was used last, so that they share the calls of their place.
    pub(super) fn take_turn(&self, lane: &mut Lane) {
        if lane.others.is_empty() {
            return;
        }
        if let Some(last) = self.state(lane.place).and_then(|state| state.last) {
            lane.begin_behind(last);
            let spec = self.layout.endpoints.get(lane.first.0);
            lane.configured = spec.map_or(lane.configured, |spec| spec.weight);
        }
    }
}
