//! Proves that the books are right, and explains where Redis and they differ.
//!
//! Both read one snapshot, so that running gateways cannot make sums disagree. What Redis and the books say of a pool
//! differs all the time, by what is on its way between them; [`Postgres::reconcile`] names each difference by its
//! cause, and tells those that go away by themselves from those that somebody has to look at.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Transaction;
use filters::ids::AccountId;
use filters::money::Amount;

use super::{Postgres, shard, small};
use crate::journal::Pool;
use crate::ledger::port::{LedgerError, Verified};

/// What must hold, each with a query that finds the first row where it does not. Those that a constraint keeps as well
/// are here for a database that was restored or mended by hand.
const LAWS: [(&str, &str); 12] = [
    (
        "a day's snapshot is the one before it and the postings in between",
        "SELECT 'account ' || s.account || ' on ' || s.day FROM (
             SELECT account, day, posted, last_seq,
                 lag(posted, 1, 0::bigint) OVER w AS before, lag(last_seq, 1, 0::bigint) OVER w AS since
             FROM snapshot WINDOW w AS (PARTITION BY account ORDER BY day)) s
         WHERE s.posted - s.before <>
             (SELECT coalesce(sum(amount), 0) FROM transfer
              WHERE credit = s.account AND credit >= 1000 AND seq > s.since AND seq <= s.last_seq)
           - (SELECT coalesce(sum(amount), 0) FROM transfer
              WHERE debit = s.account AND debit >= 1000 AND seq > s.since AND seq <= s.last_seq)
         LIMIT 1",
    ),
    (
        "a transfer moves a positive amount between two accounts that are there",
        "SELECT 'transfer ' || t.seq FROM transfer t
         LEFT JOIN account d ON d.id = t.debit LEFT JOIN account c ON c.id = t.credit
         WHERE t.amount <= 0 OR t.debit = t.credit OR d.id IS NULL OR c.id IS NULL LIMIT 1",
    ),
    (
        "a balance is the sum of its postings",
        "SELECT 'account ' || b.account || ' has ' || b.posted || ', its postings sum to ' ||
             (coalesce(c.sum, 0) - coalesce(d.sum, 0))
         FROM balance b
         LEFT JOIN (SELECT credit, sum(amount) AS sum FROM transfer GROUP BY credit) c ON c.credit = b.account
         LEFT JOIN (SELECT debit, sum(amount) AS sum FROM transfer GROUP BY debit) d ON d.debit = b.account
         WHERE b.posted <> coalesce(c.sum, 0) - coalesce(d.sum, 0) LIMIT 1",
    ),
    (
        "captured and released make up what was held",
        "SELECT 'hold ' || encode(hold, 'hex') FROM settlement WHERE captured + released <> held LIMIT 1",
    ),
    (
        "every hold's transfers are what its settlement says",
        // Summed side by side, not joined: no plan of that is a bad one.
        "SELECT 'hold ' || encode(hold, 'hex') FROM (
             SELECT day, reference AS hold,
                 CASE WHEN kind IN (1, 2, 6, 7, 8) THEN amount ELSE 0 END AS charged,
                 CASE kind WHEN 3 THEN amount ELSE 0 END AS shortfall, CASE kind WHEN 4 THEN amount ELSE 0 END AS cost,
                 CASE kind WHEN 5 THEN amount ELSE 0 END AS abandoned,
                 CASE kind WHEN 7 THEN amount ELSE 0 END AS written_off,
                 CASE WHEN debit >= 1000 THEN debit END AS payer
             FROM transfer WHERE kind < 10
             UNION ALL
             SELECT day, hold, -captured - excess, -shortfall, -provider_cost, -abandoned, -written_off, account
             FROM settlement) p
         GROUP BY day, hold
         HAVING sum(charged) <> 0 OR sum(shortfall) <> 0 OR sum(cost) <> 0 OR sum(abandoned) <> 0
             OR sum(written_off) <> 0 OR min(payer) <> max(payer) LIMIT 1",
    ),
    (
        "an account's calls are its settled holds",
        "SELECT 'account ' || b.account || ' counts ' || b.calls || ', settled are ' || coalesce(s.calls, 0)
         FROM balance b LEFT JOIN (SELECT account, count(*) AS calls FROM settlement GROUP BY account) s USING (account)
         WHERE b.calls <> coalesce(s.calls, 0) LIMIT 1",
    ),
    (
        "leases reconcile with what is leased of a balance",
        "SELECT 'account ' || b.account || ' has ' || b.leased || ' leased, its leases sum to ' ||
             coalesce(l.sum, 0)
         FROM balance b
         LEFT JOIN (SELECT account, sum(rest) AS sum FROM lease GROUP BY account) l
             USING (account)
         WHERE b.leased <> coalesce(l.sum, 0) LIMIT 1",
    ),
    (
        "what a lease has spent is what was booked against it",
        "SELECT 'lease ' || l.id || ' has spent ' || l.consumed || ', booked are ' || coalesce(t.sum, 0)
         FROM lease l
         LEFT JOIN (SELECT lease, sum(amount) AS sum FROM transfer WHERE lease IS NOT NULL GROUP BY lease) t
             ON t.lease = l.id
         WHERE l.consumed <> coalesce(t.sum, 0) LIMIT 1",
    ),
    (
        "what is in suspense of an account was set aside and neither given back nor charged",
        "SELECT 'account ' || b.account || ' has ' || b.suspended || ' in suspense' FROM balance b
         LEFT JOIN (SELECT debit AS account, sum(amount) AS sum FROM transfer WHERE kind = 13 GROUP BY debit) i
             USING (account)
         LEFT JOIN (SELECT credit AS account, sum(amount) AS sum FROM transfer WHERE kind = 14 GROUP BY credit) o
             USING (account)
         LEFT JOIN (SELECT s.account, sum(t.amount) AS sum FROM transfer t
                    JOIN settlement s ON s.day = t.day AND s.hold = t.reference
                    WHERE t.kind = 8 GROUP BY s.account) r USING (account)
         WHERE b.suspended <> coalesce(i.sum, 0) - coalesce(o.sum, 0) - coalesce(r.sum, 0) LIMIT 1",
    ),
    (
        "no balance is negative and none is leased beyond what is there",
        "SELECT 'account ' || account FROM balance WHERE posted < 0 OR leased < 0 OR leased > posted LIMIT 1",
    ),
    (
        "every row is in the partition of its month",
        "SELECT count(*) || ' rows are in ' || part || ': make the partitions of their months and move them'
         FROM (SELECT 'transfer_default' AS part FROM transfer_default
               UNION ALL SELECT 'settlement_default' FROM settlement_default) d GROUP BY part LIMIT 1",
    ),
    (
        "everything that came could be booked",
        "SELECT 'hold ' || encode(hold, 'hex') || ' waits in misfit: ' || why FROM misfit ORDER BY at_ms LIMIT 1",
    ),
];

