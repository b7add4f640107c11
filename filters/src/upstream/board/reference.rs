//! The order as it was made before one was kept: a look at every route for every call. What is kept is held to it, over
//! random boards and whatever happens to them.

use std::collections::HashMap;
use std::time::Duration;

use rand_core::SeedableRng;
use rand_pcg::Pcg64Mcg;

use super::kept::Rank;
use super::lane::ON_TRIAL;
use super::ranks::PLACES;
use super::*;
use crate::dialect::Operation;
use crate::preferences::Preferences;
use crate::route::{self, Candidate, Sort};
use crate::upstream::breaker::Admission;
use crate::upstream::failure::{Failure, Timer};
use crate::upstream::fleet::{HealthWord, Heard, Phase, PlaceWord, RestWord};
use crate::upstream::rest::{Cause, Standing};
use crate::upstream::watchdog::{Form, Limit, Timing};
use rand_core::RngCore;

/// The routes of one place that may be asked.
struct Lane<'a> {
    first: &'a Stand,
    others: Vec<&'a Stand>,
}

impl Lane<'_> {
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

    /// Without what chance makes of it in a slow start.
    fn weight(&self) -> f64 {
        let trial = if self.first.rest == Standing::OnTrial { ON_TRIAL } else { 1.0 };
        f64::from(self.first.weight) * self.first.factor * trial
    }
}

fn lanes<'a>(board: &Board, stands: &'a [Stand]) -> Vec<Lane<'a>> {
    let mut lanes: Vec<Lane<'_>> = vec![];
    let mut open: HashMap<EndpointId, usize> = HashMap::new();
    for stand in stands.iter().filter(|stand| stand.admits()) {
        let place = board.place(stand.route.endpoint);
        let joined = if stand.rest == Standing::OnTrial { None } else { open.get(&place).copied() };
        match joined {
            Some(at) => lanes[at].others.push(stand),
            None => {
                if stand.rest != Standing::OnTrial {
                    open.insert(place, lanes.len());
                }
                lanes.push(Lane { first: stand, others: vec![] });
            }
        }
    }
    for lane in &mut lanes {
        if let Some(last) = board.state(lane.first.route.endpoint).and_then(|state| state.last) {
            lane.begin_behind(last);
        }
    }
    lanes
}

fn survey(board: &Board, now: Instant, model: ModelId) -> Vec<Stand> {
    let preferences = Preferences::default();
    let ask = Ask { models: &[], form: Form::Stream, prompt_tokens: 0, preferences: &preferences };
    board.survey(now, model, &ask)
}

/// The whole order of a model.
fn order(
    board: &Board,
    now: Instant,
    id: ModelId,
    explorer: &mut Explorer,
    rng: &mut impl RngCore,
) -> Vec<Route> {
    let stands = survey(board, now, id);
    let lanes = lanes(board, &stands);
    let spec = &board.layout.models[id.0];
    let candidate = |(at, lane): (usize, &Lane<'_>)| {
        let weight = route::weight_in_share(lane.weight(), lane.first.share, rng);
        Candidate { endpoint: lane.first.route.endpoint, weight, lane: at }
    };
    let mut candidates: Vec<Candidate> = lanes.iter().enumerate().map(candidate).collect();
    match spec.sort {
        Sort::Weight => route::order(&mut candidates, rng),
        Sort::WeightedRandom => route::spread(&mut candidates, rng),
    }
    let is_probe = |c: &Candidate| lanes[c.lane].first.breaker == Admission::Probe;
    let called = |c: &Candidate| board.state(c.endpoint).and_then(|state| state.called);
    let lost = || {
        let leader = lanes[candidates.first()?.lane].first;
        let is_lost = |c: &Candidate| {
            let stand = lanes[c.lane].first;
            stand.has_lost_weight && stand.weight >= leader.weight && stand.rest != Standing::OnTrial
        };
        candidates.iter().skip(1).position(is_lost).map(|place| place + 1)
    };
    if let Some(probe) = candidates.iter().position(is_probe) {
        route::begin_with(&mut candidates, probe);
    } else if let Some(lost) = lost()
        && spec.explore
        && explorer.return_is_due(now, rng)
    {
        route::begin_with(&mut candidates, lost);
    } else if spec.explore
        && explorer.is_due(now, rng)
        && let Some((standby, _)) = candidates.iter().enumerate().skip(1).min_by_key(|(_, c)| called(c))
    {
        route::begin_with(&mut candidates, standby);
    }
    candidates.iter().flat_map(|c| lanes[c.lane].routes()).collect()
}

