//! What a ledger does, whoever keeps it.
//!
//! The same conformance tests run against every implementation (`tests/it/ledger.rs`).

use filters::ids::{AccountId, KeyDigest};
use filters::money::{Amount, TransferKind};

use crate::journal::Settled;

/// A ledger. Calls block: they belong to a thread that may.
pub trait Ledger: Send {
    /// Begins a boot; its number is higher than every one before.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn begin_boot(&mut self, now_ms: i64) -> Result<i64, LedgerError>;

    /// Boots that never ended: their process runs still, or died.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn open_boots(&mut self) -> Result<Vec<i64>, LedgerError>;

    /// Leases all free money of all accounts to a boot; answers what it now holds of each.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn lease_all(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError>;

    /// What a boot still holds of each account.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn leases(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError>;

    /// Books how holds ended, against the lease of a boot. A hold that is booked already is passed
    /// over, so a batch may be posted again. Answers how many were new.
    ///
    /// # Errors
    /// [`LedgerError`]; nothing of the batch is booked then.
    fn post(&mut self, boot: i64, batch: &[Settled]) -> Result<usize, LedgerError>;

    /// Ends a boot: what is left of its leases is free again.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn end_boot(&mut self, boot: i64) -> Result<(), LedgerError>;

    /// Makes an account unless it is there.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn ensure_account(&mut self, name: &str, now_ms: i64) -> Result<AccountId, LedgerError>;

    /// Books prepaid money, once per `reference`. Answers whether it was new.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written or the sum does not fit.
    fn top_up(&mut self, top_up: &TopUp<'_>) -> Result<bool, LedgerError>;

    /// Makes a key known, or brings its settings up to date.
    ///
    /// # Errors
    /// [`LedgerError::KeyTaken`] when another account has it.
    fn ensure_key(&mut self, key: &KeyRecord, now_ms: i64) -> Result<(), LedgerError>;

    /// All keys that may be used.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn keys(&mut self) -> Result<Vec<KeyRecord>, LedgerError>;

    /// All accounts, by name.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn accounts(&mut self) -> Result<Vec<AccountRow>, LedgerError>;

    /// The latest `limit` lines of an account, latest first.
    ///
    /// # Errors
    /// [`LedgerError::NoAccount`] when there is none of that name.
    fn statement(&mut self, account: &str, limit: u32) -> Result<Vec<StatementLine>, LedgerError>;

    /// Proves every invariant; answers what was counted.
    ///
    /// # Errors
    /// [`LedgerError::Violation`] names the first one that does not hold.
    fn verify(&mut self) -> Result<Verified, LedgerError>;
}

/// Prepaid money.
#[derive(Clone, Copy, Debug)]
pub struct TopUp<'a> {
    pub account: AccountId,
    pub amount: Amount,
    /// Makes it happen once: a second top-up under the same reference is none.
    pub reference: &'a str,
    pub reason: &'a str,
    pub now_ms: i64,
}

/// A caller's key, without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    pub digest: KeyDigest,
    pub account: AccountId,
    pub account_name: String,
    /// `None`: all models.
    pub models: Option<Vec<String>>,
    pub default_output_tokens: Option<u64>,
}

/// An account as the operator sees it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct AccountRow {
    pub id: i64,
    pub name: String,
    /// Nano-dollars; open holds are still in it.
    pub balance_nano: i64,
    /// Nano-dollars that running processes hold of it.
    pub leased_nano: i64,
    /// How many calls were settled.
    pub calls: i64,
}

/// One line of a statement.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StatementLine {
    pub at_ms: i64,
    /// `top_up`, `capture`, …
    pub kind: &'static str,
    /// Nano-dollars; what the account gave is negative.
    pub amount_nano: i64,
    /// The request, or the reason.
    pub what: String,
    pub model: String,
    pub endpoint: String,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub estimated: bool,
}

/// What a verification counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Verified {
    pub accounts: i64,
    pub transfers: i64,
    pub holds: i64,
    /// Nano-dollars of all debits; the credits are the same.
    pub turnover_nano: i64,
}

/// Why a ledger did not do it.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The database said no.
    #[error("the ledger's database failed: {0}")]
    Database(#[from] rusqlite::Error),
    /// An invariant does not hold.
    #[error("the books are wrong: {0}")]
    Violation(String),
    /// No account of that name.
    #[error("there is no account `{0}`")]
    NoAccount(String),
    /// A key belongs to another account already.
    #[error("a key of account `{0}` belongs to another account already; every key belongs to one")]
    KeyTaken(String),
    /// The books were made by a newer version.
    #[error("the ledger has schema version {0}, this binary knows {1}: use a newer tollgate")]
    TooNew(i64, i64),
}

/// Kinds that appear in statements, by their stored number.
#[must_use]
pub(super) fn kind_word(number: i64) -> &'static str {
    TransferKind::ALL
        .into_iter()
        .find(|kind| super::sqlite::number(*kind) == number)
        .map_or("unknown", TransferKind::word)
}
