//! One probe on the wire: the smallest call, to one route, over a connection of its own.
//!
//! It goes where calls go and as they do: to the addresses that attempts use, through the same peer ([`crate::pool::peer`])
//! with its TLS, with the head that an attempt has, in the provider's dialect with the route's manners, and its answer is
//! judged by the same machine ([`filters::answer`]). It does not go through the gate: there is no caller, nobody else is
//! asked, and an open breaker does not keep it away, since it is to find out whether the place is well again. And over a
//! new connection each time: one that is warm says nothing about whether others can be made.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use filters::answer::{Answer, Ended, Refusal, Rules, Step};
use filters::dialect::{Operation, Shape};
use filters::facts::Facts;
use filters::hold::{self, Bound};
use filters::ids::EndpointId;
use filters::json;
use filters::meter::{self, Ceiling, Used};
use filters::money::{Amount, CostError, PriceCard, cost};
use filters::probe;
use filters::stream::usage::Usage;
use filters::upstream::failure::{Failure, NotAnAnswer, Timer};
use filters::verdict::UpstreamError;
use http::Version;
use pingora::connectors::http::Connector;
use pingora::http::RequestHeader;
use pingora::protocols::http::HttpTask;
use pingora::protocols::http::client::HttpSession;
use rand_core::RngCore;

use crate::config::checked::{Endpoint, Model};
use crate::entropy;
use crate::pool::Snapshot;
use crate::pool::peer::{UPSTREAM_IDLE, Via, peer};
use crate::pool::wire;
use crate::proxy::{UpstreamRequest, failure_of, upstream_head};

/// A probe that is ready to go out.
pub(super) struct Question {
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) model: Arc<Model>,
    pub(super) endpoint: EndpointId,
    operation: Operation,
    facts: Facts,
    bound: Bound,
    body: Bytes,
}

/// What came of it.
pub(super) struct Heard {
    /// Why it is no answer; `None`: it is one.
    pub(super) failure: Option<Failure>,
    pub(super) used: Used,
    /// The provider may have worked on it although no answer came.
    pub(super) may_have_cost: bool,
}

/// How far a probe came.
struct Way {
    answer: Answer,
    sent: bool,
    head_seen: bool,
}

impl Question {
    /// For a route of a model; `None`: there is nothing that it could be asked.
    pub(super) fn new(snapshot: &Arc<Snapshot>, model: &Arc<Model>, id: EndpointId) -> Option<Self> {
        let endpoint = snapshot.endpoint(id).ok()?;
        let operation = probe::operation(&endpoint.provider.surfaces, model.limits.output > 0)?;
        let written = probe::request(operation, &model.name);
        let facts = operation.read(&written).ok()?;
        let bound = hold::bound(&facts, &model.limits, None);
        let mut edits = operation.edits(&written, &facts, &bound, &endpoint.manners);
        let body = Bytes::from(json::apply(&written, &mut edits));
        let (snapshot, model) = (Arc::clone(snapshot), Arc::clone(model));
        Some(Self { snapshot, model, endpoint: id, operation, facts, bound, body })
    }

    /// What it may cost at most.
    ///
    /// # Errors
    /// When that is more than an amount can hold.
    pub(super) fn cost_max(&self) -> Result<Amount, CostError> {
        if self.operation.is_free() {
            return Ok(Amount::ZERO);
        }
        hold::amount(&self.bound, std::iter::once(self.card()?))
    }

    /// What it did cost. A route that does not say what it costs counts at the price of its model: rather too much in the
    /// books than nothing.
    ///
    /// # Errors
    /// When that is more than an amount can hold.
    pub(super) fn cost(&self, usage: &Usage) -> Result<Amount, CostError> {
        if self.operation.is_free() {
            return Ok(Amount::ZERO);
        }
        cost(self.card()?, usage)
    }

    fn card(&self) -> Result<&PriceCard, CostError> {
        let endpoint = self.endpoint().map_err(|_| CostError::TooLarge)?;
        let list = || self.model.price.card(self.bound.input, self.facts.tier);
        Ok(endpoint.cost.as_ref().unwrap_or_else(list))
    }

    pub(super) fn endpoint(&self) -> pingora::Result<&Endpoint> {
        self.snapshot.endpoint(self.endpoint)
    }

