//! How many bytes of request bodies are in memory, over all calls.
//!
//! A body is kept until the commit, so that every attempt can send it whole. The sum is bounded:
//! beyond it callers get 503 with a Retry-After, rather than the machine its OOM killer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The sum, and its bound.
#[derive(Debug)]
pub struct Bodies {
    bytes: AtomicUsize,
    bytes_max: AtomicUsize,
}

/// Bytes that one call has reserved.
#[derive(Debug)]
pub(super) struct Reserved {
    bodies: Arc<Bodies>,
    bytes: usize,
}

impl Bodies {
    /// Room for so many bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes: AtomicUsize::new(0), bytes_max: AtomicUsize::new(bytes_max) })
    }

    /// From now on there is room for so many bytes; what is reserved stays.
    pub fn set_max(&self, bytes_max: usize) {
        self.bytes_max.store(bytes_max, Ordering::Release);
    }

    /// Bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    /// A reservation of nothing yet.
    pub(super) fn reserve(self: &Arc<Self>) -> Reserved {
        Reserved { bodies: Arc::clone(self), bytes: 0 }
    }
}

impl Reserved {
    /// Makes the reservation at least `bytes`; answers whether there is room.
    pub(super) fn grow_to(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let bytes_max = self.bodies.bytes_max.load(Ordering::Acquire);
        let fits = |sum: usize| sum.checked_add(more).filter(|sum| *sum <= bytes_max);
        let grown = self.bodies.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok();
        if grown {
            self.bytes += more;
        }
        grown
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.bodies.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_comes_back_and_the_bound_holds() {
        let bodies = Bodies::new(100);
        let mut one = bodies.reserve();
        assert!(one.grow_to(60) && one.grow_to(40), "growing to less changes nothing");
        let mut two = bodies.reserve();
        assert!(!two.grow_to(41) && two.grow_to(40));
        assert_eq!(bodies.bytes(), 100);
        drop((one, two));
        assert_eq!(bodies.bytes(), 0);
    }
}
