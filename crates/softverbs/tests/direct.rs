//! Memory that the device allocates, and its import, between two processes as in
//! `two_processes.rs`.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::os::fd::IntoRawFd;
use std::ptr::null_mut;

use common::refuse::refuse_copies;
use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);
const REMOTE: u32 = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
const ALL: u32 = IBV_ACCESS_LOCAL_WRITE | REMOTE;
const ZERO: u32 = IBV_ACCESS_ZERO_BASED;

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("device_memory", memory_parent, memory_child),
        ("device_memory_errors", errors, nothing),
        ("atomics_follow_the_address", atomics_parent, atomics_child),
        ("buffers", buffers_parent, buffers_child),
        ("imported_objects", imports_parent, imports_child),
        ("imported_in_the_same_process", same_process, nothing),
        ("atomic_writes", atomic_write_parent, atomic_write_child),
        ("flushes", flush_parent, flush_child),
        ("keys_that_come_back_at_once", nothing_yet, reuse_child),
        ("freed_memory_is_not_kept", freed_parent, freed_child),
    ];
    run(cases);
}

fn nothing(_: &mut Link) {}

fn extended(context: *mut ibv_context) -> &'static verbs_context {
    // SAFETY: a live context of this device, which is never closed here.
    unsafe { &*verbs_get_ctx(context).unwrap() }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn alloc_dm(context: *mut ibv_context, length: usize) -> *mut ibv_dm {
    let mut attr = ibv_alloc_dm_attr {
        length,
        ..ibv_alloc_dm_attr::default()
    };
    // SAFETY: live context, valid attributes.
    unsafe { extended(context).alloc_dm.unwrap()(context, &raw mut attr) }
}

fn free_dm(dm: *mut ibv_dm) -> i32 {
    // SAFETY: live.
    unsafe { extended((*dm).context).free_dm.unwrap()(dm) }
}

fn reg_dm(pd: *mut ibv_pd, dm: *mut ibv_dm, offset: u64, len: usize, access: u32) -> *mut ibv_mr {
    // SAFETY: live objects.
    unsafe { extended((*pd).context).reg_dm_mr.unwrap()(pd, dm, offset, len, access) }
}

fn put(dm: *mut ibv_dm, offset: u64, bytes: &[u8]) -> i32 {
    // SAFETY: live memory, readable bytes.
    unsafe { (*dm).memcpy_to_dm.unwrap()(dm, offset, bytes.as_ptr().cast(), bytes.len()) }
}

fn get(dm: *mut ibv_dm, offset: u64, len: usize) -> Result<Vec<u8>, i32> {
    let mut bytes = vec![0u8; len];
    // SAFETY: live memory, writable bytes.
    let code = unsafe {
        (*dm).memcpy_from_dm.unwrap()(bytes.as_mut_ptr().cast(), dm, offset, bytes.len())
    };
    if code == 0 { Ok(bytes) } else { Err(code) }
}

fn dereg(mr: *mut ibv_mr) -> i32 {
    // SAFETY: live.
    unsafe { (verbs().ibv_dereg_mr)(mr) }
}

fn keys(mr: *mut ibv_mr) -> (u32, u32) {
    // SAFETY: live.
    unsafe { ((*mr).lkey, (*mr).rkey) }
}

