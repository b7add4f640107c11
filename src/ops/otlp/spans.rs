//! Spans of calls.
//!
//! Off, a call carries a `None`. On, it carries a [`Trace`] that grows by a span for each attempt and is handed over at the
//! call's end, whole. The queue to the thread that sends is bounded: what does not fit is dropped and counted. A collector
//! that asks for time finds in the queue what came meanwhile, as far as that goes.
//!
//! A span has what the access and decision lines have, under the names of OpenTelemetry's conventions: never a key, a
//! prompt or an answer.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::{Duration, Instant};
use std::{mem, thread};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prometheus::IntCounter;
use prost::Message as _;
use rand_core::RngCore as _;

use super::collector::{Collector, Refused};
use super::wire::request;
use super::{LAST_PATIENCE, Origin, PATIENCE};
use crate::{clock, entropy};

/// Calls that wait to be sent. With five attempts each that is a few megabytes.
const QUEUE_MAX: usize = 4096;
/// The most calls of one message.
const BATCH_MAX: usize = 256;
/// How long a message gathers calls.
const GATHER: Duration = Duration::from_secs(1);
/// How often it is looked whether the process leaves.
const LOOK: Duration = Duration::from_millis(100);

/// Where spans are handed in.
#[derive(Clone)]
pub struct Telemetry {
    calls: SyncSender<Box<Trace>>,
    dropped: IntCounter,
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
    pub(super) ended: Instant,
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

impl Telemetry {
    /// And where what was handed in waits.
    pub(super) fn new(dropped: IntCounter) -> (Self, Receiver<Box<Trace>>) {
        let (calls, waiting) = sync_channel(QUEUE_MAX);
        (Self { calls, dropped }, waiting)
    }

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

    /// The call is over. Never waits. All times of a trace are by one clock, so that no attempt begins before its call.
    pub fn end(&self, mut trace: Box<Trace>, call: CallSpan, began: Instant, ended: Instant) {
        trace.call = call;
        trace.took = ended.saturating_duration_since(began);
        trace.ended = ended;
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

/// Takes calls from their queue, and sends them.
pub(super) struct Sender {
    collector: Collector,
    origin: Arc<Origin>,
    dropped: IntCounter,
    /// At most [`BATCH_MAX`].
    batch: Vec<Trace>,
    /// When it has gathered for long enough.
    due: Instant,
    /// The collector has asked for time until then.
    rests: Instant,
    /// Said already.
    fails: bool,
}

impl Sender {
    pub(super) fn new(collector: Collector, origin: Arc<Origin>, dropped: IntCounter) -> Self {
        let now = clock::now();
        Self { collector, origin, dropped, batch: vec![], due: now, rests: now, fails: false }
    }

    /// Goes on until `stop` is closed or nobody can hand in calls any more, and sends what waits then.
    pub(super) fn run(mut self, waiting: &Receiver<Box<Trace>>, stop: &Receiver<()>) {
        while stop.try_recv() != Err(TryRecvError::Disconnected) {
            let now = clock::now();
            let is_full = self.batch.len() >= BATCH_MAX;
            let is_due = is_full || (now >= self.due && !self.batch.is_empty());
            if is_due && now >= self.rests {
                self.send(PATIENCE);
            } else if is_full {
                thread::sleep(LOOK);
            } else {
                match waiting.recv_timeout(LOOK) {
                    Ok(call) => self.gather(call),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        }
        self.send_the_last(waiting);
    }

    fn gather(&mut self, call: Box<Trace>) {
        if self.batch.is_empty() {
            self.due = clock::now() + GATHER;
        }
        self.batch.push(*call);
    }

    /// The batch is sent, or dropped; it stays where the collector asks for time.
    fn send(&mut self, patience: Duration) {
        let sent = self.collector.post("traces", &request(&self.origin, &self.batch), patience);
        match &sent {
            Ok(said) => {
                self.drop_calls(rejected(said));
                if mem::take(&mut self.fails) {
                    tracing::info!("the collector takes spans again");
                }
            }
            Err(error) => {
                if !mem::replace(&mut self.fails, true) {
                    tracing::warn!(%error, "the collector does not take spans: see tollgate_telemetry_dropped_total");
                }
            }
        }
        match sent {
            Ok(_) => self.batch.clear(),
            Err(Refused { after: Some(after), .. }) => self.rests = clock::now() + after.max(GATHER),
            Err(Refused { after: None, .. }) => {
                self.drop_calls(self.batch.len());
                self.batch.clear();
            }
        }
    }

    /// Everything that waits, batch by batch, as far as the time goes.
    fn send_the_last(&mut self, waiting: &Receiver<Box<Trace>>) {
        let end = clock::now() + LAST_PATIENCE;
        loop {
            let room = BATCH_MAX.saturating_sub(self.batch.len());
            waiting.try_iter().take(room).for_each(|call| self.gather(call));
            let left = end.saturating_duration_since(clock::now());
            if self.batch.is_empty() || left.is_zero() {
                break;
            }
            self.send(left);
            self.drop_calls(self.batch.len());
            self.batch.clear();
        }
        self.drop_calls(self.batch.len() + waiting.try_iter().count());
    }

    fn drop_calls(&self, count: usize) {
        self.dropped.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
    }
}

/// Spans that the collector had no use for, by its own word.
fn rejected(said: &[u8]) -> usize {
    let said = ExportTraceServiceResponse::decode(said).unwrap_or_default();
    let rejected = said.partial_success.map_or(0, |part| part.rejected_spans);
    usize::try_from(rejected).unwrap_or_default()
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
            telemetry.end(trace, CallSpan::default(), clock::now(), clock::now());
        }
        assert_eq!((dropped.get(), waiting.try_iter().count()), (2, 1));
    }
}
