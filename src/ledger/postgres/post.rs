//! Books how holds ended, in batches, each once.
//!
//! The same end may come from a node's journal and from Redis' outbox, twice from each, and from several nodes at once:
//! the settlement's row decides who was first, and only the first moves money. What was charged comes out of the lease
//! that the hold was placed in. Where that does not have it, since the lease is closed or a lost node's part of it was
//! set aside, it is paid from the account's suspense, then from what is free, and the rest is ours: a balance never
//! goes below what is leased of it, and nothing that comes ever stops the queue. What cannot be booked at all waits in
//! `misfit` for somebody to look at.
//!
//! A hold that the reaper took is booked at its last checkpoint first (`reaped`). When its own end comes after all, the
//! difference is settled from what was set aside, and the rest of that is free again.

use std::collections::{BTreeMap, HashMap, HashSet};

use deadpool_postgres::Transaction;
use filters::money::{Amount, LedgerAccount, Transfer, TransferKind};
use tokio_postgres::types::ToSql;

use super::books::{Row, insert_transfers};
use super::small;
use crate::journal::Settled;
use crate::ledger::port::LedgerError;

/// A hold's bytes: the key of its settlement, and the order of locks.
pub(super) type Hold = [u8; 16];

/// What came of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Posted {
    /// How many ends were new.
    pub(super) new: usize,
    /// What nobody pays.
    pub(super) written_off: Amount,
}

/// Books a batch against the lease of `boot` and the pools that its entries name.
pub(super) async fn post(t: &Transaction<'_>, boot: i64, batch: &[Settled]) -> Result<Posted, LedgerError> {
    let mut ends: BTreeMap<Hold, &Settled> = BTreeMap::new();
    for settled in batch {
        ends.entry(settled.id.to_be_bytes()).or_insert(settled);
    }
    set_misfits_aside(t, &mut ends).await?;
    if ends.is_empty() {
        return Ok(Posted::default());
    }
    let new = insert_settlements(t, &ends, &HashSet::new()).await?;
    let found = if new.len() == ends.len() { vec![] } else { found(t, &ends, &new).await? };
    if new.is_empty() && found.is_empty() {
        return Ok(Posted::default());
    }
    let is_touched = |hold: &Hold| new.contains(hold) || found.iter().any(|found| found.hold == *hold);
    let touched = ends.iter().filter(|(hold, _)| is_touched(hold)).map(|(_, settled)| *settled);
    let mut books = Books::lock(t, Some(boot), touched).await?;
    for (hold, settled) in ends.iter().filter(|(hold, _)| new.contains(*hold)) {
        books.end(*hold, settled);
    }
    for found in &found {
        if let Some(settled) = ends.get(&found.hold) {
            books.resolve(found, settled);
        }
    }
    books.write(t).await?;
    bring_up_to_date(t, &found, &ends).await?;
    Ok(Posted { new: new.len(), written_off: books.written_off() })
}

/// What makes an end impossible to book, if anything.
fn misfit(settled: &Settled) -> Option<&'static str> {
    let [held, captured, released, excess, shortfall] = settled.parts;
    let amounts = [held, captured, released, excess, shortfall, settled.provider_cost, settled.abandoned];
    if amounts.iter().any(|amount| *amount < 0) {
        return Some("an amount is negative");
    }
    if captured.checked_add(released) != Some(held) {
        return Some("captured and released do not make up what was held");
    }
    if captured.checked_add(excess).is_none() {
        return Some("it charges more than there is");
    }
    None
}

