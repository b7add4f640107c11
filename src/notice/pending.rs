//! What waits for receivers: in memory, and in the records, so that it outlives the process that tells it.
//!
//! Every receiver has a queue of its own, so that who takes nothing keeps nobody else waiting. What stands in one is a row of
//! the records too ([`crate::record::notices`]), written at once by a task of its own: nothing that is told waits for a
//! database, as that may be what there is to tell of. What is taken at the first try is mostly gone before it is written.
//!
//! The rows of a process that died come to one that lives, with the ids that they had. One that was only not heard finds
//! them gone, and leaves them to whoever has them.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::message::{Message, digest};
use crate::clock;
use crate::config::watch::Receiver;
use crate::record::Records;
use crate::record::notices::{NoticeRow, Tended, Tending};

/// Messages that wait for one receiver.
const WAITING_MAX: usize = 256;

/// What waits for all receivers.
pub(super) struct Pending {
    pub(super) queues: Vec<Queue>,
    changed: Notify,
}

/// What waits for one.
pub(super) struct Queue {
    pub(super) receiver: Receiver,
    /// What stands for it.
    digest: String,
    messages: Mutex<VecDeque<Arc<Message>>>,
    some: Notify,
}

/// Who keeps it in the records.
pub(super) struct Keeping<'a> {
    pending: &'a Pending,
    records: &'a Arc<Records>,
    /// A name that no other process has.
    teller: &'a str,
    /// Receiver and id of the rows that are there, as far as is known.
    kept: HashSet<(String, String)>,
}

/// What there is besides one's own.
#[derive(Debug, Default)]
pub(super) struct Inherited {
    /// Messages of a process that has died: they wait here from now on.
    pub(super) messages: Vec<Arc<Message>>,
    /// Rows that nobody waits for any more, or that cannot be read.
    pub(super) dropped: u64,
    /// Rows of others that live, or have not been silent for long enough.
    pub(super) others: i64,
}

impl Pending {
    pub(super) fn new(receivers: &[Receiver]) -> Self {
        let queue = |receiver: &Receiver| Queue {
            receiver: receiver.clone(),
            digest: digest(receiver),
            messages: Mutex::default(),
            some: Notify::new(),
        };
        Self { queues: receivers.iter().map(queue).collect(), changed: Notify::new() }
    }

    /// Has all receivers told. Answers how many older messages had to go.
    pub(super) fn push(&self, message: &Arc<Message>) -> u64 {
        let full = self.queues.iter().filter(|queue| queue.push(Arc::clone(message))).count();
        self.changed.notify_one();
        u64::try_from(full).unwrap_or(u64::MAX)
    }

    /// One is taken, or given up.
    pub(super) fn done(&self, queue: &Queue, message: &Arc<Message>) {
        queue.lock().retain(|one| !Arc::ptr_eq(one, message));
        self.changed.notify_one();
    }

    /// Returns when there is something new, or something done.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Queue {
    /// Puts one behind the others; answers whether the oldest had to go.
    fn push(&self, message: Arc<Message>) -> bool {
        let mut messages = self.lock();
        let is_full = messages.len() >= WAITING_MAX;
        if is_full {
            messages.pop_front();
        }
        messages.push_back(message);
        drop(messages);
        self.some.notify_one();
        is_full
    }

    /// The oldest, once there is one.
    pub(super) async fn first(&self) -> Arc<Message> {
        loop {
            if let Some(message) = self.lock().front() {
                return Arc::clone(message);
            }
            self.some.notified().await;
        }
    }

