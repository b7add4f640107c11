//! What a service manager hears of a process's life, and how the process ends.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use tokio::net::TcpStream;

use super::support::{Call, Caller, Setup, script, stream_request, upstream};
use tollgate::mock::Script;

/// A service manager's ear.
struct Ear {
    socket: UnixDatagram,
    _folder: tempfile::TempDir,
}

impl Ear {
    fn new() -> (Self, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        (Self { socket, _folder: folder }, path.to_str().unwrap().to_owned())
    }

    /// The next message that contains `part`; others are passed over.
    fn hear(&self, part: &str) -> String {
        let mut bytes = [0; 4096];
        loop {
            let length = self.socket.recv(&mut bytes).unwrap_or_else(|e| panic!("`{part}` never came: {e}"));
            let message = String::from_utf8(bytes[..length].to_vec()).unwrap();
            if message.contains(part) {
                return message;
            }
        }
    }
}

#[tokio::test]
async fn a_service_manager_hears_ready_reloading_alive_and_stopping() {
    let only = upstream(Script::default()).await;
    let (ear, path) = Ear::new();
    let setup = Setup::new(&[only.address()]).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "200000");
    let mut gateway = setup.start();
    let ready = ear.hear("READY=1");
    assert!(ready.contains("STATUS=serving on 127.0.0.1"), "{ready}");
    assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200);
    for _ in 0..3 {
        ear.hear("WATCHDOG=1");
    }
    gateway.signal("-HUP");
    let reloading = ear.hear("RELOADING=1");
    let (_, usec) = reloading.split_once("MONOTONIC_USEC=").expect("when it began");
    assert!(usec.parse::<u64>().unwrap() > 0);
    ear.hear("READY=1");
    gateway.write_config("nonsense");
    gateway.signal("-HUP");
    assert!(ear.hear("STATUS=serving").contains("the config file is refused"), "and it still serves");
    gateway.signal("-TERM");
    ear.hear("STOPPING=1");
    assert!(gateway.wait().success());
}

#[tokio::test]
async fn a_drain_that_cuts_calls_says_so_by_its_exit_code() {
    let hanging = upstream(script(r#"{"fault":{"kind":"hang_before_head"}}"#)).await;
    let mut gateway = Setup::new(&[hanging.address()]).providers("").drain_max("60s").start();
    // The time for a drain can be shortened while the process runs.
    gateway.write_config(&gateway.config().replace("max: 60s", "max: 50ms"));
    assert_eq!(gateway.reload().await.status, 200);
    let caller = Call::post(stream_request()).begin(gateway.http).await;
    hanging.wait_for_requests(1).await;
    gateway.signal("-TERM");
    assert_eq!(gateway.wait().code(), Some(3));
    drop(caller);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn who_is_connected_when_the_process_leaves_may_still_send_a_request() {
    let only = upstream(Script::default()).await;
    let mut gateway = Setup::new(&[only.address()]).start();
    let mut fresh = Caller::connect(gateway.http).await;
    let mut kept = Caller::connect(gateway.http).await;
    kept.send(&Call::post(stream_request())).await;
    assert_eq!(kept.head().await.status, 200);
    while kept.chunk().await.expect("a whole stream").is_some() {}
    gateway.signal("-TERM");
    while TcpStream::connect(gateway.http).await.is_ok() {}
    for caller in [&mut fresh, &mut kept] {
        caller.send(&Call::post(stream_request())).await;
        let head = caller.head().await;
        assert_eq!((head.status, head.header("connection")), (200, Some("close")));
        while caller.chunk().await.expect("a whole stream").is_some() {}
    }
    assert!(gateway.wait().success());
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn after_an_upgrade_the_new_process_is_the_main_one_and_the_old_one_is_silent() {
    let slow = upstream(script(r#"{"delay_chunk_ms":1500}"#)).await;
    let (ear, path) = Ear::new();
    let mut old = Setup::new(&[slow.address()]).providers("").env("NOTIFY_SOCKET", &path).start();
    assert!(ear.hear("READY=1").contains(&format!("MAINPID={}", old.pid())));
    let mut caller = Call::post(stream_request()).begin(old.http).await;
    caller.head().await;
    let new = old.successor();
    old.signal("-QUIT");
    assert!(ear.hear("READY=1").contains(&format!("MAINPID={}\n", new.pid())));
    old.signal("-HUP");
    old.wait_for_log("the config is read anew");
    ear.socket.set_nonblocking(true).unwrap();
    let mut bytes = [0; 4096];
    while let Ok(length) = ear.socket.recv(&mut bytes) {
        let message = String::from_utf8_lossy(&bytes[..length]).into_owned();
        assert!(!message.contains(&format!("MAINPID={}", old.pid())), "{message}");
        assert!(!message.contains("STOPPING"), "{message}");
    }
    caller.read_until("[DONE]").await;
    assert!(old.wait().success());
}
