//! From what happens to whoever is told.
//!
//! One task decides ([`filters::notice`]), one for each receiver delivers, in order. A message is tried until it is taken,
//! with growing pauses, for `AGE_MAX`; so it may come twice, with the same id. A receiver that takes nothing has a bounded
//! number of messages waiting (`pending`); beyond it the oldest go. A third task keeps those that wait in
//! the records, and brings what a process left that died: under the id that it had, and before anything new is told, since
//! what a new process finds to be so may be what the old one was about to tell.
//!
//! Of what was left as begun the new process may know nothing: a breaker that was open there is closed here. What it has not
//! seen itself within `CONFIRM` is told to be over, so that the last word is true. What is still so after a restart, and had
//! been told, is found and told anew.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use filters::notice::{Notices, Summary, Turn};
use filters::upstream::backoff;
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;

use super::message::{Message, dress};
use super::pending::{Inherited, Keeping, Pending, Queue};
use super::{Event, Kind, Notifier, Scope};
use crate::config::watch::Notifications;
use crate::fleet::turn;
use crate::ops::Metrics;
use crate::ops::heartbeat;
use crate::ops::outside::Outside;
use crate::record::Records;
use crate::record::notices::TERM;
use crate::{clock, entropy};

/// Keys of which something is remembered.
const KEYS_MAX: usize = 4096;
/// How often it is looked what windows leave to be told.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is looked who has died, and said that this process has not; sooner where there is something to keep.
const TEND: Duration = Duration::from_secs(2);
/// How long nothing new is told at the start, at most, for the sake of what a process before may have left.
const INHERIT_MAX: Duration = TERM.saturating_add(TEND).saturating_add(TEND);
/// How long a process takes, at most, to see again what is so: the slowest look at it is every 15 s.
const CONFIRM: Duration = Duration::from_secs(30);
/// How long one is tried.
const AGE_MAX: Duration = Duration::from_secs(6 * 3600);
/// The longest pause between two tries, in steps of [`backoff`].
const STEPS_MAX: u32 = 8;
/// How much a step of ours is longer than one of [`backoff`]: its pauses are made for calls that wait.
const LONGER: u32 = 8;

/// Takes events to receivers.
pub struct Deliverer {
    pub config: Notifications,
    pub turn: Arc<turn::Turn>,
    pub node: String,
    /// A name that no other process has.
    pub teller: String,
    pub records: Arc<Records>,
    pub metrics: Arc<Metrics>,
}

/// What receivers think, and what they are to be told.
struct Telling {
    pending: Pending,
    told: Mutex<Told>,
    /// What processes before have left is known.
    inherited: Notify,
}

struct Told {
    notices: Notices<Event>,
    /// What a process before was about to say has begun, and when it is over unless this one sees it too.
    unseen: BTreeMap<String, (Instant, Event)>,
}

impl Deliverer {
    /// Never ends: run it as a service.
    pub async fn run(&self) {
        if self.config.receivers.is_empty() {
            return std::future::pending().await;
        }
        let notices = Notices::new(self.config.window, KEYS_MAX);
        let telling = Telling {
            pending: Pending::new(&self.config.receivers),
            told: Mutex::new(Told { notices, unseen: BTreeMap::new() }),
            inherited: Notify::new(),
        };
        let outside = Outside::default();
        let queues = telling.pending.queues.iter();
        let delivering = queues.map(|queue| self.deliver(&outside, &telling.pending, queue));
        tokio::join!(futures::future::join_all(delivering), self.keep(&telling), self.decide(&telling));
    }

