//! A gateway process on a fresh store.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate::journal::record::{Record, decode};
use tollgate::ledger::port::{AccountRow, StatementLine};
use tollgate::ledger::{Ledger as _, Sqlite};

/// What is logged in a test.
const LOG: &str = "info,decision=debug";
/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(20);

/// What callers pay, in USD per one million tokens.
const GPT_PRICE: &str = r#"{ input: "2.5", output: "10", cache_read: "1.25" }"#;
const CLAUDE_PRICE: &str =
    r#"{ input: "3", output: "15", cache_read: "0.30", cache_write_5m: "3.75", cache_write_1h: "6" }"#;

/// Threads that serve.
pub const THREADS: usize = 2;

/// What a gateway is started with.
pub struct Setup {
    upstreams: Vec<SocketAddr>,
    provider_extra: String,
    route_extra: String,
    limits: String,
    /// Of one upstream alone: its own keys, and whether it speaks TLS.
    own: BTreeMap<usize, (String, bool)>,
    extra: String,
    http: String,
    has_http: bool,
    listen: String,
    key: String,
    account: String,
    model: String,
    other_model: String,
    balance: String,
    dialect: &'static str,
    mixed: bool,
    drain_max: &'static str,
    threads: usize,
    routing: String,
    log: &'static str,
    env: Vec<(&'static str, String)>,
    store: String,
    catalogue_of_fleet: bool,
}

/// A running gateway.
pub struct Gateway {
    pub http: SocketAddr,
    pub admin: SocketAddr,
    child: Child,
    log: Arc<(Mutex<String>, Condvar)>,
    folder: Option<Arc<TempDir>>,
    env: Vec<(&'static str, String)>,
}

impl Setup {
    /// One model, `gpt-a`, over these upstreams, tried in their order.
    pub fn new(upstreams: &[SocketAddr]) -> Self {
        Self {
            upstreams: upstreams.to_vec(),
            provider_extra: "first_byte: 300ms, first_event: 600ms".to_owned(),
            route_extra: String::new(),
            limits: "context: 128000, output: 16384".to_owned(),
            own: BTreeMap::new(),
            extra: String::new(),
            http: String::new(),
            has_http: true,
            listen: String::new(),
            key: "default_output_tokens: 1000".to_owned(),
            account: String::new(),
            model: String::new(),
            other_model: String::new(),
            balance: "1.00".to_owned(),
            dialect: "openai",
            mixed: false,
            drain_max: "10s",
            threads: THREADS,
            routing: String::new(),
            log: LOG,
            env: vec![],
            store: "embedded: { path: ./data }".to_owned(),
            catalogue_of_fleet: false,
        }
    }

    /// The block `store:`, as YAML flow.
    pub fn store(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.store);
        self
    }

    /// Names no providers and models: they are the fleet's.
    pub fn catalogue_of_fleet(mut self) -> Self {
        self.catalogue_of_fleet = true;
        self
    }

    /// A variable of the process's environment.
    pub fn env(mut self, name: &'static str, value: &str) -> Self {
        self.env.push((name, value.to_owned()));
        self
    }

    /// Keys for every provider, as YAML flow.
    pub fn providers(mut self, yaml: &str) -> Self {
        self.provider_extra = yaml.to_owned();
        self
    }

    /// Keys for every route, as YAML flow.
    pub fn routes(mut self, yaml: &str) -> Self {
        self.route_extra = format!(", {yaml}");
        self
    }

    /// The model's limits, as YAML flow.
    pub fn limits(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.limits);
        self
    }

    /// Keys for one provider more, as YAML flow; its credential too, if it is to be another one.
    pub fn provider(mut self, index: usize, yaml: &str) -> Self {
        yaml.clone_into(&mut self.own.entry(index).or_default().0);
        self
    }

    /// This upstream speaks TLS.
    pub fn tls(mut self, index: usize) -> Self {
        self.own.entry(index).or_default().1 = true;
        self
    }

    /// Top-level blocks, as YAML.
    pub fn with(mut self, yaml: &str) -> Self {
        self.extra.push_str(yaml);
        self.extra.push('\n');
        self
    }

    /// More of the block `listen.http`.
    pub fn http(mut self, yaml: &str) -> Self {
        self.http = format!(", {yaml}");
        self
    }

    /// No `listen.http`: nothing may be asked of [`Gateway::http`].
    pub fn without_http(mut self) -> Self {
        self.has_http = false;
        self
    }

