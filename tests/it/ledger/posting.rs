//! Ends of holds are booked once, from wherever and however often they come, and nothing that comes stops the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use filters::ids::AccountId;
use rand_core::RngCore as _;
use rand_pcg::Pcg64Mcg;
use tollgate::journal::{Hold, Pool, Settled};
use tollgate::ledger::postgres::Reaped;
use tollgate::ledger::{Ledger as _, LedgerError, Postgres};

use super::super::support::postgres::{Database, Server, database, shard_of};
use super::{ALL, account, balance, ended, first_epoch, just, nano};

const ACCOUNTS: u64 = 50;
const EVENTS: u64 = 20_000;

fn shuffle<T>(rng: &mut Pcg64Mcg, items: &mut [T]) {
    for i in (1..items.len()).rev() {
        let j = usize::try_from(rng.next_u64() % (i as u64 + 1)).unwrap();
        items.swap(i, j);
    }
}

/// Accounts with a pool each, and a boot's lease beside it, that together carry all events.
struct Fleet {
    accounts: Vec<(AccountId, Pool)>,
    boot: i64,
}

impl Fleet {
    fn new(ledger: &mut Postgres, each: i64) -> Self {
        let boot = ledger.begin_boot(0).unwrap();
        let mut accounts = vec![];
        for number in 0..ACCOUNTS {
            let id = account(ledger, &format!("a{number}"), 3 * each);
            let pool = first_epoch(ledger, boot, shard_of(id));
            ledger.lease_pool(id, pool, just(each)).unwrap();
            ledger.lease_local(id, boot, just(each)).unwrap();
            accounts.push((id, pool));
        }
        Self { accounts, boot }
    }

    fn events(&self, rng: &mut Pcg64Mcg, count: u64) -> Vec<Settled> {
        let event = |number: u64| {
            let (id, pool) = self.accounts[usize::try_from(number % ACCOUNTS).unwrap()];
            let cost = i64::try_from(rng.next_u64() % 5_000).unwrap();
            // Every third was placed in the boot's own lease; some cost more than their hold.
            ended(number, id, Some(pool).filter(|_| !number.is_multiple_of(3)), 4_500, cost)
        };
        (0..count).map(event).collect()
    }
}

/// Posts all batches, each until it was answered; tells of every answer. Answers how many ends were said to be new.
fn post_all(database: &Database, boot: i64, mut batches: Vec<Vec<Settled>>, answered: impl Fn()) -> usize {
    let mut new = 0;
    let mut ledger = database.ledger();
    while let Some(batch) = batches.pop() {
        match ledger.post(boot, &batch) {
            Ok(booked) => {
                new += booked;
                answered();
            }
            Err(LedgerError::Unreachable(_)) => batches.push(batch),
            Err(error) => panic!("{error}"),
        }
    }
    new
}

#[test]
fn twenty_thousand_ends_told_twice_by_two_writers_through_crashes_are_booked_exactly_once() {
    let mut server = Server::start_durable();
    let database = Arc::new(server.database());
    let mut ledger = database.ledger();
    let fleet = Fleet::new(&mut ledger, 10_000_000);
    let mut rng = Pcg64Mcg::new(0x5eed_0001);
    let events = fleet.events(&mut rng, EVENTS);
    let posted = Arc::new(AtomicUsize::new(0));
    let writers: Vec<_> = [1_u128, 2]
        .into_iter()
        .map(|seed| {
            let mut rng = Pcg64Mcg::new(seed << 8 | 1);
            let mut mine: Vec<Settled> = events.iter().chain(&events[..2_000]).cloned().collect();
            shuffle(&mut rng, &mut mine);
            let batches: Vec<Vec<Settled>> = mine.chunks(400).map(<[Settled]>::to_vec).collect();
            let (database, posted, boot) = (Arc::clone(&database), Arc::clone(&posted), fleet.boot);
            thread::spawn(move || {
                post_all(&database, boot, batches, || {
                    posted.fetch_add(1, Ordering::SeqCst);
                })
            })
        })
        .collect();
    // The writers' connections are cut in the middle of what they do, and the server crashes twice.
    for (at, kill) in [(10, true), (25, false), (40, true), (60, false)] {
        while posted.load(Ordering::SeqCst) < at {
            thread::yield_now();
        }
        if kill {
            server.kill();
            server.restart();
        } else {
            database.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND pid <> pg_backend_pid()",
            );
        }
    }
    server.crash();
    server.restart();
    let told: usize = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
    // One whose answer was lost is booked, and nobody was told.
    assert!(told <= events.len(), "{told}");
    let mut ledger = database.ledger();
    assert_eq!(ledger.post(fleet.boot, &events).unwrap(), 0, "all are booked");
    let verified = ledger.verify().unwrap();
    assert_eq!(verified.holds, i64::try_from(EVENTS).unwrap());
    for (index, (id, pool)) in fleet.accounts.iter().enumerate() {
        let mine = events.iter().filter(|event| event.account == id.0);
        let spent = |of_pool: bool| -> i64 {
            mine.clone()
                .filter(|event| event.pool.is_some() == of_pool)
                .map(|event| event.settlement().charged().nano())
                .sum()
        };
        let (in_pool, in_boot) = (spent(true), spent(false));
        let left = 20_000_000 - in_pool - in_boot;
        assert_eq!(balance(&mut ledger, *id), (10_000_000 + left, left), "account {index}");
        let consumed = database.sql(&format!(
            "SELECT consumed FROM lease WHERE account = {} AND shard = {} AND epoch = {}",
            id.0, pool.shard, pool.epoch
        ));
        assert_eq!(consumed, in_pool.to_string(), "account {index}");
    }
}

