//! The ledger's thread: takes settled holds from the journal and books them in batches.
//!
//! A batch is one transaction, of everything that ended within `GATHER`: a commit writes whole pages and
//! waits for the disk, however little is in it, and nobody waits for the ledger. While much ends, it gathers
//! longer; while more waits than one batch takes, not at all. One that fails is tried again and again: the journal keeps what is not booked, and admission stops
//! when too much of it waits. A process that leaves gives up after a few tries; the next start replays its
//! journal.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::port::Ledger;
use crate::clock;
use crate::journal::{Journal, Posting, Settled};

/// The most that one transaction books.
const BATCH_MAX: usize = 16_384;
/// How long a batch gathers what ends.
const GATHER: Duration = Duration::from_millis(50);
/// How long after a batch of `BUSY` or more: an end in a batch of 125 costs two thirds of one in a batch of 25.
const GATHER_BUSY: Duration = Duration::from_millis(250);
/// So many in a batch are many.
const BUSY: usize = 20;
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
            all_booked = all_booked && post(ledger.as_mut(), boot, &batch, &journal);
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

fn post(ledger: &mut dyn Ledger, boot: i64, batch: &[Settled], journal: &Journal) -> bool {
    let mut tries_left = LAST_TRIES;
    loop {
        match ledger.post(boot, batch) {
            Ok(_) => return true,
            Err(error) => {
                tracing::error!(breach = "unbooked", %error, count = batch.len(), "a batch could not be booked; trying again");
            }
        }
        if journal.is_stopping() {
            tries_left -= 1;
        }
        if tries_left == 0 {
            return false;
        }
        thread::sleep(RETRY);
    }
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
}
