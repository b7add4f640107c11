//! A chat completion request: what it asks for, and what an upstream gets to see of it.

use serde::Deserialize;

use super::super::fields::{Fields, OUTPUT_TOKENS_MAX, each, invalid, size};
use super::super::{Manners, OutputField};
use crate::facts::{Extra, Facts, Input, Spans, Surcharge};
use crate::hold::Bound;
use crate::json::{self, Edit};
use crate::money::Tier;
use crate::verdict::Rejection;

/// The most choices of one call. `OpenAI` allows 128.
pub(super) const CHOICES_MAX: u64 = 128;

/// Fields that we act on: a second one of them could mean something else to the upstream.
const ACTED_ON: [&str; 10] = [
    "service_tier",
    "model",
    "stream",
    "stream_options",
    "messages",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "web_search_options",
    "modalities",
];

/// A request of nothing but these is answered alike whether it streams or not. What changes the answer in
/// kind (audio, predictions, searches), or is not known, is left as it is.
const FOLDABLE: [&str; 28] = [
    "model",
    "models",
    "provider",
    "messages",
    "stream",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "user",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "metadata",
    "service_tier",
    "reasoning_effort",
    "verbosity",
    "safety_identifier",
    "prompt_cache_key",
];

/// Reads a request.
///
/// # Errors
/// A 400 that names the field and the way out.
pub fn read(body: &[u8]) -> Result<Facts, Rejection> {
    let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
    let request = Fields::read(body, &ACTED_ON)?;
    let (model, model_span) = request.model()?;
    let stated = request.preferences()?;
    let stream_options = stream_options(&request)?;
    let wants_usage = stream_options.as_ref().is_some_and(|(_, wants)| *wants);
    let mut input = messages(&request)?;
    let searches = request.value("web_search_options").is_some();
    input.beyond_body |= searches;
    input.bytes = bytes.saturating_sub(input.bytes);
    let choices = request.whole_number("n", 1, CHOICES_MAX)?.unwrap_or(1);
    let speaks = request.value("modalities").is_some_and(|listed| listed.contains("\"audio\""));
    let tier = tier(&request)?;
    let surcharges = [
        searches.then_some(Surcharge { extra: Extra::ServerTools, field: "web_search_options" }),
        speaks.then_some(Surcharge { extra: Extra::AudioOutput, field: "modalities" }),
        dear(tier),
    ];
    Ok(Facts {
        model,
        stream: request.flag("stream")?,
        wants_usage,
        output_limit: output_limit(&request)?,
        output_default: None,
        choices,
        samples: choices,
        echoed_bytes: 0,
        tier,
        surcharges: surcharges.into_iter().flatten().collect(),
        input,
        foldable: stream_options.is_none() && request.are_all_among(&FOLDABLE),
        preferences: stated.preferences,
        spans: Spans {
            model: model_span,
            stream: request.span("stream"),
            stream_options: stream_options.map(|(span, _)| span),
            output_limits: request.spans(&["max_tokens", "max_completion_tokens"]),
            ours: stated.cuts,
        },
    })
}

/// What to change for one upstream: its name of the model, usage in streams, our output bound.
#[must_use]
pub fn edits(body: &[u8], facts: &Facts, bound: &Bound, manners: &Manners) -> Vec<Edit> {
    let field = match manners.output_field {
        OutputField::MaxCompletionTokens => "max_completion_tokens",
        OutputField::MaxTokens => "max_tokens",
    };
    edits_with(body, facts, bound, manners, field)
}

