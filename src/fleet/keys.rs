//! The fleet's keys: the same table on every node.
//!
//! The ledger numbers every change of a key. Whoever makes one calls [`Keys::changed`], which puts what Redis does not
//! have yet into a stream there and announces it; a revoked key goes into the set that admission looks at *first*. Nodes
//! hear the announcement, and ask the stream every 500 ms for what comes after the number that they have. Each change
//! names the number before it, so that a node sees when something is missing (the stream keeps the latest
//! 10,000) and asks the ledger. Every 5 s each asks the ledger anyway and passes on what Redis lacks: a node that died
//! between booking and announcing costs no more than that. While Redis is away the ledger is asked every 500 ms.
//!
//! The last table is kept on disk, digests and settings only: a base that is replaced when the delta has grown into a
//! new one, and a line for each change since, so that a key that was revoked stays so after a cold start.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use tokio::sync::{Mutex, mpsc};

use super::health::SHARD;
use super::kept;
use crate::clock;
use crate::ledger::port::{KeyRecord, LedgerError};
use crate::ledger::postgres::Postgres;
use crate::ops::heartbeat;
use crate::pool::Pool;
use crate::pool::keys::{Frozen, KeyTable};
use crate::store::redis::{News, Redis, RedisError};

/// How often the stream is asked.
const POLL: Duration = Duration::from_millis(500);
/// How often the ledger is asked although Redis answers.
const LOOK: Duration = Duration::from_secs(5);
/// Changes in one answer.
const CHANGES_MAX: u32 = 500;
/// Announcements that wait to be taken in.
const HEARD_MAX: usize = 256;
const BASE: &str = "keys.base";
const LOG: &str = "keys.log";
const MAGIC: &[u8] = b"tollgate keys 1\n";

/// Follows the fleet's keys for one node.
pub struct Keys {
    redis: Redis,
    ledger: Postgres,
    pool: Arc<Pool>,
    folder: PathBuf,
    /// One at a time reads, applies and writes down.
    applying: Mutex<()>,
}

/// A change of a key, and the number of the one before it.
#[derive(Debug)]
struct Change {
    from: i64,
    number: i64,
    record: KeyRecord,
}

/// A change as it travels.
#[derive(Deserialize)]
struct Announced {
    from: String,
    number: String,
    record: String,
}

/// Why the table could not follow.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("the ledger cannot be read: {0}")]
    Ledger(#[from] LedgerError),
    #[error("redis cannot be asked: {0}")]
    Redis(#[from] RedisError),
    #[error("a change of a key cannot be read")]
    Unreadable,
    #[error("the keys cannot be read: their thread broke")]
    Broken,
}

/// The table of the ledger, or the last one on disk. Blocks.
///
/// # Errors
/// When the ledger does not answer and nothing can be used on disk.
pub fn first(ledger: &Postgres, folder: &Path) -> Result<KeyTable, LedgerError> {
    let now_ms = clock::unix_ms();
    match ledger.key_base() {
        Ok((number, records)) => {
            let table = KeyTable::numbered(number, records, now_ms);
            keep_base(folder, &table);
            Ok(table)
        }
        Err(error) => {
            let table = kept_table(folder, now_ms).ok_or(error)?;
            let number = table.number();
            tracing::warn!(number, "the ledger does not answer: the keys are those of the last run");
            Ok(table)
        }
    }
}

/// The table on disk, if there is one.
#[must_use]
pub fn kept_table(folder: &Path, now_ms: i64) -> Option<KeyTable> {
    let bytes = std::fs::read(folder.join(BASE)).ok()?;
    let (sum, body) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<4>()?;
    if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
        tracing::error!("the keys on disk are damaged: none of them is used");
        return None;
    }
    let frozen: Frozen = postcard::from_bytes(body).ok()?;
    let base = KeyTable::thawed(frozen, now_ms)?;
    let log = std::fs::read_to_string(folder.join(LOG)).unwrap_or_default();
    // A last line that was cut is none.
    let changes = log.lines().map_while(|line| serde_json::from_str::<(i64, KeyRecord)>(line).ok());
    let later: Vec<_> = changes.filter(|(number, _)| *number > base.number()).collect();
    let Some(number) = later.iter().map(|(number, _)| *number).max() else { return Some(base) };
    Some(base.changed(number, later.into_iter().map(|(_, record)| record).collect(), now_ms))
}

