//! Nodes of a fleet keep one record, and go on while its database is away.

use serde_json::Value;
use tokio::task::block_in_place;
use tollgate::mock::Script;
use tollgate::record::Records;

use super::super::support::fleet::Fleet;
use super::super::support::{Call, Setup, postgres, redis, script, upstream, whole_request};
use super::{sums, until};

/// The sums of all minutes, once so many calls are in them.
fn minutes(fleet: &Fleet, calls: u64) -> (u64, u64, u64) {
    block_in_place(|| {
        let records = Records::of_fleet(fleet.ledger());
        until(|| sums(&records.minutes(None, 0, i64::MAX).unwrap()), |(good, bad, _)| good + bad >= calls)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_nodes_are_told_of_together() {
    let fleet = Fleet::start().await;
    let first = upstream(script(r#"{"fault":{"kind":"status","code":503},"fault_count":1}"#)).await;
    let second = upstream(Script::default()).await;
    let nodes = [(); 2].map(|()| fleet.node(Setup::new(&[first.address(), second.address()]).balance("100")));
    for _ in 0..6 {
        for node in &nodes {
            assert_eq!(Call::post(whole_request()).send(node.http).await.status, 200);
        }
    }
    assert_eq!(minutes(&fleet, 12), (12, 0, 0));
    for node in &nodes {
        let groups = block_in_place(|| {
            until(
                || node.command(&["failovers", "--by", "upstream", "--json"]),
                |text| text.contains("\"failovers\":1"),
            )
        });
        assert!(groups.contains("u0/up-a"), "{groups}");
        let slo: Value = serde_json::from_str(&node.command(&["slo", "--json"])).unwrap();
        assert_eq!(slo["objectives"][0]["good"], 12);
    }
    let parts = block_in_place(|| {
        fleet.database.sql("SELECT count(*) FROM pg_inherits WHERE inhparent = 'attempt'::regclass")
    });
    assert_eq!(parts, "1", "today's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_wait_for_a_database_that_is_away() {
    let mut server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(Script::default()).await;
    let node = fleet.node(Setup::new(&[only.address()]).balance("100"));
    assert_eq!(Call::post(whole_request()).send(node.http).await.status, 200);
    assert_eq!(minutes(&fleet, 1), (1, 0, 0));
    block_in_place(|| server.stop());
    let mut ids = vec![];
    for _ in 0..10 {
        let answer = Call::post(whole_request()).send(node.http).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        ids.push(answer.header("x-request-id").unwrap().to_owned());
    }
    node.wait_for_log("records cannot be written: they wait");
    block_in_place(|| server.restart());
    assert_eq!(minutes(&fleet, 11), (11, 0, 0));
    node.wait_for_log("records are written again");
    let records = Records::of_fleet(fleet.ledger());
    block_in_place(|| {
        for id in ids {
            assert_eq!(records.attempts_of(&id).unwrap().len(), 1, "{id}");
        }
    });
}
