//! Takes records from calls, and writes them by a thread of its own.
//!
//! A call puts a few words into a queue and goes on: no system call, no waiting, and nobody is woken. The thread looks
//! four times a second, names what it finds, and writes it in one transaction. What a `kill -9` takes is what it has not
//! looked at yet: a quarter of a second.
//!
//! A database that does not answer is tried again. Meanwhile attempts wait up to `WAITING_MAX` of them, then the oldest
//! go, counted; good and bad calls are sums and wait on, whatever their number. A batch that was once tried stays as it
//! is until it is written, so that it can be known by its number.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use filters::ids::EndpointId;
use filters::slo::judge::{Blame, By, Judged, Verdict};
use filters::slo::{DAY_MS, MINUTE_MS, start_of};
use foldhash::fast::RandomState;

use super::attempts::{Row, SERVED};
use super::minutes::{Counts, Kind};
use super::names::{Named, Names};
use super::request::RequestId;
use super::words::{Word, Words};
use super::writer::Batch;
use super::{Home, RecordError, Records};
use crate::config::checked::Model;
use crate::config::records::{Keep, Slo};
use crate::ops::Metrics;
use crate::pool::Snapshot;
use crate::{clock, entropy};

/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(250);
/// Records that may come between two looks; more are counted and forgotten. The thread would need to be a second late
/// at sixty thousand calls a second.
const QUEUE_MAX: usize = 1 << 16;
/// Attempts that wait for a database that is away.
const WAITING_MAX: usize = 1 << 16;
/// Sums that wait for it: minutes times models, upstreams, regions and causes.
const SUMS_MAX: usize = 1 << 17;
/// Attempts that are written at once.
const BATCH_MAX: usize = 4096;
/// The pause before a database that failed is tried again; it doubles up to the longest.
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A batch with a row that the database has refused so often is given up: it stands in the way of all others.
const REFUSED_MAX: u32 = 5;
/// How often it is looked for what is old.
const PRUNE: Duration = Duration::from_secs(600);
/// How long the process that leaves tries to write what is left, and waits for a database that does not answer.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Of a call that counts for nothing that was promised.
const SAYS_NOTHING: Judged = Judged { availability: None, latency: None };

/// Where calls put their records.
pub struct Recorder {
    /// Where they are kept.
    pub home: Home,
    /// What callers are promised.
    pub slo: Slo,
    queue: Mutex<Vec<Entry>>,
    /// The process leaves, and records are to be written by then.
    leaving: OnceLock<Instant>,
    metrics: Arc<Metrics>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What waits for the thread. Thousands come between two looks: what nearly every call leaves is one, small, and not made
/// by one thread to be given back by another.
enum Entry {
    Good(Good),
    Decided(RequestId, Box<Decided>),
    Ended(Box<Ended>),
}

/// A call whose first attempt served, as good as was promised.
struct Good {
    request: RequestId,
    at_ms: i64,
    began_ms: i64,
    model: Option<Arc<Model>>,
    snapshot: Arc<Snapshot>,
    candidate: EndpointId,
    elapsed_ms: u32,
    budget_left_ms: u32,
    /// Whether it counts for each promise.
    counts: (bool, bool),
}

/// What was decided about a candidate.
pub struct Decided {
    /// In milliseconds since 1970.
    pub at_ms: i64,
    pub snapshot: Arc<Snapshot>,
    pub candidate: EndpointId,
    /// Attempts so far, this one included.
    pub attempt: u32,
    pub reason: &'static str,
    pub elapsed: Duration,
    pub budget_left: Duration,
    pub outcome: &'static str,
    pub next: Next,
}

/// What follows a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Candidate(EndpointId),
    Wait,
    Stop,
}

