//! What a board chooses, learns and refuses, call by call.

use std::time::Duration;

use proptest::prelude::*;
use rand_core::SeedableRng;
use rand_pcg::Pcg64Mcg;

use super::attempt::PROBE_POLL;
use super::standbys::WARM_FOR;
use super::*;
use crate::dialect::Operation;
use crate::preferences::Preferences;
use crate::route::Sort;
use crate::status::now::RouteSignal;
use crate::upstream::failure::{Failure, Timer};
use crate::upstream::fleet::{
    Ask as FleetAsk, HealthWord, Heard, Phase, PlaceNews, PlaceWord, RestNews, RestWord, Tally,
};
use crate::upstream::rest::{Cause, Standing};
use crate::upstream::watchdog::{Form, Limit, Timing};

const M: ModelId = ModelId(0);

struct Played {
    board: Board,
    now: Instant,
    rng: Pcg64Mcg,
}

fn spec(n: usize, weight: u32) -> EndpointSpec {
    EndpointSpec {
        name: format!("e{n}"),
        provider: format!("p{n}"),
        credential: CredentialId { provider: n, index: 0 },
        place: EndpointId(n),
        weight,
        first_byte: Limit::Auto,
        first_event: Limit::Auto,
        price: None,
        parameters: None,
    }
}

fn layout(weights: &[u32]) -> Layout {
    Layout {
        endpoints: weights.iter().enumerate().map(|(n, w)| spec(n, *w)).collect(),
        models: vec![ModelSpec {
            name: "m".into(),
            operation: Operation::Chat,
            routes: (0..weights.len()).map(EndpointId).collect(),
            reasoning: false,
            explore: true,
            sort: Sort::Weight,
        }],
    }
}

fn route(n: usize) -> Route {
    Route { model: M, endpoint: EndpointId(n) }
}

fn failed(failure: Failure) -> Outcome {
    Outcome::Failed { failure, wait: None, timing: Timing::default(), reused: false }
}

impl Played {
    fn new(weights: &[u32]) -> Self {
        let now = Instant::now();
        Self { board: Board::new(now, layout(weights)), now, rng: Pcg64Mcg::seed_from_u64(1) }
    }

    fn wait(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
    }

    fn find(&mut self, preferences: &Preferences) -> Found {
        let ask = Ask { models: &[M], form: Form::Stream, prompt_tokens: 10, preferences };
        self.board.candidates(self.now, &ask, &mut self.rng)
    }

    fn plan(&mut self) -> Plan {
        match self.find(&Preferences::default()) {
            Found::Plan(plan) => plan,
            Found::AllRefused { .. } | Found::NoneFits(_) => panic!("somebody can be asked"),
        }
    }

    fn order(&mut self) -> Vec<usize> {
        let plan = self.plan();
        let order = plan.order.iter().map(|route| route.endpoint.0).collect();
        self.board.finish(plan.pass);
        order
    }

    fn begin(&mut self, pass: &mut Pass, n: usize, last: bool) -> Begun {
        self.board.begin(self.now, pass, route(n), last, &mut self.rng)
    }

    /// One attempt at an endpoint, begun with a fresh pass.
    fn attempt(&mut self, n: usize, outcome: Outcome) -> Ended {
        let mut pass = self.plan().pass;
        let Begun::Go { mut ticket, .. } = self.begin(&mut pass, n, false) else { panic!("refused") };
        if matches!(outcome, Outcome::Served { .. }) {
            let took = Some(Duration::from_millis(100));
            let timing = Timing { head: took, event: took };
            self.board.answered(self.now, &mut ticket, timing, &mut self.rng);
        }
        self.board.finish(pass);
        self.board.end(self.now, ticket, outcome, &mut self.rng)
    }

    fn open(&mut self, n: usize) {
        for _ in 0..5 {
            self.attempt(n, failed(Failure::Status(500)));
        }
    }
}

const SERVED: Outcome = Outcome::Served { tokens_per_second: None };

#[test]
fn a_failing_endpoint_falls_behind_its_neighbour_within_three_calls() {
    let mut played = Played::new(&[100, 80]);
    assert_eq!(played.order(), [0, 1]);
    for _ in 0..3 {
        played.attempt(0, failed(Failure::Status(503)));
    }
    let first = (0..100).filter(|_| played.order()[0] == 1).count();
    assert!(first > 80, "{first}");
}

#[test]
fn an_open_breaker_drops_a_route_out_of_the_order_and_into_the_fall_backs() {
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    let plan = played.plan();
    assert_eq!((plan.order, plan.fall_backs), (vec![route(1)], vec![route(0)]));
}

