//! What is known about the other side: how well an endpoint does, how long it may take.

pub mod deadline;
pub mod failure;
pub mod weight;
