//! The targets, and how they cut their input.

mod answer;
mod plain;
mod request;

pub(crate) use answer::{answer, fold, sse};
pub(crate) use plain::{auth, coding, config, error, journal, rest};
pub(crate) use request::{preferences, request};

/// Where the answer's targets end their settings and begin their bytes.
pub(crate) const ANSWER_SETTINGS: usize = 4;

/// Cuts bytes into pieces, differently for every seed. No piece is empty.
fn pieces(bytes: &[u8], seed: u8) -> Vec<&[u8]> {
    let mut left = bytes;
    let mut state = u32::from(seed).wrapping_mul(0x9e37_79b9) | 1;
    let mut pieces = vec![];
    while !left.is_empty() {
        // Numerical Recipes' generator: enough to cut by, and the same everywhere.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Mostly short ones, since it is in the middle of a token that a cut hurts.
        let longest = if state & 0x10_0000 == 0 { 5 } else { 90 };
        let at = (usize::from(state.to_be_bytes()[0]) % longest + 1).min(left.len());
        let (piece, rest) = left.split_at(at);
        pieces.push(piece);
        left = rest;
    }
    pieces
}
