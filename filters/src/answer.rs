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
use crate::dialect::pattern::Pattern;
use crate::dialect::{Kind, Operation, Piece, Shape};
use crate::json::{self, Edit};
use crate::meter::{Ceiling, Meter, Produced, Used};
use crate::stream::coding::Decoder;
use crate::stream::sse::{Event, Scanner};
use crate::upstream::classify::{self, Rule};
use crate::upstream::failure::{Failure, NotAnAnswer, Timer};
use crate::verdict::{Reason, Rejection, UpstreamError};

/// So many events of one answer are taken as a pattern for those behind them. A server whose events never are alike
/// costs no more than these.
const PATTERNS_MAX: u32 = 8;
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
    /// What the last event was that only said something.
    pattern: Option<Pattern>,
    /// How many more may be made.
    patterns_left: u32,
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
            pattern: None,
            patterns_left: PATTERNS_MAX,
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
        let piece = self.read(event);
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

    /// What an event is: as the last one, or by reading it.
    fn read(&mut self, event: &Event) -> Piece {
        if let Some(piece) = self.pattern.as_ref().and_then(|pattern| pattern.read(event)) {
            return piece;
        }
        let piece = self.operation.event(event, &self.shape);
        if self.patterns_left > 0
            && let Some(pattern) = Pattern::of(event, &piece)
        {
            self.patterns_left -= 1;
            self.pattern = Some(pattern);
        }
        piece
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
mod tests;
