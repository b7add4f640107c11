//! What an upstream's error means for the plan: the operator's rules first, its words next, its status last.
//!
//! A status alone misleads in both directions. A 400 may say that *our* key is bad or our credit used up
//! (the caller can do nothing about it, another route may serve); a 429 may be a plan without quota, which
//! no Retry-After mends; and some resellers answer "overloaded" with a 400. What the well-known providers
//! say is known here; for the rest there are rules per provider (`classify:`), tried in their order.
//!
//! A rule looks for a plain text, without regard to ASCII case. Deliberately absent: regular expressions.
//! Error bodies are matched by a code or a phrase; an engine for more would be a crate in the one that
//! must stay small, and a pattern that goes wrong at 3 a.m.

use crate::dialect::Operation;
use crate::upstream::failure::Failure;
use crate::verdict::UpstreamError;

/// An operator's word about one provider's errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Only for this status.
    pub status: Option<u16>,
    /// Only if the body holds this text, without regard to case.
    pub body_contains: Option<String>,
    /// What it then is.
    pub treat_as: Class,
}

/// What an error can be treated as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The endpoint's trouble: the next candidate, and it is blamed.
    Transient,
    /// Its quota: the next candidate, and the credential rests.
    RateLimit,
    /// Our credential: the next candidate, it rests, and somebody must look.
    Credential,
    /// The request's own fault: no other candidate, and its words pass to the caller.
    CallerFault,
}

impl Class {
    /// The word that config uses.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::RateLimit => "rate_limit",
            Self::Credential => "credential",
            Self::CallerFault => "caller_fault",
        }
    }

    /// The class that a word of the config stands for.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        [Self::Transient, Self::RateLimit, Self::Credential, Self::CallerFault]
            .into_iter()
            .find(|class| class.word() == word)
    }

    /// A class as a failure. A status that contradicts it is replaced by the one that it stands for, so
    /// that everybody behind sees one story.
    const fn failure(self, status: u16) -> Failure {
        match self {
            Self::Transient => Failure::Status(if matches!(status, 408 | 500..=599) { status } else { 502 }),
            Self::RateLimit => Failure::Status(429),
            Self::Credential => Failure::Credential(status),
            Self::CallerFault => Failure::CallerFault(if matches!(status, 400..=499) { status } else { 400 }),
        }
    }
}

/// What an error with this status and body means, for a call that asked for `operation`.
#[must_use]
pub fn failure(operation: Operation, error: &UpstreamError, body: &[u8], rules: &[Rule]) -> Failure {
    if let Some(rule) = rules.iter().find(|rule| rule.matches(error.status, body)) {
        return rule.treat_as.failure(error.status);
    }
    if error.is_about_our_credential() {
        return Failure::Credential(error.status);
    }
    if operation.is_unknown_to(error) {
        return Failure::NOT_SERVED;
    }
    match known(&error.code).or_else(|| known(&error.kind)) {
        // A 429 says itself what it is. Another 4xx that speaks of load is the endpoint's; a 5xx that speaks of the request stays a 5xx:
        // better one needless try than a caller who is blamed for a provider's bug.
        Some(class) if (400..500).contains(&error.status) && error.status != 429 => {
            class.failure(error.status)
        }
        Some(_) | None => Failure::from_status(error.status),
    }
}

impl Rule {
    fn matches(&self, status: u16, body: &[u8]) -> bool {
        let said = |text: &String| contains_ignoring_case(body, text.as_bytes());
        self.status.is_none_or(|wanted| wanted == status) && self.body_contains.as_ref().is_none_or(said)
    }
}

/// Codes and types of the big providers whose status alone says something else.
fn known(code: &str) -> Option<Class> {
    match code {
        "overloaded_error"
        | "overloaded"
        | "engine_overloaded"
        | "server_error"
        | "api_error"
        | "service_unavailable"
        | "timeout_error" => Some(Class::Transient),
        "rate_limit_error" | "rate_limit_exceeded" => Some(Class::RateLimit),
        _ => None,
    }
}

