//! The ledger's thread: takes settled holds from the journal and books them in batches.
//!
//! A batch is one transaction, of everything that ended within `GATHER`: a commit writes whole pages and
//! waits for the disk, however little is in it, and nobody waits for the ledger. While much ends, it gathers
//! longer; while more waits than one batch takes, not at all. One that fails is tried again and again, in halves: the journal keeps what is not booked, and admission stops
//! when too much of it waits. A process that leaves gives up after a few tries; the next start replays its
//! journal.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::port::{Ledger, LedgerError};
use crate::clock;
use crate::journal::{Journal, Posting, Settled};

/// The most that one transaction books. With four times as many the bench's 1,000 accounts fell behind (docs/performance.md).
const BATCH_MAX: usize = 4096;
/// How long a batch gathers what ends.
const GATHER: Duration = Duration::from_millis(50);
/// How long after a batch of `BUSY` or more: an end in a batch of 125 costs two thirds of one in a batch of 25.
const GATHER_BUSY: Duration = Duration::from_millis(250);
/// So many in a batch are many.
const BUSY: usize = 20;
/// Of a batch that fails no smaller parts are tried than this.
const PART_MIN: usize = 64;
/// How long to wait before a failed batch is tried again.
const RETRY: Duration = Duration::from_millis(500);
/// How often a failed batch is tried again once the process leaves.
const LAST_TRIES: u32 = 4;

/// How far the ledger is, for whoever looks.
#[derive(Debug, Default)]
pub struct Progress {
    /// When the oldest call ended that is being booked, in milliseconds since 1970; 0: none is.
    oldest_ms: AtomicI64,
    abandoned_nano: AtomicU64,
    provider_cost_nano: AtomicU64,
}

impl Progress {
    /// How long the oldest call waits that is being booked. What gathers for the next batch is younger.
    #[must_use]
    pub fn lag(&self) -> Duration {
        match self.oldest_ms.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => Duration::from_millis(u64::try_from(clock::unix_ms() - since).unwrap_or_default()),
        }
    }

    /// Nano-dollars of cost at providers: what nobody was charged for, and all.
    #[must_use]
    pub fn booked(&self) -> (u64, u64) {
        (self.abandoned_nano.load(Ordering::Relaxed), self.provider_cost_nano.load(Ordering::Relaxed))
    }

    fn begin(&self, batch: &[Settled]) {
        let oldest = batch.iter().map(|settled| settled.at_ms).min();
        self.oldest_ms.store(oldest.unwrap_or_default(), Ordering::Relaxed);
    }

    fn end(&self, batch: &[Settled]) {
        self.oldest_ms.store(0, Ordering::Relaxed);
        let sum =
            |nano: fn(&Settled) -> i64| batch.iter().filter_map(|it| u64::try_from(nano(it)).ok()).sum();
        self.abandoned_nano.fetch_add(sum(|settled| settled.abandoned), Ordering::Relaxed);
        self.provider_cost_nano.fetch_add(sum(|settled| settled.provider_cost), Ordering::Relaxed);
    }
}

/// What the thread answers when it is joined: the ledger, and whether everything was booked.
pub type Finished = (Box<dyn Ledger>, bool);

/// Books what comes in `postings` until the journal's thread has ended, and shows in `progress` how far it is. `booked`
/// is told of every batch that is in the ledger.
///
/// # Errors
/// When the thread cannot be made.
pub fn start(
    mut ledger: Box<dyn Ledger>,
    boot: i64,
    postings: Receiver<Posting>,
    journal: Journal,
    progress: Arc<Progress>,
    booked: impl Fn(&[Settled]) + Send + 'static,
) -> io::Result<JoinHandle<Finished>> {
    thread::Builder::new().name("ledger".to_owned()).spawn(move || {
        let mut all_booked = true;
        let mut gather = GATHER;
        while let Ok(first) = postings.recv() {
            let mut number = first.number;
            let mut batch: Vec<Settled> = vec![*first.settled];
            if !journal.is_stopping() {
                thread::sleep(gather);
            }
            while batch.len() < BATCH_MAX
                && let Ok(next) = postings.try_recv()
            {
                number = number.max(next.number);
                batch.push(*next.settled);
            }
            gather = gather_after(batch.len());
            progress.begin(&batch);
            let book = |part: &[Settled]| ledger.post(boot, part);
            all_booked = all_booked && post(&batch, book, || journal.is_stopping());
            if all_booked {
                progress.end(&batch);
                booked(&batch);
                journal.posted(number, u64::try_from(batch.len()).unwrap_or_default());
            }
        }
        (ledger, all_booked)
    })
}

