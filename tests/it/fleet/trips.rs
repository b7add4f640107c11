//! What a call costs its servers: one round trip to Redis before it is forwarded and one after it, nothing to Postgres.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use filters::ids::AccountId;
use filters::money::Amount;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::block_in_place;
use tollgate::ledger::Ledger as _;
use tollgate::store::Charge;

use super::store::{HOLD, Store};
use super::{until, warm};
use crate::support::fleet::Fleet;
use crate::support::postgres;
use crate::support::{Call, Setup, redis, script, upstream, whole_request};

/// What callers may cause.
const ON_THE_PATH: [&str; 2] = ["admit", "settle"];
/// What tasks do by the clock, or ahead of need: batched, and not more of it with more calls.
const BEHIND: [&str; 19] = [
    "touch",
    "reap",
    "fence",
    "mark",
    "outbox",
    "acknowledge",
    "booked",
    "install",
    "pool",
    "tell",
    "keys_since",
    "keys_add",
    "catalogue",
    "PING",
    "INFO",
    "XLEN",
    "PUBLISH",
    // A thread's first command has a connection made for the next ones.
    "HELLO",
    "CLIENT",
];

/// Everything that a server is told.
struct Monitor {
    lines: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Monitor {
    async fn of(server: &redis::Server) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        let (reader, mut writer) = stream.into_split();
        let mut reader = BufReader::new(reader).lines();
        writer.write_all(b"MONITOR\r\n").await.unwrap();
        assert_eq!(reader.next_line().await.unwrap().as_deref(), Some("+OK"));
        let lines = Arc::new(Mutex::new(vec![]));
        let sink = Arc::clone(&lines);
        let task = tokio::spawn(async move {
            let _writer = writer;
            while let Ok(Some(line)) = reader.next_line().await {
                sink.lock().unwrap().push(line);
            }
        });
        Self { lines, task }
    }

