//! Tells Redis how holds ended. Nobody waits for it: the journal has it by then.
//!
//! The thread that served a call tells it, on its own connection, so that no other has to be woken for it: once, in a task
//! of its own that lives no longer than a command may take. What Redis does not take then, or what the end of the thread
//! cuts off, goes into a queue, and is told from there until Redis has it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use filters::ids::{AccountId, HoldId};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tokio::runtime::Handle;
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

/// Tells it from here, if calls are served here. The end counts as not told until then.
pub(super) fn tell_from_here(inner: &Arc<Inner>, end: End) {
    let telling = Telling { inner: Arc::clone(inner), end: Some(end) };
    if let Ok(here) = Handle::try_current() {
        // It ends with its command, or with the runtime; either way the end is told or queued. There are no more of them
        // than holds may be open.
        drop(here.spawn(telling.once()));
    }
}

/// An end that is being told. Whoever drops it before Redis has it puts it into the queue.
struct Telling {
    inner: Arc<Inner>,
    end: Option<End>,
}

impl Telling {
    async fn once(mut self) {
        if let Some(end) = &self.end
            && tell_once(&self.inner, end).await
        {
            self.end = None;
            self.inner.unended.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            self.inner.queue(end);
        }
    }
}

async fn tell(inner: Arc<Inner>, end: End) {
    while !tell_once(&inner, &end).await {
        tokio::time::sleep(END_AGAIN).await;
    }
}

/// Whether nothing is left to tell.
async fn tell_once(inner: &Inner, end: &End) -> bool {
    let asked_at = clock::now();
    let (pool, told) = match end {
        End::Settled(settled, pool) => (*pool, inner.redis.settle(*pool, settled).await),
        End::Void(account, hold, pool) => (*pool, inner.redis.void(*account, *pool, *hold).await),
    };
    inner.took("settle", asked_at);
    match told {
        Err(RedisError::Stale(_)) => {
            inner.metrics.redis_stale.inc();
            return true;
        }
        Ok(_) | Err(RedisError::NoSuch) => return true,
        Err(RedisError::Refused(error)) => {
            tracing::error!(breach = "end_refused", %error, shard = pool.shard, "redis refuses the end of a hold");
        }
        Err(error) => tracing::debug!(%error, shard = pool.shard, "redis cannot be told of an end"),
    }
    pool.epoch < inner.lock().epoch(pool.shard)
}
