//! What the gateway knows right now: the catalogue, the keys, and how every endpoint does.

pub mod endpoint;
pub mod keys;
pub mod peer;
pub mod upstreams;

use std::sync::Arc;

use arc_swap::ArcSwap;
use filters::ids::EndpointId;
use pingora::{Error, ErrorType};

use crate::config::checked::{Catalogue, Endpoint, Routing};
use crate::credential::{Credential, Reread};
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
