//! Redis and its kin, started on free loopback ports in a folder of their own, and stopped with the test.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tollgate::config::checked::{Redis as Config, RedisMode};
use tollgate::secret::Secret;
use tollgate::store::redis::{Redis, SOURCE};

/// Long enough for a machine that is busy with other tests; tests of the time itself set their own.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Ports that are tried.
const PORTS_MAX: usize = 8;

/// Which program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Redis,
    Valkey,
}

/// A running server.
pub struct Server {
    pub port: u16,
    kind: Kind,
    args: Vec<String>,
    child: Child,
    folder: TempDir,
}

/// What a [`Redis`] needs while a test runs; ends with it.
pub struct Kept {
    pub redis: Redis,
    keeper: tokio::task::JoinHandle<()>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl std::ops::Deref for Kept {
    type Target = Redis;

    fn deref(&self) -> &Redis {
        &self.redis
    }
}

impl Server {
    /// An empty Redis without persistence.
    pub async fn start() -> Self {
        Self::with(Kind::Redis, &[]).await
    }

    /// With more arguments.
    pub async fn with(kind: Kind, args: &[&str]) -> Self {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        for _ in 0..PORTS_MAX {
            let folder = tempfile::tempdir().expect("a folder");
            let port = free_port();
            let child = launch(kind, port, &folder, &args);
            let mut server = Self { port, kind, args: args.clone(), child, folder };
            if server.comes_up().await {
                return server;
            }
            // It has ended: somebody else has taken its port, or that of its bus, meanwhile.
        }
        panic!("{kind:?} {args:?} does not start on {PORTS_MAX} ports");
    }

    /// A Sentinel; it writes to its file.
    pub async fn sentinel(file: &std::path::Path) -> Self {
        let file = file.to_str().expect("a plain path");
        Self::with(Kind::Redis, &["--sentinel", file]).await
    }

    /// As a config names it.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// A connection past the store, for what an operator would do.
    pub async fn link(&self) -> redis::aio::MultiplexedConnection {
        self.try_link().await.expect("the server answers")
    }

    /// Runs one command, written as one would in a shell.
    pub async fn command(&self, words: &str) -> redis::Value {
        self.try_command(words).await.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The same, on a server that may be busy with something else.
    pub async fn try_command(&self, words: &str) -> redis::RedisResult<redis::Value> {
        let mut link = self.try_link().await?;
        let mut words = words.split(' ');
        let mut cmd = redis::cmd(words.next().expect("a command"));
        words.for_each(|word| {
            cmd.arg(word);
        });
        cmd.query_async(&mut link).await
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    /// Starts it again, on the same port and files.
    pub async fn again(&mut self) {
        self.child = launch(self.kind, self.port, &self.folder, &self.args);
        self.wait().await;
    }

    /// Stops it in its tracks: the kernel still takes in what is sent.
    pub fn freeze(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("a pid"), signal).expect("it runs");
    }

    async fn try_link(&self) -> redis::RedisResult<redis::aio::MultiplexedConnection> {
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(TIMEOUT));
        let client = redis::Client::open(self.url())?;
        client.get_multiplexed_async_connection_with_config(&config).await
    }

    async fn wait(&self) {
        until("the server answers", async || self.answers().await).await;
    }

    /// Whether it answers; `false`: it has ended.
    async fn comes_up(&mut self) -> bool {
        let mut up = false;
        until("the server answers", async || {
            let ended = self.child.try_wait().expect("its state").is_some();
            up = !ended && self.answers().await;
            up || ended
        })
        .await;
        up
    }

    async fn answers(&self) -> bool {
        let Ok(mut link) = self.try_link().await else { return false };
        let answer = redis::cmd("PING").query_async::<redis::Value>(&mut link).await;
        // One that wants a password answers too.
        answer.is_ok() || answer.is_err_and(|error| error.code() == Some("NOAUTH"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// Three primaries that share all slots.
pub struct Cluster {
    pub servers: Vec<Server>,
}

impl Cluster {
    pub async fn start() -> Self {
        let mut servers = vec![];
        for (first, last) in [(0, 5460), (5461, 10922), (10923, 16383)] {
            let server = Server::with(Kind::Redis, &["--cluster-enabled", "yes"]).await;
            server.command(&format!("CLUSTER ADDSLOTSRANGE {first} {last}")).await;
            servers.push(server);
        }
        for server in &servers {
            for other in &servers {
                server.command(&format!("CLUSTER MEET 127.0.0.1 {}", other.port)).await;
            }
        }
        for server in &servers {
            until("the cluster is one", async || {
                let info = server.command("CLUSTER INFO").await;
                let info: String = redis::from_redis_value(info).unwrap();
                info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
            })
            .await;
        }
        Self { servers }
    }

    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Server::url).collect()
    }
}

/// Polls until it holds.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(30), poll).await.is_ok(), "{what}");
}

/// A config for these servers.
pub fn config(urls: &[String], mode: RedisMode) -> Config {
    let urls = urls.iter().map(Secret::new).collect();
    Config { urls, mode, ca_file: None, timeout: TIMEOUT, prefix: "test".to_owned() }
}

/// The store over these servers, ready.
pub async fn connect(config: &Config) -> Kept {
    connect_with(config, SOURCE).await
}

/// With other verbs.
pub async fn connect_with(config: &Config, source: &str) -> Kept {
    let redis = Redis::with_library(config, source).expect("a config");
    redis.check().await.unwrap_or_else(|error| panic!("{error}"));
    let keeper = redis.clone();
    let keeper = tokio::spawn(async move { keeper.keep().await });
    Kept { redis, keeper }
}

fn launch(kind: Kind, port: u16, folder: &TempDir, args: &[String]) -> Child {
    let program = match kind {
        Kind::Redis => PathBuf::from("redis-server"),
        Kind::Valkey => valkey(),
    };
    let mut command = Command::new(&program);
    match args {
        // A Sentinel's file comes first, and it saves nothing else.
        [first, file] if first == "--sentinel" => command.args([file.as_str(), "--sentinel"]),
        args => command.args(["--save", ""]).args(args),
    };
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir"]).arg(folder.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}; scripts/setup test installs it", program.display()))
}

/// Where `scripts/valkey` puts it, or where `TOLLGATE_VALKEY` says it is.
fn valkey() -> PathBuf {
    if let Some(path) = std::env::var_os("TOLLGATE_VALKEY") {
        return path.into();
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/valkey");
    let output = Command::new(script).output().expect("scripts/valkey runs");
    assert!(output.status.success(), "scripts/valkey: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("a path").trim().into()
}

pub fn free_port() -> u16 {
    // A cluster's bus is 10,000 above.
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        if port < 55_000 {
            return port;
        }
    }
}
