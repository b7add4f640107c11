//! What nodes of a fleet have in common beside money.

pub mod catalogue;
pub mod health;
mod kept;
pub mod keys;
