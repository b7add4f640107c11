//! What we answer when we do not serve: the taxonomy of errors.
//!
//! One [`Reason`] per cause, with its HTTP status and a stable `code`. A [`Rejection`] carries two
//! texts for two readers: `message` goes to the caller, `context` to the log. Only
//! `src/proxy/reply.rs` turns one into HTTP, and only a dialect into its JSON shape.
//! The table in `docs/errors.md` is this enum; a test compares the two.

use std::time::Duration;

/// Why a call is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The body is no JSON object.
    InvalidJson,
    /// A field that we act on is missing.
    MissingField,
    /// A field that we act on has a value that makes no sense.
    InvalidValue,
    /// A field that we act on comes twice.
    DuplicateField,
    /// The head is not acceptable HTTP.
    InvalidRequest,
    /// No key, or none that we know.
    InvalidKey,
    /// The key may not use this model.
    ModelNotAllowed,
    /// The balance cannot carry the hold.
    InsufficientBalance,
    /// No such model.
    ModelNotFound,
    /// No past call of that id.
    GenerationNotFound,
    /// No such path.
    UnknownPath,
    /// The path knows other methods only.
    MethodNotAllowed,
    /// A call under this idempotency key was made, and its answer is not there.
    IdempotencyConflict,
    /// A call under this idempotency key had another body.
    IdempotencyMismatch,
    /// The body did not arrive in time.
    BodyTimeout,
    /// The body is larger than allowed.
    BodyTooLarge,
    /// The body is coded in a way that we do not read.
    UnsupportedEncoding,
    /// The head is larger than allowed.
    HeadTooLarge,
    /// The caller's own limit, or every route said 429.
    RateLimited,
    /// An upstream found fault with the request itself.
    UpstreamRefused,
    /// Something broke in the gateway.
    Internal,
    /// The last upstream gave a bad answer.
    UpstreamFailed,
    /// The last upstream does not accept our credential.
    UpstreamCredential,
    /// No route can be asked now.
    NoUpstream,
    /// The store of holds cannot be reached or written.
    StoreUnavailable,
    /// Too much is in flight already.
    Overloaded,
    /// A timer ran out.
    UpstreamTimeout,
    /// The gateway leaves, and the call was still running when `drain.max` was over.
    ShuttingDown,
}

impl Reason {
    /// All of them, for the docs and the tests.
    pub const ALL: [Self; 28] = [
        Self::InvalidJson,
        Self::MissingField,
        Self::InvalidValue,
        Self::DuplicateField,
        Self::InvalidRequest,
        Self::InvalidKey,
        Self::InsufficientBalance,
        Self::ModelNotAllowed,
        Self::ModelNotFound,
        Self::GenerationNotFound,
        Self::UnknownPath,
        Self::IdempotencyConflict,
        Self::IdempotencyMismatch,
        Self::MethodNotAllowed,
        Self::BodyTimeout,
        Self::BodyTooLarge,
        Self::UnsupportedEncoding,
        Self::HeadTooLarge,
        Self::RateLimited,
        Self::UpstreamRefused,
        Self::Internal,
        Self::UpstreamFailed,
        Self::UpstreamCredential,
        Self::NoUpstream,
        Self::StoreUnavailable,
        Self::Overloaded,
        Self::UpstreamTimeout,
        Self::ShuttingDown,
    ];

    /// The HTTP status. [`Reason::UpstreamRefused`] usually takes the upstream's own instead.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::InvalidJson
            | Self::MissingField
            | Self::InvalidValue
            | Self::DuplicateField
            | Self::InvalidRequest
            | Self::UpstreamRefused => 400,
            Self::InvalidKey => 401,
            Self::InsufficientBalance => 402,
            Self::ModelNotAllowed => 403,
            Self::ModelNotFound | Self::GenerationNotFound | Self::UnknownPath => 404,
            Self::MethodNotAllowed => 405,
            Self::BodyTimeout => 408,
            Self::IdempotencyConflict => 409,
            Self::IdempotencyMismatch => 422,
            Self::BodyTooLarge => 413,
            Self::UnsupportedEncoding => 415,
            Self::HeadTooLarge => 431,
            Self::RateLimited => 429,
            Self::Internal => 500,
            Self::UpstreamFailed | Self::UpstreamCredential => 502,
            Self::NoUpstream | Self::StoreUnavailable | Self::Overloaded | Self::ShuttingDown => 503,
            Self::UpstreamTimeout => 504,
        }
    }

    /// The stable `code` that callers may match on.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::InvalidJson => "invalid_json",
            Self::MissingField => "missing_field",
            Self::InvalidValue => "invalid_value",
            Self::DuplicateField => "duplicate_field",
            Self::InvalidRequest => "invalid_request",
            Self::InvalidKey => "invalid_api_key",
            Self::InsufficientBalance => "insufficient_balance",
            Self::ModelNotAllowed => "model_not_allowed",
            Self::ModelNotFound => "model_not_found",
            Self::GenerationNotFound => "generation_not_found",
            Self::UnknownPath => "unknown_path",
            Self::IdempotencyConflict => "idempotency_conflict",
            Self::IdempotencyMismatch => "idempotency_mismatch",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::BodyTimeout => "body_timeout",
            Self::BodyTooLarge => "body_too_large",
            Self::UnsupportedEncoding => "unsupported_encoding",
            Self::HeadTooLarge => "head_too_large",
            Self::RateLimited => "rate_limit_exceeded",
            Self::UpstreamRefused => "upstream_refused",
            Self::Internal => "internal_error",
            Self::UpstreamFailed => "upstream_failed",
            Self::UpstreamCredential => "upstream_credential",
            Self::NoUpstream => "no_upstream",
            Self::StoreUnavailable => "store_unavailable",
            Self::Overloaded => "overloaded",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::ShuttingDown => "shutting_down",
        }
    }

    /// Whether sending the same call again can help. SDKs obey it as `x-should-retry`.
    #[must_use]
    pub const fn retry_helps(self) -> bool {
        match self {
            Self::BodyTimeout
            | Self::RateLimited
            | Self::Internal
            | Self::UpstreamFailed
            | Self::NoUpstream
            | Self::StoreUnavailable
            | Self::Overloaded
            | Self::UpstreamTimeout
            | Self::ShuttingDown => true,
            Self::InvalidJson
            | Self::MissingField
            | Self::InvalidValue
            | Self::DuplicateField
            | Self::InvalidRequest
            | Self::InvalidKey
            | Self::ModelNotAllowed
            | Self::InsufficientBalance
            | Self::ModelNotFound
            | Self::GenerationNotFound
            | Self::UnknownPath
            | Self::IdempotencyConflict
            | Self::IdempotencyMismatch
            | Self::MethodNotAllowed
            | Self::BodyTooLarge
            | Self::UnsupportedEncoding
            | Self::HeadTooLarge
            | Self::UpstreamRefused
            | Self::UpstreamCredential => false,
        }
    }
}

