//! Promises of the mock, kept over real sockets.

#![expect(clippy::string_slice, reason = "the tests cut their own ASCII")]

use std::io::ErrorKind;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const ASK: &str = r#"{"model":"m","stream":true}"#;
const ASK_USAGE: &str = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#;
const ASK_WHOLE: &str = r#"{"model":"m"}"#;

async fn mock(script: Script) -> Mock {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    Mock::start(listener, script).await.unwrap()
}

fn faulty(fault: Fault) -> Script {
    Script { fault: Some(fault), ..Script::default() }
}

fn anthropic() -> Script {
    Script { dialect: Dialect::Anthropic, ..Script::default() }
}

/// All that came until the connection ended, and how it ended.
struct Reply {
    text: String,
    failure: Option<ErrorKind>,
}

impl Reply {
    fn status(&self) -> &str {
        self.text.get(9..12).unwrap_or_default()
    }

    fn body(&self) -> &str {
        self.text.split_once("\r\n\r\n").map_or("", |(_, body)| body)
    }

    /// The HTTP chunks of the body, and whether the last, empty one was there.
    fn chunks(&self) -> (Vec<&str>, bool) {
        let mut chunks = Vec::new();
        let mut rest = self.body();
        while let Ok(httparse::Status::Complete((line, size))) = httparse::parse_chunk_size(rest.as_bytes()) {
            if size == 0 {
                return (chunks, true);
            }
            let end = line + usize::try_from(size).unwrap();
            chunks.push(&rest[line..end]);
            rest = &rest[end + 2..];
        }
        (chunks, false)
    }

    fn events(&self) -> String {
        self.chunks().0.concat()
    }
}

fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: mock\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

async fn exchange(mock: &Mock, request: &str) -> Reply {
    let mut stream = TcpStream::connect(mock.address()).await.unwrap();
    // A refusal may come, and the connection go, before the whole request was taken.
    let _refused_early = stream.write_all(request.as_bytes()).await;
    let mut bytes = Vec::new();
    let failure = stream.read_to_end(&mut bytes).await.err().map(|failure| failure.kind());
    Reply { text: String::from_utf8_lossy(&bytes).into_owned(), failure }
}

async fn chat(mock: &Mock, body: &str) -> Reply {
    exchange(mock, &post("/v1/chat/completions", body)).await
}

/// Sends and reads until `needle` has come.
async fn begin(mock: &Mock, request: &str, needle: &str) -> TcpStream {
    let mut stream = TcpStream::connect(mock.address()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(needle) {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "ended before {needle:?}");
    }
    stream
}

#[tokio::test]
async fn a_healthy_openai_stream_is_one_chunk_per_event() {
    let mock = mock(Script::default()).await;
    let reply = chat(&mock, ASK).await;
    let (chunks, complete) = reply.chunks();
    assert!(complete);
    assert_eq!(chunks.len(), 7, "opener, four pieces, finish, done: {chunks:?}");
    assert_eq!(
        chunks[1],
        "data: {\"id\":\"chatcmpl-mock-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello\"},\"finish_reason\":null}]}\n\n"
    );
    assert_eq!(chunks[6], "data: [DONE]\n\n");
    for chunk in &chunks[..6] {
        serde_json::from_str::<serde_json::Value>(chunk.trim().strip_prefix("data: ").unwrap()).unwrap();
    }
    assert_eq!(mock.disconnects(), 0, "a peer that took the whole answer did not disconnect");
}

