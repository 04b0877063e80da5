//! Atomics on a word whose lock another process holds, which may be stopped, on bytes of two words,
//! and on a region whose owner publishes a wrong address.

use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use crate::fuzz::stranger::{self, INDEX, KEY};
use crate::process::Process;
use crate::region::{LOCK_WAIT, hold_lock};
use crate::segment::layout::{qp_num, region};
use crate::sys;
use crate::testing::{Buffer, End, device, send_wr, verbs};

/// An atomic that adds 5 to the first word of a buffer, the earlier value of which replaces the
/// second one.
fn add(kind: u32, buffer: &Buffer, operand: &u64, atomic: &mut softdv_atomic, id: u64, end: &End) {
    let (addr, key) = buffer.place();
    let mut sge = ibv_sge {
        addr: addr + 8,
        length: 8,
        lkey: key,
    };
    let mut wr = send_wr(kind);
    wr.wr_id = id;
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    (wr.wr.atomic.remote_addr, wr.wr.atomic.rkey) = (addr, key);
    wr.wr.atomic.compare_add = 5;
    if kind == SOFTDV_WR_ATOMIC {
        // FI_SUM of FI_UINT64
        (atomic.op, atomic.datatype, atomic.count) = (2, 7, 1);
        atomic.operands = std::ptr::from_ref(operand).cast();
        wr.wr.atomic.compare_add = (&raw mut *atomic).expose_provenance() as u64;
    }
    assert_eq!(end.post_send(&mut wr), 0);
}

/// A stopped holder delays the request, and nothing else: neither the post nor a poll waits for it,
/// and the request is executed when the lock is free.
#[test]
fn a_request_waits_for_the_holder_of_a_lock() {
    let process = Process::current().unwrap_or_else(|| {
        let _ = device();
        Process::current().unwrap()
    });
    for kind in [IBV_WR_ATOMIC_FETCH_AND_ADD, SOFTDV_WR_ATOMIC] {
        let buffer = Buffer::new(16);
        let (a, b) = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
        a.connect(b.number());
        b.connect(a.number());
        let operand = 5;
        // SAFETY: all zeros is a value of it.
        let mut atomic: softdv_atomic = unsafe { std::mem::zeroed() };
        let held = hold_lock(process, &process.segment.map, buffer.place().0);
        let begin = Instant::now();
        add(kind, &buffer, &operand, &mut atomic, 1, &a);
        // the lock is tried again by each poll, beyond the limit of the calls
        while begin.elapsed() < LOCK_WAIT + Duration::from_millis(500) {
            let before = Instant::now();
            assert!(a.poll().is_none());
            assert!(before.elapsed() < LOCK_WAIT, "a poll waits");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(buffer.word(0), 0);
        drop(held);
        let wc = loop {
            if let Some(wc) = a.poll() {
                break wc;
            }
            assert!(begin.elapsed() < Duration::from_secs(20));
        };
        assert_eq!((wc.wr_id, wc.status), (1, IBV_WC_SUCCESS));
        assert_eq!((buffer.word(0), buffer.word(1)), (5, 0));
    }
}

/// Memory that this process may only read: another process changes it by instructions, which no
/// lock excludes. So an atomic that reads is an instruction too.
#[test]
fn a_read_of_memory_for_reading_takes_no_lock() {
    let device = device();
    let process = Process::current().unwrap();
    let file = sys::memfd_create(c"test", 4096).unwrap();
    let fd = file.as_raw_fd();
    let read_only = sys::open_fd_of(std::process::id(), fd, libc::O_RDONLY).unwrap();
    // SAFETY: a new mapping, which outlives all uses; a live context and domain.
    let (addr, adopted, mr) = unsafe {
        let fd = read_only.as_raw_fd();
        let addr = libc::mmap(null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
        assert_ne!(addr, libc::MAP_FAILED);
        let adopted = verbs().softdv_adopt_buf.unwrap()(device.context, fd, addr, 4096);
        let write = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ON_DEMAND;
        let access = (write | IBV_ACCESS_REMOTE_READ).cast_signed();
        (
            addr,
            adopted,
            (verbs().ibv_reg_mr)(device.pd, addr, 4096, access),
        )
    };
    assert!(!adopted.is_null() && !mr.is_null());
    let (a, b) = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
    a.connect(b.number());
    b.connect(a.number());
    let result = Buffer::new(8);
    let mut sge = result.sge(8);
    // SAFETY: all zeros is a value of it.
    let mut atomic: softdv_atomic = unsafe { std::mem::zeroed() };
    // FI_ATOMIC_READ of FI_UINT64
    (atomic.op, atomic.datatype, atomic.count) = (10, 7, 1);
    let mut wr = send_wr(SOFTDV_WR_ATOMIC);
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    wr.wr.atomic.remote_addr = addr as u64;
    // SAFETY: live.
    wr.wr.atomic.rkey = unsafe { (*mr).rkey };
    wr.wr.atomic.compare_add = (&raw mut atomic).expose_provenance() as u64;
    let held = hold_lock(process, &process.segment.map, addr as u64);
    assert_eq!(a.post_send(&mut wr), 0);
    assert!(a.wait_success());
    drop(held);
    // SAFETY: live, and not used afterwards.
    unsafe {
        assert_eq!((verbs().ibv_dereg_mr)(mr), 0);
        verbs().softdv_release_buf.unwrap()(adopted);
        libc::munmap(addr, 4096);
    }
}

/// Two words have two locks, of which the atomics of verbs take one.
#[test]
fn an_atomic_on_bytes_of_two_words_is_refused() {
    let (a, b) = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
    a.connect(b.number());
    b.connect(a.number());
    let buffer = Buffer::new(16);
    let (addr, _) = buffer.place();
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED;
    let middle = std::ptr::without_provenance_mut(addr as usize + 4);
    // SAFETY: memory of the buffer, which outlives the region.
    let mr = unsafe { (verbs().ibv_reg_mr)(device().pd, middle, 8, access.cast_signed()) };
    assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
    let own = Buffer::new(8);
    let mut sge = own.sge(8);
    let mut wr = send_wr(IBV_WR_ATOMIC_FETCH_AND_ADD);
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    // SAFETY: live.
    wr.wr.atomic.rkey = unsafe { (*mr).rkey };
    wr.wr.atomic.compare_add = u64::MAX;
    assert_eq!(a.post_send(&mut wr), 0);
    let wc = a.poll().unwrap();
    assert_eq!(wc.status, IBV_WC_REM_ACCESS_ERR);
    assert_eq!((buffer.word(0), buffer.word(1)), (0, 0));
    // SAFETY: live, and not used afterwards.
    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
}

/// Runs a call that must return within 20 s; otherwise the process ends, because a thread in an
/// endless loop cannot be stopped.
fn within_limit<R>(call: impl FnOnce() -> R) -> R {
    let (done, wait) = channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(20)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("the call does not return");
            std::process::abort();
        }
    });
    let result = call();
    drop(done);
    watchdog.join().unwrap();
    result
}

