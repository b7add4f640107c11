//! Hands the linker the order in which a release build's code lies (`order.ld`, by `scripts/order`; `scripts/dist` has
//! one of its own).
//!
//! Code comes from disk in pieces of 64 KiB around each function that is called: with what a start and the first
//! calls run side by side, half of the pieces is enough (`docs/performance.md`).

use std::env;

fn main() {
    println!("cargo::rerun-if-env-changed=TOLLGATE_ORDER");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    if is("PROFILE", "release") && is("CARGO_CFG_TARGET_OS", "linux") {
        let ours = concat!(env!("CARGO_MANIFEST_DIR"), "/order.ld");
        let script = env::var("TOLLGATE_ORDER").unwrap_or_else(|_| ours.to_owned());
        println!("cargo::rerun-if-changed={script}");
        println!("cargo::rustc-link-arg-bin=tollgate=-Wl,-T,{script}");
    }
}