#[test]
fn a_plan_names_five_of_many_places_and_the_others_when_one_of_them_refuses() {
    let mut played = Played::new(&[100; 20]);
    let mut plan = played.plan();
    assert_eq!((plan.order.len(), plan.fall_backs.len()), (5, 0));
    let first = plan.order[0].endpoint.0;
    played.open(first);
    assert!(matches!(played.begin(&mut plan.pass, first, false), Begun::Refused(_)));
    let known: Vec<EndpointId> = plan.order.iter().map(|route| route.endpoint).collect();
    let preferences = Preferences::default();
    let ask = Ask { models: &[M], form: Form::Stream, prompt_tokens: 10, preferences: &preferences };
    let further = played.board.further(played.now, &ask, &mut plan.pass, &known, &mut played.rng);
    let mut all: Vec<Route> = plan.order.iter().chain(&further.order).copied().collect();
    all.sort_by_key(|route| route.endpoint);
    assert_eq!(all, (0..20).map(route).collect::<Vec<_>>(), "each once");
    assert!(further.fall_backs.is_empty(), "it is known");
    for other in all.iter().filter(|route| route.endpoint.0 != first) {
        assert!(plan.pass.viable > 0, "others are left");
        let begun = played.begin(&mut plan.pass, other.endpoint.0, false);
        let Begun::Go { ticket, .. } = begun else { panic!("goes: {begun:?}") };
        played.board.end(played.now, ticket, Outcome::CallerLeft, &mut played.rng);
    }
    assert!(matches!(played.begin(&mut plan.pass, first, true), Begun::Go { .. }), "nobody is left");
    let again = played.board.further(played.now, &ask, &mut plan.pass, &known, &mut played.rng);
    assert!(again.order.is_empty(), "said once");
}

#[test]
fn a_fall_back_lets_one_through_at_a_time() {
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    let (mut one, mut two) = (played.plan().pass, played.plan().pass);
    assert!(matches!(played.begin(&mut one, 0, false), Begun::Refused(_)), "not before the others");
    for pass in [&mut one, &mut two] {
        let Begun::Go { ticket, .. } = played.begin(pass, 1, true) else { panic!("goes") };
        played.board.end(played.now, ticket, failed(Failure::Connect), &mut played.rng);
    }
    assert!(matches!(played.begin(&mut one, 0, false), Begun::Go { .. }));
    let Begun::Refused(Some(until)) = played.begin(&mut two, 0, false) else { panic!("one at a time") };
    assert_eq!(until, played.now + PROBE_POLL);
}

#[test]
fn a_429_rests_every_endpoint_of_its_credential_and_blames_none() {
    let now = Instant::now();
    let mut layout = layout(&[100, 80, 60]);
    layout.endpoints[1].credential = layout.endpoints[0].credential;
    let mut played = Played { board: Board::new(now, layout), now, rng: Pcg64Mcg::seed_from_u64(1) };
    let wait = Some(Duration::from_secs(30));
    let failure = Failure::Status(429);
    let outcome = Outcome::Failed { failure, wait, timing: Timing::default(), reused: false };
    let ended = played.attempt(0, outcome);
    assert_eq!(ended.not_before, Some(now + Duration::from_secs(30)));
    assert_eq!(played.order(), [2]);
    assert!(played.plan().fall_backs.is_empty(), "a rest is no fall-back");
    played.wait(30_000);
    played.order(); // after thirty seconds one call explores
    assert_eq!(played.order(), [0, 1, 2], "and it left no mark");
}

#[test]
fn all_rate_limited_says_so_with_the_soonest_end() {
    let mut played = Played::new(&[100, 80]);
    for (n, seconds) in [(0, 60), (1, 20)] {
        let wait = Some(Duration::from_secs(seconds));
        let failure = Failure::Status(429);
        played.attempt(n, Outcome::Failed { failure, wait, timing: Timing::default(), reused: false });
    }
    let Found::AllRefused { soonest, rate_limited, .. } = played.find(&Preferences::default()) else {
        panic!("all rest")
    };
    assert_eq!((soonest, rate_limited), (played.now + Duration::from_secs(20), true));
}

#[test]
fn a_refused_credential_rests_with_an_alarm_and_tells_once_it_is_renewed() {
    let mut played = Played::new(&[100, 80]);
    let credential = CredentialId { provider: 0, index: 0 };
    let ended = played.attempt(0, failed(Failure::Credential(401)));
    assert_eq!(ended.notice, Some(Notice::CredentialAlarm(credential)));
    assert_eq!(played.order(), [1]);
    played.board.renewed(credential);
    assert_eq!((played.order(), played.board.alarms().count()), (vec![0, 1], 0));
}

#[test]
fn a_status_page_sees_an_endpoint_before_its_breaker_opens() {
    let signal = |played: &Played, n| played.board.signal(played.now, EndpointId(n)).unwrap();
    let mut played = Played::new(&[100, 80, 60]);
    assert_eq!(signal(&played, 0), RouteSignal::default(), "nobody has asked it");
    played.attempt(0, SERVED);
    let well = RouteSignal { known: true, ..RouteSignal::default() };
    assert_eq!(signal(&played, 0), well);
    played.attempt(0, failed(Failure::Status(500)));
    assert_eq!(signal(&played, 0), RouteSignal { shaky: true, ..well }, "after one failure");
    played.open(1);
    assert!(signal(&played, 1).out);
    let wait = Some(Duration::from_secs(30));
    let failure = Failure::Status(429);
    played.attempt(2, Outcome::Failed { failure, wait, timing: Timing::default(), reused: false });
    assert_eq!(signal(&played, 2), RouteSignal { rests: true, ..well });
    played.attempt(0, failed(Failure::Credential(401)));
    assert!(signal(&played, 0).out, "somebody must mend it");
    played.wait(2 * 3_600_000);
    assert!(!signal(&played, 2).known, "that was long ago");
}

