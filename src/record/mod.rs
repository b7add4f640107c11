//! What happened, kept for people: attempts, good and bad minutes, incidents, probes, heartbeats.
//!
//! Nothing here decides about money or routing, and no call waits for it. A process that is alone keeps it in
//! `records.db` beside its ledger, in a file of its own so that the ledger's writer waits for none of it; a fleet keeps
//! it in its Postgres. Either keeps a bounded time of it.
//!
//! Each kind has a file of its own, with what is written and asked of it in both databases.

mod file;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rusqlite::Connection;

use crate::ledger::{LedgerError, Postgres};

/// Where records are kept. Its verbs block: they belong to a thread that may.
pub struct Records(Place);

enum Place {
    /// One connection, taken in turns.
    File(Mutex<Connection>),
    Fleet(Postgres),
}

/// Why records were not kept or found.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file said no.
    #[error("the records' file failed: {0}")]
    File(#[from] rusqlite::Error),
    /// The fleet's database said no, or does not answer.
    #[error(transparent)]
    Fleet(#[from] LedgerError),
    /// The file was made by a newer version.
    #[error("the records' file has schema version {0}, this binary knows {1}: use a newer tollgate")]
    TooNew(i64, i64),
}

impl Records {
    /// Of a process that is alone: opens the file in its data folder for writing, and makes it where it is missing.
    ///
    /// # Errors
    /// [`RecordError`] when it cannot be opened, or is newer than this binary.
    pub fn open(data: &Path) -> Result<Self, RecordError> {
        Ok(Self(Place::File(Mutex::new(file::open(&path(data))?))))
    }

    /// The same for reading, beside a running gateway.
    ///
    /// # Errors
    /// [`RecordError`] when it is not there or cannot be read.
    pub fn open_for_reading(data: &Path) -> Result<Self, RecordError> {
        Ok(Self(Place::File(Mutex::new(file::open_for_reading(&path(data))?))))
    }

    /// Of a fleet: in the database of its ledger, which may be away.
    #[must_use]
    pub const fn of_fleet(ledger: Postgres) -> Self {
        Self(Place::Fleet(ledger))
    }
}

fn path(data: &Path) -> PathBuf {
    data.join("records.db")
}

/// A connection, whoever broke before.
fn locked(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}
