//! Events that differ in their text alone.
//!
//! Most events of a stream are the one before with other words in it. What an event is follows from its bytes; so where
//! only the inside of one JSON string differs, and that has neither quotes nor escapes, all that was found out about the
//! one holds for the other, but for the length of the text. Comparing the bytes around it costs a fraction of reading
//! them again.
//!
//! A server that puts something new into every event (a number, a padding) never fits: whoever keeps patterns bounds how
//! often one is made in vain.

use std::ops::Range;

use super::fields::size;
use super::{Kind, Piece};
use crate::json::Edit;
use crate::meter::Produced;
use crate::money::Tier;
use crate::stream::sse::Event;

/// What is around the text of an event, and what the event was. Every stream keeps one, so it has no room for what such
/// an event never is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    name: Box<[u8]>,
    before: Box<[u8]>,
    behind: Box<[u8]>,
    /// Where the text ended.
    ended: usize,
    tier: Option<Tier>,
    edits: Vec<Edit>,
}

impl Pattern {
    /// The pattern of an event, where all that it does is to say one plain text.
    #[must_use]
    pub fn of(event: &Event, piece: &Piece) -> Option<Self> {
        let Piece { kind, usage, tier, produced, restates, sequence, finished, edits, text } = piece;
        let (data, text) = (event.data.as_ref()?, text.clone()?);
        let said = data.get(text.clone())?;
        let outside = |edit: &Edit| edit.span.end <= text.start || edit.span.start >= text.end;
        let fits = *kind == Kind::Meaningful
            && usage.is_none()
            && *produced == (Produced { text_bytes: length(said), tool_calls: 0 })
            && !restates
            && sequence.is_none()
            && *finished == 0
            && edits.iter().all(outside);
        fits.then(|| Self {
            name: event.name.as_ref().into(),
            before: data.get(..text.start).unwrap_or_default().into(),
            behind: data.get(text.end..).unwrap_or_default().into(),
            ended: text.end,
            tier: *tier,
            edits: edits.clone(),
        })
    }

    /// What another event is, if it is one of these.
    #[must_use]
    pub fn read(&self, event: &Event) -> Option<Piece> {
        if event.name.as_ref() != self.name.as_ref() {
            return None;
        }
        let inside =
            event.data.as_ref()?.strip_prefix(self.before.as_ref())?.strip_suffix(self.behind.as_ref())?;
        if !is_plain(inside) {
            return None;
        }
        let text = self.before.len()..self.before.len() + inside.len();
        let mut edits = self.edits.clone();
        for edit in &mut edits {
            edit.span = self.moved(&edit.span, text.end);
        }
        Some(Piece {
            kind: Kind::Meaningful,
            usage: None,
            tier: self.tier,
            produced: Produced { text_bytes: length(inside), tool_calls: 0 },
            restates: false,
            sequence: None,
            finished: 0,
            edits,
            text: Some(text),
        })
    }

    /// A place in the first event, in one whose text ends there.
    fn moved(&self, span: &Range<usize>, end: usize) -> Range<usize> {
        let before = self.before.len();
        if span.end <= before {
            return span.clone();
        }
        let moved = |at: usize| at.saturating_sub(self.ended) + end;
        moved(span.start)..moved(span.end)
    }
}

/// Whether these bytes, between quotes, are a JSON string that says just them. What some servers write for nothing is
/// left to whoever knows.
fn is_plain(inside: &[u8]) -> bool {
    let special = |found, byte: &u8| found | (*byte < b' ') | (*byte == b'"') | (*byte == b'\\');
    !inside.is_empty()
        && !inside.iter().fold(false, special)
        && !matches!(inside, b"null" | b"[]" | b"{}")
        && std::str::from_utf8(inside).is_ok()
}