    async fn decide(&self, telling: &Telling) {
        let mut events = Notifier::begin();
        // Whoever is not heard from in time is not waited for: what it left may be told twice then.
        let _in_time = tokio::time::timeout(INHERIT_MAX, telling.inherited.notified()).await;
        let mut tick = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                event = events.recv() => {
                    let Some(event) = event else { return std::future::pending().await };
                    let is_news = telling.lock().hear(&event);
                    if is_news && !event.is_known {
                        self.send(&telling.pending, event, 0);
                    }
                }
                _ = tick.tick() => {
                    let (due, over) = telling.lock().look();
                    for Summary { mut latest, untold, is_so } in due {
                        if latest.turn != Turn::Happens {
                            latest.turn = if is_so { Turn::Begins } else { Turn::Ends };
                        }
                        self.send(&telling.pending, latest, untold);
                    }
                    over.into_iter().for_each(|event| self.send(&telling.pending, event, 0));
                    let dropped = Notifier::take_dropped();
                    if dropped > 0 {
                        tracing::warn!(dropped, "more happens than can be looked at: events were not told");
                        self.count("dropped", dropped);
                    }
                }
            }
        }
    }

    fn send(&self, pending: &Pending, event: Event, more: u32) {
        // Another node says it.
        if event.scope == Scope::Fleet && !self.turn.speaks() {
            return;
        }
        tracing::info!(
            kind = event.kind.word(),
            subject = event.subject,
            more,
            "somebody is told: {}",
            event.text
        );
        let id = entropy::hold_id().to_string();
        let message = Message { id, at_ms: clock::unix_ms(), event, node: self.node.clone(), more };
        let dropped = pending.push(&Arc::new(message));
        if dropped > 0 {
            self.count("dropped", dropped);
            tracing::error!(dropped, "a receiver of notifications takes none: the oldest is dropped");
        }
    }

    /// Keeps what waits, and takes over what others have left.
    async fn keep(&self, telling: &Telling) {
        let job = heartbeat::job("notices", TEND);
        let mut keeping = Keeping::new(&telling.pending, &self.records, &self.teller);
        let mut tick = tokio::time::interval(TEND);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            job.begins();
            match keeping.tend().await {
                Ok(inherited) => {
                    self.inherit(telling, inherited);
                    job.done();
                    tokio::select! {
                        _ = tick.tick() => {}
                        () = telling.pending.changed() => {}
                    }
                }
                // They wait in memory meanwhile.
                Err(error) => {
                    job.failed(error);
                    tick.tick().await;
                }
            }
        }
    }

    fn inherit(&self, telling: &Telling, inherited: Inherited) {
        let Inherited { messages, dropped, others } = inherited;
        if dropped > 0 {
            self.count("dropped", dropped);
            tracing::error!(dropped, "notifications of a process before are dropped: nobody waits for them");
        }
        for message in messages {
            tracing::info!(
                id = message.id,
                kind = message.event.kind.word(),
                "a process before left this to be told"
            );
            telling.lock().inherit(&message.event);
        }
        if others == 0 {
            telling.inherited.notify_one();
        }
    }

    async fn deliver(&self, outside: &Outside, pending: &Pending, queue: &Queue) {
        let receiver = &queue.receiver;
        loop {
            let message = queue.first().await;
            let mut tries = 0;
            loop {
                let (headers, body) = dress(receiver, &message, clock::unix_ms() / 1000);
                let Err(error) = outside.post(&receiver.url, "", headers, body).await else {
                    self.count("sent", 1);
                    break;
                };
                tries += 1;
                let age_ms = clock::unix_ms().saturating_sub(message.at_ms);
                let age = Duration::from_millis(u64::try_from(age_ms).unwrap_or_default());
                if !error.may_pass() || age > AGE_MAX {
                    self.count("dropped", 1);
                    tracing::error!(%error, id = message.id, tries, "a notification is given up");
                    break;
                }
                self.count("retried", 1);
                if tries == 1 {
                    tracing::warn!(%error, id = message.id, "a notification is tried again until it is taken");
                }
                let now = clock::now();
                let at = entropy::with_rng(|rng| backoff::again_at(now, tries.min(STEPS_MAX), None, rng));
                let longer = if tries > STEPS_MAX { LONGER } else { 1 };
                tokio::time::sleep(at.saturating_duration_since(now).saturating_mul(longer)).await;
                // It had to make room, or another process tells it.
                if !queue.has(&message) {
                    break;
                }
            }
            pending.done(queue, &message);
        }
    }

    fn count(&self, result: &str, times: u64) {
        self.metrics.watch.notifications.with_label_values(&[result]).inc_by(times);
    }
}

