//! From what happens to whoever is told.
//!
//! One task decides ([`filters::notice`]), one for each receiver delivers, in order. A message is tried until it is taken,
//! with growing pauses, for `AGE_MAX`; so it may come twice, with the same id. A receiver that takes nothing has
//! `WAITING_MAX` messages waiting; beyond it the oldest go. They wait in memory: what is still so after a restart is
//! found and told anew.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use filters::notice::{Notices, Summary, Turn};
use filters::upstream::backoff;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::{Value, json};
use sha2::Sha256;
use tokio::sync::Notify;

use super::{Event, Notifier, Scope};
use crate::config::watch::{Notifications, Receiver, ShapeName};
use crate::fleet::turn;
use crate::ops::Metrics;
use crate::ops::outside::Outside;
use crate::{clock, entropy};

/// Keys of which something is remembered.
const KEYS_MAX: usize = 4096;
/// How often it is looked what windows leave to be told.
const LOOK: Duration = Duration::from_secs(1);
/// Messages that wait for one receiver.
const WAITING_MAX: usize = 256;
/// How long one is tried.
const AGE_MAX: Duration = Duration::from_secs(6 * 3600);
/// The longest pause between two tries, in steps of [`backoff`].
const STEPS_MAX: u32 = 8;
/// How much a step of ours is longer than one of [`backoff`]: its pauses are made for calls that wait.
const LONGER: u32 = 8;

/// What goes out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Made once, for all tries and all receivers.
    pub id: String,
    pub at_ms: i64,
    pub event: Event,
    /// Who says it.
    pub node: String,
    /// Of a summary: what else there was. 0 for a message of its own.
    pub more: u32,
}

/// Takes events to receivers.
pub struct Deliverer {
    pub config: Notifications,
    pub turn: Arc<turn::Turn>,
    pub node: String,
    pub metrics: Arc<Metrics>,
}

/// What waits for one receiver.
#[derive(Default)]
struct Waiting {
    messages: Mutex<VecDeque<(Instant, Arc<Message>)>>,
    some: Notify,
}

impl Deliverer {
    /// Never ends: run it as a service. What waits is lost with the process.
    pub async fn run(&self) {
        if self.config.receivers.is_empty() {
            return std::future::pending().await;
        }
        let receivers: Vec<(Receiver, Waiting)> =
            self.config.receivers.iter().map(|receiver| (receiver.clone(), Waiting::default())).collect();
        let outside = Outside::default();
        let delivering =
            receivers.iter().map(|(receiver, waiting)| self.deliver(&outside, receiver, waiting));
        tokio::join!(futures::future::join_all(delivering), self.decide(&receivers));
    }

    async fn decide(&self, receivers: &[(Receiver, Waiting)]) {
        let mut events = Notifier::begin();
        let mut notices: Notices<Event> = Notices::new(self.config.window, KEYS_MAX);
        let mut tick = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                event = events.recv() => {
                    let Some(event) = event else { return std::future::pending().await };
                    if notices.hear(clock::now(), &event.key(), event.turn, event.clone()) && !event.is_known {
                        self.send(receivers, event, 0);
                    }
                }
                _ = tick.tick() => {
                    for Summary { mut latest, untold, is_so } in notices.due(clock::now()) {
                        if latest.turn != Turn::Happens {
                            latest.turn = if is_so { Turn::Begins } else { Turn::Ends };
                        }
                        self.send(receivers, latest, untold);
                    }
                    let dropped = Notifier::take_dropped();
                    if dropped > 0 {
                        tracing::warn!(dropped, "more happens than can be looked at: events were not told");
                        self.count("dropped", dropped);
                    }
                }
            }
        }
    }

    fn send(&self, receivers: &[(Receiver, Waiting)], event: Event, more: u32) {
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
        let message = Arc::new(Message { id, at_ms: clock::unix_ms(), event, node: self.node.clone(), more });
        for (_, waiting) in receivers {
            if waiting.push(Arc::clone(&message)) {
                self.count("dropped", 1);
                tracing::error!("a receiver of notifications takes none: the oldest is dropped");
            }
        }
    }

    async fn deliver(&self, outside: &Outside, receiver: &Receiver, waiting: &Waiting) {
        loop {
            let (since, message) = waiting.first().await;
            let mut tries = 0;
            loop {
                let (headers, body) = dress(receiver, &message, clock::unix_ms() / 1000);
                let Err(error) = outside.post(&receiver.url, "", headers, body).await else {
                    self.count("sent", 1);
                    break;
                };
                tries += 1;
                let age = clock::now().saturating_duration_since(since);
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
            }
            waiting.pop(&message);
        }
    }

    fn count(&self, result: &str, times: u64) {
        self.metrics.watch.notifications.with_label_values(&[result]).inc_by(times);
    }
}

impl Waiting {
    /// Puts one behind the others; answers whether the oldest had to go.
    fn push(&self, message: Arc<Message>) -> bool {
        let mut messages = self.lock();
        let is_full = messages.len() >= WAITING_MAX;
        if is_full {
            messages.pop_front();
        }
        messages.push_back((clock::now(), message));
        drop(messages);
        self.some.notify_one();
        is_full
    }

