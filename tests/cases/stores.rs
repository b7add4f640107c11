//! The servers that the nodes of a run share, when it is on the fleet's store: a Redis (one, one with a replica, a
//! cluster) and a database, each behind a relay; and everything that is done to them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::{Duration, Instant};

use regex::Regex;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::case::Case;
use super::relay::{Command, Effect, Fault, Gate, Relay};

#[path = "../it/support/postgres.rs"]
#[expect(
    dead_code,
    clippy::panic,
    reason = "the other test bed uses the rest; a server that is not there ends it"
)]
pub mod postgres;
#[path = "../it/support/redis.rs"]
#[expect(
    dead_code,
    clippy::panic,
    clippy::unwrap_used,
    reason = "the other test bed uses the rest; a server that is not there ends it"
)]
pub mod servers;

use servers::{Cluster, Kind, Server};

/// How long a server may take to follow.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a case needs of its stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    layout: Layout,
    valkey: bool,
    /// Without `FUNCTION`, as some providers have it.
    scripts: bool,
    /// The server keeps what it has over a restart.
    keeps: bool,
    /// A database server of its own, since it is stopped.
    own_database: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Single,
    Replica,
    Cluster,
}

/// Something that is done to a store, understood.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Sent to every primary.
    Command(Vec<String>),
    Signal(Which, String),
    Stop(Which),
    Start(Which),
    /// The replica hears nothing any more.
    CutLink,
    HealLink,
    /// Callers write something.
    Write,
    /// The replica becomes the primary, and the address leads to it.
    Promote,
    Relay(Which, Change),
    Wait(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Redis,
    Database,
}

/// What a relay does from now on.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    Fault { verb: Option<String>, nth: usize, what: Effect },
    Delay(Duration),
    Gate(Gate),
    Cut,
    Mend,
}

/// The stores of one run.
pub struct Stores {
    redis: Mutex<Primary>,
    cluster: bool,
    front: Relay,
    database: postgres::Database,
    server: Option<Arc<StdMutex<postgres::Server>>>,
    database_front: Relay,
    /// Whether the database server is stopped.
    database_stopped: StdMutex<bool>,
}

struct Primary {
    servers: Vec<Server>,
    replica: Option<(Server, Relay)>,
    frozen: bool,
    stopped: bool,
}

/// Databases of runs that leave their server alone are in one.
static SHARED: StdMutex<Option<postgres::Server>> = StdMutex::new(None);

/// Stops what runs shared.
pub fn stop_shared() {
    *SHARED.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

impl Needs {
    /// `None`: the embedded store will do.
    pub fn of(case: &Case) -> Result<Option<Self>, String> {
        let mut needs =
            Self { layout: Layout::Single, valkey: false, scripts: false, keeps: false, own_database: false };
        let mut any = case.fleet || case.calls().any(|client| client.instances.is_some_and(|n| n > 1));
        for infra in &case.infra {
            if let Some(text) = &infra.redis {
                any = true;
                needs.layout(text)?;
            }
            let acts = [&infra.action, &infra.proxy].into_iter().flatten();
            for text in acts {
                any |= mentions_store(text) || mentions_instance(text);
                needs.keeps |= keeps_data(text);
                for act in acts_of(text).ok().into_iter().flatten() {
                    needs.own_database |= matches!(
                        act,
                        Act::Stop(Which::Database)
                            | Act::Start(Which::Database)
                            | Act::Signal(Which::Database, _)
                    );
                    if matches!(act, Act::CutLink | Act::HealLink | Act::Promote) {
                        needs.layout = Layout::Replica;
                    }
                }
            }
        }
        if case.scripts {
            (any, needs.scripts) = (true, true);
        }
        Ok(any.then_some(needs))
    }

    fn layout(&mut self, text: &str) -> Result<(), String> {
        let cluster = Regex::new(r"^(?:redis )?cluster(?:,? (?:of |with )?3 (?:masters|primaries|nodes))?$")
            .map_err(|e| e.to_string())?;
        for part in text.split([',', ';']).map(str::trim) {
            match part {
                "single" | "one" | "standalone" => {}
                "valkey" => self.valkey = true,
                "no functions" | "functions blocked" | "scripts only" | "FUNCTION blocked" => {
                    self.scripts = true;
                }
                "persistent" | "appendonly" | "aof" => self.keeps = true,
                "replica" | "with replica" | "primary and replica" | "primary with replica" | "1 replica" => {
                    self.layout = Layout::Replica;
                }
                part if cluster.is_match(part) => self.layout = Layout::Cluster,
                other => return Err(format!("redis `{other}` is not known to the runner")),
            }
        }
        Ok(())
    }

    fn arguments(self) -> Vec<&'static str> {
        let mut arguments = vec![];
        if self.scripts {
            arguments.extend(["--rename-command", "FUNCTION", ""]);
        }
        if self.keeps {
            arguments.extend(["--appendonly", "yes", "--appendfsync", "always"]);
        }
        arguments
    }
}

