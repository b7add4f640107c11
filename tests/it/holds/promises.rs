//! What the store promises, one sentence each, with the test's clock.

use std::time::Duration;

use filters::limit::budget::{Budget, Period, Zone};
use filters::limit::{Kind, Limits};
use filters::money::{Amount, Settlement, settle};
use tollgate::journal::{Pool, Settled};
use tollgate::store::redis::{
    End, Ended, Fence, Installed, Marked, RedisDeny, RedisError, RunId, Scope, Touch, shard_of,
};

use super::rig::{Ask, LIFETIME, Payer, Rig, money, nano, word};

pub async fn all(rig: &Rig) {
    amounts_are_exact_to_the_last_bit(rig).await;
    what_is_missing_of_an_excess_is_a_shortfall(rig).await;
    a_repeat_changes_nothing(rig).await;
    a_hold_that_was_ended_before_it_came_is_not_placed(rig).await;
    a_refused_call_has_taken_nothing(rig).await;
    a_minute_is_any_sixty_seconds(rig).await;
    a_clock_that_steps_back_neither_closes_the_door_nor_opens_it(rig).await;
    what_is_corrected_too_late_changes_no_other_minute(rig).await;
    models_that_did_not_serve_give_back(rig).await;
    a_budget_that_is_unknown_is_asked_for(rig).await;
    a_call_that_nobody_touches_leaves_its_slot_and_is_found(rig).await;
    pools_only_rise_and_are_recalled_once(rig).await;
    a_mark_is_set_once_and_clears(rig).await;
    the_outbox_gives_everything_to_somebody(rig).await;
    a_revoked_key_holds_nothing(rig).await;
    nothing_stays_for_ever(rig).await;
}

async fn amounts_are_exact_to_the_last_bit(rig: &Rig) {
    let edges = [1, 100_000_000_000_000, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, (1 << 62) - 1];
    for total in edges {
        let payer = rig.payer(total).await;
        let refused = payer.admit(money(total.saturating_add(1).min((1 << 62) - 1))).await;
        if total < (1 << 62) - 1 {
            assert_eq!(refused, Err(RedisDeny::Funds { available: nano(total) }));
        } else {
            payer.end(refused.unwrap(), 0).await;
        }
        let id = payer.admit(money(total)).await.unwrap();
        assert_eq!(payer.money().await, (0, total));
        assert_eq!(payer.admit(money(1)).await, Err(RedisDeny::Funds { available: Amount::ZERO }));
        let cost = total - 1;
        let expected = settle(nano(total), nano(cost), Amount::ZERO);
        assert_eq!(payer.end(id, cost).await, Ended::Now(expected), "{total}");
        assert_eq!(payer.money().await, (1, 0), "{total}");
        assert_eq!(payer.state().await.captured, nano(cost), "{total}");
    }
    let payer = rig.payer(5).await;
    let too_much = payer.admit(money(i64::MAX)).await;
    assert_eq!(too_much, Err(RedisDeny::Unavailable(RedisError::NoSuch)), "no pool can hold it");
    assert!(rig.redis.install(payer.account, payer.pool, Amount::MAX).await.is_err());
}

async fn what_is_missing_of_an_excess_is_a_shortfall(rig: &Rig) {
    for (total, held, cost) in [(100, 60, 61), (100, 60, 100), (100, 60, 101), (60, 60, 1 << 60), (7, 0, 9)] {
        let payer = rig.payer(total).await;
        let id = payer.admit(money(held)).await.unwrap();
        let expected = settle(nano(held), nano(cost), nano(total - held));
        assert_eq!(payer.end(id, cost).await, Ended::Now(expected), "{total} {held} {cost}");
        assert_eq!(payer.money().await, (total - expected.charged().nano(), 0));
    }
    let payer = rig.payer(10).await;
    let id = payer.admit(money(4)).await.unwrap();
    let Ended::Now(ended) = payer.end(id, i64::MAX).await else { panic!("it was open") };
    assert_eq!((ended.captured, ended.excess, ended.shortfall), (nano(4), nano(6), nano(i64::MAX - 10)));
}

