//! The fleet's catalogue: `providers`, `models` and `aliases` for every node whose config file names none.
//!
//! It is a text, the lines of those sections in a config file, and a version. [`publish`] checks it, writes it into the
//! ledger, puts it into Redis and announces it. `${VAR}`s stay as they are written: every node fills in its own
//! environment, so that no credential is in the ledger. A node asks Redis every 500 ms whether there is another
//! version, and the ledger every 5 s, in case that Redis has lost it. It takes one over as a whole or refuses it
//! ([`Reloader::take_catalogue`]), and keeps the last good one in its folder for a cold start.
//!
//! A version that was refused is not tried again before another one comes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::health::SHARD;
use super::kept;
use crate::clock;
use crate::config::checked::Timers;
use crate::config::{Fault, Faults, parse_catalogue};
use crate::ledger::port::LedgerError;
use crate::ledger::postgres::Postgres;
use crate::ops::heartbeat;
use crate::reload::Reloader;
use crate::store::redis::{News, Redis, RedisError};

/// How often Redis is asked.
const POLL: Duration = Duration::from_millis(500);
/// How often the ledger is asked.
const LOOK: Duration = Duration::from_secs(5);
const FILE: &str = "catalogue.yaml";
/// The first line of the file, before the version.
const HEAD: &str = "# The fleet's catalogue, version ";
const SECTIONS: [&str; 3] = ["providers", "models", "aliases"];

/// A catalogue that was published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// 0: none was.
    pub version: i64,
    pub text: String,
}

/// Follows the fleet's catalogue for one node.
pub struct Catalogues {
    redis: Redis,
    ledger: Postgres,
    reloader: Arc<Reloader>,
    folder: PathBuf,
}

/// The catalogue of the ledger, or the last good one on disk; that of nobody where there is none. Blocks.
///
/// # Errors
/// When the ledger does not answer and none is on disk.
pub fn first(ledger: &Postgres, folder: &Path) -> Result<Published, LedgerError> {
    match ledger.catalogue() {
        Ok(found) => Ok(found.map(|(version, text)| Published { version, text }).unwrap_or_default()),
        Err(error) => {
            let kept = kept_catalogue(folder).ok_or(error)?;
            let version = kept.version;
            tracing::warn!(version, "the ledger does not answer: the catalogue is that of the last run");
            Ok(kept)
        }
    }
}

/// The last good one on disk.
#[must_use]
pub fn kept_catalogue(folder: &Path) -> Option<Published> {
    let text = std::fs::read_to_string(folder.join(FILE)).ok()?;
    let (head, text) = text.split_once('\n')?;
    let version = head.strip_prefix(HEAD)?.parse().ok()?;
    Some(Published { version, text: text.to_owned() })
}

/// Keeps one that was taken over.
pub fn keep(folder: &Path, published: &Published) {
    let Published { version, text } = published;
    let head = format!("{HEAD}{version}\n");
    if let Err(error) = kept::replace(&folder.join(FILE), &[head.as_bytes(), text.as_bytes()]) {
        tracing::error!(%error, "the catalogue cannot be kept on disk: a cold start would use an older one");
    }
}

