//! Asks every route of every model, all the time, whether it answers: before a caller finds out.
//!
//! A probe is a call of ours: the smallest that its dialect has ([`filters::probe`]), sent as a call is (`ask`). It is
//! honest: only what a caller would have taken for an answer is one. A refusal, an error, silence, a 200 with something else
//! in it, a cost that cannot be told: all of that is a route that is not well.
//!
//! What it costs is ours. The books keep it under an account of its own that pays nothing and needs nothing: our cost at
//! the provider, and no charge. Where the provider may have worked for nothing (an answer that broke off, silence) the most
//! that it may cost is booked as given up. A day has an allowance; a probe that might pass it is not sent, and that is said.
//!
//! Of a fleet one node asks ([`crate::fleet::turn`]). A pass ends the wait of an open breaker, as a free check does. A
//! failure opens none: one question in a minute and a half is no rate, and calls judge by themselves (docs/probes.md).

mod ask;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use filters::ids::{AccountId, EndpointId, KeyDigest};
use filters::money::Amount;
use filters::probe::{Allowance, May, Schedule};
use pingora::connectors::http::Connector;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::books::Books;
use crate::config::watch::Probes;
use crate::drain::Drain;
use crate::fleet::turn::Turn;
use crate::notice::{Event, Kind, Notifier};
use crate::ops::Metrics;
use crate::ops::heartbeat;
use crate::pool::{Pool, Snapshot};
use crate::record::{ProbeRow, Records};
use crate::store::{Admit, Charge, Embedded, Holds as _, Ticket};
use crate::{clock, entropy};
use ask::{Heard, Question};

/// How often to look which routes are due.
const LOOK: Duration = Duration::from_millis(250);
/// Probes at the same time.
const AT_ONCE_MAX: usize = 8;
/// Routes that wait for their turn; those beyond are asked a round later.
const WAITING_MAX: usize = 4096;
/// How many rounds back it is looked what was known before.
const LATELY: i64 = 4;
/// The word of a probe whose cost cannot be told.
const UNPRICED: &str = "unpriced";

/// Whoever asks.
pub struct Prober {
    pub config: Probes,
    pub pool: Arc<Pool>,
    /// This process's own store: a hold of nothing needs no pool of the fleet's.
    pub holds: Arc<Embedded>,
    pub books: Arc<Books>,
    pub records: Arc<Records>,
    pub metrics: Arc<Metrics>,
    pub drain: Arc<Drain>,
    pub turn: Arc<Turn>,
}

/// A route of a model, by names: the catalogue may be another one by the time it is asked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Route {
    model: String,
    endpoint: String,
}

impl Route {
    fn of(row: &ProbeRow) -> Self {
        Self { model: row.model.clone(), endpoint: row.endpoint.clone() }
    }

    /// As notifications name it.
    fn subject(&self) -> String {
        format!("{} at {}", self.model, self.endpoint)
    }
}

/// What is remembered between looks.
struct State {
    snapshot: Option<Arc<Snapshot>>,
    schedule: Schedule<Route>,
    waiting: VecDeque<Route>,
    /// What the books keep probes under, and what they have cost today; known once the turn is ours.
    books: Option<(AccountId, Allowance)>,
}

/// Whether there is anything to ask.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Due {
    Something,
    Nothing,
}

/// What one probe came to.
struct Outcome {
    row: ProbeRow,
    id: EndpointId,
    snapshot: Arc<Snapshot>,
    reserved: Amount,
    cost: Amount,
}