async fn a_repeat_changes_nothing(rig: &Rig) {
    let mut payer = rig.payer(100).await;
    let limits = Limits { requests_per_minute: Some(5), concurrency: Some(1), ..Limits::default() };
    payer.limit_key(limits);
    let id = rig.hold_id();
    let first = payer.admit_as(id, money(30), LIFETIME).await.unwrap();
    assert_eq!(first.0.unwrap().remaining, 4);
    assert_eq!(
        payer.admit_as(id, money(30), LIFETIME).await.unwrap(),
        first,
        "its own slot is not in its way"
    );
    assert_eq!(payer.admit_as(id, money(31), LIFETIME).await, Err(RedisDeny::Closed), "another amount");
    assert_eq!(payer.money().await, (70, 30));
    let ended = settle(nano(30), nano(50), nano(70));
    assert_eq!(payer.end(id, 50).await, Ended::Now(ended));
    assert_eq!(payer.end(id, 50).await, Ended::Before(ended));
    assert_eq!(payer.end(id, 12).await, Ended::Before(ended), "the first word counts");
    assert_eq!(rig.redis.void(payer.account, payer.pool, id).await, Ok(Ended::Before(ended)));
    assert_eq!(payer.admit_as(id, money(30), LIFETIME).await, Err(RedisDeny::Closed));
    assert_eq!(payer.money().await, (50, 0));
}

async fn a_hold_that_was_ended_before_it_came_is_not_placed(rig: &Rig) {
    let payer = rig.payer(100).await;
    let id = rig.hold_id();
    assert_eq!(rig.redis.void(payer.account, payer.pool, id).await, Ok(Ended::Unknown));
    assert_eq!(payer.admit_as(id, money(30), LIFETIME).await, Err(RedisDeny::Closed));
    assert_eq!(rig.redis.void(payer.account, payer.pool, id).await, Ok(Ended::Before(Settlement::default())));
    assert_eq!(payer.money().await, (100, 0));
}

async fn a_refused_call_has_taken_nothing(rig: &Rig) {
    let mut payer = rig.payer(0).await;
    let day = Budget { period: Period::Day, amount: nano(50), zone: Zone::utc() };
    payer.limit_key(Limits {
        requests_per_minute: Some(1),
        tokens_per_minute: Some(10),
        concurrency: Some(1),
        budgets: vec![],
    });
    payer.scopes.account.budgets = vec![day];
    let ask = Ask { amount: 10, tokens: 10 };
    for _ in 0..3 {
        let refused = payer.admit(ask).await.unwrap_err();
        let RedisDeny::BudgetUnknown(unknown) = refused else { panic!("{refused}") };
        assert_eq!(unknown.len(), 1);
    }
    let unknown = payer.admit(ask).await.unwrap_err();
    let RedisDeny::BudgetUnknown(unknown) = unknown else { panic!("{unknown}") };
    rig.redis.restore_budget(payer.account, &unknown[0], nano(40)).await.unwrap();
    assert_eq!(payer.admit(ask).await, Err(RedisDeny::Funds { available: Amount::ZERO }));
    payer.install(100).await;
    let id = payer.admit(ask).await.unwrap();
    assert_eq!(payer.money().await, (90, 10));
    payer.end(id, 0).await;
    assert_eq!(word(&payer.admit(ask).await.unwrap_err()), "key: requests_per_minute");
}

