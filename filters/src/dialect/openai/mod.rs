//! `OpenAI`'s chat completions, and what calls itself compatible.
//!
//! Source for fields and events: the published API reference and the official Python SDK's types
//! (`reliability.md` §9 lists what was read and what was tried).

pub mod answer;
pub mod error;
pub(super) mod fold;
pub mod request;