/// One draw, always the same: nobody's slow start holds him back, or everybody's does.
struct Same(u32);

impl RngCore for Same {
    fn next_u32(&mut self) -> u32 {
        self.0
    }

    fn next_u64(&mut self) -> u64 {
        u64::from(self.0)
    }

    fn fill_bytes(&mut self, bytes: &mut [u8]) {
        bytes.fill(0);
    }
}

/// A board to which things happen.
struct Play {
    board: Board,
    now: Instant,
    rng: Pcg64Mcg,
}

impl Play {
    fn new(seed: u64, places: usize, sort: Sort) -> Self {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let mut endpoints: Vec<EndpointSpec> = vec![];
        for _ in 0..places {
            let (place, weight) =
                (EndpointId(endpoints.len()), [100, 100, 100, 80, 50][route::below(5, &mut rng)]);
            // Some have a provider of their own, others share its credentials.
            let provider = if rng.next_u32().is_multiple_of(3) { 1_000 } else { place.0 };
            for index in 0..[1, 1, 2, 3][route::below(4, &mut rng)] {
                endpoints.push(EndpointSpec {
                    name: format!("e{}", endpoints.len()),
                    provider: format!("p{provider}"),
                    credential: CredentialId { provider, index },
                    place,
                    weight,
                    first_byte: Limit::Auto,
                    first_event: Limit::Auto,
                    price: None,
                    parameters: None,
                });
            }
        }
        let all: Vec<EndpointId> = (0..endpoints.len()).map(EndpointId).collect();
        // The second has some of the first one's places, and has them elsewhere.
        let some: Vec<EndpointId> =
            all.iter().rev().copied().filter(|id| !endpoints[id.0].place.0.is_multiple_of(3)).collect();
        let model = |routes| ModelSpec {
            name: "m".into(),
            operation: Operation::Chat,
            routes,
            reasoning: false,
            explore: true,
            sort,
        };
        let layout = Layout { endpoints, models: vec![model(all), model(some)] };
        let now = Instant::now();
        Self { board: Board::new(now, layout), now, rng }
    }

    fn happens(&mut self) {
        let wait = [0, 0, 10, 900, 5_000, 40_000, 400_000][route::below(7, &mut self.rng)];
        self.now += Duration::from_millis(wait + u64::from(self.rng.next_u32() % 50));
        let (now, any) = (self.now, EndpointId(route::below(self.board.endpoints.len(), &mut self.rng)));
        let place = self.board.place(any);
        let credential = self.board.credential(any).unwrap();
        match self.rng.next_u32() % 24 {
            0 => self.board.check_passed(now, place),
            1 => self.board.renewed(credential),
            2 => self.board.joined(),
            3 => self.board.alone(),
            4 => self.board.claimed(place, Some(now + Duration::from_secs(2))),
            5 => {
                let word = RestWord { cause: Cause::RateLimit, remaining: Duration::from_secs(3), times: 1 };
                self.board.hear_rest(
                    now,
                    credential,
                    (self.rng.next_u32().is_multiple_of(2)).then_some(word),
                );
            }
            6 => self.hears(place),
            7 => {
                // Five in a row.
                (0..5).for_each(|_| self.attempt(any, Some(Failure::Status(500)), None));
            }
            8 | 9 => self.attempt(any, Some(Failure::Status(429)), None),
            10 => self.attempt(any, Some(Failure::Credential(401)), None),
            11 => self.attempt(any, Some(Failure::Status(503)), Some(Duration::from_secs(4))),
            12 => self.attempt(any, Some(Failure::Timeout(Timer::FirstEvent)), None),
            13 => self.attempt(any, Some(Failure::Connect), None),
            14..18 => self.attempt(any, Some(Failure::Status(500)), None),
            _ => (0..1 + self.rng.next_u32() % 14).for_each(|_| self.attempt(any, None, None)),
        }
    }