async fn a_minute_is_any_sixty_seconds(rig: &Rig) {
    let mut payer = rig.payer(1_000).await;
    payer.limit_key(Limits { requests_per_minute: Some(2), ..Limits::default() });
    payer.scopes.account.tokens_per_minute = Some(100);
    let ask = Ask { amount: 1, tokens: 30 };
    let first = payer.admit_as(rig.hold_id(), ask, LIFETIME).await.unwrap();
    let (requests, tokens) = (first.0.unwrap(), first.1.unwrap());
    assert_eq!((requests.limit, requests.remaining, requests.reset_seconds), (2, 1, 60));
    assert_eq!((tokens.limit, tokens.remaining, tokens.reset_seconds), (100, 70, 60));
    payer.advance(20_000).await;
    payer.admit(ask).await.unwrap();
    payer.advance(10_500).await;
    let refused = payer.admit(ask).await.unwrap_err();
    let RedisDeny::Limited { scope: "key", over } = refused else { panic!("{refused}") };
    assert_eq!((over.kind, over.retry_after), (Kind::Requests, Duration::from_millis(29_500)));
    payer.advance(29_499).await;
    assert!(payer.admit(ask).await.is_err());
    payer.advance(1).await;
    payer.admit(ask).await.unwrap();
    // A clock that steps back stands still: nothing is forgotten.
    payer.advance(61_000).await;
    payer.admit(ask).await.unwrap();
    payer.admit(ask).await.unwrap();
    payer.advance(-30_000).await;
    assert_eq!(word(&payer.admit(ask).await.unwrap_err()), "key: requests_per_minute");
}

async fn a_clock_that_steps_back_neither_closes_the_door_nor_opens_it(rig: &Rig) {
    let mut payer = rig.payer(1_000).await;
    payer.limit_key(Limits { requests_per_minute: Some(3), ..Limits::default() });
    let begin_ms = payer.now_ms;
    let fit = async |payer: &Payer<'_>| {
        let mut fit = 0;
        while payer.admit(money(0)).await.is_ok() {
            fit += 1;
        }
        fit
    };
    payer.admit(money(0)).await.unwrap();
    payer.admit(money(0)).await.unwrap();
    // It stands still for a minute at most: what comes meanwhile counts as long as what was before.
    payer.set_now(begin_ms - 30_000).await;
    payer.admit(money(0)).await.unwrap();
    payer.set_now(begin_ms + 59_999).await;
    assert_eq!(fit(&payer).await, 0);
    payer.set_now(begin_ms + 60_000).await;
    assert_eq!(fit(&payer).await, 3);
    // What is further ahead is forgotten, also when the clock comes there again.
    payer.set_now(begin_ms - 120_000).await;
    assert_eq!(fit(&payer).await, 3);
    payer.set_now(begin_ms + 60_000).await;
    payer.admit(money(0)).await.unwrap();
    payer.set_now(begin_ms + 90_000).await;
    payer.admit(money(0)).await.unwrap();
    payer.set_now(begin_ms + 121_000).await;
    assert_eq!(fit(&payer).await, 2);
}

async fn what_is_corrected_too_late_changes_no_other_minute(rig: &Rig) {
    let mut payer = rig.payer(1_000).await;
    payer.limit_key(Limits { tokens_per_minute: Some(100), ..Limits::default() });
    let early = payer.admit(Ask { amount: 1, tokens: 60 }).await.unwrap();
    payer.advance(61_000).await;
    payer.admit(Ask { amount: 1, tokens: 50 }).await.unwrap();
    payer.end_as(early, 1, "m", 0).await;
    assert!(payer.admit(Ask { amount: 1, tokens: 51 }).await.is_err());
    payer.advance(30_000).await;
    payer.admit(Ask { amount: 1, tokens: 10 }).await.unwrap();
    payer.advance(31_000).await;
    assert!(payer.admit(Ask { amount: 1, tokens: 91 }).await.is_err());
    payer.admit(Ask { amount: 1, tokens: 90 }).await.unwrap();
}

