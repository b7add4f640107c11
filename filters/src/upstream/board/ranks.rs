//! How every place stands in the kept order of its models, brought up to date before a call asks.
//!
//! Whatever changes what is known of a place marks it (`state_mut`, `touch_…`), and before the next call chooses, those that
//! were marked are ranked anew; so are those whose time has come: a rest or an open time is over, or a weight that comes back
//! may have grown beyond its bound. So the price of an event is paid once, and not by every call for every place.
//!
//! How long a bound holds follows from what a place has lost: a weight that lacks much comes back fast. Looked at again a
//! second later it is hardly above its bound's beginning, so few are looked at in vain.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::kept::{Kept, Member, Rank};
use super::lane::ON_TRIAL;
use super::{Board, Layout};
use crate::ids::{CredentialId, EndpointId, ModelId};
use crate::upstream::breaker::Admission;
use crate::upstream::rest::Standing;

/// How many places a call may get to, which is as many attempts as it may make. A model with no more of them keeps no order:
/// its places are looked at.
pub(super) const PLACES: usize = 5;
/// So much more a factor may be than it grows to by then, for rounding.
const ROUNDING: f64 = 1.0 + 1e-14;

/// What is kept of all models.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranks {
    models: Vec<Option<Kept>>,
    /// By place: in which models it is, and where in their order.
    of_place: Vec<Vec<(ModelId, usize)>>,
    /// Whose places are told apart by what happens to a credential.
    of_credential: HashMap<CredentialId, Vec<EndpointId>>,
    /// Places of which something has changed, each once.
    stale: Vec<EndpointId>,
    is_stale: Vec<bool>,
    /// Places that have to be ranked again at a moment, each once.
    due: BTreeSet<(Instant, EndpointId)>,
    due_at: Vec<Option<Instant>>,
}

impl Ranks {
    pub(super) fn new(layout: &Layout) -> Self {
        let places = layout.endpoints.len();
        let mut ranks = Self {
            of_place: vec![vec![]; places],
            is_stale: vec![false; places],
            due_at: vec![None; places],
            ..Self::default()
        };
        for (at, spec) in layout.models.iter().enumerate() {
            let mut members: Vec<Member> = vec![];
            let mut is_even = true;
            for endpoint in &spec.routes {
                let Some(of) = layout.endpoints.get(endpoint.0) else { continue };
                let slot = ranks.slot(ModelId(at), of.place).unwrap_or_else(|| {
                    if let Some(of_place) = ranks.of_place.get_mut(of.place.0) {
                        of_place.push((ModelId(at), members.len()));
                    }
                    members.push(Member::new(of.place, of.weight));
                    members.len() - 1
                });
                if let Some(member) = members.get_mut(slot) {
                    is_even &= member.weight == of.weight && !member.routes.contains(endpoint);
                    member.routes.push(*endpoint);
                }
            }
            // A place whose credentials differ in weight weighs what the next of them does: that is looked at.
            let keeps = is_even && members.len() > PLACES;
            ranks.models.push(keeps.then(|| Kept::new(members, spec.sort)));
        }
        for spec in &layout.endpoints {
            let places = ranks.of_credential.entry(spec.credential).or_default();
            if places.last() != Some(&spec.place) {
                places.push(spec.place);
            }
        }
        (0..places).for_each(|place| ranks.touch(EndpointId(place)));
        ranks
    }

    /// The order of a model, where one is kept.
    pub(super) fn kept(&self, model: ModelId) -> Option<&Kept> {
        self.models.get(model.0)?.as_ref()
    }

    pub(super) fn kept_mut(&mut self, model: ModelId) -> Option<&mut Kept> {
        self.models.get_mut(model.0)?.as_mut()
    }

    /// The models of a place.
    pub(super) fn models_of(&self, place: EndpointId) -> &[(ModelId, usize)] {
        self.of_place.get(place.0).map(Vec::as_slice).unwrap_or_default()
    }

    /// The how-manieth place of a model a place is.
    pub(super) fn slot(&self, model: ModelId, place: EndpointId) -> Option<usize> {
        self.models_of(place).iter().find(|(of, _)| *of == model).map(|(_, slot)| *slot)
    }

    /// Something has changed there.
    pub(super) fn touch(&mut self, place: EndpointId) {
        let is_kept = |(model, _): &(ModelId, usize)| self.kept(*model).is_some();
        let news = self.is_stale.get(place.0) == Some(&false) && self.models_of(place).iter().any(is_kept);
        if news {
            self.is_stale.get_mut(place.0).into_iter().for_each(|is_stale| *is_stale = true);
            self.stale.push(place);
        }
    }

