//! Nodes whose config names no models take those of the fleet.

use crate::support::fleet::Fleet;
use crate::support::{Call, Gateway, Setup, script, upstream, whole_request};

/// Publishes the catalogue of a file, by the command line of a node.
fn publish(node: &Gateway, yaml: &str) -> String {
    std::fs::write(node.folder().join("published.yaml"), yaml).expect("a file");
    tokio::task::block_in_place(|| node.command(&["catalogue", "publish", "published.yaml"]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_published_catalogue_serves_on_every_node() {
    let fleet = Fleet::start().await;
    let (cheap, dear) = (upstream(script("{}")).await, upstream(script("{}")).await);
    let node = fleet.node(Setup::new(&[]).catalogue_of_fleet());
    let other = fleet.node(Setup::new(&[]).catalogue_of_fleet());
    let unknown = Call::post(whole_request()).send(node.http).await;
    assert_eq!(unknown.status, 404, "{}", unknown.text());

    // A whole config of a node will do: only its catalogue is taken.
    let whole = Setup::new(&[cheap.address()]).yaml(node.http, node.admin);
    assert!(publish(&node, &whole).contains("version 1"));
    for node in [&node, &other] {
        node.wait_for_metric("tollgate_config_catalogue_version", 1).await;
        let answer = Call::post(whole_request()).send(node.http).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    // One that is wrong is refused where it is published, and nothing changes.
    std::fs::write(node.folder().join("wrong.yaml"), whole.replace("weight: 100", "weight: -1"))
        .expect("a file");
    let wrong = tokio::task::block_in_place(|| {
        node.try_command(&["catalogue", "publish", "wrong.yaml"]).unwrap_err()
    });
    assert!(wrong.contains("weight"), "{wrong}");

    let next = Setup::new(&[dear.address()]).yaml(node.http, node.admin);
    assert!(publish(&other, &next).contains("version 2"));
    for node in [&node, &other] {
        node.wait_for_metric("tollgate_config_catalogue_version", 2).await;
        assert_eq!(Call::post(whole_request()).send(node.http).await.status, 200);
    }
    assert_eq!((cheap.requests().len(), dear.requests().len()), (2, 2));
    fleet.verify();
}
