//! Good and bad calls, by the minute in which they began; docs/slo.md says what is good.
//!
//! Counts are added to what is there, so that nodes share minutes and late ones find theirs; that a batch is added once
//! is the writer's promise. Hours are kept beside minutes for those who look back longer than minutes are kept.

use std::collections::HashMap;

use deadpool_postgres::Transaction as PgTransaction;
use filters::slo::{DAY_MS, HOUR_MS, MINUTE_MS, start_of};
use rusqlite::{Transaction, params};
use tokio_postgres::Row;

use super::words::{Word, Words};
use super::{Place, RecordError, Records, locked};
use crate::ledger::LedgerError;

/// Calls that have everything in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind {
    /// When their minute began, in milliseconds since 1970.
    pub start_ms: i64,
    /// What was asked for; empty where that is not known.
    pub model: Word,
    /// Who served, or was to blame; empty where nobody was asked.
    pub upstream: Word,
    /// Where that is.
    pub region: Word,
    /// Why they were bad; empty for good ones.
    pub cause: Word,
}

/// How many there were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answered.
    pub good: u64,
    /// Not answered, or cut.
    pub bad: u64,
    /// First events in time.
    pub in_time: u64,
    /// First events that were late.
    pub late: u64,
}

impl Counts {
    /// Adds others.
    pub const fn add(&mut self, other: &Self) {
        let Self { good, bad, in_time, late } = other;
        self.good += *good;
        self.bad += *bad;
        self.in_time += *in_time;
        self.late += *late;
    }
}

/// Calls of one model in one region in one minute, hour or day (in UTC).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Tally {
    /// What was asked for; empty where that is not known.
    pub model: String,
    /// Of the upstream that served or was to blame; empty where there was none, or its config names none.
    pub region: String,
    /// When the time began, in milliseconds since 1970.
    pub start_ms: i64,
    /// Calls that were answered.
    pub good: u64,
    /// Calls that were not answered, or whose answer was cut.
    pub bad: u64,
    /// Streams whose first event was late, among both.
    pub slow: u64,
}

/// A row of a minute, with words as the database calls them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub start_ms: i64,
    pub model: i64,
    pub upstream: i64,
    pub region: i64,
    pub cause: i64,
    pub counts: Counts,
}

/// What is asked of one of the two tables. The span comes first, the model last.
macro_rules! tallies {
    ($table:literal) => {
        concat!(
            "SELECT m.text, r.text, s.at, s.good, s.bad, s.late FROM (
                 SELECT model, region, start_ms / $1 * $1 AS at, CAST(sum(good) AS bigint) AS good,
                     CAST(sum(bad) AS bigint) AS bad, CAST(sum(late) AS bigint) AS late
                 FROM ",
            $table,
            " WHERE start_ms >= $2 AND start_ms < $3 GROUP BY 1, 2, 3) s
             JOIN record_word m ON m.id = s.model JOIN record_word r ON r.id = s.region
             WHERE CAST($4 AS text) IS NULL OR m.text = $4
             ORDER BY s.at, m.text, r.text"
        )
    };
}
const TALLIES_OF_MINUTES: &str = tallies!("slo_minute");
const TALLIES_OF_HOURS: &str = tallies!("slo_hour");

const SLICES: &str = "SELECT start_ms, model, upstream, region, cause, good, bad, in_time, late
                      FROM slo_minute WHERE start_ms >= $1 AND start_ms < $2 ORDER BY start_ms";

impl Records {
    /// Calls by minute, model and region, of minutes that begin from `from_ms` to before `to_ms`; of one model alone where
    /// one is named. Times without calls have none. In the order of time.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be read.
    pub fn minutes(&self, model: Option<&str>, from_ms: i64, to_ms: i64) -> Result<Vec<Tally>, RecordError> {
        self.tallies(TALLIES_OF_MINUTES, MINUTE_MS, model, from_ms, to_ms)
    }

    /// The same by hour. Hours are kept longer than minutes.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be read.
    pub fn hours(&self, model: Option<&str>, from_ms: i64, to_ms: i64) -> Result<Vec<Tally>, RecordError> {
        self.tallies(TALLIES_OF_HOURS, HOUR_MS, model, from_ms, to_ms)
    }

