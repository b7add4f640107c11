//! What happens when servers fail, lose their memory, move keys, or are the wrong ones.

use std::time::Duration;

use filters::ids::{AccountId, HoldId};
use filters::limit::budget::{Budget, Period, Zone};
use filters::limit::{Limits, Scopes};
use filters::money::Amount;
use filters::purse::Standings;
use tollgate::config::checked::{Redis as Config, RedisMode};
use tollgate::journal::{Hold, Pool};
use tollgate::store::redis::{
    Admission, Dialect, Ended, Fence, Marked, News, Redis, RedisDeny, RedisError, RunId, shard_of,
};

use super::super::support::redis::{Cluster, Kind, Server, config, connect, free_port, until};
use super::super::support::tls::Authority;
use super::WITHOUT_FUNCTIONS;

const ACCOUNT: AccountId = AccountId(1);
const LIFETIME: Duration = Duration::from_secs(600);

fn single(server: &Server) -> Config {
    config(&[server.url()], RedisMode::Single)
}

fn pool(epoch: i64) -> Pool {
    Pool { shard: shard_of(ACCOUNT), epoch }
}

/// Marks an epoch, as the node does that has counted it up in the ledger.
async fn mark(redis: &Redis, epoch: i64) -> RunId {
    let fence = redis.fence(shard_of(ACCOUNT)).await.unwrap();
    assert_eq!(redis.mark(shard_of(ACCOUNT), &fence.run, epoch).await, Ok(Marked::Now));
    fence.run
}

pub(super) async fn funded(redis: &Redis, epoch: i64, total: i64) -> RunId {
    let run = mark(redis, epoch).await;
    redis.install(ACCOUNT, pool(epoch), Amount::from_nano(total)).await.unwrap();
    run
}

pub(super) async fn admit(redis: &Redis, epoch: i64, id: u128, amount: i64) -> Result<Standings, RedisDeny> {
    admit_within(redis, epoch, id, amount, &Scopes::default()).await
}

async fn admit_within(
    redis: &Redis,
    epoch: i64,
    id: u128,
    amount: i64,
    scopes: &Scopes,
) -> Result<Standings, RedisDeny> {
    let hold = Hold {
        id,
        account: ACCOUNT.0,
        amount,
        at_ms: tollgate::clock::unix_ms(),
        request: "r".to_owned(),
        model: "m".to_owned(),
        key: [1; 32],
        price_version: 1,
        pool: None,
    };
    let models = ["m".to_owned()];
    let (boot, lifetime, tokens) = (1, LIFETIME, 0);
    let admission =
        Admission { hold: &hold, pool: pool(epoch), boot, models: &models, scopes, tokens, lifetime };
    redis.admit(&admission).await.map(|admitted| admitted.standings)
}

async fn available(redis: &Redis, epoch: i64) -> i64 {
    redis.pool(ACCOUNT, pool(epoch)).await.unwrap().available.nano()
}

async fn until_closed(redis: &Redis) {
    until("the breaker closes", async || !redis.is_open(ACCOUNT)).await;
}

/// Another process, not marked.
fn is_other(deny: &RedisDeny, run: &RunId) -> bool {
    matches!(deny, RedisDeny::Stale(Fence { run: now, epoch: None }) if now != run)
}

