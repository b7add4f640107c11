//! Which server answers for which key.
//!
//! One server, or the primary that Sentinels name, answers for all; in a cluster each for its slots. The map is
//! read without a lock and replaced off the request path: every second, after a breaker opened, and when a
//! server says that a key has moved.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, Value};
use tokio::sync::{Mutex, Notify};

use super::library::Library;
use super::node::{Address, Fault, Lane, Node};
use super::{RedisError, SHARDS, base_of};
use crate::config::checked::{self, RedisMode};

/// For a question to a Sentinel, connecting included.
const SENTINEL_PATIENCE: Duration = Duration::from_millis(500);
const SLOTS: u16 = 16384;

pub(super) struct Map {
    mode: RedisMode,
    /// Of the config: servers, or Sentinels.
    named: Vec<ConnectionInfo>,
    /// To Sentinels, in the same order; those that answered last time.
    links: Vec<Mutex<Option<MultiplexedConnection>>>,
    library: Arc<Library>,
    timeout: Duration,
    tripped: Arc<Notify>,
    known: Mutex<HashMap<Address, Arc<Node>>>,
    routes: ArcSwap<Routes>,
}

#[derive(Default)]
struct Routes {
    /// First slot, last slot, who answers; sorted.
    ranges: Vec<(u16, u16, Arc<Node>)>,
}

impl Map {
    pub(super) fn new(
        config: &checked::Redis,
        library: Library,
        tripped: Arc<Notify>,
    ) -> anyhow::Result<Self> {
        let authority = config.ca_file.as_ref().map(std::fs::read).transpose()?;
        let named = config.urls.iter().map(|url| {
            let client = match (&authority, url.expose().starts_with("rediss://")) {
                (Some(pem), true) => {
                    let certificates =
                        redis::TlsCertificates { client_tls: None, root_cert: Some(pem.clone()) };
                    Client::build_with_tls(url.expose(), certificates)
                }
                (Some(_) | None, _) => Client::open(url.expose()),
            };
            // An error of the client may quote the URL, with its password.
            let client = client.map_err(|_| anyhow::anyhow!("a URL in store.redis.urls cannot be read"))?;
            // A command must not wait for the answer to the one before it.
            let settings = redis::io::tcp::TcpSettings::default().set_nodelay(true);
            anyhow::Ok(client.get_connection_info().clone().set_tcp_settings(settings))
        });
        let named = named.collect::<anyhow::Result<Vec<_>>>()?;
        let map = Self {
            mode: config.mode.clone(),
            links: named.iter().map(|_| Mutex::default()).collect(),
            named,
            library: Arc::new(library),
            timeout: config.timeout,
            tripped,
            known: Mutex::default(),
            routes: ArcSwap::default(),
        };
        if map.mode == RedisMode::Single
            && let Some(info) = map.named.first()
        {
            let node = map.make(address_of(info), info)?;
            map.routes.store(Arc::new(Routes { ranges: vec![(0, SLOTS - 1, Arc::new(node))] }));
        }
        Ok(map)
    }

    /// Who answers for a slot; `None`: nobody that is known yet.
    pub(super) fn node(&self, slot: u16) -> Option<Arc<Node>> {
        let routes = self.routes.load();
        let index = routes.ranges.partition_point(|(_, last, _)| *last < slot);
        let (first, _, node) = routes.ranges.get(index)?;
        (*first <= slot).then(|| Arc::clone(node))
    }

