//! The file of records: `SQLite` in WAL mode. What a power cut takes of it is a second of history, no money.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::RecordError;

/// In order; one that was released never changes. The first is version 1.
const MIGRATIONS: [&str; 7] = [
    include_str!("schema/attempts.sql"),
    include_str!("schema/minutes.sql"),
    include_str!("schema/probes.sql"),
    include_str!("schema/beats.sql"),
    include_str!("schema/incidents.sql"),
    include_str!("schema/notices.sql"),
    include_str!("schema/served.sql"),
];
/// How long a verb waits for another process' write.
const BUSY: Duration = Duration::from_secs(5);

pub(super) fn open(path: &Path) -> Result<Connection, RecordError> {
    prepare(Connection::open(path)?)
}

pub(super) fn in_memory() -> Result<Connection, RecordError> {
    prepare(Connection::open_in_memory()?)
}

pub(super) fn open_for_reading(path: &Path) -> Result<Connection, RecordError> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    connection.busy_timeout(BUSY)?;
    let (found, newest) = (version(&connection)?, newest());
    if found == newest { Ok(connection) } else { Err(RecordError::OtherVersion(found, newest)) }
}

/// The version of this binary.
fn newest() -> i64 {
    i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX)
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

fn prepare(mut connection: Connection) -> Result<Connection, RecordError> {
    // A file changes over to WAL for one who is alone with it: others are refused at once, whatever they would wait.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    connection.busy_timeout(BUSY)?;
    connection.set_transaction_behavior(TransactionBehavior::Immediate);
    // Before the first table: what is taken away goes back to the system piece by piece.
    connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    let newest = newest();
    let transaction = connection.transaction()?;
    let found = version(&transaction)?;
    if found > newest {
        return Err(RecordError::TooNew(found, newest));
    }
    for (version, sql) in (1_i64..).zip(MIGRATIONS) {
        if version > found {
            transaction.execute_batch(sql)?;
            transaction.pragma_update(None, "user_version", version)?;
        }
    }
    transaction.commit()?;
    Ok(connection)
}
