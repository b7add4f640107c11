//! What is so that nobody says by himself: looked for once a second, and told when it begins and when it ends.
//!
//! Late jobs, models without a route, servers that do not answer, a refused config, certificates that end soon, low
//! balances, calls that cost more than there was. What has its own moment (a breaker that opens, drift, a probe that
//! fails) is told by whoever sees it.
//!
//! Here too the latest word on every job goes into the metrics and into the records, where the page of the service's state
//! finds those of all nodes.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::heartbeat::Rule;
use filters::low_balance::{Crossing, LowBalance};
use filters::money::Amount;
use tokio::time::MissedTickBehavior;
use x509_parser::pem::Pem;

use super::{Event, Kind, Notifier, Scope};
use crate::books::{Books, Fleet as _};
use crate::clock;
use crate::config::watch::Watching;
use crate::fleet::{Node, turn::Turn};
use crate::ops::Metrics;
use crate::ops::heartbeat::{self, Job};
use crate::pool::{Pool, Snapshot};
use crate::record::{BeatRow, RecordError, Records};
use crate::store::Holds;

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(1);
/// How often the records hear how jobs do.
const KEEP: Duration = Duration::from_secs(15);
/// How often balances are looked at.
const BALANCES: Duration = Duration::from_secs(15);
/// How often the days of certificates are counted: a new one is in use within a second, and is said to be within these.
const CERTIFICATES: Duration = Duration::from_secs(10);
/// A certificate that ends within so many days is told of.
const CERTIFICATE_DAYS: i64 = 14;
/// How often old records go.
const RETENTION: Duration = Duration::from_secs(3600);
/// The longest file of a certificate that is read, in bytes.
const CERTIFICATE_BYTES_MAX: u64 = 1 << 20;
/// Accounts of which it is remembered on which side of their thresholds they are.
const ACCOUNTS_MAX: usize = 100_000;

/// What is looked at.
pub struct Watcher {
    pub config: Watching,
    pub pool: Arc<Pool>,
    pub holds: Arc<dyn Holds>,
    pub books: Arc<Books>,
    pub records: Arc<Records>,
    pub metrics: Arc<Metrics>,
    pub fleet: Option<Arc<Node>>,
    pub turn: Arc<Turn>,
    /// Files of our own certificates.
    pub certificates: Vec<PathBuf>,
    pub node: String,
}

/// Something that is so.
#[derive(Clone, Debug)]
struct Fact {
    kind: Kind,
    subject: String,
    scope: Scope,
    begins: String,
    ends: String,
}

/// What is remembered from look to look.
struct Known {
    facts: BTreeMap<String, Fact>,
    shortfall_nano: u64,
    certificates: Vec<Fact>,
    counted: Option<Instant>,
    failures: HashMap<&'static str, u64>,
}

impl Watcher {
    /// Never ends: run it as a service.
    pub async fn run(&self) {
        tokio::join!(self.look(), self.keep_beats(), self.forget(), self.watch_balances());
    }

    async fn look(&self) {
        let job = heartbeat::job("watch", LOOK);
        let mut known = Known {
            facts: BTreeMap::new(),
            shortfall_nano: self.metrics.shortfall_nano.get(),
            certificates: vec![],
            counted: None,
            failures: HashMap::new(),
        };
        let mut tick = every(LOOK);
        loop {
            tick.tick().await;
            let late = self.look_at_jobs(&mut known);
            let mut facts = late;
            facts.extend(self.look_at_routes(&self.pool.load()));
            facts.extend(self.look_at_node());
            facts.extend(self.look_at_certificates(&mut known).await);
            turn_into_events(&mut known.facts, facts);
            self.look_at_shortfall(&mut known);
            job.done();
        }
    }

