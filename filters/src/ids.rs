//! A newtype per meaning, so that no two of them can be mixed up.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An account as the ledger numbers it. Stable for the life of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AccountId(pub i64);

impl fmt::Display for AccountId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One hold on one account's money: a UUIDv7, so that it sorts by time and never comes twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HoldId(pub u128);

impl HoldId {
    /// The sixteen bytes in network order, as journal and ledger keep them.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The hold whose bytes these are.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }
}

/// Hyphenated, as RFC 9562 writes a UUID.
impl fmt::Display for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0;
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            n >> 96,
            (n >> 80) & 0xffff,
            (n >> 64) & 0xffff,
            (n >> 48) & 0xffff,
            n & 0xffff_ffff_ffff
        )
    }
}

impl fmt::Debug for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An endpoint's place in the catalogue snapshot that a request was admitted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub usize);

/// A model's place in the same snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub usize);

/// One of our credentials at one provider, by their places in the catalogue. A 429 is about this, not
/// about an endpoint: two endpoints that share a credential share its quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CredentialId {
    /// The provider.
    pub provider: usize,
    /// Which of its credentials.
    pub index: usize,
}

/// SHA-256 of a caller's API key; the key itself is never kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyDigest(pub [u8; 32]);

/// Shows the first four bytes: enough to tell two keys apart in a log, useless to an attacker.
impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "KeyDigest({a:02x}{b:02x}{c:02x}{d:02x}…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hold_id_is_written_as_a_uuid_and_survives_its_bytes() {
        let id = HoldId(0x0192_f3a4_b5c6_7d8e_9f00_1122_3344_5566);
        assert_eq!(id.to_string(), "0192f3a4-b5c6-7d8e-9f00-112233445566");
        assert_eq!(HoldId::from_bytes(id.to_bytes()), id);
    }
}
