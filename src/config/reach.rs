//! How connections to a provider are made: which HTTP, whom to trust, and what to show.
//!
//! Files are read here, once, at the start: a certificate that cannot be used is a fault of the config, found before
//! a port is bound and not by the first call. Pingora would panic on one that it cannot parse.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::Arc;

use pingora::protocols::tls::CaType;
use pingora::tls::{CertificateDer, ClientConfig, PrivateKeyDer, RootCertStore, ServerName};
use pingora::utils::tls::{CertKey, WrappedX509, parse_x509};
use rustls_pki_types::pem::PemObject as _;

use super::checked::BaseUrl;
use super::{Faults, join, raw};

/// The largest PEM file, in bytes. All of the system's authorities together have about 220 KiB.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// What a connection to a provider needs beside its address.
#[derive(Debug)]
pub struct Reach {
    pub http: Http,
    /// For SNI and for the certificate's verification; never empty, since that would switch it off.
    pub server_name: String,
    /// Whom to trust instead of the system's authorities; never an empty list.
    pub authorities: Option<Arc<CaType>>,
    /// What we show when we are asked.
    pub identity: Option<Arc<CertKey>>,
    /// Providers that trust others or show something else do not share connections.
    pub group: u64,
}

/// HTTP's version on the way to a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http {
    /// Over TLS what is negotiated, 2 before 1.1; without TLS 1.1.
    Auto,
    /// 1.1 only.
    One,
    /// 2 only: negotiated over TLS, or without TLS by prior knowledge (RFC 9113 section 3.3).
    Two,
}

/// Reads it from a provider's settings.
pub(super) fn check(path: &str, base: &BaseUrl, raw: &raw::Provider, faults: &mut Faults) -> Reach {
    let for_tls = [
        ("ca_file", raw.ca_file.is_some()),
        ("client_certificate", raw.client_certificate.is_some()),
        ("server_name", raw.server_name.is_some()),
    ];
    for (key, _) in for_tls.iter().filter(|(_, said)| *said && !base.tls) {
        faults.push(join(path, key), "is for TLS: begin `base_url` with https://, or leave it out");
    }
    let mut group = DefaultHasher::new();
    let mut own = false;
    let mut distinguish = |certificates: &[CertificateDer<'_>]| {
        certificates.hash(&mut group);
        own = true;
    };
    let authorities = raw.ca_file.as_ref().and_then(|file| {
        let found = authorities(Path::new(file));
        let found = found.map_err(|message| faults.push(join(path, "ca_file"), message)).ok()?;
        distinguish(&found);
        Some(found.iter().map(wrapped).collect())
    });
    let identity = raw.client_certificate.as_ref().and_then(|files| {
        let found = identity(files);
        let (key, message) = match found {
            Ok((certificates, key)) => {
                distinguish(&certificates);
                let certificates = certificates.iter().map(|certificate| certificate.to_vec()).collect();
                return Some(Arc::new(CertKey::new(certificates, key.secret_der().to_vec())));
            }
            Err(fault) => fault,
        };
        faults.push(join(&join(path, "client_certificate"), key), message);
        None
    });
    Reach {
        http: http(path, base, raw, faults),
        server_name: server_name(path, base, raw, faults),
        authorities,
        identity,
        group: if own { group.finish() } else { 0 },
    }
}

fn server_name(path: &str, base: &BaseUrl, raw: &raw::Provider, faults: &mut Faults) -> String {
    let Some(name) = &raw.server_name else { return base.host.clone() };
    if ServerName::try_from(name.as_str()).is_err() {
        faults.push(join(path, "server_name"), format!("`{name}` is no host name"));
    }
    name.clone()
}

/// The certificates of a file that is to be trusted.
pub(super) fn authorities(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates = certificates(file)?;
    let mut store = RootCertStore::empty();
    for (index, certificate) in certificates.iter().enumerate() {
        store
            .add(certificate.clone())
            .map_err(|e| format!("certificate {} of {} cannot be trusted: {e}", index + 1, file.display()))?;
    }
    Ok(certificates)
}

