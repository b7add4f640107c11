//! What earlier boots left behind.
//!
//! A boot is dead when its lock is free: two processes may run over one folder during an upgrade.
//! A torn record at the end of the last segment is what a crash leaves and ends the reading; a bad
//! one anywhere else is damage, and is refused rather than skipped. Behind what the log says it has of
//! the ring comes what the ring has.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::record::{BadFrame, Hold, Record, Settled, decode};

/// A boot whose process is gone. Holds its lock, so that nobody else replays it.
pub struct Dead {
    /// The boot's number.
    pub boot: i64,
    folder: PathBuf,
    _lock: File,
}

/// What a dead boot's journal says.
#[derive(Debug, Default)]
pub struct Replayed {
    /// Holds that ended; the ledger may have them already.
    pub settled: Vec<Settled>,
    /// Holds that never ended, with what they had cost so far, in nano-dollars.
    pub orphans: Vec<(Hold, i64)>,
}

impl Replayed {
    /// What records say when they are read in the order in which they were written.
    #[must_use]
    pub fn of(records: impl IntoIterator<Item = Record>) -> Self {
        let mut open: HashMap<u128, (Hold, i64)> = HashMap::new();
        let mut settled = HashMap::new();
        for record in records {
            match record {
                Record::Hold(hold) | Record::PooledHold(_, hold) => {
                    open.entry(hold.id).or_insert((hold, 0));
                }
                Record::Progress { id, cost } => {
                    if let Some((_, so_far)) = open.get_mut(&id) {
                        *so_far = cost.max(*so_far);
                    }
                }
                Record::Settled(end) | Record::PooledSettled(_, end) => {
                    settled.entry(end.id).or_insert(end);
                }
                Record::Probe | Record::Drained { .. } => {}
            }
        }
        open.retain(|id, _| !settled.contains_key(id));
        let mut settled: Vec<_> = settled.into_values().collect();
        settled.sort_by_key(|s| s.id);
        let mut orphans: Vec<_> = open.into_values().collect();
        orphans.sort_by_key(|(hold, _)| hold.id);
        Self { settled, orphans }
    }
}

