//! How holds end, and how they are kept until then.

use std::time::Duration;

use filters::ids::{AccountId, HoldId};
use filters::money::{Amount, Settlement};

use super::node::Lane;
use super::words::Words;
use super::{AMOUNT_MAX, Answer, Redis, RedisError, money, shard_of};
use crate::journal::record::Lent;
use crate::journal::{Pool, Settled};

/// What an end is made of. Most find room in that at once.
const WORDS: usize = 6;
const BYTES: usize = 512;
/// Lua counts tokens in doubles, and a minute's sum has room above it.
const TOKENS_MAX: u64 = 1 << 48;
/// Holds that one command touches, at most.
const TOUCHES_MAX: usize = 128;

/// What became of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It ended now, with these parts.
    Now(Settlement),
    /// It had ended before, with these; all zeros when it was ended before it came.
    Before(Settlement),
    /// It was reaped before: the ledger gets this end by the journal alone.
    Reaped,
    /// Nobody knows it. It will not be placed any more.
    Unknown,
}

/// How far a call has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    pub hold: HoldId,
    /// What it has cost so far.
    pub cost: Amount,
}

impl Redis {
    /// Ends a hold at what its call cost: all parts of `settled` but the hold and what was released. Captures,
    /// takes of an excess what is there, corrects the limits and puts the record into the outbox, with the parts
    /// that it answers.
    ///
    /// # Errors
    /// [`RedisError`]. After a lost answer it may be sent again.
    pub async fn settle(&self, pool: Pool, settled: &Settled) -> Result<Ended, RedisError> {
        let Settlement { held: _, captured, released: _, excess, shortfall } = settled.settlement();
        let cost = [captured, excess, shortfall]
            .into_iter()
            .fold(Amount::ZERO, |sum, part| sum.checked_add(part).unwrap_or(Amount::MAX));
        let usage = settled.usage();
        let tokens = usage.prompt().saturating_add(usage.output);
        let end = End {
            account: settled.account(),
            hold: settled.id,
            cost,
            model: &settled.model,
            tokens,
            record: Some(settled),
        };
        self.end(Lane::Request, pool, &end).await
    }

    /// Ends a hold at nothing, without a record for the ledger. One that has not come yet will not be placed.
    ///
    /// # Errors
    /// [`RedisError`]. After a lost answer it may be sent again.
    pub async fn void(&self, account: AccountId, pool: Pool, hold: HoldId) -> Result<Ended, RedisError> {
        let end = End { account, hold: hold.0, cost: Amount::ZERO, model: "", tokens: 0, record: None };
        self.end(Lane::Background, pool, &end).await
    }

    /// Ends the holds of a shard that nobody has touched for their lifetime, `limit` at most, and tells the ledger by
    /// the outbox. Nothing of them is free again in Redis: all of it counts as captured, since the node that is gone
    /// may have spent more than it said, and the ledger alone can know. Answers which.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn reap(&self, pool: Pool, limit: u32) -> Result<Vec<HoldId>, RedisError> {
        let args = [pool.epoch.to_string().into_bytes(), limit.to_string().into_bytes()];
        let answer = self.verb(Lane::Background, pool.shard, "reap", &args).await?.good()?;
        holds(answer)
    }

    /// Says that calls of one shard still run, and what they have cost so far. Answers those whose hold has ended:
    /// their calls must end too.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn touch(
        &self,
        pool: Pool,
        touches: &[Touch],
        lifetime: Duration,
    ) -> Result<Vec<HoldId>, RedisError> {
        let mut closed = vec![];
        for batch in touches.chunks(TOUCHES_MAX) {
            let mut words = Words::default();
            words.number(pool.epoch);
            words.number(lifetime.as_millis());
            for Touch { hold, cost } in batch {
                words.hex(&hold.0.to_be_bytes());
                words.number((*cost).clamp(Amount::ZERO, AMOUNT_MAX).nano());
            }
            let answer = self.ask(Lane::Background, pool.shard, "touch", &words).await?.good()?;
            closed.extend(holds(answer)?);
        }
        Ok(closed)
    }

    async fn end(&self, lane: Lane, pool: Pool, end: &End<'_>) -> Result<Ended, RedisError> {
        if pool.shard != shard_of(end.account) {
            return Err(RedisError::NoSuch);
        }
        // What no pool can hold is missing anyhow.
        let cost = end.cost.clamp(Amount::ZERO, AMOUNT_MAX);
        let words = end.words(pool, cost)?;
        let mut answer = self.ask(lane, pool.shard, "settle", &words).await?;
        match answer.word.as_str() {
            "UNKNOWN" => Ok(Ended::Unknown),
            "OK" => {
                let mut settlement = parts(&answer.text()?)?;
                let more = end.cost.less(cost);
                settlement.shortfall = settlement.shortfall.checked_add(more).unwrap_or(Amount::MAX);
                Ok(Ended::Now(settlement))
            }
            "REAPED" => Ok(Ended::Reaped),
            "CLOSED" => Ok(Ended::Before(parts(&answer.text()?)?)),
            "STALE" => Err(RedisError::Stale(answer.fence()?)),
            _ => Err(RedisError::Unreadable),
        }
    }
}

