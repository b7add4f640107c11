//! What the caller wants of the routing, in OpenRouter's words.
//!
//! `models: []` names other models that the caller accepts, in order; **a model that the caller did not name
//! is never used**. `provider: {order, only, ignore, allow_fallbacks, sort, max_price, require_parameters}`
//! says which routes, and in which order. Both are ours: they are cut out of the body before it goes on,
//! since most upstreams refuse fields that they do not know.
//!
//! An unknown key in `provider` is refused and not skipped. Those that OpenRouter has beyond ours
//! (`data_collection`, `zdr` …) are promises about the caller's data, and a promise that is silently
//! not kept is worse than a 400.
//!
//! Prices are compared exactly, as texts read into pico-dollars. For `sort: price` a token of output counts
//! as much as three of input, as in common traffic; for `max_price` each is looked at alone.
//! A route whose latency or throughput is not known yet stands behind the known ones.
//!
//! Deliberately absent: health. What the breaker refuses or what rests never gets here as a candidate; and
//! a caller who pins an order gets it, failing routes included.

use std::cmp::Reverse;
use std::ops::Range;
use std::time::Duration;

use crate::ids::EndpointId;
use crate::json::{self, Member};
use crate::money::{PriceCard, Rate};
use crate::verdict::{Reason, Rejection};

/// Other models that one request may name.
const MODELS_MAX: usize = 8;
/// Names in one list of providers.
const PROVIDERS_MAX: usize = 32;
const NAME_BYTES_MAX: usize = 256;
/// Input tokens that weigh as much as one of output when prices are sorted.
const INPUT_PER_OUTPUT: u128 = 3;

/// Fields that every route understands, or that never reach one.
const PLAIN_FIELDS: [&str; 9] =
    ["model", "models", "provider", "messages", "stream", "stream_options", "user", "max_tokens", "metadata"];

/// What the caller wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preferences {
    /// Other models, in order.
    pub models: Vec<String>,
    /// Providers that come first, in order.
    pub order: Vec<String>,
    /// Only these.
    pub only: Option<Vec<String>>,
    /// Not these.
    pub ignore: Vec<String>,
    /// No route beyond `order`, or, without one, none beyond the first.
    pub no_fallbacks: bool,
    /// The order of the others.
    pub sort: Option<SortBy>,
    /// The most that a million tokens may cost.
    pub max_price: MaxPrice,
    /// Parameters that a route must understand; empty unless `require_parameters`.
    pub required: Vec<String>,
}

/// What to sort by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortBy {
    /// The cheapest first.
    Price,
    /// The shortest usual time to the first event first.
    Latency,
    /// The most tokens a second first.
    Throughput,
}

/// Bounds of the price, per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaxPrice {
    /// Of input.
    pub prompt: Option<Rate>,
    /// Of output.
    pub completion: Option<Rate>,
}

/// What is known of a route, as far as preferences ask.
#[derive(Clone, Copy, Debug)]
pub struct RouteFacts<'a> {
    /// Its place: routes of one place differ in our credential alone, which is none of the caller's business.
    pub place: EndpointId,
    /// The provider's name in the config.
    pub provider: &'a str,
    /// What the caller pays there.
    pub price: Option<PriceCard>,
    /// The usual time to the first event.
    pub latency: Option<Duration>,
    /// The usual tokens per second.
    pub tokens_per_second: Option<u64>,
    /// The parameters that it understands; `None`: all.
    pub parameters: Option<&'a [String]>,
}

/// Why a route is not for this caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// Not among `only`.
    NotInOnly,
    /// Among `ignore`.
    Ignored,
    /// Not among `order`, and no fallbacks are allowed.
    NotInOrder,
    /// It would be a fallback, and none is allowed.
    Fallback,
    /// Dearer than `max_price`, or of no known price.
    TooDear,
    /// It does not understand this parameter.
    Lacks(String),
}

impl Dropped {
    /// The preference at work, for `explain`.
    #[must_use]
    pub fn word(&self) -> String {
        match self {
            Self::NotInOnly => "provider.only".into(),
            Self::Ignored => "provider.ignore".into(),
            Self::NotInOrder | Self::Fallback => "provider.allow_fallbacks".into(),
            Self::TooDear => "provider.max_price".into(),
            Self::Lacks(parameter) => format!("provider.require_parameters: {parameter}"),
        }
    }
}

/// Preferences as they stand in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stated {
    /// What they say.
    pub preferences: Preferences,
    /// What to cut so that the upstream does not see them.
    pub cuts: Vec<Range<usize>>,
}

