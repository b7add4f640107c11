//! What the providers' languages have in common, and the one door to each of them.
//!
//! Rooms outside ask an [`Operation`], or its [`Dialect`] for what all operations of one have in common;
//! nothing outside this folder knows a field name of a provider.

pub mod anthropic;
mod fields;
pub mod fold;
mod object;
pub mod openai;
mod operation;
pub mod pattern;

use std::ops::Range;

use bytes::Bytes;

use crate::facts::Facts;
use crate::json::Edit;
use crate::meter::{Produced, UsageReport};
use crate::money::price::Tier;
use crate::verdict::{Rejection, UpstreamError};
pub use operation::Operation;

/// A provider's language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `OpenAI`'s, and of whatever is compatible with it.
    OpenAi,
    /// Anthropic's, and of whatever is compatible with it.
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
    /// That is all that was produced so far, and not something new.
    pub restates: bool,
    /// Its number in the stream, where its operation numbers events.
    pub sequence: Option<u64>,
    /// How many choices it says are finished.
    pub finished: u64,
    /// What to change before the caller sees it.
    pub edits: Vec<Edit>,
    /// Where in its data the text stands that it says, quotes left out: one string without escapes.
    pub text: Option<Range<usize>>,
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
    /// The end of the stream, which is an answer by itself.
    Last,
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
    /// Bytes of the prompt that come back as if they were output, in all choices together.
    pub echoed_bytes: u64,
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

    /// What puts the upstream's name of the model in for ours, where they differ.
    fn rename(&self, facts: &Facts) -> Option<Edit> {
        let name = serde_json::Value::from(self.native_model.as_str()).to_string();
        let differs = self.native_model != facts.model;
        differs.then(|| Edit { span: facts.spans.model.clone(), with: name.into_bytes() })
    }
}

impl Shape {
    /// The shape of the answer to a request.
    #[must_use]
    pub fn new(facts: &Facts, public_model: &str, request_id: &str) -> Self {
        Self {
            stream: facts.stream,
            fold: false,
            choices: facts.choices,
            echoed_bytes: facts.echoed_bytes,
            wants_usage: facts.wants_usage,
            public_model: public_model.to_owned(),
            request_id: request_id.to_owned(),
        }
    }
}

impl Piece {
    fn of(kind: Kind) -> Self {
        Self {
            kind,
            usage: None,
            tier: None,
            produced: Produced::default(),
            restates: false,
            sequence: None,
            finished: 0,
            edits: vec![],
            text: None,
        }
    }
}

impl Dialect {
    /// What an error status with its body says.
    #[must_use]
    pub fn error(self, status: u16, body: &[u8]) -> UpstreamError {
        match self {
            Self::OpenAi => openai::error::read(status, body),
            Self::Anthropic => anthropic::error::read(status, body),
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
}
