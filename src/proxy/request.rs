//! From the door to the call: rooms 0 to 2, as a straight line; `admit` goes on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use filters::auth;
use filters::verdict::{Reason, Rejection};
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, TRANSFER_ENCODING};
use http::{HeaderName, Method};
use pingora::protocols::http::ServerSession;

use super::admit::Body;
use super::bodies::Reserved;
use super::choices::{find_model, not_found};
use super::ctx::{Call, Ctx};
use super::gateway::Gateway;
use super::keyed::Repeat;
use super::page::Page;
use super::surface::{self, Surface};
use super::{headers, listing, reply};
use crate::clock;
use crate::pool::keys::{KeyTable, Principal};

/// Headers that may hold a key beside `authorization`.
static KEY_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("x-goog-api-key"),
    HeaderName::from_static("api-key"),
];
/// When a caller should come back after we were full.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The largest buffer that an announcement alone makes, in bytes. It is only an address until bytes come; what would be
/// moved out of a smaller one would be in memory twice, and leave a hole that the next body does not fit into.
const BODY_START_BYTES_MAX: usize = 16 << 20;

/// What a request turned out to be.
pub(super) enum Asked {
    /// A call that goes to an upstream.
    Call(Box<Call>),
    /// Something that we answer ourselves.
    Json(Bytes),
    /// The status page.
    Status(Box<Page>),
}

/// Two readers could see two different ends of the body, and so two different next requests (RFC 9112
/// §6.3: a request with both fields "ought to be handled as an error"). So could they of a head with lines that end in
/// LF alone (§2.2), or of a coding beside `chunked`, which nobody needs: all of it is refused.
fn has_ambiguous_framing(session: &ServerSession) -> bool {
    let headers = &session.req_header().headers;
    if let Some(http1) = session.as_http1() {
        // Pingora has removed a length beside a coding from the parsed head by now.
        let raw = http1.get_headers_raw_bytes();
        let mut lines = raw.split_inclusive(|b| *b == b'\n');
        if lines.any(|line| line.ends_with(b"\n") && !line.ends_with(b"\r\n")) {
            return true;
        }
        let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
        if let Some(coding) = codings.next() {
            let is_plain = coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
            let mut names = raw.split(|b| *b == b'\n').filter_map(|line| line.split(|b| *b == b':').next());
            let has_length = names.any(|name| name.trim_ascii().eq_ignore_ascii_case(b"content-length"));
            return !is_plain || has_length || codings.next().is_some();
        }
    }
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let odd = lengths.next().is_some_and(|value| !value.as_bytes().iter().all(u8::is_ascii_digit));
    odd || lengths.next().is_some()
}

impl Gateway {
    /// Walks the request through the rooms.
    pub(super) async fn receive(
        &self,
        session: &mut ServerSession,
        ctx: &mut Ctx,
    ) -> Result<Asked, Rejection> {
        let surface = self.door(session, ctx)?;
        if let Surface::Status(form) = surface {
            return self.status_page(session, form).map(Box::new).map(Asked::Status);
        }
        let snapshot = self.pool.load();
        let principal = authenticate(session, &self.pool.keys())?;
        ctx.principal = Some(Arc::clone(&principal));
        let value = match surface {
            Surface::Models => listing::all(&snapshot, &principal, ctx.dialect),
            Surface::Model(id) => {
                let model = find_model(&snapshot, &principal, &id, "model")?;
                if !snapshot.catalogue.speaks(&model, ctx.dialect) {
                    return Err(not_found("That model is not served in this dialect.", "model"));
                }
                listing::one(ctx.dialect, &model.name)
            }
            Surface::Credits => self.credits(&principal).await?,
            Surface::Generation => {
                let query = session.req_header().uri.query().unwrap_or_default();
                self.generation(&principal, query).await?
            }
            // Answered before anybody was asked for a key.
            Surface::Status(form) => return self.status_page(session, form).map(Box::new).map(Asked::Status),
            Surface::Call(operation) => {
                let (bytes, reserved) = self.read_body(session).await?;
                ctx.read_at = Some(clock::now());
                match self.repeat(session, principal.account, &bytes, &ctx.request_id).await? {
                    Some(Repeat::Answer(answer)) => return Ok(Asked::Json(answer)),
                    Some(Repeat::First(first)) => ctx.keyed = Some(first),
                    None => {}
                }
                let mut call =
                    self.admit(ctx, operation, snapshot, principal, Body { bytes, reserved }).await?;
                // A stream cannot be joined, so it ends with its caller as any other.
                if ctx.keyed.is_some() && !call.facts.stream {
                    call.gate.run_on();
                }
                return Ok(Asked::Call(call));
            }
        };
        Ok(Asked::Json(Bytes::from(value.to_string())))
    }

