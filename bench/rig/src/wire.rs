//! What the mock says: OpenAI chat completions and Anthropic messages.

use std::fmt::Write as _;

const FILL: &str = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do ";

#[derive(Clone, Copy, PartialEq)]
pub enum Api {
    OpenAi,
    Anthropic,
}

impl Api {
    pub fn error(self, code: u16) -> String {
        match self {
            Api::OpenAi => {
                let what = r#"{"message":"mock fault","type":"server_error","param":null,"code":"#;
                format!(r#"{{"error":{what}"mock_{code}"}}}}"#)
            }
            Api::Anthropic => {
                r#"{"type":"error","error":{"type":"overloaded_error","message":"mock fault"}}"#.into()
            }
        }
    }

    /// An error as the only event of a stream.
    pub fn error_event(self) -> String {
        let name = if self == Api::Anthropic { "event: error\n" } else { "" };
        format!("{name}data: {}\n\n", self.error(500))
    }
}

/// One answer; its text is `size` bytes, in each chunk if it is streamed.
pub struct Reply {
    pub api: Api,
    pub model: String,
    pub size: usize,
    pub prompt_tokens: usize,
    pub tokens: usize,
    /// Whether a stream ends with the usage (OpenAI).
    pub usage: bool,
}

impl Reply {
    /// Appends the text, which starts with the time of sending.
    fn text(&self, out: &mut String) {
        let start = out.len();
        let _ = write!(out, "{}{};", crate::STAMP, crate::mono_ns());
        let mut left = self.size.saturating_sub(out.len() - start);
        while left > 0 {
            let n = left.min(FILL.len());
            out.push_str(&FILL[..n]);
            left -= n;
        }
    }

