//! A Postgres server of our own, on a free port of the loopback, in a folder that goes with it.
//!
//! Postgres does not run as root: there it runs as `nobody`. It ends with the test process, however that ends.

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use filters::ids::{AccountId, HoldId};
use tollgate::config::checked;
use tollgate::ledger::Postgres;
use tollgate::secret::Secret;

/// How long a server may take to start, also after a crash.
const START_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(10);

/// A server.
pub struct Server {
    folder: tempfile::TempDir,
    settings: String,
    pub port: u16,
    child: Option<Child>,
}

/// A database of its own in a server.
pub struct Database {
    pub url: String,
    pub name: String,
}

impl Server {
    /// A server that forgets what it did when it crashes, as most tests may; `settings`: lines of its config.
    pub fn start(settings: &str) -> Self {
        Self::start_with(&format!("fsync = off\nfull_page_writes = off\n{settings}"))
    }

    /// A server that keeps what it has committed.
    pub fn start_durable() -> Self {
        Self::start_with("")
    }

    fn start_with(settings: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("its mode");
        let data = folder.path().join("data");
        std::fs::create_dir(&data).expect("a folder");
        if is_root() {
            let own = Command::new("chown").arg("nobody").arg(&data).status().expect("chown");
            assert!(own.success());
        }
        let made = command("initdb", &[])
            .args(["--username=tollgate", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "-D"])
            .arg(&data)
            .current_dir(folder.path())
            .output()
            .expect("initdb");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut server = Self { folder, settings: settings.to_owned(), port: 0, child: None };
        server.restart();
        server
    }

    /// Where its data is.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// What it has logged, and where to read on.
    pub fn log(&self, from: usize) -> (String, usize) {
        let bytes = std::fs::read(self.data().with_file_name("log")).expect("its log");
        (String::from_utf8_lossy(&bytes[from.min(bytes.len())..]).into_owned(), bytes.len())
    }

    /// A file of its user's, readable by nobody else.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.data().join(name);
        std::fs::write(&path, text).expect("a file");
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("its mode");
        if is_root() {
            let own = Command::new("chown").arg("nobody").arg(&path).status().expect("chown");
            assert!(own.success());
        }
        path
    }

    /// Starts it again, with more settings, on the port that it had.
    pub fn restart_with(&mut self, settings: &str) {
        self.crash();
        self.settings.push_str(settings);
        self.restart();
    }

    /// Starts it, and waits until it answers.
    pub fn restart(&mut self) {
        let until = Instant::now() + START_MAX;
        loop {
            assert!(Instant::now() < until, "postgres does not start");
            if self.child.is_none() {
                if self.port == 0 {
                    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
                    self.port = listener.local_addr().expect("its address").port();
                }
                self.child = Some(spawn(&self.data(), self.port, &self.settings));
            }
            if let Some(child) = &mut self.child
                && child.try_wait().expect("its state").is_some()
            {
                // The port is taken, or what a crash left is still there.
                self.child = None;
            }
            if try_sql(&format!("postgres://tollgate@127.0.0.1:{}/postgres", self.port), "SELECT 1").is_ok() {
                return;
            }
            thread::sleep(LOOK);
        }
    }

    /// Ends it as a crash does: nothing is written any more.
    pub fn crash(&mut self) {
        if let Some(mut child) = self.child.take() {
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, rustix::process::Signal::QUIT).expect("it runs");
            child.wait().expect("its end");
        }
    }

    /// Ends it as an administrator does.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
            child.wait().expect("its end");
        }
    }

    /// Stops all its processes in their tracks.
    pub fn freeze(&self) {
        self.signal_all("-STOP");
    }

    /// Lets them go on.
    pub fn thaw(&self) {
        self.signal_all("-CONT");
    }

    /// The first process before its children, so that it makes no others meanwhile; one of those may just have ended.
    fn signal_all(&self, signal: &str) {
        let first = self.child.as_ref().expect("it runs").id();
        let send = |process: &str| {
            let sent = Command::new("kill").args([signal, process]).stderr(Stdio::null()).status();
            sent.expect("kill").success()
        };
        assert!(send(&first.to_string()));
        let children =
            std::fs::read_to_string(format!("/proc/{first}/task/{first}/children")).expect("its children");
        for child in children.split_whitespace() {
            let _has_ended = !send(child);
        }
    }

    /// `kill -9` of the server's first process; the others go when they notice.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("it runs");
            child.wait().expect("its end");
        }
    }

    /// An empty database.
    pub fn empty(&self) -> Database {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst));
        let base = format!("postgres://tollgate@127.0.0.1:{}", self.port);
        sql(&format!("{base}/postgres"), &format!("CREATE DATABASE {name}"));
        Database { url: format!("{base}/{name}"), name }
    }

    /// A database with our schema.
    pub fn database(&self) -> Database {
        let database = self.empty();
        database.ledger().migrate().expect("a schema");
        database
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.crash();
    }
}

