//! Everything that can break does, under load, and afterwards every nano-dollar is where it belongs.
//!
//! Three nodes, one Redis, one Postgres; each node reaches either over a link of its own. A round draws one fault or two
//! that overlap, by seed, while callers of many accounts call: whole, streamed, leaving, failing, without money. Then all
//! is mended, and within a bounded time nothing may be left of it: no hold, no frozen money, nothing on its way; every
//! call that its caller saw to its end is charged once and exactly, one that failed not at all.
//!
//! `scripts/chaos [rounds] [seed]` plays at length; `TOLLGATE_CHAOS_ONLY=<fault>` plays one kind of fault alone.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use filters::ids::AccountId;
use filters::money::Amount;
use rand_core::RngCore as _;
use rand_pcg::Pcg64Mcg;
use tokio::task::{JoinHandle, block_in_place};
use tollgate::journal::Pool;
use tollgate::ledger::Ledger as _;
use tollgate::ledger::port::{Movement, NewKey, What};
use tollgate::ledger::postgres::{Drift, PoolSeen};
use tollgate::mock::Mock;
use tollgate::pool::keys::{digest, hint};
use tollgate::settings::KeySettings;
use tollgate::store::redis::shard_of;

use crate::support::link::Link;
use crate::support::{Call, Caller, Gateway, Setup, postgres, redis, script, upstream};

const ROUNDS: u64 = 4;
const SEED: u64 = 202;
const NODES: usize = 3;
/// Accounts that never run out, that do, and the one that half of all calls are made by.
const RICH: usize = 12;
const POOR: usize = 6;
const CALLERS: usize = 16;
const RICH_NANO: i64 = 20_000_000_000;
/// What a poor account gets before each round: some holds, and a score of calls.
const POOR_NANO: i64 = 2_000_000;
/// What 10 and 5 tokens cost, of `gpt-a` and of `gpt-b`.
const WHOLE_NANO: i64 = 75_000;
const WHOLE_NANO_MAX: i64 = 150_000;
/// An account that has so much can place a hold.
const HOLD_NANO_MAX: i64 = 1_000_000;
/// After the last fault is mended nothing may be left of it after so long: a hold that nobody touches any more is given
/// up after ten seconds, and looked for every two.
const QUIET_MAX: Duration = Duration::from_secs(45);
const LOOK: Duration = Duration::from_millis(50);

/// What may break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    NodeKilled,
    NodeStopped,
    RedisKilled,
    RedisLost,
    RedisFlushed,
    RedisFrozen,
    /// A replica that is behind becomes the primary.
    RedisPromoted,
    /// The same, and one node goes on with the old one for a while.
    RedisSplit,
    RedisSlow,
    RedisUnreachable,
    PostgresKilled,
    PostgresCrashed,
    PostgresSlow,
    PostgresUnreachable,
}

/// Of what; two faults of a round are not of the same.
#[derive(PartialEq, Eq)]
enum Realm {
    Node,
    Redis,
    Postgres,
}

impl Fault {
    const ALL: [Self; 14] = [
        Self::NodeKilled,
        Self::NodeStopped,
        Self::RedisKilled,
        Self::RedisLost,
        Self::RedisFlushed,
        Self::RedisFrozen,
        Self::RedisPromoted,
        Self::RedisSplit,
        Self::RedisSlow,
        Self::RedisUnreachable,
        Self::PostgresKilled,
        Self::PostgresCrashed,
        Self::PostgresSlow,
        Self::PostgresUnreachable,
    ];

    fn realm(self) -> Realm {
        match self {
            Self::NodeKilled | Self::NodeStopped => Realm::Node,
            Self::RedisKilled
            | Self::RedisLost
            | Self::RedisFlushed
            | Self::RedisFrozen
            | Self::RedisPromoted
            | Self::RedisSplit
            | Self::RedisSlow
            | Self::RedisUnreachable => Realm::Redis,
            Self::PostgresKilled | Self::PostgresCrashed | Self::PostgresSlow | Self::PostgresUnreachable => {
                Realm::Postgres
            }
        }
    }
}

/// How a call went, as its caller saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// With what it costs.
    Whole(i64),
    /// An error status.
    Failed,
    /// It began and did not end: broken off, an error inside, or its caller left.
    Cut,
}

#[derive(Default)]
struct Told {
    /// By request id.
    calls: HashMap<String, Seen>,
    /// What callers saw, by kind.
    kinds: BTreeMap<String, u64>,
    /// What was broken in this round by now.
    broken: Vec<(Fault, usize)>,
    /// Nodes that were killed in this round.
    killed: Vec<SocketAddr>,
}

/// The load of a round.
struct Load {
    until: Arc<AtomicBool>,
    callers: Vec<JoinHandle<()>>,
}

