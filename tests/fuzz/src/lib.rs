//! What must hold for any bytes at all.
//!
//! A target is a plain function from bytes to nothing that panics when a promise is broken. Two call it:
//! `scripts/fuzz`, where libFuzzer looks for such bytes by what they reach, and `tests/replay.rs`, a normal
//! test without special flags, which replays the seeds (taken from the cases, so that they grow with them), each of
//! them bent a little in fixed ways, and every input that ever broke something (`found/`).
//!
//! Deliberately absent: sockets. What needs one is in `tests/it/hostile.rs` and in the cases.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "to panic is how a target says that a promise is broken"
)]

mod seeds;
mod targets;

pub use seeds::seeds;

/// One target.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, and that of its folder in `found/`.
    pub name: &'static str,
    /// Panics when a promise is broken.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 11] = [
    Target { name: "sse", run: targets::sse },
    Target { name: "answer", run: targets::answer },
    Target { name: "error", run: targets::error },
    Target { name: "request", run: targets::request },
    Target { name: "preferences", run: targets::preferences },
    Target { name: "auth", run: targets::auth },
    Target { name: "config", run: targets::config },
    Target { name: "coding", run: targets::coding },
    Target { name: "rest", run: targets::rest },
    Target { name: "journal", run: targets::journal },
    Target { name: "fold", run: targets::fold },
];

/// The target of that name.
#[must_use]
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
