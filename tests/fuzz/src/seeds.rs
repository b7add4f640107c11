//! What the targets begin with: the bodies and byte scripts of the cases, so that they grow with them.

use std::io::Write as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use serde_json::Value;
use tollgate::journal::record::{Hold, Record, encode};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// What is longer teaches nothing more, and makes every run slower.
const SEED_BYTES_MAX: usize = 8 << 10;

/// The seeds of a target, always the same ones in the same order.
#[must_use]
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let cases = Cases::read();
    let mut seeds: Vec<Vec<u8>> = match target {
        "sse" => cases.streams.iter().map(|stream| [&[1][..], stream].concat()).collect(),
        "answer" => answers(&cases),
        "error" => cases
            .bodies
            .iter()
            .flat_map(|body| [[0, 1, 0], [1, 45, 1]].map(|head| after(&head, body)))
            .collect(),
        "request" => requests(&cases),
        "preferences" => cases.requests.iter().map(|(_, body)| body.clone()).chain(preferences()).collect(),
        "auth" => cases.headers.iter().map(|line| line.clone().into_bytes()).chain(keys()).collect(),
        "config" => configs(),
        "coding" => cases.streams.iter().flat_map(|text| coded(text)).collect(),
        "rest" => rests(&cases),
        "journal" => journals(),
        "fold" => {
            cases.streams.iter().flat_map(|stream| [after(&[0], stream), after(&[1], stream)]).collect()
        }
        _ => vec![],
    };
    seeds.retain(|seed| seed.len() <= SEED_BYTES_MAX);
    seeds.sort();
    seeds.dedup();
    seeds
}

/// What the cases hold.
#[derive(Default)]
struct Cases {
    /// Which operation, and the body.
    requests: Vec<(u8, Vec<u8>)>,
    streams: Vec<Vec<u8>>,
    bodies: Vec<Vec<u8>>,
    headers: Vec<String>,
}

impl Cases {
    fn read() -> Self {
        let text =
            std::fs::read_to_string(Path::new(ROOT).join("tests/cases/cases.jsonl")).expect("the cases");
        let mut cases = Self::default();
        for line in text.lines() {
            let case: Value = serde_json::from_str(line).expect("a case is JSON");
            cases.look_at(&case);
        }
        cases
    }

    fn look_at(&mut self, case: &Value) {
        let clients = case["sequence"].as_array().into_iter().flatten().chain([&case["client"]]);
        for client in clients {
            let path = client["path"].as_str().unwrap_or_default();
            match &client["body"] {
                Value::Null => {}
                body => self.requests.push((operation_of(path), body.to_string().into_bytes())),
            }
        }
        for upstream in case["upstreams"].as_array().into_iter().flatten() {
            let steps = upstream["script"].as_array().into_iter().flatten();
            let mut stream = vec![];
            for step in steps {
                for (name, value) in step["headers"].as_object().into_iter().flatten() {
                    self.headers.push(format!("{name}: {}", value.as_str().unwrap_or_default()));
                }
                match &step["body"] {
                    Value::Null => {}
                    Value::String(text) => self.bodies.push(text.clone().into_bytes()),
                    body => match &body["__raw__"] {
                        Value::String(raw) => self.bodies.push(raw.clone().into_bytes()),
                        _ => self.bodies.push(body.to_string().into_bytes()),
                    },
                }
                if step["status"].is_number() {
                    self.streams.push(std::mem::take(&mut stream));
                }
                stream.extend_from_slice(step["bytes"].as_str().unwrap_or_default().as_bytes());
                stream.extend(
                    STANDARD.decode(step["bytes_b64"].as_str().unwrap_or_default()).unwrap_or_default(),
                );
            }
            self.streams.push(stream);
        }
        self.streams.retain(|stream| !stream.is_empty());
    }
}

