//! Random histories, played on a purse in memory and on the servers: every answer is the same.
//!
//! `TOLLGATE_SEED=<n>` plays one seed, `TOLLGATE_SEEDS=<n>` plays so many.

use std::collections::HashMap;

use filters::ids::{HoldId, KeyDigest};
use filters::limit::budget::{Budget, Period, Zone};
use filters::limit::{Limits, Now, Want};
use filters::money::{Amount, Settlement};
use filters::purse::{EndHold, Purse, Refused, Reserve};
use rand_core::{RngCore as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;
use tollgate::store::redis::{Ended, RedisDeny};

use super::rig::{Ask, Payer, Rig, nano};

const SEEDS: u64 = 12;
const STEPS: u32 = 250;
const MODELS: [&str; 3] = ["a", "b", "free"];
/// Of whole histories: cents, what Lua's numbers print wrongly, what they cannot hold, and the end.
const SCALES: [i64; 4] = [1_000, 100_000_000_000_000, 1 << 53, 1 << 61];

pub async fn histories(rig: &Rig) {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seeds = match number("TOLLGATE_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("TOLLGATE_SEEDS").unwrap_or(SEEDS)).collect(),
    };
    let (mut admitted, mut refused) = (0, 0);
    for seed in seeds {
        let mut world = World::new(rig, seed).await;
        for step in 0..STEPS {
            world.step(step).await;
        }
        admitted += world.admitted;
        refused += world.refused;
    }
    assert!(admitted > 20 && refused > 10, "{admitted} admitted, {refused} refused");
}

struct World<'a> {
    seed: u64,
    rng: Pcg64Mcg,
    payer: Payer<'a>,
    purse: Purse,
    scale: i64,
    total: i64,
    open: Vec<(HoldId, i64, KeyDigest)>,
    admitted: u32,
    refused: u32,
}

impl<'a> World<'a> {
    async fn new(rig: &'a Rig, seed: u64) -> Self {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let scale = SCALES[usize::try_from(seed % 4).unwrap()];
        let mut payer = rig.payer(0).await;
        payer.scopes.key = limits(&mut rng, scale);
        payer.scopes.account = limits(&mut rng, scale);
        let models: HashMap<String, Limits> =
            MODELS[..2].iter().map(|model| ((*model).to_owned(), limits(&mut rng, scale))).collect();
        payer.scopes.models = models;
        let (open, purse) = (vec![], Purse::default());
        Self { seed, rng, payer, purse, scale, total: 0, open, admitted: 0, refused: 0 }
    }

    fn below(&mut self, most: i64) -> i64 {
        below(&mut self.rng, most)
    }

    fn now(&self) -> Now {
        Now { ms: self.payer.now_ms.unsigned_abs(), unix_ms: self.payer.now_ms }
    }

    async fn step(&mut self, step: u32) {
        match self.below(20) {
            0..=1 => self.grant().await,
            2 => self.recall().await,
            3..=5 => {
                let ms = match self.below(40) {
                    0 => 86_400_000 * self.below(40),
                    1..=3 => 60_000,
                    4..=8 => 999,
                    _ => self.below(20_000),
                };
                self.payer.advance(ms).await;
            }
            6..=11 if !self.open.is_empty() => self.end().await,
            _ => self.admit().await,
        }
        let money = self.payer.money().await;
        let expected = (self.purse.available().nano(), self.purse.held().nano());
        assert_eq!(money, expected, "seed {}, step {step}", self.seed);
    }

    async fn grant(&mut self) {
        let more = self.below(self.scale / 2).min((1 << 62) - 1 - self.total);
        self.total += more;
        self.purse.grant(nano(more));
        self.payer.install(self.total).await;
    }

    async fn recall(&mut self) {
        let at_most = nano(self.below(self.scale / 8));
        let taken = self.payer.rig.redis.recall(self.payer.account, self.payer.pool, at_most).await.unwrap();
        assert_eq!(taken.now, at_most.min(self.purse.available()));
        self.purse.withdraw(taken.now).unwrap();
    }

