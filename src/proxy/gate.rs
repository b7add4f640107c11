//! The gate: what stands between Pingora and the caller's session until the answer is the caller's.
//!
//! Pingora's filters cannot hold a response head back, its replay buffer ends at 64 KiB, and its read
//! timeout knows no difference between a first byte and a pause. But its proxy loops talk to the
//! caller only through a `ServerSession`, and that can be one of our own. So [`wrap`] puts a
//! [`Guard`] around the real session, and this gives us at once:
//!
//! - the request's body, whole, on every attempt, whatever its size and framing;
//! - a head and openers that are held back, and thrown away when the attempt fails;
//! - timers that run beside the upstream's silence, counted from *request sent*;
//! - a caller who may leave without the answer's last event (the usage) being lost.
//!
//! What an answer *is* decides [`filters::answer::Answer`]; here is only what waits. The price is a
//! lean on `#[doc(hidden)]` traits of Pingora 0.9.1, which is why it is pinned, and why they are
//! named in this file and nowhere else.
//!
//! Ordering of money and bytes: before the terminal event or the last byte goes out, the hold is
//! settled and its record is in the kernel.

use std::os::fd::RawFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use filters::answer::{Answer, End, Ended, Forward, Refusal, Step};
use filters::exhausted::Tried;
use filters::ids::EndpointId;
use filters::json::{self, Edit};
use filters::meter::{Ceiling, Used};
use filters::money::{Amount, CostError, PriceCard, Settlement, Tier, cost};
use filters::purse::{LeftEarly, Standings};
use filters::stream::usage::Usage;
use filters::upstream::failure::{Failure, Timer};
use filters::upstream::rest::{self, UnixSeconds};
use filters::upstream::watchdog::{self, Timing};
use filters::verdict::UpstreamError;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Version};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::Digest;
use pingora::protocols::http::custom::CustomMessageWrite;
use pingora::protocols::http::custom::server::Session as CustomSession;
use pingora::protocols::http::{HttpTask, ServerSession};
use pingora::protocols::l4::socket::SocketAddr;
use pingora::{Error, ErrorType, RetryType};
use pingora_proxy::Session;
use tokio::sync::watch;
use tokio::time::{Sleep, sleep_until};

use super::bodies::Reserved;
use super::headers::{self, Answered};
use crate::clock;
use crate::config::checked::Model;
use crate::pool::upstreams::Leg;
use crate::store::{Charge, Holds, Ticket};

/// The attempt was refused before the commit; [`Gate::take_failure`] says why.
pub(super) const REFUSED: ErrorType = ErrorType::new("attempt refused");
/// A timer of the attempt ran out.
const TIMER: ErrorType = ErrorType::new("attempt timed out");
/// The caller left.
const CALLER_LEFT: ErrorType = ErrorType::new("caller left");
/// A committed whole answer broke off: the connection has to show it.
const BROKE_OFF: ErrorType = ErrorType::new("answer broke off");

/// What Pingora says where a stream of HTTP/2 ended while the request's body waited for room in its window.
const STREAM_ENDED_INSIDE: &str = "cannot reserve capacity";
/// How long a finished answer's usage is waited for after its caller has left.
const USAGE_PATIENCE: Duration = Duration::from_secs(2);
/// How long the end of a body is waited for after its terminal event.
const TAIL_PATIENCE: Duration = Duration::from_secs(1);
/// How long a pause in the body of an error status may be.
const ERROR_BODY_PATIENCE: Duration = Duration::from_millis(500);
/// A larger body needs its time to be sent; a smaller one is in the kernel at once.
const SENT_AT_ONCE_BYTES: usize = 64 << 10;
/// How often to look whether the last candidate is still the last.
const ALONE_LOOK: Duration = Duration::from_secs(1);
/// How often to look whether a large body has been sent.
const SEND_LOOK: Duration = Duration::from_millis(5);

/// One call's gate, shared by its context and its guard.
pub(super) struct Gate {
    holds: Arc<dyn Holds>,
    state: Mutex<State>,
}

/// Everything that one attempt brings along.
pub(super) struct Attempt {
    pub(super) body: Bytes,
    pub(super) answer: Answer,
    pub(super) limits: Limits,
    pub(super) bill: Bill,
    /// For the board; taken when the attempt ends.
    pub(super) leg: Option<Leg>,
    /// It is the last candidate, for now.
    pub(super) alone: Option<Alone>,
    pub(super) request_id: String,
    pub(super) stream: bool,
    /// The output bound of one choice, where it was lowered.
    pub(super) clamped: Option<u64>,
}

/// The attempt's timers. The last viable candidate has no watchdog, only its share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) first_byte: Option<Duration>,
    pub(super) first_event: Option<Duration>,
    pub(super) share_until: Instant,
    pub(super) idle: Duration,
    pub(super) stream_until: Instant,
}

/// The last candidate has no watchdog as long as it is the last: while others are refused by their breakers.
/// When one of them is back, waiting for a silent one helps nobody.
#[derive(Clone, Debug)]
pub(super) struct Alone {
    /// What its watchdogs would be.
    pub(super) limits: watchdog::Limits,
    pub(super) refused: Vec<EndpointId>,
    /// When to look next whether one of them is back.
    pub(super) look: Option<Instant>,
}

