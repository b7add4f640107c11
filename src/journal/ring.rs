//! Where whoever serves a call writes its records: in the kernel at once, without waiting for anybody.
//!
//! A ring of bytes in a file of the boot's folder, mapped ([`super::pages`]). The journal's thread copies what is new
//! to the log at its next tick, says in the log how far it came (`Record::Drained`), and frees the place. So
//! the log and what the ring has from there on are all that there is, whenever the process is killed.
//!
//! A place is counted in bytes since the boot began, and never comes again. `[check u32 LE][frame]`: the frame is that
//! of the log ([`super::record`]), the check is over the place and the frame's header, so that what an earlier lap left
//! here is not taken for a record. Records are written under one lock, one behind the other: whoever is killed while
//! writing leaves a torn one that nobody was told of, and nothing behind it.

use std::io;
use std::path::Path;

use super::pages::{DATA_BYTES, PAGE_BYTES, Pages, Touch};
use super::record::{HEADER_BYTES, Record, decode};

/// Its file in a boot's folder.
const NAME: &str = "ring";
/// 256 KiB: some 800 calls, and the half of it more than a busy core ends in a tick.
pub(super) const PAGES: usize = 64;
/// In front of every frame.
const CHECK_BYTES: usize = 4;

/// The ring, for whoever has the journal's lock.
pub(super) struct Ring {
    pages: Pages,
    /// Where the next record goes.
    head: u64,
    /// Before it everything stands in the log.
    tail: u64,
}

impl Ring {
    /// Makes a boot's ring.
    ///
    /// # Errors
    /// When the disk has no room or cannot map a file.
    pub(super) fn create(folder: &Path) -> io::Result<(Self, Touch)> {
        let (pages, touch) = Pages::create(&folder.join(NAME), PAGES)?;
        Ok((Self { pages, head: 0, tail: 0 }, touch))
    }

    /// Bytes that fit.
    pub(super) fn bytes(&self) -> u64 {
        self.pages.data_bytes() as u64
    }

    /// Bytes that wait to be copied.
    pub(super) fn used(&self) -> u64 {
        self.head - self.tail
    }

    /// Where the next record goes.
    pub(super) fn head(&self) -> u64 {
        self.head
    }

    /// Writes a frame where `spare` bytes are left then. Whether it is in the kernel now.
    pub(super) fn put(&mut self, frame: &[u8], spare: u64) -> bool {
        let bytes = (CHECK_BYTES + frame.len()) as u64;
        if self.used() + bytes + spare > self.bytes() || !self.pages.is_sound() {
            return false;
        }
        self.write(self.head, &check(self.head, frame).to_le_bytes());
        self.write(self.head + CHECK_BYTES as u64, frame);
        self.head += bytes;
        // A page that was lost on the way: then the journal's thread gets it, and says what the disk says.
        self.pages.is_sound()
    }

    /// What is before `place` stands in the log.
    pub(super) fn free(&mut self, place: u64) {
        self.tail = place.clamp(self.tail, self.head);
    }

    fn write(&mut self, place: u64, bytes: &[u8]) {
        let mut at = index(place, self.pages.data_bytes());
        let mut rest = bytes;
        while !rest.is_empty() {
            let (page, within) = (at / DATA_BYTES, at % DATA_BYTES);
            let (now, later) = rest.split_at(rest.len().min(DATA_BYTES - within));
            self.pages.write(page, within, now);
            at = (at + now.len()) % self.pages.data_bytes();
            rest = later;
        }
    }
}

/// What a boot's ring has from `place` on. Nothing where there is none: boots had none before.
///
/// # Errors
/// When it cannot be read.
pub(super) fn read(folder: &Path, place: u64) -> io::Result<Vec<Record>> {
    match std::fs::read(folder.join(NAME)) {
        Ok(file) => Ok(records(&file, place)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(vec![]),
        Err(error) => Err(error),
    }
}

fn records(file: &[u8], place: u64) -> Vec<Record> {
    let data = file.chunks_exact(PAGE_BYTES).flat_map(|page| page.iter().take(DATA_BYTES));
    let mut lap: Vec<u8> = data.copied().collect();
    let first = index(place, lap.len());
    lap.rotate_left(first);
    let (mut records, mut at) = (vec![], 0);
    while let Some((record, bytes)) =
        lap.get(at..).and_then(|rest| record_at(place.wrapping_add(at as u64), rest))
    {
        records.push(record);
        at += bytes;
    }
    records
}

fn record_at(place: u64, bytes: &[u8]) -> Option<(Record, usize)> {
    let (written, frame) = bytes.split_first_chunk()?;
    if u32::from_le_bytes(*written) != check(place, frame) {
        return None;
    }
    let (record, length) = decode(frame).ok()?;
    Some((record, CHECK_BYTES + length))
}

/// Of a frame's header in its place; the header has the content's own.
fn check(place: u64, frame: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&place.to_le_bytes());
    hasher.update(frame.get(..HEADER_BYTES).unwrap_or(frame));
    hasher.finalize()
}

