//! Whom a request asks, in which order.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rand_core::RngCore;

use super::lineup::Lineup;
use super::{Ask, Board, Found, Further, Pass, Plan, Route, Stand};
use crate::ids::{EndpointId, ModelId};
use crate::upstream::last_resort::{Gate, PlaceId};
use crate::upstream::rest::{Cause, Standing};
use crate::upstream::watchdog::PromptClass;

/// A place at the gate before its request has begun an attempt.
const PLACE: Duration = Duration::from_secs(2);

impl Board {
    /// Whom to ask.
    pub fn candidates(&mut self, now: Instant, ask: &Ask<'_>, rng: &mut impl RngCore) -> Found {
        for model in ask.models {
            if let Some(state) = self.models.get_mut(model.0) {
                state.asked = Some(now);
            }
        }
        self.settle(now);
        let mut stands: Vec<Stand> = vec![];
        let mut places: Vec<(ModelId, PlaceId)> = vec![];
        let mut unclaimed: Option<ModelId> = None;
        let mut order: Vec<Route> = vec![];
        let mut is_cut = false;
        for model in ask.models {
            let of_model = match self.order_of(now, *model, ask, &mut stands, rng) {
                Order::Routes { routes, place, others } => {
                    places.extend(place);
                    is_cut |= others;
                    routes
                }
                Order::Full => vec![],
                Order::Unclaimed => {
                    unclaimed = unclaimed.or(Some(*model));
                    vec![]
                }
            };
            add_fresh(&mut order, of_model);
        }
        let mut fall_backs = self.fall_backs(&stands);
        if order.is_empty() {
            let may_try = |route: &Route| places.iter().any(|(model, _)| *model == route.model);
            order = fall_backs.extract_if(.., |route| may_try(route)).collect();
            fall_backs.clear();
        }
        if ask.preferences.no_fallbacks && ask.preferences.order.is_empty() {
            fall_backs.clear();
            is_cut = false;
            keep_first_places(&mut order, |route| self.place(route.endpoint));
        }
        let (places, unused) =
            places.into_iter().partition(|(model, _)| order.iter().any(|route| route.model == *model));
        self.leave(unused);
        if order.is_empty() {
            let stands: Vec<Stand> =
                ask.models.iter().flat_map(|model| self.survey(now, *model, ask)).collect();
            return nobody(now, &stands, unclaimed);
        }
        // Others behind the order admit as well.
        let viable = order.len() + usize::from(is_cut);
        let class = PromptClass::of(ask.prompt_tokens);
        Found::Plan(Plan {
            order,
            fall_backs,
            pass: Pass { form: ask.form, class, viable, asked: vec![], places, is_cut },
        })
    }

    /// Whom to ask beyond a plan's first places, when one of these refuses by now: everybody else, in order. Nobody where the
    /// plan had all, or was told so before.
    pub fn further(
        &mut self,
        now: Instant,
        ask: &Ask<'_>,
        pass: &mut Pass,
        known: &[EndpointId],
        rng: &mut impl RngCore,
    ) -> Further {
        if !std::mem::take(&mut pass.is_cut) {
            return Further::default();
        }
        let stands: Vec<Stand> = ask.models.iter().flat_map(|model| self.survey(now, *model, ask)).collect();
        let mut order: Vec<Route> = vec![];
        for model in ask.models {
            let admitted = stands.iter().filter(|stand| stand.route.model == *model && stand.admits());
            let lineup = self.line_up(*model, admitted, rng);
            add_fresh(&mut order, lineup.routes(*model).collect());
        }
        let mut fall_backs = self.fall_backs(&stands);
        let is_new = |route: &Route| !known.contains(&route.endpoint);
        order.retain(is_new);
        fall_backs.retain(is_new);
        pass.viable = pass.viable.saturating_sub(1) + order.len();
        Further { order, fall_backs }
    }

    /// A request is over, however it ended.
    pub fn finish(&mut self, pass: Pass) {
        self.leave(pass.places);
    }

    /// The order of one model, and the place at its gate if it has one. Leaves in `stands` where its routes stand, if it looked
    /// at all of them.
    fn order_of(
        &mut self,
        now: Instant,
        id: ModelId,
        ask: &Ask<'_>,
        stands: &mut Vec<Stand>,
        rng: &mut impl RngCore,
    ) -> Order {
        let leaves_all = !ask.preferences.may_drop() && !ask.preferences.fix_order();
        let first = if leaves_all { self.line_up_first(now, id, rng) } else { None };
        let (mut lineup, all_refuse) = match first {
            Some(lineup) => (lineup, false),
            None => {
                let own = self.survey(now, id, ask);
                // The gate is everybody's: what one caller's preferences leave must not put it up for the others.
                let all_refuse = !own.iter().any(Stand::admits_others) && own.iter().any(Stand::is_fall_back);
                let lineup = self.line_up(id, own.iter().filter(|stand| stand.admits()), rng);
                stands.extend(own);
                (lineup, all_refuse)
            }
        };
        let Some(model) = self.models.get_mut(id.0) else { return Order::Full };
        if all_refuse && self.fleet.present && !model.claim.is_good(now) {
            model.gate.put_up();
            model.wants_claim = true;
            self.fleet.urgent = true;
            return Order::Unclaimed;
        }
        let place = match model.gate.ask(now, all_refuse, now + PLACE) {
            Gate::Away => None,
            Gate::Try(place) => Some((id, place)),
            Gate::Full => return Order::Full,
        };
        if !ask.preferences.fix_order()
            && let Some(lane) = self.who_begins(now, id, ask, &mut lineup, rng)
        {
            lineup.begin_with(lane);
        }
        let mut routes: Vec<Route> = lineup.routes(id).collect();
        ask.preferences.arrange(&mut routes, |route| self.route_facts(*route, ask.form));
        Order::Routes { routes, place, others: lineup.is_cut }
    }

