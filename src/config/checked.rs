//! The config as it is meant: only states that make sense.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use filters::dialect::{Dialect, Manners, OutputField};
use filters::hold::Limits;
use filters::ids::EndpointId;
use filters::money::amount::parse_decimal;
use filters::money::{Amount, PriceCard, PriceList, Rate, Tier};
use filters::route::Sort;
use filters::upstream::classify::{Class, Rule};
use filters::upstream::watchdog::Limit;

use super::{Faults, join, raw};
use crate::secret::Secret;
use crate::settings::{AccountSettings, KeySettings, LimitSpec};

/// The longest name of an account, a provider or a model, in bytes.
const NAME_BYTES_MAX: usize = 200;
/// The longest time that any limit may have.
const SPAN_MAX: Duration = Duration::from_secs(7 * 86_400);
/// The shortest key that is accepted, in bytes. Ours have 46.
const KEY_BYTES_MIN: usize = 8;

/// Everything the gateway runs by.
#[derive(Debug)]
pub struct Config {
    pub listen: Listen,
    /// The embedded store's folder.
    pub data: PathBuf,
    pub bounds: Bounds,
    pub routing: Routing,
    pub drain: Drain,
    pub catalogue: Catalogue,
    pub accounts: Vec<Account>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    pub http: SocketAddr,
    pub admin: SocketAddr,
    /// At least one.
    pub threads: usize,
}

#[derive(Debug)]
pub struct Bounds {
    pub body_bytes_max: usize,
    pub bodies_bytes_max: usize,
    pub body_timeout: Duration,
    pub head_bytes_max: usize,
    pub write_timeout: Duration,
    pub keepalive: Duration,
    pub open_holds_max: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Routing {
    pub deadline: Duration,
    pub attempts_max: u32,
    pub stream_max: Duration,
    pub explore: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Drain {
    pub pre: Duration,
    pub max: Duration,
}

/// What can be asked for, and of whom.
#[derive(Debug)]
pub struct Catalogue {
    pub models: HashMap<String, Arc<Model>>,
    /// By [`EndpointId`].
    pub endpoints: Vec<Endpoint>,
}

impl Catalogue {
    /// Whether a route of the model speaks the dialect.
    #[must_use]
    pub fn speaks(&self, model: &Model, dialect: Dialect) -> bool {
        let endpoints = model.routes.iter().filter_map(|id| self.endpoints.get(id.0));
        endpoints.into_iter().any(|endpoint| endpoint.provider.dialect == dialect)
    }
}

#[derive(Debug)]
pub struct Model {
    pub name: String,
    pub price: PriceList,
    pub limits: Limits,
    pub tokenizer: Option<Tokenizer>,
    /// It thinks before it speaks.
    pub reasoning: bool,
    pub sort: Sort,
    /// Never empty.
    pub routes: Vec<EndpointId>,
}

/// How tokens are counted exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// Of `OpenAI`'s models since GPT-4o.
    O200k,
    /// Of those before.
    Cl100k,
}

/// One addressable deployment of a model: a route of the config.
#[derive(Debug)]
pub struct Endpoint {
    /// `provider/native-model`, for logs, metrics and headers.
    pub name: String,
    pub provider: Arc<Provider>,
    pub manners: Manners,
    pub weight: u32,
    /// What it costs us.
    pub cost: Option<PriceCard>,
}

#[derive(Debug)]
pub struct Provider {
    pub name: String,
    pub dialect: Dialect,
    pub base: BaseUrl,
    pub region: String,
    pub credential: Option<Secret>,
    pub classify: Arc<[Rule]>,
    pub timers: Timers,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl {
    pub tls: bool,
    pub host: String,
    pub port: u16,
    /// Begins with `/` and does not end with it; or is empty.
    pub path: String,
}

impl BaseUrl {
    /// `host`, with the port where it is not the scheme's own.
    #[must_use]
    pub fn authority(&self) -> String {
        let default = if self.tls { 443 } else { 80 };
        if self.port == default { self.host.clone() } else { format!("{}:{}", self.host, self.port) }
    }

