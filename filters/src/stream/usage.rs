//! Token counts, normalised: every input token stands in exactly one field.
//!
//! Providers disagree on what their numbers include (`reliability.md` §5): `OpenAI`'s
//! `prompt_tokens` contains the cached ones, Anthropic's `input_tokens` does not. The dialects
//! bring both to this form, so that no token is billed twice or dropped.

use serde_json::Value;

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
///
/// It may be partial: a field that it does not name is `None` and keeps what an earlier report of the
/// same answer said, a field that it names replaces it. Nothing is ever added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// Input at the plain price.
    pub input: Option<u64>,
    /// Input read from the prompt cache.
    pub cache_read: Option<u64>,
    /// Input written to the cache, for whatever time.
    pub cache_write: Option<u64>,
    /// How much of it was written for five minutes. What no part names counts here.
    pub cache_write_5m: Option<u64>,
    /// How much of it was written for an hour.
    pub cache_write_1h: Option<u64>,
    /// Audio input.
    pub audio_input: Option<u64>,
    /// All output, reasoning included.
    pub output: Option<u64>,
    /// How much of the output was reasoning.
    pub reasoning: Option<u64>,
    /// How far the output can be relied on.
    pub standing: Standing,
    /// Something in it did not add up and was clamped (more cached tokens than prompt tokens).
    pub anomaly: bool,
}

/// How far a reported output can be relied on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// From the beginning of an answer: a start and no more, however the answer ends.
    Early,
    /// What was used so far: final if the answer comes to its end.
    #[default]
    SoFar,
    /// Final, even if the stream breaks behind it.
    Final,
}

impl Reported {
    /// A report that names everything.
    #[must_use]
    pub fn whole(usage: &Usage, anomaly: bool) -> Self {
        let Usage { input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning } =
            *usage;
        Self {
            input: Some(input),
            cache_read: Some(cache_read),
            cache_write: Some(cache_write_5m.saturating_add(cache_write_1h)),
            cache_write_5m: Some(cache_write_5m),
            cache_write_1h: Some(cache_write_1h),
            audio_input: Some(audio_input),
            output: Some(output),
            reasoning: Some(reasoning),
            standing: Standing::SoFar,
            anomaly,
        }
    }

    /// This report with everything replaced that `later` names.
    #[must_use]
    pub fn replaced_by(self, later: Self) -> Self {
        Self {
            input: later.input.or(self.input),
            cache_read: later.cache_read.or(self.cache_read),
            cache_write: later.cache_write.or(self.cache_write),
            cache_write_5m: later.cache_write_5m.or(self.cache_write_5m),
            cache_write_1h: later.cache_write_1h.or(self.cache_write_1h),
            audio_input: later.audio_input.or(self.audio_input),
            output: later.output.or(self.output),
            reasoning: later.reasoning.or(self.reasoning),
            standing: if later.output.is_some() { later.standing } else { self.standing },
            anomaly: self.anomaly || later.anomaly,
        }
    }

    /// The counts, with `own_input` for a prompt that is not named. Answers also whether the parts of
    /// the cache writes were more than their sum and had to be clamped.
    #[must_use]
    pub fn usage(&self, own_input: u64) -> (Usage, bool) {
        let cache_read = self.cache_read.unwrap_or(0);
        let audio_input = self.audio_input.unwrap_or(0);
        let parts = self.cache_write_5m.unwrap_or(0).saturating_add(self.cache_write_1h.unwrap_or(0));
        // The sum is what counts: a part that is missing is a rest, a part too large is cut.
        let written = self.cache_write.unwrap_or(parts);
        let cache_write_1h = self.cache_write_1h.unwrap_or(0).min(written);
        let cached = cache_read.saturating_add(written).saturating_add(audio_input);
        let usage = Usage {
            input: self.input.unwrap_or_else(|| own_input.saturating_sub(cached)),
            cache_read,
            cache_write_5m: written - cache_write_1h,
            cache_write_1h,
            audio_input,
            output: self.output.unwrap_or(0),
            reasoning: self.reasoning.unwrap_or(0),
        };
        (usage, parts > written)
    }
}

