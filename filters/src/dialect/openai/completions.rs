//! Text completions, the older sibling of chat: prompts in, `choices[].text` out.
//!
//! Three things differ in what they cost. Every prompt of a list has its own choices. `best_of` makes more
//! choices than come back, and all are billed. And the API gives 16 tokens where `max_tokens` is not named;
//! that stays so: the default is part of what the operation means, so it is written upstream as our bound
//! (or less, where the key or the model has less) instead of the model's limit. Some compatible servers
//! know no such default; there the answer ends where it would at `OpenAI`'s.
//!
//! With `echo` the prompt comes back as if it were output; providers do not bill that, so our own count
//! leaves it out.

use std::borrow::Cow;

use serde::Deserialize;

use super::super::fields::{Fields, OUTPUT_TOKENS_MAX, size};
use super::super::{Manners, Piece, Shape};
use super::answer::{self, Choice};
use super::request::{self, CHOICES_MAX};
use super::sequences;
use crate::facts::{Facts, Input, Spans};
use crate::hold::Bound;
use crate::json::Edit;
use crate::meter::Produced;
use crate::stream::sse::Event;
use crate::verdict::Rejection;

/// What the API gives where the caller names no bound, in tokens.
const OUTPUT_TOKENS_DEFAULT: u64 = 16;

/// Fields that we act on: a second one of them could mean something else to the upstream.
const ACTED_ON: [&str; 9] =
    ["service_tier", "model", "stream", "stream_options", "prompt", "n", "best_of", "max_tokens", "echo"];

/// Reads a request.
///
/// # Errors
/// A 400 that names the field and the way out.
pub fn read(body: &[u8]) -> Result<Facts, Rejection> {
    let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
    let request = Fields::read(body, &ACTED_ON)?;
    let (model, model_span) = request.model()?;
    let stated = request.preferences()?;
    let stream_options = request::stream_options(&request)?;
    // Without a prompt the model begins a document of its own.
    let alone = Input { bytes, texts: 1, ..Input::default() };
    let input = request.value("prompt").map_or(Ok(alone), |text| sequences::read(text, "prompt", bytes))?;
    let shown = request.whole_number("n", 1, CHOICES_MAX)?.unwrap_or(1);
    let made = request.whole_number("best_of", 1, CHOICES_MAX)?.unwrap_or(1).max(shown);
    let tier = request::tier(&request)?;
    let echoes = request.flag("echo")?;
    // A token has about four bytes.
    let echoed = input.text_bytes.saturating_add(input.tokens.saturating_mul(4));
    Ok(Facts {
        model,
        stream: request.flag("stream")?,
        wants_usage: stream_options.as_ref().is_some_and(|(_, wants)| *wants),
        output_limit: request.whole_number("max_tokens", 0, OUTPUT_TOKENS_MAX)?,
        output_default: Some(OUTPUT_TOKENS_DEFAULT),
        choices: input.texts.saturating_mul(shown),
        samples: input.texts.saturating_mul(made),
        echoed_bytes: if echoes { echoed.saturating_mul(shown) } else { 0 },
        tier,
        surcharges: request::dear(tier).into_iter().collect(),
        input,
        foldable: false,
        preferences: stated.preferences,
        spans: Spans {
            model: model_span,
            stream: request.span("stream"),
            stream_options: stream_options.map(|(span, _)| span),
            output_limits: request.spans(&["max_tokens"]),
            ours: stated.cuts,
        },
    })
}

/// What to change for one upstream: its name of the model, usage in streams, our output bound.
#[must_use]
pub fn edits(body: &[u8], facts: &Facts, bound: &Bound, manners: &Manners) -> Vec<Edit> {
    request::edits_with(body, facts, bound, manners, "max_tokens")
}

/// What an event is.
#[must_use]
pub fn event(event: &Event, shape: &Shape) -> Piece {
    answer::event_of::<TextChoice<'_>>(event, shape)
}

/// What a whole answer is.
#[must_use]
pub fn whole(body: &[u8], shape: &Shape) -> Piece {
    answer::whole_of::<TextChoice<'_>>(body, shape)
}

#[derive(Deserialize)]
struct TextChoice<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

