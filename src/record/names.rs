//! The words of a snapshot's endpoints: looked up once, and not for every record that names one.

use std::sync::{Arc, Weak};

use filters::ids::EndpointId;

use super::words::{Word, Words};
use crate::pool::Snapshot;

/// Snapshots that are known at once: the one of now, and the one before, of which calls are still under way.
const SNAPSHOTS_MAX: usize = 2;

/// What records say of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// The model whose route it is.
    pub(super) model: Word,
    pub(super) name: Word,
    pub(super) region: Word,
}

/// The endpoints of the latest snapshots. It does not keep one alive.
#[derive(Default)]
pub(super) struct Names(Vec<(Weak<Snapshot>, Vec<Named>)>);

impl Names {
    /// What an endpoint is called; empty words where the snapshot has none such.
    pub(super) fn of(&mut self, words: &mut Words, snapshot: &Arc<Snapshot>, id: EndpointId) -> Named {
        let is_this = |known: &Weak<Snapshot>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(snapshot));
        let at = self.0.iter().position(|(known, _)| is_this(known)).unwrap_or_else(|| {
            self.0.truncate(SNAPSHOTS_MAX - 1);
            self.0.insert(0, (Arc::downgrade(snapshot), all_of(words, snapshot)));
            0
        });
        let named = self.0.get(at).and_then(|(_, all)| all.get(id.0));
        named.copied().unwrap_or_else(|| nobody(words))
    }
}

fn nobody(words: &mut Words) -> Named {
    let nothing = words.number("");
    Named { model: nothing, name: nothing, region: nothing }
}

/// By [`EndpointId`].
fn all_of(words: &mut Words, snapshot: &Snapshot) -> Vec<Named> {
    let endpoints = snapshot.catalogue.endpoints.iter();
    let mut all: Vec<Named> = endpoints
        .map(|endpoint| Named {
            name: words.number(&endpoint.name),
            region: words.number(&endpoint.provider.region),
            ..nobody(words)
        })
        .collect();
    for model in snapshot.catalogue.models.values() {
        let word = words.number(&model.name);
        for route in &model.routes {
            if let Some(named) = all.get_mut(route.0) {
                named.model = word;
            }
        }
    }
    all
}