/// What the attempt will be charged by.
#[derive(Clone, Debug)]
pub(super) struct Bill {
    pub(super) model: Arc<Model>,
    pub(super) tier: Tier,
    pub(super) provider_cost: Option<PriceCard>,
    pub(super) own_input: u64,
    pub(super) ceiling: Ceiling,
    /// Nothing is charged, and nothing is paid.
    pub(super) free: bool,
    /// The key's allowance for calls that are left early.
    pub(super) abandoned_max: Option<Amount>,
    pub(super) endpoint: String,
    pub(super) attempts: u32,
}

/// How a call was charged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Receipt {
    pub(super) settlement: Settlement,
    pub(super) used: Used,
}

struct State {
    /// Where the real session comes back to.
    slot: Option<Box<ServerSession>>,
    attempt: Option<Attempt>,
    sent: Sent,
    head_seen: bool,
    /// From request sent to the head.
    head_after: Option<Duration>,
    /// The connection had served others before.
    reused: bool,
    /// It is of HTTP/2: pings tell whether it lives, so that silence is the upstream's own.
    pinged: bool,
    retry_after: Option<Duration>,
    last_piece: Instant,
    /// When the terminal event went out.
    done_at: Option<Instant>,
    /// Boxed: most never have one.
    failed: Option<Box<Tried>>,
    /// After the commit: what the stream has to be ended for.
    ending: Option<Failure>,
    caller_left: Option<Instant>,
    ticket: Option<Ticket>,
    receipt: Option<Receipt>,
    first_event: Option<Duration>,
    /// What attempts cost us that had begun to answer and were given up: a fold that was cut.
    lost: Amount,
    attempts: u32,
    /// Dropped at the commit.
    source: Option<Source>,
    /// The call is finished even if its caller leaves.
    runs_on: bool,
    /// A whole answer, for a repeat of the call.
    kept: Option<Bytes>,
    standing: Standings,
}

/// The request's body, for as long as another attempt may need it.
pub(super) struct Source {
    body: Bytes,
    /// The last attempt's edits and what they made of the body.
    edited: Option<(Vec<Edit>, Bytes)>,
    _reserved: Reserved,
}

/// How far the request is on its way to the upstream.
#[derive(Clone, Copy, Debug)]
enum Sent {
    NotYet,
    /// Its bytes are followed by what the peer's kernel has acknowledged.
    Sending {
        socket: RawFd,
        acked_before: u64,
        bytes: u64,
        look: Instant,
    },
    At(Instant),
}

/// What happens when nothing else does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Timer(Timer),
    /// Look again how much has been sent.
    Look,
    /// Were there others to ask, this timer would have run out.
    Alone(Timer),
    /// The end of the body does not come, or usage does not.
    Enough,
}

impl Gate {
    pub(super) fn new(holds: Arc<dyn Holds>, ticket: Ticket, source: Source) -> Arc<Self> {
        let state = State {
            slot: None,
            attempt: None,
            sent: Sent::NotYet,
            head_seen: false,
            head_after: None,
            reused: false,
            pinged: false,
            retry_after: None,
            last_piece: clock::now(),
            done_at: None,
            failed: None,
            ending: None,
            caller_left: None,
            standing: ticket.standing,
            ticket: Some(ticket),
            receipt: None,
            first_event: None,
            lost: Amount::ZERO,
            attempts: 0,
            source: Some(source),
            runs_on: false,
            kept: None,
        };
        Arc::new(Self { holds, state: Mutex::new(state) })
    }

    /// An attempt begins; whatever the last one left is gone.
    pub(super) fn begin(&self, attempt: Attempt) {
        let mut state = self.lock();
        state.lost = state.lost.checked_add(state.cost_of_lost()).unwrap_or(Amount::MAX);
        state.first_event = None;
        state.attempts = attempt.bill.attempts;
        state.attempt = Some(attempt);
        state.sent = Sent::NotYet;
        state.head_seen = false;
        state.head_after = None;
        state.reused = false;
        state.pinged = false;
        state.retry_after = None;
        state.failed = None;
    }

    /// The attempt has its connection.
    pub(super) fn connected(&self, socket: RawFd, reused: bool) {
        let mut state = self.lock();
        state.reused = reused;
        let bytes = state.attempt.as_ref().map_or(0, |a| a.body.len());
        if bytes > SENT_AT_ONCE_BYTES
            && let Some(acked_before) = bytes_acked(socket)
        {
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            state.sent = Sent::Sending { socket, acked_before, bytes, look: clock::now() + SEND_LOOK };
        }
    }

    /// The attempt's head is about to go out: the clock starts, unless a large body follows.
    pub(super) fn sending(&self, now: Instant, version: Version) {
        let mut state = self.lock();
        state.pinged = version == Version::HTTP_2;
        if let Sent::NotYet = state.sent {
            state.sent = Sent::At(now);
        }
        state.last_piece = now;
    }

    /// Why the attempt failed, if the gate knows.
    pub(super) fn take_failure(&self) -> Option<Tried> {
        self.lock().failed.take().map(|failed| *failed)
    }

    /// Whether the attempt got no byte of a response and its upstream did not work on it.
    fn may_be_unseen(&self, error: &Error) -> bool {
        let state = self.lock();
        !state.head_seen && unseen(error, state.reused).is_some()
    }

    /// Whether the attempt's response has begun.
    pub(super) fn head_is_seen(&self) -> bool {
        self.lock().head_seen
    }

    /// Whether the answer is the caller's already.
    pub(super) fn is_committed(&self) -> bool {
        self.lock().is_committed()
    }

