//! The config of a case: the base fixture and what the case changes, in the gateway's own keys.
//!
//! Every name of a key is here and nowhere else. A key is written only when the case needs it, so that
//! a case that does not need a feature does not fail for want of it. Settings of the format that the
//! gateway has no key for are listed with the reason why nothing has to be written.

use serde_json::{Map, Value, json};

use super::case::{Absence, Case};
use super::upstream::{Upstreams, wants_h2};

/// The base fixture's balance, in nano-dollars.
pub const BALANCE_NANO: i64 = 1_000_000_000;
/// Failures in a row that open a breaker.
pub const BREAKER_THRESHOLD: usize = 5;
/// How long it is open at first.
pub const BREAKER_OPEN_MS: u64 = 10_000;
/// What a provider calls its model.
pub const NATIVE_MODEL: &str = "up-a";

/// The models of the base fixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    Gpt,
    Claude,
    Embed,
}

/// Where a process listens and keeps its books.
pub struct Place<'a> {
    pub http: std::net::SocketAddr,
    pub admin: std::net::SocketAddr,
    /// For callers of HTTP/2.
    pub h2c: std::net::SocketAddr,
    /// The block `store:`.
    pub store: &'a Value,
}

impl Model {
    /// The model that a case is about.
    pub fn of(case: &Case) -> Self {
        let path = case.calls().map(|client| client.path().to_owned()).next().unwrap_or_default();
        let raw = case.calls().filter_map(|client| client.raw.as_deref()).next().unwrap_or_default();
        if path.contains("/messages") || raw.contains("/v1/messages") {
            Self::Claude
        } else if path.contains("/embeddings") || raw.contains("/v1/embeddings") {
            Self::Embed
        } else {
            Self::Gpt
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpt => "gpt-a",
            Self::Claude => "claude-a",
            Self::Embed => "embed-a",
        }
    }

    const fn dialect(self) -> &'static str {
        match self {
            Self::Gpt | Self::Embed => "openai",
            Self::Claude => "anthropic",
        }
    }

    /// USD per million tokens, which is nano-dollars per token divided by 1000.
    fn price(self, case: &Case) -> Value {
        let mentions =
            |word: &str| format!("{:?}", (&case.upstreams, &case.client, &case.sequence)).contains(word);
        match self {
            Self::Gpt => {
                let mut price = json!({ "input": "2.5", "output": "10", "cache_read": "1.25" });
                if mentions("audio") {
                    price["audio_input"] = "40".into();
                }
                if mentions("service_tier") {
                    price["service_tiers"] = json!({
                        "priority": { "input": "4.25", "cache_read": "2.125", "output": "17" },
                        "flex": { "input": "1.25", "cache_read": "0.625", "output": "5" },
                    });
                }
                price
            }
            Self::Claude => {
                let mut price = json!({ "input": "3", "output": "15", "cache_read": "0.3" });
                if mentions("cache_creation") {
                    price["cache_write_5m"] = "3.75".into();
                    price["cache_write_1h"] = "6".into();
                }
                if is_long(case) {
                    price["long_context"] = json!({
                        "above": 200_000, "input": "6", "cache_read": "0.6", "cache_write_5m": "7.5",
                        "cache_write_1h": "12", "output": "22.5",
                    });
                }
                price
            }
            Self::Embed => json!({ "input": "0.02", "output": "0" }),
        }
    }

    /// Input and output prices in nano-dollars per token.
    pub const fn nano(self) -> (i64, i64) {
        match self {
            Self::Gpt => (2500, 10_000),
            Self::Claude => (3000, 15_000),
            Self::Embed => (20, 0),
        }
    }

    const fn limits(self) -> (u64, u64) {
        match self {
            Self::Gpt => (128_000, 16_384),
            Self::Claude => (1_000_000, 64_000),
            Self::Embed => (8_192, 1),
        }
    }
}

