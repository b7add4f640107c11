//! Takes away rows that have no say any more, so that a fleet that lives for years does not fill its database with them.
//!
//! - That a hold was **reaped** has to be known as long as Redis may say so again: from an outbox that was never cut, or a
//!   replica that was promoted. Three months after the hold nobody is left to say it. What waits in suspense stays.
//! - That a boot has **reported** on a pool of an epoch that is over counts until that pool is closed; and while the boot
//!   lives it may say so again, which must not be its first word then.
//!
//! A few thousand at a time, so that nobody waits long for a lock.

use super::Postgres;
use super::epochs::FREE;
use crate::ledger::port::LedgerError;

/// How long after it was placed a reaped hold is known, in milliseconds.
const REAPED_KEPT_MS: i64 = 92 * 86_400_000;
/// Rows that one transaction takes away.
const ROWS_MAX: i64 = 5_000;

/// What went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    pub reaped: u64,
    pub reports: u64,
}

impl Postgres {
    /// Takes all of it away, in as many transactions as that needs.
    ///
    /// # Errors
    /// [`LedgerError`]: some of it may be done.
    pub fn forget(&self, now_ms: i64) -> Result<Forgotten, LedgerError> {
        let mut gone = Forgotten::default();
        loop {
            let some = self.forget_some(now_ms)?;
            gone.reaped += some.reaped;
            gone.reports += some.reports;
            if some == Forgotten::default() {
                return Ok(gone);
            }
        }
    }

    fn forget_some(&self, now_ms: i64) -> Result<Forgotten, LedgerError> {
        // A hold begins with its milliseconds: the oldest are found without looking.
        let before = u128::try_from(now_ms.saturating_sub(REAPED_KEPT_MS)).unwrap_or_default() << 80;
        let before = before.to_be_bytes();
        let reaped = self.within(async |t| {
            let old = "DELETE FROM reaped WHERE hold IN
                           (SELECT hold FROM reaped WHERE hold < $1 AND NOT open ORDER BY hold LIMIT $2)";
            Ok(t.execute(old, &[&before.as_slice(), &ROWS_MAX]).await?)
        })?;
        let reports = self.within(async |t| {
            t.execute(FREE, &[]).await?;
            let over = "DELETE FROM report r USING (
                            SELECT r.shard, r.epoch, r.boot FROM report r JOIN boot b ON b.id = r.boot
                            WHERE b.state <> 'live'
                                AND NOT EXISTS (SELECT 1 FROM lease l WHERE l.shard = r.shard AND l.epoch = r.epoch
                                    AND l.state <> 'closed')
                                AND NOT EXISTS (SELECT 1 FROM claim c WHERE c.shard = r.shard AND c.epoch = r.epoch
                                    AND c.boot = r.boot)
                            LIMIT $1) AS over
                        WHERE r.shard = over.shard AND r.epoch = over.epoch AND r.boot = over.boot";
            Ok(t.execute(over, &[&ROWS_MAX]).await?)
        })?;
        Ok(Forgotten { reaped, reports })
    }
}