/// The hold of an end that was placed in a pool, as the reaper takes it.
fn reaped(end: &Settled, boot: i64) -> Option<Reaped> {
    let placed = Hold {
        id: end.id,
        account: end.account,
        amount: end.parts[0],
        at_ms: end.held_ms,
        request: end.request.clone(),
        model: end.model.clone(),
        key: end.key,
        price_version: end.price_version,
        pool: Some(end.pool?),
    };
    Some(Reaped { hold: placed, boot, checkpoint: nano(end.parts[1] / 2) })
}

#[test]
fn eight_writers_of_the_same_accounts_never_wait_for_each_other_in_a_circle() {
    let database = Arc::new(database());
    let mut ledger = database.ledger();
    let fleet = Fleet::new(&mut ledger, 10_000_000);
    let mut rng = Pcg64Mcg::new(0x5eed_0003);
    let events = fleet.events(&mut rng, 4_000);
    let shards: Vec<(u16, i64)> = fleet.accounts.iter().map(|(_, pool)| (pool.shard, pool.epoch)).collect();
    let writers: Vec<_> = (0..8_u128)
        .map(|seed| {
            let mut rng = Pcg64Mcg::new(seed << 8 | 1);
            let mut mine = events.clone();
            shuffle(&mut rng, &mut mine);
            let (database, boot) = (Arc::clone(&database), fleet.boot);
            let accounts = fleet.accounts.clone();
            thread::spawn(move || {
                let mut ledger = database.ledger();
                for batch in mine.chunks(200) {
                    // An error here would be a deadlock: Postgres ends one of those who wait in a circle.
                    ledger.post(boot, batch).unwrap();
                    let (id, pool) = accounts[usize::try_from(rng.next_u64() % ACCOUNTS).unwrap()];
                    ledger.lease_local(id, boot, just(10)).unwrap();
                    ledger.give_back(boot, &[(id, nano(1))]).unwrap();
                    match ledger.lease_pool(id, pool, just(10)) {
                        Ok(_) | Err(LedgerError::Stale) => {}
                        Err(error) => panic!("{error}"),
                    }
                    ledger.report_frozen(boot, &[(pool, vec![])]).unwrap();
                    let reaped: Vec<Reaped> =
                        batch[..20].iter().filter_map(|end| reaped(end, boot)).collect();
                    ledger.post_reaped(&reaped, 3).unwrap();
                    let waiting = ledger.reaped(boot).unwrap();
                    ledger.finish_reaped(boot, &waiting[..waiting.len() / 2]).unwrap();
                }
            })
        })
        .collect();
    // Meanwhile Redis is gone, for half of the shards at a time.
    for half in [&shards[..25], &shards[25..]] {
        ledger.advance(fleet.boot, "run-2", half).unwrap();
    }
    for writer in writers {
        writer.join().unwrap();
    }
    assert_eq!(ledger.verify().unwrap().holds, 4_000);
}

