//! The command line: `tollgate <verb>`.

mod books;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Parser, Subcommand};

use crate::config::{self, Config};
use crate::mock::{self, Script};
use crate::ops::log::{self, Format};
use crate::serve;

/// Exit status for a config that cannot be used (`EX_USAGE` of `sysexits.h`).
pub const EXIT_CONFIG: u8 = 64;

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
    /// Serve calls until SIGTERM.
    Serve,
    /// Check the config file and say everything that is wrong with it.
    Check,
    /// Accounts and what happened on them.
    #[command(subcommand)]
    Accounts(Accounts),
    /// The books as a whole.
    #[command(subcommand)]
    Ledger(Ledger),
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
enum Accounts {
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

#[derive(Debug, Subcommand)]
enum Ledger {
    /// Prove that the books are right; names the first thing that is not.
    Verify {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

impl Cli {
    /// Does what was asked.
    ///
    /// # Errors
    /// [`config::Faults`] for a config that cannot be used, anything else as its own error.
    pub fn run(self) -> anyhow::Result<()> {
        match self.verb {
            Verb::Serve => {
                let config = load(&self.config)?;
                log::start(self.log);
                serve::run(config)
            }
            Verb::Check => {
                let config = load(&self.config)?;
                let (models, endpoints) = (config.catalogue.models.len(), config.catalogue.endpoints.len());
                books::say(&format!("{}: good. {models} models, {endpoints} routes.", self.config.display()))
            }
            Verb::Accounts(Accounts::Show { name, json }) => {
                books::show(&load(&self.config)?, name.as_deref(), json)
            }
            Verb::Accounts(Accounts::Statement { name, limit, json }) => {
                books::statement(&load(&self.config)?, &name, limit, json)
            }
            Verb::Ledger(Ledger::Verify { json }) => books::verify(&load(&self.config)?, json),
            Verb::Mock { listen, script } => {
                let script: Script = serde_json::from_str(&script).context("--script")?;
                log::start(self.log);
                play(listen, script)
            }
        }
    }
}

fn load(path: &Path) -> anyhow::Result<Config> {
    Ok(config::load(path, |name| std::env::var(name).ok())?)
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
