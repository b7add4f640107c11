//! What one node sees of an upstream, all nodes know: over a real Redis, with two nodes' worth of boards.

use std::sync::Arc;
use std::time::{Duration, Instant};

use filters::ids::{EndpointId, ModelId};
use filters::preferences::Preferences;
use filters::upstream::board::{Ask, Found, Outcome, Plan};
use filters::upstream::failure::Failure;
use filters::upstream::watchdog::{Form, Timing};
use filters::upstream::weight::Health as Weight;
use tollgate::config;
use tollgate::config::checked::RedisMode;
use tollgate::fleet::health::{Health, SHARD};
use tollgate::pool::keys::KeyTable;
use tollgate::pool::upstreams::{Asked, Leg};
use tollgate::pool::{Pool, Snapshot};
use tollgate::store::redis::Redis;

use crate::support::redis::{Kept, Kind, Server, config as redis_config, connect, until};

const SERVED: Outcome = Outcome::Served { tokens_per_second: None };

/// What a node has of upstreams, and the task that shares it.
struct Node {
    pool: Arc<Pool>,
    redis: Kept,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn snapshot(routes: &[(&str, u32)]) -> Snapshot {
    use std::fmt::Write as _;
    let mut text =
        "listen: { http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }\nstore: { embedded: { path: d } }\n\
                    routing: { explore: false }\nproviders:\n"
            .to_owned();
    for (provider, _) in routes {
        writeln!(text, "  {provider}: {{ dialect: openai, base_url: \"http://host\", credential: k }}")
            .unwrap();
    }
    let of = |(provider, weight): &(&str, u32)| format!("{{ provider: {provider}, weight: {weight} }}");
    let list = routes.iter().map(of).collect::<Vec<_>>().join(", ");
    writeln!(
        text,
        "models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{list}] }} }}"
    )
    .unwrap();
    let config = config::parse(&text, |_| None).unwrap_or_else(|e| panic!("{e}"));
    Snapshot::new(config.catalogue, config.routing).unwrap()
}

impl Node {
    async fn start(server: &Server, routes: &[(&str, u32)]) -> Self {
        Self::start_at(server, &server.url(), routes).await
    }

    async fn start_at(server: &Server, url: &str, routes: &[(&str, u32)]) -> Self {
        let redis = connect(&redis_config(&[url.to_owned()], RedisMode::Single)).await;
        let pool = Arc::new(Pool::new(snapshot(routes), KeyTable::default()));
        let health = Health::new(Redis::clone(&redis), Arc::clone(&pool));
        let task = tokio::spawn(async move { health.run().await });
        let node = Self { pool, redis, task };
        until("the node is heard", async || node.is_known(server).await).await;
        node
    }

    async fn is_known(&self, server: &Server) -> bool {
        let mut link = server.link().await;
        let key = self.redis.channel(SHARD, "tellers");
        let known: Vec<String> = redis::cmd("HKEYS").arg(&key).query_async(&mut link).await.unwrap();
        let channel = self.redis.channel(SHARD, "health");
        let listeners: (String, usize) =
            redis::cmd("PUBSUB").arg("NUMSUB").arg(&channel).query_async(&mut link).await.unwrap();
        !known.is_empty() && known.len() == listeners.1
    }

    fn find(&self) -> Found {
        let snapshot = self.pool.load();
        let models: Vec<ModelId> = self.models();
        let preferences = Preferences::default();
        let ask = Ask { models: &models, form: Form::Whole, prompt_tokens: 1, preferences: &preferences };
        snapshot.upstreams.candidates(&ask)
    }

    fn models(&self) -> Vec<ModelId> {
        self.pool.load().upstreams.model("m", filters::dialect::Operation::Chat).into_iter().collect()
    }

    fn plan(&self) -> Plan {
        match self.find() {
            Found::Plan(plan) => plan,
            other @ (Found::AllRefused { .. } | Found::NoneFits(_)) => panic!("{other:?}"),
        }
    }

    fn order(&self) -> Vec<usize> {
        let plan = self.plan();
        self.pool.load().upstreams.finish(plan.pass);
        plan.order.iter().map(|route| route.endpoint.0).collect()
    }

    /// Begins a call to an endpoint, if it may.
    fn begin(&self, n: usize) -> Option<Leg> {
        let mut plan = self.plan();
        let route = plan.order.iter().chain(&plan.fall_backs).find(|route| route.endpoint.0 == n);
        let route = *route?;
        let upstreams = Arc::clone(&self.pool.load().upstreams);
        let asked = upstreams.begin(&mut plan.pass, route, Form::Whole, false);
        upstreams.finish(plan.pass);
        match asked {
            Asked::Go(leg) => Some(leg),
            Asked::Refused(_) | Asked::BudgetSpent => None,
        }
    }

