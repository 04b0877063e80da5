//! `ibv_advise_mr`: makes pages of on-demand regions present.
//!
//! Errors are those of mlx5's kernel code (`get_prefetchable_mr`, `pagefault_mr` in its `odp.c`)
//! and of `UVERBS_METHOD_ADVISE_MR`. The work is always done before the call returns; without
//! FLUSH, only errors of the keys are reported.

use rdma_core_sys::*;

use super::{Regions, access};
use crate::key::Key;
use crate::sys::{self, Errno, Res, with_room};

/// `IBV_ADVISE_MR_FLAG_FLUSH`.
const FLUSH: u32 = 1;

/// Handling of a page that is not present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefetch {
    Read,
    Write,
    /// The page stays absent.
    NoFault,
}

/// Applies an advice to a list of sges.
///
/// # Errors
/// `EINVAL`: unknown flags, no sges, or the key of a memory window. `EOPNOTSUPP`: unknown advice.
/// `ENOENT`: the key is not the key of an on-demand region. `EPERM`: the region has another
/// protection domain, or the advice is to write and the region is read-only. With FLUSH also
/// `EFAULT`: an sge outside its region, or pages that cannot be made present; the pages of earlier
/// sges are present.
pub(crate) fn advise(
    regions: &Regions,
    is_window: impl Fn(Key) -> bool,
    pd: u32,
    advice: u32,
    flags: u32,
    sges: &[ibv_sge],
) -> Res<()> {
    if flags & !FLUSH != 0 || sges.is_empty() {
        return Err(Errno(libc::EINVAL));
    }
    let prefetch = match advice {
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH => Prefetch::Read,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => Prefetch::Write,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => Prefetch::NoFault,
        _ => return Err(Errno(libc::EOPNOTSUPP)),
    };
    let place = |sge: &ibv_sge| match find(regions, pd, prefetch, sge) {
        Err(Errno(libc::ENOENT)) if is_window(Key(sge.lkey)) => Err(Errno(libc::EINVAL)),
        found => found,
    };
    if flags & FLUSH == 0 {
        // All keys are checked first: a driver checks none later, when it leaves the work to a
        // worker.
        let mut places = with_room(sges.len())?;
        for sge in sges {
            places.push(place(sge)?);
        }
        for (place, sge) in places.into_iter().zip(sges) {
            let _ = place.and_then(|addr| follow(regions, addr, sge, prefetch));
        }
        return Ok(());
    }
    for sge in sges {
        follow(regions, place(sge)??, sge, prefetch)?;
    }
    Ok(())
}

/// The address of an sge; the inner result is `EFAULT` if the sge is outside its region.
fn find(regions: &Regions, pd: u32, prefetch: Prefetch, sge: &ibv_sge) -> Res<Res<u64>> {
    let region = regions.describe(Key(sge.lkey)).ok_or(Errno(libc::ENOENT))?;
    if region.access & IBV_ACCESS_ON_DEMAND == 0 {
        return Err(Errno(libc::ENOENT));
    }
    if region.pd != pd || prefetch == Prefetch::Write && !access::writable(region.access) {
        return Err(Errno(libc::EPERM));
    }
    let range = region.range;
    let Some(offset) = sge.addr.checked_sub(range.iova) else {
        return Ok(Err(Errno(libc::EFAULT)));
    };
    // The kernel accepts addresses up to the end of the region's last page.
    let end = sys::page_end(range.addr.saturating_add(range.len));
    let inside = range
        .addr
        .checked_add(offset)
        .filter(|&addr| addr < end && u64::from(sge.length) <= end - addr);
    Ok(inside.ok_or(Errno(libc::EFAULT)))
}

