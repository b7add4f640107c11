//! The services that watch: probes, heartbeats, notifications.
//!
//! All on one runtime of their own: none of them waits for another, and no call for any of them. They go on while the
//! process drains, but for the probes, and for what is done once for a whole fleet: another node takes that over.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use tokio::time::MissedTickBehavior;

use crate::boot::Booted;
use crate::config::watch::Watching;
use crate::drain::Drain;
use crate::fleet::turn::{self, Turn};
use crate::notice::deliver::Deliverer;
use crate::notice::watch::Watcher;
use crate::ops::heartbeat;
use crate::ops::ping::Pinger;
use crate::probe::Prober;
use crate::proxy::Gateway;
use crate::record::Records;

/// How often to look whether the process leaves.
const LOOK: Duration = Duration::from_millis(100);

/// All of them.
pub struct Watch {
    prober: Option<Prober>,
    pinger: Pinger,
    deliverer: Deliverer,
    watcher: Watcher,
    turn: Arc<Turn>,
    drain: Arc<Drain>,
}

impl Watch {
    /// For a gateway. `admin_port` tells nodes of one machine apart; `certificates` are the files of our own.
    #[must_use]
    pub fn new(
        config: Watching,
        gateway: &Gateway,
        booted: &Booted,
        records: Arc<Records>,
        admin_port: u16,
        certificates: Vec<PathBuf>,
    ) -> Self {
        let node = format!("{}:{admin_port}", host());
        let ledger = booted.fleet.as_ref().map(|fleet| fleet.ledger());
        // A process that takes over from another one is another one.
        let turn = Arc::new(Turn::new(ledger, format!("{node} {}", booted.boot)));
        if config.probes.is_none() {
            tracing::info!("no route is probed: the config has no block `probes`");
        }
        let prober = config.probes.clone().map(|probes| Prober {
            config: probes,
            pool: Arc::clone(&gateway.pool),
            holds: Arc::clone(&booted.store),
            books: Arc::clone(&gateway.books),
            records: Arc::clone(&records),
            metrics: Arc::clone(&gateway.metrics),
            drain: Arc::clone(&gateway.drain),
            turn: Arc::clone(&turn),
        });
        let deliverer = Deliverer {
            config: config.notifications.clone(),
            turn: Arc::clone(&turn),
            node: node.clone(),
            teller: format!("{node} {}", booted.boot),
            records: Arc::clone(&records),
            metrics: Arc::clone(&gateway.metrics),
        };
        let watcher = Watcher {
            pool: Arc::clone(&gateway.pool),
            holds: Arc::clone(&gateway.holds),
            books: Arc::clone(&gateway.books),
            records,
            metrics: Arc::clone(&gateway.metrics),
            fleet: booted.fleet.clone(),
            turn: Arc::clone(&turn),
            certificates,
            node,
            config: config.clone(),
        };
        let pinger = Pinger::new(config.heartbeats);
        Self { prober, pinger, deliverer, watcher, turn, drain: Arc::clone(&gateway.drain) }
    }

    async fn probe(&self) {
        if let Some(prober) = &self.prober {
            prober.run().await;
        }
        std::future::pending::<()>().await;
    }

    /// Asks for the turn until the process leaves, and gives it up then.
    async fn take_turns(&self) {
        let job = heartbeat::job("turn", turn::ASK);
        let mut tick = tokio::time::interval(turn::ASK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.drain.is_closing() {
            tokio::select! {
                _ = tick.tick() => {}
                () = self.leaving() => break,
            }
            let turn = Arc::clone(&self.turn);
            job.joined(&tokio::task::spawn_blocking(move || turn.ask()).await);
        }
        job.is_over();
        let turn = Arc::clone(&self.turn);
        if let Err(error) = tokio::task::spawn_blocking(move || turn.leave()).await {
            tracing::error!(%error, "giving up the turn broke");
        }
        std::future::pending::<()>().await;
    }

    async fn leaving(&self) {
        while !self.drain.is_closing() {
            tokio::time::sleep(LOOK).await;
        }
    }
}

#[async_trait]
impl BackgroundService for Watch {
    async fn start(&self, _shutdown: ShutdownWatch) {
        tokio::select! {
            // Whoever tells is heard from the first word on.
            biased;
            () = self.deliverer.run() => {}
            () = self.watcher.run() => {}
            () = self.pinger.run() => {}
            () = self.take_turns() => {}
            () = self.probe() => {}
        }
    }
}

/// The machine's name.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "node".to_owned() } else { name.to_owned() }
}