#[test]
fn when_every_breaker_is_open_one_request_tries_and_the_rest_are_told_when() {
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    played.open(1);
    let mut plan = played.plan();
    assert_eq!(plan.order.len(), 2, "the last resort");
    let found = played.find(&Preferences::default());
    assert!(matches!(found, Found::AllRefused { rate_limited: false, .. }), "{found:?}");
    let endpoint = plan.order[0].endpoint.0;
    let Begun::Go { mut ticket, .. } = played.begin(&mut plan.pass, endpoint, false) else { panic!("goes") };
    assert!(ticket.is_probe());
    played.board.answered(played.now, &mut ticket, Timing::default(), &mut played.rng);
    played.board.finish(plan.pass);
    let found = played.find(&Preferences::default());
    assert!(matches!(found, Found::AllRefused { .. }), "a crowd does not follow at once");
    played.wait(250);
    let (_one, _two) = (played.plan(), played.plan());
    assert!(matches!(played.find(&Preferences::default()), Found::AllRefused { .. }), "two, not three");
}

#[test]
fn a_closed_breaker_starts_slowly() {
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    played.wait(13_000);
    assert_eq!(played.order()[0], 0, "half-open: the next call is the probe");
    let notices: Vec<_> = (0..3).map(|_| played.attempt(0, SERVED).notice).collect();
    assert_eq!(notices, [None, None, None], "told when it answered");
    let first = (0..1_000).filter(|_| played.order()[0] == 0).count();
    assert!((50..200).contains(&first), "{first}");
    played.wait(30_000);
    let first = (0..1_000).filter(|_| played.order()[0] == 0).count();
    assert!(first > 970, "all but the exploring ones: {first}");
}

#[test]
fn a_nodes_own_fault_blames_nobody_not_even_in_hindsight() {
    let mut played = Played::new(&[100, 80]);
    let mut last = Ended::default();
    for n in [0, 0, 0, 0, 1] {
        last = played.attempt(n, failed(Failure::Connect));
    }
    assert_eq!(last.notice, Some(Notice::NodeCutOff));
    for n in 0..20 {
        played.attempt(n % 2, failed(Failure::Connect));
    }
    assert!(played.board.cut_off_since().is_some());
    assert_eq!(played.order(), [0, 1], "as if nothing had been");
    played.attempt(1, SERVED);
    assert!(played.board.cut_off_since().is_none());
}

#[test]
fn the_last_candidate_has_no_watchdog_and_the_others_have() {
    let mut played = Played::new(&[100, 80]);
    let mut pass = played.plan().pass;
    let Begun::Go { first_event, .. } = played.begin(&mut pass, 0, false) else { panic!("goes") };
    assert_eq!(first_event, Some(Duration::from_secs(5)), "cold");
    let Begun::Go { first_byte, first_event, .. } = played.begin(&mut pass, 1, true) else { panic!("goes") };
    assert_eq!((first_byte, first_event), (None, None));
}

#[test]
fn extra_attempts_end_with_the_budget() {
    let mut played = Played::new(&[100, 80]);
    let mut pass = played.plan().pass;
    let mut granted = 0;
    while let Begun::Go { ticket, .. } = played.begin(&mut pass, 0, false) {
        played.board.end(played.now, ticket, Outcome::CallerLeft, &mut played.rng);
        granted += 1;
    }
    assert_eq!(granted, 101, "the first and a hundred more");
    assert!(matches!(played.begin(&mut pass, 0, false), Begun::BudgetSpent));
}

#[test]
fn preferences_that_leave_nobody_say_which() {
    let mut played = Played::new(&[100, 80]);
    let only = Preferences { only: Some(vec!["nobody".into()]), ..Preferences::default() };
    let Found::NoneFits(dropped) = played.find(&only) else { panic!("none fits") };
    assert_eq!(dropped.len(), 2);
    let order = Preferences { order: vec!["p1".into()], no_fallbacks: true, ..Preferences::default() };
    let Found::Plan(plan) = played.find(&order) else { panic!("one fits") };
    assert_eq!(plan.order, [route(1)]);
}

#[test]
fn a_reload_keeps_what_is_known_by_name() {
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    let mut turned = layout(&[80, 100]);
    turned.endpoints[0].name = "e1".into();
    turned.endpoints[1].name = "e0".into();
    played.board = played.board.reloaded(played.now, turned);
    assert_eq!(played.order(), [0], "the open one has another place now");
}

#[test]
fn the_speeds_of_two_operations_of_one_model_do_not_mix_nor_after_a_reload() {
    let both = |operations: [Operation; 2]| {
        let one = layout(&[100]);
        let spec = |operation| ModelSpec { operation, ..one.models[0].clone() };
        Layout { models: operations.map(spec).to_vec(), ..one.clone() }
    };
    let mut played = Played::new(&[100]);
    played.board = Board::new(played.now, both([Operation::Chat, Operation::Embeddings]));
    for _ in 0..100 {
        played.attempt(0, SERVED);
        played.wait(20);
    }
    let event = |played: &mut Played, model| {
        let route = Route { model: ModelId(model), endpoint: EndpointId(0) };
        played.board.limits(played.now, route, Form::Stream, 10).map(|limits| limits.event)
    };
    let (learnt, cold) = (event(&mut played, 0), event(&mut played, 1));
    assert!(learnt < cold, "{learnt:?} {cold:?}");
    let turned = both([Operation::Embeddings, Operation::Chat]);
    played.board = played.board.reloaded(played.now, turned);
    assert_eq!((event(&mut played, 0), event(&mut played, 1)), (cold, learnt));
}

