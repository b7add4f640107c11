//! What happens around the gateway: restarts, reloads, the clock; and what cannot be had here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use regex::Regex;
use serde_json::Value;

use super::case::{Case, Infra};
use super::client::{Sent, signal_process};
use super::config::{BREAKER_OPEN_MS, BREAKER_THRESHOLD, Model};
use super::gateway::Gateway;
use super::upstream::{Mode, Upstreams};
use super::variants::mentions_store;

/// The reason of everything that needs Redis or Postgres.
pub const NEEDS_FLEET: &str = "needs the fleet store";

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
    let infra = case.infra.iter().flat_map(|i| [&i.action, &i.redis, &i.proxy]);
    // Liveness is told without any store; that it needs none is what the case is about.
    let about_health = case.client.as_ref().is_some_and(|client| client.path().ends_with("livez"));
    let stores = case.infra.iter().any(|i| i.redis.is_some())
        || infra.flatten().any(|text| mentions_store(text) || text.contains("replica"));
    if stores && !about_health {
        return Some(NEEDS_FLEET.to_owned());
    }
    if case.kind.is_some()
        && case.infra.iter().any(|i| i.action.as_ref().is_some_and(|t| t.contains("instance ")))
    {
        return Some(format!("{NEEDS_FLEET}: several instances share slots"));
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
    case.infra.iter().flat_map(|infra| act(case, infra).transpose()).collect()
}

fn act(case: &Case, infra: &Infra) -> Result<Option<(When, Act)>, String> {
    let Infra { at, at_ms, action, clock, redis, proxy } = infra;
    let when = match (at.as_deref(), at_ms) {
        (None | Some("before"), None) => When::Before,
        (Some("after"), None) => When::After,
        (Some("after_kill"), None) => When::AfterKill,
        (None, Some(ms)) => When::AtMs(*ms),
        _ => return Err(format!("infra: no time that is known: {infra:?}")),
    };
    if let Some(clock) = clock {
        return clock_act(clock).map(|act| Some((When::Before, act)));
    }
    let Some(text) = action else {
        return if redis.is_some() || proxy.is_some() { Ok(None) } else { Err(format!("infra: {infra:?}")) };
    };
    if mentions_store(text) {
        return Ok(None); // There is none to be stopped.
    }
    let matches = |pattern: &str| Regex::new(pattern).ok().and_then(|pattern| pattern.captures(text));
    let act = if text == "restart gateway" {
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
    };
    Ok(Some((when, act)))
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

/// Does what needs no more than the first process.
pub async fn perform(
    act: &Act,
    case: &Case,
    gateways: &mut [Gateway],
    upstreams: &Upstreams,
) -> Result<(), String> {
    match act {
        Act::Restart => gateways.iter_mut().take(1).try_for_each(Gateway::restart),
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
