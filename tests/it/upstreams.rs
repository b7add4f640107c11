//! How upstreams are reached: versions of HTTP, whom to trust, what to show.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::support::interim::{INTERIM, answer_each};
use super::support::tls::{
    Authority, TlsUpstream, Wants, quoted, serve_h2_refusing, serve_h2_until, whole_answer,
};
use super::support::{Call, Gateway, Setup, THREADS, script, stream_request, upstream, whole_request};
use tollgate::mock::{Script, SeenRequest};

/// Patience for a TLS handshake on a busy machine.
const TIMERS: &str = "connect: 10s, first_byte: 10s, first_event: 10s";

#[tokio::test]
async fn http2_is_negotiated_over_tls_and_one_connection_carries_the_next_call() {
    let authority = Authority::new();
    let plain = upstream(Script::default()).await;
    let tls = TlsUpstream::start(&authority, Wants::default(), plain.address()).await;
    let trust = format!("ca_file: {}", quoted(&authority.ca_file()));
    let gateway = Setup::new(&[tls.address]).tls(0).providers(TIMERS).provider(0, &trust).threads(1).start();
    for _ in 0..3 {
        let answer = Call::post(whole_request()).send(gateway.http).await;
        assert_eq!(answer.status, 200, "{}\n{}", answer.text(), gateway.log());
        assert!(answer.text().contains("Hello over two"));
    }
    assert_eq!((tls.accepted(), tls.served()), (1, (0, 3)));
}

#[tokio::test]
async fn http_h1_keeps_to_1_1_and_so_does_a_server_without_2() {
    let authority = Authority::new();
    let plain = upstream(Script::default()).await;
    for (http, alpn) in [("h1", &["h2", "http/1.1"][..]), ("auto", &["http/1.1"]), ("auto", &[])] {
        let wants = Wants { alpn, ..Wants::default() };
        let tls = TlsUpstream::start(&authority, wants, plain.address()).await;
        let own = format!("http: {http}, ca_file: {}", quoted(&authority.ca_file()));
        let gateway = Setup::new(&[tls.address]).tls(0).providers(TIMERS).provider(0, &own).start();
        let answer = Call::post(stream_request()).send(gateway.http).await;
        assert_eq!(answer.status, 200, "{http} {alpn:?}: {}", answer.text());
        assert_eq!(tls.served(), (1, 0), "{http} {alpn:?}");
    }
}

#[tokio::test]
async fn an_upstream_with_a_certificate_of_somebody_else_is_not_spoken_to() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let plain = upstream(Script::default()).await;
    let wrong = TlsUpstream::start(&theirs, Wants::default(), plain.address()).await;
    let misnamed =
        TlsUpstream::start(&ours, Wants { name: "other.example", ..Wants::default() }, plain.address()).await;
    let right = TlsUpstream::start(&ours, Wants::default(), plain.address()).await;
    let trust = format!("ca_file: {}", quoted(&ours.ca_file()));
    let mut setup = Setup::new(&[wrong.address, misnamed.address, right.address]).providers(TIMERS);
    for index in 0..3 {
        setup = setup.tls(index).provider(index, &trust);
    }
    let gateway = setup.start();
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("3")));
    assert_eq!((wrong.served(), misnamed.served(), right.served()), ((0, 0), (0, 0), (0, 1)));
}

#[tokio::test]
async fn server_name_is_what_the_certificate_has_to_say() {
    let authority = Authority::new();
    let plain = upstream(Script::default()).await;
    let wants = Wants { name: "models.internal", ..Wants::default() };
    let tls = TlsUpstream::start(&authority, wants, plain.address()).await;
    let own = format!("server_name: models.internal, ca_file: {}", quoted(&authority.ca_file()));
    let gateway = Setup::new(&[tls.address]).tls(0).providers(TIMERS).provider(0, &own).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
}

#[tokio::test]
async fn who_has_to_show_a_certificate_and_has_none_fails_over() {
    let (servers, callers) = (Authority::new(), Authority::new());
    let plain = upstream(Script::default()).await;
    let wants = || Wants { callers_of: Some(&callers), ..Wants::default() };
    let without = TlsUpstream::start(&servers, wants(), plain.address()).await;
    let with = TlsUpstream::start(&servers, wants(), plain.address()).await;
    let trust = format!("ca_file: {}", quoted(&servers.ca_file()));
    let (cert, key) = callers.caller();
    let show = format!(
        "{trust}, client_certificate: {{ cert_file: {}, key_file: {} }}",
        quoted(&cert),
        quoted(&key)
    );
    let setup = Setup::new(&[without.address, with.address]).providers(TIMERS).tls(0).tls(1);
    let gateway = setup.provider(0, &trust).provider(1, &show).start();
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")));
    assert_eq!((without.served(), with.served()), ((0, 0), (0, 1)));
}

