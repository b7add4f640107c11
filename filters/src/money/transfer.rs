//! How a hold ends, and what that means in double entry.
//!
//! [`settle`] is the only place where a cost meets a hold. Its four parts always satisfy
//! `captured + released = held` and `captured + excess + shortfall = cost`. A transfer moves a
//! positive amount from one account to another, so every set of transfers sums to zero by
//! construction; `tollgate ledger verify` proves it again from the stored rows.

use super::Amount;
use crate::ids::AccountId;

/// The two sides that a transfer can touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LedgerAccount {
    /// What we owe a customer: their prepaid balance.
    Customer(AccountId),
    /// What callers paid for use.
    Revenue,
    /// Money that came in from outside.
    CashIn,
    /// What providers will bill us.
    ProviderPayable,
    /// What use cost us at providers.
    ProviderCost,
    /// Use that no money was there for.
    Shortfall,
    /// Provider cost of calls that their callers left and were not charged for.
    Abandoned,
    /// Money given away.
    Promo,
    /// Money given up, with a reason.
    WriteOff,
    /// A customer's money that a lost node may have spent: nobody's until that is known.
    Suspense,
}

/// Why a transfer was made. The numbers are stored: never reuse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransferKind {
    /// Paid out of the hold.
    Capture = 1,
    /// Cost above the hold, paid out of the free balance.
    Excess = 2,
    /// Cost that neither hold nor balance could pay.
    Shortfall = 3,
    /// Our cost at the provider.
    ProviderCost = 4,
    /// Our cost at the provider for attempts that nobody is charged for.
    Abandoned = 5,
    /// Cost that its lease could not pay, paid from what was free when it was booked.
    Late = 6,
    /// Cost that neither lease nor free balance could pay when it was booked.
    WriteOff = 7,
    /// Cost that was paid from suspense.
    Resolved = 8,
    /// Prepaid money.
    TopUp = 10,
    /// Prepaid money given back.
    Refund = 11,
    /// A correction, with its reason.
    Adjustment = 12,
    /// Set aside because a node is lost that may have spent it.
    Suspended = 13,
    /// Given back from suspense.
    Restored = 14,
}

impl TransferKind {
    /// All kinds, for reading them back.
    pub const ALL: [Self; 13] = [
        Self::Capture,
        Self::Excess,
        Self::Shortfall,
        Self::ProviderCost,
        Self::Abandoned,
        Self::Late,
        Self::WriteOff,
        Self::Resolved,
        Self::TopUp,
        Self::Refund,
        Self::Adjustment,
        Self::Suspended,
        Self::Restored,
    ];

    /// The word that statements and JSON show.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Capture => "capture",
            Self::Excess => "excess",
            Self::Shortfall => "shortfall",
            Self::ProviderCost => "provider_cost",
            Self::Abandoned => "abandoned",
            Self::Late => "late",
            Self::WriteOff => "write_off",
            Self::Resolved => "resolved",
            Self::TopUp => "top_up",
            Self::Refund => "refund",
            Self::Adjustment => "adjustment",
            Self::Suspended => "suspended",
            Self::Restored => "restored",
        }
    }
}

/// Money moved from one account to another; an immutable row of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Why.
    pub kind: TransferKind,
    /// The account that gives.
    pub debit: LedgerAccount,
    /// The account that receives.
    pub credit: LedgerAccount,
    /// How much; always above zero.
    pub amount: Amount,
}

/// How one hold ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// What was set aside.
    pub held: Amount,
    /// What of it was charged.
    pub captured: Amount,
    /// What of it went back. `captured + released = held`.
    pub released: Amount,
    /// Charged above the hold, from the free balance.
    pub excess: Amount,
    /// Cost that could not be charged.
    pub shortfall: Amount,
}

impl Settlement {
    /// What the customer paid in all.
    #[must_use]
    pub fn charged(&self) -> Amount {
        // Both parts came out of one balance, so their sum fits; saturate rather than wrap.
        self.captured.checked_add(self.excess).unwrap_or(Amount::MAX)
    }

