//! Everything that a node knows of its upstreams, in one value.
//!
//! The machines beside this file each answer one question; a request needs all answers at once, and what it
//! learns must reach all of them. The board is that seam. The edge owns one, behind one mutex that is never
//! held over a wait, and makes these calls:
//!
//! ```text
//! candidates(now, ask)      whom to ask, in which order, and on whom to fall back; or why nobody
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

mod glance;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rand_core::RngCore;

use crate::dialect::Operation;
use crate::ids::{CredentialId, EndpointId, ModelId};
use crate::money::PriceCard;
use crate::preferences::{Dropped, Preferences, RouteFacts};
use crate::route::{self, Candidate, Explorer, Sort};
use crate::status::now::{RECENT, RouteSignal};
use crate::upstream::breaker::{Admission, Breaker, Change, Crowd, HARD, Others, Permit, SOFT, Verdict};
use crate::upstream::failure::{Failure, Timer};
use crate::upstream::fleet::{
    Claim, Generation, Heard, News, Phase, PlaceNews, PlaceWord, RestNews, RestWord, Untold,
};
use crate::upstream::last_heard::LastHeard;
use crate::upstream::last_resort::{Gate, LastResort, PlaceId};
use crate::upstream::node_fault::{Blame, NodeFault, Sign};
use crate::upstream::rest::{Cause, Rests, Standing};
use crate::upstream::retry_budget::RetryBudget;
use crate::upstream::sketch::Window;
use crate::upstream::watchdog::{Form, Limit, Limits, PromptClass, Seen, Table, Timing, Timings};
use crate::upstream::weight::Health;

pub use glance::{BreakerState, Glance};

/// Learnt limits are this old at most.
const TABLE_AGE_MAX: Duration = Duration::from_secs(1);
/// What connect failures of this long can be taken back when they turn out to be the node's.
const TAKE_BACK: Duration = Duration::from_secs(1);
/// A call that found an endpoint's only probe under way asks again so soon.
const PROBE_POLL: Duration = Duration::from_millis(250);
/// A weight of a credential whose trial another call is.
const ON_TRIAL: f64 = 0.001;
/// A model that nobody has asked for so long needs no warm connections.
const WARM_FOR: Duration = Duration::from_secs(300);
/// So many places behind the first one of a model are kept warm.
const WARM_PLACES: usize = 2;
/// And so many endpoints of all models.
const WARM_MAX: usize = 64;
/// A place at the gate before its request has begun an attempt.
const PLACE: Duration = Duration::from_secs(2);

/// One endpoint as it is configured.
#[derive(Clone, Debug)]
pub struct EndpointSpec {
    /// Its name; its state survives a reload under it.
    pub name: String,
    /// The provider's name, as callers' preferences use it.
    pub provider: String,
    /// Whose quota it uses.
    pub credential: CredentialId,
    /// The first endpoint of its place: the same server, the same native model, another credential. What a server does
    /// wrong it does for every credential, so health, breaker, timings and a Retry-After of its own are the place's;
    /// only rests for 429 and for trouble with a credential are the credential's.
    pub place: EndpointId,
    /// The configured weight.
    pub weight: u32,
    /// To the response head.
    pub first_byte: Limit,
    /// To the first meaningful event.
    pub first_event: Limit,
    /// What a caller pays there, for `max_price` and `sort: price`.
    pub price: Option<PriceCard>,
    /// The parameters that it understands; `None`: all.
    pub parameters: Option<Vec<String>>,
}

/// One model as it is configured.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Its public name.
    pub name: String,
    /// What is asked of it: one model that serves several operations is as many models here, each with
    /// speeds of its own.
    pub operation: Operation,
    /// Its routes.
    pub routes: Vec<EndpointId>,
    /// It thinks before it speaks.
    pub reasoning: bool,
    /// How its order is made.
    pub sort: Sort,
    /// Some calls begin with a standby, or with a route that lost its place, to learn how they do.
    pub explore: bool,
}

/// What a board is about. Ids are places in these lists.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// All endpoints.
    pub endpoints: Vec<EndpointSpec>,
    /// All models.
    pub models: Vec<ModelSpec>,
}

/// What a request asks of the board.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The models that the caller named, in order.
    pub models: &'a [ModelId],
    /// In which form the answer shall come.
    pub form: Form,
    /// An estimate of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// What the caller wants.
    pub preferences: &'a Preferences,
}

/// One model at one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// The model.
    pub model: ModelId,
    /// The endpoint.
    pub endpoint: EndpointId,
}

/// What the board answers.
#[derive(Debug)]
pub enum Found {
    /// Ask these.
    Plan(Plan),
    /// Every route refuses or rests.
    AllRefused {
        /// When the first of them is worth asking again.
        soonest: Instant,
        /// All of them rest for their rate limits: the caller gets a 429, not a 503.
        rate_limited: bool,
        /// With the fleet's claim to the gate of this model one may try all the same.
        gate: Option<ModelId>,
    },
    /// The caller's preferences leave no route.
    NoneFits(Vec<(Route, Dropped)>),
}