impl Load {
    async fn end(self) {
        self.until.store(true, Ordering::Release);
        for caller in self.callers {
            caller.await.expect("a caller");
        }
    }
}

struct World {
    rng: Pcg64Mcg,
    seed: u64,
    redis: redis::Server,
    /// Another that goes on for a while.
    old: Option<redis::Server>,
    postgres: postgres::Server,
    database: Arc<postgres::Database>,
    to_redis: Vec<Link>,
    to_postgres: Vec<Link>,
    nodes: Vec<Gateway>,
    down: Vec<bool>,
    mocks: Arc<Vec<Mock>>,
    accounts: Arc<Vec<(AccountId, String)>>,
    told: Arc<Mutex<Told>>,
    faults: BTreeMap<Fault, u64>,
    top_ups: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn no_chaos_loses_or_doubles_a_charge() {
    let rounds = number("TOLLGATE_CHAOS").unwrap_or(ROUNDS);
    let seed = number("TOLLGATE_SEED").unwrap_or(SEED);
    let mut world = World::new(seed).await;
    let mut slowest = Duration::ZERO;
    world.warm_up().await;
    for round in 1..=rounds {
        let faults = world.round().await;
        let (quiet, last) = world.settle_down(&format!("seed {seed}, round {round}, {faults:?}")).await;
        slowest = slowest.max(quiet);
        println!("round {round}: {faults:?}, quiet after {:.1} s, last {last}", quiet.as_secs_f64());
    }
    world.close_down();
    println!(
        "seed {seed}: {rounds} rounds, quiet after {:.1} s at most\n{}",
        slowest.as_secs_f64(),
        world.report()
    );
    let told = world.told.lock().unwrap();
    let avoidable: Vec<_> = told.kinds.iter().filter(|(kind, _)| is_avoidable(kind)).collect();
    assert!(avoidable.is_empty(), "seed {seed}: callers saw {avoidable:?}");
}

impl World {
    async fn new(seed: u64) -> Self {
        let redis = redis::Server::with(redis::Kind::Redis, &["--appendonly", "yes"]).await;
        let (server, database) = block_in_place(|| {
            let server = postgres::Server::start_durable();
            let database = server.database();
            (server, database)
        });
        let mocks =
            vec![upstream(script("{}")).await, upstream(script("{}")).await, upstream(script("{}")).await];
        let accounts = block_in_place(|| open_accounts(&database));
        let mut world = Self {
            rng: Pcg64Mcg::new(u128::from(seed) << 1 | 1),
            seed,
            redis,
            old: None,
            postgres: server,
            database: Arc::new(database),
            to_redis: vec![],
            to_postgres: vec![],
            nodes: vec![],
            down: vec![false; NODES],
            mocks: Arc::new(mocks),
            accounts: Arc::new(accounts),
            told: Arc::default(),
            faults: BTreeMap::new(),
            top_ups: 0,
        };
        for _ in 0..NODES {
            world.add_node().await;
        }
        world
    }

    async fn add_node(&mut self) {
        let to_redis = Link::start(loopback(self.redis.port)).await;
        let to_postgres = Link::start(loopback(self.postgres.port)).await;
        let store = format!(
            "path: ./data, redis: {{ urls: [\"redis://{}\"] }}, postgres: {{ url: \"postgres://tollgate@{}/{}\" }}",
            to_redis.address, to_postgres.address, self.database.name
        );
        let addresses: Vec<SocketAddr> = self.mocks.iter().map(Mock::address).collect();
        let setup = Setup::new(&addresses)
            .store(&store)
            .providers("first_byte: 5s, first_event: 5s")
            .other_model("sort: weight")
            .log("warn,tollgate=info");
        self.nodes.push(block_in_place(|| setup.start()));
        self.to_redis.push(to_redis);
        self.to_postgres.push(to_postgres);
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.rng.next_u64() % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(u64::try_from(bound).unwrap())).unwrap()
    }

