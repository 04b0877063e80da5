//! Lists of READs and WRITEs, which the device executes together, between two processes as in
//! `two_processes.rs`. This program replaces the C library's calls that copy, and counts them.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::ffi::{c_int, c_ulong};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(20);

/// The next copy ends behind this number of local ranges, and all later ones are refused; 0: none.
static TORN: AtomicU32 = AtomicU32::new(0);
static REFUSED: AtomicBool = AtomicBool::new(false);
static COPIES: AtomicU32 = AtomicU32::new(0);
/// The next copy begins late, and `BEGUN` and `ENDED` show its progress.
static SLOW: AtomicBool = AtomicBool::new(false);
static BEGUN: AtomicBool = AtomicBool::new(false);
static ENDED: AtomicBool = AtomicBool::new(false);

/// # Safety
/// As the call of the kernel.
unsafe fn copy(
    call: libc::c_long,
    pid: c_int,
    local: (*const libc::iovec, c_ulong),
    remote: (*const libc::iovec, c_ulong),
) -> isize {
    COPIES.fetch_add(1, Ordering::Relaxed);
    if REFUSED.load(Ordering::Relaxed) {
        // SAFETY: the C library gives each thread its own errno.
        unsafe { *libc::__errno_location() = libc::EPERM };
        return -1;
    }
    let torn = TORN.swap(0, Ordering::Relaxed);
    let mut local = local;
    if torn != 0 {
        local.1 = torn.into();
        REFUSED.store(true, Ordering::Relaxed);
    }
    let slow = SLOW.swap(false, Ordering::SeqCst);
    if slow {
        BEGUN.store(true, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(200));
    }
    // SAFETY: as this function.
    let ret = unsafe { libc::syscall(call, pid, local.0, local.1, remote.0, remote.1, 0_u64) };
    if slow {
        ENDED.store(true, Ordering::SeqCst);
    }
    ret as isize
}

/// # Safety
/// As `process_vm_writev(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_vm_writev(
    pid: c_int,
    local: *const libc::iovec,
    locals: c_ulong,
    remote: *const libc::iovec,
    remotes: c_ulong,
    _: c_ulong,
) -> isize {
    let call = libc::SYS_process_vm_writev;
    // SAFETY: as this function.
    unsafe { copy(call, pid, (local, locals), (remote, remotes)) }
}

/// # Safety
/// As `process_vm_readv(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_vm_readv(
    pid: c_int,
    local: *const libc::iovec,
    locals: c_ulong,
    remote: *const libc::iovec,
    remotes: c_ulong,
    _: c_ulong,
) -> isize {
    let call = libc::SYS_process_vm_readv;
    // SAFETY: as this function.
    unsafe { copy(call, pid, (local, locals), (remote, remotes)) }
}

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("one_call", calls_parent, memory_child),
        ("bounds_of_a_list", bounds_parent, memory_child),
        ("batches", batches_parent, memory_child),
        (
            "failures_as_of_single_requests",
            failures_parent,
            failures_child,
        ),
        ("refused_behind_a_part", refused_parent, memory_child),
        ("memory_of_the_device", buffer_parent, buffer_child),
        ("own_memory", own, |_| ()),
        ("a_key_in_use", key_in_use, |_| ()),
        ("without_a_request", at_once_parent, at_once_child),
        ("lists_without_requests", lists_parent, lists_child),
    ];
    run(cases);
}

/// A request of a list: local address, length and lkey, remote address and rkey.
#[derive(Clone, Copy)]
struct Access {
    opcode: u32,
    local: (u64, u32, u32),
    remote: (u64, u32),
    signaled: bool,
}

/// The requests as a chain, each with its index as `wr_id`. The sges must outlive the chain.
fn chain(list: &[Access], sges: &mut Vec<ibv_sge>) -> Vec<ibv_send_wr> {
    *sges = list
        .iter()
        .map(|access| ibv_sge {
            addr: access.local.0,
            length: access.local.1,
            lkey: access.local.2,
        })
        .collect();
    let mut wrs: Vec<_> = list
        .iter()
        .enumerate()
        .map(|(i, access)| {
            // SAFETY: all zeros is a value of it.
            let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
            wr.wr_id = i as u64;
            wr.sg_list = &raw mut sges[i];
            wr.num_sge = 1;
            wr.opcode = access.opcode;
            wr.send_flags = if access.signaled {
                IBV_SEND_SIGNALED
            } else {
                0
            };
            wr.wr.rdma.remote_addr = access.remote.0;
            wr.wr.rdma.rkey = access.remote.1;
            wr
        })
        .collect();
    for i in 1..wrs.len() {
        wrs[i - 1].next = &raw mut wrs[i];
    }
    wrs
}