    /// Whether the caller has left.
    pub(super) fn caller_has_left(&self) -> bool {
        self.lock().caller_left.is_some()
    }

    /// The request's body as it came.
    pub(super) fn source(&self) -> Bytes {
        self.lock().source.as_ref().map(|s| s.body.clone()).unwrap_or_default()
    }

    /// The request's body with `edits` made; built anew only when they differ from the last ones.
    pub(super) fn edited(&self, edits: Vec<Edit>) -> Bytes {
        let mut state = self.lock();
        let Some(source) = &mut state.source else { return Bytes::new() };
        if edits.is_empty() {
            return source.body.clone();
        }
        match &source.edited {
            Some((last, body)) if *last == edits => body.clone(),
            _ => {
                let body = Bytes::from(json::apply(&source.body, &mut edits.clone()));
                source.edited = Some((edits, body.clone()));
                body
            }
        }
    }

    /// The length of the attempt's body.
    pub(super) fn body_bytes(&self) -> usize {
        self.lock().attempt.as_ref().map_or(0, |a| a.body.len())
    }

    /// The call is finished even if its caller leaves: a repeat may come for the answer.
    pub(super) fn run_on(&self) {
        self.lock().runs_on = true;
    }

    /// Whether it is.
    pub(super) fn runs_on(&self) -> bool {
        self.lock().runs_on
    }

    /// The whole answer, where it was asked to be kept.
    pub(super) fn kept(&self) -> Option<Bytes> {
        self.lock().kept.clone()
    }

    /// Attempts so far.
    pub(super) fn attempts(&self) -> u32 {
        self.lock().attempts
    }

    /// From request sent to the first meaningful event.
    pub(super) fn first_event(&self) -> Option<Duration> {
        self.lock().first_event
    }

    /// From request sent to the response head, and when the first meaningful event was in hand.
    pub(super) fn reached(&self) -> (Option<Duration>, Option<Instant>) {
        let state = self.lock();
        let Sent::At(sent) = state.sent else { return (state.head_after, None) };
        (state.head_after, state.first_event.map(|after| sent + after))
    }

    /// The attempt as the board knows it, how far it came, and whether its silence may be that of a connection which
    /// died in the pool.
    /// There is none when its end was told already.
    pub(super) fn take_leg(&self) -> Option<(Leg, Timing, bool)> {
        let mut state = self.lock();
        let timing = state.timing();
        let reused = state.reused && !state.pinged;
        state.attempt.as_mut()?.leg.take().map(|leg| (leg, timing, reused))
    }

    /// When the upstream was last heard of.
    pub(super) fn last_piece(&self) -> Instant {
        self.lock().last_piece
    }

    /// From the first meaningful event to the latest piece.
    pub(super) fn streamed_for(&self) -> Duration {
        let state = self.lock();
        let Sent::At(sent) = state.sent else { return Duration::ZERO };
        let whole = state.last_piece.saturating_duration_since(sent);
        whole.saturating_sub(state.first_event.unwrap_or(whole))
    }

    /// How the committed answer ended.
    pub(super) fn ended(&self) -> Ended {
        self.lock().attempt.as_ref().map_or(Ended::Not, |a| a.answer.ended().clone())
    }

    /// Settles the hold, once: what a committed answer used, or nothing. Answers the receipt.
    pub(super) async fn settle(&self) -> Receipt {
        let (ticket, charge) = {
            let mut state = self.lock();
            let Some(ticket) = state.ticket.take() else { return state.receipt.unwrap_or_default() };
            let charge = state.charge(&ticket);
            (ticket, charge)
        };
        let used = charge.used;
        let settlement = self.holds.settle(ticket, charge).await;
        let receipt = Receipt { settlement, used };
        self.lock().receipt = Some(receipt);
        receipt
    }

