//! Redis is away, hangs or is slow: a node's own money carries its calls, limits are the node's own, and nobody is served
//! unmetered or told that there is no money.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::block_in_place;

use super::super::upgrade::CENT;
use super::{account, status_other_than, until, warm};
use crate::support::delay::Delay;
use crate::support::fleet::Fleet;
use crate::support::link::Link;
use crate::support::{Call, Gateway, Setup, postgres, redis, script, upstream, whole_request};

/// A whole call's cost by the price of a cent.
const COST_NANO: i64 = 50_000;

async fn call(node: &Gateway, bearer: &str) -> u16 {
    Call::post(whole_request()).header("authorization", bearer).send(node.http).await.status
}

/// Calls of an account with a tranche go on; one whose money is too small to split is told to come back. Answers how
/// many calls of the former were served.
async fn served_while_away(nodes: &[Gateway; 2], poor: &str) -> i64 {
    let mut served = 0;
    for node in nodes {
        for _ in 0..4 {
            let answer = Call::post(whole_request()).send(node.http).await;
            assert_eq!(answer.status, 200, "{}\n{}", answer.text(), node.log());
            served += 1;
        }
        let answer = Call::post(whole_request()).header("authorization", poor).send(node.http).await;
        assert_eq!((answer.status, answer.code().as_str()), (503, "store_unavailable"), "{}", answer.text());
        assert!(answer.header("retry-after").is_some());
        let page = node.admin_page("/readyz").await;
        assert!(
            page.status == 200 && page.text().contains("notice: redis does not answer"),
            "{}",
            page.text()
        );
        assert_eq!(node.metric("tollgate_redis_shards_refused").await, 256);
    }
    served
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_on_with_money_of_the_node_while_redis_hangs_or_is_gone() {
    let mut fleet = Fleet::start().await;
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let nodes = [(); 2].map(|()| fleet.node(Setup::new(&[only.address()]).model(CENT).balance("10")));
    for node in &nodes {
        warm(node).await;
    }
    let poor = account(&nodes[0], "poor", "0.05");
    let mut poor_served = 0;
    for node in &nodes {
        assert_eq!(status_other_than(401, &poor, node).await, 200);
        poor_served += 1;
    }
    let mut served = 2;
    fleet.redis.freeze();
    served += served_while_away(&nodes, &poor).await;
    fleet.redis.thaw();
    for node in &nodes {
        assert_eq!(status_other_than(503, &poor, node).await, 200, "it is back");
        poor_served += 1;
        node.wait_for_metric("tollgate_redis_shards_refused", 0).await;
        assert_eq!(node.admin_page("/readyz").await.text(), "ready\n");
        warm(node).await;
        served += 1;
    }
    // Without a file: all that it knew is gone.
    fleet.redis.kill();
    served += served_while_away(&nodes, &poor).await;
    fleet.redis.again().await;
    for node in &nodes {
        assert_eq!(status_other_than(503, &poor, node).await, 200, "it is back");
        poor_served += 1;
    }
    let poor = fleet.account("poor", poor_served);
    assert_eq!((poor.calls, 50_000_000 - poor.balance_nano), (poor_served, poor_served * COST_NANO));
    let alpha = fleet.account("alpha", served);
    assert_eq!((alpha.calls, 10_000_000_000 - alpha.balance_nano), (served, served * COST_NANO));
    fleet.wait_until_tidy(2);
    fleet.verify();
}

/// The ids of the holds that Redis is asked to place, one for each time, from now on.
async fn asked_to_place(port: u16) -> Arc<Mutex<Vec<String>>> {
    let mut monitor = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await.unwrap();
    monitor.write_all(b"MONITOR\r\n").await.unwrap();
    let mut lines = BufReader::new(monitor).lines();
    assert_eq!(lines.next_line().await.unwrap().as_deref(), Some("+OK"));
    let ids = Arc::new(Mutex::new(vec![]));
    let seen = Arc::clone(&ids);
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            let words: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
            // The verb, one key, its name, the epoch, the hold.
            if let ["FCALL", verb, "1", _, _, hold, ..] = words.as_slice()
                && verb.ends_with("admit")
            {
                seen.lock().unwrap().push((*hold).to_owned());
            }
        }
    });
    ids
}

/// A hold that Redis placed without being heard is voided, perhaps only when its call has come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_comes_back_to_redis_does_so_with_another_hold() {
    const AT_ONCE: usize = 5;
    let mut server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let way = Link::start(SocketAddr::from(([127, 0, 0, 1], fleet.redis.port))).await;
    let store = fleet.store_with(&format!("urls: [\"redis://{}\"]", way.address));
    let node = Setup::new(&[only.address()]).model(CENT).balance("10").store(&store).start();
    let poor = account(&node, "poor", "0.05");
    assert_eq!(status_other_than(503, &poor, &node).await, 200);
    // Else the node would lease money of its own while Redis is away.
    block_in_place(|| server.stop());
    node.wait_for_metric("tollgate_ledger_reachable", 0).await;
    let ids = asked_to_place(fleet.redis.port).await;
    // Twice as slow as a command may be: Redis places what nobody hears of.
    way.slow(Duration::from_millis(50));
    let calls = (0..AT_ONCE).map(|_| call(&node, &poor));
    let heal = async {
        until("all were asked for", async || ids.lock().unwrap().len() == AT_ONCE).await;
        until("the breaker is open", async || node.metric("tollgate_redis_shards_refused").await == 256)
            .await;
        way.heal();
    };
    let (statuses, ()) = futures::join!(futures::future::join_all(calls), heal);
    assert_eq!(statuses, [200; AT_ONCE], "{}", node.log());
    until("they came back", async || ids.lock().unwrap().len() >= 2 * AT_ONCE).await;
    let ids = ids.lock().unwrap().clone();
    let different: HashSet<&String> = ids.iter().collect();
    assert_eq!(different.len(), ids.len(), "{ids:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_redis_leases_for_itself_what_its_callers_need_and_keeps_limits_of_its_own() {
    let fleet = Fleet::start().await;
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let address = SocketAddr::from(([127, 0, 0, 1], fleet.redis.port));
    // Twice as slow as a command may be.
    let slow = Delay::start(address, Duration::from_millis(50)).await;
    let store = fleet.store_with(&format!("urls: [\"redis://{}\"]", slow.address));
    let setup = || Setup::new(&[only.address()]).model(CENT).balance("10").key("limits: { rpm: 6 }");
    let nodes = [(); 2].map(|()| setup().store(&store).start());
    for node in &nodes {
        let mut statuses = vec![status_other_than(503, "Bearer sk-test-alpha", node).await];
        for _ in 0..6 {
            statuses.push(call(node, "Bearer sk-test-alpha").await);
        }
        assert_eq!(statuses, [200, 200, 200, 200, 200, 200, 429], "{}", node.log());
    }
    let row = fleet.account("alpha", 12);
    assert_eq!(10_000_000_000 - row.balance_nano, 12 * COST_NANO);
    fleet.verify();
    until("nothing is held", async || nodes[0].metric("tollgate_holds_open").await == 0).await;
}