/// Posts requests as one list. Returns the number of copies by the kernel.
fn post_list(end: &mut End, list: &[Access]) -> u32 {
    let mut sges = Vec::new();
    let mut wrs = chain(list, &mut sges);
    let before = COPIES.load(Ordering::Relaxed);
    end.post(&mut wrs[0]);
    COPIES.load(Ordering::Relaxed) - before
}

/// The completions of the signaled requests of a list, all of them successful.
fn wait_list(end: &mut End, list: &[Access]) {
    for (i, access) in list.iter().enumerate() {
        if access.signaled {
            let wc = end.wait(LIMIT);
            assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i as u64));
        }
    }
    assert!(end.poll().is_none());
}

const LEN: usize = 8 << 20;

/// Has memory that the parent accesses.
fn memory_child(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let (first, second) = (end.buffer(&vec![0; LEN]), end.buffer(&vec![0; LEN]));
    end.join(link);
    for buffer in [&first, &second] {
        link.say_numbers(buffer.addr(), buffer.rkey().into());
    }
    link.expect("done");
}

/// An end of the parent, and the two regions of the child.
fn reach(link: &mut Link) -> (End, [(u64, u32); 2]) {
    let mut end = End::connect(link, 256, 8, 4);
    let regions = [(); 2].map(|()| link.numbers());
    // the first request of a queue pair opens the other end
    let buffer = end.buffer(&[0; 8]);
    let (addr, rkey) = regions[0];
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 8, addr, rkey as u32, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    (end, regions.map(|(addr, rkey)| (addr, rkey as u32)))
}

/// `count` accesses of different lengths, and of different distances at the peer. They overlap
/// there: the later ones overwrite the earlier ones.
fn accesses(opcode: u32, buffer: &Buffer, (addr, rkey): (u64, u32), count: usize) -> Vec<Access> {
    (0..count)
        .map(|i| Access {
            opcode,
            local: (
                buffer.addr() + 128 * i as u64,
                (i % 100) as u32,
                buffer.lkey(),
            ),
            remote: (addr + 40 * i as u64, rkey),
            signaled: i % 3 == 0 || i + 1 == count,
        })
        .collect()
}

fn calls_parent(link: &mut Link) {
    let (mut end, [region, _]) = reach(link);
    let bytes: Vec<u8> = (0..64 * 128)
        .map(|i: usize| (i * 7 + i / 128) as u8)
        .collect();
    let source = end.buffer(&bytes);
    let writes = accesses(IBV_WR_RDMA_WRITE, &source, region, 64);
    assert_eq!(post_list(&mut end, &writes), 1);
    wait_list(&mut end, &writes);
    let mut expected = vec![0; 64 * 128];
    for (i, access) in writes.iter().enumerate() {
        let len = access.local.1 as usize;
        expected[40 * i..][..len].copy_from_slice(&bytes[128 * i..][..len]);
    }
    let target = end.buffer(&[0; 64 * 128]);
    let reads = accesses(IBV_WR_RDMA_READ, &target, region, 64);
    assert_eq!(post_list(&mut end, &reads), 1);
    wait_list(&mut end, &reads);
    let found = target.bytes();
    for (i, access) in reads.iter().enumerate() {
        let len = access.local.1 as usize;
        assert!(found[128 * i..][..len] == expected[40 * i..][..len], "{i}");
        assert!(
            found[128 * i + len..128 * (i + 1)]
                .iter()
                .all(|&byte| byte == 0)
        );
    }
    link.say("done");
}

