//! A response: what each of its events is, what was used, what the caller must not see.
//!
//! An event that nobody knows is an opener: it waits for the commit and passes after it. Events that end a
//! part of the answer repeat it; only its pieces are counted, and what the last event says in all.

use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeSeed as _;
use serde_json::json;
use serde_json::value::RawValue;

use super::super::super::object::Object;
use super::super::super::{Kind, Piece, Shape};
use super::super::answer::{error_in, tier};
use super::super::error;
use super::super::usage::{RESPONSE_NAMES, Report};
use super::items::{Item, Part, says};
use crate::json as text;
use crate::meter::{Produced, UsageReport};
use crate::stream::sse::Event;
use crate::stream::usage::{Reported, Standing};
use crate::verdict::{Rejection, UpstreamError};

/// Fields in which the end of a part repeats it.
const REPEATED: [&str; 5] = ["text", "refusal", "arguments", "input", "code"];

/// What an event is.
#[must_use]
pub fn event(event: &Event, shape: &Shape) -> Piece {
    let Some(data) = event.data.as_deref() else { return Piece::of(Kind::Ping) };
    // Some compatible servers end every stream as chat completions do; nothing here waits for it.
    if data.trim_ascii().is_empty() || data.trim_ascii() == b"[DONE]" || event.name.as_ref() == b"ping" {
        return Piece::of(Kind::Ping);
    }
    let Some(object) = Object::read(data) else { return Piece::of(Kind::Unreadable) };
    let mut piece = match error_in(&object, event.name.as_ref() == b"error") {
        Some(text) => Piece::of(Kind::Error(error::read_event(text))),
        None => typed(&object, &event.name),
    };
    if let Some(response) = object.value("response").and_then(|text| Object::read(text.as_bytes())) {
        piece.take_from(&response);
        piece.edits = object.rename_model_inside("response", &shape.public_model);
    }
    piece.sequence = object.value("sequence_number").and_then(|number| number.parse().ok());
    piece
}

/// What a whole answer is.
#[must_use]
pub fn whole(body: &[u8], shape: &Shape) -> Piece {
    if text::check(body).is_err() {
        return Piece::of(Kind::Unreadable);
    }
    let Some(object) = Object::read(body) else { return Piece::of(Kind::Unreadable) };
    if let Some(text) = error_in(&object, false) {
        return Piece::of(Kind::Error(error::read_event(text)));
    }
    let status = object.string("status");
    if status.as_deref() == Some("failed") {
        return Piece::of(Kind::Error(UpstreamError { status: 500, ..UpstreamError::default() }));
    }
    let mut piece = Piece::of(Kind::Opener);
    let Some(said) = output(&object, &mut piece.produced) else { return Piece::of(Kind::Unreadable) };
    // Neither a word nor a reason why there is none: the same as a stream of openers alone.
    if said || matches!(status.as_deref(), Some("completed" | "incomplete")) {
        piece.kind = Kind::Meaningful;
    }
    piece.finished = shape.choices;
    piece.take_from(&object);
    piece.edits = object.rename_model(&shape.public_model);
    piece
}

/// An error as the last event of a stream that has begun, in this operation's own shape.
#[must_use]
pub fn error_event(rejection: &Rejection, sequence: Option<u64>) -> Bytes {
    let data = json!({
        "type": "error",
        "code": rejection.reason.code(),
        "message": rejection.message,
        "param": rejection.param,
        "sequence_number": sequence.map_or(0, |last| last.saturating_add(1)),
    });
    Bytes::from(format!("event: error\ndata: {data}\n\n"))
}

