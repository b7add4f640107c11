//! HTTP/2 with prior knowledge, on both sides: the scripted upstream and the caller.
//!
//! Resets are sent by the `h2` crate. A GOAWAY names any last stream id, which the crate does not allow
//! on its own, so that frame is written on the socket itself, between two frames of the crate: nothing
//! else is under way then.

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::case::Headers;
use super::client::{Exchange, Sent};
use super::upstream::{Asked, ResponseHead, Scripted, What};

/// GOAWAY, RFC 9113 section 6.8.
const GOAWAY: u8 = 7;

/// Plays a script on one connection.
pub async fn serve(scripted: &Arc<Scripted>, stream: TcpStream, connection: usize) {
    let Some((stream, raw)) = split(stream) else { return };
    let raw = Arc::new(raw);
    let gone = Arc::new(Notify::new());
    let Ok(mut h2) = h2::server::handshake(stream).await else { return };
    let mut reused = false;
    loop {
        let next = tokio::select! {
            () = gone.notified() => return,
            next = h2.accept() => next,
        };
        let Some(Ok((request, respond))) = next else { return scripted.left(connection, None) };
        let stream = Stream {
            scripted: Arc::clone(scripted),
            connection,
            reused,
            raw: Arc::clone(&raw),
            gone: Arc::clone(&gone),
        };
        reused = true;
        let playing = tokio::spawn(stream.play(request, respond));
        scripted.keep(playing.abort_handle());
    }
}

/// The socket twice: for the crate and for frames of our own.
fn split(stream: TcpStream) -> Option<(TcpStream, std::net::TcpStream)> {
    let raw = stream.into_std().ok()?;
    let stream = TcpStream::from_std(raw.try_clone().ok()?).ok()?;
    Some((stream, raw))
}

struct Stream {
    scripted: Arc<Scripted>,
    connection: usize,
    reused: bool,
    raw: Arc<std::net::TcpStream>,
    gone: Arc<Notify>,
}

/// The answer under way.
struct Answer {
    respond: SendResponse<Bytes>,
    body: Option<SendStream<Bytes>>,
}

impl Stream {
    async fn play(self, request: http::Request<RecvStream>, respond: SendResponse<Bytes>) {
        let Some(asked) = self.asked(request).await else { return };
        let (index, piece) = self.scripted.take(asked);
        let mut answer = Answer { respond, body: None };
        for act in piece.steps {
            let wait = if matches!(act.what, What::Hang) { Duration::from_secs(3600) } else { act.delay };
            let there = answer.stays(wait).await;
            let sent = there
                && match act.what {
                    What::Head(head) => answer.head(&head),
                    What::Bytes { bytes, .. } => answer.send(bytes.into(), false),
                    What::End(_) => answer.send(Bytes::new(), true),
                    What::Hang => return,
                    What::Close | What::Reset => return self.gone.notify_one(),
                    What::H2Reset(reason) => {
                        let refused = reason == h2::Reason::REFUSED_STREAM;
                        self.scripted.state_of(index, |asked| asked.unprocessed = refused);
                        return answer.reset(reason);
                    }
                    What::H2GoAway { last_stream_id, reason } => {
                        let ours = u32::from(answer.respond.stream_id());
                        self.scripted.state_of(index, |asked| asked.unprocessed = last_stream_id < ours);
                        return self.go_away(last_stream_id, reason).await;
                    }
                };
            let now = Instant::now();
            self.scripted.state_of(index, |asked| {
                if sent {
                    asked.answered = true;
                } else {
                    asked.left_at.get_or_insert(now);
                }
            });
            if !sent {
                return;
            }
        }
    }

