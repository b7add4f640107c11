//! What a service manager is told: systemd's `sd_notify`, a datagram of `KEY=value` lines.
//!
//! Only where `NOTIFY_SOCKET` names a socket (a path, or `@name` without a file); elsewhere nothing is
//! said. A message that cannot be sent is dropped: whoever listens may be gone, and the gateway is not
//! there for it.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::clock;

/// Whom to tell.
#[derive(Debug, Default)]
pub struct Notify {
    socket: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
    /// Another process is the main one now.
    replaced: AtomicBool,
}

impl Notify {
    /// Whom the environment names. `WATCHDOG_USEC` counts when `WATCHDOG_PID` names this process or nobody, or
    /// when this one `replaces` the one that is named.
    #[must_use]
    pub fn from_env(replaces: bool) -> Self {
        let var = |name| std::env::var(name).ok();
        let ours = replaces || var("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        let watchdog = var("WATCHDOG_USEC").filter(|_| ours).and_then(|text| text.parse().ok());
        Self {
            socket: var("NOTIFY_SOCKET").and_then(|name| open(&name)),
            watchdog: watchdog.filter(|usec| *usec > 0).map(Duration::from_micros),
            replaced: AtomicBool::new(false),
        }
    }

    /// How often to say that all is well, if anybody wants to hear it: half of the time after which
    /// silence counts as death.
    #[must_use]
    pub fn heartbeat(&self) -> Option<Duration> {
        self.watchdog.filter(|_| self.socket.is_some()).map(|limit| limit / 2)
    }

    /// The gateway serves. The process id counts after an upgrade, when it is not the one that was started.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nMAINPID={}\nSTATUS={status}", std::process::id()));
    }

    /// The config is read anew; ends with [`Notify::ready`].
    pub fn reloading(&self) {
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={}", clock::monotonic_usec()));
    }

    /// The process is on its way out.
    pub fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={status}"));
    }

    /// One line for `systemctl status`.
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={status}"));
    }

    /// Whoever says this makes progress.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// From now on another process speaks.
    pub fn is_replaced(&self) {
        self.replaced.store(true, Ordering::Release);
    }

    fn send(&self, message: &str) {
        let replaced = self.replaced.load(Ordering::Acquire);
        if let Some((socket, to)) = self.socket.as_ref().filter(|_| !replaced) {
            let _gone = socket.send_to_addr(message.as_bytes(), to);
        }
    }
}

fn open(name: &str) -> Option<(UnixDatagram, SocketAddr)> {
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(name),
    };
    let opened = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        // A full queue on the other side must not hold up a thread that serves.
        socket.set_nonblocking(true)?;
        Ok((socket, address))
    });
    opened.inspect_err(|error| tracing::warn!(%error, name, "NOTIFY_SOCKET cannot be used")).ok()
}
