//! One set of keys and limits: what one node knows the others know, and no limit is larger with more nodes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::upgrade::{CENT, Counting, finish};
use super::{account, status_other_than, until};
use crate::support::fleet::Fleet;
use crate::support::{Call, Caller, Gateway, Setup, stream_request, upstream};
use tollgate::mock::Script;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_one_node_revokes_is_dead_on_the_other() {
    let fleet = Fleet::start().await;
    let only = upstream(Script::default()).await;
    let nodes = [(); 2].map(|()| fleet.node(Setup::new(&[only.address()])));
    let bearer = account(&nodes[0], "gamma", "1");
    let status = async |node: &Gateway| {
        Call::get("/v1/models").header("authorization", &bearer).send(node.http).await.status
    };
    assert_eq!(status_other_than(401, &bearer, &nodes[1]).await, 200);
    nodes[0].command(&["keys", "revoke", bearer.strip_prefix("Bearer ").unwrap()]);
    let began = Instant::now();
    assert_eq!(status(&nodes[0]).await, 401);
    until("it is dead over there", async || status(&nodes[1]).await == 401).await;
    println!("refused by the other node {:?} after it was revoked", began.elapsed());
    fleet.account("gamma", 1);
    fleet.verify();
}

/// How many of so many calls at once, spread over nodes, are let in; the others are told to wait.
async fn let_in(nodes: &[Gateway; 2], calls: usize, body: &str) -> Vec<Caller> {
    let begin = |n: usize| async move {
        let mut caller = Call::post(body).begin(nodes[n % 2].http).await;
        let head = caller.head().await;
        match head.status {
            200 => Some(caller),
            429 => {
                assert!(head.header("retry-after").is_some());
                None
            }
            other => panic!("{other}"),
        }
    };
    futures::future::join_all((0..calls).map(begin)).await.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_exact_over_two_nodes() {
    for (limit, body, exactly) in [
        ("rpm: 7", stream_request(), 7),
        // Each reserves 300 and a few for its prompt.
        ("tpm: 1500", stream_request().replace("\"stream\"", "\"max_tokens\":300,\"stream\""), 4),
        ("concurrency: 5", stream_request(), 5),
        // Each may cost a cent.
        ("budget_day: \"0.08\"", stream_request(), 8),
    ] {
        let fleet = Fleet::start().await;
        let slow = Counting::start(Duration::from_secs(60)).await;
        let setup = || {
            let setup = Setup::new(&[slow.address]).providers("").model(CENT).balance("10");
            setup.key(&format!("limits: {{ {limit} }}"))
        };
        let nodes = [(); 2].map(|()| fleet.node(setup()));
        let open = let_in(&nodes, 24, &body).await;
        assert_eq!((open.len(), slow.open.load(Ordering::Acquire)), (exactly, exactly), "{limit}");
        slow.release.send_replace(true);
        for caller in open {
            finish(caller).await;
        }
        let calls = i64::try_from(exactly).unwrap();
        assert_eq!(10_000_000_000 - fleet.account("alpha", calls).balance_nano, calls * 50_000);
        if limit.starts_with("concurrency") {
            until("places are free again", async || {
                Call::post(stream_request()).send(nodes[1].http).await.status == 200
            })
            .await;
        }
    }
}
