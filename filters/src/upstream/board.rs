//! Everything that a node knows of its upstreams, in one value.
//!
//! The machines beside this file each answer one question; a request needs all answers at once, and what it
//! learns must reach all of them. The board is that seam. The edge owns one, behind one mutex that is never
//! held over a wait, and makes these calls:
//!
//! ```text
//! candidates(now, ask)      whom to ask, in which order, and on whom to fall back; or why nobody
//! further(now, ask, pass)   whom else, when one of those refuses
//! begin(now, pass, route)   before each attempt: may it go, and with which watchdogs?
//! answered(now, ticket)     the first meaningful event is in hand
//! end(now, ticket, outcome) how it ended; answers when the endpoint may be asked again
//! finish(pass)              the request is over
//! ```
//!
//! A pass belongs to a request and a ticket to an attempt; both are used up, so that nothing counts twice.
//! Whoever drops one harms nobody: leases and places at the gate end by themselves.
//!
//! Two kinds of weight meet here. Health says how well an endpoint does and bends the order; breaker and rest
//! say whether it may be asked at all. A route that is refused by its *breaker* still stands behind the order
//! as a fall-back, one call at a time: when everything else has failed for a request, the worst that
//! a dead endpoint can do to it is to be dead. One that *rests* does not.
//!
//! In a fleet two more verbs carry what nodes tell each other ([`super::fleet`]), both off the path of requests:
//! `news` gives out what this node has seen, and `hear_…` takes in what the fleet makes of it. Without them, and
//! while the fleet cannot be heard (`alone`), a board is what it is on a single node.

mod attempt;
mod call;
mod fleet;
mod glance;
mod kept;
mod lane;
mod layout;
mod lineup;
mod order;
mod pace;
mod ranks;
mod stand;
mod standbys;

use std::collections::HashMap;
use std::time::Instant;

use crate::ids::{CredentialId, EndpointId, ModelId};
use crate::route::Explorer;
use crate::upstream::breaker::Breaker;
use crate::upstream::fleet::{Claim, Generation, Untold};
use crate::upstream::last_heard::LastHeard;
use crate::upstream::last_resort::LastResort;
use crate::upstream::node_fault::NodeFault;
use crate::upstream::rest::Rests;
use crate::upstream::retry_budget::RetryBudget;
use crate::upstream::weight::Health;

pub use call::{Ask, Begun, Ended, Found, Further, Notice, Outcome, Pass, Plan, Ticket};
pub use glance::{BreakerState, Glance};
pub use layout::{EndpointSpec, Layout, ModelSpec, Route};
pub use stand::Stand;

use fleet::Fleet;
use pace::{RouteState, Wide};
use ranks::Ranks;

/// All that a node knows of its upstreams.
#[derive(Debug)]
pub struct Board {
    layout: Layout,
    endpoints: Vec<EndpointState>,
    models: Vec<ModelState>,
    routes: HashMap<Route, RouteState>,
    /// The order of each model's places, from call to call.
    ranks: Ranks,
    rests: Rests,
    budget: RetryBudget,
    node: NodeFault,
    fleet: Fleet,
}

#[derive(Clone, Debug)]
struct EndpointState {
    health: Health,
    breaker: Breaker,
    heard: LastHeard,
    called: Option<Instant>,
    /// Which of its credentials was used last.
    last: Option<EndpointId>,
    /// As it was before the connect failures of the last second.
    before: Option<Before>,
    /// Of its place, to the fleet.
    untold: Untold,
    /// What the fleet's breaker has changed to, as far as this node knows.
    generation: Generation,
    /// How the calls of all nodes went.
    fleet: Option<Health>,
}

#[derive(Clone, Debug)]
struct Before {
    at: Instant,
    health: Health,
    breaker: Breaker,
    heard: LastHeard,
    generation: Generation,
}

#[derive(Clone, Debug, Default)]
struct ModelState {
    /// When somebody last wanted to know whom to ask.
    asked: Option<Instant>,
    explorer: Explorer,
    gate: LastResort,
    claim: Claim,
    /// Somebody has been refused for want of the claim.
    wants_claim: bool,
    /// By the form of answers.
    wide: [Wide; 2],
}

