//! Copies through a file without a name, if the kernel refuses copies between memories. For
//! unmapped memory a copy returns `EFAULT`, as `process_vm_*` do, so there is no fault.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::{Errno, Res, fallocate, memfd_create, sealed_size};

/// A sealed file of a size that both ends know.
#[derive(Debug)]
pub(crate) struct BounceFile(OwnedFd);

impl BounceFile {
    /// A file of `len` bytes with allocated pages.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn create(len: usize) -> Res<Self> {
        let file = Self::unallocated(len)?;
        file.allocate(len)?;
        Ok(file)
    }

    /// A file of `len` bytes without pages.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`.
    pub(crate) fn unallocated(len: usize) -> Res<Self> {
        Ok(Self(memfd_create(c"softverbs-bounce", len)?))
    }

    /// Allocates the pages of the first `len` bytes.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn allocate(&self, len: usize) -> Res<()> {
        fallocate(self.0.as_raw_fd(), 0, len)
    }

    /// The bounce file of another process.
    ///
    /// # Errors
    /// `EPERM`: the file is not sealed, or is not ordinary memory. `EPROTO`: it has another size.
    pub(crate) fn of_file(file: OwnedFd, len: usize) -> Res<Self> {
        if sealed_size(&file)? != len {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Self(file))
    }

    /// Fills the file at offset `at` from iovecs of this process's memory.
    ///
    /// # Errors
    /// `EFAULT`: an address is not mapped; a part may have been copied.
    pub(crate) fn fill(&self, at: usize, from: &[libc::iovec]) -> Res<()> {
        self.whole(libc::SYS_pwritev, from, at)
    }

    /// Copies from offset `at` of the file to iovecs of this process's memory.
    ///
    /// # Errors
    /// As [`Self::fill`].
    pub(crate) fn empty(&self, at: usize, to: &[libc::iovec]) -> Res<()> {
        self.whole(libc::SYS_preadv, to, at)
    }

    /// Both calls may transfer only a part, up to an unmapped page. The functions of the C library
    /// are not used: sanitizers check their arguments as accesses of the program, and a device
    /// accesses whole pages.
    fn whole(&self, call: libc::c_long, list: &[libc::iovec], at: usize) -> Res<()> {
        let len: usize = list.iter().map(|iovec| iovec.iov_len).sum();
        if len == 0 {
            return Ok(());
        }
        let fd = self.0.as_raw_fd();
        loop {
            // SAFETY: the kernel checks every address; the caller that has memory filled promises
            // that it may be written. The file's pages belong to this module. Its places are below
            // 4 GiB, so the offset's upper half is always 0.
            let ret = unsafe { libc::syscall(call, fd, list.as_ptr(), list.len(), at, 0) };
            match usize::try_from(ret) {
                Ok(n) if n == len => return Ok(()),
                Ok(_) => return Err(Errno(libc::EFAULT)),
                Err(_) if Errno::last().0 == libc::EINTR => {}
                Err(_) => return Err(Errno::last()),
            }
        }
    }
}

impl AsFd for BounceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Copies within this process, as [`super::vm_write`] of its own pid does if that is permitted.
/// Both lists have the same number of bytes, which is bounded.
pub(super) fn copy_own(from: &[libc::iovec], to: &[libc::iovec]) -> Res<usize> {
    let len = from.iter().map(|iovec| iovec.iov_len).sum();
    // a new file for each call, because a forked child would share an existing one with its parent
    let bounce = BounceFile(memfd_create(c"softverbs-own", len)?);
    bounce.fill(0, from)?;
    bounce.empty(0, to)?;
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::super::as_local;
    use super::*;

    #[test]
    fn copies_are_whole_or_an_error() {
        let mut from = [7u8; 100];
        let mut to = [0u8; 100];
        let (a, b) = (from.as_mut_ptr() as u64, to.as_mut_ptr() as u64);
        let list = [as_local(a, 60), as_local(a + 60, 40)];
        let there = [as_local(b, 1), as_local(b + 1, 99)];
        assert_eq!(copy_own(&list, &there), Ok(100));
        assert_eq!(to, [7; 100]);
        let missing = [as_local(b, 50), as_local(8, 50)];
        assert_eq!(copy_own(&list, &missing), Err(Errno(libc::EFAULT)));
        assert_eq!(copy_own(&missing, &list), Err(Errno(libc::EFAULT)));
        let bounce = BounceFile::create(4096).unwrap();
        assert_eq!(bounce.fill(4096 - 99, &list), Err(Errno(libc::EFAULT)));
        assert_eq!(bounce.fill(4096 - 100, &list), Ok(()));
        assert_eq!(bounce.empty(4096 - 99, &there), Err(Errno(libc::EFAULT)));
    }

    #[test]
    fn other_files_are_no_bounce_files() {
        let good = || memfd_create(c"test", 8192).unwrap();
        assert!(BounceFile::of_file(good(), 8192).is_ok());
        assert_eq!(
            BounceFile::of_file(good(), 4096).err(),
            Some(Errno(libc::EPROTO))
        );
        let pipe = super::super::Pipe::new().unwrap();
        let end = super::super::open_fd_of(std::process::id(), pipe.read_fd(), libc::O_RDWR);
        assert!(BounceFile::of_file(end.unwrap(), 8192).is_err());
    }
}