    fn openai_usage(&self) -> String {
        let (p, n) = (self.prompt_tokens, self.tokens);
        format!(r#""usage":{{"prompt_tokens":{p},"completion_tokens":{n},"total_tokens":{}}}"#, p + n)
    }

    /// `{"id":…,"choices":[` of an OpenAI object.
    fn openai_head(&self, object: &str) -> String {
        let mut s = String::with_capacity(self.size + 512);
        let model = &self.model;
        let _ = write!(
            s,
            r#"{{"id":"chatcmpl-mock","object":"{object}","created":1700000000,"model":"{model}","#
        );
        s.push_str(r#""choices":["#);
        s
    }

    /// A whole answer, not streamed.
    pub fn whole(&self) -> String {
        match self.api {
            Api::OpenAi => {
                let mut s = self.openai_head("chat.completion");
                s.push_str(r#"{"index":0,"message":{"role":"assistant","content":""#);
                self.text(&mut s);
                s.push_str(r#""},"logprobs":null,"finish_reason":"stop"}],"#);
                s.push_str(&self.openai_usage());
                s.push('}');
                s
            }
            Api::Anthropic => {
                let mut s = String::with_capacity(self.size + 512);
                s.push_str(r#"{"id":"msg_mock","type":"message","role":"assistant","model":""#);
                s.push_str(&self.model);
                s.push_str(r#"","content":[{"type":"text","text":""#);
                self.text(&mut s);
                s.push_str(r#""}],"stop_reason":"end_turn","stop_sequence":null,"#);
                let (p, n) = (self.prompt_tokens, self.tokens);
                let _ = write!(s, r#""usage":{{"input_tokens":{p},"output_tokens":{n}}}}}"#);
                s
            }
        }
    }

    /// One chunk of a stream, with what goes before it if it is the first.
    pub fn chunk(&self, first: bool) -> String {
        match self.api {
            Api::OpenAi => {
                let mut s = String::from("data: ");
                s.push_str(&self.openai_head("chat.completion.chunk"));
                s.push_str(r#"{"index":0,"delta":{"#);
                s.push_str(if first { r#""role":"assistant","content":""# } else { r#""content":""# });
                self.text(&mut s);
                s.push_str("\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
                s
            }
            Api::Anthropic => {
                let mut s =
                    if first { self.anthropic_start() } else { String::with_capacity(self.size + 256) };
                s.push_str("event: content_block_delta\n");
                s.push_str(
                    r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""#,
                );
                self.text(&mut s);
                s.push_str("\"}}\n\n");
                s
            }
        }
    }

    fn anthropic_start(&self) -> String {
        let (model, p) = (&self.model, self.prompt_tokens);
        let message = format!(
            r#"{{"id":"msg_mock","type":"message","role":"assistant","model":"{model}","content":[],"stop_reason":null,"stop_sequence":null,"usage":{{"input_tokens":{p},"output_tokens":1}}}}"#
        );
        let block = r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#;
        format!(
            "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{message}}}\n\n\
             event: content_block_start\ndata: {block}\n\n\
             event: ping\ndata: {{\"type\":\"ping\"}}\n\n"
        )
    }

    /// The end of a stream.
    pub fn closing(&self) -> String {
        match self.api {
            Api::OpenAi => {
                let head = self.openai_head("chat.completion.chunk");
                let last = r#"{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}"#;
                let mut s = format!("data: {head}{last}\n\n");
                if self.usage {
                    let _ = write!(s, "data: {head}],{}}}\n\n", self.openai_usage());
                }
                s.push_str("data: [DONE]\n\n");
                s
            }
            Api::Anthropic => {
                let usage = format!(r#""usage":{{"output_tokens":{}}}"#, self.tokens);
                let delta = r#"{"stop_reason":"end_turn","stop_sequence":null}"#;
                format!(
                    "event: content_block_stop\ndata: {{\"type\":\"content_block_stop\",\"index\":0}}\n\n\
                     event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{delta},{usage}}}\n\n\
                     event: message_stop\ndata: {{\"type\":\"message_stop\"}}\n\n"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn reply(api: Api) -> Reply {
        Reply { api, model: "m".into(), size: 40, prompt_tokens: 7, tokens: 2, usage: true }
    }

    /// The JSON of every event of a stream, and whether it was closed.
    fn events(api: Api) -> (Vec<Value>, bool) {
        let r = reply(api);
        let text = r.chunk(true) + &r.chunk(false) + &r.closing();
        let data = text.lines().filter_map(|l| l.strip_prefix("data: ")).filter(|d| *d != "[DONE]");
        let closed = text.ends_with("[DONE]\n\n") || text.ends_with("{\"type\":\"message_stop\"}\n\n");
        (data.map(|d| serde_json::from_str(d).expect(d)).collect(), closed)
    }

    #[test]
    fn openai() {
        let whole: Value = serde_json::from_str(&reply(Api::OpenAi).whole()).unwrap();
        assert_eq!(whole["usage"]["total_tokens"], 9);
        assert_eq!(whole["choices"][0]["message"]["content"].as_str().unwrap().len(), 40);
        let (events, closed) = events(Api::OpenAi);
        assert!(closed);
        assert_eq!(events.len(), 4);
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(events[3]["usage"]["prompt_tokens"], 7);
        serde_json::from_str::<Value>(&Api::OpenAi.error(503)).unwrap();
    }

    #[test]
    fn anthropic() {
        let whole: Value = serde_json::from_str(&reply(Api::Anthropic).whole()).unwrap();
        assert_eq!(whole["usage"]["output_tokens"], 2);
        let (events, closed) = events(Api::Anthropic);
        assert!(closed);
        let kinds: Vec<_> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
        let deltas = ["content_block_delta", "content_block_delta"];
        assert_eq!(kinds[..3], ["message_start", "content_block_start", "ping"]);
        assert_eq!(kinds[3..5], deltas);
        assert_eq!(kinds[5..], ["content_block_stop", "message_delta", "message_stop"]);
        assert_eq!(events[0]["message"]["usage"]["input_tokens"], 7);
        assert_eq!(events[6]["usage"]["output_tokens"], 2);
        serde_json::from_str::<Value>(&Api::Anthropic.error(503)).unwrap();
    }
}