    /// Whether both are found at the same addresses.
    #[must_use]
    pub fn is_same_host(&self, other: &Self) -> bool {
        (&self.host, self.port) == (&other.host, other.port)
    }
}

/// The limits on an attempt at one provider.
#[derive(Clone, Copy, Debug)]
pub struct Timers {
    pub connect: Duration,
    pub first_byte: Limit,
    pub first_event: Limit,
    pub idle: Duration,
}

/// An account to make when it is not there.
#[derive(Debug)]
pub struct Account {
    pub name: String,
    pub balance: Amount,
    pub keys: Vec<Key>,
    pub settings: AccountSettings,
}

#[derive(Debug)]
pub struct Key {
    pub secret: Secret,
    pub settings: KeySettings,
}

/// Turns what was written into what is meant.
///
/// # Errors
/// All faults at once.
pub fn check(file: raw::File) -> Result<Config, Faults> {
    let raw::File { listen, store, bounds, routing, drain, providers, models, bootstrap } = file;
    let mut check = Check::default();
    let listen = check.listen(&listen);
    let data = PathBuf::from(store.embedded.path);
    if data.as_os_str().is_empty() {
        check.fault("store.embedded.path", "must name a folder");
    }
    let bounds = check.bounds(&bounds);
    let timers = check.timers(&routing);
    let routing = check.routing(&routing);
    let drain = Drain {
        pre: drain.pre.map_or(Duration::from_secs(5), |s| s.0),
        max: drain.max.map_or(Duration::from_secs(600), |s| s.0),
    };
    if drain.pre > SPAN_MAX || drain.max > SPAN_MAX {
        check.fault("drain", "times must be at most 7 days");
    }
    let providers = check.providers(providers.0, timers);
    let catalogue = check.catalogue(models.0, &providers);
    let accounts = check.accounts(bootstrap, &catalogue);
    if !check.faults.0.is_empty() {
        return Err(check.faults);
    }
    match listen {
        Some(listen) => Ok(Config { listen, data, bounds, routing, drain, catalogue, accounts }),
        None => Err(Faults::one("listen", "cannot be used")),
    }
}

#[derive(Default)]
struct Check {
    faults: Faults,
}

impl Check {
    fn fault(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.faults.push(path, message);
    }

