//! How upstreams stand, brought up to date whenever somebody reads.

use std::time::{Duration, Instant};

use filters::upstream::board::{BreakerState, Glance};
use filters::upstream::watchdog::{Form, Limits};
use prometheus::{GaugeVec, IntGaugeVec, Opts, Registry};

use super::register;

/// Gauges of endpoints.
pub struct UpstreamMetrics {
    info: IntGaugeVec,
    weight: IntGaugeVec,
    breaker: IntGaugeVec,
    rests: IntGaugeVec,
    credential_refused: IntGaugeVec,
    last_answer: GaugeVec,
    last_failure: GaugeVec,
    watchdog_seconds: GaugeVec,
}

/// A model at an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct RouteLabels<'a> {
    pub model: &'a str,
    pub operation: &'static str,
    pub endpoint: &'a str,
}

impl UpstreamMetrics {
    pub(super) fn new(r: &Registry) -> prometheus::Result<Self> {
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            register(r, IntGaugeVec::new(Opts::new(format!("tollgate_endpoint_{name}"), help), labels)?)
        };
        let moments = |name: &str, help: &str| {
            let opts = Opts::new(format!("tollgate_endpoint_{name}_unix_seconds"), help);
            register(r, GaugeVec::new(opts, &["endpoint"])?)
        };
        let watchdog = Opts::new(
            "tollgate_watchdog_seconds",
            "What the watchdogs of short prompts are, learnt or configured, at routes that were asked: to the response head \
             (`first_byte`) and to the first meaningful event (`first_event`), for streams and for whole answers.",
        );
        Ok(Self {
            info: gauges(
                "info",
                "Always 1: whose an endpoint is, and where.",
                &["endpoint", "provider", "region"],
            )?,
            weight: gauges("weight", "The configured weight of an endpoint.", &["endpoint"])?,
            breaker: gauges(
                "breaker",
                "1 for the state of an endpoint's breaker: `closed` admits, `open` refuses, `half_open` probes; 0 for the \
                 others.",
                &["endpoint", "state"],
            )?,
            rests: gauges(
                "rests",
                "1 while an endpoint waits out a Retry-After, or its credential is refused.",
                &["endpoint"],
            )?,
            credential_refused: gauges(
                "credential_refused",
                "1 from the moment that a provider refuses our credential, or its quota is used up, to the next answer.",
                &["endpoint"],
            )?,
            last_answer: moments(
                "last_answer",
                "When an endpoint last answered, a call or a probe, as this process saw it; 0 for never.",
            )?,
            last_failure: moments(
                "last_failure",
                "When an endpoint last failed, where it has not answered since: three times or more, or calls have passed it \
                 by. It stands also when nobody asks any more. 0 otherwise.",
            )?,
            watchdog_seconds: register(
                r,
                GaugeVec::new(watchdog, &["model", "operation", "endpoint", "form", "timer"])?,
            )?,
        })
    }

    pub(super) fn forget(&self) {
        self.info.reset();
        self.weight.reset();
        self.breaker.reset();
        self.rests.reset();
        self.credential_refused.reset();
        self.last_answer.reset();
        self.last_failure.reset();
        self.watchdog_seconds.reset();
    }

    /// Whose an endpoint is.
    pub fn is_of(&self, endpoint: &str, provider: &str, region: &str) {
        self.info.with_label_values(&[endpoint, provider, region]).set(1);
    }

    /// How an endpoint stands at a moment, which has this time since 1970.
    pub fn stands(&self, endpoint: &str, glance: &Glance, now: (Instant, Duration)) {
        let Glance { weight, factor: _, breaker, rests, credential_refused, answered, failed } = *glance;
        let unix_seconds = |at: Option<Instant>| {
            at.map_or(0.0, |at| now.1.saturating_sub(now.0.saturating_duration_since(at)).as_secs_f64())
        };
        self.last_answer.with_label_values(&[endpoint]).set(unix_seconds(answered));
        self.last_failure.with_label_values(&[endpoint]).set(unix_seconds(failed));
        self.weight.with_label_values(&[endpoint]).set(i64::from(weight));
        for state in BreakerState::ALL {
            self.breaker.with_label_values(&[endpoint, state.word()]).set(i64::from(state == breaker));
        }
        self.rests.with_label_values(&[endpoint]).set(i64::from(rests));
        self.credential_refused.with_label_values(&[endpoint]).set(i64::from(credential_refused));
    }

    /// What cuts attempts at a route.
    pub fn watched(&self, route: RouteLabels<'_>, form: Form, limits: Limits) {
        let RouteLabels { model, operation, endpoint } = route;
        let form = match form {
            Form::Stream => "stream",
            Form::Whole => "whole",
        };
        for (timer, limit) in [("first_byte", limits.head), ("first_event", limits.event)] {
            let labels = [model, operation, endpoint, form, timer];
            self.watchdog_seconds.with_label_values(&labels).set(limit.as_secs_f64());
        }
    }
}
