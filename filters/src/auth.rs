//! Who asks?
//!
//! A caller may send a key in more than one header (SDKs and proxies add their own). A header that
//! holds a key of ours decides; foreign keys are dropped and never forwarded; two different keys of
//! ours are refused, since nobody could say which account pays. Unknown, malformed and revoked keys
//! get one and the same answer.
//!
//! Deliberately absent: the look-up. The edge hashes what [`presented`] finds and asks its table.

use crate::verdict::{Reason, Rejection};

/// The longest key that is looked at, in bytes.
const KEY_BYTES_MAX: usize = 512;

/// The keys that the headers hold, at most one a header.
///
/// `authorization` are all lines of that header, `others` the lines of `x-api-key` and its kin.
///
/// # Errors
/// 401 when a header comes twice: neither "first wins" nor "last wins" is safe behind proxies.
pub fn presented<'a>(
    authorization: impl Iterator<Item = &'a [u8]>,
    others: impl Iterator<Item = (&'static str, &'a [u8])>,
) -> Result<Vec<&'a str>, Rejection> {
    let mut keys = Vec::with_capacity(2);
    let mut lines = 0;
    for line in authorization {
        lines += 1;
        keys.extend(bearer(line));
    }
    if lines > 1 {
        return Err(refused("the authorization header comes twice"));
    }
    let mut seen = Vec::with_capacity(2);
    for (name, value) in others {
        if seen.contains(&name) {
            return Err(refused("a key header comes twice"));
        }
        seen.push(name);
        keys.extend(key(value));
    }
    Ok(keys)
}

/// Decides from what the table knows of the presented keys.
///
/// # Errors
/// 401 when none is known, or two different ones are.
pub fn judge<T: PartialEq>(known: impl Iterator<Item = T>) -> Result<T, Rejection> {
    let mut decided = None;
    for principal in known {
        match &decided {
            None => decided = Some(principal),
            Some(first) if *first == principal => {}
            Some(_) => return Err(refused("two different keys of ours in one request")),
        }
    }
    decided.ok_or_else(|| refused("no key of ours in the request"))
}

fn bearer(line: &[u8]) -> Option<&str> {
    let (scheme, rest) = line.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(())?;
    key(rest.trim_ascii())
}

fn key(value: &[u8]) -> Option<&str> {
    let plausible = (1..=KEY_BYTES_MAX).contains(&value.len()) && value.iter().all(u8::is_ascii_graphic);
    std::str::from_utf8(value).ok().filter(|_| plausible)
}

fn refused(context: &str) -> Rejection {
    Rejection::new(
        Reason::InvalidKey,
        "The API key is missing or not valid. Send it as `Authorization: Bearer <key>`.",
    )
    .context(context)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys<'a>(bearer: &[&'a str], other: &[(&'static str, &'a str)]) -> Result<Vec<&'a str>, Rejection> {
        presented(bearer.iter().map(|b| b.as_bytes()), other.iter().map(|(n, v)| (*n, v.as_bytes())))
    }

    #[test]
    fn the_key_is_found_in_each_header() {
        assert_eq!(keys(&["Bearer tg-1"], &[]).unwrap(), ["tg-1"]);
        assert_eq!(keys(&["bearer   tg-1 "], &[]).unwrap(), ["tg-1"]);
        assert_eq!(keys(&["Bearer a"], &[("x-api-key", "b")]).unwrap(), ["a", "b"]);
    }

    #[test]
    fn what_is_no_key_is_not_looked_up() {
        let long = format!("Bearer {}", "x".repeat(8192));
        for line in ["Bearer ", "Bearer", "Basic abc", "tg-1", &long, "Bearer a, Bearer b", "Bearer é"] {
            assert!(keys(&[line], &[]).unwrap().is_empty(), "{line}");
        }
    }

    #[test]
    fn a_header_that_comes_twice_is_refused() {
        assert!(keys(&["Bearer a", "Bearer a"], &[]).is_err());
        assert!(keys(&[], &[("x-api-key", "a"), ("x-api-key", "a")]).is_err());
        assert!(keys(&[], &[("x-api-key", "a"), ("x-goog-api-key", "b")]).is_ok());
    }

    #[test]
    fn two_different_keys_of_ours_are_refused_and_one_decides() {
        assert_eq!(judge([1, 1].into_iter()), Ok(1));
        assert_eq!(judge([1, 2].into_iter()).unwrap_err().reason, Reason::InvalidKey);
        assert_eq!(judge(std::iter::empty::<u8>()).unwrap_err().reason, Reason::InvalidKey);
    }

    proptest! {
        #[test]
        fn headers_never_panic(line in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = presented([line.as_slice()].into_iter(), std::iter::empty());
        }
    }
}
