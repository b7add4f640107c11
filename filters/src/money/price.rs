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

/// How fast a provider is asked to serve, where it sells more than one speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The usual one.
    #[default]
    Standard,
    /// Faster and dearer.
    Priority,
    /// Slower and cheaper.
    Flex,
    /// Within a day.
    Batch,
}

/// All prices of one model. A request keeps the list that it was admitted with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriceList {
    /// Tells one list from another; stored with every charge.
    pub version: u32,
    /// What usually counts.
    pub standard: PriceCard,
    /// What counts for the *whole* request once its prompt is longer than so many tokens.
    pub long_context: Option<(u64, PriceCard)>,
    /// What counts where another tier served.
    pub tiers: Vec<(Tier, PriceCard)>,
}

impl PriceList {
    /// A list of one card.
    #[must_use]
    pub const fn flat(card: PriceCard) -> Self {
        Self { version: 0, standard: card, long_context: None, tiers: vec![] }
    }

    /// The card that counts for a request with so many prompt tokens, served by `tier`. A tier without
    /// a card of its own is charged as the standard one.
    #[must_use]
    pub fn card(&self, prompt_tokens: u64, tier: Tier) -> &PriceCard {
        if let Some((_, card)) = self.tiers.iter().find(|(known, _)| *known == tier) {
            return card;
        }
        match &self.long_context {
            Some((above, card)) if prompt_tokens > *above => card,
            _ => &self.standard,
        }
    }

    /// Every card that may count for a request of at most so many prompt tokens that asks for `tier`:
    /// the tiers are cliffs, so a hold has to bound them all. A provider that serves a tier which was
    /// not asked for is charged for by it; what that exceeds the hold by is an excess.
    pub fn reachable(&self, prompt_tokens_max: u64, tier: Tier) -> impl Iterator<Item = &PriceCard> {
        let long = self.long_context.iter().filter(move |(above, _)| prompt_tokens_max > *above);
        let asked = self.tiers.iter().filter(move |(known, _)| *known == tier);
        std::iter::once(&self.standard).chain(long.map(|(_, card)| card)).chain(asked.map(|(_, card)| card))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_and_long_prompts_have_cards_of_their_own() {
        let card = |rate| PriceCard::flat(Rate(rate), Rate(rate));
        let list = PriceList {
            version: 1,
            standard: card(10),
            long_context: Some((200_000, card(20))),
            tiers: vec![(Tier::Priority, card(17)), (Tier::Flex, card(5))],
        };
        assert_eq!(list.card(200_000, Tier::Standard), &card(10));
        assert_eq!(list.card(200_001, Tier::Standard), &card(20), "the whole request, not the rest");
        assert_eq!(list.card(10, Tier::Priority), &card(17));
        assert_eq!(list.card(10, Tier::Batch), &card(10), "no card of its own");
        let reach = |tokens, tier| list.reachable(tokens, tier).map(|c| c.input.pico()).max();
        assert_eq!(reach(1_000, Tier::Standard), Some(10));
        assert_eq!(reach(300_000, Tier::Standard), Some(20));
        assert_eq!(reach(1_000, Tier::Priority), Some(17));
        assert_eq!(reach(1_000, Tier::Flex), Some(10), "flex may be served as standard");
    }

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
