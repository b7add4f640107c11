//! Who looks, and who reads.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use filters::heartbeat::{Rule, Seen as Beaten};
use filters::ids::EndpointId;
use filters::slo::month::Month;
use filters::slo::{Allowance, MINUTE_MS, start_of};
use filters::status::Level;
use filters::status::days::{Counted, DAYS, WHOLE, bars, begin_ms, day_of};
use filters::status::incident::Troubled;
use filters::status::now::{Calls, RouteSignal, Steady, look};
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;

use super::StatusPage;
use super::news::news;
use super::view::{Bars, Goal, Job, JobState, MODELS_MAX, Model, REGION_BARS_MAX, Region, Route, View};
use crate::books::Fleet;
use crate::clock;
use crate::config::checked;
use crate::notice::Notifier;
use crate::ops::Metrics;
use crate::pool::{Pool, Snapshot};
use crate::record::incidents::{Incident, Verb, VerbError};
use crate::record::minutes::Tally;
use crate::record::{BeatRow, Home, RecordError, Records};

/// How often the board is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How often a page is made, unless something has got worse.
const MAKE: Duration = Duration::from_secs(5);
/// How often records are read, and told of incidents.
const READ: Duration = Duration::from_secs(5);
/// How often what changes slowly is read: days, the month, jobs.
const READ_SLOWLY: Duration = Duration::from_secs(30);
/// What callers got in this time counts as now, in milliseconds.
const CALLS_MS: i64 = 3 * 60_000;
/// A probe older than this is no news, in milliseconds.
const PROBES_MS: i64 = 10 * 60_000;

/// Looks, reads, and has pages made.
pub struct Watch {
    pub page: Arc<StatusPage>,
    pub pool: Arc<Pool>,
    /// Where records are. They are opened when they are first read: nobody serves the worse for want of them.
    pub home: Home,
    /// `None`: there are no other nodes.
    pub fleet: Option<Arc<dyn Fleet>>,
    pub metrics: Arc<Metrics>,
    /// What callers are promised.
    pub goal: Allowance,
    pub seen: Seen,
}

/// What the two tasks know.
#[derive(Default)]
pub struct Seen {
    read: ArcSwap<Read>,
    steady: Mutex<HashMap<Place, Steady>>,
    troubled: ArcSwap<Vec<Troubled>>,
    /// Somebody has changed an incident.
    changed: Notify,
    records: Mutex<Option<Arc<Records>>>,
}

/// A model, or one region of it.
type Place = (String, Option<String>);

/// What the records said last.
#[derive(Clone, Default)]
struct Read {
    incidents: Vec<Incident>,
    /// What callers got of late.
    calls: HashMap<Place, Calls>,
    /// Whether the last probe of a route went well.
    probes: HashMap<String, bool>,
    bars: HashMap<Place, Bars>,
    jobs: Vec<Job>,
    goal: Option<Goal>,
    /// They could not be read or written.
    failed: bool,
}

impl Watch {
    /// Goes on until it is dropped.
    pub async fn run(self: Arc<Self>) {
        tokio::select! {
            () = self.look_on() => {}
            () = Arc::clone(&self).read_on() => {}
        }
    }

    /// Does what a person asks for with incidents; the page follows soon. Blocks.
    ///
    /// # Errors
    /// As [`Records::incident`].
    pub fn incident(&self, verb: Verb) -> Result<Vec<Incident>, VerbError> {
        let found = self.records()?.incident(clock::unix_ms(), verb)?;
        self.seen.changed.notify_one();
        Ok(found)
    }

    fn records(&self) -> Result<Arc<Records>, RecordError> {
        let mut records = self.seen.records.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(records) = &*records {
            return Ok(Arc::clone(records));
        }
        let opened = Arc::new(self.home.open()?);
        *records = Some(Arc::clone(&opened));
        Ok(opened)
    }

    async fn look_on(&self) {
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut made: Option<(Instant, BTreeMap<String, Option<Level>>)> = None;
        loop {
            tick.tick().await;
            let view = self.look();
            let levels: BTreeMap<_, _> =
                view.models.iter().map(|model| (model.name.clone(), model.level)).collect();
            let is_due = made.as_ref().is_none_or(|(at, before)| {
                let is_worse =
                    levels.iter().any(|(name, level)| before.get(name).is_some_and(|was| level > was));
                is_worse || clock::now().saturating_duration_since(*at) >= MAKE
            });
            if is_due {
                self.measure(&view);
                self.page.show(view);
                made = Some((clock::now(), levels));
            }
        }
    }

