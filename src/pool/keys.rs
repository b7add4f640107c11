//! Keys by their digest.
//!
//! A key has 256 random bits, so a plain SHA-256 is enough: there is nothing to guess. The look-up
//! goes by the digest; the last comparison is made in constant time all the same, so that no
//! shortcut of a search decides about access.
//!
//! A **base** holds most keys, sorted by digest, in 48 bytes each: what many keys have in common is kept once,
//! as [`Terms`], and the name of an account once for all its keys (16 bytes and the name). A million keys
//! of a thousand accounts take 48.1 bytes a key, of a million accounts 79 (see the last test). What changed
//! since the base was made is in a **delta** beside it, whose principals are whole; a change copies the delta
//! and not the base. When the delta grows, one base is made of both.
//!
//! Changes carry a number that grows: see [`Ledger::changes_since`](crate::ledger::Ledger::changes_since), and
//! [`crate::fleet::keys`] for how they reach all nodes.

use std::collections::HashMap;
use std::mem::size_of;
use std::sync::Arc;

use filters::ids::{AccountId, KeyDigest};
use filters::limit::Scopes;
use filters::money::Amount;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::ledger::port::KeyRecord;
use crate::settings::{AccountSettings, BadSetting, CLAMP_MIN, KeySettings};

/// So many changes beside a small base.
const DELTA_MIN: usize = 1024;
/// And beside a large one this part of it.
const DELTA_PART: usize = 64;
/// In the base, for a key that does not expire.
const NEVER: i64 = i64::MAX;

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    pub account: AccountId,
    pub account_name: String,
    pub digest: KeyDigest,
    pub terms: Arc<Terms>,
    /// Milliseconds since 1970; from then on it is no key any more.
    pub expires_ms: Option<i64>,
}

/// What a key may do; equal ones are kept once.
#[derive(Debug, PartialEq, Eq)]
pub struct Terms {
    /// `None`: all models.
    pub models: Option<Vec<String>>,
    pub default_output_tokens: Option<u64>,
    /// The smallest output that clamping leaves; `None`: nothing is clamped.
    pub clamp_min: Option<u64>,
    /// USD an hour for calls left before their answer; `None`: the default rule.
    pub abandoned_max: Option<Amount>,
    pub scopes: Arc<Scopes>,
    /// As they are stored, without the key's name.
    written: (KeySettings, AccountSettings),
}

impl Principal {
    /// Whether this key may use a model.
    #[must_use]
    pub fn may_use(&self, model: &str) -> bool {
        self.terms.models.as_ref().is_none_or(|models| models.iter().any(|m| m == model))
    }

    /// What a record of it says, as far as a table keeps it.
    fn record(&self) -> KeyRecord {
        let (settings, account_settings) = self.terms.written.clone();
        KeyRecord {
            digest: self.digest,
            account: self.account,
            account_name: self.account_name.clone(),
            hint: String::new(),
            settings,
            account_settings,
            created_ms: 0,
            expires_ms: self.expires_ms,
            revoked_ms: None,
        }
    }
}

impl Terms {
    fn new(written: (KeySettings, AccountSettings)) -> Result<Self, BadSetting> {
        let (settings, of_account) = &written;
        let models = of_account.model_limits.iter();
        let scopes = Scopes {
            key: settings.limits.meant()?,
            account: of_account.limits.meant()?,
            models: models.map(|(name, spec)| Ok((name.clone(), spec.meant()?))).collect::<Result<_, _>>()?,
        };
        Ok(Self {
            models: settings.models.clone(),
            default_output_tokens: settings.default_output_tokens,
            clamp_min: settings.clamp_output.then(|| settings.clamp_min.unwrap_or(CLAMP_MIN)),
            abandoned_max: settings.abandoned_max()?,
            scopes: Arc::new(scopes),
            written,
        })
    }
}

