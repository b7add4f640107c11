//! Holds that the reaper took out of Redis.
//!
//! It takes a hold whose deadline is over without knowing whether its call still runs, so Redis gives nothing back: it
//! counts the whole hold as captured and says so in the outbox, with the last checkpoint. What becomes of it is decided
//! here, once for each hold, by what is booked and by what is known of the boot:
//!
//! - its end is booked: the pool had to give less than the hold, the difference is free;
//! - the boot is over, so nothing else will come: the checkpoint is charged, the rest is free;
//! - the boot may still know the end: the checkpoint is charged, and the rest waits in suspense for the end, for the boot
//!   to say that it does not hold it, for the boot to be over, or for an operator;
//! - the pool is of an epoch that is over: journals and claims settle it, not this; only of a boot that is lost the
//!   checkpoint is charged.

use std::collections::{BTreeMap, HashMap, HashSet};

use deadpool_postgres::Transaction;
use filters::ids::{AccountId, HoldId};
use filters::money::{Amount, LedgerAccount, Transfer, TransferKind};

use super::books::{Row, insert_transfers};
use super::epochs::{BootState, READ_EPOCHS, must_live, state};
use super::leases::lock_balances;
use super::post::{Books, Hold, Posted, hold_of, insert_settlements, set_misfits_aside};
use super::{Postgres, shard, small};
use crate::journal::{self, Pool, Settled};
use crate::ledger::port::LedgerError;

/// A hold that the reaper took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reaped {
    /// As it was placed, with its pool.
    pub hold: journal::Hold,
    /// Whose it was.
    pub boot: i64,
    /// What it had cost when that was last said.
    pub checkpoint: Amount,
}

impl Postgres {
    /// Books holds that the reaper took; one that is booked already is passed over. Answers how many were new.
    ///
    /// # Errors
    /// [`LedgerError`]; nothing of the batch is booked then.
    pub fn post_reaped(&self, batch: &[Reaped], now_ms: i64) -> Result<usize, LedgerError> {
        let ends: Vec<(i64, Settled)> =
            batch.iter().map(|reaped| (reaped.boot, ended(reaped, now_ms))).collect();
        let posted = self.within(async |t| post_reaped(t, &ends).await)?;
        self.count_written_off(posted.written_off);
        Ok(posted.new)
    }

    /// Holds of a boot of which a part waits in suspense. A boot that lives finishes those that it does not hold.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn reaped(&self, boot: i64) -> Result<Vec<HoldId>, LedgerError> {
        let open = "SELECT hold FROM reaped WHERE boot = $1 AND open ORDER BY hold";
        let rows = self.within(async |t| Ok(t.query(open, &[&boot]).await?))?;
        rows.iter().map(|row| Ok(HoldId::from_bytes(hold_of(row.try_get(0)?)?))).collect()
    }

    /// A boot says that nothing will come of these holds of its own any more: what waits of them is free.
    ///
    /// # Errors
    /// [`LedgerError::BootOver`] when the boot is over or lost; [`LedgerError`] when the books cannot be written.
    pub fn finish_reaped(&self, boot: i64, holds: &[HoldId]) -> Result<Amount, LedgerError> {
        let holds: Vec<Hold> = holds.iter().map(|hold| hold.to_bytes()).collect();
        let holds: Vec<&[u8]> = holds.iter().map(<[u8; 16]>::as_slice).collect();
        self.within(async |t| {
            must_live(t, boot).await?;
            let open = "SELECT hold FROM reaped WHERE boot = $1 AND open AND hold = ANY ($2)";
            let rows = t.query(open, &[&boot, &holds]).await?;
            restore(t, &rows).await
        })
    }

    /// An operator gives money back that was set aside for lost boots, once per `reference`. Answers whether it was new.
    ///
    /// # Errors
    /// [`LedgerError::Funds`] when less is in suspense of the account, or the books cannot be written.
    pub fn restore(
        &self,
        account: AccountId,
        amount: Amount,
        reference: &str,
        reason: &str,
        now_ms: i64,
    ) -> Result<bool, LedgerError> {
        self.within(async |t| {
            lock_balances(t, vec![account.0]).await?;
            let known =
                "SELECT 1 FROM transfer WHERE day = date '1970-01-01' AND reference = $1 AND kind = 14";
            if t.query_opt(known, &[&reference.as_bytes()]).await?.is_some() {
                return Ok(false);
            }
            let suspended = "SELECT suspended FROM balance WHERE account = $1";
            let row = t.query_opt(suspended, &[&account.0]).await?;
            let row = row.ok_or_else(|| LedgerError::NoAccount(account.to_string()))?;
            let available = Amount::from_nano(row.try_get(0)?);
            if available < amount {
                return Err(LedgerError::Funds { available });
            }
            give_back(t, &[(reference.as_bytes().to_vec(), account.0, amount.nano())], reason, now_ms)
                .await?;
            Ok(true)
        })
    }
}

