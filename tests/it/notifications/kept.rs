//! What waits for a receiver outlives the process that was to tell it, and is told once, by one node.

use std::time::Instant;

use tokio::task::block_in_place;
use tollgate::mock::Script;

use crate::support::fleet::Fleet;
use crate::support::gateway::free_address;
use crate::support::receiver::Receiver;
use crate::support::{Call, Gateway, Setup, script, upstream, whole_request};

const LEFT: &str = "a process before left this to be told";

fn told_to(address: std::net::SocketAddr) -> String {
    format!(
        "notifications: {{ low_balance: \"2.00\", low_balances: {{ beta: \"0\" }}, receivers: [ \
         {{ url: \"http://{address}/\" }}, {{ url: \"http://{address}/slack\", shape: slack }} ] }}"
    )
}

/// The ids of the messages that the records keep, once they are so many rows.
fn kept(gateway: &Gateway, rows: usize) -> Vec<String> {
    let records = rusqlite::Connection::open(gateway.folder().join("data/records.db")).unwrap();
    let began = Instant::now();
    loop {
        let mut select = records.prepare("SELECT id FROM notice ORDER BY id").unwrap();
        let ids = select.query_map([], |row| row.get(0)).unwrap();
        let ids: Vec<String> = ids.collect::<Result<_, _>>().unwrap();
        if ids.len() == rows {
            return ids;
        }
        assert!(began.elapsed().as_secs() < 30, "{ids:?} instead of {rows}: {}", gateway.log());
        std::thread::yield_now();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_outlives_a_killed_process_and_is_told_once_under_its_id() {
    let (mock, address) = (upstream(Script::default()).await, free_address());
    let gateway = Setup::new(&[mock.address()]).with(&told_to(address)).start();
    // Nobody is there.
    gateway.wait_for_log_times("a notification is tried again until it is taken", 2);
    let ids = block_in_place(|| kept(&gateway, 2));
    assert_eq!(ids[0], ids[1], "one message for two receivers");
    let gateway = gateway.kill_and_restart();
    gateway.wait_for_log(LEFT);
    let receiver = Receiver::start_at(address).await;
    let told =
        receiver.wait_for("what was left", |posts| Receiver::notifications(posts, "low_balance").pop());
    assert_eq!((&told["state"], told["id"].as_str()), (&"begins".into(), Some(ids[0].as_str())));
    receiver.wait_for("the same, in Slack", |posts| {
        posts.iter().find(|post| post.path == "/slack" && post.headers["x-tollgate-id"] == ids[0]).cloned()
    });
    // The new process has found the balance to be low by itself, and has told nobody again.
    gateway.command(&["accounts", "top-up", "alpha", "5", "--reference", "r1"]);
    receiver.wait_for("that it is well", |posts| {
        Receiver::notifications(posts, "low_balance").into_iter().find(|told| told["state"] == "ends")
    });
    assert_eq!(Receiver::notifications(&receiver.posts(), "low_balance").len(), 2);
    assert_eq!(block_in_place(|| kept(&gateway, 0)), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_fleet_another_node_tells_what_a_killed_one_could_not_and_one_alone() {
    let (fleet, address) = (Fleet::start().await, free_address());
    let dying = upstream(script(r#"{ "fault": { "kind": "status", "code": 500 } }"#)).await;
    let node = || {
        let told_to = format!("notifications: {{ receivers: [ {{ url: \"http://{address}/\" }} ] }}");
        block_in_place(|| fleet.node(Setup::new(&[dying.address()]).with(&told_to)))
    };
    let mut one = node();
    one.wait_for_log("this node has the turn");
    let (two, three) = (node(), node());
    for node in [&two, &three] {
        while !node.log().contains("an endpoint fails") {
            assert!(Call::post(whole_request()).send(node.http).await.status >= 500);
        }
    }
    one.wait_for_log("somebody is told: u0/up-a fails");
    let breakers = "SELECT id FROM notice WHERE body LIKE '%\"kind\":\"breaker\"%'";
    let began = Instant::now();
    let id = loop {
        let id = block_in_place(|| fleet.database.sql(breakers));
        if !id.is_empty() {
            break id;
        }
        assert!(began.elapsed().as_secs() < 30, "it is not kept: {}", one.log());
    };
    one.kill();
    let heirs = [&two, &three];
    while !heirs.iter().any(|node| node.log().contains("this node has the turn")) {
        assert!(began.elapsed().as_secs() < 60, "{}", two.log());
        tokio::task::yield_now().await;
    }
    while !heirs.iter().any(|node| node.log().contains(LEFT)) {
        assert!(began.elapsed().as_secs() < 60, "{}", two.log());
        tokio::task::yield_now().await;
    }
    let receiver = Receiver::start_at(address).await;
    let told = receiver.wait_for("the breaker", |posts| Receiver::notifications(posts, "breaker").pop());
    assert_eq!((told["state"].as_str(), told["id"].as_str()), (Some("begins"), Some(id.as_str())));
    dying.set_script(Script::default());
    while !heirs.iter().all(|node| node.log().contains("an endpoint is well again")) {
        assert!(began.elapsed().as_secs() < 90, "{}", two.log());
        for node in heirs {
            Call::post(whole_request()).send(node.http).await;
        }
    }
    receiver.wait_for("that it is well", |posts| {
        Receiver::notifications(posts, "breaker").into_iter().find(|told| told["state"] == "ends")
    });
    let told = Receiver::notifications(&receiver.posts(), "breaker");
    let states: Vec<_> = told.iter().filter_map(|told| told["state"].as_str()).collect();
    assert_eq!(states, ["begins", "ends"], "once each: {told:?}");
}
