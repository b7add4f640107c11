//! `certificates FOLDER`: an authority (`ca.pem`) and a certificate of it for `localhost` (`cert.pem`, `key.pem`).

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: certificates FOLDER")?;
    let folder = Path::new(&folder);
    let mut authority = CertificateParams::new(vec![])?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate()?;
    let authority_certificate = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate()?;
    let certificate =
        CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?.signed_by(&key, &issuer)?;
    std::fs::write(folder.join("ca.pem"), authority_certificate.pem())?;
    std::fs::write(folder.join("cert.pem"), certificate.pem())?;
    std::fs::write(folder.join("key.pem"), key.serialize_pem())?;
    Ok(())
}
