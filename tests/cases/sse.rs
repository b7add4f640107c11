//! A conforming reader of event streams (WHATWG HTML, 9.2.6), written apart from the gateway's: two
//! statements of one rule that must agree. And what the surfaces say in events and in whole answers.

use serde_json::Value;

/// One dispatched event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: String,
    pub data: String,
}

/// Reads a stream as it comes.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    pending: Vec<u8>,
    began: bool,
    after_cr: bool,
    kind: String,
    data: Option<String>,
    pub events: Vec<Event>,
}

impl Reader {
    /// All events of a finished stream; what has no blank line behind it is dropped.
    pub fn read(bytes: &[u8]) -> Vec<Event> {
        let mut reader = Self::default();
        reader.feed(bytes);
        reader.events
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        if !self.began {
            const MARK: &[u8] = b"\xef\xbb\xbf";
            if self.pending.len() < MARK.len() && MARK.starts_with(&self.pending) {
                return;
            }
            if self.pending.starts_with(MARK) {
                self.pending.drain(..MARK.len());
            }
            self.began = true;
        }
        let pending = std::mem::take(&mut self.pending);
        let mut rest = pending.as_slice();
        loop {
            // The LF of a CRLF whose CR ended a line.
            if self.after_cr && !rest.is_empty() {
                rest = rest.strip_prefix(b"\n").unwrap_or(rest);
                self.after_cr = false;
            }
            let Some(end) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')) else { break };
            let (line, more) = rest.split_at(end);
            self.after_cr = more.first() == Some(&b'\r');
            rest = more.get(1..).unwrap_or_default();
            self.line(&String::from_utf8_lossy(line));
        }
        self.pending = rest.to_vec();
    }

    fn line(&mut self, line: &str) {
        if line.is_empty() {
            let kind = std::mem::take(&mut self.kind);
            if let Some(data) = self.data.take() {
                self.events.push(Event { kind, data });
            }
            return;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.kind),
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            // A comment has an empty field name; `id` and `retry` do not matter here.
            _ => {}
        }
    }
}

/// The text that the events of any surface carry.
pub fn text_of_events(events: &[Event]) -> String {
    events.iter().map(event_text).collect()
}

/// The text of one event.
pub fn event_text(event: &Event) -> String {
    let Ok(data) = serde_json::from_str::<Value>(&event.data) else { return String::new() };
    let part = match data.get("type").and_then(Value::as_str) {
        Some("content_block_delta") => data.pointer("/delta/text"),
        Some("content_block_start") => data.pointer("/content_block/text"),
        Some("response.output_text.delta") => data.get("delta"),
        _ => return choices(&data, |choice| choice.pointer("/delta/content").or_else(|| choice.get("text"))),
    };
    part.and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The text of a whole answer of any surface.
pub fn text_of_whole(body: &[u8]) -> String {
    let Ok(data) = serde_json::from_slice::<Value>(body) else { return String::new() };
    let parts = data.get("content").and_then(Value::as_array);
    if let Some(parts) = parts {
        return parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
    }
    choices(&data, |choice| choice.pointer("/message/content").or_else(|| choice.get("text")))
}

fn choices<'a>(data: &'a Value, text: impl Fn(&'a Value) -> Option<&'a Value>) -> String {
    let choices = data.get("choices").and_then(Value::as_array);
    choices.into_iter().flatten().filter_map(|choice| text(choice)?.as_str()).collect()
}

/// Takes a piece of the call with that index: of its name, of its arguments.
type Add<'a> = dyn FnMut(u64, Option<&Value>, Option<&Value>) + 'a;

/// Tool calls as `[name, arguments]`, in the order of their indices.
pub fn tool_calls(events: &[Event], whole: &[u8]) -> Value {
    let mut calls: std::collections::BTreeMap<u64, (String, String)> = std::collections::BTreeMap::new();
    let mut add = |index: u64, name: Option<&Value>, arguments: Option<&Value>| {
        let call = calls.entry(index).or_default();
        call.0.push_str(name.and_then(Value::as_str).unwrap_or_default());
        call.1.push_str(arguments.and_then(Value::as_str).unwrap_or_default());
    };
    let listed = |list: Option<&Value>, add: &mut Add<'_>| {
        for (position, call) in list.and_then(Value::as_array).into_iter().flatten().enumerate() {
            let index = call.get("index").and_then(Value::as_u64).unwrap_or(position as u64);
            add(index, call.pointer("/function/name"), call.pointer("/function/arguments"));
        }
    };
    for data in events.iter().filter_map(|event| serde_json::from_str::<Value>(&event.data).ok()) {
        let index = data.get("index").and_then(Value::as_u64).unwrap_or(0);
        match data.get("type").and_then(Value::as_str) {
            Some("content_block_start")
                if data.pointer("/content_block/type") == Some(&"tool_use".into()) =>
            {
                add(index, data.pointer("/content_block/name"), None);
            }
            Some("content_block_delta") if data.pointer("/delta/partial_json").is_some() => {
                add(index, None, data.pointer("/delta/partial_json"));
            }
            _ => listed(data.pointer("/choices/0/delta/tool_calls"), &mut add),
        }
    }
    if let Ok(data) = serde_json::from_slice::<Value>(whole) {
        listed(data.pointer("/choices/0/message/tool_calls"), &mut add);
    }
    calls.into_values().map(|(name, arguments)| Value::from(vec![name, arguments])).collect()
}
