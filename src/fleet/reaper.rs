//! Holds of nodes that are gone.
//!
//! A hold of a node that lives is never touched, however long nobody heard of it: the node's journal has its end. One
//! whose boot is over ends at what the ledger has booked for it; of one whose journal is lost the last checkpoint is
//! charged, in the ledger first, and the rest goes to suspense.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use filters::ids::HoldId;
use filters::money::Amount;

use super::{Servers, every};
use crate::clock;
use crate::journal::Pool;
use crate::ledger::LedgerError;
use crate::ledger::postgres::{BootState, Reaped};
use crate::store::fleet::Fleet;
use crate::store::redis::{Overdue, SHARDS};

/// How often it is looked for them.
const LOOK_FOR: Duration = Duration::from_secs(2);
/// When one that may not be ended yet is looked at again.
const AGAIN: Duration = Duration::from_secs(10);
/// The most of a shard at a time.
const AT_ONCE: u32 = 64;

pub(super) async fn reap(servers: Servers, store: Arc<Fleet>) {
    let mut tick = every(LOOK_FOR);
    loop {
        tick.tick().await;
        let looks = (0..SHARDS).map(|shard| Pool { shard, epoch: store.epoch(shard) });
        let looks = looks.filter(|pool| pool.epoch > 0).map(|pool| {
            let redis = &servers.redis;
            async move { redis.overdue(pool, AT_ONCE, AGAIN).await.ok().map(|overdue| (pool, overdue)) }
        });
        for (pool, overdue) in futures::future::join_all(looks).await.into_iter().flatten() {
            if !overdue.is_empty()
                && let Err(error) = end(&servers, pool, overdue).await
            {
                tracing::warn!(%error, shard = pool.shard, "holds of a node that is gone cannot be ended yet");
            }
        }
    }
}

async fn end(servers: &Servers, pool: Pool, overdue: Vec<Overdue>) -> Result<(), LedgerError> {
    let boots: HashSet<i64> = overdue.iter().map(|it| it.boot).collect();
    let boots: Vec<i64> = boots.into_iter().collect();
    let states = servers.ask(move |ledger| ledger.boot_states(&boots)).await?;
    let states: HashMap<i64, BootState> = states.into_iter().collect();
    // A boot that nobody knows is of another ledger; its holds are not ours to end.
    let is_lost = |it: &Overdue| states.get(&it.boot) == Some(&BootState::Lost);
    let lost: Vec<Reaped> = overdue.iter().filter(|it| is_lost(it)).map(reaped).collect();
    let gone: Vec<Overdue> = overdue
        .iter()
        .filter(|it| matches!(states.get(&it.boot), Some(BootState::Over | BootState::Lost)))
        .cloned()
        .collect();
    if gone.is_empty() {
        return Ok(());
    }
    let ids: Vec<HoldId> = gone.iter().map(|it| HoldId(it.hold.id)).collect();
    let booked = servers
        .ask(move |ledger| {
            ledger.post_reaped(&lost, clock::unix_ms())?;
            ledger.settlings(&ids)
        })
        .await?;
    let booked: HashMap<HoldId, Amount> = booked.into_iter().map(|it| (it.hold, it.taken)).collect();
    for overdue in gone {
        // Of a boot that is lost the ledger has taken the whole hold, and gives back by itself what it did not cost.
        let charged = if is_lost(&overdue) {
            Amount::from_nano(overdue.hold.amount)
        } else {
            booked.get(&HoldId(overdue.hold.id)).copied().unwrap_or(Amount::ZERO)
        };
        match servers.redis.end_overdue(pool, &overdue, charged).await {
            Ok(_) => tracing::info!(
                hold = %HoldId(overdue.hold.id), boot = overdue.boot, %charged, "a hold of a node that is gone has ended"
            ),
            Err(error) => tracing::debug!(%error, "a hold of a node that is gone cannot be ended yet"),
        }
    }
    Ok(())
}

/// A hold of which no more is known than its last checkpoint.
fn reaped(overdue: &Overdue) -> Reaped {
    let Overdue { hold, boot, cost } = overdue;
    Reaped { hold: hold.clone(), boot: *boot, checkpoint: *cost }
}
