//! How long verbs may take when the process leaves: for what is no money.
//!
//! A server that hangs answers nobody for as long as a verb may take. Money waits for that; what is kept for people does not,
//! once somebody waits for the process to end. A verb that is cut short may be done or not, as one without an answer.

use std::time::Instant;

use tokio::sync::watch;

/// Until when; shared by whoever is to end together.
pub(super) struct Patience {
    end: watch::Sender<Option<Instant>>,
}

impl Patience {
    /// Without an end, yet.
    pub(super) fn new() -> Self {
        Self { end: watch::Sender::new(None) }
    }

    /// Verbs end by then, those under way too.
    pub(super) fn end_at(&self, at: Instant) {
        self.end.send_replace(Some(at));
    }

    /// Returns when it is over.
    pub(super) async fn over(&self) {
        let mut end = self.end.subscribe();
        let known = end.wait_for(Option::is_some).await.ok().and_then(|end| *end);
        match known {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_lasts_until_an_end_is_named_and_then_until_that() {
        let patience = Patience::new();
        let hour = Duration::from_secs(3600);
        assert!(tokio::time::timeout(hour, patience.over()).await.is_err(), "nobody leaves");
        let now = tokio::time::Instant::now();
        patience.end_at((now + Duration::from_secs(2)).into());
        patience.over().await;
        assert_eq!(now.elapsed(), Duration::from_secs(2));
    }
}