    async fn first(&self) -> (Instant, Arc<Message>) {
        loop {
            if let Some((since, message)) = self.lock().front() {
                return (*since, Arc::clone(message));
            }
            self.some.notified().await;
        }
    }

    /// It is done, unless it has gone already.
    fn pop(&self, message: &Arc<Message>) {
        let mut messages = self.lock();
        if messages.front().is_some_and(|(_, first)| Arc::ptr_eq(first, message)) {
            messages.pop_front();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, Arc<Message>)>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Headers and body for one receiver. The signature covers the time, so that a body cannot be played again later.
fn dress(
    receiver: &Receiver,
    message: &Message,
    unix_seconds: i64,
) -> (Vec<(&'static str, String)>, Vec<u8>) {
    let body = match receiver.shape {
        ShapeName::Json => message.json(),
        ShapeName::Slack => json!({ "text": message.line() }),
    };
    let body = body.to_string().into_bytes();
    let mut headers = vec![
        ("content-type", "application/json".to_owned()),
        ("x-tollgate-id", message.id.clone()),
        ("x-tollgate-timestamp", unix_seconds.to_string()),
    ];
    if let Some(secret) = &receiver.secret
        && let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes())
    {
        mac.update(format!("{unix_seconds}.").as_bytes());
        mac.update(&body);
        let signature = data_encoding::HEXLOWER.encode(&mac.finalize().into_bytes());
        headers.push(("x-tollgate-signature", format!("v1={signature}")));
    }
    (headers, body)
}

impl Message {
    fn json(&self) -> Value {
        let Self { id, at_ms, event, node, more } = self;
        let Event { kind, subject, turn, scope, is_known: _, text, fields } = event;
        json!({
            "id": id,
            "at_ms": at_ms,
            "kind": kind.word(),
            "subject": subject,
            "key": event.key(),
            "state": word(*turn),
            "scope": match scope { Scope::Node => "node", Scope::Fleet => "fleet" },
            "node": node,
            "text": text,
            "more": more,
            "fields": fields,
        })
    }

    /// As a person reads it.
    fn line(&self) -> String {
        let Self { event, node, more, .. } = self;
        let sign = match event.turn {
            Turn::Begins => ":red_circle:",
            Turn::Ends => ":large_green_circle:",
            Turn::Happens => ":warning:",
        };
        let more =
            if *more > 0 { format!(" ({more} more changes in the last while)") } else { String::new() };
        // What Slack takes for markup.
        let text = event.text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        format!("{sign} {text}{more} [{node}]")
    }
}

/// What receivers read a turn as.
const fn word(turn: Turn) -> &'static str {
    match turn {
        Turn::Begins => "begins",
        Turn::Ends => "ends",
        Turn::Happens => "happens",
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;
    use crate::secret::Secret;

    fn message() -> Message {
        let event = Event::begins(Kind::Breaker, "p/m", "p/m <fails>").of_fleet().with("endpoint", "p/m");
        Message { id: "1".to_owned(), at_ms: 7, event, node: "n".to_owned(), more: 0 }
    }

    #[test]
    fn a_signature_is_of_the_time_and_the_body() {
        let receiver = Receiver {
            url: Secret::new("http://h"),
            shape: ShapeName::Json,
            secret: Some(Secret::new("0123456789abcdef")),
        };
        let (headers, body) = dress(&receiver, &message(), 99);
        let signed = headers.iter().find(|(name, _)| *name == "x-tollgate-signature").unwrap();
        let mut mac = Hmac::<Sha256>::new_from_slice(b"0123456789abcdef").unwrap();
        mac.update(&[b"99.", body.as_slice()].concat());
        assert_eq!(signed.1, format!("v1={}", data_encoding::HEXLOWER.encode(&mac.finalize().into_bytes())));
        let read: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (&read["kind"], &read["state"], &read["scope"]),
            (&json!("breaker"), &json!("begins"), &json!("fleet"))
        );
        assert_eq!(read["fields"]["endpoint"], "p/m");
    }

    #[test]
    fn slack_gets_one_line_without_markup() {
        let receiver = Receiver { url: Secret::new("http://h"), shape: ShapeName::Slack, secret: None };
        let (headers, body) = dress(&receiver, &message(), 99);
        assert!(headers.iter().all(|(name, _)| *name != "x-tollgate-signature"));
        let read: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(read, json!({ "text": ":red_circle: p/m &lt;fails&gt; [n]" }));
    }

    #[test]
    fn what_waits_is_bounded_and_the_oldest_goes() {
        let waiting = Waiting::default();
        let first = Arc::new(message());
        assert!(!waiting.push(Arc::clone(&first)));
        let dropped = (0..WAITING_MAX).filter(|_| waiting.push(Arc::new(message()))).count();
        assert_eq!((dropped, waiting.lock().len()), (1, WAITING_MAX));
        waiting.pop(&first);
        assert_eq!(waiting.lock().len(), WAITING_MAX, "it has gone already");
    }
}
