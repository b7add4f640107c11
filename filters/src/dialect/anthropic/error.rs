//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
//!
//! Our stable `code` stands beside the type as `error.code`; SDKs look at the type and pass the rest on.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::verdict::{Reason, Rejection, UpstreamError};

/// Every type that the API names, with the status it comes with.
const KINDS: [(&str, u16); 10] = [
    ("invalid_request_error", 400),
    ("authentication_error", 401),
    ("billing_error", 402),
    ("permission_error", 403),
    ("not_found_error", 404),
    ("request_too_large", 413),
    ("rate_limit_error", 429),
    ("api_error", 500),
    ("timeout_error", 504),
    ("overloaded_error", 529),
];

/// The body of an error response.
#[must_use]
pub fn body(rejection: &Rejection, request_id: &str) -> Bytes {
    Bytes::from(shape(rejection, request_id).to_string())
}

/// The event that ends a stream which cannot be finished. SDKs raise on it; a plain cut they take for
/// a normal end.
#[must_use]
pub fn event(rejection: &Rejection, request_id: &str) -> Bytes {
    Bytes::from(format!("event: error\ndata: {}\n\n", shape(rejection, request_id)))
}

fn shape(rejection: &Rejection, request_id: &str) -> Value {
    let theirs = rejection.upstream.as_deref().and_then(kind_of);
    json!({
        "type": "error",
        "error": {
            "type": theirs.unwrap_or_else(|| kind(rejection.reason)),
            "message": rejection.message,
            "code": rejection.reason.code(),
        },
        "request_id": request_id,
    })
}

/// The type under which a caller of this dialect finds our reason.
#[must_use]
pub const fn kind(reason: Reason) -> &'static str {
    match reason {
        Reason::InvalidJson
        | Reason::MissingField
        | Reason::InvalidValue
        | Reason::DuplicateField
        | Reason::InvalidRequest
        | Reason::MethodNotAllowed
        | Reason::IdempotencyConflict
        | Reason::IdempotencyMismatch
        | Reason::UnsupportedEncoding
        | Reason::UpstreamRefused => "invalid_request_error",
        Reason::InvalidKey => "authentication_error",
        Reason::InsufficientBalance => "billing_error",
        Reason::ModelNotAllowed => "permission_error",
        Reason::ModelNotFound | Reason::GenerationNotFound | Reason::UnknownPath => "not_found_error",
        Reason::BodyTooLarge | Reason::HeadTooLarge => "request_too_large",
        Reason::RateLimited => "rate_limit_error",
        Reason::Internal
        | Reason::UpstreamFailed
        | Reason::UpstreamCredential
        | Reason::NoUpstream
        | Reason::StoreUnavailable
        | Reason::ShuttingDown => "api_error",
        Reason::Overloaded => "overloaded_error",
        Reason::BodyTimeout | Reason::UpstreamTimeout => "timeout_error",
    }
}

/// The type of an upstream's error as a caller may see it: a known one, and none that would blame the
/// caller's key for trouble with ours.
fn kind_of(error: &UpstreamError) -> Option<&'static str> {
    if error.is_about_our_credential() {
        return None;
    }
    let named = KINDS.iter().find(|(kind, _)| *kind == error.kind);
    named.or_else(|| KINDS.iter().find(|(_, status)| *status == error.status)).map(|(kind, _)| *kind)
}

/// Reads an error body. What is no JSON leaves its text out: an HTML page is nobody's message.
#[must_use]
pub fn read(status: u16, body: &[u8]) -> UpstreamError {
    let Ok(value) = serde_json::from_slice::<Value>(body) else {
        return UpstreamError { status, ..UpstreamError::default() };
    };
    let error = value.get("error").unwrap_or(&value);
    let text = |key: &str| error.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let message = error.as_str().map_or_else(|| text("message"), str::to_owned);
    UpstreamError { status, message, kind: text("type"), code: text("code"), param: None }
}

/// Reads an error that came with a 200; its status is the one that its type stands for. What nobody
/// knows is the upstream's trouble.
#[must_use]
pub fn read_event(text: &[u8]) -> UpstreamError {
    let mut error = read(500, text);
    if let Some((_, status)) = KINDS.iter().find(|(kind, _)| *kind == error.kind) {
        error.status = *status;
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::failure::Failure;

    fn value(bytes: &Bytes) -> Value {
        serde_json::from_slice(bytes).unwrap()
    }

    #[test]
    fn an_error_event_stands_for_a_status() {
        for (kind, status) in KINDS.into_iter().chain([("something_new", 500), ("", 500)]) {
            let text = format!(r#"{{"type":"error","error":{{"type":"{kind}","message":"m"}}}}"#);
            let error = read_event(text.as_bytes());
            assert_eq!((error.status, error.message.as_str()), (status, "m"), "{kind}");
        }
        for text in ["boom", "{}", r#"{"error":"boom"}"#, "{\"error\":{\"type\":7}}"] {
            assert_eq!(read_event(text.as_bytes()).status, 500, "{text}");
        }
    }

    #[test]
    fn a_plan_that_is_used_up_is_our_trouble() {
        let body = br#"{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the API."}}"#;
        assert!(read(400, body).is_about_our_credential());
        assert!(
            !read(400, br#"{"error":{"type":"invalid_request_error","message":"no"}}"#)
                .is_about_our_credential()
        );
    }

    #[test]
    fn our_errors_have_the_callers_shape() {
        let rejection = Rejection::new(Reason::InvalidValue, "`stream` must be true.").context("secret");
        let found = value(&body(&rejection, "req_1"));
        assert_eq!(
            found,
            json!({
                "type": "error",
                "error": { "type": "invalid_request_error", "message": "`stream` must be true.", "code": "invalid_value" },
                "request_id": "req_1",
            })
        );
        let event = event(&rejection, "req_1");
        assert!(event.starts_with(b"event: error\ndata: {") && event.ends_with(b"}\n\n"));
    }

    #[test]
    fn every_reason_has_a_type_that_the_api_knows() {
        for reason in Reason::ALL {
            assert!(KINDS.iter().any(|(known, _)| *known == kind(reason)), "{reason:?}");
        }
    }

    #[test]
    fn the_upstreams_type_is_kept_unless_it_is_strange_or_speaks_of_our_credential() {
        for (status, theirs, seen) in [
            (529, "overloaded_error", "overloaded_error"),
            (429, "rate_limit_error", "rate_limit_error"),
            (400, "<script>", "invalid_request_error"),
            (404, "", "not_found_error"),
            (503, "", "api_error"),
            (401, "authentication_error", "api_error"),
            (402, "billing_error", "api_error"),
        ] {
            let mut rejection = Rejection::new(Reason::UpstreamFailed, "It broke off.");
            let upstream = UpstreamError { status, kind: theirs.into(), ..UpstreamError::default() };
            rejection.upstream = Some(Box::new(upstream));
            assert_eq!(value(&body(&rejection, "r"))["error"]["type"], seen, "{status} {theirs}");
        }
    }

    #[test]
    fn overload_fails_over_and_a_callers_fault_does_not() {
        let failure = |kind: &str| {
            let text = format!(r#"{{"type":"error","error":{{"type":"{kind}"}}}}"#);
            Failure::from_status(read_event(text.as_bytes()).status)
        };
        assert!(failure("overloaded_error").fails_over() && failure("overloaded_error").blames_endpoint());
        assert!(failure("authentication_error").fails_over());
        assert!(!failure("invalid_request_error").fails_over());
    }
}
