//! The servers that nodes of a fleet share, and nodes on them.

use std::time::{Duration, Instant};

use tokio::task::block_in_place;
use tollgate::ledger::port::AccountRow;
use tollgate::ledger::{Ledger as _, Postgres};

use super::gateway::{Gateway, Setup};
use super::{postgres, redis};

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);

/// A Redis and a database, for any number of nodes. A test that uses it needs a runtime with several threads.
pub struct Fleet {
    pub redis: redis::Server,
    pub database: postgres::Database,
}

impl Fleet {
    /// An empty fleet; its database is one in the server that tests share.
    pub async fn start() -> Self {
        Self { redis: redis::Server::start().await, database: block_in_place(postgres::database) }
    }

    /// The block `store:` of a node.
    pub fn store(&self) -> String {
        let (redis, postgres) = (self.redis.url(), &self.database.url);
        format!("path: ./data, redis: {{ urls: [\"{redis}\"] }}, postgres: {{ url: \"{postgres}\" }}")
    }

    /// A node of it, once it serves.
    pub fn node(&self, setup: Setup) -> Gateway {
        setup.store(&self.store()).start()
    }

    /// A ledger of our own on its database.
    pub fn ledger(&self) -> Postgres {
        self.database.ledger()
    }

    /// The account's row once `calls` of its calls are booked.
    pub fn account(&self, name: &str, calls: i64) -> AccountRow {
        let (began, mut ledger) = (Instant::now(), self.ledger());
        block_in_place(|| {
            loop {
                let rows = ledger.accounts().expect("accounts");
                let row = rows.into_iter().find(|row| row.name == name).expect("the account");
                if row.calls >= calls {
                    return row;
                }
                assert!(began.elapsed() < PATIENCE, "{} of {calls} calls are booked", row.calls);
                std::thread::sleep(LOOK);
            }
        })
    }

    /// Proves every law of the books.
    pub fn verify(&self) {
        block_in_place(|| self.ledger().verify()).expect("the books are right");
    }
}
