//! The store over some servers, with a clock that the test sets, and shorthands.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use filters::ids::{AccountId, HoldId, KeyDigest};
use filters::limit::{Limits, Scopes};
use filters::money::{Amount, settle};
use filters::purse::Standings;
use tollgate::config::checked::Redis as Config;
use tollgate::journal::{Hold, Pool, Settled};
use tollgate::store::redis::{Admission, Ended, PoolState, RedisDeny, SOURCE, shard_of};

use super::super::support::redis::{Kept, connect_with};

/// Nothing is overdue unless a test says so.
pub const LIFETIME: Duration = Duration::from_secs(86_400 * 400);

/// Time from a list instead of from the server, and a verb that writes it.
const CLOCK: &str = "redis.call('LRANGE', base .. ':clock', 0, 1)";
const SET_CLOCK: &str = "
function verbs.set_clock(base, args)
  redis.call('DEL', base .. ':clock')
  redis.call('RPUSH', base .. ':clock', args[1], args[2])
  return { 'OK' }
end
function verbs.left(base, args)
  return { tostring(#redis.call('KEYS', base .. ':*:' .. args[1])) }
end
function verbs.census(base)
  local endless = {}
  for _, kind in ipairs({ 'w', 'r', 'b' }) do
    for _, key in ipairs(redis.call('KEYS', base .. ':' .. kind .. ':*')) do
      if redis.call('PTTL', key) < 0 then endless[#endless + 1] = key end
    end
  end
  local keys = of_epoch(base, redis.call('HGET', base .. ':money', 'epoch'))
  local count = function(key) return tostring(redis.call('ZCARD', key)) end
  return { count(keys.ended), count(keys.due), table.concat(endless, ' ') }
end
";

pub struct Rig {
    pub redis: Kept,
    accounts: AtomicI64,
    holds: AtomicU64,
    epochs: AtomicI64,
}

/// An account with a pool of its own, and what its calls are like.
pub struct Payer<'a> {
    pub rig: &'a Rig,
    pub account: AccountId,
    pub pool: Pool,
    pub scopes: Scopes,
    pub key: KeyDigest,
    pub models: Vec<String>,
    pub now_ms: i64,
}

/// A call to place.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub amount: i64,
    pub tokens: u64,
}

pub fn money(amount: i64) -> Ask {
    Ask { amount, tokens: 0 }
}

pub fn nano(amount: i64) -> Amount {
    Amount::from_nano(amount)
}

/// The verbs with the test's clock.
pub fn with_clock() -> String {
    let source = SOURCE.replace("redis.call('TIME')", CLOCK);
    assert_ne!(source, SOURCE, "the clock is where it was");
    source + SET_CLOCK
}

impl Rig {
    pub async fn new(config: &Config) -> Self {
        let redis = connect_with(config, &with_clock()).await;
        Self { redis, accounts: AtomicI64::new(1), holds: AtomicU64::new(1), epochs: AtomicI64::new(1) }
    }

    /// A new account without limits, with this much.
    pub async fn payer(&self, total: i64) -> Payer<'_> {
        let account = AccountId(self.accounts.fetch_add(1, Ordering::Relaxed));
        let shard = shard_of(account);
        let fence = self.redis.fence(shard).await.unwrap();
        let epoch = match fence.epoch {
            Some(epoch) => epoch,
            None => {
                let epoch = self.epochs.fetch_add(1, Ordering::Relaxed);
                self.redis.mark(shard, &fence.run, epoch).await.unwrap();
                epoch
            }
        };
        let mut payer = Payer {
            rig: self,
            account,
            pool: Pool { shard, epoch },
            scopes: Scopes::default(),
            key: KeyDigest([u8::try_from(account.0 % 250).unwrap(); 32]),
            models: vec!["m".to_owned()],
            now_ms: 0,
        };
        // Counters expire by the server's own clock: the test's goes on from there.
        payer.set_now(tollgate::clock::unix_ms() / 1000 * 1000 + 1000).await;
        payer.install(total).await;
        payer
    }

    pub fn hold_id(&self) -> HoldId {
        HoldId(u128::from(self.holds.fetch_add(1, Ordering::Relaxed)))
    }
}

