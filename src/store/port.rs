//! What a hot store does, whoever keeps it.
//!
//! A hold is placed by [`Holds::admit`] and lives in a [`Ticket`]. It leaves by one door, once:
//! [`Holds::settle`] takes the ticket, and a ticket that is dropped settles at what its call had
//! cost by then, without waiting for anything. So a panic or a task that is thrown away cannot keep
//! money.

use std::sync::Arc;

use async_trait::async_trait;
use filters::ids::{AccountId, HoldId, KeyDigest};
use filters::limit::{Over, Scopes};
use filters::meter::Used;
use filters::money::{Amount, Settlement};
use filters::purse::{LeftEarly, Standings};

use crate::clock;
use crate::journal::{Hold, OpenHold, Settled};

/// A store of holds.
#[async_trait]
pub trait Holds: Send + Sync {
    /// Sets money aside, atomically, and records it before it answers.
    ///
    /// # Errors
    /// [`Deny`]; nothing is set aside then.
    async fn admit(&self, admit: Admit) -> Result<Ticket, Deny>;

    /// Notes how much a call has cost so far. Cheap; for every piece of an answer.
    fn touch(&self, ticket: &Ticket, cost: Amount);

    /// Charges what was used and gives the rest back. The record is durable against the end of the
    /// process when this resolves, or the store has said by its health that it cannot be.
    async fn settle(&self, ticket: Ticket, charge: Charge) -> Settlement;

    /// What an account may still hold.
    fn available(&self, account: AccountId) -> Amount;

    /// Holds that are open.
    fn open_holds(&self) -> usize;

    /// Why no call can be admitted now, if so.
    fn trouble(&self) -> Option<&'static str>;
}

/// A hold to place.
#[derive(Clone, Debug)]
pub struct Admit {
    pub hold: HoldId,
    pub account: AccountId,
    pub amount: Amount,
    pub request: String,
    /// The models that may serve it, the asked one first; never empty.
    pub models: Vec<String>,
    pub key: KeyDigest,
    /// Of the asked model.
    pub price_version: u32,
    /// Tokens that the call may use, for limits per minute.
    pub tokens: u64,
    pub scopes: Arc<Scopes>,
}

/// What a finished call is charged for.
#[derive(Clone, Debug, Default)]
pub struct Charge {
    pub cost: Amount,
    pub used: Used,
    /// Our cost at the provider.
    pub provider_cost: Amount,
    /// Our cost of attempts that had begun to answer and were given up.
    pub lost: Amount,
    /// The endpoint that answered; empty when none did.
    pub endpoint: String,
    /// The model that it answered as, and the version of its prices; `None`: the asked one.
    pub served: Option<(String, u32)>,
    pub attempts: u32,
    /// The caller left before the answer came.
    pub left: Option<LeftEarly>,
}

impl Charge {
    /// The model that is charged for.
    #[must_use]
    pub fn model<'a>(&'a self, hold: &'a Hold) -> &'a str {
        self.served.as_ref().map_or(hold.model.as_str(), |(model, _)| model)
    }

    /// How a hold ended, for journal and ledger. `abandoned`: of our cost, what a call that was left early is forgiven.
    #[must_use]
    pub fn record(&self, hold: &Hold, settlement: &Settlement, abandoned: Amount) -> Settled {
        let price_version = self.served.as_ref().map_or(hold.price_version, |(_, version)| *version);
        Settled {
            id: hold.id,
            account: hold.account,
            request: hold.request.clone(),
            model: self.model(hold).to_owned(),
            endpoint: self.endpoint.clone(),
            attempts: self.attempts,
            parts: Settled::parts_of(settlement),
            provider_cost: self.provider_cost.nano(),
            abandoned: abandoned.checked_add(self.lost).unwrap_or(Amount::MAX).nano(),
            key: hold.key,
            held_ms: hold.at_ms,
            price_version,
            tokens: Settled::tokens_of(&self.used.usage),
            estimated: self.used.estimated,
            anomaly: self.used.anomaly,
            at_ms: clock::unix_ms(),
            pool: hold.pool,
        }
    }
}

/// Why no hold was placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Deny {
    /// The balance cannot carry it.
    #[error("the balance cannot carry the hold")]
    Funds {
        /// What is there.
        available: Amount,
    },
    /// A limit of the key, of its account, or of the account with this model.
    #[error("over the limit of {scope}: {}", over.kind.word())]
    Limited {
        /// Whose.
        scope: &'static str,
        /// Which, and until when.
        over: Over,
    },
    /// The key has been revoked, and this node did not know it yet.
    #[error("the key has been revoked")]
    Revoked,
    /// As many holds are open as may be.
    #[error("too many calls are in flight")]
    Overloaded,
    /// The hold could not be recorded.
    #[error("the store cannot record a hold")]
    Unavailable,
}

/// An open hold, owned by its request.
pub struct Ticket {
    /// How requests and tokens per minute stand, where they are limited.
    pub standing: Standings,
    pub(super) hold: Arc<OpenHold>,
    pub(super) on_drop: Option<Arc<dyn Abandon>>,
}

/// Takes back a hold whose request is gone. Must not block or fail.
pub(super) trait Abandon: Send + Sync {
    fn abandon(&self, hold: &Arc<OpenHold>);
}

impl Ticket {
    /// The hold's id.
    #[must_use]
    pub fn id(&self) -> HoldId {
        self.hold.id()
    }

    /// What is set aside.
    #[must_use]
    pub fn amount(&self) -> Amount {
        self.hold.amount()
    }

    /// What the call has cost so far.
    #[must_use]
    pub fn cost_so_far(&self) -> Amount {
        self.hold.cost_so_far()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(store) = self.on_drop.take() {
            store.abandon(&self.hold);
        }
    }
}
