//! Keys of a fleet: what one node books all nodes know, with or without Redis, and after a cold start.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tollgate::config::checked::RedisMode;
use tollgate::fleet::keys::{Keys, first, kept_table};
use tollgate::ledger::port::{Ledger as _, NewKey};
use tollgate::ledger::postgres::Postgres;
use tollgate::pool::keys::{KeyTable, digest};
use tollgate::pool::{Pool, Snapshot};
use tollgate::settings::KeySettings;
use tollgate::store::redis::Redis;

use crate::support::postgres;
use crate::support::redis::{Kept, Server, config as redis_config, connect, until};

struct Node {
    pool: Arc<Pool>,
    keys: Arc<Keys>,
    folder: tempfile::TempDir,
    task: tokio::task::JoinHandle<()>,
    _redis: Kept,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn no_models() -> Snapshot {
    let text = "listen: { http: 127.0.0.1:1, admin: 127.0.0.1:2 }\nstore: { embedded: { path: d } }\n\
                providers: { p: { dialect: openai, base_url: \"http://h\", credential: k } }\n\
                models: { m: { price: { input: 1, output: 1 }, limits: { context: 9, output: 9 }, routes: [{ provider: p }] } }\n";
    let config = tollgate::config::parse(text, |_| None).unwrap_or_else(|e| panic!("{e}"));
    Snapshot::new(config.catalogue, config.routing).unwrap()
}

/// Postgres blocks: it is asked on a thread of its own.
async fn ask<T: Send + 'static>(
    ledger: &Postgres,
    work: impl FnOnce(&mut Postgres) -> T + Send + 'static,
) -> T {
    let mut ledger = ledger.clone();
    tokio::task::spawn_blocking(move || work(&mut ledger)).await.unwrap()
}

impl Node {
    async fn start(server: &Server, ledger: &Postgres) -> Self {
        let redis = connect(&redis_config(&[server.url()], RedisMode::Single)).await;
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_owned();
        let table = ask(ledger, move |ledger| first(ledger, &at)).await.unwrap();
        let pool = Arc::new(Pool::new(no_models(), table));
        let (client, ledger) = (Redis::clone(&redis), ledger.clone());
        let keys = Arc::new(Keys::new(client, ledger, Arc::clone(&pool), folder.path().to_owned()));
        let follower = Arc::clone(&keys);
        let task = tokio::spawn(async move { follower.run().await });
        Self { pool, keys, folder, task, _redis: redis }
    }

    fn knows(&self, key: &str) -> bool {
        knows(&self.pool.keys(), key)
    }

    fn kept(&self) -> KeyTable {
        kept_table(self.folder.path(), 0).unwrap()
    }
}

fn knows(table: &KeyTable, key: &str) -> bool {
    table.find(key, 0).is_some()
}

async fn make(ledger: &Postgres, key: &'static str) {
    ask(ledger, move |ledger| {
        let account = ledger.ensure_account("alpha", None, 1).unwrap();
        let (settings, hint) = (KeySettings::default(), key);
        let new = NewKey {
            digest: digest(key),
            account,
            hint,
            settings: &settings,
            now_ms: 1,
            account_name: "alpha",
            expires_ms: None,
        };
        ledger.ensure_key(&new).unwrap();
    })
    .await;
}

async fn revoke(ledger: &Postgres, key: &'static str) {
    ask(ledger, move |ledger| ledger.end_key(digest(key), 1, true).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_one_node_makes_and_revokes_is_known_and_dead_on_the_other() {
    let server = Server::start().await;
    let database = tokio::task::spawn_blocking(postgres::database).await.unwrap();
    let ledger = database.ledger();
    make(&ledger, "one").await;
    let (here, there) = (Node::start(&server, &ledger).await, Node::start(&server, &ledger).await);
    assert!(here.knows("one") && there.knows("one"));
    make(&ledger, "two").await;
    here.keys.changed().await.unwrap();
    assert!(here.knows("two"), "at once where it was made");
    until("there too", async || there.knows("two")).await;
    revoke(&ledger, "one").await;
    let revoked = Instant::now();
    here.keys.changed().await.unwrap();
    assert!(!here.knows("one"));
    until("it is dead there", async || !there.knows("one")).await;
    println!("dead on the other node after {:?}", revoked.elapsed());
    let set = server.command("KEYS *:revoked").await;
    assert!(format!("{set:?}").contains("revoked"), "and admission refuses it: {set:?}");
    for node in [&here, &there] {
        until("it is on disk", async || {
            let kept = node.kept();
            !knows(&kept, "one") && knows(&kept, "two")
        })
        .await;
        let mode = |name: &str| {
            use std::os::unix::fs::PermissionsExt as _;
            std::fs::metadata(node.folder.path().join(name)).unwrap().permissions().mode() & 0o777
        };
        assert_eq!((mode("keys.base"), mode("keys.log")), (0o600, 0o600));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_nobody_announced_or_that_redis_forgot_is_found_in_the_ledger() {
    let mut server = Server::start().await;
    let database = tokio::task::spawn_blocking(postgres::database).await.unwrap();
    let ledger = database.ledger();
    make(&ledger, "one").await;
    let node = Node::start(&server, &ledger).await;
    make(&ledger, "two").await;
    until("it is found without a word", async || node.knows("two")).await;
    server.kill();
    revoke(&ledger, "one").await;
    until("without Redis too", async || !node.knows("one")).await;
    make(&ledger, "three").await;
    server.again().await;
    until("and after it came back empty", async || node.knows("three")).await;
    until("changes can be announced again", async || node.keys.changed().await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_starts_with_the_keys_on_disk_when_nobody_answers() {
    let server = Server::start().await;
    let database = tokio::task::spawn_blocking(postgres::database).await.unwrap();
    let ledger = database.ledger();
    make(&ledger, "one").await;
    let node = Node::start(&server, &ledger).await;
    let gone = tollgate::config::checked::Postgres {
        url: tollgate::secret::Secret::new("postgres://nobody@127.0.0.1:1/none"),
        ..database.config()
    };
    let gone = Postgres::new(&gone).unwrap();
    let at = node.folder.path().to_owned();
    let table = ask(&gone, move |ledger| first(ledger, &at)).await.unwrap();
    assert!(knows(&table, "one") && !knows(&table, "two"));
    damage(&node.folder.path().join("keys.base"));
    let at = node.folder.path().to_owned();
    assert!(ask(&gone, move |ledger| first(ledger, &at)).await.is_err(), "a damaged one is none");
}

fn damage(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file, bytes).unwrap();
}
