//! Alarms reach an error tracker, with names and numbers of ours, and with nothing of a call, a key or an error's words.
//!
//! A panic's hook and the place of log lines belong to a whole process. So what is to break runs in a process of its own:
//! this binary, started again for [`child_that_breaks`] alone.

use std::process::Command;
use std::sync::Arc;

use async_trait::async_trait;
use filters::ids::AccountId;
use filters::money::{Amount, Settlement};
use serde_json::Value;
use tollgate::config;
use tollgate::drain::Drain;
use tollgate::ops::{log, tracker};
use tollgate::serve;
use tollgate::store::{Admit, Charge, Deny, Holds, Ticket};

use super::support::gateway::free_address;
use super::support::tracker::{Manner, Receiver, event};
use super::support::{Call, Setup, script, stream_request, upstream};

/// What nothing that is sent may hold.
const MARK: &str = "MARK7f3a";
/// Where the child sends to.
const DSN: &str = "TOLLGATE_TEST_DSN";

/// A provider that reports 900 output tokens although 10 was the bound, and speaks secrets.
const BREAKS_ITS_BOUND: &str = r#"{"text":["MARK7f3a"],"usage":{"prompt":10,"completion":900,"cached":0}}"#;

fn sentry(receiver: &Receiver) -> String {
    format!(
        "sentry: {{ dsn: \"{}\", environment: it, release: \"tollgate@test\", sample: 100 }}\n",
        receiver.dsn()
    )
}

/// A call that costs more than there is, with secrets wherever one can be.
fn dear_call() -> Call {
    let body = format!(
        r#"{{"model":"gpt-a","max_tokens":10,"stream":true,"user":"{MARK}","messages":[{{"role":"user","content":"{MARK} prompt"}}]}}"#
    );
    Call::post(body)
        .header("x-request-id", &format!("tg-{MARK}"))
        .header("cookie", &format!("session={MARK}"))
}

fn assert_silent(envelopes: &[String]) {
    for envelope in envelopes {
        for secret in [MARK, "sk-test", "prov-key", "Bearer", "messages", "authorization", "cookie"] {
            assert!(!envelope.contains(secret), "`{secret}` has left the house:\n{envelope}");
        }
    }
}

fn tags(events: &[Value], breach: &str) -> Value {
    let found = events.iter().find(|event| event["tags"]["breach"] == breach);
    found.unwrap_or_else(|| panic!("no {breach} in {events:#?}"))["tags"].clone()
}

#[tokio::test]
async fn a_broken_invariant_is_told_with_its_names_and_nothing_of_the_call() {
    let receiver = Receiver::start(Manner::Answers);
    let only = upstream(script(BREAKS_ITS_BOUND)).await;
    let mut gateway = Setup::new(&[only.address()]).balance("0.0009").with(&sentry(&receiver)).start();
    assert_eq!(dear_call().send(gateway.http).await.status, 200);
    let envelopes = receiver.wait_for(1);
    let event = event(&envelopes[0]);
    let is = |name: &str, value: &str| assert_eq!(event[name], value, "{event:#}");
    is("environment", "it");
    is("release", "tollgate@test");
    assert_eq!(event["exception"]["values"][0]["type"], "shortfall");
    assert_eq!(event["tags"]["model"], "gpt-a");
    assert_eq!(event["tags"]["endpoint"], "u0/up-a");
    let node = event["tags"]["node"].as_str().unwrap();
    assert!(node.ends_with(&format!(":{}", gateway.http.port())), "{node}");
    assert!(event["tags"]["at"].as_str().unwrap().starts_with("src/proxy/finish.rs:"), "{event:#}");
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    assert_silent(&receiver.seen());
}

#[tokio::test]
async fn panics_and_errors_full_of_secrets_are_told_without_them() {
    let receiver = Receiver::start(Manner::Answers);
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tracker::child_that_breaks", "--nocapture"])
        .env(DSN, receiver.dsn())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
    assert!(out.status.success(), "{said}");
    assert!(said.matches(MARK).count() >= 5, "the log has the words:\n{said}");
    // It has left: what was under way is here.
    let envelopes = receiver.seen();
    assert_silent(&envelopes);
    let events: Vec<Value> = envelopes.iter().map(|envelope| event(envelope)).collect();
    let panics: Vec<_> = events.iter().filter(|event| event["tags"]["breach"] == "panic").collect();
    assert_eq!(panics.len(), 3, "{events:#?}");
    assert!(panics.iter().all(|event| event["level"] == "fatal"), "{panics:#?}");
    let of = |thread: &str| {
        let found = panics.iter().find(|event| event["tags"]["thread"] == thread);
        found.unwrap_or_else(|| panic!("none of {thread}: {panics:#?}"))["exception"]["values"][0]["value"]
            .clone()
    };
    assert_eq!(of("own-thread"), "the test breaks this thread", "a literal is told");
    assert_eq!(of("talkative-thread"), "its words are in the log", "words of run time are not");
    assert_eq!(of("gateway"), "its words are in the log", "a thread of Pingora's");
    let unbooked = tags(&events, "unbooked");
    assert_eq!((unbooked["count"].as_str(), unbooked["reason"].as_str()), (Some("3"), Some("[masked]")));
    for field in ["error", "url", "prompt", "key", "message"] {
        assert_eq!(unbooked[field], Value::Null, "{field}");
    }
    assert_eq!(tags(&events, "misfit")["account"], "12");
}

