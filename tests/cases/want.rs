//! What a value must be: a value, a list of allowed ones, a range, a pattern.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A demand on one value.
#[derive(Clone, Debug)]
pub enum Want {
    /// Exactly this one.
    Is(Value),
    /// One of these; `null` stands for a value that is not there.
    OneOf(Vec<Value>),
    /// A number in these bounds, both included.
    Within { min: Option<f64>, max: Option<f64> },
    /// Text that matches.
    Regex(String),
    /// Text that contains.
    Contains(String),
    /// Text that is a whole number in these bounds.
    IntRange(i64, i64),
    /// It is not there.
    Absent,
    /// It is there.
    Present,
    /// Arithmetic over `start`, the balance before the case.
    Gen(String),
}

impl Want {
    /// `Err` says what was expected.
    pub fn judge(&self, seen: &Value, start: i64) -> Result<(), String> {
        let right = match self {
            Self::Is(want) => same(want, seen),
            Self::OneOf(wants) => wants.iter().any(|want| same(want, seen)),
            Self::Within { min, max } => number(seen)
                .is_some_and(|seen| min.is_none_or(|min| seen >= min) && max.is_none_or(|max| seen <= max)),
            Self::Regex(pattern) => {
                let pattern = regex::Regex::new(pattern).map_err(|e| format!("a good pattern, but {e}"))?;
                text(seen).is_some_and(|seen| pattern.is_match(&seen))
            }
            Self::Contains(part) => text(seen).is_some_and(|seen| seen.contains(part)),
            Self::IntRange(min, max) => {
                text(seen).and_then(|seen| seen.parse().ok()).is_some_and(|n: i64| (*min..=*max).contains(&n))
            }
            Self::Absent => seen.is_null(),
            Self::Present => !seen.is_null(),
            Self::Gen(formula) => {
                let want = formula_value(formula, start)
                    .ok_or_else(|| format!("a formula, but {formula} is none"))?;
                return if seen.as_i64() == Some(want) { Ok(()) } else { Err(format!("{want} ({formula})")) };
            }
        };
        if right { Ok(()) } else { Err(self.words()) }
    }

    fn words(&self) -> String {
        match self {
            Self::Is(want) => short(want),
            Self::OneOf(wants) => format!("one of {}", short(&Value::from(wants.clone()))),
            Self::Within { min, max } => match (min, max) {
                (Some(min), Some(max)) => format!("{min} to {max}"),
                (Some(min), None) => format!("at least {min}"),
                (None, Some(max)) => format!("at most {max}"),
                (None, None) => "anything".to_owned(),
            },
            Self::Regex(pattern) => format!("/{pattern}/"),
            Self::Contains(part) => format!("something with {part:?}"),
            Self::IntRange(min, max) => format!("a whole number from {min} to {max}"),
            Self::Absent => "nothing".to_owned(),
            Self::Present => "something".to_owned(),
            Self::Gen(formula) => formula.clone(),
        }
    }
}

/// A value in few words.
pub fn short(value: &Value) -> String {
    let text = match value {
        Value::Null => "nothing".to_owned(),
        other => other.to_string(),
    };
    clip(&text, 160)
}

/// The beginning of a text.
pub fn clip(text: &str, chars: usize) -> String {
    if text.chars().count() <= chars {
        return text.to_owned();
    }
    let head: String = text.chars().take(chars).collect();
    format!("{head}… ({} bytes)", text.len())
}

impl<'de> Deserialize<'de> for Want {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(from)?;
        let members = match value {
            Value::Object(members) => members,
            Value::Array(values) => return Ok(Self::OneOf(values)),
            one => return Ok(Self::Is(one)),
        };
        let only = |name: &str| if members.len() == 1 { members.get(name) } else { None };
        if !members.is_empty() && members.keys().all(|key| key == "min" || key == "max") {
            let bound = |name: &str| members.get(name).and_then(Value::as_f64);
            return Ok(Self::Within { min: bound("min"), max: bound("max") });
        }
        if let Some(Value::String(pattern)) = only("regex") {
            return Ok(Self::Regex(pattern.clone()));
        }
        if let Some(Value::String(part)) = only("contains") {
            return Ok(Self::Contains(part.clone()));
        }
        if let Some(Value::String(formula)) = only("gen") {
            return Ok(Self::Gen(formula.clone()));
        }
        if let Some(Value::Bool(absent)) = only("absent") {
            return Ok(if *absent { Self::Absent } else { Self::Present });
        }
        if let Some([min, max]) = only("int_range").and_then(Value::as_array).map(Vec::as_slice)
            && let (Some(min), Some(max)) = (min.as_i64(), max.as_i64())
        {
            return Ok(Self::IntRange(min, max));
        }
        Err(D::Error::custom(format!("no demand that is known: {}", Value::Object(members))))
    }
}

fn same(want: &Value, seen: &Value) -> bool {
    match (number(want), number(seen)) {
        (Some(a), Some(b)) if want.is_number() || seen.is_number() => a == b,
        _ => want == seen,
    }
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.parse().ok(),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// Sums of products, such as `start-3*75000`.
fn formula_value(formula: &str, start: i64) -> Option<i64> {
    let compact: String = formula.chars().filter(|c| !c.is_whitespace()).collect();
    let mut sum = 0_i64;
    let mut rest = compact.as_str();
    let mut sign = 1;
    loop {
        let end = rest.find(['+', '-']).unwrap_or(rest.len());
        let (term, more) = rest.split_at(end);
        let product = term.split('*').try_fold(1_i64, |product, factor| {
            let factor = if factor == "start" { start } else { factor.parse().ok()? };
            product.checked_mul(factor)
        })?;
        sum = sum.checked_add(product.checked_mul(sign)?)?;
        match more.split_at_checked(1) {
            Some(("+", next)) => (sign, rest) = (1, next),
            Some(("-", next)) => (sign, rest) = (-1, next),
            _ => return Some(sum),
        }
    }
}
