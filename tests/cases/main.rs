//! Plays cases from the field: case files in the format of `tests/cases/README.md` against a real
//! gateway process each, on a fresh store.
//!
//! `scripts/cases` is the door for people. Run by `cargo test`, without `play`, it plays the repo's own
//! files; cases that wait for a feature are named in `pending.txt` there, and one of them that passes is
//! a failure too, so that the list can only shrink.

#![expect(unreachable_pub, reason = "a binary: `pub` says what a module offers to the others")]
#![expect(clippy::expect_used, reason = "a test bed that is wrong had better stop")]
#![expect(clippy::print_stderr, reason = "faults of the command line")]
#![expect(clippy::disallowed_methods, reason = "a test bed lives in real time and stops what it spawns")]

mod books;
mod case;
mod client;
mod config;
mod expect;
mod gateway;
mod h2wire;
mod infra;
mod play;
mod relay;
mod selfcheck;
mod slots;
mod sse;
mod stores;
mod upstream;
mod variants;
mod want;
mod wire;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use case::Case;
use expect::Failure;
use play::Outcome;
use variants::Plan;

const USAGE: &str = "usage: cases play [PATH…] [--filter TEXT] [--jobs N] [--json OUT] [--fleet] [--verbose]";
/// Cases that others reported, and ours of the same shape about stores.
const OWN: [&str; 2] = ["cases.jsonl", "fleet.jsonl"];
/// One run may take this long before it is given up.
const RUN_MAX: Duration = Duration::from_secs(150);

/// What to play and how to tell of it.
struct Args {
    paths: Vec<PathBuf>,
    filters: Vec<String>,
    jobs: usize,
    json: Option<PathBuf>,
    /// All cases on the fleet's store.
    fleet: bool,
    verbose: bool,
    /// Ids that may fail, and only these; with a `?` behind it, one that is a race and may pass as well.
    pending: BTreeSet<String>,
}

/// One case with all its runs.
struct Played {
    id: String,
    title: String,
    runs: Vec<(String, Outcome)>,
    took: Duration,
}

enum Verdict {
    Passed,
    Failed(String),
    Skipped(String),
}

fn main() -> ExitCode {
    let args = match args(std::env::args().skip(1).collect()) {
        Ok(Some(args)) => args,
        Ok(None) => return ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("cases: {why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.map_err(|e| e.to_string()).and_then(|runtime| runtime.block_on(play_all(&args))) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("cases: {why}");
            ExitCode::from(2)
        }
    }
}

/// `None`: nothing is to be played.
fn args(given: Vec<String>) -> Result<Option<Args>, String> {
    let own = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases"));
    let mut args = Args {
        paths: vec![],
        filters: vec![],
        jobs: 4,
        json: None,
        fleet: false,
        verbose: false,
        pending: BTreeSet::new(),
    };
    let mut given = given.into_iter().peekable();
    if given.next_if(|first| first == "play").is_none() {
        // Cargo's test runner: names to filter by, and flags of its own harness.
        if given.any(|arg| arg == "--list" || arg == "--ignored") {
            return Ok(None);
        }
        args.paths = OWN.map(|file| own.join(file)).to_vec();
        args.pending = std::fs::read_to_string(own.join("pending.txt"))
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .filter(|word| !word.starts_with('#'))
            .map(str::to_owned)
            .collect();
        return Ok(Some(args));
    }
    while let Some(arg) = given.next() {
        let mut value = |name: &str| given.next().ok_or_else(|| format!("{name} needs a value"));
        match arg.as_str() {
            "--filter" => args.filters.push(value("--filter")?),
            "--jobs" => args.jobs = value("--jobs")?.parse().map_err(|e| format!("--jobs: {e}"))?,
            "--json" => args.json = Some(value("--json")?.into()),
            "--fleet" => args.fleet = true,
            "--verbose" | "-v" => args.verbose = true,
            flag if flag.starts_with('-') => return Err(format!("{flag} is not known")),
            path => args.paths.push(path.into()),
        }
    }
    if args.paths.is_empty() {
        args.paths = OWN.map(|file| own.join(file)).to_vec();
    }
    args.jobs = args.jobs.max(1);
    Ok(Some(args))
}

