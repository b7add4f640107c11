//! Callers: who may, what they see, and that none of them can do harm.

use super::support::{Call, Caller, Gateway, KEY, Setup, script, stream_request, upstream, whole_request};
use tollgate::mock::{Mock, Script};

async fn healthy() -> (Mock, Gateway) {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    (only, gateway)
}

#[tokio::test]
async fn unknown_malformed_and_missing_keys_get_one_and_the_same_answer() {
    let (upstream, gateway) = healthy().await;
    let mut bodies = vec![];
    let long = format!("Bearer {}", "x".repeat(8 << 10));
    for line in ["Bearer sk-unknown", "Bearer ", "Basic abc", "sk-test-alpha", "Bearer sk-test-alph", &long] {
        let answer = Call::post(stream_request()).header("authorization", line).send(gateway.http).await;
        assert_eq!(answer.status, 401, "{line}");
        bodies.push(answer.text());
    }
    let twice = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nauthorization: Bearer {KEY}\r\ncontent-length: 0\r\n\r\n"
    );
    let mut caller = Caller::connect(gateway.http).await;
    caller.send_raw(twice.as_bytes()).await;
    let answer = caller.next_answer().await;
    assert_eq!(answer.status, 401);
    bodies.push(answer.text());
    assert!(bodies.iter().all(|body| *body == bodies[0]), "{bodies:?}");
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn a_key_of_ours_decides_and_foreign_ones_stay_here() {
    let (upstream, gateway) = healthy().await;
    let answer = Call::post(stream_request())
        .header("x-api-key", "sk-ant-api03-foreign")
        .header("cookie", "session=abc")
        .header("proxy-authorization", "Basic c2VjcmV0")
        .header("x-forwarded-for", "203.0.113.7")
        .send(gateway.http)
        .await;
    assert_eq!(answer.status, 200);
    let seen = upstream.requests();
    let raw = format!("{:?}", seen[0].headers);
    assert_eq!(seen[0].header("authorization"), Some("Bearer prov-key-u0"));
    for secret in [KEY, "foreign", "session=abc", "c2VjcmV0", "203.0.113.7"] {
        assert!(!raw.contains(secret), "{secret} in {raw}");
    }
    let other =
        Call::post(stream_request()).header("authorization", "Bearer foreign").header("x-api-key", KEY);
    assert_eq!(other.send(gateway.http).await.status, 200);
    let two = Call::post(stream_request()).header("x-api-key", "sk-test-beta");
    assert_eq!(two.send(gateway.http).await.status, 401, "two different keys of ours");
}

#[tokio::test]
async fn nothing_of_the_providers_head_reaches_the_caller() {
    let (_upstream, gateway) = healthy().await;
    let answer = Call::post(whole_request()).send(gateway.http).await;
    let allowed = [
        "content-type",
        "cache-control",
        "x-request-id",
        "request-id",
        "x-tollgate-upstream",
        "x-tollgate-attempts",
        "x-tollgate-cost-nano",
        "content-length",
        "date",
        "connection",
    ];
    for (name, value) in &answer.headers {
        assert!(allowed.contains(&name.as_str()), "{name}: {value}");
    }
}

#[tokio::test]
async fn models_are_listed_as_far_as_the_key_goes() {
    let (_upstream, gateway) = healthy().await;
    let all = Call::get("/v1/models").send(gateway.http).await.json();
    assert_eq!(all["data"][0]["id"], "gpt-a");
    assert_eq!(Call::get("/v1/models/gpt-a").send(gateway.http).await.json()["object"], "model");
    let escaped = Call::get("/v1/models/gpt%2Da").send(gateway.http).await.json();
    assert_eq!(escaped["id"], "gpt-a", "as SDKs escape names with a slash");
    assert_eq!(Call::get("/v1/models/nope").send(gateway.http).await.status, 404);
    let beta = |call: Call| call.header("authorization", "Bearer sk-test-beta");
    assert_eq!(beta(Call::get("/v1/models")).send(gateway.http).await.json()["data"], serde_json::json!([]));
    let refused = beta(Call::post(stream_request())).send(gateway.http).await;
    assert_eq!((refused.status, refused.code().as_str()), (403, "model_not_allowed"));
}

