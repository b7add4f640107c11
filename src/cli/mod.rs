//! The command line: `tollgate <verb>`.

mod books;
mod catalogue;
mod fleet;
mod incidents;
mod records;
mod sketch;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use filters::dialect::Operation;

use self::incidents::Incidents;
use self::records::{FailoverArgs, SloArgs};
use self::sketch::Sketch;
use crate::admin::explain::Asked;
use crate::books::Direction;
use crate::config::{self, Config, Version};
use crate::edge::Tls;
use crate::mock::{self, Script};
use crate::ops::log::{self, Format};
use crate::ops::tracker;
use crate::reload::{self, Source};
use crate::serve::{self, Left};
use crate::settings::{AccountSettings, KeySettings, LimitSpec};

/// Exit status for a config that cannot be used (`EX_USAGE` of `sysexits.h`).
pub const EXIT_CONFIG: u8 = 64;
/// Exit status of a gateway that had to cut calls when its drain was over.
pub const EXIT_CUT: u8 = 3;

/// An edge gateway for AI model APIs.
#[derive(Debug, Parser)]
#[command(version, about)]
pub struct Cli {
    /// The config file.
    #[arg(long, short, global = true, default_value = "conf/tollgate.yaml", env = "TOLLGATE_CONFIG")]
    config: PathBuf,
    /// How log lines look.
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    log: Format,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Serve calls until SIGTERM. SIGHUP reads the config file anew.
    Serve {
        /// Take over from the process that serves now: start this, then send SIGQUIT to that.
        #[arg(long)]
        upgrade: bool,
    },
    /// Check the config file and say everything that is wrong with it.
    Check,
    /// Bring the schema of the fleet's ledger up to this binary's. Nodes never do it by themselves.
    Migrate {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Accounts and what happened on them.
    #[command(subcommand)]
    Accounts(Accounts),
    /// Callers' keys.
    #[command(subcommand)]
    Keys(Keys),
    /// The books as a whole.
    #[command(subcommand)]
    Ledger(Ledger),
    /// The catalogue of a fleet: providers and models for all nodes whose config files name none.
    #[command(subcommand)]
    Catalogue(Catalogue),
    /// Attempts that failed, by what they have in common, or all attempts of one call.
    Failovers(FailoverArgs),
    /// What is left of this month's error budget, and what burnt the rest.
    Slo(SloArgs),
    /// What the status page says went wrong.
    #[command(subcommand)]
    Incidents(Incidents),
    /// Say what would happen to a request: candidates and why, timers, the hold. Sends nothing.
    Explain {
        /// The file with the request's body.
        request: Option<PathBuf>,
        #[command(flatten)]
        sketch: Sketch,
        /// It is for `POST /v1/messages`.
        #[arg(long, conflicts_with = "surface")]
        anthropic: bool,
        /// What it asks for: chat, completions, responses, embeddings, messages or count_tokens. Default: chat.
        #[arg(long, value_parser = Operation::ALL.map(Operation::word))]
        surface: Option<String>,
        /// The key's own default of output tokens, where it has one.
        #[arg(long)]
        default_output_tokens: Option<u64>,
    },
    /// Play a provider, for demos and tests.
    Mock {
        /// Where to listen.
        #[arg(long, default_value = "127.0.0.1:9101")]
        listen: SocketAddr,
        /// How to answer, as JSON; see `docs/mock.md`.
        #[arg(long, default_value = "{}")]
        script: String,
    },
}

#[derive(Debug, Subcommand)]
enum Catalogue {
    /// Check `providers`, `models` and `aliases` of a file and make them the fleet's. Variables stay unfilled.
    Publish {
        /// The file. Default: the config file itself.
        file: Option<PathBuf>,
        /// Who did it, for the books.
        #[arg(long, default_value = "by hand")]
        by: String,
    },
    /// Print the version and the text of the catalogue that was published last.
    Show,
}

#[derive(Debug, Subcommand)]
enum Accounts {
    /// Make an account, or set its limits.
    Create {
        /// The account's name.
        name: String,
        #[command(flatten)]
        limits: LimitArgs,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Book prepaid money.
    TopUp(MoveArgs),
    /// Give prepaid money back; only what is not set aside for running calls.
    Refund(MoveArgs),
    /// Correct a balance in the customer's favour.
    Credit(MoveArgs),
    /// Correct a balance in yours.
    Debit(MoveArgs),
    /// Balances of all accounts, or of one.
    Show {
        /// The account's name.
        name: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// What an account paid and received, latest first.
    Statement {
        /// The account's name.
        name: String,
        /// How many lines at most.
        #[arg(long, default_value_t = 50)]
        limit: u32,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Money in or out.
#[derive(Debug, Args)]
struct MoveArgs {
    /// The account's name.
    name: String,
    /// USD, such as 25.00.
    usd: String,
    /// Makes it happen once: your payment's or ticket's number.
    #[arg(long)]
    reference: String,
    /// Why.
    #[arg(long, default_value = "by hand")]
    reason: String,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct LimitArgs {
    /// Requests in any sixty seconds.
    #[arg(long)]
    rpm: Option<u64>,
    /// Tokens in any sixty seconds.
    #[arg(long)]
    tpm: Option<u64>,
    /// Calls at the same time.
    #[arg(long)]
    concurrency: Option<u64>,
    /// USD per day.
    #[arg(long)]
    budget_day: Option<String>,
    /// USD per month.
    #[arg(long)]
    budget_month: Option<String>,
    /// Where midnight is.
    #[arg(long)]
    time_zone: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Keys {
    /// Make a key and show it, once.
    Create {
        /// The account's name.
        account: String,
        /// What you call it.
        #[arg(long, default_value = "")]
        name: String,
        /// A model that it may use; repeat it for more. Default: all.
        #[arg(long = "model")]
        models: Vec<String>,
        /// The output bound where a caller gives none.
        #[arg(long)]
        default_output_tokens: Option<u64>,
        /// Lower an output bound that the balance cannot carry.
        #[arg(long)]
        clamp_output: bool,
        /// End it after this time, such as 30d.
        #[arg(long)]
        expires_in: Option<humantime::Duration>,
        #[command(flatten)]
        limits: LimitArgs,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Keys of all accounts, or of one.
    List {
        /// The account's name.
        account: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// End a key now.
    Revoke {
        /// The key, or its id from the list.
        key: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make a new key with the same settings; the old one ends after the overlap.
    Rotate {
        /// The key, or its id from the list.
        key: String,
        /// How long both are good.
        #[arg(long, default_value = "1d")]
        overlap: humantime::Duration,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
enum Ledger {
    /// Prove that the books are right; names the first thing that is not.
    Verify {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// A fleet's processes that have not ended: each is one boot.
    Boots {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Where a fleet's Redis and its books differ, and why; at a quiet moment nothing does.
    Reconcile {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Give a boot of a fleet up: its process is dead and its journal gone. What it may have spent goes to suspense.
    Lost {
        /// Its number, from the list.
        boot: i64,
    },
    /// Give a customer back what lost boots turn out not to have spent.
    Restore {
        /// The account's name.
        name: String,
        /// USD, such as 25.00.
        usd: String,
        /// Makes it happen once: your ticket's number.
        #[arg(long)]
        reference: String,
        /// Why.
        #[arg(long, default_value = "by hand")]
        reason: String,
    },
}

impl Ledger {
    fn run(self, config: &Config) -> anyhow::Result<()> {
        match self {
            Self::Verify { json } => {
                books::run(config, crate::books::Verb::Verify, json, books::show_verified)
            }
            Self::Boots { json } => fleet::boots(config, json),
            Self::Reconcile { json } => fleet::reconcile(config, json),
            Self::Lost { boot } => fleet::lost(config, boot),
            Self::Restore { name, usd, reference, reason } => {
                fleet::restore(config, &name, &usd, &reference, &reason)
            }
        }
    }
}

impl LimitArgs {
    fn spec(self) -> LimitSpec {
        let Self { rpm, tpm, concurrency, budget_day, budget_month, time_zone } = self;
        LimitSpec { rpm, tpm, concurrency, budget_day, budget_month, time_zone }
    }
}

impl Accounts {
    fn run(self, config: &Config) -> anyhow::Result<()> {
        let (what, args) = match self {
            Self::Create { name, limits, json } => {
                let settings = AccountSettings { limits: limits.spec(), ..AccountSettings::default() };
                let verb = crate::books::Verb::Account { name: name.clone(), settings };
                return books::run(config, verb, json, |_| books::say(&format!("Account {name} is there.")));
            }
            Self::Show { name, json } => {
                return books::run(config, crate::books::Verb::Accounts { name }, json, books::show_accounts);
            }
            Self::Statement { name, limit, json } => {
                let verb = crate::books::Verb::Statement { account: name, limit };
                return books::run(config, verb, json, books::show_statement);
            }
            Self::TopUp(args) => (Direction::TopUp, args),
            Self::Refund(args) => (Direction::Refund, args),
            Self::Credit(args) => (Direction::Credit, args),
            Self::Debit(args) => (Direction::Debit, args),
        };
        let MoveArgs { name, usd, reference, reason, json } = args;
        let verb = crate::books::Verb::Move { account: name, what, usd, reference, reason };
        books::run(config, verb, json, |answer| {
            books::say(if answer["booked"] == true {
                "Booked."
            } else {
                "Booked already under that reference."
            })
        })
    }
}

impl Keys {
    fn run(self, config: &Config) -> anyhow::Result<()> {
        match self {
            Self::Create {
                account,
                name,
                models,
                default_output_tokens,
                clamp_output,
                expires_in,
                limits,
                json,
            } => {
                let settings = KeySettings {
                    name,
                    models: Some(models).filter(|m| !m.is_empty()),
                    default_output_tokens,
                    clamp_output,
                    limits: limits.spec(),
                    ..KeySettings::default()
                };
                let expires_in_seconds = expires_in.map(|span| span.as_secs());
                let verb = crate::books::Verb::NewKey { account, settings, expires_in_seconds };
                books::run(config, verb, json, books::show_new_key)
            }
            Self::List { account, json } => {
                books::run(config, crate::books::Verb::Keys { account }, json, books::show_keys)
            }
            Self::Revoke { key, json } => {
                books::run(config, crate::books::Verb::Revoke { key }, json, |_| books::say("Revoked."))
            }
            Self::Rotate { key, overlap, json } => {
                let verb = crate::books::Verb::Rotate { key, overlap_seconds: overlap.as_secs() };
                books::run(config, verb, json, books::show_new_key)
            }
        }
    }
}

impl Cli {
    /// Does what was asked.
    ///
    /// # Errors
    /// [`config::Faults`] for a config that cannot be used, anything else as its own error.
    pub fn run(self) -> anyhow::Result<Left> {
        let done = match self.verb {
            Verb::Serve { upgrade } => {
                let (config, version) = load_version(&self.config)?;
                let port = config.listen.callers.first().map_or(0, |listener| listener.address.port());
                let (_reporting, alarms) = tracker::start(config.tracker.as_ref(), &tracker::node_name(port));
                let _writing = log::start(self.log, alarms);
                return serve::run(config, Source { file: self.config, version }, upgrade);
            }
            Verb::Check => {
                let config = load(&self.config)?;
                for files in config.listen.callers.iter().filter_map(|listener| listener.tls.as_ref()) {
                    Tls::load(files)?;
                }
                let (models, endpoints) = (config.catalogue.models.len(), config.catalogue.endpoints.len());
                books::say(&format!(
                    "{}: good. Models: {models}, routes: {endpoints}.",
                    self.config.display()
                ))
            }
            Verb::Migrate { json } => fleet::migrate(&load(&self.config)?, json),
            Verb::Catalogue(verb) => {
                let config = load(&self.config)?;
                match verb {
                    Catalogue::Publish { file, by } => {
                        catalogue::publish(&config, &file.unwrap_or(self.config), &by)
                    }
                    Catalogue::Show => catalogue::show(&config),
                }
            }
            Verb::Accounts(verb) => verb.run(&load(&self.config)?),
            Verb::Keys(verb) => verb.run(&load(&self.config)?),
            Verb::Ledger(verb) => verb.run(&load(&self.config)?),
            Verb::Failovers(args) => records::failovers(&load(&self.config)?, args),
            Verb::Slo(args) => records::slo(&load(&self.config)?, args),
            Verb::Incidents(verb) => verb.run(&load(&self.config)?),
            Verb::Explain { request, sketch, anthropic, surface, default_output_tokens } => {
                let surface = surface.or_else(|| anthropic.then(|| Operation::Messages.word().to_owned()));
                let operation = Operation::ALL.into_iter().find(|it| Some(it.word()) == surface.as_deref());
                let body = match (request, sketch.body(operation.unwrap_or(Operation::Chat))) {
                    (Some(file), _) => {
                        std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?
                    }
                    (None, sketch) => sketch.context("name a file or a `--model`")?.into_bytes(),
                };
                books::explain(&load(&self.config)?, &body, &Asked { surface, default_output_tokens })
            }
            Verb::Mock { listen, script } => {
                let script: Script = serde_json::from_str(&script).context("--script")?;
                let _writing = log::start(self.log, None);
                play(listen, script)
            }
        };
        done.map(|()| Left::Drained)
    }
}

fn load(path: &Path) -> anyhow::Result<Config> {
    Ok(load_version(path)?.0)
}

fn load_version(path: &Path) -> anyhow::Result<(Config, Version)> {
    Ok(config::load(path, reload::variable)?)
}

fn play(listen: SocketAddr, script: Script) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let listener =
            tokio::net::TcpListener::bind(listen).await.with_context(|| format!("cannot bind {listen}"))?;
        tracing::info!(%listen, "playing a provider");
        mock::serve(listener, script).await.context("the mock broke")
    })
}