proptest! {
    #[test]
    fn the_rate_of_failures_never_refuses_the_last_route(
        outcomes in prop::collection::vec(0_u8..5, 1..300), seed: u64,
    ) {
        let mut played = Played::new(&[100]);
        played.rng = Pcg64Mcg::seed_from_u64(seed);
        let mut row = 0;
        for outcome in outcomes {
            played.wait(50);
            row = if outcome < 2 { 0 } else { row + 1 };
            let outcome = if outcome < 2 { SERVED } else { failed(Failure::Status(500)) };
            let ended = played.attempt(0, outcome);
            if row < 5 {
                prop_assert_eq!(ended.notice, None);
            } else {
                break;
            }
        }
    }

    #[test]
    fn whatever_happens_the_board_answers_and_never_names_a_route_twice(
        steps in prop::collection::vec((0_u64..20_000, 0_u8..9, any::<bool>()), 1..80), seed: u64,
    ) {
        let mut played = Played::new(&[100, 80, 60]);
        played.rng = Pcg64Mcg::seed_from_u64(seed);
        for (wait, what, reused) in steps {
            played.wait(wait);
            let Found::Plan(mut plan) = played.find(&Preferences::default()) else { continue };
            let mut all: Vec<_> = plan.order.iter().chain(&plan.fall_backs).copied().collect();
            all.sort_by_key(|route| route.endpoint);
            let before = all.len();
            all.dedup();
            prop_assert!(before == all.len() && !plan.order.is_empty());
            let next = plan.order[0];
            let Begun::Go { ticket, first_byte, first_event } =
                played.board.begin(played.now, &mut plan.pass, next, false, &mut played.rng)
            else { continue };
            prop_assert!(first_byte.is_some() && first_event >= Some(Duration::from_secs(1)));
            let failure = match what {
                0 => Failure::Connect,
                1 => Failure::Timeout(Timer::FirstByte),
                2 => Failure::Timeout(Timer::FirstEvent),
                3 => Failure::Status(429),
                4 => Failure::Credential(401),
                5 => Failure::CallerFault(400),
                _ => Failure::Status(500),
            };
            let outcome = match what {
                7 => SERVED,
                8 => Outcome::CallerLeft,
                _ => Outcome::Failed { failure, wait: None, timing: Timing::default(), reused },
            };
            let ended = played.board.end(played.now, ticket, outcome, &mut played.rng);
            prop_assert!(ended.not_before.is_none_or(|at| at > played.now));
            played.board.finish(plan.pass);
        }
    }
}

/// `A` with two credentials (endpoints 0 and 1) at weight 100, `B` (2) at `other`.
fn two_credentials(other: u32, sort: Sort) -> Played {
    let mut layout = layout(&[100, 100, other]);
    layout.endpoints[1].place = EndpointId(0);
    layout.endpoints[1].credential = CredentialId { provider: 0, index: 1 };
    layout.models[0].sort = sort;
    layout.models[0].explore = false;
    let now = Instant::now();
    Played { board: Board::new(now, layout), now, rng: Pcg64Mcg::seed_from_u64(1) }
}

fn ids(plan: &Plan) -> Vec<usize> {
    plan.order.iter().map(|route| route.endpoint.0).collect()
}

#[test]
fn credentials_take_turns_within_the_place_of_their_route() {
    let mut played = two_credentials(99, Sort::Weight);
    for order in [[0, 1, 2], [1, 0, 2], [0, 1, 2]] {
        assert_eq!(ids(&played.plan()), order);
        played.attempt(order[0], Outcome::Served { tokens_per_second: None });
    }
    let mut played = two_credentials(101, Sort::Weight);
    assert_eq!(ids(&played.plan()), [2, 0, 1], "two of 100 are no 200");
}

#[test]
fn two_credentials_have_one_share_of_spread_calls() {
    let mut played = two_credentials(100, Sort::WeightedRandom);
    let first_is_b = (0..2000).filter(|_| ids(&played.plan())[0] == 2).count();
    assert!((850..1150).contains(&first_is_b), "{first_is_b} of 2000 at equal weights");
}

#[test]
fn a_429_and_a_401_rest_one_credential_and_an_error_of_the_server_weighs_on_its_place() {
    for failure in [Failure::Status(429), Failure::Credential(401)] {
        let mut played = two_credentials(99, Sort::Weight);
        played.attempt(0, failed(failure));
        assert_eq!([ids(&played.plan()), ids(&played.plan())], [[1, 2], [1, 2]]);
    }
    let mut played = two_credentials(99, Sort::Weight);
    played.attempt(0, failed(Failure::Status(500)));
    assert_eq!(ids(&played.plan())[0], 2, "both credentials are at the server that failed");
    for _ in 0..4 {
        played.attempt(1, failed(Failure::Connect));
    }
    let plan = played.plan();
    assert_eq!((ids(&plan), plan.fall_backs.len()), (vec![2], 1), "one breaker, one fall-back");
}

#[test]
fn a_renewed_credential_does_not_rest() {
    let mut played = two_credentials(99, Sort::Weight);
    played.attempt(0, failed(Failure::Credential(401)));
    assert_eq!(ids(&played.plan()).len(), 2);
    played.board.renewed(CredentialId { provider: 0, index: 0 });
    assert_eq!((ids(&played.plan()).len(), played.board.alarms().count()), (3, 0));
}

#[test]
fn the_next_two_places_of_a_model_with_traffic_are_standbys() {
    let mut played = Played::new(&[100, 90, 80, 70]);
    assert_eq!(played.board.standbys(played.now), [], "nobody has asked for it");
    played.order();
    assert_eq!(played.board.standbys(played.now), [EndpointId(1), EndpointId(2)]);
    played.attempt(0, failed(Failure::Status(429)));
    assert_eq!(played.board.standbys(played.now), [EndpointId(2), EndpointId(3)], "the first rests");
    assert_eq!(played.board.standbys(played.now + WARM_FOR), [], "nobody asks for it any more");
    let mut played = two_credentials(99, Sort::Weight);
    played.order();
    assert_eq!(played.board.standbys(played.now), [EndpointId(2)], "one place has one connection");
}