fn index(place: u64, bytes: usize) -> usize {
    usize::try_from(place.checked_rem(bytes as u64).unwrap_or_default()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::super::record::{Hold, encode};
    use super::*;

    fn hold(id: u128, name_bytes: usize) -> Record {
        Record::Hold(Hold {
            id,
            account: 1,
            amount: 100,
            at_ms: 0,
            request: "r".repeat(name_bytes),
            model: String::new(),
            key: [7; 32],
            price_version: 0,
            pool: None,
        })
    }

    fn frame(record: &Record) -> Vec<u8> {
        let mut bytes = vec![];
        encode(record, &mut bytes).unwrap();
        bytes
    }

    fn ring() -> (tempfile::TempDir, Ring) {
        let folder = tempfile::tempdir().unwrap();
        let (ring, _touch) = Ring::create(folder.path()).unwrap();
        (folder, ring)
    }

    #[test]
    fn a_record_is_in_the_file_when_it_is_put_and_not_read_once_it_is_freed() {
        let (folder, mut ring) = ring();
        assert_eq!(read(folder.path(), 0).unwrap(), []);
        let records = [hold(1, 10), hold(2, 0), Record::Progress { id: 1, cost: 3 }];
        records.iter().for_each(|record| assert!(ring.put(&frame(record), 0)));
        assert_eq!(read(folder.path(), 0).unwrap(), records);
        let place = ring.head();
        ring.free(place);
        assert!(ring.put(&frame(&hold(4, 5)), 0));
        assert_eq!(read(folder.path(), place).unwrap(), [hold(4, 5)]);
        assert_eq!(read(folder.path(), place + 1).unwrap(), [], "a place where none begins");
        assert_eq!(read(folder.path().join("none").as_path(), 0).unwrap(), []);
    }

    #[test]
    fn a_full_ring_takes_nothing_and_what_is_in_it_stays() {
        let (folder, mut ring) = ring();
        let mut put = vec![];
        while ring.put(&frame(&hold(put.len() as u128, 500)), 2_000) {
            put.push(hold(put.len() as u128, 500));
        }
        assert!(ring.bytes() - ring.used() < 2_600, "{}", ring.used());
        assert!(ring.put(&frame(&hold(7_777, 500)), 0), "what was spared is there for others");
        put.push(hold(7_777, 500));
        while ring.put(&frame(&hold(8_888, 0)), 0) {
            put.push(hold(8_888, 0));
        }
        assert_eq!(read(folder.path(), 0).unwrap(), put);
    }

    #[test]
    fn a_record_torn_at_any_byte_is_none_whatever_was_there_before() {
        let (folder, mut ring) = ring();
        // A lap of the same records: behind the torn one stand sound frames, of other places.
        while ring.put(&frame(&hold(5, 40)), 0) {}
        let lap = ring.head();
        ring.free(lap);
        assert!(ring.put(&frame(&hold(6, 40)), 0));
        let before = std::fs::read(folder.path().join(NAME)).unwrap();
        let torn = ring.head();
        assert!(ring.put(&frame(&hold(7, 40)), 0));
        let after = std::fs::read(folder.path().join(NAME)).unwrap();
        assert_eq!(records(&after, lap), [hold(6, 40), hold(7, 40)]);
        let differ: Vec<usize> = (0..after.len()).filter(|at| before[*at] != after[*at]).collect();
        assert!(differ.len() > 4, "{differ:?}");
        for count in 0..differ.len() {
            let mut file = before.clone();
            differ[..count].iter().for_each(|at| file[*at] = after[*at]);
            assert_eq!(records(&file, lap), [hold(6, 40)], "{count} bytes of it at {torn}");
        }
    }

    #[test]
    fn a_file_that_was_cut_short_has_what_is_whole() {
        for bytes in [0, 1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 5] {
            assert_eq!(records(&vec![0; bytes], 12_345), [], "{bytes}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_records_and_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..3 * PAGE_BYTES),
            place in any::<u64>(),
        ) {
            prop_assert_eq!(records(&bytes, place), []);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// The model is a queue: what was put and not freed is read, over any number of laps.
        #[test]
        fn it_has_what_was_put_and_not_freed(
            steps in prop::collection::vec((0_usize..1_400, 0_usize..12), 1..700),
        ) {
            let (folder, mut ring) = ring();
            let mut model: VecDeque<(u64, Record)> = VecDeque::new();
            for (id, (name_bytes, frees)) in steps.into_iter().enumerate() {
                let (record, place) = (hold(id as u128, name_bytes), ring.head());
                if ring.put(&frame(&record), 0) {
                    model.push_back((place, record));
                } else {
                    prop_assert!(ring.used() + 1_600 > ring.bytes(), "there was room");
                    prop_assert_eq!(ring.head(), place);
                }
                // Now and then some go, as when the journal's thread has written them.
                if frees == 0 {
                    model.drain(..model.len() / 2);
                    let first = model.front().map_or_else(|| ring.head(), |(place, _)| *place);
                    ring.free(first);
                }
            }
            let from = model.front().map_or_else(|| ring.head(), |(place, _)| *place);
            let expected: Vec<Record> = model.into_iter().map(|(_, record)| record).collect();
            prop_assert_eq!(read(folder.path(), from).unwrap(), expected);
        }
    }
}
