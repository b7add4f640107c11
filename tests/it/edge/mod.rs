//! What stands between a caller's socket and a request: TLS, whose connection it is, bounds, HTTP/2.

mod bounds;
mod http2;
mod hygiene;
mod proxy_protocol;
mod tls;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Method, Request};
use pingora::tls::{
    CertificateDer, ClientConfig, ClientTlsStream, PrivateKeyDer, RootCertStore, ServerName, TlsConnector,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::support::KEY;

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(20);
/// The name in our certificates.
const NAME: &str = "gateway.test";

/// What a streamed answer of HTTP/1.1 ends with.
const END: &str = "\r\n0\r\n\r\n";

/// One that signs certificates.
struct Signer {
    params: CertificateParams,
    key: KeyPair,
    der: CertificateDer<'static>,
    pem: String,
}

/// A certificate with its key.
struct Signed {
    der: CertificateDer<'static>,
    pem: String,
    key_pem: String,
    key_der: Vec<u8>,
}

impl Signer {
    fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Self { params, key, der: certificate.der().clone(), pem: certificate.pem() }
    }

    fn sign(&self) -> Signed {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![NAME.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &Issuer::from_params(&self.params, &self.key)).unwrap();
        Signed {
            der: certificate.der().clone(),
            pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            key_der: key.serialize_der(),
        }
    }
}

impl Signed {
    fn write_to(&self, folder: &Path) {
        // The key first: a look in between finds a pair that does not fit, and waits for the next one.
        std::fs::write(folder.join("key.pem"), &self.key_pem).unwrap();
        std::fs::write(folder.join("cert.pem"), &self.pem).unwrap();
    }
}

/// A caller's TLS: whom it trusts, what it shows, what it speaks.
fn tls(trusted: &Signer, shown: Option<&Signed>, speaks: &[&str]) -> TlsConnector {
    pingora::tls::install_default_crypto_provider();
    let mut roots = RootCertStore::empty();
    roots.add(trusted.der.clone()).unwrap();
    let builder = ClientConfig::builder().with_root_certificates(roots);
    let mut config = match shown {
        Some(shown) => {
            let key = PrivateKeyDer::try_from(shown.key_der.clone()).unwrap();
            builder.with_client_auth_cert(vec![shown.der.clone()], key).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = speaks.iter().map(|name| name.as_bytes().to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

async fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// A connection with TLS, unless it is refused.
async fn shake_hands(
    connector: &TlsConnector,
    stream: TcpStream,
) -> std::io::Result<ClientTlsStream<TcpStream>> {
    connector.connect(ServerName::try_from(NAME).unwrap(), stream).await
}

/// A request of HTTP/1.1, as bytes.
fn wire(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Reads until the other side closes; a reset is a close too.
async fn rest(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut all = vec![];
    let read = async {
        let mut piece = vec![0; 64 << 10];
        while let Ok(count @ 1..) = stream.read(&mut piece).await {
            all.extend_from_slice(&piece[..count]);
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("the connection is never closed");
    String::from_utf8_lossy(&all).into_owned()
}

/// Sends a request and reads everything until `end` has come or the other side closes.
async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), request: &str, end: &str) -> String {
    let _early = stream.write_all(request.as_bytes()).await;
    let _early = stream.flush().await;
    let mut all = String::new();
    let read = async {
        let mut piece = vec![0; 64 << 10];
        while !all.contains(end) {
            let Ok(count @ 1..) = stream.read(&mut piece).await else { return };
            all.push_str(&String::from_utf8_lossy(&piece[..count]));
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("no answer");
    all
}

/// A caller's connection of HTTP/2.
struct Http2 {
    send: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

/// An answer by HTTP/2.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn code(&self) -> String {
        let body: serde_json::Value = serde_json::from_str(&self.body).unwrap_or_default();
        body["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Http2 {
    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let mut builder = h2::client::Builder::new();
        // Many streams of small events that nobody reads yet are no attack in a test.
        builder.max_concurrent_reset_streams(10_000).data_frame_budget(16 << 20);
        let (send, connection) = builder.handshake(stream).await.unwrap();
        Self { send, connection: tokio::spawn(connection) }
    }

    async fn connect(to: SocketAddr) -> Self {
        Self::over(connect(to).await).await
    }

    fn request(method: Method, path: &str) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri(format!("http://gateway{path}"))
            .header("authorization", format!("Bearer {KEY}"))
    }

    fn chat() -> Request<()> {
        Self::request(Method::POST, "/v1/chat/completions").body(()).unwrap()
    }

    /// Sends a whole request; the answer is still to be read.
    async fn begin(
        &mut self,
        request: Request<()>,
        body: impl Into<Bytes>,
    ) -> Result<h2::client::ResponseFuture, h2::Error> {
        let mut send = self.send.clone().ready().await?;
        let (answer, mut stream) = send.send_request(request, false)?;
        let mut body: Bytes = body.into();
        stream.reserve_capacity(body.len());
        while !body.is_empty() {
            let room = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
            let room = room.transpose()?.expect("the stream is reset while it is sent");
            stream.send_data(body.split_to(room.min(body.len())), false)?;
        }
        stream.send_data(Bytes::new(), true)?;
        Ok(answer)
    }

    async fn call(&mut self, request: Request<()>, body: impl Into<Bytes>) -> Result<Answer, h2::Error> {
        let whole = async {
            let answer = self.begin(request, body).await?;
            read_answer(answer).await
        };
        tokio::time::timeout(PATIENCE, whole).await.expect("no answer")
    }
}

impl Drop for Http2 {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

async fn read_answer(answer: h2::client::ResponseFuture) -> Result<Answer, h2::Error> {
    let (head, mut stream) = answer.await?.into_parts();
    let mut body = vec![];
    while let Some(piece) = stream.data().await.transpose()? {
        stream.flow_control().release_capacity(piece.len())?;
        body.extend_from_slice(&piece);
    }
    let body = String::from_utf8(body).unwrap();
    Ok(Answer { status: head.status.as_u16(), headers: head.headers, body })
}
