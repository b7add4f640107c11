//! Where the members of a JSON object lie in its text.
//!
//! The gateway changes two or three values of a request and must leave every other byte as it is
//! (number spelling, key order, unknown fields: prompt caches of providers depend on them). So it
//! works on spans of the text instead of on a parsed tree.
//!
//! The scanner refuses what is nested too deep *before* a recursive parser sees it; of what [`members_taken`] lets a
//! parser read first, which stops by itself at its own bound, nothing counts that is too deep. It looks twice as far as it
//! has to only where it is asked to: [`members`] follows brackets and strings, [`sound_members`] validates on the
//! way, which costs a fraction of a second reading. What is wrong with a text says [`check`], in `serde_json`'s words.

use std::borrow::Cow;
use std::ops::Range;

use serde::de::IgnoredAny;

/// How deep arrays and objects may nest. `serde_json` itself stops at 128.
pub const DEPTH_MAX: usize = 120;

/// How many members an object may have whose members we look at; requests of all dialects have about
/// thirty. A body of a million tiny members must not become a million structs.
pub const MEMBERS_MAX: usize = 1024;

/// Why a text is not an object that can be worked on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The text is not JSON at all.
    #[error("not valid JSON: {0}")]
    Syntax(String),
    /// It is JSON, but no object.
    #[error("the body must be a JSON object")]
    NotAnObject,
    /// It nests deeper than [`DEPTH_MAX`].
    #[error("nested deeper than {DEPTH_MAX} levels")]
    TooDeep,
    /// It has more than [`MEMBERS_MAX`] members.
    #[error("more than {MEMBERS_MAX} members")]
    TooMany,
}

/// One member of the outermost object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    /// The key, with its escapes resolved.
    pub key: Cow<'a, str>,
    /// The bytes of the value.
    pub value: Range<usize>,
    /// The bytes to cut so that the member is gone and the rest is still an object.
    pub whole: Range<usize>,
}

/// Checks that `text` is one JSON object, whole, with nothing behind it.
///
/// # Errors
/// [`Malformed`] with the position that `serde_json` names.
pub fn check(text: &[u8]) -> Result<&str, Malformed> {
    let text = std::str::from_utf8(text).map_err(|e| Malformed::Syntax(e.to_string()))?;
    if text.trim_start().as_bytes().first().is_some_and(|b| b"[\"0123456789-tfn".contains(b)) {
        serde_json::from_str::<IgnoredAny>(text).map_err(|e| Malformed::Syntax(e.to_string()))?;
        return Err(Malformed::NotAnObject);
    }
    serde_json::from_str::<IgnoredAny>(text).map_err(|e| Malformed::Syntax(e.to_string()))?;
    Ok(text)
}

/// The members of the object `text`, in their order.
///
/// # Errors
/// [`Malformed`] when brackets or strings do not close, nest too deep or are too many. A text that passes here
/// may still be bad JSON inside its values: see [`check`].
pub fn members(text: &str) -> Result<Vec<Member<'_>>, Malformed> {
    members_taken(text, false, |_, _| None)
}

/// The members of the object `text`, which is valid JSON from its first byte to its last.
///
/// # Errors
/// [`Malformed`] for what [`check`] refuses, what nests deeper than [`DEPTH_MAX`] or has too many members.
pub fn sound_members(text: &str) -> Result<Vec<Member<'_>>, Malformed> {
    members_taken(text, true, |_, _| None)
}

/// [`sound_members`] or [`members`], of which `take` may read some values itself: it is handed a name and the text from
/// its value on, and answers how long a value was that it found to be valid JSON, or `None`.
///
/// # Errors
/// Those of [`sound_members`] or [`members`], whatever was taken.
pub fn members_taken<'a>(
    text: &'a str,
    sound: bool,
    take: impl FnMut(&str, &'a str) -> Option<usize>,
) -> Result<Vec<Member<'a>>, Malformed> {
    let mut scan = Scan { text, at: 0, strict: sound };
    let found = scan.members(take)?;
    scan.skip_space();
    if scan.at < scan.text.len() {
        return Err(Malformed::Syntax(format!("trailing characters at byte {}", scan.at)));
    }
    Ok(found)
}

