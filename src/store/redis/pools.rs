//! Pools: what the ledger leases to a server, and what of it is where.
//!
//! Who may call what is the fleet's protocol: an epoch is marked once, by the node that has counted it up in the
//! ledger, and never again, not even after a lost answer.

use std::fmt;

use filters::ids::AccountId;
use filters::money::Amount;

use super::node::Lane;
use super::words::Words;
use super::{Redis, RedisError, RunId, SHARDS, money, shard_of};
use crate::journal::Pool;

/// Which process answers for a shard, and the epoch that was marked in it, if one was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    pub run: RunId,
    pub epoch: Option<i64>,
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.epoch {
            Some(epoch) => write!(f, "epoch {epoch} of process {}", self.run),
            None => write!(f, "process {}, not marked", self.run),
        }
    }
}

/// What became of a mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Marked {
    /// The process spends under this epoch now. What it held under others is gone, but for the outbox.
    Now,
    /// It is another process, or has been marked with this epoch or a later one before.
    Refused(Fence),
}

/// What installing added to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    pub added: Amount,
    /// All that was ever installed.
    pub total: Amount,
}

/// What a recall took out of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recalled {
    pub now: Amount,
    /// All that was ever recalled from this pool, so that an answer that was lost loses no money.
    pub in_all: Amount,
}

/// Where a pool's money is: `installed = available + held + captured + recalled`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolState {
    pub installed: Amount,
    pub available: Amount,
    pub held: Amount,
    /// Charged: of holds, and above them.
    pub captured: Amount,
    pub recalled: Amount,
}

impl Redis {
    /// Which processes answer, and for which shards. Shards that nobody answers for are left out.
    ///
    /// # Errors
    /// When no server answers.
    pub async fn run_ids(&self) -> Result<Vec<(Vec<u16>, RunId)>, RedisError> {
        let mut found = vec![];
        let mut failed = RedisError::Open;
        // Where nobody says it now, what was last known has to do.
        let _as_known = self.inner.map.refresh().await;
        for (_, shards) in self.inner.map.shards(&self.inner.prefix) {
            let Some(first) = shards.first() else { continue };
            match self.fence(*first).await {
                Ok(fence) => found.push((shards, fence.run)),
                Err(error) => failed = error,
            }
        }
        if found.is_empty() { Err(failed) } else { Ok(found) }
    }

    /// Which process answers for a shard, and with which epoch.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn fence(&self, shard: u16) -> Result<Fence, RedisError> {
        let mut answer = self.verb(Lane::Background, shard, "fence", &[]).await?;
        let run = RunId(std::mem::take(&mut answer.word));
        let epoch = answer.text()?;
        let epoch =
            if epoch.is_empty() { None } else { Some(epoch.parse().map_err(|_| RedisError::Unreadable)?) };
        Ok(Fence { run, epoch })
    }

    /// Lets this process spend under this epoch. Send it once for an epoch, also when the answer is lost: a process
    /// that was flushed meanwhile would take the same pools in twice.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn mark(&self, shard: u16, run: &RunId, epoch: i64) -> Result<Marked, RedisError> {
        if shard >= SHARDS || epoch < 0 {
            return Err(RedisError::NoSuch);
        }
        let args = [run.0.clone().into_bytes(), epoch.to_string().into_bytes()];
        let mut answer = self.verb(Lane::Background, shard, "mark", &args).await?;
        match answer.word.as_str() {
            "OK" => Ok(Marked::Now),
            "STALE" => Ok(Marked::Refused(answer.fence()?)),
            _ => Err(RedisError::Unreadable),
        }
    }

    /// Raises a pool to `total`: all that the ledger has *ever* leased to it, what was returned included. Adds what
    /// is new of it, so that anybody may repeat it, in any order.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn install(
        &self,
        account: AccountId,
        pool: Pool,
        total: Amount,
    ) -> Result<Installed, RedisError> {
        let total_nano = money(total).ok_or(RedisError::NoSuch)?;
        let mut answer = self.of_pool(Lane::Background, "install", account, pool, Some(total_nano)).await?;
        let before = answer.amount()?;
        Ok(Installed { added: total.less(before), total: total.max(before) })
    }

    /// Takes free money out of a pool for good, for the ledger to return.
    ///
    /// # Errors
    /// [`RedisError`]; the next recall tells what one whose answer was lost has taken.
    pub async fn recall(
        &self,
        account: AccountId,
        pool: Pool,
        at_most: Amount,
    ) -> Result<Recalled, RedisError> {
        let most = money(at_most).ok_or(RedisError::NoSuch)?;
        let mut answer = self.of_pool(Lane::Background, "recall", account, pool, Some(most)).await?;
        Ok(Recalled { now: answer.amount()?, in_all: answer.amount()? })
    }

    /// Where a pool's money is; all zeros for one that nothing was installed in.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn pool(&self, account: AccountId, pool: Pool) -> Result<PoolState, RedisError> {
        let mut answer = self.of_pool(Lane::Background, "pool", account, pool, None).await?;
        Ok(PoolState {
            installed: answer.amount()?,
            available: answer.amount()?,
            held: answer.amount()?,
            captured: answer.amount()?,
            recalled: answer.amount()?,
        })
    }

    async fn of_pool(
        &self,
        lane: Lane,
        verb: &str,
        account: AccountId,
        pool: Pool,
        amount: Option<i64>,
    ) -> Result<super::Answer, RedisError> {
        if pool.shard != shard_of(account) {
            return Err(RedisError::NoSuch);
        }
        let mut words = Words::default();
        words.number(pool.epoch);
        words.number(account.0);
        if let Some(amount) = amount {
            words.number(amount);
        }
        self.ask(lane, pool.shard, verb, &words).await?.good()
    }
}
