//! Decides, without waiting and without a socket, what the mock writes and when.
//!
//! An [`Answer`] is a list of steps and an ending. A fault is therefore nothing special: it is a
//! shorter list with another ending, and `wire.rs` needs no knowledge of faults at all.
//!
//! The mark that ends a chunked body travels in the same write as the last event. A client that
//! hangs up on `[DONE]` is thus never counted as one that left early.
//!
//! `comments_max` keeps a script of four billion comments from becoming a list of them.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};

use super::dialect::{self, Events, Wish};
use super::script::{Fault, Script};

#[derive(Debug, PartialEq)]
pub(super) struct Answer {
    pub steps: Vec<Step>,
    pub ending: Ending,
}

#[derive(Debug, PartialEq)]
pub(super) enum Step {
    Wait(Duration),
    /// One write to the peer; none if there are no bytes.
    Write(Bytes),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The answer is complete; the connection is good for another request.
    Complete,
    /// Nothing more, until the peer leaves.
    Hang,
    /// FIN.
    Close,
    /// RST.
    Reset,
}

impl Answer {
    pub(super) fn json(status: u16, body: &str) -> Self {
        Self::plain(status, "application/json", "", body)
    }

    pub(super) fn no_content() -> Self {
        Self::write("HTTP/1.1 204 No Content\r\n\r\n".to_owned(), Ending::Complete)
    }

    pub(super) fn error(script: &Script, status: u16, message: &str) -> Self {
        Self::json(status, &dialect::error(script.dialect, status, message))
    }

    /// To a request that was never understood, on a connection that cannot be trusted further.
    pub(super) fn refusal(status: u16) -> Self {
        let reason = reason(status);
        let head = format!("HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        Self::write(head, Ending::Close)
    }

    pub(super) fn completion(script: &Script, wish: &Wish, fault: Option<&Fault>) -> Self {
        let course = |reach, ending| course(script, wish, reach, ending);
        let mut answer = match fault {
            None => course(Reach::End, Ending::Complete),
            Some(Fault::Status { code, body, retry_after }) => {
                let usual = || dialect::error(script.dialect, *code, "the script says so");
                let body = body.clone().unwrap_or_else(usual);
                let retry_after =
                    retry_after.as_ref().map_or(String::new(), |value| format!("retry-after: {value}\r\n"));
                Self::plain(*code, "application/json", &retry_after, &body)
            }
            Some(Fault::HangBeforeHead) => Self::silence(Ending::Hang),
            Some(Fault::HangAfterHead) => course(Reach::Head, Ending::Hang),
            Some(Fault::HangAfterPieces { pieces }) => course(Reach::Pieces(*pieces), Ending::Hang),
            Some(Fault::ResetBeforeHead) => Self::silence(Ending::Reset),
            Some(Fault::CloseBeforeHead) => Self::silence(Ending::Close),
            Some(Fault::ResetAfterHead) => course(Reach::Head, Ending::Reset),
            Some(Fault::ResetAfterPieces { pieces }) => course(Reach::Pieces(*pieces), Ending::Reset),
            Some(Fault::CutAfterPieces { pieces }) => course(Reach::Pieces(*pieces), Ending::Close),
            Some(Fault::EndAfterPieces { pieces }) => course(Reach::Pieces(*pieces), Ending::Complete),
            Some(Fault::ErrorEvent { pieces, body }) => {
                let usual = || dialect::error(script.dialect, 500, "the script says so");
                let body = body.clone().unwrap_or_else(usual);
                course(Reach::Error { pieces: *pieces, body }, Ending::Complete)
            }
            Some(Fault::Empty) => Self::json(200, ""),
            Some(Fault::Html) => Self::plain(
                200,
                "text/html",
                "",
                "<!doctype html><title>Welcome</title><h1>Sign in to the network</h1>",
            ),
            Some(Fault::Garbage) => {
                Self::write("\u{1}\u{2}\u{3} this is not HTTP\r\n\r\n".to_owned(), Ending::Close)
            }
        };
        answer.steps.insert(0, Step::Wait(script.delay_head()));
        answer
    }

    fn plain(status: u16, content_type: &str, extra: &str, body: &str) -> Self {
        let head = whole_head(status, content_type, extra, body.len());
        Self::write(head + body, Ending::Complete)
    }

    fn write(text: String, ending: Ending) -> Self {
        Self { steps: vec![Step::Write(text.into())], ending }
    }

    fn silence(ending: Ending) -> Self {
        Self { steps: Vec::new(), ending }
    }
}

const COMMENTS_MAX: u32 = 10_000;

/// How far a completion gets before it ends, well or badly.
enum Reach {
    Head,
    Pieces(usize),
    Error { pieces: usize, body: String },
    End,
}

fn course(script: &Script, wish: &Wish, reach: Reach, ending: Ending) -> Answer {
    let has_events = wish.words.as_ref().is_none_or(|words| !words.events.is_empty());
    if wish.stream && has_events {
        streamed(script, wish, reach, ending)
    } else {
        whole(script, wish, reach, ending)
    }
}

fn whole(script: &Script, wish: &Wish, reach: Reach, ending: Ending) -> Answer {
    let body = match (&reach, ending) {
        (Reach::Error { body, .. }, _) => return Answer::json(500, body),
        (Reach::Pieces(pieces), Ending::Complete) => {
            let text: String = script.text.iter().take(*pieces).map(String::as_str).collect();
            dialect::whole(script, wish, &text, false)
        }
        (Reach::Head | Reach::Pieces(_) | Reach::End, _) => {
            dialect::whole(script, wish, &script.text.concat(), script.finish)
        }
    };
    let head = whole_head(200, "application/json", "", body.len());
    let mut body = Bytes::from(body);
    match (reach, ending) {
        (Reach::Head | Reach::Pieces(0), Ending::Hang | Ending::Close | Ending::Reset) => {
            body.clear();
        }
        (Reach::Pieces(_), Ending::Hang | Ending::Close | Ending::Reset) => {
            body.truncate(body.len() / 2);
        }
        (Reach::Head | Reach::Pieces(_) | Reach::Error { .. } | Reach::End, _) => {}
    }
    let wait = Step::Wait(script.delay_first_event());
    Answer { steps: vec![Step::Write(head.into()), wait, Step::Write(body)], ending }
}

fn streamed(script: &Script, wish: &Wish, reach: Reach, ending: Ending) -> Answer {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut steps = vec![Step::Write(head.into())];
    let Events { openers, pieces, closers } = dialect::events(script, wish);
    let (pieces_max, tail) = match reach {
        Reach::Head => return Answer { steps, ending },
        Reach::Pieces(pieces) => (pieces, Vec::new()),
        Reach::Error { pieces, body } => (pieces, vec![dialect::error_event(wish.surface, &body)]),
        Reach::End => (usize::MAX, closers),
    };

    let write = |text: String| Step::Write(text.into());
    let mut payload = Vec::new();
    for _ in 0..script.comments.min(COMMENTS_MAX) {
        payload.extend([write(": keep-alive\n\n".to_owned()), Step::Wait(script.delay_chunk())]);
    }
    payload.push(Step::Wait(script.delay_first_event()));
    payload.extend(openers.into_iter().map(write));
    for (position, piece) in pieces.into_iter().take(pieces_max).enumerate() {
        if position > 0 {
            payload.push(Step::Wait(script.delay_chunk()));
        }
        payload.push(write(piece));
    }
    payload.extend(tail.into_iter().map(write));

    if let Some(bytes_per_write) = script.bytes_per_write {
        payload = recut(payload, bytes_per_write.max(1));
    }
    steps.extend(chunked(payload, ending));
    Answer { steps, ending }
}

/// The same bytes in writes of `size`. Waits keep their place; an event's last few bytes may
/// therefore arrive only after the wait that follows it, with the next event's first ones.
fn recut(payload: Vec<Step>, size: usize) -> Vec<Step> {
    let mut cut = Vec::new();
    let mut pending = BytesMut::new();
    for step in payload {
        match step {
            Step::Wait(_) => cut.push(step),
            Step::Write(bytes) => pending.extend_from_slice(&bytes),
        }
        while pending.len() >= size {
            cut.push(Step::Write(pending.split_to(size).freeze()));
        }
    }
    if pending.has_remaining() {
        cut.push(Step::Write(pending.freeze()));
    }
    cut
}

/// Frames every write as one HTTP chunk (RFC 9112, 7.1). Only a complete answer gets the last,
/// empty one.
fn chunked(payload: Vec<Step>, ending: Ending) -> Vec<Step> {
    let mut steps: Vec<Step> = payload.into_iter().map(framed).collect();
    if ending == Ending::Complete {
        let last = match steps.pop() {
            Some(Step::Write(chunk)) => [&chunk, LAST_CHUNK].concat(),
            Some(Step::Wait(wait)) => {
                steps.push(Step::Wait(wait));
                LAST_CHUNK.to_vec()
            }
            None => LAST_CHUNK.to_vec(),
        };
        steps.push(Step::Write(last.into()));
    }
    steps
}

const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

fn framed(step: Step) -> Step {
    match step {
        Step::Wait(_) => step,
        Step::Write(bytes) => {
            let size = format!("{:x}\r\n", bytes.len());
            Step::Write([size.as_bytes(), &bytes, b"\r\n"].concat().into())
        }
    }
}

fn whole_head(status: u16, content_type: &str, extra: &str, length: usize) -> String {
    let reason = reason(status);
    format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n{extra}\r\n"
    )
}

