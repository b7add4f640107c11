//! Holds that nobody touches any more.
//!
//! Redis takes such a hold out, gives nothing of it back, and says so in the outbox; what becomes of it is decided in the
//! ledger (`ledger::postgres::reaped`), by what is booked and by what is known of its boot. So it does no harm when
//! the node lives after all: its own end settles the difference. What a live node does not hold any more (an admission
//! whose answer was lost, and whose void came late) it says here, so that nothing waits for it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::epochs::Epochs;
use super::{Servers, every};
use crate::clock;
use crate::journal::Pool;
use crate::ledger::{LedgerError, Postgres};
use crate::ops::heartbeat;
use crate::store::fleet::Fleet;
use crate::store::redis::{RedisError, SHARDS};

/// How often it is looked for them.
const LOOK_FOR: Duration = Duration::from_secs(2);
/// The most of a shard at a time.
const AT_ONCE: u32 = 64;

/// After so long nothing that a boot held when it was given up is untouched and unseen: longer than any slot's lease.
const SURELY_SEEN: Duration = Duration::from_secs(180);

/// Also finds shards that have lost their mark without a call of theirs that would meet it.
pub(super) async fn reap(servers: Servers, store: Arc<Fleet>, epochs: Arc<Epochs>, boot: i64) {
    let job = heartbeat::job("reaper", LOOK_FOR);
    let mut tick = every(LOOK_FOR);
    let mut suspects = Suspects::default();
    loop {
        tick.tick().await;
        let (mut stale, mut quiet) = (vec![], HashSet::new());
        let pools = (0..SHARDS).map(|shard| Pool { shard, epoch: store.epoch(shard) });
        let redis = &servers.redis;
        let looks = pools.filter(|pool| pool.epoch > 0);
        let looks = looks.map(|pool| async move { (pool.shard, redis.reap(pool, AT_ONCE).await) });
        for (shard, reaped) in futures::future::join_all(looks).await {
            match reaped {
                Ok(reaped) if reaped.is_empty() => {
                    quiet.insert(shard);
                }
                Ok(reaped) => reaped.iter().for_each(|hold| {
                    tracing::info!(%hold, "nobody has touched a hold for its lifetime: the ledger decides");
                }),
                Err(RedisError::Stale(_)) => stale.push(shard),
                Err(error) => tracing::debug!(%error, shard, "a shard's holds cannot be looked at"),
            }
        }
        let finished = finish(&servers, &store, boot).await;
        job.ended(&finished);
        if let Err(error) = finished {
            tracing::debug!(%error, "what waits of this node's reaped holds cannot be finished yet");
        }
        if let Err(error) = suspects.clear(&servers, &quiet).await {
            tracing::debug!(%error, "pools cannot be cleared of suspicion yet");
        }
        if !stale.is_empty() {
            epochs.renew(&stale).await;
        }
    }
}

/// Pools in use of which a boot that was given up may have spent. Nothing of it is left in one where for long no hold
/// was untouched and where the outbox has been posted.
#[derive(Default)]
struct Suspects {
    since: HashMap<Pool, Instant>,
}

impl Suspects {
    /// `quiet`: shards without untouched holds.
    async fn clear(&mut self, servers: &Servers, quiet: &HashSet<u16>) -> Result<(), LedgerError> {
        let pools = servers.ask(Postgres::suspects).await?;
        let now = clock::now();
        self.since.retain(|pool, _| pools.contains(pool));
        let mut cleared = vec![];
        for pool in pools {
            let since = *self.since.entry(pool).or_insert(now);
            let long = now.saturating_duration_since(since) >= SURELY_SEEN;
            if long
                && quiet.contains(&pool.shard)
                && servers.redis.outbox_length_of(pool.shard).await == Ok(0)
            {
                cleared.push(pool);
            }
        }
        if cleared.is_empty() {
            return Ok(());
        }
        tracing::info!(
            pools = cleared.len(),
            "nothing of a node that was given up is left in pools that it knew"
        );
        servers.ask(move |ledger| ledger.unsuspect(&cleared)).await
    }
}

/// Of the holds that were taken from this node: nothing comes of those that it does not know.
async fn finish(servers: &Servers, store: &Fleet, boot: i64) -> Result<(), LedgerError> {
    let waiting = servers.ask(move |ledger| ledger.reaped(boot)).await?;
    let gone = store.not_ours(waiting);
    if gone.is_empty() {
        return Ok(());
    }
    let freed = servers.ask(move |ledger| ledger.finish_reaped(boot, &gone)).await?;
    tracing::info!(%freed, "holds that this node gave up are free again");
    Ok(())
}
