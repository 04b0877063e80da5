//! Memory regions between two processes, as in `two_processes.rs`: on-demand paging, and the
//! guarantees of a registration.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::ptr::{null_mut, without_provenance_mut};

use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);
const PAGE: usize = 4096;
const ALL: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_ATOMIC;

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("on_demand_paging", on_demand_parent, on_demand_child),
        ("implicit_on_demand", implicit_parent, implicit_child),
        ("memory_that_goes", unmapped_parent, unmapped_child),
        ("without_on_demand", without_parent, without_child),
        ("pinned_memory", pinned_parent, nothing),
        ("names_of_the_first_byte", names_parent, names_child),
        ("changed_regions", changed_parent, changed_child),
        ("errors_of_changes", change_errors, nothing),
        (
            "receives_of_a_changed_region",
            poisoned_parent,
            poisoned_child,
        ),
        (
            "receives_of_a_deregistered_region",
            ended_parent,
            ended_child,
        ),
        (
            "receives_of_a_deregistered_region_in_a_shared_queue",
            ended_parent,
            ended_shared_child,
        ),
        ("null_regions", null_parent, null_child),
    ];
    run(cases);
}

fn nothing(_: &mut Link) {}

/// Newly mapped pages, unmapped when dropped.
struct Pages {
    addr: *mut u8,
    len: usize,
}