    /// Metrics of all jobs; answers those that are late.
    fn look_at_jobs(&self, known: &mut Known) -> Vec<Fact> {
        let now = clock::unix_ms();
        let metrics = &self.metrics.watch;
        let rule = Rule { grace_ms: millis(self.config.heartbeats.late_after), spacing_ms: 0 };
        let mut late = vec![];
        for job in heartbeat::all() {
            let (seen, label) = (job.seen(), &[job.name]);
            metrics.job_last_success.with_label_values(label).set(seconds(seen.succeeded_ms));
            metrics.job_period.with_label_values(label).set(seconds(seen.period_ms));
            let failures = job.failures();
            let before = known.failures.insert(job.name, failures).unwrap_or_default();
            metrics.job_failures.with_label_values(label).inc_by(failures.saturating_sub(before));
            let is_late = seen.is_late(now, rule);
            metrics.job_late.with_label_values(label).set(i64::from(is_late));
            if is_late {
                late.push(self.late(&job, now));
            }
        }
        for fact in late.iter().filter(|fact| !known.facts.contains_key(&fact.key())) {
            tracing::error!(job = fact.subject, "{}: see docs/runbooks/heartbeat.md", fact.begins);
        }
        late
    }

    fn late(&self, job: &Job, now: i64) -> Fact {
        let seen = job.seen();
        let since = now.saturating_sub(seen.succeeded_ms.max(seen.known_ms)) / 1000;
        let why = if seen.has_failed() { format!(": {}", job.failure()) } else { String::new() };
        Fact {
            kind: Kind::HeartbeatLate,
            subject: job.name.to_owned(),
            scope: Scope::Node,
            begins: format!(
                "the periodic job `{}` of {} was not done for {since} s{why}",
                job.name, self.node
            ),
            ends: format!("the periodic job `{}` of {} is done again", job.name, self.node),
        }
    }

    /// Models that nobody can be asked for.
    fn look_at_routes(&self, snapshot: &Snapshot) -> Vec<Fact> {
        let glances = snapshot.upstreams.glances().into_iter();
        let may_be_asked: HashMap<&str, bool> =
            glances.map(|(name, glance)| (name, glance.admits())).collect();
        let refused = |model: &&Arc<crate::config::checked::Model>| {
            let mut routes = model.routes.iter().filter_map(|id| snapshot.catalogue.endpoints.get(id.0));
            !routes.any(|endpoint| may_be_asked.get(endpoint.name.as_str()).copied().unwrap_or(true))
        };
        let models = snapshot.catalogue.models.values().filter(refused);
        let fact = |model: &Arc<crate::config::checked::Model>| Fact {
            kind: Kind::NoRoute,
            subject: model.name.clone(),
            scope: Scope::Fleet,
            begins: format!("no route of the model `{}` can be asked", model.name),
            ends: format!("the model `{}` has a route again", model.name),
        };
        models.map(fact).collect()
    }

    /// How this node does.
    fn look_at_node(&self) -> Vec<Fact> {
        let mut facts = vec![];
        let node = &self.node;
        let mut is_so = |kind, begins: String, ends: &str| {
            let subject = node.clone();
            let ends = format!("{node}: {ends}");
            facts.push(Fact { kind, subject, scope: Scope::Node, begins: format!("{node}: {begins}"), ends });
        };
        if self.pool.load().upstreams.is_cut_off() {
            is_so(Kind::CutOff, "no upstream can be reached".to_owned(), "upstreams can be reached again");
        }
        if let Some(why) = self.holds.trouble() {
            is_so(Kind::NotAdmitting, format!("no call is admitted: {why}"), "calls are admitted again");
        }
        if self.metrics.config.refused.get() != 0 {
            let begins = "the config file or the fleet's catalogue is refused; the old one serves";
            is_so(Kind::ConfigRefused, begins.to_owned(), "the config is good again");
        }
        if let Some(fleet) = &self.fleet {
            if fleet.why_read_only().is_some() {
                let begins = "Postgres does not answer; calls go on, the books are read-only";
                is_so(Kind::Postgres, begins.to_owned(), "Postgres answers again");
            }
            let refused = fleet.refused_shards();
            if refused > 0 {
                let begins = "Redis does not answer; calls go on with this node's own money";
                is_so(Kind::Redis, begins.to_owned(), "Redis answers again");
            }
        }
        facts
    }

