//! Errors in `OpenAI`'s shape: `{"error": {"message", "type", "param", "code"}}`.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::verdict::{Reason, Rejection, UpstreamError};

/// The body of an error response.
#[must_use]
pub fn body(rejection: &Rejection) -> Bytes {
    Bytes::from(shape(rejection).to_string())
}

/// The event that ends a stream which cannot be finished. SDKs raise on a top-level `error`; a
/// plain cut they take for a normal end.
#[must_use]
pub fn event(rejection: &Rejection) -> Bytes {
    Bytes::from(format!("data: {}\n\n", ours(rejection)))
}

fn shape(rejection: &Rejection) -> Value {
    if let Some(upstream) = &rejection.upstream {
        let or_ours =
            |text: &str, ours: &'static str| if text.is_empty() { ours.to_owned() } else { text.to_owned() };
        return json!({
            "error": {
                "message": rejection.message,
                "type": or_ours(&upstream.kind, kind(rejection.reason)),
                "param": upstream.param,
                "code": or_ours(&upstream.code, rejection.reason.code()),
            }
        });
    }
    ours(rejection)
}

fn ours(rejection: &Rejection) -> Value {
    json!({
        "error": {
            "message": rejection.message,
            "type": kind(rejection.reason),
            "param": rejection.param,
            "code": rejection.reason.code(),
        }
    })
}

const fn kind(reason: Reason) -> &'static str {
    match reason {
        Reason::InvalidJson
        | Reason::MissingField
        | Reason::InvalidValue
        | Reason::DuplicateField
        | Reason::InvalidRequest
        | Reason::InvalidKey
        | Reason::ModelNotFound
        | Reason::GenerationNotFound
        | Reason::UnknownPath
        | Reason::IdempotencyConflict
        | Reason::IdempotencyMismatch
        | Reason::MethodNotAllowed
        | Reason::BodyTimeout
        | Reason::BodyTooLarge
        | Reason::UnsupportedEncoding
        | Reason::HeadTooLarge
        | Reason::UpstreamRefused => "invalid_request_error",
        Reason::ModelNotAllowed => "permission_error",
        Reason::InsufficientBalance => "billing_error",
        Reason::RateLimited => "rate_limit_error",
        Reason::Internal
        | Reason::UpstreamFailed
        | Reason::UpstreamCredential
        | Reason::NoUpstream
        | Reason::StoreUnavailable
        | Reason::Overloaded
        | Reason::UpstreamTimeout
        | Reason::ShuttingDown => "server_error",
    }
}

/// Reads an error body. What is no JSON leaves its text out: an HTML page is nobody's message.
#[must_use]
pub fn read(status: u16, body: &[u8]) -> UpstreamError {
    let Ok(value) = serde_json::from_slice::<Value>(body) else {
        return UpstreamError { status, ..UpstreamError::default() };
    };
    read_value(status, value.get("error").unwrap_or(&value))
}

/// Reads the `error` member of an event that came with a 200; its status is the one it stands for.
#[must_use]
pub fn read_event(text: &str) -> UpstreamError {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let mut error = read_value(0, &value);
    error.status = status_of(&error);
    error
}

fn read_value(status: u16, error: &Value) -> UpstreamError {
    let text = |key: &str| match error.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => String::new(),
    };
    let message = error.as_str().map_or_else(|| text("message"), str::to_owned);
    // Google's compatible servers name the cause in `details[].reason` (google.rpc.ErrorInfo) and no type.
    let reasons = error.get("details").and_then(Value::as_array).into_iter().flatten();
    let reason = reasons.filter_map(|detail| detail.get("reason")?.as_str()).next();
    let kind = Some(text("type")).filter(|kind| !kind.is_empty());
    UpstreamError {
        status,
        message,
        kind: kind.or_else(|| reason.map(str::to_owned)).unwrap_or_default(),
        code: text("code"),
        param: error.get("param").and_then(Value::as_str).map(str::to_owned),
    }
}

/// The status that an error event stands for. What nobody knows is the upstream's trouble.
fn status_of(error: &UpstreamError) -> u16 {
    if let Ok(status @ 400..=599) = error.code.parse() {
        return status;
    }
    let known = |text: &str| match text {
        "rate_limit_exceeded" | "rate_limit_error" | "insufficient_quota" | "tokens" | "requests" => {
            Some(429)
        }
        "overloaded_error" | "overloaded" | "engine_overloaded" => Some(529),
        "authentication_error" | "invalid_api_key" => Some(401),
        "billing_error" => Some(402),
        "permission_error" => Some(403),
        "not_found_error" | "model_not_found" => Some(404),
        "request_too_large" => Some(413),
        "invalid_request_error"
        | "context_length_exceeded"
        | "invalid_value"
        | "content_policy_violation"
        | "content_filter"
        | "exceed_context_size_error"
        | "invalid_prompt" => Some(400),
        "timeout" | "timeout_error" | "vector_store_timeout" => Some(504),
        // What responses say of an image that came with the request.
        _ if text.starts_with("invalid_image") || text.starts_with("image_") => Some(400),
        "invalid_base64_image" | "unsupported_image_media_type" | "empty_image_file" => Some(400),
        "failed_to_download_image" => Some(400),
        _ => None,
    };
    known(&error.code).or_else(|| known(&error.kind)).unwrap_or(500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_among_the_details_is_found() {
        let body = br#"{"error":{"code":400,"message":"m","status":"INVALID_ARGUMENT","details":[{},{"reason":"API_KEY_INVALID"}]}}"#;
        let error = read(400, body);
        assert_eq!((error.kind.as_str(), error.code.as_str()), ("API_KEY_INVALID", "400"));
        assert!(error.is_about_our_credential());
    }

    #[test]
    fn an_error_event_stands_for_a_status() {
        for (text, status) in [
            (r#"{"message":"busy","code":429}"#, 429),
            (r#"{"message":"busy","code":"503"}"#, 503),
            (r#"{"type":"overloaded_error","message":"x"}"#, 529),
            (r#"{"type":"invalid_request_error","code":"context_length_exceeded"}"#, 400),
            (r#"{"type":"server_error"}"#, 500),
            (r#""boom""#, 500),
            (r#"{"code":700}"#, 500),
        ] {
            assert_eq!(read_event(text).status, status, "{text}");
        }
    }

    #[test]
    fn a_body_that_is_no_json_has_no_message() {
        assert_eq!(read(502, b"<html>oops</html>").message, "");
        assert_eq!(read(400, br#"{"error":{"message":"m","code":"c"}}"#).code, "c");
        assert_eq!(read(400, br#"{"message":"m"}"#).message, "m");
    }

    #[test]
    fn our_errors_have_the_callers_shape() {
        let rejection = Rejection::new(Reason::InvalidValue, "`n` must be 1.").param("n").context("secret");
        let value: Value = serde_json::from_slice(&body(&rejection)).unwrap();
        assert_eq!(value["error"]["code"], "invalid_value");
        assert_eq!(value["error"]["param"], "n");
        assert!(!value.to_string().contains("secret"));
        assert!(event(&rejection).ends_with(b"\n\n"));
    }
}
