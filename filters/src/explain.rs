//! Why a request would go where it would go: the data behind `tollgate explain`.
//!
//! It asks the same board, with the same questions, as a request does, but changes nothing: no lease is
//! taken, no exploring call is used up. So what it shows is the order *before* chance: who stands first by
//! weight, who is refused and until when, which preference dropped whom, the watchdogs that each would
//! have, and how the hold comes about, line by line with its rounding.
//!
//! Deliberately absent: prompts and credentials. The text may be pasted into a ticket.

use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};

use crate::hold::Bound;
use crate::ids::{EndpointId, ModelId};
use crate::money::{Amount, CostError, PriceCard, Rate, cost};
use crate::preferences::Dropped;
use crate::stream::usage::Usage;
use crate::upstream::board::{Ask, Board, Route, Stand};
use crate::upstream::breaker::Admission;
use crate::upstream::rest::{Cause, Standing};
use crate::upstream::watchdog::{Form, Limits, PromptClass};

/// Everything that decides about one request.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The candidates of all named models, as they would be tried.
    pub candidates: Vec<Explained>,
    /// The class of prompt size that the watchdogs go by.
    pub class: PromptClass,
    /// How the hold comes about.
    pub hold: Option<HoldLines>,
}

/// One route of it.
#[derive(Clone, Debug)]
pub struct Explained {
    /// Its model's public name.
    pub model: String,
    /// Its endpoint's name.
    pub endpoint: String,
    /// Where it stands.
    pub stand: Stand,
    /// Weight × factor × share: what the order goes by.
    pub effective: f64,
    /// The watchdogs that it would have, were it not the last one.
    pub limits: Option<Limits>,
    /// Openings of its breaker that are not forgiven.
    pub openings: u32,
    /// How long until it may be asked again.
    pub refused_for: Option<Duration>,
}

/// The hold's arithmetic at the dearest card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldLines {
    /// The bound that it is made for.
    pub bound: Bound,
    /// The rate of every input token.
    pub input_rate: Rate,
    /// The rate of every output token.
    pub output_rate: Rate,
    /// For the request itself, in pico-dollars.
    pub per_request_pico: u64,
    /// The sum, rounded up once.
    pub amount: Amount,
}

impl HoldLines {
    /// The arithmetic of [`crate::hold::amount`], which it must agree with.
    ///
    /// # Errors
    /// [`CostError`] when it is more than an amount can hold.
    pub fn new<'a>(
        bound: &Bound,
        cards: impl Iterator<Item = &'a PriceCard>,
    ) -> Result<Option<Self>, CostError> {
        let mut dearest: Option<Self> = None;
        for card in cards {
            let flat = PriceCard { input: card.dearest_input(), ..*card };
            let usage = Usage { input: bound.input, output: bound.output, ..Usage::default() };
            let amount = cost(&flat, &usage)?;
            if dearest.as_ref().is_none_or(|known| amount > known.amount) {
                dearest = Some(Self {
                    bound: *bound,
                    input_rate: flat.input,
                    output_rate: flat.output,
                    per_request_pico: flat.per_request_pico,
                    amount,
                });
            }
        }
        Ok(dearest)
    }
}

/// Explains what the board would do with a request. `form_at` tells in which form each endpoint would be asked: one
/// whose answers are folded is asked for a stream, and has its watchdogs.
#[must_use]
pub fn explain(
    board: &mut Board,
    now: Instant,
    ask: &Ask<'_>,
    form_at: impl Fn(EndpointId) -> Form,
    hold: Option<HoldLines>,
) -> Explanation {
    let mut candidates = vec![];
    for model in ask.models {
        candidates.extend(of_model(board, now, *model, ask, &form_at));
    }
    Explanation { candidates, class: PromptClass::of(ask.prompt_tokens), hold }
}

fn of_model(
    board: &mut Board,
    now: Instant,
    model: ModelId,
    ask: &Ask<'_>,
    form_at: impl Fn(EndpointId) -> Form,
) -> Vec<Explained> {
    let mut stands = board.survey(now, model, ask);
    // Who may be asked first, the heavier the earlier; then who is refused, the sooner back the earlier.
    let effective = |stand: &Stand| f64::from(stand.weight) * stand.factor * stand.share;
    stands.sort_by(|a, b| {
        let by_admission = b.admits().cmp(&a.admits());
        by_admission
            .then_with(|| a.refused_until().cmp(&b.refused_until()))
            .then_with(|| effective(b).total_cmp(&effective(a)))
    });
    let refused = stands.split_off(stands.iter().take_while(|stand| stand.admits()).count());
    let cut = ask.preferences.arrange(&mut stands, |stand| board.route_facts(stand.route, ask.form));
    stands.extend(refused);
    stands.extend(cut.into_iter().map(|stand| Stand { dropped: Some(Dropped::Fallback), ..stand }));
    let explained = |stand: Stand| Explained {
        model: board.layout().models.get(model.0).map(|spec| spec.name.clone()).unwrap_or_default(),
        endpoint: endpoint_name(board, stand.route),
        effective: effective(&stand),
        limits: board.limits(now, stand.route, form_at(stand.route.endpoint), ask.prompt_tokens),
        openings: board.openings(stand.route.endpoint),
        refused_for: stand.refused_until().map(|until| until.saturating_duration_since(now)),
        stand,
    };
    stands.into_iter().map(explained).collect()
}

