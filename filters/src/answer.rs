//! When does an answer count as one, and what of it goes out?
//!
//! This is the gate's judgement, as a machine: it takes the head and the bytes of one attempt's
//! response and says what to do with them. Until the first *meaningful* event is in hand it lets
//! nothing out, so that any failure can still go to the next candidate. From then on the answer is
//! the caller's: everything goes out as it comes, and an end that is none becomes an error event,
//! because SDKs take a plain cut for a normal end.
//!
//! - A stream commits at its first content, reasoning, tool call or finish. Openers are held,
//!   comments and pings dropped. After [`Rules::hold_bytes_max`] of one unfinished event it commits
//!   all the same, unless that event speaks of an error.
//! - One JSON text is held whole up to [`Rules::whole_bytes_max`]; a longer one commits there, and its
//!   latest piece is kept back, so that its cost is known before its last byte is gone, and a model's name
//!   at its very end can still be changed.
//! - A stream that is folded into a whole answer is held until it is complete, and commits then.
//! - An error status keeps its body (up to [`Rules::error_bytes_max`]) for the caller's answer, should
//!   no other candidate serve.
//!
//! Deliberately absent: timers, sockets, and the choice of what to do about a failure.

use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};

use crate::dialect::fold::{Fold, Unfoldable};
use crate::dialect::{Kind, Operation, Piece, Shape};
use crate::json::{self, Edit};
use crate::meter::{Ceiling, Meter, Produced, Used};
use crate::stream::coding::Decoder;
use crate::stream::sse::{Event, Scanner};
use crate::upstream::classify::{self, Rule};
use crate::upstream::failure::{Failure, NotAnAnswer, Timer};
use crate::verdict::{Reason, Rejection, UpstreamError};

/// What is kept of the end of a JSON text too long to be read, in bytes.
const TAIL_BYTES: usize = 16 << 10;
/// What is kept back of a long JSON text at least, in bytes: the names and numbers behind a list of floats.
const KEPT_BACK_BYTES: usize = 1 << 10;

/// Bounds of one answer.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Of an unfinished first event, in bytes.
    pub hold_bytes_max: usize,
    /// Of a JSON text that is held whole, in bytes.
    pub whole_bytes_max: usize,
    /// Of a refused attempt's body, in bytes.
    pub error_bytes_max: usize,
    /// Of one event, in bytes.
    pub event_bytes_max: usize,
    /// Of one JSON text that is read for its usage, in bytes.
    pub read_bytes_max: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            hold_bytes_max: 256 << 10,
            whole_bytes_max: 64 << 10,
            error_bytes_max: 64 << 10,
            event_bytes_max: 8 << 20,
            read_bytes_max: 8 << 20,
        }
    }
}

/// Of embeddings that are read for their usage, in bytes.
const EMBEDDINGS_READ_BYTES_MAX: usize = 1 << 20;
/// How much longer a text may become when it is written anew with every letter escaped.
const ESCAPED: usize = 3;

impl Rules {
    /// The bounds of the answer to a request of so many bytes. A response begins by repeating much of its request,
    /// in each of its first two events, and at the beginning of a whole one.
    #[must_use]
    pub fn of(operation: Operation, request_bytes: usize) -> Self {
        let repeated = match operation {
            Operation::Responses => request_bytes.saturating_mul(ESCAPED),
            Operation::Chat
            | Operation::Completions
            | Operation::Embeddings
            | Operation::Messages
            | Operation::CountTokens => 0,
        };
        let Self { hold_bytes_max, whole_bytes_max, error_bytes_max, event_bytes_max, read_bytes_max } =
            Self::default();
        // A long list of floats says nothing that its end does not: reading it would only take time.
        let read_bytes_max =
            if operation == Operation::Embeddings { EMBEDDINGS_READ_BYTES_MAX } else { read_bytes_max };
        Self {
            hold_bytes_max: hold_bytes_max.saturating_add(repeated.saturating_mul(2)),
            whole_bytes_max: whole_bytes_max.saturating_add(repeated),
            error_bytes_max,
            event_bytes_max: event_bytes_max.saturating_add(repeated),
            read_bytes_max: read_bytes_max.saturating_add(repeated),
        }
    }
}

/// What to do now.
#[derive(Debug)]
pub enum Step {
    /// Nothing goes out.
    Hold,
    /// These bytes go out; before the first of them the head.
    Forward(Forward),
    /// The attempt failed before the commit; nothing of it was seen.
    Failed(Refusal),
}

/// Bytes for the caller.
#[derive(Debug)]
pub struct Forward {
    /// The bytes; may be none.
    pub bytes: Bytes,
    /// They are the first: the head goes out before them.
    pub commits: bool,
    /// What they mean for the answer.
    pub end: End,
}

/// Where an answer stands after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// More is to come.
    Open,
    /// The terminal event or the last byte is among them: settle first, then let them out.
    Settle,
    /// The body is over.
    Over,
    /// The body is over and cannot be ended properly: break the connection.
    Break,
}

/// An attempt that was refused before the commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub failure: Failure,
    /// What the upstream said, if it said something.
    pub error: UpstreamError,
}

/// How a committed answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It has not.
    Not,
    /// Properly.
    Properly,
    /// It broke off.
    Broken(Failure),
}

/// One attempt's response.
#[derive(Debug)]
pub struct Answer {
    operation: Operation,
    shape: Shape,
    rules: Rules,
    classes: Arc<[Rule]>,
    phase: Phase,
    decoder: Option<Decoder>,
    committed: bool,
    /// Something of an answer has come, sent or not.
    begun: bool,
    head_sent: bool,
    settled: bool,
    ended: Ended,
    /// Choices that have finished.
    finished: u64,
    /// Bytes of a whole answer that have come; what a cut one is counted by.
    whole_bytes: usize,
    /// The number of the last event, where events are numbered.
    sequence: Option<u64>,
    meter: Meter,
}

#[derive(Debug)]
enum Phase {
    AwaitHead,
    Refused {
        status: u16,
        body: BytesMut,
    },
    Stream {
        scanner: Scanner,
        held: BytesMut,
        done: bool,
    },
    Whole {
        text: BytesMut,
        sent: usize,
    },
    /// Events that become one JSON text.
    Fold {
        scanner: Scanner,
        fold: Fold,
    },
    /// A JSON text too long to be read: it passes, and its end is looked at for usage.
    Passing {
        tail: BytesMut,
        /// How much of it has not gone out.
        unsent: usize,
    },
    /// The caller has had the end; whatever still comes is nobody's.
    Over,
}

impl Answer {
    /// Waits for the head of an attempt's response.
    #[must_use]
    pub fn new(operation: Operation, shape: Shape, rules: Rules) -> Self {
        Self {
            operation,
            meter: Meter::echoing(shape.echoed_bytes),
            shape,
            rules,
            classes: Arc::default(),
            phase: Phase::AwaitHead,
            decoder: None,
            committed: false,
            begun: false,
            head_sent: false,
            settled: false,
            ended: Ended::Not,
            finished: 0,
            whole_bytes: 0,
            sequence: None,
        }
    }

    /// The provider's errors are classed by these rules before all others.
    #[must_use]
    pub fn classed_by(mut self, classes: Arc<[Rule]>) -> Self {
        self.classes = classes;
        self
    }

