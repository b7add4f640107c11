//! What pages say, and that nobody can write into them.

use std::collections::BTreeSet;

use filters::status::Level;
use filters::status::days::{Counted, bars};

use super::language::Language;
use super::view::{Goal, Job, JobState, Model, Region, Route, View};
use super::{Answer, Form, StatusPage, data, page};
use crate::config::status::Status;
use crate::record::incidents::{Incident, Texts, Update, Word};

/// What somebody may try to write into a page: markup, an attribute, a script, another direction.
const HOSTILE: &str = "</h3><script>alert(1)</script>\" onmouseover='x' \u{202e}&<u>";
const TODAY: i64 = 20_787;

fn model(name: &str, level: Option<Level>) -> Model {
    let counted = [(TODAY, Counted { good: 9_999, bad: 1 }), (TODAY - 1, Counted { good: 1, bad: 1 })];
    let of_region = [(TODAY, Counted { good: 3, bad: 1 }), (TODAY - 2, Counted { good: 1, bad: 0 })];
    let regions = vec![Region { name: "eu-west".into(), level, bars: bars(TODAY, of_region).into() }];
    Model { name: name.into(), level, regions, routes: vec![], bars: bars(TODAY, counted).into() }
}

fn texts(all: &[(&str, &str)]) -> Texts {
    all.iter().map(|(code, text)| ((*code).to_owned(), (*text).to_owned())).collect()
}

fn incident(title: &[(&str, &str)]) -> Incident {
    Incident {
        id: 7,
        automatic: title.is_empty(),
        edited: !title.is_empty(),
        severity: Level::Partly,
        models: BTreeSet::from(["gpt-a".to_owned()]),
        title: texts(title),
        opened_ms: 1_796_047_500_000,
        closed_ms: None,
        seen_ms: 1_796_047_500_000,
        updates: vec![Update { at_ms: 1_796_047_500_000, word: Word::Opened, text: texts(title) }],
    }
}

fn view() -> View {
    View {
        at_ms: 1_796_047_500_000,
        models: vec![model("gpt-a", Some(Level::Operational))],
        ..View::default()
    }
}

fn html(view: &View, language: Language) -> String {
    String::from_utf8(page::page(view, language, &Language::ALL)).unwrap()
}

#[test]
fn nobody_writes_markup_into_a_page_a_feed_or_json() {
    let mut view = view();
    view.title = Some(HOSTILE.into());
    view.url = Some(HOSTILE.into());
    view.models = vec![model(HOSTILE, Some(Level::Down))];
    if let Some(model) = view.models.first_mut() {
        model.regions = vec![Region { name: HOSTILE.into(), level: None, bars: bars(TODAY, []).into() }];
        model.routes = vec![Route { name: HOSTILE.into(), level: None }];
    }
    view.jobs = vec![Job { name: HOSTILE.into(), state: JobState::Failed, done_ms: None }];
    let hostile = [("en", HOSTILE), ("fa", HOSTILE)];
    view.incidents = vec![Incident { models: BTreeSet::from([HOSTILE.to_owned()]), ..incident(&hostile) }];
    for language in Language::ALL {
        for text in [html(&view, language), String::from_utf8(data::feed(&view, language)).unwrap()] {
            assert!(!text.contains("<script") && !text.contains("<u>"), "{text}");
            assert!(!text.contains("\" onmouseover"), "{text}");
            assert!(text.contains("&lt;script&gt;"), "it is shown as it was written");
        }
    }
    let json: serde_json::Value = serde_json::from_slice(&data::json(&view)).unwrap();
    assert_eq!(json["models"][0]["name"], HOSTILE);
}

