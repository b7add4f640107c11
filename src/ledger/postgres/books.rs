//! The port, as every ledger has it.

use deadpool_postgres::Transaction;
use filters::ids::{AccountId, HoldId, KeyDigest};
use filters::money::{Amount, Transfer, TransferKind};

use super::epochs::{FREE, Part, free};
use super::leases::{lock_balances, move_leased};
use super::reaped::restore_over;
use super::{Postgres, keys, post};
use crate::journal::Settled;
use crate::ledger::port::{
    AccountRow, Generation, KeyRecord, Keyed, KeyedCall, Ledger, LedgerError, Movement, NewKey, Scope,
    StatementLine, Verified,
};
use crate::ledger::stored::{CUSTOMER, DAY_MS, kind_word, number, row};
use crate::settings::AccountSettings;

/// A transfer to write.
pub(super) struct Row {
    pub reference: Vec<u8>,
    pub transfer: Transfer,
    /// The lease that pays it.
    pub lease: Option<i64>,
    pub at_ms: i64,
}

/// Writes transfers, under the locks of their customers' balances. One that is there already fails the transaction.
pub(super) async fn insert_transfers(
    t: &Transaction<'_>,
    rows: &[Row],
    reason: &str,
) -> Result<(), LedgerError> {
    if rows.is_empty() {
        return Ok(());
    }
    let references: Vec<&[u8]> = rows.iter().map(|it| it.reference.as_slice()).collect();
    let kinds: Vec<i16> = rows.iter().map(|it| kind(it.transfer.kind)).collect();
    let debits: Vec<i64> = rows.iter().map(|it| row(it.transfer.debit)).collect();
    let credits: Vec<i64> = rows.iter().map(|it| row(it.transfer.credit)).collect();
    let amounts: Vec<i64> = rows.iter().map(|it| it.transfer.amount.nano()).collect();
    let leases: Vec<Option<i64>> = rows.iter().map(|it| it.lease).collect();
    let at_ms: Vec<i64> = rows.iter().map(|it| it.at_ms).collect();
    let insert = t
        .prepare_cached(
            "INSERT INTO transfer (day, reference, kind, debit, credit, amount, lease, reason, at_ms)
             SELECT CASE WHEN c.kind < 10 THEN hold_day(c.reference) ELSE date '1970-01-01' END, c.reference, c.kind,
                 c.debit, c.credit, c.amount, c.lease, $8, c.at_ms
             FROM unnest($1::bytea[], $2::smallint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],
                 $7::bigint[]) AS c (reference, kind, debit, credit, amount, lease, at_ms)",
        )
        .await?;
    t.execute(&insert, &[&references, &kinds, &debits, &credits, &amounts, &leases, &at_ms, &reason]).await?;
    Ok(())
}

fn kind(kind: TransferKind) -> i16 {
    i16::try_from(number(kind)).unwrap_or_default()
}

impl Ledger for Postgres {
    fn begin_boot(&mut self, now_ms: i64) -> Result<i64, LedgerError> {
        let begin = "INSERT INTO boot (started_ms, beat_ms) VALUES ($1, $1) RETURNING id";
        self.within(async |t| Ok(t.query_one(begin, &[&now_ms]).await?.try_get(0)?))
    }

    fn open_boots(&mut self) -> Result<Vec<i64>, LedgerError> {
        Ok(self.live_boots()?.into_iter().map(|boot| boot.boot).collect())
    }