    /// More of the block `listen:`.
    pub fn listen(mut self, yaml: &str) -> Self {
        self.listen.push_str(&format!(", {yaml}"));
        self
    }

    /// Settings of the key, as YAML flow.
    pub fn key(mut self, yaml: &str) -> Self {
        self.key = format!("default_output_tokens: 1000, {yaml}");
        self
    }

    /// Settings of the account, as YAML flow.
    pub fn account(mut self, yaml: &str) -> Self {
        self.account = if yaml.is_empty() { String::new() } else { format!(", {yaml}") };
        self
    }

    /// Settings of the model, as YAML flow; its price too, if it is to be another one.
    pub fn model(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.model);
        self
    }

    /// A second model, `gpt-b`, at twice the price, which the last upstream alone serves, and that one alone.
    pub fn other_model(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.other_model);
        self
    }

    /// The dialect of every upstream. With `anthropic` the model is `claude-a`.
    pub fn dialect(mut self, name: &'static str) -> Self {
        self.dialect = name;
        self
    }

    /// The last upstream speaks `openai` all the same.
    pub fn mixed(mut self) -> Self {
        self.mixed = true;
        self
    }

    /// What is logged, as `RUST_LOG` says it.
    pub fn log(mut self, filter: &'static str) -> Self {
        self.log = filter;
        self
    }

    /// More of the block `routing:`. The heaviest route is asked first: nothing explores in a test.
    pub fn routing(mut self, yaml: &str) -> Self {
        self.routing = format!(", {yaml}");
        self
    }

    /// How many threads serve, each with connections to upstreams of its own; else [`THREADS`].
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// How long calls may go on after SIGTERM.
    pub fn drain_max(mut self, time: &'static str) -> Self {
        self.drain_max = time;
        self
    }

    /// The balance of the account, in USD.
    pub fn balance(mut self, usd: &str) -> Self {
        self.balance = usd.to_owned();
        self
    }

    pub fn yaml(&self, http: SocketAddr, admin: SocketAddr) -> String {
        let dialect = self.dialect;
        let (name, native, price) = match dialect {
            "anthropic" => ("claude-a", "up-c", CLAUDE_PRICE),
            _ => ("gpt-a", "up-a", GPT_PRICE),
        };
        let mut providers = String::new();
        let mut routes = String::new();
        for (index, address) in self.upstreams.iter().enumerate() {
            let weight = 100 - index;
            let is_last = index + 1 == self.upstreams.len();
            let dialect = if self.mixed && is_last { "openai" } else { dialect };
            let extra = &self.provider_extra;
            let (own, tls) = self.own.get(&index).cloned().unwrap_or_default();
            let scheme = if tls { "https" } else { "http" };
            let credential = match own.contains("credential") {
                true => String::new(),
                false => format!("credential: prov-key-u{index}, "),
            };
            let more = [extra.as_str(), own.as_str()].into_iter().filter(|yaml| !yaml.is_empty());
            let more: String = more.map(|yaml| format!(", {yaml}")).collect();
            let extra = format!("{credential}region: r{index}{more}");
            providers.push_str(&format!(
                "  u{index}: {{ dialect: {dialect}, base_url: \"{scheme}://{address}/v1\", {extra} }}\n"
            ));
            if is_last && !self.other_model.is_empty() {
                break;
            }
            routes.push_str(&format!(
                "      - {{ provider: u{index}, model: {native}, weight: {weight}, cost: {{ input: \"2\", output: \"8\" }}{} }}\n",
                self.route_extra
            ));
        }
        if !self.other_model.is_empty() {
            routes.push_str(&format!(
                "  gpt-b:\n    {}\n    price: {{ input: \"5\", output: \"20\" }}\n    limits: {{ context: 64000, output: 8192 }}\n    \
                 routes: [ {{ provider: u{}, model: up-b }} ]\n",
                self.other_model,
                self.upstreams.len() - 1,
            ));
        }
        let Self { http: more_http, listen, extra, balance, key, account, model, .. } = self;
        let Self { drain_max, routing, limits, store, threads, .. } = self;
        let price = format!("price: {price}");
        let http = match more_http.as_str() {
            _ if !self.has_http => String::new(),
            "" => format!("http: \"{http}\", "),
            more => format!("http: {{ address: \"{http}\"{more} }}, "),
        };
        let model = match model.as_str() {
            "" => price,
            own if own.contains("price:") => own.to_owned(),
            more => format!("{price}\n    {more}"),
        };
        let catalogue = format!(
            "providers:\n{providers}\
             models:\n  {name}:\n    {model}\n    limits: {{ {limits} }}\n    routes:\n{routes}"
        );
        let catalogue = if self.catalogue_of_fleet { "" } else { catalogue.as_str() };
        format!(
            "listen: {{ {http}admin: \"{admin}\", threads: {threads}{listen} }}\n\
             store: {{ {store} }}\n\
             drain: {{ pre: 10ms, max: {drain_max} }}\n\
             routing: {{ explore: false{routing} }}\n\
             {extra}\
             {catalogue}\
             bootstrap:\n  accounts:\n    \
             alpha: {{ balance: \"{balance}\", keys: [ {{ key: sk-test-alpha, {key} }} ]{account} }}\n    \
             beta: {{ balance: \"1.00\", keys: [ {{ key: sk-test-beta, models: [] }} ] }}\n"
        )
    }

    /// Starts it and waits until it serves.
    pub fn start(self) -> Gateway {
        self.start_in(tempfile::tempdir().expect("a folder"))
    }

    /// Starts it in a folder that has been prepared.
    pub fn start_in(self, folder: TempDir) -> Gateway {
        let (http, admin) = (free_address(), free_address());
        std::fs::write(folder.path().join("tollgate.yaml"), self.yaml(http, admin)).expect("the config");
        Gateway::spawn(Arc::new(folder), http, admin, self.log, &self.env)
    }
}

