//! How long an upstream may be silent before the next candidate gets the request.
//!
//! Two limits, both counted from *request sent*: to the response head and to the first meaningful
//! event. Each is fixed, or learnt (`auto`): the p99 of its own past times 1.5. A p99 alone would cut
//! one healthy call in a hundred by definition; half as much again leaves far fewer, and a hung upstream
//! is still found in a time that its callers know from its bad days.
//!
//! - What took how long depends on the prompt, so every endpoint × model × form has a sketch per class of
//!   prompt size. A larger class never gets less than a smaller one: its own few samples may lie.
//! - **A call that was cut is a sample too**, at the limit (censored). Left out, the p99 would be made
//!   of survivors, fall, cut more, and fall again.
//! - With fewer than 50 samples a p99 is a guess. Then the same route's own class *and larger ones* stand
//!   in (they bound it from above; smaller ones would cut healthy long prompts), then the same model
//!   over all endpoints, then a constant. What other endpoints teach may only lengthen the constant:
//!   a reseller's extra second is no fault.
//! - A whole answer's first event is its last, so its constants are those of a reasoning model, which
//!   thinks before it speaks; a whole answer of a reasoning model gets more still.
//!
//! Deliberately absent: the timers themselves, and the exemption of the last viable candidate (the
//! planner says who is last; the board then gives no limit: killing the only route helps nobody).

use std::borrow::Cow;
use std::time::{Duration, Instant};

use crate::upstream::sketch::{Sketch, Window};

/// Samples below which a p99 is a guess.
const SAMPLES_MIN: u64 = 50;
const P99: u64 = 990;
const P50: u64 = 500;
/// How many classes of prompt size there are.
pub const CLASSES: usize = 5;

/// One limit as it is configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// Learnt.
    #[default]
    Auto,
    /// As the operator says.
    Fixed(Duration),
}

/// In which form an answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// As events.
    Stream,
    /// As one JSON text.
    Whole,
}

/// A class of prompt size, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PromptClass {
    /// Fewer than 1,000.
    Under1k,
    /// Fewer than 4,000.
    Under4k,
    /// Fewer than 16,000.
    Under16k,
    /// Fewer than 64,000.
    Under64k,
    /// 64,000 and more.
    More,
}

impl PromptClass {
    /// The class of a prompt.
    #[must_use]
    pub const fn of(tokens: u64) -> Self {
        match tokens {
            0..1_000 => Self::Under1k,
            1_000..4_000 => Self::Under4k,
            4_000..16_000 => Self::Under16k,
            16_000..64_000 => Self::Under64k,
            64_000.. => Self::More,
        }
    }

    /// The word for logs and `explain`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Under1k => "<1k",
            Self::Under4k => "<4k",
            Self::Under16k => "<16k",
            Self::Under64k => "<64k",
            Self::More => "64k+",
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::Under1k => 0,
            Self::Under4k => 1,
            Self::Under16k => 2,
            Self::Under64k => 3,
            Self::More => 4,
        }
    }
}

/// What bounds and starts a learnt limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounds {
    min: Duration,
    max: Duration,
    cold: Duration,
}

impl Bounds {
    const fn seconds(max: u64, cold: u64) -> (Duration, Duration) {
        (Duration::from_secs(max), Duration::from_secs(cold))
    }

    const fn event(form: Form, reasoning: bool) -> Self {
        let (max, cold) = match (form, reasoning) {
            (Form::Stream, false) => Self::seconds(30, 5),
            (Form::Stream, true) | (Form::Whole, false) => Self::seconds(120, 60),
            (Form::Whole, true) => Self::seconds(300, 120),
        };
        Self { min: Duration::from_secs(1), max, cold }
    }

    /// Many upstreams send the head at once and think afterwards; one that does not has it with its
    /// first event, so the bounds of long thought are the same. Only the floor is lower.
    const fn head(form: Form, reasoning: bool) -> Self {
        Self { min: Duration::from_millis(50), ..Self::event(form, reasoning) }
    }

