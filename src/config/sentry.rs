//! `sentry:`, as written and as meant.

use deserr::Deserr;
use sentry::types::Dsn;

use super::Faults;
use crate::secret::Secret;

/// The longest name of an environment or a release, in bytes: Sentry cuts longer ones.
const NAME_BYTES_MAX: usize = 200;

#[derive(Debug, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Sentry {
    /// The project's DSN. Empty: nothing is sent, as without the block.
    pub dsn: Secret,
    /// What this installation is called there. Default production.
    #[deserr(default)]
    pub environment: Option<String>,
    /// What runs. Default: the version of the binary.
    #[deserr(default)]
    pub release: Option<String>,
    /// How many of a hundred events are sent. Default 100.
    #[deserr(default)]
    pub sample: Option<u8>,
}

/// Where alarms go, beside the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracker {
    // A good one; its text holds a public key.
    pub dsn: Secret,
    pub environment: String,
    pub release: String,
    /// Of a hundred events.
    pub sample_percent: u8,
}

/// What the block says; `None` where nothing is to be sent.
pub(super) fn check(raw: Option<Sentry>, faults: &mut Faults) -> Option<Tracker> {
    let Sentry { dsn, environment, release, sample } = raw?;
    if dsn.expose().is_empty() {
        return None;
    }
    // Neither the text nor what is wrong with it is shown: both hold its key.
    if dsn.expose().parse::<Dsn>().is_err() {
        faults.push("sentry.dsn", "is no DSN: it looks like https://PUBLIC_KEY@HOST/PROJECT");
    }
    let environment = environment.unwrap_or_else(|| "production".to_owned());
    let release = release.unwrap_or_else(|| format!("tollgate@{}", env!("CARGO_PKG_VERSION")));
    for (field, name) in [("sentry.environment", &environment), ("sentry.release", &release)] {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(|c| c.is_ascii_graphic()) {
            faults.push(field, format!("must be 1 to {NAME_BYTES_MAX} ASCII characters without spaces"));
        }
    }
    let sample_percent = sample.unwrap_or(100);
    if !(1..=100).contains(&sample_percent) {
        faults.push("sentry.sample", "must be from 1 to 100");
    }
    Some(Tracker { dsn, environment, release, sample_percent })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(dsn: &str, sample: Option<u8>) -> (Option<Tracker>, String) {
        let mut faults = Faults::default();
        let raw = Sentry { dsn: Secret::new(dsn), environment: None, release: None, sample };
        (check(Some(raw), &mut faults), faults.to_string())
    }

    #[test]
    fn without_a_dsn_nothing_is_sent() {
        assert_eq!(checked("", Some(0)), (None, String::new()));
        assert_eq!(check(None, &mut Faults::default()), None);
    }

    #[test]
    fn what_is_wrong_is_named_without_the_dsn() {
        let (_, said) = checked("https://hidden@", Some(0));
        assert!(said.contains("sentry.dsn: is no DSN") && said.contains("sentry.sample"), "{said}");
        assert!(!said.contains("hidden"), "{said}");
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        let (tracker, said) = checked("https://key@sentry.example/7", None);
        let tracker = tracker.unwrap();
        assert_eq!(
            (said.as_str(), tracker.environment.as_str(), tracker.sample_percent),
            ("", "production", 100)
        );
        assert!(tracker.release.starts_with("tollgate@"), "{}", tracker.release);
    }
}
