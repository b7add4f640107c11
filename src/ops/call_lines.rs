//! The lines of a call, as `tracing-subscriber` writes them, at a fraction of its price.
//!
//! Every call has an access line, and one for each decision that is worth one. The crate's formatter writes a line in a
//! hundred small pieces, each by way of `core::fmt`; that was a tenth of what a small call cost. Events of these two targets have
//! plain fields and no spans, so that they can be put together in a buffer of the thread and handed over at once.
//! Everything else goes to the crate's own formatter. Tests compare the two byte for byte.

use std::cell::RefCell;
use std::fmt::{self, Debug, Write as _};
use std::time::{Duration, UNIX_EPOCH};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::log::Format;
use crate::clock;

/// The targets of lines that every call has.
const OF_CALLS: [&str; 2] = ["access", "decision"];
const MICROS_OF_A_SECOND: u64 = 1_000_000;

/// Formats the lines of calls itself, and leaves all others to `rest`.
pub(super) struct CallLines<F> {
    pub(super) format: Format,
    pub(super) rest: F,
}

/// What a thread keeps from line to line.
#[derive(Default)]
struct Buffer {
    line: String,
    /// A second since 1970, and its date and time.
    second: Option<(u64, String)>,
    /// The fields of every place in the source that writes such lines.
    places: Vec<Place>,
}

/// A place in the source, and its fields' names as they stand in a line.
struct Place {
    callsite: Identifier,
    format: Format,
    names: Vec<Box<str>>,
}

thread_local! {
    static BUFFER: RefCell<Buffer> = RefCell::default();
}

impl<S, N, F> FormatEvent<S, N> for CallLines<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let target = event.metadata().target();
        if !OF_CALLS.contains(&target) {
            return self.rest.format_event(ctx, writer, event);
        }
        BUFFER.with(|buffer| match buffer.try_borrow_mut() {
            Ok(mut buffer) => {
                buffer.write(self.format, event);
                writer.write_str(&buffer.line)
            }
            // A field whose value writes a line itself; there is none.
            Err(_) => self.rest.format_event(ctx, writer, event),
        })
    }
}

impl Buffer {
    fn write(&mut self, format: Format, event: &Event<'_>) {
        let Self { line, second, places } = self;
        let names = names_of(places, format, event.metadata());
        let (target, level) = (event.metadata().target(), event.metadata().level());
        let micros = clock::unix_us();
        line.clear();
        match format {
            Format::Text => {
                push_time(line, second, micros);
                pad(line, level.as_str(), LEVEL_WIDTH);
                line.push(' ');
                line.push_str(target);
                line.push(':');
                event.record(&mut Fields { line, format, names });
            }
            Format::Json => {
                line.push_str("{\"timestamp\":\"");
                push_time(line, second, micros);
                line.push_str("\",\"level\":\"");
                line.push_str(level.as_str());
                line.push('"');
                event.record(&mut Fields { line, format, names });
                line.push_str(",\"target\":\"");
                line.push_str(target);
                line.push_str("\"}");
            }
        }
        line.push('\n');
    }
}

fn names_of<'a>(places: &'a mut Vec<Place>, format: Format, of: &Metadata<'_>) -> &'a [Box<str>] {
    let callsite = of.callsite();
    let known = places.iter().position(|place| place.callsite == callsite && place.format == format);
    let at = known.unwrap_or_else(|| {
        let name = |field: Field| match format {
            Format::Text => format!(" {field}="),
            Format::Json => format!(",\"{field}\":"),
        };
        let names = of.fields().iter().map(|field| name(field).into()).collect();
        places.push(Place { callsite, format, names });
        places.len() - 1
    });
    places.get(at).map_or(&[], |place| &place.names)
}

/// A level stands right in so many columns, and one before them.
const LEVEL_WIDTH: usize = 6;

fn pad(line: &mut String, text: &str, width: usize) {
    (text.len()..width).for_each(|_| line.push(' '));
    line.push_str(text);
}

/// Such as `2026-11-30T10:04:04.151892Z`.
fn push_time(line: &mut String, known: &mut Option<(u64, String)>, micros: u64) {
    let (second, fraction) = (micros / MICROS_OF_A_SECOND, micros % MICROS_OF_A_SECOND);
    let (_, text) = match known {
        Some(known) if known.0 == second => known,
        known => {
            let at = UNIX_EPOCH + Duration::from_secs(second);
            let mut text = humantime::format_rfc3339_seconds(at).to_string();
            text.pop();
            known.insert((second, text))
        }
    };
    line.push_str(text);
    line.push('.');
    let mut digits = itoa::Buffer::new();
    line.push_str(digits.format(fraction + MICROS_OF_A_SECOND).get(1..).unwrap_or_default());
    line.push('Z');
}

