//! Calls with an `Idempotency-Key`: a repeat gets the first call's answer, never a second charge.
//!
//! The first call under a key is written into the books before it goes upstream, with a digest of its
//! path and body. It runs on when its caller leaves, since the caller may come back for the answer. A
//! repeat
//! - joins it while it runs, and gets its answer, where that is whole and small enough to be kept;
//! - gets the kept answer for a day;
//! - is told with 409 and the id of the first call where there is no answer to keep: it was a stream, or
//!   too long, or cut by a crash. What it cost is under `GET /v1/generation?id=`;
//! - is refused with 422 when it carries another body.
//!
//! A call that failed and was charged nothing is forgotten, so that a repeat is a new try.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use filters::ids::AccountId;
use filters::verdict::{Reason, Rejection};
use pingora::protocols::http::ServerSession;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::gateway::Gateway;
use crate::clock;
use crate::ledger::port::{Keyed, KeyedCall};

/// The header.
const HEADER: &str = "idempotency-key";
/// The longest key, in bytes.
const KEY_BYTES_MAX: usize = 255;

/// Keyed calls that run in this process.
#[derive(Debug, Default)]
pub struct KeyedCalls {
    running: Mutex<HashMap<Name, Running>>,
}

type Name = (AccountId, String);

#[derive(Clone, Debug)]
struct Running {
    body: [u8; 32],
    ended: watch::Receiver<bool>,
}

/// What a request with a key turned out to be.
pub(super) enum Repeat {
    /// The first of its kind: it goes on, and is ended by [`Gateway::end_keyed`].
    First(First),
    /// Answered before.
    Answer(Bytes),
}

/// The first call under a key.
#[derive(Debug)]
pub(super) struct First {
    name: Name,
    calls: Arc<KeyedCalls>,
    ended: watch::Sender<bool>,
}

/// A call that ends without being ended is no running one any more; its row in the books stays, and
/// tells a repeat that something was begun.
impl Drop for First {
    fn drop(&mut self) {
        self.calls.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
        self.ended.send_replace(true);
    }
}

impl Gateway {
    /// Looks whether a request repeats an earlier one. `None`: it carries no key.
    pub(super) async fn repeat(
        &self,
        session: &ServerSession,
        account: AccountId,
        body: &Bytes,
        request: &str,
    ) -> Result<Option<Repeat>, Rejection> {
        let Some(key) = key_of(session)? else { return Ok(None) };
        let mut hasher = Sha256::new();
        hasher.update(session.req_header().uri.path().as_bytes());
        hasher.update([0]);
        hasher.update(body);
        let digest: [u8; 32] = hasher.finalize().into();
        loop {
            let running = match self.enter((account, key.clone()), digest) {
                Ok(first) => return self.first(first, digest, request).await.map(Some),
                Err(running) => running,
            };
            if running.body != digest {
                return Err(other_body());
            }
            // Its end is waited for; then the books know its answer, or nothing, and this one is first.
            let mut ended = running.ended;
            let _gone = ended.wait_for(|ended| *ended).await;
        }
    }

    fn enter(&self, name: Name, body: [u8; 32]) -> Result<First, Running> {
        let mut running = self.keyed.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = running.get(&name) {
            return Err(running.clone());
        }
        let (ended, watch) = watch::channel(false);
        running.insert(name.clone(), Running { body, ended: watch });
        Ok(First { name, calls: Arc::clone(&self.keyed), ended })
    }

    /// First in this process; the books know whether it is the first at all.
    async fn first(&self, first: First, body: [u8; 32], request: &str) -> Result<Repeat, Rejection> {
        let ((account, key), request) = (first.name.clone(), request.to_owned());
        let known = self
            .in_books(move |books| {
                let now_ms = clock::unix_ms();
                books.begin_keyed(&KeyedCall { account, key: &key, body, request: &request, now_ms })
            })
            .await?;
        match known {
            None => Ok(Repeat::First(first)),
            Some(known) if known.body != body => Err(other_body()),
            Some(Keyed { answer: Some(answer), .. }) => Ok(Repeat::Answer(answer.into())),
            Some(Keyed { request, .. }) => Err(begun(&request)),
        }
    }

    /// Ends the first call under a key: keeps its answer, or forgets it where nothing was charged.
    pub(super) async fn end_keyed(&self, first: First, answer: Option<Bytes>, charged: bool) {
        if answer.is_none() && charged {
            return; // Its row says that it was begun; that is what a repeat has to know.
        }
        let (account, key) = first.name.clone();
        let kept = self.in_books(move |books| books.end_keyed(account, &key, answer.as_deref())).await;
        if let Err(rejection) = kept {
            tracing::error!(context = rejection.context, "the answer of a keyed call could not be kept");
        }
        drop(first);
    }
}

fn key_of(session: &ServerSession) -> Result<Option<String>, Rejection> {
    let mut lines = session.req_header().headers.get_all(HEADER).into_iter();
    let Some(line) = lines.next() else { return Ok(None) };
    let text = line.to_str().unwrap_or_default();
    let sound = (1..=KEY_BYTES_MAX).contains(&text.len()) && lines.next().is_none();
    if sound {
        return Ok(Some(text.to_owned()));
    }
    let message = "`Idempotency-Key` must come once, with 1 to 255 visible ASCII characters.";
    Err(Rejection::new(Reason::InvalidRequest, message))
}

fn other_body() -> Rejection {
    let message = "This `Idempotency-Key` was used with another body. Use a new key for a new call.";
    Rejection::new(Reason::IdempotencyMismatch, message)
}

fn begun(request: &str) -> Rejection {
    let message = format!(
        "A call under this `Idempotency-Key` was made already, and its answer was not kept. \
         `GET /v1/generation?id={request}` tells what it cost."
    );
    Rejection::new(Reason::IdempotencyConflict, message)
}
