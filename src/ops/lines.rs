//! Lines on their way to standard error.
//!
//! Every call writes one or more. Written one by one, each would be a system call on a thread that serves. So
//! they gather in memory, and a thread of its own writes them together, [`GATHER`] later at the most; a
//! process that is killed takes the last of them along.
//!
//! - A warning or an error is written at once, with all that stands before it: what breaks a process is
//!   seen.
//! - At [`BYTES_MAX`] whoever has a line writes it as if there were no thread. No line is ever left out: a
//!   reader that does not read holds its writers up, as it always did.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// How long lines gather.
const GATHER: Duration = Duration::from_millis(5);
/// How much of them gathers at most, in bytes.
const BYTES_MAX: usize = 1 << 20;

/// Where all lines go.
#[derive(Clone)]
pub(super) struct Lines(Arc<Shared>);

struct Shared {
    gathered: Mutex<Gathered>,
    wake: Condvar,
    /// Held while lines are written, so that they keep their order. With a buffer to take turns with.
    out: Mutex<(Box<dyn Write + Send>, Vec<u8>)>,
}

#[derive(Default)]
struct Gathered {
    bytes: Vec<u8>,
    stop: bool,
}

/// Writes one event.
pub(super) struct Line<'a> {
    lines: &'a Lines,
    at_once: bool,
}

/// Keeps the thread; what has gathered is written when it is dropped.
#[must_use]
pub struct Writing {
    lines: Lines,
    thread: Option<JoinHandle<()>>,
}

impl Lines {
    /// Begins to write to `out`. Without a thread to be had, lines are written one by one.
    pub(super) fn start(out: impl Write + Send + 'static) -> (Self, Writing) {
        let out: Box<dyn Write + Send> = Box::new(out);
        let shared =
            Shared { gathered: Mutex::default(), wake: Condvar::new(), out: Mutex::new((out, vec![])) };
        let lines = Self(Arc::new(shared));
        let thread = {
            let lines = lines.clone();
            thread::Builder::new().name("lines".to_owned()).spawn(move || lines.run()).ok()
        };
        lines.gathered().stop = thread.is_none();
        (lines.clone(), Writing { lines, thread })
    }

    fn run(&self) {
        loop {
            let idle = |gathered: &mut Gathered| gathered.bytes.is_empty() && !gathered.stop;
            let gathered =
                self.0.wake.wait_while(self.gathered(), idle).unwrap_or_else(PoisonError::into_inner);
            let stop = gathered.stop;
            drop(gathered);
            if stop {
                return self.write();
            }
            thread::sleep(GATHER);
            self.write();
        }
    }

    fn gathered(&self) -> MutexGuard<'_, Gathered> {
        self.0.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what has gathered.
    fn write(&self) {
        let mut out = self.0.out.lock().unwrap_or_else(PoisonError::into_inner);
        let (out, turn) = &mut *out;
        std::mem::swap(&mut self.gathered().bytes, turn);
        // Nobody is left to be told that nobody can be told.
        let _unwritable = out.write_all(turn);
        turn.clear();
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { lines: self, at_once: true }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Line<'a> {
        Line { lines: self, at_once: *event.level() <= Level::WARN }
    }
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut gathered = self.lines.gathered();
        let is_first = gathered.bytes.is_empty();
        gathered.bytes.extend_from_slice(bytes);
        let at_once = self.at_once || gathered.stop || gathered.bytes.len() > BYTES_MAX;
        drop(gathered);
        if at_once {
            self.lines.write();
        } else if is_first {
            self.lines.0.wake.notify_one();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.lines.gathered().stop = true;
        self.lines.0.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // It does not panic; whatever it left is written by those who have a line.
            let _ended = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    use tracing::subscriber::with_default;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Shows each write.
    struct Shown(SyncSender<String>);

    impl Write for Shown {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(String::from_utf8_lossy(bytes).into_owned()).unwrap();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logging(lines: Lines, log: impl FnOnce()) {
        let subscriber =
            tracing_subscriber::fmt().with_writer(lines).without_time().with_target(false).finish();
        with_default(subscriber, log);
    }

    fn started() -> (Lines, Writing, Receiver<String>) {
        let (sender, shown) = sync_channel(1 << 16);
        let (lines, writing) = Lines::start(Shown(sender));
        (lines, writing, shown)
    }

    #[test]
    fn an_error_is_written_before_its_writer_goes_on_and_with_all_before_it() {
        let (lines, _writing, shown) = started();
        let before = Arc::new(Mutex::new(String::new()));
        logging(lines, || {
            tracing::info!("one");
            tracing::error!("two");
            before.lock().unwrap().extend(shown.try_iter());
        });
        assert_eq!(*before.lock().unwrap(), " INFO one\nERROR two\n");
    }

    #[test]
    fn a_lone_line_comes_without_another_behind_it() {
        let (lines, _writing, shown) = started();
        logging(lines, || tracing::info!("alone"));
        assert_eq!(shown.recv_timeout(PATIENCE).unwrap(), " INFO alone\n");
    }

    #[test]
    fn every_line_is_written_in_order_when_its_process_leaves() {
        let (lines, writing, shown) = started();
        logging(lines, || {
            for number in 0..50_000 {
                tracing::info!(number);
            }
        });
        drop(writing);
        let text: String = shown.try_iter().collect();
        assert_eq!(text, (0..50_000).map(|number| format!(" INFO number={number}\n")).collect::<String>());
    }

    #[test]
    fn lines_after_the_thread_has_ended_are_written_one_by_one() {
        let (lines, writing, shown) = started();
        drop(writing);
        logging(lines, || tracing::info!("late"));
        assert_eq!(shown.try_iter().collect::<String>(), " INFO late\n");
    }
}
