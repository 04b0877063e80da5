//! System calls, wrapped so that the rest of the crate sees owned descriptors and errnos.

mod bounce;
mod fd;
mod limits;
mod lock;
mod memfd;
mod memory;
mod proc;
mod reach;
mod seqpacket;
mod text;
mod thread;
mod vm;

pub(crate) use bounce::BounceFile;
pub(crate) use fd::{Epoll, Pipe, Timer, epoll_readable, is_pipe, one_readable, ring_fd};
pub(crate) use limits::{is_spare, may_exceed_memlock, memlock};
pub(crate) use lock::{holder, lock, locked, unlock};
pub(crate) use memfd::{
    Tables, create as memfd_create, fallocate, inode_of, is_guarded, name_of, punch_hole,
    read_sealed, read_word, sealed_file, sealed_size,
};
pub(crate) use memory::{Grow, Zero, list, room, try_box, with_room, zeroed};
pub(crate) use proc::{
    Identity, OpenFile, PidFd, has_open, hash, is_stopped, machine_id, may_run, namespace,
    open_fd_of, own_start_time, start_time,
};
pub(crate) use reach::{allow_tracers, block_signals, dumpable, restore_signals, yama_restricts};
pub(crate) use seqpacket::{Credentials, Line, Listener};
pub(crate) use text::ShortPath;
pub(crate) use thread::{Thread, start_thread};
pub(crate) use vm::{
    MAX_IOV, as_local, copies_allowed, file_behind, page_end, pages_huge, pages_of, pages_usable,
    readable_locally, refused, same_page_offset, vm_read, vm_write, writable_locally, write_back,
};

use std::fmt;

/// A positive errno of the C library.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    /// The calling thread's `errno`.
    pub(crate) fn last() -> Self {
        // SAFETY: the C library gives each thread its own errno.
        Self(unsafe { *libc::__errno_location() })
    }

    /// Sets the calling thread's `errno` to it.
    pub(crate) fn set(self) {
        // SAFETY: the C library gives each thread its own errno.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        // errors of the standard library have no errno
        let none = match error.kind() {
            std::io::ErrorKind::OutOfMemory => libc::ENOMEM,
            _ => libc::EIO,
        };
        Self(error.raw_os_error().unwrap_or(none))
    }
}

/// A result with an errno.
pub(crate) type Res<T> = Result<T, Errno>;

/// `ret` of a system call, or its errno.
pub(crate) fn check(ret: libc::c_int) -> Res<libc::c_int> {
    if ret < 0 { Err(Errno::last()) } else { Ok(ret) }
}

/// Nanoseconds of the monotonic clock.
#[inline]
pub(crate) fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// The time of the kernel's last tick in nanoseconds: 1 to 10 ms ago at most, by the kernel's
/// configuration. A tenth of the cost of [`now_ns`], where that reads the clock of a hypervisor.
pub(crate) fn tick_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

#[inline]
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is writable; both clocks always exist.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The effective user of this process.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: no memory is passed.
    unsafe { libc::geteuid() }
}

/// A random number from the kernel.
pub(crate) fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer has the length given.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 8 {
        u64::from_ne_bytes(bytes)
    } else {
        // only kernels that lack other calls used here refuse this one
        now_ns() ^ (u64::from(std::process::id()) << 32)
    }
}