fn atomic(end: &mut End, result: &Buffer, addr: u64, rkey: u32, add: u64) -> u32 {
    let mut sge = ibv_sge {
        addr: result.addr(),
        length: 8,
        lkey: result.lkey(),
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    wr.wr.atomic.remote_addr = addr;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = add;
    end.post(&mut wr);
    end.wait(LIMIT).status
}

const DM_LEN: usize = 3 << 20;

/// Owns the memory, and sleeps in `hear` during the accesses.
fn memory_parent(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let dm = alloc_dm(end.context, DM_LEN);
    assert!(!dm.is_null());
    assert_eq!(put(dm, 0, &[5; 4096]), 0);
    let mr = reg_dm(end.pd, dm, 4096, DM_LEN - 4096, ALL | ZERO);
    assert!(!mr.is_null());
    assert_eq!(free_dm(dm), libc::EBUSY);
    let ordinary = end.buffer(&[0; 8]);
    end.join(link);
    link.say_numbers(u64::from(keys(mr).1), u64::from(ordinary.rkey()));
    link.say_numbers(ordinary.addr(), 0);
    link.expect("written");
    let last = DM_LEN as u64 - 4096;
    assert_eq!(get(dm, 4096, 2 << 20).unwrap(), vec![7; 2 << 20]);
    assert_eq!(get(dm, last + 4088, 8).unwrap(), [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(get(dm, 0, 4096).unwrap(), vec![5; 4096]);
    link.say("next");
    let begin = std::time::Instant::now();
    while ordinary.bytes() != [7; 8] {
        assert!(end.poll().is_none() && begin.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    link.expect("done");
    assert_eq!(dereg(mr), 0);
    assert_eq!(free_dm(dm), 0);
}

fn memory_child(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (rkey, ordinary) = link.numbers();
    let (rkey, ordinary) = (rkey as u32, ordinary as u32);
    let (addr, _) = link.numbers();
    let source = end.buffer(&vec![7; 2 << 20]);
    let word = end.buffer(&[0; 8]);
    refuse_copies();
    end.rdma(IBV_WR_RDMA_WRITE, &source, 2 << 20, 0, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    let last = (DM_LEN - 4096 - 8) as u64;
    assert_eq!(atomic(&mut end, &word, last, rkey, 3), IBV_WC_SUCCESS);
    assert_eq!(atomic(&mut end, &word, last, rkey, 0), IBV_WC_SUCCESS);
    assert_eq!(word.bytes(), [3, 0, 0, 0, 0, 0, 0, 0]);
    end.rdma(IBV_WR_RDMA_READ, &word, 8, 8, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    assert_eq!(word.bytes(), [7; 8]);
    link.say("written");
    link.expect("next");
    // the owner's agent executes the access that the filter refuses; the owner learns of the
    // refusal only from this request
    end.rdma(IBV_WR_RDMA_WRITE, &word, 8, addr, ordinary, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("done");
}

const ALLOCATIONS: u64 = 10;

/// Allocates memory, lets the peer write to it, and frees it.
fn freed_parent(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    end.join(link);
    for round in 0..ALLOCATIONS {
        let dm = alloc_dm(end.context, 1 << 20);
        assert!(!dm.is_null());
        let mr = reg_dm(end.pd, dm, 0, 1 << 20, ALL | ZERO);
        assert!(!mr.is_null());
        link.say_numbers(u64::from(keys(mr).1), round);
        link.expect("written");
        assert_eq!(get(dm, 0, 8).unwrap(), [7; 8]);
        assert_eq!(dereg(mr), 0);
        assert_eq!(free_dm(dm), 0);
    }
}

fn freed_child(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let source = end.buffer(&[7; 8]);
    let mut most = 0;
    for _ in 0..ALLOCATIONS {
        let (rkey, _) = link.numbers();
        end.rdma(IBV_WR_RDMA_WRITE, &source, 8, 0, rkey as u32, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        most = most.max(mapped_buffers());
        link.say("written");
    }
    // that of the last access, and the one in use
    assert!((1..=2).contains(&most), "{most}");
}

/// Number of mappings of device memory in this process.
fn mapped_buffers() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("softverbs-buffer"))
        .count()
}

fn errors(_: &mut Link) {
    let end = End::with(4, 4, 1);
    let mut attr = ibv_device_attr_ex::default();
    // SAFETY: live context, writable structure.
    let ret = unsafe { ibv_query_device_ex(verbs(), end.context, &raw mut attr) };
    assert_eq!(ret, 0);
    let most = attr.max_dm_size as usize;
    assert!(alloc_dm(end.context, 0).is_null());
    assert_eq!(errno(), libc::EINVAL);
    assert!(alloc_dm(end.context, most + 1).is_null());
    assert_eq!(errno(), libc::ENOMEM);
    let dm = alloc_dm(end.context, 4096);
    assert!(alloc_dm(end.context, most).is_null());
    // the errnos of mlx5
    for (offset, len, expected) in [
        (0, 4096, 0),
        (4092, 4, 0),
        (2, 4, libc::EINVAL),
        (4, 6, libc::EINVAL),
        (4092, 8, libc::EFAULT),
        (u64::MAX - 3, 4, libc::EFAULT),
    ] {
        assert_eq!(put(dm, offset, &vec![1; len]), expected);
        assert_eq!(get(dm, offset, len).err().unwrap_or(0), expected);
    }
    let odp = IBV_ACCESS_ON_DEMAND;
    for (offset, len, access, error) in [
        (0, 4097, ALL | ZERO, libc::EINVAL),
        (4096, 1, ALL | ZERO, libc::EINVAL),
        (0, 8, ALL, libc::EINVAL),
        (0, 8, ALL | ZERO | odp, libc::EINVAL),
        (0, 8, REMOTE | ZERO, libc::EINVAL),
        (0, 8, 1 << 15, libc::EOPNOTSUPP),
    ] {
        assert!(reg_dm(end.pd, dm, offset, len, access).is_null());
        assert_eq!(errno(), error, "{offset} {len} {access:x}");
    }
    // the kernel changes no region of device memory
    let region = reg_dm(end.pd, dm, 0, 8, ALL | ZERO);
    let mut page = [0_u8; 64];
    for (flags, access) in [
        (IBV_REREG_MR_CHANGE_TRANSLATION, 0),
        (IBV_REREG_MR_CHANGE_ACCESS, ALL),
    ] {
        let (rereg, flags) = (verbs().ibv_rereg_mr.unwrap(), flags.cast_signed());
        let at = page.as_mut_ptr().cast();
        // SAFETY: a live region; memory of this test.
        let ret = unsafe { rereg(region, flags, null_mut(), at, 64, access.cast_signed()) };
        assert_eq!((ret, errno()), (IBV_REREG_MR_ERR_INPUT, libc::EINVAL));
    }
    assert_eq!(free_dm(dm), libc::EBUSY);
    assert_eq!(dereg(region), 0);
    // an empty range, as in mlx5 and rdma-core's tests
    assert_eq!(dereg(reg_dm(end.pd, dm, 4096, 0, ALL | ZERO)), 0);
    assert_eq!(free_dm(dm), 0);
    let again = alloc_dm(end.context, most);
    assert!(!again.is_null());
    assert_eq!(get(again, 0, 8).unwrap(), [0; 8]);
    assert_eq!(free_dm(again), 0);
}

fn alloc_buf(end: &End, len: usize) -> (*mut u8, *mut ibv_buf) {
    let mut buf = null_mut();
    // SAFETY: live domain, writable output.
    let addr = unsafe { verbs().ibv_alloc_buf.unwrap()(end.pd, len, &raw mut buf) };
    assert!(!addr.is_null());
    (addr.cast(), buf)
}

const ROUNDS: u64 = 20_000;

/// The owner counts through a region over its whole memory, the other process through a region of
/// the buffer.
fn atomics_parent(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let (addr, buf) = alloc_buf(&end, 100);
    // SAFETY: live domain; the buffer is this test's.
    let (exact, implicit) = unsafe {
        let exact = verbs().ibv_reg_buf_mr.unwrap();
        let exact = exact(end.pd, buf, addr.cast(), 100, ALL.cast_signed());
        let odp = ALL | IBV_ACCESS_ON_DEMAND;
        (
            exact,
            ibv_reg_mr(verbs(), end.pd, null_mut(), usize::MAX, odp),
        )
    };
    assert!(!exact.is_null() && !implicit.is_null());
    end.join(link);
    link.say_numbers(addr as u64 + 8, u64::from(keys(exact).1));
    let qp = second_qp(&end);
    let mut own = end.with_qp(qp);
    let address = own.address();
    own.enter_rtr(address);
    own.enter_rts();
    let word = own.buffer(&[0; 8]);
    let rkey = keys(implicit).1;
    for _ in 0..ROUNDS {
        let status = atomic(&mut own, &word, addr as u64 + 8, rkey, 1);
        assert_eq!(status, IBV_WC_SUCCESS);
        // and additions by the processor
        // SAFETY: inside the buffer, which the application owns; all accesses are atomics.
        let cell = unsafe { std::sync::atomic::AtomicU64::from_ptr(addr.add(8).cast()) };
        cell.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    link.expect("done");
    // SAFETY: inside the buffer.
    let counted = unsafe { addr.add(8).cast::<u64>().read_volatile() };
    assert_eq!(counted, 3 * ROUNDS);
}

fn atomics_child(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, rkey) = link.numbers();
    let word = end.buffer(&[0; 8]);
    for _ in 0..ROUNDS {
        let status = atomic(&mut end, &word, addr, rkey as u32, 1);
        assert_eq!(status, IBV_WC_SUCCESS);
    }
    link.say("done");
}

fn second_qp(end: &End) -> *mut ibv_qp {
    // SAFETY: live objects; all zeros is a value of it.
    unsafe {
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = end.cq;
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = 8;
        init.cap.max_recv_wr = 8;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        let qp = (verbs().ibv_create_qp)(end.pd, &raw mut init);
        assert!(!qp.is_null());
        qp
    }
}

fn buffers_parent(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let len = (4 << 20) + 100;
    let (addr, buf) = alloc_buf(&end, len);
    let register = verbs().ibv_reg_buf_mr.unwrap();
    let access = ALL.cast_signed();
    // SAFETY: live objects; what is outside is refused.
    let mr = unsafe {
        let other = (verbs().ibv_alloc_pd)(end.context);
        for (pd, from, len) in [
            (other, addr, 8),
            (end.pd, addr.wrapping_sub(1), 8),
            (end.pd, addr, len + 1),
            (end.pd, addr.wrapping_add(len), 1),
        ] {
            assert!(register(pd, buf, from.cast(), len, access).is_null());
            assert_eq!(errno(), libc::EINVAL);
        }
        // an ordinary registration covers the same memory
        ibv_reg_mr(verbs(), end.pd, addr.add(10).cast(), len - 10, ALL)
    };
    assert!(!mr.is_null());
    end.join(link);
    link.say_numbers(addr as u64 + 20, u64::from(keys(mr).1));
    link.expect("written");
    let found: Vec<u8> = (0..len)
        // SAFETY: inside the buffer.
        .map(|i| unsafe { addr.add(i).read_volatile() })
        .collect();
    assert!(found[..20].iter().all(|&byte| byte == 0));
    assert!(found[20..20 + (3 << 20)].iter().all(|&byte| byte == 7));
    assert!(found[20 + (3 << 20)..].iter().all(|&byte| byte == 0));
    // the region keeps the memory
    // SAFETY: live, and freed by the call.
    unsafe { verbs().ibv_free_buf.unwrap()(buf) };
    link.say("next");
    link.expect("read");
    assert_eq!(dereg(mr), 0);
    link.say("gone");
    link.expect("done");
}

fn buffers_child(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, rkey) = link.numbers();
    let rkey = rkey as u32;
    let source = end.buffer(&vec![7; 3 << 20]);
    refuse_copies();
    end.rdma(IBV_WR_RDMA_WRITE, &source, 3 << 20, addr, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("written");
    link.expect("next");
    let target = end.buffer(&[0; 8]);
    end.rdma(IBV_WR_RDMA_READ, &target, 8, addr, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    assert_eq!(target.bytes(), [7; 8]);
    link.say("read");
    link.expect("gone");
    // still mapped here, but the key is invalid
    end.rdma(IBV_WR_RDMA_WRITE, &source, 8, addr, rkey, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_ACCESS_ERR);
    link.say("done");
}

/// Creates objects for the other process, and passes their descriptor and handles.
fn imports_parent(link: &mut Link) {
    let end = End::with(4, 4, 1);
    let dm = alloc_dm(end.context, 8192);
    assert_eq!(put(dm, 0, &[5; 8192]), 0);
    let writable = reg_dm(end.pd, dm, 4096, 4096, ALL | ZERO);
    let read_only = reg_dm(end.pd, dm, 0, 4096, IBV_ACCESS_REMOTE_READ | ZERO);
    let ordinary = end.buffer(&[0; 8]);
    // SAFETY: live objects.
    let (fd, pd, dm_handle, writable_handle, read_handle, other) = unsafe {
        let other = (verbs().ibv_alloc_pd)(end.context);
        (
            (*end.context).cmd_fd,
            (*end.pd).handle,
            (*dm).handle,
            (*writable).handle,
            (*read_only).handle,
            (*other).handle,
        )
    };
    link.say_numbers(std::process::id().into(), fd as u64);
    link.say_numbers(pd.into(), dm_handle.into());
    link.say_numbers(writable_handle.into(), read_handle.into());
    link.say_numbers(ordinary.lkey().into(), other.into());
    link.expect("written");
    let found = get(dm, 0, 8192).unwrap();
    assert_eq!(found[..4], [1; 4]);
    assert_eq!(found[4..4096], vec![5; 4092]);
    assert_eq!(found[4096..4104], [7; 8]);
    link.say("next");
    // the imported objects work after the exporting process has closed its own
    for mr in [writable, read_only] {
        assert_eq!(dereg(mr), 0);
    }
    assert_eq!(free_dm(dm), 0);
    link.say("gone");
    link.expect("done");
}

fn imports_child(link: &mut Link) {
    let (pid, fd) = link.numbers();
    let (pd, dm) = link.numbers();
    let (writable, read_only) = link.numbers();
    let (ordinary, other) = link.numbers();
    let v = verbs();
    let import_device = v.ibv_import_device.unwrap();
    let import_mr = v.ibv_import_mr.unwrap();
    // as if the descriptor had been passed
    let passed = std::fs::File::open(format!("/proc/{pid}/fd/{fd}")).unwrap();
    let wrong = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: descriptors of this process, and handles of the context.
    unsafe {
        assert!(import_device(-1).is_null());
        assert_eq!(errno(), libc::EBADF);
        assert!(import_device(wrong.into_raw_fd()).is_null());
        assert_eq!(errno(), libc::EINVAL);
        let context = import_device(passed.into_raw_fd());
        assert!(!context.is_null(), "{}", std::io::Error::last_os_error());
        let import_pd = v.ibv_import_pd.unwrap();
        assert!(import_pd(context, 12345).is_null());
        assert_eq!(errno(), libc::EINVAL);
        let pd = import_pd(context, pd as u32);
        let other = import_pd(context, other as u32);
        assert!(!pd.is_null() && !other.is_null());
        assert!(import_mr(pd, ordinary as u32).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        assert!(import_mr(other, writable as u32).is_null());
        assert_eq!(errno(), libc::EINVAL);
        assert!(import_mr(pd, writable as u32 ^ 1).is_null());
        let import_dm = v.ibv_import_dm.unwrap();
        assert!(import_dm(context, 77).is_null());
        assert_eq!(errno(), libc::EINVAL);
        let dm = import_dm(context, dm as u32);
        assert!(!dm.is_null());
        assert_eq!(put(dm, 0, &[1; 4]), 0);
        let writable = import_mr(pd, writable as u32);
        let read_only = import_mr(pd, read_only as u32);
        assert!(!writable.is_null() && !read_only.is_null());
        assert!((*writable).addr.is_null());
        // a queue pair of the imported domain, connected to itself
        let mut end = End::with(8, 8, 1);
        end.pd = pd;
        let qp = second_qp(&end);
        let mut end = end.with_qp(qp);
        let own = end.address();
        end.enter_rtr(own);
        end.enter_rts();
        let source = end.buffer(&[7; 8]);
        end.rdma(IBV_WR_RDMA_WRITE, &source, 8, 0, keys(writable).1, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        link.say("written");
        link.expect("next");
        link.expect("gone");
        let target = end.buffer(&[0; 8]);
        end.rdma(IBV_WR_RDMA_READ, &target, 8, 8, keys(read_only).1, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        assert_eq!(target.bytes(), [5; 8]);
        // the granted access only
        end.rdma(IBV_WR_RDMA_WRITE, &source, 8, 0, keys(read_only).1, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_ACCESS_ERR);
        let unimport = v.ibv_unimport_mr.unwrap();
        unimport(writable);
        unimport(read_only);
        assert_eq!(get(dm, 4096, 8).unwrap(), [7; 8]);
        v.ibv_unimport_dm.unwrap()(dm);
        v.ibv_unimport_pd.unwrap()(other);
    }
    link.say("done");
}

fn same_process(_: &mut Link) {
    let end = End::with(4, 4, 1);
    let buffer = end.buffer(&[5; 8]);
    let v = verbs();
    // SAFETY: live objects, and handles of theirs.
    unsafe {
        let context = v.ibv_import_device.unwrap()(libc::dup((*end.context).cmd_fd));
        assert!(!context.is_null());
        let pd = v.ibv_import_pd.unwrap()(context, (*end.pd).handle);
        let mr = v.ibv_import_mr.unwrap()(pd, buffer.lkey());
        assert!(!pd.is_null() && !mr.is_null());
        assert_eq!(keys(mr), (buffer.lkey(), buffer.rkey()));
        v.ibv_unimport_mr.unwrap()(mr);
        // the other object still works, and a second release finds no object
        let mr = v.ibv_import_mr.unwrap()(pd, buffer.lkey());
        assert_eq!(dereg(mr), 0);
        let mr = v.ibv_import_mr.unwrap()(pd, buffer.lkey());
        assert!(mr.is_null());
        v.ibv_unimport_pd.unwrap()(pd);
        // the first object can be unimported alone then, and its domain stays until that
        let own = (v.ibv_alloc_pd)(end.context);
        let mut memory = [0_u64; 4];
        let addr = memory.as_mut_ptr().cast();
        let original = (v.ibv_reg_mr)(own, addr, 32, ALL.cast_signed());
        let pd = v.ibv_import_pd.unwrap()(context, (*own).handle);
        assert!(!original.is_null() && !pd.is_null());
        let mr = v.ibv_import_mr.unwrap()(pd, (*original).handle);
        assert_eq!(dereg(mr), 0);
        assert_eq!(dereg(original), libc::EINVAL);
        assert_eq!((v.ibv_dealloc_pd)(own), libc::EBUSY);
        v.ibv_unimport_mr.unwrap()(original);
        assert_eq!((v.ibv_dealloc_pd)(own), 0);
        v.ibv_unimport_pd.unwrap()(pd);
        assert_eq!((verbs().ibv_close_device)(context), 0);
    }
}

/// A queue pair with the requested calls of `ibv_wr_*`, on an end's queues.
fn extended_qp(end: &End, operations: u32) -> *mut ibv_qp {
    // SAFETY: live objects; all zeros is a value of it.
    unsafe {
        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        init.send_cq = end.cq;
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = 8;
        init.cap.max_recv_wr = 8;
        init.cap.max_send_sge = 1;
        init.pd = end.pd;
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = operations.into();
        let qp = ibv_create_qp_ex(end.context, &raw mut init);
        assert!(!qp.is_null());
        qp
    }
}

/// Posts one request by `ibv_wr_*` and returns its completion.
fn wr(end: &mut End, request: impl FnOnce(*mut ibv_qp_ex, &ibv_qp_ex)) -> Wc {
    // SAFETY: a live queue pair that has these calls.
    unsafe {
        let qp = verbs().ibv_qp_to_qp_ex.unwrap()(end.qp);
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_id = 7;
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        request(qp, &*qp);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
    }
    end.wait(LIMIT)
}

fn atomic_write(end: &mut End, addr: u64, rkey: u32, value: u64) -> u32 {
    let wc = wr(end, |qp, calls| {
        // SAFETY: a started batch, 8 readable bytes.
        unsafe { calls.wr_atomic_write.unwrap()(qp, rkey, addr, (&raw const value).cast()) }
    });
    assert!(wc.status != IBV_WC_SUCCESS || wc.opcode == IBV_WC_ATOMIC_WRITE);
    wc.status
}

fn atomic_write_parent(link: &mut Link) {
    for (addr_off, which, expected) in [
        (8u64, 0, IBV_WC_SUCCESS),
        (8, 1, IBV_WC_SUCCESS),
        (12, 0, IBV_WC_REM_INV_REQ_ERR),
        (16, 0, IBV_WC_REM_ACCESS_ERR),
        (8, 2, IBV_WC_REM_ACCESS_ERR),
    ] {
        let end = End::with(8, 8, 1);
        let qp = extended_qp(&end, IBV_QP_EX_WITH_ATOMIC_WRITE);
        let mut end = end.with_qp(qp);
        end.join(link);
        let keys: Vec<(u64, u64)> = (0..3).map(|_| link.numbers()).collect();
        let (addr, rkey) = keys[which];
        let status = atomic_write(
            &mut end,
            addr + addr_off,
            rkey as u32,
            0x1122_3344_5566_7788,
        );
        assert_eq!(status, expected, "{addr_off} {which}");
        link.say("written");
    }
}

fn atomic_write_child(link: &mut Link) {
    for good in [Some(0), Some(1), None, None, None] {
        let mut end = End::create(link, 8, 8, 1);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        let words = Box::leak(vec![0u64; 2].into_boxed_slice()).as_mut_ptr();
        // SAFETY: live domain; the words are never freed.
        let ordinary = unsafe { ibv_reg_mr(verbs(), end.pd, words.cast(), 16, access) };
        let dm = alloc_dm(end.context, 16);
        let direct = reg_dm(end.pd, dm, 0, 16, access | ZERO);
        let read_only =
            // SAFETY: live domain; the words are never freed.
            unsafe { ibv_reg_mr(verbs(), end.pd, words.cast(), 16, IBV_ACCESS_REMOTE_READ) };
        end.join(link);
        link.say_numbers(words as u64, keys(ordinary).1.into());
        link.say_numbers(0, keys(direct).1.into());
        link.say_numbers(words as u64, keys(read_only).1.into());
        link.expect("written");
        // SAFETY: live memory of this test.
        let found = [unsafe { words.add(1).read_volatile() }, {
            let bytes = get(dm, 8, 8).unwrap();
            u64::from_ne_bytes(bytes.try_into().unwrap())
        }];
        for (i, value) in found.into_iter().enumerate() {
            let written = good == Some(i);
            assert_eq!(value, if written { 0x1122_3344_5566_7788 } else { 0 });
        }
    }
}

const GLOBAL: u32 = IBV_ACCESS_FLUSH_GLOBAL;
const PERSISTENT: u32 = IBV_ACCESS_FLUSH_PERSISTENT;
/// Flushes: the region (global, persistent, neither), the opcode, the offset, the length, the
/// level, and whether it succeeds.
const FLUSHES: [(usize, u32, u64, usize, u32, bool); 9] = [
    (0, IBV_FLUSH_GLOBAL, 0, 4096, IBV_FLUSH_RANGE, true),
    (0, IBV_FLUSH_GLOBAL, 1, 4096, IBV_FLUSH_RANGE, false),
    (0, IBV_FLUSH_GLOBAL, 1 << 40, usize::MAX, IBV_FLUSH_MR, true),
    (0, IBV_FLUSH_PERSISTENT, 0, 8, IBV_FLUSH_RANGE, false),
    (0, 0, 0, 8, IBV_FLUSH_RANGE, false),
    (0, IBV_FLUSH_GLOBAL, 0, 8, 2, false),
    (2, IBV_FLUSH_GLOBAL, 0, 8, IBV_FLUSH_RANGE, false),
    (1, IBV_FLUSH_GLOBAL, 0, 8, IBV_FLUSH_RANGE, false),
    (1, IBV_FLUSH_PERSISTENT, 0, 8, IBV_FLUSH_RANGE, true),
];

fn flush_parent(link: &mut Link) {
    for (which, placement, from, len, level, good) in FLUSHES {
        let end = End::with(8, 8, 1);
        let qp = extended_qp(&end, IBV_QP_EX_WITH_FLUSH | IBV_QP_EX_WITH_RDMA_WRITE);
        let mut end = end.with_qp(qp);
        end.join(link);
        let keys: Vec<(u64, u64)> = (0..3).map(|_| link.numbers()).collect();
        let (addr, rkey) = keys[which];
        if rkey == 0 {
            // the test's file is not on a disk
            link.say("flushed");
            continue;
        }
        let wc = wr(&mut end, |qp, calls| {
            // SAFETY: a started batch.
            unsafe {
                let (placement, level) = (placement as u8, level as u8);
                calls.wr_flush.unwrap()(qp, rkey as u32, addr + from, len, placement, level);
            }
        });
        let expected = if good {
            (IBV_WC_SUCCESS, IBV_WC_FLUSH)
        } else {
            (IBV_WC_REM_ACCESS_ERR, wc.opcode)
        };
        assert_eq!(
            (wc.status, wc.opcode),
            expected,
            "{which} {placement} {level}"
        );
        link.say("flushed");
    }
}

/// A shared mapping of a file on a disk, next to this program.
fn mapped_file() -> *mut u8 {
    let path = std::env::current_exe().unwrap().with_extension("flushed");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    file.set_len(4096).unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let addr = unsafe { libc::mmap(null_mut(), 4096, protection, libc::MAP_SHARED, fd, 0) };
    assert_ne!(addr, libc::MAP_FAILED);
    addr.cast()
}

fn flush_child(link: &mut Link) {
    let file = mapped_file();
    for _ in FLUSHES {
        let mut end = End::create(link, 8, 8, 1);
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_access_flags = REMOTE | GLOBAL | PERSISTENT;
        end.modify(&mut attr, IBV_QP_ACCESS_FLAGS);
        let memory = Box::leak(vec![0u8; 4096].into_boxed_slice()).as_mut_ptr();
        // SAFETY: live domain; the memory is never freed.
        let reg = |addr: *mut u8, access| unsafe {
            ibv_reg_mr(verbs(), end.pd, addr.cast(), 4096, access)
        };
        let global = reg(memory, GLOBAL);
        let neither = reg(
            memory,
            REMOTE & !IBV_ACCESS_REMOTE_WRITE & !IBV_ACCESS_REMOTE_ATOMIC,
        );
        // memory without a disk is not persistent
        assert!(reg(memory, PERSISTENT).is_null());
        assert_eq!(errno(), libc::EINVAL);
        let persistent = reg(file, PERSISTENT);
        if persistent.is_null() {
            println_once("no file system on a disk here: persistent flushes are not tried");
        }
        end.join(link);
        for (mr, addr) in [(global, memory), (persistent, file), (neither, memory)] {
            let rkey = if mr.is_null() { 0 } else { keys(mr).1 };
            link.say_numbers(addr as u64, rkey.into());
        }
        link.expect("flushed");
    }
}

/// Prints to the test's log; standard output is the pipe to the other process.
fn println_once(text: &str) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| eprintln!("{text}"));
}

fn nothing_yet(link: &mut Link) {
    link.expect("done");
}

fn reuse_child(link: &mut Link) {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("SOFTVERBS_REUSE_KEYS", "1") };
    let end = End::with(4, 4, 1);
    let first = end.buffer(&[0; 8]);
    let second = end.buffer(&[0; 8]);
    let key = first.rkey();
    assert_ne!(key, second.rkey());
    end.release(first);
    let third = end.buffer(&[0; 8]);
    assert_eq!(third.rkey(), key);
    link.say("done");
}
