//! What the nodes of a fleet tell each other of their upstreams.
//!
//! A node gives out **news**: what it has seen of each place since it was last asked, as counts and not as
//! a state, so that the fleet can add up what its nodes have seen. It takes in the fleet's **word**: what all
//! news together come to. Both travel off the path of requests, and every time in them is a *duration*: no
//! two clocks are compared. What a node sees acts on that node at once; the word only adds to it.
//!
//! A **generation** names what the fleet's breaker of a place last changed to. News carry the one that their
//! calls began under, and count for nothing under another: a slow success from before an opening does
//! not close it, on whichever node it ran.
//!
//! A **claim** is the right to do what only one node may do at a time: to probe a half-open place, or to try
//! as a last resort. It is asked for ahead of need and for a short term ([`TERM`]), so that it cannot leak;
//! while a call uses it, it lasts until that call's watchdog. Nobody begins anything in the last bit of a
//! term, for the fleet has to hear of it before the term is over.
//!
//! Failures to connect are **held back** for a second, or until anybody gives a sign of life: until then they
//! may turn out to be this node's own ([`super::node_fault`]), and what has been told cannot be taken back.
//!
//! Deliberately absent: the watchdogs' timings. They hold the way from this node to the upstream as much as
//! the upstream, and a new node has its cold limits for the minute in which it learns its own.

use std::time::{Duration, Instant};

use crate::ids::{CredentialId, EndpointId, ModelId};
use crate::upstream::rest::Cause;

/// How long a claim lasts that nothing uses.
pub const TERM: Duration = Duration::from_secs(2);
/// So much of a claim must be left to begin something under it.
const MARGIN: Duration = Duration::from_millis(250);
/// So long failures may turn out to be the node's own.
const HELD_BACK: Duration = Duration::from_secs(1);

/// What a node has seen and done since it was last asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct News {
    /// Of places.
    pub places: Vec<PlaceNews>,
    /// Of credentials.
    pub rests: Vec<RestNews>,
    /// Of the gates of models.
    pub gates: Vec<(ModelId, Ask)>,
}

/// What a node tells of one place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlaceNews {
    /// Which.
    pub place: EndpointId,
    /// Under which generation its calls began.
    pub generation: Generation,
    /// How they ended.
    pub tally: Tally,
    /// It is the last route of a model here: the rate of its failures must not refuse it.
    pub needed: bool,
    /// A free check has passed: an open breaker may be probed at once.
    pub check_passed: bool,
    /// It named a time before which it is not to be asked.
    pub rest: Option<Duration>,
    /// About the right to probe it.
    pub ask: Option<Ask>,
}

/// What a node tells of one credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestNews {
    /// It rests.
    Rests {
        /// Which.
        credential: CredentialId,
        /// Why and for how long.
        rest: RestWord,
    },
    /// Something was served with it after its rest.
    Served(CredentialId),
}

/// A rest of a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestWord {
    /// Why.
    pub cause: Cause,
    /// How long still.
    pub remaining: Duration,
    /// How many there were in a row.
    pub times: u32,
}

/// What the fleet says of one place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlaceWord {
    /// To what its breaker has changed last.
    pub generation: Generation,
    /// How its breaker stands.
    pub phase: Phase,
    /// It was opened for the rate of its failures, not for a row of them.
    pub by_rate: bool,
    /// Openings that are not forgiven.
    pub openings: u32,
    /// How long it itself asked to be left alone; zero: it did not.
    pub rest: Duration,
    /// How its calls on all nodes went.
    pub health: HealthWord,
}

/// The numbers behind a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HealthWord {
    /// Successes, faded.
    pub good: f64,
    /// Failures, faded.
    pub bad: f64,
    /// The fast factor.
    pub fast: f64,
    /// How long ago it came back.
    pub reopened: Option<Duration>,
}

/// How the fleet's breaker of a place stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It admits.
    Closed,
    /// It refuses for so long; when that is over it may be probed.
    Open(Duration),
    /// It may be probed, and so many probes have succeeded.
    HalfOpen(u32),
}

/// A change of the fleet's breaker of a place; a larger one is later. None at all is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// How a word came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// As the answer to our own question: nothing later has been said before it.
    Answer,
    /// As an announcement, which an answer may have overtaken.
    Announcement,
}

/// What a node asks for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// To have it for a term.
    Want,
    /// A call uses it, for so long at most.
    Hold(Duration),
    /// It is free again.
    Free,
}

/// How calls ended, in the order that matters to a breaker and a weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Successes.
    pub good: u32,
    /// Failures.
    pub bad: u32,
    /// What the failures count in a row: two each, one where a reused connection may be to blame.
    pub units: u32,
    /// The same, of those after the last success.
    pub tail: u32,
    /// Successes after the last failure.
    pub streak: u32,
}

impl Tally {
    /// Counts a success.
    pub const fn success(&mut self) {
        self.good = self.good.saturating_add(1);
        self.streak = self.streak.saturating_add(1);
        self.tail = 0;
    }

    /// Counts a failure of so many units.
    pub const fn failure(&mut self, units: u32) {
        self.bad = self.bad.saturating_add(1);
        self.units = self.units.saturating_add(units);
        self.tail = self.tail.saturating_add(units);
        self.streak = 0;
    }

    /// Adds what came after it.
    pub const fn then(&mut self, later: Self) {
        let Self { good, bad, units, tail, streak } = later;
        self.tail = if good > 0 { tail } else { self.tail.saturating_add(tail) };
        self.streak = if bad > 0 { streak } else { self.streak.saturating_add(streak) };
        self.good = self.good.saturating_add(good);
        self.bad = self.bad.saturating_add(bad);
        self.units = self.units.saturating_add(units);
    }

