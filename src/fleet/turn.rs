//! Whose turn it is: of all nodes one does what is to be done once for all of them, and tells what all of them see.
//!
//! A row in Postgres with an end that comes by itself. Whoever has the turn renews it well before; when that node is
//! killed another one takes it within `TERM`. A node counts its own turn from before it asked, and a little shorter, so
//! that no two have it at once whatever their clocks say.
//!
//! While Postgres does not answer nobody has the turn, so nothing is done twice. But something has to be told then: the
//! one that had it last still speaks for all ([`Turn::speaks`]). At worst two say the same.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;
use crate::ledger::{LedgerError, Postgres};

/// What there is one turn of.
const WHAT: &str = "watch";
/// How long a turn lasts where nobody renews it.
const TERM: Duration = Duration::from_secs(12);
/// How much shorter its owner takes it to be.
const MARGIN: Duration = Duration::from_secs(2);
/// How often it is asked for.
pub const ASK: Duration = Duration::from_secs(3);

/// This process's part in it.
pub struct Turn {
    /// `None`: there are no other nodes.
    ledger: Option<Postgres>,
    node: String,
    until: Mutex<Option<Instant>>,
    speaks: AtomicBool,
}

impl Turn {
    /// Of `node`, a name that no other process has; alone without a ledger.
    #[must_use]
    pub fn new(ledger: Option<Postgres>, node: String) -> Self {
        let speaks = AtomicBool::new(ledger.is_none());
        Self { ledger, node, until: Mutex::default(), speaks }
    }

    /// Whether it is this node's now.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        self.ledger.is_none() || until.is_some_and(|until| clock::now() < until)
    }

    /// Whether this node says what all nodes see.
    #[must_use]
    pub fn speaks(&self) -> bool {
        self.speaks.load(Ordering::Relaxed)
    }

    /// Asks for it, or renews it. Blocks.
    ///
    /// # Errors
    /// [`LedgerError`] when the ledger does not answer: the turn ends then when it ends.
    pub fn ask(&self) -> Result<(), LedgerError> {
        let Some(ledger) = &self.ledger else { return Ok(()) };
        let asked = clock::now();
        let seconds = TERM.as_secs_f64();
        let take =
            "INSERT INTO turn (what, node, until_at) VALUES ($1, $2, now() + make_interval(secs => $3))
                    ON CONFLICT (what) DO UPDATE SET node = excluded.node, until_at = excluded.until_at
                    WHERE turn.node = excluded.node OR turn.until_at < now() RETURNING 1";
        let is_ours = ledger
            .within(async |t| Ok(t.query_opt(take, &[&WHAT, &self.node, &seconds]).await?.is_some()))?;
        let until = is_ours.then(|| asked + TERM.saturating_sub(MARGIN));
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = until;
        if self.speaks.swap(is_ours, Ordering::Relaxed) != is_ours && is_ours {
            tracing::info!("this node has the turn: it probes and speaks for the fleet");
        }
        Ok(())
    }

    /// Gives it up, for a process that leaves. Blocks.
    pub fn leave(&self) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Some(ledger) = self.ledger.as_ref().filter(|_| self.speaks()) {
            let leave = "DELETE FROM turn WHERE what = $1 AND node = $2";
            let left = ledger.within(async |t| Ok(t.execute(leave, &[&WHAT, &self.node]).await?));
            if let Err(error) = left {
                tracing::debug!(%error, "the turn ends by itself");
            }
        }
    }
}
