//! The door: which of our paths is this, and what language does its caller speak?

use filters::dialect::{Dialect, Operation};
use filters::verdict::{Reason, Rejection};
use http::Method;
use percent_encoding::percent_decode_str;

use crate::status::Form;

/// Before every operation's path.
const PREFIX: &str = "/v1";

/// What a path serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Surface {
    /// `POST /v1/chat/completions` and its like: what goes to an upstream.
    Call(Operation),
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/{id}`.
    Model(String),
    /// `GET /v1/credits`.
    Credits,
    /// `GET /v1/generation?id=`.
    Generation,
    /// `GET /status`, `/status.json` and `/status.rss`: for everybody.
    Status(Form),
}

impl Surface {
    /// Finds the surface.
    ///
    /// # Errors
    /// 404 for a path that is none of ours, 405 for a method that it does not know.
    pub(super) fn find(method: &Method, path: &str) -> Result<Self, Rejection> {
        let Some(surface) = Self::at(path) else {
            let message = "There is nothing at this path. See the README for the paths that are served.";
            return Err(Rejection::new(Reason::UnknownPath, message));
        };
        let allowed = surface.methods();
        if allowed.contains(method) {
            return Ok(surface);
        }
        let allowed = listed(allowed);
        let message = format!("This path takes {allowed} requests only.");
        Err(Rejection::new(Reason::MethodNotAllowed, message))
    }

    /// What is at a path.
    pub(super) fn at(path: &str) -> Option<Self> {
        let behind = path.strip_prefix(PREFIX).unwrap_or_default();
        if let Some(operation) = Operation::ALL.into_iter().find(|operation| operation.path() == behind) {
            return Some(Self::Call(operation));
        }
        match path {
            "/v1/models" => Some(Self::Models),
            "/v1/credits" => Some(Self::Credits),
            "/v1/generation" => Some(Self::Generation),
            "/status" => Some(Self::Status(Form::Page)),
            "/status.json" => Some(Self::Status(Form::Json)),
            "/status.rss" => Some(Self::Status(Form::Feed)),
            _ => {
                let id = path.strip_prefix("/v1/models/").filter(|id| !id.is_empty());
                id.map(|id| Self::Model(decoded(id)))
            }
        }
    }

    /// The methods that it takes.
    pub(super) const fn methods(&self) -> &'static [Method] {
        match self {
            Self::Call(_) => &[Method::POST],
            Self::Models | Self::Model(_) | Self::Credits | Self::Generation => &[Method::GET],
            Self::Status(_) => &[Method::GET, Method::HEAD],
        }
    }

    /// The label in metrics and logs.
    pub(super) const fn word(&self) -> &'static str {
        match self {
            Self::Call(operation) => operation.word(),
            Self::Models | Self::Model(_) => "models",
            Self::Credits | Self::Generation => "account",
            Self::Status(_) => "status",
        }
    }

    /// The dialect that the caller speaks here. A path that both dialects have is told apart by
    /// `versioned`: the caller sends `anthropic-version`, as every client of that API must.
    pub(super) const fn dialect(&self, versioned: bool) -> Dialect {
        match self {
            Self::Call(operation) => operation.dialect(),
            Self::Models | Self::Model(_) if versioned => Dialect::Anthropic,
            Self::Models | Self::Model(_) | Self::Credits | Self::Generation | Self::Status(_) => {
                Dialect::OpenAi
            }
        }
    }
}

/// Methods as the head `Allow` lists them.
pub(super) fn listed(methods: &[Method]) -> String {
    methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ")
}

/// Without percent escapes: SDKs escape what an id may have and a path may not, such as the slash.
pub(super) fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// The dialect in which an error about `path` is told, before it is known what is served there.
pub(super) fn dialect_of_errors(path: &str, versioned: bool) -> Dialect {
    let is = |surface: &str| {
        path.strip_prefix(surface).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let openai = ["/v1/chat", "/v1/completions", "/v1/responses", "/v1/embeddings"];
    let versioned = versioned && !openai.into_iter().any(is);
    if is("/v1/messages") || versioned { Dialect::Anthropic } else { Dialect::OpenAi }
}

/// How a caller asks for an operation.
pub(super) fn path_of(operation: Operation) -> String {
    format!("POST {PREFIX}{}", operation.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_methods_are_told_apart() {
        let find = |method: Method, path| Surface::find(&method, path).map_err(|r| r.status());
        assert_eq!(find(Method::POST, "/v1/chat/completions"), Ok(Surface::Call(Operation::Chat)));
        assert_eq!(find(Method::GET, "/v1/chat/completions"), Err(405));
        assert_eq!(find(Method::POST, "/v1/messages"), Ok(Surface::Call(Operation::Messages)));
        assert_eq!(find(Method::GET, "/v1/models/a/b"), Ok(Surface::Model("a/b".into())));
        assert_eq!(find(Method::GET, "/v1/models/a%2Fb%3Ac%"), Ok(Surface::Model("a/b:c%".into())));
        assert_eq!(find(Method::POST, "/v1/embeddings"), Ok(Surface::Call(Operation::Embeddings)));
        assert_eq!(find(Method::HEAD, "/status"), Ok(Surface::Status(Form::Page)));
        assert_eq!(find(Method::GET, "/status.rss"), Ok(Surface::Status(Form::Feed)));
        assert_eq!(find(Method::POST, "/status.json"), Err(405));
        let count = "/v1/messages/count_tokens";
        assert_eq!(find(Method::POST, count), Ok(Surface::Call(Operation::CountTokens)));
        for path in [
            "/responses",
            "/v1/responses/resp_1",
            "/v1",
            "/",
            "/v1/chat/completions/",
            "/v1//models",
            "/v1/models/",
            "/metrics",
            "/status/",
            "*",
        ] {
            assert_eq!(find(Method::GET, path), Err(404), "{path}");
        }
    }

    #[test]
    fn a_version_decides_only_where_both_dialects_are_served() {
        let speaks = |surface: Surface| [true, false].map(|versioned| surface.dialect(versioned));
        assert_eq!(speaks(Surface::Call(Operation::Chat)), [Dialect::OpenAi; 2]);
        assert_eq!(speaks(Surface::Call(Operation::CountTokens)), [Dialect::Anthropic; 2]);
        assert_eq!(speaks(Surface::Models), [Dialect::Anthropic, Dialect::OpenAi]);
    }

    #[test]
    fn a_caller_is_answered_in_its_own_dialect_even_where_nothing_is_served() {
        for (path, versioned, expected) in [
            ("/v1/messages", false, Dialect::Anthropic),
            ("/v1/messages/batches", false, Dialect::Anthropic),
            ("/v1/messages2", false, Dialect::OpenAi),
            ("/v1/models", true, Dialect::Anthropic),
            ("/v1/models", false, Dialect::OpenAi),
            ("/v1/chat/completions", true, Dialect::OpenAi),
            ("/v1/responses/resp_1", true, Dialect::OpenAi),
            ("/nothing", true, Dialect::Anthropic),
        ] {
            assert_eq!(dialect_of_errors(path, versioned), expected, "{path}");
        }
    }
}
