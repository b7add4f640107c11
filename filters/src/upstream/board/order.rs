//! Whom a request asks, in which order: from where every route of its models stands.

use std::time::{Duration, Instant};

use rand_core::RngCore;

use super::{Ask, Board, Found, Pass, Plan, Route, Stand};
use crate::ids::{EndpointId, ModelId};
use crate::route::{self, Candidate, Sort};
use crate::upstream::breaker::Admission;
use crate::upstream::last_resort::{Gate, PlaceId};
use crate::upstream::rest::{Cause, Standing};
use crate::upstream::watchdog::PromptClass;

/// A weight of a credential whose trial another call is.
const ON_TRIAL: f64 = 0.001;
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
        let stands: Vec<Stand> = ask.models.iter().flat_map(|model| self.survey(now, *model, ask)).collect();
        let mut places: Vec<(ModelId, PlaceId)> = vec![];
        let mut unclaimed: Option<ModelId> = None;
        let mut order: Vec<Route> = vec![];
        for model in ask.models {
            let (of_model, taken) = match self.order_of(now, *model, ask, &stands, rng) {
                Order::Routes(routes, taken) => (routes, taken),
                Order::Full => (vec![], None),
                Order::Unclaimed => {
                    unclaimed = unclaimed.or(Some(*model));
                    (vec![], None)
                }
            };
            places.extend(taken);
            // The same endpoint under a second name would be the same call again.
            let fresh = |route: &Route| !order.iter().any(|known| known.endpoint == route.endpoint);
            let fresh: Vec<_> = of_model.into_iter().filter(fresh).collect();
            order.extend(fresh);
        }
        let mut refused: Vec<&Stand> = stands.iter().filter(|stand| stand.is_fall_back()).collect();
        refused.sort_by_key(|stand| stand.refused_until());
        let mut fall_backs: Vec<Route> = vec![];
        for route in refused.iter().map(|stand| stand.route) {
            // A place that is refused is refused with every credential: one of them is enough to find out.
            if !fall_backs.iter().any(|known| self.paced(*known) == self.paced(route)) {
                fall_backs.push(route);
            }
        }
        if order.is_empty() {
            let may_try = |route: &Route| places.iter().any(|(model, _)| *model == route.model);
            order = fall_backs.extract_if(.., |route| may_try(route)).collect();
            fall_backs.clear();
        }
        if ask.preferences.no_fallbacks && ask.preferences.order.is_empty() {
            fall_backs.clear();
            keep_first_places(&mut order, |route| self.place(route.endpoint));
        }
        let (places, unused) =
            places.into_iter().partition(|(model, _)| order.iter().any(|route| route.model == *model));
        self.leave(unused);
        if order.is_empty() {
            return nobody(now, &stands, unclaimed);
        }
        let viable = order.len();
        let class = PromptClass::of(ask.prompt_tokens);
        Found::Plan(Plan {
            order,
            fall_backs,
            pass: Pass { form: ask.form, class, viable, asked: vec![], places },
        })
    }

    /// A request is over, however it ended.
    pub fn finish(&mut self, pass: Pass) {
        self.leave(pass.places);
    }

    /// The order of one model, and the place at its gate if it has one.
    fn order_of(
        &mut self,
        now: Instant,
        id: ModelId,
        ask: &Ask<'_>,
        stands: &[Stand],
        rng: &mut impl RngCore,
    ) -> Order {
        let own = || stands.iter().filter(|stand| stand.route.model == id);
        let admitted: Vec<&Stand> = own().filter(|stand| stand.admits()).collect();
        let lanes = self.lanes(&admitted);
        let Some((spec, model)) = self.layout.models.get(id.0).zip(self.models.get_mut(id.0)) else {
            return Order::Full;
        };
        // The gate is everybody's: what one caller's preferences leave must not put it up for the others.
        let all_refuse = !own().any(Stand::admits_others) && own().any(Stand::is_fall_back);
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
        // One for each place: its weight counts once, however many credentials there are.
        let mut candidates: Vec<Candidate> = lanes
            .iter()
            .enumerate()
            .map(|(at, lane)| {
                let stand = lane.first;
                let trial = if stand.rest == Standing::OnTrial { ON_TRIAL } else { 1.0 };
                let weight = f64::from(stand.weight) * stand.factor * trial;
                let weight = route::weight_in_share(weight, stand.share, rng);
                Candidate { endpoint: stand.route.endpoint, weight, lane: at }
            })
            .collect();
        match spec.sort {
            Sort::Weight => route::order(&mut candidates, rng),
            Sort::WeightedRandom => route::spread(&mut candidates, rng),
        }
        let is_probe = |candidate: &Candidate| {
            lanes.get(candidate.lane).is_some_and(|lane| lane.first.breaker == Admission::Probe)
        };
        let whole = |candidate: &Candidate| lanes.get(candidate.lane).into_iter().flat_map(Lane::routes);
        let mut routes: Vec<Route> = Vec::with_capacity(admitted.len());
        if ask.preferences.fix_order() {
            routes.extend(candidates.iter().flat_map(whole));
            ask.preferences.arrange(&mut routes, |route| self.route_facts(*route, ask.form));
            return Order::Routes(routes, place);
        }
        // A half-open endpoint is asked by whoever comes and can go on from there: its success is what opens the way
        // again. Nor does anybody explore who allows no fall-back.
        let may_fail = !ask.preferences.no_fallbacks;
        let explores = spec.explore && may_fail;
        if let Some(probe) = candidates.iter().position(is_probe).filter(|_| may_fail) {
            route::begin_with(&mut candidates, probe);
        } else if let Some(lost) = lost_place(&candidates, &lanes)
            && explores
            && model.explorer.return_is_due(now, rng)
        {
            route::begin_with(&mut candidates, lost);
        } else if explores
            && model.explorer.is_due(now, rng)
            && let Some(standby) = self.least_called(&candidates)
        {
            route::begin_with(&mut candidates, standby);
        }
        routes.extend(candidates.iter().flat_map(whole));
        ask.preferences.arrange(&mut routes, |route| self.route_facts(*route, ask.form));
        Order::Routes(routes, place)
    }

    /// The place of the standby that was called longest ago.
    fn least_called(&self, candidates: &[Candidate]) -> Option<usize> {
        let called = |c: &Candidate| self.state(c.endpoint).and_then(|state| state.called);
        candidates.iter().enumerate().skip(1).min_by_key(|(_, c)| called(c)).map(|(place, _)| place)
    }

    /// The routes that may be asked, by their places; the credentials of each in turn, so that they share its calls. One
    /// that is on trial stands alone: behind everybody else is not behind its neighbours.
    fn lanes<'a>(&self, admitted: &[&'a Stand]) -> Vec<Lane<'a>> {
        let mut lanes: Vec<Lane<'_>> = Vec::with_capacity(admitted.len());
        // By place: the lane that others may join. A search would look at every lane for every route.
        let mut open: Vec<Option<usize>> = vec![None; self.layout.endpoints.len()];
        for stand in admitted {
            let place = self.place(stand.route.endpoint);
            let open = open.get_mut(place.0).filter(|_| stand.rest != Standing::OnTrial);
            match open.as_deref().copied().flatten().and_then(|at| lanes.get_mut(at)) {
                Some(lane) => lane.others.push(stand),
                None => {
                    if let Some(open) = open {
                        *open = Some(lanes.len());
                    }
                    lanes.push(Lane { first: stand, others: vec![] });
                }
            }
        }
        for lane in lanes.iter_mut().filter(|lane| !lane.others.is_empty()) {
            if let Some(last) = self.state(lane.first.route.endpoint).and_then(|state| state.last) {
                lane.begin_behind(last);
            }
        }
        lanes
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
    Routes(Vec<Route>, Option<(ModelId, PlaceId)>),
    /// Nobody: the gate is full.
    Full,
    /// Nobody: the gate is another node's, or nobody's yet.
    Unclaimed,
}