    /// Whether the answer is the caller's already.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.committed
    }

    /// Something of an answer is in hand, sent or not: a caller who leaves now pays for what was produced.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.begun || self.committed
    }

    /// The first meaningful event has come; from here on a pause is one within an answer.
    #[must_use]
    pub fn has_spoken(&self) -> bool {
        self.committed || (self.begun && matches!(self.phase, Phase::Fold { .. }))
    }

    /// Its status was an error: only the body that explains it is still to come.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self.phase, Phase::Refused { .. })
    }

    /// How it ended, once committed.
    #[must_use]
    pub fn ended(&self) -> &Ended {
        &self.ended
    }

    /// A finish was seen but no usage yet: a little patience may bring it.
    #[must_use]
    pub fn awaits_usage(&self) -> bool {
        self.has_finished() && !self.meter.has_report()
    }

    /// The terminal event has gone out; only the end of the body is missing.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.settled
    }

    /// What was used so far. A whole answer that is cut before its end is counted by its bytes.
    #[must_use]
    pub fn used(&self, own_input: u64, ceiling: &Ceiling) -> Used {
        if self.operation.is_free() {
            return Used::default();
        }
        if self.settled || self.shape.stream || matches!(self.phase, Phase::Fold { .. }) {
            return self.meter.used(own_input, self.settled, ceiling);
        }
        let mut meter = self.meter.clone();
        let text_bytes = u64::try_from(self.whole_bytes).unwrap_or(u64::MAX);
        meter.produce(Produced { text_bytes, tool_calls: 0 });
        meter.used(own_input, false, ceiling)
    }

    fn has_finished(&self) -> bool {
        self.finished >= self.shape.choices.max(1)
    }

    /// Output tokens so far by our own count, whatever is reported.
    #[must_use]
    pub fn own_output(&self) -> u64 {
        self.meter.own_output()
    }

    /// The head has come.
    pub fn head(&mut self, status: u16, content_type: Option<&str>, content_encoding: Option<&str>) -> Step {
        let decoder = Decoder::of(content_encoding);
        let is_coded_unreadably = decoder.is_err();
        self.decoder = decoder.unwrap_or_default();
        if !(200..300).contains(&status) {
            self.phase = Phase::Refused { status, body: BytesMut::new() };
            return Step::Hold;
        }
        let is =
            |kind: &str| content_type.is_some_and(|t| t.trim_start().to_ascii_lowercase().starts_with(kind));
        let wrong = is("text/html")
            || if self.shape.stream {
                is("application/json")
            } else {
                is("text/event-stream") && !self.shape.fold
            };
        if wrong || is_coded_unreadably {
            return refuse(Failure::NotAnAnswer(NotAnAnswer::WrongType));
        }
        self.phase = if self.shape.stream {
            Phase::Stream { scanner: Scanner::default(), held: BytesMut::new(), done: false }
        } else if is("text/event-stream") {
            Phase::Fold { scanner: Scanner::default(), fold: Fold::new(self.operation.dialect()) }
        } else {
            Phase::Whole { text: BytesMut::new(), sent: 0 }
        };
        Step::Hold
    }

    /// Bytes of the body have come.
    pub fn body(&mut self, bytes: &Bytes) -> Step {
        let Some(decoder) = &mut self.decoder else { return self.plain(bytes) };
        match decoder.decode(bytes) {
            Ok(plain) if plain.is_empty() => Step::Hold,
            Ok(plain) => self.plain(&plain),
            Err(_) => self.fail(Failure::NotAnAnswer(NotAnAnswer::Unreadable)),
        }
    }

    fn plain(&mut self, bytes: &Bytes) -> Step {
        self.whole_bytes = self.whole_bytes.saturating_add(bytes.len());
        match &mut self.phase {
            Phase::AwaitHead => refuse(Failure::Ours),
            Phase::Refused { body, .. } => {
                let room = self.rules.error_bytes_max.saturating_sub(body.len());
                body.extend_from_slice(bytes.get(..room.min(bytes.len())).unwrap_or_default());
                // An endless error body must not keep the next candidate waiting.
                if bytes.len() >= room { self.refused() } else { Step::Hold }
            }
            Phase::Stream { scanner, .. } => {
                scanner.push(bytes);
                self.events()
            }
            Phase::Whole { text, .. } => {
                text.extend_from_slice(bytes);
                self.begun |= !bytes.trim_ascii().is_empty();
                self.whole_piece(bytes.len())
            }
            Phase::Fold { scanner, .. } => {
                scanner.push(bytes);
                self.fold_events()
            }
            Phase::Passing { tail, unsent } => {
                tail.extend_from_slice(bytes);
                let from = tail.len().saturating_sub(*unsent + bytes.len());
                *unsent = (*unsent + bytes.len()).min(KEPT_BACK_BYTES);
                let out = Bytes::copy_from_slice(
                    tail.get(from..tail.len().saturating_sub(*unsent)).unwrap_or_default(),
                );
                tail.advance(tail.len().saturating_sub(TAIL_BYTES));
                self.forward(out, End::Open)
            }
            Phase::Over => Step::Hold,
        }
    }

    /// The body has ended as its framing says.
    pub fn end(&mut self) -> Step {
        match &mut self.phase {
            Phase::AwaitHead => refuse(Failure::Broken),
            Phase::Refused { .. } => self.refused(),
            Phase::Stream { .. } => self.stream_end(),
            Phase::Whole { .. } => self.whole_end(),
            Phase::Fold { .. } => self.fold_end(),
            Phase::Passing { tail, unsent } => {
                let (tail, unsent) = (std::mem::take(tail).freeze(), *unsent);
                self.passing_end(&tail, unsent)
            }
            Phase::Over => Step::Hold,
        }
    }

    /// The upstream broke off, or a timer ran out.
    pub fn fail(&mut self, failure: Failure) -> Step {
        if let Phase::Over = self.phase {
            return Step::Hold;
        }
        if self.settled {
            self.ended = Ended::Properly;
            return self.forward(Bytes::new(), End::Over);
        }
        if let (false, Phase::Refused { .. }) = (self.committed, &self.phase) {
            return self.refused();
        }
        if !self.committed {
            return refuse(failure);
        }
        if let Phase::Stream { scanner, .. } = &self.phase
            && scanner.pending_bytes().trim_ascii() == b"data: [DONE]"
        {
            return self.stream_end(); // Only its blank line is missing.
        }
        self.break_off(failure)
    }

    fn refused(&mut self) -> Step {
        let Phase::Refused { status, body } = &self.phase else { return refuse(Failure::Ours) };
        Step::Failed(self.classed(self.operation.dialect().error(*status, body), body))
    }

    /// An error with what it means. Where it is the request's own fault, the caller sees the status that
    /// says so.
    fn classed(&self, mut error: UpstreamError, body: &[u8]) -> Refusal {
        let failure = classify::failure(self.operation, &error, body, &self.classes);
        if let Failure::CallerFault(status) = failure {
            error.status = status;
        }
        Refusal { failure, error }
    }

    fn events(&mut self) -> Step {
        let mut out = BytesMut::new();
        let mut end = End::Open;
        while let Phase::Stream { scanner, done, .. } = &mut self.phase {
            if *done {
                // Whatever follows the terminal event is nobody's.
                *scanner = Scanner::default();
                break;
            }
            let Some(event) = scanner.next_event() else { break };
            match self.event(&event, &mut out) {
                Ok(End::Open) => {}
                Ok(other) => {
                    end = other;
                    if end == End::Over {
                        break;
                    }
                }
                Err(refusal) => return Step::Failed(refusal),
            }
        }
        if let Phase::Stream { scanner, held, .. } = &self.phase {
            // An event without an end, or openers without an answer: memory is not for that.
            let endless = scanner.pending() > self.rules.event_bytes_max;
            if endless && self.committed {
                let ending = self.ending(&Failure::NotAnAnswer(NotAnAnswer::Unreadable), None);
                out.extend_from_slice(&ending);
                return self.forward(out.freeze(), End::Over);
            }
            if !self.committed && (endless || held.len() > self.rules.hold_bytes_max) {
                return refuse(Failure::NotAnAnswer(NotAnAnswer::Unreadable));
            }
        }
        if !self.committed {
            let Phase::Stream { scanner, .. } = &self.phase else { return Step::Hold };
            let pending = scanner.pending_bytes();
            if pending.len() < self.rules.hold_bytes_max {
                return Step::Hold;
            }
            if speaks_of_error(pending) {
                return refuse(Failure::NotAnAnswer(NotAnAnswer::Unreadable));
            }
            self.commit(&mut out);
        }
        self.forward(out.freeze(), end)
    }

    /// Judges one event and puts what the caller may see of it into `out`, or among the held ones.
    fn event(&mut self, event: &Event, out: &mut BytesMut) -> Result<End, Refusal> {
        let piece = self.operation.event(event, &self.shape);
        self.count(&piece);
        let Piece { kind, edits, .. } = piece;
        match kind {
            Kind::Meaningful => {
                if !self.committed {
                    self.commit(out);
                }
                out.extend_from_slice(&seen(event, edits));
                Ok(End::Open)
            }
            Kind::Opener if self.committed => {
                out.extend_from_slice(&seen(event, edits));
                Ok(End::Open)
            }
            Kind::Opener => {
                if let Phase::Stream { held, .. } = &mut self.phase {
                    held.extend_from_slice(&seen(event, edits));
                }
                Ok(End::Open)
            }
            Kind::Ping if self.committed => {
                out.extend_from_slice(&event.raw);
                Ok(End::Open)
            }
            Kind::Ping | Kind::UsageOnly => Ok(End::Open),
            Kind::Done if self.committed => {
                self.done();
                out.extend_from_slice(&Event::terminated(&event.raw));
                Ok(End::Settle)
            }
            Kind::Done => Err(refusal(Failure::NotAnAnswer(NotAnAnswer::Empty))),
            Kind::Last => {
                if !self.committed {
                    self.commit(out);
                }
                self.done();
                out.extend_from_slice(&Event::terminated(&seen(event, edits)));
                Ok(End::Settle)
            }
            Kind::Error(error) if self.committed => {
                let Refusal { failure, error } =
                    self.classed(error, event.data.as_deref().unwrap_or_default());
                let ending = self.ending(&failure, Some(&error));
                out.extend_from_slice(&ending);
                Ok(End::Over)
            }
            Kind::Error(error) => Err(self.classed(error, event.data.as_deref().unwrap_or_default())),
            Kind::Unreadable if self.committed => {
                out.extend_from_slice(&seen(event, edits));
                Ok(End::Open)
            }
            Kind::Unreadable => Err(refusal(Failure::NotAnAnswer(NotAnAnswer::Unreadable))),
        }
    }

    fn count(&mut self, piece: &Piece) {
        if piece.restates {
            self.meter.restate(piece.produced);
        } else {
            self.meter.produce(piece.produced);
        }
        self.sequence = piece.sequence.or(self.sequence);
        if let Some(report) = piece.usage {
            self.meter.report(report);
        }
        self.meter.tier(piece.tier);
        self.finished = self.finished.saturating_add(piece.finished);
    }

    fn commit(&mut self, out: &mut BytesMut) {
        self.committed = true;
        if let Phase::Stream { held, .. } = &mut self.phase {
            out.extend_from_slice(&std::mem::take(held));
        }
    }

    fn done(&mut self) {
        self.settled = true;
        if let Phase::Stream { done, .. } = &mut self.phase {
            *done = true;
        }
    }

    /// A clean end of the body. Without the terminal event a finish is enough; without either it was cut.
    fn stream_end(&mut self) -> Step {
        if self.settled {
            self.ended = Ended::Properly;
            return self.forward(Bytes::new(), End::Over);
        }
        let mut out = BytesMut::new();
        let tail = if let Phase::Stream { scanner, .. } = &mut self.phase { scanner.finish() } else { None };
        if let Some(mut event) = tail {
            // An event that only lacks its blank line counts; half an event is dropped.
            let whole =
                event.data.as_deref().is_some_and(|d| d.trim_ascii() == b"[DONE]" || json::check(d).is_ok());
            if whole {
                event.raw = Event::terminated(&event.raw);
                match self.event(&event, &mut out) {
                    Ok(End::Over) => return self.forward(out.freeze(), End::Over),
                    Ok(_) => {}
                    Err(refusal) => return Step::Failed(refusal),
                }
            }
        }
        if !self.committed {
            return refuse(Failure::NotAnAnswer(NotAnAnswer::Empty));
        }
        if self.settled || self.has_finished() {
            if !self.settled {
                // SDKs wait for it; a provider that forgets it has said everything all the same.
                out.extend_from_slice(self.operation.terminal_event());
            }
            self.settled = true;
            self.ended = Ended::Properly;
        } else {
            out.extend_from_slice(&self.ending(&Failure::Broken, None));
        }
        self.forward(out.freeze(), End::Over)
    }

    fn whole_piece(&mut self, latest: usize) -> Step {
        let Phase::Whole { text, sent } = &mut self.phase else { return Step::Hold };
        if text.len() <= self.rules.whole_bytes_max {
            return Step::Hold;
        }
        if !self.committed {
            let fails = !text.trim_ascii_start().starts_with(b"{")
                || json::find_in_prefix(text, "error").is_some_and(|span| text.get(span) != Some(b"null"));
            if fails {
                return refuse(Failure::NotAnAnswer(NotAnAnswer::Unreadable));
            }
            rename_model(text, &self.shape);
        }
        // The latest piece stays here: it may be the last one.
        let passes = text.len() > self.rules.read_bytes_max;
        let kept_back = if passes { KEPT_BACK_BYTES } else { latest.max(KEPT_BACK_BYTES) };
        let up_to = text.len().saturating_sub(kept_back).max(*sent);
        let bytes = Bytes::copy_from_slice(text.get(*sent..up_to).unwrap_or_default());
        *sent = up_to;
        if passes {
            let kept = text.len().saturating_sub(TAIL_BYTES);
            let tail = BytesMut::from(text.get(kept..).unwrap_or_default());
            self.phase = Phase::Passing { tail, unsent: text.len().saturating_sub(up_to) };
        }
        self.forward(bytes, End::Open)
    }

    /// The end of a text that was too long to be read.
    fn passing_end(&mut self, tail: &Bytes, unsent: usize) -> Step {
        if let Some(report) = self.operation.usage_in_tail(tail, &self.shape) {
            self.meter.report(report);
        } else {
            let text_bytes = u64::try_from(self.whole_bytes).unwrap_or(u64::MAX);
            self.meter.produce(Produced { text_bytes, tool_calls: 0 });
        }
        self.settled = true;
        self.ended = Ended::Properly;
        let rest = tail.slice(tail.len().saturating_sub(unsent)..);
        let name =
            self.operation.model_in_tail(&rest).map(|span| Edit { span, with: public_name(&self.shape) });
        let rest = match name {
            Some(edit) => Bytes::from(json::apply(&rest, &mut [edit])),
            None => rest,
        };
        self.forward(rest, End::Over)
    }

    fn whole_end(&mut self) -> Step {
        let Phase::Whole { text, sent } = &mut self.phase else { return Step::Hold };
        if text.iter().all(u8::is_ascii_whitespace) {
            return refuse(Failure::NotAnAnswer(NotAnAnswer::Empty));
        }
        let sent = *sent;
        let text = std::mem::take(text).freeze();
        let piece = self.operation.whole(&text, &self.shape);
        self.count(&piece);
        let Piece { kind, mut edits, .. } = piece;
        // An answer that the caller has in part already is not taken back for saying nothing.
        let kind = if self.committed && kind == Kind::Opener { Kind::Meaningful } else { kind };
        match kind {
            Kind::Meaningful => {
                self.settled = true;
                self.ended = Ended::Properly;
                // What has gone out already cannot be changed any more.
                edits.retain(|edit| edit.span.start >= sent);
                let rest = text.slice(sent..);
                for edit in &mut edits {
                    edit.span = edit.span.start - sent..edit.span.end - sent;
                }
                let bytes = if edits.is_empty() { rest } else { Bytes::from(json::apply(&rest, &mut edits)) };
                self.forward(bytes, End::Over)
            }
            Kind::Error(error) if !self.committed => Step::Failed(self.classed(error, &text)),
            Kind::Error(_)
            | Kind::Unreadable
            | Kind::Opener
            | Kind::Ping
            | Kind::UsageOnly
            | Kind::Done
            | Kind::Last => {
                if self.committed {
                    self.break_off(Failure::Broken)
                } else {
                    refuse(Failure::NotAnAnswer(NotAnAnswer::Unreadable))
                }
            }
        }
    }

    /// Puts events into the fold; the terminal one completes it.
    fn fold_events(&mut self) -> Step {
        while let Phase::Fold { scanner, .. } = &mut self.phase {
            let Some(event) = scanner.next_event() else { break };
            match self.fold_event(&event) {
                Ok(false) => {}
                Ok(true) => return self.folded(),
                Err(refusal) => return Step::Failed(refusal),
            }
        }
        if let Phase::Fold { scanner, .. } = &self.phase
            && scanner.pending() > self.rules.event_bytes_max
        {
            return refuse(Failure::NotAnAnswer(NotAnAnswer::Unreadable));
        }
        Step::Hold
    }

    /// Answers whether it was the end.
    fn fold_event(&mut self, event: &Event) -> Result<bool, Refusal> {
        let piece = self.operation.event(event, &self.shape);
        self.count(&piece);
        let data = event.data.as_deref().unwrap_or_default();
        match piece.kind {
            Kind::Ping => return Ok(false),
            Kind::Done => return Ok(true),
            Kind::Error(error) => return Err(self.classed(error, data)),
            // The one dialect that ends so is not folded.
            Kind::Unreadable | Kind::Last => {
                return Err(refusal(Failure::NotAnAnswer(NotAnAnswer::Unreadable)));
            }
            Kind::Meaningful => self.begun = true,
            Kind::Opener | Kind::UsageOnly => {}
        }
        let Phase::Fold { fold, .. } = &mut self.phase else { return Ok(false) };
        fold.push(data)
            .map(|()| false)
            .map_err(|Unfoldable| refusal(Failure::NotAnAnswer(NotAnAnswer::Unreadable)))
    }

    /// The body is over; its last event may only lack its blank line.
    fn fold_end(&mut self) -> Step {
        let tail = if let Phase::Fold { scanner, .. } = &mut self.phase { scanner.finish() } else { None };
        let tail = tail.filter(|event| {
            event
                .data
                .as_deref()
                .is_some_and(|data| data.trim_ascii() == b"[DONE]" || json::check(data).is_ok())
        });
        match tail.map(|event| self.fold_event(&event)) {
            Some(Err(refusal)) => Step::Failed(refusal),
            None | Some(Ok(_)) => self.folded(),
        }
    }

    /// The stream is over: its fold is the answer, if it is complete.
    fn folded(&mut self) -> Step {
        if !self.begun {
            return refuse(Failure::NotAnAnswer(NotAnAnswer::Empty));
        }
        if !self.has_finished() {
            return refuse(Failure::Broken);
        }
        let Phase::Fold { fold, .. } = std::mem::replace(&mut self.phase, Phase::Over) else {
            return refuse(Failure::Ours);
        };
        let Ok(text) = fold.finish() else {
            return refuse(Failure::NotAnAnswer(NotAnAnswer::Unreadable));
        };
        self.settled = true;
        self.ended = Ended::Properly;
        let mut edits = self.operation.whole(&text, &self.shape).edits;
        self.forward(json::apply(&text, &mut edits).into(), End::Over)
    }

    fn break_off(&mut self, failure: Failure) -> Step {
        if !self.shape.stream {
            self.ended = Ended::Broken(failure);
            return self.forward(Bytes::new(), End::Break);
        }
        let bytes = self.ending(&failure, None);
        self.forward(bytes, End::Over)
    }

    /// The error event that ends a committed stream. Of the upstream's own error its type may be
    /// seen, never its words.
    fn ending(&mut self, failure: &Failure, error: Option<&UpstreamError>) -> Bytes {
        self.ended = Ended::Broken(failure.clone());
        let (reason, message) = match failure {
            Failure::Timeout(Timer::Drain) => {
                (Reason::ShuttingDown, "The answer stopped: the gateway is shutting down.".to_owned())
            }
            Failure::Timeout(timer) => {
                let message = format!("The answer stopped: its `{}` limit ran out.", timer.word());
                (Reason::UpstreamTimeout, message)
            }
            Failure::Ours => {
                (Reason::Internal, "The answer stopped: something broke in the gateway.".to_owned())
            }
            Failure::Connect
            | Failure::Broken
            | Failure::Status(_)
            | Failure::Credential(_)
            | Failure::Redirect
            | Failure::NotAnAnswer(_)
            | Failure::CallerFault(_) => {
                (Reason::UpstreamFailed, "The answer broke off at the upstream.".to_owned())
            }
        };
        let mut rejection = Rejection::new(reason, message);
        rejection.upstream = error.map(|UpstreamError { status, kind, .. }| {
            Box::new(UpstreamError { status: *status, kind: kind.clone(), ..UpstreamError::default() })
        });
        self.operation.error_event(&rejection, &self.shape.request_id, self.sequence)
    }

    /// The only way out for bytes; the first of them take the head along.
    fn forward(&mut self, bytes: Bytes, end: End) -> Step {
        let commits = !self.head_sent;
        self.committed = true;
        if bytes.is_empty() && end == End::Open && !commits {
            return Step::Hold;
        }
        self.head_sent = true;
        if matches!(end, End::Over | End::Break) {
            self.phase = Phase::Over;
        }
        Step::Forward(Forward { bytes, commits, end })
    }
}

