//! A scripted provider: the other end of the gateway in tests and demos.
//!
//! [`Mock`] is a provider inside a test, with its script and its memory at hand; [`serve`] is the
//! same provider as a process, steered through `PUT /__mock/script` and read through
//! `GET /__mock/requests` and `GET /__mock/counts`. It records each request when it is whole, and the time of each write
//! of its answer, so that a test can compare both ends of the gateway on one clock.
//!
//! A fault strikes completions only. `GET /v1/models`, unknown paths and requests refused with
//! 400 are answered as a healthy provider would and do not use up `fault_count`.
//!
//! Deliberately absent: authentication (any key will do), rate limits other than scripted ones,
//! and sleeping: whoever waits for the mock waits on a channel.
//!
//! Bounds: `CONNECTIONS_MAX` open connections, beyond which new ones wait in the listener's
//! backlog; the last `REQUESTS_MAX` requests and the first `WRITES_MAX` write times of each.
//! They are there so that a forgotten demo ends as a slow process, not as a full machine.

mod answer;
mod dialect;
mod responses;
mod script;
mod wire;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use self::answer::Answer;
use self::dialect::Wish;
pub use self::script::{Dialect, Fault, Script, Surface, UsageScript, Words};
use self::wire::{Played, Request, Wire};

const CONNECTIONS_MAX: usize = 4096;
const REQUESTS_MAX: usize = 10_000;
const WRITES_MAX: usize = 100_000;

/// A running provider; it stops when dropped.
#[derive(Debug)]
pub struct Mock {
    address: SocketAddr,
    stage: Arc<Stage>,
    accepting: JoinHandle<()>,
}

impl Mock {
    /// Accepts on the current runtime.
    ///
    /// # Errors
    /// When the listener has no address, which is to say: is none.
    #[expect(clippy::unused_async, reason = "spawning needs a runtime, and only `await` proves one")]
    pub async fn start(listener: TcpListener, script: Script) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let stage = Arc::new(Stage::new(script));
        #[expect(clippy::disallowed_methods, reason = "the handle aborts it when it is dropped")]
        let accepting = tokio::spawn(accept(listener, Arc::clone(&stage)));
        Ok(Self { address, stage, accepting })
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Holds from the next request on, and counts faults anew.
    pub fn set_script(&self, script: Script) {
        self.stage.set_script(script);
    }

    /// The whole requests so far, oldest first, as far as they are remembered.
    #[must_use]
    pub fn requests(&self) -> Vec<SeenRequest> {
        self.stage.memory().requests.iter().cloned().collect()
    }

    #[must_use]
    pub fn open_connections(&self) -> usize {
        *self.stage.connections_open.borrow()
    }

    /// How often a peer left before its answer was finished.
    #[must_use]
    pub fn disconnects(&self) -> usize {
        *self.stage.disconnects.borrow()
    }

    /// Returns once at least `count` requests were whole, control requests not counted.
    pub async fn wait_for_requests(&self, count: usize) {
        reaches(&self.stage.requests_seen, |seen| *seen >= count).await;
    }

    /// Returns once a peer has left an unfinished answer at least `count` times.
    pub async fn wait_for_disconnects(&self, count: usize) {
        reaches(&self.stage.disconnects, |gone| *gone >= count).await;
    }

    /// Returns once exactly `count` connections are open.
    pub async fn wait_for_open_connections(&self, count: usize) {
        reaches(&self.stage.connections_open, |open| *open == count).await;
    }

    /// Aborts the accept loop and all connections, as soon as the runtime gets to it.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A request as it came off the wire.
#[derive(Clone, Debug)]
pub struct SeenRequest {
    pub method: String,
    /// With its query.
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Bytes,
    /// When it was whole.
    pub at: Instant,
    /// Counted from zero in the order of acceptance.
    pub connection: u64,
    /// When each write of the answer was begun, up to the moment of this snapshot.
    pub sent: Vec<Instant>,
}

impl SeenRequest {
    /// The first header of that name, in whatever case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let is_it = |(other, _): &&(String, String)| other.eq_ignore_ascii_case(name);
        self.headers.iter().find(is_it).map(|(_, value)| value.as_str())
    }

