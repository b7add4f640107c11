//! Verbs that read the books. They open the ledger's file for reading, beside a running gateway.

use std::io::Write as _;

use filters::money::Amount;

use crate::boot::ledger_file;
use crate::config::Config;
use crate::ledger::port::StatementLine;
use crate::ledger::{Ledger as _, LedgerError, Sqlite};

/// Writes one line to standard output.
pub(super) fn say(line: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout().lock(), "{line}")?;
    Ok(())
}

fn open(config: &Config) -> anyhow::Result<Sqlite> {
    let file = ledger_file(&config.data);
    anyhow::ensure!(file.exists(), "there is no ledger at {}: start the gateway once", file.display());
    Ok(Sqlite::open_for_reading(&file)?)
}

pub(super) fn show(config: &Config, name: Option<&str>, json: bool) -> anyhow::Result<()> {
    let mut rows = open(config)?.accounts()?;
    if let Some(name) = name {
        rows.retain(|row| row.name == name);
        if rows.is_empty() {
            return Err(LedgerError::NoAccount(name.to_owned()).into());
        }
    }
    if json {
        return say(&serde_json::to_string(&rows)?);
    }
    say(&format!("{:<24} {:>20} {:>8}", "ACCOUNT", "BALANCE", "CALLS"))?;
    for row in rows {
        let balance = Amount::from_nano(row.balance_nano).to_string();
        say(&format!("{:<24} {balance:>20} {:>8}", row.name, row.calls))?;
    }
    Ok(())
}

pub(super) fn statement(config: &Config, name: &str, limit: u32, json: bool) -> anyhow::Result<()> {
    let lines = open(config)?.statement(name, limit)?;
    if json {
        return say(&serde_json::to_string(&lines)?);
    }
    say(&format!(
        "{:<24} {:<10} {:>18} {:>8} {:>8}  {}",
        "TIME", "KIND", "AMOUNT", "PROMPT", "OUTPUT", "WHAT"
    ))?;
    for line in lines {
        let StatementLine {
            at_ms,
            kind,
            amount_nano,
            what,
            model,
            endpoint,
            prompt_tokens,
            completion_tokens,
            estimated,
        } = line;
        let time = humantime::format_rfc3339_millis(
            std::time::UNIX_EPOCH + std::time::Duration::from_millis(at_ms.unsigned_abs()),
        );
        let amount = Amount::from_nano(amount_nano).to_string();
        let mark = if estimated { " (estimated)" } else { "" };
        say(&format!(
            "{time:<24} {kind:<10} {amount:>18} {prompt_tokens:>8} {completion_tokens:>8}  {what} {model} {endpoint}{mark}"
        ))?;
    }
    Ok(())
}

pub(super) fn verify(config: &Config, json: bool) -> anyhow::Result<()> {
    let found = open(config)?.verify()?;
    if json {
        return say(&serde_json::to_string(&found)?);
    }
    say(&format!(
        "The books are right: {} accounts, {} transfers, {} settled holds, turnover {}.",
        found.accounts,
        found.transfers,
        found.holds,
        Amount::from_nano(found.turnover_nano)
    ))
}