async fn models_that_did_not_serve_give_back(rig: &Rig) {
    let mut payer = rig.payer(1_000).await;
    let one = Limits { tokens_per_minute: Some(100), concurrency: Some(1), ..Limits::default() };
    payer.scopes.models.insert("a".to_owned(), one.clone());
    payer.scopes.models.insert("b".to_owned(), one);
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let ask = Ask { amount: 10, tokens: 60 };
    payer.models = named(&["a", "b", "free", "a"]);
    let id = payer.admit(ask).await.unwrap();
    payer.models = named(&["b"]);
    assert_eq!(word(&payer.admit(ask).await.unwrap_err()), "account and model: tokens_per_minute");
    payer.end_as(id, 10, "a", 60).await;
    payer.admit(ask).await.unwrap();
    payer.models = named(&["a"]);
    assert_eq!(word(&payer.admit(ask).await.unwrap_err()), "account and model: tokens_per_minute");
}

async fn a_budget_that_is_unknown_is_asked_for(rig: &Rig) {
    let mut payer = rig.payer(10_000).await;
    let budget = |period, amount| Budget { period, amount: nano(amount), zone: Zone::utc() };
    payer.limit_key(Limits { budgets: vec![budget(Period::Day, 100)], ..Limits::default() });
    payer.scopes.account.budgets = vec![budget(Period::Month, 300)];
    let unknown = payer.admit(money(10)).await.unwrap_err();
    let RedisDeny::BudgetUnknown(unknown) = unknown else { panic!("{unknown}") };
    let (day, month) = (&unknown[0], &unknown[1]);
    assert_eq!((&day.scope, day.period), (&Scope::Key(payer.key), Period::Day));
    assert_eq!((&month.scope, month.period), (&Scope::Account, Period::Month));
    assert_eq!(day.begins_ms % 86_400_000, 0);
    rig.redis.restore_budget(payer.account, day, nano(60)).await.unwrap();
    rig.redis.restore_budget(payer.account, day, nano(0)).await.unwrap();
    assert!(matches!(payer.admit(money(10)).await, Err(RedisDeny::BudgetUnknown(left)) if left.len() == 1));
    rig.redis.restore_budget(payer.account, month, nano(60)).await.unwrap();
    // 60 from the books, 40 reserved of 100; the end corrects it to 70.
    let id = payer.admit(money(40)).await.unwrap();
    let refused = payer.admit(money(1)).await.unwrap_err();
    let RedisDeny::Limited { scope: "key", over } = refused else { panic!("{refused}") };
    let rest = Duration::from_millis((day.ends_ms - payer.now_ms).unsigned_abs());
    assert_eq!((over.kind, over.retry_after), (Kind::Budget, rest));
    payer.end(id, 10).await;
    // Paid from a node's own money, while this server was away.
    rig.redis.spend_budgets(payer.account, &unknown, nano(5)).await.unwrap();
    assert!(payer.admit(money(26)).await.is_err());
    let id = payer.admit(money(25)).await.unwrap();
    // The day after begins at nothing, and what was reserved yesterday is corrected there.
    payer.advance(86_400_000).await;
    let today = payer.admit(money(100)).await;
    let today = today.unwrap_or_else(|deny| panic!("{deny}"));
    payer.end(id, 0).await;
    assert!(payer.admit(money(1)).await.is_err(), "yesterday's money does not make room today");
    payer.end(today, 100).await;
    assert_eq!(word(&payer.admit(money(1)).await.unwrap_err()), "key: budget");
}