pub(super) async fn set_misfits_aside(
    t: &Transaction<'_>,
    ends: &mut BTreeMap<Hold, &Settled>,
) -> Result<(), LedgerError> {
    let accounts: HashSet<i64> = ends.values().map(|settled| settled.account).collect();
    let accounts: Vec<i64> = accounts.into_iter().collect();
    let known = t.prepare_cached("SELECT account FROM balance WHERE account = ANY ($1)").await?;
    let rows = t.query(&known, &[&accounts]).await?;
    let known = rows.iter().map(|row| Ok(row.try_get(0)?)).collect::<Result<HashSet<i64>, LedgerError>>()?;
    let mut misfits = vec![];
    ends.retain(|hold, settled| {
        let unknown = (!known.contains(&settled.account)).then_some("there is no such account");
        let why = misfit(settled).or(unknown);
        misfits.extend(why.map(|why| (*hold, *settled, why)));
        why.is_none()
    });
    for (hold, settled, why) in misfits {
        tracing::error!(
            breach = "misfit",
            why,
            account = settled.account,
            request = settled.request,
            "a call cannot be booked"
        );
        let text = text(&serde_json::to_string(settled).unwrap_or_default());
        let insert =
            "INSERT INTO misfit (hold, why, settled, at_ms) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
        t.execute(insert, &[&hold.as_slice(), &why, &text, &settled.at_ms]).await?;
    }
    Ok(())
}

/// Text as Postgres takes it.
fn text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// An end as a row, a column each: of settlements that are new, and of those that are brought up to date.
#[derive(Default)]
struct Columns<'a> {
    holds: Vec<&'a [u8]>,
    accounts: Vec<i64>,
    requests: Vec<String>,
    models: Vec<String>,
    endpoints: Vec<String>,
    attempts: Vec<i64>,
    parts: [Vec<i64>; 5],
    provider_costs: Vec<i64>,
    abandoned: Vec<i64>,
    keys: Vec<&'a [u8]>,
    held_ms: Vec<i64>,
    price_versions: Vec<i64>,
    tokens: Vec<String>,
    estimated: Vec<bool>,
    anomalies: Vec<bool>,
    at_ms: Vec<i64>,
    reaped: Vec<bool>,
}

impl<'a> Columns<'a> {
    fn push(&mut self, hold: &'a Hold, settled: &'a Settled, reaped: bool) {
        let Settled {
            id: _,
            account,
            request,
            model,
            endpoint,
            attempts,
            parts: [held, captured, released, excess, shortfall],
            provider_cost,
            abandoned,
            key,
            held_ms,
            price_version,
            tokens: _,
            estimated,
            anomaly,
            at_ms,
            pool: _,
        } = settled;
        self.holds.push(hold);
        self.accounts.push(*account);
        self.requests.push(text(request));
        self.models.push(text(model));
        self.endpoints.push(text(endpoint));
        self.attempts.push(i64::from(*attempts));
        let parts = [*held, *captured, *released, *excess, *shortfall];
        self.parts.iter_mut().zip(parts).for_each(|(column, part)| column.push(part));
        self.provider_costs.push(*provider_cost);
        self.abandoned.push(*abandoned);
        self.keys.push(key);
        self.held_ms.push(*held_ms);
        self.price_versions.push(i64::from(*price_version));
        self.tokens.push(tokens(settled));
        self.estimated.push(*estimated);
        self.anomalies.push(*anomaly);
        self.at_ms.push(*at_ms);
        self.reaped.push(reaped);
    }
}

/// Writes down how holds ended, those of `reaped` until their own end comes; answers those that were not written
/// before. From here on, until this transaction ends, nobody else books them.
pub(super) async fn insert_settlements(
    t: &Transaction<'_>,
    ends: &BTreeMap<Hold, &Settled>,
    reaped: &HashSet<Hold>,
) -> Result<HashSet<Hold>, LedgerError> {
    let mut c = Columns::default();
    ends.iter().for_each(|(hold, settled)| c.push(hold, settled, reaped.contains(hold)));
    let insert = t
        .prepare_cached(
            "INSERT INTO settlement (day, hold, account, request, model, endpoint, attempts, held, captured, released,
                 excess, shortfall, provider_cost, abandoned, key_digest, held_ms, price_version, tokens, estimated,
                 anomaly, at_ms, reaped)
             SELECT hold_day(c.hold), c.hold, c.account, c.request, c.model, c.endpoint, c.attempts, c.held,
                 c.captured, c.released, c.excess, c.shortfall, c.provider_cost, c.abandoned, c.key_digest, c.held_ms,
                 c.price_version, c.tokens::bigint[], c.estimated, c.anomaly, c.at_ms, c.reaped
             FROM unnest($1::bytea[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::bigint[],
                 $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bytea[],
                 $15::bigint[], $16::bigint[], $17::text[], $18::boolean[], $19::boolean[], $20::bigint[],
                 $21::boolean[])
                 AS c (hold, account, request, model, endpoint, attempts, held, captured, released, excess, shortfall,
                     provider_cost, abandoned, key_digest, held_ms, price_version, tokens, estimated, anomaly, at_ms,
                     reaped)
             ORDER BY c.hold ON CONFLICT DO NOTHING RETURNING hold",
        )
        .await?;
    let [held, captured, released, excess, shortfall] = &c.parts;
    let rows = t
        .query(
            &insert,
            &[
                &c.holds,
                &c.accounts,
                &c.requests,
                &c.models,
                &c.endpoints,
                &c.attempts,
                held,
                captured,
                released,
                excess,
                shortfall,
                &c.provider_costs,
                &c.abandoned,
                &c.keys,
                &c.held_ms,
                &c.price_versions,
                &c.tokens,
                &c.estimated,
                &c.anomalies,
                &c.at_ms,
                &c.reaped,
            ],
        )
        .await?;
    rows.iter().map(|row| hold_of(row.try_get(0)?)).collect()
}

