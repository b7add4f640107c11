//! Holds in Redis, for all nodes of a fleet.
//!
//! Redis is no authority on anything. It spends *pools*: money that the ledger has deducted before, for one account
//! and one incarnation of one server. A pool's number (its epoch) is marked in the server together with its `run_id`,
//! and every verb compares both with the process that it runs in. So a replica that was promoted, a server that came
//! back from its files and one that was flushed answer [`RedisError::Stale`] and spend nothing, whatever they lost.
//!
//! A verb is one round trip and atomic: see `library.lua`, which also lists all keys. Accounts are spread over
//! [`SHARDS`] shards; an account's keys and its shard's outbox share a hash tag, so they live on one server of a
//! cluster. Verbs have the meaning of [`filters::purse`], with these differences:
//!
//! - Limits are counted where they are set. One that comes later does not know what was before it.
//! - A call that runs counts until its hold ends, or until nobody has touched it for its lifetime.
//! - A budget whose spend is unknown here (a new one, or the server lost it) is asked for:
//!   [`RedisDeny::BudgetUnknown`], then [`Redis::restore_budget`]. A window that follows a known one begins at nothing.
//! - The hourly allowance for calls that are left early (`filters::limit::abandoned`) is counted per node and not
//!   here: it decides what a call is charged, before it is settled. With `n` nodes a key may leave up to `n` times
//!   as much; it is our own cost, and bounded.
//!
//! Every command has the time of the config's `timeout` (at most 50 ms), and a breaker for each server refuses at
//! once after one that failed: see `node`. Run [`Redis::keep`] as a service: it connects, mends and follows
//! failovers. Until it has done so for the first time everything answers [`RedisError::Open`].
//!
//! A server must not evict (`maxmemory-policy noeviction`), since what it evicted would be money; see
//! [`Redis::check`]. Its user needs the commands of `library.lua`, `INFO`, `FCALL` and `FUNCTION|LOAD` or `EVALSHA`
//! and `SCRIPT|LOAD`, `PUBLISH`, `SUBSCRIBE`, and with a cluster `CLUSTER|SLOTS`, on keys that begin with the prefix.
//!
//! A slot of a cluster that moves leaves its pools behind: its shards are stale as soon as it begins to move. Move it in
//! one step where the server can (Valkey 9), or key by key with `--cluster-replace`, since nodes may have marked the new
//! server before the last key arrives.
//!
//! Deliberately absent: retries. A command that timed out may have run; whoever sent it knows what that means.

mod admit;
mod answer;
mod library;
mod links;
mod map;
mod node;
mod outbox;
mod pools;
mod settle;
mod shared;
mod words;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use filters::ids::AccountId;
use filters::money::Amount;
use redis::{Cmd, Value};
use tokio::sync::Notify;

pub use admit::{Admission, Admitted, RedisDeny, Scope, UnknownBudget};
pub use library::{Dialect, SOURCE};
pub use outbox::{End, Outgoing};
pub use pools::{Fence, Installed, Marked, PoolState, Recalled};
pub use settle::{Ended, Touch};
pub use shared::{News, Warning};

use answer::Answer;
use library::Library;
use map::{Map, slot_of};
use node::{Fault, Lane, Node};
use words::Words;

use crate::config::checked;

/// Parts of the key space.
pub const SHARDS: u16 = 256;
/// Amounts from here on are refused: the sum of two must fit into 64 bits.
pub const AMOUNT_MAX: Amount = Amount::from_nano((1 << 62) - 1);
/// Between two probes of a server whose breaker is open.
const PROBE: Duration = Duration::from_millis(100);
/// Between two looks at who answers for what.
const REFRESH: Duration = Duration::from_secs(1);
/// Servers that one command is sent on to, at most.
const REDIRECTS_MAX: usize = 3;

/// The shard of an account; the same in every node and every release.
#[must_use]
pub fn shard_of(account: AccountId) -> u16 {
    let crc = crc32fast::hash(itoa::Buffer::new().format(account.0).as_bytes());
    u16::try_from(crc % u32::from(SHARDS)).unwrap_or_default()
}

