//! Judges what was seen against what a case expects: one method per field, every field by name.
//!
//! Some things hold for every case and need no word of it: no hold is left, the books are right, no
//! secret is in the logs, no upstream was asked behind the end of its script, and the gateway's own
//! count of attempts is what the upstreams saw.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regex::Regex;
use serde_json::Value;

use super::books::{Books, Settlement};
use super::case::{Also, AtMost, Case, Expect, Later};
use super::client::{Exchange, Sent, value_at};
use super::config::{Model, NATIVE_MODEL};
use super::gateway::{value, whole};
use super::infra::plain_call;
use super::play::{Seen, ask};
use super::relay::Command;
use super::upstream::{Asked, Mode};
use super::want::{Want, clip, short};

/// What an attempt's outcome says of its route. The words are those of `tollgate_attempts_total`.
const OUTCOMES: [(&str, Record); 18] = [
    ("served", Record::Success),
    ("connect", Record::Failure),
    ("first_byte", Record::Failure),
    ("first_event", Record::Failure),
    ("deadline", Record::Failure),
    ("broken", Record::Failure),
    ("status_5xx", Record::Failure),
    ("status_408", Record::Failure),
    ("redirect", Record::Failure),
    ("empty", Record::Failure),
    ("wrong_type", Record::Failure),
    ("unreadable", Record::Failure),
    ("cut", Record::Failure),
    ("status_429", Record::Neutral),
    ("status_403", Record::Neutral),
    ("credential", Record::Neutral),
    ("caller_fault", Record::Neutral),
    ("left", Record::Neutral),
];
/// How long calls may be refused when everything runs again.
const BACK: Duration = Duration::from_secs(5);
/// As above, for what breaks in the gateway itself.
const OURS: (&str, Record) = ("ours", Record::Neutral);
/// Never in a log, whatever happens.
const SECRETS: [&str; 3] = ["sk-test-alpha", "sk-test-beta", "prov-key-"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Record {
    Success,
    Failure,
    Neutral,
}

/// One thing that was not as expected.
#[derive(Clone, Debug)]
pub struct Failure {
    pub field: String,
    pub expected: String,
    pub seen: String,
    /// More than one line can say.
    pub details: String,
}

impl Failure {
    pub fn said(field: &str, expected: &str, seen: &str) -> Self {
        Self {
            field: field.to_owned(),
            expected: expected.to_owned(),
            seen: seen.to_owned(),
            details: String::new(),
        }
    }
}

/// The part of a run that an expectation speaks of.
#[derive(Clone)]
struct Scope<'a> {
    calls: Vec<&'a Exchange>,
    settlements: Vec<&'a Settlement>,
    access: Vec<&'a Value>,
    /// All of the run, not one call of a sequence.
    whole: bool,
}

/// What is wrong, in the order of the fields.
pub async fn judge(seen: &mut Seen) -> Vec<Failure> {
    let case = seen.case.clone();
    let mut failures = {
        let mut judge = Judge { case: &case, seen, failures: vec![] };
        let scope = judge.whole();
        judge.expect(&case.expect, &scope);
        judge.always(&case.expect);
        judge.failures
    };
    failures.extend(afterwards(&case, seen).await);
    let details = details(seen);
    for failure in &mut failures {
        failure.details.clone_from(&details);
    }
    failures
}

struct Judge<'a> {
    case: &'a Case,
    seen: &'a Seen,
    failures: Vec<Failure>,
}

