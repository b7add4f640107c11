//! What an operator does with the books: one list of verbs, for the admin port and the command line.
//!
//! A running gateway holds all free money in its store, so a verb that moves money has to go through it:
//! the command line asks the admin port, and opens the file itself only when no gateway runs.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use data_encoding::HEXLOWER;
use filters::ids::AccountId;
use filters::money::Amount;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::checked::Account;
use crate::digits::first_digits;
use crate::ledger::port::{Generation, KeyRecord, Keyed, KeyedCall, Movement, NewKey, Scope, What};
use crate::ledger::{Ledger, LedgerError};
use crate::pool::Pool;
use crate::pool::keys::{digest, hint};
use crate::settings::{AccountSettings, BadSetting, KeySettings};
use crate::store::Embedded;
use crate::{boot, clock, journal};

/// The longest name, reference or reason, in bytes.
const TEXT_BYTES_MAX: usize = 200;

/// So much of a key's digest is its id, in bytes.
const KEY_ID_BYTES: usize = 6;
/// Changes of keys that are taken over at once.
const KEYS_AT_ONCE: u32 = 1000;

/// How often money that is out to be spent is brought back for one movement.
const RECALLS_MAX: usize = 3;

/// A verb with its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case", deny_unknown_fields)]
pub enum Verb {
    /// Make an account, or set the settings of one.
    Account { name: String, settings: AccountSettings },
    /// Balances.
    Accounts { name: Option<String> },
    /// Money in or out. `reference` makes it happen once.
    Move { account: String, what: Direction, usd: String, reference: String, reason: String },
    /// What an account paid and received.
    Statement { account: String, limit: u32 },
    /// Make a key; the answer shows it, once.
    NewKey { account: String, settings: KeySettings, expires_in_seconds: Option<u64> },
    /// Keys of one account, or of all.
    Keys { account: Option<String> },
    /// End a key now. `key` is the key itself, or its id from the list.
    Revoke { key: String },
    /// Make a new key with the same settings, and end the old one after an overlap.
    Rotate { key: String, overlap_seconds: u64 },
    /// Prove that the books are right.
    Verify,
}

/// Which way money goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Prepaid money comes in.
    TopUp,
    /// Prepaid money goes back.
    Refund,
    /// A correction in the customer's favour.
    Credit,
    /// A correction in ours.
    Debit,
}

/// The books, and the gateway that runs on them, if one does.
pub struct Books {
    ledger: Mutex<Box<dyn Ledger>>,
    live: Option<Live>,
}

/// The parts of a running gateway that have to follow.
pub struct Live {
    /// What this process alone has leased.
    pub store: Arc<Embedded>,
    pub pool: Arc<Pool>,
    pub boot: i64,
    /// The other nodes, where there are any.
    pub fleet: Option<Arc<dyn Fleet>>,
    /// Turns true, under the ledger's lock, when another process takes over: from then on nothing is leased.
    handed_over: AtomicBool,
}

impl Live {
    /// Of a gateway that serves under this boot.
    #[must_use]
    pub fn new(store: Arc<Embedded>, pool: Arc<Pool>, boot: i64, fleet: Option<Arc<dyn Fleet>>) -> Self {
        Self { store, pool, boot, fleet, handed_over: AtomicBool::new(false) }
    }
}

/// What the nodes of a fleet do beside the books. Every call may block.
pub trait Fleet: Send + Sync {
    /// Brings an account's money back to the ledger, from wherever nobody has set it aside.
    fn recall(&self, account: AccountId);

    /// Keys, or settings of accounts, have changed in the ledger.
    fn keys_changed(&self);

    /// An account may have more than before.
    fn balance_changed(&self, account: AccountId);

    /// Why the ledger cannot be asked now, if so: nobody waits for one that is known to be away.
    fn why_read_only(&self) -> Option<String>;

    /// What nobody has set aside of an account, as far as its places can be asked.
    fn available(&self, account: AccountId) -> Amount;
}

