//! What happened is kept: every attempt, every good and bad minute, in a file and in Postgres alike.

mod calls;
mod fleet;
mod keeping;

use std::path::Path;
use std::time::{Duration, Instant};

use tollgate::record::Records;
use tollgate::record::attempts::Attempt;
use tollgate::record::minutes::Tally;

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);

/// The records of an embedded gateway, as another process reads them.
fn records(folder: &Path) -> Records {
    let open = || Records::open_for_reading(&folder.join("data")).map_err(|error| error.to_string());
    // The thread that writes them has made the file as soon as it could.
    let began = Instant::now();
    loop {
        match open() {
            Ok(records) => return records,
            Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(LOOK);
    }
}

/// Asks until the answer will do.
fn until<T: std::fmt::Debug>(mut ask: impl FnMut() -> T, will_do: impl Fn(&T) -> bool) -> T {
    let began = Instant::now();
    loop {
        let answer = ask();
        if will_do(&answer) {
            return answer;
        }
        assert!(began.elapsed() < PATIENCE, "it is {answer:?}");
        std::thread::sleep(LOOK);
    }
}

/// All good, bad and slow calls of all time.
fn sums(tallies: &[Tally]) -> (u64, u64, u64) {
    tallies.iter().fold((0, 0, 0), |(good, bad, slow), it| (good + it.good, bad + it.bad, slow + it.slow))
}

/// What was decided about a call, a line for each candidate.
fn told(attempts: &[Attempt]) -> Vec<String> {
    let line = |it: &Attempt| {
        let Attempt { attempt, candidate, region, outcome, reason, next, .. } = it;
        format!("{attempt} {candidate} {region} {outcome} {reason} -> {next}")
    };
    attempts.iter().map(line).collect()
}