    async fn admit(&mut self) {
        let amount = match self.below(8) {
            0 => 0,
            1 => self.purse.available().nano(),
            2 => self.purse.available().nano().saturating_add(1).min((1 << 62) - 1),
            3..=5 => self.below(self.scale / 50),
            _ => self.below(self.scale / 5),
        };
        let tokens = self.below(700).unsigned_abs();
        let first = usize::try_from(self.below(3)).unwrap();
        let count = usize::try_from(self.below(3)).unwrap() + 1;
        self.payer.models = (0..count).map(|i| MODELS[(first + i) % 3].to_owned()).collect();
        let key = KeyDigest([u8::try_from(self.below(2)).unwrap(); 32]);
        // Keys of other histories are other keys.
        let mut key = key.0;
        key[1..9].copy_from_slice(&self.payer.account.0.to_be_bytes());
        self.payer.key = KeyDigest(key);
        let (id, ask) = (self.payer.rig.hold_id(), Ask { amount, tokens });
        let want = Want { tokens, amount: nano(amount) };
        let reserve = Reserve {
            hold: id,
            key: self.payer.key,
            models: &self.payer.models,
            scopes: &self.payer.scopes,
            want,
        };
        let expected = self.purse.reserve(self.now(), &reserve);
        let answer = admit(&self.payer, id, ask).await;
        match (&expected, &answer) {
            (Ok(standing), Ok(found)) => {
                assert_eq!(standing, found, "seed {}", self.seed);
                self.open.push((id, amount, self.payer.key));
                self.admitted += 1;
            }
            (Err(Refused::Funds { available }), Err(RedisDeny::Funds { available: found })) => {
                assert_eq!(available, found, "seed {}", self.seed);
                self.refused += 1;
            }
            (Err(Refused::Limited { scope, over }), Err(RedisDeny::Limited { scope: of, over: found })) => {
                assert_eq!((scope, over), (of, found), "seed {}", self.seed);
                self.refused += 1;
            }
            _ => panic!("seed {}: {expected:?} and {answer:?}", self.seed),
        }
    }

    async fn end(&mut self) {
        let count = i64::try_from(self.open.len()).unwrap();
        let index = usize::try_from(self.below(count)).unwrap();
        let (id, held, key) = self.open.swap_remove(index);
        let cost = match self.below(6) {
            0 => 0,
            1 => held,
            2 => held / 2,
            3 => held.saturating_add(self.below(self.scale / 5)).min((1 << 62) - 1),
            4 => self.purse.available().nano().saturating_add(held).saturating_add(1).min((1 << 62) - 1),
            _ => self.below(held + 1),
        };
        let model = MODELS[usize::try_from(self.below(3)).unwrap()];
        let tokens = self.below(900).unsigned_abs();
        let end = EndHold { hold: id, held: nano(held), key, model, cost: nano(cost), tokens, left: None };
        let (expected, _) = self.purse.end(self.now(), &end);
        let answer = self.payer.end_as(id, cost, model, tokens).await;
        assert_eq!(answer, Ended::Now(expected), "seed {}: {held} held, {cost}", self.seed);
        sound(&expected, cost);
    }
}

/// Admits, telling budgets what was spent before where that is asked: nothing.
async fn admit(payer: &Payer<'_>, id: HoldId, ask: Ask) -> Result<filters::purse::Standings, RedisDeny> {
    let asked = payer.admit_as(id, ask, super::rig::LIFETIME).await;
    let Err(RedisDeny::BudgetUnknown(unknown)) = asked else { return asked };
    for budget in &unknown {
        payer.rig.redis.restore_budget(payer.account, budget, Amount::ZERO).await.unwrap();
    }
    payer.admit_as(id, ask, super::rig::LIFETIME).await
}

fn sound(settlement: &Settlement, cost: i64) {
    let Settlement { held, captured, released, excess, shortfall } = *settlement;
    assert_eq!(captured.nano() + released.nano(), held.nano());
    assert_eq!(captured.nano() + excess.nano() + shortfall.nano(), cost);
}

fn limits(rng: &mut Pcg64Mcg, scale: i64) -> Limits {
    let mut some = |most: i64| {
        let limit = below(rng, most).unsigned_abs();
        (below(rng, 3) > 0).then_some(limit + 2)
    };
    let (requests_per_minute, tokens_per_minute, concurrency) = (some(30), some(9_000), some(12));
    let zones = ["UTC", "Asia/Tokyo", "Europe/Berlin"];
    let mut budgets = vec![];
    for period in [Period::Day, Period::Month] {
        if below(rng, 3) == 0 {
            let zone = Zone::find(zones[usize::try_from(below(rng, 3)).unwrap()]).unwrap();
            budgets.push(Budget { period, amount: nano(scale / 2 + below(rng, scale / 2)), zone });
        }
    }
    Limits { requests_per_minute, tokens_per_minute, concurrency, budgets }
}

fn below(rng: &mut Pcg64Mcg, most: i64) -> i64 {
    i64::try_from(rng.next_u64() % most.max(1).unsigned_abs()).unwrap()
}
