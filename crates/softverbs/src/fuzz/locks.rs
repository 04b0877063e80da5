//! Atomics on a word whose lock another process holds, which may be stopped.

use std::time::{Duration, Instant};

use rdma_core_sys::*;

use super::device::{Buffer, End, attributes};
use crate::process::Process;
use crate::region::hold_lock;

/// Moves a queue pair to RTS, connected to another one of this process.
fn connect(end: &End, dest: u32) {
    let mut attr = attributes(dest);
    for (state, mask) in [
        (
            IBV_QPS_INIT,
            IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        ),
        (
            IBV_QPS_RTR,
            IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
        ),
        (
            IBV_QPS_RTS,
            IBV_QP_SQ_PSN
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC,
        ),
    ] {
        attr.qp_state = state;
        assert_eq!(end.modify(&mut attr, IBV_QP_STATE | mask), 0);
    }
}

/// An atomic that adds 5 to the first word of a buffer, the earlier value of which replaces the
/// second one.
fn add(kind: u32, buffer: &Buffer, operand: &u64, atomic: &mut softdv_atomic, id: u64, end: &End) {
    let (addr, key) = buffer.place();
    let mut sge = ibv_sge {
        addr: addr + 8,
        length: 8,
        lkey: key,
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    (wr.wr_id, wr.opcode, wr.send_flags) = (id, kind, IBV_SEND_SIGNALED);
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
        let _ = super::device::device();
        Process::current().unwrap()
    });
    for kind in [IBV_WR_ATOMIC_FETCH_AND_ADD, SOFTDV_WR_ATOMIC] {
        let buffer = Buffer::new(16);
        let (a, b) = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
        connect(&a, b.number());
        connect(&b, a.number());
        let operand = 5;
        // SAFETY: all zeros is a value of it.
        let mut atomic: softdv_atomic = unsafe { std::mem::zeroed() };
        let held = hold_lock(process, &process.segment.map, buffer.place().0);
        let begin = Instant::now();
        add(kind, &buffer, &operand, &mut atomic, 1, &a);
        // the lock is tried again by each poll, beyond the limit of the calls
        while begin.elapsed() < crate::region::PATIENCE + Duration::from_millis(500) {
            let before = Instant::now();
            assert!(a.poll().is_none());
            assert!(
                before.elapsed() < Duration::from_millis(500),
                "a poll waits"
            );
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