    /// p99 × 1.5 of a sketch, if it has samples enough.
    fn learn(&self, sketch: &Sketch) -> Option<Duration> {
        let p99 = if sketch.count() >= SAMPLES_MIN { sketch.quantile(P99)? } else { return None };
        Some(Duration::from_millis(p99.saturating_mul(3).div_ceil(2)).clamp(self.min, self.max))
    }
}

/// The limits of one attempt, both from request sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// To the response head.
    pub head: Duration,
    /// To the first meaningful event.
    pub event: Duration,
}

/// How long one attempt took, as far as it came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// From request sent to the head.
    pub head: Option<Duration>,
    /// From request sent to the first meaningful event.
    pub event: Option<Duration>,
}

/// What one endpoint's answers of one model and form have taken.
#[derive(Clone, Debug, Default)]
pub struct Timings {
    /// A class that has never been seen takes no room.
    classes: [Option<Box<Pair>>; CLASSES],
}

#[derive(Clone, Debug)]
struct Pair {
    head: Window,
    event: Window,
}

/// The same of all endpoints of a model together, kept up with each of them.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    classes: [Option<Box<Sketches>>; CLASSES],
}

/// To the head and to the first event.
#[derive(Clone, Debug, Default)]
struct Sketches {
    head: Sketch,
    event: Sketch,
}

impl Timings {
    /// Notes an answer, here and among those of all endpoints.
    pub fn record(&mut self, now: Instant, class: PromptClass, timing: Timing, everywhere: &mut Seen) {
        let Some(slot) = self.classes.get_mut(class.index()) else { return };
        let pair =
            slot.get_or_insert_with(|| Box::new(Pair { head: Window::new(now), event: Window::new(now) }));
        let Some(sum) = everywhere.classes.get_mut(class.index()) else { return };
        let sum = sum.get_or_insert_default();
        let Pair { head, event } = pair.as_mut();
        for (window, sum, took) in [(head, &mut sum.head, timing.head), (event, &mut sum.event, timing.event)]
        {
            let Some(took) = took.map(millis) else { continue };
            window.record(now, took).iter().for_each(|old| sum.take_out(old));
            sum.record(took);
        }
    }

    /// Forgets what is too old, here and among those of all endpoints.
    pub fn forget(&mut self, now: Instant, everywhere: &mut Seen) {
        for (pair, sum) in self.classes.iter_mut().zip(&mut everywhere.classes) {
            let (Some(Pair { head, event }), Some(sum)) = (pair.as_deref_mut(), sum) else { continue };
            head.forget(now).iter().for_each(|old| sum.head.take_out(old));
            event.forget(now).iter().for_each(|old| sum.event.take_out(old));
        }
    }

    /// The usual time to the first event over all classes.
    #[must_use]
    pub fn median(&self) -> Option<Duration> {
        let events = self.classes.iter().flatten().map(|pair| pair.event.all());
        let mut all: Option<Cow<'_, Sketch>> = None;
        events.for_each(|sketch| add(&mut all, sketch));
        all?.quantile(P50).map(Duration::from_millis)
    }

    fn sketch(&self, class: usize, of: Of) -> Option<&Sketch> {
        let pair = self.classes.get(class)?.as_deref()?;
        Some(match of {
            Of::Head => pair.head.all(),
            Of::Event => pair.event.all(),
        })
    }
}

impl Seen {
    /// Adds those of one more endpoint.
    pub fn add(&mut self, timings: &Timings) {
        for (sum, pair) in self.classes.iter_mut().zip(&timings.classes) {
            let Some(Pair { head, event }) = pair.as_deref() else { continue };
            let sum = sum.get_or_insert_default();
            sum.head.merge(head.all());
            sum.event.merge(event.all());
        }
    }

    fn sketch(&self, class: usize, of: Of) -> Option<&Sketch> {
        let sum = self.classes.get(class)?.as_deref()?;
        Some(match of {
            Of::Head => &sum.head,
            Of::Event => &sum.event,
        })
    }
}

