//! What two processes do with money and limits when one takes over from the other; `handover` is how they talk.
//!
//! The order is that of docs/model-check.md: out of the old one's memory, then back to the ledger in one
//! transaction, and only then is it leased by the new one.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::books::Books;
use crate::drain::Drain;
use crate::handover::Line;
use crate::store::{Embedded, Holds as _};
use crate::{boot, clock};

/// How often a process that was replaced gives back what its calls have released, and says how many still run.
const GIVE_AGAIN: Duration = Duration::from_millis(500);
/// How long a process that is killed may take to be gone.
const DEATH: Duration = Duration::from_secs(2);
/// How often something that should be over at once is looked at again.
const LOOK: Duration = Duration::from_millis(10);

/// From here on we own all that the process before does not need any more. Answers whether it gave it in
/// order.
///
/// # Errors
/// When the process before serves on all the same.
pub fn come_into(
    owner: File,
    line: Option<Line>,
    data: &Path,
    store: &Arc<Embedded>,
) -> anyhow::Result<(File, bool)> {
    let Some(mut line) = line else { return Ok((owner, false)) };
    let Err(error) = line.ready() else { return Ok((owner, take_over(line, store)?)) };
    // It has died over its offer, or given up and serves on: then it has the lock still when we let go of it.
    drop(owner);
    let end = clock::now() + DEATH;
    loop {
        match boot::own(data)? {
            Some(owner) => return Ok((owner, false)),
            None if clock::now() < end => std::thread::sleep(LOOK),
            None => return Err(error.context("the old process serves on")),
        }
    }
}

fn take_over(mut line: Line, store: &Arc<Embedded>) -> anyhow::Result<bool> {
    let limits = line.news();
    let orderly = limits.is_ok();
    match limits {
        Ok(limits) => store.adopt(&limits),
        // It stopped accepting when we said that we are ready, so there is no way back.
        Err(error) => {
            tracing::warn!(
                "the old process did not finish its hand-over: {error:#}; its journal is replayed when it has died"
            );
        }
    }
    tracing::info!("took over");
    let store = Arc::clone(store);
    let listen = move || {
        while let Ok(limits) = line.news() {
            store.stand_elsewhere(&limits);
        }
        store.nothing_runs_elsewhere();
    };
    std::thread::Builder::new().name("predecessor".to_owned()).spawn(listen)?;
    Ok(orderly)
}

/// Leases what the process before does not need any more. Callers wait by now: what fails is done later.
pub fn settle_in(owner: &File, books: &Books, data: &Path, orderly: bool) {
    if let Err(error) = boot::sign(owner) {
        tracing::warn!("{error:#}");
    }
    // One that died has all its money with it, until the kernel has let go of its journal.
    let end = clock::now() + if orderly { Duration::ZERO } else { DEATH };
    loop {
        match books.look_after_predecessors(data) {
            Ok(true) if clock::now() < end => std::thread::sleep(LOOK),
            Ok(_) => return,
            Err(error) => {
                tracing::error!("what the process before left cannot be leased yet: {error:#}");
                return;
            }
        }
    }
}

/// Gives all that is free to the process that takes over, and leaves when nothing is in flight any more.
/// Answers how many calls were cut.
pub fn leave_to(mut heir: Line, drain: &Drain, books: &Books, store: &Embedded) -> usize {
    let quiet = drain.is_quiet(|| store.open_holds());
    give(books, !quiet);
    if let Err(error) = heir.done(store.carried(None)) {
        tracing::error!(
            "the process that takes over is gone: {error:#}; calls in flight end, then this one leaves"
        );
    }
    let (mut told, mut busy) = (clock::now(), store.busy());
    let cut = drain.wait(|| {
        if clock::now().saturating_duration_since(told) >= GIVE_AGAIN {
            told = clock::now();
            if drain.in_flight() <= store.open_holds() {
                give(books, false);
            }
            // Of an account whose last call has ended since, once more.
            let _gone = heir.running(store.carried(Some(&busy)));
            busy = store.busy();
        }
    });
    store.sweep();
    let _gone = heir.running(store.carried(Some(&busy)));
    cut
}

fn give(books: &Books, half: bool) {
    if let Err(error) = books.hand_over(half) {
        tracing::error!(%error, "free money could not be given back: it is when this process has left");
    }
}