    /// Money is leased by account, as it is needed ([`Self::lease_local`]): to one node it is never all leased.
    fn lease_all(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError> {
        self.leases(boot)
    }

    fn leases(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError> {
        let leases = "SELECT account, rest FROM lease
                      WHERE boot = $1 AND state <> 'closed' ORDER BY account";
        let rows = self.within(async |t| Ok(t.query(leases, &[&boot]).await?))?;
        rows.iter().map(|row| Ok((AccountId(row.try_get(0)?), Amount::from_nano(row.try_get(1)?)))).collect()
    }

    fn post(&mut self, boot: i64, batch: &[Settled]) -> Result<usize, LedgerError> {
        let posted = self.within(async |t| post::post(t, boot, batch).await)?;
        self.count_written_off(posted.written_off);
        Ok(posted.new)
    }

    fn end_boot(&mut self, boot: i64) -> Result<(), LedgerError> {
        self.within(async |t| {
            t.execute(FREE, &[]).await?;
            t.execute("UPDATE boot SET state = 'over' WHERE id = $1", &[&boot]).await?;
            // All that it did is booked: it claims nothing.
            t.execute("DELETE FROM claim WHERE boot = $1", &[&boot]).await?;
            let mine = "SELECT account FROM lease WHERE boot = $1 AND state <> 'closed'";
            let rows = t.query(mine, &[&boot]).await?;
            let accounts = rows.iter().map(|row| Ok(row.try_get(0)?)).collect::<Result<_, LedgerError>>()?;
            lock_balances(t, accounts).await?;
            let mine = "SELECT id, account, rest FROM lease
                        WHERE boot = $1 AND state <> 'closed' ORDER BY id FOR UPDATE";
            let rows = t.query(mine, &[&boot]).await?;
            let parts = rows.iter().map(Part::of).collect::<Result<Vec<_>, _>>()?;
            move_leased(t, &parts).await?;
            t.execute("UPDATE lease SET state = 'closed' WHERE boot = $1 AND state <> 'closed'", &[&boot])
                .await?;
            Ok(())
        })?;
        // Apart, since balances are locked in an order of their own. What is not done is done by the next end.
        self.within(async |t| restore_over(t).await)?;
        self.within(async |t| {
            t.execute(FREE, &[]).await?;
            free(t, None, 0).await
        })?;
        Ok(())
    }

    /// See [`Self::lease_all`].
    fn lease_free(&mut self, _boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError> {
        Ok(vec![])
    }

    fn give_back(&mut self, boot: i64, parts: &[(AccountId, Amount)]) -> Result<(), LedgerError> {
        self.within(async |t| {
            let accounts: Vec<i64> = parts.iter().map(|(account, _)| account.0).collect();
            lock_balances(t, accounts.clone()).await?;
            let mine =
                "SELECT id, account FROM lease WHERE boot = $1 AND account = ANY ($2) ORDER BY id FOR UPDATE";
            let rows = t.query(mine, &[&boot, &accounts]).await?;
            let mut given = vec![];
            for row in &rows {
                let (lease, account): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
                let mine = parts.iter().filter(|(id, _)| id.0 == account);
                let amount = mine.fold(0_i64, |sum, (_, amount)| sum.saturating_add(amount.nano()));
                given.push(Part { lease, account, amount });
            }
            // By the difference, never to a computed rest: see docs/model-check.md.
            move_leased(t, &given).await?;
            Ok(())
        })
    }

    fn ensure_account(
        &mut self,
        name: &str,
        settings: Option<&AccountSettings>,
        now_ms: i64,
    ) -> Result<AccountId, LedgerError> {
        let settings = settings.map(json).transpose()?;
        self.within(async |t| {
            let customer = i16::try_from(CUSTOMER).unwrap_or_default();
            let make =
                "INSERT INTO account (kind, name, created_ms) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
            t.execute(make, &[&customer, &name, &now_ms]).await?;
            let id = account_id(t, name).await?;
            t.execute("INSERT INTO balance (account) VALUES ($1) ON CONFLICT DO NOTHING", &[&id]).await?;
            if let Some(settings) = &settings {
                let set = "UPDATE account SET settings = $2 WHERE id = $1 AND settings <> $2";
                if t.execute(set, &[&id, settings]).await? > 0 {
                    number_keys(t, id).await?;
                }
            }
            Ok(AccountId(id))
        })
    }

    fn transfer(&mut self, movement: &Movement<'_>) -> Result<bool, LedgerError> {
        let Movement { account, what, amount, reference, reason, now_ms, boot } = *movement;
        let transfer = what.transfer(account, amount);
        self.within(async |t| {
            lock_balances(t, vec![account.0]).await?;
            let lease = if what.goes_out() { boot } else { None };
            let lease = match lease {
                Some(boot) => {
                    let lease = "SELECT id, rest FROM lease
                                 WHERE account = $1 AND boot = $2 FOR UPDATE";
                    let row = t.query_opt(lease, &[&account.0, &boot]).await?;
                    row.map(|row| Ok::<(i64, i64), LedgerError>((row.try_get(0)?, row.try_get(1)?)))
                        .transpose()?
                }
                None => None,
            };
            let book =
                "INSERT INTO transfer (day, reference, kind, debit, credit, amount, lease, reason, at_ms)
                        VALUES (date '1970-01-01', $1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING";
            let (reference_bytes, kind, debit, credit) =
                (reference.as_bytes(), kind(transfer.kind), row(transfer.debit), row(transfer.credit));
            let (id, nano) = (lease.map(|(id, _)| id), amount.nano());
            let new = t
                .execute(book, &[&reference_bytes, &kind, &debit, &credit, &nano, &id, &reason, &now_ms])
                .await?;
            if new == 0 {
                return if is_booked(t, reference_bytes, &transfer).await? {
                    Ok(false)
                } else {
                    Err(LedgerError::ReferenceTaken(reference.to_owned()))
                };
            }
            let change = if what.goes_out() { 0_i64.saturating_sub(nano) } else { nano };
            if what.goes_out() {
                take_out(t, account, nano, boot.map(|_| lease.unwrap_or_default())).await?;
            }
            let post = "UPDATE balance SET posted = posted + $2 WHERE account = $1";
            if t.execute(post, &[&account.0, &change]).await? == 0 {
                return Err(LedgerError::NoAccount(account.to_string()));
            }
            Ok(true)
        })
    }

    fn ensure_key(&mut self, key: &NewKey<'_>) -> Result<(), LedgerError> {
        let NewKey { digest, account, account_name, hint, settings, expires_ms, now_ms } = *key;
        let settings = json(settings)?;
        let digest = digest.0.as_slice();
        self.within(async |t| {
            // First without the lock: every node says at its start what its config says.
            let same = "SELECT 1 FROM api_key WHERE digest = $1 AND account = $2 AND settings = $3";
            if t.query_opt(same, &[&digest, &account.0, &settings]).await?.is_some() {
                return Ok(());
            }
            let change = keys::next_change(t, 1).await?;
            let changed = t
                .execute(
                    "INSERT INTO api_key (digest, account, hint, settings, created_ms, expires_ms, change)
                     VALUES ($1, $2, $3, $4, $5, $6, $7)
                     ON CONFLICT (digest) DO UPDATE SET settings = excluded.settings, change = excluded.change
                     WHERE api_key.account = excluded.account",
                    &[&digest, &account.0, &hint, &settings, &now_ms, &expires_ms, &change],
                )
                .await?;
            if changed == 0 { Err(LedgerError::KeyTaken(account_name.to_owned())) } else { Ok(()) }
        })
    }

    fn end_key(&mut self, digest: KeyDigest, at_ms: i64, revoked: bool) -> Result<(), LedgerError> {
        let column = if revoked { "revoked_ms" } else { "expires_ms" };
        self.within(async |t| {
            let change = keys::next_change(t, 1).await?;
            let end = format!(
                "UPDATE api_key SET {column} = least(coalesce({column}, $2), $2), change = $3 WHERE digest = $1"
            );
            let ended = t.execute(&end, &[&digest.0.as_slice(), &at_ms, &change]).await?;
            if ended == 0 { Err(LedgerError::NoKey) } else { Ok(()) }
        })
    }

    fn key_base(&mut self) -> Result<(i64, Vec<KeyRecord>), LedgerError> {
        Self::key_base(self)
    }

    fn changes_since(&mut self, number: i64, limit: u32) -> Result<Vec<(i64, KeyRecord)>, LedgerError> {
        Self::changes_since(self, number, limit)
    }

    fn key(&mut self, begins: &[u8]) -> Result<Option<KeyRecord>, LedgerError> {
        self.within(async |t| keys::one(t, begins).await)
    }

    fn keys(&mut self, account: Option<&str>) -> Result<Vec<KeyRecord>, LedgerError> {
        self.within(async |t| keys::all(t, account).await)
    }

    fn account(&mut self, name: &str) -> Result<AccountId, LedgerError> {
        self.within(async |t| Ok(AccountId(account_id(t, name).await?)))
    }

    fn balance(&mut self, account: AccountId) -> Result<Amount, LedgerError> {
        let posted = "SELECT posted FROM balance WHERE account = $1";
        let row = self.within(async |t| Ok(t.query_opt(posted, &[&account.0]).await?))?;
        Ok(Amount::from_nano(row.map(|row| row.try_get(0)).transpose()?.unwrap_or_default()))
    }

    fn accounts(&mut self, name: Option<&str>) -> Result<Vec<AccountRow>, LedgerError> {
        let accounts = "SELECT a.id, a.name, b.posted, b.leased, b.calls, a.settings
                        FROM account a JOIN balance b ON b.account = a.id
                        WHERE $1::text IS NULL OR a.name = $1 ORDER BY a.name";
        let rows = self.within(async |t| Ok(t.query(accounts, &[&name]).await?))?;
        let account = |row: &tokio_postgres::Row| {
            Ok(AccountRow {
                id: row.try_get(0)?,
                name: row.try_get(1)?,
                balance_nano: row.try_get(2)?,
                leased_nano: row.try_get(3)?,
                calls: row.try_get(4)?,
                settings: keys::read(row.try_get(5)?)?,
            })
        };
        rows.iter().map(account).collect()
    }

    fn balances(&mut self) -> Result<Vec<(String, Amount)>, LedgerError> {
        let select =
            "SELECT a.name, b.posted FROM account a JOIN balance b ON b.account = a.id ORDER BY a.name";
        let rows = self.within(async |t| Ok(t.query(select, &[]).await?))?;
        let balance = |row: &tokio_postgres::Row| Ok((row.try_get(0)?, Amount::from_nano(row.try_get(1)?)));
        rows.iter().map(balance).collect()
    }

    fn statement(&mut self, account: &str, limit: u32) -> Result<Vec<StatementLine>, LedgerError> {
        let rows = self.within(async |t| {
            let id = account_id(t, account).await?;
            let lines = t
                .prepare_cached(
                    "SELECT t.at_ms, t.kind, CASE t.debit WHEN $1 THEN -t.amount ELSE t.amount END,
                         coalesce(s.request, t.reason), coalesce(s.model, ''), coalesce(s.endpoint, ''),
                         coalesce(s.tokens, '{}'), coalesce(s.estimated, false)
                     FROM ((SELECT * FROM transfer WHERE debit = $1 AND debit >= 1000 ORDER BY seq DESC LIMIT $2)
                           UNION ALL
                           (SELECT * FROM transfer WHERE credit = $1 AND credit >= 1000 ORDER BY seq DESC LIMIT $2)) t
                     LEFT JOIN settlement s ON t.kind < 10 AND s.day = t.day AND s.hold = t.reference
                     ORDER BY t.seq DESC LIMIT $2",
                )
                .await?;
            Ok(t.query(&lines, &[&id, &i64::from(limit)]).await?)
        })?;
        let line = |row: &tokio_postgres::Row| {
            let tokens: Vec<i64> = row.try_get(6)?;
            Ok(StatementLine {
                at_ms: row.try_get(0)?,
                kind: kind_word(i64::from(row.try_get::<_, i16>(1)?)),
                amount_nano: row.try_get(2)?,
                what: row.try_get(3)?,
                model: row.try_get(4)?,
                endpoint: row.try_get(5)?,
                prompt_tokens: sum(&tokens, 0..5),
                completion_tokens: sum(&tokens, 5..6),
                estimated: row.try_get(7)?,
            })
        };
        rows.iter().map(line).collect()
    }

    fn generation(&mut self, account: AccountId, id: &str) -> Result<Option<Generation>, LedgerError> {
        let hold = uuid::Uuid::parse_str(id).map(|id| id.as_bytes().to_vec()).unwrap_or_default();
        let row = self.within(async |t| {
            let call = t
                .prepare_cached(
                    "SELECT hold, request, model, endpoint, attempts, tokens, estimated,
                         captured + excess - written_off, held, price_version, held_ms
                     FROM settlement WHERE account = $1 AND (request = $2 OR
                         length($3::bytea) = 16 AND hold = $3 AND day = hold_day($3))
                     ORDER BY held_ms DESC LIMIT 1",
                )
                .await?;
            Ok(t.query_opt(&call, &[&account.0, &id, &hold]).await?)
        })?;
        let Some(row) = row else { return Ok(None) };
        let tokens: Vec<i64> = row.try_get(5)?;
        let hold: &[u8] = row.try_get(0)?;
        Ok(Some(Generation {
            id: HoldId::from_bytes(hold.try_into().unwrap_or_default()).to_string(),
            request_id: row.try_get(1)?,
            model: row.try_get(2)?,
            upstream: row.try_get(3)?,
            attempts: u32::try_from(row.try_get::<_, i64>(4)?).unwrap_or(u32::MAX),
            prompt_tokens: sum(&tokens, 0..5),
            cached_tokens: sum(&tokens, 1..2),
            completion_tokens: sum(&tokens, 5..6),
            estimated: row.try_get(6)?,
            cost_nano: row.try_get(7)?,
            held_nano: row.try_get(8)?,
            price_version: u32::try_from(row.try_get::<_, i64>(9)?).unwrap_or(u32::MAX),
            created_ms: row.try_get(10)?,
        }))
    }

    fn spent(&mut self, scope: &Scope<'_>, since_ms: i64) -> Result<Amount, LedgerError> {
        let Scope { account, key, model } = *scope;
        let key = key.map(|digest| digest.0);
        let key = key.as_ref().map(<[u8; 32]>::as_slice);
        self.within(async |t| {
            let spent = t
                .prepare_cached(
                    "SELECT coalesce(sum(captured + excess - written_off), 0)::bigint FROM settlement
                     WHERE account = $1 AND held_ms >= $2 AND ($3::bytea IS NULL OR key_digest = $3)
                         AND ($4::text IS NULL OR model = $4)",
                )
                .await?;
            let row = t.query_one(&spent, &[&account.0, &since_ms, &key, &model]).await?;
            Ok(Amount::from_nano(row.try_get(0)?))
        })
    }

    fn snapshot(&mut self, now_ms: i64) -> Result<(), LedgerError> {
        self.at_length(async |t| {
            let day = i32::try_from(now_ms.div_euclid(DAY_MS)).unwrap_or(i32::MAX);
            let due = "SELECT 1 FROM balance b WHERE NOT EXISTS (
                           SELECT 1 FROM snapshot s WHERE s.account = b.account AND s.day = date '1970-01-01' + $1::integer)
                       LIMIT 1";
            if t.query_opt(due, &[&day]).await?.is_some() {
                // Of one account's transfers those with a lower number are committed and in its balance, those with a
                // higher one are not: they are numbered under the locks that are taken here.
                t.execute("SELECT count(*) FROM (SELECT 1 FROM balance ORDER BY account FOR NO KEY UPDATE) b", &[]).await?;
                t.execute(
                    "INSERT INTO snapshot (account, day, posted, last_seq)
                     SELECT account, date '1970-01-01' + $1::integer, posted, (SELECT last_value FROM transfer_seq)
                     FROM balance ON CONFLICT DO NOTHING",
                    &[&day],
                )
                .await?;
            }
            t.execute("DELETE FROM keyed_call WHERE at_ms < $1", &[&(now_ms - DAY_MS)]).await?;
            Ok(())
        })
    }

    fn begin_keyed(&mut self, call: &KeyedCall<'_>) -> Result<Option<Keyed>, LedgerError> {
        let KeyedCall { account, key, body, request, now_ms } = *call;
        let body = body.as_slice();
        self.within(async |t| {
            // One that is a day old is taken over; one that goes at this moment leaves its place.
            let begin = "INSERT INTO keyed_call AS k (account, key, body, request, at_ms) VALUES ($1, $2, $3, $4, $5)
                         ON CONFLICT (account, key) DO UPDATE SET body = excluded.body, request = excluded.request,
                             answer = NULL, at_ms = excluded.at_ms
                         WHERE k.at_ms < $6 RETURNING 1";
            let known = "SELECT body, request, answer FROM keyed_call WHERE account = $1 AND key = $2";
            let (begin, known) = (t.prepare_cached(begin).await?, t.prepare_cached(known).await?);
            let too_old = now_ms - DAY_MS;
            loop {
                let values: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
                    [&account.0, &key, &body, &request, &now_ms, &too_old];
                if t.query_opt(&begin, &values).await?.is_some() {
                    return Ok(None);
                }
                if let Some(row) = t.query_opt(&known, &[&account.0, &key]).await? {
                    let body: &[u8] = row.try_get(0)?;
                    let body = body.try_into().unwrap_or_default();
                    return Ok(Some(Keyed { body, request: row.try_get(1)?, answer: row.try_get(2)? }));
                }
            }
        })
    }

    fn end_keyed(&mut self, account: AccountId, key: &str, answer: Option<&[u8]>) -> Result<(), LedgerError> {
        let end = match answer {
            Some(_) => "UPDATE keyed_call SET answer = $3 WHERE account = $1 AND key = $2",
            None => "DELETE FROM keyed_call WHERE account = $1 AND key = $2 AND $3::bytea IS NULL",
        };
        self.within(async |t| {
            t.execute(end, &[&account.0, &key, &answer]).await?;
            Ok(())
        })
    }

    fn verify(&mut self) -> Result<Verified, LedgerError> {
        self.prove()
    }
}

/// An account's keys are as good as changed when its settings are: they are numbered anew.
async fn number_keys(t: &Transaction<'_>, account: i64) -> Result<(), LedgerError> {
    // The lock first, so that no key comes in between.
    keys::next_change(t, 0).await?;
    let how_many = "SELECT count(*) FROM api_key WHERE account = $1";
    let how_many: i64 = t.query_one(how_many, &[&account]).await?.try_get(0)?;
    if how_many == 0 {
        return Ok(());
    }
    let first = keys::next_change(t, how_many).await?;
    t.execute(
        "UPDATE api_key k SET change = n.change
         FROM (SELECT digest, $2 + row_number() OVER (ORDER BY digest) - 1 AS change
               FROM api_key WHERE account = $1) n
         WHERE k.digest = n.digest",
        &[&account, &first],
    )
    .await?;
    Ok(())
}

/// Makes room for money that goes out: from a boot's lease, or from what is free. Under the locks of both.
async fn take_out(
    t: &Transaction<'_>,
    account: AccountId,
    nano: i64,
    lease: Option<(i64, i64)>,
) -> Result<(), LedgerError> {
    let available = if let Some((_, left)) = lease {
        left
    } else {
        let free = "SELECT posted - leased FROM balance WHERE account = $1";
        let row = t.query_opt(free, &[&account.0]).await?;
        row.ok_or_else(|| LedgerError::NoAccount(account.to_string()))?.try_get(0)?
    };
    if available < nano {
        return Err(LedgerError::Funds { available: Amount::from_nano(available) });
    }
    if let Some((id, _)) = lease {
        t.execute("UPDATE lease SET consumed = consumed + $2 WHERE id = $1", &[&id, &nano]).await?;
        t.execute("UPDATE balance SET leased = leased - $2 WHERE account = $1", &[&account.0, &nano]).await?;
    }
    Ok(())
}

/// Whether what a reference stands for is just this transfer.
async fn is_booked(t: &Transaction<'_>, reference: &[u8], transfer: &Transfer) -> Result<bool, LedgerError> {
    let Transfer { kind, debit, credit, amount } = *transfer;
    let booked =
        "SELECT EXISTS (SELECT 1 FROM transfer WHERE day = date '1970-01-01' AND reference = $1 AND kind = $2
                      AND debit = $3 AND credit = $4 AND amount = $5)";
    let row = t
        .query_one(booked, &[&reference, &self::kind(kind), &row(debit), &row(credit), &amount.nano()])
        .await?;
    Ok(row.try_get(0)?)
}

async fn account_id(t: &Transaction<'_>, name: &str) -> Result<i64, LedgerError> {
    let customer = i16::try_from(CUSTOMER).unwrap_or_default();
    let id = "SELECT id FROM account WHERE kind = $1 AND name = $2";
    let row = t.query_opt(id, &[&customer, &name]).await?;
    Ok(row.ok_or_else(|| LedgerError::NoAccount(name.to_owned()))?.try_get(0)?)
}

fn sum(tokens: &[i64], range: std::ops::Range<usize>) -> u64 {
    let counts = tokens.get(range).unwrap_or_default().iter();
    counts.fold(0, |sum: u64, n| sum.saturating_add(u64::try_from(*n).unwrap_or_default()))
}

fn json<T: serde::Serialize>(value: &T) -> Result<String, LedgerError> {
    serde_json::to_string(value)
        .map_err(|e| LedgerError::Violation(format!("settings cannot be stored: {e}")))
}
