//! Plays one run: upstreams, gateway, calls, and then everything that was to be seen of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::books::{Books, Settlement};
use super::case::{Case, Client};
use super::client::{Exchange, Sent};
use super::config::{self, Place};
use super::expect::{self, Failure};
use super::gateway::{Gateway, Sample, free_address, value};
use super::infra::{self, Act, When};
use super::upstream::{Asked, Mode, Scripted, Upstreams};

/// Paths of the admin port; everything else is the public one's.
const ADMIN_PATHS: [&str; 4] = ["/healthz", "/livez", "/readyz", "/metrics"];
/// How long the books may take after the last call.
const SETTLING: Duration = Duration::from_secs(3);
/// The same behind very many calls.
const SETTLING_MANY: Duration = Duration::from_secs(10);
/// How long they may take behind a restart.
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
    pub upstreams: Upstreams,
    pub books: Books,
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
    pub during: BTreeMap<String, BTreeSet<u16>>,
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
    let balance = balance(case).await?;
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let upstreams = start_upstreams(case).await?;
    let mut gateways = start_gateways(case, &upstreams, &folder, balance)?;
    if let Some(why) = infra::surface_missing(case, &gateways[0]).await {
        return Ok(Outcome::Skipped(why));
    }
    if case.kind.is_some() {
        return scenario(case, &mut gateways).await;
    }
    for (_, act) in acts.iter().filter(|(when, _)| *when == When::Before) {
        infra::perform(act, case, &mut gateways, &upstreams).await?;
    }
    if case.expect.rss_growth_mb_max.is_some() {
        warm_up(case, &mut gateways, &upstreams).await?;
    }
    let books = Books::of(&folder.path().join("data"));
    let old: BTreeSet<String> = books.settlements()?.into_iter().map(|s| s.hold).collect();
    let lines_before: Vec<usize> = gateways.iter().map(|gateway| gateway.log().len()).collect();
    let metrics_before = metrics_of(&mut gateways).await;
    let rss_before = gateways[0].rss_kib();

    let during = Arc::new(Mutex::new(BTreeMap::new()));
    let (calls, acted) = {
        let calling = load(case, &gateways, &acts);
        let acting = timed(&gateways, &acts);
        let watching = watch(case, &gateways[0], Arc::clone(&during));
        tokio::pin!(calling);
        tokio::pin!(watching);
        let both = async { tokio::join!(&mut calling, acting) };
        tokio::select! {
            done = both => done,
            never = &mut watching => match never {},
        }
    };
    let calls = calls?;
    acted?;
    for (_, act) in acts.iter().filter(|(when, _)| *when == When::After) {
        infra::perform(act, case, &mut gateways, &upstreams).await?;
    }

    let expects_exit = case.expect.exit_code.is_some();
    let exit = if expects_exit {
        gateways[0].wait(grace(case) + LEAVING).await
    } else {
        tokio::time::sleep(Duration::from_millis(10)).await;
        gateways[0].exit_code()
    };
    let mut restarted = None;
    if exit.is_some() && acts.iter().any(|(when, act)| *when == When::AfterKill && matches!(act, Act::Restart)) {
        let again = Instant::now();
        gateways[0].restart()?;
        restarted = Some(settled(&mut gateways, RESTARTING).await.then(|| again.elapsed()));
    } else if exit.is_none() {
        let count: usize = calls.iter().map(Vec::len).sum();
        let patience = if count >= 100 { SETTLING_MANY } else { SETTLING };
        settled(&mut gateways, patience).await;
        logged(&gateways, &lines_before, count).await;
    }
    let alive = gateways[0].exit_code().is_none();
    if case.expect.rss_growth_mb_max.is_some() || case.expect.open_upstream_connections.is_some() {
        calm(case, &gateways[0], &upstreams, rss_before).await;
    }
    let metrics = metrics_of(&mut gateways).await;
    let mut log: Vec<String> = vec![];
    let (mut access, mut decisions) = (vec![], vec![]);
    for (gateway, before) in gateways.iter().zip(&lines_before) {
        let lines = gateway.log();
        for line in lines.iter().skip(*before).filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            match line["target"].as_str() {
                Some("access") => access.push(line),
                Some("decision") => decisions.push(line),
                _ => {}
            }
        }
        log.extend(lines);
    }
    let settlements = books.settlements()?.into_iter().filter(|s| !old.contains(&s.hold)).collect();
    let mut asked: Vec<Asked> = upstreams.values().flat_map(|upstream| upstream.asked()).collect();
    asked.sort_by_key(|asked| asked.at);
    let during = during.lock().expect("what was watched").clone();
    let mut seen = Seen {
        case: case.clone(),
        upstreams,
        calls,
        asked,
        settlements,
        access,
        decisions,
        log,
        holds_open: alive.then(|| value(&metrics, "tollgate_holds_open", "").unwrap_or(-1.0) as i64),
        metrics,
        metrics_before,
        balances: books.balances()?,
        start_nano: balance,
        verified: books.verify(),
        rss_kib: (rss_before, gateways[0].rss_kib()),
        during,
        exit,
        restarted,
        books,
        gateways,
        _folder: folder,
    };
    let failures = expect::judge(&mut seen).await;
    Ok(Outcome::Done(failures))
}