pub(super) fn hold_of(bytes: &[u8]) -> Result<Hold, LedgerError> {
    bytes.try_into().map_err(|_| LedgerError::Violation("a hold's id has not 16 bytes".to_owned()))
}

/// A hold that the reaper ended, whose end has turned up.
struct Found {
    hold: Hold,
    charged: Amount,
    suspended: Amount,
}

async fn found(
    t: &Transaction<'_>,
    ends: &BTreeMap<Hold, &Settled>,
    new: &HashSet<Hold>,
) -> Result<Vec<Found>, LedgerError> {
    let known: Vec<&[u8]> =
        ends.keys().filter(|hold| !new.contains(*hold)).map(<[u8; 16]>::as_slice).collect();
    let reaped = t
        .prepare_cached(
            "SELECT s.hold, s.captured + s.excess, s.suspended FROM settlement s
             JOIN unnest($1::bytea[]) AS h (hold) ON s.hold = h.hold AND s.day = hold_day(h.hold)
             WHERE s.reaped ORDER BY s.hold FOR UPDATE OF s",
        )
        .await?;
    let found = |row: &tokio_postgres::Row| {
        Ok(Found {
            hold: hold_of(row.try_get(0)?)?,
            charged: Amount::from_nano(row.try_get(1)?),
            suspended: Amount::from_nano(row.try_get(2)?),
        })
    };
    t.query(&reaped, &[&known]).await?.iter().map(found).collect()
}

/// Where a hold's money was set aside.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Boot(i64),
    Pool(i64, i16, i64),
}

#[derive(Default)]
struct Lease {
    id: i64,
    left: Amount,
    consumed: Amount,
    returned: Amount,
}

/// What an account has beside its leases, and what a batch does to it.
#[derive(Default)]
struct Account {
    free: Amount,
    suspended: Amount,
    /// Taken out of leases; and given back to what is free.
    from_leases: Amount,
    relieved: Amount,
    from_free: Amount,
    /// Into suspense from leases; and out of it, to us or back to what is free.
    aside: Amount,
    from_suspense: Amount,
    restored: Amount,
    calls: i64,
}

/// The locked rows that a batch is booked against.
pub(super) struct Books {
    boot: Option<i64>,
    leases: HashMap<Place, Lease>,
    accounts: BTreeMap<i64, Account>,
    transfers: Vec<Row>,
    /// Holds of which something had to be written off, or set aside.
    amended: Vec<(Hold, Amended)>,
}

/// What booking makes of a settlement.
#[derive(Clone, Copy)]
struct Amended {
    captured: Amount,
    released: Amount,
    excess: Amount,
    shortfall: Amount,
    written_off: Amount,
    suspended: Amount,
}

