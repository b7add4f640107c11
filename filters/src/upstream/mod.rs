//! What is known about the other side: how well an endpoint does, how long it may take, whether it
//! may be asked at all. One machine per file; [`board`] holds them together for the edge.

pub mod backoff;
pub mod board;
pub mod breaker;
pub mod classify;
pub mod deadline;
pub mod failure;
pub mod fleet;
pub mod last_heard;
pub mod last_resort;
pub mod node_fault;
pub mod rest;
pub mod retry_budget;
pub mod sketch;
pub mod watchdog;
pub mod weight;
