//! How many tokens a message would have. It is free, makes no output and has one number for an answer.

use super::super::fields::Fields;
use super::super::object::Object;
use super::super::{Kind, Piece};
use super::error;
use super::request::{self, ACTED_ON};
use crate::facts::{Facts, Spans};
use crate::money::Tier;
use crate::stream::usage::tokens;
use crate::verdict::Rejection;

/// Reads a request. Its fields are a message's, but for the bound of an output that it does not have.
///
/// # Errors
/// A 400 that names the field and the way out.
pub fn read(body: &[u8]) -> Result<Facts, Rejection> {
    let request = Fields::read(body, &ACTED_ON)?;
    let (model, model_span) = request.model()?;
    let stated = request.preferences()?;
    let (input, _) = request::input(&request, body.len())?;
    Ok(Facts {
        model,
        stream: false,
        wants_usage: true,
        output_limit: Some(0),
        output_default: None,
        choices: 1,
        samples: 1,
        echoed_bytes: 0,
        tier: Tier::Standard,
        // Counting costs nothing, whatever is counted.
        surcharges: vec![],
        input,
        foldable: false,
        preferences: stated.preferences,
        spans: Spans { model: model_span, ours: stated.cuts, ..Spans::default() },
    })
}

/// What a whole answer is.
#[must_use]
pub fn whole(body: &[u8]) -> Piece {
    let Some(object) = Object::read_sound(body) else { return Piece::of(Kind::Unreadable) };
    if object.value("type") == Some("\"error\"") || object.value("error").is_some() {
        return Piece::of(Kind::Error(error::read_event(body)));
    }
    let counted = object.value("input_tokens").and_then(|text| serde_json::from_str(text).ok());
    let sound = counted.as_ref().and_then(tokens).is_some();
    let mut piece = Piece::of(if sound { Kind::Meaningful } else { Kind::Unreadable });
    piece.finished = 1;
    piece
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Reason;

    #[test]
    fn a_request_needs_no_output_bound() {
        let text = r#"{"model":"claude-a","messages":[{"role":"user","content":"hi"}],"speed":"fast"}"#;
        let facts = read(text.as_bytes()).unwrap();
        assert_eq!((facts.output_limit, facts.input.text_bytes, facts.surcharges), (Some(0), 2, vec![]));
        let missing = read(br#"{"model":"claude-a"}"#).unwrap_err();
        assert_eq!((missing.reason, missing.param), (Reason::MissingField, Some("messages")));
    }

    #[test]
    fn an_answer_is_a_number_of_tokens() {
        assert_eq!(whole(br#"{"input_tokens":2095}"#).kind, Kind::Meaningful);
        for text in
            ["", "{}", "[]", r#"{"input_tokens":null}"#, r#"{"input_tokens":-1}"#, r#"{"content":[]}"#]
        {
            assert_eq!(whole(text.as_bytes()).kind, Kind::Unreadable, "{text}");
        }
        let error = br#"{"type":"error","error":{"type":"overloaded_error","message":"x"}}"#;
        assert!(matches!(whole(error).kind, Kind::Error(e) if e.status == 529));
    }
}
