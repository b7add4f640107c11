//! What comes back from an upstream, piece by piece: events out of bytes, usage out of events.

pub mod coding;
pub mod sse;
pub mod usage;
