//! Money that may be spent without asking: pools in Redis, and each boot's own tranche.
//!
//! A lease is what may be spent before it may be spent: first it leaves what is free, here, then somebody installs it.
//! Its sums only grow, so a total may be installed by anybody, late and twice:
//! whoever installs adds what is above the total that it has seen. For the same reason money that is recalled from a
//! pool never lowers the total: it counts beside it, here as in Redis.

use std::collections::BTreeMap;

use deadpool_postgres::Transaction;
use filters::ids::AccountId;
use filters::money::Amount;

use super::epochs::{Part, READ_EPOCHS, must_live};
use super::{Postgres, shard, small};
use crate::journal::Pool;
use crate::ledger::port::LedgerError;

/// How much of an account's free money is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Less than this is of no use: what a call waits for.
    pub least: Amount,
    /// More than this is not needed; at least `least`.
    pub most: Amount,
}

/// What a lease has now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leased {
    /// All that was ever leased to it, also what is spent or returned by now: it only grows. Install this.
    pub total: Amount,
    /// By this call; zero when nothing is free.
    pub added: Amount,
    /// What is free of the account after it.
    pub free_left: Amount,
    /// What other pools and boots hold of the account.
    pub elsewhere: Amount,
}

/// Where else an account's money may be, so that what is not free may be free soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scattered {
    /// Boots that have some of it on their own.
    pub boots: Vec<i64>,
    /// Pools of a Redis that is gone have some, and not every boot has said what it claims of that.
    pub frozen: bool,
}

/// Whose lease.
#[derive(Clone, Copy)]
enum Holder {
    Pool(Pool),
    Boot(i64),
}

impl Postgres {
    /// Leases more of an account to its pool in Redis: half of what is free at most, unless `least` is more than
    /// half; then all of it, up to `most`. Also where that is less than `least`, since smaller calls may fit.
    ///
    /// # Errors
    /// [`LedgerError::Stale`] when the pool is not the current one of its shard, [`LedgerError::NoAccount`], or the
    /// books cannot be written.
    pub fn lease_pool(&self, account: AccountId, pool: Pool, want: Wanted) -> Result<Leased, LedgerError> {
        self.within(async |t| {
            t.execute(READ_EPOCHS, &[]).await?;
            let current = "SELECT 1 FROM shard_epoch WHERE shard = $1 AND epoch = $2 AND epoch > 0";
            if t.query_opt(current, &[&small(pool.shard), &pool.epoch]).await?.is_none() {
                return Err(LedgerError::Stale);
            }
            lease(t, account, Holder::Pool(pool), want).await
        })
    }

    /// Leases more of an account to a boot's own tranche, by the rule of [`Self::lease_pool`].
    ///
    /// # Errors
    /// [`LedgerError::BootOver`], [`LedgerError::NoAccount`], or the books cannot be written.
    pub fn lease_local(&self, account: AccountId, boot: i64, want: Wanted) -> Result<Leased, LedgerError> {
        self.within(async |t| {
            must_live(t, boot).await?;
            lease(t, account, Holder::Boot(boot), want).await
        })
    }

