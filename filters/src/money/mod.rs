//! Money: integers, one rounding, double entry.
//!
//! The unit is the nano-dollar (1 USD = 10⁹) in an `i64`, which reaches 9.2 billion dollars.
//! Prices are pico-dollars per token, since $0.0375 per million tokens is no whole number of
//! nano-dollars per token. Sums run in `i128` and are rounded **once** per request, up to the next
//! nano-dollar: no use is free, the error stays below one nano-dollar per call, and a charge never
//! exceeds a hold that bounded it.
//!
//! Deliberately absent: floating point, and any conversion that could fail into zero.

#![deny(clippy::float_arithmetic, clippy::arithmetic_side_effects, clippy::as_conversions)]

pub mod amount;
pub mod cost;
pub mod price;
pub mod transfer;

pub use amount::Amount;
pub use cost::{CostError, cost};
pub use price::{PriceCard, PriceList, Rate, Tier};
pub use transfer::{LedgerAccount, Settlement, Transfer, TransferKind, settle};
