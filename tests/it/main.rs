//! Promises of the gateway, kept over real sockets by a real process.
//!
//! Every module is named by what it promises. Tests start what they need on free loopback ports and
//! stop it; nothing waits by sleeping for "long enough".

#![expect(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test ends at the first surprise, tells the time and reports figures"
)]

mod anthropic;
mod attempts;
mod bodies;
mod books;
mod callers;
mod disk;
mod docs;
mod edge;
mod errors;
mod exchange;
mod fleet;
mod fleet_catalogue;
mod fleet_keys;
mod fold;
mod health;
mod heartbeats;
mod holds;
mod hostile;
mod kills;
mod ledger;
mod lifecycle;
mod limits;
mod metrics;
mod money;
mod notifications;
mod operators;
mod outages;
mod preferences;
mod probes;
mod prometheus;
mod readings;
mod records;
mod reload;
mod repeats;
mod routing;
mod runbooks;
mod secrets;
mod simulation;
mod status;
mod streams;
mod support;
mod surfaces;
mod telemetry;
mod tracker;
mod upgrade;
mod upstreams;
mod wall;