    fn to_json(&self) -> serde_json::Value {
        const BODY_SHOWN_BYTES_MAX: usize = 4096;
        let shown = self.body.slice(..self.body.len().min(BODY_SHOWN_BYTES_MAX));
        serde_json::json!({
            "method": self.method,
            "path": self.path,
            "headers": self.headers,
            "body_bytes": self.body.len(),
            "body": String::from_utf8_lossy(&shown),
        })
    }
}

/// Runs the provider until dropped.
///
/// # Errors
/// When the listener has no address, which is to say: is none.
pub async fn serve(listener: TcpListener, script: Script) -> io::Result<()> {
    tracing::info!(address = %listener.local_addr()?, "mock provider listens");
    accept(listener, Arc::new(Stage::new(script))).await;
    Ok(())
}

/// What all connections of one mock share.
#[derive(Debug)]
struct Stage {
    scene: Mutex<Scene>,
    memory: Mutex<Memory>,
    requests_seen: watch::Sender<usize>,
    disconnects: watch::Sender<usize>,
    connections_open: watch::Sender<usize>,
}

#[derive(Debug)]
struct Scene {
    script: Arc<Script>,
    faults_played: u32,
}

#[derive(Debug, Default)]
struct Memory {
    requests: VecDeque<SeenRequest>,
    /// How many older ones were forgotten: the place of the first one in `requests`.
    forgotten: usize,
}

impl Stage {
    fn new(script: Script) -> Self {
        Self {
            scene: Mutex::new(Scene { script: Arc::new(script), faults_played: 0 }),
            memory: Mutex::default(),
            requests_seen: watch::Sender::new(0),
            disconnects: watch::Sender::new(0),
            connections_open: watch::Sender::new(0),
        }
    }

    fn set_script(&self, script: Script) {
        *self.scene() = Scene { script: Arc::new(script), faults_played: 0 };
    }

    /// Answers a recorded request, and counts the fault if one is due.
    fn answer(&self, request: &Request) -> Answer {
        let mut scene = self.scene();
        let script = Arc::clone(&scene.script);
        let path = request.path.split('?').next().unwrap_or_default();
        let words = script.answers.get(path).cloned();
        // Words need no surface; a path that has none borrows chat's.
        let surface = Surface::at(&script, path).or_else(|| words.as_ref().map(|_| Surface::Chat));
        match (request.method.as_str(), surface) {
            ("GET", None) if path == "/v1/models" => Answer::json(200, &dialect::models(&script)),
            ("POST", Some(surface)) => match Wish::parse(surface, &request.body) {
                Some(wish) => Answer::completion(&script, &Wish { words, ..wish }, scene.next_fault()),
                None => Answer::error(&script, 400, "the request body is not a JSON object"),
            },
            (method, _) => Answer::error(&script, 404, &format!("no such endpoint: {method} {path}")),
        }
    }

    /// Answers the mock's own endpoints, which are neither recorded nor scripted.
    fn control(&self, request: &Request) -> Option<Answer> {
        match (request.method.as_str(), request.path.as_str()) {
            ("PUT", "/__mock/script") => Some(match serde_json::from_slice(&request.body) {
                Ok(script) => {
                    self.set_script(script);
                    Answer::no_content()
                }
                Err(fault) => {
                    Answer::json(400, &serde_json::json!({ "error": fault.to_string() }).to_string())
                }
            }),
            ("GET", "/__mock/requests") => {
                let requests: Vec<_> = self.memory().requests.iter().map(SeenRequest::to_json).collect();
                Some(Answer::json(200, &serde_json::Value::from(requests).to_string()))
            }
            ("GET", "/__mock/counts") => {
                let counts = serde_json::json!({
                    "requests": *self.requests_seen.borrow(),
                    "disconnects": *self.disconnects.borrow(),
                });
                Some(Answer::json(200, &counts.to_string()))
            }
            _ => None,
        }
    }

