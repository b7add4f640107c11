//! The journal's two threads: one appends, one syncs.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::record::{Record, encode};
use super::{Entry, OpenHold, Posting, SEGMENT_BYTES, Shared, TICK, What};

/// How long to wait before a failed write is tried again.
const RETRY: Duration = Duration::from_millis(100);
/// A page: what is written to see whether the disk is well has to need room.
const PROBE_BYTES: usize = 4096;
/// Room on disk that every open hold has for its end, in bytes: names are at most 128 + 200 + 401 of them.
const END_BYTES: u64 = 1280;
/// The least that is reserved at a time, in bytes.
const RESERVE_BYTES: u64 = 16 << 10;
/// Of one progress record, at most.
const PROGRESS_BYTES: u64 = 48;
/// After a segment could not be begun, the old one grows by so much before the next try.
const ROTATE_AGAIN_BYTES: u64 = 1 << 20;
/// How often a process that leaves tries to write what the disk refuses.
const LAST_TRIES: u32 = 20;

pub(super) fn start(
    shared: Arc<Shared>,
    folder: &Path,
    ledger: SyncSender<Posting>,
) -> io::Result<(JoinHandle<bool>, JoinHandle<()>)> {
    let sync = Arc::new(Syncer::default());
    let segment = Segment::create(folder, 1)?;
    let mut writer = Writer {
        shared: Arc::clone(&shared),
        folder: folder.to_owned(),
        segment,
        finished: vec![],
        open: HashMap::new(),
        ledger,
        backlog: vec![],
        unwritten: vec![],
        number: 0,
        rotate_at: SEGMENT_BYTES,
        sync: Arc::clone(&sync),
        buffer: Vec::with_capacity(64 << 10),
    };
    let syncer = thread::Builder::new().name("journal-sync".to_owned()).spawn(move || sync.run(&shared))?;
    let writer = thread::Builder::new().name("journal".to_owned()).spawn(move || writer.run())?;
    Ok((writer, syncer))
}

struct Segment {
    file: File,
    path: PathBuf,
    length: u64,
    /// Up to here the disk has promised room.
    reserved: u64,
    index: u64,
}

impl Segment {
    fn create(folder: &Path, index: u64) -> io::Result<Self> {
        let path = folder.join(format!("{index:08}.log"));
        let file = OpenOptions::new().create_new(true).write(true).open(&path)?;
        // The name itself must survive a power cut.
        File::open(folder)?.sync_all()?;
        Ok(Self { file, path, length: 0, reserved: 0, index })
    }

    /// Has the disk promise room for `bytes` more, so that what is let in can also end. Where the file
    /// system knows no promises, the write itself has to find out.
    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        let end = self.length.saturating_add(bytes);
        if end <= self.reserved {
            return Ok(());
        }
        let from = self.reserved.max(self.length);
        let more =
            |bytes| fallocate(&self.file, FallocateFlags::KEEP_SIZE, from, bytes).map(|()| from + bytes);
        let enough = more((end - from).max(RESERVE_BYTES)).or_else(|_| more(end - from));
        self.reserved = match enough {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => u64::MAX,
            other => other?,
        };
        Ok(())
    }

    /// Appends all of `bytes` or nothing: after a short write the file is cut back, so that no
    /// broken record stands in the middle.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.file.write_all(bytes) {
            Ok(()) => {
                self.length += u64::try_from(bytes.len()).unwrap_or_default();
                Ok(())
            }
            Err(error) => {
                // What was promised behind the end is given up by this.
                self.reserved = self.length;
                self.file.set_len(self.length)?;
                self.file.seek(SeekFrom::Start(self.length))?;
                Err(error)
            }
        }
    }
}

