//! A full disk stops admission, not the gateway, and costs nobody a nano-dollar.
//!
//! The data folder is a small tmpfs of its own, so these tests need root; anybody else gets a note.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate::mock::Script;

use super::support::{Call, Gateway, Setup, script, stream_request, text_of, upstream, whole_request};

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(20);
/// What one call of the default script costs, in nano-dollars.
const CALL_NANO: i64 = 75_000;

/// A file system of 4 MiB, until it is dropped.
struct Disk {
    folder: TempDir,
}

impl Disk {
    /// `None`: nobody but root may mount one.
    #[expect(clippy::print_stdout, reason = "whoever runs the tests should know what was left out")]
    fn mount() -> Option<Self> {
        let id = Command::new("id").arg("-u").output().expect("id");
        if id.stdout.trim_ascii() != b"0" {
            println!("not root: a full disk is not tested");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(folder.path()).output();
        let mounted = mounted.expect("mount");
        if !mounted.status.success() {
            println!("no mounts in here, so a full disk is not tested: {mounted:?}");
            return None;
        }
        Some(Self { folder })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A gateway whose data folder this is.
    fn gateway(&self, setup: Setup) -> Gateway {
        let folder = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink(self.path(), folder.path().join("data")).expect("a link");
        setup.start_in(folder)
    }

    /// Takes every page that is left.
    fn fill(&self) {
        let mut filler = File::options().create(true).append(true).open(self.filler()).expect("the filler");
        let page = [0xff_u8; 4096];
        loop {
            match filler.write(&page) {
                Ok(count) => assert!(count > 0),
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn free(&self) {
        std::fs::remove_file(self.filler()).expect("the filler");
    }

    fn filler(&self) -> std::path::PathBuf {
        self.path().join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: a gateway that a failed test leaves behind may still have its files open.
        let _gone = Command::new("umount").arg("-l").arg(self.folder.path()).status();
    }
}

/// Calls until the full disk shows: the journal has some room reserved.
/// Answers how many calls were served before.
async fn call_until_refused(gateway: &Gateway) -> i64 {
    for served in 0..200 {
        let answer = Call::post(whole_request()).send(gateway.http).await;
        if answer.status == 200 {
            continue;
        }
        assert_eq!((answer.status, answer.code().as_str()), (503, "store_unavailable"), "{}", answer.text());
        assert_eq!(answer.header("retry-after"), Some("1"));
        return served;
    }
    panic!("a full disk is not noticed:\n{}", gateway.log());
}

/// For as long as some tries of the journal take.
async fn refuses_for_a_while(gateway: &Gateway) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(500) {
        assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 503);
        let ready = gateway.admin_page("/readyz").await;
        assert_eq!((ready.status, ready.text().contains("journal")), (503, true), "{}", ready.text());
    }
}

async fn wait_until_ready(gateway: &Gateway) {
    let began = Instant::now();
    while gateway.admin_page("/readyz").await.status != 200 {
        assert!(began.elapsed() < PATIENCE, "never ready again:\n{}", gateway.log());
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_full_disk_refuses_calls_until_it_has_room_and_the_books_stay_exact() {
    let Some(disk) = Disk::mount() else { return };
    let only = upstream(Script::default()).await;
    let gateway = disk.gateway(Setup::new(&[only.address()]));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(gateway.spent(1), CALL_NANO);
    for round in 0..2 {
        let before = i64::try_from(only.requests().len()).unwrap();
        disk.fill();
        let served = call_until_refused(&gateway).await;
        refuses_for_a_while(&gateway).await;
        assert_eq!(gateway.admin_page("/healthz").await.status, 200, "it is alive all the same");
        let asked = i64::try_from(only.requests().len()).unwrap() - before;
        assert_eq!(asked, served, "no upstream is called for a call that cannot be recorded");
        assert_eq!(gateway.metric("tollgate_holds_open").await, 0, "what was refused holds no money");
        disk.free();
        wait_until_ready(&gateway).await;
        assert_eq!(Call::post(stream_request()).send(gateway.http).await.status, 200, "round {round}");
        let calls = before + served + 1;
        assert_eq!(gateway.spent(calls), calls * CALL_NANO, "round {round}");
        assert!(gateway.ledger_is_right(), "round {round}");
    }
    let calls = i64::try_from(only.requests().len()).unwrap();
    let gateway = gateway.kill_and_restart();
    assert_eq!(gateway.spent(calls), calls * CALL_NANO, "nothing is lost and nothing charged twice");
    assert_eq!(gateway.account("alpha", calls).calls, calls);
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_call_that_ends_on_a_full_disk_is_charged_once() {
    let Some(disk) = Disk::mount() else { return };
    let only = upstream(script(r#"{"fault":{"kind":"hang_after_pieces","pieces":2},"fault_count":1}"#)).await;
    let gateway = disk.gateway(Setup::new(&[only.address()]).providers("idle: 20s"));
    let mut caller = Call::post(stream_request()).begin(gateway.http).await;
    caller.head().await;
    caller.read_until(", ").await;
    gateway.wait_for_progress().await;
    disk.fill();
    let served = call_until_refused(&gateway).await;
    // It leaves on a full disk: the room for its end was set aside when it was let in.
    caller.reset();
    only.wait_for_disconnects(1).await;
    gateway.wait_until_settled().await;
    assert!(!gateway.log().contains("a charge waits for the disk"));
    disk.free();
    wait_until_ready(&gateway).await;
    let spent = 5 * 2_500 + 2 * 10_000 + served * CALL_NANO;
    assert_eq!(gateway.spent(1 + served), spent, "what was delivered is charged");
    let answer = Call::post(stream_request()).send(gateway.http).await;
    assert_eq!((answer.status, text_of(&answer.text()).as_str()), (200, "Hello, world!"));
    let gateway = gateway.kill_and_restart();
    assert_eq!(gateway.spent(2 + served), spent + CALL_NANO, "and charged once");
    assert!(gateway.ledger_is_right());
}

#[tokio::test]
async fn a_gateway_that_dies_on_a_full_disk_starts_again_with_every_recorded_charge() {
    let Some(disk) = Disk::mount() else { return };
    let only = upstream(Script::default()).await;
    let mut gateway = disk.gateway(Setup::new(&[only.address()]));
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    disk.fill();
    let calls = 1 + call_until_refused(&gateway).await;
    let waits = gateway.log().matches("a charge waits for the disk").count();
    assert_eq!(waits, 0, "whoever was let in had room for its end as well");
    gateway.signal("-KILL");
    gateway.wait();
    disk.free();
    let gateway = gateway.kill_and_restart();
    assert_eq!(gateway.spent(calls), calls * CALL_NANO, "every recorded end is charged once");
    assert_eq!(Call::post(whole_request()).send(gateway.http).await.status, 200);
    assert_eq!(gateway.spent(calls + 1), (calls + 1) * CALL_NANO);
    assert!(gateway.ledger_is_right());
}