    /// Whether nothing was counted.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.good == 0 && self.bad == 0
    }
}

/// What a node has not told yet of one place.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Untold {
    told: Tally,
    /// Failures to connect, since this moment.
    held: Option<(Instant, Tally)>,
    pub(crate) check_passed: bool,
    pub(crate) rest: Option<Instant>,
}

impl Untold {
    pub(crate) fn success(&mut self) {
        // It is a sign of life, too: what was held back came before it.
        self.release();
        self.told.success();
    }

    pub(crate) const fn failure(&mut self, units: u32) {
        self.told.failure(units);
    }

    /// A failure that may turn out to be the node's own.
    pub(crate) fn hold_back(&mut self, now: Instant, units: u32) {
        self.held.get_or_insert_with(|| (now, Tally::default())).1.failure(units);
    }

    /// What was held back is the place's.
    pub(crate) fn release(&mut self) {
        if let Some((_, held)) = self.held.take() {
            self.told.then(held);
        }
    }

    /// What was held back was the node's own.
    pub(crate) const fn forget_held(&mut self) {
        self.held = None;
    }

    /// Calls of before a change of the breaker count for nothing after it.
    pub(crate) const fn forget_calls(&mut self) {
        self.told = Tally { good: 0, bad: 0, units: 0, tail: 0, streak: 0 };
        self.held = None;
    }

    pub(crate) const fn holds_back(&self) -> bool {
        self.held.is_some()
    }

    /// What may be told now.
    pub(crate) fn take(&mut self, now: Instant) -> Tally {
        if self.held.is_some_and(|(since, _)| now.saturating_duration_since(since) > HELD_BACK) {
            self.release();
        }
        std::mem::take(&mut self.told)
    }
}

/// A node's side of a right that only one node has at a time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Claim {
    until: Option<Instant>,
    /// The fleet knows that a call uses it until then.
    held: Option<Instant>,
}

impl Claim {
    /// Whether something may be begun under it.
    pub(crate) fn is_good(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now + MARGIN < until)
    }

    /// It is ours until then.
    pub(crate) const fn granted(&mut self, until: Option<Instant>) {
        self.until = until;
    }

    /// What to say about it now. `used`: until when a call uses it; `wanted`: somebody may need it soon.
    pub(crate) fn ask(&mut self, now: Instant, used: Option<Instant>, wanted: bool) -> Option<Ask> {
        let used = used.filter(|end| *end > now);
        if let Some(end) = used {
            if self.held.is_some_and(|held| held >= end) {
                return None;
            }
            self.held = Some(end);
            return Some(Ask::Hold(end - now));
        }
        if self.held.take().is_some() {
            self.until = None;
            return Some(if wanted { Ask::Want } else { Ask::Free });
        }
        if !wanted || self.until.is_some_and(|until| now + TERM / 2 < until) {
            return None;
        }
        // Another node may be waiting for it, and have it before the answer is here.
        self.until = None;
        Some(Ask::Want)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn held_back_failures_are_told_after_a_second_or_a_sign_of_life_and_never_when_taken_back() {
        let now = Instant::now();
        let mut untold = Untold::default();
        untold.hold_back(now, 2);
        assert!(untold.take(now + HELD_BACK).is_empty(), "they may be the node's own");
        assert_eq!(untold.take(now + HELD_BACK * 2).bad, 1);
        untold.hold_back(now, 2);
        untold.success();
        let told = untold.take(now);
        assert_eq!((told.bad, told.good, told.tail, told.streak), (1, 1, 0, 1), "it failed before it served");
        untold.hold_back(now, 2);
        untold.forget_held();
        assert!(untold.take(now + HELD_BACK * 2).is_empty());
    }

    #[test]
    fn a_claim_is_asked_for_again_at_half_its_term_held_while_it_is_used_and_then_given_back() {
        let now = Instant::now();
        let mut claim = Claim::default();
        assert_eq!((claim.is_good(now), claim.ask(now, None, true)), (false, Some(Ask::Want)));
        claim.granted(Some(now + TERM));
        assert_eq!((claim.is_good(now), claim.ask(now, None, true)), (true, None));
        assert!(!claim.is_good(now + TERM - MARGIN), "the fleet could not hear of it in time");
        assert_eq!(claim.ask(now + TERM / 2, None, true), Some(Ask::Want));
        assert!(!claim.is_good(now + TERM / 2), "it may have gone to another node by now");
        claim.granted(Some(now + TERM));
        let end = now + Duration::from_secs(30);
        assert_eq!(claim.ask(now, Some(end), true), Some(Ask::Hold(end - now)));
        assert_eq!(claim.ask(now, Some(end), true), None, "said once");
        assert_eq!(claim.ask(now, None, false), Some(Ask::Free));
        assert_eq!((claim.ask(now, None, false), claim.is_good(now)), (None, false));
    }

    proptest! {
        #[test]
        fn tallies_of_parts_add_up_to_the_tally_of_the_whole(
            calls in prop::collection::vec(prop::option::of(1_u32..=2), 0..60), cut in 0_usize..60,
        ) {
            let count = |calls: &[Option<u32>]| {
                let mut tally = Tally::default();
                for call in calls {
                    match call {
                        None => tally.success(),
                        Some(units) => tally.failure(*units),
                    }
                }
                tally
            };
            let (before, after) = calls.split_at(cut.min(calls.len()));
            let mut sum = count(before);
            sum.then(count(after));
            prop_assert_eq!(sum, count(&calls));
        }
    }
}
