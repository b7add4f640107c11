//! A call's id, as thousands of records keep it at once: without an allocation, where it is one of ours.

use crate::entropy::REQUEST_ID_BYTES;

/// A call's id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestId {
    Ours([u8; REQUEST_ID_BYTES]),
    /// As its caller has named it.
    Other(Box<str>),
}

impl From<&str> for RequestId {
    fn from(id: &str) -> Self {
        match id.as_bytes().try_into() {
            Ok(ours) if id.is_ascii() => Self::Ours(ours),
            Ok(_) | Err(_) => Self::Other(id.into()),
        }
    }
}

impl RequestId {
    /// What it is.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Ours(bytes) => str::from_utf8(bytes).unwrap_or_default(),
            Self::Other(id) => id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_kept_as_it_was_named() {
        let ours = crate::entropy::request_id();
        assert!(matches!(RequestId::from(ours.as_str()), RequestId::Ours(_)));
        let umlauts = "ü".repeat(REQUEST_ID_BYTES / 2);
        for id in [ours.as_str(), "", "by-its-caller", &umlauts, &"x".repeat(200)] {
            assert_eq!(RequestId::from(id).as_str(), id);
        }
    }
}
