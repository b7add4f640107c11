//! What the caller is told when no candidate served.
//!
//! The last failure decides, since it is the one that a further attempt would have had to beat; only
//! "everyone is busy" needs all of them. An upstream's text goes out only where the request itself is
//! at fault, with anything that looks like a credential masked.

use std::time::Duration;

use crate::upstream::failure::{Failure, Timer};
use crate::verdict::{Reason, Rejection, UpstreamError};

/// The wait that is suggested where no upstream named one.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The longest message of an upstream that is passed on, in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;

/// One attempt that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// Why.
    pub failure: Failure,
    /// What the upstream said.
    pub error: UpstreamError,
    /// When it wants to be asked again.
    pub retry_after: Option<Duration>,
}

/// The answer to a call whose attempts are these, in their order.
#[must_use]
pub fn verdict(tried: &[Tried]) -> Rejection {
    if tried.is_empty() {
        let message = "No upstream can serve this model right now.";
        return Rejection::new(Reason::NoUpstream, message).retry_after(RETRY_AFTER);
    }
    // Routes that do not know the path say nothing of how the others did.
    let tried: Vec<&Tried> = tried.iter().filter(|t| !t.failure.is_not_served()).collect();
    let Some(last) = tried.last() else { return not_served() };
    if tried.iter().all(|t| t.failure == Failure::Status(429)) {
        let soonest = tried.iter().filter_map(|t| t.retry_after).min().unwrap_or(RETRY_AFTER);
        let message = "Every upstream of this model is at its rate limit.";
        return Rejection::new(Reason::RateLimited, message).retry_after(soonest).of_upstreams();
    }
    match &last.failure {
        Failure::CallerFault(_) | Failure::Status(403) => passed_on(&last.error),
        Failure::Timeout(Timer::Drain) => {
            let message = "The gateway is shutting down: send the call again.";
            Rejection::new(Reason::ShuttingDown, message).retry_after(RETRY_AFTER)
        }
        Failure::Timeout(timer) => Rejection::new(
            Reason::UpstreamTimeout,
            format!("No upstream answered in time: the `{}` limit ran out.", timer.word()),
        ),
        Failure::Credential(_) => {
            Rejection::new(Reason::UpstreamCredential, "The upstream refused the gateway.")
        }
        Failure::Ours => Rejection::new(Reason::Internal, "Something broke in the gateway."),
        Failure::Connect
        | Failure::Broken
        | Failure::Status(_)
        | Failure::Redirect
        | Failure::NotAnAnswer(_) => {
            let rejection = Rejection::new(Reason::UpstreamFailed, "Every upstream of this model failed.");
            match last.retry_after {
                Some(wait) => rejection.retry_after(wait),
                None => rejection,
            }
        }
    }
}

fn not_served() -> Rejection {
    let message = "None of this model's upstreams knows this path. Operators: name what a provider serves in \
                   its `surfaces`.";
    Rejection::new(Reason::ModelNotFound, message).param("model")
}

fn passed_on(error: &UpstreamError) -> Rejection {
    let error = masked_error(error);
    let message = if error.message.is_empty() {
        format!("The upstream refused the request with status {}.", error.status)
    } else {
        error.message.clone()
    };
    let mut rejection = Rejection::new(Reason::UpstreamRefused, message);
    rejection.upstream = Some(Box::new(error));
    rejection
}

/// An upstream's error without anything that looks like a key.
fn masked_error(error: &UpstreamError) -> UpstreamError {
    UpstreamError {
        status: error.status,
        message: masked(&error.message),
        kind: masked(&error.kind),
        code: masked(&error.code),
        param: error.param.as_deref().map(masked),
    }
}

/// `text` without anything that looks like a key, and not longer than [`MESSAGE_BYTES_MAX`].
fn masked(text: &str) -> String {
    let part_of_key = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let mut out = String::with_capacity(text.len().min(MESSAGE_BYTES_MAX));
    let mut rest = text;
    while !rest.is_empty() && out.len() < MESSAGE_BYTES_MAX {
        let end = rest.find(|c| !part_of_key(c)).unwrap_or(rest.len());
        let (word, behind) = rest.split_at_checked(end).unwrap_or((rest, ""));
        out.push_str(if looks_secret(word) { "[masked]" } else { word });
        let next = behind.find(part_of_key).unwrap_or(behind.len());
        let (between, next) = behind.split_at_checked(next).unwrap_or((behind, ""));
        out.push_str(between);
        rest = next;
    }
    out
}