    async fn look_at_certificates(&self, known: &mut Known) -> Vec<Fact> {
        let now = clock::now();
        let is_due = known.counted.is_none_or(|at| now.saturating_duration_since(at) >= CERTIFICATES);
        if is_due && !self.certificates.is_empty() {
            known.counted = Some(now);
            let (files, before) = (self.certificates.clone(), known.certificates.clone());
            let looked = tokio::task::spawn_blocking(move || {
                let now = clock::unix_ms() / 1000;
                files.iter().filter_map(|file| look_at(file, now, &before)).collect()
            });
            known.certificates = looked.await.unwrap_or_default();
        }
        known.certificates.clone()
    }

    fn look_at_shortfall(&self, known: &mut Known) {
        let shortfall = self.metrics.shortfall_nano.get();
        let more = shortfall.saturating_sub(known.shortfall_nano);
        known.shortfall_nano = shortfall;
        if more > 0 {
            let amount = Amount::from_nano(i64::try_from(more).unwrap_or(i64::MAX));
            let text = format!("{}: calls cost {amount} more than their holds and balances", self.node);
            Notifier::tell(
                Event::happens(Kind::Shortfall, &self.node, text).with("nano_dollars", more.to_string()),
            );
        }
    }

    /// Says to the records how the jobs of this process do.
    async fn keep_beats(&self) {
        let job = heartbeat::job("records_beats", KEEP);
        let mut tick = every(KEEP);
        loop {
            tick.tick().await;
            job.begins();
            let beats: Vec<BeatRow> = heartbeat::all().iter().map(|job| self.row(job)).collect();
            let records = Arc::clone(&self.records);
            let kept =
                tokio::task::spawn_blocking(move || records.keep_beats(&beats, clock::unix_ms())).await;
            job.joined(&kept);
        }
    }

    fn row(&self, job: &Job) -> BeatRow {
        let seen = job.seen();
        BeatRow {
            job: job.name.to_owned(),
            period_ms: seen.period_ms,
            started_ms: seen.started_ms,
            succeeded_ms: seen.succeeded_ms,
            failed_ms: seen.failed_ms,
            failure: job.failure(),
            node: self.node.clone(),
        }
    }

    /// Lets old records go, and what of a fleet's books has no say any more, on the node whose turn it is.
    async fn forget(&self) {
        let job = heartbeat::job("records_retention", RETENTION);
        let mut tick = every(RETENTION);
        loop {
            tick.tick().await;
            job.begins();
            if !self.turn.is_ours() {
                job.done();
                continue;
            }
            let records = Arc::clone(&self.records);
            let ledger = self.fleet.as_ref().map(|fleet| fleet.ledger());
            let done = tokio::task::spawn_blocking(move || {
                records.forget_probes(clock::unix_ms())?;
                ledger.map_or(Ok(()), |ledger| ledger.forget(clock::unix_ms()).map(drop))?;
                Ok::<_, RecordError>(())
            });
            job.joined(&done.await);
        }
    }

    async fn watch_balances(&self) {
        let notifications = &self.config.notifications;
        if !notifications.low_balance.is_positive() && notifications.low_balances.is_empty() {
            return std::future::pending().await;
        }
        let job = heartbeat::job("balances", BALANCES);
        let mut known: HashMap<String, LowBalance> = HashMap::new();
        let mut tick = every(BALANCES);
        loop {
            tick.tick().await;
            job.begins();
            let books = Arc::clone(&self.books);
            let found = tokio::task::spawn_blocking(move || books.balances()).await;
            job.joined(&found);
            for (account, balance) in found.ok().and_then(Result::ok).unwrap_or_default() {
                self.look_at_balance(&mut known, account, balance);
            }
        }
    }

