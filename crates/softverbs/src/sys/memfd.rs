//! Anonymous files that peers map. Their size is sealed: a truncated file would end each process
//! that maps it (SIGBUS).

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::{Errno, Res, check, fsize};

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// A file of `size` bytes; its size can never change. No page is allocated yet, see [`fallocate`].
///
/// # Errors
/// `EMFILE`, `ENOMEM`; `EFBIG`: `size` is above `RLIMIT_FSIZE`.
pub(crate) fn create(name: &CStr, size: usize) -> Res<OwnedFd> {
    let file = sized(name, size)?;
    seal(&file, 0)?;
    Ok(file)
}

/// Seals the size and adds the seals in `more`; no seal can be removed.
fn seal(file: &OwnedFd, more: libc::c_int) -> Res<()> {
    let seals = SEALS | libc::F_SEAL_SEAL | more;
    // SAFETY: no memory is passed.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(drop)
}

fn sized(name: &CStr, size: usize) -> Res<OwnedFd> {
    // SAFETY: `name` is a C string.
    let fd = check(unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    check_size(size)?;
    // SAFETY: no memory is passed.
    check(unsafe { libc::ftruncate(fd, size.cast_signed() as libc::off_t) })?;
    Ok(file)
}

/// Whether a file may have this size. The kernel sends `SIGXFSZ`, whose default action ends the
/// process, to a thread that makes a file larger than `RLIMIT_FSIZE` permits.
///
/// # Errors
/// `EFBIG`: it may not.
fn check_size(size: usize) -> Res<()> {
    match fsize() {
        Some(limit) if size as u64 > limit => Err(Errno(libc::EFBIG)),
        _ => Ok(()),
    }
}

/// A file that only this process can write: it is mapped before it is sealed.
#[derive(Debug)]
pub(crate) struct Tables(OwnedFd);

impl Tables {
    /// As [`create`], but not sealed yet. No other process has opened the file.
    pub(crate) fn create(name: &CStr, size: usize) -> Res<Self> {
        Ok(Self(sized(name, size)?))
    }

    /// The file, for mapping it.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.0
    }

    /// Seals the size, and refuses all writes except by existing mappings (`F_SEAL_FUTURE_WRITE`).
    /// Returns false if the kernel has no such seal (before 5.1); then only the size is sealed.
    ///
    /// # Errors
    /// Those of `fcntl(2)` with `F_ADD_SEALS`.
    pub(crate) fn seal(self) -> Res<(OwnedFd, bool)> {
        match seal(&self.0, libc::F_SEAL_FUTURE_WRITE) {
            Err(Errno(libc::EINVAL)) => seal(&self.0, 0).map(|()| (self.0, false)),
            sealed => sealed.map(|()| (self.0, true)),
        }
    }
}

/// Whether a peer's file can be written only through mappings that are older than its seal.
pub(crate) fn is_guarded(file: &OwnedFd) -> Res<bool> {
    // SAFETY: no memory is passed.
    let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
    Ok(seals & libc::F_SEAL_FUTURE_WRITE != 0)
}

/// The word at `at` of a file that is not mapped.
///
/// # Errors
/// `EPROTO`: the file is too short.
pub(crate) fn read_word(file: &OwnedFd, at: usize) -> Res<u64> {
    let mut word = 0u64;
    // SAFETY: room for as many; any bytes are a value.
    let got = unsafe {
        libc::pread(
            file.as_raw_fd(),
            (&raw mut word).cast(),
            8,
            at as libc::off_t,
        )
    };
    if got == 8 {
        Ok(word)
    } else {
        Err(Errno(libc::EPROTO))
    }
}

/// A file with these bytes, sealed against every change.
///
/// # Errors
/// As [`create`].
pub(crate) fn sealed_file(name: &CStr, bytes: &[u8]) -> Res<OwnedFd> {
    // SAFETY: `name` is a C string.
    let fd = check(unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    check_size(bytes.len())?;
    // SAFETY: the bytes are readable.
    let written = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    if usize::try_from(written) != Ok(bytes.len()) {
        return Err(Errno(libc::ENOMEM));
    }
    let seals = SEALS | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;
    // SAFETY: no memory is passed.
    check(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) })?;
    Ok(file)
}

/// Reads the contents of a file of [`sealed_file`].
///
/// # Errors
/// `EBADF`; `EINVAL`: another file.
pub(crate) fn read_sealed<const LEN: usize>(file: BorrowedFd<'_>) -> Res<[u8; LEN]> {
    let fd = file.as_raw_fd();
    let seals = SEALS | libc::F_SEAL_WRITE;
    // SAFETY: no memory is passed.
    if check(unsafe { libc::fcntl(fd, libc::F_GET_SEALS) })? & seals != seals {
        return Err(Errno(libc::EINVAL));
    }
    let mut bytes = [0u8; LEN];
    // SAFETY: room for as many; reading at an offset moves no position.
    let got = unsafe { libc::pread(fd, bytes.as_mut_ptr().cast(), LEN, 0) };
    // a longer file is not one of `sealed_file`
    // SAFETY: room for one byte; reading at an offset moves no position.
    let more = unsafe { libc::pread(fd, [0u8; 1].as_mut_ptr().cast(), 1, LEN as libc::off_t) };
    if usize::try_from(got) == Ok(LEN) && more == 0 {
        Ok(bytes)
    } else {
        Err(Errno(libc::EINVAL))
    }
}