async fn a_call_that_nobody_touches_leaves_its_slot_and_is_found(rig: &Rig) {
    let mut payer = rig.payer(1_000).await;
    payer.limit_key(Limits { concurrency: Some(2), tokens_per_minute: Some(1_000), ..Limits::default() });
    let minute = Duration::from_secs(60);
    let ask = Ask { amount: 100, tokens: 100 };
    let (kept, lost, placed_ms) = (rig.hold_id(), rig.hold_id(), payer.now_ms);
    payer.admit_as(kept, ask, minute).await.unwrap();
    payer.admit_as(lost, ask, minute).await.unwrap();
    assert_eq!(word(&payer.admit(ask).await.unwrap_err()), "key: concurrency");
    let touch = |hold, cost| Touch { hold, cost: nano(cost) };
    let touched = [touch(lost, 33)];
    assert_eq!(rig.redis.touch(payer.pool, &touched, minute).await, Ok(vec![]));
    payer.advance(40_000).await;
    let unknown = rig.hold_id();
    let touched = [touch(kept, 12), touch(unknown, 1)];
    assert_eq!(rig.redis.touch(payer.pool, &touched, minute).await, Ok(vec![unknown]));
    assert_eq!(rig.redis.reap(payer.pool, 10).await, Ok(vec![]));
    payer.advance(30_000).await;
    let third = payer.admit(ask).await.unwrap();
    assert_eq!(word(&payer.admit(ask).await.unwrap_err()), "key: concurrency");
    empty_outbox(rig).await;
    assert_eq!(rig.redis.reap(payer.pool, 10).await, Ok(vec![lost]));
    assert_eq!(rig.redis.reap(payer.pool, 10).await, Ok(vec![]));
    let read = rig.redis.outbox_read("one", &[payer.pool.shard], 10, LIFETIME, Duration::ZERO).await.unwrap();
    rig.redis.outbox_acknowledge(payer.pool.shard, &[read[0].id.clone()]).await.unwrap();
    let told = End::Reaped { hold: payer.hold_at(lost, 100, placed_ms), boot: 7, cost: nano(33) };
    assert_eq!(read.into_iter().map(|outgoing| outgoing.end).collect::<Vec<_>>(), [told]);
    assert_eq!(payer.money().await, (700, 200), "nothing of it is free again");
    assert_eq!(payer.state().await.captured, nano(100));
    assert_eq!(payer.end(lost, 90).await, Ended::Reaped);
    assert_eq!(rig.redis.touch(payer.pool, &[touch(lost, 40)], minute).await, Ok(vec![lost]));
    payer.end(kept, 0).await;
    payer.end(third, 0).await;
    assert_eq!(payer.money().await, (900, 0));
}

/// Takes out what other promises have left.
async fn empty_outbox(rig: &Rig) {
    let all: Vec<u16> = (0..256).collect();
    for left in rig.redis.outbox_read("cleaner", &all, 1_000, Duration::ZERO, Duration::ZERO).await.unwrap() {
        rig.redis.outbox_acknowledge(left.shard, &[left.id]).await.unwrap();
    }
    assert_eq!(rig.redis.outbox_length().await, Ok(0));
}

async fn pools_only_rise_and_are_recalled_once(rig: &Rig) {
    let payer = rig.payer(100).await;
    let install = |total| rig.redis.install(payer.account, payer.pool, nano(total));
    assert_eq!(install(100).await, Ok(Installed { added: nano(0), total: nano(100) }));
    assert_eq!(install(150).await, Ok(Installed { added: nano(50), total: nano(150) }));
    assert_eq!(install(120).await, Ok(Installed { added: nano(0), total: nano(150) }), "it came late");
    payer.admit(money(60)).await.unwrap();
    let recall = async |most| {
        let taken = rig.redis.recall(payer.account, payer.pool, nano(most)).await.unwrap();
        (taken.now.nano(), taken.in_all.nano())
    };
    assert_eq!(recall(40).await, (40, 40));
    assert_eq!(recall(70).await, (50, 90), "what is held stays");
    assert_eq!(recall(70).await, (0, 90));
    assert_eq!(install(150).await.unwrap().added, nano(0), "what was recalled does not come back");
    assert_eq!(install(160).await.unwrap().added, nano(10));
    assert_eq!(payer.money().await, (10, 60));
    let wrong = Pool { shard: (payer.pool.shard + 1) % 256, ..payer.pool };
    assert_eq!(rig.redis.install(payer.account, wrong, nano(1)).await, Err(RedisError::NoSuch));
}