    /// The same by day, of hours that begin in the given time.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be read.
    pub fn days(&self, model: Option<&str>, from_ms: i64, to_ms: i64) -> Result<Vec<Tally>, RecordError> {
        self.tallies(TALLIES_OF_HOURS, DAY_MS, model, from_ms, to_ms)
    }

    fn tallies(
        &self,
        query: &str,
        span_ms: i64,
        model: Option<&str>,
        from_ms: i64,
        to_ms: i64,
    ) -> Result<Vec<Tally>, RecordError> {
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                let mut query = connection.prepare_cached(query)?;
                let rows = query.query_map(params![span_ms, from_ms, to_ms, model], |row| {
                    Ok(Tally {
                        model: row.get(0)?,
                        region: row.get(1)?,
                        start_ms: row.get(2)?,
                        good: counted(row, 3)?,
                        bad: counted(row, 4)?,
                        slow: counted(row, 5)?,
                    })
                })?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                let query = t.prepare_cached(query).await?;
                let rows = t.query(&query, &[&span_ms, &from_ms, &to_ms, &model]).await?;
                rows.iter().map(tally).collect()
            })?),
        }
    }

    /// Every row of the minutes that begin from `from_ms` to before `to_ms`, in the order of time. A day of many models
    /// has some ten thousand: ask for no more at once.
    pub(super) fn slices(&self, from_ms: i64, to_ms: i64) -> Result<Vec<Slice>, RecordError> {
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                let mut query = connection.prepare_cached(SLICES)?;
                let rows = query.query_map([from_ms, to_ms], |row| {
                    Ok(Slice {
                        start_ms: row.get(0)?,
                        model: row.get(1)?,
                        upstream: row.get(2)?,
                        region: row.get(3)?,
                        cause: row.get(4)?,
                        counts: Counts {
                            good: counted(row, 5)?,
                            bad: counted(row, 6)?,
                            in_time: counted(row, 7)?,
                            late: counted(row, 8)?,
                        },
                    })
                })?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                let query = t.prepare_cached(SLICES).await?;
                t.query(&query, &[&from_ms, &to_ms]).await?.iter().map(slice).collect()
            })?),
        }
    }
}

fn tally(row: &Row) -> Result<Tally, LedgerError> {
    Ok(Tally {
        model: row.try_get(0)?,
        region: row.try_get(1)?,
        start_ms: row.try_get(2)?,
        good: whole(row, 3)?,
        bad: whole(row, 4)?,
        slow: whole(row, 5)?,
    })
}

fn slice(row: &Row) -> Result<Slice, LedgerError> {
    Ok(Slice {
        start_ms: row.try_get(0)?,
        model: row.try_get(1)?,
        upstream: row.try_get(2)?,
        region: row.try_get(3)?,
        cause: row.try_get(4)?,
        counts: Counts {
            good: whole(row, 5)?,
            bad: whole(row, 6)?,
            in_time: whole(row, 7)?,
            late: whole(row, 8)?,
        },
    })
}

/// A count; a constraint keeps it from being below zero.
pub(super) fn whole(row: &Row, column: usize) -> Result<u64, LedgerError> {
    Ok(u64::try_from(row.try_get::<_, i64>(column)?).unwrap_or_default())
}

/// The same in the file.
pub(super) fn counted(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or_default())
}

