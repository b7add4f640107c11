//! What a usage report of completions or of responses says.
//!
//! A report is read where it stands, without a tree of it: of its members those count that are named here, of two with
//! one name the later.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::stream::usage::{Reported, Usage, tokens};

/// What the parts of a usage report are called.
pub(super) struct UsageNames {
    pub(super) input: &'static str,
    pub(super) input_details: &'static str,
    pub(super) output: &'static str,
    pub(super) output_details: &'static str,
}

/// Of chat and text completions.
pub(super) const COMPLETION_NAMES: UsageNames = UsageNames {
    input: "prompt_tokens",
    input_details: "prompt_tokens_details",
    output: "completion_tokens",
    output_details: "completion_tokens_details",
};

/// Of responses.
pub(super) const RESPONSE_NAMES: UsageNames = UsageNames {
    input: "input_tokens",
    input_details: "input_tokens_details",
    output: "output_tokens",
    output_details: "output_tokens_details",
};

/// Reads a report whose parts are called like this. `None` when a count cannot be believed.
pub(super) struct Report(pub(super) &'static UsageNames);

impl<'de> DeserializeSeed<'de> for Report {
    type Value = Option<Reported>;

    fn deserialize<D: Deserializer<'de>>(self, report: D) -> Result<Self::Value, D::Error> {
        report.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Report {
    type Value = Option<Reported>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a usage report")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let names = self.0;
        let mut said = Said::default();
        while let Some(Name(name)) = members.next_key()? {
            match name.as_ref() {
                name if name == names.input => said.input = Some(members.next_value()?),
                name if name == names.output => said.output = Some(members.next_value()?),
                name if name == names.input_details => said.input_details = members.next_value()?,
                name if name == names.output_details => said.output_details = members.next_value()?,
                "total_tokens" => said.total = Some(members.next_value()?),
                _ => drop(members.next_value::<Value>()?),
            }
        }
        Ok(said.reported())
    }
}

#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Default)]
struct Said {
    input: Option<Value>,
    total: Option<Value>,
    output: Option<Value>,
    input_details: Details,
    output_details: Details,
}

impl Said {
    /// The input contains the cached and the audio tokens; the output contains reasoning.
    fn reported(self) -> Option<Reported> {
        let optional = |count: Option<Value>| count.filter(|count| !count.is_null());
        let detail = |count| optional(count).map_or(Some(0), |count| tokens(&count));
        let prompt = tokens(&self.input.or(self.total)?)?;
        let output = detail(self.output)?;
        let cached = detail(self.input_details.cached)?;
        let written = detail(self.input_details.written)?;
        let audio = detail(self.input_details.audio)?;
        let reasoning = detail(self.output_details.reasoning)?;

        // More parts than the whole: clamp one after the other, so that no line becomes negative.
        let cache_read = cached.min(prompt);
        let cache_write_5m = written.min(prompt - cache_read);
        let audio_input = audio.min(prompt - cache_read - cache_write_5m);
        let input = prompt - cache_read - cache_write_5m - audio_input;
        let anomaly =
            (cache_read, cache_write_5m, audio_input) != (cached, written, audio) || reasoning > output;
        let usage =
            Usage { input, cache_read, cache_write_5m, cache_write_1h: 0, audio_input, output, reasoning };
        Some(Reported::whole(&usage, anomaly))
    }
}

/// The details of an input or an output; whatever is no object has none.
#[derive(Default)]
struct Details {
    cached: Option<Value>,
    written: Option<Value>,
    audio: Option<Value>,
    reasoning: Option<Value>,
}

impl<'de> Deserialize<'de> for Details {
    fn deserialize<D: Deserializer<'de>>(details: D) -> Result<Self, D::Error> {
        details.deserialize_any(AnyDetails)
    }
}

struct AnyDetails;

