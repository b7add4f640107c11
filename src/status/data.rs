//! The page for programs: JSON, and a feed of incidents (RSS 2.0).
//!
//! The JSON has what the page has, in the words of [`Level::word`], with texts in every language that they were written
//! in. The feed has an item for everything that was said about an incident, the latest first.

use filters::status::Level;
use filters::status::days::{Counted, WHOLE, begin_ms};
use maud::{Markup, PreEscaped, html};
use serde_json::{Value, json};

use super::language::{Language, rfc822, rfc3339};
use super::page::{pick, said, title_of};
use super::view::{Bars, Job, Model, Region, Route, View, share};
use crate::record::incidents::{Incident, Update};

/// Items of a feed.
const ITEMS_MAX: usize = 50;

/// Everything, as JSON.
pub(super) fn json(view: &View) -> Vec<u8> {
    let mut value = json!({
        "title": view.title,
        "updated_at": rfc3339(view.at_ms),
        "status": word(view.overall().level()),
        "read_only": view.read_only,
        "models": view.models.iter().map(model).collect::<Vec<_>>(),
        "more_models": view.more_models,
        "incidents": view.incidents.iter().map(incident).collect::<Vec<_>>(),
        "jobs": view.jobs.iter().map(job).collect::<Vec<_>>(),
        "slo": view.goal.map(|goal| json!({
            "goal": ratio(goal.goal), "month": ratio(goal.share), "error_budget_left": ratio(goal.left),
        })),
    })
    .to_string();
    value.push('\n');
    value.into_bytes()
}

/// An incident, as JSON; for the admin port and the command line too.
pub(crate) fn incident(incident: &Incident) -> Value {
    let Incident {
        id,
        automatic,
        edited,
        severity,
        models,
        title,
        opened_ms,
        closed_ms,
        seen_ms: _,
        updates,
    } = incident;
    let update = |Update { at_ms, word, text }: &Update| json!({ "at": rfc3339(*at_ms), "what": word.word(), "text": text });
    json!({
        "id": id,
        "automatic": automatic,
        "edited": edited,
        "severity": severity.word(),
        "models": models,
        "title": title,
        "opened_at": rfc3339(*opened_ms),
        "closed_at": closed_ms.map(rfc3339),
        "updates": updates.iter().map(update).collect::<Vec<_>>(),
    })
}

fn model(model: &Model) -> Value {
    let Model { name, level, regions, routes, bars } = model;
    let mut value = json!({
        "name": name,
        "status": word(*level),
        "good_90d": share(bars).map(ratio),
        "regions": regions.iter().map(region).collect::<Vec<_>>(),
        "days": days(bars),
    });
    if !routes.is_empty()
        && let Some(object) = value.as_object_mut()
    {
        object.insert("routes".to_owned(), routes.iter().map(route).collect());
    }
    value
}

fn region(region: &Region) -> Value {
    let Region { name, level, bars } = region;
    json!({ "name": name, "status": word(*level), "good_90d": share(bars).map(ratio), "days": days(bars) })
}

fn route(route: &Route) -> Value {
    json!({ "name": route.name, "status": word(route.level) })
}

fn days(bars: &Bars) -> Vec<Value> {
    let bar = |(day, counted): &(i64, Counted)| {
        let date = rfc3339(begin_ms(*day)).chars().take("2026-11-30".len()).collect::<String>();
        json!({ "date": date, "status": word(counted.level()), "good": counted.share().map(ratio) })
    };
    bars.iter().map(bar).collect()
}

fn job(job: &Job) -> Value {
    json!({ "name": job.name, "status": job.state.word(), "done_at": job.done_ms.map(rfc3339) })
}

fn word(level: Option<Level>) -> &'static str {
    level.map_or("no_data", Level::word)
}

/// A share as a number from 0 to 1, for readers: nothing is computed with it here.
fn ratio(share: u32) -> Value {
    json!(f64::from(share) / f64::from(WHOLE))
}

/// What happened, as RSS.
pub(super) fn feed(view: &View, language: Language) -> Vec<u8> {
    let words = language.words();
    let title = view.title.as_deref().unwrap_or(words.service_status);
    let link = view.url.as_deref().unwrap_or("/status");
    let mut items: Vec<(&Incident, usize, &Update)> = vec![];
    for incident in &view.incidents {
        items.extend(incident.updates.iter().enumerate().map(|(number, update)| (incident, number, update)));
    }
    items.sort_by_key(|(incident, number, update)| std::cmp::Reverse((update.at_ms, incident.id, *number)));
    items.truncate(ITEMS_MAX);
    let feed: Markup = html! {
        (PreEscaped("<?xml version=\"1.0\" encoding=\"utf-8\"?>\n"))
        rss version="2.0" {
            channel {
                title { (title) }
                // A void element to HTML, and an element with text to RSS.
                (PreEscaped("<link>")) (link) (PreEscaped("</link>"))
                description { (words.service_status) }
                language { (language.code()) }
                @for (incident, number, update) in items {
                    item {
                        title { (title_of(incident, language).1) ": " (said(update.word, language)) }
                        (PreEscaped("<link>")) (link) "#incident-" (incident.id) (PreEscaped("</link>"))
                        guid isPermaLink="false" { "tollgate-incident-" (incident.id) "-" (number) }
                        pubDate { (rfc822(update.at_ms)) }
                        @let text = pick(&update.text, language).map(|(_, text)| text);
                        description { (text.unwrap_or_else(|| said(update.word, language))) }
                    }
                }
            }
        }
    };
    feed.into_string().into_bytes()
}