    async fn read_on(self: Arc<Self>) {
        let mut tick = tokio::time::interval(READ);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut slowly: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = self.seen.changed.notified() => {}
            }
            let is_away = self.fleet.as_ref().is_some_and(|fleet| fleet.why_read_only().is_some());
            if !self.page.config().enabled || is_away {
                continue;
            }
            let slow = slowly.is_none_or(|at| clock::now().saturating_duration_since(at) >= READ_SLOWLY);
            let this = Arc::clone(&self);
            // One at a time: a database that takes its time is asked no more often.
            let done = tokio::task::spawn_blocking(move || this.read(slow)).await;
            let failed = match done {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(error) => Some(error.to_string()),
            };
            if failed.is_none() && slow {
                slowly = Some(clock::now());
            }
            let before = self.seen.read.load();
            if before.failed != failed.is_some() {
                match &failed {
                    Some(error) => tracing::warn!(
                        error,
                        "the status page cannot read its records: it shows the last known"
                    ),
                    None => tracing::info!("the status page reads its records again"),
                }
                self.seen.read.store(Arc::new(Read { failed: failed.is_some(), ..Read::clone(&before) }));
            }
        }
    }

    /// Tells the records of trouble, and reads them. Blocks.
    fn read(&self, slow: bool) -> Result<(), RecordError> {
        let (now_ms, records) = (clock::unix_ms(), self.records()?);
        let before = self.seen.read.load_full();
        let troubled = self.seen.troubled.load_full();
        let has_open = before.incidents.iter().any(|incident| incident.closed_ms.is_none());
        if !troubled.is_empty() || has_open {
            records.follow_incidents(now_ms, &troubled)?;
        }
        let mut read = Read { failed: false, ..Read::clone(&before) };
        read.incidents = records.incidents(begin_ms(day_of(now_ms) - DAYS))?;
        news(&before.incidents, &read.incidents, now_ms).into_iter().for_each(Notifier::tell);
        read.probes.clear();
        for probe in records.probes_since(now_ms - PROBES_MS)? {
            read.probes.insert(probe.endpoint, probe.ok);
        }
        read.calls.clear();
        for Tally { model, region, good, bad, .. } in
            records.minutes(None, start_of(now_ms - CALLS_MS, MINUTE_MS), now_ms)?
        {
            for place in [(model.clone(), None), (model, Some(region))] {
                let calls = read.calls.entry(place).or_default();
                calls.good = calls.good.saturating_add(good);
                calls.bad = calls.bad.saturating_add(bad);
            }
        }
        if slow {
            read.jobs = jobs(records.beats()?, now_ms);
            read.bars = bars_of(records.days(None, begin_ms(day_of(now_ms) - DAYS), now_ms)?, day_of(now_ms));
            let month = Month::of(now_ms).map(Month::start_ms).unwrap_or_default();
            let mut sum = Counted::default();
            for Tally { good, bad, .. } in records.days(None, month, now_ms)? {
                sum = sum.and(Counted { good, bad });
            }
            read.goal = goal(self.goal, sum);
        }
        self.seen.read.store(Arc::new(read));
        Ok(())
    }

    /// One look at everything that is in memory.
    fn look(&self) -> View {
        let (now, now_ms) = (clock::now(), clock::unix_ms());
        let (config, snapshot, read) = (self.page.config(), self.pool.load(), self.seen.read.load_full());
        let mut steady = self.seen.steady.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<&String> = snapshot.catalogue.models.keys().collect();
        names.retain(|name| !config.hidden_models.contains(name));
        names.sort_unstable();
        steady.retain(|(model, _), _| snapshot.catalogue.models.contains_key(model));
        let blank: Bars = bars(day_of(now_ms), []).into();
        let mut troubled = vec![];
        let mut models = vec![];
        for name in &names {
            let Some(model) = snapshot.catalogue.models.get(*name) else { continue };
            let routes = routes_of(&snapshot, model, &read.probes);
            let mut shown = |region: Option<&str>| {
                let place = (name.to_string(), region.map(str::to_owned));
                let calls = read.calls.get(&place).copied().unwrap_or_default();
                let bars = read.bars_of(&place, &blank);
                let of_it: Vec<RouteSignal> = routes
                    .iter()
                    .filter(|route| region.is_none_or(|region| route.region == region))
                    .map(|route| route.signal)
                    .collect();
                let one = steady.entry(place).or_default();
                let level = one.look(now, look(&of_it, calls));
                (level, one.since(), bars)
            };
            let (level, since, bars) = shown(None);
            let regions: BTreeSet<&str> =
                routes.iter().map(|route| route.region).filter(|region| !region.is_empty()).collect();
            let regions = regions.into_iter().map(|region| {
                let (level, _, bars) = shown(Some(region));
                Region { name: region.to_owned(), level, bars }
            });
            let regions = regions.collect();
            if let (Some(level), Some(since)) = (level, since) {
                let ago = i64::try_from(now.saturating_duration_since(since).as_millis()).unwrap_or(i64::MAX);
                troubled.push(Troubled {
                    model: name.to_string(),
                    level,
                    since_ms: now_ms.saturating_sub(ago),
                });
            }
            let route = |route: &Known<'_>| Route {
                name: route.name.to_owned(),
                level: look(&[route.signal], Calls::default()),
            };
            models.push(Model {
                name: name.to_string(),
                level: level.max(told(&read.incidents, name)),
                regions,
                routes: if config.detail { routes.iter().map(route).collect() } else { vec![] },
                bars,
            });
        }
        drop(steady);
        self.seen.troubled.store(Arc::new(troubled));
        let more_models = bounded(&mut models);
        View {
            at_ms: now_ms.div_euclid(MINUTE_MS).saturating_mul(MINUTE_MS),
            title: config.title.clone(),
            url: config.url.clone(),
            models,
            more_models,
            incidents: visible(&read.incidents, &config.hidden_models),
            jobs: read.jobs.clone(),
            goal: read.goal,
            read_only: read.failed
                || self.fleet.as_ref().is_some_and(|fleet| fleet.why_read_only().is_some()),
        }
    }

    fn measure(&self, view: &View) {
        self.metrics.status.reset();
        for Model { name, level, .. } in &view.models {
            if let Some(level) = level {
                self.metrics.status.with_label_values(&[name]).set(i64::from(level.number()));
            }
        }
        self.metrics.incidents_open.set(i64::try_from(view.open().count()).unwrap_or(i64::MAX));
    }
}

