//! A mapped file that other processes map too.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use crate::sync::Arc;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::sys::{Errno, Res};

/// Shared memory. A forked child does not have the mapping.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    memory: Memory,
}

/// What keeps the memory mapped.
#[derive(Debug)]
enum Memory {
    /// The object itself, which unmaps it on drop.
    Own,
    /// The application.
    Borrowed,
    /// Another mapping, of which this one is a part.
    PartOf(#[allow(dead_code, reason = "only keeps the memory mapped")] Arc<Mapping>),
}

const SHARED: libc::c_int = libc::MAP_SHARED | libc::MAP_NORESERVE;

/// `mmap(2)` from the file's beginning.
///
/// # Safety
/// With `MAP_FIXED`, the call replaces existing mappings at `at`.
unsafe fn map(
    at: *mut libc::c_void,
    len: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: std::os::fd::RawFd,
) -> Res<*mut libc::c_void> {
    // SAFETY: the caller promises that the call replaces no mapping that is in use.
    let base = unsafe { libc::mmap(at, len, protection, flags, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    Ok(base)
}

// SAFETY: this type accesses the memory only through atomics and raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`, which must be sealed at that size or a larger one.
    pub(crate) fn new(file: &OwnedFd, len: usize) -> Res<Self> {
        const BOTH: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so no mapping is replaced.
        let base = unsafe { map(std::ptr::null_mut(), len, BOTH, SHARED, file.as_raw_fd())? };
        let whole = Self::of(base, len)?;
        whole.keep_private();
        Ok(whole)
    }

    /// Maps two files one behind the other; both are sealed at these sizes, which are multiples of
    /// a page. `shared` is mapped for reading and writing; `tables` is mapped for writing only if
    /// the tables belong to this process. A store into the tables of another process would end this
    /// process (SIGSEGV).
    ///
    /// # Errors
    /// Those of `mmap(2)`; `EPERM`: the tables are sealed against writing.
    pub(crate) fn pair(
        (shared, shared_len): (&OwnedFd, usize),
        (tables, tables_len): (&OwnedFd, usize),
        own: bool,
    ) -> Res<Self> {
        let len = shared_len + tables_len;
        let (none, read) = (libc::PROT_NONE, libc::PROT_READ);
        let write = read | libc::PROT_WRITE;
        let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses the address, so no mapping is replaced.
        let base = unsafe { map(std::ptr::null_mut(), len, none, nothing, -1)? };
        let whole = Self::of(base, len)?;
        let fixed = SHARED | libc::MAP_FIXED;
        // SAFETY: replaces a part of the range that was reserved above, whose address no other code
        // has.
        unsafe { map(base, shared_len, write, fixed, shared.as_raw_fd())? };
        let second = base.wrapping_byte_add(shared_len);
        let protection = if own { write } else { read };
        // SAFETY: replaces the rest of the range that was reserved above.
        unsafe { map(second, tables_len, protection, fixed, tables.as_raw_fd())? };
        whole.keep_private();
        Ok(whole)
    }

    fn of(base: *mut libc::c_void, len: usize) -> Res<Self> {
        Ok(Self {
            base: NonNull::new(base.cast()).ok_or(Errno(libc::ENOMEM))?,
            len,
            memory: Memory::Own,
        })
    }

    /// `len` bytes of another mapping, which stays mapped while the part exists.
    ///
    /// # Panics
    /// If the range is not inside the mapping, or does not begin on a page boundary.
    pub(crate) fn part(whole: &Arc<Self>, at: usize, len: usize) -> Self {
        assert!(at.is_multiple_of(1 << 12));
        let base = NonNull::new(whole.bytes(at, len)).expect("an address of the mapping");
        Self {
            base,
            len,
            memory: Memory::PartOf(Arc::clone(whole)),
        }
    }

    /// Excludes the mapping from forked children and core dumps.
    fn keep_private(&self) {
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: this object owns the mapping; both advices only change the handling at fork
            // and at a crash.
            unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, advice) };
        }
    }

    /// Borrows memory that the application has mapped.
    ///
    /// # Errors
    /// `EINVAL`: the address is null or not on a page boundary.
    ///
    /// # Safety
    /// `len` bytes must be mapped there, shared, until this object is dropped.
    pub(crate) unsafe fn borrowed(addr: *mut u8, len: usize) -> Res<Self> {
        let base = NonNull::new(addr).filter(|_| addr.addr().is_multiple_of(1 << 12));
        Ok(Self {
            base: base.ok_or(Errno(libc::EINVAL))?,
            len,
            memory: Memory::Borrowed,
        })
    }

    /// Asks the kernel to use huge pages. The kernel may ignore this.
    pub(crate) fn prefer_huge_pages(&self) {
        // SAFETY: this object owns the mapping; the content does not change.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The word at `at`, a multiple of 4 inside the mapping.
    ///
    /// # Panics
    /// If `at` is unaligned or outside the mapping. Callers check an offset from a peer before.
    #[inline]
    pub(crate) fn u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at <= self.len - 4);
        // SAFETY: inside the mapping, aligned, and valid as long as `self`; all code accesses the
        // word through atomics.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// The word at `at`, a multiple of 8 inside the mapping; else as [`Self::u32`].
    #[inline]
    pub(crate) fn u64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at <= self.len - 8);
        // SAFETY: inside the mapping, aligned, and valid as long as `self`; all code accesses the
        // word through atomics.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// Asks the processor to acquire the cache line of a word that will be written soon. A hint: it
    /// has no other effect, also if `at` is outside the mapping or the processor does not have the
    /// instruction.
    #[inline(always)]
    pub(crate) fn prefetch_to_write(&self, at: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: `prefetchw` accesses no memory that the program can observe and never faults,
        // whatever the address is; processors without it execute it as a NOP.
        unsafe {
            std::arch::asm!(
                "prefetchw [{}]",
                in(reg) self.base.as_ptr().wrapping_add(at),
                options(nostack, preserves_flags, readonly)
            );
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = at;
    }

    /// Asks the processor to move the cache line of a word that was written to the cache that other
    /// processors share. A hint, as [`Self::prefetch_to_write`].
    #[inline(always)]
    pub(crate) fn pass_on(&self, at: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: `cldemote` changes no memory and never faults, whatever the address is;
        // processors without it execute it as a NOP.
        unsafe {
            std::arch::asm!(
                "cldemote [{}]",
                in(reg) self.base.as_ptr().wrapping_add(at),
                options(nostack, preserves_flags)
            );
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = at;
    }

    /// `N` consecutive words, starting at `at`; otherwise as [`Self::u64`]. One check covers all of
    /// them.
    #[inline(always)]
    pub(crate) fn words<const N: usize>(&self, at: usize) -> [&AtomicU64; N] {
        assert!(at.is_multiple_of(8) && at <= self.len - 8 * N);
        // SAFETY: all words are inside the mapping, aligned, and accessed through atomics only.
        std::array::from_fn(|i| unsafe {
            AtomicU64::from_ptr(self.base.as_ptr().add(at + 8 * i).cast())
        })
    }

    /// As [`Self::words`], for words of 4 bytes.
    #[inline(always)]
    pub(crate) fn u32s<const N: usize>(&self, at: usize) -> [&AtomicU32; N] {
        assert!(at.is_multiple_of(4) && at <= self.len - 4 * N);
        // SAFETY: inside the mapping, aligned, and valid as long as `self`; all code accesses the
        // word through atomics.
        std::array::from_fn(|i| unsafe {
            AtomicU32::from_ptr(self.base.as_ptr().add(at + 4 * i).cast())
        })
    }

    /// The address of `len` bytes at `at`, for raw copies.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    #[inline]
    pub(crate) fn bytes(&self, at: usize, len: usize) -> *mut u8 {
        assert!(len <= self.len && at <= self.len - len);
        // SAFETY: the range was just checked to lie inside the mapping.
        unsafe { self.base.as_ptr().add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !matches!(self.memory, Memory::Own) {
            return;
        }
        // SAFETY: this object owns the mapping, and all references into the mapping borrow the
        // object.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
