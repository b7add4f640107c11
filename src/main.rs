//! `tollgate`: see `tollgate --help`.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use tollgate::cli::{Cli, EXIT_CONFIG};
use tollgate::config::Faults;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to do where even this cannot be written.
            let _unwritable = writeln!(std::io::stderr(), "tollgate: {error:#}");
            if error.is::<Faults>() { ExitCode::from(EXIT_CONFIG) } else { ExitCode::FAILURE }
        }
    }
}
