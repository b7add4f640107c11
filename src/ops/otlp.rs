//! Spans of calls, sent to an OpenTelemetry collector (OTLP over HTTP, as protobuf), where the config names one.
//!
//! Off, a call carries a `None`. On, it carries a [`Trace`] that grows by a span for each attempt and is handed over at the
//! call's end, whole. A thread of its own gathers and sends them. The queue to it is bounded: whatever does not fit, or
//! whatever a collector does not take in time, is dropped and counted (`tollgate_telemetry_dropped_total`). Nothing waits
//! for a collector, also not a process that leaves: it sends what waits once, and goes.
//!
//! A span has what the access and decision lines have, under the names of OpenTelemetry's conventions: never a key, a
//! prompt or an answer.

mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use prometheus::IntCounter;
use rand_core::RngCore as _;

use crate::{clock, entropy};

pub use wire::request;

/// Calls that wait to be sent. With five attempts each that is a few megabytes.
const QUEUE_MAX: usize = 4096;
/// The most calls of one message.
const BATCH_MAX: usize = 256;
/// How long a message gathers calls.
const GATHER: Duration = Duration::from_secs(1);
/// How often it is looked whether the process leaves.
const LOOK: Duration = Duration::from_millis(100);
/// How long a collector may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for the last message of a process.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// Where spans are handed in.
#[derive(Clone)]
pub struct Telemetry {
    calls: SyncSender<Box<Trace>>,
    dropped: IntCounter,
}

/// The thread that sends.
pub struct Sending {
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
}

/// The spans of one call.
#[derive(Clone, Debug)]
pub struct Trace {
    pub trace: [u8; 16],
    pub span: [u8; 8],
    /// Of the caller; zeros: there is none.
    pub parent: [u8; 8],
    pub attempts: Vec<AttemptSpan>,
    pub call: CallSpan,
    /// When the call ended, in nanoseconds since 1970.
    pub ended_unix_nano: u64,
    /// The same by the clock that attempts are timed by.
    ended: Instant,
    pub took: Duration,
}

/// What a call's own span says.
#[derive(Clone, Debug, Default)]
pub struct CallSpan {
    pub request_id: String,
    pub surface: &'static str,
    pub operation: &'static str,
    pub provider: &'static str,
    pub model: String,
    pub status: u16,
    /// `ok`, or why not.
    pub code: &'static str,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub first_token: Option<Duration>,
}

/// One attempt.
#[derive(Clone, Debug)]
pub struct AttemptSpan {
    pub span: [u8; 8],
    pub endpoint: String,
    pub region: String,
    pub provider: &'static str,
    /// `served`, `cut`, `left` or `failed`.
    pub outcome: &'static str,
    /// Why, in a word.
    pub reason: &'static str,
    pub began: Instant,
    pub ended: Instant,
}

/// Starts the thread. `to`: the collector's base address.
///
/// # Errors
/// When there can be no thread.
pub fn start(to: &str, dropped: IntCounter) -> io::Result<(Telemetry, Sending)> {
    let (calls, waiting) = sync_channel(QUEUE_MAX);
    let stop = Arc::new(AtomicBool::new(false));
    let sender = Sender {
        url: format!("{}/v1/traces", to.trim_end_matches('/')),
        dropped: dropped.clone(),
        stop: Arc::clone(&stop),
        fails: false,
    };
    let thread = thread::Builder::new().name("telemetry".to_owned()).spawn(move || sender.run(&waiting))?;
    Ok((Telemetry { calls, dropped }, Sending { thread, stop }))
}

impl Telemetry {
    /// A call's spans, under those of its caller where `traceparent` is one. `None`: the caller's own tracing has decided
    /// against this call.
    #[must_use]
    pub fn begin(&self, traceparent: Option<&[u8]>) -> Option<Box<Trace>> {
        let (trace, parent) = match traceparent.and_then(parent_of) {
            Some(Parent { is_sampled: false, .. }) => return None,
            Some(Parent { trace, span, .. }) => (trace, span),
            None => (id(), [0; 8]),
        };
        Some(Box::new(Trace {
            trace,
            span: id(),
            parent,
            attempts: vec![],
            call: CallSpan::default(),
            ended_unix_nano: 0,
            ended: clock::now(),
            took: Duration::ZERO,
        }))
    }

