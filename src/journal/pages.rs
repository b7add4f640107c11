//! A file's pages, mapped: what is written here is in the kernel at once, without a system call.
//!
//! The file has all its blocks before it is mapped and keeps its length, so a write needs nothing of the disk but that
//! the kernel marks the page as dirty, once after each time that it has cleaned it. That may wait for a disk that is
//! slow, so the thread that writes the journal does it ahead ([`Touch`]): each page has one byte that belongs to it
//! alone. What remains: a page that the kernel has cleaned within the last tick, or since the process fell idle.
//!
//! A page that the disk cannot give any more (a file system that shut itself down, a hand that cut the file) is a
//! SIGBUS, which would end the process and every stream in it. Its handler puts a page of plain memory in that place
//! and says so ([`Pages::is_sound`]): from then on nobody trusts these pages.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use memmap2::{MmapOptions, MmapRaw};

/// A page's bytes. Where the machine's pages are larger, some are touched more than once.
pub(super) const PAGE_BYTES: usize = 4096;
/// Of them those that hold data; the last one is touched.
pub(super) const DATA_BYTES: usize = PAGE_BYTES - 1;
/// Mappings that a process may have at once. It has one; a process that runs tests has more.
const MAPPINGS_MAX: usize = 64;

/// What the handler of SIGBUS knows. A place with no length is free.
static MAPPINGS: [Mapping; MAPPINGS_MAX] = [const { Mapping::none() }; MAPPINGS_MAX];
/// Whose signal it is when it is not ours; the size of the machine's pages.
static BEFORE: OnceLock<(libc::sigaction, usize)> = OnceLock::new();

struct Mapping {
    from: AtomicUsize,
    bytes: AtomicUsize,
    broken: AtomicBool,
}

/// The pages, for the one who writes them.
pub(super) struct Pages {
    mapped: Arc<Mapped>,
}

/// The pages, for the thread that touches them.
pub(super) struct Touch {
    mapped: Arc<Mapped>,
}

struct Mapped {
    map: MmapRaw,
    known: &'static Mapping,
}

impl Pages {
    /// Makes the file, with so many pages of zeros, and maps it.
    ///
    /// # Errors
    /// When the disk has no room, the file system maps nothing, or as many are mapped as may be.
    pub(super) fn create(path: &Path, pages: usize) -> io::Result<(Self, Touch)> {
        let mut file = OpenOptions::new().create_new(true).read(true).write(true).open(path)?;
        for _ in 0..pages {
            file.write_all(&[0; PAGE_BYTES])?;
        }
        // Blocks that are only promised would be looked for when a page is first written.
        file.sync_all()?;
        let map = MmapOptions::new().len(pages * PAGE_BYTES).map_raw(&file)?;
        handle_sigbus()?;
        let known = Mapping::register(&map).ok_or_else(|| io::Error::other("too many files are mapped"))?;
        let mapped = Arc::new(Mapped { map, known });
        let touch = Touch { mapped: Arc::clone(&mapped) };
        touch.all();
        // Else the kernel may drop a clean page, and read it again when it is written. It is allowed to refuse.
        let _refused = mapped.map.lock();
        Ok((Self { mapped }, touch))
    }

    /// Bytes of data that fit.
    pub(super) fn data_bytes(&self) -> usize {
        self.mapped.map.len() / PAGE_BYTES * DATA_BYTES
    }

    /// Writes `bytes` into one page. What would reach over its data is left out.
    pub(super) fn write(&mut self, page: usize, at: usize, bytes: &[u8]) {
        let fits = bytes.len().min(DATA_BYTES.saturating_sub(at));
        if page < self.mapped.map.len() / PAGE_BYTES {
            self.mapped.put(page * PAGE_BYTES + at, bytes.get(..fits).unwrap_or_default());
        }
    }

    /// Whether everything that was written so far is in the file's pages.
    pub(super) fn is_sound(&self) -> bool {
        !self.mapped.known.broken.load(Ordering::Acquire)
    }
}

impl Touch {
    /// Makes the kernel mark all pages as dirty now, as far as they are not. May wait for the disk.
    pub(super) fn all(&self) {
        for page in 0..self.mapped.map.len() / PAGE_BYTES {
            self.mapped.touch(page * PAGE_BYTES + DATA_BYTES);
        }
    }
}

