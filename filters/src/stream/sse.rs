//! Events out of bytes, as the event-stream grammar of the WHATWG HTML standard has them.
//!
//! Framing never depends on how the bytes were cut into reads: line ends may be LF, CR or CRLF, one
//! leading byte-order mark is skipped, the data lines of an event are joined with LF, comments and
//! unknown fields are no events. Every event keeps its raw bytes, and the raw bytes of all events
//! together are the stream, to the byte: what need not change is passed on as it came.
//!
//! An event is handed out at its blank line and not before. A caller could do nothing with half of
//! one, and a stream that breaks inside an event can then still be ended cleanly.
//!
//! Deliberately absent: `id` and `retry` (the gateway never reconnects), and any bound on memory:
//! whoever pushes bytes asks [`Scanner::pending`] and decides.

use std::ops::Range;

use bytes::{Buf, Bytes, BytesMut};

/// One event, or a run of comments that ends in a blank line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The bytes as they came, blank line included.
    pub raw: Bytes,
    /// The value of its last `event` field; empty where there is none.
    pub name: Bytes,
    /// Its data lines joined with LF; `None` where it has no data field (comments, pings).
    pub data: Option<Bytes>,
    /// Where in `raw` the data lies, when it is a single line.
    pub data_span: Option<Range<usize>>,
}

/// Cuts a byte stream into events.
#[derive(Debug, Default)]
pub struct Scanner {
    buffer: BytesMut,
    /// Up to here there is no line end.
    scanned: usize,
    /// Where the line begins that is being read.
    line_start: usize,
    data: Vec<Range<usize>>,
    name: Range<usize>,
    /// The last event ended in CR: an LF that follows still belongs to it.
    swallow_lf: bool,
    past_bom: bool,
}

impl Scanner {
    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// How many bytes wait for the end of their event.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.buffer.len()
    }

    /// The bytes that wait for the end of their event.
    #[must_use]
    pub fn pending_bytes(&self) -> &[u8] {
        &self.buffer
    }

    /// The next event that is whole.
    pub fn next_event(&mut self) -> Option<Event> {
        if self.swallow_lf && !self.buffer.is_empty() {
            // The LF of a CRLF that was cut in two goes out with the event it precedes.
            self.swallow_lf = false;
            if self.buffer.first() == Some(&b'\n') {
                self.line_start = 1;
                self.scanned = 1;
            }
        }
        loop {
            let rest = self.buffer.get(self.scanned..).unwrap_or_default();
            let Some(step) = memchr::memchr2(b'\n', b'\r', rest) else {
                self.scanned = self.buffer.len();
                return None;
            };
            let end = self.scanned + step;
            let mut next = end + 1;
            let mut cut_crlf = false;
            if self.buffer.get(end) == Some(&b'\r') {
                match self.buffer.get(next) {
                    Some(b'\n') => next += 1,
                    Some(_) => {}
                    None => cut_crlf = true,
                }
            }
            let line = self.line_start..end;
            let blank = self.is_blank(&line);
            if cut_crlf && !blank {
                // Not the end of an event, so waiting for one more byte delays nothing.
                self.scanned = end;
                return None;
            }
            self.line_start = next;
            self.scanned = next;
            if blank {
                self.swallow_lf = cut_crlf;
                return Some(self.take(next));
            }
            self.field(line);
        }
    }

    /// What is left when the body has ended: an event that lacks its blank line, if any.
    pub fn finish(&mut self) -> Option<Event> {
        let all = self.buffer.len();
        let line = self.line_start.min(all)..all;
        let line = match self.buffer.last() {
            Some(b'\r') if !line.is_empty() => line.start..line.end - 1,
            _ => line,
        };
        if !self.is_blank(&line) {
            self.field(line);
        }
        (all > 0).then(|| self.take(all))
    }

    /// Whether the line is empty; the byte-order mark counts as nothing.
    fn is_blank(&self, line: &Range<usize>) -> bool {
        line.len() == self.mark_length(line)
    }

    fn mark_length(&self, line: &Range<usize>) -> usize {
        let text = self.buffer.get(line.clone()).unwrap_or_default();
        if !self.past_bom && text.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 }
    }

    fn field(&mut self, line: Range<usize>) {
        let start = line.start + self.mark_length(&line);
        self.past_bom = true;
        let text = self.buffer.get(start..line.end).unwrap_or_default();
        let colon = memchr::memchr(b':', text).unwrap_or(text.len());
        let (name, value) = text.split_at_checked(colon).unwrap_or((text, b""));
        // One space behind the colon is no part of the value.
        let skipped = match value {
            [b':', b' ', ..] => 2,
            [b':', ..] => 1,
            _ => 0,
        };
        let span = start + colon + skipped..line.end;
        match name {
            b"data" => self.data.push(span),
            b"event" => self.name = span,
            _ => {}
        }
    }

    fn take(&mut self, end: usize) -> Event {
        let raw = self.buffer.split_to(end).freeze();
        let lines = std::mem::take(&mut self.data);
        let name = std::mem::take(&mut self.name);
        self.line_start = 0;
        self.scanned = 0;
        self.past_bom = true;
        let data = match lines.as_slice() {
            [] => None,
            [only] => Some(raw.slice(only.clone())),
            many => {
                let mut joined = BytesMut::new();
                for (index, line) in many.iter().enumerate() {
                    if index > 0 {
                        joined.extend_from_slice(b"\n");
                    }
                    joined.extend_from_slice(raw.get(line.clone()).unwrap_or_default());
                }
                Some(joined.freeze())
            }
        };
        let data_span = match lines.as_slice() {
            [only] => Some(only.clone()),
            _ => None,
        };
        self.data = lines;
        self.data.clear();
        Event { name: raw.slice(name), data, data_span, raw }
    }
}