/// One process of a server, as it names itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RunId(pub String);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a verb did nothing, or why nobody knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisError {
    /// The breaker is open. Nothing was sent.
    #[error("redis does not answer, as far as is known")]
    Open,
    /// No answer in time. It may have run, or may still run.
    #[error("redis did not answer in time")]
    TimedOut,
    /// The connection broke. It may have run.
    #[error("the connection to redis broke")]
    Lost,
    /// The server is not, or not yet, the primary for this. Nothing ran.
    #[error("redis cannot serve: {0}")]
    NotThere(String),
    /// A cluster moves the key just now. Nothing ran.
    #[error("redis is moving keys: {0}")]
    Moving(String),
    /// The server refused it. Nothing ran.
    #[error("redis refused: {0}")]
    Refused(String),
    /// Another process than the one that the epoch belongs to, or another epoch. Nothing ran.
    #[error("redis is another one than before: {0}")]
    Stale(Fence),
    /// An amount that no pool can hold, or a pool of another shard. Nothing was sent.
    #[error("no such amount or pool")]
    NoSuch,
    /// An answer that is none of ours.
    #[error("redis answered what nobody understands")]
    Unreadable,
    /// The server must not be used.
    #[error("redis cannot be used: {0}")]
    Unfit(String),
}

impl RedisError {
    /// Whether the verb may have run, or may still run.
    #[must_use]
    pub fn may_have_run(&self) -> bool {
        match self {
            Self::TimedOut | Self::Lost | Self::Unreadable => true,
            Self::Open
            | Self::NotThere(_)
            | Self::Moving(_)
            | Self::Refused(_)
            | Self::Stale(_)
            | Self::NoSuch
            | Self::Unfit(_) => false,
        }
    }
}

/// The fleet's hot store. Cheap to clone.
#[derive(Clone)]
pub struct Redis {
    inner: Arc<Inner>,
}

struct Inner {
    map: Map,
    prefix: String,
    /// What the keys of each shard begin with.
    bases: Vec<String>,
    /// A breaker opened, or a key has moved: look at once.
    tripped: Arc<Notify>,
}

impl Redis {
    /// Reads URLs and certificates. Needs no server.
    ///
    /// # Errors
    /// When a URL or the file of certificates cannot be read.
    pub fn new(config: &checked::Redis) -> anyhow::Result<Self> {
        Self::with_library(config, SOURCE)
    }

    /// With other verbs; for tests that set the clock.
    ///
    /// # Errors
    /// Those of [`Redis::new`].
    #[doc(hidden)]
    pub fn with_library(config: &checked::Redis, source: &str) -> anyhow::Result<Self> {
        pingora::tls::install_default_crypto_provider();
        let tripped = Arc::new(Notify::new());
        let map = Map::new(config, Library::new(source), Arc::clone(&tripped))?;
        let prefix = config.prefix.clone();
        let bases = (0..SHARDS).map(|shard| base_of(&prefix, shard)).collect();
        Ok(Self { inner: Arc::new(Inner { map, prefix, bases, tripped }) })
    }

    /// Connects, mends what broke and follows who answers for what. Never ends: run it as a service.
    pub async fn keep(&self) {
        loop {
            self.tend().await;
            let open = self.inner.map.nodes().iter().any(|node| node.is_open());
            if open || self.inner.map.nodes().is_empty() {
                tokio::time::sleep(PROBE).await;
            } else if tokio::time::timeout(REFRESH, self.inner.tripped.notified()).await.is_ok() {
                // What has just failed is not asked at once.
                tokio::time::sleep(PROBE).await;
            }
        }
    }

    /// One round of [`Redis::keep`].
    pub(super) async fn tend(&self) {
        if let Err(error) = self.inner.map.refresh().await {
            tracing::debug!(%error, "nobody says who the redis primary is");
        }
        let nodes = self.inner.map.nodes();
        let mends = nodes.iter().map(|node| async {
            // A connection that broke while nobody used it is better noticed here than by a request.
            if !node.is_open() && node.probe().await {
                return;
            }
            match node.mend().await {
                Ok(()) => tracing::info!(server = %node.address.0, port = node.address.1, "redis answers"),
                Err(error) => {
                    tracing::debug!(%error, server = %node.address.0, port = node.address.1, "redis is away");
                }
            }
        });
        futures::future::join_all(mends).await;
    }