/// Whether a text speaks of the stores of a fleet.
pub fn mentions_store(text: &str) -> bool {
    let text = text.to_lowercase();
    ["redis", "valkey", "postgres", "database", "replica", "failover"].iter().any(|word| text.contains(word))
        || text.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == "db")
}

/// Whether a text tells processes apart.
pub fn mentions_instance(text: &str) -> bool {
    Regex::new(r"\binstances? [A-Z]\b").is_ok_and(|pattern| pattern.is_match(text))
}

fn keeps_data(text: &str) -> bool {
    ["with data", "keeps its data", "with its data", "from its files", "from disk"]
        .iter()
        .any(|t| text.contains(t))
}

/// Understands an action on stores: clauses in their order.
pub fn acts_of(text: &str) -> Result<Vec<Act>, String> {
    // What is in brackets is for people.
    let brackets = Regex::new(r"\s*\([^)]*\)").map_err(|e| e.to_string())?;
    let plain = brackets.replace_all(text, "").into_owned();
    let separators = Regex::new(r"\s*(?:;|,| and then | then | and )\s*").map_err(|e| e.to_string())?;
    let mut acts = vec![];
    for clause in separators.split(&plain).filter(|clause| !clause.is_empty()) {
        acts.extend(clause_of(clause).ok_or_else(|| format!("`{clause}` is not known to the runner"))?);
    }
    Ok(acts)
}

fn clause_of(text: &str) -> Option<Vec<Act>> {
    let matches = |pattern: &str| Regex::new(pattern).ok().and_then(|pattern| pattern.captures(text));
    let which = |word: &str| if word == "redis" || word == "valkey" { Which::Redis } else { Which::Database };
    const STORE: &str = "(redis|valkey|db|postgres|database|the db|the database)";
    if let Some(found) = matches(&format!(r"(?i)^(SIG[A-Z]+) {STORE}(?: primary| server| process)?$")) {
        return Some(vec![Act::Signal(which(&found[2].to_lowercase()), found[1].to_uppercase())]);
    }
    if let Some(found) = matches(&format!(r"(?i)^(freeze|pause|thaw|resume|unfreeze) {STORE}$")) {
        let stops = ["freeze", "pause"].contains(&found[1].to_lowercase().as_str());
        let signal = if stops { "SIGSTOP" } else { "SIGCONT" };
        return Some(vec![Act::Signal(which(&found[2].to_lowercase()), signal.to_owned())]);
    }
    if let Some(found) =
        matches(&format!(r"(?i)^(?:stop|kill|kill -9|shut down) {STORE}(?: primary| server)?$"))
    {
        return Some(vec![Act::Stop(which(&found[1].to_lowercase()))]);
    }
    if let Some(found) =
        matches(&format!(r"(?i)^start {STORE}(?: again)?(?: (?:empty|without data|with (?:its )?data))?$"))
    {
        return Some(vec![Act::Start(which(&found[1].to_lowercase()))]);
    }
    let restart = format!(
        r"(?i)^(?:restart {STORE}|{STORE} restarts?)(?: (?:empty|without data|with (?:its )?data))?$"
    );
    if let Some(found) = matches(&restart) {
        let named = found.get(1).or_else(|| found.get(2))?.as_str().to_lowercase();
        return Some(vec![Act::Stop(which(&named)), Act::Start(which(&named))]);
    }
    if matches(r"(?i)^(?:debug sleep|cut|pause|stop|delay|freeze|sigstop) (?:the )?(?:replica|replica'?s? link|replica link|replication|link)$")
        .is_some()
    {
        return Some(vec![Act::CutLink]);
    }
    if matches(r"(?i)^(?:heal|mend|resume) (?:the )?(?:replica link|replication|link)$").is_some() {
        return Some(vec![Act::HealLink]);
    }
    if matches(r"(?i)^(?:write|writes|some writes|write something)$").is_some() {
        return Some(vec![Act::Write]);
    }
    if matches(r"(?i)^(?:promote (?:the )?replica|fail ?over(?: to (?:the )?replica)?|redis fails? ?over)$")
        .is_some()
    {
        return Some(vec![Act::Promote]);
    }
    if let Some(found) = matches(r"(?i)^(?:wait|sleep) (\d+) (ms|s)$") {
        return Some(vec![Act::Wait(span(&found[1], &found[2])?)]);
    }
    if let Some(found) = matches(&format!(r"(?i)^(?:a )?{STORE}(?: tcp)? proxy (.*)$")) {
        let which = which(&found[1].to_lowercase());
        return Some(vec![Act::Relay(which, change_of(&found[2])?)]);
    }
    let command = matches(r"^(?:redis|valkey|redis-cli) ([A-Z][A-Z ]*.*)$")?;
    Some(vec![Act::Command(command[1].split_whitespace().map(str::to_owned).collect())])
}