struct Writer {
    shared: Arc<Shared>,
    folder: PathBuf,
    segment: Segment,
    /// Earlier segments, each with the number of the last settled record in it.
    finished: Vec<(PathBuf, u64)>,
    open: HashMap<u128, Arc<OpenHold>>,
    ledger: SyncSender<Posting>,
    /// Settled and written, but the ledger's queue was full.
    backlog: Vec<Posting>,
    /// Settled, but the disk would not take it.
    unwritten: Vec<Posting>,
    number: u64,
    /// The segment's length at which the next one begins.
    rotate_at: u64,
    sync: Arc<Syncer>,
    buffer: Vec<u8>,
}

/// What came at once, sorted by what becomes of it on a disk that is full.
#[derive(Default)]
struct Batch {
    holds: Vec<Arc<OpenHold>>,
    hold_bytes: Vec<u8>,
    hold_waiters: Vec<oneshot::Sender<bool>>,
    settled: Vec<Posting>,
    settle_waiters: Vec<oneshot::Sender<bool>>,
}

impl Writer {
    /// Writes until it is told to stop; answers whether every hold has ended.
    fn run(&mut self) -> bool {
        let mut tries_left = LAST_TRIES;
        loop {
            let (entries, stop) = self.wait();
            if stop && !self.unwritten.is_empty() {
                tries_left -= 1;
                thread::sleep(RETRY);
            }
            self.write(entries);
            self.hand_on();
            self.delete_posted();
            if self.segment.length > self.rotate_at {
                self.rotate();
            }
            if stop && tries_left == 0 {
                tracing::error!(
                    breach = "charges_lost",
                    lost = self.unwritten.len(),
                    "charges are lost: the disk takes no records; their holds end at their last progress"
                );
                self.shared.writable.store(false, Ordering::Release);
                break;
            }
            if stop && self.backlog.is_empty() && self.unwritten.is_empty() {
                break;
            }
        }
        self.sync.stop();
        self.open.is_empty()
    }