/// The balance of `alpha`, measured in holds of the case's own request where the case says so.
async fn balance(case: &Case) -> Result<i64, String> {
    let Some(text) = &case.fixture.balance else {
        return Ok(case.fixture.balance_nano.unwrap_or(config::BALANCE_NANO));
    };
    let pattern = regex::Regex::new(r"^([\d.]+) ?x hold(?:\(request\))?$").map_err(|e| e.to_string())?;
    let found = pattern.captures(text).ok_or_else(|| format!("balance `{text}` is not known to the runner"))?;
    let times: f64 = found[1].parse().map_err(|_| "no number")?;
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let mut alone = case.clone();
    alone.fixture.balance = None;
    let mut keyed = case.clone();
    keyed.fixture.balance_nano = Some(1_000_000_000_000);
    let upstreams = start_upstreams(case).await?;
    upstreams.values().for_each(|upstream| upstream.set_mode(Mode::Good));
    let mut gateways = start_gateways(&keyed, &upstreams, &folder, 1_000_000_000_000)?;
    let client = alone.calls().next().ok_or("the case has no call")?;
    Sent::of(client)?.call(gateways[0].http).await;
    settled(&mut gateways, SETTLING).await;
    let settlements = Books::of(&folder.path().join("data")).settlements()?;
    let held = settlements.first().ok_or("the hold of the request cannot be measured: there was none")?.held;
    Ok((times * held as f64) as i64)
}

async fn start_upstreams(case: &Case) -> Result<Upstreams, String> {
    let mut upstreams = Upstreams::new();
    for upstream in &case.upstreams {
        upstreams.insert(upstream.name.clone(), Scripted::start(upstream, case.script_repeat).await?);
    }
    Ok(upstreams)
}

fn start_gateways(case: &Case, upstreams: &Upstreams, folder: &TempDir, balance: i64) -> Result<Vec<Gateway>, String> {
    let count = case.calls().filter_map(|client| client.instances).max().unwrap_or(1).max(1);
    let data = folder.path().join("data");
    let mut gateways = vec![];
    for index in 0..count {
        let place = Place { http: free_address(), admin: free_address(), data: &data };
        let config = config::config(case, upstreams, &place, balance)?;
        let level = config::log_level(case);
        let started = match Gateway::start(folder.path(), &format!("gateway{index}"), &config, level.clone()) {
            // A cycle may be refused when it is read; the gateway then runs with what is left.
            Err(why) if config.get("aliases").is_some() && (why.contains("cycle") || why.contains("circular")) => {
                let mut without = config.clone();
                without.as_object_mut().map(|members| members.remove("aliases"));
                Gateway::start(folder.path(), &format!("gateway{index}"), &without, level)
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

async fn group(case: &Case, client: &Client, gateways: &[Gateway], full_minute: bool) -> Result<Vec<Exchange>, String> {
    let total = client.repeat.or(client.concurrent).unwrap_or(1);
    let keys = config::random_keys(case)?;
    let one = async |index: usize| {
        let gateway = &gateways[index % gateways.len()];
        let mut sent = Sent::of(client).expect("it was made before");
        if let Some(key) = keys.get(index % keys.len().max(1)) {
            sent.headers.set("authorization", &format!("Bearer {key}"));
        }
        sent.gateway_pid = gateway.pid();
        let path = client.path().split('?').next().unwrap_or_default();
        let to = if ADMIN_PATHS.contains(&path) { gateway.admin } else { gateway.http };
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
    let mut done: Vec<(usize, Exchange)> = futures::future::join_all(workers).await.into_iter().flatten().collect();
    done.sort_by_key(|(index, _)| *index);
    Ok(done.into_iter().map(|(_, exchange)| exchange).collect())
}

/// As many calls as the case makes at once: what allocators keep of a first load is no leak.
async fn warm_up(case: &Case, gateways: &mut [Gateway], upstreams: &Upstreams) -> Result<(), String> {
    for client in case.calls() {
        let few = Client { repeat: client.repeat.map(|n| n.min(200)), schedule_ms: vec![], ..client.clone() };
        group(case, &few, gateways, false).await?;
    }
    settled(gateways, SETTLING).await;
    upstreams.values().for_each(|upstream| upstream.forget());
    Ok(())
}

/// Actions at their times, while calls are under way.
async fn timed(gateways: &[Gateway], acts: &[(When, Act)]) -> Result<(), String> {
    let began = Instant::now();
    for (when, act) in acts {
        let When::AtMs(ms) = when else { continue };
        tokio::time::sleep_until((began + Duration::from_millis(*ms)).into()).await;
        match act {
            Act::SetPrice { model, times } => {
                for gateway in gateways {
                    infra::set_price(gateway, model, *times)?;
                }
            }
            Act::Signal(signal) => super::client::signal_process(gateways[0].pid(), signal),
            other => return Err(format!("infra: {other:?} cannot be done while calls are under way")),
        }
    }
    Ok(())
}

/// Asks what `during` names again and again.
async fn watch(
    case: &Case,
    gateway: &Gateway,
    seen: Arc<Mutex<BTreeMap<String, BTreeSet<u16>>>>,
) -> std::convert::Infallible {
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
        let fits = case.expect.open_upstream_connections.as_ref().is_none_or(|w| w.judge(&open.into(), 0).is_ok());
        if (fits && gateway.rss_kib() <= limit) || Instant::now() > until {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Checks that are told in words.
async fn scenario(case: &Case, gateways: &mut [Gateway]) -> Result<Outcome, String> {
    let check = case.expect.check.as_deref().unwrap_or_default();
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
    Err(format!("scenario `{check}` is not known to the runner"))
}
