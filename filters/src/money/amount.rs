//! An amount of money in nano-dollars.

use std::fmt;

/// Nano-dollars per dollar.
pub const NANO_PER_USD: i64 = 1_000_000_000;

/// A signed amount in nano-dollars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Amount(i64);

/// Why a text is no amount of dollars.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecimalError {
    /// Not digits with at most one point and an optional exponent.
    #[error("`{0}` is not a decimal number")]
    NotDecimal(String),
    /// Below zero.
    #[error("`{0}` is negative")]
    Negative(String),
    /// More decimals than the unit can hold.
    #[error("`{0}` has more than {1} decimals")]
    TooFine(String, u32),
    /// More than the type can hold.
    #[error("`{0}` is too large")]
    TooLarge(String),
}

impl Amount {
    /// Nothing.
    pub const ZERO: Self = Self(0);
    /// The largest amount.
    pub const MAX: Self = Self(i64::MAX);

    /// So many nano-dollars.
    #[must_use]
    pub const fn from_nano(nano: i64) -> Self {
        Self(nano)
    }

    /// The number of nano-dollars.
    #[must_use]
    pub const fn nano(self) -> i64 {
        self.0
    }

    /// Reads dollars from a decimal text such as `12.5`, exactly, with at most nine decimals.
    ///
    /// # Errors
    /// [`DecimalError`] for anything that is not such a number or does not fit.
    pub fn parse_usd(text: &str) -> Result<Self, DecimalError> {
        let units = parse_decimal(text, 9)?;
        i64::try_from(units).map(Self).map_err(|_| DecimalError::TooLarge(text.to_owned()))
    }

    /// The sum, unless it overflows.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The difference, unless it overflows.
    #[must_use]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }

    /// The difference, never below zero.
    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0).max(0))
    }

    /// Whether this is more than nothing.
    #[must_use]
    pub const fn is_positive(self) -> bool {
        self.0 > 0
    }
}

/// Dollars with all nine decimals that are needed and at least two: `$1.25`, `$0.000075`.
impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let nano = self.0.unsigned_abs();
        let per_usd = NANO_PER_USD.unsigned_abs();
        let whole = nano.checked_div(per_usd).unwrap_or_default();
        let part = nano.checked_rem(per_usd).unwrap_or_default();
        let decimals = format!("{part:09}");
        let (cents, finer) = decimals.split_at_checked(2).unwrap_or(("00", ""));
        write!(f, "{sign}${whole}.{cents}{}", finer.trim_end_matches('0'))
    }
}

/// Reads a decimal text as a whole number of `10^-decimals_max` units.
///
/// Accepts digits with at most one point and an exponent (`1e-6`), as YAML and JSON write numbers.
/// Zeros beyond the finest unit are harmless, other digits there are refused.
///
/// # Errors
/// [`DecimalError`], naming the text.
pub fn parse_decimal(text: &str, decimals_max: u32) -> Result<u128, DecimalError> {
    let not_decimal = || DecimalError::NotDecimal(text.to_owned());
    let too_large = || DecimalError::TooLarge(text.to_owned());
    if text.len() > 64 {
        return Err(too_large());
    }
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().map_err(|_| not_decimal())?),
        None => (text, 0),
    };
    let unsigned = mantissa.strip_prefix('-').unwrap_or(mantissa);
    let (whole, part) = unsigned.split_once('.').unwrap_or((unsigned, ""));
    let digits: String = [whole, part].concat();
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(not_decimal());
    }
    if mantissa.starts_with('-') {
        return Err(DecimalError::Negative(text.to_owned()));
    }
    // value = digits × 10^shift units
    let decimals = i32::try_from(part.len()).map_err(|_| too_large())?;
    let shift = i32::try_from(decimals_max)
        .ok()
        .and_then(|max| max.checked_add(exponent)?.checked_sub(decimals))
        .ok_or_else(too_large)?;
    let mut value: u128 = digits.parse().map_err(|_| too_large())?;
    if value == 0 {
        return Ok(0);
    }
    for _ in 0..shift.unsigned_abs().min(64) {
        value = if shift > 0 {
            value.checked_mul(10).ok_or_else(too_large)?
        } else if value.checked_rem(10) == Some(0) {
            value.checked_div(10).unwrap_or_default()
        } else {
            return Err(DecimalError::TooFine(text.to_owned(), decimals_max));
        };
    }
    if shift.unsigned_abs() > 64 {
        return Err(if shift > 0 {
            too_large()
        } else {
            DecimalError::TooFine(text.to_owned(), decimals_max)
        });
    }
    Ok(value)
}

#[cfg(test)]
#[expect(clippy::arithmetic_side_effects, reason = "test arithmetic")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn dollars_are_read_exactly() {
        let nano = |text: &str| Amount::parse_usd(text).map(Amount::nano);
        assert_eq!(nano("1"), Ok(1_000_000_000));
        assert_eq!(nano("0.000000001"), Ok(1));
        assert_eq!(nano("12.50"), Ok(12_500_000_000));
        assert_eq!(nano("1e-9"), Ok(1));
        assert_eq!(nano("1.50000000000"), Ok(1_500_000_000));
        assert_eq!(nano("0"), Ok(0));
        assert!(matches!(nano("0.0000000001"), Err(DecimalError::TooFine(..))));
        assert!(matches!(nano("9223372036.854775808"), Err(DecimalError::TooLarge(_))));
        assert_eq!(nano("9223372036.854775807"), Ok(i64::MAX));
    }

    #[test]
    fn what_is_no_amount_is_refused() {
        for text in ["", "NaN", "inf", ".", "1.2.3", "1,5", " 1", "0x1", "1e", "e5", "+1", "１"] {
            assert!(matches!(Amount::parse_usd(text), Err(DecimalError::NotDecimal(_))), "{text}");
        }
        assert!(matches!(Amount::parse_usd("-1"), Err(DecimalError::Negative(_))));
        assert!(matches!(Amount::parse_usd("1e400"), Err(DecimalError::TooLarge(_))));
        assert!(matches!(Amount::parse_usd("1e-400"), Err(DecimalError::TooFine(..))));
        assert!(matches!(Amount::parse_usd("1e2147483647"), Err(DecimalError::TooLarge(_))));
    }

    #[test]
    fn amounts_are_shown_as_dollars() {
        let show = |nano| Amount::from_nano(nano).to_string();
        assert_eq!(show(75_000), "$0.000075");
        assert_eq!(show(1_250_000_000), "$1.25");
        assert_eq!(show(-3), "-$0.000000003");
        assert_eq!(show(0), "$0.00");
        assert_eq!(show(i64::MIN), "-$9223372036.854775808");
    }

    proptest! {
        #[test]
        fn shown_amounts_read_back(nano in 0..=i64::MAX) {
            let shown = Amount::from_nano(nano).to_string();
            prop_assert_eq!(Amount::parse_usd(shown.trim_start_matches('$')), Ok(Amount(nano)));
        }

        #[test]
        fn reading_never_panics(text in "\\PC{0,20}", number in "[0-9.eE+-]{0,24}") {
            let _ = Amount::parse_usd(&text);
            let _ = Amount::parse_usd(&number);
        }

        #[test]
        fn less_never_goes_below_zero(a: i64, b: i64) {
            let rest = Amount(a).less(Amount(b));
            prop_assert!(rest >= Amount::ZERO);
            if b >= 0 && a >= b { prop_assert_eq!(rest.0, a - b); }
        }
    }
}
