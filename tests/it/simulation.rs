//! The life of the books under every misfortune, thousands of times, on simulated time.
//!
//! The real purse, journal format, replay and ledger, without sockets, threads or files: a seed
//! decides what happens next. Calls begin, get on, end, are dropped; money comes and goes; the
//! ledger lags, is told things twice, and the process dies, also while the next one repairs. After
//! each step an oracle that only knows sums has to agree. `TOLLGATE_SEED=<n>` plays one seed,
//! `TOLLGATE_SEEDS=<n>` plays so many.

use std::collections::HashMap;

use filters::ids::{AccountId, HoldId, KeyDigest};
use filters::limit::{Limits, Now, Scopes, Want};
use filters::money::Amount;
use filters::purse::{EndHold, Purse, Reserve};
use rand_core::RngCore as _;
use rand_pcg::Pcg64Mcg;
use tollgate::boot::book;
use tollgate::journal::record::{Record, decode, encode};
use tollgate::journal::{Hold, Replayed, Settled};
use tollgate::ledger::Sqlite;
use tollgate::ledger::port::{Movement, What};

use super::support::ledgers::Whole;
use super::support::postgres;

const SEEDS: u64 = 256;
/// Seeds that are played on Postgres, which is slower.
const SEEDS_POSTGRES: u64 = 6;
const STEPS: u32 = 150;
/// Calls that one key may have open at once.
const CONCURRENCY: u64 = 4;
const HOUR_MS: i64 = 3_600_000;

/// What must be true of an account, by sums alone.
#[derive(Clone, Copy, Default)]
struct Oracle {
    came_in: i128,
    went_out: i128,
    charged: i128,
    calls: i64,
}

struct Open {
    hold: Hold,
    /// What it has cost by now, and by the last progress record.
    cost: i64,
    written: i64,
}

struct World {
    rng: Pcg64Mcg,
    seed: u64,
    ledger: Box<dyn Whole>,
    accounts: [i64; 3],
    boot: i64,
    /// The journal's bytes, as the kernel has them.
    journal: Vec<u8>,
    purses: HashMap<i64, Purse>,
    scopes: Scopes,
    open: Vec<Open>,
    /// Settled and written, on the way to the ledger.
    queue: Vec<Settled>,
    posted: Vec<Settled>,
    oracle: HashMap<i64, Oracle>,
    now: Now,
    next: u128,
}

impl World {
    fn new(seed: u64, mut ledger: Box<dyn Whole>) -> Self {
        let mut account = |name| ledger.ensure_account(name, None, 0).unwrap().0;
        let accounts = ["a", "b", "c"].map(&mut account);
        let key = Limits { concurrency: Some(CONCURRENCY), ..Limits::default() };
        let mut world = Self {
            rng: Pcg64Mcg::new(u128::from(seed) << 1 | 1),
            seed,
            boot: ledger.begin_boot(0).unwrap(),
            ledger,
            accounts,
            journal: vec![],
            purses: HashMap::new(),
            scopes: Scopes { key, ..Scopes::default() },
            open: vec![],
            queue: vec![],
            posted: vec![],
            oracle: HashMap::new(),
            now: Now { ms: 0, unix_ms: 1_700_000_000_000 },
            next: 1,
        };
        world.lease_all();
        world
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.rng.next_u64() % bound
    }

    fn nano(&mut self, bound: u64) -> i64 {
        i64::try_from(self.below(bound)).unwrap()
    }

    fn account(&mut self) -> i64 {
        let index = usize::try_from(self.below(3)).unwrap();
        self.accounts[index]
    }

    fn write(&mut self, record: &Record) {
        encode(record, &mut self.journal).unwrap();
    }

    fn step(&mut self) {
        match self.below(100) {
            0..8 => self.pay_in(),
            8..12 => self.pay_out(),
            12..40 => self.begin(),
            40..58 => self.get_on(),
            58..78 => self.end(),
            78..90 => self.post(),
            90..93 => self.post_again(),
            93..95 => self.jump(),
            95..97 => self.give_back(),
            _ => self.die(),
        }
        self.agree();
    }