    /// Ends a committed stream that a timer stopped, on the real session.
    pub(super) async fn end_stream(&self, session: &mut Session) {
        let step = {
            let mut state = self.lock();
            let Some(failure) = state.ending.take() else { return };
            match &mut state.attempt {
                Some(attempt) => attempt.answer.fail(failure),
                None => return,
            }
        };
        self.settle().await;
        if let Step::Forward(Forward { bytes, end: End::Over, .. }) = step {
            let tasks = vec![HttpTask::Body(Some(bytes), true)];
            // The caller may have left meanwhile; then nobody misses it.
            let _gone = session.downstream_session.response_duplex_vec(tasks).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what the answer has cost so far.
    fn touch(&self) {
        let state = self.lock();
        let (Some(ticket), Some(attempt)) = (&state.ticket, &state.attempt) else { return };
        let used = attempt.answer.used(attempt.bill.own_input, &attempt.bill.ceiling);
        if let Ok(so_far) = attempt.bill.cost(&used.usage, used.tier) {
            self.holds.touch(ticket, so_far);
        }
    }
}

impl Alone {
    fn due(&self, sent: Instant, head_seen: bool) -> (Instant, Due) {
        let event = (sent + self.limits.event, Timer::FirstEvent);
        let head = (sent + self.limits.head, Timer::FirstByte);
        let (at, timer) = if head_seen || event.0 <= head.0 { event } else { head };
        (self.look.map_or(at, |look| look.max(at)), Due::Alone(timer))
    }
}

impl Attempt {
    /// Its end is not known yet: it did not fail, and the call is not over.
    fn goes_on(&self) -> bool {
        self.leg.is_some()
    }
}

impl Bill {
    /// Who is charged for, by its name and the version of its prices.
    fn served(&self) -> Option<(String, u32)> {
        Some((self.model.name.clone(), self.model.price.version))
    }

    /// What the caller pays for it: by the tier that served, where the answer names it.
    fn cost(&self, usage: &Usage, served: Option<Tier>) -> Result<Amount, CostError> {
        if self.free {
            return Ok(Amount::ZERO);
        }
        cost(self.model.price.card(usage.prompt(), served.unwrap_or(self.tier)), usage)
    }
}

impl Source {
    pub(super) fn new(body: Bytes, reserved: Reserved) -> Self {
        Self { body, edited: None, _reserved: reserved }
    }
}

impl State {
    fn is_committed(&self) -> bool {
        self.attempt.as_ref().is_some_and(|a| a.answer.is_committed())
    }

    fn charge(&self, ticket: &Ticket) -> Charge {
        let lost = self.lost;
        let is_left = |a: &Attempt| self.caller_left.is_some() && a.goes_on() && a.answer.is_under_way();
        let is_charged = |a: &&Attempt| a.answer.is_committed() || is_left(a);
        let Some(attempt) = self.attempt.as_ref().filter(is_charged) else {
            // Everything failed before an answer came: nothing is charged. A caller who left while a
            // provider was at work is forgiven up to an allowance.
            let left = self.caller_left.and_then(|_| self.left_early());
            let served = self.attempt.as_ref().filter(|_| left.is_some()).and_then(|a| a.bill.served());
            let lost = lost.checked_add(self.cost_of_lost()).unwrap_or(Amount::MAX);
            return Charge { attempts: self.attempts, left, served, lost, ..Charge::default() };
        };
        let bill = &attempt.bill;
        let used = attempt.answer.used(bill.own_input, &bill.ceiling);
        let provider_cost = bill.provider_cost.as_ref().filter(|_| !bill.free);
        let provider_cost = provider_cost.map(|card| cost(card, &used.usage));
        let provider_cost = provider_cost.transpose().ok().flatten().unwrap_or(Amount::ZERO);
        let cost = bill.cost(&used.usage, used.tier).unwrap_or_else(|error| {
            tracing::error!(breach = "no_cost", %error, hold = %ticket.id(), "a cost cannot be computed: the whole hold is charged");
            ticket.amount()
        });
        Charge {
            cost,
            used,
            provider_cost,
            lost,
            endpoint: bill.endpoint.clone(),
            served: bill.served(),
            attempts: bill.attempts,
            left: None,
        }
    }

    /// What the provider wants for an attempt that had begun to answer, where nobody is charged for it.
    fn cost_of_lost(&self) -> Amount {
        let Some(attempt) = self.attempt.as_ref().filter(|a| a.answer.is_under_way()) else {
            return Amount::ZERO;
        };
        let bill = &attempt.bill;
        let used = attempt.answer.used(bill.own_input, &bill.ceiling);
        let cost = match &bill.provider_cost {
            Some(card) => cost(card, &used.usage),
            None => bill.cost(&used.usage, used.tier),
        };
        cost.unwrap_or(Amount::ZERO)
    }

    /// Notes the first meaningful event, once.
    fn note_first_event(&mut self) {
        let spoken = self.attempt.as_ref().is_some_and(|attempt| attempt.answer.has_spoken());
        if !spoken || self.first_event.is_some() {
            return;
        }
        let Sent::At(sent) = self.sent else { return };
        self.first_event = Some(clock::now().saturating_duration_since(sent));
        let timing = self.timing();
        if let Some(leg) = self.attempt.as_mut().and_then(|a| a.leg.as_mut()) {
            leg.answered(timing);
        }
    }

    /// What an attempt costs that its caller did not wait for: its prompt, by our own count.
    fn left_early(&self) -> Option<LeftEarly> {
        let sent = !matches!(self.sent, Sent::NotYet);
        let attempt = self.attempt.as_ref().filter(|a| sent && a.goes_on() && !a.bill.free)?;
        let bill = &attempt.bill;
        let usage = Usage { input: bill.own_input, ..Usage::default() };
        let cost_of_prompt = bill.cost(&usage, None).ok()?;
        let provider_cost = match &bill.provider_cost {
            Some(card) => cost(card, &usage).ok()?,
            None => cost_of_prompt,
        };
        Some(LeftEarly { provider_cost, cost: cost_of_prompt, allowance: bill.abandoned_max })
    }

    fn timing(&self) -> Timing {
        Timing { head: self.head_after, event: self.first_event }
    }

    /// A piece of the upstream's response: what does it come to?
    fn take(&mut self, task: HttpTask) -> Vec<Step> {
        let now = clock::now();
        self.last_piece = now;
        let Some(attempt) = &mut self.attempt else { return vec![] };
        let answer = &mut attempt.answer;
        match task {
            HttpTask::Header(head, _) if head.status.is_informational() => vec![],
            HttpTask::Header(head, end) => {
                self.head_seen = true;
                if let Sent::At(sent) = self.sent {
                    self.head_after = Some(now.saturating_duration_since(sent));
                }
                let text = |name: &str| head.headers.get(name).and_then(|v| v.to_str().ok());
                if head.headers.keys().any(|name| rest::may_tell(name.as_str())) {
                    self.retry_after = rest::wait(text, UnixSeconds(clock::unix_ms().unsigned_abs() / 1000));
                }
                let field = |name| head.headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok());
                let kind = field(CONTENT_TYPE);
                let mut steps = vec![answer.head(head.status.as_u16(), kind, field(CONTENT_ENCODING))];
                if end && let Some(Step::Hold) = steps.last() {
                    steps.push(answer.end());
                }
                steps
            }
            HttpTask::Body(bytes, end) | HttpTask::UpgradedBody(bytes, end) => {
                let mut steps = vec![];
                if let Some(bytes) = bytes.filter(|b| !b.is_empty()) {
                    steps.push(answer.body(&bytes));
                }
                if end && !matches!(steps.last(), Some(Step::Failed(_))) {
                    steps.push(answer.end());
                }
                steps
            }
            HttpTask::Trailer(_) | HttpTask::Done => vec![answer.end()],
            HttpTask::Failed(error) => vec![answer.fail(failure_of(&error))],
        }
    }

    /// What is due next, and when.
    fn next_due(&self) -> Option<(Instant, Due)> {
        if let Some(left) = self.caller_left.filter(|_| !self.runs_on) {
            return Some((left + USAGE_PATIENCE, Due::Enough));
        }
        // Between two attempts nothing runs out but patience.
        let attempt = self.attempt.as_ref().filter(|attempt| attempt.goes_on())?;
        let limits = &attempt.limits;
        if let Some(done) = self.done_at {
            return Some((done + TAIL_PATIENCE, Due::Enough));
        }
        if attempt.answer.is_refused() {
            // The status has said it already; its body only explains.
            return Some((self.last_piece.min(limits.share_until) + ERROR_BODY_PATIENCE, Due::Enough));
        }
        // Asked with every piece of an answer: it must not allocate.
        let idle = (self.last_piece + limits.idle, Due::Timer(Timer::Idle));
        let share = (limits.share_until, Due::Timer(Timer::Share));
        if attempt.answer.is_committed() {
            return soonest([Some(idle), Some((limits.stream_until, Due::Timer(Timer::StreamMax)))]);
        }
        if attempt.answer.has_spoken() {
            return soonest([Some(idle), Some(share)]);
        }
        match self.sent {
            Sent::NotYet => Some(share),
            Sent::Sending { look, .. } => soonest([Some(share), Some((look, Due::Look))]),
            Sent::At(sent) => {
                let head = limits.first_byte.filter(|_| !self.head_seen);
                let head = head.map(|limit| (sent + limit, Due::Timer(Timer::FirstByte)));
                let event = limits.first_event.map(|limit| (sent + limit, Due::Timer(Timer::FirstEvent)));
                let alone = attempt.alone.as_ref().map(|alone| alone.due(sent, self.head_seen));
                soonest([Some(share), head, event, alone])
            }
        }
    }

    /// Whether another candidate is back, so that this one is the last no more.
    fn is_alone_no_more(&mut self) -> bool {
        let Some(attempt) = &mut self.attempt else { return false };
        let (Some(leg), Some(alone)) = (&attempt.leg, &mut attempt.alone) else { return false };
        alone.look = Some(clock::now() + ALONE_LOOK);
        leg.is_back(&alone.refused)
    }

    /// Looks how much of a large body the upstream has taken.
    fn look(&mut self) {
        let now = clock::now();
        if let Sent::Sending { socket, acked_before, bytes, .. } = self.sent {
            let all = bytes_acked(socket).is_none_or(|acked| acked.saturating_sub(acked_before) >= bytes);
            self.sent = if all {
                Sent::At(now)
            } else {
                Sent::Sending { socket, acked_before, bytes, look: now + SEND_LOOK }
            };
        }
    }

    /// A timer ran out.
    fn time_out(&mut self, timer: Timer) {
        let failure = Failure::Timeout(timer);
        if self.is_committed() {
            self.ending = Some(failure);
            return;
        }
        // A refused attempt stays refused: its status weighs more than the silence after it.
        let refusal = match self.attempt.as_mut().map(|a| a.answer.fail(failure.clone())) {
            Some(Step::Failed(refusal)) => refusal,
            _ => Refusal { failure, error: UpstreamError::default() },
        };
        let Refusal { failure, error } = refusal;
        self.failed = Some(Box::new(Tried { failure, error, retry_after: self.retry_after.take() }));
    }
}

/// The first of several that is due; of two at once the one named first.
fn soonest<const N: usize>(dues: [Option<(Instant, Due)>; N]) -> Option<(Instant, Due)> {
    dues.into_iter().flatten().min_by_key(|(at, _)| *at)
}

/// A request that its upstream did not work on, and what may carry it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unseen {
    /// The connection was dead or is being closed: a new one.
    Dead,
    /// The connection lives, but did not want this stream, or no stream of HTTP/2 at all.
    Refused,
}

