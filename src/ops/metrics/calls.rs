//! What one call leaves behind: its commit, its first byte, its holds, and the same in OpenTelemetry's names.
//!
//! A served call counts in a score of places under the labels of its route. They are looked up once for each route and kept
//! with the snapshot ([`Counted`]): a call costs one look-up, whatever it counts. It is counted with others (`tally.rs`).
//!
//! The names with `gen_ai_` are those of OpenTelemetry's semantic conventions for generative AI (of 2026, status
//! "development"): `gen_ai.client.*` is what we ask of providers, `gen_ai.server.*` what callers get from us.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use filters::dialect::{Dialect, Operation};
use filters::limit::Kind;
use filters::upstream::board::Route;
use foldhash::fast::RandomState;
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Registry};

use super::{Metrics, counter, counters, histograms, register};

/// As the conventions say, in tokens.
const TOKENS: [f64; 14] = [
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1_024.0,
    4_096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
];
/// As the conventions say, in seconds; and three more, for answers that take minutes.
const DURATION: [f64; 17] = [
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68,
    655.36,
];
const FIRST_TOKEN: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
const PER_TOKEN: [f64; 13] = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

/// The labels that every metric of the conventions has.
const GEN_AI: [&str; 3] = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"];
/// The same for those that count what failed too.
const GEN_AI_ERROR: [&str; 4] =
    ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type"];
const GEN_AI_TOKEN: [&str; 4] =
    ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_token_type"];

/// What calls are counted by.
pub struct CallMetrics {
    /// Answers that became the caller's, by endpoint.
    commits: IntCounterVec,
    /// From request sent to the response head.
    first_byte_seconds: HistogramVec,
    /// Calls refused for a limit, by scope and kind.
    limited: IntCounterVec,
    /// Holds placed.
    holds_placed: IntCounter,
    /// Holds of calls that came to an end: something was charged.
    holds_captured: IntCounter,
    /// The same: nothing was.
    holds_released: IntCounter,
    /// Nano-dollars that went back.
    released_nano: IntCounter,
    token_usage: HistogramVec,
    client_seconds: HistogramVec,
    server_seconds: HistogramVec,
    first_token_seconds: HistogramVec,
    per_token_seconds: HistogramVec,
}

/// The labels of a route.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a> {
    pub endpoint: &'a str,
    pub operation: Operation,
    pub dialect: Dialect,
    /// The public name of the model.
    pub model: &'a str,
}

/// What a served call counts, of one route.
pub struct Counters {
    /// Of its surface, with status 200.
    pub(super) requests: IntCounter,
    /// Its attempts that served.
    pub(super) served: IntCounter,
    /// Of its surface.
    pub(super) request_seconds: Histogram,
    pub(super) first_event_seconds: Histogram,
    pub(super) tokens_in: IntCounter,
    pub(super) tokens_out: IntCounter,
    pub(super) commits: IntCounter,
    pub(super) first_byte_seconds: Histogram,
    pub(super) input: Histogram,
    pub(super) output: Histogram,
    pub(super) client_seconds: Histogram,
    pub(super) server_seconds: Histogram,
    pub(super) first_token_seconds: Histogram,
    pub(super) per_token_seconds: Histogram,
}

/// A call whose answer reached its caller, at least in part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answered {
    /// From request sent to the head.
    pub first_byte: Option<Duration>,
    /// From there to the first meaningful event.
    pub first_event: Option<Duration>,
    /// From the call's arrival to its first meaningful event.
    pub first_token: Option<Duration>,
    /// From there to its last piece.
    pub streamed: Duration,
    /// The attempt that served.
    pub attempt: Duration,
    /// The whole call.
    pub call: Duration,
    /// Our own time in it, where it is known.
    pub own: Option<Duration>,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub charged_nano: u64,
    /// Of its hold.
    pub released_nano: u64,
    /// Charged by our own count.
    pub estimated: bool,
    /// Its status is 200.
    pub is_ok: bool,
    /// Its answer reached its end.
    pub is_whole: bool,
}

/// The counters of a snapshot's routes; bounded by its catalogue.
#[derive(Default)]
pub struct Counted {
    of: RwLock<HashMap<Route, Arc<Counters>, RandomState>>,
}

impl Counted {
    /// Those of a route, made when it is first served.
    #[must_use]
    pub fn of(&self, route: Route, make: impl FnOnce() -> Counters) -> Arc<Counters> {
        let known = self.of.read().unwrap_or_else(PoisonError::into_inner).get(&route).cloned();
        known.unwrap_or_else(|| {
            let mut of = self.of.write().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(of.entry(route).or_insert_with(|| Arc::new(make())))
        })
    }
}