impl Pages {
    fn new(len: usize, protection: i32) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let addr = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        // pages of 4 KiB, so that they are counted singly
        // SAFETY: the mapping just made.
        unsafe { libc::madvise(addr, len, libc::MADV_NOHUGEPAGE) };
        Self {
            addr: addr.cast(),
            len,
        }
    }

    fn readable_and_writable(len: usize) -> Self {
        Self::new(len, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn resident(&self, from: usize, len: usize) -> usize {
        let mut pages = vec![0u8; len / PAGE];
        let ret =
            // SAFETY: inside the mapping; one byte for each page.
            unsafe { libc::mincore(self.addr.add(from).cast(), len, pages.as_mut_ptr().cast()) };
        assert_eq!(ret, 0);
        pages.iter().filter(|&&page| page & 1 != 0).count()
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        (at..at + len)
            // SAFETY: inside the mapping; another process may write it.
            .map(|i| unsafe { self.addr.add(i).read_volatile() })
            .collect()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's.
        unsafe { libc::munmap(self.addr.cast(), self.len) };
    }
}

fn register(end: &End, addr: *mut u8, len: usize, access: u32) -> Result<*mut ibv_mr, i32> {
    // SAFETY: a live domain; the device itself looks at the memory.
    let mr = unsafe { ibv_reg_mr(verbs(), end.pd, addr.cast(), len, access) };
    if mr.is_null() {
        Err(std::io::Error::last_os_error().raw_os_error().unwrap())
    } else {
        Ok(mr)
    }
}

fn keys(mr: *mut ibv_mr) -> (u32, u32) {
    // SAFETY: a live region.
    unsafe { ((*mr).lkey, (*mr).rkey) }
}

fn odp_caps(end: &End) -> ibv_odp_caps {
    let mut attr = ibv_device_attr_ex::default();
    // SAFETY: live context, writable structure.
    let ret = unsafe { ibv_query_device_ex(verbs(), end.context, &raw mut attr) };
    assert_eq!(ret, 0);
    attr.odp_caps
}

fn atomic(end: &mut End, buffer: &Buffer, opcode: u32, to: (u64, u32), operands: (u64, u64)) {
    let mut sge = ibv_sge {
        addr: buffer.addr(),
        length: 8,
        lkey: buffer.lkey(),
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = opcode;
    wr.wr.atomic.remote_addr = to.0;
    wr.wr.atomic.rkey = to.1;
    wr.wr.atomic.compare_add = operands.0;
    wr.wr.atomic.swap = operands.1;
    end.post(&mut wr);
}

/// Length of the on-demand region: more than the machine's memory.
const HUGE: usize = 1 << 40;

fn on_demand_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, rkey) = link.numbers();
    let rkey = rkey as u32;
    let source = end.buffer(&[7; 3 * PAGE]);
    // two pages in the middle without any access yet
    let middle = addr + (HUGE / 2) as u64 + 5;
    end.rdma(IBV_WR_RDMA_WRITE, &source, PAGE, middle, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("written");
    link.expect("next");
    // reading such a page returns zeros
    let target = end.buffer(&[9; 8]);
    let last = addr + HUGE as u64 - 8;
    end.rdma(IBV_WR_RDMA_READ, &target, 8, last, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    assert_eq!(target.bytes(), [0; 8]);
    let to = (addr + 8 * PAGE as u64, rkey);
    atomic(&mut end, &target, IBV_WR_ATOMIC_FETCH_AND_ADD, to, (5, 0));
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("changed");
    // a message into pages that are not present either, longer than the maximum in a ring
    let mut source = source;
    end.send(&mut source, 3 * PAGE, None, IBV_SEND_SIGNALED, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("done");
}

fn on_demand_child(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let caps = odp_caps(&end);
    assert_eq!(
        caps.general_caps,
        u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT)
    );
    let rc = caps.per_transport_caps.rc_odp_caps;
    let needed = IBV_ODP_SUPPORT_SEND
        | IBV_ODP_SUPPORT_RECV
        | IBV_ODP_SUPPORT_WRITE
        | IBV_ODP_SUPPORT_READ
        | IBV_ODP_SUPPORT_ATOMIC
        | IBV_ODP_SUPPORT_SRQ_RECV;
    assert_eq!(rc & needed, needed);
    let pages = Pages::readable_and_writable(HUGE);
    let mr = register(&end, pages.addr, HUGE, ALL | IBV_ACCESS_ON_DEMAND).unwrap();
    let (lkey, rkey) = keys(mr);
    let receive = 16 * PAGE;
    let mut sge = ibv_sge {
        addr: pages.addr as u64 + receive as u64,
        length: 3 * PAGE as u32,
        lkey,
    };
    let mut wr = ibv_recv_wr {
        wr_id: 4,
        sg_list: &raw mut sge,
        num_sge: 1,
        ..ibv_recv_wr::default()
    };
    let mut bad = null_mut();
    // SAFETY: live queue pair, a chain of one.
    let ret = unsafe { ibv_post_recv(end.qp, &raw mut wr, &raw mut bad) };
    assert_eq!(ret, 0);
    assert_eq!(pages.resident(0, 64 * PAGE), 0);
    end.join(link);
    link.say_numbers(pages.addr as u64, u64::from(rkey));
    link.expect("written");
    assert_eq!(pages.resident(HUGE / 2 - PAGE, 16 * PAGE), 2);
    assert_eq!(pages.bytes(HUGE / 2 + 5, PAGE), vec![7; PAGE]);
    link.say("next");
    link.expect("changed");
    assert_eq!(pages.bytes(8 * PAGE, 8), [5, 0, 0, 0, 0, 0, 0, 0]);
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 4));
    assert_eq!(pages.bytes(receive, 3 * PAGE), vec![7; 3 * PAGE]);
    // SAFETY: live region.
    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
    link.say("done");
}

fn implicit_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    // an on-demand region over the whole address space for the local side too
    let own = register(&end, null_mut(), usize::MAX, ALL | IBV_ACCESS_ON_DEMAND).unwrap();
    let (addr, rkey) = link.numbers();
    let bytes = vec![3u8; 2 * PAGE];
    let mut sge = ibv_sge {
        addr: bytes.as_ptr() as u64,
        length: bytes.len() as u32,
        lkey: keys(own).0,
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.wr.rdma.remote_addr = addr;
    wr.wr.rdma.rkey = rkey as u32;
    end.post(&mut wr);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("written");
    link.expect("done");
    // an address without a mapping
    wr.wr.rdma.remote_addr = 8;
    end.post(&mut wr);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_ACCESS_ERR);
    link.say("end");
}