/// A count, as it is stored.
fn stored(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Counts of one row, in the order of columns.
type Row4 = [i64; 4];

fn columns(counts: &Counts) -> Row4 {
    let Counts { good, bad, in_time, late } = *counts;
    [good, bad, in_time, late].map(stored)
}

/// Calls by hour, in the order of their keys: nodes that add to the same rows wait for each other and do not embrace.
fn by_hour(calls: &HashMap<Kind, Counts>) -> Vec<((i64, Word, Word), Counts)> {
    let mut hours: HashMap<(i64, Word, Word), Counts> = HashMap::new();
    for (kind, counts) in calls {
        hours.entry((start_of(kind.start_ms, HOUR_MS), kind.model, kind.region)).or_default().add(counts);
    }
    hours.into_iter().collect()
}

/// Adds calls to what is in the file.
pub(super) fn add_to_file(
    transaction: &Transaction<'_>,
    words: &Words,
    calls: &HashMap<Kind, Counts>,
) -> rusqlite::Result<()> {
    let mut minute = transaction.prepare_cached(
        "INSERT INTO slo_minute (start_ms, model, upstream, region, cause, good, bad, in_time, late)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
         ON CONFLICT DO UPDATE SET good = good + excluded.good, bad = bad + excluded.bad,
             in_time = in_time + excluded.in_time, late = late + excluded.late",
    )?;
    for (kind, counts) in calls {
        let Kind { start_ms, model, upstream, region, cause } = *kind;
        let [model, upstream, region, cause] = [model, upstream, region, cause].map(|word| words.id(word));
        let [good, bad, in_time, late] = columns(counts);
        minute.execute(params![start_ms, model, upstream, region, cause, good, bad, in_time, late])?;
    }
    let mut hour = transaction.prepare_cached(
        "INSERT INTO slo_hour (start_ms, model, region, good, bad, in_time, late)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT DO UPDATE SET good = good + excluded.good, bad = bad + excluded.bad,
             in_time = in_time + excluded.in_time, late = late + excluded.late",
    )?;
    for ((start_ms, model, region), counts) in by_hour(calls) {
        let [good, bad, in_time, late] = columns(&counts);
        hour.execute(params![start_ms, words.id(model), words.id(region), good, bad, in_time, late])?;
    }
    Ok(())
}

/// Adds calls to what is in the fleet's database.
pub(super) async fn add_to_fleet(
    t: &PgTransaction<'_>,
    words: &Words,
    calls: &HashMap<Kind, Counts>,
) -> Result<(), LedgerError> {
    if calls.is_empty() {
        return Ok(());
    }
    let mut minutes: Vec<([i64; 5], Row4)> = calls
        .iter()
        .map(|(kind, counts)| {
            let Kind { start_ms, model, upstream, region, cause } = *kind;
            let [model, upstream, region, cause] =
                [model, upstream, region, cause].map(|word| words.id(word));
            ([start_ms, model, upstream, region, cause], columns(counts))
        })
        .collect();
    minutes.sort_unstable();
    let mut hours: Vec<([i64; 3], Row4)> = by_hour(calls)
        .into_iter()
        .map(|((start_ms, model, region), counts)| {
            ([start_ms, words.id(model), words.id(region)], columns(&counts))
        })
        .collect();
    hours.sort_unstable();

    let add = t
        .prepare_cached(
            "INSERT INTO slo_minute AS s (start_ms, model, upstream, region, cause, good, bad, in_time, late)
             SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],
                 $7::bigint[], $8::bigint[], $9::bigint[])
             ON CONFLICT (start_ms, model, upstream, region, cause) DO UPDATE SET good = s.good + excluded.good,
                 bad = s.bad + excluded.bad, in_time = s.in_time + excluded.in_time, late = s.late + excluded.late",
        )
        .await?;
    let [start_ms, model, upstream, region, cause] = turned(minutes.iter().map(|(key, _)| *key));
    let [good, bad, in_time, late] = turned(minutes.iter().map(|(_, counts)| *counts));
    t.execute(&add, &[&start_ms, &model, &upstream, &region, &cause, &good, &bad, &in_time, &late]).await?;

    let add = t
        .prepare_cached(
            "INSERT INTO slo_hour AS s (start_ms, model, region, good, bad, in_time, late)
             SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],
                 $7::bigint[])
             ON CONFLICT (start_ms, model, region) DO UPDATE SET good = s.good + excluded.good,
                 bad = s.bad + excluded.bad, in_time = s.in_time + excluded.in_time, late = s.late + excluded.late",
        )
        .await?;
    let [start_ms, model, region] = turned(hours.iter().map(|(key, _)| *key));
    let [good, bad, in_time, late] = turned(hours.iter().map(|(_, counts)| *counts));
    t.execute(&add, &[&start_ms, &model, &region, &good, &bad, &in_time, &late]).await?;
    Ok(())
}

/// Rows as columns.
pub(super) fn turned<const N: usize>(rows: impl Iterator<Item = [i64; N]>) -> [Vec<i64>; N] {
    let mut columns = [const { vec![] }; N];
    for row in rows {
        for (column, value) in columns.iter_mut().zip(row) {
            column.push(value);
        }
    }
    columns
}