async fn a_mark_is_set_once_and_clears(rig: &Rig) {
    let payer = rig.payer(100).await;
    let (shard, epoch) = (payer.pool.shard, payer.pool.epoch);
    let id = payer.admit(money(10)).await.unwrap();
    let fence = rig.redis.fence(shard).await.unwrap();
    assert_eq!(fence.epoch, Some(epoch));
    assert_eq!(rig.redis.mark(shard, &fence.run, epoch).await, Ok(Marked::Refused(fence.clone())));
    let other = RunId("0123456789".to_owned());
    assert_eq!(rig.redis.mark(shard, &other, epoch + 1).await, Ok(Marked::Refused(fence.clone())));
    let earlier = Pool { shard, epoch: epoch + 500 };
    assert_eq!(
        rig.redis.install(payer.account, earlier, nano(1)).await,
        Err(RedisError::Stale(fence.clone())),
        "an epoch that is not marked yet"
    );
    payer.end(payer.admit(money(3)).await.unwrap(), 3).await;
    let waiting = rig.redis.outbox_length().await.unwrap();
    let next = epoch + 1_000;
    assert_eq!(rig.redis.mark(shard, &fence.run, next).await, Ok(Marked::Now));
    let marked = Fence { epoch: Some(next), ..fence };
    let stale = Err(RedisError::Stale(marked.clone()));
    assert_eq!(payer.admit(money(1)).await, Err(RedisDeny::Stale(marked)));
    assert_eq!(rig.redis.void(payer.account, payer.pool, id).await, stale);
    let touch = Touch { hold: id, cost: nano(1) };
    assert!(rig.redis.touch(payer.pool, &[touch], LIFETIME).await.is_err());
    assert!(rig.redis.reap(payer.pool, 1).await.is_err());
    let pool = Pool { shard, epoch: next };
    let empty = rig.redis.pool(payer.account, pool).await.unwrap();
    assert_eq!((empty.installed, empty.held), (nano(0), nano(0)));
    assert_eq!(rig.redis.void(payer.account, pool, id).await, Ok(Ended::Unknown));
    assert_eq!(rig.redis.outbox_length().await.unwrap(), waiting, "the outbox outlives pools");
    let left = rig.redis.call(shard, "left", &[epoch.to_string().into_bytes()]).await.unwrap();
    assert_eq!(left, [b"0"]);
    let accounts_after = rig.payer(5).await;
    assert_eq!(accounts_after.money().await, (5, 0));
}

