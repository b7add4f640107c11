//! How every upstream does, shared by all requests of a snapshot.
//!
//! The rules are [`filters::upstream::board`]'s; here is the one lock around them, which is never held
//! over a wait, and the log lines for what changes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use filters::dialect::Operation;
use filters::explain::{Explanation, HoldLines, explain};
use filters::ids::{CredentialId, EndpointId, ModelId};
use filters::status::now::RouteSignal;
use filters::upstream::board::{
    Ask, Begun, Board, EndpointSpec, Found, Further, Glance, Layout, ModelSpec, Notice, Outcome, Pass, Route,
    Ticket,
};
use filters::upstream::watchdog::{Form, Limits, Timing};

use tokio::sync::Notify;

use crate::config::checked::{Catalogue, Routing};
use crate::notice::{Event, Kind, Notifier};
use crate::{clock, entropy};

/// A call that only the fleet could let through waits so long for its word.
const CLAIM_WAIT: Duration = Duration::from_millis(60);

/// What a node knows of its upstreams.
pub struct Upstreams {
    board: Mutex<Board>,
    /// One model of the config is as many for the board as its routes serve operations: an embedding's speed
    /// says nothing of a chat's.
    models: HashMap<String, HashMap<Operation, ModelId>>,
    /// By [`EndpointId`].
    names: Vec<String>,
    bell: Arc<Bell>,
}

/// Between calls, and whoever carries news to other nodes.
#[derive(Default)]
pub struct Bell {
    /// There are news that should not wait.
    pub urgent: Notify,
    /// The fleet has been heard.
    pub heard: Notify,
}

/// One attempt, as far as the board has to hear of it. Ends once; a dropped one counts for nothing.
pub struct Leg {
    upstreams: Arc<Upstreams>,
    ticket: Ticket,
    /// Its watchdog to the head, unless it is the last candidate.
    pub first_byte: Option<Duration>,
    /// Its watchdog to the first meaningful event, unless it is the last candidate.
    pub first_event: Option<Duration>,
}

/// The watchdogs of one model at one endpoint.
pub struct Watchdogs {
    pub model: String,
    pub operation: Operation,
    pub endpoint: String,
    pub limits: Limits,
}

/// Whether an attempt may go.
pub enum Asked {
    /// It may.
    Go(Leg),
    /// Not there; perhaps later.
    Refused(Option<Instant>),
    /// All calls together have made too many extra attempts.
    BudgetSpent,
}

impl Upstreams {
    /// Upstreams of which nothing is known yet.
    #[must_use]
    pub fn new(catalogue: &Catalogue, routing: &Routing) -> Arc<Self> {
        Self::build(catalogue, routing, Arc::default(), |layout| Board::new(clock::now(), layout))
    }

    /// Upstreams of another catalogue, with all that is known of those in both. Attempts that run now
    /// end on the old ones: what they find out is not carried over.
    #[must_use]
    pub fn reloaded(&self, catalogue: &Catalogue, routing: &Routing) -> Arc<Self> {
        let bell = Arc::clone(&self.bell);
        Self::build(catalogue, routing, bell, |layout| self.lock().reloaded(clock::now(), layout))
    }

    fn build(
        catalogue: &Catalogue,
        routing: &Routing,
        bell: Arc<Bell>,
        board: impl FnOnce(Layout) -> Board,
    ) -> Arc<Self> {
        let mut providers: Vec<&str> = vec![];
        let mut endpoints = vec![];
        for endpoint in &catalogue.endpoints {
            let provider = endpoint.provider.name.as_str();
            let index = providers.iter().position(|known| *known == provider).unwrap_or_else(|| {
                providers.push(provider);
                providers.len() - 1
            });
            endpoints.push(EndpointSpec {
                name: endpoint.name.clone(),
                provider: provider.to_owned(),
                credential: CredentialId { provider: index, index: endpoint.credential },
                place: endpoint.place,
                weight: endpoint.weight,
                first_byte: endpoint.provider.timers.first_byte,
                first_event: endpoint.provider.timers.first_event,
                price: None,
                parameters: endpoint.parameters.clone(),
            });
        }
        let mut models = vec![];
        let mut ids: HashMap<String, HashMap<Operation, ModelId>> = HashMap::new();
        for model in catalogue.models.values() {
            for id in &model.routes {
                if let Some(spec) = endpoints.get_mut(id.0) {
                    spec.price = Some(model.price.standard);
                }
            }
            for operation in Operation::ALL {
                let routes: Vec<EndpointId> = catalogue.routes_for(model, operation).collect();
                if routes.is_empty() {
                    continue;
                }
                ids.entry(model.name.clone()).or_default().insert(operation, ModelId(models.len()));
                let (name, reasoning, sort) = (model.name.clone(), model.reasoning, model.sort);
                models.push(ModelSpec { name, operation, routes, reasoning, sort, explore: routing.explore });
            }
        }
        let names = endpoints.iter().map(|spec| spec.name.clone()).collect();
        let board = board(Layout { endpoints, models });
        Arc::new(Self { board: Mutex::new(board), models: ids, names, bell })
    }

