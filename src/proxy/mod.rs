//! A request's way, one file per phase.
//!
//! `app` is the table of contents: each step is a few lines that call a room. `request` walks a call from the door to
//! its hold, `peer` picks whom to ask, `exchange` asks and passes the answer on, `gate` stands between the answer and the
//! caller until it is the caller's, `finish` settles and records, `reply` is the one door through which an error
//! becomes HTTP, `listing` says which models there are.

mod admit;
mod app;
mod bodies;
mod choices;
mod ctx;
mod decision;
mod exchange;
mod finish;
mod gate;
mod gateway;
mod headers;
mod keyed;
mod listing;
mod measure;
mod own;
mod page;
mod peer;
mod reply;
mod request;
mod spans;
mod surface;
mod unseen;
mod warm;

pub use app::App;
pub use bodies::Bodies;
pub use gateway::Gateway;
pub(crate) use headers::{Request as UpstreamRequest, upstream as upstream_head};
pub use keyed::KeyedCalls;
pub use reply::unreadable;
pub(crate) use unseen::failure_of;
pub use warm::Warmer;
