//! The config file as it is written. A field's comment here is its comment in `conf/tollgate.yaml`.

use std::collections::BTreeMap;
use std::time::Duration;

use deserr::{Deserr, ErrorKind, IntoValue, Map as _, Value, ValueKind, ValuePointerRef, take_cf_content};

use super::Faults;
use super::records::{RawRecords, RawSlo};
use super::sentry::Sentry;
use super::watch::{HeartbeatsBlock, NotificationsBlock, ProbesBlock};
use crate::secret::Secret;

/// The whole file.
#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct File {
    /// Where callers and operators connect.
    pub listen: Listen,
    /// Where money is kept.
    pub store: Store,
    /// Bounds on what callers may send.
    #[deserr(default)]
    pub bounds: Bounds,
    /// How upstreams are tried.
    #[deserr(default)]
    pub routing: Routing,
    /// How the process leaves.
    #[deserr(default)]
    pub drain: Drain,
    /// How long it is kept what happened: attempts for `tollgate failovers`, good and bad minutes for `tollgate slo`.
    #[deserr(default)]
    pub records: RawRecords,
    /// What callers are promised; docs/slo.md says how it is counted.
    #[deserr(default)]
    pub slo: RawSlo,
    /// Companies and servers that we call. A node of a fleet may leave out `providers` and `models`: then they are those
    /// that `tollgate catalogue publish` has published.
    #[deserr(default)]
    pub providers: Option<Named<Provider>>,
    /// What callers can ask for.
    #[deserr(default)]
    pub models: Option<Named<Model>>,
    /// Further names of models: each stands for a model or for another alias.
    #[deserr(default)]
    pub aliases: Named<String>,
    /// Spans of calls, and all metrics, for an OpenTelemetry collector.
    #[deserr(default)]
    pub telemetry: super::telemetry::Raw,
    /// Accounts and keys to make when they are not there yet.
    #[deserr(default)]
    pub bootstrap: Option<Bootstrap>,
    /// Where panics and broken invariants are reported, beside the log: a project of Sentry. Never a key, a prompt, a
    /// body or an error's text. Default: nowhere.
    #[deserr(default)]
    pub sentry: Option<Sentry>,
    /// Every route of every model is asked the smallest question there is, and judged by its answer. That costs money at
    /// providers: without this block none is asked.
    #[deserr(default)]
    pub probes: Option<ProbesBlock>,
    /// Who is told that periodic jobs are done, and when one is late.
    #[deserr(default)]
    pub heartbeats: HeartbeatsBlock,
    /// Who is told what happens, by webhook.
    #[deserr(default)]
    pub notifications: NotificationsBlock,
    /// The page for everybody that says how models do.
    #[deserr(default)]
    pub status: super::status::Raw,
}

/// The part of a file that the nodes of a fleet may have in common.
#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct CatalogueFile {
    pub providers: Named<Provider>,
    pub models: Named<Model>,
    #[deserr(default)]
    pub aliases: Named<String>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Listen {
    /// Plain HTTP/1.1 for callers: an address, or a block as below. Put TLS in front, or keep it on a private network.
    #[deserr(default)]
    pub http: Option<Plain>,
    /// TLS for callers: HTTP/2 and HTTP/1.1, as they ask. At least one of `http` and `https` must be there.
    #[deserr(default)]
    pub https: Option<Https>,
    /// Plain HTTP for callers of our own network, beside the public addresses: never on a public one.
    #[deserr(default)]
    pub internal: Option<Internal>,
    /// Health and metrics, without authentication, and the verbs on the books, with the token in the store's folder: never
    /// on a public address.
    pub admin: String,
    /// Threads that serve, each with connections to upstreams of its own. Default: one per core.
    #[deserr(default)]
    pub threads: Option<u16>,
}

