//! What every ledger must do, whoever keeps it: the conformance suite of the port.

use filters::ids::AccountId;
use filters::money::{Amount, settle};
use tollgate::journal::Settled;
use tollgate::ledger::port::{KeyedCall, Movement, NewKey, Scope, What};
use tollgate::ledger::{Ledger, LedgerError, Sqlite};
use tollgate::pool::keys::digest;
use tollgate::settings::{AccountSettings, KeySettings, LimitSpec};

use super::support::ledgers::Whole;
use super::support::postgres::{database, hold};

fn ledgers() -> Vec<(&'static str, Box<dyn Whole>)> {
    let folder = tempfile::tempdir().unwrap().keep();
    vec![
        ("sqlite in memory", Box::new(Sqlite::in_memory().unwrap())),
        ("sqlite in a file", Box::new(Sqlite::open(&folder.join("ledger.db")).unwrap())),
        ("postgres", Box::new(database().ledger())),
    ]
}

fn top_up(account: AccountId, nano: i64, reference: &str) -> Movement<'_> {
    movement(account, What::TopUp, nano, reference, None)
}

fn movement(account: AccountId, what: What, nano: i64, reference: &str, boot: Option<i64>) -> Movement<'_> {
    Movement { account, what, amount: Amount::from_nano(nano), reference, reason: "test", now_ms: 1, boot }
}

pub fn settled(id: u64, account: AccountId, held: i64, cost: i64, free: i64) -> Settled {
    let parts = settle(Amount::from_nano(held), Amount::from_nano(cost), Amount::from_nano(free));
    Settled {
        id: hold(id).0,
        account: account.0,
        request: format!("r{id}"),
        model: "m".into(),
        endpoint: "e".into(),
        attempts: 1,
        parts: Settled::parts_of(&parts),
        provider_cost: 3,
        abandoned: 0,
        key: [7; 32],
        held_ms: 1_000,
        price_version: 9,
        tokens: [1, 2, 3, 4, 5, 6, 7],
        estimated: false,
        anomaly: false,
        at_ms: 2,
        pool: None,
    }
}

#[test]
fn money_goes_from_free_to_leased_to_spent_and_back() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", None, 0).unwrap();
        assert!(ledger.transfer(&top_up(account, 1_000, "a")).unwrap(), "{name}");
        let boot = ledger.begin_boot(0).unwrap();
        assert_eq!(ledger.lease_whole(boot), [(account, Amount::from_nano(1_000))], "{name}");
        assert_eq!(ledger.post(boot, &[settled(1, account, 300, 100, 700)]).unwrap(), 1, "{name}");
        assert_eq!(ledger.leases(boot).unwrap(), [(account, Amount::from_nano(900))], "{name}");
        ledger.end_boot(boot).unwrap();
        let row = ledger.accounts(None).unwrap().remove(0);
        assert_eq!((row.balance_nano, row.leased_nano, row.calls), (900, 0, 1), "{name}");
        let second = ledger.begin_boot(0).unwrap();
        assert!(second > boot, "{name}");
        assert_eq!(ledger.lease_whole(second), [(account, Amount::from_nano(900))], "{name}");
        ledger.verify().unwrap();
    }
}

#[test]
fn a_batch_posted_twice_is_booked_once() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", None, 0).unwrap();
        ledger.transfer(&top_up(account, 1_000, "a")).unwrap();
        let boot = ledger.begin_boot(0).unwrap();
        ledger.lease_whole(boot);
        let batch = [settled(1, account, 300, 100, 0), settled(2, account, 300, 900, 100)];
        assert_eq!(ledger.post(boot, &batch).unwrap(), 2, "{name}");
        assert_eq!(ledger.post(boot, &batch).unwrap(), 0, "{name}");
        let row = ledger.accounts(None).unwrap().remove(0);
        assert_eq!(row.balance_nano, 1_000 - 100 - 300 - 100, "{name}: hold, excess; the shortfall is ours");
        ledger.verify().unwrap();
    }
}