#[tokio::test]
async fn a_request_id_is_taken_over_if_it_is_sane() {
    let (_upstream, gateway) = healthy().await;
    let call = |id: &str| Call::post(whole_request()).header("x-request-id", id).send(gateway.http);
    let answer = call("trace-42").await;
    assert_eq!(answer.header("x-request-id"), Some("trace-42"));
    assert_eq!(answer.header("request-id"), Some("trace-42"), "where Anthropic's SDKs look for it");
    let odd = call("a b\tc").await;
    assert!(odd.header("x-request-id").unwrap().starts_with("req_"));
}

#[tokio::test]
async fn a_connection_serves_one_call_after_the_other() {
    let (_upstream, gateway) = healthy().await;
    let mut caller = Caller::connect(gateway.http).await;
    for call in [
        Call::post(stream_request()),
        Call::post("{}"),
        Call::post(whole_request()).chunked(),
        Call::get("/v1/models"),
        Call::post(stream_request()).header("authorization", "Bearer wrong"),
        Call::post(stream_request()),
    ] {
        caller.send(&call).await;
        let answer = caller.next_answer().await;
        assert!(answer.clean && [200, 400, 401].contains(&answer.status), "{}", answer.status);
    }
}

#[tokio::test]
async fn bytes_behind_a_request_do_not_cut_its_answer() {
    let slow = upstream(script(r#"{"delay_chunk_ms":40}"#)).await;
    let gateway = Setup::new(&[slow.address()]).start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    caller.send(&Call::get("/v1/models")).await;
    caller.read_until("[DONE]").await;
    assert_eq!(caller.chunk().await, Ok(None));
    assert_eq!(caller.next_answer().await.status, 200, "and the second request is answered after it");
}

#[tokio::test]
async fn hostile_bytes_are_refused_and_leave_the_gateway_alive() {
    let (upstream, gateway) = healthy().await;
    let post = |headers: &str, body: &str| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n{headers}\r\n{body}"
        )
    };
    let body = whole_request();
    let length = body.len();
    let hostile = [
        "\r\n\r\n\r\n".to_owned(),
        "GARBAGE\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
        "\u{16}\u{3}\u{1}\u{0}\u{5}".to_owned(),
        "CONNECT evil:80 HTTP/1.1\r\nhost: evil\r\n\r\n".to_owned(),
        post(&format!("content-length: {length}\r\ntransfer-encoding: chunked\r\n"), &body),
        post(&format!("content-length: {length}\r\ncontent-length: 1\r\n"), &body),
        post(&format!("content-length: +{length}\r\n"), &body),
        post("content-length: -1\r\n", &body),
        post("content-length: 99999999999999999999\r\n", &body),
        post("transfer-encoding: xchunked\r\n", "5\r\nhello\r\n0\r\n\r\n"),
        post("transfer-encoding: chunked\r\n", "zz\r\nhello\r\n0\r\n\r\n"),
        post("transfer-encoding: chunked\r\n", "ffffffffffffffff1\r\nhello"),
        post("x-bad: a\u{0}b\r\ncontent-length: 0\r\n", ""),
        post(&format!("{}content-length: 0\r\n", "x-many: 1\r\n".repeat(1000)), ""),
        post(&format!("x-long: {}\r\ncontent-length: 0\r\n", "y".repeat(200 << 10)), ""),
        post("expect: 200-maybe\r\ncontent-length: 2\r\n", "{}"),
    ];
    for bytes in hostile {
        let mut caller = Caller::connect(gateway.http).await;
        caller.send_raw(bytes.as_bytes()).await;
        caller.finish_sending().await;
        let answer = String::from_utf8_lossy(&caller.rest().await).into_owned();
        let status = answer.split(' ').nth(1).unwrap_or("none").to_owned();
        let start: String = bytes.chars().take(120).collect();
        assert!(!["200", "500", "502"].contains(&status.as_str()), "{start:?} → {status}");
    }
    assert!(upstream.requests().is_empty(), "nothing hostile goes upstream");
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200, "still serving");
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