/// What became of a call.
pub struct Ended {
    /// When it came, in milliseconds since 1970.
    pub began_ms: i64,
    /// What was asked for.
    pub model: Option<Arc<Model>>,
    /// `None`: nobody was asked.
    pub snapshot: Option<Arc<Snapshot>>,
    /// Who served, or was cut.
    pub serving: Option<EndpointId>,
    /// Whose attempt failed last.
    pub last_failed: Option<EndpointId>,
    pub judged: Judged,
}

impl Recorder {
    /// Starts the thread. The records need not be there yet, nor answer.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn start(home: Home, keep: Keep, slo: Slo, metrics: Arc<Metrics>) -> std::io::Result<Arc<Self>> {
        let recorder = Arc::new(Self {
            home,
            slo,
            queue: Mutex::default(),
            leaving: OnceLock::new(),
            metrics,
            thread: Mutex::default(),
        });
        let work = Work::new(Arc::clone(&recorder), keep);
        let thread = std::thread::Builder::new().name("records".to_owned()).spawn(move || work.run())?;
        *recorder.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(recorder)
    }

    /// Keeps what was decided about a candidate of a call.
    pub fn decided(&self, request: &str, decided: Decided) {
        self.put(Entry::Decided(request.into(), Box::new(decided)));
    }

    /// Keeps what was decided at last about a call's candidate, if one was asked, and what became of the call, if it was
    /// one. Counts it.
    pub fn call(&self, request: &str, decided: Option<Decided>, ended: Option<Ended>) {
        if let Some(ended) = &ended {
            self.metrics.records.judged(ended.judged);
        }
        match (decided, ended) {
            (Some(decided), Some(ended)) if Good::are(&decided, &ended) => {
                self.put(Entry::Good(Good::of(request, decided, ended)));
            }
            (decided, ended) => {
                if let Some(decided) = decided {
                    self.decided(request, decided);
                }
                if let Some(ended) = ended.filter(|ended| ended.judged != SAYS_NOTHING) {
                    self.put(Entry::Ended(Box::new(ended)));
                }
            }
        }
    }

    fn put(&self, entry: Entry) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() < QUEUE_MAX {
            queue.push(entry);
            return;
        }
        drop(queue);
        self.metrics.records.dropped.with_label_values(&["queue"]).inc();
    }

    /// Takes what is there; what comes next finds as much room as this had.
    fn take(&self, room: Vec<Entry>) -> Vec<Entry> {
        std::mem::replace(&mut *self.queue.lock().unwrap_or_else(PoisonError::into_inner), room)
    }

    /// Writes what is left, and ends the thread. No call may run any more. Nothing else that is kept for people is waited for
    /// either: it has as long as this.
    pub fn stop(&self) {
        self.home.end_at(*self.leaving.get_or_init(|| clock::now() + LAST_WORDS));
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the thread of records broke: some are lost");
            }
        }
    }
}

impl Good {
    fn are(decided: &Decided, ended: &Ended) -> bool {
        let is_plain = decided.is_first_served() && decided.reason == "ok" && decided.next == Next::Stop;
        let Judged { availability, latency } = ended.judged;
        let mut verdicts = availability.into_iter().chain(latency);
        is_plain
            && ended.serving == Some(decided.candidate)
            && verdicts.all(|verdict| verdict == Verdict::Good)
    }

    fn of(request: &str, decided: Decided, ended: Ended) -> Self {
        let short = |span: Duration| u32::try_from(span.as_millis()).unwrap_or(u32::MAX);
        Self {
            request: request.into(),
            at_ms: decided.at_ms,
            began_ms: ended.began_ms,
            model: ended.model,
            snapshot: decided.snapshot,
            candidate: decided.candidate,
            elapsed_ms: short(decided.elapsed),
            budget_left_ms: short(decided.budget_left),
            counts: (ended.judged.availability.is_some(), ended.judged.latency.is_some()),
        }
    }
}

impl Decided {
    /// Whether the first candidate that was asked served the call.
    #[must_use]
    pub fn is_first_served(&self) -> bool {
        self.attempt == 1 && self.outcome == SERVED
    }
}

