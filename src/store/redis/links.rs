//! Connections that requests take: one for each thread that serves, driven where it serves, so that a command crosses
//! no threads on its way.
//!
//! A thread's first command takes the connection that all share, and has one of the thread's own made meanwhile. So no
//! request waits for a connection, and one that cannot be made costs nothing but the way over another thread. When one
//! breaks under a command, nobody knows whether the server is still there: all of them are given up with it, and the
//! breaker opens, as if there were only one (see `node`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use redis::aio::MultiplexedConnection;
use tokio::runtime::{Handle, Id};

/// Threads at once that have a connection of their own; others share one.
const THREADS_MAX: usize = 64;

/// Places that nobody has, and the first that nobody has had.
static PLACES: Mutex<(Vec<usize>, usize)> = Mutex::new((vec![], 0));
static THREADS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static ME: Thread = Thread::new();
}

/// A thread, as long as it lives.
struct Thread {
    place: usize,
    number: u64,
}

/// Whose a connection is: it is driven on a runtime, and a thread may serve several, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    place: usize,
    thread: u64,
    runtime: Id,
}

/// To one server.
pub(super) struct Links {
    shared: ArcSwapOption<MultiplexedConnection>,
    own: [Own; THREADS_MAX],
}

/// Those of one place.
#[derive(Default)]
struct Own {
    link: ArcSwapOption<(Owner, MultiplexedConnection)>,
    /// One is being made, or could not be made a moment ago.
    making: AtomicBool,
}

/// What a thread is to take.
pub(super) enum Mine {
    /// Its own, or the shared one.
    Ready(MultiplexedConnection),
    /// The shared one, and it is its turn to have one made.
    Wanting(Owner, MultiplexedConnection),
    None,
}

impl Thread {
    fn new() -> Self {
        let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        let (free, next) = &mut *places;
        let place = free.pop().unwrap_or_else(|| std::mem::replace(next, *next + 1));
        Self { place, number: THREADS.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        PLACES.lock().unwrap_or_else(PoisonError::into_inner).0.push(self.place);
    }
}

impl Owner {
    /// Who asks; `None`: nobody whose connection could be driven.
    fn me() -> Option<Self> {
        let runtime = Handle::try_current().ok()?.id();
        ME.try_with(|me| Self { place: me.place, thread: me.number, runtime }).ok()
    }
}

impl Links {
    pub(super) fn new() -> Self {
        Self { shared: ArcSwapOption::empty(), own: std::array::from_fn(|_| Own::default()) }
    }

    pub(super) fn mine(&self) -> Mine {
        let me = Owner::me();
        let own = me.and_then(|me| Some((me, self.own.get(me.place)?)));
        if let Some((me, own)) = own
            && let Some((owner, link)) = own.link.load().as_deref()
            && *owner == me
        {
            return Mine::Ready(link.clone());
        }
        match (self.shared(), own) {
            (None, _) => Mine::None,
            (Some(link), Some((me, own))) if !own.making.swap(true, Ordering::AcqRel) => {
                Mine::Wanting(me, link)
            }
            (Some(link), _) => Mine::Ready(link),
        }
    }

    pub(super) fn shared(&self) -> Option<MultiplexedConnection> {
        self.shared.load().as_deref().cloned()
    }

    pub(super) fn share(&self, link: MultiplexedConnection) {
        self.shared.store(Some(Arc::new(link)));
    }

    /// An owner's has been made.
    pub(super) fn made(&self, owner: Owner, link: MultiplexedConnection) {
        if let Some(own) = self.own.get(owner.place) {
            own.link.store(Some(Arc::new((owner, link))));
        }
    }

    /// Another one may be made for an owner's place, should there be none.
    pub(super) fn may_make(&self, owner: Owner) {
        if let Some(own) = self.own.get(owner.place) {
            own.making.store(false, Ordering::Release);
        }
    }

    /// An owner's is broken.
    pub(super) fn lose(&self, owner: Owner) {
        let Some(own) = self.own.get(owner.place) else { return };
        if own.link.load().as_deref().is_some_and(|(of, _)| *of == owner) {
            own.link.store(None);
        }
    }

    /// All that somebody owns.
    pub(super) fn owned(&self) -> Vec<(Owner, MultiplexedConnection)> {
        self.own.iter().filter_map(|own| own.link.load().as_deref().cloned()).collect()
    }

    /// Gives all of them up.
    pub(super) fn clear(&self) {
        self.shared.store(None);
        self.own.iter().for_each(|own| own.link.store(None));
    }
}
