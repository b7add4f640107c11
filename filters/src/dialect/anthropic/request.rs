//! A messages request: what it asks for, and what an upstream gets to see of it.
//!
//! The bytes of the body bound its tokens, as in every dialect. What the provider adds by itself is
//! bounded apart: a preamble for tools. What is not in the body at all (remote files, server tools,
//! stored containers) is bounded by the context window alone; so are documents, whose pages are read
//! as text *and* as images.

use serde::Deserialize;

use super::super::Manners;
use super::super::fields::{Fields, OUTPUT_TOKENS_MAX, each, invalid, size};
use super::super::object::Object;
use crate::facts::{Extra, Facts, Input, Spans, Surcharge};
use crate::hold::Bound;
use crate::json::Edit;
use crate::money::Tier;
use crate::verdict::Rejection;

/// What the preamble for tools may cost, in tokens. Up to 530 are published.
const TOOLS_TOKENS_MAX: u64 = 1_024;
/// Tools of Anthropic's that run at the caller's: each adds its own description. Up to 735 tokens are
/// published.
const CALLER_TOOLS: [&str; 4] = ["bash_", "text_editor_", "computer_", "memory_"];
/// What the description of one of them may cost, in tokens.
const CALLER_TOOL_TOKENS_MAX: u64 = 1_024;

/// How often a model reads everything, at most, while tools run at the provider's or a long conversation is
/// compacted: its loop ends with `pause_turn` after ten.
const ROUNDS_MAX: u64 = 11;

/// Fields that we act on: a second one of them could mean something else to the upstream.
pub(super) const ACTED_ON: [&str; 12] = [
    "model",
    "stream",
    "max_tokens",
    "messages",
    "system",
    "tools",
    "thinking",
    "mcp_servers",
    "container",
    "context_management",
    "speed",
    "inference_geo",
];
/// Tools that run at the provider's without a fee of their own. Of all others the price is not known.
const TOOLS_WITHOUT_FEE: [&str; 3] = ["web_fetch_", "tool_search_tool_", "mcp_toolset"];

/// A request of nothing but these is answered alike whether it streams or not.
const FOLDABLE: [&str; 15] = [
    "model",
    "models",
    "provider",
    "messages",
    "system",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "stream",
    "metadata",
    "tools",
    "tool_choice",
    "thinking",
];

/// Reads a request.
///
/// # Errors
/// A 400 that names the field and the way out.
pub fn read(body: &[u8]) -> Result<Facts, Rejection> {
    let request = Fields::read(body, &ACTED_ON)?;
    let (model, model_span) = request.model()?;
    let stated = request.preferences()?;
    let stream = request.flag("stream")?;
    let output_limit = output_limit(&request)?;
    let thinks = request.value("thinking").is_some();
    let (input, surcharges) = input(&request, body.len())?;
    Ok(Facts {
        model,
        stream,
        wants_usage: true,
        output_limit: Some(output_limit),
        output_default: None,
        choices: 1,
        samples: 1,
        echoed_bytes: 0,
        tier: Tier::Standard,
        surcharges,
        input,
        foldable: request.are_all_among(&FOLDABLE),
        preferences: stated.preferences,
        spans: Spans {
            model: model_span,
            stream: request.span("stream"),
            stream_options: None,
            // A thinking budget has to stay below `max_tokens`: such a bound is left as it is.
            output_limits: if thinks { vec![] } else { request.spans(&["max_tokens"]) },
            ours: stated.cuts,
        },
    })
}

