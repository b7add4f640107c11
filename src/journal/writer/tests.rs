//! What the journal's threads promise: nothing is lost or said twice, whenever the process dies.

use std::sync::mpsc::{Receiver, sync_channel};

use super::super::replay::dead_boots;
use super::super::{Hold, Journal, Replayed, Settled, Threads, Unwritable};
use super::*;

/// How long anything may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(20);
/// A tick that never comes: nothing is copied to the log unless the ring asks for it.
const NEVER: Duration = Duration::from_secs(3600);
/// So long that a few hundred calls fill a segment.
const REQUEST_BYTES: usize = 60 << 10;

fn open(id: u128) -> Arc<OpenHold> {
    Arc::new(OpenHold::new(Hold {
        id,
        account: 1,
        amount: 1_000,
        at_ms: 0,
        request: "r".to_owned(),
        model: "m".to_owned(),
        key: [7; 32],
        price_version: 3,
        pool: None,
    }))
}

fn end(hold: &OpenHold, request_bytes: usize) -> Settled {
    Settled {
        id: hold.hold.id,
        account: 1,
        request: "x".repeat(request_bytes),
        model: "m".to_owned(),
        endpoint: String::new(),
        attempts: 1,
        parts: [1_000, 400, 600, 0, 0],
        provider_cost: 0,
        abandoned: 0,
        key: [7; 32],
        held_ms: 0,
        price_version: 3,
        pool: None,
        tokens: [0; 7],
        estimated: false,
        anomaly: false,
        at_ms: 0,
    }
}

fn segments(boot: &Path) -> Vec<String> {
    let names = std::fs::read_dir(boot).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
    let mut logs: Vec<_> = names.filter(|name| name.ends_with(".log")).collect();
    logs.sort();
    logs
}

fn wait_for_segments(boot: &Path, expected: &[&str]) {
    let until = crate::clock::now() + PATIENCE;
    while segments(boot) != expected {
        assert!(crate::clock::now() < until, "{:?} are there, not {expected:?}", segments(boot));
        thread::yield_now();
    }
}

/// What the next process would find if this one died now.
fn replay(boot: &Path) -> Replayed {
    let root = tempfile::tempdir().unwrap();
    let copy = root.path().join(boot.file_name().unwrap());
    std::fs::create_dir(&copy).unwrap();
    // The ring last: what is drained meanwhile stands in it all the same.
    for name in segments(boot).into_iter().chain(["ring".to_owned()]) {
        std::fs::copy(boot.join(&name), copy.join(&name)).unwrap();
    }
    dead_boots(root.path()).unwrap().remove(0).replay().unwrap()
}

fn orphans(replayed: &Replayed) -> Vec<(u128, i64)> {
    replayed.orphans.iter().map(|(hold, cost)| (hold.id, *cost)).collect()
}

fn ids(replayed: &Replayed) -> Vec<u128> {
    replayed.settled.iter().map(|settled| settled.id).collect()
}

/// Takes what has come and says so, as the ledger does.
fn acknowledge(postings: &Receiver<Posting>, journal: &Journal, count: u64) {
    for expected in 1..=count {
        let posting = postings.recv_timeout(PATIENCE).unwrap();
        assert!(posting.number >= expected, "{} comes again", posting.number);
        journal.posted(posting.number, 1);
    }
}

#[tokio::test]
async fn a_full_segment_goes_once_it_is_posted_and_takes_no_open_hold_along() {
    let root = tempfile::tempdir().unwrap();
    let (ledger, postings) = sync_channel(1 << 10);
    let (journal, threads) = Journal::start(root.path(), 7, ledger).unwrap();
    let boot = root.path().join("000000000007");
    let long: Vec<_> = (1..=3).map(open).collect();
    for hold in &long {
        journal.hold(Arc::clone(hold)).await.unwrap();
    }
    journal.progress(&long[0], super::super::Amount::from_nano(250));

    let mut ended = vec![];
    while segments(&boot).len() == 1 {
        let hold = open(100 + ended.len() as u128);
        journal.hold(Arc::clone(&hold)).await.unwrap();
        journal.settle(end(&hold, REQUEST_BYTES)).await.unwrap();
        ended.push(hold.hold.id);
        assert!(ended.len() < 1_000, "no second segment begins");
    }
    let first = boot.join("00000001.log").metadata().unwrap().len();
    assert!(first > SEGMENT_BYTES && first < SEGMENT_BYTES + (1 << 20), "{first} bytes");
    // One more call's end comes behind the one that filled it, and stays when the first is gone.
    let last = open(99_999);
    journal.hold(Arc::clone(&last)).await.unwrap();
    journal.settle(end(&last, 10)).await.unwrap();
    assert_eq!(segments(&boot), ["00000001.log", "00000002.log"], "nothing is posted yet: both stay");
    let before = replay(&boot);
    assert_eq!(orphans(&before), [(1, 250), (2, 0), (3, 0)]);
    assert_eq!(ids(&before).len(), ended.len() + 1, "every end is there, once");

    let all = u64::try_from(ended.len() + 1).unwrap();
    acknowledge(&postings, &journal, all);
    wait_for_segments(&boot, &["00000002.log"]);
    assert_eq!(journal.unposted(), 0);
    let after = replay(&boot);
    assert_eq!(orphans(&after), [(1, 250), (2, 0), (3, 0)], "open holds are in the new one");
    assert!(after.orphans.iter().all(|(hold, _)| *hold == open(hold.id).hold), "whole");
    assert!(ids(&after).len() < ended.len() && ids(&after).contains(&99_999), "{:?}", ids(&after));

    // What was open over the change ends as anything else does.
    journal.settle(end(&long[1], 10)).await.unwrap();
    acknowledge(&postings, &journal, 1);
    let stopped = threads.stop();
    assert!(!stopped.is_complete(), "two holds are open");
    drop(stopped);
    let dead = dead_boots(root.path()).unwrap().remove(0);
    assert_eq!((dead.boot, orphans(&dead.replay().unwrap())), (7, vec![(1, 250), (3, 0)]));
}

