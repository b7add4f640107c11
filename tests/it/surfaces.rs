//! Every surface keeps the promises of the first one: failover before the commit, exact charges, the model's
//! public name, errors in its own shape.

use serde_json::{Value, json};
use tollgate::mock::{Mock, Script};

use super::support::{Answer, Call, Gateway, KEY, Setup, script, upstream};

/// One call of each surface.
const SURFACES: [(&str, &str); 4] = [
    ("/v1/chat/completions", r#"{"model":"gpt-a","messages":[{"role":"user","content":"hi"}]}"#),
    ("/v1/completions", r#"{"model":"gpt-a","prompt":"Once upon a time"}"#),
    ("/v1/responses", r#"{"model":"gpt-a","input":"hi"}"#),
    ("/v1/embeddings", r#"{"model":"gpt-a","input":"abc"}"#),
];

fn ask(path: &str, body: impl Into<Vec<u8>>) -> Call {
    Call::post(body).path(path)
}

fn embed(input: &str) -> Call {
    ask("/v1/embeddings", format!(r#"{{"model":"gpt-a","input":{input}}}"#))
}

fn respond(fields: &str) -> Call {
    ask("/v1/responses", format!(r#"{{"model":"gpt-a","input":"hi"{fields}}}"#))
}

/// A call as Anthropic's SDKs make it.
fn claude(path: &str, body: &str) -> Call {
    ask(path, body)
        .without("authorization")
        .header("x-api-key", KEY)
        .header("anthropic-version", "2023-06-01")
}

const COUNT: &str = r#"{"model":"claude-a","messages":[{"role":"user","content":"hi"}]}"#;

async fn one(json: &str) -> (Mock, Gateway) {
    let only = upstream(script(json)).await;
    let gateway = Setup::new(&[only.address()]).providers("idle: 700ms").start();
    (only, gateway)
}

async fn two(first: &str) -> (Mock, Mock, Gateway) {
    let (first, second) = (upstream(script(first)).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).start();
    (first, second, gateway)
}

/// The typed events of a stream: their names and data.
fn events(answer: &Answer) -> Vec<(String, Value)> {
    let text = answer.text();
    let event = |event: &str| {
        let name = event.lines().find_map(|line| line.strip_prefix("event: "))?;
        let data = event.lines().find_map(|line| line.strip_prefix("data: "))?;
        Some((name.to_owned(), serde_json::from_str(data).unwrap()))
    };
    text.split("\n\n").filter_map(event).collect()
}

fn body_of(mock: &Mock, request: usize) -> String {
    String::from_utf8(mock.requests()[request].body.to_vec()).unwrap()
}

#[tokio::test]
async fn every_surface_goes_to_its_own_path_and_fails_over() {
    for (path, body) in SURFACES {
        for fault in [
            r#"{"kind":"status","code":503}"#,
            r#"{"kind":"close_before_head"}"#,
            r#"{"kind":"html"}"#,
            r#"{"kind":"empty"}"#,
        ] {
            let (first, second, gateway) = two(&format!(r#"{{"model":"x","fault":{fault}}}"#)).await;
            let answer = ask(path, body).send(gateway.http).await;
            assert_eq!(
                (answer.status, answer.header("x-tollgate-attempts")),
                (200, Some("2")),
                "{path} {fault}"
            );
            assert_eq!(answer.json()["model"], "gpt-a", "{path}");
            assert_eq!((first.requests()[0].path.as_str(), second.requests()[0].path.as_str()), (path, path));
            let nano = if path == "/v1/embeddings" { 10 * 2_500 } else { 10 * 2_500 + 5 * 10_000 };
            assert_eq!(answer.header("x-tollgate-cost-nano"), Some(nano.to_string().as_str()), "{path}");
            assert_eq!(gateway.spent(1), nano, "{path} {fault}");
        }
    }
}

#[tokio::test]
async fn a_fault_of_the_request_passes_once_on_every_surface() {
    for (path, body) in SURFACES {
        let error = r#"{\"error\":{\"message\":\"too long\",\"type\":\"invalid_request_error\",\"code\":\"context_length_exceeded\"}}"#;
        let fault = format!(r#"{{"fault":{{"kind":"status","code":400,"body":"{error}"}}}}"#);
        let (_first, second, gateway) = two(&fault).await;
        let answer = ask(path, body).send(gateway.http).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "context_length_exceeded"), "{path}");
        assert!(second.requests().is_empty());
        assert_eq!(gateway.spent(1), 0);
    }
}

#[tokio::test]
async fn embeddings_are_charged_their_input_and_held_for_nothing_else() {
    let only = upstream(Script::default()).await;
    // A model without output; a balance that would never carry a thousand tokens of it.
    let gateway = Setup::new(&[only.address()]).limits("context: 8191, output: 0").balance("0.001").start();
    let body = r#"{"model":"gpt-a","input":["abc","de"],"x":1.10}"#;
    let answer = ask("/v1/embeddings", body).send(gateway.http).await;
    assert_eq!((answer.status, answer.json()["data"].as_array().unwrap().len()), (200, 2));
    assert_eq!(body_of(&only, 0), body.replace("gpt-a", "up-a"), "and no bound of output");
    assert_eq!(gateway.account("alpha", 1).balance_nano, 1_000_000 - 10 * 2_500);
    let line = &gateway.statement("alpha")[0];
    assert_eq!((line.prompt_tokens, line.completion_tokens, line.estimated), (10, 0, false));
    let chat = Call::post(SURFACES[0].1).send(gateway.http).await;
    assert_eq!((chat.status, chat.code().as_str()), (404, "model_not_found"));
    assert!(chat.text().contains("It is served at `POST /v1/embeddings`."), "{}", chat.text());
}

#[tokio::test]
async fn embeddings_of_any_length_pass_unchanged_but_for_the_models_name() {
    for (inputs, dimensions, base64) in
        [(40, 600, false), (40, 600, true), (700, 1_536, false), (1_100, 1_536, true)]
    {
        let (only, gateway) = one(&format!(r#"{{"dimensions":{dimensions}}}"#)).await;
        let list = format!("[{}]", vec![r#""a""#; inputs].join(","));
        let format = if base64 { "base64" } else { "float" };
        let body = format!(r#"{{"model":"gpt-a","encoding_format":"{format}","input":{list}}}"#);
        let direct = ask("/v1/embeddings", body.replace("gpt-a", "up-a")).send(only.address()).await.body;
        let passed = ask("/v1/embeddings", body).send(gateway.http).await;
        assert!(passed.clean && direct.len() > 64 << 10, "{} bytes", direct.len());
        let tail = direct.len() - 100;
        assert_eq!(passed.body[..tail], direct[..tail], "{inputs} {format}");
        let rest = String::from_utf8_lossy(&direct[tail..]).replace("up-a", "gpt-a");
        assert_eq!(String::from_utf8_lossy(&passed.body[tail..]), rest);
        assert_eq!(gateway.spent(1), 10 * 2_500, "{inputs} texts of {} bytes", direct.len());
    }
}

#[tokio::test]
async fn embeddings_without_usage_are_charged_by_our_own_count() {
    for (input, tokens) in [("[15339,1917,0]", 3), ("[[1,2],[3],[4,5,6,7]]", 7), (r#"["abcd","efghi"]"#, 3)] {
        let (_only, gateway) = one(r#"{"usage":null}"#).await;
        assert_eq!(embed(input).send(gateway.http).await.status, 200, "{input}");
        assert_eq!(gateway.spent(1), tokens * 2_500, "{input}");
        let line = &gateway.statement("alpha")[0];
        assert!(line.estimated && line.completion_tokens == 0, "{line:?}");
    }
}

#[tokio::test]
async fn text_completions_keep_the_apis_own_bound_of_sixteen() {
    let (only, gateway) = one(r#"{"model":"up-a"}"#).await;
    let answer = ask("/v1/completions", SURFACES[1].1).send(gateway.http).await;
    assert_eq!(answer.json()["choices"][0]["text"], "Hello, world!");
    assert_eq!(
        body_of(&only, 0),
        r#"{"model":"up-a","max_tokens":16,"prompt":"Once upon a time"}"#,
        "the field that this surface has, whatever chat completions need"
    );
    let asked = r#"{"model":"gpt-a","prompt":["a","b"],"max_tokens":7,"n":2,"best_of":3}"#;
    assert_eq!(ask("/v1/completions", asked).send(gateway.http).await.status, 200);
    assert_eq!(body_of(&only, 1), asked.replace("gpt-a", "up-a"));
}

#[tokio::test]
async fn everything_that_best_of_makes_is_held_for() {
    let only = upstream(Script::default()).await;
    let hold = |samples: i64, body: &str| {
        let input = i64::try_from(body.len()).unwrap() + 2 * 4 + 16;
        input * 2_500 + samples * 100 * 10_000
    };
    let body = r#"{"model":"gpt-a","prompt":["a","b"],"max_tokens":100,"n":2,"best_of":5}"#;
    for (nano, status) in [(hold(10, body) - 1, 402), (hold(10, body), 200)] {
        let gateway = Setup::new(&[only.address()]).balance(&format!("{nano}e-9")).start();
        let answer = ask("/v1/completions", body).send(gateway.http).await;
        assert_eq!(answer.status, status, "{}", answer.text());
    }
}

#[tokio::test]
async fn a_stream_of_text_passes_and_its_usage_stays_hidden() {
    let (only, gateway) = one("{}").await;
    let body = r#"{"model":"gpt-a","prompt":"Once","stream":true}"#;
    let answer = ask("/v1/completions", body).send(gateway.http).await;
    let text: String = answer
        .text()
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, "Hello, world!");
    assert!(answer.text().ends_with("data: [DONE]\n\n") && !answer.text().contains("usage"));
    assert!(body_of(&only, 0).contains(r#""stream_options":{"include_usage":true}"#));
    assert_eq!(gateway.spent(1), 75_000);
}

#[tokio::test]
async fn a_response_streams_with_typed_events_and_its_public_model() {
    let (only, gateway) = one(r#"{"model":"up-a","usage":{"prompt":100,"completion":7,"cached":60}}"#).await;
    let answer = respond(r#","stream":true,"metadata":{"z":1.10}"#).send(gateway.http).await;
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    let events = events(&answer);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
    let delta = "output_text.delta";
    assert_eq!(
        names,
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            delta,
            delta,
            delta,
            delta,
            "output_text.done",
            "output_item.done",
            "completed"
        ]
    );
    for (at, (name, data)) in events.iter().enumerate() {
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(at)));
        if data["response"].is_object() {
            assert_eq!(data["response"]["model"], "gpt-a");
        }
    }
    assert!(!answer.text().contains("up-a"));
    assert_eq!(
        body_of(&only, 0),
        r#"{"model":"up-a","max_output_tokens":1000,"input":"hi","stream":true,"metadata":{"z":1.10}}"#
    );
    assert_eq!(gateway.spent(1), 40 * 2_500 + 60 * 1_250 + 7 * 10_000);
}

#[tokio::test]
async fn any_cutting_of_the_bytes_gives_the_same_response() {
    let (_only, gateway) = one("{}").await;
    let expected = respond(r#","stream":true"#).send(gateway.http).await.text();
    for size in [1, 7, 4096] {
        let (_only, gateway) = one(&format!(r#"{{"bytes_per_write":{size}}}"#)).await;
        assert_eq!(
            respond(r#","stream":true"#).send(gateway.http).await.text(),
            expected,
            "{size} bytes a write"
        );
        assert_eq!(gateway.spent(1), 75_000);
    }
}

const FAILED: &str = r#"{\"type\":\"response.failed\",\"sequence_number\":5,\"response\":{\"id\":\"r\",\"model\":\"up-a\",\"status\":\"failed\",\"error\":{\"code\":\"server_error\",\"message\":\"secret words\"}}}"#;

#[tokio::test]
async fn a_response_that_fails_before_its_first_word_goes_to_the_next_candidate() {
    for body in
        [FAILED, r#"{\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"x\",\"param\":null}"#]
    {
        let fault = format!(r#"{{"fault":{{"kind":"error_event","pieces":0,"body":"{body}"}}}}"#);
        let (first, second, gateway) = two(&fault).await;
        let answer = respond(r#","stream":true"#).send(gateway.http).await;
        let events = events(&answer);
        assert_eq!((answer.status, events.len(), events[10].0.as_str()), (200, 11, "response.completed"));
        assert_eq!((first.requests().len(), second.requests().len()), (1, 1));
        assert_eq!(gateway.spent(1), 75_000, "the first attempt costs its caller nothing");
    }
}

#[tokio::test]
async fn a_response_whose_prompt_is_at_fault_is_not_tried_again() {
    let body = FAILED.replace("server_error", "invalid_prompt");
    let fault = format!(r#"{{"fault":{{"kind":"error_event","pieces":0,"body":"{body}"}}}}"#);
    let (_first, second, gateway) = two(&fault).await;
    let answer = respond(r#","stream":true"#).send(gateway.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_prompt"));
    assert!(second.requests().is_empty());
}

#[tokio::test]
async fn a_response_that_fails_after_its_first_word_ends_with_an_error_event_of_its_own_shape() {
    for fault in [
        format!(r#"{{"kind":"error_event","pieces":2,"body":"{FAILED}"}}"#),
        r#"{"kind":"cut_after_pieces","pieces":2}"#.to_owned(),
        r#"{"kind":"end_after_pieces","pieces":2}"#.to_owned(),
    ] {
        let (_only, gateway) = one(&format!(r#"{{"fault":{fault}}}"#)).await;
        let answer = respond(r#","stream":true"#).send(gateway.http).await;
        let events = events(&answer);
        let (name, data) = events.last().unwrap();
        assert_eq!(
            (name.as_str(), &data["type"], &data["code"]),
            ("error", &json!("error"), &json!("upstream_failed"))
        );
        let before = &events[events.len() - 2].1["sequence_number"];
        assert!(data["sequence_number"].as_u64() > before.as_u64(), "{data} behind {before}");
        assert!(
            answer.clean && !answer.text().contains("secret words") && !answer.text().contains("completed")
        );
        // "Hello, " are two tokens of our own count; "hi" is one, and four more stand around it.
        assert_eq!(gateway.spent(1), 5 * 2_500 + 2 * 10_000, "{fault}");
    }
}

#[tokio::test]
async fn a_caller_that_leaves_a_response_pays_for_what_was_made() {
    let (only, gateway) = one(r#"{"fault":{"kind":"hang_after_pieces","pieces":3}}"#).await;
    let mut caller = respond(r#","stream":true"#).begin(gateway.http).await;
    assert_eq!(caller.head().await.status, 200);
    caller.read_until("world").await;
    caller.reset();
    only.wait_for_disconnects(1).await;
    gateway.wait_until_settled().await;
    // "Hello, world" has 12 bytes.
    assert_eq!(gateway.spent(1), 5 * 2_500 + 3 * 10_000);
    assert!(gateway.statement("alpha")[0].estimated);
}

#[tokio::test]
async fn a_response_without_usage_is_charged_by_all_that_it_said() {
    for fields in [r#","stream":true"#, ""] {
        let (_only, gateway) = one(r#"{"usage":null}"#).await;
        assert_eq!(respond(fields).send(gateway.http).await.status, 200);
        // "Hello, world!" has 13 bytes; its events repeat it twice, which counts once.
        assert_eq!(gateway.spent(1), 5 * 2_500 + 4 * 10_000, "{fields}");
    }
}

#[tokio::test]
async fn what_cannot_be_metered_or_priced_is_refused_before_anything_is_held() {
    let (only, gateway) = one("{}").await;
    for (fields, param) in [
        (r#","background":true"#, "background"),
        (r#","tools":[{"type":"web_search"}]"#, "tools"),
        (r#","tools":[{"type":"code_interpreter","container":{"type":"auto"}}]"#, "tools"),
    ] {
        let answer = respond(fields).send(gateway.http).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_value"), "{fields}");
        assert_eq!(answer.json()["error"]["param"], param);
    }
    let search = r#"{"model":"gpt-a","web_search_options":{},"messages":[{"role":"user","content":"hi"}]}"#;
    assert_eq!(Call::post(search).send(gateway.http).await.json()["error"]["param"], "web_search_options");
    assert!(only.requests().is_empty());
    let functions = r#","tools":[{"type":"function","name":"f","parameters":{}}]"#;
    assert_eq!(respond(functions).send(gateway.http).await.status, 200);
}

#[tokio::test]
async fn what_has_no_price_passes_where_the_operator_says_so() {
    let messages = |fields: &str| {
        format!(
            r#"{{"model":"claude-a","max_tokens":100,"messages":[{{"role":"user","content":"hi"}}]{fields}}}"#
        )
    };
    let search = messages(r#","tools":[{"type":"web_search_20250305","name":"web_search"}]"#);
    let fast = messages(r#","speed":"fast""#);
    let only = upstream(script(r#"{"dialect":"anthropic"}"#)).await;
    for (unpriced, statuses) in [("[]", [400, 400]), ("[server_tools]", [200, 400]), ("[speed]", [400, 200])]
    {
        let setup = Setup::new(&[only.address()]).dialect("anthropic").balance("10.00");
        let gateway = setup.model(&format!("unpriced: {unpriced}")).start();
        for (body, status) in [&search, &fast].into_iter().zip(statuses) {
            let answer = claude("/v1/messages", body).send(gateway.http).await;
            assert_eq!(answer.status, status, "{unpriced} {}", answer.text());
        }
    }
}

#[tokio::test]
async fn what_an_earlier_response_holds_is_bounded_by_the_window() {
    let only = upstream(Script::default()).await;
    let window = 128_000 * 2_500 + 100 * 10_000;
    for (nano, status) in [(window - 1, 402), (window, 200)] {
        let gateway = Setup::new(&[only.address()]).balance(&format!("{nano}e-9")).start();
        let asked = respond(r#","previous_response_id":"resp_1","max_output_tokens":100"#);
        assert_eq!(asked.send(gateway.http).await.status, status);
    }
}

#[tokio::test]
async fn counting_tokens_is_free_and_needs_no_balance() {
    let first = upstream(script(r#"{"dialect":"anthropic","fault":{"kind":"status","code":529}}"#)).await;
    let second = upstream(script(r#"{"dialect":"anthropic","usage":{"prompt":2095}}"#)).await;
    let setup = Setup::new(&[first.address(), second.address()]).dialect("anthropic").balance("0");
    let gateway = setup.key("limits: { rpm: 2 }").start();
    let answer = claude("/v1/messages/count_tokens", COUNT).send(gateway.http).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, r#"{"input_tokens":2095}"#));
    assert_eq!(answer.header("x-tollgate-attempts"), Some("2"));
    assert_eq!(answer.header("x-tollgate-cost-nano"), Some("0"));
    assert_eq!(second.requests()[0].path, "/v1/messages/count_tokens");
    assert_eq!(body_of(&second, 0), COUNT.replace("claude-a", "up-c"), "no bound of output is written");
    let row = gateway.account("alpha", 1);
    assert_eq!(row.balance_nano, 0);
    assert_eq!(gateway.statement("alpha").len(), 0, "nothing moved");
    let id = answer.header("x-request-id").unwrap();
    let past = Call::get(&format!("/v1/generation?id={id}")).send(gateway.http).await.json();
    assert_eq!((&past["data"]["cost_nano"], &past["data"]["attempts"]), (&json!(0), &json!(2)), "{past}");
    let paid = claude("/v1/messages", &COUNT.replace("\"messages\"", "\"max_tokens\":9,\"messages\""));
    assert_eq!(paid.send(gateway.http).await.status, 402, "a message is not free");
    assert_eq!(claude("/v1/messages/count_tokens", COUNT).send(gateway.http).await.status, 200);
    let third = claude("/v1/messages/count_tokens", COUNT).send(gateway.http).await;
    assert_eq!((third.status, third.code().as_str()), (429, "rate_limit_exceeded"), "two a minute");
    let nobody = claude("/v1/messages/count_tokens", COUNT).header("x-api-key", "sk-nobody");
    assert_eq!(nobody.send(gateway.http).await.status, 401);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_provider_is_asked_only_for_what_it_serves() {
    let (first, second) = (upstream(Script::default()).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).provider(0, "surfaces: [chat]").start();
    for (path, body) in SURFACES {
        let answer = ask(path, body).send(gateway.http).await;
        assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("1")), "{path}");
    }
    assert_eq!((first.requests().len(), second.requests().len()), (1, 3));
    let alone = Setup::new(&[first.address()]).provider(0, "surfaces: [chat, embeddings]").start();
    let answer = respond("").send(alone.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"));
    let served = "It is served at `POST /v1/chat/completions`, `POST /v1/embeddings`.";
    assert!(answer.text().contains(served), "{}", answer.text());
    assert_eq!(first.requests().len(), 1);
}

#[tokio::test]
async fn a_server_that_lacks_a_path_is_passed_over_and_not_blamed() {
    let chat_only = r#"{"surfaces":["chat"]}"#;
    let (_first, second, gateway) = two(chat_only).await;
    for (path, body) in SURFACES.into_iter().skip(1) {
        let answer = ask(path, body).send(gateway.http).await;
        assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")), "{path}");
    }
    let weight = gateway.endpoint_metric("tollgate_endpoint_factor", "u0/up-a").await;
    assert!((weight - 1.0).abs() < f64::EPSILON, "{weight}");
    assert_eq!(second.requests().len(), 3);
    let (_only, gateway) = one(chat_only).await;
    let answer = respond("").send(gateway.http).await;
    assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"));
    assert!(answer.text().contains("`surfaces`"), "ours, and not the server's: {}", answer.text());
    assert_eq!(gateway.spent(1), 0);
}

#[tokio::test]
async fn explain_tells_of_the_surface_that_was_asked() {
    let (first, second) = (upstream(Script::default()).await, upstream(Script::default()).await);
    let gateway = Setup::new(&[first.address(), second.address()]).provider(0, "surfaces: [chat]").start();
    std::fs::write(gateway.folder().join("request.json"), SURFACES[3].1).unwrap();
    let told = gateway.command(&["explain", "request.json", "--surface", "embeddings"]);
    assert!(told.contains("u1/up-a") && !told.contains("u0/up-a"), "{told}");
    std::fs::write(gateway.folder().join("request.json"), SURFACES[0].1).unwrap();
    let told = gateway.command(&["explain", "request.json"]);
    assert!(told.contains("u1/up-a") && told.contains("u0/up-a"), "{told}");
    assert!(gateway.try_command(&["explain", "request.json", "--surface", "nothing"]).is_err());
}

#[tokio::test]
async fn what_the_caller_wants_of_the_routing_never_goes_upstream_on_any_surface() {
    for (path, body) in SURFACES {
        let (_first, second, gateway) = two("{}").await;
        let asked = body.replacen('{', r#"{"provider":{"order":["u1"]},"#, 1);
        let answer = ask(path, asked).send(gateway.http).await;
        assert_eq!(answer.status, 200, "{path} {}", answer.text());
        assert!(!body_of(&second, 0).contains("provider"), "{path}");
    }
}
