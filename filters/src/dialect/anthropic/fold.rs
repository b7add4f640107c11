//! The events of a message, folded into one.
//!
//! `message_start` brings the message without its content, blocks begin and grow one after the other,
//! `message_delta` says how it ended; its usage restates what it names. The input of a tool comes as pieces of
//! JSON text and becomes JSON at the end of its block.

use serde_json::{Map, Value};

use super::super::fold::{Unfoldable, grow, take_object, take_text};

/// Blocks of one message.
const BLOCKS_MAX: usize = 4_096;

/// What has come.
#[derive(Debug, Default)]
pub(in super::super) struct Parts {
    message: Option<Map<String, Value>>,
    blocks: Vec<Block>,
    finished: bool,
}

#[derive(Debug)]
struct Block {
    value: Map<String, Value>,
    /// Of a tool's input.
    json: String,
}

impl Parts {
    pub(in super::super) fn push(&mut self, mut event: Map<String, Value>) -> Result<(), Unfoldable> {
        match take_text(&mut event, "type").as_deref() {
            Some("message_start") if self.message.is_none() => {
                self.message = Some(take_object(&mut event, "message").ok_or(Unfoldable)?);
                Ok(())
            }
            Some("content_block_start") => {
                let value = take_object(&mut event, "content_block").ok_or(Unfoldable)?;
                let next =
                    event.get("index").and_then(Value::as_u64) == u64::try_from(self.blocks.len()).ok();
                if !next || self.blocks.len() >= BLOCKS_MAX {
                    return Err(Unfoldable);
                }
                self.blocks.push(Block { value, json: String::new() });
                Ok(())
            }
            Some("content_block_delta") => {
                let index = event.get("index").and_then(Value::as_u64);
                let index = index.and_then(|index| usize::try_from(index).ok()).ok_or(Unfoldable)?;
                let delta = take_object(&mut event, "delta").ok_or(Unfoldable)?;
                self.blocks.get_mut(index).ok_or(Unfoldable)?.grow(delta)
            }
            Some("content_block_stop") => Ok(()),
            Some("message_delta") => self.end(event),
            _ => Err(Unfoldable),
        }
    }

    fn end(&mut self, mut event: Map<String, Value>) -> Result<(), Unfoldable> {
        let message = self.message.as_mut().ok_or(Unfoldable)?;
        let delta = take_object(&mut event, "delta").unwrap_or_default();
        self.finished |= delta.get("stop_reason").is_some_and(|reason| !reason.is_null());
        message.extend(delta);
        if let Some(usage) = take_object(&mut event, "usage") {
            let known = message.entry("usage").or_insert_with(|| Value::Object(Map::new()));
            let Value::Object(known) = known else { return Err(Unfoldable) };
            known.extend(usage.into_iter().filter(|(_, value)| !value.is_null()));
        }
        Ok(())
    }

    pub(in super::super) fn finish(self) -> Result<Value, Unfoldable> {
        let mut message = self.message.filter(|_| self.finished).ok_or(Unfoldable)?;
        let content = self.blocks.into_iter().map(Block::finish).collect::<Result<Vec<Value>, _>>()?;
        message.insert("content".to_owned(), Value::from(content));
        Ok(Value::Object(message))
    }
}

