//! A batch counts once, a late one finds its minute, and what is old goes.

use std::collections::HashMap;
use std::sync::Barrier;
use std::time::Duration;

use filters::slo::month::Month;
use filters::slo::{DAY_MS, HOUR_MS, MINUTE_MS};
use tollgate::config;
use tollgate::config::records::{Keep, Slo};
use tollgate::record::Records;
use tollgate::record::attempts::{By, Row, SERVED, Which};
use tollgate::record::minutes::{Counts, Kind, Tally};
use tollgate::record::words::Words;
use tollgate::record::writer::Batch;

use super::super::support::postgres::database;
use super::{sums, told};

/// The first of November 2026, in milliseconds since 1970.
const NOVEMBER: i64 = 1_793_491_200_000;
const DAYS_KEPT: u32 = 100;

/// In a file, and in a database.
fn in_both(test: impl Fn(&dyn Fn() -> Records)) {
    let folder = tempfile::tempdir().unwrap();
    test(&|| Records::open(folder.path()).unwrap());
    let database = database();
    test(&|| Records::of_fleet(database.ledger()));
}

/// One who writes.
struct Writer {
    records: Records,
    words: Words,
    boot: i64,
    number: i64,
}

impl Writer {
    fn new(records: Records, boot: i64) -> Self {
        Self { records, words: Words::default(), boot, number: 0 }
    }

    fn batch(&mut self) -> Batch {
        self.number += 1;
        Batch { boot: self.boot, number: self.number, ..Batch::default() }
    }

    /// Calls of a minute, by who served or failed and why.
    fn calls(&mut self, start_ms: i64, upstream: &str, cause: &str, counts: Counts) -> HashMap<Kind, Counts> {
        let words = &mut self.words;
        let kind = Kind {
            start_ms,
            model: words.number("gpt-a"),
            upstream: words.number(upstream),
            region: words.number("r0"),
            cause: words.number(cause),
        };
        HashMap::from([(kind, counts)])
    }

    fn row(&mut self, at_ms: i64, seq: i64, request: &str, attempt: u32, outcome: &str, reason: &str) -> Row {
        let words = &mut self.words;
        Row {
            at_ms,
            seq,
            request: request.into(),
            model: words.number("gpt-a"),
            candidate: words.number(&format!("u{attempt}/up-a")),
            region: words.number("r0"),
            attempt,
            reason: words.number(reason),
            elapsed_ms: 100 * i64::from(attempt),
            budget_left_ms: 5000,
            outcome: words.number(outcome),
            next: words.number("stop"),
            is_plain: attempt == 1 && outcome == SERVED,
        }
    }

    fn write(&mut self, batch: &Batch) {
        self.records.make_room(NOVEMBER / DAY_MS).unwrap();
        self.records.write(&mut self.words, batch, NOVEMBER).unwrap();
    }
}

fn good(count: u64) -> Counts {
    Counts { good: count, in_time: count, ..Counts::default() }
}

fn bad(count: u64) -> Counts {
    Counts { bad: count, ..Counts::default() }
}

fn keep(days: u32) -> Keep {
    let day = Duration::from_secs(86_400);
    Keep { attempts: 30 * day, served: day, minutes: days * day, file_bytes_max: 1 << 30 }
}

/// What callers are promised by default.
fn promised() -> Slo {
    let yaml = "listen: { http: 127.0.0.1:0, admin: 127.0.0.1:1 }\n\
                store: { embedded: { path: ./data } }\n\
                providers: { p: { dialect: openai, base_url: \"http://127.0.0.1:1/v1\" } }\n\
                models: { m: { price: { input: 1, output: 1 }, limits: { context: 9, output: 9 }, routes: [{ provider: p }] } }\n";
    config::parse(yaml, |_| None).unwrap().slo
}

#[test]
fn all_who_open_a_new_file_at_once_get_it() {
    for _ in 0..20 {
        let folder = tempfile::tempdir().unwrap();
        let (all, at) = (Barrier::new(8), folder.path());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    all.wait();
                    Records::open(at).map(drop).unwrap();
                });
            }
        });
    }
}