    /// The one place where time passes on purpose: how long a fault lasts is the input of this test.
    async fn pass(&mut self, from_ms: u64, to_ms: u64) {
        let ms = from_ms + self.below(to_ms - from_ms);
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    fn draw(&mut self) -> Vec<(Fault, usize)> {
        let only = std::env::var("TOLLGATE_CHAOS_ONLY").unwrap_or_default();
        let mut all = Fault::ALL.to_vec();
        if !only.is_empty() {
            let names: Vec<&str> = only.split(',').collect();
            all.retain(|fault| names.contains(&format!("{fault:?}").as_str()));
        }
        let (at, node) = (self.index(all.len()), self.index(NODES));
        let first = all[at];
        let mut drawn = vec![(first, node)];
        all.retain(|fault| fault.realm() != first.realm());
        if !all.is_empty() && self.below(5) < 3 {
            let (at, node) = (self.index(all.len()), self.index(NODES));
            drawn.push((all[at], node));
        }
        drawn
    }

    /// Nodes have learnt who calls, and have some money of their own for them.
    async fn warm_up(&mut self) {
        let load = self.load();
        self.pass(2_500, 2_600).await;
        load.end().await;
        self.settle_down("before the first round").await;
    }

    async fn round(&mut self) -> Vec<Fault> {
        self.top_up();
        {
            let mut told = self.told.lock().unwrap();
            told.broken.clear();
            told.killed.clear();
        }
        let watch = Watch::start(Arc::clone(&self.database));
        let load = self.load();
        let weather =
            tokio::spawn(weather(Arc::clone(&self.mocks), self.rng.next_u64(), Arc::clone(&load.until)));
        let drawn = self.draw();
        self.pass(300, 1_200).await;
        for (fault, node) in &drawn {
            *self.faults.entry(*fault).or_default() += 1;
            self.told.lock().unwrap().broken.push((*fault, *node));
            self.strike(*fault, *node).await;
            self.pass(100, 1_200).await;
        }
        for (fault, node) in drawn.iter().rev() {
            self.mend(*fault, *node).await;
            self.pass(50, 600).await;
        }
        self.start_what_is_down().await;
        self.pass(200, 800).await;
        load.end().await;
        weather.await.expect("the weather");
        for mock in self.mocks.iter() {
            mock.set_script(script("{}"));
        }
        watch.stop(self.seed);
        drawn.into_iter().map(|(fault, _)| fault).collect()
    }

    async fn strike(&mut self, fault: Fault, node: usize) {
        match fault {
            Fault::NodeKilled => {
                self.told.lock().unwrap().killed.push(self.nodes[node].http);
                self.nodes[node].kill();
                self.down[node] = true;
            }
            Fault::NodeStopped => self.nodes[node].signal("-TERM"),
            Fault::RedisKilled => self.redis.kill(),
            Fault::RedisLost => {
                self.redis.kill();
                let kept = if self.below(2) == 0 { "yes" } else { "no" };
                self.redis = redis::Server::with(redis::Kind::Redis, &["--appendonly", kept]).await;
            }
            Fault::RedisFlushed => {
                self.redis.command("FLUSHALL").await;
            }
            Fault::RedisFrozen => self.redis.freeze(),
            Fault::RedisPromoted => {
                self.promote().await;
                self.lead_all_to_redis();
            }
            Fault::RedisSplit => {
                self.promote().await;
                for (at, link) in self.to_redis.iter().enumerate() {
                    if at != node {
                        link.lead_to(loopback(self.redis.port));
                    }
                }
            }
            Fault::RedisSlow => {
                let ms = 5 + self.below(60);
                self.to_redis[node].slow(Duration::from_millis(ms));
            }
            Fault::RedisUnreachable => self.to_redis[node].silence(),
            Fault::PostgresKilled => block_in_place(|| self.postgres.kill()),
            Fault::PostgresCrashed => block_in_place(|| self.postgres.crash()),
            Fault::PostgresSlow => {
                let ms = 20 + self.below(200);
                self.to_postgres[node].slow(Duration::from_millis(ms));
            }
            Fault::PostgresUnreachable => self.to_postgres[node].silence(),
        }
    }

    async fn mend(&mut self, fault: Fault, node: usize) {
        match fault {
            Fault::NodeKilled => self.try_start(node),
            Fault::NodeStopped => {
                block_in_place(|| self.nodes[node].wait());
                self.down[node] = true;
                self.try_start(node);
            }
            Fault::RedisKilled => self.redis.again().await,
            Fault::RedisLost | Fault::RedisPromoted => {
                self.lead_all_to_redis();
                self.old = None;
            }
            Fault::RedisSplit => {
                self.to_redis[node].lead_to(loopback(self.redis.port));
                self.old = None;
            }
            Fault::RedisFlushed => {}
            Fault::RedisFrozen => self.redis.thaw(),
            Fault::RedisSlow => self.to_redis[node].heal(),
            Fault::RedisUnreachable => {
                // Half of the time what was held back never arrives.
                if self.below(2) == 0 {
                    self.to_redis[node].cut();
                }
                self.to_redis[node].heal();
            }
            Fault::PostgresKilled | Fault::PostgresCrashed => block_in_place(|| self.postgres.restart()),
            Fault::PostgresSlow => self.to_postgres[node].heal(),
            Fault::PostgresUnreachable => {
                if self.below(2) == 0 {
                    self.to_postgres[node].cut();
                }
                self.to_postgres[node].heal();
            }
        }
    }

    /// A replica that has missed the last part of a second becomes the primary.
    async fn promote(&mut self) {
        let feed = Link::start(loopback(self.redis.port)).await;
        let replica = redis::Server::with(redis::Kind::Redis, &["--appendonly", "yes"]).await;
        replica.command(&format!("REPLICAOF 127.0.0.1 {}", feed.address.port())).await;
        redis::until("the replica follows", async || {
            let info: String = ::redis::from_redis_value(replica.command("INFO replication").await).unwrap();
            info.contains("master_link_status:up")
        })
        .await;
        self.pass(50, 300).await;
        feed.silence();
        self.pass(50, 800).await;
        replica.command("REPLICAOF NO ONE").await;
        self.old = Some(std::mem::replace(&mut self.redis, replica));
    }

    fn lead_all_to_redis(&self) {
        for link in &self.to_redis {
            link.lead_to(loopback(self.redis.port));
        }
    }

    /// A node that does not find its ledger leaves again, as it would under a service manager.
    fn try_start(&mut self, node: usize) {
        if let Some(again) = block_in_place(|| self.nodes[node].try_again()) {
            self.nodes[node] = again;
            self.down[node] = false;
        }
    }

    async fn start_what_is_down(&mut self) {
        let began = Instant::now();
        while let Some(node) = self.down.iter().position(|down| *down) {
            assert!(began.elapsed() < QUIET_MAX, "node {node} does not start");
            self.try_start(node);
            tokio::time::sleep(LOOK).await;
        }
    }

    fn top_up(&mut self) {
        self.top_ups += 1;
        let reference = format!("round {}", self.top_ups);
        block_in_place(|| {
            let mut ledger = self.database.ledger();
            for (account, name) in self.accounts.iter().filter(|(_, name)| name.starts_with("poor")) {
                pay_in(&mut ledger, *account, POOR_NANO, &format!("{name} {reference}"));
            }
        });
    }

    fn load(&mut self) -> Load {
        let until = Arc::new(AtomicBool::new(false));
        let nodes: Vec<SocketAddr> = self.nodes.iter().map(|node| node.http).collect();
        let callers = (0..CALLERS)
            .map(|_| {
                let caller = Dialler {
                    rng: Pcg64Mcg::new(u128::from(self.rng.next_u64()) << 1 | 1),
                    nodes: nodes.clone(),
                    accounts: Arc::clone(&self.accounts),
                    told: Arc::clone(&self.told),
                };
                tokio::spawn(caller.call_until(Arc::clone(&until)))
            })
            .collect();
        Load { until, callers }
    }

    /// Waits until nothing is left of the round, and proves the books.
    /// Answers how long that took, and what was the last to come right.
    async fn settle_down(&mut self, when: &str) -> (Duration, String) {
        let began = Instant::now();
        let mut last = String::new();
        while let Some(unrest) = self.unrest().await {
            last.clone_from(&unrest);
            if began.elapsed() > QUIET_MAX {
                let calls = self.calls_that_differ().await;
                self.give_up(&format!("{when}: after {QUIET_MAX:?} still {unrest}\n{calls}"));
            }
            tokio::time::sleep(LOOK).await;
        }
        let quiet = began.elapsed();
        if let Err(wrong) = block_in_place(|| self.books()) {
            self.give_up(&format!("{when}: {wrong}"));
        }
        if let Err(wrong) = self.everybody_with_money_is_served().await {
            self.give_up(&format!("{when}: {wrong}"));
        }
        (quiet, last)
    }

    /// Calls that the pools of the last epochs and the books say different things of; for whoever has to find out why.
    async fn calls_that_differ(&self) -> String {
        let mut link = self.redis.link().await;
        let mut found = String::new();
        for (account, _) in self.accounts.iter() {
            let shard = shard_of(*account);
            let base = format!("tollgate:{{s{shard}}}");
            let epoch: String = ::redis::cmd("HGET")
                .arg(format!("{base}:money"))
                .arg("epoch")
                .query_async(&mut link)
                .await
                .unwrap();
            let holds: HashMap<String, Vec<u8>> = ::redis::cmd("HGETALL")
                .arg(format!("{base}:holds:{epoch}"))
                .query_async(&mut link)
                .await
                .unwrap();
            let booked = block_in_place(|| {
                self.database.sql(&format!(
                    "SELECT encode(s.hold, 'hex') || ' ' || s.captured + s.excess || ' ' || s.request
                     FROM settlement s JOIN transfer t ON t.day = s.day AND t.reference = s.hold AND t.kind = 1
                     JOIN lease l ON l.id = t.lease
                     WHERE l.account = {account} AND l.shard = {shard} AND l.epoch = {epoch}"
                ))
            });
            for line in booked.lines() {
                let (hold, rest) = line.split_once(' ').unwrap_or((line, ""));
                let charged = rest.split(' ').next().unwrap_or_default();
                let said = holds.get(hold).map(|said| String::from_utf8_lossy(said).into_owned());
                if said.as_ref().is_none_or(|said| said.split(' ').nth(1) != Some(charged)) {
                    found.push_str(&format!(
                        "account {account}, hold {hold}: booked {rest}, redis says {said:?}\n"
                    ));
                }
            }
        }
        found
    }

    /// What is not yet as it should be when nobody calls.
    async fn unrest(&self) -> Option<String> {
        for (at, node) in self.nodes.iter().enumerate() {
            for metric in ["tollgate_holds_open", "tollgate_journal_unposted"] {
                let value = node.metric(metric).await;
                if value != 0 {
                    return Some(format!("{metric} of node {at} is {value}"));
                }
            }
        }
        let mut seen = vec![];
        let mut link = self.redis.link().await;
        for (account, name) in self.accounts.iter() {
            let shard = shard_of(*account);
            let base = format!("tollgate:{{s{shard}}}");
            let waiting: i64 =
                ::redis::cmd("XLEN").arg(format!("{base}:outbox")).query_async(&mut link).await.unwrap();
            if waiting != 0 {
                return Some(format!("{waiting} ends in the outbox of shard {shard}"));
            }
            let money: HashMap<String, String> =
                ::redis::cmd("HGETALL").arg(format!("{base}:money")).query_async(&mut link).await.unwrap();
            let part = |kind: &str| {
                let text = money.get(&format!("{kind}{account}"));
                Amount::from_nano(text.map_or(0, |text| text.parse().expect("nano-dollars")))
            };
            let Some(epoch) = money.get("epoch") else { return Some(format!("shard {shard} is not marked")) };
            let pool = Pool { shard, epoch: epoch.parse().expect("an epoch") };
            if part("h") != Amount::ZERO {
                return Some(format!("{} held of {name} in Redis", part("h")));
            }
            if part("i") == Amount::ZERO {
                continue;
            }
            seen.push(PoolSeen {
                account: *account,
                pool,
                installed: part("i"),
                available: part("a"),
                held: part("h"),
                captured: part("c"),
                recalled: part("r"),
                unposted: Amount::ZERO,
            });
        }
        block_in_place(|| {
            let mut drifts = self.database.ledger().reconcile(&seen).expect("an answer");
            if self.faults.contains_key(&Fault::NodeKilled) {
                // A node died between the ledger and Redis: the next lease of that pool installs it.
                drifts.retain(|drift| !matches!(drift, Drift::NotInstalled(..)));
            }
            if let Some(drift) = drifts.first() {
                return Some(format!("{} drifts, such as: {drift}", drifts.len()));
            }
            let fenced =
                "SELECT count(*) FROM lease WHERE state <> 'closed' AND shard IS NOT NULL AND (shard, epoch)
                              NOT IN (SELECT shard, epoch FROM shard_epoch)";
            let live = "SELECT count(*) FROM boot WHERE state = 'live'";
            for (what, query, right) in [("leases of old epochs", fenced, 0), ("live boots", live, NODES)] {
                let count = self.database.sql(query);
                if count != right.to_string() {
                    return Some(format!("{count} {what}"));
                }
            }
            None
        })
    }

    /// What is wrong in the books.
    fn books(&self) -> Result<(), String> {
        self.database.ledger().verify().map_err(|error| error.to_string())?;
        self.nodes[0].try_command(&["ledger", "verify"])?;
        for (what, query) in [
            (
                "not paid by its lease",
                "SELECT coalesce(string_agg(t.kind || ' ' || t.amount || ' ' || s.account || ' ' || s.request, ', '), '0')
                 FROM transfer t JOIN settlement s ON s.hold = t.reference WHERE t.kind IN (6, 7, 8)",
            ),
            ("written off", "SELECT coalesce(sum(written_off), 0) FROM settlement"),
            ("missing", "SELECT coalesce(sum(shortfall), 0) FROM settlement"),
            ("in suspense", "SELECT coalesce(sum(suspended), 0) FROM balance"),
            ("misfits", "SELECT count(*) FROM misfit"),
            ("holds that do not add up", "SELECT count(*) FROM settlement WHERE captured + released <> held"),
        ] {
            let count = self.database.sql(query);
            if count != "0" {
                return Err(format!("{what}: {count}"));
            }
        }
        if let Some(wrong) = self.database.sql(OUT_OF_BALANCE).lines().next() {
            return Err(format!("an account is out of balance: {wrong}"));
        }
        let charges = self.database.sql(
            "SELECT string_agg(request || ' ' || charged || ' ' || holds, ',') FROM (
                 SELECT request, sum(captured + excess) AS charged,
                     count(*) FILTER (WHERE captured + excess > 0) AS holds FROM settlement GROUP BY request) s",
        );
        let mut charged: HashMap<&str, (i64, i64)> = HashMap::new();
        for line in charges.split(',').filter(|line| !line.is_empty()) {
            let mut words = line.split(' ');
            let request = words.next().unwrap();
            let mut number = || words.next().unwrap().parse::<i64>().unwrap();
            charged.insert(request, (number(), number()));
        }
        for (request, (cost, holds)) in &charged {
            if *cost > WHOLE_NANO_MAX || *holds > 1 {
                return Err(format!("{request} is charged {cost} by {holds} holds"));
            }
        }
        let told = self.told.lock().unwrap();
        for (request, seen) in &told.calls {
            let (cost, _) = charged.get(request.as_str()).copied().unwrap_or_default();
            let right = match seen {
                Seen::Whole(price) => cost == *price,
                Seen::Failed => cost == 0,
                Seen::Cut => true,
            };
            if !right {
                return Err(format!("{request} is charged {cost}, and its caller saw it {seen:?}"));
            }
        }
        Ok(())
    }