#[test]
fn a_charge_that_its_lease_cannot_pay_takes_what_is_free_and_the_rest_is_ours() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    let pool = first_epoch(&ledger, boot, 7);
    assert_eq!(ledger.lease_pool(id, pool, just(300)).unwrap().added, nano(300));
    assert_eq!(ledger.lease_local(id, boot, just(200)).unwrap().added, nano(200));
    // 300 from the pool, 100 from what is free.
    ledger.post(boot, &[ended(1, id, Some(pool), 400, 400)]).unwrap();
    assert_eq!(balance(&mut ledger, id), (600, 200));
    // Nothing from the pool, the 400 that are free; 50 nobody pays. The boot's lease is not touched.
    ledger.post(boot, &[ended(2, id, Some(pool), 450, 450), ended(3, id, None, 200, 20)]).unwrap();
    assert_eq!(balance(&mut ledger, id), (180, 180));
    // A pool that never was.
    ledger.post(boot, &[ended(4, id, Some(Pool { shard: 9, epoch: 5 }), 30, 30)]).unwrap();
    assert_eq!(balance(&mut ledger, id), (180, 180));
    let cost =
        |ledger: &mut Postgres, request: &str| ledger.generation(id, request).unwrap().unwrap().cost_nano;
    assert_eq!([1, 2, 3, 4].map(|n| cost(&mut ledger, &format!("r{n}"))), [400, 400, 20, 0]);
    let lines = ledger.statement("alpha", 10).unwrap();
    let lines: Vec<(&str, i64)> = lines.iter().map(|line| (line.kind, line.amount_nano)).collect();
    let booked = [("capture", -20), ("late", -400), ("late", -100), ("capture", -300), ("top_up", 1_000)];
    let mut sorted = lines.clone();
    sorted.sort_unstable();
    let mut wanted = booked.to_vec();
    wanted.sort_unstable();
    assert_eq!(sorted, wanted);
    assert_eq!(
        ledger.spent(&tollgate::ledger::port::Scope { account: id, key: None, model: None }, 0).unwrap(),
        nano(820)
    );
    ledger.verify().unwrap();
}

#[test]
fn an_end_that_cannot_be_booked_waits_aside_and_stops_nobody() {
    let database = database();
    let mut ledger = database.ledger();
    let id = account(&mut ledger, "alpha", 1_000);
    let boot = ledger.begin_boot(0).unwrap();
    ledger.lease_local(id, boot, ALL).unwrap();
    let mut negative = ended(1, id, None, 10, 5);
    negative.parts[1] = -5;
    let mut unbalanced = ended(2, id, None, 10, 5);
    unbalanced.parts[2] = 6;
    let mut endless = ended(3, id, None, i64::MAX, i64::MAX);
    endless.parts[3] = 1;
    let nobody = ended(4, AccountId(999_999), None, 10, 5);
    let mut odd = ended(5, id, None, 10, 5);
    odd.request = "a\0b".into();
    odd.tokens = [u64::MAX; 7];
    odd.attempts = u32::MAX;
    let batch = [negative, unbalanced, endless, nobody, odd, ended(6, id, None, 10, 7)];
    assert_eq!(ledger.post(boot, &batch).unwrap(), 2);
    assert_eq!(ledger.post(boot, &batch).unwrap(), 0);
    assert_eq!(balance(&mut ledger, id), (988, 988));
    assert_eq!(database.sql("SELECT count(*) FROM misfit"), "4");
    let error = ledger.verify().unwrap_err().to_string();
    assert!(error.contains("waits in misfit"), "{error}");
    database.sql("DELETE FROM misfit");
    ledger.verify().unwrap();
}

#[test]
fn charges_that_meet_a_freeze_are_paid_by_their_leases() {
    let database = database();
    let mut ledger = database.ledger();
    let boot = ledger.begin_boot(0).unwrap();
    let ends: Vec<Settled> = (1..=5)
        .map(|number| {
            let id = account(&mut ledger, &format!("a{number}"), 1_000);
            let pool = first_epoch(&ledger, boot, shard_of(id));
            ledger.lease_pool(id, pool, just(100)).unwrap();
            ended(number, id, Some(pool), 40, 30)
        })
        .collect();
    thread::scope(|scope| {
        // It is committed once somebody waits for it.
        scope.spawn(|| {
            database.sql(
                "BEGIN; UPDATE lease SET frozen_boot = 1, state = 'frozen';
                 DO $$ BEGIN
                     FOR i IN 1..3000 LOOP
                         PERFORM pg_stat_clear_snapshot();
                         EXIT WHEN EXISTS (SELECT FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid)));
                         PERFORM pg_sleep(0.01);
                     END LOOP;
                 END $$;
                 COMMIT",
            )
        });
        let held =
            "SELECT count(*) FROM pg_locks WHERE relation = 'lease'::regclass AND mode = 'RowExclusiveLock'";
        while database.sql(held) == "0" {
            thread::yield_now();
        }
        assert_eq!(ledger.post(boot, &ends).unwrap(), 5);
    });
    assert_eq!(database.sql("SELECT sum(consumed) FROM lease"), "150");
    assert_eq!(database.sql("SELECT count(*) FROM transfer WHERE kind = 6"), "0", "none is paid late");
    ledger.verify().unwrap();
}
