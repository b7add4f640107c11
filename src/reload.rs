//! The config, read anew in a running process.
//!
//! On SIGHUP, on `POST /reload`, and when the file has changed and stood still for a look. A file with
//! faults is refused as a whole, with all of them in the log, and the old config serves on. A good one is
//! taken over as a whole: the books first (accounts and keys of `bootstrap:`, which can fail), then one
//! swap. A call that runs keeps the view, and with it the prices, that it began with.
//!
//! What a running process cannot change (where it listens, its threads, its store, the size of its queues)
//! is named in a warning, and everything else is taken over: an operator who edits both wants the rest now.
//!
//! Deliberately absent: the environment. A `${VAR}` is looked up anew, but nobody can change the variables
//! of a running process.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustix::fs::Stat;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::books::Books;
use crate::config::checked::{Bounds, Config, Listen, Listener, Store, Timers};
use crate::config::records::{Keep, Slo};
use crate::config::sentry::Tracker;
use crate::config::telemetry::Collector;
use crate::config::watch::Watching;
use crate::config::{self, Fault, Faults, Version};
use crate::drain::Drain;
use crate::fleet::catalogue::Published;
use crate::ops::Metrics;
use crate::ops::heartbeat;
use crate::ops::notify::Notify;
use crate::pool::Pool;
use crate::proxy::Bodies;
use crate::status::StatusPage;

/// How often the file is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// Where a config came from.
#[derive(Clone, Debug)]
pub struct Source {
    pub file: PathBuf,
    pub version: Version,
}

/// Takes over what a config file says by now.
pub struct Reloader {
    file: PathBuf,
    fixed: Fixed,
    state: Mutex<State>,
    live: Live,
}

/// What follows a config.
pub struct Live {
    pub pool: Arc<Pool>,
    pub books: Arc<Books>,
    pub bounds: Arc<ArcSwap<Bounds>>,
    pub bodies: Arc<Bodies>,
    pub drain: Arc<Drain>,
    pub metrics: Arc<Metrics>,
    pub status_page: Arc<StatusPage>,
    pub notify: Arc<Notify>,
    /// What [`Notify::ready`] says when a reload is over.
    pub status: String,
}

/// What a running process keeps from its start.
pub struct Fixed {
    listen: Listen,
    data: PathBuf,
    store: Store,
    tracker: Option<Tracker>,
    /// Of these some.
    bounds: Bounds,
    keep: Keep,
    slo: Slo,
    collector: Option<Collector>,
    watching: Watching,
}

#[derive(Debug)]
struct State {
    /// Of the config that serves.
    timers: Timers,
    /// The catalogue of the fleet, where the file names none; its version is 0 until there is one.
    published: Option<Published>,
    applied: Version,
    /// The text that was last tried; it need not be tried again unless somebody asks.
    tried: Version,
}

/// What came of a reload, for whoever asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Outcome {
    /// The file's config serves.
    Applied {
        version: String,
        /// Fields that count only after a restart.
        needs_restart: Vec<&'static str>,
    },
    /// The old one still serves.
    Refused {
        /// Of what serves.
        version: String,
        faults: Vec<Fault>,
    },
}

/// What tells two states of a file apart, also when an editor replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    bytes: i64,
    modified: (i64, i64),
}

