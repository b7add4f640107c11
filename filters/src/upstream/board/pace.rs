//! What a route's answers have taken, and the watchdogs that are learnt from it.

use std::time::{Duration, Instant};

use super::{Board, Route, Ticket};
use crate::ids::ModelId;
use crate::upstream::failure::Timer;
use crate::upstream::sketch::Window;
use crate::upstream::watchdog::{Form, Limits, PromptClass, Seen, Table, Timing, Timings};

/// Learnt limits are this old at most.
const TABLE_AGE_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Default)]
pub(super) struct RouteState {
    pub(super) paces: [Pace; 2],
    pub(super) speed: Option<Window>,
}

/// One form of answers at one route.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    pub(super) timings: Timings,
    pub(super) table: Option<(Instant, Table)>,
    pub(super) median: Option<Duration>,
}

impl Board {
    /// The watchdogs that an attempt at this route would have.
    pub fn limits(&mut self, now: Instant, route: Route, form: Form, prompt_tokens: u64) -> Option<Limits> {
        let spec = self.layout.endpoints.get(route.endpoint.0)?;
        let (head, event) = (spec.first_byte, spec.first_event);
        Some(self.table(now, route, form).limits(PromptClass::of(prompt_tokens), head, event))
    }

    pub(super) fn learn(&mut self, now: Instant, ticket: &Ticket, timing: Timing) {
        let state = self.routes.entry(self.paced(ticket.route)).or_default();
        if let Some(pace) = state.paces.get_mut(index(ticket.form)) {
            pace.timings.record(now, ticket.class, timing);
        }
    }

    pub(super) fn table(&mut self, now: Instant, route: Route, form: Form) -> Table {
        let fresh = |at: Instant| now.saturating_duration_since(at) < TABLE_AGE_MAX;
        let route = self.paced(route);
        let known = self.routes.get(&route).and_then(|state| state.paces.get(index(form))?.table);
        if let Some((at, table)) = known
            && fresh(at)
        {
            return table;
        }
        let reasoning = self.layout.models.get(route.model.0).is_some_and(|spec| spec.reasoning);
        let wide = self.wide(now, route.model, form);
        let state = self.routes.entry(route).or_default();
        let Some(pace) = state.paces.get_mut(index(form)) else {
            return Table::learn(&Seen::default(), &wide, form, reasoning);
        };
        let own = pace.timings.seen(now);
        let table = Table::learn(&own, &wide, form, reasoning);
        pace.table = Some((now, table));
        pace.median = own.median();
        table
    }

    /// What a model has shown over all its endpoints.
    fn wide(&mut self, now: Instant, model: ModelId, form: Form) -> Seen {
        let fresh = |at: Instant| now.saturating_duration_since(at) < TABLE_AGE_MAX;
        let slot = self.models.get(model.0).and_then(|state| state.wide.get(index(form))?.as_ref());
        if let Some((_, seen)) = slot.filter(|(at, _)| fresh(*at)) {
            return seen.clone();
        }
        let mut seen = Seen::default();
        let routes = self.layout.models.get(model.0).map(|spec| spec.routes.clone()).unwrap_or_default();
        for endpoint in routes {
            let state = self.routes.get_mut(&Route { model, endpoint });
            if let Some(pace) = state.and_then(|state| state.paces.get_mut(index(form))) {
                seen.merge(&pace.timings.seen(now));
            }
        }
        if let Some(slot) = self.models.get_mut(model.0).and_then(|state| state.wide.get_mut(index(form))) {
            *slot = Some((now, seen.clone()));
        }
        seen
    }
}

/// A call that was cut is a sample at the limit that cut it, or would have.
pub(super) fn censored(timer: Timer, timing: Timing, limits: Limits) -> Timing {
    match timer {
        // Of its first event nothing is known: with a fixed 50 ms to the head it says nothing about seconds.
        Timer::FirstByte => Timing { head: Some(limits.head), event: None },
        Timer::FirstEvent | Timer::Share if timing.event.is_none() => {
            Timing { head: Some(timing.head.unwrap_or(limits.head)), event: Some(limits.event) }
        }
        Timer::FirstEvent | Timer::Share | Timer::Connect | Timer::Idle | Timer::StreamMax | Timer::Drain => {
            Timing::default()
        }
    }
}

pub(super) const fn index(form: Form) -> usize {
    match form {
        Form::Stream => 0,
        Form::Whole => 1,
    }
}
