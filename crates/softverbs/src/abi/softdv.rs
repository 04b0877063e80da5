//! Direct verbs: calls that only this device has. Programs find them in the table of functions, and
//! do not call them for other devices.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};

use rdma_core_sys::*;

use crate::dm::{Buffer, BufferReference};
use crate::entry::{guard, non_null, pointer, status};
use crate::key::Key;
use crate::object::Context;
use crate::process::Process;
use crate::qp::Qp;
use crate::region::{
    self, AccessError, Elements, MAX_ELEMENTS, MAX_RANGES, Shape, change_own_elements, odp,
};
use crate::sys::{Errno, Res};

struct Adopted {
    process: &'static Process,
    buffer_reference: BufferReference,
}

/// `softdv_adopt_buf`: makes `len` bytes at `addr` a buffer of the device, as if `ibv_alloc_buf(3)`
/// had made them. They are the beginning of a file that is mapped there, shared, and sealed against
/// shrinking and growing. Peers access regions of them directly. The descriptor may be closed after
/// the call. The mapping must exist until `softdv_release_buf` and the end of the last region. If
/// the descriptor was opened for reading only, so may the mapping be: then a region with rights to
/// write is not in the buffer, atomics that write do not use the buffer, and no process imports it.
///
/// Sets `EINVAL` for a length of 0 or a length other than that of the file, `EPERM` for a file that
/// is not sealed or not of ordinary pages, `EBADF`, `EMFILE`, `ENOMEM`.
pub(super) unsafe extern "C" fn adopt_buf(
    context: *mut ibv_context,
    fd: c_int,
    addr: *mut c_void,
    len: usize,
) -> *mut c_void {
    pointer(|| {
        non_null(context)?;
        non_null(addr)?;
        if fd < 0 {
            return Err(Errno(libc::EBADF));
        }
        // SAFETY: the caller promises a live context.
        let owner = unsafe { Context::from_ptr(context) };
        let process = owner.live()?;
        // SAFETY: the caller promises an open descriptor; a wrong one is an error of the kernel.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let file: OwnedFd = file.try_clone_to_owned().map_err(Errno::from)?;
        // SAFETY: the caller promises the mapping.
        let buffer = unsafe { Buffer::adopt(file, addr.cast(), len)? };
        let buffer_reference =
            process
                .buffers
                .add_another(&process.segment, buffer, owner.origin.context)?;
        let adopted: *mut Adopted = Box::into_raw(Box::new(Adopted {
            process,
            buffer_reference,
        }));
        Ok(adopted.cast())
    })
}

/// `softdv_access`: executes one RDMA WRITE or READ (`opcode`) in the call, without a work request:
/// no record, no completion. It is behind all requests that were posted to the queue pair. With
/// [`SOFTDV_ACCESS_UNCHECKED`] in `flags` the local memory needs no region.
///
/// Returns `EAGAIN` if the operation has to be posted: requests before it have not been executed,
/// it fails, or only a post can execute it. It may have moved bytes, as a request that failed.
///
/// Thread safe, as `ibv_post_send(3)`.
pub(super) unsafe extern "C" fn access(
    qp: *mut ibv_qp,
    opcode: u32,
    sge: *const ibv_sge,
    flags: u32,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    executed(|| {
        // SAFETY: the caller promises a live queue pair and sge.
        let (qp, sge) = unsafe { (Qp::from_ptr(qp), &*sge) };
        qp.execute_access(opcode, sge, flags, 0, (remote_addr, rkey))
    })
}

/// 0, or `EAGAIN` if `body` has not executed the operation: `false`, or a panic.
#[inline(always)]
fn executed(body: impl FnOnce() -> bool) -> c_int {
    match guard(|| Ok(body())) {
        Ok(true) => 0,
        _ => libc::EAGAIN,
    }
}

/// `softdv_access_list`: as `softdv_access`, `count` operations by one system call. Operation `i`
/// has one local range, `sges[i]`, and one of the peer, of the same length, at `remote_addrs[i]`
/// through `rkeys[i]`. Returns the number of those that were executed, from the first one on; the
/// others have to be posted, and the first of them may have moved bytes. The lists may be NULL if
/// `count` is 0.
///
/// Thread safe, as `ibv_post_send(3)`.
pub(super) unsafe extern "C" fn access_list(
    qp: *mut ibv_qp,
    opcode: u32,
    sges: *const ibv_sge,
    count: c_int,
    flags: u32,
    remote_addrs: *const u64,
    rkeys: *const u32,
) -> c_int {
    let Ok(count @ 1..) = usize::try_from(count) else {
        return 0;
    };
    let executed = guard(|| {
        // SAFETY: the caller promises a live queue pair, and `count` sges, addresses and keys.
        let (qp, sges, addrs, rkeys) = unsafe {
            (
                Qp::from_ptr(qp),
                std::slice::from_raw_parts(sges, count),
                std::slice::from_raw_parts(remote_addrs, count),
                std::slice::from_raw_parts(rkeys, count),
            )
        };
        Ok(qp.execute_list(opcode, (sges, flags), (addrs, rkeys)))
    });
    // at most `count`
    executed.unwrap_or(0) as c_int
}

