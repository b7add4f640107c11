//! Pingora's callbacks, in the order in which a request meets them.
//!
//! This file is the table of contents of a request: every hook calls a room and nothing else.

use std::sync::Arc;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use filters::verdict::{Reason, Rejection};
use pingora::http::RequestHeader;
use pingora::protocols::Digest;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, Result};
use pingora_proxy::{FailToProxy, ProxyHttp, ProxyWarnLogContext, Session};

use super::bodies::Bodies;
use super::ctx::{Ctx, Stage};
use super::keyed::KeyedCalls;
use super::request::Asked;
use super::warm::Target;
use super::{gate, headers, reply};
use crate::books::Books;
use crate::config::checked::Bounds;
use crate::credential::Credential;
use crate::drain::Drain;
use crate::edge::Connection;
use crate::ops::Metrics;
use crate::ops::otlp::Telemetry;
use crate::pool::Pool;
use crate::record::recorder::Recorder;
use crate::status::StatusPage;
use crate::store::Holds;
use crate::{clock, entropy};

/// The gateway, as Pingora sees it.
#[derive(Clone)]
pub struct Gateway {
    pub pool: Arc<Pool>,
    pub holds: Arc<dyn Holds>,
    pub bounds: Arc<ArcSwap<Bounds>>,
    pub bodies: Arc<Bodies>,
    pub metrics: Arc<Metrics>,
    pub drain: Arc<Drain>,
    pub books: Arc<Books>,
    pub keyed: Arc<KeyedCalls>,
    pub recorder: Arc<Recorder>,
    /// `None`: nobody collects spans.
    pub telemetry: Option<Telemetry>,
    pub status: Arc<StatusPage>,
}

#[async_trait]
impl ProxyHttp for Gateway {
    type CTX = Ctx;

    fn new_ctx(&self) -> Ctx {
        Ctx::new(clock::now(), entropy::request_id(), self.drain.enter())
    }

    async fn early_request_filter(&self, session: &mut Session, ctx: &mut Ctx) -> Result<()> {
        if let Some(target) = Target::of(session) {
            ctx.stage = Stage::WarmingUp(target);
            return Ok(());
        }
        ctx.connection = Connection::of(session.as_downstream().digest());
        let may_follow = ctx.connection.as_ref().is_none_or(|connection| connection.request_began());
        let downstream = session.as_downstream_mut();
        let bounds = self.bounds.load_full();
        // What Pingora has switched off stays off: the caller closes, or the framing is not to be trusted.
        let wanted = downstream.get_keepalive().is_some() && may_follow && !self.drain.is_closing();
        let keepalive = wanted.then(|| bounds.keepalive.as_secs().max(1));
        downstream.set_keepalive(keepalive);
        // Only for reads that are not ours: the one limit of a body would else run out twice at once.
        downstream.set_read_timeout(Some(bounds.body_timeout.saturating_mul(2)));
        downstream.set_write_timeout(Some(bounds.write_timeout));
        // Without it one stray byte behind the request would cut the running answer.
        downstream.set_pipelining_enabled(true);
        if let Some(id) = headers::request_id(session.req_header()) {
            ctx.request_id = id;
        }
        if let Some(telemetry) = &self.telemetry {
            ctx.trace = telemetry.begin(headers::traceparent(session.req_header()));
        }
        Ok(())
    }

    /// Rooms 0 to 4. `true`: answered here.
    async fn request_filter(&self, session: &mut Session, ctx: &mut Ctx) -> Result<bool> {
        if ctx.warming().is_some() {
            return Ok(false);
        }
        match self.receive(session, ctx).await {
            Ok(Asked::Call(call)) => {
                gate::wrap(session, &call.gate, self.drain.cuts());
                ctx.stage = Stage::Admitted(call);
                Ok(false)
            }
            Ok(Asked::Json(body)) => reply::json(session, ctx, body).await.map(|()| true),
            Ok(Asked::Status(page)) => {
                reply::page(session, ctx, &page, self.status.policy()).await.map(|()| true)
            }
            Err(rejection) => reply::reject(session, ctx, &rejection).await.map(|()| true),
        }
    }

    /// Room 5: once per attempt.
    async fn upstream_peer(&self, session: &mut Session, ctx: &mut Ctx) -> Result<Box<HttpPeer>> {
        match ctx.warming() {
            Some(target) => target.peer().await,
            None => self.next_peer(session, ctx).await,
        }
    }

