//! Nothing that is somebody's secret shows: not a key, a credential, a prompt or an answer; not in a log of any level,
//! in a metric, on a page of the admin port, in a message about a broken config, in the store or in a panic.
//!
//! Every secret of this test holds one [`MARK`], and everything that the gateway says anywhere is searched for it.

use std::fmt::Write as _;
use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate::mock::Mock;

use super::support::gateway::free_address;
use super::support::{Answer, Call, Caller, script, upstream};

const PATIENCE: Duration = Duration::from_secs(30);

/// What no output may hold.
const MARK: &str = "MARK7f3a";
const KEY: &str = "sk-MARK7f3a-caller-0123456789";
const POOR_KEY: &str = "sk-MARK7f3a-poor-0123456789";
const UNKNOWN_KEY: &str = "sk-MARK7f3a-unknown-0123456789";
const CREDENTIAL: &str = "prov-MARK7f3a-credential";
const FILE_CREDENTIAL: &str = "prov-MARK7f3a-in-a-file";

/// A gateway whose every word is kept.
struct Stand {
    folder: TempDir,
    http: SocketAddr,
    admin: SocketAddr,
    openai: Mock,
    anthropic: Mock,
    child: Child,
}

impl Stand {
    async fn start(format: &str) -> Self {
        let (http, admin) = (free_address(), free_address());
        let openai = upstream(says("{}")).await;
        let anthropic = upstream(says(r#"{"dialect":"anthropic"}"#)).await;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("credential"), FILE_CREDENTIAL).unwrap();
        let yaml = config(http, admin, openai.address(), anthropic.address());
        std::fs::write(folder.path().join("tollgate.yaml"), yaml).unwrap();
        let child = command(folder.path(), &["--log", format, "serve"]).spawn().unwrap();
        let stand = Self { folder, http, admin, openai, anthropic, child };
        let began = Instant::now();
        while !stand.output().contains("serving") {
            assert!(began.elapsed() < PATIENCE, "it never serves:\n{}", stand.output());
            tokio::task::yield_now().await;
        }
        stand
    }

    /// Everything that it has written so far.
    fn output(&self) -> String {
        ["stdout", "stderr"].map(|name| read(&self.folder.path().join(name))).concat()
    }

    /// Both upstreams answer so.
    fn upstreams(&self, fault: &str) {
        self.openai.set_script(says(&format!("{{{fault}}}")));
        let comma = if fault.is_empty() { "" } else { "," };
        self.anthropic.set_script(says(&format!("{{\"dialect\":\"anthropic\"{comma}{fault}}}")));
    }

    /// A call with secrets wherever one can be.
    fn call(path: &str, body: &str, key: &str) -> Call {
        let call = Call::post(body).path(path);
        let call = call.header("cookie", &format!("session={MARK}")).header("x-secret", MARK);
        match path.starts_with("/v1/messages") {
            true => call
                .without("authorization")
                .header("x-api-key", key)
                .header("anthropic-version", "2023-06-01"),
            false => call.header("authorization", &format!("Bearer {key}")),
        }
    }

    /// Calls every surface, streamed and whole; answers the statuses.
    async fn call_all(&self, key: &str) -> Vec<u16> {
        let mut statuses = vec![];
        for (path, body) in bodies() {
            statuses.push(Self::call(path, &body, key).send(self.http).await.status);
        }
        statuses
    }

    async fn page(&self, path: &str) -> String {
        Call::get(path).without("authorization").send(self.admin).await.text()
    }

    /// Stops it as an operator does; answers everything that it said in its life.
    fn stop(mut self) -> (String, TempDir) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success(), "it leaves in order");
        let Self { folder, .. } = &self;
        let output = ["stdout", "stderr"].map(|name| read(&folder.path().join(name))).concat();
        let folder = std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap());
        (output, folder)
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

fn command(folder: &Path, args: &[&str]) -> Command {
    let file = |name: &str| File::options().create(true).append(true).open(folder.join(name)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["--config", "tollgate.yaml"]).args(args).current_dir(folder);
    command.env("RUST_LOG", "trace").env("RUST_BACKTRACE", "full");
    command.stdin(Stdio::null()).stdout(file("stdout")).stderr(file("stderr"));
    command
}

/// A provider that speaks secrets and does this.
fn says(more: &str) -> tollgate::mock::Script {
    let text = format!("{{\"text\":[\"{MARK}\",\" answer\",\" {MARK}\"]");
    script(&match more.strip_prefix('{') {
        None | Some("}") => format!("{text}}}"),
        Some(rest) => format!("{text},{rest}"),
    })
}

fn config(http: SocketAddr, admin: SocketAddr, openai: SocketAddr, anthropic: SocketAddr) -> String {
    let model = |provider: &str| {
        format!(
            "price: {{ input: \"2.5\", output: \"10\" }}, limits: {{ context: 128000, output: 16384 }}, routes: [ {{ provider: {provider} }} ]"
        )
    };
    format!(
        "listen: {{ http: \"{http}\", admin: \"{admin}\", threads: 2 }}\n\
         store: {{ embedded: {{ path: ./data }} }}\n\
         drain: {{ pre: 10ms, max: 10s }}\n\
         routing: {{ explore: false, attempts_max: 1, deadline: 5s }}\n\
         providers:\n  \
         o: {{ dialect: openai, base_url: \"http://{openai}/v1\", credential: {CREDENTIAL} }}\n  \
         a: {{ dialect: anthropic, base_url: \"http://{anthropic}/v1\", credential_file: ./credential }}\n\
         models:\n  gpt-a: {{ {} }}\n  claude-a: {{ {} }}\n\
         bootstrap:\n  accounts:\n    \
         alpha: {{ balance: \"5.00\", keys: [ {{ key: {KEY}, default_output_tokens: 100 }} ] }}\n    \
         poor: {{ balance: \"0.000001\", keys: [ {{ key: {POOR_KEY} }} ] }}\n",
        model("o"),
        model("a"),
    )
}

/// A request for every surface, streamed and whole where it can be.
fn bodies() -> Vec<(&'static str, String)> {
    let message = format!(r#""messages":[{{"role":"user","content":"{MARK} prompt"}}]"#);
    let mut bodies = vec![];
    for stream in ["", r#","stream":true"#] {
        bodies.push((
            "/v1/chat/completions",
            format!(r#"{{"model":"gpt-a",{message},"user":"{MARK}"{stream}}}"#),
        ));
        bodies.push((
            "/v1/completions",
            format!(r#"{{"model":"gpt-a","prompt":"{MARK}","max_tokens":9{stream}}}"#),
        ));
        bodies.push(("/v1/responses", format!(r#"{{"model":"gpt-a","input":"{MARK}"{stream}}}"#)));
        bodies.push(("/v1/messages", format!(r#"{{"model":"claude-a","max_tokens":9,{message}{stream}}}"#)));
    }
    bodies.push(("/v1/embeddings", format!(r#"{{"model":"gpt-a","input":["{MARK}"]}}"#)));
    bodies.push(("/v1/messages/count_tokens", format!(r#"{{"model":"claude-a",{message}}}"#)));
    bodies
}

/// What upstreams do to an answer, each with secrets in its words where there are words.
fn faults() -> Vec<String> {
    let error = |status: u16, words: &str| {
        format!(
            r#""fault":{{"kind":"status","code":{status},"body":"{{\"error\":{{\"message\":\"{words}\",\"type\":\"{MARK}\",\"code\":\"{MARK}\",\"param\":\"{MARK}\"}}}}"}}"#
        )
    };
    let words = format!("key {CREDENTIAL} and {FILE_CREDENTIAL} for {MARK}");
    let kinds = [
        r#"{"kind":"close_before_head"}"#.to_owned(),
        r#"{"kind":"reset_after_pieces","pieces":1}"#.to_owned(),
        r#"{"kind":"cut_after_pieces","pieces":1}"#.to_owned(),
        r#"{"kind":"end_after_pieces","pieces":1}"#.to_owned(),
        format!(r#"{{"kind":"error_event","pieces":1,"body":"{{\"error\":{{\"message\":\"{words}\"}}}}"}}"#),
        r#"{"kind":"html"}"#.to_owned(),
        r#"{"kind":"garbage"}"#.to_owned(),
        r#"{"kind":"empty"}"#.to_owned(),
    ];
    let mut faults: Vec<_> = kinds.iter().map(|kind| format!(r#""fault":{kind}"#)).collect();
    faults.extend([400, 422, 429, 500].map(|status| error(status, &words)));
    faults.push(error(401, &words));
    faults
}

/// Calls that are refused before an upstream is asked.
async fn refused_calls(stand: &Stand) -> Vec<u16> {
    let (path, good) = ("/v1/chat/completions", &bodies()[0].1);
    let mut statuses = vec![];
    for (body, key) in [
        (good.as_str(), UNKNOWN_KEY),
        (good.as_str(), POOR_KEY),
        (&format!("{{\"model\":\"gpt-a\",\"messages\":\"{MARK}\""), KEY),
        (&format!("{{\"model\":\"gpt-a\",\"messages\":[{{\"role\":\"{MARK}\"}}],\"n\":\"{MARK}\"}}"), KEY),
        (&format!("{{\"model\":\"gpt-a\",\"messages\":[],\"provider\":{{\"{MARK}\":1}}}}"), KEY),
        (&format!("{{\"model\":\"gpt-a\",\"messages\":[],\"provider\":{{\"sort\":\"{MARK}\"}}}}"), KEY),
        (&format!("{{\"model\":\"{MARK}\",\"messages\":[]}}"), KEY),
        (MARK, KEY),
    ] {
        statuses.push(Stand::call(path, body, key).send(stand.http).await.status);
    }
    for target in
        [format!("/v1/{MARK}"), format!("/v1/chat/completions?key={KEY}"), format!("/v1/models/{MARK}")]
    {
        statuses.push(Stand::call(&target, good, UNKNOWN_KEY).send(stand.http).await.status);
    }
    for path in ["/v1/models", "/v1/credits", "/v1/generation?id=none"] {
        let authorization = format!("Bearer {KEY}");
        statuses.push(Call::get(path).header("authorization", &authorization).send(stand.http).await.status);
    }
    statuses
}

/// What is no HTTP, or stops in the middle.
async fn broken_calls(stand: &Stand) {
    for bytes in [
        format!("{MARK} {MARK}\r\n\r\n"),
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {KEY}\r\nbad header {MARK}\r\n\r\n"
        ),
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\ncontent-length: 500\r\n\r\n{MARK}"
        ),
    ] {
        let mut caller = Caller::connect(stand.http).await;
        caller.send_raw(bytes.as_bytes()).await;
        caller.finish_sending().await;
        caller.rest().await;
    }
    stand.upstreams(r#""delay_chunk_ms":20000"#);
    let (path, body) = &bodies()[4];
    let mut caller = Stand::call(path, body, KEY).begin(stand.http).await;
    caller.head().await;
    caller.read_until(MARK).await;
    caller.reset();
}

/// Everything that the admin port says, also to what it cannot read.
async fn admin_pages(stand: &Stand) -> String {
    let mut pages = String::new();
    for path in ["/metrics", "/readyz", "/healthz", "/nowhere"] {
        pages += &stand.page(path).await;
    }
    let token = read(&stand.folder.path().join("data/admin.token"));
    for (path, body) in [("/explain", bodies()[0].1.clone()), ("/books", format!("{{\"{MARK}\":1}}"))] {
        for token in [token.trim(), "wrong"] {
            let call =
                Call::post(body.clone()).path(path).header("authorization", &format!("Bearer {token}"));
            let said: Answer = call.send(stand.admin).await;
            // To whoever sent it, what is wrong may be named.
            let unread = said.status == 422 || said.status == 400;
            pages += &if unread { String::new() } else { said.text() };
        }
    }
    pages
}

fn assert_silent(place: &str, text: &str) {
    if let Some(at) = text.find(MARK) {
        let lines: Vec<_> = text.lines().filter(|line| line.contains(MARK)).take(5).collect();
        panic!("{place} shows a secret at byte {at}:\n{}", lines.join("\n"));
    }
}

/// All files below a folder, as bytes that are looked at as text.
fn files(folder: &Path, all: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, all);
        } else {
            writeln!(all, "{}: {}", path.display(), read(&path)).unwrap();
        }
    }
}

#[tokio::test]
async fn no_secret_shows_in_any_log_metric_page_or_store() {
    for format in ["text", "json"] {
        let stand = Stand::start(format).await;
        assert_eq!(stand.call_all(KEY).await, [200; 10], "{}", stand.output());
        assert_eq!(stand.call_all(UNKNOWN_KEY).await, [401; 10]);
        let statuses = refused_calls(&stand).await;
        for status in [400, 401, 402, 404] {
            assert!(statuses.contains(&status), "no {status} among {statuses:?}");
        }
        broken_calls(&stand).await;
        assert_silent("the admin port", &admin_pages(&stand).await);
        let (output, folder) = stand.stop();
        assert!(output.lines().count() > 50, "it says what it does:\n{output}");
        for part in ["access", "decision", "DEBUG"] {
            assert!(output.contains(part), "no {part} in\n{output}");
        }
        assert_silent(&format!("the {format} log"), &output);
        let mut stored = String::new();
        files(&folder.path().join("data"), &mut stored);
        assert!(stored.contains("gpt-a"), "the store is where it was looked for");
        assert_silent("the store", &stored);
    }
}

#[tokio::test]
async fn no_secret_of_an_upstreams_words_shows() {
    // A gateway for each, since one that has seen a few failures asks its upstreams no more.
    for (fault, format) in faults().iter().zip(["text", "json"].into_iter().cycle()) {
        let stand = Stand::start(format).await;
        stand.upstreams(fault);
        stand.call_all(KEY).await;
        assert!(!stand.openai.requests().is_empty() && !stand.anthropic.requests().is_empty(), "{fault}");
        assert_silent("the admin port", &stand.page("/metrics").await);
        let (output, _folder) = stand.stop();
        assert!(output.contains("decision"), "{output}");
        assert_silent(&format!("the {format} log of {fault}"), &output);
    }
}

#[test]
fn no_secret_shows_in_what_is_said_of_a_broken_config() {
    let address = SocketAddr::from(([127, 0, 0, 1], 9));
    let good = config(address, address, address, address);
    for (from, to) in [
        (CREDENTIAL, "\"prov-MARK7f3a\\nline\""),
        (CREDENTIAL, "[prov-MARK7f3a]"),
        (CREDENTIAL, "{ x: prov-MARK7f3a }"),
        ("credential: prov", "credentials: [prov-MARK7f3a, prov-MARK7f3a], credential: prov"),
        (KEY, "MARK7f3"),
        (KEY, "\"MARK7f3a with space\""),
        (POOR_KEY, KEY),
        ("http://127.0.0.1:9/v1", "https://user:MARK7f3a@127.0.0.1/v1"),
        ("http://127.0.0.1:9/v1", "https://127.0.0.1/v1?key=MARK7f3a"),
        ("bootstrap:", "bootstrap: ]"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        assert!(good.contains(from), "{from}");
        std::fs::write(folder.path().join("tollgate.yaml"), good.replacen(from, to, 1)).unwrap();
        std::fs::write(folder.path().join("credential"), FILE_CREDENTIAL).unwrap();
        for verb in ["check", "serve"] {
            let ended = command(folder.path(), &[verb]).status().unwrap();
            assert!(!ended.success(), "{to} is no fault");
        }
        let output = ["stdout", "stderr"].map(|name| read(&folder.path().join(name))).concat();
        assert!(!output.is_empty());
        assert_silent(to, &output);
    }
}
