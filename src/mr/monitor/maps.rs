//! From where to where mappings go: `/proc/self/maps`, by query (Linux 6.11) or by reading it.

#![allow(unsafe_code, reason = "an ioctl")]

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::errno::{FiErrno, Result};
use crate::mr::backed;

/// `struct procmap_query` of linux/fs.h, without what is not asked for.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    /// Flags, size of a page, offset, inode, device, sizes and addresses of names.
    rest: [u64; 8],
}

/// `_IOWR('f', 17, struct procmap_query)`
const PROCMAP_QUERY: u64 = 3 << 30 | (size_of::<Query>() as u64) << 16 | (b'f' as u64) << 8 | 17;
const _: () = assert!(size_of::<Query>() == 104);

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

    /// The range of the mappings that a range lies in.
    ///
    /// # Errors
    /// `EFAULT`: not all of it is mapped.
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
        let mut query = Query {
            size: size_of::<Query>() as u64,
            addr,
            ..Query::default()
        };
        // SAFETY: the structure that the request takes.
        let ret = unsafe { libc::ioctl(self.0.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) };
        if ret < 0 {
            return Err(match FiErrno::last() {
                FiErrno::ENOENT => FiErrno::EFAULT,
                error => error,
            });
        }
        Ok((query.start, query.end))
    }

    fn read(start: u64, end: u64) -> Result<(u64, u64)> {
        let mappings = backed::mappings().map_err(|_| FiErrno::EACCES)?;
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
        // SAFETY: mapped above.
        let hole = unsafe {
            libc::munmap(std::ptr::without_provenance_mut(start as usize), PAGE);
            start
        };
        assert_eq!(
            maps.around(hole - page, hole + 2 * page).err(),
            Some(FiErrno::EFAULT)
        );
        assert_eq!(
            Maps::read(hole - page, hole + 2 * page).err(),
            Some(FiErrno::EFAULT)
        );
    }
}
