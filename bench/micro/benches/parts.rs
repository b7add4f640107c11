//! What a request and each of its chunks cost to compute, without sockets, disk or threads.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use bytes::Bytes;
use divan::counter::BytesCount;
use divan::{Bencher, bench};
use filters::dialect::{Operation, Shape};
use filters::hold;
use filters::ids::{CredentialId, EndpointId, HoldId, KeyDigest, ModelId};
use filters::limit::budget::{Budget, Period, Zone};
use filters::limit::{Limits, Now, Scopes, Want};
use filters::money::{Amount, PriceCard, Rate, cost};
use filters::preferences::Preferences;
use filters::purse::{EndHold, Purse, Reserve};
use filters::route::Sort;
use filters::stream::sse::Scanner;
use filters::stream::usage::Usage;
use filters::upstream::board::{Ask, Begun, Board, EndpointSpec, Found, Layout, ModelSpec, Outcome};
use filters::upstream::sketch::Sketch;
use filters::upstream::watchdog::{Form, Limit, Timing};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::SeedableRng as _;

fn main() {
    divan::main();
}

fn card() -> PriceCard {
    let rate = |text| Rate::parse_usd_per_million(text).unwrap();
    PriceCard::flat(rate("0.15"), rate("0.60"))
}

fn request(bytes: usize) -> Vec<u8> {
    let text = "lorem ipsum ".repeat(bytes / 12);
    format!(r#"{{"model":"gpt-4o-mini","messages":[{{"role":"user","content":"{text}"}}],"max_tokens":1024,"stream":true}}"#)
        .into_bytes()
}

fn chunk() -> String {
    let head = r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"gpt-4o-mini","choices":[{"index":0,"delta":{"content":"#;
    format!("data: {head}\"some forty bytes of text that were generated\"}},\"finish_reason\":null}}]}}\n\n")
}

/// A thousand chunks, in reads of so many bytes.
#[bench(args = [64, 256, 4096, 65536])]
fn scanner(bencher: Bencher, read: usize) {
    let stream = chunk().repeat(1000);
    bencher.counter(BytesCount::new(stream.len())).bench_local(|| {
        let mut scanner = Scanner::default();
        let mut events = 0;
        for piece in stream.as_bytes().chunks(read) {
            scanner.push(piece);
            while let Some(event) = scanner.next_event() {
                black_box(&event);
                events += 1;
            }
        }
        assert_eq!(events, 1000);
    });
}

#[bench]
fn chunk_read(bencher: Bencher) {
    let text = chunk();
    let facts = Operation::Chat.read(&request(1024)).unwrap();
    let shape = Shape::new(&facts, "gpt-4o-mini", "req_1");
    let mut scanner = Scanner::default();
    scanner.push(text.as_bytes());
    let event = scanner.next_event().unwrap();
    bencher.bench_local(|| black_box(Operation::Chat.event(black_box(&event), &shape)));
}

/// A whole answer of some 900 bytes.
#[bench]
fn answer_read(bencher: Bencher) {
    let text = &"lorem ipsum ".repeat(59)[..700];
    let answer = format!(
        r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"gpt-4o-mini-2024","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":19,"completion_tokens":160,"prompt_tokens_details":{{"cached_tokens":8}}}},"system_fingerprint":"fp_1"}}"#
    );
    let facts = Operation::Chat.read(&request(1024)).unwrap();
    let shape = Shape::new(&facts, "gpt-4o-mini", "req_1");
    bencher
        .counter(BytesCount::new(answer.len()))
        .bench_local(|| black_box(Operation::Chat.whole(black_box(answer.as_bytes()), &shape)));
}

#[bench(args = [1 << 10, 64 << 10, 1 << 20, 10 << 20])]
fn facts(bencher: Bencher, bytes: usize) {
    let body = Bytes::from(request(bytes));
    bencher
        .counter(BytesCount::new(body.len()))
        .bench_local(|| black_box(Operation::Chat.read(&body).unwrap()));
}

#[bench]
fn hold_sizing(bencher: Bencher) {
    let facts = Operation::Chat.read(&request(1024)).unwrap();
    let limits = hold::Limits { context: 128_000, output: 16_384, image: 4096 };
    let card = card();
    bencher.bench_local(|| {
        let bound = hold::bound(black_box(&facts), &limits, None);
        black_box(hold::amount(&bound, std::iter::once(&card)).unwrap_or(Amount::MAX))
    });
}

#[bench]
fn cost_of_usage(bencher: Bencher) {
    let usage = Usage { input: 1234, cache_read: 100, output: 567, ..Usage::default() };
    let card = card();
    bencher.bench_local(|| black_box(cost(&card, black_box(&usage)).unwrap()));
}

#[bench]
fn sketch(bencher: Bencher) {
    let mut sketch = Sketch::default();
    let mut value = 1_u64;
    bencher.bench_local(|| {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        sketch.record(black_box(value >> 40));
    });
    black_box(sketch.quantile(990));
}

fn layout(routes: usize) -> Layout {
    let endpoint = |n| EndpointSpec {
        name: format!("e{n}"),
        provider: format!("p{n}"),
        credential: CredentialId { provider: n, index: 0 },
        place: EndpointId(n),
        weight: 100,
        first_byte: Limit::Auto,
        first_event: Limit::Auto,
        price: None,
        parameters: None,
    };
    let model = ModelSpec {
        name: "m".to_owned(),
        operation: Operation::Chat,
        routes: (0..routes).map(EndpointId).collect(),
        reasoning: false,
        sort: Sort::Weight,
        explore: true,
    };
    Layout { endpoints: (0..routes).map(endpoint).collect(), models: vec![model] }
}

