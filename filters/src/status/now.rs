//! How a model does now, from all that is known of it.
//!
//! Three signals, the worst counts:
//!
//! - its **routes**: breakers, weights and rests, which move with every attempt. A route fails before a caller does,
//!   since the next one serves: this is what turns yellow first;
//! - **probes**, which ask where no caller does;
//! - **calls**: what callers got in the last minutes, whatever routes look like.
//!
//! A page must not flicker. Trouble that callers see shows at once; a route's bad moment only when the next look, a
//! second later, sees it too, for at a hundred calls a second one failure in a hundred is behind us by then. And what
//! has shown stays for a minute after it was last seen ([`Steady`]).
//!
//! Deliberately absent: averages over long times. They belong to the service level objective, which has minutes.

use std::time::{Duration, Instant};

use super::Level;

/// What has shown stays for so long after it was last seen.
pub const CALM: Duration = Duration::from_secs(60);
/// What one call says is older than this is no news of now.
pub const RECENT: Duration = Duration::from_secs(3_600);
/// So many failed calls of the last minutes, at least, before a page says that calls fail.
const BAD_MIN: u64 = 2;
/// And so many percent of them.
const PARTLY_PERCENT: u128 = 2;
/// So many failed calls, at least, before a page says that nothing works.
const DOWN_MIN: u64 = 5;
/// And so many percent.
const DOWN_PERCENT: u128 = 90;

/// One route of a model, as the board and the probes see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteSignal {
    /// A call or a probe has told something of it lately.
    pub known: bool,
    /// Its breaker refuses it, or its credential is in trouble.
    pub out: bool,
    /// It rests for a rate limit: well, but of no use for a moment.
    pub rests: bool,
    /// Failures weigh on it, its breaker is only half closed, or its last probe failed.
    pub shaky: bool,
}

/// What callers got in the last minutes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Answers, and faults of callers.
    pub good: u64,
    /// Errors that were not theirs.
    pub bad: u64,
}

/// How a model, or a region of it, does by this look; `None`: nothing is known.
#[must_use]
pub fn look(routes: &[RouteSignal], calls: Calls) -> Option<Level> {
    of_routes(routes).max(of_calls(calls))
}

fn of_routes(routes: &[RouteSignal]) -> Option<Level> {
    let any = |is: fn(&RouteSignal) -> bool| routes.iter().any(is);
    let all = |is: fn(&RouteSignal) -> bool| !routes.is_empty() && routes.iter().all(is);
    if all(|route| route.out) {
        Some(Level::Down)
    } else if all(|route| route.out || route.rests) {
        Some(Level::Partly)
    } else if any(|route| route.out || route.rests || route.shaky) {
        Some(Level::Degraded)
    } else {
        any(|route| route.known).then_some(Level::Operational)
    }
}

fn of_calls(Calls { good, bad }: Calls) -> Option<Level> {
    let all = u128::from(good) + u128::from(bad);
    let at_least = |percent: u128| u128::from(bad) * 100 >= all * percent;
    if bad >= DOWN_MIN && at_least(DOWN_PERCENT) {
        Some(Level::Down)
    } else if bad >= BAD_MIN && at_least(PARTLY_PERCENT) {
        Some(Level::Partly)
    } else {
        (all > 0).then_some(Level::Operational)
    }
}

/// What a page shows of something that is looked at every second.
#[derive(Clone, Debug, Default)]
pub struct Steady {
    /// When it was last seen to be at least so bad: degraded, partly down, down.
    seen: [Option<Instant>; 3],
    /// What the last look saw.
    last: Option<Level>,
    /// Since when it has shown trouble, however bad.
    since: Option<Instant>,
}

impl Steady {
    /// Takes what a look has seen; answers what is shown from now on.
    pub fn look(&mut self, now: Instant, seen: Option<Level>) -> Option<Level> {
        let before = std::mem::replace(&mut self.last, seen);
        // One look at a route's bad moment is none.
        let counts = if seen == Some(Level::Degraded) && before < seen { None } else { seen };
        for (at, level) in self.seen.iter_mut().zip(Level::ALL.into_iter().skip(1)) {
            if counts >= Some(level) {
                *at = Some(now);
            }
        }
        let shown = self.shown(now);
        let is_trouble = shown > Some(Level::Operational);
        self.since = is_trouble.then(|| self.since.unwrap_or(now));
        shown
    }

    /// Since when it has shown trouble without a break.
    #[must_use]
    pub const fn since(&self) -> Option<Instant> {
        self.since
    }

