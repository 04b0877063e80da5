//! Detection of a forked child: a page that the kernel zeroes in children (`MADV_WIPEONFORK`).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys::{Errno, Res};

/// The page.
#[derive(Debug)]
pub(super) struct Guard(NonNull<AtomicU32>);

// SAFETY: the page is mapped while the guard exists, and holds one atomic.
unsafe impl Send for Guard {}
// SAFETY: as above.
unsafe impl Sync for Guard {}

const LEN: usize = 4096;

impl Guard {
    pub(super) fn new() -> Res<Self> {
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
        // unmapped if a later step fails
        let guard = Self(NonNull::new(page.cast()).ok_or(Errno(libc::ENOMEM))?);
        // SAFETY: the mapping made above.
        if unsafe { libc::madvise(page, LEN, libc::MADV_WIPEONFORK) } != 0 {
            return Err(Errno::last());
        }
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the page is aligned, mapped while the guard exists, and holds one atomic.
        unsafe { self.0.as_ref() }
    }

    #[inline]
    pub(super) fn forked(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 0
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // SAFETY: the guard's own mapping, to which no reference is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), LEN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guard_that_is_dropped_leaves_no_page() {
        let guard = Guard::new().unwrap();
        assert!(!guard.forked());
        let page = guard.0.as_ptr().cast();
        let is_mapped = || {
            let mut present = 0;
            // SAFETY: one byte for the one page; the call reads no memory of the page.
            unsafe { libc::mincore(page, LEN, &raw mut present) == 0 }
        };
        assert!(is_mapped());
        drop(guard);
        assert!(!is_mapped());
    }
}