fn span(count: &str, unit: &str) -> Option<Duration> {
    let count: u64 = count.parse().ok()?;
    Some(if unit == "ms" { Duration::from_millis(count) } else { Duration::from_secs(count) })
}

/// What a relay is to do, in words.
fn change_of(text: &str) -> Option<Change> {
    let matches = |pattern: &str| Regex::new(pattern).ok().and_then(|pattern| pattern.captures(text));
    const NTH: &str = r"(first|second|third|fourth|fifth|\d+(?:st|nd|rd|th)|next)";
    const OF: &str = r"(?: of (?:the )?(\w+)(?: script| command| call)?)?";
    let nth = |word: &str| match word {
        "first" | "next" => Some(1),
        "second" => Some(2),
        "third" => Some(3),
        "fourth" => Some(4),
        "fifth" => Some(5),
        number => number.trim_end_matches(|c: char| c.is_ascii_alphabetic()).parse().ok(),
    };
    let verb = |found: Option<regex::Match<'_>>| match found.map(|word| word.as_str().to_lowercase()) {
        None => Some(None),
        Some(word) => match word.as_str() {
            "hold" | "admit" | "admission" | "reserve" | "acquire" | "limit" => {
                Some(Some("admit".to_owned()))
            }
            "settle" | "capture" | "release" | "commit" | "end" => Some(Some("settle".to_owned())),
            _ => None,
        },
    };
    if let Some(found) = matches(&format!(
        r"(?i)^(?:drops|loses|swallows) the {NTH} reply{OF}(?: after forwarding (?:the|its) command)?$"
    )) {
        let (nth, verb) = (nth(&found[1].to_lowercase())?, verb(found.get(2))?);
        return Some(Change::Fault { verb, nth, what: Effect::LoseReply });
    }
    if let Some(found) = matches(&format!(
        r"(?i)^(closes|cuts|resets)(?: the connection)? (?:instead of|before|for) the {NTH} (reply|command){OF}(?: after forwarding (?:the|its) command)?$"
    )) {
        let (nth, verb) = (nth(&found[2].to_lowercase())?, verb(found.get(4))?);
        let what = match (found[1].to_lowercase().as_str(), found[3].to_lowercase().as_str()) {
            (_, "command") => Effect::CloseBefore,
            ("resets", _) => Effect::ResetForReply,
            _ => Effect::CloseForReply,
        };
        return Some(Change::Fault { verb, nth, what });
    }
    if let Some(found) = matches(&format!(r"(?i)^delays the {NTH} reply{OF}(?: by)? (\d+) (ms|s)$")) {
        let (nth, verb) = (nth(&found[1].to_lowercase())?, verb(found.get(2))?);
        return Some(Change::Fault { verb, nth, what: Effect::Late(span(&found[3], &found[4])?) });
    }
    if let Some(found) = matches(
        r"(?i)^(?:delays|adds|delays (?:all|every|each)(?: of the)? repl(?:y|ies))(?: by)? (\d+) (ms|s)(?: to (?:every|each) reply)?$",
    ) {
        return Some(Change::Delay(span(&found[1], &found[2])?));
    }
    let all = [
        (r"(?i)^(?:cuts|closes|resets|drops)(?: all| every| the)? connections?$", Change::Cut),
        (
            r"(?i)^(?:goes silent|is silent|swallows everything|drops everything|accepts and never answers|accepts but never answers|blackholes|black-holes|partitions)$",
            Change::Gate(Gate::Silent),
        ),
        (
            r"(?i)^(?:refuses|refuses connections|closes at once|is down|goes down)$",
            Change::Gate(Gate::Closed),
        ),
        (r"(?i)^(?:passes|passes again|heals|mends|is mended|is removed|recovers|ends)$", Change::Mend),
    ];
    all.into_iter().find(|(pattern, _)| matches(pattern).is_some()).map(|(_, change)| change)
}