impl Telling {
    fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Told {
    /// Whether this is to be told now.
    fn hear(&mut self, event: &Event) -> bool {
        let key = event.key();
        self.unseen.remove(&key);
        self.notices.hear(clock::now(), &key, event.turn, event.clone())
    }

    /// What windows that are over leave to be told; and what a process before said and this one does not see.
    fn look(&mut self) -> (Vec<Summary<Event>>, Vec<Event>) {
        let now = clock::now();
        let mut over = vec![];
        for (key, (_, event)) in self.unseen.extract_if(.., |_, (at, _)| *at <= now) {
            let text = format!("not seen any more since a restart: {}", event.text);
            let ends = Event { turn: Turn::Ends, text, ..event };
            if self.notices.hear(now, &key, Turn::Ends, ends.clone()) {
                over.push(ends);
            }
        }
        (self.notices.due(now), over)
    }

    /// A process before was about to say this, and now this one does.
    fn inherit(&mut self, event: &Event) {
        let (now, key) = (clock::now(), event.key());
        let was_so = self.notices.is_so(&key);
        self.notices.hear(now, &key, event.turn, event.clone());
        match event.turn {
            Turn::Begins if !was_so && is_seen_anew(event.kind) => {
                self.unseen.insert(key, (now + CONFIRM, event.clone()));
            }
            Turn::Begins | Turn::Happens => {}
            Turn::Ends => {
                self.unseen.remove(&key);
            }
        }
    }
}

/// Whether a process that begins says by itself what is so. Of the others the records know.
const fn is_seen_anew(kind: Kind) -> bool {
    match kind {
        Kind::Breaker
        | Kind::NoRoute
        | Kind::CutOff
        | Kind::Redis
        | Kind::Postgres
        | Kind::NotAdmitting
        | Kind::ConfigRefused
        | Kind::HeartbeatLate
        | Kind::Certificate
        | Kind::LowBalance => true,
        Kind::Credential
        | Kind::Drift
        | Kind::Shortfall
        | Kind::Probe
        | Kind::ProbesHeldBack
        | Kind::Incident => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told() -> Told {
        Told { notices: Notices::new(Duration::from_secs(300), KEYS_MAX), unseen: BTreeMap::new() }
    }

    fn age(told: &mut Told) {
        let now = clock::now();
        told.unseen.values_mut().for_each(|(at, _)| *at = now);
    }

    #[test]
    fn what_was_left_as_begun_and_is_seen_here_too_is_not_told_again_and_neither_is_its_end() {
        let mut told = told();
        let begins = Event::begins(Kind::Certificate, "c", "it ends");
        told.inherit(&begins);
        assert!(!told.hear(&begins), "whoever takes what was left knows it");
        age(&mut told);
        assert!(told.look().1.is_empty());
        assert!(told.hear(&Event::ends(Kind::Certificate, "c", "renewed")));
    }

    #[test]
    fn what_was_left_as_begun_and_is_not_seen_here_is_told_to_be_over_once() {
        let mut told = told();
        told.inherit(&Event::begins(Kind::Breaker, "p/m", "it fails"));
        assert!(told.look().1.is_empty(), "not yet");
        age(&mut told);
        let over = told.look().1;
        let [event] = over.as_slice() else { panic!("{over:?}") };
        assert_eq!(
            (event.turn, event.text.as_str()),
            (Turn::Ends, "not seen any more since a restart: it fails")
        );
        assert!(told.look().1.is_empty());
    }

    #[test]
    fn what_the_records_know_is_not_told_to_be_over_and_what_was_left_as_ended_is_not_either() {
        let mut told = told();
        told.inherit(&Event::begins(Kind::Probe, "m at p/m", "it fails"));
        told.inherit(&Event::begins(Kind::Breaker, "p/m", "it fails"));
        told.inherit(&Event::ends(Kind::Breaker, "p/m", "it is well"));
        told.inherit(&Event::happens(Kind::Drift, "1", "they differ"));
        age(&mut told);
        assert!(told.look().1.is_empty());
        assert!(
            !told.hear(&Event::happens(Kind::Drift, "1", "they differ")),
            "within the window it was told"
        );
    }
}