/// Reads the preferences among the members of a request's body, which is one sound JSON object.
///
/// # Errors
/// A 400 that names the field.
pub fn read(body: &str, members: &[Member<'_>]) -> Result<Stated, Rejection> {
    let mut preferences = Preferences::default();
    let mut seen: Vec<&str> = vec![];
    for member in members.iter().filter(|member| is_ours(member)) {
        let key = member.key.as_ref();
        if seen.contains(&key) {
            let rejection =
                Rejection::new(Reason::DuplicateField, format!("`{key}` comes twice: send it once."));
            return Err(rejection.param(if key == "models" { "models" } else { "provider" }));
        }
        seen.push(key);
        let value = body.get(member.value.clone()).unwrap_or_default();
        match key {
            _ if value == "null" => {}
            "models" => preferences.models = names(value, "models", "models", MODELS_MAX)?,
            _ => read_provider(value, &mut preferences, members)?,
        }
    }
    Ok(Stated { preferences, cuts: json::cuts(body, members, is_ours) })
}

fn is_ours(member: &Member<'_>) -> bool {
    matches!(member.key.as_ref(), "models" | "provider")
}

impl Preferences {
    /// The models that the caller named, each once, the asked one first.
    #[must_use]
    pub fn named<'a>(&'a self, asked: &'a str) -> Vec<&'a str> {
        let mut named = vec![asked];
        for model in &self.models {
            if !named.contains(&model.as_str()) {
                named.push(model);
            }
        }
        named
    }

    /// Whether the caller fixed an order, so that weights and exploring have no say.
    #[must_use]
    pub fn fix_order(&self) -> bool {
        !self.order.is_empty() || self.sort.is_some()
    }

    /// Whether it may leave out a route.
    #[must_use]
    pub fn may_drop(&self) -> bool {
        let Self { models: _, order, only, ignore, no_fallbacks, sort: _, max_price, required } = self;
        let anyone = only.is_none() && ignore.is_empty() && required.is_empty();
        !anyone || (*no_fallbacks && !order.is_empty()) || *max_price != MaxPrice::default()
    }

    /// Why a route is not for this caller, if so.
    #[must_use]
    pub fn drops(&self, facts: &RouteFacts<'_>) -> Option<Dropped> {
        let is_in = |names: &[String]| names.iter().any(|name| name.eq_ignore_ascii_case(facts.provider));
        if self.only.as_ref().is_some_and(|only| !is_in(only)) {
            return Some(Dropped::NotInOnly);
        }
        if is_in(&self.ignore) {
            return Some(Dropped::Ignored);
        }
        if self.no_fallbacks && !self.order.is_empty() && !is_in(&self.order) {
            return Some(Dropped::NotInOrder);
        }
        if !self.max_price.allows(facts.price.as_ref()) {
            return Some(Dropped::TooDear);
        }
        let understands = |wanted: &String| facts.parameters.is_none_or(|known| known.contains(wanted));
        self.required.iter().find(|wanted| !understands(wanted)).map(|lack| Dropped::Lacks(lack.clone()))
    }

    /// Puts routes into the caller's order. What it leaves open stays as it was. Answers what may not be
    /// a fallback and was cut off.
    pub fn arrange<'f, T>(&self, routes: &mut Vec<T>, facts: impl Fn(&T) -> RouteFacts<'f>) -> Vec<T> {
        if let Some(sort) = self.sort {
            routes.sort_by_cached_key(|route| sort.key(&facts(route)));
        }
        if !self.order.is_empty() {
            routes.sort_by_cached_key(|route| {
                let provider = facts(route).provider;
                let place = self.order.iter().position(|name| name.eq_ignore_ascii_case(provider));
                place.unwrap_or(usize::MAX)
            });
        } else if self.no_fallbacks && !routes.is_empty() {
            let first = routes.first().map(|route| facts(route).place);
            let of_first = routes.iter().take_while(|route| Some(facts(route).place) == first).count();
            return routes.split_off(of_first);
        }
        vec![]
    }
}

impl SortBy {
    fn key(self, facts: &RouteFacts<'_>) -> (bool, u128, Reverse<u64>) {
        let ascending = |known: Option<u128>| (known.is_none(), known.unwrap_or_default(), Reverse(0));
        match self {
            Self::Price => ascending(facts.price.map(|card| {
                u128::from(card.input.pico()) * INPUT_PER_OUTPUT + u128::from(card.output.pico())
            })),
            Self::Latency => ascending(facts.latency.map(|latency| latency.as_millis())),
            Self::Throughput => {
                let known = facts.tokens_per_second;
                (known.is_none(), 0, Reverse(known.unwrap_or_default()))
            }
        }
    }
}

