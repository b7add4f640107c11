//! How much was used.
//!
//! The provider's own report counts, since it is what we are billed by. Reports of one stream are
//! snapshots, whole or partial: field by field the last one wins, they are never added. Where there
//! is no report, or none that can be believed, we count ourselves, and say so (`estimated`). An
//! output that was reported before the end is compared with our count: the larger one.

use crate::facts::Input;
use crate::money::price::Tier;
use crate::stream::usage::{Reported, Standing, Usage};

/// Bytes of text that make about one token. English prose has 4 to 5, code 3 to 4.
const BYTES_PER_TOKEN: u64 = 4;
/// Tokens around a message or a tool call, for estimates.
const TOKENS_PER_FRAME: u64 = 4;

/// What one piece of an answer produced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Produced {
    /// Bytes of text: content, reasoning, refusals, names and arguments of tool calls.
    pub text_bytes: u64,
    /// Tool calls that began in it.
    pub tool_calls: u64,
}

/// A provider's report, or the finding that it cannot be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageReport {
    /// Counts that add up.
    Believable(Reported),
    /// Negative, fractional or unreadable counts.
    Unbelievable,
}

/// What a call is charged for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The counts.
    pub usage: Usage,
    /// They are our own.
    pub estimated: bool,
    /// The provider's report was not plausible.
    pub anomaly: bool,
    /// The service tier that the provider names.
    pub tier: Option<Tier>,
}

/// What a call can have used at most. A report far above it is a fault of the provider's, not a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceiling {
    /// The model's context window, in tokens.
    pub context: u64,
    /// The output bound of all choices together, in tokens.
    pub output: u64,
}

impl Ceiling {
    /// Nothing is known of the model.
    pub const NONE: Self = Self { context: u64::MAX, output: u64::MAX };

    /// A provider may break its bound a little and a tokenizer may be a coarse one; a thousand times as
    /// much text as was seen is neither.
    fn believes(&self, usage: &Usage, own_output: u64) -> bool {
        let most = self.context.max(own_output.saturating_mul(4).saturating_add(1024));
        usage.prompt() <= self.context.max(most) && usage.output <= most
    }
}

/// Counts one answer.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    produced: Produced,
    /// Bytes among them that are the prompt's.
    echoed_bytes: u64,
    reported: Option<Reported>,
    anomaly: bool,
    tier: Option<Tier>,
}

impl Meter {
    /// A meter of an answer that repeats so many bytes of the prompt.
    #[must_use]
    pub fn echoing(echoed_bytes: u64) -> Self {
        Self { echoed_bytes, ..Self::default() }
    }

    /// Takes what was produced in all, where that is more than what was counted piece by piece.
    pub fn restate(&mut self, all: Produced) {
        self.produced.text_bytes = self.produced.text_bytes.max(all.text_bytes);
        self.produced.tool_calls = self.produced.tool_calls.max(all.tool_calls);
    }

    /// Adds what a piece produced.
    pub fn produce(&mut self, piece: Produced) {
        self.produced.text_bytes = self.produced.text_bytes.saturating_add(piece.text_bytes);
        self.produced.tool_calls = self.produced.tool_calls.saturating_add(piece.tool_calls);
    }

    /// Takes a report; what it names replaces what was reported before.
    pub fn report(&mut self, report: UsageReport) {
        match report {
            UsageReport::Believable(reported) => {
                self.anomaly |= reported.anomaly;
                self.reported = Some(self.reported.map_or(reported, |earlier| earlier.replaced_by(reported)));
            }
            UsageReport::Unbelievable => self.anomaly = true,
        }
    }

    /// Takes the tier that a piece names; the last one wins.
    pub fn tier(&mut self, tier: Option<Tier>) {
        self.tier = tier.or(self.tier);
    }

    /// Whether a believable report has come that may be the last.
    #[must_use]
    pub fn has_report(&self) -> bool {
        self.reported.is_some_and(|reported| reported.standing != Standing::Early)
    }

    /// Output tokens by our own count.
    #[must_use]
    pub fn own_output(&self) -> u64 {
        let text = self.produced.text_bytes.saturating_sub(self.echoed_bytes).div_ceil(BYTES_PER_TOKEN);
        text.saturating_add(self.produced.tool_calls.saturating_mul(TOKENS_PER_FRAME))
    }

    /// What was used. `own_input` is our own count of the prompt; `complete` says whether the answer
    /// came to its end, so that a report can be final.
    #[must_use]
    pub fn used(&self, own_input: u64, complete: bool, ceiling: &Ceiling) -> Used {
        // The provider enforces the bound that we wrote: our coarser count must not exceed it.
        let own = self.own_output().min(ceiling.output);
        let believed = self.reported.filter(|r| ceiling.believes(&r.usage(own_input).0, self.own_output()));
        let anomaly = self.anomaly || believed != self.reported;
        let Some(reported) = believed else {
            let usage = Usage { input: own_input, output: own, ..Usage::default() };
            return Used { usage, estimated: true, anomaly, tier: self.tier };
        };
        let is_final = match reported.standing {
            Standing::Early => false,
            Standing::SoFar => complete,
            Standing::Final => true,
        };
        let (mut usage, clamped) = reported.usage(own_input);
        // Nothing is what a provider reports that does not count: text was read and written.
        let nothing = (usage.prompt() == 0 && own_input > 0, reported.output == Some(0) && own > 0);
        if nothing.0 {
            usage.input = own_input;
        }
        let told = reported.output.filter(|told| (is_final || *told >= own) && !nothing.1);
        usage.output = told.unwrap_or(own);
        let estimated = told.is_none() || reported.input.is_none() || nothing.0;
        let anomaly = anomaly || clamped || nothing.0 || nothing.1;
        Used { usage, estimated, anomaly, tier: self.tier }
    }
}