    fn look_at_balance(&self, known: &mut HashMap<String, LowBalance>, account: String, balance: Amount) {
        let notifications = &self.config.notifications;
        let own = notifications.low_balances.get(&account).copied();
        let threshold = own.unwrap_or(notifications.low_balance);
        // The account of probes has no money and needs none.
        let is_house = self.config.probes.as_ref().is_some_and(|probes| probes.account == account);
        if is_house || (known.len() >= ACCOUNTS_MAX && !known.contains_key(&account)) {
            return;
        }
        let side = known.entry(account.clone()).or_default();
        let event = match side.look(balance, threshold) {
            None => return,
            Some(Crossing::Low) => {
                let text = format!("the balance of `{account}` is {balance}, below {threshold}");
                Event::begins(Kind::LowBalance, &account, text)
            }
            Some(Crossing::Well) => {
                Event::ends(Kind::LowBalance, &account, format!("the balance of `{account}` is {balance}"))
            }
        };
        Notifier::tell(event.of_fleet().with("balance_nano", balance.nano().to_string()));
    }
}

impl Fact {
    fn key(&self) -> String {
        format!("{}:{}", self.kind.word(), self.subject)
    }

    fn event(&self, is_so: bool) -> Event {
        let event = if is_so {
            Event::begins(self.kind, &self.subject, &self.begins)
        } else {
            Event::ends(self.kind, &self.subject, &self.ends)
        };
        match self.scope {
            Scope::Node => event,
            Scope::Fleet => event.of_fleet(),
        }
    }
}

/// Tells what is so now and was not, and what was so and is not.
fn turn_into_events(known: &mut BTreeMap<String, Fact>, facts: Vec<Fact>) {
    let now: BTreeMap<String, Fact> = facts.into_iter().map(|fact| (fact.key(), fact)).collect();
    for (key, fact) in &now {
        if !known.contains_key(key) {
            Notifier::tell(fact.event(true));
        }
    }
    for (key, fact) in known.iter() {
        if !now.contains_key(key) {
            Notifier::tell(fact.event(false));
        }
    }
    *known = now;
}

/// Whether a certificate ends soon, or has ended. Of a file that cannot be read what was known before stays so.
fn look_at(file: &Path, unix_seconds: i64, before: &[Fact]) -> Option<Fact> {
    let name = file.display().to_string();
    let Some(until) = ends_at(file) else {
        return before.iter().find(|fact| fact.subject == name).cloned();
    };
    let days = until.saturating_sub(unix_seconds).div_euclid(86_400);
    let begins = if days < 0 {
        format!("the certificate in {name} has ended")
    } else {
        format!("the certificate in {name} ends in {days} days")
    };
    (days < CERTIFICATE_DAYS).then(|| Fact {
        kind: Kind::Certificate,
        scope: Scope::Node,
        begins,
        ends: format!("the certificate in {name} was renewed"),
        subject: name,
    })
}

/// When the first certificate of a file ends: seconds since 1970.
fn ends_at(file: &Path) -> Option<i64> {
    if std::fs::metadata(file).ok()?.len() > CERTIFICATE_BYTES_MAX {
        return None;
    }
    let bytes = std::fs::read(file).ok()?;
    let first = Pem::iter_from_buffer(&bytes).next()?.ok()?;
    Some(first.parse_x509().ok()?.validity().not_after.timestamp())
}

fn every(span: Duration) -> tokio::time::Interval {
    let mut tick = tokio::time::interval(span);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick
}

fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a time in milliseconds has 41 bits")]
fn seconds(ms: i64) -> f64 {
    ms as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_told_of_two_weeks_before_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cert.pem");
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2030, 1, 31);
        let key = rcgen::KeyPair::generate().unwrap();
        std::fs::write(&file, params.self_signed(&key).unwrap().pem()).unwrap();
        let january = |day: i64| 1_893_456_000 + (day - 1) * 86_400;
        assert!(look_at(&file, january(10), &[]).is_none());
        let known = look_at(&file, january(20), &[]).unwrap();
        assert!(known.begins.contains("ends in 11 days"), "{known:?}");
        assert!(look_at(&file, january(40), &[]).unwrap().begins.ends_with("has ended"));
        assert!(look_at(&folder.path().join("none"), january(20), &[]).is_none());
        std::fs::remove_file(&file).unwrap();
        let still = look_at(&file, january(20), std::slice::from_ref(&known)).unwrap();
        assert_eq!(still.begins, known.begins, "a file that is away was not renewed");
    }
}
