//! One attempt on the wire: the request goes out, the answer comes in and goes on to the caller.
//!
//! A loop of our own over Pingora's sessions, not its proxy's: that one cannot hold a head back, its replay buffer ends
//! at 64 KiB, its read timeout knows no difference between a first byte and a pause, and it hands every piece through
//! two queues. Beside whatever the attempt waits for, two things are watched always: the clock, and whether the caller is
//! still there. A caller may leave without the answer's last event (the usage) being lost.

use std::future::pending;
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use bytes::Bytes;
use filters::answer::{End, Forward, Step};
use filters::upstream::failure::Timer;
use futures::FutureExt as _;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::http::client::HttpSession;
use pingora::protocols::http::v2::write_body;
use pingora::protocols::http::{HttpTask, ServerSession};
use pingora::{BError, Error, ErrorType, Result};
use tokio::sync::watch;
use tokio::task::coop::consume_budget;
use tokio::task::unconstrained;
use tokio::time::{Sleep, sleep_until};

use super::gate::{Due, Gate};
use crate::clock;
use crate::edge::Connection;
use crate::pool::wire::next_piece;

/// The attempt was refused before the commit; [`Gate::take_failure`] says why.
const REFUSED: ErrorType = ErrorType::new("attempt refused");
/// A timer of the attempt ran out.
const TIMER: ErrorType = ErrorType::new("attempt timed out");
/// The caller left.
const CALLER_LEFT: ErrorType = ErrorType::new("caller left");
/// A committed whole answer broke off: the connection has to show it.
const BROKE_OFF: ErrorType = ErrorType::new("answer broke off");

/// A write to an upstream that takes longer has lost it.
const UPSTREAM_WRITE: Duration = Duration::from_secs(30);
/// So much of a body is written at once.
const PART_BYTES: usize = 64 << 10;
/// After so many pieces of an answer that came one behind the other.
const LOOK_UP_EVERY: u32 = 64;