/// The members of the object that lies at `span` of `text`, with their places in `text`.
///
/// # Errors
/// As [`members`]; also when there is no object at `span`.
pub fn members_at<'a>(text: &'a str, span: &Range<usize>) -> Result<Vec<Member<'a>>, Malformed> {
    let inside = text.get(span.clone()).ok_or(Malformed::NotAnObject)?;
    let moved = |range: Range<usize>| range.start + span.start..range.end + span.start;
    let found = members(inside)?.into_iter();
    Ok(found.map(|m| Member { key: m.key, value: moved(m.value), whole: moved(m.whole) }).collect())
}

/// The members of the object that `text` begins with, and how long it is.
///
/// # Errors
/// As [`members`].
pub fn first_members(text: &str) -> Result<(Vec<Member<'_>>, usize), Malformed> {
    let mut scan = Scan { text, at: 0, strict: false };
    let found = scan.members(|_, _| None)?;
    Ok((found, scan.at))
}

/// The length of the value that `text` begins with.
///
/// # Errors
/// [`Malformed`] where brackets or strings do not close.
pub fn first_length(text: &str) -> Result<usize, Malformed> {
    let mut scan = Scan { text, at: 0, strict: false };
    scan.skip_value()?;
    Ok(scan.at)
}

/// Hands each element of the list `text`, which is valid JSON, to `read`, with all that follows it; `read` answers how
/// long it is.
///
/// # Errors
/// What `read` says against an element.
pub fn elements<'a, E>(text: &'a str, mut read: impl FnMut(&'a str) -> Result<usize, E>) -> Result<(), E> {
    let mut rest = text.strip_prefix('[').unwrap_or_default().trim_ascii_start();
    while !matches!(rest.as_bytes().first(), None | Some(b']')) {
        let length = read(rest)?.max(1); // it ends, whatever the text is
        rest = rest.get(length..).unwrap_or_default().trim_ascii_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_ascii_start();
    }
    Ok(())
}

/// The bytes to cut so that some members of `text` are gone. A run of them at the head takes the comma behind it along,
/// every other one the comma before: so no comma is asked for by two.
#[must_use]
pub fn cuts(text: &str, members: &[Member<'_>], is_cut: impl Fn(&Member<'_>) -> bool) -> Vec<Range<usize>> {
    let head = members.iter().take_while(|member| is_cut(member)).count();
    let mut cuts = vec![];
    if let (Some(first), Some(last)) = (members.first(), head.checked_sub(1).and_then(|n| members.get(n))) {
        let behind = text.get(last.value.end..).unwrap_or_default();
        let comma = behind.find(|c: char| !c.is_ascii_whitespace()).filter(|_| members.len() > head);
        cuts.push(first.whole.start..last.value.end + comma.map_or(0, |at| at + 1));
    }
    cuts.extend(members.iter().skip(head).filter(|member| is_cut(member)).map(|m| m.whole.clone()));
    cuts
}

/// The value of the first member called `key` in a text that may be cut off anywhere.
#[must_use]
pub fn find_in_prefix(text: &[u8], key: &str) -> Option<Range<usize>> {
    let valid = std::str::from_utf8(text).map_or_else(|e| e.valid_up_to(), |_| text.len());
    let text = std::str::from_utf8(text.get(..valid)?).ok()?;
    let mut found = None;
    // A cut text ends in an error: what was seen before it counts.
    let each = |member: Member<'_>| {
        if member.key == key {
            found = Some(member.value);
        }
        found.is_none()
    };
    let _cut = Scan { text, at: 0, strict: false }.walk(|_, _| None, each);
    found
}

struct Scan<'a> {
    text: &'a str,
    at: usize,
    /// Whether what is passed over has to be valid.
    strict: bool,
}

impl<'a> Scan<'a> {
    fn members(
        &mut self,
        take: impl FnMut(&str, &'a str) -> Option<usize>,
    ) -> Result<Vec<Member<'a>>, Malformed> {
        let mut found = Vec::with_capacity(12);
        let each = |member| {
            found.push(member);
            found.len() <= MEMBERS_MAX
        };
        self.walk(take, each)?;
        if found.len() > MEMBERS_MAX { Err(Malformed::TooMany) } else { Ok(found) }
    }

