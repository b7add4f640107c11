//! A stream folded into the one JSON text that a caller asked for.
//!
//! Some upstreams are only watched well while they stream: the first event of a whole answer is its last. A
//! route with `fold: true` is asked for a stream where the caller wants a whole answer, and what comes is
//! put together here. Nothing of it reaches the caller before it is complete, so that a cut in the middle
//! still goes to the next candidate.
//!
//! Only requests are folded whose every field is in a tested list ([`Facts::foldable`]): an answer that a
//! fold cannot rebuild must never be made. What comes all the same and is not understood ends the fold as
//! no answer. Bounded by [`FOLD_BYTES_MAX`].
//!
//! [`Facts::foldable`]: crate::facts::Facts::foldable

use bytes::Bytes;
use serde_json::{Map, Value};

use super::Dialect;
use super::{anthropic, openai};

/// The data of all events of one fold together, in bytes.
pub const FOLD_BYTES_MAX: usize = 8 << 20;

/// What came cannot be folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stream cannot be folded into one answer")]
pub struct Unfoldable;

/// An answer in the making.
#[derive(Debug)]
pub struct Fold {
    bytes: usize,
    parts: Parts,
}

#[derive(Debug)]
enum Parts {
    OpenAi(openai::fold::Parts),
    Anthropic(anthropic::fold::Parts),
}

impl Fold {
    /// Nothing has come yet.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        let parts = match dialect {
            Dialect::OpenAi => Parts::OpenAi(openai::fold::Parts::default()),
            Dialect::Anthropic => Parts::Anthropic(anthropic::fold::Parts::default()),
        };
        Self { bytes: 0, parts }
    }

    /// Takes the data of an event that is neither a ping nor the end.
    ///
    /// # Errors
    /// [`Unfoldable`] when it is not understood, or too much.
    pub fn push(&mut self, data: &[u8]) -> Result<(), Unfoldable> {
        self.bytes = self.bytes.saturating_add(data.len());
        if self.bytes > FOLD_BYTES_MAX {
            return Err(Unfoldable);
        }
        let event: Map<String, Value> = serde_json::from_slice(data).map_err(|_| Unfoldable)?;
        match &mut self.parts {
            Parts::OpenAi(parts) => parts.push(event),
            Parts::Anthropic(parts) => parts.push(event),
        }
    }

    /// The whole answer.
    ///
    /// # Errors
    /// [`Unfoldable`] when something is missing that a whole answer has.
    pub fn finish(self) -> Result<Bytes, Unfoldable> {
        let whole = match self.parts {
            Parts::OpenAi(parts) => parts.finish()?,
            Parts::Anthropic(parts) => parts.finish()?,
        };
        serde_json::to_vec(&whole).map(Bytes::from).map_err(|_| Unfoldable)
    }
}

/// The object that is the value of `key`, taken out.
pub(super) fn take_object(of: &mut Map<String, Value>, key: &str) -> Option<Map<String, Value>> {
    match of.remove(key) {
        Some(Value::Object(object)) => Some(object),
        _ => None,
    }
}

/// The text that is the value of `key`, taken out.
pub(super) fn take_text(of: &mut Map<String, Value>, key: &str) -> Option<String> {
    match of.remove(key) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    }
}

/// Lets the text at `key` grow.
pub(super) fn grow(object: &mut Map<String, Value>, key: &str, more: &str) {
    match object.get_mut(key) {
        Some(Value::String(text)) => text.push_str(more),
        _ => {
            object.insert(key.to_owned(), Value::from(more));
        }
    }
}
