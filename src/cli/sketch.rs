//! A request from flags: for who wants to know what would happen to a call that is not written yet.

use clap::Args;
use filters::dialect::Operation;
use serde_json::{Value, json};

/// The prompt's length in bytes, where none is said: about a page.
const PROMPT_BYTES_DEFAULT: usize = 2_000;
/// The longest prompt that is made up, in bytes.
const PROMPT_BYTES_MAX: usize = 16 << 20;
/// The output bound of a message, which needs one, where none is said.
const OUTPUT_TOKENS_DEFAULT: u64 = 1_024;

/// What is known of it.
#[derive(Debug, Args)]
pub(super) struct Sketch {
    /// Instead of a file: a request for this model.
    #[arg(long, conflicts_with = "request", required_unless_present = "request")]
    model: Option<String>,
    /// With `--model`: how long its prompt is, in bytes.
    #[arg(long, requires = "model", default_value_t = PROMPT_BYTES_DEFAULT)]
    prompt_bytes: usize,
    /// With `--model`: the most output tokens that it asks for.
    #[arg(long, requires = "model")]
    max_tokens: Option<u64>,
    /// With `--model`: it asks for a stream.
    #[arg(long, requires = "model")]
    stream: bool,
}

impl Sketch {
    /// Its body, where a model is named.
    pub(super) fn body(&self, operation: Operation) -> Option<String> {
        let model = self.model.as_deref()?;
        let prompt = "x".repeat(self.prompt_bytes.min(PROMPT_BYTES_MAX));
        let mut body = json!({ "model": model });
        let messages = || json!([{ "role": "user", "content": prompt }]);
        match operation {
            Operation::Chat | Operation::Messages | Operation::CountTokens => body["messages"] = messages(),
            Operation::Completions => body["prompt"] = Value::from(prompt),
            Operation::Responses | Operation::Embeddings => body["input"] = Value::from(prompt),
        }
        let needed = (operation == Operation::Messages).then_some(OUTPUT_TOKENS_DEFAULT);
        let bound = self.max_tokens.or(needed);
        if let Some((field, bound)) = operation.output_field().zip(bound) {
            body[field] = Value::from(bound);
        }
        if self.stream && operation.has_output() {
            body["stream"] = Value::Bool(true);
        }
        Some(body.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_reads_what_is_made_up_for_it() {
        let sketch = Sketch { model: Some("m".into()), prompt_bytes: 40, max_tokens: None, stream: true };
        for operation in Operation::ALL {
            let body = sketch.body(operation).unwrap();
            let facts =
                operation.read(body.as_bytes()).unwrap_or_else(|e| panic!("{operation:?}: {}", e.message));
            assert_eq!((facts.model.as_str(), facts.stream), ("m", operation.has_output()));
            assert!(facts.input.text_bytes >= 40, "{operation:?}");
        }
        let bound = Sketch { max_tokens: Some(7), ..sketch };
        let facts = Operation::Chat.read(bound.body(Operation::Chat).unwrap().as_bytes()).unwrap();
        assert_eq!(facts.output_limit, Some(7));
    }
}
