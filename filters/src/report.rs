//! What of an alarm may leave the house, and how often.
//!
//! An error tracker is somebody else's machine. So nothing is cleaned and sent: what is sent is made anew of names and
//! numbers that are on a list, and the words of an error, which may hold anything, are not on it. [`tag`] is that list.
//! It looks at the values too, for the day on which a name turns out to be a caller's: one that looks like a secret, a
//! sentence or an address with a login becomes [`MASK`].
//!
//! A fault that strikes every call would send an event for each. A [`Damper`] lets the first few of a kind through in
//! a minute and counts the others, so that the next one can tell how many they were.

use std::time::{Duration, Instant};

/// What stands where something was not fit to be sent.
pub const MASK: &str = "[masked]";
/// Events of one kind in a [`WINDOW`].
const EVENTS_MAX: u32 = 5;
/// Over which events are counted.
const WINDOW: Duration = Duration::from_secs(60);
/// Kinds that are counted apart; what comes beyond them shares the last one's count.
const KINDS_MAX: usize = 64;
/// The longest value that is sent, in bytes; names of the config have at most 200.
const VALUE_BYTES_MAX: usize = 200;
/// A run of letters and digits mixed that is so long is no word, in bytes.
const RUN_BYTES_MIN: usize = 16;
/// Words in one value: more of them are a sentence.
const WORDS_MAX: usize = 4;

/// Fields that may be sent, each a name out of the config or a number of ours.
const FIELDS: [&str; 14] = [
    "account",
    "at",
    "boot",
    "breach",
    "count",
    "endpoint",
    "lost",
    "model",
    "nano",
    "node",
    "reason",
    "shard",
    "suppressed",
    "thread",
];
/// How secrets begin: callers' keys, providers' credentials, tokens of well-known services.
const SECRETS: [&str; 14] = [
    "tg-", "sk-", "pk-", "rk-", "gsk_", "xai-", "hf_", "ghp_", "gho_", "xoxb-", "xoxp-", "akia", "aiza",
    "eyj",
];

/// The value of a field as it may be sent; `None` for a field that may not.
#[must_use]
pub fn tag(field: &str, value: &str) -> Option<String> {
    FIELDS.contains(&field).then(|| if is_fit(value) { value.to_owned() } else { MASK.to_owned() })
}

/// Whether a value is a name or a number, and nothing that somebody would rather not see elsewhere.
fn is_fit(value: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " -_./:@#,+".contains(c);
    value.len() <= VALUE_BYTES_MAX
        && value.chars().all(is_plain)
        && value.split(' ').count() <= WORDS_MAX
        && !value.split(' ').any(is_secret)
}

/// A key, a token, or an address that holds one.
fn is_secret(word: &str) -> bool {
    let lower = word.to_ascii_lowercase();
    let is_address = lower.contains("://") || lower.contains('@');
    let is_scheme = matches!(lower.trim_end_matches(':'), "bearer" | "basic" | "authorization");
    let mut parts = lower.split(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_');
    let begins_as_one = parts.any(|part| SECRETS.iter().any(|secret| part.starts_with(secret)));
    is_address
        || is_scheme
        || begins_as_one
        || lower.split(|c: char| !c.is_ascii_alphanumeric()).any(is_random)
}

/// Letters and digits mixed for so long that nobody has chosen them.
fn is_random(run: &str) -> bool {
    let has = |of: fn(&u8) -> bool| run.as_bytes().iter().any(of);
    run.len() >= RUN_BYTES_MIN && has(u8::is_ascii_digit) && has(u8::is_ascii_alphabetic)
}

/// Lets the first few events of a kind through.
#[derive(Debug, Default)]
pub struct Damper {
    kinds: Vec<Kind>,
}

#[derive(Debug)]
struct Kind {
    name: &'static str,
    since: Instant,
    /// Let through in this window.
    sent: u32,
    /// Not let through since the last one that was.
    suppressed: u64,
}

/// What becomes of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes out, and says how many of its kind did not.
    Send {
        /// Since the last one that went out.
        suppressed: u64,
    },
    /// It is counted.
    Suppress,
}

impl Damper {
    /// Whether an event of this kind goes out.
    pub fn judge(&mut self, now: Instant, name: &'static str) -> Verdict {
        let Some(kind) = self.kind(now, name) else { return Verdict::Suppress };
        if now.saturating_duration_since(kind.since) >= WINDOW {
            kind.since = now;
            kind.sent = 0;
        }
        if kind.sent >= EVENTS_MAX {
            kind.suppressed = kind.suppressed.saturating_add(1);
            return Verdict::Suppress;
        }
        kind.sent += 1;
        Verdict::Send { suppressed: std::mem::take(&mut kind.suppressed) }
    }

