//! The page itself: HTML that a server has made, with one style sheet in it and no script.
//!
//! What was written by people or in a config (names of models, regions, routes and jobs, titles, texts) stands in
//! elements of its own that isolate its direction (`bdi`, `dir="auto"`), and is escaped by the macro that writes it.
//! State is said in words and by the shape of a sign, never by colour alone. Every bar has its text.

use std::borrow::Cow;

use filters::status::Level;
use filters::status::days::{Counted, DAYS, day_of};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::language::{Language, rfc3339};
use super::view::{Bars, Goal, Job, JobState, Model, Overall, Region, Route, View, share};
use crate::record::incidents::{Incident, Texts, Update, Word};

/// The style sheet. The page's policy names its digest.
pub(super) const STYLE: &str = include_str!("style.css");
/// Models that an incident names before it only counts them.
const AFFECTED_MAX: usize = 12;
/// Incidents of the past on a page. The JSON has more.
const PAST_MAX: usize = 20;

/// The page for a reader of this language, where these are offered.
pub(super) fn page(view: &View, language: Language, offered: &[Language]) -> Vec<u8> {
    let words = language.words();
    let overall = view.overall();
    let title = view.title.as_deref().unwrap_or(words.service_status);
    let markup = html! {
        (DOCTYPE)
        html lang=(language.code()) dir=(language.direction()) {
            head {
                meta charset="utf-8";
                title { (statement(overall, language)) " · " (title) }
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                link rel="icon" href=(icon_url(overall.level()));
                link rel="alternate" type="application/rss+xml" title=(words.feed)
                    href={ "/status.rss?lang=" (language.code()) };
                @for other in offered {
                    link rel="alternate" hreflang=(other.code()) href={ "?lang=" (other.code()) };
                }
                style { (PreEscaped(STYLE)) }
            }
            body class=(class(overall.level())) {
                a class="skip" href="#models" { (words.skip) }
                header class="top" {
                    p class="brand" { (gate()) bdi { (title) } }
                    @if offered.len() > 1 {
                        (languages(language, offered))
                    }
                }
                main {
                    (now(view, language))
                    @if view.open().next().is_some() {
                        section class="block" aria-labelledby="open" {
                            h2 id="open" { (words.open_incidents) }
                            @for one in view.open() { (incident(one, language)) }
                        }
                    }
                    (models(view, language))
                    @if !view.jobs.is_empty() { (jobs(&view.jobs, language)) }
                    (past(view, language))
                }
                footer class="foot" {
                    p { (words.times_in_utc) }
                    p class="links" {
                        a href={ "/status.rss?lang=" (language.code()) } { (words.feed) }
                        a href="/status.json" { "JSON" }
                    }
                }
            }
        }
    };
    markup.into_string().into_bytes()
}

fn languages(language: Language, offered: &[Language]) -> Markup {
    html! {
        nav aria-label=(language.words().languages) {
            ul class="tongues" {
                @for other in offered {
                    li {
                        a href={ "?lang=" (other.code()) } hreflang=(other.code()) lang=(other.code())
                            aria-current=[(*other == language).then_some("true")] { (other.own_name()) }
                    }
                }
            }
        }
    }
}

/// How everything does, in one sentence.
fn now(view: &View, language: Language) -> Markup {
    let words = language.words();
    let overall = view.overall();
    html! {
        section class={ "now " (class(overall.level())) } aria-labelledby="now" {
            (sign(overall.level()))
            div {
                h1 id="now" { (statement(overall, language)) }
                p class="when" { (words.updated) " " (time(view.at_ms, language)) }
                @if let Some(goal) = view.goal { p class="goal" { (sentence(goal, language)) } }
            }
        }
        @if view.read_only {
            p class="notice" { (words.read_only) }
        }
    }
}

fn sentence(goal: Goal, language: Language) -> String {
    let Goal { goal, share, left } = goal;
    let text = language.words().goal.replace("{share}", &language.percent(share));
    text.replace("{goal}", &language.percent(goal)).replace("{left}", &language.percent(left))
}

