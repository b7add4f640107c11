//! Embeddings: texts in, lists of numbers out, and nothing to pay but the input.
//!
//! Answers are whole and may be long (2,048 texts as lists of floats are tens of megabytes), so most of them
//! commit early and pass; the model's name and the usage stand behind the numbers. The servers do not agree
//! on what the one count of usage is called, and some call it nothing at all.

use serde_json::Value;

use super::super::fields::Fields;
use super::super::object::Object;
use super::super::{Kind, Piece, Shape};
use super::answer::error_in;
use super::{error, request, sequences};
use crate::facts::{Facts, Spans};
use crate::meter::UsageReport;
use crate::stream::usage::{Reported, Usage, tokens};
use crate::verdict::Rejection;

/// Fields that we act on: a second one of them could mean something else to the upstream.
const ACTED_ON: [&str; 3] = ["model", "input", "service_tier"];
/// What the count of the input may be called; the first that says something counts.
const INPUT_NAMES: [&str; 3] = ["prompt_tokens", "input_tokens", "total_tokens"];

/// Reads a request.
///
/// # Errors
/// A 400 that names the field and the way out.
pub fn read(body: &[u8]) -> Result<Facts, Rejection> {
    let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
    let request = Fields::read(body, &ACTED_ON)?;
    let (model, model_span) = request.model()?;
    let stated = request.preferences()?;
    let input = sequences::read(request.needed("input", ": give the text to embed")?, "input", bytes)?;
    let tier = request::tier(&request)?;
    Ok(Facts {
        model,
        stream: false,
        wants_usage: true,
        output_limit: Some(0),
        output_default: None,
        choices: 1,
        samples: 1,
        echoed_bytes: 0,
        tier,
        surcharges: request::dear(tier).into_iter().collect(),
        input,
        foldable: false,
        preferences: stated.preferences,
        spans: Spans { model: model_span, ours: stated.cuts, ..Spans::default() },
    })
}

/// What a whole answer is.
#[must_use]
pub fn whole(body: &[u8], shape: &Shape) -> Piece {
    let Some(object) = Object::read_sound(body) else { return Piece::of(Kind::Unreadable) };
    if let Some(text) = error_in(&object, false) {
        return Piece::of(Kind::Error(error::read_event(text)));
    }
    let Some(data) = object.value("data").filter(|data| data.starts_with('[')) else {
        return Piece::of(Kind::Unreadable);
    };
    let empty = data.trim_start_matches('[').trim_start().starts_with(']');
    let mut piece = Piece::of(if empty { Kind::Opener } else { Kind::Meaningful });
    piece.finished = shape.choices;
    piece.usage = object.value("usage").map(|text| {
        let usage: Value = serde_json::from_str(text).unwrap_or_default();
        read_usage(&usage).map_or(UsageReport::Unbelievable, UsageReport::Believable)
    });
    piece.edits = object.rename_model(&shape.public_model);
    piece
}