fn operation_of(path: &str) -> u8 {
    match path {
        "/v1/completions" => 1,
        "/v1/responses" => 2,
        "/v1/embeddings" => 3,
        "/v1/messages" => 4,
        "/v1/messages/count_tokens" => 5,
        _ => 0,
    }
}

fn after(head: &[u8], body: &[u8]) -> Vec<u8> {
    [head, body].concat()
}

/// Streams as streams and as folds, bodies as whole answers, of the operations whose they could be.
fn answers(cases: &Cases) -> Vec<Vec<u8>> {
    const STREAM: u8 = 1;
    const FOLD: u8 = 2;
    const SMALL: u8 = 32;
    let mut seeds = vec![];
    for stream in cases.streams.iter().cloned().chain(own_streams()) {
        for operation in [0, 1, 2, 4] {
            for flags in [STREAM, STREAM | 16, STREAM | SMALL, STREAM | 64, FOLD] {
                seeds.push(after(&[operation, flags, 0, 3], &stream));
            }
        }
    }
    for body in &cases.bodies {
        for operation in 0..6 {
            seeds.push(after(&[operation, 0, 2, 5], body));
            seeds.push(after(&[operation, SMALL, 2, 5], body));
        }
        seeds.push(after(&[0, STREAM, 3, 5], body));
    }
    seeds.push(after(&[0, STREAM, 0xf8, 9], &coded(&cases.streams[0])[0][2..]));
    seeds
}

