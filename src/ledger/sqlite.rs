//! The embedded ledger: one `SQLite` file, WAL, one writer.
//!
//! `synchronous=FULL`: what is committed survives a power cut. Its constraints mirror
//! `filters::money::transfer`, so that a bad row is refused twice.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use filters::ids::{AccountId, HoldId, KeyDigest};
use filters::money::{Amount, LedgerAccount, Transfer, TransferKind};
use rusqlite::{
    CachedStatement, Connection, OpenFlags, OptionalExtension, Transaction, TransactionBehavior, params,
};

use super::port::{
    AccountRow, Generation, KeyRecord, Keyed, KeyedCall, Ledger, LedgerError, Movement, NewKey, Scope,
    StatementLine, Verified,
};
use super::stored::{CUSTOMER, CUSTOMER_ID_MIN, DAY_MS, HOUSE, HOUSE_KIND, kind_word, number, row};
use crate::journal::Settled;
use crate::settings::{AccountSettings, KeySettings};

const SCHEMA: &str = include_str!("schema.sql");
const SCHEMA_VERSION: i64 = 1;
/// What every file has or gets, without a version of its own.
const LATER: &str = include_str!("later.sql");
/// What a key's row and its account say, for [`Records::read`].
const RECORD: &str =
    "SELECT k.digest, k.account, a.name, k.hint, k.settings, a.settings, k.created_ms, k.expires_ms,
                             k.revoked_ms
                      FROM api_key k JOIN account a ON a.id = k.account";

/// A ledger in a file.
pub struct Sqlite {
    connection: Connection,
}

impl Sqlite {
    /// Opens the file for writing, making it and its schema when it is not there.
    ///
    /// # Errors
    /// [`LedgerError`] when it cannot be opened or is newer than this binary.
    pub fn open(path: &Path) -> Result<Self, LedgerError> {
        Self::prepare(Connection::open(path)?)
    }

    /// A ledger in memory, for tests and simulations.
    ///
    /// # Errors
    /// [`LedgerError`] when `SQLite` cannot begin.
    pub fn in_memory() -> Result<Self, LedgerError> {
        Self::prepare(Connection::open_in_memory()?)
    }

    /// Opens the file for reading beside a running gateway.
    ///
    /// # Errors
    /// [`LedgerError`] when it is not there or cannot be read.
    pub fn open_for_reading(path: &Path) -> Result<Self, LedgerError> {
        let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        connection.busy_timeout(Duration::from_secs(5))?;
        let version = version(&connection)?;
        if version == SCHEMA_VERSION {
            Ok(Self { connection })
        } else {
            Err(LedgerError::TooNew(version, SCHEMA_VERSION))
        }
    }

    fn prepare(mut connection: Connection) -> Result<Self, LedgerError> {
        connection.busy_timeout(Duration::from_secs(5))?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        connection.pragma_update(None, "wal_autocheckpoint", 4000)?;
        // One that reads first and then writes would fail at once when another connection has written in
        // between: SQLITE_BUSY_SNAPSHOT knows no waiting.
        connection.set_transaction_behavior(TransactionBehavior::Immediate);
        match version(&connection)? {
            SCHEMA_VERSION => {}
            0 => {
                let transaction = connection.transaction()?;
                transaction.execute_batch(SCHEMA)?;
                for (id, name, _) in HOUSE {
                    transaction.execute(
                        "INSERT INTO account (id, kind, name, created_ms) VALUES (?1, ?2, ?3, 0)",
                        params![id, HOUSE_KIND, name],
                    )?;
                }
                // AUTOINCREMENT goes on behind this.
                transaction.execute(
                    "UPDATE sqlite_sequence SET seq = ?1 WHERE name = 'account'",
                    params![CUSTOMER_ID_MIN - 1],
                )?;
                transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
                transaction.commit()?;
            }
            newer => return Err(LedgerError::TooNew(newer, SCHEMA_VERSION)),
        }
        connection.execute_batch(LATER)?;
        Ok(Self { connection })
    }
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

impl Ledger for Sqlite {
    fn begin_boot(&mut self, now_ms: i64) -> Result<i64, LedgerError> {
        self.connection.execute("INSERT INTO boot (started_ms) VALUES (?1)", params![now_ms])?;
        Ok(self.connection.last_insert_rowid())
    }