/// Whether an event whose end has not come says `error` other than to say that there is none.
fn speaks_of_error(pending: &[u8]) -> bool {
    let word: &[u8] = b"\"error\"";
    memchr::memmem::find_iter(pending, word).any(|at| {
        let behind = pending.get(at + word.len()..).unwrap_or_default().trim_ascii_start();
        let value = behind.strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        !value.is_some_and(|value| value.starts_with(b"null"))
    })
}

fn refuse(failure: Failure) -> Step {
    Step::Failed(refusal(failure))
}

fn refusal(failure: Failure) -> Refusal {
    Refusal { failure, error: UpstreamError::default() }
}

/// The bytes of an event as the caller sees them. An event that spans several lines is written anew
/// as one, since the edits are spans of its joined data.
fn seen(event: &Event, mut edits: Vec<Edit>) -> Bytes {
    let Some(data) = event.data.as_ref().filter(|_| !edits.is_empty()) else { return event.raw.clone() };
    let data = json::apply(data, &mut edits);
    event.with_data(&data).unwrap_or_else(|| {
        let mut out = BytesMut::new();
        if !event.name.is_empty() {
            out.extend_from_slice(b"event: ");
            out.extend_from_slice(&event.name);
            out.extend_from_slice(b"\n");
        }
        for line in data.split(|b| *b == b'\n') {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(line);
            out.extend_from_slice(b"\n");
        }
        out.extend_from_slice(b"\n");
        out.freeze()
    })
}