    /// No money is stuck anywhere: whoever has some is served, on any node, at once.
    async fn everybody_with_money_is_served(&mut self) -> Result<(), String> {
        let rows = block_in_place(|| self.database.ledger().accounts(None)).expect("accounts");
        for (_, name) in self.accounts.clone().iter() {
            let row = rows.iter().find(|row| row.name == *name).expect("the account");
            if row.balance_nano < HOLD_NANO_MAX {
                continue;
            }
            let node = self.index(NODES);
            let began = Instant::now();
            let answer = loop {
                let call = Call::post(request(false, "gpt-a")).header("authorization", &bearer(name));
                let answer = call.send(self.nodes[node].http).await;
                // What the upstreams did is remembered for a while.
                if answer.status < 500 || answer.code() != "no_upstream" || began.elapsed() > QUIET_MAX {
                    break answer;
                }
                tokio::time::sleep(LOOK).await;
            };
            self.told.lock().unwrap().calls.insert(
                answer.header("x-request-id").unwrap_or_default().to_owned(),
                if answer.status == 200 { Seen::Whole(WHOLE_NANO) } else { Seen::Failed },
            );
            if answer.status != 200 {
                let (balance, text) = (row.balance_nano, answer.text());
                return Err(format!(
                    "{name} has {balance} and node {node} answers {}: {text}",
                    answer.status
                ));
            }
        }
        Ok(())
    }

