//! What a month has left of what was promised, for people and for machines: docs/slo.md.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use filters::slo::burn::{self, Burn, Part, Window};
use filters::slo::month::Month;
use filters::slo::{Allowance, DAY_MS, HOUR_MS};
use serde::{Deserialize, Serialize};

use super::minutes::Slice;
use super::{RecordError, Records};
use crate::config::records::Slo;

/// How far burn rates look back.
const WINDOWS: [(&str, i64); 4] = [("1h", HOUR_MS), ("6h", 6 * HOUR_MS), ("1d", DAY_MS), ("3d", 3 * DAY_MS)];
/// What stands for no name: nobody upstream was to blame, or its config names no region.
const NOBODY: &str = "-";

/// A month.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// As 2026-11.
    pub month: String,
    /// Of the month, in milliseconds since 1970.
    pub from_ms: i64,
    pub to_ms: i64,
    /// So far it is told: now, or the month's end.
    pub until_ms: i64,
    /// Availability, then latency.
    pub objectives: Vec<Objective>,
}

/// What became of one promise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Objective {
    pub objective: String,
    /// What was promised, in percent.
    pub promised: f64,
    /// What was kept, in percent of calls.
    pub kept: f64,
    pub good: u64,
    pub bad: u64,
    pub budget_seconds: f64,
    pub burnt_seconds: f64,
    /// Below zero when more is burnt than there was.
    pub left_seconds: f64,
    /// Of the budget; below zero too.
    pub left_fraction: f64,
    /// At 1 the budget would be used up when its month is over.
    pub burn_rates: BTreeMap<String, f64>,
    /// Minutes with calls, and with bad ones.
    pub minutes: u64,
    pub bad_minutes: u64,
    /// What burnt most comes first.
    pub by_cause: Vec<Share>,
    pub by_upstream: Vec<Share>,
    pub by_region: Vec<Share>,
    pub by_model: Vec<Share>,
    pub worst_minutes: Vec<Minute>,
}

/// A part of what was burnt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    pub name: String,
    /// Not told by cause: good calls have none.
    pub good: u64,
    pub bad: u64,
    pub burnt_seconds: f64,
}

/// A minute that burnt something.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Minute {
    pub start_ms: i64,
    /// The same for people.
    pub start: String,
    pub good: u64,
    pub bad: u64,
    pub burnt_seconds: f64,
    /// Most of it was because of this.
    pub cause: String,
    pub upstream: String,
}

impl Records {
    /// What is left of a month, as far as `now_ms`.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be read.
    pub fn slo(&self, slo: &Slo, month: Month, now_ms: i64) -> Result<Report, RecordError> {
        let (from_ms, to_ms) = (month.start_ms(), month.end_ms());
        let until_ms = now_ms.clamp(from_ms, to_ms);
        let names = self.all_words()?;
        let windows = || WINDOWS.map(|(_, span)| Window::new(until_ms - span, until_ms)).to_vec();
        let whole = Window::new(from_ms, to_ms);
        let (mut availability, mut latency) = (Burn::new(whole, windows()), Burn::new(whole, windows()));
        // A day at a time: what is read at once has a bound.
        let mut day_ms = from_ms.min(until_ms - 3 * DAY_MS);
        while day_ms < until_ms {
            let next_ms = (day_ms + DAY_MS).min(until_ms);
            let slices = self.slices(day_ms, next_ms)?;
            for minute in slices.chunk_by(|one, other| one.start_ms == other.start_ms) {
                let Some(start_ms) = minute.first().map(|slice| slice.start_ms) else { continue };
                availability.add(start_ms, &of(minute, |slice| (slice.counts.good, slice.counts.bad)));
                latency.add(start_ms, &of(minute, |slice| (slice.counts.in_time, slice.counts.late)));
            }
            day_ms = next_ms;
        }
        let objectives = vec![
            objective("availability", slo.availability, &availability, &names),
            objective("latency", slo.latency, &latency, &names),
        ];
        Ok(Report { month: month.to_string(), from_ms, to_ms, until_ms, objectives })
    }
}

fn of(minute: &[Slice], counts: impl Fn(&Slice) -> (u64, u64)) -> Vec<burn::Slice<i64>> {
    let slice = |slice: &Slice| {
        let Slice { start_ms: _, model, upstream, region, cause, counts: _ } = *slice;
        let (good, bad) = counts(slice);
        burn::Slice { model, upstream, region, cause, good, bad }
    };
    minute.iter().map(slice).filter(|it| it.good + it.bad > 0).collect()
}