/// Whom to ask.
#[derive(Debug)]
pub struct Plan {
    /// In this order.
    pub order: Vec<Route>,
    /// On whom to fall back when all of them failed.
    pub fall_backs: Vec<Route>,
    /// The request's pass, for [`Board::begin`].
    pub pass: Pass,
}

/// A request's right to attempts.
#[derive(Debug)]
pub struct Pass {
    form: Form,
    class: PromptClass,
    /// Routes that admitted when the order was made and were not tried yet.
    viable: usize,
    /// Whom it has asked, each once.
    asked: Vec<EndpointId>,
    /// At the gates of the models that it may try, one each.
    places: Vec<(ModelId, PlaceId)>,
}

/// One attempt that is under way.
#[derive(Debug)]
pub struct Ticket {
    route: Route,
    form: Form,
    class: PromptClass,
    permit: Permit,
    place: Option<(ModelId, PlaceId)>,
    /// What its watchdogs are, or would be.
    limits: Limits,
    trial: bool,
    answered: bool,
}

/// Whether an attempt may go.
#[derive(Debug)]
pub enum Begun {
    /// It may.
    Go {
        /// For its end.
        ticket: Ticket,
        /// Its watchdog to the head; none for the last viable candidate.
        first_byte: Option<Duration>,
        /// Its watchdog to the first meaningful event; none for the last viable candidate.
        first_event: Option<Duration>,
    },
    /// Not this one: tell the planner. A moment means that waiting for it is worth while.
    Refused(Option<Instant>),
    /// All requests together have made too many extra attempts: this one ends with what it has.
    BudgetSpent,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a whole answer.
    Served {
        /// Output tokens per second after the first event, where they can be told.
        tokens_per_second: Option<u64>,
    },
    /// It failed, before or after the commit.
    Failed {
        /// Why.
        failure: Failure,
        /// When the upstream wants to be asked again.
        wait: Option<Duration>,
        /// How far it came.
        timing: Timing,
        /// Its connection had served others before.
        reused: bool,
    },
    /// The caller left.
    CallerLeft,
}

/// What an end has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// The endpoint may not be asked again before this.
    pub not_before: Option<Instant>,
    /// Something for the log.
    pub notice: Option<Notice>,
}

/// What somebody may want to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A breaker opened.
    Opened(Instant),
    /// A breaker closed.
    Closed,
    /// A credential is refused: somebody must look.
    CredentialAlarm(CredentialId),
    /// This node is cut off: it is not ready.
    NodeCutOff,
}

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

impl Pass {
    /// In which form the answer of the next attempt comes.
    pub fn comes_as(&mut self, form: Form) {
        self.form = form;
    }

    /// A gate counts those who try its own model: nobody else's answer opens it.
    fn place_at(&self, model: ModelId) -> Option<(ModelId, PlaceId)> {
        self.places.iter().find(|(of, _)| *of == model).copied()
    }
}

impl Ticket {
    /// Where the attempt goes.
    #[must_use]
    pub const fn route(&self) -> Route {
        self.route
    }

    /// What its watchdogs are, or would be if it were not the last candidate.
    #[must_use]
    pub const fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether it probes an endpoint that its breaker refuses to others.
    #[must_use]
    pub const fn is_probe(&self) -> bool {
        self.permit.is_probe()
    }
}

impl Stand {
    /// Whether it may be asked.
    #[must_use]
    pub const fn admits(&self) -> bool {
        self.dropped.is_none() && self.admits_others()
    }

