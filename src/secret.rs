//! A text that never prints.
//!
//! Only [`Secret::expose`] gives it out, so a search for that word finds every place where a secret
//! leaves the process or is compared. It has a `Debug` that says nothing, for whatever holds it, and neither of the
//! ways in which a value becomes text by itself:
//!
//! ```compile_fail,E0277
//! fn print(_: impl std::fmt::Display) {}
//! print(tollgate::secret::Secret::new("x"));
//! ```
//!
//! ```compile_fail,E0277
//! fn write(_: impl serde::Serialize) {}
//! write(tollgate::secret::Secret::new("x"));
//! ```

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

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn no_format_and_no_panic_shows_it() {
        let secret = Secret::new("sk-hidden");
        let fails = |held: (u8, Secret)| assert_eq!(held, (8, Secret::new("")), "it differs");
        let panic = catch_unwind(AssertUnwindSafe(|| fails((7, secret.clone())))).unwrap_err();
        let said = panic.downcast_ref::<String>().unwrap();
        assert!(said.contains('7'), "the panic tells the rest: {said}");
        for text in [format!("{secret:?} {secret:#?} {:?}", Some(&secret)), said.clone()] {
            assert!(!text.contains("hidden") && text.contains("Secret(…)"), "{text}");
        }
    }
}
