//! The decision log, kept: everything that was decided about a candidate of a call. `src/proxy/decision.rs` says what
//! the words mean.
//!
//! First attempts that served are kept apart, without an index beside their time: they are nearly all there is, are kept
//! for a shorter time, and nobody groups them. A fleet has a table for them, a file has pages (`pages.rs`). Whoever asks
//! for a call by its id gets all of it.

use deadpool_postgres::Transaction as PgTransaction;
use rusqlite::{Transaction, params};
use serde::{Deserialize, Serialize};
use tokio_postgres::Row as PgRow;

use super::minutes::{counted, turned, whole};
use super::request::RequestId;
use super::words::{Word, Words};
use super::{Place, RecordError, Records, locked, pages};
use crate::ledger::LedgerError;

/// The outcome of an attempt that served.
pub const SERVED: &str = "served";
/// How far from the time in an id of ours its attempts are looked for: before it (another node's clock), and after it (the
/// longest call, and a batch that waited for its database).
const BEFORE_ID_MS: i64 = 3_600_000;
const AFTER_ID_MS: i64 = 86_400_000;

/// One decision, to be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// When it was made, in milliseconds since 1970.
    pub at_ms: i64,
    /// One of a process's own.
    pub seq: i64,
    pub request: RequestId,
    pub model: Word,
    pub candidate: Word,
    pub region: Word,
    /// Attempts so far, this one included.
    pub attempt: u32,
    pub reason: Word,
    pub elapsed_ms: i64,
    pub budget_left_ms: i64,
    pub outcome: Word,
    pub next: Word,
    /// A first attempt that served: its reason is `ok`, and nothing comes next.
    pub is_plain: bool,
}

/// Decisions come in the order of their time, of who made them, and of his own numbers.
pub(super) type Order = (i64, i64, i64);

/// One decision, as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub at_ms: i64,
    pub request_id: String,
    pub model: String,
    pub candidate: String,
    pub region: String,
    pub attempt: i64,
    pub reason: String,
    pub elapsed_ms: i64,
    pub budget_left_ms: i64,
    pub outcome: String,
    pub next: String,
}

/// What failovers are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    Upstream,
    Model,
    Region,
    Reason,
}

/// Failovers that have something in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// What they have in common.
    pub key: String,
    pub failovers: u64,
    /// In so many calls.
    pub calls: u64,
    /// What they took together.
    pub elapsed_ms: u64,
    /// The longest.
    pub elapsed_ms_max: u64,
    /// When the latest was.
    pub last_ms: i64,
}

/// Which failovers are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Which {
    /// Of this reason alone.
    pub reason: Option<String>,
    /// Inclusive, in milliseconds since 1970.
    pub from_ms: i64,
    /// At most so many rows, or groups.
    pub limit: u32,
}

/// Columns of a row as it is told, of the table `a` with its words beside it.
const TOLD: &str = "a.at_ms, a.request, m.text, c.text, g.text, a.attempt, r.text, a.elapsed_ms, a.budget_left_ms, \
                    o.text, n.text";
const WORDS: &str = "JOIN record_word m ON m.id = a.model JOIN record_word c ON c.id = a.candidate
                     JOIN record_word g ON g.id = a.region JOIN record_word r ON r.id = a.reason
                     JOIN record_word o ON o.id = a.outcome JOIN record_word n ON n.id = a.next";
/// What is a failover: a candidate that did not serve, though it should have.
const FAILOVERS: &str = "a.at_ms >= $1
     AND a.outcome IN (SELECT id FROM record_word WHERE text IN ('failed', 'cut', 'refused'))
     AND (CAST($2 AS text) IS NULL OR a.reason = (SELECT id FROM record_word WHERE text = $2))";

