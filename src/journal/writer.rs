//! The journal's two threads: one appends, one syncs.
//!
//! At most a tick lies between a record in the ring and the write that takes it along, and the sync follows at once.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use filters::ids::HoldId;
use foldhash::fast::RandomState;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::pages::{DATA_BYTES, Touch};
use super::record::{BadFrame, Record, encode};
use super::ring::{PAGES as RING_PAGES, Ring};
use super::{Entry, FRAME_BYTES_MAX, OpenHold, Posting, Queue, SEGMENT_BYTES, Settled, Shared, TICK, What};

/// How long to wait before a failed write is tried again.
const RETRY: Duration = Duration::from_millis(100);
/// A page: what is written to see whether the disk is well has to need room.
const PROBE_BYTES: usize = 4096;
/// Room on disk that every open hold has for its end, in bytes.
const END_BYTES: u64 = FRAME_BYTES_MAX as u64;
/// Calls that may be let in by the ring before the disk is asked for more room: 650 KB of it. A tick of 20,000 a second.
pub(super) const HOLDS_AHEAD: usize = 512;
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
    tick: Duration,
    ledger: SyncSender<Posting>,
) -> io::Result<(JoinHandle<bool>, JoinHandle<()>)> {
    let sync = Arc::new(Syncer::default());
    let segment = Segment::create(folder, 1)?;
    let touch = match Ring::create(folder) {
        Ok((ring, touch)) => {
            shared.lock().ring = Some(ring);
            Some(touch)
        }
        Err(error) => {
            tracing::warn!(%error, "the journal has no ring: every call waits for its thread, twice");
            None
        }
    };
    let mut writer = Writer {
        shared: Arc::clone(&shared),
        folder: folder.to_owned(),
        tick,
        touch,
        segment,
        finished: vec![],
        open: HashMap::default(),
        ledger,
        backlog: vec![],
        unwritten: Unwritten::default(),
        number: 0,
        drained: 0,
        rotate_at: SEGMENT_BYTES,
        sync: Arc::clone(&sync),
        buffer: vec![],
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
    tick: Duration,
    /// `None`: there is no ring.
    touch: Option<Touch>,
    segment: Segment,
    /// Earlier segments, each with the number of the last settled record in it.
    finished: Vec<(PathBuf, u64)>,
    open: HashMap<u128, Arc<OpenHold>, RandomState>,
    ledger: SyncSender<Posting>,
    /// Settled and written, but the ledger's queue was full.
    backlog: Vec<Posting>,
    unwritten: Unwritten,
    /// Settled records that are written.
    number: u64,
    /// The place in the ring up to which the log has it.
    drained: u64,
    /// The segment's length at which the next one begins.
    rotate_at: u64,
    sync: Arc<Syncer>,
    buffer: Vec<u8>,
}

/// What the disk would not take, and nobody was told that it did not: it is in the ring, or it is an end.
#[derive(Default)]
struct Unwritten {
    holds: Vec<Arc<OpenHold>>,
    #[expect(clippy::vec_box, reason = "they come boxed, and go on boxed to the ledger")]
    settled: Vec<Box<Settled>>,
}

/// What was there at one look.
struct Taken {
    entries: Vec<Entry>,
    /// How far the ring goes.
    upto: u64,
    stop: bool,
}

/// What came at once, sorted by what becomes of it on a disk that is full.
#[derive(Default)]
struct Batch {
    /// They are in the ring, and their upstreams may be called already.
    let_in: Vec<Arc<OpenHold>>,
    holds: Vec<Arc<OpenHold>>,
    hold_bytes: Vec<u8>,
    hold_waiters: Vec<oneshot::Sender<bool>>,
    #[expect(clippy::vec_box, reason = "they come boxed, and go on boxed to the ledger")]
    settled: Vec<Box<Settled>>,
    settle_waiters: Vec<oneshot::Sender<bool>>,
    upto: u64,
}

impl Writer {
    /// Writes until it is told to stop; answers whether every hold has ended.
    fn run(&mut self) -> bool {
        let mut tries_left = LAST_TRIES;
        // Nothing is there yet: it has the disk promise room for the first calls.
        let mut taken = Taken { entries: vec![], upto: 0, stop: false };
        loop {
            let stop = taken.stop;
            if stop && !self.unwritten.is_empty() {
                tries_left -= 1;
                thread::sleep(RETRY);
            }
            self.write(taken);
            self.hand_on();
            self.delete_posted();
            if self.segment.length > self.rotate_at {
                self.rotate();
            }
            if stop && tries_left == 0 {
                tracing::error!(
                    breach = "charges_lost",
                    lost = self.unwritten.settled.len(),
                    "charges are lost: the disk takes no records; their holds end at their last progress"
                );
                self.shared.writable.store(false, Ordering::Release);
                break;
            }
            taken = self.wait();
            if taken.stop && taken.entries.is_empty() && self.backlog.is_empty() && self.unwritten.is_empty()
            {
                break;
            }
        }
        self.sync.stop();
        self.open.is_empty() && self.unwritten.is_empty()
    }

    /// Waits for the next tick, or until it is wanted earlier. While there is nothing to do, for the first record.
    fn wait(&mut self) -> Taken {
        self.touch();
        let mut queue = self.shared.lock();
        let busy = !(self.open.is_empty() && self.backlog.is_empty() && self.finished.is_empty());
        let writable = self.shared.writable.load(Ordering::Acquire);
        if writable && !busy && queue.entries.is_empty() && !queue.stop {
            queue.asleep = true;
            let wake = &self.shared.wake;
            let nothing = |q: &mut Queue| q.entries.is_empty() && !q.stop;
            queue = wake.wait_while(queue, nothing).unwrap_or_else(PoisonError::into_inner);
            queue.asleep = false;
            drop(queue);
            self.touch();
            queue = self.shared.lock();
        }
        let patience = if writable { self.tick } else { RETRY };
        let (mut queue, _) = self
            .shared
            .wake
            .wait_timeout_while(queue, patience, |q| !q.urgent && !q.stop)
            .unwrap_or_else(PoisonError::into_inner);
        self.buffer.clear();
        std::mem::swap(&mut self.buffer, &mut queue.frames);
        queue.let_in = 0;
        queue.urgent = false;
        let entries = std::mem::take(&mut queue.entries);
        queue.closed = queue.closed || queue.stop && entries.is_empty();
        let upto = queue.ring.as_ref().map_or(0, Ring::head);
        Taken { entries, upto, stop: queue.stop }
    }

    fn touch(&self) {
        if let Some(touch) = &self.touch {
            touch.all();
        }
    }

    /// Writes what was taken; the frames of what is in the ring stand in `self.buffer`.
    fn write(&mut self, taken: Taken) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut batch = self.sort(taken, &mut buffer);
        if batch.upto > self.drained {
            put(&Record::Drained { upto: batch.upto }, &mut buffer);
        }
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

    /// Puts the ends that are not in the ring into `buffer`, and what the disk has refused before.
    fn sort(&mut self, taken: Taken, buffer: &mut Vec<u8>) -> Batch {
        let Unwritten { holds, settled } = std::mem::take(&mut self.unwritten);
        for hold in &holds {
            said(hold.id(), hold.hold.lent().encode(buffer));
        }
        for settled in &settled {
            said(HoldId(settled.id), settled.lent().encode(buffer));
        }
        let mut batch = Batch { let_in: holds, settled, upto: taken.upto, ..Batch::default() };
        for Entry { what, written } in taken.entries {
            if let What::Settle(settled) = &what {
                self.open.remove(&settled.id);
            }
            match (what, written) {
                (What::Hold(hold), None) => {
                    self.open.insert(hold.hold.id, Arc::clone(&hold));
                    batch.let_in.push(hold);
                }
                (What::Hold(hold), Some(written)) => {
                    said(hold.id(), hold.hold.lent().encode(&mut batch.hold_bytes));
                    batch.holds.push(hold);
                    batch.hold_waiters.push(written);
                }
                (What::Settle(settled), None) => batch.settled.push(settled),
                (What::Settle(settled), Some(written)) => {
                    said(HoldId(settled.id), settled.lent().encode(buffer));
                    batch.settled.push(settled);
                    batch.settle_waiters.push(written);
                }
            }
        }
        batch
    }

    /// Room for what is written now, for the ends of all that is open then, and for what may come before the disk is
    /// asked again: a full ring, and so many calls.
    fn reserve(&mut self, batch: &Batch, now: usize) -> io::Result<()> {
        let open = self.open.len() + batch.holds.len();
        let progress = bytes(self.shared.moved.len()).saturating_mul(PROGRESS_BYTES);
        // What is left of the last promise must not open a door that the next call would close again.
        let again = if self.shared.writable.load(Ordering::Acquire) { 0 } else { RESERVE_BYTES };
        let now = bytes(now + batch.hold_bytes.len() + PROBE_BYTES).saturating_add(again);
        self.segment.reserve(now.saturating_add(progress).saturating_add(self.ahead(open)))
    }

    /// Room for what may come while so many holds are open.
    fn ahead(&self, open: usize) -> u64 {
        let (ring, calls) = match self.touch {
            Some(_) => (bytes(RING_PAGES * DATA_BYTES), HOLDS_AHEAD),
            None => (0, 1),
        };
        bytes(open + calls).saturating_mul(END_BYTES).saturating_add(ring)
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
        let Batch { let_in, holds, hold_waiters, settled, settle_waiters, upto, .. } = batch;
        let written = result.is_ok();
        if let Ok(tried) = result {
            self.open.extend(holds.into_iter().map(|hold| (hold.hold.id, hold)));
            for settled in settled {
                // It may have come with its hold: of a request that was dropped while that was written.
                self.open.remove(&settled.id);
                self.number += 1;
                self.backlog.push(Posting { settled, number: self.number });
            }
            self.drained = upto;
            if tried {
                self.sync.dirty(&self.segment.file);
            }
        } else {
            self.unwritten = Unwritten { holds: let_in, settled };
        }
        self.make_room(written && room.is_ok());
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

    /// Frees what the log has of the ring, and says how many calls may come by it: none where the disk promises none.
    fn make_room(&self, promised: bool) {
        let promised = promised && !self.sync.has_failed();
        let mut queue = self.shared.lock();
        queue.room = if promised { HOLDS_AHEAD.saturating_sub(queue.let_in) } else { 0 };
        if let Some(ring) = &mut queue.ring {
            ring.free(self.drained);
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
        put(&Record::Drained { upto: self.drained }, &mut buffer);
        for hold in self.open.values() {
            said(hold.id(), hold.hold.lent().encode(&mut buffer));
            put(&Record::Progress { id: hold.hold.id, cost: hold.cost_so_far().nano() }, &mut buffer);
        }
        let room = next.reserve(self.ahead(self.open.len()).saturating_add(bytes(buffer.len())));
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
        // The room that it was promised and did not need is free again, at the latest when it goes.
        let _later = old.file.set_len(old.length);
        self.finished.push((old.path, self.number));
    }
}

fn refuse(waiters: Vec<oneshot::Sender<bool>>) {
    for waiter in waiters {
        // Whoever waited may be gone.
        let _gone = waiter.send(false);
    }
}

/// One of the few that are never too long.
fn put(record: &Record, buffer: &mut Vec<u8>) {
    debug_assert!(!matches!(record, Record::Hold(_) | Record::Settled(_)));
    said(HoldId(0), encode(record, buffer));
}

/// A record too long to be read again is left out, and somebody should know of it.
fn said(hold: HoldId, encoded: Result<(), BadFrame>) {
    if encoded.is_err() {
        tracing::error!(breach = "charges_lost", %hold, "a journal record is too long and was left out");
    }
}

fn bytes(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

impl Unwritten {
    fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.settled.is_empty()
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
            // Records wait for a tick at most: a sync that is due with the next write must not be late for it.
            thread::sleep(TICK / 2);
        }
    }
}

#[cfg(test)]
mod tests;