fn implicit_child(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let access = ALL | IBV_ACCESS_ON_DEMAND;
    let huge = register(&end, null_mut(), usize::MAX, access | IBV_ACCESS_HUGETLB);
    assert_eq!(huge.unwrap_err(), libc::EINVAL);
    let pinned = register(&end, null_mut(), usize::MAX, ALL);
    assert_eq!(pinned.unwrap_err(), libc::EFAULT);
    let mr = register(&end, null_mut(), usize::MAX, access).unwrap();
    end.join(link);
    // mapped after the registration
    let pages = Pages::readable_and_writable(4 * PAGE);
    link.say_numbers(pages.addr as u64 + 100, u64::from(keys(mr).1));
    link.expect("written");
    assert_eq!(pages.bytes(100, 2 * PAGE), vec![3; 2 * PAGE]);
    link.say("done");
    link.expect("end");
}

fn unmapped_parent(link: &mut Link) {
    for gone in [true, false] {
        let mut end = End::connect(link, 8, 8, 1);
        let (addr, rkey) = link.numbers();
        let source = end.buffer(&[7; 8]);
        end.rdma(IBV_WR_RDMA_WRITE, &source, 8, addr, rkey as u32, None);
        let status = end.wait(LIMIT).status;
        if gone {
            assert_eq!(status, IBV_WC_REM_ACCESS_ERR);
        } else {
            assert_eq!(status, IBV_WC_SUCCESS);
        }
        link.say("written");
    }
}

fn unmapped_child(link: &mut Link) {
    let pages = Pages::readable_and_writable(PAGE);
    let access = ALL | IBV_ACCESS_ON_DEMAND;
    for gone in [true, false] {
        let mut end = End::create(link, 8, 8, 1);
        let mr = register(&end, pages.addr, PAGE, access).unwrap();
        end.join(link);
        if gone {
            // SAFETY: the mapping is this function's and nothing of it is used meanwhile.
            assert_eq!(unsafe { libc::munmap(pages.addr.cast(), PAGE) }, 0);
        }
        link.say_numbers(pages.addr as u64, u64::from(keys(mr).1));
        link.expect("written");
        if gone {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: nothing is mapped there any more.
            let again = unsafe { libc::mmap(pages.addr.cast(), PAGE, protection, flags, -1, 0) };
            assert_eq!(again, pages.addr.cast());
        } else {
            assert_eq!(pages.bytes(0, 8), [7; 8]);
        }
    }
}

fn without_parent(link: &mut Link) {
    link.expect("done");
}

fn without_child(link: &mut Link) {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("SOFTVERBS_ODP", "0") };
    let end = End::with(4, 4, 1);
    let caps = odp_caps(&end);
    assert_eq!(caps.general_caps, 0);
    assert_eq!(caps.per_transport_caps.rc_odp_caps, 0);
    let pages = Pages::readable_and_writable(PAGE);
    let refused = register(&end, pages.addr, PAGE, ALL | IBV_ACCESS_ON_DEMAND);
    assert_eq!(refused.unwrap_err(), libc::EOPNOTSUPP);
    let mr = register(&end, pages.addr, PAGE, ALL).unwrap();
    let mut piece = ibv_sge {
        addr: pages.addr as u64,
        length: 8,
        lkey: keys(mr).0,
    };
    // SAFETY: live domain, a list of one.
    let ret = unsafe { ibv_advise_mr(end.pd, 0, 0, &raw mut piece, 1) };
    assert_eq!(ret, libc::EOPNOTSUPP);
    link.say("done");
}

fn pinned_parent(_: &mut Link) {
    let end = End::with(4, 4, 1);
    let pages = Pages::readable_and_writable(4 * PAGE);
    let mr = register(&end, pages.addr, 4 * PAGE, ALL).unwrap();
    assert_eq!(pages.resident(0, 4 * PAGE), 4, "pinned pages are there");
    let nowhere = without_provenance_mut(8);
    let unbacked = register(&end, nowhere, 8, 0);
    assert_eq!(unbacked.unwrap_err(), libc::EFAULT);
    let partly = register(&end, pages.addr, 1 << 30, 0);
    assert_eq!(partly.unwrap_err(), libc::EFAULT);
    let constant = Pages::new(PAGE, libc::PROT_READ);
    let read_only = register(&end, constant.addr, PAGE, IBV_ACCESS_LOCAL_WRITE);
    assert_eq!(read_only.unwrap_err(), libc::EFAULT);
    let mr_read = register(&end, constant.addr, PAGE, IBV_ACCESS_REMOTE_READ).unwrap();
    let hidden = Pages::new(PAGE, libc::PROT_NONE);
    assert_eq!(
        register(&end, hidden.addr, PAGE, 0).unwrap_err(),
        libc::EFAULT
    );
    assert_eq!(register(&end, pages.addr, 0, 0).unwrap_err(), libc::EINVAL);
    for mr in [mr, mr_read] {
        // SAFETY: live regions.
        assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
    }
}