/// Whether neither Rust's nor JSON's way to write a text in quotes would change it.
fn is_plain(text: &str) -> bool {
    // Looks at all of them, many at a time.
    text.bytes()
        .fold(true, |plain, byte| plain & matches!(byte, b' '..=b'~') & (byte != b'"') & (byte != b'\\'))
}

/// Fields behind what is in the line: as `name=value`, or as members of an object.
struct Fields<'a> {
    line: &'a mut String,
    format: Format,
    /// By the field's index.
    names: &'a [Box<str>],
}

impl Fields<'_> {
    fn name(&mut self, field: &Field) {
        self.line.push_str(self.names.get(field.index()).map_or("", AsRef::as_ref));
    }

    fn number(&mut self, field: &Field, number: impl itoa::Integer) {
        self.name(field);
        self.line.push_str(itoa::Buffer::new().format(number));
    }
}

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.name(field);
        if is_plain(value) {
            self.line.push('"');
            self.line.push_str(value);
            self.line.push('"');
            return;
        }
        // Writing to memory does not fail.
        let _written = match self.format {
            Format::Text => write!(self.line, "{value:?}"),
            Format::Json => write!(self.line, "{}", serde_json::Value::from(value)),
        };
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.number(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.number(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.name(field);
        self.line.push_str(if value { "true" } else { "false" });
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match self.format {
            Format::Text => {
                self.name(field);
                let _written = write!(self.line, "{value:?}");
            }
            Format::Json => self.record_str(field, &format!("{value:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::IpAddr;
    use std::sync::{Arc, Mutex};

    use tracing::subscriber::with_default;
    use tracing_subscriber::fmt::MakeWriter;
    use tracing_subscriber::fmt::format::{self, JsonFields};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Kept {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    impl Kept {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    /// What both formatters make of the same events.
    fn both(format: Format, log: impl Fn()) -> (String, String) {
        let (ours, theirs) = (Kept::default(), Kept::default());
        let builder = |kept: &Kept| tracing_subscriber::fmt().with_writer(kept.clone());
        match format {
            Format::Text => {
                let lines = CallLines { format, rest: format::format() };
                with_default(builder(&ours).event_format(lines).finish(), &log);
                with_default(builder(&theirs).finish(), &log);
            }
            Format::Json => {
                let lines = CallLines { format, rest: format::format().json().flatten_event(true) };
                let ours = builder(&ours).event_format(lines).fmt_fields(JsonFields::new()).finish();
                with_default(ours, &log);
                with_default(builder(&theirs).json().flatten_event(true).finish(), &log);
            }
        }
        (ours.text(), theirs.text())
    }

    /// Without the fraction and second in which each was written.
    fn timeless(lines: &str) -> String {
        let stamp = regex::Regex::new(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z").unwrap();
        assert_eq!(stamp.find_iter(lines).count(), lines.lines().count(), "each line has its time: {lines}");
        stamp.replace_all(lines, "<time>").into_owned()
    }

    #[test]
    fn lines_of_calls_are_those_of_the_crate_byte_for_byte() {
        let texts = [
            "",
            "plain",
            "a b",
            "q\"uo\\te",
            "tab\tnew\nline",
            "\u{1b}[31m",
            "\u{e9}\u{4e2d}",
            "\u{7f}\u{85}\u{2028}'",
        ];
        for format in [Format::Text, Format::Json] {
            let (ours, theirs) = both(format, || {
                for text in texts {
                    let caller: IpAddr = "::ffff:192.0.2.1".parse().unwrap();
                    tracing::info!(
                        target: "access",
                        request_id = text,
                        owned = text.to_owned(),
                        caller = Some(display(caller)),
                        none = None::<&str>,
                        status = 200_u16,
                        attempts = 3_u32,
                        most = u64::MAX,
                        least = i64::MIN,
                        zero = 0_u64,
                        yes = true,
                        no = false,
                        debug = ?text,
                    );
                    tracing::info!(target: "decision", reason = text, elapsed_ms = 10_u64);
                    tracing::warn!(target: "decision", reason = text);
                    tracing::info!(target: "other", reason = text, "a message");
                }
            });
            assert_eq!(timeless(&ours), timeless(&theirs));
            assert_eq!(ours.lines().count(), texts.len() * 4);
        }
    }

    #[test]
    fn a_time_is_that_of_rfc_3339_with_six_digits() {
        let mut known = None;
        for (micros, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (1_000_001, "1970-01-01T00:00:01.000001Z"),
            (1_999_999, "1970-01-01T00:00:01.999999Z"),
            (951_782_400_000_000, "2000-02-29T00:00:00.000000Z"),
            (1_796_083_199_900_000, "2026-11-30T23:59:59.900000Z"),
            (1_796_083_200_000_000, "2026-12-01T00:00:00.000000Z"),
        ] {
            let mut line = String::new();
            push_time(&mut line, &mut known, micros);
            assert_eq!(line, text);
        }
    }
}
