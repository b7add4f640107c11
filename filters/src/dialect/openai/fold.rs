//! The chunks of a chat completion, folded into one.
//!
//! Texts of a delta grow, lists are extended, calls of tools are told apart by their index; of what is said
//! about the whole (id, model, tier, usage) the latest word counts.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::super::fold::{Unfoldable, grow, take_object, take_text};

/// The highest index of a choice or a call of a tool.
const INDEX_MAX: u64 = 1_024;

/// What has come.
#[derive(Debug, Default)]
pub(in super::super) struct Parts {
    head: Map<String, Value>,
    choices: BTreeMap<u64, Choice>,
}

#[derive(Debug, Default)]
struct Choice {
    message: Map<String, Value>,
    calls: BTreeMap<u64, Map<String, Value>>,
    finish_reason: Option<Value>,
    logprobs: Option<Map<String, Value>>,
}

impl Parts {
    pub(in super::super) fn push(&mut self, mut chunk: Map<String, Value>) -> Result<(), Unfoldable> {
        for choice in list(chunk.remove("choices"))? {
            let Value::Object(choice) = choice else { return Err(Unfoldable) };
            let index = index_of(&choice)?.unwrap_or_default();
            self.choices.entry(index).or_default().push(choice)?;
        }
        self.head.extend(chunk.into_iter().filter(|(_, value)| !value.is_null()));
        Ok(())
    }

    pub(in super::super) fn finish(mut self) -> Result<Value, Unfoldable> {
        let choices = self.choices.into_iter().map(|(index, choice)| choice.finish(index));
        let choices = choices.collect::<Result<Vec<Value>, Unfoldable>>()?;
        if choices.is_empty() {
            return Err(Unfoldable);
        }
        self.head.insert("object".to_owned(), Value::from("chat.completion"));
        self.head.insert("choices".to_owned(), Value::from(choices));
        Ok(Value::Object(self.head))
    }
}

impl Choice {
    fn push(&mut self, mut choice: Map<String, Value>) -> Result<(), Unfoldable> {
        if let Some(mut delta) = take_object(&mut choice, "delta") {
            for call in list(delta.remove("tool_calls"))? {
                let Value::Object(call) = call else { return Err(Unfoldable) };
                self.push_call(call)?;
            }
            merge(&mut self.message, delta)?;
        }
        if let Some(logprobs) = take_object(&mut choice, "logprobs") {
            merge(self.logprobs.get_or_insert_default(), logprobs)?;
        }
        if let Some(reason) = choice.remove("finish_reason").filter(|reason| !reason.is_null()) {
            self.finish_reason = Some(reason);
        }
        Ok(())
    }

    fn push_call(&mut self, mut call: Map<String, Value>) -> Result<(), Unfoldable> {
        let index = index_of(&call)?.ok_or(Unfoldable)?;
        let known = self.calls.entry(index).or_default();
        let function = take_object(&mut call, "function");
        call.remove("index");
        known.extend(call.into_iter().filter(|(_, value)| !value.is_null()));
        if let Some(mut function) = function {
            let into = known.entry("function").or_insert_with(|| Value::Object(Map::new()));
            let Value::Object(into) = into else { return Err(Unfoldable) };
            grow(into, "arguments", &take_text(&mut function, "arguments").unwrap_or_default());
            into.extend(function.into_iter().filter(|(_, value)| !value.is_null()));
        }
        Ok(())
    }

    fn finish(mut self, index: u64) -> Result<Value, Unfoldable> {
        let finish_reason = self.finish_reason.ok_or(Unfoldable)?;
        self.message.entry("role").or_insert_with(|| Value::from("assistant"));
        self.message.entry("content").or_insert(Value::Null);
        self.message.entry("refusal").or_insert(Value::Null);
        if !self.calls.is_empty() {
            let calls: Vec<Value> = self.calls.into_values().map(Value::Object).collect();
            self.message.insert("tool_calls".to_owned(), Value::from(calls));
            // A text that never began is none.
            if self.message.get("content").and_then(Value::as_str) == Some("") {
                self.message.insert("content".to_owned(), Value::Null);
            }
        }
        let mut choice = Map::new();
        choice.insert("index".to_owned(), Value::from(index));
        choice.insert("message".to_owned(), Value::Object(self.message));
        choice.insert("logprobs".to_owned(), self.logprobs.map_or(Value::Null, Value::Object));
        choice.insert("finish_reason".to_owned(), finish_reason);
        Ok(Value::Object(choice))
    }
}

/// Puts a delta to what there is.
fn merge(into: &mut Map<String, Value>, delta: Map<String, Value>) -> Result<(), Unfoldable> {
    for (key, value) in delta {
        match value {
            Value::Null => {}
            Value::String(role) if key == "role" => {
                into.insert(key, Value::String(role));
            }
            Value::String(text) => grow(into, &key, &text),
            Value::Array(more) => {
                let list = into.entry(key).or_insert_with(|| Value::Array(vec![]));
                list.as_array_mut().ok_or(Unfoldable)?.extend(more);
            }
            // How numbers, flags and objects would grow nobody has said.
            Value::Bool(_) | Value::Number(_) | Value::Object(_) => return Err(Unfoldable),
        }
    }
    Ok(())
}