impl Unseen {
    /// Its word in the decision log.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Dead => "stale_connection",
            Self::Refused => "stream_refused",
        }
    }
}

/// Whether a request that got no byte of a response can be sent again as if it never had been.
///
/// HTTP/1.1: "closed before a response" on a pooled connection, which Pingora marks as worth a repeat there
/// only; where the request could not even be written whole, it tells that instead. HTTP/2: RFC 9113 section 8.7
/// vouches for streams that were refused and for those above the last one that a GOAWAY names. Every other reset
/// may have come in the middle of the work, unless the request was not even whole: then Pingora does not tell why
/// the stream ended, and nobody can have worked on half a body.
pub(super) fn unseen(error: &Error, reused: bool) -> Option<Unseen> {
    if *error.etype() == ErrorType::H2Downgrade {
        // Pingora decides against it where the provider is to be spoken to in HTTP/2 alone.
        return (error.retry == RetryType::Decided(true)).then_some(Unseen::Refused);
    }
    let closed = error.retry == RetryType::ReusedOnly;
    let unwritten = *error.etype() == ErrorType::WriteError;
    let Some(cause) = error.root_cause().downcast_ref::<h2::Error>() else {
        let ended_inside =
            error.context.as_ref().is_some_and(|context| context.as_str() == STREAM_ENDED_INSIDE);
        return (ended_inside || (reused && (closed || unwritten))).then_some(Unseen::Dead);
    };
    // The crate tells of a GOAWAY only to streams above its last one; others run on.
    if cause.is_remote() && cause.is_go_away() {
        return Some(Unseen::Dead);
    }
    if cause.is_remote() && cause.is_reset() && cause.reason() == Some(h2::Reason::REFUSED_STREAM) {
        return Some(Unseen::Refused);
    }
    (unwritten || (reused && closed)).then_some(Unseen::Dead)
}

