//! The fields of a request's body that are read alike in every dialect.
//!
//! A field that we act on and that comes twice is refused: the upstream might read the other one.
//! Deliberately absent: what a field means, which is each dialect's own.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserializer as _, Visitor};

use super::object::Object;
use crate::json::{self, Malformed};
use crate::preferences::{self, Stated};
use crate::verdict::{Reason, Rejection};

/// The largest output bound that is taken seriously; far above any model's.
pub(super) const OUTPUT_TOKENS_MAX: u64 = 10_000_000;
/// The longest name of a model, in bytes.
const MODEL_BYTES_MAX: usize = 256;

pub(super) struct Fields<'a> {
    object: Object<'a>,
}

impl<'a> Fields<'a> {
    /// Reads the body; `acted_on` may come once each.
    pub(super) fn read(body: &'a [u8], acted_on: &[&'static str]) -> Result<Self, Rejection> {
        let text = std::str::from_utf8(body).map_err(|e| malformed(Malformed::Syntax(e.to_string())))?;
        let object = Object::sound(text).map_err(|why| match why {
            Malformed::TooDeep | Malformed::TooMany => malformed(why),
            // What is wrong beside that, the check says better.
            Malformed::Syntax(_) | Malformed::NotAnObject => {
                malformed(json::check(body).err().unwrap_or(why))
            }
        })?;
        for field in acted_on {
            if object.members().iter().filter(|m| m.key == *field).count() > 1 {
                let message = format!("`{field}` comes twice: send it once.");
                return Err(Rejection::new(Reason::DuplicateField, message).param(field));
            }
        }
        Ok(Self { object })
    }

    pub(super) fn span(&self, key: &str) -> Option<Range<usize>> {
        self.object.span(key)
    }

    pub(super) fn value(&self, key: &str) -> Option<&'a str> {
        self.object.value(key)
    }

    /// Where the values of these fields lie, of those that are there.
    pub(super) fn spans(&self, keys: &[&str]) -> Vec<Range<usize>> {
        keys.iter().filter(|key| self.value(key).is_some()).filter_map(|key| self.span(key)).collect()
    }

    /// The text of a field that must be there; `help` says what it is.
    pub(super) fn needed(&self, key: &'static str, help: &str) -> Result<&'a str, Rejection> {
        let missing =
            || Rejection::new(Reason::MissingField, format!("`{key}` is missing{help}.")).param(key);
        self.value(key).ok_or_else(missing)
    }

    /// Whether every field is among these.
    pub(super) fn are_all_among(&self, known: &[&str]) -> bool {
        self.object.members().iter().all(|member| known.contains(&member.key.as_ref()))
    }

    /// What the caller wants of the routing, and where it stands.
    pub(super) fn preferences(&self) -> Result<Stated, Rejection> {
        preferences::read(self.object.text(), self.object.members())
    }

    /// The model's name and where it stands.
    pub(super) fn model(&self) -> Result<(String, Range<usize>), Rejection> {
        let text = self.needed("model", ": name the model to use")?;
        let model: String = serde_json::from_str(text)
            .map_err(|_| invalid("model", "must be a string: the name of a model"))?;
        if model.is_empty() || model.len() > MODEL_BYTES_MAX {
            return Err(invalid("model", "must be the name of a model, of 1 to 256 bytes"));
        }
        Ok((model, self.span("model").unwrap_or_default()))
    }

    pub(super) fn flag(&self, key: &'static str) -> Result<bool, Rejection> {
        match self.value(key) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(invalid(key, "must be true or false")),
        }
    }

    pub(super) fn whole_number(
        &self,
        key: &'static str,
        least: u64,
        most: u64,
    ) -> Result<Option<u64>, Rejection> {
        let Some(text) = self.value(key) else { return Ok(None) };
        match text.parse::<u64>() {
            Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(invalid(key, &format!("must be a whole number from {least} to {most}"))),
        }
    }
}

/// Hands each object of the list `text`, which is valid JSON, to `visit`, one at a time: a list of a million tiny
/// objects must not become a million structs. What comes twice in one of them is the provider's business.
///
/// # Errors
/// What `visit` refuses, or what `malformed` makes of a text that is no such list.
pub(super) fn each<'a>(
    text: &'a str,
    malformed: impl FnOnce(String) -> Rejection,
    mut visit: impl FnMut(&Object<'a>) -> Result<(), Rejection>,
) -> Result<(), Rejection> {
    let listed = list(text).map_err(Err).and_then(|list| {
        json::elements(list, |rest| {
            let (object, length) = Object::first(rest).map_err(|why| Err(why.to_string()))?;
            visit(&object).map_err(Ok).map(|()| length)
        })
    });
    listed.map_err(|refused| refused.unwrap_or_else(malformed))
}

/// Hands the text of each element of the list `text`, which is valid JSON, to `visit`.
///
/// # Errors
/// What `visit` says against an element, or why the text is no list.
pub(super) fn elements<'a>(
    text: &'a str,
    mut visit: impl FnMut(&'a str) -> Result<(), String>,
) -> Result<(), String> {
    json::elements(list(text)?, |rest| {
        let length = json::first_length(rest).map_err(|why| why.to_string())?;
        visit(rest.get(..length).unwrap_or_default()).map(|()| length)
    })
}

/// The text of a list; for what is none, why.
fn list(text: &str) -> Result<&str, String> {
    if text.starts_with('[') {
        return Ok(text);
    }
    let read = serde_json::Deserializer::from_str(text).deserialize_seq(List);
    Err(read.err().map_or_else(String::new, |why| why.to_string()))
}

/// Says what was expected where there is none.
struct List;

impl Visitor<'_> for List {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }
}

pub(super) fn invalid(param: &'static str, what: &str) -> Rejection {
    Rejection::new(Reason::InvalidValue, format!("`{param}` {what}.")).param(param)
}

/// The length of a text in bytes.
pub(super) fn size(text: &str) -> u64 {
    u64::try_from(text.len()).unwrap_or(u64::MAX)
}

/// The length of a JSON string, with its escapes resolved.
pub(super) fn string_bytes(json: &str) -> u64 {
    if json.contains('\\') {
        return serde_json::from_str::<String>(json).map_or(0, |text| size(&text));
    }
    json.strip_prefix('"').and_then(|text| text.strip_suffix('"')).map_or(0, size)
}

fn malformed(why: Malformed) -> Rejection {
    Rejection::new(Reason::InvalidJson, format!("The body cannot be read: {why}."))
}