    fn listen(&mut self, raw: &raw::Listen) -> Option<Listen> {
        let http = self.address("listen.http", &raw.http);
        let admin = self.address("listen.admin", &raw.admin);
        if raw.threads == Some(0) {
            self.fault("listen.threads", "must be at least 1");
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = raw.threads.map_or(cores, usize::from);
        let listen = Listen { http: http?, admin: admin?, threads };
        if listen.http == listen.admin && listen.http.port() != 0 {
            self.fault("listen.admin", "must not be the same address as `listen.http`");
        }
        Some(listen)
    }

    fn address(&mut self, path: &str, text: &str) -> Option<SocketAddr> {
        let address = text.parse();
        if address.is_err() {
            self.fault(path, format!("`{text}` is no address such as 127.0.0.1:8080"));
        }
        address.ok()
    }

    fn bounds(&mut self, raw: &raw::Bounds) -> Bounds {
        let bytes = |value: Option<raw::Bytes>, default: u64| {
            usize::try_from(value.map_or(default, |b| b.0)).unwrap_or(usize::MAX)
        };
        let span =
            |value: Option<raw::Span>, seconds| value.map_or_else(|| Duration::from_secs(seconds), |s| s.0);
        let bounds = Bounds {
            body_bytes_max: bytes(raw.body_max, 32 << 20),
            bodies_bytes_max: bytes(raw.bodies_bytes_max, memory_bytes() / 4),
            body_timeout: span(raw.body_timeout, 60),
            head_bytes_max: bytes(raw.head_max, 64 << 10),
            write_timeout: span(raw.write_timeout, 60),
            keepalive: span(raw.keepalive, 75),
            open_holds_max: usize::try_from(raw.open_holds_max.unwrap_or(1 << 16)).unwrap_or(1 << 16),
        };
        for (name, value) in [
            ("body_max", bounds.body_bytes_max),
            ("head_max", bounds.head_bytes_max),
            ("open_holds_max", bounds.open_holds_max),
        ] {
            if value == 0 {
                self.fault(format!("bounds.{name}"), "must be more than 0");
            }
        }
        if bounds.bodies_bytes_max < bounds.body_bytes_max {
            self.fault("bounds.bodies_bytes_max", "must hold at least one body of `bounds.body_max`");
        }
        for (name, value) in [("body_timeout", bounds.body_timeout), ("write_timeout", bounds.write_timeout)]
        {
            self.positive(format!("bounds.{name}"), value);
        }
        bounds
    }

    fn positive(&mut self, path: String, value: Duration) {
        if value.is_zero() || value > SPAN_MAX {
            self.fault(path, "must be more than 0 and at most 7 days");
        }
    }

    fn routing(&mut self, raw: &raw::Routing) -> Routing {
        let routing = Routing {
            deadline: raw.deadline.map_or(Duration::from_secs(540), |s| s.0),
            attempts_max: raw.attempts_max.unwrap_or(5),
            stream_max: raw.stream_max.map_or(Duration::from_secs(3600), |s| s.0),
            explore: raw.explore.unwrap_or(true),
        };
        if !(1..=5).contains(&routing.attempts_max) {
            self.fault("routing.attempts_max", "must be from 1 to 5");
        }
        self.positive("routing.deadline".to_owned(), routing.deadline);
        self.positive("routing.stream_max".to_owned(), routing.stream_max);
        routing
    }

    fn timers(&mut self, raw: &raw::Routing) -> Timers {
        let span =
            |value: Option<raw::Span>, seconds| value.map_or_else(|| Duration::from_secs(seconds), |s| s.0);
        let timers = Timers {
            connect: span(raw.connect, 2),
            first_byte: raw.first_byte.map_or(Limit::Auto, limit),
            first_event: raw.first_event.map_or(Limit::Auto, limit),
            idle: span(raw.idle, 60),
        };
        self.check_timers("routing", &timers);
        timers
    }

    fn check_timers(&mut self, path: &str, timers: &Timers) {
        let Timers { connect, first_byte, first_event, idle } = *timers;
        self.positive(join(path, "connect"), connect);
        self.positive(join(path, "idle"), idle);
        for (name, limit) in [("first_byte", first_byte), ("first_event", first_event)] {
            if let Limit::Fixed(value) = limit {
                self.positive(join(path, name), value);
            }
        }
    }

    fn providers(
        &mut self,
        raw: BTreeMap<String, raw::Provider>,
        defaults: Timers,
    ) -> HashMap<String, (Arc<Provider>, bool, OutputField)> {
        if raw.is_empty() {
            self.fault("providers", "name at least one provider");
        }
        let mut providers = HashMap::new();
        for (name, raw) in raw {
            let path = join("providers", &name);
            self.name(&path, &name);
            let span = |value: Option<raw::Span>, default| value.map_or(default, |s: raw::Span| s.0);
            let timers = Timers {
                connect: span(raw.connect, defaults.connect),
                first_byte: raw.first_byte.map_or(defaults.first_byte, limit),
                first_event: raw.first_event.map_or(defaults.first_event, limit),
                idle: span(raw.idle, defaults.idle),
            };
            self.check_timers(&path, &timers);
            let Some(base) = self.base_url(&join(&path, "base_url"), &raw.base_url) else { continue };
            let provider = Provider {
                name: name.clone(),
                dialect: match raw.dialect {
                    raw::DialectName::Openai => Dialect::OpenAi,
                    raw::DialectName::Anthropic => Dialect::Anthropic,
                },
                base,
                region: raw.region.unwrap_or_default(),
                credential: self.credential(&join(&path, "credential"), raw.credential),
                classify: self.classify(&path, raw.classify.unwrap_or_default()),
                timers,
            };
            let field = match raw.output_field {
                None | Some(raw::OutputFieldName::MaxCompletionTokens) => OutputField::MaxCompletionTokens,
                Some(raw::OutputFieldName::MaxTokens) => OutputField::MaxTokens,
            };
            providers.insert(name, (Arc::new(provider), raw.stream_usage.unwrap_or(true), field));
        }
        providers
    }

    fn classify(&mut self, path: &str, rules: Vec<raw::ClassifyRule>) -> Arc<[Rule]> {
        for (index, rule) in rules.iter().enumerate() {
            let path = format!("{path}.classify[{index}]");
            if rule.status.is_some_and(|status| !(400..=599).contains(&status)) {
                self.fault(join(&path, "status"), "must be from 400 to 599");
            }
            if rule.body_contains.as_deref() == Some("") {
                self.fault(join(&path, "body_contains"), "must not be empty");
            }
            if rule.status.is_none() && rule.body_contains.is_none() {
                self.fault(path, "name a `status`, a text in `body_contains`, or both");
            }
        }
        rules.into_iter().map(rule).collect()
    }

    fn credential(&mut self, path: &str, text: Option<String>) -> Option<Secret> {
        let text = text.filter(|t| !t.is_empty())?;
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            self.fault(path, "must be visible ASCII without spaces, as it goes into a header");
        }
        Some(Secret::new(text))
    }

