//! A text that never prints.
//!
//! Only [`Secret::expose`] gives it out, so a search for that word finds every place where a secret
//! leaves the process or is compared.

use std::fmt;

/// A credential of ours at a provider, or a caller's key on its way to its digest.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes a text in.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text. Never for a log, an error or a metric.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}
