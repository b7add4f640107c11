//! Anthropic's messages, and what calls itself compatible.
//!
//! Source for fields and events: the published API reference and the official Python SDK's types
//! (`reliability.md` §9 lists what was read and what was tried). Three things differ from `OpenAI`'s
//! dialect in kind. Usage is always in the stream, early in its first event and cumulative in its last,
//! so nothing is asked for and nothing stripped. `input_tokens` leaves cached tokens out. And
//! `max_tokens` is required, so that no output bound is ever written.
//!
//! Fields that change the price of a call without changing its tokens (`speed`, `inference_geo`), and tools
//! with a fee of their own, are named in the facts: a call is refused where nobody has said that it may.

pub mod answer;
pub mod count;
pub mod error;
pub(super) mod fold;
pub mod request;