/// What a list may not contain: more requests or bytes than the limits, another key or opcode.
fn bounds_parent(link: &mut Link) {
    let (mut end, [first, second]) = reach(link);
    let buffer = end.buffer(&vec![9; LEN]);
    let write = |offset: u64, len: u32, (addr, rkey): (u64, u32)| Access {
        opcode: IBV_WR_RDMA_WRITE,
        local: (buffer.addr(), len, buffer.lkey()),
        remote: (addr + offset, rkey),
        signaled: true,
    };
    let read = Access {
        opcode: IBV_WR_RDMA_READ,
        ..write(0, 8, first)
    };
    let empty = write(0, 0, (0, 0));
    let many: Vec<_> = (0..65).map(|i| write(100 * i, 8, first)).collect();
    let long: Vec<_> = (0..5).map(|i| write(i << 20, 1 << 20, first)).collect();
    let (a, b) = (write(0, 8, first), write(8, 8, second));
    let lists: [(&[Access], u32); 7] = [
        (&many[..64], 1),
        (&many, 2),
        (&long[..4], 1),
        (&long, 2),
        (&[a, a, b, b, a], 3),
        (&[a, read, read, a], 3),
        (&[empty, empty], 0),
    ];
    for (i, (list, copies)) in lists.into_iter().enumerate() {
        assert_eq!(post_list(&mut end, list), copies, "list {i}");
        wait_list(&mut end, list);
    }
    // more bytes than one copy may have
    post_list(&mut end, &[a, write(0, 3 << 21, first), a]);
    for id in 0..3 {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, id));
    }
    link.say("done");
}

/// `ibv_wr_*` posts a list too.
fn batches_parent(link: &mut Link) {
    // the end that the child connects to has these calls
    let end = End::with(64, 8, 1);
    // SAFETY: live objects; all zeros is a value of it.
    let qp = unsafe {
        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        init.send_cq = end.cq;
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = 64;
        init.cap.max_send_sge = 1;
        init.cap.max_inline_data = 64;
        init.pd = end.pd;
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE.into();
        ibv_create_qp_ex(end.context, &raw mut init)
    };
    assert!(!qp.is_null());
    let mut end = end.with_qp(qp);
    end.join(link);
    let [(addr, rkey), _] = [(); 2].map(|()| link.numbers());
    // the first request of a queue pair opens the other end
    let buffer = end.buffer(&[0; 64]);
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 8, addr, rkey as u32, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    let before = COPIES.load(Ordering::Relaxed);
    // SAFETY: a live queue pair that has these calls; the data is copied by the calls.
    unsafe {
        let qp = verbs().ibv_qp_to_qp_ex.unwrap()(end.qp);
        (*qp).wr_start.unwrap()(qp);
        for i in 0..8_u64 {
            (*qp).wr_id = i;
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            (*qp).wr_rdma_write.unwrap()(qp, rkey as u32, addr + 16 * i);
            let mut word = i + 1;
            (*qp).wr_set_inline_data.unwrap()(qp, (&raw mut word).cast(), 8);
        }
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
    }
    assert_eq!(COPIES.load(Ordering::Relaxed) - before, 1);
    for i in 0..8 {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i));
    }
    let target = end.buffer(&[0; 128]);
    end.rdma(IBV_WR_RDMA_READ, &target, 128, addr, rkey as u32, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    let found = target.bytes();
    let words: Vec<u64> = (0..8)
        .map(|i| u64::from_ne_bytes(found[16 * i..][..8].try_into().unwrap()))
        .collect();
    assert_eq!(words, [1, 2, 3, 4, 5, 6, 7, 8]);
    link.say("done");
}

const PAGE: usize = 4096;
const REQUESTS: usize = 8;
/// The request that fails.
const BAD: usize = 5;
const WAYS: [(&str, u32); 4] = [
    ("unmapped at the peer", IBV_WC_REM_ACCESS_ERR),
    ("outside the region", IBV_WC_REM_ACCESS_ERR),
    ("another key", IBV_WC_REM_ACCESS_ERR),
    ("unmapped here", IBV_WC_LOC_PROT_ERR),
];
const OPCODES: [u32; 2] = [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ];

/// Two pages, both registered, of which the second one is unmapped.
fn half_mapped(end: &End, fill: u8) -> (u64, u32, u32) {
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    // SAFETY: new memory; the second page is not used by this process any more.
    unsafe {
        let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let flags = private | libc::MAP_ANONYMOUS;
        let at = libc::mmap(null_mut(), 2 * PAGE, read_write, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>().write_bytes(fill, 2 * PAGE);
        let mr = (verbs().ibv_reg_mr)(end.pd, at, 2 * PAGE, access.cast_signed());
        assert!(!mr.is_null());
        assert_eq!(libc::munmap(at.byte_add(PAGE), PAGE), 0);
        (at as u64, (*mr).lkey, (*mr).rkey)
    }
}

fn first_page(addr: u64) -> Vec<u8> {
    let page: *const u8 = std::ptr::with_exposed_provenance(addr as usize);
    // SAFETY: the first page of `half_mapped`.
    let byte = |i| unsafe { page.add(i).read_volatile() };
    (0..PAGE).map(byte).collect()
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |hash: u64, &byte| {
        hash.wrapping_mul(131).wrapping_add(byte.into())
    })
}

