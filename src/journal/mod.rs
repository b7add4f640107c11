//! Each node's own record of holds: what was set aside, how far it got, how it ended.
//!
//! An append file per boot, written by one plain OS thread, behind a ring in a mapped file that whoever serves a call
//! writes into. What is durable when (design §5):
//!
//! - a hold's record is in the kernel before its upstream is called;
//! - a settle record is in the kernel before the caller gets the end of its answer;
//! - both for having been put into the ring (`ring`), by the thread that serves: nobody is waited for, nobody woken;
//! - every [`TICK`] the journal's thread appends what is new in the ring, and one record for every stream that moved;
//! - `fdatasync` follows each of these, in a thread of its own, and nothing waits for it.
//!
//! So `kill -9` loses at most a tick of tokens of running streams, in the callers' favour, and a power cut a tick of
//! everything. A write that fails closes admission ([`Journal::is_writable`]) until one succeeds; a failed `fdatasync`
//! closes it for good, since the kernel may have dropped the pages.
//!
//! The disk has promised room for all that may come before the thread asks it again: a full ring, as many calls more
//! as may be let in meanwhile (`writer::HOLDS_AHEAD`), and the ends of all that are open. When it promises no more,
//! admission closes, and what was let in can end. Where no ring can be had, where it is full, and for a record too
//! long for it, the thread is handed the record, writes it and answers: all the same, and slower.
//!
//! A settled record goes on to the ledger by a bounded queue. A segment is deleted when the ledger
//! has everything in it; a new one begins with the holds that are still open.

mod pages;
pub mod record;
mod replay;
mod ring;
mod writer;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_queue::SegQueue;
use filters::ids::{AccountId, HoldId};
use filters::money::Amount;
use ring::Ring;
use tokio::sync::oneshot;

pub use record::{Hold, Pool, Settled};
pub use replay::{Dead, Replayed, dead_boots};

/// How often the log takes what is new, and is synced.
pub const TICK: Duration = Duration::from_millis(20);
/// A segment's size, in bytes, at which the next one begins.
const SEGMENT_BYTES: u64 = 16 << 20;
/// The longest frame that goes into the ring, in bytes: names are at most 128 + 200 + 401 of them.
const FRAME_BYTES_MAX: usize = 1280;

/// Where a boot's journal is.
#[must_use]
pub fn folder(root: &Path, boot: i64) -> PathBuf {
    root.join(format!("{boot:012}"))
}

/// A settled hold on its way to the ledger, with its place in the journal.
#[derive(Clone, Debug)]
pub struct Posting {
    /// What to post. Boxed: the queue to the ledger has room for thousands, and makes it at once.
    pub settled: Box<Settled>,
    /// Its number in this boot's journal.
    pub number: u64,
}

/// What an open hold shares between its request, the journal's thread and a `Drop`.
#[derive(Debug)]
pub struct OpenHold {
    /// Its record.
    pub hold: Hold,
    /// Cost so far, in nano-dollars.
    progress: AtomicI64,
    /// It waits in the queue of those that moved.
    moved: AtomicBool,
}

/// Hands in records; one per process.
#[derive(Clone)]
pub struct Journal {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Holds whose progress moved since the last tick. Each stands in it at most once, so there are no more than holds.
    moved: SegQueue<Arc<OpenHold>>,
    writable: AtomicBool,
    /// Up to here the ledger has all settled records.
    posted: AtomicU64,
    /// Settled records that the ledger does not have yet.
    unposted: AtomicU64,
}

/// What the threads that serve and the journal's thread share, under one lock.
#[derive(Default)]
struct Queue {
    entries: Vec<Entry>,
    /// The frames of those entries that are in the ring, for the log.
    frames: Vec<u8>,
    /// `None`: none can be had.
    ring: Option<Ring>,
    /// Holds that may still be let in by the ring: there is room on disk for them and for their ends.
    room: usize,
    /// Of the entries those that are holds in the ring.
    let_in: usize,
    /// The journal's thread waits for the first record.
    asleep: bool,
    /// It is wanted before its tick.
    urgent: bool,
    stop: bool,
    /// It has taken its last record: no hold may come any more.
    closed: bool,
}

struct Entry {
    what: What,
    /// Who waits for it; `None`: it is in the ring.
    written: Option<oneshot::Sender<bool>>,
}

enum What {
    Hold(Arc<OpenHold>),
    Settle(Box<Settled>),
}

/// The threads behind a [`Journal`]; `main` joins them last.
pub struct Threads {
    /// Whether every hold that it wrote down has ended.
    writer: JoinHandle<bool>,
    syncer: JoinHandle<()>,
    journal: Journal,
    boot: PathBuf,
    lock: File,
}

