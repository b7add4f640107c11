//! The wall between decisions and edges: `filters` cannot wait, because it has nothing to wait with.

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn filters_compile_without_anything_that_waits() {
    let out = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "-p", "tollgate-filters", "-e", "normal,build", "--prefix", "none"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let tree = String::from_utf8(out.stdout).unwrap();
    assert!(tree.contains("serde_json"), "the tree is there: {tree}");
    for banned in [
        "tokio",
        "pingora",
        "redis",
        "postgres",
        "rusqlite",
        "hyper",
        "mio",
        "async-trait",
        "futures",
        "getrandom",
    ] {
        assert!(!tree.lines().any(|line| line.starts_with(banned)), "{banned} in\n{tree}");
    }
}

#[test]
fn filters_ask_no_clock_and_wait_for_nothing() {
    for file in rust_files(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/filters/src"))) {
        let text = std::fs::read_to_string(&file).unwrap();
        let code =
            if is_for_tests_only(&file) { "" } else { text.split("#[cfg(test)]\nmod tests").next().unwrap() };
        for banned in
            ["Instant::now", "SystemTime", "async fn", ".await", "std::net", "std::fs", "std::thread"]
        {
            assert!(!code.contains(banned), "{banned} in {}", file.display());
        }
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    for folder in ["src", "filters/src", "tests/it"] {
        for file in rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)) {
            let text = std::fs::read_to_string(&file).unwrap();
            assert!(text.starts_with("//! "), "{} does not open with `//!`", file.display());
        }
    }
}

#[test]
fn pingoras_hidden_traits_are_named_in_one_file() {
    for file in rust_files(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))) {
        let text = std::fs::read_to_string(&file).unwrap();
        let names_them = text.contains("protocols::http::custom");
        assert!(!names_them || file.ends_with("proxy/gate.rs"), "{}", file.display());
    }
}

/// Whether `file` is the `tests.rs` of a module that compiles it for tests alone.
fn is_for_tests_only(file: &Path) -> bool {
    let only_then = format!("#[cfg(test)]\nmod {};", file.file_stem().unwrap().display());
    std::fs::read_to_string(file.parent().unwrap().with_extension("rs"))
        .is_ok_and(|parent| parent.contains(&only_then))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = vec![];
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    files
}
