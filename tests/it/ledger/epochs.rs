//! Who answers for a shard, and when the money of one that is gone is free again.

use std::thread;

use filters::ids::AccountId;
use tollgate::journal::Pool;
use tollgate::ledger::postgres::{Claim, Drift, Epoch};
use tollgate::ledger::{Ledger as _, LedgerError, Postgres};

use super::super::support::postgres::{Database, database};
use super::{account, balance, ended, first_epoch, just, nano};

/// Three boots, and an account whose pool of 600 is of an epoch that is over.
struct Scene {
    database: Database,
    ledger: Postgres,
    id: AccountId,
    boots: [i64; 3],
    pool: Pool,
}

fn scene() -> Scene {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_200);
    let boots = [0, 1, 2].map(|now| ledger.begin_boot(now).unwrap());
    let pool = first_epoch(&ledger, boots[0], 7);
    ledger.lease_pool(id, pool, just(600)).unwrap();
    assert!(ledger.advance(boots[1], "run-2", &[(7, 1)]).unwrap()[0].won);
    Scene { database, ledger, id, boots, pool }
}

impl Scene {
    fn report(&self, boot: usize, claim: i64) -> i64 {
        let claims = vec![Claim { account: self.id, amount: nano(claim) }];
        self.ledger.report_frozen(self.boots[boot], &[(self.pool, claims)]).unwrap().nano()
    }

    fn leased(&mut self) -> i64 {
        self.ledger.verify().unwrap();
        balance(&mut self.ledger, self.id).1
    }
}

#[test]
fn an_epoch_is_moved_by_one_of_all_who_see_it_end() {
    let database = database();
    let mut ledger = database.ledger();
    let boot = ledger.begin_boot(0).unwrap();
    let all = ledger.epochs(boot).unwrap();
    assert_eq!((all.len(), all[0].epoch, all[255].shard), (256, 0, 255));
    let seen: Vec<(u16, i64)> = all.iter().map(|epoch| (epoch.shard, epoch.epoch)).collect();
    let movers: Vec<_> = (0..6)
        .map(|mover| {
            let (ledger, seen) = (ledger.clone(), seen.clone());
            thread::spawn(move || ledger.advance(boot, &format!("run-{mover}"), &seen).unwrap())
        })
        .collect();
    let answers: Vec<_> = movers.into_iter().map(|mover| mover.join().unwrap()).collect();
    for shard in 0..256 {
        let won = answers.iter().filter(|answer| answer[shard].won).count();
        assert_eq!(won, 1, "shard {shard}");
        assert!(
            answers.iter().all(|answer| answer[shard].now == answers[0][shard].now),
            "all are told the same"
        );
        assert_eq!(answers[0][shard].now.epoch, 1);
    }
    // The same process again, without its memory: by the number that was read, not by who it is.
    let now = answers[0][9].now.clone();
    let again = ledger.advance(boot, &now.run, &[(9, 1)]).unwrap();
    assert_eq!((again[0].won, again[0].now.epoch), (true, 2));
    let late = ledger.advance(boot, "run-9", &[(9, 1)]).unwrap();
    assert_eq!(late[0].now, Epoch { shard: 9, epoch: 2, run: now.run });
    assert!(!late[0].won);
}

#[test]
fn a_frozen_pool_is_freed_down_to_what_is_claimed_when_all_who_knew_it_have_reported() {
    let mut scene = scene();
    let newcomer = scene.ledger.begin_boot(9).unwrap();
    assert_eq!(scene.ledger.to_report(scene.boots[0]).unwrap(), [scene.pool]);
    assert_eq!(scene.ledger.to_report(newcomer).unwrap(), [], "it never knew it");
    assert_eq!(scene.report(0, 100), 0);
    assert_eq!(scene.report(1, 50), 0);
    assert_eq!(scene.leased(), 600, "one has not said what it may still spend");
    assert_eq!(scene.report(2, 0), 450);
    assert_eq!(scene.leased(), 150);
    assert_eq!(scene.report(0, 400), 0, "claims only fall");
    assert_eq!(scene.leased(), 150);
    // A call in it ends: the claim falls after it is booked.
    scene.ledger.post(scene.boots[0], &[ended(1, scene.id, Some(scene.pool), 100, 70)]).unwrap();
    assert_eq!(scene.leased(), 80);
    assert_eq!(scene.report(0, 0), 30);
    assert_eq!(scene.leased(), 50);
    let found = scene.ledger.reconcile(&[]).unwrap();
    assert!(matches!(found[..], [Drift::Claimed(_, amount)] if amount == nano(50)), "{found:?}");
    // A report without the account is one without a claim.
    assert_eq!(scene.ledger.report_frozen(scene.boots[1], &[(scene.pool, vec![])]).unwrap(), nano(50));
    assert_eq!(scene.leased(), 0);
    assert_eq!(scene.ledger.to_report(scene.boots[0]).unwrap(), [], "it is closed");
    assert_eq!(balance(&mut scene.ledger, scene.id), (1_130, 0));
}

