//! The JSON a provider speaks, as text: stream events, whole answers, errors. What responses look like is
//! in `responses.rs`.
//!
//! Everything here is a template in the field order of the real APIs, because what is under test
//! downstream is a reader of exactly these bytes. Nothing is shared with the gateway's own
//! dialect code: a mistake made once there must not be made here again.
//!
//! Deliberately absent: tools, several choices (`n`), reasoning, log probabilities. A script that wants
//! them says its answers word for word.

use serde_json::Value;

use super::responses;
use super::script::{Dialect, Script, Surface, UsageScript, Words};

/// What a completion request asks for, as far as an answer's shape depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub surface: Surface,
    pub model: Option<String>,
    pub stream: bool,
    pub include_usage: bool,
    /// What the script answers here word for word.
    pub words: Option<Words>,
    /// Texts to embed.
    pub inputs: usize,
    /// Embeddings as one text each, not as lists of numbers.
    pub base64: bool,
}

impl Wish {
    /// `None` for a body that is not a JSON object.
    pub(super) fn parse(surface: Surface, body: &[u8]) -> Option<Self> {
        let body: Value = serde_json::from_slice(body).ok()?;
        let is_true = |value: Option<&Value>| value.and_then(Value::as_bool) == Some(true);
        // A list of numbers is one text.
        let inputs = body.get("input").and_then(Value::as_array);
        let inputs = inputs.filter(|list| !list.iter().all(Value::is_number)).map_or(1, Vec::len);
        body.as_object().map(|fields| Self {
            surface,
            inputs,
            base64: fields.get("encoding_format").and_then(Value::as_str) == Some("base64"),
            model: fields.get("model").and_then(Value::as_str).map(String::from),
            stream: is_true(fields.get("stream")),
            include_usage: is_true(body.pointer("/stream_options/include_usage")),
            words: None,
        })
    }
}

/// The events of one whole stream, each with its blank line.
pub(super) struct Events {
    pub openers: Vec<String>,
    pub pieces: Vec<String>,
    pub closers: Vec<String>,
}

pub(super) fn events(script: &Script, wish: &Wish) -> Events {
    if let Some(words) = &wish.words {
        return Events { openers: vec![], pieces: words.events.clone(), closers: vec![] };
    }
    match wish.surface {
        Surface::Chat | Surface::Completions => openai_events(script, wish),
        Surface::Responses => responses::events(script, wish),
        Surface::Messages => anthropic_events(script, wish),
        // Nobody asks these for a stream.
        Surface::Embeddings | Surface::CountTokens => {
            Events { openers: vec![], pieces: vec![], closers: vec![] }
        }
    }
}

