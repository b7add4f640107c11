//! Plays cases from the field against a real gateway. Under construction in its own branch.

fn main() {}
