//! The config as it is meant: only states that make sense.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use filters::dialect::{Dialect, Manners, Operation, OutputField};
use filters::facts::Extra;
use filters::hold::Limits;
use filters::ids::EndpointId;
use filters::money::amount::parse_decimal;
use filters::money::{Amount, PriceCard, PriceList, Rate, Tier};
use filters::route::Sort;
use filters::upstream::classify::{Class, Rule};
use filters::upstream::watchdog::Limit;
use ipnet::IpNet;
use rustix::process::{Resource, getrlimit};

use super::reach::{self, Reach};
use super::records::{Keep, Slo};
use super::sentry::Tracker;
use super::status::{self, Status};
use super::telemetry::{self, Collector};
use super::watch::{self, Watching};
use super::{Faults, address, join, raw, sentry};
use crate::credential::{self, Credential};
use crate::secret::Secret;
use crate::settings::{AccountSettings, KeySettings, LimitSpec};

/// How long a call counts that nobody speaks of: at least two of a node's beats.
const SLOT_LEASE: std::ops::RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(60);
const SLOT_LEASE_DEFAULT: Duration = Duration::from_secs(10);
/// The longest that a command of Redis may take: every call waits for one.
const REDIS_TIMEOUT_MAX: Duration = Duration::from_millis(50);
/// Connections to Postgres, where nothing else is said.
const POSTGRES_CONNECTIONS_DEFAULT: u32 = 4;
/// The longest name of an account, a provider or a model, in bytes.
const NAME_BYTES_MAX: usize = 200;
/// Connections of callers, where nothing else is said and the system lets the process open the files.
const CONNECTIONS_DEFAULT: u32 = 1 << 15;
/// Open files that the process needs beside connections and their upstreams'.
pub const OTHER_FILES: u64 = 256;
/// The longest time that any limit may have.
const SPAN_MAX: Duration = Duration::from_secs(7 * 86_400);
/// The shortest key that is accepted, in bytes. Ours have 46.
const KEY_BYTES_MIN: usize = 8;

/// Everything the gateway runs by.
#[derive(Debug)]
pub struct Config {
    pub listen: Listen,
    /// The folder of this machine's journal; with the embedded store of its ledger too.
    pub data: PathBuf,
    pub store: Store,
    pub bounds: Bounds,
    pub routing: Routing,
    pub drain: Drain,
    pub keep: Keep,
    pub slo: Slo,
    /// Of an attempt, where its provider names none.
    pub timers: Timers,
    pub catalogue: Catalogue,
    /// The file names none: it is the one that the fleet has published.
    pub catalogue_of_fleet: bool,
    pub accounts: Vec<Account>,
    /// Where alarms go, beside the log.
    pub tracker: Option<Tracker>,
    /// Where spans and metrics go.
    pub collector: Option<Collector>,
    pub watching: Watching,
    pub status: Status,
}

/// Where money is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Store {
    /// In `data`, by this machine alone.
    Embedded,
    /// With other nodes.
    Fleet(Arc<Fleet>),
}

/// The servers that nodes of a fleet share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    pub redis: Redis,
    /// How long a call counts that nobody speaks of.
    pub slot_lease: Duration,
    pub postgres: Postgres,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// Never empty.
    pub urls: Vec<Secret>,
    pub mode: RedisMode,
    pub ca_file: Option<PathBuf>,
    /// For one command.
    pub timeout: Duration,
    /// Begins every key's name; letters, digits and dashes.
    pub prefix: String,
}

/// What the servers of `redis.urls` are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedisMode {
    Single,
    /// Sentinels, and their name for the primary.
    Sentinel {
        primary: String,
    },
    /// Some nodes of a cluster.
    Cluster,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Postgres {
    pub url: Secret,
    /// With it TLS is required.
    pub ca_file: Option<PathBuf>,
    /// At least one.
    pub connections_max: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Where callers connect: never empty, the first public one first.
    pub callers: Vec<Listener>,
    pub admin: SocketAddr,
    /// At least one.
    pub threads: usize,
}

/// An address at which callers connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Its field, for whoever has to mend it.
    pub field: &'static str,
    pub address: SocketAddr,
    pub tls: Option<TlsFiles>,
    /// Whether HTTP/2 may be spoken without TLS.
    pub h2c: bool,
    pub proxy_protocol: Option<ProxyProtocol>,
}

/// What a listener shows of itself, and whom it lets in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub client_ca: Option<PathBuf>,
}

/// Who may say whose connection it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyProtocol {
    /// Only they may connect, and they must say it.
    pub required: bool,
    /// Never empty.
    pub trusted: Vec<IpNet>,
}

