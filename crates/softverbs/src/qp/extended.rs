//! `ibv_wr_*`: calls build a batch of requests; `ibv_wr_complete` posts all of them or none.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys::*;

use super::Qp;
use crate::entry::{errno_of, guard, void};
use crate::sync::Lock;
use crate::sys::{Errno, Grow, Res};

/// The batch of one queue pair. Locked from `ibv_wr_start` on, as several threads may use a queue
/// pair; between the calls the state belongs to the thread that started the batch. A forked child
/// leaves it as it is: another thread of the parent may have had the batch or the lock at the fork.
#[derive(Default)]
pub(super) struct Batch {
    taken: AtomicBool,
    content: Lock<Content>,
}

#[derive(Default)]
struct Content {
    requests: Vec<Part>,
    sges: Vec<ibv_sge>,
    data: Vec<u8>,
    error: c_int,
}

// SAFETY: the address handles in it are only passed on, between one start and its complete.
unsafe impl Send for Content {}

struct Part {
    wr: ibv_send_wr,
    first_sge: usize,
    /// Inline data: offset and length.
    inline: Option<(usize, usize)>,
}

/// The operations that a queue pair of this type supports.
pub(super) fn operations(kind: u32) -> u64 {
    let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let writes = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let fetches = IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    let rest = IBV_QP_EX_WITH_ATOMIC_WRITE | IBV_QP_EX_WITH_FLUSH;
    let windows = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
    let remote_windows = IBV_QP_EX_WITH_SEND_WITH_INV;
    u64::from(match kind {
        IBV_QPT_RC => sends | writes | fetches | windows | remote_windows | rest,
        IBV_QPT_XRC_SEND => sends | writes | fetches | rest,
        IBV_QPT_UC => sends | writes | windows,
        IBV_QPT_UD => sends,
        _ => 0,
    })
}