    /// Room 0: do we serve this?
    fn door(&self, session: &ServerSession, ctx: &mut Ctx) -> Result<Surface, Rejection> {
        let head = session.req_header();
        let versioned = headers::is_versioned(head);
        ctx.dialect = surface::dialect_of_errors(head.uri.path(), versioned);
        let bytes: usize =
            head.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
        if bytes + head.raw_path().len() > self.bounds.load().head_bytes_max {
            let message = "The request's head is too large. Send fewer or shorter headers.";
            return Err(Rejection::new(Reason::HeadTooLarge, message));
        }
        if has_ambiguous_framing(session) {
            let message = "The request's end can be read in two ways. Send one Content-Length, or `Transfer-Encoding: chunked` alone, and end every line with CR LF.";
            return Err(Rejection::new(Reason::InvalidRequest, message));
        }
        if head.method == Method::CONNECT {
            return Err(Rejection::new(
                Reason::MethodNotAllowed,
                "Nothing is tunnelled: CONNECT is not served.",
            ));
        }
        let surface = Surface::find(&head.method, head.uri.path())?;
        ctx.surface = surface.word();
        ctx.is_call = matches!(surface, Surface::Call(_));
        ctx.dialect = surface.dialect(versioned);
        Ok(surface)
    }

    /// The whole body, within its bounds of size, sum and time.
    async fn read_body(&self, session: &mut ServerSession) -> Result<(Bytes, Reserved), Rejection> {
        if let Some(coding) = session.req_header().headers.get(CONTENT_ENCODING)
            && !coding.as_bytes().eq_ignore_ascii_case(b"identity")
        {
            let message = "Request bodies are read without content-encoding. Send plain JSON.";
            return Err(Rejection::new(Reason::UnsupportedEncoding, message));
        }
        let announced = reply::content_length(session);
        let mut reserved = self.bodies.reserve();
        if announced.is_some_and(|bytes| bytes > self.bounds.load().body_bytes_max) {
            return Err(self.too_large());
        }
        let read = self.read_pieces(session, announced, &mut reserved);
        match tokio::time::timeout(self.bounds.load().body_timeout, read).await {
            Ok(body) => body.map(|body| (body, reserved)),
            Err(_) => {
                let message = "The request's body did not arrive in time.";
                Err(Rejection::new(Reason::BodyTimeout, message))
            }
        }
    }

    async fn read_pieces(
        &self,
        session: &mut ServerSession,
        announced: Option<usize>,
        reserved: &mut Reserved,
    ) -> Result<Bytes, Rejection> {
        let expects = session
            .req_header()
            .headers
            .get(EXPECT)
            .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        if expects {
            // The 100 itself would switch keep-alive off, since the body is not read yet.
            session.set_close_on_response_before_downstream_finish(false);
            session.write_continue_response().await.map_err(|e| broken(&e))?;
            session.set_close_on_response_before_downstream_finish(true);
        }
        let Some(first) = session.read_request_body().await.map_err(|e| broken(&e))? else {
            return Ok(Bytes::new());
        };
        // Bytes count when they come: an announcement alone takes no room from others.
        if !reserved.grow_to(first.len()) {
            return Err(full());
        }
        let mut body: Option<Vec<u8>> = None;
        while let Some(piece) = session.read_request_body().await.map_err(|e| broken(&e))? {
            // A body of one piece is not copied.
            let body = match &mut body {
                Some(body) => body,
                None => body.insert(room_for(&first, announced)?),
            };
            if body.len() + piece.len() > self.bounds.load().body_bytes_max {
                return Err(self.too_large());
            }
            if !reserved.grow_to(body.len() + piece.len()) {
                return Err(full());
            }
            if body.capacity() < body.len() + piece.len() {
                // So much of it has come that the rest may have its room: one move, not one with every doubling.
                let rest = announced.unwrap_or_default().saturating_sub(body.len());
                body.try_reserve(rest.max(piece.len())).map_err(|_| full())?;
            }
            body.extend_from_slice(&piece);
        }
        Ok(body.map_or(first, Bytes::from))
    }

    fn too_large(&self) -> Rejection {
        let message = format!("The body is larger than {} bytes.", self.bounds.load().body_bytes_max);
        Rejection::new(Reason::BodyTooLarge, message)
    }
}

/// Room 1: who asks?
fn authenticate(session: &ServerSession, keys: &KeyTable) -> Result<Arc<Principal>, Rejection> {
    let headers = &session.req_header().headers;
    let authorization = headers.get_all(AUTHORIZATION).into_iter().map(http::HeaderValue::as_bytes);
    let others = KEY_HEADERS
        .iter()
        .flat_map(|name| headers.get_all(name).into_iter().map(|value| (name.as_str(), value.as_bytes())));
    let presented = auth::presented(authorization, others)?;
    let now_ms = clock::unix_ms();
    auth::judge(presented.into_iter().filter_map(|key| keys.find(key, now_ms)))
}

/// A body that begins with `first`, with room for what was announced, as far as that is believed.
fn room_for(first: &[u8], announced: Option<usize>) -> Result<Vec<u8>, Rejection> {
    let mut body = vec![];
    let expected = announced.unwrap_or(first.len() * 4).min(BODY_START_BYTES_MAX);
    body.try_reserve_exact(expected.max(first.len())).map_err(|_| full())?;
    body.extend_from_slice(first);
    Ok(body)
}

fn full() -> Rejection {
    let message = "Too many large requests are in flight. Come back in a moment.";
    Rejection::new(Reason::Overloaded, message).retry_after(FULL_RETRY_AFTER)
}

fn broken(error: &pingora::Error) -> Rejection {
    let message = "The request's body could not be read.";
    Rejection::new(Reason::InvalidRequest, message).context(error.to_string())
}
