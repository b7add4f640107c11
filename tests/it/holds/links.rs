//! Every thread that serves has a connection of its own, and the loss of one costs others no more than a breaker does.

use std::collections::HashSet;

use super::super::support::link::Link;
use super::super::support::redis::{Kept, Server, config, connect, until};
use super::failures::{admit, funded};
use tollgate::config::checked::RedisMode;
use tollgate::store::redis::{RedisDeny, RedisError};

/// More than all tests admit.
const FUNDS: i64 = 1_000_000;

/// The connections that requests of this store can take: the server's, but for this test's own.
async fn clients(server: &Server) -> HashSet<String> {
    clients_that(server, |line| !line.contains("cmd=client|list")).await
}

async fn clients_that(server: &Server, are: impl Fn(&str) -> bool) -> HashSet<String> {
    let list: String = redis::from_redis_value(server.command("CLIENT LIST TYPE normal").await).unwrap();
    let address =
        |line: &str| line.split(' ').find_map(|field| field.strip_prefix("addr=").map(str::to_owned));
    list.lines().filter(|line| are(line)).filter_map(address).collect()
}

/// Places a hold from a thread of its own, on a runtime of its own, that stays until the sender is dropped; and again
/// whenever it is told to. Answers what came of each.
struct Thread {
    ask: tokio::sync::mpsc::Sender<u128>,
    answers: tokio::sync::mpsc::Receiver<Result<(), RedisDeny>>,
}

impl Thread {
    fn new(redis: &Kept) -> Self {
        let (ask, mut asked) = tokio::sync::mpsc::channel(1);
        let (answer, answers) = tokio::sync::mpsc::channel(1);
        let redis = redis.redis.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                while let Some(id) = asked.recv().await {
                    let admitted = admit(&redis, 1, id, 1).await.map(|_| ());
                    if answer.send(admitted).await.is_err() {
                        break;
                    }
                }
            });
        });
        Self { ask, answers }
    }

    async fn admit(&mut self, id: u128) -> Result<(), RedisDeny> {
        self.ask.send(id).await.unwrap();
        self.answers.recv().await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_thread_gets_a_connection_of_its_own_without_waiting_for_it() {
    let server = Server::start().await;
    let redis = connect(&config(&[server.url()], RedisMode::Single)).await;
    funded(&redis, 1, FUNDS).await;
    let before = clients(&server).await;
    let mut threads = [Thread::new(&redis), Thread::new(&redis)];
    for (thread, id) in threads.iter_mut().zip(0..) {
        assert_eq!(thread.admit(id).await, Ok(()));
    }
    until("both have one", async || clients(&server).await.difference(&before).count() == 2).await;
    let [first, second] = &mut threads;
    let mut ids = 100..;
    // Its own takes over as soon as it is there.
    until("both use their own", async || {
        for thread in [&mut *first, &mut *second] {
            assert_eq!(thread.admit(ids.next().unwrap()).await, Ok(()));
        }
        let used = clients_that(&server, |line| line.contains("cmd=fcall")).await;
        used.difference(&before).count() == 2
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_one_thread_loses_costs_others_no_more_than_a_breaker() {
    let server = Server::start().await;
    let redis = connect(&config(&[server.url()], RedisMode::Single)).await;
    funded(&redis, 1, FUNDS).await;
    let before = clients(&server).await;
    let mut first = Thread::new(&redis);
    assert_eq!(first.admit(1).await, Ok(()));
    let mut own = String::new();
    until("it has one", async || {
        own = clients(&server).await.difference(&before).next().cloned().unwrap_or_default();
        !own.is_empty()
    })
    .await;
    let mut second = Thread::new(&redis);
    let mut ids = 1_000_u128..;
    for _ in 0..100 {
        assert_eq!(second.admit(ids.next().unwrap()).await, Ok(()));
    }
    server.command(&format!("CLIENT KILL ADDR {own}")).await;
    // The thread whose it was may see it break; others are refused at most, until the breaker closes.
    let mut broken = 0;
    until("both are served again", async || {
        let (one, other) = (first.admit(ids.next().unwrap()).await, second.admit(ids.next().unwrap()).await);
        broken += usize::from(one == Err(RedisDeny::TimedOut));
        let refused = RedisDeny::Unavailable(RedisError::Open);
        assert!(other.as_ref().err().is_none_or(|deny| *deny == refused), "{other:?}");
        one.is_ok() && other.is_ok()
    })
    .await;
    assert!(broken <= 1, "{broken} calls saw one connection break");
    until("both have one again", async || {
        for thread in [&mut first, &mut second] {
            assert_eq!(thread.admit(ids.next().unwrap()).await, Ok(()));
        }
        clients_that(&server, |line| line.contains("cmd=fcall")).await.difference(&before).count() >= 2
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_of_one_thread_that_goes_silent_is_given_up_for_another() {
    let server = Server::start().await;
    let relay = Link::start(([127, 0, 0, 1], server.port).into()).await;
    let redis = connect(&config(&[format!("redis://{}", relay.address)], RedisMode::Single)).await;
    funded(&redis, 1, FUNDS).await;
    let (before, shared) = (clients(&server).await, relay.count());
    let mut thread = Thread::new(&redis);
    let mut ids = 1..;
    until("it uses one of its own", async || {
        assert_eq!(thread.admit(ids.next().unwrap()).await, Ok(()));
        let used = clients_that(&server, |line| line.contains("cmd=fcall")).await;
        used.difference(&before).count() == 1
    })
    .await;
    // As with a firewall that forgets one connection: no end of it is ever seen, and the others are good.
    relay.lose_since(shared);
    assert_eq!(thread.admit(ids.next().unwrap()).await, Err(RedisDeny::TimedOut));
    until("it has one again", async || {
        let (admitted, again) =
            (thread.admit(ids.next().unwrap()).await, thread.admit(ids.next().unwrap()).await);
        admitted.is_ok() && again.is_ok() && relay.count() > shared + 1
    })
    .await;
    for _ in 0..20 {
        assert_eq!(thread.admit(ids.next().unwrap()).await, Ok(()));
    }
}