    /// Whether calls of this account are refused at once now.
    #[must_use]
    pub fn is_open(&self, account: AccountId) -> bool {
        self.is_shard_open(shard_of(account))
    }

    /// Whether calls of this shard are refused at once now.
    #[must_use]
    pub fn is_shard_open(&self, shard: u16) -> bool {
        let node = self.inner.map.node(slot_of(&self.base(shard)));
        node.is_none_or(|node| node.is_open())
    }

    /// How the servers run verbs; for those that answer.
    #[must_use]
    pub fn dialects(&self) -> Vec<Dialect> {
        let nodes = self.inner.map.nodes();
        nodes.iter().filter(|node| !node.is_open()).map(|node| node.dialect()).collect()
    }

    fn base(&self, shard: u16) -> Cow<'_, str> {
        let known = self.inner.bases.get(usize::from(shard));
        known.map_or_else(|| base_of(&self.inner.prefix, shard).into(), Into::into)
    }

    /// One verb on one shard.
    async fn verb(&self, lane: Lane, shard: u16, verb: &str, args: &[Vec<u8>]) -> Result<Answer, RedisError> {
        self.ask(lane, shard, verb, &Words::of(args)).await
    }

    /// The same, for those that come with every call.
    async fn ask(&self, lane: Lane, shard: u16, verb: &str, words: &Words) -> Result<Answer, RedisError> {
        let key = self.base(shard);
        let sent = |node: Arc<Node>, asking| {
            let key = &*key;
            async move { node.call(lane, verb, key, words, asking).await }
        };
        Answer::read(self.route(lane, &key, sent).await?)
    }

    /// One command on the server of a key.
    async fn command(&self, lane: Lane, key: &str, cmd: &Cmd) -> Result<Value, RedisError> {
        self.route(lane, key, |node, asking| async move { node.send(lane, cmd, asking).await }).await
    }

    /// Sends to the server of a key, and on to where that one points.
    async fn route<F, S>(&self, lane: Lane, key: &str, send: S) -> Result<Value, RedisError>
    where
        F: Future<Output = Result<Value, Fault>>,
        S: Fn(Arc<Node>, bool) -> F,
    {
        let map = &self.inner.map;
        let mut node = map.node(slot_of(key)).ok_or(RedisError::Open)?;
        let mut asking = false;
        for _ in 0..REDIRECTS_MAX {
            let address = match send(Arc::clone(&node), asking).await {
                Ok(value) => return Ok(value),
                Err(Fault::Moved(address)) => {
                    asking = false;
                    self.inner.tripped.notify_one();
                    address
                }
                Err(Fault::Ask(address)) => {
                    asking = true;
                    address
                }
                Err(fault @ (Fault::NoLibrary | Fault::Other(_))) => return Err(fault.into_error()),
            };
            node = map.at(&address).await?;
            if node.is_open() {
                // Nobody has asked it before. Nothing has run yet, so that waiting for it is all that it costs; a
                // request waits for no more than a command may take, and whoever keeps us goes on.
                node.mend_for(lane).await?;
            }
        }
        Err(RedisError::Moving("too many servers pointed at each other".to_owned()))
    }
}

/// What all keys of a shard begin with.
fn base_of(prefix: &str, shard: u16) -> String {
    format!("{prefix}:{{s{shard}}}")
}

/// A decimal text that the verbs take; `None`: below zero, or more than a pool can hold.
fn money(amount: Amount) -> Option<i64> {
    (Amount::ZERO..=AMOUNT_MAX).contains(&amount).then(|| amount.nano())
}

fn millis(span: Duration) -> Vec<u8> {
    span.as_millis().to_string().into_bytes()
}