    fn hears(&mut self, place: EndpointId) {
        let phase = match self.rng.next_u32() % 4 {
            0 => Phase::Open(Duration::from_secs(8)),
            1 => Phase::Open(Duration::ZERO),
            2 => Phase::HalfOpen(2),
            _ => Phase::Closed,
        };
        let bad = f64::from(self.rng.next_u32() % 3);
        let health = HealthWord { good: 20.0, bad, fast: 1.0, reopened: None };
        let generation = Generation(u64::from(self.rng.next_u32() % 1_000));
        let word = PlaceWord { generation, phase, by_rate: false, openings: 1, rest: Duration::ZERO, health };
        self.board.hear_place(self.now, place, &word, Heard::Answer);
    }

    fn attempt(&mut self, endpoint: EndpointId, failure: Option<Failure>, wait: Option<Duration>) {
        let Found::Plan(mut plan) = self.find(ModelId(0)) else { return };
        let route = Route { model: ModelId(0), endpoint };
        let begun = self.board.begin(self.now, &mut plan.pass, route, false, &mut self.rng);
        self.board.finish(plan.pass);
        let Begun::Go { mut ticket, .. } = begun else { return };
        if self.rng.next_u32().is_multiple_of(16) {
            // It is under way for good: a lease or a trial is left behind.
            return;
        }
        let timing = Timing::default();
        let outcome = match failure {
            None => {
                self.board.answered(self.now, &mut ticket, timing, &mut self.rng);
                Outcome::Served { tokens_per_second: None }
            }
            Some(failure) => {
                Outcome::Failed { failure, wait, timing, reused: self.rng.next_u32().is_multiple_of(2) }
            }
        };
        self.board.end(self.now, ticket, outcome, &mut self.rng);
    }

    fn find(&mut self, model: ModelId) -> Found {
        let preferences = Preferences::default();
        let ask = Ask { models: &[model], form: Form::Stream, prompt_tokens: 1, preferences: &preferences };
        self.board.candidates(self.now, &ask, &mut self.rng)
    }

    /// What is kept of a place says of it what a look at it does.
    fn check_ranks(&self, model: ModelId) {
        let stands = survey(&self.board, self.now, model);
        let kept = self.board.ranks.kept(model).unwrap();
        let standing = kept.members.iter().filter(|member| member.rank != Rank::Out).count();
        assert_eq!(standing, kept.standing);
        for (slot, member) in kept.members.iter().enumerate() {
            let own: Vec<Stand> = stands
                .iter()
                .filter(|stand| member.routes.contains(&stand.route.endpoint))
                .cloned()
                .collect();
            let lanes = lanes(&self.board, &own);
            let sum: f64 = lanes.iter().map(Lane::weight).sum();
            match member.rank {
                Rank::Out => assert!(lanes.is_empty(), "{own:?} is out"),
                Rank::Plain => {
                    let is_plain = |stand: &Stand| {
                        (stand.factor, stand.share, stand.breaker, stand.rest)
                            == (1.0, 1.0, Admission::Closed, Standing::Free)
                    };
                    assert!(own.iter().all(is_plain), "{own:?} is plain");
                }
                Rank::Watched { at_most, probes, lost } => {
                    assert!(sum <= at_most, "{own:?} weighs {at_most} at most");
                    let is_probe = |lane: &Lane<'_>| lane.first.breaker == Admission::Probe;
                    assert!(probes == kept.probes.contains(&slot) && (probes || !lanes.iter().any(is_probe)));
                    let is_lost = |lane: &Lane<'_>| lane.first.has_lost_weight;
                    assert!(lost == kept.lost.contains(&slot) && (lost || !lanes.iter().any(is_lost)));
                }
            }
        }
    }

