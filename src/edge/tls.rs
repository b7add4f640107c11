//! Our certificate, and whom it is shown to.
//!
//! The files are read again when what is in them changes. A new handshake uses the newest good ones;
//! connections that stand go on with theirs. Files that cannot be used (half-written, a key that is not
//! the certificate's, no readable list of signers) change nothing but the log, once per content.
//! Certificate, key and the callers' signers are taken together as one, sessions begun with an earlier
//! set included: who was shut out cannot resume.

use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, anyhow};
use arc_swap::ArcSwap;
use pingora::listeners::tls::Acceptor;
use pingora::protocols::l4::stream::Stream as Socket;
use pingora::protocols::tls::TlsStream;
use pingora::tls::{
    RootCertStore, ServerConfig, WebPkiClientVerifier, install_default_crypto_provider,
    load_ca_file_into_store, load_certs_and_key_files, version,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use sha2::{Digest as _, Sha256};

use crate::config::Faults;
use crate::config::checked::TlsFiles;

/// The newest good certificate of a listener.
pub struct Tls {
    files: TlsFiles,
    acceptor: ArcSwap<Acceptor>,
    /// When the certificate that is shown ends, in seconds since 1970; 0: nobody can tell.
    expires: AtomicI64,
    /// Digest of what was tried last.
    tried: Mutex<Option<[u8; 32]>>,
}

impl Tls {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// A fault of the config that names the field whose file cannot be used.
    pub fn load(files: &TlsFiles) -> Result<Self, Faults> {
        let tried = content(files);
        let acceptor = acceptor(files).map_err(|error| Faults::one("listen.https", format!("{error:#}")))?;
        let acceptor = ArcSwap::from_pointee(acceptor);
        let expires = AtomicI64::new(end_of(&files.cert).unwrap_or_default());
        Ok(Self { files: files.clone(), acceptor, expires, tried: Mutex::new(tried) })
    }

    /// Looks whether the files have changed, and takes them if they are good.
    pub fn look_again(&self) {
        let now = content(&self.files);
        let mut tried = self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        if *tried == now {
            return;
        }
        *tried = now;
        match acceptor(&self.files) {
            Ok(acceptor) => {
                self.acceptor.store(Arc::new(acceptor));
                self.expires.store(end_of(&self.files.cert).unwrap_or_default(), Ordering::Relaxed);
                tracing::info!(cert_file = %self.files.cert.display(), "a new certificate is shown from now on");
            }
            Err(error) => {
                tracing::error!(
                    error = format!("{error:#}"),
                    "the new certificate cannot be used; the last one stays"
                );
            }
        }
    }

    /// When the certificate ends that is shown, in seconds since 1970; `None` where that cannot be read.
    #[must_use]
    pub fn expires(&self) -> Option<i64> {
        Some(self.expires.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    /// Shakes hands.
    pub(super) async fn accept(&self, socket: Socket) -> pingora::Result<TlsStream<Socket>> {
        let acceptor = self.acceptor.load_full();
        acceptor.tls_handshake(socket).await
    }
}

/// What is in the files; `None` where one cannot be read.
fn content(files: &TlsFiles) -> Option<[u8; 32]> {
    let TlsFiles { cert, key, client_ca } = files;
    let mut digest = Sha256::new();
    for file in [Some(cert), Some(key), client_ca.as_ref()].into_iter().flatten() {
        let bytes = std::fs::read(file).ok()?;
        digest.update(Sha256::digest(&bytes));
    }
    Some(digest.finalize().into())
}

fn acceptor(files: &TlsFiles) -> anyhow::Result<Acceptor> {
    install_default_crypto_provider();
    readable("cert_file", &files.cert)?;
    readable("key_file", &files.key)?;
    let builder = ServerConfig::builder_with_protocol_versions(&[&version::TLS12, &version::TLS13]);
    let builder = match &files.client_ca {
        Some(file) => {
            let verifier = WebPkiClientVerifier::builder(Arc::new(signers(file)?)).build();
            let verifier = verifier.with_context(|| format!("client_ca_file {}", file.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    let (cert, key) = (files.cert.display(), files.key.display());
    let pair = load_certs_and_key_files(text(&files.cert)?, text(&files.key)?)
        .map_err(|e| anyhow!("cert_file {cert} or key_file {key} is no PEM: {e}"))?
        .with_context(|| {
            format!("cert_file {cert} has no certificate, or key_file {key} no private key, in PEM")
        })?;
    let mut config = builder
        .with_single_cert(pair.0, pair.1)
        .with_context(|| format!("key_file {key} is not the key of cert_file {cert}"))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Acceptor::from_server_config(Arc::new(config)))
}

/// When the first certificate of a file ends: the one that callers look at.
fn end_of(file: &Path) -> Option<i64> {
    let pem = std::fs::read(file).ok()?;
    let first = CertificateDer::pem_slice_iter(&pem).next()?.ok()?;
    let (_, certificate) = x509_parser::parse_x509_certificate(&first).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

fn signers(file: &Path) -> anyhow::Result<RootCertStore> {
    let name = file.display();
    readable("client_ca_file", file)?;
    let mut signers = RootCertStore::empty();
    load_ca_file_into_store(text(file)?, &mut signers)
        .map_err(|e| anyhow!("client_ca_file {name} is no PEM: {e}"))?;
    anyhow::ensure!(!signers.is_empty(), "client_ca_file {name} has no certificate in PEM");
    Ok(signers)
}

/// Says in the system's words why a file cannot be read; TLS would only say that it is so.
fn readable(field: &str, file: &Path) -> anyhow::Result<()> {
    std::fs::read(file).map(drop).with_context(|| format!("{field}: cannot read {}", file.display()))
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is no name in UTF-8", path.display()))
}
