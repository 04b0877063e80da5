//! From where to where mappings go that are no file's: `/proc/self/maps`, by query (Linux 6.11) or by reading it.

#![allow(unsafe_code, reason = "an ioctl")]

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::errno::{FiErrno, Result};
use crate::mr::{backed, page};

/// `struct procmap_query` of linux/fs.h, without what is not asked for.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    flags_of_mapping: u64,
    page_size: u64,
    offset: u64,
    /// 0 where it is no file's.
    inode: u64,
    /// Device, sizes and addresses of names.
    rest: [u64; 4],
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
