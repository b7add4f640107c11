//! What two readers could read differently is refused, and its connection ends: no second request hides in a first one,
//! no path has two spellings, and nothing that a caller says of connections or origins goes on.

use super::super::support::{Call, Caller, Gateway, KEY, Setup, script, upstream, whole_request};
use tollgate::mock::{Mock, Script};

/// What hides behind a body whose end is in doubt.
const HIDDEN: &str = "GET /v1/hidden HTTP/1.1\r\nhost: g\r\n\r\n";

async fn healthy() -> (Mock, Gateway) {
    let only = upstream(Script::default()).await;
    let gateway = Setup::new(&[only.address()]).start();
    (only, gateway)
}

/// Sends bytes, reads until the gateway closes; answers every status and all of the text.
async fn statuses(gateway: &Gateway, bytes: &[u8]) -> (Vec<u16>, String) {
    let mut caller = Caller::connect(gateway.http).await;
    caller.send_raw(bytes).await;
    let text = String::from_utf8_lossy(&caller.rest().await).into_owned();
    let lines = text.split("HTTP/1.1 ").skip(1);
    (lines.filter_map(|line| line.split(' ').next()?.parse().ok()).collect(), text)
}

/// An error in the caller's dialect.
fn is_error_of(path: &str, text: &str) -> bool {
    let Some((_, body)) = text.split_once("\r\n\r\n") else { return false };
    let Ok(body) = serde_json::from_str::<serde_json::Value>(body) else { return false };
    let has_message = body["error"]["message"].as_str().is_some_and(|message| !message.is_empty());
    let is_anthropic = body["type"] == "error";
    has_message && is_anthropic == path.starts_with("/v1/messages")
}

const PATHS: [&str; 2] = ["/v1/chat/completions", "/v1/messages"];

/// Codings that two readers could read differently.
const CODINGS: [&str; 22] = [
    "content-length: 5\r\ntransfer-encoding: chunked",
    "transfer-encoding: chunked\r\ncontent-length: 5",
    "transfer-encoding: chunked\r\nContent-Length : 5",
    "transfer-encoding : chunked",
    "transfer-encoding: chunked, identity",
    "transfer-encoding: identity",
    "transfer-encoding: xchunked",
    "transfer-encoding: gzip, chunked",
    "transfer-encoding: chunked, chunked",
    "transfer-encoding: ,chunked",
    "transfer-encoding: chunked,",
    "transfer-encoding: chunked;q=1",
    "transfer-encoding: \"chunked\"",
    "transfer-encoding: \u{b}chunked",
    "transfer-encoding: chunked\u{0}",
    "transfer-encoding:",
    "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    "transfer-encoding: chunked\r\ntransfer-encoding: identity",
    "transfer-encoding: identity\r\ntransfer-encoding: chunked",
    "x: y\r\n transfer-encoding: chunked",
    "x: y\ntransfer-encoding: chunked",
    "x: y\rtransfer-encoding: chunked",
];

/// Lengths that two readers could read differently.
const LENGTHS: [&str; 12] = [
    "content-length: 5, 5",
    "content-length: 5\r\ncontent-length: 5",
    "content-length: 5\r\ncontent-length: 6",
    "content-length: +5",
    "content-length: -1",
    "content-length: 0x5",
    "content-length: 5 5",
    "content-length:",
    "content-length : 5",
    "content-length: \u{b}5",
    "content-length: 99999999999999999999",
    "x: y\ncontent-length: 5",
];

#[tokio::test]
async fn a_body_whose_end_is_in_doubt_is_a_400_and_the_last_of_its_connection() {
    let (only, gateway) = healthy().await;
    for framing in CODINGS.iter().chain(&LENGTHS) {
        for path in PATHS {
            for version in ["1.1", "1.0"] {
                let head =
                    format!("POST {path} HTTP/{version}\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n");
                let sent = format!("{head}{framing}\r\n\r\n0\r\n\r\n{HIDDEN}");
                let (seen, text) = statuses(&gateway, sent.as_bytes()).await;
                assert_eq!(seen, [400], "{version} {framing:?}: {text}");
                assert!(is_error_of(path, &text), "{version} {framing:?}: {text}");
            }
        }
    }
    // What is only unusual is read as it is meant: the hidden request is one, since the body before it is over.
    for framing in ["transfer-encoding:\tchunked", "Transfer-Encoding: CHUNKED ", "content-length: 5"] {
        let head =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n");
        let last = HIDDEN.replace("host: g", "host: g\r\nconnection: close");
        let (seen, text) =
            statuses(&gateway, format!("{head}{framing}\r\n\r\n0\r\n\r\n{last}").as_bytes()).await;
        assert_eq!(seen, [400, 404], "{framing:?}: {text}");
    }
    assert!(only.requests().is_empty(), "nothing in doubt goes upstream");
}

/// Targets that name one of our paths only to a reader who tidies up.
const TARGETS: [&str; 22] = [
    "//v1/chat/completions",
    "//v1//",
    "/v1//chat/completions",
    "/v1/../v1/chat/completions",
    "/v1/x/../chat/completions",
    "/v1/./chat/completions",
    "/v1/chat/completions/",
    "/v1/chat/completions;x=1",
    "/v1/chat%2fcompletions",
    "/v1/chat/%63ompletions",
    "/%761/chat/completions",
    "/%2e%2e/v1/chat/completions",
    "/v1/chat/completions%00",
    "/v1/chat/completions%0d%0ax:%20y",
    "/V1/chat/completions",
    "/v1/chat\\completions",
    "v1/chat/completions",
    "/v1/chat/completions\u{0}",
    "/v1/chat/completions\u{7f}",
    "/v1/chat/completions\t",
    "*",
    "evil.test:443",
];