impl Records {
    /// Everything that was decided about a call's candidates, in order. Of several calls that gave themselves one id, all.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be read.
    pub fn attempts_of(&self, request: &str) -> Result<Vec<Attempt>, RecordError> {
        let (from_ms, to_ms) = match time_of(request) {
            Some(ms) => (ms.saturating_sub(BEFORE_ID_MS), ms.saturating_add(AFTER_ID_MS)),
            None => (i64::MIN, i64::MAX),
        };
        let query = format!(
            "SELECT {TOLD}, a.boot, a.seq FROM (
                 SELECT * FROM attempt WHERE request = $1
                 UNION ALL
                 SELECT * FROM attempt_served WHERE request = $1 AND at_ms >= $2 AND at_ms <= $3) a {WORDS}
             ORDER BY a.at_ms, a.boot, a.seq"
        );
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                let mut query = connection.prepare_cached(&query)?;
                let rows = query.query_map(params![request, from_ms, to_ms], |row| {
                    Ok(((row.get(0)?, row.get(11)?, row.get(12)?), of_file(row)?))
                })?;
                let mut found = rows.collect::<Result<Vec<(Order, Attempt)>, _>>()?;
                found.extend(pages::of(&connection, request, (from_ms, to_ms))?);
                found.sort_by_key(|(order, _)| *order);
                Ok(found.into_iter().map(|(_, attempt)| attempt).collect())
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                let rows = t.query(&query, &[&request, &from_ms, &to_ms]).await?;
                rows.iter().map(of_fleet).collect()
            })?),
        }
    }

    /// The latest failovers, latest first.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be read.
    pub fn failovers(&self, which: &Which) -> Result<Vec<Attempt>, RecordError> {
        let Which { reason, from_ms, limit } = which;
        let query = format!(
            "SELECT {TOLD} FROM attempt a {WORDS} WHERE {FAILOVERS}
             ORDER BY a.at_ms DESC, a.boot DESC, a.seq DESC LIMIT $3"
        );
        let limit = i64::from(*limit);
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                let mut query = connection.prepare_cached(&query)?;
                let rows = query.query_map(params![from_ms, reason, limit], of_file)?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                let rows = t.query(&query, &[from_ms, reason, &limit]).await?;
                rows.iter().map(of_fleet).collect()
            })?),
        }
    }

    /// Failovers, counted by what they have in common; the most first.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be read.
    pub fn failovers_by(&self, by: By, which: &Which) -> Result<Vec<Group>, RecordError> {
        let Which { reason, from_ms, limit } = which;
        let column = match by {
            By::Upstream => "candidate",
            By::Model => "model",
            By::Region => "region",
            By::Reason => "reason",
        };
        let query = format!(
            "SELECT w.text, s.failovers, s.calls, s.elapsed, s.longest, s.latest FROM (
                 SELECT a.{column} AS word, count(*) AS failovers, count(DISTINCT a.request) AS calls,
                     CAST(sum(a.elapsed_ms) AS bigint) AS elapsed, max(a.elapsed_ms) AS longest, max(a.at_ms) AS latest
                 FROM attempt a WHERE {FAILOVERS} GROUP BY a.{column}) s
             JOIN record_word w ON w.id = s.word ORDER BY s.failovers DESC, w.text LIMIT $3"
        );
        let limit = i64::from(*limit);
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                let mut query = connection.prepare_cached(&query)?;
                let rows = query.query_map(params![from_ms, reason, limit], |row| {
                    Ok(Group {
                        key: row.get(0)?,
                        failovers: counted(row, 1)?,
                        calls: counted(row, 2)?,
                        elapsed_ms: counted(row, 3)?,
                        elapsed_ms_max: counted(row, 4)?,
                        last_ms: row.get(5)?,
                    })
                })?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                let group = |row: &PgRow| {
                    Ok(Group {
                        key: row.try_get(0)?,
                        failovers: whole(row, 1)?,
                        calls: whole(row, 2)?,
                        elapsed_ms: whole(row, 3)?,
                        elapsed_ms_max: whole(row, 4)?,
                        last_ms: row.try_get(5)?,
                    })
                };
                t.query(&query, &[from_ms, reason, &limit]).await?.iter().map(group).collect()
            })?),
        }
    }
}

/// The time in an id that we made: see `entropy::request_id`.
fn time_of(request: &str) -> Option<i64> {
    let hex = request.strip_prefix("req_").filter(|hex| hex.len() == 32)?;
    i64::from_str_radix(hex.get(..12)?, 16).ok()
}

