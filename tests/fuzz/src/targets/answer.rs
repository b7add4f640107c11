//! An upstream's answer, from bytes to what the caller gets.

use bytes::Bytes;
use filters::answer::{Answer, End, Ended, Forward, Rules, Step};
use filters::dialect::fold::Fold;
use filters::dialect::{Dialect, Operation, Shape};
use filters::meter::{Ceiling, Used};
use filters::money::{PriceCard, Rate, cost};
use filters::stream::sse::{Event, Scanner};
use filters::upstream::failure::Failure;
use serde_json::Value;

use super::{ANSWER_SETTINGS, pieces};

/// The model as callers know it. No input holds it by chance.
const PUBLIC_MODEL: &str = "public-model-name";
const CEILING: Ceiling = Ceiling { context: 128_000, output: 16_384 };

/// The scanner: events do not depend on how the bytes were cut, and their raw bytes together are the stream.
pub(crate) fn sse(bytes: &[u8]) {
    let (seed, stream) = bytes.split_first().unwrap_or((&0, &[]));
    let whole = scan(&[stream]);
    let raw: Vec<u8> = whole.iter().flat_map(|event| event.raw.iter().copied()).collect();
    assert!(raw == stream, "bytes were lost or made up");
    let cut = scan(&pieces(stream, *seed));
    let raw: Vec<u8> = cut.iter().flat_map(|event| event.raw.iter().copied()).collect();
    assert!(raw == stream, "bytes were lost or made up by a cut");
    assert_eq!(said(whole), said(cut), "what is said depends on a cut");
}

/// Names and data. Which of two events a lone LF belongs to may depend on a cut, and comments say nothing.
fn said(events: Vec<Event>) -> Vec<(Bytes, Bytes)> {
    events.into_iter().filter_map(|event| Some((event.name, event.data?))).collect()
}

fn scan(pieces: &[&[u8]]) -> Vec<Event> {
    let mut scanner = Scanner::default();
    let mut events = vec![];
    for piece in pieces {
        scanner.push(piece);
        events.extend(std::iter::from_fn(|| scanner.next_event()));
    }
    events.extend(scanner.finish());
    for event in &events {
        if let (Some(span), Some(data)) = (&event.data_span, &event.data) {
            assert_eq!(event.raw.get(span.clone()), Some(data.as_ref()), "the data lies elsewhere");
        }
        // An event that lacks its end gets one, and is then the same event.
        let mut again = Scanner::default();
        again.push(&Event::terminated(&event.raw));
        assert!(event.data.is_none() || again.next_event().is_some(), "an end that is none");
    }
    events
}

/// Events put into a fold: it refuses, or what comes out is one JSON object.
pub(crate) fn fold(bytes: &[u8]) {
    let Some((setting, lines)) = bytes.split_first() else { return };
    let dialect = if setting & 1 == 0 { Dialect::OpenAi } else { Dialect::Anthropic };
    let mut fold = Fold::new(dialect);
    for line in lines.split(|b| *b == b'\n') {
        let data = line.strip_prefix(b"data: ").unwrap_or(line);
        if data.starts_with(b"{") && fold.push(data).is_err() {
            return;
        }
    }
    if let Ok(whole) = fold.finish() {
        let whole: Value = serde_json::from_slice(&whole).expect("a fold is JSON");
        assert!(whole.is_object(), "a fold is an object");
    }
}

/// What one answer came to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Came {
    /// A whole answer to the byte; of a stream what it says, since an empty line more says nothing.
    whole: Vec<u8>,
    events: Vec<(Bytes, Bytes)>,
    failed: Option<Failure>,
    ended: Option<Ended>,
    used: Used,
}

struct Setting {
    operation: Operation,
    shape: Shape,
    rules: Rules,
    are_small: bool,
    head: (u16, Option<&'static str>, Option<&'static str>),
    breaks: bool,
}

