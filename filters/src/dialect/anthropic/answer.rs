//! A message: what each of its events is, what was used, what the caller must not see.
//!
//! `message_start` opens and carries the prompt's usage with an early count of the output;
//! `message_delta` finishes and restates usage, cumulative, as much of it as it likes; `message_stop`
//! ends. An event that nobody knows is an opener: it waits for the commit and passes after it.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::super::fields::{size, string_bytes};
use super::super::object::Object;
use super::super::{Kind, Piece, Shape};
use super::error;
use crate::meter::{Produced, UsageReport};
use crate::money::price::Tier;
use crate::stream::sse::Event;
use crate::stream::usage::{Reported, Standing, tokens};

/// What an event is.
#[must_use]
pub fn event(event: &Event, shape: &Shape) -> Piece {
    let Some(data) = event.data.as_deref() else { return Piece::of(Kind::Ping) };
    let named = event.name.as_ref() == b"error";
    let Some(object) = Object::read(data) else {
        return Piece::of(if named { Kind::Error(error::read_event(data)) } else { Kind::Unreadable });
    };
    if named || is_error(&object) {
        return Piece::of(Kind::Error(error::read_event(data)));
    }
    let name = object.value("type").map(|name| name.trim_matches('"').as_bytes());
    match name.unwrap_or_else(|| event.name.as_ref()) {
        b"message_start" => started(&object, shape),
        b"content_block_start" => block_started(&object),
        b"content_block_delta" => block_grew(&object),
        b"message_delta" => finished(&object),
        b"message_stop" => Piece::of(Kind::Done),
        b"ping" => Piece::of(Kind::Ping),
        b"" => Piece::of(Kind::Unreadable),
        _ => Piece::of(Kind::Opener),
    }
}

