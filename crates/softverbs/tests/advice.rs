//! `ibv_advise_mr(3)` through the table of functions: every advice, flag and error, the pages that
//! it makes present, and the device's count of them. `regions.rs` tests a device without on-demand
//! paging.

#![allow(unsafe_code, reason = "verbs is a C interface")]

use std::ptr::null_mut;

use rdma_core_sys::*;

const PAGE: usize = 4096;
const READ: u32 = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH;
const WRITE: u32 = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE;
const NO_FAULT: u32 = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
const FLUSH: u32 = 1;
const ON_DEMAND: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND;

fn verbs() -> &'static VerbsFns {
    &softverbs::backend().verbs
}

/// Two protection domains of one context. All objects stay until the process ends.
struct Device {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    other: *mut ibv_pd,
}

impl Device {
    fn open() -> Self {
        // SAFETY: the list is freed after its only use; a live context.
        unsafe {
            let mut count = 0;
            let list = (verbs().ibv_get_device_list)(&raw mut count);
            assert_eq!(count, 1);
            let context = (verbs().ibv_open_device)(*list);
            assert!(!context.is_null());
            (verbs().ibv_free_device_list)(list);
            let [pd, other] = [(); 2].map(|()| (verbs().ibv_alloc_pd)(context));
            assert!(!pd.is_null() && !other.is_null());
            Self { context, pd, other }
        }
    }

    fn register(&self, pages: &Pages, access: u32) -> *mut ibv_mr {
        // SAFETY: a live domain; the device itself looks at the memory.
        let mr = unsafe { ibv_reg_mr(verbs(), self.pd, pages.addr.cast(), pages.len, access) };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        mr
    }
}

/// Newly mapped pages of 4 KiB without any access yet, unmapped when dropped.
struct Pages {
    addr: *mut u8,
    len: usize,
}

