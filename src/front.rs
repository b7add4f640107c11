//! The public service, with what Pingora's own lacks.
//!
//! A heartbeat on the proxy's own threads: each of Pingora's services has a runtime of its own, so that an
//! answering admin port says nothing of calls. While the proxy's threads turn, a service manager that
//! asked for it (`WATCHDOG_USEC`) is told so; when they are stuck it is not, and restarts us.
//!
//! Listening sockets that were bound before, or handed over by another process.
//!
//! Patience when another process takes over: Pingora would drop every connection that has not sent its
//! request yet at the moment when it stops accepting, also one that came a microsecond before.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::IntoRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use pingora::apps::ServerApp;
use pingora::protocols::Stream;
use pingora::server::{ListenFds, ShutdownWatch};
use pingora::services::Service;

use crate::drain::Drain;
use crate::ops::notify::Notify;

/// A service of Pingora's that has a heartbeat and listens on sockets that are there already.
pub struct Front<S> {
    pub service: S,
    pub entrance: Entrance,
}

/// Where callers come in.
pub struct Entrance {
    /// By the addresses that the service listens at; they go to Pingora when it starts.
    pub sockets: Vec<(SocketAddr, TcpListener)>,
    pub notify: Arc<Notify>,
    /// Turns true when it accepts.
    pub started: Arc<AtomicBool>,
}

/// An application of Pingora's that lets connections linger.
pub struct Patient<A> {
    pub app: Arc<A>,
    pub drain: Arc<Drain>,
}

#[async_trait]
impl<A: ServerApp + Send + Sync + 'static> ServerApp for Patient<A> {
    async fn process_new(self: &Arc<Self>, session: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        self.app.process_new(session, shutdown).await
    }

    /// Called when nothing is accepted any more.
    async fn cleanup(&self) {
        self.drain.linger().await;
        self.app.cleanup().await;
        self.drain.be_quiet();
    }
}

#[async_trait]
impl<S: Service> Service for Front<S> {
    async fn start_service(
        &mut self,
        fds: Option<ListenFds>,
        shutdown: ShutdownWatch,
        listeners_per_fd: usize,
    ) {
        let Entrance { sockets, notify, started } = &mut self.entrance;
        if let Some(fds) = &fds {
            for (address, socket) in sockets.drain(..) {
                fds.lock().add(address.to_string(), socket.into_raw_fd());
            }
        }
        started.store(true, Ordering::Release);
        // The heart beats until the runtime ends: calls go on after the listeners have closed.
        let serve = self.service.start_service(fds, shutdown, listeners_per_fd);
        futures::future::join(serve, beat(notify)).await;
    }

    fn name(&self) -> &str {
        self.service.name()
    }

    fn threads(&self) -> Option<usize> {
        self.service.threads()
    }

    fn listen_addresses(&self) -> Option<Vec<String>> {
        self.service.listen_addresses()
    }
}

async fn beat(notify: &Notify) {
    let Some(every) = notify.heartbeat() else { return };
    let mut tick = tokio::time::interval(every);
    loop {
        tick.tick().await;
        notify.alive();
    }
}
