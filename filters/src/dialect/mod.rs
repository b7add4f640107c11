//! What the providers' languages have in common, and the one door to each of them.
//!
//! Rooms outside ask a [`Dialect`]; nothing outside this folder knows a field name of a provider.

pub mod anthropic;
mod fields;
pub mod fold;
mod object;
pub mod openai;

use bytes::Bytes;

use crate::facts::Facts;
use crate::hold::Bound;
use crate::json::{self, Edit};
use crate::meter::{Produced, UsageReport};
use crate::money::price::Tier;
use crate::stream::sse::Event;
use crate::verdict::{Rejection, UpstreamError};

/// A provider's language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `OpenAI`'s chat completions and whatever is compatible with them.
    OpenAi,
    /// Anthropic's messages and whatever is compatible with them.
    Anthropic,
}

/// What one upstream of a dialect needs or cannot bear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manners {
    /// The model as the upstream calls it.
    pub native_model: String,
    /// It understands `stream_options`.
    pub stream_usage: bool,
    /// The field that takes our output bound.
    pub output_field: OutputField,
    /// It is asked for a stream where a whole answer is wanted, and the stream is folded.
    pub fold: bool,
}

/// Which field an upstream reads its output bound from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutputField {
    /// The current one; the only one that reasoning models accept.
    MaxCompletionTokens,
    /// What older servers know.
    MaxTokens,
}

/// What an event of a stream, or a whole answer, is to the gate and the meter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it is.
    pub kind: Kind,
    /// A usage report in it.
    pub usage: Option<UsageReport>,
    /// The service tier that it names.
    pub tier: Option<Tier>,
    /// What it produced.
    pub produced: Produced,
    /// How many choices it says are finished.
    pub finished: u64,
    /// What to change before the caller sees it.
    pub edits: Vec<Edit>,
}

/// Kinds of pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Content, a tool call, reasoning or a finish: this is an answer.
    Meaningful,
    /// It opens or accompanies an answer without being one.
    Opener,
    /// It keeps the connection alive and says nothing.
    Ping,
    /// Usage and nothing else, which the caller did not ask for.
    UsageOnly,
    /// The end of the stream.
    Done,
    /// An error in place of an answer.
    Error(UpstreamError),
    /// Not of this dialect.
    Unreadable,
}

/// What the caller asked for that shapes the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Events, not one JSON text.
    pub stream: bool,
    /// One JSON text, for which the upstream was asked for events.
    pub fold: bool,
    /// How many choices were asked for.
    pub choices: u64,
    /// Usage stays in the stream.
    pub wants_usage: bool,
    /// The name that the answer's `model` shows.
    pub public_model: String,
    /// The id that an error in the answer names.
    pub request_id: String,
}

impl Manners {
    /// Whether the answer to a request is folded out of a stream.
    #[must_use]
    pub fn folds(&self, facts: &Facts) -> bool {
        self.fold && facts.foldable && !facts.stream
    }
}

impl Piece {
    fn of(kind: Kind) -> Self {
        Self { kind, usage: None, tier: None, produced: Produced::default(), finished: 0, edits: vec![] }
    }
}

impl Dialect {
    /// Reads a request.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn read(self, body: &[u8]) -> Result<Facts, Rejection> {
        match self {
            Self::OpenAi => openai::request::read(body),
            Self::Anthropic => anthropic::request::read(body),
        }
    }

    /// What to change in the body for one upstream.
    #[must_use]
    pub fn edits(self, body: &[u8], facts: &Facts, bound: &Bound, manners: &Manners) -> Vec<Edit> {
        let mut edits = match self {
            Self::OpenAi => openai::request::edits(body, facts, bound, manners),
            Self::Anthropic => anthropic::request::edits(facts, bound, manners),
        };
        edits.extend(facts.spans.ours.iter().map(|span| Edit { span: span.clone(), with: vec![] }));
        edits
    }

    /// What an event of a stream is.
    #[must_use]
    pub fn event(self, event: &Event, shape: &Shape) -> Piece {
        match self {
            Self::OpenAi => openai::answer::event(event, shape),
            Self::Anthropic => anthropic::answer::event(event, shape),
        }
    }

    /// The event that ends every stream.
    #[must_use]
    pub const fn terminal_event(self) -> &'static [u8] {
        match self {
            Self::OpenAi => b"data: [DONE]\n\n",
            Self::Anthropic => b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        }
    }

    /// What a whole answer is.
    #[must_use]
    pub fn whole(self, body: &[u8], shape: &Shape) -> Piece {
        match self {
            Self::OpenAi => openai::answer::whole(body, shape),
            Self::Anthropic => anthropic::answer::whole(body, shape),
        }
    }

    /// A usage report near the end of a whole answer that was too long to be read.
    #[must_use]
    pub fn usage_in_tail(self, tail: &[u8], shape: &Shape) -> Option<UsageReport> {
        let at = memchr::memmem::rfind(tail, b"\"usage\"")?;
        let member = [b"{", tail.get(at..)?].concat();
        let value = json::find_in_prefix(&member, "usage")?;
        let shell: &[u8] = match self {
            Self::OpenAi => br#"{"choices":[],"usage":"#,
            Self::Anthropic => br#"{"type":"message","content":[],"usage":"#,
        };
        self.whole(&[shell, member.get(value)?, b"}"].concat(), shape).usage
    }

    /// What an error status with its body says.
    #[must_use]
    pub fn error(self, status: u16, body: &[u8]) -> UpstreamError {
        match self {
            Self::OpenAi => openai::error::read(status, body),
            Self::Anthropic => anthropic::error::read(status, body),
        }
    }

    /// The field by which a caller bounds the output.
    #[must_use]
    pub const fn output_field(self) -> &'static str {
        match self {
            Self::OpenAi => "max_completion_tokens",
            Self::Anthropic => "max_tokens",
        }
    }

    /// An error as the body of a response.
    #[must_use]
    pub fn error_body(self, rejection: &Rejection, request_id: &str) -> Bytes {
        match self {
            Self::OpenAi => openai::error::body(rejection),
            Self::Anthropic => anthropic::error::body(rejection, request_id),
        }
    }

    /// An error as the last event of a stream that has begun.
    #[must_use]
    pub fn error_event(self, rejection: &Rejection, request_id: &str) -> Bytes {
        match self {
            Self::OpenAi => openai::error::event(rejection),
            Self::Anthropic => anthropic::error::event(rejection, request_id),
        }
    }
}
