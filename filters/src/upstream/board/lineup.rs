//! The places that one call may get to, in their order, and which of them begins.
//!
//! Either all places of a model were looked at, or the first ones were taken from the order that is kept ([`super::kept`]):
//! then there are others behind them, and whoever looks for one of those ("the standby that was called longest ago") finds it
//! there. Both ways draw from the same distribution; a test holds them to it.

use std::collections::BTreeSet;
use std::time::Instant;

use rand_core::RngCore;

use super::kept::{Kept, Order, Rank, Sums, Tier};
use super::lane::Lane;
use super::ranks::PLACES;
use super::{Board, Route, Stand};
use crate::ids::{EndpointId, ModelId};
use crate::preferences::Dropped;
use crate::route::{self, Candidate, Sort, below};
use crate::upstream::backoff::fraction;

/// So many places are drawn in vain before all are looked at.
const DRAWS_MAX: usize = 64;

/// Places of one model, as one call sees them.
#[derive(Debug, Default)]
pub(super) struct Lineup {
    lanes: Vec<Lane>,
    /// Places in `lanes`. Those that are not here stand behind them.
    order: Vec<usize>,
    /// There may be others, which nobody has looked at.
    pub(super) is_cut: bool,
    /// Members of the kept order that were looked at.
    looked: BTreeSet<usize>,
}

impl Lineup {
    /// Its endpoints, in the order in which they are asked.
    pub(super) fn routes(&self, model: ModelId) -> impl Iterator<Item = Route> {
        self.in_order().flat_map(Lane::routes).map(move |endpoint| Route { model, endpoint })
    }

    /// The half-open place that comes first.
    fn probe(&self, sort: Sort, rng: &mut impl RngCore) -> Option<usize> {
        self.first_that(0, sort, rng, |lane| lane.is_probe)
    }

    /// The first place that would stand before the first one of all if it had not failed.
    fn lost(&self, sort: Sort, rng: &mut impl RngCore) -> Option<usize> {
        let leader = self.in_order().next()?.configured;
        self.first_that(1, sort, rng, |lane| {
            lane.has_lost_weight && lane.configured >= leader && !lane.is_on_trial
        })
    }

    /// Puts one before all others, which keep their order.
    pub(super) fn begin_with(&mut self, lane: usize) {
        match self.order.iter().position(|known| *known == lane) {
            Some(at) => route::begin_with(&mut self.order, at),
            None => self.order.insert(0, lane),
        }
    }

    pub(super) fn in_order(&self) -> impl Iterator<Item = &Lane> {
        self.order.iter().filter_map(|at| self.lanes.get(*at))
    }

    /// Those known of that stand behind the order.
    fn behind(&self) -> impl Iterator<Item = (usize, &Lane)> {
        // Nobody is where all were looked at.
        let lanes = if self.is_cut { self.lanes.as_slice() } else { &[] };
        lanes.iter().enumerate().filter(|(at, _)| !self.order.contains(at))
    }

    /// The first that is so, from this place of the order on.
    fn first_that(
        &self,
        from: usize,
        sort: Sort,
        rng: &mut impl RngCore,
        is_it: impl Fn(&Lane) -> bool,
    ) -> Option<usize> {
        let is_that = |at: &&usize| self.lanes.get(**at).is_some_and(&is_it);
        self.order.iter().skip(from).find(is_that).copied().or_else(|| {
            let others = self.behind().filter(|(_, lane)| is_it(lane));
            first_of(sort, others.map(|(at, lane)| (at, lane.weight)), rng)
        })
    }

    fn has_all(&self, places: usize) -> bool {
        let mut known: Vec<EndpointId> = Vec::with_capacity(places);
        for place in self.in_order().map(|lane| lane.place) {
            if !known.contains(&place) {
                known.push(place);
            }
        }
        known.len() >= places
    }

    fn push(&mut self, lane: Lane) -> usize {
        self.lanes.push(lane);
        self.lanes.len() - 1
    }