    fn open_boots(&mut self) -> Result<Vec<i64>, LedgerError> {
        let mut query = self.connection.prepare_cached("SELECT id FROM boot WHERE ended = 0 ORDER BY id")?;
        let rows = query.query_map([], |row| row.get(0))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn lease_all(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError> {
        let transaction = self.connection.transaction()?;
        lease_what_is_free(&transaction, boot)?;
        transaction.commit()?;
        self.leases(boot)
    }

    fn leases(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError> {
        let mut query =
            self.connection.prepare_cached("SELECT account, amount FROM lease WHERE boot = ?1")?;
        let rows = query
            .query_map(params![boot], |row| Ok((AccountId(row.get(0)?), Amount::from_nano(row.get(1)?))))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn post(&mut self, boot: i64, batch: &[Settled]) -> Result<usize, LedgerError> {
        let transaction = self.connection.transaction()?;
        let mut new = 0;
        // One sum an account: a batch is booked whole or not at all, so nobody sees the steps.
        let mut charged: HashMap<i64, i64> = HashMap::new();
        let mut rows = Rows::of(&transaction)?;
        for settled in batch {
            if let Some(amount) = rows.post_one(settled)? {
                new += 1;
                let sum = charged.entry(settled.account).or_default();
                *sum = sum
                    .checked_add(amount)
                    .ok_or_else(|| LedgerError::Violation("a batch charges more than there is".to_owned()))?;
            }
        }
        drop(rows);
        for (account, amount) in charged {
            take_charged(&transaction, boot, account, amount)?;
        }
        transaction.commit()?;
        Ok(new)
    }

    fn end_boot(&mut self, boot: i64) -> Result<(), LedgerError> {
        let transaction = self.connection.transaction()?;
        transaction.execute(
            "UPDATE balance SET leased = leased - lease.amount FROM lease
             WHERE lease.boot = ?1 AND lease.account = balance.account",
            params![boot],
        )?;
        transaction.execute("DELETE FROM lease WHERE boot = ?1", params![boot])?;
        transaction.execute("UPDATE boot SET ended = 1 WHERE id = ?1", params![boot])?;
        transaction.commit()?;
        Ok(())
    }

    fn lease_free(&mut self, boot: i64) -> Result<Vec<(AccountId, Amount)>, LedgerError> {
        let transaction = self.connection.transaction()?;
        let added = {
            let mut query = transaction
                .prepare_cached("SELECT account, posted - leased FROM balance WHERE posted > leased")?;
            let rows =
                query.query_map([], |row| Ok((AccountId(row.get(0)?), Amount::from_nano(row.get(1)?))))?;
            rows.collect::<Result<Vec<_>, _>>()?
        };
        lease_what_is_free(&transaction, boot)?;
        transaction.commit()?;
        Ok(added)
    }

    fn give_back(&mut self, boot: i64, parts: &[(AccountId, Amount)]) -> Result<(), LedgerError> {
        let transaction = self.connection.transaction()?;
        for (account, amount) in parts {
            // By the difference, never to a computed rest: see docs/model-check.md.
            transaction.execute(
                "UPDATE lease SET amount = amount - ?3 WHERE boot = ?1 AND account = ?2",
                params![boot, account.0, amount.nano()],
            )?;
            transaction.execute(
                "UPDATE balance SET leased = leased - ?2 WHERE account = ?1",
                params![account.0, amount.nano()],
            )?;
        }
        transaction.commit()?;
        Ok(())
    }

    fn ensure_account(
        &mut self,
        name: &str,
        settings: Option<&AccountSettings>,
        now_ms: i64,
    ) -> Result<AccountId, LedgerError> {
        let transaction = self.connection.transaction()?;
        transaction.execute(
            "INSERT INTO account (kind, name, created_ms) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
            params![CUSTOMER, name, now_ms],
        )?;
        let id = account_id(&transaction, name)?;
        if let Some(settings) = settings {
            transaction
                .execute("UPDATE account SET settings = ?2 WHERE id = ?1", params![id, json(settings)?])?;
        }
        transaction.execute(
            "INSERT INTO balance (account, posted, leased) VALUES (?1, 0, 0) ON CONFLICT DO NOTHING",
            params![id],
        )?;
        transaction.commit()?;
        Ok(AccountId(id))
    }

    fn transfer(&mut self, movement: &Movement<'_>) -> Result<bool, LedgerError> {
        let Movement { account, what, amount, reference, reason, now_ms, boot } = *movement;
        let transaction = self.connection.transaction()?;
        let transfer = what.transfer(account, amount);
        let new = book(&transaction, reference.as_bytes(), &transfer, reason, now_ms)?;
        if new {
            let sign = if what.goes_out() { -1 } else { 1 };
            if what.goes_out() {
                take_out(&transaction, account, amount, boot)?;
            }
            transaction.execute(
                "UPDATE balance SET posted = posted + ?2 * ?3 WHERE account = ?1",
                params![account.0, amount.nano(), sign],
            )?;
        } else if !is_booked(&transaction, reference.as_bytes(), &transfer)? {
            return Err(LedgerError::ReferenceTaken(reference.to_owned()));
        }
        transaction.commit()?;
        Ok(new)
    }

    fn ensure_key(&mut self, key: &NewKey<'_>) -> Result<(), LedgerError> {
        let NewKey { digest, account, account_name, hint, settings, expires_ms, now_ms } = *key;
        let changed = self.connection.execute(
            "INSERT INTO api_key (digest, account, hint, settings, created_ms, expires_ms)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT DO UPDATE SET settings = excluded.settings
             WHERE account = excluded.account",
            params![digest.0, account.0, hint, json(settings)?, now_ms, expires_ms],
        )?;
        if changed == 0 { Err(LedgerError::KeyTaken(account_name.to_owned())) } else { Ok(()) }
    }

    fn end_key(&mut self, digest: KeyDigest, at_ms: i64, revoked: bool) -> Result<(), LedgerError> {
        let column = if revoked { "revoked_ms" } else { "expires_ms" };
        let sql = format!("UPDATE api_key SET {column} = min(coalesce({column}, ?2), ?2) WHERE digest = ?1");
        let changed = self.connection.execute(&sql, params![digest.0, at_ms])?;
        if changed == 0 { Err(LedgerError::NoKey) } else { Ok(()) }
    }

    fn key_base(&mut self) -> Result<(i64, Vec<KeyRecord>), LedgerError> {
        // Keys as they were at that number, whoever writes meanwhile.
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let latest = "SELECT coalesce(max(number), 0) FROM key_change";
        let number = transaction.query_row(latest, [], |row| row.get(0))?;
        let mut query = transaction.prepare(&format!("{RECORD} ORDER BY k.account"))?;
        let mut records = Records::default();
        let rows = query.query_map([], |row| records.read(row, 0))?;
        Ok((number, rows.collect::<Result<_, _>>()?))
    }

    fn changes_since(&mut self, number: i64, limit: u32) -> Result<Vec<(i64, KeyRecord)>, LedgerError> {
        let mut query = self.connection.prepare_cached(
            "SELECT c.number, k.digest, k.account, a.name, k.hint, k.settings, a.settings, k.created_ms, k.expires_ms,
                    k.revoked_ms
             FROM key_change c JOIN api_key k ON k.digest = c.digest JOIN account a ON a.id = k.account
             WHERE c.number > ?1 ORDER BY c.number LIMIT ?2",
        )?;
        let mut records = Records::default();
        let rows = query.query_map(params![number, limit], |row| Ok((row.get(0)?, records.read(row, 1)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn key(&mut self, begins: &[u8]) -> Result<Option<KeyRecord>, LedgerError> {
        let next = format!("{RECORD} WHERE k.digest >= ?1 ORDER BY k.digest LIMIT 1");
        let mut query = self.connection.prepare_cached(&next)?;
        let found = query.query_row(params![begins], |row| Records::default().read(row, 0)).optional()?;
        Ok(found.filter(|key| key.digest.0.starts_with(begins)))
    }

    fn keys(&mut self, account: Option<&str>) -> Result<Vec<KeyRecord>, LedgerError> {
        let query = match account {
            Some(_) => format!("{RECORD} WHERE a.kind = {CUSTOMER} AND a.name = ?1 ORDER BY k.created_ms"),
            None => format!("{RECORD} WHERE ?1 IS NULL ORDER BY a.name, k.created_ms"),
        };
        let mut query = self.connection.prepare_cached(&query)?;
        let mut records = Records::default();
        let rows = query.query_map(params![account], |row| records.read(row, 0))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn account(&mut self, name: &str) -> Result<AccountId, LedgerError> {
        Ok(AccountId(account_id(&self.connection, name)?))
    }

    fn balance(&mut self, account: AccountId) -> Result<Amount, LedgerError> {
        let mut query = self.connection.prepare_cached("SELECT posted FROM balance WHERE account = ?1")?;
        let posted = query.query_row(params![account.0], |row| row.get(0)).optional()?;
        Ok(Amount::from_nano(posted.unwrap_or_default()))
    }

    fn accounts(&mut self, name: Option<&str>) -> Result<Vec<AccountRow>, LedgerError> {
        let which = if name.is_some() { "a.name = ?1" } else { "?1 IS NULL" };
        let mut query = self.connection.prepare_cached(&format!(
            "SELECT a.id, a.name, b.posted, b.leased,
                    (SELECT count(*) FROM settlement s WHERE s.account = a.id), a.settings
             FROM account a JOIN balance b ON b.account = a.id
             WHERE a.kind = {CUSTOMER} AND {which} ORDER BY a.name",
        ))?;
        let rows = query.query_map(params![name], |row| {
            Ok(AccountRow {
                id: row.get(0)?,
                name: row.get(1)?,
                balance_nano: row.get(2)?,
                leased_nano: row.get(3)?,
                calls: row.get(4)?,
                settings: from_json(row, 5)?,
            })
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn balances(&mut self) -> Result<Vec<(String, Amount)>, LedgerError> {
        let select =
            "SELECT a.name, b.posted FROM account a JOIN balance b ON b.account = a.id ORDER BY a.name";
        let mut query = self.connection.prepare_cached(select)?;
        let rows = query.query_map([], |row| Ok((row.get(0)?, Amount::from_nano(row.get(1)?))))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn statement(&mut self, account: &str, limit: u32) -> Result<Vec<StatementLine>, LedgerError> {
        let id = account_id(&self.connection, account)?;
        let mut query = self.connection.prepare_cached(
            "SELECT t.at_ms, t.kind, CASE t.debit WHEN ?1 THEN -t.amount ELSE t.amount END,
                    coalesce(s.request, t.reason), coalesce(s.model, ''), coalesce(s.endpoint, ''),
                    coalesce(s.tokens, '[]'), coalesce(s.estimated, 0)
             FROM transfer t LEFT JOIN settlement s ON s.hold = t.reference
             WHERE (t.debit = ?1 AND t.debit >= 1000) OR (t.credit = ?1 AND t.credit >= 1000)
             ORDER BY t.id DESC LIMIT ?2",
        )?;
        let rows = query.query_map(params![id, limit], |row| {
            let tokens: String = row.get(6)?;
            let tokens: Vec<u64> = serde_json::from_str(&tokens).unwrap_or_default();
            let sum = |range: std::ops::Range<usize>| {
                tokens.get(range).unwrap_or_default().iter().fold(0_u64, |a, b| a.saturating_add(*b))
            };
            Ok(StatementLine {
                at_ms: row.get(0)?,
                kind: kind_word(row.get(1)?),
                amount_nano: row.get(2)?,
                what: row.get(3)?,
                model: row.get(4)?,
                endpoint: row.get(5)?,
                prompt_tokens: sum(0..5),
                completion_tokens: sum(5..6),
                estimated: row.get(7)?,
            })
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn generation(&mut self, account: AccountId, id: &str) -> Result<Option<Generation>, LedgerError> {
        let hold = uuid::Uuid::parse_str(id).map(|id| id.as_bytes().to_vec()).unwrap_or_default();
        let mut query = self.connection.prepare_cached(
            "SELECT hold, request, model, endpoint, attempts, tokens, estimated, captured + excess, held,
                    price_version, held_ms
             FROM settlement WHERE account = ?1 AND (request = ?2 OR hold = ?3)
             ORDER BY held_ms DESC LIMIT 1",
        )?;
        let found = query.query_row(params![account.0, id, hold], |row| {
            let tokens: Vec<u64> = from_json(row, 5)?;
            let sum = |range: std::ops::Range<usize>| {
                tokens.get(range).unwrap_or_default().iter().fold(0_u64, |a, b| a.saturating_add(*b))
            };
            Ok(Generation {
                id: HoldId::from_bytes(row.get(0)?).to_string(),
                request_id: row.get(1)?,
                model: row.get(2)?,
                upstream: row.get(3)?,
                attempts: row.get(4)?,
                prompt_tokens: sum(0..5),
                cached_tokens: sum(1..2),
                completion_tokens: sum(5..6),
                estimated: row.get(6)?,
                cost_nano: row.get(7)?,
                held_nano: row.get(8)?,
                price_version: row.get(9)?,
                created_ms: row.get(10)?,
            })
        });
        Ok(found.optional()?)
    }

    fn spent(&mut self, scope: &Scope<'_>, since_ms: i64) -> Result<Amount, LedgerError> {
        let mut query = self.connection.prepare_cached(
            "SELECT coalesce(sum(captured + excess), 0) FROM settlement
             WHERE account = ?1 AND held_ms >= ?2 AND (?3 IS NULL OR key_digest = ?3)
                 AND (?4 IS NULL OR model = ?4)",
        )?;
        let key = scope.key.map(|digest| digest.0);
        let nano = query.query_row(params![scope.account.0, since_ms, key, scope.model], |row| row.get(0))?;
        Ok(Amount::from_nano(nano))
    }

    fn snapshot(&mut self, now_ms: i64) -> Result<(), LedgerError> {
        self.connection.execute(
            "INSERT INTO snapshot (account, day, posted, last_transfer)
             SELECT account, ?1, posted, (SELECT coalesce(max(id), 0) FROM transfer) FROM balance
             WHERE true ON CONFLICT DO NOTHING",
            params![now_ms.div_euclid(DAY_MS)],
        )?;
        Ok(())
    }

    fn begin_keyed(&mut self, call: &KeyedCall<'_>) -> Result<Option<Keyed>, LedgerError> {
        let KeyedCall { account, key, body, request, now_ms } = *call;
        let transaction = self.connection.transaction()?;
        transaction.execute("DELETE FROM keyed_call WHERE at_ms < ?1", params![now_ms - DAY_MS])?;
        let known = transaction
            .query_row(
                "SELECT body, request, answer FROM keyed_call WHERE account = ?1 AND key = ?2",
                params![account.0, key],
                |row| Ok(Keyed { body: row.get(0)?, request: row.get(1)?, answer: row.get(2)? }),
            )
            .optional()?;
        if known.is_none() {
            transaction.execute(
                "INSERT INTO keyed_call (account, key, body, request, at_ms) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![account.0, key, body, request, now_ms],
            )?;
        }
        transaction.commit()?;
        Ok(known)
    }

    fn end_keyed(&mut self, account: AccountId, key: &str, answer: Option<&[u8]>) -> Result<(), LedgerError> {
        let sql = match answer {
            Some(_) => "UPDATE keyed_call SET answer = ?3 WHERE account = ?1 AND key = ?2",
            None => "DELETE FROM keyed_call WHERE account = ?1 AND key = ?2 AND ?3 IS NULL",
        };
        self.connection.execute(sql, params![account.0, key, answer])?;
        Ok(())
    }

    fn verify(&mut self) -> Result<Verified, LedgerError> {
        // One snapshot, so that a running gateway cannot make the sums disagree.
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Deferred)?;
        for (law, query) in LAWS {
            let broken: Option<String> = transaction.query_row(query, [], |row| row.get(0)).optional()?;
            if let Some(what) = broken {
                return Err(LedgerError::Violation(format!("{law}: {what}")));
            }
        }
        let count = |table: &str| {
            transaction.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get::<_, i64>(0))
        };
        let turnover_nano =
            transaction.query_row("SELECT coalesce(sum(amount), 0) FROM transfer", [], |row| row.get(0))?;
        Ok(Verified {
            accounts: count("balance")?,
            transfers: count("transfer")?,
            holds: count("settlement")?,
            turnover_nano,
        })
    }
}

/// What must hold, each with a query that finds the first row where it does not.
const LAWS: [(&str, &str); 9] = [
    (
        "a day's snapshot is the sum of the postings up to it",
        "SELECT 'account ' || s.account || ' on day ' || s.day FROM snapshot s
         WHERE s.posted <>
             (SELECT coalesce(sum(amount), 0) FROM transfer t
              WHERE t.credit = s.account AND t.credit >= 1000 AND t.id <= s.last_transfer)
           - (SELECT coalesce(sum(amount), 0) FROM transfer t
              WHERE t.debit = s.account AND t.debit >= 1000 AND t.id <= s.last_transfer)
         LIMIT 1",
    ),
    (
        "a transfer moves a positive amount between two accounts",
        "SELECT 'transfer ' || id FROM transfer WHERE amount <= 0 OR debit = credit LIMIT 1",
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
        "all postings sum to zero",
        "SELECT 'the sum is ' || s FROM (
             SELECT coalesce(sum(amount * (credit IN (SELECT id FROM account))), 0)
                  - coalesce(sum(amount * (debit IN (SELECT id FROM account))), 0) AS s
             FROM transfer) WHERE s <> 0",
    ),
    (
        "captured and released make up what was held",
        "SELECT 'hold ' || hex(hold) FROM settlement WHERE captured + released <> held LIMIT 1",
    ),
    (
        "every hold's transfers are what its settlement says",
        "SELECT 'hold ' || hex(s.hold) FROM settlement s
         LEFT JOIN transfer c ON c.reference = s.hold AND c.kind = 1
         LEFT JOIN transfer e ON e.reference = s.hold AND e.kind = 2
         LEFT JOIN transfer f ON f.reference = s.hold AND f.kind = 3
         WHERE coalesce(c.amount, 0) <> s.captured OR coalesce(e.amount, 0) <> s.excess
             OR coalesce(f.amount, 0) <> s.shortfall
             OR coalesce(c.debit, s.account) <> s.account OR coalesce(e.debit, s.account) <> s.account LIMIT 1",
    ),
    (
        "every charge belongs to a settled hold",
        "SELECT 'transfer ' || t.id FROM transfer t LEFT JOIN settlement s ON s.hold = t.reference
         WHERE t.kind IN (1, 2, 3) AND s.hold IS NULL LIMIT 1",
    ),
    (
        "leases reconcile with what is leased of a balance",
        "SELECT 'account ' || b.account || ' has ' || b.leased || ' leased, its leases sum to ' ||
             coalesce(l.sum, 0)
         FROM balance b
         LEFT JOIN (SELECT account, sum(amount) AS sum FROM lease GROUP BY account) l ON l.account = b.account
         WHERE b.leased <> coalesce(l.sum, 0) LIMIT 1",
    ),
    (
        "no balance is negative and none is leased beyond what is there",
        "SELECT 'account ' || account FROM balance WHERE posted < 0 OR leased < 0 OR leased > posted LIMIT 1",
    ),
];

/// The statements that book ended holds, ready for a whole batch.
struct Rows<'t> {
    settlement: CachedStatement<'t>,
    transfer: CachedStatement<'t>,
}

const INSERT_SETTLEMENT: &str =
    "INSERT INTO settlement (hold, account, request, model, endpoint, attempts, held, captured,
         released, excess, shortfall, provider_cost, tokens, estimated, anomaly, at_ms, abandoned,
         key_digest, held_ms, price_version)
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20)
     ON CONFLICT (hold) DO NOTHING";
const INSERT_TRANSFER: &str = "INSERT INTO transfer (reference, kind, debit, credit, amount, reason, at_ms)
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (reference, kind) DO NOTHING";

impl<'t> Rows<'t> {
    fn of(transaction: &'t Transaction<'_>) -> Result<Self, LedgerError> {
        Ok(Self {
            settlement: transaction.prepare_cached(INSERT_SETTLEMENT)?,
            transfer: transaction.prepare_cached(INSERT_TRANSFER)?,
        })
    }

    /// Books one ended hold. Answers what it charged, or nothing where it was booked before.
    fn post_one(&mut self, settled: &Settled) -> Result<Option<i64>, LedgerError> {
        let hold = HoldId(settled.id).to_bytes();
        let [held, captured, released, excess, shortfall] = settled.parts;
        let tokens = json(&settled.tokens)?;
        let new = self.settlement.execute(params![
            hold,
            settled.account,
            settled.request,
            settled.model,
            settled.endpoint,
            settled.attempts,
            held,
            captured,
            released,
            excess,
            shortfall,
            settled.provider_cost,
            tokens,
            settled.estimated,
            settled.anomaly,
            settled.at_ms,
            settled.abandoned,
            settled.key,
            settled.held_ms,
            settled.price_version,
        ])?;
        if new == 0 {
            return Ok(None);
        }
        let settlement = settled.settlement();
        let mut transfers = settlement.transfers(settled.account());
        if settled.provider_cost > 0 {
            transfers.push(Transfer {
                kind: TransferKind::ProviderCost,
                debit: LedgerAccount::ProviderCost,
                credit: LedgerAccount::ProviderPayable,
                amount: Amount::from_nano(settled.provider_cost),
            });
        }
        if settled.abandoned > 0 {
            transfers.push(Transfer {
                kind: TransferKind::Abandoned,
                debit: LedgerAccount::Abandoned,
                credit: LedgerAccount::ProviderPayable,
                amount: Amount::from_nano(settled.abandoned),
            });
        }
        for transfer in &transfers {
            insert(&mut self.transfer, &hold, transfer, "", settled.at_ms)?;
        }
        Ok(Some(settlement.charged().nano()))
    }
}

/// Takes what was charged out of an account's balance and out of the lease that it was spent from.
fn take_charged(
    transaction: &Transaction<'_>,
    boot: i64,
    account: i64,
    charged: i64,
) -> Result<(), LedgerError> {
    if charged > 0 {
        transaction
            .prepare_cached("UPDATE lease SET amount = amount - ?3 WHERE account = ?1 AND boot = ?2")?
            .execute(params![account, boot, charged])?;
        transaction
            .prepare_cached(
                "UPDATE balance SET posted = posted - ?2, leased = leased - ?2 WHERE account = ?1",
            )?
            .execute(params![account, charged])?;
    }
    Ok(())
}

fn lease_what_is_free(transaction: &Transaction<'_>, boot: i64) -> Result<(), LedgerError> {
    transaction.execute(
        "INSERT INTO lease (account, boot, amount)
         SELECT account, ?1, posted - leased FROM balance WHERE posted > leased
         ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
        params![boot],
    )?;
    transaction.execute("UPDATE balance SET leased = posted WHERE posted > leased", [])?;
    Ok(())
}

/// Makes room for money that goes out: from a boot's lease, or from what is free.
fn take_out(
    transaction: &Transaction<'_>,
    account: AccountId,
    amount: Amount,
    boot: Option<i64>,
) -> Result<(), LedgerError> {
    let (sql, params) = match boot {
        Some(boot) => (
            "SELECT coalesce((SELECT amount FROM lease WHERE account = ?1 AND boot = ?2), 0)",
            vec![account.0, boot],
        ),
        None => ("SELECT posted - leased FROM balance WHERE account = ?1", vec![account.0]),
    };
    let available = transaction.query_row(sql, rusqlite::params_from_iter(params), |row| row.get(0))?;
    let available = Amount::from_nano(available);
    if available < amount {
        return Err(LedgerError::Funds { available });
    }
    if let Some(boot) = boot {
        let values = params![account.0, boot, amount.nano()];
        transaction
            .execute("UPDATE lease SET amount = amount - ?3 WHERE account = ?1 AND boot = ?2", values)?;
        let values = params![account.0, amount.nano()];
        transaction.execute("UPDATE balance SET leased = leased - ?2 WHERE account = ?1", values)?;
    }
    Ok(())
}

fn json<T: serde::Serialize>(value: &T) -> Result<String, LedgerError> {
    serde_json::to_string(value)
        .map_err(|e| LedgerError::Violation(format!("settings cannot be stored: {e}")))
}

/// Reads keys; what those in a row have in common is read once.
#[derive(Default)]
struct Records {
    settings: Last<KeySettings>,
    account_settings: Last<AccountSettings>,
}

impl Records {
    /// A key's columns, as [`RECORD`] names them, from the column `at` on.
    fn read(&mut self, row: &rusqlite::Row<'_>, at: usize) -> rusqlite::Result<KeyRecord> {
        Ok(KeyRecord {
            digest: KeyDigest(row.get(at)?),
            account: AccountId(row.get(at + 1)?),
            account_name: row.get(at + 2)?,
            hint: row.get(at + 3)?,
            settings: self.settings.read(row, at + 4)?,
            account_settings: self.account_settings.read(row, at + 5)?,
            created_ms: row.get(at + 6)?,
            expires_ms: row.get(at + 7)?,
            revoked_ms: row.get(at + 8)?,
        })
    }
}

/// What was read last, and the text that it was.
#[derive(Default)]
struct Last<T> {
    text: String,
    value: Option<T>,
}

impl<T: serde::de::DeserializeOwned + Clone> Last<T> {
    fn read(&mut self, row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<T> {
        let text = row.get_ref(column)?.as_str()?;
        if let Some(value) = self.value.as_ref().filter(|_| self.text == text) {
            return Ok(value.clone());
        }
        let value: T = from_json(row, column)?;
        text.clone_into(&mut self.text);
        self.value = Some(value.clone());
        Ok(value)
    }
}

fn from_json<T: serde::de::DeserializeOwned>(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text: String = row.get(column)?;
    serde_json::from_str(&text).map_err(|e| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(e))
    })
}

/// Books one transfer, once per reference and kind.
fn book(
    transaction: &Transaction<'_>,
    reference: &[u8],
    transfer: &Transfer,
    reason: &str,
    at_ms: i64,
) -> Result<bool, LedgerError> {
    insert(&mut transaction.prepare_cached(INSERT_TRANSFER)?, reference, transfer, reason, at_ms)
}

fn insert(
    statement: &mut CachedStatement<'_>,
    reference: &[u8],
    transfer: &Transfer,
    reason: &str,
    at_ms: i64,
) -> Result<bool, LedgerError> {
    let Transfer { kind, debit, credit, amount } = *transfer;
    let values = params![reference, number(kind), row(debit), row(credit), amount.nano(), reason, at_ms];
    Ok(statement.execute(values)? > 0)
}

/// Whether what a reference stands for is just this transfer.
fn is_booked(
    transaction: &Transaction<'_>,
    reference: &[u8],
    transfer: &Transfer,
) -> Result<bool, LedgerError> {
    let Transfer { kind, debit, credit, amount } = *transfer;
    let sql = "SELECT EXISTS (SELECT 1 FROM transfer WHERE reference = ?1 AND kind = ?2 AND debit = ?3
               AND credit = ?4 AND amount = ?5)";
    let values = params![reference, number(kind), row(debit), row(credit), amount.nano()];
    Ok(transaction.query_row(sql, values, |row| row.get(0))?)
}

fn account_id(connection: &Connection, name: &str) -> Result<i64, LedgerError> {
    connection
        .query_row("SELECT id FROM account WHERE kind = ?1 AND name = ?2", params![CUSTOMER, name], |r| {
            r.get(0)
        })
        .optional()?
        .ok_or_else(|| LedgerError::NoAccount(name.to_owned()))
}