#[tokio::test]
async fn a_healthy_anthropic_stream_has_every_event_in_order() {
    let mock = mock(anthropic()).await;
    let events = exchange(&mock, &post("/v1/messages", ASK)).await.events();
    let names: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let delta = "content_block_delta";
    assert_eq!(
        names,
        [
            "message_start",
            "content_block_start",
            "ping",
            delta,
            delta,
            delta,
            delta,
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    for data in events.lines().filter_map(|line| line.strip_prefix("data: ")) {
        serde_json::from_str::<serde_json::Value>(data).unwrap();
    }
    assert!(events.contains(r#""input_tokens":10"#) && events.contains(r#""usage":{"output_tokens":5}"#));
}

#[tokio::test]
async fn openai_usage_is_streamed_only_on_request_and_only_if_scripted() {
    let mock = mock(Script::default()).await;
    assert!(!chat(&mock, ASK).await.text.contains("usage"));
    let events = chat(&mock, ASK_USAGE).await.events();
    assert_eq!(events.matches(r#""usage":null"#).count(), 6, "{events}");
    assert_eq!(events.matches(r#""choices":[],"usage":{"prompt_tokens":10"#).count(), 1, "{events}");
    mock.set_script(Script { usage: None, ..Script::default() });
    assert!(!chat(&mock, ASK_USAGE).await.text.contains("usage"));
}

#[tokio::test]
async fn whole_answers_are_json_in_both_dialects() {
    let mock = mock(Script { model: Some("other".into()), ..Script::default() }).await;
    let reply = chat(&mock, ASK_WHOLE).await;
    let answer: serde_json::Value = serde_json::from_str(reply.body()).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello, world!");
    assert_eq!((&answer["model"], &answer["usage"]["total_tokens"]), (&"other".into(), &15.into()));
    let usage = UsageScript { cached: 4, ..UsageScript::default() };
    mock.set_script(Script { usage: Some(usage), ..anthropic() });
    let reply = exchange(&mock, &post("/v1/messages", ASK_WHOLE)).await;
    let answer: serde_json::Value = serde_json::from_str(reply.body()).unwrap();
    assert_eq!(answer["content"][0]["text"], "Hello, world!");
    assert_eq!((&answer["usage"]["input_tokens"], &answer["usage"]["output_tokens"]), (&6.into(), &5.into()));
}

#[tokio::test]
async fn odd_writes_carry_the_identical_bytes() {
    let script = Script { comments: 2, ..Script::default() };
    let mock = mock(script.clone()).await;
    let usual = chat(&mock, ASK_USAGE).await.events();
    for size in [1, 7, 1 << 20] {
        mock.set_script(Script { bytes_per_write: Some(size), ..script.clone() });
        let reply = chat(&mock, ASK_USAGE).await;
        let (chunks, complete) = reply.chunks();
        assert!(complete && chunks.concat() == usual, "cut to {size}");
        assert_eq!(chunks.len(), usual.len().div_ceil(size), "cut to {size}");
    }
}

#[tokio::test]
async fn endings_and_openers_can_be_left_out() {
    let mock = mock(Script { openers: false, done: false, finish: false, ..Script::default() }).await;
    assert_eq!(chat(&mock, ASK).await.chunks().0.len(), 4, "nothing but pieces");
}

#[tokio::test]
async fn a_scripted_status_strikes_as_often_as_told() {
    let fault = Fault::Status { code: 429, body: None, retry_after: Some("7".into()) };
    let mock = mock(Script { fault_count: Some(1), ..faulty(fault) }).await;
    let reply = exchange(&mock, "GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    assert_eq!(reply.status(), "200", "faults are for completions");
    let reply = chat(&mock, ASK).await;
    assert_eq!(reply.status(), "429");
    assert!(reply.text.contains("\r\nretry-after: 7\r\n") && reply.body().contains("rate_limit_error"));
    assert_eq!(chat(&mock, ASK).await.status(), "200");
}

#[tokio::test]
async fn a_reset_is_a_reset_and_a_close_is_not() {
    let mock = mock(faulty(Fault::ResetBeforeHead)).await;
    let reply = chat(&mock, ASK).await;
    assert_eq!((reply.text.as_str(), reply.failure), ("", Some(ErrorKind::ConnectionReset)));
    mock.set_script(faulty(Fault::CloseBeforeHead));
    let reply = chat(&mock, ASK).await;
    assert_eq!((reply.text.as_str(), reply.failure), ("", None));
    mock.set_script(faulty(Fault::ResetAfterHead));
    let reply = chat(&mock, ASK).await;
    assert_eq!((reply.status(), reply.body(), reply.failure), ("200", "", Some(ErrorKind::ConnectionReset)));
    mock.set_script(faulty(Fault::ResetAfterPieces { pieces: 2 }));
    let reply = chat(&mock, ASK).await;
    assert_eq!((reply.chunks().0.len(), reply.failure), (3, Some(ErrorKind::ConnectionReset)));
    assert_eq!(mock.disconnects(), 0, "the mock left, not its peer");
}

#[tokio::test]
async fn a_cut_body_is_incomplete_and_an_ended_one_is_complete() {
    let mock = mock(faulty(Fault::CutAfterPieces { pieces: 2 })).await;
    let reply = chat(&mock, ASK).await;
    assert_eq!((reply.chunks().0.len(), reply.chunks().1, reply.failure), (3, false, None));
    let reply = chat(&mock, ASK_WHOLE).await;
    assert!(reply.body().starts_with('{') && !reply.body().ends_with('}'), "half a body");
    mock.set_script(faulty(Fault::EndAfterPieces { pieces: 2 }));
    let reply = chat(&mock, ASK).await;
    assert_eq!((reply.chunks().0.len(), reply.chunks().1), (3, true));
    assert!(!reply.text.contains("[DONE]") && !reply.text.contains("stop"));
}

#[tokio::test]
async fn an_error_event_ends_a_stream_that_began_well() {
    let mock = mock(faulty(Fault::ErrorEvent { pieces: 1, body: None })).await;
    let reply = chat(&mock, ASK).await;
    let (chunks, complete) = reply.chunks();
    assert!(complete && chunks.len() == 3 && chunks[2].starts_with(r#"data: {"error":{"#), "{chunks:?}");
    let fault = Fault::ErrorEvent { pieces: 0, body: Some("{\n}".into()) };
    mock.set_script(Script { fault: Some(fault), ..anthropic() });
    let events = exchange(&mock, &post("/v1/messages", ASK)).await.events();
    assert!(events.ends_with("event: error\ndata: {\ndata: }\n\n"), "{events}");
}

#[tokio::test]
async fn answers_can_be_empty_or_a_page_or_no_http_at_all() {
    let mock = mock(faulty(Fault::Empty)).await;
    let reply = chat(&mock, ASK).await;
    assert!(reply.status() == "200" && reply.text.contains("content-length: 0\r\n"));
    mock.set_script(faulty(Fault::Html));
    assert!(chat(&mock, ASK).await.body().starts_with("<!doctype html>"));
    mock.set_script(faulty(Fault::Garbage));
    assert!(!chat(&mock, ASK).await.text.starts_with("HTTP"));
}

#[tokio::test]
async fn a_peer_that_leaves_a_hanging_answer_is_noticed_and_counted() {
    let mock = mock(faulty(Fault::HangBeforeHead)).await;
    let request = post("/v1/chat/completions", ASK);
    let mut stream = TcpStream::connect(mock.address()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    mock.wait_for_requests(1).await;
    assert_eq!((mock.open_connections(), mock.disconnects()), (1, 0));
    drop(stream);
    mock.wait_for_disconnects(1).await;
    mock.set_script(faulty(Fault::HangAfterHead));
    drop(begin(&mock, &request, "\r\n\r\n").await);
    mock.wait_for_disconnects(2).await;
    mock.set_script(faulty(Fault::HangAfterPieces { pieces: 1 }));
    drop(begin(&mock, &request, "Hello").await);
    mock.wait_for_disconnects(3).await;
    mock.set_script(Script { delay_chunk_ms: 3_600_000, ..Script::default() });
    drop(begin(&mock, &request, "Hello").await);
    mock.wait_for_disconnects(4).await;
    mock.wait_for_open_connections(0).await;
    assert_eq!(mock.requests()[3].sent.len(), 3, "head, opener, one piece and no more");
}

#[tokio::test]
async fn write_times_show_the_scripted_delays() {
    let mock =
        mock(Script { delay_first_event_ms: 15, delay_chunk_ms: 10, openers: false, ..Script::default() })
            .await;
    chat(&mock, ASK).await;
    let seen = mock.requests().remove(0);
    let waits: Vec<bool> =
        seen.sent.windows(2).map(|pair| pair[1] - pair[0] >= Duration::from_millis(10)).collect();
    assert_eq!(waits[..4], [true; 4], "head to first event, then between four pieces");
    assert!(seen.at <= seen.sent[0]);
}

#[tokio::test]
async fn a_connection_serves_requests_one_after_another() {
    let mock = mock(Script::default()).await;
    let whole = "POST /v1/chat/completions HTTP/1.1\r\nX-Key: a\r\ncontent-length: 2\r\n\r\n{}";
    let chunked = "POST /v1/chat/completions HTTP/1.1\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\nt: 1\r\n\r\n";
    let reply = exchange(&mock, &format!("{whole}{chunked}{}", post("/v1/other?a=b", ""))).await;
    assert_eq!(reply.text.matches("HTTP/1.1 200").count(), 2, "{}", reply.text);
    assert_eq!(reply.text.matches("HTTP/1.1 100").count(), 1);
    assert_eq!(reply.text.matches("HTTP/1.1 404").count(), 1);
    let seen = mock.requests();
    assert!(seen.iter().all(|request| request.connection == 0));
    assert_eq!((seen[0].header("x-key"), &seen[1].body[..]), (Some("a"), &b"{}"[..]));
    assert_eq!(seen[2].path, "/v1/other?a=b");
}

#[tokio::test]
async fn nonsense_is_refused_and_not_recorded() {
    let mock = mock(Script::default()).await;
    assert_eq!(exchange(&mock, "nonsense\r\n\r\n").await.status(), "400");
    let long = format!("GET / HTTP/1.1\r\na: {}", "b".repeat(64 << 10));
    assert_eq!(exchange(&mock, &long).await.status(), "431");
    let huge = "POST / HTTP/1.1\r\ncontent-length: 67108865\r\n\r\n";
    assert_eq!(exchange(&mock, huge).await.status(), "413");
    assert!(mock.requests().is_empty());
    assert_eq!(chat(&mock, "[]").await.status(), "400");
    assert_eq!(mock.requests().len(), 1, "a request whose JSON is wrong was still whole");
}

#[tokio::test]
async fn a_running_mock_is_steered_over_http() {
    let mock = mock(Script::default()).await;
    let put = |body: &str| post("/__mock/script", body).replacen("POST", "PUT", 1);
    assert_eq!(exchange(&mock, &put(r#"{"fault":{"kind":"html"}}"#)).await.status(), "204");
    assert!(chat(&mock, ASK).await.text.contains("text/html"));
    let reply = exchange(&mock, &put(r#"{"falt":1}"#)).await;
    assert!(reply.status() == "400" && reply.body().contains("falt"));
    let reply = exchange(&mock, "GET /__mock/requests HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    let seen: serde_json::Value = serde_json::from_str(reply.body()).unwrap();
    assert_eq!(seen.as_array().unwrap().len(), 1, "control requests are not recorded");
    assert_eq!((&seen[0]["body"], &seen[0]["body_bytes"]), (&ASK.into(), &ASK.len().into()));
}

#[tokio::test]
async fn stopping_ends_connections_and_refuses_new_ones() {
    let mock = mock(faulty(Fault::HangAfterHead)).await;
    let address = mock.address();
    let mut stream = begin(&mock, &post("/v1/chat/completions", ASK), "\r\n\r\n").await;
    mock.stop();
    let end = stream.read(&mut [0; 1]).await;
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    assert!(TcpStream::connect(address).await.is_err(), "the listener went with its connections");
}

#[tokio::test]
async fn scripted_words_are_said_as_they_are_at_any_path_and_faults_strike_them_too() {
    let words = |whole: &str, events: &[&str]| Words {
        whole: whole.into(),
        events: events.iter().copied().map(String::from).collect(),
    };
    let answers = [
        (
            "/v1/chat/completions".to_owned(),
            words(r#"{"a": 1}"#, &["data: {\"b\": 2}\n\n", "data: [DONE]\n\n"]),
        ),
        ("/v1/embeddings".to_owned(), words(r#"{"c": 3}"#, &[])),
    ];
    let script = Script { answers: answers.into(), ..Script::default() };
    let mock = mock(script.clone()).await;
    assert_eq!(chat(&mock, ASK_WHOLE).await.body(), r#"{"a": 1}"#);
    assert_eq!(chat(&mock, ASK).await.events(), "data: {\"b\": 2}\n\ndata: [DONE]\n\n");
    let embeddings = exchange(&mock, &post("/v1/embeddings", ASK)).await;
    assert_eq!((embeddings.status(), embeddings.body()), ("200", r#"{"c": 3}"#), "no events: whole");
    mock.set_script(Script { fault: Some(Fault::CutAfterPieces { pieces: 1 }), ..script });
    let reply = chat(&mock, ASK).await;
    let (chunks, complete) = reply.chunks();
    assert_eq!((chunks.as_slice(), complete), (&["data: {\"b\": 2}\n\n"][..], false));
}

#[tokio::test]
async fn a_peer_that_left_early_is_counted() {
    let mock = mock(faulty(Fault::HangAfterPieces { pieces: 1 })).await;
    drop(begin(&mock, &post("/v1/chat/completions", ASK), "Hello").await);
    mock.wait_for_disconnects(1).await;
    let counts = exchange(&mock, "GET /__mock/counts HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    let counts: serde_json::Value = serde_json::from_str(counts.body()).unwrap();
    assert_eq!(counts, serde_json::json!({ "requests": 1, "disconnects": 1 }));
}

#[tokio::test]
async fn every_surface_has_its_own_shape_and_path() {
    let mock = mock(Script::default()).await;
    let whole = async |path: &str, body: &str| {
        let reply = exchange(&mock, &post(path, body)).await;
        serde_json::from_str::<serde_json::Value>(reply.body()).unwrap()
    };
    let text = whole("/v1/completions", ASK_WHOLE).await;
    assert_eq!(
        (&text["object"], &text["choices"][0]["text"]),
        (&"text_completion".into(), &"Hello, world!".into())
    );
    let response = whole("/v1/responses", ASK_WHOLE).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "Hello, world!");
    assert_eq!((&response["status"], &response["usage"]["input_tokens"]), (&"completed".into(), &10.into()));
    for (input, count) in [(r#""a""#, 1), (r#"["a","b"]"#, 2), ("[1,2,3]", 1), ("[[1],[2],[3]]", 3)] {
        let list = whole("/v1/embeddings", &format!(r#"{{"model":"m","input":{input}}}"#)).await;
        assert_eq!(list["data"].as_array().unwrap().len(), count, "{input}");
        assert_eq!(list["data"][0]["embedding"].as_array().unwrap().len(), 3);
    }
    let base64 = whole("/v1/embeddings", r#"{"input":"a","encoding_format":"base64"}"#).await;
    assert!(base64["data"][0]["embedding"].is_string());
    mock.set_script(anthropic());
    assert_eq!(
        whole("/v1/messages/count_tokens", ASK_WHOLE).await,
        serde_json::json!({ "input_tokens": 10 })
    );
    mock.set_script(Script { surfaces: Some(vec![Surface::Chat]), ..Script::default() });
    assert_eq!(exchange(&mock, &post("/v1/embeddings", ASK_WHOLE)).await.status(), "404");
    assert_eq!(chat(&mock, ASK_WHOLE).await.status(), "200");
}

#[tokio::test]
async fn a_response_streams_numbered_events_of_the_types_that_they_are_called() {
    let mock = mock(Script::default()).await;
    let events = exchange(&mock, &post("/v1/responses", ASK)).await.events();
    for (at, event) in events.split("\n\n").filter(|event| !event.is_empty()).enumerate() {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
        assert_eq!(data["sequence_number"], at);
    }
    assert!(events.contains("event: response.completed\n"), "{events}");
    let text = exchange(&mock, &post("/v1/completions", ASK)).await.events();
    assert!(text.contains(r#""text":"Hello""#) && text.ends_with("data: [DONE]\n\n"), "{text}");
}