impl Database {
    /// A ledger on it, with connections of its own.
    pub fn ledger(&self) -> Postgres {
        Postgres::new(&self.config()).expect("a ledger")
    }

    pub fn config(&self) -> checked::Postgres {
        checked::Postgres { url: Secret::new(self.url.clone()), ca_file: None, connections_max: 4 }
    }

    /// Runs SQL as its owner; answers the first column of the last row, as text.
    pub fn sql(&self, text: &str) -> String {
        sql(&self.url, text)
    }

    /// As [`Self::sql`], where the server may be away.
    pub fn try_sql(&self, text: &str) -> Result<String, String> {
        try_sql(&self.url, text)
    }

    /// As [`Self::sql`], for what must be refused; answers why it was.
    pub fn refused(&self, text: &str) -> String {
        match try_sql(&self.url, text) {
            Ok(_) => panic!("{}: this should be refused: {text}", self.name),
            Err(error) => error,
        }
    }
}

/// The server that most tests share.
pub fn shared() -> &'static Server {
    static SHARED: OnceLock<Server> = OnceLock::new();
    SHARED.get_or_init(|| Server::start("max_connections = 300\n"))
}

/// A database with our schema in the shared server.
pub fn database() -> Database {
    shared().database()
}

/// A hold of the last days of November 2026, as a UUIDv7.
pub fn hold(number: u64) -> HoldId {
    let ms: u128 = 1_796_000_000_000 + u128::from(number % 1_000_000);
    HoldId(ms << 80 | 0x7 << 76 | 0x8 << 60 | u128::from(number))
}

/// A pool's shard in tests: the account's number decides.
pub fn shard_of(account: AccountId) -> u16 {
    u16::try_from(account.0 % 256).expect("below 256")
}

fn sql(url: &str, text: &str) -> String {
    try_sql(url, text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn try_sql(url: &str, text: &str) -> Result<String, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let said = |error: tokio_postgres::Error| {
            error.as_db_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
        };
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.map_err(said)?;
        let queries = async {
            let answers = client.simple_query(text).await.map_err(said)?;
            let cell = |answer: &tokio_postgres::SimpleQueryMessage| match answer {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            };
            Ok(answers.iter().rev().find_map(cell).unwrap_or_default())
        };
        tokio::select! {
            done = queries => done,
            broken = connection => Err(broken.map_or_else(said, |()| "it was closed".to_owned())),
        }
    })
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A program of the newest Postgres that is installed, as a user that may run it.
fn command(program: &str, options: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    if is_root() {
        command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
    }
    command.args(options).arg(binaries().join(program));
    command
}

fn binaries() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .max()
        .expect("a Postgres in /usr/lib/postgresql: scripts/setup test installs it");
    Path::new("/usr/lib/postgresql").join(newest.to_string()).join("bin")
}

fn spawn(data: &Path, port: u16, settings: &str) -> Child {
    // Its end is tied to the thread that starts it, so that thread stays.
    let log =
        std::fs::File::options().create(true).append(true).open(data.with_file_name("log")).expect("a log");
    let mut command = command("postgres", &["--pdeathsig=QUIT"]);
    command.arg("-D").arg(data).args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
    command.args(["-c", "unix_socket_directories=", "-c", "max_wal_size=256MB"]);
    // After a crash: all at once, not file by file.
    command.args(["-c", "recovery_init_sync_method=syncfs"]);
    for setting in settings.lines().filter(|line| !line.is_empty()) {
        command.arg("-c").arg(setting.replace(" = ", "="));
    }
    command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
    let (started, child) = mpsc::sync_channel(1);
    thread::spawn(move || {
        started.send(command.spawn().expect("setpriv")).expect("somebody waits");
        loop {
            thread::park();
        }
    });
    child.recv().expect("it was started")
}
