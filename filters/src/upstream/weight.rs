//! A route's weight decays with its failures and comes back by itself.
//!
//! Two signals, the lower one counts:
//!
//! - **slow**: the success rate of about the last hundred calls, to the power of 6, so that 90 %
//!   success halves the weight. Old calls fade with a half-life of 60 s towards "healthy": an
//!   endpoint that nobody calls any more has to recover on its own, or it would be lost for good.
//! - **fast**: an average over calls with α = ¼. Three failures in a row leave at most 0.42, which
//!   puts an endpoint below an equal neighbour within three calls. A second without calls gives
//!   back some of it (half in 15 s): by then the slow signal knows what the fast one forgets.
//!
//! Neither knows *that it is over*. An endpoint which lost its place to failures gets hardly any calls, so
//! its slow signal would take minutes to forget what a working endpoint disproves in seconds. So it
//! **returns** as one does whose breaker has closed: twelve successes in a row, the last failure at least
//! 10 s ago, and the past is forgotten (an endpoint that still fails one call in ten gets that far one time
//! in four, and is found out again within a few calls). [`crate::route`] sends it the calls for that.
//!
//! Two softer cases. A watchdog that trips on a *reused* connection may have met a dead connection
//! instead of a dead endpoint, so it moves the fast factor by half. And an endpoint whose breaker has
//! just closed starts anew, but **slowly**: its share grows from 10 % to all of it within 30 s, since
//! caches over there are cold and whoever fell over once falls over again under a sudden full load.
//! The share is kept apart from the factor, because in a strict order a weight of 10 % is either
//! first or not; [`crate::route`] gives it the first place in that share of the calls.
//!
//! The same numbers of all nodes together are kept by `src/fleet/health.lua`, which mirrors [`Health::record`];
//! a node goes by the worse of its own and the fleet's.
//!
//! Deliberately absent: refusing an endpoint. That is the breaker's.

use std::time::{Duration, Instant};

use crate::upstream::fleet::HealthWord;

/// Half-life of what the slow factor remembers.
const SLOW_HALF_LIFE: Duration = Duration::from_secs(60);
/// Half-life of what the fast factor lacks.
const FAST_HALF_LIFE: Duration = Duration::from_secs(15);
/// Each call fades the earlier ones by this much: a window of about a hundred calls.
const CALL_FADE: f64 = 0.99;
/// Successes assumed of an endpoint that is not known yet.
const PRIOR: f64 = 5.0;
const SLOW_POWER: i32 = 6;
const FAST_ALPHA: f64 = 0.25;
/// What a failure moves that may have been the connection's alone.
const SOFT_ALPHA: f64 = FAST_ALPHA / 2.0;
/// Successes in a row that prove a return.
const RETURN_SUCCESSES: u32 = 12;
/// And how long the last failure must lie back.
const RETURN_AFTER: Duration = Duration::from_secs(10);
/// A factor below which an endpoint counts as one that lost its place.
const LOST_BELOW: f64 = 0.9;
/// The share with which an endpoint begins after its breaker has closed.
const SLOW_START_SHARE: f64 = 0.1;
/// When it has its whole share again.
const SLOW_START: Duration = Duration::from_secs(30);

/// What one endpoint's calls have taught.
#[derive(Clone, Copy, Debug)]
pub struct Health {
    good: f64,
    bad: f64,
    fast: f64,
    at: Instant,
    reopened: Option<Instant>,
    failed: Option<Instant>,
    row: u32,
}

