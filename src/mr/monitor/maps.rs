//! From where to where mappings go that are no file's: `/proc/self/maps`, by query (Linux 6.11) or by reading it.

use std::fs::File;

use crate::errno::{FiErrno, Result};
use crate::mr::procmap::Query;
use crate::mr::{backed, page};

/// See the module. Thread safe.
#[derive(Debug)]
pub(super) struct Maps(File);

impl Maps {
    /// # Errors
    /// Where `/proc` is closed.
    pub(super) fn open() -> Result<Self> {
        let file = File::open("/proc/self/maps");
        file.map(Self).map_err(|_| FiErrno::EACCES)
    }

    /// The range of the mappings that a range lies in, which are no file's: a file can be cut short, and takes the pages of its mappings away
    /// without an event, the private copies too.
    ///
    /// # Errors
    /// `EFAULT`: not all of it is such mappings.
    pub(super) fn around(&self, start: u64, end: u64) -> Result<(u64, u64)> {
        let (mut first, mut at) = (start, start);
        while at < end {
            match self.query(at) {
                Ok((from, to)) if from <= at && at < to => {
                    first = first.min(from);
                    at = to;
                }
                Err(FiErrno::EFAULT) => return Err(FiErrno::EFAULT),
                _ => return Self::read(start, end),
            }
        }
        Ok((first, at))
    }

    /// The mapping of an address.
    fn query(&self, addr: u64) -> Result<(u64, u64)> {
        let query = Query::ask(&self.0, addr, 0).map_err(|error| match error {
            FiErrno::ENOENT => FiErrno::EFAULT,
            error => error,
        })?;
        if query.inode != 0 {
            // huge pages may be anonymous all the same, as the name says, which is read
            let huge = page::ceil(1) < Some(query.page_size);
            return Err(if huge {
                FiErrno::EINVAL
            } else {
                FiErrno::EFAULT
            });
        }
        Ok((query.start, query.end))
    }

    fn read(start: u64, end: u64) -> Result<(u64, u64)> {
        let mappings = backed::anonymous().map_err(|_| FiErrno::EACCES)?;
        let (mut first, mut at) = (start, start);
        for (from, to) in mappings {
            if from <= at && at < to && at < end {
                first = first.min(from);
                at = to;
            }
        }
        if at < end {
            return Err(FiErrno::EFAULT);
        }
        Ok((first, at))
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "maps memory")]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_same() {
        const PAGE: usize = 4096;
        // SAFETY: new mappings; the last page is one with other rights, so a mapping of its own.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let new = libc::mmap(
                std::ptr::null_mut(),
                9 * PAGE,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            );
            assert_ne!(new, libc::MAP_FAILED);
            let inner = new.wrapping_byte_add(PAGE);
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(inner, 4 * PAGE, rights), 0);
            assert_eq!(
                libc::mprotect(inner.wrapping_byte_add(4 * PAGE), 3 * PAGE, libc::PROT_READ),
                0
            );
            inner as u64
        };
        let maps = Maps::open().unwrap();
        let page = PAGE as u64;
        for (from, to, found) in [
            (1, 2, (0, 4)),
            (0, 4, (0, 4)),
            (3, 5, (0, 7)),
            (6, 7, (4, 7)),
        ] {
            let found = Ok((start + found.0 * page, start + found.1 * page));
            let (from, to) = (start + from * page, start + to * page);
            assert_eq!(maps.around(from, to), found);
            assert_eq!(Maps::read(from, to), found);
        }
        // SAFETY: a mapping of a file in the place of one page of the above; and a hole in the place of another.
        unsafe {
            let file = libc::memfd_create(c"weft-test".as_ptr(), libc::MFD_CLOEXEC);
            libc::ftruncate(file, PAGE as i64);
            let at = std::ptr::without_provenance_mut(start as usize + 2 * PAGE);
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            assert_eq!(libc::mmap(at, PAGE, libc::PROT_READ, flags, file, 0), at);
            libc::munmap(std::ptr::without_provenance_mut(start as usize), PAGE);
        }
        for at in [start, start + 2 * page] {
            let refused = Err(FiErrno::EFAULT);
            assert_eq!(maps.around(at - page, at + 2 * page), refused);
            assert_eq!(Maps::read(at - page, at + 2 * page), refused);
        }
    }
}
