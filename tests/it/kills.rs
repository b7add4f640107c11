//! `kill -9` under load, again and again, and afterwards every nano-dollar is where it belongs.
//!
//! A seed decides when the process dies. `TOLLGATE_KILLS=<n>` kills so often, `TOLLGATE_SEED=<n>`
//! with another seed; `scripts/kills` does so.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand_core::RngCore as _;
use rand_pcg::Pcg64Mcg;

use tollgate::journal::record::Record;

use super::support::{Call, Caller, Setup, script, stream_request, text_of, upstream};

const KILLS: u64 = 10;
const CALLERS: usize = 12;
/// What the four pieces of the scripted answer cost with their usage (10 and 5 tokens).
const WHOLE_NANO: i64 = 75_000;

/// What callers have seen, by request id.
#[derive(Default)]
struct Seen {
    whole: Vec<String>,
    broken: Vec<String>,
}

#[tokio::test]
async fn no_kill_loses_or_doubles_a_charge() {
    let kills = number("TOLLGATE_KILLS").unwrap_or(KILLS);
    let seed = number("TOLLGATE_SEED").unwrap_or(7);
    let mut rng = Pcg64Mcg::new(u128::from(seed) << 1 | 1);
    let only = upstream(script(r#"{"delay_chunk_ms":3}"#)).await;
    let mut gateway = Setup::new(&[only.address()]).balance("1000").start();
    let mut seen = Seen::default();
    for _ in 0..kills {
        let until = Arc::new(AtomicBool::new(false));
        let callers: Vec<_> =
            (0..CALLERS).map(|_| tokio::spawn(call_until(gateway.http, Arc::clone(&until)))).collect();
        // The one place where time passes on purpose: the moment of death is the input of this test.
        tokio::time::sleep(Duration::from_micros(rng.next_u64() % 150_000)).await;
        until.store(true, Ordering::Release);
        gateway = gateway.kill_and_restart();
        for caller in callers {
            let of_caller = caller.await.unwrap();
            seen.whole.extend(of_caller.whole);
            seen.broken.extend(of_caller.broken);
        }
        assert!(gateway.ledger_is_right());
    }
    gateway.wait_until_settled().await;
    let calls = gateway.account("alpha", 0).calls;
    let lines = gateway.statement("alpha");
    let mut charged: HashMap<&str, i64> = HashMap::new();
    for line in lines.iter().filter(|line| matches!(line.kind, "capture" | "excess")) {
        *charged.entry(line.what.as_str()).or_default() -= line.amount_nano;
    }
    for id in &seen.whole {
        assert_eq!(charged.get(id.as_str()), Some(&WHOLE_NANO), "{id} ended before its caller, seed {seed}");
    }
    for id in &seen.broken {
        let cost = charged.get(id.as_str()).copied().unwrap_or_default();
        assert!((0..=WHOLE_NANO).contains(&cost), "{id}: {cost}, seed {seed}");
    }
    let row = gateway.account("alpha", 0);
    let paid: i64 = charged.values().sum();
    assert_eq!(row.balance_nano, 1_000_000_000_000 - paid, "seed {seed}");
    assert!(!seen.whole.is_empty() && !seen.broken.is_empty(), "the kills came in time");
    println!("{kills} kills, {calls} calls: {} whole, {} broken off", seen.whole.len(), seen.broken.len());
}

#[tokio::test]
async fn a_call_whose_end_was_seen_is_charged_although_the_journals_thread_has_not_moved() {
    let only = upstream(script(r#"{"delay_chunk_ms":1}"#)).await;
    let gateway = Setup::new(&[only.address()]).env("TOLLGATE_TEST_JOURNAL_TICK_MS", "3600000").start();
    for _ in 0..3 {
        let answer = Call::post(stream_request()).send(gateway.http).await;
        assert_eq!((answer.status, text_of(&answer.text()).as_str()), (200, "Hello, world!"));
    }
    let mut running = Call::post(stream_request()).begin(gateway.http).await;
    running.head().await;
    let ends = gateway.journal().into_iter().filter(|record| matches!(record, Record::Settled(_)));
    assert_eq!(ends.count(), 0, "nothing of it is in the log");
    let gateway = gateway.kill_and_restart();
    gateway.wait_for_log("an earlier boot did not end");
    assert_eq!(gateway.account("alpha", 4).calls, 4, "the one that was cut had a hold");
    assert_eq!(gateway.spent(4), 3 * WHOLE_NANO, "what was not written of its progress is in its favour");
    assert!(gateway.ledger_is_right());
}

/// Calls until the gateway dies.
async fn call_until(gateway: SocketAddr, until: Arc<AtomicBool>) -> Seen {
    let mut seen = Seen::default();
    while !until.load(Ordering::Acquire) {
        let Some(mut caller) = Caller::try_connect(gateway).await else { break };
        caller.send(&Call::post(stream_request())).await;
        let Some(head) = caller.try_head().await else { break };
        let id = head.header("x-request-id").expect("every answer names its request").to_owned();
        assert_eq!(head.status, 200);
        let mut body = String::new();
        while let Ok(Some(chunk)) = caller.chunk().await {
            body.push_str(&String::from_utf8_lossy(&chunk));
        }
        if body.contains("[DONE]") {
            seen.whole.push(id);
        } else {
            assert!(text_of(&body).len() <= "Hello, world!".len());
            seen.broken.push(id);
            break;
        }
    }
    seen
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}