impl<'a> Choice<'a> for TextChoice<'a> {
    fn count(&self, produced: &mut Produced) -> bool {
        let bytes = self.text.as_deref().map_or(0, size);
        produced.text_bytes += bytes;
        bytes > 0
    }

    fn finish_reason(&self) -> Option<&str> {
        self.finish_reason.as_deref()
    }

    /// It was read without its quotes.
    fn text(&self) -> Option<&'a str> {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::{Kind, OutputField};
    use super::*;
    use crate::hold::{self, Limits};
    use crate::json;
    use crate::stream::sse::Scanner;
    use crate::verdict::Reason;

    const LIMITS: Limits = Limits { context: 8_192, output: 4_096, image: 0 };

    fn with(fields: &str) -> String {
        format!(r#"{{"model":"gpt-a","prompt":"Once upon"{fields}}}"#)
    }

    fn facts(text: &str) -> Facts {
        read(text.as_bytes()).unwrap_or_else(|e| panic!("{text}: {}", e.message))
    }

    fn shape() -> Shape {
        Shape::new(&facts(&with(r#","stream":true"#)), "gpt-a", "r")
    }

    fn piece(data: &str) -> Piece {
        let mut scanner = Scanner::default();
        scanner.push(format!("data: {data}\n\n").as_bytes());
        event(&scanner.next_event().unwrap(), &shape())
    }

    #[test]
    fn every_prompt_has_its_choices_and_all_that_are_made_are_held_for() {
        let of = |fields: &str| {
            let facts = facts(fields);
            (facts.choices, facts.samples, hold::bound(&facts, &LIMITS, None).output)
        };
        assert_eq!(of(&with(r#","n":2,"max_tokens":10"#)), (2, 2, 20));
        assert_eq!(of(&with(r#","n":2,"best_of":5,"max_tokens":10"#)), (2, 5, 50));
        let three = r#"{"model":"a","prompt":["a","b","c"],"n":2,"best_of":4,"max_tokens":10}"#;
        assert_eq!(of(three), (6, 12, 120));
        let numbers = facts(r#"{"model":"a","prompt":[[1,2],[3]],"max_tokens":0}"#);
        assert_eq!((numbers.input.tokens, numbers.choices, numbers.output_limit), (3, 2, Some(0)));
    }

    #[test]
    fn a_missing_bound_stays_the_apis_own_and_is_written() {
        let manners = Manners {
            native_model: "up-a".into(),
            stream_usage: true,
            output_field: OutputField::MaxCompletionTokens,
            fold: false,
        };
        let text = with(r#","stream":true"#);
        let facts = facts(&text);
        let bound = hold::bound(&facts, &LIMITS, Some(1_000));
        assert_eq!((bound.output, bound.write_output), (16, Some(16)));
        let sent = json::apply(text.as_bytes(), &mut edits(text.as_bytes(), &facts, &bound, &manners));
        assert_eq!(
            String::from_utf8(sent).unwrap(),
            r#"{"model":"up-a","stream_options":{"include_usage":true},"max_tokens":16,"prompt":"Once upon","stream":true}"#
        );
        let less = Limits { output: 8, ..LIMITS };
        assert_eq!(hold::bound(&facts, &less, None).write_output, Some(8));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (fields, reason) in [
            (r#","n":0"#, Reason::InvalidValue),
            (r#","best_of":129"#, Reason::InvalidValue),
            (r#","max_tokens":-1"#, Reason::InvalidValue),
            (r#","echo":1"#, Reason::InvalidValue),
            (r#","prompt":"x""#, Reason::DuplicateField),
            (r#","best_of":1,"best_of":9"#, Reason::DuplicateField),
        ] {
            assert_eq!(read(with(fields).as_bytes()).unwrap_err().reason, reason, "{fields}");
        }
        let alone = facts(r#"{"model":"a"}"#);
        assert_eq!((alone.choices, alone.input.text_bytes), (1, 0));
    }

    #[test]
    fn events_are_told_apart() {
        let chunk = |text: &str, finish: &str| {
            piece(&format!(
                r#"{{"object":"text_completion","model":"gpt-a","choices":[{{"text":{text},"index":0,"logprobs":null,"finish_reason":{finish}}}]}}"#
            ))
        };
        assert_eq!(chunk("\"\"", "null").kind, Kind::Opener);
        let word = chunk("\" a\"", "null");
        assert_eq!((word.kind, word.produced.text_bytes, word.finished), (Kind::Meaningful, 2, 0));
        let last = chunk("\"\"", "\"length\"");
        assert_eq!((last.kind, last.finished), (Kind::Meaningful, 1));
        assert_eq!(piece("[DONE]").kind, Kind::Done);
        let usage = piece(r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":16}}"#);
        assert_eq!(usage.kind, Kind::UsageOnly);
        assert!(matches!(piece(r#"{"error":{"message":"busy","code":429}}"#).kind, Kind::Error(_)));
    }

    #[test]
    fn a_whole_answer_is_read() {
        let text = r#"{"object":"text_completion","model":"up-a","choices":[{"text":"Hello","index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":10,"completion_tokens":5}}"#;
        let piece = whole(text.as_bytes(), &shape());
        assert_eq!((piece.kind, piece.produced.text_bytes, piece.edits.len()), (Kind::Meaningful, 5, 1));
        assert!(piece.usage.is_some());
        let silent = r#"{"choices":[{"text":"","finish_reason":null}]}"#;
        assert_eq!(whole(silent.as_bytes(), &shape()).kind, Kind::Opener);
    }

    #[test]
    fn an_echoed_prompt_is_no_output_of_our_count() {
        let echo = facts(&with(r#","echo":true,"n":3"#));
        assert_eq!(echo.echoed_bytes, 3 * 9);
    }

    proptest! {
        #[test]
        fn reading_never_panics(json in "[\\[\\]{}\",:promt0-9 ]{0,60}") {
            let _ = read(json.as_bytes());
            let _ = read(format!(r#"{{"model":"a","prompt":{json}}}"#).as_bytes());
            let _ = whole(json.as_bytes(), &shape());
        }
    }
}
