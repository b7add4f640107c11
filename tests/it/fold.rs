//! Whole answers folded out of streams: all of it or nothing, and a cut in the middle still finds the next.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use serde_json::{Value, json};
use tollgate::mock::{Mock, Script};

use super::support::{Call, Gateway, Setup, script, upstream, whole_request};

/// All routes fold.
fn folding(mocks: &[&Mock], providers: &str) -> Gateway {
    let addresses: Vec<_> = mocks.iter().map(|mock| mock.address()).collect();
    Setup::new(&addresses).routes("fold: true").providers(providers).start()
}

const QUICK: &str = "first_byte: 300ms, first_event: 600ms, idle: 300ms";

#[tokio::test]
async fn a_folded_answer_is_one_json_text_with_its_usage_and_its_exact_charge() {
    let mock = upstream(Script::default()).await;
    let gateway = folding(&[&mock], QUICK);
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    let said = answer.json();
    assert_eq!(said["object"], "chat.completion");
    assert_eq!((&said["model"], &said["choices"][0]["finish_reason"]), (&json!("gpt-a"), &json!("stop")));
    assert_eq!(said["choices"][0]["message"]["content"], "Hello, world!");
    assert_eq!(said["usage"]["completion_tokens"], 5);
    assert_eq!(answer.header("x-tollgate-cost-nano"), Some("75000"));
    let asked: Value = serde_json::from_slice(&mock.requests()[0].body).unwrap();
    assert_eq!((&asked["stream"], &asked["stream_options"]["include_usage"]), (&json!(true), &json!(true)));
    assert_eq!(mock.requests()[0].header("accept"), Some("text/event-stream"));
    assert_eq!(gateway.spent(1), 75_000);
}

#[tokio::test]
async fn a_cut_in_the_middle_of_a_fold_goes_to_the_next_and_costs_the_caller_nothing_more() {
    for fault in [
        r#"{"kind":"cut_after_pieces","pieces":2}"#,
        r#"{"kind":"reset_after_pieces","pieces":2}"#,
        r#"{"kind":"hang_after_pieces","pieces":2}"#,
        r#"{"kind":"error_event","pieces":2,"body":"{\"error\":{\"message\":\"busy\",\"code\":503}}"}"#,
    ] {
        let first = upstream(script(&format!(r#"{{"fault":{fault}}}"#))).await;
        let second = upstream(Script::default()).await;
        let gateway = folding(&[&first, &second], QUICK);
        let answer = Call::post(whole_request()).send(gateway.http).await;
        assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")), "{fault}");
        assert_eq!(answer.json()["choices"][0]["message"]["content"], "Hello, world!", "{fault}");
        assert_eq!(gateway.spent(1), 75_000, "{fault}");
        assert!(gateway.ledger_is_right(), "{fault}");
    }
}

#[tokio::test]
async fn explain_shows_a_folded_route_with_the_watchdogs_of_a_stream() {
    let mock = upstream(Script::default()).await;
    let gateway = folding(&[&mock], "first_byte: auto, first_event: auto");
    std::fs::write(gateway.folder().join("request.json"), whole_request()).unwrap();
    let told = gateway.command(&["explain", "request.json"]);
    assert!(told.contains("first_byte 5.0 s, first_event 5.0 s"), "{told}");
}

#[tokio::test]
async fn an_error_inside_the_only_fold_is_a_real_error_and_charges_nothing() {
    let mock = upstream(script(r#"{"fault":{"kind":"cut_after_pieces","pieces":2}}"#)).await;
    let gateway = folding(&[&mock], QUICK);
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "upstream_failed"));
    assert_eq!(gateway.spent(1), 0);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_caller_who_leaves_during_a_fold_pays_for_what_was_produced() {
    let mock =
        upstream(script(r#"{"delay_chunk_ms":50,"text":["one ","two ","three ","four ","five ","six "]}"#))
            .await;
    let gateway = folding(&[&mock], QUICK);
    let caller = Call::post(whole_request()).begin(gateway.http).await;
    mock.wait_for_requests(1).await;
    while mock.requests()[0].sent.len() < 4 {
        tokio::task::yield_now().await;
    }
    caller.reset();
    mock.wait_for_disconnects(1).await;
    let spent = gateway.spent(1);
    assert!(spent > 0 && spent < 10_000 * 40, "{spent}");
    assert!(gateway.ledger_is_right());
}

/// An upstream that begins every answer, says that it is busy, and wants to be asked again in two seconds.
async fn fickle() -> SocketAddr {
    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nretry-after: 2\r\nconnection: close\r\n\r\n\
        data: {\"id\":\"c\",\"model\":\"up-a\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"some words of an answer\"},\"finish_reason\":null}]}\n\n\
        data: {\"error\":{\"message\":\"busy\",\"code\":503}}\n\n";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut bytes = vec![0; 16 << 10];
            let mut read = 0;
            while !bytes[..read].ends_with(b"}") {
                read += socket.read(&mut bytes[read..]).await.unwrap();
            }
            socket.write_all(ANSWER.as_bytes()).await.unwrap();
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_who_leaves_between_two_attempts_pays_nothing_for_the_one_that_failed() {
    for (key, attempts) in [(None, 1), (Some("k-1"), 2)] {
        let setup = Setup::new(&[fickle().await]).routes("fold: true").providers(QUICK);
        let gateway = setup.routing("attempts_max: 2").start();
        let call = Call::post(whole_request());
        let call = if let Some(key) = key { call.header("idempotency-key", key) } else { call };
        let caller = call.begin(gateway.http).await;
        gateway.wait_for_log("outcome=\"failed\"");
        caller.reset();
        gateway.wait_until_settled().await;
        assert_eq!(gateway.spent(1), 0, "{key:?}");
        assert_eq!(gateway.log().matches("outcome=\"failed\"").count(), attempts, "a keyed call runs on");
        assert!(gateway.ledger_is_right());
    }
}

#[tokio::test]
async fn a_request_with_an_unknown_field_is_not_folded() {
    let mock = upstream(Script::default()).await;
    let gateway = folding(&[&mock], QUICK);
    let body = whole_request().replacen('{', r#"{"new_field":1,"#, 1);
    assert_eq!(Call::post(body).send(gateway.http).await.status, 200);
    let asked: Value = serde_json::from_slice(&mock.requests()[0].body).unwrap();
    assert_eq!(asked.get("stream"), None);
}

#[tokio::test]
async fn a_message_is_folded_too() {
    let mock = upstream(script(r#"{"dialect":"anthropic"}"#)).await;
    let gateway =
        Setup::new(&[mock.address()]).dialect("anthropic").routes("fold: true").providers(QUICK).start();
    let body = r#"{"model":"claude-a","max_tokens":50,"messages":[{"role":"user","content":"hi"}]}"#;
    let answer = Call::post(body).path("/v1/messages").send(gateway.http).await;
    let said = answer.json();
    assert_eq!((answer.status, &said["type"], &said["model"]), (200, &json!("message"), &json!("claude-a")));
    assert_eq!(said["content"], json!([{ "type": "text", "text": "Hello, world!" }]));
    assert_eq!(said["usage"]["output_tokens"], 5);
    let asked: Value = serde_json::from_slice(&mock.requests()[0].body).unwrap();
    assert_eq!(asked["stream"], true);
    assert_eq!(gateway.spent(1), 10 * 3_000 + 5 * 15_000);
}
