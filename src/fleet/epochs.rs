//! Who answers for a shard, and under which number money in it may be spent.
//!
//! A server's process is marked with an epoch that the ledger has counted up for it, once, by the node that counted.
//! A process that is not marked with the ledger's current epoch (it is another one, or has lost its memory) spends
//! nothing: every verb says so. Whoever meets that looks here: is somebody else marking it just now? If not, the epoch
//! goes one up, all pools of those before are frozen, and the process is marked with the new one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{BEAT, LOOK, Servers, every};
use crate::clock;
use crate::ledger::LedgerError;
use crate::ledger::postgres::Epoch;
use crate::ops::heartbeat;
use crate::store::fleet::Fleet;
use crate::store::redis::{Fence, Marked, RedisError, RunId, SHARDS};

/// How long a mark by another node is waited for, and how often it is looked for.
const MARKING: Duration = Duration::from_millis(300);
const MARKING_LOOK: Duration = Duration::from_millis(30);
/// How often one look may lose to other nodes before its caller is told that nobody knows.
const LOST_MAX: u32 = 3;

pub(super) struct Epochs {
    servers: Servers,
    boot: i64,
    store: Arc<Fleet>,
    /// One look at a time: calls that meet the same restart wait for the same answer.
    looking: tokio::sync::Mutex<()>,
    /// By shard: the process that was last seen well marked.
    runs: Mutex<HashMap<u16, RunId>>,
}

impl Epochs {
    pub(super) fn new(servers: Servers, boot: i64, store: Arc<Fleet>) -> Self {
        Self { servers, boot, store, looking: tokio::sync::Mutex::default(), runs: Mutex::default() }
    }

    /// Looks once a second whether other processes answer than before, so that no call has to find out.
    pub(super) async fn follow(self: Arc<Self>) {
        let job = heartbeat::job("epochs", BEAT);
        let mut tick = every(BEAT);
        loop {
            tick.tick().await;
            let asked = self.servers.redis.run_ids().await;
            job.ended(&asked);
            let Ok(servers) = asked else { continue };
            let mut moved = vec![];
            for (shards, run) in servers {
                let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
                moved.extend(shards.into_iter().filter(|shard| runs.get(shard) != Some(&run)));
            }
            if !moved.is_empty() {
                self.renew(&moved).await;
            }
        }
    }

    /// Finds out under which epoch money in these shards may be spent now. Whether it is known for all of them.
    pub(super) async fn renew(&self, shards: &[u16]) -> bool {
        let before: Vec<i64> = shards.iter().map(|shard| self.store.epoch(*shard)).collect();
        let _looking = self.looking.lock().await;
        // Somebody else may have found out meanwhile.
        let unknown: Vec<u16> = shards
            .iter()
            .zip(before)
            .filter(|(shard, before)| self.store.epoch(**shard) == *before)
            .map(|(shard, _)| *shard)
            .collect();
        unknown.is_empty() || self.look(unknown).await
    }

    async fn look(&self, mut shards: Vec<u16>) -> bool {
        let mut wait_until = None;
        let mut lost = 0;
        loop {
            let Some(known) = self.known().await else { return false };
            let mut unmarked: Vec<(u16, i64, RunId)> = vec![];
            let mut away = false;
            for (shard, fence) in self.fences(&shards).await {
                let Ok(fence) = fence else {
                    away = true;
                    continue;
                };
                let row = known.get(&shard);
                let epoch = row.map_or(0, |row| row.epoch);
                if epoch > 0 && row.is_some_and(|row| row.run == fence.run.0) && fence.epoch == Some(epoch) {
                    self.is_marked(shard, epoch, fence.run);
                } else {
                    unmarked.push((shard, epoch, fence.run));
                }
            }
            if unmarked.is_empty() {
                return !away;
            }
            // The node that counted it up marks it at once.
            let marking =
                unmarked.iter().any(|(shard, _, run)| known.get(shard).is_some_and(|k| k.run == run.0));
            if marking && clock::now() < *wait_until.get_or_insert_with(|| clock::now() + MARKING) {
                shards = unmarked.into_iter().map(|(shard, ..)| shard).collect();
                tokio::time::sleep(MARKING_LOOK).await;
                continue;
            }
            let Some(won_by_others) = self.advance(unmarked).await else { return false };
            if won_by_others.is_empty() || lost == LOST_MAX {
                return won_by_others.is_empty() && !away;
            }
            lost += 1;
            wait_until = None;
            shards = won_by_others;
        }
    }