/// Empty where there is no common phrase, as RFC 9112 (4) allows.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::super::script::Surface;
    use super::*;

    fn wish(body: &str) -> Wish {
        Wish::parse(Surface::Chat, body.as_bytes()).unwrap()
    }

    fn payload(script: &Script) -> Vec<Step> {
        let wish = wish(r#"{"stream":true,"stream_options":{"include_usage":true}}"#);
        Answer::completion(script, &wish, None).steps
    }

    #[test]
    fn waits_stand_where_the_script_puts_them() {
        let script = Script {
            text: vec!["a".into(), "b".into()],
            delay_head_ms: 1,
            delay_first_event_ms: 2,
            delay_chunk_ms: 3,
            comments: 1,
            openers: false,
            ..Script::default()
        };
        let shape: Vec<u128> = payload(&script)
            .iter()
            .map(|step| match step {
                Step::Wait(wait) => wait.as_millis(),
                Step::Write(_) => 0,
            })
            .collect();
        // head | comment | piece | piece, finish, usage, done
        assert_eq!(shape, [1, 0, 0, 3, 2, 0, 3, 0, 0, 0, 0]);
    }

    #[test]
    fn an_absurd_script_still_has_an_answer() {
        let script =
            Script { text: vec![], bytes_per_write: Some(0), comments: u32::MAX, ..Script::default() };
        let writes = payload(&script).len();
        assert!(writes > 10_000 && writes < 1_000_000, "{writes} steps");
        let wish = wish(r#"{"stream":true}"#);
        let fault = Fault::EndAfterPieces { pieces: 9 };
        let script = Script { text: vec![], openers: false, ..Script::default() };
        let answer = Answer::completion(&script, &wish, Some(&fault));
        assert_eq!(
            answer.steps.last(),
            Some(&Step::Write(LAST_CHUNK.into())),
            "an empty body is a complete one"
        );
    }
}