    fn pay_in(&mut self) {
        let (account, amount) = (self.account(), 1 + self.nano(5_000));
        let reference = format!("in-{}", self.next);
        self.next += 1;
        let movement = Movement {
            account: AccountId(account),
            what: What::TopUp,
            amount: Amount::from_nano(amount),
            reference: &reference,
            reason: "",
            now_ms: self.now.unix_ms,
            boot: None,
        };
        assert!(self.ledger.transfer(&movement).unwrap());
        assert!(!self.ledger.transfer(&movement).unwrap(), "a top-up that is told twice happens once");
        self.oracle.entry(account).or_default().came_in += i128::from(amount);
        for (account, added) in self.ledger.lease_rest(self.boot) {
            self.purses.entry(account.0).or_default().grant(added);
        }
    }

    fn pay_out(&mut self) {
        let (account, amount) = (self.account(), 1 + self.nano(3_000));
        let reference = format!("out-{}", self.next);
        self.next += 1;
        let purse = self.purses.entry(account).or_default();
        if purse.withdraw(Amount::from_nano(amount)).is_err() {
            return;
        }
        let movement = Movement {
            account: AccountId(account),
            what: What::Refund,
            amount: Amount::from_nano(amount),
            reference: &reference,
            reason: "",
            now_ms: self.now.unix_ms,
            boot: Some(self.boot),
        };
        assert!(self.ledger.transfer(&movement).unwrap());
        self.oracle.entry(account).or_default().went_out += i128::from(amount);
    }

    fn begin(&mut self) {
        let (account, amount) = (self.account(), self.nano(2_000));
        let id = self.next;
        self.next += 1;
        let key = [account.to_le_bytes()[0]; 32];
        let reserve = Reserve {
            hold: HoldId(id),
            key: KeyDigest(key),
            models: &["m".to_owned()],
            scopes: &self.scopes,
            want: Want { tokens: 1, amount: Amount::from_nano(amount) },
        };
        if self.purses.entry(account).or_default().reserve(self.now, &reserve).is_err() {
            return;
        }
        let hold = Hold {
            id,
            account,
            amount,
            at_ms: self.now.unix_ms,
            request: format!("r{id}"),
            model: "m".into(),
            key,
            price_version: 1,
            pool: None,
        };
        self.write(&Record::Hold(hold.clone()));
        self.open.push(Open { hold, cost: 0, written: 0 });
    }

    /// A stream moves; its progress is written now, later, or never.
    fn get_on(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let index = usize::try_from(self.below(self.open.len() as u64)).unwrap();
        let more = self.nano(900);
        let write = self.below(3) > 0;
        let open = &mut self.open[index];
        open.cost += more;
        if write {
            open.written = open.cost;
            let record = Record::Progress { id: open.hold.id, cost: open.cost };
            self.write(&record);
        }
    }

    fn end(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let index = usize::try_from(self.below(self.open.len() as u64)).unwrap();
        let Open { hold, cost, .. } = self.open.swap_remove(index);
        let end = EndHold {
            hold: HoldId(hold.id),
            held: Amount::from_nano(hold.amount),
            key: KeyDigest(hold.key),
            model: "m",
            cost: Amount::from_nano(cost),
            tokens: 1,
            left: None,
        };
        let purse = self.purses.get_mut(&hold.account).unwrap();
        let free = purse.available().nano();
        let (settlement, _) = purse.end(self.now, &end);
        let charged = settlement.charged().nano();
        assert_eq!(charged, cost.min(hold.amount + free), "what it cost, as far as money reaches");
        let settled = Settled {
            id: hold.id,
            account: hold.account,
            request: hold.request,
            model: hold.model,
            endpoint: "e".into(),
            attempts: 1,
            parts: Settled::parts_of(&settlement),
            provider_cost: 0,
            abandoned: 0,
            key: hold.key,
            held_ms: hold.at_ms,
            price_version: 1,
            tokens: [0; 7],
            estimated: false,
            anomaly: false,
            at_ms: self.now.unix_ms,
            pool: None,
        };
        self.write(&Record::Settled(settled.clone()));
        self.queue.push(settled);
        let oracle = self.oracle.entry(hold.account).or_default();
        oracle.charged += i128::from(charged);
        oracle.calls += 1;
    }

