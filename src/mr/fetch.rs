//! Fetching of the pages of a large region by several threads, before its registration pins them.

#![allow(unsafe_code, reason = "madvise(2)")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdma_core_sys as sys;

use super::mode::Paging;
use super::workers::workers;
use super::{Buffer, Region, page};

/// Minimum length in bytes of a region whose pages several threads fetch, and the length of the
/// share that a thread fetches at a time.
const LARGE: u64 = 64 << 20;
const SHARE: usize = 16 << 20;

impl Region {
    /// Fetches the pages of a large pinned region by several threads, before the registration pins
    /// them, up to the first page that cannot be fetched: the registration reports the error.
    pub(super) fn fetch_pages(&self) {
        let pinned = self.domain().paging() == Paging::Pinned;
        // DMA-BUF memory has no pages to fetch
        if !pinned || self.len < LARGE || self.dmabuf.is_some() {
            return;
        }
        let written = self.access().verbs_rights(false) & sys::IBV_ACCESS_LOCAL_WRITE != 0;
        let advice = if written {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        // no list of the shares: a region of 2^64 bytes has 2^40
        let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
        let fetch = || {
            while !failed.load(Ordering::Relaxed)
                && let Some(share) = share(&self.buffers, next.fetch_add(1, Ordering::Relaxed))
            {
                // SAFETY: whole pages of the caller's memory (`Region::register`); the advice keeps
                // the contents.
                let ret = unsafe { libc::madvise(share.addr.cast_mut(), share.len, advice) };
                if ret != 0 {
                    failed.store(true, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..workers() {
                let helper = std::thread::Builder::new().name("weft-fetch".to_owned());
                if helper.spawn_scoped(scope, fetch).is_err() {
                    break;
                }
            }
            fetch();
        });
    }
}

/// The share number `number` of the whole pages of buffers, if there is one.
fn share(buffers: &[Buffer], mut number: u64) -> Option<Buffer> {
    for buffer in buffers {
        let start = page::floor(buffer.start());
        let end = page::ceil(buffer.end()).unwrap_or(buffer.end());
        let count = (end - start).div_ceil(SHARE as u64);
        if number < count {
            let addr = start + number * SHARE as u64;
            return Some(Buffer {
                addr: std::ptr::without_provenance(addr as usize), // only the kernel uses it
                len: SHARE.min((end - addr) as usize),
            });
        }
        number -= count;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use super::super::{Access, RegionConfig};
    use super::*;
    use crate::domain::{Domain, DomainConfig};

    #[test]
    fn shares_cover_a_buffer_once() {
        for (addr, len) in [
            (0x1000, 1),
            (0x1fff, 2),
            (0x7000, SHARE),
            (0x7001, 5 * SHARE),
        ] {
            let addr: *const c_void = std::ptr::without_provenance(addr);
            let buffer = Buffer { addr, len };
            let buffers = [buffer];
            let shares: Vec<_> = (0..).map_while(|number| share(&buffers, number)).collect();
            assert_eq!(shares[0].start(), page::floor(buffer.start()));
            let mut at = shares[0].start();
            for share in &shares {
                assert_eq!(share.start(), at);
                assert!(share.len > 0 && share.len <= SHARE);
                at = share.end();
            }
            assert_eq!(Some(at), page::ceil(buffer.end()));
        }
        let buffer = |addr, len| Buffer {
            addr: std::ptr::without_provenance(addr),
            len,
        };
        let two = [buffer(0x7001, SHARE), buffer(0, usize::MAX)];
        let starts = [0x7000, 0x7000 + SHARE, 0, SHARE];
        for (number, start) in starts.into_iter().enumerate() {
            assert_eq!(share(&two, number as u64).unwrap().start(), start as u64);
        }
        let all = u64::MAX.div_ceil(SHARE as u64);
        assert!(share(&two, all + 1).is_some() && share(&two, all + 2).is_none());
    }

    /// All pages of a large region are fetched before the registration; the registration itself
    /// fetches those of a smaller region.
    #[test]
    fn pages_of_a_large_region_are_fetched_first() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        assert_eq!(domain.mr().paging(), Paging::Pinned);
        for (len, expected) in [(LARGE as usize, true), (LARGE as usize / 2, false)] {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping.
            let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
            assert_ne!(addr, libc::MAP_FAILED);
            let config = RegionConfig {
                buffers: &[Buffer { addr, len }],
                access: Access::all(),
                requested_key: 1,
                ..RegionConfig::default()
            };
            // SAFETY: the memory is unmapped after the region is dropped.
            let region = unsafe { Region::prepare(domain.mr(), &config) }.unwrap();
            region.fetch_pages();
            let mut pages = vec![0_u8; len / 4096];
            // SAFETY: a live mapping; at most one byte of `pages` for each page of the system.
            let ret = unsafe { libc::mincore(addr, len, pages.as_mut_ptr()) };
            assert_eq!(ret, 0);
            let there = pages.iter().filter(|&&page| page & 1 != 0).count();
            assert_eq!(there, if expected { pages.len() } else { 0 });
            drop(region);
            // SAFETY: this test's mapping, which no region uses any more.
            unsafe { libc::munmap(addr, len) };
        }
    }

    /// A list of the shares would need 16 TiB.
    #[test]
    fn the_whole_address_space_is_not_fetched() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let config = RegionConfig {
            buffers: &[Buffer {
                addr: std::ptr::null(),
                len: usize::MAX,
            }],
            access: Access::all(),
            requested_key: 1,
            ..RegionConfig::default()
        };
        // SAFETY: nothing is accessed.
        let region = unsafe { Region::prepare(domain.mr(), &config) }.unwrap();
        region.fetch_pages();
    }
}
