//! `OpenAI`'s operations, and what calls itself compatible.
//!
//! `request` and `answer` are chat completions, from which text completions differ little; `error` is the
//! same for all. Source for fields and events: the published API reference and the official Python SDK's
//! types (`reliability.md` §9 lists what was read and what was tried).

pub mod answer;
pub mod completions;
pub mod embeddings;
pub mod error;
pub(super) mod fold;
pub mod request;
pub mod responses;
mod sequences;
mod usage;