    fn kind(&mut self, now: Instant, name: &'static str) -> Option<&mut Kind> {
        let at = self.kinds.iter().position(|kind| kind.name == name);
        if at.is_none() && self.kinds.len() < KINDS_MAX {
            self.kinds.push(Kind { name, since: now, sent: 0, suppressed: 0 });
        }
        match at {
            Some(at) => self.kinds.get_mut(at),
            None => self.kinds.last_mut(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_and_numbers_of_ours_are_sent_as_they_are() {
        for (field, value) in [
            ("model", "claude-sonnet-4-5-20250929"),
            ("model", "openai/gpt-4o-mini-2024-07-18"),
            ("endpoint", "anthropic-us-east-1/claude-opus"),
            ("account", "-9223372036854775808"),
            ("at", "src/proxy/gate.rs:499"),
            ("at", "pingora-proxy-0.9.1/src/lib.rs:77"),
            ("thread", "Pingora HTTP Proxy Serv"),
            ("reason", "HTTPStatus"),
            ("node", "ip-10-0-3-17.eu-west-1.compute.internal:8080"),
            ("suppressed", "12"),
        ] {
            assert_eq!(tag(field, value).as_deref(), Some(value), "{field}");
        }
    }

    #[test]
    fn a_field_that_is_not_on_the_list_is_not_sent() {
        for field in ["error", "message", "request_id", "body", "url", "header", "key", "prompt", ""] {
            assert_eq!(tag(field, "1"), None, "{field}");
        }
    }

    #[test]
    fn what_looks_like_a_secret_or_a_sentence_is_masked() {
        for value in [
            "tg-0aZ_",
            "sk-proj-abc",
            "Bearer abcdef",
            "authorization: x",
            "key=sk-live",
            "x/sk-live",
            "AKIAIOSFODNN7EXAMPLE",
            "eyJhbGciOi.J9.x",
            "0123456789abcdef",
            "https://example.com",
            "user:pass@host",
            "Please tell me what my salary is",
            "two\nlines",
            "„quoted“",
            &"long".repeat(60),
        ] {
            assert_eq!(tag("reason", value).as_deref(), Some(MASK), "{value}");
        }
    }

    #[test]
    fn the_first_few_of_a_kind_go_out_and_the_next_tells_of_the_others() {
        let start = Instant::now();
        let mut damper = Damper::default();
        for _ in 0..EVENTS_MAX {
            assert_eq!(damper.judge(start, "a"), Verdict::Send { suppressed: 0 });
        }
        for _ in 0..7 {
            assert_eq!(damper.judge(start + WINDOW / 2, "a"), Verdict::Suppress);
        }
        assert_eq!(damper.judge(start, "b"), Verdict::Send { suppressed: 0 }, "another kind is not held up");
        assert_eq!(damper.judge(start + WINDOW, "a"), Verdict::Send { suppressed: 7 });
        assert_eq!(damper.judge(start + WINDOW, "a"), Verdict::Send { suppressed: 0 });
    }

    const NAMES: [&str; 80] = {
        const ALL: &str = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz012345678901234567890";
        let mut names = [""; 80];
        let mut at = 0;
        while at < names.len() {
            names[at] = ALL.split_at(at + 1).0;
            at += 1;
        }
        names
    };

    proptest! {
        #[test]
        fn no_more_than_the_bound_goes_out_in_a_window_and_none_is_forgotten(
            events in proptest::collection::vec((0_u64..90, 0_usize..3), 1..400),
        ) {
            let start = Instant::now();
            let mut damper = Damper::default();
            let (mut sent, mut told) = ([0_u64; 3], 0_u64);
            for (_, kind) in &events {
                if let Verdict::Send { suppressed } = damper.judge(start, NAMES[*kind]) {
                    sent[*kind] += 1;
                    told += suppressed;
                }
            }
            prop_assert!(sent.iter().all(|sent| *sent <= u64::from(EVENTS_MAX)));
            prop_assert_eq!(told, 0);
            for name in NAMES.iter().take(3) {
                if let Verdict::Send { suppressed } = damper.judge(start + WINDOW, name) {
                    told += suppressed;
                }
            }
            prop_assert_eq!(sent.iter().sum::<u64>() + told, u64::try_from(events.len()).unwrap());
        }

        #[test]
        fn a_value_is_never_half_masked(value in ".{0,300}") {
            let sent = tag("reason", &value).unwrap();
            prop_assert!(sent == MASK || sent == value);
        }
    }

    #[test]
    fn kinds_beyond_the_bound_share_one_count() {
        let start = Instant::now();
        let mut damper = Damper::default();
        let sent = NAMES.iter().flat_map(|name| [name; 3]);
        let sent = sent.filter(|name| damper.judge(start, name) != Verdict::Suppress).count();
        assert_eq!(damper.kinds.len(), KINDS_MAX);
        assert!(sent <= KINDS_MAX * 3 + 2, "{sent}");
    }
}
