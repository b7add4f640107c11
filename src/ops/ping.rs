//! Tells a watching service of every periodic job, as Healthchecks takes it: `/start`, success, `/fail`.
//!
//! Once a second it looks at the list of jobs and pings what there is to tell ([`filters::heartbeat::Pinged`]). Each job
//! has at most one round of pings under way, one behind the other, so that a start never comes after its end; whatever
//! the job does meanwhile is looked at when that round is over. So the queue of a job is one round long, whoever hangs.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use filters::heartbeat::{Ping, Pinged, Rule};
use filters::upstream::backoff;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::heartbeat::{self, Job};
use super::outside::Outside;
use crate::config::watch::Heartbeats;
use crate::secret::Secret;
use crate::{clock, entropy};

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(1);
/// How often one ping is tried.
const TRIES_MAX: u32 = 4;

/// Pings for the jobs of this process.
pub struct Pinger {
    config: Heartbeats,
    outside: Outside,
}

impl Pinger {
    /// As the config says.
    #[must_use]
    pub fn new(config: Heartbeats) -> Self {
        Self { config, outside: Outside::default() }
    }

    /// Never ends: run it as a service.
    pub async fn run(&self) {
        if self.config.url.is_none() && self.config.jobs.is_empty() {
            return std::future::pending().await;
        }
        let mut pinged: HashMap<&'static str, Pinged> = HashMap::new();
        let mut busy: HashSet<&'static str> = HashSet::new();
        let mut under_way: JoinSet<&'static str> = JoinSet::new();
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                Some(ended) = under_way.join_next() => {
                    if let Ok(job) = ended {
                        busy.remove(job);
                    }
                    continue;
                }
            }
            let jobs = heartbeat::all();
            pinged.retain(|name, _| jobs.iter().any(|job| job.name == *name));
            for job in jobs {
                let Some((url, path)) = self.place(&job).filter(|_| !busy.contains(job.name)) else {
                    continue;
                };
                let pings =
                    pinged.entry(job.name).or_default().due(clock::unix_ms(), &job.seen(), self.rule());
                if !pings.is_empty() {
                    busy.insert(job.name);
                    under_way.spawn(tell(self.outside.clone(), url, path, job, pings));
                }
            }
        }
    }

    /// Where a job is told of: a URL, and what is put behind it.
    fn place(&self, job: &Job) -> Option<(Secret, String)> {
        let own = self.config.jobs.get(job.name).map(|url| (url.clone(), String::new()));
        own.or_else(|| Some((self.config.url.clone()?, format!("/{}", job.name))))
    }

    fn rule(&self) -> Rule {
        let millis = |span: Duration| i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
        Rule { grace_ms: millis(self.config.late_after), spacing_ms: millis(self.config.ping_every) }
    }
}

/// One behind the other. One that nobody takes is given up: the next round says how the job does by then.
async fn tell(outside: Outside, url: Secret, path: String, job: Arc<Job>, pings: Vec<Ping>) -> &'static str {
    for ping in pings {
        let body = if ping == Ping::Fail { job.failure().into_bytes() } else { vec![] };
        let suffix = format!("{path}{}", ping.suffix());
        let mut tries = 0;
        while let Err(error) = outside.post(&url, &suffix, vec![], body.clone()).await {
            tries += 1;
            if tries >= TRIES_MAX || !error.may_pass() {
                tracing::warn!(job = job.name, %error, "a heartbeat could not be told");
                break;
            }
            let at = entropy::with_rng(|rng| backoff::again_at(clock::now(), tries, None, rng));
            tokio::time::sleep_until(at.into()).await;
        }
    }
    job.name
}
