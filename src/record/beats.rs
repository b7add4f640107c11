//! Heartbeats: how the periodic jobs of every node do, as each said it last.
//!
//! One row a node and job. A node that says nothing for [`KEPT_DAYS`] is forgotten with its jobs.

use rusqlite::params;

use super::{Place, RecordError, Records, locked};

/// How many days the last word of a node that has gone is kept.
const KEPT_DAYS: i64 = 1;

/// How one periodic job of one node does. Times are milliseconds since 1970, 0 for never.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct BeatRow {
    pub job: String,
    /// How often it is to be done.
    pub period_ms: i64,
    /// When it last began.
    pub started_ms: i64,
    /// When it was last done.
    pub succeeded_ms: i64,
    /// When it last failed.
    pub failed_ms: i64,
    /// Why it failed then; empty for never.
    pub failure: String,
    /// Whose job it is.
    pub node: String,
}

impl Records {
    /// Takes the word of a node on its jobs, instead of what it said before.
    ///
    /// # Errors
    /// [`RecordError`] when it cannot be written.
    pub fn keep_beats(&self, beats: &[BeatRow], now_ms: i64) -> Result<(), RecordError> {
        let before = now_ms.saturating_sub(KEPT_DAYS * 86_400_000);
        match &self.0 {
            Place::File(connection) => {
                let mut connection = locked(connection);
                let transaction = connection.transaction()?;
                for beat in beats {
                    let BeatRow { job, period_ms, started_ms, succeeded_ms, failed_ms, failure, node } = beat;
                    transaction
                        .prepare_cached(
                            "INSERT OR REPLACE INTO beat (node, job, period_ms, started_ms, succeeded_ms, failed_ms,
                                 failure, told_ms) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                        )?
                        .execute(params![
                            node, job, period_ms, started_ms, succeeded_ms, failed_ms, failure, now_ms
                        ])?;
                }
                // A job that is over is not in its node's word any more.
                if let Some(beat) = beats.first() {
                    let over = "DELETE FROM beat WHERE node = ?1 AND told_ms < ?2";
                    transaction.execute(over, params![beat.node, now_ms])?;
                }
                transaction.execute("DELETE FROM beat WHERE told_ms < ?1", params![before])?;
                transaction.commit()?;
            }
            Place::Fleet(ledger) => ledger.within(async |t| {
                let upsert = t
                    .prepare_cached(
                        "INSERT INTO beat (node, job, period_ms, started_ms, succeeded_ms, failed_ms, failure, told_ms)
                         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
                         ON CONFLICT (node, job) DO UPDATE SET period_ms = excluded.period_ms,
                             started_ms = excluded.started_ms, succeeded_ms = excluded.succeeded_ms,
                             failed_ms = excluded.failed_ms, failure = excluded.failure, told_ms = excluded.told_ms",
                    )
                    .await?;
                for beat in beats {
                    let BeatRow { job, period_ms, started_ms, succeeded_ms, failed_ms, failure, node } = beat;
                    let row: [&(dyn tokio_postgres::types::ToSql + Sync); 8] =
                        [node, job, period_ms, started_ms, succeeded_ms, failed_ms, failure, &now_ms];
                    t.execute(&upsert, &row).await?;
                }
                if let Some(beat) = beats.first() {
                    let over = "DELETE FROM beat WHERE node = $1 AND told_ms < $2";
                    t.execute(over, &[&beat.node, &now_ms]).await?;
                }
                t.execute("DELETE FROM beat WHERE told_ms < $1", &[&before]).await?;
                Ok(())
            })?,
        }
        Ok(())
    }

    /// How all jobs of all nodes do, by job and node.
    ///
    /// # Errors
    /// [`RecordError`] when they cannot be read.
    pub fn beats(&self) -> Result<Vec<BeatRow>, RecordError> {
        let select = "SELECT job, period_ms, started_ms, succeeded_ms, failed_ms, failure, node FROM beat
                      ORDER BY job, node";
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                let mut select = connection.prepare_cached(select)?;
                let rows = select.query_map([], |row| {
                    Ok(BeatRow {
                        job: row.get(0)?,
                        period_ms: row.get(1)?,
                        started_ms: row.get(2)?,
                        succeeded_ms: row.get(3)?,
                        failed_ms: row.get(4)?,
                        failure: row.get(5)?,
                        node: row.get(6)?,
                    })
                })?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| {
                let rows = t.query(select, &[]).await?;
                let beat = |row: &tokio_postgres::Row| {
                    Ok(BeatRow {
                        job: row.try_get(0)?,
                        period_ms: row.try_get(1)?,
                        started_ms: row.try_get(2)?,
                        succeeded_ms: row.try_get(3)?,
                        failed_ms: row.try_get(4)?,
                        failure: row.try_get(5)?,
                        node: row.try_get(6)?,
                    })
                };
                rows.iter().map(beat).collect()
            })?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_word_of_a_node_counts_and_one_that_has_gone_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::open(folder.path()).unwrap();
        let beat = |node: &str, succeeded_ms| BeatRow {
            job: "sweep".to_owned(),
            period_ms: 50,
            succeeded_ms,
            node: node.to_owned(),
            ..BeatRow::default()
        };
        let day = 86_400_000;
        records.keep_beats(&[beat("a", 1), beat("b", 1)], day).unwrap();
        records.keep_beats(&[beat("a", 2)], day + 1).unwrap();
        assert_eq!(records.beats().unwrap(), [beat("a", 2), beat("b", 1)]);
        let other = BeatRow { job: "look".to_owned(), ..beat("a", 2) };
        records.keep_beats(std::slice::from_ref(&other), day + 2).unwrap();
        assert_eq!(
            records.beats().unwrap(),
            [other, beat("b", 1)],
            "a job that is over goes with the next word"
        );
        records.keep_beats(&[beat("a", 3)], 2 * day + 1).unwrap();
        assert_eq!(records.beats().unwrap(), [beat("a", 3)]);
    }
}
