//! A chat completion's answer: what each event is, what was used, what the caller must not see.
//!
//! Text completions differ from it in what a choice says, and in nothing else: `event_of` and
//! `whole_of` read both.

use std::borrow::Cow;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeSeed, IgnoredAny};

use super::super::fields::size;
use super::super::object::Object;
use super::super::{Kind, Piece, Shape};
use super::error;
use super::usage::{COMPLETION_NAMES, Report};
use crate::json::{self, Edit};
use crate::meter::{Produced, UsageReport};
use crate::money::price::Tier;
use crate::stream::sse::Event;

/// What a choice says, in a stream or whole.
pub(super) trait Choice<'a>: Deserialize<'a> {
    /// Counts what it says; answers whether it says anything.
    fn count(&self, produced: &mut Produced) -> bool;
    /// Why it ended, where it did.
    fn finish_reason(&self) -> Option<&str>;
    /// Its text as it stands in the event.
    fn text(&self) -> Option<&'a str>;
}

/// What an event is.
#[must_use]
pub fn event(event: &Event, shape: &Shape) -> Piece {
    event_of::<ChatChoice<'_>>(event, shape)
}

/// What a whole answer is.
#[must_use]
pub fn whole(body: &[u8], shape: &Shape) -> Piece {
    whole_of::<ChatChoice<'_>>(body, shape)
}

pub(super) fn event_of<'a, C: Choice<'a>>(event: &'a Event, shape: &Shape) -> Piece {
    let Some(data) = event.data.as_deref() else { return Piece::of(Kind::Ping) };
    if data.trim_ascii().is_empty() || event.name.as_ref() == b"ping" {
        return Piece::of(Kind::Ping);
    }
    if data.trim_ascii() == b"[DONE]" {
        return Piece::of(Kind::Done);
    }
    let Some(Answer { object, choices, usage }) = Answer::<C>::read(data, false) else {
        return Piece::of(Kind::Unreadable);
    };
    if let Some(text) = error_in(&object, event.name.as_ref() == b"error") {
        return Piece::of(Kind::Error(error::read_event(text)));
    }
    // Some servers report usage in an object of its own, without any choices.
    let alone = object.value("choices").is_none() && usage.is_some();
    let found = if alone { Some(vec![]) } else { choices };
    // Behind the commit even what is not understood passes, but not as if nobody had looked at it.
    let edits = edits(&object, shape, !shape.wants_usage);
    let Some(choices) = found else { return Piece { edits, ..Piece::of(Kind::Unreadable) } };
    let mut piece = Piece { edits, ..Piece::of(Kind::Opener) };
    for choice in &choices {
        let says_more = choice.count(&mut piece.produced);
        // Some servers send an empty reason where others send none.
        let finishes = choice.finish_reason().is_some_and(|reason| !reason.is_empty());
        piece.finished += u64::from(finishes);
        if says_more || finishes {
            piece.kind = Kind::Meaningful;
        }
    }
    if let [only] = choices.as_slice() {
        piece.text = only.text().and_then(|text| object.inside(text));
    }
    piece.usage = usage;
    piece.tier = tier(&object);
    if choices.is_empty() && piece.usage.is_some() && !shape.wants_usage {
        piece.kind = Kind::UsageOnly;
    }
    piece
}

pub(super) fn whole_of<'a, C: Choice<'a>>(body: &'a [u8], shape: &Shape) -> Piece {
    let Some(Answer { object, choices, usage }) = Answer::<C>::read(body, true) else {
        return Piece::of(Kind::Unreadable);
    };
    if let Some(text) = error_in(&object, false) {
        return Piece::of(Kind::Error(error::read_event(text)));
    }
    let Some(choices) = choices else { return Piece::of(Kind::Unreadable) };
    let mut piece = Piece::of(Kind::Meaningful);
    let mut said = false;
    for choice in &choices {
        said |= choice.finish_reason().is_some();
        said |= choice.count(&mut piece.produced);
    }
    if !said {
        // Neither a word nor a reason why there is none: the same as a stream of openers alone.
        piece.kind = Kind::Opener;
    }
    piece.finished = shape.choices;
    piece.usage = usage;
    piece.tier = tier(&object);
    piece.edits = edits(&object, shape, false);
    piece
}

/// An answer or an event, read once: choices and usage on the way past them. Of two with one name the first counts.
struct Answer<'a, C> {
    object: Object<'a>,
    /// `None` where there are none, or none that are understood.
    choices: Option<Vec<C>>,
    usage: Option<UsageReport>,
}