/// Whether nothing failed.
async fn play_all(args: &Args) -> Result<bool, String> {
    selfcheck::all().await;
    let mut cases = vec![];
    for path in &args.paths {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        cases.extend(lines.map(str::to_owned).filter(|line| chosen(line, &args.filters)));
    }
    // What waits for the clock begins first.
    let mut order: Vec<usize> = (0..cases.len()).collect();
    order.sort_by_key(|index| !cases[*index].contains("\"clock\""));
    let jobs = Arc::new(Semaphore::new(args.jobs));
    let all = u32::try_from(args.jobs).unwrap_or(u32::MAX);
    let mut playing = JoinSet::new();
    for index in order {
        let (line, jobs, fleet) = (cases[index].clone(), Arc::clone(&jobs), args.fleet);
        playing.spawn(async move {
            // What is measured is not measured beside what this runner plays meanwhile.
            let places = if line.contains("\"latency_ms\"") { all } else { 1 };
            let turn = jobs.acquire_many_owned(places).await;
            let played = play_line(&line, fleet).await;
            drop(turn);
            (index, played)
        });
    }
    let mut done: Vec<Option<Played>> = cases.iter().map(|_| None).collect();
    let (mut shown, mut tally) = (0, [0_usize; 3]);
    let mut report = vec![];
    while let Some(joined) = playing.join_next().await {
        let (index, played) = joined.map_err(|e| format!("a case broke the runner: {e}"))?;
        done[index] = Some(played);
        // In the order of the file, as soon as everything before is known.
        while let Some(played) = done.get_mut(shown).and_then(Option::take) {
            shown += 1;
            tell(args, &played, &mut tally);
            report.push(as_json(&played));
        }
    }
    stores::stop_shared();
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&Value::from(report)).map_err(|e| e.to_string())?;
        std::fs::write(path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let [passed, failed, skipped] = tally;
    say(&format!("{passed} passed, {failed} failed, {skipped} skipped"));
    Ok(failed == 0)
}

/// Whether a line's id is asked for: equal, or beginning like it.
fn chosen(line: &str, filters: &[String]) -> bool {
    let id = serde_json::from_str::<Value>(line).ok().and_then(|case| case["id"].as_str().map(str::to_owned));
    filters.is_empty() || id.is_none_or(|id| filters.iter().any(|filter| id.starts_with(filter.as_str())))
}

async fn play_line(line: &str, fleet: bool) -> Played {
    let began = Instant::now();
    let case = match Case::parse(line) {
        Ok(case) => Case { fleet, ..case },
        Err(why) => {
            let value: Value = serde_json::from_str(line).unwrap_or_default();
            let text = |key: &str| value[key].as_str().unwrap_or("?").to_owned();
            let failure = Failure::said("format", "a case that the runner understands", &why);
            let runs = vec![(String::new(), Outcome::Done(vec![failure]))];
            return Played { id: text("id"), title: text("title"), runs, took: began.elapsed() };
        }
    };
    let mut runs = vec![];
    for run in variants::runs(&case, line) {
        let outcome = match run.plan {
            Plan::Error(why) => {
                Outcome::Done(vec![Failure::said("variant", "one that the runner knows", &why)])
            }
            Plan::Play(case) => {
                let playing = Box::pin(play::play(&case));
                tokio::time::timeout(RUN_MAX, playing).await.unwrap_or_else(|_| {
                    Outcome::Done(vec![Failure::said("run", "an end", &format!("none within {RUN_MAX:?}"))])
                })
            }
        };
        runs.push((run.name, outcome));
    }
    Played { id: case.id, title: case.title, runs, took: began.elapsed() }
}

