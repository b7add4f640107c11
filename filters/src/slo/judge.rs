//! Was a call good or bad, and whose doing was it?
//!
//! Two questions, each of which a call may leave open:
//! - **availability**: it was answered whole (good), or it got a 5xx, a 429 of our upstreams', or an answer that broke
//!   off (bad). What a caller did itself says nothing: every other 4xx, its own limits, and leaving early.
//! - **latency**, of streams that began: the first event came within its limit (good) or later (bad). A whole answer
//!   takes as long as the model takes to write it, and a call without an answer is bad once, not twice.
//!
//! Who is to blame: where something of ours broke, nobody upstream; else the attempt that failed last, since without
//! it the call would have been answered; for a late first event the attempt that took the longer part of the wait.

use std::time::Duration;

use crate::verdict::Reason;

/// How a call ended, as its caller saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The status that went out; 499 where the caller left.
    pub status: u16,
    /// The error that we answered with, where it was no upstream's answer.
    pub error: Option<Reason>,
    /// A 429 speaks of our upstreams' limits and not of the caller's.
    pub of_upstreams: bool,
    /// How the answer went, where one began.
    pub answer: Answer,
    /// Why the last attempt failed, of those that did.
    pub last_failure: Option<&'static str>,
    /// How the first event came, where the call is a stream and one came.
    pub first_event: Option<FirstEvent>,
}

/// How an upstream's answer went, after the first of it had reached the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To its end.
    Whole,
    /// It broke off; the word says why.
    Cut(&'static str),
    /// It never began, or nobody knows of its end.
    Not,
}

/// When the first event came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstEvent {
    /// From the whole request in hand to the event.
    pub after: Duration,
    /// The part of that before the attempt that served.
    pub before_attempt: Duration,
    /// What is promised.
    pub limit: Duration,
}

/// What is made of a call. `None`: it says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judged {
    /// Whether it was answered.
    pub availability: Option<Verdict>,
    /// Whether its first event came in time.
    pub latency: Option<Verdict>,
}

/// Good or bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As promised, by the attempt that served.
    Good,
    /// Not as promised.
    Bad(Blame),
}

/// Why, and whose doing it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blame {
    /// One word of a bounded set.
    pub cause: &'static str,
    /// Who.
    pub by: By,
}

/// Who is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// No upstream.
    Ours,
    /// The attempt that served, or was cut.
    Serving,
    /// The last one that failed.
    LastFailed,
}

/// The cause of a first event that was late although nothing failed.
pub const SLOW: &str = "slow";
/// The cause of an answer of whose end nobody knows.
const UNFINISHED: &str = "unfinished";
/// The cause of a 5xx that nobody has a word for.
const UNKNOWN: &str = "unknown";

/// Judges a call.
#[must_use]
pub fn judge(ending: &Ending) -> Judged {
    let availability = availability(ending);
    // A caller that left would have heard more, or nothing; and a stream that broke off began in time or did not.
    let latency = availability.and(ending.first_event).map(|event| latency(ending, event));
    Judged { availability, latency }
}

fn availability(ending: &Ending) -> Option<Verdict> {
    let Ending { status, error, of_upstreams, answer, last_failure, first_event: _ } = *ending;
    match (status, answer) {
        (429, _) if of_upstreams => Some(Verdict::Bad(refused(error, last_failure))),
        (500.., _) => Some(Verdict::Bad(refused(error, last_failure))),
        (400..=499, _) => None,
        (_, Answer::Whole) => Some(Verdict::Good),
        (_, Answer::Cut(cause)) => Some(Verdict::Bad(Blame { cause, by: By::Serving })),
        // Something of ours that was answered here, such as a repeat's kept answer.
        (_, Answer::Not) if error.is_some() => None,
        (_, Answer::Not) => Some(Verdict::Bad(Blame { cause: UNFINISHED, by: By::Serving })),
    }
}

/// Why a call got an error instead of an answer.
fn refused(error: Option<Reason>, last_failure: Option<&'static str>) -> Blame {
    let ours = |cause| Blame { cause, by: By::Ours };
    let Some(error) = error else {
        return last_failure.map_or_else(|| ours(UNKNOWN), |cause| Blame { cause, by: By::LastFailed });
    };
    match last_failure {
        Some(cause) if speaks_of_upstreams(error) => Blame { cause, by: By::LastFailed },
        _ => ours(error.code()),
    }
}