fn contains_ignoring_case(text: &[u8], part: &[u8]) -> bool {
    part.is_empty() || text.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::Dialect;

    fn class(status: u16, body: &str, rules: &[Rule]) -> Failure {
        failure(Operation::Chat, &Dialect::OpenAi.error(status, body.as_bytes()), body.as_bytes(), rules)
    }

    fn rule(status: Option<u16>, text: Option<&str>, treat_as: Class) -> Rule {
        Rule { status, body_contains: text.map(str::to_owned), treat_as }
    }

    #[test]
    fn the_providers_own_codes_are_known() {
        let error = |kind: &str, code: &str| {
            format!(r#"{{"error":{{"message":"x","type":"{kind}","code":"{code}"}}}}"#)
        };
        for (status, kind, code, meant) in [
            (401, "invalid_request_error", "invalid_api_key", Failure::Credential(401)),
            (402, "", "", Failure::Credential(402)),
            (429, "insufficient_quota", "insufficient_quota", Failure::Credential(429)),
            (429, "requests", "rate_limit_exceeded", Failure::Status(429)),
            (429, "tokens", "rate_limit_exceeded", Failure::Status(429)),
            (400, "", "API_KEY_INVALID", Failure::Credential(400)),
            (403, "authentication_error", "", Failure::Credential(403)),
            (403, "permission_error", "", Failure::Status(403)),
            (429, "server_error", "", Failure::Status(429)),
            (529, "overloaded_error", "", Failure::Status(529)),
            (400, "overloaded_error", "", Failure::Status(502)),
            (400, "rate_limit_error", "", Failure::Status(429)),
            (500, "api_error", "", Failure::Status(500)),
            (503, "server_error", "", Failure::Status(503)),
            (400, "invalid_request_error", "context_length_exceeded", Failure::CallerFault(400)),
            (404, "not_found_error", "", Failure::CallerFault(404)),
            (413, "request_too_large", "", Failure::CallerFault(413)),
            (422, "", "", Failure::CallerFault(422)),
            (500, "invalid_request_error", "", Failure::Status(500)),
        ] {
            assert_eq!(class(status, &error(kind, code), &[]), meant, "{status} {kind} {code}");
        }
    }

    #[test]
    fn a_400_about_our_credit_is_our_credentials() {
        let body = r#"{"type":"error","error":{"type":"invalid_request_error",
            "message":"Your credit balance is too low to access the API."}}"#;
        assert_eq!(class(400, body, &[]), Failure::Credential(400));
    }

    #[test]
    fn an_operators_rule_goes_before_everything_else() {
        let busy = [rule(Some(400), Some("Model Is Loading"), Class::Transient)];
        assert_eq!(class(400, r#"{"error":"the model is loading"}"#, &busy), Failure::Status(502));
        assert_eq!(class(400, r#"{"error":"bad"}"#, &busy), Failure::CallerFault(400));
        assert_eq!(class(404, r#"{"error":"model is loading"}"#, &busy), Failure::CallerFault(404));
        let any = [rule(None, Some("quota"), Class::RateLimit), rule(None, None, Class::CallerFault)];
        assert_eq!(class(403, "quota gone", &any), Failure::Status(429));
        assert_eq!(class(503, "else", &any), Failure::CallerFault(400));
        assert_eq!(class(418, "x", &[rule(Some(418), None, Class::Credential)]), Failure::Credential(418));
    }

    #[test]
    fn a_path_that_a_server_lacks_is_the_routes_matter_unless_a_rule_says_otherwise() {
        let error = Dialect::OpenAi.error(404, b"404 page not found");
        let of = |operation, rules: &[Rule]| failure(operation, &error, b"404 page not found", rules);
        assert_eq!(of(Operation::Responses, &[]), Failure::Status(404));
        assert_eq!(of(Operation::Chat, &[]), Failure::CallerFault(404));
        let fault = [rule(Some(404), None, Class::CallerFault)];
        assert_eq!(of(Operation::Responses, &fault), Failure::CallerFault(404));
        let route = Failure::Status(404);
        assert!(route.fails_over() && !route.blames_endpoint() && !route.is_transient());
    }

    #[test]
    fn classes_have_the_words_of_the_config() {
        for class in [Class::Transient, Class::RateLimit, Class::Credential, Class::CallerFault] {
            assert_eq!(Class::from_word(class.word()), Some(class));
        }
        assert_eq!(Class::from_word("fatal"), None);
    }

    proptest! {
        #[test]
        fn a_class_always_acts_as_its_name_says(status in 300_u16..600, body in "\\PC{0,40}") {
            let act = |treat_as| class(status, &body, &[rule(None, None, treat_as)]);
            let transient = act(Class::Transient);
            prop_assert!(transient.fails_over() && transient.blames_endpoint() && transient.is_transient());
            let limit = act(Class::RateLimit);
            prop_assert!(limit.fails_over() && !limit.blames_endpoint());
            prop_assert!(act(Class::Credential).fails_over() && !act(Class::Credential).blames_endpoint());
            prop_assert!(!act(Class::CallerFault).fails_over());
        }

        #[test]
        fn any_body_is_classed(status: u16, body in prop::collection::vec(any::<u8>(), 0..200)) {
            let error = Dialect::OpenAi.error(status, &body);
            let _ = failure(Operation::Responses, &error, &body, &[]);
        }
    }
}
