//! Is it them, or is it us?
//!
//! When a node loses its network or its resolver, *every* endpoint fails to connect, within the second.
//! Blaming them would open all breakers of the fleet for one broken node. So: connect-type failures of
//! all endpoints that this node has lately talked to, of at least two providers, within 1 s and without
//! any other sign of life in between, are the node's own. It then fails its readiness, blames nobody,
//! and takes back the blame of that second. The first sign of life from anyone ends it.
//!
//! Two providers, because one provider's outage looks the same from a node that talks to nobody else.
//! "Lately" is a minute, because an endpoint that no traffic reaches could never agree.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::ids::EndpointId;

const WITHIN: Duration = Duration::from_secs(1);
const LATELY: Duration = Duration::from_secs(60);
const PROVIDERS_MIN: usize = 2;

/// What one attempt says about the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The other side was reached, whatever it said.
    Life,
    /// No connection came about.
    NoConnection,
}

/// Who is to blame for a failure to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The endpoint.
    Endpoint,
    /// This node, since this very failure: take back what was blamed within the last second.
    NodeFromNow,
    /// This node.
    Node,
}

/// The machine. Its map is bounded by the catalogue's endpoints.
#[derive(Clone, Debug, Default)]
pub struct NodeFault {
    last: HashMap<EndpointId, Seen>,
    since: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    provider: usize,
    sign: Sign,
}

impl NodeFault {
    /// Since when this node has been cut off.
    #[must_use]
    pub const fn since(&self) -> Option<Instant> {
        self.since
    }

    /// Notes an attempt's sign. Only a failure to connect has anybody to blame.
    pub fn note(&mut self, now: Instant, endpoint: EndpointId, provider: usize, sign: Sign) -> Blame {
        self.last.insert(endpoint, Seen { at: now, provider, sign });
        if sign == Sign::Life {
            self.since = None;
            return Blame::Endpoint;
        }
        if self.since.is_some() {
            return Blame::Node;
        }
        if self.all_are_cut_off(now) {
            self.since = Some(now);
            return Blame::NodeFromNow;
        }
        Blame::Endpoint
    }

    fn all_are_cut_off(&self, now: Instant) -> bool {
        let age = |seen: &Seen| now.saturating_duration_since(seen.at);
        let mut providers = vec![];
        for seen in self.last.values().filter(|seen| age(seen) < LATELY) {
            if seen.sign == Sign::Life || age(seen) > WITHIN {
                return false;
            }
            if !providers.contains(&seen.provider) {
                providers.push(seen.provider);
            }
        }
        providers.len() >= PROVIDERS_MIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn failures_of_all_endpoints_within_a_second_are_the_nodes_own() {
        let start = Instant::now();
        let mut node = NodeFault::default();
        assert_eq!(node.note(start, EndpointId(0), 0, Sign::NoConnection), Blame::Endpoint);
        assert_eq!(node.note(at(start, 300), EndpointId(1), 1, Sign::NoConnection), Blame::NodeFromNow);
        assert_eq!(node.note(at(start, 900), EndpointId(0), 0, Sign::NoConnection), Blame::Node);
        assert_eq!(node.since(), Some(at(start, 300)));
        node.note(at(start, 2_000), EndpointId(1), 1, Sign::Life);
        assert_eq!(node.since(), None);
    }

    #[test]
    fn one_endpoint_that_lives_clears_the_node() {
        let start = Instant::now();
        let mut node = NodeFault::default();
        node.note(start, EndpointId(2), 2, Sign::Life);
        node.note(at(start, 10), EndpointId(0), 0, Sign::NoConnection);
        assert_eq!(node.note(at(start, 20), EndpointId(1), 1, Sign::NoConnection), Blame::Endpoint);
    }

    #[test]
    fn one_providers_outage_is_not_the_nodes() {
        let start = Instant::now();
        let mut node = NodeFault::default();
        for n in 0..4 {
            assert_eq!(node.note(start, EndpointId(n), 7, Sign::NoConnection), Blame::Endpoint);
        }
    }

    #[test]
    fn failures_that_lie_apart_are_not_the_nodes() {
        let start = Instant::now();
        let mut node = NodeFault::default();
        node.note(start, EndpointId(0), 0, Sign::NoConnection);
        assert_eq!(node.note(at(start, 1_500), EndpointId(1), 1, Sign::NoConnection), Blame::Endpoint);
    }

    #[test]
    fn an_endpoint_that_nobody_has_called_for_a_minute_has_no_say() {
        let start = Instant::now();
        let mut node = NodeFault::default();
        node.note(start, EndpointId(9), 9, Sign::Life);
        node.note(at(start, 61_000), EndpointId(0), 0, Sign::NoConnection);
        assert_eq!(node.note(at(start, 61_100), EndpointId(1), 1, Sign::NoConnection), Blame::NodeFromNow);
    }
}