/// A certificate with what leads to its authority, and its key; or the setting that is wrong, and why.
fn identity(
    files: &raw::ClientCertificate,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), (&'static str, String)> {
    let chain = certificates(Path::new(&files.cert_file)).map_err(|message| ("cert_file", message))?;
    let key_file = Path::new(&files.key_file);
    let key = read(key_file).and_then(|pem| {
        PrivateKeyDer::from_pem_slice(&pem)
            .map_err(|e| format!("{} has no private key: {e}", key_file.display()))
    });
    let key = key.map_err(|message| ("key_file", message))?;
    pingora::tls::install_default_crypto_provider();
    let tried = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_client_auth_cert(chain.clone(), key.clone_key());
    match tried {
        Ok(_) => Ok((chain, key)),
        Err(e) => Err(("key_file", format!("{} does not go with the certificate: {e}", key_file.display()))),
    }
}

/// The certificates of a PEM file, at least one, each of which Pingora can parse.
fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let found = found.map_err(|e| format!("{} is no PEM file: {e}", file.display()))?;
    if found.is_empty() {
        return Err(format!("{} holds no certificate in PEM", file.display()));
    }
    for (index, certificate) in found.iter().enumerate() {
        x509_parser::parse_x509_certificate(certificate)
            .map_err(|e| format!("certificate {} of {} is none: {e}", index + 1, file.display()))?;
    }
    Ok(found)
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    let bytes = std::fs::metadata(file)
        .and_then(|about| if about.len() > PEM_BYTES_MAX { Ok(None) } else { std::fs::read(file).map(Some) });
    match bytes {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => Err(format!("{} is larger than 1 MiB", file.display())),
        Err(e) => Err(format!("cannot read {}: {e}", file.display())),
    }
}

fn wrapped(certificate: &CertificateDer<'static>) -> WrappedX509 {
    WrappedX509::new(certificate.to_vec(), parse_x509)
}

fn http(path: &str, base: &BaseUrl, raw: &raw::Provider, faults: &mut Faults) -> Http {
    match (raw.http, base.tls) {
        (None | Some(raw::HttpName::Auto), _) => Http::Auto,
        (Some(raw::HttpName::Http1 | raw::HttpName::H1), _) => Http::One,
        (Some(raw::HttpName::H2), true) | (Some(raw::HttpName::H2c), false) => Http::Two,
        (Some(raw::HttpName::H2), false) => {
            let message = "`h2` is negotiated over TLS: begin `base_url` with https://, or say `h2c`";
            faults.push(join(path, "http"), message);
            Http::Auto
        }
        (Some(raw::HttpName::H2c), true) => {
            let message = "`h2c` is HTTP/2 without TLS: begin `base_url` with http://, or say `h2`";
            faults.push(join(path, "http"), message);
            Http::Auto
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Faults, parse};
    use super::Http;

    /// A config with one provider, whose settings these are.
    fn with(provider: &str) -> Result<Config, Faults> {
        let text = format!(
            "listen: {{ http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }}\n\
             store: {{ embedded: {{ path: ./data }} }}\n\
             providers: {{ p: {{ dialect: openai, {provider} }} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n"
        );
        parse(&text, |_| None)
    }

    fn paths(provider: &str) -> Vec<String> {
        with(provider).expect_err("faults").0.into_iter().map(|fault| fault.path).collect()
    }

    #[test]
    fn the_version_of_http_is_what_tls_makes_possible() {
        for (scheme, said, meant) in [
            ("https", "", Http::Auto),
            ("http", "", Http::Auto),
            ("https", "http: auto", Http::Auto),
            ("https", "http: h1", Http::One),
            ("http", "http: \"1.1\"", Http::One),
            ("http", "http: h1", Http::One),
            ("https", "http: h2", Http::Two),
            ("http", "http: h2c", Http::Two),
        ] {
            let config = with(&format!("base_url: \"{scheme}://host/v1\", {said}"));
            let config = config.unwrap_or_else(|e| panic!("{scheme} {said}: {e}"));
            assert_eq!(config.catalogue.endpoints[0].provider.reach.http, meant, "{scheme} {said}");
        }
        for bad in ["base_url: \"http://h\", http: h2", "base_url: \"https://h\", http: h2c"] {
            assert_eq!(paths(bad), ["providers.p.http"], "{bad}");
        }
        assert_eq!(paths("base_url: \"http://h\", http: h3").len(), 1);
    }
}
