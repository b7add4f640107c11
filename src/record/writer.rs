//! Writes batches of records, each once, and takes away what is old.

use std::collections::HashMap;

use filters::slo::{DAY_MS, HOUR_MS, MINUTE_MS, start_of};

use super::attempts::{self, Row};
use super::minutes::{self, Counts, Kind};
use super::words::Words;
use super::{Place, RecordError, Records, locked};
use crate::config::records::Keep;

/// Rows that one statement takes away, so that nobody waits long for it; and pages of them.
const DELETE_ROWS_MAX: u32 = 20_000;
const DELETE_PAGES_MAX: u32 = 40;
/// How long the hours of good and bad calls are kept, beyond what is kept of minutes.
const HOURS_KEPT_MS: i64 = 400 * DAY_MS;
/// How long a process's last batch is remembered.
const WRITERS_KEPT_MS: i64 = 30 * DAY_MS;
/// Pages of the file that are given back to the system at a time.
const PAGES_FREED: u32 = 2000;

/// What is written at once.
#[derive(Debug, Default)]
pub struct Batch {
    /// The process.
    pub boot: i64,
    /// Its batches count from 1 on; one that is not above those that were written is there already.
    pub number: i64,
    pub attempts: Vec<Row>,
    pub calls: HashMap<Kind, Counts>,
}

impl Records {
    /// Writes a batch, unless it is there already. The partitions of its days are there: see [`Self::make_room`].
    ///
    /// # Errors
    /// [`RecordError`]: then nothing is written, or it was and nobody said so. It may be asked for again.
    pub fn write(&self, words: &mut Words, batch: &Batch, now_ms: i64) -> Result<(), RecordError> {
        self.introduce(words)?;
        let Batch { boot, number, attempts: rows, calls } = batch;
        match &self.0 {
            Place::File(connection) => {
                let mut connection = locked(connection);
                let transaction = connection.transaction()?;
                let turn = "INSERT INTO record_writer (boot, batch, at_ms) VALUES (?1, ?2, ?3)
                            ON CONFLICT DO UPDATE SET batch = excluded.batch, at_ms = excluded.at_ms
                            WHERE batch < excluded.batch";
                if transaction.prepare_cached(turn)?.execute([*boot, *number, now_ms])? > 0 {
                    attempts::add_to_file(&transaction, words, *boot, rows)?;
                    minutes::add_to_file(&transaction, words, calls)?;
                }
                Ok(transaction.commit()?)
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                let turn = "INSERT INTO record_writer AS w (boot, batch, at_ms) VALUES ($1, $2, $3)
                            ON CONFLICT (boot) DO UPDATE SET batch = excluded.batch, at_ms = excluded.at_ms
                            WHERE w.batch < excluded.batch";
                if t.execute(turn, &[boot, number, &now_ms]).await? > 0 {
                    attempts::add_to_fleet(t, words, *boot, rows).await?;
                    minutes::add_to_fleet(t, words, calls).await?;
                }
                Ok(())
            })?),
        }
    }

    /// Makes the partitions of a day since 1970 in a fleet's database.
    ///
    /// # Errors
    /// [`RecordError`] when they cannot be made.
    pub fn make_room(&self, day: i64) -> Result<(), RecordError> {
        match &self.0 {
            Place::File(_) => Ok(()),
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                t.execute("SELECT make_attempt_partitions($1)", &[&day]).await?;
                Ok(())
            })?),
        }
    }

    /// Takes away what is older than it is kept, and the oldest attempts of a file that is too large. Answers how many
    /// rows went before their time.
    ///
    /// # Errors
    /// [`RecordError`]: some of it may be done.
    pub fn prune(&self, keep: &Keep, now_ms: i64) -> Result<u64, RecordError> {
        let before = |kept: std::time::Duration| now_ms.saturating_sub(millis(kept));
        let minutes = start_of(before(keep.minutes), MINUTE_MS);
        let hours = start_of(before(keep.minutes).min(now_ms - HOURS_KEPT_MS), HOUR_MS);
        let old = [
            ("slo_minute", "start_ms", minutes),
            ("slo_hour", "start_ms", hours),
            ("record_writer", "at_ms", now_ms - WRITERS_KEPT_MS),
        ];
        let attempts = [("attempt", before(keep.attempts)), ("attempt_served", before(keep.served))];
        match &self.0 {
            Place::File(connection) => {
                let attempts = attempts.map(|(table, before)| (table, "at_ms", before));
                let pages = [("served_page", "to_ms", before(keep.served))];
                for (table, column, before) in old.into_iter().chain(attempts).chain(pages) {
                    while delete(connection, table, column, before)? > 0 {}
                }
                self.shrink(keep.file_bytes_max)
            }
            Place::Fleet(ledger) => {
                for (table, column, before) in old {
                    let delete = format!("DELETE FROM {table} WHERE {column} < $1");
                    ledger.within(async |t| Ok(t.execute(&delete, &[&before]).await?))?;
                }
                for (table, before) in attempts {
                    let drop = "SELECT drop_attempt_partitions($1, $2)";
                    ledger.within(async |t| Ok(t.execute(drop, &[&table, &before]).await?))?;
                }
                Ok(0)
            }
        }
    }

    /// Takes the oldest attempts away while the file is larger than it may be: those that served first.
    fn shrink(&self, bytes_max: u64) -> Result<u64, RecordError> {
        let Place::File(connection) = &self.0 else { return Ok(0) };
        let mut gone = 0;
        let key = "at_ms, boot, seq";
        for (table, key, order, rows, most) in [
            ("attempt_served", key, key, "1", DELETE_ROWS_MAX),
            ("served_page", "id", "to_ms, id", "rows", DELETE_PAGES_MAX),
            ("attempt", key, key, "1", DELETE_ROWS_MAX),
        ] {
            let delete = format!(
                "DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} ORDER BY {order} LIMIT ?1)
                 RETURNING {rows}"
            );
            while used_bytes(connection)? > bytes_max {
                let deleted = sum(&locked(connection), &delete, most)?;
                if deleted == 0 {
                    break;
                }
                gone += deleted;
            }
        }
        locked(connection).execute_batch(&format!("PRAGMA incremental_vacuum({PAGES_FREED})"))?;
        Ok(gone)
    }
}

