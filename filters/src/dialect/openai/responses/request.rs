//! A request for a response: what it asks for, and what an upstream gets to see of it.

use super::super::super::Manners;
use super::super::super::fields::{Fields, OUTPUT_TOKENS_MAX, each, invalid, size};
use super::super::super::object::Object;
use super::super::request::{dear, tier};
use crate::facts::{Extra, Facts, Input, Spans, Surcharge};
use crate::hold::Bound;
use crate::json::Edit;
use crate::verdict::{Reason, Rejection};

/// Fields that we act on: a second one of them could mean something else to the upstream.
const ACTED_ON: [&str; 13] = [
    "model",
    "stream",
    "input",
    "instructions",
    "max_output_tokens",
    "tools",
    "background",
    "previous_response_id",
    "conversation",
    "prompt",
    "context_management",
    "max_tool_calls",
    "service_tier",
];
/// What stands for an input that is kept at the provider's.
const ELSEWHERE: [&str; 4] = ["previous_response_id", "conversation", "prompt", "context_management"];
/// Tools that run at the caller's: nothing but their description is input.
const CALLER_TOOLS: [&str; 2] = ["function", "custom"];
/// Other tools that have no fee of their own. What they bring in is input, which the body does not show.
const TOOLS_WITHOUT_FEE: [&str; 6] =
    ["mcp", "local_shell", "apply_patch", "computer", "computer_use_preview", "tool_search"];
/// How often a model may read everything while tools run at the provider's, where the caller sets no bound.
const ROUNDS_DEFAULT: u64 = 32;
/// The largest bound of a caller that is taken seriously.
const TOOL_CALLS_MAX: u64 = 1_000;
/// What is read of an item.
const ITEM_FIELDS: [&str; 9] =
    ["type", "role", "content", "name", "arguments", "input", "output", "summary", "encrypted_content"];

/// Reads a request.
///
/// # Errors
/// A 400 that names the field and the way out.
pub fn read(body: &[u8]) -> Result<Facts, Rejection> {
    let request = Fields::read(body, &ACTED_ON)?;
    let (model, model_span) = request.model()?;
    let stated = request.preferences()?;
    if request.flag("background")? {
        let message =
            "`background` must be false: what runs on by itself cannot be metered here. Use `stream`.";
        return Err(Rejection::new(Reason::InvalidValue, message).param("background"));
    }
    let elsewhere = ELSEWHERE.into_iter().any(|field| request.value(field).is_some());
    let mut sizes = Sizes::default();
    sizes.input.beyond_body = elsewhere;
    match request.value("input") {
        Some(input) => sizes.input(input)?,
        None if elsewhere => {}
        None => sizes.input(request.needed("input", ": say what the model shall answer")?)?,
    }
    if let Some(instructions) = request.value("instructions") {
        sizes.text(size(instructions).saturating_sub(2));
    }
    if let Some(tools) = request.value("tools") {
        sizes.tools(tools)?;
    }
    if sizes.input.beyond_body {
        let calls = request.whole_number("max_tool_calls", 0, TOOL_CALLS_MAX)?;
        sizes.input.rounds = calls.map_or(ROUNDS_DEFAULT, |calls| calls.saturating_add(1));
    }
    let tier = tier(&request)?;
    let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX).saturating_sub(sizes.media_bytes);
    Ok(Facts {
        model,
        stream: request.flag("stream")?,
        wants_usage: true,
        output_limit: request.whole_number("max_output_tokens", 1, OUTPUT_TOKENS_MAX)?,
        output_default: None,
        choices: 1,
        samples: 1,
        echoed_bytes: 0,
        tier,
        surcharges: sizes.surcharge.into_iter().chain(dear(tier)).collect(),
        input: Input { bytes, ..sizes.input },
        foldable: false,
        preferences: stated.preferences,
        spans: Spans {
            model: model_span,
            stream: request.span("stream"),
            stream_options: None,
            output_limits: request.spans(&["max_output_tokens"]),
            ours: stated.cuts,
        },
    })
}