/// The same, of an attempt that did not get as far as to send: a pooled connection gave no stream.
pub(super) fn unsent(error: &Error) -> Option<Unseen> {
    (*error.etype() == ErrorType::H2Error).then_some(Unseen::Dead)
}

/// What an error of Pingora's on the way to or from an upstream means.
pub(crate) fn failure_of(error: &Error) -> Failure {
    match error.etype() {
        ErrorType::ConnectTimedout | ErrorType::TLSHandshakeTimedout => Failure::Timeout(Timer::Connect),
        ErrorType::ConnectRefused
        | ErrorType::ConnectNoRoute
        | ErrorType::ConnectError
        | ErrorType::ConnectProxyFailure
        | ErrorType::TLSWantX509Lookup
        | ErrorType::TLSHandshakeFailure
        | ErrorType::InvalidCert
        | ErrorType::HandshakeError
        | ErrorType::BindError
        | ErrorType::SocketError => Failure::Connect,
        _ => Failure::Broken,
    }
}

/// Bytes that the peer's kernel has acknowledged: `tcpi_bytes_acked` of Linux' `struct tcp_info`
/// (RFC 4898 `tcpEStatsAppHCThruOctetsAcked`), 120 bytes from its beginning.
fn bytes_acked(socket: RawFd) -> Option<u64> {
    const OFFSET: usize = 120;
    let mut info = [0_u8; 256];
    let mut length = libc::socklen_t::try_from(info.len()).ok()?;
    #[expect(
        unsafe_code,
        reason = "no safe wrapper knows this field; the kernel writes at most `length` bytes"
    )]
    // SAFETY: `info` is valid for `length` bytes and outlives the call; a descriptor that is closed
    // or no TCP socket makes the call fail, nothing else.
    let result = unsafe {
        libc::getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length)
    };
    let filled = usize::try_from(length).is_ok_and(|length| length >= OFFSET + 8);
    let bytes = info.get(OFFSET..OFFSET + 8).filter(|_| result == 0 && filled)?;
    bytes.try_into().ok().map(u64::from_ne_bytes)
}

/// Puts the guard between Pingora and the real session.
pub(super) fn wrap(session: &mut Session, gate: &Arc<Gate>, cut: watch::Receiver<bool>) {
    let real = std::mem::replace(&mut session.downstream_session, Box::new(nobody()));
    let guard = Guard { real: Some(real), gate: Arc::clone(gate), timer: None, cut };
    *session.downstream_session = ServerSession::new_custom(Box::new(guard));
}

/// Takes the guard out again; must be done before the session is finished, or keep-alive is lost.
pub(super) fn unwrap(session: &mut Session, gate: &Gate) {
    if session.downstream_session.is_custom() {
        // Dropping the guard puts the real session into the slot.
        *session.downstream_session = nobody();
        if let Some(real) = gate.lock().slot.take() {
            session.downstream_session = real;
        }
    }
}

/// A session that nobody may use; it stands in for a moment, without an await in between.
fn nobody() -> ServerSession {
    ServerSession::new_custom(Box::new(()))
}

struct Guard {
    real: Option<Box<ServerSession>>,
    gate: Arc<Gate>,
    /// Wakes at what was due first when it was set: with every piece something else is due later, and setting it
    /// anew each time costs more than one wake-up in vain.
    timer: Option<Pin<Box<Sleep>>>,
    /// Turns true when the process leaves and cannot wait longer.
    cut: watch::Receiver<bool>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.gate.lock().slot = self.real.take();
    }
}

/// The timer, to wake at `at` or earlier.
fn set(timer: &mut Option<Pin<Box<Sleep>>>, at: Instant) -> Pin<&mut Sleep> {
    let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(at.into())));
    if timer.is_elapsed() || timer.deadline() > at.into() {
        timer.as_mut().reset(at.into());
    }
    timer.as_mut()
}

impl Guard {
    #[expect(clippy::expect_used, reason = "the real session leaves only in `Drop`")]
    fn real(&self) -> &ServerSession {
        self.real.as_ref().expect("the real session leaves only in `Drop`")
    }

    #[expect(clippy::expect_used, reason = "the real session leaves only in `Drop`")]
    fn real_mut(&mut self) -> &mut ServerSession {
        self.real.as_mut().expect("the real session leaves only in `Drop`")
    }