/// The sum of what a statement answers, which may be asked of so many rows.
fn sum(connection: &rusqlite::Connection, sql: &str, most: u32) -> rusqlite::Result<u64> {
    let mut statement = connection.prepare(sql)?;
    let counts = statement.query_map([most], |row| minutes::counted(row, 0))?;
    counts.sum()
}

/// Deletes some rows from before a time; the connection is free for others in between.
fn delete(
    connection: &std::sync::Mutex<rusqlite::Connection>,
    table: &str,
    column: &str,
    before: i64,
) -> rusqlite::Result<usize> {
    // The key of a table without row ids begins with its time: the oldest are found without looking. Pages have an index.
    let (key, most) = match table {
        "slo_minute" => ("start_ms, model, upstream, region, cause", DELETE_ROWS_MAX),
        "slo_hour" => ("start_ms, model, region", DELETE_ROWS_MAX),
        "record_writer" => ("boot", DELETE_ROWS_MAX),
        "served_page" => ("id", DELETE_PAGES_MAX),
        _ => ("at_ms, boot, seq", DELETE_ROWS_MAX),
    };
    let delete = format!(
        "DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {column} < ?1 ORDER BY {key} LIMIT ?2)"
    );
    locked(connection).execute(&delete, rusqlite::params![before, most])
}

/// What of the file is in use.
fn used_bytes(connection: &std::sync::Mutex<rusqlite::Connection>) -> rusqlite::Result<u64> {
    let connection = locked(connection);
    let pragma = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let (pages, free, size) = (pragma("page_count")?, pragma("freelist_count")?, pragma("page_size")?);
    Ok(u64::try_from(pages.saturating_sub(free).saturating_mul(size)).unwrap_or_default())
}

fn millis(span: std::time::Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}
