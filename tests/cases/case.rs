//! The format of a case, read strictly: a field that is not known here is an error, never passed over.
//!
//! Bodies stay the text that they were written as, so that `10.0`, `1e30` and the order of keys reach
//! the wire unchanged. What a word of the free-text fields (`variants`, `infra`, `check`) means is told
//! by the modules that act on it.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::want::Want;

/// One line of a case file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "some fields are for people")]
pub struct Case {
    pub id: String,
    pub area: String,
    pub title: String,
    #[serde(default)]
    pub difficulty: Option<u8>,
    #[serde(default)]
    pub source: Value,
    #[serde(default)]
    pub saw: String,
    #[serde(default)]
    pub right: String,
    #[serde(default)]
    pub repro: String,
    #[serde(default)]
    pub note: String,
    #[serde(default)]
    pub extra_fields: Value,
    /// Another kind than a wire script: `unit`, `static`, `scenario`.
    #[serde(default)]
    pub kind: Option<String>,
    /// What has to be supported for the case to apply.
    #[serde(default)]
    pub optional: Option<String>,
    #[serde(default)]
    pub fixture: Fixture,
    #[serde(default)]
    pub config: BTreeMap<String, Value>,
    #[serde(default)]
    pub infra: Vec<Infra>,
    #[serde(default)]
    pub client: Option<Client>,
    #[serde(default)]
    pub sequence: Vec<Client>,
    #[serde(default)]
    pub upstreams: Vec<Upstream>,
    /// The scripts start again for each request.
    #[serde(default)]
    pub script_repeat: bool,
    #[serde(default)]
    pub variants: Vec<Value>,
    pub expect: Expect,
    /// On the fleet's store, whether it needs it or not.
    #[serde(skip)]
    pub fleet: bool,
    /// On a Redis that has scripts only.
    #[serde(skip)]
    pub scripts: bool,
}

/// What differs from the base fixture.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fixture {
    /// In holds of the case's own request, such as `3.5 x hold`.
    #[serde(default)]
    pub balance: Option<String>,
    #[serde(default)]
    pub balance_nano: Option<i64>,
    #[serde(default)]
    pub model_max_output: Option<u64>,
    #[serde(default)]
    pub model_context: Option<u64>,
    #[serde(default)]
    pub rpm: Option<u64>,
    #[serde(default)]
    pub tpm: Option<u64>,
    #[serde(default)]
    pub max_parallel: Option<u64>,
}

/// An action on the world around the gateway.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Infra {
    /// `before`, `after`, `after_kill`.
    #[serde(default)]
    pub at: Option<String>,
    #[serde(default)]
    pub at_ms: Option<u64>,
    #[serde(default, rename = "do")]
    pub action: Option<String>,
    #[serde(default)]
    pub clock: Option<String>,
    #[serde(default)]
    pub redis: Option<String>,
    #[serde(default)]
    pub proxy: Option<String>,
}

/// What a caller does.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Client {
    #[serde(default)]
    pub method: Option<String>,
    #[serde(default)]
    pub path: Option<String>,
    #[serde(default)]
    pub headers: Headers,
    /// JSON as it goes out, or a string that goes out as it is.
    #[serde(default)]
    pub body: Option<Box<RawValue>>,
    #[serde(default)]
    pub body_b64: Option<String>,
    #[serde(default)]
    pub body_gen: Option<BodyGen>,
    /// Bytes on a fresh connection; everything else about the request is in them.
    #[serde(default)]
    pub raw: Option<String>,
    #[serde(default)]
    pub raw_b64: Option<String>,
    /// `length` (default) or `chunked`.
    #[serde(default)]
    pub framing: Option<Framing>,
    /// `h2`: HTTP/2 with prior knowledge.
    #[serde(default)]
    pub proto: Option<String>,
    /// Bytes per write.
    #[serde(default)]
    pub dribble: Option<usize>,
    #[serde(default)]
    pub repeat: Option<usize>,
    #[serde(default)]
    pub concurrent: Option<usize>,
    #[serde(default)]
    pub instances: Option<usize>,
    #[serde(default)]
    pub schedule_ms: Vec<i64>,
    #[serde(default)]
    pub keys: Option<String>,
    #[serde(default)]
    pub actions: Vec<Action>,
    /// How long the body waits for a 100.
    #[serde(default)]
    pub wait_100_ms: Option<u64>,
    #[serde(default)]
    pub delay_ms: Option<u64>,
}

