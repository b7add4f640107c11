//! The status page of a fleet: every node's is the same, also of incidents, and it goes on without Postgres.

use serde_json::Value;
use tokio::task::block_in_place;

use super::{until, warm};
use crate::support::fleet::Fleet;
use crate::support::{Call, Gateway, Setup, postgres, redis, script, upstream};

async fn status(node: &Gateway) -> Value {
    Call::get("/status.json").without("authorization").send(node.http).await.json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_incident_of_one_node_is_on_every_page_and_pages_go_on_without_postgres() {
    let mut server = block_in_place(postgres::Server::start_durable);
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(script("{}")).await;
    let nodes = [(); 2].map(|()| fleet.node(Setup::new(&[only.address()])));
    for node in &nodes {
        warm(node).await;
    }
    nodes[0].command(&["incidents", "open", "--title", "Slow answers", "--severity", "degraded"]);
    for node in &nodes {
        until("the incident is on the page", async || {
            let page = status(node).await;
            page["incidents"][0]["title"]["en"] == "Slow answers" && page["status"] == "degraded"
        })
        .await;
    }

    block_in_place(|| server.stop());
    for node in &nodes {
        until("the page says that it is read-only", async || status(node).await["read_only"] == true).await;
        let page = status(node).await;
        assert_eq!(page["incidents"][0]["title"]["en"], "Slow answers", "as it was known last");
        let refused = node.try_command(&["incidents", "close", "1"]).unwrap_err();
        assert!(refused.contains("read-only"), "{refused}");
    }

    block_in_place(|| server.restart());
    for node in &nodes {
        until("records can be written again", async || status(node).await["read_only"] == false).await;
    }
    nodes[1].command(&["incidents", "close", "1"]);
    until("it is over on the other node too", async || {
        status(&nodes[0]).await["incidents"][0]["closed_at"].is_string()
    })
    .await;
}