    /// The call is over. Never waits.
    pub fn end(&self, mut trace: Box<Trace>, call: CallSpan, took: Duration) {
        trace.call = call;
        trace.took = took;
        trace.ended = clock::now();
        trace.ended_unix_nano = u64::try_from(clock::unix_ms()).unwrap_or_default().saturating_mul(1_000_000);
        match self.calls.try_send(trace) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.dropped.inc(),
        }
    }
}

impl Trace {
    /// An attempt has ended.
    pub fn attempted(&mut self, mut attempt: AttemptSpan) {
        attempt.span = id();
        self.attempts.push(attempt);
    }
}

impl Sending {
    /// Waits until what is queued was sent, or a collector has not taken it.
    pub fn stop(self) {
        self.stop.store(true, Ordering::Release);
        if self.thread.join().is_err() {
            tracing::error!("the thread that sends spans broke");
        }
    }
}

struct Sender {
    url: String,
    dropped: IntCounter,
    stop: Arc<AtomicBool>,
    /// Said already.
    fails: bool,
}

impl Sender {
    fn run(mut self, waiting: &Receiver<Box<Trace>>) {
        let agent = |patience| {
            ureq::Agent::new_with_config(
                ureq::Agent::config_builder().timeout_global(Some(patience)).max_redirects(0).build(),
            )
        };
        let steady = agent(PATIENCE);
        let mut batch: Vec<Trace> = vec![];
        let mut due = clock::now() + GATHER;
        while !self.stop.load(Ordering::Acquire) {
            match waiting.recv_timeout(LOOK) {
                Ok(call) => batch.push(*call),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if batch.len() >= BATCH_MAX || clock::now() >= due {
                self.send(&steady, mem::take(&mut batch));
                due = clock::now() + GATHER;
            }
        }
        batch.extend(waiting.try_iter().map(|call| *call));
        self.send(&agent(LAST_PATIENCE), batch);
    }

    fn send(&mut self, agent: &ureq::Agent, batch: Vec<Trace>) {
        if batch.is_empty() {
            return;
        }
        let body = request(&batch);
        let sent =
            agent.post(&self.url).header("content-type", "application/x-protobuf").send(body.as_slice());
        match sent {
            Ok(_) => {
                if mem::take(&mut self.fails) {
                    tracing::info!("the collector takes spans again");
                }
            }
            Err(error) => {
                self.dropped.inc_by(u64::try_from(batch.len()).unwrap_or(u64::MAX));
                if !mem::replace(&mut self.fails, true) {
                    tracing::warn!(%error, "the collector does not take spans: they are dropped");
                }
            }
        }
    }
}

struct Parent {
    trace: [u8; 16],
    span: [u8; 8],
    is_sampled: bool,
}

/// Reads a `traceparent` (W3C Trace Context). Whatever is not exactly one is none.
fn parent_of(text: &[u8]) -> Option<Parent> {
    let parts: Vec<&str> = std::str::from_utf8(text).ok()?.splitn(5, '-').collect();
    let [version, trace, span, flags] = parts.as_slice() else { return None };
    let is_hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    if *version != "00" || !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
        return None;
    }
    let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace != 0)?;
    let span = u64::from_str_radix(span, 16).ok().filter(|span| *span != 0)?;
    let flags = u8::from_str_radix(flags, 16).ok()?;
    Some(Parent { trace: trace.to_be_bytes(), span: span.to_be_bytes(), is_sampled: flags & 1 == 1 })
}

/// An id that is not zero.
fn id<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    entropy::with_rng(|rng| rng.fill_bytes(&mut bytes));
    if bytes == [0; N] { [1; N] } else { bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_taken_only_where_it_is_exactly_one() {
        let sane = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parent = parent_of(sane.as_bytes()).unwrap();
        assert_eq!(u128::from_be_bytes(parent.trace), 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!(u64::from_be_bytes(parent.span), 0x00f0_67aa_0ba9_02b7);
        assert!(parent.is_sampled);
        assert!(!parent_of(sane.replace("-01", "-00").as_bytes()).unwrap().is_sampled);
        for insane in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert!(parent_of(insane.as_bytes()).is_none(), "{insane}");
        }
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted_and_nobody_waits() {
        let dropped = IntCounter::new("dropped", "Dropped.").unwrap();
        let (calls, waiting) = sync_channel(1);
        let telemetry = Telemetry { calls, dropped: dropped.clone() };
        for _ in 0..3 {
            let trace = telemetry.begin(None).unwrap();
            telemetry.end(trace, CallSpan::default(), Duration::ZERO);
        }
        assert_eq!((dropped.get(), waiting.try_iter().count()), (2, 1));
    }
}