/// Makes the pages of an sge at an address present, and counts them.
fn follow(regions: &Regions, addr: u64, sge: &ibv_sge, prefetch: Prefetch) -> Res<()> {
    let length = sge.length as usize;
    let write = match prefetch {
        Prefetch::NoFault => return Ok(()),
        Prefetch::Read => false,
        Prefetch::Write => true,
    };
    if length == 0 {
        return Ok(());
    }
    if !sys::pages_usable(addr, length, write) {
        return Err(Errno(libc::EFAULT));
    }
    regions.count_prefetched(Key(sge.lkey), sys::pages_of(addr, length as u64));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Range;
    use super::*;
    use crate::mw::Windows;
    use crate::segment::OwnSegment;

    /// New pages that have not been accessed.
    struct Pages {
        addr: u64,
        len: usize,
    }

    impl Pages {
        fn new(len: usize, protection: i32) -> Self {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping at an address that the kernel chooses replaces no other
            // mapping.
            let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
            assert_ne!(addr, libc::MAP_FAILED);
            let addr = addr as u64;
            Self { addr, len }
        }

        fn resident(&self) -> usize {
            let mut pages = vec![0u8; self.len / 4096];
            // SAFETY: the mapping is live, and the vector has one byte for each page of it.
            let ret = unsafe {
                libc::mincore(
                    std::ptr::without_provenance_mut(self.addr as usize),
                    self.len,
                    pages.as_mut_ptr(),
                )
            };
            assert_eq!(ret, 0);
            pages.iter().filter(|&&page| page & 1 != 0).count()
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: this object owns the mapping.
            unsafe {
                libc::munmap(
                    std::ptr::without_provenance_mut(self.addr as usize),
                    self.len,
                )
            };
        }
    }

    const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
    const READ: u32 = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH;
    const WRITE: u32 = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE;
    const NO_FAULT: u32 = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
    const ALL: u32 = IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE;

    struct Fixture {
        segment: OwnSegment,
        regions: Regions,
        windows: Windows,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                segment: OwnSegment::create(1, 0, true).unwrap(),
                regions: Regions::new().unwrap(),
                windows: Windows::default(),
            }
        }

        fn register(&self, pages: &Pages, access: u32) -> Key {
            let range = Range {
                addr: pages.addr,
                len: pages.len as u64,
                iova: 0x10_0000,
            };
            self.regions
                .register(&self.segment, 1, range, access)
                .unwrap()
        }

        fn advise(&self, advice: u32, flags: u32, key: Key, from: u64, len: u32) -> Res<()> {
            let sge = ibv_sge {
                addr: from,
                length: len,
                lkey: key.0,
            };
            let is_window = |key| self.windows.has(key);
            advise(&self.regions, is_window, 1, advice, flags, &[sge])
        }
    }

    fn error(errno: i32) -> Res<()> {
        Err(Errno(errno))
    }

    #[test]
    fn pages_become_resident_as_advised() {
        let own = Fixture::new();
        for flags in [0, FLUSH] {
            for (advice, expected) in [(READ, 4), (WRITE, 4), (NO_FAULT, 0)] {
                let pages = Pages::new(16 * 4096, RW);
                let key = own.register(&pages, ALL);
                assert_eq!((pages.resident(), own.regions.prefetched(key)), (0, 0));
                let from = 0x10_0000 + 2 * 4096 + 5;
                assert_eq!(own.advise(advice, flags, key, from, 3 * 4096), Ok(()));
                assert_eq!(pages.resident(), expected, "advice {advice}, flags {flags}");
                assert_eq!(own.regions.prefetched(key), expected as u64);
                assert_eq!(own.advise(advice, flags, key, from, 0), Ok(()));
                assert_eq!(pages.resident(), expected);
                assert_eq!(own.regions.prefetched(key), expected as u64);
            }
        }
    }

    #[test]
    fn every_error_of_a_key() {
        let own = Fixture::new();
        let pages = Pages::new(4096, RW);
        let key = own.register(&pages, ALL);
        let pinned = own.register(&pages, IBV_ACCESS_LOCAL_WRITE);
        let read_only = own.register(&pages, IBV_ACCESS_ON_DEMAND);
        let owner = crate::mw::Owner {
            regions: &own.regions,
            segment: &own.segment,
            lives: &|_| true,
        };
        let kind = crate::mw::Kind::One;
        let window = own.windows.alloc(&owner, kind, 1).unwrap();
        for flags in [0, FLUSH] {
            let wrong = |advice, key| own.advise(advice, flags, key, 0x10_0000, 8);
            assert_eq!(wrong(READ, Key(key.0 ^ 1)), error(libc::ENOENT));
            assert_eq!(wrong(READ, Key(0)), error(libc::ENOENT));
            assert_eq!(wrong(READ, pinned), error(libc::ENOENT));
            assert_eq!(wrong(READ, read_only), Ok(()));
            assert_eq!(wrong(WRITE, read_only), error(libc::EPERM));
            let sge = ibv_sge {
                addr: 0x10_0000,
                length: 8,
                lkey: key.0,
            };
            let other = advise(&own.regions, |_| false, 2, READ, flags, &[sge]);
            assert_eq!(other, error(libc::EPERM));
            assert_eq!(wrong(READ, window), error(libc::EINVAL));
            assert_eq!(wrong(3, key), error(libc::EOPNOTSUPP));
            let none = advise(&own.regions, |_| false, 1, READ, flags, &[]);
            assert_eq!(none, error(libc::EINVAL));
        }
        assert_eq!(own.advise(READ, 2, key, 0x10_0000, 8), error(libc::EINVAL));
    }

    #[test]
    fn ranges_count_with_flush_only() {
        let own = Fixture::new();
        let pages = Pages::new(3 * 4096, RW);
        let key = own.register(&pages, ALL);
        let end = 0x10_0000 + 3 * 4096;
        for (from, len) in [(0xf_ffff, 8), (end, 1), (end - 4, 8), (u64::MAX, 1)] {
            assert_eq!(own.advise(READ, 0, key, from, len), Ok(()));
            let flushed = own.advise(READ, FLUSH, key, from, len);
            assert_eq!(flushed, error(libc::EFAULT), "{from:x} {len}");
        }
        assert_eq!((pages.resident(), own.regions.prefetched(key)), (0, 0));
        // Up to the end of the last page.
        let range = Range {
            addr: pages.addr,
            len: 100,
            iova: 0,
        };
        let short = own.regions.register(&own.segment, 1, range, ALL).unwrap();
        assert_eq!(own.advise(READ, FLUSH, short, 50, 100), Ok(()));
        assert_eq!(
            own.advise(READ, FLUSH, short, 50, 4096),
            error(libc::EFAULT)
        );
    }

    #[test]
    fn memory_that_cannot_be_had() {
        let own = Fixture::new();
        let pages = Pages::new(2 * 4096, libc::PROT_READ);
        let key = own.register(&pages, ALL);
        assert_eq!(own.advise(WRITE, 0, key, 0x10_0000, 8), Ok(()));
        assert_eq!(
            own.advise(WRITE, FLUSH, key, 0x10_0000, 8),
            error(libc::EFAULT)
        );
        assert_eq!(own.advise(READ, FLUSH, key, 0x10_0000, 8), Ok(()));
        assert_eq!(pages.resident(), 1);
        drop(pages);
        assert_eq!(
            own.advise(READ, FLUSH, key, 0x10_0000, 8),
            error(libc::EFAULT)
        );
        assert_eq!(own.advise(NO_FAULT, FLUSH, key, 0x10_0000, 8), Ok(()));
    }
}