/// The thread's own.
struct Work {
    recorder: Arc<Recorder>,
    keep: Keep,
    records: Option<Records>,
    words: Words,
    names: Names,
    boot: i64,
    /// Of the next row.
    seq: i64,
    /// As it is until it is written.
    trying: Option<Batch>,
    /// Of the next batch.
    number: i64,
    waiting: VecDeque<Row>,
    /// The latest that were all of one kind.
    run: Option<(Kind, Counts)>,
    sums: HashMap<Kind, Counts, RandomState>,
    /// Days that have their partitions.
    days: Vec<i64>,
    refused: u32,
    pause: Duration,
    /// Not before.
    again: Instant,
    prune: Instant,
    /// It was said that records cannot be written.
    is_away: bool,
    is_dropping: bool,
}

impl Work {
    fn new(recorder: Arc<Recorder>, keep: Keep) -> Self {
        let now = clock::now();
        Self {
            recorder,
            keep,
            records: None,
            words: Words::default(),
            names: Names::default(),
            boot: entropy::boot(),
            seq: 0,
            trying: None,
            number: 1,
            waiting: VecDeque::new(),
            run: None,
            sums: HashMap::default(),
            days: vec![],
            refused: 0,
            pause: PAUSE,
            again: now,
            prune: now,
            is_away: false,
            is_dropping: false,
        }
    }

    fn run(mut self) {
        // For who asks before the first call. What is not there now is tried again when something is to be written.
        self.records = self.recorder.home.open().ok();
        let mut spare = vec![];
        let end = loop {
            if let Some(end) = self.recorder.leaving.get() {
                break *end;
            }
            std::thread::park_timeout(LOOK);
            spare = self.look(spare);
            self.write();
            self.prune();
        };
        self.look(vec![]);
        while self.has_something() && clock::now() < end {
            self.again = clock::now();
            self.write();
            if self.has_something() {
                std::thread::park_timeout(LOOK);
            }
        }
        if self.has_something() {
            let tried = self.trying.as_ref().map_or((0, 0), |it| (it.attempts.len(), it.calls.len()));
            let (attempts, sums) = (self.waiting.len() + tried.0, self.sums.len() + tried.1);
            tracing::error!(
                attempts,
                sums,
                "records could not be written before the process left: they are lost"
            );
        }
    }

    /// Names what has come. Answers the queue's own room, for the next time.
    fn look(&mut self, spare: Vec<Entry>) -> Vec<Entry> {
        let mut entries = self.recorder.take(spare);
        for entry in entries.drain(..) {
            match entry {
                Entry::Good(good) => self.good(good),
                Entry::Decided(request, decided) => self.decided(request, *decided),
                Entry::Ended(ended) => self.ended(&ended),
            }
        }
        self.count_run();
        self.recorder.metrics.count_answered();
        self.recorder.metrics.records.waiting.set(i64::try_from(self.waiting.len()).unwrap_or(i64::MAX));
        entries
    }

    fn good(&mut self, good: Good) {
        let Good { request, at_ms, began_ms, model, snapshot, candidate, elapsed_ms, budget_left_ms, counts } =
            good;
        let words = &mut self.words;
        let named = self.names.of(words, &snapshot, candidate);
        let row = Row {
            at_ms,
            seq: self.seq,
            request,
            model: named.model,
            candidate: named.name,
            region: named.region,
            attempt: 1,
            reason: words.ours("ok"),
            elapsed_ms: elapsed_ms.into(),
            budget_left_ms: budget_left_ms.into(),
            outcome: words.ours(SERVED),
            next: words.ours("stop"),
            is_plain: true,
        };
        let kind = Kind {
            start_ms: start_of(began_ms, MINUTE_MS),
            model: asked(words, model.as_deref(), Some(named)),
            upstream: named.name,
            region: named.region,
            cause: words.ours(""),
        };
        self.keep(row);
        let counts = Counts { good: counts.0.into(), in_time: counts.1.into(), ..Counts::default() };
        if counts != Counts::default() {
            self.count(kind, &counts);
        }
    }