fn write(end: &mut End, source: &Buffer, addr: u64, rkey: u32) -> u32 {
    let len = source.len();
    end.rdma(IBV_WR_RDMA_WRITE, source, len, addr, rkey, None);
    end.wait(LIMIT).status
}

fn names_parent(link: &mut Link) {
    for _ in 0..4 {
        let mut end = End::connect(link, 8, 8, 1);
        let (first, rkey) = link.numbers();
        let rkey = rkey as u32;
        let source = end.buffer(&[7; 8]);
        assert_eq!(write(&mut end, &source, first, rkey), IBV_WC_SUCCESS);
        let last = first + 2 * PAGE as u64 - 8;
        assert_eq!(write(&mut end, &source, last, rkey), IBV_WC_SUCCESS);
        let beyond = write(&mut end, &source, last + 1, rkey);
        assert_eq!(beyond, IBV_WC_REM_ACCESS_ERR);
        link.say("written");
    }
}

fn names_child(link: &mut Link) {
    let pages = Pages::readable_and_writable(3 * PAGE);
    let inside = 72;
    // SAFETY: inside the mapping.
    let start = unsafe { pages.addr.add(inside) };
    let address = start as u64;
    let zero = ALL | IBV_ACCESS_ZERO_BASED;
    let far = (7 << 40) + inside as u64;
    // the name of the first byte, the iova that is passed, and the rights
    for (first, iova, access) in [
        (0, None, zero),
        (0, Some(address), zero), // as `ibv_reg_mr` of verbs.h
        (inside as u64, Some(inside as u64), ALL),
        (far, Some(far), ALL),
    ] {
        let mut end = End::create(link, 8, 8, 1);
        let reg = verbs().ibv_reg_mr_iova2.unwrap();
        // SAFETY: a live domain; the memory is this test's.
        let mr = unsafe {
            match iova {
                None => ibv_reg_mr(verbs(), end.pd, start.cast(), 2 * PAGE, access),
                Some(iova) => {
                    let odd = reg(end.pd, start.cast(), 2 * PAGE, iova ^ 8, ALL);
                    assert!(odd.is_null());
                    reg(end.pd, start.cast(), 2 * PAGE, iova, access)
                }
            }
        };
        assert!(!mr.is_null());
        end.join(link);
        link.say_numbers(first, u64::from(keys(mr).1));
        link.expect("written");
        assert_eq!(pages.bytes(inside, 8), [7; 8]);
        assert_eq!(pages.bytes(inside + 2 * PAGE - 8, 8), [7; 8]);
        assert_eq!(pages.bytes(inside + 2 * PAGE, 8), [0; 8]);
    }
}

/// Calls `ibv_rereg_mr`.
fn rereg(
    mr: *mut ibv_mr,
    flags: u32,
    pd: *mut ibv_pd,
    memory: (*mut u8, usize),
    access: u32,
) -> i32 {
    let call = verbs().ibv_rereg_mr.unwrap();
    let (flags, access) = (flags.cast_signed(), access.cast_signed());
    // SAFETY: live objects; the device looks at the memory.
    unsafe { call(mr, flags, pd, memory.0.cast(), memory.1, access) }
}

const NOWHERE: (*mut u8, usize) = (null_mut(), 0);

/// After each change: an address of the region, and the status of a peer's write to it.
fn changed_parent(link: &mut Link) {
    loop {
        let (expected, _) = link.numbers();
        if expected == u64::MAX {
            return;
        }
        let mut end = End::connect(link, 8, 8, 1);
        let (addr, rkey) = link.numbers();
        let source = end.buffer(&[7; 8]);
        let status = write(&mut end, &source, addr, rkey as u32);
        assert_eq!(u64::from(status), expected);
        link.say("written");
    }
}

