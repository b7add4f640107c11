//! What happens around the gateway: restarts, reloads, the clock; and what cannot be had here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use regex::Regex;
use serde_json::Value;

use super::case::{Case, Infra};
use super::client::{Sent, signal_process};
use super::config::{BREAKER_OPEN_MS, BREAKER_THRESHOLD, Model};
use super::gateway::Gateway;
use super::stores::{self, Stores};
use super::upstream::{Mode, Upstreams};

/// What is optional and cannot be played, and why. A line goes when the feature comes.
const NOT_OFFERED: [(&str, &str); 1] = [(
    "budget windows",
    "the gateway's clock is the machine's, so no midnight can be had; filters/src/limit/budget.rs proves windows",
)];

/// Checks without a wire script, by a word of theirs, and where they are proven.
const PROVEN: [(&str, &str); 3] = [
    ("pico-dollars", "filters/src/money/{amount,price,cost}.rs"),
    ("401 bodies", "filters/src/auth.rs and tests/it/callers.rs"),
    ("window day", "filters/src/limit/budget.rs"),
];

/// An action, understood.
#[derive(Clone, Debug)]
pub enum Act {
    Restart,
    SetPrice {
        model: String,
        times: i64,
    },
    ReloadAliases(Value),
    Signal(String),
    /// One process of several, from 0.
    SignalInstance(usize, String),
    RestartInstance(usize),
    /// To the servers that processes share.
    Store(stores::Act),
    OpenBreakers {
        names: Vec<String>,
        wait: Duration,
    },
    /// Waits until the minute is this old, in seconds.
    IntoMinute(std::ops::RangeInclusive<u64>),
    /// Times of a schedule count from the next full minute.
    FullMinute,
}

/// When an action is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Before,
    AtMs(u64),
    After,
    AfterKill,
}

/// Why a case cannot be played here, if it cannot.
pub fn not_applicable(case: &Case) -> Option<String> {
    if let Some(kind) = &case.kind
        && (kind.starts_with("unit") || kind.starts_with("static"))
    {
        let check = case.expect.check.as_deref().unwrap_or_default();
        let place =
            PROVEN.iter().find(|(word, _)| check.contains(word)).map_or("by hand only", |(_, place)| place);
        return Some(format!("{kind}: no wire script; proven in {place}"));
    }
    let optional = case.optional.as_deref()?;
    let why = NOT_OFFERED.iter().find(|(name, _)| *name == optional).map(|(_, why)| why)?;
    Some(format!("optional: {optional}: {why}"))
}

/// Why an optional surface does not apply, asked of the gateway itself.
pub async fn surface_missing(case: &Case, gateway: &Gateway) -> Option<String> {
    let path = case.optional.as_deref()?.strip_prefix("surface ")?;
    let answer = Sent::new("POST", path).call(gateway.http).await;
    (answer.status == Some(404)).then(|| format!("optional: surface {path} is not offered"))
}

/// Understands every action of a case, or says which it does not.
pub fn acts(case: &Case) -> Result<Vec<(When, Act)>, String> {
    let mut acts = vec![];
    for infra in &case.infra {
        acts.extend(acts_of(case, infra)?);
    }
    acts.sort_by_key(|(when, _)| if let When::AtMs(ms) = when { *ms } else { 0 });
    Ok(acts)
}

fn acts_of(case: &Case, infra: &Infra) -> Result<Vec<(When, Act)>, String> {
    let Infra { at, at_ms, action, clock, redis, proxy } = infra;
    let when = match (at.as_deref(), at_ms) {
        (None | Some("before"), None) => When::Before,
        (Some("after"), None) => When::After,
        (Some("after_kill"), None) => When::AfterKill,
        (None, Some(ms)) => When::AtMs(*ms),
        _ => return Err(format!("infra: no time that is known: {infra:?}")),
    };
    let mut acts = vec![];
    if let Some(clock) = clock {
        acts.push((When::Before, clock_act(clock)?));
    }
    for text in [action, proxy].into_iter().flatten() {
        if stores::mentions_instance(text) {
            acts.push((when, instance_act(text)?));
        } else if stores::mentions_store(text) {
            let clauses = stores::acts_of(text).map_err(|why| format!("infra action `{text}`: {why}"))?;
            // Writes that are lost are those of the calls: the link is cut as they begin.
            let loses = clauses.contains(&stores::Act::Promote);
            acts.extend(clauses.into_iter().map(|clause| match (when, &clause) {
                (When::AtMs(_), stores::Act::CutLink) if loses => (When::AtMs(0), Act::Store(clause)),
                _ => (when, Act::Store(clause)),
            }));
        } else {
            acts.push((when, act(case, text)?));
        }
    }
    if acts.is_empty() && redis.is_none() {
        return Err(format!("infra: {infra:?}"));
    }
    Ok(acts)
}

