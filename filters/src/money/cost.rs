//! What a use costs: one sum in `i128`, one rounding, upwards.

use super::{Amount, PriceCard};
use crate::stream::usage::Usage;

/// Pico-dollars per nano-dollar.
const PICO_PER_NANO: i128 = 1_000;

/// Why a cost could not be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CostError {
    /// The sum is more than an amount can hold (9.2 billion dollars).
    #[error("the cost is larger than an amount can hold")]
    TooLarge,
}

/// What `usage` costs by `card`, rounded up to the next nano-dollar.
///
/// # Errors
/// [`CostError::TooLarge`] when the sum does not fit an [`Amount`].
pub fn cost(card: &PriceCard, usage: &Usage) -> Result<Amount, CostError> {
    let Usage { input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning: _ } =
        *usage;
    let lines = [
        (input, card.input),
        (cache_read, card.cache_read),
        (cache_write_5m, card.cache_write_5m),
        (cache_write_1h, card.cache_write_1h),
        (audio_input, card.audio_input),
        (output, card.output),
    ];
    let mut pico = i128::from(card.per_request_pico);
    for (tokens, rate) in lines {
        let line = i128::from(tokens).checked_mul(i128::from(rate.pico()));
        pico = line.and_then(|line| pico.checked_add(line)).ok_or(CostError::TooLarge)?;
    }
    round_up(pico)
}

/// The one rounding.
fn round_up(pico: i128) -> Result<Amount, CostError> {
    let whole = pico.checked_div(PICO_PER_NANO).ok_or(CostError::TooLarge)?;
    let rest = pico.checked_rem(PICO_PER_NANO).ok_or(CostError::TooLarge)?;
    let nano = whole.checked_add(i128::from(rest > 0)).ok_or(CostError::TooLarge)?;
    i64::try_from(nano).map(Amount::from_nano).map_err(|_| CostError::TooLarge)
}

#[cfg(test)]
#[expect(clippy::arithmetic_side_effects, reason = "test arithmetic")]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::money::Rate;

    fn card() -> PriceCard {
        let mut card = PriceCard::flat(Rate::from_pico(2_500_000), Rate::from_pico(10_000_000));
        card.cache_read = Rate::from_pico(1_250_000);
        card
    }

    #[test]
    fn ten_in_and_five_out_cost_what_the_price_list_says() {
        let usage = Usage { input: 10, output: 5, ..Usage::default() };
        assert_eq!(cost(&card(), &usage), Ok(Amount::from_nano(75_000)));
    }

    #[test]
    fn the_smallest_use_is_not_free() {
        let card = PriceCard::flat(Rate::from_pico(1), Rate::FREE);
        let usage = Usage { input: 1, ..Usage::default() };
        assert_eq!(cost(&card, &usage), Ok(Amount::from_nano(1)));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let card = PriceCard::flat(Rate::from_pico(u64::MAX), Rate::from_pico(u64::MAX));
        let usage = Usage { input: u64::MAX, output: u64::MAX, ..Usage::default() };
        assert_eq!(cost(&card, &usage), Err(CostError::TooLarge));
    }

    proptest! {
        #[test]
        fn cost_is_monotone_and_rounds_once(
            input in 0..1_u64 << 40, output in 0..1_u64 << 40, more in 0..1_u64 << 20,
            rate in 0..1_u64 << 20, per_request in 0..1_u64 << 30,
        ) {
            let mut card = PriceCard::flat(Rate::from_pico(rate), Rate::from_pico(rate / 2 + 1));
            card.per_request_pico = per_request;
            let usage = Usage { input, output, ..Usage::default() };
            let wider = Usage { input: input + more, ..usage };
            let (small, large) = (cost(&card, &usage).unwrap(), cost(&card, &wider).unwrap());
            prop_assert!(small <= large);
            let exact = i128::from(per_request) + i128::from(input) * i128::from(rate)
                + i128::from(output) * i128::from(rate / 2 + 1);
            let error = i128::from(small.nano()) * 1000 - exact;
            prop_assert!((0..1000).contains(&error), "rounded up, by less than one nano-dollar");
        }
    }
}