impl<'a> Judge<'a> {
    fn whole(&self) -> Scope<'a> {
        Scope {
            calls: self.seen.calls.iter().flatten().collect(),
            settlements: self.seen.settlements.iter().collect(),
            access: self.seen.access.iter().collect(),
            whole: true,
        }
    }

    /// One entry of a sequence: its calls, and what the books and logs have under their request ids.
    fn entry(&self, calls: &'a [Exchange]) -> Scope<'a> {
        let ids: Vec<&str> = calls.iter().filter_map(|call| call.headers.find("x-request-id")).collect();
        Scope {
            calls: calls.iter().collect(),
            settlements: self.seen.settlements.iter().filter(|s| ids.contains(&s.request.as_str())).collect(),
            access: self
                .seen
                .access
                .iter()
                .filter(|a| a["request_id"].as_str().is_some_and(|id| ids.contains(&id)))
                .collect(),
            whole: false,
        }
    }

    fn fail(&mut self, field: &str, expected: &str, seen: &str) {
        self.failures.push(Failure::said(field, expected, &clip(seen, 200)));
    }

    fn want(&mut self, field: &str, want: &Want, seen: &Value) {
        if let Err(expected) = want.judge(seen, self.seen.start_nano) {
            self.fail(field, &expected, &short(seen));
        }
    }

    fn maybe(&mut self, field: &str, want: Option<&Want>, seen: impl FnOnce() -> Value) {
        if let Some(want) = want {
            self.want(field, want, &seen());
        }
    }

    fn truth(&mut self, field: &str, want: Option<bool>, seen: impl FnOnce() -> bool) {
        if let Some(want) = want {
            let seen = seen();
            if want != seen {
                self.fail(field, &want.to_string(), &seen.to_string());
            }
        }
    }

    /// Every field is read in here: one that nobody reads is a warning of the compiler.
    fn expect(&mut self, expect: &Expect, scope: &Scope<'a>) {
        self.of_calls(expect, scope);
        self.of_upstreams(expect, scope);
        self.of_money(expect, scope);
        self.of_the_process(expect, scope);
        self.sequence(&expect.sequence);
        self.any_of(&expect.any_of, scope);
        self.truth("consistent_model", expect.consistent_model, || consistent(self.seen));
        self.after_restart(expect.after_restart.as_deref());
        for (field, told, why) in [
            ("window_charge", expect.window_charge.is_some(), "the gateway does not tell windows"),
            ("check", expect.check.is_some(), "it has calls, so it is not played as a scenario"),
        ] {
            if told {
                self.fail(field, "something that can be seen here", why);
            }
        }
    }

    fn of_the_process(&mut self, expect: &Expect, scope: &Scope<'a>) {
        self.latency(expect.latency_ms.as_ref(), scope);
        for (what, want) in expect.during.iter().flatten() {
            let statuses = self.seen.during.get(what).into_iter().flatten();
            let seen: Vec<Value> = statuses.map(|status| Value::from(*status)).collect();
            if !seen.iter().any(|status| want.judge(status, 0).is_ok()) {
                self.fail(&format!("during {what}"), &words(Some(want)), &short(&Value::from(seen)));
            }
        }
        self.maybe("exit_code", expect.exit_code.as_ref(), || self.seen.exit.into());
        self.log_status(expect.log_status.as_ref(), scope);
        self.log_texts(&expect.log_contains, &expect.log_not_contains);
        if let Some(limit) = expect.rss_growth_mb_max {
            let (before, after) = self.seen.rss_kib;
            let most = Want::Within { min: None, max: Some(limit as f64) };
            self.want("rss_growth_mb_max", &most, &(after.saturating_sub(before) / 1024).into());
        }
        let negative = || {
            let in_redis = self.seen.in_redis.as_ref().is_some_and(|(_, numbers)| !numbers.is_empty());
            in_redis || self.seen.metrics.iter().any(|s| s.value < 0.0)
        };
        self.truth("negative_counters", expect.negative_counters, negative);
        self.redis_commands(expect.redis_commands.as_ref());
        if let Some(limit) = expect.recovers_within_ms {
            match self.seen.recovered {
                None => self.fail("recovers_within_ms", "something that can recover", "no store was broken"),
                Some(None) => self.fail("recovers_within_ms", &limit.to_string(), "never"),
                Some(Some(took)) if millis(took) > limit => {
                    self.fail("recovers_within_ms", &limit.to_string(), &millis(took).to_string());
                }
                Some(Some(_)) => {}
            }
        }
        // Where a store broke, one more call tells what the limit's own counter says: see `afterwards`.
        self.maybe("rpm_used", expect.rpm_used.as_ref().filter(|_| !self.asks_again(scope)), || {
            scope.calls.iter().rev().find_map(|call| used(call, "requests")).into()
        });
        if expect.tpm_used.is_some() && !scope.whole {
            self.fail("tpm_used", "something that can be seen here", "it is told of all calls together only");
        }
    }

    fn asks_again(&self, scope: &Scope<'a>) -> bool {
        scope.whole && self.seen.stores_broke
    }

    /// What calls waited for. A function is a script of another name, and what counts of taking one in is how often
    /// the same was.
    fn redis_commands(&mut self, wants: Option<&Value>) {
        let Some(wants) = wants.and_then(Value::as_object) else { return };
        let Some(commands) = &self.seen.commands else {
            return self.fail("redis_commands", "commands that somebody counts", "nobody does here");
        };
        for (names, want) in wants {
            let count: usize = names.split('|').map(|name| count_of(commands, name.trim())).sum();
            match serde_json::from_value::<Want>(want.clone()) {
                Ok(want) => self.want(&format!("redis_commands {names}"), &want, &count.into()),
                Err(error) => self.fail("redis_commands", "a demand", &error.to_string()),
            }
        }
    }

    // ---- what callers see ----

    fn of_calls(&mut self, expect: &Expect, scope: &Scope<'a>) {
        if scope.calls.is_empty() {
            self.fail("call", "an answer", "there was no call");
        }
        if let Some(counts) = &expect.status_counts {
            self.status_counts(counts, scope);
        }
        let short = holds_at_once(self.case).filter(|_| scope.whole && expect.status.is_some());
        if let Some(carried) = short {
            let served = scope.calls.iter().filter(|call| {
                expect.status.as_ref().is_some_and(|want| want.judge(&call.status.into(), 0).is_ok())
            });
            let served = served.count();
            if served < carried {
                self.fail(
                    "status",
                    &format!("{} of {carried} calls", words(expect.status.as_ref())),
                    &served.to_string(),
                );
            }
        }
        for call in &scope.calls {
            // The balance does not carry all of them at once: no money is the only true answer to the others.
            if short.is_some() && call.status == Some(402) {
                continue;
            }
            self.head(expect, call);
            self.end_of_answer(expect, call);
            self.body(expect, call);
            self.times(expect.first_event_within_ms.as_ref(), expect.within_ms.as_ref(), call);
        }
    }

    fn head(&mut self, expect: &Expect, call: &Exchange) {
        let Expect { status, first_status, second_status, .. } = expect;
        let any = status.as_ref().or(first_status.as_ref());
        if call.status.is_none() && call.error.is_some() && any.is_some() {
            return self.fail("status", &words(any), call.error.as_deref().unwrap_or_default());
        }
        let nth = |n: usize| call.responses.get(n).copied().into();
        self.maybe("status", status.as_ref(), || call.status.into());
        self.maybe("first_status", first_status.as_ref(), || nth(0));
        self.maybe("second_status", second_status.as_ref(), || nth(1));
        let answers = call.responses.len();
        self.maybe("responses_on_connection", expect.responses_on_connection.as_ref(), || answers.into());
        self.interim(expect.interim.as_deref(), expect.interim_within_ms.as_ref(), call);
        self.headers("headers", expect.headers.as_ref(), call);
        if let (Some(rules), Some(status)) = (&expect.headers_on, call.status) {
            self.headers("headers_on", rules.get(&status.to_string()), call);
        }
    }

    /// Without a word of it, an answer that has a status has to have its end too.
    fn end_of_answer(&mut self, expect: &Expect, call: &Exchange) {
        let Expect { status, connection_closed, aborted, chunked_end, .. } = expect;
        self.truth("connection_closed", *connection_closed, || call.closed);
        if aborted.is_some_and(|want| want != call.aborted()) {
            let seen = format!("{}: {:?} {}", call.aborted(), call.status, call.body_text());
            self.fail("aborted", &words(aborted.map(|want| Want::Is(want.into())).as_ref()), &seen);
        }
        let told = *aborted == Some(true) || chunked_end.is_some() || status.is_none();
        if !told && call.status.is_some() && call.aborted() {
            let why = call.error.as_deref().unwrap_or("the connection ended in the middle of the body");
            self.fail("end of the answer", "a whole body", why);
        }
        self.chunked_end(chunked_end.as_deref(), call);
    }

    fn body(&mut self, expect: &Expect, call: &Exchange) {
        let body = call.body_text();
        self.maybe("client_text", expect.client_text.as_ref(), || call.text().into());
        let length = || call.text().chars().count().into();
        self.maybe("client_text_len", expect.client_text_len.as_ref(), length);
        if let Some(calls) = &expect.tool_calls
            && *calls != call.tool_calls()
        {
            self.fail("tool_calls", &short(calls), &short(&call.tool_calls()));
        }
        self.texts("body", &body, &expect.body_contains, &expect.body_not_contains);
        self.patterns(&body, &expect.body_matches, &expect.body_not_matches);
        self.json(expect_json(expect.body_is_json, expect.body_json.as_ref(), &expect.body_absent), call);
        self.every_data(expect.every_data_is_json, call);
        self.every_line(expect.every_line_matches.as_deref(), call);
        for (part, want) in expect.count.iter().flatten() {
            self.want(&format!("count {part:?}"), want, &body.matches(part.as_str()).count().into());
        }
        self.truth("encoding_consistent", expect.encoding_consistent, || encoding_is_consistent(call));
    }

    fn status_counts(&mut self, counts: &BTreeMap<String, Want>, scope: &Scope<'a>) {
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        for call in &scope.calls {
            let status = call.status.map_or_else(|| "none".to_owned(), |status| status.to_string());
            *seen.entry(status).or_default() += 1;
        }
        let right = counts
            .iter()
            .all(|(status, want)| want.judge(&seen.get(status).copied().unwrap_or(0).into(), 0).is_ok());
        let known = seen.keys().all(|status| counts.contains_key(status));
        if !right || !known {
            let wants = counts.iter().map(|(status, want)| format!("{status}: {}", words(Some(want))));
            let wants: Vec<String> = wants.collect();
            self.fail("status_counts", &wants.join(", "), &format!("{seen:?}"));
        }
    }

    fn interim(&mut self, interim: Option<&[u16]>, within: Option<&AtMost>, call: &Exchange) {
        let seen: Vec<u16> = call.interim.iter().map(|(status, _)| *status).collect();
        if let Some(interim) = interim
            && interim != seen
        {
            self.fail("interim", &format!("{interim:?}"), &format!("{seen:?}"));
        }
        if let Some(AtMost(within)) = within {
            let took = call.interim.first().map(|(_, at)| millis(*at - call.began));
            self.want("interim_within_ms", within, &took.into());
        }
    }

    fn headers(&mut self, field: &str, rules: Option<&BTreeMap<String, Want>>, call: &Exchange) {
        for (name, want) in rules.into_iter().flatten() {
            let seen = call.headers.find(name).map_or(Value::Null, Value::from);
            self.want(&format!("{field} {name}"), want, &seen);
        }
    }

    fn texts(&mut self, field: &str, text: &str, contains: &[String], lacks: &[String]) {
        for part in contains.iter().filter(|part| !text.contains(part.as_str())) {
            self.fail(&format!("{field}_contains"), &format!("{part:?}"), text);
        }
        for part in lacks.iter().filter(|part| text.contains(part.as_str())) {
            self.fail(&format!("{field}_not_contains"), &format!("no {part:?}"), &around(text, part));
        }
    }

    fn patterns(&mut self, text: &str, matches: &[String], lacks: &[String]) {
        for (pattern, wanted) in matches.iter().map(|p| (p, true)).chain(lacks.iter().map(|p| (p, false))) {
            let field = if wanted { "body_matches" } else { "body_not_matches" };
            match Regex::new(pattern) {
                Ok(found) if found.is_match(text) == wanted => {}
                Ok(_) => self.fail(field, &format!("{}/{pattern}/", if wanted { "" } else { "no " }), text),
                Err(error) => self.fail(field, "a good pattern", &error.to_string()),
            }
        }
    }

    fn json(&mut self, rules: Option<JsonRules<'_>>, call: &Exchange) {
        let Some(JsonRules { is_json, members, absent }) = rules else { return };
        let parsed: Result<Value, _> = serde_json::from_slice(&call.body);
        if let Some(want) = is_json
            && parsed.is_ok() != want
        {
            self.fail("body_is_json", &want.to_string(), &call.body_text());
        }
        let body = parsed.unwrap_or_default();
        for (path, want) in members.into_iter().flatten() {
            self.want(&format!("body_json {path}"), want, &value_at(&body, path));
        }
        for path in absent.iter().filter(|path| !value_at(&body, path).is_null()) {
            self.fail("body_absent", &format!("no {path}"), &short(&value_at(&body, path)));
        }
    }

    fn every_data(&mut self, want: Option<bool>, call: &Exchange) {
        if want != Some(true) {
            return;
        }
        let broken = |data: &&str| *data != "[DONE]" && serde_json::from_str::<Value>(data).is_err();
        let data = call.reader.events.iter().map(|event| event.data.as_str());
        if let Some(data) = data.into_iter().find(broken) {
            self.fail("every_data_is_json", "JSON", data);
        }
    }

    fn every_line(&mut self, pattern: Option<&str>, call: &Exchange) {
        let Some(pattern) = pattern else { return };
        let Ok(known) = Regex::new(pattern) else {
            return self.fail("every_line_matches", "a good pattern", pattern);
        };
        let text = call.body_text();
        if let Some(line) = text.lines().find(|line| !known.is_match(line)) {
            self.fail("every_line_matches", &format!("/{pattern}/"), line);
        }
    }

    fn chunked_end(&mut self, want: Option<&str>, call: &Exchange) {
        let seen = match (call.chunked, call.complete) {
            (true, true) => "clean",
            (true, false) => "cut",
            (false, _) => "not chunked",
        };
        if let Some(want) = want
            && want != seen
        {
            self.fail("chunked_end", want, seen);
        }
    }

    fn times(&mut self, first_event: Option<&AtMost>, within: Option<&AtMost>, call: &Exchange) {
        if let Some(AtMost(want)) = first_event {
            let took = call.first_event.map(|at| millis(at - call.began));
            self.want("first_event_within_ms", want, &took.into());
        }
        if let Some(AtMost(want)) = within {
            self.want("within_ms", want, &millis(call.took()).into());
        }
    }

    fn latency(&mut self, limits: Option<&BTreeMap<String, u64>>, scope: &Scope<'a>) {
        let Some(limits) = limits else { return };
        let took: Vec<u64> = scope.calls.iter().map(|call| millis(call.took())).collect();
        let mut sorted = took.clone();
        sorted.sort_unstable();
        for (name, limit) in limits {
            let seen = match name.as_str() {
                "first_max" => took.first().copied(),
                "p50_max" => sorted.get(sorted.len() / 2).copied(),
                "p95_max" => sorted.get(sorted.len() * 95 / 100).copied(),
                "p99_max" => sorted.get(sorted.len() * 99 / 100).copied(),
                "max" => sorted.last().copied(),
                _ => {
                    self.fail("latency_ms", "a limit that is known", name);
                    continue;
                }
            };
            if seen.is_none_or(|seen| seen > *limit) {
                self.fail(&format!("latency_ms {name}"), &format!("at most {limit}"), &format!("{seen:?}"));
            }
        }
    }

    // ---- what upstreams saw ----

    fn of_upstreams(&mut self, expect: &Expect, scope: &Scope<'a>) {
        let asked = &self.seen.asked;
        let made = self.attempts(scope);
        self.maybe("attempts", expect.attempts.as_ref(), || made.into());
        self.maybe("attempts_logical", expect.attempts_logical.as_ref(), || made.into());
        for (name, want) in expect.attempts_by.iter().flatten() {
            self.want(&format!("attempts_by {name}"), want, &self.attempts_at(name).into());
        }
        self.maybe("upstream_requests", expect.upstream_requests.as_ref(), || asked.len().into());
        self.upstream_headers(expect.upstream_headers.as_ref());
        let path = || asked.first().map(|one| one.path.as_str()).into();
        self.maybe("upstream_path", expect.upstream_path.as_ref(), path);
        self.upstream_bodies(expect);
        let raw: Vec<String> =
            asked.iter().map(|one| String::from_utf8_lossy(&one.raw).into_owned()).collect();
        let (contains, lacks) = (&expect.upstream_raw_contains, &expect.upstream_raw_not_contains);
        self.texts("upstream_raw", &raw.join("\n"), contains, lacks);
        if let Some(keys) = &expect.upstream_keys_used {
            let used: Vec<String> = asked.iter().map(key_used).collect();
            if *keys != used {
                self.fail("upstream_keys_used", &format!("{keys:?}"), &format!("{used:?}"));
            }
        }
        for name in &expect.upstream_closed {
            if asked.iter().any(|one| one.upstream == *name && one.left_at.is_none()) {
                self.fail("upstream_closed", name, "its connection is still open");
            }
        }
        self.closed_within(expect.upstream_closed_within_ms.as_ref(), scope);
        self.maybe("open_upstream_connections", expect.open_upstream_connections.as_ref(), || {
            self.seen.upstreams.values().map(|upstream| upstream.open_connections()).sum::<usize>().into()
        });
        if let Some(want) = &expect.breaker {
            let answering = self.seen.decisions.last().map(provider_of).unwrap_or_default();
            self.breaker("breaker", answering, want);
        }
        for (name, want) in expect.breaker_by.iter().flatten() {
            self.breaker(&format!("breaker_by {name}"), name, want);
        }
    }

    fn upstream_headers(&mut self, rules: Option<&BTreeMap<String, Want>>) {
        let asked = &self.seen.asked;
        if rules.is_some() && asked.is_empty() {
            self.fail("upstream_headers", "a request", "no upstream was asked");
        }
        for (name, want) in rules.into_iter().flatten() {
            // What has to be absent is absent from all; a value may speak of the first upstream.
            let count = if matches!(want, Want::Absent) { asked.len() } else { 1 };
            for one in asked.iter().take(count) {
                let seen = one.headers.find(name).map_or(Value::Null, Value::from);
                self.want(&format!("upstream_headers {name}"), want, &seen);
            }
        }
    }

    /// Attempts as the gateway counts them, or as the upstreams saw them where it had no time to say.
    fn attempts(&self, scope: &Scope<'a>) -> u64 {
        if !scope.whole || scope.access.len() >= scope.calls.len() {
            return scope.access.iter().filter_map(|line| line["attempts"].as_u64()).sum();
        }
        (self.seen.asked.len() - self.resent()) as u64
    }

    /// Requests on a pooled connection that died, or that a promise says nobody looked at.
    fn resent(&self) -> usize {
        self.seen.asked.iter().filter(|one| !one.answered && (one.reused || one.unprocessed)).count()
    }

    fn attempts_at(&self, name: &str) -> usize {
        let absent = self.seen.upstreams.get(name).is_some_and(|upstream| upstream.absence.is_some());
        if absent {
            return self.seen.decisions.iter().filter(|line| provider_of(line) == name).count();
        }
        let here = |one: &&Asked| one.upstream == name && (one.answered || !(one.reused || one.unprocessed));
        self.seen.asked.iter().filter(here).count()
    }

    fn upstream_bodies(&mut self, expect: &Expect) {
        let asked = &self.seen.asked;
        let wanted = expect.upstream_body_json.is_some()
            || !(expect.upstream_body_contains.is_empty() && expect.upstream_body_absent.is_empty());
        if wanted && asked.is_empty() {
            self.fail("upstream_body", "a request", "no upstream was asked");
        }
        for one in asked {
            let text = String::from_utf8_lossy(&one.body).into_owned();
            let body: Value = serde_json::from_str(&text).unwrap_or_default();
            for (path, want) in expect.upstream_body_json.iter().flatten() {
                self.want(&format!("upstream_body_json {path}"), want, &value_at(&body, path));
            }
            for path in &expect.upstream_body_absent {
                let there = !value_at(&body, path).is_null() || text.contains(&format!("\"{path}\":"));
                if there {
                    self.fail("upstream_body_absent", &format!("no {path}"), &text);
                }
            }
            self.texts(
                "upstream_body",
                &text,
                &expect.upstream_body_contains,
                &expect.upstream_body_not_contains,
            );
        }
    }

    fn closed_within(&mut self, want: Option<&AtMost>, scope: &Scope<'a>) {
        let Some(AtMost(want)) = want else { return };
        let field = "upstream_closed_within_ms";
        let Some(from) = scope.calls.iter().filter_map(|call| call.acted_at).max() else {
            return self.fail(field, "a caller that leaves", "the caller never left");
        };
        let left = self.seen.asked.last().and_then(|one| one.left_at);
        self.want(field, want, &left.map(|at| millis(at.saturating_duration_since(from))).into());
    }

    /// What a route recorded, or its state.
    fn breaker(&mut self, field: &str, provider: &str, want: &Want) {
        let recorded = self.recorded(provider);
        let record = match recorded.as_slice() {
            [] => "nothing",
            all if all.contains(&Record::Failure) => "failure",
            all if all.contains(&Record::Success) => "success",
            _ => "neutral",
        };
        // A rest refuses too; only failures open a breaker.
        let label = format!("endpoint=\"{provider}/");
        let refused = value(&self.seen.metrics, "tollgate_endpoint_refused", &label) == Some(1.0);
        let state = if refused && recorded.contains(&Record::Failure) { "open" } else { "closed" };
        let right = [record, state].into_iter().any(|word| want.judge(&word.into(), 0).is_ok());
        if !right {
            let outcomes: Vec<String> =
                self.outcomes(provider).iter().map(|(word, n)| format!("{word} {n}")).collect();
            self.fail(field, &words(Some(want)), &format!("{record}, {state} ({})", outcomes.join(", ")));
        }
    }

    /// Outcome words of a provider's endpoints with their counts, without those of the setting up.
    fn outcomes(&self, provider: &str) -> Vec<(String, i64)> {
        let label = format!("endpoint=\"{provider}/");
        let own = self
            .seen
            .metrics
            .iter()
            .filter(|s| s.name == "tollgate_attempts_total" && s.labels.contains(&label));
        own.filter_map(|sample| {
            let word = sample.labels.split("outcome=\"").nth(1)?.split('"').next()?;
            let before = value(&self.seen.metrics_before, &sample.name, &sample.labels).unwrap_or(0.0);
            let count = whole(sample.value - before);
            (count > 0).then(|| (word.to_owned(), count))
        })
        .collect()
    }

    fn recorded(&mut self, provider: &str) -> Vec<Record> {
        let outcomes = self.outcomes(provider);
        let mut records = vec![];
        for (word, _) in outcomes {
            match OUTCOMES.iter().chain([&OURS]).find(|(known, _)| *known == word) {
                Some((_, record)) => records.push(*record),
                None => self.fail("breaker", "an outcome that is known to the runner", &word),
            }
        }
        records
    }

    // ---- money ----

    fn of_money(&mut self, expect: &Expect, scope: &Scope<'a>) {
        let Expect {
            billed_prompt_tokens,
            billed_completion_tokens,
            billed_cache_read_tokens,
            billed_cache_write_tokens,
            billed_audio_tokens,
            billed_reasoning_tokens,
            charge_nano,
            charged_account,
            price_version,
            hold_nano,
            holds_created,
            hold_after,
            settlements,
            shortfall_nano,
            anomaly_flag,
            estimated,
            balance_after_nano,
            overdraft,
            ledger_sum,
            ..
        } = expect;
        let all = &scope.settlements;
        let tokens = |kinds: std::ops::Range<usize>| {
            Value::from(all.iter().map(|s| s.tokens(kinds.clone())).sum::<i64>())
        };
        self.maybe("billed_prompt_tokens", billed_prompt_tokens.as_ref(), || tokens(0..5));
        self.maybe("billed_completion_tokens", billed_completion_tokens.as_ref(), || tokens(5..6));
        self.maybe("billed_cache_read_tokens", billed_cache_read_tokens.as_ref(), || tokens(1..2));
        self.maybe("billed_cache_write_tokens", billed_cache_write_tokens.as_ref(), || tokens(2..4));
        self.maybe("billed_audio_tokens", billed_audio_tokens.as_ref(), || tokens(4..5));
        self.maybe("billed_reasoning_tokens", billed_reasoning_tokens.as_ref(), || tokens(6..7));
        let charge: i64 = all.iter().map(|s| s.charged()).sum();
        self.maybe("charge_nano", charge_nano.as_ref(), || charge.into());
        if let Some(account) = charged_account {
            let charged: Vec<&str> =
                all.iter().filter(|s| s.charged() > 0).map(|s| s.account.as_str()).collect();
            if charged.is_empty() || charged.iter().any(|name| name != account) {
                self.fail("charged_account", account, &format!("{charged:?}"));
            }
        }
        self.price_version(price_version.as_deref(), scope, charge);
        self.maybe("hold_nano", hold_nano.as_ref(), || all.last().map(|s| s.held).into());
        let open = self.seen.holds_open.unwrap_or(0);
        let created = i64::try_from(all.len()).unwrap_or(0) + if scope.whole { open } else { 0 };
        self.maybe("holds_created", holds_created.as_ref(), || created.into());
        self.maybe("hold_after", hold_after.as_ref().filter(|_| self.seen.holds_open.is_some()), || {
            open.into()
        });
        self.maybe("settlements", settlements.as_ref(), || all.len().into());
        self.maybe("shortfall_nano", shortfall_nano.as_ref(), || {
            all.iter().map(|s| s.shortfall).sum::<i64>().into()
        });
        self.truth("anomaly_flag", *anomaly_flag, || all.iter().any(|s| s.anomaly));
        self.truth("estimated", *estimated, || all.iter().any(|s| s.estimated));
        let balance = self.seen.balances.get("alpha").copied().unwrap_or(-1);
        self.maybe("balance_after_nano", balance_after_nano.as_ref(), || balance.into());
        self.truth("overdraft", *overdraft, || balance < 0);
        self.ledger_sum(ledger_sum.as_ref());
    }

    /// `old`: what the base prices make of the tokens.
    fn price_version(&mut self, want: Option<&str>, scope: &Scope<'a>, charge: i64) {
        let Some(want) = want else { return };
        if want != "old" {
            return self.fail("price_version", "a version that is known to the runner", want);
        }
        let (input, output) = Model::of(self.case).nano();
        let old: i64 =
            scope.settlements.iter().map(|s| s.tokens(0..5) * input + s.tokens(5..6) * output).sum();
        if charge != old {
            self.fail("price_version", &format!("old: {old}"), &charge.to_string());
        }
    }

    fn ledger_sum(&mut self, want: Option<&Want>) {
        let zero = Want::Is(0.into());
        match &self.seen.verified {
            Ok(()) => self.want("ledger_sum", want.unwrap_or(&zero), &0.into()),
            Err(law) => self.fail("ledger_sum", &words(Some(want.unwrap_or(&zero))), law),
        }
    }

    // ---- the rest ----

    fn sequence(&mut self, entries: &[Expect]) {
        if !entries.is_empty() && entries.len() != self.seen.calls.len() {
            self.fail("sequence", &format!("{} calls", entries.len()), &self.seen.calls.len().to_string());
        }
        for (index, (entry, calls)) in entries.iter().zip(&self.seen.calls).enumerate() {
            let from = self.failures.len();
            let scope = self.entry(calls);
            self.expect(entry, &scope);
            for failure in self.failures.iter_mut().skip(from) {
                failure.field = format!("sequence[{index}].{}", failure.field);
            }
        }
    }

    fn any_of(&mut self, ways: &[Expect], scope: &Scope<'a>) {
        if ways.is_empty() {
            return;
        }
        let mut reasons = vec![];
        for way in ways {
            let mut trial = Judge { case: self.case, seen: self.seen, failures: vec![] };
            trial.expect(way, scope);
            match trial.failures.first() {
                None => return,
                Some(f) => reasons.push(format!("{}: {} but {}", f.field, f.expected, f.seen)),
            }
        }
        self.fail("any_of", &format!("one of {} ways", ways.len()), &reasons.join("; or "));
    }

    fn after_restart(&mut self, expect: Option<&Expect>) {
        let Some(expect) = expect else { return };
        match self.seen.restarted {
            None => self.fail("after_restart", "a restart", "the process was not killed"),
            Some(None) => self.fail("after_restart", "settled books", "holds are open or unposted"),
            Some(Some(took)) => {
                let from = self.failures.len();
                if let Some(AtMost(want)) = &expect.within_ms {
                    self.want("within_ms", want, &millis(took).into());
                }
                let scope = self.whole();
                self.of_money(expect, &scope);
                for failure in self.failures.iter_mut().skip(from) {
                    failure.field = format!("after_restart.{}", failure.field);
                }
            }
        }
    }

    fn log_status(&mut self, want: Option<&Want>, scope: &Scope<'a>) {
        if want.is_some() && scope.access.is_empty() {
            self.fail("log_status", "an access line", "none");
        }
        for line in &scope.access {
            self.maybe("log_status", want, || line["status"].clone());
        }
    }

    fn log_texts(&mut self, contains: &[String], lacks: &[String]) {
        let log = self.seen.log.join("\n");
        for part in contains.iter().filter(|part| !log.contains(part.as_str())) {
            self.fail("log_contains", &format!("{part:?}"), "it is not there");
        }
        for part in lacks.iter().filter(|part| log.contains(part.as_str())) {
            self.fail("log_not_contains", &format!("no {part:?}"), &around(&log, part));
        }
    }

    /// What holds for every case.
    fn always(&mut self, expect: &Expect) {
        if let Some((open, negative)) = &self.seen.in_redis {
            if *open != 0 {
                self.fail("open holds in Redis", "0", &open.to_string());
            }
            if !negative.is_empty() && expect.negative_counters != Some(true) {
                self.fail("numbers in Redis", "none below zero", &negative.join(", "));
            }
        }
        if self.seen.recovered == Some(None) {
            self.fail("recovery", "calls are served when everything runs again", "none was");
        }
        if expect.hold_after.is_none() && self.seen.holds_open.is_some_and(|open| open != 0) {
            self.fail("hold_after", "0", &format!("{:?}", self.seen.holds_open.unwrap_or(-1)));
        }
        let log = self.seen.log.join("\n");
        for secret in SECRETS {
            if log.contains(secret) && !expect.log_not_contains.iter().any(|told| told.starts_with(secret)) {
                self.fail("log", &format!("no {secret:?}"), &around(&log, secret));
            }
        }
        for (name, upstream) in &self.seen.upstreams {
            if upstream.overrun() > 0 {
                self.fail(
                    "script",
                    &format!("{name} is asked no more than its script says"),
                    &format!("{} more", upstream.overrun()),
                );
            }
            let script = self.case.upstreams.iter().find(|u| u.name == *name).map(|u| u.script.as_slice());
            if upstream.missed_h2(script.unwrap_or_default()) {
                self.fail("script", &format!("{name} is spoken to in HTTP/2"), "HTTP/1.1");
            }
        }
        if self.seen.exit.is_some_and(|_| expect.exit_code.is_none() && expect.after_restart.is_none()) {
            self.fail("process", "it lives", &format!("exit {:?}", self.seen.exit));
        }
        self.attempts_agree();
    }

    fn attempts_agree(&mut self) {
        let scope = self.whole();
        let absent = |line: &&Value| {
            self.seen.upstreams.get(provider_of(line)).is_some_and(|upstream| upstream.absence.is_some())
        };
        let unseen = self.seen.decisions.iter().filter(absent).count() as u64;
        if scope.access.len() < scope.calls.len() {
            return;
        }
        let (told, seen) = (self.attempts(&scope), self.seen.asked.len() as u64 + unseen);
        let resent = self.resent() as u64;
        // An attempt that is given up before its request was whole is one of the gateway's alone.
        let left = self.seen.decisions.iter().filter(|line| line["outcome"] == "left").count() as u64;
        if seen > told + resent || told > seen + left {
            self.fail(
                "attempts",
                &format!("{told}, as the gateway counts them"),
                &format!("{seen} requests at upstreams"),
            );
        }
    }
}

