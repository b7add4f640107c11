//! The allocator of the binary, and what makes it give memory back.
//!
//! A request makes some hundred small allocations and frees them on another thread now and then: mimalloc does that
//! at a fraction of glibc's price, and glibc keeps what a burst took (`docs/performance.md`). But mimalloc 3 as it
//! comes keeps it too, for two reasons:
//!
//! - A page that was full belongs to nobody. When its first block is freed, the thread that made it takes it back;
//!   what other threads free in it from then on is seen when that thread allocates again, and after a burst it
//!   sleeps. So nobody takes a page back before it is wanted: then the last free gives it to the system.
//! - Free pages go a second later, but only when another page is freed, and after a burst none is. So a thread
//!   looks.
//!
//! The crate asks mimalloc for an alignment every time, which makes it take a longer road, and more memory where a size
//! is no power of two. What any block has need not be asked for: see [`ordinary`].

use std::ffi::c_int;
use std::time::Duration;

#[cfg(not(feature = "count-allocations"))]
#[global_allocator]
static ALLOCATOR: ordinary::Ordinary = ordinary::Ordinary;

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// `mi_option_page_reclaim_on_free`; the crate has no name for it.
const PAGE_RECLAIM_ON_FREE: c_int = 35;
// It has that place among so many options. With another version of mimalloc, look in its `mimalloc.h`.
const _: () = assert!(libmimalloc_sys::_mi_option_last == 47, "mimalloc's options have moved");
/// Free pages go to the system after mimalloc's `purge_delay` of one second, and this.
const LOOK: Duration = Duration::from_secs(1);

/// Runs before the allocator's own constructor, which has no priority: by `main` its first pages are there, and would
/// be two huge ones.
#[used]
#[unsafe(link_section = ".init_array.00099")]
#[expect(unsafe_code, reason = "nothing else runs before the allocator does")]
// SAFETY: the section holds pointers to functions of this type; this one neither allocates nor unwinds.
static BEFORE_THE_ALLOCATOR: extern "C" fn() = decline_huge_pages;

/// The allocator asks for huge pages; one that an idle stream's buffer lies in would be 2 MiB of memory. A kernel that
/// cannot do without them only costs more.
extern "C" fn decline_huge_pages() {
    let _as_before = rustix::thread::disable_transparent_huge_pages(true);
}

/// To be called before there are threads.
pub(crate) fn settle() {
    keep_no_pages();
    // Without the thread a burst's memory stays until the next calls; nothing else depends on it.
    let _as_before = std::thread::Builder::new().name("memory".to_owned()).spawn(|| {
        loop {
            std::thread::sleep(LOOK);
            look();
        }
    });
}

/// The environment's `MIMALLOC_PAGE_RECLAIM_ON_FREE` counts for more.
#[expect(unsafe_code, reason = "the crate has no safe way to the allocator's options")]
fn keep_no_pages() {
    // SAFETY: it writes one of the allocator's settings; no other thread runs that could read it meanwhile.
    unsafe { libmimalloc_sys::mi_option_set_default(PAGE_RECLAIM_ON_FREE, -1) };
}

/// Gives back what has been free for long enough, of all threads; of this one's own there is nothing.
#[expect(unsafe_code, reason = "the crate has no safe way to the allocator's collection")]
fn look() {
    // SAFETY: it may be called at any time, from any thread, and moves nothing that is in use.
    unsafe { libmimalloc_sys::mi_collect(false) };
}

/// Asks for an alignment only where it has to, as Rust's own allocator does with `malloc`.
#[expect(
    unsafe_code,
    reason = "an allocator is unsafe by its trait; this one only chooses between two functions"
)]
mod ordinary {
    use std::alloc::{GlobalAlloc, Layout};

    use libmimalloc_sys::{mi_malloc, mi_realloc, mi_zalloc};
    use mimalloc::MiMalloc;

    /// Of every block that is as large: `MI_MAX_ALIGN_SIZE` in mimalloc's `types.h`. Smaller ones have their own size, 8.
    const ALIGNED: usize = 16;

    pub(super) struct Ordinary;

    /// Whether a block of this size is aligned without being asked to be.
    const fn is_ordinary(size: usize, align: usize) -> bool {
        align <= ALIGNED && align <= size
    }