/// What a whole answer is.
#[must_use]
pub fn whole(body: &[u8], shape: &Shape) -> Piece {
    let Some(object) = Object::read_sound(body) else { return Piece::of(Kind::Unreadable) };
    if is_error(&object) {
        return Piece::of(Kind::Error(error::read_event(body)));
    }
    let Some(blocks) =
        object.value("content").and_then(|text| serde_json::from_str::<Vec<Block<'_>>>(text).ok())
    else {
        return Piece::of(Kind::Unreadable);
    };
    let mut piece = Piece::of(Kind::Meaningful);
    let mut said = object.value("stop_reason").is_some();
    for block in &blocks {
        said |= block.count(&mut piece.produced);
    }
    if !said {
        // Neither a word nor a reason why there is none: the same as a stream of openers alone.
        piece.kind = Kind::Opener;
    }
    piece.finished = 1;
    piece.take_usage(object.value("usage"), Standing::Final);
    piece.edits = object.rename_model(&shape.public_model);
    piece
}

fn is_error(object: &Object<'_>) -> bool {
    object.value("type") == Some("\"error\"") || object.value("error").is_some()
}

fn started(object: &Object<'_>, shape: &Shape) -> Piece {
    let Some(message) = object.value("message").and_then(|text| Object::read(text.as_bytes())) else {
        return Piece::of(Kind::Unreadable);
    };
    let mut piece = Piece::of(Kind::Opener);
    piece.take_usage(message.value("usage"), Standing::Early);
    piece.edits = object.rename_model_inside("message", &shape.public_model);
    piece
}

fn block_started(object: &Object<'_>) -> Piece {
    let Some(block) = part::<Block<'_>>(object, "content_block") else { return Piece::of(Kind::Unreadable) };
    let mut piece = Piece::of(Kind::Opener);
    if block.count(&mut piece.produced) {
        piece.kind = Kind::Meaningful;
    }
    piece
}

fn block_grew(object: &Object<'_>) -> Piece {
    let Some(delta) = part::<Delta<'_>>(object, "delta") else { return Piece::of(Kind::Unreadable) };
    let mut piece = Piece::of(Kind::Opener);
    if delta.count(&mut piece.produced) {
        piece.kind = Kind::Meaningful;
    }
    piece.text = delta.text.and_then(|text| object.inside(text.get()));
    piece
}

fn finished(object: &Object<'_>) -> Piece {
    let stop = object.value("delta").and_then(|text| Object::read(text.as_bytes())?.value("stop_reason"));
    let mut piece = Piece::of(if stop.is_some() { Kind::Meaningful } else { Kind::Opener });
    piece.finished = u64::from(stop.is_some());
    let standing = if piece.finished > 0 { Standing::Final } else { Standing::SoFar };
    piece.take_usage(object.value("usage"), standing);
    piece
}

fn part<'a, T: Deserialize<'a>>(object: &Object<'a>, key: &str) -> Option<T> {
    serde_json::from_str(object.value(key)?).ok()
}

impl Piece {
    fn take_usage(&mut self, text: Option<&str>, standing: Standing) {
        let Some(text) = text else { return };
        let usage: Value = serde_json::from_str(text).unwrap_or_default();
        self.usage =
            Some(read_usage(&usage, standing).map_or(UsageReport::Unbelievable, UsageReport::Believable));
        self.tier = match usage.get("service_tier").and_then(Value::as_str) {
            Some("standard") => Some(Tier::Standard),
            Some("priority") => Some(Tier::Priority),
            Some("batch") => Some(Tier::Batch),
            _ => None,
        };
    }
}

/// What is named, as it is named: `input_tokens` leaves out what was read from a cache or written to
/// one. What compacting a long conversation took is billed, but no part of the totals: it stands in
/// `iterations` alone. `None` when a count cannot be believed.
fn read_usage(usage: &Value, standing: Standing) -> Option<Reported> {
    let fields = usage.as_object()?;
    let named = |value: Option<&Value>| match value {
        None | Some(Value::Null) => Some(None),
        Some(value) => tokens(value).map(Some),
    };
    let iterations =
        fields.get("iterations").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let is_compaction = |it: &&Value| it.get("type").and_then(Value::as_str) == Some("compaction");
    let total = |key: &str| {
        let compacted = iterations.iter().filter(is_compaction).filter_map(|it| it.get(key));
        compacted.map(|count| named(Some(count))).try_fold(named(fields.get(key))?, |sum, more| {
            Some(match (sum, more?) {
                (None, more) => more,
                (sum, None) => sum,
                (Some(sum), Some(more)) => Some(sum.saturating_add(more)),
            })
        })
    };
    let written = |key: &str| named(fields.get("cache_creation").and_then(|parts| parts.get(key)));
    Some(Reported {
        input: total("input_tokens")?,
        cache_read: total("cache_read_input_tokens")?,
        cache_write: total("cache_creation_input_tokens")?,
        cache_write_5m: written("ephemeral_5m_input_tokens")?,
        cache_write_1h: written("ephemeral_1h_input_tokens")?,
        output: total("output_tokens")?,
        standing,
        ..Reported::default()
    })
}

/// A block of content. Fields of kinds that nobody knows yet may have any type.
#[derive(Deserialize)]
struct Block<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    thinking: Option<&'a RawValue>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

impl Block<'_> {
    /// Counts what it says; answers whether it is more than an empty beginning.
    fn count(&self, produced: &mut Produced) -> bool {
        match self.kind.as_deref() {
            Some("text") => says(self.text, produced),
            Some("thinking") => says(self.thinking, produced),
            Some("redacted_thinking") => {
                says(self.data, produced);
                true
            }
            Some("tool_use" | "server_tool_use" | "mcp_tool_use") => {
                produced.tool_calls += 1;
                says(self.name, produced);
                // In a stream it is empty here and comes piece by piece.
                let input = self.input.map_or("", RawValue::get);
                produced.text_bytes += if matches!(input, "{}" | "null") { 0 } else { size(input) };
                true
            }
            // Results of server tools and what comes next: content, but not the model's words.
            _ => true,
        }
    }
}

/// What a block grows by.
#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    thinking: Option<&'a RawValue>,
    #[serde(borrow)]
    partial_json: Option<&'a RawValue>,
}

impl Delta<'_> {
    /// As [`Block::count`].
    fn count(&self, produced: &mut Produced) -> bool {
        match self.kind.as_deref() {
            Some("text_delta") => says(self.text, produced),
            Some("thinking_delta") => says(self.thinking, produced),
            Some("input_json_delta") => says(self.partial_json, produced),
            // Signatures, citations and what comes next: content without words.
            _ => true,
        }
    }
}