/// A call that is not served, with everything either reader needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The cause.
    pub reason: Reason,
    /// For the caller. Names the field and the way out.
    pub message: String,
    /// The field at fault, where there is one.
    pub param: Option<&'static str>,
    /// For the log.
    pub context: String,
    /// When to come back.
    pub retry_after: Option<Duration>,
    /// The upstream's own words, where the fault is the request's: it passes unchanged in meaning.
    pub upstream: Option<Box<UpstreamError>>,
    /// A limit that was met is not the caller's: every upstream is at its own.
    pub of_upstreams: bool,
}

impl Rejection {
    /// A rejection with a text for the caller.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            param: None,
            context: String::new(),
            retry_after: None,
            upstream: None,
            of_upstreams: false,
        }
    }

    /// Says that the limit is not the caller's.
    #[must_use]
    pub const fn of_upstreams(mut self) -> Self {
        self.of_upstreams = true;
        self
    }

    /// Names the field at fault.
    #[must_use]
    pub fn param(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    /// Adds what only the log may say.
    #[must_use]
    pub fn context(mut self, context: impl Into<String>) -> Self {
        self.context = context.into();
        self
    }

    /// Says when to come back.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// The status that goes out.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.upstream.as_ref().map_or_else(|| self.reason.status(), |error| error.status)
    }
}

/// An error as an upstream words it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamError {
    /// The HTTP status it came with or stands for.
    pub status: u16,
    /// Its text.
    pub message: String,
    /// Its type.
    pub kind: String,
    /// Its code.
    pub code: String,
    /// The field it names.
    pub param: Option<String>,
}

impl UpstreamError {
    /// Takes our own credential out of everything it says.
    pub fn mask(&mut self, credential: &str) {
        let parts = [&mut self.message, &mut self.kind, &mut self.code];
        for part in parts.into_iter().chain(self.param.as_mut()) {
            if !credential.is_empty() && part.contains(credential) {
                *part = part.replace(credential, "[masked]");
            }
        }
    }

    /// Whether it speaks of our credential or our quota at the provider.
    #[must_use]
    pub fn is_about_our_credential(&self) -> bool {
        match self.status {
            401 | 402 => true,
            400 | 403 | 429 => {
                let named = |code: &&str| {
                    self.code.eq_ignore_ascii_case(code) || self.kind.eq_ignore_ascii_case(code)
                };
                CREDENTIAL_CODES.iter().any(named) || self.says_no_credit()
            }
            _ => false,
        }
    }

    /// Anthropic says "out of credit" as a 400 of the type that bad requests have, in words alone.
    fn says_no_credit(&self) -> bool {
        self.message.to_ascii_lowercase().contains("credit balance is too low")
    }
}

/// Codes by which providers speak of the key or the plan behind it.
const CREDENTIAL_CODES: [&str; 9] = [
    "invalid_api_key",
    "API_KEY_INVALID",
    "insufficient_quota",
    "billing_hard_limit_reached",
    "billing_not_active",
    "account_deactivated",
    "authentication_error",
    "billing_error",
    "access_terminated",
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_reason_has_a_code_of_its_own() {
        let codes: HashSet<_> = Reason::ALL.iter().map(|r| r.code()).collect();
        assert_eq!(codes.len(), Reason::ALL.len());
        assert!(Reason::ALL.iter().all(|r| (400..600).contains(&r.status())));
    }
}
