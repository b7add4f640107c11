//! What the mock provider was told to do.
//!
//! A [`Script`] is plain data: it comes from a test, from the command line or from
//! `PUT /__mock/script`, and `Script::default()` is a healthy provider, so a test names only what
//! is unusual about its provider. A [`Fault`] is at most one misfortune per answer; a sequence of
//! different ones is told by setting the next script between requests.
//!
//! Deliberately absent: validation. A script may be absurd (more pieces than there are, zero
//! bytes per write); `answer.rs` gives each absurdity its nearest sensible meaning.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Script {
    pub dialect: Dialect,
    /// The pieces of the answer: one streamed event each.
    pub text: Vec<String>,
    /// The model named in answers; absent, the request's own model is echoed.
    pub model: Option<String>,
    /// What it can be asked for; absent, all of its dialect.
    pub surfaces: Option<Vec<Surface>>,
    /// Numbers of one embedding.
    pub dimensions: usize,
    /// Absent, this provider never tells usage.
    pub usage: Option<UsageScript>,
    /// The service tier that answers name; absent, `anthropic` says `standard` and `openai` nothing.
    pub service_tier: Option<String>,
    /// Waited before anything is written, a fault included.
    pub delay_head_ms: u64,
    /// Waited between the head (and the comments, if any) and the first event or the whole body.
    pub delay_first_event_ms: u64,
    /// Waited between two pieces, and after each comment.
    pub delay_chunk_ms: u64,
    pub fault: Option<Fault>,
    /// Only the first so many completions get the fault; absent, all of them.
    pub fault_count: Option<u32>,
    /// Cuts the streamed payload again in writes of so many bytes, across event boundaries.
    pub bytes_per_write: Option<usize>,
    /// Whether a stream opens with events that carry no text.
    pub openers: bool,
    /// SSE comments before the first event of a stream, at most 10 000.
    pub comments: u32,
    /// Whether a stream ends with `[DONE]` (`openai`) or `message_stop` (`anthropic`).
    pub done: bool,
    /// Whether the answer tells why it stopped.
    pub finish: bool,
    /// Answers word for word, by path, in place of the made ones: tools, and paths that the mock does not
    /// know. Faults strike them too; their events are the pieces.
    pub answers: BTreeMap<String, Words>,
}

/// An answer word for word.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Words {
    /// The body of an answer that is not streamed.
    pub whole: String,
    /// The events of a stream, each with its blank line; with none even a stream is answered whole.
    pub events: Vec<String>,
}

impl Script {
    pub(super) fn delay_head(&self) -> Duration {
        Duration::from_millis(self.delay_head_ms)
    }

    pub(super) fn delay_first_event(&self) -> Duration {
        Duration::from_millis(self.delay_first_event_ms)
    }

    pub(super) fn delay_chunk(&self) -> Duration {
        Duration::from_millis(self.delay_chunk_ms)
    }
}

impl Default for Script {
    fn default() -> Self {
        Self {
            dialect: Dialect::Openai,
            text: ["Hello", ", ", "world", "!"].map(String::from).to_vec(),
            model: None,
            surfaces: None,
            dimensions: 3,
            usage: Some(UsageScript::default()),
            service_tier: None,
            delay_head_ms: 0,
            delay_first_event_ms: 0,
            delay_chunk_ms: 0,
            fault: None,
            fault_count: None,
            bytes_per_write: None,
            openers: true,
            comments: 0,
            done: true,
            finish: true,
            answers: BTreeMap::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    #[default]
    Openai,
    Anthropic,
}

/// What can be asked of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Surface {
    Chat,
    Completions,
    Responses,
    Embeddings,
    Messages,
    CountTokens,
}

impl Surface {
    /// What is asked for at a path, if this provider knows it.
    pub(super) fn at(script: &Script, path: &str) -> Option<Self> {
        let (dialect, surface) = match path {
            "/v1/chat/completions" => (Dialect::Openai, Self::Chat),
            "/v1/completions" => (Dialect::Openai, Self::Completions),
            "/v1/responses" => (Dialect::Openai, Self::Responses),
            "/v1/embeddings" => (Dialect::Openai, Self::Embeddings),
            "/v1/messages" => (Dialect::Anthropic, Self::Messages),
            "/v1/messages/count_tokens" => (Dialect::Anthropic, Self::CountTokens),
            _ => return None,
        };
        let known = script.surfaces.as_ref().is_none_or(|known| known.contains(&surface));
        (known && dialect == script.dialect).then_some(surface)
    }
}

/// Model tokens. `prompt` includes `cached` and `written`, as `OpenAI` counts; the `anthropic` dialect,
/// where `input_tokens` leaves them out, subtracts them. Only `anthropic` tells `written`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UsageScript {
    pub prompt: u64,
    pub completion: u64,
    pub cached: u64,
    /// Written to the prompt cache, for whatever time.
    pub written: u64,
    /// How much of it for an hour.
    pub written_1h: u64,
}

impl Default for UsageScript {
    fn default() -> Self {
        Self { prompt: 10, completion: 5, cached: 0, written: 0, written_1h: 0 }
    }
}

/// Pieces are counted without openers. For an answer that is not streamed, "after pieces" means
/// half way through the body, or right after the head when `pieces` is zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// Absent, `body` is the dialect's own error.
    Status {
        code: u16,
        body: Option<String>,
        retry_after: Option<String>,
    },
    HangBeforeHead,
    HangAfterHead,
    HangAfterPieces {
        pieces: usize,
    },
    /// RST instead of an answer.
    ResetBeforeHead,
    /// FIN instead of an answer.
    CloseBeforeHead,
    ResetAfterHead,
    ResetAfterPieces {
        pieces: usize,
    },
    /// FIN where the next chunk should begin: a body that HTTP itself shows to be incomplete.
    CutAfterPieces {
        pieces: usize,
    },
    /// A body that HTTP calls complete and the dialect does not.
    EndAfterPieces {
        pieces: usize,
    },
    /// An error inside a stream that began well; an unstreamed answer is a plain 500.
    ErrorEvent {
        pieces: usize,
        body: Option<String>,
    },
    /// 200 and JSON of length zero.
    Empty,
    /// 200 and a web page, as from a captive portal.
    Html,
    /// Bytes that are not HTTP.
    Garbage,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_object_is_a_healthy_provider() {
        let script: Script = serde_json::from_str("{}").unwrap();
        assert_eq!(script, Script::default());
    }

    #[test]
    fn a_script_survives_json() {
        let script = Script {
            dialect: Dialect::Anthropic,
            usage: None,
            fault: Some(Fault::Status { code: 429, body: None, retry_after: Some("3".into()) }),
            fault_count: Some(2),
            ..Script::default()
        };
        let json = serde_json::to_string(&script).unwrap();
        assert!(json.contains(r#""kind":"status","code":429"#), "{json}");
        assert_eq!(serde_json::from_str::<Script>(&json).unwrap(), script);
    }

    #[test]
    fn a_misspelt_field_is_refused_by_name() {
        let refused = serde_json::from_str::<Script>(r#"{"falt":null}"#).unwrap_err();
        assert!(refused.to_string().contains("falt"), "{refused}");
    }
}
