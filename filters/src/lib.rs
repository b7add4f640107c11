//! Tollgate's decisions.
//!
//! Everything a request needs decided is decided here: what it asks for, whom to ask next, what it
//! may cost at most, what it did cost, when an answer counts as one. Each module is a room in the
//! straight line that a request walks (README, "Map").
//!
//! Deliberately absent: `async`, sockets, stores, a clock and a source of randomness. `now` and
//! the random generator come in as arguments, so that a test or a simulation can replay any run.
//! `filters/Cargo.toml` names no crate that could bring them in; `tests/it/wall.rs` checks that.

#![deny(missing_docs)]
#![deny(clippy::indexing_slicing, clippy::expect_used, clippy::wildcard_enum_match_arm)]
#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        clippy::let_underscore_must_use,
        clippy::string_slice,
        let_underscore_drop,
        reason = "a test may begin at any instant, throw a result away and cut its own ASCII"
    )
)]

pub mod answer;
pub mod attempt;
pub mod auth;
pub mod dialect;
pub mod exhausted;
pub mod explain;
pub mod facts;
pub mod heartbeat;
pub mod hold;
pub mod ids;
pub mod json;
pub mod limit;
pub mod low_balance;
pub mod meter;
pub mod money;
pub mod notice;
pub mod preferences;
pub mod probe;
pub mod purse;
pub mod report;
pub mod route;
pub mod slo;
pub mod status;
pub mod stream;
pub mod trace;
pub mod upstream;
pub mod verdict;