#[test]
fn a_fall_back_with_another_credential_is_back_when_its_place_is() {
    let mut played = two_credentials(99, Sort::Weight);
    played.attempt(0, failed(Failure::Status(429)));
    for _ in 0..5 {
        played.attempt(1, failed(Failure::Status(500)));
    }
    let plan = played.plan();
    assert_eq!((ids(&plan), plan.fall_backs.clone()), (vec![2], vec![route(1)]));
    assert!(!played.board.is_back(played.now, &[EndpointId(1)]), "the breaker of its place is open");
}

#[test]
fn without_fall_backs_the_credentials_of_the_first_place_are_still_one_route() {
    let mut played = two_credentials(99, Sort::Weight);
    let single = Preferences { no_fallbacks: true, ..Preferences::default() };
    let Found::Plan(plan) = played.find(&single) else { panic!("somebody can be asked") };
    assert_eq!(ids(&plan), [0, 1]);
    for n in [0, 0, 0, 0, 0, 2, 2, 2, 2, 2] {
        played.attempt(n, failed(Failure::Status(500)));
    }
    let Found::Plan(plan) = played.find(&single) else { panic!("one may try") };
    assert_eq!((plan.order.len(), plan.fall_backs.len()), (1, 0), "also behind the gate");
}

#[test]
fn a_route_that_rests_by_now_keeps_no_fall_back_waiting() {
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    let mut plan = played.plan();
    played.attempt(1, failed(Failure::Status(429)));
    assert!(matches!(played.begin(&mut plan.pass, 1, false), Begun::Refused(None)));
    assert!(matches!(played.begin(&mut plan.pass, 0, true), Begun::Go { .. }), "nobody else is left");
}

/// The models `m` (endpoint 0) and `n` (endpoint 1).
fn two_models() -> Played {
    let mut layout = layout(&[100, 100]);
    let other = ModelSpec { name: "n".into(), routes: vec![EndpointId(1)], ..layout.models[0].clone() };
    layout.models[0].routes.pop();
    layout.models.push(other);
    let now = Instant::now();
    Played { board: Board::new(now, layout), now, rng: Pcg64Mcg::seed_from_u64(1) }
}

fn find_of(played: &mut Played, models: &[usize]) -> Found {
    let (models, preferences) =
        (models.iter().copied().map(ModelId).collect::<Vec<_>>(), Preferences::default());
    let ask = Ask { models: &models, form: Form::Stream, prompt_tokens: 10, preferences: &preferences };
    played.board.candidates(played.now, &ask, &mut played.rng)
}

fn serve(played: &mut Played, plan: &mut Plan, route: Route) {
    let begun = played.board.begin(played.now, &mut plan.pass, route, false, &mut played.rng);
    let Begun::Go { mut ticket, .. } = begun else { panic!("goes: {begun:?}") };
    played.board.answered(played.now, &mut ticket, Timing::default(), &mut played.rng);
    played.board.end(played.now, ticket, SERVED, &mut played.rng);
}

#[test]
fn what_another_model_serves_opens_no_gate_of_the_first() {
    let mut played = two_models();
    played.open(0);
    for _ in 0..4 {
        let Found::Plan(mut plan) = find_of(&mut played, &[0, 1]) else { panic!("the other is well") };
        let other = Route { model: ModelId(1), endpoint: EndpointId(1) };
        assert_eq!(plan.order, [other]);
        serve(&mut played, &mut plan, other);
        played.board.finish(plan.pass);
    }
    let (one, two) = (find_of(&mut played, &[0]), find_of(&mut played, &[0]));
    assert!(matches!((one, two), (Found::Plan(_), Found::AllRefused { .. })), "one at a time");
}

#[test]
fn a_caller_who_wants_the_refused_route_alone_puts_up_no_gate_for_others() {
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    let only = |name: &str| Preferences { only: Some(vec![name.into()]), ..Preferences::default() };
    let found = played.find(&only("p0"));
    assert!(matches!(found, Found::AllRefused { rate_limited: false, .. }), "{found:?}");
    for _ in 0..3 {
        let Found::Plan(plan) = played.find(&Preferences::default()) else { panic!("the other is well") };
        assert_eq!(plan.order, [route(1)]);
        assert!(matches!(played.find(&only("p1")), Found::Plan(_)));
    }
}

#[test]
fn a_caller_who_allows_no_fall_back_neither_probes_nor_explores() {
    let single = Preferences { no_fallbacks: true, ..Preferences::default() };
    let mut played = Played::new(&[100, 80]);
    for _ in 0..3 {
        played.attempt(0, failed(Failure::Status(503)));
    }
    played.wait(40_000);
    let first = |played: &mut Played| {
        let Found::Plan(plan) = played.find(&single) else { panic!("somebody can be asked") };
        ids(&plan)
    };
    let weighs = played.order();
    assert_eq!(weighs.len(), 2, "its breaker is closed");
    for _ in 0..200 {
        assert_eq!(first(&mut played), [1], "not the one that failed");
    }
    let mut played = Played::new(&[100, 80]);
    played.open(0);
    played.wait(13_000);
    assert_eq!(first(&mut played), [1], "not the half-open one");
    assert_eq!(played.order()[0], 0, "that is probed by who can go on");
}