/// The model's public name as JSON.
fn public_name(shape: &Shape) -> Vec<u8> {
    serde_json::Value::from(shape.public_model.as_str()).to_string().into_bytes()
}

/// Puts the public name into a JSON text whose end has not come yet.
fn rename_model(text: &mut BytesMut, shape: &Shape) {
    let Some(span) = json::find_in_prefix(text, "model") else { return };
    let with = public_name(shape);
    if text.get(span.clone()) != Some(with.as_slice()) {
        let renamed = json::apply(text, &mut [Edit { span, with }]);
        *text = BytesMut::from(renamed.as_slice());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROLE: &str = r#"data: {"model":"gpt-a","choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    const HELLO: &str =
        r#"data: {"model":"gpt-a","choices":[{"delta":{"content":"Hello"},"finish_reason":null}]}"#;
    const STOP: &str = r#"data: {"model":"gpt-a","choices":[{"delta":{},"finish_reason":"stop"}]}"#;
    const USAGE: &str =
        r#"data: {"model":"gpt-a","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;
    const DONE: &str = "data: [DONE]";
    const BUSY: &str = r#"data: {"error":{"message":"upstream busy","code":429}}"#;

    fn answer(stream: bool, wants_usage: bool) -> Answer {
        let shape = Shape {
            stream,
            fold: false,
            choices: 1,
            echoed_bytes: 0,
            wants_usage,
            public_model: "gpt-a".into(),
            request_id: "req-1".into(),
        };
        Answer::new(Operation::Chat, shape, Rules::default())
    }

    fn events(lines: &[&str]) -> String {
        lines.iter().map(|line| format!("{line}\n\n")).collect()
    }

    /// Plays a stream in the given pieces; what went out, and the refusal if it failed.
    fn play(answer: &mut Answer, parts: &[&[u8]]) -> (Vec<u8>, Option<Refusal>, Vec<End>) {
        let (mut out, mut ends) = (vec![], vec![]);
        let kind = if answer.shape.stream { "text/event-stream" } else { "application/json" };
        let mut steps = vec![answer.head(200, Some(kind), None)];
        for part in parts {
            steps.push(answer.body(&Bytes::copy_from_slice(part)));
            if matches!(steps.last(), Some(Step::Failed(_))) {
                break;
            }
        }
        if !matches!(steps.last(), Some(Step::Failed(_))) {
            steps.push(answer.end());
        }
        let mut seen_head = false;
        for step in steps {
            match step {
                Step::Hold => {}
                Step::Forward(forward) => {
                    assert_eq!(forward.commits, !seen_head, "the head goes out once, and first");
                    seen_head = true;
                    out.extend_from_slice(&forward.bytes);
                    ends.push(forward.end);
                }
                Step::Failed(refusal) => return (out, Some(refusal), ends),
            }
        }
        (out, None, ends)
    }

    fn text(bytes: &[u8]) -> String {
        String::from_utf8_lossy(bytes).into_owned()
    }

    #[test]
    fn openers_are_held_until_content_comes() {
        let mut answer = answer(true, false);
        answer.head(200, Some("text/event-stream"), None);
        assert!(matches!(answer.body(&events(&[": ping", ROLE]).into()), Step::Hold));
        let Step::Forward(forward) = answer.body(&events(&[HELLO]).into()) else { panic!("commits") };
        assert!(forward.commits);
        assert_eq!(text(&forward.bytes), events(&[ROLE, HELLO]), "comments are dropped while holding");
    }

    #[test]
    fn an_operators_rule_reclasses_an_error_as_status_and_as_event() {
        let rule = |treat_as| Rule { status: None, body_contains: Some("upstream busy".into()), treat_as };
        let fault: Arc<[Rule]> = Arc::new([rule(classify::Class::CallerFault)]);
        let mut streamed = answer(true, false).classed_by(Arc::clone(&fault));
        let refusal = play(&mut streamed, &[events(&[BUSY]).as_bytes()]).1.expect("refused");
        assert_eq!(refusal.failure, Failure::CallerFault(429));
        let mut whole = answer(false, false).classed_by(fault);
        whole.head(503, None, None);
        whole.body(&Bytes::from_static(br#"{"error":"upstream busy"}"#));
        let Step::Failed(refusal) = whole.end() else { panic!("refused") };
        assert_eq!((refusal.failure, refusal.error.status), (Failure::CallerFault(400), 400));
    }

    #[test]
    fn a_healthy_stream_passes_unchanged_but_for_usage_nobody_asked_for() {
        let whole = events(&[ROLE, HELLO, STOP, USAGE, DONE]);
        let (out, refusal, ends) = play(&mut answer(true, false), &[whole.as_bytes()]);
        assert_eq!((text(&out), refusal), (events(&[ROLE, HELLO, STOP, DONE]), None));
        assert_eq!(ends, [End::Settle, End::Over]);
        let mut asked = answer(true, true);
        assert_eq!(text(&play(&mut asked, &[whole.as_bytes()]).0), whole);
        let used = asked.used(99, &Ceiling::NONE);
        assert_eq!((used.usage.input, used.usage.output, used.estimated), (10, 5, false));
    }

    #[test]
    fn an_error_before_content_fails_over_and_says_nothing() {
        for stream in [events(&[BUSY]), events(&[ROLE, BUSY]), events(&[": ping", ROLE, BUSY])] {
            let (out, refusal, _) = play(&mut answer(true, false), &[stream.as_bytes()]);
            assert!(out.is_empty());
            assert_eq!(refusal.unwrap().failure, Failure::Status(429));
        }
    }

    #[test]
    fn a_callers_fault_as_first_event_is_not_failed_over() {
        let event = r#"data: {"error":{"message":"too long","type":"invalid_request_error","code":"context_length_exceeded"}}"#;
        let (_, refusal, _) = play(&mut answer(true, false), &[events(&[event]).as_bytes()]);
        let refusal = refusal.unwrap();
        assert_eq!(refusal.failure, Failure::CallerFault(400));
        assert_eq!(refusal.error.code, "context_length_exceeded");
    }

    #[test]
    fn an_error_after_content_ends_the_stream_with_an_error_event() {
        let stream = events(&[HELLO, BUSY, DONE]);
        let mut answer = answer(true, false);
        let (out, refusal, _) = play(&mut answer, &[stream.as_bytes()]);
        let out = text(&out);
        assert!(refusal.is_none() && out.contains("\"error\"") && !out.contains("[DONE]"), "{out}");
        assert!(!out.contains("upstream busy"), "the upstream's words stay inside");
        assert_eq!(answer.ended(), &Ended::Broken(Failure::Status(429)));
    }

    #[test]
    fn a_stream_without_any_end_is_a_cut_one() {
        let mut cut = answer(true, false);
        let (out, _, _) = play(&mut cut, &[events(&[ROLE, HELLO]).as_bytes()]);
        assert!(text(&out).contains("\"error\""));
        assert_eq!(cut.ended(), &Ended::Broken(Failure::Broken));
        for end in [events(&[HELLO, DONE]), events(&[HELLO, STOP])] {
            let mut whole = answer(true, false);
            let (out, _, _) = play(&mut whole, &[end.as_bytes()]);
            assert!(!text(&out).contains("\"error\""));
            assert_eq!(text(&out).matches("[DONE]").count(), 1, "the caller gets the terminal event once");
            assert_eq!(whole.ended(), &Ended::Properly);
        }
    }

    #[test]
    fn the_rest_without_a_blank_line_is_ended_for_the_caller() {
        let stream = format!("{}{USAGE}", events(&[HELLO, STOP]));
        let mut asked = answer(true, true);
        let (out, _, _) = play(&mut asked, &[stream.as_bytes()]);
        assert_eq!(text(&out), events(&[HELLO, STOP, USAGE, DONE]));
        assert_eq!(asked.used(0, &Ceiling::NONE).usage.output, 5);
    }

    #[test]
    fn half_an_event_is_not_forwarded() {
        let stream = format!("{}{}", events(&[HELLO]), &STOP[..30]);
        let (out, _, _) = play(&mut answer(true, false), &[stream.as_bytes()]);
        for event in text(&out).split("\n\n").filter(|e| !e.is_empty()) {
            json::check(event.trim_start_matches("data: ").as_bytes()).unwrap();
        }
        assert!(text(&out).contains("\"error\""));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let stream = |body: &str| play(&mut answer(true, false), &[body.as_bytes()]).1.unwrap().failure;
        assert_eq!(stream(""), Failure::NotAnAnswer(NotAnAnswer::Empty));
        assert_eq!(stream(&events(&[ROLE])), Failure::NotAnAnswer(NotAnAnswer::Empty));
        assert_eq!(stream(&events(&[DONE])), Failure::NotAnAnswer(NotAnAnswer::Empty));
        assert_eq!(stream("data: hello\n\n"), Failure::NotAnAnswer(NotAnAnswer::Unreadable));
        let whole = |body: &str| play(&mut answer(false, false), &[body.as_bytes()]).1.unwrap().failure;
        assert_eq!(whole(" "), Failure::NotAnAnswer(NotAnAnswer::Empty));
        assert_eq!(whole("<html>"), Failure::NotAnAnswer(NotAnAnswer::Unreadable));
        assert_eq!(whole(&events(&[HELLO])), Failure::NotAnAnswer(NotAnAnswer::Unreadable));
        assert_eq!(whole(r#"{"error":{"code":503}}"#), Failure::Status(503));
        for (stream, kind) in [(true, "text/html"), (true, "application/json"), (false, "text/event-stream")]
        {
            assert!(matches!(answer(stream, false).head(200, Some(kind), None), Step::Failed(_)), "{kind}");
        }
        assert!(matches!(answer(true, false).head(200, None, Some("br")), Step::Failed(_)));
    }

    #[test]
    fn a_refused_attempts_body_is_kept() {
        let mut refused = answer(true, false);
        refused.head(422, Some("application/json"), None);
        refused.body(&r#"{"error":{"message":"bad","code":"c"}}"#.into());
        let Step::Failed(refusal) = refused.end() else { panic!("fails") };
        assert_eq!((refusal.failure, refusal.error.message.as_str()), (Failure::CallerFault(422), "bad"));
    }

    fn folding(parts: &[&str]) -> (Vec<u8>, Option<Refusal>, Answer) {
        let mut answer = answer(false, false);
        answer.shape.fold = true;
        answer.head(200, Some("text/event-stream"), None);
        let mut out = vec![];
        for step in parts
            .iter()
            .map(|part| answer.body(&Bytes::copy_from_slice(part.as_bytes())))
            .collect::<Vec<_>>()
            .into_iter()
            .chain(std::iter::once_with(|| Step::Hold))
        {
            match step {
                Step::Hold => {}
                Step::Forward(forward) => {
                    assert_eq!((forward.commits, forward.end), (true, End::Over), "all at once");
                    out.extend_from_slice(&forward.bytes);
                }
                Step::Failed(refusal) => return (out, Some(refusal), answer),
            }
        }
        if out.is_empty() {
            match answer.end() {
                Step::Failed(refusal) => return (out, Some(refusal), answer),
                Step::Forward(forward) => out.extend_from_slice(&forward.bytes),
                Step::Hold => {}
            }
        }
        (out, None, answer)
    }

    #[test]
    fn a_folded_stream_goes_out_whole_at_its_end_or_not_at_all() {
        let all = events(&[ROLE, HELLO, STOP, USAGE, DONE]);
        let (head, tail) = all.split_at(all.len() / 2);
        let (out, refusal, folded) = folding(&[head, tail]);
        assert_eq!(refusal, None);
        let whole: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(whole["object"], "chat.completion");
        assert_eq!(whole["choices"][0]["message"]["content"], "Hello");
        assert_eq!(whole["usage"]["completion_tokens"], 5, "a whole answer always has its usage");
        assert!(folded.is_committed() && *folded.ended() == Ended::Properly);
        let (out, refusal, _) = folding(&[&events(&[ROLE, HELLO, STOP])]);
        assert_eq!((out.is_empty(), refusal), (false, None), "a finish is an end");
        let (out, refusal, cut) = folding(&[&events(&[ROLE, HELLO])]);
        assert_eq!((out.len(), refusal.unwrap().failure), (0, Failure::Broken));
        assert!(cut.is_under_way() && cut.has_spoken() && !cut.is_committed());
        let (out, refusal, _) = folding(&[&events(&[ROLE, HELLO, BUSY])]);
        assert_eq!((out.len(), refusal.unwrap().failure), (0, Failure::Status(429)));
        let (out, refusal, _) = folding(&[&events(&[ROLE, DONE])]);
        assert_eq!((out.len(), refusal.unwrap().failure), (0, Failure::NotAnAnswer(NotAnAnswer::Empty)));
    }

    #[test]
    fn an_upstream_that_answers_json_all_the_same_is_taken_as_it_is() {
        let mut plain = answer(false, false);
        plain.shape.fold = true;
        plain.head(200, Some("application/json"), None);
        plain.body(&r#"{"choices":[{"message":{"content":"Hello"},"finish_reason":"stop"}]}"#.into());
        assert!(matches!(plain.end(), Step::Forward(Forward { commits: true, end: End::Over, .. })));
    }

    #[test]
    fn what_comes_coded_unasked_is_read_as_if_it_were_plain() {
        let coded = |text: &str| {
            let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
            std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
            Bytes::from(encoder.finish().unwrap())
        };
        let mut refused = answer(true, false);
        refused.head(400, Some("application/json"), Some("gzip"));
        refused.body(&coded(r#"{"error":{"message":"bad","code":"c"}}"#));
        let Step::Failed(refusal) = refused.end() else { panic!("fails") };
        assert_eq!(refusal.error.message, "bad");
        let mut stream = answer(true, false);
        stream.head(200, Some("text/event-stream"), Some("gzip"));
        let Step::Forward(forward) = stream.body(&coded(&events(&[HELLO]))) else { panic!("goes out") };
        assert_eq!(text(&forward.bytes), events(&[HELLO]));
        let Step::Forward(last) = stream.body(&Bytes::from_static(b"no gzip at all")) else { panic!("ends") };
        assert_eq!(last.end, End::Over, "what breaks after the commit ends with an error event");
    }

    #[test]
    fn a_large_unfinished_first_event_commits_unless_it_speaks_of_an_error() {
        let large = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}", "x".repeat(300 << 10));
        let mut fine = answer(true, false);
        fine.head(200, Some("text/event-stream"), None);
        assert!(matches!(fine.body(&large.into()), Step::Forward(Forward { commits: true, .. })));
        let bad = format!("data: {{\"error\":{{\"message\":\"{}", "x".repeat(300 << 10));
        let mut broken = answer(true, false);
        broken.head(200, Some("text/event-stream"), None);
        assert!(matches!(broken.body(&bad.into()), Step::Failed(_)));
    }

    #[test]
    fn a_long_json_text_commits_early_and_keeps_its_last_piece_back() {
        let body = format!(
            r#"{{"id":"x","model":"up-a","choices":[{{"message":{{"content":"{}"}}}}],"usage":{{"prompt_tokens":1,"completion_tokens":2}}}}"#,
            "y".repeat(200 << 10)
        );
        let parts: Vec<&[u8]> = body.as_bytes().chunks(50_000).collect();
        let mut long = answer(false, false);
        let (out, refusal, ends) = play(&mut long, &parts);
        assert_eq!((refusal, text(&out)), (None, body.replace("up-a", "gpt-a")));
        assert!(ends.len() > 2 && long.used(0, &Ceiling::NONE).usage.output == 2);
    }

    #[test]
    fn a_timer_after_the_commit_is_said_in_the_stream() {
        let mut idle = answer(true, false);
        idle.head(200, Some("text/event-stream"), None);
        idle.body(&events(&[HELLO]).into());
        let Step::Forward(last) = idle.fail(Failure::Timeout(Timer::Idle)) else { panic!("an event") };
        assert!(text(&last.bytes).contains("upstream_timeout") && last.end == End::Over);
        for (failure, code) in
            [(Failure::Timeout(Timer::Drain), "shutting_down"), (Failure::Ours, "internal_error")]
        {
            let mut ours = answer(true, false);
            ours.head(200, Some("text/event-stream"), None);
            ours.body(&events(&[HELLO]).into());
            let Step::Forward(last) = ours.fail(failure) else { panic!("an event") };
            assert!(text(&last.bytes).contains(code) && last.end == End::Over);
        }
        let mut before = answer(true, false);
        assert!(matches!(before.fail(Failure::Timeout(Timer::FirstByte)), Step::Failed(_)));
    }

    const START: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-a\",\"usage\":{\"input_tokens\":20,\"cache_read_input_tokens\":1000,\"cache_creation_input_tokens\":0,\"output_tokens\":1}}}";
    const BLOCK: &str = "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}";
    const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}";
    const WORD: &str = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello there\"}}";
    const FINISH: &str = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"input_tokens\":20,\"cache_read_input_tokens\":1000,\"output_tokens\":16}}";
    const LAST: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}";
    const FULL: &str = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"secret words\"}}";

    fn message() -> Answer {
        let shape = Shape {
            choices: 1,
            echoed_bytes: 0,
            stream: true,
            fold: false,
            wants_usage: true,
            public_model: "claude-a".into(),
            request_id: "req-1".into(),
        };
        Answer::new(Operation::Messages, shape, Rules::default())
    }

    #[test]
    fn pings_are_dropped_while_openers_wait_and_pass_after_the_commit() {
        let stream = events(&[START, PING, BLOCK, PING, WORD, PING, FINISH, LAST]);
        let mut answer = message();
        let (out, refusal, ends) = play(&mut answer, &[stream.as_bytes()]);
        assert_eq!(text(&out), events(&[START, BLOCK, WORD, PING, FINISH, LAST]));
        assert_eq!((refusal, ends), (None, vec![End::Settle, End::Over]));
        let used = answer.used(99, &Ceiling::NONE);
        assert_eq!((used.usage.prompt(), used.usage.cache_read, used.usage.output), (1_020, 1_000, 16));
        assert!(!used.estimated);
    }

    #[test]
    fn an_overload_before_content_fails_over_without_a_trace_of_its_openers() {
        for stream in [events(&[": warm", FULL]), events(&[START, PING, BLOCK, FULL])] {
            let (out, refusal, _) = play(&mut message(), &[stream.as_bytes()]);
            assert!(out.is_empty());
            assert_eq!(refusal.unwrap().failure, Failure::Status(529));
        }
    }

    #[test]
    fn an_overload_after_content_ends_the_message_in_its_own_shape() {
        let mut answer = message();
        let (out, _, _) = play(&mut answer, &[events(&[START, BLOCK, WORD, FULL, LAST]).as_bytes()]);
        let out = text(&out);
        let error = out.split("event: error\ndata: ").nth(1).unwrap();
        let error: serde_json::Value = serde_json::from_str(error.trim()).unwrap();
        assert_eq!((&error["type"], &error["error"]["type"]), (&"error".into(), &"overloaded_error".into()));
        assert_eq!(error["request_id"], "req-1");
        assert!(!out.contains("message_stop") && !out.contains("secret words"), "{out}");
        assert_eq!(answer.ended(), &Ended::Broken(Failure::Status(529)));
    }

    #[test]
    fn a_cut_message_is_charged_its_prompt_and_the_larger_of_two_outputs() {
        let mut answer = message();
        let (out, _, _) = play(&mut answer, &[events(&[START, BLOCK, WORD]).as_bytes()]);
        assert!(text(&out).contains("event: error") && !text(&out).contains("message_stop"));
        let used = answer.used(99, &Ceiling::NONE);
        assert_eq!((used.usage.input, used.usage.cache_read), (20, 1_000), "as it was reported");
        assert_eq!((used.usage.output, used.estimated), (3, true), "11 bytes are more than one token");
        assert_eq!(answer.ended(), &Ended::Broken(Failure::Broken));
    }

    #[test]
    fn a_message_that_has_finished_needs_no_stop() {
        let mut answer = message();
        let (out, _, _) = play(&mut answer, &[events(&[START, BLOCK, WORD, FINISH]).as_bytes()]);
        assert!(!text(&out).contains("event: error"));
        assert_eq!((answer.ended(), answer.used(0, &Ceiling::NONE).usage.output), (&Ended::Properly, 16));
        assert!(!answer.awaits_usage());
    }

    const CREATED: &str = r#"data: {"type":"response.created","sequence_number":0,"response":{"model":"up-a","output":[],"usage":null}}"#;
    const DELTA: &str =
        r#"data: {"type":"response.output_text.delta","sequence_number":4,"delta":"Hello there"}"#;
    const COMPLETED: &str = r#"data: {"type":"response.completed","sequence_number":5,"response":{"model":"up-a","status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"Hello there"}]}],"usage":{"input_tokens":10,"output_tokens":5}}}"#;
    const FAILED: &str = r#"data: {"type":"response.failed","sequence_number":5,"response":{"model":"up-a","status":"failed","error":{"code":"server_error","message":"secret words"}}}"#;

    fn response() -> Answer {
        Answer::new(Operation::Responses, answer(true, true).shape, Rules::default())
    }

    fn public(lines: &[&str]) -> String {
        events(lines).replace("up-a", "gpt-a")
    }

    #[test]
    fn a_response_is_held_until_its_first_word_and_settled_with_its_last_event() {
        let mut answer = response();
        answer.head(200, Some("text/event-stream"), None);
        assert!(matches!(answer.body(&events(&[CREATED]).into()), Step::Hold));
        let Step::Forward(first) = answer.body(&events(&[DELTA]).into()) else { panic!("commits") };
        assert_eq!((text(&first.bytes), first.end), (public(&[CREATED, DELTA]), End::Open));
        let Step::Forward(last) = answer.body(&events(&[COMPLETED, "data: [DONE]"]).into()) else {
            panic!("settles")
        };
        assert_eq!((text(&last.bytes), last.end), (public(&[COMPLETED]), End::Settle));
        assert!(matches!(answer.end(), Step::Forward(Forward { end: End::Over, .. })));
        let used = answer.used(99, &Ceiling::NONE);
        assert_eq!((used.usage.input, used.usage.output, used.estimated), (10, 5, false));
        assert_eq!(answer.ended(), &Ended::Properly);
    }

    #[test]
    fn a_response_may_begin_by_repeating_a_long_request() {
        let instructions = "x".repeat(400 << 10);
        let repeating = |line: &str| {
            line.replace(
                r#""output":"#,
                &format!(r#""error":null,"instructions":"{instructions}","output":"#),
            )
        };
        let shape = answer(true, true).shape;
        let mut long = Answer::new(Operation::Responses, shape, Rules::of(Operation::Responses, 401 << 10));
        let stream = events(&[&repeating(CREATED), &repeating(CREATED), DELTA, &repeating(COMPLETED)]);
        let parts: Vec<&[u8]> = stream.as_bytes().chunks(60_000).collect();
        let (out, refusal, _) = play(&mut long, &parts);
        assert_eq!((text(&out) == stream.replace("up-a", "gpt-a"), refusal), (true, None));
        assert_eq!(long.used(0, &Ceiling::NONE).usage.output, 5);
        assert!(!speaks_of_error(br#"{"error" : null,"x":"error"#), "cut before its end");
        for text in [r#"{"error":{"#, r#"{"type":"error","#, r#"{"error":null,"a":{"error":1"#] {
            assert!(speaks_of_error(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn a_response_that_says_all_in_its_last_event_is_an_answer() {
        let (out, refusal, ends) = play(&mut response(), &[events(&[CREATED, COMPLETED]).as_bytes()]);
        assert_eq!((text(&out), refusal), (public(&[CREATED, COMPLETED]), None));
        assert_eq!(ends, [End::Settle, End::Over]);
        let mut unended = response();
        let tail = format!("{}{COMPLETED}", events(&[CREATED, DELTA]));
        let (out, _, _) = play(&mut unended, &[tail.as_bytes()]);
        assert_eq!(text(&out), public(&[CREATED, DELTA, COMPLETED]), "its blank line is added");
    }

    #[test]
    fn a_response_that_fails_is_failed_over_before_its_first_word_and_ended_in_its_shape_after_it() {
        let (out, refusal, _) = play(&mut response(), &[events(&[CREATED, FAILED]).as_bytes()]);
        assert!(out.is_empty());
        assert_eq!(refusal.unwrap().failure, Failure::Status(500));
        for stream in [events(&[CREATED, DELTA, FAILED]), events(&[CREATED, DELTA])] {
            let mut answer = response();
            let (out, _, _) = play(&mut answer, &[stream.as_bytes()]);
            let out = text(&out);
            let error = out.split("event: error\ndata: ").nth(1).expect("an error event");
            let error: serde_json::Value = serde_json::from_str(error.trim()).unwrap();
            assert_eq!((&error["type"], &error["code"]), (&"error".into(), &"upstream_failed".into()));
            assert!(error["sequence_number"].as_u64() > Some(4) && !out.contains("secret words"), "{out}");
            let used = answer.used(7, &Ceiling::NONE);
            assert_eq!((used.usage.input, used.usage.output, used.estimated), (7, 3, true));
        }
    }

    #[test]
    fn a_path_that_the_server_lacks_fails_over_and_a_free_answer_uses_nothing() {
        let mut lacks = response();
        lacks.head(404, Some("application/json"), None);
        lacks.body(&r#"{"detail":"Not Found"}"#.into());
        let Step::Failed(refusal) = lacks.end() else { panic!("refused") };
        assert!(refusal.failure.fails_over() && refusal.failure.is_not_served());
        let shape = Shape { stream: false, ..answer(false, true).shape };
        let mut count = Answer::new(Operation::CountTokens, shape, Rules::default());
        let (out, _, _) = play(&mut count, &[br#"{"input_tokens":2095}"#]);
        assert_eq!(text(&out), r#"{"input_tokens":2095}"#);
        assert_eq!(count.used(7, &Ceiling::NONE), Used::default());
    }

    /// A stream read in parts of `size` bytes gives what it gives in one.
    fn is_the_same_in_parts(
        fresh: impl Fn() -> Answer,
        stream: &str,
        size: usize,
    ) -> Result<(), TestCaseError> {
        let (mut one, mut many) = (fresh(), fresh());
        let whole = play(&mut one, &[stream.as_bytes()]);
        let parts: Vec<&[u8]> = stream.as_bytes().chunks(size).collect();
        let split = play(&mut many, &parts);
        prop_assert_eq!(text(&split.0), text(&whole.0));
        prop_assert_eq!(split.1, whole.1);
        prop_assert_eq!(many.used(3, &Ceiling::NONE), one.used(3, &Ceiling::NONE));
        prop_assert_eq!(many.ended(), one.ended());
        Ok(())
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_response(
            picks in prop::collection::vec(0_usize..7, 0..10), size in 1_usize..40,
        ) {
            let all = [CREATED, DELTA, COMPLETED, FAILED, ": ping", "data: [DONE]", "data: {\"type\":\"new\"}"];
            let lines: Vec<&str> = picks.iter().map(|n| all[*n]).collect();
            is_the_same_in_parts(response, &events(&lines), size)?;
        }

        #[test]
        fn embeddings_of_any_length_lose_nothing_but_the_upstreams_name(
            numbers in 1_usize..4_000, size in 1_usize..3_000,
        ) {
            let list = vec!["-0.0123"; numbers].join(",");
            let body = format!(
                r#"{{"object":"list","data":[{{"index":0,"embedding":[{list}]}}],"model":"up-a","usage":{{"prompt_tokens":8,"total_tokens":8}}}}"#
            );
            // So small that texts of every size are among them: held, committed early, too long to be read.
            let rules = Rules { whole_bytes_max: 4 << 10, read_bytes_max: 16 << 10, ..Rules::default() };
            let shape = Shape { stream: false, ..answer(false, true).shape };
            let mut embeddings = Answer::new(Operation::Embeddings, shape, rules);
            let parts: Vec<&[u8]> = body.as_bytes().chunks(size).collect();
            let (out, refusal, _) = play(&mut embeddings, &parts);
            prop_assert_eq!((text(&out), refusal), (body.replace("up-a", "gpt-a"), None));
            let used = embeddings.used(3, &Ceiling { context: 8_191, output: 0 });
            prop_assert_eq!((used.usage.input, used.usage.output, used.estimated), (8, 0, false));
        }

        #[test]
        fn any_split_gives_the_same_answer(
            picks in prop::collection::vec(0_usize..8, 0..14), size in 1_usize..40, wants_usage: bool,
        ) {
            let all = [ROLE, HELLO, STOP, USAGE, DONE, BUSY, ": ping", "data: junk"];
            let lines: Vec<&str> = picks.iter().map(|n| all[*n]).collect();
            is_the_same_in_parts(|| answer(true, wants_usage), &events(&lines), size)?;
        }

        #[test]
        fn any_split_gives_the_same_message(
            picks in prop::collection::vec(0_usize..9, 0..14), size in 1_usize..40,
        ) {
            let all = [START, BLOCK, PING, WORD, FINISH, LAST, FULL, ": ping", "data: {\"type\":\"new\"}"];
            let lines: Vec<&str> = picks.iter().map(|n| all[*n]).collect();
            is_the_same_in_parts(message, &events(&lines), size)?;
        }

        #[test]
        fn a_whole_answer_does_not_depend_on_the_split(size in 1_usize..70_000, filler in 0_usize..150_000) {
            let body = format!(
                r#"{{"model":"up-a","choices":[{{"message":{{"content":"{}"}}}}]}}"#, "z".repeat(filler)
            );
            let (mut one, mut many) = (answer(false, false), answer(false, false));
            let parts: Vec<&[u8]> = body.as_bytes().chunks(size).collect();
            prop_assert_eq!(play(&mut many, &parts).0, play(&mut one, &[body.as_bytes()]).0);
        }
    }

    #[test]
    fn a_stream_ends_properly_only_when_every_choice_has_finished() {
        let shape = Shape {
            stream: true,
            fold: false,
            choices: 2,
            echoed_bytes: 0,
            wants_usage: false,
            public_model: "gpt-a".into(),
            request_id: "r".into(),
        };
        let mut two = Answer::new(Operation::Chat, shape, Rules::default());
        let (out, _, _) = play(&mut two, &[events(&[HELLO, STOP]).as_bytes()]);
        assert!(text(&out).contains("\"error\""), "one of two has finished");
        let empty = STOP.replace("\"stop\"", "\"\"");
        let (out, _, _) = play(&mut answer(true, false), &[events(&[HELLO, &empty]).as_bytes()]);
        assert!(text(&out).contains("\"error\""), "an empty reason is none");
    }

    #[test]
    fn neither_an_endless_event_nor_endless_openers_fill_the_memory() {
        let mut committed = answer(true, false);
        committed.head(200, Some("text/event-stream"), None);
        committed.body(&events(&[HELLO]).into());
        let piece = Bytes::from(vec![b'z'; 1 << 20]);
        let over =
            (0..20).any(|_| matches!(committed.body(&piece), Step::Forward(Forward { end: End::Over, .. })));
        assert!(over, "the stream is ended");
        let mut opening = answer(true, false);
        opening.head(200, Some("text/event-stream"), None);
        let roles = Bytes::from(events(&[ROLE; 100]));
        assert!((0..100).any(|_| matches!(opening.body(&roles), Step::Failed(_))), "the attempt is refused");
    }

    #[test]
    fn a_whole_answer_too_long_to_be_read_is_charged_by_the_usage_at_its_end() {
        let filler = "y".repeat(9 << 20);
        let body = format!(
            r#"{{"model":"gpt-a","choices":[{{"message":{{"content":"{filler}"}}}}],"usage":{{"prompt_tokens":10,"completion_tokens":5}}}}"#
        );
        let parts: Vec<&[u8]> = body.as_bytes().chunks(1 << 20).collect();
        let mut long = answer(false, false);
        let (out, refusal, _) = play(&mut long, &parts);
        assert!(refusal.is_none() && out == body.as_bytes());
        let used = long.used(3, &Ceiling::NONE);
        assert_eq!((used.usage.input, used.usage.output, used.estimated), (10, 5, false));
    }

    #[test]
    fn a_cut_whole_answer_is_counted_by_what_came_of_it() {
        let mut cut = answer(false, false);
        cut.head(200, Some("application/json"), None);
        let start =
            format!(r#"{{"model":"gpt-a","choices":[{{"message":{{"content":"{}"#, "y".repeat(100_000));
        cut.body(&start.into());
        cut.fail(Failure::Broken);
        assert!(cut.used(3, &Ceiling::NONE).usage.output > 20_000);
    }
}
