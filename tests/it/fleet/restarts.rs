//! Everything is restarted, one after the other, and callers see none of it.

use std::sync::atomic::Ordering;

use tokio::task::block_in_place;

use super::super::upgrade::WHOLE_NANO;
use super::{Seen, load, more, until, warm};
use crate::support::fleet::Fleet;
use crate::support::redis::{Kind, Server};
use crate::support::{Gateway, Setup, postgres, script, upstream};

/// Calls at once.
const CALLERS: usize = 6;

async fn nodes(fleet: &Fleet, count: usize, store: &str) -> (tollgate::mock::Mock, Vec<Gateway>) {
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let start = |_| Setup::new(&[only.address()]).balance("1000").store(store).start();
    let nodes: Vec<Gateway> = (0..count).map(start).collect();
    for node in &nodes {
        warm(node).await;
    }
    fleet.account("alpha", i64::try_from(count).unwrap());
    (only, nodes)
}

/// Every call was answered, and charged once.
#[expect(clippy::print_stdout, reason = "it reports figures")]
fn all_is_well(what: &str, fleet: &Fleet, nodes: usize, seen: &Seen) {
    println!(
        "{what}: {} calls answered, {:?} connections refused, {:?} not accepted",
        seen.answered(),
        seen.refused,
        seen.unaccepted
    );
    let failed = seen.failed();
    assert!(failed.is_empty(), "{} of {} failed: {failed:?}", failed.len(), seen.answered());
    let calls = i64::try_from(seen.answered() + nodes).unwrap();
    let row = fleet.account("alpha", calls);
    assert_eq!((row.calls, 1_000_000_000_000 - row.balance_nano), (calls, calls * WHOLE_NANO));
    fleet.wait_until_tidy(nodes);
    fleet.verify();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_nodes_are_restarted_one_after_the_other() {
    let fleet = Fleet::start().await;
    let (_upstream, mut nodes) = nodes(&fleet, 3, &fleet.store()).await;
    let addresses: Vec<_> = nodes.iter().map(|node| node.http).collect();
    let (seen, load) = load(&addresses, CALLERS);
    for node in &mut nodes {
        more(&seen, 20).await;
        node.signal("-TERM");
        assert!(block_in_place(|| node.wait()).success(), "{}", node.log());
        more(&seen, 20).await;
        *node = block_in_place(|| node.again());
    }
    more(&seen, 20).await;
    load.end().await;
    all_is_well("nodes restarted", &fleet, 3, &seen);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_restarted_with_its_file_and_without() {
    let args = ["--appendonly", "yes", "--appendfsync", "everysec"];
    let redis = Server::with(Kind::Redis, &args).await;
    let mut fleet = Fleet { redis, database: block_in_place(postgres::database) };
    let (_upstream, nodes) = nodes(&fleet, 2, &fleet.store()).await;
    let addresses: Vec<_> = nodes.iter().map(|node| node.http).collect();
    let (seen, load) = load(&addresses, CALLERS);
    for _ in 0..2 {
        more(&seen, 40).await;
        fleet.redis.kill();
        more(&seen, 10).await;
        fleet.redis.again().await;
        for node in &nodes {
            node.wait_for_metric("tollgate_redis_shards_refused", 0).await;
        }
    }
    more(&seen, 40).await;
    fleet.redis.command("FLUSHALL").await;
    more(&seen, 40).await;
    load.end().await;
    assert_eq!(seen.unaccepted.load(Ordering::Acquire), 0);
    all_is_well("redis restarted", &fleet, 2, &seen);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_is_promoted_by_sentinel() {
    let mut fleet = Fleet::start().await;
    let replica = Server::start().await;
    replica.command(&format!("REPLICAOF 127.0.0.1 {}", fleet.redis.port)).await;
    let folder = tempfile::tempdir().unwrap();
    let mut sentinels = vec![];
    for _ in 0..3 {
        let file = folder.path().join(format!("{}.conf", sentinels.len()));
        let settings = format!(
            "sentinel monitor main 127.0.0.1 {} 2\nsentinel down-after-milliseconds main 500\n\
             sentinel failover-timeout main 3000\n",
            fleet.redis.port
        );
        std::fs::write(&file, settings).unwrap();
        sentinels.push(Server::sentinel(&file).await);
    }
    // Who reconfigures a server ends its connections.
    let info = async |server: &Server, part: &str| -> String {
        let said = server.try_command(&format!("INFO {part}")).await;
        said.ok().and_then(|said| ::redis::from_redis_value(said).ok()).unwrap_or_default()
    };
    until("the Sentinels know each other and the replica", async || {
        for sentinel in &sentinels {
            let known = info(sentinel, "sentinel").await;
            if !(known.contains("status=ok") && known.contains("slaves=1,sentinels=3")) {
                return false;
            }
        }
        info(&replica, "replication").await.contains("master_link_status:up")
    })
    .await;
    let urls: Vec<String> = sentinels.iter().map(|sentinel| format!("\"{}\"", sentinel.url())).collect();
    let store = fleet.store_with(&format!("urls: [{}], mode: sentinel, primary: main", urls.join(", ")));
    let (_upstream, nodes) = nodes(&fleet, 2, &store).await;
    let addresses: Vec<_> = nodes.iter().map(|node| node.http).collect();
    let (seen, load) = load(&addresses, CALLERS);
    more(&seen, 40).await;
    fleet.redis.kill();
    until("the replica is promoted", async || info(&replica, "replication").await.contains("role:master"))
        .await;
    for node in &nodes {
        node.wait_for_metric("tollgate_redis_shards_refused", 0).await;
    }
    more(&seen, 40).await;
    load.end().await;
    assert_eq!(seen.unaccepted.load(Ordering::Acquire), 0);
    all_is_well("a replica promoted", &fleet, 2, &seen);
    assert!(nodes.iter().any(|node| node.log().contains("another redis answers")));
}
