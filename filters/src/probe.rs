//! What a probe asks of a route, when, and what all probes together may cost.
//!
//! A probe is the smallest request of its dialect that is answered as a call is: one word in, one token out. It is
//! whole, not a stream, and a route is asked for the operation that most of its calls are. Every route has a time of
//! its own, drawn anew each round, so that routes are not asked at once and a provider sees no beat in it.
//!
//! Deliberately absent: whether an answer is one ([`crate::answer`]), and who of a fleet asks.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand_core::RngCore;
use serde_json::{Value, json};

use crate::dialect::Operation;
use crate::money::Amount;
use crate::upstream::backoff::fraction;

/// The operations that a route may be asked for, the likeliest first.
const LIKELIEST: [Operation; 6] = [
    Operation::Chat,
    Operation::Messages,
    Operation::Completions,
    Operation::Responses,
    Operation::Embeddings,
    Operation::CountTokens,
];
/// The fewest output tokens that the Responses API lets a caller ask for.
const RESPONSES_OUTPUT_MIN: u64 = 16;
/// How far a round may be off its time, either way, in parts of the time between two.
const JITTER: f64 = 0.1;
/// A day in milliseconds.
const DAY_MS: i64 = 86_400_000;

/// What to ask a route for that serves these; `None`: nothing that a probe could ask.
#[must_use]
pub fn operation(serves: &[Operation], gives_output: bool) -> Option<Operation> {
    let fits = |asked: &Operation| serves.contains(asked) && (gives_output || !asked.has_output());
    LIKELIEST.into_iter().find(fits)
}

/// The smallest request for a model.
#[must_use]
pub fn request(operation: Operation, model: &str) -> Vec<u8> {
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let request: Value = match operation {
        Operation::Chat => json!({ "model": model, "messages": messages, "max_completion_tokens": 1 }),
        Operation::Messages => json!({ "model": model, "messages": messages, "max_tokens": 1 }),
        Operation::Completions => json!({ "model": model, "prompt": "hi", "max_tokens": 1 }),
        Operation::Responses => {
            json!({ "model": model, "input": "hi", "max_output_tokens": RESPONSES_OUTPUT_MIN, "store": false })
        }
        Operation::Embeddings => json!({ "model": model, "input": "hi" }),
        Operation::CountTokens => json!({ "model": model, "messages": messages }),
    };
    request.to_string().into_bytes()
}

/// When each of several things is to be done next. As many are remembered as are there.
#[derive(Debug)]
pub struct Schedule<K> {
    every: Duration,
    next: BTreeMap<K, Instant>,
}

impl<K: Ord + Clone> Schedule<K> {
    /// Each once in `every`, more or less.
    #[must_use]
    pub const fn new(every: Duration) -> Self {
        Self { every, next: BTreeMap::new() }
    }

    /// Those of `all` that are to be done now. What is new is spread over the first round; what is not there any more
    /// is forgotten; what was missed is done once.
    pub fn due(&mut self, now: Instant, all: &[K], rng: &mut impl RngCore) -> Vec<K> {
        self.next.retain(|known, _| all.contains(known));
        let mut due = vec![];
        for one in all {
            let Some(at) = self.next.get(one).copied() else {
                self.next.insert(one.clone(), now + self.every.mul_f64(fraction(rng)));
                continue;
            };
            if at <= now {
                let off = 1.0 - JITTER + 2.0 * JITTER * fraction(rng);
                self.next.insert(one.clone(), now + self.every.mul_f64(off));
                due.push(one.clone());
            }
        }
        due
    }
}

/// What probes may cost in one day of UTC.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    per_day: Amount,
    day: i64,
    spent: Amount,
    is_used_up: bool,
}

/// Whether a probe may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum May {
    /// It may.
    Send,
    /// The day's allowance does not carry it. `first`: it is the first of the day that is told so.
    Not {
        /// To be said aloud once.
        first: bool,
    },
}

impl Allowance {
    /// So much a day; `spent` of it on the day of `unix_ms` already.
    #[must_use]
    pub const fn new(per_day: Amount, unix_ms: i64, spent: Amount) -> Self {
        Self { per_day, day: unix_ms.div_euclid(DAY_MS), spent, is_used_up: false }
    }

    /// When the day of an instant began, in milliseconds since 1970.
    #[must_use]
    pub const fn midnight(unix_ms: i64) -> i64 {
        unix_ms.saturating_sub(unix_ms.rem_euclid(DAY_MS))
    }

    /// Whether one that costs `at_most` may be sent. What it may cost counts until its cost is known.
    pub fn reserve(&mut self, unix_ms: i64, at_most: Amount) -> May {
        self.begin_day(unix_ms);
        match self.spent.checked_add(at_most).filter(|sum| *sum <= self.per_day) {
            Some(sum) => {
                self.spent = sum;
                May::Send
            }
            None => May::Not { first: !std::mem::replace(&mut self.is_used_up, true) },
        }
    }