fn typed(object: &Object<'_>, event_name: &[u8]) -> Piece {
    let kind = object.string("type");
    let name = kind.as_deref().map_or(event_name, str::as_bytes);
    match name {
        b"response.completed" | b"response.incomplete" => last(object),
        b"response.failed" => failed(object),
        b"response.output_item.added" => meaningful_if(|produced| {
            part::<Item<'_>>(object, "item").is_some_and(|item| item.count(produced))
        }),
        b"response.output_item.done" => {
            repeats(|produced| part::<Item<'_>>(object, "item").is_some_and(|item| item.count(produced)))
        }
        b"response.content_part.added" | b"response.reasoning_summary_part.added" => {
            meaningful_if(|produced| {
                part::<Part<'_>>(object, "part").is_some_and(|part| part.count(produced))
            })
        }
        // Sound is no text: it is an answer, and its tokens are the provider's to count.
        b"response.audio.delta" => Piece::of(Kind::Meaningful),
        _ if name.ends_with(b".delta") => meaningful_if(|produced| {
            let delta = object.value("delta").and_then(|text| serde_json::from_str::<&RawValue>(text).ok());
            says(delta, produced)
        }),
        _ if name.ends_with(b".done") => {
            repeats(|_| REPEATED.iter().any(|key| object.value(key).is_some_and(|value| value != "\"\"")))
        }
        b"" => Piece::of(Kind::Unreadable),
        _ => Piece::of(Kind::Opener),
    }
}

/// The end, with everything that was said in all.
fn last(object: &Object<'_>) -> Piece {
    let mut piece = Piece::of(Kind::Last);
    piece.finished = 1;
    if let Some(response) = object.value("response").and_then(|text| Object::read(text.as_bytes())) {
        output(&response, &mut piece.produced);
        piece.restates = true;
    }
    piece
}

fn failed(object: &Object<'_>) -> Piece {
    let response = object.value("response").and_then(|text| Object::read(text.as_bytes()));
    let error = response.as_ref().and_then(|response| response.value("error")).unwrap_or("{}");
    Piece::of(Kind::Error(error::read_event(error)))
}

fn meaningful_if(counts: impl FnOnce(&mut Produced) -> bool) -> Piece {
    let mut piece = Piece::of(Kind::Opener);
    if counts(&mut piece.produced) {
        piece.kind = Kind::Meaningful;
    }
    piece
}

/// As [`meaningful_if`], for what was counted already.
fn repeats(says: impl FnOnce(&mut Produced) -> bool) -> Piece {
    Piece { produced: Produced::default(), ..meaningful_if(says) }
}

/// Counts the items of `output`; answers whether they say anything. `None` where there is no such list.
fn output(response: &Object<'_>, produced: &mut Produced) -> Option<bool> {
    let items: Vec<Item<'_>> = serde_json::from_str(response.value("output")?).ok()?;
    let mut says = false;
    for item in &items {
        says |= item.count(produced);
    }
    Some(says)
}

fn part<'a, T: Deserialize<'a>>(object: &Object<'a>, key: &str) -> Option<T> {
    serde_json::from_str(object.value(key)?).ok()
}

impl Piece {
    /// Usage and tier of a response, as far as it names them.
    fn take_from(&mut self, response: &Object<'_>) {
        self.tier = tier(response);
        let Some(usage) = response.value("usage") else { return };
        let report = Report(&RESPONSE_NAMES).deserialize(&mut serde_json::Deserializer::from_str(usage));
        let reported = report.ok().flatten();
        // It comes at the end, when there is no more to use.
        let reported = reported.map(|reported| Reported { standing: Standing::Final, ..reported });
        self.usage = Some(reported.map_or(UsageReport::Unbelievable, UsageReport::Believable));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::stream::sse::Scanner;
    use crate::verdict::Reason;

    fn shape() -> Shape {
        Shape {
            fold: false,
            stream: true,
            choices: 1,
            echoed_bytes: 0,
            wants_usage: true,
            public_model: "gpt-a".into(),
            request_id: "r".into(),
        }
    }

    fn read(data: &str) -> (Piece, String) {
        let mut scanner = Scanner::default();
        scanner.push(format!("data: {data}\n\n").as_bytes());
        let found = scanner.next_event().unwrap();
        let piece = event(&found, &shape());
        let out = text::apply(&found.data.unwrap(), &mut piece.edits.clone());
        (piece, String::from_utf8(out).unwrap())
    }

    fn piece(data: &str) -> Piece {
        read(data).0
    }

    fn response(kind: &str, fields: &str) -> String {
        format!(
            r#"{{"type":"response.{kind}","sequence_number":7,"response":{{"id":"resp_1","object":"response","model":"up-a"{fields}}}}}"#
        )
    }

    const USAGE: &str = r#","usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":60},"output_tokens":50,"output_tokens_details":{"reasoning_tokens":30},"total_tokens":150}"#;

    #[test]
    fn openers_are_not_an_answer() {
        for data in [
            &response("created", r#","status":"in_progress","output":[],"usage":null,"error":null"#),
            &response("queued", ""),
            &response("in_progress", r#","output":[]"#),
            r#"{"type":"response.output_item.added","item":{"type":"message","role":"assistant","content":[]}}"#,
            r#"{"type":"response.output_item.added","item":{"type":"reasoning","summary":[]}}"#,
            r#"{"type":"response.content_part.added","part":{"type":"output_text","text":"","annotations":[]}}"#,
            r#"{"type":"response.output_text.delta","delta":""}"#,
            r#"{"type":"response.output_text.done","text":""}"#,
            r#"{"type":"response.something_new","x":1}"#,
        ] {
            assert_eq!(piece(data).kind, Kind::Opener, "{data}");
        }
        assert_eq!(piece("[DONE]").kind, Kind::Ping);
    }

    #[test]
    fn content_reasoning_and_tools_are_an_answer() {
        for (data, bytes, calls) in [
            (r#"{"type":"response.output_text.delta","delta":"H\u00e9\n"}"#, 4, 0),
            (r#"{"type":"response.refusal.delta","delta":"no"}"#, 2, 0),
            (r#"{"type":"response.reasoning_text.delta","delta":"hm"}"#, 2, 0),
            (r#"{"type":"response.reasoning_summary_text.delta","delta":"hm"}"#, 2, 0),
            (r#"{"type":"response.function_call_arguments.delta","delta":"{\"a\":"}"#, 5, 0),
            (
                r#"{"type":"response.output_item.added","item":{"type":"function_call","name":"get","arguments":""}}"#,
                3,
                1,
            ),
            (
                r#"{"type":"response.output_item.added","item":{"type":"web_search_call","status":"in_progress"}}"#,
                0,
                0,
            ),
            (r#"{"type":"response.output_text.done","text":"Hello"}"#, 0, 0),
            (
                r#"{"type":"response.output_item.done","item":{"type":"function_call","name":"get","arguments":"{}"}}"#,
                0,
                0,
            ),
            (r#"{"type":"response.audio.delta","delta":"AAAA"}"#, 0, 0),
        ] {
            let piece = piece(data);
            assert_eq!(piece.kind, Kind::Meaningful, "{data}");
            assert_eq!(piece.produced, Produced { text_bytes: bytes, tool_calls: calls }, "{data}");
        }
    }

    #[test]
    fn the_last_event_carries_the_usage_and_everything_that_was_said() {
        let output = r#","output":[{"type":"reasoning","summary":[]},{"type":"message","content":[{"type":"output_text","text":"Hello"}]},{"type":"function_call","name":"f","arguments":"{}"}]"#;
        for kind in ["completed", "incomplete"] {
            let (last, seen) = read(&response(kind, &format!("{output}{USAGE}")));
            assert_eq!(
                (&last.kind, last.restates, last.finished, last.sequence),
                (&Kind::Last, true, 1, Some(7))
            );
            assert_eq!(last.produced, Produced { text_bytes: 8, tool_calls: 1 });
            let Some(UsageReport::Believable(usage)) = last.usage else { panic!("{last:?}") };
            assert_eq!((usage.input, usage.cache_read, usage.output), (Some(40), Some(60), Some(50)));
            assert_eq!((usage.reasoning, usage.standing), (Some(30), Standing::Final));
            assert!(seen.contains(r#""model":"gpt-a""#) && !seen.contains("up-a"), "{seen}");
        }
    }

    #[test]
    fn failures_stand_for_their_status() {
        let status = |data: &str| {
            let Kind::Error(error) = piece(data).kind else { panic!("no error: {data}") };
            error.status
        };
        for (code, expected) in [
            ("rate_limit_exceeded", 429),
            ("server_error", 500),
            ("invalid_prompt", 400),
            ("vector_store_timeout", 504),
        ] {
            let error = format!(r#","status":"failed","error":{{"code":"{code}","message":"x"}}"#);
            assert_eq!(status(&response("failed", &error)), expected, "{code}");
        }
        assert_eq!(status(&response("failed", r#","error":null"#)), 500);
        assert_eq!(
            status(r#"{"type":"error","code":"rate_limit_exceeded","message":"x","param":null}"#),
            429
        );
        assert_eq!(status(r#"{"type":"error","error":{"type":"invalid_request_error","message":"x"}}"#), 400);
        assert!(
            piece(&response("failed", USAGE)).usage.is_some(),
            "a caller who saw its beginning pays for it"
        );
        for data in ["hello", "[]", "{}", r#"{"choices":[]}"#] {
            assert_eq!(piece(data).kind, Kind::Unreadable, "{data}");
        }
    }

    #[test]
    fn our_error_has_the_operations_shape_and_the_next_number() {
        let event = error_event(&Rejection::new(Reason::UpstreamFailed, "It broke."), Some(11));
        let text = String::from_utf8(event.to_vec()).unwrap();
        let data: Value =
            serde_json::from_str(text.strip_prefix("event: error\ndata: ").unwrap().trim()).unwrap();
        assert_eq!((&data["type"], &data["code"]), (&json!("error"), &json!("upstream_failed")));
        assert_eq!((&data["sequence_number"], &data["param"]), (&json!(12), &Value::Null));
    }

    #[test]
    fn a_whole_answer_is_read() {
        let body = |status: &str, output: &str, error: &str| {
            format!(
                r#"{{"id":"resp_1","object":"response","status":"{status}","error":{error},"model":"up-a","output":{output}{USAGE},"service_tier":"flex"}}"#
            )
        };
        let said = r#"[{"type":"message","content":[{"type":"output_text","text":"Hello"}]}]"#;
        let piece = whole(body("completed", said, "null").as_bytes(), &shape());
        assert_eq!((&piece.kind, piece.produced.text_bytes, piece.edits.len()), (&Kind::Meaningful, 5, 1));
        assert!(piece.usage.is_some() && piece.tier.is_some());
        let kind = |text: String| whole(text.as_bytes(), &shape()).kind;
        assert_eq!(kind(body("incomplete", "[]", "null")), Kind::Meaningful);
        assert_eq!(kind(body("queued", "[]", "null")), Kind::Opener);
        let failed = body("failed", "[]", r#"{"code":"rate_limit_exceeded","message":"x"}"#);
        assert!(matches!(kind(failed), Kind::Error(e) if e.status == 429));
        assert!(matches!(kind(body("failed", "[]", "null")), Kind::Error(e) if e.status == 500));
        for text in ["", "{}", "[]", r#"{"output":{}}"#, r#"{"choices":[]}"#] {
            assert_eq!(kind(text.to_owned()), Kind::Unreadable, "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_events_never_panic(data in "\\PC{0,60}", json in "[\\[\\]{}\",:typeoutd0-9.-]{0,60}") {
            for text in [data, json] {
                let event = Event { raw: Bytes::new(), name: Bytes::new(), data: Some(text.clone().into()), data_span: None };
                let _ = super::event(&event, &shape());
                let _ = whole(text.as_bytes(), &shape());
            }
        }
    }
}
