//! Plays one run: upstreams, gateway, calls, and then everything that was to be seen of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::books::{Books, Settlement};
use super::case::{Case, Client};
use super::client::{Exchange, Sent};
use super::config::{self, Place};
use super::expect::{self, Failure};
use super::gateway::{Gateway, Sample, free_address, whole};
use super::infra::{self, Act, When};
use super::relay::Command;
use super::stores::{Needs, Stores};
use super::upstream::{Asked, Mode, Scripted, Upstreams};

/// Paths of the admin port; everything else is the public one's.
const ADMIN_PATHS: [&str; 4] = ["/healthz", "/livez", "/readyz", "/metrics"];
/// How long the books may take after the last call.
const SETTLING: Duration = Duration::from_secs(3);
/// The same behind very many calls.
const SETTLING_MANY: Duration = Duration::from_secs(10);
/// How long they may take behind a restart, or when a store that was away is back.
const RESTARTING: Duration = Duration::from_secs(15);
/// How long a process may take to leave beyond its grace time.
const LEAVING: Duration = Duration::from_secs(3);

/// How a run went.
pub enum Outcome {
    Done(Vec<Failure>),
    Skipped(String),
}

/// Everything that was seen of a run.
pub struct Seen {
    pub case: Case,
    pub gateways: Vec<Gateway>,
    /// `None`: the embedded one.
    pub stores: Option<Stores>,
    /// A store that processes share was broken or changed.
    pub stores_broke: bool,
    /// What was asked while it was.
    pub also: BTreeMap<String, Exchange>,
    /// How long after the last repair calls were served as before, if they ever were.
    pub recovered: Option<Option<Duration>>,
    /// What went to Redis meanwhile; `None`: nobody counts.
    pub commands: Option<Vec<Command>>,
    /// Open holds in Redis, and numbers in it that are below zero.
    pub in_redis: Option<(i64, Vec<String>)>,
    pub upstreams: Upstreams,
    /// By entry of the sequence; one entry without a sequence.
    pub calls: Vec<Vec<Exchange>>,
    pub asked: Vec<Asked>,
    pub settlements: Vec<Settlement>,
    pub access: Vec<Value>,
    pub decisions: Vec<Value>,
    pub log: Vec<String>,
    pub metrics: Vec<Sample>,
    /// Samples before the case, to be taken off.
    pub metrics_before: Vec<Sample>,
    /// `None`: there is no process to ask.
    pub holds_open: Option<i64>,
    pub balances: BTreeMap<String, i64>,
    pub start_nano: i64,
    pub verified: Result<(), String>,
    pub rss_kib: (u64, u64),
    pub during: During,
    pub exit: Option<i32>,
    /// After a restart: how long until the books were settled, if they ever were.
    pub restarted: Option<Option<Duration>>,
    _folder: TempDir,
}

/// Plays it and judges what came of it.
pub async fn play(case: &Case) -> Outcome {
    if let Some(why) = infra::not_applicable(case) {
        return Outcome::Skipped(why);
    }
    match run(case).await {
        Ok(outcome) => outcome,
        Err(why) => Outcome::Done(vec![Failure::said("run", "the case to be playable", &why)]),
    }
}

async fn run(case: &Case) -> Result<Outcome, String> {
    let acts = infra::acts(case)?;
    for client in case.calls() {
        Sent::of(client)?;
    }
    let mut world = World::build(case).await?;
    if let Some(why) = infra::surface_missing(case, &world.gateways[0]).await {
        return Ok(Outcome::Skipped(why));
    }
    if case.kind.is_some() {
        return scenario(case, &world).await;
    }
    let of_stores = |(_, act): &&(When, Act)| matches!(act, Act::Store(_));
    let (breaking, other): (Vec<_>, Vec<_>) = acts.iter().partition(of_stores);
    world.perform(case, &other, When::Before).await?;
    if case.expect.rss_growth_mb_max.is_some() {
        world.warm_up(case).await?;
    }
    let before = world.before().await?;
    world.perform(case, &breaking, When::Before).await?;
    let (calls, during) = world.call(case, &acts).await?;
    let mut also = BTreeMap::new();
    if world.is_broken().await {
        for what in case.expect.also.iter().flat_map(BTreeMap::keys) {
            also.insert(what.clone(), ask(&world.gateways[0], what).await);
        }
    }
    world.perform(case, &acts.iter().collect::<Vec<_>>(), When::After).await?;
    let commands = world.stores.as_ref().and_then(Stores::commands);
    let (recovered, asides) = world.recover(case, infra::breaks_stores(&acts)).await?;
    let ending = world.end(case, &acts, &calls, &before).await?;
    let shared = Shared { broke: infra::breaks_stores(&acts), also, recovered, commands, asides };
    let mut seen = world.seen(case, before, (calls, during), ending, shared).await?;
    Ok(Outcome::Done(expect::judge(&mut seen).await))
}