/// `None` when there is no count, or none that can be believed.
fn read_usage(usage: &Value) -> Option<Reported> {
    let named = INPUT_NAMES.into_iter().filter_map(|name| usage.get(name).filter(|count| !count.is_null()));
    let counts: Option<Vec<u64>> = named.map(tokens).collect();
    let counts = counts?;
    let input = counts.iter().copied().find(|count| *count > 0).or_else(|| counts.first().copied())?;
    Some(Reported::whole(&Usage { input, ..Usage::default() }, false))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hold::{self, Limits};
    use crate::verdict::Reason;

    fn facts(input: &str) -> Facts {
        let text = format!(r#"{{"model":"embed-a","input":{input}}}"#);
        read(text.as_bytes()).unwrap_or_else(|e| panic!("{text}: {}", e.message))
    }

    fn answer(rest: &str) -> Piece {
        let text =
            format!(r#"{{"object":"list","data":[{{"index":0,"embedding":[0.1]}}],"model":"up-e"{rest}}}"#);
        whole(text.as_bytes(), &Shape::new(&facts("\"abc\""), "embed-a", "r"))
    }

    fn input_of(usage: &str) -> Option<u64> {
        match answer(&format!(r#","usage":{usage}"#)).usage {
            Some(UsageReport::Believable(reported)) => {
                assert_eq!(reported.output, Some(0), "there is no output to pay");
                reported.input
            }
            _ => None,
        }
    }

    #[test]
    fn only_the_input_is_held_for() {
        let limits = Limits { context: 8_192, output: 0, image: 0 };
        let bound = |input: &str| hold::bound(&facts(input), &limits, None);
        assert_eq!((bound("\"abc\"").output, bound("\"abc\"").write_output), (0, None));
        // {"model":"embed-a","input":} has 28 bytes; 4 tokens around the text, 16 around the request.
        assert_eq!(bound("[1,2,3]").input, 28 + 3 + 4 + 16);
        let many = format!("[{}]", vec![format!("\"{}\"", "a".repeat(10_000)); 5].join(","));
        assert_eq!(bound(&many).input, 5 * 8_192, "every text has a window of its own");
    }

    #[test]
    fn whatever_its_name_the_one_count_is_read() {
        for (usage, expected) in [
            (r#"{"prompt_tokens":8,"total_tokens":8}"#, Some(8)),
            (r#"{"total_tokens":8}"#, Some(8)),
            (r#"{"input_tokens":8}"#, Some(8)),
            (r#"{"prompt_tokens":0,"total_tokens":8}"#, Some(8)),
            (r#"{"prompt_tokens":null,"total_tokens":8}"#, Some(8)),
            (r#"{"prompt_tokens":8,"completion_tokens":99,"total_tokens":107}"#, Some(8)),
            (r#"{"prompt_tokens":"8"}"#, Some(8)),
            (r#"{"prompt_tokens":0}"#, Some(0)),
            ("{}", None),
            (r#"{"prompt_tokens":-8}"#, None),
            (r#"{"prompt_tokens":1.5,"total_tokens":2}"#, None),
        ] {
            assert_eq!(input_of(usage), expected, "{usage}");
        }
        assert_eq!(answer("").usage, None);
    }

    #[test]
    fn an_answer_is_one_with_embeddings_in_it() {
        let found = answer("");
        assert_eq!((found.kind, found.edits.len()), (Kind::Meaningful, 1));
        let kind = |text: &str| whole(text.as_bytes(), &Shape::new(&facts("\"a\""), "embed-a", "r")).kind;
        assert_eq!(kind(r#"{"data":[ ]}"#), Kind::Opener);
        for text in ["", "{}", "[]", r#"{"data":null}"#, r#"{"data":{}}"#, "<html>"] {
            assert_eq!(kind(text), Kind::Unreadable, "{text}");
        }
        assert!(matches!(kind(r#"{"error":{"message":"x","code":503}}"#), Kind::Error(e) if e.status == 503));
        assert_eq!(kind(r#"{"data":[{"embedding":"AAAA"}]}"#), Kind::Meaningful, "base64");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let refused = |text: &str| {
            let rejection = read(text.as_bytes()).unwrap_err();
            (rejection.reason, rejection.param)
        };
        assert_eq!(refused(r#"{"model":"a"}"#), (Reason::MissingField, Some("input")));
        assert_eq!(refused(r#"{"model":"a","input":{}}"#), (Reason::InvalidValue, Some("input")));
        assert_eq!(
            refused(r#"{"model":"a","input":"a","input":"b"}"#),
            (Reason::DuplicateField, Some("input"))
        );
    }

    proptest! {
        #[test]
        fn reading_never_panics(json in "[\\[\\]{}\",:inputdata0-9 ]{0,60}") {
            let _ = read(json.as_bytes());
            let _ = read(format!(r#"{{"model":"a","input":{json}}}"#).as_bytes());
            let _ = whole(json.as_bytes(), &Shape::new(&facts("\"a\""), "embed-a", "r"));
        }
    }
}