/// Not a test: what [`panics_and_errors_full_of_secrets_are_told_without_them`] starts.
#[tokio::test]
async fn child_that_breaks() {
    let Ok(dsn) = std::env::var(DSN) else { return };
    let only = upstream(script("{}")).await;
    let folder = tempfile::tempdir().unwrap();
    let (http, admin) = (free_address(), free_address());
    let yaml =
        Setup::new(&[only.address()]).with(&format!("sentry: {{ dsn: \"{dsn}\" }}\n")).yaml(http, admin);
    let yaml = yaml.replace("./data", folder.path().join("data").to_str().unwrap());
    let config = config::parse(&yaml, |_| None).unwrap_or_else(|e| panic!("{e}"));
    let (reporting, alarms) = tracker::start(config.tracker.as_ref(), "child");
    let writing = log::start(log::Format::Text, alarms);

    let broken = std::thread::Builder::new().name("own-thread".to_owned());
    broken.spawn(|| panic!("the test breaks this thread")).unwrap().join().unwrap_err();
    let broken = std::thread::Builder::new().name("talkative-thread".to_owned());
    let key = format!("sk-test-{MARK}");
    broken.spawn(move || panic!("`{key}` is no key: Bearer {key}")).unwrap().join().unwrap_err();

    let drain = Arc::new(Drain::default());
    let stop = Arc::clone(&drain);
    let server =
        std::thread::spawn(move || serve::run_with(config, drain, |inner| Arc::new(Breaking { inner })));
    while tokio::net::TcpStream::connect(http).await.is_err() {
        tokio::task::yield_now().await;
    }
    let mut caller = Call::post(stream_request()).begin(http).await;
    assert!(caller.try_head().await.is_none(), "the connection of the broken call dies");
    stop.stop();
    server.join().unwrap().unwrap();

    let error = std::io::Error::other(format!("no route to https://user:{MARK}@host/?key=sk-test-{MARK}"));
    let (url, prompt) = (format!("https://user:{MARK}@host"), format!("{MARK} tell me"));
    let reason = format!("Bearer sk-test-{MARK}");
    tracing::error!(breach = "unbooked", %error, url, prompt, reason, count = 3, "{MARK} cannot be booked");
    tracing::error!(breach = "misfit", account = 12_i64, key = format!("sk-test-{MARK}"), "{MARK}");
    drop(writing);
    drop(reporting);
}

/// A store that breaks inside a hook, with the call's words.
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
        let request = stream_request();
        panic!("{MARK} breaks this hook: {request}");
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
async fn a_tracker_that_never_answers_holds_up_neither_a_call_nor_the_end() {
    let receiver = Receiver::start(Manner::Hangs);
    let only = upstream(script(BREAKS_ITS_BOUND)).await;
    let mut gateway = Setup::new(&[only.address()]).balance("0.0009").with(&sentry(&receiver)).start();
    assert_eq!(dear_call().send(gateway.http).await.status, 200);
    receiver.wait_for(1);
    for round in ["one", "two", "three"] {
        // Enough for its hold, and not for what it costs.
        gateway.command(&["accounts", "top-up", "alpha", "0.0009", "--reference", round]);
        assert_eq!(dear_call().send(gateway.http).await.status, 200);
    }
    gateway.wait_for_log_times("a call cost more than its hold and the balance", 4);
    gateway.signal("-TERM");
    assert!(gateway.wait().success());
    assert_eq!(receiver.seen().len(), 1, "the others wait behind it, and go with the process");
}

#[tokio::test]
async fn without_a_dsn_there_is_no_thread_for_it() {
    let only = upstream(script("{}")).await;
    let receiver = Receiver::start(Manner::Answers);
    for (yaml, is_there) in
        [(String::new(), false), ("sentry: { dsn: \"\" }\n".to_owned(), false), (sentry(&receiver), true)]
    {
        let gateway = Setup::new(&[only.address()]).with(&yaml).start();
        let threads = std::fs::read_dir(format!("/proc/{}/task", gateway.pid())).unwrap();
        let names = threads.map(|it| std::fs::read_to_string(it.unwrap().path().join("comm")).unwrap());
        assert_eq!(names.into_iter().any(|name| name.contains("sentry")), is_there, "{yaml}");
    }
}
