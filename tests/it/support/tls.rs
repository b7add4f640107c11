//! A private certificate authority, and upstreams that speak TLS.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use pingora::tls::{
    CertificateDer, PrivateKeyDer, RootCertStore, ServerConfig, ServerTlsStream, TlsAcceptor,
    WebPkiClientVerifier,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

/// A certificate authority with a folder for what it makes.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    pem: String,
    folder: tempfile::TempDir,
}

/// An upstream that speaks TLS: HTTP/1.1 goes on to another one, HTTP/2 is answered here.
pub struct TlsUpstream {
    pub address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    served: Arc<[AtomicUsize; 2]>,
    arrivals: Arrivals,
    task: tokio::task::JoinHandle<()>,
}

/// When requests over HTTP/2 were whole.
pub type Arrivals = Arc<Mutex<Vec<Instant>>>;

/// What a TLS upstream wants.
pub struct Wants<'a> {
    /// The protocols that it takes, such as `h2`; none: it negotiates nothing.
    pub alpn: &'a [&'a str],
    /// Callers must show a certificate of this authority.
    pub callers_of: Option<&'a Authority>,
    /// The name in its certificate.
    pub name: &'a str,
}

impl Default for Wants<'_> {
    fn default() -> Self {
        Self { alpn: &["h2", "http/1.1"], callers_of: None, name: "127.0.0.1" }
    }
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        let (pem, certificate) = (certificate.pem(), certificate.der().clone());
        Self {
            issuer: Issuer::new(params, key),
            certificate,
            pem,
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    /// A file with its certificate.
    pub fn ca_file(&self) -> PathBuf {
        self.file("ca.pem", &self.pem)
    }

    /// Files with a caller's certificate and key.
    pub fn caller(&self) -> (PathBuf, PathBuf) {
        let (certificate, key) = self.issue("caller.example");
        (self.file("caller.pem", &certificate.pem()), self.file("caller.key", &key.serialize_pem()))
    }

    /// A server's certificate and key, in PEM.
    pub fn server_pem(&self, name: &str) -> (String, String) {
        let (certificate, key) = self.issue(name);
        (certificate.pem(), key.serialize_pem())
    }

    fn issue(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        (params.signed_by(&key, &self.issuer).expect("a certificate"), key)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path
    }

    fn server(&self, wants: &Wants<'_>) -> ServerConfig {
        pingora::tls::install_default_crypto_provider();
        let (certificate, key) = self.issue(wants.name);
        let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
        let builder = ServerConfig::builder();
        let builder = match wants.callers_of {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let mut roots = RootCertStore::empty();
                roots.add(authority.certificate.clone()).expect("an authority");
                let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().expect("a verifier");
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(vec![certificate.der().clone()], key).expect("a server");
        config.alpn_protocols = wants.alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        config
    }
}

impl TlsUpstream {
    /// In front of `behind`, with a certificate of `authority`.
    pub async fn start(authority: &Authority, wants: Wants<'_>, behind: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let acceptor = TlsAcceptor::from(Arc::new(authority.server(&wants)));
        let (accepted, served) =
            (Arc::new(AtomicUsize::new(0)), Arc::new([const { AtomicUsize::new(0) }; 2]));
        let (counts, serves) = (Arc::clone(&accepted), Arc::clone(&served));
        let arrivals = Arrivals::default();
        let arrived = Arc::clone(&arrivals);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counts.fetch_add(1, Ordering::SeqCst);
                let (acceptor, serves) = (acceptor.clone(), Arc::clone(&serves));
                let arrived = Arc::clone(&arrived);
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    serve(stream, behind, &serves, arrived).await;
                });
            }
        });
        Self { address, accepted, served, arrivals, task }
    }

    /// Connections so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// When the latest request over HTTP/2 was whole.
    pub fn latest(&self) -> Option<Instant> {
        self.arrivals.lock().expect("arrivals").last().copied()
    }

    /// Connections over HTTP/1.1, and requests over HTTP/2, so far.
    pub fn served(&self) -> (usize, usize) {
        (self.served[0].load(Ordering::SeqCst), self.served[1].load(Ordering::SeqCst))
    }
}

impl Drop for TlsUpstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    mut stream: ServerTlsStream<TcpStream>,
    behind: SocketAddr,
    served: &[AtomicUsize; 2],
    arrivals: Arrivals,
) {
    if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
        return serve_h2(stream, &served[1], arrivals).await;
    }
    served[0].fetch_add(1, Ordering::SeqCst);
    if let Ok(mut inner) = TcpStream::connect(behind).await {
        let _over = tokio::io::copy_bidirectional(&mut stream, &mut inner).await;
    }
}

/// Answers so many requests, and no other.
pub async fn serve_h2_until(stream: impl AsyncRead + AsyncWrite + Unpin, mut answers: usize) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    let mut silent = vec![];
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        if answers > 0 {
            answers -= 1;
            answer(&mut respond);
        }
        silent.push((request, respond));
    }
}

/// Counts streams that came and those that were served; refuses the first `refused` of them.
pub async fn serve_h2_refusing(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    counts: &[AtomicUsize; 2],
    refused: usize,
) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        if counts[0].fetch_add(1, Ordering::SeqCst) < refused {
            respond.send_reset(h2::Reason::REFUSED_STREAM);
            continue;
        }
        counts[1].fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            let mut body = request.into_body();
            while let Some(Ok(piece)) = body.data().await {
                let _closed = body.flow_control().release_capacity(piece.len());
            }
            answer(&mut respond);
        });
    }
}

/// Answers every request with a whole completion.
pub async fn serve_h2(stream: impl AsyncRead + AsyncWrite + Unpin, served: &AtomicUsize, arrivals: Arrivals) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        served.fetch_add(1, Ordering::SeqCst);
        let arrivals = Arc::clone(&arrivals);
        tokio::spawn(async move {
            // An answer to a half-read request would come with a reset.
            let mut body = request.into_body();
            while let Some(Ok(piece)) = body.data().await {
                let _closed = body.flow_control().release_capacity(piece.len());
            }
            arrivals.lock().expect("arrivals").push(Instant::now());
            answer(&mut respond);
        });
    }
}

fn answer(respond: &mut h2::server::SendResponse<Bytes>) {
    let head = http::Response::builder().header("content-type", "application/json").body(()).expect("a head");
    if let Ok(mut body) = respond.send_response(head, false) {
        let _gone = body.send_data(Bytes::from_static(WHOLE), true);
    }
}

/// A whole completion.
pub const WHOLE: &[u8] =
    br#"{"id":"cc-1","object":"chat.completion","created":1,"model":"up-a","choices":[{"index":0,
"message":{"role":"assistant","content":"Hello over two"},"finish_reason":"stop"}],
"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15}}"#;

/// A path as YAML flow takes it.
pub fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

/// The same over HTTP/1.1.
pub fn whole_answer() -> String {
    let body = String::from_utf8_lossy(WHOLE);
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}
