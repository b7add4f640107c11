//! Telling people what happens: what there is to tell, and the way out.
//!
//! Whoever finds something out calls [`Notifier::tell`], from wherever it is: that puts an [`Event`] into a bounded queue and
//! never waits. Which of them are told, and when, is decided in [`filters::notice`]; [`deliver`] takes them to every
//! receiver; [`watch`] looks for what nobody else says. Without receivers all of it goes nowhere.
//!
//! What all nodes of a fleet see ([`Event::of_fleet`]) is told by the one that has the turn; what a node sees of itself, by
//! it. The others follow what is told all the same, so that whoever has the turn next knows what was.

pub mod deliver;
mod message;
mod pending;
pub mod watch;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use filters::notice::Turn;
use tokio::sync::mpsc;

/// Events that wait to be looked at; beyond it they are dropped, and counted.
pub(crate) const EVENTS_MAX: usize = 1024;
/// The longest text, in characters.
const TEXT_CHARS_MAX: usize = 500;

static QUEUE: ArcSwapOption<mpsc::Sender<Event>> = ArcSwapOption::const_empty();
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// What an event is about; the word is part of what receivers get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A breaker of an endpoint opened.
    Breaker,
    /// A provider refuses our credential, or its quota is used up.
    Credential,
    /// No route of a model may be asked.
    NoRoute,
    /// A node reaches none of its upstreams.
    CutOff,
    /// Redis does not answer a node.
    Redis,
    /// Postgres does not answer a node: its books are read-only.
    Postgres,
    /// A node admits nothing.
    NotAdmitting,
    /// A config file, or the fleet's catalogue, is refused.
    ConfigRefused,
    /// Redis and the ledger differ.
    Drift,
    /// A call cost more than its hold and the balance.
    Shortfall,
    /// A periodic job is late.
    HeartbeatLate,
    /// A route does not answer its probe.
    Probe,
    /// The day's allowance of probes is used up.
    ProbesHeldBack,
    /// A certificate ends soon.
    Certificate,
    /// A balance is low.
    LowBalance,
    /// The state of the service, as its page shows it.
    Incident,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::Breaker,
        Self::Credential,
        Self::NoRoute,
        Self::CutOff,
        Self::Redis,
        Self::Postgres,
        Self::NotAdmitting,
        Self::ConfigRefused,
        Self::Drift,
        Self::Shortfall,
        Self::HeartbeatLate,
        Self::Probe,
        Self::ProbesHeldBack,
        Self::Certificate,
        Self::LowBalance,
        Self::Incident,
    ];

    /// The word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Breaker => "breaker",
            Self::Credential => "credential",
            Self::NoRoute => "no_route",
            Self::CutOff => "cut_off",
            Self::Redis => "redis",
            Self::Postgres => "postgres",
            Self::NotAdmitting => "not_admitting",
            Self::ConfigRefused => "config_refused",
            Self::Drift => "drift",
            Self::Shortfall => "shortfall",
            Self::HeartbeatLate => "heartbeat_late",
            Self::Probe => "probe",
            Self::ProbesHeldBack => "probes_held_back",
            Self::Certificate => "certificate",
            Self::LowBalance => "low_balance",
            Self::Incident => "incident",
        }
    }
}

/// Who sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// This node alone.
    Node,
    /// Every node.
    Fleet,
}

/// Something to tell. Never a secret, a prompt or an answer: people read it, elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: Kind,
    /// What it is about, such as an endpoint: with the kind, what is told once.
    pub subject: String,
    pub turn: Turn,
    pub scope: Scope,
    /// It was told before this process, or this node's turn, began.
    pub is_known: bool,
    /// One sentence.
    pub text: String,
    /// More for machines.
    pub fields: BTreeMap<Cow<'static, str>, String>,
}

impl Event {
    /// It is so from now on.
    #[must_use]
    pub fn begins(kind: Kind, subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(kind, Turn::Begins, subject.into(), text.into())
    }

    /// It is not so any more.
    #[must_use]
    pub fn ends(kind: Kind, subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(kind, Turn::Ends, subject.into(), text.into())
    }

    /// It happened.
    #[must_use]
    pub fn happens(kind: Kind, subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(kind, Turn::Happens, subject.into(), text.into())
    }

    /// Every node sees it.
    #[must_use]
    pub fn of_fleet(mut self) -> Self {
        self.scope = Scope::Fleet;
        self
    }

    /// It was told before: only what becomes of it is news.
    #[must_use]
    pub fn known(mut self) -> Self {
        self.is_known = true;
        self
    }

    /// With one field more.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.insert(Cow::Borrowed(name), value.into());
        self
    }

    /// What it is known by.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}:{}", self.kind.word(), self.subject)
    }

    fn new(kind: Kind, turn: Turn, subject: String, text: String) -> Self {
        let text = text.chars().take(TEXT_CHARS_MAX).collect();
        Self { kind, subject, turn, scope: Scope::Node, is_known: false, text, fields: BTreeMap::new() }
    }
}

/// The way in, for everybody.
pub struct Notifier;

impl Notifier {
    /// Has something told, if it is worth it. Never waits; where there is no room it is dropped and counted.
    pub fn tell(event: Event) {
        let Some(queue) = QUEUE.load_full() else { return };
        if queue.try_send(event).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// From now on events come out here.
    pub(crate) fn begin() -> mpsc::Receiver<Event> {
        let (sender, receiver) = mpsc::channel(EVENTS_MAX);
        QUEUE.store(Some(Arc::new(sender)));
        receiver
    }

    /// How many were dropped since this was last asked.
    pub(crate) fn take_dropped() -> u64 {
        DROPPED.swap(0, Ordering::Relaxed)
    }
}