fn models(view: &View, language: Language) -> Markup {
    let (words, dates) = (language.words(), Dates::of(view, language));
    html! {
        section class="block" id="models" aria-labelledby="models-title" {
            h2 id="models-title" { (words.models) }
            @if view.models.is_empty() {
                p class="quiet" { (words.no_models) }
            } @else {
                ul class="legend" aria-label=(words.legend) {
                    @for level in Level::ALL.map(Some).into_iter().chain([None]) {
                        li class=(class(level)) { (sign(level)) (language.level(level)) }
                    }
                }
                ul class="models" {
                    @for one in &view.models { li { (model(one, &dates)) } }
                }
            }
            @if view.more_models > 0 {
                p class="quiet" {
                    (words.more_models) " "
                    (language.number(u64::try_from(view.more_models).unwrap_or(u64::MAX)))
                }
            }
        }
    }
}

fn model(model: &Model, dates: &Dates) -> Markup {
    let (language, words) = (dates.language, dates.language.words());
    html! {
        div class="model" {
            div class="line" {
                h3 { bdi { (model.name) } }
                p class={ "state " (class(model.level)) } { (sign(model.level)) (language.level(model.level)) }
            }
            (days(words.days_of, &model.bars, dates))
            div class="scale" {
                span { (words.days_ago) }
                (answered(&model.bars, language))
                span { (words.today) }
            }
            @if !model.regions.is_empty() {
                ul class="regions" aria-label=(words.regions) {
                    @for one in &model.regions { li { (region(one, dates)) } }
                }
            }
            (routes(words.routes, &model.routes, language))
        }
    }
}

fn region(region: &Region, dates: &Dates) -> Markup {
    let (language, Region { name, level, bars }) = (dates.language, region);
    html! {
        div class="line" {
            h4 { bdi { (name) } }
            p class={ "state " (class(*level)) } { (sign(*level)) (language.level(*level)) }
            (answered(bars, language))
        }
        @if !bars.is_empty() {
            (days(&format!("{}: {name}", language.words().days_of), bars, dates))
        }
    }
}

/// How many calls were answered, of those that the bars count.
fn answered(bars: &Bars, language: Language) -> Markup {
    html! {
        @if let Some(share) = share(bars) {
            span class="share" { b { (language.percent(share)) } " " (language.words().good_calls) }
        }
    }
}

fn days(label: &str, bars: &Bars, dates: &Dates) -> Markup {
    html! {
        ol class="days" aria-label=(label) {
            @for (day, counted) in bars.iter() { (bar(&dates.name(*day), *counted, dates.language)) }
        }
    }
}

/// The dates that a page says again and again, once for each day.
struct Dates {
    language: Language,
    first: i64,
    names: Vec<String>,
}

impl Dates {
    fn of(view: &View, language: Language) -> Self {
        let today = day_of(view.at_ms);
        let first = today.saturating_sub(DAYS - 1);
        Self { language, first, names: (first..=today).map(|day| language.date(day)).collect() }
    }

    fn name(&self, day: i64) -> Cow<'_, str> {
        let at = usize::try_from(day.saturating_sub(self.first)).ok();
        let known = at.and_then(|at| self.names.get(at));
        known.map_or_else(|| self.language.date(day).into(), Cow::from)
    }
}

/// One day. Its text shows when a pointer is on it; readers of text always have it.
fn bar(date: &str, counted: Counted, language: Language) -> Markup {
    let level = counted.level();
    html! {
        li class=(class(level)) {
            span {
                (date) ": "
                @match counted.share() {
                    Some(share) => { (language.percent(share)) " (" (language.level(level)) ")" },
                    None => { (language.level(None)) },
                }
            }
        }
    }
}

fn routes(name: &str, routes: &[Route], language: Language) -> Markup {
    html! {
        @if !routes.is_empty() {
            ul class="routes" aria-label=(name) {
                @for route in routes {
                    li class=(class(route.level)) {
                        (sign(route.level)) bdi { (route.name) } " "
                        span class="quiet" { (language.level(route.level)) }
                    }
                }
            }
        }
    }
}