    /// The first ones weigh what the first ones of all do.
    fn check_first(&mut self, model: ModelId, draw: u32) {
        let sort = self.board.layout.models[model.0].sort;
        let stands = survey(&self.board, self.now, model);
        let all = lanes(&self.board, &stands);
        let places = |lanes: &[Lane<'_>]| {
            let mut places: Vec<_> = lanes.iter().map(|l| self.board.place(l.first.route.endpoint)).collect();
            places.sort_unstable();
            places.dedup();
            places.len()
        };
        let count = places(&all);
        let weigh =
            |lane: &Lane<'_>| route::weight_in_share(lane.weight(), lane.first.share, &mut Same(draw));
        let mut weights: Vec<f64> = all.iter().map(weigh).collect();
        let of_place: HashMap<(EndpointId, EndpointId), f64> = all
            .iter()
            .zip(&weights)
            .map(|(l, w)| ((self.board.place(l.first.route.endpoint), l.first.route.endpoint), *w))
            .collect();
        weights.sort_by(|a, b| b.total_cmp(a));
        let Some(lineup) = self.board.line_up_first(self.now, model, &mut Same(draw)) else {
            let kept = self.board.ranks.kept(model).unwrap();
            assert!(count <= PLACES || sort == Sort::WeightedRandom, "{count} of {}", kept.standing);
            return;
        };
        let found: Vec<(EndpointId, EndpointId, f64)> =
            lineup.in_order().map(|lane| (lane.place, lane.routes().next().unwrap(), lane.weight)).collect();
        for (place, endpoint, weight) in &found {
            assert_eq!(of_place.get(&(*place, *endpoint)), Some(weight));
        }
        if sort == Sort::Weight {
            let found: Vec<f64> = found.iter().map(|(_, _, weight)| *weight).collect();
            assert_eq!(found, weights[..found.len()], "the heaviest first");
        }
    }
}

#[test]
fn what_is_kept_of_places_is_what_a_look_at_all_of_them_finds() {
    for seed in 0..30 {
        let sort = if seed % 3 == 0 { Sort::WeightedRandom } else { Sort::Weight };
        let mut play = Play::new(seed, 10 + usize::try_from(seed).unwrap() % 30, sort);
        for _ in 0..100 {
            play.happens();
            play.board.settle(play.now);
            for model in [ModelId(0), ModelId(1)] {
                if play.board.ranks.kept(model).is_none() {
                    continue;
                }
                play.check_ranks(model);
                play.check_first(model, 0);
                play.check_first(model, u32::MAX);
            }
        }
    }
}

/// How often each route stood at each of the first places.
type Counts = HashMap<(usize, EndpointId), f64>;

fn count(counts: &mut Counts, order: &[Route]) {
    for (at, route) in order.iter().take(3).enumerate() {
        *counts.entry((at, route.endpoint)).or_default() += 1.0;
    }
}

#[test]
fn a_kept_order_falls_as_often_on_each_route_as_one_that_is_made_of_all() {
    const DRAWS: u32 = 4_000;
    for seed in 0..24 {
        let sort = if seed % 2 == 0 { Sort::WeightedRandom } else { Sort::Weight };
        let mut play = Play::new(1_000 + seed, 12, sort);
        (0..40).for_each(|_| play.happens());
        let model = ModelId(0);
        let (mut new, mut old) = (Counts::new(), Counts::new());
        for _ in 0..DRAWS {
            play.board.models[0].explorer = Explorer::default();
            let mut explorer = Explorer::default();
            let Found::Plan(plan) = play.find(model) else { break };
            play.board.finish(plan.pass);
            count(&mut new, &plan.order);
            let order = order(&play.board, play.now, model, &mut explorer, &mut play.rng);
            let order = if order.is_empty() { plan.order } else { order };
            count(&mut old, &order);
        }
        for key in new.keys().chain(old.keys()) {
            let of = |counts: &Counts| counts.get(key).copied().unwrap_or_default();
            let (new, old) = (of(&new), of(&old));
            // Five deviations, of the difference of two counts.
            let bound = 5.0 * (new + old).sqrt() + 3.0;
            assert!((new - old).abs() <= bound, "seed {seed}, {key:?}: {new} of {DRAWS}, not {old}");
        }
    }
}
