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

use std::ffi::c_int;
use std::time::Duration;

#[cfg(not(feature = "count-allocations"))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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

/// The same allocator in a build that counts what it is asked for, for `scripts/bench`.
#[cfg(feature = "count-allocations")]
#[expect(unsafe_code, reason = "an allocator is unsafe by its trait; this one only counts")]
mod counting {
    use std::alloc::{GlobalAlloc, Layout};

    use mimalloc::MiMalloc;
    use tollgate::ops::allocations::count;

    pub(super) struct Counting;

    // SAFETY: every call is handed on as it came, and `count` neither allocates nor unwinds.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            count(layout.size());
            // SAFETY: the caller's promises are handed on.
            unsafe { MiMalloc.alloc(layout) }
        }

        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            count(layout.size());
            // SAFETY: as above.
            unsafe { MiMalloc.alloc_zeroed(layout) }
        }

        unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            count(size);
            // SAFETY: as above.
            unsafe { MiMalloc.realloc(block, layout, size) }
        }

        unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
            // SAFETY: as above.
            unsafe { MiMalloc.dealloc(block, layout) }
        }
    }
}
