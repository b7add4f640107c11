//! From the door to the hold: rooms 0 to 4, as a straight line.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use filters::attempt::Planner;
use filters::dialect::Dialect;
use filters::money::Amount;
use filters::route::{self, Candidate};
use filters::upstream::deadline::Deadline;
use filters::verdict::{Reason, Rejection};
use filters::{auth, hold, meter};
use http::header::{AUTHORIZATION, CONTENT_ENCODING, EXPECT};
use pingora_proxy::Session;

use super::bodies::Reserved;
use super::ctx::{Call, Ctx};
use super::gate::{Gate, Source};
use super::gateway::Gateway;
use super::surface::{self, Surface};
use super::{headers, listing, reply};
use crate::config::checked::Model;
use crate::pool::Snapshot;
use crate::pool::keys::Principal;
use crate::store::{Admit, Deny, Ticket};
use crate::{clock, entropy};

/// Headers that may hold a key beside `authorization`.
const KEY_HEADERS: [&str; 3] = ["x-api-key", "x-goog-api-key", "api-key"];
/// When a caller should come back after we were full.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// What a request turned out to be.
pub(super) enum Asked {
    /// A call that goes to an upstream.
    Call(Box<Call>),
    /// Something that we answer ourselves.
    Json(serde_json::Value),
}

impl Gateway {
    /// Walks the request through the rooms.
    pub(super) async fn receive(&self, session: &mut Session, ctx: &mut Ctx) -> Result<Asked, Rejection> {
        let surface = self.door(session, ctx)?;
        let snapshot = self.pool.load();
        let principal = authenticate(session, &snapshot)?;
        ctx.principal = Some(Arc::clone(&principal));
        match surface {
            Surface::Models => Ok(Asked::Json(listing::all(&snapshot, &principal, ctx.dialect))),
            Surface::Model(id) => {
                let model = find_model(&snapshot, &principal, ctx.dialect, &id)?;
                Ok(Asked::Json(listing::one(ctx.dialect, &model.name)))
            }
            Surface::ChatCompletions | Surface::Messages => {
                let (body, reserved) = self.read_body(session).await?;
                let call = self.admit(ctx, snapshot, &principal, body, reserved).await?;
                Ok(Asked::Call(Box::new(call)))
            }
        }
    }

    /// Room 0: do we serve this?
    fn door(&self, session: &Session, ctx: &mut Ctx) -> Result<Surface, Rejection> {
        let head = session.req_header();
        let versioned = headers::is_versioned(head);
        ctx.dialect = surface::dialect_of_errors(head.uri.path(), versioned);
        let bytes: usize =
            head.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
        if bytes + head.raw_path().len() > self.bounds.head_bytes_max {
            let message = "The request's head is too large. Send fewer or shorter headers.";
            return Err(Rejection::new(Reason::HeadTooLarge, message));
        }
        let surface = Surface::find(&head.method, head.uri.path())?;
        ctx.surface = surface.word();
        ctx.dialect = surface.dialect(versioned);
        Ok(surface)
    }

    /// The whole body, within its bounds of size, sum and time.
    async fn read_body(&self, session: &mut Session) -> Result<(Bytes, Reserved), Rejection> {
        if let Some(coding) = session.req_header().headers.get(CONTENT_ENCODING)
            && !coding.as_bytes().eq_ignore_ascii_case(b"identity")
        {
            let message = "Request bodies are read without content-encoding. Send plain JSON.";
            return Err(Rejection::new(Reason::UnsupportedEncoding, message));
        }
        let announced = reply::content_length(session);
        let mut reserved = self.bodies.reserve();
        if announced.is_some_and(|bytes| bytes > self.bounds.body_bytes_max) {
            return Err(self.too_large());
        }
        if !reserved.grow_to(announced.unwrap_or(0)) {
            return Err(full());
        }
        let read = self.read_pieces(session, announced, &mut reserved);
        match tokio::time::timeout(self.bounds.body_timeout, read).await {
            Ok(body) => body.map(|body| (body, reserved)),
            Err(_) => {
                let message = "The request's body did not arrive in time.";
                Err(Rejection::new(Reason::BodyTimeout, message))
            }
        }
    }

    async fn read_pieces(
        &self,
        session: &mut Session,
        announced: Option<usize>,
        reserved: &mut Reserved,
    ) -> Result<Bytes, Rejection> {
        let expects = session
            .req_header()
            .headers
            .get(EXPECT)
            .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let downstream = session.as_downstream_mut();
        if expects {
            // The 100 itself would switch keep-alive off, since the body is not read yet.
            downstream.set_close_on_response_before_downstream_finish(false);
            downstream.write_continue_response().await.map_err(|e| broken(&e))?;
            downstream.set_close_on_response_before_downstream_finish(true);
        }
        let Some(first) = downstream.read_request_body().await.map_err(|e| broken(&e))? else {
            return Ok(Bytes::new());
        };
        let mut body: Option<BytesMut> = None;
        while let Some(piece) = downstream.read_request_body().await.map_err(|e| broken(&e))? {
            // A body of one piece is not copied.
            let body = body.get_or_insert_with(|| {
                let mut body = BytesMut::with_capacity(announced.unwrap_or(first.len() * 4));
                body.extend_from_slice(&first);
                body
            });
            if body.len() + piece.len() > self.bounds.body_bytes_max {
                return Err(self.too_large());
            }
            if !reserved.grow_to(body.len() + piece.len()) {
                return Err(full());
            }
            body.extend_from_slice(&piece);
        }
        Ok(body.map_or(first, BytesMut::freeze))
    }

    fn too_large(&self) -> Rejection {
        let message = format!("The body is larger than {} bytes.", self.bounds.body_bytes_max);
        Rejection::new(Reason::BodyTooLarge, message)
    }