fn of_file(row: &rusqlite::Row<'_>) -> rusqlite::Result<Attempt> {
    Ok(Attempt {
        at_ms: row.get(0)?,
        request_id: row.get(1)?,
        model: row.get(2)?,
        candidate: row.get(3)?,
        region: row.get(4)?,
        attempt: row.get(5)?,
        reason: row.get(6)?,
        elapsed_ms: row.get(7)?,
        budget_left_ms: row.get(8)?,
        outcome: row.get(9)?,
        next: row.get(10)?,
    })
}

fn of_fleet(row: &PgRow) -> Result<Attempt, LedgerError> {
    Ok(Attempt {
        at_ms: row.try_get(0)?,
        request_id: row.try_get(1)?,
        model: row.try_get(2)?,
        candidate: row.try_get(3)?,
        region: row.try_get(4)?,
        attempt: row.try_get(5)?,
        reason: row.try_get(6)?,
        elapsed_ms: row.try_get(7)?,
        budget_left_ms: row.try_get(8)?,
        outcome: row.try_get(9)?,
        next: row.try_get(10)?,
    })
}

/// Columns beside the request: `at_ms`, `boot`, `seq`, then the rest in the order of the table.
fn columns(words: &Words, boot: i64, row: &Row) -> [i64; 12] {
    [
        row.at_ms,
        boot,
        row.seq,
        words.id(row.model),
        words.id(row.candidate),
        words.id(row.region),
        i64::from(row.attempt),
        words.id(row.reason),
        row.elapsed_ms,
        row.budget_left_ms,
        words.id(row.outcome),
        words.id(row.next),
    ]
}

/// Adds rows to the file.
pub(super) fn add_to_file(
    transaction: &Transaction<'_>,
    words: &Words,
    boot: i64,
    rows: &[Row],
) -> rusqlite::Result<()> {
    let (plain, others): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.is_plain);
    pages::add(transaction, words, boot, &plain)?;
    let mut insert = transaction.prepare_cached(
        "INSERT INTO attempt (at_ms, boot, seq, request, model, candidate, region, attempt, reason, elapsed_ms,
             budget_left_ms, outcome, next)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
    )?;
    for row in others {
        let [at_ms, boot, seq, model, candidate, region, number, reason, elapsed, left, outcome, next] =
            columns(words, boot, row);
        insert.execute(params![
            at_ms,
            boot,
            seq,
            row.request.as_str(),
            model,
            candidate,
            region,
            number,
            reason,
            elapsed,
            left,
            outcome,
            next
        ])?;
    }
    Ok(())
}

/// Adds rows to the fleet's database. The partitions of their days are there.
pub(super) async fn add_to_fleet(
    t: &PgTransaction<'_>,
    words: &Words,
    boot: i64,
    rows: &[Row],
) -> Result<(), LedgerError> {
    for (table, is_plain) in [("attempt", false), ("attempt_served", true)] {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.is_plain == is_plain).collect();
        if rows.is_empty() {
            continue;
        }
        let requests: Vec<&str> = rows.iter().map(|row| row.request.as_str()).collect();
        let [at_ms, boot, seq, model, candidate, region, number, reason, elapsed, left, outcome, next] =
            turned(rows.iter().map(|row| columns(words, boot, row)));
        let insert = t
            .prepare_cached(&format!(
                "INSERT INTO {table} (at_ms, boot, seq, request, model, candidate, region, attempt, reason, elapsed_ms,
                     budget_left_ms, outcome, next)
                 SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[], $6::bigint[],
                     $7::bigint[], $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[],
                     $13::bigint[])"
            ))
            .await?;
        t.execute(
            &insert,
            &[
                &at_ms, &boot, &seq, &requests, &model, &candidate, &region, &number, &reason, &elapsed,
                &left, &outcome, &next,
            ],
        )
        .await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_read_from_ids_of_ours_alone() {
        let id = crate::entropy::request_id();
        let told = time_of(&id).unwrap();
        assert!((crate::clock::unix_ms() - told).abs() < 60_000, "{id}");
        for other in ["", "req_", "my-own-id", "req_zz", id.get(..20).unwrap()] {
            assert_eq!(time_of(other), None, "{other}");
        }
    }
}
