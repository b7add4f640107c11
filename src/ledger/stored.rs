//! How kinds and accounts are stored: the same numbers in every ledger.

use filters::money::{LedgerAccount, TransferKind};

/// The kind of a customer's account.
pub(super) const CUSTOMER: i64 = 1;
/// The kind of our own accounts.
pub(super) const HOUSE_KIND: i64 = 2;
/// Customers' ids begin here.
pub(super) const CUSTOMER_ID_MIN: i64 = 1000;
/// A day in milliseconds.
pub(super) const DAY_MS: i64 = 86_400_000;

/// Our own accounts, with the ids that they keep for ever.
pub(super) const HOUSE: [(i64, &str, LedgerAccount); 9] = [
    (1, "revenue", LedgerAccount::Revenue),
    (2, "cash_in", LedgerAccount::CashIn),
    (3, "provider_payable", LedgerAccount::ProviderPayable),
    (4, "provider_cost", LedgerAccount::ProviderCost),
    (5, "shortfall", LedgerAccount::Shortfall),
    (6, "abandoned", LedgerAccount::Abandoned),
    (7, "promo", LedgerAccount::Promo),
    (8, "write_off", LedgerAccount::WriteOff),
    (9, "suspense", LedgerAccount::Suspense),
];

/// The stored number of a kind. Those below 10 are a hold's.
pub(super) const fn number(kind: TransferKind) -> i64 {
    match kind {
        TransferKind::Capture => 1,
        TransferKind::Excess => 2,
        TransferKind::Shortfall => 3,
        TransferKind::ProviderCost => 4,
        TransferKind::Abandoned => 5,
        TransferKind::Late => 6,
        TransferKind::WriteOff => 7,
        TransferKind::Resolved => 8,
        TransferKind::TopUp => 10,
        TransferKind::Refund => 11,
        TransferKind::Adjustment => 12,
        TransferKind::Suspended => 13,
        TransferKind::Restored => 14,
    }
}

/// What statements call a stored number.
pub(super) fn kind_word(stored: i64) -> &'static str {
    let kind = TransferKind::ALL.into_iter().find(|kind| number(*kind) == stored);
    kind.map_or("unknown", TransferKind::word)
}

/// The stored id of an account.
pub(super) fn row(account: LedgerAccount) -> i64 {
    match account {
        LedgerAccount::Customer(id) => id.0,
        house => HOUSE.iter().find(|(_, _, known)| *known == house).map_or(0, |(id, _, _)| *id),
    }
}
