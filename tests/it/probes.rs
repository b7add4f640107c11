//! Every route is asked whether it answers, honestly, at our cost and within its allowance; of a fleet one node asks.

use std::collections::{BTreeSet, HashSet};

use tokio::task::block_in_place;
use tollgate::mock::{Mock, Script};
use tollgate::record::{ProbeRow, Records};

use super::support::fleet::Fleet;
use super::support::interim::{INTERIM, answer_each};
use super::support::receiver::Receiver;
use super::support::{Call, Gateway, Setup, script, upstream, whole_request};

const ACCOUNT: &str = "tollgate-probes";
const EVERY_SECOND: &str = "probes: { every: 1s, timeout: 1s }";

fn success(endpoint: &str) -> String {
    format!("tollgate_probe_success{{endpoint=\"{endpoint}\",model=\"gpt-a\"}}")
}

/// Waits until a route's latest probe came to this.
async fn wait_for_probe(gateway: &Gateway, endpoint: &str, ok: i64) {
    let (name, began) = (success(endpoint), std::time::Instant::now());
    let line = format!("{name} {ok}\n");
    while !gateway.admin_page("/metrics").await.text().contains(&line) {
        assert!(began.elapsed().as_secs() < 30, "no {line}: {}", gateway.log());
        tokio::task::yield_now().await;
    }
}

fn probes(gateway: &Gateway) -> Vec<ProbeRow> {
    Records::open_for_reading(&gateway.folder().join("data")).unwrap().probes_since(0).unwrap()
}

