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

/// Starts logging. `RUST_LOG` overrides the default filter.
pub fn start(format: Format) {
    // Pingora logs every retry and every caller that leaves; we have our own lines for those.
    let default = "info,pingora_core=warn,pingora_proxy=error,pingora_load_balancing=warn";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let writer = BoxMakeWriter::new(std::io::stderr);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let started = match format {
        Format::Text => builder.try_init(),
        Format::Json => builder.json().flatten_event(true).try_init(),
    };
    // A second start in one process (tests) keeps the first.
    let _already = started;
}
