//! A mapped file that other processes map too.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::sys::{Errno, Res};

/// Shared memory, unmapped on drop unless it is somebody else's. A forked child does not have it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    borrowed: bool,
}

const SHARED: libc::c_int = libc::MAP_SHARED | libc::MAP_NORESERVE;

/// `mmap(2)` from the file's beginning.
///
/// # Safety
/// With `MAP_FIXED` what lies at `at` is given up.
unsafe fn map(
    at: *mut libc::c_void,
    len: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: std::os::fd::RawFd,
) -> Res<*mut libc::c_void> {
    // SAFETY: the caller promises that nothing that is in use is replaced.
    let base = unsafe { libc::mmap(at, len, protection, flags, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    Ok(base)
}

// SAFETY: the memory is reached through atomics and raw copies only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`, which must be sealed at that size or a larger one.
    pub(crate) fn new(file: &OwnedFd, len: usize) -> Res<Self> {
        const BOTH: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: at an address of the kernel's choice.
        let base = unsafe { map(std::ptr::null_mut(), len, BOTH, SHARED, file.as_raw_fd())? };
        let whole = Self::of(base, len)?;
        whole.keep_private();
        Ok(whole)
    }

    /// Maps two files, sealed at these sizes, which are multiples of a page, one behind the other: `shared` for reading and writing, `tables`
    /// for writing only where they are this process's own. A store into the tables of another one would end this process.
    ///
    /// # Errors
    /// What the kernel says of a mapping; `EPERM` for writing into sealed tables.
    pub(crate) fn pair(
        (shared, shared_len): (&OwnedFd, usize),
        (tables, tables_len): (&OwnedFd, usize),
        own: bool,
    ) -> Res<Self> {
        let len = shared_len + tables_len;
        let (none, read) = (libc::PROT_NONE, libc::PROT_READ);
        let write = read | libc::PROT_WRITE;
        let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: at an address of the kernel's choice.
        let base = unsafe { map(std::ptr::null_mut(), len, none, nothing, -1)? };
        let whole = Self::of(base, len)?;
        let fixed = SHARED | libc::MAP_FIXED;
        // SAFETY: in the place of what was mapped above, which nobody else knows.
        unsafe { map(base, shared_len, write, fixed, shared.as_raw_fd())? };
        let second = base.wrapping_byte_add(shared_len);
        let protection = if own { write } else { read };
        // SAFETY: as above.
        unsafe { map(second, tables_len, protection, fixed, tables.as_raw_fd())? };
        whole.keep_private();
        Ok(whole)
    }

    fn of(base: *mut libc::c_void, len: usize) -> Res<Self> {
        Ok(Self {
            base: NonNull::new(base.cast()).ok_or(Errno(libc::ENOMEM))?,
            len,
            borrowed: false,
        })
    }

    /// Keeps it out of forked children and core dumps.
    fn keep_private(&self) {
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: this object's mapping; both change what happens at fork and at a crash.
            unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, advice) };
        }
    }

    /// What the application has mapped.
    ///
    /// # Errors
    /// `EINVAL` for an address that is no page's.
    ///
    /// # Safety
    /// `len` bytes are mapped there, shared, until this is dropped.
    pub(crate) unsafe fn borrowed(addr: *mut u8, len: usize) -> Res<Self> {
        let base = NonNull::new(addr).filter(|_| addr.addr().is_multiple_of(1 << 12));
        Ok(Self {
            base: base.ok_or(Errno(libc::EINVAL))?,
            len,
            borrowed: true,
        })
    }

    /// Has the kernel back it with huge pages where it can. Only that: nothing is promised.
    pub(crate) fn prefer_huge_pages(&self) {
        // SAFETY: the mapping is this object's; its content does not change.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The word at `at`, a multiple of 4 inside the mapping.
    ///
    /// # Panics
    /// Where it is not: offsets that a peer named are checked before.
    #[inline]
    pub(crate) fn u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at <= self.len - 4);
        // SAFETY: inside the mapping, aligned, and living as long as `self`; everybody uses
        // atomics on it.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// The word at `at`, a multiple of 8 inside the mapping; else as [`Self::u32`].
    #[inline]
    pub(crate) fn u64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at <= self.len - 8);
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// Words that follow one another, from `at` on; else as [`Self::u64`]. Checked once for all of them.
    #[inline(always)]
    pub(crate) fn words<const N: usize>(&self, at: usize) -> [&AtomicU64; N] {
        assert!(at.is_multiple_of(8) && at <= self.len - 8 * N);
        // SAFETY: all inside the mapping; else as above.
        std::array::from_fn(|i| unsafe {
            AtomicU64::from_ptr(self.base.as_ptr().add(at + 8 * i).cast())
        })
    }

    /// As [`Self::words`], of four bytes each.
    #[inline(always)]
    pub(crate) fn u32s<const N: usize>(&self, at: usize) -> [&AtomicU32; N] {
        assert!(at.is_multiple_of(4) && at <= self.len - 4 * N);
        // SAFETY: as above.
        std::array::from_fn(|i| unsafe {
            AtomicU32::from_ptr(self.base.as_ptr().add(at + 4 * i).cast())
        })
    }

    /// The address of `len` bytes at `at`, for raw copies.
    ///
    /// # Panics
    /// Where they are not inside the mapping.
    #[inline]
    pub(crate) fn bytes(&self, at: usize, len: usize) -> *mut u8 {
        assert!(len <= self.len && at <= self.len - len);
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.as_ptr().add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.borrowed {
            return;
        }
        // SAFETY: the mapping is this object's, and all references into it borrow the object.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