/// Something that happens to one process of several.
fn instance_act(text: &str) -> Result<Act, String> {
    let known = Regex::new(r"^(SIG\w+|kill -9|kill|restart|start|stop) (?:the )?instance ([A-Z])(?: while its call hangs| again)?$")
        .map_err(|e| e.to_string())?;
    let found =
        known.captures(text).ok_or_else(|| format!("infra action `{text}` is not known to the runner"))?;
    let index = usize::from(found[2].as_bytes()[0] - b'A');
    Ok(match &found[1] {
        "restart" | "start" => Act::RestartInstance(index),
        "kill -9" | "kill" => Act::SignalInstance(index, "SIGKILL".to_owned()),
        "stop" => Act::SignalInstance(index, "SIGTERM".to_owned()),
        signal => Act::SignalInstance(index, signal.to_owned()),
    })
}

/// How many processes the words of a case tell apart.
pub fn instances_named(case: &Case) -> usize {
    let texts = case.infra.iter().filter_map(|infra| infra.action.as_deref());
    let named =
        texts.filter(|text| stores::mentions_instance(text)).filter_map(|text| instance_act(text).ok());
    let most = named.map(|act| match act {
        Act::SignalInstance(index, _) | Act::RestartInstance(index) => index + 1,
        _ => 0,
    });
    // One is told apart from at least one other.
    most.max().map_or(1, |most| most.max(2))
}

/// Whether calls of the case meet stores that are or were broken.
pub fn breaks_stores(acts: &[(When, Act)]) -> bool {
    acts.iter().any(|(_, act)| matches!(act, Act::Store(_)))
}

fn act(case: &Case, text: &str) -> Result<Act, String> {
    let matches = |pattern: &str| Regex::new(pattern).ok().and_then(|pattern| pattern.captures(text));
    Ok(if text == "restart gateway" {
        Act::Restart
    } else if let Some(found) = matches(r"^set price (\S+) x(\d+) and reload$") {
        Act::SetPrice { model: found[1].to_owned(), times: found[2].parse().map_err(|_| "no number")? }
    } else if let Some(found) = matches(r"^reload with aliases (.*)$") {
        Act::ReloadAliases(serde_json::from_str(&found[1]).map_err(|e| e.to_string())?)
    } else if let Some(found) = matches(r"^(SIG\w+) gateway$") {
        Act::Signal(found[1].to_owned())
    } else if let Some(found) = matches(r"^open breakers? ([\w, ]+?)(, let open time pass| for \d+ s)?$") {
        let names = found[1].split(',').map(|name| name.trim().to_owned()).collect();
        let pass = found.get(2).is_some_and(|rest| rest.as_str().contains("pass"));
        let open =
            case.config.get("breaker_open_ms").or_else(|| case.config.get("open_ms")).and_then(Value::as_u64);
        // The open time may be jittered upwards.
        let wait = if pass {
            Duration::from_millis(open.unwrap_or(BREAKER_OPEN_MS) * 5 / 4)
        } else {
            Duration::ZERO
        };
        Act::OpenBreakers { names, wait }
    } else {
        return Err(format!("infra action `{text}` is not known to the runner"));
    })
}

fn clock_act(text: &str) -> Result<Act, String> {
    let into = Regex::new(r"^start (\d+) s into a minute$").map_err(|e| e.to_string())?;
    if let Some(found) = into.captures(text) {
        let second: u64 = found[1].parse().map_err(|_| "no number")?;
        // Any second will do from which the end of the minute is as far away.
        return Ok(Act::IntoMinute(second.min(40)..=45));
    }
    if text == "0 ms = full minute" {
        return Ok(Act::FullMinute);
    }
    Err(format!("clock `{text}` is not known to the runner: the gateway's clock is the machine's"))
}

