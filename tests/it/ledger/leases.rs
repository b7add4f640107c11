//! Money leaves what is free before it may be spent, and comes back once.

use tollgate::journal::Pool;
use tollgate::ledger::postgres::{Leased, Wanted};
use tollgate::ledger::{Ledger as _, LedgerError};

use super::super::support::postgres::database;
use super::{ALL, account, balance, ended, first_epoch, just, nano};

#[test]
fn half_of_what_is_free_stays_free_unless_it_is_too_small_to_split() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    let want = Wanted { least: nano(100), most: nano(5_000) };
    let leased = ledger.lease_pool(id, pool, want).unwrap();
    let expected = |total, added, free_left, elsewhere| Leased {
        total: nano(total),
        added: nano(added),
        free_left: nano(free_left),
        elsewhere: nano(elsewhere),
    };
    assert_eq!(leased, expected(500, 500, 500, 0));
    let leased = ledger.lease_local(id, boot, just(120)).unwrap();
    assert_eq!(leased, expected(120, 120, 380, 500));
    let leased = ledger.lease_local(id, boot, just(200)).unwrap();
    assert_eq!(leased, expected(320, 200, 180, 500), "190 are less than what is wanted: all of it may go");
    let leased = ledger.lease_pool(id, pool, ALL).unwrap();
    assert_eq!(leased, expected(680, 180, 0, 320));
    let leased = ledger.lease_pool(id, pool, ALL).unwrap();
    assert_eq!(leased, expected(680, 0, 0, 320), "nothing is left, and nothing breaks");
    ledger.post(boot, &[ended(1, id, Some(pool), 600, 600)]).unwrap();
    let leased = ledger.lease_pool(id, pool, ALL).unwrap();
    assert_eq!(leased, expected(680, 0, 0, 320), "what is spent stays in the total");
    ledger.verify().unwrap();
}

#[test]
fn what_is_recalled_is_free_once_however_often_it_is_told() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    ledger.lease_pool(id, pool, just(400)).unwrap();
    assert_eq!(ledger.return_pool(id, pool, nano(100)).unwrap(), nano(100));
    assert_eq!(ledger.return_pool(id, pool, nano(100)).unwrap(), nano(0));
    assert_eq!(ledger.return_pool(id, pool, nano(150)).unwrap(), nano(50));
    assert_eq!(ledger.return_pool(id, pool, nano(100)).unwrap(), nano(0), "an old answer");
    assert_eq!(balance(&mut ledger, id), (1_000, 250));
    assert!(ledger.return_pool(id, pool, nano(401)).is_err(), "more than there is");
    let leased = ledger.lease_pool(id, pool, just(30)).unwrap();
    assert_eq!((leased.total, leased.added), (nano(430), nano(30)), "the total never falls");
    ledger.advance(boot, "run-2", &[(7, 1)]).unwrap();
    let late = ledger.return_pool(id, pool, nano(200));
    assert!(matches!(late, Err(LedgerError::Stale)), "what is left of it is freed by reports");
    ledger.verify().unwrap();
}

#[test]
fn a_boot_that_is_over_or_lost_is_given_nothing() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let [over, lost, live] = [0, 1, 2].map(|now| ledger.begin_boot(now).unwrap());
    ledger.lease_local(id, over, just(100)).unwrap();
    ledger.lease_local(id, lost, just(100)).unwrap();
    ledger.end_boot(over).unwrap();
    assert_eq!(balance(&mut ledger, id), (1_000, 100));
    assert_eq!(ledger.declare_lost(lost, 5).unwrap(), nano(100));
    assert_eq!(ledger.declare_lost(lost, 6).unwrap(), nano(0), "once");
    assert_eq!(balance(&mut ledger, id), (900, 0), "it is in suspense");
    for boot in [over, lost] {
        let refused = [
            ledger.lease_local(id, boot, just(1)).map(|_| ()),
            ledger.epochs(boot).map(|_| ()),
            ledger.advance(boot, "r", &[(1, 0)]).map(|_| ()),
            ledger.heartbeat(boot, 9),
            ledger.report_frozen(boot, &[]).map(|_| ()),
        ];
        assert!(refused.iter().all(|it| matches!(it, Err(LedgerError::BootOver(_)))), "{refused:?}");
    }
    ledger.heartbeat(live, 77).unwrap();
    let boots = ledger.live_boots().unwrap();
    assert_eq!((boots.len(), boots[0].boot, boots[0].beat_ms), (1, live, 77));
    // A journal that turns up after all is paid from what was set aside.
    assert_eq!(ledger.post(lost, &[ended(1, id, None, 60, 60)]).unwrap(), 1);
    assert_eq!(balance(&mut ledger, id), (900, 0));
    ledger.verify().unwrap();
}

#[test]
fn nothing_is_leased_to_a_pool_that_is_not_the_current_one() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    for pool in [Pool { shard: 7, epoch: 0 }, Pool { shard: 7, epoch: 1 }, Pool { shard: 700, epoch: 1 }] {
        assert!(matches!(ledger.lease_pool(id, pool, just(1)), Err(LedgerError::Stale)), "{pool:?}");
    }
    let pool = first_epoch(&ledger, boot, 7);
    ledger.lease_pool(id, pool, just(1)).unwrap();
    ledger.advance(boot, "run-2", &[(7, 1)]).unwrap();
    assert!(matches!(ledger.lease_pool(id, pool, just(1)), Err(LedgerError::Stale)));
    let nobody = ledger.lease_local(filters::ids::AccountId(5), boot, just(1));
    assert!(matches!(nobody, Err(LedgerError::NoAccount(_))));
}
