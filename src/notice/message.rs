//! What goes out, as receivers read it and as it is kept while it waits.

use std::borrow::Cow;
use std::collections::BTreeMap;

use filters::notice::Turn;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{Event, Kind, Scope};
use crate::config::watch::{Receiver, ShapeName};

/// Bytes of the digest that stands for a receiver.
const DIGEST_BYTES: usize = 12;

/// What somebody is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Made once, for all tries and all receivers, whichever process tells it in the end.
    pub id: String,
    /// When: milliseconds since 1970.
    pub at_ms: i64,
    pub event: Event,
    /// Who says it.
    pub node: String,
    /// Of a summary: what else there was. 0 for a message of its own.
    pub more: u32,
}

impl Message {
    /// As machines read it.
    pub(super) fn json(&self) -> Value {
        let Self { id, at_ms, event, node, more } = self;
        let Event { kind, subject, turn, scope, is_known: _, text, fields } = event;
        json!({
            "id": id,
            "at_ms": at_ms,
            "kind": kind.word(),
            "subject": subject,
            "key": event.key(),
            "state": turn_word(*turn),
            "scope": scope_word(*scope),
            "node": node,
            "text": text,
            "more": more,
            "fields": fields,
        })
    }

    /// What [`Self::json`] was written from; `None` for anything else, such as a kind that this version does not know.
    pub(super) fn read(text: &str) -> Option<Self> {
        let json: Value = serde_json::from_str(text).ok()?;
        let word = |name: &str| json.get(name).and_then(Value::as_str);
        let kind = Kind::ALL.into_iter().find(|kind| Some(kind.word()) == word("kind"))?;
        let turn = [Turn::Begins, Turn::Ends, Turn::Happens];
        let turn = turn.into_iter().find(|turn| Some(turn_word(*turn)) == word("state"))?;
        let scope = [Scope::Node, Scope::Fleet];
        let scope = scope.into_iter().find(|scope| Some(scope_word(*scope)) == word("scope"))?;
        let fields = json.get("fields")?.as_object()?.iter();
        let fields: BTreeMap<Cow<'static, str>, String> = fields
            .map(|(name, value)| Some((Cow::Owned(name.clone()), value.as_str()?.to_owned())))
            .collect::<Option<_>>()?;
        let subject = word("subject")?.to_owned();
        let text = word("text")?.to_owned();
        Some(Self {
            id: word("id")?.to_owned(),
            at_ms: json.get("at_ms")?.as_i64()?,
            event: Event { kind, subject, turn, scope, is_known: false, text, fields },
            node: word("node")?.to_owned(),
            more: u32::try_from(json.get("more")?.as_u64()?).ok()?,
        })
    }

    /// As a person reads it.
    fn line(&self) -> String {
        let Self { event, node, more, .. } = self;
        let sign = match event.turn {
            Turn::Begins => ":red_circle:",
            Turn::Ends => ":large_green_circle:",
            Turn::Happens => ":warning:",
        };
        let more =
            if *more > 0 { format!(" ({more} more changes in the last while)") } else { String::new() };
        // What Slack takes for markup.
        let text = event.text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        format!("{sign} {text}{more} [{node}]")
    }
}

/// Headers and body for one receiver. The signature covers the time, so that a body cannot be played again later.
pub(super) fn dress(
    receiver: &Receiver,
    message: &Message,
    unix_seconds: i64,
) -> (Vec<(&'static str, String)>, Vec<u8>) {
    let body = match receiver.shape {
        ShapeName::Json => message.json(),
        ShapeName::Slack => json!({ "text": message.line() }),
    };
    let body = body.to_string().into_bytes();
    let mut headers = vec![
        ("content-type", "application/json".to_owned()),
        ("x-tollgate-id", message.id.clone()),
        ("x-tollgate-timestamp", unix_seconds.to_string()),
    ];
    if let Some(secret) = &receiver.secret
        && let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes())
    {
        mac.update(format!("{unix_seconds}.").as_bytes());
        mac.update(&body);
        let signature = data_encoding::HEXLOWER.encode(&mac.finalize().into_bytes());
        headers.push(("x-tollgate-signature", format!("v1={signature}")));
    }
    (headers, body)
}

/// What stands for a receiver where its URL, a secret, must not.
pub(super) fn digest(receiver: &Receiver) -> String {
    let mut digest = Sha256::new();
    digest.update(match receiver.shape {
        ShapeName::Json => "json ",
        ShapeName::Slack => "slack ",
    });
    digest.update(receiver.url.expose());
    let digest = digest.finalize();
    data_encoding::HEXLOWER.encode(digest.get(..DIGEST_BYTES).unwrap_or_default())
}

/// What receivers read a turn as.
const fn turn_word(turn: Turn) -> &'static str {
    match turn {
        Turn::Begins => "begins",
        Turn::Ends => "ends",
        Turn::Happens => "happens",
    }
}

const fn scope_word(scope: Scope) -> &'static str {
    match scope {
        Scope::Node => "node",
        Scope::Fleet => "fleet",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;

    fn message() -> Message {
        let event = Event::begins(Kind::Breaker, "p/m", "p/m <fails>").of_fleet().with("endpoint", "p/m");
        Message { id: "1".to_owned(), at_ms: 7, event, node: "n".to_owned(), more: 3 }
    }

    fn receiver(shape: ShapeName) -> Receiver {
        Receiver { url: Secret::new("http://h"), shape, secret: Some(Secret::new("0123456789abcdef")) }
    }

    #[test]
    fn a_signature_is_of_the_time_and_the_body() {
        let (headers, body) = dress(&receiver(ShapeName::Json), &message(), 99);
        let signed = headers.iter().find(|(name, _)| *name == "x-tollgate-signature").unwrap();
        let mut mac = Hmac::<Sha256>::new_from_slice(b"0123456789abcdef").unwrap();
        mac.update(&[b"99.", body.as_slice()].concat());
        assert_eq!(signed.1, format!("v1={}", data_encoding::HEXLOWER.encode(&mac.finalize().into_bytes())));
        let read: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (&read["kind"], &read["state"], &read["scope"]),
            (&json!("breaker"), &json!("begins"), &json!("fleet"))
        );
        assert_eq!(read["fields"]["endpoint"], "p/m");
    }

    #[test]
    fn slack_gets_one_line_without_markup() {
        let receiver = Receiver { secret: None, ..receiver(ShapeName::Slack) };
        let (headers, body) = dress(&receiver, &Message { more: 0, ..message() }, 99);
        assert!(headers.iter().all(|(name, _)| *name != "x-tollgate-signature"));
        let read: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(read, json!({ "text": ":red_circle: p/m &lt;fails&gt; [n]" }));
    }

    #[test]
    fn what_was_kept_is_what_was_said() {
        for kind in Kind::ALL {
            let event = Event::happens(kind, "s", "it \"happened\"").with("nano_dollars", "7");
            let message = Message { event, ..message() };
            assert_eq!(Message::read(&message.json().to_string()), Some(message));
        }
        let message = message();
        assert_eq!(Message::read(&message.json().to_string()), Some(message.clone()));
        let unknown = message.json().to_string().replace("\"breaker\"", "\"of_the_future\"");
        assert_eq!(Message::read(&unknown), None);
        assert_eq!(Message::read("{"), None);
    }

    #[test]
    fn receivers_are_told_apart_by_address_and_shape_and_shown_by_neither() {
        let (json, slack) = (digest(&receiver(ShapeName::Json)), digest(&receiver(ShapeName::Slack)));
        assert_ne!(json, slack);
        assert_eq!((json.len(), json.contains("http")), (2 * DIGEST_BYTES, false));
    }
}
