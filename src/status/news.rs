//! Incidents that begin and end, for those who are told of them.

use std::collections::HashMap;

use super::language::Language;
use super::page::title_of;
use crate::notice::{Event, Kind};
use crate::record::incidents::Incident;

/// One that began earlier was there before this process looked, and is no news.
const NEWS_MS: i64 = 60_000;

/// What is new in `after`, which was read at `now_ms`.
pub(super) fn news(before: &[Incident], after: &[Incident], now_ms: i64) -> Vec<Event> {
    let was_open: HashMap<i64, bool> = before.iter().map(|one| (one.id, one.closed_ms.is_none())).collect();
    let changes = after.iter().filter_map(|incident| {
        let was_open = was_open.get(&incident.id).copied().unwrap_or_default();
        match (was_open, incident.closed_ms.is_none()) {
            (false, true) => Some(began(incident, now_ms)),
            (true, false) => Some(Event::ends(Kind::Incident, subject(incident), text(incident, "is over"))),
            (true, true) | (false, false) => None,
        }
    });
    changes.map(Event::of_fleet).collect()
}

fn began(incident: &Incident, now_ms: i64) -> Event {
    let models: Vec<&str> = incident.models.iter().map(String::as_str).collect();
    let event = Event::begins(Kind::Incident, subject(incident), text(incident, "began"))
        .with("models", models.join(","));
    if now_ms - incident.opened_ms > NEWS_MS { event.known() } else { event }
}

fn subject(incident: &Incident) -> String {
    incident.id.to_string()
}

fn text(incident: &Incident, what: &str) -> String {
    let (_, title) = title_of(incident, Language::English);
    let models: Vec<&str> = incident.models.iter().map(String::as_str).collect();
    let about = if models.is_empty() { "everything".to_owned() } else { models.join(", ") };
    format!("incident {} {what}: {title} ({about})", incident.id)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use filters::notice::Turn;
    use filters::status::Level;

    use super::*;

    fn incident(id: i64, opened_ms: i64, closed_ms: Option<i64>) -> Incident {
        Incident {
            id,
            automatic: true,
            edited: false,
            severity: Level::Partly,
            models: BTreeSet::from(["m".to_owned()]),
            title: [].into(),
            opened_ms,
            closed_ms,
            seen_ms: opened_ms,
            updates: vec![],
        }
    }

    #[test]
    fn an_incident_is_told_when_it_begins_and_when_it_ends_and_once_each() {
        let (open, over) = (incident(1, 1_000, None), incident(1, 1_000, Some(9_000)));
        let told = |before: &[Incident], after: &[Incident]| -> Vec<(Turn, bool, String)> {
            let events = news(before, after, 10_000).into_iter();
            events.map(|event| (event.turn, event.is_known, event.key())).collect()
        };
        let (before, open) = (&[][..], &[open][..]);
        let over = &[over][..];
        assert_eq!(told(before, open), [(Turn::Begins, false, "incident:1".to_owned())]);
        assert_eq!(told(open, open), []);
        assert_eq!(told(open, over), [(Turn::Ends, false, "incident:1".to_owned())]);
        assert_eq!(told(over, over), []);
        assert_eq!(told(over, open), [(Turn::Begins, false, "incident:1".to_owned())], "it was opened again");
        assert_eq!(told(before, over), [], "it came and went while nobody looked");
    }

    #[test]
    fn one_that_was_there_before_this_process_is_no_news_but_its_end_is() {
        let old = [incident(7, 0, None)];
        let [event] = news(&[], &old, NEWS_MS + 1).try_into().unwrap();
        assert!(event.is_known);
        assert_eq!(event.text.split(':').next(), Some("incident 7 began"));
    }
}