/// Whether an error is what an upstream's failure comes to.
const fn speaks_of_upstreams(error: Reason) -> bool {
    match error {
        Reason::RateLimited
        | Reason::UpstreamRefused
        | Reason::UpstreamFailed
        | Reason::UpstreamCredential
        | Reason::UpstreamTimeout
        | Reason::NoUpstream => true,
        Reason::InvalidJson
        | Reason::MissingField
        | Reason::InvalidValue
        | Reason::DuplicateField
        | Reason::InvalidRequest
        | Reason::InvalidKey
        | Reason::ModelNotAllowed
        | Reason::InsufficientBalance
        | Reason::ModelNotFound
        | Reason::GenerationNotFound
        | Reason::UnknownPath
        | Reason::MethodNotAllowed
        | Reason::IdempotencyConflict
        | Reason::IdempotencyMismatch
        | Reason::BodyTimeout
        | Reason::BodyTooLarge
        | Reason::UnsupportedEncoding
        | Reason::HeadTooLarge
        | Reason::Internal
        | Reason::StoreUnavailable
        | Reason::Overloaded
        | Reason::ShuttingDown => false,
    }
}

fn latency(ending: &Ending, event: FirstEvent) -> Verdict {
    let FirstEvent { after, before_attempt, limit } = event;
    if after <= limit {
        return Verdict::Good;
    }
    let rest = after.saturating_sub(before_attempt);
    match ending.last_failure {
        Some(cause) if before_attempt > rest => Verdict::Bad(Blame { cause, by: By::LastFailed }),
        _ => Verdict::Bad(Blame { cause: SLOW, by: By::Serving }),
    }
}

/// Limits on the first event of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of most calls.
    pub usual: Duration,
    /// Of those with a long prompt.
    pub long: Duration,
    /// A prompt of more tokens is a long one.
    pub long_prompt_tokens: u64,
    /// Of models that think before they speak, whatever the prompt.
    pub reasoning: Duration,
}

