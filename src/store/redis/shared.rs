//! What is not about holds: whether the servers are fit, and news between nodes.

use futures::StreamExt as _;
use tokio::sync::mpsc;

use super::map::slot_of;
use super::node::{Lane, Node};
use super::{PROBE, REFRESH, Redis, RedisError};

/// The oldest version with functions, and with scripts that say what they need.
const VERSION_MIN: (u32, u32) = (7, 0);

/// Something that an operator should know. Says which setting, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning(pub String);

/// From another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A message on a channel.
    Message { channel: String, payload: Vec<u8> },
    /// The connection is new: messages before it may have been missed.
    Missed,
}

impl Redis {
    /// Connects to every server, loads the verbs, and looks whether it is fit.
    ///
    /// # Errors
    /// When a server cannot be reached or used: too old, or one that evicts. It would evict money.
    pub async fn check(&self) -> Result<Vec<Warning>, RedisError> {
        self.inner.map.refresh().await?;
        let nodes = self.inner.map.nodes();
        if nodes.is_empty() {
            return Err(RedisError::NotThere("no server is known".to_owned()));
        }
        let mut warnings = vec![];
        for node in nodes {
            node.mend().await?;
            warnings.extend(check(&node).await?);
        }
        Ok(warnings)
    }

    /// Sends a message to all nodes that listen, as far as they are connected.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn publish(&self, channel: &str, payload: &[u8]) -> Result<(), RedisError> {
        let mut cmd = redis::cmd("PUBLISH");
        cmd.arg(channel).arg(payload);
        // Any server passes it on. The channel decides which, so that one's messages stay in order.
        self.command(Lane::Background, channel, &cmd).await.map(|_| ())
    }

    /// Hears messages on channels until nobody takes them any more. Connects again by itself, and says
    /// [`News::Missed`] each time, the first time included. Run it as a service.
    pub async fn listen(&self, channels: &[String], news: mpsc::Sender<News>) {
        while !news.is_closed() {
            if let Some(node) = self.listened(channels) {
                // Whatever ended it, the next connection says that something may be missing.
                let _broken = self.hear(&node, channels, &news).await;
            }
            tokio::time::sleep(PROBE).await;
        }
    }

    /// Calls a verb of `library.lua` on the shard of a key; for parts that add verbs of their own.
    ///
    /// # Errors
    /// [`RedisError`].
    pub async fn call(&self, shard: u16, verb: &str, args: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, RedisError> {
        let mut answer = self.verb(Lane::Background, shard, verb, args).await?;
        let mut texts = vec![std::mem::take(&mut answer.word).into_bytes()];
        while !answer.is_empty() {
            texts.push(answer.bytes()?);
        }
        Ok(texts)
    }

    /// A channel that the verbs on a shard announce on.
    #[must_use]
    pub fn channel(&self, shard: u16, name: &str) -> String {
        format!("{}:{name}", self.base(shard))
    }

    fn listened(&self, channels: &[String]) -> Option<std::sync::Arc<Node>> {
        self.inner.map.node(slot_of(channels.first()?))
    }

    async fn hear(
        &self,
        node: &std::sync::Arc<Node>,
        channels: &[String],
        news: &mpsc::Sender<News>,
    ) -> Result<(), RedisError> {
        let lost = |_| RedisError::Lost;
        let subscribed = Box::pin(async {
            let mut connection = node.client().get_async_pubsub().await?;
            connection.subscribe(channels).await?;
            redis::RedisResult::Ok(connection)
        });
        let connection = tokio::time::timeout(REFRESH, subscribed).await;
        let (mut sink, mut messages) = connection.map_err(|_| RedisError::TimedOut)?.map_err(lost)?.split();
        if news.send(News::Missed).await.is_err() {
            return Ok(());
        }
        loop {
            match tokio::time::timeout(REFRESH, messages.next()).await {
                Ok(Some(message)) => {
                    let channel = message.get_channel_name().to_owned();
                    let payload = message.get_payload_bytes().to_vec();
                    if news.send(News::Message { channel, payload }).await.is_err() {
                        return Ok(());
                    }
                }
                Ok(None) => return Err(RedisError::Lost),
                // Silence: is it still the server to listen to, and is it there?
                Err(_) => {
                    let now = self.listened(channels);
                    if news.is_closed() || !now.is_some_and(|now| std::sync::Arc::ptr_eq(&now, node)) {
                        return Ok(());
                    }
                    let ping = sink.ping::<redis::Value>();
                    tokio::time::timeout(REFRESH, ping)
                        .await
                        .map_err(|_| RedisError::TimedOut)?
                        .map_err(lost)?;
                }
            }
        }
    }
}

async fn check(node: &std::sync::Arc<Node>) -> Result<Vec<Warning>, RedisError> {
    let mut cmd = redis::cmd("INFO");
    cmd.arg("everything");
    let info = node.send(Lane::Background, &cmd, false).await.map_err(super::Fault::into_error)?;
    let info: String = redis::from_redis_value(info).map_err(|_| RedisError::Unreadable)?;
    judge(&format!("{}:{}", node.address.0, node.address.1), &info)
}

/// By what `INFO` says.
fn judge(server: &str, info: &str) -> Result<Vec<Warning>, RedisError> {
    let field = |name: &str| {
        info.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':')).unwrap_or_default()
    };
    let version = field("redis_version");
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    let found = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    if found < VERSION_MIN {
        return Err(RedisError::Unfit(format!(
            "{server} is version {version}, and 7.0 is the oldest that will do"
        )));
    }
    let policy = field("maxmemory_policy");
    if field("maxmemory") != "0" && policy != "noeviction" {
        return Err(RedisError::Unfit(format!(
            "{server} has maxmemory-policy {policy}: set it to noeviction, since what it evicted would be money"
        )));
    }
    let mut warnings = vec![];
    if field("aof_enabled") == "0" {
        warnings.push(Warning(format!(
            "{server} has appendonly no: no money is lost when it restarts, but the limits start anew, and until \
             the nodes have reconciled the money that was leased to it is parked; appendonly yes keeps the limits"
        )));
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(version: &str, memory: &str, policy: &str, aof: &str) -> String {
        format!(
            "# Server\r\nredis_version:{version}\r\nmaxmemory:{memory}\r\nmaxmemory_policy:{policy}\r\naof_enabled:{aof}\r\n"
        )
    }

    #[test]
    fn old_servers_and_those_that_evict_are_refused() {
        let judged = |version, memory, policy, aof| judge("s", &info(version, memory, policy, aof));
        assert_eq!(judged("7.0.0", "0", "allkeys-lru", "1"), Ok(vec![]));
        assert_eq!(judged("10.2", "100", "noeviction", "1"), Ok(vec![]));
        assert_eq!(judged("8.0.1", "0", "noeviction", "0").unwrap().len(), 1);
        for (version, memory, policy) in
            [("6.2.14", "0", "noeviction"), ("", "0", "noeviction"), ("7.2.4", "1", "volatile-ttl")]
        {
            let judged = judged(version, memory, policy, "1");
            assert!(matches!(judged, Err(RedisError::Unfit(_))), "{judged:?}");
        }
    }
}