/// An attempt, between its caller and its upstream.
pub(super) struct Exchange<'a> {
    caller: &'a mut ServerSession,
    gate: &'a mut Gate,
    /// Turns true when the process leaves and cannot wait longer.
    cut: watch::Receiver<bool>,
    /// Wakes at what was due first when it was set: with every piece something else is due later, and setting it
    /// anew each time costs more than one wake-up in vain.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(caller: &'a mut ServerSession, gate: &'a mut Gate, cut: watch::Receiver<bool>) -> Self {
        Self { caller, gate, cut, timer: None }
    }

    /// Waits for something of the attempt.
    ///
    /// # Errors
    /// When time runs out before, the caller leaves or the process has to.
    pub(super) async fn beside<T>(&mut self, something: impl Future<Output = T>) -> Result<T> {
        tokio::select! {
            biased;
            done = something => Ok(done),
            stopped = self.watch() => Err(stopped),
        }
    }

    /// Sends the request, and takes the answer to its end. Answers whether both were whole.
    ///
    /// # Errors
    /// When the attempt fails, or an answer that the caller has the beginning of cannot be ended in order.
    pub(super) async fn run(&mut self, upstream: &mut HttpSession, head: Box<RequestHeader>) -> Result<bool> {
        let body = self.gate.body();
        let mut unsent: Option<BError> = None;
        upstream.set_write_timeout(Some(UPSTREAM_WRITE));
        // With HTTP/2 an answer may begin while the request is still on its way.
        let mut rest = None;
        match upstream {
            HttpSession::H2(two) => {
                two.write_request_header(head, body.is_empty())?;
                rest = two
                    .take_request_body_writer()
                    .map(|writer| (writer, body))
                    .filter(|(_, b)| !b.is_empty());
            }
            HttpSession::H1(one) => {
                self.beside(one.write_request_header(head)).await??;
                for part in body.chunks(PART_BYTES) {
                    unsent = self.beside(one.write_body(part)).await?.err();
                    // Who has heard enough closes, and may have answered before.
                    if unsent.is_some() {
                        break;
                    }
                }
                drop(body);
            }
            HttpSession::Custom(()) => {}
        }
        lost(&mut unsent)?;
        let mut is_sent = rest.is_none();
        let mut is_sound = unsent.is_none();
        let mut sending = pin!(async {
            match &mut rest {
                Some((writer, body)) => {
                    write_body(writer, std::mem::take(body), true, Some(UPSTREAM_WRITE)).await
                }
                None => Ok(()),
            }
        });
        let mut pieces = 0_u32;
        loop {
            let next = async {
                loop {
                    tokio::select! {
                        biased;
                        sent = &mut sending, if !is_sent => {
                            is_sent = true;
                            unsent = sent.err();
                            lost(&mut unsent)?;
                        }
                        piece = next_piece(upstream) => return piece,
                    }
                }
            };
            let piece = self.beside(next).await?;
            let piece = match piece.map_err(|error| unsent.take().unwrap_or(error)) {
                // The attempt's, not yet the answer's: nobody may have seen the request.
                Err(error) if !self.gate.head_is_seen() => return Err(error),
                Err(error) => {
                    is_sound = false;
                    HttpTask::Failed(error)
                }
                Ok(piece) => piece,
            };
            if self.take(piece).await? {
                return Ok(is_sound);
            }
            // Others have their turn, however fast pieces come.
            consume_budget().await;
            pieces = pieces.wrapping_add(1);
            if pieces.is_multiple_of(LOOK_UP_EVERY) {
                self.look_up()?;
            }
        }
    }

    /// Looks at the clock and the caller, which nobody has done where nothing is ever waited for.
    fn look_up(&mut self) -> Result<()> {
        match unconstrained(self.watch()).now_or_never() {
            Some(stopped) => Err(stopped),
            None => Ok(()),
        }
    }

    /// Ends a committed stream that a timer stopped.
    pub(super) async fn end_stream(&mut self) -> Result<()> {
        let Some(forward) = self.gate.ending() else {
            return Error::e_explain(BROKE_OFF, "nothing is left to say");
        };
        self.forward(forward).await.map(drop)
    }

    /// A piece of the answer; whether it was the last.
    async fn take(&mut self, piece: HttpTask) -> Result<bool> {
        let mut over = false;
        let steps = self.gate.take(piece);
        self.gate.note_first_event();
        for step in steps {
            match step {
                Step::Hold => {}
                Step::Forward(forward) => over |= self.forward(forward).await?,
                Step::Failed(refusal) => {
                    let word = refusal.failure.word();
                    self.gate.refuse(refusal);
                    return Error::e_explain(REFUSED, word);
                }
            }
        }
        Ok(over)
    }

    /// Lets bytes out; answers whether the answer is over.
    async fn forward(&mut self, forward: Forward) -> Result<bool> {
        let Forward { bytes, commits, end } = forward;
        if commits {
            self.gate.commit();
        }
        match end {
            End::Open => self.gate.touch(),
            End::Settle | End::Over | End::Break => {
                self.gate.settle().await;
            }
        }
        if end == End::Settle {
            self.gate.done();
        }
        let over = matches!(end, End::Over | End::Break);
        if commits && end == End::Over {
            self.gate.keep(&bytes);
        }
        if !self.gate.caller_has_left() {
            let version = self.caller.req_header().version;
            let whole = over.then_some(bytes.len());
            let head = if commits { Some(self.gate.head(version, whole)?) } else { None };
            let written = self.write(head, bytes, end == End::Over).await;
            if let Err(error) = written
                && !self.gate.caller_leaves()
            {
                return Err(error);
            }
        }
        if end == End::Break {
            return Error::e_explain(BROKE_OFF, "the upstream ended inside its answer");
        }
        Ok(over)
    }

    /// Head, bytes and end, as far as there are any, in one piece: Pingora flushes behind each.
    async fn write(&mut self, head: Option<Box<ResponseHeader>>, bytes: Bytes, ends: bool) -> Result<()> {
        if let Some(head) = head {
            self.hold_flush(!bytes.is_empty() || ends);
            let written = self.caller.write_response_header(head).await;
            self.hold_flush(false);
            written?;
        }
        // A frame of HTTP/2 has its end with it.
        if !bytes.is_empty() && ends && !self.caller.is_http2() {
            self.hold_flush(true);
            let written = self.caller.write_response_body(bytes, false).await;
            self.hold_flush(false);
            written?;
            return self.caller.write_response_body(Bytes::new(), true).await;
        }
        self.caller.write_response_body(bytes, ends).await
    }

    fn hold_flush(&self, holds: bool) {
        if let Some(connection) = Connection::of(self.caller.digest()) {
            connection.hold_flush(holds);
        }
    }

    /// Where time runs out, and where a caller is seen to leave. May be dropped at any time: it only notes and returns.
    async fn watch(&mut self) -> BError {
        let Self { caller, gate, cut, timer } = self;
        loop {
            let (due, is_here) = (gate.next_due(), !gate.caller_has_left());
            let wait = async {
                match due {
                    Some((at, what)) => {
                        set(timer, at).await;
                        (at, what)
                    }
                    None => pending().await,
                }
            };
            let leaving = async {
                if cut.wait_for(|cut| *cut).await.is_err() {
                    pending::<()>().await;
                }
            };
            tokio::select! {
                biased;
                read = caller.read_body_or_idle(true), if is_here => match read {
                    // It belongs to a further request.
                    Ok(_) => {}
                    Err(_) if gate.caller_leaves() => {}
                    Err(error) => return Error::because(CALLER_LEFT, "while the answer was awaited", error),
                },
                () = leaving => return gate.stop(Timer::Drain),
                (at, what) = wait => match what {
                    // The timer was set for something that has been put off since.
                    _ if clock::now() < at => {}
                    Due::Look => gate.look(),
                    Due::Alone(timer) => {
                        if gate.is_alone_no_more() {
                            return gate.stop(timer);
                        }
                    }
                    Due::Timer(timer) => return gate.stop(timer),
                    Due::Enough => return gate.stop(Timer::Idle),
                },
            }
        }
    }
}

impl Gate {
    /// A timer of the attempt ran out.
    fn stop(&mut self, timer: Timer) -> BError {
        self.time_out(timer);
        Error::explain(TIMER, timer.word())
    }
}

/// An upstream that takes no more bytes is lost; one that has closed may have answered before.
fn lost(unsent: &mut Option<BError>) -> Result<()> {
    match unsent.take_if(|error| *error.etype() == ErrorType::WriteTimedout) {
        Some(error) => Err(error),
        None => Ok(()),
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
