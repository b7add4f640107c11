//! `tollgate`: see `tollgate --help`.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use tollgate::cli::{Cli, EXIT_CONFIG, EXIT_CUT};
use tollgate::config::Faults;
use tollgate::serve::Left;

/// A request makes some hundred small allocations and frees them on another thread now and then; glibc's
/// allocator also keeps what a burst of streams took (`docs/performance.md`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // The allocator asks for huge pages; one that an idle stream's buffer lies in would be 2 MiB of memory. A
    // kernel that cannot do without them only costs more.
    let _as_before = rustix::thread::disable_transparent_huge_pages(true);
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