/// A plain address of callers, however it was written.
#[derive(Debug)]
pub struct Plain {
    /// Where to listen.
    pub address: String,
    /// Believe a load balancer that says in front of each connection whose it is (PROXY protocol, v1 and v2). Default: nobody.
    pub proxy_protocol: Option<ProxyProtocol>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
struct PlainBlock {
    address: String,
    #[deserr(default)]
    proxy_protocol: Option<ProxyProtocol>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Https {
    /// Where to listen.
    pub address: String,
    /// The certificate and those between it and its root, in PEM. Read again when it changes; the last good one counts.
    pub cert_file: String,
    /// Its private key, in PEM.
    pub key_file: String,
    /// Callers must show a certificate that one of these signed, in PEM. Default: they need none.
    #[deserr(default)]
    pub client_ca_file: Option<String>,
    /// Believe a load balancer that says in front of each connection whose it is (PROXY protocol, v1 and v2). Default: nobody.
    #[deserr(default)]
    pub proxy_protocol: Option<ProxyProtocol>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Internal {
    /// Where to listen.
    pub address: String,
    /// Speak HTTP/2 without TLS too, with callers that begin with it. Default false.
    #[deserr(default)]
    pub h2c: Option<bool>,
    /// Believe a load balancer that says in front of each connection whose it is (PROXY protocol, v1 and v2). Default: nobody.
    #[deserr(default)]
    pub proxy_protocol: Option<ProxyProtocol>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct ProxyProtocol {
    /// `accept` (a trusted source may say it, others connect as themselves) or `require` (nobody else may connect).
    pub mode: ProxyModeName,
    /// Networks whose word counts, such as `10.0.0.0/8`.
    pub trusted: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults, rename_all = lowercase)]
pub enum ProxyModeName {
    Accept,
    Require,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Store {
    /// One machine, nothing else needed: holds in memory, a journal, SQLite as ledger.
    #[deserr(default)]
    pub embedded: Option<Embedded>,
    /// Instead of `embedded`, with `postgres` and `path`: any number of nodes. Money that may be spent now, limits, health.
    #[deserr(default)]
    pub redis: Option<Redis>,
    /// The fleet's ledger. No call waits for it.
    #[deserr(default)]
    pub postgres: Option<Postgres>,
    /// With Redis and Postgres: this node's own folder, for its journal and what it needs to start without them.
    #[deserr(default)]
    pub path: Option<String>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Redis {
    /// Servers: `redis://user:password@host:6379`, or `rediss://` for TLS. One; with `sentinel` or `cluster` some of them.
    pub urls: Vec<Secret>,
    /// What they are. Default single.
    #[deserr(default)]
    pub mode: Option<RedisModeName>,
    /// Sentinel's name for the primary. Only with `mode: sentinel`.
    #[deserr(default)]
    pub primary: Option<String>,
    /// Who signs the servers' certificates, in PEM. Default: the public authorities.
    #[deserr(default)]
    pub ca_file: Option<String>,
    /// The time that one command may take, connecting included; at most 50ms. Default 50ms.
    #[deserr(default)]
    pub timeout: Option<Span>,
    /// Begins every key's name. Default tollgate.
    #[deserr(default)]
    pub prefix: Option<String>,
    /// How long a call counts in limits of calls at the same time when its node says no more of it, as one that was
    /// killed; nodes say so every second. From 2s to 60s. Default 10s.
    #[deserr(default)]
    pub slot_lease: Option<Span>,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults, rename_all = lowercase)]
pub enum RedisModeName {
    Single,
    Sentinel,
    Cluster,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Postgres {
    /// `postgres://user:password@host:5432/database`.
    pub url: Secret,
    /// Who signs the server's certificate, in PEM: TLS is required then. Default: no TLS.
    #[deserr(default)]
    pub ca_file: Option<String>,
    /// Connections of this node. Default 4.
    #[deserr(default)]
    pub connections_max: Option<u32>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Embedded {
    /// The folder for journal and ledger. Made when it is missing.
    pub path: String,
}

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Bounds {
    /// The largest request body. Default 32MiB.
    #[deserr(default)]
    pub body_max: Option<Bytes>,
    /// All request bodies in memory together; beyond it callers get 503. Default: a quarter of RAM.
    #[deserr(default)]
    pub bodies_bytes_max: Option<Bytes>,
    /// The time a body may take to arrive. Default 60s.
    #[deserr(default)]
    pub body_timeout: Option<Span>,
    /// The largest request head. Default 64KiB.
    #[deserr(default)]
    pub head_max: Option<Bytes>,
    /// The time one write to a caller may block; one that does not read is cut, and pays for what was used. Default 60s.
    #[deserr(default)]
    pub write_timeout: Option<Span>,
    /// The time an idle connection of a caller stays open. Default 75s.
    #[deserr(default)]
    pub keepalive: Option<Span>,
    /// The time from a new connection (TLS included), or from the first byte of a further request, to the end of the
    /// request's head; then the connection is closed. Default 15s.
    #[deserr(default)]
    pub head_timeout: Option<Span>,
    /// Connections of callers; beyond it new ones are closed at once. Default 32768, or half of the files that the
    /// process may open.
    #[deserr(default)]
    pub connections_max: Option<u32>,
    /// Connections of one caller's address (of one /64 with IPv6); beyond it new ones are closed at once. A load
    /// balancer without PROXY protocol is one address. Default: half of `connections_max`.
    #[deserr(default)]
    pub connections_per_address_max: Option<u32>,
    /// Requests on one connection; after them it is closed in peace (HTTP/2: GOAWAY). Default 10000.
    #[deserr(default)]
    pub requests_per_connection_max: Option<u32>,
    /// Requests at once on one HTTP/2 connection; a caller that knows waits with more. Default 100.
    #[deserr(default)]
    pub http2_streams_max: Option<u32>,
    /// Calls in flight with money set aside. Default 65536.
    #[deserr(default)]
    pub open_holds_max: Option<u32>,
}

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Routing {
    /// From the request to its commit, over all attempts. Default 540s.
    #[deserr(default)]
    pub deadline: Option<Span>,
    /// Attempts per call, at most. Default 5.
    #[deserr(default)]
    pub attempts_max: Option<u32>,
    /// Until an upstream connection stands, TLS included. Default 2s.
    #[deserr(default)]
    pub connect: Option<Span>,
    /// From request sent to the response head: a time, or `auto`, learnt from past answers. Default auto.
    #[deserr(default)]
    pub first_byte: Option<Limit>,
    /// From request sent to the first meaningful event: a time, or `auto`. Default auto.
    #[deserr(default)]
    pub first_event: Option<Limit>,
    /// Between two pieces of an answer. Default 60s.
    #[deserr(default)]
    pub idle: Option<Span>,
    /// A whole answer. Default 60m.
    #[deserr(default)]
    pub stream_max: Option<Span>,
    /// One call in a hundred begins with a standby, so that its speed is known when it is needed. Default true.
    #[deserr(default)]
    pub explore: Option<bool>,
    /// The next two routes of a model with traffic keep a connection open (over HTTP/2, or over TLS with a `check`), so
    /// that a failover need not wait for one. Default true.
    #[deserr(default)]
    pub warm: Option<bool>,
}

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Drain {
    /// After SIGTERM: how long to keep accepting while /readyz says 503. Default 5s.
    #[deserr(default)]
    pub pre: Option<Span>,
    /// Then: how long calls in flight may go on. Default 10m.
    #[deserr(default)]
    pub max: Option<Span>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Provider {
    /// The language it speaks: `openai` or `anthropic`. Callers of the one are never sent to the other.
    pub dialect: DialectName,
    /// What it serves: `chat`, `completions`, `responses`, `embeddings`; or `messages`, `count_tokens`. Default:
    /// everything of its dialect; name what it has, or calls for the rest are tried there in vain.
    #[deserr(default)]
    pub surfaces: Option<Vec<SurfaceName>>,
    /// Everything before `/chat/completions` or `/messages`, such as `https://host/v1`.
    pub base_url: String,
    /// Its name may stand for a private address (loopback, 10.0.0.0/8 and the like). Not needed for an address itself, nor
    /// for a name that is no public one, such as `localhost`, `vllm` or `x.internal`. Default false.
    #[deserr(default)]
    pub private: Option<bool>,
    /// HTTP's version: `auto` (over TLS what both sides like best of 2 and 1.1, without TLS 1.1), `h1`, `h2` (2 over
    /// TLS and nothing else) or `h2c` (2 without TLS, for servers of which that is known). Default auto.
    #[deserr(default)]
    pub http: Option<HttpName>,
    /// The certificate authorities to trust there, instead of the system's: a PEM file. Over TLS only.
    #[deserr(default)]
    pub ca_file: Option<String>,
    /// What to show where the provider asks who calls (mTLS). Over TLS only.
    #[deserr(default)]
    pub client_certificate: Option<ClientCertificate>,
    /// The name to ask for and to find in its certificate, where that is not the host of `base_url`. Over TLS only.
    #[deserr(default)]
    pub server_name: Option<String>,
    /// The secret it gave us, sent as `Authorization: Bearer`, or to Anthropic as `x-api-key`.
    #[deserr(default)]
    pub credential: Option<Secret>,
    /// Several of them instead: they take turns in their route's one place, and one over its limit rests alone.
    #[deserr(default)]
    pub credentials: Option<Vec<Secret>>,
    /// A file with the secret alone instead: read again every second, and not taken while it cannot be used.
    #[deserr(default)]
    pub credential_file: Option<String>,
    /// A free question that tells whether it is well, put to each of its addresses. Default: none.
    #[deserr(default)]
    pub check: Option<Check>,
    /// Where it is; shows in logs and metrics.
    #[deserr(default)]
    pub region: Option<String>,
    /// It understands `stream_options`. Default true.
    #[deserr(default)]
    pub stream_usage: Option<bool>,
    /// The field for our output bound. Default `max_completion_tokens`; older servers need `max_tokens`.
    #[deserr(default)]
    pub output_field: Option<OutputFieldName>,
    /// What its errors mean where its status codes do not say it; the first rule that fits counts.
    #[deserr(default)]
    pub classify: Option<Vec<ClassifyRule>>,
    /// As in `routing`, for this provider alone.
    #[deserr(default)]
    pub connect: Option<Span>,
    /// As in `routing`, for this provider alone.
    #[deserr(default)]
    pub first_byte: Option<Limit>,
    /// As in `routing`, for this provider alone.
    #[deserr(default)]
    pub first_event: Option<Limit>,
    /// As in `routing`, for this provider alone.
    #[deserr(default)]
    pub idle: Option<Span>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Check {
    /// What to GET, from the host's root, without a credential; any 2xx passes.
    pub path: String,
    /// How often. Default 10s.
    #[deserr(default)]
    pub every: Option<Span>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct ClientCertificate {
    /// A PEM file with the certificate first and those that lead to its authority behind it.
    pub cert_file: String,
    /// A PEM file with its private key.
    pub key_file: String,
}

#[derive(Clone, Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct ClassifyRule {
    /// Only for this status. Default: any error.
    #[deserr(default)]
    pub status: Option<u16>,
    /// Only if the body holds this text, in small or capital letters. Default: any body.
    #[deserr(default)]
    pub body_contains: Option<String>,
    /// `transient` (the next route; this one is blamed), `rate_limit` (the next; the credential rests), `credential`
    /// (the next; it rests, and an alarm is logged) or `caller_fault` (no other route; its words go to the caller).
    pub treat_as: ClassName,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults)]
pub enum ClassName {
    #[deserr(rename = "transient")]
    Transient,
    #[deserr(rename = "rate_limit")]
    RateLimit,
    #[deserr(rename = "credential")]
    Credential,
    #[deserr(rename = "caller_fault")]
    CallerFault,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults, rename_all = lowercase)]
pub enum DialectName {
    Openai,
    Anthropic,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults)]
pub enum SurfaceName {
    #[deserr(rename = "chat")]
    Chat,
    #[deserr(rename = "completions")]
    Completions,
    #[deserr(rename = "responses")]
    Responses,
    #[deserr(rename = "embeddings")]
    Embeddings,
    #[deserr(rename = "messages")]
    Messages,
    #[deserr(rename = "count_tokens")]
    CountTokens,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults)]
pub enum HttpName {
    #[deserr(rename = "auto")]
    Auto,
    #[deserr(rename = "1.1")]
    Http1,
    #[deserr(rename = "h1")]
    H1,
    #[deserr(rename = "h2")]
    H2,
    #[deserr(rename = "h2c")]
    H2c,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults)]
pub enum OutputFieldName {
    #[deserr(rename = "max_completion_tokens")]
    MaxCompletionTokens,
    #[deserr(rename = "max_tokens")]
    MaxTokens,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Model {
    /// What callers pay.
    pub price: PriceList,
    /// What it can take and give.
    pub limits: ModelLimits,
    /// How its tokens are counted where bytes are too coarse a bound: `o200k` or `cl100k`. Default: not at
    /// all.
    #[deserr(default)]
    pub tokenizer: Option<TokenizerName>,
    /// It thinks before it speaks: learnt limits wait longer for it. Default false.
    #[deserr(default)]
    pub reasoning: Option<bool>,
    /// Which route is asked first: the heaviest (`weight`), or any in proportion (`weighted_random`). Default weight.
    #[deserr(default)]
    pub sort: Option<SortName>,
    /// What callers may ask for although it costs you more than its tokens and has no price here: `server_tools`
    /// (web search, code execution and the like), `speed`, `inference_geo`, `audio_output`, `service_tier` (`priority`
    /// without a price of its own). Default: nothing; such calls get 400.
    #[deserr(default)]
    pub unpriced: Option<Vec<ExtraName>>,
    /// Who serves it.
    pub routes: Vec<Route>,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults)]
pub enum ExtraName {
    #[deserr(rename = "server_tools")]
    ServerTools,
    #[deserr(rename = "speed")]
    Speed,
    #[deserr(rename = "inference_geo")]
    InferenceGeo,
    #[deserr(rename = "service_tier")]
    ServiceTier,
    #[deserr(rename = "audio_output")]
    AudioOutput,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults)]
pub enum SortName {
    #[deserr(rename = "weight")]
    Weight,
    #[deserr(rename = "weighted_random")]
    WeightedRandom,
}

#[derive(Clone, Copy, Debug, Deserr)]
#[deserr(error = Faults, rename_all = lowercase)]
pub enum TokenizerName {
    O200k,
    Cl100k,
}

/// USD per one million tokens, as text so that it is read exactly. What is left out is charged as
/// plain input.
#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct PriceList {
    /// Input.
    pub input: Decimal,
    /// Output, reasoning included.
    pub output: Decimal,
    /// Input read from the prompt cache.
    #[deserr(default)]
    pub cache_read: Option<Decimal>,
    /// Input written to the cache for five minutes.
    #[deserr(default)]
    pub cache_write_5m: Option<Decimal>,
    /// Input written to the cache for an hour.
    #[deserr(default)]
    pub cache_write_1h: Option<Decimal>,
    /// Audio input.
    #[deserr(default)]
    pub audio_input: Option<Decimal>,
    /// USD for each request, beside its tokens.
    #[deserr(default)]
    pub per_request: Option<Decimal>,
    /// What counts for the whole request when its prompt has more than `above` tokens.
    #[deserr(default)]
    pub long_context: Option<LongContext>,
    /// What counts where another service tier served: `priority`, `flex`, `batch`.
    #[deserr(default)]
    pub service_tiers: Option<Named<Price>>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct LongContext {
    /// Prompt tokens, cached ones included.
    pub above: u64,
    /// Input.
    pub input: Decimal,
    /// Output, reasoning included.
    pub output: Decimal,
    /// Input read from the prompt cache.
    #[deserr(default)]
    pub cache_read: Option<Decimal>,
    /// Input written to the cache for five minutes.
    #[deserr(default)]
    pub cache_write_5m: Option<Decimal>,
    /// Input written to the cache for an hour.
    #[deserr(default)]
    pub cache_write_1h: Option<Decimal>,
}

/// USD per one million tokens, of one card.
#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Price {
    /// Input.
    pub input: Decimal,
    /// Output, reasoning included.
    pub output: Decimal,
    /// Input read from the prompt cache.
    #[deserr(default)]
    pub cache_read: Option<Decimal>,
    /// Input written to the cache for five minutes.
    #[deserr(default)]
    pub cache_write_5m: Option<Decimal>,
    /// Input written to the cache for an hour.
    #[deserr(default)]
    pub cache_write_1h: Option<Decimal>,
    /// Audio input.
    #[deserr(default)]
    pub audio_input: Option<Decimal>,
    /// USD for each request, beside its tokens.
    #[deserr(default)]
    pub per_request: Option<Decimal>,
}

/// In tokens.
#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct ModelLimits {
    /// Input and output together.
    pub context: u64,
    /// Output of one answer; 0 for a model of embeddings.
    pub output: u64,
    /// One image at its largest. Default 4096.
    #[deserr(default)]
    pub image: Option<u64>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Route {
    /// A name under `providers`.
    pub provider: String,
    /// The model as that provider calls it. Default: our name.
    #[deserr(default)]
    pub model: Option<String>,
    /// Which route comes first: the highest. Default 100.
    #[deserr(default)]
    pub weight: Option<u32>,
    /// What it costs us there; booked beside what the caller pays.
    #[deserr(default)]
    pub cost: Option<Price>,
    /// Ask it for a stream also where a whole answer is wanted, and put that together here: so a silent upstream is
    /// noticed by its first event. Only for requests of well-known fields. Default false.
    #[deserr(default)]
    pub fold: Option<bool>,
    /// The parameters that it understands, for callers who send `require_parameters`. Default: all.
    #[deserr(default)]
    pub parameters: Option<Vec<String>>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Bootstrap {
    /// By name.
    pub accounts: Named<BootstrapAccount>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct BootstrapAccount {
    /// USD to begin with; booked once, when the account is made.
    #[deserr(default)]
    pub balance: Option<Decimal>,
    /// Its keys.
    #[deserr(default)]
    pub keys: Vec<BootstrapKey>,
    /// For all its keys together.
    #[deserr(default)]
    pub limits: Option<Limits>,
    /// For all its keys together, by model.
    #[deserr(default)]
    pub model_limits: Option<Named<Limits>>,
}

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Limits {
    /// Requests in any sixty seconds.
    #[deserr(default)]
    pub rpm: Option<u64>,
    /// Tokens in any sixty seconds; reserved at their bound, corrected at the end.
    #[deserr(default)]
    pub tpm: Option<u64>,
    /// Calls at the same time.
    #[deserr(default)]
    pub concurrency: Option<u64>,
    /// USD per day.
    #[deserr(default)]
    pub budget_day: Option<Decimal>,
    /// USD per month.
    #[deserr(default)]
    pub budget_month: Option<Decimal>,
    /// Where midnight is. Default UTC.
    #[deserr(default)]
    pub time_zone: Option<String>,
}

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct BootstrapKey {
    /// The key itself; only its digest is kept.
    pub key: Secret,
    /// What you call it.
    #[deserr(default)]
    pub name: Option<String>,
    /// Models it may use. Default: all.
    #[deserr(default)]
    pub models: Option<Vec<String>>,
    /// The output bound where the caller gives none. Default: the model's limit.
    #[deserr(default)]
    pub default_output_tokens: Option<u64>,
    /// Lower an output bound that the balance cannot carry, instead of refusing the call. Default false.
    #[deserr(default)]
    pub clamp_output: Option<bool>,
    /// The smallest output that clamping leaves. Default 1024.
    #[deserr(default)]
    pub clamp_min: Option<u64>,
    /// USD an hour of provider cost for calls left before their answer, above which they are charged.
    /// Default: 1 % of its spend of that hour, at least "0.10".
    #[deserr(default)]
    pub abandoned_max: Option<Decimal>,
    /// For this key alone.
    #[deserr(default)]
    pub limits: Option<Limits>,
}

/// Things by their names. (`deserr` 0.6.4 reads a `BTreeMap` too, but forgets the faults inside it.)
#[derive(Debug)]
pub struct Named<T>(pub BTreeMap<String, T>);

impl<T> Default for Named<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

/// A decimal number that stays text until it becomes an exact integer.
#[derive(Clone, Debug)]
pub struct Decimal(pub String);

/// A time such as `50ms`, `2s` or `10m`.
#[derive(Clone, Copy, Debug)]
pub struct Span(pub Duration);

/// A watchdog's limit: `auto`, or a time such as `5s`.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    Auto,
    Fixed(Span),
}

/// A size such as `64KiB` or `32MiB`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl<T: Deserr<Faults>> Deserr<Faults> for Named<T> {
    fn deserialize_from_value<V: IntoValue>(
        value: Value<V>,
        at: ValuePointerRef<'_>,
    ) -> Result<Self, Faults> {
        let Value::Map(map) = value else { return Err(wrong_kind(value, &[ValueKind::Map], at)) };
        let mut named = BTreeMap::new();
        let mut faults = Faults::default();
        for (name, value) in map.into_iter() {
            match T::deserialize_from_value(value.into_value(), at.push_key(&name)) {
                Ok(value) => {
                    named.insert(name, value);
                }
                Err(more) => faults.0.extend(more.0),
            }
        }
        if faults.0.is_empty() { Ok(Self(named)) } else { Err(faults) }
    }
}

impl Deserr<Faults> for Plain {
    /// An address alone, or the block.
    fn deserialize_from_value<V: IntoValue>(
        value: Value<V>,
        at: ValuePointerRef<'_>,
    ) -> Result<Self, Faults> {
        match value {
            Value::String(address) => Ok(Self { address, proxy_protocol: None }),
            block @ Value::Map(_) => {
                let PlainBlock { address, proxy_protocol } = PlainBlock::deserialize_from_value(block, at)?;
                Ok(Self { address, proxy_protocol })
            }
            other => Err(wrong_kind(other, &[ValueKind::String, ValueKind::Map], at)),
        }
    }
}

impl Deserr<Faults> for Secret {
    fn deserialize_from_value<V: IntoValue>(
        value: Value<V>,
        at: ValuePointerRef<'_>,
    ) -> Result<Self, Faults> {
        String::deserialize_from_value(value, at).map(Self::new)
    }
}

impl Deserr<Faults> for Decimal {
    fn deserialize_from_value<V: IntoValue>(
        value: Value<V>,
        at: ValuePointerRef<'_>,
    ) -> Result<Self, Faults> {
        match value {
            Value::String(text) => Ok(Self(text)),
            Value::Integer(number) => Ok(Self(number.to_string())),
            Value::NegativeInteger(number) => Ok(Self(number.to_string())),
            other => Err(wrong_kind(other, &[ValueKind::String, ValueKind::Integer], at)),
        }
    }
}

impl Deserr<Faults> for Span {
    fn deserialize_from_value<V: IntoValue>(
        value: Value<V>,
        at: ValuePointerRef<'_>,
    ) -> Result<Self, Faults> {
        match value {
            Value::String(text) => humantime::parse_duration(&text)
                .map(Self)
                .map_err(|e| unexpected(format!("`{text}` is no time such as 50ms, 2s or 10m ({e})"), at)),
            other => Err(wrong_kind(other, &[ValueKind::String], at)),
        }
    }
}

impl Deserr<Faults> for Limit {
    fn deserialize_from_value<V: IntoValue>(
        value: Value<V>,
        at: ValuePointerRef<'_>,
    ) -> Result<Self, Faults> {
        match value {
            Value::String(text) if text == "auto" => Ok(Self::Auto),
            other => Span::deserialize_from_value(other, at).map(Self::Fixed),
        }
    }
}

impl Deserr<Faults> for Bytes {
    fn deserialize_from_value<V: IntoValue>(
        value: Value<V>,
        at: ValuePointerRef<'_>,
    ) -> Result<Self, Faults> {
        match value {
            Value::Integer(number) => Ok(Self(number)),
            Value::String(text) => parse_bytes(&text)
                .map(Self)
                .ok_or_else(|| unexpected(format!("`{text}` is no size such as 64KiB or 32MiB"), at)),
            other => Err(wrong_kind(other, &[ValueKind::Integer, ValueKind::String], at)),
        }
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits)?;
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn wrong_kind<V: IntoValue>(actual: Value<V>, accepted: &[ValueKind], at: ValuePointerRef<'_>) -> Faults {
    let kind = ErrorKind::IncorrectValueKind { actual, accepted };
    take_cf_content(deserr::DeserializeError::error::<V>(None, kind, at))
}

fn unexpected(msg: String, at: ValuePointerRef<'_>) -> Faults {
    let kind: ErrorKind<'_, serde_json::Value> = ErrorKind::Unexpected { msg };
    take_cf_content(deserr::DeserializeError::error(None, kind, at))
}