impl Books {
    /// Locks balances, then leases, each in their order.
    pub(super) async fn lock<'a>(
        t: &Transaction<'_>,
        boot: Option<i64>,
        ends: impl Iterator<Item = &'a Settled>,
    ) -> Result<Self, LedgerError> {
        let mut accounts: HashSet<i64> = HashSet::new();
        let mut pools: HashSet<(i64, i16, i64)> = HashSet::new();
        for settled in ends {
            accounts.insert(settled.account);
            pools.extend(settled.pool.map(|pool| (settled.account, small(pool.shard), pool.epoch)));
        }
        let accounts: Vec<i64> = accounts.into_iter().collect();
        let balances = t
            .prepare_cached(
                "SELECT account, posted - leased, suspended FROM balance WHERE account = ANY ($1)
                 ORDER BY account FOR NO KEY UPDATE",
            )
            .await?;
        let balance = |row: &tokio_postgres::Row| {
            let free = Amount::from_nano(row.try_get(1)?);
            let suspended = Amount::from_nano(row.try_get(2)?);
            Ok((row.try_get(0)?, Account { free, suspended, ..Account::default() }))
        };
        let locked = t.query(&balances, &[&accounts]).await?;
        let locked = locked.iter().map(balance).collect::<Result<_, LedgerError>>()?;
        // First which, then their locks: a row that somebody else was just changing (an epoch moves, and freezes it) is looked
        // at again once it is locked, and one that was found by a subquery would be passed over in silence.
        let which = t
            .prepare_cached(
                "SELECT id FROM lease WHERE boot = $1 AND account = ANY ($2)
                 UNION ALL
                 SELECT id FROM lease JOIN unnest($3::bigint[], $4::smallint[], $5::bigint[])
                     AS p (account, shard, epoch) USING (account, shard, epoch)",
            )
            .await?;
        let leases = t
            .prepare_cached(
                "SELECT id, account, boot, shard, epoch, rest FROM lease WHERE id = ANY ($1) ORDER BY id FOR UPDATE",
            )
            .await?;
        let owners: Vec<i64> = pools.iter().map(|(account, _, _)| *account).collect();
        let shards: Vec<i16> = pools.iter().map(|(_, shard, _)| *shard).collect();
        let epochs: Vec<i64> = pools.iter().map(|(_, _, epoch)| *epoch).collect();
        let lease = |row: &tokio_postgres::Row| {
            let account: i64 = row.try_get(1)?;
            let place = match (row.try_get(3)?, row.try_get(4)?) {
                (Some(shard), Some(epoch)) => Place::Pool(account, shard, epoch),
                _ => Place::Boot(account),
            };
            let left = Amount::from_nano(row.try_get(5)?);
            Ok((place, Lease { id: row.try_get(0)?, left, ..Lease::default() }))
        };
        let rows = t.query(&which, &[&boot, &accounts, &owners, &shards, &epochs]).await?;
        let ids = rows.iter().map(|row| Ok(row.try_get(0)?)).collect::<Result<Vec<i64>, LedgerError>>()?;
        let rows = t.query(&leases, &[&ids]).await?;
        let leases = rows.iter().map(lease).collect::<Result<_, LedgerError>>()?;
        Ok(Self { boot, leases, accounts: locked, transfers: vec![], amended: vec![] })
    }

    /// The lease that a hold was placed in, if there is one.
    fn lease(&mut self, settled: &Settled) -> Option<&mut Lease> {
        let place = match (settled.pool, self.boot) {
            (Some(pool), _) => Place::Pool(settled.account, small(pool.shard), pool.epoch),
            (None, Some(_)) => Place::Boot(settled.account),
            (None, None) => return None,
        };
        self.leases.get_mut(&place)
    }

    /// Takes up to so much out of the lease that a hold was placed in. Answers the lease and how much.
    fn take_leased(&mut self, settled: &Settled, amount: Amount) -> (Option<i64>, Amount) {
        let Some(lease) = self.lease(settled) else { return (None, Amount::ZERO) };
        let taken = amount.min(lease.left);
        lease.left = lease.left.less(taken);
        lease.consumed = plus(lease.consumed, taken);
        let id = lease.id;
        let account = self.accounts.entry(settled.account).or_default();
        account.from_leases = plus(account.from_leases, taken);
        (Some(id), taken)
    }

    fn book(&mut self, hold: Hold, settled: &Settled, lease: Option<i64>, transfer: Transfer) {
        if transfer.amount.is_positive() {
            self.transfers.push(Row { reference: hold.to_vec(), transfer, lease, at_ms: settled.at_ms });
        }
    }

    /// Books the charge of a hold that ended, and what it cost us.
    fn end(&mut self, hold: Hold, settled: &Settled) {
        let end = settled.settlement();
        let (lease, taken) = self.take_leased(settled, end.charged());
        let captured = end.captured.min(taken);
        let customer = LedgerAccount::Customer(settled.account());
        for (kind, amount) in
            [(TransferKind::Capture, captured), (TransferKind::Excess, taken.less(captured))]
        {
            self.book(
                hold,
                settled,
                lease,
                Transfer { kind, debit: customer, credit: LedgerAccount::Revenue, amount },
            );
        }
        let written_off = self.pay_late(hold, settled, end.charged().less(taken), Amount::MAX);
        self.book_costs(hold, settled);
        if written_off.is_positive() {
            let amended = Amended {
                captured: end.captured,
                released: end.released,
                excess: end.excess,
                shortfall: end.shortfall,
                written_off,
                suspended: Amount::ZERO,
            };
            self.amended.push((hold, amended));
        }
        let account = self.accounts.entry(settled.account).or_default();
        account.calls = account.calls.saturating_add(1);
    }

    /// Charges what the lease did not have: to suspense, up to so much, then to what is free. Answers what nobody pays.
    fn pay_late(&mut self, hold: Hold, settled: &Settled, amount: Amount, of_suspense: Amount) -> Amount {
        let account = self.accounts.entry(settled.account).or_default();
        let suspended = account.suspended.less(account.from_suspense).less(account.restored);
        let resolved = amount.min(suspended).min(of_suspense);
        account.from_suspense = plus(account.from_suspense, resolved);
        let rest = amount.less(resolved);
        let late = rest.min(account.free.less(account.from_free));
        account.from_free = plus(account.from_free, late);
        let written_off = rest.less(late);
        let customer = LedgerAccount::Customer(settled.account());
        for (kind, debit, amount) in [
            (TransferKind::Resolved, LedgerAccount::Suspense, resolved),
            (TransferKind::Late, customer, late),
            (TransferKind::WriteOff, LedgerAccount::WriteOff, written_off),
        ] {
            self.book(hold, settled, None, Transfer { kind, debit, credit: LedgerAccount::Revenue, amount });
        }
        if written_off.is_positive() {
            let (account, nano) = (settled.account, written_off.nano());
            tracing::error!(
                breach = "written_off",
                account,
                nano,
                request = settled.request,
                "a call that no money was left for is written off"
            );
        }
        written_off
    }

    fn book_costs(&mut self, hold: Hold, settled: &Settled) {
        let payable = LedgerAccount::ProviderPayable;
        let [_, _, _, _, shortfall] = settled.parts;
        for (kind, debit, credit, nano) in [
            (TransferKind::Shortfall, LedgerAccount::Shortfall, LedgerAccount::Revenue, shortfall),
            (TransferKind::ProviderCost, LedgerAccount::ProviderCost, payable, settled.provider_cost),
            (TransferKind::Abandoned, LedgerAccount::Abandoned, payable, settled.abandoned),
        ] {
            self.book(hold, settled, None, Transfer { kind, debit, credit, amount: Amount::from_nano(nano) });
        }
    }

    /// Books a hold that the reaper took out of its pool, at its checkpoint. The rest of it is set aside, or free.
    pub(super) fn end_reaped(&mut self, hold: Hold, settled: &Settled, set_aside: bool) {
        let end = settled.settlement();
        let customer = LedgerAccount::Customer(settled.account());
        let (lease, captured) = self.take_leased(settled, end.captured);
        let (kind, credit) = (TransferKind::Capture, LedgerAccount::Revenue);
        self.book(hold, settled, lease, Transfer { kind, debit: customer, credit, amount: captured });
        let released = end.held.less(captured);
        let suspended = if set_aside {
            let (_, suspended) = self.take_leased(settled, released);
            let (kind, credit) = (TransferKind::Suspended, LedgerAccount::Suspense);
            self.book(hold, settled, lease, Transfer { kind, debit: customer, credit, amount: suspended });
            suspended
        } else {
            self.relieve(settled, released);
            Amount::ZERO
        };
        let account = self.accounts.entry(settled.account).or_default();
        account.aside = plus(account.aside, suspended);
        account.calls = account.calls.saturating_add(1);
        let (excess, shortfall, written_off) = (Amount::ZERO, Amount::ZERO, Amount::ZERO);
        let amended = Amended { captured, released, excess, shortfall, written_off, suspended };
        self.amended.push((hold, amended));
    }

    /// Charges a checkpoint of a boot that is lost, whose pool is over: what it held there is set aside already.
    pub(super) fn end_late(&mut self, hold: Hold, settled: &Settled) {
        let end = settled.settlement();
        let written_off = self.pay_late(hold, settled, end.captured, Amount::MAX);
        let account = self.accounts.entry(settled.account).or_default();
        account.calls = account.calls.saturating_add(1);
        let (captured, released) = (end.captured, end.released);
        let (excess, shortfall, suspended) = (Amount::ZERO, Amount::ZERO, Amount::ZERO);
        let amended = Amended { captured, released, excess, shortfall, written_off, suspended };
        self.amended.push((hold, amended));
    }

    /// Gives what a hold did not cost back to what is free, out of the pool that it was captured from whole.
    pub(super) fn relieve(&mut self, settled: &Settled, amount: Amount) {
        let Some(lease) = self.lease(settled) else { return };
        let relieved = amount.min(lease.left);
        lease.left = lease.left.less(relieved);
        lease.returned = plus(lease.returned, relieved);
        let account = self.accounts.entry(settled.account).or_default();
        account.relieved = plus(account.relieved, relieved);
    }

    /// Settles the difference of a hold that the reaper ended before its end turned up. What was charged too much by
    /// then stays charged: a checkpoint never is above the end.
    fn resolve(&mut self, found: &Found, settled: &Settled) {
        let (hold, end) = (found.hold, settled.settlement());
        let above = end.charged().less(found.charged);
        let account = self.accounts.entry(settled.account).or_default();
        let before = account.from_suspense;
        let written_off = self.pay_late(hold, settled, above, found.suspended);
        self.book_costs(hold, settled);
        let account = self.accounts.entry(settled.account).or_default();
        let resolved = account.from_suspense.less(before);
        let in_suspense = account.suspended.less(account.from_suspense).less(account.restored);
        let restored = found.suspended.less(resolved).min(in_suspense);
        account.restored = plus(account.restored, restored);
        let restore = Transfer {
            kind: TransferKind::Restored,
            debit: LedgerAccount::Suspense,
            credit: LedgerAccount::Customer(settled.account()),
            amount: restored,
        };
        self.book(hold, settled, None, restore);
        // Charged is what the end says, or the checkpoint where that is more.
        let excess = end.charged().max(found.charged).less(end.captured);
        let amended = Amended {
            captured: end.captured,
            released: end.released,
            excess,
            shortfall: end.shortfall,
            written_off,
            suspended: Amount::ZERO,
        };
        self.amended.push((hold, amended));
    }

    /// What nobody pays, of the whole batch.
    pub(super) fn written_off(&self) -> Amount {
        self.amended.iter().fold(Amount::ZERO, |sum, (_, amended)| plus(sum, amended.written_off))
    }

    /// Writes the batch's transfers, and what it did to leases, balances and settlements.
    pub(super) async fn write(&self, t: &Transaction<'_>) -> Result<(), LedgerError> {
        insert_transfers(t, &self.transfers, "").await?;
        let touched = |lease: &&Lease| lease.consumed.is_positive() || lease.returned.is_positive();
        let touched: Vec<&Lease> = self.leases.values().filter(touched).collect();
        if !touched.is_empty() {
            let ids: Vec<i64> = touched.iter().map(|lease| lease.id).collect();
            let consumed: Vec<i64> = touched.iter().map(|lease| lease.consumed.nano()).collect();
            let returned: Vec<i64> = touched.iter().map(|lease| lease.returned.nano()).collect();
            let consume = t
                .prepare_cached(
                    "UPDATE lease l SET consumed = l.consumed + p.consumed, returned = l.returned + p.returned,
                         state = CASE WHEN l.state = 'frozen' AND l.rest = p.consumed + p.returned
                             THEN 'closed' ELSE l.state END
                     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS p (id, consumed, returned)
                     WHERE l.id = p.id",
                )
                .await?;
            t.execute(&consume, &[&ids, &consumed, &returned]).await?;
        }
        let accounts: Vec<i64> = self.accounts.keys().copied().collect();
        let each = |nano: fn(&Account) -> i64| self.accounts.values().map(nano).collect::<Vec<i64>>();
        let update = t
            .prepare_cached(
                "UPDATE balance b SET
                     posted = b.posted - p.from_leases - p.from_free + p.restored,
                     leased = b.leased - p.from_leases - p.relieved,
                     suspended = b.suspended + p.aside - p.from_suspense - p.restored,
                     calls = b.calls + p.calls
                 FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],
                     $7::bigint[], $8::bigint[])
                     AS p (account, from_leases, relieved, from_free, aside, from_suspense, restored, calls)
                 WHERE b.account = p.account",
            )
            .await?;
        t.execute(
            &update,
            &[
                &accounts,
                &each(|a| a.from_leases.nano()),
                &each(|a| a.relieved.nano()),
                &each(|a| a.from_free.nano()),
                &each(|a| a.aside.nano()),
                &each(|a| a.from_suspense.nano()),
                &each(|a| a.restored.nano()),
                &each(|a| a.calls),
            ],
        )
        .await?;
        for (hold, amended) in &self.amended {
            let amend = "UPDATE settlement SET captured = $2, released = $3, excess = $4, shortfall = $5,
                             written_off = $6, suspended = $7 WHERE day = hold_day($1) AND hold = $1";
            let amounts = [
                amended.captured,
                amended.released,
                amended.excess,
                amended.shortfall,
                amended.written_off,
                amended.suspended,
            ]
            .map(Amount::nano);
            let [captured, released, excess, shortfall, written_off, suspended] = &amounts;
            let hold = hold.as_slice();
            let values: [&(dyn ToSql + Sync); 7] =
                [&hold, captured, released, excess, shortfall, written_off, suspended];
            t.execute(&t.prepare_cached(amend).await?, &values).await?;
        }
        Ok(())
    }
}

