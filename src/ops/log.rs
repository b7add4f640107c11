//! Structured lines to standard error, as text or JSON.
//!
//! Targets: `access` (one line a call), `decision` (one line an attempt; of level DEBUG where the first one served),
//! everything else by module.
//! Never a key, a credential, a prompt or an answer.

use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{FilterExt as _, filter_fn};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

use super::call_lines::CallLines;
use super::lines::Lines;
pub use super::lines::Writing;
use super::tracker::Alarms;

/// How lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For machines.
    Json,
}

/// Libraries whose finer lines show heads, and with them keys and credentials.
const TALKATIVE: [&str; 6] = ["pingora", "h2", "hyper", "reqwest", "rustls", "ureq"];

/// A part of Pingora that takes a caller who leaves or speaks no HTTP for an error of ours: anybody could
/// fill the log. Our own lines and metrics say what there is to say.
const CALLERS_FAULTS: &str = "pingora_core::apps";

/// Whether a line may be written, whatever `RUST_LOG` says: `RUST_LOG=trace` must not show a key.
fn is_discreet(line: &Metadata<'_>) -> bool {
    let is_of = |part: &&str| line.target().starts_with(*part);
    if is_of(&CALLERS_FAULTS) {
        return false;
    }
    !TALKATIVE.iter().any(is_of) || *line.level() <= Level::WARN
}

/// Starts logging. `RUST_LOG` overrides the default filter. Lines are written as long as the answer is kept; `alarms` see
/// them whatever the filter says.
pub fn start(format: Format, alarms: Option<Alarms>) -> Writing {
    let default = "info,pingora_load_balancing=warn";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // Without the hint every line of every library that nobody wants would be made and then dropped.
    let finest = filter.max_level_hint().unwrap_or(LevelFilter::TRACE);
    let filter = filter.and(filter_fn(is_discreet).with_max_level_hint(finest));
    let (lines, writing) = Lines::start(std::io::stderr());
    let lines = tracing_subscriber::fmt::layer().with_writer(lines);
    let registry = tracing_subscriber::registry().with(alarms);
    let started = match format {
        Format::Text => {
            let lines = lines.map_event_format(|rest| CallLines { format, rest });
            registry.with(lines.with_filter(filter)).try_init()
        }
        Format::Json => {
            let lines = lines.json().flatten_event(true).map_event_format(|rest| CallLines { format, rest });
            registry.with(lines.with_filter(filter)).try_init()
        }
    };
    // A second start in one process (tests) keeps the first.
    let _already = started;
    writing
}
