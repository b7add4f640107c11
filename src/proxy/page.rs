//! The status page over HTTP: in which language and coding, whether its reader has it already (RFC 9110 §13.1.2), and
//! whether enough of it is left (`filters::status::ration`).
//!
//! The bytes are there: what is done here for a request is to choose among them.

use bytes::Bytes;
use filters::verdict::{Reason, Rejection};
use http::header::{
    ACCEPT_ENCODING, ACCEPT_LANGUAGE, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH,
    CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderName, Method};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::http::ServerSession;

use super::gateway::Gateway;
use crate::clock;
use crate::status::{self, Answer, Body, Form};

/// One answer, for one reader.
pub(super) struct Page {
    answer: Answer,
    is_coded: bool,
    has_it: bool,
    is_head: bool,
}

impl Gateway {
    /// The page for everybody, as it was made last.
    pub(super) fn status_page(&self, session: &ServerSession, form: Form) -> Result<Page, Rejection> {
        let head = session.req_header();
        let query = head.uri.query().unwrap_or_default();
        let Some(answer) = self.status.answer(form, query, text(head, &ACCEPT_LANGUAGE)) else {
            let message = "There is no status page: it is switched off.";
            return Err(Rejection::new(Reason::UnknownPath, message));
        };
        let is_coded = takes_gzip(text(head, &ACCEPT_ENCODING));
        let etag = if is_coded { &answer.gzip.etag } else { &answer.plain.etag };
        let has_it = head.headers.get_all(IF_NONE_MATCH).iter().any(|tags| names(tags.as_bytes(), etag));
        let page = Page { is_coded, has_it, is_head: head.method == Method::HEAD, answer };
        self.status.ration(clock::now(), page.body().len()).map_err(|wait| {
            let message = "The status page is asked for too often. It may be kept for five seconds.";
            Rejection::new(Reason::RateLimited, message).retry_after(wait)
        })?;
        Ok(page)
    }
}

impl Page {
    fn chosen(&self) -> &Body {
        if self.is_coded { &self.answer.gzip } else { &self.answer.plain }
    }

    /// What goes out behind the head.
    pub(super) fn body(&self) -> Bytes {
        if self.has_it || self.is_head { Bytes::new() } else { self.chosen().bytes.clone() }
    }

    /// `policy`: what a browser may do with it.
    pub(super) fn head(&self, policy: &str) -> pingora::Result<ResponseHeader> {
        let mut head = ResponseHeader::build(if self.has_it { 304 } else { 200 }, Some(14))?;
        head.insert_header(ETAG, &self.chosen().etag)?;
        head.insert_header(CACHE_CONTROL, status::CACHE_CONTROL)?;
        head.insert_header(VARY, "accept-language, accept-encoding")?;
        if !self.has_it {
            head.insert_header(CONTENT_TYPE, self.answer.content_type)?;
            head.insert_header(CONTENT_LENGTH, self.chosen().bytes.len().to_string())?;
            if self.is_coded {
                head.insert_header(CONTENT_ENCODING, "gzip")?;
            }
            if let Some(language) = self.answer.language {
                head.insert_header(CONTENT_LANGUAGE, language.code())?;
            }
        }
        head.insert_header(CONTENT_SECURITY_POLICY, policy)?;
        head.insert_header(X_CONTENT_TYPE_OPTIONS, "nosniff")?;
        head.insert_header(REFERRER_POLICY, "no-referrer")?;
        Ok(head)
    }
}

fn text<'a>(head: &'a RequestHeader, name: &HeaderName) -> &'a str {
    head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Whether an `Accept-Encoding` names gzip and does not forbid it (RFC 9110 §12.5.3).
fn takes_gzip(accepts: &str) -> bool {
    accepts.split(',').any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let quality = parts.find_map(|part| part.strip_prefix("q="));
        is_gzip && quality.is_none_or(|quality| quality.parse::<f32>().is_ok_and(|quality| quality > 0.0))
    })
}

/// Whether a list of entity tags names this one. Strong or weak is the same here.
fn names(tags: &[u8], etag: &str) -> bool {
    let mut tags = tags.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    tags.any(|tag| tag == b"*" || tag.strip_prefix(b"W/").unwrap_or(tag) == etag.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_to_whoever_names_it() {
        for accepts in ["gzip", "br, GZIP;q=0.5", "deflate , gzip ; q=1", "gzip;q=0, gzip"] {
            assert!(takes_gzip(accepts), "{accepts}");
        }
        for accepts in
            ["", "identity", "br", "gzip;q=0", "gzip; q=0.000", "gzip;q=x", "gzip;q=NaN", "xgzip", "*"]
        {
            assert!(!takes_gzip(accepts), "{accepts}");
        }
    }
}
