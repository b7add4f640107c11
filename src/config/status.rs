//! The block `status:`: what the status page shows, and to whom it speaks. As it is written and as it is meant.

use deserr::Deserr;

use super::Faults;
use super::raw::Bytes;
use crate::status::Language;

/// The longest title, in bytes.
const TITLE_BYTES_MAX: usize = 100;
/// The smallest ration, in bytes.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;

#[derive(Debug, Default, Deserr)]
#[deserr(error = Faults, deny_unknown_fields)]
pub struct Raw {
    /// Answer `/status`, `/status.json` and `/status.rss` on the addresses of callers, to everybody. Default true.
    #[deserr(default)]
    pub enabled: Option<bool>,
    /// What stands at the top of the page. Default: "Service status", in the reader's language.
    #[deserr(default)]
    pub title: Option<String>,
    /// The page's own address, such as `https://example.com/status`, for links in its feed. Default: none.
    #[deserr(default)]
    pub url: Option<String>,
    /// Show the routes of every model by their names, and so your providers. Default false.
    #[deserr(default)]
    pub detail: Option<bool>,
    /// Languages of the page, of `en`, `ar` and `fa`; the first is for readers who want none of them. Default: all.
    #[deserr(default)]
    pub languages: Option<Vec<String>>,
    /// Models that the page does not show. Default: none.
    #[deserr(default)]
    pub hidden_models: Option<Vec<String>>,
    /// Bytes of the page a second that this node gives away at most, ten seconds of it at once: whoever asks beyond it gets
    /// a 429, and calls keep the line. A page of ten models with three regions each has some 25 KiB, compressed. Default 4MiB.
    #[deserr(default)]
    pub bytes_per_second: Option<Bytes>,
}

/// What the page shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub enabled: bool,
    pub title: Option<String>,
    pub url: Option<String>,
    pub detail: bool,
    /// Never empty.
    pub languages: Vec<Language>,
    pub hidden_models: Vec<String>,
    pub bytes_per_second: u64,
}

impl Default for Status {
    fn default() -> Self {
        Self {
            enabled: true,
            title: None,
            url: None,
            detail: false,
            languages: Language::ALL.to_vec(),
            hidden_models: vec![],
            bytes_per_second: 4 << 20,
        }
    }
}

/// Turns what was written into what is meant, and adds what is wrong with it.
pub(super) fn check(raw: Raw, faults: &mut Faults) -> Status {
    let Raw { enabled, title, url, detail, languages, hidden_models, bytes_per_second } = raw;
    let default = Status::default();
    let sound = |title: &String| {
        !title.trim().is_empty() && title.len() <= TITLE_BYTES_MAX && !title.chars().any(char::is_control)
    };
    if title.as_ref().is_some_and(|title| !sound(title)) {
        faults.push("status.title", format!("must be 1 to {TITLE_BYTES_MAX} bytes of plain text"));
    }
    let bytes_per_second = bytes_per_second.map_or(default.bytes_per_second, |bytes| bytes.0);
    if bytes_per_second < BYTES_PER_SECOND_MIN {
        faults.push("status.bytes_per_second", "must be at least 64KiB, or nobody can read the page");
    }
    let is_web = |url: &String| {
        let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://")).unwrap_or_default();
        !rest.is_empty() && url.bytes().all(|b| b.is_ascii_graphic())
    };
    if url.as_ref().is_some_and(|url| !is_web(url)) {
        faults.push("status.url", "must be an address such as https://example.com/status");
    }
    let mut known = vec![];
    for code in languages.iter().flatten() {
        match Language::named(code) {
            Some(language) if !known.contains(&language) => known.push(language),
            Some(_) => faults.push("status.languages", format!("`{code}` is there twice")),
            None => faults.push("status.languages", format!("`{code}` is not one of: en, ar, fa")),
        }
    }
    if languages.as_ref().is_some_and(Vec::is_empty) {
        faults.push("status.languages", "name at least one");
    }
    Status {
        enabled: enabled.unwrap_or(default.enabled),
        title,
        url,
        detail: detail.unwrap_or(default.detail),
        languages: if known.is_empty() { default.languages } else { known },
        hidden_models: hidden_models.unwrap_or_default(),
        bytes_per_second,
    }
}