impl Pages {
    fn new(count: usize, protection: i32) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let len = count * PAGE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let addr = unsafe {
            let addr = libc::mmap(null_mut(), len, protection, flags, -1, 0);
            assert_ne!(addr, libc::MAP_FAILED);
            libc::madvise(addr, len, libc::MADV_NOHUGEPAGE);
            addr.cast::<u8>()
        };
        Self { addr, len }
    }

    fn writable(count: usize) -> Self {
        Self::new(count, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn resident(&self) -> usize {
        let mut pages = vec![0_u8; self.len / PAGE];
        // SAFETY: a live mapping; one byte for each page.
        let ret = unsafe { libc::mincore(self.addr.cast(), self.len, pages.as_mut_ptr()) };
        assert_eq!(ret, 0);
        pages.iter().filter(|&&page| page & 1 != 0).count()
    }

    /// An sge of a range of the pages.
    fn piece(&self, lkey: u32, from: usize, length: usize) -> ibv_sge {
        ibv_sge {
            addr: self.addr as u64 + from as u64,
            length: length as u32,
            lkey,
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: this object's mapping.
        unsafe { libc::munmap(self.addr.cast(), self.len) };
    }
}

fn advise(pd: *mut ibv_pd, advice: u32, flags: u32, pieces: &[ibv_sge]) -> i32 {
    let mut list = pieces.to_vec();
    // SAFETY: a live domain and a list of that many.
    unsafe { ibv_advise_mr(pd, advice, flags, list.as_mut_ptr(), list.len() as u32) }
}

/// The device's count of pages that advice made present.
fn counted(mr: *mut ibv_mr) -> u64 {
    let mut pages = u64::MAX;
    let count = verbs().softdv_page_prefetch.unwrap();
    // SAFETY: a live region, and room for the number.
    assert_eq!(unsafe { count(mr, &raw mut pages) }, 0);
    pages
}

fn lkey(mr: *mut ibv_mr) -> u32 {
    // SAFETY: a live region.
    unsafe { (*mr).lkey }
}

fn end(mr: *mut ibv_mr) {
    // SAFETY: a live region.
    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
}

#[test]
fn pages_come_as_advised_and_are_counted() {
    let device = Device::open();
    for flags in [0, FLUSH] {
        for (advice, expected) in [(READ, 4), (WRITE, 4), (NO_FAULT, 0)] {
            let pages = Pages::writable(16);
            let mr = device.register(&pages, ON_DEMAND);
            assert_eq!((pages.resident(), counted(mr)), (0, 0));
            let none = pages.piece(lkey(mr), 5, 0);
            assert_eq!(advise(device.pd, advice, flags, &[none]), 0);
            assert_eq!((pages.resident(), counted(mr)), (0, 0), "no bytes");
            let piece = pages.piece(lkey(mr), 2 * PAGE + 5, 3 * PAGE);
            for times in 1..3 {
                assert_eq!(advise(device.pd, advice, flags, &[piece]), 0);
                assert_eq!(pages.resident(), expected, "advice {advice} flags {flags}");
                assert_eq!(counted(mr), times * expected as u64, "each time");
            }
            end(mr);
        }
    }
    let count = verbs().softdv_page_prefetch.unwrap();
    let mr = device.register(&Pages::writable(1), ON_DEMAND);
    // SAFETY: no region, and nowhere to write.
    unsafe {
        assert_eq!(count(null_mut(), &mut 0), libc::EINVAL);
        assert_eq!(count(mr, null_mut()), libc::EINVAL);
    }
    end(mr);
}

#[test]
fn wrong_keys_and_words() {
    let device = Device::open();
    let pages = Pages::writable(1);
    let mr = device.register(&pages, ON_DEMAND);
    let read_only = device.register(&pages, IBV_ACCESS_ON_DEMAND);
    // advice that made these pages present would be counted
    let touched = Pages::writable(1);
    let pinned = device.register(&touched, IBV_ACCESS_LOCAL_WRITE);
    let closed = device.register(&pages, ON_DEMAND);
    let stale = lkey(closed);
    end(closed);
    // SAFETY: a live domain.
    let window = unsafe {
        let mw = (*device.context).ops.alloc_mw.unwrap()(device.pd, IBV_MW_TYPE_1);
        assert!(!mw.is_null());
        (*mw).rkey
    };
    for flags in [0, FLUSH] {
        for advice in [READ, WRITE, NO_FAULT] {
            let of = |key| advise(device.pd, advice, flags, &[pages.piece(key, 0, 8)]);
            let what = format!("advice {advice} flags {flags}");
            assert_eq!(of(stale), libc::ENOENT, "{what}: a region that has gone");
            assert_eq!(of(0), libc::ENOENT, "{what}: no key");
            assert_eq!(of(window), libc::EINVAL, "{what}: a window's key");
            let own = touched.piece(lkey(pinned), 0, 8);
            assert_eq!(
                advise(device.pd, advice, flags, &[own]),
                libc::ENOENT,
                "{what}: pinned"
            );
            let foreign = advise(device.other, advice, flags, &[pages.piece(lkey(mr), 0, 8)]);
            assert_eq!(foreign, libc::EPERM, "{what}: another domain");
            assert_eq!(
                advise(device.pd, advice, flags, &[]),
                libc::EINVAL,
                "{what}: no pieces"
            );
        }
        let write = advise(
            device.pd,
            WRITE,
            flags,
            &[pages.piece(lkey(read_only), 0, 8)],
        );
        assert_eq!(write, libc::EPERM, "nobody may write");
        let unknown = advise(device.pd, 3, flags, &[pages.piece(lkey(mr), 0, 8)]);
        assert_eq!(unknown, libc::EOPNOTSUPP, "an unknown advice");
    }
    for flags in [2, 3, 1 << 31] {
        let unknown = advise(device.pd, READ, flags, &[pages.piece(lkey(mr), 0, 8)]);
        assert_eq!(unknown, libc::EINVAL, "an unknown flag");
    }
    assert_eq!((pages.resident(), counted(mr)), (0, 0), "nothing was done");
    for mr in [mr, read_only, pinned] {
        end(mr);
    }
}

#[test]
fn ranges_count_with_flush() {
    let device = Device::open();
    let pages = Pages::writable(3);
    let mr = device.register(&pages, ON_DEMAND);
    let key = lkey(mr);
    let outside = [(3 * PAGE, 1), (3 * PAGE - 4, 8), (usize::MAX, 1)];
    for (from, len) in outside {
        let piece = ibv_sge {
            addr: (pages.addr as u64).wrapping_add(from as u64),
            length: len,
            lkey: key,
        };
        assert_eq!(advise(device.pd, READ, 0, &[piece]), 0, "{from}");
        assert_eq!(
            advise(device.pd, READ, FLUSH, &[piece]),
            libc::EFAULT,
            "{from}"
        );
    }
    assert_eq!((pages.resident(), counted(mr)), (0, 0));

    // an invalid element after a valid one: with FLUSH the first is executed; without it an invalid
    // key stops both
    let list = [pages.piece(key, 0, 8), pages.piece(key, 3 * PAGE, 8)];
    assert_eq!(advise(device.pd, WRITE, FLUSH, &list), libc::EFAULT);
    assert_eq!((pages.resident(), counted(mr)), (1, 1));
    let list = [pages.piece(key, PAGE, 8), pages.piece(0, 0, 8)];
    assert_eq!(advise(device.pd, WRITE, 0, &list), libc::ENOENT);
    assert_eq!((pages.resident(), counted(mr)), (1, 1));
    assert_eq!(advise(device.pd, WRITE, FLUSH, &list), libc::ENOENT);
    assert_eq!((pages.resident(), counted(mr)), (2, 2));
    end(mr);
}

#[test]
fn memory_that_cannot_be_had() {
    let device = Device::open();
    let pages = Pages::new(1, libc::PROT_READ);
    let mr = device.register(&pages, ON_DEMAND);
    let piece = pages.piece(lkey(mr), 0, 8);
    assert_eq!(advise(device.pd, WRITE, 0, &[piece]), 0);
    assert_eq!(
        advise(device.pd, WRITE, FLUSH, &[piece]),
        libc::EFAULT,
        "not for writing"
    );
    // not unmapped, because another test might map memory there
    // SAFETY: this test's mapping.
    let ret = unsafe { libc::mprotect(pages.addr.cast(), PAGE, libc::PROT_NONE) };
    assert_eq!(ret, 0);
    for advice in [READ, WRITE] {
        assert_eq!(advise(device.pd, advice, 0, &[piece]), 0);
        assert_eq!(
            advise(device.pd, advice, FLUSH, &[piece]),
            libc::EFAULT,
            "out of reach"
        );
    }
    assert_eq!(advise(device.pd, NO_FAULT, FLUSH, &[piece]), 0);
    assert_eq!(counted(mr), 0);
    end(mr);
}
