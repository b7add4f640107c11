//! Alarms to an error tracker: Sentry, or what speaks its protocol.
//!
//! Two things are sent: every panic, of whatever thread, and every line of the log that has a field `breach` (an
//! invariant that does not hold, money that cannot be booked). What goes out is made anew of the names and numbers that
//! [`filters::report`] lets pass, and once more in `before_send`: no message, no error's text, no stack. A panic's words
//! are sent only where they are a literal of the source, since everything else may hold a caller's.
//!
//! Nobody waits for it: events go into a queue of `QUEUE_MAX` and beyond it nowhere, a thread of the crate sends them, the
//! first few of a kind and minute. A process that leaves waits `FLUSH` at most. Without a DSN there is no thread, no
//! queue and no hook.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::panic::{self, PanicHookInfo};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use filters::report::{Damper, Verdict, tag};
use sentry::protocol::{Event, Exception, Level};
use sentry::transports::UreqHttpTransportOptions;
use sentry::types::Dsn;
use sentry::{Client, ClientOptions, Transport, TransportFactory, TransportOptions};
use tracing::field::{Field, Visit};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::filter::{FilterFn, Filtered};
use tracing_subscriber::layer::Context;
use tracing_subscriber::{Layer, Registry};

use crate::clock;
use crate::config::sentry::Tracker;

/// Events that wait to be sent. Beyond them they are dropped.
const QUEUE_MAX: usize = 32;
/// How long one event may take to be sent.
const SEND: Duration = Duration::from_secs(5);
/// How long a process that leaves waits for what is not sent yet.
const FLUSH: Duration = Duration::from_secs(2);
/// The field of a log line that makes it an alarm.
const BREACH: &str = "breach";

/// Sends alarms as long as it is kept.
pub struct Reporting {
    reporter: Option<Reporter>,
}

/// Sends what it is told.
#[derive(Clone)]
struct Reporter(Arc<Inner>);

struct Inner {
    client: Client,
    damper: Mutex<Damper>,
    node: String,
}

/// What is said of an alarm.
type Tags = BTreeMap<String, String>;

/// What this process is called: its machine, and the port that it serves on.
#[must_use]
pub fn node_name(port: u16) -> String {
    let system = rustix::system::uname();
    format!("{}:{port}", system.nodename().to_string_lossy())
}

/// Begins to send, where the config says where to: panics at once, lines of the log by the layer. `node`: what this
/// process is called.
#[must_use]
pub fn start(tracker: Option<&Tracker>, node: &str) -> (Reporting, Option<Alarms>) {
    let reporter = tracker.and_then(|tracker| Reporter::new(tracker, node));
    if let Some(reporter) = reporter.clone() {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            reporter.panicked(info);
            before(info);
        }));
    }
    // Asked once for each place that writes lines: all others cost nothing.
    let is_alarm: fn(&Metadata<'_>) -> bool = |line| line.fields().field(BREACH).is_some();
    let alarms = reporter.clone().map(|reporter| Lines(reporter).with_filter(FilterFn::new(is_alarm)));
    (Reporting { reporter }, alarms)
}

impl Reporter {
    /// `None` for a DSN that is none, which the config has refused already.
    fn new(tracker: &Tracker, node: &str) -> Option<Self> {
        let Tracker { dsn, environment, release, sample_percent } = tracker;
        let dsn: Dsn = dsn.expose().parse().ok()?;
        let mut options = ClientOptions::new()
            .default_integrations(false)
            .release(release.clone())
            .environment(environment.clone())
            .server_name(node.to_owned())
            .max_breadcrumbs(0)
            .transport_channel_capacity(QUEUE_MAX)
            .sample_rate(f32::from(*sample_percent) / 100.0)
            .transport(Sender)
            .before_send(|event| Some(made_anew(event)));
        options.dsn = Some(dsn);
        let client = Client::with_options(options);
        Some(Self(Arc::new(Inner { client, damper: Mutex::default(), node: node.to_owned() })))
    }

    fn panicked(&self, info: &PanicHookInfo<'_>) {
        let at = info.location().map(|at| format!("{}:{}", file(at.file()), at.line())).unwrap_or_default();
        let thread = thread::current().name().unwrap_or("unnamed").to_owned();
        // Whatever else it is was made at run time, of who knows what.
        let literal = info.payload().downcast_ref::<&'static str>().copied();
        let tags = [("breach", "panic".to_owned()), ("at", at), ("thread", thread)];
        let tags = tags.map(|(name, value)| (name.to_owned(), value));
        self.send("panic", Level::Fatal, literal.unwrap_or("its words are in the log"), tags.into());
    }

