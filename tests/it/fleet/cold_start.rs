//! A node that starts while its ledger is away serves what is free, says why it serves no more, and is whole again by itself.

use tokio::task::block_in_place;

use super::until;
use crate::support::fleet::Fleet;
use crate::support::{Call, Gateway, Setup, postgres, redis, script, upstream, whole_request};

/// The status of a call for the model that costs nothing, and of one for the model that is paid.
async fn statuses(node: &Gateway) -> (u16, u16) {
    let free = Call::post(whole_request()).send(node.http).await;
    let paid = Call::post(whole_request().replace("gpt-a", "gpt-b")).send(node.http).await;
    (free.status, paid.status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_starts_without_its_ledger_and_is_whole_when_that_is_back() {
    let mut server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let said = r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#;
    let (free, paid) = (upstream(script(said)).await, upstream(script(said)).await);
    let setup = Setup::new(&[free.address(), paid.address()]);
    let setup = setup.model("price: { input: \"0\", output: \"0\" }").other_model("# It is paid.");
    let mut node = fleet.node(setup);
    assert_eq!(statuses(&node).await, (200, 200));
    fleet.account("alpha", 2);
    node.signal("-TERM");
    assert!(node.wait().success());

    block_in_place(|| server.stop());
    let node = node.again();
    assert_eq!(statuses(&node).await, (200, 503), "nobody can know what is left of a balance");
    assert_eq!(node.admin_page("/livez").await.status, 200);
    let ready = node.admin_page("/readyz").await;
    assert_eq!(ready.status, 503);
    assert!(ready.text().contains("has not answered since the start"), "{}", ready.text());

    block_in_place(|| server.restart());
    until("the node is ready", || async { node.admin_page("/readyz").await.status == 200 }).await;
    until("a paid call is served", || async { statuses(&node).await.1 == 200 }).await;
    fleet.account("alpha", 4);
    fleet.verify();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_would_evict_money_is_refused() {
    let fleet = Fleet::start().await;
    let only = upstream(script("{}")).await;
    let mut node = fleet.node(Setup::new(&[only.address()]));
    node.signal("-TERM");
    assert!(node.wait().success());
    let evicting = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let evicting = redis::Server::with(redis::Kind::Redis, &evicting).await;
    node.write_config(&node.config().replace(&fleet.redis.url(), &evicting.url()));
    let refused = block_in_place(|| node.try_command(&["serve"]).unwrap_err());
    assert!(refused.contains("store.redis") && refused.contains("noeviction"), "{refused}");
}
