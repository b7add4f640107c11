//! An hour of traffic against four endpoints that break in every way we know, in virtual time.
//!
//! What runs here is what runs in production: the board with all its machines, and the planner. Only clock,
//! network and chance are simulated, so that any run can be had again: `OUTAGES_SEED=7 cargo test -p
//! tollgate-filters --test outages -- --nocapture` plays one seed and prints its table. The upstreams'
//! latencies are model inputs (log-normal, 1 s in the middle, prompts of two classes), not provider data.
//!
//! `a` has a free active check every 10 s, the others have none.
//! `docs/routing.md` holds the table of a run.

#![expect(
    clippy::disallowed_methods,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test begins at any instant, prints its table and fails by panicking"
)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use filters::attempt::{NextAttempt, Planner, WAITING_MAX};
use filters::ids::{CredentialId, EndpointId, ModelId};
use filters::preferences::Preferences;
use filters::route::Sort;
use filters::upstream::board::{
    Ask, Begun, Board, EndpointSpec, Found, Layout, ModelSpec, Outcome, Pass, Route, Ticket,
};
use filters::upstream::deadline::Deadline;
use filters::upstream::failure::{Failure, Timer};
use filters::upstream::watchdog::{Form, Limit, Timing};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

const HOUR: Duration = Duration::from_secs(3_600);
const CHECK_EVERY: Duration = Duration::from_secs(10);
const PER_SECOND: f64 = 10.0;
const SEEDS: [u64; 3] = [1, 2, 3];
/// `a` is preferred; the others stand by.
const WEIGHTS: [u32; 4] = [100, 80, 60, 40];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// How an endpoint breaks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Its region answers 503 within 50 ms.
    Region,
    /// 429 without a word about when, after two seconds.
    SilentThrottle,
    /// It takes the request and says nothing.
    Hang,
    /// The head of a 200 comes, and then nothing.
    HeadThenSilence,
    /// It gets slower and slower, up to four times.
    Creep,
    /// Ten seconds well, ten seconds 503.
    Flapping,
}

impl Fault {
    fn fails_checks(self) -> bool {
        matches!(self, Self::Region | Self::Hang | Self::Flapping)
    }
}

#[derive(Clone, Copy, Debug)]
struct Outage {
    name: &'static str,
    fault: Fault,
    endpoints: &'static [usize],
    from_s: u64,
    to_s: u64,
}

/// What no check sees ends well before the next one: its breaker may stay open for five minutes.
const OUTAGES: [Outage; 8] = [
    outage("region 503", Fault::Region, &[0], 300, 420),
    outage("silent 429", Fault::SilentThrottle, &[0], 700, 820),
    outage("200, then silence", Fault::HeadThenSilence, &[0], 1_250, 1_310),
    outage("slow creep", Fault::Creep, &[0], 1_700, 2_000),
    outage("hang", Fault::Hang, &[0], 2_100, 2_160),
    outage("flapping", Fault::Flapping, &[0], 2_350, 2_450),
    outage("two at once", Fault::Region, &[0, 1], 2_700, 2_760),
    outage("all, b returns first", Fault::Region, &[0, 1, 2, 3], 3_100, 3_160),
];

const fn outage(
    name: &'static str,
    fault: Fault,
    endpoints: &'static [usize],
    from_s: u64,
    to_s: u64,
) -> Outage {
    Outage { name, fault, endpoints, from_s, to_s }
}

/// The place of the outage in which everybody is down.
const ALL_DOWN: usize = OUTAGES.len() - 1;
/// Until then the breakers have opened.
const SETTLED_S: u64 = 10;
/// In the last outage `b` is well again this much earlier than the others.
const RETURNS_EARLIER_S: u64 = 20;

/// What one attempt will do if nobody cuts it.
#[derive(Clone, Copy, Debug)]
struct Fate {
    head: Option<Duration>,
    event: Option<Duration>,
    status: Option<u16>,
    reused: bool,
    healthy: bool,
}

