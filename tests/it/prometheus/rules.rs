//! The rules, as promtool judges them, and what every alert has to have.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use regex::Regex;

use super::server::repository;

/// Prometheus makes it.
const ELSEWHERE: [&str; 1] = ["up"];

/// An alert as it is written.
struct Alert {
    name: String,
    text: String,
}

#[test]
fn promtool_takes_the_config_and_the_rules() {
    let (ok, said) = promtool(&["check", "config", "prometheus.yml"]);
    assert!(ok, "{said}");
}

#[test]
fn every_alert_fires_when_it_should_and_not_when_it_should_not() {
    let (ok, said) = promtool(&["test", "rules", "rules_test.yml", "rules_days_test.yml"]);
    assert!(ok, "{said}");
}

#[test]
fn every_alert_is_seen_to_fire_in_the_tests_of_the_rules() {
    let cases =
        repository("conf/prometheus/rules_test.yml") + &repository("conf/prometheus/rules_days_test.yml");
    for alert in alerts() {
        let fires = format!("{{alertname=\"{}\"}}", alert.name);
        assert!(cases.contains(&fires), "no case in which {} fires", alert.name);
    }
}

#[test]
fn every_alert_says_how_bad_it_is_what_it_is_and_where_its_runbook_is() {
    let runbook = Regex::new(r"runbook_url: docs/runbooks/[a-z-]+\.md\n").unwrap();
    let severity = Regex::new(r"severity: (page|ticket) ").unwrap();
    let mut names = BTreeSet::new();
    for Alert { name, text } in alerts() {
        assert!(runbook.is_match(&text) && severity.is_match(&text) && text.contains("summary: "), "{text}");
        assert!(names.insert(name.clone()), "{name} is there twice");
    }
    assert!(names.len() > 30, "{names:?}");
}

#[test]
fn the_rules_read_only_metrics_that_there_are() {
    let reference = repository("docs/metrics.md");
    let rules = repository("conf/prometheus/rules.yml");
    let recorded: BTreeSet<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).collect();
    let names = Regex::new(r"\b(tollgate[_:][a-zA-Z0-9_:]+|gen_ai_[a-z_]+)").unwrap();
    for line in rules.lines().filter(|line| !line.trim_start().starts_with(['#', '-'])) {
        for found in names.find_iter(line).map(|found| found.as_str()) {
            let base =
                ["_bucket", "_sum", "_count"].iter().find_map(|end| found.strip_suffix(end)).unwrap_or(found);
            let known = [found, base].iter().any(|name| reference.contains(&format!("| `{name}` |")));
            assert!(known || recorded.contains(found) || ELSEWHERE.contains(&found), "{found}: {line}");
        }
    }
}

/// As they stand in the file.
fn alerts() -> Vec<Alert> {
    let rules = repository("conf/prometheus/rules.yml");
    let written = rules.split("      - alert: ").skip(1).map(|text| {
        let text = text.split("\n      - ").next().unwrap().to_owned() + "\n";
        Alert { name: text.lines().next().unwrap().to_owned(), text }
    });
    written.collect()
}

fn promtool(args: &[&str]) -> (bool, String) {
    let ran = Command::new("promtool")
        .args(args)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("conf/prometheus"))
        .output()
        .expect("Debian's package `prometheus`: scripts/setup test");
    (
        ran.status.success(),
        [ran.stdout, ran.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat(),
    )
}
