//! Verbs on what happened: read from the records themselves, whether or not a gateway runs.

use anyhow::Context as _;
use clap::Args;

use super::books::say;
use super::fleet;
use crate::admin::records::{Asked, AskedMonth, Failovers, ROWS_DEFAULT};
use crate::clock;
use crate::config::Config;
use crate::config::checked::Store;
use crate::record::attempts::{Attempt, By, Group};
use crate::record::report::{Objective, Report, Share, span, time};
use crate::record::{Home, Records};

/// Which failovers.
#[derive(Debug, Args)]
pub(super) struct FailoverArgs {
    /// Of this reason alone, such as first_byte or status_5xx.
    #[arg(long)]
    reason: Option<String>,
    /// Count them by this.
    #[arg(long, value_enum)]
    by: Option<By>,
    /// How far back.
    #[arg(long, default_value = "1h")]
    since: humantime::Duration,
    /// Everything that was decided about one call, in order, however long ago.
    #[arg(long, conflicts_with_all = ["reason", "by"])]
    request: Option<String>,
    /// How many lines at most.
    #[arg(long, default_value_t = ROWS_DEFAULT)]
    limit: u32,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Which month.
#[derive(Debug, Args)]
pub(super) struct SloArgs {
    /// As 2026-11. Default: this one.
    #[arg(long)]
    month: Option<String>,
    /// As a report in Markdown.
    #[arg(long, conflicts_with = "json")]
    report: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// What the config's gateways have recorded.
fn open(config: &Config) -> anyhow::Result<Records> {
    let home = match &config.store {
        Store::Embedded => Home::Folder(config.data.clone()),
        Store::Fleet(_) => Home::Fleet(fleet::ledger(config)?),
    };
    home.open_for_reading().context("there are no records to read: has a gateway served from here?")
}

/// Shows failovers, or one call's attempts.
pub(super) fn failovers(config: &Config, args: FailoverArgs) -> anyhow::Result<()> {
    let FailoverArgs { reason, by, since, request, limit, json } = args;
    let asked = Asked { request, reason, by, since: Some(since.to_string()), limit: Some(limit) };
    let found = asked.of(&open(config)?, clock::unix_ms())?;
    if json {
        return say(&serde_json::to_string(&found)?);
    }
    match found {
        Failovers::Attempts(attempts) if attempts.is_empty() => say("Nothing was found."),
        Failovers::Groups(groups) if groups.is_empty() => say("Nothing was found."),
        Failovers::Attempts(attempts) => show_attempts(&attempts),
        Failovers::Groups(groups) => show_groups(&groups),
    }
}

fn show_attempts(attempts: &[Attempt]) -> anyhow::Result<()> {
    let width = widest(attempts.iter().map(|it| it.candidate.as_str()), 9);
    say(&format!(
        "{:<20} {:<36} {:>2} {:<width$} {:<8} {:<16} {:>8} {:>9}  {:<width$} MODEL",
        "TIME", "REQUEST", "N", "CANDIDATE", "OUTCOME", "REASON", "MS", "LEFT MS", "NEXT"
    ))?;
    for it in attempts {
        say(&format!(
            "{:<20} {:<36} {:>2} {:<width$} {:<8} {:<16} {:>8} {:>9}  {:<width$} {}",
            time(it.at_ms),
            it.request_id,
            it.attempt,
            it.candidate,
            it.outcome,
            it.reason,
            it.elapsed_ms,
            it.budget_left_ms,
            it.next,
            it.model,
        ))?;
    }
    Ok(())
}

fn show_groups(groups: &[Group]) -> anyhow::Result<()> {
    let width = widest(groups.iter().map(|it| it.key.as_str()), 8);
    say(&format!(
        "{:<width$} {:>10} {:>8} {:>9} {:>9}  LATEST",
        "", "FAILOVERS", "CALLS", "MEAN MS", "MOST MS"
    ))?;
    for it in groups {
        say(&format!(
            "{:<width$} {:>10} {:>8} {:>9} {:>9}  {}",
            if it.key.is_empty() { "-" } else { it.key.as_str() },
            it.failovers,
            it.calls,
            it.elapsed_ms.checked_div(it.failovers).unwrap_or_default(),
            it.elapsed_ms_max,
            time(it.last_ms),
        ))?;
    }
    Ok(())
}

/// The longest of some names, as it is shown.
fn widest<'a>(names: impl Iterator<Item = &'a str>, at_least: usize) -> usize {
    names.map(|name| name.chars().count()).max().unwrap_or_default().max(at_least)
}

/// Shows what is left of a month.
pub(super) fn slo(config: &Config, args: SloArgs) -> anyhow::Result<()> {
    let SloArgs { month, report: as_report, json } = args;
    let report = AskedMonth { month }.of(&open(config)?, &config.slo, clock::unix_ms())?;
    if json {
        return say(&serde_json::to_string(&report)?);
    }
    if as_report {
        return say(report.markdown().trim_end());
    }
    show(&report)
}

fn show(report: &Report) -> anyhow::Result<()> {
    say(&format!("{} as far as {}", report.month, time(report.until_ms)))?;
    for objective in &report.objectives {
        show_objective(objective)?;
    }
    Ok(())
}

fn show_objective(it: &Objective) -> anyhow::Result<()> {
    say(&format!("\n{}: {} % promised, {:.4} % kept", it.objective, it.promised, it.kept))?;
    say(&format!("  calls        {} good, {} bad", it.good, it.bad))?;
    say(&format!("  minutes      {} with calls, {} with bad ones", it.minutes, it.bad_minutes))?;
    say(&format!(
        "  budget       {} left of {} ({:.1} %), {} burnt",
        span(it.left_seconds),
        span(it.budget_seconds),
        it.left_fraction * 100.0,
        span(it.burnt_seconds)
    ))?;
    let rates: Vec<String> =
        it.burn_rates.iter().map(|(window, rate)| format!("{window} {rate:.2}")).collect();
    say(&format!("  burn rate    {}", rates.join(", ")))?;
    for (name, shares) in [
        ("by cause", &it.by_cause),
        ("by upstream", &it.by_upstream),
        ("by region", &it.by_region),
        ("by model", &it.by_model),
    ] {
        show_shares(name, shares)?;
    }
    if !it.worst_minutes.is_empty() {
        say("  worst minutes")?;
    }
    for minute in &it.worst_minutes {
        say(&format!(
            "    {} {:>7} bad {:>7} good {:>12}  {} {}",
            minute.start,
            minute.bad,
            minute.good,
            span(minute.burnt_seconds),
            minute.cause,
            minute.upstream
        ))?;
    }
    Ok(())
}

fn show_shares(name: &str, shares: &[Share]) -> anyhow::Result<()> {
    let bad: Vec<&Share> = shares.iter().filter(|share| share.bad > 0).collect();
    if bad.is_empty() {
        return Ok(());
    }
    say(&format!("  {name}"))?;
    let width = widest(bad.iter().map(|share| share.name.as_str()), 20);
    for share in bad {
        say(&format!("    {:<width$} {:>7} bad {:>12}", share.name, share.bad, span(share.burnt_seconds)))?;
    }
    Ok(())
}