/// What was seen of one pool in Redis, and of what is on the way from it to the books. To be exact it has to be of one
/// moment: read the pool, then what is not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSeen {
    pub account: AccountId,
    pub pool: Pool,
    /// All that was ever installed.
    pub installed: Amount,
    pub available: Amount,
    pub held: Amount,
    /// All that was ever captured from it.
    pub captured: Amount,
    /// All that was ever recalled from it.
    pub recalled: Amount,
    /// What of it waits in the outbox or in a journal: charges of calls that ended, and holds that were reaped.
    pub unposted: Amount,
}

/// Where things differ, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Drift {
    /// It goes away with the next lease.
    #[error("{0}: {1} is leased and not installed yet; the next lease installs it")]
    NotInstalled(Where, Amount),
    /// It goes away with the next recall.
    #[error("{0}: {1} was recalled and is not free yet; the next recall frees it")]
    NotReturned(Where, Amount),
    /// It goes away when the call's node, or the reaper, ends the hold in Redis.
    #[error("{0}: {1} is booked and not captured yet; the hold's end in Redis is on its way")]
    BookedFirst(Where, Amount),
    /// Calls ended in Redis of which nobody has a record.
    #[error("{0}: {1} was captured and is neither booked nor on its way: its record is lost")]
    RecordLost(Where, Amount),
    /// Redis spends what the ledger never leased.
    #[error("{0}: {1} more is installed than was ever leased: Redis was written to by somebody else")]
    NeverLeased(Where, Amount),
    /// The ledger gave back what Redis may still spend.
    #[error("{0}: {1} is free again and was not recalled: it can be spent twice")]
    NeverRecalled(Where, Amount),
    /// The pool's own sums are wrong.
    #[error("{0}: its parts in Redis sum to {1}")]
    Unbalanced(Where, Parts),
    /// Redis has a pool that the ledger does not know.
    #[error("{0}: the ledger knows no such pool, {1} is installed")]
    Unknown(Where, Amount),
    /// It goes away when these boots have reported, or are replayed; or somebody declares one lost.
    #[error("{0}: {1} of an epoch that is over waits for reports of boots {2:?}")]
    Waiting(Where, Amount, Vec<i64>),
    /// It goes away when these boots' calls have ended.
    #[error("{0}: {1} of an epoch that is over is claimed by running calls")]
    Claimed(Where, Amount),
    /// What lost boots may have spent.
    #[error(
        "account {0}: {1} is in suspense: give it back or charge it when the providers' reports are there"
    )]
    InSuspense(AccountId, Amount),
}

