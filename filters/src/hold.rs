//! The most that a call can cost.
//!
//! Input: a byte-level BPE token covers at least one byte, so the bytes of the body bound its
//! tokens; the chat template adds a few tokens a message, an image counts by its model's cap, and
//! nothing can exceed the context window. Output: the caller's bound, or the smaller of the model's
//! limit and the key's default, which is then *written into the upstream request* so that the
//! provider enforces it. Fixed once per request, for all attempts.

use crate::facts::{Extra, Facts, Surcharge};
use crate::money::{Amount, CostError, PriceCard, PriceList, cost};
use crate::stream::usage::Usage;

/// Template tokens around one message. `OpenAI` publishes 3; twice that and some.
const TOKENS_PER_MESSAGE: u64 = 8;
/// Template tokens around a whole request.
const TOKENS_PER_REQUEST: u64 = 16;

/// What a model can take and give at most, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Input and output together.
    pub context: u64,
    /// Output of one choice.
    pub output: u64,
    /// One image, at its largest.
    pub image: u64,
}

/// An upper bound of a call's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Input tokens.
    pub input: u64,
    /// Output tokens of all choices together.
    pub output: u64,
    /// The output bound of one choice to write upstream, where the caller gave none.
    pub write_output: Option<u64>,
    /// The output bound of one choice to write over the caller's own, which the balance cannot carry.
    pub clamped: Option<u64>,
    /// The output bound of one choice, where it was lowered to what the balance carries.
    pub lowered: Option<u64>,
}

/// The bound of a call to a model with these limits. `default_output` is the key's own.
#[must_use]
pub fn bound(facts: &Facts, limits: &Limits, default_output: Option<u64>) -> Bound {
    let input = if facts.input.beyond_body {
        window(facts, limits)
    } else {
        let template = facts.input.messages.saturating_mul(TOKENS_PER_MESSAGE);
        let images = facts.input.inline_images.saturating_mul(limits.image);
        let all = [facts.input.tokens, template, images, facts.input.template_tokens, TOKENS_PER_REQUEST]
            .into_iter()
            .fold(facts.input.bytes, u64::saturating_add);
        all.min(window(facts, limits))
    };
    let ours = [default_output, facts.output_default].into_iter().flatten().fold(limits.output, u64::min);
    let output = facts.output_limit.unwrap_or(ours).saturating_mul(facts.samples);
    Bound {
        input,
        output,
        write_output: facts.output_limit.is_none().then_some(ours),
        clamped: None,
        lowered: None,
    }
}

/// What a call can read at most: a context window for each text that is read apart.
#[must_use]
pub fn window(facts: &Facts, limits: &Limits) -> u64 {
    limits.context.saturating_mul(facts.input.texts.max(1))
}

/// What a call can be reported to have read at most. Where tools run at the provider's, the model reads everything
/// again after each; a hold covers one reading, and what is above it is an excess.
#[must_use]
pub fn most_read(facts: &Facts, limits: &Limits) -> u64 {
    window(facts, limits).saturating_mul(facts.input.rounds.max(1))
}

/// The first thing that a request asks for, costs more than its tokens, has no price in `list`, and was not
/// allowed to do without one.
#[must_use]
pub fn unpriced(facts: &Facts, list: &PriceList, allowed: &[Extra]) -> Option<Surcharge> {
    let has_price = |extra| match extra {
        Extra::ServiceTier => list.tiers.iter().any(|(tier, _)| *tier == facts.tier),
        Extra::ServerTools | Extra::Speed | Extra::InferenceGeo | Extra::AudioOutput => false,
    };
    let mut asked = facts.surcharges.iter().copied();
    asked.find(|asked| !allowed.contains(&asked.extra) && !has_price(asked.extra))
}

/// The hold for `bound` at the dearest of `cards`.
///
/// # Errors
/// [`CostError`] when it is more than an amount can hold.
pub fn amount<'a>(bound: &Bound, cards: impl Iterator<Item = &'a PriceCard>) -> Result<Amount, CostError> {
    let mut most = Amount::ZERO;
    for card in cards {
        let dearest = PriceCard { input: card.dearest_input(), ..*card };
        let usage = Usage { input: bound.input, output: bound.output, ..Usage::default() };
        most = most.max(cost(&dearest, &usage)?);
    }
    Ok(most)
}

/// The input bound where the tokens have been counted: 2 % and a little more for what a template adds.
#[must_use]
pub fn counted(bound: &Bound, tokens: u64, facts: &Facts, limits: &Limits) -> Bound {
    let template = facts.input.messages.saturating_mul(TOKENS_PER_MESSAGE);
    let images = facts.input.inline_images.saturating_mul(limits.image);
    let slack = [tokens / 50, 64, template, images, TOKENS_PER_REQUEST];
    let input = slack.into_iter().fold(tokens, u64::saturating_add).min(bound.input);
    Bound { input, ..*bound }
}

