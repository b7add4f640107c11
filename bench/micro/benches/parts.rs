//! What a request and each of its chunks cost to compute, without sockets, disk or threads.

use std::hint::black_box;

use bytes::Bytes;
use divan::counter::BytesCount;
use divan::{Bencher, bench};
use filters::dialect::{Operation, Shape};
use filters::hold;
use filters::money::{Amount, PriceCard, Rate, cost};
use filters::stream::sse::Scanner;
use filters::stream::usage::Usage;
use filters::upstream::sketch::Sketch;

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