/// In a fleet it is paid by somebody: see `ledger.rs`.
#[test]
fn on_one_machine_a_charge_beyond_the_lease_is_refused_whole() {
    let mut ledger = Sqlite::in_memory().unwrap();
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    ledger.transfer(&top_up(account, 100, "a")).unwrap();
    let boot = ledger.begin_boot(0).unwrap();
    ledger.lease_all(boot).unwrap();
    let batch = [settled(1, account, 50, 50, 0), settled(2, account, 90, 90, 0)];
    assert!(ledger.post(boot, &batch).is_err());
    let row = ledger.accounts(None).unwrap().remove(0);
    assert_eq!((row.balance_nano, row.calls), (100, 0), "nothing of the batch");
    ledger.verify().unwrap();
}

#[test]
fn a_top_up_happens_once_per_reference() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", None, 0).unwrap();
        assert_eq!(ledger.ensure_account("alpha", None, 5).unwrap(), account, "{name}");
        assert!(ledger.transfer(&top_up(account, 100, "a")).unwrap(), "{name}");
        assert!(!ledger.transfer(&top_up(account, 100, "a")).unwrap(), "{name}");
        assert!(ledger.transfer(&top_up(account, 100, "b")).unwrap(), "{name}");
        assert_eq!(ledger.accounts(None).unwrap().remove(0).balance_nano, 200, "{name}");
        let statement = ledger.statement("alpha", 10).unwrap();
        assert_eq!(statement.len(), 2, "{name}");
        assert!(matches!(ledger.statement("nobody", 10), Err(LedgerError::NoAccount(_))), "{name}");
    }
}

#[test]
fn a_key_belongs_to_one_account_and_ends_when_it_is_told_to() {
    for (name, mut ledger) in ledgers() {
        let alpha = ledger.ensure_account("alpha", None, 0).unwrap();
        let beta = ledger.ensure_account("beta", None, 0).unwrap();
        let limited = KeySettings {
            limits: LimitSpec { rpm: Some(5), ..LimitSpec::default() },
            ..KeySettings::default()
        };
        let plain = KeySettings::default();
        let key = |account, account_name, settings| NewKey {
            digest: digest("sk-test"),
            account,
            account_name,
            hint: "sk-t…",
            settings,
            expires_ms: None,
            now_ms: 0,
        };
        ledger.ensure_key(&key(alpha, "alpha", &plain)).unwrap();
        ledger.ensure_key(&key(alpha, "alpha", &limited)).unwrap();
        let taken = ledger.ensure_key(&key(beta, "beta", &plain));
        assert!(matches!(taken, Err(LedgerError::KeyTaken(_))), "{name}");
        let keys = ledger.keys(None).unwrap();
        assert_eq!((keys.len(), &keys[0].settings), (1, &limited), "{name}");
        ledger.end_key(digest("sk-test"), 500, false).unwrap();
        ledger.end_key(digest("sk-test"), 900, false).unwrap();
        let key = ledger.keys(Some("alpha")).unwrap().remove(0);
        assert!(key.is_good(499) && !key.is_good(500), "{name}: the earlier end counts");
        assert!(matches!(ledger.end_key(digest("other"), 1, true), Err(LedgerError::NoKey)), "{name}");
        assert!(ledger.keys(Some("beta")).unwrap().is_empty(), "{name}");
    }
}

#[test]
fn money_goes_out_of_what_is_free_or_of_a_lease_and_never_more() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", Some(&AccountSettings::default()), 0).unwrap();
        ledger.transfer(&top_up(account, 1_000, "a")).unwrap();
        let boot = ledger.begin_boot(0).unwrap();
        ledger.lease_whole(boot);
        let free = ledger.transfer(&movement(account, What::Refund, 1, "b", None));
        assert!(matches!(free, Err(LedgerError::Funds { .. })), "{name}: all of it is leased");
        assert!(ledger.transfer(&movement(account, What::Refund, 300, "b", Some(boot))).unwrap(), "{name}");
        assert!(!ledger.transfer(&movement(account, What::Refund, 300, "b", Some(boot))).unwrap(), "{name}");
        let too_much = ledger.transfer(&movement(account, What::Debit, 701, "c", Some(boot)));
        assert!(matches!(too_much, Err(LedgerError::Funds { .. })), "{name}");
        ledger.transfer(&movement(account, What::Credit, 50, "d", None)).unwrap();
        assert_eq!(ledger.lease_rest(boot), [(account, Amount::from_nano(50))], "{name}");
        assert_eq!(ledger.leases(boot).unwrap(), [(account, Amount::from_nano(750))], "{name}");
        ledger.verify().unwrap();
    }
}

