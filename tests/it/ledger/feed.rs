//! Nodes that follow keys and catalogue by their numbers miss nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;

use filters::ids::{AccountId, KeyDigest};
use filters::money::Amount;
use tollgate::ledger::port::NewKey;
use tollgate::ledger::{Ledger, LedgerError, Sqlite};
use tollgate::pool::keys::digest;
use tollgate::settings::{AccountSettings, KeySettings, LimitSpec};

use super::super::support::postgres::database;

fn key(ledger: &mut dyn Ledger, account: AccountId, name: &str, settings: &KeySettings) -> KeyDigest {
    let digest = digest(name);
    let new =
        NewKey { digest, account, account_name: "alpha", hint: name, settings, expires_ms: None, now_ms: 0 };
    ledger.ensure_key(&new).unwrap();
    digest
}

/// The latest change's number.
fn latest(ledger: &mut dyn Ledger) -> i64 {
    ledger.key_base().unwrap().0
}

fn limits(rpm: u64) -> AccountSettings {
    let limits = LimitSpec { rpm: Some(rpm), ..LimitSpec::default() };
    AccountSettings { limits, ..AccountSettings::default() }
}

/// A file beside which others may write.
fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    (folder, path)
}

#[test]
fn every_change_of_a_key_or_its_account_gets_a_number_behind_all_before_it() {
    let database = database();
    numbers(&mut database.ledger());
    let (_folder, path) = file();
    numbers(&mut Sqlite::open(&path).unwrap());
}

fn numbers(ledger: &mut dyn Ledger) {
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    assert_eq!(ledger.key_base().unwrap(), (0, vec![]));
    let plain = KeySettings::default();
    let [a, b] = ["a", "b"].map(|name| key(ledger, account, name, &plain));
    key(ledger, account, "a", &plain);
    assert_eq!(latest(ledger), 2, "the same again is no change");
    ledger.end_key(a, 500, true).unwrap();
    let changes = ledger.changes_since(2, 100).unwrap();
    assert_eq!((changes.len(), changes[0].0, changes[0].1.digest), (1, 3, a));
    assert_eq!(changes[0].1.revoked_ms, Some(500));
    let settings = limits(5);
    ledger.ensure_account("alpha", Some(&settings), 0).unwrap();
    ledger.ensure_account("alpha", Some(&settings), 0).unwrap();
    let changes = ledger.changes_since(3, 100).unwrap();
    assert_eq!(
        changes.iter().map(|(change, _)| *change).collect::<Vec<_>>(),
        [4, 5],
        "both keys of the account"
    );
    assert!(changes.iter().all(|(_, key)| key.account_settings == settings));
    let first = ledger.changes_since(0, 1).unwrap();
    assert_eq!((first.len(), first[0].0), (1, 4), "a page, from the oldest; each key once, as it is now");
    let (change, base) = ledger.key_base().unwrap();
    assert_eq!((change, base.len()), (5, 2));
    assert!(base.iter().any(|key| key.digest == b));
    let failed = ledger.end_key(digest("nobody"), 1, true);
    assert!(failed.is_err());
    assert_eq!(latest(ledger), 5, "what failed has no number");
    let named = KeySettings { name: "new".to_owned(), ..KeySettings::default() };
    key(ledger, account, "b", &named);
    let changes = ledger.changes_since(5, 100).unwrap();
    assert_eq!(changes.iter().map(|(change, key)| (*change, key.digest)).collect::<Vec<_>>(), [(6, b)]);
    assert_eq!(changes[0].1.settings, named);
}

#[test]
fn a_key_is_found_by_the_beginning_of_its_digest() {
    let database = database();
    beginnings(&mut database.ledger());
    let (_folder, path) = file();
    beginnings(&mut Sqlite::open(&path).unwrap());
}

fn beginnings(ledger: &mut dyn Ledger) {
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    let names: Vec<String> = (0..40).map(|number| format!("k{number}")).collect();
    let digests: Vec<KeyDigest> =
        names.iter().map(|name| key(ledger, account, name, &KeySettings::default())).collect();
    for digest in &digests {
        for bytes in [6, 31, 32] {
            let found = ledger.key(&digest.0[..bytes]).unwrap().unwrap();
            assert_eq!(found.digest, *digest, "by {bytes} bytes");
        }
    }
    assert_eq!(ledger.key(&digest("nobody").0).unwrap(), None);
    assert_eq!(ledger.key(&[0xff; 32]).unwrap(), None, "behind all");
    assert_eq!(ledger.account("alpha").unwrap(), account);
    assert!(matches!(ledger.account("nobody"), Err(LedgerError::NoAccount(_))));
    assert_eq!(ledger.balance(account).unwrap(), Amount::ZERO);
    assert_eq!(
        (ledger.accounts(Some("alpha")).unwrap().len(), ledger.accounts(Some("no")).unwrap().len()),
        (1, 0)
    );
}