    /// Whether it is to be told by us still.
    pub(super) fn has(&self, message: &Arc<Message>) -> bool {
        self.lock().iter().any(|one| Arc::ptr_eq(one, message))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Message>>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> Keeping<'a> {
    pub(super) fn new(pending: &'a Pending, records: &'a Arc<Records>, teller: &'a str) -> Self {
        Self { pending, records, teller, kept: HashSet::new() }
    }

    /// Brings the records up to what waits, and takes over what nobody else tells any more.
    ///
    /// # Errors
    /// What the records say. What waits goes on waiting in memory.
    pub(super) async fn tend(&mut self) -> Result<Inherited, String> {
        let rows = self.rows();
        let waits: HashSet<(String, String)> = rows.iter().map(key).collect();
        let tending = Tending {
            teller: self.teller.to_owned(),
            put: rows.into_iter().filter(|row| !self.kept.contains(&key(row))).collect(),
            done: self.kept.difference(&waits).cloned().collect(),
        };
        let records = Arc::clone(self.records);
        let tended = tokio::task::spawn_blocking(move || records.tend_notices(&tending, clock::unix_ms()));
        match tended.await {
            Ok(Ok(tended)) => Ok(self.learn(tended, &waits)),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn rows(&self) -> Vec<NoticeRow> {
        let of = |queue: &Queue| {
            let row = |message: &Arc<Message>| NoticeRow {
                receiver: queue.digest.clone(),
                id: message.id.clone(),
                at_ms: message.at_ms,
                body: message.json().to_string(),
            };
            queue.lock().iter().map(row).collect::<Vec<_>>()
        };
        self.pending.queues.iter().flat_map(of).collect()
    }

    /// `waited`: what was there when the records were asked.
    fn learn(&mut self, tended: Tended, waited: &HashSet<(String, String)>) -> Inherited {
        let Tended { own, others } = tended;
        self.kept = own.iter().map(key).collect();
        for queue in &self.pending.queues {
            let is_anothers = |message: &Message| {
                let key = (queue.digest.clone(), message.id.clone());
                waited.contains(&key) && !self.kept.contains(&key)
            };
            queue.lock().retain(|message| !is_anothers(message));
        }
        let mut inherited = Inherited { others, ..Inherited::default() };
        // One message comes once for each receiver.
        for row in own.iter().filter(|row| !waited.contains(&key(row))) {
            let queue = self.pending.queues.iter().find(|queue| queue.digest == row.receiver);
            let known = inherited.messages.iter().find(|message| message.id == row.id).cloned();
            let message = known.clone().or_else(|| Message::read(&row.body).map(Arc::new));
            let Some((queue, message)) = queue.zip(message) else {
                // It is not waited for, so it goes with the next look.
                inherited.dropped += 1;
                continue;
            };
            inherited.dropped += u64::from(queue.push(Arc::clone(&message)));
            if known.is_none() {
                inherited.messages.push(message);
            }
        }
        if inherited.dropped > 0 {
            self.pending.changed.notify_one();
        }
        inherited
    }
}

fn key(row: &NoticeRow) -> (String, String) {
    (row.receiver.clone(), row.id.clone())
}

#[cfg(test)]
mod tests {
    use super::super::{Event, Kind};
    use super::*;
    use crate::config::watch::ShapeName;
    use crate::secret::Secret;

    fn receiver(url: &str) -> Receiver {
        Receiver { url: Secret::new(url), shape: ShapeName::Json, secret: None }
    }

    fn message(id: usize) -> Arc<Message> {
        let event = Event::begins(Kind::Breaker, "p/m", "it fails");
        Arc::new(Message {
            id: id.to_string(),
            at_ms: clock::unix_ms(),
            event,
            node: "n".to_owned(),
            more: 0,
        })
    }

    fn ids(queue: &Queue) -> Vec<String> {
        queue.lock().iter().map(|message| message.id.clone()).collect()
    }

    #[test]
    fn what_waits_is_bounded_and_the_oldest_goes() {
        let pending = Pending::new(&[receiver("http://h")]);
        let first = message(0);
        assert_eq!(pending.push(&first), 0);
        let dropped: u64 = (1..=WAITING_MAX).map(|id| pending.push(&message(id))).sum();
        let queue = &pending.queues[0];
        assert_eq!((dropped, queue.lock().len()), (1, WAITING_MAX));
        pending.done(queue, &first);
        assert_eq!(queue.lock().len(), WAITING_MAX, "it has gone already");
    }

    #[tokio::test]
    async fn what_a_dead_process_left_waits_at_the_next_one_and_what_was_taken_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let records = Arc::new(Records::open(folder.path()).unwrap());
        let (here, there) = (receiver("http://here"), receiver("http://there"));
        let old = Pending::new(&[here.clone(), there.clone()]);
        let mut back = Keeping::new(&old, &records, "old");
        let messages: Vec<_> = (1..=3).map(message).collect();
        for message in &messages {
            old.push(message);
        }
        assert!(back.tend().await.unwrap().messages.is_empty(), "they are its own");
        old.done(&old.queues[0], &messages[0]);
        back.tend().await.unwrap();
        // It dies: its rows look as they do when it has said nothing for long enough.
        let file = rusqlite::Connection::open(folder.path().join("records.db")).unwrap();
        file.execute("UPDATE notice SET until_ms = 0", []).unwrap();

        let new = Pending::new(std::slice::from_ref(&here));
        let mut keeping = Keeping::new(&new, &records, "new");
        let Inherited { messages, dropped, others } = keeping.tend().await.unwrap();
        let inherited: Vec<&str> = messages.iter().map(|message| message.id.as_str()).collect();
        assert_eq!((inherited, dropped, others), (vec!["2", "3"], 3, 0), "nobody is `there` any more");
        assert_eq!(ids(&new.queues[0]), ["2", "3"]);
        // It was not dead: it leaves them to the other one, and goes on with what comes.
        old.push(&message(4));
        back.tend().await.unwrap();
        assert_eq!(old.queues.iter().map(ids).collect::<Vec<_>>(), [["4"], ["4"]]);
        old.queues.iter().for_each(|queue| queue.lock().clear());
        back.tend().await.unwrap();
        assert!(keeping.tend().await.unwrap().messages.is_empty(), "once");
        let left: i64 = file.query_row("SELECT count(*) FROM notice", [], |row| row.get(0)).unwrap();
        assert_eq!(left, 2);
        messages.iter().for_each(|message| new.done(&new.queues[0], message));
        keeping.tend().await.unwrap();
        let left: i64 = file.query_row("SELECT count(*) FROM notice", [], |row| row.get(0)).unwrap();
        assert_eq!(left, 0);
    }
}