fn length(text: &[u8]) -> u64 {
    std::str::from_utf8(text).map_or(0, size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Operation, Shape};
    use super::*;
    use crate::stream::sse::Scanner;

    fn shape(wants_usage: bool) -> Shape {
        Shape {
            stream: true,
            fold: false,
            choices: 1,
            echoed_bytes: 0,
            wants_usage,
            public_model: "public".into(),
            request_id: "r".into(),
        }
    }

    fn event(name: &str, data: &str) -> Event {
        let mut scanner = Scanner::default();
        let name = if name.is_empty() { String::new() } else { format!("event: {name}\n") };
        scanner.push(format!("{name}data: {data}\n\n").as_bytes());
        scanner.next_event().unwrap()
    }

    /// Two layouts of a chat's events, one with members to cut and to rename behind the text; and Anthropic's.
    fn of_chat(layout: usize, text: &str) -> (Operation, Event) {
        let text = serde_json::Value::from(text);
        match layout {
            0 => (
                Operation::Chat,
                event(
                    "",
                    &format!(
                        r#"{{"id":"c","model":"native","choices":[{{"index":0,"delta":{{"content":{text}}},"finish_reason":null}}]}}"#
                    ),
                ),
            ),
            1 => (
                Operation::Chat,
                event(
                    "",
                    &format!(
                        r#"{{"choices":[{{"delta":{{"role":"assistant","content":{text}}}}}],"usage":null,"model":"native","service_tier":"flex"}}"#
                    ),
                ),
            ),
            _ => (
                Operation::Messages,
                event(
                    "content_block_delta",
                    &format!(
                        r#"{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":{text}}}}}"#
                    ),
                ),
            ),
        }
    }

    #[test]
    fn an_event_with_other_words_fits_and_is_read_as_by_its_dialect() {
        for layout in 0..3 {
            for wants_usage in [true, false] {
                let (operation, first) = of_chat(layout, "Hello");
                let read = |event: &Event| operation.event(event, &shape(wants_usage));
                let pattern = Pattern::of(&first, &read(&first)).unwrap();
                for text in [" world, and more of it", "x", "é中"] {
                    let (_, next) = of_chat(layout, text);
                    assert_eq!(pattern.read(&next).unwrap(), read(&next), "{text}");
                }
                for text in ["", "null", "[]", "{}", "a\"b", "a\\b", "a\nb"] {
                    assert_eq!(pattern.read(&of_chat(layout, text).1), None, "{text}");
                }
            }
        }
    }

    #[test]
    fn what_does_more_than_to_speak_has_no_pattern() {
        for data in [
            r#"{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}"#,
            r#"{"choices":[{"delta":{"content":"x"}},{"delta":{"content":"y"}}]}"#,
            r#"{"choices":[{"delta":{"content":"x","tool_calls":[{"function":{"name":"f"}}]}}]}"#,
            r#"{"choices":[{"delta":{"content":"x","refusal":"no"}}]}"#,
            r#"{"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#,
            r#"{"choices":[{"delta":{"content":"a\"b"}}]}"#,
            r#"{"choices":[{"delta":{"content":["x"]}}]}"#,
            r#"{"choices":[{"delta":{"content":""}}]}"#,
        ] {
            let event = event("", data);
            let piece = Operation::Chat.event(&event, &shape(true));
            assert_eq!(Pattern::of(&event, &piece), None, "{data}");
        }
    }

    proptest! {
        /// Whatever the second event is: a pattern of the first either knows nothing of it, or what its dialect knows.
        #[test]
        fn a_pattern_never_says_what_the_dialect_does_not(
            layout in 0_usize..3,
            first in "[a-z ]{1,8}", second in "(\\PC|[\"\\\\{}\\[\\],:\n])*",
            at in any::<prop::sample::Index>(), cut in 0_usize..4,
            with in prop::sample::select(vec!["", "\"", "\\", "\\u00e9", "\",\"x\":\"", "}", "null", "\u{1}", "é", " "]),
            wants_usage: bool,
        ) {
            let (operation, known) = of_chat(layout, &first);
            let read = |event: &Event| operation.event(event, &shape(wants_usage));
            let pattern = Pattern::of(&known, &read(&known)).unwrap();
            let (_, next) = of_chat(layout, &second);
            if let Some(piece) = pattern.read(&next) {
                prop_assert_eq!(piece, read(&next));
            }
            // The same with a few bytes of the data exchanged.
            let mut data = String::from_utf8(next.data.clone().unwrap().to_vec()).unwrap();
            let begin = (0..=at.index(data.len())).rev().find(|at| data.is_char_boundary(*at)).unwrap();
            let end = (begin + cut..=data.len()).find(|end| data.is_char_boundary(*end)).unwrap_or(data.len());
            data.replace_range(begin..end, with);
            let bent = event(std::str::from_utf8(&next.name).unwrap(), &data);
            if let Some(piece) = pattern.read(&bent) {
                prop_assert_eq!(piece, read(&bent), "{}", data);
            }
        }
    }
}
