//! The hot store in Redis means what the one in memory means, on every server that may stand behind it.
//!
//! Each server plays the same promises (`promises.rs`), and random histories side by side with
//! `filters::purse::Purse`, which is what the embedded store is made of (`agree.rs`). Time is the test's: the verbs
//! are loaded with another clock. What happens when servers fail is in `failures.rs`, what becomes of connections in
//! `links.rs`.

mod agree;
mod failures;
mod links;
mod promises;
mod rig;

use tollgate::config::checked::RedisMode;
use tollgate::store::redis::Dialect;

use super::support::redis::{Cluster, Kind, Server, config};
use rig::Rig;

/// A user that may do everything but load functions.
const WITHOUT_FUNCTIONS: &str = "ACL SETUSER narrow on >secret ~* &* +@all -function -fcall";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_with_functions_keeps_every_promise() {
    let server = Server::start().await;
    let rig = Rig::new(&config(&[server.url()], RedisMode::Single)).await;
    assert_eq!(rig.redis.dialects(), [Dialect::Functions]);
    play(&rig).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_without_functions_keeps_every_promise() {
    let server = Server::start().await;
    server.command(WITHOUT_FUNCTIONS).await;
    let url = format!("redis://narrow:secret@127.0.0.1:{}", server.port);
    let rig = Rig::new(&config(&[url], RedisMode::Single)).await;
    assert_eq!(rig.redis.dialects(), [Dialect::Scripts]);
    play(&rig).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn valkey_keeps_every_promise() {
    let server = Server::with(Kind::Valkey, &[]).await;
    let rig = Rig::new(&config(&[server.url()], RedisMode::Single)).await;
    assert_eq!(rig.redis.dialects(), [Dialect::Functions]);
    play(&rig).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_every_promise() {
    let cluster = Cluster::start().await;
    let rig = Rig::new(&config(&cluster.urls(), RedisMode::Cluster)).await;
    assert_eq!(rig.redis.dialects(), [Dialect::Functions; 3]);
    assert_eq!(rig.redis.run_ids().await.unwrap().len(), 3);
    play(&rig).await;
}

async fn play(rig: &Rig) {
    promises::all(rig).await;
    agree::histories(rig).await;
}
