//! What a call asks a provider to do, and the one door to how each of these is spoken.
//!
//! A dialect has several operations, and nearly everything about a call depends on which one it is: how
//! its request is read and edited, where it goes, what its events mean, which of them is the last, and where
//! its usage stands. Rooms outside ask an [`Operation`] and nothing else. What is the same for a whole
//! dialect (credentials, the shape of an error) is asked of its [`Dialect`].

use super::{Dialect, Manners, Piece, Shape, anthropic, openai};
use crate::facts::Facts;
use crate::hold::Bound;
use crate::json::{self, Edit};
use crate::meter::UsageReport;
use crate::stream::sse::Event;
use crate::verdict::{Rejection, UpstreamError};
use bytes::Bytes;
use std::ops::Range;

/// How servers say that a path is none of theirs, in small letters.
const NO_SUCH_PATH: [&str; 6] = [
    "invalid url",
    "unknown request url",
    "file not found",
    "no such endpoint",
    "page not found",
    "resource not found",
];
/// How servers say that the path is theirs, but nothing behind it.
const NO_SUCH_TASK: [&str; 3] =
    ["does not support embeddings", "does not support completions", "does not support responses"];

/// One thing that a provider can be asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `OpenAI`'s chat completions.
    Chat,
    /// `OpenAI`'s older text completions.
    Completions,
    /// `OpenAI`'s responses.
    Responses,
    /// `OpenAI`'s embeddings: there is no output to bound or to pay.
    Embeddings,
    /// Anthropic's messages.
    Messages,
    /// Anthropic's count of a message's tokens. It is free.
    CountTokens,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Embeddings, Self::Messages, Self::CountTokens];

    /// The language that it belongs to.
    #[must_use]
    pub const fn dialect(self) -> Dialect {
        match self {
            Self::Chat | Self::Completions | Self::Responses | Self::Embeddings => Dialect::OpenAi,
            Self::Messages | Self::CountTokens => Dialect::Anthropic,
        }
    }

    /// Where it is asked for, behind a provider's base and behind our `/v1`.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Chat => "/chat/completions",
            Self::Completions => "/completions",
            Self::Responses => "/responses",
            Self::Embeddings => "/embeddings",
            Self::Messages => "/messages",
            Self::CountTokens => "/messages/count_tokens",
        }
    }

    /// The word that config, logs and metrics use.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Embeddings => "embeddings",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
        }
    }

    /// Nothing is held and nothing is charged for it.
    #[must_use]
    pub const fn is_free(self) -> bool {
        match self {
            Self::CountTokens => true,
            Self::Chat | Self::Completions | Self::Responses | Self::Embeddings | Self::Messages => false,
        }
    }

    /// It makes output tokens.
    #[must_use]
    pub const fn has_output(self) -> bool {
        match self {
            Self::Embeddings | Self::CountTokens => false,
            Self::Chat | Self::Completions | Self::Responses | Self::Messages => true,
        }
    }

    /// The field by which a caller bounds the output, where there is one.
    #[must_use]
    pub const fn output_field(self) -> Option<&'static str> {
        match self {
            Self::Chat => Some("max_completion_tokens"),
            Self::Completions | Self::Messages => Some("max_tokens"),
            Self::Responses => Some("max_output_tokens"),
            Self::Embeddings | Self::CountTokens => None,
        }
    }

    /// Reads a request.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn read(self, body: &[u8]) -> Result<Facts, Rejection> {
        match self {
            Self::Chat => openai::request::read(body),
            Self::Completions => openai::completions::read(body),
            Self::Responses => openai::responses::request::read(body),
            Self::Embeddings => openai::embeddings::read(body),
            Self::Messages => anthropic::request::read(body),
            Self::CountTokens => anthropic::count::read(body),
        }
    }

    /// What to change in the body for one upstream.
    #[must_use]
    pub fn edits(self, body: &[u8], facts: &Facts, bound: &Bound, manners: &Manners) -> Vec<Edit> {
        let mut edits = match self {
            Self::Chat => openai::request::edits(body, facts, bound, manners),
            Self::Completions => openai::completions::edits(body, facts, bound, manners),
            Self::Responses => openai::responses::request::edits(facts, bound, manners),
            Self::Embeddings | Self::CountTokens => manners.rename(facts).into_iter().collect(),
            Self::Messages => anthropic::request::edits(facts, bound, manners),
        };
        edits.extend(facts.spans.ours.iter().map(|span| Edit { span: span.clone(), with: vec![] }));
        edits
    }

    /// What an event of a stream is.
    #[must_use]
    pub fn event(self, event: &Event, shape: &Shape) -> Piece {
        match self {
            Self::Chat => openai::answer::event(event, shape),
            Self::Completions => openai::completions::event(event, shape),
            Self::Responses => openai::responses::answer::event(event, shape),
            Self::Messages => anthropic::answer::event(event, shape),
            Self::Embeddings | Self::CountTokens => Piece::of(super::Kind::Unreadable),
        }
    }

    /// The event that ends every stream whose answer has finished without it. Where the finish itself is the
    /// last event there is none.
    #[must_use]
    pub const fn terminal_event(self) -> &'static [u8] {
        match self {
            Self::Chat | Self::Completions => b"data: [DONE]\n\n",
            Self::Messages => b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
            Self::Responses | Self::Embeddings | Self::CountTokens => b"",
        }
    }

    /// What a whole answer is.
    #[must_use]
    pub fn whole(self, body: &[u8], shape: &Shape) -> Piece {
        match self {
            Self::Chat => openai::answer::whole(body, shape),
            Self::Completions => openai::completions::whole(body, shape),
            Self::Responses => openai::responses::answer::whole(body, shape),
            Self::Embeddings => openai::embeddings::whole(body, shape),
            Self::Messages => anthropic::answer::whole(body, shape),
            Self::CountTokens => anthropic::count::whole(body),
        }
    }

    /// A usage report near the end of a whole answer that was too long to be read.
    #[must_use]
    pub fn usage_in_tail(self, tail: &[u8], shape: &Shape) -> Option<UsageReport> {
        let shell: &[u8] = match self {
            Self::Chat | Self::Completions => br#"{"choices":[],"usage":"#,
            Self::Responses => br#"{"status":"completed","output":[],"usage":"#,
            Self::Embeddings => br#"{"data":[],"usage":"#,
            Self::Messages => br#"{"type":"message","content":[],"usage":"#,
            Self::CountTokens => return None,
        };
        let usage = tail.get(in_tail(tail, "usage")?)?;
        self.whole(&[shell, usage, b"}"].concat(), shape).usage
    }

    /// The model's name near the end of a whole answer that was too long to be read, where it stands behind
    /// everything else. Elsewhere it was found at the beginning, and the end may say `model` in other senses.
    #[must_use]
    pub fn model_in_tail(self, tail: &[u8]) -> Option<Range<usize>> {
        match self {
            Self::Embeddings => in_tail(tail, "model"),
            Self::Chat | Self::Completions | Self::Responses | Self::Messages | Self::CountTokens => None,
        }
    }

    /// Whether an error says that the upstream does not do this at all, rather than something about the request.
    /// Every server knows its dialect's first operation; of the others many are missing somewhere, and
    /// another route may have them.
    #[must_use]
    pub fn is_unknown_to(self, error: &UpstreamError) -> bool {
        if matches!(self, Self::Chat | Self::Messages) || error.code == "model_not_found" {
            return false;
        }
        let said = error.message.to_ascii_lowercase();
        match error.status {
            405 | 501 => true,
            // A page that is no error of the API has no message; the rest is how the known servers say it.
            404 => {
                said.is_empty()
                    || said == "not found"
                    || said.contains(self.path())
                    || NO_SUCH_PATH.iter().any(|p| said.contains(p))
            }
            400 => NO_SUCH_TASK.iter().any(|phrase| said.contains(phrase)),
            _ => false,
        }
    }

    /// An error as the last event of a stream that has begun, behind an event of this number.
    #[must_use]
    pub fn error_event(self, rejection: &Rejection, request_id: &str, sequence: Option<u64>) -> Bytes {
        match self {
            Self::Responses => openai::responses::answer::error_event(rejection, sequence),
            Self::Chat | Self::Completions | Self::Embeddings => openai::error::event(rejection),
            Self::Messages | Self::CountTokens => anthropic::error::event(rejection, request_id),
        }
    }
}