/// What was seen of stores that processes share.
struct Shared {
    broke: bool,
    also: BTreeMap<String, Exchange>,
    recovered: Option<Option<Duration>>,
    commands: Option<Vec<Command>>,
    /// Requests that are none of the case's.
    asides: BTreeSet<String>,
}

/// The processes of a run.
pub struct World {
    pub gateways: Vec<Gateway>,
    pub upstreams: Upstreams,
    pub stores: Option<Stores>,
    books: Books,
    balance: i64,
    folder: TempDir,
}

/// What was there before the case itself began.
struct Before {
    holds: BTreeSet<String>,
    lines: Vec<usize>,
    metrics: Vec<Sample>,
    rss_kib: u64,
}

/// What became of the first process.
struct Ending {
    exit: Option<i32>,
    restarted: Option<Option<Duration>>,
}

/// Statuses that were seen while calls were under way, by what was asked.
type During = BTreeMap<String, BTreeSet<u16>>;

impl World {
    async fn build(case: &Case) -> Result<Self, String> {
        let balance = balance(case).await?;
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let upstreams = start_upstreams(case).await?;
        let stores = match Needs::of(case)? {
            Some(needs) => Some(Stores::start(needs).await?),
            None => None,
        };
        let gateways = start_gateways(case, &upstreams, &folder, balance, stores.as_ref()).await?;
        let books = match &stores {
            Some(stores) => Books::Postgres(stores.database().url.clone()),
            None => Books::of(&folder.path().join("data")),
        };
        Ok(Self { gateways, upstreams, stores, books, balance, folder })
    }

    async fn perform(&self, case: &Case, acts: &[&(When, Act)], now: When) -> Result<(), String> {
        for (_, act) in acts.iter().filter(|(when, _)| *when == now) {
            infra::perform(act, case, &self.gateways, &self.upstreams, self.stores.as_ref()).await?;
        }
        Ok(())
    }

    async fn is_broken(&self) -> bool {
        match &self.stores {
            Some(stores) => stores.is_broken().await,
            None => false,
        }
    }

