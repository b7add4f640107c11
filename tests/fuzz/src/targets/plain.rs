//! Texts that are read once and whole.

use std::fmt::Write as _;
use std::time::Duration;

use filters::auth;
use filters::dialect::{Dialect, Operation};
use filters::stream::coding::{Decoder, PIECE_BYTES_MAX};
use filters::upstream::rest::{self, REST_MAX, UnixSeconds};
use filters::upstream::{classify, failure::Failure};
use filters::verdict::{Reason, Rejection};
use tollgate::journal::record::{PAYLOAD_BYTES_MAX, decode, encode};

use super::pieces;

/// Lines as headers: a key that is found is one that could be ours, and no header gives two.
pub(crate) fn auth(bytes: &[u8]) {
    let mut lines = bytes.split(|b| *b == b'\n');
    let authorization: Vec<_> = lines.next().into_iter().collect();
    let names = ["x-api-key", "x-goog-api-key", "api-key", "x-api-key"];
    let others: Vec<_> = names.into_iter().zip(lines).collect();
    let comes_twice = others.len() == names.len();
    let found = auth::presented(authorization.iter().copied(), others.iter().copied());
    let Ok(keys) = found else {
        assert!(comes_twice, "refused without a reason");
        return;
    };
    assert!(!comes_twice, "a header that comes twice was let pass");
    assert!(keys.len() <= authorization.len() + others.len());
    for key in keys {
        assert!((1..=512).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic()), "{key:?}");
    }
}

/// A config: it is read, or every fault of it says something.
pub(crate) fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    // Files that a config names are not the fuzzer's.
    if text.contains("_file") || text.contains("certificate") {
        return;
    }
    let found = tollgate::config::parse(text, |name| (name.len() % 2 == 1).then(|| name.to_owned()));
    if let Err(faults) = found {
        assert!(!faults.0.is_empty(), "refused without a fault");
        for fault in &faults.0 {
            assert!(!fault.message.trim().is_empty(), "a fault without a text at {}", fault.path);
        }
        assert!(!faults.to_string().is_empty());
    }
}

/// A coded body: the text does not depend on how its bytes were cut, and no piece swells beyond its bound.
pub(crate) fn coding(bytes: &[u8]) {
    let Some(([setting, seed], coded)) = bytes.split_first_chunk::<2>() else { return };
    let name = if setting & 1 == 0 { "gzip" } else { "deflate" };
    let decoder = || Decoder::of(Some(name)).ok().flatten().expect("a coding that is known");
    let whole = decoder().decode(coded);
    let mut cut = decoder();
    let mut text = vec![];
    for piece in pieces(coded, *seed) {
        match cut.decode(piece) {
            Ok(plain) => {
                assert!(plain.len() <= PIECE_BYTES_MAX);
                text.extend_from_slice(&plain);
            }
            Err(_) => {
                assert!(whole.is_err(), "what is read whole is refused in pieces");
                return;
            }
        }
    }
    if let Ok(whole) = whole {
        assert!(whole == text, "the text depends on how it was cut");
    }
}

/// Headers, one a line, from an upstream: a wait is never longer than its bound, and only digits make one.
pub(crate) fn rest(bytes: &[u8]) {
    let Some((now, bytes)) = bytes.split_first_chunk::<4>() else { return };
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let headers: Vec<_> = text.lines().filter_map(|line| line.split_once(':')).collect();
    let header =
        |name: &str| headers.iter().find(|(key, _)| *key == name).map(|(_, value)| value.trim_start());
    let now = UnixSeconds(u64::from(u32::from_le_bytes(*now)));
    if let Some(wait) = rest::wait(header, now) {
        assert!((Duration::ZERO..=REST_MAX).contains(&wait), "{wait:?}");
        assert!(text.bytes().any(|b| b.is_ascii_digit()), "a wait out of nothing");
    }
}

/// An error of an upstream, `status` first: it is read and classed, and what the caller gets is JSON and never the
/// credential.
pub(crate) fn error(bytes: &[u8]) {
    const CREDENTIAL: &str = "prov-key-u0";
    let Some(([dialect, high, low], body)) = bytes.split_first_chunk::<3>() else { return };
    let dialect = if dialect & 1 == 0 { Dialect::OpenAi } else { Dialect::Anthropic };
    let status = 300 + u16::from_le_bytes([*high, *low]) % 300;
    let mut error = dialect.error(status, body);
    for operation in Operation::ALL.into_iter().filter(|operation| operation.dialect() == dialect) {
        if let Failure::CallerFault(seen) = classify::failure(operation, &error, body, &[]) {
            assert!((400..500).contains(&seen), "a fault of the caller's with the status {seen}");
        }
    }
    error.mask(CREDENTIAL);
    let mut rejection = Rejection::new(Reason::UpstreamRefused, error.message.clone());
    rejection.upstream = Some(Box::new(error));
    let out = dialect.error_body(&rejection, "request-1");
    serde_json::from_slice::<serde_json::Value>(&out).expect("an error is JSON");
    let out = String::from_utf8(out.to_vec()).expect("an error is text");
    assert!(!out.contains(CREDENTIAL), "our credential in {out}");
}

/// A journal: what is read is a record that was written so, and reading always gets on. The bytes are looked at as a
/// journal and, since no fuzzer guesses a checksum, as the content of one record.
pub(crate) fn journal(bytes: &[u8]) {
    let framed = |payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes();
        [&length, &crc32fast::hash(payload).to_le_bytes(), payload].concat()
    };
    for journal in [bytes.to_vec(), framed(bytes)] {
        let mut left = journal.as_slice();
        while let Ok((record, length)) = decode(left) {
            assert!((9..=left.len()).contains(&length), "{length} of {}", left.len());
            let mut again = vec![];
            encode(&record, &mut again).expect("what was read can be written");
            assert!(again.len() <= PAYLOAD_BYTES_MAX + 8);
            assert_eq!(decode(&again), Ok((record.clone(), again.len())));
            // Whoever looks into a journal sees no secret and no prompt; that it prints at all is enough here.
            write!(String::new(), "{record:?}").expect("it prints");
            left = left.get(length..).unwrap_or_default();
        }
    }
}
