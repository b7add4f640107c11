//! What an account and a key may do: as it is stored, and as it is meant.
//!
//! Stored as JSON in the ledger and passed as JSON through the admin port. Unknown fields are refused, so
//! that a misspelt limit is no limit that silently does not exist.

use std::collections::BTreeMap;

use filters::limit::Limits;
use filters::limit::budget::{Budget, Period, Zone};
use filters::money::Amount;
use serde::{Deserialize, Serialize};

/// The smallest output that clamping leaves, in tokens.
pub const CLAMP_MIN: u64 = 1024;

/// An account's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccountSettings {
    /// For all its keys together.
    pub limits: LimitSpec,
    /// For all its keys together, by model.
    pub model_limits: BTreeMap<String, LimitSpec>,
}

/// A key's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeySettings {
    /// What the operator calls it.
    pub name: String,
    /// Models it may use; `None`: all.
    pub models: Option<Vec<String>>,
    /// The output bound where the caller gives none.
    pub default_output_tokens: Option<u64>,
    /// Lower an output bound that the balance cannot carry, instead of refusing the call.
    pub clamp_output: bool,
    /// The smallest output that clamping leaves, in tokens.
    pub clamp_min: Option<u64>,
    /// USD an hour of provider cost for calls left before their answer, above which they are charged.
    pub abandoned_max: Option<String>,
    /// For this key alone.
    pub limits: LimitSpec,
}

/// Limits as they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitSpec {
    /// Requests in any sixty seconds.
    pub rpm: Option<u64>,
    /// Tokens in any sixty seconds.
    pub tpm: Option<u64>,
    /// Calls at the same time.
    pub concurrency: Option<u64>,
    /// USD per day.
    pub budget_day: Option<String>,
    /// USD per month.
    pub budget_month: Option<String>,
    /// Where midnight is, such as `Europe/Berlin`. Default UTC.
    pub time_zone: Option<String>,
}

/// A setting that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` {message}")]
pub struct BadSetting {
    /// Which one.
    pub field: &'static str,
    /// What is wrong with it.
    pub message: String,
}

impl LimitSpec {
    /// As it is meant.
    ///
    /// # Errors
    /// [`BadSetting`], for the first one that makes no sense.
    pub fn meant(&self) -> Result<Limits, BadSetting> {
        let bad = |field, message: &str| BadSetting { field, message: message.to_owned() };
        let zone = match self.time_zone.as_deref() {
            None => Zone::utc(),
            Some(name) => Zone::find(name)
                .ok_or_else(|| bad("time_zone", &format!("`{name}` is no zone such as Europe/Berlin")))?,
        };
        let mut budgets = vec![];
        for (field, period, text) in [
            ("budget_day", Period::Day, &self.budget_day),
            ("budget_month", Period::Month, &self.budget_month),
        ] {
            if let Some(text) = text {
                let amount = usd(field, text)?;
                budgets.push(Budget { period, amount, zone: zone.clone() });
            }
        }
        for (field, value) in [("rpm", self.rpm), ("tpm", self.tpm), ("concurrency", self.concurrency)] {
            if value == Some(0) {
                return Err(bad(field, "must be at least 1; leave it out for no limit"));
            }
        }
        Ok(Limits {
            requests_per_minute: self.rpm,
            tokens_per_minute: self.tpm,
            concurrency: self.concurrency,
            budgets,
        })
    }
}

impl KeySettings {
    /// Checks everything that is not checked by its type.
    ///
    /// # Errors
    /// [`BadSetting`], for the first one that makes no sense.
    pub fn check(&self) -> Result<(), BadSetting> {
        self.limits.meant()?;
        self.abandoned_max()?;
        if self.default_output_tokens == Some(0) || self.clamp_min == Some(0) {
            let message = "must be at least 1".to_owned();
            return Err(BadSetting { field: "default_output_tokens", message });
        }
        Ok(())
    }

    /// The allowance for abandoned calls, in an hour.
    ///
    /// # Errors
    /// [`BadSetting`] when it is no amount.
    pub fn abandoned_max(&self) -> Result<Option<Amount>, BadSetting> {
        self.abandoned_max.as_deref().map(|text| usd("abandoned_max", text)).transpose()
    }
}

impl AccountSettings {
    /// Checks everything that is not checked by its type.
    ///
    /// # Errors
    /// [`BadSetting`], for the first one that makes no sense.
    pub fn check(&self) -> Result<(), BadSetting> {
        self.limits.meant()?;
        self.model_limits.values().try_for_each(|spec| spec.meant().map(|_| ()))
    }
}

fn usd(field: &'static str, text: &str) -> Result<Amount, BadSetting> {
    Amount::parse_usd(text).map_err(|e| BadSetting { field, message: format!("{e}: USD, such as \"10.00\"") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_misspelt_ones_refused() {
        let text = r#"{"limits":{"rpm":5,"budget_day":"2.50","time_zone":"Asia/Tokyo"},"models":["a"]}"#;
        let settings: KeySettings = serde_json::from_str(text).unwrap();
        let limits = settings.limits.meant().unwrap();
        assert_eq!((limits.requests_per_minute, limits.budgets.len()), (Some(5), 1));
        assert!(serde_json::from_str::<KeySettings>(r#"{"limits":{"rmp":5}}"#).is_err());
        let back = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<KeySettings>(&back).unwrap(), settings);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let field = |spec: LimitSpec| spec.meant().unwrap_err().field;
        assert_eq!(field(LimitSpec { rpm: Some(0), ..LimitSpec::default() }), "rpm");
        assert_eq!(field(LimitSpec { budget_day: Some("-1".into()), ..LimitSpec::default() }), "budget_day");
        assert_eq!(field(LimitSpec { time_zone: Some("Mars".into()), ..LimitSpec::default() }), "time_zone");
    }
}
