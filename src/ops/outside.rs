//! POSTs to whoever is to be told: pings and notifications.
//!
//! Off every path of a call, on threads that may wait. Where they go is a secret (a URL of Healthchecks or Slack is all
//! that it takes to write there), so an error here says what went wrong and never where. No redirect is followed.

use std::time::Duration;

use ureq::Agent;

use crate::secret::Secret;

/// How long one may take, from the look-up of its name to its status.
const AT_MOST: Duration = Duration::from_secs(10);
/// How much of an answer is read, in bytes, so that its connection can be used again.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// A client. Clones share its connections.
#[derive(Clone)]
pub struct Outside(Agent);

/// Why something did not get there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    #[error("it answered {0}")]
    Status(u16),
    #[error("it did not answer in time")]
    Timeout,
    #[error("it cannot be reached")]
    Unreachable,
    #[error("its URL cannot be used")]
    Url,
}

impl NotTaken {
    /// Whether it may be taken later. A status of the receiver's that says that the request itself is wrong stays.
    #[must_use]
    pub const fn may_pass(self) -> bool {
        match self {
            Self::Status(status) => matches!(status, 408 | 425 | 429 | 500..),
            Self::Timeout | Self::Unreachable => true,
            Self::Url => false,
        }
    }
}

impl Default for Outside {
    fn default() -> Self {
        let config = Agent::config_builder()
            .timeout_global(Some(AT_MOST))
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("tollgate/", env!("CARGO_PKG_VERSION")))
            .build();
        Self(config.into())
    }
}

impl Outside {
    /// Sends a body, and waits for a 2xx.
    ///
    /// # Errors
    /// [`NotTaken`].
    pub async fn post(
        &self,
        url: &Secret,
        suffix: &str,
        headers: Vec<(&'static str, String)>,
        body: Vec<u8>,
    ) -> Result<(), NotTaken> {
        let (agent, url) = (self.0.clone(), format!("{}{suffix}", url.expose()));
        let sent = tokio::task::spawn_blocking(move || {
            let mut request = agent.post(&url);
            for (name, value) in headers {
                request = request.header(name, value);
            }
            let mut answer = request.send(&body).map_err(|error| not_taken(&error))?;
            let status = answer.status().as_u16();
            // Whatever it says, it is read to be done with.
            let _said = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
            if (200..300).contains(&status) { Ok(()) } else { Err(NotTaken::Status(status)) }
        });
        sent.await.unwrap_or(Err(NotTaken::Unreachable))
    }
}

/// Its own words would show the URL.
pub(super) fn not_taken(error: &ureq::Error) -> NotTaken {
    match error {
        ureq::Error::Timeout(_) => NotTaken::Timeout,
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => NotTaken::Url,
        _ => NotTaken::Unreachable,
    }
}