impl Payer<'_> {
    pub async fn set_now(&mut self, now_ms: i64) {
        self.now_ms = now_ms;
        let (seconds, micros) = (now_ms / 1000, now_ms % 1000 * 1000);
        let args = [seconds, micros].map(|number| number.to_string().into_bytes());
        self.rig.redis.call(self.pool.shard, "set_clock", &args).await.unwrap();
    }

    pub async fn advance(&mut self, ms: i64) {
        self.set_now(self.now_ms + ms).await;
    }

    pub async fn install(&self, total: i64) {
        self.rig.redis.install(self.account, self.pool, nano(total)).await.unwrap();
    }

    pub fn hold(&self, id: HoldId, amount: i64) -> Hold {
        self.hold_at(id, amount, self.now_ms)
    }

    pub fn hold_at(&self, id: HoldId, amount: i64, at_ms: i64) -> Hold {
        Hold {
            id: id.0,
            account: self.account.0,
            amount,
            at_ms,
            request: format!("req-{id}"),
            model: self.models[0].clone(),
            key: self.key.0,
            price_version: 1,
            pool: Some(self.pool),
        }
    }

    pub async fn admit_as(&self, id: HoldId, ask: Ask, lifetime: Duration) -> Result<Standings, RedisDeny> {
        let hold = self.hold(id, ask.amount);
        let admission = Admission {
            hold: &hold,
            pool: self.pool,
            boot: 7,
            models: &self.models,
            scopes: &self.scopes,
            tokens: ask.tokens,
            lifetime,
        };
        self.rig.redis.admit(&admission).await.map(|admitted| admitted.standings)
    }

    pub async fn admit(&self, ask: Ask) -> Result<HoldId, RedisDeny> {
        let id = self.rig.hold_id();
        self.admit_as(id, ask, LIFETIME).await.map(|_| id)
    }

    /// As a gateway writes it, which does not know what is available.
    pub fn settled(&self, id: HoldId, cost: i64, model: &str, tokens: u64) -> Settled {
        Settled {
            id: id.0,
            account: self.account.0,
            request: format!("req-{id}"),
            model: model.to_owned(),
            endpoint: "e".to_owned(),
            attempts: 1,
            parts: Settled::parts_of(&settle(Amount::ZERO, nano(cost), Amount::ZERO)),
            provider_cost: 1,
            abandoned: 0,
            key: self.key.0,
            held_ms: self.now_ms,
            price_version: 1,
            tokens: [tokens, 0, 0, 0, 0, 0, 0],
            estimated: false,
            anomaly: false,
            at_ms: self.now_ms,
            pool: Some(self.pool),
        }
    }

    pub async fn end(&self, id: HoldId, cost: i64) -> Ended {
        self.end_as(id, cost, "m", 0).await
    }

    pub async fn end_as(&self, id: HoldId, cost: i64, model: &str, tokens: u64) -> Ended {
        self.rig.redis.settle(self.pool, &self.settled(id, cost, model, tokens)).await.unwrap()
    }

    pub async fn state(&self) -> PoolState {
        let state = self.rig.redis.pool(self.account, self.pool).await.unwrap();
        let PoolState { installed, available, held, captured, recalled } = state;
        let sum: i128 =
            [available, held, captured, recalled].iter().map(|part| i128::from(part.nano())).sum();
        assert_eq!(i128::from(installed.nano()), sum, "{state:?}");
        assert!([available, held, captured, recalled].iter().all(|part| *part >= Amount::ZERO), "{state:?}");
        state
    }

    /// Available and held.
    pub async fn money(&self) -> (i64, i64) {
        let state = self.state().await;
        (state.available.nano(), state.held.nano())
    }

    pub fn limit_key(&mut self, limits: Limits) {
        self.scopes.key = limits;
    }
}

/// What a deny is about, in a word.
pub fn word(deny: &RedisDeny) -> String {
    match deny {
        RedisDeny::Limited { scope, over } => format!("{scope}: {}", over.kind.word()),
        deny => deny.to_string(),
    }
}
