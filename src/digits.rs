//! Names made of digests.

use data_encoding::HEXLOWER;

/// The first `bytes` of a digest, in hexadecimal: enough to tell a few apart.
#[must_use]
pub fn first_digits(digest: &[u8], bytes: usize) -> String {
    HEXLOWER.encode(digest.get(..bytes).unwrap_or(digest))
}
