//! How many connections there are, in all and from one address.
//!
//! Exact: a [`Counted`] lives inside the stream that Pingora holds, so it goes when the socket goes,
//! however that comes about. The lock is taken twice in a connection's life.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::IntGauge;

use super::Refused;

/// The connections of callers.
#[derive(Debug)]
pub struct Connections {
    all_max: usize,
    per_address_max: usize,
    all: AtomicUsize,
    /// Only addresses that have one.
    by_address: Mutex<HashMap<IpAddr, usize>>,
    open: IntGauge,
}

/// One connection, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Counted {
    connections: Arc<Connections>,
    /// Those of its thread.
    of_thread: Arc<AtomicUsize>,
    address: Option<IpAddr>,
}

impl Connections {
    /// Counts up to these bounds, and shows in `open`.
    #[must_use]
    pub fn new(all_max: usize, per_address_max: usize, open: IntGauge) -> Arc<Self> {
        let (all, by_address) = (AtomicUsize::new(0), Mutex::default());
        Arc::new(Self { all_max, per_address_max, all, by_address, open })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.all.load(Ordering::Acquire)
    }

    /// Counts one more, for its thread too. Its address is not known yet.
    pub(super) fn enter(self: &Arc<Self>, of_thread: &Arc<AtomicUsize>) -> Result<Counted, Refused> {
        let one_more = |all: usize| (all < self.all_max).then_some(all + 1);
        match self.all.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => {
                self.open.inc();
                of_thread.fetch_add(1, Ordering::Relaxed);
                let (connections, of_thread) = (Arc::clone(self), Arc::clone(of_thread));
                Ok(Counted { connections, of_thread, address: None })
            }
            Err(_) => Err(Refused::AllTaken),
        }
    }
}

impl Counted {
    /// Counts it for the address it is from.
    pub(super) fn from(mut self, address: IpAddr) -> Result<Self, Refused> {
        let address = counted_as(address);
        let mut by_address = self.connections.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        let count = by_address.entry(address).or_default();
        if *count >= self.connections.per_address_max {
            return Err(Refused::AddressTaken);
        }
        *count += 1;
        drop(by_address);
        self.address = Some(address);
        Ok(self)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(address) = self.address {
            let mut by_address = self.connections.by_address.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(count) = by_address.get_mut(&address) {
                *count -= 1;
                if *count == 0 {
                    by_address.remove(&address);
                }
            }
        }
        self.of_thread.fetch_sub(1, Ordering::Relaxed);
        self.connections.all.fetch_sub(1, Ordering::AcqRel);
        self.connections.open.dec();
    }
}

/// With IPv6 one caller has a whole /64.
fn counted_as(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(all: usize, per_address: usize) -> Arc<Connections> {
        Connections::new(all, per_address, IntGauge::new("open", "open").unwrap())
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_bound_of_an_address_holds_until_one_of_its_connections_closes() {
        let connections = connections(10, 2);
        let enter = |address| {
            connections.enter(&Arc::default()).and_then(|one| one.from(ip(address))).map_err(Refused::word)
        };
        let first = enter("192.0.2.1").unwrap();
        let _second = enter("::ffff:192.0.2.1").unwrap();
        assert_eq!(enter("192.0.2.1").unwrap_err(), "address_taken");
        let _other = enter("192.0.2.2").unwrap();
        drop(first);
        drop(enter("192.0.2.1").unwrap());
        assert_eq!(connections.open.get(), 2, "a refused one is not counted");
    }

    #[test]
    fn the_bound_of_all_holds_until_one_closes_and_nothing_is_kept_of_those_that_left() {
        let connections = connections(2, 2);
        let of_thread = Arc::default();
        let first = connections.enter(&of_thread).unwrap().from(ip("192.0.2.1")).unwrap();
        let second = connections.enter(&of_thread).unwrap();
        assert_eq!(connections.enter(&of_thread).unwrap_err(), Refused::AllTaken);
        assert_eq!(of_thread.load(Ordering::Relaxed), 2, "a refused one is not counted");
        drop(first);
        let third = connections.enter(&of_thread).unwrap();
        drop((second, third));
        assert_eq!(of_thread.load(Ordering::Relaxed), 0);
        assert!(connections.by_address.lock().unwrap().is_empty() && connections.open.get() == 0);
    }

    #[test]
    fn a_callers_addresses_of_one_network_are_one() {
        let one = counted_as(ip("2001:db8:1:2:3::4"));
        assert_eq!(one, counted_as(ip("2001:db8:1:2::1")));
        assert_ne!(one, counted_as(ip("2001:db8:1:3::1")));
    }
}