/// What has to be asked of the gateway when the case is over.
async fn afterwards(case: &Case, seen: &mut Seen) -> Vec<Failure> {
    let mut failures = vec![];
    let Expect { also, alive_after, credential_state, later, tpm_used, .. } = &case.expect;
    for (what, Also(expect)) in also.iter().flatten() {
        let exchange = match seen.also.get(what) {
            Some(exchange) => exchange.clone(),
            None => ask(&seen.gateways[0], what).await,
        };
        let mut judge = Judge { case, seen, failures: vec![] };
        let scope = Scope { calls: vec![&exchange], settlements: vec![], access: vec![], whole: false };
        judge.expect(expect, &scope);
        failures.extend(
            judge.failures.into_iter().map(|f| Failure { field: format!("also {what} {}", f.field), ..f }),
        );
    }
    // By the script, which has to repeat: the request may ask for a stream.
    if let Some(want) = tpm_used {
        let used = tokens_used(case, seen).await;
        if let Err(expected) = want.judge(&used, 0) {
            failures.push(Failure::said("tpm_used", &expected, &short(&used)));
        }
    }
    if seen.stores_broke {
        failures.extend(behind_a_break(case, seen).await);
    }
    if alive_after.is_none() && credential_state.is_none() && later.is_none() {
        return failures;
    }
    seen.upstreams.values().for_each(|upstream| upstream.set_mode(Mode::Good));
    if let Some(Later { after_ms, status }) = later {
        tokio::time::sleep(Duration::from_millis(*after_ms)).await;
        let answer = plain_call(case).call(seen.gateways[0].http).await;
        if let Err(expected) = status.judge(&answer.status.into(), 0) {
            failures.push(Failure::said("later", &expected, &format!("{:?}", answer.status)));
        }
    }
    if let Some(alive) = alive_after {
        let answer = plain_call(case).call(seen.gateways[0].http).await;
        if (answer.status == Some(200)) != *alive {
            failures.push(Failure::said(
                "alive_after",
                &alive.to_string(),
                &format!("{:?} {:?}", answer.status, answer.error),
            ));
        }
    }
    if let Some(states) = credential_state {
        plain_call(case).call(seen.gateways[0].http).await;
        for (name, state) in states {
            let asked = seen.upstreams.get(name).is_some_and(|upstream| upstream.asked_in(Mode::Good) > 0);
            let now = if asked { "ok" } else { "cooldown" };
            if now != state {
                let seen = format!("{now}: the next call was sent to {name} again");
                failures.push(Failure::said(&format!("credential_state {name}"), state, &seen));
            }
        }
    }
    failures
}

