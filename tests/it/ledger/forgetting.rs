//! What has no say any more goes, and nothing that has.

use tollgate::journal::Hold;
use tollgate::ledger::postgres::{Claim, Forgotten, Reaped};
use tollgate::ledger::{Ledger as _, Postgres};

use super::super::support::postgres::{Database, database};
use super::{account, ended, first_epoch, hold, just, nano};

const DAY_MS: i64 = 86_400_000;
/// When the holds of tests were placed.
const PLACED_MS: i64 = 1_796_000_000_000;

fn rows(database: &Database, table: &str) -> String {
    database.sql(&format!("SELECT count(*) FROM {table}"))
}

#[test]
fn a_reaped_hold_is_known_for_three_months_and_for_longer_while_a_part_of_it_waits() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 2_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    ledger.lease_pool(id, pool, just(900)).unwrap();
    let reaped = |number: u64| Reaped {
        hold: Hold {
            id: hold(number).0,
            account: id.0,
            amount: 400,
            at_ms: 1_000,
            request: format!("r{number}"),
            model: "m".into(),
            key: [7; 32],
            price_version: 9,
            pool: Some(pool),
        },
        boot,
        checkpoint: nano(100),
    };
    assert_eq!(ledger.post_reaped(&[reaped(1), reaped(2)], 5).unwrap(), 2);
    // The end of one comes after all; the other waits for its own.
    ledger.post(boot, &[ended(1, id, Some(pool), 400, 250)]).unwrap();
    assert_eq!(ledger.forget(PLACED_MS + 91 * DAY_MS).unwrap(), Forgotten::default());
    assert_eq!(ledger.forget(PLACED_MS + 93 * DAY_MS).unwrap(), Forgotten { reaped: 1, reports: 0 });
    assert_eq!(rows(&database, "reaped"), "1");
    ledger.finish_reaped(boot, &[hold(2)]).unwrap();
    assert_eq!(ledger.forget(PLACED_MS + 93 * DAY_MS).unwrap(), Forgotten { reaped: 1, reports: 0 });
    assert_eq!(rows(&database, "reaped"), "0");
    ledger.verify().unwrap();
}

/// Says for a boot what it may still spend of a pool.
fn report(ledger: &Postgres, boot: i64, pool: tollgate::journal::Pool, claims: Vec<Claim>) {
    ledger.report_frozen(boot, &[(pool, claims)]).unwrap();
}

#[test]
fn a_report_is_known_while_its_boot_lives_or_anything_is_left_of_the_pool() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_200);
    let [first, second, third] = [0, 1, 2].map(|now| ledger.begin_boot(now).unwrap());
    let pool = first_epoch(&ledger, first, 7);
    ledger.lease_pool(id, pool, just(600)).unwrap();
    assert!(ledger.advance(second, "run-2", &[(7, 1)]).unwrap()[0].won);
    report(&ledger, first, pool, vec![]);
    report(&ledger, second, pool, vec![Claim { account: id, amount: nano(50) }]);
    assert_eq!(ledger.forget(PLACED_MS).unwrap(), Forgotten::default(), "all live");
    ledger.end_boot(first).unwrap();
    assert_eq!(ledger.forget(PLACED_MS).unwrap(), Forgotten::default(), "the third has said nothing yet");
    report(&ledger, third, pool, vec![]);
    assert_eq!(ledger.forget(PLACED_MS).unwrap(), Forgotten::default(), "the second claims a part");
    report(&ledger, second, pool, vec![]);
    assert_eq!(database.sql("SELECT count(*) FROM lease WHERE state = 'frozen'"), "0");
    assert_eq!(ledger.forget(PLACED_MS).unwrap(), Forgotten { reaped: 0, reports: 1 });
    assert_eq!(rows(&database, "report"), "2", "those of boots that live");
    // They may say it again.
    report(&ledger, second, pool, vec![]);
    for boot in [second, third] {
        ledger.end_boot(boot).unwrap();
    }
    assert_eq!(ledger.forget(PLACED_MS).unwrap(), Forgotten { reaped: 0, reports: 2 });
    assert_eq!(rows(&database, "report"), "0");
    ledger.verify().unwrap();
}