fn objective(name: &str, allowance: Allowance, burn: &Burn<i64>, names: &HashMap<i64, String>) -> Objective {
    let name_of = |id: &i64| names.get(id).filter(|name| !name.is_empty()).map_or(NOBODY, String::as_str);
    let shares = |parts: &BTreeMap<i64, Part>| {
        let share = |(id, part): (&i64, &Part)| Share {
            name: name_of(id).to_owned(),
            good: part.good,
            bad: part.bad,
            burnt_seconds: seconds(part.burnt_us),
        };
        let mut shares: Vec<Share> = parts.iter().map(share).collect();
        shares.sort_by(|a, b| {
            b.burnt_seconds
                .total_cmp(&a.burnt_seconds)
                .then(b.bad.cmp(&a.bad))
                .then_with(|| a.name.cmp(&b.name))
        });
        shares
    };
    let Part { good, bad, burnt_us } = burn.whole.part;
    let budget_us = allowance.budget_us(burn.whole.to_ms - burn.whole.from_ms);
    let left_seconds = signed_seconds(burn.left_us(allowance));
    let rates = WINDOWS.iter().zip(&burn.windows);
    Objective {
        objective: name.to_owned(),
        promised: percent(allowance.objective_per_million()),
        kept: percent(burn.whole.part.good_per_million()),
        good,
        bad,
        budget_seconds: seconds(budget_us),
        burnt_seconds: seconds(burnt_us),
        left_seconds,
        left_fraction: left_seconds / seconds(budget_us.max(1)),
        burn_rates: rates
            .map(|((name, _), window)| ((*name).to_owned(), thousandths(window.rate_milli(allowance))))
            .collect(),
        minutes: burn.minutes,
        bad_minutes: burn.bad_minutes,
        by_cause: shares(&burn.by_cause),
        by_upstream: shares(&burn.by_upstream),
        by_region: shares(&burn.by_region),
        by_model: shares(&burn.by_model),
        worst_minutes: burn
            .worst
            .iter()
            .map(|minute| Minute {
                start_ms: minute.start_ms,
                start: time(minute.start_ms),
                good: minute.part.good,
                bad: minute.part.bad,
                burnt_seconds: seconds(minute.part.burnt_us),
                cause: name_of(&minute.cause).to_owned(),
                upstream: name_of(&minute.upstream).to_owned(),
            })
            .collect(),
    }
}

fn percent(per_million: u32) -> f64 {
    f64::from(per_million) / 10_000.0
}

#[expect(clippy::cast_precision_loss, reason = "a month has 42 bits of microseconds")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1_000_000.0
}

#[expect(clippy::cast_precision_loss, reason = "a month has 42 bits of microseconds")]
fn signed_seconds(us: i64) -> f64 {
    us as f64 / 1_000_000.0
}

#[expect(clippy::cast_precision_loss, reason = "a rate is at most two million")]
fn thousandths(milli: u64) -> f64 {
    milli as f64 / 1000.0
}

/// A time for people, in UTC.
#[must_use]
pub fn time(ms: i64) -> String {
    let since = Duration::from_millis(u64::try_from(ms).unwrap_or_default());
    humantime::format_rfc3339_seconds(UNIX_EPOCH + since).to_string()
}

/// Seconds for people, such as `21m 36s`.
#[must_use]
pub fn span(seconds: f64) -> String {
    let tenths = Duration::try_from_secs_f64((seconds.abs() * 10.0).round() / 10.0).unwrap_or(Duration::MAX);
    let sign = if seconds < 0.0 && !tenths.is_zero() { "-" } else { "" };
    format!("{sign}{}", humantime::format_duration(tenths))
}

impl Report {
    /// The month in Markdown, to be sent to whoever was promised it.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out = format!("# What was promised and kept in {}\n\n", self.month);
        let so_far = if self.until_ms < self.to_ms { ", as far as it has come" } else { "" };
        line(&mut out, &format!("From {} to {} (UTC){so_far}.", time(self.from_ms), time(self.until_ms)));
        line(&mut out, "");
        line(&mut out, "| | promised | kept | good calls | bad calls | budget | burnt | left |");
        line(&mut out, "| --- | --: | --: | --: | --: | --: | --: | --: |");
        for it in &self.objectives {
            let row = format!(
                "| {} | {} % | {:.4} % | {} | {} | {} | {} | {} ({:.1} %) |",
                it.objective,
                it.promised,
                it.kept,
                it.good,
                it.bad,
                span(it.budget_seconds),
                span(it.burnt_seconds),
                span(it.left_seconds),
                it.left_fraction * 100.0,
            );
            line(&mut out, &row);
        }
        for it in &self.objectives {
            it.markdown(&mut out);
        }
        out
    }
}

impl Objective {
    fn markdown(&self, out: &mut String) {
        line(out, &format!("\n## {}\n", self.objective));
        let minutes = format!("Of {} minutes with calls {} had bad ones.", self.minutes, self.bad_minutes);
        line(out, &minutes);
        if self.bad == 0 {
            return;
        }
        let parts = [
            ("cause", &self.by_cause),
            ("upstream", &self.by_upstream),
            ("region", &self.by_region),
            ("model", &self.by_model),
        ];
        for (name, shares) in parts {
            line(out, &format!("\n| {name} | bad calls | burnt |\n| --- | --: | --: |"));
            for share in shares.iter().filter(|share| share.bad > 0) {
                line(
                    out,
                    &format!("| {} | {} | {} |", cell(&share.name), share.bad, span(share.burnt_seconds)),
                );
            }
        }
        line(out, "\n| worst minutes | good | bad | burnt | mostly |\n| --- | --: | --: | --: | --- |");
        for minute in &self.worst_minutes {
            let row = format!(
                "| {} | {} | {} | {} | {}, {} |",
                minute.start,
                minute.good,
                minute.bad,
                span(minute.burnt_seconds),
                minute.cause,
                cell(&minute.upstream),
            );
            line(out, &row);
        }
    }
}

/// A name may have any character of a config's key; a bar would end its cell.
fn cell(name: &str) -> String {
    name.replace('|', "\\|")
}

fn line(out: &mut String, text: &str) {
    // Writing to a string does not fail.
    let _written = writeln!(out, "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_written_for_people() {
        assert_eq!(span(1296.0), "21m 36s");
        assert_eq!(span(-24.04), "-24s");
        assert_eq!(span(0.0), "0s");
        assert_eq!(span(-0.01), "0s");
        assert_eq!(span(1.25), "1s 300ms");
    }

    #[test]
    fn a_name_does_not_end_its_cell() {
        assert_eq!(cell("a|b"), "a\\|b");
    }
}