#[test]
fn whoever_follows_the_numbers_sees_every_change_of_many_writers() {
    let database = database();
    many_writers(&|| Box::new(database.ledger()));
    let (_folder, path) = file();
    many_writers(&|| Box::new(Sqlite::open(&path).unwrap()));
}

fn many_writers(open: &dyn Fn() -> Box<dyn Ledger>) {
    const WRITERS: usize = 6;
    const KEYS: usize = 40;
    let mut ledger = open();
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let mut ledger = open();
            thread::spawn(move || {
                for number in 0..KEYS {
                    let name = format!("k{writer}-{number}");
                    key(ledger.as_mut(), account, &name, &KeySettings::default());
                    if number % 10 == 0 {
                        ledger.ensure_account("alpha", Some(&limits(1 + number as u64)), 0).unwrap();
                    }
                }
            })
        })
        .collect();
    let (mut seen, mut known) = (0, BTreeMap::new());
    while !writers.iter().all(thread::JoinHandle::is_finished) || seen < latest(ledger.as_mut()) {
        for (change, key) in ledger.changes_since(seen, 7).unwrap() {
            assert!(change > seen, "in their order");
            seen = change;
            known.insert(key.digest, key);
        }
    }
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let (change, mut base) = ledger.key_base().unwrap();
    assert_eq!((change, base.len()), (seen, WRITERS * KEYS));
    base.sort_by_key(|key| key.digest);
    assert!(base.iter().eq(known.values()), "what was followed is what is there");
}

#[test]
fn a_file_of_before_there_were_changes_has_them_from_its_first_opening_on() {
    let (_folder, path) = file();
    let mut ledger = Sqlite::open(&path).unwrap();
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    let old = key(&mut ledger, account, "old", &KeySettings::default());
    let untouched = key(&mut ledger, account, "untouched", &KeySettings::default());
    drop(ledger);
    rusqlite::Connection::open(&path)
        .unwrap()
        .execute_batch(
            "DROP TRIGGER key_is_made; DROP TRIGGER key_changes; DROP TRIGGER account_changes;
             DROP TABLE key_change; DROP INDEX balance_free",
        )
        .unwrap();
    let mut ledger = Sqlite::open(&path).unwrap();
    let (number, base) = ledger.key_base().unwrap();
    assert_eq!((number, base.len()), (0, 2), "they are in the base, without a number");
    ledger.end_key(old, 500, true).unwrap();
    let changes = ledger.changes_since(number, 100).unwrap();
    assert_eq!(changes.iter().map(|(_, key)| key.digest).collect::<Vec<_>>(), [old]);
    ledger.ensure_account("alpha", Some(&limits(5)), 0).unwrap();
    let changed = ledger.changes_since(changes[0].0, 100).unwrap();
    assert!(changed.iter().any(|(_, key)| key.digest == untouched));
}

#[test]
fn a_catalogue_has_a_version_of_its_own_and_the_same_one_is_published_once() {
    let database = database();
    let ledger = database.ledger();
    assert_eq!((ledger.catalogue().unwrap(), ledger.catalogue_version().unwrap()), (None, 0));
    let publishers: Vec<_> = (0..5)
        .map(|_| {
            let ledger = ledger.clone();
            thread::spawn(move || ledger.publish_catalogue("models: {}", "me", 1).unwrap())
        })
        .collect();
    assert!(publishers.into_iter().all(|publisher| publisher.join().unwrap() == 1));
    assert_eq!(ledger.publish_catalogue("models: { a: 1 }", "me", 2).unwrap(), 2);
    assert_eq!(
        ledger.publish_catalogue("models: {}", "me", 3).unwrap(),
        3,
        "back to the old one is a new version"
    );
    assert_eq!(ledger.catalogue().unwrap(), Some((3, "models: {}".to_owned())));
    assert_eq!(ledger.catalogue_version().unwrap(), 3);
}
