//! Postgres is away: calls go on, what they cost is booked later, and the books say that they are read-only.

use tokio::task::block_in_place;

use super::super::upgrade::WHOLE_NANO;
use super::{until, warm};
use crate::support::fleet::Fleet;
use crate::support::{Call, Gateway, Setup, postgres, redis, script, upstream, whole_request};

/// What `/readyz` says: its status and its text.
async fn ready(node: &Gateway) -> (u16, String) {
    let page = node.admin_page("/readyz").await;
    (page.status, page.text())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_on_without_postgres_and_are_booked_when_it_is_back() {
    let mut server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let nodes = [(); 2].map(|()| fleet.node(Setup::new(&[only.address()]).balance("100")));
    for node in &nodes {
        warm(node).await;
        assert_eq!(ready(node).await, (200, "ready\n".to_owned()));
    }
    let known = Call::post(whole_request()).send(nodes[0].http).await;
    let request = known.header("x-request-id").unwrap().to_owned();
    fleet.account("alpha", 3);

    block_in_place(|| server.stop());
    for node in &nodes {
        node.wait_for_metric("tollgate_ledger_reachable", 0).await;
    }
    let (status, text) = ready(&nodes[0]).await;
    assert_eq!(status, 200, "calls are wanted");
    assert!(text.contains("notice: the ledger does not answer") && text.contains("read-only"), "{text}");
    for _ in 0..20 {
        for node in &nodes {
            let answer = Call::post(whole_request()).send(node.http).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    let generation = format!("/v1/generation?id={request}");
    let keyed = || Call::post(whole_request()).header("idempotency-key", "k");
    for call in [Call::get(&generation), Call::get("/v1/credits"), keyed()] {
        let answer = call.send(nodes[0].http).await;
        assert_eq!((answer.status, answer.code().as_str()), (503, "store_unavailable"));
        assert!(
            answer.header("retry-after").is_some() && answer.text().contains("ledger"),
            "{}",
            answer.text()
        );
    }
    for verb in [
        &["accounts", "top-up", "alpha", "1", "--reference", "r"][..],
        &["accounts", "show"],
        &["keys", "create", "alpha"],
        &["ledger", "verify"],
    ] {
        let refused = nodes[1].try_command(verb).unwrap_err();
        assert!(
            refused.contains("the ledger cannot be reached") && refused.contains("read-only"),
            "{refused}"
        );
    }
    let reload = nodes[1].reload().await;
    assert!(
        reload.status == 422 && reload.text().contains("the ledger cannot be reached"),
        "{}",
        reload.text()
    );

    block_in_place(|| server.restart());
    assert_eq!(100_000_000_000 - fleet.account("alpha", 43).balance_nano, 43 * WHOLE_NANO);
    for node in &nodes {
        node.wait_for_metric("tollgate_ledger_reachable", 1).await;
    }
    assert_eq!(ready(&nodes[0]).await, (200, "ready\n".to_owned()));
    nodes[1].command(&["accounts", "top-up", "alpha", "1", "--reference", "r"]);
    assert_eq!(Call::get(&generation).send(nodes[0].http).await.status, 200);
    assert_eq!(keyed().send(nodes[0].http).await.status, 200);
    fleet.verify();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_that_hangs_is_not_waited_for() {
    let server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let node = fleet.node(Setup::new(&[only.address()]).balance("100"));
    warm(&node).await;
    server.freeze();
    node.wait_for_metric("tollgate_ledger_reachable", 0).await;
    for _ in 0..20 {
        assert_eq!(Call::post(whole_request()).send(node.http).await.status, 200);
    }
    assert_eq!(Call::get("/v1/credits").send(node.http).await.status, 503);
    server.thaw();
    until("the books are open", async || Call::get("/v1/credits").send(node.http).await.status == 200).await;
    assert_eq!(100_000_000_000 - fleet.account("alpha", 21).balance_nano, 21 * WHOLE_NANO);
    fleet.verify();
}