    async fn fences(&self, shards: &[u16]) -> Vec<(u16, Result<Fence, RedisError>)> {
        let fences = shards.iter().map(|shard| async { (*shard, self.servers.redis.fence(*shard).await) });
        futures::future::join_all(fences).await
    }

    /// What the ledger says of all shards. Nothing begins in an epoch before those any more.
    pub(super) async fn known(&self) -> Option<HashMap<u16, Epoch>> {
        if !self.store.is_registered() {
            return None;
        }
        let boot = self.boot;
        match self.servers.ask(move |ledger| ledger.epochs(boot)).await {
            Ok(epochs) => {
                for epoch in &epochs {
                    self.store.set_epoch(epoch.shard, epoch.epoch);
                }
                Some(epochs.into_iter().map(|epoch| (epoch.shard, epoch)).collect())
            }
            Err(LedgerError::BootOver(boot)) => {
                tracing::error!(
                    breach = "given_up",
                    boot,
                    "the ledger has given this node up: nothing is admitted any more; start it anew"
                );
                self.store.give_up();
                None
            }
            Err(error) => {
                // The heartbeat says that the ledger is away, once.
                tracing::debug!(%error, "the epochs of redis cannot be looked up: calls go on with this node's own money");
                None
            }
        }
    }

    /// Counts up, and marks what it was that counted. Answers those that others have counted up meanwhile; `None`: of
    /// some of them nobody knows.
    async fn advance(&self, unmarked: Vec<(u16, i64, RunId)>) -> Option<Vec<u16>> {
        if let Err(RedisError::Unfit(why)) = self.servers.check_redis().await {
            tracing::error!(why, "a redis that is new is not taken into use");
            return None;
        }
        let mut by_run: HashMap<RunId, Vec<(u16, i64)>> = HashMap::new();
        for (shard, epoch, run) in unmarked {
            by_run.entry(run).or_default().push((shard, epoch));
        }
        let mut all = true;
        let mut won_by_others = vec![];
        for (run, seen) in by_run {
            let (boot, name) = (self.boot, run.0.clone());
            let advanced = match self.servers.ask(move |ledger| ledger.advance(boot, &name, &seen)).await {
                Ok(advanced) => advanced,
                Err(error) => {
                    tracing::warn!(%error, "a redis that is new cannot be taken into use");
                    return None;
                }
            };
            let marks = advanced.iter().filter(|it| it.won).map(|it| async {
                let epoch = it.now.epoch;
                (it.now.shard, epoch, self.servers.redis.mark(it.now.shard, &run, epoch).await)
            });
            let marks = futures::future::join_all(marks).await;
            won_by_others.extend(advanced.iter().filter(|it| !it.won).map(|it| it.now.shard));
            if !marks.is_empty() {
                tracing::info!(%run, shards = marks.len(), "another redis answers: it spends under new epochs from now on");
            }
            for (shard, epoch, marked) in marks {
                match marked {
                    Ok(Marked::Now) => self.is_marked(shard, epoch, run.clone()),
                    // Never again under this number, not even now: the next look counts on.
                    Ok(Marked::Refused(_)) | Err(_) => all = false,
                }
            }
        }
        all.then_some(won_by_others)
    }

    fn is_marked(&self, shard: u16, epoch: i64, run: RunId) {
        self.store.set_epoch(shard, epoch);
        self.runs.lock().unwrap_or_else(PoisonError::into_inner).insert(shard, run);
    }

    /// The shard's epoch, as far as it is known.
    pub(super) fn of(&self, shard: u16) -> i64 {
        self.store.epoch(shard)
    }

    /// Waits until all shards are known, as long as a start may take.
    pub(super) async fn wait_for_all(&self, at_most: Duration) -> bool {
        let all = async {
            while (0..SHARDS).any(|shard| self.store.epoch(shard) == 0) {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(at_most, all).await.is_ok()
    }
}
