//! Outages under load: two of three upstreams break at once, and no caller sees it.
//!
//! `scripts/outages [seconds]` plays every kind of outage at length and prints what it cost the callers; the
//! test run plays the worst pairs shortly. The simulated hour (`filters/tests/outages.rs`) plays the same rules
//! in virtual time, over many more calls.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::json;
use tollgate::mock::Mock;

use super::support::delay::Delay;
use super::support::tls::{Authority, TlsUpstream, Wants, quoted};
use super::support::{Call, Caller, Gateway, Setup, THREADS, script, upstream};

/// Calls a second.
const RATE: u32 = 200;
/// Fifty samples make a limit, and a limit in force is up to a second old.
const LESSONS: usize = 120;
const HEALTHY: &str = r#"{"delay_head_ms":20,"delay_chunk_ms":2}"#;

/// What two upstreams do at once.
const PAIRS: [(&str, &str); 2] = [
    (r#"{"fault":{"kind":"hang_before_head"}}"#, r#"{"fault":{"kind":"status","code":503}}"#),
    (r#"{"fault":{"kind":"hang_after_head"}}"#, r#"{"fault":{"kind":"reset_before_head"}}"#),
];

/// What one does, and the second with it where there are two.
const KINDS: [(&str, &str, &str); 8] = [
    ("healthy", HEALTHY, HEALTHY),
    ("region answers 503", r#"{"fault":{"kind":"status","code":503}}"#, HEALTHY),
    ("silent throttling (429)", r#"{"delay_head_ms":200,"fault":{"kind":"status","code":429}}"#, HEALTHY),
    ("hang", r#"{"fault":{"kind":"hang_before_head"}}"#, HEALTHY),
    ("200, then silence", r#"{"fault":{"kind":"hang_after_head"}}"#, HEALTHY),
    ("slow creep (x 20)", r#"{"delay_head_ms":400,"delay_chunk_ms":40}"#, HEALTHY),
    ("two at once: hang, 503", PAIRS[0].0, PAIRS[0].1),
    ("two at once: 200 then silence, reset", PAIRS[1].0, PAIRS[1].1),
];

/// How callers fared.
struct Fared {
    /// To the first event, sorted.
    waits: Vec<Duration>,
    errors: Vec<String>,
}

impl Fared {
    fn wait(&self, percent: usize) -> Duration {
        self.waits
            .get(self.waits.len() * percent / 100)
            .or_else(|| self.waits.last())
            .copied()
            .unwrap_or_default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_upstreams_dead_at_once_reach_no_caller() {
    let (mocks, gateway) = learnt().await;
    for (first, second) in PAIRS {
        mocks[0].set_script(script(first));
        mocks[1].set_script(script(second));
        let fared = load(gateway.http, Duration::from_secs(2)).await;
        assert_eq!(fared.errors, Vec::<String>::new(), "of {}: {first} {second}", fared.waits.len());
        assert!(fared.waits.len() > 300, "{}", fared.waits.len());
    }
    assert!(mocks[0].requests().len() > LESSONS && mocks[1].requests().len() > LESSONS, "both were asked");
    assert!(gateway.ledger_is_right());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_outage_is_borne_and_its_price_told() {
    let Some(seconds) = at_length() else {
        return; // `scripts/outages` plays it; the simulated hour is always played.
    };
    println!(
        "| outage, {RATE} calls/s for {seconds} s | calls | errors | first event p50 | p95 | p99 | worst |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for (name, first, second) in KINDS {
        let (mocks, gateway) = learnt().await;
        mocks[0].set_script(script(first));
        mocks[1].set_script(script(second));
        let fared = load(gateway.http, Duration::from_secs(seconds)).await;
        let ms = |percent| fared.wait(percent).as_millis();
        let (calls, errors) = (fared.waits.len() + fared.errors.len(), fared.errors.len());
        println!(
            "| {name} | {calls} | {errors} | {} ms | {} ms | {} ms | {} ms |",
            ms(50),
            ms(95),
            ms(99),
            ms(100)
        );
        assert_eq!(fared.errors, Vec::<String>::new(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_all_are_down_they_are_asked_one_at_a_time_and_the_first_to_return_serves() {
    /// How long a dead upstream takes to say so: attempts closer than that ran side by side.
    const DYING: Duration = Duration::from_millis(40);
    let dead = r#"{"delay_head_ms":40,"fault":{"kind":"status","code":503}}"#;
    let mocks = [upstream(script(dead)).await, upstream(script(dead)).await, upstream(script(dead)).await];
    let gateway = Setup::new(&mocks.each_ref().map(Mock::address)).start();
    let refused = async |at: usize| {
        gateway.endpoint_metric("tollgate_endpoint_refused", &format!("u{at}/up-a")).await > 0.0
    };
    while !(refused(0).await && refused(1).await && refused(2).await) {
        Call::post(request(&[])).send(gateway.http).await;
    }
    let seen = |mocks: &[Mock; 3]| {
        let mut at: Vec<Instant> = mocks.iter().flat_map(Mock::requests).map(|request| request.at).collect();
        at.sort_unstable();
        at
    };
    let before = seen(&mocks).len();
    let dark = load(gateway.http, Duration::from_secs(2)).await;
    assert!(dark.waits.is_empty(), "nobody serves");
    let attempts = seen(&mocks);
    let attempts = attempts.get(before..).unwrap_or_default();
    // A tenth may be closer together than an attempt takes: clocks and loaded machines.
    let side_by_side = attempts.windows(2).filter(|pair| pair[1] - pair[0] < DYING / 2).count();
    assert!(side_by_side * 10 <= attempts.len(), "{side_by_side} of {} run side by side", attempts.len());
    assert!(attempts.len() * 4 < dark.errors.len(), "{} for {} calls", attempts.len(), dark.errors.len());
    mocks[1].set_script(script(HEALTHY));
    let mut tries = 0;
    while Call::post(request(&[])).send(gateway.http).await.status != 200 {
        tries += 1;
        assert!(tries < 1000, "it never comes back:\n{}", gateway.log());
    }
    // Twice as many every quarter of a second: then everybody is served again.
    let mut refused = usize::MAX;
    for _ in 0..10 {
        refused = load(gateway.http, Duration::from_secs(1)).await.errors.len();
        if refused == 0 {
            break;
        }
    }
    assert_eq!(refused, 0, "the gate stays:\n{}", gateway.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_attempt_goes_out_over_a_connection_that_is_there() {
    /// Half of the round trip that the way to the standby takes longer.
    const ONE_WAY: Duration = Duration::from_millis(10);
    let calls = if at_length().is_some() { 500 } else { 20 };
    let authority = Authority::new();
    // A fault that is about the request alone: nobody is blamed, so that every call begins there.
    let refusing = r#"{"fault":{"kind":"status","code":403}}"#;
    let (first, near) = (upstream(script(refusing)).await, upstream(script("{}")).await);
    let behind = TlsUpstream::start(&authority, Wants::default(), first.address()).await;
    let far = Delay::start(behind.address, ONE_WAY).await;
    let trust = format!("ca_file: {}", quoted(&authority.ca_file()));
    let setup = Setup::new(&[first.address(), near.address(), far.address]).tls(2).provider(2, &trust);
    let gateway = setup.balance("1000").log("warn,tollgate=info,tollgate::proxy::warm=debug").start();
    let call = async |provider: &str| {
        let body = json!({
            "model": "gpt-a", "messages": [{ "role": "user", "content": "hi" }], "provider": { "order": ["u0", provider] },
        });
        let answer = Call::post(body.to_string()).send(gateway.http).await;
        assert_eq!(
            (answer.status, answer.header("x-tollgate-attempts")),
            (200, Some("2")),
            "{}",
            answer.text()
        );
        first.requests().last().and_then(|seen| seen.sent.last().copied()).expect("its refusal")
    };
    first.set_script(script("{}"));
    assert_eq!(Call::post(request(&[])).send(gateway.http).await.status, 200);
    gateway.wait_for_log_times("a connection is kept warm", THREADS);
    first.set_script(script(refusing));
    let (mut loopback, mut distant) = (vec![], vec![]);
    for _ in 0..calls {
        let refused = call("u1").await;
        loopback.push(near.requests().last().expect("the next attempt").at - refused);
        let refused = call("u2").await;
        let arrived = behind.latest().expect("the next attempt");
        distant.push(arrived.duration_since(refused).saturating_sub(ONE_WAY));
    }
    assert_eq!(behind.accepted(), THREADS, "every failover went over a connection that was warm");
    for (way, mut spans) in [("loopback", loopback), ("TLS, 20 ms of round trip added", distant)] {
        spans.sort_unstable();
        let at = |percent: usize| spans[(spans.len() - 1) * percent / 100].as_micros();
        println!("| {way} | {calls} | {} µs | {} µs | {} µs |", at(50), at(99), at(100));
    }
}

/// How long to play, where it is to be played at length.
fn at_length() -> Option<u64> {
    std::env::var("TOLLGATE_OUTAGES").ok().and_then(|text| text.parse().ok())
}

/// Three healthy upstreams, each of which has shown how fast it is.
async fn learnt() -> ([Mock; 3], Gateway) {
    let mocks =
        [upstream(script(HEALTHY)).await, upstream(script(HEALTHY)).await, upstream(script(HEALTHY)).await];
    let setup = Setup::new(&mocks.each_ref().map(Mock::address));
    let gateway = setup
        .providers("first_byte: auto, first_event: auto")
        .balance("1000")
        .log("warn,tollgate=info")
        .start();
    for _ in 0..LESSONS {
        let lessons = ["u0", "u1", "u2"].map(|name| Call::post(request(&[name])).send(gateway.http));
        for answer in futures::future::join_all(lessons).await {
            assert_eq!(answer.status, 200);
        }
    }
    (mocks, gateway)
}

fn request(order: &[&str]) -> String {
    let mut body =
        json!({ "model": "gpt-a", "stream": true, "messages": [{ "role": "user", "content": "hi" }] });
    if !order.is_empty() {
        body["provider"] = json!({ "order": order });
    }
    body.to_string()
}

/// Calls at an even pace, whatever becomes of them.
async fn load(gateway: SocketAddr, span: Duration) -> Fared {
    let mut pace = tokio::time::interval(Duration::from_secs(1) / RATE);
    let end = Instant::now() + span;
    let mut calls = vec![];
    while Instant::now() < end {
        pace.tick().await;
        calls.push(tokio::spawn(call(gateway)));
    }
    let mut fared = Fared { waits: vec![], errors: vec![] };
    for call in calls {
        match call.await.expect("a caller") {
            Ok(wait) => fared.waits.push(wait),
            Err(error) => fared.errors.push(error),
        }
    }
    fared.waits.sort_unstable();
    fared
}

/// One call: how long to its first event, or what went wrong.
async fn call(gateway: SocketAddr) -> Result<Duration, String> {
    let began = Instant::now();
    let mut caller = Caller::try_connect(gateway).await.ok_or("no connection")?;
    caller.send(&Call::post(request(&[]))).await;
    let head = caller.try_head().await.ok_or("no head")?;
    if head.status != 200 {
        return Err(format!("status {}", head.status));
    }
    let (mut body, mut wait) = (String::new(), None);
    while let Some(chunk) = caller.chunk().await.map_err(|()| "broken off")? {
        wait = wait.or_else(|| Some(began.elapsed()));
        body.push_str(&String::from_utf8_lossy(&chunk));
    }
    wait.filter(|_| body.contains("[DONE]") && !body.contains("\"error\"")).ok_or(body)
}
