//! What nodes follow: keys, by a number that grows with every change, and the catalogue.
//!
//! A change of a key, or of the settings of its account, gets its number under one lock that is held until it is
//! committed. So numbers appear in their order: whoever has seen a number has seen, or can still fetch, all before it.

use deadpool_postgres::Transaction;
use filters::ids::{AccountId, KeyDigest};
use tokio_postgres::Row;

use super::Postgres;
use crate::ledger::port::{KeyRecord, LedgerError};

/// What a key's row and its account say, for [`record`].
const RECORD: &str =
    "SELECT k.digest, k.account, a.name, k.hint, k.settings, a.settings, k.created_ms, k.expires_ms,
           k.revoked_ms, k.change
    FROM api_key k JOIN account a ON a.id = k.account";

impl Postgres {
    /// The latest change's number and all keys as they were then.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn key_base(&self) -> Result<(i64, Vec<KeyRecord>), LedgerError> {
        self.on_snapshot(async |t| {
            let change = t.query_one("SELECT change FROM key_clock", &[]).await?.try_get(0)?;
            let rows = t.query(&format!("{RECORD} ORDER BY k.digest"), &[]).await?;
            Ok((change, rows.iter().map(record).collect::<Result<_, _>>()?))
        })
    }

    /// The latest change's number.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn key_change(&self) -> Result<i64, LedgerError> {
        self.within(async |t| Ok(t.query_one("SELECT change FROM key_clock", &[]).await?.try_get(0)?))
    }

    /// Keys that changed after a number, each as it is now with the number of its latest change, in their order.
    /// One that changed twice comes once. When as many as `limit` come, there may be more behind the last.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn changes_since(&self, change: i64, limit: u32) -> Result<Vec<(i64, KeyRecord)>, LedgerError> {
        self.within(async |t| {
            let changed = format!("{RECORD} WHERE k.change > $1 ORDER BY k.change LIMIT $2");
            let rows = t.query(&t.prepare_cached(&changed).await?, &[&change, &i64::from(limit)]).await?;
            rows.iter().map(|row| Ok((row.try_get(9)?, record(row)?))).collect()
        })
    }

    /// Makes a text the catalogue, unless it is. Answers its version.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    pub fn publish_catalogue(&self, text: &str, by: &str, now_ms: i64) -> Result<i64, LedgerError> {
        self.within(async |t| {
            t.execute("SELECT pg_advisory_xact_lock(7465, 4)", &[]).await?;
            let latest = "SELECT version, text = $1 FROM catalogue ORDER BY version DESC LIMIT 1";
            let latest = match t.query_opt(latest, &[&text]).await? {
                Some(row) if row.try_get(1)? => return Ok(row.try_get(0)?),
                Some(row) => row.try_get(0)?,
                None => 0_i64,
            };
            let next = latest.saturating_add(1);
            let publish = "INSERT INTO catalogue (version, text, made_by, at_ms) VALUES ($1, $2, $3, $4)";
            t.execute(publish, &[&next, &text, &by, &now_ms]).await?;
            Ok(next)
        })
    }

    /// The catalogue and its version, if there is one.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn catalogue(&self) -> Result<Option<(i64, String)>, LedgerError> {
        self.within(async |t| {
            let latest = "SELECT version, text FROM catalogue ORDER BY version DESC LIMIT 1";
            let row = t.query_opt(latest, &[]).await?;
            row.map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).transpose()
        })
    }

    /// The catalogue's version; 0 when there is none.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn catalogue_version(&self) -> Result<i64, LedgerError> {
        let latest = "SELECT coalesce(max(version), 0) FROM catalogue";
        self.within(async |t| Ok(t.query_one(latest, &[]).await?.try_get(0)?))
    }
}

/// The first key whose digest begins with these bytes.
pub(super) async fn one(t: &Transaction<'_>, begins: &[u8]) -> Result<Option<KeyRecord>, LedgerError> {
    let next = format!("{RECORD} WHERE k.digest >= $1 ORDER BY k.digest LIMIT 1");
    let row = t.query_opt(&t.prepare_cached(&next).await?, &[&begins]).await?;
    let found = row.as_ref().map(record).transpose()?;
    Ok(found.filter(|key| key.digest.0.starts_with(begins)))
}

/// Keys of one account, or of all.
pub(super) async fn all(t: &Transaction<'_>, account: Option<&str>) -> Result<Vec<KeyRecord>, LedgerError> {
    let keys =
        format!("{RECORD} WHERE $1::text IS NULL OR a.name = $1 ORDER BY a.name, k.created_ms, k.change");
    let rows = t.query(&t.prepare_cached(&keys).await?, &[&account]).await?;
    rows.iter().map(record).collect()
}

/// The number of the next change, and those behind it for `more` others. Nobody else gets one until this transaction
/// ends.
pub(super) async fn next_change(t: &Transaction<'_>, how_many: i64) -> Result<i64, LedgerError> {
    let next = "UPDATE key_clock SET change = change + $1 RETURNING change - $1 + 1";
    Ok(t.query_one(next, &[&how_many]).await?.try_get(0)?)
}

fn record(row: &Row) -> Result<KeyRecord, LedgerError> {
    let digest: &[u8] = row.try_get(0)?;
    Ok(KeyRecord {
        digest: KeyDigest(digest.try_into().unwrap_or_default()),
        account: AccountId(row.try_get(1)?),
        account_name: row.try_get(2)?,
        hint: row.try_get(3)?,
        settings: read(row.try_get(4)?)?,
        account_settings: read(row.try_get(5)?)?,
        created_ms: row.try_get(6)?,
        expires_ms: row.try_get(7)?,
        revoked_ms: row.try_get(8)?,
    })
}

/// Settings as they are stored.
pub(super) fn read<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, LedgerError> {
    serde_json::from_str(text)
        .map_err(|e| LedgerError::Violation(format!("stored settings cannot be read: {e}")))
}
