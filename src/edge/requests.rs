//! The requests of a connection of HTTP/1.1, one after the other.
//!
//! Pingora's own loop (`ServerApp::process_new` of its HTTP apps) waits for a request in the future that will
//! serve it, with its buffers and all its state: KiB for a connection on which nothing happens.
//! This is the same loop, but it waits outside, with nothing but the [`Line`].

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use pingora::apps::{HttpPersistentSettings, HttpServerApp};
use pingora::protocols::http::ServerSession;
use pingora::server::ShutdownWatch;
use tokio::sync::watch;

use super::line::Line;
use crate::clock;

/// How long Pingora waits for the rest of a first head, in seconds, where nobody says. The [`Line`]'s clock is shorter.
const FIRST_HEAD_SECONDS: u64 = 60;

/// Serves until either side has had enough. `end` turns true when no request may follow the next one, `closing` when
/// none may come at all; between two of them it waits for `keepalive`.
pub(super) async fn serve<A: HttpServerApp>(
    app: &Arc<A>,
    mut line: Box<Line>,
    end: &ShutdownWatch,
    mut closing: watch::Receiver<bool>,
    keepalive: impl Fn() -> Duration,
) {
    let mut settings: Option<HttpPersistentSettings> = None;
    loop {
        if settings.as_ref().is_some_and(next_has_begun) {
            line.connection.head_has_begun(clock::now());
        } else {
            // The first head has a clock of its own.
            let patience = settings.is_some().then(&keepalive);
            if !stirs(&mut line, patience, &mut closing).await {
                return;
            }
        }
        let session = session(line, settings.take(), *end.borrow());
        let Some(reused) = app.process_new_http(session, end).await else { return };
        let (stream, kept) = reused.consume();
        let Ok(same) = stream.into_any().downcast() else { return };
        (line, settings) = (same, kept);
    }
}

/// What Pingora reads the next request from. Not in the loop, whose future would have room for it for ever.
fn session(mut line: Box<Line>, settings: Option<HttpPersistentSettings>, ending: bool) -> ServerSession {
    let begun = std::mem::take(&mut line.ahead);
    let mut session = ServerSession::new_http1(line);
    match settings {
        Some(settings) => settings.apply_to_session(&mut session),
        None => session.set_keepalive((!ending).then_some(FIRST_HEAD_SECONDS)),
    }
    if !begun.is_empty() {
        // To read it, Pingora would make a buffer of 4 KiB, and keep that for as long as the call runs.
        session.set_pipelined_prefix(begun.into());
    }
    session
}

/// Waits for the begin of a request. `false`: none comes.
async fn stirs(line: &mut Line, patience: Option<Duration>, closing: &mut watch::Receiver<bool>) -> bool {
    let stirs = async {
        match patience {
            Some(patience) => tokio::time::timeout(patience, line.stirs()).await.unwrap_or(false),
            None => line.stirs().await,
        }
    };
    tokio::select! {
        biased;
        stirs = stirs => stirs,
        _closing = closing.wait_for(|closing| *closing) => false,
    }
}

/// Whether bytes of a further request came with the last one; Pingora keeps them and shows them to nobody but a
/// debugger. If its words change, this is `true`, and the connection waits in Pingora, at a price.
fn next_has_begun(settings: &HttpPersistentSettings) -> bool {
    let mut search = Search::Name;
    let _ended = write!(search, "{settings:?}");
    !matches!(search, Search::Found { none: true })
}

/// Looks for a field's value in the words of a derived `Debug`, piece by piece.
enum Search {
    Name,
    Value,
    Found { none: bool },
}

impl fmt::Write for Search {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        *self = match (&*self, piece) {
            (Self::Name, "pipelined_prefix") => Self::Value,
            (Self::Name, _) => Self::Name,
            (Self::Value, ": ") => Self::Value,
            (Self::Value, piece) => Self::Found { none: piece == "None" },
            (Self::Found { .. }, _) => return Err(fmt::Error),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use pingora::protocols::l4::stream::Stream as Socket;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn bytes_of_a_next_request_are_found_in_what_pingora_keeps() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = Socket::from(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
        let session = ServerSession::new_http1(Box::new(socket));
        let mut settings = HttpPersistentSettings::for_session(&session);
        assert!(!next_has_begun(&settings));
        settings.set_user_context(Box::new("pipelined_prefix"));
        assert!(!next_has_begun(&settings));
        settings.set_pipelined_prefix(BytesMut::from(&b"pipelined_prefix: None"[..]));
        assert!(next_has_begun(&settings));
    }
}