    fn decided(&mut self, request: RequestId, decided: Decided) {
        let is_plain = decided.is_first_served();
        let Decided { at_ms, snapshot, candidate, attempt, reason, elapsed, budget_left, outcome, next } =
            decided;
        let (words, names) = (&mut self.words, &mut self.names);
        let next = match next {
            Next::Candidate(id) => names.of(words, &snapshot, id).name,
            Next::Wait => words.ours("wait"),
            Next::Stop => words.ours("stop"),
        };
        let Named { model, name, region } = names.of(words, &snapshot, candidate);
        let row = Row {
            at_ms,
            seq: self.seq,
            request,
            model,
            candidate: name,
            region,
            attempt,
            reason: words.ours(reason),
            elapsed_ms: millis(elapsed),
            budget_left_ms: millis(budget_left),
            outcome: words.ours(outcome),
            next,
            is_plain,
        };
        self.keep(row);
    }

    /// Keeps a row, which has the next number, until it is written.
    fn keep(&mut self, row: Row) {
        self.seq += 1;
        if self.waiting.len() >= WAITING_MAX {
            self.waiting.pop_front();
            self.dropped("attempts", 1);
        }
        self.waiting.push_back(row);
    }

    fn ended(&mut self, ended: &Ended) {
        let Judged { availability, latency } = ended.judged;
        let good = Counts { good: 1, ..Counts::default() };
        let bad = Counts { bad: 1, ..Counts::default() };
        let in_time = Counts { in_time: 1, ..Counts::default() };
        let late = Counts { late: 1, ..Counts::default() };
        for (verdict, well, badly) in [(availability, good, bad), (latency, in_time, late)] {
            let (cause, who, counts) = match verdict {
                None => continue,
                Some(Verdict::Good) => ("", ended.serving, well),
                Some(Verdict::Bad(Blame { cause, by })) => {
                    let who = match by {
                        By::Ours => None,
                        By::Serving => ended.serving,
                        By::LastFailed => ended.last_failed,
                    };
                    (cause, who, badly)
                }
            };
            let who = ended.snapshot.as_ref().zip(who);
            let words = &mut self.words;
            let named = who.map(|(snapshot, id)| self.names.of(words, snapshot, id));
            let nothing = words.ours("");
            let kind = Kind {
                start_ms: start_of(ended.began_ms, MINUTE_MS),
                model: asked(words, ended.model.as_deref(), named),
                upstream: named.map_or(nothing, |named| named.name),
                region: named.map_or(nothing, |named| named.region),
                cause: words.ours(cause),
            };
            self.count(kind, &counts);
        }
    }

    /// Counts one more of a kind; many in a row are mostly of one.
    fn count(&mut self, kind: Kind, counts: &Counts) {
        match &mut self.run {
            Some((same, sum)) if *same == kind => sum.add(counts),
            _ => {
                self.count_run();
                self.run = Some((kind, *counts));
            }
        }
    }

    /// Adds what was counted in a row.
    fn count_run(&mut self) {
        let Some((kind, counts)) = self.run.take() else { return };
        if self.sums.len() >= SUMS_MAX && !self.sums.contains_key(&kind) {
            self.dropped("sums", 1);
            return;
        }
        self.sums.entry(kind).or_default().add(&counts);
    }

    fn dropped(&mut self, what: &'static str, count: u64) {
        self.recorder.metrics.records.dropped.with_label_values(&[what]).inc_by(count);
        if !std::mem::replace(&mut self.is_dropping, true) {
            tracing::warn!(what, "records are dropped: see tollgate_records_dropped_total");
        }
    }

    fn has_something(&self) -> bool {
        self.trying.is_some() || !self.waiting.is_empty() || !self.sums.is_empty()
    }

