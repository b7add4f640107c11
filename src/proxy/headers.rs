//! Heads in both directions, built from an allow-list.
//!
//! Upstream: nothing of the caller's head goes out. Not their credentials, cookies or hop-by-hop
//! fields, not their address; only Anthropic's `anthropic-version` and `anthropic-beta`, which say what
//! the body means. Downstream: nothing of the provider's head comes in; its cookies, rate
//! limits and request ids speak of us, not of the caller.

use bytes::Bytes;
use filters::dialect::{Dialect, Operation};
use filters::limit::Standing;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HOST,
    InvalidHeaderValue, TRANSFER_ENCODING, USER_AGENT,
};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, Version};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::{ErrorType, OrErr as _};

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
const X_TOLLGATE_CLAMPED_OUTPUT: HeaderName = HeaderName::from_static("x-tollgate-clamped-output");
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
/// As many fields as a request to an upstream has at the most, and what Pingora adds.
const UPSTREAM_FIELDS: usize = 12;
/// As many as an answer has beside those of limits, and what Pingora adds: more would make the map anew.
const DOWNSTREAM_FIELDS: usize = 12;
/// The longest request id that is taken from a caller, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 128;
/// The longest version of Anthropic's API that is passed on, in bytes. A date has ten.
const VERSION_BYTES_MAX: usize = 32;
/// The version that is asked for where the caller names none.
const VERSION_DEFAULT: &str = "2023-06-01";
/// The longest list of Anthropic's betas that is passed on, in bytes.
const BETA_BYTES_MAX: usize = 1024;

/// The fields of a head. Pingora's own `insert_header` parses a field's name each time and keeps its spelling in a
/// second map; the names here are read once, and what goes out is the same.
struct Fields(HeaderMap);

impl Fields {
    /// Room for so many.
    fn with_room_for(count: usize) -> Self {
        Self(HeaderMap::with_capacity(count))
    }

    fn put(&mut self, name: HeaderName, value: HeaderValue) {
        self.0.insert(name, value);
    }

    fn fix(&mut self, name: HeaderName, value: &'static str) {
        self.put(name, HeaderValue::from_static(value));
    }

    fn text(&mut self, name: HeaderName, value: &str) -> pingora::Result<()> {
        self.try_put(name, HeaderValue::from_str(value))
    }

    /// The same without a copy.
    fn owned(&mut self, name: HeaderName, value: String) -> pingora::Result<()> {
        self.try_put(name, HeaderValue::from_maybe_shared(Bytes::from(value)))
    }

    fn try_put(
        &mut self,
        name: HeaderName,
        value: Result<HeaderValue, InvalidHeaderValue>,
    ) -> pingora::Result<()> {
        let invalid = |_| "a field's value holds what no head may hold";
        self.put(name, value.explain_err(ErrorType::InvalidHTTPHeader, invalid)?);
        Ok(())
    }
}

/// What the head of an attempt is made of.
pub(crate) struct Request<'a> {
    pub(crate) provider: &'a Provider,
    pub(crate) operation: Operation,
    pub(crate) credential: Option<&'a Secret>,
    pub(crate) stream: bool,
    pub(crate) body_bytes: usize,
    /// The caller's head.
    pub(crate) asked: &'a RequestHeader,
    /// As the connection has decided.
    pub(crate) version: Version,
}

/// The head of an attempt.
///
/// # Errors
/// When something that was configured cannot stand in a head.
pub(crate) fn upstream(request: &Request<'_>) -> pingora::Result<RequestHeader> {
    let Request { provider, operation, credential, stream, body_bytes, asked, version } = *request;
    let mut fields = Fields::with_room_for(UPSTREAM_FIELDS);
    let authority = provider.base.authority.as_str();
    let path = [provider.base.path.as_str(), operation.path()].concat();
    let target = if version == Version::HTTP_2 {
        let scheme = if provider.base.tls { "https" } else { "http" };
        Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build()
    } else {
        fields.text(HOST, authority)?;
        PathAndQuery::from_maybe_shared(Bytes::from(path)).map(Uri::from).map_err(http::Error::from)
    };
    fields.fix(CONTENT_TYPE, "application/json");
    fields.put(CONTENT_LENGTH, body_bytes.into());
    fields.fix(ACCEPT, if stream { "text/event-stream" } else { "application/json" });
    // A coded body could not be read event by event.
    fields.fix(ACCEPT_ENCODING, "identity");
    fields.fix(USER_AGENT, concat!("tollgate/", env!("CARGO_PKG_VERSION")));
    match (provider.dialect, credential) {
        (_, None) => {}
        (Dialect::OpenAi, Some(secret)) => {
            fields.owned(AUTHORIZATION, ["Bearer ", secret.expose()].concat())?;
        }
        (Dialect::Anthropic, Some(secret)) => fields.text(X_API_KEY, secret.expose())?,
    }
    match provider.dialect {
        Dialect::OpenAi => {}
        Dialect::Anthropic => {
            let version = sane(asked, &ANTHROPIC_VERSION, VERSION_BYTES_MAX);
            fields.text(ANTHROPIC_VERSION, version.as_deref().unwrap_or(VERSION_DEFAULT))?;
            if let Some(beta) = sane(asked, &ANTHROPIC_BETA, BETA_BYTES_MAX) {
                fields.text(ANTHROPIC_BETA, &beta)?;
            }
        }
    }
    let mut parts = http::Request::new(()).into_parts().0;
    parts.method = Method::POST;
    parts.version = version;
    parts.uri =
        target.explain_err(ErrorType::InvalidHTTPHeader, |_| "a base URL with a path that is none")?;
    parts.headers = fields.0;
    Ok(parts.into())
}