    fn base_url(&mut self, path: &str, text: &str) -> Option<BaseUrl> {
        let parsed = text.parse::<http::Uri>().ok().and_then(|uri| {
            let tls = match uri.scheme_str()? {
                "https" => true,
                "http" => false,
                _ => return None,
            };
            let host = uri.host()?.trim_matches(['[', ']']).to_owned();
            // An authority may have a port that is none.
            let port = match (uri.port_u16(), uri.authority()?.port()) {
                (Some(port), _) => port,
                (None, None) if !uri.authority()?.as_str().ends_with(':') => {
                    if tls {
                        443
                    } else {
                        80
                    }
                }
                (None, _) => return None,
            };
            let plain = uri.query().is_none()
                && !text.contains('#')
                && !uri.authority()?.as_str().contains('@')
                && !host.is_empty();
            plain.then(|| BaseUrl { tls, host, port, path: uri.path().trim_end_matches('/').to_owned() })
        });
        if parsed.is_none() {
            self.fault(
                path,
                format!("`{text}` is no address such as https://host/v1, without query or user"),
            );
        }
        parsed
    }

    fn catalogue(
        &mut self,
        raw: BTreeMap<String, raw::Model>,
        providers: &HashMap<String, (Arc<Provider>, bool, OutputField)>,
    ) -> Catalogue {
        if raw.is_empty() {
            self.fault("models", "name at least one model");
        }
        let mut catalogue = Catalogue { models: HashMap::new(), endpoints: vec![] };
        for (name, raw) in raw {
            let path = join("models", &name);
            self.name(&path, &name);
            let price = self.price_list(&join(&path, "price"), raw.price);
            let limits = self.limits(&join(&path, "limits"), &raw.limits);
            if raw.routes.is_empty() {
                self.fault(join(&path, "routes"), "name at least one route");
            }
            let mut routes = vec![];
            for (index, raw) in raw.routes.into_iter().enumerate() {
                let path = format!("{path}.routes[{index}]");
                let Some((provider, stream_usage, output_field)) = providers.get(&raw.provider) else {
                    let known = providers.keys().cloned().collect::<Vec<_>>().join(", ");
                    let message = format!("there is no provider `{}`; there are: {known}", raw.provider);
                    self.fault(join(&path, "provider"), message);
                    continue;
                };
                let native_model = raw.model.unwrap_or_else(|| name.clone());
                self.name(&join(&path, "model"), &native_model);
                let manners = Manners {
                    native_model: native_model.clone(),
                    stream_usage: *stream_usage,
                    output_field: *output_field,
                };
                let cost = raw.cost.map(|cost| self.price(&join(&path, "cost"), &cost));
                routes.push(EndpointId(catalogue.endpoints.len()));
                catalogue.endpoints.push(Endpoint {
                    name: format!("{}/{native_model}", provider.name),
                    provider: Arc::clone(provider),
                    manners,
                    weight: raw.weight.unwrap_or(100),
                    cost,
                });
            }
            let tokenizer = raw.tokenizer.map(|name| match name {
                raw::TokenizerName::O200k => Tokenizer::O200k,
                raw::TokenizerName::Cl100k => Tokenizer::Cl100k,
            });
            let model = Model {
                name: name.clone(),
                price,
                limits,
                tokenizer,
                reasoning: raw.reasoning.unwrap_or(false),
                sort: match raw.sort {
                    None | Some(raw::SortName::Weight) => Sort::Weight,
                    Some(raw::SortName::WeightedRandom) => Sort::WeightedRandom,
                },
                routes,
            };
            catalogue.models.insert(name, Arc::new(model));
        }
        catalogue
    }