    /// All nodes leave in good order: nothing stays leased to them.
    fn close_down(&mut self) {
        for node in &mut self.nodes {
            node.signal("-TERM");
        }
        for node in &mut self.nodes {
            block_in_place(|| node.wait());
        }
        block_in_place(|| {
            self.database.ledger().verify().expect("the books are right");
            let live = self.database.sql("SELECT count(*) FROM boot WHERE state = 'live'");
            assert_eq!(live, "0", "boots are not over, seed {}", self.seed);
            let open =
                self.database.sql("SELECT count(*) FROM lease WHERE boot IS NOT NULL AND state <> 'closed'");
            assert_eq!(open, "0", "leases of boots are open, seed {}", self.seed);
        });
    }

    fn give_up(&self, why: &str) -> ! {
        let folder = std::env::temp_dir();
        for (at, node) in self.nodes.iter().enumerate() {
            let file = folder.join(format!("tollgate-chaos-{}-node-{at}.log", self.seed));
            std::fs::write(&file, node.log()).expect("a log");
        }
        if std::env::var_os("TOLLGATE_CHAOS_HOLD").is_some() {
            let servers = format!("{why}\n{} redis {}\n", self.database.url, self.redis.port);
            std::fs::write(folder.join("tollgate-chaos-held"), servers).expect("a note");
            std::thread::sleep(Duration::from_secs(600));
        }
        panic!("{why}\n{}\nlogs: {}/tollgate-chaos-{}-*", self.report(), folder.display(), self.seed);
    }

