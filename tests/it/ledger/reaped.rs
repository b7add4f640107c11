//! A hold that the reaper took is paid for once, whatever comes of its call, and nothing of it is free too early.

use filters::ids::AccountId;
use tollgate::journal::{Hold, Pool};
use tollgate::ledger::postgres::{Drift, PoolSeen, Reaped};
use tollgate::ledger::{Ledger as _, LedgerError, Postgres};

use super::super::support::postgres::{Database, database};
use super::{account, balance, ended, first_epoch, hold, just, nano};

/// An account of 1,000 with a pool of 500, and a hold of 400 in it that had cost 100 when it was last heard of.
struct Scene {
    database: Database,
    ledger: Postgres,
    id: AccountId,
    boot: i64,
    pool: Pool,
    reaped: Reaped,
}

fn scene() -> Scene {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    ledger.lease_pool(id, pool, just(500)).unwrap();
    let placed = Hold {
        id: hold(1).0,
        account: id.0,
        amount: 400,
        at_ms: 1_000,
        request: "r1".into(),
        model: "m".into(),
        key: [7; 32],
        price_version: 9,
        pool: Some(pool),
    };
    let reaped = Reaped { hold: placed, boot, checkpoint: nano(100) };
    Scene { database, ledger, id, boot, pool, reaped }
}

impl Scene {
    /// Books the reaped hold; a replica that was promoted says it again.
    fn reap(&mut self) {
        assert_eq!(self.ledger.post_reaped(&[self.reaped.clone(), self.reaped.clone()], 5).unwrap(), 1);
        assert_eq!(self.ledger.post_reaped(std::slice::from_ref(&self.reaped), 6).unwrap(), 0);
        self.ledger.verify().unwrap();
    }

    /// Its call's end comes, twice.
    fn end(&mut self, cost: i64) {
        let end = ended(1, self.id, Some(self.pool), 400, cost);
        self.ledger.post(self.boot, std::slice::from_ref(&end)).unwrap();
        assert_eq!(self.ledger.post(self.boot, &[end]).unwrap(), 0);
        self.ledger.verify().unwrap();
    }

    fn balance(&mut self) -> (i64, i64) {
        self.ledger.verify().unwrap();
        balance(&mut self.ledger, self.id)
    }

    fn cost(&mut self) -> i64 {
        self.ledger.generation(self.id, "r1").unwrap().unwrap().cost_nano
    }
}

#[test]
fn a_hold_whose_end_is_booked_relieves_its_pool_once() {
    for cost in [0, 250, 400, 450] {
        let mut scene = scene();
        scene.end(cost);
        assert_eq!(scene.balance(), (1_000 - cost, 500 - cost));
        scene.reap();
        let left = 100 - (cost - 400).max(0);
        assert_eq!(
            scene.balance(),
            (1_000 - cost, left),
            "what Redis has captured of the hold is out of the pool"
        );
        assert_eq!(scene.cost(), cost);
        // As Redis sees it: the hold was captured whole.
        let captured = nano(500 - left);
        let seen = PoolSeen {
            account: scene.id,
            pool: scene.pool,
            installed: nano(500),
            available: nano(left),
            held: nano(0),
            captured,
            recalled: nano(0),
            unposted: nano(0),
        };
        assert_eq!(scene.ledger.reconcile(&[seen]).unwrap(), []);
    }
}

#[test]
fn what_a_hold_had_not_cost_when_it_was_reaped_waits_for_its_end() {
    for cost in [100, 250, 400, 450, 40] {
        let mut scene = scene();
        scene.reap();
        assert_eq!(scene.balance(), (600, 100), "300 are in suspense");
        assert_eq!(scene.ledger.reaped(scene.boot).unwrap(), [hold(1)]);
        scene.end(cost);
        let charged = cost.max(100);
        assert_eq!(scene.balance(), (1_000 - charged, 100), "cost {cost}");
        assert_eq!(scene.cost(), charged);
        assert_eq!(scene.ledger.reaped(scene.boot).unwrap(), []);
        scene.ledger.end_boot(scene.boot).unwrap();
        assert_eq!(scene.balance(), (1_000 - charged, 100), "nothing is given back twice");
    }
}

#[test]
fn what_waits_is_free_when_the_boot_does_not_hold_it_or_is_over() {
    for says_so in [true, false] {
        let mut scene = scene();
        scene.reaped.checkpoint = nano(0);
        scene.reap();
        assert_eq!(scene.balance(), (600, 100));
        if says_so {
            assert_eq!(scene.ledger.finish_reaped(scene.boot, &[hold(1), hold(2)]).unwrap(), nano(400));
            assert_eq!(scene.ledger.finish_reaped(scene.boot, &[hold(1)]).unwrap(), nano(0));
        } else {
            scene.ledger.end_boot(scene.boot).unwrap();
        }
        assert_eq!(scene.balance(), (1_000, 100));
        assert_eq!(scene.ledger.reaped(scene.boot).unwrap(), []);
    }
}

#[test]
fn of_a_boot_that_is_over_the_checkpoint_is_charged_and_the_rest_is_free() {
    let mut scene = scene();
    scene.ledger.end_boot(scene.boot).unwrap();
    scene.reap();
    assert_eq!(scene.balance(), (900, 100));
    assert_eq!(scene.cost(), 100);
    assert_eq!(scene.ledger.reaped(scene.boot).unwrap(), []);
}

#[test]
fn of_a_boot_that_is_lost_it_waits_for_an_operator() {
    let mut scene = scene();
    scene.ledger.declare_lost(scene.boot, 4).unwrap();
    scene.reap();
    assert_eq!(scene.balance(), (600, 100));
    assert_eq!(scene.ledger.reconcile(&[]).unwrap(), [Drift::InSuspense(scene.id, nano(300))]);
    let too_much = scene.ledger.restore(scene.id, nano(301), "ticket 1", "the provider saw nothing", 9);
    assert!(matches!(too_much, Err(LedgerError::Funds { available }) if available == nano(300)));
    assert!(scene.ledger.restore(scene.id, nano(200), "ticket 1", "the provider saw nothing", 9).unwrap());
    assert!(!scene.ledger.restore(scene.id, nano(200), "ticket 1", "the provider saw nothing", 9).unwrap());
    assert_eq!(scene.balance(), (800, 100));
    // Its journal turns up after all: 100 from what still waits, then from what is free.
    scene.end(350);
    assert_eq!(scene.balance(), (650, 100));
    assert_eq!(scene.ledger.reconcile(&[]).unwrap(), []);
}

#[test]
fn of_a_pool_that_is_over_only_a_lost_boots_checkpoint_is_charged() {
    for lost in [false, true] {
        let mut scene = scene();
        let other = scene.ledger.begin_boot(1).unwrap();
        scene.ledger.advance(other, "run-2", &[(7, 1)]).unwrap();
        if lost {
            scene.ledger.declare_lost(scene.boot, 4).unwrap();
        }
        scene.reap();
        let charged = if lost { 100 } else { 0 };
        let (posted, leased) = scene.balance();
        assert_eq!((posted, leased), (1_000 - charged, 500), "journals and claims settle the rest");
        if lost {
            assert_eq!(scene.cost(), 100);
            scene.end(350);
            assert_eq!(scene.cost(), 100, "it was the last that was heard of it");
        } else {
            scene.end(350);
            assert_eq!(scene.cost(), 350);
            assert_eq!(scene.balance(), (650, 150));
        }
        assert_eq!(scene.database.sql("SELECT count(*) FROM reaped"), "1");
    }
}
