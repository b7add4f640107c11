//! A runbook is true: every alert has one, every one has its shape, and nothing in it is made up.
//!
//! What a page names in code is looked up where it is defined: verbs and flags in the command line's own definition,
//! metrics in docs/metrics.md, scripts and files in the tree, keys of the config in conf/tollgate.yaml, paths of the admin
//! port and lines of the log in the source.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::CommandFactory as _;
use clap::error::ErrorKind;
use regex::Regex;
use tollgate::cli::Cli;
use tollgate::notice::Kind;
use tollgate::ops::tracker::KINDS;

/// The parts of every page, in this order.
const SHAPE: [&str; 5] =
    ["## Symptom", "## What callers see", "## First five minutes", "## Verify", "## Undo"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: impl AsRef<Path>) -> String {
    let file = root().join(file);
    std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}

/// All pages but the index, by their names.
fn pages() -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(root().join("docs/runbooks")).unwrap();
    let files = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    files
        .filter(|name| name != "README.md")
        .map(|name| (name.clone(), read(format!("docs/runbooks/{name}"))))
        .collect()
}

fn index() -> String {
    read("docs/runbooks/README.md")
}

fn found<'a>(pattern: &str, text: &'a str) -> Vec<&'a str> {
    let pattern = Regex::new(pattern).unwrap();
    pattern
        .captures_iter(text)
        .map(|found| found.get(1).unwrap_or_else(|| found.get(0).unwrap()).as_str())
        .collect()
}

/// Alerts and the pages that they link to.
fn alerts() -> Vec<(String, String)> {
    let rules = read("conf/prometheus/rules.yml");
    let mut alerts: Vec<(String, String)> = vec![];
    for line in rules.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("- alert: ") {
            alerts.push((name.to_owned(), String::new()));
        }
        if let Some(page) = line.strip_prefix("runbook_url: docs/runbooks/") {
            page.clone_into(&mut alerts.last_mut().unwrap().1);
        }
    }
    assert!(alerts.len() > 20, "{alerts:?}");
    alerts
}

/// The commands of a page's fenced blocks, a line each.
fn fenced(page: &str) -> Vec<&str> {
    let mut lines = vec![];
    let mut is_in = false;
    for line in page.lines().map(str::trim) {
        match line.strip_prefix("```") {
            Some(_) => is_in = !is_in,
            None if is_in => lines.push(line),
            None => {}
        }
    }
    lines
}

/// What stands between single backticks.
fn inline(page: &str) -> Vec<String> {
    let mut prose = String::new();
    let mut is_in = false;
    for line in page.lines() {
        if line.trim().starts_with("```") {
            is_in = !is_in;
        } else if !is_in {
            prose.push_str(line.trim());
            prose.push(' ');
        }
    }
    found("`([^`]+)`", &prose).into_iter().map(str::to_owned).collect()
}

/// All code of a page.
fn code(page: &str) -> Vec<String> {
    fenced(page).into_iter().map(str::to_owned).chain(inline(page)).collect()
}

#[test]
fn every_alert_has_its_page_and_every_page_its_alert() {
    let pages = pages();
    let mut with_alert = BTreeSet::new();
    for (alert, page) in alerts() {
        let text =
            pages.get(&page).unwrap_or_else(|| panic!("{alert} links to `{page}`, which is not there"));
        let line = text.lines().nth(2).unwrap_or_default();
        assert!(line.starts_with("**Alert:**") && line.contains(&format!("`{alert}`")), "{page}: {line}");
        with_alert.insert(page);
    }
    let index = index();
    let (_, without) = index.split_once("## Failures without an alert").unwrap();
    for (name, text) in &pages {
        let is_listed = without.contains(&format!("({name})"));
        assert_ne!(
            with_alert.contains(name),
            is_listed,
            "{name}: has an alert, or is listed as a failure without one"
        );
        let line = text.lines().nth(2).unwrap_or_default();
        for alert in found("`([A-Z][A-Za-z]+)`", line) {
            assert!(
                alerts().contains(&(alert.to_owned(), name.clone())),
                "{name}: no such alert here: {alert}"
            );
        }
        assert_eq!(line.starts_with("**Alert:** none"), is_listed, "{name}: {line}");
    }
}