#[tokio::test]
async fn providers_that_trust_others_do_not_share_a_connection() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let plain = upstream(Script::default()).await;
    let tls = TlsUpstream::start(&ours, Wants::default(), plain.address()).await;
    let (right, wrong) = (quoted(&ours.ca_file()), quoted(&theirs.ca_file()));
    // The same server twice: whichever is asked first, the one that trusts somebody else must not find the
    // connection of the other.
    let setup = Setup::new(&[tls.address, tls.address]).providers(TIMERS).tls(0).tls(1);
    let setup = setup.provider(0, &format!("ca_file: {wrong}")).provider(1, &format!("ca_file: {right}"));
    let gateway = setup.model("sort: weighted_random").start();
    for _ in 0..12 {
        let answer = Call::post(whole_request()).send(gateway.http).await;
        assert_eq!(answer.header("x-tollgate-upstream"), Some("u1/up-a"), "{}", gateway.log());
    }
}

#[test]
fn files_that_cannot_be_used_are_faults_before_anything_starts() {
    let authority = Authority::new();
    let (cert, key) = authority.caller();
    let other = Authority::new();
    let (_, other_key) = other.caller();
    let empty = authority.ca_file().with_file_name("empty.pem");
    std::fs::write(&empty, "nothing here").unwrap();
    let broken = authority.ca_file().with_file_name("broken.pem");
    std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    let files = |cert: &std::path::Path, key: &std::path::Path| {
        format!("client_certificate: {{ cert_file: {}, key_file: {} }}", quoted(cert), quoted(key))
    };
    let missing = std::path::Path::new("/nowhere.pem");
    for (tls, own, path, word) in [
        (true, format!("ca_file: {}", quoted(missing)), "ca_file", "cannot read"),
        (true, format!("ca_file: {}", quoted(&empty)), "ca_file", "no certificate"),
        (true, format!("ca_file: {}", quoted(&broken)), "ca_file", "certificate 1"),
        (true, files(missing, &key), "client_certificate.cert_file", "cannot read"),
        (true, files(&cert, &empty), "client_certificate.key_file", "no private key"),
        (true, files(&cert, &other_key), "client_certificate.key_file", "does not go with"),
        (true, "server_name: not a name".to_owned(), "server_name", "no host name"),
        (false, "server_name: a.example".to_owned(), "server_name", "https://"),
        (false, format!("ca_file: {}", quoted(&authority.ca_file())), "ca_file", "https://"),
    ] {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
        let mut setup = Setup::new(&[address]).provider(0, &own);
        if tls {
            setup = setup.tls(0);
        }
        let admin = std::net::SocketAddr::from(([127, 0, 0, 1], 10));
        let faults = tollgate::config::parse(&setup.yaml(address, admin), |_| None).expect_err(&own).0;
        let [fault] = faults.as_slice() else { panic!("{own}: {faults:?}") };
        assert_eq!(fault.path, format!("providers.u0.{path}"), "{own}");
        assert!(fault.message.contains(word) && fault.line.is_some(), "{own}: {}", fault.message);
    }
}

/// The credentials that a mock was called with, in order.
fn used(mock: &tollgate::mock::Mock) -> Vec<String> {
    mock.requests().iter().filter_map(|seen| seen.header("authorization").map(str::to_owned)).collect()
}

