//! A JSON object by its text: its members, and where they lie.
//!
//! Requests and answers of every dialect are read through it, since both are changed in place and
//! neither may be written anew. Deliberately absent: any meaning.

use std::borrow::Cow;
use std::ops::Range;

use serde::Deserialize;

use crate::json::{self, Edit, Malformed, Member};

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

pub(super) struct Object<'a> {
    text: &'a str,
    members: Vec<Member<'a>>,
}

impl<'a> Object<'a> {
    /// `None` for what is no object.
    pub(super) fn read(text: &'a [u8]) -> Option<Self> {
        Self::of(std::str::from_utf8(text).ok()?).ok()
    }

    /// The same where the text has to be valid JSON; `None` for what is not.
    pub(super) fn read_sound(text: &'a [u8]) -> Option<Self> {
        Self::sound(std::str::from_utf8(text).ok()?).ok()
    }

    /// One of the two, of which `take` may read some values itself: see [`json::members_taken`].
    pub(super) fn read_taking(
        text: &'a [u8],
        sound: bool,
        take: impl FnMut(&str, &'a str) -> Option<usize>,
    ) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        Some(Self { text, members: json::members_taken(text, sound, take).ok()? })
    }

    /// The object that is all of `text`, which has to be valid JSON.
    pub(super) fn sound(text: &'a str) -> Result<Self, Malformed> {
        Ok(Self { text, members: json::sound_members(text)? })
    }

    /// The object that is all of `text`, whatever its members are.
    pub(super) fn of(text: &'a str) -> Result<Self, Malformed> {
        Ok(Self { text, members: json::members(text)? })
    }

    /// The object that `text` begins with, whatever its members are, and how long it is.
    pub(super) fn first(text: &'a str) -> Result<(Self, usize), Malformed> {
        let (members, length) = json::first_members(text)?;
        Ok((Self { text: text.get(..length).unwrap_or_default(), members }, length))
    }

    /// Where the inside of a string stands, that is given as a part of this object's text, with its quotes. `None` for
    /// what is no string or has escapes.
    pub(super) fn inside(&self, quoted: &str) -> Option<Range<usize>> {
        let inside = quoted.strip_prefix('"')?.strip_suffix('"').filter(|inside| !inside.contains('\\'))?;
        let start = inside.as_ptr().addr().checked_sub(self.text.as_ptr().addr())?;
        let span = start..start + inside.len();
        (self.text.get(span.clone()) == Some(inside)).then_some(span)
    }

    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    pub(super) fn members(&self) -> &[Member<'a>] {
        &self.members
    }

    /// Where the value of `key` lies, also when it is `null`.
    pub(super) fn span(&self, key: &str) -> Option<Range<usize>> {
        self.members.iter().find(|m| m.key == key).map(|m| m.value.clone())
    }

    /// The text of a value; `null` counts as absent, as the APIs treat it.
    pub(super) fn value(&self, key: &str) -> Option<&'a str> {
        self.text.get(self.span(key)?).filter(|text| *text != "null")
    }

    /// All values of `key`, for what comes twice.
    pub(super) fn values(&self, key: &str) -> impl Iterator<Item = &'a str> {
        let of_key = self.members.iter().filter(move |m| m.key == key);
        of_key.filter_map(|m| self.text.get(m.value.clone())).filter(|text| *text != "null")
    }

    /// The value of `key` where it is a string.
    pub(super) fn string(&self, key: &str) -> Option<Cow<'a, str>> {
        serde_json::from_str::<Text<'a>>(self.value(key)?).ok().map(|text| text.0)
    }

    /// Whether one of these comes twice, so that nobody knows which one a reader takes.
    pub(super) fn is_ambiguous(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.members.iter().filter(|m| m.key == *key).count() > 1)
    }

    /// What puts the public name of the model in for the upstream's own.
    pub(super) fn rename_model(&self, public: &str) -> Vec<Edit> {
        renamed(self.text, &self.members, public)
    }

    /// The same for the `model` of the object that is the value of `key`.
    pub(super) fn rename_model_inside(&self, key: &str, public: &str) -> Vec<Edit> {
        let inside = self.span(key).and_then(|span| json::members_at(self.text, &span).ok());
        inside.map_or_else(Vec::new, |members| renamed(self.text, &members, public))
    }
}

fn renamed(text: &str, members: &[Member<'_>], public: &str) -> Vec<Edit> {
    let foreign = |m: &&Member<'_>| {
        m.key == "model" && text.get(m.value.clone()).unwrap_or_default().trim_matches('"') != public
    };
    let name =
        |m: &Member<'_>| Edit { span: m.value.clone(), with: serde_json::to_vec(public).unwrap_or_default() };
    members.iter().filter(foreign).map(name).collect()
}