/// Something a caller does while its answer comes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Action {
    #[serde(default)]
    pub after_text: Option<String>,
    #[serde(default)]
    pub after_events: Option<usize>,
    #[serde(default)]
    pub after_contains: Option<String>,
    #[serde(default)]
    pub at_ms: Option<u64>,
    #[serde(rename = "do")]
    pub action: String,
}

/// A body that is made rather than written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BodyGen {
    #[serde(default)]
    pub json_path: Option<String>,
    #[serde(default)]
    pub repeat: Option<String>,
    #[serde(default)]
    pub raw: Option<String>,
    #[serde(default)]
    pub nest: Option<String>,
    #[serde(default)]
    pub prefix: String,
    #[serde(default)]
    pub suffix: String,
    pub count: usize,
}

/// A scripted upstream.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upstream {
    pub name: String,
    pub script: Vec<Step>,
    /// Variants only: nobody listens, TLS is expected of a plain socket, the name does not resolve.
    #[serde(skip)]
    pub absence: Option<Absence>,
}

/// How an upstream cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    Refused,
    Tls,
    Dns,
}

/// One step of a script.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    #[serde(default)]
    pub on: Option<String>,
    /// The head is enough: `true`, or `"part": "head"`.
    #[serde(default)]
    pub head: bool,
    #[serde(default)]
    pub part: Option<String>,
    #[serde(default)]
    pub proto: Option<String>,
    #[serde(default)]
    pub delay_ms: u64,
    #[serde(default)]
    pub status: Option<u16>,
    #[serde(default)]
    pub reason: Option<String>,
    #[serde(default)]
    pub headers: Headers,
    #[serde(default)]
    pub framing: Option<Framing>,
    #[serde(default)]
    pub body: Option<Box<RawValue>>,
    #[serde(default)]
    pub bytes: Option<String>,
    #[serde(default)]
    pub bytes_b64: Option<String>,
    #[serde(default)]
    pub bytes_gen: Option<BytesGen>,
    /// Bytes per write.
    #[serde(default)]
    pub dribble: Option<usize>,
    /// Between two writes of a dribble.
    #[serde(default)]
    pub dribble_ms: u64,
    /// Trailer fields behind the last chunk.
    #[serde(default)]
    pub trailers: Headers,
    #[serde(default)]
    pub action: Option<String>,
}

/// How a body's end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Framing {
    Chunked,
    Length,
    Close,
    Raw,
}

/// Bytes that are made rather than written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BytesGen {
    #[serde(default)]
    pub prefix: String,
    pub repeat: String,
    pub count: usize,
    #[serde(default)]
    pub suffix: String,
}

/// Header fields in their order; a list of values makes several lines.
#[derive(Clone, Debug, Default)]
pub struct Headers(pub Vec<(String, String)>);

/// A JSON object's members in their order, duplicates kept, values as text.
#[derive(Clone, Debug, Default)]
pub struct Members<V>(pub Vec<(String, V)>);