/// The write failed; the record may be tried again or given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the journal cannot be written")]
pub struct Unwritable;

impl Journal {
    /// Starts a journal for this boot in `root/<boot>`, and its threads.
    ///
    /// # Errors
    /// When folder, lock or file cannot be made.
    pub fn start(root: &Path, boot: i64, ledger: SyncSender<Posting>) -> io::Result<(Self, Threads)> {
        Self::start_at(tick(), root, boot, ledger)
    }

    fn start_at(
        tick: Duration,
        root: &Path,
        boot: i64,
        ledger: SyncSender<Posting>,
    ) -> io::Result<(Self, Threads)> {
        let folder = folder(root, boot);
        std::fs::create_dir_all(&folder)?;
        // The folder's name must survive a power cut, or its lease would be nobody's.
        File::open(root)?.sync_all()?;
        root.parent().filter(|p| p.is_dir()).map_or(Ok(()), |parent| File::open(parent)?.sync_all())?;
        let lock = File::create(folder.join("lock"))?;
        lock.lock()?;
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wake: Condvar::new(),
            moved: SegQueue::new(),
            writable: AtomicBool::new(true),
            posted: AtomicU64::new(0),
            unposted: AtomicU64::new(0),
        });
        let (writer, syncer) = writer::start(Arc::clone(&shared), &folder, tick, ledger)?;
        let journal = Self { shared };
        Ok((journal.clone(), Threads { writer, syncer, journal, boot: folder, lock }))
    }

    /// Records a hold. Resolves when it is in the kernel.
    ///
    /// # Errors
    /// [`Unwritable`]; nothing is recorded then.
    pub async fn hold(&self, hold: Arc<OpenHold>) -> Result<(), Unwritable> {
        let refused = match self.shared.put(What::Hold(hold)) {
            Ok(()) => return Ok(()),
            Err(refused) => refused,
        };
        self.submit(refused).await
    }

    /// Records how a hold ended. Resolves when it is in the kernel.
    ///
    /// # Errors
    /// [`Unwritable`]; the record is kept and written as soon as the disk allows.
    pub async fn settle(&self, settled: Settled) -> Result<(), Unwritable> {
        self.shared.unposted.fetch_add(1, Ordering::AcqRel);
        let refused = match self.shared.put(What::Settle(Box::new(settled))) {
            Ok(()) => return Ok(()),
            Err(refused) => refused,
        };
        self.submit(refused).await
    }

    /// Records an end that nobody waits for (a dropped request).
    pub fn settle_unattended(&self, settled: Settled) {
        self.shared.unposted.fetch_add(1, Ordering::AcqRel);
        if let Err(refused) = self.shared.put(What::Settle(Box::new(settled))) {
            let (written, _) = oneshot::channel();
            if self.shared.push(refused, written) {
                self.shared.wake.notify_one();
            }
        }
    }

    /// Notes how much an open hold has cost so far. Never blocks; allocates for one in 31 of those that moved.
    pub fn progress(&self, hold: &Arc<OpenHold>, cost: Amount) {
        hold.progress.fetch_max(cost.nano(), Ordering::Relaxed);
        if !hold.moved.swap(true, Ordering::AcqRel) {
            self.shared.moved.push(Arc::clone(hold));
        }
    }

    /// Whether admission may go on.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.shared.writable.load(Ordering::Acquire)
    }

    /// Settled records that the ledger does not have yet.
    #[must_use]
    pub fn unposted(&self) -> u64 {
        self.shared.unposted.load(Ordering::Acquire)
    }

    /// Whether the process is about to leave.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.shared.lock().stop
    }

    /// The ledger has every settled record up to `number`.
    pub fn posted(&self, number: u64, count: u64) {
        self.shared.posted.fetch_max(number, Ordering::AcqRel);
        self.shared.unposted.fetch_sub(count, Ordering::AcqRel);
    }

    /// Hands a record to the journal's thread and waits until it is written.
    async fn submit(&self, what: What) -> Result<(), Unwritable> {
        let (written, done) = oneshot::channel();
        if self.shared.push(what, written) {
            let wake = Wake(&self.shared);
            // Whoever is ready to run now may have a record too: one switch of threads and one write for all.
            tokio::task::yield_now().await;
            drop(wake);
        }
        if done.await.unwrap_or(false) { Ok(()) } else { Err(Unwritable) }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a record into the ring, or gives it back: the ring is full, there is none, or none may come that way.
    fn put(&self, what: What) -> Result<(), What> {
        let mut room = [0; FRAME_BYTES_MAX];
        let frame = match &what {
            What::Hold(hold) => hold.hold.lent().frame(&mut room),
            What::Settle(settled) => settled.lent().frame(&mut room),
        };
        let Ok(frame) = frame else { return Err(what) };
        let is_hold = matches!(what, What::Hold(_));
        let mut queue = self.lock();
        if !queue.put(frame, is_hold) {
            return Err(what);
        }
        queue.entries.push(Entry { what, written: None });
        let wakes = queue.wakes();
        drop(queue);
        if wakes {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Queues a record for the journal's thread. Whether whoever queued it has to wake that.
    fn push(&self, what: What, written: oneshot::Sender<bool>) -> bool {
        let mut queue = self.lock();
        if queue.closed && matches!(what, What::Hold(_)) {
            // The sender is dropped: nothing is written any more.
            return false;
        }
        queue.entries.push(Entry { what, written: Some(written) });
        !std::mem::replace(&mut queue.urgent, true)
    }
}

impl Queue {
    fn put(&mut self, frame: &[u8], is_hold: bool) -> bool {
        if is_hold && (self.closed || self.room == 0) {
            return false;
        }
        let Some(ring) = &mut self.ring else { return false };
        // The last quarter is for ends.
        let spare = if is_hold { ring.bytes() / 4 } else { 0 };
        if !ring.put(frame, spare) {
            return false;
        }
        self.frames.extend_from_slice(frame);
        if is_hold {
            self.room -= 1;
            self.let_in += 1;
        }
        true
    }

    /// Whether the journal's thread has to be woken now: it sleeps, or its tick could come too late.
    fn wakes(&mut self) -> bool {
        let is_half_full = self.ring.as_ref().is_some_and(|ring| ring.used() > ring.bytes() / 2);
        let urgent = is_half_full || self.let_in > writer::HOLDS_AHEAD / 2;
        let first = std::mem::take(&mut self.asleep);
        first || urgent && !std::mem::replace(&mut self.urgent, true)
    }
}

/// How often the log takes what is new. A test may have it wait, to see what the ring alone is worth.
fn tick() -> Duration {
    let asked =
        if cfg!(debug_assertions) { std::env::var("TOLLGATE_TEST_JOURNAL_TICK_MS").ok() } else { None };
    asked.and_then(|ms| ms.parse().ok()).map_or(TICK, Duration::from_millis)
}

/// Wakes the writer when it is dropped, so also when the request that has to wake it is.
struct Wake<'a>(&'a Shared);

impl Drop for Wake<'_> {
    fn drop(&mut self) {
        self.0.wake.notify_one();
    }
}