/// What an account has and what it used, in nano-dollars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    pub balance_nano: i64,
    pub used_nano: i64,
    /// What can be spent now, where other nodes have their part of it.
    pub available_nano: Option<i64>,
}

/// Why a verb was not done.
#[derive(Debug, thiserror::Error)]
pub enum BooksError {
    /// An argument makes no sense.
    #[error("{0}")]
    Bad(String),
    /// A setting makes no sense.
    #[error(transparent)]
    Setting(#[from] BadSetting),
    /// The ledger said no.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The kernel gave no random bits.
    #[error("no key can be made: {0}")]
    Random(#[from] std::io::Error),
}

impl Books {
    /// Books over a ledger; with `live`, of a running gateway.
    #[must_use]
    pub fn new(ledger: Box<dyn Ledger>, live: Option<Live>) -> Self {
        Self { ledger: Mutex::new(ledger), live }
    }

    /// Does a verb. Blocks: it belongs to a thread that may.
    ///
    /// # Errors
    /// [`BooksError`]; nothing is changed then.
    pub fn perform(&self, verb: Verb) -> Result<Value, BooksError> {
        match verb {
            Verb::Account { name, settings } => {
                settings.check()?;
                let name = text("name", name)?;
                self.ledger()?.ensure_account(&name, Some(&settings), clock::unix_ms())?;
                self.follow()?;
                Ok(json!({ "account": name }))
            }
            Verb::Accounts { name } => self.accounts(name.as_deref()),
            Verb::Move { account, what, usd, reference, reason } => {
                self.transfer(&account, what, &usd, &text("reference", reference)?, &text("reason", reason)?)
            }
            Verb::Statement { account, limit } => {
                let lines = self.ledger()?.statement(&account, limit.min(10_000))?;
                Ok(json!(lines))
            }
            Verb::NewKey { account, settings, expires_in_seconds } => {
                let id = self.account(&account)?;
                self.new_key(id, &account, &settings, expires_in_seconds)
            }
            Verb::Keys { account } => {
                let keys = self.ledger()?.keys(account.as_deref())?;
                Ok(keys.iter().map(key_row).collect())
            }
            Verb::Revoke { key } => {
                let record = self.find_key(&key)?;
                self.ledger()?.end_key(record.digest, clock::unix_ms(), true)?;
                self.follow_keys()?;
                Ok(json!({ "revoked": key_id(&record) }))
            }
            Verb::Rotate { key, overlap_seconds } => self.rotate(&key, overlap_seconds),
            Verb::Verify => self.verify(),
        }
    }

    fn verify(&self) -> Result<Value, BooksError> {
        let verified = self.ledger()?.verify();
        if let Err(error @ LedgerError::Violation(_)) = &verified {
            tracing::error!(breach = "books", %error, "an invariant of the books does not hold");
        }
        Ok(json!(verified?))
    }

    /// Makes accounts and keys of a config that was read anew, or brings their settings up to date. What
    /// the config does not name any more stays as it is.
    ///
    /// # Errors
    /// [`BooksError`]; a key that belongs to another account is found before anything is changed.
    pub fn bootstrap(&self, accounts: &[Account]) -> Result<(), BooksError> {
        if accounts.is_empty() {
            return Ok(());
        }
        for account in accounts {
            for key in &account.keys {
                let known = self.ledger()?.key(&digest(key.secret.expose()).0)?;
                if known.is_some_and(|known| known.account_name != account.name) {
                    return Err(LedgerError::KeyTaken(account.name.clone()).into());
                }
            }
        }
        for account in accounts {
            boot::bootstrap(self.ledger()?.as_mut(), account)?;
        }
        self.follow()
    }

    /// A settled call of an account.
    ///
    /// # Errors
    /// When the books cannot be read.
    pub fn generation(&self, account: AccountId, id: &str) -> Result<Option<Generation>, BooksError> {
        Ok(self.ledger()?.generation(account, id)?)
    }

    /// What an account has and what it used.
    ///
    /// # Errors
    /// When the books cannot be read.
    pub fn credits(&self, account: AccountId) -> Result<Credits, BooksError> {
        let mut ledger = self.ledger()?;
        let used = ledger.spent(&Scope { account, key: None, model: None }, i64::MIN)?;
        let balance = ledger.balance(account)?;
        drop(ledger);
        let fleet = self.live.as_ref().and_then(|live| live.fleet.as_ref());
        Ok(Credits {
            balance_nano: balance.nano(),
            used_nano: used.nano(),
            available_nano: fleet.map(|fleet| fleet.available(account).nano()),
        })
    }

    /// The balance of every account, by name.
    ///
    /// # Errors
    /// When the books cannot be read.
    pub fn balances(&self) -> Result<Vec<(String, Amount)>, BooksError> {
        Ok(self.ledger()?.balances()?)
    }

    /// The account of that name, made where it is missing.
    ///
    /// # Errors
    /// When the books cannot be written.
    pub fn ensure_account(&self, name: &str) -> Result<AccountId, BooksError> {
        Ok(self.ledger()?.ensure_account(name, None, clock::unix_ms())?)
    }

    /// Begins a keyed call, or answers what is known of the first one.
    ///
    /// # Errors
    /// When the books cannot be written.
    pub fn begin_keyed(&self, call: &KeyedCall<'_>) -> Result<Option<Keyed>, BooksError> {
        Ok(self.ledger()?.begin_keyed(call)?)
    }

    /// Keeps a keyed call's answer, or forgets the call.
    ///
    /// # Errors
    /// When the books cannot be written.
    pub fn end_keyed(&self, account: AccountId, key: &str, answer: Option<&[u8]>) -> Result<(), BooksError> {
        Ok(self.ledger()?.end_keyed(account, key, answer)?)
    }

    /// The ledger, unless it is known to be away. Looks once it is this one's turn: many may have waited for the one
    /// that found out.
    fn ledger(&self) -> Result<MutexGuard<'_, Box<dyn Ledger>>, LedgerError> {
        let ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let fleet = self.live.as_ref().and_then(|live| live.fleet.as_ref());
        match fleet.and_then(|fleet| fleet.why_read_only()) {
            Some(why) => Err(LedgerError::Unreachable(why)),
            None => Ok(ledger),
        }
    }

    fn account(&self, name: &str) -> Result<AccountId, BooksError> {
        Ok(self.ledger()?.account(name)?)
    }

    fn accounts(&self, name: Option<&str>) -> Result<Value, BooksError> {
        let rows = self.ledger()?.accounts(name)?;
        match name {
            Some(name) if rows.is_empty() => Err(LedgerError::NoAccount(name.to_owned()).into()),
            _ => Ok(json!(rows)),
        }
    }

    fn transfer(
        &self,
        account: &str,
        what: Direction,
        usd: &str,
        reference: &str,
        reason: &str,
    ) -> Result<Value, BooksError> {
        let id = self.account(account)?;
        let amount = Amount::parse_usd(usd).map_err(|e| BooksError::Bad(format!("`usd`: {e}")))?;
        if !amount.is_positive() {
            return Err(BooksError::Bad("`usd` must be more than 0".to_owned()));
        }
        let what = match what {
            Direction::TopUp => What::TopUp,
            Direction::Refund => What::Refund,
            Direction::Credit => What::Credit,
            Direction::Debit => What::Debit,
        };
        let movement =
            Movement { account: id, what, amount, reference, reason, now_ms: clock::unix_ms(), boot: None };
        if let Some(fleet) = self.live.as_ref().and_then(|live| live.fleet.as_ref()) {
            return self.transfer_in_fleet(fleet.as_ref(), &movement);
        }
        // Money that leaves is taken out of the running store first, so that nobody can spend it twice.
        let live = self.live.as_ref().filter(|_| what.goes_out());
        if let Some(live) = live {
            live.store.withdraw(id, amount).map_err(|available| LedgerError::Funds { available })?;
        }
        let done = self.ledger()?.transfer(&Movement { boot: live.map(|live| live.boot), ..movement });
        // After any other error nobody knows whether it left: it stays out until the next start asks the books.
        let nothing_left =
            matches!(done, Ok(false) | Err(LedgerError::Funds { .. } | LedgerError::ReferenceTaken(_)));
        if let (Some(live), true) = (live, nothing_left) {
            live.store.grant(vec![(id, amount)]);
        }
        let new = done?;
        self.follow()?;
        Ok(json!({ "booked": new, "reference": reference }))
    }

    /// Money that leaves comes from what is free in the ledger; what is out there to be spent is brought back first.
    fn transfer_in_fleet(&self, fleet: &dyn Fleet, movement: &Movement<'_>) -> Result<Value, BooksError> {
        let mut done = self.ledger()?.transfer(movement);
        // A node may lease what was brought back before it is gone.
        for _ in 0..RECALLS_MAX {
            if !matches!(done, Err(LedgerError::Funds { .. })) {
                break;
            }
            fleet.recall(movement.account);
            done = self.ledger()?.transfer(movement);
        }
        let new = done?;
        fleet.balance_changed(movement.account);
        Ok(json!({ "booked": new, "reference": movement.reference }))
    }

    fn new_key(
        &self,
        account: AccountId,
        account_name: &str,
        settings: &KeySettings,
        expires_in_seconds: Option<u64>,
    ) -> Result<Value, BooksError> {
        settings.check()?;
        let key = fresh_key()?;
        let now_ms = clock::unix_ms();
        let expires_ms = expires_in_seconds.map(|seconds| later(now_ms, seconds));
        let new = NewKey {
            digest: digest(&key),
            account,
            account_name,
            hint: &hint(&key),
            settings,
            expires_ms,
            now_ms,
        };
        self.ledger()?.ensure_key(&new)?;
        self.follow_keys()?;
        Ok(json!({ "key": key, "account": account_name, "expires_ms": expires_ms }))
    }

    fn rotate(&self, key: &str, overlap_seconds: u64) -> Result<Value, BooksError> {
        let old = self.find_key(key)?;
        if !old.is_good(clock::unix_ms()) {
            return Err(BooksError::Bad("the key has ended already: make a new one".to_owned()));
        }
        let mut made = self.new_key(old.account, &old.account_name, &old.settings, None)?;
        let ends_ms = later(clock::unix_ms(), overlap_seconds);
        self.ledger()?.end_key(old.digest, ends_ms, false)?;
        self.follow_keys()?;
        if let Some(made) = made.as_object_mut() {
            made.insert("old_key".to_owned(), json!(key_id(&old)));
            made.insert("old_key_ends_ms".to_owned(), json!(ends_ms));
        }
        Ok(made)
    }

    /// A key by itself, or by its id from the list.
    fn find_key(&self, key: &str) -> Result<KeyRecord, BooksError> {
        let mut ledger = self.ledger()?;
        if let Some(found) = ledger.key(&digest(key).0)? {
            return Ok(found);
        }
        let id = HEXLOWER.decode(key.as_bytes()).ok().filter(|id| id.len() == KEY_ID_BYTES);
        let found = id.map(|id| ledger.key(&id)).transpose()?.flatten();
        Ok(found.ok_or(LedgerError::NoKey)?)
    }

    /// The running gateway gets what is free now, and the settings as they are now.
    fn follow(&self) -> Result<(), BooksError> {
        if let Some(live) = &self.live
            && live.fleet.is_none()
        {
            // Over both, so that a hand-over finds no lease between the books and the memory.
            let mut ledger = self.ledger()?;
            if !live.handed_over.load(Ordering::Acquire) {
                live.store.grant(ledger.lease_free(live.boot)?);
            }
        }
        self.follow_keys()
    }

    /// Gives what is free back to the ledger, in one transaction, for a process that takes over; `half`: half
    /// of it. From then on nothing is leased here. May be done again, for what calls have released since.
    ///
    /// # Errors
    /// When the books cannot be written: the money stays in this boot's lease, and out of its memory, until it
    /// ends.
    pub fn hand_over(&self, half: bool) -> Result<(), BooksError> {
        let Some(live) = &self.live else { return Ok(()) };
        let mut ledger = self.ledger()?;
        live.handed_over.store(true, Ordering::Release);
        let free = live.store.take_free(half);
        if free.is_empty() { Ok(()) } else { Ok(ledger.give_back(live.boot, &free)?) }
    }

    /// Leases what an earlier process gave back, and books what it left if it died. Answers whether one is
    /// still there.
    ///
    /// # Errors
    /// When a journal is damaged, or the books cannot be written.
    pub fn look_after_predecessors(&self, data: &Path) -> anyhow::Result<bool> {
        let Some(live) = &self.live else { return Ok(false) };
        let journals = data.join("journal");
        let alone = live.fleet.is_none();
        let others = |ledger: &mut dyn Ledger| {
            let others = |boots: Vec<i64>| boots.into_iter().filter(|boot| *boot != live.boot);
            // In a fleet most of them are on other machines.
            let here = |boot: &i64| alone || journal::folder(&journals, *boot).exists();
            ledger.open_boots().map(|boots| others(boots).any(|boot| here(&boot)))
        };
        let mut ledger = self.ledger()?;
        if others(ledger.as_mut())?
            && let Some(_lock) = boot::start_lock(data)?
        {
            boot::recover(ledger.as_mut(), &journals, alone)?;
        }
        let others = others(ledger.as_mut())?;
        drop(ledger);
        self.follow()?;
        Ok(others)
    }

    /// What has changed of keys and their accounts' settings since the last look counts from now on.
    fn follow_keys(&self) -> Result<(), BooksError> {
        let Some(live) = &self.live else { return Ok(()) };
        if let Some(fleet) = &live.fleet {
            fleet.keys_changed();
            return Ok(());
        }
        loop {
            // Until they count: nobody puts an older table behind them.
            let mut ledger = self.ledger()?;
            let keys = live.pool.keys();
            let changes = ledger.changes_since(keys.number(), KEYS_AT_ONCE)?;
            let Some((number, _)) = changes.last() else { return Ok(()) };
            let (number, digests): (_, Vec<_>) =
                (*number, changes.iter().map(|(_, key)| key.digest).collect());
            let records = changes.into_iter().map(|(_, key)| key).collect();
            let now_ms = clock::unix_ms();
            live.pool.set_keys(keys.changed(keys.number(), records, now_ms));
            // Budgets that are new may have been spent in part already. If that cannot be read, they come again.
            let keys = live.pool.keys();
            let changed = digests.iter().filter_map(|digest| keys.of(digest));
            boot::restore_budgets(ledger.as_mut(), &live.store, changed)?;
            live.pool.set_keys(keys.changed(number, vec![], now_ms));
        }
    }
}

/// `tg-` and 258 random bits of the kernel's, in an alphabet that needs no quoting anywhere.
///
/// # Errors
/// When the kernel gives none. Ids may come from a weaker generator, keys may not.
pub fn fresh_key() -> std::io::Result<String> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut random = [0; 43];
    getrandom::fill(&mut random).map_err(std::io::Error::other)?;
    let letters = random.iter().filter_map(|byte| ALPHABET.get(usize::from(byte & 63)).copied());
    Ok(std::iter::once("tg-".to_owned()).chain(letters.map(|b| char::from(b).to_string())).collect())
}