    fn report(&self) -> String {
        let told = self.told.lock().unwrap();
        let count = |is: fn(&Seen) -> bool| told.calls.values().filter(|seen| is(seen)).count();
        let (failed, cut) = (count(|seen| *seen == Seen::Failed), count(|seen| *seen == Seen::Cut));
        let whole = told.calls.len() - failed - cut;
        let mut report =
            format!("faults: {:?}\ncalls: {whole} whole, {failed} failed, {cut} cut", self.faults);
        for (kind, count) in &told.kinds {
            report.push_str(&format!("\n  {count:6} {kind}"));
        }
        report
    }
}

/// Accounts whose balance is not what came in less what was charged.
const OUT_OF_BALANCE: &str = "SELECT coalesce(string_agg(b.account || ' has ' || b.posted || ', leased ' || b.leased ||
        ', came in ' || coalesce(i.sum, 0) || ', charged ' || coalesce(s.sum, 0), E'\\n'), '')
    FROM balance b
    LEFT JOIN (SELECT credit, sum(amount) FROM transfer WHERE kind = 10 GROUP BY credit) i ON i.credit = b.account
    LEFT JOIN (SELECT account, sum(captured + excess - written_off) FROM settlement GROUP BY account) s USING (account)
    WHERE b.posted <> coalesce(i.sum, 0) - coalesce(s.sum, 0) OR b.leased < 0 OR b.leased > b.posted";

