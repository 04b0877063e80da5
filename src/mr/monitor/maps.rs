//! The extent of anonymous mappings: `/proc/self/maps`, by query (Linux 6.11) or by reading it.

use std::fs::File;

use parking_lot::Mutex;

use crate::errno::{FiErrno, Result};
use crate::mr::procmap::Query;
use crate::mr::{backed, page};

/// `/proc/self/maps` of this process. Thread safe.
#[derive(Debug)]
pub(super) struct Maps {
    file: File,
    /// One thread reads it at a time. The kernel continues a read at the place of the last one; at
    /// another place it begins with the first mapping again.
    reads: Mutex<()>,
}

impl Maps {
    /// Opens the file.
    ///
    /// # Errors
    /// `EACCES`, `ENOENT`: `/proc` is not accessible. `EMFILE`, `ENFILE`: no descriptor is free.
    pub(super) fn open() -> Result<Self> {
        Ok(Self {
            file: File::open("/proc/self/maps")?,
            reads: Mutex::new(()),
        })
    }

    /// All anonymous mappings. Needs no further descriptor.
    ///
    /// # Errors
    /// Those of reading, for lack of memory.
    pub(super) fn anonymous(&self) -> Result<Vec<(u64, u64)>> {
        let _one = self.reads.lock();
        Ok(backed::anonymous(&self.file)?)
    }

    /// The extent of the mappings that contain this range, all of which must be anonymous:
    /// truncating a file takes pages from its mappings without an event, also from private copies.
    ///
    /// # Errors
    /// `EFAULT`: a part of the range is not mapped, or is of a file.
    pub(super) fn around(&self, start: u64, end: u64) -> Result<(u64, u64)> {
        let (mut first, mut at) = (start, start);
        while at < end {
            match self.query(at) {
                Ok((from, to)) if from <= at && at < to => {
                    first = first.min(from);
                    at = to;
                }
                Err(FiErrno::EFAULT) => return Err(FiErrno::EFAULT),
                _ => return self.read(start, end),
            }
        }
        Ok((first, at))
    }

    /// The mapping that contains an address.
    fn query(&self, addr: u64) -> Result<(u64, u64)> {
        let query = Query::ask(&self.file, addr, 0).map_err(|error| match error {
            FiErrno::ENOENT => FiErrno::EFAULT,
            error => error,
        })?;
        if query.inode != 0 {
            // anonymous huge pages have an inode too: the caller decides by the name, which it
            // reads
            let huge = page::ceil(1) < Some(query.page_size);
            return Err(if huge {
                FiErrno::EINVAL
            } else {
                FiErrno::EFAULT
            });
        }
        Ok((query.start, query.end))
    }

    fn read(&self, start: u64, end: u64) -> Result<(u64, u64)> {
        let mappings = self.anonymous()?;
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
        // SAFETY: new mappings; the last page has other rights, so it is a mapping of its own.
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
            assert_eq!(maps.read(from, to), found);
        }
        // SAFETY: replaces one page of the mapping above by a file, and unmaps another.
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
            assert_eq!(maps.read(at - page, at + 2 * page), refused);
        }
    }
}
