//! Memory of tables that may be large: zeros, aligned to cache lines, in huge pages from 2 MiB on.
//!
//! A table of 100 MB in pages of 4 KiB has 25,000 of them, more than any TLB: each access in an
//! order without a pattern then walks the page table, in a virtual machine that of the host too.

#![allow(unsafe_code, reason = "allocates memory")]

use std::alloc::Layout;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;
/// Bytes of a huge page of x86-64, and of AArch64 with pages of 4 KiB.
pub(crate) const HUGE: usize = 2 << 20;
/// From this size on the kernel provides the memory, which is not written until it is used.
const MAPPED: usize = 64 << 10;

/// Owner of memory.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the object owns its memory, as a `Vec<u8>` does.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared reference permits no access.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory of `bytes` zeros, at least 1, at a multiple of [`LINE`]. From [`HUGE`] on it is at a
    /// multiple of that, and the kernel is asked for huge pages. Aborts the process if there is no
    /// memory, as `Vec` does.
    pub(crate) fn zeroed(bytes: usize) -> Self {
        // SAFETY: the layout has at least one byte.
        Self::new(bytes, |layout| unsafe { std::alloc::alloc_zeroed(layout) })
    }

    /// As [`Self::zeroed`], with any content below 64 KiB: no byte of it is written.
    pub(crate) fn uninit(bytes: usize) -> Self {
        // SAFETY: the layout has at least one byte.
        Self::new(bytes, |layout| unsafe { std::alloc::alloc(layout) })
    }

    fn new(bytes: usize, allocate: impl FnOnce(Layout) -> *mut u8) -> Self {
        let layout = Self::layout(bytes);
        let base = match bytes < MAPPED {
            true => NonNull::new(allocate(layout)),
            false => map(bytes),
        };
        match base {
            Some(base) => Self { base, bytes },
            None => std::alloc::handle_alloc_error(layout),
        }
    }

    fn layout(bytes: usize) -> Layout {
        assert!(bytes > 0, "no memory");
        Layout::from_size_align(bytes, LINE).expect("a size of memory")
    }

    /// The first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes < MAPPED {
            // SAFETY: `new` has allocated it with this layout.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), Self::layout(self.bytes)) };
        } else {
            unmap(self.base.as_ptr(), self.bytes.next_multiple_of(MAPPED));
        }
    }
}

/// Maps zeros, from [`HUGE`] on aligned to that.
fn map(bytes: usize) -> Option<NonNull<u8>> {
    let align = if bytes < HUGE { 0 } else { HUGE };
    let bytes = bytes.next_multiple_of(MAPPED);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the address, so no mapping is replaced.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes.checked_add(align)?,
            access,
            flags,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return None;
    }
    let base: *mut u8 = base.cast();
    if align == 0 {
        return NonNull::new(base);
    }
    // less than the alignment
    let before = base.align_offset(align);
    let aligned = base.wrapping_add(before);
    unmap(base, before);
    unmap(aligned.wrapping_add(bytes), align - before);
    // SAFETY: the mapping made above; the advice can only change the size of its pages.
    unsafe { libc::madvise(aligned.cast(), bytes, libc::MADV_HUGEPAGE) };
    NonNull::new(aligned)
}

/// Ends a part of a mapping of [`map`] that is no longer used: whole pages, or none.
fn unmap(base: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: `Memory` owns the mapping and ends it here, or has never used this part.
        let failed = unsafe { libc::munmap(base.cast(), bytes) };
        debug_assert_eq!(failed, 0);
    }
}

/// A type for which bytes of 0 are a value.
///
/// # Safety
/// Bytes of 0 are a valid value of the type. Its alignment is at most [`LINE`], it has no `Drop`,
/// and at least one byte.
pub(crate) unsafe trait Zero {}

// SAFETY: a number of one byte.
unsafe impl Zero for u8 {}

/// An array whose elements are 0 at first. Creating one of 64 KiB or more writes no memory: the
/// kernel provides a page when it is first used.
#[derive(Debug)]
pub(crate) struct Zeroed<T> {
    /// `None`: no elements.
    memory: Option<Memory>,
    elements: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its elements, as a `Box<[T]>` does.
unsafe impl<T: Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Zeroed<T> {}

impl<T: Zero> Zeroed<T> {
    /// No elements.
    pub(crate) const NONE: Self = Self {
        memory: None,
        elements: NonNull::dangling(),
        len: 0,
    };

    /// An array of `len` elements, at least 1.
    pub(crate) fn new(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).expect("a size of memory");
        let memory = Memory::zeroed(bytes);
        Self {
            elements: memory.base().cast(),
            memory: Some(memory),
            len,
        }
    }
}

impl<T> Deref for Zeroed<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        debug_assert!(self.memory.is_some() || self.len == 0);
        // SAFETY: `new` has allocated `len` elements of a type that permits zeros, or there are
        // none; the object owns them.
        unsafe { std::slice::from_raw_parts(self.elements.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Zeroed<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.elements.as_ptr(), self.len) }
    }
}

/// Asks the processor to read the cache line of a value that will be used soon.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it is a hint, valid for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_each_kind_is_zero_aligned_and_whole() {
        let sizes = [1, 100, MAPPED - 8, MAPPED, MAPPED + 8, HUGE - 8, HUGE];
        let large = [HUGE + 8, 3 * HUGE - MAPPED, 5 * HUGE + 8];
        // twice: the second time in memory that was released
        for bytes in sizes.iter().chain(&large).cycle().take(20) {
            let mut array = Zeroed::<u8>::new(*bytes);
            let align = if *bytes < HUGE { LINE } else { HUGE };
            assert!(array.as_ptr().addr().is_multiple_of(align), "{bytes}");
            assert!(array.iter().all(|byte| *byte == 0), "{bytes}");
            array.fill(u8::MAX);
        }
        assert!(Zeroed::<u8>::NONE.is_empty());
    }

    /// Neither the memory nor what its alignment needed stays mapped.
    #[test]
    fn dropped_memory_is_no_longer_mapped() {
        let mapped_pages = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').next().unwrap().parse::<usize>().unwrap()
        };
        let before = mapped_pages();
        for bytes in [MAPPED, 100_000, HUGE, 3 * HUGE + 1] {
            for _ in 0..1000 {
                drop(Memory::zeroed(bytes));
            }
        }
        // 1,000 times 64 KiB are more
        assert!(mapped_pages().saturating_sub(before) * 4096 < 60 << 20);
    }
}