/// The bound with as much output as `money` carries, but not less than `least` tokens a choice. Never
/// more than the bound has; `None` when even that is too dear.
#[must_use]
pub fn clamped(bound: &Bound, facts: &Facts, list: &PriceList, money: Amount, least: u64) -> Option<Bound> {
    let with = |each: u64| Bound { output: each.saturating_mul(facts.samples), ..*bound };
    let fits = |each: u64| {
        let held = amount(&with(each), list.reachable(bound.input, facts.tier));
        held.is_ok_and(|held| held <= money)
    };
    let most = bound.output.checked_div(facts.samples)?;
    if fits(most) {
        return Some(*bound); // Of several models another one is too dear: there is nothing to lower here.
    }
    let explicit = facts.output_limit.is_some();
    // What cannot be written over upstream would not be enforced there.
    let writable = !explicit || !facts.spans.output_limits.is_empty();
    if most < least || !writable || !fits(least) {
        return None;
    }
    let (mut low, mut high) = (least, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Some(Bound {
        write_output: (!explicit).then_some(low),
        clamped: explicit.then_some(low),
        lowered: Some(low),
        ..with(low)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::facts::{Input, Spans};
    use crate::money::{Rate, Tier, settle};

    const LIMITS: Limits = Limits { context: 128_000, output: 16_384, image: 4_096 };

    fn facts(bytes: u64, output_limit: Option<u64>) -> Facts {
        Facts {
            model: "gpt-a".into(),
            stream: false,
            wants_usage: false,
            output_limit,
            output_default: None,
            choices: 1,
            samples: 1,
            echoed_bytes: 0,
            tier: Tier::Standard,
            surcharges: vec![],
            input: Input { bytes, messages: 1, ..Input::default() },
            foldable: false,
            preferences: crate::preferences::Preferences::default(),
            spans: Spans::default(),
        }
    }

    #[test]
    fn without_a_bound_of_the_callers_ours_is_written_upstream() {
        let found = bound(&facts(100, None), &LIMITS, Some(1_000));
        assert_eq!((found.output, found.write_output), (1_000, Some(1_000)));
        let found = bound(&facts(100, None), &LIMITS, None);
        assert_eq!(found.write_output, Some(16_384));
    }

    #[test]
    fn an_explicit_bound_is_never_lowered() {
        let found = bound(&facts(100, Some(50_000)), &LIMITS, Some(1_000));
        assert_eq!((found.output, found.write_output), (50_000, None));
    }

    #[test]
    fn what_has_no_price_is_found_unless_it_is_allowed() {
        let flat = PriceList::flat(PriceCard::flat(Rate::from_pico(1), Rate::from_pico(1)));
        let mut asks = facts(100, None);
        assert_eq!(unpriced(&asks, &flat, &[]), None);
        asks.tier = Tier::Priority;
        asks.surcharges = [(Extra::ServiceTier, "service_tier"), (Extra::Speed, "speed")]
            .map(|(extra, field)| Surcharge { extra, field })
            .to_vec();
        let found = |list, allowed: &[Extra]| unpriced(&asks, list, allowed).map(|asked| asked.field);
        assert_eq!(found(&flat, &[]), Some("service_tier"));
        assert_eq!(found(&flat, &[Extra::ServiceTier]), Some("speed"));
        assert_eq!(found(&flat, &[Extra::ServiceTier, Extra::Speed]), None);
        let tiered = PriceList { tiers: vec![(Tier::Priority, flat.standard)], ..flat.clone() };
        assert_eq!(found(&tiered, &[]), Some("speed"), "the tier has a price");
        assert_eq!(found(&tiered, &[Extra::Speed]), None);
    }

    #[test]
    fn every_choice_is_held_for() {
        let mut three = facts(100, Some(10));
        three.samples = 3;
        assert_eq!(bound(&three, &LIMITS, None).output, 30);
    }

    #[test]
    fn what_the_api_gives_by_itself_bounds_what_we_write() {
        let mut text = facts(100, None);
        text.output_default = Some(16);
        assert_eq!(bound(&text, &LIMITS, None).write_output, Some(16));
        assert_eq!(bound(&text, &LIMITS, Some(1_000)).write_output, Some(16));
        assert_eq!(bound(&text, &LIMITS, Some(7)).write_output, Some(7));
    }

    #[test]
    fn texts_that_are_read_apart_have_a_window_each() {
        let mut many = facts(9_000_000, Some(0));
        many.input.texts = 3;
        assert_eq!(bound(&many, &LIMITS, None).input, 3 * 128_000);
        many.input.rounds = 2;
        assert_eq!(bound(&many, &LIMITS, None).input, 3 * 128_000, "a hold is for one reading");
        assert_eq!(most_read(&many, &LIMITS), 2 * 3 * 128_000);
        let mut numbers = facts(30, Some(0));
        numbers.input.tokens = 500;
        assert_eq!(bound(&numbers, &LIMITS, None).input, 30 + 500 + 8 + 16);
    }

    #[test]
    fn what_lies_beyond_the_body_is_bounded_by_the_window() {
        let mut remote = facts(100, Some(10));
        remote.input.beyond_body = true;
        assert_eq!(bound(&remote, &LIMITS, None).input, 128_000);
        assert_eq!(bound(&facts(9_000_000, None), &LIMITS, None).input, 128_000);
    }

    #[test]
    fn what_a_provider_puts_around_tools_is_held_for() {
        let plain = facts(100, Some(10));
        let mut tools = plain.clone();
        tools.input.template_tokens = 1_024;
        assert_eq!(bound(&tools, &LIMITS, None).input, bound(&plain, &LIMITS, None).input + 1_024);
    }

    #[test]
    fn the_dearest_card_decides() {
        let cheap = PriceCard::flat(Rate::from_pico(1_000), Rate::from_pico(1_000));
        let dear = PriceCard::flat(Rate::from_pico(9_000), Rate::from_pico(9_000));
        let bound = bound(&facts(0, Some(1_000)), &LIMITS, None);
        assert_eq!(amount(&bound, [&cheap, &dear].into_iter()), amount(&bound, [&dear].into_iter()));
    }

    #[test]
    fn clamping_takes_what_the_money_carries_and_not_less_than_the_least() {
        let card = PriceCard::flat(Rate::from_pico(1_000), Rate::from_pico(1_000_000));
        let list = PriceList::flat(card);
        let mut facts = facts(1_000, Some(10_000));
        facts.spans.output_limits.push(0..1);
        let bound = bound(&facts, &LIMITS, None);
        let money = |nano| Amount::from_nano(nano);
        let clamped = |nano, least| clamped(&bound, &facts, &list, money(nano), least);
        assert_eq!(clamped(3_000_000, 1_024).unwrap().clamped, Some(2_998));
        assert_eq!(clamped(3_000_000, 2_999), None);
        assert_eq!(clamped(i64::MAX, 1_024).unwrap().output, 10_000, "never raised");
    }

    #[test]
    fn what_the_money_carries_as_it_is_is_not_lowered() {
        let list = PriceList::flat(PriceCard::flat(Rate::from_pico(1_000), Rate::from_pico(1_000)));
        for limit in [None, Some(10)] {
            let facts = facts(1_000, limit);
            let whole = bound(&facts, &Limits { output: 100, ..LIMITS }, None);
            let most = amount(&whole, [&list.standard].into_iter()).unwrap();
            assert_eq!(clamped(&whole, &facts, &list, most, 1_024), Some(whole), "{limit:?}");
        }
    }

    #[test]
    fn a_count_only_ever_lowers_the_bound() {
        let facts = facts(10_000, Some(10));
        let bytes = bound(&facts, &LIMITS, None);
        assert_eq!(counted(&bytes, 2_500, &facts, &LIMITS).input, 2_500 + 50 + 64 + 8 + 16);
        assert_eq!(counted(&bytes, 1_000_000, &facts, &LIMITS).input, bytes.input);
    }

    proptest! {
        #[test]
        fn use_within_the_bound_is_always_covered(
            bytes in 0_u64..500_000, limit in prop::option::of(1_u64..200_000), part in 1_u64..=10,
            input_rate in 0_u64..1 << 30, output_rate in 0_u64..1 << 30, cached_rate in 0_u64..1 << 30,
        ) {
            let mut card = PriceCard::flat(Rate::from_pico(input_rate), Rate::from_pico(output_rate));
            card.cache_write_1h = Rate::from_pico(cached_rate);
            let bound = bound(&facts(bytes, limit), &LIMITS, None);
            let held = amount(&bound, [&card].into_iter()).unwrap();
            let cached = bound.input / 2;
            let used = Usage {
                input: bound.input - cached,
                cache_write_1h: cached,
                output: bound.output / part,
                ..Usage::default()
            };
            let end = settle(held, cost(&card, &used).unwrap(), Amount::ZERO);
            prop_assert_eq!(end.shortfall, Amount::ZERO);
        }
    }
}
