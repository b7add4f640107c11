//! Holds that nobody touches any more.
//!
//! Redis takes such a hold out, gives nothing of it back, and says so in the outbox; what becomes of it is decided in the
//! ledger (`ledger::postgres::reaped`), by what is booked and by what is known of its boot. So it does no harm when
//! the node lives after all: its own end settles the difference. What a live node does not hold any more (an admission
//! whose answer was lost, and whose void came late) it says here, so that nothing waits for it.

use std::sync::Arc;
use std::time::Duration;

use super::{Servers, every};
use crate::journal::Pool;
use crate::ledger::LedgerError;
use crate::store::fleet::Fleet;
use crate::store::redis::SHARDS;

/// How often it is looked for them.
const LOOK_FOR: Duration = Duration::from_secs(2);
/// The most of a shard at a time.
const AT_ONCE: u32 = 64;

pub(super) async fn reap(servers: Servers, store: Arc<Fleet>, boot: i64) {
    let mut tick = every(LOOK_FOR);
    loop {
        tick.tick().await;
        let pools = (0..SHARDS).map(|shard| Pool { shard, epoch: store.epoch(shard) });
        let looks = pools.filter(|pool| pool.epoch > 0).map(|pool| servers.redis.reap(pool, AT_ONCE));
        for reaped in futures::future::join_all(looks).await.into_iter().flatten().flatten() {
            tracing::info!(hold = %reaped, "nobody has touched a hold for its lifetime: the ledger decides");
        }
        if let Err(error) = finish(&servers, &store, boot).await {
            tracing::debug!(%error, "what waits of this node's reaped holds cannot be finished yet");
        }
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
