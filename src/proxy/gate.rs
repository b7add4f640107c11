//! The gate: what stands between an upstream's answer and the caller until the answer is the caller's.
//!
//! It keeps what a call must not lose while its attempts come and go: the request's body, whole, whatever its size and
//! framing; a head and openers that are held back, and thrown away when the attempt fails; timers that run beside the
//! upstream's silence, counted from *request sent*; the hold, and what it will be charged.
//!
//! What an answer *is* decides [`filters::answer::Answer`]; what waits is [`super::exchange`]. Here is what lies between:
//! the state of a call's attempt, what is due next, and what all of it costs.
//!
//! Ordering of money and bytes: before the terminal event or the last byte goes out, the hold is
//! settled and its record is in the kernel.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use filters::answer::{Answer, Ended, Forward, Refusal, Step};
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
use http::{HeaderValue, Version};
use pingora::http::ResponseHeader;
use pingora::protocols::http::HttpTask;

use super::bodies::Reserved;
use super::headers::{self, Answered};
use super::unseen::failure_of;
use crate::clock;
use crate::config::checked::Model;
use crate::pool::upstreams::Leg;
use crate::store::{Charge, Holds, Ticket};

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

/// One call's gate.
pub(super) struct Gate {
    holds: Arc<dyn Holds>,
    attempt: Option<Attempt>,
    sent: Sent,
    /// Something of an answer has come, if only an interim head.
    heard: bool,
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
pub(super) enum Due {
    Timer(Timer),
    /// Look again how much has been sent.
    Look,
    /// Were there others to ask, this timer would have run out.
    Alone(Timer),
    /// The end of the body does not come, or usage does not.
    Enough,
}

impl Gate {
    pub(super) fn new(holds: Arc<dyn Holds>, ticket: Ticket, source: Source) -> Self {
        Self {
            holds,
            attempt: None,
            sent: Sent::NotYet,
            heard: false,
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
        }
    }

    /// An attempt begins; whatever the last one left is gone.
    pub(super) fn begin(&mut self, attempt: Attempt) {
        self.lost = self.lost.checked_add(self.cost_of_lost()).unwrap_or(Amount::MAX);
        self.first_event = None;
        self.attempts = attempt.bill.attempts;
        self.attempt = Some(attempt);
        self.sent = Sent::NotYet;
        self.heard = false;
        self.head_seen = false;
        self.head_after = None;
        self.reused = false;
        self.pinged = false;
        self.retry_after = None;
        self.failed = None;
    }

    /// The attempt has its connection, and its head is about to go out: the clock starts, unless a large body follows.
    pub(super) fn sending(&mut self, socket: RawFd, reused: bool, version: Version) {
        let now = clock::now();
        self.reused = reused;
        self.pinged = version == Version::HTTP_2;
        let bytes = self.body_bytes();
        let acked_before = (bytes > SENT_AT_ONCE_BYTES).then(|| bytes_acked(socket)).flatten();
        self.sent = acked_before.map_or(Sent::At(now), |acked_before| {
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            Sent::Sending { socket, acked_before, bytes, look: now + SEND_LOOK }
        });
        self.last_piece = now;
    }

    /// Why the attempt failed, if the gate knows.
    pub(super) fn take_failure(&mut self) -> Option<Tried> {
        self.failed.take().map(|failed| *failed)
    }

    /// Whether its upstream has said anything to the attempt: then it has read the request.
    pub(super) fn is_heard(&self) -> bool {
        self.heard
    }

    /// Whether the attempt's response has begun.
    pub(super) fn head_is_seen(&self) -> bool {
        self.head_seen
    }

    /// Whether the answer is the caller's already.
    pub(super) fn is_committed(&self) -> bool {
        self.attempt.as_ref().is_some_and(|a| a.answer.is_committed())
    }

    /// The caller has gone. Answers whether the upstream is listened to a little longer all the same.
    pub(super) fn caller_leaves(&mut self) -> bool {
        self.caller_left = self.caller_left.or_else(|| Some(clock::now()));
        let awaits_usage = |a: &Attempt| a.answer.is_under_way() && a.answer.awaits_usage();
        self.runs_on || self.attempt.as_ref().is_some_and(awaits_usage)
    }

    /// Whether the caller has left.
    pub(super) fn caller_has_left(&self) -> bool {
        self.caller_left.is_some()
    }

    /// Whether there is nobody left to answer, nor anybody who may come back for it.
    pub(super) fn is_forsaken(&self) -> bool {
        self.caller_left.is_some() && !self.runs_on
    }

    /// The request's body as it came.
    pub(super) fn source(&self) -> Bytes {
        self.source.as_ref().map(|s| s.body.clone()).unwrap_or_default()
    }

