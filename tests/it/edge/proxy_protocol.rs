//! A load balancer says whose a connection is: believed where it is trusted, and nowhere else.

use std::net::SocketAddr;

use super::{END, Signer, ask, connect, rest, shake_hands, tls, wire};
use crate::support::gateway::free_address;
use crate::support::{Gateway, Setup, stream_request, upstream};
use tokio::io::AsyncWriteExt as _;
use tollgate::mock::{Mock, Script};

const TRUSTED: &str = "trusted: [127.0.0.0/8]";
const V1: &[u8] = b"PROXY TCP4 192.0.2.9 127.0.0.1 54321 8080\r\n";
/// The same by version 2, with an extension behind the addresses.
const V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x10\xc0\0\x02\x09\x7f\0\0\x01\xd4\x31\x1f\x90\x04\0\x01\0";
const SAID: &str = "caller=192.0.2.9";
const OWN: &str = "caller=127.0.0.1";

async fn gateway(rule: &str) -> (Mock, Gateway) {
    let only = upstream(Script::default()).await;
    let setup = Setup::new(&[only.address()]).http(&format!("proxy_protocol: {{ {rule} }}"));
    let gateway = setup.with("bounds: { connections_per_address_max: 2 }").start();
    (only, gateway)
}

/// What the caller of a connection that begins so gets.
async fn call(to: SocketAddr, begin: &[u8]) -> String {
    let mut stream = connect(to).await;
    let _closed = stream.write_all(begin).await;
    ask(&mut stream, &wire(&stream_request()), END).await
}

#[tokio::test]
async fn a_trusted_source_is_believed_in_both_versions() {
    for begin in [V1, V2] {
        let (_upstream, gateway) = gateway(&format!("mode: accept, {TRUSTED}")).await;
        assert!(call(gateway.http, begin).await.contains("[DONE]"));
        gateway.wait_for_log("status=200");
        let log = gateway.log();
        assert!(log.contains(SAID) && !log.contains(OWN), "{log}");
    }
}

#[tokio::test]
async fn a_trusted_source_may_say_nothing_where_it_is_not_required() {
    let (_upstream, gateway) = gateway(&format!("mode: accept, {TRUSTED}")).await;
    assert!(call(gateway.http, b"").await.contains("[DONE]"));
    assert!(call(gateway.http, b"PROXY UNKNOWN\r\n").await.contains("[DONE]"), "it speaks for itself");
    gateway.wait_for_log_times(OWN, 2);
}

#[tokio::test]
async fn an_untrusted_source_is_never_believed() {
    let untrusting = "trusted: [10.0.0.0/8]";
    let (_upstream, accepting) = gateway(&format!("mode: accept, {untrusting}")).await;
    for begin in [V1, V2] {
        let answer = call(accepting.http, begin).await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("\"invalid_request\""), "{answer}");
    }
    assert!(call(accepting.http, b"").await.contains("[DONE]"), "it may call as itself");
    accepting.wait_for_log(OWN);
    let (_upstream, requiring) = gateway(&format!("mode: require, {untrusting}")).await;
    for begin in [V1, V2, b""] {
        assert_eq!(call(requiring.http, begin).await, "");
    }
    for gateway in [accepting, requiring] {
        assert!(!gateway.log().contains("192.0.2.9"), "{}", gateway.log());
    }
}

#[tokio::test]
async fn where_it_is_required_nobody_connects_without_it() {
    let (_upstream, gateway) = gateway(&format!("mode: require, {TRUSTED}")).await;
    let before = gateway.refused("proxy_protocol").await;
    assert_eq!(call(gateway.http, b"").await, "");
    assert_eq!(call(gateway.http, b"PROXY TCP4 nonsense\r\n").await, "");
    gateway.wait_for_refused("proxy_protocol", before + 2).await;
    assert!(call(gateway.http, V1).await.contains("[DONE]"));
    assert_eq!(gateway.spent(1), 75_000);
}

#[tokio::test]
async fn connections_are_counted_for_the_caller_that_was_named() {
    let (_upstream, gateway) = gateway(&format!("mode: accept, {TRUSTED}")).await;
    let mut held = vec![];
    for _ in 0..2 {
        let mut stream = connect(gateway.http).await;
        stream.write_all(V1).await.unwrap();
        assert!(ask(&mut stream, &wire(&stream_request()), END).await.contains("[DONE]"));
        held.push(stream);
    }
    assert_eq!(call(gateway.http, V2).await, "", "its third");
    let other = b"PROXY TCP4 192.0.2.10 127.0.0.1 54321 8080\r\n";
    assert!(call(gateway.http, other).await.contains("[DONE]"), "another's first");
    gateway.wait_for_refused("address_taken", 1).await;
}

#[tokio::test]
async fn it_comes_before_tls_too() {
    let only = upstream(Script::default()).await;
    let signer = Signer::new();
    let folder = tempfile::tempdir().unwrap();
    signer.sign().write_to(folder.path());
    let https = free_address();
    let listen = format!(
        "https: {{ address: \"{https}\", cert_file: cert.pem, key_file: key.pem, proxy_protocol: {{ mode: require, {TRUSTED} }} }}"
    );
    let gateway = Setup::new(&[only.address()]).listen(&listen).start_in(folder);
    for begin in [V1, V2] {
        let mut stream = connect(https).await;
        stream.write_all(begin).await.unwrap();
        let mut stream = shake_hands(&tls(&signer, None, &[]), stream).await.unwrap();
        assert!(ask(&mut stream, &wire(&stream_request()), END).await.contains("[DONE]"));
    }
    gateway.wait_for_log_times(SAID, 2);
    // A handshake without it is no header.
    assert!(shake_hands(&tls(&signer, None, &[]), connect(https).await).await.is_err());
    let mut garbage = connect(https).await;
    garbage.write_all(&[0x16; 64]).await.unwrap();
    assert_eq!(rest(&mut garbage).await, "");
}