    /// Whom to ask.
    #[must_use]
    pub fn candidates(&self, ask: &Ask<'_>) -> Found {
        entropy::with_rng(|rng| self.with_board(|board, now| board.candidates(now, ask, rng)))
    }

    /// The same for a call that nobody can be asked for but by the fleet's leave: waits for its word, once. Only
    /// where every route refuses and other nodes can be heard.
    pub async fn candidates_of_fleet(&self, ask: &Ask<'_>) -> Found {
        let heard = self.bell.heard.notified();
        match self.candidates(ask) {
            Found::AllRefused { gate: Some(_), .. } => {
                // Without an answer in time it is as it was.
                let _in_time = tokio::time::timeout(CLAIM_WAIT, heard).await.is_ok();
                self.candidates(ask)
            }
            found @ (Found::Plan(_) | Found::AllRefused { gate: None, .. } | Found::NoneFits(_)) => found,
        }
    }

    /// Whom to ask beyond those `known` of a plan, once one of them refuses.
    #[must_use]
    pub fn further(&self, ask: &Ask<'_>, pass: &mut Pass, known: &[EndpointId]) -> Further {
        entropy::with_rng(|rng| self.with_board(|board, now| board.further(now, ask, pass, known, rng)))
    }

    /// What is between calls and other nodes.
    #[must_use]
    pub fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// By [`ModelId`]: what a model is called in the fleet.
    #[must_use]
    pub fn gate_names(&self) -> Vec<String> {
        let board = self.lock();
        let models = board.layout().models.iter();
        models.map(|spec| format!("{}/{}", spec.name, spec.operation.word())).collect()
    }

    /// Lets one look at the board, and rings when that has left news that should not wait.
    pub fn with_board<T>(&self, act: impl FnOnce(&mut Board, Instant) -> T) -> T {
        let mut board = self.lock();
        let result = act(&mut board, clock::now());
        if board.has_urgent_news() {
            self.bell.urgent.notify_one();
        }
        result
    }

    /// Before an attempt. `form`: of what the upstream is asked for; `last`: nobody is left behind it.
    pub fn begin(self: &Arc<Self>, pass: &mut Pass, route: Route, form: Form, last: bool) -> Asked {
        pass.comes_as(form);
        let begun =
            |board: &mut Board, now| entropy::with_rng(|rng| board.begin(now, pass, route, last, rng));
        match self.with_board(begun) {
            Begun::Go { ticket, first_byte, first_event } => {
                Asked::Go(Leg { upstreams: Arc::clone(self), ticket, first_byte, first_event })
            }
            Begun::Refused(until) => Asked::Refused(until),
            Begun::BudgetSpent => Asked::BudgetSpent,
        }
    }

    /// What would happen to a request, in words.
    #[must_use]
    pub fn explain(
        &self,
        ask: &Ask<'_>,
        form_at: impl Fn(EndpointId) -> Form,
        hold: Option<HoldLines>,
    ) -> Explanation {
        explain(&mut self.lock(), clock::now(), ask, form_at, hold)
    }

    /// To whom connections are kept open.
    #[must_use]
    pub fn standbys(&self) -> Vec<EndpointId> {
        self.lock().standbys(clock::now())
    }

    /// A free check of this endpoint has passed.
    pub fn check_passed(&self, endpoint: EndpointId) {
        self.lock().check_passed(clock::now(), endpoint);
    }

    /// A probe of this endpoint was answered.
    pub fn probe_answered(&self, endpoint: EndpointId) {
        self.lock().probe_answered(clock::now(), endpoint);
    }

    /// The credential of this endpoint has been replaced: whatever was said about it was about another.
    pub fn renewed(&self, endpoint: EndpointId) {
        let mut board = self.lock();
        let credential = board.layout().endpoints.get(endpoint.0).map(|spec| spec.credential);
        if let Some(credential) = credential {
            board.renewed(credential);
        }
    }

