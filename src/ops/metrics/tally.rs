//! Answered calls on their way into their counters.
//!
//! A call counts in some thirty places, all over memory, most of them behind locked instructions. So it leaves in one place
//! what is to be counted, and who comes next counts many at once: a scrape, before it reads; the thread of records, four
//! times a second; the call that finds too many there.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::local::{LocalHistogram, LocalIntCounter};

use super::Metrics;
use super::calls::{Answered, Counters};

/// Calls that may wait; 80 KiB of them.
const WAITING_MAX: usize = 512;
/// Routes that are counted at once.
const ROUTES_MAX: usize = 64;

/// Calls that wait to be counted.
#[derive(Default)]
pub(super) struct Tally(Mutex<Vec<(Arc<Counters>, Answered)>>);

impl Metrics {
    /// A call was answered, by the route that has these counters. What is read of them lacks it until [`Self::gather`].
    pub fn answered(&self, counters: Arc<Counters>, call: Answered) {
        let mut waiting = self.tally.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push((counters, call));
        if waiting.len() < WAITING_MAX {
            return;
        }
        let all = std::mem::replace(&mut *waiting, Vec::with_capacity(WAITING_MAX));
        drop(waiting);
        self.count_all(all);
    }

    /// Counts the answered calls that wait to be counted.
    pub fn count_answered(&self) {
        let all = std::mem::take(&mut *self.tally.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.count_all(all);
    }

    fn count_all(&self, all: Vec<(Arc<Counters>, Answered)>) {
        let (own, holds) = (self.own_seconds.local(), &self.calls);
        let mut sums = Sums::default();
        let mut routes: Vec<(Arc<Counters>, Local)> = vec![];
        for (counters, call) in all {
            sums.add(&call);
            if let Some(time) = call.own {
                own.observe(time.as_secs_f64());
            }
            if let Some((_, local)) = routes.iter().find(|(known, _)| Arc::ptr_eq(known, &counters)) {
                local.count(&call);
                continue;
            }
            if routes.len() >= ROUTES_MAX {
                routes.clear();
            }
            let local = Local::of(&counters);
            local.count(&call);
            routes.push((counters, local));
        }
        self.charged_nano.inc_by(sums.charged_nano);
        self.estimated.inc_by(sums.estimated);
        holds.holds_ended(sums.captured, sums.released, sums.released_nano);
    }
}

/// What is counted of all routes together.
#[derive(Default)]
struct Sums {
    captured: u64,
    released: u64,
    charged_nano: u64,
    released_nano: u64,
    estimated: u64,
}

impl Sums {
    fn add(&mut self, call: &Answered) {
        let is_charged = call.charged_nano > 0;
        self.captured += u64::from(is_charged);
        self.released += u64::from(!is_charged);
        self.charged_nano += call.charged_nano;
        self.released_nano += call.released_nano;
        self.estimated += u64::from(call.estimated);
    }
}

/// A route's counters, in a hand's reach. They go where they belong when this does.
struct Local {
    requests: LocalIntCounter,
    served: LocalIntCounter,
    commits: LocalIntCounter,
    tokens_in: LocalIntCounter,
    tokens_out: LocalIntCounter,
    request_seconds: LocalHistogram,
    first_event_seconds: LocalHistogram,
    first_byte_seconds: LocalHistogram,
    input: LocalHistogram,
    output: LocalHistogram,
    client_seconds: LocalHistogram,
    server_seconds: LocalHistogram,
    first_token_seconds: LocalHistogram,
    per_token_seconds: LocalHistogram,
}

impl Local {
    fn of(counters: &Counters) -> Self {
        Self {
            requests: counters.requests.local(),
            served: counters.served.local(),
            commits: counters.commits.local(),
            tokens_in: counters.tokens_in.local(),
            tokens_out: counters.tokens_out.local(),
            request_seconds: counters.request_seconds.local(),
            first_event_seconds: counters.first_event_seconds.local(),
            first_byte_seconds: counters.first_byte_seconds.local(),
            input: counters.input.local(),
            output: counters.output.local(),
            client_seconds: counters.client_seconds.local(),
            server_seconds: counters.server_seconds.local(),
            first_token_seconds: counters.first_token_seconds.local(),
            per_token_seconds: counters.per_token_seconds.local(),
        }
    }