/// What must be seen. `None`: not said.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expect {
    /// For people; variants are in `variants`.
    pub note: Option<String>,
    pub sequence: Vec<Self>,
    pub any_of: Vec<Self>,

    pub status: Option<Want>,
    pub status_counts: Option<BTreeMap<String, Want>>,
    pub first_status: Option<Want>,
    pub second_status: Option<Want>,
    pub responses_on_connection: Option<Want>,
    pub connection_closed: Option<bool>,
    pub aborted: Option<bool>,
    pub interim: Option<Vec<u16>>,
    pub interim_within_ms: Option<AtMost>,
    pub headers: Option<BTreeMap<String, Want>>,
    pub headers_on: Option<BTreeMap<String, BTreeMap<String, Want>>>,
    pub client_text: Option<Want>,
    pub client_text_len: Option<Want>,
    pub tool_calls: Option<Value>,
    #[serde(deserialize_with = "one_or_many")]
    pub body_contains: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub body_not_contains: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub body_matches: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub body_not_matches: Vec<String>,
    pub body_is_json: Option<bool>,
    pub body_json: Option<BTreeMap<String, Want>>,
    #[serde(deserialize_with = "one_or_many")]
    pub body_absent: Vec<String>,
    pub every_data_is_json: Option<bool>,
    pub every_line_matches: Option<String>,
    pub count: Option<BTreeMap<String, Want>>,
    pub chunked_end: Option<String>,
    pub encoding_consistent: Option<bool>,
    pub first_event_within_ms: Option<AtMost>,
    pub within_ms: Option<AtMost>,
    pub latency_ms: Option<BTreeMap<String, u64>>,
    pub recovers_within_ms: Option<u64>,

    pub attempts: Option<Want>,
    pub attempts_logical: Option<Want>,
    pub attempts_by: Option<BTreeMap<String, Want>>,
    pub upstream_requests: Option<Want>,
    pub upstream_headers: Option<BTreeMap<String, Want>>,
    pub upstream_path: Option<Want>,
    pub upstream_body_json: Option<BTreeMap<String, Want>>,
    #[serde(deserialize_with = "one_or_many")]
    pub upstream_body_absent: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub upstream_body_contains: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub upstream_body_not_contains: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub upstream_raw_contains: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub upstream_raw_not_contains: Vec<String>,
    pub upstream_keys_used: Option<Vec<String>>,
    #[serde(deserialize_with = "one_or_many")]
    pub upstream_closed: Vec<String>,
    pub upstream_closed_within_ms: Option<AtMost>,
    pub open_upstream_connections: Option<Want>,
    pub breaker: Option<Want>,
    pub breaker_by: Option<BTreeMap<String, Want>>,
    pub credential_state: Option<BTreeMap<String, String>>,

    pub billed_prompt_tokens: Option<Want>,
    pub billed_completion_tokens: Option<Want>,
    pub billed_cache_read_tokens: Option<Want>,
    pub billed_cache_write_tokens: Option<Want>,
    pub billed_audio_tokens: Option<Want>,
    pub billed_reasoning_tokens: Option<Want>,
    pub charge_nano: Option<Want>,
    pub charged_account: Option<String>,
    pub price_version: Option<String>,
    pub window_charge: Option<Value>,
    pub hold_nano: Option<Want>,
    pub holds_created: Option<Want>,
    pub hold_after: Option<Want>,
    pub settlements: Option<Want>,
    pub shortfall_nano: Option<Want>,
    pub anomaly_flag: Option<bool>,
    pub estimated: Option<bool>,
    pub balance_after_nano: Option<Want>,
    pub overdraft: Option<bool>,
    pub ledger_sum: Option<Want>,
    pub rpm_used: Option<Want>,
    pub tpm_used: Option<Want>,
    pub negative_counters: Option<bool>,
    pub redis_commands: Option<Value>,

    pub consistent_model: Option<bool>,
    pub alive_after: Option<bool>,
    pub later: Option<Later>,
    pub also: Option<BTreeMap<String, Also>>,
    pub during: Option<BTreeMap<String, Want>>,
    pub after_restart: Option<Box<Self>>,
    pub exit_code: Option<Want>,
    pub log_status: Option<Want>,
    #[serde(deserialize_with = "one_or_many")]
    pub log_contains: Vec<String>,
    #[serde(deserialize_with = "one_or_many")]
    pub log_not_contains: Vec<String>,
    pub rss_growth_mb_max: Option<u64>,
    pub check: Option<String>,
}

