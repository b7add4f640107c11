//! Keys by their digest.
//!
//! A key has 256 random bits, so a plain SHA-256 is enough: there is nothing to guess. The look-up
//! goes by the digest; the last comparison is made in constant time all the same, so that no
//! shortcut of a hash table decides about access.

use std::collections::HashMap;
use std::sync::Arc;

use filters::ids::{AccountId, KeyDigest};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::ledger::port::KeyRecord;

/// Who calls.
#[derive(Debug, PartialEq, Eq)]
pub struct Principal {
    pub account: AccountId,
    pub account_name: String,
    pub digest: KeyDigest,
    /// `None`: all models.
    pub models: Option<Vec<String>>,
    pub default_output_tokens: Option<u64>,
}

impl Principal {
    /// Whether this key may use a model.
    #[must_use]
    pub fn may_use(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|m| m == model))
    }
}

/// All keys that may be used.
#[derive(Debug, Default)]
pub struct KeyTable {
    keys: HashMap<KeyDigest, Arc<Principal>>,
}

impl KeyTable {
    /// A table of these keys.
    #[must_use]
    pub fn new(records: Vec<KeyRecord>) -> Self {
        let principal = |record: KeyRecord| {
            let KeyRecord { digest, account, account_name, models, default_output_tokens } = record;
            (digest, Arc::new(Principal { account, account_name, digest, models, default_output_tokens }))
        };
        Self { keys: records.into_iter().map(principal).collect() }
    }

    /// Whose key this is.
    #[must_use]
    pub fn find(&self, key: &str) -> Option<Arc<Principal>> {
        let digest = digest(key);
        let found = self.keys.get(&digest)?;
        bool::from(found.digest.0.ct_eq(&digest.0)).then(|| Arc::clone(found))
    }
}

/// A key's digest.
#[must_use]
pub fn digest(key: &str) -> KeyDigest {
    KeyDigest(Sha256::digest(key.as_bytes()).into())
}
