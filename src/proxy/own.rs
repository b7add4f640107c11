//! What we tell a caller about their account: credits and past calls.

use std::sync::Arc;
use std::time::Duration;

use filters::verdict::{Reason, Rejection};
use serde_json::{Value, json};

use super::gateway::Gateway;
use super::surface::decoded;
use crate::books::{Books, BooksError};
use crate::pool::keys::Principal;

/// The ledger is this far behind a call's end at most, in normal times.
const BOOKED_LATER: Duration = Duration::from_millis(50);
/// How often to look for a call that is not booked yet.
const LOOKS: u32 = 10;
/// When a caller may ask again for what the ledger could not answer.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// Nano-dollars per dollar, for numbers that are shown and never computed with.
const NANO_PER_USD: f64 = 1e9;

impl Gateway {
    /// `GET /v1/credits`: what was paid in, what was used, and what can be spent now.
    pub(super) async fn credits(&self, principal: &Principal) -> Result<Value, Rejection> {
        let account = principal.account;
        let credits = self.in_books(move |books| books.credits(account)).await?;
        Ok(json!({
            "data": {
                "total_credits": usd(credits.balance_nano.saturating_add(credits.used_nano)),
                "total_usage": usd(credits.used_nano),
                "balance_nano": credits.balance_nano,
                "available_nano": credits.available_nano.unwrap_or_else(|| self.holds.available(account).nano()),
            }
        }))
    }

    /// `GET /v1/generation?id=`: a past call of the account, by its request id or its own id. A call that
    /// has just ended is waited for.
    pub(super) async fn generation(&self, principal: &Principal, query: &str) -> Result<Value, Rejection> {
        let id = decoded(query.split('&').find_map(|pair| pair.strip_prefix("id=")).unwrap_or_default());
        if id.is_empty() {
            let message = "`id` is missing: `GET /v1/generation?id=` takes the `x-request-id` of a call.";
            return Err(Rejection::new(Reason::MissingField, message).param("id"));
        }
        let account = principal.account;
        for _ in 0..LOOKS {
            let id = id.clone();
            if let Some(found) = self.in_books(move |books| books.generation(account, &id)).await? {
                return Ok(json!({ "data": found }));
            }
            tokio::time::sleep(BOOKED_LATER).await;
        }
        Err(Rejection::new(Reason::GenerationNotFound, "There is no such call of this account.").param("id"))
    }

    /// Asks the books on a thread that may block.
    pub(super) async fn in_books<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Books) -> Result<T, BooksError> + Send + 'static,
    ) -> Result<T, Rejection> {
        let books = Arc::clone(&self.books);
        let unavailable = |context: String| {
            let message = "The ledger cannot be asked right now.";
            Rejection::new(Reason::StoreUnavailable, message).retry_after(ASK_AGAIN).context(context)
        };
        match tokio::task::spawn_blocking(move || ask(&books)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(unavailable(error.to_string())),
            Err(error) => Err(unavailable(error.to_string())),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people; exact numbers stand beside it")]
fn usd(nano: i64) -> f64 {
    nano as f64 / NANO_PER_USD
}