#[test]
fn a_batch_that_is_written_twice_counts_once() {
    in_both(|open| {
        let mut writer = Writer::new(open(), 7);
        let mut batch = writer.batch();
        batch.calls = writer.calls(NOVEMBER, "u1/up-a", "", good(3));
        batch.attempts = vec![writer.row(NOVEMBER, 0, "one", 1, SERVED, "ok")];
        writer.write(&batch);
        writer.write(&batch);
        // Nor by a process that has lost its words, and asks again for what it was not answered.
        let mut again = Writer::new(open(), 7);
        let mut same = again.batch();
        same.calls = again.calls(NOVEMBER, "u1/up-a", "", good(3));
        again.write(&same);
        let records = open();
        assert_eq!(sums(&records.minutes(None, 0, i64::MAX).unwrap()), (3, 0, 0));
        assert_eq!(sums(&records.hours(None, 0, i64::MAX).unwrap()), (3, 0, 0));
        assert_eq!(records.attempts_of("one").unwrap().len(), 1);
        // The next one does count.
        let mut next = writer.batch();
        next.calls = writer.calls(NOVEMBER, "u1/up-a", "", good(2));
        writer.write(&next);
        assert_eq!(sums(&records.minutes(None, 0, i64::MAX).unwrap()), (5, 0, 0));
    });
}

#[test]
fn a_late_batch_finds_the_minute_in_which_its_calls_began() {
    in_both(|open| {
        let (mut one, mut other) = (Writer::new(open(), 1), Writer::new(open(), 2));
        let put = |writer: &mut Writer, minute: i64, calls| {
            let mut batch = writer.batch();
            batch.calls = writer.calls(NOVEMBER + minute * MINUTE_MS, "u1/up-a", "", good(calls));
            writer.write(&batch);
        };
        put(&mut one, 0, 3);
        put(&mut one, 61, 1);
        put(&mut other, 0, 4);
        let mut late = other.batch();
        late.calls = other.calls(NOVEMBER, "u1/up-a", "connect", bad(2));
        other.write(&late);
        let tally = |start_ms, good, bad| Tally {
            model: "gpt-a".to_owned(),
            region: "r0".to_owned(),
            start_ms,
            good,
            bad,
            slow: 0,
        };
        let records = open();
        let minutes = records.minutes(Some("gpt-a"), NOVEMBER, NOVEMBER + DAY_MS).unwrap();
        assert_eq!(minutes, [tally(NOVEMBER, 7, 2), tally(NOVEMBER + 61 * MINUTE_MS, 1, 0)]);
        let hours = records.hours(Some("gpt-a"), NOVEMBER, NOVEMBER + DAY_MS).unwrap();
        assert_eq!(hours, [tally(NOVEMBER, 7, 2), tally(NOVEMBER + HOUR_MS, 1, 0)]);
        let days = records.days(Some("gpt-a"), NOVEMBER, NOVEMBER + DAY_MS).unwrap();
        assert_eq!(days, [tally(NOVEMBER, 8, 2)]);
        assert_eq!(
            records.minutes(Some("gpt-a"), NOVEMBER + MINUTE_MS, NOVEMBER + 61 * MINUTE_MS).unwrap(),
            []
        );
        assert_eq!(records.days(Some("another"), 0, i64::MAX).unwrap(), []);
    });
}

#[test]
fn two_who_write_at_once_lose_nothing() {
    const BATCHES: u64 = 40;
    in_both(|open| {
        let writers: Vec<_> = [11, 12].map(|boot| Writer::new(open(), boot)).into_iter().collect();
        std::thread::scope(|scope| {
            for mut writer in writers {
                scope.spawn(move || {
                    for number in 0..BATCHES {
                        let mut batch = writer.batch();
                        for minute in 0..5 {
                            let start_ms = NOVEMBER + minute * MINUTE_MS;
                            // New words of both at once, too.
                            let upstream = format!("u{}/up-a", number % 7);
                            batch.calls.extend(writer.calls(start_ms, &upstream, "", good(1)));
                        }
                        let seq = i64::try_from(number).unwrap();
                        batch.attempts = vec![writer.row(NOVEMBER + seq, seq, "many", 1, SERVED, "ok")];
                        writer.write(&batch);
                    }
                });
            }
        });
        let records = open();
        assert_eq!(sums(&records.minutes(None, 0, i64::MAX).unwrap()), (2 * 5 * BATCHES, 0, 0));
        assert_eq!(records.attempts_of("many").unwrap().len(), usize::try_from(2 * BATCHES).unwrap());
    });
}