/// Looks up an environment variable, as every reading of a config does.
#[must_use]
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Fixed {
    /// Of the config that a process starts with.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let Config { listen, data, store, bounds, collector, tracker, keep, slo, watching, .. } = config;
        Self {
            listen: listen.clone(),
            data: data.clone(),
            store: store.clone(),
            tracker: tracker.clone(),
            bounds: bounds.clone(),
            keep: *keep,
            slo: *slo,
            collector: collector.clone(),
            watching: watching.clone(),
        }
    }

    /// The fields in which a config differs.
    fn differences(&self, config: &Config) -> Vec<&'static str> {
        let Listen { callers, admin, threads } = &self.listen;
        let mine = &self.bounds;
        let theirs = &config.bounds;
        let of = |callers: &[Listener], field: &str| {
            callers.iter().find(|listener| listener.field == field).cloned()
        };
        let listener = |field: &str| of(callers, field) != of(&config.listen.callers, field);
        let differences = [
            ("listen.http", listener("listen.http")),
            ("listen.https", listener("listen.https")),
            ("listen.internal", listener("listen.internal")),
            ("listen.admin", *admin != config.listen.admin),
            ("listen.threads", *threads != config.listen.threads),
            ("telemetry", self.collector != config.collector),
            ("store", self.data != config.data || self.store != config.store),
            ("sentry", self.tracker != config.tracker),
            ("records", self.keep != config.keep),
            ("slo", self.slo != config.slo),
            ("probes", self.watching.probes != config.watching.probes),
            ("heartbeats", self.watching.heartbeats != config.watching.heartbeats),
            ("notifications", self.watching.notifications != config.watching.notifications),
            ("bounds.open_holds_max", mine.open_holds_max != theirs.open_holds_max),
            ("bounds.connections_max", mine.connections_max != theirs.connections_max),
            (
                "bounds.connections_per_address_max",
                mine.connections_per_address_max != theirs.connections_per_address_max,
            ),
            ("bounds.http2_streams_max", mine.http2_streams_max != theirs.http2_streams_max),
            // These are taken over for HTTP/1.1.
            ("bounds.head_max over HTTP/2", mine.head_bytes_max != theirs.head_bytes_max),
            ("bounds.keepalive over HTTP/2", mine.keepalive != theirs.keepalive),
        ];
        differences.into_iter().filter_map(|(name, differs)| differs.then_some(name)).collect()
    }
}

impl Reloader {
    /// For a process that has started with the config of this source.
    #[must_use]
    pub fn new(source: Source, timers: Timers, fixed: Fixed, live: Live) -> Self {
        let Source { file, version } = source;
        live.metrics.config.taken_over(&version.to_string(), 0);
        let state = State { timers, published: None, applied: version.clone(), tried: version };
        let state = Mutex::new(state);
        Self { file, fixed, state, live }
    }

    /// Reads the file and takes its config over, or refuses it. Blocks: it belongs to a thread that may.
    pub fn reload(&self, why: &'static str) -> Outcome {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.live.notify.reloading();
        let outcome = match self.take_over(&mut state) {
            Ok(needs_restart) => self.applied(&state, needs_restart, why),
            Err(faults) => self.refused(&state, faults, why),
        };
        let word = match outcome {
            Outcome::Applied { .. } => "applied",
            Outcome::Refused { .. } => "refused",
        };
        self.live.metrics.config.reloads.with_label_values(&[word]).inc();
        outcome
    }