    fn name(&mut self, path: &str, name: &str) {
        let sound = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
        if !sound {
            self.fault(path, "a name must have 1 to 200 visible ASCII characters and no spaces");
        }
    }

    fn limits(&mut self, path: &str, raw: &raw::ModelLimits) -> Limits {
        let limits = Limits { context: raw.context, output: raw.output, image: raw.image.unwrap_or(4096) };
        if limits.context == 0 || limits.output == 0 || limits.output > limits.context {
            self.fault(path, "`output` must be at least 1 and at most `context`");
        }
        limits
    }

    fn price_list(&mut self, path: &str, raw: raw::PriceList) -> PriceList {
        let raw::PriceList {
            input,
            output,
            cache_read,
            cache_write_5m,
            cache_write_1h,
            audio_input,
            per_request,
            long_context,
            service_tiers,
        } = raw;
        let base = raw::Price {
            input,
            output,
            cache_read,
            cache_write_5m,
            cache_write_1h,
            audio_input,
            per_request,
        };
        let standard = self.price(path, &base);
        let long_context = long_context.map(|raw| {
            let raw::LongContext { above, input, output, cache_read, cache_write_5m, cache_write_1h } = raw;
            let (audio_input, per_request) = (base.audio_input.clone(), base.per_request.clone());
            let card = raw::Price {
                input,
                output,
                cache_read,
                cache_write_5m,
                cache_write_1h,
                audio_input,
                per_request,
            };
            (above, self.price(&join(path, "long_context"), &card))
        });
        let mut tiers = vec![];
        for (name, card) in service_tiers.unwrap_or_default().0 {
            let path = join(&join(path, "service_tiers"), &name);
            let tier = match name.as_str() {
                "priority" => Tier::Priority,
                "flex" => Tier::Flex,
                "batch" => Tier::Batch,
                _ => {
                    self.fault(path, "is not one of: priority, flex, batch");
                    continue;
                }
            };
            tiers.push((tier, self.price(&path, &card)));
        }
        let mut list = PriceList { version: 0, standard, long_context, tiers };
        // The same prices have the same version, over restarts and machines.
        list.version = crc32fast::hash(format!("{list:?}").as_bytes());
        list
    }

    fn price(&mut self, path: &str, raw: &raw::Price) -> PriceCard {
        let mut rate = |key: &str, text: &raw::Decimal| match Rate::parse_usd_per_million(&text.0) {
            Ok(rate) => rate,
            Err(e) => {
                self.fault(join(path, key), format!("{e}: USD per one million tokens, such as \"0.15\""));
                Rate::FREE
            }
        };
        let input = rate("input", &raw.input);
        let mut or_input =
            |key: &str, text: &Option<raw::Decimal>| text.as_ref().map_or(input, |text| rate(key, text));
        let cache_read = or_input("cache_read", &raw.cache_read);
        let cache_write_5m = or_input("cache_write_5m", &raw.cache_write_5m);
        let cache_write_1h = or_input("cache_write_1h", &raw.cache_write_1h);
        let audio_input = or_input("audio_input", &raw.audio_input);
        let output = rate("output", &raw.output);
        let per_request_pico = match raw.per_request.as_ref().map(|text| parse_decimal(&text.0, 12)) {
            None => 0,
            Some(Ok(pico)) if pico <= 1_000_000_000_000_000 => u64::try_from(pico).unwrap_or(u64::MAX),
            Some(Ok(_)) => {
                self.fault(join(path, "per_request"), "must be at most 1000 USD");
                0
            }
            Some(Err(e)) => {
                self.fault(join(path, "per_request"), format!("{e}: USD, such as \"0.001\""));
                0
            }
        };
        PriceCard { input, output, cache_read, cache_write_5m, cache_write_1h, audio_input, per_request_pico }
    }