/// The lines of a config file that make up its catalogue: whole sections, as they are written.
#[must_use]
pub fn sections(file: &str) -> String {
    let mut inside = false;
    let mut text = String::new();
    for line in file.lines() {
        // Neither a comment nor the end of a list belongs elsewhere.
        let begins = line.starts_with(|first: char| first.is_alphanumeric() || first == '"' || first == '_');
        if begins {
            inside = line.split_once(':').is_some_and(|(name, _)| SECTIONS.contains(&name.trim_end()));
        }
        if inside {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Checks a catalogue's text where not every node's environment is at hand: a credential that is only missing here is
/// no fault, and answered as a warning.
///
/// # Errors
/// All other faults.
pub fn check(text: &str, timers: Timers, var: impl Fn(&str) -> Option<String>) -> Result<Vec<Fault>, Faults> {
    let Err(faults) = parse_catalogue(text, timers, var) else { return Ok(vec![]) };
    let is_elsewhere = |fault: &Fault| {
        let mut names = fault.path.split('.');
        names.next() == Some("providers") && names.nth(1).is_some_and(|name| name.starts_with("credential"))
    };
    if faults.0.iter().all(is_elsewhere) { Ok(faults.0) } else { Err(faults) }
}

/// Makes a text the fleet's catalogue, unless it is. Answers its version, and why Redis could not be told; then nodes
/// find it in the ledger.
///
/// # Errors
/// When the ledger cannot be written.
pub async fn publish(
    ledger: &Postgres,
    redis: &Redis,
    text: &str,
    by: &str,
) -> Result<(i64, Option<RedisError>), LedgerError> {
    let (books, owned, by) = (ledger.clone(), text.to_owned(), by.to_owned());
    let writing = tokio::task::spawn_blocking(move || books.publish_catalogue(&owned, &by, clock::unix_ms()));
    let broken = |_| LedgerError::Unreachable("its thread broke".to_owned());
    let version = writing.await.map_err(broken)??;
    let published = Published { version, text: text.to_owned() };
    Ok((version, announce(redis, &published).await.err()))
}

async fn announce(redis: &Redis, published: &Published) -> Result<(), RedisError> {
    let args = [published.version.to_string().into_bytes(), published.text.clone().into_bytes()];
    redis.call(SHARD, "publish_catalogue", &args).await.map(|_| ())
}

impl Catalogues {
    /// For a process that has started with the catalogue of [`first`].
    #[must_use]
    pub fn new(redis: Redis, ledger: Postgres, reloader: Arc<Reloader>, folder: PathBuf) -> Self {
        Self { redis, ledger, reloader, folder }
    }

    /// Never ends: run it as a service.
    pub async fn run(&self) {
        let (sender, heard) = mpsc::channel(1);
        let channels = [self.redis.channel(SHARD, "catalogue")];
        tokio::join!(self.redis.listen(&channels, sender), self.follow(heard));
    }

    async fn follow(&self, mut heard: mpsc::Receiver<News>) {
        let mut looked: Option<Instant> = None;
        let mut refused: Option<Published> = None;
        let job = heartbeat::job("catalogue", POLL);
        let mut tick = tokio::time::interval(POLL);
        loop {
            job.done();
            tokio::select! {
                news = heard.recv() => if news.is_none() { return },
                _ = tick.tick() => {}
            }
            let Some(serves) = self.reloader.published_version() else { continue };
            let known = refused.as_ref().map_or(serves, |refused| refused.version.max(serves));
            let now = clock::now();
            let is_due = looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK);
            let found = match self.of_redis(known).await {
                Ok(Some(found)) => Some(found),
                Ok(None) | Err(_) if is_due => {
                    looked = Some(now);
                    self.of_ledger(known).await
                }
                Ok(None) | Err(_) => None,
            };
            if let Some(found) = found {
                refused = self.take(found).await;
            }
        }
    }

    /// Answers it when it is refused.
    async fn take(&self, found: Published) -> Option<Published> {
        let (reloader, folder) = (Arc::clone(&self.reloader), self.folder.clone());
        let taking = tokio::task::spawn_blocking(move || match reloader.take_catalogue(found.clone()) {
            Ok(()) => {
                keep(&folder, &found);
                None
            }
            Err(_) => Some(found),
        });
        taking.await.unwrap_or_else(|error| {
            tracing::error!(%error, "taking a catalogue over broke");
            None
        })
    }

    /// A newer one that Redis has.
    async fn of_redis(&self, known: i64) -> Result<Option<Published>, RedisError> {
        let answer = self.redis.call(SHARD, "catalogue", &[known.to_string().into_bytes()]).await?;
        let text = |at: usize| answer.get(at).and_then(|bytes| String::from_utf8(bytes.clone()).ok());
        let version = text(1).and_then(|version| version.parse().ok());
        Ok(version.zip(text(2)).map(|(version, text)| Published { version, text }))
    }

    /// A newer one that the ledger has; Redis is given it too.
    async fn of_ledger(&self, known: i64) -> Option<Published> {
        let ledger = self.ledger.clone();
        let reading = tokio::task::spawn_blocking(move || match ledger.catalogue_version()? {
            version if version > known => ledger.catalogue(),
            _ => Ok(None),
        });
        let (version, text) = reading.await.ok()?.ok()??;
        let found = Published { version, text };
        // Without Redis the others find it as this one has.
        let _told = announce(&self.redis, &found).await.is_ok();
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    const FILE_OF_A_NODE: &str = r#"
listen: { http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }
store: { embedded: { path: ./data } }
# What we call.
providers:
  p: { dialect: openai, base_url: "https://host.example", credential: "${ELSEWHERE}" }

models:
  m:
    price: { input: "1", output: "1" }
    limits: { context: 10, output: 10 }
    routes: [
      { provider: p },
    ]
bootstrap: { accounts: { a: {} } }
aliases: { n: m }
"#;

    fn timers() -> Timers {
        let set = |_: &str| Some("k".to_owned());
        config::parse(FILE_OF_A_NODE, set).unwrap_or_else(|e| panic!("{e}")).timers
    }

    #[test]
    fn the_sections_of_a_catalogue_are_taken_as_they_are_written() {
        let text = sections(FILE_OF_A_NODE);
        assert!(text.starts_with("providers:\n  p:") && text.contains("\"${ELSEWHERE}\""), "{text}");
        assert!(text.ends_with("aliases: { n: m }\n") && !text.contains("bootstrap"), "{text}");
        let catalogue = parse_catalogue(&text, timers(), |_| Some("k".to_owned()));
        assert_eq!(catalogue.unwrap_or_else(|e| panic!("{e}")).models.len(), 1);
    }

    #[test]
    fn a_credential_of_another_environment_is_a_warning_and_everything_else_a_fault() {
        let text = sections(FILE_OF_A_NODE);
        let missing = check(&text, timers(), |_| None).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(missing.len(), 1, "{missing:?}");
        let wrong = text.replace("input: \"1\"", "input: \"-1\"");
        assert!(check(&wrong, timers(), |_| None).is_err());
        assert!(check("providers: {}\n", timers(), |_| None).is_err());
    }

    #[test]
    fn the_last_good_one_comes_back_from_the_disk_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(kept_catalogue(folder.path()), None);
        let published = Published { version: 12, text: sections(FILE_OF_A_NODE) };
        keep(folder.path(), &published);
        assert_eq!(kept_catalogue(folder.path()), Some(published));
    }
}
