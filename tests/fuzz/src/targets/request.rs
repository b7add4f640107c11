//! A caller's request, from bytes to what an upstream gets.

use filters::dialect::{Manners, Operation, OutputField};
use filters::facts::Facts;
use filters::hold::{self, Bound, Limits};
use filters::json::{self, Edit};
use filters::money::{Amount, PriceCard, PriceList, Rate};
use filters::preferences;
use serde_json::Value;

const LIMITS: Limits = Limits { context: 128_000, output: 16_384, image: 1_500 };
const NATIVE: &str = "native-model-name";

/// A request of any operation: it is refused in words, or what goes upstream is one JSON object that says the same.
pub(crate) fn request(bytes: &[u8]) {
    let Some(([which, flags], body)) = bytes.split_first_chunk::<2>() else { return };
    let operation = Operation::ALL[usize::from(*which) % Operation::ALL.len()];
    let facts = match operation.read(body) {
        Ok(facts) => facts,
        Err(rejection) => {
            assert!((400..500).contains(&rejection.status()), "{rejection:?}");
            assert!(!rejection.message.is_empty());
            return;
        }
    };
    let bound = bounded(&facts, flags & 1 != 0);
    let manners = Manners {
        native_model: NATIVE.to_owned(),
        stream_usage: flags & 2 != 0,
        output_field: if flags & 4 == 0 { OutputField::MaxTokens } else { OutputField::MaxCompletionTokens },
        fold: flags & 8 != 0 && matches!(operation, Operation::Chat | Operation::Messages),
    };
    let mut edits = operation.edits(body, &facts, &bound, &manners);
    for Edit { span, .. } in &edits {
        assert!(span.start <= span.end && span.end <= body.len(), "{span:?} of {}", body.len());
    }
    let sent = json::apply(body, &mut edits);
    check_sent(operation, body, &sent, &facts, &bound, &manners);
}

/// The bound of a call, which can be priced; `clamps` where the balance does not carry all of it.
fn bounded(facts: &Facts, clamps: bool) -> Bound {
    let bound = hold::bound(facts, &LIMITS, Some(1_000));
    assert!(bound.input <= hold::most_read(facts, &LIMITS));
    let rate = Rate::parse_usd_per_million("75").expect("a rate");
    let list = PriceList::flat(PriceCard::flat(rate, rate));
    let Ok(held) = hold::amount(&bound, [list.standard].iter()) else { return bound };
    assert!(held.nano() >= 0, "{held:?}");
    let less = Amount::from_nano(held.nano() - held.nano() / 8);
    let lowered = if clamps { hold::clamped(&bound, facts, &list, less, 7) } else { None };
    if let Some(lowered) = lowered {
        assert!(lowered.output <= bound.output, "{lowered:?} above {bound:?}");
        return lowered;
    }
    bound
}

fn check_sent(
    operation: Operation,
    body: &[u8],
    sent: &[u8],
    facts: &Facts,
    bound: &Bound,
    manners: &Manners,
) {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let said = || format!("{} became {}", text(body), text(sent));
    let checked = json::check(sent).unwrap_or_else(|why| panic!("{why}: {}", said()));
    let members = json::members(checked).unwrap_or_else(|why| panic!("{why}: {}", said()));
    let values = |key: &str| -> Vec<&str> {
        members.iter().filter(|m| m.key == key).filter_map(|m| checked.get(m.value.clone())).collect()
    };
    assert_eq!(values("model"), [format!("\"{NATIVE}\"")], "{}", said());
    assert!(values("models").is_empty() && values("provider").is_empty(), "ours goes on: {}", said());
    let folds = manners.folds(facts);
    if folds || facts.stream {
        assert_eq!(values("stream"), ["true"], "{}", said());
        if operation == Operation::Chat && manners.stream_usage {
            let options: Vec<Value> =
                values("stream_options").iter().map(|v| serde_json::from_str(v).expect("JSON")).collect();
            assert!(options.iter().any(|o| o["include_usage"] == true), "no usage is asked for: {}", said());
        }
    }
    if let (Some(limit), Some(_)) = (bound.write_output.or(bound.clamped), operation.output_field()) {
        let fields = ["max_tokens", "max_completion_tokens", "max_output_tokens"];
        let set: Vec<_> = fields.into_iter().flat_map(&values).collect();
        assert!(set.contains(&limit.to_string().as_str()), "no bound of {limit}: {}", said());
    }
    check_kept(body, &members, checked);
    // What we send is read by the upstream as we read it.
    let again = operation.read(sent).unwrap_or_else(|why| panic!("{}: {}", why.message, said()));
    assert_eq!((again.model.as_str(), again.choices), (NATIVE, facts.choices), "{}", said());
    assert_eq!(again.stream, facts.stream || folds, "{}", said());
}

/// Every other member is as it was, to the byte.
fn check_kept(body: &[u8], sent: &[json::Member<'_>], sent_text: &str) {
    const EDITED: [&str; 8] = [
        "model",
        "models",
        "provider",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
    ];
    let Ok(text) = json::check(body) else { return };
    let kept = |members: &[json::Member<'_>], text: &str| -> Vec<(String, String)> {
        let others = members.iter().filter(|m| !EDITED.contains(&m.key.as_ref()));
        others
            .map(|m| (m.key.to_string(), text.get(m.value.clone()).unwrap_or_default().to_owned()))
            .collect()
    };
    let before = json::members(text).expect("it was read");
    assert_eq!(kept(&before, text), kept(sent, sent_text), "something else was changed");
}

/// Preferences in any object: they are refused by name, or cutting them leaves an object without them.
pub(crate) fn preferences(bytes: &[u8]) {
    let Ok(body) = json::check(bytes) else { return };
    let Ok(members) = json::members(body) else { return };
    match preferences::read(body, &members) {
        Err(rejection) => assert!(!rejection.message.is_empty() && rejection.status() == 400),
        Ok(stated) => {
            let mut cuts: Vec<_> = stated.cuts.into_iter().map(|span| Edit { span, with: vec![] }).collect();
            let rest = json::apply(bytes, &mut cuts);
            let rest = json::check(&rest).unwrap_or_else(|why| {
                panic!("{why}: {body} became {}", String::from_utf8_lossy(&rest));
            });
            let left = json::members(rest).expect("an object");
            assert!(left.iter().all(|m| m.key != "models" && m.key != "provider"), "{body} became {rest}");
            assert!(stated.preferences.named("asked").len() <= 9);
        }
    }
}
