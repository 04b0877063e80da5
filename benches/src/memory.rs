//! The memory of send and receive buffers.

use std::ptr::null_mut;

/// Present pages of this process that are never freed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) at: *mut u8,
    pub(crate) len: usize,
}

impl Memory {
    /// Maps and touches `len` bytes of ordinary pages. They begin on a boundary of 2 MiB, so that
    /// all subjects have the same number of huge pages if the kernel uses them.
    pub(crate) fn new(len: usize) -> Self {
        const HUGE: usize = 2 << 20;
        // SAFETY: a new mapping; the part from the boundary on has `len` bytes.
        unsafe {
            let at = libc::mmap(
                null_mut(),
                len + HUGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(at, libc::MAP_FAILED, "no memory");
            let at = at.cast::<u8>();
            let at = at.add(at.align_offset(HUGE));
            at.write_bytes(1, len);
            Self { at, len }
        }
    }

    pub(crate) fn addr(self) -> u64 {
        self.at.expose_provenance() as u64
    }
}
