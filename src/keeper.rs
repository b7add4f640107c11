//! Periodic work off the request path: sweeping, looking up, asking, reading anew.
//!
//! One task each, all on one runtime of their own: none of them waits for another, and none for a call.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::books::Books;
use crate::clock;
use crate::edge::Tls;
use crate::ops::heartbeat;
use crate::ops::notify::Notify;
use crate::pool::Pool;
use crate::reload::Reloader;
use crate::store::Embedded;

/// How often holds of dropped requests are settled. Every admission does it too, so no money is missed meanwhile.
const SWEEP: Duration = Duration::from_millis(50);
/// How often to look whether our own port answers yet.
const ANNOUNCE_LOOK: Duration = Duration::from_millis(10);
/// How often the addresses of endpoints are looked up.
const LOOKUP: Duration = Duration::from_secs(30);
/// How often a node that reaches nobody tries again.
const REACH_OUT: Duration = Duration::from_secs(1);
/// How often to look whether a check is due.
const CHECK_LOOK: Duration = Duration::from_millis(500);
/// How often files with credentials are read.
const REREAD: Duration = Duration::from_secs(1);
/// How often it is looked whether certificates have changed.
const LOOK_AT_CERTIFICATES: Duration = Duration::from_secs(1);
/// How often the boots before this one are looked after, as long as there are any.
const LOOK_BACK: Duration = Duration::from_millis(500);

/// What it works on.
pub struct Keeper {
    pub store: Arc<Embedded>,
    pub pool: Arc<Pool>,
    /// Where callers connect.
    pub first: SocketAddr,
    pub certificates: Vec<Arc<Tls>>,
    /// The public service accepts.
    pub started: Arc<AtomicBool>,
    /// A caller would be answered.
    pub serving: Arc<AtomicBool>,
    pub notify: Arc<Notify>,
    pub reloader: Option<Arc<Reloader>>,
    pub books: Arc<Books>,
    pub data: PathBuf,
    /// Another process served before.
    pub took_over: bool,
}

/// What the service manager and the log are told.
#[must_use]
pub fn status(first: SocketAddr) -> String {
    format!("serving on {first}")
}

#[async_trait]
impl BackgroundService for Keeper {
    /// Goes on while the process drains: dropped holds still have to be settled.
    async fn start(&self, _shutdown: ShutdownWatch) {
        tokio::select! {
            () = self.sweep() => {}
            () = self.look_up() => {}
            () = self.reach_out() => {}
            () = self.check() => {}
            () = self.reread_credentials() => {}
            () = self.renew() => {}
            () = self.announce() => {}
            () = self.reload() => {}
            () = self.look_back() => {}
        }
    }
}

impl Keeper {
    async fn sweep(&self) {
        let job = heartbeat::job("sweep", SWEEP);
        let mut tick = tokio::time::interval(SWEEP);
        loop {
            tick.tick().await;
            self.store.sweep();
            job.done();
        }
    }

    /// Shows a certificate that was renewed.
    async fn renew(&self) {
        let job = heartbeat::job("certificates", LOOK_AT_CERTIFICATES);
        let mut tick = tokio::time::interval(LOOK_AT_CERTIFICATES);
        loop {
            tick.tick().await;
            for certificate in &self.certificates {
                certificate.look_again();
            }
            job.done();
        }
    }

    /// Says once that a name cannot be looked up, and once that it can be again.
    async fn look_up(&self) {
        let mut unknown: HashSet<String> = HashSet::new();
        let job = heartbeat::job("dns", LOOKUP);
        let mut tick = tokio::time::interval(LOOKUP);
        loop {
            tick.tick().await;
            job.begins();
            let snapshot = self.pool.load();
            for (provider, addresses) in snapshot.providers() {
                let name = &provider.name;
                match addresses.refresh().await {
                    Ok(()) if unknown.remove(name) => {
                        tracing::info!(provider = name, "the address of a provider is known again");
                    }
                    Ok(()) => {}
                    Err(error) if unknown.insert(name.clone()) => {
                        tracing::warn!(%error, provider = name, "the address of a provider cannot be looked up");
                    }
                    Err(_) => {}
                }
            }
            match unknown.iter().next() {
                Some(name) => job.failed(format!("the address of `{name}` cannot be looked up")),
                None => job.done(),
            }
        }
    }

