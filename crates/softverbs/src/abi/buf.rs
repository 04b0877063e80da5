//! Buffers that the device allocates for the application: `ibv_alloc_buf(3)` of rdma-core 65.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::dm::Buffer;
use crate::entry::{guard, non_null, pointer};
use crate::object::{Buf, Context, Pd};
use crate::sys::room;

/// Memory of zeros at the address that it returns, or NULL with `EINVAL` (length 0), `ENOMEM`
/// or `EFBIG` (above `RLIMIT_FSIZE`).
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
        let buffer_reference =
            process
                .buffers
                .add(&process.segment, buffer, owner.origin.context)?;
        domain.children.fetch_add(1, Ordering::Relaxed);
        let addr = std::ptr::with_exposed_provenance_mut(buffer_reference.buffer.addr() as usize);
        let buf = Box::into_raw(Box::write(
            room,
            Buf {
                pd,
                buffer_reference,
            },
        ));
        // SAFETY: the caller promises a writable pointer.
        unsafe { out.write(buf.cast()) };
        Ok(addr)
    })
}

/// If regions of the buffer remain, the memory is freed with the last of them.
pub(super) unsafe extern "C" fn free_buf(buf: *mut ibv_buf) {
    let _ = guard(|| {
        non_null(buf)?;
        // SAFETY: made by `Box::into_raw` in `alloc_buf`; the caller no longer uses it.
        let this = unsafe { Box::from_raw(buf.cast::<Buf>()) };
        let (domain, context) =
            // SAFETY: according to the man page the domain exists until the buffer is freed.
            unsafe { (Pd::from_ptr(this.pd), Context::from_ptr((*this.pd).context)) };
        let process = context.process;
        if process.forked() {
            // It belongs to the parent, and is not mapped in this process.
            std::mem::forget(this);
            return Ok(());
        }
        domain.children.fetch_sub(1, Ordering::Relaxed);
        process
            .buffers
            .leave_to_regions(&process.segment, this.buffer_reference.stamp);
        Ok(())
    });
}
