//! The docs say what the code does.

use std::path::Path;

use tollgate::config;

fn repository(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

#[test]
fn every_config_in_conf_is_good() {
    let variables = |name: &str| Some(format!("value-of-{}", name.to_lowercase()));
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("conf")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "yaml") {
            let text = std::fs::read_to_string(&path).unwrap();
            // As on a machine where only the variables without a default are set.
            let required = |name: &str| variables(name).filter(|_| !text.contains(&format!("${{{name}:-")));
            config::parse(&text, required).unwrap_or_else(|e| panic!("{}:\n{e}", path.display()));
        }
    }
}

/// The part of a file of config that says how it is written.
fn as_written(file: &str) -> String {
    let meant = [
        "/// The three blocks, as they are meant.",
        "/// Where alarms go, beside the log.",
        "/// What the page shows.",
        "/// Where spans and metrics go.",
    ];
    let end = meant.iter().filter_map(|first| file.find(first)).min().unwrap_or(file.len());
    file.get(..end).unwrap().to_owned()
}

/// Every field of `config::raw` with its comment, word for word, in the annotated config.
#[test]
fn the_annotated_config_has_every_key_with_its_comment() {
    let files = ["raw", "records", "sentry", "status", "telemetry", "watch"];
    let raw = files.map(|file| as_written(&repository(&format!("src/config/{file}.rs")))).concat();
    let annotated = repository("conf/tollgate.yaml");
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let comments: String =
        annotated.lines().filter_map(|l| l.split_once('#').map(|(_, c)| c.trim().to_owned() + " ")).collect();
    let mut comment = String::new();
    let mut seen = 0;
    for line in raw.lines() {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("///") {
            comment.push_str(text);
            continue;
        }
        if let Some((name, _)) = line.strip_prefix("pub ").and_then(|l| l.split_once(':'))
            && !comment.is_empty()
            && !line.contains("fn ")
        {
            assert!(annotated.contains(&format!("{name}:")), "conf/tollgate.yaml lacks `{name}`");
            assert!(
                flat(&comments).contains(&flat(&comment)),
                "conf/tollgate.yaml lacks the comment of `{name}`:{comment}"
            );
            seen += 1;
        }
        if !line.starts_with("#[") {
            comment.clear();
        }
    }
    assert!(seen > 40, "only {seen} fields were found");
}

#[test]
fn the_readme_has_its_map_and_every_folder_in_it() {
    let readme = repository("README.md");
    for part in ["scripts/demo", "scripts/test", "## Map", "## Invariants", "## Glossary"] {
        assert!(readme.contains(part), "README.md lacks {part}");
    }
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let name = name.trim_end_matches(".rs");
        if !["lib", "main"].contains(&name) {
            assert!(readme.contains(&format!("`{name}`")), "README.md's map lacks `{name}`");
        }
    }
}

#[test]
fn no_registry_is_named_in_the_repository() {
    let out = std::process::Command::new("git")
        .args([
            "grep",
            "-lE",
            "crates\\.io|pypi\\.org|npmjs\\.(com|org)",
            "--",
            ".",
            ":!*Cargo.lock",
            ":!tests/it/docs.rs",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "", "host names of registries do not belong here");
}