/// What to change for one upstream: its name of the model, and our output bound.
#[must_use]
pub fn edits(facts: &Facts, bound: &Bound, manners: &Manners) -> Vec<Edit> {
    let mut edits: Vec<Edit> = manners.rename(facts).into_iter().collect();
    if let Some(limit) = bound.clamped {
        let limits = facts.spans.output_limits.iter().cloned();
        edits.extend(limits.map(|span| Edit { span, with: limit.to_string().into_bytes() }));
    }
    if let Some(limit) = bound.write_output {
        // Right behind `model`, which every request has.
        let end = facts.spans.model.end;
        edits.push(Edit { span: end..end, with: format!(r#","max_output_tokens":{limit}"#).into_bytes() });
    }
    edits
}

#[derive(Default)]
struct Sizes {
    input: Input,
    /// Bytes of inline images, which are no text.
    media_bytes: u64,
    surcharge: Option<Surcharge>,
}

impl Sizes {
    /// Text, or a list of items.
    fn input(&mut self, text: &str) -> Result<(), Rejection> {
        if text.starts_with('"') {
            self.input.messages += 1;
            self.text(size(text).saturating_sub(2));
            return Ok(());
        }
        let no_list = |why| invalid("input", &format!("must be a text or a list of items ({why})"));
        each(text, no_list, |item| {
            self.input.messages += 1;
            self.item(item)
        })
    }

    fn item(&mut self, item: &Object<'_>) -> Result<(), Rejection> {
        let raw = |key| item.value(key).map_or(0, size);
        match item.string("type").as_deref() {
            _ if item.is_ambiguous(&ITEM_FIELDS) => self.input.beyond_body = true,
            None | Some("message") => {
                return item.value("content").map_or(Ok(()), |content| self.content(content));
            }
            Some("function_call") => self.text(raw("name").saturating_add(raw("arguments"))),
            Some("custom_tool_call") => self.text(raw("name").saturating_add(raw("input"))),
            Some("function_call_output" | "custom_tool_call_output") => {
                return item.value("output").map_or(Ok(()), |output| self.content(output));
            }
            // What is encrypted is longer than what it hides.
            Some("reasoning") => {
                self.text([raw("summary"), raw("content"), raw("encrypted_content")].into_iter().sum());
            }
            // References, results of built-in tools and whatever comes next: their tokens cannot be told
            // from here.
            Some(_) => self.input.beyond_body = true,
        }
        Ok(())
    }

    /// Text, or a list of parts.
    fn content(&mut self, content: &str) -> Result<(), Rejection> {
        if content.starts_with('"') {
            self.text(size(content).saturating_sub(2));
            return Ok(());
        }
        if !content.starts_with('[') {
            return Ok(()); // something that the provider will refuse
        }
        let no_list =
            |why| invalid("input", &format!("must have text or a list of parts as content ({why})"));
        each(content, no_list, |part| {
            match part.string("type").as_deref() {
                _ if part.is_ambiguous(&["type", "text", "refusal", "image_url", "file_id"]) => {
                    self.input.beyond_body = true;
                }
                Some(
                    "input_text" | "output_text" | "text" | "refusal" | "summary_text" | "reasoning_text",
                ) => {
                    let bytes = |key| part.value(key).map_or(0, |text| size(text).saturating_sub(2));
                    self.text(bytes("text").max(bytes("refusal")));
                }
                Some("input_image") => match part.value("image_url") {
                    Some(image) if image.starts_with("\"data:") && part.value("file_id").is_none() => {
                        self.input.inline_images += 1;
                        self.media_bytes = self.media_bytes.saturating_add(size(image));
                    }
                    _ => self.input.beyond_body = true,
                },
                // Audio, files and whatever comes next.
                _ => self.input.beyond_body = true,
            }
            Ok(())
        })
    }

    fn tools(&mut self, text: &str) -> Result<(), Rejection> {
        let mut any = false;
        let no_list = |why| invalid("tools", &format!("must be a list of tools ({why})"));
        each(text, no_list, |tool| {
            any = true;
            let kind = tool.string("type");
            let kind = kind.as_deref().unwrap_or_default();
            if tool.is_ambiguous(&["type"]) || !CALLER_TOOLS.contains(&kind) {
                self.input.beyond_body = true;
                if tool.is_ambiguous(&["type"]) || !TOOLS_WITHOUT_FEE.contains(&kind) {
                    self.surcharge = Some(Surcharge { extra: Extra::ServerTools, field: "tools" });
                }
            }
            Ok(())
        })?;
        if any {
            self.text(size(text));
        }
        Ok(())
    }

    fn text(&mut self, bytes: u64) {
        self.input.text_bytes = self.input.text_bytes.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::super::OutputField;
    use super::*;
    use crate::json;

    fn with(fields: &str) -> String {
        format!(r#"{{"model":"gpt-a","input":"hi"{fields}}}"#)
    }

    fn items(items: &str) -> String {
        format!(r#"{{"model":"gpt-a","input":[{items}]}}"#)
    }

    fn facts(text: &str) -> Facts {
        read(text.as_bytes()).unwrap_or_else(|e| panic!("{text}: {}", e.message))
    }

    fn refused(text: &str) -> (Reason, Option<&'static str>) {
        let rejection = read(text.as_bytes()).unwrap_err();
        (rejection.reason, rejection.param)
    }

    #[test]
    fn a_plain_request_is_read() {
        let text =
            with(r#","stream":true,"max_output_tokens":7,"instructions":"be brief","background":false"#);
        let facts = facts(&text);
        assert_eq!((facts.stream, facts.output_limit, facts.choices), (true, Some(7), 1));
        assert_eq!((facts.input.messages, facts.input.text_bytes, facts.input.bytes), (1, 10, size(&text)));
        assert!(!facts.input.beyond_body && facts.surcharges.is_empty());
    }

    #[test]
    fn what_is_missing_comes_twice_or_runs_on_by_itself_is_named() {
        assert_eq!(refused(r#"{"model":"a"}"#), (Reason::MissingField, Some("input")));
        assert_eq!(refused(&with(r#","background":true"#)), (Reason::InvalidValue, Some("background")));
        assert_eq!(refused(&with(r#","input":"x""#)), (Reason::DuplicateField, Some("input")));
        assert_eq!(
            refused(&with(r#","max_output_tokens":0"#)),
            (Reason::InvalidValue, Some("max_output_tokens"))
        );
        assert_eq!(refused(&items("1")), (Reason::InvalidValue, Some("input")));
        assert_eq!(refused(r#"{"model":"a","input":1}"#), (Reason::InvalidValue, Some("input")));
    }

    #[test]
    fn what_is_kept_at_the_providers_is_bounded_by_the_window() {
        for field in ["previous_response_id", "conversation", "prompt", "context_management"] {
            assert!(facts(&with(&format!(r#","{field}":"x""#))).input.beyond_body, "{field}");
            assert!(
                facts(&format!(r#"{{"model":"a","{field}":{{"id":"x"}}}}"#)).input.beyond_body,
                "{field}"
            );
        }
        for item in [
            r#"{"type":"item_reference","id":"x"}"#,
            r#"{"type":"web_search_call"}"#,
            r#"{"role":"user","content":[{"type":"input_image","image_url":"https://x"}]}"#,
            r#"{"role":"user","content":[{"type":"input_image","file_id":"f"}]}"#,
            r#"{"role":"user","content":[{"type":"input_file","file_id":"f"}]}"#,
            r#"{"role":"user","content":[{"type":"input_text","type":"x","text":"a"}]}"#,
            r#"{"role":"user","content":"a","content":"b"}"#,
        ] {
            assert!(facts(&items(item)).input.beyond_body, "{item}");
        }
    }

    #[test]
    fn items_are_counted() {
        let text = items(
            r#"{"role":"user","content":"hi"},{"type":"message","role":"user","content":[{"type":"input_text","text":"you"}]},{"type":"function_call","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"done"}"#,
        );
        let input = facts(&text).input;
        assert_eq!((input.messages, input.text_bytes, input.beyond_body), (4, 2 + 3 + 3 + 4 + 4, false));
        let image = format!(
            r#"{{"role":"user","content":[{{"type":"input_image","image_url":"data:image/png;base64,{}"}}]}}"#,
            "A".repeat(10_000)
        );
        let input = facts(&items(&image)).input;
        assert!(input.inline_images == 1 && input.bytes < 300, "{input:?}");
    }

    #[test]
    fn tools_of_the_providers_are_known_with_what_they_cost() {
        for (tool, beyond, fee) in [
            (r#"{"type":"function","name":"f","parameters":{}}"#, false, false),
            (r#"{"type":"custom","name":"f"}"#, false, false),
            (r#"{"type":"mcp","server_url":"https://x"}"#, true, false),
            (r#"{"type":"web_search_preview"}"#, true, true),
            (r#"{"type":"file_search","vector_store_ids":[]}"#, true, true),
            (r#"{"type":"code_interpreter","container":{}}"#, true, true),
            (r#"{"type":"something_new"}"#, true, true),
            (r#"{"type":"function","type":"web_search"}"#, true, true),
        ] {
            let facts = facts(&with(&format!(r#","tools":[{tool}]"#)));
            assert_eq!((facts.input.beyond_body, !facts.surcharges.is_empty()), (beyond, fee), "{tool}");
        }
    }

    #[test]
    fn every_tool_call_at_the_providers_is_a_reading_more() {
        let rounds = |fields: &str| facts(&with(fields)).input.rounds;
        let tools = r#","tools":[{"type":"mcp","server_url":"https://x"}]"#;
        assert_eq!(rounds(""), 0);
        assert_eq!(rounds(tools), ROUNDS_DEFAULT);
        assert_eq!(rounds(&format!(r#"{tools},"max_tool_calls":3"#)), 4);
    }

    #[test]
    fn our_bound_is_written_where_there_is_none() {
        let manners = Manners {
            native_model: "up-a".into(),
            stream_usage: true,
            output_field: OutputField::MaxTokens,
            fold: false,
        };
        let sent = |text: &str, bound: Bound| {
            let out = json::apply(text.as_bytes(), &mut edits(&facts(text), &bound, &manners));
            String::from_utf8(out).unwrap()
        };
        let bound = Bound { input: 0, output: 0, write_output: Some(100), clamped: None, lowered: None };
        assert_eq!(
            sent(&with(r#","x":1.10"#), bound),
            r#"{"model":"up-a","max_output_tokens":100,"input":"hi","x":1.10}"#
        );
        let clamped = Bound { write_output: None, clamped: Some(9), ..bound };
        assert_eq!(
            sent(&with(r#","max_output_tokens":70"#), clamped),
            r#"{"model":"up-a","input":"hi","max_output_tokens":9}"#
        );
    }

    proptest! {
        #[test]
        fn reading_never_panics(json in "[\\[\\]{}\",:typecontn0-9 ]{0,60}") {
            let _ = read(json.as_bytes());
            let _ = read(with(&format!(",{json}")).as_bytes());
            let _ = read(items(&json).as_bytes());
        }
    }
}