impl Prober {
    /// Asks until the process leaves.
    pub async fn run(&self) {
        let job = heartbeat::job("probes", self.config.every);
        let connector = Arc::new(Connector::new(None));
        let mut state = State {
            snapshot: None,
            schedule: Schedule::new(self.config.every),
            waiting: VecDeque::new(),
            books: None,
        };
        let mut under_way: JoinSet<Option<Outcome>> = JoinSet::new();
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                Some(ended) = under_way.join_next() => {
                    if let Ok(Some(result)) = ended {
                        self.conclude(&mut state, result).await;
                        job.done();
                    }
                    continue;
                }
            }
            if self.drain.is_closing() {
                return job.is_over();
            }
            if !self.turn.is_ours() {
                // Another node asks.
                if state.books.take().is_some() {
                    self.rest(&mut state);
                }
                job.done();
                continue;
            }
            if state.books.is_none() {
                match self.open_books().await {
                    Ok(books) => state.books = Some(books),
                    Err(error) => {
                        job.failed(error);
                        continue;
                    }
                }
            }
            if self.look(&mut state, &mut under_way, &connector) == Due::Nothing {
                job.done();
            }
        }
    }

    /// The account, and what was spent today: also by whoever asked before. What that one found not to be well was told.
    async fn open_books(&self) -> Result<(AccountId, Allowance), String> {
        let (books, records, name) =
            (Arc::clone(&self.books), Arc::clone(&self.records), self.config.account.clone());
        let per_day = self.config.cost_max_per_day;
        let lately = i64::try_from(self.config.every.as_millis()).unwrap_or(i64::MAX).saturating_mul(LATELY);
        let opened = tokio::task::spawn_blocking(move || {
            let now = clock::unix_ms();
            let rows = records.probes_since(now.saturating_sub(lately)).map_err(|error| error.to_string())?;
            let latest: BTreeMap<Route, bool> =
                rows.into_iter().map(|row| (Route::of(&row), row.ok)).collect();
            for (route, _) in latest.into_iter().filter(|(_, ok)| !ok) {
                Notifier::tell(Event::begins(Kind::Probe, route.subject(), "").known());
            }
            let account = books.ensure_account(&name).map_err(|error| error.to_string())?;
            let spent =
                records.probes_cost_since(Allowance::midnight(now)).map_err(|error| error.to_string())?;
            Ok((account, Allowance::new(per_day, now, spent)))
        });
        opened.await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Begins what is due. Answers [`Due::Nothing`] where nothing is to be asked at all, now or later today.
    fn look(
        &self,
        state: &mut State,
        under_way: &mut JoinSet<Option<Outcome>>,
        connector: &Arc<Connector>,
    ) -> Due {
        let snapshot = self.pool.load();
        if !state.snapshot.as_ref().is_some_and(|known| Arc::ptr_eq(known, &snapshot)) {
            state.snapshot = Some(Arc::clone(&snapshot));
            self.forget_routes();
        }
        let routes = routes(&self.config, &snapshot);
        if routes.is_empty() {
            return Due::Nothing;
        }
        let all: Vec<Route> = routes.keys().cloned().collect();
        for due in entropy::with_rng(|rng| state.schedule.due(clock::now(), &all, rng)) {
            if state.waiting.len() < WAITING_MAX && !state.waiting.contains(&due) {
                state.waiting.push_back(due);
            }
        }
        while under_way.len() < AT_ONCE_MAX {
            let Some(route) = state.waiting.pop_front() else { break };
            let Some(id) = routes.get(&route).copied() else { continue };
            let Some(model) = snapshot.catalogue.models.get(&route.model) else { continue };
            let Some(question) = Question::new(&snapshot, model, id) else { continue };
            let Some((account, allowance)) = &mut state.books else { break };
            let Ok(reserved) = question.cost_max() else {
                let row = row(&route, &question, Some(UNPRICED), Duration::ZERO);
                let result = Outcome {
                    row,
                    id,
                    snapshot: Arc::clone(&snapshot),
                    reserved: Amount::ZERO,
                    cost: Amount::ZERO,
                };
                under_way.spawn(async move { Some(result) });
                continue;
            };
            match allowance.reserve(clock::unix_ms(), reserved) {
                May::Send => {}
                May::Not { first } => {
                    self.hold_back(first);
                    return Due::Nothing;
                }
            }
            if !allowance.is_used_up() {
                self.go_on();
            }
            let (holds, connector, timeout) =
                (Arc::clone(&self.holds), Arc::clone(connector), self.config.timeout);
            let account = *account;
            under_way.spawn(async move {
                Box::pin(probe(&holds, &connector, account, route, question, reserved, timeout)).await
            });
        }
        Due::Something
    }

    /// What metrics said of routes that this node asks no more, or that may have gone.
    fn forget_routes(&self) {
        self.metrics.watch.probe_success.reset();
        self.metrics.watch.probe_seconds.reset();
    }

    /// Another node asks, and says what becomes of it.
    fn rest(&self, state: &mut State) {
        state.waiting.clear();
        self.forget_routes();
        self.metrics.watch.probes_held_back.set(0);
    }

    /// The day's allowance carries every probe, for all that is known.
    fn go_on(&self) {
        let held_back = &self.metrics.watch.probes_held_back;
        if held_back.get() > 0 {
            held_back.set(0);
            tracing::info!("probes may cost something again: routes are asked");
            let text = "a new day's allowance of probes has begun: routes are asked again";
            Notifier::tell(Event::ends(Kind::ProbesHeldBack, "", text).of_fleet());
        }
    }

    fn hold_back(&self, first: bool) {
        self.metrics.watch.probes_held_back.set(1);
        if first {
            let most = self.config.cost_max_per_day;
            tracing::error!(%most, "probes.cost_max_per_day is used up: no route is asked until midnight, UTC");
            let text = format!("probes have cost {most} today: no route is asked until midnight, UTC");
            Notifier::tell(Event::begins(Kind::ProbesHeldBack, "", text).of_fleet());
        }
    }

    /// Takes a result to everybody who wants to know.
    async fn conclude(&self, state: &mut State, result: Outcome) {
        let Outcome { row, id, snapshot, reserved, cost } = result;
        if let Some((_, allowance)) = &mut state.books {
            allowance.spend(row.at_ms, reserved, cost);
        }
        let ProbeRow { model, endpoint, ok, reason, took_ms, .. } = &row;
        let metrics = &self.metrics.watch;
        let label = [model.as_str(), endpoint.as_str()];
        metrics.probe_success.with_label_values(&label).set(i64::from(*ok));
        metrics
            .probe_seconds
            .with_label_values(&label)
            .set(Duration::from_millis(took_ms.unsigned_abs()).as_secs_f64());
        metrics.probe_cost_nano.inc_by(u64::try_from(cost.nano()).unwrap_or_default());
        let subject = Route::of(&row).subject();
        if *ok {
            snapshot.upstreams.probe_answered(id);
            Notifier::tell(Event::ends(
                Kind::Probe,
                &subject,
                format!("{endpoint} answers again for `{model}`"),
            ));
        } else {
            tracing::warn!(model, endpoint, reason, took_ms, "a route does not answer its probe");
            let text = format!("{endpoint} does not answer for `{model}`: {reason}");
            Notifier::tell(Event::begins(Kind::Probe, &subject, text).with("reason", reason));
        }
        let records = Arc::clone(&self.records);
        let kept = tokio::task::spawn_blocking(move || records.keep_probe(&row, cost)).await;
        if let Ok(Err(error)) = kept {
            tracing::debug!(%error, "a probe is not kept");
        }
    }
}