    fn accounts(&mut self, raw: Option<raw::Bootstrap>, catalogue: &Catalogue) -> Vec<Account> {
        let mut accounts = vec![];
        let mut seen = HashMap::new();
        for (name, raw) in raw.map(|b| b.accounts.0).unwrap_or_default() {
            let path = join("bootstrap.accounts", &name);
            self.name(&path, &name);
            let balance = match raw.balance.as_ref().map(|text| Amount::parse_usd(&text.0)) {
                None => Amount::ZERO,
                Some(Ok(balance)) => balance,
                Some(Err(e)) => {
                    self.fault(join(&path, "balance"), format!("{e}: USD, such as \"10.00\""));
                    Amount::ZERO
                }
            };
            let mut keys = vec![];
            for (index, raw) in raw.keys.into_iter().enumerate() {
                let path = format!("{path}.keys[{index}]");
                keys.push(self.key(&path, raw, catalogue, &mut seen));
            }
            let settings = AccountSettings {
                limits: self.limit_spec(&join(&path, "limits"), raw.limits),
                model_limits: raw
                    .model_limits
                    .unwrap_or_default()
                    .0
                    .into_iter()
                    .map(|(model, limits)| {
                        let path = join(&join(&path, "model_limits"), &model);
                        self.known_model(&path, &model, catalogue);
                        let spec = self.limit_spec(&path, Some(limits));
                        (model, spec)
                    })
                    .collect(),
            };
            accounts.push(Account { name, balance, keys, settings });
        }
        accounts
    }

    fn key(
        &mut self,
        path: &str,
        raw: raw::BootstrapKey,
        catalogue: &Catalogue,
        seen: &mut HashMap<String, String>,
    ) -> Key {
        if raw.key.len() < KEY_BYTES_MIN || !raw.key.bytes().all(|b| b.is_ascii_graphic()) {
            self.fault(join(path, "key"), "must have at least 8 visible ASCII characters and no spaces");
        }
        if let Some(other) = seen.insert(raw.key.clone(), path.to_owned()) {
            self.fault(join(path, "key"), format!("is the same as {other}: a key belongs to one account"));
        }
        for model in raw.models.iter().flatten() {
            self.known_model(&join(path, "models"), model, catalogue);
        }
        let settings = KeySettings {
            name: raw.name.unwrap_or_default(),
            models: raw.models,
            default_output_tokens: raw.default_output_tokens,
            clamp_output: raw.clamp_output.unwrap_or(false),
            clamp_min: raw.clamp_min,
            abandoned_max: raw.abandoned_max.map(|d| d.0),
            limits: self.limit_spec(&join(path, "limits"), raw.limits),
        };
        if let Err(bad) = settings.check() {
            self.fault(join(path, bad.field), bad.message);
        }
        Key { secret: Secret::new(raw.key), settings }
    }

    fn known_model(&mut self, path: &str, model: &str, catalogue: &Catalogue) {
        if !catalogue.models.contains_key(model) {
            self.fault(path, format!("there is no model `{model}`"));
        }
    }

