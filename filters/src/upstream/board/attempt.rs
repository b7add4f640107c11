//! One attempt, from its permission to its end: what it may, and what its end teaches all machines.

use std::time::{Duration, Instant};

use rand_core::RngCore;

use super::pace::censored;
use super::{Before, Begun, Board, Ended, EndpointState, Notice, Outcome, Pass, Route, Ticket};
use crate::ids::{CredentialId, EndpointId};
use crate::upstream::breaker::{Change, Crowd, HARD, Others, Permit, SOFT, Verdict};
use crate::upstream::failure::{Failure, Timer};
use crate::upstream::node_fault::{Blame, Sign};
use crate::upstream::rest::Standing;
use crate::upstream::sketch::Window;
use crate::upstream::watchdog::Timing;
use crate::upstream::weight::Health;

/// What connect failures of this long can be taken back when they turn out to be the node's.
const TAKE_BACK: Duration = Duration::from_secs(1);
/// A call that found an endpoint's only probe under way asks again so soon.
pub(super) const PROBE_POLL: Duration = Duration::from_millis(250);

impl Board {
    /// Before an attempt. `last`: the planner's word that nobody is left behind it.
    pub fn begin(
        &mut self,
        now: Instant,
        pass: &mut Pass,
        route: Route,
        last: bool,
        rng: &mut impl RngCore,
    ) -> Begun {
        let Some(spec) = self.layout.endpoints.get(route.endpoint.0) else { return Begun::Refused(None) };
        let (credential, head, event) = (spec.credential, spec.first_byte, spec.first_event);
        let rest = self.rests.standing(now, self.place(route.endpoint), credential);
        if matches!(rest, Standing::Resting { .. }) {
            pass.viable = pass.viable.saturating_sub(1);
            return Begun::Refused(None);
        }
        let limits = self.table(now, route, pass.form).limits(pass.class, head, event);
        let lease_end = now + limits.event;
        let place = pass.place_at(route.model);
        let nobody_else = pass.viable == 0 || place.is_some();
        let permit = match self.permit(now, route.endpoint, lease_end, nobody_else, place.is_some()) {
            Ok(permit) => permit,
            Err(until) => {
                pass.viable = pass.viable.saturating_sub(1);
                return Begun::Refused(Some(until.min(now + PROBE_POLL)));
            }
        };
        // A healthy route that this request has not asked is worth the attempt whatever the others used up:
        // that is no storm, it is where the request should have gone.
        let fresh = !pass.asked.contains(&route.endpoint);
        let extra = !pass.asked.is_empty();
        if extra && !self.budget.withdraw(now) && !(fresh && self.is_healthy(now, route.endpoint)) {
            // The permit did nothing: neutral, so that its lease is free again.
            self.end_permit(now, route.endpoint, permit, Verdict::Neutral, rng);
            return Begun::BudgetSpent;
        }
        if pass.asked.is_empty() {
            self.budget.deposit(now);
        }
        if !pass.asked.contains(&route.endpoint) {
            pass.asked.push(route.endpoint);
        }
        pass.viable = pass.viable.saturating_sub(1);
        if rest == Standing::Trial {
            self.rests.begin_trial(credential, lease_end);
        }
        if let Some((model, place)) = place
            && let Some(model) = self.models.get_mut(model.0)
        {
            model.gate.hold(place, lease_end);
        }
        self.fleet.urgent |= permit.is_probe() || place.is_some();
        // No rank hangs on either.
        let at = self.place(route.endpoint).0;
        if let Some(state) = self.endpoints.get_mut(at) {
            state.called = Some(now);
            state.last = Some(route.endpoint);
        }
        let watchdog = |limit: Duration| (!last).then_some(limit);
        Begun::Go {
            first_byte: watchdog(limits.head),
            first_event: watchdog(limits.event),
            ticket: Ticket {
                route,
                form: pass.form,
                class: pass.class,
                permit,
                place,
                limits,
                trial: rest == Standing::Trial,
                answered: false,
            },
        }
    }