fn failures_child(link: &mut Link) {
    for _ in 0..WAYS.len() * OPCODES.len() * 2 {
        let mut end = End::create(link, 8, 8, 1);
        let (addr, _, rkey) = half_mapped(&end, 1);
        end.join(link);
        link.say_numbers(addr, rkey.into());
        link.expect("posted");
        link.say_numbers(hash(&first_page(addr)), 0);
    }
    link.expect("done");
}

/// A list fails as its requests fail one by one: the same completions, the same memory.
fn failures_parent(link: &mut Link) {
    for (way, (name, error)) in WAYS.into_iter().enumerate() {
        for opcode in OPCODES {
            let [single, list] = [false, true].map(|list| failure(link, way, opcode, list));
            assert_eq!(single, list, "{name}, {opcode}");
            let statuses: Vec<_> = single.0.iter().map(|wc| wc.0).collect();
            let mut expected = [IBV_WC_SUCCESS; REQUESTS];
            expected[BAD] = error;
            expected[BAD + 1..].fill(IBV_WC_WR_FLUSH_ERR);
            assert_eq!(statuses, expected, "{name}, {opcode}");
            // what was not executed
            let vendor: Vec<_> = single.0.iter().map(|wc| wc.1).collect();
            assert_eq!(vendor[BAD + 1..], [1, 1], "{name}, {opcode}");
        }
    }
    link.say("done");
}

/// Statuses and vendor errors; hashes of the memory of both sides.
type Failure = (Vec<(u32, u32, u32)>, [u64; 2]);

fn failure(link: &mut Link, way: usize, opcode: u32, as_list: bool) -> Failure {
    let mut end = End::connect(link, 16, 8, 1);
    let (addr, rkey) = link.numbers();
    let (local, lkey, _) = half_mapped(&end, 2);
    let list: Vec<_> = (0..REQUESTS)
        .map(|i| {
            let mut access = Access {
                opcode,
                // adjacent at the peer, so that the kernel's ranges are not those of the requests
                local: (local + 64 * i as u64, 48, lkey),
                remote: (addr + 48 * i as u64, rkey as u32),
                signaled: true,
            };
            if i == BAD {
                match way {
                    0 => access.remote.0 = addr + PAGE as u64 - 16,
                    1 => access.remote.0 = addr + 2 * PAGE as u64 - 16,
                    2 => access.remote.1 ^= 0x100,
                    _ => access.local.0 = local + PAGE as u64 - 16,
                }
            }
            access
        })
        .collect();
    if as_list {
        post_list(&mut end, &list);
    } else {
        for (i, access) in list.iter().enumerate() {
            let mut sges = Vec::new();
            let mut wrs = chain(&[*access], &mut sges);
            wrs[0].wr_id = i as u64;
            end.post(&mut wrs[0]);
        }
    }
    let completions = (0..REQUESTS)
        .map(|i| {
            let wc = end.wait(LIMIT);
            assert_eq!(wc.wr_id, i as u64);
            (wc.status, wc.vendor_err, wc.opcode)
        })
        .collect();
    link.say("posted");
    let (there, _) = link.numbers();
    (completions, [there, hash(&first_page(local))])
}

/// The kernel begins to refuse copies within a list, and no agent answers: the request at which the
/// copy ended may have been executed, and those behind it were not.
fn refused_parent(link: &mut Link) {
    let (mut end, [region, _]) = reach(link);
    let buffer = end.buffer(&[9; 64 * 128]);
    let mut list = accesses(IBV_WR_RDMA_WRITE, &buffer, region, 7);
    for access in &mut list {
        (access.local.1, access.signaled) = (8, true);
    }
    link.stop();
    TORN.store(4, Ordering::Relaxed);
    post_list(&mut end, &list);
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    end.modify(&mut attr, IBV_QP_STATE);
    let completions = [(); 7].map(|()| end.wait(LIMIT));
    let results = completions.map(|wc| (wc.status, wc.vendor_err));
    let mut expected = [(IBV_WC_SUCCESS, 0); 7];
    expected[4] = (IBV_WC_WR_FLUSH_ERR, 0);
    expected[5..].fill((IBV_WC_WR_FLUSH_ERR, 1));
    assert_eq!(results, expected);
    link.go_on();
    link.say("done");
}

