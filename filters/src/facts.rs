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
    /// The most output tokens of one choice, where the caller gave a bound.
    pub output_limit: Option<u64>,
    /// How many choices are asked for (`n`).
    pub choices: u64,
    /// The service tier that was asked for.
    pub tier: Tier,
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
    /// Images that came inside the body.
    pub inline_images: u64,
    /// It refers to something that is not in the body (a remote file, stored state, server tools):
    /// only the context window bounds it.
    pub beyond_body: bool,
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
