//! First attempts that served, as the file keeps them: many in a row.
//!
//! They are nearly all there is, and of the least interest. A row for each is two and a half percent of what a small call
//! costs; in pages it is a tenth of that. A page has what came in one batch. Who looks for a call looks for the bytes of its
//! id, and reads the pages that have them.
//!
//! Deliberately absent: pages in a fleet's database. Its rows are written by the thousand, by a server that is not the gateway.

use rusqlite::types::Type;
use rusqlite::{Connection, Error, Transaction, params};
use serde::{Deserialize, Serialize, Serializer};

use super::attempts::{Attempt, Order, Row, SERVED};
use super::words::Words;

/// Of one page.
const ROWS_MAX: usize = 512;
/// What each takes of it, about.
const ROW_BYTES: usize = 64;

/// One of them. Words are as the database calls them.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Served<'a> {
    /// Since the page's first one.
    after_ms: i64,
    seq: i64,
    request: &'a str,
    model: i64,
    candidate: i64,
    region: i64,
    elapsed_ms: i64,
    budget_left_ms: i64,
}

/// Adds rows to the file.
pub(super) fn add(
    transaction: &Transaction<'_>,
    words: &Words,
    boot: i64,
    rows: &[&Row],
) -> rusqlite::Result<()> {
    let mut insert = transaction.prepare_cached(
        "INSERT INTO served_page (from_ms, to_ms, boot, rows, page) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?;
    let mut page = Vec::with_capacity(rows.len().min(ROWS_MAX) * ROW_BYTES);
    for rows in rows.chunks(ROWS_MAX) {
        let times = || rows.iter().map(|row| row.at_ms);
        let (Some(from_ms), Some(to_ms)) = (times().min(), times().max()) else { continue };
        let room = std::mem::take(&mut page);
        page = postcard::to_extend(&Page { words, rows, from_ms }, room)
            .map_err(|error| Error::ToSqlConversionFailure(error.into()))?;
        let count = i64::try_from(rows.len()).unwrap_or(i64::MAX);
        insert.execute(params![from_ms, to_ms, boot, count, page])?;
        page.clear();
    }
    Ok(())
}

/// A page that is written; it is read as a list of [`Served`].
struct Page<'a> {
    words: &'a Words,
    rows: &'a [&'a Row],
    from_ms: i64,
}

impl Serialize for Page<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { words, rows, from_ms } = self;
        serializer.collect_seq(rows.iter().map(|row| served(words, row, *from_ms)))
    }
}

fn served<'a>(words: &Words, row: &'a Row, from_ms: i64) -> Served<'a> {
    Served {
        after_ms: row.at_ms - from_ms,
        seq: row.seq,
        request: row.request.as_str(),
        model: words.id(row.model),
        candidate: words.id(row.candidate),
        region: words.id(row.region),
        elapsed_ms: row.elapsed_ms,
        budget_left_ms: row.budget_left_ms,
    }
}

/// Those of a call, made in the given time, inclusive.
pub(super) fn of(
    connection: &Connection,
    request: &str,
    (from_ms, to_ms): (i64, i64),
) -> rusqlite::Result<Vec<(Order, Attempt)>> {
    let mut query = connection.prepare_cached(
        "SELECT from_ms, boot, page FROM served_page
         WHERE to_ms >= ?1 AND from_ms <= ?2 AND instr(page, CAST(?3 AS BLOB)) > 0",
    )?;
    let mut pages = query.query(params![from_ms, to_ms, request])?;
    let mut found = vec![];
    while let Some(page) = pages.next()? {
        let (first_ms, boot) = (page.get::<_, i64>(0)?, page.get::<_, i64>(1)?);
        let rows: Vec<Served<'_>> = postcard::from_bytes(page.get_ref(2)?.as_blob()?)
            .map_err(|error| Error::FromSqlConversionFailure(2, Type::Blob, error.into()))?;
        for row in rows.iter().filter(|row| row.request == request) {
            let at_ms = first_ms + row.after_ms;
            if (from_ms..=to_ms).contains(&at_ms) {
                found.push(((at_ms, boot, row.seq), told(connection, row, at_ms)?));
            }
        }
    }
    Ok(found)
}