/// Memory that the device allocated is accessed by instructions, in lists too.
fn buffer_child(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    let mut buf = null_mut();
    // SAFETY: live domain, writable output; the buffer is this test's.
    let (addr, mr) = unsafe {
        let addr = verbs().ibv_alloc_buf.unwrap()(end.pd, LEN, &raw mut buf);
        assert!(!addr.is_null());
        (addr, ibv_reg_mr(verbs(), end.pd, addr, LEN, access))
    };
    assert!(!mr.is_null());
    end.join(link);
    // SAFETY: live.
    link.say_numbers(addr as u64, unsafe { (*mr).rkey }.into());
    link.say_numbers(0, 0);
    link.expect("done");
}

fn buffer_parent(link: &mut Link) {
    let (mut end, [region, _]) = reach(link);
    let bytes: Vec<u8> = (0..64 * 128).map(|i: usize| (i * 5) as u8).collect();
    let (source, target) = (end.buffer(&bytes), end.buffer(&[0; 64 * 128]));
    let list = |opcode, buffer: &Buffer| -> Vec<Access> {
        (0..64)
            .map(|i| Access {
                opcode,
                local: (buffer.addr() + 128 * i, 100, buffer.lkey()),
                remote: (region.0 + 128 * i, region.1),
                signaled: true,
            })
            .collect()
    };
    for list in [
        list(IBV_WR_RDMA_WRITE, &source),
        list(IBV_WR_RDMA_READ, &target),
    ] {
        assert_eq!(post_list(&mut end, &list), 0);
        wait_list(&mut end, &list);
    }
    let found = target.bytes();
    for i in 0..64 {
        assert!(found[128 * i..][..100] == bytes[128 * i..][..100], "{i}");
    }
    without_requests(&end, region, &list(IBV_WR_RDMA_READ, &target));
    // one that does not fit its region ends the list
    let mut bad = list(IBV_WR_RDMA_WRITE, &source);
    bad[2].remote.0 = region.0 + LEN as u64 - 8;
    post_list(&mut end, &bad[..4]);
    let statuses = [(); 4].map(|()| end.wait(LIMIT).status);
    let flushed = IBV_WC_WR_FLUSH_ERR;
    let expected = [
        IBV_WC_SUCCESS,
        IBV_WC_SUCCESS,
        IBV_WC_REM_ACCESS_ERR,
        flushed,
    ];
    assert_eq!(statuses, expected);
    link.say("done");
}

/// An end that is connected to itself.
fn loopback() -> End {
    let mut end = End::with(64, 8, 1);
    let address = end.address();
    end.enter_rtr(address);
    end.enter_rts();
    end
}

/// Each request of a list reads what the one before has written.
fn own(_: &mut Link) {
    let mut end = loopback();
    let buffer = end.buffer(&[[6; 8].as_slice(), &[0; 8 * 32]].concat());
    let list: Vec<_> = (0..32)
        .map(|i| Access {
            opcode: IBV_WR_RDMA_WRITE,
            local: (buffer.addr() + 8 * i, 8, buffer.lkey()),
            remote: (buffer.addr() + 8 * (i + 1), buffer.rkey()),
            signaled: true,
        })
        .collect();
    post_list(&mut end, &list);
    wait_list(&mut end, &list);
    assert_eq!(buffer.bytes(), [6; 8 * 33]);
}

/// A deregistration waits for the copy of a list through its key.
fn key_in_use(_: &mut Link) {
    struct Sendable(End, Buffer);
    // SAFETY: an end may be used by any thread.
    unsafe impl Send for Sendable {}
    impl Sendable {
        fn deregister(self) -> bool {
            while !BEGUN.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            let Self(end, buffer) = self;
            end.release(buffer);
            ENDED.load(Ordering::SeqCst)
        }
    }
    let mut end = loopback();
    let (source, target) = (end.buffer(&[3; 64]), end.buffer(&[0; 64]));
    let write = Access {
        opcode: IBV_WR_RDMA_WRITE,
        local: (source.addr(), 64, source.lkey()),
        remote: (target.addr(), target.rkey()),
        signaled: true,
    };
    // the first request of a queue pair opens the other end
    post_list(&mut end, &[write]);
    wait_list(&mut end, &[write]);
    let other = Sendable(End::with(8, 8, 1), target.again());
    let ended = std::thread::spawn(move || other.deregister());
    SLOW.store(true, Ordering::SeqCst);
    post_list(&mut end, &[write]);
    assert!(ended.join().unwrap(), "the key was in use");
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    post_list(&mut end, &[write]);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_ACCESS_ERR);
}

