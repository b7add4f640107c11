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
        self.store_with(&format!("urls: [\"{}\"]", self.redis.url()))
    }

    /// The block `store:` of a node that reaches Redis by another way.
    pub fn store_with(&self, redis: &str) -> String {
        let postgres = &self.database.url;
        format!("path: ./data, redis: {{ {redis} }}, postgres: {{ url: \"{postgres}\" }}")
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
                let rows = ledger.accounts(None).expect("accounts");
                let row = rows.into_iter().find(|row| row.name == name).expect("the account");
                if row.calls >= calls {
                    return row;
                }
                assert!(began.elapsed() < PATIENCE, "{} of {calls} calls are booked", row.calls);
                std::thread::sleep(LOOK);
            }
        })
    }

    /// Waits until no open boot but these many is left, and nothing is frozen or leased to one that has ended.
    pub fn wait_until_tidy(&self, boots: usize) {
        let (began, ledger) = (Instant::now(), self.ledger());
        block_in_place(|| {
            loop {
                let live = ledger.live_boots().expect("boots").len();
                let frozen = self.database.sql("SELECT count(*) FROM lease WHERE state = 'frozen'");
                let left = self.database.sql(
                    "SELECT coalesce(sum(l.rest), 0) FROM lease l JOIN boot b ON b.id = l.boot
                     WHERE b.state <> 'live'",
                );
                if (live, frozen.as_str(), left.as_str()) == (boots, "0", "0") {
                    return;
                }
                assert!(
                    began.elapsed() < PATIENCE,
                    "{live} boots instead of {boots}, {frozen} frozen, {left} left by boots that are over"
                );
                std::thread::sleep(LOOK);
            }
        });
    }

    /// Proves every law of the books.
    pub fn verify(&self) {
        block_in_place(|| self.ledger().verify()).expect("the books are right");
    }
}