impl Drift {
    /// Whether somebody has to look at it: it does not go away by itself, or money may be spent twice.
    #[must_use]
    pub const fn is_alarming(&self) -> bool {
        match self {
            Self::NotInstalled(..)
            | Self::NotReturned(..)
            | Self::BookedFirst(..)
            | Self::Claimed(..)
            | Self::Waiting(..)
            | Self::InSuspense(..) => false,
            Self::RecordLost(..)
            | Self::NeverLeased(..)
            | Self::NeverRecalled(..)
            | Self::Unbalanced(..)
            | Self::Unknown(..) => true,
        }
    }
}

/// Whose pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Where {
    pub account: AccountId,
    pub pool: Pool,
}

impl std::fmt::Display for Where {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "account {}, shard {}, epoch {}", self.account, self.pool.shard, self.pool.epoch)
    }
}

/// A pool in the books.
struct Kept {
    amount: Amount,
    consumed: Amount,
    recalled: Amount,
    returned: Amount,
    is_open: bool,
}

impl Postgres {
    /// Finds where the pools in Redis and the books differ, and says why; and what else waits for something. An empty
    /// answer: nothing does. Of shards that nothing was seen of, nothing is said about what is installed.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn reconcile(&self, seen: &[PoolSeen]) -> Result<Vec<Drift>, LedgerError> {
        self.on_snapshot(async |t| {
            let kept = kept(t, seen).await?;
            let mut drifts: Vec<Drift> = vec![];
            for seen in seen {
                drifts.extend(differences(seen, kept.get(&(seen.account, seen.pool))));
            }
            let known: HashSet<(AccountId, Pool)> =
                seen.iter().map(|seen| (seen.account, seen.pool)).collect();
            for ((account, pool), lease) in kept.iter().filter(|(at, _)| !known.contains(at)) {
                if lease.is_open && lease.amount.is_positive() {
                    let at = Where { account: *account, pool: *pool };
                    drifts.push(Drift::NotInstalled(at, lease.amount));
                }
            }
            drifts.extend(waiting(t).await?);
            let suspense = "SELECT account, suspended FROM balance WHERE suspended > 0 ORDER BY account";
            for row in t.query(suspense, &[]).await? {
                let account = AccountId(row.try_get(0)?);
                drifts.push(Drift::InSuspense(account, Amount::from_nano(row.try_get(1)?)));
            }
            Ok(drifts)
        })
    }

    /// Proves every invariant of the books.
    pub(super) fn prove(&self) -> Result<Verified, LedgerError> {
        self.on_snapshot(async |t| {
            for (law, query) in LAWS {
                if let Some(row) = t.query_opt(query, &[]).await? {
                    let what: &str = row.try_get(0)?;
                    return Err(LedgerError::Violation(format!("{law}: {what}")));
                }
            }
            let count = t
                .query_one(
                    "SELECT (SELECT count(*) FROM balance), (SELECT count(*) FROM transfer),
                         (SELECT count(*) FROM settlement), (SELECT coalesce(sum(amount), 0)::bigint FROM transfer)",
                    &[],
                )
                .await?;
            Ok(Verified {
                accounts: count.try_get(0)?,
                transfers: count.try_get(1)?,
                holds: count.try_get(2)?,
                turnover_nano: count.try_get(3)?,
            })
        })
    }
}