/// The value of the last member of that name in the end of a JSON text.
fn in_tail(tail: &[u8], key: &str) -> Option<Range<usize>> {
    let at = memchr::memmem::rfind(tail, format!("\"{key}\"").as_bytes())?;
    let member = [b"{", tail.get(at..)?].concat();
    let value = json::find_in_prefix(&member, key)?;
    Some(at + value.start - 1..at + value.end - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_a_word_and_a_path_of_its_own() {
        for (at, one) in Operation::ALL.into_iter().enumerate() {
            for other in Operation::ALL.into_iter().skip(at + 1) {
                assert!(one.word() != other.word() && one.path() != other.path(), "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn an_upstream_that_lacks_a_path_is_told_from_one_that_finds_fault_with_the_request() {
        let unknown = |operation: Operation, status, body: &str| {
            operation.is_unknown_to(&operation.dialect().error(status, body.as_bytes()))
        };
        for (status, body) in [
            (404, ""),
            (404, "404 page not found"),
            (404, r#"{"detail":"Not Found"}"#),
            (405, r#"{"detail":"Method Not Allowed"}"#),
            (
                404,
                r#"{"error":{"message":"Invalid URL (POST /v1/responses)","type":"invalid_request_error"}}"#,
            ),
            (404, r#"{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}"#),
            (
                501,
                r#"{"error":{"code":501,"message":"This server does not support embeddings.","type":"not_supported_error"}}"#,
            ),
            (
                400,
                r#"{"error":{"message":"The model does not support Embeddings API","type":"BadRequestError","code":400}}"#,
            ),
        ] {
            assert!(unknown(Operation::Responses, status, body), "{status} {body}");
            assert!(!unknown(Operation::Chat, status, body), "every server knows that one");
        }
        for (status, body) in [
            (404, r#"{"error":{"message":"The model `x` does not exist","code":"model_not_found"}}"#),
            (404, r#"{"error":{"message":"Conversation with id 'conv_1' not found."}}"#),
            (404, r#"{"error":{"message":"","code":"model_not_found"}}"#),
            (400, ""),
            (400, r#"{"error":{"message":"`n` is too large"}}"#),
            (500, ""),
        ] {
            assert!(!unknown(Operation::Responses, status, body), "{status} {body}");
        }
        let model = r#"{"type":"error","error":{"type":"not_found_error","message":"model: claude-x"}}"#;
        assert!(!unknown(Operation::CountTokens, 404, model));
        assert!(unknown(
            Operation::CountTokens,
            404,
            r#"{"type":"error","error":{"type":"not_found_error","message":"Not Found"}}"#
        ));
    }

    #[test]
    fn a_member_near_the_end_is_found_where_it_lies() {
        let tail = br#"0.5]}],"model":"up-e","usage":{"prompt_tokens":8,"total_tokens":8}}"#;
        let at = Operation::Embeddings.model_in_tail(tail).unwrap();
        assert_eq!(&tail[at], br#""up-e""#);
        assert_eq!(Operation::Messages.model_in_tail(tail), None);
        assert_eq!(Operation::Embeddings.model_in_tail(b"[1,2"), None);
    }
}