/// The size of what the model has to read, and what of it costs more than its tokens.
pub(super) fn input(request: &Fields<'_>, body_bytes: usize) -> Result<(Input, Vec<Surcharge>), Rejection> {
    let mut sizes = Sizes::default();
    sizes.messages(request.needed("messages", "")?)?;
    if let Some(system) = request.value("system") {
        sizes.content(system, "system")?;
    }
    if let Some(tools) = request.value("tools") {
        sizes.tools(tools)?;
    }
    let elsewhere = ["mcp_servers", "container", "context_management"];
    sizes.input.beyond_body |= elsewhere.into_iter().any(|field| request.value(field).is_some());
    if sizes.input.beyond_body {
        sizes.input.rounds = ROUNDS_MAX;
    }
    let asks_for = |extra, field, usual: &str| {
        let unusual = request.value(field).is_some_and(|value| value != usual);
        unusual.then_some(Surcharge { extra, field })
    };
    let surcharges = [
        sizes.fee.then_some(Surcharge { extra: Extra::ServerTools, field: "tools" }),
        // Code that runs in a container is paid by its time.
        asks_for(Extra::ServerTools, "container", ""),
        asks_for(Extra::Speed, "speed", "\"standard\""),
        asks_for(Extra::InferenceGeo, "inference_geo", "\"global\""),
    ];
    let bytes = u64::try_from(body_bytes).unwrap_or(u64::MAX).saturating_sub(sizes.media_bytes);
    Ok((Input { bytes, ..sizes.input }, surcharges.into_iter().flatten().collect()))
}