fn told(connection: &Connection, row: &Served<'_>, at_ms: i64) -> rusqlite::Result<Attempt> {
    let mut text = connection.prepare_cached("SELECT text FROM record_word WHERE id = ?1")?;
    let mut text = |word: i64| text.query_row([word], |row| row.get(0));
    Ok(Attempt {
        at_ms,
        request_id: row.request.to_owned(),
        model: text(row.model)?,
        candidate: text(row.candidate)?,
        region: text(row.region)?,
        attempt: 1,
        reason: "ok".to_owned(),
        elapsed_ms: row.elapsed_ms,
        budget_left_ms: row.budget_left_ms,
        outcome: SERVED.to_owned(),
        next: "stop".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::writer::Batch;
    use super::super::{Place, Records, locked};
    use super::*;

    fn row(words: &mut Words, at_ms: i64, seq: i64, request: &str) -> Row {
        Row {
            at_ms,
            seq,
            request: request.into(),
            model: words.number("model"),
            candidate: words.number(&format!("up/{}", seq % 3)),
            region: words.number(""),
            attempt: 1,
            reason: words.number("ok"),
            elapsed_ms: 2 * seq,
            budget_left_ms: 3 * seq,
            outcome: words.number(SERVED),
            next: words.number("stop"),
            is_plain: true,
        }
    }

    fn on_file<T>(records: &Records, ask: impl FnOnce(&Connection) -> T) -> T {
        let Place::File(connection) = &records.0 else { panic!("a file") };
        ask(&locked(connection))
    }

    #[test]
    fn a_call_is_found_in_its_page_with_all_that_was_written() {
        let (records, mut words) = (Records::in_memory().unwrap(), Words::default());
        let count = i64::try_from(ROWS_MAX).unwrap() + 2;
        // Not in the order of time: threads that serve hand in what they have as they come to it.
        let attempts: Vec<Row> =
            (0..count).map(|seq| row(&mut words, 5_000 - seq, seq, &format!("call-{seq}"))).collect();
        let batch = Batch { boot: 7, number: 1, attempts, ..Batch::default() };
        records.write(&mut words, &batch, 0).unwrap();
        let pages = "SELECT count(*), sum(rows) FROM served_page";
        let pages = |c: &Connection| c.query_row(pages, [], |row| Ok((row.get(0)?, row.get(1)?)));
        assert_eq!(on_file(&records, pages), Ok((2_i64, count)));
        for seq in [0, 1, 2, count - 1] {
            // The id of one begins the ids of others.
            let found = records.attempts_of(&format!("call-{seq}")).unwrap();
            let [found] = found.as_slice() else { panic!("{seq}: {found:?}") };
            assert_eq!(
                (found.at_ms, found.elapsed_ms, found.budget_left_ms),
                (5_000 - seq, 2 * seq, 3 * seq)
            );
            assert_eq!((found.model.as_str(), found.region.as_str(), found.attempt), ("model", "", 1));
            assert_eq!(found.candidate, format!("up/{}", seq % 3));
        }
        for other in ["", "call-", "call-00", "another"] {
            assert_eq!(records.attempts_of(other).unwrap(), [], "{other}");
        }
    }

    #[test]
    fn what_an_earlier_version_wrote_row_by_row_is_found_beside_it() {
        let (records, mut words) = (Records::in_memory().unwrap(), Words::default());
        let attempts = vec![row(&mut words, 20, 0, "mine")];
        records.write(&mut words, &Batch { boot: 1, number: 1, attempts, ..Batch::default() }, 0).unwrap();
        let old =
            "INSERT INTO attempt_served SELECT 10, 1, 0, 'mine', w.id, w.id, w.id, 1, w.id, 0, 0, w.id, w.id
                   FROM record_word w WHERE w.text = 'model'";
        on_file(&records, |connection| connection.execute(old, [])).unwrap();
        let found: Vec<i64> = records.attempts_of("mine").unwrap().iter().map(|it| it.at_ms).collect();
        assert_eq!(found, [10, 20]);
    }
}
