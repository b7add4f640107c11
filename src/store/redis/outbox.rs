//! The outbox: how holds ended, for the ledger, when the node that ended them is gone before it could post.
//!
//! One stream for each shard, written in the same step that ends the hold, read by all nodes as one consumer group.

use std::time::Duration;

use super::node::Lane;
use super::settle::parts;
use super::words::Words;
use super::{Answer, Redis, RedisError, SHARDS, millis, shard_of};
use crate::journal::record::{self, Record};
use crate::journal::{Hold, Pool, Settled};
use data_encoding::HEXLOWER;
use filters::ids::{AccountId, KeyDigest};
use filters::money::Amount;

/// What one command acknowledges, at most.
const AT_ONCE: usize = 128;

/// How a hold ended, with its place in the outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    pub shard: u16,
    /// Of its entry in the stream.
    pub id: String,
    pub end: End,
}

/// What the ledger is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// A hold ended, with these parts.
    Settled(Settled),
    /// Nobody touched a hold for its lifetime. All of it counts as captured.
    Reaped {
        hold: Hold,
        /// Of the node that placed it.
        boot: i64,
        /// What its call had cost when it was last touched.
        cost: Amount,
    },
}

impl Redis {
    /// What the ledger does not have yet, as far as this consumer knows: first what it has read before and not
    /// acknowledged, and what others have read and not acknowledged for as long as `idle`; then what is new, once it is
    /// as old as `fresh`: before that it is left to the node that ended it. At most `limit` of each shard.
    ///
    /// # Errors
    /// When no shard can be read; those that can be read are.
    pub async fn outbox_read(
        &self,
        consumer: &str,
        shards: &[u16],
        limit: u32,
        idle: Duration,
        fresh: Duration,
    ) -> Result<Vec<Outgoing>, RedisError> {
        let args =
            [consumer.as_bytes().to_vec(), limit.to_string().into_bytes(), millis(idle), millis(fresh)];
        let args = &args;
        let reads = shards.iter().map(|shard| async move {
            let answer = self.verb(Lane::Background, *shard, "outbox", args).await?.good()?;
            outgoing(*shard, answer)
        });
        let mut found = vec![];
        let mut result = Ok(());
        let mut any = shards.is_empty();
        for read in futures::future::join_all(reads).await {
            match read {
                Ok(read) => {
                    any = true;
                    found.extend(read);
                }
                Err(error) => result = Err(error),
            }
        }
        if any { Ok(found) } else { result.map(|()| found) }
    }

    /// The ledger has the ends of these holds, which this node has ended. Of one that Redis has not heard the end of yet
    /// the entry stays, until somebody reads it.
    ///
    /// # Errors
    /// [`RedisError`]; their entries stay then.
    pub async fn booked(&self, pool: Pool, holds: &[u128]) -> Result<(), RedisError> {
        for batch in holds.chunks(AT_ONCE) {
            let mut words = Words::default();
            words.number(pool.epoch);
            batch.iter().for_each(|hold| words.hex(&hold.to_be_bytes()));
            self.ask(Lane::Background, pool.shard, "booked", &words).await?.good()?;
        }
        Ok(())
    }

    /// The ledger has these.
    ///
    /// # Errors
    /// [`RedisError`]; they are read again then, which the ledger passes over.
    pub async fn outbox_acknowledge(&self, shard: u16, ids: &[String]) -> Result<(), RedisError> {
        for batch in ids.chunks(AT_ONCE) {
            let args: Vec<Vec<u8>> = batch.iter().map(|id| id.clone().into_bytes()).collect();
            self.verb(Lane::Background, shard, "acknowledge", &args).await?.good()?;
        }
        Ok(())
    }

