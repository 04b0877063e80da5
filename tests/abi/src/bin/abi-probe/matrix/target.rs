//! The memory of a case, and its region.

use std::ffi::c_int;

use abi_tests::objects::control;
use libfabric_sys::*;

use super::{How, PAGE};

/// An exposed region.
pub(super) struct Target {
    pub(super) mr: *mut fid_mr,
    /// The buffers, which are ranges of one mapping.
    pub(super) pieces: Vec<(*mut u8, usize)>,
    /// The address of the first byte in peers' requests.
    pub(super) base: u64,
    pub(super) key: u64,
    pub(super) mapped: bool,
    /// The arguments of its registration, to register it again.
    pub(super) from: (How, u64, *mut u8),
}

impl Target {
    pub(super) fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.1).sum()
    }

    /// The address of a byte.
    pub(super) fn byte(&self, mut at: usize) -> *mut u8 {
        for (start, len) in &self.pieces {
            if at < *len {
                // SAFETY: inside the piece.
                return unsafe { start.add(at) };
            }
            at -= len;
        }
        panic!("beyond the region");
    }

    pub(super) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        (at..at + len)
            // SAFETY: mapped memory that the device may write to.
            .map(|at| unsafe { self.byte(at).read_volatile() })
            .collect()
    }
}

/// A mapping of 4 pages at `at`; NULL: at any address.
pub(super) fn map(at: *mut u8) -> *mut u8 {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    // SAFETY: a new mapping, or in the place of one that nobody uses.
    let new = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        libc::mmap(
            at.cast(),
            4 * PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
    };
    assert_ne!(new, libc::MAP_FAILED);
    new.cast()
}

pub(super) fn unmap(at: *mut u8) {
    // SAFETY: of `map`.
    assert_eq!(unsafe { libc::munmap(at.cast(), 4 * PAGE) }, 0);
}

/// `fi_mr_refresh` of one range.
pub(super) unsafe fn refresh_of(mr: *mut fid_mr, start: *mut u8, len: usize) -> c_int {
    let iov = libc::iovec {
        iov_base: start.cast(),
        iov_len: len,
    };
    // SAFETY: an open region, and a list of one.
    unsafe {
        let mut modify = std::mem::zeroed::<fi_mr_modify>();
        modify.attr.__bindgen_anon_1.mr_iov = &raw const iov;
        modify.attr.iov_count = 1;
        control(mr, FI_REFRESH, (&raw mut modify).cast())
    }
}

/// Which of 4 pages are present.
pub(super) fn resident(memory: *mut u8) -> [bool; 4] {
    let mut pages = [0_u8; 4];
    // SAFETY: a live mapping; one byte for each page of it.
    let ret = unsafe { libc::mincore(memory.cast(), 4 * PAGE, pages.as_mut_ptr()) };
    assert_eq!(ret, 0, "mincore");
    pages.map(|page| page & 1 != 0)
}
