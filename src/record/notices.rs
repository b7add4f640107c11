//! Notifications that wait: what receivers have not taken yet, so that it outlives the process that tells it.
//!
//! A row belongs to one process for [`TERM`], which says so again and again. When it has died another process takes the row
//! over, whichever asks first: a new one on the same machine, or another node of the fleet. Rows go when they are taken, or
//! given up, and after `KEPT` whatever became of them.

use std::time::Duration;

use rusqlite::params;

use super::{Place, RecordError, Records, locked};

/// How long a row stays with a process that does not say that it is there.
pub const TERM: Duration = Duration::from_secs(8);
/// How long a row stays at all.
const KEPT: Duration = Duration::from_secs(86_400);
/// Rows that are taken over at once.
const TAKEN_MAX: u32 = 1024;

/// A message for one receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoticeRow {
    /// A digest of whom it is for.
    pub receiver: String,
    /// The message's own.
    pub id: String,
    /// When it was made: milliseconds since 1970.
    pub at_ms: i64,
    /// The message, as JSON.
    pub body: String,
}

/// What a process says of its rows.
#[derive(Clone, Debug, Default)]
pub struct Tending {
    /// The process.
    pub teller: String,
    /// New ones.
    pub put: Vec<NoticeRow>,
    /// Receiver and id of those that are done.
    pub done: Vec<(String, String)>,
}

/// What it is answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tended {
    /// All rows that are its own now, the oldest first.
    pub own: Vec<NoticeRow>,
    /// How many are another process's.
    pub others: i64,
}

impl Records {
    /// Keeps a process's new rows, takes away those that are done, says that it is there, and gives it those of processes
    /// that are not.
    ///
    /// # Errors
    /// [`RecordError`]: then nothing was done, or all of it and nobody said so. It may be asked for again.
    pub fn tend_notices(&self, tending: &Tending, now_ms: i64) -> Result<Tended, RecordError> {
        let old = now_ms.saturating_sub(millis(KEPT));
        match &self.0 {
            Place::File(connection) => {
                let mut connection = locked(connection);
                let transaction = connection.transaction()?;
                let tended = tend_in_file(&transaction, tending, now_ms, old)?;
                transaction.commit()?;
                Ok(tended)
            }
            Place::Fleet(ledger) => Ok(ledger.within(async |t| tend_in_fleet(t, tending, old).await)?),
        }
    }
}

fn tend_in_file(
    t: &rusqlite::Transaction<'_>,
    tending: &Tending,
    now_ms: i64,
    old: i64,
) -> rusqlite::Result<Tended> {
    let Tending { teller, put, done } = tending;
    let until = now_ms.saturating_add(millis(TERM));
    for (receiver, id) in done {
        t.prepare_cached("DELETE FROM notice WHERE receiver = ?1 AND id = ?2")?.execute([receiver, id])?;
    }
    for NoticeRow { receiver, id, at_ms, body } in put {
        let insert = "INSERT INTO notice (receiver, id, at_ms, body, teller, until_ms)
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO NOTHING";
        t.prepare_cached(insert)?.execute(params![receiver, id, at_ms, body, teller, until])?;
    }
    t.execute("DELETE FROM notice WHERE at_ms < ?1", [old])?;
    t.execute("UPDATE notice SET until_ms = ?2 WHERE teller = ?1", params![teller, until])?;
    let take = "UPDATE notice SET teller = ?1, until_ms = ?2 WHERE (receiver, id) IN
                    (SELECT receiver, id FROM notice WHERE until_ms < ?3 ORDER BY at_ms, id LIMIT ?4)";
    t.execute(take, params![teller, until, now_ms, TAKEN_MAX])?;
    let select = "SELECT receiver, id, at_ms, body FROM notice WHERE teller = ?1 ORDER BY at_ms, id";
    let mut select = t.prepare_cached(select)?;
    let rows = select.query_map([teller], |row| {
        Ok(NoticeRow { receiver: row.get(0)?, id: row.get(1)?, at_ms: row.get(2)?, body: row.get(3)? })
    })?;
    let own = rows.collect::<Result<_, _>>()?;
    let others = "SELECT count(*) FROM notice WHERE teller <> ?1";
    Ok(Tended { own, others: t.query_row(others, [teller], |row| row.get(0))? })
}

