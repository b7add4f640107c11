//! One account's money and limits, where they can be spent.
//!
//! `available + held` is what the ledger has leased. A hold is placed by [`Purse::reserve`], which looks
//! at every limit and at the money first and takes all of it or nothing, and ended by [`Purse::end`],
//! once: the permit that it left is taken away by it. Whoever owns a purse holds one lock around each
//! verb.
//!
//! Deliberately absent: the journal and the ledger. A purse forgets everything when its process ends.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::ids::{HoldId, KeyDigest};
use crate::limit::abandoned::Hour;
use crate::limit::{CarriedCounters, Counters, Now, Over, Permit, Scopes, Standing, Want};
use crate::money::{Amount, Settlement, settle};

/// An account's purse.
#[derive(Debug, Default)]
pub struct Purse {
    available: Amount,
    held: Amount,
    account: Counters,
    keys: HashMap<KeyDigest, KeyState>,
    models: HashMap<String, Counters>,
    /// What open holds took of the limits.
    open: HashMap<HoldId, Taken>,
}

#[derive(Debug, Default)]
struct KeyState {
    counters: Counters,
    hour: Hour,
}

/// How an account's limits stand, on their way to the process that takes over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    account: CarriedCounters,
    keys: Vec<(KeyDigest, CarriedCounters)>,
    models: Vec<(String, CarriedCounters)>,
}

/// What one hold took of the limits of its scopes.
#[derive(Debug)]
struct Taken {
    key: Permit,
    account: Permit,
    /// One for each model that may serve and is limited.
    models: Vec<(String, Permit)>,
}

/// A hold to place.
#[derive(Clone, Copy, Debug)]
pub struct Reserve<'a> {
    /// Its id; never used before.
    pub hold: HoldId,
    /// With which key.
    pub key: KeyDigest,
    /// The models that may serve it: every one has to have room.
    pub models: &'a [String],
    /// The limits that it has to fit.
    pub scopes: &'a Scopes,
    /// What it takes.
    pub want: Want,
}

/// A hold to end.
#[derive(Clone, Copy, Debug)]
pub struct EndHold<'a> {
    /// Its id.
    pub hold: HoldId,
    /// What was set aside.
    pub held: Amount,
    /// With which key.
    pub key: KeyDigest,
    /// The model that served it.
    pub model: &'a str,
    /// What the call cost.
    pub cost: Amount,
    /// Tokens that it used.
    pub tokens: u64,
    /// The caller left before the answer.
    pub left: Option<LeftEarly>,
}

/// A call that was left before its answer.
#[derive(Clone, Copy, Debug)]
pub struct LeftEarly {
    /// What the provider will want for it.
    pub provider_cost: Amount,
    /// What the caller pays once the allowance is used up.
    pub cost: Amount,
    /// The key's allowance in an hour; `None`: the default rule.
    pub allowance: Option<Amount>,
}

/// Why no hold was placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The balance cannot carry it.
    Funds {
        /// What is there.
        available: Amount,
    },
    /// A limit.
    Limited {
        /// Whose.
        scope: &'static str,
        /// Which, and until when.
        over: Over,
    },
}

/// How requests and tokens per minute stand, where they are limited.
pub type Standings = (Option<Standing>, Option<Standing>);

/// What a key's or a model's calls, or all of an account, have cost since a time in Unix milliseconds.
pub type SpentSince<'a> = dyn Fn(Option<KeyDigest>, Option<&str>, i64) -> Amount + 'a;

impl Purse {
    /// What may still be held.
    #[must_use]
    pub fn available(&self) -> Amount {
        self.available
    }

    /// What is set aside.
    #[must_use]
    pub fn held(&self) -> Amount {
        self.held
    }

    /// Whether holds are open.
    #[must_use]
    pub fn has_open_holds(&self) -> bool {
        !self.open.is_empty()
    }

    /// More money has been leased.
    pub fn grant(&mut self, amount: Amount) {
        self.available = self.available.checked_add(amount.max(Amount::ZERO)).unwrap_or(Amount::MAX);
    }