fn looks_secret(word: &str) -> bool {
    let prefixed = ["sk-", "sk_", "pk-", "tg-", "AIza", "gsk_", "xai-", "hf_", "eyJ", "AKIA"];
    // 32 characters of letters and digits together are no word of prose.
    let mixed = word.bytes().any(|b| b.is_ascii_digit()) && word.bytes().any(|b| b.is_ascii_alphabetic());
    (word.len() > 8 && prefixed.iter().any(|prefix| word.starts_with(prefix))) || (word.len() >= 32 && mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(failure: Failure, retry_after: Option<u64>) -> Tried {
        Tried { failure, error: UpstreamError::default(), retry_after: retry_after.map(Duration::from_secs) }
    }

    #[test]
    fn all_routes_busy_is_429_with_the_soonest_wait() {
        let all = [tried(Failure::Status(429), Some(20)), tried(Failure::Status(429), Some(7))];
        let answer = verdict(&all);
        assert_eq!((answer.status(), answer.retry_after), (429, Some(Duration::from_secs(7))));
        let mixed = [tried(Failure::Status(429), Some(20)), tried(Failure::Broken, None)];
        assert_eq!(verdict(&mixed).status(), 502);
    }

    #[test]
    fn the_last_failure_decides() {
        for (failure, status) in [
            (Failure::Timeout(Timer::FirstEvent), 504),
            (Failure::Timeout(Timer::Drain), 503),
            (Failure::Credential(401), 502),
            (Failure::Connect, 502),
            (Failure::Status(500), 502),
            (Failure::Redirect, 502),
            (Failure::Ours, 500),
        ] {
            assert_eq!(verdict(&[tried(Failure::Connect, None), tried(failure, None)]).status(), status);
        }
        assert_eq!(verdict(&[]).status(), 503);
    }

    #[test]
    fn a_route_that_lacks_the_path_says_nothing_of_the_others() {
        let lacks = || tried(Failure::Status(404), None);
        let alone = verdict(&[lacks(), lacks()]);
        assert_eq!((alone.reason, alone.status()), (Reason::ModelNotFound, 404));
        for (failure, status) in
            [(Failure::Status(429), 429), (Failure::Connect, 502), (Failure::Status(500), 502)]
        {
            let told = verdict(&[lacks(), tried(failure.clone(), Some(3)), lacks()]);
            assert_eq!((told.status(), told.retry_after.is_some()), (status, true), "{failure:?}");
        }
    }

    #[test]
    fn a_fault_of_the_request_passes_with_its_words() {
        let error = UpstreamError {
            status: 422,
            message: "bad tool; key sk-abcdefghij was used".into(),
            code: "bad_tool".into(),
            ..UpstreamError::default()
        };
        let fault = Tried { failure: Failure::CallerFault(422), error, retry_after: None };
        let answer = verdict(&[fault]);
        assert_eq!(answer.status(), 422);
        assert_eq!(answer.message, "bad tool; key [masked] was used");
        assert_eq!(answer.upstream.unwrap().code, "bad_tool");
    }

    #[test]
    fn keys_are_masked_wherever_they_stand() {
        for text in [
            "api_key=sk-proj-abcdefgh12345",
            "\"key\":\"sk-abcdefghijk1234\"",
            "Bearer:eyJhbGciOiJIUzI1NiJ9",
            "(AKIAABCDEFGHIJKLMNOP)",
        ] {
            let shown = masked(text);
            assert!(shown.contains("[masked]"), "{text} → {shown}");
            assert!(
                !shown.contains("abcdefgh") && !shown.contains("eyJhb") && !shown.contains("AKIAA"),
                "{shown}"
            );
        }
        let prose = "messages[3].content: the task-specific key-value store (8192 tokens) is too long";
        assert_eq!(masked(prose), prose);
    }
}
