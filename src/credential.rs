//! A credential of ours at a provider, which may be replaced while the gateway runs.
//!
//! One that comes from a file is read again every second, whole: secret managers swap symbolic links, so that neither a
//! file's time nor its number tells what they did. A file that cannot be used changes nothing, the last good
//! secret stays. Attempts under way keep the one that they began with; what an upstream says about *that* one must
//! not be held against its successor, so each has a number, and the old ones are remembered to be masked.

use std::collections::VecDeque;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use filters::verdict::UpstreamError;

use crate::secret::Secret;

/// The longest secret, in bytes. Tokens of cloud providers have a few KiB.
const SECRET_BYTES_MAX: usize = 32 << 10;
/// So many earlier secrets are still masked.
const EARLIER_MAX: usize = 8;

/// One of a provider's credentials.
#[derive(Debug)]
pub struct Credential {
    current: ArcSwap<Held>,
    file: Option<PathBuf>,
    past: Mutex<Past>,
}

/// A secret and its number: it grows with every replacement.
#[derive(Debug)]
pub struct Held {
    pub secret: Secret,
    pub number: u64,
}

#[derive(Debug, Default)]
struct Past {
    earlier: VecDeque<Arc<Held>>,
    /// Why the file could not be used when it was last read, so that this is said once.
    complaint: Option<String>,
}

/// What reading a file again came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Reread {
    /// There is nothing new, or nothing new to say.
    Same,
    /// There is a new secret.
    Replaced,
    /// The file cannot be used, and why: the last good secret stays.
    Unusable(String),
}

impl Credential {
    /// One that stays as it is.
    #[must_use]
    pub fn fixed(secret: Secret) -> Self {
        Self { current: first(secret), file: None, past: Mutex::default() }
    }

    /// One that is in a file.
    ///
    /// # Errors
    /// Why the file cannot be used.
    pub fn in_file(file: &Path) -> Result<Self, String> {
        let secret = read(file)?;
        Ok(Self { current: first(secret), file: Some(file.to_owned()), past: Mutex::default() })
    }

    /// What is to be sent now.
    #[must_use]
    pub fn held(&self) -> Arc<Held> {
        self.current.load_full()
    }

    /// Takes it, and those before it, out of an upstream's words.
    pub fn mask(&self, error: &mut UpstreamError) {
        error.mask(self.held().secret.expose());
        for held in &self.past().earlier {
            error.mask(held.secret.expose());
        }
    }

    /// Whether it is in a file at all.
    #[must_use]
    pub const fn may_change(&self) -> bool {
        self.file.is_some()
    }

    /// Reads its file again. It waits for the disk.
    pub fn reread(&self) -> Reread {
        let Some(file) = &self.file else { return Reread::Same };
        let found = read(file);
        let mut past = self.past();
        match found {
            Ok(secret) => {
                past.complaint = None;
                let before = self.held();
                if before.secret == secret {
                    return Reread::Same;
                }
                self.current.store(Arc::new(Held { secret, number: before.number + 1 }));
                past.earlier.push_front(before);
                past.earlier.truncate(EARLIER_MAX);
                Reread::Replaced
            }
            Err(why) if past.complaint.as_ref() == Some(&why) => Reread::Same,
            Err(why) => {
                past.complaint = Some(why.clone());
                Reread::Unusable(why)
            }
        }
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a text can be a secret that is sent in a header.
///
/// # Errors
/// Why not; without the text.
pub fn sound(text: &str) -> Result<(), &'static str> {
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("must be visible ASCII without spaces, as it goes into a header");
    }
    if text.len() > SECRET_BYTES_MAX { Err("must have at most 32 KiB") } else { Ok(()) }
}

fn first(secret: Secret) -> ArcSwap<Held> {
    ArcSwap::from_pointee(Held { secret, number: 0 })
}

/// The secret in a file, without the white space around it.
fn read(file: &Path) -> Result<Secret, String> {
    let name = file.display();
    let mut text = String::new();
    let limit = u64::try_from(SECRET_BYTES_MAX).unwrap_or(u64::MAX).saturating_add(64);
    std::fs::File::open(file)
        .and_then(|opened| opened.take(limit).read_to_string(&mut text))
        .map_err(|e| format!("cannot read {name}: {e}"))?;
    let text = text.trim();
    if text.is_empty() {
        return Err(format!("{name} is empty"));
    }
    sound(text).map_err(|why| format!("the text in {name} {why}"))?;
    Ok(Secret::new(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_when_it_is_good_and_else_the_last_good_secret_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "first\n").unwrap();
        let credential = Credential::in_file(&file).unwrap();
        let now = || (credential.held().secret.expose().to_owned(), credential.held().number);
        assert_eq!((now(), credential.reread()), (("first".into(), 0), Reread::Same));
        for bad in ["", " \n", "two words", "schl\u{fc}ssel"] {
            std::fs::write(&file, bad).unwrap();
            assert!(matches!(credential.reread(), Reread::Unusable(_)), "{bad:?}");
            assert_eq!(credential.reread(), Reread::Same, "said once");
            assert_eq!(now(), ("first".into(), 0), "{bad:?}");
            std::fs::write(&file, "first").unwrap();
            assert_eq!(credential.reread(), Reread::Same);
        }
        std::fs::remove_file(&file).unwrap();
        assert!(matches!(credential.reread(), Reread::Unusable(_)));
        std::fs::write(&file, "second").unwrap();
        assert_eq!((credential.reread(), now()), (Reread::Replaced, ("second".into(), 1)));
    }

    #[test]
    fn earlier_secrets_are_masked_too_and_none_is_printed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "sk-first").unwrap();
        let credential = Credential::in_file(&file).unwrap();
        std::fs::write(&file, "sk-second").unwrap();
        credential.reread();
        let mut error =
            UpstreamError { message: "bad key sk-first, not sk-second".into(), ..UpstreamError::default() };
        credential.mask(&mut error);
        assert_eq!(error.message, "bad key [masked], not [masked]");
        assert!(!format!("{credential:?}").contains("sk-"));
    }

    #[test]
    fn a_file_without_a_secret_cannot_be_begun_with() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Credential::in_file(&folder.path().join("none")).is_err());
    }
}
