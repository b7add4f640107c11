//! How connections to a provider are made: which HTTP, and whom to trust.

use super::checked::BaseUrl;
use super::{Faults, join, raw};

/// What a connection to a provider needs beside its address.
#[derive(Debug)]
pub struct Reach {
    pub http: Http,
}

/// HTTP's version on the way to a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http {
    /// Over TLS what is negotiated, 2 before 1.1; without TLS 1.1.
    Auto,
    /// 1.1 only.
    One,
    /// 2 only: negotiated over TLS, or without TLS by prior knowledge (RFC 9113 section 3.3).
    Two,
}

/// Reads it from a provider's settings.
pub(super) fn check(path: &str, base: &BaseUrl, raw: &raw::Provider, faults: &mut Faults) -> Reach {
    Reach { http: http(path, base, raw, faults) }
}

fn http(path: &str, base: &BaseUrl, raw: &raw::Provider, faults: &mut Faults) -> Http {
    match (raw.http, base.tls) {
        (None | Some(raw::HttpName::Auto), _) => Http::Auto,
        (Some(raw::HttpName::Http1 | raw::HttpName::H1), _) => Http::One,
        (Some(raw::HttpName::H2), true) | (Some(raw::HttpName::H2c), false) => Http::Two,
        (Some(raw::HttpName::H2), false) => {
            let message = "`h2` is negotiated over TLS: begin `base_url` with https://, or say `h2c`";
            faults.push(join(path, "http"), message);
            Http::Auto
        }
        (Some(raw::HttpName::H2c), true) => {
            let message = "`h2c` is HTTP/2 without TLS: begin `base_url` with http://, or say `h2`";
            faults.push(join(path, "http"), message);
            Http::Auto
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Faults, parse};
    use super::Http;

    /// A config with one provider, whose settings these are.
    fn with(provider: &str) -> Result<Config, Faults> {
        let text = format!(
            "listen: {{ http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }}\n\
             store: {{ embedded: {{ path: ./data }} }}\n\
             providers: {{ p: {{ dialect: openai, {provider} }} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n"
        );
        parse(&text, |_| None)
    }

    fn paths(provider: &str) -> Vec<String> {
        with(provider).expect_err("faults").0.into_iter().map(|fault| fault.path).collect()
    }

    #[test]
    fn the_version_of_http_is_what_tls_makes_possible() {
        for (scheme, said, meant) in [
            ("https", "", Http::Auto),
            ("http", "", Http::Auto),
            ("https", "http: auto", Http::Auto),
            ("https", "http: h1", Http::One),
            ("http", "http: \"1.1\"", Http::One),
            ("http", "http: h1", Http::One),
            ("https", "http: h2", Http::Two),
            ("http", "http: h2c", Http::Two),
        ] {
            let config = with(&format!("base_url: \"{scheme}://host/v1\", {said}"));
            let config = config.unwrap_or_else(|e| panic!("{scheme} {said}: {e}"));
            assert_eq!(config.catalogue.endpoints[0].provider.reach.http, meant, "{scheme} {said}");
        }
        for bad in ["base_url: \"http://h\", http: h2", "base_url: \"https://h\", http: h2c"] {
            assert_eq!(paths(bad), ["providers.p.http"], "{bad}");
        }
        assert_eq!(paths("base_url: \"http://h\", http: h3").len(), 1);
    }
}
