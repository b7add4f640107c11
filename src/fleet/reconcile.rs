//! Do Redis and the ledger agree on every pool?
//!
//! What is on its way between them differs for a moment, and differs otherwise at the next look. What is the same twice
//! in a row, with nothing moving, is drift: somebody has to look at it (docs/runbooks/drift.md).

use std::collections::HashSet;
use std::time::Duration;

use filters::ids::AccountId;
use filters::money::Amount;
use futures::StreamExt as _;
use futures::stream;

use super::{Servers, every};
use crate::journal::Pool;
use crate::ledger::LedgerError;
use crate::ledger::postgres::{Drift, PoolSeen, Postgres};
use crate::notice::{Event, Kind, Notifier};
use crate::ops::heartbeat;

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(300);
/// How soon again where something is wrong: what is on its way has come by then.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Pools that are asked for at once.
const ASKED_AT_ONCE: usize = 64;

/// Looks for drift as long as the node runs, and says it once, and once that it is over.
pub(super) async fn watch(servers: Servers) {
    let job = heartbeat::job("reconcile", LOOK);
    let mut tick = every(LOOK);
    let mut again = every(LOOK_AGAIN);
    let mut before: HashSet<String> = HashSet::new();
    let mut told: HashSet<String> = HashSet::new();
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            _ = again.tick(), if !before.is_empty() => {}
        }
        again.reset();
        job.begins();
        let looked = look(&servers).await;
        job.ended(&looked);
        let drifts = match looked {
            Ok(drifts) => drifts,
            Err(error) => {
                tracing::debug!(%error, "the ledger and redis cannot be compared");
                continue;
            }
        };
        let alarming: HashSet<String> =
            drifts.iter().filter(|drift| drift.is_alarming()).map(ToString::to_string).collect();
        for drift in alarming.intersection(&before).filter(|drift| !told.contains(*drift)) {
            tracing::error!(
                breach = "drift",
                drift,
                "redis and the ledger differ: see docs/runbooks/drift.md"
            );
            let text = format!("Redis and the ledger differ: {drift}");
            Notifier::tell(Event::begins(Kind::Drift, drift, text).of_fleet());
        }
        for drift in told.difference(&alarming) {
            tracing::info!(drift, "redis and the ledger agree again");
            let text = format!("Redis and the ledger agree again; it was: {drift}");
            Notifier::tell(Event::ends(Kind::Drift, drift, text).of_fleet());
        }
        told = alarming.intersection(&before).cloned().collect();
        servers.metrics.drifts.set(i64::try_from(told.len()).unwrap_or(i64::MAX));
        before = alarming;
    }
}

/// All differences, as they are at this moment: some of them are only on their way.
///
/// # Errors
/// [`LedgerError`] when the books cannot be read. Pools of a Redis that does not answer are left out.
pub async fn look(servers: &Servers) -> Result<Vec<Drift>, LedgerError> {
    let pools = servers.ask(Postgres::open_pools).await?;
    let seen: Vec<Option<PoolSeen>> = stream::iter(pools)
        .map(|(account, pool)| see(servers, account, pool))
        .buffer_unordered(ASKED_AT_ONCE)
        .collect()
        .await;
    let seen: Vec<PoolSeen> = seen.into_iter().flatten().collect();
    let known: HashSet<(AccountId, Pool)> = seen.iter().map(|seen| (seen.account, seen.pool)).collect();
    let mut drifts = servers.ask(move |ledger| ledger.reconcile(&seen)).await?;
    // Of what could not be seen nothing can be said.
    drifts.retain(|drift| match drift {
        Drift::NotInstalled(at, _) => known.contains(&(at.account, at.pool)),
        _ => true,
    });
    Ok(drifts)
}

async fn see(servers: &Servers, account: AccountId, pool: Pool) -> Option<PoolSeen> {
    let state = servers.redis.pool(account, pool).await.ok()?;
    Some(PoolSeen {
        account,
        pool,
        installed: state.installed,
        available: state.available,
        held: state.held,
        captured: state.captured,
        recalled: state.recalled,
        unposted: Amount::ZERO,
    })
}
