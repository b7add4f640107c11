//! SIGQUIT hands over to a new process: two processes, one balance, and no caller notices.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand_core::RngCore as _;
use rand_pcg::Pcg64Mcg;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::support::{Call, Caller, Gateway, KEY, Setup, script, stream_request, upstream, whole_request};
use tollgate::mock::Script;

/// What a whole scripted call costs (10 and 5 tokens).
pub const WHOLE_NANO: i64 = 75_000;
/// A price by which the thousand tokens of a hold are a cent, and five of them 50,000 nano-dollars.
pub const CENT: &str = "price: { input: \"0\", output: \"10\" }";
const PATIENCE: Duration = Duration::from_secs(20);

/// An upstream whose streams end when it is told, and which counts how many are open.
pub struct Counting {
    pub address: SocketAddr,
    pub open: Arc<AtomicUsize>,
    pub most: Arc<AtomicUsize>,
    pub release: watch::Sender<bool>,
}

impl Counting {
    /// Each stream ends after `lasts`, or when it is released.
    pub async fn start(lasts: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (open, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (release, released) = watch::channel(false);
        let (counted, peak) = (Arc::clone(&open), Arc::clone(&most));
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let (counted, peak, mut released) =
                    (Arc::clone(&counted), Arc::clone(&peak), released.clone());
                tokio::spawn(async move {
                    let mut bytes = vec![0; 16 << 10];
                    let mut read = 0;
                    while !bytes[..read].ends_with(b"}") {
                        match socket.read(&mut bytes[read..]).await {
                            Ok(0) | Err(_) => return,
                            Ok(more) => read += more,
                        }
                    }
                    // Admitted before we were asked, and settled after we ended: what is open here is held there.
                    let now = counted.fetch_add(1, Ordering::AcqRel) + 1;
                    peak.fetch_max(now, Ordering::AcqRel);
                    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n\
                        data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"up-a\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"Hello\"},\"finish_reason\":null}]}\n\n";
                    let sent = socket.write_all(head.as_bytes()).await;
                    let wait = async { released.wait_for(|released| *released).await.is_ok() };
                    let _over = tokio::time::timeout(lasts, wait).await;
                    counted.fetch_sub(1, Ordering::AcqRel);
                    let end = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"up-a\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
                        data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"up-a\",\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":5,\"total_tokens\":15}}\n\n\
                        data: [DONE]\n\n";
                    if sent.is_ok() {
                        let _gone = socket.write_all(end.as_bytes()).await;
                    }
                });
            }
        });
        Self { address, open, most, release }
    }
}

fn tight(upstream: SocketAddr, balance: &str) -> Setup {
    Setup::new(&[upstream]).providers("").model(CENT).balance(balance).drain_max("60s")
}

/// An open stream: its head has come.
pub async fn open(to: SocketAddr) -> Caller {
    let mut caller = Call::post(stream_request()).begin(to).await;
    let head = caller.head().await;
    assert_eq!(head.status, 200);
    caller.read_until("Hello").await;
    caller
}

/// Reads a stream to its end.
pub async fn finish(mut caller: Caller) {
    assert!(caller.read_until("[DONE]").await.contains("[DONE]"));
}

/// Asks until the status is another one than `not`.
async fn status_other_than(not: u16, to: SocketAddr) -> u16 {
    let began = Instant::now();
    loop {
        let status = Call::post(stream_request()).send(to).await.status;
        if status != not || began.elapsed() > PATIENCE {
            return status;
        }
        tokio::task::yield_now().await;
    }
}

pub fn hand_over(old: &Gateway) -> Gateway {
    let new = old.successor();
    old.signal("-QUIT");
    new.wait_for_log("serving on");
    new
}

/// Calls on one connection as long as it lasts; answers how many were answered and how often the connection
/// was closed under a request that had not been answered at all.
pub async fn keep_calling(to: SocketAddr, over: Arc<AtomicBool>) -> (usize, usize) {
    let (mut answered, mut raced) = (0, 0);
    while !over.load(Ordering::Acquire) {
        let mut caller = Caller::connect(to).await;
        let mut used = 0;
        while !over.load(Ordering::Acquire) {
            caller.send(&Call::post(stream_request())).await;
            let Some(head) = caller.try_head().await else {
                // The known race of keep-alive: closed while our next request was on its way.
                assert!(used > 0, "a new connection is closed without an answer");
                raced += 1;
                break;
            };
            assert_eq!(head.status, 200);
            let mut text = String::new();
            while let Some(chunk) = caller.chunk().await.expect("no stream breaks off") {
                text.push_str(&String::from_utf8_lossy(&chunk));
            }
            assert!(text.contains("[DONE]"), "{text}");
            (answered, used) = (answered + 1, used + 1);
            if head.header("connection").is_some_and(|value| value == "close") {
                break;
            }
        }
    }
    (answered, raced)
}

