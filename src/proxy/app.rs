//! A request's way, in the order in which it meets the rooms. This file is the table of contents: every step calls a
//! room and nothing else.
//!
//! Pingora gives us a session with a caller, before its first byte is read, and takes it back for the next request.

use std::pin::pin;
use std::sync::Arc;

use async_trait::async_trait;
use filters::verdict::{Reason, Rejection};
use http::Version;
use pingora::apps::{HttpPersistentSettings, HttpServerApp, HttpServerOptions, ReusedHttpStream};
use pingora::http::RequestHeader;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::v2::server::H2Options;
use pingora::server::ShutdownWatch;
use pingora::upstreams::peer::{HttpPeer, Peer as _};
use pingora::{BError, Error, ErrorType, Result};
use tokio::sync::watch;

use super::ctx::{Call, Ctx, Stage, WRONG_STAGE};
use super::exchange::Exchange;
use super::gate::Gate;
use super::gateway::Gateway;
use super::request::Asked;
use super::unseen::{Unseen, unseen, unsent};
use super::{headers, reply};
use crate::credential::Credential;
use crate::edge::Connection;
use crate::pool::wire::Wires;
use crate::{clock, entropy};

/// The gateway on one thread, with its own connections to upstreams.
pub struct App {
    pub gateway: Gateway,
    pub wires: Arc<Wires>,
    pub options: HttpServerOptions,
    pub http2: H2Options,
    /// Turns true when no head is waited for any more: the door's.
    pub closing: watch::Sender<bool>,
}

/// An attempt that ended without an answer.
struct Failed {
    error: BError,
    /// Whether nobody worked on it.
    unseen: Option<Unseen>,
}

#[async_trait]
impl HttpServerApp for App {
    /// From a request's head to the connection's next request.
    async fn process_new_http(
        self: &Arc<Self>,
        session: ServerSession,
        shutdown: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        let mut session = Box::new(session);
        if !self.read_head(&mut session).await {
            return None;
        }
        if *shutdown.borrow() {
            session.set_keepalive(None);
        }
        let mut ctx = Ctx::new(clock::now(), entropy::request_id(), self.gateway.drain.enter());
        self.gateway.begin(&mut session, &mut ctx);
        let is_sound = self.answer(&mut session, &mut ctx).await;
        self.gateway.finish(&session, &mut ctx).await;
        if let Some(connection) = &ctx.connection {
            connection.request_ended();
        }
        if !is_sound {
            return None;
        }
        let settings = HttpPersistentSettings::for_session(&session);
        let stream = session.finish().await.ok().flatten()?;
        Some(ReusedHttpStream::from_reusable_stream(stream, settings))
    }

    fn server_options(&self) -> Option<&HttpServerOptions> {
        Some(&self.options)
    }

    fn h2_options(&self) -> Option<H2Options> {
        Some(self.http2.clone())
    }
}

impl App {
    /// Reads a request's head; whether there is one to be answered.
    async fn read_head(&self, session: &mut ServerSession) -> bool {
        let closing = async {
            let mut closing = self.closing.subscribe();
            let _closed = closing.wait_for(|closing| *closing).await;
        };
        let read = tokio::select! {
            // A head that is here is read.
            biased;
            read = session.read_request() => read,
            () = closing => return false,
        };
        let Err(error) = read else { return read.unwrap_or(false) };
        // Not the error's own words: they repeat what came.
        tracing::debug!(why = error.etype().as_str(), "no head could be read");
        if *error.etype() == ErrorType::InvalidHTTPHeader {
            let _gone = session.respond_error(400).await;
        }
        session.shutdown().await;
        false
    }

    /// Rooms 0 to 7. Whether the caller's connection is in order behind the answer.
    async fn answer(&self, session: &mut ServerSession, ctx: &mut Ctx) -> bool {
        let replied = match self.gateway.receive(session, ctx).await {
            Ok(Asked::Call(call)) => {
                ctx.stage = Stage::Admitted(call);
                return self.call(session, ctx).await;
            }
            Ok(Asked::Json(body)) => reply::json(session, ctx, body).await,
            Ok(Asked::Status(page)) => reply::page(session, ctx, &page, self.gateway.status.policy()).await,
            Err(rejection) => reply::reject(session, ctx, &rejection).await,
        };
        replied.is_ok()
    }

    /// Rooms 5 to 7: asks until somebody serves.
    async fn call(&self, session: &mut ServerSession, ctx: &mut Ctx) -> bool {
        match self.attempts(session, ctx).await {
            Ok(()) if ctx.gate().is_some_and(Gate::caller_has_left) => false,
            Ok(()) => session.finish_body().await.is_ok(),
            Err(error) => self.conclude(session, &error, ctx).await.is_ok(),
        }
    }

