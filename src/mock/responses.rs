//! `OpenAI`'s responses, as text: a stream of numbered, typed events, and the whole object.

use serde_json::Value;

use super::dialect::{Events, Wish, model, openai_tier, quoted};
use super::script::{Script, UsageScript};

/// The item that every answer is.
const ITEM: &str = r#""id":"msg_mock_1","type":"message","role":"assistant""#;

pub(super) fn events(script: &Script, wish: &Wish) -> Events {
    let mut number = 0_u64;
    let mut event = |kind: &str, fields: &str| {
        let event = format!(
            "event: response.{kind}\ndata: {{\"type\":\"response.{kind}\",\"sequence_number\":{number}{fields}}}\n\n"
        );
        number += 1;
        event
    };
    let at = r#","item_id":"msg_mock_1","output_index":0,"content_index":0"#;
    let mut openers = vec![];
    if script.openers {
        let begun = format!(r#","response":{}"#, response(script, wish, "in_progress", "[]", None));
        openers.push(event("created", &begun));
        openers.push(event("in_progress", &begun));
        let item = format!(r#","output_index":0,"item":{{{ITEM},"status":"in_progress","content":[]}}"#);
        openers.push(event("output_item.added", &item));
        let part = format!(r#"{at},"part":{{"type":"output_text","text":"","annotations":[]}}"#);
        openers.push(event("content_part.added", &part));
    }
    let piece = |text: &String| event("output_text.delta", &format!(r#"{at},"delta":{}"#, quoted(text)));
    let pieces = script.text.iter().map(piece).collect();
    let text = quoted(&script.text.concat());
    let mut closers = vec![];
    if script.finish {
        closers.push(event("output_text.done", &format!(r#"{at},"text":{text}"#)));
        let item = format!(r#","output_index":0,"item":{}"#, message(&text));
        closers.push(event("output_item.done", &item));
    }
    if script.done {
        let output = format!("[{}]", message(&text));
        let whole = response(script, wish, "completed", &output, script.usage);
        closers.push(event("completed", &format!(r#","response":{whole}"#)));
    }
    Events { openers, pieces, closers }
}

/// `text` is JSON already.
pub(super) fn whole(script: &Script, wish: &Wish, text: &str, finished: bool) -> String {
    let status = if finished { "completed" } else { "in_progress" };
    response(script, wish, status, &format!("[{}]", message(text)), script.usage)
}

/// What an event with this data is called.
pub(super) fn type_of(data: &str) -> String {
    let value: Value = serde_json::from_str(data).unwrap_or_default();
    value.get("type").and_then(Value::as_str).unwrap_or("error").to_owned()
}

fn message(text: &str) -> String {
    format!(
        r#"{{{ITEM},"status":"completed","content":[{{"type":"output_text","text":{text},"annotations":[]}}]}}"#
    )
}

fn response(script: &Script, wish: &Wish, status: &str, output: &str, usage: Option<UsageScript>) -> String {
    let (model, tier) = (model(script, wish), openai_tier(script));
    let usage = usage.map_or_else(
        || "null".to_owned(),
        |UsageScript { prompt, completion, cached, .. }| {
            let total = prompt.saturating_add(completion);
            format!(
                r#"{{"input_tokens":{prompt},"input_tokens_details":{{"cached_tokens":{cached}}},"output_tokens":{completion},"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":{total}}}"#
            )
        },
    );
    format!(
        r#"{{"id":"resp_mock_1","object":"response","created_at":1700000000,"status":"{status}","error":null,"incomplete_details":null,"model":{model},"output":{output},"usage":{usage}{tier}}}"#
    )
}