/// What a break of stores must not leave behind: calls that are refused for ever, limits that count twice, books that
/// are wrong.
async fn behind_a_break(case: &Case, seen: &mut Seen) -> Vec<Failure> {
    let mut failures = vec![];
    seen.upstreams.values().for_each(|upstream| upstream.set_mode(Mode::Good));
    let Some(gateway) = seen.gateways.iter().find(|gateway| gateway.exit_code().is_none()) else {
        return failures;
    };
    let until = Instant::now() + BACK;
    // Behind a gateway without upstreams nothing better can come.
    let nobody = seen.upstreams.is_empty();
    let served = |status: Option<u16>| status.is_some_and(|status| status < 500 || (nobody && status == 502));
    let answer = loop {
        let answer = plain_call(case).call(gateway.http).await;
        if served(answer.status) || Instant::now() > until {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    if !served(answer.status) {
        failures.push(Failure::said("call behind the break", "no 5xx", &format!("{:?}", answer.status)));
    }
    if let Some(want) = &case.expect.rpm_used {
        // This very call counts too, unless it was refused.
        let own = i64::from(answer.status != Some(429));
        let seen = used(&answer, "requests").map(|used| used - own);
        if let Err(expected) = want.judge(&seen.into(), 0) {
            failures.push(Failure::said("rpm_used", &expected, &format!("{seen:?}")));
        }
    }
    if let Some(stores) = &seen.stores {
        let books = Books::Postgres(stores.database().url.clone());
        if let Err(law) = books.verify() {
            failures.push(Failure::said("books behind the break", "right", &law));
        }
    }
    failures
}

/// How many calls the balance carries at once, where a case has more.
fn holds_at_once(case: &Case) -> Option<usize> {
    let times = case.fixture.balance.as_deref()?.split('x').next()?.trim().parse::<f64>().ok()?;
    let carried = usize::try_from(whole(times.floor())).ok()?;
    let parallel = case.calls().filter_map(|client| client.concurrent).max()?;
    (parallel > carried).then_some(carried)
}

/// Commands of a name: of those that run something, the admissions, but those that found a pool to be filled first; of
/// those that take something in, the most of one.
fn count_of(commands: &[Command], name: &str) -> usize {
    let alike = |command: &&Command| match name {
        "EVALSHA" => {
            let runs = ["EVALSHA", "FCALL"].contains(&command.name.as_str()) && command.verb == "admit";
            runs && command.answer != "FUNDS"
        }
        "EVAL" => command.name == "EVAL" && command.verb == "admit",
        "SCRIPT LOAD" => command.script.is_some(),
        other => command.name == other,
    };
    let found = commands.iter().filter(alike);
    if name != "SCRIPT LOAD" {
        return found.count();
    }
    let mut times: BTreeMap<&[u8], usize> = BTreeMap::new();
    for script in found.filter_map(|command| command.script.as_deref()) {
        *times.entry(script).or_default() += 1;
    }
    times.into_values().max().unwrap_or(0)
}

struct JsonRules<'a> {
    is_json: Option<bool>,
    members: Option<&'a BTreeMap<String, Want>>,
    absent: &'a [String],
}

fn expect_json<'a>(
    is_json: Option<bool>,
    members: Option<&'a BTreeMap<String, Want>>,
    absent: &'a [String],
) -> Option<JsonRules<'a>> {
    let any = is_json.is_some() || members.is_some() || !absent.is_empty();
    any.then_some(JsonRules { is_json, members, absent })
}

