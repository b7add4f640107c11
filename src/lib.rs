//! Tollgate: an edge gateway for AI model APIs, on Pingora.
//!
//! What waits lives here: Pingora, disk, clock, ports. Every decision is in the crate `filters`.
//! Dependencies run one way: `main → config → proxy → {pool, store, ledger, ops} → filters`.

pub mod admin;
pub mod books;
pub mod boot;
pub mod cli;
pub mod clock;
pub mod config;
pub mod credential;
pub mod digits;
pub mod drain;
pub mod edge;
pub mod entropy;
pub mod fleet;
pub mod front;
pub mod handover;
pub mod journal;
pub mod keeper;
pub mod ledger;
pub mod mock;
pub mod notice;
pub mod ops;
pub mod pool;
pub mod probe;
pub mod proxy;
pub mod record;
pub mod reload;
pub mod secret;
pub mod serve;
pub mod settings;
pub mod status;
pub mod store;
pub mod succession;
mod unsent;
pub mod watching;