/// All dead boots under `root`, oldest first.
///
/// # Errors
/// When the folder cannot be read.
pub fn dead_boots(root: &Path) -> io::Result<Vec<Dead>> {
    let mut dead = vec![];
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(dead),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let Some(boot) = name.to_str().and_then(|n| n.parse().ok()) else { continue };
        let folder = entry.path();
        let lock = File::create(folder.join("lock"))?;
        match lock.try_lock() {
            Ok(()) => dead.push(Dead { boot, folder, _lock: lock }),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    dead.sort_by_key(|d| d.boot);
    Ok(dead)
}

impl Dead {
    /// Reads the boot's journal.
    ///
    /// # Errors
    /// When a file cannot be read or is damaged before its end.
    pub fn replay(&self) -> io::Result<Replayed> {
        let mut segments: Vec<PathBuf> = fs::read_dir(&self.folder)?
            .filter_map(|entry| entry.ok().map(|e| e.path()))
            .filter(|path| path.extension().is_some_and(|e| e == "log"))
            .collect();
        segments.sort();
        let mut records = vec![];
        for (index, path) in segments.iter().enumerate() {
            records.extend(read_segment(path, index + 1 == segments.len())?);
        }
        let drained = records.iter().filter_map(|record| match record {
            Record::Drained { upto } => Some(*upto),
            _ => None,
        });
        let drained = drained.max().unwrap_or_default();
        records.extend(super::ring::read(&self.folder, drained)?);
        Ok(Replayed::of(records))
    }

    /// Deletes the boot's folder; only once the ledger has everything.
    ///
    /// # Errors
    /// When it cannot be deleted.
    pub fn forget(self) -> io::Result<()> {
        fs::remove_dir_all(&self.folder)
    }
}

fn read_segment(path: &Path, last: bool) -> io::Result<Vec<Record>> {
    let bytes = fs::read(path)?;
    let mut records = vec![];
    let mut at = 0;
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        match decode(rest) {
            Ok((record, length)) => {
                records.push(record);
                at += length;
            }
            // A crash tears the last record; a power cut may also leave the last sectors unwritten.
            Err(BadFrame::Torn | BadFrame::Damaged) if last && no_record_follows(rest) => {
                tracing::warn!(path = %path.display(), at, "the journal ends in a torn record, as after a crash");
                break;
            }
            Err(error) => {
                let message = format!(
                    "{}: {error} at byte {at}, with sound records behind it; keep a copy, then see docs/runbooks/journal-damaged.md",
                    path.display()
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
        }
    }
    Ok(records)
}

/// Whether nothing behind a bad frame looks like a sound one.
fn no_record_follows(rest: &[u8]) -> bool {
    (1..rest.len()).all(|skip| rest.get(skip..).is_none_or(|tail| decode(tail).is_err()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::record::encode;
    use super::*;

    fn hold(id: u128) -> Record {
        Record::Hold(Hold {
            id,
            account: 1,
            amount: 100,
            at_ms: 0,
            request: String::new(),
            model: String::new(),
            key: [0; 32],
            price_version: 0,
            pool: None,
        })
    }

    fn write(folder: &Path, name: &str, records: &[Record], tail: &[u8]) {
        let mut bytes = vec![];
        records.iter().for_each(|r| encode(r, &mut bytes).unwrap());
        bytes.extend_from_slice(tail);
        File::create(folder.join(name)).unwrap().write_all(&bytes).unwrap();
    }

    fn boot_with(segments: &[(&[Record], &[u8])]) -> (tempfile::TempDir, io::Result<Replayed>) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("000000000007");
        fs::create_dir(&folder).unwrap();
        for (index, (records, tail)) in segments.iter().enumerate() {
            write(&folder, &format!("{index:08}.log"), records, tail);
        }
        let dead = dead_boots(root.path()).unwrap();
        assert_eq!(dead[0].boot, 7);
        let replayed = dead[0].replay();
        (root, replayed)
    }

    #[test]
    fn an_orphan_keeps_its_last_progress_over_segments() {
        let first = [hold(1), hold(2), Record::Progress { id: 1, cost: 5 }];
        let second = [hold(1), Record::Progress { id: 1, cost: 9 }];
        let (_root, replayed) = boot_with(&[(&first, b""), (&second, b"")]);
        let orphans: Vec<_> = replayed.unwrap().orphans.iter().map(|(h, cost)| (h.id, *cost)).collect();
        assert_eq!(orphans, [(1, 9), (2, 0)]);
    }

    #[test]
    fn a_torn_tail_ends_the_reading_and_damage_before_it_is_refused() {
        let (_root, torn) = boot_with(&[(&[hold(1)], b"\x20\x00\x00\x00abcd")]);
        assert_eq!(torn.unwrap().orphans.len(), 1);
        let (_root, early) = boot_with(&[(&[hold(1)], b"\x20\x00\x00\x00abcd"), (&[hold(2)], b"")]);
        assert!(early.is_err(), "a bad record in an earlier segment");
        let mut sound = vec![];
        encode(&hold(3), &mut sound).unwrap();
        let inside = [b"\x04\x00\x00\x00\x00\x00\x00\x00xxxx".as_slice(), &sound].concat();
        let (_root, damaged) = boot_with(&[(&[hold(1)], &inside)]);
        assert!(damaged.is_err(), "a bad record with a sound one behind it");
    }

    #[test]
    fn a_living_boot_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("000000000001");
        fs::create_dir(&folder).unwrap();
        let lock = File::create(folder.join("lock")).unwrap();
        lock.lock().unwrap();
        assert!(dead_boots(root.path()).unwrap().is_empty());
    }
}
