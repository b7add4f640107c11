//! The test bed: a gateway process, scripted upstreams, a caller on a raw socket.

pub mod caller;
pub mod collector;
pub mod delay;
pub mod fleet;
pub mod gateway;
pub mod interim;
pub mod ledgers;
pub mod link;
pub mod postgres;
pub mod receiver;
pub mod redis;
pub mod tls;
pub mod tracker;

pub use caller::{Answer, Call, Caller};
pub use gateway::{Gateway, Setup, THREADS};

use tollgate::mock::{Mock, Script};

/// The key of the account `alpha`.
pub const KEY: &str = "sk-test-alpha";

/// A scripted upstream on a free port.
pub async fn upstream(script: Script) -> Mock {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    Mock::start(listener, script).await.expect("the mock starts")
}

/// A script from JSON, as `tollgate mock --script` takes it.
pub fn script(json: &str) -> Script {
    serde_json::from_str(json).unwrap_or_else(|e| panic!("{json}: {e}"))
}

/// A request for a streamed chat completion.
pub fn stream_request() -> String {
    r#"{"model":"gpt-a","stream":true,"messages":[{"role":"user","content":"hi"}]}"#.to_owned()
}

/// A request for a whole chat completion.
pub fn whole_request() -> String {
    r#"{"model":"gpt-a","messages":[{"role":"user","content":"hi"}]}"#.to_owned()
}

/// The contents of all deltas of an event stream, as a conforming reader joins them.
pub fn text_of(stream: &str) -> String {
    stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|data| serde_json::from_str::<serde_json::Value>(data).ok())
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect()
}

/// The texts of all deltas of a message's event stream.
pub fn message_text_of(stream: &str) -> String {
    stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|data| serde_json::from_str::<serde_json::Value>(data).ok())
        .filter_map(|event| event["delta"]["text"].as_str().map(str::to_owned))
        .collect()
}
