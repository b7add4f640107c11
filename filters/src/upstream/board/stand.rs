//! Where routes stand at one moment: what the order is made of, and what `explain` shows.

use std::time::Instant;

use super::pace::index;
use super::{Ask, Board, EndpointState, Route};
use crate::ids::{EndpointId, ModelId};
use crate::preferences::{Dropped, RouteFacts};
use crate::upstream::breaker::Admission;
use crate::upstream::rest::Standing;
use crate::upstream::watchdog::Form;

/// Where one route stands, for the order and for `explain`.
#[derive(Clone, Debug)]
pub struct Stand {
    /// The route.
    pub route: Route,
    /// The configured weight.
    pub weight: u32,
    /// What health makes of it.
    pub factor: f64,
    /// Its failures weigh on it.
    pub has_lost_weight: bool,
    /// The share of calls that it may have.
    pub share: f64,
    /// What its breaker says.
    pub breaker: Admission,
    /// Whether it rests.
    pub rest: Standing,
    /// The preference that dropped it.
    pub dropped: Option<Dropped>,
}

impl Stand {
    /// Whether it may be asked.
    #[must_use]
    pub const fn admits(&self) -> bool {
        self.dropped.is_none() && self.admits_others()
    }

    /// Whether it may be asked for those whose preferences leave it.
    pub(super) const fn admits_others(&self) -> bool {
        !matches!(self.breaker, Admission::Refused(_)) && !matches!(self.rest, Standing::Resting { .. })
    }

    /// Until when it may not.
    #[must_use]
    pub fn refused_until(&self) -> Option<Instant> {
        let breaker = match self.breaker {
            Admission::Refused(until) => Some(until),
            Admission::Closed | Admission::Probe => None,
        };
        let rest = match self.rest {
            Standing::Resting { until, .. } => Some(until),
            Standing::Free | Standing::Trial | Standing::OnTrial => None,
        };
        breaker.max(rest)
    }

    pub(super) fn is_fall_back(&self) -> bool {
        self.dropped.is_none() && !self.admits() && !matches!(self.rest, Standing::Resting { .. })
    }
}

impl Board {
    /// Where the routes of a model stand, in the order of the config.
    #[must_use]
    pub fn survey(&self, now: Instant, model: ModelId, ask: &Ask<'_>) -> Vec<Stand> {
        let routes = self.layout.models.get(model.0).map(|spec| spec.routes.as_slice()).unwrap_or_default();
        let may_drop = ask.preferences.may_drop();
        let stand = |endpoint: &EndpointId| {
            let route = Route { model, endpoint: *endpoint };
            let drops = || ask.preferences.drops(&self.route_facts(route, ask.form));
            self.stand(now, route, may_drop.then(drops).flatten())
        };
        routes.iter().filter_map(stand).collect()
    }

    /// Where one route stands.
    pub(super) fn stand(&self, now: Instant, route: Route, dropped: Option<Dropped>) -> Option<Stand> {
        let (spec, state) = (self.layout.endpoints.get(route.endpoint.0)?, self.state(route.endpoint)?);
        Some(Stand {
            route,
            weight: spec.weight,
            factor: state.factor(now),
            has_lost_weight: state.has_lost_weight(now),
            share: state.share(now),
            breaker: state.breaker.admission(now),
            rest: self.rests.standing(now, spec.place, spec.credential),
            dropped,
        })
    }

    /// Whether one of these, refused when a plan was made, may be asked like any other by now. The attempt at
    /// the only route that admitted then has no watchdog; from here on it is the last viable one no more.
    #[must_use]
    pub fn is_back(&self, now: Instant, refused: &[EndpointId]) -> bool {
        refused.iter().any(|id| {
            let spec = self.layout.endpoints.get(id.0);
            let rests = spec.is_none_or(|spec| {
                matches!(self.rests.standing(now, spec.place, spec.credential), Standing::Resting { .. })
            });
            let closed = |state: &EndpointState| state.breaker.admission(now) == Admission::Closed;
            !rests && self.state(*id).is_some_and(closed)
        })
    }

    /// What health makes of an endpoint's weight, and whether it may be asked.
    #[must_use]
    pub fn endpoint(&self, now: Instant, id: EndpointId) -> Option<(f64, bool)> {
        let (spec, state) = (self.layout.endpoints.get(id.0)?, self.state(id)?);
        let rests = matches!(self.rests.standing(now, spec.place, spec.credential), Standing::Resting { .. });
        let refused = matches!(state.breaker.admission(now), Admission::Refused(_));
        Some((state.factor(now), !rests && !refused))
    }

    /// What preferences may ask about a route.
    #[must_use]
    pub fn route_facts(&self, route: Route, form: Form) -> RouteFacts<'_> {
        let spec = self.layout.endpoints.get(route.endpoint.0);
        let state = self.routes.get(&self.paced(route));
        RouteFacts {
            place: self.place(route.endpoint),
            provider: spec.map_or("", |spec| spec.provider.as_str()),
            price: spec.and_then(|spec| spec.price),
            latency: state.and_then(|state| state.paces.get(index(form))?.median),
            tokens_per_second: state.and_then(|state| state.speed.as_ref()?.all().quantile(500)),
            parameters: spec.and_then(|spec| spec.parameters.as_deref()),
        }
    }

    /// Its breaker is closed and nothing weighs on it.
    pub(super) fn is_healthy(&self, now: Instant, endpoint: EndpointId) -> bool {
        self.state(endpoint).is_some_and(|state| {
            state.breaker.admission(now) == Admission::Closed && !state.has_lost_weight(now)
        })
    }

    /// Whether an endpoint is the last route of a model.
    pub(super) fn is_needed(&self, now: Instant, endpoint: EndpointId) -> bool {
        let of_it = self.ranks.models_of(self.place(endpoint)).iter();
        of_it.into_iter().any(|(model, _)| !self.another_admits(now, *model, Some(endpoint)))
    }

    pub(super) fn another_admits(&self, now: Instant, model: ModelId, but: Option<EndpointId>) -> bool {
        let routes = self.layout.models.get(model.0).map(|spec| spec.routes.as_slice()).unwrap_or_default();
        let but = but.map(|endpoint| self.place(endpoint));
        routes.iter().filter(|endpoint| Some(self.place(**endpoint)) != but).any(|endpoint| {
            let closed = self
                .state(*endpoint)
                .is_some_and(|state| !matches!(state.breaker.admission(now), Admission::Refused(_)));
            let credential = self.credential(*endpoint);
            closed
                && credential.is_some_and(|credential| {
                    !matches!(
                        self.rests.standing(now, self.place(*endpoint), credential),
                        Standing::Resting { .. }
                    )
                })
        })
    }
}