    /// Who begins instead of the first one, if somebody does.
    fn who_begins(
        &mut self,
        now: Instant,
        id: ModelId,
        ask: &Ask<'_>,
        lineup: &mut Lineup,
        rng: &mut impl RngCore,
    ) -> Option<usize> {
        // A half-open endpoint is asked by whoever comes and can go on from there: its success is what opens the way
        // again. Nor does anybody explore who allows no fall-back.
        if ask.preferences.no_fallbacks {
            return None;
        }
        if let Some(probe) = self.probe_of(id, lineup, rng) {
            return Some(probe);
        }
        if !self.layout.models.get(id.0).is_some_and(|spec| spec.explore) {
            return None;
        }
        if self.models.get(id.0)?.explorer.may_return(now)
            && let Some(lost) = self.lost_of(now, id, lineup, rng)
            && self.models.get_mut(id.0)?.explorer.return_is_due(now, rng)
        {
            return Some(lost);
        }
        let is_due = self.models.get_mut(id.0)?.explorer.is_due(now, rng);
        if is_due { self.least_called(now, id, lineup, rng) } else { None }
    }

    /// On whom to fall back, the sooner back the earlier.
    fn fall_backs(&self, stands: &[Stand]) -> Vec<Route> {
        let mut refused: Vec<&Stand> = stands.iter().filter(|stand| stand.is_fall_back()).collect();
        refused.sort_by_key(|stand| stand.refused_until());
        let mut fall_backs: Vec<Route> = vec![];
        let mut known: HashSet<Route> = HashSet::new();
        for route in refused.iter().map(|stand| stand.route) {
            // A place that is refused is refused with every credential: one of them is enough to find out.
            if known.insert(self.paced(route)) {
                fall_backs.push(route);
            }
        }
        fall_backs
    }

    fn leave(&mut self, places: Vec<(ModelId, PlaceId)>) {
        for (model, place) in places {
            if let Some(model) = self.models.get_mut(model.0) {
                model.gate.leave(place);
            }
        }
    }
}

/// Whom to ask of one model.
enum Order {
    /// These, and its place at the gate if it has one.
    Routes {
        routes: Vec<Route>,
        place: Option<(ModelId, PlaceId)>,
        /// There are others behind them.
        others: bool,
    },
    /// Nobody: the gate is full.
    Full,
    /// Nobody: the gate is another node's, or nobody's yet.
    Unclaimed,
}

/// The same endpoint under a second name would be the same call again.
fn add_fresh(order: &mut Vec<Route>, more: Vec<Route>) {
    let before = order.len();
    for route in more {
        let known = order.get(..before).unwrap_or_default();
        if !known.iter().any(|known| known.endpoint == route.endpoint) {
            order.push(route);
        }
    }
}

/// Of each model the first place alone.
fn keep_first_places(order: &mut Vec<Route>, place: impl Fn(&Route) -> EndpointId) {
    let mut first: Vec<(ModelId, EndpointId)> = vec![];
    order.retain(|route| {
        let (model, place) = (route.model, place(route));
        if !first.iter().any(|(of, _)| *of == model) {
            first.push((model, place));
        }
        first.contains(&(model, place))
    });
}

fn nobody(now: Instant, stands: &[Stand], gate: Option<ModelId>) -> Found {
    let wanted: Vec<&Stand> = stands.iter().filter(|stand| stand.dropped.is_none()).collect();
    if wanted.is_empty() && !stands.is_empty() {
        let dropped = stands.iter().filter_map(|stand| Some((stand.route, stand.dropped.clone()?)));
        return Found::NoneFits(dropped.collect());
    }
    let soonest = wanted.iter().filter_map(|stand| stand.refused_until()).min();
    let limited = |stand: &&Stand| matches!(stand.rest, Standing::Resting { cause: Cause::RateLimit, .. });
    Found::AllRefused {
        soonest: soonest.unwrap_or(now + Duration::from_secs(1)),
        rate_limited: !wanted.is_empty() && wanted.iter().all(limited),
        gate,
    }
}