    /// All that answer for something, each once.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        let mut nodes: Vec<Arc<Node>> = vec![];
        for (_, _, node) in &self.routes.load().ranges {
            if !nodes.iter().any(|known| Arc::ptr_eq(known, node)) {
                nodes.push(Arc::clone(node));
            }
        }
        nodes
    }

    /// Who answers for which shards.
    pub(super) fn shards(&self, prefix: &str) -> Vec<(Arc<Node>, Vec<u16>)> {
        let mut all: Vec<(Arc<Node>, Vec<u16>)> =
            self.nodes().into_iter().map(|node| (node, vec![])).collect();
        for shard in 0..SHARDS {
            let Some(node) = self.node(slot_of(&base_of(prefix, shard))) else { continue };
            if let Some((_, shards)) = all.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &node)) {
                shards.push(shard);
            }
        }
        all.retain(|(_, shards)| !shards.is_empty());
        all
    }

    /// The server at an address that another server named.
    pub(super) async fn at(&self, address: &Address) -> Result<Arc<Node>, RedisError> {
        let mut known = self.known.lock().await;
        if let Some(node) = known.get(address) {
            return Ok(Arc::clone(node));
        }
        let info = self.named.first().ok_or(RedisError::Open)?;
        let node = Arc::new(self.make(address.clone(), info)?);
        known.insert(address.clone(), Arc::clone(&node));
        Ok(node)
    }

    /// Asks again who answers for what.
    pub(super) async fn refresh(&self) -> Result<(), RedisError> {
        let routes = match &self.mode {
            RedisMode::Single => return Ok(()),
            RedisMode::Sentinel { primary } => {
                let address = self.primary(primary).await?;
                vec![(0, SLOTS - 1, self.at(&address).await?)]
            }
            RedisMode::Cluster => self.slots().await?,
        };
        self.routes.store(Arc::new(Routes { ranges: routes }));
        let used = self.nodes();
        let mut known = self.known.lock().await;
        known.retain(|_, node| used.iter().any(|used| Arc::ptr_eq(used, node)));
        Ok(())
    }

    fn make(&self, address: Address, like: &ConnectionInfo) -> Result<Node, RedisError> {
        let client = Client::open(at(like, &address)).map_err(|e| RedisError::Refused(e.to_string()))?;
        let (library, tripped) = (Arc::clone(&self.library), Arc::clone(&self.tripped));
        Ok(Node::new(address, client, library, self.timeout, tripped))
    }

    /// The primary that most Sentinels name: one that is cut off may still name the last one.
    async fn primary(&self, name: &str) -> Result<Address, RedisError> {
        let asked = self.named.iter().zip(&self.links).map(|(sentinel, link)| ask(sentinel, link, name));
        let answers = futures::future::join_all(asked).await;
        let mut votes: HashMap<Address, usize> = HashMap::new();
        for address in answers.into_iter().flatten() {
            *votes.entry(address).or_default() += 1;
        }
        let most = votes.into_iter().max_by_key(|(_, count)| *count);
        most.map(|(address, _)| address)
            .ok_or_else(|| RedisError::NotThere("no Sentinel names a primary".to_owned()))
    }

    /// The slots of a cluster, by the first node that answers: known ones, then those of the config.
    async fn slots(&self) -> Result<Vec<(u16, u16, Arc<Node>)>, RedisError> {
        for node in self.nodes().iter().filter(|node| !node.is_open()) {
            let answer = node.send(Lane::Background, &slots(), false).await;
            if let Ok(ranges) = self.read_slots(node, answer.map_err(Fault::into_error)).await {
                return Ok(ranges);
            }
        }
        let mut last = RedisError::NotThere("no node of the cluster answers".to_owned());
        for info in &self.named {
            let node = self.at(&address_of(info)).await?;
            let answer = async {
                let mut link = connect(node.client()).await?;
                slots().query_async(&mut link).await.map_err(|error| RedisError::NotThere(error.to_string()))
            };
            match self.read_slots(&node, answer.await).await {
                Ok(ranges) => return Ok(ranges),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn read_slots(
        &self,
        node: &Node,
        answer: Result<Value, RedisError>,
    ) -> Result<Vec<(u16, u16, Arc<Node>)>, RedisError> {
        let answer: Vec<Vec<Value>> = redis::from_redis_value(answer?).map_err(|_| RedisError::Unreadable)?;
        let mut ranges = vec![];
        for entry in answer {
            let mut entry = entry.into_iter();
            let (Some(first), Some(last), Some(primary)) = (entry.next(), entry.next(), entry.next()) else {
                return Err(RedisError::Unreadable);
            };
            let number = |value| redis::from_redis_value::<u16>(value).map_err(|_| RedisError::Unreadable);
            let Value::Array(primary) = primary else { return Err(RedisError::Unreadable) };
            let mut primary = primary.into_iter();
            let host = primary.next().map(redis::from_redis_value::<Option<String>>);
            // A node that does not know its own name stands for the one that was asked.
            let host = match host {
                Some(Ok(Some(host))) if !host.is_empty() => host,
                _ => node.address.0.clone(),
            };
            let port = primary.next().map(number).ok_or(RedisError::Unreadable)??;
            ranges.push((number(first)?, number(last)?, self.at(&(host, port)).await?));
        }
        if ranges.is_empty() {
            return Err(RedisError::NotThere("the cluster has no slots".to_owned()));
        }
        ranges.sort_by_key(|(first, _, _)| *first);
        Ok(ranges)
    }
}

fn slots() -> Cmd {
    let mut cmd = redis::cmd("CLUSTER");
    cmd.arg("SLOTS");
    cmd
}

/// One Sentinel's word.
async fn ask(
    sentinel: &ConnectionInfo,
    link: &Mutex<Option<MultiplexedConnection>>,
    name: &str,
) -> Option<Address> {
    let mut cmd = redis::cmd("SENTINEL");
    cmd.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    let mut link = link.lock().await;
    if let Some(open) = link.as_mut() {
        if let Ok(address) = cmd.query_async::<Option<Address>>(open).await {
            return address;
        }
        *link = None;
    }
    // Sentinels often have no password although their servers do: then it is asked without.
    let bare = sentinel.redis_settings().password().is_some().then(|| {
        let settings = redis::RedisConnectionInfo::default();
        sentinel.clone().set_redis_settings(settings)
    });
    for info in std::iter::once(sentinel.clone()).chain(bare) {
        let Ok(client) = Client::open(info) else { continue };
        let Ok(mut open) = connect(&client).await else { continue };
        if let Ok(address) = cmd.query_async::<Option<Address>>(&mut open).await {
            *link = Some(open);
            return address;
        }
    }
    None
}

async fn connect(client: &Client) -> Result<MultiplexedConnection, RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(SENTINEL_PATIENCE))
        .set_response_timeout(Some(SENTINEL_PATIENCE));
    let link = Box::pin(client.get_multiplexed_async_connection_with_config(&config)).await;
    link.map_err(|error| RedisError::NotThere(error.to_string()))
}

fn address_of(info: &ConnectionInfo) -> Address {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => (host.clone(), *port),
        _ => (String::new(), 0),
    }
}

/// A server as the config describes others: same user, same TLS, another address.
fn at(like: &ConnectionInfo, (host, port): &Address) -> ConnectionInfo {
    let addr = match like.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
            host: host.clone(),
            port: *port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host.clone(), *port),
    };
    like.clone().set_addr(addr)
}

/// The slot of a key in a cluster: CRC-16 (XMODEM) of its hash tag, as Redis' cluster specification says.
#[must_use]
pub(super) fn slot_of(key: &str) -> u16 {
    let tag = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map_or(key, |(tag, _)| if tag.is_empty() { key } else { tag });
    let crc = tag.bytes().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    });
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::slot_of;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot_of("123456789"), 0x31c3);
        assert_eq!(slot_of("tollgate:{s17}:money"), slot_of("s17"));
        assert_eq!(slot_of("foo{}"), slot_of("foo{}"));
        assert_ne!(slot_of("{s17}"), slot_of("{s18}"));
    }
}