impl OpenHold {
    /// A hold that has cost nothing yet.
    #[must_use]
    pub fn new(hold: Hold) -> Self {
        Self { hold, progress: AtomicI64::new(0), moved: AtomicBool::new(false) }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> HoldId {
        HoldId(self.hold.id)
    }

    /// Whose money it is.
    #[must_use]
    pub fn account(&self) -> AccountId {
        AccountId(self.hold.account)
    }

    /// What is set aside.
    #[must_use]
    pub fn amount(&self) -> Amount {
        Amount::from_nano(self.hold.amount)
    }

    /// What it has cost so far.
    #[must_use]
    pub fn cost_so_far(&self) -> Amount {
        Amount::from_nano(self.progress.load(Ordering::Relaxed))
    }
}

impl Threads {
    /// Writes what is queued, syncs, and ends the threads. The boot's folder stays until
    /// [`Stopped::forget`]: the ledger may not have everything yet.
    #[must_use]
    pub fn stop(self) -> Stopped {
        self.journal.shared.lock().stop = true;
        self.journal.shared.wake.notify_one();
        let none_open = self.writer.join().unwrap_or(false);
        let synced = self.syncer.join().is_ok();
        Stopped {
            boot: self.boot,
            _lock: self.lock,
            complete: none_open && synced && self.journal.is_writable(),
        }
    }
}

/// A journal whose threads have ended.
pub struct Stopped {
    boot: PathBuf,
    _lock: File,
    complete: bool,
}

impl Stopped {
    /// Whether every hold has ended and every record is on disk.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Deletes the boot's folder; only once the ledger has everything and the boot has ended there.
    pub fn forget(self) {
        if let Err(error) = std::fs::remove_dir_all(&self.boot) {
            tracing::warn!(%error, folder = %self.boot.display(), "cannot delete a finished journal");
        }
    }
}