    /// Lets bytes out; answers whether the answer is over.
    async fn forward(&mut self, forward: Forward) -> pingora::Result<bool> {
        let Forward { bytes, commits, end } = forward;
        if commits {
            self.note_commit();
        }
        match end {
            End::Open => self.gate.touch(),
            End::Settle | End::Over | End::Break => {
                self.gate.settle().await;
            }
        }
        if end == End::Settle {
            self.gate.lock().done_at = Some(clock::now());
        }
        let over = matches!(end, End::Over | End::Break);
        if commits && end == End::Over {
            self.keep(&bytes);
        }
        if !self.gate.caller_has_left() {
            let mut tasks = Vec::with_capacity(2);
            if commits {
                let whole = over.then_some(bytes.len());
                tasks.push(HttpTask::Header(self.head(whole)?, false));
            }
            let body = Some(bytes).filter(|b| !b.is_empty());
            if body.is_some() || over {
                tasks.push(HttpTask::Body(body, end == End::Over));
            }
            self.write(tasks).await?;
        }
        if end == End::Break {
            return Error::e_explain(BROKE_OFF, "the upstream ended inside its answer");
        }
        Ok(over)
    }

    /// A whole answer that came in one piece is kept for a repeat of the call.
    fn keep(&self, bytes: &Bytes) {
        let mut state = self.gate.lock();
        let whole = state.attempt.as_ref().is_some_and(|a| !a.stream && a.answer.is_done());
        if state.runs_on && whole {
            state.kept = Some(bytes.clone());
        }
    }

    async fn write(&mut self, tasks: Vec<HttpTask>) -> pingora::Result<()> {
        if tasks.is_empty() {
            return Ok(());
        }
        match self.real_mut().response_duplex_vec(tasks).await {
            Ok(_) => Ok(()),
            Err(error) => {
                if self.caller_leaves() {
                    Ok(())
                } else {
                    Err(error)
                }
            }
        }
    }

    /// The caller has gone. Answers whether the upstream is listened to a little longer all the same.
    fn caller_leaves(&self) -> bool {
        let mut state = self.gate.lock();
        state.caller_left = state.caller_left.or_else(|| Some(clock::now()));
        state.runs_on
            || state.attempt.as_ref().is_some_and(|a| a.answer.is_under_way() && a.answer.awaits_usage())
    }

    fn note_commit(&self) {
        let mut state = self.gate.lock();
        state.note_first_event();
        // No other attempt can follow: the request's body has done its work.
        state.source = None;
        if let Some(attempt) = &mut state.attempt {
            attempt.body = Bytes::new();
        }
    }

    fn head(&self, whole_bytes: Option<usize>) -> pingora::Result<Box<ResponseHeader>> {
        let version = self.real().req_header().version;
        let state = self.gate.lock();
        let Some(attempt) = &state.attempt else {
            return Error::e_explain(REFUSED, "an answer without an attempt");
        };
        let cost = state.receipt.unwrap_or_default().settlement.charged().nano();
        headers::downstream(&Answered {
            request_id: &attempt.request_id,
            upstream: &attempt.bill.endpoint,
            attempts: attempt.bill.attempts,
            stream: attempt.stream,
            whole: whole_bytes.filter(|_| !attempt.stream).map(|bytes| (bytes, cost)),
            version,
            standing: state.standing,
            clamped: attempt.clamped,
        })
    }

    fn refuse(&self, refusal: Refusal) -> Box<Error> {
        let mut state = self.gate.lock();
        let Refusal { failure, error } = refusal;
        let word = failure.word();
        let retry_after = state.retry_after.take();
        state.failed = Some(Box::new(Tried { failure, error, retry_after }));
        Error::explain(REFUSED, word)
    }
}

#[async_trait]
impl CustomSession for Guard {
    async fn response_duplex_vec(&mut self, tasks: Vec<HttpTask>) -> pingora::Result<bool> {
        let mut over = false;
        for task in tasks {
            let task = match task {
                // Before any byte of a response: the pooled connection was dead, and the request unseen.
                HttpTask::Failed(error) if self.gate.may_be_unseen(&error) => return Err(error),
                other => other,
            };
            let steps = {
                let mut state = self.gate.lock();
                let steps = state.take(task);
                state.note_first_event();
                steps
            };
            for step in steps {
                match step {
                    Step::Hold => {}
                    Step::Forward(forward) => over |= self.forward(forward).await?,
                    Step::Failed(refusal) => return Err(self.refuse(refusal)),
                }
            }
        }
        Ok(over)
    }