#[tokio::test]
async fn credentials_take_turns_and_one_over_its_limit_rests_alone() {
    let only = upstream(Script::default()).await;
    let gateway =
        Setup::new(&[only.address()]).provider(0, "credentials: [sk-up-one, sk-up-two, sk-up-three]").start();
    for _ in 0..3 {
        assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    }
    assert_eq!(used(&only), ["Bearer sk-up-one", "Bearer sk-up-two", "Bearer sk-up-three"]);
    only.set_script(script(r#"{"fault":{"kind":"status","code":429,"retry_after":"300"},"fault_count":1}"#));
    let mut names = vec![];
    for _ in 0..3 {
        let answer = Call::post(whole_request()).send(gateway.http).await;
        names.push(answer.header("x-tollgate-upstream").unwrap().to_owned());
    }
    assert_eq!(names, ["u0/up-a#2", "u0/up-a#3", "u0/up-a#2"], "the first rests, the others serve");
    let page = gateway.admin_page("/metrics").await.text();
    assert!(page.contains("u0/up-a#2") && !page.contains("sk-up") && !gateway.log().contains("sk-up"));
}

#[tokio::test]
async fn a_server_that_fails_is_left_for_another_place_and_not_for_its_other_credential() {
    let first = upstream(script(r#"{"fault":{"kind":"status","code":500}}"#)).await;
    let second = upstream(Script::default()).await;
    let gateway = Setup::new(&[first.address(), second.address()])
        .provider(0, "credentials: [sk-up-one, sk-up-two]")
        .start();
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")));
    // Without another place its other credential is worth the try.
    second.set_script(script(r#"{"fault":{"kind":"status","code":401}}"#));
    let before = first.requests().len();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 502);
    let tried: std::collections::BTreeSet<_> = used(&first).into_iter().skip(before).collect();
    assert_eq!(tried.len(), 2, "{tried:?}");
}

#[tokio::test]
async fn a_credential_in_a_file_is_replaced_in_a_running_gateway() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "sk-up-first\n").unwrap();
    let refused = r#"{"fault":{"kind":"status","code":401}}"#;
    let only = upstream(Script::default()).await;
    let own = format!("credential_file: {}", quoted(&file));
    let gateway = Setup::new(&[only.address()]).provider(0, &own).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);

    std::fs::write(&file, "").unwrap();
    gateway.wait_for_log("a credential's file cannot be used");
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(used(&only), ["Bearer sk-up-first", "Bearer sk-up-first"], "the last good one is kept");

    only.set_script(script(refused));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 502);
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 503, "it rests");
    only.set_script(Script::default());
    std::fs::write(folder.path().join("next"), "sk-up-second").unwrap();
    std::fs::rename(folder.path().join("next"), &file).unwrap();
    gateway.wait_for_log("a credential was replaced");
    assert_eq!(
        Call::post(whole_request()).send(gateway.http).await.status,
        200,
        "nothing is held against the new one"
    );
    assert_eq!(used(&only).last().unwrap(), "Bearer sk-up-second");
    assert!(!gateway.log().contains("sk-up"), "{}", gateway.log());
}

#[test]
fn credentials_and_checks_that_make_no_sense_are_faults() {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
    let admin = std::net::SocketAddr::from(([127, 0, 0, 1], 10));
    for (own, path, word) in [
        ("credential: a, credentials: [b, c]", "credential", "name one of"),
        ("credential: a, credential_file: /f", "credential", "name one of"),
        ("credentials: []", "credentials", "at least one"),
        ("credentials: [sk-up-a, sk-up-a]", "credentials", "number 2 is the same"),
        ("credentials: [a, \"b c\"]", "credentials", "visible ASCII"),
        ("check: { path: health }", "check.path", "no path such as"),
        ("check: { path: /health, every: 10ms }", "check.every", "at least 1s"),
        ("credential_file: /nowhere/key", "credential_file", "cannot read /nowhere/key"),
    ] {
        let setup = Setup::new(&[address]).provider(0, own);
        let faults = tollgate::config::parse(&setup.yaml(address, admin), |_| None).expect_err(own).0;
        let [fault] = faults.as_slice() else { panic!("{own}: {faults:?}") };
        assert_eq!(fault.path, format!("providers.u0.{path}"), "{own}");
        assert!(fault.message.contains(word) && !fault.message.contains("sk-up"), "{own}: {}", fault.message);
    }
}

