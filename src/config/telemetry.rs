//! The block `telemetry:`, as written and as meant. A field's comment is its comment in `conf/tollgate.yaml`.

use std::path::Path;
use std::time::Duration;

use deserr::Deserr;
use filters::money::amount::parse_decimal;
use filters::trace::{Sampling, Share};
use http::header::{CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING};
use http::{HeaderName, HeaderValue, Uri};
use rustls_pki_types::CertificateDer;

use super::raw::{Decimal, Named, Span};
use super::{Faults, join, reach};
use crate::secret::Secret;

/// How often metrics may be sent.
const EVERY: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
const EVERY_DEFAULT: Duration = Duration::from_secs(60);
/// A tenth: enough to see how calls go, at a price that does not show.
const SAMPLE_DEFAULT: &str = "0.1";
/// Headers that go along, at most.
const HEADERS_MAX: usize = 16;
/// These say what a message is, and where: ours to write.
const OUR_HEADERS: [HeaderName; 6] =
    [CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING];

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Raw {
    /// The base address of a collector that takes OTLP over HTTP, such as `http://127.0.0.1:4318` or
    /// `https://otlp.example.com`: spans go to `/v1/traces` there, metrics to `/v1/metrics`. What it does not take in time is
    /// dropped. The address is a secret. Default: nothing is sent.
    #[deserr(default)]
    pub otlp: Option<Secret>,
    /// Headers that go along with every message, such as `authorization`: their values are secrets. Default: none.
    #[deserr(default)]
    pub headers: Named<Secret>,
    /// The certificate authorities to trust there, instead of those of the web: a PEM file. Over TLS only.
    #[deserr(default)]
    pub ca_file: Option<String>,
    /// Send spans of calls, with one for each attempt; never a key, a prompt or an answer. Default true.
    #[deserr(default)]
    pub traces: Option<bool>,
    /// Of how many calls, as a share from 0 to 1 in quotes, with at most six decimals. Where a caller's `traceparent` says
    /// whether its trace is sampled, that counts instead. Default "0.1".
    #[deserr(default)]
    pub sample: Option<Decimal>,
    /// Of every other call too that failed: an attempt of it failed, its answer broke off, or its status is 500 or more.
    /// Not where its caller said no. Default true.
    #[deserr(default)]
    pub sample_failed: Option<bool>,
    /// Send every metric that `/metrics` has. Default true.
    #[deserr(default)]
    pub metrics: Option<bool>,
    /// How often metrics are sent, from 1s to 1h; once more when the process leaves. Default 60s.
    #[deserr(default)]
    pub metrics_every: Option<Span>,
}

/// Where spans and metrics go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// Without a slash at its end.
    pub url: Secret,
    pub headers: Vec<(HeaderName, Secret)>,
    /// `None`: those of the web.
    pub authorities: Option<Vec<CertificateDer<'static>>>,
    /// Whose spans are sent; `None`: nobody's.
    pub traces: Option<Sampling>,
    /// `None`: metrics are not sent.
    pub metrics_every: Option<Duration>,
}

/// What the block says; `None` where nothing is to be sent. Neither the address nor a header's value is shown.
pub(super) fn check(raw: Raw, faults: &mut Faults) -> Option<Collector> {
    let Raw { otlp, headers, ca_file, traces, sample, sample_failed, metrics, metrics_every } = raw;
    let every = metrics_every.map_or(EVERY_DEFAULT, |span| span.0);
    if !EVERY.contains(&every) {
        faults.push("telemetry.metrics_every", "must be from 1s to 1h");
    }
    let share = check_share(sample.as_ref(), faults);
    let headers = check_headers(headers, faults);
    let url = otlp?;
    let is_tls = check_url(&url, faults);
    let authorities = ca_file.and_then(|file| {
        if !is_tls {
            faults.push("telemetry.ca_file", "is for TLS: begin `otlp` with https://, or leave it out");
        }
        let found = reach::authorities(Path::new(&file));
        found.map_err(|message| faults.push("telemetry.ca_file", message)).ok()
    });
    Some(Collector {
        url: Secret::new(url.expose().trim_end_matches('/')),
        headers,
        authorities,
        traces: traces.unwrap_or(true).then_some(Sampling { share, failed: sample_failed.unwrap_or(true) }),
        metrics_every: metrics.unwrap_or(true).then_some(every),
    })
}

fn check_share(raw: Option<&Decimal>, faults: &mut Faults) -> Share {
    let text = raw.map_or(SAMPLE_DEFAULT, |decimal| decimal.0.as_str());
    let millionths = parse_decimal(text, 6).ok().and_then(|parts| u32::try_from(parts).ok());
    millionths.and_then(Share::of_millionths).unwrap_or_else(|| {
        faults.push(
            "telemetry.sample",
            "must be a share from 0 to 1 with at most six decimals, such as \"0.1\"",
        );
        Share::ALL
    })
}