fn words(want: Option<&Want>) -> String {
    want.map_or_else(String::new, |want| want.judge(&Value::Bool(false), 0).err().unwrap_or_default())
}

fn provider_of(line: &Value) -> &str {
    line["candidate"].as_str().unwrap_or_default().split('/').next().unwrap_or_default()
}

fn key_used(asked: &Asked) -> String {
    let bearer =
        asked.headers.find("authorization").map(|value| value.trim_start_matches("Bearer ").to_owned());
    bearer.or_else(|| asked.headers.find("x-api-key").map(str::to_owned)).unwrap_or_default()
}

/// What an answer says of its limit: how much is used, with what this very call reserves.
fn used(call: &Exchange, what: &str) -> Option<i64> {
    let header = |kind: &str| call.headers.find(&format!("x-ratelimit-{kind}-{what}"))?.parse::<i64>().ok();
    Some(header("limit")? - header("remaining")?)
}

/// Tokens that are used when all calls are over: what one more like the first finds used beyond what the
/// first found, which was its own reservation.
async fn tokens_used(case: &Case, seen: &Seen) -> Value {
    let (Some(client), Some(first)) = (case.calls().next(), seen.calls.iter().flatten().next()) else {
        return Value::Null;
    };
    let Ok(again) = Sent::of(client) else { return Value::Null };
    let again = again.call(seen.gateways[0].http).await;
    let both = used(&again, "tokens").zip(used(first, "tokens"));
    let unknown = || format!("no limit is told: {:?} {:?} {}", again.status, again.error, again.body_text());
    both.map_or_else(|| unknown().into(), |(again, first)| (again - first).into())
}