impl Played {
    fn verdict(&self) -> Verdict {
        let failed = self.runs.iter().filter_map(|(name, outcome)| match outcome {
            Outcome::Done(failures) if !failures.is_empty() => Some((name, failures)),
            Outcome::Done(_) | Outcome::Skipped(_) => None,
        });
        let failed: Vec<_> = failed.collect();
        if let Some((name, failures)) = failed.first() {
            let Failure { field, expected, seen, .. } = &failures[0];
            let variant = if name.is_empty() { String::new() } else { format!("[{name}] ") };
            let more = failed.iter().map(|(_, failures)| failures.len()).sum::<usize>() - 1;
            let others: Vec<&str> = failed.iter().skip(1).map(|(name, _)| name.as_str()).collect();
            let more = if more > 0 { format!(" (+{more} more)") } else { String::new() };
            let others =
                if others.is_empty() { String::new() } else { format!(" (also [{}])", others.join("], [")) };
            let seen = seen.replace(['\n', '\r'], " ");
            return Verdict::Failed(format!(
                "{variant}{field}: expected {expected}, saw {seen}{more}{others}"
            ));
        }
        match self.runs.first() {
            Some((_, Outcome::Skipped(why))) => Verdict::Skipped(why.clone()),
            _ => Verdict::Passed,
        }
    }
}

/// A line of the report; one that nobody reads any more is no fault.
fn say(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}

/// One line, and everything else when asked.
fn tell(args: &Args, played: &Played, tally: &mut [usize; 3]) {
    let Played { id, title, runs, took } = played;
    let always = args.pending.contains(id);
    let pending = always || args.pending.contains(&format!("{id}?"));
    match played.verdict() {
        Verdict::Passed if always => {
            tally[1] += 1;
            say(&format!("FAIL {id} it passes: take it off tests/cases/pending.txt"));
        }
        Verdict::Passed => {
            tally[0] += 1;
            let skipped = runs.iter().filter_map(|(name, outcome)| match outcome {
                Outcome::Skipped(why) => Some(format!(" ([{name}] skipped: {why})")),
                Outcome::Done(_) => None,
            });
            say(&format!("PASS {id} {title}{}", skipped.collect::<String>()));
        }
        Verdict::Skipped(why) => {
            tally[2] += 1;
            say(&format!("SKIP {id} {why}"));
        }
        Verdict::Failed(why) if pending => {
            tally[2] += 1;
            say(&format!("SKIP {id} pending: {why}"));
        }
        Verdict::Failed(why) => {
            tally[1] += 1;
            say(&format!("FAIL {id} {why}"));
        }
    }
    if args.verbose {
        for (name, outcome) in runs {
            let Outcome::Done(failures) = outcome else { continue };
            for Failure { field, expected, seen, .. } in failures {
                say(&format!("     [{name}] {field}: expected {expected}, saw {seen}"));
            }
            if let Some(failure) = failures.first() {
                failure.details.lines().for_each(|line| say(&format!("       {line}")));
            }
        }
        say(&format!("     {} ms", took.as_millis()));
    }
}

fn as_json(played: &Played) -> Value {
    let (result, reason) = match played.verdict() {
        Verdict::Passed => ("passed", String::new()),
        Verdict::Failed(why) => ("failed", why),
        Verdict::Skipped(why) => ("skipped", why),
    };
    let runs = played.runs.iter().map(|(name, outcome)| match outcome {
        Outcome::Skipped(why) => json!({ "variant": name, "skipped": why }),
        Outcome::Done(failures) => json!({ "variant": name, "failures": failures.iter().map(|f| json!({
            "field": f.field, "expected": f.expected, "seen": f.seen,
        })).collect::<Vec<_>>() }),
    });
    json!({
        "id": played.id, "title": played.title, "result": result, "reason": reason,
        "runs": runs.collect::<Vec<_>>(), "ms": u64::try_from(played.took.as_millis()).unwrap_or(u64::MAX),
    })
}
