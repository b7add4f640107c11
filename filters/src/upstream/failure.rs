//! How an attempt can fail before the commit, and what follows from it.
//!
//! One word per cause: three timers are three failures, since whoever reads the log at four in the
//! morning has to know which limit to look at.

/// The limits on an attempt, each with its own word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timer {
    /// Until the connection stands.
    Connect,
    /// From request sent to the response head.
    FirstByte,
    /// From request sent to the first meaningful event.
    FirstEvent,
    /// The candidate's share of the request's deadline.
    Share,
    /// Between two pieces of an answer.
    Idle,
    /// For a whole stream.
    StreamMax,
    /// For what still runs when the process leaves.
    Drain,
}

impl Timer {
    /// The word that logs, metrics and config use.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::FirstByte => "first_byte",
            Self::FirstEvent => "first_event",
            Self::Share => "deadline",
            Self::Idle => "idle",
            Self::StreamMax => "stream_max",
            Self::Drain => "drain",
        }
    }
}

/// Why a 2xx is no answer of the dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NotAnAnswer {
    /// No body, or none before the end.
    Empty,
    /// HTML, a stream where JSON was asked for, or the other way round.
    WrongType,
    /// A body that the dialect does not know.
    Unreadable,
}

/// Why an attempt ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection: refused, unreachable, unresolved, TLS.
    Connect,
    /// A timer ran out.
    Timeout(Timer),
    /// The connection broke or spoke no HTTP.
    Broken,
    /// The upstream's own error status, as a status or as an error event that stands for one.
    Status(u16),
    /// The upstream does not accept our credential or its quota is used up.
    Credential(u16),
    /// The upstream redirects. Following would hand our credential to another host.
    Redirect,
    /// A 2xx that is no answer.
    NotAnAnswer(NotAnAnswer),
    /// The request is at fault; no other candidate would take it.
    CallerFault(u16),
    /// Something of ours broke.
    Ours,
}

impl Failure {
    /// The upstream does not do what was asked for at all.
    pub const NOT_SERVED: Self = Self::Status(404);

    /// What an upstream's error status means for the plan.
    #[must_use]
    pub const fn from_status(status: u16) -> Self {
        match status {
            401 | 402 => Self::Credential(status),
            // 403 speaks of this request at this provider: neutral, but another route may serve it.
            403 | 408 | 429 | 500.. => Self::Status(status),
            300..=399 => Self::Redirect,
            _ => Self::CallerFault(status),
        }
    }

    /// Whether the next candidate is tried.
    #[must_use]
    pub const fn fails_over(&self) -> bool {
        match self {
            Self::CallerFault(_) | Self::Ours => false,
            Self::Connect
            | Self::Timeout(_)
            | Self::Broken
            | Self::Status(_)
            | Self::Credential(_)
            | Self::Redirect
            | Self::NotAnAnswer(_) => true,
        }
    }

    /// Whether the endpoint's weight suffers: not for what is the caller's doing, not for 429 and
    /// 403, which speak of a quota or of this one request, not for a path that it never had, and not for
    /// our credential.
    #[must_use]
    pub const fn blames_endpoint(&self) -> bool {
        match self {
            Self::CallerFault(_)
            | Self::Ours
            | Self::Credential(_)
            | Self::Status(403 | 404 | 429)
            | Self::Timeout(Timer::Drain) => false,
            Self::Connect
            | Self::Timeout(_)
            | Self::Broken
            | Self::Status(_)
            | Self::Redirect
            | Self::NotAnAnswer(_) => true,
        }
    }

    /// Whether the *same* endpoint may be asked again after a pause. Not after a 429 (its credential
    /// rests, and a caller who is told when to come back is served better than one who waits), not
    /// for what a pause cannot mend (credential, redirect, a page instead of an answer), and not when
    /// it used up its whole share of the time.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Connect | Self::Broken | Self::NotAnAnswer(NotAnAnswer::Empty) => true,
            Self::Timeout(timer) => match timer {
                Timer::Connect | Timer::FirstByte | Timer::FirstEvent | Timer::Idle => true,
                Timer::Share | Timer::StreamMax | Timer::Drain => false,
            },
            Self::Status(status) => !matches!(status, 403 | 404 | 429),
            Self::Credential(_)
            | Self::Redirect
            | Self::NotAnAnswer(NotAnAnswer::WrongType | NotAnAnswer::Unreadable)
            | Self::CallerFault(_)
            | Self::Ours => false,
        }
    }

    /// Whether it is [`Self::NOT_SERVED`]. (A 404 about the request itself is a caller's fault.)
    #[must_use]
    pub const fn is_not_served(&self) -> bool {
        matches!(self, Self::Status(404))
    }

    /// Whether no connection came about, which may be our own network's doing.
    #[must_use]
    pub const fn is_connect_type(&self) -> bool {
        matches!(self, Self::Connect | Self::Timeout(Timer::Connect))
    }

    /// One word for logs and metric labels; the set is bounded.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Timeout(timer) => timer.word(),
            Self::Broken => "broken",
            Self::Status(408) => "status_408",
            Self::Status(429) => "status_429",
            Self::Status(403) => "status_403",
            Self::Status(404) => "not_served",
            Self::Status(_) => "status_5xx",
            Self::Credential(_) => "credential",
            Self::Redirect => "redirect",
            Self::NotAnAnswer(NotAnAnswer::Empty) => "empty",
            Self::NotAnAnswer(NotAnAnswer::WrongType) => "wrong_type",
            Self::NotAnAnswer(NotAnAnswer::Unreadable) => "unreadable",
            Self::CallerFault(_) => "caller_fault",
            Self::Ours => "ours",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_fail_over_as_the_contract_says() {
        for status in [401, 402, 403, 408, 429, 500, 502, 503, 504, 529, 599, 302] {
            assert!(Failure::from_status(status).fails_over(), "{status}");
        }
        for status in [400, 404, 405, 409, 413, 415, 422] {
            assert!(!Failure::from_status(status).fails_over(), "{status}");
        }
    }

    #[test]
    fn only_what_a_pause_can_mend_is_asked_again() {
        for failure in [Failure::Connect, Failure::Broken, Failure::Status(500), Failure::Status(408)] {
            assert!(failure.is_transient() && failure.fails_over(), "{failure:?}");
        }
        for failure in [
            Failure::Status(429),
            Failure::Status(403),
            Failure::Credential(401),
            Failure::Redirect,
            Failure::CallerFault(400),
            Failure::Timeout(Timer::Share),
            Failure::NotAnAnswer(NotAnAnswer::WrongType),
        ] {
            assert!(!failure.is_transient(), "{failure:?}");
        }
    }

    #[test]
    fn quota_credential_and_caller_faults_leave_the_endpoint_unblamed() {
        for status in [400, 401, 402, 403, 422, 429] {
            assert!(!Failure::from_status(status).blames_endpoint(), "{status}");
        }
        assert!(Failure::from_status(500).blames_endpoint());
        assert!(Failure::Timeout(Timer::FirstByte).blames_endpoint());
    }
}