/// Which of the two times.
#[derive(Clone, Copy, Debug)]
enum Of {
    Head,
    Event,
}

/// What a class has taught alone, and together with the larger ones.
#[derive(Clone, Copy, Debug, Default)]
struct Learnt {
    alone: Option<Duration>,
    up: Option<Duration>,
}

/// What all classes have taught. Most routes have seen one or two of them.
fn learnt<'s>(bounds: &Bounds, sketch: impl Fn(usize) -> Option<&'s Sketch>) -> [Learnt; CLASSES] {
    let mut all = [Learnt::default(); CLASSES];
    let mut up: Option<Cow<'s, Sketch>> = None;
    let mut above = Learnt::default();
    for (class, learnt) in all.iter_mut().enumerate().rev() {
        let own = sketch(class).filter(|sketch| sketch.count() > 0);
        let alone = own.and_then(|sketch| bounds.learn(sketch));
        above = match own {
            None => Learnt { alone: None, ..above },
            Some(sketch) if up.is_none() => {
                add(&mut up, sketch);
                Learnt { alone, up: alone }
            }
            Some(sketch) => {
                add(&mut up, sketch);
                Learnt { alone, up: up.as_deref().and_then(|up| bounds.learn(up)) }
            }
        };
        *learnt = above;
    }
    all
}

/// Adds one sketch to a sum, which is copied for the second one alone.
fn add<'s>(sum: &mut Option<Cow<'s, Sketch>>, sketch: &'s Sketch) {
    match sum {
        None => *sum = Some(Cow::Borrowed(sketch)),
        Some(sum) => sum.to_mut().merge(sketch),
    }
}

/// The learnt limits for all classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table([Limits; CLASSES]);

impl Table {
    /// Learns from what this route has shown (`own`) and what the model has shown everywhere (`wide`).
    #[must_use]
    pub fn learn(own: &Timings, wide: &Seen, form: Form, reasoning: bool) -> Self {
        let limits = |bounds: &Bounds, of: Of| {
            let own = learnt(bounds, |class| own.sketch(class, of));
            let borrowed = learnt(bounds, |class| wide.sketch(class, of));
            let mut before = Duration::ZERO;
            own.into_iter()
                .zip(borrowed)
                .map(move |(own, borrowed)| {
                    let borrowed = borrowed.up.map(|limit| limit.max(bounds.cold));
                    before = own.alone.or(own.up).or(borrowed).unwrap_or(bounds.cold).max(before);
                    before
                })
                .collect::<Vec<_>>()
        };
        let head = limits(&Bounds::head(form, reasoning), Of::Head);
        let event = limits(&Bounds::event(form, reasoning), Of::Event);
        Self(std::array::from_fn(|class| Limits {
            head: head.get(class).copied().unwrap_or(Duration::MAX),
            event: event.get(class).copied().unwrap_or(Duration::MAX),
        }))
    }