/// Fills in the requested calls; the others stay NULL, as verbs.h specifies.
///
/// # Safety
/// `object` must be writable and not in use.
pub(super) unsafe fn fill(object: *mut ibv_qp_ex, kind: u32, asked: u64) {
    // SAFETY: the caller promises an object that is writable and not in use.
    let object = unsafe { &mut *object };
    let wants = |bit: u32| asked & u64::from(bit) != 0;
    object.wr_start = Some(start);
    object.wr_complete = Some(complete);
    object.wr_abort = Some(abort);
    object.wr_set_sge = Some(set_sge);
    object.wr_set_sge_list = Some(set_sge_list);
    object.wr_set_inline_data = Some(set_inline_data);
    object.wr_set_inline_data_list = Some(set_inline_data_list);
    object.wr_set_xrc_srqn = (kind == IBV_QPT_XRC_SEND).then_some(set_xrc_srqn as _);
    object.wr_set_ud_addr = (kind == IBV_QPT_UD).then_some(set_ud_addr as _);
    object.wr_send = wants(IBV_QP_EX_WITH_SEND).then_some(send as _);
    object.wr_send_imm = wants(IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(send_imm as _);
    object.wr_rdma_write = wants(IBV_QP_EX_WITH_RDMA_WRITE).then_some(rdma_write as _);
    object.wr_rdma_write_imm =
        wants(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(rdma_write_imm as _);
    object.wr_rdma_read = wants(IBV_QP_EX_WITH_RDMA_READ).then_some(rdma_read as _);
    object.wr_atomic_cmp_swp =
        wants(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(atomic_cmp_swp as _);
    object.wr_atomic_write = wants(IBV_QP_EX_WITH_ATOMIC_WRITE).then_some(atomic_write as _);
    object.wr_flush = wants(IBV_QP_EX_WITH_FLUSH).then_some(flush as _);
    object.wr_bind_mw = wants(IBV_QP_EX_WITH_BIND_MW).then_some(bind_mw as _);
    object.wr_local_inv = wants(IBV_QP_EX_WITH_LOCAL_INV).then_some(local_inv as _);
    object.wr_send_inv = wants(IBV_QP_EX_WITH_SEND_WITH_INV).then_some(send_inv as _);
    object.wr_atomic_fetch_add =
        wants(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(atomic_fetch_add as _);
}

/// Changes the content of a started batch. An error fails the whole batch.
fn with(qp: *mut ibv_qp_ex, change: impl FnOnce(&mut Content) -> Res<()>) {
    // SAFETY: these calls are made on live queue pairs of this device only.
    let this = unsafe { Qp::from_ptr(qp.cast()) };
    if this.process().forked() {
        return;
    }
    let mut content = this.batch.content.lock();
    if let Err(error) = guard(|| change(&mut content))
        && content.error == 0
    {
        content.error = error.0;
    }
}

fn add(qp: *mut ibv_qp_ex, opcode: u32, imm: u32, set: impl FnOnce(&mut ibv_send_wr)) {
    let (wr_id, flags, mut wr): (_, _, ibv_send_wr) =
        // SAFETY: as above; the application sets both before each request. All zeros is a request.
        unsafe { ((*qp).wr_id, (*qp).wr_flags, std::mem::zeroed()) };
    wr.wr_id = wr_id;
    wr.send_flags = flags & !IBV_SEND_INLINE;
    wr.opcode = opcode;
    wr.__bindgen_anon_1.bindgen_union_field = imm;
    with(qp, |content| {
        set(&mut wr);
        let first_sge = content.sges.len();
        let part = Part {
            wr,
            first_sge,
            inline: None,
        };
        content.requests.try_push(part)
    });
}

/// Changes the last request; a setter without one is an error of the whole batch.
fn last(
    qp: *mut ibv_qp_ex,
    change: impl FnOnce(&mut Part, &mut Vec<ibv_sge>, &mut Vec<u8>) -> Res<()>,
) {
    with(qp, |content| match content.requests.last_mut() {
        Some(part) => change(part, &mut content.sges, &mut content.data),
        None => Err(Errno(libc::EINVAL)),
    });
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    void(|| {
        // SAFETY: the caller promises a live queue pair.
        let this = unsafe { Qp::from_ptr(qp.cast()) };
        if this.process().forked() {
            return;
        }
        let mut round = 0u32;
        while this.batch.taken.swap(true, Ordering::Acquire) {
            round += 1;
            if round > 64 {
                std::thread::yield_now();
            }
        }
        this.batch.content.lock().clear();
    });
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller promises a live queue pair with a batch that it started.
    let this = unsafe { Qp::from_ptr(qp.cast()) };
    if this.process().forked() {
        return;
    }
    void(|| this.batch.content.lock().clear());
    this.batch.taken.store(false, Ordering::Release);
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller promises a live queue pair with a batch that it started.
    let this = unsafe { Qp::from_ptr(qp.cast()) };
    if this.process().forked() {
        return libc::EIO;
    }
    let code = errno_of(|| {
        let mut content = this.batch.content.lock();
        let code = content.post(this);
        content.clear();
        code
    });
    this.batch.taken.store(false, Ordering::Release);
    code
}

impl Content {
    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.data.clear();
        self.error = 0;
    }

    /// Turns the batch into a chain and posts it.
    fn post(&mut self, qp: &Qp) -> c_int {
        if self.error != 0 {
            return self.error;
        }
        // From here on the lists do not grow, so pointers into them stay valid.
        let data = self.data.as_ptr() as u64;
        for part in &mut self.requests {
            if let Some((at, len)) = part.inline {
                // The one sge that was reserved for the inline data.
                self.sges[part.first_sge] = ibv_sge {
                    addr: data + at as u64,
                    length: len as u32,
                    lkey: 0,
                };
            }
            part.wr.sg_list = self.sges[part.first_sge..].as_mut_ptr();
        }
        let mut next = std::ptr::null_mut();
        for part in self.requests.iter_mut().rev() {
            part.wr.next = next;
            next = &raw mut part.wr;
        }
        if next.is_null() {
            return 0;
        }
        // SAFETY: a chain of requests whose lists live until this returns.
        unsafe { super::post::post_all(qp, next, self.requests.len()) }
    }
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    add(qp, IBV_WR_SEND, 0, |_| {});
}

unsafe extern "C" fn send_imm(qp: *mut ibv_qp_ex, imm: u32) {
    add(qp, IBV_WR_SEND_WITH_IMM, imm, |_| {});
}

unsafe extern "C" fn send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    add(qp, IBV_WR_SEND_WITH_INV, rkey, |_| {});
}

unsafe extern "C" fn local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    add(qp, IBV_WR_LOCAL_INV, rkey, |_| {});
}

unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    add(qp, IBV_WR_BIND_MW, 0, |wr| {
        // SAFETY: the caller promises valid information.
        let bind_info = unsafe { *info };
        wr.__bindgen_anon_2.bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw,
            rkey,
            bind_info,
        };
    });
}