/// Our own count of a prompt.
#[must_use]
pub fn own_input(input: &Input) -> u64 {
    let text = input.text_bytes.div_ceil(BYTES_PER_TOKEN);
    let frames = input.messages.saturating_mul(TOKENS_PER_FRAME);
    let images = input.inline_images.saturating_mul(IMAGE_TOKENS);
    [input.tokens, frames, images].into_iter().fold(text, u64::saturating_add)
}

/// An image of middle size in high detail, in `OpenAI`'s published tile formula (85 + 4 × 170).
const IMAGE_TOKENS: u64 = 765;

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(input: u64, output: u64) -> UsageReport {
        let usage = Usage { input, output, ..Usage::default() };
        UsageReport::Believable(Reported::whole(&usage, false))
    }

    fn standing(output: u64, standing: Standing) -> UsageReport {
        UsageReport::Believable(Reported { output: Some(output), standing, ..Reported::default() })
    }

    #[test]
    fn the_last_report_wins_and_none_is_added() {
        let mut meter = Meter::default();
        meter.report(reported(10, 1));
        meter.report(reported(10, 5));
        let used = meter.used(99, true, &Ceiling::NONE);
        assert_eq!((used.usage.input, used.usage.output, used.estimated), (10, 5, false));
    }

    #[test]
    fn without_a_report_our_own_count_is_charged_and_marked() {
        let mut meter = Meter::default();
        meter.produce(Produced { text_bytes: 5, tool_calls: 0 });
        let used = meter.used(7, true, &Ceiling::NONE);
        assert_eq!((used.usage.input, used.usage.output, used.estimated), (7, 2, true));
    }

    #[test]
    fn an_early_report_of_a_cut_stream_is_no_upper_bound() {
        let mut meter = Meter::default();
        meter.report(reported(25, 1));
        meter.produce(Produced { text_bytes: 1_200, tool_calls: 0 });
        assert_eq!(meter.used(0, false, &Ceiling::NONE).usage.output, 300);
        assert_eq!(meter.used(0, true, &Ceiling::NONE).usage.output, 1, "a final report is final");
    }

    #[test]
    fn a_start_is_never_final_and_a_final_report_always() {
        let mut meter = Meter::default();
        meter.report(standing(1, Standing::Early));
        meter.produce(Produced { text_bytes: 40, tool_calls: 0 });
        assert_eq!(
            meter.used(0, true, &Ceiling::NONE).usage.output,
            10,
            "the answer ended without a later report"
        );
        assert!(!meter.has_report() && meter.used(0, true, &Ceiling::NONE).estimated);
        meter.report(standing(7, Standing::Final));
        assert_eq!(meter.used(0, false, &Ceiling::NONE).usage.output, 7);
        assert!(
            meter.has_report() && meter.used(0, false, &Ceiling::NONE).estimated,
            "its prompt is our own count"
        );
    }

    #[test]
    fn the_last_tier_wins_and_a_missing_one_changes_nothing() {
        let mut meter = Meter::default();
        assert_eq!(meter.used(0, true, &Ceiling::NONE).tier, None);
        for tier in [Some(Tier::Standard), Some(Tier::Flex), None] {
            meter.tier(tier);
        }
        assert_eq!(meter.used(0, true, &Ceiling::NONE).tier, Some(Tier::Flex));
    }

    #[test]
    fn a_report_that_cannot_be_believed_leaves_our_count() {
        let mut meter = Meter::default();
        meter.report(UsageReport::Unbelievable);
        let used = meter.used(3, true, &Ceiling::NONE);
        assert!(used.anomaly && used.estimated && used.usage.input == 3);
    }

    #[test]
    fn a_report_beyond_reason_is_not_believed() {
        let ceiling = Ceiling { context: 128_000, output: 100 };
        let mut meter = Meter::default();
        meter.produce(Produced { text_bytes: 5, tool_calls: 0 });
        meter.report(reported(10, 1_000_000_000));
        let used = meter.used(7, true, &ceiling);
        assert_eq!((used.usage.input, used.usage.output), (7, 2));
        assert!(used.estimated && used.anomaly);
        meter.report(reported(4_000, 900));
        assert_eq!(meter.used(7, true, &ceiling).usage.output, 900, "above the bound, but possible");
    }

    #[test]
    fn what_was_restated_is_not_added_and_what_was_echoed_is_not_output() {
        let mut meter = Meter::default();
        meter.produce(Produced { text_bytes: 40, tool_calls: 1 });
        meter.restate(Produced { text_bytes: 36, tool_calls: 2 });
        assert_eq!(meter.own_output(), 10 + 2 * 4);
        let mut echoing = Meter::echoing(100);
        echoing.produce(Produced { text_bytes: 60, tool_calls: 0 });
        assert_eq!(echoing.own_output(), 0);
        echoing.produce(Produced { text_bytes: 80, tool_calls: 0 });
        assert_eq!(echoing.own_output(), 10);
    }

    #[test]
    fn tokens_that_came_as_such_are_counted_exactly() {
        assert_eq!(
            own_input(&Input { tokens: 7, text_bytes: 9, messages: 1, ..Input::default() }),
            7 + 3 + 4
        );
    }

    #[test]
    fn our_own_count_stays_within_the_bound() {
        let mut meter = Meter::default();
        meter.produce(Produced { text_bytes: 8_000, tool_calls: 0 });
        assert_eq!(meter.used(7, true, &Ceiling { context: 128_000, output: 100 }).usage.output, 100);
    }
}
