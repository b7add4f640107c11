//! Heads in both directions, built from an allow-list.
//!
//! Upstream: nothing of the caller's head goes out. Not their credentials, cookies or hop-by-hop
//! fields, not their address; only Anthropic's `anthropic-version` and `anthropic-beta`, which say what
//! the body means. Downstream: nothing of the provider's head comes in; its cookies, rate
//! limits and request ids speak of us, not of the caller.

use filters::dialect::{Dialect, Operation};
use filters::limit::Standing;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HOST,
    TRANSFER_ENCODING, USER_AGENT,
};
use http::{HeaderName, Method, Version};
use pingora::http::{RequestHeader, ResponseHeader};

use crate::config::checked::Provider;
use crate::secret::Secret;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
// Names that are not of the standard are read once, not with every answer.
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const X_TOLLGATE_UPSTREAM: HeaderName = HeaderName::from_static("x-tollgate-upstream");
const X_TOLLGATE_ATTEMPTS: HeaderName = HeaderName::from_static("x-tollgate-attempts");
const X_TOLLGATE_COST_NANO: HeaderName = HeaderName::from_static("x-tollgate-cost-nano");
/// Of a limit: how much, how much is left, when it is whole again.
const OF_REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const OF_TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];
const ANTHROPIC_BETA: HeaderName = HeaderName::from_static("anthropic-beta");
/// The longest request id that is taken from a caller, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 128;
/// The longest version of Anthropic's API that is passed on, in bytes. A date has ten.
const VERSION_BYTES_MAX: usize = 32;
/// The version that is asked for where the caller names none.
const VERSION_DEFAULT: &str = "2023-06-01";
/// The longest list of Anthropic's betas that is passed on, in bytes.
const BETA_BYTES_MAX: usize = 1024;

/// The head of one attempt, for a caller whose head is `asked`.
pub(super) fn upstream(
    provider: &Provider,
    operation: Operation,
    credential: Option<&Secret>,
    stream: bool,
    body_bytes: usize,
    asked: &RequestHeader,
) -> pingora::Result<RequestHeader> {
    let path = format!("{}{}", provider.base.path, operation.path());
    let mut head = RequestHeader::build(Method::POST, path.as_bytes(), Some(8))?;
    head.insert_header(HOST, provider.base.authority())?;
    head.insert_header(CONTENT_TYPE, "application/json")?;
    head.insert_header(CONTENT_LENGTH, body_bytes.to_string())?;
    head.insert_header(ACCEPT, if stream { "text/event-stream" } else { "application/json" })?;
    // A coded body could not be read event by event.
    head.insert_header(ACCEPT_ENCODING, "identity")?;
    head.insert_header(USER_AGENT, concat!("tollgate/", env!("CARGO_PKG_VERSION")))?;
    if let Some(credential) = credential {
        let (name, value) = match provider.dialect {
            Dialect::OpenAi => (AUTHORIZATION, format!("Bearer {}", credential.expose())),
            Dialect::Anthropic => (X_API_KEY, credential.expose().to_owned()),
        };
        head.insert_header(name, value)?;
    }
    match provider.dialect {
        Dialect::OpenAi => {}
        Dialect::Anthropic => {
            let version = sane(asked, &ANTHROPIC_VERSION, VERSION_BYTES_MAX);
            head.insert_header(ANTHROPIC_VERSION, version.unwrap_or_else(|| VERSION_DEFAULT.to_owned()))?;
            if let Some(beta) = sane(asked, &ANTHROPIC_BETA, BETA_BYTES_MAX) {
                head.insert_header(ANTHROPIC_BETA, beta)?;
            }
        }
    }
    Ok(head)
}

/// Whether the caller says that it speaks Anthropic's dialect.
pub(super) fn is_versioned(head: &RequestHeader) -> bool {
    head.headers.contains_key(ANTHROPIC_VERSION)
}