/// The unstreamed answer made of `text`; `finished` says whether it tells why it stopped.
pub(super) fn whole(script: &Script, wish: &Wish, text: &str, finished: bool) -> String {
    if let Some(words) = &wish.words {
        return words.whole.clone();
    }
    let (model, text) = (model(script, wish), quoted(text));
    match wish.surface {
        Surface::Chat | Surface::Completions => {
            let usage =
                script.usage.map_or(String::new(), |usage| format!(r#","usage":{}"#, openai_usage(usage)));
            let reason = if finished { r#""stop""# } else { "null" };
            let tier = openai_tier(script);
            let (id, object, said) = if wish.surface == Surface::Completions {
                ("cmpl-mock-1", "text_completion", format!(r#""text":{text},"logprobs":null"#))
            } else {
                let message = format!(r#""message":{{"role":"assistant","content":{text}}}"#);
                ("chatcmpl-mock-1", "chat.completion", message)
            };
            format!(
                r#"{{"id":"{id}","object":"{object}","created":1700000000,"model":{model},"choices":[{{"index":0,{said},"finish_reason":{reason}}}]{usage}{tier}}}"#
            )
        }
        Surface::Responses => responses::whole(script, wish, &text, finished),
        Surface::Embeddings => embeddings(script, wish),
        Surface::CountTokens => {
            format!(r#"{{"input_tokens":{}}}"#, script.usage.map_or(0, |usage| usage.prompt))
        }
        Surface::Messages => {
            let output = script.usage.map_or(0, |usage| usage.completion);
            let usage = anthropic_usage(script, output);
            let reason = if finished { r#""end_turn""# } else { "null" };
            format!(
                r#"{{"id":"msg_mock_1","type":"message","role":"assistant","model":{model},"content":[{{"type":"text","text":{text}}}],"stop_reason":{reason},"stop_sequence":null{usage}}}"#
            )
        }
    }
}

/// One for each text. The name of the model stands behind the numbers, as at the real API.
fn embeddings(script: &Script, wish: &Wish) -> String {
    let number = |at: usize| format!("{}0.0{}", if at.is_multiple_of(2) { "" } else { "-" }, at + 1);
    let one = |index: usize| {
        let embedding = if wish.base64 {
            quoted(&"zczMPQ".repeat(script.dimensions))
        } else {
            format!("[{}]", (0..script.dimensions).map(number).collect::<Vec<_>>().join(","))
        };
        format!(r#"{{"object":"embedding","index":{index},"embedding":{embedding}}}"#)
    };
    let data = (0..wish.inputs).map(one).collect::<Vec<_>>().join(",");
    let usage = script.usage.map_or(String::new(), |usage| {
        format!(r#","usage":{{"prompt_tokens":{0},"total_tokens":{0}}}"#, usage.prompt)
    });
    format!(r#"{{"object":"list","data":[{data}],"model":{}{usage}}}"#, model(script, wish))
}

pub(super) fn models(script: &Script) -> String {
    let model = quoted(script.model.as_deref().unwrap_or(MODEL_UNNAMED));
    match script.dialect {
        Dialect::Openai => format!(
            r#"{{"object":"list","data":[{{"id":{model},"object":"model","created":1700000000,"owned_by":"mock"}}]}}"#
        ),
        Dialect::Anthropic => format!(
            r#"{{"data":[{{"type":"model","id":{model},"display_name":{model},"created_at":"2023-11-14T22:13:20Z"}}],"has_more":false,"first_id":{model},"last_id":{model}}}"#
        ),
    }
}

pub(super) fn error(dialect: Dialect, status: u16, message: &str) -> String {
    let message = quoted(message);
    match dialect {
        Dialect::Openai => {
            let kind = match status {
                429 => "rate_limit_error",
                500.. => "server_error",
                _ => "invalid_request_error",
            };
            format!(r#"{{"error":{{"message":{message},"type":"{kind}","param":null,"code":null}}}}"#)
        }
        Dialect::Anthropic => {
            let kind = match status {
                401 => "authentication_error",
                403 => "permission_error",
                404 => "not_found_error",
                413 => "request_too_large",
                429 => "rate_limit_error",
                529 => "overloaded_error",
                500.. => "api_error",
                _ => "invalid_request_error",
            };
            format!(r#"{{"type":"error","error":{{"type":"{kind}","message":{message}}}}}"#)
        }
    }
}

/// An error inside a stream. A body of several lines stays one event.
pub(super) fn error_event(surface: Surface, body: &str) -> String {
    let lines = body.replace('\n', "\ndata: ");
    match surface {
        Surface::Chat | Surface::Completions | Surface::Embeddings => format!("data: {lines}\n\n"),
        Surface::Responses => format!("event: {}\ndata: {lines}\n\n", responses::type_of(body)),
        Surface::Messages | Surface::CountTokens => format!("event: error\ndata: {lines}\n\n"),
    }
}

const MODEL_UNNAMED: &str = "mock-model";

pub(super) fn model(script: &Script, wish: &Wish) -> String {
    quoted(script.model.as_deref().or(wish.model.as_deref()).unwrap_or(MODEL_UNNAMED))
}

pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn openai_events(script: &Script, wish: &Wish) -> Events {
    let model = model(script, wish);
    let told = script.usage.filter(|_| wish.include_usage);
    let tier = openai_tier(script);
    let legacy = wish.surface == Surface::Completions;
    let (id, object) = if legacy {
        ("cmpl-mock-1", "text_completion")
    } else {
        ("chatcmpl-mock-1", "chat.completion.chunk")
    };
    let chunk = |choices: &str, usage: &str| {
        format!(
            "data: {{\"id\":\"{id}\",\"object\":\"{object}\",\"created\":1700000000,\"model\":{model},\"choices\":[{choices}]{usage}{tier}}}\n\n"
        )
    };
    // Once asked for usage, the real API says `null` in every chunk but the one that tells it.
    let null = if told.is_some() { r#","usage":null"# } else { "" };
    let choice =
        |said: &str, reason: &str| chunk(&format!(r#"{{"index":0,{said},"finish_reason":{reason}}}"#), null);
    let opener = script.openers && !legacy;
    let opener = opener.then(|| choice(r#""delta":{"role":"assistant","content":""}"#, "null"));
    let says = |text: &str| {
        let text = quoted(text);
        if legacy { format!(r#""text":{text}"#) } else { format!(r#""delta":{{"content":{text}}}"#) }
    };
    let piece = |text: &String| choice(&says(text), "null");
    let last = if legacy { says("") } else { r#""delta":{}"#.to_owned() };
    let finish = script.finish.then(|| choice(&last, r#""stop""#));
    let usage = told.map(|usage| chunk("", &format!(r#","usage":{}"#, openai_usage(usage))));
    let done = script.done.then(|| "data: [DONE]\n\n".to_owned());
    Events {
        openers: opener.into_iter().collect(),
        pieces: script.text.iter().map(piece).collect(),
        closers: [finish, usage, done].into_iter().flatten().collect(),
    }
}

fn anthropic_events(script: &Script, wish: &Wish) -> Events {
    let model = model(script, wish);
    let event =
        |name: &str, fields: &str| format!("event: {name}\ndata: {{\"type\":\"{name}\"{fields}}}\n\n");
    let start = script.openers.then(|| {
        let usage = anthropic_usage(script, 1);
        event("message_start", &format!(
            r#","message":{{"id":"msg_mock_1","type":"message","role":"assistant","model":{model},"content":[],"stop_reason":null,"stop_sequence":null{usage}}}"#
        ))
    });
    let block = event("content_block_start", r#","index":0,"content_block":{"type":"text","text":""}"#);
    let ping = script.openers.then(|| event("ping", ""));
    let piece = |text: &String| {
        let text = quoted(text);
        event("content_block_delta", &format!(r#","index":0,"delta":{{"type":"text_delta","text":{text}}}"#))
    };
    let finish = script.finish.then(|| {
        let usage = script
            .usage
            .map_or(String::new(), |usage| format!(r#","usage":{{"output_tokens":{}}}"#, usage.completion));
        event(
            "message_delta",
            &format!(r#","delta":{{"stop_reason":"end_turn","stop_sequence":null}}{usage}"#),
        )
    });
    let done = script.done.then(|| event("message_stop", ""));
    Events {
        openers: [start, Some(block), ping].into_iter().flatten().collect(),
        pieces: script.text.iter().map(piece).collect(),
        closers: [Some(event("content_block_stop", r#","index":0"#)), finish, done]
            .into_iter()
            .flatten()
            .collect(),
    }
}

pub(super) fn openai_tier(script: &Script) -> String {
    script
        .service_tier
        .as_ref()
        .map_or_else(String::new, |tier| format!(r#","service_tier":{}"#, quoted(tier)))
}

fn openai_usage(usage: UsageScript) -> String {
    let UsageScript { prompt, completion, cached, written: _, written_1h: _ } = usage;
    let total = prompt.saturating_add(completion);
    format!(
        r#"{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{total},"prompt_tokens_details":{{"cached_tokens":{cached}}}}}"#
    )
}

/// `output` is what has been written when this is told: one token when a message starts.
fn anthropic_usage(script: &Script, output: u64) -> String {
    let tier = quoted(script.service_tier.as_deref().unwrap_or("standard"));
    script.usage.map_or(String::new(), |UsageScript { prompt, completion: _, cached, written, written_1h }| {
        let input = prompt.saturating_sub(cached).saturating_sub(written);
        let written_5m = written.saturating_sub(written_1h);
        format!(
            r#","usage":{{"input_tokens":{input},"cache_creation_input_tokens":{written},"cache_read_input_tokens":{cached},"cache_creation":{{"ephemeral_5m_input_tokens":{written_5m},"ephemeral_1h_input_tokens":{written_1h}}},"output_tokens":{output},"service_tier":{tier}}}"#
        )
    })
}
