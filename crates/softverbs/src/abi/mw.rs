//! Memory windows as C objects: `ibv_alloc_mw(3)`, `ibv_bind_mw(3)`.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::entry::{errno_of, non_null, pointer, status};
use crate::mw::Kind;
use crate::object::{Context, Pd};
use crate::qp;
use crate::sys::{Errno, room};

/// Sets `EINVAL` for an unknown type, `ENOMEM`.
pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    pointer(|| {
        // SAFETY: the caller promises a live domain, whose context is live.
        let (domain, context) = unsafe { (Pd::from_ptr(pd), (*pd).context) };
        // SAFETY: the caller promises a live domain, whose context is live.
        let process = unsafe { Context::from_ptr(context) }.live()?;
        let which = match kind {
            IBV_MW_TYPE_1 => Kind::One,
            IBV_MW_TYPE_2 => Kind::TwoB,
            _ => return Err(Errno(libc::EINVAL)),
        };
        let room = room()?;
        let number = domain.number;
        let key = process.with_windows(|windows, owner| windows.alloc(owner, which, number))?;
        domain.children.fetch_add(1, Ordering::Relaxed);
        let mw = ibv_mw {
            context,
            pd,
            rkey: key.0,
            handle: key.index() as u32,
            type_: kind,
        };
        Ok(Box::into_raw(Box::write(room, mw)))
    })
}

/// `EBUSY`: an initiator still uses the window after the timeout. The window is unbound, and the
/// call can be repeated.
pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live window, whose domain and context are live.
        let (domain, context, handle) = unsafe {
            let context = Context::from_ptr((*mw).context);
            (Pd::from_ptr((*mw).pd), context, (*mw).handle)
        };
        context
            .live()?
            .with_windows(|windows, owner| windows.free(owner, handle))?;
        domain.children.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by `Box::into_raw` in `alloc_mw`.
        drop(unsafe { Box::from_raw(mw) });
        Ok(())
    })
}

pub(super) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    errno_of(|| {
        if non_null(mw).and(non_null(bind)).is_err() {
            return libc::EINVAL;
        }
        // SAFETY: the caller promises live objects.
        unsafe { qp::bind_mw(qp, mw, bind) }
    })
}
