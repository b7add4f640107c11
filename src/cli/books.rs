//! Verbs on the books: asked of the running gateway, or done on the ledger itself when none runs.

use std::io::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use filters::money::Amount;
use serde_json::Value;

use super::fleet;
use crate::admin::explain::Asked;
use crate::admin::token_file;
use crate::books::{Books, Verb};
use crate::boot::{ledger_file, make_folder};
use crate::config::Config;
use crate::config::checked::Store;
use crate::ledger::{Ledger, Sqlite};

/// How long the running gateway may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes one line to standard output.
pub(super) fn say(line: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout().lock(), "{line}")?;
    Ok(())
}

/// Does a verb and answers what came of it.
pub(super) fn perform(config: &Config, verb: Verb) -> anyhow::Result<Value> {
    if let Some(answer) = ask(config, &verb)? {
        return Ok(answer);
    }
    Ok(Books::new(open(config)?, None).perform(verb)?)
}

/// The ledger that the config names. No gateway of this config runs: what moves comes from what is free.
fn open(config: &Config) -> anyhow::Result<Box<dyn Ledger>> {
    match &config.store {
        Store::Embedded => {
            let file = ledger_file(&config.data);
            make_folder(&config.data)?;
            let ledger = Sqlite::open(&file).with_context(|| format!("cannot open {}", file.display()))?;
            Ok(Box::new(ledger))
        }
        Store::Fleet(_) => Ok(Box::new(fleet::ledger(config)?)),
    }
}

/// Asks the running gateway; `None` when none runs.
fn ask(config: &Config, verb: &Verb) -> anyhow::Result<Option<Value>> {
    let text = post(config, "books", &serde_json::to_vec(verb)?)?;
    text.map(|text| Ok(serde_json::from_str(&text)?)).transpose()
}

/// What would happen to a request, as the running gateway sees it.
pub(super) fn explain(config: &Config, request: &[u8], asked: &Asked) -> anyhow::Result<()> {
    let mut path = format!("explain?surface={}", asked.surface.as_deref().unwrap_or("chat"));
    if let Some(tokens) = asked.default_output_tokens {
        path.push_str(&format!("&default_output_tokens={tokens}"));
    }
    let text = post(config, &path, request)?;
    say(text.context("no gateway runs on this config: what it has learnt is in its memory")?.trim_end())
}

/// Posts JSON to the running gateway's admin port; `None` when none runs.
pub(super) fn post(config: &Config, path: &str, body: &[u8]) -> anyhow::Result<Option<String>> {
    let Ok(token) = std::fs::read_to_string(token_file(&config.data)) else { return Ok(None) };
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .build()
        .into();
    let url = format!("http://{}/{path}", config.listen.admin);
    let request = agent.post(&url).header("content-type", "application/json");
    let sent = request.header("authorization", format!("Bearer {token}")).send(body);
    let mut answer = match sent {
        Ok(answer) => answer,
        // Nobody listens: the token is what an earlier process left.
        Err(ureq::Error::ConnectionFailed | ureq::Error::Io(_) | ureq::Error::HostNotFound) => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("cannot ask the gateway at {url}")),
    };
    let text = answer.body_mut().read_to_string()?;
    anyhow::ensure!(answer.status().is_success(), "{text}");
    Ok(Some(text))
}

/// Does a verb and shows what came of it, as JSON or as `show` has it.
pub(super) fn run(
    config: &Config,
    verb: Verb,
    json: bool,
    show: impl FnOnce(&Value) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let answer = perform(config, verb)?;
    if json { say(&answer.to_string()) } else { show(&answer) }
}

fn rows(answer: &Value) -> &[Value] {
    answer.as_array().map(Vec::as_slice).unwrap_or_default()
}

pub(super) fn amount(row: &Value, key: &str) -> String {
    Amount::from_nano(row[key].as_i64().unwrap_or_default()).to_string()
}

/// As text, since JSON's numbers know no width.
pub(super) fn number(row: &Value, key: &str) -> String {
    row[key].to_string()
}

fn word<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}

pub(super) fn time(row: &Value, key: &str) -> String {
    let Some(millis) = row[key].as_u64() else { return "-".to_owned() };
    humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + Duration::from_millis(millis)).to_string()
}

pub(super) fn show_accounts(answer: &Value) -> anyhow::Result<()> {
    say(&format!("{:<24} {:>20} {:>8}", "ACCOUNT", "BALANCE", "CALLS"))?;
    for row in rows(answer) {
        say(&format!(
            "{:<24} {:>20} {:>8}",
            word(row, "name"),
            amount(row, "balance_nano"),
            number(row, "calls")
        ))?;
    }
    Ok(())
}

pub(super) fn show_statement(answer: &Value) -> anyhow::Result<()> {
    say(&format!("{:<20} {:<10} {:>18} {:>8} {:>8}  WHAT", "TIME", "KIND", "AMOUNT", "PROMPT", "OUTPUT"))?;
    for row in rows(answer) {
        let mark = if row["estimated"] == true { " (estimated)" } else { "" };
        let line = format!(
            "{:<20} {:<10} {:>18} {:>8} {:>8}  {} {} {}{mark}",
            time(row, "at_ms"),
            word(row, "kind"),
            amount(row, "amount_nano"),
            number(row, "prompt_tokens"),
            number(row, "completion_tokens"),
            word(row, "what"),
            word(row, "model"),
            word(row, "endpoint"),
        );
        say(line.trim_end())?;
    }
    Ok(())
}

pub(super) fn show_keys(answer: &Value) -> anyhow::Result<()> {
    say(&format!("{:<14} {:<20} {:<14} {:<8} {:<22} NAME", "ID", "ACCOUNT", "KEY", "STATE", "ENDS"))?;
    for row in rows(answer) {
        let state = if row["good"] == true { "good" } else { "ended" };
        say(&format!(
            "{:<14} {:<20} {:<14} {state:<8} {:<22} {}",
            word(row, "id"),
            word(row, "account"),
            word(row, "hint"),
            time(row, "expires_ms"),
            word(&row["settings"], "name"),
        ))?;
    }
    Ok(())
}

pub(super) fn show_new_key(answer: &Value) -> anyhow::Result<()> {
    say(word(answer, "key"))?;
    if answer["old_key"].is_string() {
        say(&format!(
            "The old key {} ends at {}.",
            word(answer, "old_key"),
            time(answer, "old_key_ends_ms")
        ))?;
    }
    say("Keep it: it is not shown again.")
}

pub(super) fn show_verified(answer: &Value) -> anyhow::Result<()> {
    say(&format!(
        "The books are right. Accounts: {}, transfers: {}, settled holds: {}, turnover: {}.",
        answer["accounts"],
        answer["transfers"],
        answer["holds"],
        amount(answer, "turnover_nano")
    ))
}
