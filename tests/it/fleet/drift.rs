//! Somebody writes to Redis: it is found, told of once, and told to be over once it was mended.

use std::time::Instant;

use tokio::task::block_in_place;
use tollgate::mock::Script;

use super::warm;
use crate::support::fleet::Fleet;
use crate::support::receiver::Receiver;
use crate::support::{Gateway, Setup, upstream};

/// Drift has to be the same at two looks, a minute apart.
const TWO_LOOKS_SECONDS: u64 = 100;

async fn until_drifts_are(node: &Gateway, count: i64) {
    let began = Instant::now();
    while node.metric("tollgate_reconcile_drifts").await != count {
        assert!(began.elapsed().as_secs() < TWO_LOOKS_SECONDS, "{}", node.log());
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

/// What somebody does to the money of an account in Redis who knows no better.
async fn write_to(fleet: &Fleet, account: i64, nano: i64) {
    let mut link = fleet.redis.link().await;
    let keys: Vec<String> = redis::cmd("KEYS").arg("*:money").query_async(&mut link).await.unwrap();
    for key in keys {
        let field = format!("a{account}");
        let there: bool = redis::cmd("HEXISTS").arg(&key).arg(&field).query_async(&mut link).await.unwrap();
        if there {
            let done: redis::RedisResult<i64> =
                redis::cmd("HINCRBY").arg(&key).arg(&field).arg(nano).query_async(&mut link).await;
            done.unwrap();
            return;
        }
    }
    panic!("no pool of account {account}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drift_is_told_of_once_and_so_is_its_end() {
    let (fleet, only, receiver) =
        (Fleet::start().await, upstream(Script::default()).await, Receiver::start().await);
    let told_to = format!(
        "notifications: {{ receivers: [ {{ url: \"http://{0}/\" }}, {{ url: \"http://{0}/slack\", shape: slack }} ] }}",
        receiver.address
    );
    let node = fleet.node(Setup::new(&[only.address()]).balance("100").with(&told_to));
    warm(&node).await;
    let account = fleet.account("alpha", 1).id;
    write_to(&fleet, account, 7).await;
    // A node looks when it starts, and again a minute after it has found something.
    let node = block_in_place(|| node.kill_and_restart());
    until_drifts_are(&node, 1).await;
    let told = receiver.wait_for("the drift", |posts| Receiver::notifications(posts, "drift").pop());
    assert_eq!((&told["state"], &told["scope"]), (&"begins".into(), &"fleet".into()));
    assert!(told["text"].as_str().unwrap().contains("its parts in Redis sum to"), "{told}");
    write_to(&fleet, account, -7).await;
    until_drifts_are(&node, 0).await;
    let slack = |posts: &[crate::support::receiver::Post]| {
        let slack =
            posts.iter().filter(|post| post.path == "/slack" && post.body.contains("Redis and the ledger"));
        slack.map(|post| post.json()["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let lines = receiver.wait_for("its end", |posts| Some(slack(posts)).filter(|lines| lines.len() > 1));
    assert!(
        lines[0].starts_with(":red_circle: ") && lines[1].starts_with(":large_green_circle: "),
        "{lines:?}"
    );
    let states = receiver.wait_for("the same", |posts| {
        let told = Receiver::notifications(posts, "drift");
        (told.len() > 1).then(|| told.iter().map(|told| told["state"].clone()).collect::<Vec<_>>())
    });
    assert_eq!(states, ["begins", "ends"]);
    assert_eq!(slack(&receiver.posts()).len(), 2);
    fleet.verify();
}
