//! Ends that their node could not post: it is gone with its disk, or slow; and holds that nobody ended.
//!
//! Every end stands in Redis' outbox too, until its node has booked it. What is left there after a while is read and
//! booked by whoever comes first; the ledger passes over what it has.

use std::collections::HashMap;
use std::time::Duration;

use super::{Servers, every};
use crate::clock;
use crate::journal::Settled;
use crate::ledger::postgres::Reaped;
use crate::ledger::{Ledger as _, LedgerError};
use crate::ops::heartbeat;
use crate::store::redis::{End, Outgoing, SHARDS};

/// How often the outboxes are read.
const READ: Duration = Duration::from_secs(2);
/// Rounds between two looks at how much waits in all.
const COUNT: u32 = 5;
/// The most of a shard at a time.
const AT_ONCE: u32 = 256;
/// What another node has read and not acknowledged for so long is read by this one: it is gone, or its ledger is slow, and
/// to book twice is no harm.
const IDLE: Duration = Duration::from_secs(10);
/// A node posts from its journal, and says so, within a second or two: so long an end is left to it.
const FRESH: Duration = Duration::from_secs(5);

pub(super) async fn post(servers: Servers, boot: i64) {
    let shards: Vec<u16> = (0..SHARDS).collect();
    let consumer = format!("boot-{boot}");
    let job = heartbeat::job("outbox", READ);
    let mut tick = every(READ);
    let mut more = false;
    for round in 0_u32.. {
        // A shard that gave as much as it may has more.
        if !std::mem::take(&mut more) {
            tick.tick().await;
        }
        if round % COUNT == 0
            && let Ok(length) = servers.redis.outbox_length().await
        {
            servers.metrics.outbox.set(i64::try_from(length).unwrap_or(i64::MAX));
            servers.metrics.outbox_oldest.set(oldest(&servers, length).await);
        }
        let read = match servers.redis.outbox_read(&consumer, &shards, AT_ONCE, IDLE, FRESH).await {
            Ok(read) if read.is_empty() => {
                job.done();
                continue;
            }
            Ok(read) => read,
            Err(error) => {
                job.failed(&error);
                tracing::debug!(%error, "the outbox cannot be read");
                continue;
            }
        };
        let mut ids: HashMap<u16, Vec<String>> = HashMap::new();
        let (mut settled, mut reaped) = (vec![], vec![]);
        for Outgoing { shard, id, end } in read {
            ids.entry(shard).or_default().push(id);
            match end {
                End::Settled(end) => settled.push(end),
                End::Reaped { hold, boot, cost } => reaped.push(Reaped { hold, boot, checkpoint: cost }),
            }
        }
        if let Err(error) = book(&servers, boot, settled, reaped).await {
            job.failed(&error);
            tracing::warn!(%error, "the outbox waits for the ledger");
            continue;
        }
        more = ids.values().any(|ids| ids.len() >= usize::try_from(AT_ONCE).unwrap_or(usize::MAX));
        for (shard, ids) in ids {
            if let Err(error) = servers.redis.outbox_acknowledge(shard, &ids).await {
                more = false;
                tracing::debug!(%error, shard, "the outbox is read again");
            }
        }
        job.done();
    }
}

/// How long the oldest of so many has waited, in seconds.
async fn oldest(servers: &Servers, length: u64) -> f64 {
    if length == 0 {
        return 0.0;
    }
    let Ok(Some(came)) = servers.redis.outbox_oldest_ms().await else { return 0.0 };
    let waits = u64::try_from(clock::unix_ms() - came).unwrap_or_default();
    Duration::from_millis(waits).as_secs_f64()
}

async fn book(
    servers: &Servers,
    boot: i64,
    settled: Vec<Settled>,
    reaped: Vec<Reaped>,
) -> Result<(), LedgerError> {
    let booked = servers.ask(move |ledger| {
        ledger.clone().post(boot, &settled)?;
        ledger.post_reaped(&reaped, clock::unix_ms())
    });
    booked.await.map(|_| ())
}