/// The routes of one place that may be asked.
#[derive(Debug)]
struct Lane<'a> {
    first: &'a Stand,
    others: Vec<&'a Stand>,
}

impl Lane<'_> {
    /// Puts the first behind this one in front, and those before it at the end.
    fn begin_behind(&mut self, last: EndpointId) {
        let Self { first, others } = self;
        let mut all = std::mem::take(others);
        all.insert(0, first);
        let next = all.iter().position(|stand| stand.route.endpoint > last);
        all.rotate_left(next.unwrap_or(0));
        *first = all.remove(0);
        *others = all;
    }

    fn routes(&self) -> impl Iterator<Item = Route> {
        std::iter::once(self.first).chain(self.others.iter().copied()).map(|stand| stand.route)
    }
}

/// The place of a route that would stand before the first one if it had not failed.
fn lost_place(candidates: &[Candidate], lanes: &[Lane<'_>]) -> Option<usize> {
    let stand = |c: &Candidate| lanes.get(c.lane).map(|lane| lane.first);
    let first = stand(candidates.first()?)?;
    let lost = |c: &Candidate| {
        let stand = stand(c).filter(|s| s.has_lost_weight && s.weight >= first.weight);
        stand.is_some_and(|s| s.rest != Standing::OnTrial)
    };
    candidates.iter().skip(1).position(lost).map(|place| place + 1)
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