/// Of the surfaces that the cases have few of.
fn own_streams() -> [Vec<u8>; 4] {
    let text = [
        "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"r\",\"object\":\"response\",\"model\":\"up-a\",\"status\":\"in_progress\",\"output\":[]}}\n\nevent: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":1,\"output_index\":0,\"content_index\":0,\"delta\":\"Hello\"}\n\nevent: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":2,\"response\":{\"id\":\"r\",\"object\":\"response\",\"model\":\"up-a\",\"status\":\"completed\",\"output\":[{\"type\":\"message\",\"content\":[{\"type\":\"output_text\",\"text\":\"Hello\"}]}],\"usage\":{\"input_tokens\":10,\"output_tokens\":5,\"input_tokens_details\":{\"cached_tokens\":2},\"output_tokens_details\":{\"reasoning_tokens\":1}}}}\n\n",
        "data: {\"id\":\"c\",\"object\":\"text_completion\",\"model\":\"up-a\",\"choices\":[{\"index\":0,\"text\":\"Hello\",\"finish_reason\":null}]}\n\ndata: {\"id\":\"c\",\"model\":\"up-a\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n",
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"up-c\",\"content\":[],\"usage\":{\"input_tokens\":10,\"cache_read_input_tokens\":3,\"cache_creation\":{\"ephemeral_5m_input_tokens\":1,\"ephemeral_1h_input_tokens\":2},\"output_tokens\":1}}}\n\nevent: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"f\",\"input\":{}}}\n\nevent: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"input_json_delta\",\"partial_json\":\"{}\"}}\n\nevent: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"tool_use\"},\"usage\":{\"output_tokens\":15}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        "event: ping\ndata: {\"type\":\"ping\"}\n\nevent: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n",
    ];
    text.map(|text| text.as_bytes().to_vec())
}

fn requests(cases: &Cases) -> Vec<Vec<u8>> {
    let own = [
        r#"{"models":["b","c"],"provider":{"order":["x"],"max_price":{"prompt":"1.5"}},"model":"a","messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]}],"stream":true,"stream_options":null,"n":2,"max_tokens":50}"#,
        r#"{"model":"a","prompt":["a",[1,2,3]],"echo":true,"best_of":3,"n":2,"suffix":"x"}"#,
        r#"{"model":"a","input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]}],"max_output_tokens":100,"tools":[{"type":"web_search"}],"previous_response_id":"r"}"#,
        r#"{"model":"a","input":[[1,2],[3]],"dimensions":8,"encoding_format":"base64"}"#,
        r#"{"model":"a","max_tokens":9,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{}}],"thinking":{"type":"enabled","budget_tokens":4}}"#,
    ];
    let own =
        own.into_iter().zip(0..).map(|(body, operation): (_, u8)| (operation, body.as_bytes().to_vec()));
    let all = cases.requests.iter().cloned().chain(own);
    all.flat_map(|(operation, body)| [2, 15].map(|flags| after(&[operation, flags], &body))).collect()
}

fn preferences() -> Vec<Vec<u8>> {
    let texts = [
        r#"{"models":["b"],"provider":{"only":["x"],"ignore":["y"],"allow_fallbacks":false,"sort":"price","require_parameters":true}}"#,
        r#"{ "a":1 , "provider" : null , "models":[] }"#,
        r#"{"model":"m","provider":{"sort":"latency","max_price":{"prompt":1,"completion":"2.5"}}}"#,
    ];
    texts.map(|text| text.as_bytes().to_vec()).into()
}

fn keys() -> Vec<Vec<u8>> {
    ["Bearer sk-test-alpha\nsk-test-beta\n\n", "bearer  x \na\nb\nc\nd", "Basic abc"]
        .map(|t| t.as_bytes().to_vec())
        .into()
}

/// The examples that operators get, without what names files.
fn configs() -> Vec<Vec<u8>> {
    let names = ["conf/tollgate.yaml", "conf/demo.yaml"];
    let texts = names.map(|name| std::fs::read_to_string(Path::new(ROOT).join(name)).expect("an example"));
    let plain = |text: String| -> String {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
        lines
            .filter(|line| !line.contains("_file") && !line.contains("certificate"))
            .fold(String::new(), |all, line| all + line + "\n")
    };
    let small = "listen: { http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }\nstore: { embedded: { path: ./data } }\nproviders: { p: { dialect: openai, base_url: \"http://host\", credential: \"${K:-k}\" } }\nmodels: { m: { price: { input: \"1.5\", output: 1 }, limits: { context: 9, output: 9 }, routes: [{ provider: p }] } }\n";
    texts.into_iter().map(plain).chain([small.to_owned()]).map(String::into_bytes).collect()
}

fn coded(text: &[u8]) -> [Vec<u8>; 2] {
    let mut gzip = GzEncoder::new(vec![0, 3], Compression::default());
    gzip.write_all(text).expect("memory");
    let mut zlib = ZlibEncoder::new(vec![1, 3], Compression::default());
    zlib.write_all(text).expect("memory");
    [gzip.finish().expect("memory"), zlib.finish().expect("memory")]
}

fn rests(cases: &Cases) -> Vec<Vec<u8>> {
    let now = 1_790_000_000_u32.to_le_bytes();
    let own = [
        "retry-after: Sun, 06 Nov 2094 08:49:37 GMT",
        "x-ratelimit-reset-requests: 6m0.5s\nx-ratelimit-remaining-requests: 0",
        "anthropic-ratelimit-tokens-reset: 2026-01-27T12:00:00.5+01:00\nanthropic-ratelimit-tokens-remaining: 0",
        "retry-after-ms: 1500\nretry-after: 2.5",
        "x-ratelimit-reset: 1790000009000",
    ];
    let lines = cases.headers.iter().filter(|line| line.contains("retry") || line.contains("ratelimit"));
    lines.map(String::as_str).chain(own).map(|line| after(&now, line.as_bytes())).collect()
}

fn journals() -> Vec<Vec<u8>> {
    let hold = Hold {
        id: 7,
        account: 1,
        amount: 5,
        at_ms: 9,
        request: "r".into(),
        model: "m".into(),
        key: [3; 32],
        price_version: 4,
        pool: None,
    };
    let mut journal = vec![];
    for record in [Record::Hold(hold), Record::Progress { id: 7, cost: 3 }, Record::Probe] {
        encode(&record, &mut journal).expect("it fits");
    }
    let payload = journal.get(8..).unwrap_or_default().to_vec();
    vec![journal, payload]
}