    /// Hands every member to `each` until it answers `false`; its value before to `take`, as [`members_taken`] says.
    fn walk(
        &mut self,
        mut take: impl FnMut(&str, &'a str) -> Option<usize>,
        mut each: impl FnMut(Member<'a>) -> bool,
    ) -> Result<(), Malformed> {
        self.skip_space();
        if self.next() != Some(b'{') {
            return Err(Malformed::NotAnObject);
        }
        let mut start = self.at;
        let mut first = true;
        loop {
            self.skip_space();
            if first && self.peek() == Some(b'}') {
                self.at += 1;
                return Ok(());
            }
            let key = self.key()?;
            self.skip_space();
            self.expect(b':')?;
            self.skip_space();
            let value_start = self.at;
            let rest = self.text.get(value_start..).unwrap_or_default();
            match take(&key, rest).filter(|length| is_shallow(rest.get(..*length).unwrap_or_default())) {
                Some(length) => self.at += length,
                None => self.skip_value()?,
            }
            let value = value_start..self.at;
            self.skip_space();
            let end = self.next();
            // The first member takes the comma behind it along, every other one the comma before.
            let whole = match (first, end) {
                (true, Some(b',')) => start..self.at,
                (true, _) => start..value.end,
                (false, _) => start..value.end,
            };
            start = value.end;
            first = false;
            if !each(Member { key, value, whole }) {
                return Ok(());
            }
            match end {
                Some(b',') => {}
                Some(b'}') => return Ok(()),
                _ => return Err(self.broken("expected `,` or `}`")),
            }
        }
    }

    fn key(&mut self) -> Result<Cow<'a, str>, Malformed> {
        let start = self.at;
        let escaped = self.skip_string()?;
        if escaped {
            // `"mod\u0065l"` is `model` too: a duplicate must not slip past in disguise.
            let quoted = self.text.get(start..self.at).unwrap_or_default();
            return serde_json::from_str::<String>(quoted)
                .map(Cow::Owned)
                .map_err(|e| Malformed::Syntax(e.to_string()));
        }
        Ok(Cow::Borrowed(self.text.get(start + 1..self.at - 1).unwrap_or_default()))
    }

    fn skip_value(&mut self) -> Result<(), Malformed> {
        match self.peek() {
            Some(b'"') => self.skip_string().map(drop),
            Some(b'{' | b'[') if self.strict => self.skip_sound_nested(),
            Some(b'{' | b'[') => self.skip_nested(),
            Some(_) => self.skip_scalar(),
            None => Err(self.broken("the text ends early")),
        }
    }

    fn skip_scalar(&mut self) -> Result<(), Malformed> {
        let start = self.at;
        while self.peek().is_some_and(|b| !matches!(b, b',' | b'}' | b']') && b > b' ') {
            self.at += 1;
        }
        let scalar = self.text.as_bytes().get(start..self.at).unwrap_or_default();
        if self.strict && !matches!(scalar, b"true" | b"false" | b"null") && !is_number(scalar) {
            return Err(self.broken("expected a value before"));
        }
        Ok(())
    }

    /// The same as [`Self::skip_nested`], for a text of which nobody knows that it is JSON.
    fn skip_sound_nested(&mut self) -> Result<(), Malformed> {
        let mut depth = 1_usize; // the outermost object
        // Of each level whether it is an object, the innermost last.
        let mut objects = 0_u128;
        const { assert!(DEPTH_MAX <= 128, "a bit for each level") };
        loop {
            self.skip_space();
            let opens = self.peek().filter(|byte| matches!(byte, b'{' | b'['));
            let Some(bracket) = opens else {
                self.skip_value()?;
                if self.ends_levels(&mut depth, &mut objects)? {
                    return Ok(());
                }
                continue;
            };
            self.at += 1;
            depth += 1;
            if depth > DEPTH_MAX {
                return Err(Malformed::TooDeep);
            }
            let is_object = bracket == b'{';
            objects = (objects << 1) | u128::from(is_object);
            self.skip_space();
            let is_empty = self.peek() == Some(if is_object { b'}' } else { b']' });
            if is_empty {
                if self.ends_levels(&mut depth, &mut objects)? {
                    return Ok(());
                }
            } else if is_object {
                self.skip_name()?;
            }
        }
    }

    /// Behind a value, or in a level without one: closes as many levels as end here. Answers whether that was all of
    /// them; otherwise another value follows.
    fn ends_levels(&mut self, depth: &mut usize, objects: &mut u128) -> Result<bool, Malformed> {
        while *depth > 1 {
            self.skip_space();
            let in_object = *objects & 1 == 1;
            match self.next() {
                Some(b',') if in_object => {
                    self.skip_space();
                    return self.skip_name().map(|()| false);
                }
                Some(b',') => return Ok(false),
                Some(b'}') if in_object => {}
                Some(b']') if !in_object => {}
                _ => return Err(self.broken("expected `,` or the end of a list or an object")),
            }
            *depth -= 1;
            *objects >>= 1;
        }
        Ok(true)
    }

    fn skip_name(&mut self) -> Result<(), Malformed> {
        self.skip_string()?;
        self.skip_space();
        self.expect(b':')
    }

    fn skip_nested(&mut self) -> Result<(), Malformed> {
        let mut depth = 1_usize; // the outermost object
        let base = depth;
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.skip_string()?;
                    continue;
                }
                Some(b'{' | b'[') => depth += 1,
                Some(b'}' | b']') => depth -= 1,
                Some(_) => {}
                None => return Err(self.broken("the text ends early")),
            }
            self.at += 1;
            if depth > DEPTH_MAX {
                return Err(Malformed::TooDeep);
            }
            if depth == base {
                return Ok(());
            }
        }
    }

    /// Answers whether it has escapes.
    fn skip_string(&mut self) -> Result<bool, Malformed> {
        self.expect(b'"')?;
        let mut escaped = false;
        loop {
            let rest = self.text.as_bytes().get(self.at..).unwrap_or_default();
            let Some(at) = special(rest) else {
                self.at = self.text.len();
                return Err(self.broken("a string does not end"));
            };
            match rest.get(at..).unwrap_or_default() {
                [b'"', ..] => {
                    self.at += at + 1;
                    return Ok(escaped);
                }
                escape @ [b'\\', ..] if !self.strict || is_escape(escape) => {
                    self.at += at + 2;
                    escaped = true;
                }
                // A control character.
                _ if !self.strict => self.at += at + 1,
                _ => return Err(self.broken("a string is none")),
            }
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), Malformed> {
        if self.next() == Some(byte) {
            Ok(())
        } else {
            Err(self.broken(&format!("expected `{}`", char::from(byte))))
        }
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(|b| matches!(b, b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek();
        self.at += usize::from(byte.is_some());
        byte
    }

    fn broken(&self, why: &str) -> Malformed {
        Malformed::Syntax(format!("{why} at byte {}", self.at))
    }
}

/// Whether a value is so short, or has so few brackets, that it cannot nest too deep.
fn is_shallow(value: &str) -> bool {
    value.len() < 2 * DEPTH_MAX
        || memchr::memchr2_iter(b'{', b'[', value.as_bytes()).nth(DEPTH_MAX - 1).is_none()
}

/// Where in a string the next byte stands that is not just itself: a quote, a backslash or a control character.
/// Most strings are shorter than a search takes to begin.
fn special(text: &[u8]) -> Option<usize> {
    const WORDS: usize = 4;
    let (words, tail) = text.as_chunks();
    for (index, word) in words.iter().take(WORDS).enumerate() {
        let found = specials(u64::from_le_bytes(*word));
        if found != 0 {
            return Some(index * 8 + usize::try_from(found.trailing_zeros() / 8).unwrap_or_default());
        }
    }
    let Some(long) = text.get(WORDS * 8..) else {
        return tail.iter().position(is_special).map(|at| words.len() * 8 + at);
    };
    let end = memchr::memchr2(b'"', b'\\', long);
    let before = long.get(..end.unwrap_or(long.len())).unwrap_or_default();
    let control = if has_control(before) { before.iter().position(is_special) } else { None };
    control.or(end).map(|at| WORDS * 8 + at)
}

/// Marks in its highest bit each of eight bytes that is special; above the first of them it may mark others too.
/// A byte less one, or less 32, borrows from the next where it is smaller.
const fn specials(word: u64) -> u64 {
    const ONES: u64 = u64::MAX / 0xff;
    const HIGH: u64 = ONES << 7;
    let quote = word ^ (ONES * b'"' as u64);
    let backslash = word ^ (ONES * b'\\' as u64);
    let is_zero = (quote.wrapping_sub(ONES) & !quote) | (backslash.wrapping_sub(ONES) & !backslash);
    let is_control = word.wrapping_sub(ONES * b' ' as u64) & !word;
    (is_zero | is_control) & HIGH
}

fn is_special(byte: &u8) -> bool {
    matches!(byte, b'"' | b'\\' | ..b' ')
}

/// Whether one of these may not stand in a string as it is. Looks at all of them, many at a time.
fn has_control(text: &[u8]) -> bool {
    text.iter().fold(false, |found, byte| found | (*byte < b' '))
}

/// Whether an escape stands at the beginning.
fn is_escape(text: &[u8]) -> bool {
    match text {
        [b'\\', b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't', ..] => true,
        [b'\\', b'u', a, b, c, d, ..] => [a, b, c, d].into_iter().all(u8::is_ascii_hexdigit),
        _ => false,
    }
}

/// RFC 8259 section 6.
fn is_number(text: &[u8]) -> bool {
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut rest = text.strip_prefix(b"-").unwrap_or(text);
    let whole = digits(rest);
    if whole == 0 || (whole > 1 && rest.starts_with(b"0")) {
        return false;
    }
    rest = rest.get(whole..).unwrap_or_default();
    if let Some(fraction) = rest.strip_prefix(b".") {
        let count = digits(fraction);
        if count == 0 {
            return false;
        }
        rest = fraction.get(count..).unwrap_or_default();
    }
    if let Some(exponent) = rest.strip_prefix(b"e").or_else(|| rest.strip_prefix(b"E")) {
        let unsigned =
            exponent.strip_prefix(b"+").or_else(|| exponent.strip_prefix(b"-")).unwrap_or(exponent);
        let count = digits(unsigned);
        return count > 0 && count == unsigned.len();
    }
    rest.is_empty()
}

/// One change to a text: put `with` where `span` is. An empty span inserts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// What is replaced.
    pub span: Range<usize>,
    /// What takes its place.
    pub with: Vec<u8>,
}

/// `text` with all `edits` made. Edits may come in any order; where two spans overlap the one that
/// starts first wins and the other is left out.
#[must_use]
pub fn apply(text: &[u8], edits: &mut [Edit]) -> Vec<u8> {
    edits.sort_by_key(|e| (e.span.start, e.span.end));
    let added: usize = edits.iter().map(|e| e.with.len()).sum();
    let mut out = Vec::with_capacity(text.len() + added);
    let mut at = 0;
    for edit in edits.iter() {
        if edit.span.start < at {
            continue;
        }
        out.extend_from_slice(text.get(at..edit.span.start).unwrap_or_default());
        out.extend_from_slice(&edit.with);
        at = edit.span.end;
    }
    out.extend_from_slice(text.get(at..).unwrap_or_default());
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys(text: &str) -> Vec<String> {
        members(text).unwrap().into_iter().map(|m| m.key.into_owned()).collect()
    }

    proptest! {
        #[test]
        fn what_is_special_is_found_wherever_it_stands(
            plain in proptest::collection::vec(b'#'..=b'[', 0..100),
            behind in proptest::collection::vec(any::<u8>(), 0..20),
        ) {
            let text = [plain, behind].concat();
            prop_assert_eq!(special(&text), text.iter().position(is_special));
        }
    }

    #[test]
    fn members_are_found_with_their_spans() {
        let text = r#" { "a" : [1,{"x":"}"}] ,"b":"q\"}" , "c":1e400 } "#;
        let found = members(text).unwrap();
        let values: Vec<_> = found.iter().map(|m| &text[m.value.clone()]).collect();
        assert_eq!(keys(text), ["a", "b", "c"]);
        assert_eq!(values, [r#"[1,{"x":"}"}]"#, r#""q\"}""#, "1e400"]);
    }

    #[test]
    fn members_of_a_member_have_their_places_in_the_whole() {
        let text = r#"{"a":1,"m": {"x":[1],"model":"up"} }"#;
        let outer = members(text).unwrap();
        let inner = members_at(text, &outer[1].value).unwrap();
        assert_eq!(inner.iter().map(|m| m.key.as_ref()).collect::<Vec<_>>(), ["x", "model"]);
        assert_eq!(&text[inner[1].value.clone()], r#""up""#);
        assert_eq!(members_at(text, &outer[0].value), Err(Malformed::NotAnObject));
        assert_eq!(members_at(text, &(0..999)), Err(Malformed::NotAnObject));
    }

    #[test]
    fn an_escaped_key_is_still_the_same_key() {
        assert_eq!(keys(r#"{"mod\u0065l":1,"model":2}"#), ["model", "model"]);
    }

    #[test]
    fn cutting_any_member_leaves_an_object() {
        for text in [r#"{"a":1}"#, r#"{"a":1,"b":2}"#, r#"{ "a" : 1 , "b" : 2 , "c":3 }"#] {
            for member in members(text).unwrap() {
                let mut cut = [Edit { span: member.whole, with: vec![] }];
                let rest = apply(text.as_bytes(), &mut cut);
                check(&rest).unwrap_or_else(|e| panic!("{}: {e}", String::from_utf8_lossy(&rest)));
            }
        }
    }

    #[test]
    fn nesting_is_bounded_without_recursion() {
        let deep = |n: usize| format!("{{\"x\":{}{}}}", "[".repeat(n), "]".repeat(n));
        assert!(members(&deep(100)).is_ok());
        assert_eq!(members(&deep(100_000)).unwrap_err(), Malformed::TooDeep);
        assert_eq!(members(&format!("{{\"x\":{}", "[".repeat(100_000))).unwrap_err(), Malformed::TooDeep);
        for n in [DEPTH_MAX - 2, DEPTH_MAX - 1, DEPTH_MAX, 100_000] {
            assert_eq!(sound_members(&deep(n)), members(&deep(n)), "{n}");
        }
    }

    #[test]
    fn what_is_no_object_is_refused_by_name() {
        for text in ["[]", "null", "\"x\"", "1", " true"] {
            assert_eq!(check(text.as_bytes()), Err(Malformed::NotAnObject), "{text}");
        }
        for text in ["", "NaN", "{'a':1}", "{\"a\":1} }", "{\"a\":1", "\u{feff}{}", "{\"a\":NaN}"] {
            assert!(matches!(check(text.as_bytes()), Err(Malformed::Syntax(_))), "{text}");
        }
        assert!(matches!(check(b"{\"a\":\"\xff\"}"), Err(Malformed::Syntax(_))));
    }

    #[test]
    fn a_member_is_found_in_a_cut_text() {
        let text = br#"{"id":"x","model":"up-a","choices":[{"mess"#;
        assert_eq!(&text[find_in_prefix(text, "model").unwrap()], br#""up-a""#);
        assert_eq!(find_in_prefix(text, "usage"), None);
        assert_eq!(find_in_prefix(br#"{"x":{"model":1},"mod"#, "model"), None);
    }

    proptest! {
        #[test]
        fn scanner_never_panics(text in "[\\[\\]{}\",:\\\\a1 ]{0,60}") {
            let _ = members(&text);
            let _ = find_in_prefix(text.as_bytes(), "a");
        }

        /// Texts that are JSON but for a byte or two, and texts of its bytes.
        #[test]
        fn what_is_sound_is_what_serde_accepts(
            value in arb_json(),
            at in any::<prop::sample::Index>(),
            with in prop::sample::select(vec!["", "0", "-", ".", "e", "\"", "\\", "/", "u00e9", "{", "}", "[", "]", ",", ":", " ", "\n", "\u{b}", "\u{1}", "é", "null"]),
            cut in 0_usize..3,
        ) {
            let mut text = serde_json::json!({"a": value, "number": -1.5e3, "z": [value, {}, []]}).to_string();
            let at = (0..=at.index(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap();
            let end = (at + cut..=text.len()).find(|end| text.is_char_boundary(*end)).unwrap_or(text.len());
            text.replace_range(at..end, with);
            let sound = sound_members(&text);
            prop_assert_eq!(sound.is_ok(), check(text.as_bytes()).is_ok(), "{}: {:?}", text, sound);
            if sound.is_ok() {
                prop_assert_eq!(sound, members(&text));
            }
        }

        #[test]
        fn soundness_agrees_with_serde_on_noise(inside in "[\\[\\]{}\",:\\\\ue0159.+\\-nulltrfas \n]{0,24}") {
            for text in [format!("{{\"a\":{inside}}}"), format!("{{{inside}}}"), format!("{{\"a\":[{inside}]}}")] {
                prop_assert_eq!(sound_members(&text).is_ok(), check(text.as_bytes()).is_ok(), "{}", text);
            }
        }

        #[test]
        fn what_is_taken_changes_nothing(
            value in arb_json(),
            deep in DEPTH_MAX - 3..DEPTH_MAX + 3,
            at in any::<prop::sample::Index>(),
            with in prop::sample::select(vec!["", "0", "\"", "\\", "{", "}", "[", "]", ",", " ", "\u{1}", "null"]),
        ) {
            let nested = format!("{}{value}{}", "[".repeat(deep), "]".repeat(deep));
            for value in [value.to_string(), nested] {
                let mut text = format!(r#"{{"a": {value} , "b":{value},"c":1}}"#);
                let at = (0..=at.index(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap();
                text.insert_str(at, with);
                let take = |name: &str, rest: &str| {
                    let mut read = serde_json::Deserializer::from_str(rest).into_iter::<Vec<IgnoredAny>>();
                    read.next().filter(|read| read.is_ok() && name != "c").map(|_| read.byte_offset())
                };
                prop_assert_eq!(members_taken(&text, false, take), members(&text), "{}", text);
                prop_assert_eq!(members_taken(&text, true, take), sound_members(&text), "{}", text);
            }
        }

        #[test]
        fn elements_are_those_that_serde_finds(values in prop::collection::vec(arb_json(), 0..4), space in "[ \n\t]{0,2}") {
            let values: Vec<_> = values.iter().map(|value| format!("{value:#}")).collect();
            let list = format!("[{space}{}{space}]", values.join(&format!("{space},{space}")));
            let expected: Vec<&serde_json::value::RawValue> = serde_json::from_str(&list).unwrap();
            let mut found = vec![];
            elements(&list, |rest| {
                let length = first_length(rest).unwrap();
                found.push(rest.get(..length).unwrap());
                if let Ok((members, end)) = first_members(rest) {
                    prop_assert_eq!((Ok(members), end), (super::members(&rest[..length]), length));
                }
                Ok::<_, TestCaseError>(length)
            })?;
            prop_assert_eq!(found, expected.iter().map(|value| value.get()).collect::<Vec<_>>());
        }

        #[test]
        fn elements_end_whatever_the_text_is(text in "\\[[\\[\\]{}\",:\\\\aé1 ]{0,30}") {
            let _ = elements(&text, first_length);
            let _ = elements(&text, |_| Ok::<_, ()>(0));
        }

        #[test]
        fn scanner_agrees_with_serde(value in arb_json()) {
            let text = serde_json::json!({"a": value, "model": "x", "z": value}).to_string();
            let found = members(&text).unwrap();
            prop_assert_eq!(found.len(), 3);
            for member in found {
                let part: serde_json::Value = serde_json::from_str(&text[member.value]).unwrap();
                let whole: serde_json::Value = serde_json::from_str(&text).unwrap();
                prop_assert_eq!(&part, &whole[member.key.as_ref()]);
            }
        }
    }

    fn arb_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            "[\\PC\"\\\\{}\\[\\]]{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
                prop::collection::hash_map("[a-z\"\\\\]{0,4}", inner, 0..4)
                    .prop_map(|m| serde_json::Value::Object(m.into_iter().collect())),
            ]
        })
    }
}