impl Block {
    fn grow(&mut self, mut delta: Map<String, Value>) -> Result<(), Unfoldable> {
        let kind = take_text(&mut delta, "type");
        let mut text = |key: &str| take_text(&mut delta, key).ok_or(Unfoldable);
        match kind.as_deref() {
            Some("text_delta") => grow(&mut self.value, "text", &text("text")?),
            Some("thinking_delta") => grow(&mut self.value, "thinking", &text("thinking")?),
            Some("signature_delta") => grow(&mut self.value, "signature", &text("signature")?),
            Some("input_json_delta") => self.json.push_str(&text("partial_json")?),
            Some("citations_delta") => {
                let citation = delta.remove("citation").ok_or(Unfoldable)?;
                let known = self.value.entry("citations").or_insert(Value::Null);
                if known.is_null() {
                    *known = Value::Array(vec![]);
                }
                known.as_array_mut().ok_or(Unfoldable)?.push(citation);
            }
            _ => return Err(Unfoldable),
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Value, Unfoldable> {
        if !self.json.is_empty() {
            let input: Value = serde_json::from_str(&self.json).map_err(|_| Unfoldable)?;
            self.value.insert("input".to_owned(), input);
        }
        Ok(Value::Object(self.value))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::Dialect;
    use super::super::super::fold::Fold;
    use super::*;

    fn folded(events: &[Value]) -> Result<Value, Unfoldable> {
        let mut fold = Fold::new(Dialect::Anthropic);
        for event in events {
            fold.push(event.to_string().as_bytes())?;
        }
        Ok(serde_json::from_slice(&fold.finish()?).unwrap())
    }

    fn start() -> Value {
        json!({ "type": "message_start", "message": {
            "id": "m1", "type": "message", "role": "assistant", "model": "up", "content": [],
            "stop_reason": null, "stop_sequence": null,
            "usage": { "input_tokens": 9, "cache_read_input_tokens": 4, "output_tokens": 1 },
        } })
    }

    fn block(index: u64, block: &Value) -> Value {
        json!({ "type": "content_block_start", "index": index, "content_block": block })
    }

    fn delta(index: u64, delta: &Value) -> Value {
        json!({ "type": "content_block_delta", "index": index, "delta": delta })
    }

    fn end() -> Value {
        json!({ "type": "message_delta", "delta": { "stop_reason": "tool_use", "stop_sequence": null },
                "usage": { "output_tokens": 7, "input_tokens": null } })
    }

    #[test]
    fn blocks_grow_and_usage_is_restated() {
        let whole = folded(&[
            start(),
            block(0, &json!({ "type": "thinking", "thinking": "", "signature": "" })),
            delta(0, &json!({ "type": "thinking_delta", "thinking": "hm" })),
            delta(0, &json!({ "type": "signature_delta", "signature": "sig" })),
            json!({ "type": "content_block_stop", "index": 0 }),
            block(1, &json!({ "type": "text", "text": "" })),
            delta(1, &json!({ "type": "text_delta", "text": "Hel" })),
            delta(1, &json!({ "type": "text_delta", "text": "lo" })),
            delta(1, &json!({ "type": "citations_delta", "citation": { "url": "x" } })),
            block(2, &json!({ "type": "tool_use", "id": "t", "name": "f", "input": {} })),
            delta(2, &json!({ "type": "input_json_delta", "partial_json": "" })),
            delta(2, &json!({ "type": "input_json_delta", "partial_json": "{\"a\":" })),
            delta(2, &json!({ "type": "input_json_delta", "partial_json": "1}" })),
            end(),
        ]);
        let expected = json!({
            "id": "m1", "type": "message", "role": "assistant", "model": "up",
            "content": [
                { "type": "thinking", "thinking": "hm", "signature": "sig" },
                { "type": "text", "text": "Hello", "citations": [{ "url": "x" }] },
                { "type": "tool_use", "id": "t", "name": "f", "input": { "a": 1 } },
            ],
            "stop_reason": "tool_use", "stop_sequence": null,
            "usage": { "input_tokens": 9, "cache_read_input_tokens": 4, "output_tokens": 7 },
        });
        assert_eq!(whole, Ok(expected));
    }

    #[test]
    fn what_is_not_understood_or_not_complete_is_no_answer() {
        let text = block(0, &json!({ "type": "text", "text": "" }));
        for events in [
            vec![],
            vec![start()],
            vec![start(), text.clone()],
            vec![start(), start(), end()],
            vec![start(), delta(0, &json!({ "type": "text_delta", "text": "x" })), end()],
            vec![start(), text.clone(), delta(0, &json!({ "type": "new_delta" })), end()],
            vec![start(), block(7, &json!({ "type": "text" })), end()],
            vec![start(), json!({ "type": "news" }), end()],
            vec![
                start(),
                block(0, &json!({ "type": "tool_use", "input": {} })),
                delta(0, &json!({ "type": "input_json_delta", "partial_json": "{" })),
                end(),
            ],
        ] {
            assert_eq!(folded(&events), Err(Unfoldable), "{events:?}");
        }
    }
}