/// `softdv_access_srq`: as `softdv_access`, on a queue pair of type `IBV_QPT_XRC_SEND`, for a
/// request that names the shared receive queue `srqn`. `EAGAIN` too if it leads to no queue.
///
/// Thread safe, as `ibv_post_send(3)`.
pub(super) unsafe extern "C" fn access_srq(
    qp: *mut ibv_qp,
    opcode: u32,
    sge: *const ibv_sge,
    flags: u32,
    srqn: u32,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    executed(|| {
        // SAFETY: the caller promises a live queue pair and sge.
        let (qp, sge) = unsafe { (Qp::from_ptr(qp), &*sge) };
        srqn != 0 && qp.execute_access(opcode, sge, flags, srqn, (remote_addr, rkey))
    })
}

/// `softdv_atomic_access`: executes one operation on elements in the call, as `softdv_access`
/// executes a WRITE, if all of them lie in words of one buffer of the device. `results` gets their
/// earlier values; NULL: they are not wanted. Neither needs a region. `changed` is written.
///
/// Returns `EAGAIN` if the operation has to be posted; nothing has changed.
///
/// Thread safe, as `ibv_post_send(3)`.
pub(super) unsafe extern "C" fn atomic_access(
    qp: *mut ibv_qp,
    atomic: *mut softdv_atomic,
    results: *mut c_void,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    // SAFETY: the caller promises the same.
    unsafe { elements(qp, atomic, results, 0, (remote_addr, rkey)) }
}

/// `softdv_atomic_access_srq`: as `softdv_atomic_access`, on a queue pair of type
/// `IBV_QPT_XRC_SEND`, for a request that names the shared receive queue `srqn`. `EAGAIN` too if it
/// leads to no queue.
///
/// Thread safe, as `ibv_post_send(3)`.
pub(super) unsafe extern "C" fn atomic_access_srq(
    qp: *mut ibv_qp,
    atomic: *mut softdv_atomic,
    results: *mut c_void,
    srqn: u32,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    match srqn {
        0 => libc::EAGAIN,
        // SAFETY: the caller promises the same.
        _ => unsafe { elements(qp, atomic, results, srqn, (remote_addr, rkey)) },
    }
}

/// # Safety
/// As `softdv_atomic_access`.
#[inline(always)]
unsafe fn elements(
    qp: *mut ibv_qp,
    atomic: *mut softdv_atomic,
    results: *mut c_void,
    srqn: u32,
    to: (u64, u32),
) -> c_int {
    executed(|| {
        // SAFETY: the caller promises a live queue pair, and an operation that no other code
        // changes.
        let (qp, asked) = unsafe { (Qp::from_ptr(qp), &*atomic) };
        // SAFETY: the caller promises operands and room for the earlier values.
        let changed = unsafe { qp.execute_elements(asked, results.cast(), srqn, to) };
        if let Some(changed) = changed {
            // SAFETY: as above.
            unsafe { (*atomic).changed = changed };
        }
        changed.is_some()
    })
}

/// `softdv_release_buf`: undoes `softdv_adopt_buf`. Remaining regions stay valid. Without them, no
/// thread of the device uses the mapping on return.
pub(super) unsafe extern "C" fn release_buf(adopted: *mut c_void) {
    let _: Res<()> = guard(|| {
        non_null(adopted)?;
        // SAFETY: of `adopt_buf`; the caller no longer uses it.
        let this = unsafe { Box::from_raw(adopted.cast::<Adopted>()) };
        let process = this.process;
        if process.forked() {
            // It belongs to the parent, and is not in this process's table.
            std::mem::forget(this);
            return Ok(());
        }
        let stamp = this.buffer_reference.stamp;
        let gone = process.buffers.leave_to_regions(&process.segment, stamp);
        drop(this);
        if let Some(buffer) = gone {
            // the caller removes the mapping, which a peer's atomic on another region may use
            Buffer::await_users(&buffer);
        }
        Ok(())
    });
}

/// `softdv_page_prefetch`: the number of pages of a region that `ibv_advise_mr(3)` has made present
/// since registration. Pages that were already present count too, and each call counts its pages
/// again. On mlx5 this is `page_prefetch` in `rdma statistic show mr`. The pages of transfers do
/// not count: the kernel makes them present in the process that copies.
///
/// Returns `EOPNOTSUPP` if the device has no on-demand paging. Thread safe.
pub(super) unsafe extern "C" fn page_prefetch(mr: *mut ibv_mr, pages: *mut u64) -> c_int {
    status(|| {
        non_null(mr)?;
        non_null(pages)?;
        // SAFETY: the caller promises a live region, whose context is live.
        let (context, key) = unsafe { (Context::from_ptr((*mr).context), Key((*mr).lkey)) };
        let process = context.live()?;
        if !odp::enabled() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        // SAFETY: not NULL; the caller has room for it.
        unsafe { *pages = process.regions.prefetched(key) };
        Ok(())
    })
}

