//! `tollgate`: see `tollgate --help`.

mod allocator;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use tollgate::cli::{Cli, EXIT_CONFIG, EXIT_CUT};
use tollgate::config::Faults;
use tollgate::serve::Left;

fn main() -> ExitCode {
    allocator::settle();
    match Cli::parse().run() {
        Ok(Left::Drained) => ExitCode::SUCCESS,
        Ok(Left::Cut(_)) => ExitCode::from(EXIT_CUT),
        Err(error) => {
            // Nothing is left to do where even this cannot be written.
            let _unwritable = writeln!(std::io::stderr(), "tollgate: {error:#}");
            if error.is::<Faults>() { ExitCode::from(EXIT_CONFIG) } else { ExitCode::FAILURE }
        }
    }
}