/// Whether it is one with TLS.
fn check_url(url: &Secret, faults: &mut Faults) -> bool {
    let uri = url.expose().parse::<Uri>().unwrap_or_default();
    let has_host = uri.host().is_some_and(|host| !host.is_empty());
    if !matches!(uri.scheme_str(), Some("http" | "https")) || !has_host || uri.query().is_some() {
        faults.push(
            "telemetry.otlp",
            "must be a base address such as http://127.0.0.1:4318 or https://otlp.example.com",
        );
    }
    uri.scheme_str() == Some("https")
}

fn check_headers(headers: Named<Secret>, faults: &mut Faults) -> Vec<(HeaderName, Secret)> {
    if headers.0.len() > HEADERS_MAX {
        faults.push("telemetry.headers", format!("at most {HEADERS_MAX} can go along"));
    }
    let mut checked = vec![];
    for (name, value) in headers.0 {
        let path = join("telemetry.headers", &name);
        match HeaderName::try_from(&name) {
            Ok(name) if OUR_HEADERS.contains(&name) => faults.push(path, "is not yours to set"),
            Ok(_) if value.expose().is_empty() || HeaderValue::from_str(value.expose()).is_err() => {
                faults.push(path, "has a value that no header can have");
            }
            Ok(name) => checked.push((name, value)),
            Err(_) => faults.push(path, "is no name of a header"),
        }
    }
    checked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    fn parse(block: &str) -> Result<Option<Collector>, String> {
        let text = format!(
            "listen: {{ http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }}\n\
             store: {{ embedded: {{ path: ./data }} }}\n\
             providers: {{ p: {{ dialect: openai, base_url: \"http://host\" }} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n\
             telemetry: {block}\n"
        );
        let var = |name: &str| (name == "TOKEN").then(|| "hidden".to_owned());
        config::parse(&text, var).map(|config| config.collector).map_err(|faults| faults.to_string())
    }

    #[test]
    fn a_base_address_is_enough_and_headers_take_their_secrets_from_the_environment() {
        assert_eq!(parse("{}"), Ok(None));
        let plain = parse("{ otlp: \"http://127.0.0.1:4318/\" }").unwrap().unwrap();
        assert_eq!(plain.url.expose(), "http://127.0.0.1:4318");
        assert_eq!((plain.metrics_every, plain.authorities), (Some(EVERY_DEFAULT), None));
        let hosted = "{ otlp: \"https://otlp.example/otlp\", headers: { authorization: \"Bearer ${TOKEN}\" }, metrics: false }";
        let hosted = parse(hosted).unwrap().unwrap();
        let [(name, value)] = hosted.headers.as_slice() else { panic!("{hosted:?}") };
        assert_eq!(
            (name.as_str(), value.expose(), hosted.metrics_every),
            ("authorization", "Bearer hidden", None)
        );
        assert!(!format!("{hosted:?}").contains("hidden"));
    }

    #[test]
    fn a_tenth_of_all_calls_and_every_failed_one_are_traced_unless_it_says_otherwise() {
        let traces = |more: &str| parse(&format!("{{ otlp: \"http://a\"{more} }}")).unwrap().unwrap().traces;
        let of =
            |millionths, failed| Some(Sampling { share: Share::of_millionths(millionths).unwrap(), failed });
        assert_eq!(traces(""), of(100_000, true));
        assert_eq!(traces(", sample: \"0.000001\", sample_failed: false"), of(1, false));
        assert_eq!(traces(", sample: 0"), of(0, true));
        assert_eq!(traces(", sample: 1"), of(1_000_000, true));
        assert_eq!(traces(", sample: \"1.0\", traces: false"), None);
    }

    #[test]
    fn what_is_wrong_is_said_without_showing_a_secret() {
        for (block, said) in [
            ("{ otlp: \"hidden:4318\" }", "telemetry.otlp: must be"),
            ("{ otlp: \"http://a/?key=hidden\" }", "telemetry.otlp: must be"),
            ("{ otlp: \"http://a\", headers: { host: hidden } }", "telemetry.headers.host: is not yours"),
            ("{ otlp: \"http://a\", headers: { \"a b\": hidden } }", "is no name of a header"),
            ("{ otlp: \"http://a\", headers: { a: \"hidden\\n\" } }", "telemetry.headers.a: has a value"),
            ("{ otlp: \"http://a\", headers: { a: \"\" } }", "telemetry.headers.a: has a value"),
            ("{ otlp: \"http://a\", ca_file: none.pem }", "telemetry.ca_file: is for TLS"),
            ("{ otlp: \"https://a\", ca_file: none.pem }", "none.pem"),
            ("{ sample: 0.1 }", "telemetry.sample: put quotes around the number"),
            ("{ sample: \"1.1\" }", "telemetry.sample: must be a share from 0 to 1"),
            ("{ sample: \"-0.1\" }", "telemetry.sample: must be a share from 0 to 1"),
            ("{ sample: \"0.0000001\" }", "telemetry.sample: must be a share from 0 to 1"),
            ("{ sample: \"10%\" }", "telemetry.sample: must be a share from 0 to 1"),
            ("{ metrics_every: 10ms }", "telemetry.metrics_every: must be from 1s to 1h"),
        ] {
            let error = parse(block).unwrap_err();
            assert!(error.contains(said) && !error.contains("hidden"), "{block}: {error}");
        }
    }
}
