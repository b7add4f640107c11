//! What a token costs: pico-dollars, read exactly from "USD per million tokens".

use super::amount::{DecimalError, parse_decimal};

/// A price in pico-dollars per token. $1 per million tokens is 1,000,000 of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate(u64);

impl Rate {
    /// Free of charge, as somebody wrote it down; never what stands in for an unknown price.
    pub const FREE: Self = Self(0);

    /// So many pico-dollars per token.
    #[must_use]
    pub const fn from_pico(pico: u64) -> Self {
        Self(pico)
    }

    /// The number of pico-dollars per token.
    #[must_use]
    pub const fn pico(self) -> u64 {
        self.0
    }

    /// Reads USD per one million tokens from a decimal text, exactly. The finest step is `1e-6`
    /// (one pico-dollar per token).
    ///
    /// # Errors
    /// [`DecimalError`] for what is no decimal, negative, finer than that, or above 10¹² USD.
    pub fn parse_usd_per_million(text: &str) -> Result<Self, DecimalError> {
        let pico = parse_decimal(text, 6)?;
        match u64::try_from(pico) {
            Ok(pico) if pico <= 1_000_000_000_000_000_000 => Ok(Self(pico)),
            _ => Err(DecimalError::TooLarge(text.to_owned())),
        }
    }
}

/// The service tier that an answer was served by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// What one gets without asking.
    Standard,
    /// Faster, dearer.
    Priority,
    /// Slower, cheaper.
    Flex,
    /// Some time later, cheaper.
    Batch,
}

/// The prices of one model (or our cost of it at one provider), all tokens of a request alike.
///
/// Token kinds that a card does not name are charged as plain input or output, never as nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriceCard {
    /// Input tokens that no other field names.
    pub input: Rate,
    /// Output tokens, reasoning included.
    pub output: Rate,
    /// Input read from the provider's prompt cache.
    pub cache_read: Rate,
    /// Input written to the prompt cache for five minutes.
    pub cache_write_5m: Rate,
    /// Input written to the prompt cache for an hour.
    pub cache_write_1h: Rate,
    /// Audio input.
    pub audio_input: Rate,
    /// Pico-dollars for the request itself.
    pub per_request_pico: u64,
}

impl PriceCard {
    /// A card with one input and one output price, all other input kinds priced as input.
    #[must_use]
    pub const fn flat(input: Rate, output: Rate) -> Self {
        Self {
            input,
            output,
            cache_read: input,
            cache_write_5m: input,
            cache_write_1h: input,
            audio_input: input,
            per_request_pico: 0,
        }
    }

    /// The most that one input token can cost, of whatever kind it turns out to be.
    #[must_use]
    pub fn dearest_input(&self) -> Rate {
        [self.cache_read, self.cache_write_5m, self.cache_write_1h, self.audio_input]
            .into_iter()
            .fold(self.input, Rate::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_load_exactly() {
        let pico = |text: &str| Rate::parse_usd_per_million(text).map(Rate::pico);
        assert_eq!(pico("1.005"), Ok(1_005_000));
        assert_eq!(pico("0.0375"), Ok(37_500));
        assert_eq!(pico("600"), Ok(600_000_000));
        assert_eq!(pico("1e-6"), Ok(1));
        assert!(matches!(pico("1e-7"), Err(DecimalError::TooFine(..))));
        assert!(matches!(pico("NaN"), Err(DecimalError::NotDecimal(_))));
        assert!(matches!(pico("-1"), Err(DecimalError::Negative(_))));
        assert!(matches!(pico(""), Err(DecimalError::NotDecimal(_))));
        let sum = pico("0.1").unwrap().checked_add(pico("0.2").unwrap());
        assert_eq!(sum, pico("0.3").ok());
    }

    #[test]
    fn the_dearest_input_is_the_bound_for_every_kind() {
        let mut card = PriceCard::flat(Rate(3_000), Rate(15_000));
        card.cache_write_1h = Rate(6_000);
        assert_eq!(card.dearest_input(), Rate(6_000));
    }
}
