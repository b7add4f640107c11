//! What happened, kept for people: attempts, good and bad minutes, incidents, probes, heartbeats, and what they are still to
//! be told.
//!
//! Nothing here decides about money or routing, and no call waits for it. A process that is alone keeps it in
//! `records.db` beside its ledger, in a file of its own so that the ledger's writer waits for none of it; a fleet keeps
//! it in its Postgres. Either keeps a bounded time of it.
//!
//! Each kind has a file of its own, with what is written and asked of it in both databases.

pub mod attempts;
mod beats;
mod file;
pub mod incidents;
pub mod minutes;
mod names;
pub mod notices;
mod pages;
mod probes;
pub mod recorder;
pub mod report;
pub mod request;
pub mod words;
pub mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rusqlite::Connection;

use crate::ledger::{LedgerError, Postgres};

pub use beats::BeatRow;
pub use probes::ProbeRow;

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
    /// It is read by another version than that which serves.
    #[error("the records' file has schema version {0}, this binary knows {1}: use the tollgate that serves")]
    OtherVersion(i64, i64),
}

impl RecordError {
    /// Whether the database answers and does not take what it was given: it never will.
    fn is_about_what_was_written(&self) -> bool {
        match self {
            Self::File(error) => error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation),
            Self::Fleet(LedgerError::Postgres(error)) => {
                // Data exceptions and violated constraints.
                error
                    .code()
                    .is_some_and(|code| ["22", "23"].iter().any(|class| code.code().starts_with(class)))
            }
            Self::Fleet(_) | Self::TooNew(..) | Self::OtherVersion(..) => false,
        }
    }
}

/// Where records are, whether or not they can be had now.
#[derive(Clone)]
pub enum Home {
    /// In the data folder of a process that is alone.
    Folder(PathBuf),
    /// In the database of a fleet. What is no money does not keep a process from leaving: see [`Postgres::for_people`].
    Fleet(Postgres),
}

impl Home {
    /// For writing.
    ///
    /// # Errors
    /// As [`Records::open`].
    pub fn open(&self) -> Result<Records, RecordError> {
        match self {
            Self::Folder(data) => Records::open(data),
            Self::Fleet(ledger) => Ok(Records::of_fleet(ledger.clone())),
        }
    }

    /// The process leaves: a database that does not answer is not waited for beyond then.
    pub fn end_at(&self, at: Instant) {
        match self {
            Self::Folder(_) => {}
            Self::Fleet(ledger) => ledger.end_at(at),
        }
    }

    /// For questions.
    ///
    /// # Errors
    /// As [`Records::open_for_reading`].
    pub fn open_for_reading(&self) -> Result<Records, RecordError> {
        match self {
            Self::Folder(data) => Records::open_for_reading(data),
            Self::Fleet(ledger) => Ok(Records::of_fleet(ledger.clone())),
        }
    }
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

    /// Nowhere for good, where there is no other place: what is kept goes with the process.
    ///
    /// # Errors
    /// [`RecordError`] when `SQLite` cannot begin.
    pub fn in_memory() -> Result<Self, RecordError> {
        Ok(Self(Place::File(Mutex::new(file::in_memory()?))))
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
