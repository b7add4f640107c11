//! How upstreams stand at one moment, for metrics: nothing here decides anything.

use std::time::Instant;

use super::pace::index;
use super::{Board, Route};
use crate::ids::EndpointId;
use crate::status::now::{RECENT, RouteSignal};
use crate::upstream::breaker::Admission;
use crate::upstream::rest::{Cause, Standing};
use crate::upstream::watchdog::{Form, Limits, PromptClass};

/// How an endpoint stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Glance {
    /// The configured weight.
    pub weight: u32,
    /// What health makes of it: 1 is all of it.
    pub factor: f64,
    /// What its breaker says.
    pub breaker: BreakerState,
    /// It waits out a Retry-After, or its credential is refused.
    pub rests: bool,
    /// Somebody must look at its credential.
    pub credential_refused: bool,
    /// When it last answered, a call or a probe.
    pub answered: Option<Instant>,
    /// When it last failed, where it has not answered since: three times or more, or calls have passed it by.
    pub failed: Option<Instant>,
}

/// What a breaker does with calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// It admits them.
    Closed,
    /// It refuses them.
    Open,
    /// It admits one, to see.
    HalfOpen,
}

impl BreakerState {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Closed, Self::Open, Self::HalfOpen];

    /// The label in metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

impl Glance {
    /// Whether it may be asked: its breaker does not refuse, and it does not rest.
    #[must_use]
    pub const fn admits(&self) -> bool {
        !self.rests && !matches!(self.breaker, BreakerState::Open)
    }
}

impl Board {
    /// How an endpoint stands; `None` where there is none.
    #[must_use]
    pub fn glance(&self, now: Instant, id: EndpointId) -> Option<Glance> {
        let (spec, state) = (self.layout.endpoints.get(id.0)?, self.state(id)?);
        let standing = self.rests.standing(now, spec.place, spec.credential);
        Some(Glance {
            weight: spec.weight,
            factor: state.factor(now),
            breaker: match state.breaker.admission(now) {
                Admission::Closed => BreakerState::Closed,
                Admission::Probe => BreakerState::HalfOpen,
                Admission::Refused(_) => BreakerState::Open,
            },
            rests: matches!(standing, Standing::Resting { .. }),
            credential_refused: self.alarms().any(|credential| credential == spec.credential),
            answered: state.heard.answered(),
            failed: state.heard.failed().filter(|at| state.heard.is_certain() || self.passes_by(id, *at)),
        })
    }

    /// Whether somebody came since who might have been sent there.
    fn passes_by(&self, id: EndpointId, since: Instant) -> bool {
        let place = self.place(id);
        self.layout.models.iter().zip(&self.models).any(|(spec, state)| {
            state.asked.is_some_and(|asked| asked > since)
                && spec.routes.iter().any(|endpoint| self.place(*endpoint) == place)
        })
    }

    /// What a status page takes from an endpoint. What is known of its place is a signal of now for [`RECENT`].
    #[must_use]
    pub fn signal(&self, now: Instant, id: EndpointId) -> Option<RouteSignal> {
        let (spec, state) = (self.layout.endpoints.get(id.0)?, self.state(id)?);
        let admission = state.breaker.admission(now);
        let cause = match self.rests.standing(now, spec.place, spec.credential) {
            Standing::Resting { cause, .. } => Some(cause),
            Standing::Free | Standing::Trial | Standing::OnTrial => None,
        };
        let out = matches!(admission, Admission::Refused(_)) || cause == Some(Cause::Credential);
        let called = state.called.is_some_and(|at| now.saturating_duration_since(at) < RECENT);
        Some(RouteSignal {
            known: called || out || state.fleet.is_some(),
            out,
            rests: matches!(cause, Some(Cause::RateLimit | Cause::Endpoint)),
            shaky: admission == Admission::Probe || state.has_lost_weight(now),
        })
    }

    /// How many openings of an endpoint's breaker are not forgiven.
    #[must_use]
    pub fn openings(&self, endpoint: EndpointId) -> u32 {
        self.state(endpoint).map_or(0, |state| state.breaker.openings())
    }

    /// The watchdogs of short prompts that the latest attempts had, by route, in the order of the models and their routes.
    /// A route that nobody was sent to has none: a catalogue has many times more routes than traffic. Learns nothing, so it
    /// is a short look.
    #[must_use]
    pub fn watchdogs(&self, form: Form) -> Vec<(Route, Limits)> {
        let in_force = |route: Route| {
            let spec = self.layout.endpoints.get(route.endpoint.0)?;
            let state = self.routes.get(&self.paced(route))?;
            let (_, table) = state.paces.get(index(form))?.table.as_ref()?;
            Some((route, table.limits(PromptClass::of(0), spec.first_byte, spec.first_event)))
        };
        self.layout.routes().filter_map(in_force).collect()
    }
}
