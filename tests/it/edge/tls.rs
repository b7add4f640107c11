//! Callers over TLS: both protocols, certificates on both sides, a new one without a restart.

use std::net::SocketAddr;

use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;

use super::{END, Http2, Signed, Signer, ask, connect, rest, shake_hands, tls, wire};
use crate::support::gateway::free_address;
use crate::support::{Call, Gateway, Setup, stream_request, text_of, upstream, whole_request};
use tollgate::mock::{Mock, Script};

/// A gateway that shows this certificate.
struct Tls {
    gateway: Gateway,
    https: SocketAddr,
    _upstream: Mock,
}

async fn showing(certificate: &Signed, more: &str, prepare: impl FnOnce(&TempDir)) -> Tls {
    let only = upstream(Script::default()).await;
    let folder = tempfile::tempdir().unwrap();
    certificate.write_to(folder.path());
    prepare(&folder);
    let https = free_address();
    let listen = format!("https: {{ address: \"{https}\", cert_file: cert.pem, key_file: key.pem{more} }}");
    let gateway = Setup::new(&[only.address()]).listen(&listen).start_in(folder);
    Tls { gateway, https, _upstream: only }
}

#[tokio::test]
async fn callers_with_tls_get_the_protocol_they_ask_for() {
    let signer = Signer::new();
    let Tls { gateway, https, _upstream } = showing(&signer.sign(), "", |_| ()).await;
    for (speaks, agreed) in
        [(vec![], None), (vec!["http/1.1"], Some("http/1.1")), (vec!["h2", "http/1.1"], Some("h2"))]
    {
        let stream = shake_hands(&tls(&signer, None, &speaks), connect(https).await).await.unwrap();
        let alpn = stream.get_ref().1.alpn_protocol().map(|name| String::from_utf8(name.to_vec()).unwrap());
        assert_eq!(alpn.as_deref(), agreed);
        let text = if agreed == Some("h2") {
            let answer = Http2::over(stream).await.call(Http2::chat(), stream_request()).await.unwrap();
            assert_eq!(answer.status, 200);
            answer.body
        } else {
            let mut stream = stream;
            ask(&mut stream, &wire(&stream_request()), END).await
        };
        assert_eq!(text_of(&text), "Hello, world!", "{speaks:?}: {text}");
    }
    let plain = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!(plain.status, 200, "beside it, plain HTTP/1.1 is served");
    assert_eq!(gateway.spent(4), 4 * 75_000);
}

#[tokio::test]
async fn plain_http_on_the_tls_port_is_closed_and_harms_nobody() {
    let signer = Signer::new();
    let Tls { gateway, https, _upstream } = showing(&signer.sign(), "", |_| ()).await;
    let mut stream = connect(https).await;
    let answer = ask(&mut stream, &wire(&whole_request()), "never").await;
    assert!(!answer.contains("200 OK"), "{answer}");
    let mut stream = shake_hands(&tls(&signer, None, &[]), connect(https).await).await.unwrap();
    assert!(ask(&mut stream, &wire(&stream_request()), END).await.contains("[DONE]"));
    gateway.wait_for_refused("tls", 1).await;
}

/// Whether a caller that shows this is served.
async fn is_served(https: SocketAddr, trusted: &Signer, shown: Option<&Signed>) -> bool {
    let Ok(mut stream) = shake_hands(&tls(trusted, shown, &[]), connect(https).await).await else {
        return false;
    };
    // With TLS 1.3 the refusal may come only after the caller's side of the handshake.
    ask(&mut stream, &wire(&stream_request()), END).await.contains("[DONE]")
}

#[tokio::test]
async fn callers_without_a_certificate_of_the_named_signer_are_shut_out() {
    let (ours, theirs, strangers) = (Signer::new(), Signer::new(), Signer::new());
    let write_ca = |folder: &TempDir| std::fs::write(folder.path().join("ca.pem"), &theirs.pem).unwrap();
    let Tls { gateway, https, _upstream } = showing(&ours.sign(), ", client_ca_file: ca.pem", write_ca).await;
    assert!(is_served(https, &ours, Some(&theirs.sign())).await);
    assert!(!is_served(https, &ours, None).await, "no certificate");
    assert!(!is_served(https, &ours, Some(&strangers.sign())).await, "a stranger's");
    assert!(!is_served(https, &ours, Some(&ours.sign())).await, "our own signer's is not a caller's");
    assert_eq!(gateway.spent(1), 75_000);
    gateway.wait_for_refused("tls", 3).await;
}