    /// Those looked at that are not in the order yet and weigh most, and what they weigh.
    fn heaviest(&self) -> (Vec<usize>, Option<f64>) {
        let mut most: Option<f64> = None;
        let mut heaviest: Vec<usize> = vec![];
        for (at, lane) in self.lanes.iter().enumerate().filter(|(at, _)| !self.order.contains(at)) {
            if most.is_none_or(|most| lane.weight > most) {
                most = Some(lane.weight);
                heaviest.clear();
            }
            if most.is_some_and(|most| lane.weight >= most) {
                heaviest.push(at);
            }
        }
        (heaviest, most)
    }
}

/// Who was called longest ago.
struct Least {
    called: Option<Option<Instant>>,
    /// All that were called then, with their weights. Nobody: it is somebody in the order, who comes first.
    found: Vec<(Standby, f64)>,
}

#[derive(Clone, Copy)]
enum Standby {
    Lane(usize),
    /// A member that nobody has looked at.
    Plain(usize),
}

impl Least {
    fn note(&mut self, called: Option<Instant>, standby: Standby, weight: f64) {
        if self.called.is_none_or(|least| called < least) {
            self.called = Some(called);
            self.found = vec![(standby, weight)];
        } else if self.called == Some(called) && !self.found.is_empty() {
            self.found.push((standby, weight));
        }
    }
}