#[test]
fn two_models_that_both_refuse_are_tried_each_behind_its_own_gate() {
    let mut played = two_models();
    played.open(0);
    let other = Route { model: ModelId(1), endpoint: EndpointId(1) };
    for _ in 0..5 {
        let Found::Plan(mut plan) = find_of(&mut played, &[1]) else { panic!("it is asked") };
        let begun = played.board.begin(played.now, &mut plan.pass, other, false, &mut played.rng);
        let Begun::Go { ticket, .. } = begun else { panic!("goes") };
        played.board.end(played.now, ticket, failed(Failure::Status(500)), &mut played.rng);
        played.board.finish(plan.pass);
    }
    let Found::Plan(mut both) = find_of(&mut played, &[0, 1]) else { panic!("one may try") };
    assert_eq!(both.order.len(), 2);
    let full = |found: Found| matches!(found, Found::AllRefused { .. });
    assert!(full(find_of(&mut played, &[0])) && full(find_of(&mut played, &[1])), "both places are taken");
    serve(&mut played, &mut both, other);
    played.board.finish(both.pass);
    let (_one, _two) = (find_of(&mut played, &[1]), find_of(&mut played, &[1]));
    assert!(full(find_of(&mut played, &[1])), "the other's success: two at a time");
    let one = find_of(&mut played, &[0]);
    assert!(!full(one) && full(find_of(&mut played, &[0])), "the first one's gate: one");
}

const SECOND: Duration = Duration::from_secs(1);

fn word(generation: u64, phase: Phase) -> PlaceWord {
    PlaceWord {
        generation: Generation(generation),
        phase,
        by_rate: false,
        openings: 1,
        rest: Duration::ZERO,
        health: HealthWord { good: 0.0, bad: 0.0, fast: 1.0, reopened: None },
    }
}

/// Two routes on a node that hears the fleet.
fn in_a_fleet() -> Played {
    let mut played = Played::new(&[100, 80]);
    played.board.joined();
    played
}

impl Played {
    fn hear(&mut self, n: usize, word: &PlaceWord) -> Option<Notice> {
        self.board.hear_place(self.now, EndpointId(n), word, Heard::Answer)
    }

    fn told(&mut self, n: usize) -> Option<PlaceNews> {
        let news = self.board.news(self.now);
        news.places.into_iter().find(|news| news.place == EndpointId(n))
    }
}

#[test]
fn what_a_node_sees_is_told_once_with_the_generation_that_it_began_under() {
    let mut played = in_a_fleet();
    played.hear(0, &word(7, Phase::Closed));
    assert_eq!(played.told(0), None);
    played.attempt(0, SERVED);
    assert!(!played.board.has_urgent_news(), "a success can wait");
    played.attempt(0, failed(Failure::Status(500)));
    assert!(played.board.has_urgent_news());
    let told = played.told(0).unwrap();
    assert_eq!(told.tally, Tally { good: 1, bad: 1, units: 2, tail: 2, streak: 0 });
    assert_eq!((told.generation, told.needed), (Generation(7), false));
    assert_eq!((played.told(0), played.board.has_urgent_news()), (None, false));
}

#[test]
fn an_endpoint_that_the_fleet_opened_refuses_here_and_is_probed_with_the_claim_alone() {
    let mut played = in_a_fleet();
    played.order();
    let notice = played.hear(0, &word(1, Phase::Open(10 * SECOND)));
    assert_eq!(notice, Some(Notice::Opened(played.now + 10 * SECOND)));
    assert_eq!(played.order(), [1]);
    played.wait(10_000);
    assert_eq!(played.order(), [1], "its time is over, but the probe may be another node's");
    assert_eq!(played.told(0).and_then(|news| news.ask), Some(FleetAsk::Want));
    played.board.claimed(EndpointId(0), Some(played.now + 2 * SECOND));
    let mut plan = played.plan();
    assert_eq!(ids(&plan), [0, 1]);
    let Begun::Go { mut ticket, .. } = played.begin(&mut plan.pass, 0, false) else { panic!("goes") };
    assert!(ticket.is_probe() && played.board.has_urgent_news());
    let ask = played.told(0).and_then(|news| news.ask);
    assert!(matches!(ask, Some(FleetAsk::Hold(watchdog)) if watchdog > SECOND), "{ask:?}");
    assert_eq!(played.order(), [1], "one at a time, on this node too");
    played.board.answered(played.now, &mut ticket, Timing::default(), &mut played.rng);
    let told = played.told(0).unwrap();
    assert_eq!((told.tally.good, told.generation, told.ask), (1, Generation(1), Some(FleetAsk::Want)));
    assert_eq!(played.order(), [1], "the next probe has to be claimed again");
}

#[test]
fn a_node_that_cannot_hear_the_fleet_probes_by_itself() {
    let mut played = in_a_fleet();
    played.hear(0, &word(1, Phase::Open(10 * SECOND)));
    played.wait(10_000);
    assert_eq!(played.order(), [1]);
    played.board.alone();
    assert_eq!(played.order(), [0, 1]);
    played.board.joined();
    played.hear(0, &word(1, Phase::Open(Duration::ZERO)));
    assert_eq!(played.order(), [1], "it can be heard again");
}