#[test]
fn every_page_names_its_notification_and_every_notification_has_a_page() {
    let table = read("docs/notifications.md");
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let kinds: BTreeSet<&str> =
        rows.flat_map(|row| found("`([a-z_]+)`", row.split(" | ").next().unwrap())).collect();
    let all: BTreeSet<&str> = Kind::ALL.iter().map(|kind| kind.word()).collect();
    assert_eq!(kinds, all, "docs/notifications.md, and `notice::Kind`");
    let pages = pages();
    let mut seen = BTreeSet::new();
    for (name, text) in &pages {
        let line = text.lines().nth(4).unwrap_or_default();
        assert!(line.starts_with("**Notification:** "), "{name}: {line}");
        let named = found("`([a-z_]+)`", line);
        assert!(!named.is_empty() || line.contains("none"), "{name}: {line}");
        for kind in named {
            assert!(all.contains(kind), "{name}: there is no notification `{kind}`");
            seen.insert(kind);
        }
    }
    assert_eq!(seen, all, "each is somebody's");
}

#[test]
fn whoever_opens_an_incident_is_told_to_close_it() {
    let mut seen = 0;
    for (name, text) in pages() {
        let (before, undo) = text.split_once("\n## Undo\n").unwrap();
        if before.contains("tollgate incidents open --title") {
            seen += 1;
            assert!(undo.contains("tollgate incidents close 7"), "{name}");
        }
    }
    assert!(seen > 5, "{seen}");
}

#[test]
fn every_page_has_the_shape_and_is_in_the_index() {
    let index = index();
    for (name, text) in pages() {
        let mut rest = text.as_str();
        assert!(rest.starts_with("# "), "{name} has no title");
        for part in SHAPE {
            let (_, after) = rest
                .split_once(&format!("\n{part}\n"))
                .unwrap_or_else(|| panic!("{name} lacks, in order, {part}"));
            let body = after.split("\n## ").next().unwrap();
            assert!(body.trim().len() > 10, "{name}: {part} is empty");
            rest = after;
        }
        let by_symptom = index.split("## Failures without an alert").next().unwrap();
        assert!(by_symptom.contains(&format!("({name})")), "the index lacks {name}");
    }
}

#[test]
fn every_link_leads_somewhere() {
    for (name, text) in pages().into_iter().chain([("README.md".to_owned(), index())]) {
        for link in found(r"\]\(([^)#]+)[^)]*\)", &text) {
            assert!(root().join("docs/runbooks").join(link).exists(), "{name}: {link}");
        }
    }
}

/// The words of a command of ours in a line of shell, where there is one.
fn commands(line: &str) -> Vec<Vec<String>> {
    let line = line.split(" # ").next().unwrap();
    let mut commands = vec![vec![]];
    let mut word = String::new();
    let mut quote = None;
    for letter in line.chars().chain([' ']) {
        match (quote, letter) {
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), _) if open == letter => quote = None,
            (None, '|' | ';' | '&' | '>' | '<' | ' ') => {
                if !word.is_empty() {
                    commands.last_mut().unwrap().push(std::mem::take(&mut word));
                }
                if letter != ' ' {
                    commands.push(vec![]);
                }
            }
            _ => word.push(letter),
        }
    }
    commands.retain(|words| words.first().is_some_and(|first| first == "tollgate"));
    commands.into_iter().map(|words: Vec<String>| words[1..].to_vec()).collect()
}

#[test]
fn every_command_is_one_that_the_binary_takes() {
    let mut seen = 0;
    for (name, text) in pages().into_iter().chain([("README.md".to_owned(), index())]) {
        for words in code(&text).iter().flat_map(|line| commands(line)) {
            seen += 1;
            let parsed = Cli::command().no_binary_name(true).try_get_matches_from(&words);
            if let Err(error) = parsed {
                // A verb may be named without what it needs, and a number or a time may be a word in capitals.
                let is_mention = matches!(
                    error.kind(),
                    ErrorKind::MissingRequiredArgument
                        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                        | ErrorKind::MissingSubcommand
                );
                assert!(is_mention, "{name}: tollgate {}: {error}", words.join(" "));
            }
        }
    }
    assert!(seen > 40, "{seen}");
}

#[test]
fn every_metric_is_in_the_reference() {
    let reference = read("docs/metrics.md") + &read("conf/prometheus/rules.yml");
    let known: BTreeSet<&str> = found(r"tollgate[a-z_:0-9]+", &reference).into_iter().collect();
    for (name, text) in pages().into_iter().chain([("README.md".to_owned(), index())]) {
        for line in code(&text) {
            let mut metrics: Vec<String> =
                found(r"tollgate_[a-z_0-9]+", &line).into_iter().map(str::to_owned).collect();
            // `^tollgate_(a|b)_(sum|count)`
            for group in found(r"tollgate_\(([a-z_|]+)\)", &line) {
                metrics.extend(group.split('|').map(|part| format!("tollgate_{part}")));
            }
            for metric in metrics.iter().map(|metric| metric.trim_end_matches('_')) {
                let is_prefix =
                    line.contains(&format!("^{metric}")) && known.iter().any(|one| one.starts_with(metric));
                assert!(known.contains(metric) || is_prefix, "{name}: no such metric: {metric}");
            }
        }
    }
}

