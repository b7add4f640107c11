//! Tells Redis how holds ended. Nobody waits for it: the journal has it by then.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use filters::ids::{AccountId, HoldId};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tokio::sync::mpsc;

use super::Inner;
use crate::clock;
use crate::journal::{Pool, Settled};
use crate::store::redis::RedisError;

/// Ends that are on their way to Redis at once.
const ENDING_AT_ONCE: usize = 256;
/// How long an end that Redis did not take waits.
const END_AGAIN: Duration = Duration::from_millis(200);

/// What Redis is to be told of an end.
pub(super) enum End {
    Settled(Arc<Settled>, Pool),
    Void(AccountId, HoldId, Pool),
}

/// Tells Redis of ends.
pub struct Ends {
    pub(super) inner: Arc<Inner>,
    pub(super) ends: mpsc::Receiver<End>,
}

impl Ends {
    /// Tells them. Never ends: run it as a service. One that Redis does not take is told again; what it does not know,
    /// or belongs to an epoch that is over, needs no telling.
    pub async fn run(mut self) {
        let mut under_way = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some(()) = under_way.next(), if !under_way.is_empty() => {
                    self.inner.unended.fetch_sub(1, Ordering::AcqRel);
                }
                Some(end) = self.ends.recv(), if under_way.len() < ENDING_AT_ONCE => {
                    under_way.push(tell(Arc::clone(&self.inner), end));
                }
                // Nobody is left who could end a hold.
                else => std::future::pending().await,
            }
        }
    }
}

async fn tell(inner: Arc<Inner>, end: End) {
    loop {
        let asked_at = clock::now();
        let (pool, told) = match &end {
            End::Settled(settled, pool) => (*pool, inner.redis.settle(*pool, settled).await),
            End::Void(account, hold, pool) => (*pool, inner.redis.void(*account, *pool, *hold).await),
        };
        inner.took("settle", asked_at);
        match told {
            Err(RedisError::Stale(_)) => {
                inner.metrics.redis_stale.inc();
                return;
            }
            Ok(_) | Err(RedisError::NoSuch) => return,
            Err(RedisError::Refused(error)) => {
                tracing::error!(breach = "end_refused", %error, shard = pool.shard, "redis refuses the end of a hold");
            }
            Err(error) => tracing::debug!(%error, shard = pool.shard, "redis cannot be told of an end"),
        }
        if pool.epoch < inner.lock().epoch(pool.shard) {
            return;
        }
        tokio::time::sleep(END_AGAIN).await;
    }
}
