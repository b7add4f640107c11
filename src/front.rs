//! The public service, with what Pingora's own lacks.
//!
//! A heartbeat on the proxy's own threads: each of Pingora's services has a runtime of its own, so that an
//! answering admin port says nothing of calls. While the proxy's threads turn, a service manager that
//! asked for it (`WATCHDOG_USEC`) is told so; when they are stuck it is not, and restarts us.

use std::sync::Arc;

use async_trait::async_trait;
use pingora::server::{ListenFds, ShutdownWatch};
use pingora::services::Service;

use crate::ops::notify::Notify;

/// A service of Pingora's that has a heartbeat.
pub struct Front<S> {
    pub service: S,
    pub notify: Arc<Notify>,
}

#[async_trait]
impl<S: Service> Service for Front<S> {
    async fn start_service(
        &mut self,
        fds: Option<ListenFds>,
        shutdown: ShutdownWatch,
        listeners_per_fd: usize,
    ) {
        // The heart beats until the runtime ends: calls go on after the listeners have closed.
        let serve = self.service.start_service(fds, shutdown, listeners_per_fd);
        futures::future::join(serve, beat(&self.notify)).await;
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