/// The gate's judgement of a whole response, by every dialect: see the assertions.
pub(crate) fn answer(bytes: &[u8]) {
    let Some((settings, body)) = bytes.split_first_chunk::<ANSWER_SETTINGS>() else { return };
    let [which, flags, head, seed] = *settings;
    let setting = Setting::of(which, flags, head);
    let whole = play(&setting, &[body]);
    let cut = play(&setting, &pieces(body, seed));
    // Where a bound is reached depends on the pieces, and so does how much of a bomb is read.
    if !setting.are_small && setting.head.2.is_none() {
        assert_eq!(whole, cut, "the answer depends on how it was cut");
    }
}

impl Setting {
    fn of(which: u8, flags: u8, head: u8) -> Self {
        let is = |bit: u8| flags & (1 << bit) != 0;
        let all = Operation::ALL;
        let operation = all[usize::from(which) % all.len()];
        let shape = Shape {
            stream: is(0),
            fold: is(1),
            choices: if is(2) { 2 } else { 1 },
            echoed_bytes: if is(3) { 8 } else { 0 },
            wants_usage: is(4),
            public_model: PUBLIC_MODEL.to_owned(),
            request_id: "request-1".to_owned(),
        };
        let small = Rules {
            hold_bytes_max: 256,
            whole_bytes_max: 128,
            error_bytes_max: 32,
            event_bytes_max: 512,
            read_bytes_max: 256,
        };
        let rules = if is(5) { small } else { Rules::of(operation, 100) };
        let status = if head & 1 == 0 { 200 } else { 400 + u16::from(head >> 1) };
        let kind = match (head >> 1) & 3 {
            0 => Some("text/event-stream; charset=utf-8"),
            1 => Some("application/json"),
            2 => None,
            _ => Some("text/plain"),
        };
        let coding = (head & 0xf8 == 0xf8).then_some("gzip");
        Self { operation, shape, rules, are_small: is(5), head: (status, kind, coding), breaks: is(6) }
    }
}

fn play(setting: &Setting, pieces: &[&[u8]]) -> Came {
    let mut answer = Answer::new(setting.operation, setting.shape.clone(), setting.rules);
    let mut came = Came::default();
    let mut watch = Watch::default();
    let mut out = vec![];
    let (status, kind, coding) = setting.head;
    let mut steps = vec![answer.head(status, kind, coding)];
    for piece in pieces {
        if steps.iter().any(|step| matches!(step, Step::Failed(_))) {
            break;
        }
        steps.push(answer.body(&Bytes::copy_from_slice(piece)));
        check_used(setting, &answer);
    }
    if !steps.iter().any(|step| matches!(step, Step::Failed(_))) {
        steps.push(if setting.breaks { answer.fail(Failure::Broken) } else { answer.end() });
    }
    for step in steps {
        match step {
            Step::Hold => {}
            Step::Forward(forward) => watch.forward(forward, &mut out),
            Step::Failed(refusal) => {
                assert!(!watch.committed, "an attempt failed whose answer the caller has in part");
                came.failed = Some(refusal.failure);
            }
        }
    }
    assert_eq!(answer.is_committed(), watch.committed);
    assert!(watch.over || came.failed.is_some(), "the body is over, but not the answer");
    if watch.committed {
        came.ended = Some(answer.ended().clone());
        came.used = check_used(setting, &answer);
        assert_ne!(*answer.ended(), Ended::Not);
        if setting.shape.stream {
            check_stream(setting, &answer, &out);
        } else if *answer.ended() == Ended::Properly && !setting.are_small {
            check_whole(setting, &out);
        }
    }
    if setting.shape.stream {
        came.events = said(scan(&[&out]));
    } else {
        came.whole = out;
    }
    came
}

/// What may come in which order.
#[derive(Default)]
struct Watch {
    committed: bool,
    settled: bool,
    over: bool,
}

