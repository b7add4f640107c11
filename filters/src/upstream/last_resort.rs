//! Who may still try when every route of a model refuses.
//!
//! Answering 503 until the soonest breaker half-opens would keep a model down for up to five minutes after
//! it is well again. Letting everybody try would meet the first endpoint that comes back with a crowd and
//! throw it over. So one request at a time tries, back to back: when it has failed, the next may go. Each
//! success doubles how many may go at once (1, 2, 4 …), a quarter of a second after its attempt began at the
//! soonest: an upstream that answers within a millisecond would else meet the whole crowd in the first ten. So a
//! healthy model is open again after two seconds. A failure while still every route refuses goes back to
//! one (once a breaker has closed, a single failure is a matter of weights again). At 256 at once the gate is gone.
//!
//! A try holds its place until its end, at most until its watchdog would have ended it: a hung upstream
//! keeps nobody waiting longer than that, and no place can leak.
//!
//! In a fleet one node at a time has a gate through which anybody goes while every route refuses: the one with
//! the fleet's claim ([`super::fleet`]). Once a breaker has closed every node opens its own, from one.
//!
//! Deliberately absent: routes that *rest*. A 429 named its time, and asking earlier makes it worse.

use std::time::{Duration, Instant};

/// How long a place is taken by an attempt that went well, at least.
const STEP: Duration = Duration::from_millis(250);
/// So many at once, and there is no need of a gate.
const PLACES_MAX: usize = 256;

/// The gate of one model.
#[derive(Clone, Debug, Default)]
pub struct LastResort {
    /// How many may try at once; none: the gate is away.
    places: usize,
    taken: Vec<Place>,
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    id: u64,
    began: Instant,
    until: Instant,
    /// Its attempt went well: at its end there are twice as many.
    succeeded: bool,
}

/// A place at the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceId(u64);

/// What the gate says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// There is none.
    Away,
    /// Try; give the place back.
    Try(PlaceId),
    /// All places are taken.
    Full,
}

impl LastResort {
    /// A request asks. `all_refuse`: no route of the model admits by itself, which puts the gate up.
    pub fn ask(&mut self, now: Instant, all_refuse: bool, until: Instant) -> Gate {
        self.end_places(now);
        if self.places == 0 && !all_refuse {
            return Gate::Away;
        }
        self.places = self.places.max(1);
        if self.taken.len() >= self.places {
            return Gate::Full;
        }
        let id = self.next;
        self.next += 1;
        self.taken.push(Place { id, began: now, until, succeeded: false });
        Gate::Try(PlaceId(id))
    }

    /// Puts the gate up without letting anybody through: another node's turn.
    pub fn put_up(&mut self) {
        self.places = self.places.max(1);
    }

    /// Until when somebody may be trying.
    #[must_use]
    pub fn used_until(&self) -> Option<Instant> {
        self.taken.iter().map(|place| place.until).max()
    }

    /// The request makes an attempt: its place is good until that one's watchdog.
    pub fn hold(&mut self, place: PlaceId, until: Instant) {
        if let Some(held) = self.taken.iter_mut().find(|held| held.id == place.0) {
            held.until = until;
        }
    }

    /// An attempt went well: twice as many may go at once, when its place ends.
    pub fn succeeded(&mut self, now: Instant, place: PlaceId) {
        if let Some(held) = self.taken.iter_mut().find(|held| held.id == place.0) {
            held.succeeded = true;
            held.until = now.max(held.began + STEP);
        }
    }

    fn end_places(&mut self, now: Instant) {
        let successes = self.taken.iter().filter(|place| place.succeeded && place.until <= now).count();
        self.taken.retain(|place| place.until > now);
        for _ in 0..successes {
            self.places = self.places.saturating_mul(2);
        }
        if self.places >= PLACES_MAX {
            *self = Self { next: self.next, ..Self::default() };
        }
    }

    /// An attempt failed. While every route refuses that means: back to one. The place is kept, since the
    /// request may go on to the next route.
    pub fn failed(&mut self, all_refuse: bool) {
        if all_refuse {
            self.places = self.places.min(1);
        }
    }

    /// The request is over.
    pub fn leave(&mut self, place: PlaceId) {
        self.taken.retain(|held| held.id != place.0 || held.succeeded);
    }

    /// Whether the gate is up.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.places > 0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const LONG: Duration = Duration::from_secs(5);

    fn try_all(gate: &mut LastResort, now: Instant, n: usize) -> Vec<PlaceId> {
        (0..n)
            .filter_map(|_| match gate.ask(now, true, now + LONG) {
                Gate::Try(place) => Some(place),
                Gate::Away | Gate::Full => None,
            })
            .collect()
    }

    #[test]
    fn there_is_no_gate_while_a_route_admits() {
        let now = Instant::now();
        assert_eq!(LastResort::default().ask(now, false, now), Gate::Away);
    }

    #[test]
    fn one_at_a_time_tries_and_each_success_doubles_how_many_may() {
        let mut now = Instant::now();
        let mut gate = LastResort::default();
        for round in 0..8 {
            let places = try_all(&mut gate, now, 1_000);
            assert_eq!(places.len(), 1 << round);
            gate.succeeded(now, places[0]);
            places.iter().for_each(|p| gate.leave(*p));
            now += STEP;
        }
        assert_eq!(gate.ask(now, false, now), Gate::Away);
        assert!(!gate.is_up());
    }

    #[test]
    fn a_crowd_does_not_follow_an_answer_that_came_at_once() {
        let now = Instant::now();
        let mut gate = LastResort::default();
        let first = try_all(&mut gate, now, 1)[0];
        gate.succeeded(now, first);
        gate.leave(first);
        assert!(try_all(&mut gate, now + STEP / 2, 20).is_empty());
        assert_eq!(try_all(&mut gate, now + STEP, 20).len(), 2);
    }

    #[test]
    fn a_failure_goes_back_to_one_and_the_next_may_go_at_once() {
        let now = Instant::now();
        let mut gate = LastResort::default();
        let first = try_all(&mut gate, now, 9);
        gate.succeeded(now, first[0]);
        let second = try_all(&mut gate, now + STEP, 1);
        assert_eq!(second.len(), 1);
        gate.failed(true);
        assert_eq!(try_all(&mut gate, now + STEP, 9).len(), 0);
        gate.leave(second[0]);
        assert_eq!(try_all(&mut gate, now + STEP, 9).len(), 1);
    }

    #[test]
    fn a_place_ends_with_its_watchdog() {
        let now = Instant::now();
        let mut gate = LastResort::default();
        let hung = try_all(&mut gate, now, 9);
        gate.hold(hung[0], now + LONG * 2);
        assert!(try_all(&mut gate, now + LONG, 9).is_empty());
        assert_eq!(try_all(&mut gate, now + LONG * 2, 9).len(), 1);
    }

    proptest! {
        #[test]
        fn never_more_places_are_taken_than_there_are(
            steps in prop::collection::vec((0_u64..4_000, 0_u8..4), 0..200),
        ) {
            let (mut now, mut gate, mut held) = (Instant::now(), LastResort::default(), vec![]);
            for (wait, what) in steps {
                now += Duration::from_millis(wait);
                match (what, held.pop()) {
                    (0, Some(place)) => gate.succeeded(now, place),
                    (1, Some(place)) => { gate.failed(true); gate.leave(place); }
                    _ => if let Gate::Try(place) = gate.ask(now, true, now + LONG) {
                        prop_assert!(gate.taken.len() <= gate.places && gate.places < PLACES_MAX);
                        held.push(place);
                    },
                }
            }
        }
    }
}
