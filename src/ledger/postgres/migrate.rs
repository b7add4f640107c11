//! The schema's versions.
//!
//! `tollgate migrate` applies what is missing, all in one transaction and under a lock, so that two who migrate at
//! once do it once. A node never does: it says what to do and stops.

use deadpool_postgres::Transaction;

use super::Postgres;
use crate::clock;
use crate::ledger::port::LedgerError;
use crate::ledger::stored::{HOUSE, HOUSE_KIND};

/// In order; one that was released never changes. The first is version 1.
const MIGRATIONS: [&str; 6] = [
    include_str!("migrations/0001_books.sql"),
    include_str!("migrations/0002_records.sql"),
    include_str!("migrations/0003_probes.sql"),
    include_str!("migrations/0004_beats.sql"),
    include_str!("migrations/0005_incidents.sql"),
    include_str!("migrations/0006_notices.sql"),
];
/// Months that partitions are made for ahead.
pub(super) const MONTHS_AHEAD: i32 = 3;

/// What a migration did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Migrated {
    /// 0: there was nothing.
    pub from: i64,
    pub to: i64,
}

impl Postgres {
    /// Brings the schema up to this binary's version, and makes the partitions of the next months.
    ///
    /// # Errors
    /// [`LedgerError::TooNew`] when it is newer; [`LedgerError`] when it cannot be written: nothing is changed then.
    pub fn migrate(&self) -> Result<Migrated, LedgerError> {
        self.at_length(async |t| {
            t.execute("SELECT pg_advisory_xact_lock(7465, 0)", &[]).await?;
            t.batch_execute(
                "CREATE TABLE IF NOT EXISTS schema_version (
                     version    bigint      PRIMARY KEY CHECK (version > 0),
                     applied_at timestamptz NOT NULL DEFAULT now())",
            )
            .await?;
            let from = version(t).await?;
            if from > newest() {
                return Err(LedgerError::TooNew(from, newest()));
            }
            for (number, sql) in (1_i64..).zip(MIGRATIONS) {
                if number > from {
                    t.batch_execute(sql).await?;
                    t.execute("INSERT INTO schema_version (version) VALUES ($1)", &[&number]).await?;
                }
            }
            for (id, name, _) in HOUSE {
                let kind = i16::try_from(HOUSE_KIND).unwrap_or_default();
                let house = "INSERT INTO account (id, kind, name, created_ms) VALUES ($1, $2, $3, 0)
                             ON CONFLICT DO NOTHING";
                t.execute(house, &[&id, &kind, &name]).await?;
            }
            make_partitions(t, clock::unix_ms()).await?;
            Ok(Migrated { from, to: newest() })
        })
    }

    /// Whether this binary and the schema go together.
    ///
    /// # Errors
    /// [`LedgerError::TooOld`] or [`LedgerError::TooNew`], which say what to do; [`LedgerError::Violation`] when the
    /// server may forget what it has committed.
    pub fn check_version(&self) -> Result<(), LedgerError> {
        self.within(async |t| {
            let row = t.query_one("SELECT to_regclass('schema_version') IS NOT NULL", &[]).await?;
            let found = if row.try_get(0)? { version(t).await? } else { 0 };
            if found < newest() {
                return Err(LedgerError::TooOld(found, newest()));
            }
            if found > newest() {
                return Err(LedgerError::TooNew(found, newest()));
            }
            let row = t.query_one("SELECT current_setting('synchronous_commit')", &[]).await?;
            if row.try_get::<_, &str>(0)? == "off" {
                let what =
                    "synchronous_commit is off: the server may forget what it has booked; set it to on";
                return Err(LedgerError::Violation(what.to_owned()));
            }
            Ok(())
        })
    }

    /// Makes the partitions of this month and the next three, where they are missing. Answers how many it made; once
    /// a day is enough.
    ///
    /// # Errors
    /// [`LedgerError`] when they cannot be made.
    pub fn partitions_ahead(&self, now_ms: i64) -> Result<i32, LedgerError> {
        self.within(async |t| make_partitions(t, now_ms).await)
    }
}

/// The version of this binary.
fn newest() -> i64 {
    super::count(MIGRATIONS.len())
}

async fn version(t: &Transaction<'_>) -> Result<i64, LedgerError> {
    let row = t.query_one("SELECT coalesce(max(version), 0) FROM schema_version", &[]).await?;
    Ok(row.try_get(0)?)
}

async fn make_partitions(t: &Transaction<'_>, now_ms: i64) -> Result<i32, LedgerError> {
    let make = "SELECT make_partitions(date '1970-01-01' + ($1::bigint / 86400000)::integer, $2)";
    let row = t.query_one(make, &[&now_ms, &MONTHS_AHEAD]).await?;
    Ok(row.try_get(0)?)
}