    /// A call is over, however it ended.
    pub fn finish(&self, pass: Pass) {
        self.lock().finish(pass);
    }

    /// How each endpoint stands, by its name.
    #[must_use]
    pub fn glances(&self) -> Vec<(&str, Glance)> {
        let (now, board) = (clock::now(), self.lock());
        let named = self.names.iter().enumerate();
        named.filter_map(|(at, name)| Some((name.as_str(), board.glance(now, EndpointId(at))?))).collect()
    }

    /// The watchdogs in force at each route that was asked, for short prompts.
    #[must_use]
    pub fn watchdogs(&self, form: Form) -> Vec<Watchdogs> {
        let board = self.lock();
        let in_force = board.watchdogs(form);
        let named = in_force.into_iter().filter_map(|(route, limits)| {
            let spec = board.layout().models.get(route.model.0)?;
            let (model, operation) = (spec.name.clone(), spec.operation);
            Some(Watchdogs { model, operation, endpoint: self.names.get(route.endpoint.0)?.clone(), limits })
        });
        named.collect()
    }

    /// What a status page takes from each of these endpoints. One short look at the board.
    #[must_use]
    pub fn signals(&self, endpoints: &[EndpointId]) -> Vec<RouteSignal> {
        let (now, board) = (clock::now(), self.lock());
        endpoints.iter().map(|id| board.signal(now, *id).unwrap_or_default()).collect()
    }

    /// A model as the board knows it; `None` where none of its routes serves the operation.
    #[must_use]
    pub fn model(&self, name: &str, operation: Operation) -> Option<ModelId> {
        self.models.get(name)?.get(&operation).copied()
    }

    /// Whether this node reaches none of its endpoints: its own network fails.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.lock().cut_off_since().is_some()
    }

    /// An endpoint was reached outside of any call.
    pub fn reached(&self, endpoint: EndpointId) {
        self.lock().reached(clock::now(), endpoint);
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn say(&self, notice: Option<Notice>, endpoint: EndpointId) {
        let endpoint = self.names.get(endpoint.0).map_or("", String::as_str);
        match notice {
            None => {}
            Some(Notice::Opened(until)) => {
                let seconds = until.saturating_duration_since(clock::now()).as_secs();
                tracing::warn!(endpoint, seconds, "an endpoint fails: it is not asked for a while");
                let text = format!("{endpoint} fails: it is not asked for a while");
                Notifier::tell(Event::begins(Kind::Breaker, endpoint, text).of_fleet());
            }
            Some(Notice::Closed) => {
                tracing::info!(endpoint, "an endpoint is well again");
                let text = format!("{endpoint} is well again");
                Notifier::tell(Event::ends(Kind::Breaker, endpoint, text).of_fleet());
            }
            Some(Notice::CredentialAlarm(_)) => {
                tracing::error!(endpoint, "the provider refuses our credential, or its quota is used up");
                let text =
                    format!("the provider of {endpoint} refuses our credential, or its quota is used up");
                Notifier::tell(Event::happens(Kind::Credential, endpoint, text));
            }
            Some(Notice::NodeCutOff) => {
                tracing::error!("no upstream can be reached from this node: its own network fails");
            }
        }
    }
}

impl Leg {
    /// What its watchdogs are, or would be if it were not the last candidate.
    #[must_use]
    pub const fn limits(&self) -> Limits {
        self.ticket.limits()
    }

    /// Whether one of these, refused when the plan was made, may be asked by now.
    #[must_use]
    pub fn is_back(&self, refused: &[EndpointId]) -> bool {
        self.upstreams.lock().is_back(clock::now(), refused)
    }

    /// The first meaningful event is in hand.
    pub fn answered(&mut self, timing: Timing) {
        let endpoint = self.ticket.route().endpoint;
        let ticket = &mut self.ticket;
        let answered =
            |board: &mut Board, now| entropy::with_rng(|rng| board.answered(now, ticket, timing, rng));
        let notice = self.upstreams.with_board(answered);
        self.upstreams.say(notice, endpoint);
    }

    /// How it ended; answers when the endpoint may be asked again.
    pub fn ended(self, outcome: Outcome) -> Option<Instant> {
        let Self { upstreams, ticket, .. } = self;
        let endpoint = ticket.route().endpoint;
        let ended = |board: &mut Board, now| entropy::with_rng(|rng| board.end(now, ticket, outcome, rng));
        let ended = upstreams.with_board(ended);
        upstreams.say(ended.notice, endpoint);
        ended.not_before
    }
}