    /// What is still broken is mended. Waits until calls are served as before; answers how long that took behind the
    /// last thing that was done.
    async fn recover(
        &self,
        case: &Case,
        broke: bool,
    ) -> Result<(Option<Option<Duration>>, BTreeSet<String>), String> {
        let mut asides = BTreeSet::new();
        let Some(stores) = self.stores.as_ref().filter(|_| broke) else { return Ok((None, asides)) };
        if stores.is_broken().await {
            stores.mend().await?;
        }
        self.upstreams.values().for_each(|upstream| upstream.set_mode(Mode::Good));
        let (began, admitted) = (Instant::now(), stores.admitted());
        let mut took = None;
        while took.is_none() && began.elapsed() < RESTARTING {
            let Some(gateway) = self.gateways.iter().find(|gateway| gateway.exit_code().is_none()) else {
                break;
            };
            let answer = infra::recovery_call(case).call(gateway.http).await;
            asides.extend(answer.headers.find("x-request-id").map(str::to_owned));
            // Served, and by the store that was away.
            let served =
                answer.status == Some(200) || (self.upstreams.is_empty() && answer.status == Some(502));
            if served && (admitted.is_none() || stores.admitted() > admitted) {
                took = Some(began.elapsed());
            } else {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        self.upstreams.values().for_each(|upstream| upstream.set_mode(Mode::Script));
        Ok((Some(took), asides))
    }

    /// As many calls as the case makes at once: what allocators keep of a first load is no leak.
    async fn warm_up(&mut self, case: &Case) -> Result<(), String> {
        for client in case.calls() {
            let few =
                Client { repeat: client.repeat.map(|n| n.min(200)), schedule_ms: vec![], ..client.clone() };
            group(case, &few, &self.gateways, false).await?;
        }
        settled(&mut self.gateways, SETTLING).await;
        self.upstreams.values().for_each(|upstream| upstream.forget());
        Ok(())
    }

    async fn before(&mut self) -> Result<Before, String> {
        // What the preparation did must not look like something that the calls did.
        settled(&mut self.gateways, SETTLING).await;
        told(&mut self.gateways).await;
        if let Some(stores) = &self.stores {
            stores.forget();
        }
        Ok(Before {
            holds: self.books.settlements()?.into_iter().map(|s| s.hold).collect(),
            lines: self.gateways.iter().map(|gateway| gateway.log().len()).collect(),
            metrics: metrics_of(&mut self.gateways).await,
            rss_kib: self.gateways[0].rss_kib(),
        })
    }

    /// All calls, with what happens meanwhile.
    async fn call(&self, case: &Case, acts: &[(When, Act)]) -> Result<(Vec<Vec<Exchange>>, During), String> {
        let during = Arc::new(Mutex::new(During::new()));
        let calling = load(case, &self.gateways, acts);
        let acting = timed(case, self, acts);
        let watching = watch(case, &self.gateways[0], Arc::clone(&during));
        let both = async { tokio::join!(calling, acting) };
        let (calls, acted) = tokio::select! {
            done = both => done,
            never = watching => match never {},
        };
        acted?;
        let during = during.lock().expect("what was watched").clone();
        Ok((calls?, during))
    }

    /// Waits until everything is booked, or the process has left as it was to.
    async fn end(
        &mut self,
        case: &Case,
        acts: &[(When, Act)],
        calls: &[Vec<Exchange>],
        before: &Before,
    ) -> Result<Ending, String> {
        let first = &mut self.gateways[0];
        let exit = if case.expect.exit_code.is_some() {
            first.wait(grace(case) + LEAVING).await
        } else {
            // One that was killed takes a moment to be gone.
            first.wait(Duration::from_millis(10)).await
        };
        let mut restarted = None;
        let restart = |(when, act): &(When, Act)| *when == When::AfterKill && matches!(act, Act::Restart);
        if exit.is_some() && acts.iter().any(restart) {
            let again = Instant::now();
            tokio::task::block_in_place(|| first.restart())?;
            restarted = Some(settled(&mut self.gateways, RESTARTING).await.then(|| again.elapsed()));
        } else if exit.is_none() {
            let count: usize = calls.iter().map(Vec::len).sum();
            let patience = match count {
                _ if infra::breaks_stores(acts) => RESTARTING,
                0..100 => SETTLING,
                _ => SETTLING_MANY,
            };
            settled(&mut self.gateways, patience).await;
            logged(&self.gateways, &before.lines, count).await;
        }
        if case.expect.rss_growth_mb_max.is_some() || case.expect.open_upstream_connections.is_some() {
            calm(case, &self.gateways[0], &self.upstreams, before.rss_kib).await;
        }
        Ok(Ending { exit, restarted })
    }

    async fn seen(
        mut self,
        case: &Case,
        before: Before,
        (calls, during): (Vec<Vec<Exchange>>, During),
        ending: Ending,
        shared: Shared,
    ) -> Result<Seen, String> {
        let alive = self.gateways[0].exit_code().is_none();
        let metrics = metrics_of(&mut self.gateways).await;
        let (mut log, mut access, mut decisions) = (vec![], vec![], vec![]);
        for (gateway, from) in self.gateways.iter().zip(&before.lines) {
            let lines = gateway.log();
            let new = lines.iter().skip(*from);
            for line in new.filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
                if line["request_id"].as_str().is_some_and(|id| shared.asides.contains(id)) {
                    continue;
                }
                match line["target"].as_str() {
                    Some("access") => access.push(line),
                    // Who was not asked, or asked again since nobody saw it, made no attempt.
                    Some("decision") if line["outcome"] == "refused" || line["outcome"] == "resent" => {}
                    Some("decision") => decisions.push(line),
                    _ => {}
                }
            }
            log.extend(lines);
        }
        let in_redis = match &self.stores {
            // Holds of a process that is gone wait for its next start.
            Some(stores) if self.gateways.iter().all(|gateway| gateway.exit_code().is_none()) => {
                Some((stores.open_holds(RESTARTING).await?, stores.negative().await?))
            }
            Some(stores) => Some((0, stores.negative().await?)),
            None => None,
        };
        let settlements = self
            .books
            .settlements()?
            .into_iter()
            .filter(|s| !before.holds.contains(&s.hold) && !shared.asides.contains(&s.request));
        let mut asked: Vec<Asked> = self.upstreams.values().flat_map(|upstream| upstream.asked()).collect();
        asked.sort_by_key(|asked| asked.at);
        Ok(Seen {
            case: case.clone(),
            stores_broke: shared.broke,
            also: shared.also,
            recovered: shared.recovered,
            commands: shared.commands,
            in_redis,
            calls,
            asked,
            settlements: settlements.collect(),
            access,
            decisions,
            log,
            holds_open: alive.then(|| {
                let open = metrics.iter().filter(|sample| sample.name == "tollgate_holds_open");
                open.map(|sample| whole(sample.value)).sum()
            }),
            metrics,
            metrics_before: before.metrics,
            balances: self.books.balances()?,
            start_nano: self.balance,
            verified: self.books.verify(),
            rss_kib: (before.rss_kib, self.gateways[0].rss_kib()),
            during,
            exit: ending.exit,
            restarted: ending.restarted,
            upstreams: self.upstreams,
            gateways: self.gateways,
            stores: self.stores,
            _folder: self.folder,
        })
    }
}

/// The balance of `alpha`, measured in holds of the case's own request where the case says so.
async fn balance(case: &Case) -> Result<i64, String> {
    let Some(text) = &case.fixture.balance else {
        return Ok(case.fixture.balance_nano.unwrap_or(config::BALANCE_NANO));
    };
    let pattern = regex::Regex::new(r"^([\d.]+) ?x hold(?:\(request\))?$").map_err(|e| e.to_string())?;
    let found =
        pattern.captures(text).ok_or_else(|| format!("balance `{text}` is not known to the runner"))?;
    let times: f64 = found[1].parse().map_err(|_| "no number")?;
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let mut alone = case.clone();
    alone.fixture.balance = None;
    let mut keyed = case.clone();
    keyed.fixture.balance_nano = Some(1_000_000_000_000);
    let upstreams = start_upstreams(case).await?;
    upstreams.values().for_each(|upstream| upstream.set_mode(Mode::Good));
    let mut gateways = start_gateways(&keyed, &upstreams, &folder, 1_000_000_000_000, None).await?;
    let client = alone.calls().next().ok_or("the case has no call")?;
    let sent = Sent::of(client)?;
    sent.call(gateways[0].for_call(&sent)).await;
    settled(&mut gateways, SETTLING).await;
    let settlements = Books::of(&folder.path().join("data")).settlements()?;
    let held = settlements.first().ok_or("the hold of the request cannot be measured: there was none")?.held;
    // Two digits are enough of a factor such as 3.5.
    Ok(whole((times * 100.0).round()) * held / 100)
}

async fn start_upstreams(case: &Case) -> Result<Upstreams, String> {
    let mut upstreams = Upstreams::new();
    for upstream in &case.upstreams {
        upstreams.insert(upstream.name.clone(), Scripted::start(upstream, case.script_repeat).await?);
    }
    Ok(upstreams)
}

/// Without stores: one process on the embedded one.
async fn start_gateways(
    case: &Case,
    upstreams: &Upstreams,
    folder: &TempDir,
    balance: i64,
    stores: Option<&Stores>,
) -> Result<Vec<Gateway>, String> {
    let most = case.calls().filter_map(|client| client.instances).max().unwrap_or(1).max(1);
    let count = match stores {
        Some(_) => most.max(infra::instances_named(case)),
        None => 1,
    };
    let mut gateways = vec![];
    for index in 0..count {
        let store = match stores {
            Some(stores) => stores.config(&folder.path().join(format!("node{index}"))).await,
            None => json!({ "embedded": { "path": folder.path().join("data").display().to_string() } }),
        };
        let place = Place { http: free_address(), admin: free_address(), h2c: free_address(), store: &store };
        let config = config::config(case, upstreams, &place, balance)?;
        let level = config::log_level(case);
        // The relays before stores go on while it is waited for.
        let start = |config: &Value| {
            let name = format!("gateway{index}");
            tokio::task::block_in_place(|| Gateway::start(folder.path(), &name, config, level.clone()))
        };
        let started = match start(&config) {
            // A cycle may be refused when it is read; the gateway then runs with what is left.
            Err(why)
                if config.get("aliases").is_some() && (why.contains("cycle") || why.contains("circular")) =>
            {
                let mut without = config.clone();
                without.as_object_mut().map(|members| members.remove("aliases"));
                start(&without)
            }
            started => started,
        };
        gateways.push(started?);
    }
    Ok(gateways)
}

/// All calls, in the shape that the case gives them.
async fn load(case: &Case, gateways: &[Gateway], acts: &[(When, Act)]) -> Result<Vec<Vec<Exchange>>, String> {
    let full_minute = acts.iter().any(|(_, act)| matches!(act, Act::FullMinute));
    let mut groups = vec![];
    for client in case.calls() {
        if let Some(ms) = client.delay_ms {
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
        groups.push(group(case, client, gateways, full_minute).await?);
    }
    Ok(groups)
}

async fn group(
    case: &Case,
    client: &Client,
    gateways: &[Gateway],
    full_minute: bool,
) -> Result<Vec<Exchange>, String> {
    let total = client.repeat.or(client.concurrent).unwrap_or(1);
    let keys = config::random_keys(case)?;
    let one = async |index: usize| {
        // Who is gone is not asked: a balancer would not either.
        let alive: Vec<&Gateway> = match gateways {
            [only] => vec![only],
            all => all.iter().filter(|gateway| gateway.exit_code().is_none()).collect(),
        };
        let gateway = alive.get(index % alive.len().max(1)).copied().unwrap_or(&gateways[0]);
        let mut sent = Sent::of(client).expect("it was made before");
        if let Some(key) = keys.get(index % keys.len().max(1)) {
            sent.headers.set("authorization", &format!("Bearer {key}"));
        }
        sent.gateway_pid = gateway.pid();
        let path = client.path().split('?').next().unwrap_or_default();
        let to = if ADMIN_PATHS.contains(&path) { gateway.admin } else { gateway.for_call(&sent) };
        sent.call(to).await
    };
    if !client.schedule_ms.is_empty() {
        let earliest = client.schedule_ms.iter().min().copied().unwrap_or(0);
        let lead = Duration::from_millis(earliest.min(0).unsigned_abs());
        let mut wait = Duration::ZERO;
        if full_minute {
            wait = Duration::from_secs(60).saturating_sub(infra::since_minute());
            if wait < lead {
                wait += Duration::from_secs(60);
            }
        }
        let zero = Instant::now() + wait.max(lead);
        let calls = client.schedule_ms.iter().enumerate().map(async |(index, ms)| {
            let offset = Duration::from_millis(ms.unsigned_abs());
            let at = if *ms < 0 { zero.checked_sub(offset).unwrap_or(zero) } else { zero + offset };
            tokio::time::sleep_until(at.into()).await;
            one(index).await
        });
        return Ok(futures::future::join_all(calls).await);
    }
    let parallel = client.concurrent.unwrap_or(1).max(1);
    // The order of the calls is kept; as one ends, the next begins.
    let next = Mutex::new(0..total);
    let workers = (0..parallel.min(total)).map(async |_| {
        let mut done = vec![];
        loop {
            let index = next.lock().expect("the next call").next();
            let Some(index) = index else { return done };
            done.push((index, one(index).await));
        }
    });
    let mut done: Vec<(usize, Exchange)> =
        futures::future::join_all(workers).await.into_iter().flatten().collect();
    done.sort_by_key(|(index, _)| *index);
    Ok(done.into_iter().map(|(_, exchange)| exchange).collect())
}

/// Actions at their times, while calls are under way.
async fn timed(case: &Case, world: &World, acts: &[(When, Act)]) -> Result<(), String> {
    let began = Instant::now();
    for (when, act) in acts {
        let When::AtMs(ms) = when else { continue };
        tokio::time::sleep_until((began + Duration::from_millis(*ms)).into()).await;
        infra::perform(act, case, &world.gateways, &world.upstreams, world.stores.as_ref()).await?;
    }
    Ok(())
}

/// Asks what `during` names again and again.
async fn watch(case: &Case, gateway: &Gateway, seen: Arc<Mutex<During>>) -> std::convert::Infallible {
    let paths: Vec<String> = case.expect.during.iter().flatten().map(|(what, _)| what.clone()).collect();
    loop {
        for what in &paths {
            let exchange = ask(gateway, what).await;
            if let Some(status) = exchange.status {
                seen.lock().expect("what was watched").entry(what.clone()).or_default().insert(status);
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// `GET /readyz`, on the port that it belongs to.
pub async fn ask(gateway: &Gateway, what: &str) -> Exchange {
    let (method, path) = what.split_once(' ').unwrap_or(("GET", what));
    let mut sent = Sent::new(method, path);
    if ADMIN_PATHS.contains(&path) {
        return sent.call(gateway.admin).await;
    }
    sent.headers.set("authorization", "Bearer sk-test-alpha");
    sent.call(gateway.http).await
}

fn grace(case: &Case) -> Duration {
    let ms = |key: &str, default| case.config.get(key).and_then(Value::as_u64).unwrap_or(default);
    Duration::from_millis(ms("grace_ms", 10_000) + ms("pre_drain_ms", 0))
}

async fn metrics_of(gateways: &mut [Gateway]) -> Vec<Sample> {
    let mut samples = vec![];
    for gateway in gateways {
        if gateway.exit_code().is_none() {
            samples.extend(gateway.metrics().await);
        }
    }
    samples
}

/// Waits until nothing is in flight, no hold is open and the ledger has everything.
async fn settled(gateways: &mut [Gateway], patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        let samples = metrics_of(gateways).await;
        let zero = |name: &str| samples.iter().filter(|s| s.name == name).all(|s| s.value == 0.0);
        let names = ["tollgate_holds_open", "tollgate_in_flight", "tollgate_journal_unposted"];
        if !samples.is_empty() && names.into_iter().all(zero) {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits a little until every request that is counted has its access line: lines come in batches.
async fn told(gateways: &mut [Gateway]) {
    let until = Instant::now() + Duration::from_secs(1);
    loop {
        let samples = metrics_of(gateways).await;
        let counted = samples.iter().filter(|s| s.name == "tollgate_requests_total").map(|s| whole(s.value));
        let lines = gateways
            .iter()
            .map(|gateway| gateway.log().iter().filter(|line| line.contains(r#""target":"access""#)).count());
        let lines = i64::try_from(lines.sum::<usize>()).unwrap_or(i64::MAX);
        if lines >= counted.sum::<i64>() || Instant::now() > until {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits a little for the access line of every call; a call that was refused as HTTP has none.
async fn logged(gateways: &[Gateway], before: &[usize], calls: usize) {
    let until = Instant::now() + Duration::from_millis(300);
    loop {
        let lines = |(gateway, before): (&Gateway, &usize)| {
            gateway.log().iter().skip(*before).filter(|line| line.contains(r#""target":"access""#)).count()
        };
        if gateways.iter().zip(before).map(lines).sum::<usize>() >= calls || Instant::now() > until {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits up to ten seconds for connections and memory to come back.
async fn calm(case: &Case, gateway: &Gateway, upstreams: &Upstreams, rss_before: u64) {
    let until = Instant::now() + Duration::from_secs(10);
    let limit = case.expect.rss_growth_mb_max.map_or(u64::MAX, |mb| rss_before + mb * 1024);
    loop {
        let open: usize = upstreams.values().map(|upstream| upstream.open_connections()).sum();
        let fits =
            case.expect.open_upstream_connections.as_ref().is_none_or(|w| w.judge(&open.into(), 0).is_ok());
        if (fits && gateway.rss_kib() <= limit) || Instant::now() > until {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Checks that are told in words.
async fn scenario(case: &Case, world: &World) -> Result<Outcome, String> {
    let check = case.expect.check.as_deref().unwrap_or_default();
    let gateways = &world.gateways;
    if check.starts_with("SIGTERM with no traffic: exit 0 within pre_drain_ms + 1000") {
        let pre = case.config.get("pre_drain_ms").and_then(Value::as_u64).unwrap_or(0);
        let limit = Duration::from_millis(pre + 1000);
        let began = Instant::now();
        super::client::signal_process(gateways[0].pid(), "SIGTERM");
        let code = gateways[0].wait(limit + LEAVING).await;
        let took = began.elapsed();
        let good = code == Some(0) && took <= limit;
        let seen = format!("exit {code:?} after {} ms", took.as_millis());
        let expected = format!("exit 0 within {} ms", limit.as_millis());
        return Ok(Outcome::Done(if good { vec![] } else { vec![Failure::said("check", &expected, &seen)] }));
    }
    if let Some(outcome) = super::slots::play(case, world, check).await {
        return outcome.map(Outcome::Done);
    }
    Err(format!("scenario `{check}` is not known to the runner"))
}