fn says(text: Option<&RawValue>, produced: &mut Produced) -> bool {
    let bytes = text.map_or(0, |text| string_bytes(text.get()));
    produced.text_bytes += bytes;
    bytes > 0
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::json;
    use crate::stream::sse::Scanner;
    use crate::verdict::UpstreamError;

    fn shape() -> Shape {
        Shape {
            stream: true,
            fold: false,
            choices: 1,
            echoed_bytes: 0,
            wants_usage: true,
            public_model: "claude-a".into(),
            request_id: "r".into(),
        }
    }

    fn read(raw: &str) -> (Piece, String) {
        let mut scanner = Scanner::default();
        scanner.push(format!("{raw}\n\n").as_bytes());
        let found = scanner.next_event().unwrap();
        let piece = event(&found, &shape());
        let data = found.data.unwrap_or_default();
        let out = json::apply(&data, &mut piece.edits.clone());
        (piece, String::from_utf8(out).unwrap())
    }

    fn piece(data: &str) -> Piece {
        read(&format!("data: {data}")).0
    }

    fn start(usage: &str) -> String {
        format!(
            r#"{{"type":"message_start","message":{{"id":"m","model":"up-c","content":[],"usage":{usage}}}}}"#
        )
    }

    fn block(block: &str) -> String {
        format!(r#"{{"type":"content_block_start","index":0,"content_block":{block}}}"#)
    }

    fn delta(delta: &str) -> String {
        format!(r#"{{"type":"content_block_delta","index":0,"delta":{delta}}}"#)
    }

    fn report(piece: &Piece) -> Reported {
        match piece.usage {
            Some(UsageReport::Believable(reported)) => reported,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn openers_are_not_an_answer() {
        for data in [
            start("{}"),
            block(r#"{"type":"text","text":""}"#),
            block(r#"{"type":"thinking","thinking":"","signature":""}"#),
            delta(r#"{"type":"text_delta","text":""}"#),
            r#"{"type":"content_block_stop","index":0}"#.to_owned(),
            r#"{"type":"message_delta","delta":{"stop_reason":null}}"#.to_owned(),
            r#"{"type":"something_new","x":1}"#.to_owned(),
        ] {
            assert_eq!(piece(&data).kind, Kind::Opener, "{data}");
        }
        assert_eq!(piece(r#"{"type":"ping"}"#).kind, Kind::Ping);
        assert_eq!(read(": hello").0.kind, Kind::Ping);
    }

    #[test]
    fn content_reasoning_tools_and_finishes_are_an_answer() {
        for (data, bytes, calls) in [
            (delta(r#"{"type":"text_delta","text":"Hé\n"}"#), 4, 0),
            (delta(r#"{"type":"thinking_delta","thinking":"hm"}"#), 2, 0),
            (delta(r#"{"type":"input_json_delta","partial_json":"{\"a\":"}"#), 5, 0),
            (delta(r#"{"type":"signature_delta","signature":"abc"}"#), 0, 0),
            (delta(r#"{"type":"citations_delta","citation":{}}"#), 0, 0),
            (delta(r#"{"type":"something_new","text":{"a":1}}"#), 0, 0),
            (block(r#"{"type":"text","text":"H"}"#), 1, 0),
            (block(r#"{"type":"tool_use","id":"t","name":"get","input":{}}"#), 3, 1),
            (block(r#"{"type":"redacted_thinking","data":"abcd"}"#), 4, 0),
            (block(r#"{"type":"web_search_tool_result","content":[]}"#), 0, 0),
        ] {
            let piece = piece(&data);
            assert_eq!(piece.kind, Kind::Meaningful, "{data}");
            assert_eq!(piece.produced, Produced { text_bytes: bytes, tool_calls: calls }, "{data}");
        }
        let last = piece(r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#);
        assert!(last.finished == 1 && last.kind == Kind::Meaningful);
    }

    #[test]
    fn the_end_and_errors_are_known() {
        assert_eq!(piece(r#"{"type":"message_stop"}"#).kind, Kind::Done);
        let busy = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
        for raw in [format!("event: error\ndata: {busy}"), format!("data: {busy}")] {
            let kind = read(&raw).0.kind;
            assert!(matches!(kind, Kind::Error(e) if e.status == 529 && e.message == "Overloaded"), "{raw}");
        }
        for raw in ["event: error\ndata: Overloaded", "event: error\ndata: {}", r#"data: {"error":"x"}"#] {
            assert!(matches!(read(raw).0.kind, Kind::Error(UpstreamError { status: 500, .. })), "{raw}");
        }
        for data in ["hello", "[]", r#"{"choices":[]}"#, r#"{"type":"message_start"}"#, &delta("1")] {
            assert_eq!(piece(data).kind, Kind::Unreadable, "{data}");
        }
        assert_eq!(read("event: message_stop\ndata: {}").0.kind, Kind::Done, "the name alone is enough");
    }

    #[test]
    fn the_public_name_of_the_model_is_shown() {
        let (_, seen) = read(&format!("data: {}", start("{}")));
        assert!(seen.contains(r#""model":"claude-a""#) && !seen.contains("up-c"), "{seen}");
    }

    #[test]
    fn a_start_reports_early_and_a_finish_for_good() {
        let usage = r#"{"input_tokens":20,"cache_read_input_tokens":5000,"cache_creation_input_tokens":300,"cache_creation":{"ephemeral_5m_input_tokens":200,"ephemeral_1h_input_tokens":100},"output_tokens":1,"service_tier":"standard"}"#;
        let opener = piece(&start(usage));
        let early = report(&opener);
        assert_eq!((early.input, early.cache_read, early.output), (Some(20), Some(5_000), Some(1)));
        assert_eq!((early.standing, opener.tier), (Standing::Early, Some(Tier::Standard)));
        let finish = piece(
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}"#,
        );
        let (usage, clamped) = early.replaced_by(report(&finish)).usage(0);
        assert_eq!((usage.input, usage.cache_read, usage.output, clamped), (20, 5_000, 15, false));
        assert_eq!((usage.cache_write_5m, usage.cache_write_1h), (200, 100));
        let midway = piece(r#"{"type":"message_delta","delta":{},"usage":{"output_tokens":7}}"#);
        assert_eq!(report(&midway).standing, Standing::SoFar);
    }

    #[test]
    fn what_a_compaction_took_is_part_of_what_is_paid() {
        let usage = r#"{"input_tokens":23000,"output_tokens":1000,"iterations":[{"type":"compaction","input_tokens":180000,"output_tokens":3500,"cache_read_input_tokens":7},{"type":"message","input_tokens":23000,"output_tokens":1000}]}"#;
        let found = report(&piece(&start(usage)));
        assert_eq!((found.input, found.cache_read, found.output), (Some(203_000), Some(7), Some(4_500)));
        let odd = r#"{"input_tokens":1,"iterations":[{"type":"compaction","input_tokens":-5}]}"#;
        assert_eq!(piece(&start(odd)).usage, Some(UsageReport::Unbelievable));
        let other =
            r#"{"input_tokens":1,"output_tokens":2,"iterations":[1,{"type":"message","input_tokens":1}]}"#;
        assert_eq!(report(&piece(&start(other))).input, Some(1));
    }

    #[test]
    fn counts_that_cannot_be_believed_are_not() {
        for usage in [r#"{"input_tokens":-1}"#, r#"{"output_tokens":2.5}"#, "[]", "7"] {
            assert_eq!(piece(&start(usage)).usage, Some(UsageReport::Unbelievable), "{usage}");
        }
        assert_eq!(piece(&start("null")).usage, None);
        assert_eq!(report(&piece(&start(r#"{"input_tokens":"12"}"#))).input, Some(12));
    }

    #[test]
    fn a_whole_answer_that_says_nothing_is_none() {
        let of = |content: &str, reason: &str| {
            let text = format!(r#"{{"type":"message","content":{content},"stop_reason":{reason}}}"#);
            whole(text.as_bytes(), &shape()).kind
        };
        assert_eq!(of("[]", "null"), Kind::Opener);
        assert_eq!(of(r#"[{"type":"text","text":""}]"#, "null"), Kind::Opener);
        assert_eq!(of("[]", "\"end_turn\""), Kind::Meaningful);
        assert_eq!(of("[]", "\"pause_turn\""), Kind::Meaningful);
        assert_eq!(of(r#"[{"type":"text","text":"a"}]"#, "null"), Kind::Meaningful);
    }

    #[test]
    fn a_whole_answer_is_read() {
        let text = r#"{"id":"m","type":"message","model":"up-c","content":[{"type":"thinking","thinking":"hm","signature":"s"},{"type":"text","text":"Hello"},{"type":"tool_use","id":"t","name":"f","input":{"a":1}}],"stop_reason":"tool_use","usage":{"input_tokens":12,"output_tokens":50,"service_tier":"priority"}}"#;
        let piece = whole(text.as_bytes(), &shape());
        assert_eq!(
            (&piece.kind, piece.produced.text_bytes, piece.tier),
            (&Kind::Meaningful, 15, Some(Tier::Priority))
        );
        assert_eq!((report(&piece).output, report(&piece).standing), (Some(50), Standing::Final));
        assert_eq!(piece.edits.len(), 1);
        for text in ["", "<html></html>", "{}", "[]", r#"{"content":"x"}"#, r#"{"choices":[]}"#] {
            assert_eq!(whole(text.as_bytes(), &shape()).kind, Kind::Unreadable, "{text}");
        }
        let error = r#"{"type":"error","error":{"type":"rate_limit_error","message":"slow"}}"#;
        assert!(matches!(whole(error.as_bytes(), &shape()).kind, Kind::Error(e) if e.status == 429));
    }

    proptest! {
        #[test]
        fn arbitrary_events_never_panic(data in "\\PC{0,60}", json in "[\\[\\]{}\",:messagdlt_0-9.-]{0,60}") {
            for text in [data, json] {
                let raw = Bytes::from(text);
                let found = Event { raw: raw.clone(), name: Bytes::new(), data: Some(raw.clone()), data_span: Some(0..raw.len()) };
                let _ = event(&found, &shape());
                let _ = whole(&raw, &shape());
            }
        }
    }
}
