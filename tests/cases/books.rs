//! The ledger, read beside the running gateway.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tollgate::ledger::{Ledger as _, Sqlite};

/// The books of one store.
#[derive(Clone, Debug)]
pub struct Books(PathBuf);

/// How one hold ended.
#[derive(Clone, Debug, Default)]
pub struct Settlement {
    pub hold: String,
    pub account: String,
    pub request: String,
    pub model: String,
    pub held: i64,
    pub captured: i64,
    pub excess: i64,
    pub shortfall: i64,
    /// input, cache read, cache write 5 min and 1 h, audio input, output, reasoning.
    pub tokens: Vec<i64>,
    pub estimated: bool,
    pub anomaly: bool,
}

impl Settlement {
    pub fn charged(&self) -> i64 {
        self.captured + self.excess
    }

    /// The sum of some kinds of tokens.
    pub fn tokens(&self, kinds: std::ops::Range<usize>) -> i64 {
        self.tokens.get(kinds).unwrap_or_default().iter().sum()
    }
}

impl Books {
    pub fn of(data: &Path) -> Self {
        Self(data.join("ledger.db"))
    }

    fn open(&self) -> rusqlite::Result<Connection> {
        let connection = Connection::open_with_flags(&self.0, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        connection.busy_timeout(Duration::from_secs(5))?;
        Ok(connection)
    }

    pub fn settlements(&self) -> Result<Vec<Settlement>, String> {
        let read = || -> rusqlite::Result<Vec<Settlement>> {
            let connection = self.open()?;
            let mut query = connection.prepare(
                "SELECT hex(s.hold), a.name, s.request, s.model, s.held, s.captured, s.excess, s.shortfall,
                        s.tokens, s.estimated, s.anomaly
                 FROM settlement s JOIN account a ON a.id = s.account ORDER BY s.at_ms, s.hold",
            )?;
            let rows = query.query_map([], |row| {
                let tokens: String = row.get(8)?;
                Ok(Settlement {
                    hold: row.get(0)?,
                    account: row.get(1)?,
                    request: row.get(2)?,
                    model: row.get(3)?,
                    held: row.get(4)?,
                    captured: row.get(5)?,
                    excess: row.get(6)?,
                    shortfall: row.get(7)?,
                    tokens: serde_json::from_str(&tokens).unwrap_or_default(),
                    estimated: row.get(9)?,
                    anomaly: row.get(10)?,
                })
            })?;
            rows.collect()
        };
        read().map_err(|e| format!("the ledger cannot be read: {e}"))
    }

    /// Balances in nano-dollars, by account.
    pub fn balances(&self) -> Result<BTreeMap<String, i64>, String> {
        let read = || -> rusqlite::Result<BTreeMap<String, i64>> {
            let connection = self.open()?;
            let mut query = connection
                .prepare("SELECT a.name, b.posted FROM balance b JOIN account a ON a.id = b.account")?;
            let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect()
        };
        read().map_err(|e| format!("the ledger cannot be read: {e}"))
    }

    /// Every law of the books; `Err` names the first that is broken.
    pub fn verify(&self) -> Result<(), String> {
        let mut ledger = Sqlite::open_for_reading(&self.0).map_err(|e| e.to_string())?;
        ledger.verify().map(|_| ()).map_err(|e| e.to_string())
    }
}