impl Mapped {
    #[expect(unsafe_code, reason = "a file that other processes could map is no slice")]
    fn put(&self, at: usize, bytes: &[u8]) {
        debug_assert!(at + bytes.len() <= self.map.len());
        // SAFETY: the range is in the mapping, as the one caller has looked, and it is data: only [`Pages`], which
        // there is one of and which is borrowed mutably for this, ever reaches for it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_mut_ptr().add(at), bytes.len()) };
    }

    #[expect(unsafe_code, reason = "a file that other processes could map is no slice")]
    fn touch(&self, at: usize) {
        // SAFETY: the byte is in the mapping and no data: nobody reaches for it but this, atomically.
        let byte = unsafe { AtomicU8::from_ptr(self.map.as_mut_ptr().add(at)) };
        byte.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.known.bytes.store(0, Ordering::Release);
    }
}

impl Mapping {
    const fn none() -> Self {
        Self { from: AtomicUsize::new(0), bytes: AtomicUsize::new(0), broken: AtomicBool::new(false) }
    }

    fn register(map: &MmapRaw) -> Option<&'static Self> {
        let free = |known: &&Self| {
            known.bytes.compare_exchange(0, map.len(), Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        let known = MAPPINGS.iter().find(free)?;
        known.broken.store(false, Ordering::Release);
        known.from.store(map.as_ptr().addr(), Ordering::Release);
        Some(known)
    }

    fn of(address: usize) -> Option<&'static Self> {
        MAPPINGS.iter().find(|known| {
            let from = known.from.load(Ordering::Acquire);
            address.checked_sub(from).is_some_and(|at| at < known.bytes.load(Ordering::Acquire))
        })
    }
}

/// Once for the process.
#[expect(unsafe_code, reason = "a signal's handler can be set in no other way")]
fn handle_sigbus() -> io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    // SAFETY: plain data, for which all zeros are valid.
    let (mut ours, mut before): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    ours.sa_sigaction = handler as libc::sighandler_t;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: it only asks who handles it now.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it reads a constant of the machine.
    let page_bytes = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE_BYTES);
    if BEFORE.set((before, page_bytes.max(PAGE_BYTES))).is_err() {
        return Ok(());
    }
    // SAFETY: the handler does only what is allowed inside of one: atomics, `sigaction` and `mmap`.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[expect(unsafe_code, reason = "a signal's handler gets pointers")]
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    let Some((before, page_bytes)) = BEFORE.get() else { return };
    // SAFETY: with SA_SIGINFO the kernel gives a pointer to what it says of this fault.
    let address = unsafe { (*info).si_addr() }.addr();
    if let Some(known) = Mapping::of(address) {
        known.broken.store(true, Ordering::Release);
        let page = address - address % page_bytes;
        // SAFETY: the page lies in a mapping of ours that nobody reads, and is only replaced by another one.
        let put = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(page),
                *page_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if put != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: whoever handled it before does so when the same fault comes again, on return.
    unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_in_the_file_at_once_and_touching_changes_no_data() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("pages");
        let (mut pages, touch) = Pages::create(&path, 2).unwrap();
        pages.write(1, 5, b"hello");
        pages.write(0, DATA_BYTES - 2, b"cut off");
        pages.write(2, 0, b"nowhere");
        touch.all();
        let file = std::fs::read(&path).unwrap();
        assert_eq!((file.len(), pages.data_bytes()), (2 * PAGE_BYTES, 2 * DATA_BYTES));
        assert_eq!(&file[PAGE_BYTES + 5..PAGE_BYTES + 10], b"hello");
        assert_eq!(&file[DATA_BYTES - 2..DATA_BYTES], b"cu");
        let data = file.iter().enumerate().filter(|(at, byte)| at % PAGE_BYTES < DATA_BYTES && **byte != 0);
        assert_eq!(data.count(), 7, "and nothing else");
        assert!(pages.is_sound());
    }

    #[test]
    fn pages_that_the_disk_takes_away_are_missed_and_end_nothing() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("pages");
        let (mut pages, touch) = Pages::create(&path, 4).unwrap();
        let (mut others, _touch) = Pages::create(&root.path().join("others"), 1).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        pages.write(3, 0, b"x");
        assert!(!pages.is_sound());
        pages.write(1, 0, b"x");
        touch.all();
        others.write(0, 0, b"x");
        assert!(others.is_sound(), "only those are broken");
    }
}
