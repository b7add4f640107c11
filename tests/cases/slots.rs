//! The scenario of slots that a killed process held: they are leases, each with an end of its own.

use std::time::{Duration, Instant};

use regex::Regex;
use serde_json::Value;

use super::case::Case;
use super::client::signal_process;
use super::expect::Failure;
use super::gateway::Gateway;
use super::infra::plain_call;
use super::play::World;
use super::upstream::Mode;

/// Without a word of the case, as the gateway has it.
const LEASE_MS: u64 = 10_000;
/// How much later than its end a slot may be free: nodes look at slots by the second.
const LATE: Duration = Duration::from_millis(1500);
/// How long a call may take to be where it is waited for.
const ARRIVING: Duration = Duration::from_secs(5);

/// `None`: the check is another one.
pub async fn play(case: &Case, world: &World, check: &str) -> Option<Result<Vec<Failure>, String>> {
    let known = Regex::new(
        r"^kill -9 an instance that holds (\d+) of (\d+) slots; keep sending (\d+) rps from the other; after lease_ms (\w+) calls run in parallel again$",
    );
    let found = known.ok()?.captures(check)?;
    let number = |word: &str| match word {
        "two" => Some(2),
        "three" => Some(3),
        "four" => Some(4),
        digits => digits.parse::<usize>().ok(),
    };
    let (held, all, rate, again) =
        (number(&found[1])?, number(&found[2])?, number(&found[3])?.max(1), number(&found[4])?);
    Some(slots(case, world, (held, all), rate, again).await)
}

async fn slots(
    case: &Case,
    world: &World,
    (held, all): (usize, usize),
    rate: usize,
    again: usize,
) -> Result<Vec<Failure>, String> {
    let [first, second, ..] = world.gateways.as_slice() else {
        return Err("there is one instance".to_owned());
    };
    let lease =
        Duration::from_millis(case.config.get("slot_lease_ms").and_then(Value::as_u64).unwrap_or(LEASE_MS));
    let mut failures = vec![];
    let mut fail = |what: &str, expected: &str, seen: String| {
        failures.push(Failure::said(what, expected, &seen));
    };
    // The first holds some for a while: long enough that its lease was renewed.
    let hanging = hang(case, world, first, held).await?;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    signal_process(first.pid(), "SIGKILL");
    let killed = Instant::now();
    hanging.into_iter().for_each(|call| call.abort());
    set(world, Mode::Good);
    // They are taken still: what is left is left, and no more.
    let free = all.saturating_sub(held);
    let run = together(case, world, second, free + 1).await?;
    if run != free {
        fail("slots behind the kill", &format!("{free} of {}", free + 1), format!("{run}"));
    }
    let pace = Duration::from_secs(1) / u32::try_from(rate).unwrap_or(1);
    let end = killed + lease + LATE;
    while Instant::now() + pace < end {
        let answer = plain_call(case).call(second.http).await;
        if answer.status != Some(200) {
            let at = killed.elapsed().as_millis();
            fail("call meanwhile", "200", format!("{:?} after {at} ms", answer.status));
        }
        tokio::time::sleep(pace).await;
    }
    tokio::time::sleep_until(end.into()).await;
    let run = together(case, world, second, again).await?;
    if run != again {
        fail("slots behind the lease", &format!("{again} of {again}"), format!("{run}"));
    }
    Ok(failures)
}

fn set(world: &World, mode: Mode) {
    world.upstreams.values().for_each(|upstream| upstream.set_mode(mode));
}

fn hanging(world: &World) -> usize {
    world.upstreams.values().map(|upstream| upstream.asked_in(Mode::Hanging)).sum()
}

/// Calls whose upstream does not answer, once it has them.
async fn hang(
    case: &Case,
    world: &World,
    gateway: &Gateway,
    count: usize,
) -> Result<Vec<tokio::task::JoinHandle<()>>, String> {
    set(world, Mode::Hanging);
    let (before, until) = (hanging(world), Instant::now() + ARRIVING);
    let call = || {
        let (sent, to) = (plain_call(case), gateway.http);
        tokio::spawn(async move {
            sent.call(to).await;
        })
    };
    let calls: Vec<_> = (0..count).map(|_| call()).collect();
    while hanging(world) < before + count {
        if Instant::now() > until {
            return Err("a call that is to hang does not come to its upstream".to_owned());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(calls)
}

/// How many of so many calls run at once.
async fn together(case: &Case, world: &World, gateway: &Gateway, count: usize) -> Result<usize, String> {
    set(world, Mode::Hanging);
    let before = hanging(world);
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..count {
        let (sent, to) = (plain_call(case), gateway.http);
        calls.spawn(async move { sent.call(to).await });
    }
    // Each is at its upstream, or was refused.
    let until = Instant::now() + ARRIVING;
    let mut refused = 0;
    while hanging(world) - before + refused < count && Instant::now() < until {
        if let Ok(Some(_)) = tokio::time::timeout(Duration::from_millis(5), calls.join_next()).await {
            refused += 1;
        }
    }
    let run = hanging(world) - before;
    calls.abort_all();
    set(world, Mode::Good);
    // Who left gives its slot back.
    tokio::time::sleep(Duration::from_millis(300)).await;
    Ok(run)
}
