//! What a node keeps on disk to start without Redis and Postgres: files that are replaced whole, or grow by lines.
//!
//! They are copies. A file that is missing, damaged or of another version is none, which only costs a cold start.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// For its owner alone.
const MODE: u32 = 0o600;

/// Replaces a file: a reader sees the old text or the new one, also after a crash.
///
/// # Errors
/// When it cannot be written.
pub(super) fn replace(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let fresh = beside(path);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(MODE).open(&fresh)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Adds a line to a file.
///
/// # Errors
/// When it cannot be written.
pub(super) fn add_line(path: &Path, line: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).mode(MODE).open(path)?;
    file.write_all(&[line, b"\n"].concat())?;
    file.sync_data()
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}
