//! The fleet's catalogue: taken over as a whole or refused, heard of or found, and there after a cold start.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tollgate::books::Books;
use tollgate::config::checked::{Postgres as PostgresConfig, RedisMode};
use tollgate::config::{self, Config, Version};
use tollgate::drain::Drain;
use tollgate::fleet::catalogue::{Catalogues, Published, first, kept_catalogue, publish};
use tollgate::ledger::postgres::Postgres;
use tollgate::ops::Metrics;
use tollgate::ops::notify::Notify;
use tollgate::pool::keys::KeyTable;
use tollgate::pool::{Pool, Snapshot};
use tollgate::proxy::Bodies;
use tollgate::reload::{Fixed, Live, Outcome, Reloader, Source};
use tollgate::secret::Secret;
use tollgate::status::StatusPage;
use tollgate::store::redis::Redis;

use crate::support::postgres::{self, Database};
use crate::support::redis::{Kept, Server, config as redis_config, connect, until};

const NODE: &str = "listen: { http: 127.0.0.1:1, admin: 127.0.0.1:2 }\nstore: { path: d, redis: { urls: [\"redis://r\"] }, \
                    postgres: { url: postgres://p/t } }\n";

struct Node {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    reloader: Arc<Reloader>,
    redis: Kept,
    folder: tempfile::TempDir,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn catalogue(model: &str) -> String {
    format!(
        "providers: {{ p: {{ dialect: openai, base_url: \"http://h\", credential: \"${{HOME}}\" }} }}\n\
         models: {{ {model}: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, \
         routes: [{{ provider: p }}] }} }}\n"
    )
}

impl Node {
    async fn start(server: &Server, database: &Database) -> Self {
        let redis = connect(&redis_config(&[server.url()], RedisMode::Single)).await;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tollgate.yaml");
        std::fs::write(&file, NODE).unwrap();
        let config = config::parse(NODE, |_| None).unwrap_or_else(|e| panic!("{e}"));
        assert!(config.catalogue_of_fleet);
        let fixed = Fixed::of(&config);
        let Config { catalogue, routing, bounds, timers, status: page, .. } = config;
        let snapshot = Snapshot::new(catalogue, routing).unwrap();
        let pool = Arc::new(Pool::new(snapshot, KeyTable::default()));
        let metrics = Arc::new(Metrics::new().unwrap());
        let live = Live {
            pool: Arc::clone(&pool),
            books: Arc::new(Books::new(Box::new(database.ledger()), None)),
            bodies: Bodies::new(bounds.bodies_bytes_max),
            bounds: Arc::new(ArcSwap::from_pointee(bounds)),
            drain: Arc::new(Drain::default()),
            metrics: Arc::clone(&metrics),
            status_page: Arc::new(StatusPage::new(page)),
            notify: Arc::new(Notify::from_env(false)),
            status: String::new(),
        };
        let source = Source { file, version: Version::of(NODE) };
        let reloader = Reloader::new(source, timers, fixed, live).with_catalogue(Published::default());
        let reloader = Arc::new(reloader);
        let (client, at) = (Redis::clone(&redis), folder.path().to_owned());
        let follower = Catalogues::new(client, database.ledger(), Arc::clone(&reloader), at);
        let task = tokio::spawn(async move { follower.run().await });
        Self { pool, metrics, reloader, redis, folder, task }
    }

    fn has(&self, model: &str) -> bool {
        self.pool.load().catalogue.model(model).is_some()
    }

    fn version(&self) -> Option<i64> {
        self.reloader.published_version()
    }
}

async fn in_ledger(database: &Database, text: String) -> i64 {
    let ledger = database.ledger();
    tokio::task::spawn_blocking(move || ledger.publish_catalogue(&text, "test", 1).unwrap()).await.unwrap()
}

async fn begin(ledger: Postgres, folder: &Path) -> Option<Published> {
    let folder = folder.to_owned();
    tokio::task::spawn_blocking(move || first(&ledger, &folder).ok()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_published_serves_on_every_node_and_what_has_faults_is_refused_as_a_whole() {
    let server = Server::start().await;
    let database = tokio::task::spawn_blocking(postgres::database).await.unwrap();
    let (one, two) = (Node::start(&server, &database).await, Node::start(&server, &database).await);
    assert_eq!((one.version(), one.has("m")), (Some(0), false));
    let told = publish(&database.ledger(), &one.redis, &catalogue("m"), "test").await.unwrap();
    assert_eq!(told, (1, None));
    until("both have it", async || one.has("m") && two.has("m")).await;
    until("and keep it", async || kept_catalogue(two.folder.path()).is_some_and(|kept| kept.version == 1))
        .await;
    let kept = kept_catalogue(two.folder.path()).unwrap().text;
    assert!(kept.contains("${HOME}"), "no credential is in it: {kept}");

    let wrong = catalogue("other").replace("input: 1", "input: \"-1\"");
    publish(&database.ledger(), &one.redis, &wrong, "test").await.unwrap();
    until("both refuse it", async || [&one, &two].iter().all(|it| it.metrics.config.refused.get() == 1))
        .await;
    assert_eq!((one.version(), one.has("m"), one.has("other")), (Some(1), true, false));

    publish(&database.ledger(), &one.redis, &catalogue("other"), "test").await.unwrap();
    until("the next one serves", async || one.has("other") && two.has("other")).await;
    assert_eq!((one.version(), one.has("m"), one.metrics.config.refused.get()), (Some(3), false, 0));

    let reloader = Arc::clone(&one.reloader);
    let outcome = tokio::task::spawn_blocking(move || reloader.reload("a test")).await.unwrap();
    assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
    assert!(one.has("other"), "a reload of the node's own file keeps it");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_announced_is_found_in_the_ledger_and_a_cold_start_uses_the_last_good_one() {
    let mut server = Server::start().await;
    let database = tokio::task::spawn_blocking(postgres::database).await.unwrap();
    let node = Node::start(&server, &database).await;
    in_ledger(&database, catalogue("m")).await;
    until("it is found", async || node.has("m")).await;
    server.kill();
    in_ledger(&database, catalogue("n")).await;
    until("without Redis too", async || node.has("n")).await;
    until("and kept", async || kept_catalogue(node.folder.path()).is_some_and(|kept| kept.version == 2))
        .await;
    let url = Secret::new("postgres://nobody@127.0.0.1:1/none");
    let gone = Postgres::new(&PostgresConfig { url, ..database.config() }).unwrap();
    let cold = begin(gone.clone(), node.folder.path()).await.unwrap();
    assert_eq!((cold.version, cold.text), (2, catalogue("n")));
    assert_eq!(begin(gone, tempfile::tempdir().unwrap().path()).await, None);
}