fn endpoint_name(board: &Board, route: Route) -> String {
    board.layout().endpoints.get(route.endpoint.0).map(|spec| spec.name.clone()).unwrap_or_default()
}

impl Explained {
    /// In a few words why it stands where it stands.
    #[must_use]
    pub fn why(&self) -> String {
        let until = self.refused_for.map(|wait| format!(" for {}", span(wait))).unwrap_or_default();
        if let Some(dropped) = &self.stand.dropped {
            return format!("dropped by {}", dropped.word());
        }
        if let Standing::Resting { cause, .. } = self.stand.rest {
            let cause = match cause {
                Cause::RateLimit => "its rate limit",
                Cause::Credential => "trouble with its credential (look at it)",
                Cause::Endpoint => "its own Retry-After",
            };
            return format!("rests{until}: {cause}");
        }
        match self.stand.breaker {
            Admission::Refused(_) => format!("breaker open{until}, opened {} times lately", self.openings),
            Admission::Probe => "breaker half-open: the next call is a probe".into(),
            Admission::Closed if self.stand.share < 1.0 => {
                format!("starts slowly: {:.0} % of its calls", self.stand.share * 100.0)
            }
            Admission::Closed if matches!(self.stand.rest, Standing::Trial | Standing::OnTrial) => {
                "on trial after a rest".into()
            }
            Admission::Closed if self.stand.has_lost_weight => "its failures weigh on it".into(),
            Admission::Closed => "healthy".into(),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "candidates, prompt class {}:", self.class.word())?;
        for (place, candidate) in self.candidates.iter().enumerate() {
            let stand = &candidate.stand;
            let place = if stand.admits() { format!("{}.", place + 1) } else { "-".into() };
            write!(
                f,
                "  {place:<3} {} via {}: weight {} x {:.2} x {:.2} = {:.1}; {}",
                candidate.model,
                candidate.endpoint,
                stand.weight,
                stand.factor,
                stand.share,
                candidate.effective,
                candidate.why()
            )?;
            if let Some(limits) = candidate.limits {
                write!(f, "; first_byte {}, first_event {}", span(limits.head), span(limits.event))?;
            }
            writeln!(f)?;
        }
        f.write_str("  (the last one tried has no watchdog, only its share of the deadline)\n")?;
        match &self.hold {
            None => f.write_str("hold: none, the model has no price\n"),
            Some(hold) => write!(f, "{hold}"),
        }
    }
}

impl fmt::Display for HoldLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |what: &str, tokens: u64, rate: Rate| {
            let pico = u128::from(tokens) * u128::from(rate.pico());
            writeln!(f, "  {what:<7} {tokens} tokens x {} pico-dollars = {pico}", rate.pico())
        };
        line("input", self.bound.input, self.input_rate)?;
        line("output", self.bound.output, self.output_rate)?;
        let mut end = String::new();
        if self.per_request_pico > 0 {
            writeln!(end, "  request {}", self.per_request_pico)?;
        }
        writeln!(f, "{end}hold: {} nano-dollars ({}), rounded up once", self.amount.nano(), self.amount)
    }
}