impl Limits {
    /// The limit of one call.
    #[must_use]
    pub const fn of(&self, reasoning: bool, prompt_tokens: u64) -> Duration {
        if reasoning {
            self.reasoning
        } else if prompt_tokens > self.long_prompt_tokens {
            self.long
        } else {
            self.usual
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SERVED: Ending = Ending {
        status: 200,
        error: None,
        of_upstreams: false,
        answer: Answer::Whole,
        last_failure: None,
        first_event: None,
    };

    fn rejected(error: Reason) -> Ending {
        Ending { status: error.status(), error: Some(error), answer: Answer::Not, ..SERVED }
    }

    const fn bad(cause: &'static str, by: By) -> Option<Verdict> {
        Some(Verdict::Bad(Blame { cause, by }))
    }

    #[test]
    fn an_answer_to_its_end_is_good_also_after_a_failover() {
        let after_failover = Ending { last_failure: Some("connect"), ..SERVED };
        for ending in [SERVED, after_failover] {
            assert_eq!(judge(&ending), Judged { availability: Some(Verdict::Good), latency: None });
        }
    }

    #[test]
    fn what_the_caller_did_says_nothing() {
        let of_callers = Reason::ALL.into_iter().filter(|reason| reason.status() < 500);
        for reason in of_callers {
            let ending = Ending { last_failure: Some("caller_fault"), ..rejected(reason) };
            assert_eq!(judge(&ending), Judged { availability: None, latency: None }, "{reason:?}");
        }
        let left = Ending { status: 499, answer: Answer::Not, ..SERVED };
        assert_eq!(judge(&left), Judged { availability: None, latency: None });
        // The fault that an upstream finds with a request passes with the upstream's own status.
        let unprocessable = Ending { status: 422, ..rejected(Reason::UpstreamRefused) };
        assert_eq!(judge(&unprocessable).availability, None);
    }

    #[test]
    fn every_error_of_ours_and_of_upstreams_is_bad() {
        for reason in Reason::ALL.into_iter().filter(|reason| reason.status() >= 500) {
            assert_eq!(judge(&rejected(reason)).availability, bad(reason.code(), By::Ours), "{reason:?}");
        }
    }

    #[test]
    fn a_429_is_bad_where_it_is_the_upstreams_and_not_the_callers() {
        let ending = Ending { last_failure: Some("status_429"), ..rejected(Reason::RateLimited) };
        assert_eq!(judge(&ending).availability, None);
        let theirs = Ending { of_upstreams: true, ..ending };
        assert_eq!(judge(&theirs).availability, bad("status_429", By::LastFailed));
        let all_rest = Ending { last_failure: None, ..theirs };
        assert_eq!(judge(&all_rest).availability, bad("rate_limit_exceeded", By::Ours));
    }

    #[test]
    fn the_last_failure_is_the_cause_and_ours_are_nobody_elses() {
        let failed = Ending { last_failure: Some("status_5xx"), ..rejected(Reason::UpstreamFailed) };
        assert_eq!(judge(&failed).availability, bad("status_5xx", By::LastFailed));
        let ours = Ending { last_failure: Some("status_5xx"), ..rejected(Reason::Internal) };
        assert_eq!(judge(&ours).availability, bad("internal_error", By::Ours));
        let nobody = rejected(Reason::NoUpstream);
        assert_eq!(judge(&nobody).availability, bad("no_upstream", By::Ours));
    }

    #[test]
    fn an_answer_that_broke_off_is_bad_by_who_gave_it() {
        let cut = Ending { answer: Answer::Cut("idle"), last_failure: Some("connect"), ..SERVED };
        assert_eq!(judge(&cut).availability, bad("idle", By::Serving));
        let unfinished = Ending { answer: Answer::Not, ..SERVED };
        assert_eq!(judge(&unfinished).availability, bad("unfinished", By::Serving));
    }

    #[test]
    fn a_late_first_event_is_the_doing_of_who_took_longest() {
        let limit = Duration::from_secs(3);
        let event = |after, before| {
            let [after, before_attempt] = [after, before].map(Duration::from_millis);
            Some(FirstEvent { after, before_attempt, limit })
        };
        let of = |first_event, last_failure| judge(&Ending { first_event, last_failure, ..SERVED }).latency;
        assert_eq!(of(event(3000, 0), None), Some(Verdict::Good));
        assert_eq!(of(event(3001, 0), None), bad("slow", By::Serving));
        assert_eq!(of(event(3001, 2000), Some("first_byte")), bad("first_byte", By::LastFailed));
        assert_eq!(of(event(3001, 1000), Some("first_byte")), bad("slow", By::Serving));
        assert_eq!(of(event(3001, 2000), None), bad("slow", By::Serving), "nobody failed before");
    }

    #[test]
    fn long_prompts_and_thinking_models_have_limits_of_their_own() {
        let [usual, long, reasoning] = [3, 10, 60].map(Duration::from_secs);
        let limits = Limits { usual, long, long_prompt_tokens: 16_000, reasoning };
        assert_eq!(limits.of(false, 16_000), usual);
        assert_eq!(limits.of(false, 16_001), long);
        assert_eq!(limits.of(true, 16_001), reasoning);
    }

    proptest! {
        /// No call is counted for latency that is not for availability, and no 4xx is but a 429 of upstreams'.
        #[test]
        fn what_says_nothing_says_it_twice(
            status in 100_u16..600,
            of_upstreams: bool,
            reason in proptest::option::of(proptest::sample::select(Reason::ALL.to_vec())),
            answer in proptest::sample::select(vec![Answer::Whole, Answer::Cut("idle"), Answer::Not]),
            after in 0_u64..10_000,
        ) {
            let event = FirstEvent {
                after: Duration::from_millis(after),
                before_attempt: Duration::ZERO,
                limit: Duration::from_secs(3),
            };
            let ending =
                Ending { status, error: reason, of_upstreams, answer, last_failure: None, first_event: Some(event) };
            let Judged { availability, latency } = judge(&ending);
            prop_assert_eq!(availability.is_some(), latency.is_some());
            if (400..500).contains(&status) {
                prop_assert_eq!(availability.is_some(), status == 429 && of_upstreams);
            }
            if status >= 500 {
                prop_assert!(matches!(availability, Some(Verdict::Bad(_))));
            }
        }
    }
}