/// Whether the caller says that it speaks Anthropic's dialect.
pub(super) fn is_versioned(head: &RequestHeader) -> bool {
    head.headers.contains_key(ANTHROPIC_VERSION)
}

/// All lines of a header as one, if they are short and visible ASCII.
fn sane(head: &RequestHeader, name: &HeaderName, bytes_max: usize) -> Option<String> {
    let lines: Result<Vec<&str>, _> =
        head.headers.get_all(name).into_iter().map(HeaderValue::to_str).collect();
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
    let limits = usize::from(answered.standing.0.is_some()) + usize::from(answered.standing.1.is_some());
    let mut fields = Fields::with_room_for(DOWNSTREAM_FIELDS + limits * OF_REQUESTS.len());
    fields.fix(
        CONTENT_TYPE,
        if answered.stream { "text/event-stream; charset=utf-8" } else { "application/json" },
    );
    fields.fix(CACHE_CONTROL, "no-cache");
    if answered.stream {
        // nginx and its kin would hold the events back.
        fields.fix(X_ACCEL_BUFFERING, "no");
    }
    fields.text(X_REQUEST_ID, answered.request_id)?;
    fields.text(REQUEST_ID, answered.request_id)?;
    fields.text(X_TOLLGATE_UPSTREAM, answered.upstream)?;
    fields.put(X_TOLLGATE_ATTEMPTS, answered.attempts.into());
    if let Some(tokens) = answered.clamped {
        fields.put(X_TOLLGATE_CLAMPED_OUTPUT, tokens.into());
    }
    standing(&mut fields, OF_REQUESTS, answered.standing.0)?;
    standing(&mut fields, OF_TOKENS, answered.standing.1)?;
    match answered.whole {
        Some((bytes, cost_nano)) => {
            fields.put(CONTENT_LENGTH, bytes.into());
            fields.put(X_TOLLGATE_COST_NANO, cost_nano.into());
        }
        // HTTP/1.0 knows no chunks: its body ends with the connection. HTTP/2 has frames.
        None if answered.version == Version::HTTP_11 => fields.fix(TRANSFER_ENCODING, "chunked"),
        None => {}
    }
    let mut parts = http::Response::new(()).into_parts().0;
    parts.headers = fields.0;
    Ok(Box::new(parts.into()))
}

/// Tells the caller the call's id, where its SDK looks: `OpenAI`'s read `x-request-id`, Anthropic's `request-id`.
pub(super) fn name_request(head: &mut ResponseHeader, id: &str) -> pingora::Result<()> {
    head.insert_header(X_REQUEST_ID, id)?;
    head.insert_header(REQUEST_ID, id)
}

/// `x-ratelimit-…`, in `OpenAI`'s names and spelling.
fn standing(
    fields: &mut Fields,
    [of_limit, of_remaining, of_reset]: [HeaderName; 3],
    standing: Option<Standing>,
) -> pingora::Result<()> {
    let Some(Standing { limit, remaining, reset_seconds }) = standing else { return Ok(()) };
    fields.put(of_limit, limit.into());
    fields.put(of_remaining, remaining.into());
    fields.owned(of_reset, [itoa::Buffer::new().format(reset_seconds), "s"].concat())
}

/// Which trace the caller says that the call belongs to, where it says it once.
pub(super) fn traceparent(head: &RequestHeader) -> Option<&[u8]> {
    let mut said = head.headers.get_all("traceparent").iter();
    said.next().map(HeaderValue::as_bytes).filter(|_| said.next().is_none())
}

/// The caller's own request id, if it is sane.
pub(super) fn request_id(head: &RequestHeader) -> Option<String> {
    let text = head.headers.get(X_REQUEST_ID)?.to_str().ok()?;
    let sane = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
    ((1..=REQUEST_ID_BYTES_MAX).contains(&text.len()) && text.bytes().all(sane)).then(|| text.to_owned())
}