    fn fails(&self, n: usize) {
        let failure = Failure::Status(500);
        let leg = self.begin(n).expect("goes");
        leg.ended(Outcome::Failed { failure, wait: None, timing: Timing::default(), reused: false });
    }

    fn serves(&self, n: usize) {
        let mut leg = self.begin(n).expect("goes");
        leg.answered(Timing::default());
        leg.ended(SERVED);
    }

    fn factor(&self, n: usize) -> f64 {
        self.pool.load().upstreams.glances()[n].1.factor
    }

    fn is_open(&self, n: usize) -> bool {
        !self.pool.load().upstreams.glances()[n].1.admits()
    }
}

/// Ends an open time, as its end would.
async fn let_probe(server: &Server, node: &Node, place: &str) {
    let script = "local it = cjson.decode(redis.call('HGET', KEYS[1], ARGV[1])) it.u = 1 it.g = it.g + 1 \
                  it.g = string.format('%.0f', it.g) redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(it))";
    let mut link = server.link().await;
    let key = node.redis.channel(SHARD, "places");
    let _done: redis::Value =
        redis::cmd("EVAL").arg(script).arg(1).arg(key).arg(place).query_async(&mut link).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_one_node_opened_refuses_on_the_other() {
    let server = Server::start().await;
    let routes = [("a", 100), ("b", 50)];
    let (one, two) = (Node::start(&server, &routes).await, Node::start(&server, &routes).await);
    assert_eq!(two.order(), [0, 1]);
    for _ in 0..5 {
        one.fails(0);
    }
    let opened = Instant::now();
    assert_eq!(one.order(), [1], "at once where it was seen");
    until("the other refuses it", async || two.order() == [1]).await;
    println!("refused on the other node after {:?}", opened.elapsed());
    assert!(two.factor(0) < 0.3, "and weighs little there: {}", two.factor(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_does_so_without_functions_and_over_valkey() {
    let plain = Server::start().await;
    plain.command("ACL SETUSER narrow on >secret ~* &* +@all -function -fcall").await;
    let narrow = format!("redis://narrow:secret@127.0.0.1:{}", plain.port);
    let valkey = Server::with(Kind::Valkey, &[]).await;
    for (server, url) in [(&plain, narrow), (&valkey, valkey.url())] {
        let routes = [("a", 100), ("b", 50)];
        let one = Node::start_at(server, &url, &routes).await;
        let two = Node::start_at(server, &url, &routes).await;
        for _ in 0..5 {
            one.fails(0);
        }
        until("the other refuses it", async || two.order() == [1]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_several_nodes_add_up() {
    let server = Server::start().await;
    let routes = [("a", 100), ("b", 50)];
    let (one, two) = (Node::start(&server, &routes).await, Node::start(&server, &routes).await);
    for _ in 0..3 {
        one.fails(0);
        two.fails(0);
    }
    until("both refuse it", async || one.is_open(0) && two.is_open(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_all_nodes_one_call_at_a_time_probes_and_three_successes_close_it_everywhere() {
    let server = Server::start().await;
    let routes = [("a", 100), ("b", 50)];
    let mut nodes = vec![];
    for _ in 0..3 {
        nodes.push(Node::start(&server, &routes).await);
    }
    for _ in 0..5 {
        nodes[0].fails(0);
    }
    until("all refuse it", async || nodes.iter().all(|node| node.order() == [1])).await;
    let_probe(&server, &nodes[0], "a/m").await;
    let (mut probes, mut served) = (vec![], 0);
    let mut most = 0;
    until("it is closed everywhere", async || {
        for node in &nodes {
            if node.order().first() == Some(&0)
                && node.is_half_open()
                && let Some(leg) = node.begin(0)
            {
                probes.push(leg);
            }
        }
        most = most.max(probes.len());
        // It hangs for as long as a look takes, so that another could begin meanwhile.
        if probes.len() == 1 && served < 3 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let mut leg = probes.remove(0);
            leg.answered(Timing::default());
            leg.ended(SERVED);
            served += 1;
        }
        nodes.iter().all(|node| !node.is_half_open() && !node.is_open(0))
    })
    .await;
    assert_eq!((most, served), (1, 3));
}

impl Node {
    /// Whether calls to the first endpoint would be probes.
    fn is_half_open(&self) -> bool {
        let upstreams = Arc::clone(&self.pool.load().upstreams);
        upstreams.with_board(|board, now| {
            !board.is_back(now, &[EndpointId(0)]) && board.endpoint(now, EndpointId(0)).is_some_and(|it| it.1)
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_refuse_one_node_at_a_time_tries() {
    let server = Server::start().await;
    let (one, two) = (Node::start(&server, &[("a", 1)]).await, Node::start(&server, &[("a", 1)]).await);
    for _ in 0..5 {
        one.fails(0);
    }
    until("both refuse it", async || one.is_open(0) && two.is_open(0)).await;
    let find = async |node: &Node| {
        let (models, preferences) = (node.models(), Preferences::default());
        let ask = Ask { models: &models, form: Form::Whole, prompt_tokens: 1, preferences: &preferences };
        node.pool.load().upstreams.candidates_of_fleet(&ask).await
    };
    let mut plan = None;
    until("one may try", async || {
        plan = match find(&one).await {
            Found::Plan(plan) => Some(plan),
            Found::AllRefused { .. } | Found::NoneFits(_) => None,
        };
        plan.is_some()
    })
    .await;
    let mut plan = plan.unwrap();
    let upstreams = Arc::clone(&one.pool.load().upstreams);
    let Asked::Go(leg) = upstreams.begin(&mut plan.pass, plan.order[0], Form::Whole, true) else {
        panic!("goes")
    };
    for _ in 0..20 {
        assert!(matches!(find(&two).await, Found::AllRefused { .. }), "the other's turn");
    }
    let failure = Failure::Status(500);
    leg.ended(Outcome::Failed { failure, wait: None, timing: Timing::default(), reused: false });
    upstreams.finish(plan.pass);
    until("then the other", async || matches!(find(&two).await, Found::Plan(_))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rest_reaches_the_other_node_and_ends_there_when_something_is_served() {
    let server = Server::start().await;
    let routes = [("a", 100), ("b", 50)];
    let (one, two) = (Node::start(&server, &routes).await, Node::start(&server, &routes).await);
    let (failure, wait) = (Failure::Status(429), Some(Duration::from_millis(700)));
    let leg = one.begin(0).unwrap();
    leg.ended(Outcome::Failed { failure, wait, timing: Timing::default(), reused: false });
    until("it rests on the other", async || two.order() == [1]).await;
    until("its rest is over", async || one.order().contains(&0) && two.order().contains(&0)).await;
    // What is served now is the trial.
    one.serves(0);
    until("nobody needs a trial", async || {
        let upstreams = Arc::clone(&two.pool.load().upstreams);
        let (models, preferences) = (two.models(), Preferences::default());
        let ask = Ask { models: &models, form: Form::Whole, prompt_tokens: 1, preferences: &preferences };
        let stands = upstreams.with_board(|board, now| board.survey(now, models[0], &ask));
        stands[0].rest == filters::upstream::rest::Standing::Free
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_redis_a_node_judges_by_itself_and_with_it_the_fleet_does_again() {
    let mut server = Server::start().await;
    let routes = [("a", 100), ("b", 50)];
    let (one, two) = (Node::start(&server, &routes).await, Node::start(&server, &routes).await);
    server.kill();
    for _ in 0..5 {
        one.fails(0);
    }
    assert_eq!((one.order(), two.order()), (vec![1], vec![0, 1]), "as on a single node");
    server.again().await;
    until("both share again", async || {
        let mut link = server.link().await;
        let key = one.redis.channel(SHARD, "tellers");
        redis::cmd("HLEN").arg(&key).query_async::<usize>(&mut link).await.is_ok_and(|known| known == 2)
    })
    .await;
    for _ in 0..5 {
        two.fails(1);
    }
    until("what is new is heard", async || one.is_open(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fleets_weight_is_what_one_node_would_have_made_of_all_calls() {
    let server = Server::start().await;
    let (one, two) = (Node::start(&server, &[("a", 1)]).await, Node::start(&server, &[("a", 1)]).await);
    let now = Instant::now();
    let mut all = Weight::new(now);
    for n in 0..40 {
        all.record(now, n % 4 != 0);
        if n % 4 == 0 { one.fails(0) } else { one.serves(0) }
    }
    let expected = all.factor(now);
    until("the other has it", async || (two.factor(0) - expected).abs() < 0.05).await;
}
