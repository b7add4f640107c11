//! TLS for both sides of a gateway, with certificates of `certificates`; HTTP/2 alone.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

type Error = Box<dyn std::error::Error>;

const H2: &[u8] = b"h2";

/// Trusts the authority of a folder.
pub fn connector(folder: &Path) -> Result<TlsConnector, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(folder.join("ca.pem"))?)?;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Shows the certificate of a folder.
pub fn acceptor(folder: &Path) -> Result<TlsAcceptor, Error> {
    let certificate = CertificateDer::from_pem_file(folder.join("cert.pem"))?;
    let key = PrivateKeyDer::from_pem_file(folder.join("key.pem"))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth();
    let mut config = config.with_single_cert(vec![certificate], key)?;
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