    /// Waits for entries; for a tick at most while something is open.
    fn wait(&self) -> (Vec<Entry>, bool) {
        let queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = !(self.open.is_empty() && self.backlog.is_empty() && self.finished.is_empty());
        let patience = match (self.shared.writable.load(Ordering::Acquire), busy) {
            (false, _) => RETRY,
            (true, true) => TICK,
            (true, false) => Duration::from_secs(3600),
        };
        let (mut queue, _) = self
            .shared
            .wake
            .wait_timeout_while(queue, patience, |q| q.entries.is_empty() && !q.stop)
            .unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut queue.entries), queue.stop)
    }

    fn write(&mut self, entries: Vec<Entry>) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let mut batch = self.sort(entries, &mut buffer);
        let room = self.reserve(&batch, buffer.len());
        if room.is_ok() {
            buffer.extend_from_slice(&batch.hold_bytes);
            self.put_progress(&mut buffer);
        } else {
            // The room that is left belongs to the ends of what was let in.
            batch.holds.clear();
            refuse(std::mem::take(&mut batch.hold_waiters));
        }
        let closed = !self.shared.writable.load(Ordering::Acquire) && !self.sync.has_failed();
        if buffer.is_empty() && closed && room.is_ok() {
            // Nobody is admitted who could show that the disk is well again.
            while buffer.len() < PROBE_BYTES {
                put(&Record::Probe, &mut buffer);
            }
        }
        let tried = !buffer.is_empty();
        let result = if buffer.is_empty() { Ok(()) } else { self.segment.append(&buffer) };
        self.buffer = buffer;
        self.conclude(result.map(|()| tried), room, batch);
    }

    /// Puts the ends into `buffer`, those first that the disk has refused before.
    fn sort(&mut self, entries: Vec<Entry>, buffer: &mut Vec<u8>) -> Batch {
        let mut batch = Batch { settled: std::mem::take(&mut self.unwritten), ..Batch::default() };
        for posting in &batch.settled {
            put(&Record::of_settled((*posting.settled).clone()), buffer);
        }
        for entry in entries {
            match entry.what {
                What::Hold(hold) => {
                    put(&Record::of_hold(hold.hold.clone()), &mut batch.hold_bytes);
                    batch.holds.push(hold);
                    batch.hold_waiters.push(entry.written);
                }
                What::Settle(record) => {
                    self.number += 1;
                    self.shared.unposted.fetch_add(1, Ordering::AcqRel);
                    put(&Record::of_settled((*record).clone()), buffer);
                    batch.settled.push(Posting { settled: record, number: self.number });
                    batch.settle_waiters.push(entry.written);
                }
            }
        }
        batch
    }

    /// Room for what is written now, for the ends of all that is open then, and for one call more.
    fn reserve(&mut self, batch: &Batch, ends: usize) -> io::Result<()> {
        let bytes = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let open = bytes(self.open.len() + batch.holds.len() + 1);
        let now = bytes(ends + batch.hold_bytes.len() + PROBE_BYTES);
        let progress = bytes(self.shared.moved.len()).saturating_mul(PROGRESS_BYTES);
        // What is left of the last promise must not open a door that the next call would close again.
        let again = if self.shared.writable.load(Ordering::Acquire) { 0 } else { RESERVE_BYTES };
        let now = now.saturating_add(again);
        self.segment.reserve(now.saturating_add(progress).saturating_add(open.saturating_mul(END_BYTES)))
    }

    fn put_progress(&self, buffer: &mut Vec<u8>) {
        // As many as stand there now: a stream that moves all the time must not hold us here.
        for _ in 0..self.shared.moved.len() {
            let Some(hold) = self.shared.moved.pop() else { break };
            hold.moved.store(false, Ordering::Release);
            if self.open.contains_key(&hold.hold.id) {
                put(&Record::Progress { id: hold.hold.id, cost: hold.cost_so_far().nano() }, buffer);
            }
        }
    }

    fn conclude(&mut self, result: io::Result<bool>, room: io::Result<()>, batch: Batch) {
        let Batch { holds, hold_waiters, settled, settle_waiters, .. } = batch;
        let written = result.is_ok();
        if let Ok(tried) = result {
            self.open.extend(holds.into_iter().map(|hold| (hold.hold.id, hold)));
            for posting in &settled {
                self.open.remove(&posting.settled.id);
            }
            self.backlog.extend(settled);
            if tried {
                self.sync.dirty(&self.segment.file);
            }
        } else {
            self.unwritten = settled;
        }
        match result.and_then(|tried| room.map(|()| tried)) {
            Ok(true) if !self.sync.has_failed() => {
                if !self.shared.writable.swap(true, Ordering::AcqRel) {
                    tracing::info!("the journal can be written again");
                }
            }
            Ok(_) => {}
            Err(error) => {
                if self.shared.writable.swap(false, Ordering::AcqRel) {
                    tracing::error!(breach = "journal", %error, "the journal cannot be written: no call is admitted until it can");
                }
            }
        }
        for waiter in hold_waiters.into_iter().chain(settle_waiters) {
            // Whoever waited may be gone.
            let _gone = waiter.send(written);
        }
    }

    /// Passes written postings on, as far as the ledger's queue has room.
    fn hand_on(&mut self) {
        let mut rest = std::mem::take(&mut self.backlog).into_iter();
        for posting in rest.by_ref() {
            match self.ledger.try_send(posting) {
                Ok(()) => {}
                Err(TrySendError::Full(posting)) => {
                    self.backlog.push(posting);
                    break;
                }
                // The ledger's thread has ended: the next start replays this journal.
                Err(TrySendError::Disconnected(_)) => return,
            }
        }
        self.backlog.extend(rest);
    }

    fn delete_posted(&mut self) {
        let posted = self.shared.posted.load(Ordering::Acquire);
        self.finished.retain(|(path, last)| {
            let done = *last <= posted;
            if done && let Err(error) = std::fs::remove_file(path) {
                tracing::warn!(%error, path = %path.display(), "cannot delete a finished journal segment");
            }
            !done
        });
    }

    /// Begins a segment with the holds that are open, so that earlier ones can go.
    fn rotate(&mut self) {
        // Replay forgives a torn end only in the last segment: this one is whole before there is a next.
        if let Err(error) = self.segment.file.sync_data() {
            self.sync.give_up(&self.shared, &error);
            return;
        }
        let next = Segment::create(&self.folder, self.segment.index + 1);
        let mut next = match next {
            Ok(next) => next,
            Err(error) => {
                tracing::error!(%error, "cannot begin a journal segment; the old one goes on");
                self.rotate_at = self.segment.length + ROTATE_AGAIN_BYTES;
                return;
            }
        };
        let mut buffer = vec![];
        for hold in self.open.values() {
            put(&Record::of_hold(hold.hold.clone()), &mut buffer);
            put(&Record::Progress { id: hold.hold.id, cost: hold.cost_so_far().nano() }, &mut buffer);
        }
        let ends = END_BYTES.saturating_mul(u64::try_from(self.open.len() + 1).unwrap_or(u64::MAX));
        let room = next.reserve(ends.saturating_add(u64::try_from(buffer.len()).unwrap_or(u64::MAX)));
        let begun = room.and_then(|()| next.append(&buffer)).and_then(|()| next.file.sync_data());
        if let Err(error) = begun {
            tracing::error!(%error, "cannot begin a journal segment; the old one goes on");
            self.rotate_at = self.segment.length + ROTATE_AGAIN_BYTES;
            let _removed = std::fs::remove_file(&next.path);
            return;
        }
        self.rotate_at = SEGMENT_BYTES;
        self.sync.dirty(&next.file);
        let old = std::mem::replace(&mut self.segment, next);
        self.finished.push((old.path, self.number));
    }
}

