//! What the gateway knows right now: the catalogue, the keys, and how every endpoint does.

mod cork;
pub mod endpoint;
mod idle;
pub mod keys;
pub mod peer;
pub mod upstreams;
pub mod wire;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use filters::ids::EndpointId;
use pingora::{Error, ErrorType};

use crate::config::checked::{Catalogue, Endpoint, Provider, Routing};
use crate::credential::{Credential, Reread};
use crate::ops::metrics::calls::Counted;
use endpoint::Addresses;
use keys::KeyTable;
use upstreams::Upstreams;

/// How long a connection may take that only asks whether there is a network.
const REACH: Duration = Duration::from_secs(1);

/// One consistent view; a request keeps the one that it began with.
pub struct Snapshot {
    pub catalogue: Catalogue,
    pub routing: Routing,
    /// By `EndpointId`, beside `catalogue.endpoints`; those of one provider are one.
    pub addresses: Vec<Arc<Addresses>>,
    pub upstreams: Arc<Upstreams>,
    /// What served calls of its routes are counted by.
    pub counted: Counted,
}

impl Snapshot {
    /// A first view of a catalogue.
    ///
    /// # Errors
    /// When the check of a provider cannot be made.
    pub fn new(catalogue: Catalogue, routing: Routing) -> pingora::Result<Self> {
        let addresses = addresses_of(&catalogue, |provider| Addresses::new(provider).map(Arc::new))?;
        let upstreams = Upstreams::new(&catalogue, &routing);
        Ok(Self { catalogue, routing, addresses, upstreams, counted: Counted::default() })
    }

    /// The view of another catalogue, with all that is known of what is in both.
    ///
    /// # Errors
    /// When the check of a provider cannot be made.
    pub fn reloaded(&self, catalogue: Catalogue, routing: Routing) -> pingora::Result<Self> {
        let known = |provider: &Provider| {
            self.providers()
                .find(|(old, _)| old.is_reached_like(provider))
                .map(|(_, known)| Arc::clone(known))
        };
        let addresses = addresses_of(&catalogue, |provider| match known(provider) {
            Some(known) => Ok(known),
            None => Addresses::new(provider).map(Arc::new),
        })?;
        let upstreams = self.upstreams.reloaded(&catalogue, &routing);
        let new = Self { catalogue, routing, addresses, upstreams, counted: Counted::default() };
        new.forgive_changed_credentials(self);
        Ok(new)
    }

    /// What was said about a credential is not held against another one in its place.
    fn forgive_changed_credentials(&self, old: &Self) {
        for (at, endpoint) in self.catalogue.endpoints.iter().enumerate() {
            let before = old.catalogue.endpoints.iter().find(|known| known.name == endpoint.name);
            let secret = |endpoint: &Endpoint| endpoint.credential().map(|it| it.held().secret.clone());
            if before.is_some_and(|before| secret(before) != secret(endpoint)) {
                self.upstreams.renewed(EndpointId(at));
            }
        }
    }

    /// Every provider that has a route, each once.
    pub fn providers(&self) -> impl Iterator<Item = (&Arc<Provider>, &Arc<Addresses>)> {
        let all = self.catalogue.endpoints.iter().zip(&self.addresses).enumerate();
        let first = all.filter(|(at, (_, addresses))| {
            let before = self.addresses.iter().take(*at);
            !before.into_iter().any(|known| Arc::ptr_eq(known, addresses))
        });
        first.map(|(_, (endpoint, addresses))| (&endpoint.provider, addresses))
    }

    /// A free check of a provider has passed.
    pub fn check_passed(&self, provider: &str) {
        for (at, endpoint) in self.catalogue.endpoints.iter().enumerate() {
            if endpoint.provider.name == provider {
                self.upstreams.check_passed(EndpointId(at));
            }
        }
    }
}

