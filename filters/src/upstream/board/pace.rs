//! What a route's answers have taken, and the watchdogs that are learnt from it.

use std::time::{Duration, Instant};

use super::{Board, Route, Ticket};
use crate::ids::ModelId;
use crate::upstream::failure::Timer;
use crate::upstream::sketch::Window;
use crate::upstream::watchdog::{Form, Limits, PromptClass, Seen, Table, Timing, Timings};

/// Learnt limits are this old at most.
const TABLE_AGE_MAX: Duration = Duration::from_secs(1);
/// So many routes of a model forget in a second what is too old, also when nobody asks them.
const SWEEP: usize = 16;

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

/// What all endpoints of a model have shown together, in one form.
#[derive(Clone, Debug, Default)]
pub(super) struct Wide {
    seen: Seen,
    /// When some of its routes last forgot what is too old, and which was the last of them.
    swept: Option<Instant>,
    next: usize,
}

impl Board {
    /// The watchdogs that an attempt at this route would have.
    pub fn limits(&mut self, now: Instant, route: Route, form: Form, prompt_tokens: u64) -> Option<Limits> {
        let spec = self.layout.endpoints.get(route.endpoint.0)?;
        let (head, event) = (spec.first_byte, spec.first_event);
        Some(self.table(now, route, form).limits(PromptClass::of(prompt_tokens), head, event))
    }

    pub(super) fn learn(&mut self, now: Instant, ticket: &Ticket, timing: Timing) {
        let route = self.paced(ticket.route);
        let form = index(ticket.form);
        let wide = self.models.get_mut(route.model.0).and_then(|state| state.wide.get_mut(form));
        let state = self.routes.entry(route).or_default();
        if let (Some(pace), Some(wide)) = (state.paces.get_mut(form), wide) {
            pace.timings.record(now, ticket.class, timing, &mut wide.seen);
        }
    }

    pub(super) fn table(&mut self, now: Instant, route: Route, form: Form) -> Table {
        let route = self.paced(route);
        let known = self.routes.get(&route).and_then(|state| state.paces.get(index(form))?.table);
        if let Some((at, table)) = known
            && now.saturating_duration_since(at) < TABLE_AGE_MAX
        {
            return table;
        }
        self.sweep(now, route.model, form);
        let reasoning = self.layout.models.get(route.model.0).is_some_and(|spec| spec.reasoning);
        let wide = self.models.get_mut(route.model.0).and_then(|state| state.wide.get_mut(index(form)));
        let pace = self.routes.entry(route).or_default().paces.get_mut(index(form));
        let (Some(pace), Some(wide)) = (pace, wide) else {
            return Table::learn(&Timings::default(), &Seen::default(), form, reasoning);
        };
        pace.timings.forget(now, &mut wide.seen);
        let table = Table::learn(&pace.timings, &wide.seen, form, reasoning);
        pace.table = Some((now, table));
        pace.median = pace.timings.median();
        table
    }

    /// Takes what some endpoints have not shown for too long out of what the model has shown. Whoever is asked does so by
    /// himself; the others come one after the other, a few a second.
    fn sweep(&mut self, now: Instant, model: ModelId, form: Form) {
        let spec = self.layout.models.get(model.0);
        let wide = self.models.get_mut(model.0).and_then(|state| state.wide.get_mut(index(form)));
        let (Some(spec), Some(wide)) = (spec, wide) else { return };
        let is_fresh = |at: Instant| now.saturating_duration_since(at) < TABLE_AGE_MAX;
        if wide.swept.is_some_and(is_fresh) {
            return;
        }
        wide.swept = Some(now);
        for _ in 0..spec.routes.len().min(SWEEP) {
            wide.next = (wide.next + 1) % spec.routes.len();
            let Some(endpoint) = spec.routes.get(wide.next).copied() else { continue };
            let state = self.routes.get_mut(&Route { model, endpoint });
            if let Some(pace) = state.and_then(|state| state.paces.get_mut(index(form))) {
                pace.timings.forget(now, &mut wide.seen);
            }
        }
    }

    /// Takes over what a route has shown on the board of before.
    pub(super) fn adopt(&mut self, route: Route, state: &RouteState) {
        if let Some(model) = self.models.get_mut(route.model.0) {
            for (wide, pace) in model.wide.iter_mut().zip(&state.paces) {
                wide.seen.add(&pace.timings);
            }
        }
        self.routes.insert(route, state.clone());
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
