//! Anonymous files that peers map: they can't be truncated under anybody's feet.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::{Errno, Res, check};

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// A file of `size` bytes that can never be another size. Nothing of it is allocated yet, see
/// [`fallocate`].
pub(crate) fn create(name: &CStr, size: usize) -> Res<OwnedFd> {
    // SAFETY: `name` is a C string.
    let fd = check(unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: fresh and owned by nobody else.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: no memory is passed.
    check(unsafe { libc::ftruncate(fd, size.cast_signed() as libc::off_t) })?;
    // SAFETY: no memory is passed.
    check(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS | libc::F_SEAL_SEAL) })?;
    Ok(file)
}

/// Gives `len` bytes at `offset` their pages, so that touching them can't fail later.
///
/// # Errors
/// `ENOMEM`, whatever the kernel calls it.
pub(crate) fn fallocate(fd: RawFd, offset: usize, len: usize) -> Res<()> {
    loop {
        // SAFETY: no memory is passed.
        let ret = unsafe { libc::fallocate(fd, 0, offset as libc::off_t, len as libc::off_t) };
        if ret == 0 {
            return Ok(());
        }
        if Errno::last().0 != libc::EINTR {
            return Err(Errno(libc::ENOMEM));
        }
    }
}

/// Tells an open file from others.
pub(crate) fn inode_of(file: &OwnedFd) -> Res<u64> {
    // SAFETY: all zeros is a value of it.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: writable structure.
    check(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
    Ok(stat.st_ino)
}

/// The size of a peer's file, if it is sealed as [`create`] does it.
pub(crate) fn sealed_size(file: &OwnedFd) -> Res<usize> {
    // SAFETY: no memory is passed.
    let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
    if seals & SEALS != SEALS {
        return Err(Errno(libc::EPERM));
    }
    // SAFETY: all zeros is a value of it.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: writable structure.
    check(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
    usize::try_from(stat.st_size).map_err(|_| Errno(libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_keeps_its_size() {
        let file = create(c"softverbs-test", 8192).unwrap();
        fallocate(file.as_raw_fd(), 0, 8192).unwrap();
        assert_eq!(sealed_size(&file), Ok(8192));
        for size in [0, 4096, 16384] {
            // SAFETY: no memory is passed.
            assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), size) }, -1);
        }
    }

    #[test]
    fn a_file_without_seals_is_refused() {
        // SAFETY: a C string; the descriptor is owned by nobody else.
        let file = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"x".as_ptr(), 0)) };
        assert_eq!(sealed_size(&file), Err(Errno(libc::EPERM)));
    }
}