impl Gateway {
    fn spawn(
        folder: Arc<TempDir>,
        http: SocketAddr,
        admin: SocketAddr,
        filter: &str,
        env: &[(&'static str, String)],
    ) -> Self {
        let gateway = Self::begin(folder, http, admin, filter, env, &["serve"]);
        gateway.wait_for_log("serving");
        gateway
    }

    /// A new process on the same folder, that waits to take over.
    pub fn successor(&self) -> Self {
        let folder = Arc::clone(self.folder.as_ref().expect("the folder"));
        let heir = Self::begin(folder, self.http, self.admin, LOG, &self.env, &["serve", "--upgrade"]);
        heir.wait_for_log("ready to take over");
        heir
    }

    fn begin(
        folder: Arc<TempDir>,
        http: SocketAddr,
        admin: SocketAddr,
        filter: &str,
        env: &[(&'static str, String)],
        args: &[&str],
    ) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["--config", "tollgate.yaml"])
            .args(args)
            .current_dir(folder.path())
            .env("RUST_LOG", filter)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the gateway starts");
        let log = Arc::new((Mutex::new(String::new()), Condvar::new()));
        let stderr = BufReader::new(child.stderr.take().expect("its log"));
        let sink = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let (text, grown) = &*sink;
                let mut text = text.lock().expect("the log");
                text.push_str(&line);
                text.push('\n');
                grown.notify_all();
            }
        });
        Self { http, admin, child, log, folder: Some(folder), env: env.to_vec() }
    }

    /// Waits until the log contains `text`.
    pub fn wait_for_log(&self, text: &str) {
        self.wait_for_log_times(text, 1);
    }

    /// Waits until the log contains `text` so many times.
    pub fn wait_for_log_times(&self, text: &str, times: usize) {
        let (log, grown) = &*self.log;
        let log = log.lock().expect("the log");
        let fewer = |log: &mut String| log.matches(text).count() < times;
        let (log, waited) = grown.wait_timeout_while(log, PATIENCE, fewer).expect("the log");
        assert!(!waited.timed_out(), "`{text}` never came:\n{log}");
    }

    /// Everything logged so far.
    pub fn log(&self) -> String {
        self.log.0.lock().expect("the log").clone()
    }

    /// The folder with its config and data.
    pub fn folder(&self) -> &Path {
        self.folder.as_ref().expect("the folder").path()
    }

    /// The ledger, opened for reading.
    pub fn ledger(&self) -> Sqlite {
        Sqlite::open_for_reading(&self.folder().join("data/ledger.db")).expect("the ledger")
    }

    /// The account's row once `calls` of its calls are booked.
    pub fn account(&self, name: &str, calls: i64) -> AccountRow {
        let began = Instant::now();
        loop {
            let rows = self.ledger().accounts(None).expect("accounts");
            let row = rows.into_iter().find(|row| row.name == name).expect("the account");
            if row.calls >= calls {
                return row;
            }
            assert!(began.elapsed() < PATIENCE, "{} of {calls} calls are booked:\n{}", row.calls, self.log());
            std::thread::yield_now();
        }
    }

    /// The latest lines of an account's statement.
    pub fn statement(&self, name: &str) -> Vec<StatementLine> {
        self.ledger().statement(name, 1_000_000).expect("a statement")
    }

    /// What the account `alpha` has spent, in nano-dollars, once `calls` of its calls are booked.
    pub fn spent(&self, calls: i64) -> i64 {
        1_000_000_000 - self.account("alpha", calls).balance_nano
    }

    /// Whether every law of the books holds.
    pub fn ledger_is_right(&self) -> bool {
        self.ledger().verify().is_ok()
    }

    /// A page of the admin port.
    pub async fn admin_page(&self, path: &str) -> super::Answer {
        super::Call::get(path).send(self.admin).await
    }

    /// The value of a metric without labels.
    pub async fn metric(&self, name: &str) -> i64 {
        let page = self.admin_page("/metrics").await;
        let text = page.text();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{text}"))
    }

    /// Waits until a metric has a value that will do.
    pub async fn wait_for_metric_that(&self, name: &str, will_do: impl Fn(i64) -> bool) {
        let began = Instant::now();
        loop {
            let value = self.metric(name).await;
            if will_do(value) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{name} is {value}:\n{}", self.log());
            tokio::task::yield_now().await;
        }
    }

    /// The value of a metric of one endpoint.
    pub async fn endpoint_metric(&self, name: &str, endpoint: &str) -> f64 {
        let text = self.admin_page("/metrics").await.text();
        let start = format!("{name}{{endpoint=\"{endpoint}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok());
        value.unwrap_or_else(|| panic!("no {start} in\n{text}"))
    }

    /// Waits until a metric has a value.
    pub async fn wait_for_metric(&self, name: &str, value: i64) {
        let began = Instant::now();
        while self.metric(name).await != value {
            assert!(began.elapsed() < PATIENCE, "{name} is not {value}:\n{}", self.log());
            tokio::task::yield_now().await;
        }
    }

    /// How many connections were refused for this reason.
    pub async fn refused(&self, reason: &str) -> u64 {
        let start = format!("tollgate_connections_refused_total{{reason=\"{reason}\"}} ");
        let text = self.admin_page("/metrics").await.text();
        text.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok()).unwrap_or(0)
    }

    /// Waits until so many connections were refused for this reason.
    pub async fn wait_for_refused(&self, reason: &str, count: u64) {
        let began = Instant::now();
        loop {
            let seen = self.refused(reason).await;
            if seen == count {
                return;
            }
            assert!(seen < count && began.elapsed() < PATIENCE, "{reason}: {seen} instead of {count}");
            tokio::task::yield_now().await;
        }
    }

    /// Waits until no hold is open.
    pub async fn wait_until_settled(&self) {
        self.wait_for_metric("tollgate_holds_open", 0).await;
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its resident memory in KiB, and its open files.
    pub fn footprint(&self) -> (u64, usize) {
        let pid = self.pid();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident = line.split_whitespace().next().unwrap().parse().unwrap();
        (resident, std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count())
    }

    /// Sends a signal.
    pub fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status().expect("kill");
        assert!(sent.success());
    }

    /// Waits until the process has left.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("its exit")
    }

    /// Puts another text in the config file's place, as an editor does: whole, by a rename.
    pub fn write_config(&self, yaml: &str) {
        let (new, file) = (self.folder().join("tollgate.new"), self.folder().join("tollgate.yaml"));
        std::fs::write(&new, yaml).expect("the new config");
        std::fs::rename(&new, &file).expect("the config");
    }

    /// The text of the config file.
    pub fn config(&self) -> String {
        std::fs::read_to_string(self.folder().join("tollgate.yaml")).expect("the config")
    }

    /// Has the config file read anew and answers what came of it.
    pub async fn reload(&self) -> super::Answer {
        let token = std::fs::read_to_string(self.folder().join("data/admin.token")).expect("the token");
        let call = super::Call::post("").path("/reload").header("authorization", &format!("Bearer {token}"));
        call.send(self.admin).await
    }

    /// What a second process says that wants to serve from the same store.
    pub fn try_beside(&self) -> String {
        let yaml = std::fs::read_to_string(self.folder().join("tollgate.yaml")).expect("the config");
        let yaml = yaml
            .replace(&self.http.to_string(), &free_address().to_string())
            .replace(&self.admin.to_string(), &free_address().to_string());
        std::fs::write(self.folder().join("second.yaml"), yaml).expect("the config");
        let serve = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["--config", "second.yaml", "serve"])
            .current_dir(self.folder())
            .output()
            .expect("the second process");
        assert!(!serve.status.success(), "two processes serve from one store");
        String::from_utf8_lossy(&serve.stderr).into_owned()
    }

    /// What a verb of the command line prints.
    pub fn command(&self, args: &[&str]) -> String {
        self.try_command(args).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// What a verb of the command line prints, or what it says when it fails.
    pub fn try_command(&self, args: &[&str]) -> Result<String, String> {
        let out = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["--config", "tollgate.yaml"])
            .args(args)
            .current_dir(self.folder())
            .output()
            .expect("the verb");
        if out.status.success() {
            Ok(String::from_utf8(out.stdout).expect("text"))
        } else {
            Err(String::from_utf8_lossy(&out.stderr).into_owned())
        }
    }

    /// All that this boot has written, in order; segments that were booked whole are gone.
    pub fn journal(&self) -> Vec<Record> {
        let boots = std::fs::read_dir(self.folder().join("data/journal")).expect("journals");
        let boot = boots.filter_map(Result::ok).map(|boot| boot.path()).max().expect("this boot");
        let mut segments: Vec<_> =
            std::fs::read_dir(boot).expect("segments").filter_map(|f| Some(f.ok()?.path())).collect();
        segments.retain(|path| path.extension().is_some_and(|e| e == "log"));
        segments.sort();
        let bytes: Vec<u8> =
            segments.iter().flat_map(|path| std::fs::read(path).expect("a segment")).collect();
        let mut records = vec![];
        let mut rest = bytes.as_slice();
        while let Ok((record, length)) = decode(rest) {
            records.push(record);
            rest = &rest[length..];
        }
        records
    }

    /// Waits until the journal has grown and then stood still for two looks: progress is written.
    pub async fn wait_for_progress(&self) {
        let journal = self.folder().join("data/journal");
        let size = || -> u64 {
            let boots = std::fs::read_dir(&journal).expect("journals").filter_map(Result::ok);
            let segments = boots.flat_map(|boot| std::fs::read_dir(boot.path()).into_iter().flatten());
            segments.filter_map(|f| f.ok()?.metadata().ok()).map(|m| m.len()).sum()
        };
        let began = Instant::now();
        // A hold record has about 100 bytes, a progress record about 30.
        let mut last = (size(), Instant::now());
        while last.1.elapsed() < Duration::from_millis(200) {
            let now = size();
            if now != last.0 {
                last = (now, Instant::now());
            }
            assert!(began.elapsed() < PATIENCE, "the journal never rests");
            tokio::task::yield_now().await;
        }
    }

    /// A new process on the same folder, after this one has gone.
    pub fn again(&self) -> Self {
        Self::spawn(Arc::clone(self.folder.as_ref().expect("the folder")), self.http, self.admin, LOG, &[])
    }

    /// As [`Self::again`]; `None`: the process left before it served.
    pub fn try_again(&self) -> Option<Self> {
        let folder = Arc::clone(self.folder.as_ref().expect("the folder"));
        let mut next = Self::begin(folder, self.http, self.admin, LOG, &self.env, &["serve"]);
        let began = Instant::now();
        loop {
            if next.log().contains("serving on") {
                return Some(next);
            }
            if next.child.try_wait().expect("its state").is_some() {
                return None;
            }
            assert!(began.elapsed() < PATIENCE, "it neither serves nor leaves:\n{}", next.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills it as a power button would.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill -9");
        self.child.wait().expect("its exit");
    }

    /// Kills it as a power button would, and starts it again on the same store.
    pub fn kill_and_restart(mut self) -> Self {
        self.child.kill().expect("kill -9");
        self.child.wait().expect("its exit");
        let folder = self.folder.take().expect("the folder");
        let (http, admin) = (self.http, self.admin);
        drop(self);
        Self::spawn(folder, http, admin, LOG, &[])
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// A port that nobody uses, below the range that the kernel hands out to clients, so that no other
/// connection takes it before the gateway does.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let process = u16::try_from(std::process::id() % 997).expect("small");
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (process.wrapping_mul(41).wrapping_add(step)) % 20_000;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