/// Looks at the books all the time, also while the server comes and goes.
struct Watch {
    until: Arc<AtomicBool>,
    looks: std::thread::JoinHandle<Vec<String>>,
}

impl Watch {
    fn start(database: Arc<postgres::Database>) -> Self {
        let until = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&until);
        let looks = std::thread::spawn(move || {
            let mut wrong = vec![];
            while !over.load(Ordering::Acquire) {
                wrong.extend(database.try_sql(OUT_OF_BALANCE).ok().filter(|text| !text.is_empty()));
                std::thread::sleep(LOOK);
            }
            wrong
        });
        Self { until, looks }
    }

    fn stop(self, seed: u64) {
        self.until.store(true, Ordering::Release);
        let wrong = block_in_place(|| self.looks.join()).expect("the watch");
        assert!(wrong.is_empty(), "seed {seed}: out of balance: {wrong:?}");
    }
}

/// What no caller should see. An account of which the ledger has money is served by every node that reaches it, whatever
/// Redis does (on a machine that is busy it is too slow for a moment, without any fault); one whose money is too little to
/// be split may have to come back. A call ends as it should, unless its node is killed. What one of two upstreams does is
/// the gateway's to bear, until the answer has begun.
fn is_avoidable(kind: &str) -> bool {
    let store = kind.starts_with("rich") && kind.contains("store_unavailable") && !kind.contains("Postgres");
    let cut = kind.starts_with("broken off") || kind.starts_with("closed without an answer");
    let upstream = kind.starts_with("gpt-a") && kind.contains("upstream");
    store || upstream || cut && !kind.contains("its node was killed") || kind.contains(": 500")
}

/// Somebody who calls one call after the other.
struct Dialler {
    rng: Pcg64Mcg,
    nodes: Vec<SocketAddr>,
    accounts: Arc<Vec<(AccountId, String)>>,
    told: Arc<Mutex<Told>>,
}

impl Dialler {
    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.rng.next_u64() % u64::try_from(bound).unwrap()).unwrap()
    }

    async fn call_until(mut self, until: Arc<AtomicBool>) {
        while !until.load(Ordering::Acquire) {
            self.call().await;
        }
    }

    async fn call(&mut self) {
        let (at, half) = (self.index(self.accounts.len()), self.index(2) == 0);
        // The first one is everybody's.
        let name = self.accounts[if half { 0 } else { at }].1.clone();
        let kind = self.index(20);
        let (streams, model) = (kind >= 10, if kind == 19 { "gpt-b" } else { "gpt-a" });
        let node = self.index(self.nodes.len());
        // What stands before a fleet takes another node when one does not answer.
        let mut found = None;
        for at in 0..self.nodes.len() {
            let node = self.nodes[(node + at) % self.nodes.len()];
            found = Caller::try_connect(node).await.map(|caller| (node, caller));
            if found.is_some() {
                break;
            }
            self.note("nobody listens");
        }
        let Some((node, mut caller)) = found else {
            tokio::time::sleep(LOOK).await;
            return;
        };
        let wealth = name.split(' ').next().unwrap_or_default().to_owned();
        caller.send(&Call::post(request(streams, model)).header("authorization", &bearer(&name))).await;
        if kind == 18 {
            caller.reset();
            self.note("its caller left at once");
            return;
        }
        let Some(head) = caller.try_head().await else {
            let what = format!("closed without an answer{}", self.circumstances(node));
            self.note(&what);
            return;
        };
        let id = head.header("x-request-id").expect("every answer names its request").to_owned();
        let status = head.status;
        if status == 200 && (16..18).contains(&kind) {
            let _some = caller.chunk().await;
            caller.reset();
            self.tell(id, Seen::Cut, "its caller left amid the stream");
            return;
        }
        let answer = caller.body(head).await;
        let text = answer.text();
        let ended = if streams { text.contains("[DONE]") } else { text.contains("\"usage\"") };
        let (seen, what) = match status {
            200 if answer.clean && ended && !text.contains("\"error\"") => {
                let price = if model == "gpt-a" { WHOLE_NANO } else { WHOLE_NANO_MAX };
                (Seen::Whole(price), "whole".to_owned())
            }
            200 if answer.clean => (Seen::Cut, "an error inside the answer".to_owned()),
            200 => (Seen::Cut, format!("broken off{}", self.circumstances(node))),
            503 if answer.clean && answer.code() == "store_unavailable" => {
                let what = format!("{wealth}: 503 store_unavailable{}", self.circumstances(node));
                (Seen::Failed, what)
            }
            _ => {
                let code = if answer.clean { answer.code() } else { "broken off".to_owned() };
                (Seen::Failed, format!("{model}, {wealth}: {status} {code}"))
            }
        };
        self.tell(id, seen, &what);
        if status != 200 {
            // Nobody asks again at once.
            tokio::time::sleep(LOOK).await;
        }
    }

    /// What was broken in this round when this happens to a call of this node.
    fn circumstances(&self, node: SocketAddr) -> String {
        let told = self.told.lock().unwrap();
        let mut all: Vec<String> = told.broken.iter().map(|(fault, _)| format!("{fault:?}")).collect();
        all.extend(told.killed.contains(&node).then(|| "its node was killed".to_owned()));
        all.sort();
        if all.is_empty() { String::new() } else { format!(" ({})", all.join(", ")) }
    }

    fn note(&self, kind: &str) {
        *self.told.lock().unwrap().kinds.entry(kind.to_owned()).or_default() += 1;
    }

    fn tell(&self, id: String, seen: Seen, kind: &str) {
        self.note(kind);
        let before = self.told.lock().unwrap().calls.insert(id.clone(), seen);
        assert_eq!(before, None, "{id} comes twice");
    }
}

