//! Writes the seeds of every target into a folder, for `scripts/fuzz`.

#![expect(clippy::expect_used, reason = "a tool of the tests")]

use std::path::PathBuf;

fn main() {
    let folder = PathBuf::from(std::env::args_os().nth(1).expect("a folder"));
    for target in fuzz_targets::TARGETS {
        let folder = folder.join(target.name);
        // Those of older cases are gone.
        let _none_there = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("the folder");
        for (number, seed) in fuzz_targets::seeds(target.name).iter().enumerate() {
            std::fs::write(folder.join(format!("{number:04}")), seed).expect("a seed");
        }
    }
}
