//! Only benches.