/// A time in milliseconds: a plain number is the most that it may be.
#[derive(Clone, Debug)]
pub struct AtMost(pub Want);

/// What one more request is answered: a plain number is its status.
#[derive(Clone, Debug)]
pub struct Also(pub Expect);

/// One more call, some time after the case.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Later {
    pub after_ms: u64,
    pub status: Want,
}

impl Case {
    /// Reads one line.
    pub fn parse(line: &str) -> Result<Self, String> {
        let mut case: Self = serde_json::from_str(line).map_err(|e| e.to_string())?;
        case.delay_heads();
        Ok(case)
    }

    /// `repro` may say what the scripts leave out: "delays its head 500 ms".
    fn delay_heads(&mut self) {
        let told = regex::Regex::new(r"delays its head (\d+) ms").expect("a pattern");
        let delay = told.captures(&self.repro).and_then(|found| found[1].parse().ok()).unwrap_or(0);
        let heads =
            self.upstreams.iter_mut().flat_map(|u| &mut u.script).filter(|step| step.status.is_some());
        for head in heads {
            head.delay_ms = head.delay_ms.max(delay);
        }
    }

    /// Every call of the case, whichever field it stands in.
    pub fn calls(&self) -> impl Iterator<Item = &Client> {
        self.client.iter().chain(&self.sequence)
    }
}

impl Client {
    pub fn path(&self) -> &str {
        self.path.as_deref().unwrap_or("/v1/chat/completions")
    }

    pub fn method(&self) -> &str {
        self.method.as_deref().unwrap_or("POST")
    }
}

impl Headers {
    pub fn find(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// Replaces the field, or adds it.
    pub fn set(&mut self, name: &str, value: &str) {
        self.remove(name);
        self.0.push((name.to_owned(), value.to_owned()));
    }

    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
    }
}

impl<'de> Deserialize<'de> for AtMost {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Self(match Want::deserialize(from)? {
            Want::Is(most) => Want::Within { min: None, max: most.as_f64() },
            other => other,
        }))
    }
}

impl<'de> Deserialize<'de> for Also {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(from)?;
        if value.is_object() {
            return serde_json::from_value(value).map(Self).map_err(D::Error::custom);
        }
        let status = serde_json::from_value(value).map_err(D::Error::custom)?;
        Ok(Self(Expect { status: Some(status), ..Expect::default() }))
    }
}

/// A text or a list of them.
fn one_or_many<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    match Value::deserialize(from)? {
        Value::String(one) => Ok(vec![one]),
        many => serde_json::from_value(many).map_err(D::Error::custom),
    }
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let members: Members<Value> = Members::deserialize(from)?;
        let mut lines = vec![];
        for (name, value) in members.0 {
            let values = match value {
                Value::Array(values) => values,
                one => vec![one],
            };
            for value in values {
                match value {
                    Value::String(text) => lines.push((name.clone(), text)),
                    Value::Number(number) => lines.push((name.clone(), number.to_string())),
                    other => return Err(D::Error::custom(format!("header {name}: {other} is no text"))),
                }
            }
        }
        Ok(Self(lines))
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Members<V> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Read<V> {
            type Value = Members<V>;
            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<V>, A::Error> {
                let mut members = vec![];
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        from.deserialize_map(Read(PhantomData))
    }
}

impl Members<Box<RawValue>> {
    /// The members of a JSON object's text.
    pub fn of(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// Replaces the member in its place, or adds it at the end.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let value = RawValue::from_string(value.to_owned()).map_err(|e| format!("{name}: {e}"))?;
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some(member) => member.1 = value,
            None => self.0.push((name.to_owned(), value)),
        }
        Ok(())
    }

    /// The object's text.
    pub fn text(&self) -> String {
        let member = |(name, value): &(String, Box<RawValue>)| {
            format!("{}: {}", Value::from(name.as_str()), value.get())
        };
        format!("{{{}}}", self.0.iter().map(member).collect::<Vec<_>>().join(", "))
    }
}
