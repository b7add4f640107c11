//! What every ledger must do, whoever keeps it: the conformance suite of the port.

use filters::ids::AccountId;
use filters::money::{Amount, settle};
use tollgate::journal::Settled;
use tollgate::ledger::port::{KeyRecord, TopUp};
use tollgate::ledger::{Ledger, LedgerError, Sqlite};
use tollgate::pool::keys::digest;

fn ledgers() -> Vec<(&'static str, Box<dyn Ledger>)> {
    let folder = tempfile::tempdir().unwrap().keep();
    vec![
        ("sqlite in memory", Box::new(Sqlite::in_memory().unwrap())),
        ("sqlite in a file", Box::new(Sqlite::open(&folder.join("ledger.db")).unwrap())),
    ]
}

fn top_up(account: AccountId, nano: i64, reference: &str) -> TopUp<'_> {
    TopUp { account, amount: Amount::from_nano(nano), reference, reason: "test", now_ms: 1 }
}

fn settled(id: u128, account: AccountId, held: i64, cost: i64, free: i64) -> Settled {
    let parts = settle(Amount::from_nano(held), Amount::from_nano(cost), Amount::from_nano(free));
    Settled {
        id,
        account: account.0,
        request: format!("r{id}"),
        model: "m".into(),
        endpoint: "e".into(),
        attempts: 1,
        parts: Settled::parts_of(&parts),
        provider_cost: 3,
        tokens: [1, 2, 3, 4, 5, 6, 7],
        estimated: false,
        anomaly: false,
        at_ms: 2,
    }
}

#[test]
fn money_goes_from_free_to_leased_to_spent_and_back() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", 0).unwrap();
        assert!(ledger.top_up(&top_up(account, 1_000, "a")).unwrap(), "{name}");
        let boot = ledger.begin_boot(0).unwrap();
        assert_eq!(ledger.lease_all(boot).unwrap(), [(account, Amount::from_nano(1_000))], "{name}");
        assert_eq!(ledger.post(boot, &[settled(1, account, 300, 100, 700)]).unwrap(), 1, "{name}");
        assert_eq!(ledger.leases(boot).unwrap(), [(account, Amount::from_nano(900))], "{name}");
        ledger.end_boot(boot).unwrap();
        let row = ledger.accounts().unwrap().remove(0);
        assert_eq!((row.balance_nano, row.leased_nano, row.calls), (900, 0, 1), "{name}");
        let second = ledger.begin_boot(0).unwrap();
        assert!(second > boot, "{name}");
        assert_eq!(ledger.lease_all(second).unwrap(), [(account, Amount::from_nano(900))], "{name}");
        ledger.verify().unwrap();
    }
}

#[test]
fn a_batch_posted_twice_is_booked_once() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", 0).unwrap();
        ledger.top_up(&top_up(account, 1_000, "a")).unwrap();
        let boot = ledger.begin_boot(0).unwrap();
        ledger.lease_all(boot).unwrap();
        let batch = [settled(1, account, 300, 100, 0), settled(2, account, 300, 900, 100)];
        assert_eq!(ledger.post(boot, &batch).unwrap(), 2, "{name}");
        assert_eq!(ledger.post(boot, &batch).unwrap(), 0, "{name}");
        let row = ledger.accounts().unwrap().remove(0);
        assert_eq!(row.balance_nano, 1_000 - 100 - 300 - 100, "{name}: hold, excess; the shortfall is ours");
        ledger.verify().unwrap();
    }
}

#[test]
fn a_charge_beyond_the_lease_is_refused_whole() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", 0).unwrap();
        ledger.top_up(&top_up(account, 100, "a")).unwrap();
        let boot = ledger.begin_boot(0).unwrap();
        ledger.lease_all(boot).unwrap();
        let batch = [settled(1, account, 50, 50, 0), settled(2, account, 90, 90, 0)];
        assert!(ledger.post(boot, &batch).is_err(), "{name}");
        let row = ledger.accounts().unwrap().remove(0);
        assert_eq!((row.balance_nano, row.calls), (100, 0), "{name}: nothing of the batch");
        ledger.verify().unwrap();
    }
}

#[test]
fn a_top_up_happens_once_per_reference() {
    for (name, mut ledger) in ledgers() {
        let account = ledger.ensure_account("alpha", 0).unwrap();
        assert_eq!(ledger.ensure_account("alpha", 5).unwrap(), account, "{name}");
        assert!(ledger.top_up(&top_up(account, 100, "a")).unwrap(), "{name}");
        assert!(!ledger.top_up(&top_up(account, 100, "a")).unwrap(), "{name}");
        assert!(ledger.top_up(&top_up(account, 100, "b")).unwrap(), "{name}");
        assert_eq!(ledger.accounts().unwrap().remove(0).balance_nano, 200, "{name}");
        let statement = ledger.statement("alpha", 10).unwrap();
        assert_eq!(statement.len(), 2, "{name}");
        assert!(matches!(ledger.statement("nobody", 10), Err(LedgerError::NoAccount(_))), "{name}");
    }
}

#[test]
fn a_key_belongs_to_one_account() {
    for (name, mut ledger) in ledgers() {
        let alpha = ledger.ensure_account("alpha", 0).unwrap();
        let beta = ledger.ensure_account("beta", 0).unwrap();
        let key = |account, name: &str, models: Option<Vec<String>>| KeyRecord {
            digest: digest("sk-test"),
            account,
            account_name: name.to_owned(),
            models,
            default_output_tokens: Some(7),
        };
        ledger.ensure_key(&key(alpha, "alpha", None), 0).unwrap();
        ledger.ensure_key(&key(alpha, "alpha", Some(vec!["m".into()])), 0).unwrap();
        assert!(
            matches!(ledger.ensure_key(&key(beta, "beta", None), 0), Err(LedgerError::KeyTaken(_))),
            "{name}"
        );
        assert_eq!(ledger.keys().unwrap(), [key(alpha, "alpha", Some(vec!["m".into()]))], "{name}");
    }
}

#[test]
fn verify_names_the_first_thing_that_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ledger.db");
    let mut ledger = Sqlite::open(&file).unwrap();
    let account = ledger.ensure_account("alpha", 0).unwrap();
    ledger.top_up(&top_up(account, 1_000, "a")).unwrap();
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
