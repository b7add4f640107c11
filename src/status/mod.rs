//! The status page: how every model does, for everybody, on the addresses where callers connect.
//!
//! It costs calls nothing. A task looks at the board once a second, for as long as it takes to copy a few flags
//! (`watch`); another one reads what is kept among the records, and tells them of incidents. From what both know a page
//! is made at most every five seconds, at once where something has got worse, for every language, plain and compressed;
//! whoever asks gets bytes that are there already, as far as the node's ration of them goes.
//!
//! In a fleet every node makes its own page, from records that all share and from what it sees itself. While Postgres is
//! away the page goes on from memory, and says so.
//!
//! Deliberately absent: names of providers and upstreams, unless the config wants them shown; whose calls failed; and
//! what a page may not depend on: scripts, fonts or pictures of others, cookies.

mod data;
mod language;
mod news;
mod page;
mod view;
mod watch;

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;
use data_encoding::BASE64;
use filters::status::ration::Ration;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};

use crate::clock;
use crate::config::status::Status;
use crate::digits::first_digits;
use view::View;

pub(crate) use data::incident as incident_as_json;
pub use language::Language;
pub use watch::{Seen, Watch};

/// Answers of ours are good for so long, for whoever keeps copies.
pub const CACHE_CONTROL: &str = "public, max-age=5";

/// In which form somebody wants the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Page,
    Json,
    Feed,
}

/// One answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub plain: Body,
    /// The same, compressed.
    pub gzip: Body,
    pub content_type: &'static str,
    /// Where the answer is in the reader's language.
    pub language: Option<Language>,
}

/// What goes out behind a head.
#[derive(Clone, Debug)]
pub struct Body {
    pub bytes: Bytes,
    /// Quoted, as a head has it.
    pub etag: String,
}

/// What is answered now; made by [`Watch`], read by calls.
#[derive(Debug)]
pub struct StatusPage {
    config: ArcSwap<Status>,
    answers: ArcSwapOption<Answers>,
    /// What a browser may do with the page: `content-security-policy`.
    policy: String,
    ration: Ration,
}

/// Every answer that there is.
#[derive(Debug)]
struct Answers {
    of: View,
    pages: Vec<(Language, Answer)>,
    feeds: Vec<(Language, Answer)>,
    json: Answer,
}

impl StatusPage {
    /// As this config wants it. There is nothing to say yet.
    #[must_use]
    pub fn new(config: Status) -> Self {
        let digest = BASE64.encode(&Sha256::digest(page::STYLE));
        let policy = format!(
            "default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'; \
             frame-ancestors 'none'"
        );
        let (config, ration) = (ArcSwap::from_pointee(config), Ration::new(clock::now()));
        Self { config, answers: ArcSwapOption::empty(), policy, ration }
    }

    /// From now on it is as this config wants it.
    pub fn set(&self, config: Status) {
        let config = Arc::new(config);
        self.config.store(Arc::clone(&config));
        if let Some(answers) = self.answers.load_full() {
            let mut view = answers.of.clone();
            (view.title, view.url) = (config.title.clone(), config.url.clone());
            view.models.retain(|model| !config.hidden_models.contains(&model.name));
            if !config.detail {
                view.models.iter_mut().for_each(|model| model.routes.clear());
            }
            self.make(view);
        }
    }

    /// How it is wanted.
    #[must_use]
    pub fn config(&self) -> Arc<Status> {
        self.config.load_full()
    }

    #[must_use]
    pub fn policy(&self) -> &str {
        &self.policy
    }

    /// Gives away so many bytes.
    ///
    /// # Errors
    /// When none are left: the time after which there are.
    pub fn ration(&self, now: Instant, bytes: usize) -> Result<(), Duration> {
        self.ration.take(now, bytes, self.config.load().bytes_per_second)
    }

    /// The answer for a reader; `None` where there is no page. `query` and `accepts`: of the request, for the language.
    #[must_use]
    pub fn answer(&self, form: Form, query: &str, accepts: &str) -> Option<Answer> {
        let config = self.config.load();
        if !config.enabled {
            return None;
        }
        let answers = self.answers.load_full().unwrap_or_else(|| self.make(View::default()));
        let language = Language::of_reader(query, accepts, &config.languages);
        let of = |all: &[(Language, Answer)]| {
            all.iter()
                .find(|(of, _)| *of == language)
                .or_else(|| all.first())
                .map(|(_, answer)| answer.clone())
        };
        match form {
            Form::Page => of(&answers.pages),
            Form::Feed => of(&answers.feeds),
            Form::Json => Some(answers.json.clone()),
        }
    }

    /// Shows this from now on.
    fn show(&self, view: View) {
        let is_shown = self.answers.load().as_ref().is_some_and(|answers| answers.of == view);
        if !is_shown && self.config.load().enabled {
            self.make(view);
        }
    }

    fn make(&self, view: View) -> Arc<Answers> {
        let config = self.config.load();
        let languages = &config.languages;
        let of = |make: &dyn Fn(Language) -> Vec<u8>, content_type| {
            let answer =
                |language: &Language| (*language, answer(make(*language), content_type, Some(*language)));
            languages.iter().map(answer).collect::<Vec<_>>()
        };
        let answers = Arc::new(Answers {
            pages: of(&|language| page::page(&view, language, languages), "text/html; charset=utf-8"),
            feeds: of(&|language| data::feed(&view, language), "application/rss+xml; charset=utf-8"),
            json: answer(data::json(&view), "application/json", None),
            of: view,
        });
        self.answers.store(Some(Arc::clone(&answers)));
        answers
    }
}

fn answer(body: Vec<u8>, content_type: &'static str, language: Option<Language>) -> Answer {
    Answer { gzip: tagged(compressed(&body)), plain: tagged(body), content_type, language }
}

fn tagged(body: Vec<u8>) -> Body {
    let etag = format!("\"{}\"", first_digits(&Sha256::digest(&body), 12));
    Body { bytes: body.into(), etag }
}

/// A page says the same again and again: a twentieth is left of it.
fn compressed(body: &[u8]) -> Vec<u8> {
    let mut coder = GzEncoder::new(Vec::with_capacity(body.len() / 8), Compression::default());
    // Writing to memory does not fail.
    let written = coder.write_all(body);
    written.and_then(|()| coder.finish()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