#[test]
fn a_dead_boot_blocks_until_it_is_replayed() {
    let mut scene = scene();
    scene.report(0, 0);
    scene.report(1, 0);
    let found = scene.ledger.reconcile(&[]).unwrap();
    assert!(
        matches!(&found[..], [Drift::Waiting(_, amount, boots)] if *amount == nano(600) && boots[..] == [scene.boots[2]]),
        "{found:?}"
    );
    scene.ledger.post(scene.boots[2], &[ended(1, scene.id, Some(scene.pool), 90, 90)]).unwrap();
    assert_eq!(scene.leased(), 510);
    scene.ledger.end_boot(scene.boots[2]).unwrap();
    assert_eq!(scene.leased(), 0);
    assert_eq!(balance(&mut scene.ledger, scene.id), (1_110, 0));
    let states = scene.ledger.boot_states(&scene.boots).unwrap();
    assert_eq!(states.len(), 3);
}

#[test]
fn what_a_lost_boot_claimed_goes_to_suspense_and_the_rest_is_freed() {
    let mut scene = scene();
    scene.report(0, 40);
    scene.report(1, 0);
    scene.report(2, 110);
    assert_eq!(scene.leased(), 150);
    assert_eq!(scene.ledger.declare_lost(scene.boots[2], 5).unwrap(), nano(110));
    assert_eq!(scene.leased(), 40);
    assert_eq!(balance(&mut scene.ledger, scene.id), (1_090, 40));
    scene.report(0, 0);
    assert_eq!(scene.leased(), 0);
    let found = scene.ledger.reconcile(&[]).unwrap();
    assert_eq!(found, [Drift::InSuspense(scene.id, nano(110))]);
}

#[test]
fn what_nobody_claims_of_a_pool_that_a_lost_boot_never_reported_goes_to_suspense() {
    let mut scene = scene();
    scene.report(0, 40);
    scene.report(1, 0);
    assert_eq!(scene.ledger.declare_lost(scene.boots[2], 5).unwrap(), nano(0));
    assert_eq!(scene.leased(), 40, "all that nobody claims");
    assert_eq!(balance(&mut scene.ledger, scene.id), (640, 40));
    // A call of the lost boot turns up in the outbox: it is paid from what was set aside.
    scene.ledger.post(scene.boots[0], &[ended(1, scene.id, Some(scene.pool), 70, 70)]).unwrap();
    let (posted, _) = balance(&mut scene.ledger, scene.id);
    assert!(posted >= 600, "{posted}");
    scene.report(0, 0);
    assert_eq!(scene.leased(), 0);
}

#[test]
fn a_pool_in_use_is_suspect_until_the_reaper_has_ended_what_a_lost_boot_held() {
    for reaped in [false, true] {
        let mut scene = scene();
        let current = Pool { shard: 7, epoch: 2 };
        scene.ledger.lease_pool(scene.id, current, just(200)).unwrap();
        for boot in 0..3 {
            scene.report(boot, 0);
        }
        scene.ledger.declare_lost(scene.boots[2], 5).unwrap();
        if reaped {
            scene.ledger.unsuspect(&[current]).unwrap();
        }
        assert!(scene.ledger.advance(scene.boots[0], "run-3", &[(7, 2)]).unwrap()[0].won);
        let reports = [(current, vec![])];
        scene.ledger.report_frozen(scene.boots[0], &reports).unwrap();
        scene.ledger.report_frozen(scene.boots[1], &reports).unwrap();
        assert_eq!(scene.leased(), 0);
        let suspended = if reaped { 0 } else { 200 };
        assert_eq!(balance(&mut scene.ledger, scene.id), (1_200 - suspended, 0), "reaped: {reaped}");
    }
}

#[test]
fn a_pool_of_which_nothing_is_left_is_closed_at_once() {
    let mut scene = scene();
    let current = Pool { shard: 7, epoch: 2 };
    scene.ledger.lease_pool(scene.id, current, just(100)).unwrap();
    scene.ledger.post(scene.boots[0], &[ended(1, scene.id, Some(current), 100, 100)]).unwrap();
    scene.ledger.advance(scene.boots[0], "run-3", &[(7, 2)]).unwrap();
    assert_eq!(
        scene.ledger.to_report(scene.boots[0]).unwrap(),
        [scene.pool],
        "only the first has something left"
    );
    let late = scene.ledger.lease_pool(scene.id, current, just(1));
    assert!(matches!(late, Err(LedgerError::Stale)));
    assert_eq!(scene.database.sql("SELECT count(*) FROM lease WHERE state = 'closed'"), "1");
}