#[test]
fn what_the_fleet_closes_starts_anew_and_slowly() {
    let mut played = in_a_fleet();
    played.open(0);
    played.hear(0, &word(1, Phase::Open(10 * SECOND)));
    played.wait(10_000);
    played.hear(0, &word(1, Phase::HalfOpen(2)));
    assert_eq!(played.hear(0, &word(2, Phase::Closed)), Some(Notice::Closed));
    assert!(played.board.is_back(played.now, &[EndpointId(0)]));
    let ask =
        Ask { models: &[M], form: Form::Stream, prompt_tokens: 1, preferences: &Preferences::default() };
    assert!(played.board.survey(played.now, M, &ask)[0].share < 0.2);
    let late = word(1, Phase::Open(10 * SECOND));
    let heard = played.board.hear_place(played.now, EndpointId(0), &late, Heard::Announcement);
    assert_eq!((heard, played.board.openings(EndpointId(0))), (None, 1), "an answer has overtaken it");
    assert!(played.board.is_back(played.now, &[EndpointId(0)]));
}

#[test]
fn what_this_node_alone_has_opened_stays_its_own_matter() {
    let mut played = in_a_fleet();
    played.hear(0, &word(1, Phase::Closed));
    played.open(0);
    played.hear(0, &word(1, Phase::Closed));
    assert_eq!(played.order(), [1]);
    played.wait(13_000);
    assert_eq!(played.order(), [0, 1], "it needs nobody's leave");
}

#[test]
fn a_fleet_that_has_lost_its_memory_closes_nothing() {
    let mut played = in_a_fleet();
    played.hear(0, &word(9, Phase::Open(10 * SECOND)));
    played.board.hear_nothing_of(EndpointId(0));
    assert_eq!(played.order(), [1]);
    played.wait(10_000);
    assert_eq!(played.order(), [0, 1]);
}

#[test]
fn a_call_of_before_an_opening_is_not_told() {
    let mut played = in_a_fleet();
    let mut pass = played.plan().pass;
    let Begun::Go { ticket, .. } = played.begin(&mut pass, 0, false) else { panic!("goes") };
    played.hear(0, &word(1, Phase::Open(10 * SECOND)));
    played.board.end(played.now, ticket, SERVED, &mut played.rng);
    assert_eq!(played.told(0), None);
}

#[test]
fn the_last_route_of_a_model_is_not_refused_for_its_rate_on_another_node() {
    let mut played = in_a_fleet();
    let by_rate = PlaceWord { by_rate: true, ..word(1, Phase::Open(10 * SECOND)) };
    assert!(played.hear(0, &by_rate).is_some());
    assert_eq!(played.hear(1, &by_rate), None);
    assert_eq!(played.order(), [1]);
    played.attempt(1, failed(Failure::Status(500)));
    assert!(played.told(1).unwrap().needed);
}

#[test]
fn the_worse_of_what_a_node_and_what_the_fleet_has_seen_weighs() {
    let mut played = in_a_fleet();
    let health = HealthWord { good: 50.0, bad: 50.0, fast: 0.4, reopened: None };
    played.hear(0, &PlaceWord { health, ..word(0, Phase::Closed) });
    assert!(played.board.endpoint(played.now, EndpointId(0)).unwrap().0 < 0.05);
    played.wait(1_000_000);
    assert!(played.board.endpoint(played.now, EndpointId(0)).unwrap().0 > 0.9, "and fades by itself");
    for _ in 0..5 {
        played.attempt(1, failed(Failure::Status(500)));
    }
    let before = played.board.endpoint(played.now, EndpointId(1)).unwrap().0;
    played.hear(1, &word(0, Phase::Closed));
    let after = played.board.endpoint(played.now, EndpointId(1)).unwrap().0;
    assert!((before - after).abs() < 1e-9, "the fleet makes nothing better than it is here");
}

#[test]
fn what_was_the_nodes_own_network_is_never_told() {
    let mut played = in_a_fleet();
    for _ in 0..4 {
        played.attempt(0, failed(Failure::Connect));
    }
    assert_eq!(played.told(0), None, "it may be ours");
    let ended = played.attempt(1, failed(Failure::Connect));
    assert_eq!(ended.notice, Some(Notice::NodeCutOff));
    played.wait(5_000);
    assert_eq!((played.told(0), played.told(1)), (None, None));
    played.attempt(1, SERVED);
    for _ in 0..5 {
        played.attempt(0, failed(Failure::Connect));
    }
    assert_eq!(played.told(0), None);
    played.attempt(1, SERVED);
    assert!(played.board.has_urgent_news(), "another one lives: it was not ours");
    assert_eq!(played.told(0).unwrap().tally.bad, 5);
}

#[test]
fn when_all_refuse_one_node_at_a_time_has_a_gate() {
    let mut played = in_a_fleet();
    for n in [0, 1] {
        played.hear(n, &word(1, Phase::Open(60 * SECOND)));
    }
    let found = played.find(&Preferences::default());
    assert!(matches!(found, Found::AllRefused { gate: Some(M), .. }), "{found:?}");
    assert_eq!(played.board.news(played.now).gates, [(M, FleetAsk::Want)]);
    played.board.gate_claimed(M, Some(played.now + 2 * SECOND));
    let mut plan = played.plan();
    let found = played.find(&Preferences::default());
    assert!(matches!(found, Found::AllRefused { gate: None, .. }), "{found:?}");
    let next = plan.order[0].endpoint.0;
    let Begun::Go { ticket, .. } = played.begin(&mut plan.pass, next, false) else { panic!("goes") };
    let gates = played.board.news(played.now).gates;
    assert!(matches!(gates[..], [(M, FleetAsk::Hold(_))]), "{gates:?}");
    played.board.end(played.now, ticket, failed(Failure::Status(500)), &mut played.rng);
    played.board.finish(plan.pass);
    assert_eq!(played.board.news(played.now).gates, [(M, FleetAsk::Free)]);
    assert!(matches!(played.find(&Preferences::default()), Found::AllRefused { gate: Some(M), .. }));
    played.board.alone();
    assert!(matches!(played.find(&Preferences::default()), Found::Plan(_)), "by itself");
}