impl MaxPrice {
    fn allows(&self, price: Option<&PriceCard>) -> bool {
        let within = |max: Option<Rate>, rate: fn(&PriceCard) -> Rate| {
            max.is_none_or(|max| price.is_some_and(|card| rate(card) <= max))
        };
        within(self.prompt, |card| card.input) && within(self.completion, |card| card.output)
    }
}

fn read_provider(text: &str, preferences: &mut Preferences, request: &[Member<'_>]) -> Result<(), Rejection> {
    let bad = || invalid("provider", "`provider` must be an object such as {\"order\": [\"name\"]}.");
    let members = json::members(text).map_err(|_| bad())?;
    let mut seen: Vec<&str> = vec![];
    for member in &members {
        let value = text.get(member.value.clone()).unwrap_or_default();
        let key = member.key.as_ref();
        if seen.contains(&key) {
            return Err(Rejection::new(Reason::DuplicateField, format!("`provider.{key}` comes twice."))
                .param("provider"));
        }
        seen.push(key);
        if value == "null" {
            continue;
        }
        match key {
            "order" => preferences.order = names(value, "provider", "provider.order", PROVIDERS_MAX)?,
            "only" => preferences.only = Some(names(value, "provider", "provider.only", PROVIDERS_MAX)?),
            "ignore" => preferences.ignore = names(value, "provider", "provider.ignore", PROVIDERS_MAX)?,
            "allow_fallbacks" => preferences.no_fallbacks = !flag(value, key)?,
            "sort" => preferences.sort = Some(sort(value)?),
            "max_price" => preferences.max_price = max_price(value)?,
            "require_parameters" if flag(value, key)? => {
                let stated = request.iter().map(|m| m.key.as_ref());
                let special = stated.filter(|key| !PLAIN_FIELDS.contains(key));
                preferences.required = special.map(str::to_owned).collect();
            }
            "require_parameters" => {}
            other => {
                return Err(invalid(
                    "provider",
                    format!(
                        "`provider.{}` is not known here. Known are order, only, ignore, allow_fallbacks, \
                         sort, max_price and require_parameters.",
                        other.chars().take(40).collect::<String>()
                    ),
                ));
            }
        }
    }
    Ok(())
}

fn names(text: &str, param: &'static str, field: &str, most: usize) -> Result<Vec<String>, Rejection> {
    let bad = || invalid(param, format!("`{field}` must be a list of up to {most} names."));
    let names: Vec<String> = serde_json::from_str(text).map_err(|_| bad())?;
    let sound = names.iter().all(|name| (1..=NAME_BYTES_MAX).contains(&name.len()));
    if names.len() <= most && sound { Ok(names) } else { Err(bad()) }
}

fn flag(text: &str, key: &str) -> Result<bool, Rejection> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(invalid("provider", format!("`provider.{key}` must be true or false."))),
    }
}

fn sort(text: &str) -> Result<SortBy, Rejection> {
    match serde_json::from_str::<String>(text).as_deref() {
        Ok("price") => Ok(SortBy::Price),
        Ok("latency") => Ok(SortBy::Latency),
        Ok("throughput") => Ok(SortBy::Throughput),
        _ => Err(invalid("provider", "`provider.sort` must be price, latency or throughput.")),
    }
}

fn max_price(text: &str) -> Result<MaxPrice, Rejection> {
    let bad = |why: &str| {
        let message = format!(
            "`provider.max_price` must be an object with `prompt` and `completion` in USD per one million \
             tokens: {why}."
        );
        invalid("provider", message)
    };
    let members = json::members(text).map_err(|e| bad(&e.to_string()))?;
    let mut max = MaxPrice::default();
    for member in &members {
        // A number or a text; either is read by its digits.
        let digits = text.get(member.value.clone()).unwrap_or_default().trim_matches('"');
        let place = match member.key.as_ref() {
            "prompt" => &mut max.prompt,
            "completion" => &mut max.completion,
            _ => return Err(bad("no other key is known")),
        };
        *place = Some(Rate::parse_usd_per_million(digits).map_err(|e| bad(&e.to_string()))?);
    }
    Ok(max)
}