    /// The limits of one class, where the operator fixed none.
    #[must_use]
    pub fn limits(&self, class: PromptClass, head: Limit, event: Limit) -> Limits {
        let learnt = self.0.get(class.index());
        let or = |limit: Limit, of: fn(&Limits) -> Duration| match limit {
            Limit::Fixed(fixed) => fixed,
            Limit::Auto => learnt.map_or(Duration::MAX, of),
        };
        Limits { head: or(head, |l| l.head), event: or(event, |l| l.event) }
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [PromptClass; CLASSES] = [
        PromptClass::Under1k,
        PromptClass::Under4k,
        PromptClass::Under16k,
        PromptClass::Under64k,
        PromptClass::More,
    ];

    fn fed(now: Instant, class: PromptClass, millis: &[u64]) -> Timings {
        let mut timings = Timings::default();
        for ms in millis {
            let took = Some(Duration::from_millis(*ms));
            timings.record(now, class, Timing { head: took, event: took }, &mut Seen::default());
        }
        timings
    }

    fn auto(own: &Timings, wide: &Seen, class: PromptClass) -> Limits {
        Table::learn(own, wide, Form::Stream, false).limits(class, Limit::Auto, Limit::Auto)
    }

    #[test]
    fn prompts_fall_into_their_classes() {
        for (tokens, word) in
            [(0, "<1k"), (999, "<1k"), (1_000, "<4k"), (4_000, "<16k"), (16_000, "<64k"), (64_000, "64k+")]
        {
            assert_eq!(PromptClass::of(tokens).word(), word);
        }
        assert_eq!(PromptClass::of(u64::MAX), PromptClass::More);
    }

    #[test]
    fn a_learnt_limit_is_half_as_much_again_as_the_p99() {
        let now = Instant::now();
        let values: Vec<_> = (0..1000).map(|n| if n < 989 { 800 } else { 2_000 }).collect();
        let limits = auto(&fed(now, PromptClass::Under1k, &values), &Seen::default(), ALL[0]);
        assert!((3_000..3_300).contains(&millis(limits.event)), "{limits:?}");
    }

    #[test]
    fn limits_stay_within_their_bounds() {
        let now = Instant::now();
        let fast = auto(&fed(now, ALL[0], &[3; 60]), &Seen::default(), ALL[0]);
        assert_eq!((fast.head, fast.event), (Duration::from_millis(50), Duration::from_secs(1)));
        let slow = auto(&fed(now, ALL[0], &[99_000; 60]), &Seen::default(), ALL[0]);
        assert_eq!((slow.head, slow.event), (Duration::from_secs(30), Duration::from_secs(30)));
        let thinks = fed(now, ALL[0], &[110_000; 60]);
        let limits = Table::learn(&thinks, &Seen::default(), Form::Stream, true).limits(
            ALL[0],
            Limit::Auto,
            Limit::Auto,
        );
        assert_eq!(limits.event, Duration::from_secs(120));
    }

    #[test]
    fn fifty_samples_are_needed_before_a_route_is_believed() {
        let now = Instant::now();
        let few = auto(&fed(now, ALL[0], &[100; 49]), &Seen::default(), ALL[0]);
        assert_eq!(few.event, Duration::from_secs(5), "the constant");
        let enough = auto(&fed(now, ALL[0], &[100; 50]), &Seen::default(), ALL[0]);
        assert_eq!(enough.event, Duration::from_secs(1));
    }

    #[test]
    fn a_cold_class_learns_from_larger_ones_but_not_from_smaller_ones() {
        let now = Instant::now();
        let large = fed(now, PromptClass::Under64k, &[2_000; 60]);
        assert!(auto(&large, &Seen::default(), ALL[0]).event < Duration::from_millis(3_300));
        let small = fed(now, PromptClass::Under1k, &[700; 60]);
        assert_eq!(auto(&small, &Seen::default(), PromptClass::More).event, Duration::from_secs(5));
    }

    #[test]
    fn what_other_endpoints_teach_only_lengthens_the_constant() {
        let now = Instant::now();
        let wide = |ms| {
            let mut wide = Seen::default();
            wide.add(&fed(now, ALL[0], &[ms; 60]));
            wide
        };
        let cold = |wide: Seen| auto(&Timings::default(), &wide, ALL[0]).event;
        assert_eq!(cold(wide(100)), Duration::from_secs(5));
        assert!(cold(wide(10_000)) > Duration::from_secs(14));
    }

    #[test]
    fn reasoning_models_and_whole_answers_start_with_more_time() {
        let none = Seen::default();
        let cold = |form, reasoning| {
            Table::learn(&Timings::default(), &none, form, reasoning)
                .limits(ALL[0], Limit::Auto, Limit::Auto)
                .event
                .as_secs()
        };
        assert_eq!((cold(Form::Stream, false), cold(Form::Stream, true)), (5, 60));
        assert_eq!((cold(Form::Whole, false), cold(Form::Whole, true)), (60, 120));
    }

    #[test]
    fn a_fixed_limit_is_taken_as_it_is() {
        let none = Seen::default();
        let table = Table::learn(&Timings::default(), &none, Form::Stream, false);
        let fixed = table.limits(ALL[0], Limit::Fixed(Duration::from_millis(50)), Limit::Auto);
        assert_eq!((fixed.head, fixed.event), (Duration::from_millis(50), Duration::from_secs(5)));
    }

    #[test]
    fn calls_that_were_cut_keep_the_limit_from_cutting_itself_down() {
        let now = Instant::now();
        let mut timings = fed(now, ALL[0], &[1_000; 200]);
        let mut limit = auto(&timings, &Seen::default(), ALL[0]).event;
        let before = limit;
        // Everything is four times as slow now: each cut is a sample at the limit.
        for _ in 0..200 {
            let took = Duration::from_millis(4_000).min(limit);
            timings.record(now, ALL[0], Timing { head: Some(took), event: Some(took) }, &mut Seen::default());
            limit = auto(&timings, &Seen::default(), ALL[0]).event;
        }
        assert!(before < Duration::from_secs(2) && limit >= Duration::from_secs(6), "{before:?} {limit:?}");
    }

    proptest! {
        #[test]
        fn what_a_model_has_shown_is_what_its_endpoints_have_shown_together(
            samples in prop::collection::vec((0_usize..3, 0_usize..CLASSES, 0_u64..9_000, 0_u64..90_000), 0..300),
        ) {
            let mut now = Instant::now();
            let (mut everywhere, mut all) = (Seen::default(), [(); 3].map(|()| Timings::default()));
            for (endpoint, class, ms, wait) in samples {
                now += Duration::from_millis(wait);
                let took = Some(Duration::from_millis(ms));
                all[endpoint].record(now, ALL[class], Timing { head: took, event: None }, &mut everywhere);
            }
            all.iter_mut().for_each(|timings| timings.forget(now, &mut everywhere));
            let mut sum = Seen::default();
            all.iter().for_each(|timings| sum.add(timings));
            for class in 0..CLASSES {
                for of in [Of::Head, Of::Event] {
                    prop_assert_eq!(sum.sketch(class, of), everywhere.sketch(class, of));
                }
            }
        }

        #[test]
        fn larger_classes_never_get_less(
            samples in prop::collection::vec((0_usize..CLASSES, 0_u64..200_000), 0..400),
            reasoning: bool, whole: bool,
        ) {
            let now = Instant::now();
            let mut timings = Timings::default();
            for (class, ms) in samples {
                let took = Some(Duration::from_millis(ms));
                timings.record(now, ALL[class], Timing { head: took, event: took }, &mut Seen::default());
            }
            let form = if whole { Form::Whole } else { Form::Stream };
            let table = Table::learn(&timings, &Seen::default(), form, reasoning);
            let limits = ALL.map(|class| table.limits(class, Limit::Auto, Limit::Auto));
            for pair in limits.windows(2) {
                prop_assert!(pair[0].head <= pair[1].head && pair[0].event <= pair[1].event);
            }
            prop_assert!(limits.iter().all(|l| l.event >= Duration::from_secs(1)));
            prop_assert!(limits.iter().all(|l| l.event <= Duration::from_secs(300)));
            prop_assert!(limits.iter().all(|l| l.head >= Duration::from_millis(50)));
        }

        #[test]
        fn at_most_one_healthy_call_in_a_hundred_is_cut(
            center in 100_u64..8_000, noise in prop::collection::vec((1_u64..100, 1_u64..100), 300..600),
        ) {
            // A skewed load: the product of two uniform draws.
            let values: Vec<u64> = noise.iter().map(|(a, b)| center + center * a * b / 5_000).collect();
            let now = Instant::now();
            let timings = fed(now, ALL[0], &values);
            let limit = millis(auto(&timings, &Seen::default(), ALL[0]).event);
            let cut = values.iter().filter(|v| **v > limit).count();
            prop_assert!(cut * 100 <= values.len(), "{} of {}", cut, values.len());
        }
    }
}
