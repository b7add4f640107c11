//! A request's way through Pingora, one file per phase.
//!
//! `gateway` is the table of contents: each of Pingora's callbacks is two or three lines that call a
//! room. `request` walks a call from the door to its hold, `peer` picks whom to ask, `gate` stands
//! between Pingora and the caller's session, `finish` settles and records, `reply` is the one door
//! through which an error becomes HTTP, `listing` says which models there are.

mod admit;
mod bodies;
mod choices;
mod ctx;
mod decision;
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
mod warm;

pub use bodies::Bodies;
pub use ctx::Ctx;
pub(crate) use gate::failure_of;
pub use gateway::Gateway;
pub(crate) use headers::upstream as upstream_head;
pub use keyed::KeyedCalls;
pub use reply::unreadable;
pub use warm::Warmer;