/// How long the next batch gathers after one of so many. Behind a full one others wait already: a pause would be a bound on
/// how many calls a second the ledger can book.
const fn gather_after(count: usize) -> Duration {
    match count {
        BATCH_MAX.. => Duration::ZERO,
        BUSY.. => GATHER_BUSY,
        _ => GATHER,
    }
}

/// Books a batch, whole if that can be, else in parts: what is too much for a database at once it would refuse for ever.
/// Answers whether all is booked.
fn post(
    batch: &[Settled],
    mut book: impl FnMut(&[Settled]) -> Result<usize, LedgerError>,
    is_stopping: impl Fn() -> bool,
) -> bool {
    let (mut rest, mut at_once) = (batch, batch.len());
    let mut tries_left = LAST_TRIES;
    while !rest.is_empty() {
        let (part, later) = rest.split_at(at_once.min(rest.len()));
        match book(part) {
            Ok(_) => {
                rest = later;
                continue;
            }
            Err(error) => {
                tracing::error!(breach = "unbooked", %error, count = part.len(), "a batch could not be booked; trying again");
            }
        }
        at_once = at_once.min(part.len()).div_ceil(2).max(PART_MIN);
        if is_stopping() {
            tries_left -= 1;
        }
        if tries_left == 0 {
            return false;
        }
        thread::sleep(RETRY);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_gathers_longer_while_much_ends_and_not_at_all_while_more_waits_than_one_takes() {
        assert_eq!(gather_after(1), GATHER);
        assert_eq!(gather_after(BUSY - 1), GATHER);
        assert_eq!(gather_after(BUSY), GATHER_BUSY);
        assert_eq!(gather_after(BATCH_MAX - 1), GATHER_BUSY);
        assert_eq!(gather_after(BATCH_MAX), Duration::ZERO);
    }

    fn ended(id: u128) -> Settled {
        Settled {
            id,
            account: 1000,
            request: String::new(),
            model: String::new(),
            endpoint: String::new(),
            attempts: 1,
            parts: [0; 5],
            provider_cost: 0,
            abandoned: 0,
            key: [0; 32],
            held_ms: 0,
            price_version: 1,
            tokens: [0; 7],
            estimated: false,
            anomaly: false,
            at_ms: 0,
            pool: None,
        }
    }

    #[test]
    fn what_is_too_much_at_once_is_booked_in_parts_in_its_order_and_once() {
        let batch: Vec<Settled> = (0..1000).map(ended).collect();
        let (mut booked, mut refused) = (vec![], vec![]);
        let book = |part: &[Settled]| {
            if part.len() > 300 {
                refused.push(part.len());
                return Err(LedgerError::Unreachable("it takes too long".to_owned()));
            }
            booked.extend(part.iter().map(|settled| settled.id));
            Ok(part.len())
        };
        assert!(post(&batch, book, || false));
        assert_eq!(refused, [1000, 500]);
        assert!(booked.iter().copied().eq(0..1000));
    }

    #[test]
    fn a_process_that_leaves_gives_up_after_a_few_tries() {
        let batch = [ended(1)];
        let mut tries = 0;
        let book = |_: &[Settled]| {
            tries += 1;
            Err(LedgerError::Unreachable("away".to_owned()))
        };
        assert!(!post(&batch, book, || true));
        assert_eq!(tries, LAST_TRIES);
    }
}
