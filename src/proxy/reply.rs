//! The one door through which a rejection becomes HTTP.

use std::time::Duration;

use filters::verdict::{Reason, Rejection};
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use pingora::http::ResponseHeader;
use pingora_proxy::Session;

use super::ctx::Ctx;
use super::headers;
use super::surface::Surface;

/// How long the rest of a request body is read and thrown away, so that the caller can read our
/// answer: closing on unread bytes would reset the connection under it.
const DRAIN: Duration = Duration::from_secs(1);
/// A body announced up to this many bytes is read before the answer, and the connection stays open.
const DRAIN_BYTES_MAX: usize = 1 << 20;

/// Answers with a rejection in the caller's dialect.
pub(super) async fn reject(
    session: &mut Session,
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
        head.insert_header(ALLOW, surface.method().as_str())?;
    }
    if let Some(gate) = ctx.gate() {
        head.insert_header("x-tollgate-attempts", gate.attempts().to_string())?;
    }
    ctx.replied = Some(rejection.reason.code());
    tracing::debug!(
        request_id = ctx.request_id,
        code = rejection.reason.code(),
        context = rejection.context,
        "rejected"
    );
    send(session, head, body, rejection.reason == Reason::InvalidRequest).await
}

/// Answers with JSON of our own.
pub(super) async fn json(session: &mut Session, ctx: &mut Ctx, body: bytes::Bytes) -> pingora::Result<()> {
    let mut head = ResponseHeader::build(200, Some(4))?;
    head.insert_header(CONTENT_TYPE, "application/json")?;
    head.insert_header(CONTENT_LENGTH, body.len().to_string())?;
    headers::name_request(&mut head, &ctx.request_id)?;
    ctx.replied = Some("ok");
    send(session, head, body, false).await
}

/// `broken`: nobody knows where the request's body ends.
async fn send(
    session: &mut Session,
    head: ResponseHeader,
    body: bytes::Bytes,
    broken: bool,
) -> pingora::Result<()> {
    let downstream = &mut session.downstream_session;
    let unread = !downstream.is_body_done();
    let expects = downstream.req_header().headers.contains_key(http::header::EXPECT);
    let announced = content_length(session);
    let downstream = &mut session.downstream_session;
    downstream.set_total_drain_timeout(Some(DRAIN));
    // A caller that waits for a 100 sends nothing before it.
    let first = unread && !expects && !broken && announced.is_some_and(|bytes| bytes <= DRAIN_BYTES_MAX);
    if first && downstream.drain_request_body().await.is_err() {
        downstream.set_keepalive(None);
    }
    if broken || (unread && !first) {
        downstream.set_keepalive(None);
    }
    downstream.write_response_header(Box::new(head)).await?;
    downstream.write_response_body(body, true).await?;
    if unread && !first && !expects && !broken {
        // Best effort: after this the connection closes.
        let _late = downstream.drain_request_body().await;
    }
    Ok(())
}

/// The announced length of the request body.
pub(super) fn content_length(session: &Session) -> Option<usize> {
    session.req_header().headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