    async fn asked(&self, request: http::Request<RecvStream>) -> Option<Asked> {
        let (head, body) = request.into_parts();
        let body = collect(body).await?;
        let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
            (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        let headers = Headers(head.headers.iter().map(field).collect());
        let lines: String = headers.0.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let mut raw = format!("{} {} HTTP/2\r\n{lines}\r\n", head.method, head.uri).into_bytes();
        raw.extend_from_slice(&body);
        let blank = self.scripted.blank(self.connection, self.reused);
        Some(Asked { path: head.uri.path().to_owned(), headers, body, raw, ..blank })
    }

    async fn go_away(&self, last_stream_id: u32, reason: h2::Reason) {
        // What the crate has to send goes out first.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let mut frame = vec![0, 0, 8, GOAWAY, 0, 0, 0, 0, 0];
        frame.extend_from_slice(&last_stream_id.to_be_bytes());
        frame.extend_from_slice(&u32::from(reason).to_be_bytes());
        let _gone = (&*self.raw).write_all(&frame);
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.gone.notify_one();
    }
}

impl Answer {
    /// Waits. `false`: the other side reset the stream or went.
    async fn stays(&mut self, wait: Duration) -> bool {
        if wait.is_zero() {
            return true;
        }
        let reset = std::future::poll_fn(|ctx| match &mut self.body {
            None => self.respond.poll_reset(ctx),
            Some(body) => body.poll_reset(ctx),
        });
        tokio::select! { () = tokio::time::sleep(wait) => true, _ = reset => false }
    }

    fn head(&mut self, head: &ResponseHead) -> bool {
        let mut response = http::Response::builder().status(head.status);
        for (name, value) in &head.headers.0 {
            let hop = ["transfer-encoding", "connection"].iter().any(|hop| name.eq_ignore_ascii_case(hop));
            response = if hop { response } else { response.header(name, value) };
        }
        let Ok(response) = response.body(()) else { return false };
        self.body = self.respond.send_response(response, false).ok();
        self.body.is_some()
    }

    fn send(&mut self, bytes: Bytes, ends: bool) -> bool {
        self.body.as_mut().is_some_and(|body| body.send_data(bytes, ends).is_ok())
    }

    fn reset(&mut self, reason: h2::Reason) {
        match &mut self.body {
            Some(body) => body.send_reset(reason),
            None => self.respond.send_reset(reason),
        }
    }
}

async fn collect(mut body: RecvStream) -> Option<Vec<u8>> {
    let mut bytes = vec![];
    while let Some(piece) = body.data().await {
        let piece = piece.ok()?;
        bytes.extend_from_slice(&piece);
        body.flow_control().release_capacity(piece.len()).ok()?;
    }
    Some(bytes)
}

/// A caller over HTTP/2; `h2_rst:CODE` among its actions resets the stream.
pub async fn call(exchange: &mut Exchange, stream: TcpStream, sent: &Sent) -> Result<(), String> {
    let broken = |e: h2::Error| format!("HTTP/2: {e}");
    let (mut h2, connection) = h2::client::handshake(stream).await.map_err(broken)?;
    let driving = tokio::spawn(connection);
    let mut request =
        http::Request::builder().method(sent.method.as_str()).uri(format!("http://gw{}", sent.path));
    for (name, value) in &sent.headers.0 {
        request = request.header(name, value);
    }
    let request = request.body(()).map_err(|e| e.to_string())?;
    let (answer, mut body) = h2.send_request(request, false).map_err(broken)?;
    body.send_data(sent.body.clone().into(), true).map_err(broken)?;
    let outcome = async {
        let answer = answer.await.map_err(broken)?;
        let (head, mut coming) = answer.into_parts();
        exchange.status = Some(head.status.as_u16());
        for (name, value) in &head.headers {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            exchange.headers.0.push((name.as_str().to_owned(), value));
        }
        while let Some(piece) = coming.data().await {
            let piece = piece.map_err(broken)?;
            let _closed = coming.flow_control().release_capacity(piece.len());
            exchange.take_body(&piece);
            if let Some(action) = exchange.due(sent) {
                exchange.acted_at = Some(Instant::now());
                let reason = action.strip_prefix("h2_rst:").and_then(super::upstream::h2_reason);
                body.send_reset(reason.unwrap_or(h2::Reason::CANCEL));
                // The frame has to get out before the connection goes.
                tokio::time::sleep(Duration::from_millis(50)).await;
                return Ok(());
            }
        }
        exchange.complete = true;
        Ok(())
    };
    let outcome = outcome.await;
    driving.abort();
    outcome
}
