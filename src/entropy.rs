//! The only source of randomness.

use std::cell::RefCell;

use data_encoding::HEXLOWER;
use filters::ids::HoldId;
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

use crate::clock;

thread_local! {
    // One generator a thread, seeded by the kernel: no lock and no system call per draw.
    static GENERATOR: RefCell<Pcg64Mcg> = RefCell::new(Pcg64Mcg::from_seed(seed()));
}

fn seed() -> [u8; 16] {
    let mut seed = [0; 16];
    if getrandom::fill(&mut seed).is_err() {
        // Before the kernel has entropy of its own (early boot), addresses and time must do.
        let place = std::ptr::from_ref(&seed).addr() as u128;
        seed = (place ^ (u128::from(clock::unix_ms().unsigned_abs()) << 64)).to_le_bytes();
    }
    seed
}

/// Draws with this thread's generator.
pub fn with_rng<T>(draw: impl FnOnce(&mut Pcg64Mcg) -> T) -> T {
    GENERATOR.with_borrow_mut(draw)
}

/// A new hold id: a UUIDv7, so that ids sort by time.
#[must_use]
pub fn hold_id() -> HoldId {
    HoldId(uuid().as_u128())
}

/// A new name for a life of the process: a UUIDv7 too.
#[must_use]
pub fn instance() -> String {
    uuid().to_string()
}

/// RFC 9562 §5.7.
fn uuid() -> uuid::Uuid {
    let millis = clock::unix_ms().unsigned_abs();
    let random = with_rng(|rng| {
        let mut bytes = [0; 10];
        rng.fill_bytes(&mut bytes);
        bytes
    });
    uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
}

/// A new number for a boot of a fleet, which no other has: milliseconds since 1970, and twenty random bits.
#[must_use]
pub fn boot() -> i64 {
    let random = with_rng(|rng| i64::from(rng.next_u32() >> 12));
    (clock::unix_ms() << 20) | random
}

/// The length of a request id of ours, in bytes.
pub const REQUEST_ID_BYTES: usize = 36;

/// A new request id: milliseconds since 1970 in 12 hexadecimal digits, and 20 random ones. Like holds they sort
/// by time, so that the ledger's index of them grows at its end and not all over.
#[must_use]
pub fn request_id() -> String {
    let millis = u128::from(clock::unix_ms().unsigned_abs());
    let random = with_rng(|rng| (u128::from(rng.next_u32() >> 16) << 64) | u128::from(rng.next_u64()));
    let mut id = String::with_capacity(REQUEST_ID_BYTES);
    id.push_str("req_");
    HEXLOWER.encode_append(&((millis << 80) | random).to_be_bytes(), &mut id);
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_requests_sort_by_time() {
        let (one, before) = (request_id(), clock::unix_ms());
        assert_eq!(one.len(), 36);
        let told = one.get(4..16).and_then(|hex| i64::from_str_radix(hex, 16).ok()).unwrap();
        assert!((before - told).abs() < 60_000, "{one}");
        assert_ne!(request_id(), one);
    }
}