#[derive(Debug)]
enum Event {
    Arrives,
    /// The free active check of `a`.
    Check,
    Next(usize),
    Ends(usize),
    /// A committed answer's last byte.
    Over(usize),
}

#[derive(Debug)]
struct Request {
    prompt_tokens: u64,
    plan: Planner,
    pass: Option<Pass>,
    routes: Vec<Route>,
    attempt: Option<(Ticket, Fate, Instant, Cut)>,
}

/// What ends an attempt, and when.
#[derive(Clone, Copy, Debug)]
struct Cut {
    timer: Option<Timer>,
    /// It counts as one of those under way while every endpoint is down.
    all_down: bool,
}

#[derive(Clone, Debug, Default)]
struct PerOutage {
    failures_until_moved: u32,
    moved: bool,
    first_failure: Option<Instant>,
    moved_after: Option<Duration>,
    found_after: Option<Duration>,
    /// 1.5 × the p99 of the endpoint's own last thousand calls of that kind.
    found_bound: Option<Duration>,
    attempts: u64,
    failed_attempts: u64,
    requests: u64,
    errors: u64,
    back_after: Option<Duration>,
    back_after_admitted: Option<Duration>,
    admitted: Option<Instant>,
}

struct Sim {
    start: Instant,
    now: Instant,
    rng: Pcg64Mcg,
    board: Board,
    events: BinaryHeap<Reverse<(Instant, u64)>>,
    payload: BTreeMap<u64, Event>,
    sequence: u64,
    requests: Vec<Request>,
    per: Vec<PerOutage>,
    healthy_attempts: u64,
    healthy_cut: u64,
    first_attempts: u64,
    extra: Vec<Instant>,
    firsts: Vec<Instant>,
    /// Who served lately, for the share of `a`.
    served: Vec<(Instant, usize)>,
    errors_while_one_lives: u64,
    refused_after_return: u64,
    all_down_in_flight_max: usize,
    all_down_in_flight: usize,
    all_down_attempts: u64,
    back_with_b: Option<Instant>,
    longest_wait: Duration,
    seen: Vec<(usize, u64, Duration)>,
}

impl Sim {
    fn new(seed: u64) -> Self {
        let start = Instant::now();
        let spec = |n: usize| EndpointSpec {
            name: NAMES[n].into(),
            provider: NAMES[n].into(),
            credential: CredentialId { provider: n, index: 0 },
            place: EndpointId(n),
            weight: WEIGHTS[n],
            first_byte: Limit::Auto,
            first_event: Limit::Auto,
            price: None,
            parameters: None,
        };
        let layout = Layout {
            endpoints: (0..4).map(spec).collect(),
            models: vec![ModelSpec {
                name: "m".into(),
                operation: filters::dialect::Operation::Chat,
                routes: (0..4).map(EndpointId).collect(),
                reasoning: false,
                explore: true,
                sort: Sort::Weight,
            }],
        };
        Self {
            start,
            now: start,
            rng: Pcg64Mcg::seed_from_u64(seed),
            board: Board::new(start, layout),
            events: BinaryHeap::new(),
            payload: BTreeMap::new(),
            sequence: 0,
            requests: vec![],
            per: vec![PerOutage::default(); OUTAGES.len()],
            healthy_attempts: 0,
            healthy_cut: 0,
            first_attempts: 0,
            extra: vec![],
            firsts: vec![],
            served: vec![],
            errors_while_one_lives: 0,
            refused_after_return: 0,
            all_down_in_flight_max: 0,
            all_down_in_flight: 0,
            all_down_attempts: 0,
            back_with_b: None,
            longest_wait: Duration::ZERO,
            seen: vec![],
        }
    }

    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    fn seconds(&self) -> u64 {
        (self.now - self.start).as_secs()
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.sequence += 1;
        self.payload.insert(self.sequence, event);
        self.events.push(Reverse((at, self.sequence)));
    }