    fn limit_spec(&mut self, path: &str, raw: Option<raw::Limits>) -> LimitSpec {
        let raw::Limits { rpm, tpm, concurrency, budget_day, budget_month, time_zone } =
            raw.unwrap_or_default();
        let spec = LimitSpec {
            rpm,
            tpm,
            concurrency,
            budget_day: budget_day.map(|d| d.0),
            budget_month: budget_month.map(|d| d.0),
            time_zone,
        };
        if let Err(bad) = spec.meant() {
            self.fault(join(path, bad.field), bad.message);
        }
        spec
    }
}

/// The machine's memory in bytes, or 4 GiB where it does not say.
fn rule(raw: raw::ClassifyRule) -> Rule {
    let treat_as = match raw.treat_as {
        raw::ClassName::Transient => Class::Transient,
        raw::ClassName::RateLimit => Class::RateLimit,
        raw::ClassName::Credential => Class::Credential,
        raw::ClassName::CallerFault => Class::CallerFault,
    };
    Rule { status: raw.status, body_contains: raw.body_contains, treat_as }
}

fn limit(raw: raw::Limit) -> Limit {
    match raw {
        raw::Limit::Auto => Limit::Auto,
        raw::Limit::Fixed(span) => Limit::Fixed(span.0),
    }
}

fn memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(4 << 30, |kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use filters::dialect::Dialect;

    use super::super::parse;

    const GOOD: &str = r#"
listen: { http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }
store: { embedded: { path: ./data } }
providers:
  p: { dialect: openai, base_url: "https://host.example/v1/", credential: "${SECRET}" }
models:
  m:
    price: { input: "1.005", output: 10 }
    limits: { context: 1000, output: 100 }
    routes: [ { provider: p, model: native, cost: { input: "0.5", output: "5" } } ]
bootstrap:
  accounts:
    a: { balance: "1.50", keys: [ { key: sk-test-alpha } ] }
"#;

    fn vars(name: &str) -> Option<String> {
        (name == "SECRET").then(|| "prov-key".to_owned())
    }

    fn faults(text: &str) -> Vec<(Option<usize>, String)> {
        let faults = parse(text, vars).expect_err("faults");
        faults.0.into_iter().map(|f| (f.line, f.path)).collect()
    }

    #[test]
    fn a_good_file_is_read_as_meant() {
        let config = parse(GOOD, vars).unwrap_or_else(|e| panic!("{e}"));
        let model = &config.catalogue.models["m"];
        let card = model.price.standard;
        assert_eq!(card.input.pico(), 1_005_000);
        assert_eq!(card.cache_read, card.input);
        let endpoint = &config.catalogue.endpoints[0];
        assert_eq!((endpoint.name.as_str(), endpoint.provider.base.path.as_str()), ("p/native", "/v1"));
        assert_eq!(endpoint.provider.credential.as_ref().unwrap().expose(), "prov-key");
        assert_eq!(config.accounts[0].balance.nano(), 1_500_000_000);
        assert!(!format!("{config:?}").contains("prov-key"), "secrets never print");
    }

    #[test]
    fn all_faults_are_reported_at_once_with_line_and_path() {
        let text = GOOD
            .replace("admin: 127.0.0.1:9090", "admin: nowhere")
            .replace("\"1.005\"", "\"-1\"")
            .replace("provider: p,", "provider: q,")
            .replace("balance: \"1.50\"", "balance: \"1.0000000001\"");
        assert_eq!(
            faults(&text),
            [
                (Some(2), "listen.admin".to_owned()),
                (Some(8), "models.m.price.input".to_owned()),
                (Some(10), "models.m.routes[0].provider".to_owned()),
                (Some(13), "bootstrap.accounts.a.balance".to_owned()),
            ]
        );
    }

    #[test]
    fn unknown_keys_wrong_kinds_and_missing_keys_come_together() {
        let text = GOOD
            .replace("embedded: { path: ./data }", "embeded: { path: ./data }")
            .replace("context: 1000", "context: many")
            .replace("output: 10 }", "}");
        let paths: Vec<_> = faults(&text).into_iter().map(|(_, path)| path).collect();
        for path in ["store.embeded", "models.m.limits.context", "models.m.price"] {
            assert!(paths.iter().any(|p| p == path), "{path} in {paths:?}");
        }
    }

    #[test]
    fn a_price_written_as_a_float_is_refused_rather_than_rounded() {
        let text = GOOD.replace("\"1.005\"", "1.005");
        assert!(faults(&text).contains(&(Some(8), "models.m.price.input".to_owned())));
    }

    #[test]
    fn one_model_may_have_routes_of_both_dialects() {
        let mixed = GOOD
            .replace("models:\n", "  q: { dialect: anthropic, base_url: \"http://h\" }\nmodels:\n")
            .replace("routes: [ ", "routes: [ { provider: q }, ");
        let speaks = |text: &str| {
            let catalogue = parse(text, vars).unwrap_or_else(|e| panic!("{e}")).catalogue;
            [Dialect::OpenAi, Dialect::Anthropic].map(|d| catalogue.speaks(&catalogue.models["m"], d))
        };
        assert_eq!((speaks(&mixed), speaks(GOOD)), ([true, true], [true, false]));
    }

    #[test]
    fn a_key_of_two_accounts_is_refused() {
        let text = format!("{GOOD}    b: {{ keys: [ {{ key: sk-test-alpha }} ] }}\n");
        assert_eq!(faults(&text).len(), 1);
    }
}
