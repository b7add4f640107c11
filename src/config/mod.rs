//! The config file, in three steps: text → [`raw`] (as written) → [`checked`] (as meant).
//!
//! All faults of a file are reported together, each with its line and path, before a port is bound.
//! Behind this module nobody asks whether a pool is empty or a limit sensible.
//!
//! Numbers that are not whole never become floats: prices reach [`checked`] as the text that was
//! written.

pub mod address;
pub mod checked;
pub mod raw;
pub mod reach;
pub mod records;
pub mod sentry;
pub mod status;
pub mod telemetry;
pub mod watch;
mod yaml;

use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;

use deserr::{DeserializeError, ErrorKind, IntoValue, MergeWithError, ValueKind, ValuePointerRef};
use sha2::{Digest as _, Sha256};

use crate::digits::first_digits;

pub use checked::Config;

/// One thing that is wrong with a config file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Fault {
    /// Where, as `models.gpt-a.routes[0]`; empty for the whole file.
    pub path: String,
    /// What is wrong and how to mend it.
    pub message: String,
    /// The line, counted from 1, where it could be told.
    pub line: Option<usize>,
}

/// Everything that is wrong with a config file; never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

/// Which text a config was made of: the first digits of its SHA-256.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version(String);

/// Reads and checks a config file. `var` looks up environment variables.
///
/// # Errors
/// All faults at once.
pub fn load(path: &Path, var: impl Fn(&str) -> Option<String>) -> Result<(Config, Version), Faults> {
    let text = read(path)?;
    Ok((parse(&text, var)?, Version::of(&text)))
}

/// The text of a config file.
///
/// # Errors
/// When it cannot be read.
pub fn read(path: &Path) -> Result<String, Faults> {
    std::fs::read_to_string(path).map_err(|e| Faults::one("", format!("cannot read {}: {e}", path.display())))
}

/// Checks the text of a config file.
///
/// # Errors
/// All faults at once.
pub fn parse(text: &str, var: impl Fn(&str) -> Option<String>) -> Result<Config, Faults> {
    parse_as(text, &var, missing_catalogue, checked::check)
}

/// Checks the text of a catalogue: `providers`, `models` and `aliases` of a config file and nothing else.
///
/// # Errors
/// All faults at once.
pub fn parse_catalogue(
    text: &str,
    timers: checked::Timers,
    var: impl Fn(&str) -> Option<String>,
) -> Result<checked::Catalogue, Faults> {
    parse_as(text, &var, |_| Faults::default(), |file| checked::check_catalogue(file, timers))
}

/// `providers` and `models` may be missing together, in a fleet. Told beside whatever else cannot be read.
fn missing_catalogue(file: &serde_json::Value) -> Faults {
    let is_missing = |name: &str| file.get(name).is_none();
    let in_a_fleet =
        file.get("store").is_some_and(|it| it.get("redis").or_else(|| it.get("postgres")).is_some());
    let mut faults = Faults::default();
    let all = ["providers", "models"];
    let elsewhere = in_a_fleet && all.into_iter().all(is_missing) && is_missing("aliases");
    for name in all.into_iter().filter(|name| !elsewhere && is_missing(name)) {
        faults.push("", format!("`{name}` is missing"));
    }
    faults
}

fn parse_as<R: deserr::Deserr<Faults>, T>(
    text: &str,
    var: &dyn Fn(&str) -> Option<String>,
    missing: impl FnOnce(&serde_json::Value) -> Faults,
    check: impl FnOnce(R) -> Result<T, Faults>,
) -> Result<T, Faults> {
    let document = yaml::read(text, var)?;
    let mut faults = document.faults;
    faults.0.extend(missing(&document.value).0);
    let found = deserr::deserialize::<R, _, Faults>(document.value);
    let config = match found.map(check) {
        Ok(Ok(config)) => Some(config),
        Ok(Err(wrong)) | Err(wrong) => {
            faults.0.extend(wrong.0);
            None
        }
    };
    match config {
        Some(config) if faults.0.is_empty() => Ok(config),
        _ => {
            for fault in &mut faults.0 {
                fault.line = fault.line.or_else(|| document.lines.nearest(&fault.path));
            }
            // One fault often shows twice at one place: as unreadable, and then as missing.
            faults.0.sort_by_key(|f| f.line);
            faults.0.dedup_by(|b, a| !a.path.is_empty() && a.path == b.path);
            Err(faults)
        }
    }
}

impl Version {
    /// The version of a text.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        Self(first_digits(&digest, 6))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Faults {
    pub(crate) fn one(path: impl Into<String>, message: impl Into<String>) -> Self {
        let mut faults = Self::default();
        faults.push(path, message);
        faults
    }

    pub(crate) fn push(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(Fault { path: path.into(), message: message.into(), line: None });
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            if let Some(line) = fault.line {
                write!(f, "line {line}: ")?;
            }
            if !fault.path.is_empty() {
                write!(f, "{}: ", fault.path)?;
            }
            write!(f, "{}", fault.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

impl MergeWithError<Self> for Faults {
    fn merge(all: Option<Self>, other: Self, _: ValuePointerRef<'_>) -> ControlFlow<Self, Self> {
        let mut all = all.unwrap_or_default();
        all.0.extend(other.0);
        ControlFlow::Continue(all)
    }
}

impl DeserializeError for Faults {
    fn error<V: IntoValue>(
        all: Option<Self>,
        error: ErrorKind<'_, V>,
        location: ValuePointerRef<'_>,
    ) -> ControlFlow<Self, Self> {
        let mut path = path_of(&location);
        let message = match error {
            ErrorKind::IncorrectValueKind { actual, accepted } => {
                format!("expected {}, found {}", kinds(accepted), word(actual.kind()))
            }
            ErrorKind::MissingField { field } => format!("`{field}` is missing"),
            ErrorKind::UnknownKey { key, accepted } => {
                let hint = deserr::errors::helpers::did_you_mean(key, accepted);
                path = join(&path, key);
                format!("unknown key. {hint}Known here: {}", accepted.join(", "))
            }
            ErrorKind::UnknownValue { value, accepted } => {
                format!("`{value}` is not one of: {}", accepted.join(", "))
            }
            ErrorKind::BadSequenceLen { expected, .. } => format!("expected {expected} items"),
            ErrorKind::Unexpected { msg } => msg,
        };
        Self::merge(all, Self::one(path, message), location)
    }
}

fn kinds(kinds: &[ValueKind]) -> String {
    let mut words: Vec<_> = kinds.iter().map(|k| word(*k)).collect();
    words.dedup();
    words.join(" or ")
}

const fn word(kind: ValueKind) -> &'static str {
    match kind {
        ValueKind::Null => "nothing",
        ValueKind::Boolean => "true or false",
        ValueKind::Integer | ValueKind::NegativeInteger => "a whole number",
        ValueKind::Float => "a number",
        ValueKind::String => "text",
        ValueKind::Sequence => "a list",
        ValueKind::Map => "a block of keys",
    }
}

fn path_of(location: &ValuePointerRef<'_>) -> String {
    match location {
        ValuePointerRef::Origin => String::new(),
        ValuePointerRef::Key { key, prev } => join(&path_of(prev), key),
        ValuePointerRef::Index { index, prev } => format!("{}[{index}]", path_of(prev)),
    }
}

/// `a` and `b` as `a.b`.
pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