    /// Writes what waits, batch by batch, until nothing does or the database says no.
    fn write(&mut self) {
        while self.has_something() && self.again <= clock::now() {
            if self.trying.is_none() {
                let attempts = self.next_rows();
                let calls = self.sums.drain().collect();
                self.trying = Some(Batch { boot: self.boot, number: self.number, attempts, calls });
                self.number += 1;
            }
            match self.try_once() {
                Ok(()) => self.written(),
                Err(error) => self.failed(&error),
            }
        }
    }

    /// Those of the next batch; not moved where they are all that wait.
    fn next_rows(&mut self) -> Vec<Row> {
        let count = self.waiting.len();
        if count > BATCH_MAX {
            return self.waiting.drain(..BATCH_MAX).collect();
        }
        std::mem::replace(&mut self.waiting, VecDeque::with_capacity(count)).into()
    }

    fn try_once(&mut self) -> Result<(), RecordError> {
        let now_ms = clock::unix_ms();
        let Some(batch) = &mut self.trying else { return Ok(()) };
        let records = match &mut self.records {
            Some(records) => records,
            none => none.insert(self.recorder.home.open()?),
        };
        // What is kept no more need not be written, and has no partition.
        let oldest_ms = now_ms.saturating_sub(millis(self.keep.minutes));
        batch.calls.retain(|kind, _| kind.start_ms >= oldest_ms);
        let days: BTreeSet<i64> = batch.attempts.iter().map(|row| row.at_ms.div_euclid(DAY_MS)).collect();
        for day in days {
            if !self.days.contains(&day) {
                records.make_room(day)?;
                self.days.push(day);
            }
        }
        records.write(&mut self.words, batch, now_ms)
    }

    fn written(&mut self) {
        if let Some(batch) = self.trying.take() {
            let count = u64::try_from(batch.attempts.len()).unwrap_or(u64::MAX);
            self.recorder.metrics.records.written.inc_by(count);
        }
        (self.pause, self.refused, self.is_dropping) = (PAUSE, 0, false);
        if std::mem::replace(&mut self.is_away, false) {
            tracing::info!("records are written again");
        }
    }

    fn failed(&mut self, error: &RecordError) {
        if !std::mem::replace(&mut self.is_away, true) {
            tracing::warn!(%error, "records cannot be written: they wait");
        }
        self.again = clock::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        // A partition may be gone.
        self.days.clear();
        if !error.is_about_what_was_written() {
            return;
        }
        self.refused += 1;
        if self.refused >= REFUSED_MAX
            && let Some(batch) = self.trying.take()
        {
            tracing::error!(%error, "records were refused again and again: a batch is given up");
            let count = u64::try_from(batch.attempts.len() + batch.calls.len()).unwrap_or(u64::MAX);
            self.dropped("refused", count);
            self.refused = 0;
        }
    }

    /// Takes away what is old, now and then.
    fn prune(&mut self) {
        let now = clock::now();
        if self.prune > now || self.is_away {
            return;
        }
        let Some(records) = &self.records else { return };
        self.prune = now + PRUNE;
        match records.prune(&self.keep, clock::unix_ms()) {
            Ok(0) => {}
            Ok(early) => {
                tracing::warn!(early, "records.db is full: its oldest attempts went before their time");
            }
            Err(error) => tracing::warn!(%error, "old records could not be taken away"),
        }
        self.days.clear();
    }
}

/// The asked model: nearly always the one whose route served.
fn asked(words: &mut Words, model: Option<&Model>, served: Option<Named>) -> Word {
    let asked = model.map_or("", |model| model.name.as_str());
    let model = served.map(|named| named.model).filter(|model| words.text(*model) == asked);
    model.unwrap_or_else(|| words.number(asked))
}

fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use filters::slo::Allowance;
    use filters::slo::judge::Limits;

    use super::*;

    const KEEP: Keep = Keep {
        attempts: Duration::from_secs(86_400),
        served: Duration::from_secs(86_400),
        minutes: Duration::from_secs(35 * 86_400),
        file_bytes_max: 1 << 30,
    };

    fn promised() -> Slo {
        let half = Allowance::of_objective(500_000).unwrap();
        let [usual, long, reasoning] = [3, 10, 60].map(Duration::from_secs);
        let first_event = Limits { usual, long, long_prompt_tokens: 16_000, reasoning };
        Slo { availability: half, latency: half, first_event }
    }

    /// Nobody takes from its queue.
    fn idle(data: &Path) -> Arc<Recorder> {
        Arc::new(Recorder {
            home: Home::Folder(data.to_owned()),
            slo: promised(),
            queue: Mutex::default(),
            leaving: OnceLock::new(),
            metrics: Arc::new(Metrics::new().unwrap()),
            thread: Mutex::default(),
        })
    }

    fn good() -> Ended {
        Ended {
            began_ms: clock::unix_ms(),
            model: None,
            snapshot: None,
            serving: None,
            last_failed: None,
            judged: Judged { availability: Some(Verdict::Good), latency: None },
        }
    }

    fn dropped(recorder: &Recorder, reason: &str) -> u64 {
        recorder.metrics.records.dropped.with_label_values(&[reason]).get()
    }

    #[test]
    fn a_full_queue_forgets_what_comes_and_counts_it() {
        let recorder = idle(Path::new("nowhere"));
        for _ in 0..QUEUE_MAX + 7 {
            recorder.call("", None, Some(good()));
        }
        assert_eq!((recorder.take(vec![]).len(), dropped(&recorder, "queue")), (QUEUE_MAX, 7));
        recorder.call("", None, Some(good()));
        assert_eq!(recorder.take(vec![]).len(), 1, "there is room again");
    }

    #[test]
    fn what_nearly_every_call_leaves_is_one_entry_and_written_as_all_others_are() {
        assert!(size_of::<Entry>() <= 96, "{}", size_of::<Entry>());
        let root = tempfile::tempdir().unwrap();
        let catalogue = crate::config::checked::Catalogue::default();
        let routing = crate::config::checked::Routing {
            deadline: Duration::ZERO,
            attempts_max: 1,
            stream_max: Duration::ZERO,
            explore: false,
            warm: false,
        };
        let snapshot = Arc::new(Snapshot::new(catalogue, routing).unwrap());
        let now_ms = clock::unix_ms();
        let decided = |attempt, outcome| Decided {
            at_ms: now_ms,
            snapshot: Arc::clone(&snapshot),
            candidate: EndpointId(3),
            attempt,
            reason: "ok",
            elapsed: Duration::from_millis(11),
            budget_left: Duration::from_millis(13),
            outcome,
            next: Next::Stop,
        };
        let ended = |serving, latency| Ended {
            snapshot: Some(Arc::clone(&snapshot)),
            serving: Some(EndpointId(serving)),
            judged: Judged { availability: Some(Verdict::Good), latency },
            ..good()
        };
        let late = Some(Verdict::Bad(Blame { cause: "slow", by: By::Serving }));
        let recorder = idle(root.path());
        for (request, attempt, outcome, serving, latency, entries) in [
            ("plain", 1, SERVED, 3, None, 1),
            ("in time", 1, SERVED, 3, Some(Verdict::Good), 1),
            ("late", 1, SERVED, 3, late, 2),
            ("second", 2, SERVED, 3, None, 2),
            ("left", 1, "left", 3, None, 2),
            ("another's", 1, SERVED, 2, None, 2),
        ] {
            let before = recorder.queue.lock().unwrap().len();
            recorder.call(request, Some(decided(attempt, outcome)), Some(ended(serving, latency)));
            assert_eq!(recorder.queue.lock().unwrap().len() - before, entries, "{request}");
        }
        let mut work = Work::new(Arc::clone(&recorder), KEEP);
        work.look(vec![]);
        work.write();
        let records = Records::open_for_reading(root.path()).unwrap();
        for (request, attempt, outcome) in
            [("plain", 1, SERVED), ("late", 1, SERVED), ("second", 2, SERVED), ("left", 1, "left")]
        {
            let found = records.attempts_of(request).unwrap();
            let [found] = found.as_slice() else { panic!("{request}: {found:?}") };
            assert_eq!((found.at_ms, found.attempt, found.outcome.as_str()), (now_ms, attempt, outcome));
            assert_eq!((found.elapsed_ms, found.budget_left_ms), (11, 13));
            assert_eq!((found.reason.as_str(), found.next.as_str()), ("ok", "stop"));
        }
        let minutes = records.minutes(None, 0, i64::MAX).unwrap();
        let sum = |count: fn(&super::super::minutes::Tally) -> u64| minutes.iter().map(count).sum::<u64>();
        assert_eq!((sum(|it| it.good), sum(|it| it.bad), sum(|it| it.slow)), (6, 0, 1));
    }

    #[test]
    fn what_says_nothing_takes_no_room() {
        let recorder = idle(Path::new("nowhere"));
        recorder.call("", None, Some(Ended { judged: SAYS_NOTHING, ..good() }));
        assert!(recorder.take(vec![]).is_empty());
    }

    #[test]
    fn sums_wait_for_a_place_that_cannot_be_had_and_are_written_once() {
        let root = tempfile::tempdir().unwrap();
        let data = root.path().join("data");
        let recorder = idle(&data);
        let mut work = Work::new(Arc::clone(&recorder), KEEP);
        for round in 1..=3 {
            recorder.call("", None, Some(good()));
            work.look(vec![]);
            work.again = clock::now();
            work.write();
            assert!(work.has_something() && work.is_away, "round {round}");
        }
        assert_eq!(work.trying.as_ref().map(|batch| batch.number), Some(1), "it stays as it is");
        std::fs::create_dir(&data).unwrap();
        work.again = clock::now();
        work.write();
        assert!(!work.has_something() && !work.is_away);
        let records = Records::open_for_reading(&data).unwrap();
        let calls: u64 = records.minutes(None, 0, i64::MAX).unwrap().iter().map(|it| it.good).sum();
        assert_eq!((calls, dropped(&recorder, "sums")), (3, 0));
    }

    #[test]
    fn a_batch_that_is_refused_for_ever_does_not_stand_in_the_way_for_ever() {
        let root = tempfile::tempdir().unwrap();
        let recorder = idle(root.path());
        let mut work = Work::new(Arc::clone(&recorder), KEEP);
        let word = work.words.number("same");
        let row = Row {
            at_ms: 0,
            seq: 0,
            request: "same".into(),
            model: word,
            candidate: word,
            region: word,
            attempt: 1,
            reason: word,
            elapsed_ms: 0,
            budget_left_ms: 0,
            outcome: word,
            next: word,
            is_plain: false,
        };
        let attempts = vec![row.clone(), row];
        work.trying = Some(Batch { boot: work.boot, number: 1, attempts, calls: HashMap::new() });
        for _ in 0..REFUSED_MAX {
            work.again = clock::now();
            work.write();
        }
        assert!(!work.has_something());
        assert_eq!(dropped(&recorder, "refused"), 2);
    }

    #[test]
    fn a_recorder_that_stops_writes_what_it_has() {
        let root = tempfile::tempdir().unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let recorder =
            Recorder::start(Home::Folder(root.path().to_owned()), KEEP, promised(), metrics).unwrap();
        for _ in 0..100 {
            recorder.call("", None, Some(good()));
        }
        recorder.stop();
        let records = Records::open_for_reading(root.path()).unwrap();
        assert_eq!(records.minutes(None, 0, i64::MAX).unwrap().iter().map(|it| it.good).sum::<u64>(), 100);
    }
}