/// What an end says of a call that only its checkpoint was known of.
async fn bring_up_to_date(
    t: &Transaction<'_>,
    found: &[Found],
    ends: &BTreeMap<Hold, &Settled>,
) -> Result<(), LedgerError> {
    for found in found {
        let Some(settled) = ends.get(&found.hold) else { continue };
        let update = "UPDATE settlement SET reaped = false, model = $2, endpoint = $3, attempts = $4, provider_cost = $5,
                          abandoned = $6, tokens = ($7::text)::bigint[], estimated = $8, anomaly = $9, at_ms = $10
                      WHERE day = hold_day($1) AND hold = $1";
        let hold = found.hold.as_slice();
        let values: [&(dyn ToSql + Sync); 10] = [
            &hold,
            &text(&settled.model),
            &text(&settled.endpoint),
            &i64::from(settled.attempts),
            &settled.provider_cost,
            &settled.abandoned,
            &tokens(settled),
            &settled.estimated,
            &settled.anomaly,
            &settled.at_ms,
        ];
        t.execute(&t.prepare_cached(update).await?, &values).await?;
        t.execute("UPDATE reaped SET open = false WHERE hold = $1", &[&hold]).await?;
    }
    Ok(())
}

/// Its counts, as an array's literal: an array of arrays would have to be unpacked.
fn tokens(settled: &Settled) -> String {
    let counts: Vec<String> =
        settled.tokens.iter().map(|n| i64::try_from(*n).unwrap_or(i64::MAX).to_string()).collect();
    format!("{{{}}}", counts.join(","))
}

fn plus(a: Amount, b: Amount) -> Amount {
    a.checked_add(b).unwrap_or(Amount::MAX)
}
