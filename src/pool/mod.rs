//! What the gateway knows right now: the catalogue, the keys, and how every endpoint does.

pub mod endpoint;
pub mod keys;

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::config::checked::{Catalogue, Routing};
use endpoint::Live;
use keys::KeyTable;

/// One consistent view; a request keeps the one that it began with.
pub struct Snapshot {
    pub catalogue: Catalogue,
    pub routing: Routing,
    /// By `EndpointId`, beside `catalogue.endpoints`.
    pub live: Vec<Arc<Live>>,
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

    /// The snapshot for a request that begins now.
    #[must_use]
    pub fn load(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }
}