    fn post(&mut self) {
        let count = usize::try_from(self.below(self.queue.len() as u64 + 1)).unwrap();
        let batch: Vec<Settled> = self.queue.drain(..count).collect();
        assert_eq!(self.ledger.post(self.boot, &batch).unwrap(), batch.len());
        self.posted.extend(batch);
    }

    /// The ledger is told what it has already, in this boot or in a later one.
    fn post_again(&mut self) {
        let from = usize::try_from(self.below(self.posted.len() as u64 + 1)).unwrap();
        assert_eq!(self.ledger.post(self.boot, &self.posted[from..]).unwrap(), 0);
    }

    /// Free money, all of it or half, goes back to the ledger as in a hand-over, and is leased again.
    fn give_back(&mut self) {
        let half = self.below(2) == 0;
        let mut parts = vec![];
        for (account, purse) in &mut self.purses {
            let free = purse.available().nano();
            let part = Amount::from_nano(if half { free / 2 } else { free });
            purse.withdraw(part).unwrap();
            parts.push((AccountId(*account), part));
        }
        self.ledger.give_back(self.boot, &parts).unwrap();
        self.ledger.verify().unwrap();
        for (account, amount) in self.ledger.lease_rest(self.boot) {
            self.purses.entry(account.0).or_default().grant(amount);
        }
    }

    /// The wall clock steps, forwards or back; the other one never does.
    fn jump(&mut self) {
        self.now.ms += self.below(120) * 1000;
        self.now.unix_ms += self.nano(60 * HOUR_MS.unsigned_abs()) - 24 * HOUR_MS;
    }

    /// `kill -9`: the kernel's bytes and the ledger stay. Records that nobody waits for may be torn.
    fn die(&mut self) {
        if let Some(tear) = self.torn_tail() {
            self.journal.truncate(self.journal.len() - tear);
        }
        let replayed = || {
            let mut rest = self.journal.as_slice();
            let mut records = vec![];
            while let Ok((record, length)) = decode(rest) {
                records.push(record);
                rest = &rest[length..];
            }
            Replayed::of(records)
        };
        let mut orphans: HashMap<u128, &Open> = self.open.iter().map(|o| (o.hold.id, o)).collect();
        // The next process may die over the repair as well; the one behind it begins again.
        let until = self.rng.next_u64() % 3;
        if until > 0 {
            let half = replayed();
            let part = half.settled.len() / 2;
            self.ledger.post(self.boot, &half.settled[..part]).unwrap();
            if until == 2 {
                self.ledger.post(self.boot, &half.settled).unwrap();
            }
        }
        let replayed = replayed();
        for (hold, cost) in &replayed.orphans {
            let open = orphans.remove(&hold.id).expect("only what was open is an orphan");
            assert!(*cost <= open.cost && *cost >= 0, "never more than was delivered");
        }
        assert!(orphans.is_empty(), "every open hold was written before its call went out");
        let ended: Vec<(Hold, i64)> = replayed.orphans.clone();
        book(self.ledger.as_mut(), self.boot, replayed).unwrap();
        for (hold, cost) in ended {
            let id = format!("r{}", hold.id);
            let line = self.ledger.generation(AccountId(hold.account), &id).unwrap().expect("it is booked");
            assert!(line.cost_nano <= cost, "in the caller's favour");
            assert!(line.cost_nano == cost || cost > hold.amount, "all of what the hold covers");
            let oracle = self.oracle.entry(hold.account).or_default();
            oracle.charged += i128::from(line.cost_nano);
            oracle.calls += 1;
        }
        self.open.clear();
        self.posted.append(&mut self.queue);
        self.purses.clear();
        self.journal.clear();
        self.boot = self.ledger.begin_boot(self.now.unix_ms).unwrap();
        self.lease_all();
        let verified = self.ledger.verify();
        assert!(verified.is_ok(), "{verified:?}");
    }