    fn run(&mut self, until: Duration) {
        let until = self.start + until;
        self.schedule(self.start, Event::Arrives);
        self.schedule(self.start, Event::Check);
        while let Some(Reverse((at, id))) = self.events.pop() {
            self.now = at;
            match self.payload.remove(&id).unwrap() {
                Event::Arrives => self.arrives(until),
                Event::Check => self.check(until),
                Event::Next(request) => self.next(request),
                Event::Ends(request) => self.attempt_ends(request),
                Event::Over(request) => {
                    if let Some((ticket, ..)) = self.requests[request].attempt.take() {
                        let outcome = Outcome::Served { tokens_per_second: Some(50) };
                        self.board.end(self.now, ticket, outcome, &mut self.rng);
                    }
                }
            }
        }
    }

    fn outage(&self) -> Option<usize> {
        let now = self.seconds();
        OUTAGES.iter().position(|o| (o.from_s..o.to_s).contains(&now))
    }

    fn fault(&self, endpoint: usize, at: Instant) -> Option<(Fault, f64)> {
        let ms = u64::try_from((at - self.start).as_millis()).unwrap();
        let outage = OUTAGES.iter().enumerate().find(|(n, o)| {
            let early = if *n == ALL_DOWN && endpoint == 1 { RETURNS_EARLIER_S } else { 0 };
            o.endpoints.contains(&endpoint) && (o.from_s * 1000..(o.to_s - early) * 1000).contains(&ms)
        })?;
        let since = ms - outage.1.from_s * 1000;
        let part = (ms / 1000 - outage.1.from_s) as f64 / (outage.1.to_s - outage.1.from_s) as f64;
        match outage.1.fault {
            Fault::Flapping if (since / 10_000) % 2 == 0 => None,
            fault => Some((fault, part)),
        }
    }

    fn all_down(&self) -> bool {
        (0..4).all(|n| matches!(self.fault(n, self.now), Some((Fault::Region, _))))
    }

    /// It sees a dead region; that models throttle or fall silent it does not see.
    fn check(&mut self, until: Instant) {
        let passes = !self.fault(0, self.now).is_some_and(|(fault, _)| fault.fails_checks());
        if passes {
            self.board.check_passed(self.now, EndpointId(0));
        }
        if self.now < until {
            self.schedule(self.now + CHECK_EVERY, Event::Check);
        }
    }

    fn arrives(&mut self, until: Instant) {
        if self.now >= until {
            return;
        }
        let pause = -(1.0 - self.uniform()).ln() / PER_SECOND;
        let next = self.now + Duration::from_secs_f64(pause);
        self.schedule(next, Event::Arrives);
        let prompt_tokens = if self.uniform() < 0.8 { 500 } else { 8_000 };
        let preferences = Preferences::default();
        let ask = Ask { models: &[ModelId(0)], form: Form::Stream, prompt_tokens, preferences: &preferences };
        if let Some(outage) = self.outage() {
            self.per[outage].requests += 1;
        }
        match self.board.candidates(self.now, &ask, &mut self.rng) {
            Found::Plan(plan) => {
                self.watch_order(&plan.order);
                let ids = |routes: &[Route]| routes.iter().map(|r| r.endpoint).collect::<Vec<_>>();
                let deadline = Deadline::new(self.now, Duration::from_secs(540));
                let planner = Planner::new(ids(&plan.order), 5, deadline)
                    .falling_back_on(self.now, ids(&plan.fall_backs));
                self.requests.push(Request {
                    prompt_tokens,
                    plan: planner,
                    pass: Some(plan.pass),
                    routes: [plan.order, plan.fall_backs].concat(),
                    attempt: None,
                });
                self.next(self.requests.len() - 1);
            }
            Found::AllRefused { soonest, .. } => {
                assert!(soonest > self.now, "a Retry-After lies ahead");
                self.error();
            }
            Found::NoneFits(_) => panic!("there are no preferences"),
        }
    }

