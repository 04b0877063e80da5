//! Locks on byte ranges of a file. No call waits for a lock.
//!
//! A lock belongs to the open file, not to the process: closing another descriptor of the same file
//! does not release it. It ends when the last descriptor of the open file is closed. A forked child
//! has a copy of each descriptor until it ends or executes another program, so a lock that its
//! parent has not released outlives the parent. A lock that protects one call is therefore taken on
//! a file that is opened for the call ([`reopen`]).

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use super::{Res, check, open_fd_of};

/// Opens the file another time, for locks of its own.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`: resources. `ENOENT`: /proc is not mounted.
pub(crate) fn reopen(file: &File) -> Res<File> {
    open_fd_of(std::process::id(), file.as_raw_fd(), libc::O_RDWR).map(File::from)
}

/// # Errors
/// `EAGAIN`: another open file has a lock on a part of the range.
pub(crate) fn lock(file: &File, bytes: Range<u64>) -> Res<()> {
    call(file, libc::F_OFD_SETLK, libc::F_WRLCK, bytes).map(drop)
}

/// # Errors
/// Those of `fcntl(2)`.
pub(crate) fn unlock(file: &File, bytes: Range<u64>) -> Res<()> {
    call(file, libc::F_OFD_SETLK, libc::F_UNLCK, bytes).map(drop)
}

/// Whether another open file has a lock on a part of the range.
pub(crate) fn locked(file: &File, bytes: Range<u64>) -> bool {
    holder(file, bytes).is_some()
}

/// The range of one lock, held through another open file, that overlaps `bytes`. The range may
/// extend beyond `bytes`.
pub(crate) fn holder(file: &File, bytes: Range<u64>) -> Option<Range<u64>> {
    let lock = call(file, libc::F_OFD_GETLK, libc::F_WRLCK, bytes).ok()?;
    let start = lock.l_start.cast_unsigned();
    // A length of 0 means: up to the largest possible offset.
    let end = if lock.l_len == 0 {
        u64::MAX
    } else {
        start.saturating_add(lock.l_len.cast_unsigned())
    };
    (i32::from(lock.l_type) != libc::F_UNLCK).then_some(start..end)
}

fn call(
    file: &File,
    command: libc::c_int,
    kind: libc::c_int,
    bytes: Range<u64>,
) -> Res<libc::flock> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start.cast_signed(),
        l_len: (bytes.end - bytes.start).cast_signed(),
        l_pid: 0,
    };
    // SAFETY: a structure that lives as long as the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) })?;
    Ok(lock)
}