    /// While this node is cut off, tries whether it still is.
    async fn reach_out(&self) {
        let job = heartbeat::job("reach_out", REACH_OUT);
        let mut tick = tokio::time::interval(REACH_OUT);
        loop {
            tick.tick().await;
            let snapshot = self.pool.load();
            if snapshot.upstreams.is_cut_off() && snapshot.reach_somebody().await {
                tracing::info!("upstreams can be reached from this node again");
            }
            job.done();
        }
    }

    /// Asks providers whether they are well, where the config says how. Each is asked by itself: one that hangs
    /// keeps none of the others waiting, and is not asked again meanwhile.
    async fn check(&self) {
        let mut due: HashMap<String, Instant> = HashMap::new();
        let mut under_way: JoinSet<(String, bool)> = JoinSet::new();
        let mut asked: HashSet<String> = HashSet::new();
        let job = heartbeat::job("checks", CHECK_LOOK);
        let mut tick = tokio::time::interval(CHECK_LOOK);
        loop {
            tokio::select! {
                _ = tick.tick() => job.done(),
                Some(ended) = under_way.join_next() => {
                    let Ok((provider, passed)) = ended else { continue };
                    if passed {
                        self.pool.load().check_passed(&provider);
                    }
                    asked.remove(&provider);
                }
            }
            let snapshot = self.pool.load();
            for (provider, addresses) in snapshot.providers() {
                let Some(check) = &provider.check else { continue };
                let now = clock::now();
                let is_due = due.get(&provider.name).is_none_or(|at| *at <= now);
                if is_due && asked.insert(provider.name.clone()) {
                    due.insert(provider.name.clone(), now + check.every);
                    let (name, addresses) = (provider.name.clone(), Arc::clone(addresses));
                    under_way.spawn(async move { (name, addresses.check().await) });
                }
            }
        }
    }

    /// Takes credentials from their files when those change.
    async fn reread_credentials(&self) {
        let job = heartbeat::job("credentials", REREAD);
        let mut tick = tokio::time::interval(REREAD);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            job.begins();
            let snapshot = self.pool.load();
            // A file on a network's disk may take its time: nobody else waits for it.
            let reading = tokio::task::spawn_blocking(move || snapshot.reread_credentials());
            let read = reading.await;
            job.ended(&read);
            if let Err(error) = read {
                tracing::error!(%error, "credentials could not be read again");
            }
        }
    }

    /// Leases what processes before this one give back, and books what they leave, until none is there.
    async fn look_back(&self) {
        let mut tick = tokio::time::interval(LOOK_BACK);
        let job = heartbeat::job("predecessors", LOOK_BACK);
        let (mut others, mut looks) = (true, 0_u64);
        while others {
            tick.tick().await;
            job.begins();
            let (books, data) = (Arc::clone(&self.books), self.data.clone());
            match tokio::task::spawn_blocking(move || books.look_after_predecessors(&data)).await {
                Ok(Ok(still)) => {
                    others = still;
                    job.done();
                }
                Ok(Err(error)) => {
                    job.failed(&error);
                    tracing::error!("boots before this one cannot be looked after: {error:#}");
                }
                Err(error) => tracing::error!(%error, "looking after boots before this one broke"),
            }
            looks += 1;
        }
        job.is_over();
        if looks > 1 || self.took_over {
            tracing::info!("no process before this one is left");
        }
        std::future::pending::<()>().await;
    }

    async fn reload(&self) {
        match &self.reloader {
            Some(reloader) => Arc::clone(reloader).watch().await,
            None => std::future::pending().await,
        }
    }

    /// Says that we serve when a connection to our own port really stands; then waits for ever.
    async fn announce(&self) {
        while !self.started.load(Ordering::Acquire)
            || tokio::net::TcpStream::connect(self.first).await.is_err()
        {
            tokio::time::sleep(ANNOUNCE_LOOK).await;
        }
        self.serving.store(true, Ordering::Release);
        self.notify.ready(&status(self.first));
        tracing::info!("{}", status(self.first));
        std::future::pending::<()>().await;
    }
}