#[tokio::test]
async fn a_free_check_is_asked_without_our_credential_and_lets_a_refused_endpoint_prove_itself() {
    let only = upstream(script(r#"{"fault":{"kind":"status","code":503}}"#)).await;
    let gateway = Setup::new(&[only.address()]).provider(0, "check: { path: /v1/models, every: 1s }").start();
    while gateway.endpoint_metric("tollgate_endpoint_refused", "u0/up-a").await < 1.0 {
        Call::post(whole_request()).send(gateway.http).await;
    }
    only.set_script(Script::default());
    let checks =
        |mock: &tollgate::mock::Mock| mock.requests().iter().filter(|seen| seen.method == "GET").count();
    only.wait_for_requests(only.requests().len() + 2).await;
    while Call::post(whole_request()).send(gateway.http).await.status != 200 {
        assert!(checks(&only) < 60, "it is never let in:\n{}", gateway.log());
    }
    let asked = only.requests();
    let asked = asked.iter().find(|seen| seen.method == "GET").unwrap();
    assert_eq!((asked.path.as_str(), asked.header("authorization")), ("/v1/models", None));
}

/// Waits until a connection is in the pool of each thread. The upstream runs on this thread, so it must not be blocked.
async fn kept_warm(gateway: &Gateway) {
    let began = std::time::Instant::now();
    while gateway.log().matches("a connection is kept warm").count() < THREADS {
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "none:\n{}", gateway.log());
        tokio::task::yield_now().await;
    }
}

/// Says when a connection is in the pool.
const WARMING: &str = "info,tollgate::proxy::warm=debug";

#[tokio::test]
async fn the_first_failover_finds_a_connection_that_is_open_already() {
    let authority = Authority::new();
    let first = upstream(Script::default()).await;
    let standby = TlsUpstream::start(&authority, Wants::default(), first.address()).await;
    let trust = format!("ca_file: {}", quoted(&authority.ca_file()));
    let gateway = Setup::new(&[first.address(), standby.address])
        .tls(1)
        .providers(TIMERS)
        .provider(1, &trust)
        .log(WARMING)
        .start();
    assert_eq!(standby.accepted(), 0, "nobody has asked for the model yet");
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    kept_warm(&gateway).await;
    assert_eq!((standby.accepted(), standby.served()), (THREADS, (0, 0)), "nothing is sent to keep it warm");

    first.set_script(script(r#"{"fault":{"kind":"status","code":503}}"#));
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")));
    assert_eq!(
        (standby.accepted(), standby.served()),
        (THREADS, (0, 1)),
        "over the connection that was there"
    );
    let lines = || gateway.log().lines().filter(|line| line.contains(" access: ")).count();
    gateway.wait_until_settled().await;
    gateway.wait_for_log("upstream=\"u1/up-a\"");
    assert_eq!(lines(), 2, "warming up is no call:\n{}", gateway.log());
}

#[tokio::test]
async fn over_http_1_1_a_standby_with_a_free_check_is_kept_warm_by_it() {
    let authority = Authority::new();
    let (first, behind) = (upstream(Script::default()).await, upstream(Script::default()).await);
    let wants = Wants { alpn: &["http/1.1"], ..Wants::default() };
    let standby = TlsUpstream::start(&authority, wants, behind.address()).await;
    let own = format!("ca_file: {}, check: {{ path: /v1/models, every: 7d }}", quoted(&authority.ca_file()));
    let setup = Setup::new(&[first.address(), standby.address]).tls(1).providers(TIMERS).provider(1, &own);
    let gateway = setup.log(WARMING).start();
    behind.wait_for_requests(1).await; // The check itself, on a connection of its own.
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    kept_warm(&gateway).await;
    first.set_script(script(r#"{"fault":{"kind":"status","code":503}}"#));
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("2")));
    let seen = behind.requests();
    let call = seen.iter().find(|seen| seen.method == "POST").unwrap();
    let asked = |seen: &&SeenRequest| seen.method == "GET" && seen.connection == call.connection;
    let warm = seen.iter().find(asked).expect("a connection that was there");
    assert_eq!(warm.header("authorization"), None);
}

#[tokio::test]
async fn a_standby_that_says_something_before_its_answer_is_kept_warm_too() {
    let authority = Authority::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(answer_each(listener, INTERIM, false));
    let first = upstream(Script::default()).await;
    let wants = Wants { alpn: &["http/1.1"], ..Wants::default() };
    let standby = TlsUpstream::start(&authority, wants, address).await;
    let own = format!("ca_file: {}, check: {{ path: /v1/models, every: 7d }}", quoted(&authority.ca_file()));
    let setup = Setup::new(&[first.address(), standby.address]).tls(1).providers(TIMERS).provider(1, &own);
    let gateway = setup.log(WARMING).start();
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    kept_warm(&gateway).await;
}

/// An upstream over HTTP/2 without TLS that refuses its first `refused` streams, by name.
async fn refusing(refused: usize) -> (std::net::SocketAddr, std::sync::Arc<[AtomicUsize; 2]>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = std::sync::Arc::new([const { AtomicUsize::new(0) }; 2]);
    let counts = std::sync::Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let counts = std::sync::Arc::clone(&counts);
            tokio::spawn(async move { serve_h2_refusing(stream, &counts, refused).await });
        }
    });
    (address, seen)
}

#[tokio::test]
async fn a_stream_that_is_refused_once_is_sent_again_and_one_refused_twice_fails_over() {
    // A body beyond the window of HTTP/2 is still being written when the refusal comes.
    for filler in [0, 300_000] {
        let body = whole_request().replace("\"hi\"", &format!("\"hi{}\"", "x".repeat(filler)));
        for (refused, attempts, by) in [(1, "1", "u0/up-a"), (2, "2", "u1/up-a")] {
            let (address, seen) = refusing(refused).await;
            let second = upstream(Script::default()).await;
            let setup = Setup::new(&[address, second.address()]).providers(TIMERS).balance("100");
            let gateway = setup.provider(0, "http: h2c").start();
            let answer = Call::post(body.clone()).send(gateway.http).await;
            let told =
                (answer.status, answer.header("x-tollgate-attempts"), answer.header("x-tollgate-upstream"));
            assert_eq!(told, (200, Some(attempts), Some(by)), "{filler} {refused}\n{}", gateway.log());
            assert_eq!(seen[0].load(Ordering::SeqCst), 2, "{filler} {refused}");
        }
    }
}

