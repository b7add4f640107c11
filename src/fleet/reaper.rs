//! Holds of nodes that are gone.
//!
//! A hold of a node that lives is never touched, however long nobody heard of it: the node's journal has its end. One
//! whose boot is over ends at what the ledger has booked for it; of one whose journal is lost the last checkpoint is
//! charged, in the ledger first, and the rest goes to suspense.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use filters::ids::HoldId;
use filters::meter::Used;
use filters::money::{Amount, settle};

use super::epochs::Epochs;
use super::{Servers, every};
use crate::clock;
use crate::journal::{Pool, Settled};
use crate::ledger::LedgerError;
use crate::ledger::postgres::BootState;
use crate::store::fleet::Fleet;
use crate::store::redis::{Overdue, RedisError, SHARDS};

/// How often it is looked for them.
const LOOK_FOR: Duration = Duration::from_secs(2);
/// When one that may not be ended yet is looked at again.
const AGAIN: Duration = Duration::from_secs(2);
/// The most of a shard at a time.
const AT_ONCE: u32 = 64;

/// Also finds shards that have lost their mark without a call of them that would meet it.
pub(super) async fn reap(servers: Servers, store: Arc<Fleet>, epochs: Arc<Epochs>) {
    let mut tick = every(LOOK_FOR);
    loop {
        tick.tick().await;
        let mut stale = vec![];
        let looks = (0..SHARDS).map(|shard| Pool { shard, epoch: store.epoch(shard) });
        let looks = looks.filter(|pool| pool.epoch > 0).map(|pool| {
            let redis = &servers.redis;
            async move { (pool, redis.overdue(pool, AT_ONCE, AGAIN).await) }
        });
        for (pool, overdue) in futures::future::join_all(looks).await {
            match overdue {
                Ok(overdue) if overdue.is_empty() => {}
                Ok(overdue) => {
                    if let Err(error) = end(&servers, pool, overdue).await {
                        tracing::warn!(%error, shard = pool.shard, "holds of a node that is gone cannot be ended yet");
                    }
                }
                Err(RedisError::Stale(_)) => stale.push(pool.shard),
                Err(error) => {
                    tracing::debug!(%error, shard = pool.shard, "a shard's holds cannot be looked at")
                }
            }
        }
        if !stale.is_empty() {
            epochs.renew(&stale).await;
        }
    }
}

async fn end(servers: &Servers, pool: Pool, overdue: Vec<Overdue>) -> Result<(), LedgerError> {
    let boots: HashSet<i64> = overdue.iter().map(|it| it.boot).collect();
    let boots: Vec<i64> = boots.into_iter().collect();
    let states = servers.ask(move |ledger| ledger.boot_states(&boots)).await?;
    let states: HashMap<i64, BootState> = states.into_iter().collect();
    // A boot that nobody knows is of another ledger; its holds are not ours to end.
    let is_lost = |it: &&Overdue| states.get(&it.boot) == Some(&BootState::Lost);
    let lost: Vec<Settled> = overdue.iter().filter(is_lost).map(checkpoint).collect();
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
            ledger.post_lost(&lost)?;
            ledger.settlings(&ids)
        })
        .await?;
    let booked: HashMap<HoldId, Amount> = booked.into_iter().map(|it| (it.hold, it.taken)).collect();
    for overdue in gone {
        let charged = booked.get(&HoldId(overdue.hold.id)).copied().unwrap_or(Amount::ZERO);
        match servers.redis.end_overdue(pool, &overdue, charged).await {
            Ok(_) => tracing::info!(
                hold = %HoldId(overdue.hold.id), boot = overdue.boot, %charged, "a hold of a node that is gone has ended"
            ),
            Err(error) => tracing::debug!(%error, "a hold of a node that is gone cannot be ended yet"),
        }
    }
    Ok(())
}

/// What a hold is charged of which no more is known than its last checkpoint.
fn checkpoint(overdue: &Overdue) -> Settled {
    let Overdue { hold, cost, .. } = overdue;
    let held = Amount::from_nano(hold.amount);
    Settled {
        id: hold.id,
        account: hold.account,
        request: hold.request.clone(),
        model: hold.model.clone(),
        endpoint: String::new(),
        attempts: 0,
        parts: Settled::parts_of(&settle(held, (*cost).min(held), Amount::ZERO)),
        provider_cost: 0,
        abandoned: 0,
        key: hold.key,
        held_ms: hold.at_ms,
        price_version: hold.price_version,
        tokens: Settled::tokens_of(&Used::default().usage),
        estimated: true,
        anomaly: false,
        at_ms: clock::unix_ms(),
        pool: hold.pool,
    }
}