    fn shown(&self, now: Instant) -> Option<Level> {
        let fresh = |at: &Option<Instant>| at.is_some_and(|at| now.saturating_duration_since(at) < CALM);
        let worst = Level::ALL.into_iter().skip(1).zip(&self.seen).rfind(|(_, at)| fresh(at));
        match worst {
            Some((level, _)) => Some(level),
            None => self.last.map(|_| Level::Operational),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WELL: RouteSignal = RouteSignal { known: true, out: false, rests: false, shaky: false };
    const OUT: RouteSignal = RouteSignal { out: true, ..WELL };
    const RESTS: RouteSignal = RouteSignal { rests: true, ..WELL };
    const SHAKY: RouteSignal = RouteSignal { shaky: true, ..WELL };
    const UNKNOWN: RouteSignal = RouteSignal { known: false, ..WELL };

    fn of(routes: &[RouteSignal]) -> Option<Level> {
        look(routes, Calls::default())
    }

    #[test]
    fn one_route_in_trouble_while_another_serves_is_degraded() {
        for trouble in [OUT, RESTS, SHAKY] {
            assert_eq!(of(&[trouble, WELL]), Some(Level::Degraded), "{trouble:?}");
            assert_eq!(of(&[UNKNOWN, trouble]), Some(Level::Degraded), "{trouble:?}");
        }
        assert_eq!(of(&[SHAKY]), Some(Level::Degraded), "it still serves");
    }

    #[test]
    fn a_model_without_a_route_is_down_and_one_that_only_rests_is_partly_down() {
        assert_eq!(of(&[OUT, OUT]), Some(Level::Down));
        assert_eq!(of(&[OUT, RESTS]), Some(Level::Partly));
        assert_eq!(of(&[RESTS]), Some(Level::Partly));
    }

    #[test]
    fn a_model_that_nobody_has_asked_is_not_called_operational() {
        assert_eq!(of(&[UNKNOWN, UNKNOWN]), None);
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[UNKNOWN, WELL]), Some(Level::Operational));
    }

    #[test]
    fn what_callers_got_counts_whatever_routes_look_like() {
        let seen = |good, bad| look(&[WELL], Calls { good, bad });
        assert_eq!(seen(1_000, 1), Some(Level::Operational), "one of many is no trouble");
        assert_eq!(seen(1_000, 19), Some(Level::Operational));
        assert_eq!(seen(98, 2), Some(Level::Partly));
        assert_eq!(seen(0, 2), Some(Level::Partly), "two failures are not yet an outage");
        assert_eq!(seen(0, 5), Some(Level::Down));
        assert_eq!(seen(1, 9), Some(Level::Down));
        assert_eq!(seen(u64::MAX, u64::MAX), Some(Level::Partly), "no overflow");
        assert_eq!(look(&[UNKNOWN], Calls { good: 1, bad: 0 }), Some(Level::Operational));
    }

    #[test]
    fn a_bad_moment_of_a_route_shows_at_the_second_look_and_callers_trouble_at_once() {
        let mut steady = Steady::default();
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(steady.look(at(0), Some(Level::Operational)), Some(Level::Operational));
        assert_eq!(steady.look(at(1), Some(Level::Degraded)), Some(Level::Operational));
        assert_eq!(steady.look(at(2), Some(Level::Operational)), Some(Level::Operational));
        assert_eq!(steady.look(at(3), Some(Level::Degraded)), Some(Level::Operational));
        assert_eq!(steady.look(at(4), Some(Level::Degraded)), Some(Level::Degraded));
        assert_eq!(steady.look(at(5), Some(Level::Down)), Some(Level::Down));
        assert_eq!(steady.since(), Some(at(4)));
    }

    #[test]
    fn what_has_shown_stays_a_minute_and_gets_better_step_by_step() {
        let mut steady = Steady::default();
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(steady.look(at(0), None), None);
        assert_eq!(steady.look(at(0), Some(Level::Down)), Some(Level::Down));
        assert_eq!(steady.look(at(30), Some(Level::Partly)), Some(Level::Down));
        assert_eq!(steady.look(at(60), Some(Level::Operational)), Some(Level::Partly));
        assert_eq!(steady.look(at(89), Some(Level::Operational)), Some(Level::Partly));
        assert_eq!(steady.look(at(90), Some(Level::Operational)), Some(Level::Operational));
        assert_eq!(steady.since(), None);
        assert_eq!(steady.look(at(91), None), None, "nothing is known any more");
    }

    fn levels() -> impl Strategy<Value = Option<Level>> {
        prop_oneof![
            Just(None),
            Just(Some(Level::Operational)),
            Just(Some(Level::Degraded)),
            Just(Some(Level::Partly)),
            Just(Some(Level::Down)),
        ]
    }

    proptest! {
        #[test]
        fn trouble_that_callers_see_is_never_hidden_and_nothing_is_made_up(
            looks in prop::collection::vec((levels(), 1_u64..40), 1..60),
        ) {
            let (mut steady, mut now) = (Steady::default(), Instant::now());
            let mut seen: Vec<(Instant, Option<Level>)> = vec![];
            for (level, seconds) in looks {
                now += Duration::from_secs(seconds);
                seen.push((now, level));
                let shown = steady.look(now, level);
                if level > Some(Level::Degraded) {
                    prop_assert!(shown >= level);
                }
                let recent = seen.iter().filter(|(at, _)| now.saturating_duration_since(*at) < CALM);
                let worst = recent.map(|(_, level)| *level).max().flatten();
                prop_assert!(shown <= worst.max(Some(Level::Operational)));
                prop_assert_eq!(steady.since().is_some(), shown > Some(Level::Operational));
            }
        }

        #[test]
        fn a_further_sick_route_never_makes_a_model_look_better(
            routes in prop::collection::vec(prop_oneof![Just(WELL), Just(OUT), Just(RESTS), Just(SHAKY)], 1..6),
            at in 0_usize..6,
        ) {
            let mut worse = routes.clone();
            let at = at % worse.len();
            if let Some(route) = worse.get_mut(at) {
                *route = OUT;
            }
            prop_assert!(of(&worse) >= of(&routes));
        }
    }
}
