//! Nodes that follow keys and catalogue by their numbers miss nothing.

use std::collections::BTreeMap;
use std::thread;

use filters::ids::{AccountId, KeyDigest};
use tollgate::ledger::port::NewKey;
use tollgate::ledger::{Ledger as _, Postgres};
use tollgate::pool::keys::digest;
use tollgate::settings::{AccountSettings, KeySettings, LimitSpec};

use super::super::support::postgres::database;

fn key(ledger: &mut Postgres, account: AccountId, name: &str, settings: &KeySettings) -> KeyDigest {
    let digest = digest(name);
    let new =
        NewKey { digest, account, account_name: "alpha", hint: name, settings, expires_ms: None, now_ms: 0 };
    ledger.ensure_key(&new).unwrap();
    digest
}

#[test]
fn every_change_of_a_key_or_its_account_gets_the_next_number() {
    let database = database();
    let mut ledger = database.ledger();
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    assert_eq!(ledger.key_base().unwrap(), (0, vec![]));
    let plain = KeySettings::default();
    let [a, b] = ["a", "b"].map(|name| key(&mut ledger, account, name, &plain));
    key(&mut ledger, account, "a", &plain);
    assert_eq!(ledger.key_change().unwrap(), 2, "the same again is no change");
    ledger.end_key(a, 500, true).unwrap();
    let changes = ledger.changes_since(2, 100).unwrap();
    assert_eq!((changes.len(), changes[0].0, changes[0].1.digest), (1, 3, a));
    assert_eq!(changes[0].1.revoked_ms, Some(500));
    let limits = LimitSpec { rpm: Some(5), ..LimitSpec::default() };
    let settings = AccountSettings { limits, ..AccountSettings::default() };
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
    assert_eq!(ledger.key_change().unwrap(), 5, "what failed has no number");
}

#[test]
fn whoever_follows_the_numbers_sees_every_change_of_many_writers() {
    const WRITERS: usize = 6;
    const KEYS: usize = 40;
    let database = database();
    let mut ledger = database.ledger();
    let account = ledger.ensure_account("alpha", None, 0).unwrap();
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let mut ledger = database.ledger();
            thread::spawn(move || {
                for number in 0..KEYS {
                    key(&mut ledger, account, &format!("k{writer}-{number}"), &KeySettings::default());
                    if number % 10 == 0 {
                        let limits = LimitSpec { rpm: Some(1 + number as u64), ..LimitSpec::default() };
                        let settings = AccountSettings { limits, ..AccountSettings::default() };
                        ledger.ensure_account("alpha", Some(&settings), 0).unwrap();
                    }
                }
            })
        })
        .collect();
    let (mut seen, mut known) = (0, BTreeMap::new());
    while !writers.iter().all(thread::JoinHandle::is_finished) || seen < ledger.key_change().unwrap() {
        for (change, key) in ledger.changes_since(seen, 7).unwrap() {
            assert!(change > seen, "in their order");
            seen = change;
            known.insert(key.digest, key);
        }
    }
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let (change, base) = ledger.key_base().unwrap();
    assert_eq!((change, base.len()), (seen, WRITERS * KEYS));
    assert!(base.iter().eq(known.values()), "what was followed is what is there");
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