impl Read {
    /// The bars of a place, which end on the day on which `blank` ends, those of a place without calls.
    fn bars_of(&self, place: &Place, blank: &Bars) -> Bars {
        let day = |bars: &Bars| bars.last().map(|(day, _)| *day);
        match (self.bars.get(place), day(blank)) {
            (Some(known), today) if day(known) == today => Arc::clone(known),
            // Nothing was read since midnight.
            (Some(known), Some(today)) => bars(today, known.iter().copied()).into(),
            (_, _) => Arc::clone(blank),
        }
    }
}

/// Leaves as many models, and bars of their regions, as a page shows. Answers how many models there are beyond.
fn bounded(models: &mut Vec<Model>) -> usize {
    let more = models.len().saturating_sub(MODELS_MAX);
    models.truncate(MODELS_MAX);
    let regions = models.iter_mut().flat_map(|model| &mut model.regions);
    regions.skip(REGION_BARS_MAX).for_each(|region| region.bars = Arc::default());
    more
}

/// Bars of models, and of their regions.
fn bars_of(tallies: Vec<Tally>, today: i64) -> HashMap<Place, Bars> {
    let mut days: HashMap<Place, Vec<(i64, Counted)>> = HashMap::new();
    for Tally { model, region, start_ms, good, bad, .. } in tallies {
        for place in [(model.clone(), None), (model, Some(region))] {
            days.entry(place).or_default().push((day_of(start_ms), Counted { good, bad }));
        }
    }
    days.into_iter().map(|(place, days)| (place, bars(today, days).into())).collect()
}

/// What is known of a route.
struct Known<'a> {
    name: &'a str,
    region: &'a str,
    signal: RouteSignal,
}

fn routes_of<'a>(
    snapshot: &'a Snapshot,
    model: &checked::Model,
    probes: &HashMap<String, bool>,
) -> Vec<Known<'a>> {
    let ids: Vec<EndpointId> = model.routes.clone();
    let signals = snapshot.upstreams.signals(&ids);
    let route = |(id, signal): (EndpointId, RouteSignal)| {
        let endpoint = snapshot.catalogue.endpoints.get(id.0)?;
        let probe = probes.get(&endpoint.name).copied();
        let signal = RouteSignal {
            known: signal.known || probe.is_some(),
            shaky: signal.shaky || probe == Some(false),
            ..signal
        };
        Some(Known { name: &endpoint.name, region: &endpoint.provider.region, signal })
    };
    ids.into_iter().zip(signals).filter_map(route).collect()
}