/// What to change for one upstream: its name of the model, and a bound that the balance cannot carry.
#[must_use]
pub fn edits(facts: &Facts, bound: &Bound, manners: &Manners) -> Vec<Edit> {
    let mut edits: Vec<Edit> = manners.rename(facts).into_iter().collect();
    if manners.folds(facts) {
        edits.push(match &facts.spans.stream {
            Some(span) => Edit { span: span.clone(), with: b"true".to_vec() },
            // A new member goes right behind `model`, which every request has.
            None => {
                let end = facts.spans.model.end;
                Edit { span: end..end, with: br#","stream":true"#.to_vec() }
            }
        });
    }
    if let Some(limit) = bound.clamped {
        let limits = facts.spans.output_limits.iter().cloned();
        edits.extend(limits.map(|span| Edit { span, with: limit.to_string().into_bytes() }));
    }
    edits
}

/// Thinking is output and lies within `max_tokens`, except where it is interleaved with tools: then its
/// own budget may be larger, and the larger one counts.
fn output_limit(request: &Fields<'_>) -> Result<u64, Rejection> {
    let help = ": say how many output tokens the answer may have at most";
    request.needed("max_tokens", help)?;
    let limit = request.whole_number("max_tokens", 1, OUTPUT_TOKENS_MAX)?.unwrap_or_default();
    let Some(thinking) = request.value("thinking") else { return Ok(limit) };
    let thinking: Thinking = serde_json::from_str(thinking).map_err(|_| {
        invalid("thinking", "must be an object such as {\"type\": \"enabled\", \"budget_tokens\": 2048}")
    })?;
    match thinking.budget_tokens {
        Some(budget) if budget > OUTPUT_TOKENS_MAX => {
            Err(invalid("thinking", &format!("may have a budget of {OUTPUT_TOKENS_MAX} tokens at most")))
        }
        budget => Ok(limit.max(budget.unwrap_or_default())),
    }
}

/// What is read of a block.
const BLOCK_FIELDS: [&str; 8] = ["type", "text", "thinking", "data", "name", "input", "content", "source"];

#[derive(Default)]
struct Sizes {
    input: Input,
    /// Bytes of inline images, which are no text.
    media_bytes: u64,
    /// A tool has a fee of its own.
    fee: bool,
}

impl Sizes {
    fn messages(&mut self, text: &str) -> Result<(), Rejection> {
        let no_list = |why| invalid("messages", &format!("must be a list of messages ({why})"));
        each(text, no_list, |message| {
            self.input.messages += 1;
            message.values("content").try_for_each(|content| self.content(content, "messages"))
        })
    }

    /// Text, or a list of blocks.
    fn content(&mut self, content: &str, field: &'static str) -> Result<(), Rejection> {
        if content.starts_with('"') {
            self.text(size(content).saturating_sub(2));
            return Ok(());
        }
        if !content.starts_with('[') {
            return Ok(()); // something that the provider will refuse
        }
        let no_list = |why| invalid(field, &format!("must have text or a list of blocks as content ({why})"));
        each(content, no_list, |block| self.block(block, field))
    }

    fn block(&mut self, block: &Object<'_>, field: &'static str) -> Result<(), Rejection> {
        let raw = |key| block.value(key).map_or(0, size);
        match block.string("type").as_deref() {
            _ if block.is_ambiguous(&BLOCK_FIELDS) => self.input.beyond_body = true,
            Some("text" | "thinking") => {
                self.text(raw("text").max(raw("thinking")).saturating_sub(2));
            }
            Some("redacted_thinking") => self.text(raw("data")),
            Some("tool_use") => self.text(raw("name").saturating_add(raw("input"))),
            // Nesting was bounded when the body was read, and so is this recursion.
            Some("tool_result") => {
                return block.value("content").map_or(Ok(()), |content| self.content(content, field));
            }
            Some("image") => match block.value("source") {
                Some(source) if is_inline(source) => {
                    self.input.inline_images += 1;
                    self.media_bytes = self.media_bytes.saturating_add(size(source));
                }
                _ => self.input.beyond_body = true,
            },
            // Documents, results of server tools and whatever comes next: their tokens cannot be told
            // from here.
            _ => self.input.beyond_body = true,
        }
        Ok(())
    }

    fn tools(&mut self, text: &str) -> Result<(), Rejection> {
        let no_list = |why| invalid("tools", &format!("must be a list of tools ({why})"));
        let mut any = false;
        each(text, no_list, |tool| {
            if !std::mem::replace(&mut any, true) {
                self.text(size(text));
                self.input.template_tokens = TOOLS_TOKENS_MAX;
            }
            match tool.string("type").as_deref() {
                _ if tool.is_ambiguous(&["type"]) => {
                    self.input.beyond_body = true;
                    self.fee = true;
                }
                None | Some("custom") => {}
                Some(kind) if CALLER_TOOLS.iter().any(|known| kind.starts_with(known)) => {
                    self.input.template_tokens =
                        self.input.template_tokens.saturating_add(CALLER_TOOL_TOKENS_MAX);
                }
                // It runs at the provider's, and what it finds is input again.
                Some(kind) => {
                    self.input.beyond_body = true;
                    self.fee |= !TOOLS_WITHOUT_FEE.iter().any(|known| kind.starts_with(known));
                }
            }
            Ok(())
        })
    }

    fn text(&mut self, bytes: u64) {
        self.input.text_bytes = self.input.text_bytes.saturating_add(bytes);
    }
}

fn is_inline(source: &str) -> bool {
    let source = Object::of(source);
    source.is_ok_and(|s| s.string("type").as_deref() == Some("base64") && !s.is_ambiguous(&["type"]))
}

#[derive(Deserialize)]
struct Thinking {
    budget_tokens: Option<u64>,
}

#[cfg(test)]
mod tests {
    const BOUND: Bound = Bound { input: 0, output: 0, write_output: None, clamped: None, lowered: None };

    use proptest::prelude::*;

    use super::super::super::OutputField;
    use super::*;
    use crate::json;
    use crate::verdict::Reason;

    fn with(fields: &str) -> String {
        format!(
            r#"{{"model":"claude-a","max_tokens":100,"messages":[{{"role":"user","content":"hi"}}]{fields}}}"#
        )
    }

    fn said(content: &str) -> String {
        format!(
            r#"{{"model":"claude-a","max_tokens":100,"messages":[{{"role":"user","content":{content}}}]}}"#
        )
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
        let text = with(r#","stream":true,"system":"be brief""#);
        let facts = facts(&text);
        assert_eq!((facts.model.as_str(), facts.stream, facts.choices), ("claude-a", true, 1));
        assert_eq!(facts.output_limit, Some(100));
        assert_eq!((facts.input.messages, facts.input.text_bytes), (1, 10));
        assert_eq!(facts.input.bytes, size(&text));
        assert!(!facts.input.beyond_body && facts.input.template_tokens == 0);
    }

    #[test]
    fn what_is_missing_or_comes_twice_is_named() {
        let without = |field: &str| with("").replace(&format!("\"{field}\""), "\"x\"");
        let many = with(&r#","x":1"#.repeat(json::MEMBERS_MAX));
        assert_eq!(refused(&many).0, Reason::InvalidJson);
        for field in ["model", "max_tokens", "messages"] {
            assert_eq!(refused(&without(field)), (Reason::MissingField, Some(field)));
        }
        for field in ["model", "max_tokens", "messages", "stream", "system", "tools", "thinking", "container"]
        {
            let twice = format!(r#","{field}":null,"{field}":null"#);
            assert_eq!(refused(&with(&twice)), (Reason::DuplicateField, Some(field)));
        }
        assert_eq!(refused("[]").0, Reason::InvalidJson);
        assert!(read(with(r#","metadata":{"a":1,"a":2}"#).as_bytes()).is_ok());
    }

    #[test]
    fn absurd_values_are_refused_before_anything_is_held() {
        for (field, param) in [
            (r#""stream":"yes""#, "stream"),
            (r#""system":[1]"#, "system"),
            (r#""tools":{}"#, "tools"),
            (r#""thinking":true"#, "thinking"),
            (r#""thinking":{"budget_tokens":-1}"#, "thinking"),
            (r#""thinking":{"budget_tokens":99999999999}"#, "thinking"),
        ] {
            assert_eq!(refused(&with(&format!(",{field}"))), (Reason::InvalidValue, Some(param)), "{field}");
        }
        for limit in ["0", "-5", "1e3", "\"7\"", "9223372036854775807", "2.5"] {
            let text = with("").replace(":100", &format!(":{limit}"));
            assert_eq!(refused(&text), (Reason::InvalidValue, Some("max_tokens")), "{limit}");
        }
        assert_eq!(
            refused(&with("").replace("[{", "{\"a\":[{").replace("}]", "}]}")).0,
            Reason::InvalidValue
        );
        let deep = format!("{{\"model\":\"a\",\"messages\":[],\"x\":{}", "[".repeat(100_000));
        assert_eq!(refused(&deep).0, Reason::InvalidJson);
    }

    #[test]
    fn a_budget_for_thinking_above_the_bound_counts() {
        let limit = |fields: &str| facts(&with(fields)).output_limit;
        assert_eq!(limit(r#","thinking":{"type":"enabled","budget_tokens":50}"#), Some(100));
        assert_eq!(limit(r#","thinking":{"type":"enabled","budget_tokens":5000}"#), Some(5_000));
        assert_eq!(limit(r#","thinking":{"type":"adaptive"}"#), Some(100));
        assert_eq!(limit(r#","thinking":null"#), Some(100));
    }

    #[test]
    fn the_preamble_of_tools_is_bounded() {
        let tool = r#"{"name":"f","description":"d","input_schema":{"type":"object"}}"#;
        let input = facts(&with(&format!(r#","tools":[{tool},{tool}]"#))).input;
        assert_eq!((input.template_tokens, input.beyond_body), (1_024, false));
        assert!(input.text_bytes > size(tool) * 2);
        let bash = format!(r#","tools":[{tool},{{"type":"bash_20250124","name":"bash"}}]"#);
        let input = facts(&with(&bash)).input;
        assert_eq!((input.template_tokens, input.beyond_body), (2_048, false));
        assert_eq!(facts(&with(r#","tools":[]"#)).input.template_tokens, 0);
    }

    #[test]
    fn what_is_not_in_the_body_is_bounded_by_the_window() {
        for fields in [
            r#","tools":[{"type":"web_search_20250305","name":"web_search"}]"#,
            r#","tools":[{"type":"code_execution_20250825","name":"code_execution"}]"#,
            r#","tools":[{"type":"mcp_toolset","mcp_server_name":"x"}]"#,
            r#","mcp_servers":[{"type":"url","url":"https://x","name":"x"}]"#,
            r#","container":"c_1""#,
            r#","context_management":{"edits":[]}"#,
        ] {
            let input = facts(&with(fields)).input;
            assert!(input.beyond_body && input.rounds == ROUNDS_MAX, "{fields}");
        }
        for block in [
            r#"{"type":"image","source":{"type":"url","url":"https://x"}}"#,
            r#"{"type":"image","source":{"type":"file","file_id":"f"}}"#,
            r#"{"type":"image"}"#,
            r#"{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"AAAA"}}"#,
            r#"{"type":"document","source":{"type":"url","url":"https://x"}}"#,
            r#"{"type":"container_upload","file_id":"f"}"#,
            r#"{"type":"web_search_tool_result","content":[]}"#,
            r#"{"type":"something_new"}"#,
        ] {
            assert!(facts(&said(&format!("[{block}]"))).input.beyond_body, "{block}");
            let nested = format!(r#"[{{"type":"tool_result","content":[{block}]}}]"#);
            assert!(facts(&said(&nested)).input.beyond_body, "{nested}");
        }
    }

    #[test]
    fn what_costs_more_than_its_tokens_is_named() {
        let asked = |fields: &str| -> Vec<_> {
            facts(&with(fields)).surcharges.iter().map(|s| (s.extra.word(), s.field)).collect()
        };
        assert_eq!(asked(r#","speed":"fast""#), [("speed", "speed")]);
        assert_eq!(asked(r#","inference_geo":"us""#), [("inference_geo", "inference_geo")]);
        assert_eq!(asked(r#","container":"c_1""#), [("server_tools", "container")]);
        for kind in ["web_search_20250305", "code_execution_20250825", "something_new"] {
            let tools = format!(r#","tools":[{{"name":"f"}},{{"type":"{kind}","name":"x"}}]"#);
            assert_eq!(asked(&tools), [("server_tools", "tools")], "{kind}");
        }
        for fields in [
            r#","speed":"standard","inference_geo":"global""#,
            r#","speed":null,"container":null"#,
            r#","service_tier":"auto""#,
            r#","tools":[{"name":"f"},{"type":"bash_20250124","name":"bash"},{"type":"web_fetch_20250910","name":"f"}]"#,
            r#","mcp_servers":[{"type":"url","url":"https://x","name":"x"}]"#,
        ] {
            assert_eq!(asked(fields), [], "{fields}");
        }
    }

    #[test]
    fn inline_images_are_counted_and_their_bytes_are_no_text() {
        let image = format!(
            r#"{{"type":"image","source":{{"type":"base64","media_type":"image/png","data":"{}"}}}}"#,
            "A".repeat(10_000)
        );
        let nested = format!(
            r#"[{{"type":"text","text":"what?"}},{image},{{"type":"tool_result","tool_use_id":"t","content":[{image}]}}]"#
        );
        let input = facts(&said(&nested)).input;
        assert_eq!((input.inline_images, input.text_bytes, input.beyond_body), (2, 5, false));
        assert!(input.bytes < 500, "{input:?}");
    }

    #[test]
    fn earlier_turns_count_as_text() {
        let text = r#"[{"type":"thinking","thinking":"abc","signature":"s"},{"type":"tool_use","id":"t","name":"f","input":{"a":1}},{"type":"tool_result","tool_use_id":"t","content":"done"},{"type":"tool_result","tool_use_id":"t"}]"#;
        let input = facts(&said(text)).input;
        assert_eq!((input.text_bytes, input.beyond_body), (3 + 3 + 7 + 4, false));
    }

    #[test]
    fn only_the_name_of_the_model_and_a_bound_that_was_lowered_change() {
        let text = with(r#","stream":true,"metadata":{"id":9007199254740993,"z":1.10}"#);
        let facts = facts(&text);
        let manners = |native: &str| Manners {
            native_model: native.into(),
            stream_usage: true,
            output_field: OutputField::MaxCompletionTokens,
            fold: false,
        };
        let sent = json::apply(text.as_bytes(), &mut edits(&facts, &BOUND, &manners("up-c")));
        assert_eq!(String::from_utf8(sent).unwrap(), text.replace("claude-a", "up-c"));
        assert_eq!(edits(&facts, &BOUND, &manners("claude-a")), []);
        let lowered = Bound { clamped: Some(7), ..BOUND };
        let sent = json::apply(text.as_bytes(), &mut edits(&facts, &lowered, &manners("claude-a")));
        assert_eq!(String::from_utf8(sent).unwrap(), text.replace(":100,", ":7,"));
    }

    proptest! {
        #[test]
        fn reading_never_panics(text in "\\PC{0,80}", json in "[\\[\\]{}\",:sourcetyp0-9 ]{0,60}") {
            let _ = read(text.as_bytes());
            let _ = read(with(&format!(",{json}")).as_bytes());
            let _ = read(said(&json).as_bytes());
        }
    }
}
