//! Who lives, which incarnation of Redis counts, and when the money of one that is gone is free again.
//!
//! A boot is registered before it reads an epoch, and reads epochs and its own state together. An epoch moves by
//! compare-and-set on the number that was read; the same transaction freezes all pools of the epochs before. What is
//! left of a frozen pool is freed down to what boots claim of it, once every boot that may have known it has reported:
//! a boot that is dead and not replayed blocks, until it is replayed or declared lost. The rules are those of
//! `docs/model-check.md`.

use std::collections::{BTreeSet, HashMap};

use deadpool_postgres::Transaction;
use filters::ids::AccountId;
use filters::money::{Amount, LedgerAccount, Transfer, TransferKind};

use super::books::{Row, insert_transfers};
use super::leases::{lock_balances, move_leased};
use super::{Postgres, shard, small};
use crate::journal::Pool;
use crate::ledger::port::LedgerError;

/// Advisory locks, `pg_advisory_xact_lock(7465, n)`: epochs are read under 1 and moved under it alone, reports are
/// taken and boots ended under 2, one at a time. (0 migrates, 3 makes partitions, 4 publishes catalogues.)
pub(super) const READ_EPOCHS: &str = "SELECT pg_advisory_xact_lock_shared(7465, 1)";
const MOVE_EPOCHS: &str = "SELECT pg_advisory_xact_lock(7465, 1)";
pub(super) const FREE: &str = "SELECT pg_advisory_xact_lock(7465, 2)";

/// Which incarnation of Redis answers for a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Epoch {
    pub shard: u16,
    /// 0: none ever did.
    pub epoch: i64,
    /// Its process; empty: none ever did.
    pub run: String,
}

/// What came of moving a shard's epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advanced {
    /// As it is now.
    pub now: Epoch,
    /// It was this call that moved it: its caller, and nobody else, marks the process, once.
    pub won: bool,
}

/// A boot that is neither over nor lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBoot {
    pub boot: i64,
    pub started_ms: i64,
    /// Its last heartbeat.
    pub beat_ms: i64,
}

/// What is known of a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootState {
    /// It runs, or died and is not replayed yet.
    Live,
    /// All that it did is booked.
    Over,
    /// An operator said that it is dead and its journal gone.
    Lost,
}

/// What a boot may still spend of one account's pool of an epoch that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub account: AccountId,
    /// The amounts of holds that it forwards or may still forward, and the cost of those that ended and are not
    /// known to be booked.
    pub amount: Amount,
}

impl Postgres {
    /// Says that a boot lives.
    ///
    /// # Errors
    /// [`LedgerError::BootOver`] when it is over or was declared lost: its process must stop.
    pub fn heartbeat(&self, boot: i64, now_ms: i64) -> Result<(), LedgerError> {
        let beat = "UPDATE boot SET beat_ms = greatest(beat_ms, $2) WHERE id = $1 AND state = 'live'";
        let beaten = self.within(async |t| Ok(t.execute(beat, &[&boot, &now_ms]).await?))?;
        if beaten == 0 { Err(LedgerError::BootOver(boot)) } else { Ok(()) }
    }

