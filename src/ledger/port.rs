//! What a ledger does, whoever keeps it.
//!
//! The same conformance tests run against every implementation (`tests/it/ledger.rs`).

use filters::ids::{AccountId, KeyDigest};
use filters::money::{Amount, LedgerAccount, Transfer, TransferKind};

use crate::journal::Settled;
use crate::settings::{AccountSettings, KeySettings};

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

    /// Leases to a boot whatever is free by now; answers what was added to each account.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn lease_free(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError>;

    /// Gives back a part of a boot's leases, all in one transaction: it is free for other boots then.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written; nothing is given back then.
    fn give_back(&mut self, boot: i64, parts: &[(AccountId, Amount)]) -> Result<(), LedgerError>;

    /// Makes an account unless it is there; settings, where given, replace the ones it has.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn ensure_account(
        &mut self,
        name: &str,
        settings: Option<&AccountSettings>,
        now_ms: i64,
    ) -> Result<AccountId, LedgerError>;

    /// Moves money into or out of an account, once per `reference`. Answers whether it was new.
    ///
    /// # Errors
    /// [`LedgerError::Funds`] when more is to go out than is free, [`LedgerError::ReferenceTaken`] when another
    /// movement has that reference, or the books cannot be written.
    fn transfer(&mut self, movement: &Movement<'_>) -> Result<bool, LedgerError>;

    /// Makes a key known, or brings its settings up to date.
    ///
    /// # Errors
    /// [`LedgerError::KeyTaken`] when another account has it.
    fn ensure_key(&mut self, key: &NewKey<'_>) -> Result<(), LedgerError>;

    /// Lets a key end at an instant (in milliseconds since 1970). Keys are found by their digest.
    ///
    /// # Errors
    /// [`LedgerError::NoKey`] when there is none.
    fn end_key(&mut self, digest: KeyDigest, at_ms: i64, revoked: bool) -> Result<(), LedgerError>;

    /// The latest change's number, and all keys as they were then: those of an account behind each other.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn key_base(&mut self) -> Result<(i64, Vec<KeyRecord>), LedgerError>;

    /// Keys that changed after a number, or whose account's settings did, each as it is now with the number of its latest
    /// change, in their order. One that changed twice comes once. When as many as `limit` come, there may be more behind
    /// the last.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn changes_since(&mut self, number: i64, limit: u32) -> Result<Vec<(i64, KeyRecord)>, LedgerError>;

    /// The first key whose digest begins with these bytes.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn key(&mut self, begins: &[u8]) -> Result<Option<KeyRecord>, LedgerError>;

    /// All keys, of one account or of all.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn keys(&mut self, account: Option<&str>) -> Result<Vec<KeyRecord>, LedgerError>;

    /// The account of that name.
    ///
    /// # Errors
    /// [`LedgerError::NoAccount`] when there is none.
    fn account(&mut self, name: &str) -> Result<AccountId, LedgerError>;

    /// What an account has. Open holds are still in it.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn balance(&mut self, account: AccountId) -> Result<Amount, LedgerError>;

    /// All accounts, by name; or the one of that name.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn accounts(&mut self, name: Option<&str>) -> Result<Vec<AccountRow>, LedgerError>;

    /// The balance of every account, by name. Open holds are still in it.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn balances(&mut self) -> Result<Vec<(String, Amount)>, LedgerError>;

    /// The latest `limit` lines of an account, latest first.
    ///
    /// # Errors
    /// [`LedgerError::NoAccount`] when there is none of that name.
    fn statement(&mut self, account: &str, limit: u32) -> Result<Vec<StatementLine>, LedgerError>;

    /// A settled call of an account, by its request id or its hold's id.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn generation(&mut self, account: AccountId, id: &str) -> Result<Option<Generation>, LedgerError>;

    /// What calls that were admitted since an instant were charged.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    fn spent(&mut self, scope: &Scope<'_>, since_ms: i64) -> Result<Amount, LedgerError>;

    /// Writes down what every balance is, once a day.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn snapshot(&mut self, now_ms: i64) -> Result<(), LedgerError>;

    /// Begins a keyed call, or answers what is known of the first one.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn begin_keyed(&mut self, call: &KeyedCall<'_>) -> Result<Option<Keyed>, LedgerError>;

    /// Keeps a keyed call's answer, or forgets the call where there is none to keep.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    fn end_keyed(&mut self, account: AccountId, key: &str, answer: Option<&[u8]>) -> Result<(), LedgerError>;

    /// Proves every invariant; answers what was counted.
    ///
    /// # Errors
    /// [`LedgerError::Violation`] names the first one that does not hold.
    fn verify(&mut self) -> Result<Verified, LedgerError>;
}

/// Money that moves into or out of an account.
#[derive(Clone, Copy, Debug)]
pub struct Movement<'a> {
    pub account: AccountId,
    pub what: What,
    pub amount: Amount,
    /// Makes it happen once: a second movement of its kind under the same reference is none.
    pub reference: &'a str,
    pub reason: &'a str,
    pub now_ms: i64,
    /// Money that goes out comes from this boot's lease; `None`: from what is free.
    pub boot: Option<i64>,
}