    /// Takes free money out, for money that leaves the account.
    ///
    /// # Errors
    /// What is free, when that is less.
    pub fn withdraw(&mut self, amount: Amount) -> Result<(), Amount> {
        let rest = self.available.checked_sub(amount.max(Amount::ZERO)).filter(|rest| *rest >= Amount::ZERO);
        self.available = rest.ok_or(self.available)?;
        Ok(())
    }

    /// Limits and money in one step: all of it, or nothing.
    ///
    /// # Errors
    /// [`Refused`]; nothing is taken then.
    pub fn reserve(&mut self, now: Now, reserve: &Reserve<'_>) -> Result<Standings, Refused> {
        let Reserve { hold, key, models, scopes, want } = *reserve;
        let limited = |scope| move |over| Refused::Limited { scope, over };
        let state = self.keys.entry(key).or_default();
        state.counters.check(now, &scopes.key, &want).map_err(limited("key"))?;
        self.account.check(now, &scopes.account, &want).map_err(limited("account"))?;
        let of_models = || models.iter().filter_map(|model| scopes.models.get_key_value(model));
        for (model, limits) in of_models() {
            let counters = self.models.entry(model.clone()).or_default();
            counters.check(now, limits, &want).map_err(limited("account and model"))?;
        }
        let amount = want.amount.max(Amount::ZERO);
        let (rest, held) = self
            .available
            .checked_sub(amount)
            .filter(|rest| *rest >= Amount::ZERO)
            .zip(self.held.checked_add(amount))
            .ok_or(Refused::Funds { available: self.available })?;
        (self.available, self.held) = (rest, held);

        // Everything fits: take it.
        let taken = Taken {
            key: state.counters.take(now, &scopes.key, &want),
            account: self.account.take(now, &scopes.account, &want),
            models: of_models()
                .map(|(model, limits)| {
                    let counters = self.models.entry(model.clone()).or_default();
                    (model.clone(), counters.take(now, limits, &want))
                })
                .collect(),
        };
        self.open.insert(hold, taken);
        let of_key = state.counters.standing(now, &scopes.key);
        Ok(tighter(of_key, self.account.standing(now, &scopes.account)))
    }

    /// Ends a hold: moves its money and says what was charged, and what is our own cost of a call that
    /// was left early.
    pub fn end(&mut self, now: Now, end: &EndHold<'_>) -> (Settlement, Amount) {
        let state = self.keys.entry(end.key).or_default();
        let mut cost = end.cost;
        let mut abandoned = Amount::ZERO;
        if let Some(left) = end.left {
            if state.hour.forgive(now.second(), left.provider_cost, left.allowance) {
                abandoned = left.provider_cost;
            } else {
                cost = left.cost;
            }
        }
        let settlement = settle(end.held, cost, self.available);
        self.held = self.held.less(settlement.held);
        let back = self.available.less(settlement.excess).checked_add(settlement.released);
        self.available = back.unwrap_or(Amount::MAX);
        let charged = settlement.charged();
        state.hour.spend(now.second(), charged);
        if let Some(taken) = self.open.remove(&end.hold) {
            state.counters.end(&taken.key, end.tokens, charged);
            self.account.end(&taken.account, end.tokens, charged);
            for (model, permit) in &taken.models {
                // Those that did not serve get back what they had set aside.
                let (tokens, charged) =
                    if model == end.model { (end.tokens, charged) } else { (0, Amount::ZERO) };
                if let Some(counters) = self.models.get_mut(model) {
                    counters.end(permit, tokens, charged);
                }
            }
        }
        (settlement, abandoned)
    }

    /// How limits stand, for the process that takes over.
    #[must_use]
    pub fn carried(&mut self, now: Now) -> Carried {
        Carried {
            account: self.account.carried(now),
            keys: self.keys.iter_mut().map(|(key, state)| (*key, state.counters.carried(now))).collect(),
            models: self.models.iter_mut().map(|(name, state)| (name.clone(), state.carried(now))).collect(),
        }
    }

    /// Takes over how limits stood in the process before. Its hour of calls left early is forgotten.
    pub fn adopt(&mut self, now: Now, carried: &Carried) {
        self.account.adopt(now, &carried.account);
        for (key, counters) in &carried.keys {
            self.keys.entry(*key).or_default().counters.adopt(now, counters);
        }
        for (model, counters) in &carried.models {
            self.models.entry(model.clone()).or_default().adopt(now, counters);
        }
    }