    /// Boots that are neither over nor lost, the oldest first.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn live_boots(&self) -> Result<Vec<LiveBoot>, LedgerError> {
        let live = "SELECT id, started_ms, beat_ms FROM boot WHERE state = 'live' ORDER BY id";
        let rows = self.within(async |t| Ok(t.query(live, &[]).await?))?;
        let boot = |row: &tokio_postgres::Row| {
            Ok(LiveBoot { boot: row.try_get(0)?, started_ms: row.try_get(1)?, beat_ms: row.try_get(2)? })
        };
        rows.iter().map(boot).collect()
    }

    /// What is known of these boots; one that is not known at all is not in the answer.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn boot_states(&self, boots: &[i64]) -> Result<Vec<(i64, BootState)>, LedgerError> {
        let states = "SELECT id, state FROM boot WHERE id = ANY ($1) ORDER BY id";
        let rows = self.within(async |t| Ok(t.query(states, &[&boots]).await?))?;
        let state = |row: &tokio_postgres::Row| Ok((row.try_get(0)?, state(row.try_get(1)?)));
        rows.iter().map(state).collect()
    }

    /// All shards, as a boot may know them.
    ///
    /// # Errors
    /// [`LedgerError::BootOver`] when the boot is over or lost: it is told nothing and must stop.
    pub fn epochs(&self, boot: i64) -> Result<Vec<Epoch>, LedgerError> {
        self.within(async |t| {
            t.execute(READ_EPOCHS, &[]).await?;
            must_live(t, boot).await?;
            let rows = t.query("SELECT shard, epoch, run_id FROM shard_epoch ORDER BY shard", &[]).await?;
            rows.iter().map(epoch).collect()
        })
    }

    /// Moves shards on to the next epoch, since another process than before, or the same one without its memory,
    /// answers for them; or nobody does (`run` is empty): then what was theirs can be freed for nodes' own tranches. `seen`: the epoch that was read of each shard; one that has moved since is left as it is.
    /// All pools of the epochs before are frozen.
    ///
    /// # Errors
    /// [`LedgerError::BootOver`] when the boot is over or lost; [`LedgerError`] when the books cannot be written.
    pub fn advance(&self, boot: i64, run: &str, seen: &[(u16, i64)]) -> Result<Vec<Advanced>, LedgerError> {
        let shards: Vec<i16> = seen.iter().map(|(shard, _)| small(*shard)).collect();
        let epochs: Vec<i64> = seen.iter().map(|(_, epoch)| *epoch).collect();
        self.within(async |t| {
            t.execute(MOVE_EPOCHS, &[]).await?;
            must_live(t, boot).await?;
            let moved = t
                .query(
                    "UPDATE shard_epoch s SET epoch = s.epoch + 1, run_id = $3
                     FROM unnest($1::smallint[], $2::bigint[]) AS seen (shard, epoch)
                     WHERE s.shard = seen.shard AND s.epoch = seen.epoch RETURNING s.shard",
                    &[&shards, &epochs, &run],
                )
                .await?;
            let won = moved
                .iter()
                .map(|row| Ok(row.try_get(0)?))
                .collect::<Result<BTreeSet<i16>, LedgerError>>()?;
            let mine: Vec<i16> = won.iter().copied().collect();
            let old = "SELECT id FROM lease WHERE shard = ANY ($1) AND state = 'open' ORDER BY id FOR UPDATE";
            t.query(old, &[&mine]).await?;
            t.execute(
                "UPDATE lease SET frozen_boot = (SELECT coalesce(max(id), 0) FROM boot),
                     state = CASE WHEN rest = 0 THEN 'closed' ELSE 'frozen' END
                 WHERE shard = ANY ($1) AND state = 'open'",
                &[&mine],
            )
            .await?;
            let now = "SELECT shard, epoch, run_id FROM shard_epoch WHERE shard = ANY ($1) ORDER BY shard";
            let rows = t.query(now, &[&shards]).await?;
            let advanced = |row: &tokio_postgres::Row| {
                let now = epoch(row)?;
                Ok(Advanced { won: won.contains(&small(now.shard)), now })
            };
            rows.iter().map(advanced).collect()
        })
    }

    /// Pools' epochs that are over, of which something is left, and that this boot may have known: what it has to
    /// report on until they are not named any more.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn to_report(&self, boot: i64) -> Result<Vec<Pool>, LedgerError> {
        let rows = self.within(async |t| {
            let frozen = "SELECT DISTINCT shard, epoch FROM lease
                          WHERE state = 'frozen' AND shard IS NOT NULL AND frozen_boot >= $1 ORDER BY 1, 2";
            Ok(t.query(frozen, &[&boot]).await?)
        })?;
        let pool =
            |row: &tokio_postgres::Row| Ok(Pool { shard: shard(row.try_get(0)?), epoch: row.try_get(1)? });
        rows.iter().map(pool).collect()
    }

    /// Takes a boot's reports on epochs that are over, each with all its claims: an account that is not named has
    /// none. Claims only fall; one that is higher than the one before counts as that one. Frees whatever nobody
    /// claims any more, and answers how much that was.
    ///
    /// Before a boot computes a report it must have stopped to send holds to these pools, and it must not lower a
    /// claim for a call that ended before that call's booking has been answered.
    ///
    /// # Errors
    /// [`LedgerError::BootOver`] when the boot is over or lost; [`LedgerError`] when the books cannot be written.
    pub fn report_frozen(&self, boot: i64, reports: &[(Pool, Vec<Claim>)]) -> Result<Amount, LedgerError> {
        let shards: Vec<i16> = reports.iter().map(|(pool, _)| small(pool.shard)).collect();
        let epochs: Vec<i64> = reports.iter().map(|(pool, _)| pool.epoch).collect();
        let claims = Claims::of(reports);
        self.within(async |t| {
            t.execute(FREE, &[]).await?;
            must_live(t, boot).await?;
            // Claims of a report that is there already only fall, and go where they are not repeated.
            t.execute(
                "DELETE FROM claim c USING unnest($2::smallint[], $3::bigint[]) AS r (shard, epoch)
                 WHERE c.boot = $1 AND c.shard = r.shard AND c.epoch = r.epoch AND NOT EXISTS (
                     SELECT 1 FROM unnest($4::smallint[], $5::bigint[], $6::bigint[]) AS g (shard, epoch, account)
                     WHERE g.shard = c.shard AND g.epoch = c.epoch AND g.account = c.account)",
                &[&boot, &shards, &epochs, &claims.shards, &claims.epochs, &claims.accounts],
            )
            .await?;
            t.execute(
                "UPDATE claim c SET amount = least(c.amount, g.amount)
                 FROM unnest($2::smallint[], $3::bigint[], $4::bigint[], $5::bigint[]) AS g (shard, epoch, account, amount)
                 WHERE c.boot = $1 AND c.shard = g.shard AND c.epoch = g.epoch AND c.account = g.account",
                &[&boot, &claims.shards, &claims.epochs, &claims.accounts, &claims.amounts],
            )
            .await?;
            t.execute(
                "WITH new AS (
                     INSERT INTO report (shard, epoch, boot)
                     SELECT r.shard, r.epoch, $1 FROM unnest($2::smallint[], $3::bigint[]) AS r (shard, epoch)
                     ON CONFLICT DO NOTHING RETURNING shard, epoch)
                 INSERT INTO claim (shard, epoch, boot, account, amount)
                 SELECT g.shard, g.epoch, $1, g.account, g.amount
                 FROM unnest($4::smallint[], $5::bigint[], $6::bigint[], $7::bigint[]) AS g (shard, epoch, account, amount)
                 JOIN new USING (shard, epoch) JOIN balance USING (account)",
                &[&boot, &shards, &epochs, &claims.shards, &claims.epochs, &claims.accounts, &claims.amounts],
            )
            .await?;
            free(t, Some((&shards, &epochs)), 0).await
        })
    }

    /// Frees what nobody claims of pools of an epoch that is over, where every boot that may have known them has
    /// reported. Reports do it by themselves.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    pub fn free_reported(&self, pool: Pool) -> Result<Amount, LedgerError> {
        self.within(async |t| {
            t.execute(FREE, &[]).await?;
            free(t, Some((&[small(pool.shard)], &[pool.epoch])), 0).await
        })
    }

    /// Gives a boot up: its process is dead and its journal gone. What is left of its own lease, and what it claimed
    /// of pools of epochs that are over, goes to suspense; pools that it may have spent from without a trace are
    /// suspect from now on. Answers what went to suspense at once.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    pub fn declare_lost(&self, boot: i64, now_ms: i64) -> Result<Amount, LedgerError> {
        self.within(async |t| {
            t.execute(FREE, &[]).await?;
            // A refill that is under way is under the old state of the pool, and waits here or is seen.
            t.execute(MOVE_EPOCHS, &[]).await?;
            let gone = t
                .execute("UPDATE boot SET state = 'lost' WHERE id = $1 AND state = 'live'", &[&boot])
                .await?;
            if gone == 0 {
                return Ok(Amount::ZERO);
            }
            // All at once, since one that is locked later than a lease would be out of order.
            let accounts = t.query("SELECT DISTINCT account FROM lease WHERE state <> 'closed'", &[]).await?;
            let accounts =
                accounts.iter().map(|row| Ok(row.try_get(0)?)).collect::<Result<_, LedgerError>>()?;
            lock_balances(t, accounts).await?;
            let rows = t
                .query(
                    "SELECT l.id, l.account, least(l.rest, c.amount)
                     FROM claim c JOIN lease l USING (shard, epoch, account)
                     WHERE c.boot = $1 AND l.state = 'frozen'
                     UNION ALL
                     SELECT id, account, rest FROM lease WHERE boot = $1 AND state <> 'closed'",
                    &[&boot],
                )
                .await?;
            let parts = rows.iter().map(Part::of).collect::<Result<Vec<_>, _>>()?;
            let suspended = suspend(t, parts, &format!("boot {boot} is lost"), now_ms).await?;
            t.execute("DELETE FROM claim WHERE boot = $1", &[&boot]).await?;
            t.execute(
                "UPDATE lease l SET suspect = true
                 WHERE l.shard IS NOT NULL AND l.state <> 'closed' AND coalesce(l.frozen_boot, $1) >= $1
                     AND NOT EXISTS (SELECT 1 FROM report r
                         WHERE r.boot = $1 AND r.shard = l.shard AND r.epoch = l.epoch)",
                &[&boot],
            )
            .await?;
            free(t, None, now_ms).await?;
            Ok(suspended)
        })
    }

    /// Says of pools that are in use that no hold of a lost boot is left in them, and none of their outbox's entries is
    /// unposted. Says nothing of a pool that is not the current one any more.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be written.
    pub fn unsuspect(&self, pools: &[Pool]) -> Result<(), LedgerError> {
        let shards: Vec<i16> = pools.iter().map(|pool| small(pool.shard)).collect();
        let epochs: Vec<i64> = pools.iter().map(|pool| pool.epoch).collect();
        self.within(async |t| {
            t.execute(MOVE_EPOCHS, &[]).await?;
            let locked = "SELECT id FROM lease WHERE shard = ANY ($1) AND state = 'open' AND suspect
                          ORDER BY id FOR UPDATE";
            t.query(locked, &[&shards]).await?;
            t.execute(
                "UPDATE lease l SET suspect = false FROM unnest($1::smallint[], $2::bigint[]) AS p (shard, epoch)
                 WHERE l.shard = p.shard AND l.epoch = p.epoch AND l.state = 'open' AND l.suspect",
                &[&shards, &epochs],
            )
            .await?;
            Ok(())
        })
    }
}