    /// Notes when the broken endpoint lost its first place, and when it had it again.
    fn watch_order(&mut self, order: &[Route]) {
        let Some(outage) = self.outage() else { return };
        let broken = OUTAGES[outage].endpoints;
        let now = self.now;
        let per = &mut self.per[outage];
        if let (Some(since), false, Some(first)) = (per.first_failure, per.moved, order.first())
            && !broken.contains(&first.endpoint.0)
        {
            per.moved = true;
            per.moved_after = Some(now - since);
        }
    }

    fn error(&mut self) {
        if let Some(outage) = self.outage() {
            self.per[outage].errors += 1;
        }
        let lives = (0..4).any(|n| self.fault(n, self.now).is_none());
        let last = OUTAGES[ALL_DOWN];
        let in_last = (last.from_s..last.to_s + 120).contains(&self.seconds());
        if lives && in_last {
            self.refused_after_return += 1;
        } else if lives {
            self.errors_while_one_lives += 1;
        }
    }

    fn next(&mut self, id: usize) {
        loop {
            let request = &mut self.requests[id];
            match request.plan.next_attempt(self.now) {
                NextAttempt::WaitUntil(at) => {
                    self.longest_wait = self.longest_wait.max(request.plan.waited());
                    return self.schedule(at, Event::Next(id));
                }
                NextAttempt::Stop(_) => {
                    self.finish(id);
                    return self.error();
                }
                NextAttempt::Try { endpoint, share, last } => {
                    let route = *request.routes.iter().find(|r| r.endpoint == endpoint).unwrap();
                    let pass = request.pass.as_mut().unwrap();
                    match self.board.begin(self.now, pass, route, last, &mut self.rng) {
                        Begun::Refused(until) => request.plan.refused(self.now, until),
                        Begun::BudgetSpent => {
                            self.finish(id);
                            return self.error();
                        }
                        Begun::Go { ticket, first_byte, first_event } => {
                            return self.attempt(id, endpoint.0, ticket, first_byte, first_event, share);
                        }
                    }
                }
            }
        }
    }

    fn attempt(
        &mut self,
        id: usize,
        endpoint: usize,
        ticket: Ticket,
        first_byte: Option<Duration>,
        first_event: Option<Duration>,
        share: Duration,
    ) {
        if self.requests[id].plan.made() == 1 {
            self.firsts.push(self.now);
            self.first_attempts += 1;
        } else {
            self.extra.push(self.now);
        }
        if let Some(outage) = self.outage() {
            self.per[outage].attempts += 1;
        }
        let all_down = self.all_down() && self.seconds() >= OUTAGES[ALL_DOWN].from_s + SETTLED_S;
        if all_down {
            self.all_down_attempts += 1;
            self.all_down_in_flight += 1;
            self.all_down_in_flight_max = self.all_down_in_flight_max.max(self.all_down_in_flight);
        }
        let fate = self.fate(endpoint, self.requests[id].prompt_tokens);
        let never = Duration::from_secs(100_000);
        let head = fate.head.unwrap_or(never);
        let event = fate.event.unwrap_or(never);
        let mut end = (event, None);
        if first_byte.is_some_and(|limit| head > limit) && first_byte.unwrap() < end.0 {
            end = (first_byte.unwrap(), Some(Timer::FirstByte));
        }
        if first_event.is_some_and(|limit| event > limit && limit < end.0) {
            end = (first_event.unwrap(), Some(Timer::FirstEvent));
        }
        if share < end.0 {
            end = (share, Some(Timer::Share));
        }
        let auto_cut = matches!(end.1, Some(Timer::FirstByte | Timer::FirstEvent));
        if fate.healthy {
            self.healthy_attempts += 1;
            self.healthy_cut += u64::from(auto_cut);
        }
        if let (Some(outage), true) = (self.outage(), auto_cut)
            && !fate.healthy
        {
            let bound = self.p99(endpoint, self.requests[id].prompt_tokens).mul_f64(1.5);
            let per = &mut self.per[outage];
            per.found_after.get_or_insert(end.0);
            per.found_bound.get_or_insert(bound);
        }
        self.requests[id].attempt = Some((ticket, fate, self.now, Cut { timer: end.1, all_down }));
        self.schedule(self.now + end.0, Event::Ends(id));
    }