#[tokio::test]
async fn an_upgrade_opens_no_tunnel() {
    let (upstream, gateway) = healthy().await;
    let call = Call::post(whole_request()).header("connection", "Upgrade").header("upgrade", "websocket");
    let answer = call.send(gateway.http).await;
    assert!([200, 400].contains(&answer.status), "{}", answer.status);
    for seen in upstream.requests() {
        assert_eq!(seen.header("upgrade"), None);
    }
}

#[tokio::test]
async fn no_secret_stands_in_any_log() {
    let (_upstream, gateway) = healthy().await;
    Call::post(whole_request()).send(gateway.http).await;
    Call::post(whole_request())
        .header("authorization", &format!("bearer  {KEY} extra"))
        .send(gateway.http)
        .await;
    Call::post(whole_request()).path(&format!("/v1/chat/completions?key={KEY}")).send(gateway.http).await;
    gateway.wait_for_log("status=401");
    let log = gateway.log();
    for secret in [KEY, "prov-key-u0", "sk-test-beta", "\"hi\""] {
        assert!(!log.contains(secret), "{secret} in\n{log}");
    }
}

#[tokio::test]
async fn a_body_whose_length_is_said_twice_is_refused_and_its_connection_closed() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let smuggled = "GET /smuggled HTTP/1.1\r\nhost: g\r\n\r\n";
    for framing in [
        "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 5",
        "content-length: 5, 5",
        "content-length: 5\r\ncontent-length: 5",
        "content-length: 5\r\ncontent-length: 6",
        "content-length: +5",
        "content-length: -5",
        "content-length: 0x5",
    ] {
        let mut caller = Caller::connect(gateway.http).await;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n{framing}\r\n\r\n"
        );
        caller.send_raw(format!("{head}0\r\n\r\n{smuggled}").as_bytes()).await;
        let answers = String::from_utf8(caller.rest().await).unwrap();
        assert_eq!(answers.matches("HTTP/1.1 ").count(), 1, "{framing}: {answers}");
        assert!(answers.starts_with("HTTP/1.1 400 "), "{framing}: {answers}");
    }
    assert!(only.requests().is_empty());
}

#[tokio::test]
async fn no_level_of_logging_shows_a_key() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).log("trace,pingora_core::protocols=trace").start();
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    let elsewhere = Call::get("/v1/models/none?key=sk-in-a-query").send(gateway.http).await;
    assert_eq!(elsewhere.status, 404);
    gateway.wait_for_log("DEBUG");
    gateway.wait_for_log("status=404");
    let log = gateway.log();
    for secret in [KEY, "prov-key-u0", "sk-in-a-query"] {
        assert!(!log.contains(secret), "{secret} in\n{log}");
    }
}

#[tokio::test]
async fn sighup_does_not_cut_a_stream() {
    let only = upstream(script(r#"{"delay_chunk_ms":60}"#)).await;
    let gateway = Setup::new(&[only.address()]).start();
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    caller.read_until("Hello").await;
    gateway.signal("-HUP");
    gateway.wait_for_log("the config is read anew");
    caller.read_until("[DONE]").await;
}

#[tokio::test]
async fn a_connection_is_kept_or_closed_as_its_caller_asks() {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    let mut caller = Caller::connect(gateway.http).await;
    for _ in 0..2 {
        caller.send(&Call::post(stream_request())).await;
        assert_eq!(caller.next_answer().await.status, 200);
    }
    caller.send(&Call::post(stream_request()).header("connection", "close")).await;
    let last = String::from_utf8(caller.rest().await).unwrap();
    assert!(last.starts_with("HTTP/1.1 200") && last.contains("[DONE]"), "{last}");
}