/// All keys that may be used.
#[derive(Clone, Debug, Default)]
pub struct KeyTable {
    base: Arc<Base>,
    /// Keys that are not as the base has them; `None`: it is no key any more.
    delta: HashMap<KeyDigest, Option<Principal>>,
    number: i64,
}

impl KeyTable {
    /// A table of keys as they were after the change of this number, without those that are revoked or expired. A key
    /// whose settings cannot be read is left out and reported: a limit that cannot be kept must not be no limit.
    #[must_use]
    pub fn numbered(number: i64, records: Vec<KeyRecord>, now_ms: i64) -> Self {
        let mut interner = Interner::default();
        for record in records {
            if record.is_good(now_ms) {
                interner.add(record);
            }
        }
        Self { base: Arc::new(interner.finish()), delta: HashMap::new(), number }
    }

    /// This table after some changes, of which the last has this number.
    #[must_use]
    pub fn changed(&self, number: i64, records: Vec<KeyRecord>, now_ms: i64) -> Self {
        let mut delta = self.delta.clone();
        let mut interner = Interner::default();
        for record in records {
            let digest = record.digest;
            let principal = if record.is_good(now_ms) { interner.principal(record) } else { None };
            delta.insert(digest, principal);
        }
        let table = Self { base: Arc::clone(&self.base), delta, number };
        let delta_max = DELTA_MIN.max(table.base.keys.len() / DELTA_PART);
        if table.delta.len() > delta_max { table.rebuilt(now_ms) } else { table }
    }

    /// The number of the last change that it has.
    #[must_use]
    pub const fn number(&self) -> i64 {
        self.number
    }

    /// Whose key this is.
    #[must_use]
    pub fn find(&self, key: &str, now_ms: i64) -> Option<Arc<Principal>> {
        let digest = digest(key);
        let found = self.of(&digest)?;
        let same = bool::from(found.digest.0.ct_eq(&digest.0));
        (same && found.expires_ms.is_none_or(|at| now_ms < at)).then(|| Arc::new(found))
    }

