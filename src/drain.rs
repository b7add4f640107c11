//! How the process leaves.
//!
//! SIGTERM: `/readyz` says 503 at once while calls are still taken for `drain.pre`, so that load
//! balancers have time to look elsewhere. Then the listeners close, and every answer closes its
//! connection; who is connected has a moment more to send a request, since it may be on its way. The process goes
//! as soon as nothing is in flight. After `drain.max` what still runs is cut: a stream ends with an error event, and
//! what it used until then is charged. SIGINT leaves at once.
//!
//! SIGQUIT: hands over to a process that waits for it (see `handover`) and leaves in the same way, without
//! `drain.pre`; where nobody waits, it serves on. SIGUSR2 starts such a process.
//!
//! Pingora would sleep through its grace time to the end even when nothing is left to do, so it
//! runs in a thread of its own and the main thread leaves without it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::{ShutdownSignal, ShutdownSignalWatch};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, oneshot, watch};

use crate::config::checked::Drain as Times;
use crate::handover::{self, Estate};
use crate::{clock, ops};

/// How often a drain looks whether it is over.
const LOOK: Duration = Duration::from_millis(20);
/// How long calls that were cut have to say so to their callers.
const CUT_PATIENCE: Duration = Duration::from_secs(2);

/// How long connections that are just there may take to send their request when no more are accepted.
const LINGER: Duration = Duration::from_millis(400);
/// How long requests that are being read may take when another process takes over, before only half of the free money
/// goes over.
const ARRIVAL_PATIENCE: Duration = Duration::from_secs(1);
/// No call arrives when that was so in so many looks in a row, each so long after the other.
const QUIET_ROW: u32 = 3;
const QUIET_LOOK: Duration = Duration::from_millis(5);

/// SIGHUP, SIGQUIT and SIGUSR2 do not end the process while this is there, as they would by themselves, nor do anything
/// else: who sends one to a process that starts, or waits to take over, is too early and no more.
#[derive(Debug)]
pub struct Early {
    _over: oneshot::Sender<()>,
}

impl Early {
    /// From here on.
    ///
    /// # Errors
    /// When the system takes no handler, or there can be no thread.
    pub fn outlive_signals() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let listeners = {
            let _entered = runtime.enter();
            let kinds = [SignalKind::hangup(), SignalKind::quit(), SignalKind::user_defined2()];
            kinds.into_iter().map(signal).collect::<io::Result<Vec<Signal>>>()?
        };
        let (over, ended) = oneshot::channel();
        // A handler stays when its listener is gone; but what it noted is told to the next who listens, unless somebody
        // has heard it.
        let hear = async move {
            let _over = ended.await;
            drop(listeners);
        };
        thread::Builder::new().name("signals".to_owned()).spawn(move || runtime.block_on(hear))?;
        Ok(Self { _over: over })
    }
}

/// What the rest of the process knows of leaving.
#[derive(Debug)]
pub struct Drain {
    phase: Mutex<Phase>,
    changed: Condvar,
    unready: AtomicBool,
    closing: AtomicBool,
    /// Connections that waited for a request are closed.
    quiet: AtomicBool,
    handing: watch::Sender<bool>,
    in_flight: AtomicUsize,
    stop: Notify,
    cut: watch::Sender<bool>,
    times: Mutex<Times>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    /// No call comes any more.
    Closing,
    /// Leave at once.
    Over,
}

/// A call in flight; a drain waits for it.
#[derive(Debug)]
pub struct InFlight(Arc<Drain>);

impl Default for Drain {
    fn default() -> Self {
        Self {
            phase: Mutex::new(Phase::Serving),
            changed: Condvar::new(),
            unready: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            quiet: AtomicBool::new(false),
            handing: watch::Sender::new(false),
            in_flight: AtomicUsize::new(0),
            stop: Notify::new(),
            cut: watch::Sender::new(false),
            times: Mutex::new(Times { pre: Duration::ZERO, max: Duration::ZERO }),
        }
    }
}