    async fn connected_to_upstream(
        &self,
        _session: &mut Session,
        reused: bool,
        _peer: &HttpPeer,
        socket: std::os::fd::RawFd,
        _digest: Option<&Digest>,
        ctx: &mut Ctx,
    ) -> Result<()> {
        if ctx.warming().is_none() {
            ctx.call()?.gate.connected(socket, reused);
        }
        Ok(())
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        head: &mut RequestHeader,
        ctx: &mut Ctx,
    ) -> Result<()> {
        if let Some(target) = ctx.warming() {
            return target.head(head);
        }
        let call = ctx.call()?;
        let stream = call.current.is_some_and(|current| call.asks_for_stream(current.endpoint));
        let Some(current) = &mut call.current else {
            return Error::e_explain(super::ctx::WRONG_STAGE, "no attempt is under way");
        };
        let endpoint = call.snapshot.endpoint(current.endpoint)?;
        let held = endpoint.credential().map(Credential::held);
        current.credential = held.as_ref().map(|held| held.number);
        let secret = held.as_ref().map(|held| &held.secret);
        let asked = session.req_header();
        // The connection has decided about HTTP's version already.
        let version = head.version;
        let bytes = call.gate.body_bytes();
        *head = headers::upstream(&endpoint.provider, call.operation, secret, stream, bytes, asked)?;
        head.set_version(version);
        call.gate.sending(clock::now(), version);
        Ok(())
    }

    fn fail_to_connect(
        &self,
        _session: &mut Session,
        _peer: &HttpPeer,
        ctx: &mut Ctx,
        error: Box<Error>,
    ) -> Box<Error> {
        let unseen = gate::unsent(&error);
        self.after_error(ctx, error, unseen)
    }

    fn error_while_proxy(
        &self,
        _peer: &HttpPeer,
        _session: &mut Session,
        error: Box<Error>,
        ctx: &mut Ctx,
        client_reused: bool,
    ) -> Box<Error> {
        let unseen = gate::unseen(&error, client_reused);
        self.after_error(ctx, error, unseen)
    }

    /// Nobody served, or a committed stream has to be ended.
    async fn fail_to_proxy(&self, session: &mut Session, error: &Error, ctx: &mut Ctx) -> FailToProxy {
        let code = match ctx.warming() {
            Some(_) => 0,
            None => self.conclude(session, error, ctx).await,
        };
        FailToProxy { error_code: code, can_reuse_downstream: false }
    }

    /// Rooms 8 and 9.
    async fn logging(&self, session: &mut Session, error: Option<&Error>, ctx: &mut Ctx) {
        if let Some(target) = ctx.warming() {
            return target.end(error);
        }
        if let Some(gate) = ctx.gate() {
            gate::unwrap(session, &gate);
        }
        self.finish(session, ctx).await;
        if let Some(connection) = &ctx.connection {
            connection.request_ended();
        }
    }

    // Our decision and access lines say it better, and without paths or hosts in them.
    fn suppress_error_log(&self, _session: &Session, _ctx: &Ctx, _error: &Error) -> bool {
        true
    }

    fn suppress_proxy_warn_log(
        &self,
        _session: &Session,
        _ctx: &Ctx,
        _error: &Error,
        _context: ProxyWarnLogContext,
    ) -> bool {
        true
    }
}

impl Gateway {
    /// What is still to be said to the caller. Answers the status, or 0 where nobody listens.
    async fn conclude(&self, session: &mut Session, error: &Error, ctx: &mut Ctx) -> u16 {
        if let Some(gate) = ctx.gate() {
            gate::unwrap(session, &gate);
            if gate.caller_has_left() && !gate.runs_on() {
                return 0;
            }
            if gate.is_committed() {
                gate.end_stream(session).await;
                return session.response_written().map_or(0, |head| head.status.as_u16());
            }
        }
        if ctx.replied.is_some() {
            return 0; // The answer was ready, but the caller had gone.
        }
        let rejection = match ctx.call() {
            Ok(_) => self.give_up(ctx).unwrap_or_else(|_| internal(error)),
            Err(_) => internal(error),
        };
        // Settle first: the caller may come back at once with the money that this frees.
        if let Some(gate) = ctx.gate() {
            gate.settle().await;
        }
        match reply::reject(session, ctx, &rejection).await {
            Ok(()) => rejection.status(),
            Err(_) => 0,
        }
    }
}

fn internal(error: &Error) -> Rejection {
    let reason = error.etype().as_str();
    tracing::error!(breach = "inside", reason, %error, "a request failed inside the gateway");
    Rejection::new(Reason::Internal, "Something broke in the gateway.")
}
