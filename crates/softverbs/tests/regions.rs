//! Memory regions between two processes, as in `two_processes.rs`: on-demand paging, and what a
//! registration promises.

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

fn main() {
    let cases: &[Case] = &[
        ("on_demand_paging", on_demand_parent, on_demand_child),
        ("implicit_on_demand", implicit_parent, implicit_child),
        ("memory_that_goes", unmapped_parent, unmapped_child),
        ("without_on_demand", without_parent, without_child),
        ("pinned_memory", pinned_parent, nothing),
    ];
    run(cases);
}

fn nothing(_: &mut Link) {}

/// Fresh pages, unmapped when dropped.
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
        // Pages of 4 KiB, so that counting them says something.
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
        // SAFETY: inside the mapping; one byte for each page.
        let ret =
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

/// Length of the region on demand: more than the machine has memory.
const HUGE: usize = 1 << 40;

fn on_demand_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, rkey) = link.numbers();
    let rkey = rkey as u32;
    let source = end.buffer(&[7; 3 * PAGE]);
    // Two pages in the middle that nobody has touched.
    let middle = addr + (HUGE / 2) as u64 + 5;
    end.rdma(IBV_WR_RDMA_WRITE, &source, PAGE, middle, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("written");
    link.expect("next");
    // Reading such a page gives zeros.
    let target = end.buffer(&[9; 8]);
    let last = addr + HUGE as u64 - 8;
    end.rdma(IBV_WR_RDMA_READ, &target, 8, last, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    assert_eq!(target.bytes(), [0; 8]);
    let to = (addr + 8 * PAGE as u64, rkey);
    atomic(&mut end, &target, IBV_WR_ATOMIC_FETCH_AND_ADD, to, (5, 0));
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("changed");
    // A message into pages that are not there either, longer than what goes through the ring.
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
    // The whole of this process's memory for the local side too.
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
    // Where nothing is.
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
    // Made after the registration.
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