impl Board {
    /// A board of which nothing is known yet.
    #[must_use]
    pub fn new(now: Instant, layout: Layout) -> Self {
        let endpoints = layout.endpoints.iter().map(|_| EndpointState::new(now)).collect();
        let models = layout.models.iter().map(|_| ModelState::default()).collect();
        Self {
            ranks: Ranks::new(&layout),
            layout,
            endpoints,
            models,
            routes: HashMap::new(),
            rests: Rests::default(),
            budget: RetryBudget::new(now),
            node: NodeFault::default(),
            fleet: Fleet::default(),
        }
    }

    /// A board for a new layout that knows what this one knew, by the names of endpoints and models. Tickets
    /// of before may still end on it only if ids kept their meaning: let old requests end on the old board.
    #[must_use]
    pub fn reloaded(&self, now: Instant, layout: Layout) -> Self {
        let mut new = Self::new(now, layout);
        let old_endpoint = |name: &str| self.layout.endpoints.iter().position(|spec| spec.name == name);
        let old_model = |new: &ModelSpec| {
            let same = |spec: &ModelSpec| spec.name == new.name && spec.operation == new.operation;
            self.layout.models.iter().position(same)
        };
        for (at, (spec, state)) in new.layout.endpoints.iter().zip(&mut new.endpoints).enumerate() {
            let Some(old_at) = old_endpoint(&spec.name) else { continue };
            let Some((old, old_state)) = self.layout.endpoints.get(old_at).zip(self.endpoints.get(old_at))
            else {
                continue;
            };
            state.clone_from(old_state);
            let ids = ((EndpointId(old_at), old.credential), (EndpointId(at), spec.credential));
            new.rests.adopt(&self.rests, ids.0, ids.1);
        }
        let mut adopted: Vec<(Route, &RouteState)> = vec![];
        for (at, model) in new.layout.models.iter().enumerate() {
            let Some(old_at) = old_model(model) else { continue };
            for endpoint in &model.routes {
                let name = new.layout.endpoints.get(endpoint.0).map(|spec| spec.name.as_str());
                let Some(old_endpoint) = name.and_then(old_endpoint) else { continue };
                let old = Route { model: ModelId(old_at), endpoint: EndpointId(old_endpoint) };
                if let Some(state) = self.routes.get(&old) {
                    adopted.push((Route { model: ModelId(at), endpoint: *endpoint }, state));
                }
            }
        }
        adopted.into_iter().for_each(|(route, state)| new.adopt(route, state));
        new.budget = self.budget.clone();
        new.fleet.present = self.fleet.present;
        new
    }

    /// What this board is about.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the state of an endpoint is kept: at the first of its place.
    fn place(&self, endpoint: EndpointId) -> EndpointId {
        self.layout.endpoints.get(endpoint.0).map_or(endpoint, |spec| spec.place)
    }

    fn state(&self, endpoint: EndpointId) -> Option<&EndpointState> {
        self.endpoints.get(self.place(endpoint).0)
    }

    /// Whoever gets it may change what the place is worth.
    fn state_mut(&mut self, endpoint: EndpointId) -> Option<&mut EndpointState> {
        let place = self.place(endpoint);
        self.ranks.touch(place);
        self.endpoints.get_mut(place.0)
    }

    /// Under which route timings and speed are kept.
    fn paced(&self, route: Route) -> Route {
        Route { model: route.model, endpoint: self.place(route.endpoint) }
    }

    fn credential(&self, endpoint: EndpointId) -> Option<CredentialId> {
        self.layout.endpoints.get(endpoint.0).map(|spec| spec.credential)
    }
}

impl EndpointState {
    fn new(now: Instant) -> Self {
        Self {
            health: Health::new(now),
            breaker: Breaker::new(now),
            heard: LastHeard::default(),
            called: None,
            last: None,
            before: None,
            untold: Untold::default(),
            generation: Generation::default(),
            fleet: None,
        }
    }

    /// What its weight is multiplied by: as this node sees it or as the fleet does, whichever is less.
    fn factor(&self, now: Instant) -> f64 {
        let fleet = self.fleet.map_or(1.0, |health| health.factor(now));
        self.health.factor(now).min(fleet)
    }

    fn has_lost_weight(&self, now: Instant) -> bool {
        self.health.has_lost_weight(now) || self.fleet.is_some_and(|health| health.has_lost_weight(now))
    }

    fn share(&self, now: Instant) -> f64 {
        let fleet = self.fleet.map_or(1.0, |health| health.share(now));
        self.health.share(now).min(fleet)
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
