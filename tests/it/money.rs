//! Money is exact: never below zero, never charged twice, nothing lost.

use std::sync::Arc;

use async_trait::async_trait;
use filters::ids::AccountId;
use filters::money::{Amount, Settlement};
use tollgate::config;
use tollgate::drain::Drain;
use tollgate::journal::record::Record;
use tollgate::mock::Script;
use tollgate::serve;
use tollgate::store::{Admit, Charge, Deny, Holds, Ticket};

use super::support::gateway::free_address;
use super::support::{Call, Setup, script, stream_request, upstream, whole_request};

/// A request whose hold is the same every time: 1,000 tokens of output and the bytes of the body.
fn request() -> String {
    stream_request().replace("\"stream\"", "\"max_tokens\":1000,\"stream\"")
}

/// The hold of [`request`] in nano-dollars: bytes, 8 for its message, 16 for itself.
fn hold_nano() -> i64 {
    let input = i64::try_from(request().len()).unwrap() + 8 + 16;
    input * 2_500 + 1_000 * 10_000
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balance_for_three_holds_admits_three_of_twenty() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let usd = format!("{}e-9", 3 * hold_nano() + 1);
    let gateway = Setup::new(&[only.address()]).balance(&format!("\"{usd}\"").replace('"', "")).start();
    let mut callers = vec![];
    for _ in 0..20 {
        callers.push(Call::post(request()).begin(gateway.http).await);
    }
    // 17 are refused at once; 3 hang at the upstream.
    only.wait_for_requests(3).await;
    let mut refused = 0;
    let mut waiting = vec![];
    for mut caller in callers {
        if caller.answered_soon().await {
            assert_eq!(caller.next_answer().await.status, 402);
            refused += 1;
        } else {
            waiting.push(caller);
        }
    }
    assert_eq!((refused, waiting.len(), only.requests().len()), (17, 3, 3));
    waiting.into_iter().for_each(super::support::Caller::reset);
    gateway.wait_until_settled().await;
    let row = gateway.account("alpha", 3);
    assert_eq!(row.balance_nano, 3 * hold_nano() + 1, "they were charged nothing");
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn what_a_call_did_not_use_of_its_hold_can_be_held_again_at_once() {
    let only = upstream(Script::default()).await;
    // One hold fits and, with what the calls before it cost, no second one: all of it is leased, nothing can be had anew.
    let balance = hold_nano() + 9 * 75_000;
    let gateway = Setup::new(&[only.address()]).balance(&format!("{balance}e-9")).start();
    for call in 1..=10 {
        let answer = Call::post(request()).send(gateway.http).await;
        assert_eq!(answer.status, 200, "call {call}: {}", answer.text());
    }
    let last = Call::post(request()).send(gateway.http).await;
    assert_eq!(last.status, 402, "what was used is gone: {}", last.text());
    assert_eq!(gateway.account("alpha", 10).balance_nano, balance - 10 * 75_000);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_balance_for_300_holds_admits_300_of_1000_at_once() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let granted = 300 * hold_nano() + 1;
    let setup = Setup::new(&[only.address()]).providers("first_byte: 60s, first_event: 60s");
    let gateway = setup.balance(&format!("{granted}e-9")).start();
    let (over, _) = tokio::sync::watch::channel(false);
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        let (http, mut over) = (gateway.http, over.subscribe());
        callers.spawn(async move {
            let mut caller = Call::post(request()).begin(http).await;
            tokio::select! {
                head = caller.try_head() => head.map(|head| head.status),
                _ = over.wait_for(|over| *over) => None,
            }
        });
    }
    for _ in 0..700 {
        assert_eq!(callers.join_next().await.unwrap().unwrap(), Some(402));
    }
    only.wait_for_requests(300).await;
    assert_eq!(gateway.metric("tollgate_holds_open").await, 300);
    over.send_replace(true);
    while let Some(waiting) = callers.join_next().await {
        assert_eq!(waiting.unwrap(), None, "its hold was placed");
    }
    gateway.wait_until_settled().await;
    assert_eq!(gateway.account("alpha", 300).balance_nano, granted, "they were charged nothing");
    assert!(gateway.ledger_is_right());

    let mut free = granted;
    for record in gateway.journal() {
        match record {
            Record::Hold(hold) | Record::PooledHold(_, hold) => free -= hold.amount,
            Record::Settled(end) | Record::PooledSettled(_, end) => {
                free += end.parts[0] - end.settlement().charged().nano();
            }
            Record::Progress { .. } | Record::Probe | Record::Drained { .. } => {}
        }
        assert!(free >= 0, "no prefix of the journal spends more than there was");
    }
    assert_eq!(free, granted);
}