    /// Rooms 2 to 4: what is wanted, who could serve it, is there money for it?
    async fn admit(
        &self,
        ctx: &Ctx,
        snapshot: Arc<Snapshot>,
        principal: &Principal,
        body: Bytes,
        reserved: Reserved,
    ) -> Result<Call, Rejection> {
        let facts = ctx.dialect.read(&body)?;
        let model = find_model(&snapshot, principal, ctx.dialect, &facts.model)?;
        let bound = hold::bound(&facts, &model.limits, principal.default_output_tokens);
        let own_input =
            meter::own_input(facts.input.text_bytes, facts.input.messages, facts.input.inline_images);
        let planner = plan(&snapshot, &model, ctx.dialect);
        let ticket = self.hold(ctx, principal, &model, &bound).await?;
        let gate = Gate::new(Arc::clone(&self.holds), ticket, Source::new(body, reserved));
        Ok(Call {
            snapshot,
            model,
            facts,
            bound,
            own_input,
            planner,
            tried: vec![],
            current: None,
            gate,
            first_attempt: None,
        })
    }

    async fn hold(
        &self,
        ctx: &Ctx,
        principal: &Principal,
        model: &Model,
        bound: &hold::Bound,
    ) -> Result<Ticket, Rejection> {
        let too_dear = |_| {
            let message = "The call could cost more than can be held. Ask for fewer output tokens.";
            Rejection::new(Reason::InvalidValue, message)
        };
        let amount = hold::amount(bound, std::iter::once(&model.price)).map_err(too_dear)?;
        let admit = Admit {
            hold: entropy::hold_id(),
            account: principal.account,
            amount,
            request: ctx.request_id.clone(),
            model: model.name.clone(),
        };
        self.holds.admit(admit).await.map_err(|deny| self.denied(deny, amount, ctx.dialect))
    }

    fn denied(&self, deny: Deny, needed: Amount, dialect: Dialect) -> Rejection {
        let (reason, word, message) = match deny {
            Deny::Funds { available } => {
                let message = format!(
                    "The balance cannot carry this call: it may cost up to {needed}, {available} is available. \
                     Top up, or ask for fewer output tokens (`{}`).",
                    dialect.output_field()
                );
                (Reason::InsufficientBalance, "funds", message)
            }
            Deny::Overloaded => (
                Reason::Overloaded,
                "overloaded",
                "Too many calls are in flight. Come back in a moment.".to_owned(),
            ),
            Deny::Unavailable => {
                let message = "Calls cannot be recorded right now, so none is taken.".to_owned();
                (Reason::StoreUnavailable, "unavailable", message)
            }
        };
        self.metrics.holds_denied.with_label_values(&[word]).inc();
        let rejection = Rejection::new(reason, message);
        if reason.retry_helps() { rejection.retry_after(FULL_RETRY_AFTER) } else { rejection }
    }
}

/// Room 1: who asks?
fn authenticate(session: &Session, snapshot: &Snapshot) -> Result<Arc<Principal>, Rejection> {
    let headers = &session.req_header().headers;
    let authorization = headers.get_all(AUTHORIZATION).into_iter().map(http::HeaderValue::as_bytes);
    let others = KEY_HEADERS
        .into_iter()
        .flat_map(|name| headers.get_all(name).into_iter().map(move |value| (name, value.as_bytes())));
    let presented = auth::presented(authorization, others)?;
    auth::judge(presented.into_iter().filter_map(|key| snapshot.keys.find(key)))
}

/// Room 3: the model's endpoints that speak the caller's dialect, in the order in which they are tried.
fn plan(snapshot: &Snapshot, model: &Model, dialect: Dialect) -> Planner {
    let now = clock::now();
    let mut candidates: Vec<Candidate> = model
        .routes
        .iter()
        .filter_map(|id| {
            let (endpoint, live) = snapshot.catalogue.endpoints.get(id.0).zip(snapshot.live.get(id.0))?;
            (endpoint.provider.dialect == dialect).then_some(())?;
            Some(Candidate { endpoint: *id, weight: f64::from(endpoint.weight) * live.factor(now) })
        })
        .collect();
    entropy::with_rng(|rng| route::order(&mut candidates, rng));
    let order = candidates.into_iter().map(|c| c.endpoint).collect();
    Planner::new(order, snapshot.routing.attempts_max, Deadline::new(now, snapshot.routing.deadline))
}

fn find_model(
    snapshot: &Snapshot,
    principal: &Principal,
    dialect: Dialect,
    name: &str,
) -> Result<Arc<Model>, Rejection> {
    let missing = |message| Rejection::new(Reason::ModelNotFound, message).param("model");
    let model = snapshot.catalogue.models.get(name).ok_or_else(|| {
        missing("There is no such model. `GET /v1/models` lists those that there are.".to_owned())
    })?;
    if !principal.may_use(name) {
        let message = "This key may not use that model. `GET /v1/models` lists those that it may.";
        return Err(Rejection::new(Reason::ModelNotAllowed, message).param("model"));
    }
    if !snapshot.catalogue.speaks(model, dialect) {
        let here = surface::path_of(dialect);
        let message =
            format!("That model is not served at `POST {here}`: none of its upstreams speaks that dialect.");
        return Err(missing(message));
    }
    Ok(Arc::clone(model))
}

fn full() -> Rejection {
    let message = "Too many large requests are in flight. Come back in a moment.";
    Rejection::new(Reason::Overloaded, message).retry_after(FULL_RETRY_AFTER)
}

fn broken(error: &pingora::Error) -> Rejection {
    let message = "The request's body could not be read.";
    Rejection::new(Reason::InvalidRequest, message).context(error.to_string())
}