/// Claims, a column each.
#[derive(Default)]
struct Claims {
    shards: Vec<i16>,
    epochs: Vec<i64>,
    accounts: Vec<i64>,
    amounts: Vec<i64>,
}

impl Claims {
    fn of(reports: &[(Pool, Vec<Claim>)]) -> Self {
        let mut claims = Self::default();
        for (pool, parts) in reports {
            for claim in parts.iter().filter(|claim| claim.amount.is_positive()) {
                claims.shards.push(small(pool.shard));
                claims.epochs.push(pool.epoch);
                claims.accounts.push(claim.account.0);
                claims.amounts.push(claim.amount.nano());
            }
        }
        claims
    }
}

fn epoch(row: &tokio_postgres::Row) -> Result<Epoch, LedgerError> {
    Ok(Epoch { shard: shard(row.try_get(0)?), epoch: row.try_get(1)?, run: row.try_get(2)? })
}

pub(super) fn state(word: &str) -> BootState {
    match word {
        "live" => BootState::Live,
        "lost" => BootState::Lost,
        _ => BootState::Over,
    }
}

/// Holds a boot's state until the transaction ends: it is live until then.
pub(super) async fn must_live(t: &Transaction<'_>, boot: i64) -> Result<(), LedgerError> {
    let live = "SELECT 1 FROM boot WHERE id = $1 AND state = 'live' FOR SHARE";
    match t.query_opt(live, &[&boot]).await? {
        Some(_) => Ok(()),
        None => Err(LedgerError::BootOver(boot)),
    }
}

