//! Calls that are left before their answer.
//!
//! Such a call is charged nothing, but the provider has begun to work. A caller may do that now and
//! then: up to an allowance an hour, by key, of our cost at the provider. Beyond it the prompt is
//! charged. The allowance is what the operator set, or 1 % of what the key spent in that hour and at
//! least ten cents.

use crate::money::Amount;

/// Ten cents.
const ALLOWANCE_MIN: Amount = Amount::from_nano(100_000_000);
/// A hundredth of the spend.
const SPEND_PART: i64 = 100;

/// One key's hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hour {
    hour: u64,
    spent: Amount,
    abandoned: Amount,
}

impl Hour {
    /// Notes what a call was charged.
    pub fn spend(&mut self, second: u64, charged: Amount) {
        self.roll(second);
        self.spent = self.spent.checked_add(charged).unwrap_or(Amount::MAX);
    }

    /// Whether a call that was left early is free. It then counts against the allowance.
    pub fn forgive(&mut self, second: u64, provider_cost: Amount, set: Option<Amount>) -> bool {
        self.roll(second);
        let part = Amount::from_nano(self.spent.nano() / SPEND_PART);
        let allowance = set.unwrap_or_else(|| part.max(ALLOWANCE_MIN));
        let sum = self.abandoned.checked_add(provider_cost).unwrap_or(Amount::MAX);
        let free = sum <= allowance;
        if free {
            self.abandoned = sum;
        }
        free
    }

    fn roll(&mut self, second: u64) {
        let hour = second / 3600;
        if hour > self.hour {
            *self = Self { hour, ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cents(n: i64) -> Amount {
        Amount::from_nano(n * 10_000_000)
    }

    #[test]
    fn ten_cents_an_hour_are_free_and_no_more() {
        let mut hour = Hour::default();
        assert!(hour.forgive(0, cents(6), None));
        assert!(!hour.forgive(10, cents(6), None));
        assert!(hour.forgive(20, cents(4), None), "what is left of it");
        assert!(hour.forgive(3600, cents(10), None), "a new hour");
    }

    #[test]
    fn who_spends_more_may_leave_more() {
        let mut hour = Hour::default();
        hour.spend(0, cents(10_000));
        assert!(hour.forgive(1, cents(100), None));
        assert!(!hour.forgive(1, cents(1), None));
    }

    #[test]
    fn the_operators_allowance_counts() {
        let mut hour = Hour::default();
        assert!(!hour.forgive(0, cents(1), Some(Amount::ZERO)));
        assert!(hour.forgive(0, cents(50), Some(cents(50))));
    }
}
