//! What a request says that we act on, whatever its dialect.
//!
//! A plain record. The dialect fills it from the body in one reading; rooms behind it never look
//! at the body again.

use std::ops::Range;

use crate::money::Tier;
use crate::preferences::Preferences;

/// The facts of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The model that was asked for, as the caller wrote it.
    pub model: String,
    /// An event stream is wanted.
    pub stream: bool,
    /// The caller asked for usage in the stream.
    pub wants_usage: bool,
    /// The most output tokens of one choice, where the caller gave a bound or there is no output at all.
    pub output_limit: Option<u64>,
    /// What the API gives where the caller names no bound, if that is less than what the model can give.
    pub output_default: Option<u64>,
    /// How many choices come back (`n`, for each prompt).
    pub choices: u64,
    /// How many are made and billed: more than `choices` where the best of several is picked.
    pub samples: u64,
    /// Bytes of the prompt that come back as if they were output, in all choices together.
    pub echoed_bytes: u64,
    /// The service tier that was asked for.
    pub tier: Tier,
    /// What is asked for that costs more than its tokens.
    pub surcharges: Vec<Surcharge>,
    /// What is known of the input's size.
    pub input: Input,
    /// A whole answer to it can be folded out of a stream.
    pub foldable: bool,
    /// What the caller wants of the routing.
    pub preferences: Preferences,
    /// Where the fields lie that are edited for the upstream.
    pub spans: Spans,
}

/// The size of an input, as far as it can be told without a tokenizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// Bytes of everything the model may read: an upper bound of its tokens for byte-level BPE.
    pub bytes: u64,
    /// Bytes of message text alone, for an estimate.
    pub text_bytes: u64,
    /// Messages, for the template around each.
    pub messages: u64,
    /// Tokens that the provider puts around what the body says (its preamble for tools), at most.
    pub template_tokens: u64,
    /// Tokens that came as such, by their numbers: no estimate, and not among the bytes.
    pub tokens: u64,
    /// Texts that are read apart, each with a context window of its own; none counts as one.
    pub texts: u64,
    /// How often the model may read everything, at most, since tools run at the provider's in between; none
    /// counts as once.
    pub rounds: u64,
    /// Images that came inside the body.
    pub inline_images: u64,
    /// It refers to something that is not in the body (a remote file, stored state, server tools):
    /// only the context window bounds it.
    pub beyond_body: bool,
}

/// Something that a request asks for and that costs more than its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surcharge {
    /// What it is.
    pub extra: Extra,
    /// The field that asks for it.
    pub field: &'static str,
}

/// What providers charge for beside tokens, or by which they change what a token costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extra {
    /// Tools that run at the provider's for a fee: web search, code execution, file search and the like.
    ServerTools,
    /// A faster answer at a dearer price (`speed`).
    Speed,
    /// Where the model has to run (`inference_geo`).
    InferenceGeo,
    /// A dearer service tier (`service_tier: priority`), where the model has no price for it.
    ServiceTier,
    /// Spoken output (`modalities`), whose tokens cost more than written ones.
    AudioOutput,
}

impl Extra {
    /// The word that config uses.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::ServerTools => "server_tools",
            Self::Speed => "speed",
            Self::InferenceGeo => "inference_geo",
            Self::ServiceTier => "service_tier",
            Self::AudioOutput => "audio_output",
        }
    }
}

/// Byte ranges in the body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    /// The value of `model`.
    pub model: Range<usize>,
    /// The value of `stream`.
    pub stream: Option<Range<usize>>,
    /// The value of `stream_options`.
    pub stream_options: Option<Range<usize>>,
    /// The values that bound the output, as the caller wrote them.
    pub output_limits: Vec<Range<usize>>,
    /// What is ours alone and cut out.
    pub ours: Vec<Range<usize>>,
}