impl<'a, C: Choice<'a>> Answer<'a, C> {
    fn read(text: &'a [u8], sound: bool) -> Option<Self> {
        let (mut choices, mut report) = (None, None);
        let object = Object::read_taking(text, sound, |name, value| match name {
            "choices" if choices.is_none() => take(&mut choices, value, PhantomData::<Vec<C>>),
            "usage" if report.is_none() => take(&mut report, value, Report(&COMPLETION_NAMES)),
            _ => None,
        })?;
        let believed = report.flatten().flatten();
        let reported = || believed.map_or(UsageReport::Unbelievable, UsageReport::Believable);
        let usage = object.value("usage").map(|_| reported());
        Some(Self { object, choices: choices.flatten(), usage })
    }
}

/// Reads the value at the head of `text` into `place`; answers how long it is. `None` for what is not of its kind.
fn take<'a, S: DeserializeSeed<'a>>(
    place: &mut Option<Option<S::Value>>,
    text: &'a str,
    kind: S,
) -> Option<usize> {
    let mut reader = serde_json::Deserializer::from_str(text);
    place.insert(kind.deserialize(&mut reader).ok()).as_ref()?;
    Some(reader.into_iter::<IgnoredAny>().byte_offset())
}

/// The error in it: a member of that name, or the object itself where the event or its `type` says
/// so (the shape of the responses API).
pub(super) fn error_in<'a>(object: &Object<'a>, named: bool) -> Option<&'a str> {
    object.value("error").or_else(|| {
        let says_so = named || object.value("type") == Some("\"error\"");
        says_so.then(|| object.text())
    })
}

/// The tier that served. `auto` only repeats what was asked for.
pub(super) fn tier(object: &Object<'_>) -> Option<Tier> {
    match object.value("service_tier")?.trim_matches('"') {
        "default" => Some(Tier::Standard),
        "priority" => Some(Tier::Priority),
        "flex" => Some(Tier::Flex),
        "batch" => Some(Tier::Batch),
        _ => None,
    }
}

/// The public model name in, and usage out where nobody asked for it.
fn edits(object: &Object<'_>, shape: &Shape, strip_usage: bool) -> Vec<Edit> {
    let mut edits = object.rename_model(&shape.public_model);
    if strip_usage {
        let usage = json::cuts(object.text(), object.members(), |m| m.key == "usage");
        edits.extend(usage.into_iter().map(|span| Edit { span, with: vec![] }));
    }
    edits
}

#[derive(Deserialize)]
struct ChatChoice<'a> {
    #[serde(borrow)]
    delta: Option<Said<'a>>,
    #[serde(borrow)]
    message: Option<Said<'a>>,
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

impl<'a> Choice<'a> for ChatChoice<'a> {
    fn count(&self, produced: &mut Produced) -> bool {
        let mut says = false;
        for said in self.delta.iter().chain(&self.message) {
            says |= said.count(produced);
        }
        says
    }

    fn finish_reason(&self) -> Option<&str> {
        self.finish_reason.as_deref()
    }

    fn text(&self) -> Option<&'a str> {
        self.delta.as_ref()?.content.as_ref().map(|content| content.0.get())
    }
}

/// What a delta or a message says. Reasoning has several names among compatible servers.
#[derive(Deserialize)]
struct Said<'a> {
    #[serde(borrow)]
    content: Option<Spoken<'a>>,
    #[serde(borrow)]
    refusal: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning: Option<Spoken<'a>>,
    #[serde(borrow)]
    tool_calls: Option<Vec<ToolCall<'a>>>,
    #[serde(borrow)]
    function_call: Option<Function<'a>>,
    audio: Option<IgnoredAny>,
}

/// Text, or a list of parts of which only the size matters.
#[derive(Deserialize)]
#[serde(transparent)]
struct Spoken<'a>(#[serde(borrow)] &'a serde_json::value::RawValue);

impl Spoken<'_> {
    /// Bytes of text: exact for a string without escapes, an upper bound else.
    fn bytes(&self) -> u64 {
        let text = self.0.get();
        let text = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')).unwrap_or(text);
        if matches!(text, "null" | "[]" | "{}") { 0 } else { size(text) }
    }
}

#[derive(Deserialize)]
struct ToolCall<'a> {
    #[serde(borrow)]
    function: Option<Function<'a>>,
}