#[derive(Clone, Debug)]
pub struct Bounds {
    pub body_bytes_max: usize,
    pub bodies_bytes_max: usize,
    pub body_timeout: Duration,
    pub head_bytes_max: usize,
    pub write_timeout: Duration,
    pub keepalive: Duration,
    pub head_timeout: Duration,
    pub connections_max: usize,
    pub connections_per_address_max: usize,
    pub requests_per_connection_max: u32,
    pub http2_streams_max: u32,
    pub open_holds_max: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Routing {
    pub deadline: Duration,
    pub attempts_max: u32,
    pub stream_max: Duration,
    pub explore: bool,
    /// Standbys keep a connection open.
    pub warm: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Drain {
    pub pre: Duration,
    pub max: Duration,
}

/// What can be asked for, and of whom.
#[derive(Debug, Default)]
pub struct Catalogue {
    pub models: HashMap<String, Arc<Model>>,
    /// Further names, each with the name of its model.
    pub aliases: BTreeMap<String, String>,
    /// By [`EndpointId`].
    pub endpoints: Vec<Endpoint>,
}

impl Catalogue {
    /// The model of that name or alias.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.get(name).or_else(|| self.models.get(self.aliases.get(name)?))
    }

    /// Whether a route of the model speaks the dialect.
    #[must_use]
    pub fn speaks(&self, model: &Model, dialect: Dialect) -> bool {
        let endpoints = model.routes.iter().filter_map(|id| self.endpoints.get(id.0));
        endpoints.into_iter().any(|endpoint| endpoint.provider.dialect == dialect)
    }

    /// Whether a route of the model serves the operation.
    #[must_use]
    pub fn serves(&self, model: &Model, operation: Operation) -> bool {
        self.routes_for(model, operation).next().is_some()
    }

    /// The routes of a model that serve an operation. A model that gives no output serves none that has one.
    pub fn routes_for(&self, model: &Model, operation: Operation) -> impl Iterator<Item = EndpointId> {
        let can = model.limits.output > 0 || !operation.has_output();
        let serves = move |id: &EndpointId| {
            self.endpoints.get(id.0).is_some_and(|endpoint| endpoint.provider.surfaces.contains(&operation))
        };
        model.routes.iter().copied().filter(move |id| can && serves(id))
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
    /// What may be asked for although it has no price.
    pub unpriced: Vec<Extra>,
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
    /// `provider/native-model`, for logs, metrics and headers; with `#2` and so on for further credentials.
    pub name: String,
    pub provider: Arc<Provider>,
    /// Which of the provider's credentials it uses.
    pub credential: usize,
    /// The first endpoint of its route: they differ in their credentials alone.
    pub place: EndpointId,
    pub manners: Manners,
    pub weight: u32,
    /// What it costs us.
    pub cost: Option<PriceCard>,
    /// The parameters that it understands; `None`: all.
    pub parameters: Option<Vec<String>>,
}

#[derive(Debug)]
pub struct Provider {
    pub name: String,
    pub dialect: Dialect,
    /// All of its dialect. Never empty.
    pub surfaces: Vec<Operation>,
    pub base: BaseUrl,
    /// Its name may stand for a private address.
    pub private: bool,
    pub reach: Reach,
    pub region: String,
    /// They take turns; none: it wants none.
    pub credentials: Vec<Credential>,
    /// A free question that tells whether it is well.
    pub check: Option<FreeCheck>,
    pub classify: Arc<[Rule]>,
    pub timers: Timers,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl {
    pub tls: bool,
    /// A name or an address; one of IPv6 without brackets.
    pub host: String,
    pub port: u16,
    /// As a head names it: the host, with the port where it is not the scheme's own.
    pub authority: String,
    /// Begins with `/` and does not end with it; or is empty.
    pub path: String,
}

impl Endpoint {
    /// What it sends to say who calls.
    #[must_use]
    pub fn credential(&self) -> Option<&Credential> {
        self.provider.credentials.get(self.credential)
    }
}

impl BaseUrl {
    fn new(tls: bool, host: &str, port: u16, path: &str) -> Self {
        // RFC 3986, section 3.2.2.
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let default = if tls { 443 } else { 80 };
        let authority = if port == default { bracketed } else { format!("{bracketed}:{port}") };
        Self { tls, host: host.to_owned(), port, authority, path: path.trim_end_matches('/').to_owned() }
    }

    /// Whether both are found at the same addresses.
    #[must_use]
    pub fn is_same_host(&self, other: &Self) -> bool {
        (&self.host, self.port) == (&other.host, other.port)
    }
}

impl Provider {
    /// Whether connections to both are alike, so that what is known of the one's addresses is true of the other's.
    #[must_use]
    pub fn is_reached_like(&self, other: &Self) -> bool {
        let of = |provider: &Self| (provider.reach.http, provider.reach.group, provider.check.clone());
        self.name == other.name
            && self.base.is_same_host(&other.base)
            && self.reach.server_name == other.reach.server_name
            && of(self) == of(other)
    }
}

/// A question to a provider's addresses that costs nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeCheck {
    /// Begins with `/`.
    pub path: String,
    pub every: Duration,
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
#[derive(Clone, Debug)]
pub struct Account {
    pub name: String,
    pub balance: Amount,
    pub keys: Vec<Key>,
    pub settings: AccountSettings,
}

#[derive(Clone, Debug)]
pub struct Key {
    pub secret: Secret,
    pub settings: KeySettings,
}

/// Turns what was written into what is meant.
///
/// # Errors
/// All faults at once.
pub fn check(file: raw::File) -> Result<Config, Faults> {
    let raw::File {
        listen,
        store,
        bounds,
        routing,
        drain,
        records,
        slo,
        providers,
        models,
        aliases,
        telemetry,
        bootstrap,
        sentry,
        probes,
        heartbeats,
        notifications,
        status,
    } = file;
    let mut check = Check::default();
    let listen = check.listen(&listen);
    let (data, store) = check.store(store);
    let bounds = check.bounds(&bounds);
    let timers = check.timers(&routing);
    let collector = telemetry::check(telemetry, &mut check.faults);
    let routing = check.routing(&routing);
    let drain = check.drain(&drain);
    let (keep, slo) = (records.check(&mut check.faults), slo.check(&mut check.faults));
    let catalogue_of_fleet =
        matches!(store, Store::Fleet(_)) && providers.is_none() && models.is_none() && aliases.0.is_empty();
    let catalogue = match (providers, models) {
        _ if catalogue_of_fleet => Catalogue::default(),
        (Some(providers), Some(models)) => {
            check.whole_catalogue(raw::CatalogueFile { providers, models, aliases }, timers)
        }
        // Which of them is missing has been said by who read the file.
        (_, _) => Catalogue::default(),
    };
    check.models_are_elsewhere = catalogue_of_fleet;
    let accounts = check.accounts(bootstrap, &catalogue);
    let tracker = sentry::check(sentry, &mut check.faults);
    let watching = watch::check(probes, heartbeats, notifications, &mut check.faults);
    let status = status::check(status, &mut check.faults);
    if !check.faults.0.is_empty() {
        return Err(check.faults);
    }
    match listen.zip(slo) {
        Some((listen, slo)) => Ok(Config {
            listen,
            data,
            store,
            bounds,
            routing,
            drain,
            keep,
            slo,
            timers,
            catalogue,
            catalogue_of_fleet,
            accounts,
            tracker,
            collector,
            watching,
            status,
        }),
        None => Err(Faults::one("listen", "cannot be used")),
    }
}

/// The same for a catalogue alone. `timers`: where a provider names none.
///
/// # Errors
/// All faults at once.
pub fn check_catalogue(file: raw::CatalogueFile, timers: Timers) -> Result<Catalogue, Faults> {
    let mut check = Check::default();
    let catalogue = check.whole_catalogue(file, timers);
    if check.faults.0.is_empty() { Ok(catalogue) } else { Err(check.faults) }
}

#[derive(Default)]
struct Check {
    faults: Faults,
    /// Nobody can tell from this file whether there is a model.
    models_are_elsewhere: bool,
}

impl Check {
    fn fault(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.faults.push(path, message);
    }

    fn listen(&mut self, raw: &raw::Listen) -> Option<Listen> {
        let callers = self.callers(raw);
        let admin = self.address("listen.admin", &raw.admin);
        if raw.threads == Some(0) {
            self.fault("listen.threads", "must be at least 1");
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = raw.threads.map_or(cores, usize::from);
        let listen = Listen { callers: callers?, admin: admin?, threads };
        let mut taken = vec![("listen.admin", listen.admin)];
        for listener in &listen.callers {
            let (field, address) = (listener.field, listener.address);
            if let Some((other, _)) = taken.iter().find(|(_, a)| *a == address && a.port() != 0) {
                self.fault(field, format!("must not be the same address as `{other}`"));
            }
            taken.push((field, address));
        }
        Some(listen)
    }

    fn callers(&mut self, raw: &raw::Listen) -> Option<Vec<Listener>> {
        let raw::Listen { http, https, internal, admin: _, threads: _ } = raw;
        if http.is_none() && https.is_none() {
            self.fault("listen", "needs `http` or `https`, or nobody can call");
            return None;
        }
        let mut callers = vec![];
        if let Some(raw::Plain { address, proxy_protocol }) = http {
            callers.push(self.listener("listen.http", address, proxy_protocol.as_ref()));
        }
        if let Some(raw::Https { address, cert_file, key_file, client_ca_file, proxy_protocol }) = https {
            let listener = self.listener("listen.https", address, proxy_protocol.as_ref());
            let tls = TlsFiles {
                cert: self.file("listen.https.cert_file", cert_file),
                key: self.file("listen.https.key_file", key_file),
                client_ca: client_ca_file.as_ref().map(|ca| self.file("listen.https.client_ca_file", ca)),
            };
            callers.push(listener.map(|listener| Listener { tls: Some(tls), ..listener }));
        }
        if let Some(raw::Internal { address, h2c, proxy_protocol }) = internal {
            let listener = self.listener("listen.internal", address, proxy_protocol.as_ref());
            callers.push(listener.map(|listener| Listener { h2c: h2c.unwrap_or(false), ..listener }));
        }
        callers.into_iter().collect()
    }

    /// One without TLS.
    fn listener(
        &mut self,
        field: &'static str,
        address: &str,
        proxy_protocol: Option<&raw::ProxyProtocol>,
    ) -> Option<Listener> {
        let proxy_protocol = proxy_protocol.map(|raw| self.proxy_protocol(field, raw));
        let address = self.address(field, address)?;
        Some(Listener { field, address, tls: None, h2c: false, proxy_protocol })
    }

    fn file(&mut self, path: &str, name: &str) -> PathBuf {
        if name.is_empty() {
            self.fault(path, "must name a file");
        }
        PathBuf::from(name)
    }

    fn proxy_protocol(&mut self, listener: &str, raw: &raw::ProxyProtocol) -> ProxyProtocol {
        let path = join(listener, "proxy_protocol.trusted");
        let mut trusted = vec![];
        for (index, network) in raw.trusted.iter().enumerate() {
            match network.parse::<IpNet>() {
                Ok(network) => trusted.push(network.trunc()),
                Err(_) => {
                    self.fault(
                        format!("{path}[{index}]"),
                        format!("`{network}` is no network such as 10.0.0.0/8 or fd00::/8"),
                    );
                }
            }
        }
        if raw.trusted.is_empty() {
            self.fault(path, "must name the load balancers' network: nobody else's word counts");
        }
        let required = match raw.mode {
            raw::ProxyModeName::Accept => false,
            raw::ProxyModeName::Require => true,
        };
        ProxyProtocol { required, trusted }
    }

    fn address(&mut self, path: &str, text: &str) -> Option<SocketAddr> {
        let address = text.parse();
        if address.is_err() {
            self.fault(path, format!("`{text}` is no address such as 127.0.0.1:8080"));
        }
        address.ok()
    }

    /// The folder, and who keeps money.
    fn store(&mut self, raw: raw::Store) -> (PathBuf, Store) {
        let raw::Store { embedded, redis, postgres, path } = raw;
        let fleet = redis.is_some() || postgres.is_some() || path.is_some();
        let (field, path) = match (&embedded, path) {
            (Some(embedded), _) => ("store.embedded.path", embedded.path.clone()),
            (None, path) => ("store.path", path.unwrap_or_default()),
        };
        if path.is_empty() {
            self.fault(field, "must name a folder");
        }
        let data = PathBuf::from(path);
        match (embedded, redis, postgres) {
            (Some(_), ..) if fleet => {
                self.fault(
                    "store",
                    "has `embedded` for one machine, or `redis`, `postgres` and `path` for a fleet",
                );
            }
            (Some(_), ..) => {}
            (None, Some(redis), Some(postgres)) => {
                let slot_lease = self.slot_lease(redis.slot_lease);
                let fleet = Fleet { redis: self.redis(redis), slot_lease, postgres: self.postgres(postgres) };
                return (data, Store::Fleet(Arc::new(fleet)));
            }
            (None, ..) => {
                self.fault(
                    "store",
                    "needs `embedded` for one machine, or `redis`, `postgres` and `path` for a fleet",
                );
            }
        }
        (data, Store::Embedded)
    }

    fn slot_lease(&mut self, given: Option<raw::Span>) -> Duration {
        let lease = given.map_or(SLOT_LEASE_DEFAULT, |span| span.0);
        if !SLOT_LEASE.contains(&lease) {
            self.fault("store.redis.slot_lease", "must be from 2s to 60s");
        }
        lease
    }

    fn redis(&mut self, raw: raw::Redis) -> Redis {
        let raw::Redis { urls, mode, primary, ca_file, timeout, prefix, slot_lease: _ } = raw;
        for (index, url) in urls.iter().enumerate() {
            if !["redis://", "rediss://"].iter().any(|scheme| url.expose().starts_with(scheme)) {
                self.fault(format!("store.redis.urls[{index}]"), "must begin with redis:// or rediss://");
            }
        }
        let mode = match mode.unwrap_or(raw::RedisModeName::Single) {
            raw::RedisModeName::Single => RedisMode::Single,
            raw::RedisModeName::Cluster => RedisMode::Cluster,
            raw::RedisModeName::Sentinel => {
                RedisMode::Sentinel { primary: primary.clone().unwrap_or_default() }
            }
        };
        match &mode {
            RedisMode::Sentinel { primary } if primary.is_empty() => {
                self.fault("store.redis.primary", "must be Sentinel's name for the primary");
            }
            RedisMode::Single | RedisMode::Cluster if primary.is_some() => {
                self.fault("store.redis.primary", "is for `mode: sentinel`");
            }
            RedisMode::Single if urls.len() > 1 => {
                self.fault("store.redis.urls", "must be one, unless `mode` is `sentinel` or `cluster`");
            }
            RedisMode::Single | RedisMode::Sentinel { .. } | RedisMode::Cluster => {}
        }
        if urls.is_empty() {
            self.fault("store.redis.urls", "must name a server");
        }
        let timeout = timeout.map_or(REDIS_TIMEOUT_MAX, |span| span.0);
        if timeout.is_zero() || timeout > REDIS_TIMEOUT_MAX {
            self.fault(
                "store.redis.timeout",
                "must be more than 0 and at most 50ms: every call waits for it",
            );
        }
        let prefix = prefix.unwrap_or_else(|| "tollgate".to_owned());
        let sound = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if prefix.is_empty() || !prefix.chars().all(sound) {
            self.fault("store.redis.prefix", "must have letters, digits and dashes");
        }
        Redis { urls, mode, ca_file: ca_file.map(PathBuf::from), timeout, prefix }
    }

    fn postgres(&mut self, raw: raw::Postgres) -> Postgres {
        let raw::Postgres { url, ca_file, connections_max } = raw;
        if !["postgres://", "postgresql://"].iter().any(|scheme| url.expose().starts_with(scheme)) {
            self.fault("store.postgres.url", "must begin with postgres://");
        }
        let connections_max = connections_max.unwrap_or(POSTGRES_CONNECTIONS_DEFAULT);
        if connections_max == 0 {
            self.fault("store.postgres.connections_max", "must be more than 0");
        }
        let connections_max = usize::try_from(connections_max).unwrap_or(usize::MAX);
        Postgres { url, ca_file: ca_file.map(PathBuf::from), connections_max }
    }

    fn bounds(&mut self, raw: &raw::Bounds) -> Bounds {
        let bytes = |value: Option<raw::Bytes>, default: u64| {
            usize::try_from(value.map_or(default, |b| b.0)).unwrap_or(usize::MAX)
        };
        let span =
            |value: Option<raw::Span>, seconds| value.map_or_else(|| Duration::from_secs(seconds), |s| s.0);
        let count = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        let connections = raw.connections_max.unwrap_or_else(connections_default);
        let per_address = raw.connections_per_address_max.unwrap_or_else(|| connections.div_ceil(2));
        let bounds = Bounds {
            body_bytes_max: bytes(raw.body_max, 32 << 20),
            bodies_bytes_max: bytes(raw.bodies_bytes_max, memory_bytes() / 4),
            body_timeout: span(raw.body_timeout, 60),
            head_bytes_max: bytes(raw.head_max, 64 << 10),
            write_timeout: span(raw.write_timeout, 60),
            keepalive: span(raw.keepalive, 75),
            head_timeout: span(raw.head_timeout, 15),
            connections_max: count(connections),
            connections_per_address_max: count(per_address),
            requests_per_connection_max: raw.requests_per_connection_max.unwrap_or(10_000),
            http2_streams_max: raw.http2_streams_max.unwrap_or(100),
            open_holds_max: usize::try_from(raw.open_holds_max.unwrap_or(1 << 16)).unwrap_or(1 << 16),
        };
        for (name, value) in [
            ("body_max", bounds.body_bytes_max),
            ("head_max", bounds.head_bytes_max),
            ("connections_max", bounds.connections_max),
            ("connections_per_address_max", bounds.connections_per_address_max),
            ("requests_per_connection_max", count(bounds.requests_per_connection_max)),
            ("http2_streams_max", count(bounds.http2_streams_max)),
            ("open_holds_max", bounds.open_holds_max),
        ] {
            if value == 0 {
                self.fault(format!("bounds.{name}"), "must be more than 0");
            }
        }
        if bounds.bodies_bytes_max < bounds.body_bytes_max {
            self.fault("bounds.bodies_bytes_max", "must hold at least one body of `bounds.body_max`");
        }
        for (name, value) in [
            ("body_timeout", bounds.body_timeout),
            ("write_timeout", bounds.write_timeout),
            ("head_timeout", bounds.head_timeout),
        ] {
            self.positive(format!("bounds.{name}"), value);
        }
        bounds
    }

    fn positive(&mut self, path: String, value: Duration) {
        if value.is_zero() || value > SPAN_MAX {
            self.fault(path, "must be more than 0 and at most 7 days");
        }
    }

    fn drain(&mut self, raw: &raw::Drain) -> Drain {
        let drain = Drain {
            pre: raw.pre.map_or(Duration::from_secs(5), |s| s.0),
            max: raw.max.map_or(Duration::from_secs(600), |s| s.0),
        };
        if drain.pre > SPAN_MAX || drain.max > SPAN_MAX {
            self.fault("drain", "times must be at most 7 days");
        }
        drain
    }

    fn routing(&mut self, raw: &raw::Routing) -> Routing {
        let routing = Routing {
            deadline: raw.deadline.map_or(Duration::from_secs(540), |s| s.0),
            attempts_max: raw.attempts_max.unwrap_or(5),
            stream_max: raw.stream_max.map_or(Duration::from_secs(3600), |s| s.0),
            explore: raw.explore.unwrap_or(true),
            warm: raw.warm.unwrap_or(true),
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
            let dialect = match raw.dialect {
                raw::DialectName::Openai => Dialect::OpenAi,
                raw::DialectName::Anthropic => Dialect::Anthropic,
            };
            let surfaces = self.surfaces(&join(&path, "surfaces"), dialect, raw.surfaces.as_deref());
            let Some(base) = self.base_url(&join(&path, "base_url"), &raw.base_url) else { continue };
            let credentials = self.credentials(&path, &raw);
            let reach = reach::check(&path, &base, &raw, &mut self.faults);
            let provider = Provider {
                name: name.clone(),
                dialect,
                surfaces,
                private: raw.private.unwrap_or(false) || address::is_local(&base.host),
                base,
                reach,
                region: raw.region.unwrap_or_default(),
                credentials,
                check: raw.check.and_then(|raw| self.free_check(&join(&path, "check"), raw)),
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

    fn surfaces(
        &mut self,
        path: &str,
        dialect: Dialect,
        named: Option<&[raw::SurfaceName]>,
    ) -> Vec<Operation> {
        let of_dialect: Vec<Operation> =
            Operation::ALL.into_iter().filter(|operation| operation.dialect() == dialect).collect();
        let Some(named) = named else { return of_dialect };
        let named: Vec<Operation> = named.iter().copied().map(operation).collect();
        let words = |operations: &[Operation]| {
            operations.iter().map(|operation| operation.word()).collect::<Vec<_>>().join(", ")
        };
        if named.is_empty() {
            let message = format!("must name at least one of: {}; leave it out for all", words(&of_dialect));
            self.fault(path, message);
            return of_dialect;
        }
        let foreign: Vec<Operation> =
            named.iter().copied().filter(|operation| !of_dialect.contains(operation)).collect();
        if !foreign.is_empty() {
            let message = format!(
                "`{}` is of another dialect than this provider's; its own are: {}",
                words(&foreign),
                words(&of_dialect)
            );
            self.fault(path, message);
        }
        named
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

    fn free_check(&mut self, path: &str, raw: raw::Check) -> Option<FreeCheck> {
        let every = raw.every.map_or(Duration::from_secs(10), |span| span.0);
        if !(Duration::from_secs(1)..=SPAN_MAX).contains(&every) {
            self.fault(join(path, "every"), "must be at least 1s and at most 7 days");
        }
        let readable = raw.path.starts_with('/') && raw.path.parse::<http::uri::PathAndQuery>().is_ok();
        if !readable {
            self.fault(join(path, "path"), format!("`{}` is no path such as /health", raw.path));
        }
        readable.then_some(FreeCheck { path: raw.path, every })
    }

    fn credentials(&mut self, path: &str, raw: &raw::Provider) -> Vec<Credential> {
        let raw::Provider { credential, credentials, credential_file, .. } = raw;
        let said = [credential.is_some(), credentials.is_some(), credential_file.is_some()];
        if said.into_iter().filter(|said| *said).count() > 1 {
            let message = "name one of `credential`, `credentials` and `credential_file`";
            self.fault(join(path, "credential"), message);
            return vec![];
        }
        if let Some(file) = credential_file {
            let found = Credential::in_file(Path::new(file));
            let found = found.map_err(|message| self.fault(join(path, "credential_file"), message));
            return found.into_iter().collect();
        }
        let at = join(path, if credential.is_some() { "credential" } else { "credentials" });
        let written = credential.iter().chain(credentials.iter().flatten());
        // An environment variable may be there and empty: that is none.
        let texts: Vec<&Secret> = written.filter(|secret| !secret.expose().is_empty()).collect();
        if credentials.is_some() && texts.is_empty() {
            self.fault(&at, "name at least one credential, or leave it out");
        }
        for (index, text) in texts.iter().enumerate() {
            if let Err(message) = credential::sound(text.expose()) {
                self.fault(&at, message);
            }
            if texts.iter().take(index).any(|other| other == text) {
                self.fault(&at, format!("number {} is the same as one before it", index + 1));
            }
        }
        texts.into_iter().cloned().map(Credential::fixed).collect()
    }

    fn base_url(&mut self, path: &str, text: &str) -> Option<BaseUrl> {
        let parsed = text.parse::<http::Uri>().ok().and_then(|uri| {
            let tls = match uri.scheme_str()? {
                "https" => true,
                "http" => false,
                _ => return None,
            };
            let host = uri.host()?.trim_matches(['[', ']']);
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
            plain.then(|| BaseUrl::new(tls, host, port, uri.path()))
        });
        if parsed.is_none() {
            // A user or a query may be a secret.
            let shown = if text.contains(['@', '?']) { "this".to_owned() } else { format!("`{text}`") };
            self.fault(path, format!("{shown} is no address such as https://host/v1, without query or user"));
        }
        if let Some(base) = parsed.as_ref().filter(|base| address::is_never(&base.host)) {
            let what = "is link-local, a cloud's metadata service, or nobody's address: it is never called";
            self.fault(path, format!("`{}` {what}; name the provider's own address", base.host));
        }
        parsed
    }

    fn whole_catalogue(&mut self, file: raw::CatalogueFile, timers: Timers) -> Catalogue {
        let raw::CatalogueFile { providers, models, aliases } = file;
        let providers = self.providers(providers.0, timers);
        let mut catalogue = self.catalogue(models.0, &providers);
        catalogue.aliases = self.aliases(&aliases.0, &catalogue);
        catalogue
    }

    fn catalogue(
        &mut self,
        raw: BTreeMap<String, raw::Model>,
        providers: &HashMap<String, (Arc<Provider>, bool, OutputField)>,
    ) -> Catalogue {
        if raw.is_empty() {
            self.fault("models", "name at least one model");
        }
        let mut catalogue = Catalogue { models: HashMap::new(), aliases: BTreeMap::new(), endpoints: vec![] };
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
                for endpoint in self.route(&path, &name, raw, providers, catalogue.endpoints.len()) {
                    routes.push(EndpointId(catalogue.endpoints.len()));
                    catalogue.endpoints.push(endpoint);
                }
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
                unpriced: raw.unpriced.unwrap_or_default().into_iter().map(extra).collect(),
                routes,
            };
            let served = Operation::ALL.into_iter().any(|operation| catalogue.serves(&model, operation));
            if !served && !model.routes.is_empty() {
                let message = "serve nothing of this model: see `surfaces` of their providers (a model with \
                               `limits.output` of 0 needs `embeddings`)";
                self.fault(join(&path, "routes"), message);
            }
            catalogue.models.insert(name, Arc::new(model));
        }
        catalogue
    }

    /// A route: one endpoint for each credential of its provider, all of them at the same `place`.
    fn route(
        &mut self,
        path: &str,
        model: &str,
        raw: raw::Route,
        providers: &HashMap<String, (Arc<Provider>, bool, OutputField)>,
        place: usize,
    ) -> Vec<Endpoint> {
        let Some((provider, stream_usage, output_field)) = providers.get(&raw.provider) else {
            let known = providers.keys().cloned().collect::<Vec<_>>().join(", ");
            let message = format!("there is no provider `{}`; there are: {known}", raw.provider);
            self.fault(join(path, "provider"), message);
            return vec![];
        };
        let native_model = raw.model.unwrap_or_else(|| model.to_owned());
        self.name(&join(path, "model"), &native_model);
        let cost = raw.cost.map(|cost| self.price(&join(path, "cost"), &cost));
        let endpoint = |credential: usize| {
            let suffix = if credential > 0 { format!("#{}", credential + 1) } else { String::new() };
            Endpoint {
                name: format!("{}/{native_model}{suffix}", provider.name),
                provider: Arc::clone(provider),
                credential,
                place: EndpointId(place),
                manners: Manners {
                    native_model: native_model.clone(),
                    stream_usage: *stream_usage,
                    output_field: *output_field,
                    fold: raw.fold.unwrap_or(false),
                },
                weight: raw.weight.unwrap_or(100),
                cost,
                parameters: raw.parameters.clone(),
            }
        };
        (0..provider.credentials.len().max(1)).map(endpoint).collect()
    }

    /// Every alias with the model at the end of its chain.
    fn aliases(&mut self, raw: &BTreeMap<String, String>, catalogue: &Catalogue) -> BTreeMap<String, String> {
        let mut aliases = BTreeMap::new();
        for (name, target) in raw {
            let path = join("aliases", name);
            self.name(&path, name);
            if catalogue.models.contains_key(name) {
                self.fault(path, "is the name of a model already; an alias needs a name of its own");
                continue;
            }
            let mut chain = vec![name.as_str()];
            let mut end = target.as_str();
            while let Some(next) = raw.get(end).filter(|_| !chain.contains(&end)) {
                chain.push(end);
                end = next;
            }
            if chain.contains(&end) {
                chain.push(end);
                self.fault(
                    path,
                    format!("goes in a cycle: {}; let one of them name a model", chain.join(" → ")),
                );
            } else if catalogue.models.contains_key(end) {
                aliases.insert(name.clone(), end.to_owned());
            } else {
                self.fault(path, format!("there is no model or alias `{end}`"));
            }
        }
        aliases
    }

    fn name(&mut self, path: &str, name: &str) {
        let sound = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
        if !sound {
            self.fault(path, "a name must have 1 to 200 visible ASCII characters and no spaces");
        }
    }

    fn limits(&mut self, path: &str, raw: &raw::ModelLimits) -> Limits {
        let limits = Limits { context: raw.context, output: raw.output, image: raw.image.unwrap_or(4096) };
        if limits.context == 0 || limits.output > limits.context {
            self.fault(path, "`context` must be at least 1, and `output` at most `context`");
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
        let text = raw.key.expose();
        if text.len() < KEY_BYTES_MIN || !text.bytes().all(|b| b.is_ascii_graphic()) {
            self.fault(join(path, "key"), "must have at least 8 visible ASCII characters and no spaces");
        }
        if let Some(other) = seen.insert(text.to_owned(), path.to_owned()) {
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
        Key { secret: raw.key, settings }
    }

    fn known_model(&mut self, path: &str, model: &str, catalogue: &Catalogue) {
        if !self.models_are_elsewhere && catalogue.model(model).is_none() {
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

fn operation(raw: raw::SurfaceName) -> Operation {
    match raw {
        raw::SurfaceName::Chat => Operation::Chat,
        raw::SurfaceName::Completions => Operation::Completions,
        raw::SurfaceName::Responses => Operation::Responses,
        raw::SurfaceName::Embeddings => Operation::Embeddings,
        raw::SurfaceName::Messages => Operation::Messages,
        raw::SurfaceName::CountTokens => Operation::CountTokens,
    }
}

fn extra(raw: raw::ExtraName) -> Extra {
    match raw {
        raw::ExtraName::ServerTools => Extra::ServerTools,
        raw::ExtraName::Speed => Extra::Speed,
        raw::ExtraName::InferenceGeo => Extra::InferenceGeo,
        raw::ExtraName::ServiceTier => Extra::ServiceTier,
        raw::ExtraName::AudioOutput => Extra::AudioOutput,
    }
}

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

/// As many as the process may open files for: one for the caller, one for the upstream.
fn connections_default() -> u32 {
    let files_max = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let room = files_max.saturating_sub(OTHER_FILES) / 2;
    u32::try_from(room).unwrap_or(CONNECTIONS_DEFAULT).clamp(1, CONNECTIONS_DEFAULT)
}

/// The machine's memory in bytes, or 4 GiB where it does not say.
fn memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(4 << 30, |kib| kib << 10)
}

#[cfg(test)]
mod tests;