impl Board {
    /// All places of a model, of routes that may be asked.
    pub(super) fn line_up<'s>(
        &self,
        model: ModelId,
        admitted: impl Iterator<Item = &'s Stand>,
        rng: &mut impl RngCore,
    ) -> Lineup {
        let mut lanes: Vec<Lane> = vec![];
        // By place: the lane that others may join. A search would look at every lane for every route.
        let mut open: Vec<Option<usize>> = vec![];
        for stand in admitted {
            let slot = self.ranks.slot(model, self.place(stand.route.endpoint)).unwrap_or_default();
            if slot >= open.len() {
                open.resize(slot + 1, None);
            }
            if let Some(open) = open.get_mut(slot) {
                self.join(&mut lanes, open, stand);
            }
        }
        self.set_off(&mut lanes, rng);
        let candidate =
            |(lane, of): (usize, &Lane)| Candidate { endpoint: of.place, weight: of.weight, lane };
        let mut candidates: Vec<Candidate> = lanes.iter().enumerate().map(candidate).collect();
        match self.sort(model) {
            Sort::Weight => route::order(&mut candidates, rng),
            Sort::WeightedRandom => route::spread(&mut candidates, rng),
        }
        let order = candidates.iter().map(|candidate| candidate.lane).collect();
        Lineup { lanes, order, ..Lineup::default() }
    }

    /// The first places of a model from the order that is kept; `None` where there is none, or where it takes a look at all.
    pub(super) fn line_up_first(
        &mut self,
        now: Instant,
        model: ModelId,
        rng: &mut impl RngCore,
    ) -> Option<Lineup> {
        let kept = self.ranks.kept(model).filter(|kept| kept.standing > PLACES)?;
        let mut lineup = Lineup { is_cut: true, ..Lineup::default() };
        for slot in &kept.probes {
            self.look(now, model, kept, *slot, &mut lineup, rng);
        }
        if matches!(kept.order, Order::Weight(_)) {
            self.draw_heaviest(now, model, kept, &mut lineup, rng);
        } else {
            // What this call alone knows is written into the sums and taken out again.
            let sums = match self.ranks.kept_mut(model).map(|kept| &mut kept.order) {
                Some(Order::Random(sums)) => std::mem::take(sums),
                Some(Order::Weight(_)) | None => return None,
            };
            let sums = self.draw_at_random(now, model, sums, &mut lineup, rng);
            if let Some(Order::Random(place)) = self.ranks.kept_mut(model).map(|kept| &mut kept.order) {
                *place = sums;
            }
        }
        lineup.has_all(PLACES).then_some(lineup)
    }

    /// The half-open place that comes first.
    pub(super) fn probe_of(&self, model: ModelId, lineup: &Lineup, rng: &mut impl RngCore) -> Option<usize> {
        lineup.probe(self.sort(model), rng)
    }

    /// The place that lost its first one to failures, if some did.
    pub(super) fn lost_of(
        &self,
        now: Instant,
        model: ModelId,
        lineup: &mut Lineup,
        rng: &mut impl RngCore,
    ) -> Option<usize> {
        if let Some(kept) = self.ranks.kept(model).filter(|_| lineup.is_cut) {
            for slot in &kept.lost {
                self.look(now, model, kept, *slot, lineup, rng);
            }
        }
        lineup.lost(self.sort(model), rng)
    }

    /// The standby that was called longest ago. Asks of all when that was, for one call in a hundred, but looks at few.
    pub(super) fn least_called(
        &self,
        now: Instant,
        model: ModelId,
        lineup: &mut Lineup,
        rng: &mut impl RngCore,
    ) -> Option<usize> {
        let called = |place: EndpointId| self.state(place).and_then(|state| state.called);
        let standbys = lineup.order.iter().skip(1).filter_map(|at| Some((*at, lineup.lanes.get(*at)?)));
        let in_order = standbys.min_by_key(|(_, lane)| called(lane.place));
        let in_order = in_order.map(|(at, lane)| (at, called(lane.place)));
        let Some(kept) = self.ranks.kept(model).filter(|_| lineup.is_cut) else {
            return in_order.map(|(at, _)| at);
        };
        let mut others = Least { called: in_order.map(|(_, called)| called), found: vec![] };
        for (at, lane) in lineup.behind() {
            others.note(called(lane.place), Standby::Lane(at), lane.weight);
        }
        let mut known: Vec<EndpointId> = lineup.lanes.iter().map(|lane| lane.place).collect();
        known.sort_unstable();
        for (slot, member) in kept.members.iter().enumerate().filter(|(_, member)| member.rank != Rank::Out) {
            let at = called(member.place);
            if others.called.is_some_and(|least| at > least) || known.binary_search(&member.place).is_ok() {
                continue;
            }
            if member.rank == Rank::Plain {
                others.note(at, Standby::Plain(slot), f64::from(member.weight));
                continue;
            }
            let before = lineup.lanes.len();
            self.look(now, model, kept, slot, lineup, rng);
            for (lane, of) in lineup.lanes.iter().enumerate().skip(before) {
                others.note(at, Standby::Lane(lane), of.weight);
            }
        }
        let weights = others.found.iter().enumerate().map(|(at, (_, weight))| (at, *weight));
        let found = first_of(self.sort(model), weights, rng).and_then(|at| others.found.get(at));
        match found.map(|(standby, _)| *standby) {
            Some(Standby::Lane(lane)) => Some(lane),
            Some(Standby::Plain(slot)) => self.plain(kept, slot).map(|lane| lineup.push(lane)),
            None => in_order.map(|(at, _)| at),
        }
    }

    /// Draws from the tiers, the heaviest first.
    fn draw_heaviest(
        &self,
        now: Instant,
        model: ModelId,
        kept: &Kept,
        lineup: &mut Lineup,
        rng: &mut impl RngCore,
    ) {
        let Order::Weight(tiers) = &kept.order else { return };
        let mut tiers = tiers.iter().rev().peekable();
        // Places in the plain tier at hand that were drawn, in ascending order.
        let mut drawn: Vec<usize> = vec![];
        while !lineup.has_all(PLACES) {
            let (equals, most) = lineup.heaviest();
            let at_hand = |(tier, _): &&(&Tier, &Vec<usize>)| most.is_none_or(|most| tier.weight() >= most);
            let Some((tier, slots)) = tiers.peek().filter(at_hand).copied() else {
                if equals.is_empty() {
                    return;
                }
                lineup.order.extend(equals.get(below(equals.len(), rng)));
                continue;
            };
            if tier.is_watched {
                slots.iter().for_each(|slot| self.look(now, model, kept, *slot, lineup, rng));
                tiers.next();
                continue;
            }
            let equals = if most == Some(tier.weight()) { equals.as_slice() } else { &[] };
            let plain = slots.len() - drawn.len();
            if plain == 0 {
                drawn.clear();
                tiers.next();
                continue;
            }
            match below(plain + equals.len(), rng).checked_sub(plain) {
                Some(equal) => lineup.order.extend(equals.get(equal)),
                None => {
                    let at = draw(&mut drawn, plain, rng);
                    let lane = slots.get(at).and_then(|slot| self.plain(kept, *slot));
                    let Some(lane) = lane else { return };
                    let lane = lineup.push(lane);
                    lineup.order.push(lane);
                }
            }
        }
    }

    /// Draws in proportion to the weights. Gives the sums back as they came.
    fn draw_at_random(
        &self,
        now: Instant,
        model: ModelId,
        mut sums: Sums,
        lineup: &mut Lineup,
        rng: &mut impl RngCore,
    ) -> Sums {
        let Some(kept) = self.ranks.kept(model) else { return sums };
        let mut touched: Vec<(usize, f64)> = vec![];
        for _ in 0..DRAWS_MAX {
            let Some(slot) = sums.find(fraction(rng)).filter(|_| !lineup.has_all(PLACES)) else { break };
            let Some(member) = kept.members.get(slot) else { break };
            let bound = sums.get(slot);
            touched.push((slot, bound));
            self.look(now, model, kept, slot, lineup, rng);
            let lanes: Vec<(usize, f64)> = lineup
                .behind()
                .filter(|(_, lane)| lane.place == member.place)
                .map(|(at, lane)| (at, lane.weight))
                .collect();
            let weight: f64 = lanes.iter().map(|(_, weight)| weight).sum();
            // Drawn by its bound, it is taken as often as its weight is worth.
            let is_taken = fraction(rng) * bound < weight;
            let taken =
                is_taken.then(|| first_of(Sort::WeightedRandom, lanes.iter().copied(), rng)).flatten();
            lineup.order.extend(taken);
            let left = lanes.iter().filter(|(at, _)| Some(*at) != taken).map(|(_, weight)| weight).sum();
            sums.set(slot, left);
        }
        for (slot, bound) in touched.into_iter().rev() {
            sums.set(slot, bound);
        }
        sums
    }

    /// Looks at one place, once in each call.
    fn look(
        &self,
        now: Instant,
        model: ModelId,
        kept: &Kept,
        slot: usize,
        lineup: &mut Lineup,
        rng: &mut impl RngCore,
    ) {
        let Some(member) = kept.members.get(slot) else { return };
        if member.rank == Rank::Plain {
            let is_known = lineup.lanes.iter().any(|lane| lane.place == member.place);
            if !is_known {
                self.plain(kept, slot).into_iter().for_each(|lane| lineup.lanes.push(lane));
            }
            return;
        }
        if !lineup.looked.insert(slot) {
            return;
        }
        let (mut lanes, mut open) = (vec![], None);
        for endpoint in &member.routes {
            let stand = self.stand(now, Route { model, endpoint: *endpoint }, None::<Dropped>);
            if let Some(stand) = stand.filter(Stand::admits) {
                self.join(&mut lanes, &mut open, &stand);
            }
        }
        self.set_off(&mut lanes, rng);
        lineup.lanes.append(&mut lanes);
    }

    fn plain(&self, kept: &Kept, slot: usize) -> Option<Lane> {
        let member = kept.members.get(slot)?;
        let mut lane = Lane::plain(member.place, &member.routes, member.weight)?;
        self.take_turn(&mut lane);
        Some(lane)
    }

    fn sort(&self, model: ModelId) -> Sort {
        self.layout.models.get(model.0).map(|spec| spec.sort).unwrap_or_default()
    }
}

/// Draws one of those in a list that were not drawn yet, of which there are so many, and notes it.
fn draw(drawn: &mut Vec<usize>, left: usize, rng: &mut impl RngCore) -> usize {
    let mut at = below(left, rng);
    let before = drawn.iter().take_while(|known| {
        let is_before = **known <= at;
        at += usize::from(is_before);
        is_before
    });
    let before = before.count();
    drawn.insert(before, at);
    at
}

/// Which of these, with their weights, is the first in an order.
fn first_of(sort: Sort, lanes: impl Iterator<Item = (usize, f64)>, rng: &mut impl RngCore) -> Option<usize> {
    let lanes: Vec<(usize, f64)> = lanes.collect();
    let candidates = lanes.iter().map(|(lane, weight)| Candidate {
        endpoint: EndpointId(*lane),
        weight: *weight,
        lane: *lane,
    });
    let mut candidates: Vec<Candidate> = candidates.collect();
    match sort {
        Sort::Weight => route::order(&mut candidates, rng),
        Sort::WeightedRandom => route::spread(&mut candidates, rng),
    }
    candidates.first().map(|candidate| candidate.lane)
}