/// Whether a case comes near the long tier.
fn is_long(case: &Case) -> bool {
    let made = case.calls().filter_map(|client| client.body_gen.as_ref());
    let made = made.map(|made| made.count * made.repeat.as_ref().map_or(1, String::len)).max().unwrap_or(0);
    let numbers = regex::Regex::new(r#"_tokens\\?"?\\?":\s*(\d+)"#).expect("a pattern");
    let script = format!("{:?}", case.upstreams);
    let said = numbers.captures_iter(&script).filter_map(|found| found[1].parse::<usize>().ok()).max();
    made.max(said.unwrap_or(0)) > 200_000
}

/// The whole file, as JSON, which YAML is a superset of.
pub fn config(
    case: &Case,
    upstreams: &Upstreams,
    place: &Place<'_>,
    balance_nano: i64,
) -> Result<Value, String> {
    let model = Model::of(case);
    let mut draft = Draft {
        file: json!({
            "listen": {
                "http": place.http.to_string(), "admin": place.admin.to_string(), "threads": 2,
                "internal": { "address": place.h2c.to_string(), "h2c": true },
            },
            "store": place.store,
            "bounds": { "body_max": "10MiB" },
            "routing": { "attempts_max": 3, "explore": false },
            "drain": { "pre": "0s", "max": "10s" },
        }),
        times: json!({ "first_byte": "2000ms", "first_event": "2000ms", "idle": "5000ms" }),
        routed: case.upstreams.iter().map(|upstream| upstream.name.clone()).collect(),
        by_upstream: Map::new(),
    };
    for (key, value) in &case.config {
        draft.set(key, value, upstreams)?;
    }
    let (providers, routes) = draft.providers(case, upstreams)?;
    let (context, output) = model.limits();
    let output = case.fixture.model_max_output.unwrap_or(output);
    let context = case.fixture.model_context.unwrap_or_else(|| context.max(output.saturating_mul(2)));
    let mut file = draft.file;
    file["providers"] = providers.into();
    file["models"] = json!({ model.name(): {
        "price": model.price(case), "limits": { "context": context, "output": output }, "routes": routes,
    } });
    file["bootstrap"] = json!({ "accounts": {
        "alpha": { "balance": usd(balance_nano), "keys": alpha_keys(case, model, balance_nano)? },
        "beta": { "balance": usd(BALANCE_NANO), "keys": [{ "key": "sk-test-beta" }] },
    } });
    Ok(file)
}

/// A config under way.
struct Draft {
    file: Value,
    /// For every provider.
    times: Value,
    /// The upstreams that the model has routes to.
    routed: Vec<String>,
    /// For one provider.
    by_upstream: Map<String, Value>,
}

impl Draft {
    /// Takes over one setting of a case.
    fn set(&mut self, key: &str, value: &Value, upstreams: &Upstreams) -> Result<(), String> {
        let Self { file, times, routed, by_upstream } = self;
        let text = if key.ends_with("_ms") { Value::from(format!("{value}ms")) } else { value.clone() };
        match key {
            "first_byte_ms" => {
                times["first_byte"] = text.clone();
                times["first_event"] = text;
            }
            "first_event_ms" => times["first_event"] = text,
            "connect_ms" => times["connect"] = text,
            "idle_ms" => times["idle"] = text,
            "deadline_ms" => file["routing"]["deadline"] = text,
            "max_stream_ms" | "stream_max_ms" => file["routing"]["stream_max"] = text,
            "max_attempts" => file["routing"]["attempts_max"] = text,
            "max_body_bytes" => file["bounds"]["body_max"] = text,
            "max_header_bytes" | "max_head_bytes" => file["bounds"]["head_max"] = text,
            "body_timeout_ms" => file["bounds"]["body_timeout"] = text,
            "write_timeout_ms" => file["bounds"]["write_timeout"] = text,
            "grace_ms" => file["drain"]["max"] = text,
            "pre_drain_ms" => file["drain"]["pre"] = text,
            "aliases" => file["aliases"] = text,
            // The breaker has numbers of its own. Others than those would be a key, if there were one.
            "breaker_threshold" if *value == BREAKER_THRESHOLD => {}
            "breaker_threshold" => file["breaker"]["consecutive_failures"] = text,
            "breaker_open_ms" | "open_ms" if *value == BREAKER_OPEN_MS => {}
            "breaker_open_ms" | "open_ms" => file["breaker"]["open"] = text,
            "probe_lease_ms" => file["breaker"]["probe_lease"] = text,
            // Slots of the embedded store end with its process.
            "slot_lease_ms" if file["store"].get("redis").is_none() => {}
            "slot_lease_ms" => file["store"]["redis"]["slot_lease"] = text,
            "routes" => {
                let names = value.as_array().ok_or("config routes: no list")?;
                *routed = names.iter().filter_map(Value::as_str).map(str::to_owned).collect();
            }
            "transient_400" => {
                for rule in value.as_array().into_iter().flatten() {
                    let name = rule["upstream"].as_str().ok_or("config transient_400: no upstream")?;
                    let text = &rule["body_regex"];
                    let rule = json!({ "status": 400, "body_contains": text, "treat_as": "transient" });
                    by_upstream.entry(name).or_insert_with(|| json!({}))["classify"] = json!([rule]);
                }
            }
            // `log` is an environment variable, see `log_level`. The gateway writes no keep-alives of its
            // own. A hold of the embedded store ends with its process; the next one settles it.
            "log" | "keepalive_ms" | "hold_ttl_ms" => {}
            name if upstreams.contains_key(name) => {
                upstream_keys(name, value, by_upstream.entry(name).or_insert_with(|| json!({})))?;
            }
            other => return Err(format!("config `{other}` is not known to the runner")),
        }
        Ok(())
    }

    /// Providers and routes; the first has the highest weight.
    fn providers(
        &self,
        case: &Case,
        upstreams: &Upstreams,
    ) -> Result<(Map<String, Value>, Vec<Value>), String> {
        let mut providers = Map::new();
        let mut routes = vec![];
        for (index, name) in self.routed.iter().enumerate() {
            let upstream = upstreams.get(name).ok_or_else(|| format!("config routes: no upstream {name}"))?;
            let script = case.upstreams.iter().find(|u| u.name == *name).map(|u| u.script.as_slice());
            let base = match upstream.absence {
                None | Some(Absence::Refused) => format!("http://{}/v1", upstream.address),
                Some(Absence::Tls) => format!("https://{}/v1", upstream.address),
                Some(Absence::Dns) => format!("http://{name}.nowhere.invalid/v1"),
            };
            let mut provider = json!({
                "dialect": Model::of(case).dialect(), "base_url": base,
                "credential": format!("prov-key-{name}"), "region": format!("r{index}"),
            });
            merge(&mut provider, &self.times);
            if wants_h2(script.unwrap_or_default()) {
                provider["http"] = "h2c".into();
            }
            if let Some(more) = self.by_upstream.get(name) {
                merge(&mut provider, more);
                if let (Some(_), Some(members)) = (more.get("credentials"), provider.as_object_mut()) {
                    members.remove("credential");
                }
            }
            providers.insert(name.clone(), provider);
            routes.push(json!({ "provider": name, "model": NATIVE_MODEL, "weight": 100 - index }));
        }
        if routes.is_empty() {
            // A case without upstreams still needs a gateway that starts.
            providers.insert(
                "none".to_owned(),
                json!({ "dialect": "openai", "base_url": "http://127.0.0.1:9/v1" }),
            );
            routes.push(json!({ "provider": "none" }));
        }
        Ok((providers, routes))
    }
}

fn upstream_keys(name: &str, value: &Value, into: &mut Value) -> Result<(), String> {
    for (key, value) in value.as_object().ok_or_else(|| format!("config {name}: no object"))? {
        let target = match key.as_str() {
            "supports_stream_options" => "stream_usage",
            "output_field" => "output_field",
            "keys" => "credentials",
            "first_byte_ms" => "first_byte",
            "first_event_ms" => "first_event",
            "idle_ms" => "idle",
            "connect_ms" => "connect",
            other => return Err(format!("config {name}.{other} is not known to the runner")),
        };
        into[target] = if key.ends_with("_ms") { format!("{value}ms").into() } else { value.clone() };
    }
    Ok(())
}

/// The keys of `alpha`. Calls in parallel need an output bound with which the base balance carries them,
/// and those that were left but are not settled yet as well.
fn alpha_keys(case: &Case, model: Model, balance_nano: i64) -> Result<Value, String> {
    let mut key = json!({ "key": "sk-test-alpha" });
    let fixture = &case.fixture;
    let limits = [("rpm", fixture.rpm), ("tpm", fixture.tpm), ("concurrency", fixture.max_parallel)];
    for (name, limit) in limits {
        if let Some(limit) = limit {
            key["limits"][name] = limit.into();
        }
    }
    let parallel = case.calls().filter_map(|client| client.concurrent).max().unwrap_or(1);
    let (_, output) = model.nano();
    if parallel > 1 && output > 0 && fixture.balance.is_none() {
        let tokens = balance_nano / output / i64::try_from(parallel * 8).unwrap_or(i64::MAX);
        key["default_output_tokens"] = tokens.clamp(1, 16_384).into();
    }
    let mut keys = vec![key.clone()];
    for name in random_keys(case)? {
        key["key"] = name.into();
        keys.push(key.clone());
    }
    Ok(keys.into())
}

/// `100 random`: that many keys of the account, used in turn.
pub fn random_keys(case: &Case) -> Result<Vec<String>, String> {
    let Some(text) = case.calls().filter_map(|client| client.keys.as_deref()).next() else {
        return Ok(vec![]);
    };
    let count: Option<usize> = text.strip_suffix(" random").and_then(|count| count.parse().ok());
    let count = count.ok_or_else(|| format!("keys `{text}` is not known to the runner"))?;
    Ok((0..count)
        .map(|index| format!("sk-test-alpha-{:08x}", index.wrapping_mul(0x9e37_79b1) & 0xffff_ffff))
        .collect())
}

/// What `RUST_LOG` is set to, where the case says it.
pub fn log_level(case: &Case) -> Option<String> {
    case.config.get("log").and_then(Value::as_str).map(str::to_owned)
}

fn usd(nano: i64) -> String {
    format!("{}.{:09}", nano / 1_000_000_000, nano % 1_000_000_000)
}

fn merge(into: &mut Value, more: &Value) {
    if let (Some(into), Some(more)) = (into.as_object_mut(), more.as_object()) {
        into.extend(more.clone());
    }
}
