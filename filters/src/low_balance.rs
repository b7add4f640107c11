//! When is a balance low, and when is it well again?
//!
//! It is low below its threshold, and well again a tenth above it: an account that is used and topped up around the
//! threshold crosses it all the time, and one word for each crossing is what its owner wants to hear.

use crate::money::Amount;

/// By which part of the threshold a balance must be above it to be well again.
const ABOVE_PART: i64 = 10;

/// Which side of its threshold one balance is on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LowBalance {
    is_low: bool,
}

/// It has crossed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crossing {
    /// It is low now.
    Low,
    /// It is well again.
    Well,
}

impl LowBalance {
    /// The balance is this much. A threshold of nothing is none.
    pub fn look(&mut self, balance: Amount, threshold: Amount) -> Option<Crossing> {
        let above = Amount::from_nano(threshold.nano() / ABOVE_PART);
        let well = threshold.checked_add(above).unwrap_or(Amount::MAX);
        if !self.is_low && balance < threshold {
            self.is_low = true;
            return Some(Crossing::Low);
        }
        if self.is_low && (balance >= well || !threshold.is_positive()) {
            self.is_low = false;
            return Some(Crossing::Well);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nano(nano: i64) -> Amount {
        Amount::from_nano(nano)
    }

    #[test]
    fn a_balance_that_moves_around_its_threshold_crosses_it_once() {
        let mut seen = LowBalance::default();
        let told: Vec<_> =
            [150, 99, 101, 99, 109, 98, 110, 101].map(|b| seen.look(nano(b), nano(100))).into();
        let (low, well) = (Some(Crossing::Low), Some(Crossing::Well));
        assert_eq!(told, [None, low, None, None, None, None, well, None]);
    }

    #[test]
    fn without_a_threshold_nothing_is_low() {
        let mut seen = LowBalance::default();
        assert_eq!(seen.look(nano(0), nano(0)), None);
        assert_eq!(seen.look(nano(5), nano(6)), Some(Crossing::Low));
        assert_eq!(seen.look(nano(5), nano(0)), Some(Crossing::Well), "it was taken away");
    }

    proptest! {
        #[test]
        fn crossings_take_turns(balances in prop::collection::vec(0_i64..300, 0..100), threshold in 0_i64..200) {
            let mut seen = LowBalance::default();
            let told: Vec<_> =
                balances.iter().filter_map(|balance| seen.look(nano(*balance), nano(threshold))).collect();
            for (at, crossing) in told.iter().enumerate() {
                prop_assert_eq!(*crossing == Crossing::Low, at % 2 == 0);
            }
        }
    }
}