    /// What still runs in the process before this one, and what it has spent by now.
    pub fn stand_elsewhere(&mut self, carried: &Carried) {
        self.account.stand_elsewhere(&carried.account);
        for (key, counters) in &carried.keys {
            self.keys.entry(*key).or_default().counters.stand_elsewhere(counters);
        }
        for (model, counters) in &carried.models {
            self.models.entry(model.clone()).or_default().stand_elsewhere(counters);
        }
    }

    /// The process before this one has gone.
    pub fn nothing_runs_elsewhere(&mut self) {
        self.account.nothing_runs_elsewhere();
        self.keys.values_mut().for_each(|state| state.counters.nothing_runs_elsewhere());
        self.models.values_mut().for_each(Counters::nothing_runs_elsewhere);
    }

    /// What was spent in the windows of budgets before this process began, as `spent` knows it by key,
    /// model and the window's begin. What has no budget leaves nothing here: most keys are never used.
    pub fn restore(&mut self, now: Now, key: KeyDigest, scopes: &Scopes, spent: &SpentSince<'_>) {
        self.account.restore(now, &scopes.account, |since| spent(None, None, since));
        if !scopes.key.budgets.is_empty() {
            let state = self.keys.entry(key).or_default();
            state.counters.restore(now, &scopes.key, |since| spent(Some(key), None, since));
        }
        for (model, limits) in scopes.models.iter().filter(|(_, limits)| !limits.budgets.is_empty()) {
            let counters = self.models.entry(model.clone()).or_default();
            counters.restore(now, limits, |since| spent(None, Some(model), since));
        }
    }
}