fn keep_base(folder: &Path, table: &KeyTable) {
    let Ok(body) = postcard::to_stdvec(&table.frozen()) else { return };
    let sum = crc32fast::hash(&body).to_le_bytes();
    let kept = kept::replace(&folder.join(BASE), &[MAGIC, &sum, &body]);
    // Only then: until now the old lines belonged to the old base.
    if let Err(error) = kept.and_then(|()| kept::replace(&folder.join(LOG), &[])) {
        tracing::error!(%error, "the keys cannot be kept on disk: a cold start would use older ones");
    }
}

impl Keys {
    /// For the keys of this pool, which have come from [`first`].
    #[must_use]
    pub fn new(redis: Redis, ledger: Postgres, pool: Arc<Pool>, folder: PathBuf) -> Self {
        Self { redis, ledger, pool, folder, applying: Mutex::new(()) }
    }

    /// Never ends: run it as a service.
    pub async fn run(&self) {
        let (sender, heard) = mpsc::channel(HEARD_MAX);
        let channels = [self.redis.channel(SHARD, "keys")];
        tokio::join!(self.redis.listen(&channels, sender), self.follow(heard));
    }

    /// A change is booked in the ledger: no hold is placed with a revoked key from here on, and all nodes hear of
    /// it. When Redis is away they find it in the ledger.
    ///
    /// # Errors
    /// When the ledger cannot be read or Redis cannot be told.
    pub async fn changed(&self) -> Result<(), KeysError> {
        self.look().await
    }