/// The pools in the books of all shards and epochs that something was seen of.
async fn kept(
    t: &Transaction<'_>,
    seen: &[PoolSeen],
) -> Result<HashMap<(AccountId, Pool), Kept>, LedgerError> {
    let shards: Vec<i16> = seen.iter().map(|seen| small(seen.pool.shard)).collect();
    let epochs: Vec<i64> = seen.iter().map(|seen| seen.pool.epoch).collect();
    let leases = "SELECT account, shard, epoch, amount, consumed, recalled, returned, state = 'open'
                  FROM lease
                  WHERE (shard, epoch) IN (SELECT * FROM unnest($1::smallint[], $2::bigint[]))";
    let rows = t.query(leases, &[&shards, &epochs]).await?;
    let lease = |row: &tokio_postgres::Row| {
        let pool = Pool { shard: shard(row.try_get(1)?), epoch: row.try_get(2)? };
        let kept = Kept {
            amount: Amount::from_nano(row.try_get(3)?),
            consumed: Amount::from_nano(row.try_get(4)?),
            recalled: Amount::from_nano(row.try_get(5)?),
            returned: Amount::from_nano(row.try_get(6)?),
            is_open: row.try_get(7)?,
        };
        Ok(((AccountId(row.try_get(0)?), pool), kept))
    };
    rows.iter().map(lease).collect()
}

/// How a pool in Redis differs from its lease.
fn differences(seen: &PoolSeen, lease: Option<&Kept>) -> Vec<Drift> {
    let PoolSeen { account, pool, installed, available, held, captured, recalled, unposted } = *seen;
    let at = Where { account, pool };
    let mut found = vec![];
    let sum = [available, held, captured, recalled].into_iter().fold(Amount::ZERO, plus);
    if sum != installed {
        found.push(Drift::Unbalanced(at, Parts { sum, installed }));
    }
    let Some(lease) = lease else {
        found.push(Drift::Unknown(at, installed));
        return found;
    };
    let differs = |more: Amount, less: Amount| Some(more.less(less)).filter(|by| by.is_positive());
    found.extend(differs(installed, lease.amount).map(|by| Drift::NeverLeased(at, by)));
    // Of a pool that is frozen more is free: what nobody claims.
    if lease.is_open {
        // The reaper captures holds whole; what they did not cost went back.
        let booked = plus(plus(lease.consumed, lease.returned), unposted);
        found.extend(differs(captured, booked).map(|by| Drift::RecordLost(at, by)));
        found.extend(differs(booked, captured).map(|by| Drift::BookedFirst(at, by)));
        found.extend(differs(lease.amount, installed).map(|by| Drift::NotInstalled(at, by)));
        found.extend(differs(recalled, lease.recalled).map(|by| Drift::NotReturned(at, by)));
        found.extend(differs(lease.recalled, recalled).map(|by| Drift::NeverRecalled(at, by)));
    }
    found
}

/// A pool's parts in Redis, and what they should sum to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    pub sum: Amount,
    pub installed: Amount,
}

impl std::fmt::Display for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, installed is {}", self.sum, self.installed)
    }
}

/// Pools of epochs that are over, and what each waits for.
async fn waiting(t: &Transaction<'_>) -> Result<Vec<Drift>, LedgerError> {
    let rows = t
        .query(
            "SELECT l.account, l.shard, l.epoch, l.rest,
                 coalesce((SELECT array_agg(b.id ORDER BY b.id) FROM boot b
                     WHERE b.state = 'live' AND b.id <= l.frozen_boot AND NOT EXISTS (SELECT 1 FROM report r
                         WHERE r.shard = l.shard AND r.epoch = l.epoch AND r.boot = b.id)), '{}')
             FROM lease l WHERE l.state = 'frozen' AND l.shard IS NOT NULL ORDER BY l.id",
            &[],
        )
        .await?;
    let waits = |row: &tokio_postgres::Row| {
        let pool = Pool { shard: shard(row.try_get(1)?), epoch: row.try_get(2)? };
        let at = Where { account: AccountId(row.try_get(0)?), pool };
        let (left, boots) = (Amount::from_nano(row.try_get(3)?), row.try_get::<_, Vec<i64>>(4)?);
        Ok(if boots.is_empty() { Drift::Claimed(at, left) } else { Drift::Waiting(at, left, boots) })
    };
    rows.iter().map(waits).collect()
}

fn plus(a: Amount, b: Amount) -> Amount {
    a.checked_add(b).unwrap_or(Amount::MAX)
}
