//! The items that responses are made of, as input and as output, and what they say.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::super::super::fields::string_bytes;
use crate::meter::Produced;

/// An item of output. Fields of kinds that nobody knows yet may have any type.
#[derive(Deserialize)]
pub(super) struct Item<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    summary: Option<&'a RawValue>,
}

impl Item<'_> {
    /// Counts what it says; answers whether it is more than an empty beginning.
    pub(super) fn count(&self, produced: &mut Produced) -> bool {
        match self.kind.as_deref() {
            Some("message") => says_in(self.content, produced),
            Some("reasoning") => {
                // What it thought is billed; a summary of it only stands for it.
                let thought = says_in(self.content, produced);
                if thought { true } else { says_in(self.summary, produced) }
            }
            Some("function_call" | "custom_tool_call") => {
                produced.tool_calls += 1;
                for part in [self.name, self.arguments, self.input] {
                    says(part, produced);
                }
                true
            }
            // Calls of built-in tools and what comes next: content, but not the model's words.
            _ => true,
        }
    }
}

/// A part of a message, or of reasoning.
#[derive(Deserialize)]
pub(super) struct Part<'a> {
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
}

impl Part<'_> {
    /// As [`Item::count`].
    pub(super) fn count(&self, produced: &mut Produced) -> bool {
        let text = says(self.text, produced);
        says(self.refusal, produced) || text
    }
}

/// Counts a string; answers whether there is something in it.
pub(super) fn says(text: Option<&RawValue>, produced: &mut Produced) -> bool {
    let bytes = text.map_or(0, |text| string_bytes(text.get()));
    produced.text_bytes = produced.text_bytes.saturating_add(bytes);
    bytes > 0
}

fn says_in(parts: Option<&RawValue>, produced: &mut Produced) -> bool {
    let parts: Vec<Part<'_>> =
        parts.and_then(|parts| serde_json::from_str(parts.get()).ok()).unwrap_or_default();
    let mut says = false;
    for part in &parts {
        says |= part.count(produced);
    }
    says
}