#[test]
fn a_rest_is_told_with_its_length_and_ends_for_all_when_something_is_served() {
    let key = CredentialId { provider: 0, index: 0 };
    let (mut one, mut two) = (in_a_fleet(), in_a_fleet());
    let failure = Failure::Status(429);
    let wait = Some(5 * SECOND);
    one.attempt(0, Outcome::Failed { failure, wait, timing: Timing::default(), reused: false });
    one.wait(1_000);
    let rest = RestWord { cause: Cause::RateLimit, remaining: 4 * SECOND, times: 1 };
    assert_eq!(one.board.news(one.now).rests, [RestNews::Rests { credential: key, rest }]);
    two.board.hear_rest(two.now, key, Some(rest));
    assert_eq!(two.order(), [1]);
    assert!(two.board.news(two.now).rests.is_empty(), "nobody repeats what it was told");
    one.wait(4_000);
    one.attempt(0, SERVED);
    assert_eq!(one.board.news(one.now).rests, [RestNews::Served(key)]);
    two.wait(4_000);
    let standing = |played: &Played| played.board.rests.standing(played.now, EndpointId(0), key);
    assert_eq!(standing(&two), Standing::Trial);
    two.board.hear_rest(two.now, key, None);
    assert_eq!(standing(&two), Standing::Free);
}

#[test]
fn a_glance_tells_breaker_rest_and_credential_apart() {
    let mut played = Played::new(&[100, 80, 60]);
    let glance = |played: &Played, n| played.board.glance(played.now, EndpointId(n)).unwrap();
    let fresh = glance(&played, 0);
    assert_eq!((fresh.weight, fresh.breaker, fresh.admits()), (100, BreakerState::Closed, true));
    played.open(0);
    let open = glance(&played, 0);
    assert_eq!((open.breaker, open.rests, open.admits()), (BreakerState::Open, false, false));
    played.attempt(1, failed(Failure::Status(429)));
    let rests = glance(&played, 1);
    assert_eq!((rests.breaker, rests.rests, rests.credential_refused), (BreakerState::Closed, true, false));
    assert!(!rests.admits());
    played.attempt(2, failed(Failure::from_status(401)));
    assert!(glance(&played, 2).rests && glance(&played, 2).credential_refused);
    played.wait(20_000);
    assert_eq!(glance(&played, 0).breaker, BreakerState::HalfOpen, "its time is over");
    assert_eq!(played.board.glance(played.now, EndpointId(3)), None);
}

#[test]
fn an_endpoint_that_failed_and_is_not_asked_again_is_known_to_have_failed() {
    let mut layout = layout(&[100, 100]);
    layout.models[0].explore = false;
    let now = Instant::now();
    let mut played = Played { board: Board::new(now, layout), now, rng: Pcg64Mcg::seed_from_u64(1) };
    let heard = |played: &Played| {
        let glance = played.board.glance(played.now, EndpointId(0)).unwrap();
        (glance.answered, glance.failed)
    };
    played.attempt(0, SERVED);
    assert_eq!(heard(&played), (Some(now), None));
    played.wait(1000);
    let failed_at = played.now;
    played.attempt(0, failed(Failure::Status(500)));
    assert_eq!(heard(&played), (Some(now), None), "a bad moment, and nobody has come since");
    played.wait(1_200_000);
    assert!((0..100).all(|_| played.order()[0] == 1), "nobody asks it");
    let glance = played.board.glance(played.now, EndpointId(0)).unwrap();
    assert!(glance.factor > 0.99 && glance.breaker == BreakerState::Closed, "and it looks well: {glance:?}");
    assert_eq!(heard(&played), (Some(now), Some(failed_at)), "and calls have passed it by");
    played.board.check_passed(played.now, EndpointId(0));
    assert_eq!(heard(&played).1, Some(failed_at), "a check is no answer");
    played.board.probe_answered(played.now, EndpointId(0));
    assert_eq!(heard(&played), (Some(played.now), None));
    for _ in 0..3 {
        played.attempt(0, failed(Failure::Status(500)));
    }
    assert_eq!(heard(&played).1, Some(played.now), "three are no bad moment");
}

#[test]
fn a_route_that_was_asked_shows_the_watchdogs_that_it_has_and_no_other() {
    let mut played = Played::new(&[100, 80]);
    assert_eq!(played.board.watchdogs(Form::Stream), []);
    for endpoint in [0, 1] {
        let route = played.board.layout().routes().find(|route| route.endpoint.0 == endpoint).unwrap();
        let asked = played.board.limits(played.now, route, Form::Stream, 0).unwrap();
        let shown = played.board.watchdogs(Form::Stream);
        assert_eq!(shown.len(), endpoint + 1);
        assert_eq!(shown.last(), Some(&(route, asked)));
    }
    assert_eq!(played.board.watchdogs(Form::Whole), []);
}
