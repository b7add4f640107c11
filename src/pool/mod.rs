//! What the gateway knows right now: the catalogue, the keys, and how every endpoint does.

pub mod endpoint;
pub mod keys;
pub mod upstreams;

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::config::checked::{Catalogue, Endpoint, Routing};
use endpoint::Addresses;
use keys::KeyTable;
use upstreams::Upstreams;

/// One consistent view; a request keeps the one that it began with.
pub struct Snapshot {
    pub catalogue: Catalogue,
    pub routing: Routing,
    /// By `EndpointId`, beside `catalogue.endpoints`.
    pub addresses: Vec<Arc<Addresses>>,
    pub upstreams: Arc<Upstreams>,
}

impl Snapshot {
    /// A first view of a catalogue.
    #[must_use]
    pub fn new(catalogue: Catalogue, routing: Routing) -> Self {
        let of = |endpoint: &Endpoint| Arc::new(Addresses::new(&endpoint.provider.base));
        let addresses = catalogue.endpoints.iter().map(of).collect();
        let upstreams = Upstreams::new(&catalogue, &routing);
        Self { catalogue, routing, addresses, upstreams }
    }

    /// The view of another catalogue, with all that is known of what is in both.
    #[must_use]
    pub fn reloaded(&self, catalogue: Catalogue, routing: Routing) -> Self {
        let known = |endpoint: &Endpoint| {
            let mut both = self.catalogue.endpoints.iter().zip(&self.addresses);
            let same = |old: &Endpoint| {
                old.name == endpoint.name && old.provider.base.is_same_host(&endpoint.provider.base)
            };
            both.find(|(old, _)| same(old)).map(|(_, addresses)| Arc::clone(addresses))
        };
        let of = |endpoint: &Endpoint| {
            known(endpoint).unwrap_or_else(|| Arc::new(Addresses::new(&endpoint.provider.base)))
        };
        let addresses = catalogue.endpoints.iter().map(of).collect();
        let upstreams = self.upstreams.reloaded(&catalogue, &routing);
        Self { catalogue, routing, addresses, upstreams }
    }
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