impl<'de> Visitor<'de> for AnyDetails {
    type Value = Details;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Details, A::Error> {
        let mut details = Details::default();
        while let Some(Name(name)) = members.next_key()? {
            let count = Some(members.next_value()?);
            match name.as_ref() {
                "cached_tokens" => details.cached = count,
                "cache_write_tokens" => details.written = count,
                "audio_tokens" => details.audio = count,
                "reasoning_tokens" => details.reasoning = count,
                _ => {}
            }
        }
        Ok(details)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Details, A::Error> {
        while list.next_element::<Value>()?.is_some() {}
        Ok(Details::default())
    }

    fn visit_unit<E: Error>(self) -> Result<Details, E> {
        Ok(Details::default())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Details, E> {
        Ok(Details::default())
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Details, E> {
        Ok(Details::default())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Details, E> {
        Ok(Details::default())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Details, E> {
        Ok(Details::default())
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Details, E> {
        Ok(Details::default())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str, names: &'static UsageNames) -> Option<Reported> {
        Report(names).deserialize(&mut serde_json::Deserializer::from_str(text)).ok().flatten()
    }

    /// How it was read before.
    fn from_tree(usage: &Value, names: &UsageNames) -> Option<Reported> {
        let detail = |group: &str, key: &str| match usage.get(group).and_then(|g| g.get(key)) {
            None | Some(Value::Null) => Some(0),
            Some(value) => tokens(value),
        };
        let prompt = match usage.get(names.input) {
            Some(value) => tokens(value)?,
            None => tokens(usage.get("total_tokens")?)?,
        };
        let output = match usage.get(names.output) {
            None | Some(Value::Null) => 0,
            Some(value) => tokens(value)?,
        };
        let cached = detail(names.input_details, "cached_tokens")?;
        let written = detail(names.input_details, "cache_write_tokens")?;
        let audio = detail(names.input_details, "audio_tokens")?;
        let reasoning = detail(names.output_details, "reasoning_tokens")?;

        // More parts than the whole: clamp one after the other, so that no line becomes negative.
        let cache_read = cached.min(prompt);
        let cache_write_5m = written.min(prompt - cache_read);
        let audio_input = audio.min(prompt - cache_read - cache_write_5m);
        let plain = prompt - cache_read - cache_write_5m - audio_input;
        let anomaly =
            (cache_read, cache_write_5m, audio_input) != (cached, written, audio) || reasoning > output;
        let usage = Usage {
            input: plain,
            cache_read,
            cache_write_5m,
            cache_write_1h: 0,
            audio_input,
            output,
            reasoning,
        };
        Some(Reported::whole(&usage, anomaly))
    }

    fn members(
        names: &'static [&'static str],
        value: impl Strategy<Value = String>,
    ) -> impl Strategy<Value = String> {
        let member =
            (prop::sample::select(names), value).prop_map(|(name, value)| format!("{name}: {value}"));
        prop::collection::vec(member, 0..6).prop_map(|members| format!("{{{}}}", members.join(" ,")))
    }

    fn count() -> impl Strategy<Value = String> {
        let odd = prop::sample::select(vec![
            "null",
            "0",
            "1e3",
            "1.0",
            "12.5",
            "-1",
            "-0",
            "-0.0",
            "1e18",
            "1e400",
            "18446744073709551616",
            "true",
            "\"7\"",
            "\" 7.0 \"",
            "\"7\\u0030\"",
            "\"many\"",
            "\"\\ud800\"",
            "[]",
            "[1e400]",
            "{}",
            "{\"cached_tokens\":1}",
            "01",
        ]);
        prop_oneof![2 => (0_u64..200).prop_map(|n| n.to_string()), 1 => odd.prop_map(str::to_owned)]
    }

    fn report() -> impl Strategy<Value = String> {
        const NAMES: &[&str] = &[
            r#""prompt_tokens""#,
            r#""prompt_tokens""#,
            r#""input_tokens""#,
            r#""completion_tokens""#,
            r#""output_tokens""#,
            r#""total_tokens""#,
            r#""pr\u006fmpt_tokens""#,
            r#""cost""#,
            r#""prompt_tokens_details""#,
            r#""input_tokens_details""#,
            r#""completion_tokens_details""#,
            r#""output_tokens_details""#,
        ];
        const DETAILS: &[&str] = &[
            r#""cached_tokens""#,
            r#""cache_write_tokens""#,
            r#""audio_tokens""#,
            r#""reasoning_tokens""#,
            r#""\ud800""#,
        ];
        let report = members(NAMES, prop_oneof![2 => count(), 1 => members(DETAILS, count())]);
        prop_oneof![9 => report, 1 => count()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn a_report_says_what_a_tree_of_it_says(text in report()) {
            let tree: Value = serde_json::from_str(&text).unwrap_or_default();
            for names in [&COMPLETION_NAMES, &RESPONSE_NAMES] {
                prop_assert_eq!(read(&text, names), from_tree(&tree, names), "{}", text);
            }
        }
    }
}