impl Event {
    /// This event's bytes with its single line of data replaced by `text` at `span` of the data.
    /// `None` when the data is no single line.
    #[must_use]
    pub fn with_data(&self, data: &[u8]) -> Option<Bytes> {
        let span = self.data_span.clone()?;
        let mut out = BytesMut::with_capacity(self.raw.len() + data.len());
        out.extend_from_slice(self.raw.get(..span.start)?);
        out.extend_from_slice(data);
        out.extend_from_slice(self.raw.get(span.end..)?);
        Some(out.freeze())
    }

    /// The raw bytes, with whatever is missing at their end so that every reader sees the event.
    #[must_use]
    pub fn terminated(raw: &Bytes) -> Bytes {
        let missing: &[u8] = match raw.as_ref() {
            [.., b'\n', b'\n'] | [.., b'\r', b'\r'] => b"",
            [.., b'\n' | b'\r', b'\r', b'\n'] => b"",
            [.., b'\n', b'\r'] | [.., b'\n'] => b"\n",
            // An LF behind a CR alone would only make it a CRLF: one line end, and not two.
            _ => b"\n\n",
        };
        if missing.is_empty() {
            return raw.clone();
        }
        let mut chain = raw.clone().chain(missing);
        chain.copy_to_bytes(chain.remaining())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `(name, data)` of all events that carry data, and all bytes that came out.
    fn scan(parts: &[&[u8]]) -> (Vec<(String, String)>, Vec<u8>) {
        let mut scanner = Scanner::default();
        let (mut events, mut bytes) = (vec![], vec![]);
        let mut see = |event: Event| {
            bytes.extend_from_slice(&event.raw);
            if let Some(data) = event.data {
                let text = |b: &Bytes| String::from_utf8_lossy(b).into_owned();
                events.push((text(&event.name), text(&data)));
            }
        };
        for part in parts {
            scanner.push(part);
            while let Some(event) = scanner.next_event() {
                see(event);
            }
        }
        if let Some(event) = scanner.finish() {
            see(event);
        }
        (events, bytes)
    }

    fn data(text: &[u8]) -> Vec<String> {
        scan(&[text]).0.into_iter().map(|(_, data)| data).collect()
    }

    #[test]
    fn all_three_line_ends_delimit() {
        for text in ["data: a\n\ndata: b\n\n", "data: a\r\n\r\ndata: b\r\n\r\n", "data: a\r\rdata: b\r\r"] {
            assert_eq!(data(text.as_bytes()), ["a", "b"], "{text:?}");
        }
    }

    #[test]
    fn one_mark_is_skipped_and_a_second_is_data() {
        assert_eq!(data("\u{feff}data: a\n\n".as_bytes()), ["a"]);
        assert_eq!(data("\u{feff}\u{feff}data: a\n\ndata: b\n\n".as_bytes()), ["b"]);
        assert_eq!(data("data: b\n\n\u{feff}data: a\n\n".as_bytes()), ["b"]);
    }

    #[test]
    fn odd_but_legal_lines_are_read() {
        assert_eq!(data(b"data:a\n\n"), ["a"]);
        assert_eq!(data(b"data:  a\n\n"), [" a"]);
        assert_eq!(data(b"data\n\n"), [""]);
        assert_eq!(data(b"id: 1\nretry: 5\nfoo: x\ndata: a\n\n"), ["a"]);
        assert_eq!(data(b"data: {\ndata:  \"x\": 1\ndata: }\n\n"), ["{\n \"x\": 1\n}"]);
        assert_eq!(data(b": ping\n\n:\n\n"), Vec::<String>::new());
    }

    #[test]
    fn the_name_is_kept() {
        let (events, _) = scan(&[b"event: error\ndata: x\n\ndata: y\n\n"]);
        assert_eq!(events, [("error".into(), "x".into()), (String::new(), "y".into())]);
    }

    #[test]
    fn an_event_is_handed_out_at_its_blank_line() {
        let mut scanner = Scanner::default();
        scanner.push(b"data: a\n");
        assert_eq!(scanner.next_event(), None);
        scanner.push(b"\r");
        assert!(scanner.next_event().is_some(), "a CR alone ends the line");
        scanner.push(b"\ndata: b\n\n");
        assert_eq!(scanner.next_event().unwrap().data.unwrap(), "b");
    }

    #[test]
    fn the_rest_of_a_body_is_an_event_without_its_end() {
        for text in ["data: a\n\ndata: b", "data: a\n\ndata: b\n", "data: a\n\ndata: b\r"] {
            assert_eq!(data(text.as_bytes()), ["a", "b"], "{text:?}");
        }
    }

    #[test]
    fn a_missing_end_is_added_once() {
        for (raw, whole) in [
            ("data: a", "data: a\n\n"),
            ("data: a\n", "data: a\n\n"),
            ("data: a\n\n", "data: a\n\n"),
            ("data: a\r\n\r\n", "data: a\r\n\r\n"),
            ("data: a\r\n", "data: a\r\n\n"),
            ("data: a\r", "data: a\r\n\n"),
            ("data: a\r\n\r", "data: a\r\n\r\n"),
            ("data: a\r\r\n", "data: a\r\r\n"),
        ] {
            assert_eq!(Event::terminated(&Bytes::from(raw)), whole, "{raw:?}");
        }
    }

    #[test]
    fn data_can_be_replaced_in_place() {
        let mut scanner = Scanner::default();
        scanner.push(b"event: x\r\ndata:{\"a\":1}\r\n\r\n");
        let event = scanner.next_event().unwrap();
        assert_eq!(event.with_data(b"{}").unwrap(), "event: x\r\ndata:{}\r\n\r\n");
    }

    fn arb_stream() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            Just("data: {\"a\":1}"),
            Just("data:"),
            Just("event: x"),
            Just(": c"),
            Just("\n"),
            Just("\r"),
            Just("\r\n"),
            Just("\n\n"),
            Just("\r\n\r\n"),
            Just("\u{feff}"),
            Just("é"),
            Just("id"),
            Just("[DONE]"),
        ];
        prop::collection::vec(piece, 0..40).prop_map(|parts| parts.concat().into_bytes())
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events_and_the_same_bytes(
            text in arb_stream(), cuts in prop::collection::vec(0_usize..200, 0..12),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c <= text.len()).collect();
            cuts.sort_unstable();
            let mut parts = vec![];
            let mut start = 0;
            for cut in cuts {
                parts.push(&text[start..cut]);
                start = cut;
            }
            parts.push(&text[start..]);
            let (whole, bytes) = scan(&[&text]);
            let (split, split_bytes) = scan(&parts);
            prop_assert_eq!(&bytes, &text);
            prop_assert_eq!(split_bytes, text);
            prop_assert_eq!(split, whole);
        }

        #[test]
        fn arbitrary_bytes_never_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let (_, bytes) = scan(&[&text]);
            prop_assert_eq!(bytes, text);
        }
    }
}