impl Watch {
    fn forward(&mut self, Forward { bytes, commits, end }: Forward, out: &mut Vec<u8>) {
        assert!(!self.over, "something goes out behind the end");
        assert_eq!(commits, !self.committed, "the head goes out with the first bytes, once");
        self.committed = true;
        if self.settled {
            assert!(bytes.is_empty(), "something goes out behind the terminal event");
        }
        out.extend_from_slice(&bytes);
        self.settled |= end == End::Settle;
        self.over = matches!(end, End::Over | End::Break);
    }
}

/// Counts are believable, and can be charged.
fn check_used(setting: &Setting, answer: &Answer) -> Used {
    let used = answer.used(1_000, &CEILING);
    let usage = used.usage;
    let most = CEILING.context.max(answer.own_output().saturating_mul(4).saturating_add(1_024));
    assert!(used.estimated || (usage.output <= most && usage.prompt() <= most), "{used:?}");
    let rate = Rate::parse_usd_per_million("75").expect("a rate");
    let charge = cost(&PriceCard::flat(rate, rate), &usage).expect("it can be charged");
    assert!(charge.nano() >= 0, "{charge:?}");
    assert!(!setting.operation.is_free() || charge.nano() == 0, "free is free");
    used
}

/// The stream that a caller reads: whole events, one terminal, no foreign model, no usage that nobody asked for.
fn check_stream(setting: &Setting, answer: &Answer, out: &[u8]) {
    let mut scanner = Scanner::default();
    scanner.push(out);
    let events: Vec<_> = std::iter::from_fn(|| scanner.next_event()).collect();
    if !setting.are_small {
        // A stream may only end inside an event where the bound of one was reached.
        assert!(
            scanner.pending_bytes().trim_ascii().is_empty(),
            "half an event: {:?}",
            scanner.pending_bytes()
        );
    }
    let data: Vec<_> = events.iter().filter_map(|event| event.data.as_deref()).collect();
    let dones = data.iter().filter(|data| data.trim_ascii() == b"[DONE]").count();
    assert!(dones <= 1, "the end comes {dones} times");
    if dones == 1 && matches!(setting.operation, Operation::Chat | Operation::Completions) {
        assert_eq!(
            data.last().map(|data| data.trim_ascii()),
            Some(b"[DONE]".as_slice()),
            "nothing behind it"
        );
    }
    let broken = matches!(answer.ended(), Ended::Broken(_));
    let last = data.last().and_then(|data| serde_json::from_slice::<Value>(data).ok());
    if broken && !setting.are_small {
        let last = last.expect("a stream that broke off ends with an event");
        let says = last.get("error").is_some_and(|error| !error.is_null())
            || last.get("type").is_some_and(|kind| kind == "error" || kind == "response.failed");
        assert!(says, "a stream that broke off ends with an error: {last}");
    }
    for data in &data {
        check_members(setting, data);
    }
}

fn check_members(setting: &Setting, data: &[u8]) {
    // What comes twice is read by everybody as they like; `serde_json` takes the last.
    let Ok(Value::Object(members)) = serde_json::from_slice::<Value>(data) else { return };
    let is_chunk = members.get("choices").is_some_and(Value::is_array)
        && matches!(setting.operation, Operation::Chat | Operation::Completions);
    if is_chunk {
        let model = members.get("model");
        assert!(model.is_none_or(|model| model == PUBLIC_MODEL), "a foreign model: {members:?}");
        let usage = setting.shape.stream && !setting.shape.wants_usage && members.contains_key("usage");
        assert!(!usage, "usage that nobody asked for: {members:?}");
    }
}

fn check_whole(setting: &Setting, out: &[u8]) {
    if setting.head.2.is_some() {
        return;
    }
    let whole: Value = serde_json::from_slice(out).unwrap_or_else(|why| {
        panic!("a whole answer is JSON, not {}: {why}", String::from_utf8_lossy(out));
    });
    assert!(whole.is_object() || setting.operation == Operation::CountTokens, "{whole}");
    check_members(setting, out);
}