#[tokio::test]
async fn a_segment_with_an_end_that_is_not_posted_stays() {
    let root = tempfile::tempdir().unwrap();
    let (ledger, postings) = sync_channel(1 << 10);
    let (journal, threads) = Journal::start(root.path(), 7, ledger).unwrap();
    let boot = root.path().join("000000000007");
    let mut ends = 0;
    while segments(&boot).len() < 3 {
        let hold = open(u128::from(100 + ends));
        journal.hold(Arc::clone(&hold)).await.unwrap();
        journal.settle(end(&hold, REQUEST_BYTES)).await.unwrap();
        ends += 1;
        assert!(ends < 2_000, "no third segment begins");
    }
    let numbers: Vec<u64> = (0..ends).map(|_| postings.recv_timeout(PATIENCE).unwrap().number).collect();
    assert_eq!(numbers, (1..=ends).collect::<Vec<_>>(), "in their order");
    let of_first = ends / 2 - 10;
    journal.posted(of_first, of_first);
    // A record that is written shows that the thread has looked at what is posted.
    for id in [1, 2] {
        journal.hold(open(id)).await.unwrap();
    }
    assert_eq!(segments(&boot).len(), 3, "the last ends of the first segment are not posted");
    journal.posted(ends / 2 + 10, ends / 2 + 10 - of_first);
    wait_for_segments(&boot, &["00000002.log", "00000003.log"]);
    journal.posted(ends, ends - (ends / 2 + 10));
    wait_for_segments(&boot, &["00000003.log"]);
    assert_eq!((journal.unposted(), orphans(&replay(&boot))), (0, vec![(1, 0), (2, 0)]));
    drop(threads.stop());
}

/// A journal whose log takes nothing until its ring is half full.
fn frozen(root: &Path) -> (Journal, Threads, Receiver<Posting>) {
    let (ledger, postings) = sync_channel(1 << 14);
    let (journal, threads) = Journal::start_at(NEVER, root, 7, ledger).unwrap();
    let until = crate::clock::now() + PATIENCE;
    while journal.shared.lock().room == 0 {
        assert!(crate::clock::now() < until, "the disk promises no room");
        thread::yield_now();
    }
    (journal, threads, postings)
}

/// Of the one segment that is there.
fn log_bytes(root: &Path) -> u64 {
    root.join("000000000007/00000001.log").metadata().unwrap().len()
}

#[tokio::test]
async fn what_was_answered_is_replayed_although_the_log_has_nothing_of_it() {
    let root = tempfile::tempdir().unwrap();
    let (journal, threads, _postings) = frozen(root.path());
    let (ended, left, running) = (open(1), open(2), open(3));
    for hold in [&ended, &left, &running] {
        journal.hold(Arc::clone(hold)).await.unwrap();
    }
    journal.settle(end(&ended, 10)).await.unwrap();
    journal.settle_unattended(end(&left, 10));
    assert_eq!(log_bytes(root.path()), 0);
    let replayed = replay(&root.path().join("000000000007"));
    assert_eq!((ids(&replayed), orphans(&replayed)), (vec![1, 2], vec![(3, 0)]));
    assert_eq!(replayed.settled[0], end(&ended, 10), "whole");
    assert_eq!(journal.unposted(), 2);
    // Whoever stops leaves nothing behind in the ring.
    journal.settle(end(&running, 10)).await.unwrap();
    assert!(threads.stop().is_complete());
    assert!(log_bytes(root.path()) > 0);
}