fn jobs(jobs: &[Job], language: Language) -> Markup {
    let words = language.words();
    let state = |state: JobState| match state {
        JobState::Well => words.job_well,
        JobState::Late => words.job_late,
        JobState::Failed => words.job_failed,
    };
    let all_well = jobs.iter().all(|job| job.state == JobState::Well);
    html! {
        section class="block" aria-labelledby="jobs" {
            h2 id="jobs" { (words.jobs) }
            details open[!all_well] {
                summary { (if all_well { words.jobs_well } else { words.jobs_ill }) }
                table {
                    thead {
                        tr {
                            th scope="col" { (words.job) }
                            th scope="col" { (words.job_state) }
                            th scope="col" { (words.job_done) }
                        }
                    }
                    tbody {
                        @for job in jobs {
                            tr {
                                th scope="row" { (breakable(&job.name)) }
                                td {
                                    span class={ "state " (class(Some(job.state.level()))) } {
                                        (sign(Some(job.state.level()))) (state(job.state))
                                    }
                                }
                                td {
                                    @match job.done_ms {
                                        Some(at_ms) => { (time(at_ms, language)) },
                                        None => { (words.never) },
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A name of ours, which may be broken behind each part of it.
fn breakable(name: &str) -> Markup {
    html! {
        bdi {
            @for (number, part) in name.split('_').enumerate() {
                @if number > 0 { "_" wbr; }
                (part)
            }
        }
    }
}

fn past(view: &View, language: Language) -> Markup {
    let words = language.words();
    html! {
        section class="block" aria-labelledby="past" {
            h2 id="past" { (words.past_incidents) }
            @if view.past().next().is_none() {
                p class="quiet" { (words.no_past_incidents) }
            }
            @for one in view.past().take(PAST_MAX) { (incident(one, language)) }
        }
    }
}

fn incident(incident: &Incident, language: Language) -> Markup {
    let words = language.words();
    let title_id = format!("incident-{}", incident.id);
    let (title_language, title) = title_of(incident, language);
    let level = Some(incident.severity);
    html! {
        article class={ "incident " (class(level)) } aria-labelledby=(title_id) {
            div class="line" {
                h3 id=(title_id) lang=(title_language) dir="auto" { (title) }
                p class={ "state " (class(level)) } { (sign(level)) (language.level(level)) }
            }
            p class="quiet" { (words.affects) " " (affected(incident, language)) }
            p class="quiet" {
                (words.began) " " (time(incident.opened_ms, language))
                @if let Some(closed_ms) = incident.closed_ms {
                    br; (words.ended) " " (time(closed_ms, language))
                }
            }
            ol class="said" {
                @for update in incident.updates.iter().rev() { (told(update, language)) }
            }
        }
    }
}

/// Whom it hits.
fn affected(incident: &Incident, language: Language) -> Markup {
    let words = language.words();
    let rest = incident.models.len().saturating_sub(AFFECTED_MAX);
    html! {
        @if incident.models.is_empty() { (words.everything) }
        @for (number, model) in incident.models.iter().take(AFFECTED_MAX).enumerate() {
            @if number > 0 { (language.separator()) " " }
            bdi class="name" { (model) }
        }
        @if rest > 0 { " +" (language.number(u64::try_from(rest).unwrap_or(u64::MAX))) }
    }
}

fn told(update: &Update, language: Language) -> Markup {
    html! {
        li {
            p class="when" { (time(update.at_ms, language)) }
            @match pick(&update.text, language) {
                Some((code, text)) => {
                    @for line in text.lines().filter(|line| !line.trim().is_empty()) {
                        p lang=(code) dir="auto" { (line) }
                    }
                },
                None => { p { (said(update.word, language)) } },
            }
        }
    }
}

/// The incident's title and its language: what a person called it, or what the machine does.
pub(super) fn title_of(incident: &Incident, language: Language) -> (&str, &str) {
    let words = language.words();
    let ours = match incident.severity {
        Level::Operational | Level::Degraded => words.incident_degraded,
        Level::Partly => words.incident_partly,
        Level::Down => words.incident_down,
    };
    pick(&incident.title, language).unwrap_or_else(|| (language.code(), ours))
}

/// What the machine says with a word.
pub(super) const fn said(word: Word, language: Language) -> &'static str {
    let words = language.words();
    match word {
        Word::Opened => words.said_opened,
        Word::Worse => words.said_worse,
        Word::Again => words.said_again,
        Word::Note => words.said_note,
        Word::Closed => words.said_closed,
    }
}

/// A text in the reader's language, in English, or in any that there is.
pub(super) fn pick(texts: &Texts, language: Language) -> Option<(&str, &str)> {
    let of = |code: &str| texts.get_key_value(code);
    let found = of(language.code()).or_else(|| of("en")).or_else(|| texts.iter().next());
    found.map(|(code, text)| (code.as_str(), text.as_str()))
}

const fn statement(overall: Overall, language: Language) -> &'static str {
    let words = language.words();
    match overall {
        Overall::Unknown => words.no_data_yet,
        Overall::Operational => words.all_operational,
        Overall::Degraded => words.some_degraded,
        Overall::Partly => words.some_partly,
        Overall::SomeDown => words.some_down,
        Overall::AllDown => words.all_down,
    }
}

fn time(at_ms: i64, language: Language) -> Markup {
    html! { time datetime=(rfc3339(at_ms)) { (language.moment(at_ms)) } }
}

const fn class(level: Option<Level>) -> &'static str {
    match level {
        None => "no",
        Some(Level::Operational) => "ok",
        Some(Level::Degraded) => "dg",
        Some(Level::Partly) => "pt",
        Some(Level::Down) => "dn",
    }
}

/// A level's sign: each has a shape of its own.
const fn shape(level: Option<Level>) -> &'static str {
    match level {
        None => "M10 2.5a7.5 7.5 0 1 0 0 15 7.5 7.5 0 0 0 0-15Zm0 2a5.5 5.5 0 1 1 0 11 5.5 5.5 0 0 1 0-11Z",
        Some(Level::Operational) => {
            "M10 1.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17ZM8.7 13.9 5 10.2l1.4-1.4 2.3 2.3 4.9-4.9L15 7.6Z"
        }
        Some(Level::Degraded) => "M10 1.6 19 18H1ZM9 7.5v5h2v-5Zm0 6.5v2h2v-2Z",
        Some(Level::Partly) => "M10 .8 19.2 10 10 19.2.8 10ZM9 5.5v6h2v-6Zm0 7.5v2h2v-2Z",
        Some(Level::Down) => {
            "M6.3 1.5h7.4l4.8 4.8v7.4l-4.8 4.8H6.3l-4.8-4.8V6.3ZM6 7.4 8.6 10 6 12.6 7.4 14l2.6-2.6 2.6 2.6 1.4-1.4L11.4 10 14 7.4 12.6 6 10 8.6 7.4 6Z"
        }
    }
}

/// Beside a word that says the same: of no use to readers of text.
fn sign(level: Option<Level>) -> Markup {
    html! {
        svg class="sign" viewBox="0 0 20 20" aria-hidden="true" focusable="false" {
            path fill-rule="evenodd" d=(shape(level)) {}
        }
    }
}

/// The sign as the page's icon in a tab.
fn icon_url(level: Option<Level>) -> String {
    let colour = match level {
        None => "%23848d95",
        Some(Level::Operational) => "%232f9e6b",
        Some(Level::Degraded) => "%23c98a0b",
        Some(Level::Partly) => "%23d9622b",
        Some(Level::Down) => "%23c92f2f",
    };
    let shape = shape(level).replace(' ', "%20");
    format!(
        "data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'%20viewBox='0%200%2020%2020'%3E\
         %3Cpath%20fill='{colour}'%20fill-rule='evenodd'%20d='{shape}'/%3E%3C/svg%3E"
    )
}

/// A gate with its bar up: the mark of the house.
fn gate() -> Markup {
    html! {
        svg class="gate" viewBox="0 0 32 24" aria-hidden="true" focusable="false" {
            path d="M3 22V11h6v11ZM0 22h12v2H0Z" {}
            path class="boom" d="M5.2 7.3 30.1.2l1.1 3.9L6.3 11.2Z" {}
            path class="stripe" d="m11.6 5.5 3.4-1 1.1 3.9-3.4 1Zm7.8-2.2 3.4-1 1.1 3.9-3.4 1Z" {}
        }
    }
}
