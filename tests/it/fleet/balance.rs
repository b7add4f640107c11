//! One balance: never one call more than it carries, wherever its money is, and all of it is found.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use filters::ids::AccountId;
use filters::money::Amount;
use tokio::task::block_in_place;
use tollgate::ledger::Ledger as _;
use tollgate::store::{Charge, Deny, Ticket};

use super::super::upgrade::{CENT, Counting, finish};
use super::store::{HOLD, Store};
use super::{COME_BACK, account, status_other_than, until};
use crate::support::fleet::Fleet;

use crate::support::{Call, Caller, Gateway, Setup, stream_request, upstream, whole_request};
use tollgate::mock::Script;

/// How long all money may take to be found.
const PATIENCE: Duration = Duration::from_secs(40);

impl Store {
    /// Comes back as long as it is told to.
    async fn call(&self, account: AccountId, came_back: &AtomicUsize) -> Option<Ticket> {
        let began = Instant::now();
        let mut pause = COME_BACK / 16;
        loop {
            match self.admit(account).await {
                Ok(ticket) => return Some(ticket),
                Err(Deny::Funds { .. }) => return None,
                Err(Deny::Unavailable | Deny::Overloaded) => {}
                Err(other) => panic!("{other}"),
            }
            assert!(began.elapsed() < PATIENCE, "nobody can tell for so long");
            came_back.fetch_add(1, Ordering::AcqRel);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(COME_BACK * 5);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_at_once_over_three_nodes_hold_exactly_what_is_there() {
    let fleet = Fleet::start().await;
    let stores: Vec<Arc<Store>> = (0..3).map(|_| Arc::new(Store::start(&fleet))).collect();
    let row = block_in_place(|| fleet.ledger().accounts(None)).unwrap().remove(0);
    let account = AccountId(row.id);
    // Each has a tranche of its own to begin with: what is held here is given back.
    for store in &stores {
        drop(store.admit(account).await.unwrap());
    }
    let own = |store: &Arc<Store>| store.local.free().nano();
    until("every node has money of its own", async || stores.iter().all(|store| own(store) > 0)).await;
    let spread: i64 = stores.iter().map(own).sum();
    let (began, came_back) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let calls: Vec<_> = (0..10_000)
        .map(|n: usize| {
            let (store, came_back) = (Arc::clone(&stores[n % 3]), Arc::clone(&came_back));
            tokio::spawn(async move { store.call(account, &came_back).await })
        })
        .collect();
    let mut tickets = vec![];
    for call in calls {
        tickets.extend(call.await.unwrap());
    }
    println!(
        "{} of 10,000 held in {:?}; they came back {} times; {spread} nano were on nodes of their own before",
        tickets.len(),
        began.elapsed(),
        came_back.load(Ordering::Acquire)
    );
    assert_eq!(tickets.len(), 1000);
    for store in &stores {
        assert!(store.call(account, &came_back).await.is_none(), "one more");
    }
    drop(tickets);
    for store in stores {
        drop(Arc::into_inner(store).unwrap());
    }
    fleet.wait_until_tidy(0);
    assert_eq!(fleet.account("alpha", 1003).balance_nano, 1_000_000_000);
    fleet.verify();
}

/// Whether the call is served, once it is known; such a stream stays open.
async fn stream(node: std::net::SocketAddr) -> Option<Caller> {
    let began = Instant::now();
    loop {
        let mut caller = Call::post(stream_request()).begin(node).await;
        match caller.head().await.status {
            200 => return Some(caller),
            402 => return None,
            503 => assert!(began.elapsed() < PATIENCE, "nobody can tell for so long"),
            other => panic!("{other}"),
        }
        tokio::time::sleep(COME_BACK).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn six_hundred_calls_on_three_nodes_are_served_as_far_as_the_balance_goes() {
    let fleet = Fleet::start().await;
    let slow = Counting::start(Duration::from_secs(60)).await;
    let setup = || Setup::new(&[slow.address]).providers("").model(CENT).balance("0.60");
    let nodes: Vec<Gateway> = (0..3).map(|_| fleet.node(setup())).collect();
    let calls = (0..600).map(|n| stream(nodes[n % 3].http));
    let mut open: Vec<Caller> = futures::future::join_all(calls).await.into_iter().flatten().collect();
    // A hold whose answer took Redis longer than it may is nobody's, and free again.
    until("all of the money is held", async || {
        let node = &nodes[open.len() % 3];
        open.extend(stream(node.http).await);
        open.len() >= 60
    })
    .await;
    assert_eq!((open.len(), slow.most.load(Ordering::Acquire)), (60, 60));
    for node in &nodes {
        assert!(stream(node.http).await.is_none(), "nothing is left");
    }
    slow.release.send_replace(true);
    for caller in open {
        finish(caller).await;
    }
    assert_eq!(600_000_000 - fleet.account("alpha", 60).balance_nano, 60 * 50_000);
    fleet.verify();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_top_up_on_one_node_is_spent_on_the_other_and_what_is_out_comes_back_for_a_refund() {
    let fleet = Fleet::start().await;
    let only = upstream(Script::default()).await;
    let slow = Counting::start(Duration::from_secs(60)).await;
    let first = fleet.node(Setup::new(&[only.address()]).model(CENT));
    let second = fleet.node(Setup::new(&[slow.address]).providers("").model(CENT));
    let gamma = account(&first, "gamma", "0");
    assert_eq!(status_other_than(401, &gamma, &first).await, 402);
    let open = || Call::post(stream_request()).header("authorization", &gamma);
    until("the other node knows the key", async || open().send(second.http).await.status == 402).await;

    first.command(&["accounts", "top-up", "gamma", "1", "--reference", "r1"]);
    let began = Instant::now();
    let mut held = None;
    until("it is spent over there", async || {
        let mut caller = open().begin(second.http).await;
        let is_served = caller.head().await.status == 200;
        held = is_served.then_some(caller);
        is_served
    })
    .await;
    println!("spent on the other node {:?} after the top-up", began.elapsed());

    // Half of it is out in the pool, a part on the node itself, a cent is held.
    assert_eq!(status_other_than(503, &gamma, &first).await, 200);
    second.wait_for_metric_that("tollgate_local_tranche_nano_dollars", |nano| nano > 0).await;
    let balance = fleet.account("gamma", 1).balance_nano;
    let usd = |nano: i64| format!("0.{nano:09}");
    let too_much = usd(balance - 9_999_999);
    let refund = |usd: &str| first.try_command(&["accounts", "refund", "gamma", usd, "--reference", usd]);
    let refused = refund(&too_much).unwrap_err();
    assert!(refused.contains("is free"), "{refused}");
    refund(&usd(balance - 10_000_000)).unwrap_or_else(|error| panic!("{error}\n{}", first.log()));
    assert_eq!(fleet.account("gamma", 1).balance_nano, 10_000_000);
    slow.release.send_replace(true);
    finish(held.unwrap()).await;
    assert_eq!(fleet.account("gamma", 2).balance_nano, 10_000_000 - 50_000);
    let call = Call::post(whole_request()).header("authorization", &gamma);
    assert_eq!(call.send(first.http).await.status, 402, "less than a hold is left");
    fleet.verify();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_that_is_dropped_while_redis_is_asked_keeps_no_hold() {
    let fleet = Fleet::start().await;
    let store = Store::start(&fleet);
    let account = fleet.account("alpha", 0);
    let ticket = store.admit(AccountId(account.id)).await.unwrap();
    fleet.redis.freeze();
    // It cost more than its hold, so the pool is asked for the rest.
    let charge = Charge { cost: Amount::from_nano(2 * HOLD.nano()), ..Charge::default() };
    let settled = tokio::time::timeout(Duration::from_millis(50), store.holds.settle(ticket, charge)).await;
    assert!(settled.is_err(), "redis is still being asked");
    fleet.redis.thaw();
    until("the hold has ended", async || store.holds.open_holds() == 0).await;
    drop(store);
    fleet.account("alpha", 1);
    fleet.verify();
}