impl Health {
    /// An endpoint of which nothing is known: fully trusted.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { good: 0.0, bad: 0.0, fast: 1.0, at: now, reopened: None, failed: None, row: 0 }
    }

    /// An endpoint whose breaker has just closed: trusted anew, but slowly.
    #[must_use]
    pub fn reopened(now: Instant) -> Self {
        Self { reopened: Some(now), ..Self::new(now) }
    }

    /// What the fleet says that all nodes have seen.
    #[must_use]
    pub fn heard(now: Instant, word: HealthWord) -> Self {
        let HealthWord { good, bad, fast, reopened } = word;
        let sane = |number: f64| if number.is_finite() { number.max(0.0) } else { 0.0 };
        Self {
            good: sane(good),
            bad: sane(bad),
            fast: if fast.is_finite() { fast.clamp(0.0, 1.0) } else { 1.0 },
            reopened: reopened.and_then(|ago| now.checked_sub(ago)),
            ..Self::new(now)
        }
    }

    /// Notes a call that ended well or badly. Neutral ends (caller faults, 429) are not for here.
    pub fn record(&mut self, now: Instant, success: bool) {
        self.note(now, success, FAST_ALPHA);
    }

    /// Notes a failure that may have been the reused connection's alone.
    pub fn record_soft_failure(&mut self, now: Instant) {
        self.note(now, false, SOFT_ALPHA);
    }

    /// Whether its failures weigh on it.
    #[must_use]
    pub fn has_lost_weight(&self, now: Instant) -> bool {
        self.factor(now) < LOST_BELOW
    }

    /// The share of its calls that it may have: less than 1 only in the 30 s after it came back.
    #[must_use]
    pub fn share(&self, now: Instant) -> f64 {
        let Some(reopened) = self.reopened else { return 1.0 };
        let grown = now.saturating_duration_since(reopened).as_secs_f64() / SLOW_START.as_secs_f64();
        (SLOW_START_SHARE + (1.0 - SLOW_START_SHARE) * grown).clamp(SLOW_START_SHARE, 1.0)
    }

    fn note(&mut self, now: Instant, success: bool, alpha: f64) {
        self.fade(now);
        self.good *= CALL_FADE;
        self.bad *= CALL_FADE;
        if success {
            self.good += 1.0;
        } else {
            self.bad += 1.0;
        }
        let target = f64::from(u8::from(success));
        self.fast += alpha * (target - self.fast);
        self.row = if success { self.row.saturating_add(1) } else { 0 };
        if !success {
            self.failed = Some(now);
        } else if self.returns(now) {
            *self = Self::reopened(now);
        }
    }

    /// What to multiply the configured weight by: more than 0, at most 1.
    #[must_use]
    pub fn factor(&self, now: Instant) -> f64 {
        // Without a failure there is nothing to fade; most routes of most calls are so.
        if self.bad <= 0.0 && self.fast >= 1.0 {
            return 1.0;
        }
        let mut faded = *self;
        faded.fade(now);
        let good = faded.good + PRIOR;
        let slow = (good / (good + faded.bad)).powi(SLOW_POWER);
        slow.min(faded.fast).clamp(f64::MIN_POSITIVE, 1.0)
    }

    fn returns(&self, now: Instant) -> bool {
        let quiet = self.failed.is_some_and(|at| now.saturating_duration_since(at) >= RETURN_AFTER);
        quiet && self.row >= RETURN_SUCCESSES && self.has_lost_weight(now)
    }

    fn fade(&mut self, now: Instant) {
        // A clock that steps back fades nothing.
        let idle = now.saturating_duration_since(self.at);
        self.at = self.at.max(now);
        let slow = half_life(idle, SLOW_HALF_LIFE);
        self.good *= slow;
        self.bad *= slow;
        self.fast = 1.0 - (1.0 - self.fast) * half_life(idle, FAST_HALF_LIFE);
    }
}