/// A reaped hold as an end: charged is its checkpoint.
fn ended(reaped: &Reaped, now_ms: i64) -> Settled {
    let Reaped { hold, checkpoint, boot: _ } = reaped;
    let captured = checkpoint.nano().clamp(0, hold.amount.max(0));
    Settled {
        id: hold.id,
        account: hold.account,
        request: hold.request.clone(),
        model: hold.model.clone(),
        endpoint: String::new(),
        attempts: 0,
        parts: [hold.amount, captured, hold.amount.saturating_sub(captured), 0, 0],
        provider_cost: 0,
        abandoned: 0,
        key: hold.key,
        held_ms: hold.at_ms,
        price_version: hold.price_version,
        tokens: [0; 7],
        estimated: true,
        anomaly: false,
        at_ms: now_ms,
        pool: hold.pool,
    }
}

async fn post_reaped(t: &Transaction<'_>, batch: &[(i64, Settled)]) -> Result<Posted, LedgerError> {
    let mut boots: HashMap<Hold, i64> = HashMap::new();
    let mut ends: BTreeMap<Hold, &Settled> = BTreeMap::new();
    for (boot, settled) in batch {
        let hold = settled.id.to_be_bytes();
        boots.entry(hold).or_insert(*boot);
        ends.entry(hold).or_insert(settled);
    }
    set_misfits_aside(t, &mut ends).await?;
    // Neither an epoch nor a boot's state changes while it is decided by.
    t.execute(READ_EPOCHS, &[]).await?;
    let current = current(t, ends.values().filter_map(|settled| settled.pool)).await?;
    let states = states(t, boots.values().copied().collect()).await?;
    let first = take(t, &ends, &boots).await?;
    ends.retain(|hold, _| first.contains(hold));
    let is_current = |settled: &Settled| settled.pool.is_some_and(|pool| current.contains(&pool));
    let state = |hold: &Hold| boots.get(hold).and_then(|boot| states.get(boot)).copied();
    ends.retain(|hold, settled| is_current(settled) || state(hold) == Some(BootState::Lost));
    if ends.is_empty() {
        return Ok(Posted { new: first.len(), written_off: Amount::ZERO });
    }
    // Of a pool that is over the end is final: its hold is settled by claims.
    let reaped = ends.iter().filter(|(_, settled)| is_current(settled)).map(|(hold, _)| *hold).collect();
    let new = insert_settlements(t, &ends, &reaped).await?;
    let booked = captured(t, ends.keys().filter(|hold| !new.contains(*hold))).await?;
    let mut books = Books::lock(t, None, ends.values().copied()).await?;
    let mut open: Vec<&[u8]> = vec![];
    for (hold, settled) in &ends {
        match (new.contains(hold), is_current(settled), state(hold)) {
            (true, true, Some(BootState::Over)) => books.end_reaped(*hold, settled, false),
            (true, true, _) => {
                books.end_reaped(*hold, settled, true);
                open.push(hold);
            }
            (true, false, _) => books.end_late(*hold, settled),
            (false, true, _) => {
                let captured = booked.get(hold).copied().unwrap_or(Amount::MAX);
                books.relieve(settled, settled.settlement().held.less(captured).max(Amount::ZERO));
            }
            (false, false, _) => {}
        }
    }
    books.write(t).await?;
    t.execute("UPDATE reaped SET open = true WHERE hold = ANY ($1)", &[&open]).await?;
    Ok(Posted { new: first.len(), written_off: books.written_off() })
}

/// Those of these pools that are their shards' current ones.
async fn current(
    t: &Transaction<'_>,
    pools: impl Iterator<Item = Pool>,
) -> Result<HashSet<Pool>, LedgerError> {
    let (shards, epochs): (Vec<i16>, Vec<i64>) = pools.map(|pool| (small(pool.shard), pool.epoch)).unzip();
    let current = "SELECT shard, epoch FROM shard_epoch
                   WHERE (shard, epoch) IN (SELECT * FROM unnest($1::smallint[], $2::bigint[]))";
    let rows = t.query(current, &[&shards, &epochs]).await?;
    rows.iter().map(|row| Ok(Pool { shard: shard(row.try_get(0)?), epoch: row.try_get(1)? })).collect()
}

/// What is known of boots, which stays so until this transaction ends.
async fn states(t: &Transaction<'_>, boots: Vec<i64>) -> Result<HashMap<i64, BootState>, LedgerError> {
    let states = "SELECT id, state FROM boot WHERE id = ANY ($1) ORDER BY id FOR SHARE";
    let rows = t.query(states, &[&boots]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, state(row.try_get(1)?)))).collect()
}

/// Takes holds for this transaction; answers those that nobody took before.
async fn take(
    t: &Transaction<'_>,
    ends: &BTreeMap<Hold, &Settled>,
    boots: &HashMap<Hold, i64>,
) -> Result<HashSet<Hold>, LedgerError> {
    let holds: Vec<&[u8]> = ends.keys().map(<[u8; 16]>::as_slice).collect();
    let boots: Vec<i64> = ends.keys().map(|hold| boots.get(hold).copied().unwrap_or_default()).collect();
    let take = "INSERT INTO reaped (hold, boot)
                SELECT * FROM unnest($1::bytea[], $2::bigint[]) AS r (hold, boot) ORDER BY hold
                ON CONFLICT DO NOTHING RETURNING hold";
    let rows = t.query(take, &[&holds, &boots]).await?;
    rows.iter().map(|row| hold_of(row.try_get(0)?)).collect()
}

