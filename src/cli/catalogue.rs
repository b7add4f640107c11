//! `tollgate catalogue …`: past the nodes, straight to the fleet's ledger and Redis.

use std::path::Path;

use anyhow::Context as _;

use super::books::say;
use crate::config::checked::{Fleet, Store};
use crate::config::{self, Config};
use crate::fleet::catalogue;
use crate::ledger::postgres::Postgres;
use crate::reload;
use crate::store::redis::Redis;

pub(super) fn publish(config: &Config, file: &Path, by: &str) -> anyhow::Result<()> {
    let fleet = fleet(config)?;
    let text = catalogue::sections(&config::read(file)?);
    for elsewhere in catalogue::check(&text, config.timers, reload::variable)? {
        say(&format!("Not known here, so not checked: {}: {}", elsewhere.path, elsewhere.message))?;
    }
    let (ledger, redis) = (Postgres::new(&fleet.postgres)?, Redis::new(&fleet.redis)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (version, untold) = runtime.block_on(async {
        // Whether it answers is said below, when it matters.
        let _warnings = redis.check().await;
        catalogue::publish(&ledger, &redis, &text, by).await
    })?;
    say(&format!("The fleet's catalogue has version {version}."))?;
    match untold {
        Some(error) => {
            say(&format!("Nodes find it in the ledger within seconds; Redis was not told: {error}"))
        }
        None => Ok(()),
    }
}

pub(super) fn show(config: &Config) -> anyhow::Result<()> {
    let (version, text) = Postgres::new(&fleet(config)?.postgres)?
        .catalogue()?
        .context("no catalogue was published: see `tollgate catalogue publish`")?;
    say(&format!("# version {version}"))?;
    say(text.trim_end())
}

fn fleet(config: &Config) -> anyhow::Result<&Fleet> {
    match &config.store {
        Store::Fleet(fleet) => Ok(fleet),
        Store::Embedded => {
            anyhow::bail!("store: this config is of a single node, whose file is its catalogue")
        }
    }
}
