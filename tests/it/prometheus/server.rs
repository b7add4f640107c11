//! A Prometheus on a free loopback port that scrapes a gateway, with time sixty times as fast.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use regex::{Captures, Regex};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Call, gateway::free_address};

/// How much shorter every interval of the rules is.
const FASTER: u64 = 60;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a machine that also builds and runs other tests may well be: these say so, and are right.
const MACHINE: [&str; 4] = ["DiskNearlyFull", "DiskFills", "OwnTimeHigh", "UpstreamSlows"];

/// A running Prometheus.
pub struct Server {
    address: SocketAddr,
    child: Child,
    _folder: TempDir,
}

/// A file of the repository.
pub fn repository(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The rules, with every interval shortened: windows, `for`, `interval`, and the day that a disk's line is drawn to.
pub fn compressed_rules() -> String {
    let text = repository("conf/prometheus/rules.yml");
    let shorter = |number: &str, unit: &str| {
        let seconds = number.parse::<u64>().unwrap()
            * match unit {
                "s" => 1,
                "m" => 60,
                "h" => 3_600,
                _ => 86_400,
            };
        format!("{}ms", seconds * 1_000 / FASTER)
    };
    let spans = Regex::new(r"(\[|offset |for: |interval: )(\d+)([smhd])\b").unwrap();
    let text = spans
        .replace_all(&text, |found: &Captures<'_>| format!("{}{}", &found[1], shorter(&found[2], &found[3])));
    let ahead = Regex::new(r"(predict_linear\([^,]+, )(\d+)\)").unwrap();
    let ahead = ahead.replace_all(&text, |found: &Captures<'_>| {
        format!("{}{})", &found[1], found[2].parse::<u64>().unwrap() / FASTER)
    });
    ahead.into_owned()
}

impl Server {
    /// Scrapes this admin port under the job's usual name.
    pub async fn start(admin: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "global: {{ scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms }}\n\
             rule_files: [rules.yml]\n\
             scrape_configs: [ {{ job_name: tollgate, static_configs: [ {{ targets: [\"{admin}\"] }} ] }} ]\n"
        );
        std::fs::write(folder.path().join("prometheus.yml"), config).unwrap();
        std::fs::write(folder.path().join("rules.yml"), compressed_rules()).unwrap();
        let address = free_address();
        let child = Command::new("prometheus")
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"])
            .arg(format!("--web.listen-address={address}"))
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("Debian's package `prometheus`: scripts/setup test");
        let mut server = Self { address, child, _folder: folder };
        let began = Instant::now();
        while !server.is_up().await {
            assert!(server.child.try_wait().unwrap().is_none(), "Prometheus has left");
            assert!(began.elapsed() < PATIENCE, "Prometheus does not come up");
            tokio::task::yield_now().await;
        }
        server
    }

    async fn is_up(&self) -> bool {
        match tokio::net::TcpStream::connect(self.address).await {
            Ok(_) => Call::get("/-/ready").send(self.address).await.status == 200,
            Err(_) => false,
        }
    }

    /// The samples of an instant query, or what is wrong with it.
    pub async fn query(&self, expr: &str) -> Result<Vec<Value>, String> {
        let path = format!("/api/v1/query?query={}", encoded(expr));
        let answer = Call::get(&path).send(self.address).await.json();
        match answer["data"]["result"].as_array() {
            Some(samples) => Ok(samples.clone()),
            None => Err(format!("{expr}: {answer}")),
        }
    }

    /// Waits until a query has an answer.
    pub async fn wait_for(&self, expr: &str) {
        let began = Instant::now();
        while self.query(expr).await.unwrap().is_empty() {
            assert!(began.elapsed() < PATIENCE, "{expr} stays empty; firing: {:?}", self.firing().await);
            tokio::task::yield_now().await;
        }
    }

    /// Alerts that fire, by name and what they are about, but for those about the machine.
    pub async fn firing(&self) -> Vec<String> {
        let samples = self.query(r#"ALERTS{alertstate="firing"}"#).await.unwrap();
        let named = samples.iter().map(|sample| {
            let label = |name: &str| sample["metric"][name].as_str().unwrap_or_default().to_owned();
            let about = ["endpoint", "region", "objective"].map(label).concat();
            (label("alertname"), about)
        });
        let mut names: Vec<String> = named
            .filter(|(name, _)| !MACHINE.contains(&name.as_str()))
            .map(|(name, about)| format!("{name} {about}"))
            .collect();
        names.sort();
        names
    }

    /// Waits until exactly these alerts fire. Answers how long that took.
    pub async fn wait_until_firing(&self, wanted: &[&str]) -> Duration {
        let began = Instant::now();
        loop {
            let firing = self.firing().await;
            if firing == wanted {
                return began.elapsed();
            }
            let unexpected: Vec<&String> =
                firing.iter().filter(|name| !wanted.contains(&name.as_str())).collect();
            assert!(unexpected.is_empty(), "{unexpected:?} fire, and only {wanted:?} should");
            assert!(began.elapsed() < PATIENCE, "{firing:?} fire instead of {wanted:?}");
            tokio::task::yield_now().await;
        }
    }

    /// What the alerts that fire say.
    pub async fn annotations(&self) -> Vec<Value> {
        let answer = Call::get("/api/v1/alerts").send(self.address).await.json();
        let alerts = answer["data"]["alerts"].as_array().cloned().unwrap_or_default();
        alerts.into_iter().map(|alert| alert["annotations"].clone()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().expect("Prometheus runs");
        self.child.wait().expect("its end");
    }
}

/// A query as a part of a URL.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