impl CallMetrics {
    pub(super) fn new(r: &Registry) -> prometheus::Result<Self> {
        let gen_ai = |name: &str, help: &str, labels: &[&str], buckets: &[f64]| {
            let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            register(r, HistogramVec::new(opts, labels)?)
        };
        let holds_ended = counters(
            r,
            "holds_ended_total",
            "Holds of finished calls: `captured` when something was charged, else `released`.",
            &["end"],
        )?;
        Ok(Self {
            commits: counters(r, "commits_total", "Answers that became the caller's.", &["endpoint"])?,
            first_byte_seconds: histograms(
                r,
                "first_byte_seconds",
                "From request sent to the response head, of attempts that served.",
                &["endpoint"],
            )?,
            limited: counters(
                r,
                "limited_total",
                "Calls answered with 429 for a limit of ours: whose (`key`, `account` or `account and model`), and which.",
                &["scope", "kind"],
            )?,
            holds_placed: counter(r, "holds_placed_total", "Holds that were placed.")?,
            holds_captured: holds_ended.with_label_values(&["captured"]),
            holds_released: holds_ended.with_label_values(&["released"]),
            released_nano: counter(
                r,
                "released_nano_dollars_total",
                "Nano-dollars that were held and went back to their account.",
            )?,
            token_usage: gen_ai(
                "gen_ai_client_token_usage",
                "Tokens of one served call, by type (input or output).",
                &GEN_AI_TOKEN,
                &TOKENS,
            )?,
            client_seconds: gen_ai(
                "gen_ai_client_operation_duration_seconds",
                "How long one attempt at a provider took; `error_type` is empty where it served.",
                &GEN_AI_ERROR,
                &DURATION,
            )?,
            server_seconds: gen_ai(
                "gen_ai_server_request_duration_seconds",
                "How long a call took for its caller, from its arrival to its end; `error_type` is empty where it was served.",
                &GEN_AI_ERROR,
                &DURATION,
            )?,
            first_token_seconds: gen_ai(
                "gen_ai_server_time_to_first_token_seconds",
                "From a call's arrival to its first meaningful event, failed attempts before it included.",
                &GEN_AI,
                &FIRST_TOKEN,
            )?,
            per_token_seconds: gen_ai(
                "gen_ai_server_time_per_output_token_seconds",
                "Between two output tokens after the first one, as an average over the call.",
                &GEN_AI,
                &PER_TOKEN,
            )?,
        })
    }

    /// An attempt failed, for this reason.
    pub fn attempt_failed(&self, labels: Labels<'_>, reason: &str, took: Duration) {
        let [operation, provider, model] = labels.gen_ai();
        self.client_seconds
            .with_label_values(&[operation, provider, model, reason])
            .observe(took.as_secs_f64());
    }

    /// An admitted call got no answer, for this reason; `labels` are those of its last attempt.
    pub fn call_failed(&self, labels: Labels<'_>, reason: &str, took: Duration) {
        let [operation, provider, model] = labels.gen_ai();
        self.server_seconds
            .with_label_values(&[operation, provider, model, reason])
            .observe(took.as_secs_f64());
    }

    /// A hold was placed.
    pub fn hold_placed(&self) {
        self.holds_placed.inc();
    }

    /// Holds have ended with their calls: so many with a charge, so many without, and so many nano-dollars of them went
    /// back.
    pub fn holds_ended(&self, captured: u64, released: u64, released_nano: u64) {
        self.holds_captured.inc_by(captured);
        self.holds_released.inc_by(released);
        self.released_nano.inc_by(released_nano);
    }

    /// A call was over a limit.
    pub fn over_limit(&self, scope: &str, kind: Kind) {
        self.limited.with_label_values(&[scope, kind.word()]).inc();
    }
}

impl Metrics {
    /// What calls of a surface count that a route serves.
    #[must_use]
    pub fn of(&self, surface: &str, labels: Labels<'_>) -> Counters {
        let [operation, provider, model] = labels.gen_ai();
        let gen_ai = [operation, provider, model];
        let with = |last: &'static str| [operation, provider, model, last];
        let (endpoint, calls) = ([labels.endpoint], &self.calls);
        Counters {
            requests: self.requests.with_label_values(&[surface, "200"]),
            served: self.attempts.with_label_values(&[labels.endpoint, "served"]),
            request_seconds: self.request_seconds.with_label_values(&[surface]),
            first_event_seconds: self.first_event_seconds.with_label_values(&endpoint),
            tokens_in: self.tokens.with_label_values(&[labels.model, "input"]),
            tokens_out: self.tokens.with_label_values(&[labels.model, "output"]),
            commits: calls.commits.with_label_values(&endpoint),
            first_byte_seconds: calls.first_byte_seconds.with_label_values(&endpoint),
            input: calls.token_usage.with_label_values(&with("input")),
            output: calls.token_usage.with_label_values(&with("output")),
            client_seconds: calls.client_seconds.with_label_values(&with("")),
            server_seconds: calls.server_seconds.with_label_values(&with("")),
            first_token_seconds: calls.first_token_seconds.with_label_values(&gen_ai),
            per_token_seconds: calls.per_token_seconds.with_label_values(&gen_ai),
        }
    }
}

impl Labels<'_> {
    fn gen_ai(&self) -> [&str; 3] {
        [operation_name(self.operation), provider_name(self.dialect), self.model]
    }
}

/// What the conventions call an operation.
#[must_use]
pub const fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Chat | Operation::Responses | Operation::Messages => "chat",
        Operation::Completions => "text_completion",
        Operation::Embeddings => "embeddings",
        Operation::CountTokens => "count_tokens",
    }
}

/// What the conventions call a provider: the flavour of its API, not the company.
#[must_use]
pub const fn provider_name(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::OpenAi => "openai",
        Dialect::Anthropic => "anthropic",
    }
}