    /// Pools that Redis may spend: the current ones.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn open_pools(&self) -> Result<Vec<(AccountId, Pool)>, LedgerError> {
        let open = "SELECT account, shard, epoch FROM lease WHERE state = 'open' AND shard IS NOT NULL";
        let rows = self.within(async |t| Ok(t.query(open, &[]).await?))?;
        let pool = |row: &tokio_postgres::Row| {
            let pool = Pool { shard: shard(row.try_get(1)?), epoch: row.try_get(2)? };
            Ok((AccountId(row.try_get(0)?), pool))
        };
        rows.iter().map(pool).collect()
    }

    /// What is free of an account: neither leased nor set aside.
    ///
    /// # Errors
    /// [`LedgerError::NoAccount`], or the books cannot be read.
    pub fn free(&self, account: AccountId) -> Result<Amount, LedgerError> {
        self.within(async |t| {
            let free = "SELECT posted - leased FROM balance WHERE account = $1";
            let row = t.query_opt(free, &[&account.0]).await?;
            let row = row.ok_or_else(|| LedgerError::NoAccount(account.to_string()))?;
            Ok(Amount::from_nano(row.try_get(0)?))
        })
    }

    /// Where an account's money is beside what is free and what is in its pool.
    ///
    /// # Errors
    /// [`LedgerError`] when the books cannot be read.
    pub fn scattered(&self, account: AccountId) -> Result<Scattered, LedgerError> {
        let boots = "SELECT boot FROM lease WHERE account = $1 AND boot IS NOT NULL AND state = 'open'
                         AND rest > 0 ORDER BY boot";
        let frozen =
            "SELECT EXISTS (SELECT 1 FROM lease l JOIN boot b ON b.state = 'live' AND b.id <= l.frozen_boot
                          WHERE l.account = $1 AND l.shard IS NOT NULL AND l.state = 'frozen'
                              AND NOT EXISTS (SELECT 1 FROM report r
                                  WHERE r.shard = l.shard AND r.epoch = l.epoch AND r.boot = b.id))";
        self.within(async |t| {
            let rows = t.query(&t.prepare_cached(boots).await?, &[&account.0]).await?;
            let boots = rows.iter().map(|row| Ok(row.try_get(0)?)).collect::<Result<_, LedgerError>>()?;
            let frozen = t.query_one(&t.prepare_cached(frozen).await?, &[&account.0]).await?.try_get(0)?;
            Ok(Scattered { boots, frozen })
        })
    }

    /// Frees what was recalled from a pool, after Redis has taken the money out of it for good. `in_all`: all that
    /// was ever recalled from this pool; what of it is free already is passed over, so that it may be told again.
    /// Answers what is free now and was not before.
    ///
    /// # Errors
    /// [`LedgerError::Stale`] when the pool is not open any more: what nobody claims of it is freed by reports then.
    pub fn return_pool(&self, account: AccountId, pool: Pool, in_all: Amount) -> Result<Amount, LedgerError> {
        self.within(async |t| {
            lock_balances(t, vec![account.0]).await?;
            let open = "SELECT id, recalled FROM lease
                        WHERE account = $1 AND shard = $2 AND epoch = $3 AND state = 'open' FOR UPDATE";
            let found = t.query_opt(open, &[&account.0, &small(pool.shard), &pool.epoch]).await?;
            let Some(row) = found else { return Err(LedgerError::Stale) };
            let new = in_all.less(Amount::from_nano(row.try_get(1)?)).max(Amount::ZERO);
            let recall = "UPDATE lease SET recalled = recalled + $2 WHERE id = $1";
            t.execute(recall, &[&row.try_get::<_, i64>(0)?, &new.nano()]).await?;
            let free = "UPDATE balance SET leased = leased - $2 WHERE account = $1";
            t.execute(free, &[&account.0, &new.nano()]).await?;
            Ok(new)
        })
    }

    /// Frees what a boot has taken out of its own tranche for good. `in_all`: all that it ever took out of it; what of it
    /// is free already is passed over, so that it may be told again. Answers what is free now and was not before.
    ///
    /// # Errors
    /// [`LedgerError::Stale`] when the boot has no such tranche any more; [`LedgerError`] when the books cannot be written.
    pub fn return_local(&self, account: AccountId, boot: i64, in_all: Amount) -> Result<Amount, LedgerError> {
        self.within(async |t| {
            lock_balances(t, vec![account.0]).await?;
            let open = "SELECT id, returned FROM lease
                        WHERE account = $1 AND boot = $2 AND state = 'open' FOR UPDATE";
            let found = t.query_opt(open, &[&account.0, &boot]).await?;
            let Some(row) = found else { return Err(LedgerError::Stale) };
            let new = in_all.less(Amount::from_nano(row.try_get(1)?)).max(Amount::ZERO);
            move_leased(t, &[Part { lease: row.try_get(0)?, account: account.0, amount: new.nano() }]).await
        })
    }
}

