//! Keys by their digest.
//!
//! A key has 256 random bits, so a plain SHA-256 is enough: there is nothing to guess. The look-up
//! goes by the digest; the last comparison is made in constant time all the same, so that no
//! shortcut of a hash table decides about access.

use std::collections::HashMap;
use std::sync::Arc;

use filters::ids::{AccountId, KeyDigest};
use filters::limit::Scopes;
use filters::money::Amount;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::ledger::port::KeyRecord;
use crate::settings::{BadSetting, CLAMP_MIN};

/// Who calls.
#[derive(Debug, PartialEq, Eq)]
pub struct Principal {
    pub account: AccountId,
    pub account_name: String,
    pub digest: KeyDigest,
    /// `None`: all models.
    pub models: Option<Vec<String>>,
    pub default_output_tokens: Option<u64>,
    /// The smallest output that clamping leaves; `None`: nothing is clamped.
    pub clamp_min: Option<u64>,
    /// USD an hour for calls left before their answer; `None`: the default rule.
    pub abandoned_max: Option<Amount>,
    pub scopes: Arc<Scopes>,
    /// Milliseconds since 1970; from then on it is no key any more.
    pub expires_ms: Option<i64>,
}

impl Principal {
    fn new(record: KeyRecord) -> Result<Self, BadSetting> {
        let KeyRecord { digest, account, account_name, settings, account_settings, expires_ms, .. } = record;
        let models = account_settings.model_limits.iter();
        let scopes = Scopes {
            key: settings.limits.meant()?,
            account: account_settings.limits.meant()?,
            models: models.map(|(name, spec)| Ok((name.clone(), spec.meant()?))).collect::<Result<_, _>>()?,
        };
        Ok(Self {
            account,
            account_name,
            digest,
            abandoned_max: settings.abandoned_max()?,
            models: settings.models,
            default_output_tokens: settings.default_output_tokens,
            clamp_min: settings.clamp_output.then(|| settings.clamp_min.unwrap_or(CLAMP_MIN)),
            scopes: Arc::new(scopes),
            expires_ms,
        })
    }

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
    /// A table of these keys, without those that are revoked or expired. A key whose settings cannot be
    /// read is left out and reported: a limit that cannot be kept must not be no limit.
    #[must_use]
    pub fn new(records: Vec<KeyRecord>, now_ms: i64) -> Self {
        let mut keys = HashMap::with_capacity(records.len());
        for record in records {
            if !record.is_good(now_ms) {
                continue;
            }
            let (digest, hint) = (record.digest, record.hint.clone());
            match Principal::new(record) {
                Ok(principal) => {
                    keys.insert(digest, Arc::new(principal));
                }
                Err(error) => {
                    tracing::error!(%error, key = hint, "a key's settings cannot be read: it is off");
                }
            }
        }
        Self { keys }
    }

    /// Whose key this is.
    #[must_use]
    pub fn find(&self, key: &str, now_ms: i64) -> Option<Arc<Principal>> {
        let digest = digest(key);
        let found = self.keys.get(&digest)?;
        let same = bool::from(found.digest.0.ct_eq(&digest.0));
        (same && found.expires_ms.is_none_or(|at| now_ms < at)).then(|| Arc::clone(found))
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Principal>> {
        self.keys.values()
    }
}

/// A key's digest.
#[must_use]
pub fn digest(key: &str) -> KeyDigest {
    KeyDigest(Sha256::digest(key.as_bytes()).into())
}

/// What lists show of a key: enough to tell two apart.
#[must_use]
pub fn hint(key: &str) -> String {
    let first: String = key.chars().take(6).collect();
    let last: String = key.chars().skip(key.chars().count().saturating_sub(4)).collect();
    if key.len() < 16 { format!("{first}…") } else { format!("{first}…{last}") }
}