    /// Whose key has this digest.
    #[must_use]
    pub fn of(&self, digest: &KeyDigest) -> Option<Principal> {
        match self.delta.get(digest) {
            Some(changed) => changed.clone(),
            None => self.base.find(digest),
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Principal> {
        let of_base = self.base.keys.iter().filter(|entry| !self.delta.contains_key(&entry.digest));
        let of_base = of_base.filter_map(|entry| self.base.principal(entry));
        of_base.chain(self.delta.values().flatten().cloned())
    }

    /// As it can be written down; there are no secrets in it.
    #[must_use]
    pub fn frozen(&self) -> Frozen {
        let whole = if self.delta.is_empty() { self.clone() } else { self.rebuilt(i64::MIN) };
        let Base { keys, accounts, names, terms } = whole.base.as_ref();
        let name = |account: &Account| {
            names.get(place(account.name_begin)..place(account.name_end)).unwrap_or_default().to_owned()
        };
        Frozen {
            number: self.number,
            accounts: accounts.iter().map(|account| (account.id, name(account))).collect(),
            terms: terms
                .iter()
                .map(|terms| serde_json::to_string(&terms.written).unwrap_or_default())
                .collect(),
            keys: keys.iter().map(|key| (key.digest, key.expires_ms, key.account, key.terms)).collect(),
        }
    }

    /// What was frozen, without what has expired since. `None` when it cannot be understood.
    #[must_use]
    pub fn thawed(frozen: Frozen, now_ms: i64) -> Option<Self> {
        let Frozen { number, accounts, terms, keys } = frozen;
        let mut interner = Interner::default();
        for (id, name) in accounts {
            interner.account(id, name)?;
        }
        for text in terms {
            interner.terms.push(Arc::new(Terms::new(serde_json::from_str(&text).ok()?).ok()?));
        }
        for (digest, expires_ms, account, terms) in keys {
            if expires_ms > now_ms {
                interner.keys.push(Entry { digest, expires_ms, account, terms });
            }
        }
        Some(Self { base: Arc::new(interner.finish()), delta: HashMap::new(), number })
    }

    /// How many changes are beside the base.
    #[must_use]
    pub fn delta_len(&self) -> usize {
        self.delta.len()
    }

    /// Bytes that the keys of the base take, without their terms.
    #[must_use]
    pub fn base_bytes(&self) -> usize {
        let Base { keys, accounts, names, terms: _ } = self.base.as_ref();
        size_of_val::<[Entry]>(keys) + size_of_val::<[Account]>(accounts) + names.len()
    }

    fn rebuilt(&self, now_ms: i64) -> Self {
        let mut interner = Interner::default();
        for record in self.iter().map(|principal| principal.record()) {
            if record.is_good(now_ms) {
                interner.add(record);
            }
        }
        Self { base: Arc::new(interner.finish()), delta: HashMap::new(), number: self.number }
    }
}

/// A table on its way to a disk or from it. Settings are text, which a later version can still read.
#[derive(Debug, Serialize, Deserialize)]
pub struct Frozen {
    number: i64,
    accounts: Vec<(AccountId, String)>,
    terms: Vec<String>,
    /// Digest, end, account, terms.
    keys: Vec<(KeyDigest, i64, u32, u32)>,
}

#[derive(Debug, Default)]
struct Base {
    /// By digest.
    keys: Box<[Entry]>,
    accounts: Box<[Account]>,
    /// Of accounts, one behind the other.
    names: Box<str>,
    terms: Box<[Arc<Terms>]>,
}

#[derive(Debug)]
struct Entry {
    digest: KeyDigest,
    expires_ms: i64,
    account: u32,
    terms: u32,
}

const _: () = assert!(size_of::<Entry>() == 48, "what the header says");

#[derive(Debug)]
struct Account {
    id: AccountId,
    /// Where its name ends; it begins where the one before it ends.
    name_begin: u32,
    name_end: u32,
}

impl Base {
    fn find(&self, digest: &KeyDigest) -> Option<Principal> {
        let at = self.keys.binary_search_by(|entry| entry.digest.cmp(digest)).ok()?;
        self.principal(self.keys.get(at)?)
    }

    fn principal(&self, entry: &Entry) -> Option<Principal> {
        let account = self.accounts.get(place(entry.account))?;
        let name = self.names.get(place(account.name_begin)..place(account.name_end))?;
        Some(Principal {
            account: account.id,
            account_name: name.to_owned(),
            digest: entry.digest,
            terms: Arc::clone(self.terms.get(place(entry.terms))?),
            expires_ms: (entry.expires_ms != NEVER).then_some(entry.expires_ms),
        })
    }
}

fn place(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Makes a base, each thing once.
#[derive(Default)]
struct Interner {
    keys: Vec<Entry>,
    accounts: Vec<Account>,
    account_places: HashMap<(AccountId, String), u32>,
    names: String,
    terms: Vec<Arc<Terms>>,
    term_places: HashMap<String, Option<u32>>,
}

impl Interner {
    fn add(&mut self, mut record: KeyRecord) {
        let Some(terms) = self.terms(&mut record) else { return };
        let KeyRecord { digest, account, account_name, expires_ms, .. } = record;
        let Some(account) = self.account(account, account_name) else { return };
        self.keys.push(Entry { digest, expires_ms: expires_ms.unwrap_or(NEVER), account, terms });
    }

    fn principal(&mut self, mut record: KeyRecord) -> Option<Principal> {
        let at = self.terms(&mut record)?;
        let terms = Arc::clone(self.terms.get(place(at))?);
        let KeyRecord { digest, account, account_name, expires_ms, .. } = record;
        Some(Principal { account, account_name, digest, terms, expires_ms })
    }

    /// Where the terms of a record are, which loses its name; nowhere when they make no sense.
    fn terms(&mut self, record: &mut KeyRecord) -> Option<u32> {
        record.settings.name.clear();
        let last = self.terms.last().filter(|last| {
            let (settings, account_settings) = &last.written;
            *settings == record.settings && *account_settings == record.account_settings
        });
        if last.is_some() {
            return u32::try_from(self.terms.len() - 1).ok();
        }
        let written = (record.settings.clone(), record.account_settings.clone());
        // Settings have no order and no hash of their own; as text they have both.
        let text = serde_json::to_string(&written).ok()?;
        let (hint, next) = (&record.hint, u32::try_from(self.terms.len()).ok()?);
        let terms = &mut self.terms;
        *self.term_places.entry(text).or_insert_with(|| match Terms::new(written) {
            Ok(new) => {
                terms.push(Arc::new(new));
                Some(next)
            }
            Err(error) => {
                tracing::error!(%error, key = hint, "a key's settings cannot be read: it and its like are off");
                None
            }
        })
    }

    fn account(&mut self, id: AccountId, name: String) -> Option<u32> {
        let (next, begin) = (u32::try_from(self.accounts.len()).ok()?, u32::try_from(self.names.len()).ok()?);
        let end = begin.checked_add(u32::try_from(name.len()).ok()?)?;
        let (accounts, names) = (&mut self.accounts, &mut self.names);
        Some(*self.account_places.entry((id, name)).or_insert_with_key(|(id, name)| {
            names.push_str(name);
            accounts.push(Account { id: *id, name_begin: begin, name_end: end });
            next
        }))
    }

    fn finish(self) -> Base {
        let Self { mut keys, accounts, names, terms, account_places: _, term_places: _ } = self;
        keys.sort_unstable_by_key(|entry| entry.digest);
        // The later one of two would be the one that counts; a ledger has no two.
        keys.dedup_by_key(|entry| entry.digest);
        Base { keys: keys.into(), accounts: accounts.into(), names: names.into(), terms: terms.into() }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, account: i64) -> KeyRecord {
        KeyRecord {
            digest: digest(key),
            account: AccountId(account),
            account_name: format!("a{account}"),
            hint: hint(key),
            settings: KeySettings { name: key.to_owned(), ..KeySettings::default() },
            account_settings: AccountSettings::default(),
            created_ms: 1,
            expires_ms: None,
            revoked_ms: None,
        }
    }

    fn finds(table: &KeyTable, key: &str) -> Option<AccountId> {
        table.find(key, 5).map(|principal| principal.account)
    }

    #[test]
    fn a_key_is_found_by_itself_until_it_expires() {
        let expiring = KeyRecord { expires_ms: Some(10), ..record("b", 2) };
        let revoked = KeyRecord { revoked_ms: Some(1), ..record("c", 3) };
        let table = KeyTable::numbered(0, vec![record("a", 1), expiring, revoked], 5);
        assert_eq!((finds(&table, "a"), finds(&table, "b")), (Some(AccountId(1)), Some(AccountId(2))));
        assert_eq!((finds(&table, "c"), finds(&table, "A")), (None, None));
        assert!(table.find("b", 9).is_some() && table.find("b", 10).is_none());
        assert_eq!(table.find("a", 5).unwrap().account_name, "a1");
    }

    #[test]
    fn a_key_whose_settings_make_no_sense_is_off() {
        let mut wrong = record("w", 1);
        wrong.settings.limits.rpm = Some(0);
        let table = KeyTable::numbered(0, vec![wrong.clone(), record("a", 1)], 5);
        assert_eq!((finds(&table, "w"), finds(&table, "a")), (None, Some(AccountId(1))));
        let table = KeyTable::numbered(0, vec![record("w", 1)], 5).changed(1, vec![wrong], 5);
        assert_eq!(finds(&table, "w"), None, "also as a change");
    }

    #[test]
    fn changes_count_before_the_base_and_leave_it_alone_until_there_are_many() {
        let table = KeyTable::numbered(7, vec![record("a", 1), record("b", 1)], 5);
        let revoked = KeyRecord { revoked_ms: Some(1), ..record("a", 1) };
        let moved = record("b", 2);
        let changed = table.changed(9, vec![revoked, moved, record("c", 3)], 5);
        assert_eq!((changed.number(), changed.delta_len()), (9, 3));
        assert!(Arc::ptr_eq(&table.base, &changed.base));
        let all = |table: &KeyTable| ["a", "b", "c"].map(|key| finds(table, key).map(|id| id.0));
        assert_eq!((all(&table), all(&changed)), ([Some(1), Some(1), None], [None, Some(2), Some(3)]));
        let mut names: Vec<_> = changed.iter().map(|principal| principal.account.0).collect();
        names.sort_unstable();
        assert_eq!(names, [2, 3]);
        let many = (0..=DELTA_MIN).map(|n| record(&format!("many{n}"), 4)).collect();
        let rebuilt = changed.changed(10, many, 5);
        assert_eq!((rebuilt.delta_len(), all(&rebuilt)), (0, all(&changed)));
        assert_eq!(finds(&rebuilt, "many17"), Some(AccountId(4)));
    }

    #[test]
    fn a_frozen_table_thaws_as_it_was() {
        let limited = KeyRecord { expires_ms: Some(10), ..record("b", 2) };
        let table =
            KeyTable::numbered(7, vec![record("a", 1), limited], 5).changed(8, vec![record("c", 3)], 5);
        let bytes = postcard::to_stdvec(&table.frozen()).unwrap();
        let thaw = |now_ms| KeyTable::thawed(postcard::from_bytes(&bytes).unwrap(), now_ms).unwrap();
        let thawed = thaw(5);
        assert_eq!((thawed.number(), thawed.delta_len()), (8, 0));
        for key in ["a", "b", "c", "d"] {
            assert_eq!(thawed.find(key, 5), table.find(key, 5), "{key}");
        }
        assert_eq!(thaw(10).base.keys.len(), 2);
    }

    #[test]
    fn equal_settings_are_kept_once_whatever_the_keys_are_called() {
        let limited = |key| {
            let mut record = record(key, 1);
            record.settings.limits.rpm = Some(9);
            record
        };
        let table =
            KeyTable::numbered(0, vec![record("a", 1), record("b", 2), limited("c"), limited("d")], 5);
        let terms = |key| Arc::as_ptr(&table.find(key, 5).unwrap().terms);
        assert_eq!((terms("a"), terms("c")), (terms("b"), terms("d")));
        assert_ne!(terms("a"), terms("c"));
        assert_eq!(table.base.terms.len(), 2);
    }

    #[test]
    fn a_key_takes_48_bytes_and_its_part_of_an_account() {
        // By hand a million: 48.1 and 79 bytes, too.
        const KEYS: i64 = 100_000;
        for (accounts, bytes_max) in [(100, 49), (KEYS, 79)] {
            let records = (0..KEYS).map(|n| {
                let digest = KeyDigest(Sha256::digest(n.to_le_bytes()).into());
                let account = n % accounts;
                let account_name = format!("customer-{account:06}");
                KeyRecord { digest, account: AccountId(account), account_name, ..record("", 0) }
            });
            let mut interner = Interner::default();
            records.for_each(|record| interner.add(record));
            let table = KeyTable { base: Arc::new(interner.finish()), ..KeyTable::default() };
            let each = table.base_bytes().div_ceil(100_000);
            assert!(each <= bytes_max, "{each} bytes a key, of {} accounts", accounts);
            assert_eq!(table.base.keys.len(), 100_000);
            let some = KeyDigest(Sha256::digest(77_i64.to_le_bytes()).into());
            assert_eq!(table.base.find(&some).unwrap().account, AccountId(77));
        }
    }
}