/// One name decides: an unknown model asks nobody, a known one is booked and sent by its own names.
fn consistent(seen: &Seen) -> bool {
    let refused = seen.calls.iter().flatten().all(|call| call.status != Some(200));
    if refused {
        return seen.asked.is_empty() && seen.settlements.is_empty();
    }
    let sent = seen.asked.iter().all(|one| {
        serde_json::from_slice::<Value>(&one.body).is_ok_and(|body| body["model"] == NATIVE_MODEL)
    });
    sent && seen.settlements.iter().all(|s| s.model == Model::of(&seen.case).name())
}

/// A body without a coding is text; with one it is coded that way.
fn encoding_is_consistent(call: &Exchange) -> bool {
    use std::io::Read as _;
    match call.headers.find("content-encoding") {
        None | Some("identity") => std::str::from_utf8(&call.body).is_ok(),
        Some("gzip") => {
            flate2::read::MultiGzDecoder::new(call.body.as_slice()).read_to_end(&mut vec![]).is_ok()
        }
        Some("deflate") => {
            flate2::read::ZlibDecoder::new(call.body.as_slice()).read_to_end(&mut vec![]).is_ok()
        }
        Some(_) => false,
    }
}

fn around(text: &str, part: &str) -> String {
    let at = text.find(part).unwrap_or(0);
    let from = text.floor_char_boundary(at.saturating_sub(60));
    let to = text.floor_char_boundary((at + part.len() + 60).min(text.len()));
    format!("…{}…", text.get(from..to).unwrap_or_default())
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// Everything that helps to find out why, for `--verbose`.
fn details(seen: &Seen) -> String {
    let mut lines = vec![];
    for call in seen.calls.iter().flatten().take(3) {
        lines.push(format!(
            "call: status {:?}, {} ms, complete {}, error {:?}",
            call.status,
            millis(call.took()),
            call.complete,
            call.error
        ));
        lines.push(format!("  headers {:?}", call.headers.0));
        lines.push(format!("  body {}", clip(&call.body_text(), 1500)));
    }
    for one in seen.asked.iter().take(4) {
        let reused = if one.reused { ", used before" } else { "" };
        lines.push(format!(
            "{} was asked on connection {}{reused}: {}",
            one.upstream,
            one.connection,
            clip(&String::from_utf8_lossy(&one.raw), 900)
        ));
    }
    lines.extend(seen.settlements.iter().take(3).map(|s| format!("{s:?}")));
    let of_calls = |line: &&String| {
        ["\"target\":\"access\"", "\"target\":\"decision\""].iter().any(|t| line.contains(t))
    };
    for (few, wanted) in [(12, true), (20, false)] {
        let some: Vec<&String> =
            seen.log.iter().rev().filter(|line| of_calls(line) == wanted).take(few).collect();
        lines.extend(some.into_iter().rev().map(|line| clip(line, 500)));
    }
    lines.join("\n")
}