/// Bytes of one copy of an operation without a request, and of the longest such operation.
const PART: usize = 4 << 20;
const LONGEST: usize = 4 * PART;

/// WRITE and READ without a request (`softdv_access`): one copy for each 4 MiB.
fn at_once_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, key) = link.numbers();
    let call = verbs().softdv_access.unwrap();
    let bytes: Vec<u8> = (0..LONGEST + 1).map(|i| (i % 251) as u8).collect();
    let from = end.buffer(&bytes);
    let back = end.buffer(&vec![0; LONGEST]);
    // the first request initializes the path
    end.rdma(IBV_WR_RDMA_WRITE, &from, 1, addr, key as u32, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    let qp = end.qp;
    let access = |opcode, buffer: &Buffer, len: usize, to: u64| {
        let sge = ibv_sge {
            addr: buffer.addr(),
            length: len as u32,
            lkey: buffer.lkey(),
        };
        let before = COPIES.load(Ordering::Relaxed);
        // SAFETY: a live queue pair and a registered buffer.
        let ret = unsafe { call(qp, opcode, &raw const sge, 0, to, key as u32) };
        (ret, COPIES.load(Ordering::Relaxed) - before)
    };
    for (len, copies) in [
        (1, 1),
        (PART, 1),
        (PART + 1, 2),
        (3 * PART + 3, 4),
        (LONGEST, 4),
    ] {
        assert_eq!(
            access(IBV_WR_RDMA_WRITE, &from, len, addr),
            (0, copies),
            "{len}"
        );
        assert_eq!(
            access(IBV_WR_RDMA_READ, &back, len, addr),
            (0, copies),
            "{len}"
        );
        assert_eq!(back.bytes()[..len], bytes[..len]);
    }
    // longer ones, and one that ends behind the region, have no effect
    let zeros = end.buffer(&vec![0; LONGEST + 1]);
    let again = (libc::EAGAIN, 0);
    assert_eq!(access(IBV_WR_RDMA_WRITE, &zeros, LONGEST + 1, addr), again);
    let behind = addr + 1 + PART as u64;
    assert_eq!(
        access(IBV_WR_RDMA_WRITE, &zeros, LONGEST - PART, behind),
        again
    );
    // a copy that the kernel refuses
    REFUSED.store(true, Ordering::Relaxed);
    let refused = access(IBV_WR_RDMA_WRITE, &zeros, 2 * PART, addr);
    REFUSED.store(false, Ordering::Relaxed);
    assert_eq!(refused, (libc::EAGAIN, 1));
    assert_eq!(access(IBV_WR_RDMA_READ, &back, LONGEST, addr), (0, 4));
    assert_eq!(back.bytes(), bytes[..LONGEST]);
    link.say("done");
}

fn at_once_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let buffer = end.buffer(&vec![0; LONGEST]);
    link.say_numbers(buffer.addr(), buffer.rkey().into());
    link.expect("done");
}

/// READs of the device's memory without requests: into registered memory by this processor, and
/// none into other memory, which may not be mapped.
fn without_requests(end: &End, (_, key): (u64, u32), list: &[Access]) {
    let call = verbs().softdv_access_list.unwrap();
    let sge = |access: &Access| ibv_sge {
        addr: access.local.0,
        length: access.local.1,
        lkey: access.local.2,
    };
    let sges: Vec<_> = list.iter().take(8).map(sge).collect();
    let places: Vec<_> = list.iter().take(8).map(|access| access.remote.0).collect();
    let keys = [key; 8];
    for (flags, executed) in [(0, 8), (SOFTDV_ACCESS_UNCHECKED, 0)] {
        let copies = COPIES.load(Ordering::Relaxed);
        let (sges, to, keys) = (sges.as_ptr(), places.as_ptr(), keys.as_ptr());
        // SAFETY: a live queue pair, 8 sges of registered memory, addresses and keys.
        let done = unsafe { call(end.qp, IBV_WR_RDMA_READ, sges, 8, flags, to, keys) };
        assert_eq!(done, executed, "{flags}");
        assert_eq!(COPIES.load(Ordering::Relaxed), copies);
    }
}