/// The first twelve digits of a key's digest: what lists call it.
fn key_id(record: &KeyRecord) -> String {
    first_digits(&record.digest.0, KEY_ID_BYTES)
}

fn key_row(record: &KeyRecord) -> Value {
    json!({
        "id": key_id(record),
        "account": record.account_name,
        "hint": record.hint,
        "good": record.is_good(clock::unix_ms()),
        "created_ms": record.created_ms,
        "expires_ms": record.expires_ms,
        "revoked_ms": record.revoked_ms,
        "settings": record.settings,
    })
}

fn later(now_ms: i64, seconds: u64) -> i64 {
    let millis = i64::try_from(seconds.saturating_mul(1000)).unwrap_or(i64::MAX);
    now_ms.saturating_add(millis)
}

fn text(field: &str, text: String) -> Result<String, BooksError> {
    let sound = (1..=TEXT_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control);
    if sound {
        return Ok(text);
    }
    Err(BooksError::Bad(format!("`{field}` must have 1 to {TEXT_BYTES_MAX} bytes and no control characters")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Sqlite;

    fn books() -> Books {
        Books::new(Box::new(Sqlite::in_memory().unwrap()), None)
    }

    fn movement(what: Direction, usd: &str, reference: &str) -> Verb {
        Verb::Move {
            account: "a".into(),
            what,
            usd: usd.into(),
            reference: reference.into(),
            reason: "test".into(),
        }
    }

    #[test]
    fn money_comes_and_goes_once_per_reference() {
        let books = books();
        books.perform(Verb::Account { name: "a".into(), settings: AccountSettings::default() }).unwrap();
        assert_eq!(books.perform(movement(Direction::TopUp, "10", "r1")).unwrap()["booked"], true);
        assert_eq!(books.perform(movement(Direction::TopUp, "10", "r1")).unwrap()["booked"], false);
        books.perform(movement(Direction::Refund, "4", "r2")).unwrap();
        books.perform(movement(Direction::Credit, "1", "r3")).unwrap();
        books.perform(movement(Direction::Debit, "2", "r4")).unwrap();
        let too_much = books.perform(movement(Direction::Refund, "6", "r5"));
        assert!(matches!(too_much, Err(BooksError::Ledger(LedgerError::Funds { .. }))));
        let rows = books.perform(Verb::Accounts { name: Some("a".into()) }).unwrap();
        assert_eq!(rows[0]["balance_nano"], 5_000_000_000_i64);
        books.perform(Verb::Verify).unwrap();
    }

    #[test]
    fn bad_arguments_are_named_and_change_nothing() {
        let books = books();
        books.perform(Verb::Account { name: "a".into(), settings: AccountSettings::default() }).unwrap();
        for (usd, reference) in [("0", "r"), ("-1", "r"), ("x", "r"), ("1", ""), ("1", "a\nb")] {
            assert!(books.perform(movement(Direction::TopUp, usd, reference)).is_err(), "{usd} {reference}");
        }
        let nobody = Verb::Statement { account: "b".into(), limit: 5 };
        assert!(matches!(books.perform(nobody), Err(BooksError::Ledger(LedgerError::NoAccount(_)))));
    }

    #[test]
    fn a_key_is_shown_once_and_rotated_with_an_overlap() {
        let books = books();
        books.perform(Verb::Account { name: "a".into(), settings: AccountSettings::default() }).unwrap();
        let new =
            Verb::NewKey { account: "a".into(), settings: KeySettings::default(), expires_in_seconds: None };
        let made = books.perform(new).unwrap();
        let key = made["key"].as_str().unwrap().to_owned();
        assert!(key.starts_with("tg-") && key.len() == 46);
        let list = books.perform(Verb::Keys { account: None }).unwrap();
        assert!(!list.to_string().contains(&key), "lists show a hint");
        let rotated = books.perform(Verb::Rotate { key: key.clone(), overlap_seconds: 3600 }).unwrap();
        assert_ne!(rotated["key"], made["key"]);
        let list = books.perform(Verb::Keys { account: Some("a".into()) }).unwrap();
        assert!(list.as_array().unwrap().iter().all(|k| k["good"] == true), "both are good meanwhile");
        let id = list[0]["id"].as_str().unwrap().to_owned();
        books.perform(Verb::Revoke { key: id }).unwrap();
        let good = |list: Value| list.as_array().unwrap().iter().filter(|k| k["good"] == true).count();
        assert_eq!(good(books.perform(Verb::Keys { account: None }).unwrap()), 1);
        assert!(matches!(
            books.perform(Verb::Revoke { key: "nope".into() }),
            Err(BooksError::Ledger(LedgerError::NoKey))
        ));
    }
}