    /// Whether it may be asked for those whose preferences leave it.
    const fn admits_others(&self) -> bool {
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

    fn is_fall_back(&self) -> bool {
        self.dropped.is_none() && !self.admits() && !matches!(self.rest, Standing::Resting { .. })
    }
}

/// All that a node knows of its upstreams.
#[derive(Debug)]
pub struct Board {
    layout: Layout,
    endpoints: Vec<EndpointState>,
    models: Vec<ModelState>,
    routes: HashMap<Route, RouteState>,
    rests: Rests,
    budget: RetryBudget,
    node: NodeFault,
    fleet: Fleet,
}

/// What a board knows of being one of several.
#[derive(Clone, Debug, Default)]
struct Fleet {
    /// The fleet can be heard.
    present: bool,
    /// Something is to be told that should not wait.
    urgent: bool,
    /// Failures may be held back: some are.
    holds_back: bool,
    /// Credentials of which something is to be told, and whether it is that one was served with.
    rests: Vec<(CredentialId, bool)>,
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
    wide: [Option<(Instant, Seen)>; 2],
}

#[derive(Clone, Debug, Default)]
struct RouteState {
    paces: [Pace; 2],
    speed: Option<Window>,
}

/// One form of answers at one route.
#[derive(Clone, Debug, Default)]
struct Pace {
    timings: Timings,
    table: Option<(Instant, Table)>,
    median: Option<Duration>,
}

impl Board {
    /// A board of which nothing is known yet.
    #[must_use]
    pub fn new(now: Instant, layout: Layout) -> Self {
        let endpoints = layout.endpoints.iter().map(|_| EndpointState::new(now)).collect();
        let models = layout.models.iter().map(|_| ModelState::default()).collect();
        Self {
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
        for (at, model) in new.layout.models.iter().enumerate() {
            let Some(old_at) = old_model(model) else { continue };
            for endpoint in &model.routes {
                let name = new.layout.endpoints.get(endpoint.0).map(|spec| spec.name.as_str());
                let Some(old_endpoint) = name.and_then(old_endpoint) else { continue };
                let old = Route { model: ModelId(old_at), endpoint: EndpointId(old_endpoint) };
                if let Some(state) = self.routes.get(&old) {
                    new.routes.insert(Route { model: ModelId(at), endpoint: *endpoint }, state.clone());
                }
            }
        }
        new.budget = self.budget.clone();
        new.fleet.present = self.fleet.present;
        new
    }

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

    /// Before an attempt. `last`: the planner's word that nobody is left behind it.
    pub fn begin(
        &mut self,
        now: Instant,
        pass: &mut Pass,
        route: Route,
        last: bool,
        rng: &mut impl RngCore,
    ) -> Begun {
        let Some(spec) = self.layout.endpoints.get(route.endpoint.0) else { return Begun::Refused(None) };
        let (credential, head, event) = (spec.credential, spec.first_byte, spec.first_event);
        let rest = self.rests.standing(now, self.place(route.endpoint), credential);
        if matches!(rest, Standing::Resting { .. }) {
            pass.viable = pass.viable.saturating_sub(1);
            return Begun::Refused(None);
        }
        let limits = self.table(now, route, pass.form).limits(pass.class, head, event);
        let lease_end = now + limits.event;
        let place = pass.place_at(route.model);
        let nobody_else = pass.viable == 0 || place.is_some();
        let permit = match self.permit(now, route.endpoint, lease_end, nobody_else, place.is_some()) {
            Ok(permit) => permit,
            Err(until) => {
                pass.viable = pass.viable.saturating_sub(1);
                return Begun::Refused(Some(until.min(now + PROBE_POLL)));
            }
        };
        // A healthy route that this request has not asked is worth the attempt whatever the others used up:
        // that is no storm, it is where the request should have gone.
        let fresh = !pass.asked.contains(&route.endpoint);
        let extra = !pass.asked.is_empty();
        if extra && !self.budget.withdraw(now) && !(fresh && self.is_healthy(now, route.endpoint)) {
            // The permit did nothing: neutral, so that its lease is free again.
            self.end_permit(now, route.endpoint, permit, Verdict::Neutral, rng);
            return Begun::BudgetSpent;
        }
        if pass.asked.is_empty() {
            self.budget.deposit(now);
        }
        if !pass.asked.contains(&route.endpoint) {
            pass.asked.push(route.endpoint);
        }
        pass.viable = pass.viable.saturating_sub(1);
        if rest == Standing::Trial {
            self.rests.begin_trial(credential, lease_end);
        }
        if let Some((model, place)) = place
            && let Some(model) = self.models.get_mut(model.0)
        {
            model.gate.hold(place, lease_end);
        }
        self.fleet.urgent |= permit.is_probe() || place.is_some();
        if let Some(state) = self.state_mut(route.endpoint) {
            state.called = Some(now);
            state.last = Some(route.endpoint);
        }
        let watchdog = |limit: Duration| (!last).then_some(limit);
        Begun::Go {
            first_byte: watchdog(limits.head),
            first_event: watchdog(limits.event),
            ticket: Ticket {
                route,
                form: pass.form,
                class: pass.class,
                permit,
                place,
                limits,
                trial: rest == Standing::Trial,
                answered: false,
            },
        }
    }

    /// The first meaningful event is in hand: the watchdogs learn, and a probe or a trial has succeeded.
    pub fn answered(
        &mut self,
        now: Instant,
        ticket: &mut Ticket,
        timing: Timing,
        rng: &mut impl RngCore,
    ) -> Option<Notice> {
        if std::mem::replace(&mut ticket.answered, true) {
            return None;
        }
        self.learn(now, ticket, timing);
        self.sign(now, ticket.route.endpoint, Sign::Life);
        if let Some(credential) = self.credential(ticket.route.endpoint)
            && self.rests.served(now, self.place(ticket.route.endpoint), credential)
        {
            self.tell_of(credential, true);
        }
        if let Some((model, place)) = ticket.place
            && let Some(model) = self.models.get_mut(model.0)
        {
            model.gate.succeeded(now, place);
        }
        let state = self.state_mut(ticket.route.endpoint)?;
        let probes = ticket.permit.is_probe() && state.breaker.counts(ticket.permit);
        let change = state.breaker.probe_answered(now, ticket.permit, rng);
        if probes {
            state.untold.success();
            self.fleet.urgent = true;
        }
        self.changed(now, ticket.route.endpoint, change)
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

    /// An attempt has ended.
    pub fn end(&mut self, now: Instant, ticket: Ticket, outcome: Outcome, rng: &mut impl RngCore) -> Ended {
        match outcome {
            Outcome::Served { tokens_per_second } => self.served(now, &ticket, tokens_per_second, rng),
            Outcome::Failed { failure, wait, timing, reused } => {
                self.failed(now, &ticket, &failure, wait, timing, reused, rng)
            }
            Outcome::CallerLeft => {
                self.undecided(&ticket);
                let endpoint = ticket.route.endpoint;
                let notice = self.end_permit(now, endpoint, ticket.permit, Verdict::Neutral, rng);
                Ended { not_before: None, notice }
            }
        }
    }

    /// A request is over, however it ended.
    pub fn finish(&mut self, pass: Pass) {
        self.leave(pass.places);
    }

    /// A free active check of an endpoint has passed: an open breaker lets a probe through at once.
    pub fn check_passed(&mut self, now: Instant, endpoint: EndpointId) {
        if let Some(state) = self.state_mut(endpoint) {
            state.breaker.check_passed(now);
            state.untold.check_passed = true;
        }
    }

    /// A probe of an endpoint was answered: as good as a passed check, and heard of it.
    pub fn probe_answered(&mut self, now: Instant, endpoint: EndpointId) {
        self.check_passed(now, endpoint);
        if let Some(state) = self.state_mut(endpoint) {
            state.heard.answer(now);
        }
    }

    /// What is to be told to the fleet by now. It counts as told: whoever takes it delivers it.
    pub fn news(&mut self, now: Instant) -> News {
        self.fleet.urgent = false;
        let places = (0..self.endpoints.len()).filter_map(|at| self.news_of(now, EndpointId(at))).collect();
        let rests = std::mem::take(&mut self.fleet.rests).into_iter();
        let rests = rests.filter_map(|(credential, served)| match self.rests.word(now, credential) {
            Some(rest) => Some(RestNews::Rests { credential, rest }),
            None => served.then_some(RestNews::Served(credential)),
        });
        let rests = rests.collect();
        let present = self.fleet.present;
        let gates = self.models.iter_mut().enumerate().filter_map(|(at, model)| {
            let used = model.gate.used_until().filter(|_| present && model.claim.is_good(now));
            let wanted = std::mem::take(&mut model.wants_claim) && present;
            Some((ModelId(at), model.claim.ask(now, used, wanted)?))
        });
        self.fleet.holds_back = self.endpoints.iter().any(|state| state.untold.holds_back());
        News { places, rests, gates: gates.collect() }
    }

    /// Whether there are news that should not wait for the next round.
    #[must_use]
    pub const fn has_urgent_news(&self) -> bool {
        self.fleet.urgent
    }

    /// The fleet can be heard. Calls of before are nothing new by now.
    pub fn joined(&mut self) {
        if !std::mem::replace(&mut self.fleet.present, true) {
            self.endpoints.iter_mut().for_each(|state| state.untold.forget_calls());
        }
    }

    /// The fleet cannot be heard: from here on this node decides by itself.
    pub fn alone(&mut self) {
        self.fleet.present = false;
        for state in &mut self.endpoints {
            state.breaker.untie();
        }
        for model in &mut self.models {
            model.claim = Claim::default();
        }
    }

    /// What the fleet makes of a place. `now`: when it was so; for an answer, when the question was sent.
    pub fn hear_place(
        &mut self,
        now: Instant,
        place: EndpointId,
        word: &PlaceWord,
        heard: Heard,
    ) -> Option<Notice> {
        let known = self.state(place)?.generation;
        if heard == Heard::Announcement && word.generation < known {
            return None;
        }
        // The last route of a model is not refused for its rate: its weight has fallen already.
        let spared = word.by_rate && self.is_needed(now, place);
        if !word.rest.is_zero() {
            self.rests.endpoint_asked(now, self.place(place), word.rest);
        }
        let state = self.state_mut(place)?;
        state.fleet = Some(Health::heard(now, word.health));
        if word.generation == known {
            match word.phase {
                Phase::Closed => {}
                Phase::Open(_) => state.breaker.hear_probed(0),
                Phase::HalfOpen(successes) => state.breaker.hear_probed(successes),
            }
            return None;
        }
        state.generation = word.generation;
        state.untold.forget_calls();
        let is_later = word.generation > known;
        let change = match word.phase {
            Phase::Open(_) | Phase::HalfOpen(_) if spared => Change::None,
            Phase::Open(remaining) => state.breaker.hear_open(now, remaining, word.openings),
            Phase::HalfOpen(successes) => {
                let change = state.breaker.hear_open(now, Duration::ZERO, word.openings);
                state.breaker.hear_probed(successes);
                change
            }
            Phase::Closed if is_later => state.breaker.hear_closed(now),
            // It has lost its memory: what this node knows is its own again.
            Phase::Closed => {
                state.breaker.untie();
                Change::None
            }
        };
        self.changed(now, place, change)
    }

    /// The fleet knows nothing of a place, or no more.
    pub fn hear_nothing_of(&mut self, place: EndpointId) {
        if let Some(state) = self.state_mut(place)
            && state.generation != Generation::default()
        {
            state.generation = Generation::default();
            state.breaker.untie();
        }
    }

    /// This node may probe a place until then, or may not.
    pub fn claimed(&mut self, place: EndpointId, until: Option<Instant>) {
        if let Some(state) = self.state_mut(place) {
            state.breaker.claimed(until);
        }
    }

    /// The gate of a model is this node's until then, or is another's.
    pub fn gate_claimed(&mut self, model: ModelId, until: Option<Instant>) {
        if let Some(model) = self.models.get_mut(model.0) {
            model.claim.granted(until);
        }
    }

    /// How a credential rests on all nodes; `None`: nobody knows of a rest, or something was served after it.
    pub fn hear_rest(&mut self, now: Instant, credential: CredentialId, word: Option<RestWord>) {
        match word {
            Some(word) => self.rests.hear(now, credential, word),
            None if self.fleet.rests.iter().any(|(untold, _)| *untold == credential) => {}
            None => {
                self.rests.hear_served(now, credential);
            }
        }
    }

    /// An endpoint was reached, whatever it says: this node has a network.
    pub fn reached(&mut self, now: Instant, endpoint: EndpointId) {
        self.sign(now, endpoint, Sign::Life);
    }

    /// Since when this node has been cut off from all its endpoints.
    #[must_use]
    pub const fn cut_off_since(&self) -> Option<Instant> {
        self.node.since()
    }

    /// Credentials that somebody must look at.
    pub fn alarms(&self) -> impl Iterator<Item = CredentialId> {
        self.rests.alarms()
    }

    /// A credential has been replaced.
    pub fn renewed(&mut self, credential: CredentialId) {
        self.rests.renewed(credential);
    }

    /// What this board is about.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the routes of a model stand, in the order of the config.
    #[must_use]
    pub fn survey(&self, now: Instant, model: ModelId, ask: &Ask<'_>) -> Vec<Stand> {
        let routes = self.layout.models.get(model.0).map(|spec| spec.routes.as_slice()).unwrap_or_default();
        let may_drop = ask.preferences.may_drop();
        let stand = |endpoint: &EndpointId| {
            let (spec, state) = (self.layout.endpoints.get(endpoint.0)?, self.state(*endpoint)?);
            let route = Route { model, endpoint: *endpoint };
            Some(Stand {
                route,
                weight: spec.weight,
                factor: state.factor(now),
                has_lost_weight: state.has_lost_weight(now),
                share: state.share(now),
                breaker: state.breaker.admission(now),
                rest: self.rests.standing(now, spec.place, spec.credential),
                dropped: may_drop
                    .then(|| ask.preferences.drops(&self.route_facts(route, ask.form)))
                    .flatten(),
            })
        };
        routes.iter().filter_map(stand).collect()
    }

    /// To whom connections are kept open, off the path of requests: the next two places behind the first one of every
    /// model that has traffic, one endpoint of each. The first is kept open by its calls.
    #[must_use]
    pub fn standbys(&self, now: Instant) -> Vec<EndpointId> {
        let preferences = Preferences::default();
        let mut standbys: Vec<EndpointId> = vec![];
        for (at, state) in self.models.iter().enumerate() {
            if state.asked.is_none_or(|asked| now.saturating_duration_since(asked) >= WARM_FOR) {
                continue;
            }
            let models = [ModelId(at)];
            let ask =
                Ask { models: &models, form: Form::Stream, prompt_tokens: 0, preferences: &preferences };
            let mut stands = self.survey(now, ModelId(at), &ask);
            stands.retain(Stand::admits);
            let weight = |stand: &Stand| f64::from(stand.weight) * stand.factor;
            stands.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
            let mut places: Vec<EndpointId> = vec![];
            for place in stands.iter().map(|stand| self.place(stand.route.endpoint)) {
                if !places.contains(&place) {
                    places.push(place);
                }
            }
            for place in places.into_iter().skip(1).take(WARM_PLACES) {
                if !standbys.contains(&place) {
                    standbys.push(place);
                }
            }
        }
        standbys.truncate(WARM_MAX);
        standbys
    }

    /// The watchdogs that an attempt at this route would have.
    pub fn limits(&mut self, now: Instant, route: Route, form: Form, prompt_tokens: u64) -> Option<Limits> {
        let spec = self.layout.endpoints.get(route.endpoint.0)?;
        let (head, event) = (spec.first_byte, spec.first_event);
        Some(self.table(now, route, form).limits(PromptClass::of(prompt_tokens), head, event))
    }

    /// What health makes of an endpoint's weight, and whether it may be asked.
    #[must_use]
    pub fn endpoint(&self, now: Instant, id: EndpointId) -> Option<(f64, bool)> {
        let (spec, state) = (self.layout.endpoints.get(id.0)?, self.state(id)?);
        let rests = matches!(self.rests.standing(now, spec.place, spec.credential), Standing::Resting { .. });
        let refused = matches!(state.breaker.admission(now), Admission::Refused(_));
        Some((state.factor(now), !rests && !refused))
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
            tokens_per_second: state.and_then(|state| state.speed.as_ref()?.merged_as_it_is().quantile(500)),
            parameters: spec.and_then(|spec| spec.parameters.as_deref()),
        }
    }

    /// Its breaker is closed and nothing weighs on it.
    fn is_healthy(&self, now: Instant, endpoint: EndpointId) -> bool {
        self.state(endpoint).is_some_and(|state| {
            state.breaker.admission(now) == Admission::Closed && !state.has_lost_weight(now)
        })
    }

    fn permit(
        &mut self,
        now: Instant,
        endpoint: EndpointId,
        lease_end: Instant,
        nobody_else: bool,
        at_the_gate: bool,
    ) -> Result<Permit, Instant> {
        let Some(state) = self.state_mut(endpoint) else { return Err(now) };
        if nobody_else {
            let crowd = if at_the_gate { Crowd::AsTheGateSays } else { Crowd::One };
            state.breaker.begin_anyway(now, lease_end, crowd)
        } else {
            state.breaker.begin(now, lease_end)
        }
    }

    fn served(
        &mut self,
        now: Instant,
        ticket: &Ticket,
        tokens_per_second: Option<u64>,
        rng: &mut impl RngCore,
    ) -> Ended {
        let endpoint = ticket.route.endpoint;
        if let Some(speed) = tokens_per_second {
            let state = self.routes.entry(self.paced(ticket.route)).or_default();
            state.speed.get_or_insert_with(|| Window::new(now)).record(now, speed);
        }
        if let Some(state) = self.state_mut(endpoint) {
            state.health.record(now, true);
            state.heard.answer(now);
        }
        let verdict = verdict_of(ticket, Verdict::Success);
        self.tally(now, endpoint, ticket.permit, verdict, false);
        let notice = self.end_permit(now, endpoint, ticket.permit, verdict, rng);
        Ended { not_before: None, notice }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one outcome, taken apart")]
    fn failed(
        &mut self,
        now: Instant,
        ticket: &Ticket,
        failure: &Failure,
        wait: Option<Duration>,
        timing: Timing,
        reused: bool,
        rng: &mut impl RngCore,
    ) -> Ended {
        let endpoint = ticket.route.endpoint;
        self.undecided(ticket);
        if let Failure::Timeout(timer) = failure {
            self.learn(now, ticket, censored(*timer, timing, ticket.limits));
        }
        let (not_before, alarm) = self.rest(now, endpoint, failure, wait);
        let blame = match failure {
            _ if failure.is_connect_type() => self.sign(now, endpoint, Sign::NoConnection),
            // Silence says nothing about the network.
            Failure::Timeout(_) | Failure::Broken | Failure::Ours => Blame::Endpoint,
            Failure::Connect => Blame::Endpoint,
            Failure::Status(_)
            | Failure::Credential(_)
            | Failure::Redirect
            | Failure::NotAnAnswer(_)
            | Failure::CallerFault(_) => self.sign(now, endpoint, Sign::Life),
        };
        let soft = reused && matches!(failure, Failure::Timeout(Timer::FirstByte | Timer::FirstEvent));
        let verdict = match blame {
            Blame::Node | Blame::NodeFromNow => Verdict::Neutral,
            Blame::Endpoint if !failure.blames_endpoint() => Verdict::Neutral,
            Blame::Endpoint if soft => Verdict::SoftFailure,
            Blame::Endpoint => Verdict::Failure,
        };
        self.blame(now, endpoint, verdict, failure.is_connect_type());
        self.tally(now, endpoint, ticket.permit, verdict, failure.is_connect_type());
        let mut notice = self.end_permit(now, endpoint, ticket.permit, verdict, rng);
        if blame == Blame::NodeFromNow {
            self.take_back(now);
            notice = Some(Notice::NodeCutOff);
        }
        if let (Some((model, _)), false) = (ticket.place, verdict == Verdict::Neutral) {
            let all_refuse = !self.another_admits(now, model, None);
            if let Some(model) = self.models.get_mut(model.0) {
                model.gate.failed(all_refuse);
            }
        }
        Ended { not_before, notice: alarm.or(notice) }
    }

    /// What the failure rests, and until when.
    fn rest(
        &mut self,
        now: Instant,
        endpoint: EndpointId,
        failure: &Failure,
        wait: Option<Duration>,
    ) -> (Option<Instant>, Option<Notice>) {
        let Some(credential) = self.credential(endpoint) else { return (None, None) };
        match failure {
            Failure::Status(429) => {
                self.tell_of(credential, false);
                (Some(self.rests.rate_limited(now, credential, wait)), None)
            }
            Failure::Credential(_) => {
                self.tell_of(credential, false);
                let until = self.rests.refused(now, credential);
                (Some(until), Some(Notice::CredentialAlarm(credential)))
            }
            Failure::Status(408 | 500..) => match wait.filter(|wait| !wait.is_zero()) {
                Some(wait) => {
                    let until = self.rests.endpoint_asked(now, self.place(endpoint), wait);
                    if let Some(state) = self.state_mut(endpoint) {
                        state.untold.rest = Some(until);
                    }
                    (Some(until), None)
                }
                None => (None, None),
            },
            Failure::Status(_)
            | Failure::Connect
            | Failure::Timeout(_)
            | Failure::Broken
            | Failure::Redirect
            | Failure::NotAnAnswer(_)
            | Failure::CallerFault(_)
            | Failure::Ours => (None, None),
        }
    }

    fn blame(&mut self, now: Instant, endpoint: EndpointId, verdict: Verdict, connect: bool) {
        let Some(state) = self.state_mut(endpoint) else { return };
        let recent = |at: Instant| now.saturating_duration_since(at) <= TAKE_BACK;
        if connect && state.before.as_ref().is_none_or(|before| !recent(before.at)) {
            let EndpointState { health, breaker, heard, generation, .. } = &*state;
            let (health, breaker, heard, generation) = (*health, breaker.clone(), *heard, *generation);
            state.before = Some(Before { at: now, health, breaker, heard, generation });
        }
        match verdict {
            Verdict::Failure => {
                state.health.record(now, false);
                state.heard.failure(now, HARD);
            }
            Verdict::SoftFailure => {
                state.health.record_soft_failure(now);
                state.heard.failure(now, SOFT);
            }
            Verdict::Success | Verdict::Neutral => {}
        }
    }

    /// The failures of the last second were the node's: they are forgotten.
    fn take_back(&mut self, now: Instant) {
        for state in &mut self.endpoints {
            if let Some(Before { at, health, breaker, heard, generation }) = state.before.take()
                && now.saturating_duration_since(at) <= TAKE_BACK
            {
                state.health = health;
                state.breaker = breaker;
                state.heard = heard;
                state.generation = generation;
                state.untold.forget_held();
            }
        }
    }

    /// Notes the end of a call for the fleet.
    fn tally(&mut self, now: Instant, endpoint: EndpointId, permit: Permit, verdict: Verdict, connect: bool) {
        let may_be_ours = connect && self.has_two_providers();
        let Some(state) = self.state_mut(endpoint).filter(|state| state.breaker.counts(permit)) else {
            return;
        };
        let units = match verdict {
            Verdict::Success => return state.untold.success(),
            Verdict::Failure => HARD,
            Verdict::SoftFailure => SOFT,
            Verdict::Neutral => {
                self.fleet.urgent |= permit.is_probe();
                return;
            }
        };
        if may_be_ours {
            state.untold.hold_back(now, units);
            self.fleet.holds_back = true;
        } else {
            state.untold.failure(units);
            self.fleet.urgent = true;
        }
    }

    /// A node that knows one provider alone never takes itself for cut off.
    fn has_two_providers(&self) -> bool {
        let mut of = self.layout.endpoints.iter().map(|spec| spec.credential.provider);
        of.next().is_some_and(|first| of.any(|other| other != first))
    }

    fn news_of(&mut self, now: Instant, place: EndpointId) -> Option<PlaceNews> {
        if self.place(place) != place {
            return None;
        }
        let has_traffic = self.has_traffic(now, place);
        let present = self.fleet.present;
        let state = self.state_mut(place)?;
        let ask = state.breaker.ask(now, has_traffic).filter(|_| present);
        let tally = state.untold.take(now);
        let check_passed = std::mem::take(&mut state.untold.check_passed) && state.breaker.is_tied();
        let rest = state.untold.rest.take().and_then(|until| until.checked_duration_since(now));
        let generation = state.generation;
        let has_news = !tally.is_empty() || check_passed || rest.is_some() || ask.is_some();
        has_news.then(|| PlaceNews {
            place,
            generation,
            tally,
            needed: tally.bad > 0 && self.is_needed(now, place),
            check_passed,
            rest,
            ask,
        })
    }

    /// Whether anybody may come who would be sent there.
    fn has_traffic(&self, now: Instant, place: EndpointId) -> bool {
        let lately = |state: &ModelState| {
            state.asked.is_some_and(|asked| now.saturating_duration_since(asked) < WARM_FOR)
        };
        self.layout.models.iter().zip(&self.models).any(|(spec, state)| {
            lately(state) && spec.routes.iter().any(|endpoint| self.place(*endpoint) == place)
        })
    }

    fn tell_of(&mut self, credential: CredentialId, served: bool) {
        self.fleet.rests.retain(|(known, _)| *known != credential);
        self.fleet.rests.push((credential, served));
        self.fleet.urgent = true;
    }

    fn end_permit(
        &mut self,
        now: Instant,
        endpoint: EndpointId,
        permit: Permit,
        verdict: Verdict,
        rng: &mut impl RngCore,
    ) -> Option<Notice> {
        let failed = matches!(verdict, Verdict::Failure | Verdict::SoftFailure);
        let others = if failed && self.is_needed(now, endpoint) { Others::None } else { Others::Admit };
        let state = self.state_mut(endpoint)?;
        let change = state.breaker.end(now, permit, verdict, others, rng);
        self.changed(now, endpoint, change)
    }

    fn changed(&mut self, now: Instant, endpoint: EndpointId, change: Change) -> Option<Notice> {
        match change {
            Change::None => None,
            Change::Opened(until) => Some(Notice::Opened(until)),
            Change::Closed => {
                let state = self.state_mut(endpoint)?;
                state.health = Health::reopened(now);
                Some(Notice::Closed)
            }
        }
    }

    /// Whether an endpoint is the last route of a model.
    fn is_needed(&self, now: Instant, endpoint: EndpointId) -> bool {
        let models = self.layout.models.iter().enumerate();
        let of_it = models.filter(|(_, spec)| spec.routes.contains(&endpoint));
        of_it.into_iter().any(|(at, _)| !self.another_admits(now, ModelId(at), Some(endpoint)))
    }

    fn another_admits(&self, now: Instant, model: ModelId, but: Option<EndpointId>) -> bool {
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

    fn sign(&mut self, now: Instant, endpoint: EndpointId, sign: Sign) -> Blame {
        if sign == Sign::Life && std::mem::take(&mut self.fleet.holds_back) {
            for state in &mut self.endpoints {
                state.untold.release();
            }
            self.fleet.urgent = true;
        }
        let provider = self.credential(endpoint).map_or(0, |credential| credential.provider);
        self.node.note(now, self.place(endpoint), provider, sign)
    }

    /// The attempt said nothing about its credential: another call may be the trial.
    fn undecided(&mut self, ticket: &Ticket) {
        if let (true, false, Some(credential)) =
            (ticket.trial, ticket.answered, self.credential(ticket.route.endpoint))
        {
            self.rests.end_trial(credential);
        }
    }

    fn learn(&mut self, now: Instant, ticket: &Ticket, timing: Timing) {
        let state = self.routes.entry(self.paced(ticket.route)).or_default();
        if let Some(pace) = state.paces.get_mut(index(ticket.form)) {
            pace.timings.record(now, ticket.class, timing);
        }
    }

    fn table(&mut self, now: Instant, route: Route, form: Form) -> Table {
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

    /// Where the state of an endpoint is kept: at the first of its place.
    fn place(&self, endpoint: EndpointId) -> EndpointId {
        self.layout.endpoints.get(endpoint.0).map_or(endpoint, |spec| spec.place)
    }

    fn state(&self, endpoint: EndpointId) -> Option<&EndpointState> {
        self.endpoints.get(self.place(endpoint).0)
    }

    fn state_mut(&mut self, endpoint: EndpointId) -> Option<&mut EndpointState> {
        let place = self.place(endpoint);
        self.endpoints.get_mut(place.0)
    }

    /// Under which route timings and speed are kept.
    fn paced(&self, route: Route) -> Route {
        Route { model: route.model, endpoint: self.place(route.endpoint) }
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

    fn credential(&self, endpoint: EndpointId) -> Option<CredentialId> {
        self.layout.endpoints.get(endpoint.0).map(|spec| spec.credential)
    }

    fn leave(&mut self, places: Vec<(ModelId, PlaceId)>) {
        for (model, place) in places {
            if let Some(model) = self.models.get_mut(model.0) {
                model.gate.leave(place);
            }
        }
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

/// Whom to ask of one model.
enum Order {
    /// These, and its place at the gate if it has one.
    Routes(Vec<Route>, Option<(ModelId, PlaceId)>),
    /// Nobody: the gate is full.
    Full,
    /// Nobody: the gate is another node's, or nobody's yet.
    Unclaimed,
}

/// A probe that has answered was counted then; only its breaking off would be news.
fn verdict_of(ticket: &Ticket, verdict: Verdict) -> Verdict {
    if ticket.answered && ticket.permit.is_probe() { Verdict::Neutral } else { verdict }
}

/// A call that was cut is a sample at the limit that cut it, or would have.
fn censored(timer: Timer, timing: Timing, limits: Limits) -> Timing {
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

const fn index(form: Form) -> usize {
    match form {
        Form::Stream => 0,
        Form::Whole => 1,
    }
}

#[cfg(test)]
mod tests;