impl Drain {
    /// Counts a call until the answer is dropped.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        InFlight(Arc::clone(self))
    }

    /// Calls in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Whether new calls are still wanted.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.unready.load(Ordering::Acquire)
    }

    /// Whether connections are to be closed after their answer.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Turns true when what still runs has to end.
    #[must_use]
    pub fn cuts(&self) -> watch::Receiver<bool> {
        self.cut.subscribe()
    }

    /// Whether what still runs has to end.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        *self.cut.borrow()
    }

    /// How long it may take.
    #[must_use]
    pub fn times(&self) -> Times {
        *self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it may take so long. A drain that is under way keeps what it began with.
    pub fn set_times(&self, times: Times) {
        *self.times.lock().unwrap_or_else(PoisonError::into_inner) = times;
    }

    /// Asks the process to leave as SIGTERM does; for tests and embedders.
    pub fn stop(&self) {
        self.stop.notify_one();
    }

    /// The server has ended by itself, or has to.
    pub fn over(&self) {
        self.enter_phase(Phase::Over);
    }

    /// Turns true when another process takes over the admin port.
    #[must_use]
    pub fn handing(&self) -> watch::Receiver<bool> {
        self.handing.subscribe()
    }

    /// Between the last accept and the closing of connections that wait for a request: for whom is just
    /// about to send one. Waits for nobody when there are no `connections`.
    pub async fn linger(&self, connections: impl Fn() -> usize) {
        let end = clock::now() + LINGER;
        while connections() > 0 && clock::now() < end && self.phase() != Phase::Over {
            tokio::time::sleep(QUIET_LOOK).await;
        }
    }

    /// Connections that waited for a request are closed.
    pub fn be_quiet(&self) {
        self.quiet.store(true, Ordering::Release);
    }

    /// Waits on the main thread until no call can come any more that `admitted` does not count. Answers
    /// whether it is so, or some still take their time to arrive.
    pub fn is_quiet(&self, admitted: impl Fn() -> usize) -> bool {
        let end = clock::now() + LINGER + ARRIVAL_PATIENCE;
        let mut row = 0;
        while clock::now() < end && self.phase() != Phase::Over {
            let quiet = self.quiet.load(Ordering::Acquire) && self.in_flight() <= admitted();
            row = if quiet { row + 1 } else { 0 };
            if row >= QUIET_ROW {
                return true;
            }
            thread::sleep(QUIET_LOOK);
        }
        false
    }

    /// Waits on the main thread until no call can come any more, whatever runs; or for as long as one may take to arrive.
    pub fn wait_for_quiet(&self) {
        let _late = self.is_quiet(|| usize::MAX);
    }

    /// Waits on the main thread until no call is taken any more.
    pub fn wait_for_the_end(&self) {
        let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let serving = |phase: &mut Phase| *phase == Phase::Serving;
        drop(self.changed.wait_while(phase, serving).unwrap_or_else(PoisonError::into_inner));
    }

    /// Then waits until the process may leave: when nothing is in flight any more, or after `drain.max`.
    /// Answers how many calls were cut. Does `meanwhile` now and then.
    pub fn wait(&self, meanwhile: impl FnMut()) -> usize {
        if self.is_empty_within(self.times().max, meanwhile) {
            return 0;
        }
        let cut = self.in_flight();
        tracing::warn!(in_flight = cut, "the drain time is over: calls are cut");
        self.cut.send_replace(true);
        self.is_empty_within(CUT_PATIENCE, || {});
        cut
    }

    /// Whether nothing is in flight before `patience` is over, or the process has to leave anyway.
    fn is_empty_within(&self, patience: Duration, mut meanwhile: impl FnMut()) -> bool {
        let end = clock::now() + patience;
        loop {
            if self.in_flight() == 0 || self.phase() == Phase::Over {
                return true;
            }
            if clock::now() >= end {
                return false;
            }
            meanwhile();
            thread::sleep(LOOK);
        }
    }

    fn phase(&self) -> Phase {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter_phase(&self, next: Phase) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        if *phase != Phase::Over {
            *phase = next;
        }
        drop(phase);
        self.changed.notify_all();
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Turns signals into Pingora's shutdown.
pub struct Watch {
    pub drain: Arc<Drain>,
    pub notify: Arc<ops::notify::Notify>,
    pub estate: Arc<Estate>,
    /// SIGUSR2 starts a process that waits to take over. Not where the gateway is a part of another program.
    pub may_start_heirs: bool,
    /// Goes when signals are listened to.
    pub early: Mutex<Option<Early>>,
}

#[async_trait]
impl ShutdownSignalWatch for Watch {
    /// When this resolves, Pingora closes its listeners.
    async fn recv(&self) -> ShutdownSignal {
        let (Ok(mut terminate), Ok(mut interrupt)) =
            (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
        else {
            tracing::error!("signals cannot be watched; leaving");
            return self.at_once();
        };
        tokio::select! {
            _ = interrupt.recv() => return self.at_once(),
            _ = terminate.recv() => {}
            () = self.drain.stop.notified() => {}
            () = self.handed_over() => return self.close(interrupt),
        }
        self.drain.unready.store(true, Ordering::Release);
        let pre = self.drain.times().pre;
        self.notify.stopping("leaving: calls in flight go on, new ones are still taken for a moment");
        tracing::info!(?pre, "leaving: not ready any more");
        tokio::select! {
            _ = interrupt.recv() => return self.at_once(),
            () = tokio::time::sleep(pre) => {}
        }
        self.close(interrupt)
    }
}

impl Watch {
    fn close(&self, interrupt: Signal) -> ShutdownSignal {
        self.drain.closing.store(true, Ordering::Release);
        self.drain.enter_phase(Phase::Closing);
        #[expect(
            clippy::disallowed_methods,
            reason = "it only waits for a signal; the drain does not wait for it"
        )]
        tokio::spawn(leave_at_once_on(interrupt, Arc::clone(&self.drain)));
        ShutdownSignal::GracefulTerminate
    }

    /// Resolves when SIGQUIT came and another process is ready to take over.
    async fn handed_over(&self) {
        let (Ok(mut quit), Ok(mut start)) = (signal(SignalKind::quit()), signal(SignalKind::user_defined2()))
        else {
            return std::future::pending().await;
        };
        drop(self.early.lock().unwrap_or_else(PoisonError::into_inner).take());
        loop {
            tokio::select! {
                _ = start.recv() => {
                    if self.may_start_heirs && let Err(error) = handover::start_heir() {
                        tracing::error!("SIGUSR2: {error:#}");
                    }
                    continue;
                }
                _ = quit.recv() => {}
            }
            let estate = Arc::clone(&self.estate);
            match tokio::task::spawn_blocking(move || estate.offer()).await {
                Ok(Ok(())) => {
                    tracing::info!("another process takes over; calls in flight end here");
                    self.drain.unready.store(true, Ordering::Release);
                    self.drain.handing.send_replace(true);
                    self.notify.is_replaced();
                    return;
                }
                Ok(Err(error)) => tracing::error!("SIGQUIT: {error:#}; serving on"),
                Err(error) => tracing::error!(%error, "SIGQUIT: the offer broke; serving on"),
            }
        }
    }

    fn at_once(&self) -> ShutdownSignal {
        self.drain.over();
        ShutdownSignal::FastShutdown
    }
}

async fn leave_at_once_on(mut interrupt: Signal, drain: Arc<Drain>) {
    interrupt.recv().await;
    drain.over();
}