    /// How often each verb came since the last look. A verb's own commands are no round trips.
    fn verbs(&self) -> BTreeMap<String, usize> {
        let mut verbs = BTreeMap::new();
        for line in std::mem::take(&mut *self.lines.lock().unwrap()) {
            let Some((source, words)) = line.split_once("] ") else { continue };
            if source.ends_with("lua") {
                continue;
            }
            let mut words = words.split(' ').map(|word| word.trim_matches('"'));
            let command = words.next().unwrap_or_default();
            // A library's functions are called after it: `tollgate_<digest>_<verb>`.
            let verb = match command {
                "FCALL" => words.next().unwrap_or_default().splitn(3, '_').last().unwrap_or_default(),
                other => other,
            };
            *verbs.entry(verb.to_owned()).or_default() += 1;
        }
        verbs
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What was said since the last look, until a verb has come so many times.
async fn until_said(monitor: &Monitor, verb: &str, times: usize) -> BTreeMap<String, usize> {
    let mut all: BTreeMap<String, usize> = BTreeMap::new();
    until(verb, async || {
        for (verb, count) in monitor.verbs() {
            *all.entry(verb).or_default() += count;
        }
        all.get(verb).is_some_and(|said| *said >= times)
    })
    .await;
    all
}

fn all_are_known(verbs: &BTreeMap<String, usize>) {
    for (verb, count) in verbs {
        let known = ON_THE_PATH.contains(&verb.as_str()) || BEHIND.contains(&verb.as_str());
        assert!(known, "{verb}, {count} times, is sent by nobody that is known: {verbs:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_is_one_round_trip_to_redis_before_a_call_is_forwarded_and_one_after() {
    let fleet = Fleet::start().await;
    let store = Store::start(&fleet);
    let account = AccountId(block_in_place(|| fleet.ledger().accounts(None)).unwrap()[0].id);
    let settle = async |ticket| {
        store.holds.settle(ticket, Charge { cost: Amount::from_nano(1000), ..Charge::default() }).await;
    };
    let monitor = Monitor::of(&fleet.redis).await;
    // The first one finds its pool empty, and fills it for more of its size.
    settle(store.admit_for(account, Amount::from_nano(HOLD.nano() * 20)).await.unwrap()).await;
    until_said(&monitor, "settle", 1).await;
    let mut tickets = vec![];
    let calls = 60;
    for _ in 0..calls {
        tickets.push(store.admit(account).await.unwrap());
    }
    let before = until_said(&monitor, "admit", calls).await;
    assert_eq!((before.get("admit"), before.get("settle")), (Some(&calls), None), "{before:?}");
    all_are_known(&before);
    for ticket in tickets {
        settle(ticket).await;
    }
    let after = until_said(&monitor, "settle", calls).await;
    assert_eq!((after.get("admit"), after.get("settle")), (None, Some(&calls)), "{after:?}");
    all_are_known(&after);
    let ahead = |verbs: &BTreeMap<String, usize>| verbs.get("install").copied().unwrap_or_default();
    assert!(
        ahead(&before) + ahead(&after) <= calls / 5,
        "pools are filled ahead of need: {before:?} {after:?}"
    );
    let stats = ::redis::from_redis_value::<String>(fleet.redis.command("INFO commandstats").await).unwrap();
    let evaluated = stats.lines().any(|line| line.starts_with("cmdstat_eval"));
    assert!(stats.contains("cmdstat_fcall:") && !evaluated, "{stats}");
    println!("{calls} calls, before: {before:?}; after: {after:?}");
    drop(store);
    fleet.verify();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_places_no_more_than_one_hold_and_sends_nothing_else() {
    let fleet = Fleet::start().await;
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let limits = "limits: { rpm: 100000, tpm: 100000000, concurrency: 1000, budget_day: \"50\" }";
    let setup = Setup::new(&[only.address()]).balance("100").key(limits).account(limits);
    let node = fleet.node(setup);
    warm(&node).await;
    let monitor = Monitor::of(&fleet.redis).await;
    let calls = 60;
    for _ in 0..calls {
        assert_eq!(Call::post(whole_request()).send(node.http).await.status, 200);
    }
    let verbs = monitor.verbs();
    // A call that Redis did not answer in time goes on with money of the node.
    let admits = verbs.get("admit").copied().unwrap_or_default();
    assert!((calls / 2..=calls).contains(&admits), "{verbs:?}");
    all_are_known(&verbs);
    println!("{calls} calls over HTTP: {verbs:?}");
    fleet.account("alpha", i64::try_from(calls).unwrap() + 1);
    fleet.verify();
}

/// Statements of a log, by the transaction that they were in: a connection is in one at a time.
fn transactions(log: &str) -> Vec<String> {
    let mut open: HashMap<String, String> = HashMap::new();
    let mut ended = vec![];
    let mut process = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once(" UTC [")
            && let Some((pid, _)) = rest.split_once(']')
        {
            process = pid.to_owned();
            let text = open.entry(process.clone()).or_default();
            text.push_str(rest);
            text.push('\n');
            if line.ends_with("COMMIT") || line.ends_with("ROLLBACK") {
                ended.extend(open.remove(&process));
            }
        } else if let Some(text) = open.get_mut(&process) {
            text.push_str(line);
            text.push('\n');
        }
    }
    ended
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_causes_no_statement_in_postgres_but_its_part_of_a_batch() {
    let logging = "log_statement = all\nlog_timezone = UTC\n";
    let server = block_in_place(|| postgres::Server::start(logging));
    let fleet = Fleet { redis: redis::Server::start().await, database: block_in_place(|| server.database()) };
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let node = fleet.node(Setup::new(&[only.address()]).balance("1000"));
    warm(&node).await;
    fleet.account("alpha", 1);
    let (_, from) = server.log(0);
    let (rounds, at_once) = (10, 40);
    for _ in 0..rounds {
        let calls = (0..at_once).map(|_| Call::post(whole_request()).send(node.http));
        assert!(futures::future::join_all(calls).await.iter().all(|answer| answer.status == 200));
    }
    let calls = rounds * at_once;
    fleet.account("alpha", 1 + i64::from(calls));
    let (log, _) = server.log(from);
    let (postings, others): (Vec<_>, Vec<_>) =
        transactions(&log).into_iter().partition(|transaction| transaction.contains("settlement"));
    println!("{calls} calls: {} postings, {} other transactions", postings.len(), others.len());
    assert!(postings.len() < usize::try_from(calls).unwrap() / 2, "bookings go in batches");
    assert!(others.len() < usize::try_from(calls).unwrap() / 4, "nothing else grows with calls: {others:?}");
    fleet.verify();
}