fn invalid(param: &'static str, message: impl Into<String>) -> Rejection {
    Rejection::new(Reason::InvalidValue, message).param(param)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::json::Edit;

    fn read(body: &str) -> Result<Stated, Rejection> {
        super::read(body, &json::members(body).unwrap_or_default())
    }

    fn stated(provider: &str) -> Preferences {
        let body = format!(r#"{{"model":"m","messages":[],"tools":[],"seed":1,"provider":{provider}}}"#);
        read(&body).unwrap_or_else(|e| panic!("{}", e.message)).preferences
    }

    fn refused(body: &str) -> Rejection {
        read(body).expect_err(body)
    }

    fn card(input: &str, output: &str) -> PriceCard {
        let rate = |text| Rate::parse_usd_per_million(text).unwrap();
        PriceCard::flat(rate(input), rate(output))
    }

    fn facts(provider: &str) -> RouteFacts<'_> {
        let place = EndpointId(provider.bytes().map(usize::from).sum());
        RouteFacts { place, provider, price: None, latency: None, tokens_per_second: None, parameters: None }
    }

    fn arranged(preferences: &Preferences, routes: &[RouteFacts<'static>]) -> Vec<&'static str> {
        let mut routes = routes.to_vec();
        preferences.arrange(&mut routes, |route| *route);
        routes.iter().map(|route| route.provider).collect()
    }

    #[test]
    fn a_request_without_preferences_has_none_and_loses_nothing() {
        let stated = read(r#"{"model":"m","messages":[]}"#).unwrap();
        assert_eq!(stated, Stated::default());
        assert_eq!(
            read(r#"{"model":"m","provider":null,"models":null}"#).unwrap().preferences,
            Preferences::default()
        );
    }

    #[test]
    fn only_models_that_the_caller_named_are_named() {
        let body = r#"{"model":"a","models":["b","a","c"]}"#;
        assert_eq!(read(body).unwrap().preferences.named("a"), ["a", "b", "c"]);
        assert_eq!(Preferences::default().named("a"), ["a"]);
    }

    #[test]
    fn what_makes_no_sense_is_a_400_that_names_its_field() {
        for (body, word) in [
            (r#"{"models":"b"}"#, "models"),
            (r#"{"models":["1","2","3","4","5","6","7","8","9"]}"#, "8"),
            (r#"{"models":[""]}"#, "models"),
            (r#"{"provider":[]}"#, "object"),
            (r#"{"provider":"x"}"#, "object"),
            (r#"{"provider":{"order":"x"}}"#, "provider.order"),
            (r#"{"provider":{"only":[1]}}"#, "provider.only"),
            (r#"{"provider":{"allow_fallbacks":"no"}}"#, "allow_fallbacks"),
            (r#"{"provider":{"sort":"luck"}}"#, "throughput"),
            (r#"{"provider":{"max_price":3}}"#, "max_price"),
            (r#"{"provider":{"max_price":{"prompt":-1}}}"#, "negative"),
            (r#"{"provider":{"max_price":{"prompt":"NaN"}}}"#, "NaN"),
            (r#"{"provider":{"max_price":{"image":1}}}"#, "no other key"),
            (r#"{"provider":{"data_collection":"deny"}}"#, "data_collection"),
            (r#"{"provider":{"sort":"price","sort":"latency"}}"#, "twice"),
            (r#"{"provider":{},"model":"a","provider":null}"#, "twice"),
            (r#"{"models":null,"model":"a","\u006dodels":["b"]}"#, "twice"),
        ] {
            let rejection = refused(body);
            assert_eq!(rejection.status(), 400, "{body}");
            assert!(rejection.message.contains(word), "{body}: {}", rejection.message);
            assert!(rejection.param.is_some());
        }
    }

    #[test]
    fn preferences_are_cut_out_wherever_they_stand() {
        for body in [
            r#"{"models":["b"],"provider":{},"model":"a"}"#,
            r#"{"model":"a","models":["b"],"provider":{}}"#,
            r#"{ "models" : ["b"] , "model":"a" , "provider" : { } }"#,
            r#"{"provider":{} , "models":[]}"#,
            r#"{"provider":{},"model":"a","models":[]}"#,
        ] {
            let cuts = read(body).unwrap().cuts;
            let mut edits: Vec<_> = cuts.into_iter().map(|span| Edit { span, with: vec![] }).collect();
            let rest = json::apply(body.as_bytes(), &mut edits);
            let rest: serde_json::Value =
                serde_json::from_slice(&rest).unwrap_or_else(|e| panic!("{body}: {e}"));
            let keys: Vec<_> = rest.as_object().unwrap().keys().collect();
            assert!(keys.iter().all(|key| *key == "model"), "{body}: {keys:?}");
            assert_eq!(keys.len(), usize::from(body.contains("\"model\"")));
        }
    }

    #[test]
    fn only_and_ignore_drop_providers_by_name() {
        let only = stated(r#"{"only":["Alpha"]}"#);
        assert_eq!((only.drops(&facts("alpha")), only.drops(&facts("b"))), (None, Some(Dropped::NotInOnly)));
        let ignore = stated(r#"{"ignore":["b"]}"#);
        assert_eq!((ignore.drops(&facts("a")), ignore.drops(&facts("b"))), (None, Some(Dropped::Ignored)));
    }

    #[test]
    fn an_order_goes_first_and_may_be_all_there_is() {
        let routes = ["a", "b", "c"].map(facts);
        let order = stated(r#"{"order":["c","b"]}"#);
        assert_eq!(arranged(&order, &routes), ["c", "b", "a"]);
        let strict = stated(r#"{"order":["c","b"],"allow_fallbacks":false}"#);
        assert_eq!(strict.drops(&facts("a")), Some(Dropped::NotInOrder));
        let single = stated(r#"{"allow_fallbacks":false}"#);
        assert_eq!(arranged(&single, &routes), ["a"], "without an order the first is the only one");
        let credentials = ["a", "a", "b"].map(facts);
        assert_eq!(arranged(&single, &credentials), ["a", "a"], "with every credential that we have there");
    }

    #[test]
    fn sorting_puts_the_best_first_and_the_unknown_last() {
        let known = |provider, input, output, ms, speed| RouteFacts {
            price: Some(card(input, output)),
            latency: Some(Duration::from_millis(ms)),
            tokens_per_second: Some(speed),
            ..facts(provider)
        };
        let routes =
            [facts("unknown"), known("dear", "3", "15", 300, 90), known("cheap", "0.1", "0.4", 900, 40)];
        assert_eq!(arranged(&stated(r#"{"sort":"price"}"#), &routes), ["cheap", "dear", "unknown"]);
        assert_eq!(arranged(&stated(r#"{"sort":"latency"}"#), &routes), ["dear", "cheap", "unknown"]);
        assert_eq!(arranged(&stated(r#"{"sort":"throughput"}"#), &routes), ["dear", "cheap", "unknown"]);
        let both = stated(r#"{"sort":"price","order":["unknown"]}"#);
        assert_eq!(arranged(&both, &routes), ["unknown", "cheap", "dear"], "`order` is the stronger word");
    }

    #[test]
    fn a_max_price_is_compared_exactly() {
        let max = stated(r#"{"max_price":{"prompt":0.3,"completion":"1.005"}}"#);
        let at = |input, output| max.drops(&RouteFacts { price: Some(card(input, output)), ..facts("a") });
        assert_eq!(at("0.3", "1.005"), None);
        assert_eq!(at("0.300001", "1"), Some(Dropped::TooDear));
        assert_eq!(at("0.1", "1.005001"), Some(Dropped::TooDear));
        assert_eq!(max.drops(&facts("a")), Some(Dropped::TooDear), "a price that nobody knows is too dear");
    }

    #[test]
    fn required_parameters_are_those_of_the_request() {
        let strict = stated(r#"{"require_parameters":true}"#);
        assert_eq!(strict.required, ["tools", "seed"]);
        let known = ["tools".to_owned()];
        let lacks = strict.drops(&RouteFacts { parameters: Some(&known), ..facts("a") });
        assert_eq!(lacks, Some(Dropped::Lacks("seed".into())));
        assert_eq!(strict.drops(&facts("a")), None, "a route without a list takes everything");
        assert!(stated(r#"{"require_parameters":false}"#).required.is_empty());
    }

    proptest! {
        #[test]
        fn arranging_invents_and_loses_no_route(
            order in prop::collection::vec("[a-e]", 0..4), no_fallbacks: bool, sort in 0_u8..4,
            speeds in prop::collection::vec(prop::option::of(any::<u64>()), 0..6),
        ) {
            let sort = [None, Some(SortBy::Price), Some(SortBy::Latency), Some(SortBy::Throughput)]
                [usize::from(sort)];
            let preferences = Preferences { order, no_fallbacks, sort, ..Preferences::default() };
            let names = ["a", "b", "c", "d", "e", "f"];
            let mut routes: Vec<_> = speeds
                .iter()
                .zip(names)
                .map(|(speed, name)| RouteFacts { tokens_per_second: *speed, ..facts(name) })
                .collect();
            let cut = preferences.arrange(&mut routes, |route| *route);
            let mut all: Vec<_> = routes.iter().chain(&cut).map(|route| route.provider).collect();
            all.sort_unstable();
            prop_assert_eq!(all, names[..speeds.len()].to_vec());
        }

        #[test]
        fn reading_never_panics(provider in "[\\[\\]{}\":,a-z0-9 ]{0,60}") {
            let _ = read(&format!("{{\"model\":\"m\",\"provider\":{provider}}}"));
        }
    }
}
