//! A node leaves, or hands over to another process: its calls end, and nothing of it is left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::task::block_in_place;

use super::super::upgrade::{CENT, Counting, WHOLE_NANO, call_anew, finish, hand_over, keep_calling, open};
use super::warm;
use crate::support::fleet::Fleet;
use crate::support::{Call, Setup, postgres, redis, script, upstream, whole_request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_told_to_leave_ends_its_streams_and_leaves_nothing_behind() {
    let fleet = Fleet::start().await;
    let slow = Counting::start(Duration::from_secs(60)).await;
    let setup = || Setup::new(&[slow.address]).providers("").model(CENT).balance("10").drain_max("60s");
    let (mut first, second) = (fleet.node(setup()), fleet.node(setup()));
    let mut streams = vec![];
    for _ in 0..3 {
        streams.push(open(first.http).await);
    }
    first.wait_for_metric_that("tollgate_local_tranche_nano_dollars", |nano| nano > 0).await;
    first.signal("-TERM");
    let gone = async || crate::support::Caller::try_connect(first.http).await.is_none();
    super::until("it takes no calls any more", gone).await;
    slow.release.send_replace(true);
    for stream in streams {
        finish(stream).await;
    }
    assert!(first.wait().success());
    fleet.wait_until_tidy(1);
    let row = fleet.account("alpha", 3);
    assert_eq!(10_000_000_000 - row.balance_nano, 3 * 50_000);
    // All of it can be had by the node that stays: nothing is set aside for the one that has gone.
    let all = format!("{}.{:09}", row.balance_nano / 1_000_000_000, row.balance_nano % 1_000_000_000);
    second.command(&["accounts", "refund", "alpha", &all, "--reference", "all"]);
    assert_eq!(fleet.account("alpha", 3).balance_nano, 0);
    fleet.verify();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_replaced_on_its_folder_and_no_caller_notices() {
    let fleet = Fleet::start().await;
    let only =
        upstream(script(r#"{"delay_chunk_ms":5,"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let setup = || Setup::new(&[only.address()]).balance("1000");
    let (mut node, other) = (fleet.node(setup()), fleet.node(setup()));
    warm(&node).await;
    let over = Arc::new(AtomicBool::new(false));
    let kept: Vec<_> = (0..2).map(|_| tokio::spawn(keep_calling(node.http, Arc::clone(&over)))).collect();
    let anew: Vec<_> = (0..2).map(|_| tokio::spawn(call_anew(node.http, Arc::clone(&over)))).collect();
    for _ in 0..2 {
        let heir = block_in_place(|| hand_over(&node));
        let mut old = std::mem::replace(&mut node, heir);
        assert!(block_in_place(|| old.wait()).success(), "{}", old.log());
    }
    over.store(true, Ordering::Release);
    let mut calls = 1;
    for caller in kept {
        calls += caller.await.unwrap().0;
    }
    for caller in anew {
        calls += caller.await.unwrap();
    }
    println!("{calls} calls over two upgrades of a fleet's node");
    fleet.wait_until_tidy(2);
    let calls = i64::try_from(calls).unwrap();
    assert_eq!(1_000_000_000_000 - fleet.account("alpha", calls).balance_nano, calls * WHOLE_NANO);
    assert_eq!(Call::post(whole_request()).send(other.http).await.status, 200);
    fleet.verify();
}

/// Less than one verb may take at a server that hangs, and more than what is no money is given.
const SOON: Duration = Duration::from_secs(12);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_waits_for_a_frozen_postgres_with_its_money_and_with_nothing_else() {
    let server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let mut node = fleet.node(Setup::new(&[only.address()]).balance("100"));
    warm(&node).await;
    fleet.account("alpha", 1);
    server.freeze();
    assert_eq!(Call::post(whole_request()).send(node.http).await.status, 200);
    node.signal("-TERM");
    let began = Instant::now();
    while !node.log().contains("records could not be written before the process left: they are lost") {
        assert!(began.elapsed() < SOON, "records keep it: {}", node.log());
        tokio::task::yield_now().await;
    }
    println!("records were given up {:?} after SIGTERM", began.elapsed());
    let log = node.log();
    let line = log.lines().find(|line| line.contains("records could not be written")).unwrap();
    assert!(line.contains("attempts") && line.contains("sums"), "it says what is lost: {line}");
    server.thaw();
    assert!(node.wait().success(), "{}", node.log());
    fleet.wait_until_tidy(0);
    assert_eq!(100_000_000_000 - fleet.account("alpha", 2).balance_nano, 2 * WHOLE_NANO);
    fleet.verify();
}