    /// Something has changed of a credential.
    pub(super) fn touch_credential(&mut self, credential: CredentialId) {
        let places = self.of_credential.get(&credential).cloned().unwrap_or_default();
        places.into_iter().for_each(|place| self.touch(place));
    }

    /// Something may have changed anywhere.
    pub(super) fn touch_all(&mut self) {
        (0..self.is_stale.len()).for_each(|place| self.touch(EndpointId(place)));
    }

    /// One place that has to be ranked by now.
    fn next(&mut self, now: Instant) -> Option<EndpointId> {
        if let Some(place) = self.stale.pop() {
            self.is_stale.get_mut(place.0).into_iter().for_each(|is_stale| *is_stale = false);
            return Some(place);
        }
        let (_, place) = self.due.first().filter(|(at, _)| *at <= now).copied()?;
        self.wait_for(place, None);
        Some(place)
    }

    fn wait_for(&mut self, place: EndpointId, at: Option<Instant>) {
        let Some(due) = self.due_at.get_mut(place.0) else { return };
        if let Some(old) = std::mem::replace(due, at) {
            self.due.remove(&(old, place));
        }
        if let Some(at) = at {
            self.due.insert((at, place));
        }
    }
}

impl Board {
    /// Brings the kept orders up to date.
    pub(super) fn settle(&mut self, now: Instant) {
        while let Some(place) = self.ranks.next(now) {
            let mut due: Option<Instant> = None;
            for at in 0..self.ranks.models_of(place).len() {
                let Some((model, slot)) = self.ranks.models_of(place).get(at).copied() else { break };
                let member = self.ranks.kept(model).and_then(|kept| kept.members.get(slot));
                let Some((rank, until)) = member.map(|member| self.rank(now, member)) else { continue };
                // Ranked at a moment, it is ranked again after it, and not at once.
                let until = until.map(|until| until.max(now + Duration::from_millis(1)));
                due = [due, until].into_iter().flatten().min();
                if let Some(kept) = self.ranks.kept_mut(model) {
                    kept.set(slot, rank);
                }
            }
            self.ranks.wait_for(place, due);
        }
    }

    /// How a place stands, and until when if nothing happens to it.
    fn rank(&self, now: Instant, member: &Member) -> (Rank, Option<Instant>) {
        let Some(state) = self.state(member.place) else { return (Rank::Out, None) };
        let admission = state.breaker.admission(now);
        let refused = match admission {
            Admission::Refused(until) => Some(until),
            Admission::Closed | Admission::Probe => None,
        };
        let (mut all_free, mut all_rest, mut rested) = (true, true, None::<Instant>);
        for endpoint in &member.routes {
            let Some(credential) = self.credential(*endpoint) else { continue };
            match self.rests.standing(now, member.place, credential) {
                Standing::Free => all_rest = false,
                Standing::Trial | Standing::OnTrial => (all_free, all_rest) = (false, false),
                Standing::Resting { until, .. } => {
                    all_free = false;
                    rested = Some(rested.map_or(until, |soonest| soonest.min(until)));
                }
            }
        }
        let back = refused.max(rested.filter(|_| all_rest));
        if refused.is_some() || all_rest {
            return (Rank::Out, back);
        }
        let (factor, share, weight) = (state.factor(now), state.share(now), f64::from(member.weight));
        if admission == Admission::Closed && factor >= 1.0 && share >= 1.0 && all_free {
            return (Rank::Plain, None);
        }
        let until = now + if share < 1.0 { Duration::from_secs(1) } else { holds_for(1.0 - factor) };
        // One that is on trial is a lane of its own, beside the one that it left.
        let trials = if all_free { 0.0 } else { member.routes.iter().skip(1).map(|_| ON_TRIAL).sum() };
        let at_most = weight * (state.factor(until).min(1.0) + trials) * ROUNDING;
        let at_most = if all_free { at_most.min(weight) } else { at_most };
        let (probes, lost) = (admission == Admission::Probe, state.has_lost_weight(now));
        (Rank::Watched { at_most, probes, lost }, Some(until))
    }
}

/// How long a bound holds for a factor that lacks so much.
const fn holds_for(lacks: f64) -> Duration {
    Duration::from_secs(if lacks > 0.1 {
        1
    } else if lacks > 0.01 {
        10
    } else {
        60
    })
}
