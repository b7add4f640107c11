//! Structured lines to standard error, as text or JSON.
//!
//! Targets: `access` (one line a call), `decision` (one line an attempt), everything else by module.
//! Never a key, a credential, a prompt or an answer.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// How lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For machines.
    Json,
}

/// Libraries whose finer lines show heads, and with them keys and credentials: nothing raises these.
const QUIET: [&str; 4] = ["pingora_core=warn", "pingora_proxy=error", "h2=warn", "hyper=warn"];

/// Starts logging. `RUST_LOG` overrides the default filter.
pub fn start(format: Format) {
    let default = "info,pingora_load_balancing=warn";
    let mut filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    for directive in QUIET {
        if let Ok(directive) = directive.parse() {
            filter = filter.add_directive(directive);
        }
    }
    let writer = BoxMakeWriter::new(std::io::stderr);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let started = match format {
        Format::Text => builder.try_init(),
        Format::Json => builder.json().flatten_event(true).try_init(),
    };
    // A second start in one process (tests) keeps the first.
    let _already = started;
}