#[test]
fn a_page_is_in_its_readers_language_and_direction() {
    let view = view();
    let english = html(&view, Language::English);
    assert!(
        english.contains("<html lang=\"en\" dir=\"ltr\">") && english.contains("All systems operational")
    );
    assert!(english.contains("<time datetime=\"2026-11-30T14:05:00Z\">30 November 2026, 14:05 UTC</time>"));
    assert!(english.contains("30 November 2026: 99.99% (Operational)"), "{english}");
    assert!(english.contains("29 November 2026: 50% (Down)"));
    assert!(english.contains("28 November 2026: No data"));
    let persian = html(&view, Language::Persian);
    assert!(persian.contains("<html lang=\"fa\" dir=\"rtl\">"));
    assert!(persian.contains("۹ آذر ۱۴۰۵: ۹۹٫۹۹٪"), "{persian}");
    let arabic = html(&view, Language::Arabic);
    assert!(arabic.contains("<html lang=\"ar\" dir=\"rtl\">") && arabic.contains("٣٠ نوفمبر ٢٠٢٦: ٩٩٫٩٩٪"));
}

#[test]
fn every_day_of_a_model_and_of_its_region_has_a_bar_with_its_text() {
    let page = html(&view(), Language::English);
    let rows: Vec<&str> =
        page.split("<ol class=\"days\"").skip(1).map(|row| row.split("</ol>").next().unwrap()).collect();
    let [model, region] = rows.as_slice() else { panic!("{} rows", rows.len()) };
    for bars in [model, region] {
        assert_eq!((bars.matches("<li ").count(), bars.matches("<span>").count()), (90, 90));
    }
    assert!(region.starts_with(" aria-label=\"Day by day: eu-west\">"), "{region}");
    assert!(model.contains("30 November 2026: 99.99% (Operational)"));
    assert!(
        region.contains("30 November 2026: 75% (Down)")
            && region.contains("28 November 2026: 100% (Operational)")
    );
    assert!(page.contains("<b>80%</b> of calls answered"), "of the region, in all");
    let json: serde_json::Value = serde_json::from_slice(&data::json(&view())).unwrap();
    let region = &json["models"][0]["regions"][0];
    assert_eq!((&region["name"], &region["good_90d"]), (&"eu-west".into(), &0.8.into()));
    assert_eq!(region["days"].as_array().unwrap().len(), 90);
    assert_eq!(
        region["days"][89],
        serde_json::json!({ "date": "2026-11-30", "status": "down", "good": 0.75 })
    );
}

#[test]
fn a_region_too_many_is_shown_as_it_does_now() {
    let mut view = view();
    if let Some(region) = view.models.first_mut().and_then(|model| model.regions.first_mut()) {
        region.bars = [].into();
    }
    let page = html(&view, Language::Persian);
    assert_eq!(page.matches("<ol class=\"days\"").count(), 1);
    assert!(page.contains("<h4><bdi>eu-west</bdi></h4>"));
}

#[test]
fn an_incident_has_the_title_that_a_person_gave_it_or_one_in_the_readers_language() {
    let mut view = view();
    view.incidents = vec![incident(&[])];
    assert!(html(&view, Language::English).contains("Some calls are failing"));
    assert!(html(&view, Language::Persian).contains("برخی درخواست‌ها ناموفق‌اند"));
    view.incidents = vec![incident(&[("en", "Answers are slow"), ("fa", "پاسخ‌ها کندند")])];
    let persian = html(&view, Language::Persian);
    assert!(persian.contains("پاسخ‌ها کندند") && !persian.contains("Answers are slow"));
    let arabic = html(&view, Language::Arabic);
    assert!(arabic.contains("lang=\"en\" dir=\"auto\">Answers are slow"), "in English for want of Arabic");
}