/// `softdv_is_in_buffer`: 1 if a region was registered in a buffer of the device
/// (`ibv_alloc_dm(3)`, `ibv_alloc_buf`) and reaches that buffer, whatever is mapped at its
/// addresses later; 0 for memory that is found by its addresses at each access. Thread safe.
pub(super) unsafe extern "C" fn is_in_buffer(mr: *mut ibv_mr) -> c_int {
    if mr.is_null() {
        return 0;
    }
    let stamp = guard(|| {
        // SAFETY: the caller promises a live region, whose context is live.
        let (context, key) = unsafe { (Context::from_ptr((*mr).context), Key((*mr).lkey)) };
        Ok(context.live()?.regions.stamp_of(key))
    });
    c_int::from(stamp != Ok(0))
}

/// `softdv_set_access_wait`: whether `ibv_modify_qp(3)` and `ibv_destroy_qp(3)` of this queue pair,
/// or of this handle of an XRC target, wait for accesses of initiators, at most 5 s. `wait` 0: they
/// do not, and accesses that are under way may end later. A new queue pair waits. Thread safe.
pub(super) unsafe extern "C" fn set_access_wait(qp: *mut ibv_qp, wait: c_int) -> c_int {
    status(|| {
        non_null(qp)?;
        // SAFETY: the caller promises a live queue pair.
        unsafe { Qp::from_ptr(qp) }.set_access_wait(wait != 0);
        Ok(())
    })
}

/// `softdv_max_atomic`: the largest size of the elements of one operation in bytes; 0 if the device
/// has no atomics but those of verbs. Thread safe.
pub(super) unsafe extern "C" fn max_atomic(_: *mut ibv_context) -> c_int {
    if region::offers_elements() {
        MAX_ELEMENTS as c_int
    } else {
        0
    }
}

/// `softdv_atomic_own`: executes an operation on memory of this process, as an initiator executes
/// one on the memory of a region. The elements lie in the `count` buffers of `iov`, at most 8, one
/// after the other. `results` gets their earlier values, unless it is NULL. Thread safe; may wait
/// 2 s.
///
/// Returns `EINVAL` for an operation that does not exist, or buffers without the size of the
/// elements; `EFAULT` for memory that is not mapped or not writable; `EBUSY` if another process has
/// held the lock of an element for 2 s. After `EFAULT` elements before one may have changed.
pub(super) unsafe extern "C" fn atomic_own(
    context: *mut ibv_context,
    atomic: *mut softdv_atomic,
    iov: *const libc::iovec,
    count: c_int,
    results: *mut c_void,
) -> c_int {
    status(|| {
        non_null(context)?;
        non_null(atomic)?;
        non_null(iov)?;
        // SAFETY: the caller promises a live context, and a structure that no other code changes.
        let (context, asked) = unsafe { (Context::from_ptr(context), *atomic) };
        let process = context.live()?;
        let shape = Shape::new(asked.op, asked.datatype, asked.count);
        let shape = shape.ok_or(Errno(libc::EINVAL))?;
        let count = usize::try_from(count).map_err(|_| Errno(libc::EINVAL))?;
        if count > MAX_RANGES || !region::offers_elements() {
            return Err(Errno(libc::EINVAL));
        }
        let mut ranges = [(0, 0); MAX_RANGES];
        for (at, range) in ranges[..count].iter_mut().enumerate() {
            // SAFETY: the caller promises `count` buffers.
            let iovec = unsafe { *iov.add(at) };
            *range = (iovec.iov_base.addr() as u64, iovec.iov_len);
        }
        let ranges = &ranges[..count];
        let len = ranges
            .iter()
            .fold(0_usize, |sum, range| sum.saturating_add(range.1));
        if len != shape.len() {
            return Err(Errno(libc::EINVAL));
        }
        let mut earlier = [0; MAX_ELEMENTS];
        let mut elements = Elements {
            shape,
            // SAFETY: the caller promises the operands.
            operands: unsafe { shape.operands_of(&asked) }.ok_or(Errno(libc::EINVAL))?,
            earlier: &mut earlier[..len],
            changed: 0,
        };
        let own = process.peer(process.slot)?;
        let buffers = &process.buffers;
        let wait = region::LOCK_WAIT;
        let done = change_own_elements(process, buffers, &own, ranges, wait, &mut elements);
        done.map_err(|error| match error {
            AccessError::Dead | AccessError::Unavailable => Errno(libc::EBUSY),
            _ => Errno(libc::EFAULT),
        })?;
        let changed = elements.changed;
        // SAFETY: not NULL; the caller has room for the result, if it wants it.
        unsafe {
            (*atomic).changed = changed;
            if !results.is_null() {
                results
                    .cast::<u8>()
                    .copy_from_nonoverlapping(earlier.as_ptr(), len);
            }
        }
        Ok(())
    })
}
