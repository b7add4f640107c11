//! Every seed, every seed bent a little, and every input that ever broke something, through its target: what
//! `scripts/fuzz` promises for a minute on end, for a moment and always alike.

#![expect(clippy::expect_used, clippy::panic, reason = "a test ends at the first surprise")]

use std::fmt::Write as _;
use std::panic::catch_unwind;
use std::path::Path;

use fuzz_targets::{TARGETS, Target, seeds, target};

/// How often each seed is bent.
const BENT: u32 = 24;

#[test]
fn every_seed_keeps_every_promise() {
    for one in TARGETS {
        let seeds = seeds(one.name);
        assert!(!seeds.is_empty(), "{} has no seeds", one.name);
        for seed in &seeds {
            run(one, seed);
        }
    }
}

#[test]
fn every_seed_bent_a_little_keeps_every_promise() {
    for one in TARGETS {
        let seeds = seeds(one.name);
        for (at, seed) in seeds.iter().enumerate() {
            let other = &seeds[(at + 7) % seeds.len()];
            for turn in 0..BENT {
                run(one, &bent(seed, other, turn));
            }
        }
    }
}

#[test]
fn what_broke_a_promise_once_does_not_break_it_again() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("found");
    for entry in std::fs::read_dir(&folder).expect("the folder") {
        let folder = entry.expect("an entry").path();
        let name = folder.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        let one = target(&name).unwrap_or_else(|| panic!("{name} is no target"));
        for entry in std::fs::read_dir(&folder).expect("the folder") {
            run(one, &std::fs::read(entry.expect("an entry").path()).expect("an input"));
        }
    }
}

fn run(target: Target, input: &[u8]) {
    if catch_unwind(|| (target.run)(input)).is_err() {
        let escaped = input.iter().fold(String::new(), |mut all, byte| {
            let _infallible = write!(all, "{}", byte.escape_ascii());
            all
        });
        panic!("{} does not keep its promise for \"{escaped}\"", target.name);
    }
}

/// A seed with a byte changed, a piece cut out, doubled or moved, or the end of another seed.
fn bent(seed: &[u8], other: &[u8], turn: u32) -> Vec<u8> {
    let length = u32::try_from(seed.len()).expect("a seed is short");
    let mut state = turn.wrapping_mul(2_654_435_761).wrapping_add(length);
    let mut place = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        usize::try_from(state >> 8).expect("a word") % below.max(1)
    };
    let mut bent = seed.to_vec();
    let (a, b) = (place(seed.len()), place(seed.len()));
    let (from, to) = (a.min(b), a.max(b));
    match turn % 6 {
        0 if !bent.is_empty() => bent[a] ^= 1 << (turn % 8),
        1 => bent.truncate(a),
        2 => drop(bent.drain(from..to.min(from + 9))),
        3 => bent.splice(from..from, seed[from..to.min(from + 60)].to_vec()).for_each(drop),
        4 => bent.splice(a.., other.get(place(other.len())..).unwrap_or_default().to_vec()).for_each(drop),
        _ => bent.insert(a, b"\"{}[],:\\\r\n\x00\xff0-e.tn"[place(18)]),
    }
    bent
}
