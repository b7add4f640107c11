//! Every difference between Redis and the books has a name.

use tollgate::journal::Pool;
use tollgate::ledger::Ledger as _;
use tollgate::ledger::postgres::{Drift, Parts, PoolSeen, Where};

use super::super::support::postgres::database;
use super::{account, ended, first_epoch, just, nano};

#[test]
fn every_difference_is_named_by_its_cause() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    ledger.lease_pool(id, pool, just(500)).unwrap();
    ledger.return_pool(id, pool, nano(40)).unwrap();
    ledger.post(boot, &[ended(1, id, Some(pool), 200, 100)]).unwrap();
    let right = PoolSeen {
        account: id,
        pool,
        installed: nano(500),
        available: nano(300),
        held: nano(60),
        captured: nano(100),
        recalled: nano(40),
        unposted: nano(0),
    };
    let at = Where { account: id, pool };
    let elsewhere = Pool { shard: 7, epoch: 9 };
    for (seen, drifts) in [
        (right, vec![]),
        // Captured, and on its way to the books.
        (PoolSeen { captured: nano(130), held: nano(30), unposted: nano(30), ..right }, vec![]),
        (PoolSeen { captured: nano(130), held: nano(30), ..right }, vec![Drift::RecordLost(at, nano(30))]),
        (PoolSeen { captured: nano(90), held: nano(70), ..right }, vec![Drift::BookedFirst(at, nano(10))]),
        (
            PoolSeen { installed: nano(450), available: nano(250), ..right },
            vec![Drift::NotInstalled(at, nano(50))],
        ),
        (
            PoolSeen { installed: nano(501), available: nano(301), ..right },
            vec![Drift::NeverLeased(at, nano(1))],
        ),
        (
            PoolSeen { recalled: nano(50), available: nano(290), ..right },
            vec![Drift::NotReturned(at, nano(10))],
        ),
        (
            PoolSeen { recalled: nano(30), available: nano(310), ..right },
            vec![Drift::NeverRecalled(at, nano(10))],
        ),
        (
            PoolSeen { held: nano(61), ..right },
            vec![Drift::Unbalanced(at, Parts { sum: nano(501), installed: nano(500) })],
        ),
        (
            PoolSeen { pool: elsewhere, ..right },
            vec![Drift::Unknown(Where { account: id, pool: elsewhere }, nano(500))],
        ),
    ] {
        let found = ledger.reconcile(&[seen]).unwrap();
        assert_eq!(found, drifts, "{seen:?}");
        let harmless = |drift: &Drift| {
            matches!(drift, Drift::NotInstalled(..) | Drift::NotReturned(..) | Drift::BookedFirst(..))
        };
        assert!(found.iter().all(|drift| drift.is_alarming() != harmless(drift)));
        assert!(found.iter().all(|drift| drift.to_string().starts_with("account 1000, shard 7, epoch ")));
    }
    // A pool of the same shard that nobody has installed.
    let other = account(&mut ledger, "beta", 1_000);
    ledger.lease_pool(other, pool, just(5)).unwrap();
    let found = ledger.reconcile(&[right]).unwrap();
    assert_eq!(found, [Drift::NotInstalled(Where { account: other, pool }, nano(5))]);
}
