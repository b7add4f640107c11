//! What a request asks of a board, and what it is answered: the words of the five calls.

use std::time::{Duration, Instant};

use super::layout::Route;
use crate::ids::{CredentialId, EndpointId, ModelId};
use crate::preferences::{Dropped, Preferences};
use crate::upstream::breaker::Permit;
use crate::upstream::failure::Failure;
use crate::upstream::last_resort::PlaceId;
use crate::upstream::watchdog::{Form, Limits, PromptClass, Timing};

/// What a request asks of the board.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The models that the caller named, in order.
    pub models: &'a [ModelId],
    /// In which form the answer shall come.
    pub form: Form,
    /// An estimate of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// What the caller wants.
    pub preferences: &'a Preferences,
}

/// What the board answers.
#[derive(Debug)]
pub enum Found {
    /// Ask these.
    Plan(Plan),
    /// Every route refuses or rests.
    AllRefused {
        /// When the first of them is worth asking again.
        soonest: Instant,
        /// All of them rest for their rate limits: the caller gets a 429, not a 503.
        rate_limited: bool,
        /// With the fleet's claim to the gate of this model one may try all the same.
        gate: Option<ModelId>,
    },
    /// The caller's preferences leave no route.
    NoneFits(Vec<(Route, Dropped)>),
}

/// Whom to ask.
#[derive(Debug)]
pub struct Plan {
    /// In this order. Of a model with many places, those that its attempts may get to.
    pub order: Vec<Route>,
    /// On whom to fall back when all of them failed.
    pub fall_backs: Vec<Route>,
    /// The request's pass, for [`super::Board::begin`].
    pub pass: Pass,
}

/// Whom to ask behind those of a plan.
#[derive(Debug, Default)]
pub struct Further {
    /// In this order.
    pub order: Vec<Route>,
    /// On whom to fall back when all of them failed.
    pub fall_backs: Vec<Route>,
}

/// A request's right to attempts.
#[derive(Debug)]
pub struct Pass {
    pub(super) form: Form,
    pub(super) class: PromptClass,
    /// Routes that admitted when the order was made and were not tried yet.
    pub(super) viable: usize,
    /// Whom it has asked, each once.
    pub(super) asked: Vec<EndpointId>,
    /// At the gates of the models that it may try, one each.
    pub(super) places: Vec<(ModelId, PlaceId)>,
    /// There are others behind those in its plan ([`super::Board::further`]).
    pub(super) is_cut: bool,
}

/// One attempt that is under way.
#[derive(Debug)]
pub struct Ticket {
    pub(super) route: Route,
    pub(super) form: Form,
    pub(super) class: PromptClass,
    pub(super) permit: Permit,
    pub(super) place: Option<(ModelId, PlaceId)>,
    /// What its watchdogs are, or would be.
    pub(super) limits: Limits,
    pub(super) trial: bool,
    pub(super) answered: bool,
}

/// Whether an attempt may go.
#[derive(Debug)]
pub enum Begun {
    /// It may.
    Go {
        /// For its end.
        ticket: Ticket,
        /// Its watchdog to the head; none for the last viable candidate.
        first_byte: Option<Duration>,
        /// Its watchdog to the first meaningful event; none for the last viable candidate.
        first_event: Option<Duration>,
    },
    /// Not this one: tell the planner. A moment means that waiting for it is worth while.
    Refused(Option<Instant>),
    /// All requests together have made too many extra attempts: this one ends with what it has.
    BudgetSpent,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a whole answer.
    Served {
        /// Output tokens per second after the first event, where they can be told.
        tokens_per_second: Option<u64>,
    },
    /// It failed, before or after the commit.
    Failed {
        /// Why.
        failure: Failure,
        /// When the upstream wants to be asked again.
        wait: Option<Duration>,
        /// How far it came.
        timing: Timing,
        /// Its connection had served others before.
        reused: bool,
    },
    /// The caller left.
    CallerLeft,
}

/// What an end has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// The endpoint may not be asked again before this.
    pub not_before: Option<Instant>,
    /// Something for the log.
    pub notice: Option<Notice>,
}

/// What somebody may want to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A breaker opened.
    Opened(Instant),
    /// A breaker closed.
    Closed,
    /// A credential is refused: somebody must look.
    CredentialAlarm(CredentialId),
    /// This node is cut off: it is not ready.
    NodeCutOff,
}

impl Pass {
    /// In which form the answer of the next attempt comes.
    pub fn comes_as(&mut self, form: Form) {
        self.form = form;
    }

    /// A gate counts those who try its own model: nobody else's answer opens it.
    pub(super) fn place_at(&self, model: ModelId) -> Option<(ModelId, PlaceId)> {
        self.places.iter().find(|(of, _)| *of == model).copied()
    }
}

impl Ticket {
    /// Where the attempt goes.
    #[must_use]
    pub const fn route(&self) -> Route {
        self.route
    }

    /// What its watchdogs are, or would be if it were not the last candidate.
    #[must_use]
    pub const fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether it probes an endpoint that its breaker refuses to others.
    #[must_use]
    pub const fn is_probe(&self) -> bool {
        self.permit.is_probe()
    }
}