#[derive(Deserialize)]
struct Function<'a> {
    #[serde(borrow)]
    name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    arguments: Option<Cow<'a, str>>,
}

impl Said<'_> {
    /// Counts what it says; answers whether it says anything.
    fn count(&self, produced: &mut Produced) -> bool {
        let text = |part: &Option<Cow<'_, str>>| part.as_deref().map_or(0, size);
        let raw = |part: &Option<Spoken<'_>>| part.as_ref().map_or(0, Spoken::bytes);
        let mut bytes = raw(&self.content) + text(&self.refusal);
        bytes += text(&self.reasoning_content).max(raw(&self.reasoning));
        let calls = self.tool_calls.as_deref().unwrap_or_default();
        let functions = calls.iter().filter_map(|call| call.function.as_ref());
        for function in functions.chain(&self.function_call) {
            bytes += text(&function.name) + text(&function.arguments);
            produced.tool_calls += u64::from(function.name.is_some());
        }
        produced.text_bytes += bytes;
        bytes > 0 || !calls.is_empty() || self.function_call.is_some() || self.audio.is_some()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::stream::sse::Scanner;
    use crate::stream::usage::Reported;

    fn shape(wants_usage: bool) -> Shape {
        Shape {
            stream: true,
            fold: false,
            choices: 1,
            echoed_bytes: 0,
            wants_usage,
            public_model: "gpt-a".into(),
            request_id: "r".into(),
        }
    }

    fn piece(data: &str, wants_usage: bool) -> (Piece, String) {
        let mut scanner = Scanner::default();
        scanner.push(format!("data: {data}\n\n").as_bytes());
        let found = scanner.next_event().unwrap();
        let piece = event(&found, &shape(wants_usage));
        let data = found.data.unwrap();
        let out = json::apply(&data, &mut piece.edits.clone());
        (piece, String::from_utf8(out).unwrap())
    }

    #[test]
    fn usage_that_comes_twice_is_taken_out_twice_wherever_it_stands() {
        let says = r#""choices":[{"index":0,"delta":{"content":"a"}}]"#;
        for data in [
            format!(r#"{{"usage":{{"a":1}},"usage":{{"b":2}},{says}}}"#),
            format!(r#"{{"usage":null,{says} , "usage":{{"b":2}} , "usage":3}}"#),
        ] {
            let (_, seen) = piece(&data, false);
            assert!(json::check(seen.as_bytes()).is_ok() && !seen.contains("usage"), "{data} became {seen}");
        }
    }

    #[test]
    fn what_is_not_understood_shows_no_foreign_model_and_no_usage_either() {
        let (odd, seen) = piece(r#"{"choices":[{"finish_reason":1}],"model":"up-a","usage":{}}"#, false);
        assert_eq!(odd.kind, Kind::Unreadable);
        assert_eq!(seen, r#"{"choices":[{"finish_reason":1}],"model":"gpt-a"}"#);
    }

    fn chunk(delta: &str, finish: &str) -> String {
        format!(
            r#"{{"id":"c","model":"up-a","choices":[{{"index":0,"delta":{delta},"finish_reason":{finish}}}]}}"#
        )
    }

    fn usage(text: &str) -> Option<Reported> {
        Report(&COMPLETION_NAMES).deserialize(&mut serde_json::Deserializer::from_str(text)).unwrap()
    }

    #[test]
    fn openers_are_not_an_answer() {
        for delta in [r#"{"role":"assistant","content":""}"#, "{}", r#"{"role":"assistant","content":null}"#]
        {
            assert_eq!(piece(&chunk(delta, "null"), false).0.kind, Kind::Opener, "{delta}");
        }
        assert_eq!(piece(r#"{"choices":[]}"#, false).0.kind, Kind::Opener);
        assert_eq!(piece(r#"{"choices":[],"usage":null}"#, false).0.kind, Kind::Opener);
    }

    #[test]
    fn content_reasoning_tools_and_finishes_are_an_answer() {
        for delta in [
            r#"{"content":"H"}"#,
            r#"{"reasoning_content":"hm"}"#,
            r#"{"reasoning":"hm"}"#,
            r#"{"refusal":"no"}"#,
            r#"{"tool_calls":[{"index":0,"function":{"name":"f","arguments":""}}]}"#,
        ] {
            assert_eq!(piece(&chunk(delta, "null"), false).0.kind, Kind::Meaningful, "{delta}");
        }
        let (last, _) = piece(&chunk("{}", "\"stop\""), false);
        assert!(last.finished == 1 && last.kind == Kind::Meaningful);
    }

    #[test]
    fn usage_that_nobody_asked_for_is_hidden() {
        let alone = r#"{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;
        assert_eq!(piece(alone, false).0.kind, Kind::UsageOnly);
        assert_eq!(piece(alone, true).0.kind, Kind::Opener);
        let beside = r#"{"model":"gpt-a","choices":[{"delta":{"content":"x"}}],"usage":null}"#;
        assert_eq!(piece(beside, false).1, r#"{"model":"gpt-a","choices":[{"delta":{"content":"x"}}]}"#);
        assert_eq!(piece(beside, true).1, beside);
    }

    #[test]
    fn the_public_name_of_the_model_is_shown() {
        assert!(piece(&chunk("{}", "null"), true).1.contains(r#""model":"gpt-a""#));
    }

    #[test]
    fn the_end_and_errors_are_known() {
        assert_eq!(piece("[DONE]", false).0.kind, Kind::Done);
        for text in [
            r#"{"error":{"message":"busy","code":429}}"#,
            r#"{"type":"error","code":"429","message":"busy"}"#,
        ] {
            assert!(matches!(piece(text, false).0.kind, Kind::Error(e) if e.status == 429), "{text}");
        }
        assert_eq!(piece(r#"{"error":null,"choices":[]}"#, false).0.kind, Kind::Opener);
        for text in ["hello", "{\"x\":1}", "[]", "{\"choices\":1}"] {
            assert_eq!(piece(text, false).0.kind, Kind::Unreadable, "{text}");
        }
    }

    #[test]
    fn the_tier_that_served_is_read() {
        for (field, expected) in [
            (r#","service_tier":"default""#, Some(Tier::Standard)),
            (r#","service_tier":"priority""#, Some(Tier::Priority)),
            (r#","service_tier":"flex""#, Some(Tier::Flex)),
            (r#","service_tier":"auto""#, None),
            (r#","service_tier":null"#, None),
            ("", None),
        ] {
            assert_eq!(piece(&format!(r#"{{"choices":[]{field}}}"#), false).0.tier, expected, "{field}");
            let body = format!(r#"{{"choices":[]{field}}}"#);
            assert_eq!(whole(body.as_bytes(), &shape(false)).tier, expected, "{field}");
        }
    }

    #[test]
    fn cached_tokens_are_part_of_the_prompt() {
        let found = usage(
            r#"{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":60}}"#,
        );
        let found = found.unwrap();
        assert_eq!((found.input, found.cache_read, found.anomaly), (Some(40), Some(60), false));
    }

    #[test]
    fn parts_above_the_whole_are_clamped_and_flagged() {
        let found = usage(
            r#"{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":160}}"#,
        );
        let found = found.unwrap();
        assert_eq!((found.input, found.cache_read, found.anomaly), (Some(0), Some(100), true));
    }

    #[test]
    fn odd_numbers_are_read_and_impossible_ones_are_not_believed() {
        let found = usage(r#"{"prompt_tokens":10.0,"completion_tokens":"5"}"#).unwrap();
        assert_eq!((found.input, found.output), (Some(10), Some(5)));
        for text in [
            r#"{"prompt_tokens":-1,"completion_tokens":5}"#,
            r#"{"prompt_tokens":12.5,"completion_tokens":5}"#,
            r#"{"prompt_tokens":"many","completion_tokens":5}"#,
            r#"{"prompt_tokens":1e18,"completion_tokens":5}"#,
            r"{}",
        ] {
            assert_eq!(usage(text), None, "{text}");
        }
    }

    #[test]
    fn a_whole_answer_is_read_and_keeps_its_usage() {
        let text = r#"{"id":"c","model":"up-a","choices":[{"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;
        let piece = whole(text.as_bytes(), &shape(false));
        assert_eq!((piece.kind, piece.produced.text_bytes), (Kind::Meaningful, 5));
        assert!(matches!(piece.usage, Some(UsageReport::Believable(_))));
        assert_eq!(piece.edits.len(), 1, "the model, and not the usage");
        for text in ["", "<html></html>", "{}", "[]", r#"{"choices":null}"#, "data: {}"] {
            assert_eq!(whole(text.as_bytes(), &shape(false)).kind, Kind::Unreadable, "{text}");
        }
    }

    /// How choices and usage were read before: each by itself, of an object that had been passed over already.
    fn read_by_parts(text: &[u8], sound: bool) -> Option<(Option<Vec<ChatChoice<'_>>>, Option<UsageReport>)> {
        let object = if sound { Object::read_sound(text)? } else { Object::read(text)? };
        let choices = object.value("choices").and_then(|text| serde_json::from_str(text).ok());
        let usage = object.value("usage").map(|text| {
            let report = Report(&COMPLETION_NAMES).deserialize(&mut serde_json::Deserializer::from_str(text));
            report.ok().flatten().map_or(UsageReport::Unbelievable, UsageReport::Believable)
        });
        Some((choices, usage))
    }

    fn said(choices: Option<&Vec<ChatChoice<'_>>>) -> Option<Vec<String>> {
        let of = |choice: &ChatChoice<'_>| {
            let mut produced = Produced::default();
            let says = choice.count(&mut produced);
            format!("{says} {produced:?} {:?} {:?}", choice.finish_reason(), choice.text())
        };
        choices.map(|choices| choices.iter().map(of).collect())
    }

    fn answers() -> impl Strategy<Value = Vec<u8>> {
        let deep =
            |levels: usize| format!(r#""choices":[{{"x":{}{}}}]"#, "[".repeat(levels), "]".repeat(levels));
        let mut members: Vec<String> = [
            r#""choices":[]"#,
            r#""choices":null"#,
            r#""choices":{}"#,
            r#""choices":[{"delta":{"content":"a\nb"},"finish_reason":null}]"#,
            r#""choices": [ {"message":{"content":"abc","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]},"finish_reason":"stop"} , {"x":[{}]} ] "#,
            r#""choices":[{"message":{"content":[{"text":"a"}],"refusal":"\ud800"}}]"#,
            r#""choices":[{"finish_reason":1}]"#,
            r#""choices":[{"finish_reason":"a","finish_reason":"b"}]"#,
            r#""choices":[[null,{"content":"x"},"stop"]]"#,
            r#""cho\u0069ces":[{"delta":{"reasoning":"x"}}]"#,
            r#""usage":null"#,
            r#""usage":{}"#,
            r#""usage":[1]"#,
            r#""usage":{"prompt_tokens":10.0,"completion_tokens":"5","cost":1e3}"#,
            r#""usage":{"prompt_tokens":1,"cost":1e400}"#,
            r#""usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}"#,
            r#""error":null"#,
            r#""error":{"message":"busy"}"#,
            r#""model":"up-a""#,
            r#""service_tier":"flex""#,
        ]
        .map(str::to_owned)
        .to_vec();
        members.extend([json::DEPTH_MAX - 4, json::DEPTH_MAX - 3, json::DEPTH_MAX - 2, 200].map(deep));
        let whole = prop::collection::vec(prop::sample::select(members), 0..5)
            .prop_map(|members| format!("{{{}}}", members.join(",")).into_bytes());
        let fault = prop::option::of((
            any::<prop::sample::Index>(),
            prop::sample::select(b"\"\\{}[],:0e \n\x01\xff".to_vec()),
        ));
        (whole, fault).prop_map(|(mut text, fault)| {
            match fault {
                Some((at, b'0')) => text.truncate(at.index(text.len())),
                Some((at, byte)) => text.insert(at.index(text.len()), byte),
                None => {}
            }
            text
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn an_answer_read_once_says_what_its_parts_say(text in answers()) {
            for sound in [false, true] {
                let found = Answer::<ChatChoice<'_>>::read(&text, sound);
                let found = found.map(|answer| (said(answer.choices.as_ref()), answer.usage));
                let parts = read_by_parts(&text, sound).map(|(choices, usage)| (said(choices.as_ref()), usage));
                prop_assert_eq!(found, parts, "{}", String::from_utf8_lossy(&text));
            }
        }
    }

    proptest! {
        #[test]
        fn arbitrary_events_never_panic(data in "\\PC{0,60}", json in "[\\[\\]{}\",:choicesuag0-9.-]{0,60}") {
            for text in [data, json] {
                let raw = Bytes::from(text);
                let found = Event { raw: raw.clone(), name: Bytes::new(), data: Some(raw.clone()), data_span: Some(0..raw.len()) };
                let _ = event(&found, &shape(false));
                let _ = whole(&raw, &shape(false));
            }
        }
    }
}