/// What is to be moved out of a lease.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub lease: i64,
    pub account: i64,
    pub amount: i64,
}

impl Part {
    pub(super) fn of(row: &tokio_postgres::Row) -> Result<Self, LedgerError> {
        Ok(Self { lease: row.try_get(0)?, account: row.try_get(1)?, amount: row.try_get(2)? })
    }
}

/// Frees what nobody claims of pools that are frozen. Under [`FREE`].
pub(super) async fn free(
    t: &Transaction<'_>,
    pools: Option<(&[i16], &[i64])>,
    now_ms: i64,
) -> Result<Amount, LedgerError> {
    let (all, shards, epochs) = pools.map_or((true, &[][..], &[][..]), |(s, e)| (false, s, e));
    let ready = t
        .prepare_cached(
            "SELECT l.id, l.account FROM lease l
             WHERE l.state = 'frozen' AND l.shard IS NOT NULL
                 AND ($1 OR (l.shard, l.epoch) IN (SELECT * FROM unnest($2::smallint[], $3::bigint[])))
                 AND NOT EXISTS (SELECT 1 FROM boot b WHERE b.state = 'live' AND b.id <= l.frozen_boot
                     AND NOT EXISTS (SELECT 1 FROM report r
                         WHERE r.shard = l.shard AND r.epoch = l.epoch AND r.boot = b.id))",
        )
        .await?;
    let rows = t.query(&ready, &[&all, &shards, &epochs]).await?;
    let mut leases = vec![];
    let mut accounts = BTreeSet::new();
    for row in &rows {
        leases.push(row.try_get::<_, i64>(0)?);
        accounts.insert(row.try_get::<_, i64>(1)?);
    }
    if leases.is_empty() {
        return Ok(Amount::ZERO);
    }
    lock_balances(t, accounts.into_iter().collect()).await?;
    t.query("SELECT id FROM lease WHERE id = ANY ($1) ORDER BY id FOR UPDATE", &[&leases]).await?;
    let unclaimed = t
        .query(
            "SELECT l.id, l.account, l.rest - coalesce(c.amount, 0), l.suspect
             FROM lease l LEFT JOIN (
                 SELECT shard, epoch, account, sum(amount)::bigint AS amount FROM claim GROUP BY 1, 2, 3) c
                 USING (shard, epoch, account)
             WHERE l.id = ANY ($1)",
            &[&leases],
        )
        .await?;
    let (mut back, mut aside) = (vec![], vec![]);
    for row in &unclaimed {
        let part = Part::of(row)?;
        let parts = if row.try_get(3)? { &mut aside } else { &mut back };
        // Also what has nothing left at all: it is closed.
        parts.push(Part { amount: part.amount.max(0), ..part });
    }
    let freed = move_leased(t, &back).await?;
    suspend(t, aside, "a boot that may have spent it is lost", now_ms).await?;
    Ok(freed)
}

