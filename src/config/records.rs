//! What is kept of what happened, and what callers are promised: the blocks `records:` and `slo:`.
//!
//! A field's comment in the raw blocks is its comment in `conf/tollgate.yaml`.

use std::time::Duration;

use deserr::Deserr;
use filters::money::amount::parse_decimal;
use filters::slo::Allowance;
use filters::slo::judge::Limits;

use super::Faults;
use super::raw::{Bytes, Decimal, Span};

const DAY: Duration = Duration::from_secs(86_400);
/// The longest that anything is kept.
const KEPT_MAX: Duration = Duration::from_secs(400 * 86_400);
/// A report of a month needs its minutes a few days longer.
const MINUTES_KEPT_MIN: Duration = Duration::from_secs(35 * 86_400);
const ATTEMPTS_KEPT_MIN: Duration = Duration::from_secs(3600);
/// A file that is smaller would hold nothing.
const FILE_BYTES_MIN: u64 = 16 << 20;
/// The longest that a first event may be promised in.
const FIRST_EVENT_MAX: Duration = Duration::from_secs(600);

/// `records:`, as it is written.
#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct RawRecords {
    /// Attempts that failed, were refused or left, and those after them in the same call. From 1h to 400d. Default 30d.
    #[deserr(default)]
    pub attempts_kept: Option<Span>,
    /// First attempts that served. From 1h to 400d. Default 1d.
    #[deserr(default)]
    pub served_kept: Option<Span>,
    /// Good and bad calls by the minute; by the hour they are kept for 400 days. From 35d to 400d. Default 100d.
    #[deserr(default)]
    pub minutes_kept: Option<Span>,
    /// What `records.db` in the data folder may hold; beyond it the oldest attempts go before their time. Not in a fleet,
    /// where they are in Postgres. At least 16MiB. Default 1GiB.
    #[deserr(default)]
    pub file_max: Option<Bytes>,
}

/// `slo:`, as it is written.
#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct RawSlo {
    /// Of the calls in a minute, the percentage that is answered whole; what is missing of it burns the month's budget.
    /// From 50 to 99.9999. Default "99.95".
    #[deserr(default)]
    pub availability: Option<Decimal>,
    /// Of the streams in a minute, the percentage whose first event comes in time. Default "99.95".
    #[deserr(default)]
    pub latency: Option<Decimal>,
    /// From the whole request in hand to the first event of a stream; later is late. Default 3s.
    #[deserr(default)]
    pub first_event: Option<Span>,
    /// The same for a long prompt. Default 10s.
    #[deserr(default)]
    pub first_event_long: Option<Span>,
    /// A prompt of more tokens is a long one. Default 16000.
    #[deserr(default)]
    pub long_prompt: Option<u64>,
    /// The same for models with `reasoning: true`, whatever the prompt. Default 60s.
    #[deserr(default)]
    pub first_event_reasoning: Option<Span>,
}

/// How long what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    pub attempts: Duration,
    pub served: Duration,
    pub minutes: Duration,
    pub file_bytes_max: u64,
}

/// What callers are promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    pub availability: Allowance,
    pub latency: Allowance,
    pub first_event: Limits,
}

impl RawRecords {
    pub(super) fn check(&self, faults: &mut Faults) -> Keep {
        let Self { attempts_kept, served_kept, minutes_kept, file_max } = self;
        let mut kept = |field: &str, raw: &Option<Span>, default, min| {
            let span = raw.map_or(default, |span| span.0);
            if !(min..=KEPT_MAX).contains(&span) {
                let least = humantime::format_duration(min);
                faults.push(format!("records.{field}"), format!("must be between {least} and 400 days"));
            }
            span
        };
        let keep = Keep {
            attempts: kept("attempts_kept", attempts_kept, 30 * DAY, ATTEMPTS_KEPT_MIN),
            served: kept("served_kept", served_kept, DAY, ATTEMPTS_KEPT_MIN),
            minutes: kept("minutes_kept", minutes_kept, 100 * DAY, MINUTES_KEPT_MIN),
            file_bytes_max: file_max.map_or(1 << 30, |bytes| bytes.0),
        };
        if keep.file_bytes_max < FILE_BYTES_MIN {
            faults.push("records.file_max", "must be at least 16MiB");
        }
        keep
    }
}

impl RawSlo {
    pub(super) fn check(&self, faults: &mut Faults) -> Option<Slo> {
        let Self { availability, latency, first_event, first_event_long, long_prompt, first_event_reasoning } =
            self;
        let availability = objective(faults, "slo.availability", availability.as_ref());
        let latency = objective(faults, "slo.latency", latency.as_ref());
        let mut limit = |field: &str, raw: &Option<Span>, default| {
            let span = raw.map_or(Duration::from_secs(default), |span| span.0);
            if span.is_zero() || span > FIRST_EVENT_MAX {
                faults.push(format!("slo.{field}"), "must be more than nothing and at most 10 minutes");
            }
            span
        };
        let first_event = Limits {
            usual: limit("first_event", first_event, 3),
            long: limit("first_event_long", first_event_long, 10),
            long_prompt_tokens: long_prompt.unwrap_or(16_000),
            reasoning: limit("first_event_reasoning", first_event_reasoning, 60),
        };
        Some(Slo { availability: availability?, latency: latency?, first_event })
    }
}

/// A percentage, as what it leaves.
fn objective(faults: &mut Faults, field: &str, raw: Option<&Decimal>) -> Option<Allowance> {
    let text = raw.map_or("99.95", |decimal| decimal.0.as_str());
    let per_million = parse_decimal(text, 4).ok().and_then(|parts| u32::try_from(parts).ok());
    let allowance = per_million.and_then(Allowance::of_objective);
    if allowance.is_none() {
        let message =
            "must be a percentage between 50 and 99.9999, with at most four decimals, such as \"99.95\"";
        faults.push(field, message);
    }
    allowance
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objectives_are_read_exactly() {
        let read = |text: &str| {
            let mut faults = Faults::default();
            let read = objective(&mut faults, "slo.latency", Some(&Decimal(text.to_owned())));
            assert_eq!(read.is_none(), !faults.0.is_empty(), "{text}");
            read.map(Allowance::per_million)
        };
        assert_eq!(read("99.95"), Some(500));
        assert_eq!(read("99.9999"), Some(1));
        assert_eq!(read("50"), Some(500_000));
        for text in ["100", "49", "", "ninety", "99.99999", "-1"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_left_out_has_a_default_and_what_is_too_short_a_fault() {
        let mut faults = Faults::default();
        let keep = RawRecords::default().check(&mut faults);
        assert_eq!((keep.attempts, keep.served, keep.minutes), (30 * DAY, DAY, 100 * DAY));
        assert!(RawSlo::default().check(&mut faults).is_some() && faults.0.is_empty());
        let short =
            RawRecords { minutes_kept: Some(Span(DAY)), file_max: Some(Bytes(1)), ..RawRecords::default() };
        short.check(&mut faults);
        let slow = RawSlo { first_event: Some(Span(Duration::ZERO)), ..RawSlo::default() };
        slow.check(&mut faults);
        let paths: Vec<_> = faults.0.iter().map(|fault| fault.path.as_str()).collect();
        assert_eq!(paths, ["records.minutes_kept", "records.file_max", "slo.first_event"]);
    }
}