#[tokio::test]
async fn a_cost_above_the_hold_is_paid_from_the_balance_and_the_rest_is_a_shortfall() {
    // The provider reports 900 output tokens although 10 was the bound.
    let only = upstream(script(r#"{"usage":{"prompt":10,"completion":900,"cached":0}}"#)).await;
    let gateway = Setup::new(&[only.address()]).balance("0.0009").start();
    let request = stream_request().replace("\"stream\"", "\"max_tokens\":10,\"stream\"");
    assert_eq!(Call::post(request.clone()).send(gateway.http).await.status, 200);
    let row = gateway.account("alpha", 1);
    assert_eq!(row.balance_nano, 0, "all that was there, and not more");
    assert!(gateway.ledger_is_right());
    gateway.wait_for_log("a call cost more than its hold and the balance");
    assert_eq!(gateway.metric("tollgate_shortfall_nano_dollars_total").await, 9_025_000 - 900_000);
    assert_eq!(Call::post(request).send(gateway.http).await.status, 402);
}

#[tokio::test]
async fn the_books_say_what_was_paid_and_what_it_cost_us() {
    let only = upstream(script(r#"{"usage":{"prompt":100,"completion":5,"cached":60}}"#)).await;
    let gateway = Setup::new(&[only.address()]).start();
    Call::post(whole_request()).header("x-request-id", "my-call").send(gateway.http).await;
    // 40 plain, 60 cached, 5 out.
    assert_eq!(gateway.spent(1), 40 * 2_500 + 60 * 1_250 + 5 * 10_000);
    let lines = gateway.statement("alpha");
    assert_eq!((lines[0].kind, lines[0].what.as_str(), lines[1].kind), ("capture", "my-call", "top_up"));
    assert_eq!((lines[0].prompt_tokens, lines[0].completion_tokens, lines[0].estimated), (100, 5, false));
    let out = gateway.command(&["ledger", "verify", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    // Top-ups of two accounts, the capture, our cost at the provider.
    assert_eq!((found["transfers"].as_i64(), found["holds"].as_i64()), (Some(4), Some(1)));
    assert!(gateway.command(&["accounts", "show", "alpha"]).contains("$0.999775"));
    assert!(gateway.command(&["accounts", "statement", "alpha"]).contains("my-call"));
}

#[tokio::test]
async fn what_a_killed_process_had_delivered_is_charged_once_by_the_next_one() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_after_pieces","pieces":2},"fault_count":1}"#)).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    caller.read_until(", ").await;
    // Its progress is written within a tick; a whole call's record is there before its end is seen.
    gateway.wait_for_progress().await;
    gateway = gateway.kill_and_restart();
    gateway.wait_for_log("an earlier boot did not end");
    assert_eq!(gateway.spent(1), 5 * 2_500 + 2 * 10_000);
    assert_eq!(gateway.metric("tollgate_holds_open").await, 0);
    for _ in 0..2 {
        gateway = gateway.kill_and_restart();
        assert_eq!(gateway.spent(1), 5 * 2_500 + 2 * 10_000, "replayed again, charged once");
    }
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(gateway.spent(2), 32_500 + 75_000);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_call_whose_end_was_seen_is_charged_exactly_after_kill_9() {
    let only = upstream(Script::default()).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    for round in 1..=4 {
        let answer = Call::post(stream_request()).send(gateway.http).await;
        assert!(answer.text().ends_with("[DONE]\n\n"));
        gateway = gateway.kill_and_restart();
        assert_eq!(gateway.spent(round), round * 75_000);
    }
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn sigterm_lets_streams_end_and_leaves_nothing_to_replay() {
    let only = upstream(script(r#"{"delay_chunk_ms":60}"#)).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    caller.read_until("Hello").await;
    gateway.signal("-TERM");
    gateway.wait_for_log("not ready any more");
    assert_eq!(gateway.admin_page("/readyz").await.status, 503);
    caller.read_until("[DONE]").await;
    assert!(gateway.wait().success());
    assert_eq!(gateway.spent(1), 75_000);
    let journals = std::fs::read_dir(gateway.folder().join("data/journal")).unwrap().count();
    assert_eq!(journals, 0, "everything is booked, so the journal is gone");
    let leased = gateway.account("alpha", 1).leased_nano;
    assert_eq!(leased, 0, "and the lease given back");
}

#[tokio::test]
async fn after_the_drain_time_a_stream_ends_with_an_error_event_and_its_charge() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_after_pieces","pieces":2}}"#)).await;
    let setup = Setup::new(&[only.address()]).providers("idle: 60s");
    let mut gateway = setup.drain_max("200ms").start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    caller.read_until("Hello").await;
    gateway.signal("-TERM");
    gateway.wait_for_log("calls are cut");
    let rest = String::from_utf8(caller.rest().await).unwrap();
    assert!(rest.contains("\"error\"") && rest.contains("0\r\n\r\n"), "a clean end: {rest}");
    assert!(rest.contains("shutting_down"), "not the upstream's fault: {rest}");
    assert_eq!(gateway.wait().code(), Some(3), "a call was cut");
    assert!(gateway.spent(1) > 0, "what was delivered is charged");
    assert_eq!(gateway.account("alpha", 1).leased_nano, 0, "and the lease given back");
}

#[tokio::test]
async fn a_drain_takes_no_new_call_and_sigint_ends_it() {
    let only = upstream(script(r#"{"fault":{"kind":"hang_after_pieces","pieces":2}}"#)).await;
    let setup = Setup::new(&[only.address()]).providers("idle: 60s");
    let mut gateway = setup.drain_max("60s").start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    caller.read_until("Hello").await;
    gateway.signal("-TERM");
    while tokio::net::TcpStream::connect(gateway.http).await.is_ok() {
        tokio::task::yield_now().await;
    }
    gateway.signal("-INT");
    assert!(gateway.wait().success());
    let gateway = gateway.kill_and_restart();
    assert!(gateway.spent(1) > 0, "a call that was cut off is charged by its last progress");
    assert!(gateway.ledger_is_right());
}

/// A store that breaks inside a hook, in the middle of an answer.
struct Breaking {
    inner: Arc<dyn Holds>,
}

#[async_trait]
impl Holds for Breaking {
    async fn admit(&self, admit: Admit) -> Result<Ticket, Deny> {
        self.inner.admit(admit).await
    }

    fn touch(&self, ticket: &Ticket, cost: Amount) {
        self.inner.touch(ticket, cost);
        panic!("the test breaks this hook");
    }

    async fn settle(&self, ticket: Ticket, charge: Charge) -> Settlement {
        self.inner.settle(ticket, charge).await
    }

    fn available(&self, account: AccountId) -> Amount {
        self.inner.available(account)
    }

    fn open_holds(&self) -> usize {
        self.inner.open_holds()
    }

    fn trouble(&self) -> Option<&'static str> {
        self.inner.trouble()
    }
}

#[tokio::test]
async fn a_panic_in_a_hook_settles_its_hold() {
    let only = upstream(Script::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let (http, admin) = (free_address(), free_address());
    let yaml = Setup::new(&[only.address()]).yaml(http, admin);
    let data = folder.path().join("data");
    let yaml = yaml.replace("./data", data.to_str().unwrap());
    let config = config::parse(&yaml, |_| None).unwrap_or_else(|e| panic!("{e}"));
    let drain = Arc::new(Drain::default());
    let (stop, opened) = (Arc::clone(&drain), Arc::new(std::sync::OnceLock::new()));
    let store = Arc::clone(&opened);
    let server = std::thread::spawn(move || {
        serve::run_with(config, drain, |inner| {
            let holds: Arc<dyn Holds> = Arc::new(Breaking { inner });
            store.set(Arc::clone(&holds)).unwrap_or_else(|_| panic!("once"));
            holds
        })
    });
    while tokio::net::TcpStream::connect(http).await.is_err() {
        tokio::task::yield_now().await;
    }
    let mut caller = Call::post(stream_request()).begin(http).await;
    assert!(caller.try_head().await.is_none(), "the connection of the broken call dies");
    let holds = opened.get().unwrap();
    while holds.open_holds() > 0 {
        tokio::task::yield_now().await;
    }
    stop.stop();
    server.join().unwrap().unwrap();
    let mut ledger = tollgate::ledger::Sqlite::open_for_reading(&data.join("ledger.db")).unwrap();
    let account = tollgate::ledger::Ledger::accounts(&mut ledger, None).unwrap().remove(0);
    assert_eq!((account.name.as_str(), account.calls, account.leased_nano), ("alpha", 1, 0));
    assert!(tollgate::ledger::Ledger::verify(&mut ledger).is_ok());
}

#[tokio::test]
async fn a_config_fault_ends_with_64_and_names_every_line() {
    let gateway_folder = tempfile::tempdir().unwrap();
    let file = gateway_folder.path().join("bad.yaml");
    std::fs::write(&file, "listen: { http: nowhere, admin: 127.0.0.1:1 }\nstores: {}\n").unwrap();
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .args(["--config", file.to_str().unwrap(), "check"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(64), "{text}");
    for part in ["line 2: stores: unknown key", "`providers` is missing", "`models` is missing"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test]
async fn a_second_process_on_the_same_books_is_turned_away() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let refused = gateway.try_beside();
    assert!(refused.contains("store.embedded.path: another gateway serves from"), "{refused}");
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    assert!(gateway.ledger_is_right());
}