    fn attempt_ends(&mut self, id: usize) {
        let (mut ticket, fate, began, cut) = self.requests[id].attempt.take().unwrap();
        let endpoint = ticket.route().endpoint.0;
        self.all_down_in_flight -= usize::from(cut.all_down);
        let failure = match (cut.timer, fate.status) {
            (Some(timer), _) => Some(Failure::Timeout(timer)),
            (None, Some(status)) => Some(Failure::from_status(status)),
            (None, None) => None,
        };
        let timing = Timing { head: fate.head.filter(|head| began + *head <= self.now), event: None };
        let Some(failure) = failure else {
            let timing = Timing { event: fate.event, ..timing };
            self.seen.push((endpoint, self.requests[id].prompt_tokens, fate.event.unwrap()));
            self.board.answered(self.now, &mut ticket, timing, &mut self.rng);
            self.requests[id].plan.commit();
            self.finish(id);
            self.serve(endpoint);
            // The rest of the answer.
            let rest = Duration::from_millis(500 + u64::from(self.rng.next_u32() % 4_000));
            self.requests[id].attempt = Some((ticket, fate, began, cut));
            return self.schedule(self.now + rest, Event::Over(id));
        };
        self.note_failure(endpoint, began);
        let outcome = Outcome::Failed { failure: failure.clone(), wait: None, timing, reused: fate.reused };
        let ended = self.board.end(self.now, ticket, outcome, &mut self.rng);
        let request = &mut self.requests[id];
        request.plan.failed(self.now, &failure, ended.not_before, &mut self.rng);
        self.next(id);
    }

    fn note_failure(&mut self, endpoint: usize, began: Instant) {
        let Some(outage) = self.outage() else { return };
        let now = self.now;
        if !OUTAGES[outage].endpoints.contains(&endpoint) || began < self.at(OUTAGES[outage].from_s) {
            return;
        }
        let per = &mut self.per[outage];
        per.failed_attempts += 1;
        per.first_failure.get_or_insert(now);
        if !per.moved {
            per.failures_until_moved += 1;
        }
    }

    fn serve(&mut self, endpoint: usize) {
        let now = self.now;
        self.served.push((now, endpoint));
        let last = OUTAGES[ALL_DOWN];
        let b_returns = self.at(last.to_s - RETURNS_EARLIER_S);
        if endpoint == 1 && now >= b_returns && self.seconds() < last.to_s + 60 {
            self.back_with_b.get_or_insert(now);
        }
        // Is `a` back at its full share? Of the last 40 served calls it has at least 90 %.
        let Some(outage) = OUTAGES.iter().rposition(|o| self.at(o.to_s) <= now) else { return };
        let ended = self.at(OUTAGES[outage].to_s);
        if endpoint == 0 {
            self.per[outage].admitted.get_or_insert(now);
        }
        let recent: Vec<_> = self.served.iter().rev().take(40).collect();
        let of_a = recent.iter().filter(|(at, e)| *e == 0 && *at >= ended).count();
        let per = &mut self.per[outage];
        if of_a >= 36 && per.back_after.is_none() {
            per.back_after = Some(now - ended);
            per.back_after_admitted = per.admitted.map(|admitted| now - admitted);
        }
    }

    fn finish(&mut self, id: usize) {
        if let Some(pass) = self.requests[id].pass.take() {
            self.board.finish(pass);
        }
    }