/// Of two standings the one with less left.
fn tighter(a: Standings, b: Standings) -> Standings {
    let pick = |a: Option<Standing>, b: Option<Standing>| a.into_iter().chain(b).min_by_key(|s| s.remaining);
    (pick(a.0, b.0), pick(a.1, b.1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_core::{RngCore, SeedableRng};
    use rand_pcg::Pcg64Mcg;

    use super::*;
    use crate::limit::Limits;

    const KEY: KeyDigest = KeyDigest([1; 32]);

    fn at(second: u64) -> Now {
        Now { ms: second * 1000, unix_ms: i64::try_from(second).unwrap() * 1000 }
    }

    fn nano(n: i64) -> Amount {
        Amount::from_nano(n)
    }

    fn models() -> [String; 1] {
        ["m".to_owned()]
    }

    fn reserve(purse: &mut Purse, id: u128, amount: i64) -> Result<Standings, Refused> {
        let scopes = Scopes::default();
        let want = Want { tokens: 0, amount: nano(amount) };
        purse
            .reserve(at(0), &Reserve { hold: HoldId(id), key: KEY, models: &models(), scopes: &scopes, want })
    }

    fn end(
        purse: &mut Purse,
        id: u128,
        held: i64,
        cost: i64,
        left: Option<LeftEarly>,
    ) -> (Settlement, Amount) {
        let end = EndHold {
            hold: HoldId(id),
            held: nano(held),
            key: KEY,
            model: "m",
            cost: nano(cost),
            tokens: 0,
            left,
        };
        purse.end(at(0), &end)
    }

    #[test]
    fn a_balance_for_three_holds_admits_three() {
        let mut purse = Purse::default();
        purse.grant(nano(350));
        let admitted = (0..20).filter(|id| reserve(&mut purse, *id, 100).is_ok()).count();
        assert_eq!((admitted, purse.available(), purse.held()), (3, nano(50), nano(300)));
        assert_eq!(reserve(&mut purse, 99, 100), Err(Refused::Funds { available: nano(50) }));
        assert_eq!(purse.withdraw(nano(51)), Err(nano(50)));
    }

    #[test]
    fn a_refused_call_has_taken_nothing() {
        let mut purse = Purse::default();
        let mut scopes = Scopes::default();
        scopes.key.requests_per_minute = Some(1);
        let want = Want { tokens: 0, amount: nano(10) };
        let models = models();
        let hold = |id| Reserve { hold: HoldId(id), key: KEY, models: &models, scopes: &scopes, want };
        assert!(matches!(purse.reserve(at(0), &hold(1)), Err(Refused::Funds { .. })), "no money yet");
        purse.grant(nano(100));
        assert!(purse.reserve(at(0), &hold(2)).is_ok(), "the refused one did not count");
        assert!(matches!(purse.reserve(at(0), &hold(3)), Err(Refused::Limited { scope: "key", .. })));
        assert_eq!(purse.available(), nano(90));
    }

    #[test]
    fn every_model_that_may_serve_has_to_have_room_and_those_that_did_not_give_it_back() {
        let mut purse = Purse::default();
        purse.grant(nano(1_000));
        let mut scopes = Scopes::default();
        let one = Limits { tokens_per_minute: Some(100), concurrency: Some(1), ..Limits::default() };
        scopes.models.insert("a".to_owned(), one.clone());
        scopes.models.insert("b".to_owned(), one);
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (both, other) = (named(&["a", "b", "free"]), named(&["b"]));
        let want = Want { tokens: 60, amount: nano(10) };
        let hold = |id, models| Reserve { hold: HoldId(id), key: KEY, models, scopes: &scopes, want };
        assert!(purse.reserve(at(0), &hold(1, &both)).is_ok());
        let refused = purse.reserve(at(0), &hold(2, &other));
        assert!(matches!(refused, Err(Refused::Limited { scope: "account and model", .. })), "{refused:?}");
        let end = EndHold {
            hold: HoldId(1),
            held: nano(10),
            key: KEY,
            model: "a",
            cost: nano(10),
            tokens: 60,
            left: None,
        };
        purse.end(at(0), &end);
        assert!(purse.reserve(at(0), &hold(3, &other)).is_ok(), "b did not serve");
        let refused = purse.reserve(at(0), &hold(4, &named(&["a"])));
        assert!(matches!(refused, Err(Refused::Limited { .. })), "a has used its minute: {refused:?}");
    }

    #[test]
    fn leaving_early_is_charged_beyond_the_allowance() {
        let mut purse = Purse::default();
        purse.grant(nano(1_000));
        let left = LeftEarly { provider_cost: nano(6), cost: nano(9), allowance: Some(nano(10)) };
        reserve(&mut purse, 1, 100).unwrap();
        assert_eq!(end(&mut purse, 1, 100, 0, Some(left)).1, nano(6));
        reserve(&mut purse, 2, 100).unwrap();
        let (settlement, abandoned) = end(&mut purse, 2, 100, 0, Some(left));
        assert_eq!((settlement.charged(), abandoned), (nano(9), Amount::ZERO));
    }

    #[test]
    fn two_million_random_holds_and_captures_make_and_lose_nothing() {
        let mut rng = Pcg64Mcg::seed_from_u64(41);
        let mut below = |bound: u32| i64::from(rng.next_u32() % bound);
        let scopes = Scopes::default();
        let mut purse = Purse::default();
        let (mut granted, mut charged, mut shortfalls, mut refused) = (0_i64, 0_i64, 0_u32, 0_u32);
        let mut open: Vec<(u128, i64)> = Vec::with_capacity(128);
        for step in 0..2_000_000_u128 {
            // Now and then the money runs out before more comes.
            if step % 1024 == 0 {
                let more = below(300_000_000);
                purse.grant(nano(more));
                granted += more;
            }
            let places = open.is_empty() || (open.len() < 64 && below(2) == 0);
            if places {
                let amount = below(1_000_000);
                let want = Want { tokens: 0, amount: nano(amount) };
                let hold = Reserve { hold: HoldId(step), key: KEY, models: &models(), scopes: &scopes, want };
                if purse.reserve(at(0), &hold).is_ok() {
                    open.push((step, amount));
                } else {
                    assert!(purse.available() < nano(amount), "{step}");
                    refused += 1;
                }
            } else {
                // Calls end in an order of their own, below, at and above what was held for them.
                let index = usize::try_from(below(64)).unwrap() % open.len();
                let (id, held) = open.swap_remove(index);
                let cost = match below(4) {
                    0 => 0,
                    1 => held / 2,
                    2 => held,
                    _ => held + below(1_000_000),
                };
                let settlement = end(&mut purse, id, held, cost, None).0;
                shortfalls += u32::from(settlement.shortfall.is_positive());
                charged += settlement.charged().nano();
            }
            let (available, held) = (purse.available().nano(), purse.held().nano());
            assert!(available >= 0 && held >= 0, "{step}: {available} and {held}");
            assert!(
                available + held + charged == granted,
                "{step}: {available}, {held}, {charged}, {granted}"
            );
        }
        assert_eq!(purse.held().nano(), open.iter().map(|(_, held)| held).sum::<i64>());
        assert!(shortfalls > 1_000 && refused > 10_000, "{shortfalls} shortfalls, {refused} refusals");
    }

    #[test]
    fn amounts_at_the_edge_saturate_or_are_refused() {
        const EDGES: [i64; 11] = [
            i64::MIN,
            i64::MIN + 1,
            -1,
            0,
            1,
            i64::MAX / 2,
            i64::MAX / 2 + 1,
            i64::MAX - 2,
            i64::MAX - 1,
            i64::MAX,
            1_000_000_000,
        ];
        let total = |purse: &Purse| i128::from(purse.available().nano()) + i128::from(purse.held().nano());
        let sound = |purse: &Purse| purse.available() >= Amount::ZERO && purse.held() >= Amount::ZERO;
        for granted in EDGES {
            for amount in EDGES {
                for cost in EDGES {
                    let case = format!("grant {granted}, hold {amount}, cost {cost}");
                    let mut purse = Purse::default();
                    purse.grant(nano(granted));
                    assert_eq!(total(&purse), i128::from(granted.max(0)), "{case}");
                    let before = total(&purse);
                    let placed = reserve(&mut purse, 1, amount).is_ok();
                    assert_eq!(placed, amount <= granted.max(0), "{case}");
                    assert!(sound(&purse) && total(&purse) == before, "{case}");
                    if placed {
                        let settlement = end(&mut purse, 1, amount, cost, None).0;
                        let after = before - i128::from(settlement.charged().nano());
                        assert_eq!(total(&purse), after, "{case}");
                        assert!(sound(&purse) && purse.held() == Amount::ZERO, "{case}");
                    }
                    let before = total(&purse);
                    let withdrawn = purse.withdraw(nano(cost)).map_or(0, |()| i128::from(cost.max(0)));
                    assert!(sound(&purse) && total(&purse) == before - withdrawn, "{case}");
                }
            }
            // More than there can be stays at the most there can be.
            let mut purse = Purse::default();
            purse.grant(Amount::MAX);
            reserve(&mut purse, 1, i64::MAX).unwrap();
            purse.grant(Amount::MAX);
            purse.grant(nano(granted));
            assert_eq!((purse.available(), purse.held()), (Amount::MAX, Amount::MAX));
            assert_eq!(reserve(&mut purse, 2, granted).is_ok(), granted <= 0, "held would be too much");
            end(&mut purse, 1, i64::MAX, 0, None);
            assert_eq!((purse.available(), purse.held()), (Amount::MAX, Amount::ZERO));
        }
    }

    proptest! {
        #[test]
        fn nothing_is_made_and_nothing_lost(
            steps in prop::collection::vec((0_u8..4, 0_i64..2_000, 0_i64..3_000), 1..200),
        ) {
            let mut purse = Purse::default();
            let (mut granted, mut gone, mut open, mut id) = (0_i64, 0_i64, vec![], 0_u128);
            for (what, amount, cost) in steps {
                match what {
                    0 => { purse.grant(nano(amount)); granted += amount; }
                    1 => if purse.withdraw(nano(amount)).is_ok() { gone += amount; },
                    2 => {
                        id += 1;
                        if reserve(&mut purse, id, amount).is_ok() { open.push((id, amount)); }
                    }
                    _ => if let Some((id, held)) = open.pop() {
                        gone += end(&mut purse, id, held, cost, None).0.charged().nano();
                    }
                }
                prop_assert!(purse.available() >= Amount::ZERO && purse.held() >= Amount::ZERO);
                prop_assert_eq!(purse.held().nano(), open.iter().map(|(_, held)| held).sum::<i64>());
                prop_assert_eq!(purse.available().nano() + purse.held().nano() + gone, granted);
            }
        }
    }
}