/// What a person says of a model, in an incident that is open.
fn told(incidents: &[Incident], model: &str) -> Option<Level> {
    let about = |incident: &&Incident| {
        let names = incident.models.is_empty() || incident.models.contains(model);
        incident.closed_ms.is_none() && incident.edited && names
    };
    incidents.iter().filter(about).map(|incident| incident.severity).max()
}

/// The incidents without models that are not shown; one that is about them alone is left out.
fn visible(incidents: &[Incident], hidden: &[String]) -> Vec<Incident> {
    let shown = |incident: &Incident| {
        let mut incident = incident.clone();
        let was_about_all = incident.models.is_empty();
        incident.models.retain(|model| !hidden.contains(model));
        (was_about_all || !incident.models.is_empty()).then_some(incident)
    };
    incidents.iter().filter_map(shown).collect()
}

/// How a month does so far beside what was promised; `None`: without calls there is nothing to say.
fn goal(promised: Allowance, month: Counted) -> Option<Goal> {
    let share = month.share()?;
    let calls = u128::from(month.good) + u128::from(month.bad);
    let allowed = calls * u128::from(promised.per_million());
    let used = u128::from(month.bad) * 1_000_000;
    let left = (allowed.saturating_sub(used) * u128::from(WHOLE)).checked_div(allowed).unwrap_or_default();
    let left = u32::try_from(left).unwrap_or(WHOLE);
    Some(Goal { goal: promised.objective_per_million() / (1_000_000 / WHOLE), share, left })
}