/// Does it.
pub async fn perform(
    act: &Act,
    case: &Case,
    gateways: &[Gateway],
    upstreams: &Upstreams,
    stores: Option<&Stores>,
) -> Result<(), String> {
    let instance = |index: usize| {
        gateways.get(index).ok_or_else(|| format!("there is no instance number {}", index + 1))
    };
    match act {
        Act::Restart => gateways.iter().take(1).try_for_each(|g| tokio::task::block_in_place(|| g.restart())),
        Act::RestartInstance(index) => tokio::task::block_in_place(|| instance(*index)?.restart()),
        Act::SignalInstance(index, signal) => {
            signal_process(instance(*index)?.pid(), signal);
            Ok(())
        }
        Act::Store(act) => stores.ok_or("there is no store that is shared")?.perform(act).await,
        Act::SetPrice { model, times } => gateways.iter().try_for_each(|g| set_price(g, model, *times)),
        Act::ReloadAliases(aliases) => {
            gateways
                .iter()
                .try_for_each(|gateway| gateway.reload(|config| config["aliases"] = aliases.clone()))?;
            tokio::time::sleep(Duration::from_millis(300)).await;
            Ok(())
        }
        Act::Signal(signal) => {
            gateways.iter().for_each(|gateway| signal_process(gateway.pid(), signal));
            Ok(())
        }
        Act::OpenBreakers { names, wait } => open_breakers(case, &gateways[0], upstreams, names, *wait).await,
        Act::IntoMinute(seconds) => {
            while !seconds.contains(&(since_minute().as_secs())) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Ok(())
        }
        Act::FullMinute => Ok(()), // The schedule waits for it.
    }
}

/// Reloads with other prices; works on a shared process while calls are under way.
pub fn set_price(gateway: &Gateway, model: &str, times: i64) -> Result<(), String> {
    gateway.reload(|config| {
        for price in ["input", "output", "cache_read"] {
            let old =
                config["models"][model]["price"][price].as_str().and_then(|text| text.parse::<f64>().ok());
            if let Some(old) = old {
                config["models"][model]["price"][price] = (old * times as f64).to_string().into();
            }
        }
    })
}

/// How old the minute is.
pub fn since_minute() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Duration::from_nanos(u64::try_from(now.as_nanos() % 60_000_000_000).unwrap_or(0))
}

/// Lets the named upstreams fail until their breakers are open. The others answer 403 meanwhile, which
/// blames nobody but is passed over too, so that the named ones are always asked.
async fn open_breakers(
    case: &Case,
    gateway: &Gateway,
    upstreams: &Upstreams,
    names: &[String],
    wait: Duration,
) -> Result<(), String> {
    for (name, upstream) in upstreams {
        upstream.set_mode(Mode::Failing(if names.contains(name) { 503 } else { 403 }));
    }
    let enough = || {
        names
            .iter()
            .all(|n| upstreams.get(n).is_none_or(|u| u.asked_in(Mode::Failing(503)) >= BREAKER_THRESHOLD))
    };
    for _ in 0..4 * BREAKER_THRESHOLD {
        if enough() {
            break;
        }
        plain_call(case).call(gateway.http).await;
    }
    let done = enough();
    upstreams.values().for_each(|upstream| upstream.set_mode(Mode::Script));
    tokio::time::sleep(wait).await;
    if done {
        Ok(())
    } else {
        Err(format!("the breakers of {names:?} cannot be opened: they are not asked often enough"))
    }
}

/// A call that shows that stores are back: of the other account, which has money and no limits.
pub fn recovery_call(case: &Case) -> Sent {
    let mut sent = plain_call(case);
    sent.headers.set("authorization", "Bearer sk-test-beta");
    sent
}

/// A request that nothing is wrong with, for whatever model the case is about.
pub fn plain_call(case: &Case) -> Sent {
    let model = Model::of(case);
    let (path, body) = match model {
        Model::Gpt => (
            "/v1/chat/completions",
            r#"{"model":"gpt-a","messages":[{"role":"user","content":"hi"}],"max_tokens":10}"#,
        ),
        Model::Claude => (
            "/v1/messages",
            r#"{"model":"claude-a","max_tokens":10,"messages":[{"role":"user","content":"hi"}]}"#,
        ),
        Model::Embed => ("/v1/embeddings", r#"{"model":"embed-a","input":"abc"}"#),
    };
    let mut sent = Sent::new("POST", path);
    sent.headers.set("authorization", "Bearer sk-test-alpha");
    sent.headers.set("content-type", "application/json");
    sent.body = body.as_bytes().to_vec();
    sent
}
