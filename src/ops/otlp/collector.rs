//! The collector: where it is, and what it says to a message.
//!
//! Its address and its headers are secrets, so an error here says what went wrong and never where. No redirect is followed:
//! the headers would go along.

use std::sync::Arc;
use std::time::Duration;

use filters::upstream::rest::{self, UnixSeconds};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::clock;
use crate::config::telemetry;
use crate::ops::outside::{NotTaken, not_taken};
use crate::secret::Secret;

/// How much of an answer is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// A client of the collector. It keeps a connection.
pub(super) struct Collector {
    agent: Agent,
    url: Secret,
    headers: HeaderMap,
}

/// A message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub(super) struct Refused {
    why: NotTaken,
    /// It may be taken after this time; at most ten minutes.
    pub(super) after: Option<Duration>,
}

impl Collector {
    pub(super) fn new(config: &telemetry::Collector) -> Self {
        let telemetry::Collector { url, headers, authorities, traces: _, metrics_every: _ } = config;
        let roots = authorities.as_ref().map_or(RootCerts::WebPki, |trusted| {
            let owned = trusted.iter().map(|one| Certificate::from_der(one).to_owned()).collect();
            RootCerts::Specific(Arc::new(owned))
        });
        let agent = Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .user_agent(concat!("tollgate/", env!("CARGO_PKG_VERSION")))
            .build();
        let mut all =
            HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"))]);
        for (name, value) in headers {
            // The config was refused where a value makes no header.
            if let Ok(mut value) = HeaderValue::from_str(value.expose()) {
                value.set_sensitive(true);
                all.append(name, value);
            }
        }
        Self { agent: agent.into(), url: url.clone(), headers: all }
    }

    /// Sends a message of a signal (`traces` or `metrics`), and answers what was said to it.
    ///
    /// # Errors
    /// [`Refused`], also when `patience` is over.
    pub(super) fn post(&self, signal: &str, body: &[u8], patience: Duration) -> Result<Vec<u8>, Refused> {
        let request = self.agent.post(format!("{}/v1/{signal}", self.url.expose()));
        let mut request = request.config().timeout_global(Some(patience)).build();
        if let Some(headers) = request.headers_mut() {
            headers.extend(self.headers.clone());
        }
        let mut answer =
            request.send(body).map_err(|error| Refused { why: not_taken(&error), after: None })?;
        let (status, after) = (answer.status(), asked_for(answer.headers()));
        let said = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        if status.is_success() {
            return Ok(said.unwrap_or_default());
        }
        let after = after.filter(|_| matches!(status.as_u16(), 429 | 503));
        Err(Refused { why: NotTaken::Status(status.as_u16()), after })
    }
}

/// The time that an answer asks for.
fn asked_for(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    rest::wait(text, UnixSeconds(clock::unix_ms().unsigned_abs() / 1000))
}