fn refuse(waiters: Vec<oneshot::Sender<bool>>) {
    for waiter in waiters {
        // Whoever waited may be gone.
        let _gone = waiter.send(false);
    }
}

fn put(record: &Record, buffer: &mut Vec<u8>) {
    if encode(record, buffer).is_err() {
        tracing::error!(breach = "charges_lost", ?record, "a journal record is too long and was left out");
    }
}

/// What the sync thread is told.
#[derive(Default)]
struct Syncer {
    state: Mutex<SyncerState>,
    wake: Condvar,
}

#[derive(Default)]
struct SyncerState {
    dirty: Option<File>,
    stop: bool,
    failed: bool,
}

impl Syncer {
    fn dirty(&self, file: &File) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.dirty.is_none() {
            state.dirty = file.try_clone().ok();
            drop(state);
            self.wake.notify_one();
        }
    }

    fn stop(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).stop = true;
        self.wake.notify_one();
    }

    fn has_failed(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failed
    }

    /// The kernel may have dropped pages, and says so only once.
    fn give_up(&self, shared: &Shared, error: &io::Error) {
        tracing::error!(breach = "journal", %error, "fdatasync of the journal failed: no further call is admitted; restart on a sound disk");
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failed = true;
        shared.writable.store(false, Ordering::Release);
    }

    fn run(&self, shared: &Shared) {
        loop {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self
                .wake
                .wait_while(state, |s| s.dirty.is_none() && !s.stop)
                .unwrap_or_else(PoisonError::into_inner);
            let Some(file) = state.dirty.take() else { return };
            drop(state);
            if let Err(error) = file.sync_data() {
                self.give_up(shared, &error);
            }
            thread::sleep(TICK);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, sync_channel};

    use super::super::replay::dead_boots;
    use super::super::{Hold, Journal, Replayed, Settled};
    use super::*;

    /// How long anything may take before a test gives up on it.
    const PATIENCE: Duration = Duration::from_secs(20);
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
        for name in segments(boot) {
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
        let (journal, threads) = Journal::start(root.path(), 7, 1_000, ledger).unwrap();
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
        let (journal, threads) = Journal::start(root.path(), 7, 1_000, ledger).unwrap();
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
}