    /// How many ended holds wait in all shards.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn outbox_length(&self) -> Result<u64, RedisError> {
        let lengths = (0..SHARDS).map(|shard| self.outbox_length_of(shard));
        let lengths = futures::future::join_all(lengths).await;
        lengths.into_iter().try_fold(0, |sum: u64, length| Ok(sum.saturating_add(length?)))
    }

    /// How many ended holds wait in one shard.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn outbox_length_of(&self, shard: u16) -> Result<u64, RedisError> {
        let key = format!("{}:outbox", self.base(shard));
        let mut cmd = redis::cmd("XLEN");
        cmd.arg(&key);
        let value = self.command(Lane::Background, &key, &cmd).await?;
        redis::from_redis_value::<u64>(value).map_err(|_| RedisError::Unreadable)
    }

    /// When the oldest ended hold of all shards came that nobody has acknowledged, by Redis' clock, in milliseconds since
    /// 1970; `None`: none waits.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn outbox_oldest_ms(&self) -> Result<Option<i64>, RedisError> {
        let oldest = futures::future::join_all((0..SHARDS).map(|shard| self.outbox_oldest_of(shard))).await;
        oldest.into_iter().try_fold(None, |first: Option<i64>, of| {
            Ok(match (first, of?) {
                (Some(first), Some(of)) => Some(first.min(of)),
                (first, of) => first.or(of),
            })
        })
    }

    /// An acknowledged entry is deleted, and an entry's id begins with the time at which it came.
    async fn outbox_oldest_of(&self, shard: u16) -> Result<Option<i64>, RedisError> {
        let key = format!("{}:outbox", self.base(shard));
        let mut cmd = redis::cmd("XRANGE");
        cmd.arg(&key).arg("-").arg("+").arg("COUNT").arg(1);
        let value = self.command(Lane::Background, &key, &cmd).await?;
        let entries: Vec<(String, redis::Value)> =
            redis::from_redis_value(value).map_err(|_| RedisError::Unreadable)?;
        let came = |id: &str| id.split('-').next()?.parse().ok();
        Ok(entries.first().and_then(|(id, _)| came(id)))
    }

    /// From now on no hold is placed with this key, by any node.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn revoke(&self, account: AccountId, key: KeyDigest) -> Result<(), RedisError> {
        self.revoked(account, key, "SADD").await
    }

    /// The key is good again.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn reinstate(&self, account: AccountId, key: KeyDigest) -> Result<(), RedisError> {
        self.revoked(account, key, "SREM").await
    }

    async fn revoked(&self, account: AccountId, key: KeyDigest, verb: &str) -> Result<(), RedisError> {
        let set = format!("{}:revoked", self.base(shard_of(account)));
        let mut cmd = redis::cmd(verb);
        cmd.arg(&set).arg(HEXLOWER.encode(&key.0));
        self.command(Lane::Background, &set, &cmd).await.map(|_| ())
    }
}

fn outgoing(shard: u16, mut answer: Answer) -> Result<Vec<Outgoing>, RedisError> {
    let mut found = vec![];
    while !answer.is_empty() {
        let (id, bytes, text) = (answer.text()?, answer.bytes()?, answer.text()?);
        match (record::decode(&bytes), text.strip_prefix("X ")) {
            (Ok((Record::PooledSettled(_, mut settled), _)), None) => {
                settled.parts = Settled::parts_of(&parts(&text)?);
                found.push(Outgoing { shard, id, end: End::Settled(settled) });
            }
            (Ok((Record::PooledHold(_, hold), _)), Some(numbers)) => {
                let (boot, cost) = numbers.split_once(' ').ok_or(RedisError::Unreadable)?;
                let boot = boot.parse().map_err(|_| RedisError::Unreadable)?;
                let cost = cost.parse().map(Amount::from_nano).map_err(|_| RedisError::Unreadable)?;
                found.push(Outgoing { shard, id, end: End::Reaped { hold, boot, cost } });
            }
            // Only we write it. It stays, so that somebody can look at it.
            (Ok(_) | Err(_), _) => {
                tracing::error!(breach = "outbox", shard, id, "a record in the outbox is damaged");
            }
        }
    }
    Ok(found)
}