fn changed_child(link: &mut Link) {
    let pages = Pages::readable_and_writable(2 * PAGE);
    // SAFETY: inside the mapping.
    let second = unsafe { pages.addr.add(PAGE) };
    let (good, bad) = (IBV_WC_SUCCESS, IBV_WC_REM_ACCESS_ERR);
    let steps = [
        (
            IBV_REREG_MR_CHANGE_TRANSLATION,
            second,
            good,
            "the new place",
        ),
        (
            IBV_REREG_MR_CHANGE_TRANSLATION,
            pages.addr,
            bad,
            "the old place",
        ),
        (
            IBV_REREG_MR_CHANGE_ACCESS,
            pages.addr,
            bad,
            "no right to write",
        ),
        (IBV_REREG_MR_CHANGE_PD, pages.addr, bad, "another domain"),
        (IBV_REREG_MR_FLAGS_SUPPORTED, second, good, "all at once"),
    ];
    for (flags, target, expected, what) in steps {
        link.say_numbers(u64::from(expected), 0);
        let mut end = End::create(link, 8, 8, 1);
        // SAFETY: live context.
        let other = unsafe { (verbs().ibv_alloc_pd)(end.context) };
        let all_at_once = flags == IBV_REREG_MR_FLAGS_SUPPORTED;
        let home = if all_at_once { other } else { end.pd };
        // SAFETY: live domain; the memory is this test's.
        let mr = unsafe {
            let before = if all_at_once { 0 } else { ALL };
            ibv_reg_mr(verbs(), home, pages.addr.cast(), PAGE, before)
        };
        assert!(!mr.is_null());
        let old = keys(mr);
        let (pd, access) = match flags {
            IBV_REREG_MR_CHANGE_ACCESS => (null_mut(), IBV_ACCESS_LOCAL_WRITE),
            IBV_REREG_MR_CHANGE_PD => (other, 0),
            IBV_REREG_MR_FLAGS_SUPPORTED => (end.pd, ALL),
            _ => (null_mut(), 0),
        };
        let moves = flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0;
        let memory = if moves { (second, PAGE) } else { NOWHERE };
        assert_eq!(rereg(mr, flags, pd, memory, access), 0);
        assert_eq!(keys(mr), old);
        end.join(link);
        link.say_numbers(target as u64, u64::from(old.1));
        link.expect("written");
        let found = pages.bytes(target as usize - pages.addr as usize, 8);
        let written = if expected == good { [7; 8] } else { [0; 8] };
        assert_eq!(found, written, "{what}");
        // SAFETY: inside the mapping; the peer is done with it.
        unsafe { target.write_bytes(0, 8) };
        // the domain that the region left can be freed, its new domain cannot
        let (empty, full) = match flags {
            IBV_REREG_MR_CHANGE_PD => (None, Some(other)),
            _ => (Some(other), None),
        };
        // SAFETY: live objects, gone only where the call says so.
        unsafe {
            if let Some(pd) = full {
                assert_eq!((verbs().ibv_dealloc_pd)(pd), libc::EBUSY);
            }
            if let Some(pd) = empty {
                assert_eq!((verbs().ibv_dealloc_pd)(pd), 0);
            }
            assert_eq!((verbs().ibv_dereg_mr)(mr), 0);
            if let Some(pd) = full {
                assert_eq!((verbs().ibv_dealloc_pd)(pd), 0);
            }
        }
    }
    link.say_numbers(u64::MAX, 0);
}