fn span(span: Duration) -> String {
    if span < Duration::from_secs(1) {
        format!("{} ms", span.as_millis())
    } else {
        format!("{:.1} s", span.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use rand_core::SeedableRng;
    use rand_pcg::Pcg64Mcg;

    use super::*;
    use crate::hold;
    use crate::ids::CredentialId;
    use crate::preferences::Preferences;
    use crate::route::Sort;
    use crate::upstream::board::{Begun, EndpointSpec, Found, Layout, ModelSpec, Outcome};
    use crate::upstream::failure::Failure;
    use crate::upstream::watchdog::{Limit, Timing};

    fn board(now: Instant) -> Board {
        let endpoint = |n: usize, weight| EndpointSpec {
            name: format!("p{n}/native"),
            provider: format!("p{n}"),
            credential: CredentialId { provider: n, index: 0 },
            place: EndpointId(n),
            weight,
            first_byte: Limit::Fixed(Duration::from_millis(50)),
            first_event: Limit::Auto,
            price: None,
            parameters: None,
        };
        let model = ModelSpec {
            name: "m".into(),
            operation: crate::dialect::Operation::Chat,
            routes: (0..3).map(EndpointId).collect(),
            reasoning: false,
            explore: true,
            sort: Sort::Weight,
        };
        let endpoints = vec![endpoint(0, 100), endpoint(1, 80), endpoint(2, 60)];
        Board::new(now, Layout { endpoints, models: vec![model] })
    }

    fn ask(preferences: &Preferences) -> Ask<'_> {
        Ask { models: &[ModelId(0)], form: Form::Stream, prompt_tokens: 5_000, preferences }
    }

    fn fail(board: &mut Board, now: Instant, n: usize, failure: &Failure) {
        let mut rng = Pcg64Mcg::seed_from_u64(1);
        let preferences = Preferences::default();
        let Found::Plan(mut plan) = board.candidates(now, &ask(&preferences), &mut rng) else {
            panic!("plan")
        };
        let route = Route { model: ModelId(0), endpoint: EndpointId(n) };
        let Begun::Go { ticket, .. } = board.begin(now, &mut plan.pass, route, false, &mut rng) else {
            panic!("goes")
        };
        let timing = Timing::default();
        let outcome = Outcome::Failed { failure: failure.clone(), wait: None, timing, reused: false };
        board.end(now, ticket, outcome, &mut rng);
    }

    #[test]
    fn every_candidate_is_shown_with_its_reason() {
        let now = Instant::now();
        let mut board = board(now);
        (0..5).for_each(|_| fail(&mut board, now, 0, &Failure::Status(500)));
        fail(&mut board, now, 1, &Failure::Status(429));
        let ignore = Preferences { ignore: vec!["p2".into()], ..Preferences::default() };
        let text = explain(&mut board, now, &ask(&ignore), |_| Form::Stream, None).to_string();
        for part in [
            "prompt class <16k",
            "m via p0/native: weight 100",
            "breaker open for",
            "rests for 1.0 s: its rate limit",
            "dropped by provider.ignore",
            "first_byte 50 ms, first_event 5.0 s",
            "hold: none",
        ] {
            assert!(text.contains(part), "`{part}` in\n{text}");
        }
    }

    #[test]
    fn who_may_be_asked_stands_before_who_may_not() {
        let now = Instant::now();
        let mut board = board(now);
        (0..5).for_each(|_| fail(&mut board, now, 0, &Failure::Status(500)));
        let preferences = Preferences::default();
        let explained = explain(&mut board, now, &ask(&preferences), |_| Form::Stream, None);
        let names: Vec<_> = explained.candidates.iter().map(|c| c.endpoint.as_str()).collect();
        assert_eq!(names, ["p1/native", "p2/native", "p0/native"]);
        assert_eq!(explained.candidates[0].why(), "healthy");
    }

    #[test]
    fn who_would_be_a_fall_back_is_dropped_where_none_is_allowed() {
        let now = Instant::now();
        let mut board = board(now);
        fail(&mut board, now, 0, &Failure::Status(429));
        let preferences = Preferences { no_fallbacks: true, ..Preferences::default() };
        let explained = explain(&mut board, now, &ask(&preferences), |_| Form::Stream, None);
        let why: Vec<_> = explained.candidates.iter().map(|c| (c.endpoint.as_str(), c.why())).collect();
        assert_eq!(why[0], ("p1/native", "healthy".to_owned()));
        assert!(why[1].0 == "p0/native" && why[1].1.starts_with("rests"), "{why:?}");
        assert_eq!(why[2], ("p2/native", "dropped by provider.allow_fallbacks".to_owned()));
    }

    #[test]
    fn explaining_changes_nothing() {
        let now = Instant::now();
        let mut board = board(now);
        let preferences = Preferences::default();
        let first = explain(&mut board, now, &ask(&preferences), |_| Form::Stream, None).to_string();
        assert_eq!(first, explain(&mut board, now, &ask(&preferences), |_| Form::Stream, None).to_string());
    }

    #[test]
    fn the_holds_lines_agree_with_the_hold() {
        let cheap = PriceCard::flat(Rate::from_pico(2_500_000), Rate::from_pico(10_000_000));
        let dear =
            PriceCard { per_request_pico: 7, ..PriceCard::flat(Rate::from_pico(3_000_001), cheap.output) };
        let bound = Bound { input: 1_234, output: 567, write_output: None, clamped: None, lowered: None };
        let lines = HoldLines::new(&bound, [&cheap, &dear].into_iter()).unwrap().unwrap();
        assert_eq!(Ok(lines.amount), hold::amount(&bound, [&cheap, &dear].into_iter()));
        let text = lines.to_string();
        assert!(text.contains("input   1234 tokens x 3000001 pico-dollars = 3702001234"), "{text}");
        assert!(text.contains("request 7") && text.contains("rounded up once"), "{text}");
        assert_eq!(HoldLines::new(&bound, [].into_iter()), Ok(None));
    }
}