/// Kinds of movements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Prepaid money came in.
    TopUp,
    /// Prepaid money goes back.
    Refund,
    /// A correction in the customer's favour.
    Credit,
    /// A correction in ours.
    Debit,
}

impl What {
    /// The transfer that books it.
    #[must_use]
    pub const fn transfer(self, account: AccountId, amount: Amount) -> Transfer {
        let customer = LedgerAccount::Customer(account);
        let (kind, debit, credit) = match self {
            Self::TopUp => (TransferKind::TopUp, LedgerAccount::CashIn, customer),
            Self::Refund => (TransferKind::Refund, customer, LedgerAccount::CashIn),
            Self::Credit => (TransferKind::Adjustment, LedgerAccount::Promo, customer),
            Self::Debit => (TransferKind::Adjustment, customer, LedgerAccount::WriteOff),
        };
        Transfer { kind, debit, credit, amount }
    }

    /// Whether the account gives.
    #[must_use]
    pub const fn goes_out(self) -> bool {
        match self {
            Self::TopUp | Self::Credit => false,
            Self::Refund | Self::Debit => true,
        }
    }
}

/// A key to make known.
#[derive(Clone, Copy, Debug)]
pub struct NewKey<'a> {
    pub digest: KeyDigest,
    pub account: AccountId,
    pub account_name: &'a str,
    /// Its first and last characters, for lists.
    pub hint: &'a str,
    pub settings: &'a KeySettings,
    pub expires_ms: Option<i64>,
    pub now_ms: i64,
}

/// A caller's key, without the key.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct KeyRecord {
    pub digest: KeyDigest,
    pub account: AccountId,
    pub account_name: String,
    pub hint: String,
    pub settings: KeySettings,
    pub account_settings: AccountSettings,
    pub created_ms: i64,
    /// From then on it is no key any more.
    pub expires_ms: Option<i64>,
    pub revoked_ms: Option<i64>,
}

impl KeyRecord {
    /// Whether it may be used at an instant.
    #[must_use]
    pub fn is_good(&self, now_ms: i64) -> bool {
        self.revoked_ms.is_none() && self.expires_ms.is_none_or(|at| now_ms < at)
    }
}

/// What a sum is taken over.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    pub account: AccountId,
    pub key: Option<KeyDigest>,
    pub model: Option<&'a str>,
}

/// A call that carries an idempotency key.
#[derive(Clone, Copy, Debug)]
pub struct KeyedCall<'a> {
    pub account: AccountId,
    pub key: &'a str,
    /// SHA-256 of path and body.
    pub body: [u8; 32],
    pub request: &'a str,
    pub now_ms: i64,
}

/// What is known of an earlier call under the same key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keyed {
    pub body: [u8; 32],
    pub request: String,
    /// Its answer, where it was whole and small enough to be kept.
    pub answer: Option<Vec<u8>>,
}

/// A settled call as its caller may see it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Generation {
    pub id: String,
    pub request_id: String,
    pub model: String,
    pub upstream: String,
    pub attempts: u32,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: u64,
    pub estimated: bool,
    /// Nano-dollars.
    pub cost_nano: i64,
    pub held_nano: i64,
    pub price_version: u32,
    pub created_ms: i64,
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
    pub settings: AccountSettings,
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
    /// Postgres said no.
    #[error("the ledger's database failed: {}", said(.0))]
    Postgres(#[from] tokio_postgres::Error),
    /// Postgres cannot be asked.
    #[error("the ledger cannot be reached: {0}")]
    Unreachable(String),
    /// An invariant does not hold.
    #[error("the books are wrong: {0}")]
    Violation(String),
    /// No account of that name.
    #[error("there is no account `{0}`")]
    NoAccount(String),
    /// More is to go out than is free.
    #[error("only {available} is free: what running calls may cost is set aside")]
    Funds {
        /// What is free.
        available: Amount,
    },
    /// A reference names another movement already.
    #[error("the reference `{0}` was used for another account or amount already: nothing is booked now")]
    ReferenceTaken(String),
    /// No such key.
    #[error("there is no such key")]
    NoKey,
    /// A key belongs to another account already.
    #[error("a key of account `{0}` belongs to another account already; every key belongs to one")]
    KeyTaken(String),
    /// The books were made by a newer version.
    #[error("the ledger has schema version {0}, this binary knows {1}: use a newer tollgate")]
    TooNew(i64, i64),
    /// The books were made by an older version.
    #[error("the ledger has schema version {0}, this binary needs {1}: run `tollgate migrate` first")]
    TooOld(i64, i64),
    /// The pool is not the current one of its shard: another incarnation of Redis answers by now.
    #[error("the pool belongs to an incarnation of Redis that is over")]
    Stale,
    /// The boot is over, or was given up: its process must stop.
    #[error("boot {0} is over or was declared lost: its process must stop")]
    BootOver(i64),
}

/// An error of Postgres with its causes: by itself it only says where it happened.
pub(super) fn said(error: &tokio_postgres::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