#[test]
fn failovers_are_found_by_what_they_have_in_common_and_calls_by_their_id() {
    in_both(|open| {
        let mut writer = Writer::new(open(), 3);
        let mut batch = writer.batch();
        batch.attempts = vec![
            writer.row(NOVEMBER + 10, 0, "one", 1, "failed", "connect"),
            writer.row(NOVEMBER + 20, 1, "one", 2, "failed", "status_5xx"),
            writer.row(NOVEMBER + 30, 2, "one", 3, SERVED, "ok"),
            writer.row(NOVEMBER + 40, 3, "two", 1, SERVED, "ok"),
            writer.row(NOVEMBER + 50, 4, "three", 1, "failed", "connect"),
            writer.row(NOVEMBER + 60, 5, "three", 2, "left", "caller_left"),
        ];
        writer.write(&batch);
        let records = open();
        assert_eq!(
            told(&records.attempts_of("one").unwrap()),
            [
                "1 u1/up-a r0 failed connect -> stop",
                "2 u2/up-a r0 failed status_5xx -> stop",
                "3 u3/up-a r0 served ok -> stop"
            ]
        );
        assert_eq!(told(&records.attempts_of("two").unwrap()), ["1 u1/up-a r0 served ok -> stop"]);
        assert_eq!(records.attempts_of("never").unwrap(), []);

        let all = Which { from_ms: NOVEMBER, limit: 10, reason: None };
        let latest: Vec<_> =
            records.failovers(&all).unwrap().into_iter().map(|it| it.at_ms - NOVEMBER).collect();
        assert_eq!(latest, [50, 20, 10], "neither what served nor who left");
        let groups = |by, which: &Which| -> Vec<(String, u64, u64, u64)> {
            let groups = records.failovers_by(by, which).unwrap();
            groups.into_iter().map(|it| (it.key, it.failovers, it.calls, it.elapsed_ms)).collect()
        };
        let group = |key: &str, failovers, calls, elapsed| (key.to_owned(), failovers, calls, elapsed);
        assert_eq!(groups(By::Reason, &all), [group("connect", 2, 2, 200), group("status_5xx", 1, 1, 200)]);
        assert_eq!(groups(By::Upstream, &all), [group("u1/up-a", 2, 2, 200), group("u2/up-a", 1, 1, 200)]);
        assert_eq!(groups(By::Model, &all), [group("gpt-a", 3, 2, 400)]);
        let connect = Which { reason: Some("connect".to_owned()), ..all.clone() };
        assert_eq!(groups(By::Region, &connect), [group("r0", 2, 2, 200)]);
        let later = Which { from_ms: NOVEMBER + 50, ..connect };
        assert_eq!(groups(By::Region, &later), [group("r0", 1, 1, 100)]);
        assert_eq!(groups(By::Region, &Which { reason: Some("idle".to_owned()), ..all }), []);
    });
}

#[test]
fn what_is_old_goes_and_what_is_not_stays() {
    in_both(|open| {
        let mut writer = Writer::new(open(), 4);
        let now_ms = NOVEMBER + 200 * DAY_MS;
        let ages = [0, 2, 40, 150, 450];
        for (seq, age) in (0_i64..).zip(ages) {
            let at_ms = now_ms - age * DAY_MS;
            let mut batch = writer.batch();
            batch.calls = writer.calls(at_ms, "u1/up-a", "", good(1));
            let (served, failed) = (format!("served-{age}"), format!("failed-{age}"));
            batch.attempts = vec![
                writer.row(at_ms, 2 * seq, &served, 1, SERVED, "ok"),
                writer.row(at_ms, 2 * seq + 1, &failed, 1, "failed", "idle"),
            ];
            writer.records.make_room(at_ms.div_euclid(DAY_MS)).unwrap();
            writer.write(&batch);
        }
        let records = open();
        assert_eq!(records.prune(&keep(DAYS_KEPT), now_ms).unwrap(), 0);
        let has = |what: &str| -> Vec<i64> {
            let found = |age: &i64| !records.attempts_of(&format!("{what}-{age}")).unwrap().is_empty();
            ages.into_iter().filter(found).collect()
        };
        assert_eq!((has("served"), has("failed")), (vec![0], vec![0, 2]));
        assert_eq!(sums(&records.minutes(None, 0, i64::MAX).unwrap()).0, 3, "of 100 days");
        assert_eq!(sums(&records.hours(None, 0, i64::MAX).unwrap()).0, 4, "of 400 days");
        assert_eq!(
            records.prune(&keep(DAYS_KEPT), now_ms).unwrap(),
            0,
            "and again, when nothing is left to do"
        );
    });
}