/// The same where our output bound goes into this field.
pub(super) fn edits_with(
    body: &[u8],
    facts: &Facts,
    bound: &Bound,
    manners: &Manners,
    output_field: &str,
) -> Vec<Edit> {
    let model = &facts.spans.model;
    let mut edits = Vec::with_capacity(3);
    edits.extend(manners.rename(facts));
    // New members go right behind `model`, which every request has.
    let mut added = String::new();
    let folds = manners.folds(facts);
    if folds {
        match &facts.spans.stream {
            Some(span) => edits.push(Edit { span: span.clone(), with: b"true".to_vec() }),
            None => added.push_str(r#","stream":true"#),
        }
    }
    if (facts.stream || folds) && manners.stream_usage {
        match &facts.spans.stream_options {
            None => added.push_str(r#","stream_options":{"include_usage":true}"#),
            Some(_) if facts.wants_usage => {}
            Some(span) => {
                let options = body.get(span.clone()).unwrap_or_default();
                edits.push(Edit { span: span.clone(), with: with_usage(options) });
            }
        }
    }
    if let Some(limit) = bound.clamped {
        let over =
            |span: &std::ops::Range<usize>| Edit { span: span.clone(), with: limit.to_string().into_bytes() };
        edits.extend(facts.spans.output_limits.iter().map(over));
    }
    if let Some(limit) = bound.write_output {
        added.push_str(&format!(r#","{output_field}":{limit}"#));
    }
    if !added.is_empty() {
        edits.push(Edit { span: model.end..model.end, with: added.into_bytes() });
    }
    edits
}

/// `stream_options` that ask for usage, whatever else they say.
fn with_usage(options: &[u8]) -> Vec<u8> {
    let text = std::str::from_utf8(options).unwrap_or_default();
    let Ok(members) = json::members(text) else {
        return br#"{"include_usage":true}"#.to_vec(); // it was `null`
    };
    let mut edits: Vec<Edit> = members
        .iter()
        .filter(|m| m.key == "include_usage")
        .map(|m| Edit { span: m.value.clone(), with: b"true".to_vec() })
        .collect();
    if edits.is_empty() {
        let comma = if members.is_empty() { "" } else { "," };
        let with = format!(r#""include_usage":true{comma}"#).into_bytes();
        edits.push(Edit { span: 1..1, with });
    }
    json::apply(options, &mut edits)
}

/// Both fields given: the larger counts, since an upstream may read either.
fn output_limit(request: &Fields<'_>) -> Result<Option<u64>, Rejection> {
    let old = request.whole_number("max_tokens", 1, OUTPUT_TOKENS_MAX)?;
    let new = request.whole_number("max_completion_tokens", 1, OUTPUT_TOKENS_MAX)?;
    Ok(old.max(new))
}

pub(super) fn stream_options(
    request: &Fields<'_>,
) -> Result<Option<(std::ops::Range<usize>, bool)>, Rejection> {
    let Some(span) = request.span("stream_options") else { return Ok(None) };
    let Some(text) = request.value("stream_options") else { return Ok(Some((span, false))) };
    let bad = |_| invalid("stream_options", "must be an object such as {\"include_usage\": true}");
    if !text.starts_with('{') {
        return Err(bad(()));
    }
    // A second `include_usage` is refused by the derived reader.
    let options: StreamOptions = serde_json::from_str(text).map_err(|_| bad(()))?;
    Ok(Some((span, options.include_usage.unwrap_or(false))))
}

/// `auto` and what nobody knows count as the standard tier: the answer says which one served.
pub(super) fn tier(request: &Fields<'_>) -> Result<Tier, Rejection> {
    match request.value("service_tier") {
        Some("\"priority\"") => Ok(Tier::Priority),
        Some("\"flex\"") => Ok(Tier::Flex),
        Some(text) if !text.starts_with('"') => Err(invalid("service_tier", "must be a string")),
        _ => Ok(Tier::Standard),
    }
}

/// A tier that costs more than the standard one. A cheaper one is charged as the standard one where it has no
/// price.
pub(super) fn dear(tier: Tier) -> Option<Surcharge> {
    let dearer = match tier {
        Tier::Priority => true,
        Tier::Standard | Tier::Flex | Tier::Batch => false,
    };
    dearer.then_some(Surcharge { extra: Extra::ServiceTier, field: "service_tier" })
}

/// Sizes of the messages; `bytes` holds those of inline media, which are no text.
fn messages(request: &Fields<'_>) -> Result<Input, Rejection> {
    let mut input = Input::default();
    let text = request.needed("messages", "")?;
    let no_list = |why| invalid("messages", &format!("must be a list of messages ({why})"));
    each(text, no_list, |message| {
        input.messages += 1;
        message.values("content").try_for_each(|content| count_content(content, &mut input))
    })?;
    Ok(input)
}

fn count_content(content: &str, input: &mut Input) -> Result<(), Rejection> {
    if content.starts_with('"') {
        input.text_bytes = input.text_bytes.saturating_add(size(content).saturating_sub(2));
        return Ok(());
    }
    if !content.starts_with('[') {
        return Ok(()); // something that the provider will refuse
    }
    let no_list = |why| invalid("messages", &format!("content must be text or a list of parts ({why})"));
    each(content, no_list, |part| {
        match part.string("type").as_deref() {
            _ if part.is_ambiguous(&["type", "text", "image_url"]) => input.beyond_body = true,
            Some("text" | "refusal") => {
                let text = part.value("text").map_or(0, |text| size(text).saturating_sub(2));
                input.text_bytes = input.text_bytes.saturating_add(text);
            }
            Some("image_url") => match part.value("image_url") {
                Some(image) if image.contains("\"data:") => {
                    input.inline_images += 1;
                    input.bytes = input.bytes.saturating_add(size(image));
                }
                _ => input.beyond_body = true,
            },
            // Audio, files and whatever comes next: their tokens cannot be told from here.
            _ => input.beyond_body = true,
        }
        Ok(())
    })
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::Operation;
    use crate::verdict::Reason;

    fn read_text(text: &str) -> Result<Facts, Rejection> {
        read(text.as_bytes())
    }

    fn reason(text: &str) -> Reason {
        read_text(text).unwrap_err().reason
    }

    fn with(fields: &str) -> String {
        format!(r#"{{"model":"gpt-a","messages":[{{"role":"user","content":"hi"}}]{fields}}}"#)
    }

    fn manners() -> Manners {
        Manners {
            native_model: "up-a".into(),
            stream_usage: true,
            output_field: OutputField::MaxCompletionTokens,
            fold: false,
        }
    }

    fn sent(text: &str, manners: &Manners) -> String {
        let facts = read_text(text).unwrap();
        let write_output = facts.output_limit.is_none().then_some(100);
        let bound = Bound { input: 0, output: 0, write_output, clamped: None, lowered: None };
        let mut edits = edits(text.as_bytes(), &facts, &bound, manners);
        let out = json::apply(text.as_bytes(), &mut edits);
        json::check(&out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_plain_request_is_read() {
        let facts = read_text(&with(r#","stream":true,"max_tokens":7,"n":2"#)).unwrap();
        assert_eq!((facts.model.as_str(), facts.stream, facts.wants_usage), ("gpt-a", true, false));
        assert_eq!((facts.output_limit, facts.choices), (Some(7), 2));
        assert_eq!((facts.input.messages, facts.input.text_bytes), (1, 2));
    }

    #[test]
    fn a_route_that_folds_is_asked_for_a_stream_where_every_field_is_known() {
        let folding = Manners { fold: true, ..manners() };
        let streams = |fields: &str| {
            let sent: serde_json::Value = serde_json::from_str(&sent(&with(fields), &folding)).unwrap();
            (sent["stream"].clone(), sent["stream_options"]["include_usage"].clone())
        };
        let (yes, no) = (serde_json::json!(true), serde_json::Value::Null);
        assert_eq!(streams(""), (yes.clone(), yes.clone()));
        assert_eq!(streams(r#","stream":false,"seed":1"#), (yes.clone(), yes.clone()));
        assert_eq!(streams(r#","stream":null"#), (yes.clone(), yes));
        assert_eq!(streams(r#","audio":{}"#), (no.clone(), no.clone()));
        assert_eq!(streams(r#","new_field":1"#), (no.clone(), no));
    }

    #[test]
    fn what_the_caller_wants_of_the_routing_never_goes_upstream() {
        for text in [
            r#"{"model":"gpt-a","models":["b"],"messages":[],"provider":{"order":["x"]}}"#,
            r#"{"provider":{"order":["x"]},"models":["b"],"model":"gpt-a","messages":[]}"#,
            r#"{"messages":[] , "model":"gpt-a" , "\u006dodels":["b"] , "provider":{"order":["x"]} }"#,
        ] {
            let facts = read_text(text).unwrap();
            assert_eq!(facts.preferences.models, ["b"]);
            let bound = Bound { input: 0, output: 0, write_output: Some(9), clamped: None, lowered: None };
            let mut edits = Operation::Chat.edits(text.as_bytes(), &facts, &bound, &manners());
            let sent = json::apply(text.as_bytes(), &mut edits);
            let sent: serde_json::Value = serde_json::from_slice(&sent).unwrap();
            let expected = serde_json::json!({"model": "up-a", "messages": [], "max_completion_tokens": 9});
            assert_eq!(sent, expected, "{text}");
        }
    }

    #[test]
    fn the_larger_of_two_output_bounds_counts() {
        let facts = read_text(&with(r#","max_tokens":7,"max_completion_tokens":9"#)).unwrap();
        assert_eq!(facts.output_limit, Some(9));
    }

    #[test]
    fn absurd_limits_are_refused_before_anything_is_held() {
        for field in [
            r#""n":-1"#,
            r#""n":0"#,
            r#""n":1000000"#,
            r#""n":2.5"#,
            r#""max_tokens":9223372036854775807"#,
            r#""max_tokens":1e30"#,
            r#""max_tokens":-5"#,
            r#""max_tokens":"7""#,
            r#""stream":"yes""#,
            r#""stream_options":true"#,
            r#""stream_options":[]"#,
            r#""stream_options":{"include_usage":1}"#,
        ] {
            assert_eq!(reason(&with(&format!(",{field}"))), Reason::InvalidValue, "{field}");
        }
    }

    #[test]
    fn a_field_that_comes_twice_is_refused_in_any_spelling() {
        for field in [r#""model":"b""#, r#""mod\u0065l":"b""#, r#""stream":true,"stream":false"#] {
            assert_eq!(reason(&with(&format!(",{field}"))), Reason::DuplicateField, "{field}");
        }
        let inside = r#"{"model":"a","messages":[{"role":"user","role":"user","content":"hi"}]}"#;
        assert!(read_text(inside).is_ok(), "inside a message it is the provider's business");
        let contents = r#"{"model":"a","messages":[{"content":"ho","content":"hello"}]}"#;
        assert_eq!(read_text(contents).unwrap().input.text_bytes, 7, "nobody knows which one counts");
        let parts = r#"{"model":"a","messages":[{"content":[{"type":"text","text":"a","type":"x"}]}]}"#;
        assert!(read_text(parts).unwrap().input.beyond_body);
    }

    #[test]
    fn bodies_that_are_no_request_are_refused() {
        for text in ["", "null", "[]", "\"x\"", "NaN", "{'a':1}", "{\"model\":\"a\"} }"] {
            assert_eq!(reason(text), Reason::InvalidJson, "{text}");
        }
        for text in ["{}", r#"{"model":null}"#, r#"{"model":"a"}"#] {
            assert_eq!(reason(text), Reason::MissingField, "{text}");
        }
        let deep = format!("{{\"model\":\"a\",\"messages\":[],\"x\":{}", "[".repeat(100_000));
        assert_eq!(reason(&deep), Reason::InvalidJson);
    }

    #[test]
    fn deep_tool_schemas_are_accepted() {
        let schema = format!("{}1{}", "{\"a\":".repeat(100), "}".repeat(100));
        assert!(read_text(&with(&format!(",\"tools\":[{schema}]"))).is_ok());
    }

    #[test]
    fn only_what_must_change_changes() {
        let text = with(r#","metadata":{"id":9007199254740993,"z":1.10,"a":1e400},"stream":true"#);
        let out = sent(&text, &manners());
        assert_eq!(
            out,
            with(r#","metadata":{"id":9007199254740993,"z":1.10,"a":1e400},"stream":true"#).replace(
                r#""gpt-a""#,
                r#""up-a","stream_options":{"include_usage":true},"max_completion_tokens":100"#
            )
        );
    }

    #[test]
    fn what_costs_more_than_its_tokens_is_named() {
        let asked = |fields: &str| -> Vec<_> {
            let facts = read_text(&with(fields)).unwrap();
            facts.surcharges.iter().map(|s| (s.extra.word(), s.field)).collect()
        };
        assert_eq!(asked(r#","web_search_options":{}"#), [("server_tools", "web_search_options")]);
        assert_eq!(asked(r#","modalities":["text","audio"]"#), [("audio_output", "modalities")]);
        assert_eq!(asked(r#","service_tier":"priority""#), [("service_tier", "service_tier")]);
        assert_eq!(asked(r#","service_tier":"flex","modalities":["text"],"tools":[]"#), []);
    }

    #[test]
    fn a_request_that_needs_no_change_is_sent_as_it_came() {
        let text = with(r#","stream":true,"stream_options":{"include_usage":true},"max_tokens":3"#);
        let same = Manners { native_model: "gpt-a".into(), ..manners() };
        assert_eq!(sent(&text, &same), text);
    }

    #[test]
    fn usage_is_always_asked_for_in_streams() {
        for (options, expected) in [
            ("null", r#"{"include_usage":true}"#),
            ("{}", r#"{"include_usage":true}"#),
            (r#"{"include_usage":false}"#, r#"{"include_usage":true}"#),
            (r#"{"include_obfuscation":false}"#, r#"{"include_usage":true,"include_obfuscation":false}"#),
        ] {
            let out = sent(&with(&format!(r#","stream":true,"stream_options":{options}"#)), &manners());
            assert!(out.contains(&format!(r#""stream_options":{expected}"#)), "{out}");
        }
        assert!(!sent(&with(""), &manners()).contains("stream_options"), "only in streams");
        let plain = Manners { stream_usage: false, ..manners() };
        assert!(!sent(&with(r#","stream":true"#), &plain).contains("stream_options"));
    }

    #[test]
    fn inline_images_are_counted_and_remote_ones_bound_by_the_window() {
        let data = format!("data:image/png;base64,{}", "A".repeat(10_000));
        let image = |url: &str| {
            format!(
                r#"{{"model":"a","messages":[{{"role":"user","content":[{{"type":"text","text":"what?"}},{{"type":"image_url","image_url":{{"url":"{url}"}}}}]}}]}}"#
            )
        };
        let facts = read_text(&image(&data)).unwrap();
        assert_eq!((facts.input.inline_images, facts.input.text_bytes), (1, 5));
        assert!(facts.input.bytes < 300, "{:?}", facts.input);
        assert!(read_text(&image("https://example.com/x.png")).unwrap().input.beyond_body);
    }

    proptest! {
        #[test]
        fn reading_never_panics(text in "\\PC{0,80}", json in "[\\[\\]{}\",:model0-9tre ]{0,60}") {
            let _ = read_text(&text);
            let _ = read_text(&json);
            let _ = read_text(&with(&format!(",{json}")));
        }
    }
}