/// A request with a body that would be served.
fn asks(method: &str, target: &str, headers: &str) -> Vec<u8> {
    let body = whole_request();
    let length = body.len();
    format!(
        "{method} {target} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[tokio::test]
async fn a_path_has_one_spelling_and_no_target_leads_elsewhere() {
    let (only, gateway) = healthy().await;
    for target in TARGETS {
        let (seen, text) = statuses(&gateway, &asks("POST", target, "")).await;
        assert_eq!(seen, [404], "{target:?}: {text}");
        assert!(is_error_of(target, &text), "{target:?}: {text}");
    }
    // The absolute form, as to a proxy, is read where its authority is ours, and refused elsewhere.
    for target in [
        "http://evil.test/v1/chat/completions",
        "http://127.0.0.1:9/v1/chat/completions",
        "http://169.254.169.254/latest/meta-data",
        "http://user@g/v1/chat/completions",
        "file:///etc/passwd",
        "",
    ] {
        let (seen, text) = statuses(&gateway, &asks("POST", target, "")).await;
        assert_eq!(seen, [400], "{target:?}: {text}");
    }
    for method in ["CONNECT", "TRACE", "OPTIONS", "PUT", "DELETE", "HEAD", "PRI", "post"] {
        for target in ["/v1/chat/completions", "/v1/messages", "g:443"] {
            let (seen, text) = statuses(&gateway, &asks(method, target, "")).await;
            let allowed = if target == "g:443" { [404, 405, 400] } else { [405; 3] };
            assert!(seen.len() == 1 && allowed.contains(&seen[0]), "{method} {target}: {seen:?} {text}");
            assert!(!text.contains(KEY), "{method}: a request is not repeated to its sender: {text}");
        }
    }
    assert!(only.requests().is_empty(), "nothing of it goes upstream");
    let (seen, text) = statuses(&gateway, &asks("POST", "http://g/v1/chat/completions", "")).await;
    assert_eq!(seen, [200], "{text}");
    assert_eq!(only.requests()[0].path, "/v1/chat/completions");
}

#[tokio::test]
async fn a_line_break_in_a_header_makes_no_second_one() {
    let (only, gateway) = healthy().await;
    for header in [
        "x: a\rb: c",
        "x: a\nb: c",
        "x: a\u{0}b",
        "x: a\u{7f}b",
        "x\u{0}: a",
        "x y: a",
        "x : a",
        ": a",
        "x",
        "authorization\u{b}: x",
        "x: a\r\n b",
        "host: h",
    ] {
        let (seen, text) =
            statuses(&gateway, &asks("POST", "/v1/chat/completions", &format!("{header}\r\n"))).await;
        assert_eq!(seen, [400], "{header:?}: {text}");
    }
    assert!(only.requests().is_empty());
    // What is escaped stays so, and what we repeat of the caller's words cannot hold a line break.
    let id = "x-request-id: a%0d%0ax-injected: 1\r\nanthropic-beta: b\tc\r\nanthropic-version: \u{e9}\r\n";
    let (seen, text) = statuses(&gateway, &asks("POST", "/v1/chat/completions", id)).await;
    assert_eq!(seen, [200], "{text}");
    assert!(!text.contains("x-injected"), "{text}");
}

#[tokio::test]
async fn nothing_that_a_caller_says_of_connections_and_origins_goes_upstream() {
    let openai = upstream(Script::default()).await;
    let anthropic = upstream(script(r#"{"dialect":"anthropic"}"#)).await;
    let said = [
        ("connection", "close, x-nominated, authorization"),
        ("x-nominated", "hop-value"),
        ("keep-alive", "timeout=hop-value"),
        ("proxy-connection", "hop-value"),
        ("proxy-authorization", "Basic hop-value"),
        ("proxy-authenticate", "hop-value"),
        ("te", "trailers, hop-value"),
        ("trailer", "hop-value"),
        ("upgrade", "hop-value"),
        ("http2-settings", "hop-value"),
        ("x-forwarded-for", "203.0.113.7"),
        ("x-forwarded-host", "203.0.113.7"),
        ("x-forwarded-proto", "hop-value"),
        ("x-real-ip", "203.0.113.7"),
        ("forwarded", "for=203.0.113.7"),
        ("via", "1.1 hop-value"),
        ("cf-connecting-ip", "203.0.113.7"),
        ("referer", "https://hop-value/"),
        ("origin", "https://hop-value"),
        ("cookie", "a=hop-value"),
        ("openai-organization", "hop-value"),
        ("user-agent", "hop-value"),
        ("range", "bytes=0-1"),
        ("expect", "hop-value"),
    ];
    for (only, dialect, path, body) in [
        (&openai, "openai", "/v1/chat/completions", whole_request()),
        (
            &anthropic,
            "anthropic",
            "/v1/messages",
            r#"{"model":"claude-a","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}"#.to_owned(),
        ),
    ] {
        let gateway = Setup::new(&[only.address()]).dialect(dialect).start();
        let mut call = Call::post(body).path(path);
        for (name, value) in said.iter().filter(|(name, _)| *name != "expect") {
            call = call.header(name, value);
        }
        let answer = call.send(gateway.http).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let seen = only.requests();
        let allowed = [
            "host",
            "content-type",
            "content-length",
            "accept",
            "accept-encoding",
            "user-agent",
            "authorization",
            "x-api-key",
            "anthropic-version",
        ];
        for (name, value) in &seen[0].headers {
            assert!(allowed.contains(&name.to_ascii_lowercase().as_str()), "{name}: {value}");
            assert!(!value.contains("hop-value") && !value.contains("203.0.113.7"), "{name}: {value}");
        }
        assert_eq!(seen[0].path, path);
    }
}