    async fn attempts(&self, session: &mut ServerSession, ctx: &mut Ctx) -> Result<()> {
        loop {
            let peer = self.gateway.next_peer(session, ctx).await?;
            let Err(failed) = self.attempt(session, ctx.call()?, peer).await else { return Ok(()) };
            let Failed { error, unseen } = failed;
            if !self.gateway.goes_on(ctx, &error, unseen)? {
                return Err(error);
            }
        }
    }

    /// One attempt.
    async fn attempt(
        &self,
        session: &mut ServerSession,
        call: &mut Call,
        peer: Box<HttpPeer>,
    ) -> Result<(), Failed> {
        let cuts = || self.gateway.drain.cuts();
        let may_be_one = peer.get_alpn().is_none_or(|alpn| alpn.get_min_http_version() == 1);
        let opened = {
            // Gone with its peer before the exchange: a call would keep the room of both as long as it runs.
            let opening = pin!(self.wires.open(peer));
            Exchange::new(session, &mut call.gate, cuts()).beside(opening).await.flatten()
        };
        let mut wire = opened.map_err(|error| Failed { unseen: unsent(&error), error })?;
        let reused = wire.reused;
        let done = match upstream_head(call, session.req_header(), wire.version()) {
            Ok(head) => {
                call.gate.sending(wire.socket(), reused, wire.version());
                Exchange::new(session, &mut call.gate, cuts()).run(&mut wire.session, head).await
            }
            Err(error) => Err(error),
        };
        let wants_one =
            |error: &BError| matches!(error.etype(), ErrorType::H2Downgrade | ErrorType::InvalidH2);
        if may_be_one && done.as_ref().is_err_and(wants_one) {
            self.wires.prefer_one(&wire);
        }
        self.wires.give_back(wire, done.as_ref().is_ok_and(|is_sound| *is_sound)).await;
        done.map(drop).map_err(|error| Failed { unseen: unseen(&error, reused, may_be_one), error })
    }

    /// What is still to be said to the caller.
    async fn conclude(&self, session: &mut ServerSession, error: &Error, ctx: &mut Ctx) -> Result<()> {
        if let Some(gate) = ctx.gate_mut() {
            if gate.is_forsaken() {
                return Error::e_explain(ErrorType::ConnectionClosed, "nobody listens");
            }
            if gate.is_committed() {
                return Exchange::new(session, gate, self.gateway.drain.cuts()).end_stream().await;
            }
        }
        let rejection = self.gateway.give_up(ctx).unwrap_or_else(|_| internal(error));
        // Settle first: the caller may come back at once with the money that this frees.
        if let Some(gate) = ctx.gate_mut() {
            gate.settle().await;
        }
        reply::reject(session, ctx, &rejection).await
    }
}

impl Gateway {
    /// A head is here: what holds for its request from now on.
    fn begin(&self, session: &mut ServerSession, ctx: &mut Ctx) {
        ctx.connection = Connection::of(session.digest());
        let may_follow = ctx.connection.as_ref().is_none_or(|connection| connection.request_began());
        let bounds = self.bounds.load();
        // What Pingora has switched off stays off: the caller closes, or the framing is not to be trusted.
        let wanted = session.get_keepalive().is_some() && may_follow && !self.drain.is_closing();
        session.set_keepalive(wanted.then(|| bounds.keepalive.as_secs().max(1)));
        // Only for reads that are not ours: the one limit of a body would else run out twice at once.
        session.set_read_timeout(Some(bounds.body_timeout.saturating_mul(2)));
        session.set_write_timeout(Some(bounds.write_timeout));
        // Without it one stray byte behind the request would cut the running answer.
        session.set_pipelining_enabled(true);
        if let Some(id) = headers::request_id(session.req_header()) {
            ctx.request_id = id;
        }
        if let Some(telemetry) = &self.telemetry {
            ctx.trace = telemetry.begin(headers::traceparent(session.req_header()));
        }
    }
}

/// The head of the attempt that is under way, for a caller whose head is `asked`.
fn upstream_head(call: &mut Call, asked: &RequestHeader, version: Version) -> Result<Box<RequestHeader>> {
    let Some(mut current) = call.current else {
        return Error::e_explain(WRONG_STAGE, "no attempt is under way");
    };
    let endpoint = call.snapshot.endpoint(current.endpoint)?;
    let held = endpoint.credential().map(Credential::held);
    current.credential = held.as_ref().map(|held| held.number);
    let head = headers::upstream(&headers::Request {
        provider: &endpoint.provider,
        operation: call.operation,
        credential: held.as_ref().map(|held| &held.secret),
        stream: call.asks_for_stream(current.endpoint),
        body_bytes: call.gate.body_bytes(),
        asked,
        version,
    });
    call.current = Some(current);
    head.map(Box::new)
}

fn internal(error: &Error) -> Rejection {
    let reason = error.etype().as_str();
    tracing::error!(breach = "inside", reason, %error, "a request failed inside the gateway");
    Rejection::new(Reason::Internal, "Something broke in the gateway.")
}