/// What ends that are booked captured of their holds.
async fn captured(
    t: &Transaction<'_>,
    holds: impl Iterator<Item = &Hold>,
) -> Result<HashMap<Hold, Amount>, LedgerError> {
    let holds: Vec<&[u8]> = holds.map(<[u8; 16]>::as_slice).collect();
    let booked = "SELECT s.hold, s.captured FROM unnest($1::bytea[]) AS h (hold)
                  JOIN settlement s ON s.hold = h.hold AND s.day = hold_day(h.hold)";
    let rows = t.query(booked, &[&holds]).await?;
    rows.iter().map(|row| Ok((hold_of(row.try_get(0)?)?, Amount::from_nano(row.try_get(1)?)))).collect()
}

/// Gives back what waits of holds whose boots are over: nothing else comes of them.
pub(super) async fn restore_over(t: &Transaction<'_>) -> Result<Amount, LedgerError> {
    let over = "SELECT r.hold FROM reaped r JOIN boot b ON b.id = r.boot WHERE r.open AND b.state = 'over'";
    let rows = t.query(over, &[]).await?;
    restore(t, &rows).await
}

async fn restore(t: &Transaction<'_>, holds: &[tokio_postgres::Row]) -> Result<Amount, LedgerError> {
    let holds = holds.iter().map(|row| Ok(row.try_get(0)?)).collect::<Result<Vec<&[u8]>, LedgerError>>()?;
    if holds.is_empty() {
        return Ok(Amount::ZERO);
    }
    let open = "SELECT s.hold, s.account, s.suspended, s.at_ms FROM unnest($1::bytea[]) AS h (hold)
                JOIN settlement s ON s.hold = h.hold AND s.day = hold_day(h.hold)
                WHERE s.suspended > 0 ORDER BY s.hold FOR UPDATE OF s";
    let rows = t.query(open, &[&holds]).await?;
    let accounts = rows.iter().map(|row| Ok(row.try_get(1)?)).collect::<Result<Vec<i64>, LedgerError>>()?;
    lock_balances(t, accounts.clone()).await?;
    let pots = "SELECT account, suspended FROM balance WHERE account = ANY ($1)";
    let pots = t.query(pots, &[&accounts]).await?;
    let pots = pots.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
    let mut pots = pots.collect::<Result<HashMap<i64, i64>, LedgerError>>()?;
    let (mut parts, mut at_ms, mut sum) = (vec![], 0, 0_i64);
    for row in &rows {
        let (hold, account): (&[u8], i64) = (row.try_get(0)?, row.try_get(1)?);
        // An operator, or a late charge of another call, may have taken of it.
        let pot = pots.entry(account).or_default();
        let part = row.try_get::<_, i64>(2)?.min(*pot);
        *pot -= part;
        at_ms = row.try_get(3)?;
        sum = sum.saturating_add(part);
        parts.push((hold.to_vec(), account, part));
    }
    give_back(t, &parts, "the call never ended", at_ms).await?;
    let settle = "UPDATE settlement s SET suspended = 0 FROM unnest($1::bytea[]) AS h (hold)
                  WHERE s.hold = h.hold AND s.day = hold_day(h.hold)";
    t.execute(settle, &[&holds]).await?;
    t.execute("UPDATE reaped SET open = false WHERE hold = ANY ($1)", &[&holds]).await?;
    Ok(Amount::from_nano(sum))
}

/// Moves money from suspense back to what is free: reference, account and amount of each. Under the balances' locks.
async fn give_back(
    t: &Transaction<'_>,
    parts: &[(Vec<u8>, i64, i64)],
    reason: &str,
    at_ms: i64,
) -> Result<(), LedgerError> {
    let transfer = |(reference, account, amount): &(Vec<u8>, i64, i64)| Row {
        reference: reference.clone(),
        transfer: Transfer {
            kind: TransferKind::Restored,
            debit: LedgerAccount::Suspense,
            credit: LedgerAccount::Customer(AccountId(*account)),
            amount: Amount::from_nano(*amount),
        },
        lease: None,
        at_ms,
    };
    let rows: Vec<Row> = parts.iter().filter(|(_, _, amount)| *amount > 0).map(transfer).collect();
    insert_transfers(t, &rows, reason).await?;
    let (accounts, amounts): (Vec<i64>, Vec<i64>) =
        parts.iter().map(|(_, account, part)| (*account, *part)).unzip();
    t.execute(
        "UPDATE balance b SET posted = b.posted + p.amount, suspended = b.suspended - p.amount
         FROM (SELECT account, sum(amount)::bigint AS amount
               FROM unnest($1::bigint[], $2::bigint[]) AS p (account, amount) GROUP BY account) p
         WHERE b.account = p.account",
        &[&accounts, &amounts],
    )
    .await?;
    Ok(())
}