fn change_errors(_: &mut Link) {
    let end = End::with(4, 4, 1);
    let pages = Pages::readable_and_writable(PAGE);
    let odp = ALL | IBV_ACCESS_ON_DEMAND;
    // whether the region's key is valid
    let lives = |mr: *mut ibv_mr| {
        let mut piece = ibv_sge {
            addr: pages.addr as u64,
            length: 8,
            lkey: keys(mr).0,
        };
        let advice = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
        // SAFETY: live domain, a list of one.
        unsafe { ibv_advise_mr(end.pd, advice, 0, &raw mut piece, 1) == 0 }
    };
    let errno = || std::io::Error::last_os_error().raw_os_error().unwrap();
    let memory = (pages.addr, PAGE);
    let translation = IBV_REREG_MR_CHANGE_TRANSLATION;
    let mr = register(&end, pages.addr, PAGE, odp).unwrap();
    for (flags, memory, access) in [
        (8, NOWHERE, 0),
        (translation, (pages.addr, 0), 0),
        (translation, (null_mut(), 8), 0),
        (translation, memory, ALL),
        (0, NOWHERE, ALL),
    ] {
        let code = rereg(mr, flags, null_mut(), memory, access);
        assert_eq!((code, errno()), (IBV_REREG_MR_ERR_INPUT, libc::EINVAL));
        assert!(lives(mr));
    }
    // SAFETY: live region.
    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
    let everything = IBV_REREG_MR_CHANGE_ACCESS | translation;
    for (flags, memory, access, error) in [
        (0, NOWHERE, 0, libc::EINVAL),
        (IBV_REREG_MR_CHANGE_PD, NOWHERE, 0, libc::EINVAL),
        (
            IBV_REREG_MR_CHANGE_ACCESS,
            NOWHERE,
            1 << 15,
            libc::EOPNOTSUPP,
        ),
        (
            IBV_REREG_MR_CHANGE_ACCESS,
            NOWHERE,
            IBV_ACCESS_REMOTE_WRITE,
            libc::EINVAL,
        ),
        (
            everything,
            (without_provenance_mut(8), 8),
            ALL,
            libc::EFAULT,
        ),
    ] {
        let mr = register(&end, pages.addr, PAGE, odp).unwrap();
        let code = rereg(mr, flags, null_mut(), memory, access);
        assert_eq!((code, errno()), (IBV_REREG_MR_ERR_CMD, error));
        assert!(!lives(mr));
        // it must still be deregistered
        // SAFETY: live region.
        assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
    }
}

fn poisoned_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let mut source = end.buffer(&[7; 8]);
    end.send(&mut source, 8, None, IBV_SEND_SIGNALED, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_OP_ERR);
    link.say("sent");
}

fn poisoned_child(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let pages = Pages::readable_and_writable(2 * PAGE);
    let mr = register(&end, pages.addr, PAGE, ALL).unwrap();
    let mut sge = ibv_sge {
        addr: pages.addr as u64,
        length: 8,
        lkey: keys(mr).0,
    };
    let mut wr = ibv_recv_wr {
        sg_list: &raw mut sge,
        num_sge: 1,
        ..ibv_recv_wr::default()
    };
    let mut bad = null_mut();
    // SAFETY: live queue pair, a chain of one.
    let ret = unsafe { ibv_post_recv(end.qp, &raw mut wr, &raw mut bad) };
    assert_eq!(ret, 0);
    // SAFETY: inside the mapping.
    let second = unsafe { pages.addr.add(PAGE) };
    let flags = IBV_REREG_MR_CHANGE_TRANSLATION;
    assert_eq!(rereg(mr, flags, null_mut(), (second, PAGE), 0), 0);
    end.join(link);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_LOC_PROT_ERR);
    link.expect("sent");
    assert_eq!(pages.bytes(0, 8), [0; 8]);
}

/// Payloads in one slot of a ring, in several slots, and copied by the sender.
const LENGTHS: [usize; 3] = [8, 5000, 100_000];

fn ended_parent(link: &mut Link) {
    for len in LENGTHS {
        let mut end = End::connect(link, 8, 8, 1);
        let mut source = end.buffer(&vec![7; len]);
        // the first one reads the credit of all
        end.send(&mut source, len, None, IBV_SEND_SIGNALED, 1);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        link.say("sent");
        link.expect("deregistered");
        end.send(&mut source, len, None, IBV_SEND_SIGNALED, 2);
        let wc = end.wait(LIMIT);
        assert_eq!((wc.wr_id, wc.status), (2, IBV_WC_REM_OP_ERR), "{len}");
        assert_eq!(end.state(), IBV_QPS_ERR);
    }
}