impl Snapshot {
    /// An endpoint of this snapshot.
    ///
    /// # Errors
    /// When it is of another one.
    pub fn endpoint(&self, id: EndpointId) -> pingora::Result<&Endpoint> {
        let unknown = || Error::explain(ErrorType::InternalError, "an endpoint that is not in the snapshot");
        self.catalogue.endpoints.get(id.0).ok_or_else(unknown)
    }

    /// The first endpoint of the place that an endpoint is at.
    #[must_use]
    pub fn place(&self, id: EndpointId) -> EndpointId {
        self.catalogue.endpoints.get(id.0).map_or(id, |endpoint| endpoint.place)
    }

    /// Reads every credential that is in a file again, and forgets what was held against those that changed. It
    /// waits for the disk.
    pub fn reread_credentials(&self) {
        let mut seen: Vec<*const Credential> = vec![];
        for (at, endpoint) in self.catalogue.endpoints.iter().enumerate() {
            let Some(credential) = endpoint.credential().filter(|credential| credential.may_change()) else {
                continue;
            };
            // The endpoints of one provider share its credentials, and what is known of them.
            if seen.contains(&std::ptr::from_ref(credential)) {
                continue;
            }
            seen.push(std::ptr::from_ref(credential));
            let provider = endpoint.provider.name.as_str();
            match credential.reread() {
                Reread::Same => {}
                Reread::Replaced => {
                    self.upstreams.renewed(EndpointId(at));
                    tracing::info!(provider, "a credential was replaced");
                }
                Reread::Unusable(why) => {
                    tracing::error!(
                        provider,
                        why,
                        "a credential's file cannot be used: the last good one stays"
                    );
                }
            }
        }
    }

    /// Tries to reach somebody, for a node that reaches nobody: while it is not ready no call comes that could
    /// find out. Answers whether somebody was reached.
    pub async fn reach_somebody(&self) -> bool {
        for (at, addresses) in self.addresses.iter().enumerate() {
            let Some(address) = addresses.next().await else { continue };
            let connect = tokio::net::TcpStream::connect(address);
            if let Ok(Ok(_)) = tokio::time::timeout(REACH, connect).await {
                self.upstreams.reached(EndpointId(at));
                return true;
            }
        }
        false
    }
}

/// The addresses of every endpoint; those of one provider are made once.
fn addresses_of(
    catalogue: &Catalogue,
    mut make: impl FnMut(&Provider) -> pingora::Result<Arc<Addresses>>,
) -> pingora::Result<Vec<Arc<Addresses>>> {
    let mut of_providers: HashMap<&str, Arc<Addresses>> = HashMap::new();
    let mut addresses = vec![];
    for endpoint in &catalogue.endpoints {
        let provider = &endpoint.provider;
        addresses.push(match of_providers.entry(provider.name.as_str()) {
            Entry::Occupied(known) => Arc::clone(known.get()),
            Entry::Vacant(new) => Arc::clone(new.insert(make(provider)?)),
        });
    }
    Ok(addresses)
}

/// The current snapshot, swapped in whole.
pub struct Pool {
    current: ArcSwap<Snapshot>,
    keys: ArcSwap<KeyTable>,
}

impl Pool {
    /// Starts with this one.
    #[must_use]
    pub fn new(snapshot: Snapshot, keys: KeyTable) -> Self {
        Self { current: ArcSwap::from_pointee(snapshot), keys: ArcSwap::from_pointee(keys) }
    }

    /// The keys that are good now.
    #[must_use]
    pub fn keys(&self) -> Arc<KeyTable> {
        self.keys.load_full()
    }

    /// From now on these are the keys.
    pub fn set_keys(&self, keys: KeyTable) {
        self.keys.store(Arc::new(keys));
    }

    /// From now on requests begin with this one; those that run keep theirs.
    pub fn set(&self, snapshot: Snapshot) {
        self.current.store(Arc::new(snapshot));
    }

    /// The snapshot for a request that begins now.
    #[must_use]
    pub fn load(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }
}