/// What upstreams do: mostly well, at times slow, with an error inside, or not at all.
async fn weather(mocks: Arc<Vec<Mock>>, seed: u64, until: Arc<AtomicBool>) {
    let mut rng = Pcg64Mcg::new(u128::from(seed) << 1 | 1);
    while !until.load(Ordering::Acquire) {
        let last = mocks.len() - 1;
        for (at, mock) in mocks.iter().enumerate() {
            // The second of the two that serve the good model is always well.
            let well = at == 1;
            let what = match (well, rng.next_u64() % 10) {
                (true, 0..4) => r#"{"delay_head_ms":20,"delay_chunk_ms":150}"#,
                (false, 0) if at == last => r#"{"fault":{"kind":"status","code":500}}"#,
                (false, 0) => r#"{"fault":{"kind":"status","code":503}}"#,
                (false, 1) => r#"{"delay_chunk_ms":5,"fault":{"kind":"error_event","pieces":2}}"#,
                (false, 2) => r#"{"delay_chunk_ms":5,"fault":{"kind":"reset_after_pieces","pieces":2}}"#,
                _ => r#"{"delay_head_ms":5,"delay_chunk_ms":10}"#,
            };
            mock.set_script(script(what));
        }
        tokio::time::sleep(Duration::from_millis(100 + rng.next_u64() % 300)).await;
    }
}

fn open_accounts(database: &postgres::Database) -> Vec<(AccountId, String)> {
    let mut ledger = database.ledger();
    let names = (0..RICH).map(|n| format!("rich {n}")).chain((0..POOR).map(|n| format!("poor {n}")));
    names
        .map(|name| {
            let account = ledger.ensure_account(&name, None, 0).expect("an account");
            let secret = key(&name);
            ledger
                .ensure_key(&NewKey {
                    digest: digest(&secret),
                    account,
                    account_name: &name,
                    hint: &hint(&secret),
                    settings: &KeySettings::default(),
                    expires_ms: None,
                    now_ms: 0,
                })
                .expect("a key");
            if name.starts_with("rich") {
                pay_in(&mut ledger, account, RICH_NANO, &name);
            }
            (account, name)
        })
        .collect()
}

fn pay_in(ledger: &mut tollgate::ledger::Postgres, account: AccountId, nano: i64, reference: &str) {
    let movement = Movement {
        account,
        what: What::TopUp,
        amount: Amount::from_nano(nano),
        reference,
        reason: "chaos",
        now_ms: 1,
        boot: None,
    };
    assert!(ledger.transfer(&movement).expect("a top-up"));
}

fn key(name: &str) -> String {
    format!("sk-chaos-{}", name.replace(' ', "-"))
}

fn bearer(name: &str) -> String {
    format!("Bearer {}", key(name))
}

fn request(streams: bool, model: &str) -> String {
    format!(
        r#"{{"model":"{model}","stream":{streams},"max_tokens":20,"messages":[{{"role":"user","content":"hi"}}]}}"#
    )
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}
