//! Probes: what asking a route came to, kept for the page of the service's state.
//!
//! A probe every 90 s is a thousand rows a day and route. They stay for [`KEPT_DAYS`], and [`ROWS_MAX`] at most, about
//! a hundred bytes each: the oldest go first.

use filters::money::Amount;
use rusqlite::params;

use super::{Place, RecordError, Records, locked};

/// How many days a probe is kept.
const KEPT_DAYS: i64 = 92;
/// How many probes are kept at most.
const ROWS_MAX: i64 = 1_000_000;

/// What one probe came to.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProbeRow {
    /// When it was over: milliseconds since 1970.
    pub at_ms: i64,
    /// The public name of the model.
    pub model: String,
    /// The route, as metrics name it.
    pub endpoint: String,
    /// Where its provider is; empty where the config does not say it.
    pub region: String,
    /// It was answered as a call would be.
    pub ok: bool,
    /// `ok`, or the word of the failure.
    pub reason: String,
    /// How long it took, in milliseconds.
    pub took_ms: i64,
}

impl Records {
    /// Keeps one, with what it cost at its provider.
    ///
    /// # Errors
    /// [`RecordError`] when it cannot be written.
    pub fn keep_probe(&self, probe: &ProbeRow, cost: Amount) -> Result<(), RecordError> {
        let ProbeRow { at_ms, model, endpoint, region, ok, reason, took_ms } = probe;
        match &self.0 {
            Place::File(connection) => {
                let insert =
                    "INSERT INTO probe (at_ms, model, endpoint, region, ok, reason, took_ms, cost_nano)
                              VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
                let cost = cost.nano();
                locked(connection)
                    .prepare_cached(insert)?
                    .execute(params![at_ms, model, endpoint, region, ok, reason, took_ms, cost])?;
            }
            Place::Fleet(ledger) => {
                let insert =
                    "INSERT INTO probe (at_ms, model, endpoint, region, ok, reason, took_ms, cost_nano)
                              VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";
                let cost = cost.nano();
                ledger.within(async |t| {
                    t.execute(insert, &[at_ms, model, endpoint, region, ok, reason, took_ms, &cost]).await?;
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// All probes since an instant (milliseconds since 1970), the oldest first.
    ///
    /// # Errors
    /// [`RecordError`] when they cannot be read.
    pub fn probes_since(&self, from_ms: i64) -> Result<Vec<ProbeRow>, RecordError> {
        match &self.0 {
            Place::File(connection) => {
                let select = "SELECT at_ms, model, endpoint, region, ok, reason, took_ms FROM probe
                              WHERE at_ms >= ?1 ORDER BY at_ms, id";
                let connection = locked(connection);
                let mut select = connection.prepare_cached(select)?;
                let rows = select.query_map(params![from_ms], |row| {
                    Ok(ProbeRow {
                        at_ms: row.get(0)?,
                        model: row.get(1)?,
                        endpoint: row.get(2)?,
                        region: row.get(3)?,
                        ok: row.get(4)?,
                        reason: row.get(5)?,
                        took_ms: row.get(6)?,
                    })
                })?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Place::Fleet(ledger) => {
                let select = "SELECT at_ms, model, endpoint, region, ok, reason, took_ms FROM probe
                              WHERE at_ms >= $1 ORDER BY at_ms, id";
                Ok(ledger.within(async |t| {
                    let rows = t.query(select, &[&from_ms]).await?;
                    let probe = |row: &tokio_postgres::Row| {
                        Ok(ProbeRow {
                            at_ms: row.try_get(0)?,
                            model: row.try_get(1)?,
                            endpoint: row.try_get(2)?,
                            region: row.try_get(3)?,
                            ok: row.try_get(4)?,
                            reason: row.try_get(5)?,
                            took_ms: row.try_get(6)?,
                        })
                    };
                    rows.iter().map(probe).collect()
                })?)
            }
        }
    }

    /// What probes have cost since an instant.
    ///
    /// # Errors
    /// [`RecordError`] when they cannot be read.
    pub fn probes_cost_since(&self, from_ms: i64) -> Result<Amount, RecordError> {
        let nano = match &self.0 {
            Place::File(connection) => {
                let sum = "SELECT coalesce(sum(cost_nano), 0) FROM probe WHERE at_ms >= ?1";
                locked(connection).query_row(sum, params![from_ms], |row| row.get(0))?
            }
            Place::Fleet(ledger) => {
                let sum = "SELECT coalesce(sum(cost_nano), 0)::bigint FROM probe WHERE at_ms >= $1";
                ledger.within(async |t| Ok(t.query_one(sum, &[&from_ms]).await?.try_get(0)?))?
            }
        };
        Ok(Amount::from_nano(nano))
    }

    /// Lets go of what is older than it is kept, and of the oldest where there is too much.
    ///
    /// # Errors
    /// [`RecordError`] when it cannot be written.
    pub fn forget_probes(&self, now_ms: i64) -> Result<(), RecordError> {
        let before = now_ms.saturating_sub(KEPT_DAYS * 86_400_000);
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                connection.execute("DELETE FROM probe WHERE at_ms < ?1", params![before])?;
                let above = "DELETE FROM probe WHERE id <= (SELECT max(id) FROM probe) - ?1";
                connection.execute(above, params![ROWS_MAX])?;
            }
            Place::Fleet(ledger) => ledger.within(async |t| {
                t.execute("DELETE FROM probe WHERE at_ms < $1", &[&before]).await?;
                let above = "DELETE FROM probe WHERE id <= (SELECT max(id) FROM probe) - $1";
                t.execute(above, &[&ROWS_MAX]).await?;
                Ok(())
            })?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(at_ms: i64, ok: bool) -> ProbeRow {
        let reason = if ok { "ok" } else { "first_byte" };
        ProbeRow {
            at_ms,
            model: "m".to_owned(),
            endpoint: "p/m".to_owned(),
            region: "eu".to_owned(),
            ok,
            reason: reason.to_owned(),
            took_ms: 12,
        }
    }

    #[test]
    fn probes_come_back_in_order_with_their_cost_until_they_are_too_old() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::open(folder.path()).unwrap();
        let day = 86_400_000;
        for (at, ok) in [(2 * day, false), (day, true), (100 * day, true)] {
            records.keep_probe(&probe(at, ok), Amount::from_nano(7)).unwrap();
        }
        assert_eq!(records.probes_since(2 * day).unwrap(), [probe(2 * day, false), probe(100 * day, true)]);
        assert_eq!(records.probes_cost_since(2 * day).unwrap(), Amount::from_nano(14));
        records.forget_probes(100 * day).unwrap();
        assert_eq!(records.probes_since(0).unwrap(), [probe(100 * day, true)]);
    }
}