/// A change of sges, addresses and keys.
type Change<'a> = &'a dyn Fn(&mut [ibv_sge], &mut [u64], &mut [u32]);

/// Several WRITEs or READs without requests (`softdv_access_list`): one copy for all. What cannot
/// be executed, and everything behind it, is left.
fn lists_parent(link: &mut Link) {
    const LEN: u64 = 100;
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, key) = link.numbers();
    let (_, other) = link.numbers();
    let call = verbs().softdv_access_list.unwrap();
    let bytes: Vec<u8> = (0..8 * LEN).map(|i| (i % 251) as u8 + 1).collect();
    let from = end.buffer(&bytes);
    // the first request initializes the path
    end.rdma(IBV_WR_RDMA_WRITE, &from, 1, addr, key as u32, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    let qp = end.qp;
    let list = |opcode, sges: &[ibv_sge], to: &[u64], keys: &[u32]| {
        let before = COPIES.load(Ordering::Relaxed);
        let count = sges.len() as i32;
        // SAFETY: a live queue pair and registered buffers, or keys of none.
        let done = unsafe {
            let (sges, to, keys) = (sges.as_ptr(), to.as_ptr(), keys.as_ptr());
            call(qp, opcode, sges, count, 0, to, keys)
        };
        (done, COPIES.load(Ordering::Relaxed) - before)
    };
    // backwards, so that no two ranges of the peer can be joined
    let places: Vec<u64> = (0..8).rev().map(|i| addr + LEN * i).collect();
    let parts = |buffer: &Buffer| -> Vec<ibv_sge> {
        let part = |i| ibv_sge {
            addr: buffer.addr() + LEN * i,
            length: LEN as u32,
            lkey: buffer.lkey(),
        };
        (0..8).map(part).collect()
    };
    let sources = parts(&from);
    let same = [key as u32; 8];
    assert_eq!(list(IBV_WR_RDMA_WRITE, &sources, &places, &same), (8, 1));
    let read = |wanted: (i32, u32), change: Change<'_>| {
        let back = end.buffer(&[0; 8 * LEN as usize]);
        let (mut sges, mut places, mut keys) = (parts(&back), places.clone(), same);
        change(&mut sges, &mut places, &mut keys);
        assert_eq!(list(IBV_WR_RDMA_READ, &sges, &places, &keys), wanted);
        let whole = wanted.0 as usize * LEN as usize;
        let found = back.bytes();
        assert_eq!(found[..whole], bytes[..whole]);
        assert!(found[whole..].iter().all(|byte| *byte == 0));
        end.release(back);
    };
    read((8, 1), &|_, _, _| {});
    // two keys of that memory
    read((8, 1), &|_, _, keys| keys[4] = other as u32);
    read((4, 1), &|_, _, keys| keys[4] = other as u32 ^ 1 << 31);
    // a range that ends behind the region of the peer, a local one without a region, an empty one
    read((5, 1), &|_, to, _| to[5] = addr + 7 * LEN + 1);
    read((3, 1), &|sges, _, _| sges[3].lkey = 0);
    read((6, 1), &|sges, _, _| sges[6].length = 0);
    read((0, 0), &|_, to, _| to[0] = addr - 1);
    // a copy that the kernel refuses
    REFUSED.store(true, Ordering::Relaxed);
    read((0, 1), &|_, _, _| {});
    REFUSED.store(false, Ordering::Relaxed);
    assert_eq!(list(IBV_WR_SEND, &sources, &places, &same), (0, 0));
    // SAFETY: a list without operations needs no memory.
    let none = unsafe {
        let (sges, to, keys) = (std::ptr::null(), std::ptr::null(), std::ptr::null());
        call(qp, IBV_WR_RDMA_READ, sges, 0, 0, to, keys)
    };
    assert_eq!(none, 0);
    link.say("done");
}

fn lists_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let buffer = end.buffer(&[0; 800]);
    link.say_numbers(buffer.addr(), buffer.rkey().into());
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
    // SAFETY: the memory of the buffer, which is never freed.
    let again = unsafe {
        let start = std::ptr::with_exposed_provenance_mut(buffer.addr() as usize);
        &*(verbs().ibv_reg_mr)(end.pd, start, 800, access.cast_signed())
    };
    link.say_numbers(buffer.addr(), again.rkey.into());
    link.expect("done");
}
