//! Responses: `OpenAI`'s stateful operation, passed through and metered.
//!
//! Its stream has typed events and no `[DONE]`: `response.completed`, `response.incomplete` or
//! `response.failed` is the last one, and carries the usage. Much of what a request refers to may lie at the
//! provider's (an earlier response, a conversation, a stored prompt, what a tool finds); then only the
//! context window bounds its input.
//!
//! Deliberately absent: `background`, since a response that runs on by itself cannot be metered; and any
//! memory of which provider holds an earlier response: a `previous_response_id` has to go where it came
//! from, so a model that is used so should have one provider.

pub mod answer;
mod items;
pub mod request;
