//! The ledger, read beside the running gateway.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tollgate::config::checked;
use tollgate::ledger::{Ledger as _, Postgres, Sqlite};
use tollgate::secret::Secret;

/// The books of one store.
#[derive(Clone, Debug)]
pub enum Books {
    Sqlite(PathBuf),
    /// By its URL.
    Postgres(String),
}

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
        Self::Sqlite(data.join("ledger.db"))
    }

    pub fn settlements(&self) -> Result<Vec<Settlement>, String> {
        let file = match self {
            Self::Sqlite(file) => file,
            Self::Postgres(url) => return settlements_in_postgres(url),
        };
        let read = || -> rusqlite::Result<Vec<Settlement>> {
            let connection = open(file)?;
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
        let file = match self {
            Self::Sqlite(file) => file,
            Self::Postgres(url) => {
                let sql = "SELECT a.name, b.posted FROM balance b JOIN account a ON a.id = b.account";
                return Ok(query(url, sql)?.iter().map(|row| (row.get(0), row.get(1))).collect());
            }
        };
        let read = || -> rusqlite::Result<BTreeMap<String, i64>> {
            let connection = open(file)?;
            let mut query = connection
                .prepare("SELECT a.name, b.posted FROM balance b JOIN account a ON a.id = b.account")?;
            let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect()
        };
        read().map_err(|e| format!("the ledger cannot be read: {e}"))
    }

    /// Every law of the books; `Err` names the first that is broken.
    pub fn verify(&self) -> Result<(), String> {
        match self {
            Self::Sqlite(file) => {
                let mut ledger = Sqlite::open_for_reading(file).map_err(|e| e.to_string())?;
                ledger.verify().map(|_| ()).map_err(|e| e.to_string())
            }
            Self::Postgres(url) => {
                let url = Secret::new(url.clone());
                let config = checked::Postgres { url, ca_file: None, connections_max: 2 };
                let mut ledger = Postgres::new(&config).map_err(|e| e.to_string())?;
                let verify = move || ledger.verify().map(|_| ()).map_err(|e| e.to_string());
                std::thread::spawn(verify).join().unwrap_or_else(|_| Err("the proof broke".to_owned()))
            }
        }
    }
}

fn open(file: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    connection.busy_timeout(Duration::from_secs(5))?;
    Ok(connection)
}

fn settlements_in_postgres(url: &str) -> Result<Vec<Settlement>, String> {
    let sql = "SELECT upper(encode(s.hold, 'hex')), a.name, s.request, s.model, s.held, s.captured, s.excess,
                      s.shortfall, s.tokens, s.estimated, s.anomaly
               FROM settlement s JOIN account a ON a.id = s.account ORDER BY s.at_ms, s.hold";
    let settlement = |row: &tokio_postgres::Row| Settlement {
        hold: row.get(0),
        account: row.get(1),
        request: row.get(2),
        model: row.get(3),
        held: row.get(4),
        captured: row.get(5),
        excess: row.get(6),
        shortfall: row.get(7),
        tokens: row.get(8),
        estimated: row.get(9),
        anomaly: row.get(10),
    };
    Ok(query(url, sql)?.iter().map(settlement).collect())
}

/// On a thread of its own: the caller may be in a runtime.
fn query(url: &str, sql: &'static str) -> Result<Vec<tokio_postgres::Row>, String> {
    let url = url.to_owned();
    let asked = std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        let rows: Result<_, tokio_postgres::Error> = runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            client.query(sql, &[]).await
        });
        rows.map_err(|e| format!("the ledger cannot be read: {e}"))
    });
    asked.join().unwrap_or_else(|_| Err("the ledger cannot be read".to_owned()))
}