#[test]
fn every_script_file_path_and_key_exists() {
    let sources = sources(&["src"]);
    let config = read("conf/tollgate.yaml");
    let has_key = |key: &str| {
        config.lines().any(|line| {
            let line = line.trim_start_matches([' ', '#', '-', '{']);
            line.starts_with(&format!("{key}:"))
        }) || config.contains(&format!(" {key}: "))
    };
    let blocks = [
        "listen",
        "store",
        "bounds",
        "routing",
        "drain",
        "providers",
        "models",
        "aliases",
        "bootstrap",
        "sentry",
    ];
    let mut seen = [0; 4];
    for (name, text) in pages().into_iter().chain([("README.md".to_owned(), index())]) {
        for line in code(&text) {
            for file in found(r"(?:^|[ (])((?:scripts|conf|docs|tests|src)/[A-Za-z0-9_./-]+)", &line) {
                seen[0] += 1;
                assert!(root().join(file).exists(), "{name}: {file}");
            }
            for path in found(r"\$ADMIN(/[a-z./-]+)", &line) {
                seen[1] += 1;
                assert!(
                    sources.contains(&format!(".route(\"{path}\"")),
                    "{name}: the admin port has no {path}"
                );
            }
            for (word, breach) in found(r"breach=[a-z_]+", &line).iter().filter_map(|it| it.split_once('=')) {
                seen[2] += 1;
                let is_known = breach == "panic" || KINDS.iter().any(|(kind, _)| *kind == breach);
                assert!(is_known, "{name}: {word}={breach}");
            }
        }
        for span in inline(&text) {
            let keys: Vec<&str> = span.split('.').collect();
            let is_path = keys.len() > 1 && blocks.contains(&keys[0]);
            let is_key = !found("^[a-z_]+:(?: [a-z_]+)?$", &span).is_empty();
            if is_path || is_key {
                seen[3] += 1;
                let keys = if is_path { keys } else { vec![span.split(':').next().unwrap()] };
                // `NAME` stands for a provider or a model of yours.
                for key in keys.iter().filter(|key| **key != "NAME") {
                    assert!(has_key(key), "{name}: the config has no `{span}`");
                }
            }
        }
    }
    assert!(seen.iter().all(|seen| *seen > 2), "{seen:?}");
}

#[test]
fn every_line_of_the_log_is_one_that_is_written() {
    let sources = sources(&["src", "filters/src"]);
    let joined = Regex::new(r"\\\n\s*").unwrap().replace_all(&sources, "").into_owned();
    let mut seen = 0;
    for (name, text) in pages() {
        for span in inline(&text).iter().filter(|span| span.split(' ').count() > 3) {
            let is_command = ["curl", "tollgate", "journalctl", "psql", "redis-cli", "kill", "systemctl"]
                .iter()
                .any(|program| span.starts_with(program));
            if is_command {
                continue;
            }
            seen += 1;
            // What is filled in differs: the longest part that is not.
            let part = span.split(" N").next().unwrap().rsplit("log: ").next().unwrap();
            assert!(joined.contains(part), "{name}: nobody writes `{part}`");
        }
    }
    assert!(seen > 20, "{seen}");
}

#[test]
fn every_kind_of_breach_is_told_what_to_do_about_and_every_line_has_a_known_one() {
    let page = read("docs/runbooks/invariant.md");
    let sources = sources(&["src"]);
    let written: BTreeSet<&str> = found("breach = \"([a-z_]+)\"", &sources).into_iter().collect();
    let known: BTreeSet<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(written, known, "the lines that say `breach`, and `ops::tracker::KINDS`");
    for kind in known {
        assert!(
            page.contains(&format!("`breach={kind}`")),
            "invariant.md does not say what to do about {kind}"
        );
    }
}

/// Everything that is written in Rust below these folders.
fn sources(folders: &[&str]) -> String {
    let mut text = String::new();
    for folder in folders {
        add_sources(&root().join(folder), &mut text);
    }
    text
}

fn add_sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_sources(&path, text);
        } else if path.extension().is_some_and(|it| it == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}