#[tokio::test]
async fn a_crash_anywhere_between_ring_and_log_says_everything_once() {
    let root = tempfile::tempdir().unwrap();
    let (journal, threads, _postings) = frozen(root.path());
    let held: Vec<_> = (1..=4).map(open).collect();
    for hold in &held {
        journal.hold(Arc::clone(hold)).await.unwrap();
    }
    journal.settle(end(&held[0], 10)).await.unwrap();
    journal.settle(end(&held[3], 10)).await.unwrap();
    // The writer copies all of it: it is in the log and in the ring, and the place in the ring is free.
    drop(threads.stop());
    let boot = root.path().join("000000000007");
    let log = std::fs::read(boot.join("00000001.log")).unwrap();
    for cut in 0..=log.len() {
        std::fs::write(boot.join("00000001.log"), &log[..cut]).unwrap();
        let replayed = replay(&boot);
        assert_eq!((ids(&replayed), orphans(&replayed)), (vec![1, 4], vec![(2, 0), (3, 0)]), "at {cut}");
    }
}

#[tokio::test]
async fn a_ring_that_fills_up_is_copied_and_whoever_finds_it_full_waits() {
    let root = tempfile::tempdir().unwrap();
    let (journal, threads, postings) = frozen(root.path());
    let calls = 5_000;
    for id in 1..=calls {
        let hold = open(id);
        journal.hold(Arc::clone(&hold)).await.unwrap();
        journal.settle(end(&hold, 300)).await.unwrap();
    }
    let replayed = replay(&root.path().join("000000000007"));
    assert_eq!(ids(&replayed), (1..=calls).collect::<Vec<_>>(), "over several laps");
    assert_eq!(orphans(&replayed), []);
    assert!(threads.stop().is_complete());
    let mut posted: Vec<u128> = postings.iter().map(|posting| posting.settled.id).collect();
    posted.sort_unstable();
    assert_eq!(posted, (1..=calls).collect::<Vec<_>>(), "once each");
}

#[tokio::test]
async fn without_a_ring_the_thread_writes_every_record_before_it_answers() {
    let root = tempfile::tempdir().unwrap();
    let boot = root.path().join("000000000007");
    std::fs::create_dir(&boot).unwrap();
    // In its place stands something else.
    std::fs::create_dir(boot.join("ring")).unwrap();
    let (ledger, postings) = sync_channel(1 << 10);
    let (journal, threads) = Journal::start_at(NEVER, root.path(), 7, ledger).unwrap();
    let hold = open(1);
    journal.hold(Arc::clone(&hold)).await.unwrap();
    assert!(log_bytes(root.path()) > 0);
    let before = log_bytes(root.path());
    journal.settle(end(&hold, 10)).await.unwrap();
    assert!(log_bytes(root.path()) > before);
    assert!(threads.stop().is_complete());
    assert_eq!(postings.iter().count(), 1);
}

#[tokio::test]
async fn a_ring_that_the_disk_took_away_costs_no_record() {
    let root = tempfile::tempdir().unwrap();
    let (journal, threads, postings) = frozen(root.path());
    let (before, after) = (open(1), open(2));
    journal.hold(Arc::clone(&before)).await.unwrap();
    File::options().write(true).open(root.path().join("000000000007/ring")).unwrap().set_len(0).unwrap();
    journal.hold(Arc::clone(&after)).await.unwrap();
    journal.settle(end(&before, 10)).await.unwrap();
    journal.settle(end(&after, 10)).await.unwrap();
    let replayed = replay(&root.path().join("000000000007"));
    assert_eq!((ids(&replayed), orphans(&replayed)), (vec![1, 2], vec![]), "by the log alone");
    assert!(threads.stop().is_complete());
    assert_eq!(postings.iter().count(), 2);
}

#[tokio::test]
async fn a_journal_that_has_stopped_lets_nobody_in_and_keeps_the_end_of_who_was() {
    let root = tempfile::tempdir().unwrap();
    let (journal, threads, _postings) = frozen(root.path());
    let late = open(1);
    journal.hold(Arc::clone(&late)).await.unwrap();
    let stopped = threads.stop();
    assert!(!stopped.is_complete());
    assert_eq!(journal.hold(open(2)).await, Err(Unwritable));
    journal.settle(end(&late, 10)).await.unwrap();
    let replayed = replay(&root.path().join("000000000007"));
    assert_eq!((ids(&replayed), orphans(&replayed)), (vec![1], vec![]));
}

#[tokio::test]
async fn no_more_calls_are_let_in_than_the_disk_has_promised_room_for() {
    let root = tempfile::tempdir().unwrap();
    let (journal, threads, _postings) = frozen(root.path());
    // As after a look at which the disk promised nothing more.
    journal.shared.lock().room = 2;
    for id in 1..=2 {
        journal.hold(open(id)).await.unwrap();
    }
    assert_eq!((journal.shared.lock().room, log_bytes(root.path())), (0, 0));
    // The next one asks the thread, which asks the disk.
    journal.hold(open(3)).await.unwrap();
    assert!(log_bytes(root.path()) > 0);
    let until = crate::clock::now() + PATIENCE;
    while journal.shared.lock().room == 0 {
        assert!(crate::clock::now() < until, "the disk has room");
        thread::yield_now();
    }
    drop(threads.stop());
}