fn half_life(idle: Duration, half: Duration) -> f64 {
    (-idle.as_secs_f64() / half.as_secs_f64()).exp2()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn three_failures_in_a_row_leave_less_than_half() {
        let now = Instant::now();
        let mut health = Health::new(now);
        (0..100).for_each(|_| health.record(now, true));
        (0..3).for_each(|_| health.record(now, false));
        assert!(health.factor(now) <= 0.43, "{}", health.factor(now));
    }

    #[test]
    fn ninety_percent_success_halves_the_weight() {
        let now = Instant::now();
        let mut health = Health::new(now);
        (0..1000).for_each(|n| health.record(now, n % 10 != 0));
        let factor = health.factor(now);
        assert!((0.4..0.65).contains(&factor), "{factor}");
    }

    #[test]
    fn an_endpoint_that_nobody_calls_recovers() {
        let now = Instant::now();
        let mut health = Health::new(now);
        (0..200).for_each(|_| health.record(now, false));
        assert!(health.factor(now) < 0.01);
        assert!(health.factor(after(now, 120)) < 0.5, "not at once");
        assert!(health.factor(after(now, 900)) > 0.9);
    }

    #[test]
    fn an_endpoint_that_came_back_has_its_whole_share_after_thirty_seconds() {
        let now = Instant::now();
        let health = Health::reopened(now);
        assert!((health.share(now) - 0.1).abs() < 1e-9);
        assert!((health.share(after(now, 15)) - 0.55).abs() < 1e-9);
        assert!((health.share(after(now, 30)) - 1.0).abs() < 1e-9);
        assert!((Health::new(now).share(now) - 1.0).abs() < 1e-9, "a new one has it at once");
    }

    #[test]
    fn twelve_successes_after_ten_quiet_seconds_forget_the_past() {
        let now = Instant::now();
        let mut health = Health::new(now);
        (0..20).for_each(|_| health.record(now, false));
        (0..50).for_each(|_| health.record(after(now, 9), true));
        assert!(health.has_lost_weight(after(now, 9)), "too soon");
        health.record(after(now, 10), true);
        assert!(!health.has_lost_weight(after(now, 10)));
        assert!(health.share(after(now, 10)) < 0.11, "but it starts slowly");
    }

    #[test]
    fn a_success_without_failures_before_changes_no_share() {
        let now = Instant::now();
        let mut health = Health::new(now);
        (0..100).for_each(|n| health.record(after(now, n), true));
        assert!((health.share(after(now, 100)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_trip_on_a_reused_connection_moves_the_weight_by_half() {
        let now = Instant::now();
        let (mut soft, mut hard) = (Health::new(now), Health::new(now));
        soft.record_soft_failure(now);
        hard.record(now, false);
        assert!((1.0 - soft.fast) * 2.0 - (1.0 - hard.fast) < 1e-9);
        assert!(soft.fast < 1.0);
    }

    proptest! {
        #[test]
        fn the_share_only_grows(steps in prop::collection::vec(0_u64..20_000, 0..20)) {
            let mut now = Instant::now();
            let health = Health::reopened(now);
            let mut before = 0.0;
            for step in steps {
                now += Duration::from_millis(step);
                let share = health.share(now);
                prop_assert!(share >= before && (0.1..=1.0).contains(&share));
                before = share;
            }
        }

        #[test]
        fn factor_is_always_a_usable_number(
            calls in prop::collection::vec((any::<bool>(), 0_u64..10_000_000), 0..200),
        ) {
            let start = Instant::now();
            let mut now = start;
            let mut health = Health::new(start);
            for (success, wait_ms) in calls {
                now += Duration::from_millis(wait_ms);
                health.record(now, success);
                let factor = health.factor(now);
                prop_assert!(factor > 0.0 && factor <= 1.0 && factor.is_finite());
            }
            prop_assert!(health.factor(after(now, 100_000)) > 0.99, "recovers");
            prop_assert!(health.factor(start).is_finite(), "a clock that went back does no harm");
        }

        #[test]
        fn without_a_failure_the_factor_is_whole_whatever_the_time(
            waits in prop::collection::vec(0_u64..10_000_000, 0..50), later in 0_u64..10_000_000,
        ) {
            let mut now = Instant::now();
            let mut health = Health::new(now);
            for wait_ms in waits {
                now += Duration::from_millis(wait_ms);
                health.record(now, true);
            }
            let mut faded = health;
            faded.fade(now + Duration::from_millis(later));
            prop_assert!(faded.bad <= 0.0 && faded.fast >= 1.0, "nothing fades");
            prop_assert!(health.factor(now).to_bits() == 1.0_f64.to_bits());
        }

        #[test]
        fn a_success_never_lowers_and_a_failure_never_raises_the_fast_part(
            calls in prop::collection::vec(any::<bool>(), 0..50),
        ) {
            let now = Instant::now();
            let mut health = Health::new(now);
            for success in calls {
                let before = health.fast;
                health.record(now, success);
                let moved = health.fast - before;
                prop_assert!(if success { moved >= 0.0 } else { moved <= 0.0 }, "moved by {}", moved);
            }
        }
    }
}