    // SAFETY: `mi_free` takes blocks of all of mimalloc's functions, and `mi_realloc` may be given any of them; both kinds
    // are aligned as the layout says, by `is_ordinary` or because it was asked for.
    unsafe impl GlobalAlloc for Ordinary {
        #[inline]
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            if is_ordinary(layout.size(), layout.align()) {
                // SAFETY: it may be asked for any size.
                unsafe { mi_malloc(layout.size()) }.cast()
            } else {
                // SAFETY: the caller's promises are handed on.
                unsafe { MiMalloc.alloc(layout) }
            }
        }

        #[inline]
        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            if is_ordinary(layout.size(), layout.align()) {
                // SAFETY: it may be asked for any size.
                unsafe { mi_zalloc(layout.size()) }.cast()
            } else {
                // SAFETY: the caller's promises are handed on.
                unsafe { MiMalloc.alloc_zeroed(layout) }
            }
        }

        #[inline]
        unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            if is_ordinary(size, layout.align()) {
                // SAFETY: the caller says that the block is one of ours.
                unsafe { mi_realloc(block.cast(), size) }.cast()
            } else {
                // SAFETY: the caller's promises are handed on.
                unsafe { MiMalloc.realloc(block, layout, size) }
            }
        }

        #[inline]
        unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
            // SAFETY: the caller's promises are handed on.
            unsafe { MiMalloc.dealloc(block, layout) }
        }
    }
}

/// The same allocator in a build that counts what it is asked for, for `scripts/bench`.
#[cfg(feature = "count-allocations")]
#[expect(unsafe_code, reason = "an allocator is unsafe by its trait; this one only counts")]
mod counting {
    use std::alloc::{GlobalAlloc, Layout};

    use tollgate::ops::allocations::count;

    use super::ordinary::Ordinary;

    pub(super) struct Counting;

    // SAFETY: every call is handed on as it came, and `count` neither allocates nor unwinds.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            count(layout.size());
            // SAFETY: the caller's promises are handed on.
            unsafe { Ordinary.alloc(layout) }
        }

        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            count(layout.size());
            // SAFETY: as above.
            unsafe { Ordinary.alloc_zeroed(layout) }
        }

        unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            count(size);
            // SAFETY: as above.
            unsafe { Ordinary.realloc(block, layout, size) }
        }

        unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
            // SAFETY: as above.
            unsafe { Ordinary.dealloc(block, layout) }
        }
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "an allocator can be asked in no other way")]
mod tests {
    use std::alloc::{GlobalAlloc as _, Layout};

    use super::ordinary::Ordinary;

    /// Sizes around all classes of small and medium blocks, and huge ones.
    fn sizes() -> impl Iterator<Item = usize> {
        let around = |power: u32| [-1, 0, 1].map(|more| (1_usize << power).saturating_add_signed(more));
        (1..1300).chain((11..24).flat_map(around))
    }

    #[test]
    fn every_block_is_aligned_as_it_was_asked_for_and_keeps_what_is_in_it_when_it_moves() {
        for align in [1, 2, 4, 8, 16, 32, 64, 4096] {
            let mut kept = vec![];
            for size in sizes() {
                let layout = Layout::from_size_align(size, align).unwrap();
                // SAFETY: no layout is empty, each block is written within its size and freed as it was last asked for.
                unsafe {
                    let block =
                        if size % 2 == 0 { Ordinary.alloc(layout) } else { Ordinary.alloc_zeroed(layout) };
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{size} {align}");
                    assert!(size % 2 == 0 || *block.add(size - 1) == 0, "{size} {align}");
                    block.write_bytes(7, size);
                    let grown = Ordinary.realloc(block, layout, size * 3);
                    assert!(grown.addr().is_multiple_of(align), "{size} to {} {align}", size * 3);
                    assert!((0..size).all(|at| *grown.add(at) == 7), "{size} to {} {align}", size * 3);
                    let layout = Layout::from_size_align(size * 3, align).unwrap();
                    let shrunk = Ordinary.realloc(grown, layout, size);
                    assert!(shrunk.addr().is_multiple_of(align), "{size} again {align}");
                    kept.push((shrunk, size));
                }
            }
            for (block, size) in kept {
                // SAFETY: as above.
                unsafe { Ordinary.dealloc(block, Layout::from_size_align(size, align).unwrap()) };
            }
        }
    }
}