async fn the_outbox_gives_everything_to_somebody(rig: &Rig) {
    let payer = rig.payer(1_000).await;
    let shard = payer.pool.shard;
    let all: Vec<u16> = (0..256).collect();
    empty_outbox(rig).await;
    let mut expected = vec![];
    for cost in [0, 5, 900, 500] {
        let id = payer.admit(money(20)).await.unwrap();
        let Ended::Now(ended) = payer.end(id, cost).await else { panic!("it was open") };
        expected.push(End::Settled(Settled {
            parts: Settled::parts_of(&ended),
            ..payer.settled(id, cost, "m", 0)
        }));
    }
    payer.install(2_000).await;
    let voided = payer.admit(money(1)).await.unwrap();
    rig.redis.void(payer.account, payer.pool, voided).await.unwrap();
    assert_eq!(rig.redis.outbox_length().await, Ok(4), "a void is nothing to book");
    let read = async |who: &str, limit| {
        rig.redis.outbox_read(who, &all, limit, LIFETIME, Duration::ZERO).await.unwrap()
    };
    let first = read("one", 3).await;
    let records = |read: &[tollgate::store::redis::Outgoing]| {
        read.iter().map(|outgoing| outgoing.end.clone()).collect::<Vec<_>>()
    };
    assert_eq!(records(&first), expected[..3]);
    assert!(first.iter().all(|outgoing| outgoing.shard == shard));
    assert_eq!(read("one", 3).await, first, "what was not acknowledged comes again");
    assert_eq!(records(&read("two", 3).await), expected[3..]);
    rig.redis.outbox_acknowledge(shard, &[first[0].id.clone()]).await.unwrap();
    assert_eq!(records(&read("one", 3).await), expected[1..3]);
    assert_eq!(rig.redis.outbox_length().await, Ok(3));
    let ids: Vec<String> = read("one", 10).await.into_iter().map(|outgoing| outgoing.id).collect();
    rig.redis.outbox_acknowledge(shard, &ids).await.unwrap();
    let left = read("two", 10).await;
    assert_eq!(left.len(), 1);
    assert_eq!(rig.redis.outbox_read("three", &all, 10, LIFETIME, Duration::ZERO).await, Ok(vec![]));
    let taken_over = rig.redis.outbox_read("three", &all, 10, Duration::ZERO, Duration::ZERO).await.unwrap();
    assert_eq!(taken_over, left, "whoever read it first is gone");
    assert_eq!(read("two", 10).await, []);
    rig.redis.outbox_acknowledge(shard, &[left[0].id.clone()]).await.unwrap();
    assert_eq!(rig.redis.outbox_length().await, Ok(0));

    let (ended, open) = (payer.admit(money(1)).await.unwrap(), payer.admit(money(1)).await.unwrap());
    payer.end(ended, 1).await;
    let young = rig.redis.outbox_read("one", &all, 10, LIFETIME, LIFETIME).await;
    assert_eq!(young, Ok(vec![]), "a young one is left to its node");
    assert_eq!(rig.redis.outbox_length().await, Ok(1));
    let never_seen = rig.hold_id();
    rig.redis.booked(payer.pool, &[ended, open, never_seen].map(|id| id.0)).await.unwrap();
    assert_eq!(rig.redis.outbox_length().await, Ok(0), "which says when it is booked");
    payer.end(open, 1).await;
    let late = read("one", 10).await;
    assert_eq!(late.len(), 1, "what had not ended then is read");
    rig.redis.booked(payer.pool, &[open.0]).await.unwrap();
    assert_eq!(rig.redis.outbox_read("one", &all, 10, LIFETIME, Duration::ZERO).await, Ok(vec![]));
    assert_eq!(read("two", 10).await, []);
}

async fn a_revoked_key_holds_nothing(rig: &Rig) {
    let payer = rig.payer(100).await;
    let id = payer.admit(money(10)).await.unwrap();
    rig.redis.revoke(payer.account, payer.key).await.unwrap();
    assert_eq!(payer.admit(money(10)).await, Err(RedisDeny::Revoked));
    payer.end(id, 10).await;
    rig.redis.reinstate(payer.account, payer.key).await.unwrap();
    payer.admit(money(10)).await.unwrap();
}

async fn nothing_stays_for_ever(rig: &Rig) {
    let mut payer = rig.payer(1_000).await;
    let day = Budget { period: Period::Day, amount: nano(1_000), zone: Zone::utc() };
    payer.limit_key(Limits {
        requests_per_minute: Some(100),
        tokens_per_minute: Some(100),
        concurrency: Some(100),
        budgets: vec![day],
    });
    let RedisDeny::BudgetUnknown(unknown) = payer.admit(money(1)).await.unwrap_err() else { panic!("known") };
    rig.redis.restore_budget(payer.account, &unknown[0], nano(0)).await.unwrap();
    payer.advance(86_400_000).await;
    for _ in 0..20 {
        let id = payer.admit(money(1)).await.unwrap();
        payer.end(id, 1).await;
        payer.advance(10_000).await;
    }
    let id = payer.admit(money(1)).await.unwrap();
    let counted = rig.redis.call(payer.pool.shard, "census", &[]).await.unwrap();
    let counted: Vec<String> = counted.into_iter().map(|text| String::from_utf8(text).unwrap()).collect();
    // Of this shard: ended holds of two minutes, one that is open, and no counter without an end.
    let [ended, open, endless] = counted.as_slice() else { panic!("{counted:?}") };
    assert!(ended.parse::<u32>().unwrap() <= 12, "{counted:?}");
    assert_eq!((open.as_str(), endless.as_str()), ("1", ""));
    payer.end(id, 0).await;
    assert_eq!(shard_of(payer.account), payer.pool.shard);
}
