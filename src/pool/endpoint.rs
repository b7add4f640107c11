//! Where one endpoint is: its addresses. How it does knows [`super::upstreams`].
//!
//! They come from a `pingora-load-balancing` [`Backends`] of the endpoint's own (a shared one
//! would merge endpoints behind one address), found by asynchronous DNS off the request path and
//! used in turn. Choosing *among* endpoints is ours: that crate's weights are static and keyed by
//! address.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use pingora::{Error, ErrorType, OrErr};
use pingora_load_balancing::discovery::ServiceDiscovery;
use pingora_load_balancing::{Backend, Backends};

use crate::config::checked::BaseUrl;

/// How long a look-up may take.
const LOOKUP: Duration = Duration::from_secs(2);

/// One endpoint's addresses.
pub struct Addresses {
    backends: Backends,
    turn: AtomicUsize,
}

impl Addresses {
    /// An endpoint of which nothing is known.
    #[must_use]
    pub fn new(base: &BaseUrl) -> Self {
        let dns = Dns { host: base.host.clone(), port: base.port };
        Self { backends: Backends::new(Box::new(dns)), turn: AtomicUsize::new(0) }
    }

    /// Looks its addresses up. A look-up that fails keeps the old ones.
    ///
    /// # Errors
    /// When the name cannot be resolved.
    pub async fn refresh(&self) -> pingora::Result<()> {
        self.backends.update(|_| {}).await
    }

    /// The next address, in turn; looked up now if none is known yet.
    pub async fn next(&self) -> Option<SocketAddr> {
        if let Some(address) = self.known() {
            return Some(address);
        }
        self.refresh().await.ok()?;
        self.known()
    }

    fn known(&self) -> Option<SocketAddr> {
        let all = self.backends.get_backend();
        let ready: Vec<_> =
            all.iter().filter(|b| self.backends.ready(b)).filter_map(|b| b.addr.as_inet().copied()).collect();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed).checked_rem(ready.len())?;
        ready.get(turn).copied()
    }
}

struct Dns {
    host: String,
    port: u16,
}

#[async_trait]
impl ServiceDiscovery for Dns {
    async fn discover(&self) -> pingora::Result<(BTreeSet<Backend>, HashMap<u64, bool>)> {
        let lookup = tokio::net::lookup_host((self.host.as_str(), self.port));
        let found = tokio::time::timeout(LOOKUP, lookup)
            .await
            .map_err(|_| Error::explain(ErrorType::ConnectTimedout, "the name look-up took too long"))?
            .or_err(ErrorType::ConnectNoRoute, "the name cannot be resolved")?;
        let mut backends = BTreeSet::new();
        for address in found {
            backends.insert(Backend::new(&address.to_string())?);
        }
        Ok((backends, HashMap::new()))
    }
}