async fn lease(
    t: &Transaction<'_>,
    account: AccountId,
    holder: Holder,
    want: Wanted,
) -> Result<Leased, LedgerError> {
    let balance = "SELECT posted - leased, leased FROM balance WHERE account = $1 FOR NO KEY UPDATE";
    let row = t.query_opt(balance, &[&account.0]).await?;
    let row = row.ok_or_else(|| LedgerError::NoAccount(account.to_string()))?;
    let (free, leased) = (Amount::from_nano(row.try_get(0)?), row.try_get::<_, i64>(1)?);
    let added = share(free, want);
    let (boot, shard, epoch) = match holder {
        Holder::Pool(pool) => (None, Some(small(pool.shard)), Some(pool.epoch)),
        Holder::Boot(boot) => (Some(boot), None, None),
    };
    let by = match holder {
        Holder::Pool(_) => "account, shard, epoch",
        Holder::Boot(_) => "account, boot",
    };
    let upsert = format!(
        "INSERT INTO lease (account, boot, shard, epoch, amount) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT ({by}) DO UPDATE SET amount = lease.amount + excluded.amount WHERE lease.state = 'open'
         RETURNING amount, rest"
    );
    let upsert = t.prepare_cached(&upsert).await?;
    let row = t.query_opt(&upsert, &[&account.0, &boot, &shard, &epoch, &added.nano()]).await?;
    let row = row.ok_or(LedgerError::Stale)?;
    let raise = "UPDATE balance SET leased = leased + $2 WHERE account = $1";
    t.execute(raise, &[&account.0, &added.nano()]).await?;
    let here: i64 = row.try_get(1)?;
    Ok(Leased {
        total: Amount::from_nano(row.try_get(0)?),
        added,
        free_left: free.less(added),
        elsewhere: Amount::from_nano(leased)
            .checked_add(added)
            .unwrap_or(Amount::MAX)
            .less(Amount::from_nano(here)),
    })
}

/// What of `free` is leased to one who wants so much.
fn share(free: Amount, want: Wanted) -> Amount {
    let (least, most) = (want.least.max(Amount::ZERO), want.most.max(want.least).max(Amount::ZERO));
    let half = Amount::from_nano(free.nano() / 2);
    if least <= half { most.min(half) } else { most.min(free) }
}

/// Locks balances in their order, which is everybody's.
pub(super) async fn lock_balances(t: &Transaction<'_>, accounts: Vec<i64>) -> Result<(), LedgerError> {
    if !accounts.is_empty() {
        let lock = "SELECT 1 FROM balance WHERE account = ANY ($1) ORDER BY account FOR NO KEY UPDATE";
        t.query(&t.prepare_cached(lock).await?, &[&accounts]).await?;
    }
    Ok(())
}

/// Gives parts of leases back to what is free, under the locks of balances and leases. One that is not open and of
/// which nothing is left is closed. Answers the sum.
pub(super) async fn move_leased(t: &Transaction<'_>, parts: &[Part]) -> Result<Amount, LedgerError> {
    let mut sums: BTreeMap<i64, i64> = BTreeMap::new();
    let mut freed = 0_i64;
    for part in parts {
        let sum = sums.entry(part.account).or_default();
        *sum = sum.saturating_add(part.amount);
        freed = freed.saturating_add(part.amount);
    }
    let leases: Vec<i64> = parts.iter().map(|part| part.lease).collect();
    let amounts: Vec<i64> = parts.iter().map(|part| part.amount).collect();
    let give = "UPDATE lease l SET returned = l.returned + p.amount,
                    state = CASE WHEN l.state = 'frozen' AND l.rest = p.amount
                        THEN 'closed' ELSE l.state END
                FROM unnest($1::bigint[], $2::bigint[]) AS p (id, amount) WHERE l.id = p.id";
    t.execute(&t.prepare_cached(give).await?, &[&leases, &amounts]).await?;
    let (accounts, amounts): (Vec<i64>, Vec<i64>) = sums.into_iter().unzip();
    let free = "UPDATE balance b SET leased = b.leased - p.amount
                FROM unnest($1::bigint[], $2::bigint[]) AS p (account, amount) WHERE b.account = p.account";
    t.execute(&t.prepare_cached(free).await?, &[&accounts, &amounts]).await?;
    Ok(Amount::from_nano(freed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_what_is_free_is_left_unless_it_is_too_small_to_split() {
        for (free, least, most, leased) in [
            (100, 10, 30, 30),
            (100, 10, 80, 50),
            (100, 50, 80, 50),
            (100, 51, 80, 80),
            (100, 51, 200, 100),
            (100, 200, 200, 100),
            (0, 1, 5, 0),
            (1, 1, 5, 1),
            (1, 0, 5, 0),
            (100, 10, 5, 10),
            (100, -3, -3, 0),
        ] {
            let want = Wanted { least: Amount::from_nano(least), most: Amount::from_nano(most) };
            assert_eq!(share(Amount::from_nano(free), want).nano(), leased, "{free} {least} {most}");
        }
    }
}