    /// Pingora polls this beside the upstream's silence, always; so this is where time runs out and
    /// where a caller is seen to leave. It may be dropped at any await, so it only notes and returns.
    async fn read_body_or_idle(&mut self, _no_body_expected: bool) -> pingora::Result<Option<Bytes>> {
        loop {
            let (due, here) = {
                let state = self.gate.lock();
                (state.next_due(), state.caller_left.is_none())
            };
            let timer = &mut self.timer;
            let wait = async {
                match due {
                    Some((at, what)) => {
                        set(timer, at).await;
                        (at, what)
                    }
                    None => std::future::pending().await,
                }
            };
            #[expect(clippy::expect_used, reason = "the real session leaves only in `Drop`")]
            let real = self.real.as_mut().expect("the real session leaves only in `Drop`");
            let leaving = async {
                if self.cut.wait_for(|cut| *cut).await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                biased;
                read = real.read_body_or_idle(true), if here => match read {
                    Ok(bytes) => return Ok(bytes),
                    Err(_) if self.caller_leaves() => {}
                    Err(error) => return Err(Error::because(CALLER_LEFT, "while the answer was awaited", error)),
                },
                () = leaving => {
                    self.gate.lock().time_out(Timer::Drain);
                    return Error::e_explain(TIMER, Timer::Drain.word());
                }
                (at, what) = wait => match what {
                    // The timer was set for something that has been put off since.
                    _ if clock::now() < at => {}
                    Due::Look => self.gate.lock().look(),
                    Due::Alone(timer) => {
                        let mut state = self.gate.lock();
                        if state.is_alone_no_more() {
                            state.time_out(timer);
                            return Error::e_explain(TIMER, timer.word());
                        }
                    }
                    Due::Timer(timer) => {
                        self.gate.lock().time_out(timer);
                        return Error::e_explain(TIMER, timer.word());
                    }
                    Due::Enough => {
                        self.gate.lock().time_out(Timer::Idle);
                        return Error::e_explain(TIMER, "the end of the answer does not come");
                    }
                },
            }
        }
    }

    fn is_body_done(&mut self) -> bool {
        true
    }

    fn is_body_empty(&mut self) -> bool {
        self.gate.lock().attempt.as_ref().is_none_or(|a| a.body.is_empty())
    }

    fn enable_retry_buffering(&mut self) {}

    fn retry_buffer_truncated(&self) -> bool {
        false
    }

    /// Pingora sends this at the start of every attempt: this is the replay.
    fn get_retry_buffer(&self) -> Option<Bytes> {
        self.gate.lock().attempt.as_ref().map(|a| a.body.clone()).filter(|body| !body.is_empty())
    }

    async fn finish(&mut self) -> pingora::Result<()> {
        if self.gate.caller_has_left() {
            return Ok(());
        }
        self.real_mut().finish_body().await
    }

    // From here on: what the guard does not care about goes to the real session.

    fn req_header(&self) -> &RequestHeader {
        self.real().req_header()
    }

    fn req_header_mut(&mut self) -> &mut RequestHeader {
        self.real_mut().req_header_mut()
    }

    async fn read_body_bytes(&mut self) -> pingora::Result<Option<Bytes>> {
        self.real_mut().read_request_body().await
    }

    async fn drain_request_body(&mut self) -> pingora::Result<()> {
        self.real_mut().drain_request_body().await
    }

    async fn write_response_header(&mut self, head: Box<ResponseHeader>, _end: bool) -> pingora::Result<()> {
        self.real_mut().write_response_header(head).await
    }

    async fn write_response_header_ref(&mut self, head: &ResponseHeader, _end: bool) -> pingora::Result<()> {
        self.real_mut().write_response_header_ref(head).await
    }

    async fn write_body(&mut self, bytes: Bytes, end: bool) -> pingora::Result<()> {
        self.real_mut().write_response_body(bytes, end).await
    }

    async fn write_trailers(&mut self, trailers: HeaderMap) -> pingora::Result<()> {
        self.real_mut().write_response_trailers(trailers).await
    }

    fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.real_mut().set_read_timeout(timeout);
    }

    fn get_read_timeout(&self) -> Option<Duration> {
        self.real().get_read_timeout()
    }

    fn set_write_timeout(&mut self, timeout: Option<Duration>) {
        self.real_mut().set_write_timeout(timeout);
    }

    fn get_write_timeout(&self) -> Option<Duration> {
        self.real().get_write_timeout()
    }

    fn set_total_drain_timeout(&mut self, timeout: Option<Duration>) {
        self.real_mut().set_total_drain_timeout(timeout);
    }

    fn get_total_drain_timeout(&self) -> Option<Duration> {
        self.real().get_total_drain_timeout()
    }

    fn request_summary(&self) -> String {
        self.real().request_summary()
    }

    fn response_written(&self) -> Option<&ResponseHeader> {
        self.real().response_written()
    }

    async fn shutdown(&mut self, _code: u32, _ctx: &str) {
        self.real_mut().shutdown().await;
    }

    fn body_bytes_sent(&self) -> usize {
        self.real().body_bytes_sent()
    }

    fn body_bytes_read(&self) -> usize {
        self.real().body_bytes_read()
    }

    fn digest(&self) -> Option<&Digest> {
        self.real().digest()
    }

    fn digest_mut(&mut self) -> Option<&mut Digest> {
        self.real_mut().digest_mut()
    }

    fn client_addr(&self) -> Option<&SocketAddr> {
        self.real().client_addr()
    }

    fn server_addr(&self) -> Option<&SocketAddr> {
        self.real().server_addr()
    }

    fn pseudo_raw_h1_request_header(&self) -> Bytes {
        self.real().to_h1_raw()
    }

    async fn finish_custom(&mut self) -> pingora::Result<()> {
        Ok(())
    }

    fn take_custom_message_reader(&mut self) -> Option<MessageReader> {
        None
    }

    fn restore_custom_message_reader(&mut self, _reader: MessageReader) -> pingora::Result<()> {
        Ok(())
    }

    fn take_custom_message_writer(&mut self) -> Option<Box<dyn CustomMessageWrite>> {
        None
    }

    fn restore_custom_message_writer(&mut self, _writer: Box<dyn CustomMessageWrite>) -> pingora::Result<()> {
        Ok(())
    }
}

type MessageReader = Box<dyn futures::Stream<Item = pingora::Result<Bytes>> + Unpin + Send + Sync + 'static>;