    /// The request's body with `edits` made; built anew only when they differ from the last ones.
    pub(super) fn edited(&mut self, edits: Vec<Edit>) -> Bytes {
        let Some(source) = &mut self.source else { return Bytes::new() };
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

    /// The attempt's body.
    pub(super) fn body(&self) -> Bytes {
        self.attempt.as_ref().map(|a| a.body.clone()).unwrap_or_default()
    }

    /// Its length.
    pub(super) fn body_bytes(&self) -> usize {
        self.attempt.as_ref().map_or(0, |a| a.body.len())
    }

    /// The call is finished even if its caller leaves: a repeat may come for the answer.
    pub(super) fn run_on(&mut self) {
        self.runs_on = true;
    }

    /// A whole answer that came in one piece is kept for a repeat of the call.
    pub(super) fn keep(&mut self, bytes: &Bytes) {
        let whole = self.attempt.as_ref().is_some_and(|a| !a.stream && a.answer.is_done());
        if self.runs_on && whole {
            self.kept = Some(bytes.clone());
        }
    }

    /// The whole answer, where it was asked to be kept.
    pub(super) fn kept(&self) -> Option<Bytes> {
        self.kept.clone()
    }

    /// Attempts so far.
    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// From request sent to the first meaningful event.
    pub(super) fn first_event(&self) -> Option<Duration> {
        self.first_event
    }

    /// From request sent to the response head, and when the first meaningful event was in hand.
    pub(super) fn reached(&self) -> (Option<Duration>, Option<Instant>) {
        let Sent::At(sent) = self.sent else { return (self.head_after, None) };
        (self.head_after, self.first_event.map(|after| sent + after))
    }

    /// The attempt as the board knows it, how far it came, and whether its silence may be that of a connection which
    /// died in the pool.
    /// There is none when its end was told already.
    pub(super) fn take_leg(&mut self) -> Option<(Leg, Timing, bool)> {
        let timing = self.timing();
        let reused = self.reused && !self.pinged;
        self.attempt.as_mut()?.leg.take().map(|leg| (leg, timing, reused))
    }

    /// When the upstream was last heard of.
    pub(super) fn last_piece(&self) -> Instant {
        self.last_piece
    }

    /// From the first meaningful event to the latest piece.
    pub(super) fn streamed_for(&self) -> Duration {
        let Sent::At(sent) = self.sent else { return Duration::ZERO };
        let whole = self.last_piece.saturating_duration_since(sent);
        whole.saturating_sub(self.first_event.unwrap_or(whole))
    }

    /// How the committed answer ended.
    pub(super) fn ended(&self) -> Ended {
        self.attempt.as_ref().map_or(Ended::Not, |a| a.answer.ended().clone())
    }

    /// The answer is the caller's from now on.
    pub(super) fn commit(&mut self) {
        self.note_first_event();
        // No other attempt can follow: the request's body has done its work.
        self.source = None;
        if let Some(attempt) = &mut self.attempt {
            attempt.body = Bytes::new();
        }
    }

    /// The head of a committed answer: for a caller who speaks `version`, and with its length where all of it is there.
    pub(super) fn head(
        &self,
        version: Version,
        whole_bytes: Option<usize>,
    ) -> pingora::Result<Box<ResponseHeader>> {
        let attempt = self.attempt.as_ref();
        let cost = self.receipt.unwrap_or_default().settlement.charged().nano();
        headers::downstream(&Answered {
            request_id: attempt.map_or("", |a| &a.request_id),
            upstream: attempt.map_or("", |a| &a.bill.endpoint),
            attempts: self.attempts,
            stream: attempt.is_some_and(|a| a.stream),
            whole: whole_bytes.filter(|_| attempt.is_some_and(|a| !a.stream)).map(|bytes| (bytes, cost)),
            version,
            standing: self.standing,
            clamped: attempt.and_then(|a| a.clamped),
        })
    }

    /// The attempt failed before the commit.
    pub(super) fn refuse(&mut self, refusal: Refusal) {
        let Refusal { failure, error } = refusal;
        self.failed = Some(Box::new(Tried { failure, error, retry_after: self.retry_after.take() }));
    }

    /// Settles the hold, once: what a committed answer used, or nothing. Answers the receipt.
    pub(super) async fn settle(&mut self) -> Receipt {
        let Some(ticket) = self.ticket.take() else { return self.receipt.unwrap_or_default() };
        let charge = self.charge(&ticket);
        let used = charge.used;
        let settlement = self.holds.settle(ticket, charge).await;
        let receipt = Receipt { settlement, used };
        self.receipt = Some(receipt);
        receipt
    }

    /// The terminal event goes out now; what is behind it is waited for a little.
    pub(super) fn done(&mut self) {
        self.done_at = Some(clock::now());
    }

    /// What ends a committed stream that a timer stopped; `None`: nothing stopped it, or it cannot be ended.
    pub(super) fn ending(&mut self) -> Option<Forward> {
        let failure = self.ending.take()?;
        match self.attempt.as_mut()?.answer.fail(failure) {
            Step::Forward(forward) => Some(forward),
            Step::Hold | Step::Failed(_) => None,
        }
    }

    /// Notes what the answer has cost so far.
    pub(super) fn touch(&self) {
        let (Some(ticket), Some(attempt)) = (&self.ticket, &self.attempt) else { return };
        let used = attempt.answer.used(attempt.bill.own_input, &attempt.bill.ceiling);
        if let Ok(so_far) = attempt.bill.cost(&used.usage, used.tier) {
            self.holds.touch(ticket, so_far);
        }
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
    pub(super) fn note_first_event(&mut self) {
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
    pub(super) fn take(&mut self, task: HttpTask) -> Vec<Step> {
        let now = clock::now();
        self.last_piece = now;
        self.heard |= !matches!(task, HttpTask::Failed(_));
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
    pub(super) fn next_due(&self) -> Option<(Instant, Due)> {
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
    pub(super) fn is_alone_no_more(&mut self) -> bool {
        let Some(attempt) = &mut self.attempt else { return false };
        let (Some(leg), Some(alone)) = (&attempt.leg, &mut attempt.alone) else { return false };
        alone.look = Some(clock::now() + ALONE_LOOK);
        leg.is_back(&alone.refused)
    }

    /// Looks how much of a large body the upstream has taken.
    pub(super) fn look(&mut self) {
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
    pub(super) fn time_out(&mut self, timer: Timer) {
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
        self.refuse(refusal);
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

/// The first of several that is due; of two at once the one named first.
fn soonest<const N: usize>(dues: [Option<(Instant, Due)>; N]) -> Option<(Instant, Due)> {
    dues.into_iter().flatten().min_by_key(|(at, _)| *at)
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
