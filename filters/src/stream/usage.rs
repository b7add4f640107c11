//! Token counts, normalised: every input token stands in exactly one field.
//!
//! Providers disagree on what their numbers include (`reliability.md` §5): `OpenAI`'s
//! `prompt_tokens` contains the cached ones, Anthropic's `input_tokens` does not. The dialects
//! bring both to this form, so that no token is billed twice or dropped.

/// Tokens of one call. The input kinds are disjoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Input at the plain price.
    pub input: u64,
    /// Input read from the prompt cache.
    pub cache_read: u64,
    /// Input written to the cache for five minutes.
    pub cache_write_5m: u64,
    /// Input written to the cache for an hour.
    pub cache_write_1h: u64,
    /// Audio input.
    pub audio_input: u64,
    /// All output, reasoning included.
    pub output: u64,
    /// How much of `output` was reasoning; a detail, never billed beside it.
    pub reasoning: u64,
}

impl Usage {
    /// All input-side tokens.
    #[must_use]
    pub fn prompt(&self) -> u64 {
        [self.cache_read, self.cache_write_5m, self.cache_write_1h, self.audio_input]
            .into_iter()
            .fold(self.input, u64::saturating_add)
    }
}

/// A usage report as a provider sent it, after normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reported {
    /// The counts.
    pub usage: Usage,
    /// Something in it did not add up and was clamped (more cached tokens than prompt tokens).
    pub anomaly: bool,
}
