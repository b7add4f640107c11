//! Several nodes are one gateway: one balance, one set of limits, one ledger.

mod balance;
mod catalogue;
mod chaos;
mod cold_start;
mod drift;
mod leaving;
mod ledger_away;
mod redis_away;
mod restarts;
mod sharing;
mod status;
mod store;
mod trips;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::fleet::Fleet;
use crate::support::redis::until;
use crate::support::{Answer, Call, Caller, Gateway, Setup, script, upstream, whole_request};

/// The longest pause of a caller that comes back.
const COME_BACK: Duration = Duration::from_millis(200);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_charge_one_account_in_one_ledger() {
    let fleet = Fleet::start().await;
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":5,"cached":0}}"#)).await;
    let first = fleet.node(Setup::new(&[only.address()]));
    let second = fleet.node(Setup::new(&[only.address()]));
    for node in [&first, &second, &first, &second] {
        let answer = Call::post(whole_request()).send(node.http).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(1_000_000_000 - fleet.account("alpha", 4).balance_nano, 4 * 75_000);
    fleet.verify();
}

/// Another account, made on a node's command line, with this much; answers the value of its header.
fn account(node: &Gateway, name: &str, usd: &str) -> String {
    node.command(&["accounts", "create", name]);
    if usd != "0" {
        node.command(&["accounts", "top-up", name, usd, "--reference", &format!("first of {name}")]);
    }
    let made = node.command(&["keys", "create", name, "--default-output-tokens", "1000", "--json"]);
    let made: serde_json::Value = serde_json::from_str(&made).unwrap();
    format!("Bearer {}", made["key"].as_str().unwrap())
}

/// Calls for an account until the status is another one than `not`.
async fn status_other_than(not: u16, bearer: &str, node: &Gateway) -> u16 {
    let mut last = not;
    until("the status changes", async || {
        last = Call::post(whole_request()).header("authorization", bearer).send(node.http).await.status;
        last != not
    })
    .await;
    last
}

/// Calls until the node has a tranche of its own for whoever called.
async fn warm(node: &Gateway) {
    let answer = Call::post(whole_request()).send(node.http).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    node.wait_for_metric_that("tollgate_local_tranche_nano_dollars", |nano| nano > 0).await;
}

/// What callers have seen.
#[derive(Debug, Default)]
struct Seen {
    answered: AtomicUsize,
    refused: AtomicUsize,
    /// Connections that were closed without a byte: they waited in the queue of a listener that closed.
    unaccepted: AtomicUsize,
    /// Everything else, and what it was.
    failed: std::sync::Mutex<Vec<String>>,
}

impl Seen {
    fn answered(&self) -> usize {
        self.answered.load(Ordering::Acquire)
    }

    fn failed(&self) -> Vec<String> {
        self.failed.lock().unwrap().clone()
    }

    fn note(&self, answer: Option<Answer>) {
        match answer {
            Some(answer) if answer.status == 200 && answer.clean => {
                self.answered.fetch_add(1, Ordering::AcqRel);
            }
            Some(answer) => {
                self.failed.lock().unwrap().push(format!("{} {}", answer.status, answer.text()));
            }
            None => {
                self.unaccepted.fetch_add(1, Ordering::AcqRel);
            }
        }
    }
}

/// Calls one node after the other, each time on a new connection; who is refused one goes to the next, and nothing else
/// is tried again.
async fn call_around(nodes: Vec<std::net::SocketAddr>, first: usize, seen: Arc<Seen>, over: Arc<AtomicBool>) {
    let mut next = first;
    while !over.load(Ordering::Acquire) {
        let node = nodes[next % nodes.len()];
        next += 1;
        let Some(mut caller) = Caller::try_connect(node).await else {
            seen.refused.fetch_add(1, Ordering::AcqRel);
            tokio::time::sleep(COME_BACK / 20).await;
            continue;
        };
        caller.send(&Call::post(whole_request())).await;
        seen.note(caller.try_next_answer().await);
    }
}

/// Callers that go on until they are ended.
struct Load {
    callers: Vec<tokio::task::JoinHandle<()>>,
    over: Arc<AtomicBool>,
}

impl Load {
    async fn end(self) {
        self.over.store(true, Ordering::Release);
        for caller in self.callers {
            caller.await.unwrap();
        }
    }
}

fn load(nodes: &[std::net::SocketAddr], callers: usize) -> (Arc<Seen>, Load) {
    let (seen, over) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
    let callers = (0..callers)
        .map(|first| tokio::spawn(call_around(nodes.to_vec(), first, Arc::clone(&seen), Arc::clone(&over))))
        .collect();
    (seen, Load { callers, over })
}

/// Waits until so many more calls have been answered.
async fn more(seen: &Seen, count: usize) {
    let before = seen.answered();
    until("calls are answered", async || seen.answered() >= before + count).await;
}
