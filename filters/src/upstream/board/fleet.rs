//! What nodes tell each other of their upstreams ([`crate::upstream::fleet`]), in and out of a board, off the path of requests.

use std::time::{Duration, Instant};

use super::standbys::WARM_FOR;
use super::{Board, ModelState, Notice};
use crate::ids::{CredentialId, EndpointId, ModelId};
use crate::upstream::breaker::{Change, HARD, Permit, SOFT, Verdict};
use crate::upstream::fleet::{
    Claim, Generation, Heard, News, Phase, PlaceNews, PlaceWord, RestNews, RestWord,
};
use crate::upstream::weight::Health;

/// What a board knows of being one of several.
#[derive(Clone, Debug, Default)]
pub(super) struct Fleet {
    /// The fleet can be heard.
    pub(super) present: bool,
    /// Something is to be told that should not wait.
    pub(super) urgent: bool,
    /// Failures may be held back: some are.
    pub(super) holds_back: bool,
    /// Credentials of which something is to be told, and whether it is that one was served with.
    pub(super) rests: Vec<(CredentialId, bool)>,
}

impl Board {
    /// What is to be told to the fleet by now. It counts as told: whoever takes it delivers it.
    pub fn news(&mut self, now: Instant) -> News {
        self.fleet.urgent = false;
        let places = (0..self.endpoints.len()).filter_map(|at| self.news_of(now, EndpointId(at))).collect();
        let rests = std::mem::take(&mut self.fleet.rests).into_iter();
        let rests = rests.filter_map(|(credential, served)| match self.rests.word(now, credential) {
            Some(rest) => Some(RestNews::Rests { credential, rest }),
            None => served.then_some(RestNews::Served(credential)),
        });
        let rests = rests.collect();
        let present = self.fleet.present;
        let gates = self.models.iter_mut().enumerate().filter_map(|(at, model)| {
            let used = model.gate.used_until().filter(|_| present && model.claim.is_good(now));
            let wanted = std::mem::take(&mut model.wants_claim) && present;
            Some((ModelId(at), model.claim.ask(now, used, wanted)?))
        });
        self.fleet.holds_back = self.endpoints.iter().any(|state| state.untold.holds_back());
        News { places, rests, gates: gates.collect() }
    }

    /// Whether there are news that should not wait for the next round.
    #[must_use]
    pub const fn has_urgent_news(&self) -> bool {
        self.fleet.urgent
    }

    /// The fleet can be heard. Calls of before are nothing new by now.
    pub fn joined(&mut self) {
        if !std::mem::replace(&mut self.fleet.present, true) {
            self.endpoints.iter_mut().for_each(|state| state.untold.forget_calls());
        }
    }

    /// The fleet cannot be heard: from here on this node decides by itself.
    pub fn alone(&mut self) {
        self.ranks.touch_all();
        self.fleet.present = false;
        for state in &mut self.endpoints {
            state.breaker.untie();
        }
        for model in &mut self.models {
            model.claim = Claim::default();
        }
    }

    /// What the fleet makes of a place. `now`: when it was so; for an answer, when the question was sent.
    pub fn hear_place(
        &mut self,
        now: Instant,
        place: EndpointId,
        word: &PlaceWord,
        heard: Heard,
    ) -> Option<Notice> {
        let known = self.state(place)?.generation;
        if heard == Heard::Announcement && word.generation < known {
            return None;
        }
        // The last route of a model is not refused for its rate: its weight has fallen already.
        let spared = word.by_rate && self.is_needed(now, place);
        if !word.rest.is_zero() {
            self.rests.endpoint_asked(now, self.place(place), word.rest);
        }
        let state = self.state_mut(place)?;
        state.fleet = Some(Health::heard(now, word.health));
        if word.generation == known {
            match word.phase {
                Phase::Closed => {}
                Phase::Open(_) => state.breaker.hear_probed(0),
                Phase::HalfOpen(successes) => state.breaker.hear_probed(successes),
            }
            return None;
        }
        state.generation = word.generation;
        state.untold.forget_calls();
        let is_later = word.generation > known;
        let change = match word.phase {
            Phase::Open(_) | Phase::HalfOpen(_) if spared => Change::None,
            Phase::Open(remaining) => state.breaker.hear_open(now, remaining, word.openings),
            Phase::HalfOpen(successes) => {
                let change = state.breaker.hear_open(now, Duration::ZERO, word.openings);
                state.breaker.hear_probed(successes);
                change
            }
            Phase::Closed if is_later => state.breaker.hear_closed(now),
            // It has lost its memory: what this node knows is its own again.
            Phase::Closed => {
                state.breaker.untie();
                Change::None
            }
        };
        self.changed(now, place, change)
    }

