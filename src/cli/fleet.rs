//! Verbs on a fleet's ledger that no node does by itself: they work on Postgres, whoever serves.

use anyhow::Context as _;
use filters::ids::AccountId;
use filters::money::Amount;
use serde_json::json;

use super::books::{say, time};
use crate::clock;
use crate::config::Config;
use crate::config::checked::Store;
use crate::fleet::{self, reconcile};
use crate::ledger::postgres::Migrated;
use crate::ledger::{Ledger as _, Postgres};

/// The fleet's ledger.
pub(super) fn ledger(config: &Config) -> anyhow::Result<Postgres> {
    let ledger =
        unchecked(config)?.context("store: only a fleet, with `store.postgres`, has boots to look after")?;
    ledger.check_version()?;
    Ok(ledger)
}

/// The ledger as it is; `None`: the config has no fleet.
fn unchecked(config: &Config) -> anyhow::Result<Option<Postgres>> {
    match &config.store {
        Store::Embedded => Ok(None),
        Store::Fleet(fleet) => Ok(Some(Postgres::new(&fleet.postgres)?)),
    }
}

/// Brings the ledger's schema up to this binary's.
pub(super) fn migrate(config: &Config, json: bool) -> anyhow::Result<()> {
    let Some(ledger) = unchecked(config)? else {
        return say("The embedded ledger brings itself up to date: there is nothing to do.");
    };
    let migrated = ledger.migrate()?;
    if json {
        return say(&serde_json::to_string(&migrated)?);
    }
    let Migrated { from, to } = migrated;
    say(&if from == to {
        format!("The ledger has schema version {to}: there is nothing to do.")
    } else {
        format!("The ledger has schema version {to} now, it had {from}.")
    })
}

/// Lists boots that have not ended.
pub(super) fn boots(config: &Config, json: bool) -> anyhow::Result<()> {
    let boots = ledger(config)?.live_boots()?;
    let rows = boots
        .iter()
        .map(|boot| json!({ "boot": boot.boot, "started_ms": boot.started_ms, "beat_ms": boot.beat_ms }));
    if json {
        return say(&serde_json::Value::from_iter(rows).to_string());
    }
    say(&format!("{:>8}  {:<22} {:<22}", "BOOT", "STARTED", "LAST HEARD OF"))?;
    for row in rows {
        say(&format!("{:>8}  {:<22} {:<22}", row["boot"], time(&row, "started_ms"), time(&row, "beat_ms")))?;
    }
    Ok(())
}

/// Compares Redis with the books. What is alarming at two moments, and the same, is drift.
pub(super) fn reconcile(config: &Config, json: bool) -> anyhow::Result<()> {
    let Store::Fleet(servers) = &config.store else {
        anyhow::bail!("store: only a fleet has a Redis to compare with its books");
    };
    let (servers, runtime) = fleet::connect(servers)?;
    let drifts = runtime.block_on(async {
        servers.redis.check().await.context("store.redis")?;
        Ok::<_, anyhow::Error>(reconcile::look(&servers).await?)
    })?;
    if json {
        let rows =
            drifts.iter().map(|drift| json!({ "drift": drift.to_string(), "alarming": drift.is_alarming() }));
        return say(&serde_json::Value::from_iter(rows).to_string());
    }
    if drifts.is_empty() {
        return say("Redis and the books agree on every pool.");
    }
    for drift in &drifts {
        say(&format!("{} {drift}", if drift.is_alarming() { "!" } else { " " }))?;
    }
    say("What is marked with ! and says the same in a minute has to be looked at: docs/runbooks/drift.md")
}

/// Gives a boot up.
pub(super) fn lost(config: &Config, boot: i64) -> anyhow::Result<()> {
    let ledger = ledger(config)?;
    let live = ledger.live_boots()?.iter().any(|live| live.boot == boot);
    anyhow::ensure!(live, "there is no such boot, or it has ended, or it was given up before");
    let suspended = ledger.declare_lost(boot, clock::unix_ms())?;
    say(&format!("Boot {boot} is given up. In suspense because of it, by now: {suspended}."))
}

/// Gives back what is in suspense.
pub(super) fn restore(
    config: &Config,
    name: &str,
    usd: &str,
    reference: &str,
    reason: &str,
) -> anyhow::Result<()> {
    let mut ledger = ledger(config)?;
    let amount = Amount::parse_usd(usd).map_err(|e| anyhow::anyhow!("`usd`: {e}"))?;
    anyhow::ensure!(amount.is_positive(), "`usd` must be more than 0");
    let rows = ledger.accounts(None)?;
    let row = rows.iter().find(|row| row.name == name);
    let row = row.with_context(|| format!("there is no account `{name}`"))?;
    let new = ledger.restore(AccountId(row.id), amount, reference, reason, clock::unix_ms())?;
    say(if new { "Given back." } else { "Given back already under that reference." })
}
