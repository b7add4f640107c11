//! The books: who has how much, and why.
//!
//! Double entry, append only. The ledger is the authority on every balance; the hot store spends
//! only what the ledger has leased to it before. Nothing here is on the request path: postings come
//! in batches from the journal, by a thread of their own.

pub mod port;
pub mod postgres;
pub mod sqlite;
mod stored;
pub mod worker;

pub use port::{Ledger, LedgerError};
pub use postgres::Postgres;
pub use sqlite::Sqlite;
