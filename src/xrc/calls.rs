//! System calls on files by directory and name, without symbolic links.

#![allow(
    unsafe_code,
    reason = "openat(2), mkdirat(2), fstatat(2), flock(2) and others"
)]

use std::ffi::CStr;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::errno::{FiErrno, Result};

/// Device and inode of a file.
pub(super) type Identity = (u64, u64);

/// What `fstat(2)` reports of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) identity: Identity,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) links: u64,
    /// In bytes.
    pub(super) size: i64,
}

impl Stat {
    pub(super) fn is_regular(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFREG
    }

    /// Whether users other than the owner may write.
    pub(super) fn others_write(&self) -> bool {
        self.mode & (libc::S_IWGRP | libc::S_IWOTH) != 0
    }

    /// Whether users other than the owner may open it in any way.
    pub(super) fn others_open(&self) -> bool {
        self.mode & (libc::S_IRWXG | libc::S_IRWXO) != 0
    }

    fn of(raw: &libc::stat) -> Self {
        Self {
            identity: (raw.st_dev, raw.st_ino),
            mode: raw.st_mode,
            uid: raw.st_uid,
            // the type differs between architectures
            #[allow(clippy::useless_conversion, reason = "u32 on some architectures")]
            links: raw.st_nlink.into(),
            size: raw.st_size,
        }
    }
}

/// The effective user.
pub(super) fn user() -> u32 {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() }
}

fn owned(fd: i32) -> Result<OwnedFd> {
    FiErrno::from_call(fd.min(0))?;
    // SAFETY: a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a directory that is no symbolic link; relative to `at`, if it is given.
pub(super) fn open_directory(at: Option<BorrowedFd<'_>>, name: &CStr) -> Result<OwnedFd> {
    let at = at.map_or(libc::AT_FDCWD, |fd| fd.as_raw_fd());
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: a C string.
    owned(unsafe { libc::openat(at, name.as_ptr(), flags) })
}

/// Makes a directory with mode 0700, if there is none of this name.
pub(super) fn make_directory(at: BorrowedFd<'_>, name: &CStr) -> Result<()> {
    // SAFETY: a C string.
    let made = FiErrno::from_call(unsafe { libc::mkdirat(at.as_raw_fd(), name.as_ptr(), 0o700) });
    match made {
        Err(FiErrno::EEXIST) => Ok(()),
        other => other,
    }
}

/// Opens a file that is no symbolic link, and makes it, with mode 0600, if `create`. A FIFO does
/// not block the call.
pub(super) fn open_file(at: BorrowedFd<'_>, name: &CStr, create: bool) -> Result<File> {
    let create = if create { libc::O_CREAT } else { 0 };
    let flags = libc::O_RDWR | libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK | create;
    // SAFETY: a C string.
    owned(unsafe { libc::openat(at.as_raw_fd(), name.as_ptr(), flags, 0o600) }).map(File::from)
}

/// `fstat(2)`
pub(super) fn stat(fd: BorrowedFd<'_>) -> Result<Stat> {
    let mut raw = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: room for the result.
    FiErrno::from_call(unsafe { libc::fstat(fd.as_raw_fd(), raw.as_mut_ptr()) })?;
    // SAFETY: filled by the call.
    Ok(Stat::of(unsafe { raw.assume_init_ref() }))
}

/// Device and inode of the file that has this name now; `None`: there is none.
pub(super) fn named(at: BorrowedFd<'_>, name: &CStr) -> Result<Option<Identity>> {
    let mut raw = MaybeUninit::<libc::stat>::zeroed();
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: a C string, and room for the result.
    let ret = unsafe { libc::fstatat(at.as_raw_fd(), name.as_ptr(), raw.as_mut_ptr(), flags) };
    match FiErrno::from_call(ret) {
        Err(FiErrno::ENOENT) => Ok(None),
        Err(error) => Err(error),
        // SAFETY: filled by the call.
        Ok(()) => Ok(Some(Stat::of(unsafe { raw.assume_init_ref() }).identity)),
    }
}

/// `unlinkat(2)`
pub(super) fn remove(at: BorrowedFd<'_>, name: &CStr) -> Result<()> {
    // SAFETY: a C string.
    FiErrno::from_call(unsafe { libc::unlinkat(at.as_raw_fd(), name.as_ptr(), 0) })
}

/// Acquires the lock of an open file, shared or exclusive, if this is possible at once.
pub(super) fn try_lock(file: &File, exclusive: bool) -> Result<bool> {
    let kind = if exclusive {
        libc::LOCK_EX
    } else {
        libc::LOCK_SH
    };
    // SAFETY: no pointers.
    let ret = unsafe { libc::flock(file.as_raw_fd(), kind | libc::LOCK_NB) };
    match FiErrno::from_call(ret) {
        Ok(()) => Ok(true),
        Err(FiErrno::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A random number.
pub(super) fn random() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer has the length given.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len().cast_signed() {
        return Err(FiErrno::last());
    }
    Ok(u64::from_ne_bytes(bytes))
}