#[test]
fn a_call_is_found_again_and_counts_in_the_window_of_its_admission() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", None, 0).unwrap();
        ledger.transfer(&top_up(account, 1_000, "a")).unwrap();
        let boot = ledger.begin_boot(0).unwrap();
        ledger.lease_whole(boot);
        ledger.post(boot, &[settled(1, account, 300, 100, 0)]).unwrap();
        let found = ledger.generation(account, "r1").unwrap().unwrap();
        assert_eq!((found.cost_nano, found.prompt_tokens, found.completion_tokens), (100, 15, 6), "{name}");
        assert_eq!(ledger.generation(account, &found.id).unwrap(), Some(found), "{name}");
        assert_eq!(ledger.generation(AccountId(account.0 + 1), "r1").unwrap(), None, "{name}: of others");
        let scope =
            |key: Option<[u8; 32]>, model| Scope { account, key: key.map(filters::ids::KeyDigest), model };
        let mut spent = |scope, since| ledger.spent(&scope, since).unwrap().nano();
        assert_eq!(spent(scope(None, None), 1_000), 100, "{name}");
        assert_eq!(spent(scope(None, None), 1_001), 0, "{name}");
        assert_eq!(spent(scope(Some([7; 32]), Some("m")), 0), 100, "{name}");
        assert_eq!(spent(scope(Some([8; 32]), None), 0) + spent(scope(None, Some("n")), 0), 0, "{name}");
        ledger.snapshot(86_400_000).unwrap();
        ledger.post(boot, &[settled(2, account, 300, 100, 0)]).unwrap();
        ledger.snapshot(86_400_001).unwrap();
        ledger.verify().unwrap();
    }
}

#[test]
fn a_keyed_call_is_begun_once_a_day() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", None, 0).unwrap();
        let call = |request, now_ms| KeyedCall { account, key: "k", body: [1; 32], request, now_ms };
        assert_eq!(ledger.begin_keyed(&call("r1", 0)).unwrap(), None, "{name}");
        let known = ledger.begin_keyed(&call("r2", 1)).unwrap().unwrap();
        assert_eq!((known.request.as_str(), known.answer), ("r1", None), "{name}");
        ledger.end_keyed(account, "k", Some(b"{}")).unwrap();
        assert_eq!(ledger.begin_keyed(&call("r3", 2)).unwrap().unwrap().answer.as_deref(), Some(&b"{}"[..]));
        assert_eq!(ledger.begin_keyed(&call("r4", 86_400_001)).unwrap(), None, "{name}: a day later");
        ledger.end_keyed(account, "k", None).unwrap();
        assert_eq!(ledger.begin_keyed(&call("r5", 86_400_002)).unwrap(), None, "{name}: forgotten");
    }
}

#[test]
fn verify_names_the_first_thing_that_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ledger.db");
    let mut ledger = Sqlite::open(&file).unwrap();
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    ledger.transfer(&top_up(account, 1_000, "a")).unwrap();
    let boot = ledger.begin_boot(0).unwrap();
    ledger.lease_all(boot).unwrap();
    ledger.post(boot, &[settled(1, account, 300, 100, 0)]).unwrap();
    ledger.verify().unwrap();
    let tamper = rusqlite::Connection::open(&file).unwrap();
    assert!(tamper.execute("UPDATE transfer SET amount = 1", []).is_err(), "transfers never change");
    assert!(tamper.execute("DELETE FROM transfer", []).is_err(), "and never go");
    for (sql, undo, law) in [
        (
            "UPDATE balance SET posted = posted + 1",
            "UPDATE balance SET posted = posted - 1",
            "a balance is the sum",
        ),
        ("UPDATE lease SET amount = amount - 1", "UPDATE lease SET amount = amount + 1", "leases reconcile"),
        (
            "UPDATE settlement SET captured = captured + 1, released = released - 1",
            "UPDATE settlement SET captured = captured - 1, released = released + 1",
            "every hold's transfers",
        ),
    ] {
        tamper.execute(sql, []).unwrap();
        let error = ledger.verify().unwrap_err().to_string();
        assert!(error.contains(law), "{sql}: {error}");
        tamper.execute(undo, []).unwrap();
        ledger.verify().unwrap();
    }
}