    /// Asks, and waits for the answer at most so long.
    pub(super) async fn ask(&self, connector: &Connector, at_most: Duration) -> Heard {
        let shape = Shape::new(&self.facts, &self.model.name, "");
        let rules = Rules::of(self.operation, self.body.len());
        let mut way =
            Way { answer: Answer::new(self.operation, shape, rules), sent: false, head_seen: false };
        if let Ok(endpoint) = self.endpoint() {
            way.answer = way.answer.classed_by(Arc::clone(&endpoint.provider.classify));
        }
        let went = tokio::time::timeout(at_most, self.go(connector, &mut way)).await;
        let failure = match went {
            Ok(Ok(())) => None,
            Ok(Err(failure)) => Some(failure),
            Err(_) if !way.sent => Some(Failure::Timeout(Timer::Connect)),
            Err(_) if !way.head_seen => Some(Failure::Timeout(Timer::FirstByte)),
            Err(_) => Some(Failure::Timeout(Timer::Share)),
        };
        let ceiling = Ceiling { context: self.model.limits.context, output: self.bound.output };
        let used = way.answer.used(meter::own_input(&self.facts.input), &ceiling);
        let refused = way.answer.is_refused();
        Heard { may_have_cost: failure.is_some() && way.sent && !refused, failure, used }
    }

    async fn go(&self, connector: &Connector, way: &mut Way) -> Result<(), Failure> {
        let endpoint = self.endpoint().map_err(|_| Failure::Ours)?;
        let provider = &endpoint.provider;
        let addresses = self.snapshot.addresses.get(self.endpoint.0).ok_or(Failure::Ours)?;
        let address = addresses.next().await.ok_or(Failure::Connect)?;
        let via = Via::New(entropy::with_rng(RngCore::next_u64));
        let peer = peer(provider, address, via, provider.timers.connect);
        let (mut session, _) =
            connector.get_http_session(&*peer).await.map_err(|error| failure_of(&error))?;
        let done = self.exchange(&mut session, endpoint, way).await;
        // A session of HTTP/2 that is not given back keeps its connection for ever.
        let is_one = session.as_http1().is_some();
        if done.is_ok() || !is_one {
            let idle = Some(Duration::from_secs(1).min(UPSTREAM_IDLE));
            connector.release_http_session(session, &*peer, idle).await;
        }
        done
    }

    async fn exchange(
        &self,
        session: &mut HttpSession,
        endpoint: &Endpoint,
        way: &mut Way,
    ) -> Result<(), Failure> {
        let broken = |error: Box<pingora::Error>| failure_of(&error);
        let head = self.head(endpoint, wire::version(session)).map_err(|_| Failure::Ours)?;
        session.write_request_header(Box::new(head)).await.map_err(broken)?;
        way.sent = true;
        session.write_request_body(self.body.clone(), true).await.map_err(broken)?;
        session.finish_request_body().await.map_err(broken)?;
        loop {
            let (bytes, ends) = match wire::next_final_piece(session).await.map_err(broken)? {
                HttpTask::Header(head, ends) => {
                    way.head_seen = true;
                    let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
                    let (kind, coding) = (text("content-type"), text("content-encoding"));
                    refused(way.answer.head(head.status.as_u16(), kind, coding))?;
                    (None, ends)
                }
                HttpTask::Body(bytes, ends) | HttpTask::UpgradedBody(bytes, ends) => (bytes, ends),
                HttpTask::Trailer(_) | HttpTask::Done => (None, true),
                HttpTask::Failed(error) => return Err(broken(error)),
            };
            if let Some(bytes) = bytes {
                refused(way.answer.body(&bytes))?;
            }
            if ends {
                break;
            }
        }
        refused(way.answer.end())?;
        match way.answer.ended() {
            Ended::Properly => Ok(()),
            Ended::Broken(failure) => Err(failure.clone()),
            Ended::Not => Err(Failure::NotAnAnswer(NotAnAnswer::Empty)),
        }
    }

    fn head(&self, endpoint: &Endpoint, version: Version) -> pingora::Result<RequestHeader> {
        let held = endpoint.credential().map(crate::credential::Credential::held);
        upstream_head(&UpstreamRequest {
            provider: &endpoint.provider,
            operation: self.operation,
            credential: held.as_ref().map(|held| &held.secret),
            stream: false,
            body_bytes: self.body.len(),
            asked: &RequestHeader::build("POST", b"/", None)?,
            version,
        })
    }
}

/// The failure of an answer that is none.
fn refused(step: Step) -> Result<(), Failure> {
    match step {
        Step::Hold | Step::Forward(_) => Ok(()),
        Step::Failed(Refusal { failure, error: UpstreamError { .. } }) => Err(failure),
    }
}