/// Every route of every model that is asked, with its endpoint. Credentials of one place are one route.
fn routes(config: &Probes, snapshot: &Snapshot) -> HashMap<Route, EndpointId> {
    let models = snapshot.catalogue.models.values().filter(|model| !config.skip.contains(&model.name));
    let of = models.flat_map(|model| model.routes.iter().map(move |id| (model, *id)));
    let places = of.filter_map(|(model, id)| {
        let endpoint = snapshot.endpoint(id).ok().filter(|endpoint| endpoint.place == id)?;
        Some((Route { model: model.name.clone(), endpoint: endpoint.name.clone() }, id))
    });
    places.collect()
}

/// Asks one route and books what that cost; `None`: nothing can be booked now, so nothing was asked.
async fn probe(
    holds: &Embedded,
    connector: &Connector,
    account: AccountId,
    route: Route,
    question: Question,
    reserved: Amount,
    timeout: Duration,
) -> Option<Outcome> {
    let ticket = admit(holds, account, &question).await?;
    let began = clock::now();
    let Heard { failure, used, may_have_cost } = question.ask(connector, timeout).await;
    let took = clock::now().saturating_duration_since(began);
    let priced = question.cost(&used.usage);
    let reason = match (&failure, &priced) {
        (Some(failure), _) => Some(failure.word()),
        (None, Err(_)) => Some(UNPRICED),
        (None, Ok(_)) => None,
    };
    let cost = if failure.is_none() { priced.unwrap_or(reserved) } else { Amount::ZERO };
    let lost = if may_have_cost { reserved } else { Amount::ZERO };
    let row = row(&route, &question, reason, took);
    let served = Some((question.model.name.clone(), question.model.price.version));
    let endpoint = route.endpoint;
    let charge =
        Charge { used, provider_cost: cost, lost, endpoint, served, attempts: 1, ..Charge::default() };
    holds.settle(ticket, charge).await;
    let cost = cost.checked_add(lost).unwrap_or(Amount::MAX);
    Some(Outcome { row, id: question.endpoint, snapshot: question.snapshot, reserved, cost })
}

/// A hold of nothing: the books know a probe as they know a call, and nobody pays for it.
async fn admit(holds: &Embedded, account: AccountId, question: &Question) -> Option<Ticket> {
    let admit = Admit {
        hold: entropy::hold_id(),
        account,
        amount: Amount::ZERO,
        request: format!("probe_{}", entropy::request_id()),
        models: vec![question.model.name.clone()],
        key: KeyDigest([0; 32]),
        price_version: question.model.price.version,
        tokens: 0,
        scopes: Arc::default(),
    };
    match holds.admit(admit).await {
        Ok(ticket) => Some(ticket),
        Err(deny) => {
            tracing::debug!(%deny, "a probe cannot be booked now, so it is not sent");
            None
        }
    }
}

fn row(route: &Route, question: &Question, reason: Option<&str>, took: Duration) -> ProbeRow {
    let region = question.endpoint().map(|endpoint| endpoint.provider.region.clone()).unwrap_or_default();
    ProbeRow {
        at_ms: clock::unix_ms(),
        model: route.model.clone(),
        endpoint: route.endpoint.clone(),
        region,
        ok: reason.is_none(),
        reason: reason.unwrap_or("ok").to_owned(),
        took_ms: i64::try_from(took.as_millis()).unwrap_or(i64::MAX),
    }
}