    fn fate(&mut self, endpoint: usize, prompt_tokens: u64) -> Fate {
        let reused = self.uniform() < 0.5;
        let prefill = if prompt_tokens < 1_000 { 0.0 } else { 0.8 };
        let event = 0.9 * (0.35 * self.normal()).exp() + prefill;
        let head = 0.3 * event;
        let span = |seconds: f64| Some(Duration::from_secs_f64(seconds));
        let well = Fate { head: span(head), event: span(event), status: None, reused, healthy: true };
        let sick = Fate { healthy: false, ..well };
        match self.fault(endpoint, self.now) {
            None => well,
            Some((Fault::Region | Fault::Flapping, _)) => {
                Fate { head: span(0.05), event: span(0.05), status: Some(503), ..sick }
            }
            Some((Fault::SilentThrottle, _)) => {
                Fate { head: span(2.0), event: span(2.0), status: Some(429), ..sick }
            }
            Some((Fault::Hang, _)) => Fate { head: None, event: None, ..sick },
            Some((Fault::HeadThenSilence, _)) => Fate { event: None, ..sick },
            // It answers all the same: a slow call that is cut is a healthy one cut.
            Some((Fault::Creep, part)) => {
                let slower = 1.0 + 3.0 * part;
                Fate { head: span(head * slower), event: span(event * slower), ..well }
            }
        }
    }

    /// Of the endpoint's last thousand calls of that prompt size.
    fn p99(&self, endpoint: usize, prompt_tokens: u64) -> Duration {
        let alike = |(e, tokens, _): &&(usize, u64, Duration)| *e == endpoint && *tokens == prompt_tokens;
        let mut times: Vec<_> = self.seen.iter().rev().filter(alike).take(1_000).map(|s| s.2).collect();
        times.sort_unstable();
        times.get(times.len() * 99 / 100).or_else(|| times.last()).copied().unwrap_or_default()
    }

    /// Whether the extra attempts kept to the budget in every stretch of ten seconds.
    fn budget_kept(&self) -> bool {
        let within = |all: &[Instant], end: Instant, seconds| {
            let from = end - Duration::from_secs(seconds);
            all.partition_point(|t| *t <= end) - all.partition_point(|t| *t <= from)
        };
        let fits = |at: &Instant| within(&self.extra, *at, 9) <= (within(&self.firsts, *at, 10) / 5).max(100);
        self.extra.iter().all(fits)
    }

