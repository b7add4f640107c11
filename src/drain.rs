//! How the process leaves.
//!
//! SIGTERM: `/readyz` says 503 at once while calls are still taken for `drain.pre`, so that load
//! balancers have time to look elsewhere; then every answer closes its connection, and the process
//! goes as soon as nothing is in flight, or after `drain.max`. SIGINT leaves at once. Pingora's own
//! grace time is not used: it sleeps to its end even when nothing is left to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::{ShutdownSignal, ShutdownSignalWatch};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

/// How often a drain looks whether it is over.
const LOOK: Duration = Duration::from_millis(20);

/// What the rest of the process knows of leaving.
#[derive(Debug, Default)]
pub struct Drain {
    unready: AtomicBool,
    closing: AtomicBool,
    in_flight: AtomicUsize,
    stop: Notify,
}

/// A call in flight; a drain waits for it.
#[derive(Debug)]
pub struct InFlight(Arc<Drain>);

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

    /// Asks the process to leave as SIGTERM does; for tests and embedders.
    pub fn stop(&self) {
        self.stop.notify_one();
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Turns signals into Pingora's shutdown, after the drain.
pub struct Watch {
    pub drain: Arc<Drain>,
    pub pre: Duration,
    pub max: Duration,
}

#[async_trait]
impl ShutdownSignalWatch for Watch {
    async fn recv(&self) -> ShutdownSignal {
        let (Ok(mut terminate), Ok(mut interrupt)) =
            (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
        else {
            tracing::error!("signals cannot be watched; leaving");
            return ShutdownSignal::FastShutdown;
        };
        tokio::select! {
            _ = interrupt.recv() => return ShutdownSignal::FastShutdown,
            _ = terminate.recv() => {}
            () = self.drain.stop.notified() => {}
        }
        self.drain.unready.store(true, Ordering::Release);
        tracing::info!(pre = ?self.pre, max = ?self.max, "leaving: not ready any more");
        let leave = async {
            tokio::time::sleep(self.pre).await;
            self.drain.closing.store(true, Ordering::Release);
            while self.drain.in_flight() > 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            _ = interrupt.recv() => return ShutdownSignal::FastShutdown,
            ended = tokio::time::timeout(self.pre + self.max, leave) => if ended.is_err() {
                tracing::warn!(in_flight = self.drain.in_flight(), "the drain time is over: calls are cut");
            }
        }
        ShutdownSignal::GracefulTerminate
    }
}
