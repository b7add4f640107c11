//! A gateway process on a store of its own, and everything that can be read of it from outside.

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::client::{Exchange, Sent};

/// How long a process may take to serve, or to leave.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running process.
pub struct Gateway {
    pub http: SocketAddr,
    pub admin: SocketAddr,
    h2c: SocketAddr,
    child: Mutex<Child>,
    log: Arc<Log>,
    config: PathBuf,
    level: Option<String>,
}

#[derive(Default)]
struct Log {
    lines: Mutex<Lines>,
    grown: Condvar,
}

#[derive(Default)]
struct Lines {
    all: Vec<String>,
    /// Processes that write into it, and those of them that have ended.
    begun: usize,
    ended: usize,
}

/// One sample of a metrics page.
#[derive(Clone, Debug)]
pub struct Sample {
    pub name: String,
    pub labels: String,
    pub value: f64,
}

impl Gateway {
    /// Writes the config and starts a process. `Err`: it did not come up, and what it said.
    pub fn start(folder: &Path, name: &str, config: &Value, level: Option<String>) -> Result<Self, String> {
        let path = folder.join(format!("{name}.yaml"));
        let text = serde_json::to_string_pretty(config).map_err(|e| e.to_string())?;
        std::fs::write(&path, text).map_err(|e| e.to_string())?;
        let address = |key: &str| {
            let place = &config["listen"][key];
            let text = place.as_str().or_else(|| place["address"].as_str()).unwrap_or_default();
            text.parse::<SocketAddr>().map_err(|e| format!("listen.{key}: {e}"))
        };
        let [http, admin, h2c] = [address("http")?, address("admin")?, address("internal")?];
        let log = Arc::default();
        let child = Mutex::new(spawn(&path, &log, level.as_deref())?);
        Ok(Self { http, admin, h2c, child, log, config: path, level })
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().expect("the process")
    }

    /// Where a call goes, by what it speaks.
    pub fn for_call(&self, sent: &Sent) -> SocketAddr {
        if sent.is_h2() { self.h2c } else { self.http }
    }

    pub fn pid(&self) -> u32 {
        self.child().id()
    }

    pub fn log(&self) -> Vec<String> {
        self.log.lines.lock().expect("the log").all.clone()
    }

    /// The exit status, if it has left; 128 and the signal's number when one killed it.
    pub fn exit_code(&self) -> Option<i32> {
        use std::os::unix::process::ExitStatusExt as _;
        let status = self.child().try_wait().ok()??;
        status.code().or_else(|| status.signal().map(|signal| 128 + signal))
    }

    /// Waits for the process to leave.
    pub async fn wait(&self, patience: Duration) -> Option<i32> {
        let until = Instant::now() + patience;
        loop {
            let code = self.exit_code();
            if code.is_some() || Instant::now() > until {
                return code;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts it again on the same store and the same ports.
    pub fn restart(&self) -> Result<(), String> {
        let mut child = self.child();
        let _gone = child.kill();
        let _gone = child.wait();
        // Its lines go on behind the old one's: secrets are looked for in all of them.
        *child = spawn(&self.config, &self.log, self.level.as_deref())?;
        Ok(())
    }

    /// Changes the config file and asks for a reload.
    pub fn reload(&self, change: impl FnOnce(&mut Value)) -> Result<(), String> {
        let text = std::fs::read_to_string(&self.config).map_err(|e| e.to_string())?;
        let mut config: Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        change(&mut config);
        let text = serde_json::to_string_pretty(&config).map_err(|e| e.to_string())?;
        std::fs::write(&self.config, text).map_err(|e| e.to_string())?;
        super::client::signal_process(self.pid(), "SIGHUP");
        Ok(())
    }

    /// A page of the admin port.
    pub async fn page(&self, path: &str) -> Exchange {
        Sent::new("GET", path).call(self.admin).await
    }

    pub async fn metrics(&self) -> Vec<Sample> {
        samples(&self.page("/metrics").await.body_text())
    }

    /// Resident memory, in KiB.
    pub fn rss_kib(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let mut child = self.child();
        let _gone = child.kill();
        let _gone = child.wait();
    }
}

/// The gateway's own default, and every decision.
const LOG: &str = "info,pingora_load_balancing=warn,decision=debug";

/// Starts a process and waits until it serves.
fn spawn(config: &Path, log: &Arc<Log>, level: Option<&str>) -> Result<Child, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.arg("--config").arg(config).args(["--log", "json", "serve"]);
    command.env("RUST_LOG", level.unwrap_or(LOG)).env_remove("TOLLGATE_CONFIG");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("the gateway cannot be started: {e}"))?;
    let from = {
        let mut lines = log.lines.lock().expect("the log");
        lines.begun += 1;
        lines.all.len()
    };
    if let Some(stderr) = child.stderr.take() {
        let log = Arc::clone(log);
        std::thread::spawn(move || log.collect(BufReader::new(stderr)));
    }
    if log.wait_for("serving", from) {
        return Ok(child);
    }
    let _gone = child.kill();
    let said = log.lines.lock().expect("the log").all.get(from..).unwrap_or_default().join(" ");
    Err(format!("the gateway does not start: {}", said.trim()))
}

impl Log {
    fn collect(&self, stderr: BufReader<std::process::ChildStderr>) {
        for line in stderr.split(b'\n').map_while(Result::ok) {
            self.lines.lock().expect("the log").all.push(String::from_utf8_lossy(&line).into_owned());
            self.grown.notify_all();
        }
        self.lines.lock().expect("the log").ended += 1;
        self.grown.notify_all();
    }

    /// Waits for a line with this text, from one on; `false` when the log ended or took too long.
    fn wait_for(&self, text: &str, from: usize) -> bool {
        let found = |lines: &Lines| lines.all.iter().skip(from).any(|line| line.contains(text));
        let waiting = |lines: &mut Lines| !found(lines) && lines.ended < lines.begun;
        let lines = self.lines.lock().expect("the log");
        let (lines, _) = self.grown.wait_timeout_while(lines, PATIENCE, waiting).expect("the log");
        found(&lines)
    }
}

/// The value of the first sample of that name and label.
pub fn value(samples: &[Sample], name: &str, label: &str) -> Option<f64> {
    samples.iter().find(|s| s.name == name && s.labels.contains(label)).map(|s| s.value)
}

/// A metric's value as a whole number.
pub fn whole(value: f64) -> i64 {
    format!("{value:.0}").parse().unwrap_or(i64::MAX)
}

fn samples(text: &str) -> Vec<Sample> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let (key, value) = line.rsplit_once(' ')?;
            let (name, labels) = key.split_once('{').unwrap_or((key, ""));
            let labels = labels.trim_end_matches('}').to_owned();
            Some(Sample { name: name.to_owned(), labels, value: value.parse().ok()? })
        })
        .collect()
}

/// A port that nobody uses, outside of the range that the kernel hands out.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let process = u16::try_from(std::process::id() % 1999).unwrap_or(0);
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 30_000 + process.wrapping_mul(37).wrapping_add(step) % 2_000;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