    /// The first meaningful event is in hand: the watchdogs learn, and a probe or a trial has succeeded.
    pub fn answered(
        &mut self,
        now: Instant,
        ticket: &mut Ticket,
        timing: Timing,
        rng: &mut impl RngCore,
    ) -> Option<Notice> {
        if std::mem::replace(&mut ticket.answered, true) {
            return None;
        }
        self.learn(now, ticket, timing);
        self.sign(now, ticket.route.endpoint, Sign::Life);
        if let Some(credential) = self.credential(ticket.route.endpoint)
            && self.rests.served(now, self.place(ticket.route.endpoint), credential)
        {
            self.ranks.touch_credential(credential);
            self.tell_of(credential, true);
        }
        if let Some((model, place)) = ticket.place
            && let Some(model) = self.models.get_mut(model.0)
        {
            model.gate.succeeded(now, place);
        }
        let state = self.state_mut(ticket.route.endpoint)?;
        let probes = ticket.permit.is_probe() && state.breaker.counts(ticket.permit);
        let change = state.breaker.probe_answered(now, ticket.permit, rng);
        if probes {
            state.untold.success();
            self.fleet.urgent = true;
        }
        self.changed(now, ticket.route.endpoint, change)
    }

    /// An attempt has ended.
    pub fn end(&mut self, now: Instant, ticket: Ticket, outcome: Outcome, rng: &mut impl RngCore) -> Ended {
        match outcome {
            Outcome::Served { tokens_per_second } => self.served(now, &ticket, tokens_per_second, rng),
            Outcome::Failed { failure, wait, timing, reused } => {
                self.failed(now, &ticket, &failure, wait, timing, reused, rng)
            }
            Outcome::CallerLeft => {
                self.undecided(&ticket);
                let endpoint = ticket.route.endpoint;
                let notice = self.end_permit(now, endpoint, ticket.permit, Verdict::Neutral, rng);
                Ended { not_before: None, notice }
            }
        }
    }

    /// A free active check of an endpoint has passed: an open breaker lets a probe through at once.
    pub fn check_passed(&mut self, now: Instant, endpoint: EndpointId) {
        if let Some(state) = self.state_mut(endpoint) {
            state.breaker.check_passed(now);
            state.untold.check_passed = true;
        }
    }

    /// A probe of an endpoint was answered: as good as a passed check, and heard of it.
    pub fn probe_answered(&mut self, now: Instant, endpoint: EndpointId) {
        self.check_passed(now, endpoint);
        if let Some(state) = self.state_mut(endpoint) {
            state.heard.answer(now);
        }
    }

    /// An endpoint was reached, whatever it says: this node has a network.
    pub fn reached(&mut self, now: Instant, endpoint: EndpointId) {
        self.sign(now, endpoint, Sign::Life);
    }

    /// Since when this node has been cut off from all its endpoints.
    #[must_use]
    pub const fn cut_off_since(&self) -> Option<Instant> {
        self.node.since()
    }

    /// Credentials that somebody must look at.
    pub fn alarms(&self) -> impl Iterator<Item = CredentialId> {
        self.rests.alarms()
    }

    /// A credential has been replaced.
    pub fn renewed(&mut self, credential: CredentialId) {
        self.ranks.touch_credential(credential);
        self.rests.renewed(credential);
    }

    fn permit(
        &mut self,
        now: Instant,
        endpoint: EndpointId,
        lease_end: Instant,
        nobody_else: bool,
        at_the_gate: bool,
    ) -> Result<Permit, Instant> {
        let Some(state) = self.state_mut(endpoint) else { return Err(now) };
        if nobody_else {
            let crowd = if at_the_gate { Crowd::AsTheGateSays } else { Crowd::One };
            state.breaker.begin_anyway(now, lease_end, crowd)
        } else {
            state.breaker.begin(now, lease_end)
        }
    }

