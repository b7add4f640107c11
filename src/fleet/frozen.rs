//! What a Redis that is gone still owes.
//!
//! Its pools are frozen in the ledger. Each node says what it may still spend of them, again and again until that is
//! nothing; what nobody claims is free at once. See `ledger::postgres::epochs` for the ledger's side of it.

use std::sync::Arc;

use super::epochs::Epochs;
use super::{BEAT, Servers, every};
use crate::ledger::postgres::Claim;
use crate::ops::heartbeat;
use crate::store::fleet::Fleet;

pub(super) async fn report(servers: Servers, store: Arc<Fleet>, epochs: Arc<Epochs>, boot: i64) {
    let job = heartbeat::job("frozen", BEAT);
    let mut tick = every(BEAT);
    loop {
        tick.tick().await;
        let asked = servers.ask(move |ledger| ledger.to_report(boot)).await;
        job.ended(&asked);
        let Ok(pools) = asked else { continue };
        servers.metrics.frozen_pools.set(i64::try_from(pools.len()).unwrap_or(i64::MAX));
        if pools.is_empty() {
            continue;
        }
        // First nothing begins in them any more; the claims are told of those of which that is true.
        if pools.iter().any(|pool| store.epoch(pool.shard) <= pool.epoch) {
            epochs.known().await;
        }
        let claims = store.claims(&pools).into_iter().map(|(pool, claims)| {
            let claims = claims.into_iter().map(|(account, amount)| Claim { account, amount });
            (pool, claims.collect::<Vec<_>>())
        });
        let reports: Vec<_> = claims.collect();
        match servers.ask(move |ledger| ledger.report_frozen(boot, &reports)).await {
            Ok(freed) if freed.is_positive() => {
                tracing::info!(%freed, "money of a redis that is gone is free again");
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "what a redis that is gone still owes cannot be reported"),
        }
    }
}
