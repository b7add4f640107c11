//! Spans of calls.
//!
//! Off, a call carries a `None`. On, it carries a [`Trace`] that grows by a span for each attempt that failed. At its end it is known
//! whether its spans are kept ([`filters::trace`]); then they are handed over, whole. Nobody is woken for them: the thread that
//! sends looks ten times a second. The queue is bounded: what does not fit is dropped and counted. A collector that asks for
//! time finds in the queue what came meanwhile, as far as that goes.
//!
//! A span has what the access and decision lines have, under the names of OpenTelemetry's conventions: never a key, a
//! prompt or an answer.

use std::mem;
use std::num::{NonZeroU64, NonZeroU128};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use filters::trace::{Fate, Parent, Sampling, SpanId, TraceId};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prometheus::IntCounter;
use prost::Message as _;
use rand_core::RngCore;

use super::collector::{Collector, Refused};
use super::wire::request;
use super::{LAST_PATIENCE, Origin, PATIENCE};
use crate::config::checked::{Model, Provider};
use crate::{clock, entropy};

/// Calls that wait to be sent. With five attempts each that is a few megabytes.
const QUEUE_MAX: usize = 4096;
/// The most calls of one message.
const BATCH_MAX: usize = 256;
/// How long a message gathers calls.
const GATHER: Duration = Duration::from_secs(1);
/// How often it is looked for calls, and whether the process leaves.
const LOOK: Duration = Duration::from_millis(100);

/// Calls that wait to be sent.
pub(super) type Waiting = Arc<ArrayQueue<Box<Spans>>>;

/// Where spans are handed in.
#[derive(Clone)]
pub struct Telemetry {
    sampling: Sampling,
    waiting: Waiting,
    dropped: IntCounter,
}

/// What a call carries while it is under way.
#[derive(Debug)]
pub struct Trace {
    id: TraceId,
    parent: Option<Parent>,
    fate: Fate,
    attempts: Vec<AttemptSpan>,
}

/// The spans of one call that is over.
#[derive(Debug)]
pub(super) struct Spans {
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
    /// Of the caller.
    pub(super) parent: Option<SpanId>,
    /// Who has decided that they are kept: the `caller`, the `share`, or that it `failed`.
    pub(super) kept_by: &'static str,
    pub(super) attempts: Vec<(SpanId, AttemptSpan)>,
    pub(super) call: CallSpan,
    /// When the call ended, in nanoseconds since 1970.
    pub(super) ended_unix_nano: u64,
    /// The same by the clock that attempts are timed by.
    pub(super) ended: Instant,
    pub(super) took: Duration,
}

/// What a call's own span says.
#[derive(Clone, Debug, Default)]
pub struct CallSpan {
    pub request_id: String,
    pub surface: &'static str,
    pub operation: &'static str,
    pub provider: &'static str,
    /// `None`: it did not come to that.
    pub model: Option<Arc<Model>>,
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
    pub endpoint: String,
    pub provider: Arc<Provider>,
    /// `served`, `cut`, `left` or `failed`.
    pub outcome: &'static str,
    /// Why, in a word.
    pub reason: &'static str,
    pub began: Instant,
    pub ended: Instant,
}

impl Telemetry {
    pub(super) fn new(sampling: Sampling, dropped: IntCounter) -> Self {
        Self { sampling, waiting: Arc::new(ArrayQueue::new(QUEUE_MAX)), dropped }
    }

    /// Where what was handed in waits.
    pub(super) fn waiting(&self) -> Waiting {
        Arc::clone(&self.waiting)
    }

    /// A call's spans, under those of its caller where `traceparent` is one. `None`: they will not be kept, however it ends.
    #[must_use]
    pub fn begin(&self, traceparent: Option<&[u8]>) -> Option<Trace> {
        let parent = traceparent.and_then(Parent::parse);
        let id = parent.map_or_else(trace_id, |parent| parent.trace);
        match self.sampling.fate(parent.as_ref(), id) {
            Fate::Dropped => None,
            fate @ (Fate::Kept | Fate::KeptIfFailed) => Some(Trace { id, parent, fate, attempts: vec![] }),
        }
    }