    fn served(
        &mut self,
        now: Instant,
        ticket: &Ticket,
        tokens_per_second: Option<u64>,
        rng: &mut impl RngCore,
    ) -> Ended {
        let endpoint = ticket.route.endpoint;
        if let Some(speed) = tokens_per_second {
            let state = self.routes.entry(self.paced(ticket.route)).or_default();
            state.speed.get_or_insert_with(|| Window::new(now)).record(now, speed);
        }
        if let Some(state) = self.state_mut(endpoint) {
            state.health.record(now, true);
            state.heard.answer(now);
        }
        let verdict = verdict_of(ticket, Verdict::Success);
        self.tally(now, endpoint, ticket.permit, verdict, false);
        let notice = self.end_permit(now, endpoint, ticket.permit, verdict, rng);
        Ended { not_before: None, notice }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one outcome, taken apart")]
    fn failed(
        &mut self,
        now: Instant,
        ticket: &Ticket,
        failure: &Failure,
        wait: Option<Duration>,
        timing: Timing,
        reused: bool,
        rng: &mut impl RngCore,
    ) -> Ended {
        let endpoint = ticket.route.endpoint;
        self.undecided(ticket);
        if let Failure::Timeout(timer) = failure {
            self.learn(now, ticket, censored(*timer, timing, ticket.limits));
        }
        let (not_before, alarm) = self.rest(now, endpoint, failure, wait);
        let blame = match failure {
            _ if failure.is_connect_type() => self.sign(now, endpoint, Sign::NoConnection),
            // Silence says nothing about the network.
            Failure::Timeout(_) | Failure::Broken | Failure::Ours => Blame::Endpoint,
            Failure::Connect => Blame::Endpoint,
            Failure::Status(_)
            | Failure::Credential(_)
            | Failure::Redirect
            | Failure::NotAnAnswer(_)
            | Failure::CallerFault(_) => self.sign(now, endpoint, Sign::Life),
        };
        let soft = reused && matches!(failure, Failure::Timeout(Timer::FirstByte | Timer::FirstEvent));
        let verdict = match blame {
            Blame::Node | Blame::NodeFromNow => Verdict::Neutral,
            Blame::Endpoint if !failure.blames_endpoint() => Verdict::Neutral,
            Blame::Endpoint if soft => Verdict::SoftFailure,
            Blame::Endpoint => Verdict::Failure,
        };
        self.blame(now, endpoint, verdict, failure.is_connect_type());
        self.tally(now, endpoint, ticket.permit, verdict, failure.is_connect_type());
        let mut notice = self.end_permit(now, endpoint, ticket.permit, verdict, rng);
        if blame == Blame::NodeFromNow {
            self.take_back(now);
            notice = Some(Notice::NodeCutOff);
        }
        if let (Some((model, _)), false) = (ticket.place, verdict == Verdict::Neutral) {
            let all_refuse = !self.another_admits(now, model, None);
            if let Some(model) = self.models.get_mut(model.0) {
                model.gate.failed(all_refuse);
            }
        }
        Ended { not_before, notice: alarm.or(notice) }
    }

    /// What the failure rests, and until when.
    fn rest(
        &mut self,
        now: Instant,
        endpoint: EndpointId,
        failure: &Failure,
        wait: Option<Duration>,
    ) -> (Option<Instant>, Option<Notice>) {
        let Some(credential) = self.credential(endpoint) else { return (None, None) };
        match failure {
            Failure::Status(429) => {
                self.ranks.touch_credential(credential);
                self.tell_of(credential, false);
                (Some(self.rests.rate_limited(now, credential, wait)), None)
            }
            Failure::Credential(_) => {
                self.ranks.touch_credential(credential);
                self.tell_of(credential, false);
                let until = self.rests.refused(now, credential);
                (Some(until), Some(Notice::CredentialAlarm(credential)))
            }
            Failure::Status(408 | 500..) => match wait.filter(|wait| !wait.is_zero()) {
                Some(wait) => {
                    let until = self.rests.endpoint_asked(now, self.place(endpoint), wait);
                    if let Some(state) = self.state_mut(endpoint) {
                        state.untold.rest = Some(until);
                    }
                    (Some(until), None)
                }
                None => (None, None),
            },
            Failure::Status(_)
            | Failure::Connect
            | Failure::Timeout(_)
            | Failure::Broken
            | Failure::Redirect
            | Failure::NotAnAnswer(_)
            | Failure::CallerFault(_)
            | Failure::Ours => (None, None),
        }
    }

    fn blame(&mut self, now: Instant, endpoint: EndpointId, verdict: Verdict, connect: bool) {
        let Some(state) = self.state_mut(endpoint) else { return };
        let recent = |at: Instant| now.saturating_duration_since(at) <= TAKE_BACK;
        if connect && state.before.as_ref().is_none_or(|before| !recent(before.at)) {
            let EndpointState { health, breaker, heard, generation, .. } = &*state;
            let (health, breaker, heard, generation) = (*health, breaker.clone(), *heard, *generation);
            state.before = Some(Before { at: now, health, breaker, heard, generation });
        }
        match verdict {
            Verdict::Failure => {
                state.health.record(now, false);
                state.heard.failure(now, HARD);
            }
            Verdict::SoftFailure => {
                state.health.record_soft_failure(now);
                state.heard.failure(now, SOFT);
            }
            Verdict::Success | Verdict::Neutral => {}
        }
    }

    /// The failures of the last second were the node's: they are forgotten.
    fn take_back(&mut self, now: Instant) {
        self.ranks.touch_all();
        for state in &mut self.endpoints {
            if let Some(Before { at, health, breaker, heard, generation }) = state.before.take()
                && now.saturating_duration_since(at) <= TAKE_BACK
            {
                state.health = health;
                state.breaker = breaker;
                state.heard = heard;
                state.generation = generation;
                state.untold.forget_held();
            }
        }
    }

    fn end_permit(
        &mut self,
        now: Instant,
        endpoint: EndpointId,
        permit: Permit,
        verdict: Verdict,
        rng: &mut impl RngCore,
    ) -> Option<Notice> {
        let failed = matches!(verdict, Verdict::Failure | Verdict::SoftFailure);
        let others = if failed && self.is_needed(now, endpoint) { Others::None } else { Others::Admit };
        let state = self.state_mut(endpoint)?;
        let change = state.breaker.end(now, permit, verdict, others, rng);
        self.changed(now, endpoint, change)
    }

    pub(super) fn changed(&mut self, now: Instant, endpoint: EndpointId, change: Change) -> Option<Notice> {
        match change {
            Change::None => None,
            Change::Opened(until) => Some(Notice::Opened(until)),
            Change::Closed => {
                let state = self.state_mut(endpoint)?;
                state.health = Health::reopened(now);
                Some(Notice::Closed)
            }
        }
    }

    fn sign(&mut self, now: Instant, endpoint: EndpointId, sign: Sign) -> Blame {
        if sign == Sign::Life && std::mem::take(&mut self.fleet.holds_back) {
            for state in &mut self.endpoints {
                state.untold.release();
            }
            self.fleet.urgent = true;
        }
        let provider = self.credential(endpoint).map_or(0, |credential| credential.provider);
        self.node.note(now, self.place(endpoint), provider, sign)
    }

    /// The attempt said nothing about its credential: another call may be the trial.
    fn undecided(&mut self, ticket: &Ticket) {
        if let (true, false, Some(credential)) =
            (ticket.trial, ticket.answered, self.credential(ticket.route.endpoint))
        {
            self.rests.end_trial(credential);
        }
    }
}

/// A probe that has answered was counted then; only its breaking off would be news.
fn verdict_of(ticket: &Ticket, verdict: Verdict) -> Verdict {
    if ticket.answered && ticket.permit.is_probe() { Verdict::Neutral } else { verdict }
}