/// Moves parts of leases to suspense.
async fn suspend(
    t: &Transaction<'_>,
    parts: Vec<Part>,
    reason: &str,
    now_ms: i64,
) -> Result<Amount, LedgerError> {
    let accounts: BTreeSet<i64> = parts.iter().map(|part| part.account).collect();
    lock_balances(t, accounts.into_iter().collect()).await?;
    let ids: Vec<i64> = parts.iter().map(|part| part.lease).collect();
    let rows =
        t.query("SELECT id, consumed FROM lease WHERE id = ANY ($1) ORDER BY id FOR UPDATE", &[&ids]).await?;
    let consumed = rows
        .iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect::<Result<HashMap<i64, i64>, LedgerError>>()?;
    let mut transfers = vec![];
    let mut sum = Amount::ZERO;
    for part in parts.iter().filter(|part| part.amount > 0) {
        let so_far = consumed.get(&part.lease).copied().unwrap_or_default();
        let amount = Amount::from_nano(part.amount);
        sum = sum.checked_add(amount).unwrap_or(Amount::MAX);
        transfers.push(Row {
            // What was consumed before only grows: no two of a lease have the same.
            reference: format!("lease {} at {so_far}", part.lease).into_bytes(),
            transfer: Transfer {
                kind: TransferKind::Suspended,
                debit: LedgerAccount::Customer(AccountId(part.account)),
                credit: LedgerAccount::Suspense,
                amount,
            },
            lease: Some(part.lease),
            at_ms: now_ms,
        });
    }
    insert_transfers(t, &transfers, reason).await?;
    let (leases, amounts) = (ids, parts.iter().map(|part| part.amount).collect::<Vec<_>>());
    t.execute(
        "UPDATE lease l SET consumed = l.consumed + p.amount,
             state = CASE WHEN l.state <> 'open' AND l.rest = p.amount OR l.boot IS NOT NULL
                 THEN 'closed' ELSE l.state END
         FROM unnest($1::bigint[], $2::bigint[]) AS p (id, amount) WHERE l.id = p.id",
        &[&leases, &amounts],
    )
    .await?;
    t.execute(
        "UPDATE balance b SET posted = b.posted - p.amount, leased = b.leased - p.amount,
             suspended = b.suspended + p.amount
         FROM (SELECT account, sum(part)::bigint AS amount
               FROM lease JOIN unnest($1::bigint[], $2::bigint[]) AS p (id, part) USING (id) GROUP BY account) p
         WHERE b.account = p.account",
        &[&leases, &amounts],
    )
    .await?;
    Ok(sum)
}
