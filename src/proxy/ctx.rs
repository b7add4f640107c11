//! What a request carries from phase to phase.
//!
//! [`Stage`] says how far it is. A hook takes what its room needs through [`Ctx::call`]; a stage that
//! Pingora should never be in is one typed error: the call gets 500, its hold settles.

use std::sync::Arc;
use std::time::Instant;

use filters::attempt::Planner;
use filters::dialect::Dialect;
use filters::exhausted::Tried;
use filters::facts::Facts;
use filters::hold::Bound;
use filters::ids::{EndpointId, ModelId};
use filters::money::Amount;
use filters::upstream::board::Pass;
use pingora::{Error, ErrorType};

use super::gate::Gate;
use super::keyed::First;
use crate::config::checked::{Endpoint, Model};
use crate::drain::InFlight;
use crate::edge::Connection;
use crate::pool::endpoint::Addresses;
use crate::pool::upstreams::Leg;
use crate::pool::{Snapshot, keys::Principal};

/// A phase came in the wrong order.
pub(super) const WRONG_STAGE: ErrorType = ErrorType::new("wrong stage");

/// One request.
pub struct Ctx {
    pub(super) arrived: Instant,
    pub(super) request_id: String,
    pub(super) surface: &'static str,
    pub(super) dialect: Dialect,
    pub(super) stage: Stage,
    /// The code of what went out, where it was no answer of an upstream.
    pub(super) replied: Option<&'static str>,
    pub(super) principal: Option<Arc<Principal>>,
    /// The call carries an idempotency key and is the first under it.
    pub(super) keyed: Option<First>,
    /// The connection it came by.
    pub(super) connection: Option<Arc<Connection>>,
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
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) model: Arc<Model>,
    pub(super) facts: Facts,
    pub(super) bound: Bound,
    pub(super) own_input: u64,
    pub(super) planner: Planner,
    /// The model as the board knows it.
    pub(super) routed: ModelId,
    /// Given back when the call is over.
    pub(super) pass: Option<Pass>,
    /// The attempt that is sent again, since nobody saw it.
    pub(super) unseen: Option<Leg>,
    pub(super) tried: Vec<Tried>,
    pub(super) current: Option<Current>,
    pub(super) gate: Arc<Gate>,
    pub(super) first_attempt: Option<Instant>,
    /// The key's allowance for calls that are left early.
    pub(super) abandoned_max: Option<Amount>,
}

/// The attempt that is under way, or was last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Current {
    pub(super) endpoint: EndpointId,
    pub(super) began: Instant,
}

impl Ctx {
    pub(super) fn new(arrived: Instant, request_id: String, in_flight: InFlight) -> Self {
        Self {
            arrived,
            request_id,
            surface: "none",
            dialect: Dialect::OpenAi,
            stage: Stage::Arrived,
            replied: None,
            principal: None,
            keyed: None,
            connection: None,
            _in_flight: in_flight,
        }
    }

    /// The admitted call.
    pub(super) fn call(&mut self) -> pingora::Result<&mut Call> {
        match &mut self.stage {
            Stage::Admitted(call) => Ok(call),
            Stage::Arrived | Stage::Finished => {
                tracing::error!(request_id = self.request_id, "a phase came in the wrong order");
                Error::e_explain(WRONG_STAGE, "no call is admitted")
            }
        }
    }

    /// The gate, where there is one.
    pub(super) fn gate(&self) -> Option<Arc<Gate>> {
        match &self.stage {
            Stage::Admitted(call) => Some(Arc::clone(&call.gate)),
            Stage::Arrived | Stage::Finished => None,
        }
    }
}

impl Call {
    pub(super) fn endpoint(&self, id: EndpointId) -> pingora::Result<&Endpoint> {
        self.snapshot.catalogue.endpoints.get(id.0).ok_or_else(unknown)
    }

    pub(super) fn addresses(&self, id: EndpointId) -> pingora::Result<Arc<Addresses>> {
        self.snapshot.addresses.get(id.0).cloned().ok_or_else(unknown)
    }
}

fn unknown() -> Box<Error> {
    Error::explain(WRONG_STAGE, "an endpoint that is not in the snapshot")
}