/// Jobs of all nodes, each as it does where it does worst. A node none of whose jobs has moved for some minutes has left.
fn jobs(mut beats: Vec<BeatRow>, now_ms: i64) -> Vec<Job> {
    const GONE_MS: i64 = 3 * MINUTE_MS;
    /// As much later than its period a job may be done before it is shown as late.
    const RULE: Rule = Rule { grace_ms: 4 * MINUTE_MS, spacing_ms: 0 };
    let moved = |beat: &BeatRow| beat.started_ms.max(beat.succeeded_ms).max(beat.failed_ms);
    let mut nodes: HashMap<String, i64> = HashMap::new();
    for beat in &beats {
        let last = nodes.entry(beat.node.clone()).or_default();
        *last = moved(beat).max(*last);
    }
    let is_here = |node: &str| nodes.get(node).is_some_and(|at| now_ms.saturating_sub(*at) < GONE_MS);
    if nodes.keys().any(|node| is_here(node)) {
        beats.retain(|beat| is_here(&beat.node));
    }
    let mut jobs: BTreeMap<String, Job> = BTreeMap::new();
    for beat in beats {
        let BeatRow { job: name, period_ms, started_ms, succeeded_ms, failed_ms, failure: _, node: _ } = beat;
        // One that has never begun has nothing to be late for.
        let known_ms = if started_ms > 0 { started_ms } else { now_ms };
        let seen = Beaten { period_ms, known_ms, started_ms, succeeded_ms, failed_ms };
        let state = if seen.has_failed() {
            JobState::Failed
        } else if seen.is_late(now_ms, RULE) {
            JobState::Late
        } else {
            JobState::Well
        };
        let done_ms = (succeeded_ms > 0).then(|| start_of(succeeded_ms, MINUTE_MS));
        let job = Job { name, state, done_ms };
        let known = jobs.entry(job.name.clone()).or_insert_with(|| job.clone());
        known.state = known.state.max(job.state);
        known.done_ms = known.done_ms.min(job.done_ms);
    }
    jobs.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(node: &str, job: &str, succeeded_ms: i64, failed_ms: i64) -> BeatRow {
        let (node, job, period_ms) = (node.to_owned(), job.to_owned(), 10_000);
        BeatRow {
            node,
            job,
            period_ms,
            started_ms: succeeded_ms,
            succeeded_ms,
            failed_ms,
            ..BeatRow::default()
        }
    }

    fn states(beats: Vec<BeatRow>, now_ms: i64) -> Vec<(String, JobState)> {
        jobs(beats, now_ms).into_iter().map(|job| (job.name, job.state)).collect()
    }

    #[test]
    fn a_job_is_shown_as_on_the_node_where_it_does_worst() {
        let now_ms = 10_000_000;
        let beats = vec![
            beat("a", "late", now_ms - 1_000, 0),
            beat("b", "late", now_ms - 250_001, 0),
            beat("b", "fails", now_ms - 2_000, now_ms - 1_000),
            beat("a", "well", now_ms - 250_000, now_ms - 260_000),
            BeatRow { started_ms: 0, ..beat("a", "waits", 0, 0) },
        ];
        let expected = [
            ("fails", JobState::Failed),
            ("late", JobState::Late),
            ("waits", JobState::Well),
            ("well", JobState::Well),
        ];
        assert_eq!(states(beats, now_ms), expected.map(|(name, state)| (name.to_owned(), state)));
    }

    #[test]
    fn a_node_that_has_left_is_late_for_nothing_unless_nobody_is_there() {
        let now_ms = 10_000_000;
        let left = beat("left", "sweep", now_ms - 900_000, 0);
        let here = beat("here", "sweep", now_ms - 1_000, 0);
        let well = [("sweep".to_owned(), JobState::Well)];
        assert_eq!(states(vec![left.clone(), here], now_ms), well);
        let late = [("sweep".to_owned(), JobState::Late)];
        assert_eq!(states(vec![left], now_ms), late);
    }

    #[test]
    fn a_region_has_its_own_bars_and_a_model_those_of_all_of_them() {
        let today = 1_000;
        let tally = |region: &str, day, good, bad| Tally {
            model: "m".to_owned(),
            region: region.to_owned(),
            start_ms: begin_ms(day),
            good,
            bad,
            slow: 0,
        };
        let tallies = vec![
            tally("eu", today, 3, 0),
            tally("us", today, 0, 2),
            tally("", today, 0, 1),
            tally("eu", 999, 1, 0),
        ];
        let read = Read { bars: bars_of(tallies, today), ..Read::default() };
        let of = |region: Option<&str>, day: i64, now: i64| {
            let bars = read.bars_of(&("m".to_owned(), region.map(str::to_owned)), &bars(now, []).into());
            assert_eq!((bars.len(), bars.last().unwrap().0), (90, now));
            let found = bars.iter().find(|(number, _)| *number == day).unwrap();
            (found.1.good, found.1.bad)
        };
        assert_eq!(of(None, today, today), (3, 3), "also what no region is to blame for");
        assert_eq!((of(Some("eu"), today, today), of(Some("eu"), 999, today)), ((3, 0), (1, 0)));
        assert_eq!((of(Some("us"), today, today), of(Some("us"), 999, today)), ((0, 2), (0, 0)));
        assert_eq!(of(Some("asia"), today, today), (0, 0));
        assert_eq!(of(Some("eu"), today, today + 1), (3, 0), "yesterday's, until they are read again");
    }

    #[test]
    fn of_too_many_models_and_regions_the_first_are_shown_whole() {
        let blank: Bars = bars(1_000, []).into();
        let region =
            |number: usize| Region { name: number.to_string(), level: None, bars: Arc::clone(&blank) };
        let model = |number: usize| Model {
            name: number.to_string(),
            level: None,
            regions: vec![region(1), region(2)],
            routes: vec![],
            bars: Arc::clone(&blank),
        };
        let mut models: Vec<Model> = (0..MODELS_MAX + 3).map(model).collect();
        assert_eq!((bounded(&mut models), models.len()), (3, MODELS_MAX));
        let with_bars =
            models.iter().flat_map(|model| &model.regions).filter(|region| !region.bars.is_empty());
        assert_eq!(with_bars.count(), REGION_BARS_MAX);
    }

    #[test]
    fn what_is_left_of_a_month_is_what_its_bad_calls_did_not_use() {
        let promised = Allowance::of_objective(999_500).unwrap();
        let of = |good, bad| goal(promised, Counted { good, bad });
        assert_eq!(of(0, 0), None);
        assert_eq!(of(100_000, 0), Some(Goal { goal: 99_950, share: 100_000, left: 100_000 }));
        assert_eq!(of(99_980, 20).unwrap().left, 60_000);
        assert_eq!(of(9, 1).unwrap().left, 0, "more than all of it");
    }
}