fn rdma(qp: *mut ibv_qp_ex, opcode: u32, imm: u32, rkey: u32, remote_addr: u64) {
    add(qp, opcode, imm, |wr| {
        wr.wr.rdma.rkey = rkey;
        wr.wr.rdma.remote_addr = remote_addr;
    });
}

unsafe extern "C" fn rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    rdma(qp, IBV_WR_RDMA_WRITE, 0, rkey, remote_addr);
}

unsafe extern "C" fn rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm: u32) {
    rdma(qp, IBV_WR_RDMA_WRITE_WITH_IMM, imm, rkey, remote_addr);
}

unsafe extern "C" fn rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    rdma(qp, IBV_WR_RDMA_READ, 0, rkey, remote_addr);
}

fn atomic(qp: *mut ibv_qp_ex, opcode: u32, to: (u32, u64), compare_add: u64, swap: u64) {
    add(qp, opcode, 0, |wr| {
        wr.wr.atomic.rkey = to.0;
        wr.wr.atomic.remote_addr = to.1;
        wr.wr.atomic.compare_add = compare_add;
        wr.wr.atomic.swap = swap;
    });
}

unsafe extern "C" fn atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    let opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
    atomic(qp, opcode, (rkey, remote_addr), compare, swap);
}

unsafe extern "C" fn atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, value: u64) {
    let opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    atomic(qp, opcode, (rkey, remote_addr), value, 0);
}

unsafe extern "C" fn atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    value: *const c_void,
) {
    rdma(qp, IBV_WR_ATOMIC_WRITE, 0, rkey, remote_addr);
    // SAFETY: the caller promises 8 readable bytes.
    unsafe { set_inline_data(qp, value.cast_mut(), 8) };
}

unsafe extern "C" fn flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    len: usize,
    placement: u8,
    level: u8,
) {
    let kind = u64::from(placement) | u64::from(level) << 32;
    atomic(qp, IBV_WR_FLUSH, (rkey, remote_addr), len as u64, kind);
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    last(qp, |part, _, _| {
        part.wr.wr.ud.ah = ah;
        part.wr.wr.ud.remote_qpn = qpn;
        part.wr.wr.ud.remote_qkey = qkey;
        Ok(())
    });
}

unsafe extern "C" fn set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32) {
    last(qp, |part, _, _| {
        part.wr.qp_type.xrc.remote_srqn = srqn;
        Ok(())
    });
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    last(qp, |part, sges, _| {
        sges.truncate(part.first_sge);
        part.wr.num_sge = 1;
        sges.try_push(ibv_sge { addr, length, lkey })
    });
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    last(qp, |part, sges, _| {
        sges.truncate(part.first_sge);
        if count > 0 {
            // SAFETY: the caller promises a list of `count` entries.
            let list = unsafe { std::slice::from_raw_parts(list, count) };
            sges.make_room(count)?;
            sges.extend_from_slice(list);
        }
        part.wr.num_sge = c_int::try_from(count).unwrap_or(c_int::MAX);
        Ok(())
    });
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buffer = ibv_data_buf { addr, length };
    // SAFETY: a list of one; the caller promises the buffer.
    unsafe { set_inline_data_list(qp, 1, &raw const buffer) };
}

unsafe extern "C" fn set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    last(qp, |part, sges, data| {
        let at = data.len();
        for i in 0..count {
            // SAFETY: the caller promises a list of `count` readable buffers.
            unsafe {
                let buffer = &*list.add(i);
                if buffer.length > 0 {
                    let bytes = buffer.addr.cast::<u8>();
                    data.make_room(buffer.length)?;
                    data.extend_from_slice(std::slice::from_raw_parts(bytes, buffer.length));
                }
            }
        }
        sges.truncate(part.first_sge);
        sges.try_push(ibv_sge::default())?;
        part.inline = Some((at, data.len() - at));
        part.wr.num_sge = 1;
        part.wr.send_flags |= IBV_SEND_INLINE;
        Ok(())
    });
}
