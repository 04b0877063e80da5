//! `ibv_create_cq_ex`: completions read one after the other, field by field.

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::{Cq, Cqe, poll};
use crate::entry::{errno_of, guard};
use crate::sys;

const STAMP: u32 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
const WALLCLOCK: u32 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
/// The optional fields of a completion that can be read.
pub(crate) const OFFERED: u64 = (IBV_WC_STANDARD_FLAGS | STAMP | WALLCLOCK) as u64;

/// Whether completions must record the time.
pub(super) fn stamps(asked: u64) -> bool {
    asked & u64::from(STAMP | WALLCLOCK) != 0
}

/// Fills in the requested calls; the others stay NULL, as verbs.h specifies.
///
/// # Safety
/// `object` must be writable and not in use.
pub(super) unsafe fn fill(object: *mut ibv_cq_ex, asked: u64) {
    // SAFETY: the caller promises an object that is writable and not in use.
    let object = unsafe { &mut *object };
    let wants = |bit: u32| asked & u64::from(bit) != 0;
    object.start_poll = Some(start_poll);
    object.next_poll = Some(next_poll);
    object.end_poll = Some(end_poll);
    object.read_opcode = Some(read_opcode);
    object.read_vendor_err = Some(read_vendor_err);
    object.read_wc_flags = Some(read_wc_flags);
    object.read_byte_len = wants(IBV_WC_EX_WITH_BYTE_LEN).then_some(read_byte_len as _);
    object.read_imm_data = wants(IBV_WC_EX_WITH_IMM).then_some(read_imm_data as _);
    object.read_qp_num = wants(IBV_WC_EX_WITH_QP_NUM).then_some(read_qp_num as _);
    object.read_src_qp = wants(IBV_WC_EX_WITH_SRC_QP).then_some(read_src_qp as _);
    object.read_slid = wants(IBV_WC_EX_WITH_SLID).then_some(read_slid as _);
    object.read_sl = wants(IBV_WC_EX_WITH_SL).then_some(read_sl as _);
    object.read_dlid_path_bits = wants(IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_sl as _);
    object.read_completion_ts = wants(STAMP).then_some(read_completion_ts as _);
    object.read_completion_wallclock_ns = wants(WALLCLOCK).then_some(read_wallclock as _);
}

fn this<'a>(cq: *mut ibv_cq_ex) -> &'a Cq {
    // SAFETY: these calls are made on live queues of this device only.
    unsafe { Cq::from_ptr(cq.cast()) }
}

/// The completion that is being read.
fn current(cq: *mut ibv_cq_ex) -> Cqe {
    // SAFETY: written by the thread between start and end, which is the one that reads.
    unsafe { *this(cq).current.get() }
}

fn advance(cq: *mut ibv_cq_ex) -> i32 {
    let queue = this(cq);
    errno_of(|| match poll::next_one(queue) {
        Ok(cqe) => {
            // SAFETY: between start and end the object's fields and this place belong to the
            // thread that polls.
            unsafe {
                *queue.current.get() = cqe;
                (*cq).wr_id = cqe.wr_id;
                (*cq).status = cqe.status;
            }
            0
        }
        Err(error) => error.0,
    })
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> i32 {
    // SAFETY: the caller promises NULL or valid attributes.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    let queue = this(cq);
    if queue.process().forked() {
        // before the wait: at the fork another thread of the parent may have polled
        return libc::EIO;
    }
    let mut round = 0u32;
    while queue.polled.swap(true, Ordering::Acquire) {
        round += 1;
        if round > 64 {
            std::thread::yield_now();
        }
    }
    let code = advance(cq);
    if code != 0 {
        queue.polled.store(false, Ordering::Release);
    }
    code
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> i32 {
    advance(cq)
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    this(cq).polled.store(false, Ordering::Release);
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    current(cq).opcode
}

unsafe extern "C" fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).vendor_err
}

unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).wc_flags
}

unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).byte_len
}

unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).imm
}

unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).qp_num
}

unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).src_qp
}

/// Messages carry no LID.
unsafe extern "C" fn read_slid(_cq: *mut ibv_cq_ex) -> u32 {
    0
}

/// There is one service level, and one path.
unsafe extern "C" fn read_sl(_cq: *mut ibv_cq_ex) -> u8 {
    0
}

/// Nanoseconds of the monotonic clock.
unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    current(cq).time
}

unsafe extern "C" fn read_wallclock(cq: *mut ibv_cq_ex) -> u64 {
    let time = guard(|| {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
        let now = since.map_or(0, |since| since.as_nanos() as u64);
        Ok(now - sys::now_ns().saturating_sub(current(cq).time).min(now))
    });
    time.unwrap_or(0)
}