async fn follow(replica: &Server, primary: &Server) {
    replica.command(&format!("REPLICAOF 127.0.0.1 {}", primary.port)).await;
    until("the replica has caught up", async || {
        let info: String = redis::from_redis_value(replica.command("INFO replication").await).unwrap();
        info.contains("master_link_status:up")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_at_once_over_three_clients_hold_exactly_what_is_there() {
    let server = Server::start().await;
    let clients =
        [connect(&single(&server)).await, connect(&single(&server)).await, connect(&single(&server)).await];
    funded(&clients[0], 1, 1_000 * 70).await;
    let calls = (0..10_000_u128).map(|id| {
        let redis = clients[usize::try_from(id % 3).unwrap()].redis.clone();
        tokio::spawn(async move { admit(&redis, 1, id, 70).await.map(|_| id) })
    });
    let answers = futures::future::join_all(calls).await;
    let mut admitted = vec![];
    for answer in answers {
        match answer.unwrap() {
            Ok(id) => admitted.push(id),
            Err(deny) => assert_eq!(deny, RedisDeny::Funds { available: Amount::ZERO }),
        }
    }
    let state = clients[1].pool(ACCOUNT, pool(1)).await.unwrap();
    assert_eq!((admitted.len(), state.available.nano(), state.held.nano()), (1_000, 0, 70_000));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_spends_nothing_of_what_it_was_told() {
    let (mut primary, replica) = (Server::start().await, Server::start().await);
    let old = connect(&single(&primary)).await;
    follow(&replica, &primary).await;
    let run = funded(&old, 1, 100).await;
    admit(&old, 1, 1, 30).await.unwrap();
    until("the replica has it all", async || {
        let seen = replica.command(&format!("HGET test:{{s{}}}:money h1", shard_of(ACCOUNT))).await;
        redis::from_redis_value::<Option<i64>>(seen).unwrap() == Some(30)
    })
    .await;
    let refused = Redis::new(&single(&replica)).unwrap().check().await;
    assert_eq!(refused, Err(RedisError::NotThere("the server is a replica".to_owned())));
    primary.kill();
    replica.command("REPLICAOF NO ONE").await;
    let new = connect(&single(&replica)).await;
    let deny = admit(&new, 1, 2, 30).await.unwrap_err();
    assert!(is_other(&deny, &run), "{deny}");
    assert!(new.pool(ACCOUNT, pool(1)).await.is_err());
    assert!(new.install(ACCOUNT, pool(1), Amount::from_nano(100)).await.is_err());
    assert!(new.void(ACCOUNT, pool(1), HoldId(1)).await.is_err());
    let replica_run = funded(&new, 2, 50).await;
    assert_ne!(replica_run, run);
    admit(&new, 2, 3, 50).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_from_its_files_is_another_one_and_remembers_limits() {
    let mut server = Server::with(Kind::Redis, &["--appendonly", "yes"]).await;
    let redis = connect(&single(&server)).await;
    let run = funded(&redis, 1, 100).await;
    let key = Limits { requests_per_minute: Some(2), ..Limits::default() };
    let scopes = Scopes { key, ..Scopes::default() };
    admit_within(&redis, 1, 1, 10, &scopes).await.unwrap();
    server.kill();
    until("the breaker opens", async || admit(&redis, 1, 2, 10).await.is_err()).await;
    server.again().await;
    until_closed(&redis).await;
    let deny = admit(&redis, 1, 3, 10).await.unwrap_err();
    assert!(is_other(&deny, &run), "{deny}");
    funded(&redis, 2, 100).await;
    admit_within(&redis, 2, 4, 10, &scopes).await.unwrap();
    assert!(matches!(admit_within(&redis, 2, 5, 10, &scopes).await, Err(RedisDeny::Limited { .. })));
    assert_eq!(available(&redis, 2).await, 90);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_server_is_stale_and_a_flushed_library_is_loaded_again() {
    let server = Server::start().await;
    server.command(WITHOUT_FUNCTIONS).await;
    let narrow = format!("redis://narrow:secret@127.0.0.1:{}", server.port);
    let functions = connect(&single(&server)).await;
    let scripts = connect(&config(&[narrow], RedisMode::Single)).await;
    assert_eq!(
        (functions.dialects(), scripts.dialects()),
        (vec![Dialect::Functions], vec![Dialect::Scripts])
    );
    funded(&functions, 1, 100).await;
    server.command("FUNCTION FLUSH").await;
    server.command("SCRIPT FLUSH").await;
    admit(&functions, 1, 1, 10).await.unwrap();
    admit(&scripts, 1, 2, 10).await.unwrap();
    assert_eq!(available(&scripts, 1).await, 80);
    server.command("FLUSHALL").await;
    assert!(matches!(admit(&scripts, 1, 3, 10).await, Err(RedisDeny::Stale(Fence { epoch: None, .. }))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_is_refused_at_once_and_found_again() {
    let server = Server::start().await;
    let steady = connect(&single(&server)).await;
    funded(&steady, 1, 100).await;
    let redis = connect(&Config { timeout: Duration::from_millis(50), ..single(&server) }).await;
    until("a busy machine gets one through", async || admit(&redis, 1, 1, 10).await.is_ok()).await;
    server.freeze();
    // One may find the breaker open already, where the machine was too busy for the call before.
    until("one times out", async || admit(&redis, 1, 2, 10).await == Err(RedisDeny::TimedOut)).await;
    assert!(redis.is_open(ACCOUNT));
    for id in 3..1_000 {
        assert_eq!(admit(&redis, 1, id, 10).await, Err(RedisDeny::Unavailable(RedisError::Open)));
    }
    server.thaw();
    until_closed(&redis).await;
    // What timed out may have run: its void makes sure of it.
    until("the void arrives", async || steady.void(ACCOUNT, pool(1), HoldId(2)).await.is_ok()).await;
    assert_eq!(available(&steady, 1).await, 90);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_starts_without_a_server_and_finds_it_later() {
    let mut server = Server::start().await;
    server.kill();
    let redis = Redis::new(&single(&server)).unwrap();
    assert!(redis.check().await.is_err());
    assert!(redis.is_open(ACCOUNT));
    assert_eq!(admit(&redis, 1, 1, 1).await, Err(RedisDeny::Unavailable(RedisError::Open)));
    let keeper = redis.clone();
    let keeper = tokio::spawn(async move { keeper.keep().await });
    server.again().await;
    until_closed(&redis).await;
    funded(&redis, 1, 5).await;
    admit(&redis, 1, 1, 5).await.unwrap();
    keeper.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_is_followed_and_its_pool_stays_behind() {
    let cluster = Cluster::start().await;
    let redis = connect(&config(&cluster.urls(), RedisMode::Cluster)).await;
    let run = funded(&redis, 1, 100).await;
    admit(&redis, 1, 1, 10).await.unwrap();
    let base = format!("test:{{s{}}}", shard_of(ACCOUNT));
    let slot: u16 = {
        let answer = cluster.servers[0].command(&format!("CLUSTER KEYSLOT {base}")).await;
        redis::from_redis_value(answer).unwrap()
    };
    let mut names = vec![];
    for server in &cluster.servers {
        let name: String = redis::from_redis_value(server.command("CLUSTER MYID").await).unwrap();
        names.push(name);
    }
    let from = usize::from(slot > 5460) + usize::from(slot > 10922);
    let to = (from + 1) % 3;
    let (source, target) = (&cluster.servers[from], &cluster.servers[to]);
    target.command(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", names[from])).await;
    source.command(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", names[to])).await;
    // From here on the source says ASK: what it has of the shard is not all of it any more.
    let deny = admit(&redis, 1, 2, 10).await.unwrap_err();
    assert!(is_other(&deny, &run), "{deny}");
    let keys: Vec<String> =
        redis::from_redis_value(source.command(&format!("CLUSTER GETKEYSINSLOT {slot} 100")).await).unwrap();
    assert!(keys.contains(&format!("{base}:money")), "{keys:?}");
    for key in &keys {
        source.command(&format!("MIGRATE 127.0.0.1 {} {key} 0 5000", target.port)).await;
    }
    let deny = admit(&redis, 1, 3, 10).await.unwrap_err();
    assert!(is_other(&deny, &run), "{deny}");
    for server in [target, source] {
        server.command(&format!("CLUSTER SETSLOT {slot} NODE {}", names[to])).await;
    }
    // And now MOVED.
    let deny = admit(&redis, 1, 4, 10).await.unwrap_err();
    assert!(is_other(&deny, &run), "{deny}");
    funded(&redis, 2, 70).await;
    admit(&redis, 2, 5, 70).await.unwrap();
    until("the map shows it", async || {
        let runs = redis.run_ids().await.unwrap();
        let all: usize = runs.iter().map(|(shards, _)| shards.len()).sum();
        assert_eq!(all, 256);
        runs.iter().any(|(shards, now)| shards.contains(&shard_of(ACCOUNT)) && *now != run)
    })
    .await;
}

async fn sentinels_of(sentinel: &Server, what: &str) -> usize {
    let known = sentinel.command(&format!("SENTINEL {what} main")).await;
    redis::from_redis_value::<Vec<redis::Value>>(known).unwrap().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_by_sentinel_is_followed() {
    let (mut primary, replica) = (Server::start().await, Server::start().await);
    follow(&replica, &primary).await;
    let folder = tempfile::tempdir().unwrap();
    let mut sentinels = vec![];
    for _ in 0..3 {
        let file = folder.path().join(format!("{}.conf", sentinels.len()));
        let settings = format!(
            "sentinel monitor main 127.0.0.1 {} 2\nsentinel down-after-milliseconds main 500\n\
             sentinel failover-timeout main 3000\n",
            primary.port
        );
        std::fs::write(&file, settings).unwrap();
        sentinels.push(Server::sentinel(&file).await);
    }
    for sentinel in &sentinels {
        until("the Sentinels know each other and the replica", async || {
            let state = sentinel.command("INFO sentinel").await;
            redis::from_redis_value::<String>(state).unwrap().contains("status=ok,address=127.0.0.1")
                && sentinels_of(sentinel, "SENTINELS").await == 2
                && sentinels_of(sentinel, "REPLICAS").await == 1
        })
        .await;
    }
    let urls: Vec<String> = sentinels.iter().map(Server::url).collect();
    let redis = connect(&config(&urls, RedisMode::Sentinel { primary: "main".to_owned() })).await;
    let run = funded(&redis, 1, 100).await;
    admit(&redis, 1, 1, 10).await.unwrap();
    primary.kill();
    until("the new primary answers", async || {
        let answer = admit(&redis, 1, 2, 10).await;
        answer.is_err_and(|deny| is_other(&deny, &run))
    })
    .await;
    funded(&redis, 2, 80).await;
    admit(&redis, 2, 3, 80).await.unwrap();
    let info: String = redis::from_redis_value(replica.command("INFO replication").await).unwrap();
    assert!(info.contains("role:master"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_and_users_are_taken_from_the_url() {
    let authority = Authority::new();
    let folder = tempfile::tempdir().unwrap();
    let (chain, key) = (folder.path().join("chain.pem"), folder.path().join("key.pem"));
    let (chain_pem, key_pem) = authority.server_pem("localhost");
    std::fs::write(&chain, chain_pem).unwrap();
    std::fs::write(&key, key_pem).unwrap();
    let port = free_port();
    let args = [
        "--tls-port".to_owned(),
        port.to_string(),
        "--tls-cert-file".to_owned(),
        chain.display().to_string(),
        "--tls-key-file".to_owned(),
        key.display().to_string(),
        "--tls-ca-cert-file".to_owned(),
        chain.display().to_string(),
        "--tls-auth-clients".to_owned(),
        "no".to_owned(),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let server = Server::with(Kind::Redis, &args).await;
    server.command("ACL SETUSER gate on >p@ss ~test:* &* +@all").await;
    let url = format!("rediss://gate:p%40ss@localhost:{port}");
    let ca = authority.ca_file();
    let redis =
        connect(&Config { ca_file: Some(ca), ..config(std::slice::from_ref(&url), RedisMode::Single) }).await;
    funded(&redis, 1, 5).await;
    admit(&redis, 1, 1, 5).await.unwrap();
    let other = Authority::new();
    let stranger =
        Config { ca_file: Some(other.ca_file()), ..config(std::slice::from_ref(&url), RedisMode::Single) };
    assert!(Redis::new(&stranger).unwrap().check().await.is_err());
    let wrong = url.replace("p%40ss", "wrong");
    let ca = authority.ca_file();
    let wrong = Config { ca_file: Some(ca), ..config(&[wrong], RedisMode::Single) };
    let error = Redis::new(&wrong).unwrap().check().await.unwrap_err();
    assert!(!error.to_string().contains("wrong"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unfit_server_is_refused_and_a_forgetful_one_is_told_of() {
    let server = Server::start().await;
    let redis = Redis::new(&single(&server)).unwrap();
    let warnings = redis.check().await.unwrap();
    assert!(warnings.len() == 1 && warnings[0].0.contains("appendonly"), "{warnings:?}");
    server.command("CONFIG SET maxmemory 100mb").await;
    redis.check().await.unwrap();
    server.command("CONFIG SET maxmemory-policy allkeys-lru").await;
    let error = redis.check().await.unwrap_err();
    assert!(matches!(&error, RedisError::Unfit(text) if text.contains("noeviction")), "{error}");
    server.command("CONFIG SET maxmemory 0").await;
    server.command("CONFIG SET appendonly yes").await;
    assert_eq!(redis.check().await, Ok(vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_server_places_nothing_and_ends_what_is_open() {
    let server = Server::start().await;
    server.command(WITHOUT_FUNCTIONS).await;
    let narrow = format!("redis://narrow:secret@127.0.0.1:{}", server.port);
    let stores = [connect(&single(&server)).await, connect(&config(&[narrow], RedisMode::Single)).await];
    funded(&stores[0], 1, 100).await;
    for (id, redis) in (1..).zip(&stores) {
        admit(redis, 1, id, 10).await.unwrap();
        server.command("CONFIG SET maxmemory 1mb").await;
        let deny = admit(redis, 1, 100 + id, 10).await.unwrap_err();
        assert!(matches!(&deny, RedisDeny::Unavailable(RedisError::Refused(_))), "{deny}");
        let ended = redis.void(ACCOUNT, pool(1), HoldId(id)).await;
        assert!(matches!(ended, Ok(Ended::Now(_))), "{ended:?}");
        server.command("CONFIG SET maxmemory 0").await;
    }
    assert_eq!(available(&stores[0], 1).await, 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn news_reach_who_listens_and_a_gap_is_told() {
    let mut server = Server::start().await;
    let redis = connect(&single(&server)).await;
    let (sender, mut news) = tokio::sync::mpsc::channel(16);
    let listener = redis.redis.clone();
    let listener = tokio::spawn(async move {
        listener.listen(&["one".to_owned(), "two".to_owned()], sender).await;
    });
    assert_eq!(news.recv().await, Some(News::Missed));
    redis.publish("two", b"\x00\xff").await.unwrap();
    let expected = News::Message { channel: "two".to_owned(), payload: vec![0, 255] };
    assert_eq!(news.recv().await, Some(expected));
    server.kill();
    server.again().await;
    assert_eq!(news.recv().await, Some(News::Missed));
    until("the message is taken", async || redis.publish("one", b"back").await.is_ok()).await;
    let expected = News::Message { channel: "one".to_owned(), payload: b"back".to_vec() };
    assert_eq!(news.recv().await, Some(expected));
    drop(news);
    listener.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_that_was_lost_never_shows_less_than_nothing() {
    let server = Server::start().await;
    let redis = connect(&single(&server)).await;
    funded(&redis, 1, 1_000).await;
    let day = Budget { period: Period::Day, amount: Amount::from_nano(100), zone: Zone::utc() };
    let key = Limits { budgets: vec![day], ..Limits::default() };
    let scopes = Scopes { key, ..Scopes::default() };
    let restore = async |id| {
        let deny = admit_within(&redis, 1, id, 60, &scopes).await.unwrap_err();
        let RedisDeny::BudgetUnknown(unknown) = deny else { panic!("{deny}") };
        redis.restore_budget(ACCOUNT, &unknown[0], Amount::ZERO).await.unwrap();
    };
    restore(1).await;
    admit_within(&redis, 1, 1, 60, &scopes).await.unwrap();
    let budgets = server.command("KEYS test:*:b:*").await;
    for budget in redis::from_redis_value::<Vec<String>>(budgets).unwrap() {
        server.command(&format!("DEL {budget}")).await;
    }
    restore(2).await;
    redis.void(ACCOUNT, pool(1), HoldId(1)).await.unwrap();
    admit_within(&redis, 1, 2, 60, &scopes).await.unwrap();
    assert!(matches!(admit_within(&redis, 1, 3, 60, &scopes).await, Err(RedisDeny::Limited { .. })));
}

#[test]
fn shards_are_the_same_in_every_release() {
    let shards: Vec<u16> = (1..=6).map(|account| shard_of(AccountId(account))).collect();
    assert_eq!(shards, [183, 13, 155, 56, 174, 20]);
}