fn ended_child(link: &mut Link) {
    for len in LENGTHS {
        let mut end = End::create(link, 8, 8, 1);
        let buffers = [(); 2].map(|()| end.buffer(&vec![0; len]));
        for (id, buffer) in (1..).zip(&buffers) {
            end.recv(buffer, id);
        }
        end.join(link);
        end_regions(link, &mut end, buffers);
    }
}

fn ended_shared_child(link: &mut Link) {
    for len in LENGTHS {
        let first = End::create(link, 8, 8, 1);
        let srq = first.create_srq(8);
        let mut end = first.on_srq(srq);
        let buffers = [(); 2].map(|()| end.buffer(&vec![0; len]));
        for (id, buffer) in (1..).zip(&buffers) {
            assert_eq!(post_srq(srq, buffer, id), 0);
        }
        end.join(link);
        end_regions(link, &mut end, buffers);
    }
}

fn end_regions(link: &mut Link, end: &mut End, [first, second]: [Buffer; 2]) {
    link.expect("sent");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_SUCCESS));
    assert!(first.bytes().iter().all(|&byte| byte == 7));
    end.release(first);
    let bytes = end.deregister(second);
    link.say("deregistered");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.wr_id, wc.status), (2, IBV_WC_LOC_PROT_ERR));
    assert!(bytes.iter().all(|&byte| byte == 0));
}

/// A null region.
fn null_region(end: &End) -> *mut ibv_mr {
    // SAFETY: live context of this device, which is as large as this crate's structure.
    unsafe {
        let extended = verbs_get_ctx(end.context).unwrap();
        let mr = (*extended).alloc_null_mr.unwrap()(end.pd);
        assert!(!mr.is_null());
        mr
    }
}

const NULL_LENGTHS: [u32; 2] = [100, 50_000];

fn null_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 2);
    let mr = null_region(&end);
    assert_eq!(rereg(mr, 2, end.pd, NOWHERE, 0), IBV_REREG_MR_ERR_INPUT);
    let source = end.buffer(&[7; 50_000]);
    for length in NULL_LENGTHS {
        // one half zeros of the null region, one half sevens
        let mut sges = [
            ibv_sge {
                addr: 0x1234,
                length: length / 2,
                lkey: keys(mr).0,
            },
            ibv_sge {
                addr: source.addr(),
                length: length / 2,
                lkey: source.lkey(),
            },
        ];
        for _ in 0..2 {
            // SAFETY: all zeros is a value of it.
            let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
            wr.sg_list = sges.as_mut_ptr();
            wr.num_sge = 2;
            wr.send_flags = IBV_SEND_SIGNALED;
            wr.opcode = IBV_WR_SEND;
            end.post(&mut wr);
            assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        }
    }
    link.expect("done");
    // SAFETY: live region.
    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
}

fn null_child(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 2);
    let mr = null_region(&end);
    let mut received = Vec::new();
    for length in NULL_LENGTHS {
        // the first message is discarded, the next one is stored
        let kept = end.buffer(&vec![9; length as usize]);
        for (addr, lkey) in [(8, keys(mr).0), (kept.addr(), kept.lkey())] {
            let mut sge = ibv_sge { addr, length, lkey };
            let mut wr = ibv_recv_wr {
                sg_list: &raw mut sge,
                num_sge: 1,
                ..ibv_recv_wr::default()
            };
            let mut bad = null_mut();
            // SAFETY: live queue pair, a chain of one.
            let ret = unsafe { ibv_post_recv(end.qp, &raw mut wr, &raw mut bad) };
            assert_eq!(ret, 0);
        }
        received.push(kept);
    }
    end.join(link);
    for kept in received {
        for _ in 0..2 {
            let wc = end.wait(LIMIT);
            assert_eq!(
                (wc.status, wc.byte_len as usize),
                (IBV_WC_SUCCESS, kept.len())
            );
        }
        let half = kept.len() / 2;
        assert_eq!(kept.bytes()[..half], vec![0; half]);
        assert_eq!(kept.bytes()[half..], vec![7; half]);
    }
    link.say("done");
}