#[test]
fn a_file_that_is_full_loses_its_oldest_attempts_and_no_minute() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(Records::open(folder.path()).unwrap(), 5);
    let mut batch = writer.batch();
    batch.calls = writer.calls(NOVEMBER, "u1/up-a", "", good(1));
    for seq in 0..60_000 {
        let request = format!("call-{seq}");
        let row = writer.row(NOVEMBER + seq, seq, &request, 1, SERVED, "ok");
        batch.attempts.push(row);
    }
    writer.write(&batch);
    let bytes_max = 1 << 20;
    let full = Keep { file_bytes_max: bytes_max, ..keep(DAYS_KEPT) };
    let gone = writer.records.prune(&full, NOVEMBER).unwrap();
    assert!((20_000..60_000).contains(&gone), "{gone}");
    let records = &writer.records;
    assert_eq!(records.attempts_of("call-0").unwrap(), []);
    assert_eq!(records.attempts_of("call-59999").unwrap().len(), 1);
    assert_eq!(sums(&records.minutes(None, 0, i64::MAX).unwrap()), (1, 0, 0));
    assert_eq!(records.prune(&full, NOVEMBER).unwrap(), 0, "it fits now");
}

#[test]
fn a_month_tells_what_is_left_of_it_and_what_burnt_the_rest() {
    in_both(|open| {
        let mut writer = Writer::new(open(), 6);
        // Ten minutes of outage by one upstream, one of ten calls bad by another, and the minutes around the month.
        let mut put = |minute: i64, upstream: &str, cause: &str, counts: Counts| {
            let mut batch = writer.batch();
            batch.calls = writer.calls(NOVEMBER + minute * MINUTE_MS, upstream, cause, counts);
            writer.write(&batch);
        };
        for minute in 100..110 {
            put(minute, "u1/up-a", "connect", bad(5));
        }
        put(200, "u2/up-a", "", good(9));
        put(200, "u2/up-a", "idle", bad(1));
        put(-1, "u1/up-a", "connect", bad(5));
        put(30 * 1440, "u1/up-a", "connect", bad(5));
        put(300, "u2/up-a", "slow", Counts { late: 1, ..Counts::default() });
        let month: Month = "2026-11".parse().unwrap();
        assert_eq!(month.start_ms(), NOVEMBER);
        let report = open().slo(&promised(), month, NOVEMBER + 40 * DAY_MS).unwrap();
        let [availability, latency] = report.objectives.as_slice() else { panic!("two promises") };
        assert_eq!((availability.budget_seconds, availability.burnt_seconds), (1296.0, 606.0));
        assert_eq!((availability.left_seconds, availability.good, availability.bad), (690.0, 9, 51));
        assert_eq!((availability.minutes, availability.bad_minutes), (11, 11));
        let parts = |shares: &[tollgate::record::report::Share]| -> Vec<(String, u64, f64)> {
            shares.iter().map(|it| (it.name.clone(), it.bad, it.burnt_seconds)).collect()
        };
        let part = |name: &str, bad, burnt| (name.to_owned(), bad, burnt);
        assert_eq!(parts(&availability.by_cause), [part("connect", 50, 600.0), part("idle", 1, 6.0)]);
        assert_eq!(parts(&availability.by_upstream), [part("u1/up-a", 50, 600.0), part("u2/up-a", 1, 6.0)]);
        assert_eq!(parts(&availability.by_region), [part("r0", 51, 606.0)]);
        assert_eq!(availability.worst_minutes.len(), 10);
        assert_eq!(availability.worst_minutes[0].start, "2026-11-01T01:40:00Z");
        assert_eq!((latency.bad, latency.burnt_seconds), (1, 60.0));
        // An hour after the outage began: all of its ten minutes are in it.
        let then = open().slo(&promised(), month, NOVEMBER + 160 * MINUTE_MS).unwrap();
        let rate = then.objectives[0].burn_rates["1h"];
        assert!((rate - 600.0 / (3600.0 * 0.0005)).abs() < 0.01, "{rate}");
        let text = report.markdown();
        for part in [
            "# What was promised and kept in 2026-11",
            "21m 36s",
            "| connect | 50 | 10m |",
            "11m 30s (53.2 %)",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    });
}

#[test]
fn a_month_without_calls_has_its_whole_budget() {
    in_both(|open| {
        let month: Month = "2026-02".parse().unwrap();
        let report = open().slo(&promised(), month, NOVEMBER).unwrap();
        for objective in report.objectives {
            assert_eq!((objective.minutes, objective.kept), (0, 100.0));
            assert_eq!((objective.left_seconds, objective.left_fraction), (1209.6, 1.0));
        }
    });
}

#[test]
fn a_file_of_another_version_is_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    drop(Records::open(folder.path()).unwrap());
    let file = rusqlite::Connection::open(folder.path().join("records.db")).unwrap();
    file.pragma_update(None, "user_version", 1000).unwrap();
    assert!(Records::open(folder.path()).err().unwrap().to_string().contains("use a newer tollgate"));
    let said = Records::open_for_reading(folder.path()).err().unwrap().to_string();
    assert!(said.contains("use the tollgate that serves"), "{said}");
}