fn notify(receiver: &Receiver, more: &str) -> String {
    format!("notifications: {{ receivers: [ {{ url: \"http://{}/\" }} ]{more} }}", receiver.address)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_dies_is_red_told_of_once_and_once_more_when_it_is_back() {
    let (mock, other, receiver) =
        (upstream(Script::default()).await, upstream(Script::default()).await, Receiver::start().await);
    let gateway = Setup::new(&[mock.address(), other.address()])
        .with(EVERY_SECOND)
        .with(&notify(&receiver, ""))
        .start();
    wait_for_probe(&gateway, "u0/up-a", 1).await;
    wait_for_probe(&gateway, "u1/up-a", 1).await;
    let (address, seen) = (mock.address(), mock.requests());
    let asked = &seen[0];
    assert_eq!(
        (asked.path.as_str(), asked.header("authorization")),
        ("/v1/chat/completions", Some("Bearer prov-key-u0"))
    );
    let body: serde_json::Value = serde_json::from_slice(&asked.body).unwrap();
    assert_eq!((&body["model"], &body["max_completion_tokens"]), (&"up-a".into(), &1.into()));
    mock.stop();
    wait_for_probe(&gateway, "u0/up-a", 0).await;
    let told = receiver.wait_for("that it fails", |posts| Receiver::notifications(posts, "probe").pop());
    assert_eq!((&told["state"], &told["subject"]), (&"begins".into(), &"gpt-a at u0/up-a".into()));
    // Several probes later it is still the one.
    let failures = || probes(&gateway).iter().filter(|probe| !probe.ok).count();
    while failures() < 3 {
        tokio::task::yield_now().await;
    }
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let _back = Mock::start(listener, Script::default()).await.unwrap();
    wait_for_probe(&gateway, "u0/up-a", 1).await;
    let told = receiver.wait_for("that it is back", |posts| {
        let told = Receiver::notifications(posts, "probe");
        (told.len() > 1).then_some(told)
    });
    let states: Vec<_> = told.iter().map(|told| told["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["begins", "ends"]);
    let rows = probes(&gateway);
    let failed: HashSet<&str> = rows.iter().filter(|row| !row.ok).map(|row| row.reason.as_str()).collect();
    assert!(failed.contains("connect"), "{failed:?}");
    assert!(rows.iter().all(|row| row.model == "gpt-a" && ["r0", "r1"].contains(&row.region.as_str())));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_a_caller_would_take_for_an_answer_is_one() {
    let mock = upstream(Script::default()).await;
    let gateway = Setup::new(&[mock.address()]).with(EVERY_SECOND).start();
    wait_for_probe(&gateway, "u0/up-a", 1).await;
    for (fault, reason) in [
        (r#"{ "fault": { "kind": "status", "code": 500 } }"#, "status"),
        (r#"{ "fault": { "kind": "status", "code": 401 } }"#, "credential"),
        (r#"{ "fault": { "kind": "status", "code": 400 } }"#, "caller_fault"),
        (r#"{ "fault": { "kind": "html" } }"#, "wrong_type"),
        (r#"{ "fault": { "kind": "empty" } }"#, "empty"),
        (r#"{ "fault": { "kind": "garbage" } }"#, "broken"),
        (r#"{ "fault": { "kind": "hang_before_head" } }"#, "first_byte"),
    ] {
        let before = probes(&gateway).len();
        mock.set_script(script(fault));
        let began = std::time::Instant::now();
        // The first of them may have been under way before.
        let last = loop {
            let rows = probes(&gateway);
            if rows.len() > before + 1 {
                break rows.last().cloned().unwrap();
            }
            assert!(began.elapsed().as_secs() < 30, "{fault}: {rows:?}");
            tokio::task::yield_now().await;
        };
        assert!(!last.ok, "{fault}: {last:?}");
        assert!(last.reason.starts_with(reason), "{fault}: {last:?}");
    }
    mock.set_script(Script::default());
    wait_for_probe(&gateway, "u0/up-a", 1).await;
    assert!(gateway.ledger_is_right());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_probes_cost_is_in_the_books_and_nobody_pays_for_it() {
    let mock = upstream(Script::default()).await;
    let gateway = Setup::new(&[mock.address()]).with(EVERY_SECOND).start();
    wait_for_probe(&gateway, "u0/up-a", 1).await;
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!(answer.status, 200);
    let account = gateway.account(ACCOUNT, 2);
    assert_eq!((account.balance_nano, account.leased_nano), (0, 0));
    assert_eq!(gateway.spent(1), 75_000, "the call, and nothing else");
    // Ten tokens in and five out, as the upstream says, at the route's cost.
    gateway.wait_for_metric_that("tollgate_probe_cost_nano_dollars_total", |cost| cost >= 120_000).await;
    let books = rusqlite::Connection::open(gateway.folder().join("data/ledger.db")).unwrap();
    let (calls, cost, charged): (i64, i64, i64) = books
        .query_row(
            "SELECT count(*), sum(provider_cost), sum(captured + excess) FROM settlement WHERE account = ?1",
            [account.id],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .unwrap();
    assert_eq!((cost, charged), (calls * 60_000, 0));
    assert!(gateway.ledger_is_right());
    let said = gateway.command(&["ledger", "verify"]);
    assert!(said.contains("right"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_stop_at_their_allowance_also_after_a_restart_and_say_so() {
    let (mock, receiver) = (upstream(Script::default()).await, Receiver::start().await);
    let gateway = Setup::new(&[mock.address()])
        .with("probes: { every: 1s, cost_max_per_day: \"0.0005\" }")
        .with(&notify(&receiver, ""))
        .start();
    gateway.wait_for_metric("tollgate_probes_held_back", 1).await;
    gateway.wait_for_log("probes.cost_max_per_day is used up");
    receiver.wait_for("that they stop", |posts| Receiver::notifications(posts, "probes_held_back").pop());
    let records = Records::open_for_reading(&gateway.folder().join("data")).unwrap();
    let spent = records.probes_cost_since(0).unwrap().nano();
    assert!((60_000..=500_000).contains(&spent), "{spent}");
    let asked = mock.requests().len();
    let gateway = gateway.kill_and_restart();
    gateway.wait_for_metric("tollgate_probes_held_back", 1).await;
    assert!(mock.requests().len() <= asked + 1, "the allowance is the day's, not the process's");
    assert!(records.probes_cost_since(0).unwrap().nano() <= 500_000);
}

/// A wall clock that goes ahead when a file says so; how long things take it does not change.
fn with_own_time(setup: Setup, file: &std::path::Path) -> Setup {
    let libraries = std::fs::read_dir("/usr/lib").unwrap().flatten().map(|folder| folder.path());
    let library = libraries
        .map(|folder| folder.join("faketime/libfaketimeMT.so.1"))
        .find(|library| library.exists())
        .expect("Debian's package `faketime`: scripts/setup test");
    std::fs::write(file, "+0\n").unwrap();
    setup
        .env("LD_PRELOAD", library.to_str().unwrap())
        .env("FAKETIME_TIMESTAMP_FILE", file.to_str().unwrap())
        .env("FAKETIME_NO_CACHE", "1")
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_day_brings_a_new_allowance_that_is_said_and_the_books_have_what_both_days_cost() {
    let (mock, receiver) = (upstream(Script::default()).await, Receiver::start().await);
    let folder = tempfile::tempdir().unwrap();
    let time = folder.path().join("time");
    let setup = Setup::new(&[mock.address()]).with("probes: { every: 1s, cost_max_per_day: \"0.0005\" }");
    let gateway = with_own_time(setup.with(&notify(&receiver, "")), &time).start();
    let told = |state: &'static str| {
        receiver.wait_for(state, |posts| {
            let told = Receiver::notifications(posts, "probes_held_back");
            told.into_iter().find(|told| told["state"] == state)
        })
    };
    gateway.wait_for_metric("tollgate_probes_held_back", 1).await;
    told("begins");
    let first_day = mock.requests().len();
    let days = |gateway: &Gateway| {
        let mut days = std::collections::BTreeMap::<i64, i64>::new();
        let records = rusqlite::Connection::open(gateway.folder().join("data/records.db")).unwrap();
        let mut select = records.prepare("SELECT at_ms / 86400000, cost_nano FROM probe").unwrap();
        let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        for (day, cost) in rows.map(|row: rusqlite::Result<(i64, i64)>| row.unwrap()) {
            *days.entry(day).or_default() += cost;
        }
        days
    };
    // By one day: what was asked before midnight and after it, if midnight is now, is two days already.
    std::fs::write(&time, "+1d\n").unwrap();
    gateway.wait_for_log("probes may cost something again: routes are asked");
    told("ends");
    gateway.wait_for_log_times("probes.cost_max_per_day is used up", 2);
    assert!(mock.requests().len() >= first_day + 2, "routes were asked again");
    let spent = days(&gateway);
    assert!(spent.len() >= 2 && spent.values().all(|cost| (60_000..=500_000).contains(cost)), "{spent:?}");
    let asked = i64::try_from(mock.requests().len()).unwrap();
    let account = gateway.account(ACCOUNT, asked);
    let books = rusqlite::Connection::open(gateway.folder().join("data/ledger.db")).unwrap();
    let booked: (i64, i64) = books
        .query_row(
            "SELECT sum(provider_cost), sum(captured + excess) FROM settlement WHERE account = ?1",
            [account.id],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .unwrap();
    assert_eq!(booked, (spent.values().sum(), 0), "exactly what was used, and nobody pays");
    assert!(gateway.ledger_is_right());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_fleet_one_node_probes_and_speaks_and_another_takes_over_when_it_is_killed() {
    let (fleet, receiver) = (Fleet::start().await, Receiver::start().await);
    let dying = upstream(Script::default()).await;
    let node = || {
        let setup = Setup::new(&[dying.address()]).with(EVERY_SECOND);
        block_in_place(|| fleet.node(setup.with(&notify(&receiver, ""))))
    };
    let mut one = node();
    one.wait_for_log("this node has the turn");
    wait_for_probe(&one, "u0/up-a", 1).await;
    let two = node();
    // What both see is said by one.
    dying.set_script(script(r#"{ "fault": { "kind": "status", "code": 500 } }"#));
    while !two.log().contains("an endpoint fails") {
        assert!(Call::post(whole_request()).send(two.http).await.status >= 500);
    }
    for node in [&one, &two] {
        node.wait_for_log("an endpoint fails");
    }
    let told = receiver.wait_for("the breaker", |posts| Receiver::notifications(posts, "breaker").pop());
    assert_eq!((&told["subject"], &told["scope"]), (&"u0/up-a".into(), &"fleet".into()));
    let of_two = two.admin_page("/metrics").await.text();
    assert!(!of_two.contains("tollgate_probe_success{"), "it asks nobody: {of_two}");
    assert!(of_two.contains("tollgate_job_late{task=\"probes\"} 0"), "and is not late with it");
    one.kill();
    two.wait_for_log("this node has the turn");
    wait_for_probe(&two, "u0/up-a", 0).await;
    dying.set_script(Script::default());
    wait_for_probe(&two, "u0/up-a", 1).await;
    receiver.wait_for("that it is well, by the other node", |posts| {
        Receiver::notifications(posts, "probe").into_iter().find(|told| told["state"] == "ends")
    });
    let breakers = Receiver::notifications(&receiver.posts(), "breaker");
    // Again, with its id, where the node was killed before it wrote down that it had been taken.
    let begins = breakers.iter().filter(|told| told["state"] == "begins");
    let ids: BTreeSet<&str> = begins.filter_map(|told| told["id"].as_str()).collect();
    assert_eq!(ids.len(), 1, "{breakers:?}");
    let rows = block_in_place(|| Records::of_fleet(fleet.ledger()).probes_since(0)).unwrap();
    assert!(rows.iter().any(|row| !row.ok) && rows.iter().any(|row| row.ok));
    let beats = block_in_place(|| Records::of_fleet(fleet.ledger()).beats()).unwrap();
    assert!(beats.iter().any(|beat| beat.job == "ledger_beat"), "{beats:?}");
    let booked = fleet.account(ACCOUNT, 2);
    assert_eq!(booked.balance_nano, 0);
    fleet.verify();
}

#[tokio::test]
async fn an_upstream_that_says_something_before_its_answer_is_well() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(answer_each(listener, INTERIM, false));
    let gateway = Setup::new(&[address]).with(EVERY_SECOND).start();
    wait_for_probe(&gateway, "u0/up-a", 1).await;
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
}