#[test]
fn the_whole_is_as_bad_as_its_worst_model() {
    let of = |levels: &[Option<Level>]| {
        let models = levels.iter().map(|level| model("m", *level)).collect();
        let json: serde_json::Value =
            serde_json::from_slice(&data::json(&View { models, ..view() })).unwrap();
        json["status"].as_str().unwrap().to_owned()
    };
    assert_eq!(of(&[]), "no_data");
    assert_eq!(of(&[None, None]), "no_data");
    assert_eq!(of(&[None, Some(Level::Operational)]), "operational");
    assert_eq!(of(&[Some(Level::Operational), Some(Level::Degraded)]), "degraded");
    assert_eq!(of(&[Some(Level::Down), Some(Level::Partly)]), "down");
    let models = vec![model("a", Some(Level::Down)), model("b", Some(Level::Operational))];
    assert!(html(&View { models, ..view() }, Language::English).contains("Some models are down"));
    let models = vec![model("a", Some(Level::Down))];
    assert!(html(&View { models, ..view() }, Language::English).contains("All models are down"));
}

#[test]
fn goal_jobs_and_a_notice_are_shown_where_there_is_something_to_say() {
    let mut view = view();
    let plain = html(&view, Language::English);
    assert!(
        !plain.contains("<table") && !plain.contains("class=\"notice\"") && !plain.contains("error budget")
    );
    view.goal = Some(Goal { goal: 99_950, share: 99_970, left: 40_000 });
    view.jobs = vec![Job { name: "sweep".into(), state: JobState::Late, done_ms: Some(1_796_047_500_000) }];
    view.read_only = true;
    let page = html(&view, Language::Persian);
    assert!(
        page.contains("۹۹٫۹۷٪")
            && page.contains("۴۰٪")
            && page.contains("با تأخیر")
            && page.contains("class=\"notice\"")
    );
    let json: serde_json::Value = serde_json::from_slice(&data::json(&view)).unwrap();
    assert_eq!(json["slo"]["goal"], 0.9995);
    assert_eq!(json["read_only"], true);
    assert_eq!(json["jobs"][0]["status"], "late");
}

#[test]
fn what_has_not_changed_has_the_same_tag() {
    let page = StatusPage::new(Status::default());
    let tag = |form| page.answer(form, "", "").unwrap().plain.etag;
    page.show(view());
    let before = [Form::Page, Form::Json, Form::Feed].map(tag);
    page.show(view());
    assert_eq!([Form::Page, Form::Json, Form::Feed].map(tag), before);
    page.show(View { read_only: true, ..view() });
    assert_ne!(tag(Form::Page), before[0]);
    assert_eq!(tag(Form::Feed), before[2], "nothing was said about an incident");
}

#[test]
fn another_config_counts_at_once() {
    let page = StatusPage::new(Status { detail: true, ..Status::default() });
    let routes = vec![Route { name: "secret-provider/m".into(), level: None }];
    page.show(View { models: vec![Model { routes, ..model("gpt-a", None) }], ..view() });
    let text = |query: &str| {
        let answer = page.answer(Form::Page, query, "").unwrap();
        String::from_utf8(answer.plain.bytes.to_vec()).unwrap()
    };
    assert!(text("").contains("secret-provider"));
    page.set(Status {
        title: Some("Example".into()),
        languages: vec![Language::Persian],
        ..Status::default()
    });
    let after = text("lang=en");
    assert!(!after.contains("secret-provider") && after.contains("Example") && after.contains("lang=\"fa\""));
    page.set(Status { enabled: false, ..Status::default() });
    assert!(page.answer(Form::Page, "", "").is_none());
}

#[test]
fn what_is_compressed_is_the_same_and_far_less() {
    let page = StatusPage::new(Status::default());
    page.show(view());
    for form in [Form::Page, Form::Json, Form::Feed] {
        let Answer { plain, gzip, .. } = page.answer(form, "", "").unwrap();
        let mut text = vec![];
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(gzip.bytes.as_ref()), &mut text)
            .unwrap();
        assert_eq!(text, plain.bytes);
        assert_ne!(plain.etag, gzip.etag);
        assert!(form == Form::Feed || gzip.bytes.len() * 4 < plain.bytes.len(), "{form:?}");
    }
}