impl Stores {
    pub async fn start(needs: Needs) -> Result<Self, String> {
        let (servers, replica) = apart(move || start_redis(needs)).await??;
        let front = Relay::start(local(servers[0].port), true).await?;
        let own = needs.own_database;
        let (database, port, server) = blocking(move || {
            if own {
                let server = postgres::Server::start("max_connections = 60\n");
                let database = server.database();
                return (database, server.port, Some(Arc::new(StdMutex::new(server))));
            }
            let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
            let shared = shared.get_or_insert_with(|| postgres::Server::start("max_connections = 300\n"));
            (shared.database(), shared.port, None)
        })
        .await?;
        let database_front = Relay::start(local(port), false).await?;
        Ok(Self {
            redis: Mutex::new(Primary { servers, replica, frozen: false, stopped: false }),
            cluster: needs.layout == Layout::Cluster,
            front,
            database,
            server,
            database_front,
            database_stopped: StdMutex::new(false),
        })
    }

    /// The block `store:` of a node.
    pub async fn config(&self, path: &std::path::Path) -> Value {
        let front = format!("redis://{}", self.front.address);
        let redis = if self.cluster {
            let urls: Vec<String> = self.redis.lock().await.servers.iter().map(Server::url).collect();
            json!({ "urls": urls, "mode": "cluster" })
        } else {
            json!({ "urls": [front] })
        };
        let (base, name) = self.database.url.rsplit_once('/').unwrap_or_default();
        let base = base.rsplit_once(':').map_or(base, |(base, _)| base);
        let database = format!("{base}:{}/{name}", self.database_front.address.port());
        json!({ "path": path.display().to_string(), "redis": redis, "postgres": { "url": database } })
    }

    /// The ledger's address, past the relay.
    pub fn database(&self) -> &postgres::Database {
        &self.database
    }

    /// Does what needs no caller.
    pub async fn perform(&self, act: &Act) -> Result<(), String> {
        match act {
            Act::Command(words) => self.command(words).await,
            Act::Signal(Which::Redis, signal) => self.signal(signal).await,
            Act::Signal(Which::Database, signal) => match signal.as_str() {
                // Its processes are many; to nodes a server that is frozen is a line that is silent.
                "SIGSTOP" => {
                    self.database_front.set_gate(Gate::Silent);
                    Ok(())
                }
                "SIGCONT" => {
                    self.database_front.set_gate(Gate::Pass);
                    Ok(())
                }
                _ => self.stop_database().await,
            },
            Act::Stop(Which::Redis) => {
                self.stop_redis().await;
                Ok(())
            }
            Act::Start(Which::Redis) => self.start_redis().await,
            Act::Stop(Which::Database) => self.stop_database().await,
            Act::Start(Which::Database) => self.start_database().await,
            Act::CutLink | Act::HealLink => {
                let redis = self.redis.lock().await;
                let (_, link) = redis.replica.as_ref().ok_or("there is no replica")?;
                link.set_gate(if *act == Act::CutLink { Gate::Silent } else { Gate::Pass });
                Ok(())
            }
            Act::Promote => self.promote().await,
            Act::Relay(which, change) => self.change(*which, change),
            Act::Wait(span) => {
                tokio::time::sleep(*span).await;
                Ok(())
            }
            Act::Write => Ok(()), // For who has callers.
        }
    }