/// Maximum of bytes that [`fallocate`] allocates by one system call, usually in less than 1 ms.
const PIECE: usize = 2 << 20;
const PAGE: usize = 1 << 12;

/// Allocates the pages of `len` bytes at `offset`, so that a later access cannot fail.
///
/// # Errors
/// `ENOMEM`: the kernel reports any error. A part of the pages may have been allocated.
pub(crate) fn fallocate(fd: RawFd, offset: usize, len: usize) -> Res<()> {
    in_pieces(offset, len, |at, len| {
        // SAFETY: no memory is passed.
        check(unsafe { libc::fallocate(fd, 0, at as libc::off_t, len as libc::off_t) }).map(drop)
    })
}

/// Calls `allocate` for each piece of a range of a file, with its offset and length. Halves a piece
/// that was interrupted, down to a page, and doubles it behind one that was not. Before Linux 6.11
/// a signal interrupts `fallocate(2)` on shared memory, which then frees the pages that the call
/// has allocated: in a process with a periodic signal, repetitions of a call for a long range would
/// not end.
fn in_pieces(
    offset: usize,
    len: usize,
    mut allocate: impl FnMut(usize, usize) -> Res<()>,
) -> Res<()> {
    let (mut done, mut most) = (0, PIECE);
    while done < len {
        let piece = most.min(len - done);
        match allocate(offset + done, piece) {
            Ok(()) => {
                done += piece;
                most = PIECE.min(2 * most);
            }
            Err(Errno(libc::EINTR)) => most = PAGE.max(most / 2),
            Err(_) => return Err(Errno(libc::ENOMEM)),
        }
    }
    Ok(())
}

/// Takes the pages of `len` bytes at `offset` away: they are zero when they are next accessed, and
/// that access gets new pages. Offset and length are multiples of a page.
///
/// # Errors
/// Those of `fallocate(2)`.
pub(crate) fn punch_hole(fd: RawFd, offset: usize, len: usize) -> Res<()> {
    const MODE: libc::c_int = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    loop {
        // SAFETY: no memory is passed.
        let ret = unsafe { libc::fallocate(fd, MODE, offset as libc::off_t, len as libc::off_t) };
        if ret == 0 {
            return Ok(());
        }
        let error = Errno::last();
        if error.0 != libc::EINTR {
            return Err(error);
        }
    }
}

/// The inode, which identifies an open file on its device.
pub(crate) fn inode_of(file: &OwnedFd) -> Res<u64> {
    Ok(name_of(file)?.1)
}

/// Device and inode, which identify an open file.
pub(crate) fn name_of(file: &OwnedFd) -> Res<(u64, u64)> {
    // SAFETY: all zeros is a value of it.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: writable structure.
    check(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Whether an open file can be written, by how it was opened.
pub(crate) fn is_writable(file: &OwnedFd) -> Res<bool> {
    // SAFETY: no memory is passed.
    let flags = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    Ok(flags & libc::O_ACCMODE != libc::O_RDONLY)
}

/// The size of a peer's file, if it is sealed as [`create`] does it and its pages are the kernel's
/// ordinary ones.
pub(crate) fn sealed_size(file: &OwnedFd) -> Res<usize> {
    // SAFETY: no memory is passed.
    let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
    if seals & SEALS != SEALS {
        return Err(Errno(libc::EPERM));
    }
    // a huge page that was removed from a hugetlbfs file may not be replaced
    // SAFETY: all zeros is a value of it.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: writable structure.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) })?;
    if system.f_type != libc::TMPFS_MAGIC {
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
    fn a_file_above_the_limit_is_refused_without_a_signal() {
        // SAFETY: the child makes system calls only; the structures are writable.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let mut limit = std::mem::zeroed::<libc::rlimit>();
                libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit);
                limit.rlim_cur = 8192;
                let set = libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
                libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
                let refused = |file: Res<OwnedFd>| file.err() == Some(Errno(libc::EFBIG));
                let good = set == 0
                    && create(c"softverbs-test", 8192).is_ok()
                    && refused(create(c"softverbs-test", 8193))
                    && refused(Tables::create(c"softverbs-test", 1 << 28).map(|tables| tables.0))
                    && refused(sealed_file(c"softverbs-test", &[0; 8193]));
                libc::_exit(i32::from(!good));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
        }
    }

    /// A kernel that interrupts each call for more than a page, and every third call.
    #[test]
    fn an_interrupted_allocation_makes_progress() {
        let (mut calls, mut next) = (0, 4096);
        let done = in_pieces(4096, 3 * PIECE + 5, |at, len| {
            calls += 1;
            assert!(calls < 10_000, "it does not end");
            if len > PAGE || calls % 3 == 0 {
                return Err(Errno(libc::EINTR));
            }
            assert_eq!(at, next);
            next += len;
            Ok(())
        });
        assert_eq!((done, next), (Ok(()), 4096 + 3 * PIECE + 5));
        let failed = in_pieces(0, 2 * PIECE, |at, _| match at {
            0 => Ok(()),
            _ => Err(Errno(libc::ENOSPC)),
        });
        assert_eq!(failed, Err(Errno(libc::ENOMEM)));
    }

    #[test]
    fn a_file_without_seals_is_refused() {
        // SAFETY: a C string; no other owner of the new descriptor exists.
        let file = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"x".as_ptr(), 0)) };
        assert_eq!(sealed_size(&file), Err(Errno(libc::EPERM)));
    }
}