    /// One that was sent has cost `cost`.
    pub fn spend(&mut self, unix_ms: i64, reserved: Amount, cost: Amount) {
        // What was reserved yesterday does not count today.
        if !self.begin_day(unix_ms) {
            self.spent = self.spent.less(reserved).max(Amount::ZERO);
        }
        self.spent = self.spent.checked_add(cost).unwrap_or(Amount::MAX);
    }

    /// Whether a probe was held back today.
    #[must_use]
    pub const fn is_used_up(&self) -> bool {
        self.is_used_up
    }

    fn begin_day(&mut self, unix_ms: i64) -> bool {
        let day = unix_ms.div_euclid(DAY_MS);
        let begins = day != self.day;
        if begins {
            *self = Self { day, spent: Amount::ZERO, is_used_up: false, ..*self };
        }
        begins
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_core::SeedableRng;
    use rand_pcg::Pcg64Mcg;

    use super::*;
    use crate::hold::{self, Limits};

    const LIMITS: Limits = Limits { context: 128_000, output: 16_384, image: 4096 };

    #[test]
    fn every_request_is_good_and_asks_for_the_least_output() {
        for operation in Operation::ALL {
            let body = request(operation, "a \"b\"");
            let facts = operation.read(&body).unwrap_or_else(|error| panic!("{operation:?}: {error:?}"));
            assert_eq!(facts.model, "a \"b\"");
            assert!(!facts.stream);
            let bound = hold::bound(&facts, &LIMITS, None);
            let most = match operation {
                Operation::Responses => 16,
                Operation::Embeddings | Operation::CountTokens => 0,
                Operation::Chat | Operation::Completions | Operation::Messages => 1,
            };
            assert!(bound.output <= most.max(facts.output_limit.unwrap_or(0)), "{operation:?}: {bound:?}");
            assert_eq!(facts.output_limit, Some(most), "{operation:?}");
            assert!(bound.input < 200, "{operation:?}: {bound:?}");
        }
    }

    #[test]
    fn a_route_is_asked_for_what_most_of_its_calls_are() {
        let openai = [Operation::Embeddings, Operation::Responses, Operation::Chat];
        assert_eq!(operation(&openai, true), Some(Operation::Chat));
        assert_eq!(operation(&openai, false), Some(Operation::Embeddings), "it gives no output");
        assert_eq!(
            operation(&[Operation::CountTokens, Operation::Messages], true),
            Some(Operation::Messages)
        );
        assert_eq!(operation(&[Operation::Chat], false), None);
    }

    #[test]
    fn a_days_allowance_is_never_passed_and_said_to_be_used_up_once() {
        let usd = Amount::from_nano;
        let mut allowance = Allowance::new(usd(100), 0, usd(40));
        assert_eq!(allowance.reserve(1, usd(60)), May::Send);
        assert_eq!(allowance.reserve(2, usd(1)), May::Not { first: true });
        assert_eq!(allowance.reserve(3, usd(1)), May::Not { first: false });
        allowance.spend(4, usd(60), usd(10));
        assert_eq!(allowance.reserve(5, usd(50)), May::Send, "it cost less than it might have");
        assert!(allowance.is_used_up());
        assert_eq!(allowance.reserve(DAY_MS, usd(100)), May::Send, "the next day");
        assert!(!allowance.is_used_up());
        assert_eq!(Allowance::midnight(2 * DAY_MS + 7), 2 * DAY_MS);
    }

    proptest! {
        #[test]
        fn what_was_spent_stays_within_the_allowance(
            costs in prop::collection::vec((0_i64..2_000_000, 1_i64..50, 0_i64..50), 1..200),
        ) {
            let mut allowance = Allowance::new(Amount::from_nano(300), 0, Amount::ZERO);
            let (mut now, mut days) = (0_i64, BTreeMap::<i64, i64>::new());
            for (later, most, less) in costs {
                now += later;
                let most = Amount::from_nano(most);
                if allowance.reserve(now, most) == May::Send {
                    let cost = most.less(Amount::from_nano(less)).max(Amount::ZERO);
                    allowance.spend(now, most, cost);
                    *days.entry(now / DAY_MS).or_default() += cost.nano();
                }
            }
            prop_assert!(days.values().all(|spent| *spent <= 300), "{days:?}");
        }

        #[test]
        fn each_is_done_once_in_a_round_and_never_twice_at_once(seed: u64, count in 1_usize..20) {
            let mut rng = Pcg64Mcg::seed_from_u64(seed);
            let every = Duration::from_secs(90);
            let all: Vec<usize> = (0..count).collect();
            let mut schedule = Schedule::new(every);
            let begin = Instant::now();
            let mut done = vec![0_u32; count];
            for second in 0..900 {
                for one in schedule.due(begin + Duration::from_secs(second), &all, &mut rng) {
                    done[one] += 1;
                }
            }
            // Ten rounds: the first somewhere in it, the others at most a tenth and a look off.
            prop_assert!(done.iter().all(|times| (8..=11).contains(times)), "{done:?}");
        }
    }
}