    /// The fleet knows nothing of a place, or no more.
    pub fn hear_nothing_of(&mut self, place: EndpointId) {
        if let Some(state) = self.state_mut(place)
            && state.generation != Generation::default()
        {
            state.generation = Generation::default();
            state.breaker.untie();
        }
    }

    /// This node may probe a place until then, or may not.
    pub fn claimed(&mut self, place: EndpointId, until: Option<Instant>) {
        if let Some(state) = self.state_mut(place) {
            state.breaker.claimed(until);
        }
    }

    /// The gate of a model is this node's until then, or is another's.
    pub fn gate_claimed(&mut self, model: ModelId, until: Option<Instant>) {
        if let Some(model) = self.models.get_mut(model.0) {
            model.claim.granted(until);
        }
    }

    /// How a credential rests on all nodes; `None`: nobody knows of a rest, or something was served after it.
    pub fn hear_rest(&mut self, now: Instant, credential: CredentialId, word: Option<RestWord>) {
        self.ranks.touch_credential(credential);
        match word {
            Some(word) => self.rests.hear(now, credential, word),
            None if self.fleet.rests.iter().any(|(untold, _)| *untold == credential) => {}
            None => {
                self.rests.hear_served(now, credential);
            }
        }
    }

    /// Notes the end of a call for the fleet.
    pub(super) fn tally(
        &mut self,
        now: Instant,
        endpoint: EndpointId,
        permit: Permit,
        verdict: Verdict,
        connect: bool,
    ) {
        let may_be_ours = connect && self.has_two_providers();
        let Some(state) = self.state_mut(endpoint).filter(|state| state.breaker.counts(permit)) else {
            return;
        };
        let units = match verdict {
            Verdict::Success => return state.untold.success(),
            Verdict::Failure => HARD,
            Verdict::SoftFailure => SOFT,
            Verdict::Neutral => {
                self.fleet.urgent |= permit.is_probe();
                return;
            }
        };
        if may_be_ours {
            state.untold.hold_back(now, units);
            self.fleet.holds_back = true;
        } else {
            state.untold.failure(units);
            self.fleet.urgent = true;
        }
    }

    /// A node that knows one provider alone never takes itself for cut off.
    fn has_two_providers(&self) -> bool {
        let mut of = self.layout.endpoints.iter().map(|spec| spec.credential.provider);
        of.next().is_some_and(|first| of.any(|other| other != first))
    }

    fn news_of(&mut self, now: Instant, place: EndpointId) -> Option<PlaceNews> {
        if self.place(place) != place {
            return None;
        }
        let has_traffic = self.has_traffic(now, place);
        let present = self.fleet.present;
        let state = self.state_mut(place)?;
        let ask = state.breaker.ask(now, has_traffic).filter(|_| present);
        let tally = state.untold.take(now);
        let check_passed = std::mem::take(&mut state.untold.check_passed) && state.breaker.is_tied();
        let rest = state.untold.rest.take().and_then(|until| until.checked_duration_since(now));
        let generation = state.generation;
        let has_news = !tally.is_empty() || check_passed || rest.is_some() || ask.is_some();
        has_news.then(|| PlaceNews {
            place,
            generation,
            tally,
            needed: tally.bad > 0 && self.is_needed(now, place),
            check_passed,
            rest,
            ask,
        })
    }

    /// Whether anybody may come who would be sent there.
    fn has_traffic(&self, now: Instant, place: EndpointId) -> bool {
        let lately = |state: &ModelState| {
            state.asked.is_some_and(|asked| now.saturating_duration_since(asked) < WARM_FOR)
        };
        let of_it = self.ranks.models_of(place).iter();
        of_it.filter_map(|(model, _)| self.models.get(model.0)).any(lately)
    }

    pub(super) fn tell_of(&mut self, credential: CredentialId, served: bool) {
        self.fleet.rests.retain(|(known, _)| *known != credential);
        self.fleet.rests.push((credential, served));
        self.fleet.urgent = true;
    }
}
