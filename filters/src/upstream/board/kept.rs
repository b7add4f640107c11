//! The places of one model, in an order that is kept from call to call and changed by what happens to them.
//!
//! A call makes five attempts at most, so it need not look at a thousand places to find them. Most of these are alike at most
//! times: nothing weighs on them, and what they weigh is what the config says (**plain**). Others have to be **watched**:
//! their weight comes back with time, they start slowly, a credential of theirs rests. Of these a bound is kept that they do
//! not exceed until somebody looks again ([`super::ranks`]), so that a call looks at those alone that may be among the first.
//! Those that refuse are **out**: nobody looks at them before they may be back.
//!
//! How the order is made decides how it is kept: by weight as tiers of equals, from which a call draws some at random; in
//! proportion to the weights as a tree of sums, in which it finds one in as many steps as the tree is high.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::EndpointId;
use crate::route::Sort;

/// One place of a model.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) place: EndpointId,
    /// Its routes of this model, one for each credential.
    pub(super) routes: Vec<EndpointId>,
    /// The configured weight.
    pub(super) weight: u32,
    pub(super) rank: Rank,
    /// Where it is in its tier.
    at: usize,
}

/// How a place stands, until something happens to it or its time is over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Rank {
    /// Nobody is asked there.
    #[default]
    Out,
    /// Nothing weighs on it. Only an event changes that.
    Plain,
    /// It has to be looked at.
    Watched {
        /// What it weighs at most.
        at_most: f64,
        /// It may be half-open.
        probes: bool,
        /// It may have lost its place.
        lost: bool,
    },
}

/// The order of one model's places.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) members: Vec<Member>,
    pub(super) order: Order,
    /// How many are not out.
    pub(super) standing: usize,
    /// Those that may be half-open.
    pub(super) probes: BTreeSet<usize>,
    /// Those that may have lost their place.
    pub(super) lost: BTreeSet<usize>,
}

/// How it is kept.
#[derive(Clone, Debug)]
pub(super) enum Order {
    Weight(BTreeMap<Tier, Vec<usize>>),
    Random(Sums),
}

/// Places of the same weight, or with the same bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tier {
    /// The bits of a number that is not negative sort as it does.
    bits: u64,
    /// Above the plain ones with the same weight: one of them may be as heavy.
    pub(super) is_watched: bool,
}

impl Member {
    pub(super) const fn new(place: EndpointId, weight: u32) -> Self {
        Self { place, routes: vec![], weight, rank: Rank::Out, at: 0 }
    }
}

impl Tier {
    /// What those in it weigh, or weigh at most.
    pub(super) const fn weight(self) -> f64 {
        f64::from_bits(self.bits)
    }
}

impl Kept {
    /// Of these places, all out until they are ranked.
    pub(super) fn new(members: Vec<Member>, sort: Sort) -> Self {
        let order = match sort {
            Sort::Weight => Order::Weight(BTreeMap::new()),
            Sort::WeightedRandom => Order::Random(Sums::new(members.len())),
        };
        Self { members, order, standing: 0, probes: BTreeSet::new(), lost: BTreeSet::new() }
    }

    /// A place has another rank from here on.
    pub(super) fn set(&mut self, slot: usize, rank: Rank) {
        let Some(member) = self.members.get_mut(slot).filter(|member| member.rank != rank) else { return };
        let (weight, at) = (f64::from(member.weight), member.at);
        let (old, new) = (tier(member.rank, weight), tier(rank, weight));
        let was_standing = std::mem::replace(&mut member.rank, rank) != Rank::Out;
        self.standing = self.standing + usize::from(rank != Rank::Out) - usize::from(was_standing);
        match &mut self.order {
            Order::Weight(tiers) if old != new => {
                let moved = old.and_then(|tier| leave(tiers, tier, at));
                let at = new.map_or(0, |tier| {
                    let tier = tiers.entry(tier).or_default();
                    tier.push(slot);
                    tier.len() - 1
                });
                self.place_at(slot, at);
                // Who was last in the old tier has taken the place that is free there.
                moved.into_iter().for_each(|(slot, at)| self.place_at(slot, at));
            }
            Order::Weight(_) => {}
            Order::Random(sums) => sums.set(slot, new.map_or(0.0, Tier::weight)),
        }
        let (probes, lost) = match rank {
            Rank::Watched { probes, lost, .. } => (probes, lost),
            Rank::Out | Rank::Plain => (false, false),
        };
        for (set, belongs) in [(&mut self.probes, probes), (&mut self.lost, lost)] {
            if belongs {
                set.insert(slot);
            } else {
                set.remove(&slot);
            }
        }
    }

    fn place_at(&mut self, slot: usize, at: usize) {
        if let Some(member) = self.members.get_mut(slot) {
            member.at = at;
        }
    }
}

fn tier(rank: Rank, weight: f64) -> Option<Tier> {
    match rank {
        Rank::Out => None,
        Rank::Plain => Some(Tier { bits: weight.to_bits(), is_watched: false }),
        Rank::Watched { at_most, .. } => Some(Tier { bits: at_most.to_bits(), is_watched: true }),
    }
}

/// Takes one out of its tier. Answers who has its place there now.
fn leave(tiers: &mut BTreeMap<Tier, Vec<usize>>, key: Tier, at: usize) -> Option<(usize, usize)> {
    let tier = tiers.get_mut(&key)?;
    if at < tier.len() {
        tier.swap_remove(at);
    }
    let moved = tier.get(at).map(|slot| (*slot, at));
    if tier.is_empty() {
        tiers.remove(&key);
    }
    moved
}

/// Numbers, and a tree of their sums over them.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    leaves: usize,
    /// The root is 1, and the children of n are 2n and 2n + 1.
    nodes: Vec<f64>,
}

impl Sums {
    fn new(numbers: usize) -> Self {
        let leaves = numbers.next_power_of_two();
        Self { leaves, nodes: vec![0.0; leaves * 2] }
    }

    pub(super) fn get(&self, slot: usize) -> f64 {
        self.node(self.leaves + slot)
    }

    pub(super) fn set(&mut self, slot: usize, number: f64) {
        let mut at = self.leaves + slot;
        if let Some(leaf) = self.nodes.get_mut(at) {
            *leaf = number;
        }
        while at > 1 {
            at /= 2;
            let sum = self.node(at * 2) + self.node(at * 2 + 1);
            if let Some(node) = self.nodes.get_mut(at) {
                *node = sum;
            }
        }
    }

    /// The one at this part of the sum of all, from 0 to just below 1.
    pub(super) fn find(&self, part: f64) -> Option<usize> {
        let mut rest = part * self.node(1);
        let mut at = 1;
        while at < self.leaves {
            let (left, right) = (self.node(at * 2), self.node(at * 2 + 1));
            // Sums are rounded: what is nothing is not found for that.
            let goes_left = rest < left || right <= 0.0;
            rest = if goes_left { rest } else { rest - left };
            at = if goes_left { at * 2 } else { at * 2 + 1 };
        }
        (self.node(at) > 0.0).then(|| at - self.leaves)
    }

    fn node(&self, at: usize) -> f64 {
        self.nodes.get(at).copied().unwrap_or_default()
    }
}