    fn table(&self) -> String {
        let seconds =
            |span: Option<Duration>| span.map_or_else(|| "–".into(), |s| format!("{:.1}", s.as_secs_f64()));
        let mut out = String::from(
            "| outage | requests | attempts | failed | caller errors | failures until moved | moved after s | \
             found after s (bound) | back: s after its end | s after it was let in |\n\
             | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        );
        for (outage, per) in OUTAGES.iter().zip(&self.per) {
            out += &format!(
                "| {} | {} | {} | {} | {} | {} | {} | {} ({}) | {} | {} |\n",
                outage.name,
                per.requests,
                per.attempts,
                per.failed_attempts,
                per.errors,
                per.failures_until_moved,
                seconds(per.moved_after),
                seconds(per.found_after),
                seconds(per.found_bound),
                seconds(per.back_after),
                seconds(per.back_after_admitted),
            );
        }
        let returned = self.at(OUTAGES[ALL_DOWN].to_s - RETURNS_EARLIER_S);
        out += &format!(
            "\n{} requests, {} extra attempts, {} of {} healthy calls cut ({:.2} %), longest wait {:.1} s.\n\
             Everybody down: {} attempts in {} s, at most {} at once; service back {} s after `b`, \
             {} callers still refused until the gate was open.\n",
            self.first_attempts,
            self.extra.len(),
            self.healthy_cut,
            self.healthy_attempts,
            100.0 * self.healthy_cut as f64 / self.healthy_attempts as f64,
            self.longest_wait.as_secs_f64(),
            self.all_down_attempts,
            OUTAGES[ALL_DOWN].to_s - OUTAGES[ALL_DOWN].from_s - RETURNS_EARLIER_S - SETTLED_S,
            self.all_down_in_flight_max,
            seconds(self.back_with_b.map(|at| at - returned)),
            self.refused_after_return,
        );
        out
    }

    fn uniform(&mut self) -> f64 {
        f64::from(self.rng.next_u32()) / 4_294_967_296.0
    }

    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}

fn played(seed: u64, until: Duration) -> Sim {
    let mut sim = Sim::new(seed);
    sim.run(until);
    sim
}

/// The seeds to play: all, or the one in `OUTAGES_SEED`.
fn seeds() -> Vec<u64> {
    std::env::var("OUTAGES_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .map_or_else(|| SEEDS.to_vec(), |s| vec![s])
}

#[test]
fn an_hour_of_outages_keeps_every_promise() {
    for seed in seeds() {
        let sim = played(seed, HOUR);
        println!("seed {seed}\n\n{}", sim.table());
        let say = |what: &str| format!("seed {seed}: {what}\n{}", sim.table());

        assert_eq!(sim.errors_while_one_lives, 0, "{}", say("a caller saw an error while a route lived"));
        for (outage, per) in OUTAGES.iter().zip(&sim.per).take(ALL_DOWN) {
            let say = |what: &str| say(&format!("{}: {what}", outage.name));
            if outage.fault != Fault::Creep {
                let endpoints = u32::try_from(outage.endpoints.len()).unwrap();
                let quick = per.moved_after.is_some_and(|after| after <= Duration::from_secs(5));
                assert!(
                    per.failures_until_moved <= 3 * endpoints || quick,
                    "{}",
                    say("the weight moved late")
                );
                // The minute begins where the outage's end can be seen: by a check, or else by the probe that
                // the breaker's own patience lets in. Flapping fools both for half a minute.
                let bound = Duration::from_secs(if outage.fault == Fault::Flapping { 100 } else { 60 });
                let since_end = per.back_after.unwrap_or(Duration::MAX);
                assert!(!outage.fault.fails_checks() || since_end <= bound, "{}", say("back late"));
                let back = per.back_after_admitted.unwrap_or(Duration::MAX);
                assert!(back <= Duration::from_secs(60), "{}", say("full share late"));
            }
            let silent = matches!(outage.fault, Fault::Hang | Fault::HeadThenSilence);
            assert!(!silent || per.found_after.is_some(), "{}", say("never found"));
            if let (Some(found), Some(bound)) = (per.found_after, per.found_bound) {
                // A bucket of the sketch is 1/16 wide; its window is not exactly a thousand calls.
                let bound = bound.max(Duration::from_secs(1)).mul_f64(1.0 + 1.0 / 8.0);
                assert!(found <= bound, "{}", say("found late"));
            }
        }
        assert!(sim.healthy_cut * 100 <= sim.healthy_attempts, "{}", say("healthy calls were cut"));
        assert!(sim.budget_kept(), "{}", say("extra attempts beyond the budget"));
        assert!(sim.longest_wait <= WAITING_MAX, "{}", say("a caller waited too long"));

        let returned = sim.at(OUTAGES[ALL_DOWN].to_s - RETURNS_EARLIER_S);
        let back = sim.back_with_b.map_or(Duration::MAX, |at| at - returned);
        assert!(back <= Duration::from_secs(5), "{}", say("one probe period after b's return"));
        assert!(sim.refused_after_return <= 60, "{}", say("the gate opened late"));
        assert!(sim.all_down_in_flight_max <= 2, "{}", say("a stampede"));
    }
}

#[test]
fn the_same_seed_plays_the_same_hour() {
    let part = Duration::from_secs(900);
    assert_eq!(played(9, part).table(), played(9, part).table());
}
