//! Incidents of the status page: asked of the running gateway, or done on the records themselves when none runs.

use std::collections::BTreeSet;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::Value;

use super::books::{post, say};
use super::fleet;
use crate::boot::make_folder;
use crate::clock;
use crate::config::Config;
use crate::config::checked::Store;
use crate::record::Records;
use crate::record::incidents::{Texts, Verb};
use crate::status::incident_as_json;

/// How bad an incident may be.
const SEVERITIES: [&str; 3] = ["degraded", "partly_down", "down"];

#[derive(Debug, Subcommand)]
pub(super) enum Incidents {
    /// Those that are open.
    List {
        /// The closed ones too.
        #[arg(long)]
        all: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Open one.
    Open {
        #[command(flatten)]
        title: Title,
        #[command(flatten)]
        text: Text,
        /// How bad it is.
        #[arg(long, value_parser = SEVERITIES, default_value = "partly_down")]
        severity: String,
        /// A model that it hits; repeat it for more. Default: all.
        #[arg(long = "model")]
        models: Vec<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Say something about one. The machine leaves it alone from then on.
    Update {
        /// Its number, from the list.
        id: i64,
        #[command(flatten)]
        text: Text,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Close one.
    Close {
        /// Its number, from the list.
        id: i64,
        #[command(flatten)]
        text: Text,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Change one. The machine leaves it alone from then on.
    Edit {
        /// Its number, from the list.
        id: i64,
        #[command(flatten)]
        title: Title,
        /// How bad it is.
        #[arg(long, value_parser = SEVERITIES)]
        severity: Option<String>,
        /// A model that it hits, instead of those that it names; repeat it for more.
        #[arg(long = "model")]
        models: Vec<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// What it is called.
#[derive(Debug, Args)]
pub(super) struct Title {
    /// What it is called, as `Answers are slow` or with its language as `fa=…`; repeat it for more languages.
    #[arg(long = "title")]
    titles: Vec<String>,
}

/// What is said.
#[derive(Debug, Args)]
pub(super) struct Text {
    /// What is said, or with its language as `ar=…`; repeat it for more languages.
    #[arg(long = "text")]
    texts: Vec<String>,
}

impl Incidents {
    pub(super) fn run(self, config: &Config) -> anyhow::Result<()> {
        let texts = |given: Vec<String>| by_language(config, given);
        let some =
            |models: Vec<String>| (!models.is_empty()).then(|| models.into_iter().collect::<BTreeSet<_>>());
        let (verb, json) = match self {
            Self::List { all, json } => (Verb::List { all }, json),
            Self::Open { title, text, severity, models, json } => {
                let (title, text) = (texts(title.titles), texts(text.texts));
                (Verb::Open { title, text, severity, models: some(models).unwrap_or_default() }, json)
            }
            Self::Update { id, text, json } => (Verb::Update { id, text: texts(text.texts) }, json),
            Self::Close { id, text, json } => (Verb::Close { id, text: texts(text.texts) }, json),
            Self::Edit { id, title, severity, models, json } => {
                let title = Some(texts(title.titles)).filter(|title| !title.is_empty());
                (Verb::Edit { id, title, severity, models: some(models) }, json)
            }
        };
        let found = perform(config, verb)?;
        if json { say(&found.to_string()) } else { show(&found) }
    }
}

fn perform(config: &Config, verb: Verb) -> anyhow::Result<Value> {
    if let Some(answer) = post(config, "incidents", &serde_json::to_vec(&verb)?)? {
        return Ok(serde_json::from_str(&answer)?);
    }
    let records = match &config.store {
        Store::Embedded => {
            make_folder(&config.data)?;
            Records::open(&config.data).context("cannot open the records")?
        }
        Store::Fleet(_) => Records::of_fleet(fleet::ledger(config)?),
    };
    let found = records.incident(clock::unix_ms(), verb)?;
    Ok(found.iter().map(incident_as_json).collect())
}

/// Texts by their languages. One that names none is in the page's first.
fn by_language(config: &Config, given: Vec<String>) -> Texts {
    let first = config.status.languages.first().map_or("en", |language| language.code());
    let named = |text: String| match text.split_once('=') {
        Some((code, rest)) if code.len() == 2 && code.bytes().all(|b| b.is_ascii_lowercase()) => {
            (code.to_owned(), rest.to_owned())
        }
        Some(_) | None => (first.to_owned(), text),
    };
    given.into_iter().map(named).collect()
}

fn show(found: &Value) -> anyhow::Result<()> {
    let all = found.as_array().map(Vec::as_slice).unwrap_or_default();
    if all.is_empty() {
        return say("No incidents.");
    }
    for one in all {
        let text = |name: &str| one[name].as_str().unwrap_or_default();
        let models: Vec<&str> =
            one["models"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let models = if models.is_empty() { "everything".to_owned() } else { models.join(", ") };
        let state = match one["closed_at"].as_str() {
            Some(at) => format!("closed {at}"),
            None => "open".to_owned(),
        };
        let whose = if one["automatic"] == true && one["edited"] == false { "automatic" } else { "by hand" };
        let titles = one["title"].as_object();
        let title = titles.and_then(|all| all.values().next()?.as_str()).unwrap_or("(named by the page)");
        say(&format!(
            "{:>5}  {:<11}  {state}  {whose}  since {}  {models}: {title}",
            one["id"],
            text("severity"),
            text("opened_at")
        ))?;
    }
    Ok(())
}