/// Whom a call asks, of so many routes of its model.
#[bench(args = [1, 10, 200, 1000])]
fn route_choice(bencher: Bencher, routes: usize) {
    let now = Instant::now();
    let (mut board, mut rng) = (Board::new(now, layout(routes)), Pcg64Mcg::seed_from_u64(1));
    let preferences = Preferences::default();
    let ask =
        Ask { models: &[ModelId(0)], form: Form::Stream, prompt_tokens: 300, preferences: &preferences };
    bencher.bench_local(|| match board.candidates(now, black_box(&ask), &mut rng) {
        Found::Plan(plan) => board.finish(black_box(plan).pass),
        Found::AllRefused { .. } | Found::NoneFits(_) => panic!("somebody can be asked"),
    });
}

/// All that the board does for a call that is served, a thousand calls a second: choice, attempt, what it teaches.
#[bench(args = [1, 10, 200, 1000], sample_count = 20, sample_size = 2000)]
fn served_call(bencher: Bencher, routes: usize) {
    let mut now = Instant::now();
    let (mut board, mut rng) = (Board::new(now, layout(routes)), Pcg64Mcg::seed_from_u64(1));
    let preferences = Preferences::default();
    let ask =
        Ask { models: &[ModelId(0)], form: Form::Stream, prompt_tokens: 300, preferences: &preferences };
    bencher.bench_local(|| {
        now += Duration::from_millis(1);
        let Found::Plan(mut plan) = board.candidates(now, black_box(&ask), &mut rng) else {
            panic!("all is well")
        };
        let begun = board.begin(now, &mut plan.pass, plan.order[0], false, &mut rng);
        let Begun::Go { mut ticket, .. } = begun else { panic!("all is well") };
        let took = Some(Duration::from_millis(300));
        board.answered(now, &mut ticket, Timing { head: took, event: took }, &mut rng);
        board.end(now, ticket, Outcome::Served { tokens_per_second: Some(50) }, &mut rng);
        board.finish(plan.pass);
    });
}

fn scopes() -> Scopes {
    let budget = |period| Budget { period, amount: Amount::MAX, zone: Zone::utc() };
    let all = Limits {
        requests_per_minute: Some(1 << 40),
        tokens_per_minute: Some(1 << 40),
        concurrency: Some(1 << 40),
        budgets: vec![budget(Period::Day), budget(Period::Month)],
    };
    let models = HashMap::from([("gpt-4o-mini".to_owned(), all.clone())]);
    Scopes { key: all.clone(), account: all, models }
}

/// A hold placed and ended in memory under every limit there is, beside so many that are open.
#[bench(args = [0, 100_000])]
fn admit_and_settle(bencher: Bencher, open: u128) {
    let (scopes, models, key) = (scopes(), ["gpt-4o-mini".to_owned()], KeyDigest([7; 32]));
    let mut purse = Purse::default();
    purse.grant(Amount::from_nano(1 << 60));
    let held = Amount::from_nano(1_000_000);
    let mut now = Now { ms: 1 << 30, unix_ms: 1_700_000_000_000 };
    let reserve = |purse: &mut Purse, now, id| {
        let want = Want { tokens: 1300, amount: held };
        let reserve = Reserve { hold: HoldId(id), key, models: &models, scopes: &scopes, want };
        black_box(purse.reserve(now, &reserve).unwrap());
    };
    (0..open).for_each(|id| reserve(&mut purse, now, id));
    let mut id = open;
    bencher.bench_local(|| {
        id += 1;
        // A hundred thousand calls a second.
        if id.is_multiple_of(100) {
            (now.ms, now.unix_ms) = (now.ms + 1, now.unix_ms + 1);
        }
        reserve(&mut purse, now, id);
        let cost = Amount::from_nano(250_000);
        let end =
            EndHold { hold: HoldId(id), held, key, model: "gpt-4o-mini", cost, tokens: 500, left: None };
        black_box(purse.end(now, &end));
    });
}

/// The first hold of a key, placed and ended in memory, where so many of its account have been used before.
#[bench(args = [1, 100_000], sample_count = 1000)]
fn first_hold_of_a_key(bencher: Bencher, used: u128) {
    let (scopes, models) = (scopes(), ["gpt-4o-mini".to_owned()]);
    let mut purse = Purse::default();
    purse.grant(Amount::from_nano(1 << 60));
    let held = Amount::from_nano(1_000_000);
    let now = Now { ms: 1 << 30, unix_ms: 1_700_000_000_000 };
    let mut call = |id: u128| {
        let mut digest = [7; 32];
        digest[..16]
            .copy_from_slice(&id.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835).to_be_bytes());
        let (hold, key) = (HoldId(id), KeyDigest(digest));
        let want = Want { tokens: 1300, amount: held };
        black_box(
            purse.reserve(now, &Reserve { hold, key, models: &models, scopes: &scopes, want }).unwrap(),
        );
        let cost = Amount::from_nano(250_000);
        black_box(
            purse.end(now, &EndHold { hold, held, key, model: "gpt-4o-mini", cost, tokens: 500, left: None }),
        );
    };
    (0..used).for_each(&mut call);
    let mut id = used;
    bencher.bench_local(|| {
        id += 1;
        call(id);
    });
}