    /// How much of the journal's end a crash may take: part of a progress record, nothing else, since
    /// for all others somebody waits until they are in the kernel.
    fn torn_tail(&mut self) -> Option<usize> {
        let mut rest = self.journal.as_slice();
        let mut last = None;
        while let Ok((record, length)) = decode(rest) {
            last = Some((record, length));
            rest = &rest[length..];
        }
        match last {
            Some((Record::Progress { .. }, length)) => {
                Some(usize::try_from(self.below(length as u64 + 1)).unwrap())
            }
            _ => None,
        }
    }

    fn lease_all(&mut self) {
        for (account, amount) in self.ledger.lease_whole(self.boot) {
            self.purses.entry(account.0).or_default().grant(amount);
        }
    }

    fn agree(&mut self) {
        let leases: HashMap<i64, i64> = self
            .ledger
            .leases(self.boot)
            .unwrap()
            .into_iter()
            .map(|(id, amount)| (id.0, amount.nano()))
            .collect();
        let mut unposted: HashMap<i64, i64> = HashMap::new();
        for settled in &self.queue {
            *unposted.entry(settled.account).or_default() += settled.settlement().charged().nano();
        }
        for row in self.ledger.accounts(None).unwrap() {
            let oracle = self.oracle.get(&row.id).copied().unwrap_or_default();
            let waits = unposted.get(&row.id).copied().unwrap_or_default();
            let balance = oracle.came_in - oracle.went_out - oracle.charged;
            assert!(balance >= 0, "seed {}: below zero", self.seed);
            assert_eq!(i128::from(row.balance_nano - waits), balance, "seed {}: balance", self.seed);
            assert_eq!(row.leased_nano, row.balance_nano, "seed {}: all money is leased", self.seed);
            let waiting = self.queue.iter().filter(|s| s.account == row.id).count();
            assert_eq!(row.calls + i64::try_from(waiting).unwrap(), oracle.calls, "each call once");
            if let Some(purse) = self.purses.get(&row.id) {
                let (free, held) = (purse.available().nano(), purse.held().nano());
                assert!(free >= 0 && held >= 0, "seed {}: free {free}, held {held}", self.seed);
                let leased = leases.get(&row.id).copied().unwrap_or_default();
                assert_eq!(free + held, leased - waits, "seed {}: the purse is the lease", self.seed);
                let open = self.open.iter().filter(|o| o.hold.account == row.id);
                assert_eq!(open.clone().map(|o| o.hold.amount).sum::<i64>(), held);
                assert!(open.count() as u64 <= CONCURRENCY);
            }
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

fn play(seeds: u64, ledger: impl Fn() -> Box<dyn Whole>) {
    let seeds: Vec<u64> = match number("TOLLGATE_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("TOLLGATE_SEEDS").unwrap_or(seeds)).collect(),
    };
    for seed in seeds {
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut world = World::new(seed, ledger());
            (0..STEPS).for_each(|_| world.step());
            world.die();
            world.agree();
        }));
        assert!(played.is_ok(), "replay it with TOLLGATE_SEED={seed}");
    }
}

#[test]
fn whatever_happens_the_sums_agree() {
    play(SEEDS, || Box::new(Sqlite::in_memory().unwrap()));
}

#[test]
fn whatever_happens_the_sums_agree_in_postgres() {
    play(SEEDS_POSTGRES, || Box::new(postgres::database().ledger()));
}