/// Waits until new handshakes get this certificate.
async fn wait_until_shown(https: SocketAddr, trusted: &Signer, certificate: &Signed) {
    let began = std::time::Instant::now();
    loop {
        let stream = shake_hands(&tls(trusted, None, &[]), connect(https).await).await.unwrap();
        let shown = stream.get_ref().1.peer_certificates().unwrap()[0].clone();
        if shown == certificate.der {
            return;
        }
        assert!(began.elapsed() < super::PATIENCE, "the new certificate is never shown");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_new_certificate_is_shown_without_a_restart_and_a_bad_one_never() {
    let signer = Signer::new();
    let (first, second, third) = (signer.sign(), signer.sign(), signer.sign());
    let Tls { gateway, https, _upstream } = showing(&first, "", |_| ()).await;
    wait_until_shown(https, &signer, &first).await;
    let (_, parsed) = x509_parser::parse_x509_certificate(&first.der).unwrap();
    let expires = r#"tollgate_certificate_expires_unix_seconds{listener="listen.https"}"#;
    assert_eq!(gateway.metric(expires).await, parsed.validity().not_after.timestamp());
    let mut standing = shake_hands(&tls(&signer, None, &[]), connect(https).await).await.unwrap();
    assert!(ask(&mut standing, &wire(&stream_request()), END).await.contains("[DONE]"));

    second.write_to(gateway.folder());
    wait_until_shown(https, &signer, &second).await;

    // The key of another one, and then no certificate at all.
    std::fs::write(gateway.folder().join("key.pem"), &first.key_pem).unwrap();
    gateway.wait_for_log("is not the key of cert_file");
    wait_until_shown(https, &signer, &second).await;
    std::fs::write(gateway.folder().join("cert.pem"), "no certificate").unwrap();
    gateway.wait_for_log("has no certificate");
    wait_until_shown(https, &signer, &second).await;

    third.write_to(gateway.folder());
    wait_until_shown(https, &signer, &third).await;
    let served = ask(&mut standing, &wire(&stream_request()), END).await;
    assert!(served.contains("[DONE]"), "a connection that stands goes on with the certificate it has");
    assert_eq!(gateway.spent(2), 150_000);
}

#[tokio::test]
async fn check_says_which_file_of_tls_cannot_be_used() {
    let signer = Signer::new();
    let Tls { gateway, https: _, _upstream } = showing(&signer.sign(), "", |_| ()).await;
    assert!(gateway.try_command(&["check"]).is_ok());
    std::fs::write(gateway.folder().join("key.pem"), signer.sign().key_pem).unwrap();
    let said = gateway.try_command(&["check"]).unwrap_err();
    assert!(said.contains("listen.https: key_file key.pem is not the key of cert_file cert.pem"), "{said}");
    std::fs::remove_file(gateway.folder().join("cert.pem")).unwrap();
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .args(["--config", "tollgate.yaml", "check"])
        .current_dir(gateway.folder())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(64), "{said}");
    assert!(said.contains("listen.https: cert_file: cannot read cert.pem: No such file"), "{said}");
}

#[tokio::test]
async fn a_silent_caller_of_tls_is_closed_where_there_is_nothing_but_tls() {
    let signer = Signer::new();
    let only = upstream(Script::default()).await;
    let folder = tempfile::tempdir().unwrap();
    signer.sign().write_to(folder.path());
    let https = free_address();
    let gateway = Setup::new(&[only.address()])
        .without_http()
        .listen(&format!("https: {{ address: \"{https}\", cert_file: cert.pem, key_file: key.pem }}"))
        .with("bounds: { head_timeout: 300ms }")
        .start_in(folder);
    let mut silent = connect(https).await;
    assert_eq!(rest(&mut silent).await, "");
    let mut half = connect(https).await;
    half.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00]).await.unwrap();
    rest(&mut half).await;
    // It shook hands with HTTP/2 in mind, and says nothing more.
    let mut quiet = shake_hands(&tls(&signer, None, &["h2"]), connect(https).await).await.unwrap();
    rest(&mut quiet).await;
    gateway.wait_for_refused("too_slow", 3).await;
}