#[tokio::test]
async fn dead_pooled_connections_harm_nobody_however_many_there_are() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let together = std::sync::Arc::new(tokio::sync::Barrier::new(3));
    let (connections, meeting) = (std::sync::Arc::new(AtomicUsize::new(0)), std::sync::Arc::clone(&together));
    let counts = std::sync::Arc::clone(&connections);
    // Every connection answers one request and dies of the next, without a byte.
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let number = counts.fetch_add(1, Ordering::SeqCst);
            let meeting = std::sync::Arc::clone(&meeting);
            tokio::spawn(async move {
                read_request(&mut stream).await;
                if number < 3 {
                    meeting.wait().await;
                }
                stream.write_all(whole_answer().as_bytes()).await.unwrap();
                read_request(&mut stream).await;
            });
        }
    });
    let gateway = Setup::new(&[address]).providers(TIMERS).start();
    // Three at once leave three connections in the pool.
    let calls = (0..3).map(|_| Call::post(whole_request()).send(gateway.http));
    for answer in futures::future::join_all(calls).await {
        assert_eq!(answer.status, 200, "{}", gateway.log());
    }
    let answer = Call::post(whole_request()).send(gateway.http).await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("1")), "{}", gateway.log());
    assert_eq!(connections.load(Ordering::SeqCst), 4, "over a new connection, not over the next dead one");
    assert!(!gateway.log().contains("outcome=\"failed\""), "{}", gateway.log());
}

/// Reads a request with its length, to its end.
async fn read_request(stream: &mut tokio::net::TcpStream) {
    let mut bytes = vec![];
    let length = loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            break end + 4 + length.unwrap_or(0);
        }
        match stream.read_u8().await {
            Ok(byte) => bytes.push(byte),
            Err(_) => return,
        }
    };
    while bytes.len() < length {
        bytes.push(stream.read_u8().await.unwrap());
    }
}

#[tokio::test]
async fn a_call_under_way_while_its_credential_is_replaced_is_sent_again_with_the_new_one() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (asked, has_asked) = tokio::sync::oneshot::channel();
    let (refuse, may_refuse) = tokio::sync::oneshot::channel::<()>();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        asked.send(()).unwrap();
        may_refuse.await.unwrap();
        let refused =
            "HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
        stream.write_all(refused.as_bytes()).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        stream.write_all(whole_answer().as_bytes()).await.unwrap();
        read_request(&mut stream).await;
    });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "sk-up-first").unwrap();
    let own = format!("credential_file: {}", quoted(&file));
    let gateway = Setup::new(&[address]).providers(TIMERS).provider(0, &own).start();
    let caller = Call::post(whole_request()).begin(gateway.http).await;
    has_asked.await.unwrap();
    std::fs::write(&file, "sk-up-second").unwrap();
    gateway.wait_for_log("a credential was replaced");
    refuse.send(()).unwrap();
    let answer = caller.answer().await;
    assert_eq!((answer.status, answer.header("x-tollgate-attempts")), (200, Some("1")), "{}", gateway.log());
    assert!(!gateway.log().contains("refuses our credential"), "the new one is not blamed for the old one");
}

#[tokio::test]
async fn silence_on_a_pooled_connection_of_http2_is_the_upstreams_own() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve_h2_until(stream, 60));
        }
    });
    let second = upstream(Script::default()).await;
    let setup =
        Setup::new(&[address, second.address()]).providers("connect: 10s, first_byte: 2s, first_event: 10s");
    // So many answers come on one connection, and each thread has its own.
    let gateway = setup.provider(0, "http: h2c").threads(1).start();
    for call in 1..=61 {
        let answer = Call::post(whole_request()).send(gateway.http).await;
        let attempts = if call <= 60 { "1" } else { "2" };
        assert_eq!(
            (answer.status, answer.header("x-tollgate-attempts")),
            (200, Some(attempts)),
            "{}",
            gateway.log()
        );
    }
    // After so many answers a failure takes a quarter; one of a connection that may have died in the pool half of that.
    let factor = gateway.endpoint_metric("tollgate_endpoint_factor", "u0/up-a").await;
    assert!(factor < 0.8, "{factor}");
}
