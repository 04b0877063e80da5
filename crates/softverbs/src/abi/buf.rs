//! Buffers that the device allocates for the application: `ibv_alloc_buf(3)` of rdma-core 65.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::context::Context;
use super::pd::Pd;
use super::{guard, mr, non_null, pointer};
use crate::dm::{Buffer, Held};
use crate::sys::{Errno, Res, room};

/// What the application holds as an `ibv_buf`.
pub(super) struct Buf {
    pd: *mut ibv_pd,
    held: Held,
}

/// Zeros at the address that it returns, NULL with `EINVAL` for length 0 or `ENOMEM`.
pub(super) unsafe extern "C" fn alloc_buf(
    pd: *mut ibv_pd,
    size: usize,
    out: *mut *mut ibv_buf,
) -> *mut c_void {
    pointer(|| {
        non_null(out)?;
        // SAFETY: the caller promises a live domain, whose context is live.
        let (domain, owner) = unsafe { (Pd::from_ptr(pd), Context::from_ptr((*pd).context)) };
        let process = owner.live()?;
        let room = room()?;
        let buffer = Buffer::create(size)?;
        let held = process
            .buffers
            .add(&process.segment, buffer, owner.origin.context)?;
        domain.children.fetch_add(1, Ordering::Relaxed);
        let addr = std::ptr::with_exposed_provenance_mut(held.buffer.addr() as usize);
        let buf = Box::into_raw(Box::write(room, Buf { pd, held }));
        // SAFETY: the caller promises a writable pointer.
        unsafe { out.write(buf.cast()) };
        Ok(addr)
    })
}

/// Where regions of it are left the memory stays until the last of them has gone.
pub(super) unsafe extern "C" fn free_buf(buf: *mut ibv_buf) {
    let _ = guard(|| {
        non_null(buf)?;
        // SAFETY: made by `Box::into_raw` in `alloc_buf`, and the caller is done with it.
        let this = unsafe { Box::from_raw(buf.cast::<Buf>()) };
        // SAFETY: the page: the domain stays until the buffer is freed.
        let (domain, context) =
            unsafe { (Pd::from_ptr(this.pd), Context::from_ptr((*this.pd).context)) };
        let process = context.process;
        if process.forked() {
            // The parent's, and not mapped here.
            std::mem::forget(this);
            return Ok(());
        }
        domain.children.fetch_sub(1, Ordering::Relaxed);
        process
            .buffers
            .leave_to_regions(&process.segment, this.held.stamp);
        Ok(())
    });
}

/// Whether a registration by handle is one that `ibv_alloc_buf(3)` allows.
///
/// # Errors
/// `EINVAL` for another domain, no address, a file besides, or a range outside the buffer.
///
/// # Safety
/// The buffer must be live.
pub(super) unsafe fn check(pd: *mut ibv_pd, init: &ibv_mr_init_attr) -> Res<()> {
    non_null(init.buf)?;
    // SAFETY: the caller promises that.
    let this = unsafe { &*init.buf.cast::<Buf>() };
    let has = |bit: u32| init.comp_mask & u64::from(bit) != 0;
    let room = this.held.buffer.len as u64;
    let offset = (init.addr as u64).wrapping_sub(this.held.buffer.addr());
    let inside = offset <= room && init.length as u64 <= room - offset;
    let file = IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET;
    if pd == this.pd && has(IBV_REG_MR_MASK_ADDR) && !has(file) && inside {
        Ok(())
    } else {
        Err(Errno(libc::EINVAL))
    }
}

pub(super) unsafe extern "C" fn reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let mut init = ibv_mr_init_attr {
        length,
        access,
        comp_mask: u64::from(IBV_REG_MR_MASK_BUF | IBV_REG_MR_MASK_ADDR),
        addr,
        buf,
        ..ibv_mr_init_attr::default()
    };
    // SAFETY: as this function.
    unsafe { mr::reg_mr_ex(pd, &raw mut init) }
}