/// A count above this is a fault, not a use.
const TOKENS_MAX: u64 = 1_000_000_000_000;

/// A token count: whole, or written as `12.0` or `"12"` by servers that know no better. `None` when
/// it cannot be believed.
#[must_use]
pub fn tokens(value: &Value) -> Option<u64> {
    let whole = match value {
        Value::Number(number) => match number.as_u64() {
            Some(whole) => Some(whole),
            None => whole_float(number.as_f64()?),
        },
        Value::String(text) => text.trim().parse().ok().or_else(|| whole_float(text.trim().parse().ok()?)),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    };
    whole.filter(|n| *n <= TOKENS_MAX)
}

fn whole_float(number: f64) -> Option<u64> {
    let sound = number.is_finite() && number.fract() == 0.0 && (0.0..=1e12).contains(&number);
    // Through text, since a cast would be silent about what it loses.
    sound.then(|| format!("{number:.0}").parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn writes(cache_write: Option<u64>, five: Option<u64>, hour: Option<u64>) -> (u64, u64, bool) {
        let report =
            Reported { cache_write, cache_write_5m: five, cache_write_1h: hour, ..Reported::default() };
        let (usage, clamped) = report.usage(0);
        (usage.cache_write_5m, usage.cache_write_1h, clamped)
    }

    #[test]
    fn every_written_token_counts_once_whichever_part_is_named() {
        assert_eq!(writes(Some(1_000), Some(400), Some(600)), (400, 600, false));
        assert_eq!(writes(Some(1_000), None, Some(600)), (400, 600, false), "the rest is for five minutes");
        assert_eq!(writes(Some(1_000), Some(300), Some(600)), (400, 600, false));
        assert_eq!(writes(Some(1_000), None, None), (1_000, 0, false));
        assert_eq!(writes(None, Some(400), Some(600)), (400, 600, false));
        assert_eq!(writes(Some(500), Some(400), Some(600)), (0, 500, true), "parts above their sum");
    }

    #[test]
    fn a_later_report_replaces_what_it_names_and_nothing_else() {
        let start = Reported {
            input: Some(20),
            cache_read: Some(5_000),
            cache_write: Some(300),
            cache_write_1h: Some(100),
            output: Some(1),
            standing: Standing::Early,
            ..Reported::default()
        };
        let delta = Reported { output: Some(15), standing: Standing::Final, ..Reported::default() };
        let both = start.replaced_by(delta);
        assert_eq!(both, Reported { output: Some(15), standing: Standing::Final, ..start });
        let restated = Reported { cache_write: Some(300), cache_read: Some(6_000), ..Reported::default() };
        let (usage, _) = start.replaced_by(restated).usage(0);
        assert_eq!((usage.cache_read, usage.cache_write_5m, usage.cache_write_1h), (6_000, 200, 100));
        assert_eq!(start.replaced_by(restated).standing, Standing::Early, "it named no output");
    }

    #[test]
    fn a_prompt_that_nobody_named_is_our_own_count() {
        assert_eq!(Reported { output: Some(5), ..Reported::default() }.usage(9).0.prompt(), 9);
        let cached = Reported { cache_read: Some(5_000), ..Reported::default() };
        assert_eq!(cached.usage(9).0.prompt(), 5_000);
    }

    proptest! {
        #[test]
        fn a_whole_report_gives_its_counts_back(
            [input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning]
                in prop::array::uniform7(0_u64..1 << 40),
        ) {
            let usage = Usage {
                input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning
            };
            let earlier = Reported::whole(&Usage { input: 7, output: 7, ..Usage::default() }, false);
            prop_assert_eq!(earlier.replaced_by(Reported::whole(&usage, false)).usage(3), (usage, false));
        }
    }
}