    async fn follow(&self, mut heard: mpsc::Receiver<News>) {
        let mut looked: Option<Instant> = None;
        let job = heartbeat::job("keys", POLL);
        let mut tick = tokio::time::interval(POLL);
        let mut complained = false;
        loop {
            tokio::select! {
                news = heard.recv() => match news {
                    Some(News::Message { payload, .. }) if self.hear(&payload).await => continue,
                    Some(News::Message { .. } | News::Missed) => {}
                    None => return,
                },
                _ = tick.tick() => {}
            }
            let now = clock::now();
            let is_due = looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK);
            let polled = self.poll().await;
            let result = match polled {
                Ok(()) if !is_due => {
                    job.done();
                    continue;
                }
                Ok(()) | Err(_) => self.look().await,
            };
            looked = Some(now);
            job.ended(&result);
            match result {
                Ok(()) => complained = false,
                // Redis alone is no news here: its own breaker says so.
                Err(KeysError::Redis(_)) => {}
                Err(error) if !complained => {
                    complained = true;
                    tracing::warn!(%error, "changes of keys cannot be read: they count when this is over");
                }
                Err(_) => {}
            }
        }
    }

    /// Takes an announcement in; answers whether nothing is missing before it.
    async fn hear(&self, payload: &[u8]) -> bool {
        let Ok(announced) = serde_json::from_slice::<Vec<Announced>>(payload) else { return false };
        let changes: Option<Vec<Change>> = announced
            .iter()
            .map(|Announced { from, number, record }| {
                change(from.as_bytes(), number.as_bytes(), record.as_bytes())
            })
            .collect();
        match changes {
            Some(changes) => self.apply(changes).await,
            None => false,
        }
    }

    /// Asks the stream for what comes after our number.
    async fn poll(&self) -> Result<(), KeysError> {
        loop {
            let mine = self.pool.keys().number();
            let args = [mine.to_string(), CHANGES_MAX.to_string()].map(String::into_bytes);
            let answer = self.redis.call(SHARD, "keys_since", &args).await?;
            let mut texts = answer.iter().skip(1);
            let tail = texts.next().and_then(|tail| number(tail));
            let texts: Vec<_> = texts.collect();
            let parts = texts.chunks_exact(3);
            let changes: Option<Vec<Change>> =
                parts.map(|part| change(part.first()?, part.get(1)?, part.get(2)?)).collect();
            let changes = changes.ok_or(KeysError::Unreadable)?;
            // What it has is older than what we have: it has lost its memory, and the ledger will fill it.
            if changes.is_empty() || tail.is_none() {
                return Ok(());
            }
            let is_all = changes.len() < usize::try_from(CHANGES_MAX).unwrap_or(usize::MAX);
            if !self.apply(changes).await {
                self.catch_up().await?;
            }
            if is_all {
                return Ok(());
            }
        }
    }

    /// Asks the ledger, and passes on to Redis what that lacks.
    async fn look(&self) -> Result<(), KeysError> {
        self.catch_up().await?;
        let args = [i64::MAX.to_string(), "1".to_owned()].map(String::into_bytes);
        let answer = self.redis.call(SHARD, "keys_since", &args).await?;
        let tail = answer.get(1).and_then(|tail| number(tail));
        let mut from = tail.unwrap_or_else(|| self.pool.keys().number().saturating_sub(1).max(0));
        let mut tail_text = tail.map(|tail| tail.to_string()).unwrap_or_default();
        loop {
            let changes = self.changes_since(from).await?;
            let Some((last, _)) = changes.last() else { return Ok(()) };
            let (last, is_all) = (*last, changes.len() < usize::try_from(CHANGES_MAX).unwrap_or(usize::MAX));
            let mut args = vec![tail_text.into_bytes(), from.to_string().into_bytes()];
            for (number, record) in &changes {
                if record.revoked_ms.is_some() {
                    // First: whoever hears of it may rely on it.
                    self.redis.revoke(record.account, record.digest).await?;
                }
                args.push(number.to_string().into_bytes());
                args.push(serde_json::to_vec(record).unwrap_or_default());
            }
            self.redis.call(SHARD, "keys_add", &args).await?;
            if is_all {
                return Ok(());
            }
            from = last;
            tail_text = last.to_string();
        }
    }

    /// Takes over what the ledger has after our number.
    async fn catch_up(&self) -> Result<(), KeysError> {
        loop {
            let mine = self.pool.keys().number();
            let found = self.changes_since(mine).await?;
            let is_all = found.len() < usize::try_from(CHANGES_MAX).unwrap_or(usize::MAX);
            let mut from = mine;
            let mut changes = vec![];
            for (number, record) in found {
                changes.push(Change { from, number, record });
                from = number;
            }
            self.apply(changes).await;
            if is_all {
                return Ok(());
            }
        }
    }

    async fn changes_since(&self, number: i64) -> Result<Vec<(i64, KeyRecord)>, KeysError> {
        let ledger = self.ledger.clone();
        let reading = tokio::task::spawn_blocking(move || ledger.changes_since(number, CHANGES_MAX));
        Ok(reading.await.map_err(|_| KeysError::Broken)??)
    }

    /// Puts changes into the table and on disk; answers whether none was missing before them.
    async fn apply(&self, changes: Vec<Change>) -> bool {
        let _one_at_a_time = self.applying.lock().await;
        let table = self.pool.keys();
        let mine = table.number();
        let news: Vec<Change> = changes.into_iter().filter(|change| change.number > mine).collect();
        let (Some(first), Some(last)) = (news.first(), news.last()) else { return true };
        if first.from > mine {
            return false;
        }
        let (number, folder) = (last.number, self.folder.clone());
        let pool = Arc::clone(&self.pool);
        // A rebuilt table and the disk take their time.
        let applied = tokio::task::spawn_blocking(move || {
            let records = news.iter().map(|change| change.record.clone()).collect();
            let changed = table.changed(number, records, clock::unix_ms());
            let is_rebuilt = changed.delta_len() == 0;
            if is_rebuilt {
                keep_base(&folder, &changed);
            }
            pool.set_keys(changed);
            for change in news.iter().filter(|_| !is_rebuilt) {
                let line = serde_json::to_vec(&(change.number, &change.record)).unwrap_or_default();
                if let Err(error) = kept::add_line(&folder.join(LOG), &line) {
                    tracing::error!(%error, "a change of a key cannot be kept on disk");
                }
            }
        });
        applied.await.is_ok()
    }
}

fn number(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn change(from: &[u8], at: &[u8], record: &[u8]) -> Option<Change> {
    Some(Change { from: number(from)?, number: number(at)?, record: serde_json::from_slice(record).ok()? })
}
