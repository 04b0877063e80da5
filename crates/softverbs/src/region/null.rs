//! What a null region's key stands for: zeros to read, and a place for what is thrown away.
//!
//! Both are ranges of addresses as long as the longest message, so that whoever gathers or scatters
//! need not know. The zeros are a mapping that nobody wrote to; the sink is one small file, mapped
//! over and over.

use std::os::fd::AsRawFd;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::qp::MAX_MESSAGE;
use crate::sys::{Errno, Res, fallocate, memfd_create};

/// Bytes of memory that the sink takes.
const SINK: usize = 2 << 20;

#[derive(Clone, Copy, Debug)]
struct Places {
    zeros: u64,
    sink: u64,
}

static PLACES: OnceLock<Places> = OnceLock::new();

/// Makes the places, once in a process.
///
/// # Errors
/// `ENOMEM`, or why a file can't be made.
pub(super) fn prepare() -> Res<()> {
    static MAKING: Mutex<()> = Mutex::new(());
    let _one = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if PLACES.get().is_none() {
        let zeros = reserve()?;
        let sink = reserve()?;
        let file = memfd_create(c"softverbs-sink", SINK)?;
        fallocate(file.as_raw_fd(), 0, SINK)?;
        for at in (0..MAX_MESSAGE as usize).step_by(SINK) {
            // SAFETY: over a part of what was just reserved, which nobody knows of yet.
            let mapped = unsafe {
                libc::mmap(
                    std::ptr::without_provenance_mut(sink as usize + at),
                    SINK,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
                    file.as_raw_fd(),
                    0,
                )
            };
            if mapped == libc::MAP_FAILED {
                return Err(Errno(libc::ENOMEM));
            }
        }
        let _ = PLACES.set(Places { zeros, sink });
    }
    Ok(())
}

fn reserve() -> Res<u64> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let addr = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            MAX_MESSAGE as usize,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if addr == libc::MAP_FAILED {
        return Err(Errno(libc::ENOMEM));
    }
    Ok(addr as u64)
}

/// Where a piece of a null region is. Of a receive's piece that is longer than any message, only
/// so much is ever written.
pub(super) fn address(write: bool, length: u32) -> Option<u64> {
    let places = PLACES.get()?;
    if write {
        Some(places.sink)
    } else {
        (u64::from(length) <= MAX_MESSAGE).then_some(places.zeros)
    }
}