    async fn command(&self, words: &[String]) -> Result<(), String> {
        let redis = self.redis.lock().await;
        for server in &redis.servers {
            let (name, rest) = words.split_first().ok_or("no command")?;
            let mut cmd = ::redis::cmd(name);
            cmd.arg(rest);
            let mut link = server.link().await;
            // One that does not answer for a while is meant not to.
            let sent = cmd.query_async::<::redis::Value>(&mut link);
            if let Ok(Err(error)) = tokio::time::timeout(Duration::from_millis(200), sent).await {
                return Err(format!("redis {}: {error}", words.join(" ")));
            }
        }
        Ok(())
    }

    async fn signal(&self, signal: &str) -> Result<(), String> {
        match signal {
            "SIGSTOP" => {
                let mut redis = self.redis.lock().await;
                redis.servers.iter().for_each(Server::freeze);
                redis.frozen = true;
            }
            "SIGCONT" => {
                let mut redis = self.redis.lock().await;
                redis.servers.iter().for_each(Server::thaw);
                redis.frozen = false;
            }
            "SIGKILL" | "SIGTERM" | "SIGINT" | "SIGQUIT" => self.stop_redis().await,
            other => return Err(format!("{other} for redis is not known to the runner")),
        }
        Ok(())
    }

    async fn stop_redis(&self) {
        let mut redis = self.redis.lock().await;
        if !redis.stopped {
            redis.servers.iter_mut().for_each(Server::kill);
        }
        (redis.stopped, redis.frozen) = (true, false);
    }

    async fn start_redis(&self) -> Result<(), String> {
        let mut redis = self.redis.lock().await;
        if redis.stopped {
            let mut servers = std::mem::take(&mut redis.servers);
            redis.servers = apart(move || async move {
                for server in &mut servers {
                    server.again().await;
                }
                servers
            })
            .await?;
        }
        redis.stopped = false;
        Ok(())
    }

    async fn stop_database(&self) -> Result<(), String> {
        let server = self.server.clone().ok_or("the database is shared by cases")?;
        blocking(move || server.lock().unwrap_or_else(PoisonError::into_inner).crash()).await?;
        *self.database_stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        Ok(())
    }

    async fn start_database(&self) -> Result<(), String> {
        let server = self.server.clone().ok_or("the database is shared by cases")?;
        blocking(move || server.lock().unwrap_or_else(PoisonError::into_inner).restart()).await?;
        *self.database_stopped.lock().unwrap_or_else(PoisonError::into_inner) = false;
        Ok(())
    }

    /// The address leads to the replica from now on; the old primary goes on, and nobody asks it.
    async fn promote(&self) -> Result<(), String> {
        let mut redis = self.redis.lock().await;
        let (server, link) = redis.replica.take().ok_or("there is no replica, or it was promoted")?;
        drop(link);
        server.command("REPLICAOF NO ONE").await;
        self.front.turn_to(local(server.port));
        redis.servers = vec![server];
        (redis.frozen, redis.stopped) = (false, false);
        Ok(())
    }

    fn change(&self, which: Which, change: &Change) -> Result<(), String> {
        let relay = match which {
            Which::Redis if self.cluster => return Err("a cluster's servers have no proxy".to_owned()),
            Which::Redis => &self.front,
            Which::Database => &self.database_front,
        };
        match change {
            Change::Fault { .. } if which == Which::Database => {
                return Err("a proxy before the database knows no replies".to_owned());
            }
            Change::Fault { verb, nth, what } => {
                relay.add(Fault { verb: verb.clone(), nth: (*nth).max(1), what: *what });
            }
            Change::Delay(delay) => relay.set_delay(*delay),
            Change::Gate(gate) => {
                relay.set_gate(*gate);
                if *gate == Gate::Closed {
                    relay.cut();
                }
            }
            Change::Cut => relay.cut(),
            Change::Mend => relay.mend(),
        }
        Ok(())
    }

