//! The one door through which a rejection becomes HTTP.

use std::time::Duration;

use bytes::Bytes;
use filters::verdict::{Reason, Rejection};
use http::Method;
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, RETRY_AFTER};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;

use super::ctx::Ctx;
use super::headers;
use super::page::Page;
use super::surface::{self, Surface};
use crate::entropy;

/// How long the rest of a request body is read and thrown away, so that the caller can read our
/// answer: closing on unread bytes would reset the connection under it.
const DRAIN: Duration = Duration::from_secs(1);
/// The same with HTTP/2. Giving up the stream would reset it, and some clients (curl 7.88) take an answer that is
/// followed by a reset for none; one that hears the answer stops sending by itself.
const DRAIN_HTTP2: Duration = Duration::from_secs(5);
/// A body announced up to this many bytes is read before the answer, and the connection stays open.
const DRAIN_BYTES_MAX: usize = 1 << 20;

/// Answers with a rejection in the caller's dialect.
pub(super) async fn reject(
    session: &mut ServerSession,
    ctx: &mut Ctx,
    rejection: &Rejection,
) -> pingora::Result<()> {
    let body = ctx.dialect.error_body(rejection, &ctx.request_id);
    let mut head = ResponseHeader::build(rejection.status(), Some(8))?;
    head.insert_header(CONTENT_TYPE, "application/json")?;
    head.insert_header(CONTENT_LENGTH, body.len().to_string())?;
    headers::name_request(&mut head, &ctx.request_id)?;
    if let Some(wait) = rejection.retry_after {
        // Whole seconds, rounded up: never ask a caller back too early.
        let seconds = wait.as_millis().div_ceil(1000).max(1);
        head.insert_header(RETRY_AFTER, seconds.to_string())?;
    }
    if !rejection.reason.retry_helps() {
        head.insert_header("x-should-retry", "false")?;
    }
    if rejection.reason == Reason::MethodNotAllowed
        && let Some(surface) = Surface::at(session.req_header().uri.path())
    {
        head.insert_header(ALLOW, surface::listed(surface.methods()))?;
    }
    if let Some(gate) = ctx.gate() {
        head.insert_header("x-tollgate-attempts", gate.attempts().to_string())?;
    }
    ctx.replied = Some(rejection.reason.code());
    ctx.refused = Some((rejection.reason, rejection.of_upstreams));
    tracing::debug!(
        request_id = ctx.request_id,
        code = rejection.reason.code(),
        context = rejection.context,
        "rejected"
    );
    let is_tunnel = session.req_header().method == Method::CONNECT;
    let rest = if is_tunnel || rejection.reason == Reason::InvalidRequest {
        Rest::Unknown
    } else if rejection.reason == Reason::BodyTimeout {
        Rest::Late
    } else {
        Rest::OnItsWay
    };
    send(session, head, body, rest).await
}

/// What is said, as bytes of HTTP/1.1, to who sent no head that can be read; the connection closes behind it.
/// `start` is how the head began: as much as is needed to tell its dialect.
#[must_use]
pub fn unreadable(start: &[u8]) -> Bytes {
    let target = start.split(|byte| *byte == b' ').nth(1).and_then(|path| std::str::from_utf8(path).ok());
    let path = target.and_then(|target| target.split(['?', '\r', '\n']).next()).unwrap_or_default();
    let message = "The request's head cannot be read. Check its framing; more than 256 headers are too many.";
    let rejection = Rejection::new(Reason::InvalidRequest, message);
    let id = entropy::request_id();
    let body = surface::dialect_of_errors(path, false).error_body(&rejection, &id);
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         x-request-id: {id}\r\nrequest-id: {id}\r\nx-should-retry: false\r\nconnection: close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), &body].concat().into()
}

/// Answers with JSON of our own.
pub(super) async fn json(session: &mut ServerSession, ctx: &mut Ctx, body: Bytes) -> pingora::Result<()> {
    let mut head = ResponseHeader::build(200, Some(4))?;
    head.insert_header(CONTENT_TYPE, "application/json")?;
    head.insert_header(CONTENT_LENGTH, body.len().to_string())?;
    headers::name_request(&mut head, &ctx.request_id)?;
    ctx.replied = Some("ok");
    send(session, head, body, Rest::OnItsWay).await
}

/// Answers with the status page.
pub(super) async fn page(
    session: &mut ServerSession,
    ctx: &mut Ctx,
    page: &Page,
    policy: &str,
) -> pingora::Result<()> {
    let mut head = page.head(policy)?;
    headers::name_request(&mut head, &ctx.request_id)?;
    ctx.replied = Some("ok");
    send(session, head, page.body(), Rest::OnItsWay).await
}

/// What is known of the part of a request's body that was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    OnItsWay,
    /// It was waited for long enough.
    Late,
    /// Nobody knows where it ends.
    Unknown,
}

async fn send(
    session: &mut ServerSession,
    head: ResponseHeader,
    body: Bytes,
    rest: Rest,
) -> pingora::Result<()> {
    let unread = !session.is_body_done();
    let http2 = session.is_http2();
    // A caller that waits for a 100 sends nothing before it; HTTP/2 has none here, so that some send anyway.
    let expects = !http2 && session.req_header().headers.contains_key(EXPECT);
    let announced = content_length(session);
    session.set_total_drain_timeout(Some(if http2 { DRAIN_HTTP2 } else { DRAIN }));
    let is_short = announced.is_some_and(|bytes| bytes <= DRAIN_BYTES_MAX);
    let may_read = unread && !expects && rest != Rest::Unknown;
    let first = may_read && !http2 && is_short;
    if first && session.drain_request_body().await.is_err() {
        session.set_keepalive(None);
    }
    if rest == Rest::Unknown || (unread && !first) {
        session.set_keepalive(None);
    }
    session.write_response_header(Box::new(head)).await?;
    session.write_response_body(body, true).await?;
    if may_read && !first && !(http2 && rest == Rest::Late) {
        // Best effort: after this the connection closes, or the stream is reset.
        let _late = session.drain_request_body().await;
    }
    Ok(())
}

/// The announced length of the request body.
pub(super) fn content_length(session: &ServerSession) -> Option<usize> {
    session.req_header().headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
