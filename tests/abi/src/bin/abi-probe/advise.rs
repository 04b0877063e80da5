//! `fi_open_ops`, and `weft_mr_ops.advise`: every advice, flag and error of `ibv_advise_mr(3)`
//! through libfabric. libfabric has no regions over windows; the error for their keys is tested in
//! softverbs.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, close, open_domain};
use abi_tests::weft::*;
use libfabric_sys::*;

const PAGE: usize = 4096;
const INVALID: i32 = -FI_EINVAL;
const FAULT: i32 = -FI_EFAULT;
const FLAGS: [u32; 2] = [0, WEFT_ADVISE_FLUSH];
const ADVICE: [u32; 3] = [
    WEFT_ADVISE_PREFETCH,
    WEFT_ADVISE_PREFETCH_WRITE,
    WEFT_ADVISE_PREFETCH_NO_FAULT,
];
/// On-demand regions, on a device with on-demand paging.
const PAGED: i32 = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;

/// Newly mapped pages without any access yet.
struct Pages {
    addr: *mut u8,
    len: usize,
}

impl Pages {
    fn new(len: usize, protection: i32) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses; without huge pages, so that
        // pages are counted singly.
        let addr = unsafe {
            let addr = libc::mmap(null_mut(), len, protection, flags, -1, 0);
            assert_ne!(addr, libc::MAP_FAILED);
            libc::madvise(addr, len, libc::MADV_NOHUGEPAGE);
            addr
        };
        Self {
            addr: addr.cast(),
            len,
        }
    }

    fn writable(count: usize) -> Self {
        Self::new(count * PAGE, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn resident(&self) -> usize {
        let mut pages = vec![0_u8; self.len / PAGE];
        // SAFETY: the mapping is live; one byte for each page of it.
        let ret = unsafe { libc::mincore(self.addr.cast(), self.len, pages.as_mut_ptr()) };
        assert_eq!(ret, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's.
        unsafe { libc::munmap(self.addr.cast(), self.len) };
    }
}

struct World {
    setup: Setup,
    ops: &'static weft_mr_ops,
}

impl World {
    fn new(lib: &Lib, mr_mode: i32) -> Self {
        let hints = hints(lib);
        // SAFETY: hints have all their parts; an open domain.
        unsafe {
            (*(*hints.first()).domain_attr).mr_mode = mr_mode;
            let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
            assert_eq!((*(*setup.info.first()).domain_attr).mr_mode, mr_mode);
            let ops = mr_ops(setup.domain);
            Self { setup, ops }
        }
    }

    /// A region over these buffers.
    fn region(&self, buffers: &[&Pages], access: u64) -> *mut fid_mr {
        let (domain, mut mr) = (self.setup.domain, null_mut());
        let iov: Vec<_> = buffers
            .iter()
            .map(|pages| libc::iovec {
                iov_base: pages.addr.cast::<c_void>(),
                iov_len: pages.len,
            })
            .collect();
        // SAFETY: an open domain; the pages outlive their regions.
        let ret = unsafe {
            let fid = &raw mut (*domain).fid;
            let (iov, count) = (iov.as_ptr(), iov.len());
            let (out, context) = (&raw mut mr, null_mut());
            call!(
                (*domain).mr,
                regv,
                fid,
                iov,
                count,
                access,
                0,
                7,
                0,
                out,
                context
            )
        };
        assert_eq!(ret, 0, "fi_mr_regv");
        mr
    }

    fn call(&self, advice: u32, flags: u32, ranges: &[weft_mr_range]) -> i32 {
        let call = self.ops.advise.expect("advise");
        // SAFETY: an open domain and a list of that length.
        unsafe {
            call(
                self.setup.domain,
                advice,
                flags,
                ranges.as_ptr(),
                ranges.len(),
            )
        }
    }

    /// The device's count of pages that advice made present.
    fn counted(&self, mr: *mut fid_mr) -> Result<u64, i32> {
        let (call, mut pages) = (self.ops.mr_prefetched.expect("mr_prefetched"), u64::MAX);
        // SAFETY: what is no open region is refused; room for the number.
        match unsafe { call(mr, &raw mut pages) } {
            0 => Ok(pages),
            error => Err(error),
        }
    }

    fn one(&self, advice: u32, flags: u32, mr: *mut fid_mr, addr: u64, len: usize) -> i32 {
        self.call(advice, flags, &[weft_mr_range { mr, addr, len }])
    }
}

fn end(mr: *mut fid_mr) {
    // SAFETY: an open region.
    assert_eq!(unsafe { close(mr) }, 0);
}

/// The errors of `fi_open_ops` for other names, flags and arguments.
fn table(world: &World) {
    let domain = world.setup.domain;
    // SAFETY: open objects.
    unsafe {
        assert_eq!(open_ops(domain, c"weft_mr_op", 0), Err(-FI_ENOSYS));
        assert_eq!(open_ops(domain, c"", 0), Err(-FI_ENOSYS));
        assert_eq!(open_ops(domain, c"weft_mr_ops", 1), Err(-FI_EBADFLAGS));
        assert_eq!(open_ops(world.setup.cq, c"weft_mr_ops", 0), Err(-FI_ENOSYS));
        assert_eq!(
            open_ops(world.setup.fabric, c"weft_mr_ops", 0),
            Err(-FI_ENOSYS)
        );
        let open = (*(*domain).fid.ops).ops_open.expect("a slot");
        let mut ops = null_mut();
        let fid = &raw mut (*domain).fid;
        assert_eq!(open(fid, null(), 0, &raw mut ops, null_mut()), INVALID);
        let name = c"weft_mr_ops".as_ptr();
        assert_eq!(open(fid, name, 0, null_mut(), null_mut()), INVALID);
        assert!(ops.is_null());
    }
}

fn pages_come_as_advised(world: &World) {
    for flags in FLAGS {
        for (advice, expected) in ADVICE.into_iter().zip([4, 4, 0]) {
            let pages = Pages::writable(16);
            let mr = world.region(&[&pages], FI_SEND | FI_RECV);
            assert_eq!((pages.resident(), world.counted(mr)), (0, Ok(0)), "before");
            let from = pages.addr as u64 + 2 * PAGE as u64 + 5;
            assert_eq!(world.one(advice, flags, mr, from, 0), 0);
            assert_eq!(pages.resident(), 0, "no bytes");
            assert_eq!(world.one(advice, flags, mr, from, 3 * PAGE), 0);
            assert_eq!(pages.resident(), expected, "advice {advice}, flags {flags}");
            assert_eq!(world.counted(mr), Ok(expected as u64), "the device's count");
            end(mr);
        }
    }
}

fn wrong_arguments(world: &World) {
    let pages = Pages::writable(1);
    let mr = world.region(&[&pages], FI_SEND | FI_RECV);
    let closed = world.region(&[&pages], FI_SEND);
    end(closed);
    let addr = pages.addr as u64;
    let read = WEFT_ADVISE_PREFETCH;
    for flags in FLAGS {
        for wrong in [null_mut(), closed, world.setup.cq.cast::<fid_mr>()] {
            assert_eq!(world.one(read, flags, wrong, addr, 8), INVALID);
            assert_eq!(world.counted(wrong), Err(INVALID));
        }
        assert_eq!(world.call(read, flags, &[]), INVALID, "no ranges");
        assert_eq!(world.one(3, flags, mr, addr, 8), -FI_EOPNOTSUPP);
        let call = world.ops.advise.expect("advise");
        let range = weft_mr_range { mr, addr, len: 8 };
        // SAFETY: what is wrong is what is tried.
        unsafe {
            let domain = world.setup.domain;
            assert_eq!(call(domain, read, flags, null(), 1), INVALID);
            assert_eq!(
                call(domain, read, flags, &raw const range, usize::MAX),
                INVALID
            );
            assert_eq!(call(null_mut(), read, flags, &raw const range, 1), INVALID);
            let other = world.setup.eq.cast::<fid_domain>();
            assert_eq!(call(other, read, flags, &raw const range, 1), INVALID);
        }
    }
    assert_eq!(world.one(read, 2, mr, addr, 8), INVALID, "an unknown flag");
    assert_eq!((pages.resident(), world.counted(mr)), (0, Ok(0)));
    let count = world.ops.mr_prefetched.expect("mr_prefetched");
    // SAFETY: an open region, and nowhere to write.
    assert_eq!(unsafe { count(mr, null_mut()) }, INVALID);
    end(mr);
}

fn rights(world: &World) {
    let pages = Pages::writable(1);
    let addr = pages.addr as u64;
    let read_only = world.region(&[&pages], FI_SEND);
    // SAFETY: an open fabric.
    let other = unsafe { open_domain(world.setup.fabric, world.setup.info.first()) };
    for flags in FLAGS {
        let write = WEFT_ADVISE_PREFETCH_WRITE;
        assert_eq!(world.one(write, flags, read_only, addr, 8), -FI_EPERM);
        let range = weft_mr_range {
            mr: read_only,
            addr,
            len: 8,
        };
        let call = world.ops.advise.expect("advise");
        // SAFETY: open objects.
        let foreign = unsafe { call(other, 0, flags, &raw const range, 1) };
        assert_eq!(foreign, -FI_EPERM, "a region of another domain");
        assert_eq!(pages.resident(), 0);
    }
    assert_eq!(
        world.one(WEFT_ADVISE_PREFETCH, WEFT_ADVISE_FLUSH, read_only, addr, 8),
        0
    );
    assert_eq!(pages.resident(), 1);
    end(read_only);
    // SAFETY: opened here.
    assert_eq!(unsafe { close(other) }, 0);
}

fn ranges_count_with_flush(world: &World) {
    let pages = Pages::writable(3);
    let mr = world.region(&[&pages], FI_SEND | FI_RECV);
    let (addr, read) = (pages.addr as u64, WEFT_ADVISE_PREFETCH);
    let end_of = addr + 3 * PAGE as u64;
    for (from, len) in [
        (addr - 1, 8),
        (end_of, 1),
        (end_of - 4, 8),
        (u64::MAX, 1),
        // lengths that exceed the maximum of a list
        (addr, usize::MAX >> 1),
        (addr, usize::MAX),
    ] {
        // "EFAULT: when the range requested is out of the MR bounds" (ibv_advise_mr(3)), with and
        // without FLUSH
        for flags in FLAGS {
            for advice in ADVICE {
                let answer = world.one(advice, flags, mr, from, len);
                assert_eq!(answer, FAULT, "{from:x}, flags {flags}");
            }
        }
    }
    assert_eq!(pages.resident(), 0);
    end(mr);

    // read-only memory, and unmapped memory
    let pages = Pages::new(PAGE, libc::PROT_READ);
    let mr = world.region(&[&pages], FI_SEND | FI_RECV);
    let addr = pages.addr as u64;
    for (flags, expected) in FLAGS.into_iter().zip([0, FAULT]) {
        assert_eq!(
            world.one(WEFT_ADVISE_PREFETCH_WRITE, flags, mr, addr, 8),
            expected
        );
    }
    drop(pages);
    for (flags, expected) in FLAGS.into_iter().zip([0, FAULT]) {
        assert_eq!(world.one(read, flags, mr, addr, 8), expected);
        assert_eq!(
            world.one(WEFT_ADVISE_PREFETCH_NO_FAULT, flags, mr, addr, 8),
            0
        );
    }
    end(mr);
}

/// A list with one invalid element: without FLUSH no element is executed, with FLUSH those before
/// it are.
fn lists(world: &World) {
    let (first, second) = (Pages::writable(2), Pages::writable(2));
    let one = world.region(&[&first], FI_SEND | FI_RECV);
    let read_only = world.region(&[&second], FI_SEND);
    let of = |mr, pages: &Pages| weft_mr_range {
        mr,
        addr: pages.addr as u64,
        len: PAGE,
    };
    let list = [of(one, &first), of(read_only, &second)];
    let write = WEFT_ADVISE_PREFETCH_WRITE;
    assert_eq!(world.call(write, 0, &list), -FI_EPERM);
    assert_eq!((first.resident(), second.resident()), (0, 0));
    assert_eq!(world.call(write, WEFT_ADVISE_FLUSH, &list), -FI_EPERM);
    assert_eq!((first.resident(), second.resident()), (1, 0));
    assert_eq!(world.call(WEFT_ADVISE_PREFETCH, 0, &list), 0);
    assert_eq!((first.resident(), second.resident()), (1, 1));
    end(one);
    end(read_only);

    // several buffers: each has its own lkey
    let buffers = [Pages::writable(4), Pages::writable(4)];
    let both = world.region(&[&buffers[0], &buffers[1]], FI_SEND | FI_RECV);
    let at = buffers[1].addr as u64 + PAGE as u64;
    assert_eq!(world.one(write, WEFT_ADVISE_FLUSH, both, at, 2 * PAGE), 0);
    assert_eq!((buffers[0].resident(), buffers[1].resident()), (0, 2));
    assert_eq!(world.counted(both), Ok(2));
    for flags in FLAGS {
        let over = world.one(write, flags, both, at, 4 * PAGE);
        assert_eq!(over, FAULT, "no buffer has it all");
    }
    end(both);
}

/// A range longer than the maximum of an element of a verbs list.
fn long(world: &World) {
    let len = (5 << 30) + PAGE;
    let pages = Pages::new(len, libc::PROT_READ | libc::PROT_WRITE);
    let mr = world.region(&[&pages], FI_SEND | FI_RECV);
    let (addr, quiet) = (pages.addr as u64, WEFT_ADVISE_PREFETCH_NO_FAULT);
    assert_eq!(world.one(quiet, WEFT_ADVISE_FLUSH, mr, addr, len), 0);
    for flags in FLAGS {
        assert_eq!(world.one(quiet, flags, mr, addr, len + 1), FAULT);
    }
    end(mr);
}

pub(crate) fn run(lib: &Lib) {
    let world = World::new(lib, PAGED);
    table(&world);
    pages_come_as_advised(&world);
    wrong_arguments(&world);
    rights(&world);
    ranges_count_with_flush(&world);
    lists(&world);
    long(&world);
    world.setup.close();

    // the keys and addresses of the other forms make no difference
    let world = World::new(lib, FI_MR_LOCAL);
    pages_come_as_advised(&world);
    world.setup.close();

    let world = World::new(lib, PAGED | FI_MR_ALLOCATED);
    let pages = Pages::writable(1);
    let mr = world.region(&[&pages], FI_SEND | FI_RECV);
    for flags in FLAGS {
        let pinned = world.one(WEFT_ADVISE_PREFETCH, flags, mr, pages.addr as u64, 8);
        assert_eq!(pinned, -FI_ENOENT, "pinned");
    }
    assert_eq!(world.counted(mr), Err(-FI_EOPNOTSUPP), "pinned");
    end(mr);
    world.setup.close();
    println!("advice is followed, and refused where it is wrong");
}

/// On a device without on-demand paging.
pub(crate) fn refused(lib: &Lib) {
    let world = World::new(lib, PAGED | FI_MR_ALLOCATED);
    let pages = Pages::writable(1);
    let mr = world.region(&[&pages], FI_SEND | FI_RECV);
    for advice in ADVICE {
        let answer = world.one(advice, 0, mr, pages.addr as u64, 8);
        assert_eq!(answer, -FI_EOPNOTSUPP);
    }
    assert_eq!(world.counted(mr), Err(-FI_EOPNOTSUPP));
    end(mr);
    world.setup.close();
}

/// A disabled region.
pub(crate) fn disabled(lib: &Lib) {
    let world = World::new(lib, PAGED | FI_MR_ENDPOINT);
    let pages = Pages::writable(1);
    let mr = world.region(&[&pages], FI_SEND | FI_RECV);
    let answer = world.one(WEFT_ADVISE_PREFETCH, 0, mr, pages.addr as u64, 8);
    assert_eq!(answer, -FI_EOPBADSTATE);
    assert_eq!(world.counted(mr), Err(-FI_EOPBADSTATE));
    end(mr);
    world.setup.close();
}