struct End<'a> {
    account: AccountId,
    hold: u128,
    cost: Amount,
    model: &'a str,
    tokens: u64,
    record: Option<&'a Settled>,
}

impl End<'_> {
    /// As `verbs.settle` in `library.lua` reads it.
    fn words(&self, pool: Pool, cost: Amount) -> Result<Words, RedisError> {
        let mut words = Words::with_capacity(WORDS, BYTES);
        words.number(pool.epoch);
        words.hex(&self.hold.to_be_bytes());
        words.number(money(cost).ok_or(RedisError::NoSuch)?);
        words.push(self.model.as_bytes());
        words.number(self.tokens.min(TOKENS_MAX));
        words.try_put(|out| match self.record {
            Some(settled) => Lent::PooledSettled(pool, settled).encode(out).map_err(|_| RedisError::NoSuch),
            None => Ok(()),
        })?;
        Ok(words)
    }
}

/// All parts, from the three that Lua can know without computing: held, cost and shortfall.
pub(super) fn parts(text: &str) -> Result<Settlement, RedisError> {
    let mut numbers = text.split(' ').map(|number| number.parse().map(Amount::from_nano));
    let mut next = || numbers.next().and_then(Result::ok).ok_or(RedisError::Unreadable);
    let (held, cost, shortfall) = (next()?, next()?, next()?);
    let captured = held.min(cost);
    let excess = cost.less(captured).less(shortfall);
    Ok(Settlement { held, captured, released: held.less(captured), excess, shortfall })
}

fn holds(mut answer: Answer) -> Result<Vec<HoldId>, RedisError> {
    let mut holds = vec![];
    while !answer.is_empty() {
        let id = u128::from_str_radix(&answer.text()?, 16).map_err(|_| RedisError::Unreadable)?;
        holds.push(HoldId(id));
    }
    Ok(holds)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::journal::record::{self, Record};

    proptest! {
        #[test]
        fn what_is_sent_is_what_was_sent_when_every_word_was_displayed(
            id: u128, account: i64, epoch: i64, cost in 0..AMOUNT_MAX.nano(), tokens: u64, has_record: bool,
        ) {
            let settled = Settled {
                id, account, request: "r".to_owned(), model: "gpt-é".to_owned(), endpoint: "e".to_owned(), attempts: 2,
                parts: [5, 4, 1, 0, 0], provider_cost: 3, abandoned: 0, key: [3; 32], held_ms: 9, price_version: 4,
                tokens: [1, 2, 3, 4, 5, 6, 7], estimated: true, anomaly: false, at_ms: 11, pool: None,
            };
            let pool = Pool { shard: shard_of(AccountId(account)), epoch };
            let record = has_record.then_some(&settled);
            let cost = Amount::from_nano(cost);
            let end = End { account: AccountId(account), hold: id, cost, model: &settled.model, tokens, record };
            let words = end.words(pool, cost).unwrap();
            let mut cmd = words.room();
            words.add_to(&mut cmd);

            let mut frame = vec![];
            if has_record {
                let of_pool = Settled { pool: Some(pool), ..settled.clone() };
                record::encode(&Record::of_settled(of_pool), &mut frame).unwrap();
            }
            let mut expected = redis::Cmd::new();
            expected.arg(epoch.to_string()).arg(format!("{id:032x}")).arg(cost.nano().to_string());
            expected.arg(&settled.model).arg(tokens.min(1 << 48).to_string()).arg(frame.as_slice());
            prop_assert_eq!(cmd.get_packed_command(), expected.get_packed_command());
        }
    }
}