    fn take_over(&self, state: &mut State) -> Result<Vec<&'static str>, Faults> {
        let text = config::read(&self.file)?;
        state.tried = Version::of(&text);
        let config = config::parse(&text, variable)?;
        let needs_restart = self.fixed.differences(&config);
        let Config {
            bounds,
            routing,
            drain,
            timers,
            catalogue,
            catalogue_of_fleet,
            accounts,
            status,
            listen: _,
            data: _,
            store: _,
            tracker: _,
            keep: _,
            slo: _,
            collector: _,
            watching: _,
        } = config;
        // The node's own timers may be other ones now.
        let catalogue = match &state.published {
            Some(published) if catalogue_of_fleet && published.version > 0 => {
                config::parse_catalogue(&published.text, timers, variable)?
            }
            Some(_) | None => catalogue,
        };
        let Live {
            pool, books, bounds: live_bounds, bodies, drain: live_drain, metrics, status_page, ..
        } = &self.live;
        let snapshot = pool.load().reloaded(catalogue, routing);
        let snapshot = snapshot.map_err(|error| Faults::one("providers", error.to_string()))?;
        // The last step that can fail comes before the swap. A model that a new key may use is there a moment later.
        books.bootstrap(&accounts).map_err(|error| Faults::one("bootstrap", error.to_string()))?;
        pool.set(snapshot);
        bodies.set_max(bounds.bodies_bytes_max);
        live_bounds.store(Arc::new(bounds));
        live_drain.set_times(drain);
        status_page.set(status);
        metrics.forget_endpoints();
        state.timers = timers;
        state.published = catalogue_of_fleet.then(|| state.published.take().unwrap_or_default());
        state.applied = state.tried.clone();
        Ok(needs_restart)
    }

    fn applied(&self, state: &State, needs_restart: Vec<&'static str>, why: &'static str) -> Outcome {
        let version = state.applied.to_string();
        tracing::info!(why, version, "the config is read anew and serves");
        if !needs_restart.is_empty() {
            let fields = needs_restart.join(", ");
            tracing::warn!(fields, "these changes need a restart; everything else of the config counts now");
        }
        self.live.metrics.config.taken_over(&version, needs_restart.len());
        self.live.notify.ready(&self.live.status);
        Outcome::Applied { version, needs_restart }
    }

    fn refused(&self, state: &State, faults: Faults, why: &'static str) -> Outcome {
        let version = state.applied.to_string();
        let lines = faults.to_string().replace('\n', "; ");
        tracing::error!(
            why,
            version,
            faults = lines,
            "the config file is refused: the old config still serves"
        );
        self.live.metrics.config.refused.set(1);
        self.live.notify.ready(&format!("{}; the config file is refused: {lines}", self.live.status));
        Outcome::Refused { version, faults: faults.0 }
    }

    /// The catalogue of the fleet that this process has started with.
    #[must_use]
    pub fn with_catalogue(self, published: Published) -> Self {
        self.live.metrics.config.catalogue.set(published.version);
        self.state.lock().unwrap_or_else(PoisonError::into_inner).published = Some(published);
        self
    }

    /// Which catalogue of the fleet serves, 0 for none yet; `None` where the config file names its own.
    #[must_use]
    pub fn published_version(&self) -> Option<i64> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.published.as_ref().map(|published| published.version)
    }

    /// Takes a catalogue of the fleet over, or refuses it and keeps the one that serves. Only for a process whose file
    /// names none. Blocks: it belongs to a thread that may.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub fn take_catalogue(&self, published: Published) -> Result<(), Faults> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Published { version, text } = &published;
        let Live { pool, metrics, notify, status, .. } = &self.live;
        let taken = config::parse_catalogue(text, state.timers, variable).and_then(|catalogue| {
            let old = pool.load();
            let snapshot = old.reloaded(catalogue, old.routing);
            snapshot.map_err(|error| Faults::one("providers", error.to_string()))
        });
        let (word, result) = match taken {
            Ok(snapshot) => {
                pool.set(snapshot);
                metrics.forget_endpoints();
                metrics.config.catalogue.set(*version);
                metrics.config.refused.set(0);
                tracing::info!(version, "a new catalogue of the fleet serves");
                state.published = Some(published);
                ("applied", Ok(()))
            }
            Err(faults) => {
                let lines = faults.to_string().replace('\n', "; ");
                let serves = state.published.as_ref().map_or(0, |published| published.version);
                tracing::error!(
                    version,
                    serves,
                    faults = lines,
                    "the fleet's catalogue is refused: the old one serves"
                );
                metrics.config.refused.set(1);
                notify.ready(&format!("{status}; the fleet's catalogue is refused: {lines}"));
                ("refused", Err(faults))
            }
        };
        metrics.config.reloads.with_label_values(&[word]).inc();
        result
    }

    /// Whether the file has another text than the one that was last tried.
    fn has_news(&self) -> bool {
        let tried = self.state.lock().unwrap_or_else(PoisonError::into_inner).tried.clone();
        config::read(&self.file).is_ok_and(|text| Version::of(&text) != tried)
    }

    /// Reloads on SIGHUP and on changes of the file; never ends.
    pub async fn watch(self: Arc<Self>) {
        let Ok(mut hangup) = signal(SignalKind::hangup()) else {
            tracing::error!("SIGHUP cannot be watched");
            return std::future::pending().await;
        };
        let job = heartbeat::job("config", LOOK);
        let mut tick = tokio::time::interval(LOOK);
        let (mut last, mut judged) = (None, None);
        loop {
            tokio::select! {
                _ = hangup.recv() => self.reload_apart("SIGHUP").await,
                _ = tick.tick() => {
                    let now = stamp(&self.file);
                    // An editor may be in the middle of it: what is read has stood still for a look.
                    if now.is_some() && now == last && now != judged {
                        judged = now;
                        if self.has_news() {
                            self.reload_apart("the file has changed").await;
                        }
                    }
                    last = now;
                    job.done();
                }
            }
        }
    }

    async fn reload_apart(self: &Arc<Self>, why: &'static str) {
        let this = Arc::clone(self);
        if let Err(error) = tokio::task::spawn_blocking(move || this.reload(why)).await {
            tracing::error!(%error, "a reload broke");
        }
    }
}

fn stamp(file: &Path) -> Option<Stamp> {
    let Stat { st_ino, st_size, st_mtime, st_mtime_nsec, .. } = rustix::fs::stat(file).ok()?;
    let modified = (st_mtime, i64::try_from(st_mtime_nsec).unwrap_or_default());
    Some(Stamp { inode: st_ino, bytes: st_size, modified })
}