    /// The call is over, and its spans are kept. Never waits. All times of a trace are by one clock, so that no attempt
    /// begins before its call.
    pub fn end(&self, trace: Trace, call: CallSpan, began: Instant, ended: Instant) {
        let Trace { id, parent, fate, attempts } = trace;
        let kept_by = match (parent, fate) {
            (Some(_), _) => "caller",
            (None, Fate::Kept) => "share",
            (None, Fate::KeptIfFailed | Fate::Dropped) => "failed",
        };
        let spans = Spans {
            trace: id,
            span: span_id(),
            parent: parent.map(|parent| parent.span),
            kept_by,
            attempts: attempts.into_iter().map(|attempt| (span_id(), attempt)).collect(),
            call,
            ended_unix_nano: clock::unix_us().saturating_mul(1000),
            ended,
            took: ended.saturating_duration_since(began),
        };
        if self.waiting.push(Box::new(spans)).is_err() {
            self.dropped.inc();
        }
    }
}

impl Trace {
    /// An attempt has ended.
    pub fn attempted(&mut self, attempt: AttemptSpan) {
        self.attempts.push(attempt);
    }

    /// Whether its spans are to be handed in. A call that went well in the end has failed all the same where it needed a second
    /// attempt; ask before that of the last one is added.
    #[must_use]
    pub const fn is_kept(&self, failed: bool) -> bool {
        self.fate.is_kept(failed || !self.attempts.is_empty())
    }
}

/// Takes calls from their queue, and sends them.
pub(super) struct Sender {
    collector: Collector,
    origin: Arc<Origin>,
    dropped: IntCounter,
    /// At most [`BATCH_MAX`].
    batch: Vec<Spans>,
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

    /// Goes on until `stop` is closed, and sends what waits then.
    pub(super) fn run(mut self, waiting: &Waiting, stop: &Receiver<()>) {
        loop {
            self.gather(waiting);
            let pause = if self.is_due() { Duration::ZERO } else { LOOK };
            if stop.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                break;
            }
            if self.is_due() {
                self.send(PATIENCE);
            }
        }
        self.send_the_last(waiting);
    }

    /// Takes what waits, as far as there is room in the batch.
    fn gather(&mut self, waiting: &Waiting) {
        let was_empty = self.batch.is_empty();
        while self.batch.len() < BATCH_MAX
            && let Some(call) = waiting.pop()
        {
            self.batch.push(*call);
        }
        if was_empty {
            self.due = clock::now() + GATHER;
        }
    }

    fn is_due(&self) -> bool {
        let (now, count) = (clock::now(), self.batch.len());
        now >= self.rests && (count >= BATCH_MAX || (count > 0 && now >= self.due))
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
    fn send_the_last(&mut self, waiting: &Waiting) {
        let end = clock::now() + LAST_PATIENCE;
        loop {
            self.gather(waiting);
            let left = end.saturating_duration_since(clock::now());
            if self.batch.is_empty() || left.is_zero() {
                break;
            }
            self.send(left);
            self.drop_calls(self.batch.len());
            self.batch.clear();
        }
        self.drop_calls(self.batch.len() + waiting.len());
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

fn trace_id() -> TraceId {
    let mut bytes = [0; 16];
    entropy::with_rng(|rng| rng.fill_bytes(&mut bytes));
    TraceId(NonZeroU128::new(u128::from_ne_bytes(bytes)).unwrap_or(NonZeroU128::MIN))
}

fn span_id() -> SpanId {
    SpanId(NonZeroU64::new(entropy::with_rng(RngCore::next_u64)).unwrap_or(NonZeroU64::MIN))
}

#[cfg(test)]
mod tests {
    use filters::trace::Share;

    use super::*;

    fn telemetry(sampling: Sampling, queue_max: usize) -> Telemetry {
        let dropped = IntCounter::new("dropped", "Dropped.").unwrap();
        Telemetry { sampling, waiting: Arc::new(ArrayQueue::new(queue_max)), dropped }
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted_and_nobody_waits() {
        let telemetry = telemetry(Sampling { share: Share::ALL, failed: false }, 1);
        for _ in 0..3 {
            let trace = telemetry.begin(None).unwrap();
            assert!(trace.is_kept(false));
            telemetry.end(trace, CallSpan::default(), clock::now(), clock::now());
        }
        assert_eq!((telemetry.dropped.get(), telemetry.waiting.len()), (2, 1));
    }

    #[test]
    fn a_call_that_no_share_keeps_is_kept_where_it_fails() {
        let none = Share::of_millionths(0).unwrap();
        assert!(telemetry(Sampling { share: none, failed: false }, 1).begin(None).is_none());
        let trace = telemetry(Sampling { share: none, failed: true }, 1).begin(None).unwrap();
        assert_eq!((trace.is_kept(false), trace.is_kept(true)), (false, true));
    }
}