    /// The caller's side of the books.
    #[must_use]
    pub fn transfers(&self, account: AccountId) -> Vec<Transfer> {
        let customer = LedgerAccount::Customer(account);
        [
            (TransferKind::Capture, customer, self.captured),
            (TransferKind::Excess, customer, self.excess),
            (TransferKind::Shortfall, LedgerAccount::Shortfall, self.shortfall),
        ]
        .into_iter()
        .filter(|(_, _, amount)| amount.is_positive())
        .map(|(kind, debit, amount)| Transfer { kind, debit, credit: LedgerAccount::Revenue, amount })
        .collect()
    }
}

/// Ends a hold of `held` that cost `cost`, with `available` free beside it.
///
/// Negative arguments count as zero: a caller that has them has a fault of its own, and money must
/// not be made from it.
#[must_use]
pub fn settle(held: Amount, cost: Amount, available: Amount) -> Settlement {
    let held = held.max(Amount::ZERO);
    let cost = cost.max(Amount::ZERO);
    let captured = cost.min(held);
    let above = cost.less(captured);
    let excess = above.min(available.max(Amount::ZERO));
    Settlement { held, captured, released: held.less(captured), excess, shortfall: above.less(excess) }
}

#[cfg(test)]
#[expect(clippy::arithmetic_side_effects, reason = "test arithmetic")]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn nano(n: i64) -> Amount {
        Amount::from_nano(n)
    }

    #[test]
    fn a_cost_above_hold_and_balance_leaves_a_shortfall() {
        let end = settle(nano(1_000), nano(10_050), nano(1_000));
        assert_eq!((end.captured, end.excess, end.shortfall), (nano(1_000), nano(1_000), nano(8_050)));
        assert_eq!(end.charged(), nano(2_000));
    }

    #[test]
    fn a_failed_call_costs_nothing() {
        let end = settle(nano(500), Amount::ZERO, nano(10));
        assert_eq!((end.released, end.charged()), (nano(500), Amount::ZERO));
        assert!(end.transfers(AccountId(1)).is_empty());
    }

    #[test]
    fn every_kind_has_its_own_number_and_word() {
        let numbers: std::collections::HashSet<_> = TransferKind::ALL.iter().map(|k| (*k).word()).collect();
        assert_eq!(numbers.len(), TransferKind::ALL.len());
    }

    proptest! {
        #[test]
        fn nothing_is_made_and_nothing_lost(held in 0..i64::MAX, cost in 0..i64::MAX, free in 0..i64::MAX) {
            let end = settle(nano(held), nano(cost), nano(free));
            prop_assert_eq!(i128::from(end.captured.nano()) + i128::from(end.released.nano()), i128::from(held));
            prop_assert_eq!(
                i128::from(end.captured.nano()) + i128::from(end.excess.nano()) + i128::from(end.shortfall.nano()),
                i128::from(cost)
            );
            prop_assert!(end.excess.nano() <= free, "the balance never goes below zero");
            prop_assert!(end.shortfall == Amount::ZERO || end.excess.nano() == free);
        }

        #[test]
        fn postings_sum_to_zero(held in 0..i64::MAX, cost in 0..i64::MAX, free in 0..i64::MAX) {
            let mut sums: HashMap<LedgerAccount, i128> = HashMap::new();
            for t in settle(nano(held), nano(cost), nano(free)).transfers(AccountId(7)) {
                prop_assert!(t.amount.is_positive() && t.debit != t.credit);
                *sums.entry(t.debit).or_default() -= i128::from(t.amount.nano());
                *sums.entry(t.credit).or_default() += i128::from(t.amount.nano());
            }
            prop_assert_eq!(sums.values().sum::<i128>(), 0);
            prop_assert_eq!(sums.get(&LedgerAccount::Revenue).copied().unwrap_or(0), i128::from(cost));
        }
    }
}
