//! A fleet's life by its rules, on a real ledger and a Redis that is a few sums.
//!
//! Nodes lease, admit, get on, end and die; Redis loses its memory, reaps holds that still run, and says things twice; a
//! node learns late that an epoch is over. As long as no journal is lost, nobody is ever charged for what he did not
//! use, nothing is written off or paid late, and once all is quiet every nano-dollar is where it belongs.
//! `TOLLGATE_SEED=<n>` plays one seed.

use std::collections::BTreeMap;

use filters::ids::{AccountId, HoldId};
use rand_core::RngCore as _;
use rand_pcg::Pcg64Mcg;
use tollgate::journal::{Hold, Pool, Settled};
use tollgate::ledger::port::{Movement, What};
use tollgate::ledger::postgres::{Claim, Reaped, Wanted};
use tollgate::ledger::{Ledger as _, LedgerError, Postgres};

use super::super::support::postgres::{Database, database, hold};
use super::{ended, nano};

const SEEDS: u64 = 4;
const STEPS: u32 = 220;
const SHARD: u16 = 7;

/// A hold in Redis.
struct Held {
    account: AccountId,
    boot: i64,
    amount: i64,
    checkpoint: i64,
}

/// One incarnation of Redis.
#[derive(Default)]
struct Redis {
    epoch: i64,
    installed: BTreeMap<AccountId, i64>,
    available: BTreeMap<AccountId, i64>,
    recalled: BTreeMap<AccountId, i64>,
    holds: BTreeMap<u64, Held>,
}

enum Said {
    Settled(Settled),
    Reaped(Reaped),
}

/// A call that a node runs.
struct Call {
    account: AccountId,
    pool: Option<Pool>,
    amount: i64,
    cost: i64,
    written: i64,
}

/// A node's process.
#[derive(Default)]
struct Node {
    boot: i64,
    known: i64,
    open: BTreeMap<u64, Call>,
    /// Ended, written, not known to be booked.
    journal: Vec<Settled>,
    /// What is free of its own lease, and the total that it has seen.
    local: BTreeMap<AccountId, i64>,
    seen: BTreeMap<AccountId, i64>,
}