async fn tend_in_fleet(
    t: &deadpool_postgres::Transaction<'_>,
    tending: &Tending,
    old: i64,
) -> Result<Tended, crate::ledger::LedgerError> {
    let Tending { teller, put, done } = tending;
    let term = TERM.as_secs_f64();
    for (receiver, id) in done {
        t.execute("DELETE FROM notice WHERE receiver = $1 AND id = $2", &[receiver, id]).await?;
    }
    for NoticeRow { receiver, id, at_ms, body } in put {
        let insert = "INSERT INTO notice (receiver, id, at_ms, body, teller, until_at)
                      VALUES ($1, $2, $3, $4, $5, now() + make_interval(secs => $6)) ON CONFLICT DO NOTHING";
        t.execute(insert, &[receiver, id, at_ms, body, teller, &term]).await?;
    }
    t.execute("DELETE FROM notice WHERE at_ms < $1", &[&old]).await?;
    let renew = "UPDATE notice SET until_at = now() + make_interval(secs => $2) WHERE teller = $1";
    t.execute(renew, &[teller, &term]).await?;
    let take =
        "UPDATE notice SET teller = $1, until_at = now() + make_interval(secs => $2) WHERE (receiver, id) IN
                    (SELECT receiver, id FROM notice WHERE until_at < now() ORDER BY at_ms, id LIMIT $3
                     FOR UPDATE SKIP LOCKED)";
    t.execute(take, &[teller, &term, &i64::from(TAKEN_MAX)]).await?;
    let select = "SELECT receiver, id, at_ms, body FROM notice WHERE teller = $1 ORDER BY at_ms, id";
    let rows = t.query(select, &[teller]).await?;
    let row = |row: &tokio_postgres::Row| {
        Ok::<_, tokio_postgres::Error>(NoticeRow {
            receiver: row.try_get(0)?,
            id: row.try_get(1)?,
            at_ms: row.try_get(2)?,
            body: row.try_get(3)?,
        })
    };
    let own = rows.iter().map(row).collect::<Result<_, _>>()?;
    let others = t.query_one("SELECT count(*) FROM notice WHERE teller <> $1", &[teller]).await?;
    Ok(Tended { own, others: others.try_get(0)? })
}

fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, at_ms: i64) -> NoticeRow {
        NoticeRow { receiver: "r".to_owned(), id: id.to_owned(), at_ms, body: "{}".to_owned() }
    }

    fn says(teller: &str, put: &[NoticeRow]) -> Tending {
        Tending { teller: teller.to_owned(), put: put.to_vec(), done: vec![] }
    }

    #[test]
    fn rows_go_over_when_their_process_says_nothing_any_more_and_only_then() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::open(folder.path()).unwrap();
        let (begin, term) = (1_000_000, millis(TERM));
        let own = |tended: Tended| tended.own.into_iter().map(|row| row.id).collect::<Vec<_>>();
        let rows = [row("b", begin + 1), row("a", begin)];
        assert_eq!(own(records.tend_notices(&says("one", &rows), begin).unwrap()), ["a", "b"]);
        // What was said without an answer may be said again.
        assert_eq!(own(records.tend_notices(&says("one", &rows), begin).unwrap()), ["a", "b"]);
        let two = records.tend_notices(&says("two", &[]), begin + term).unwrap();
        assert_eq!(two, Tended { own: vec![], others: 2 });
        let done = Tending { done: vec![("r".to_owned(), "a".to_owned())], ..says("one", &[]) };
        assert_eq!(own(records.tend_notices(&done, begin + term).unwrap()), ["b"]);
        let two = records.tend_notices(&says("two", &[]), begin + 2 * term).unwrap();
        assert_eq!((own(two.clone()), two.others), (vec![], 1), "it has said that it is there");
        let two = records.tend_notices(&says("two", &[]), begin + 2 * term + 1).unwrap();
        assert_eq!((own(two.clone()), two.others), (vec!["b".to_owned()], 0));
        let one = records.tend_notices(&says("one", &[]), begin + 2 * term + 1).unwrap();
        assert_eq!(own(one), Vec::<String>::new(), "it is another's now");
        let later = begin + millis(KEPT) + 2;
        assert_eq!(records.tend_notices(&says("two", &[]), later).unwrap(), Tended::default());
    }
}