fn index_of(object: &Map<String, Value>) -> Result<Option<u64>, Unfoldable> {
    match object.get("index") {
        None | Some(Value::Null) => Ok(None),
        Some(index) => index.as_u64().filter(|index| *index <= INDEX_MAX).map(Some).ok_or(Unfoldable),
    }
}

fn list(value: Option<Value>) -> Result<Vec<Value>, Unfoldable> {
    match value {
        None | Some(Value::Null) => Ok(vec![]),
        Some(Value::Array(list)) => Ok(list),
        Some(_) => Err(Unfoldable),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::Dialect;
    use super::super::super::fold::{FOLD_BYTES_MAX, Fold};
    use super::*;

    fn folded(chunks: &[Value]) -> Result<Value, Unfoldable> {
        let mut fold = Fold::new(Dialect::OpenAi);
        for chunk in chunks {
            fold.push(chunk.to_string().as_bytes())?;
        }
        Ok(serde_json::from_slice(&fold.finish()?).unwrap())
    }

    fn chunk(index: u64, delta: &Value, finish: Option<&str>) -> Value {
        json!({
            "id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "up", "service_tier": null,
            "choices": [{ "index": index, "delta": delta, "finish_reason": finish, "logprobs": null }],
            "usage": null,
        })
    }

    #[test]
    fn texts_grow_and_the_latest_word_about_the_whole_counts() {
        let whole = folded(&[
            chunk(0, &json!({ "role": "assistant", "content": "", "refusal": null }), None),
            chunk(0, &json!({ "content": "Hel" }), None),
            chunk(1, &json!({ "content": "two", "reasoning_content": "so" }), Some("length")),
            chunk(0, &json!({ "content": "lo" }), None),
            chunk(0, &json!({}), Some("stop")),
            json!({ "id": "c1", "choices": [], "service_tier": "flex", "usage": { "prompt_tokens": 3 } }),
        ]);
        let expected = json!({
            "id": "c1", "object": "chat.completion", "created": 5, "model": "up", "service_tier": "flex",
            "choices": [
                { "index": 0, "finish_reason": "stop", "logprobs": null,
                  "message": { "role": "assistant", "content": "Hello", "refusal": null } },
                { "index": 1, "finish_reason": "length", "logprobs": null,
                  "message": { "role": "assistant", "content": "two", "refusal": null, "reasoning_content": "so" } },
            ],
            "usage": { "prompt_tokens": 3 },
        });
        assert_eq!(whole, Ok(expected));
    }

    #[test]
    fn calls_of_tools_are_told_apart_by_their_index() {
        let call = |index: u64, more: &Value| {
            let mut call = json!({ "index": index });
            call.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            chunk(0, &json!({ "content": "", "tool_calls": [call] }), None)
        };
        let whole = folded(&[
            call(0, &json!({ "id": "t0", "type": "function", "function": { "name": "f", "arguments": "" } })),
            call(
                1,
                &json!({ "id": "t1", "type": "function", "function": { "name": "g", "arguments": "{}" } }),
            ),
            call(0, &json!({ "function": { "arguments": "{\"a\"" } })),
            call(0, &json!({ "function": { "arguments": ":1}" } })),
            chunk(0, &json!({}), Some("tool_calls")),
        ])
        .unwrap();
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["content"], Value::Null);
        assert_eq!(
            message["tool_calls"],
            json!([
                { "id": "t0", "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } },
                { "id": "t1", "type": "function", "function": { "name": "g", "arguments": "{}" } },
            ])
        );
    }

    #[test]
    fn logprobs_are_lists_that_grow() {
        let with = |token: &str, finish: Option<&str>| {
            let mut chunk = chunk(0, &json!({ "content": token }), finish);
            chunk["choices"][0]["logprobs"] = json!({ "content": [{ "token": token }], "refusal": null });
            chunk
        };
        let whole = folded(&[with("a", None), with("b", Some("stop"))]).unwrap();
        assert_eq!(
            whole["choices"][0]["logprobs"],
            json!({ "content": [{ "token": "a" }, { "token": "b" }] })
        );
    }

    #[test]
    fn what_is_not_understood_or_not_complete_is_no_answer() {
        for chunks in [
            vec![],
            vec![chunk(0, &json!({ "content": "cut" }), None)],
            vec![chunk(0, &json!({ "audio": { "id": "a" } }), Some("stop"))],
            vec![chunk(0, &json!({ "tool_calls": [{ "id": "no index" }] }), Some("stop"))],
            vec![chunk(1_000_000, &json!({}), Some("stop"))],
            vec![json!({ "choices": "none" })],
        ] {
            assert_eq!(folded(&chunks), Err(Unfoldable), "{chunks:?}");
        }
        let mut fold = Fold::new(Dialect::OpenAi);
        let large = chunk(0, &json!({ "content": "x".repeat(FOLD_BYTES_MAX) }), None).to_string();
        assert_eq!(fold.push(large.as_bytes()), Err(Unfoldable));
    }
}
