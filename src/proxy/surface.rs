//! The door: which of our paths is this?

use filters::dialect::Dialect;
use filters::verdict::{Reason, Rejection};
use http::Method;

/// What a path serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Surface {
    /// `POST /v1/chat/completions`.
    ChatCompletions,
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/{id}`.
    Model(String),
    /// `GET /v1/credits`.
    Credits,
    /// `GET /v1/generation?id=`.
    Generation,
}

impl Surface {
    /// Finds the surface.
    ///
    /// # Errors
    /// 404 for a path that is none of ours, 405 for a method that it does not know.
    pub(super) fn find(method: &Method, path: &str) -> Result<Self, Rejection> {
        let (surface, allowed) = match path {
            "/v1/chat/completions" => (Self::ChatCompletions, Method::POST),
            "/v1/models" => (Self::Models, Method::GET),
            "/v1/credits" => (Self::Credits, Method::GET),
            "/v1/generation" => (Self::Generation, Method::GET),
            _ => match path.strip_prefix("/v1/models/").filter(|id| !id.is_empty()) {
                Some(id) => (Self::Model(id.to_owned()), Method::GET),
                None => {
                    let message =
                        "There is nothing at this path. See the README for the paths that are served.";
                    return Err(Rejection::new(Reason::UnknownPath, message));
                }
            },
        };
        if *method == allowed {
            return Ok(surface);
        }
        let message = format!("This path takes {allowed} requests only.");
        Err(Rejection::new(Reason::MethodNotAllowed, message))
    }

    /// The label in metrics and logs.
    pub(super) const fn word(&self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat",
            Self::Models | Self::Model(_) => "models",
            Self::Credits | Self::Generation => "account",
        }
    }

    /// The dialect that the caller speaks here.
    pub(super) const fn dialect(&self) -> Dialect {
        match self {
            Self::ChatCompletions | Self::Models | Self::Model(_) | Self::Credits | Self::Generation => {
                Dialect::OpenAi
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_methods_are_told_apart() {
        let find = |method: Method, path| Surface::find(&method, path).map_err(|r| r.status());
        assert_eq!(find(Method::POST, "/v1/chat/completions"), Ok(Surface::ChatCompletions));
        assert_eq!(find(Method::GET, "/v1/chat/completions"), Err(405));
        assert_eq!(find(Method::GET, "/v1/models/a/b"), Ok(Surface::Model("a/b".into())));
        for path in ["/", "/v1/chat/completions/", "/v1//models", "/v1/models/", "/metrics", "*"] {
            assert_eq!(find(Method::GET, path), Err(404), "{path}");
        }
    }
}