    /// Whether anything is broken just now.
    pub async fn is_broken(&self) -> bool {
        let redis = self.redis.lock().await;
        redis.frozen
            || redis.stopped
            || self.front.is_faulty()
            || self.database_front.is_faulty()
            || *self.database_stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything runs again, so that the books can be read.
    pub async fn mend(&self) -> Result<(), String> {
        self.front.mend();
        self.database_front.mend();
        if self.redis.lock().await.frozen {
            self.signal("SIGCONT").await?;
        }
        self.start_redis().await?;
        if *self.database_stopped.lock().unwrap_or_else(PoisonError::into_inner) {
            self.start_database().await?;
        }
        Ok(())
    }

    /// From now on commands are counted anew.
    pub fn forget(&self) {
        self.front.forget();
    }

    /// Admissions that Redis has answered; `None` where nobody counts them.
    pub fn admitted(&self) -> Option<usize> {
        (!self.cluster).then(|| self.front.answered("admit"))
    }

    /// Commands that went to Redis.
    pub fn commands(&self) -> Option<Vec<Command>> {
        (!self.cluster).then(|| self.front.commands())
    }

    /// Waits until no hold is open in Redis; answers how many are.
    pub async fn open_holds(&self, patience: Duration) -> Result<i64, String> {
        let until = Instant::now() + patience.min(PATIENCE);
        loop {
            let mut open = 0;
            for (key, value) in self.scan().await? {
                if key.contains(":due:")
                    && let Content::Members(count) = value
                {
                    open += count;
                }
            }
            if open == 0 || Instant::now() > until {
                return Ok(open);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Every number in Redis that is below zero.
    pub async fn negative(&self) -> Result<Vec<String>, String> {
        let mut found = vec![];
        for (key, value) in self.scan().await? {
            let Content::Numbers(numbers) = value else { continue };
            found.extend(numbers.into_iter().filter(|n| *n < 0).map(|n| format!("{key}: {n}")));
        }
        Ok(found)
    }

    async fn scan(&self) -> Result<Vec<(String, Content)>, String> {
        let redis = self.redis.lock().await;
        let mut found = vec![];
        for server in &redis.servers {
            let mut link = server.link().await;
            let read = async {
                let keys: Vec<String> = ::redis::cmd("KEYS").arg("*").query_async(&mut link).await?;
                for key in keys {
                    let kind: String = ::redis::cmd("TYPE").arg(&key).query_async(&mut link).await?;
                    let content = match kind.as_str() {
                        "zset" => {
                            Content::Members(::redis::cmd("ZCARD").arg(&key).query_async(&mut link).await?)
                        }
                        "hash" => {
                            let values: Vec<Vec<u8>> =
                                ::redis::cmd("HVALS").arg(&key).query_async(&mut link).await?;
                            Content::Numbers(values.iter().filter_map(|value| number(value)).collect())
                        }
                        "string" => {
                            let value: Vec<u8> = ::redis::cmd("GET").arg(&key).query_async(&mut link).await?;
                            Content::Numbers(number(&value).into_iter().collect())
                        }
                        _ => continue,
                    };
                    found.push((key, content));
                }
                Ok::<_, ::redis::RedisError>(())
            };
            read.await.map_err(|e| format!("redis cannot be read: {e}"))?;
        }
        Ok(found)
    }
}

/// The servers of a layout, and a replica with the relay that it hears its primary through.
async fn start_redis(needs: Needs) -> Result<(Vec<Server>, Option<(Server, Relay)>), String> {
    let kind = if needs.valkey { Kind::Valkey } else { Kind::Redis };
    let arguments = needs.arguments();
    if needs.layout == Layout::Cluster {
        return Ok((Cluster::start().await.servers, None));
    }
    let primary = Server::with(kind, &arguments).await;
    if needs.layout == Layout::Single {
        return Ok((vec![primary], None));
    }
    let link = Relay::start(local(primary.port), false).await?;
    let to = format!("127.0.0.1 {}", link.address.port());
    let mut following = arguments;
    following.extend(["--replicaof", &to, "--repl-diskless-sync-delay", "0"]);
    let replica = Server::with(kind, &following).await;
    servers::until("the replica follows", async || {
        text_of(&replica.command("INFO replication").await).contains("master_link_status:up")
    })
    .await;
    Ok((vec![primary], Some((replica, link))))
}

enum Content {
    Members(i64),
    Numbers(Vec<i64>),
}

fn number(bytes: &[u8]) -> Option<i64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

fn text_of(value: &::redis::Value) -> String {
    ::redis::from_redis_value_ref(value).unwrap_or_default()
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Where waiting does not stop others.
async fn blocking<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(what).await.map_err(|e| format!("a server of the test bed: {e}"))
}

/// On a thread that may wait: what it waits for cannot be sent between threads.
async fn apart<T: Send + 'static, F: Future<Output = T>>(
    what: impl FnOnce() -> F + Send + 'static,
) -> Result<T, String> {
    let runtime = tokio::runtime::Handle::current();
    blocking(move || runtime.block_on(what())).await
}
