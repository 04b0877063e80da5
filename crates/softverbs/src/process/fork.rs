//! Detection of a forked child: a page that the kernel zeroes in children (`MADV_WIPEONFORK`).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys::{Errno, Res};

/// The page. Lives as long as the process.
#[derive(Debug)]
pub(super) struct Guard(NonNull<AtomicU32>);

// SAFETY: the page is never unmapped and holds one atomic.
unsafe impl Send for Guard {}
// SAFETY: as above.
unsafe impl Sync for Guard {}

impl Guard {
    pub(super) fn new() -> Res<Self> {
        const LEN: usize = 4096;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LEN,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        // SAFETY: the mapping made above.
        if unsafe { libc::madvise(page, LEN, libc::MADV_WIPEONFORK) } != 0 {
            return Err(Errno::last());
        }
        let word = NonNull::new(page.cast::<AtomicU32>()).ok_or(Errno(libc::ENOMEM))?;
        // SAFETY: aligned, writable, and never unmapped.
        unsafe { word.as_ref() }.store(1, Ordering::Relaxed);
        Ok(Self(word))
    }

    #[inline]
    pub(super) fn forked(&self) -> bool {
        // SAFETY: the page is never unmapped, and holds one atomic.
        unsafe { self.0.as_ref() }.load(Ordering::Relaxed) == 0
    }
}