    fn count(&self, call: &Answered) {
        self.requests.inc_by(u64::from(call.is_ok));
        self.served.inc_by(u64::from(call.is_whole));
        self.commits.inc();
        self.tokens_in.inc_by(call.input_tokens);
        self.tokens_out.inc_by(call.output_tokens);
        self.request_seconds.observe(call.call.as_secs_f64());
        if let Some(first_byte) = call.first_byte {
            self.first_byte_seconds.observe(first_byte.as_secs_f64());
        }
        if let Some(first_event) = call.first_event {
            self.first_event_seconds.observe(first_event.as_secs_f64());
        }
        self.client_seconds.observe(call.attempt.as_secs_f64());
        self.server_seconds.observe(call.call.as_secs_f64());
        if let Some(first_token) = call.first_token {
            self.first_token_seconds.observe(first_token.as_secs_f64());
        }
        self.input.observe(float(call.input_tokens));
        if call.output_tokens > 0 {
            self.output.observe(float(call.output_tokens));
        }
        // The first token is in the time to it.
        if call.output_tokens > 1 && !call.streamed.is_zero() {
            self.per_token_seconds.observe(call.streamed.as_secs_f64() / float(call.output_tokens - 1));
        }
    }
}

impl Drop for Local {
    /// Histograms do it by themselves.
    fn drop(&mut self) {
        let counters = [&self.requests, &self.served, &self.commits, &self.tokens_in, &self.tokens_out];
        counters.into_iter().for_each(LocalIntCounter::flush);
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of tokens have far less than 52 bits")]
const fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use filters::dialect::{Dialect, Operation};

    use super::super::calls::Labels;
    use super::*;

    fn whole() -> Answered {
        let second = Duration::from_secs(1);
        Answered {
            first_event: Some(second),
            call: second,
            own: Some(second),
            input_tokens: 3,
            output_tokens: 2,
            charged_nano: 5,
            released_nano: 7,
            is_ok: true,
            is_whole: true,
            ..Answered::default()
        }
    }

    #[test]
    fn every_call_is_counted_once_and_with_its_own_route_when_somebody_looks() {
        let metrics = Metrics::new().unwrap();
        let routes: Vec<(String, Arc<Counters>)> = (0..ROUTES_MAX + 2)
            .map(|number| {
                let endpoint = format!("e{number}");
                let (operation, dialect) = (Operation::Chat, Dialect::OpenAi);
                let labels = Labels { endpoint: &endpoint, operation, dialect, model: "m" };
                let counters = Arc::new(metrics.of("chat", labels));
                (endpoint, counters)
            })
            .collect();
        for _ in 0..2 {
            for (_, counters) in &routes {
                metrics.answered(Arc::clone(counters), whole());
            }
        }
        let cut = Answered { is_ok: false, is_whole: false, charged_nano: 0, own: None, ..whole() };
        metrics.answered(Arc::clone(&routes[0].1), cut);
        assert_eq!(metrics.charged_nano.get(), 0, "they wait");
        let families = metrics.gather();
        let whole_ones = 2 * u64::try_from(routes.len()).unwrap();
        assert_eq!(metrics.charged_nano.get(), 5 * whole_ones);
        assert_eq!(metrics.requests.with_label_values(&["chat", "200"]).get(), whole_ones);
        assert_eq!(metrics.tokens.with_label_values(&["m", "input"]).get(), 3 * (whole_ones + 1));
        assert_eq!(metrics.own_seconds.get_sample_count(), whole_ones);
        for (number, (endpoint, _)) in routes.iter().enumerate() {
            assert_eq!(metrics.attempts.with_label_values(&[endpoint, "served"]).get(), 2);
            let first_events = metrics.first_event_seconds.with_label_values(&[endpoint]);
            assert_eq!(first_events.get_sample_count(), if number == 0 { 3 } else { 2 });
        }
        let holds = families.iter().find(|family| family.name() == "tollgate_holds_ended_total").unwrap();
        let ends: f64 = holds.get_metric().iter().map(|metric| metric.get_counter().get_value()).sum();
        assert!((ends - float(whole_ones + 1)).abs() < 0.5, "{ends}");
    }

    #[test]
    fn no_more_wait_than_may() {
        let metrics = Metrics::new().unwrap();
        let labels =
            Labels { endpoint: "e", operation: Operation::Chat, dialect: Dialect::OpenAi, model: "m" };
        let counters = Arc::new(metrics.of("chat", labels));
        for _ in 0..WAITING_MAX + 1 {
            metrics.answered(Arc::clone(&counters), whole());
        }
        assert_eq!(metrics.charged_nano.get(), 5 * u64::try_from(WAITING_MAX).unwrap());
        assert_eq!(metrics.tally.0.lock().unwrap().len(), 1);
    }
}
