//! A query of `/proc/self/maps` for one mapping (`PROCMAP_QUERY`, Linux 6.11), instead of reading
//! all mappings of the process.

#![allow(unsafe_code, reason = "an ioctl")]

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::errno::{FiErrno, Result};

/// `struct procmap_query` of linux/fs.h; the fields that this module does not use are in `rest`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    flags_of_mapping: u64,
    pub(super) page_size: u64,
    offset: u64,
    /// 0 if the mapping is not of a file.
    pub(super) inode: u64,
    /// Device, sizes and addresses of names.
    rest: [u64; 4],
}

/// `_IOWR('f', 17, struct procmap_query)`
const PROCMAP_QUERY: u64 = 3 << 30 | (size_of::<Query>() as u64) << 16 | (b'f' as u64) << 8 | 17;
const _: () = assert!(size_of::<Query>() == 104);

/// Only readable mappings.
pub(super) const READABLE: u64 = 1;
/// Only writable mappings.
pub(super) const WRITABLE: u64 = 2;
/// The next mapping, if none contains the address.
pub(super) const OR_NEXT: u64 = 0x10;

impl Query {
    /// Queries the mapping of an address. `maps` is `/proc/self/maps`, opened by this process.
    ///
    /// # Errors
    /// `ENOENT`: no such mapping. `ENOTTY`: the kernel has no such query.
    pub(super) fn ask(maps: &File, addr: u64, flags: u64) -> Result<Self> {
        let mut query = Self {
            size: size_of::<Self>() as u64,
            flags,
            addr,
            ..Self::default()
        };
        // SAFETY: the structure that the request takes, with its size in it.
        let ret = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) };
        if ret < 0 {
            return Err(FiErrno::last());
        }
        Ok(query)
    }
}