/// All lines of a header as one, if they are short and visible ASCII.
fn sane(head: &RequestHeader, name: &HeaderName, bytes_max: usize) -> Option<String> {
    let lines: Result<Vec<&str>, _> =
        head.headers.get_all(name).into_iter().map(http::HeaderValue::to_str).collect();
    let text = lines.ok()?.join(",");
    let visible = text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    (visible && (1..=bytes_max).contains(&text.len())).then_some(text)
}

/// What the head of an answer tells the caller.
pub(super) struct Answered<'a> {
    pub(super) request_id: &'a str,
    pub(super) upstream: &'a str,
    pub(super) attempts: u32,
    pub(super) stream: bool,
    /// The body's length and the call's cost, where the whole answer is in hand.
    pub(super) whole: Option<(usize, i64)>,
    pub(super) version: Version,
    /// How requests and tokens per minute stand, where they are limited.
    pub(super) standing: (Option<Standing>, Option<Standing>),
    /// The output bound of one choice, where it was lowered.
    pub(super) clamped: Option<u64>,
}

/// The head of an answer.
pub(super) fn downstream(answered: &Answered<'_>) -> pingora::Result<Box<ResponseHeader>> {
    let mut head = ResponseHeader::build(200, Some(10))?;
    let kind = if answered.stream { "text/event-stream; charset=utf-8" } else { "application/json" };
    head.insert_header(CONTENT_TYPE, kind)?;
    head.insert_header(CACHE_CONTROL, "no-cache")?;
    if answered.stream {
        // nginx and its kin would hold the events back.
        head.insert_header(X_ACCEL_BUFFERING, "no")?;
    }
    name_request(&mut head, answered.request_id)?;
    head.insert_header(X_TOLLGATE_UPSTREAM, answered.upstream)?;
    head.insert_header(X_TOLLGATE_ATTEMPTS, answered.attempts.to_string())?;
    if let Some(tokens) = answered.clamped {
        head.insert_header("x-tollgate-clamped-output", tokens.to_string())?;
    }
    standing(&mut head, OF_REQUESTS, answered.standing.0)?;
    standing(&mut head, OF_TOKENS, answered.standing.1)?;
    match answered.whole {
        Some((bytes, cost_nano)) => {
            head.insert_header(CONTENT_LENGTH, bytes.to_string())?;
            head.insert_header(X_TOLLGATE_COST_NANO, cost_nano.to_string())?;
        }
        // HTTP/1.0 knows no chunks: its body ends with the connection. HTTP/2 has frames.
        None if answered.version == Version::HTTP_11 => head.insert_header(TRANSFER_ENCODING, "chunked")?,
        None => {}
    }
    Ok(Box::new(head))
}

/// Tells the caller the call's id, where its SDK looks: `OpenAI`'s read `x-request-id`, Anthropic's `request-id`.
pub(super) fn name_request(head: &mut ResponseHeader, id: &str) -> pingora::Result<()> {
    head.insert_header(X_REQUEST_ID, id)?;
    head.insert_header(REQUEST_ID, id)
}

/// `x-ratelimit-…`, in `OpenAI`'s names and spelling.
fn standing(
    head: &mut ResponseHeader,
    [of_limit, of_remaining, of_reset]: [HeaderName; 3],
    standing: Option<Standing>,
) -> pingora::Result<()> {
    let Some(Standing { limit, remaining, reset_seconds }) = standing else { return Ok(()) };
    head.insert_header(of_limit, limit.to_string())?;
    head.insert_header(of_remaining, remaining.to_string())?;
    head.insert_header(of_reset, format!("{reset_seconds}s"))
}

/// The caller's own request id, if it is sane.
pub(super) fn request_id(head: &RequestHeader) -> Option<String> {
    let text = head.headers.get(X_REQUEST_ID)?.to_str().ok()?;
    let sane = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
    ((1..=REQUEST_ID_BYTES_MAX).contains(&text.len()) && text.bytes().all(sane)).then(|| text.to_owned())
}