/// The address of a region that wraps at the end of the address space is an address without memory.
#[test]
fn a_published_address_that_wraps_is_refused() {
    let stranger = stranger::child();
    let end = End::new(IBV_QPT_RC, false);
    stranger.be_honest(end.number(), false);
    let entry = region::AT + region::STRIDE;
    let addr = stranger.segment.map.u64(entry + region::ADDR);
    end.connect(qp_num(stranger.slot, INDEX));
    for wrapping in [u64::MAX - 7, u64::MAX - 8, u64::MAX] {
        addr.store(wrapping, Ordering::Relaxed);
        let operands = [5_u64; 2];
        // SAFETY: all zeros is a value of it.
        let mut atomic: softdv_atomic = unsafe { std::mem::zeroed() };
        let mut wr = send_wr(SOFTDV_WR_ATOMIC);
        // FI_SUM of FI_UINT64
        (atomic.op, atomic.datatype, atomic.count) = (2, 7, 2);
        atomic.operands = operands.as_ptr().cast();
        (wr.wr.atomic.remote_addr, wr.wr.atomic.rkey) = (stranger.memory, KEY);
        wr.wr.atomic.compare_add = (&raw mut atomic).expose_provenance() as u64;
        within_limit(|| assert_eq!(end.post_send(&mut wr), 0));
        let begin = Instant::now();
        let wc = loop {
            if let Some(wc) = within_limit(|| end.poll()) {
                break wc;
            }
            assert!(begin.elapsed() < Duration::from_secs(20));
        };
        assert_ne!(wc.status, IBV_WC_SUCCESS);
    }
}
