//! The memory behind a null region's key: zeros to read, and a sink for data that is discarded.
//!
//! Both are address ranges as long as the longest message, so gather and scatter need no special
//! case. The zeros are a mapping that is never written; the sink is one file of 2 MiB that is
//! mapped repeatedly over the range.

use std::os::fd::AsRawFd;
use std::sync::{Mutex, OnceLock, PoisonError};

use forks::PerProcess;

use crate::limits::MAX_MESSAGE;
use crate::sys::{Errno, Res, fallocate, memfd_create};

/// Bytes of memory of the sink.
const SINK: usize = 2 << 20;

#[derive(Clone, Copy, Debug)]
struct Places {
    zeros: u64,
    sink: u64,
}

static PLACES: OnceLock<Places> = OnceLock::new();

/// Creates both ranges, once in a process.
///
/// # Errors
/// `ENOMEM`, or the error of creating the file.
pub(super) fn prepare() -> Res<()> {
    static MAKING: PerProcess<Mutex<()>> = PerProcess::new(Mutex::new(()));
    let making = MAKING.try_get().ok_or(Errno(libc::ENOMEM))?;
    let _one = making.lock().unwrap_or_else(PoisonError::into_inner);
    if PLACES.get().is_none() {
        let zeros = reserve()?;
        let sink = reserve()?;
        let file = memfd_create(c"softverbs-sink", SINK)?;
        fallocate(file.as_raw_fd(), 0, SINK)?;
        for at in (0..MAX_MESSAGE as usize).step_by(SINK) {
            // SAFETY: replaces a part of the range that was just reserved; no other code has its
            // address yet.
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
    // SAFETY: a new mapping at an address that the kernel chooses replaces no other mapping.
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

/// The address for an sge of a null region. For the sge of a receive that is longer than any
/// message, at most the length of the longest message is written.
pub(super) fn address(write: bool, length: u32) -> Option<u64> {
    let places = PLACES.get()?;
    if write {
        Some(places.sink)
    } else {
        (u64::from(length) <= MAX_MESSAGE).then_some(places.zeros)
    }
}
