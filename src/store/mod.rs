//! The hot store: who may spend how much right now.

pub mod embedded;
pub mod fleet;
pub mod port;
pub mod redis;

pub use embedded::Embedded;
pub use port::{Admit, Charge, Deny, Holds, Ticket};