    fn send(&self, kind: &'static str, level: Level, words: &'static str, mut tags: Tags) {
        let inner = &self.0;
        let verdict = inner.damper.lock().unwrap_or_else(PoisonError::into_inner).judge(clock::now(), kind);
        let Verdict::Send { suppressed } = verdict else { return };
        tags.insert("node".to_owned(), inner.node.clone());
        tags.insert("suppressed".to_owned(), suppressed.to_string());
        let exception =
            Exception { ty: kind.to_owned(), value: Some(words.to_owned()), ..Exception::default() };
        let place = tags.get("at").cloned().unwrap_or_default();
        let fingerprint = vec![Cow::Borrowed(kind), Cow::Owned(place)].into();
        inner.client.capture_event(
            Event { level, exception: vec![exception].into(), tags, fingerprint, ..Event::default() },
            None,
        );
    }
}

impl Drop for Reporting {
    fn drop(&mut self) {
        let Some(reporter) = self.reporter.take() else { return };
        let (done, sent) = mpsc::sync_channel(1);
        // In a thread of its own: a full queue would hold up whoever wants to wait behind it.
        let waiting = thread::Builder::new().name("last-alarms".to_owned()).spawn(move || {
            reporter.0.client.flush(Some(FLUSH));
            // Nobody waits any more.
            let _late = done.send(());
        });
        if waiting.is_ok() {
            let _in_time = sent.recv_timeout(FLUSH);
        }
    }
}

/// What is sent of an event, however it came to be: nothing else is copied.
fn made_anew(event: Event<'static>) -> Event<'static> {
    let fit = |(name, value): (String, String)| tag(&name, &value).map(|value| (name, value));
    Event {
        event_id: event.event_id,
        timestamp: event.timestamp,
        level: event.level,
        platform: event.platform,
        release: event.release,
        environment: event.environment,
        server_name: event.server_name,
        sdk: event.sdk,
        fingerprint: event.fingerprint,
        exception: event.exception,
        tags: event.tags.into_iter().filter_map(fit).collect(),
        ..Event::default()
    }
}

/// Where a file of the source is, without whoever built it.
fn file(path: &str) -> &str {
    let of_crate = path.split_once("/registry/src/").and_then(|(_, rest)| rest.split_once('/'));
    of_crate.map_or(path, |(_, rest)| rest)
}

/// What looks for alarms among the lines of the log.
pub type Alarms = Filtered<Lines, FilterFn<fn(&Metadata<'_>) -> bool>, Registry>;

/// Turns lines of the log into alarms.
pub struct Lines(Reporter);

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, line: &tracing::Event<'_>, _: Context<'_, S>) {
        let place = line.metadata();
        let mut seen = Seen::default();
        line.record(&mut seen);
        let at = format!("{}:{}", place.file().map_or("", file), place.line().unwrap_or_default());
        seen.tags.insert("at".to_owned(), at);
        let kind =
            seen.tags.get(BREACH).and_then(|word| KINDS.iter().find(|(kind, _)| *kind == word.as_str()));
        let (kind, words) = kind.copied().unwrap_or(("unknown", "an alarm that has no words yet"));
        self.0.send(kind, Level::Error, words, seen.tags);
    }
}

/// The fields of a line that may be sent. What is written with `%` or `?` is text that was made at run time: an error, an
/// address. It comes to `record_debug`, and stays here.
#[derive(Default)]
struct Seen {
    tags: Tags,
}

impl Seen {
    fn keep(&mut self, field: &Field, value: &str) {
        if let Some(value) = tag(field.name(), value) {
            self.tags.insert(field.name().to_owned(), value);
        }
    }
}

impl Visit for Seen {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.keep(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.keep(field, &value.to_string());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.keep(field, &value.to_string());
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// Every breach, and what it means.
pub const KINDS: [(&str, &str); 15] = [
    ("wrong_stage", "a phase of a call came in the wrong order"),
    ("inside", "a request failed inside the gateway"),
    ("books", "the books are wrong: ledger verify names the first thing that is"),
    ("misfit", "a call cannot be booked and was set aside"),
    ("written_off", "a call that no money was left for is written off"),
    ("shortfall", "a call cost more than its hold and the balance"),
    ("no_cost", "a cost cannot be computed: the whole hold is charged"),
    ("unbooked", "a batch of settlements could not be booked; it is tried again"),
    ("charge_waits", "a charge waits for the disk"),
    ("charges_lost", "charges are lost: the disk takes no records"),
    ("journal", "the journal cannot be written: no call is admitted until it can"),
    ("end_refused", "redis refuses the end of a hold"),
    ("outbox", "a record in the outbox is damaged"),
    ("drift", "redis and the ledger differ"),
    ("given_up", "the ledger has given this node up"),
];

/// Sends by HTTP, over TLS where the DSN says so: no redirect is followed.
struct Sender;

impl TransportFactory for Sender {
    fn create_transport_with_options(&self, options: TransportOptions) -> Arc<dyn Transport> {
        let agent =
            ureq::Agent::config_builder().timeout_global(Some(SEND)).max_redirects(0).proxy(None).build();
        Arc::new(UreqHttpTransportOptions::from(options).with_agent(agent.into()).build())
    }
}