struct World {
    rng: Pcg64Mcg,
    database: Database,
    ledger: Postgres,
    accounts: [AccountId; 2],
    redis: Redis,
    outbox: Vec<Said>,
    nodes: Vec<Node>,
    came_in: BTreeMap<AccountId, i64>,
    charged: BTreeMap<AccountId, i64>,
    next: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let database = database();
        let mut ledger = database.ledger();
        let accounts = ["a", "b"].map(|name| ledger.ensure_account(name, None, 0).unwrap());
        let mut world = Self {
            rng: Pcg64Mcg::new(u128::from(seed) << 1 | 1),
            database,
            ledger,
            accounts,
            redis: Redis::default(),
            outbox: vec![],
            nodes: vec![],
            came_in: BTreeMap::new(),
            charged: BTreeMap::new(),
            next: 1,
        };
        (0..3).for_each(|_| world.start());
        world.lose_redis();
        world
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.rng.next_u64() % bound as u64).unwrap()
    }

    fn nano(&mut self, bound: usize) -> i64 {
        i64::try_from(self.below(bound)).unwrap()
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn start(&mut self) {
        let boot = self.ledger.begin_boot(0).unwrap();
        let known = self.ledger.epochs(boot).unwrap()[usize::from(SHARD)].epoch;
        self.nodes.push(Node { boot, known, ..Node::default() });
    }

    fn step(&mut self) {
        let (node, account) = (self.below(3), self.accounts[self.below(2)]);
        match self.below(100) {
            0..6 => self.pay_in(account),
            6..14 => self.refill_pool(node, account),
            14..20 => self.refill_local(node, account),
            20..38 => self.admit(node, account),
            38..50 => self.get_on(node),
            50..66 => self.end(node),
            66..76 => self.post(node),
            76..82 => self.read_outbox(node),
            82..86 => self.reap(),
            86..88 => self.recall(account),
            88..92 => self.report(node),
            92..94 => self.finish(node),
            94..96 => self.learn(node),
            96..98 => self.lose_redis(),
            98 => self.die(node),
            _ => self.give_back(node, account),
        }
    }

    fn pay_in(&mut self, account: AccountId) {
        let amount = 1_000 + self.nano(9_000);
        let reference = format!("in {}", self.id());
        let movement = Movement {
            account,
            what: What::TopUp,
            amount: nano(amount),
            reference: &reference,
            reason: "",
            now_ms: 1,
            boot: None,
        };
        assert!(self.ledger.transfer(&movement).unwrap());
        *self.came_in.entry(account).or_default() += amount;
    }

    fn want(&mut self) -> Wanted {
        let least = self.nano(1_500);
        Wanted { least: nano(least), most: nano(least + 1_000) }
    }

    fn refill_pool(&mut self, node: usize, account: AccountId) {
        let (epoch, want) = (self.nodes[node].known, self.want());
        match self.ledger.lease_pool(account, Pool { shard: SHARD, epoch }, want) {
            Ok(leased) if self.redis.epoch == epoch && self.below(4) > 0 => {
                let installed = self.redis.installed.entry(account).or_default();
                let added = (leased.total.nano() - *installed).max(0);
                *installed += added;
                *self.redis.available.entry(account).or_default() += added;
            }
            // Not installed: the next one does.
            Ok(_) => {}
            Err(LedgerError::Stale) => self.learn(node),
            Err(error) => panic!("{error}"),
        }
    }

    fn refill_local(&mut self, node: usize, account: AccountId) {
        let want = self.want();
        let node = &mut self.nodes[node];
        let total = self.ledger.lease_local(account, node.boot, want).unwrap().total.nano();
        let seen = node.seen.entry(account).or_default();
        *node.local.entry(account).or_default() += total - *seen;
        *seen = total;
    }

    fn give_back(&mut self, node: usize, account: AccountId) {
        let node = &mut self.nodes[node];
        let local = node.local.entry(account).or_default();
        let part = std::mem::take(local);
        self.ledger.give_back(node.boot, &[(account, nano(part))]).unwrap();
    }

    fn admit(&mut self, node: usize, account: AccountId) {
        let (id, amount, answered) = (self.id(), self.nano(900), self.below(8) > 0);
        let (epoch, boot) = (self.nodes[node].known, self.nodes[node].boot);
        let available = self.redis.available.entry(account).or_default();
        let pool = if self.redis.epoch == epoch && *available >= amount && id % 3 > 0 {
            *available -= amount;
            self.redis.holds.insert(id, Held { account, boot, amount, checkpoint: 0 });
            // An answer that is lost: the node gives that id up.
            if !answered {
                return;
            }
            Some(Pool { shard: SHARD, epoch })
        } else {
            let local = self.nodes[node].local.entry(account).or_default();
            if *local < amount {
                return;
            }
            *local -= amount;
            None
        };
        self.nodes[node].open.insert(id, Call { account, pool, amount, cost: 0, written: 0 });
    }

    fn some_call(&mut self, node: usize) -> Option<u64> {
        let count = self.nodes[node].open.len();
        if count == 0 {
            return None;
        }
        let at = self.below(count);
        self.nodes[node].open.keys().nth(at).copied()
    }

    fn get_on(&mut self, node: usize) {
        let Some(id) = self.some_call(node) else { return };
        let (more, write, touch) = (self.nano(300), self.below(3) > 0, self.below(2) > 0);
        let call = self.nodes[node].open.get_mut(&id).unwrap();
        call.cost = (call.cost + more).min(call.amount);
        if write {
            call.written = call.cost;
            if let Some(held) = self.redis.holds.get_mut(&id).filter(|_| touch) {
                held.checkpoint = call.written;
            }
        }
    }

    fn end(&mut self, node: usize) {
        let Some(id) = self.some_call(node) else { return };
        let call = self.nodes[node].open.remove(&id).unwrap();
        let settled = ended(id, call.account, call.pool, call.amount, call.cost);
        *self.charged.entry(call.account).or_default() += call.cost;
        if call.pool.is_none() {
            *self.nodes[node].local.entry(call.account).or_default() += call.amount - call.cost;
        } else if self.below(4) > 0 && self.redis.holds.remove(&id).is_some() {
            *self.redis.available.entry(call.account).or_default() += call.amount - call.cost;
            self.outbox.push(Said::Settled(settled.clone()));
        }
        self.nodes[node].journal.push(settled);
    }

    fn post(&mut self, node: usize) {
        let count = self.below(self.nodes[node].journal.len() + 1);
        let node = &mut self.nodes[node];
        self.ledger.post(node.boot, &node.journal[..count]).unwrap();
        self.ledger.post(node.boot, &node.journal[count / 2..count]).unwrap();
        node.journal.drain(..count);
    }

    /// What the outbox has, in any order, some of it twice.
    fn read_outbox(&mut self, node: usize) {
        for _ in 0..self.below(4) {
            if self.outbox.is_empty() {
                return;
            }
            let at = self.below(self.outbox.len());
            let said = if self.below(3) > 0 { &self.outbox.swap_remove(at) } else { &self.outbox[at] };
            match said {
                Said::Settled(settled) => {
                    self.ledger.post(self.nodes[node].boot, std::slice::from_ref(settled)).unwrap();
                }
                Said::Reaped(reaped) => {
                    self.ledger.post_reaped(std::slice::from_ref(reaped), 2).unwrap();
                }
            }
        }
    }

    fn reap(&mut self) {
        if self.redis.holds.is_empty() {
            return;
        }
        let at = self.below(self.redis.holds.len());
        let id = *self.redis.holds.keys().nth(at).unwrap();
        let held = self.redis.holds.remove(&id).unwrap();
        let placed = Hold {
            id: hold(id).0,
            account: held.account.0,
            amount: held.amount,
            at_ms: 1_000,
            request: format!("r{id}"),
            model: "m".into(),
            key: [7; 32],
            price_version: 9,
            pool: Some(Pool { shard: SHARD, epoch: self.redis.epoch }),
        };
        let reaped = Reaped { hold: placed, boot: held.boot, checkpoint: nano(held.checkpoint) };
        self.outbox.push(Said::Reaped(reaped));
    }

    fn recall(&mut self, account: AccountId) {
        let available = self.redis.available.entry(account).or_default();
        let part = *available / 2;
        *available -= part;
        let in_all = self.redis.recalled.entry(account).or_default();
        *in_all += part;
        let in_all = *in_all;
        if self.below(3) > 0 && self.redis.installed.contains_key(&account) {
            let pool = Pool { shard: SHARD, epoch: self.redis.epoch };
            self.ledger.return_pool(account, pool, nano(in_all)).unwrap();
        }
    }

    fn learn(&mut self, node: usize) {
        self.nodes[node].known = self.redis.epoch;
    }

    /// A report on every epoch that this node knows to be over.
    fn report(&mut self, node: usize) {
        let node = &self.nodes[node];
        let mut reports = vec![];
        for pool in self.ledger.to_report(node.boot).unwrap() {
            if pool.epoch >= node.known {
                continue;
            }
            let mut claims: BTreeMap<AccountId, i64> = BTreeMap::new();
            for call in node.open.values().filter(|call| call.pool == Some(pool)) {
                *claims.entry(call.account).or_default() += call.amount;
            }
            for settled in node.journal.iter().filter(|settled| settled.pool == Some(pool)) {
                *claims.entry(settled.account()).or_default() += settled.settlement().charged().nano();
            }
            let claim = |(account, amount)| Claim { account, amount: nano(amount) };
            reports.push((pool, claims.into_iter().map(claim).collect()));
        }
        self.ledger.report_frozen(node.boot, &reports).unwrap();
    }

    /// A node looks whether it holds what was reaped of it.
    fn finish(&mut self, node: usize) {
        let node = &self.nodes[node];
        let mine = |id: &HoldId| {
            node.open.keys().any(|open| hold(*open) == *id) || node.journal.iter().any(|s| s.id == id.0)
        };
        let mut gone = self.ledger.reaped(node.boot).unwrap();
        gone.retain(|id| !mine(id));
        self.ledger.finish_reaped(node.boot, &gone).unwrap();
    }

    /// Redis starts anew; sometimes its outbox is kept.
    fn lose_redis(&mut self) {
        let (mover, keep) = (self.below(3), self.below(2) > 0);
        let boot = self.nodes[mover].boot;
        let advanced = self.ledger.advance(boot, "run", &[(SHARD, self.redis.epoch)]).unwrap();
        assert!(advanced[0].won);
        self.redis = Redis { epoch: advanced[0].now.epoch, ..Redis::default() };
        self.nodes[mover].known = self.redis.epoch;
        if !keep {
            self.outbox.clear();
        }
    }

    /// `kill -9`, and the journal is replayed by another.
    fn die(&mut self, node: usize) {
        let mut node = self.nodes.remove(node);
        for (id, call) in std::mem::take(&mut node.open) {
            *self.charged.entry(call.account).or_default() += call.written;
            node.journal.push(ended(id, call.account, call.pool, call.amount, call.written));
        }
        let half = node.journal.len() / 2;
        self.ledger.post(node.boot, &node.journal[..half]).unwrap();
        self.ledger.post(node.boot, &node.journal).unwrap();
        self.ledger.end_boot(node.boot).unwrap();
        self.start();
    }

    fn agree(&mut self, seed: u64, step: u32) {
        self.ledger.verify().unwrap_or_else(|error| panic!("seed {seed}, step {step}: {error}"));
        let never = "SELECT count(*) FROM transfer WHERE kind IN (6, 7)";
        assert_eq!(
            self.database.sql(never),
            "0",
            "seed {seed}, step {step}: nothing is paid late or given up"
        );
        for row in self.ledger.accounts(None).unwrap() {
            let id = AccountId(row.id);
            let in_redis: i64 = self.redis.available.get(&id).copied().unwrap_or_default();
            // Of one whose end is booked first, only the rest is there still.
            let open =
                self.nodes.iter().flat_map(|node| node.open.iter()).filter(|(_, call)| call.account == id);
            let open = open.filter(|(call, _)| self.redis.holds.contains_key(call));
            let held: i64 = open.map(|(_, call)| call.amount).sum();
            let local: i64 = self.nodes.iter().filter_map(|node| node.local.get(&id)).sum();
            assert!(
                in_redis + held + local <= row.leased_nano,
                "seed {seed}, step {step}: more can be spent than is leased"
            );
        }
    }

    /// All calls end, all is told, all nodes leave.
    fn rest(&mut self, seed: u64) {
        for node in 0..3 {
            while self.some_call(node).is_some() {
                self.end(node);
            }
        }
        while !self.redis.holds.is_empty() {
            self.reap();
        }
        while !self.outbox.is_empty() {
            self.read_outbox(0);
        }
        while !self.nodes.is_empty() {
            let node = self.nodes.remove(0);
            self.ledger.post(node.boot, &node.journal).unwrap();
            self.ledger.end_boot(node.boot).unwrap();
        }
        self.ledger.verify().unwrap();
        for row in self.ledger.accounts(None).unwrap() {
            let id = AccountId(row.id);
            let charged = self.charged.get(&id).copied().unwrap_or_default();
            let came_in = self.came_in.get(&id).copied().unwrap_or_default();
            assert_eq!(row.balance_nano, came_in - charged, "seed {seed}: exactly what was used is gone");
            let rest = "SELECT coalesce(sum(rest), 0) FROM lease WHERE state = 'open' AND account = ";
            let rest: i64 = self.database.sql(&format!("{rest}{}", row.id)).parse().unwrap();
            assert_eq!(row.leased_nano, rest, "seed {seed}: of epochs that are over nothing is kept");
        }
        assert_eq!(self.database.sql("SELECT sum(suspended) FROM balance"), "0", "seed {seed}");
    }
}

#[test]
fn a_fleet_that_loses_no_journal_is_exact_whatever_else_it_loses() {
    let seeds: Vec<u64> = match std::env::var("TOLLGATE_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (0..SEEDS).collect(),
    };
    for seed in seeds {
        let mut world = World::new(seed);
        for step in 0..STEPS {
            world.step();
            if step.is_multiple_of(5) {
                world.agree(seed, step);
            }
        }
        world.agree(seed, STEPS);
        world.rest(seed);
    }
}
