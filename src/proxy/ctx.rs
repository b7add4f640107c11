//! What a request carries from phase to phase.
//!
//! [`Stage`] says how far it is. A step takes what its room needs through [`Ctx::call`]; a stage that it
//! should never be in is one typed error: the call gets 500, its hold settles.

use std::sync::Arc;
use std::time::Instant;

use filters::attempt::Planner;
use filters::dialect::{Dialect, Operation};
use filters::exhausted::Tried;
use filters::facts::Facts;
use filters::ids::EndpointId;
use filters::money::Amount;
use filters::upstream::board::Pass;
use filters::upstream::failure::Failure;
use filters::verdict::Reason;
use pingora::{Error, ErrorType};

use super::choices::{Choice, Choices};
use super::gate::Gate;
use super::keyed::First;
use crate::config::checked::{Endpoint, Model};
use crate::drain::InFlight;
use crate::edge::Connection;
use crate::ops::otlp::Trace;
use crate::pool::endpoint::Addresses;
use crate::pool::peer::Via;
use crate::pool::upstreams::Leg;
use crate::pool::{Snapshot, keys::Principal};

/// A phase came in the wrong order.
pub(super) const WRONG_STAGE: ErrorType = ErrorType::new("wrong stage");

/// One request.
pub(super) struct Ctx {
    pub(super) arrived: Instant,
    pub(super) request_id: String,
    pub(super) surface: &'static str,
    /// It is a call: an upstream is to answer it.
    pub(super) is_call: bool,
    pub(super) dialect: Dialect,
    pub(super) stage: Stage,
    /// When its body was whole.
    pub(super) read_at: Option<Instant>,
    /// The code of what went out, where it was no answer of an upstream.
    pub(super) replied: Option<&'static str>,
    /// The error among them, and whether its 429 speaks of our upstreams' limits.
    pub(super) refused: Option<(Reason, bool)>,
    /// What is asked for, once that is known.
    pub(super) model: Option<Arc<Model>>,
    pub(super) principal: Option<Arc<Principal>>,
    /// The call carries an idempotency key and is the first under it.
    pub(super) keyed: Option<First>,
    /// The connection it came by.
    pub(super) connection: Option<Arc<Connection>>,
    /// Its spans, where somebody collects them.
    pub(super) trace: Option<Trace>,
    pub(super) _in_flight: InFlight,
}

/// How far a request is.
pub(super) enum Stage {
    /// Its head is here.
    Arrived,
    /// It has its hold, and may be at an upstream.
    Admitted(Box<Call>),
    /// It is settled and recorded.
    Finished,
}

/// An admitted call.
pub(super) struct Call {
    pub(super) operation: Operation,
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) choices: Choices,
    pub(super) facts: Facts,
    pub(super) own_input: u64,
    pub(super) planner: Planner,
    /// Given back when the call is over.
    pub(super) pass: Option<Pass>,
    /// The attempt that is sent again, since nobody saw it.
    pub(super) unseen: Option<(Leg, Via)>,
    pub(super) tried: Vec<Tried>,
    /// Whose attempt failed last, and why.
    pub(super) last_failed: Option<(EndpointId, &'static str)>,
    pub(super) current: Option<Current>,
    pub(super) gate: Gate,
    pub(super) first_attempt: Option<Instant>,
    /// The key's allowance for calls that are left early.
    pub(super) abandoned_max: Option<Amount>,
}

/// The attempt that is under way, or was last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Current {
    pub(super) endpoint: EndpointId,
    pub(super) began: Instant,
    /// The number of the credential that was sent, once one was.
    pub(super) credential: Option<u64>,
}

impl Ctx {
    pub(super) fn new(arrived: Instant, request_id: String, in_flight: InFlight) -> Self {
        Self {
            arrived,
            request_id,
            surface: "none",
            is_call: false,
            dialect: Dialect::OpenAi,
            stage: Stage::Arrived,
            read_at: None,
            replied: None,
            refused: None,
            model: None,
            principal: None,
            keyed: None,
            connection: None,
            trace: None,
            _in_flight: in_flight,
        }
    }

    /// The admitted call.
    pub(super) fn call(&mut self) -> pingora::Result<&mut Call> {
        match &mut self.stage {
            Stage::Admitted(call) => Ok(call),
            Stage::Arrived | Stage::Finished => {
                tracing::error!(
                    breach = "wrong_stage",
                    request_id = self.request_id,
                    "a phase came in the wrong order"
                );
                Error::e_explain(WRONG_STAGE, "no call is admitted")
            }
        }
    }

    /// The gate, where there is one.
    pub(super) fn gate(&self) -> Option<&Gate> {
        match &self.stage {
            Stage::Admitted(call) => Some(&call.gate),
            Stage::Arrived | Stage::Finished => None,
        }
    }

    /// The same, to do something with it.
    pub(super) fn gate_mut(&mut self) -> Option<&mut Gate> {
        match &mut self.stage {
            Stage::Admitted(call) => Some(&mut call.gate),
            Stage::Arrived | Stage::Finished => None,
        }
    }
}

impl Call {
    /// The model that an endpoint serves this call as.
    pub(super) fn choice(&self, id: EndpointId) -> pingora::Result<&Choice> {
        self.choices.of(id).ok_or_else(unknown)
    }

    /// Whether the upstream is asked for events, for their own sake or to be folded.
    pub(super) fn asks_for_stream(&self, id: EndpointId) -> bool {
        let folds = self.endpoint(id).is_ok_and(|endpoint| endpoint.manners.folds(&self.facts));
        self.facts.stream || folds
    }

    /// The model of the attempt that is under way or was last; before one, the asked one.
    pub(super) fn model_name(&self) -> &str {
        let current = self.current.and_then(|current| self.choices.of(current.endpoint));
        current.or_else(|| self.choices.first()).map_or("", |choice| choice.model.name.as_str())
    }

    pub(super) fn endpoint(&self, id: EndpointId) -> pingora::Result<&Endpoint> {
        self.snapshot.endpoint(id)
    }

    /// Whether a failure speaks of a credential that was replaced meanwhile.
    pub(super) fn is_about_an_earlier_credential(
        &self,
        current: &Current,
        failure: &Failure,
    ) -> pingora::Result<bool> {
        let about_it = matches!(failure, Failure::Credential(_) | Failure::Status(429));
        let now = self.endpoint(current.endpoint)?.credential().map(|credential| credential.held().number);
        Ok(about_it && current.credential.is_some() && current.credential != now)
    }

    pub(super) fn addresses(&self, id: EndpointId) -> pingora::Result<Arc<Addresses>> {
        self.snapshot.addresses.get(id.0).cloned().ok_or_else(unknown)
    }
}

/// An endpoint that no request should know of.
pub(super) fn unknown() -> Box<Error> {
    Error::explain(WRONG_STAGE, "an endpoint that is not in the snapshot")
}
