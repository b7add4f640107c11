//! What an OpenTelemetry collector is sent (OTLP over HTTP, as protobuf), where the config names one: spans of calls, and
//! all metrics.
//!
//! Each has a thread of its own, so that neither waits for the other and no call for either. What a collector does not take
//! in time is dropped and counted (`tollgate_telemetry_dropped_total`); one that asks for time with `Retry-After` gets it.
//! Nothing waits for a collector, also not a process that leaves: both threads send what they have once more, and whoever
//! stops them goes on after two seconds, whatever became of it.
//!
//! Deliberately absent: a copy of what was not taken. Counters are sent as sums since the start of the process, so that the
//! next reading has all of them again; of spans the queue keeps what it can.

mod collector;
mod points;
mod readings;
mod spans;
mod wire;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use prometheus::proto::MetricFamily;

use crate::config::telemetry;
use crate::ops::Metrics;
use crate::{clock, entropy};

use collector::Collector;
use readings::Readings;
use spans::Sender;

pub use spans::{AttemptSpan, CallSpan, Telemetry, Trace};

/// How long a process that leaves waits for both threads together.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// How long a collector may take for a message.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for what a thread sends when the process leaves, all of it together.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// All that sends to a collector.
pub struct Exporter {
    config: telemetry::Collector,
    origin: Arc<Origin>,
    metrics: Arc<Metrics>,
    sending: Vec<Sending>,
}

/// Whose messages they are: the same for spans and metrics, and for nobody else.
#[derive(Debug)]
struct Origin {
    /// This life of the process. Two of them may run at once, when one takes over from the other.
    instance: String,
    /// The machine and its port, which stay.
    node: String,
}

/// A thread that sends.
struct Sending {
    thread: JoinHandle<()>,
    /// Dropped: it is to end.
    stop: SyncSender<()>,
    /// Closed: it has ended.
    ended: Receiver<()>,
}

impl Exporter {
    /// Nothing is sent yet. `node`: what this process is called.
    #[must_use]
    pub fn new(config: telemetry::Collector, node: String, metrics: Arc<Metrics>) -> Self {
        let origin = Arc::new(Origin { instance: entropy::instance(), node });
        Self { config, origin, metrics, sending: vec![] }
    }

    /// Starts to send spans, where the config wants it: of calls that go through what is returned.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn send_spans(&mut self) -> io::Result<Option<Telemetry>> {
        let Some(sampling) = self.config.traces else { return Ok(None) };
        let dropped = self.metrics.node.telemetry_dropped.with_label_values(&["traces"]);
        let telemetry = Telemetry::new(sampling, dropped.clone());
        let sender = Sender::new(Collector::new(&self.config), Arc::clone(&self.origin), dropped);
        let waiting = telemetry.waiting();
        self.start("spans", move |stop| sender.run(&waiting, &stop))?;
        Ok(Some(telemetry))
    }

    /// Starts to send what `gather` finds, where the config wants it.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn send_metrics(
        &mut self,
        gather: impl Fn() -> Vec<MetricFamily> + Send + 'static,
    ) -> io::Result<()> {
        let Some(every) = self.config.metrics_every else { return Ok(()) };
        let readings = Readings::new(
            Collector::new(&self.config),
            Arc::clone(&self.origin),
            every,
            &self.metrics,
            Box::new(gather),
        );
        self.start("metrics", move |stop| readings.run(&stop))
    }

    fn start(
        &mut self,
        name: &'static str,
        run: impl FnOnce(Receiver<()>) + Send + 'static,
    ) -> io::Result<()> {
        let ((stop, stopped), (ending, ended)) = (sync_channel(0), sync_channel(0));
        let run = move || {
            let _ending: SyncSender<()> = ending;
            run(stopped);
        };
        let thread = thread::Builder::new().name(format!("otlp-{name}")).spawn(run)?;
        self.sending.push(Sending { thread, stop, ended });
        Ok(())
    }

    /// Has both threads send what they have, and waits for them, two seconds at most.
    pub fn stop(self) {
        let end = clock::now() + LEAVE_MAX;
        let told = self.sending.into_iter().map(|Sending { thread, stop, ended }| {
            drop(stop);
            (thread, ended)
        });
        // Both are told before one is waited for.
        for (thread, ended) in told.collect::<Vec<_>>() {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            match ended.recv_timeout(end.saturating_duration_since(clock::now())) {
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!(thread = name, "the collector hangs: what it had not taken is lost");
                }
                _ if thread.join().is_err() => tracing::error!(thread = name, "a thread that sends broke"),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;

    #[test]
    fn a_thread_that_hangs_holds_up_no_process_that_leaves() {
        let config = telemetry::Collector {
            url: Secret::new("http://127.0.0.1:1"),
            headers: vec![],
            authorities: None,
            traces: None,
            metrics_every: None,
        };
        let mut exporter = Exporter::new(config, "node".to_owned(), Arc::new(Metrics::new().unwrap()));
        let (release, held) = sync_channel::<()>(0);
        let (told, waiting) = sync_channel(1);
        let hang = move |stop: Receiver<()>| {
            let stopped = stop.recv();
            told.send(stopped).unwrap();
            let _released = held.recv();
        };
        exporter.start("hangs", hang).unwrap();
        exporter.stop();
        assert!(waiting.recv().unwrap().is_err(), "it was told to end, and hangs all the same");
        drop(release);
    }
}