/// Calls, each on a connection of its own, which all have to be answered.
pub async fn call_anew(to: SocketAddr, over: Arc<AtomicBool>) -> usize {
    let mut answered = 0;
    while !over.load(Ordering::Acquire) {
        let answer = Call::post(whole_request()).send(to).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answered += 1;
    }
    answered
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrades_under_load_fail_no_call() {
    let only = upstream(script(r#"{"delay_chunk_ms":5}"#)).await;
    let mut gateway = Setup::new(&[only.address()]).balance("1000").start();
    let over = Arc::new(AtomicBool::new(false));
    let kept: Vec<_> = (0..4).map(|_| tokio::spawn(keep_calling(gateway.http, Arc::clone(&over)))).collect();
    let anew: Vec<_> = (0..4).map(|_| tokio::spawn(call_anew(gateway.http, Arc::clone(&over)))).collect();
    for _ in 0..4 {
        only.wait_for_requests(only.requests().len() + 50).await;
        let new = hand_over(&gateway);
        assert!(gateway.wait().success(), "the old process drained:\n{}", gateway.log());
        gateway = new;
    }
    only.wait_for_requests(only.requests().len() + 50).await;
    over.store(true, Ordering::Release);
    let (mut answered, mut raced) = (0, 0);
    for caller in kept {
        let (of_caller, races) = caller.await.expect("no call fails");
        (answered, raced) = (answered + of_caller, raced + races);
    }
    for caller in anew {
        answered += caller.await.expect("no call fails");
    }
    gateway.wait_until_settled().await;
    let calls = i64::try_from(answered).unwrap();
    let account = gateway.account("alpha", calls);
    assert_eq!((account.calls, account.balance_nano), (calls, 1_000_000_000_000 - WHOLE_NANO * calls));
    assert!(gateway.ledger_is_right());
    println!("4 upgrades, {answered} calls, {raced} keep-alive races");
    assert!(raced <= 16, "at most one race for each connection and upgrade");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn money_for_six_holds_never_carries_seven_while_two_processes_run() {
    let counting = Counting::start(Duration::from_millis(250)).await;
    let mut gateway = tight(counting.address, "0.065").start();
    let (over, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let callers: Vec<_> = (0..10)
        .map(|_| {
            let (over, served, to) = (Arc::clone(&over), Arc::clone(&served), gateway.http);
            tokio::spawn(async move {
                let mut refused = 0_usize;
                // A hundred charges would use up the half cent that lets six holds fit.
                while !over.load(Ordering::Acquire) && served.load(Ordering::Acquire) < 85 {
                    let answer = Call::post(stream_request()).send(to).await;
                    match answer.status {
                        200 => {
                            assert!(answer.clean && answer.text().contains("[DONE]"));
                            served.fetch_add(1, Ordering::AcqRel);
                        }
                        402 => refused += 1,
                        other => panic!("{other}: {}", answer.text()),
                    }
                }
                refused
            })
        })
        .collect();
    for round in 0..2 {
        while served.load(Ordering::Acquire) < 12 + 24 * round {
            tokio::task::yield_now().await;
        }
        let new = hand_over(&gateway);
        assert!(gateway.wait().success(), "{}", gateway.log());
        gateway = new;
    }
    let began = served.load(Ordering::Acquire);
    while served.load(Ordering::Acquire) < began + 6 {
        tokio::task::yield_now().await;
    }
    over.store(true, Ordering::Release);
    let mut refused = 0;
    for caller in callers {
        refused += caller.await.expect("no call fails");
    }
    assert!(refused > 0, "the balance was tight");
    assert_eq!(counting.most.load(Ordering::Acquire), 6, "streams at the same time");
    let calls = i64::try_from(served.load(Ordering::Acquire)).unwrap();
    gateway.wait_until_settled().await;
    let account = gateway.account("alpha", calls);
    assert_eq!((account.calls, account.balance_nano), (calls, 65_000_000 - 50_000 * calls));
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    assert_eq!(gateway.account("alpha", calls).leased_nano, 0);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_new_process_has_exactly_the_money_that_open_streams_leave() {
    let counting = Counting::start(PATIENCE).await;
    let mut old = tight(counting.address, "0.065").start();
    let streams = [open(old.http).await, open(old.http).await, open(old.http).await, open(old.http).await];
    let mut new = hand_over(&old);
    let more = [open(new.http).await, open(new.http).await];
    let refused = Call::post(stream_request()).send(new.http).await;
    assert_eq!(refused.status, 402, "{}", refused.text());
    counting.release.send_replace(true);
    for stream in streams.into_iter().chain(more) {
        finish(stream).await;
    }
    assert!(old.wait().success());
    new.wait_for_log("no process before this one is left");
    counting.release.send_replace(false);
    let all = [open(new.http).await, open(new.http).await, open(new.http).await];
    let all = all.into_iter().chain([open(new.http).await, open(new.http).await, open(new.http).await]);
    assert_eq!(Call::post(stream_request()).send(new.http).await.status, 402);
    counting.release.send_replace(true);
    for stream in all {
        finish(stream).await;
    }
    new.signal("-TERM");
    assert!(new.wait().success());
    let account = new.account("alpha", 12);
    assert_eq!((account.calls, account.balance_nano, account.leased_nano), (12, 65_000_000 - 12 * 50_000, 0));
    assert!(new.ledger_is_right() && counting.open.load(Ordering::Acquire) == 0);
}

/// What a call is refused for, which has to be.
async fn refusal(to: SocketAddr) -> String {
    let answer = Call::post(stream_request()).send(to).await;
    assert_eq!(answer.status, 429, "{}", answer.text());
    answer.text()
}

#[tokio::test]
async fn calls_at_once_and_per_minute_are_counted_over_both_processes() {
    let counting = Counting::start(PATIENCE).await;
    let mut old = tight(counting.address, "1.00").key("limits: { rpm: 4, concurrency: 3 }").start();
    let streams = [open(old.http).await, open(old.http).await];
    let new = hand_over(&old);
    let third = open(new.http).await;
    assert!(refusal(new.http).await.contains("calls at the same time"));
    counting.release.send_replace(true);
    for stream in streams {
        finish(stream).await;
    }
    assert!(old.wait().success());
    // The places of its calls are free again.
    assert_eq!(status_other_than(429, new.http).await, 200);
    assert!(refusal(new.http).await.contains("requests per minute"), "four, over both processes");
    finish(third).await;
}

#[tokio::test]
async fn a_days_budget_is_spent_over_both_processes() {
    let counting = Counting::start(PATIENCE).await;
    let setup = tight(counting.address, "1.00").account("limits: { budget_day: \"0.03\" }");
    let mut old = setup.start();
    let streams = [open(old.http).await, open(old.http).await];
    let new = hand_over(&old);
    let third = open(new.http).await;
    assert!(refusal(new.http).await.contains("spending in this day"));
    counting.release.send_replace(true);
    for stream in streams {
        finish(stream).await;
    }
    assert!(old.wait().success());
    // Two cents had been reserved over there; far less was used.
    assert_eq!(status_other_than(429, new.http).await, 200);
    finish(third).await;
}

#[tokio::test]
async fn a_body_that_arrives_over_the_upgrade_is_served() {
    let only = upstream(Script::default()).await;
    let mut old = Setup::new(&[only.address()]).start();
    let body = whole_request();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let (begin, end) = body.split_at(20);
    let mut caller = Caller::connect(old.http).await;
    caller.send_raw(format!("{head}{begin}").as_bytes()).await;
    old.wait_for_metric("tollgate_in_flight", 1).await;
    let new = hand_over(&old);
    assert_eq!(
        Call::post(whole_request()).send(new.http).await.status,
        200,
        "half of the money has gone over"
    );
    caller.send_raw(end.as_bytes()).await;
    assert_eq!(caller.answer().await.status, 200);
    assert!(old.wait().success());
    new.wait_for_log("no process before this one is left");
    assert_eq!(new.account("alpha", 2).balance_nano, 1_000_000_000 - 2 * WHOLE_NANO);
    assert!(new.ledger_is_right());
}

#[tokio::test]
async fn kill_9_of_the_old_process_while_it_drains_is_booked_by_the_new_one() {
    let counting = Counting::start(PATIENCE).await;
    let mut old = tight(counting.address, "0.065").start();
    let streams = [open(old.http).await, open(old.http).await, open(old.http).await, open(old.http).await];
    old.wait_for_progress().await;
    let new = hand_over(&old);
    old.kill();
    new.wait_for_log("its calls are booked now");
    new.wait_for_log("no process before this one is left");
    assert_eq!(new.account("alpha", 4).calls, 4);
    let spent = 65_000_000 - new.account("alpha", 4).balance_nano;
    assert!((1..=4 * 50_000).contains(&spent), "what had come is charged: {spent}");
    let all = [open(new.http).await, open(new.http).await, open(new.http).await, open(new.http).await];
    let more = [open(new.http).await, open(new.http).await];
    assert_eq!(Call::post(stream_request()).send(new.http).await.status, 402, "the money of six holds");
    drop((streams, all, more));
    assert!(new.ledger_is_right());
}

#[tokio::test]
async fn kill_9_of_the_new_process_leaves_the_old_ones_streams_and_the_next_start_goes_on() {
    let counting = Counting::start(PATIENCE).await;
    let mut old = tight(counting.address, "0.065").start();
    let streams = [open(old.http).await, open(old.http).await, open(old.http).await];
    let mut new = hand_over(&old);
    let lost = [open(new.http).await, open(new.http).await];
    new.wait_for_progress().await;
    new.kill();
    // The old one still drains; the folder has no owner.
    let next = new.again();
    next.wait_for_log("its calls are booked now");
    let more = [open(next.http).await, open(next.http).await, open(next.http).await];
    assert_eq!(Call::post(stream_request()).send(next.http).await.status, 402, "three are with the old one");
    counting.release.send_replace(true);
    for stream in streams.into_iter().chain(more) {
        finish(stream).await;
    }
    assert!(old.wait().success());
    next.wait_for_log("no process before this one is left");
    assert_eq!(next.account("alpha", 8).calls, 8, "every stream once");
    assert!(next.ledger_is_right());
    drop(lost);
}

#[tokio::test]
async fn without_a_process_that_waits_sigquit_changes_nothing() {
    let only = upstream(Script::default()).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    gateway.signal("-QUIT");
    gateway.wait_for_log("nobody waits at");
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    // One that waited and went away is none either.
    let mut heir = gateway.successor();
    heir.kill();
    gateway.signal("-QUIT");
    while gateway.log().matches("serving on\n").count() < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn signals_that_come_too_early_end_no_process_that_starts() {
    let only = upstream(Script::default()).await;
    let mut old = Setup::new(&[only.address()]).start();
    let mut heir = old.successor();
    for early in ["-HUP", "-QUIT", "-USR2"] {
        heir.signal(early);
    }
    old.signal("-QUIT");
    heir.wait_for_log("serving on");
    assert!(old.wait().success());
    assert_eq!(Call::post(whole_request()).send(heir.http).await.status, 200);
    // They are not made up for either.
    heir.signal("-TERM");
    assert!(heir.wait().success());
    let log = heir.log();
    assert!(!log.contains("a process is started") && !log.contains("SIGQUIT:"), "{log}");
}

#[tokio::test]
async fn nobody_else_gets_in_while_one_hands_over_to_another() {
    let only = upstream(Script::default()).await;
    let mut old = Setup::new(&[only.address()]).start();
    let heir = old.successor();
    assert!(old.try_beside().contains("another gateway serves from"));
    let second = old.try_command(&["serve", "--upgrade"]).unwrap_err();
    assert!(second.contains("another gateway is just starting"), "{second}");
    old.signal("-QUIT");
    heir.wait_for_log("serving on");
    assert!(old.wait().success());
    assert!(heir.try_beside().contains("another gateway serves from"), "the lock went over");
    assert_eq!(Call::post(whole_request()).send(heir.http).await.status, 200);
    // An operator's verbs go to the new process, with its token.
    assert!(heir.command(&["accounts", "top-up", "alpha", "1", "--reference", "r"]).contains("Booked."));
}

/// The process that owns a gateway's folder, which is no child of ours; killed in the end.
struct Grandchild(u32);

impl Drop for Grandchild {
    fn drop(&mut self) {
        let _gone = std::process::Command::new("kill").args(["-9", &self.0.to_string()]).status();
    }
}

#[tokio::test]
async fn sigusr2_starts_the_process_that_takes_over() {
    let only = upstream(Script::default()).await;
    let mut old = Setup::new(&[only.address()]).start();
    old.signal("-USR2");
    old.wait_for_log("a process is started that will wait to take over pid=");
    let pid = old.log().rsplit_once("pid=").unwrap().1.split_whitespace().next().unwrap().parse().unwrap();
    let new = Grandchild(pid);
    // It inherits where the old one logs.
    old.wait_for_log("ready to take over");
    old.signal("-QUIT");
    assert!(old.wait().success());
    assert_eq!(Call::post(whole_request()).send(old.http).await.status, 200);
    let owner = std::fs::read_to_string(old.folder().join("data/owner.lock")).unwrap();
    assert_eq!(owner.trim(), new.0.to_string());
    assert_eq!(old.account("alpha", 1).balance_nano, 1_000_000_000 - WHOLE_NANO);
}

#[tokio::test]
async fn a_process_that_waits_serves_when_the_old_one_leaves_by_itself() {
    let only = upstream(Script::default()).await;
    let mut old = Setup::new(&[only.address()]).start();
    let heir = old.successor();
    old.signal("-TERM");
    assert!(old.wait().success());
    heir.wait_for_log("serving on");
    assert_eq!(Call::post(whole_request()).send(heir.http).await.status, 200);
    assert!(heir.ledger_is_right());
}

/// What callers of a seeded run have seen, by request id.
#[derive(Default)]
struct Seen {
    whole: Vec<String>,
    broken: Vec<String>,
}

/// Calls, each on a connection of its own, until told otherwise; a dead gateway is waited for.
async fn call_through(to: SocketAddr, over: Arc<AtomicBool>) -> Seen {
    let mut seen = Seen::default();
    while !over.load(Ordering::Acquire) {
        let Some(mut caller) = Caller::try_connect(to).await else {
            tokio::task::yield_now().await;
            continue;
        };
        caller.send(&Call::post(stream_request())).await;
        let Some(head) = caller.try_head().await else { continue };
        assert_eq!(head.status, 200);
        let id = head.header("x-request-id").expect("every answer names its request").to_owned();
        let mut body = String::new();
        while let Ok(Some(chunk)) = caller.chunk().await {
            body.push_str(&String::from_utf8_lossy(&chunk));
        }
        if body.contains("[DONE]") { seen.whole.push(id) } else { seen.broken.push(id) }
    }
    seen
}

/// A seed decides who dies, and when. `TOLLGATE_KILLS=<n>` plays so many, `TOLLGATE_SEED=<n>` another seed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_kill_during_an_upgrade_loses_or_doubles_a_charge() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let (kills, seed) = (number("TOLLGATE_KILLS").unwrap_or(6), number("TOLLGATE_SEED").unwrap_or(11));
    let mut rng = Pcg64Mcg::new(u128::from(seed) << 1 | 1);
    let only = upstream(script(r#"{"delay_chunk_ms":20}"#)).await;
    let mut gateway = Setup::new(&[only.address()]).balance("1000").start();
    let over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> =
        (0..8).map(|_| tokio::spawn(call_through(gateway.http, Arc::clone(&over)))).collect();
    for _ in 0..kills {
        let mut new = gateway.successor();
        gateway.signal("-QUIT");
        // The one place where time passes on purpose: the moment of death is the input of this test. The
        // hand-over takes about half a second.
        tokio::time::sleep(Duration::from_millis(rng.next_u64() % 700)).await;
        let the_new_one = rng.next_u64().is_multiple_of(2);
        if the_new_one {
            new.kill();
            // It may have died before the old one had heard of it.
            gateway.signal("-TERM");
            assert!(gateway.wait().success(), "seed {seed}:\n{}", gateway.log());
            gateway = new.again();
        } else {
            gateway.kill();
            new.wait_for_log("serving on");
            gateway = new;
        }
        assert!(gateway.ledger_is_right());
    }
    over.store(true, Ordering::Release);
    let mut seen = Seen::default();
    for caller in callers {
        let of_caller = caller.await.unwrap();
        seen.whole.extend(of_caller.whole);
        seen.broken.extend(of_caller.broken);
    }
    gateway.wait_until_settled().await;
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    let mut charged: HashMap<String, i64> = HashMap::new();
    for line in gateway.statement("alpha").iter().filter(|line| matches!(line.kind, "capture" | "excess")) {
        *charged.entry(line.what.clone()).or_default() -= line.amount_nano;
    }
    for id in &seen.whole {
        assert_eq!(charged.get(id), Some(&WHOLE_NANO), "{id} ended before its caller, seed {seed}");
    }
    for id in &seen.broken {
        let cost = charged.get(id).copied().unwrap_or_default();
        assert!((0..=WHOLE_NANO).contains(&cost), "{id}: {cost}, seed {seed}");
    }
    let row = gateway.account("alpha", 0);
    assert_eq!(row.balance_nano, 1_000_000_000_000 - charged.values().sum::<i64>(), "seed {seed}");
    assert_eq!(row.leased_nano, 0, "seed {seed}");
    assert!(gateway.ledger_is_right());
    println!("{kills} kills: {} whole, {} broken off", seen.whole.len(), seen.broken.len());
}