    /// Returns the request's place among all recorded ones. Recorded before it is answered, so a
    /// test that sees the answer also sees the request.
    fn record(&self, request: &Request, connection: u64) -> usize {
        let seen = SeenRequest {
            method: request.method.clone(),
            path: request.path.clone(),
            headers: request.headers.clone(),
            body: request.body.clone(),
            at: crate::clock::now(),
            connection,
            sent: Vec::new(),
        };
        let mut memory = self.memory();
        memory.requests.push_back(seen);
        if memory.requests.len() > REQUESTS_MAX {
            memory.requests.pop_front();
            memory.forgotten += 1;
        }
        let count = memory.forgotten + memory.requests.len();
        self.requests_seen.send_replace(count);
        count - 1
    }

    fn record_write(&self, place: usize) {
        let mut memory = self.memory();
        let index = place.checked_sub(memory.forgotten);
        if let Some(seen) = index.and_then(|index| memory.requests.get_mut(index))
            && seen.sent.len() < WRITES_MAX
        {
            seen.sent.push(crate::clock::now());
        }
    }

    /// A lock poisoned by a failed test still guards whole values: each is written in one step.
    fn scene(&self) -> MutexGuard<'_, Scene> {
        self.scene.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scene {
    fn next_fault(&mut self) -> Option<&Fault> {
        let fault = self.script.fault.as_ref()?;
        if self.script.fault_count.is_some_and(|count| self.faults_played >= count) {
            return None;
        }
        self.faults_played = self.faults_played.saturating_add(1);
        Some(fault)
    }
}

async fn reaches(counter: &watch::Sender<usize>, enough: impl FnMut(&usize) -> bool) {
    let mut watched = counter.subscribe();
    // The sender is borrowed for as long as this waits, so the channel cannot close.
    let _never_closed = watched.wait_for(enough).await;
}

/// Owns every connection: dropping this future ends them all.
async fn accept(listener: TcpListener, stage: Arc<Stage>) {
    /// Long enough for a descriptor to be freed, short enough not to be noticed.
    const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(20);
    let mut connections = JoinSet::new();
    let mut accepted: u64 = 0;
    loop {
        tokio::select! {
            incoming = listener.accept(), if connections.len() < CONNECTIONS_MAX => match incoming {
                Ok((stream, _)) => {
                    connections.spawn(converse(stream, OpenConnection::new(&stage), accepted));
                    accepted += 1;
                }
                Err(failure) => {
                    tracing::warn!(%failure, "mock provider could not accept");
                    tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Counted open for as long as it lives.
struct OpenConnection {
    stage: Arc<Stage>,
}

impl OpenConnection {
    fn new(stage: &Arc<Stage>) -> Self {
        stage.connections_open.send_modify(|open| *open += 1);
        Self { stage: Arc::clone(stage) }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.stage.connections_open.send_modify(|open| *open -= 1);
    }
}

async fn converse(stream: TcpStream, open: OpenConnection, connection: u64) {
    let stage = &open.stage;
    let Ok(mut wire) = Wire::new(stream) else {
        return;
    };
    loop {
        let request = match wire.read_request().await {
            Ok(request) => request,
            Err(unread) => {
                if let Some(status) = unread.status() {
                    wire.play(Answer::refusal(status), || {}).await;
                }
                return;
            }
        };
        let played = if let Some(answer) = stage.control(&request) {
            wire.play(answer, || {}).await
        } else {
            let answer = stage.answer(&request);
            let place = stage.record(&request, connection);
            let played = wire.play(answer, || stage.record_write(place)).await;
            if played == Played::PeerGone {
                stage.disconnects.send_modify(|gone| *gone += 1);
            }
            played
        };
        match played {
            Played::Complete if !request.is_last => {}
            Played::Complete | Played::Ended | Played::PeerGone => return,
        }
    }
}

#[cfg(test)]
mod tests;
